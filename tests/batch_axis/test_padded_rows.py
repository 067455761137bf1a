"""Rows with owners that are padded in the step, and buffers that have room for more rows than there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence

from tests.batch_axis.test_owned_rows import assert_exact, captured, loop

pytestmark = pytest.mark.usefixtures("double_precision")

D, H = 3, 4
Batch = dict[str, Tensor]


def sequences(lengths: tuple[int, ...], seed: int = 0) -> Batch:
    torch.manual_seed(seed)
    return {
        "x": torch.randn(sum(lengths), D),
        "owner": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        "lengths": torch.tensor(lengths),
        "y": torch.randn(len(lengths), H),
    }


def single(batch: Batch, sample: int) -> Batch:
    own = batch["owner"] == sample
    rest = {name: batch[name][sample : sample + 1] for name in ("lengths", "y")}
    return {"x": batch["x"][own], "owner": torch.zeros(int(own.sum()), dtype=torch.int64), **rest}


def layout(batch: Batch) -> dict[Tensor, Any]:
    return {batch["x"]: batch["owner"], batch["owner"]: batch["owner"]}


def dense(h: Tensor, batch: Batch, spare: int = 1) -> tuple[Tensor, Tensor]:
    """As `to_dense_batch` of torch_geometric: each sample's rows to its part of a buffer, which has rows to spare."""
    size, most = len(batch["lengths"]), int(batch["lengths"].max())
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), batch["lengths"].cumsum(0)])
    place = torch.arange(len(h)) - starts[batch["owner"]] + batch["owner"] * most
    rows = torch.zeros(()).repeat(size * most + spare, h.size(1))
    rows[place] = h
    mask = torch.zeros(size * most + spare, dtype=torch.bool)
    mask[place] = 1
    return rows[: size * most].view(size, most, -1), mask[: size * most].view(size, most)


def split(h: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    rows = pad_sequence(h.split(batch["lengths"].tolist()), batch_first=True)
    return rows, torch.arange(rows.size(1)) < batch["lengths"][:, None]


def split_to_the_left(h: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    rows = pad_sequence(h.split(batch["lengths"].tolist()), True, 7.0, "left")
    return rows, torch.arange(rows.size(1)).flip(0) < batch["lengths"][:, None]


def steps_first(h: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    rows = pad_sequence(list(h.split(batch["lengths"].tolist())), padding_value=-1.0).transpose(0, 1)
    return rows, torch.arange(rows.size(1)) < batch["lengths"][:, None]


def without_a_spare_row(h: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return dense(h, batch, spare=0)


PADDED = {
    "dense": dense,
    "no row to spare": without_a_spare_row,
    "split": split,
    "to the left": split_to_the_left,
    "steps first": steps_first,
}


def attention(module: Any, rows: Tensor, mask: Tensor) -> Tensor:
    score = (module.query(rows) @ module.key(rows).mT).masked_fill(~mask[:, None], -torch.inf)
    return ((score.softmax(-1) @ rows) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def fused_attention(module: Any, rows: Tensor, mask: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(module.query(rows), module.key(rows), rows, mask[:, None])
    return (out * mask[..., None]).sum(1)


def rows_again(module: Any, rows: Tensor, mask: Tensor) -> Tensor:
    own = module.query(rows[mask]).tanh()
    owner = torch.arange(len(mask)).repeat_interleave(mask.sum(1))
    return torch.zeros(len(mask), H).index_add(0, owner, own)


POOLED = {
    "mean": lambda module, rows, mask: (module.query(rows).tanh() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True),
    "largest": lambda module, rows, mask: module.query(rows).masked_fill(~mask[..., None], -torch.inf).amax(1),
    "attention": attention,
    "fused attention": fused_attention,
    "rows again": rows_again,
}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(D, H), nn.Linear(H, H)
        self.query, self.key, self.rnn = nn.Linear(H, H), nn.Linear(H, H), nn.GRU(H, H, batch_first=True)


def assert_as_a_loop(module: Any, batch: Batch, loss: Callable[[Batch], Tensor]) -> None:
    size = len(batch["y"])
    record = captured(module, batch, lambda: loss(batch), batch_layout=layout, batch_size=size)
    expected = loop(module, loss, [single(batch, sample) for sample in range(size)])
    assert_exact(record, {name: grads for name, grads in expected.items() if grads.any()})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("pooled", POOLED)
@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("lengths", [(3, 5, 2, 4), (1, 1, 1), (2, 2, 2), (1, 4)], ids=str)
def test_padded_rows_are_their_samples(lengths: tuple[int, ...], name: str, pooled: str) -> None:
    module = Network()

    def loss(batch: Batch) -> Tensor:
        rows, mask = PADDED[name](module.first(batch["x"]).tanh(), batch)
        return F.mse_loss(module.head(POOLED[pooled](module, rows, mask)), batch["y"])

    for seed in range(2):
        assert_as_a_loop(module, sequences(lengths, seed), loss)


@pytest.mark.parametrize("name", ["dense", "split"])
def test_a_recurrence_over_packed_rows_is_each_samples_own(name: str) -> None:
    module = Network()

    def loss(batch: Batch) -> Tensor:
        rows, _ = PADDED[name](module.first(batch["x"]).tanh(), batch)
        packed = pack_padded_sequence(rows, batch["lengths"], batch_first=True, enforce_sorted=False)
        return F.mse_loss(module.head(module.rnn(packed)[1][-1]), batch["y"])

    assert_as_a_loop(module, sequences((3, 5, 2, 4)), loss)


def assert_padding_is_named(module: nn.Module, batch: Batch, loss: Callable[[Batch], Tensor]) -> None:
    record = captured(module, batch, lambda: loss(batch), batch_layout=layout, batch_size=4, unsupported="ignore")
    assert "leaves room for rows that a sample of the batch does not have" in record.axis_lost[0]


@pytest.mark.parametrize("name", ["dense", "no row to spare", "split", "steps first"])
def test_padding_that_has_a_part_in_the_loss_is_named(name: str) -> None:
    module, batch = Network(), sequences((3, 5, 2, 4))

    def loss(batch: Batch, masked: bool) -> Tensor:
        rows, mask = PADDED[name](module.first(batch["x"]).tanh(), batch)
        out = module.rnn(rows)[0]
        out = out[torch.arange(len(mask)), mask.sum(1) - 1] if masked else out[:, -1]
        return F.mse_loss(module.head(out), batch["y"])

    options = {"batch_layout": layout, "batch_size": 4, "unsupported": "ignore"}
    record = captured(module, batch, lambda: loss(batch, masked=False), **options)
    (text,) = record.axis_lost
    assert "leaves room for rows that a sample of the batch does not have" in text
    assert "and the loss takes them in: leave them out, by a mask of the rows" in text
    assert_as_a_loop(module, batch, lambda batch: loss(batch, masked=True))
    equal = sequences((3, 3, 3, 3))
    record = captured(module, equal, lambda: loss(equal, masked=False), **options)
    assert (record.axis_lost, record.mixing, record.coverage) == ((), (), 1.0)


def test_rows_that_get_no_message_are_no_padding_where_samples_have_as_many_rows() -> None:
    module, batch = Network(), sequences((3, 3, 3))
    batch["edges"] = torch.tensor([[0, 1, 4, 6], [1, 0, 5, 7]])

    def loss(batch: Batch) -> Tensor:
        h = module.first(batch["x"])
        source, target = batch["edges"]
        messages = torch.zeros(len(h), H).index_add(0, target, h[source])
        pooled = torch.zeros(len(batch["y"]), H).index_add(0, batch["owner"], module.query(messages).tanh())
        return F.mse_loss(module.head(pooled), batch["y"])

    def with_edges(batch: Batch) -> dict[Tensor, Any]:
        return {**layout(batch), batch["edges"]: (1, torch.tensor([0, 0, 1, 2]))}

    record = captured(module, batch, lambda: loss(batch), batch_layout=with_edges, batch_size=3)
    edges = [torch.tensor([[0, 1], [1, 0]]), torch.tensor([[1], [2]]), torch.tensor([[0], [1]])]
    alone = [{**single(batch, sample), "edges": edges[sample]} for sample in range(3)]
    assert_exact(record, {name: grads for name, grads in loop(module, loss, alone).items() if grads.any()})


@pytest.mark.parametrize("pooled", ["sum", "mean", "both", "sum of features", "mean of squares", "masked", "loss"])
def test_zeros_add_nothing_to_a_sum_and_count_in_a_mean(pooled: str) -> None:
    module, batch = Network(), sequences((3, 5, 2, 4))

    def loss(batch: Batch) -> Tensor:
        rows, mask = split(module.first(batch["x"]).tanh(), batch)
        out = {
            "sum": lambda: rows.sum(1),
            "mean": lambda: rows.mean(1),
            "both": lambda: rows.sum(1) + rows.mean(1),
            "mean of squares": lambda: rows.square().mean(1),
            "masked": lambda: (rows * mask[..., None]).mean(1),
            "loss": lambda: F.mse_loss(rows, torch.zeros_like(rows)).expand(len(rows), H),
            "sum of features": lambda: rows.sum(-1).exp().sum(1, keepdim=True).expand(-1, H),
        }[pooled]()
        return F.mse_loss(module.head(out), batch["y"])

    if pooled == "sum":
        assert_as_a_loop(module, batch, loss)
        return
    assert_padding_is_named(module, batch, loss)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("name", ["dense", "no row to spare", "split"])
def test_a_sum_over_what_attention_gives_has_a_term_for_each_row(name: str, masked: bool) -> None:
    """To one key alone attention gives its value, whatever the query is: padding that has no gradient counts."""
    module, batch = Network(), sequences((1, 2, 1, 2))

    def loss(batch: Batch) -> Tensor:
        rows, mask = PADDED[name](module.first(batch["x"]).tanh(), batch)
        score = (module.query(rows) @ module.key(rows).mT).masked_fill(~mask[:, None], -torch.inf)
        out = score.softmax(-1) @ rows
        return F.mse_loss(module.head((out * mask[..., None] if masked else out).sum(1)), batch["y"])

    if masked:
        assert_as_a_loop(module, batch, loss)
        return
    assert_padding_is_named(module, batch, loss)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("pooled", ["sum", "last", "mean"])
def test_a_packed_sequence_that_is_padded(pooled: str, batch_first: bool) -> None:
    module, rows = Network(), [torch.randn(length, D) for length in (3, 5, 2)]

    def loss(packed: PackedSequence) -> Tensor:
        hidden = module.rnn(packed._replace(data=module.first(packed.data)))[0]
        out, lengths = pad_packed_sequence(hidden, batch_first=batch_first)
        axis = 1 if batch_first else 0
        if pooled == "last":
            out = out if batch_first else out.transpose(0, 1)
            return module.head(out[torch.arange(len(lengths)), lengths - 1]).square().mean()
        return module.head(out.sum(axis) if pooled == "sum" else out.mean(axis)).square().mean()

    packed = pack_sequence(rows, enforce_sorted=False)
    record = captured(module, packed, lambda: loss(packed), unsupported="ignore")
    if pooled == "mean":
        assert "`_pad_packed_sequence` leaves room for rows" in record.axis_lost[0]
    else:
        expected = loop(module, loss, [pack_sequence([each]) for each in rows])
        assert_exact(record, {name: grads for name, grads in expected.items() if grads.any()})


@pytest.mark.parametrize("total_length", [None, 6])
def test_the_lengths_that_padding_gives_are_the_samples(total_length: int | None) -> None:
    module, batch = Network(), (torch.randn(3, 5, D), torch.tensor([3, 5, 2]))

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        packed = pack_padded_sequence(module.first(batch[0]), batch[1], batch_first=True, enforce_sorted=False)
        rows, lengths = pad_packed_sequence(module.rnn(packed)[0], batch_first=True, total_length=total_length)
        mask = torch.arange(rows.size(1)) < lengths[:, None]
        return module.head((rows * mask[..., None]).sum(1) / lengths[:, None]).square().mean()

    record = captured(module, batch, lambda: loss(batch))
    expected = loop(module, loss, [(batch[0][i : i + 1], batch[1][i : i + 1]) for i in range(3)])
    assert_exact(record, {name: grads for name, grads in expected.items() if grads.any()})


@pytest.mark.parametrize("of", [torch.amin, torch.amax])
def test_lengths_that_are_one_number_of_the_batch_are_said(of: Callable[[Tensor], Tensor]) -> None:
    module, batch = Network(), (torch.randn(3, 5, D), torch.tensor([3, 4, 2]))

    def loss() -> Tensor:
        lengths = of(batch[1]).expand(3)
        packed = pack_padded_sequence(module.first(batch[0]), lengths, batch_first=True)
        return module.head(module.rnn(packed)[1][-1]).square().mean()

    record = captured(module, batch, loss, unsupported="ignore")
    (text,) = record.mixing
    assert "`_pack_padded_sequence` combines different samples at test_padded_rows.py" in text


def test_a_sample_without_rows_is_padded_alone() -> None:
    module = Network()

    def loss(batch: Batch) -> Tensor:
        rows, mask = split(module.first(batch["x"]).tanh(), batch)
        return F.mse_loss(module.head((rows * mask[..., None]).sum(1)), batch["y"])

    assert_as_a_loop(module, sequences((3, 0, 2)), loss)


def test_parts_of_several_samples_are_not_padded_as_one() -> None:
    module, batch = Network(), sequences((3, 5, 2, 4))

    def loss() -> Tensor:
        rows = pad_sequence(module.first(batch["x"]).split([4, 6, 4]), batch_first=True)
        return module.head(rows).square().mean()

    record = captured(module, batch, loss, batch_layout=layout, batch_size=4, unsupported="ignore")
    assert "stacks rows of which it is not known that each part is of one sample" in record.unsupported["head.weight"]


def test_fields_that_hold_every_sample_are_padded_along_another_axis() -> None:
    module = Network()
    parts = [torch.randn(steps, 4, D) for steps in (2, 3)]

    def loss(parts: list[Tensor]) -> Tensor:
        rows = pad_sequence(parts)
        return module.head(module.first(rows).tanh()).square().mean((0, 1, 3)).mean()

    record = captured(module, tuple(parts), lambda: loss(parts), batch_dim=1)
    expected = loop(module, loss, [[part[:, sample : sample + 1] for part in parts] for sample in range(4)])
    grads = {name: grad for name, grad in expected.items() if grad.any()}
    for name, grad in grads.items():
        torch.testing.assert_close(record.grad_samples[name], grad)


@pytest.mark.parametrize("place", ["first", "last", "between"])
def test_no_rows_of_a_weight_beside_those_of_the_batch(place: str) -> None:
    module, batch = Network(), {"x": torch.randn(4, D), "y": torch.randn(4, H)}
    module.prompt = nn.Parameter(torch.randn(3, D))

    def loss(batch: Batch) -> Tensor:
        x, nothing = batch["x"], module.prompt[:0]
        parts = {"first": [nothing, x], "last": [x, nothing], "between": [nothing, x, nothing]}[place]
        return F.mse_loss(module.head(module.first(torch.cat(parts)).tanh()), batch["y"])

    record = captured(module, batch, lambda: loss(batch))
    alone = [{name: each[sample : sample + 1] for name, each in batch.items()} for sample in range(4)]
    assert_exact(record, {name: grad for name, grad in loop(module, loss, alone).items() if name in record.names})
    assert set(record.names) >= {"first.weight", "head.weight"}
    assert record.unsupported == {}
    rows = captured(module, batch, lambda: F.mse_loss(module.head(module.first(
        torch.cat([module.prompt[:1], batch["x"]])[1:]
    ).tanh()), batch["y"]), unsupported="ignore")  # fmt: skip
    assert "puts rows of the batch beside rows that belong to no sample" in rows.unsupported["prompt"]
