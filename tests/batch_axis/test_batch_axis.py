"""The batch axis is followed through every change of shape: entries labelled with their sample must come out where the
layout says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_persample.batch_axis.axis import BatchAxis, Lost, batch_first, reshaped, row_owners
from lightning_persample.capture.annotations import Constant
from lightning_persample.capture.mode import expanded_weights

B = 3
Change = Callable[[Tensor], Tensor]

KEPT: dict[str, Change] = {
    "transpose": lambda x: x.transpose(0, 2),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "movedim": lambda x: x.movedim(0, -1),
    "moveaxis-several": lambda x: x.moveaxis((0, 1), (2, 0)),
    "T-of-matrix": lambda x: x[:, 0].T,
    "mT": lambda x: x.mT,
    "t": lambda x: x[:, 0].t(),
    "reshape-merge": lambda x: x.reshape(12, 2),
    "view-merge-all-but-last": lambda x: x.view(-1, 2),
    "flatten": lambda x: x.flatten(1),
    "flatten-batch": lambda x: x.flatten(0, 1),
    "flatten-everything": lambda x: x.flatten(),
    "flatten-and-back": lambda x: x.flatten(0, 1).view(3, 2, 4),
    "time-major-flattened": lambda x: x.transpose(0, 1).reshape(-1, 2),
    "time-major-flattened-and-back": lambda x: x.transpose(0, 1).reshape(-1, 2).view(4, 3, 2),
    "heads-into-batch": lambda x: x.transpose(0, 1).reshape(4, 6, 1).transpose(0, 1),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "squeeze": lambda x: x.unsqueeze(0).unsqueeze(2).squeeze(0),
    "squeeze-all": lambda x: x.unsqueeze(0).unsqueeze(2).squeeze(),
    "unsqueeze-end": lambda x: x.unsqueeze(-1),
    "expand": lambda x: x.expand(5, -1, -1, -1),
    "broadcast-to": lambda x: x.broadcast_to(5, 3, 4, 2),
    "repeat": lambda x: x.repeat(2, 1, 1),
    "tile": lambda x: x.tile(2, 2),
    "repeat-interleave": lambda x: x.repeat_interleave(2, 0),
    "repeat-interleave-flat": lambda x: x.repeat_interleave(2),
    "cat-along-batch": lambda x: torch.cat([x, x]),
    "cat-other": lambda x: torch.cat([x, x], 1),
    "stack-before": lambda x: torch.stack([x, x]),
    "stack-after": lambda x: torch.stack([x, x], 1),
    "chunk-of-repeats": lambda x: torch.cat([x, x]).chunk(2)[1],
    "split-other": lambda x: x.split(3, 1)[1],
    "unbind-other": lambda x: x.unbind(1)[2],
    "select": lambda x: x.select(2, 1),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "index-select": lambda x: x.index_select(1, torch.tensor([3, 0])),
    "gather": lambda x: x.gather(1, (x[:, :2] * 0).long()),
    "getitem-slice": lambda x: x[:, 1:3],
    "getitem-integer": lambda x: x[:, 2],
    "getitem-ellipsis": lambda x: x[..., 0],
    "getitem-none": lambda x: x[:, None],
    "getitem-leading-none": lambda x: x[None],
    "getitem-negative": lambda x: x[:, -1:],
    "getitem-list": lambda x: x[:, [3, 1]],
    "getitem-tensor-second": lambda x: x[:, :, torch.tensor([1, 0, 1])],
    "getitem-apart": lambda x: x[:, torch.tensor([0, 1])][:, torch.tensor([0]), :],
    "getitem-first-rows-of-repeats": lambda x: torch.cat([x, x])[:3],
    "getitem-every-sample": lambda x: x[torch.arange(3), (x[:, 0, 0] * 0).long()],
    "flip-other": lambda x: x.flip(1),
    "roll-other": lambda x: x.roll(1, 2),
    "sort-other": lambda x: x.sort(1).values,
    "topk-other": lambda x: x.topk(2, 1).values,
    "amax-other": lambda x: x.amax(1),
    "max-keepdim": lambda x: x.max(2, keepdim=True).values,
    "mean-two": lambda x: x.mean((1, 2)),
    "cumulative-max": lambda x: x.cummax(1).values,
    "pad": lambda x: nn.functional.pad(x, (0, 0, 1, 1), mode="replicate"),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "arithmetic": lambda x: (x + torch.zeros(5, 1, 1, 1)) * torch.ones(2),
    "where": lambda x: torch.where(torch.ones(4, 1, dtype=torch.bool), x, 0.0),
    "matmul-rows": lambda x: x @ torch.full((2, 2), 0.5),
    "matmul-columns": lambda x: torch.full((1, 2), 0.5) @ x[:, 0].T,
    "einsum": lambda x: torch.einsum("btd,d->tb", x, torch.full((2,), 0.5)),
    "written-into-zeros": lambda x: _written(x),
    "half": lambda x: x[:2],
    "every-other": lambda x: x[::2],
    "split-unequally": lambda x: x.split(2)[1],
    "shuffled": lambda x: x[torch.tensor([2, 0, 1])],
    "shuffled-and-back": lambda x: x[torch.tensor([2, 0, 1])][torch.tensor([1, 2, 0])],
    "index-select-repeats": lambda x: x.index_select(0, torch.tensor([2, 2, 0, 1, 1])),
    "shuffled-after-flattening": lambda x: x.flatten(0, 1)[torch.randperm(12)],
    "mask-of-samples": lambda x: x[torch.tensor([True, False, True])],
    "mask-of-tokens": lambda x: x[_mask()],
    "mask-of-tokens-flattened": lambda x: x.flatten(0, 1)[_mask().flatten()].view(-1, 1, 2),
    "mask-of-entries": lambda x: x[x.isfinite() & _mask()[..., None]],
    "mask-of-other-axes": lambda x: x[:, torch.tensor([True, False, True, True])],
    "masked-select": lambda x: x.masked_select(x > -1),
    "written-back-by-mask": lambda x: _written_by_mask(x),
    "last-token-of-each": lambda x: x[torch.arange(3), torch.tensor([1, 3, 0])],
    "tokens-of-chosen-samples": lambda x: x[torch.tensor([2, 0]), torch.tensor([1, 3])],
    "flipped-along-nothing": lambda x: x.flip(()),
    "read-from-memory-in-one-axis": lambda x: x.as_strided((3,), (8,), 1),
    "read-from-memory-in-two-axes": lambda x: x.as_strided((4, 3), (2, 8)),
    "flipped": lambda x: x.flip(0),
    "rolled": lambda x: x.roll(1, 0),
    "repeated-unequally": lambda x: x.repeat_interleave(torch.tensor([2, 0, 1]), 0),
    "joined-parts": lambda x: torch.cat([x[1:], x[:1]]),
    "picked-then-heads": lambda x: x[torch.tensor([2, 0])].transpose(0, 1).reshape(4, 4, 1),
}
LOST: dict[str, tuple[Change, str]] = {
    "reduced": (lambda x: x.mean(0), "`mean` reduces over the batch axis"),
    "single-sample": (
        lambda x: x[1],
        "`getitem` takes single samples out of the batch; keep the axis, as x[i:i+1] does",
    ),
    "unbound": (
        lambda x: x.unbind()[0],
        "`unbind` takes single samples out of the batch; keep the axis, as x[i:i+1] does",
    ),
    "cut-apart": (lambda x: x.reshape(2, 12), "`reshape` cuts the batch axis apart"),
    "sorted": (lambda x: x.sort(0).values, "`sort` works along the batch axis"),
    "pairs": (
        lambda x: x[:, None] - x[None],
        "`sub` meets two tensors of the batch with their batch axes at different",
    ),
    "products-of-pairs": (lambda x: x[:, 0] @ x[:, 0].T, "`matmul` meets two tensors of the batch"),
    "contracted": (lambda x: x[:, 0].T @ x[:, 0], "`matmul` reduces over the batch axis"),
    "softmax-over-batch": (lambda x: x.softmax(0), "`softmax` works along the batch axis"),
    "cumulative-over-batch": (lambda x: x.cumsum(0), "`cumsum` works along the batch axis"),
    "joined-with-strangers": (
        lambda x: torch.cat([x, torch.zeros(1, 4, 2)]),
        "`cat` puts rows of the batch beside rows",
    ),
    "differences": (lambda x: torch.cdist(x[:, 0], x[:, 0]), "`cdist` gives a sample another value"),
    "rolled-over-batch-by-unknown-op": (
        lambda x: x.rot90(2, (0, 1)),
        "`rot90` gives a sample another value",
    ),
    "split-where-the-batch-says": (
        lambda x: torch.zeros(5, 2).tensor_split(x[:, 0, 0].abs().long())[0],
        "`tensor_split` splits at places that numbers of the batch say",
    ),
    "split-where-another-sample-says": (
        lambda x: x.tensor_split(x[:, 0, 0].abs().long(), 1)[0],
        "`tensor_split` splits at places that numbers of the batch say",
    ),
    "written-by-indices-that-are-clamped": (
        lambda x: torch._unsafe_masked_index_put_accumulate(
            torch.zeros(3, 2), torch.ones(3, 2).bool(), [x[:, :1, 0].long() * 0, torch.arange(2)[None]], x[:, 0]
        ),
        "`_unsafe_masked_index_put_accumulate` gathers entries across the batch",
    ),
    "transformed-over-batch": (lambda x: torch.fft.fft(x, dim=0).real, "`fft_fft` works along the batch axis"),
}


def _written(x: Tensor) -> Tensor:
    room = x.new_zeros(3, 5, 2)
    room[:, :] = x[:, :1]
    return room


def _mask() -> Tensor:
    return torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.bool)


def _written_by_mask(x: Tensor) -> Tensor:
    room = x.clone()
    room[_mask()] = x[_mask()] * 1.0
    return room


def _marked(change: Change, batch: Tensor) -> tuple[Tensor, object]:
    with expanded_weights(nn.Linear(1, 1), batch) as capture:
        result = change(batch)
        return result, capture._dispatcher.marks.get(result)


def _labelled() -> Tensor:
    """(B, 4, 2) with every entry the number of its sample."""
    return torch.arange(float(B)).view(B, 1, 1).repeat(1, 4, 2)


@pytest.mark.parametrize("name", KEPT)
def test_each_entry_lies_where_the_layout_says(name: str) -> None:
    result, mark = _marked(KEPT[name], _labelled())
    assert isinstance(mark, BatchAxis), mark
    owners = row_owners(mark, B)
    assert torch.equal(
        result, owners.to(result.dtype).view(-1, *(1,) * (result.dim() - mark.dim - 1)).expand_as(result)
    )
    samples = batch_first(result + 1, mark, B, fill=False)
    for sample in range(B):
        present = samples[sample] != 0
        assert torch.equal(samples[sample][present], torch.full((int(present.sum()),), sample + 1.0))
    assert int((samples != 0).sum()) == result.numel()


@pytest.mark.parametrize("name", LOST)
def test_what_cannot_be_followed_says_why(name: str) -> None:
    change, reason = LOST[name]
    _, mark = _marked(change, torch.randn(B, 4, 2))
    assert isinstance(mark, Lost), mark
    assert reason in mark.reason
    assert "test_batch_axis.py:" in mark.reason


def test_a_size_that_happens_to_match_is_no_batch_axis() -> None:
    with expanded_weights(nn.Linear(1, 1), torch.randn(B, 4)) as capture:
        for tensor in (torch.arange(B), torch.zeros(B, 4)):
            assert isinstance(capture._dispatcher.marks.get(tensor), Constant)


def test_a_mark_answers_only_for_its_own_tensor() -> None:
    with expanded_weights(nn.Linear(1, 1), torch.randn(B, 4)) as capture:
        marks = capture._dispatcher.marks
        for _ in range(100):
            tensor = torch.Tensor(2)
            assert not isinstance(marks.get(tensor), Lost)
            marks[tensor] = Lost("here")
            del tensor


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((3, 4, 2), (12, 2), BatchAxis(0, inner=4)),
        ((3, 4, 2), (3, 8), BatchAxis(0)),
        ((3, 4, 2), (1, 3, 4, 2, 1), BatchAxis(1)),
        ((3, 4, 2), (2, 12), None),
        ((3, 0, 2), (3, 0), None),
    ],
)
def test_reshape(before: tuple[int, ...], after: tuple[int, ...], expected: BatchAxis | None) -> None:
    found = reshaped(BatchAxis(0), before, after, 3)
    assert found is expected is None or (found is not None and expected is not None and found.same_place(expected))
