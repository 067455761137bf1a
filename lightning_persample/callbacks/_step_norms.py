"""The norms of all samples of an optimizer step, from every batch and every process, and what is logged of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CapturedBatch", "NormsOfAllProcesses", "StepNorms", "percent"]

_HEAD = 4  # numbers that say how many norms, samples and batches, and the coverage
_ROOM = 1024  # norms of a process that the first exchange has room for


@dataclass(frozen=True)
class CapturedBatch:
    """What is kept of one batch: norms (B,), or None if no parameter was captured, and norms (B,) by group."""

    batch_size: int
    norms: Tensor | None
    groups: Mapping[str, Tensor]
    coverage: float


@dataclass(frozen=True, eq=False)
class StepNorms:
    """The norms of the samples of one optimizer step, on the host in double precision.

    Attributes:
        norms: of each sample, over all parameters, (samples,).
        group_sums: for each group the sum of its finite norms and their number, (groups, 2), of samples whose norm over
            all parameters is finite.
        samples: number of samples captured, those without a norm included.
        batches: number of batches captured.
        coverage: the least of the batches; infinite where there is none.
    """

    norms: Tensor
    group_sums: Tensor
    samples: int
    batches: int
    coverage: float

    @classmethod
    def of_window(cls, window: Sequence[CapturedBatch], groups: Sequence[str]) -> StepNorms:
        """Join the batches of this process, in one transfer from their device.

        Args:
            window: the captured batches of one optimizer step.
            groups: names of the groups of parameters.

        Returns:
            The norms of their samples.
        """
        rows = _to_host(window, groups)
        norms, by_group = rows[0], rows[1:]
        counted = norms.isfinite() & ~by_group.isnan()
        sums = torch.stack([by_group.where(counted, 0.0).sum(1), counted.sum(1).double()], dim=1)
        coverage = min((captured.coverage for captured in window), default=math.inf)
        return cls(norms, sums, sum(captured.batch_size for captured in window), len(window), coverage)

    def statistics(self, quantiles: Sequence[float], groups: Sequence[str]) -> dict[str, float]:
        """What is logged, by name without prefix."""
        finite = self.norms.isfinite()
        values = _describe(self.norms[finite], quantiles)
        values["coverage"] = self.coverage
        values["nonfinite"] = float((~finite).sum())
        for group, (total, count) in zip(groups, self.group_sums.tolist(), strict=True):
            values[f"{group}/norm_mean"] = total / count if count else math.nan
        return values


class NormsOfAllProcesses:
    """Joins the norms of all processes with one collective for each step.

    Quantiles need every norm, so each process sends its own in a tensor with room for as many as any process has had
    so far, 1024 at first, together with everything else. Where a process has more, all of them learn it from what they
    receive, and exchange once more with enough room: only a step that is larger than all before costs two collectives.
    """

    def __init__(self) -> None:
        self._room = _ROOM

    def join(self, own: Sequence[StepNorms], device: torch.device) -> list[StepNorms]:
        """The norms of all processes; each has to call this, also one that has none, and gets the same.

        Args:
            own: those of this process, for each monitor that logs at this step.
            device: where the process group exchanges tensors.

        Returns:
            The norms of all processes for each of those monitors, by rank.
        """
        parts = self._exchange(own, device)
        most = max(int(rows[:, 0].max()) for rows in parts)
        if most > self._room:
            self._room = 2 ** math.ceil(math.log2(most))
            parts = self._exchange(own, device)
        return [_joined(rows, each.group_sums.shape) for rows, each in zip(parts, own, strict=True)]

    def _exchange(self, own: Sequence[StepNorms], device: torch.device) -> tuple[Tensor, ...]:
        """For each of `own` what every process sent, (processes, numbers)."""
        sent = [self._numbers(each) for each in own]
        together = torch.cat(sent).to(device)
        received = [torch.empty_like(together) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(received, together)
        return torch.stack(received).cpu().split([numbers.numel() for numbers in sent], dim=1)

    def _numbers(self, own: StepNorms) -> Tensor:
        head = own.norms.new_tensor([own.norms.numel(), own.samples, own.batches, own.coverage])
        whole = torch.cat([head, own.group_sums.flatten(), own.norms])
        numbers = torch.zeros(_HEAD + own.group_sums.numel() + self._room, dtype=torch.float64)
        numbers[: whole.numel()] = whole[: numbers.numel()]
        return numbers


def _joined(rows: Tensor, group_shape: torch.Size) -> StepNorms:
    behind = _HEAD + group_shape.numel()
    return StepNorms(
        norms=torch.cat([row[behind : behind + int(row[0])] for row in rows]),
        group_sums=rows[:, _HEAD:behind].sum(0).view(group_shape),
        samples=int(rows[:, 1].sum()),
        batches=int(rows[:, 2].sum()),
        coverage=float(rows[:, 3].min()),
    )


def percent(quantile: float) -> str:
    """The name of a quantile."""
    return f"p{100 * quantile:.10g}"


def _to_host(window: Sequence[CapturedBatch], groups: Sequence[str]) -> Tensor:
    """Norms of all samples and below them those of each group, (1 + groups, samples), in one transfer."""
    blocks = []
    for captured in window:
        if captured.norms is not None:
            absent = torch.full_like(captured.norms, math.nan)
            rows = [captured.norms, *(captured.groups.get(group, absent).to(absent.dtype) for group in groups)]
            blocks.append(torch.stack(rows))
    if not blocks:
        return torch.empty(1 + len(groups), 0, dtype=torch.float64)
    return torch.cat(blocks, dim=1).cpu().double()


def _describe(norms: Tensor, quantiles: Sequence[float]) -> dict[str, float]:
    names = ["norm_mean", "norm_std", "norm_min", "norm_max", *(f"norm_{percent(q)}" for q in quantiles)]
    if norms.numel() == 0:
        return dict.fromkeys(names, math.nan)
    std = norms.std() if norms.numel() > 1 else torch.tensor(math.nan)
    parts = [norms.mean(), std, norms.min(), norms.max(), *torch.quantile(norms, norms.new_tensor(quantiles))]
    return {name: part.item() for name, part in zip(names, parts, strict=True)}
