"""What a user reads: each warning says what, where, what follows and what to do, at a line of the user's own."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_persample import call_for_per_sample_grads, expanded_weights
from lightning_persample.errors import PerSampleWarning
from tests.capture.reference import assert_values, loop, record_of

INPUTS, LABELS = torch.randn(6, 5), torch.tensor([0, 1, 1, 2, 2, 2])
WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


def said(module: nn.Module, loss_of: Any, **options: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with expanded_weights(module, (INPUTS, LABELS), **options):
            loss_of(module(INPUTS)).backward()
    assert all(each.category is PerSampleWarning for each in caught)
    assert all(each.filename == __file__ for each in caught)
    return caught


def texts(*arguments: Any, **options: Any) -> list[str]:
    return [str(each.message).split(" at test_warning_texts.py")[0] for each in said(*arguments, **options)]


def test_a_sum_declared_as_a_mean() -> None:
    assert texts(nn.Linear(5, 3), lambda z: F.cross_entropy(z, LABELS, reduction="sum")) == [
        "The samples are weighted differently from loss_reduction, so their own gradients are off by a factor: "
        "reported is each sample's share of the batch gradient, times B where loss_reduction is 'mean'."
        "\n- the loss is a sum over the samples, but loss_reduction is 'mean': pass loss_reduction='sum'"
    ]


def test_a_mean_and_a_sum_in_one_loss() -> None:
    (both,) = said(nn.Linear(5, 3), lambda z: F.cross_entropy(z, LABELS) + F.cross_entropy(z, LABELS, reduction="sum"))
    assert re.sub(r"py:\d+", "py:LINE", str(both.message)) == (
        "The samples are weighted differently from loss_reduction, so their own gradients are off by a factor: "
        "reported is each sample's share of the batch gradient, times B where loss_reduction is 'mean'."
        "\n- `add` puts a mean and a sum over the samples together at test_warning_texts.py:LINE: take one of the two "
        "for both"
    )


def test_class_weights() -> None:
    assert texts(nn.Linear(5, 3), lambda z: F.cross_entropy(z, LABELS, weight=WEIGHTS)) == [
        "The samples are weighted differently from loss_reduction, so their own gradients are off by a factor: "
        "reported is each sample's share of the batch gradient, times B where loss_reduction is 'mean'. Give the "
        "weight of each sample in the loss as loss_reduction, a tensor of shape (B,).\n"
        "- `cross_entropy_loss` averages over targets that weigh unequally from sample to sample"
    ]


def test_batch_normalization() -> None:
    module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    assert texts(module, lambda z: F.cross_entropy(z, LABELS)) == [
        "Samples of a batch influence each other, so a sample has no gradient of its own: reported is each sample's "
        "contribution to the batch gradient. Layers and losses that keep samples apart (GroupNorm in "
        "place of BatchNorm) give it one.\n- `batch_norm` on (6, 3), (3,), (3,), (3,), (3,)"
    ]


def test_a_contrastive_loss_gets_no_advice_on_batch_normalization() -> None:
    assert texts(nn.Linear(5, 3), lambda z: F.cross_entropy(z @ z.T, torch.arange(6))) == [
        "Samples of a batch influence each other, so a sample has no gradient of its own: reported is each sample's "
        "contribution to the batch gradient. Layers and losses that keep samples apart give it one.\n"
        "- `matmul` meets two tensors of the batch with their batch axes at different places (shapes [(6, 3), (3, 6)]"
    ]


AXIS_LOST = (
    "The batch axis is lost, and values computed from there on cannot be assigned to samples: reported is each "
    "sample's contribution to the batch gradient, which is its own gradient only where the samples stay apart. Keep "
    "them along one axis, pass data that holds them along another through mark_samples, or register a rule for an op "
    "of your own."
)
LOSES_THE_AXIS: dict[str, tuple[Any, str]] = {
    "roll": (
        lambda z: z.roll(1).softmax(1).square().mean(),
        "`roll` moves entries from sample to sample (shapes [(6, 3)]",
    ),
    "cut-apart": (lambda z: z.view(3, 6).softmax(1).mean(), "`view` cuts the batch axis apart (shapes [(6, 3)]"),
    "written-across": (
        lambda z: z.index_put((torch.tensor([0, 1]), torch.tensor([0, 0])), z[:2, 0].flip(0)).softmax(1).mean(),
        "`index_put` writes samples into places of other samples, or of none (shapes [(6, 3), (2,), (2,), (2,)]",
    ),
}


@pytest.mark.parametrize("name", LOSES_THE_AXIS)
def test_an_axis_that_is_lost_is_not_said_to_be_influence(name: str) -> None:
    loss_of, cause = LOSES_THE_AXIS[name]
    assert texts(nn.Linear(5, 3), loss_of) == [f"{AXIS_LOST}\n- {cause}"]


def test_nothing_is_said_of_a_lost_axis_where_samples_stay_apart() -> None:
    module = nn.Linear(5, 3, dtype=torch.float64)

    def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return m(x).roll(1).exp().mean()

    record = record_of(module, loss, INPUTS.double())
    assert (record.axis_lost, record.mixing, record.weighting) == ((), (), ())
    assert_values(record, loop(module, loss, (INPUTS.double(),)))


def test_a_lost_axis_and_batch_normalization_are_two_texts() -> None:
    module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    influence, axis_lost = texts(module, lambda z: z.roll(1).square().mean())
    assert "(GroupNorm in place of BatchNorm) give it one.\n- `batch_norm` on (6, 3)" in influence
    assert axis_lost.startswith(AXIS_LOST)


def test_where_nothing_is_reported_nothing_is_said_of_the_values() -> None:
    (text,) = texts(nn.Linear(5, 3), lambda z: F.cross_entropy(z, LABELS), batch_size=4)
    assert text.startswith("Per-sample gradients are missing for 2 parameters")


def test_a_loss_that_is_only_looked_at_is_not_spoken_of() -> None:
    def loss(z: torch.Tensor) -> torch.Tensor:
        F.cross_entropy(z, LABELS, weight=WEIGHTS)
        F.cross_entropy(z, torch.where(LABELS == 2, -100, LABELS))
        z.std()
        return F.cross_entropy(z, LABELS)

    assert texts(nn.Linear(5, 3), loss) == []


def test_door_one_warns_at_the_users_line_too() -> None:
    module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call_for_per_sample_grads(module)(INPUTS).square().sum().backward()
    assert [each.filename for each in caught] == [__file__]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width + 1), nn.BatchNorm1d(width + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


def test_what_many_layers_have_in_common_is_said_once_and_the_loss_first() -> None:
    (both,) = said(
        nn.Sequential(*(Block(width) for width in range(5, 17))), lambda z: F.cross_entropy(z @ z.T, torch.arange(6))
    )
    _, *lines = re.sub(r"py:\d+", "py:LINE", str(both.message)).split("\n")
    assert lines == [
        "- `matmul` meets two tensors of the batch with their batch axes at different places (shapes [(6, 17), "
        "(17, 6)] at test_warning_texts.py:LINE)",
        "- `batch_norm` on (6, 6), (6,), (6,), (6,), (6,) at test_warning_texts.py:LINE with `0.norm.bias`, "
        "`0.norm.weight` normalises with the statistics of the whole batch (and 11 more such calls)",
    ]


class Mixed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(x * (self.scale * x.std(0)), (0, 1))


def test_one_reason_of_many_layers_is_said_once() -> None:
    net = nn.Sequential(*(Mixed(width) for width in range(5, 17)))
    (only,) = said(net, lambda z: z.square().sum(-1).mean())
    start, *lines = re.sub(r"py:\d+", "py:LINE", str(only.message)).split("\n")
    assert start == "Per-sample gradients are missing for 12 parameters, which the reported norms leave out:"
    (line,) = lines
    assert line.startswith(
        "- `0.scale`, `1.scale`, `2.scale`, `3.scale`, `4.scale`, `5.scale`, `6.scale`, `7.scale` and 4 more: `mul` on "
        "(5,), (5,) at test_warning_texts.py:LINE with `0.scale`: the batch axis cannot be followed here: `std` "
    )
    assert line.endswith(" (and 11 more such calls)")


def test_entries_of_one_sample_that_are_added_to_others_are_influence() -> None:
    """Cut apart and repeated, all of them are of the first sample."""
    found = texts(nn.Linear(5, 3), lambda z: (z + z.view(9, 2).repeat(1, 9).view(54, 3)[:6]).square().mean())
    assert found == [
        "Samples of a batch influence each other, so a sample has no gradient of its own: reported is each sample's "
        "contribution to the batch gradient. Layers and losses that keep samples apart give it one.\n"
        "- `add` combines different samples"
    ]


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_recurrent_layer_along_another_axis_than_the_batch_names_both_remedies(batch_first: bool) -> None:
    module, dim = nn.GRU(3, 2, batch_first=batch_first), int(batch_first)
    x = torch.randn(4, 4, 3)
    with pytest.warns(PerSampleWarning) as caught, expanded_weights(module, x, batch_dim=dim):
        module(x)[0].square().mean().backward()
    expected = (
        f": `gru` takes axis {1 - dim} for the samples, which lie along axis {dim}: give it "
        f"batch_first={not batch_first}, or pass batch_dim={1 - dim} where the batch has them along axis {1 - dim} "
        "(shapes [(4, 4, 3), (1, 4, 2), "
    )
    (text,) = (str(each.message) for each in caught)
    assert expected in text
    assert "up to here" not in text


def test_a_layer_in_several_reentrant_checkpoints_names_the_remedy() -> None:
    module, x = nn.Linear(5, 3), torch.randn(6, 5, requires_grad=True)

    def run(*, use_reentrant: bool) -> None:
        parts = [checkpoint(module, part, use_reentrant=use_reentrant) for part in x.split(2)]
        torch.cat(parts).square().mean().backward()

    with pytest.warns(PerSampleWarning) as caught, expanded_weights(module, x):
        run(use_reentrant=True)
    (text,) = (str(each.message) for each in caught)
    assert text.endswith("(activation checkpointing); use checkpoint(..., use_reentrant=False)")
    with expanded_weights(module, x, unsupported="error") as capture:
        run(use_reentrant=False)
    assert capture.record.coverage == 1.0
