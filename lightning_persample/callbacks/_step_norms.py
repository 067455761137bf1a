"""The norms of all samples of an optimizer step, from every batch and every process, and what is logged of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

__all__ = ["CapturedBatch", "NormsOfAllProcesses", "StepNorms", "percent"]

_HEAD = 6  # numbers that say how many norms and cosines, samples and batches, the coverage, the sum of squares
_ROOM = 1024  # norms of a process that the first exchange has room for


@dataclass(frozen=True)
class CapturedBatch:
    """What is kept of one batch: norms (B,), or None if no parameter was captured, and norms (B,) by group.

    `batch_size` counts the samples that have values, `weights` are B times theirs in the loss, (B,), where they differ.
    """

    batch_size: int
    norms: Tensor | None
    groups: Mapping[str, Tensor]
    coverage: float
    weights: Tensor | None = None


@dataclass(frozen=True, eq=False)
class StepNorms:
    """The norms of the samples of one optimizer step, on the host in double precision.

    Attributes:
        norms: of each sample, over all parameters, (samples,).
        group_sums: for each group the sum of its finite norms, their number and the sum of their squares, (groups, 3),
            of samples whose norm over all parameters is finite; the squares times that of the samples' weights.
        samples: number of samples captured, those without a norm included.
        batches: number of batches captured.
        coverage: the least of the batches; infinite where there is none.
        gradient: what each process knows of the mean gradient, see `MeanGradient.numbers`, (processes, numbers); no
            numbers where it is not asked for.
        cosines: of each sample with the mean gradient, (samples,); empty where they are not asked for.
        sq_sum: sum of the squares of the finite norms, times the samples' weights.
    """

    norms: Tensor
    group_sums: Tensor
    samples: int
    batches: int
    coverage: float
    gradient: Tensor = field(default_factory=lambda: torch.empty(1, 0, dtype=torch.float64))
    cosines: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    sq_sum: float = 0.0

    @classmethod
    def of_window(
        cls,
        window: Sequence[CapturedBatch],
        groups: Sequence[str],
        gradient: Tensor | None = None,
        cosines: Sequence[Tensor] = (),
    ) -> StepNorms:
        """Join the batches of this process, in one transfer from their device."""
        rows = _to_host(window, groups)
        norms, by_group, weights = rows[0], rows[1:-1], rows[-1]
        sq_sum = float((norms * weights)[norms.isfinite()].square().sum())
        sums = norms.new_empty(0, 3)
        if groups:
            counted = norms.isfinite() & ~by_group.isnan()
            finite = by_group.where(counted, 0.0)
            sums = torch.stack([finite.sum(1), counted.sum(1).double(), (finite * weights).square().sum(1)], dim=1)
        coverage = min((captured.coverage for captured in window), default=math.inf)
        samples = sum(captured.batch_size for captured in window)
        step = cls(norms, sums, samples, len(window), coverage, sq_sum=sq_sum)
        if gradient is None:
            return step
        joined = torch.cat([each.cpu().double() for each in cosines]) if cosines else step.cosines
        return replace(step, gradient=gradient[None], cosines=joined)


class NormsOfAllProcesses:
    """Joins the norms of all processes with one collective for each step.

    Quantiles need every norm, so each process sends its own in a tensor with room for as many as any process has had
    so far, 1024 at first, together with everything else. Where a process has more, all of them learn it from what they
    receive, and exchange once more with enough room: only a step that is larger than all before costs two collectives.
    """

    def __init__(self) -> None:
        self._room = _ROOM

    def join(self, own: Sequence[StepNorms], device: torch.device) -> list[StepNorms]:
        """The norms of all processes; each has to call this, also one that has none, and gets the same."""
        parts = self._exchange(own, device)
        most = max(int(rows[:, :2].sum(1).max()) for rows in parts)
        if most > self._room:
            self._room = 2 ** math.ceil(math.log2(most))
            parts = self._exchange(own, device)
        return [_joined(rows, each) for rows, each in zip(parts, own, strict=True)]

    def _exchange(self, own: Sequence[StepNorms], device: torch.device) -> tuple[Tensor, ...]:
        """For each of `own` what every process sent, (processes, numbers)."""
        sent = [self._numbers(each) for each in own]
        together = torch.cat(sent).to(device)
        received = [torch.empty_like(together) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(received, together)
        return torch.stack(received).cpu().split([numbers.numel() for numbers in sent], dim=1)

    def _numbers(self, own: StepNorms) -> Tensor:
        counts = [own.norms.numel(), own.cosines.numel(), own.samples, own.batches, own.coverage, own.sq_sum]
        head = own.norms.new_tensor(counts)
        fixed = torch.cat([head, own.group_sums.flatten(), own.gradient.flatten()])
        whole = torch.cat([fixed, own.norms, own.cosines])
        numbers = torch.zeros(fixed.numel() + self._room, dtype=torch.float64)
        numbers[: whole.numel()] = whole[: numbers.numel()]
        return numbers


def _joined(rows: Tensor, own: StepNorms) -> StepNorms:
    groups, known = own.group_sums.shape, own.gradient.shape[1]
    behind = _HEAD + groups.numel()
    norms, cosines = [], []
    for row in rows:
        values, ends = row[behind + known :], int(row[0])
        norms.append(values[:ends])
        cosines.append(values[ends : ends + int(row[1])])
    return StepNorms(
        norms=torch.cat(norms),
        group_sums=rows[:, _HEAD:behind].sum(0).view(groups),
        samples=int(rows[:, 2].sum()),
        batches=int(rows[:, 3].sum()),
        coverage=float(rows[:, 4].min()),
        gradient=rows[:, behind : behind + known],
        cosines=torch.cat(cosines),
        sq_sum=float(rows[:, 5].sum()),
    )


def percent(quantile: float) -> str:
    """The name of a quantile."""
    return f"p{100 * quantile:.10g}"


def _to_host(window: Sequence[CapturedBatch], groups: Sequence[str]) -> Tensor:
    """Norms of all samples, below them those of each group, and weights, (1 + groups + 1, samples), in one transfer."""
    blocks = []
    for captured in window:
        if captured.norms is not None:
            absent = torch.full_like(captured.norms, math.nan)
            weights = torch.ones_like(absent) if captured.weights is None else captured.weights.to(absent)
            rows = [captured.norms, *(captured.groups.get(g, absent).to(absent.dtype) for g in groups), weights]
            blocks.append(torch.stack(rows))
    if not blocks:
        return torch.empty(1 + len(groups) + 1, 0, dtype=torch.float64)
    return torch.cat(blocks, dim=1).cpu().double()
