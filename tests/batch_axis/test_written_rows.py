"""Rows written where rows of the same sample lie, and places that hold what the batch says: exact and silent."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.reference import assert_exact, assert_values, loop, record_of

pytestmark = pytest.mark.usefixtures("double_precision")

STEPS = torch.arange(1.0, 5.0, dtype=torch.float64)[:, None]


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def loss(self, h: Tensor) -> Tensor:
        return self.last(h).square().sum(1).mean()


def labels(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).long()


def steps(m: Any, x: Tensor) -> Tensor:
    found: Tensor = m.first(x)[:, None].expand(-1, 4, -1) * STEPS
    return found


def added(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    rows = torch.where(labels(x) == 1)[0]
    return m.loss(h.index_add(0, rows, m.expert(h[rows])))


def added_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    out, rows = h.clone(), (x[:, 0] > 0).nonzero()[:, 0]
    out.index_add_(0, rows, m.expert(h[rows]))
    return m.loss(out)


def copied(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    rows = torch.where(labels(x) == 1)[0]
    return m.loss(h.index_copy(0, rows, m.expert(h[rows])))


def put_by_a_mask(m: Any, x: Tensor) -> Tensor:
    h, mask = m.first(x), x[:, 0] > 0
    return m.loss(h.index_put((mask,), m.expert(h[mask])))


def margins(m: Any, x: Tensor) -> Tensor:
    z = m.last(m.first(x))
    margin = torch.zeros(z.shape)
    margin[torch.arange(len(x)), labels(x)] = 0.1
    return F.cross_entropy(z - margin, labels(x))


def ends(m: Any, x: Tensor) -> Tensor:
    h = m.expert(steps(m, x))
    mask = torch.zeros(len(x), 4)
    mask[(torch.arange(len(x)), 2 * labels(x))] = 1
    h[~mask.flip(-1).cumsum(-1).flip(-1).bool()] = 0
    return m.loss(h.sum(1))


def masked(m: Any, x: Tensor) -> Tensor:
    h = steps(m, x)
    mask = torch.zeros(len(x), 4)
    mask[h.detach()[..., 0] > 0] = 1.0
    return m.loss((h * mask[..., None]).sum(1))


def up_to_the_longest(m: Any, x: Tensor) -> Tensor:
    lengths = 2 * labels(x) + 2
    mask = torch.arange(lengths.max())[None] < lengths[:, None]
    return m.loss((steps(m, x)[:, : mask.shape[1]] * mask[..., None]).sum(1))


def every_step_for_all(m: Any, x: Tensor) -> Tensor:
    """How far a range goes and how often a mask is repeated are numbers of the batch, and sizes alone."""
    lengths = 3 * (x[:, 0] < 99).long()
    longest = lengths.max()
    later = torch.arange(0, longest) >= torch.arange(0, end=longest, step=1)[:, None]
    mask = (torch.arange(longest)[None] < lengths[:, None])[:, None].expand(-1, longest, -1) & later
    return m.loss(m.expert(mask.double() @ steps(m, x)[:, : int(longest)]).sin().reshape(len(x), longest, 6).sum(1))


# Through views --------------------------------------------------------------------------------------------------------


def part(m: Any, x: Tensor) -> Tensor:
    room = torch.zeros(len(x), 4, 6)
    room[..., :2].copy_(m.expert(steps(m, x))[..., :2])
    return m.loss(room.sin().sum(1))


def part_of_a_part(m: Any, x: Tensor) -> Tensor:
    room = torch.zeros(len(x), 4, 6)
    left = room[:, :3]
    left[..., 1:].sub_(m.expert(steps(m, x))[:, :3, 1:])
    return m.loss(left.sin().sum(1))


def flattened(m: Any, x: Tensor) -> Tensor:
    room = torch.ones(len(x), 4, 6)
    room.view(-1, 6)[:, 2:5].add_(m.expert(steps(m, x)).flatten(0, 1)[:, 2:5])
    room.flatten(1)[:, :5].copy_(m.first(x)[:, :5])
    return m.loss(room.sin().sum(1))


def one_step_after_the_other(m: Any, x: Tensor) -> Tensor:
    h, room = steps(m, x), torch.zeros(4, len(x), 6)
    for step in range(4):
        room[step].copy_(m.expert(h[:, step]))
    room.transpose(0, 1)[:, 1:3].mul_(2.0)
    return m.loss(room.sin().sum(0))


def diagonals(m: Any, x: Tensor) -> Tensor:
    room = torch.zeros(len(x), 6, 6)
    room.diagonal(dim1=1, dim2=2).copy_(m.first(x))
    return m.loss(m.expert(room).sin().sum(1))


def into_a_part(m: Any, x: Tensor) -> Tensor:
    room = torch.zeros(len(x), 6)
    torch.mul(x[:, :2], 2.0, out=room[:, 1:3])
    return m.loss(m.expert(room).sin())


# By masks made in the step --------------------------------------------------------------------------------------------

OFTEN = torch.tensor([True, False, True, True])


def learned(m: Any, x: Tensor) -> Tensor:
    h = m.expert(steps(m, x))
    h[OFTEN[None].expand(len(x), 4)] = m.last.weight[0]
    return m.loss(h.sin().sum(1))


def learned_along_the_last(m: Any, x: Tensor) -> Tensor:
    h, mask = m.expert(steps(m, x)).permute(1, 2, 0).contiguous(), OFTEN[:, None].expand(4, len(x))
    h[:, 2:3].transpose(1, 2)[mask] = m.last.bias[:1]
    return m.loss(h.sin().sum(0).t())


def learned_copy(m: Any, x: Tensor) -> Tensor:
    mask = OFTEN[None].expand(len(x), 4)
    return m.loss(m.expert(steps(m, x)).index_put((mask,), m.last.weight[0].tanh()).sin().sum(1))


# Places that are read from the batch ----------------------------------------------------------------------------------


class Experts(Parts):
    """Every token is sent to the expert of its largest score; the experts that occur are gone through one by one."""

    def __init__(self, listed: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.listed, self.weights = listed, nn.Parameter(torch.randn(4, 6, 6))

    def routed(self, x: Tensor) -> Tensor:
        tokens = steps(self, x).flatten(0, 1)
        chosen = tokens.detach()[:, :4].argmax(1)
        out = torch.zeros_like(tokens)
        for expert in self.listed(chosen):
            (rows,) = torch.where((chosen == expert) & (F.one_hot(chosen, 4).T[expert] > 0))
            out.index_add_(0, rows, F.linear(tokens[rows], self.weights[expert]).tanh())
        return self.loss(out.view(len(x), 4, 6).sum(1))


LISTED: dict[str, Callable[[Tensor], Any]] = {
    "nonzero": lambda chosen: (e[0] for e in (F.one_hot(chosen, 4).sum(0) > 0).nonzero()),
    "flattened": lambda chosen: F.one_hot(chosen, 4).sum(0).nonzero().flatten(),
    "where": lambda chosen: torch.where(torch.bincount(chosen) > 0)[0].unbind(),
    "unique": lambda chosen: chosen.unique(),
    "by-place": lambda chosen: (chosen.unique()[i] for i in range(len(chosen.unique()))),
}


@pytest.mark.parametrize("name", LISTED)
def test_an_expert_that_occurs_in_the_batch_is_a_weight_of_its_own(name: str) -> None:
    module, x = Experts(LISTED[name]), torch.randn(6, 5)
    record = record_of(module, lambda m, x: m.routed(x), x)
    assert (record.mixing, record.axis_lost, record.weighting, record.unsupported) == ((), (), (), {})
    assert_values(record, loop(module, lambda m, x: m.routed(x), (x,)))


@pytest.mark.parametrize("expert", [lambda s: s.argmax(), lambda s: s.softmax(0).multinomial(1)[0]])
def test_an_expert_that_the_whole_batch_chooses_is_named(expert: Callable[[Tensor], Tensor]) -> None:
    module, x = Experts(labels), torch.randn(6, 5)
    record = record_of(module, lambda m, x: m.loss(F.linear(m.first(x), m.weights[expert(x.mean(0)[:4])])), x)
    assert "`getitem` on (4, 6, 6), ()" in record.unsupported["weights"]
    assert (record.names, record.mixing) == (("first.weight", "first.bias"), ())
    assert "`linear` has a weight that depends on the batch" in record.axis_lost[0]


@pytest.mark.parametrize("number", [lambda e: e, lambda e: STEPS[e], lambda e: (e == 1) + 1.0])
def test_a_number_that_occurs_in_the_batch_and_scales_all_samples_is_said(number: Callable[[Tensor], Tensor]) -> None:
    record = record_of(Parts(), lambda m, x: m.loss(m.first(x) * number(labels(x).unique()[-1])), torch.randn(6, 5))
    assert record.mixing != () or record.axis_lost != ()


def overlapping_windows(m: Any, x: Tensor) -> Tensor:
    """Heads are folded into the batch, and windows of 2 steps overlap by one, as in Longformer."""
    heads = steps(m, x).view(-1, 4, 2, 3).transpose(1, 2).reshape(-1, 4, 3).contiguous()
    windows = heads.as_strided((len(heads), 3, 2, 3), (12, 3, 3, 1))
    return m.loss(windows.sum(2).sin().view(len(x), 2, 3, 3).sum(2).flatten(1))


def windows_of_a_part(m: Any, x: Tensor) -> Tensor:
    h = steps(m, x).transpose(0, 1).contiguous()
    return m.loss(h.as_strided((2, len(x), 6), (2 * h.stride(0), 6, 1), 6 * len(x)).sin().sum(0))


def scattered(m: Any, x: Tensor) -> Tensor:
    """What is computed for some places alone goes to them in order, as image features in a text."""
    h, mask = steps(m, x), torch.arange(4) < 1 + labels(x)[:, None]
    places = mask[..., None].expand_as(h)
    return m.loss(h.masked_scatter(places, m.expert(h[mask])).sum(1))


def scattered_in_place(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), 4, 6)
    mask = (torch.arange(4) % 2 > labels(x)[:, None] - 2)[..., None] & (torch.arange(4)[:, None] > 1)
    out.masked_scatter_(mask, m.expert(steps(m, x)[:, :2]).flatten(0, 1))
    return m.loss(out.sum(1))


EXACT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    each.__name__: each
    for each in (
        *(added, added_in_place, copied, put_by_a_mask, margins, ends, masked, up_to_the_longest, every_step_for_all),
        *(part, part_of_a_part, flattened, one_step_after_the_other, diagonals, into_a_part),
        *(learned, learned_along_the_last, learned_copy),
        *(overlapping_windows, windows_of_a_part, scattered, scattered_in_place),
    )
}


@pytest.mark.parametrize("name", EXACT)
def test_values_are_exact_and_nothing_is_said(name: str) -> None:
    module, x = Parts(), torch.randn(6, 5)
    x[0, 0], x[1, 0] = 1.0, -1.0
    record = record_of(module, EXACT[name], x)
    assert (record.mixing, record.axis_lost, record.weighting, record.not_additive, record.unsupported) == (
        (),
        (),
        (),
        (),
        {},
    )
    assert_values(record, loop(module, EXACT[name], (x,)))


def row_by_row(h: Tensor) -> Tensor:
    out = h.new_empty(h.shape)
    for i in range(len(h)):
        out[i] = 2 * h[i]
    return out


def slice_by_slice(h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for i in range(0, len(h), 2):
        out[i : i + 2] = h[i : i + 2].square()
    return out


def backwards(h: Tensor) -> Tensor:
    out = h.new_zeros(h.shape)
    for i in range(len(h)):
        out[-1 - i, :] = h[i]
    return out


def changed(h: Tensor) -> Tensor:
    out = h.clone()
    for i in range(len(h)):
        out[i] = 2 * out[i] + h[i].sin()
    return out


def entry_by_entry(h: Tensor) -> Tensor:
    out = h.new_zeros(len(h), h.size(1) + 1)
    for i in range(len(h)):
        for j in range(h.size(1)):
            out[i, j] = h[i, j].exp()
    return out[:, 1:]


def as_columns(h: Tensor) -> Tensor:
    out = h.new_zeros(h.size(1), len(h))
    for i in range(len(h)):
        out[:, i] = h[i]
    return out.T


def in_turns(h: Tensor) -> Tensor:
    out = h.new_zeros(2 * len(h), h.size(1))
    out[::2], out[1::2] = h, h.tanh()
    return out


ROWS_WRITTEN = [row_by_row, slice_by_slice, backwards, changed, entry_by_entry, as_columns, in_turns]


class Written(torch.autograd.Function):
    """Rows written one after another in a custom function, where torch shows no gradient."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, write: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(h)
        ctx.write = write
        return write(h)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            h = ctx.saved_tensors[0].detach().requires_grad_()
            return *torch.autograd.grad(ctx.write(h), h, grad), None


@pytest.mark.parametrize("apply", [lambda h, write: write(h), Written.apply], ids=["plain", "function"])
@pytest.mark.parametrize("write", ROWS_WRITTEN)
def test_rows_that_are_written_one_after_another_are_their_samples(write: Any, apply: Any) -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        return m.last(apply(m.first(x), write)).square().sum() / len(x)

    module, x = Parts(), torch.randn(6, 5)
    record = record_of(module, loss, x)
    assert (record.mixing, record.axis_lost, record.weighting, record.unsupported) == ((), (), (), {})
    assert (len(record.names), record.coverage) == (4, 1.0)
    assert_values(record, loop(module, loss, (x,)))


def one_row_too_many(h: Tensor) -> Tensor:
    out = h.new_zeros(len(h) + 1, h.size(1))
    for i in range(len(h)):
        out[i] = h[i]
    return out


def two_in_a_row(h: Tensor) -> Tensor:
    out = h.new_zeros(h.shape)
    for i in range(len(h)):
        out[i, :3], out[i, 3:] = h[i, :3], h[i - 1, 3:]
    return out


def two_added_up(h: Tensor) -> Tensor:
    out = h.new_zeros(h.shape)
    for i in range(len(h)):
        out[i] = h[i] + h[i - 1]
    return out


@pytest.mark.parametrize("write", [one_row_too_many, two_in_a_row, two_added_up])
def test_rows_that_are_not_each_of_one_sample_are_said(write: Any) -> None:
    record = record_of(Parts(), lambda m, x: m.last(write(m.first(x))).square().sum() / 6, torch.randn(6, 5))
    assert set(record.unsupported) == {"last.weight", "last.bias"}
    assert (*record.mixing, *record.axis_lost) != ()


def turned_before_all_are_written(h: Tensor) -> Tensor:
    out = h.new_zeros(h.shape)
    for i in range(len(h) - 1):
        out[i] = h[i]
    out[:] = out.flip(0)
    out[0] = h[-1]
    return out


def test_rows_that_are_turned_before_all_are_written_are_followed() -> None:
    module, x = Parts(), torch.randn(6, 5)

    def loss(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.last(turned_before_all_are_written(h) if len(h) > 1 else h).square().sum() / len(x)

    record = record_of(module, loss, x)
    assert (record.mixing, record.axis_lost, record.weighting, record.unsupported) == ((), (), (), {})
    assert_values(record, loop(module, loss, (x,)))


def test_rows_that_are_added_to_rows_of_other_samples_are_said() -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.loss(h.index_add(0, torch.tensor([1, 0]), m.expert(h[:2])))

    assert record_of(Parts(), loss, torch.randn(6, 5)).axis_lost != ()


REFUSED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "`masked_scatter` writes samples into places of other samples": lambda m, x: m.loss(
        m.first(x).masked_scatter(torch.arange(6)[:, None] > torch.arange(6), m.expert(m.first(x)))
    ),
    "`as_strided` puts entries of several samples side by side along every axis": lambda m, x: m.loss(
        m.first(x).as_strided((5, 2, 6), (6, 6, 1)).flatten(0, 1)
    ),
    "`as_strided` reads beyond the tensor": lambda m, x: m.loss(m.first(x)[1:].as_strided((6, 6), (6, 1), 0)),
}


@pytest.mark.parametrize("text", REFUSED)
def test_entries_of_several_samples_in_one_row_are_named(text: str) -> None:
    record = record_of(Parts(), REFUSED[text], torch.randn(6, 5))
    assert all(text in reason for reason in record.unsupported.values())
    assert list(record.unsupported) == ["last.weight", "last.bias"]
    assert record.mixing == ()


def test_rows_of_other_samples_written_through_a_view_are_theirs() -> None:
    module, x = Parts(), torch.randn(6, 5)

    def loss(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        h[:3].copy_(m.expert(m.first(x))[3:])
        return m.last(h).square().sum(1)  # rows of samples 3, 4, 5, 3, 4, 5

    record = record_of(module, lambda m, x: loss(m, x).mean(), x)
    assert (record.mixing, record.axis_lost, record.unsupported, record.samples.tolist()) == ((), (), {}, [3, 4, 5])
    for place in range(3):
        grads = torch.autograd.grad(loss(module, x)[[place, place + 3]].mean(), list(module.parameters()))
        for (name, _), grad in zip(module.named_parameters(), grads, strict=True):
            torch.testing.assert_close(record.grad_samples[name][place], grad)


def along_both_axes(room: Tensor, h: Tensor) -> None:
    room[:, 0].copy_(h[:, 0])
    room[0].copy_(h[:, 1])


def along_both_axes_by_a_view_from_before(room: Tensor, h: Tensor) -> None:
    row = room[0]
    room[:, 0].copy_(h[:, 0].detach())
    row.copy_(h[:, 1].detach())


def every_other_place(room: Tensor, h: Tensor) -> None:
    room.view(-1)[3:15:2].copy_(h[:, 0])


ROOMS = {each.__name__: each for each in (along_both_axes, along_both_axes_by_a_view_from_before, every_other_place)}


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_that_holds_the_samples_along_no_axis_is_named_with_the_line(name: str) -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        room = torch.zeros(6, 6)
        ROOMS[name](room, m.first(x))
        return m.loss(room.sin())

    record = record_of(Parts(), loss, torch.randn(6, 5))
    assert set(record.unsupported) == {"last.weight", "last.bias"}
    text = r"test_written_rows\.py:\d+, and no axis of it holds the samples since; keep the samples"
    assert re.search(text, record.unsupported["last.weight"])
    assert set(record.mixing) <= set(record.axis_lost)


def test_a_range_that_starts_at_a_number_of_the_batch_is_said() -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        start = x[:, 0].detach().sum()
        return m.loss(m.first(x) * torch.arange(start, start + 5.5)[:6])

    assert record_of(Parts(), loss, torch.randn(6, 5)).mixing != ()


def through_a_view(
    write: Callable[[Any, Tensor, Tensor], object], view: Callable[[Tensor], Tensor]
) -> Callable[..., Tensor]:
    """A loss of what a tensor made earlier shows, after its memory was written to."""

    def loss(m: Any, x: Tensor) -> Tensor:
        z = x.clone()
        seen = view(z)
        write(m, z, x)
        return m.loss(m.first(seen))

    return loss


VIEWS = {
    "slice": lambda z: z[:, :],
    "reshaped": lambda z: z.view(-1, 5),
    "transposed": lambda z: z.t().t(),
    "detached": lambda z: z.detach(),
    "data": lambda z: z.data,
    "column": lambda z: z[:, :1].expand(-1, 5),
}
REVERSALS = {
    "copied": lambda m, z, x: z.copy_(x.flip(0)),
    "through-another-view": lambda m, z, x: z.view(-1, 5).copy_(x.flip(0)),
    "through-its-data": lambda m, z, x: z.data.copy_(x.flip(0)),
    "as-a-slice": lambda m, z, x: z[:].copy_(x.flip(0)),
    "as-out": lambda m, z, x: torch.index_select(x, 0, torch.arange(len(x) - 1, -1, -1), out=z),
    "by-an-index": lambda m, z, x: z.index_copy_(0, torch.arange(len(x)).flip(0), x),
    "of-activations": lambda m, z, x: z.copy_(m.first(x).flip(0)[:, :5].detach()),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("write", REVERSALS)
def test_a_view_made_before_its_base_got_other_samples_shows_those(write: str, view: str) -> None:
    module, x = Parts(), torch.randn(4, 5)
    loss = through_a_view(REVERSALS[write], VIEWS[view])
    record = record_of(module, loss, x)
    assert (record.mixing, record.axis_lost, record.unsupported) == ((), (), {})
    assert_values(record, loop(module, loss, (x,)))


def test_a_view_of_activations_that_got_other_samples_shows_those() -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        h = m.first(x) * 1.0
        seen = h[:, :3]
        h.copy_(m.first(x).flip(0))
        return m.loss(m.expert(F.pad(seen, (0, 3))))

    module, x = Parts(), torch.randn(4, 5)
    record = record_of(module, loss, x)
    assert (record.mixing, record.axis_lost, record.unsupported) == ((), (), {})
    assert_values(record, loop(module, loss, (x,)))


MIXES = {
    "less-the-mean": lambda m, z, x: z.sub_(z.mean(0)),
    "cumulated": lambda m, z, x: z.detach().cumsum_(0),
    "mean-of-all": lambda m, z, x: z.__setitem__(slice(None), z.mean(0)),
    "added-to-others": lambda m, z, x: z.index_add_(0, torch.tensor([2, 0, 3, 1]), x),
}


@pytest.mark.parametrize("view", ["slice", "detached", "transposed"])
@pytest.mark.parametrize("write", MIXES)
def test_a_view_made_before_samples_were_mixed_in_its_base_is_not_taken_for_one_of_them(write: str, view: str) -> None:
    record = record_of(Parts(), through_a_view(MIXES[write], VIEWS[view]), torch.randn(4, 5))
    if not record.mixing:
        for name in ("first.weight", "first.bias"):
            assert (
                "it was written to in place through another tensor at test_written_rows.py"
                in (record.unsupported[name])
            )


READ_BACK: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "getitem": lambda memory, index: memory[index],
    "getitem-beside-a-slice": lambda memory, index: memory[index, :],
    "index_select": lambda memory, index: memory.index_select(0, index),
    "gather": lambda memory, index: memory.gather(0, index[:, None].expand(-1, 3)),
    "take_along_dim": lambda memory, index: memory.take_along_dim(index[:, None], 0),
}


def remembered(read: Callable[[Tensor, Tensor], Tensor], places: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The targets of a sample are a mean of its outputs so far, in a row of a memory for the whole dataset."""

    def loss(module: nn.Module, x: Tensor, index: Tensor) -> Tensor:
        memory = torch.linspace(0.1, 0.9, 30).view(10, 3)
        scores = module(x).softmax(1)
        memory[index] = 0.7 * memory[index] + 0.3 * scores.detach()
        return (1 - (read(memory, places(index)) * scores).sum(1)).log().mean()

    return loss


@pytest.mark.parametrize("name", READ_BACK)
def test_rows_of_a_memory_that_each_sample_writes_and_reads_are_its_own(name: str) -> None:
    loss = remembered(READ_BACK[name], lambda index: index)
    record = assert_exact(nn.Linear(4, 3), loss, (torch.randn(4, 4), torch.tensor([7, 0, 3, 9])))
    assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())


OF_OTHERS: dict[str, tuple[list[int], Callable[[Tensor], Tensor]]] = {
    "twice-in-the-batch": ([7, 0, 7, 9], lambda index: index),
    "of-the-next": ([7, 0, 3, 9], lambda index: index.roll(1)),
    "of-all": ([7, 0, 3, 9], lambda index: index[:1].expand(len(index))),
}


@pytest.mark.parametrize("name", OF_OTHERS)
@pytest.mark.parametrize("way", READ_BACK)
def test_rows_of_a_memory_that_another_sample_writes_are_said(name: str, way: str) -> None:
    rows, places = OF_OTHERS[name]
    record = record_of(nn.Linear(4, 3), remembered(READ_BACK[way], places), torch.randn(4, 4), torch.tensor(rows))
    assert record.mixing or record.weighting or record.axis_lost
