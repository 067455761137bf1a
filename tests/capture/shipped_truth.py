"""What each sample's own gradient is, by definition, of any call: found by experiment and by a loop.

Which entries of the outputs belong to which sample is found by changing one sample and looking at what changes. No
knowledge of the engine, and none of the op, enters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from tests.capture.shipped_trials import REJECTED, TOLERANCE, Trial, is_number, losses

__all__ = ["Truth", "close", "truth"]


@dataclass(frozen=True)
class Rows:
    """Along `axis` of an output, row r belongs to sample `owners[r]`, to none where that is -1."""

    axis: int
    owners: Tensor

    def mask(self, shape: Sequence[int], index: int) -> Tensor:
        """1 on the entries of one sample."""
        mask = (self.owners == index).double()
        return mask.reshape(-1, *(1,) * (len(shape) - self.axis - 1)).expand(shape)

    def of(self, index: int) -> Tensor:
        return (self.owners == index).nonzero()[:, 0]


@dataclass(frozen=True)
class Entries:
    """Each entry of an output belongs to the sample `owners`, of the output's shape, or to none where that is -1."""

    owners: Tensor

    def mask(self, shape: Sequence[int], index: int) -> Tensor:
        """1 on the entries of one sample."""
        return (self.owners == index).double()


@dataclass(frozen=True)
class Truth:
    """What each sample's own gradient is, if it has one.

    Attributes:
        kind: "rows" (the loss of each sample is over its own entries of the outputs), "sum" or "mean" (the call gives
            the loss), "mixing" (no sample has a loss of its own), "no sample" (outputs change with none), "unknown".
        reference: "loop" over single samples, or "whole batch": the loss of a sample's own entries, differentiated
            through the call on all samples, where the call on one sample alone means something else.
        gradients: by parameter name (B, *shape).
        outside: parameters that also get a gradient from entries that belong to no sample.
        samples: those that the loss is made of, by place in the batch.
    """

    kind: str
    reference: str = ""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    outside: frozenset[str] = frozenset()
    samples: tuple[int, ...] = ()


def truth(trial: Trial) -> Truth:
    """By a loop over single samples where the outputs are made up of theirs, else from each sample's own entries."""
    try:
        return _truth(trial)
    except _Refused:
        return Truth("unknown")


class _Refused(Exception):
    """torch itself cannot differentiate this call."""


def _truth(trial: Trial) -> Truth:
    module, batch = trial.module(), trial.tensors()
    outputs = trial.outputs(module, batch)
    names = [name for name, _ in module.named_parameters()]
    alone = _loop(trial, module, batch)
    if is_number(outputs):
        return _truth_of_number(trial, outputs[0], alone, names, module)
    depends = _dependence(trial, module, outputs)
    if depends is None:
        return Truth("unknown")
    if not any(bool(part.any()) for part in depends):
        return Truth("no sample")
    if alone is not None and all(len(own) == len(outputs) for own in alone):
        singles = list(zip(*alone, strict=True))
        looped = [_rows_by_loop(*each) for each in zip(outputs, singles, depends, strict=True)]
        rows = [row for row in looped if row is not None]
        if len(rows) == len(outputs):
            parts = [_by_loop(trial, module, outputs, rows, index, own) for index, own in enumerate(alone)]
            return Truth("rows", "loop", _stacked(names, parts), samples=_owners(rows))
    found = [_owned_by_experiment(part) for part in depends]
    owned = [each for each in found if each is not None]
    if len(owned) != len(outputs):
        chosen = _chosen(trial, module)
        return Truth("mixing") if chosen is None else _of_chosen(trial, module, outputs, names, chosen)
    parts = [_by_mask(trial, module, outputs, owned, index) for index in range(-1, trial.batch_size)]
    outside = frozenset(name for name, grad in zip(names, parts[0], strict=True) if bool(grad.any()))
    return Truth("rows", "whole batch", _stacked(names, parts[1:]), outside, _owners(owned))


def _truth_of_number(
    trial: Trial, whole: Tensor, alone: list[list[Tensor]] | None, names: Sequence[str], module: nn.Module
) -> Truth:
    for kind in ("mean", "sum") if alone is not None and all(is_number(own) for own in alone) else ():
        if alone is not None and all(_gives(trial, module, batch, kind) for batch in _batches(trial)):
            gradients = _stacked(names, [_gradients(own[0], module) for own in alone])
            weight = 1 / len(alone) if kind == "mean" else 1.0
            sums = zip(gradients.values(), _gradients(whole, module), strict=True)
            if all(close(weight * own.sum(0), batch) for own, batch in sums):
                return Truth(kind, "loop", gradients, samples=tuple(range(trial.batch_size)))
    chosen = _chosen(trial, module)
    if chosen is not None:
        return replace(_of_chosen(trial, module, [whole], names, chosen), kind="sum")
    return Truth("unknown" if _adds_up(trial, module) else "mixing")


def _of_chosen(trial: Trial, module: nn.Module, outputs: list[Tensor], names: Sequence[str], chosen: int) -> Truth:
    """All outputs are of one sample: by a loop, which has this one alone in it, where that gives the same."""
    try:
        alone = trial.outputs(module, trial.sample(trial.tensors(), chosen))
    except REJECTED:
        alone = []
    reference = "loop" if _same_values(alone, outputs) else "whole batch"
    found = _gradients(trial.loss(alone if reference == "loop" else outputs), module)
    nothing = [torch.zeros_like(p) for p in module.parameters()]
    parts = [found if index == chosen else nothing for index in range(trial.batch_size)]
    return Truth("rows", reference, _stacked(names, parts), samples=(chosen,))


def _same_values(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    same_shapes = [each.shape for each in some] == [each.shape for each in others]
    return same_shapes and all(torch.equal(*pair) for pair in zip(some, others, strict=True))


def _chosen(trial: Trial, module: nn.Module) -> int | None:
    """The sample whose own numbers a call over the batch gives, as a maximum does; None where they are of several."""
    batch = trial.tensors()
    outputs = trial.outputs(module, batch)
    varied = [tensor for tensor in batch if tensor.requires_grad]
    live = [output for output in outputs if output.requires_grad]
    if not varied or len(live) < len(outputs):
        return None
    try:
        found = torch.autograd.grad([output.sum().abs() for output in live], varied, allow_unused=True)
    except REJECTED as error:
        raise _Refused from error
    pairs = [(g.to_dense(), index) for g in found if g is not None for index in range(trial.batch_size)]
    samples = {index for g, index in pairs if bool(g.narrow(trial.batch_dim, index, 1).any())}
    if len(samples) != 1:
        return None
    (chosen,) = samples
    near = [
        tensor.detach() * (1 + 1e-9 * torch.rand_like(tensor)) if tensor.requires_grad else tensor for tensor in batch
    ]
    for tensor, before in zip(near, batch, strict=True):
        tensor.narrow(trial.batch_dim, chosen, 1).copy_(before.detach().narrow(trial.batch_dim, chosen, 1))
    if not _same_values(trial.outputs(module, near), outputs):
        return None
    if len(varied) == len(batch):
        return chosen
    try:  # what cannot be changed a little must not decide: the sample alone gives the same
        return chosen if _same_values(trial.outputs(module, trial.sample(batch, chosen)), outputs) else None
    except REJECTED:
        return None


def _batches(trial: Trial) -> Iterator[list[Tensor]]:
    """The batch, and others in which the last sample is replaced, for what holds by chance of one."""
    yield trial.tensors()
    for place, tensor in enumerate(trial.tensors()):
        first, last = (trial.sample([tensor], index)[0].detach() for index in (0, trial.batch_size - 1))
        for values in _replacements(last, first):
            changed = [other.detach().clone() for other in trial.tensors()]
            trial.sample(changed, trial.batch_size - 1)[place].copy_(values)
            yield changed


def _gives(trial: Trial, module: nn.Module, batch: Sequence[Tensor], kind: str) -> bool:
    """Whether the call on the batch gives the mean or the sum of what it gives the samples alone."""
    try:
        whole = trial.outputs(module, batch)
    except REJECTED:
        return True
    alone = _loop(trial, module, batch)
    if alone is None or not is_number(whole) or not all(is_number(own) for own in alone):
        return False
    single = torch.stack([own[0] for own in alone]).detach()
    found = single.mean() if kind == "mean" else single.sum()
    scale = float(single.abs().nan_to_num().max())
    return torch.allclose(found, whole[0].detach(), rtol=1e-9, atol=1e-10 * scale, equal_nan=True)


def _adds_up(trial: Trial, module: nn.Module) -> bool:
    """Whether the number is a sum of one term for each sample: two changes change it by the sum of what each does."""
    batch = trial.tensors()
    size = trial.batch_size

    def value(*samples: int) -> Tensor:
        changed = [tensor.detach().clone() for tensor in batch]
        for sample in samples:
            for tensor, before in zip(changed, batch, strict=True):
                own = tensor.narrow(trial.batch_dim, sample, 1)
                other = before.narrow(trial.batch_dim, (sample + 1) % size, 1)
                own.copy_(0.6 * own if tensor.is_floating_point() else other)
        return trial.outputs(module, changed)[0].detach()

    try:
        pairs = [(i, j) for i in range(size) for j in range(i + 2, size) if (i, j) != (0, size - 1)] or [(0, 1)]
        return all(close(value(i, j) + value(), value(i) + value(j)) for i, j in pairs)
    except REJECTED:
        return True


def _owners(owned: Sequence[Rows | Entries]) -> tuple[int, ...]:
    """The samples that have entries of the outputs."""
    return tuple(sorted({owner for each in owned for owner in each.owners.flatten().tolist() if owner >= 0}))


def _stacked(names: Sequence[str], parts: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack(column) for name, column in zip(names, zip(*parts, strict=True), strict=True)}


def _loop(trial: Trial, module: nn.Module, batch: Sequence[Tensor]) -> list[list[Tensor]] | None:
    try:
        return [trial.outputs(module, trial.sample(batch, index)) for index in range(trial.batch_size)]
    except REJECTED:
        return None


def _by_mask(
    trial: Trial, module: nn.Module, outputs: Sequence[Tensor], owned: Sequence[Rows | Entries], index: int
) -> list[Tensor]:
    """The gradient of the loss over the entries of one sample, from the call on the whole batch."""
    pairs = zip(outputs, owned, strict=True)
    parts = [(trial.entries(output) * own.mask(output.shape, index)).sum() for output, own in pairs]
    return _gradients(torch.stack(parts).sum(), module)


def _by_loop(
    trial: Trial, module: nn.Module, outputs: Sequence[Tensor], rows: Sequence[Rows], index: int, alone: list[Tensor]
) -> list[Tensor]:
    """The gradient of the loss over one sample's outputs, from the call on the sample alone."""
    parts = []
    for output, row, own in zip(outputs, rows, alone, strict=True):
        coefficients = trial.coefficients_for(output).index_select(row.axis, row.of(index))
        parts.append(losses(own, coefficients).sum())
    return _gradients(torch.stack(parts).sum(), module)


def _gradients(loss: Tensor, module: nn.Module) -> list[Tensor]:
    parameters = list(module.parameters())
    if not loss.requires_grad:
        return [torch.zeros_like(p) for p in parameters]
    try:
        grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    except REJECTED as error:
        raise _Refused from error
    return [torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(parameters, grads, strict=True)]


def _changed(before: Tensor, after: Tensor) -> Tensor:
    # Kernels round differently for tensors at other addresses, so a change must be larger than rounding.
    finite = before.detach().abs()
    finite = finite[finite.isfinite()]
    rounding = 1e-12 * float(finite.max()) if finite.numel() else 0.0
    return ~torch.isclose(before, after, rtol=1e-12, atol=rounding, equal_nan=True)


def _replacements(tensor: Tensor, other: Tensor) -> Iterator[Tensor]:
    """Other values for one sample's part of a batch tensor."""
    yield other
    if tensor.dtype == torch.bool:
        yield ~tensor
    elif tensor.is_floating_point():
        yield tensor * 0.7
        yield -1.3 * tensor
        yield 9 * tensor + 2
        yield tensor.flatten().flip(0).view_as(tensor) * 0.9
    else:
        yield tensor.flatten().flip(0).view_as(tensor)


def _dependence(trial: Trial, module: nn.Module, before: list[Tensor]) -> list[Tensor] | None:
    """For each output, (B, *shape): does the entry change with the sample; None where it is not known."""
    size, batch = trial.batch_size, trial.tensors()
    found = [torch.zeros(size, *output.shape, dtype=torch.bool) for output in before]
    for index in range(size):
        tried = 0
        own, other = trial.sample(batch, index), trial.sample(batch, (index + 1) % size)
        for place in range(len(batch)):
            for values in _replacements(own[place].detach(), other[place].detach()):
                changed = [tensor.detach().clone() for tensor in batch]
                changed[place].narrow(trial.batch_dim, index, 1).copy_(values)
                try:  # (with gradient: without, some modules take another path that rounds differently)
                    after = [output.detach() for output in trial.outputs(module, changed)]
                except REJECTED:
                    continue
                tried += 1
                if [output.shape for output in after] != [output.shape for output in before]:
                    return None
                for output, first, second in zip(found, before, after, strict=True):
                    output[index] |= _changed(first.detach(), second)
        if not tried:
            return None
    return found


def _by_row(depends: Tensor, axis: int) -> Tensor:
    """(B, rows of the axis): whether the row has an entry that depends on the sample."""
    rows = depends.movedim(1 + axis, 1)
    return rows.any(tuple(range(2, rows.dim()))) if rows.dim() > 2 else rows.clone()


def _owned_by_experiment(depends: Tensor) -> Rows | Entries | None:
    """The axis along which every row depends on one sample at most, with the fewest rows of none; else each entry."""
    best = None
    for axis in range(depends.dim() - 1):
        rows = _by_row(depends, axis)
        if bool((rows.sum(0) > 1).any()):
            continue
        owners = torch.where(rows.any(0), rows.long().argmax(0), -1)
        places = torch.arange(owners.numel())
        if owners.numel() == len(depends) and bool(((owners == places) | (owners < 0)).all()):
            owners = places  # (the row of a sample whose values were overwritten)
        if best is None or int((owners < 0).sum()) < int((best.owners < 0).sum()):
            best = Rows(axis, owners)
    if best is None and not bool((depends.sum(0) > 1).any()):
        return Entries(torch.where(depends.any(0), depends.long().argmax(0), -1))
    return best


def _rows_by_loop(whole: Tensor, alone: Sequence[Tensor], depends: Tensor) -> Rows | None:
    """The axis along which the outputs for single samples, one after another, make up the output for the batch."""
    if {single.dim() for single in alone} != {whole.dim()}:
        return None
    for axis in range(whole.dim()):
        shapes = {(*single.shape[:axis], -1, *single.shape[axis + 1 :]) for single in alone}
        if shapes != {(*whole.shape[:axis], -1, *whole.shape[axis + 1 :])}:
            continue
        owners = torch.repeat_interleave(torch.arange(len(alone)), torch.tensor([s.size(axis) for s in alone]))
        if owners.numel() != whole.size(axis):
            continue
        if not torch.allclose(torch.cat(list(alone), axis), whole, rtol=1e-9, atol=1e-11, equal_nan=True):
            continue
        others = _by_row(depends, axis)
        others[owners, torch.arange(owners.numel())] = False
        if not bool(others.any()):
            return Rows(axis, owners)
    return None


def close(left: Tensor, right: Tensor, tolerance: float = TOLERANCE) -> bool:
    finite = right.detach()[right.detach().isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return left.shape == right.shape and torch.allclose(
        left.double(), right.double(), rtol=10 * tolerance, atol=10 * tolerance * (1 + largest)
    )
