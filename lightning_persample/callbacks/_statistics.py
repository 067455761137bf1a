"""What is logged of an optimizer step, and of the logged steps of an epoch."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_persample.callbacks._mean_gradient import joined_sq_norms, norm_of_loss_gradient
from lightning_persample.callbacks._step_norms import StepNorms, percent
from lightning_persample.metrics import PerSampleNorm
from lightning_persample.metrics.functional import (
    diversity_of_sums,
    quantiles_of_sorted,
    simple_noise_scale,
    terms_of_sums,
)

__all__ = ["STATISTICS", "Part", "Statistics"]

STATISTICS = ("noise_scale", "diversity", "cosine_to_mean", "signal_to_noise")
_DECAY = 0.95
_TOGETHER = 64  # steps whose norms are taken in for the epoch in one go


@dataclass
class _NoiseScale:
    """S and |G|^2 over several steps, of which the noise scale is the ratio; both are sums, the older steps less.

    A step weighs by its number of samples: |G|^2 of a small batch is mostly noise.
    """

    S: float = 0.0
    G2: float = 0.0
    samples: float = 0.0

    def update(self, S: float, G2: float, samples: float, decay: float) -> None:
        if math.isfinite(S) and math.isfinite(G2):
            self.S, self.G2 = decay * self.S + samples * S, decay * self.G2 + samples * G2
            self.samples = decay * self.samples + samples


def _ratios(scales: Sequence[_NoiseScale]) -> list[float]:
    S, G2 = torch.tensor([[each.S for each in scales], [each.G2 for each in scales]], dtype=torch.float64)
    return simple_noise_scale(S, G2).tolist()


class Statistics:
    """The statistics of the steps of one optimizer, or of all.

    Args:
        chosen: of `STATISTICS`.
        quantiles: of the norms.
        groups: names of the groups of parameters.
    """

    def __init__(self, chosen: Collection[str], quantiles: Sequence[float], groups: Sequence[str]) -> None:
        self._chosen, self._quantiles, self._groups = frozenset(chosen), tuple(quantiles), tuple(groups)
        self._running = [_NoiseScale() for _ in range(1 + len(groups))]
        self.start_epoch()

    def start_epoch(self) -> None:
        """Forget the steps of the last epoch."""
        self._epoch_norms: PerSampleNorm | None = None  # made when it is needed: epochs can be short
        self._waiting: list[Tensor] = []
        self._epoch_scales = [_NoiseScale() for _ in self._running]
        self._epoch_sums: dict[str, list[float]] = {}
        self._epoch_groups: dict[str, list[float]] = {}

    def of_step(self, step: StepNorms, signal_to_noise: Tensor | None = None) -> dict[str, float]:
        """What is logged of a step, by name without prefix."""
        finite = step.norms.isfinite()
        norms = step.norms[finite]
        self._waiting.append(step.norms)
        if len(self._waiting) >= _TOGETHER:
            self._settle()
        values = _describe(norms, self._quantiles)
        values["coverage"] = step.coverage
        values["nonfinite"] = float((~finite).sum())
        for group, (total, count, _) in zip(self._groups, step.group_sums.tolist(), strict=True):
            values[f"{group}/norm_mean"] = total / count if count else math.nan
            sums = self._epoch_groups.setdefault(group, [0.0, 0.0])
            sums[0], sums[1] = sums[0] + total, sums[1] + count
        if self._chosen:
            self._add_of_mean(values, step, norms)
        if "signal_to_noise" in self._chosen:
            found = [math.nan] * len(self._running) if signal_to_noise is None else signal_to_noise.tolist()
            values |= dict(zip(self._named("signal_to_noise"), found, strict=True))
        for name, value in values.items():
            if name.rpartition("/")[2] in ("diversity", "cosine_to_mean", "signal_to_noise") and math.isfinite(value):
                self._epoch_sums.setdefault(name, []).append(value)
        return values

    def _settle(self) -> None:
        """Take in the norms that wait, for the values of the epoch."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            if self._epoch_norms is None:
                self._epoch_norms = PerSampleNorm(quantiles=self._quantiles, sync_on_compute=False)
            self._epoch_norms.update(torch.cat(waiting))

    def of_epoch(self) -> dict[str, float]:
        """What is logged at the end of an epoch, of all samples of its logged steps, by name without prefix."""
        self._settle()
        if self._epoch_norms is None:
            return {}
        found = {name: float(value) for name, value in self._epoch_norms.compute().items()}
        count = found.pop("count")
        nonfinite = found.pop("nonfinite")
        values = {f"norm_{name}": value if count else math.nan for name, value in found.items()}
        values["nonfinite"] = nonfinite
        for group, (total, number) in self._epoch_groups.items():
            values[f"{group}/norm_mean"] = total / number if number else math.nan
        if "noise_scale" in self._chosen:
            values |= dict(zip(self._named("noise_scale"), _ratios(self._epoch_scales), strict=True))
        for name in ("diversity", "cosine_to_mean", "signal_to_noise"):
            if name in self._chosen:
                for each in self._named(name) if name != "cosine_to_mean" else [name]:
                    terms = self._epoch_sums.get(each, [])
                    values[each] = sum(terms) / len(terms) if terms else math.nan
        return {f"{name}_epoch": value for name, value in values.items()}

    @cached_property
    def names(self) -> list[str]:
        """The names that `of_step` gives."""
        shadow = Statistics(self._chosen, self._quantiles, self._groups)
        return list(shadow.of_step(StepNorms.of_window([], self._groups)))

    def state_dict(self) -> list[list[float]]:
        """The running sums, in plain containers."""
        return [[each.S, each.G2, each.samples] for each in self._running]

    def load_state_dict(self, state: list[list[float]]) -> None:
        """Go on from sums that `state_dict` gave for as many groups."""
        if len(state) == len(self._running):
            self._running = [_NoiseScale(*each) for each in state]

    def _named(self, name: str) -> list[str]:
        return [name, *(f"{group}/{name}" for group in self._groups)]

    def _add_of_mean(self, values: dict[str, float], step: StepNorms, norms: Tensor) -> None:
        numbers = step.gradient
        size = numbers[:, 2].sum() if numbers.shape[1] else torch.tensor(math.nan)
        empty = torch.full((len(self._running),), math.nan, dtype=torch.float64)
        means = joined_sq_norms(numbers) if numbers.shape[1] else empty
        sums = torch.cat([torch.tensor([step.sq_sum], dtype=torch.float64), step.group_sums[:, 2]])
        # A sample that is not finite is in the mean gradient, too, which is then not finite either.
        # (A sample whose batch has no use of a group has a gradient of zero there.)
        of_batch = sums / norms.numel() * size  # of some of the samples alone (max_samples), an unbiased estimate
        if "cosine_to_mean" in self._chosen:
            cosines = step.cosines[step.cosines.isfinite()] if means[0].isfinite() else step.cosines[:0]
            values["cosine_to_mean"] = cosines.mean().item() if cosines.numel() else math.nan
            values["cosine_to_mean_min"] = cosines.min().item() if cosines.numel() else math.nan
        if self._chosen & {"noise_scale", "diversity"}:
            values["norm_of_mean"] = norm_of_loss_gradient(numbers)
        if "noise_scale" in self._chosen:
            terms, count = torch.stack(terms_of_sums(of_batch, size, size, means), dim=1).tolist(), float(size)
            for place, (S, G2) in enumerate(terms):
                if norms.numel() == count:  # a variance, which only rounding makes negative
                    S = max(S, 0.0) if math.isfinite(S) else S
                self._running[place].update(S, G2, count, _DECAY)
                self._epoch_scales[place].update(S, G2, count, 1.0)
            ratios = zip(self._named("noise_scale"), terms, _ratios(self._running), strict=True)
            values |= {name: ratio if math.isfinite(S) else math.nan for name, (S, _), ratio in ratios}
        if "diversity" in self._chosen:
            found = diversity_of_sums(of_batch, size, means).tolist()
            values |= dict(zip(self._named("diversity"), found, strict=True))


@dataclass(frozen=True)
class Part:
    """Names that are logged together: all, or those of one optimizer."""

    prefix: str
    groups: tuple[str, ...]
    statistics: Statistics


def _describe(norms: Tensor, quantiles: Sequence[float]) -> dict[str, float]:
    names = ["norm_mean", "norm_std", "norm_min", "norm_max", *(f"norm_{percent(q)}" for q in quantiles)]
    if norms.numel() == 0:
        return dict.fromkeys(names, math.nan)
    std = norms.std() if norms.numel() > 1 else torch.tensor(math.nan)
    ordered = norms.sort().values
    parts = [norms.mean(), std, ordered[0], ordered[-1], *quantiles_of_sorted(ordered, quantiles)]
    return {name: part.item() for name, part in zip(names, parts, strict=True)}
