"""A batch is cut into its samples, whatever holds its tensors, and nothing done to a part reaches the batch."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from lightning_persample.errors import OptionError, PerSampleError
from lightning_persample.reference.samples import Samples, gradients_of, own_loss, tensors_of, with_tensors


class Pair(NamedTuple):
    inputs: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Frozen:
    inputs: Tensor
    name: str


def second(batch: Any, batch_size: int = 3, batch_dim: int = 0) -> Any:
    return Samples(batch, batch_size, batch_dim, is_declared=True).take(1, 2)


def test_containers_keep_their_kind():
    x, y = torch.randn(3, 4), torch.arange(3)
    whole = {
        "pair": Pair(x, y),
        "user": UserDict(x=x),
        "frozen": Frozen(x, "a"),
        "object": SimpleNamespace(x=x),
        "n": 3,
    }
    one = second(whole)
    assert isinstance(one["pair"], Pair)
    assert isinstance(one["user"], UserDict)
    assert (one["frozen"].name, one["n"]) == ("a", 3)
    for found in (one["pair"].inputs, one["user"]["x"], one["frozen"].inputs, one["object"].x):
        assert torch.equal(found, x[1:2])
    assert torch.equal(one["pair"].labels, y[1:2])
    assert whole["object"].x is x
    assert whole["user"]["x"] is x


def test_what_is_done_to_a_part_does_not_reach_the_batch():
    batch = [torch.zeros(3, 2), torch.tensor(1.0), torch.zeros(5)]
    one = second(batch)
    for tensor in one:
        tensor += 1
    one.append(None)
    assert len(batch) == 3
    assert float(batch[1]) == 1.0
    assert not batch[0].any()
    assert not batch[2].any()


def test_a_tensor_that_needs_gradient_still_does():
    x = torch.randn(3, 2, requires_grad=True)
    one = second(x)
    assert one.requires_grad
    assert one.is_leaf


def test_several_rows_of_a_sample_stay_together():
    rows = torch.arange(6)
    assert second(rows).tolist() == [2, 3]  # sample-major
    assert second(rows[None], batch_dim=1).tolist() == [[1, 4]]  # time-major
    assert Samples(rows, 3).take(0, 2).tolist() == [0, 1, 2, 3]


def test_what_holds_no_samples_is_kept_whole():
    weights, number = torch.randn(4), torch.tensor(2.0)
    one = second((torch.randn(3, 2), weights, number, "text", None, torch.Size([1, 2, 3])))
    assert torch.equal(one[1], weights)
    assert one[2:] == (number, "text", None, torch.Size([1, 2, 3]))


@pytest.mark.parametrize(
    "items",
    [
        ["a", "b", "c"],
        ("a", "b", "c"),
        [1, 2, 3],
        [torch.randn(6, 2), torch.randn(3, 2), torch.randn(5, 2)],
        [{"box": torch.randn(2, 4)}, {"box": torch.randn(1, 4)}, {"box": torch.randn(0, 4)}],
    ],
    ids=["list of texts", "tuple of texts", "numbers", "unequal sizes", "dicts"],
)
def test_one_item_per_sample_is_cut(items):
    one = second({"x": torch.randn(3, 2), "items": items})["items"]
    assert type(one) is type(items)
    assert len(one) == 1
    found, expected = tensors_of(one), tensors_of(items[1])
    assert bool(expected) or one[0] == items[1]
    for tensor, original in zip(found, expected, strict=True):
        assert torch.equal(tensor, original)
        assert tensor is not original
    assert Samples({"items": items}, 3, is_declared=True).are_ragged()


def test_samples_with_as_many_fields_as_there_are_samples():
    batch = [(torch.randn(4), torch.tensor(place)) for place in range(2)]
    ((x, y),) = second(batch, batch_size=2)
    assert torch.equal(x, batch[1][0])
    assert int(y) == 1
    assert Samples(batch, 2, is_declared=True).are_ragged()


def test_fields_are_no_samples():
    fields = (torch.randn(2, 4), torch.randn(2), (torch.randn(2, 1), torch.randn(2, 3)))
    one = second(fields, batch_size=2)
    assert [tuple(tensor.shape) for tensor in tensors_of(one)] == [(1, 4), (1,), (1, 1), (1, 3)]
    assert not Samples(fields, 2, is_declared=True).are_ragged()
    lists = ([torch.randn(5, 1), torch.randn(7, 1)], [{"a": torch.tensor(0)}, {"a": torch.tensor(1)}])
    images, targets = second(lists, batch_size=2)
    assert torch.equal(images[0], lists[0][1])
    assert [int(target["a"]) for target in targets] == [1]


def test_a_batch_that_is_a_list_of_samples_is_cut_itself():
    samples = [(torch.randn(4, 2), torch.tensor(number)) for number in range(3)]
    ((inputs, label),) = second(samples)
    assert torch.equal(inputs, samples[1][0])
    assert int(label) == 1


def test_a_packed_sequence_is_cut():
    sequences = [torch.randn(length, 2) for length in (2, 4, 3)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    one, lengths = pad_packed_sequence(second((packed, torch.randn(3)))[0], batch_first=True)
    assert torch.equal(one[0], sequences[1])
    assert lengths.tolist() == [4]
    assert Samples(packed, 3, is_declared=True).are_ragged()


def test_a_batch_that_holds_itself_is_no_endless_loop():
    batch: dict[str, Any] = {"x": torch.randn(3, 2)}
    batch["itself"] = batch
    assert second(batch)["x"].shape == (1, 2)


def test_tensors_go_back_where_they_were():
    batch = {"a": (torch.zeros(1), "text"), "b": [torch.ones(2)]}
    again = with_tensors(batch, [tensor + 1 for tensor in tensors_of(batch)])
    assert [tensor.tolist() for tensor in tensors_of(again)] == [[1.0], [2.0, 2.0]]
    assert again["a"][1] == "text"


def test_a_samples_own_loss_is_without_its_weight():
    loss = torch.tensor([6.0])
    assert float(own_loss({"loss": loss}, None, "mean")) == 6.0
    assert float(own_loss(loss, None, lambda outputs, batch: torch.tensor([3.0]))) == 2.0


@pytest.mark.parametrize(
    ("outputs", "found"), [(None, "NoneType"), ({"a": 1}, "NoneType"), (torch.zeros(2), r"a tensor of shape \(2,\)")]
)
def test_a_loss_that_is_not_one_number_is_said(outputs, found):
    with pytest.raises(PerSampleError, match=f"^the loss of a batch is {found}, but must be a tensor with one entry"):
        own_loss(outputs, None, "sum")


@pytest.mark.parametrize(("weight", "found"), [(1.0, "float"), (torch.ones(2), r"a tensor of shape \(2,\)")])
def test_a_weight_of_the_wrong_kind_is_said(weight, found):
    with pytest.raises(OptionError, match=f"^loss_reduction returned {found} for a batch of one sample; allowed is a"):
        own_loss(torch.ones(()), None, lambda outputs, batch: weight)


def test_a_list_of_samples_of_which_one_has_as_many_rows_as_there_are_samples() -> None:
    batch = [torch.randn(rows, 5) for rows in (2, 3, 1, 4)]
    for place, sample in enumerate(batch):
        (taken,) = Samples(batch, 4).take(place, place + 1)
        assert torch.equal(taken, sample)


def test_only_a_graph_that_was_there_before_is_kept() -> None:
    weight = torch.ones(3, requires_grad=True)
    older = weight.exp()
    first = weight.clone()
    newer = weight.exp()
    for kept in (older, newer):
        gradient = gradients_of((2 * kept).sum(), {"weight": weight}, first)["weight"]
        torch.testing.assert_close(gradient, 2 * kept)
    older.sum().backward()
    with pytest.raises(RuntimeError, match="graph a second time"):
        newer.sum().backward()
