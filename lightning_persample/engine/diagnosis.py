"""Why per-sample gradients differ from the one-sample loop: numbers first, then what the capture noted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_persample.engine.record import PerSampleRecord
from lightning_persample.engine.samples import Weighting

__all__ = ["PENALTY", "RANDOM", "Comparison", "keep_apart", "why_different"]

PENALTY = (
    "apart from one term, the same in every one-sample loss: a penalty on the parameters, or another term of the loss "
    "that belongs to no sample, is in no sample's own gradient"
)
RANDOM = (
    "the loss changes with the random seed (dropout, noise): from one seed, a batch and a single sample cannot draw "
    "the same numbers, so the two cannot be compared; check in evaluation mode, module.eval(), with probability 0, or "
    "with noise that comes with the batch, one row per sample"
)
_UNKNOWN = "no cause was found: a fault of lightning_persample or of a registered rule, please report it"
_SMALLEST_PART = 1e-2


@dataclass(frozen=True)
class Comparison:
    """The same gradients twice, by parameter name, each (B, *shape) and finite.

    Attributes:
        engine: those of the engine.
        loop: those of the one-sample loop.
        tolerance: largest relative error that counts as agreement.
    """

    engine: Mapping[str, Tensor]
    loop: Mapping[str, Tensor]
    tolerance: float

    def error(self, name: str, factor: Tensor | float = 1.0) -> float:
        """Largest relative error of one parameter's gradients against the loop's, multiplied by `factor` (B,)."""
        engine, loop = self.engine[name].flatten(1), self.loop[name].flatten(1)
        factors = torch.as_tensor(factor, dtype=loop.dtype, device=loop.device).reshape(-1, 1)
        difference = (engine - factors * loop).norm(dim=1)
        scale = factors.abs().flatten() * loop.norm(dim=1).clamp_min(self._smallest())
        return float(torch.where(difference == 0, 0.0, difference / scale).max())

    def agrees(self, name: str, factor: Tensor | float = 1.0) -> bool:
        """Whether a parameter's gradients equal the loop's times `factor`."""
        return self.error(name, factor) <= self.tolerance

    def factors(self) -> Tensor:
        """For each sample the multiple of the loop's gradient closest to the engine's, (B,); of zeros, their mean."""
        products = [(self.engine[n] * self.loop[n]).flatten(1).sum(1).double().cpu() for n in self.loop]
        squares = [self.loop[n].square().flatten(1).sum(1).double().cpu() for n in self.loop]
        product, square = torch.stack(products).sum(0), torch.stack(squares).sum(0)
        zeros = (product == 0) & (square == 0)
        return torch.where(zeros, (product / square)[~zeros].mean(), product / square)

    def error_beside_a_constant(self, name: str) -> float:
        """Largest relative error of one parameter, apart from a difference that is the same for all samples."""
        loop, difference = self.loop[name].flatten(1), (self.loop[name] - self.engine[name]).flatten(1)
        scale = float(loop.norm(dim=1).max().clamp_min(self._smallest()))
        if _spread(loop) <= self.tolerance * scale:
            return math.inf
        return _spread(difference) / scale

    def _smallest(self) -> float:
        squares = [grads.flatten(1).square().sum(1) for grads in self.loop.values()]
        return _SMALLEST_PART * float(torch.stack([each.cpu() for each in squares]).sum(0).max().sqrt())


def _spread(rows: Tensor) -> float:
    return float((rows - rows[:1]).norm(dim=1).max())


def why_different(
    compared: Comparison,
    record: PerSampleRecord,
    loss_reduction: Weighting,
    is_random: Callable[[], bool],
    other_axes: str,
) -> str:
    """The reason that fits the parameters that differ."""
    factors = compared.factors()
    mean = float(factors.mean())
    if mean and all(compared.agrees(name, mean) for name in compared.loop):
        return _wrong_reduction(mean, record.batch_size, loss_reduction)
    if record.mixing or record.axis_lost:
        cause = (
            "samples influence each other, so a sample in its batch and the same sample alone have different gradients"
            if record.mixing
            else "the batch axis is lost, and values computed from there on cannot be assigned to samples"
        )
        texts = "; ".join((*record.mixing, *record.axis_lost))
        remedy = f"; {keep_apart(record.mixing)}" if record.mixing else ""
        return f"{cause}; the engine gives each sample's contribution to the batch's gradient: {texts}{remedy}"
    if is_random():
        return RANDOM
    if bool(factors.isfinite().all() & (factors != 0).all()) and all(
        compared.agrees(name, factors.to(grads)) for name, grads in compared.loop.items()
    ):
        return "; ".join((_unequal_weights(factors, loss_reduction), *record.weighting))
    if record.weighting:
        return "; ".join(record.weighting)
    return other_axes or _UNKNOWN


def keep_apart(mixing: Sequence[str]) -> str:
    """What helps where these calls let samples influence each other."""
    norm = " (GroupNorm in place of BatchNorm, or BatchNorm in evaluation mode)"
    is_norm = any("batch_norm` on" in text for text in mixing)
    return f"use layers and losses that keep samples apart{norm if is_norm else ''}"


def _wrong_reduction(factor: float, batch_size: int, loss_reduction: Weighting) -> str:
    found = f"every value of the engine is {factor:.4g} times the loop's"
    if callable(loss_reduction):
        return f"{found}: the weights that loss_reduction returns are not those of the samples in the loss"
    given = f"loss_reduction={loss_reduction!r} does not fit the loss"
    weight = factor / batch_size if loss_reduction == "mean" else factor
    for fitting, expected in (("sum", 1.0), ("mean", 1 / batch_size)):
        if abs(weight - expected) <= 0.01 * expected:
            return f"{found}: {given}, loss_reduction={fitting!r} does"
    return (
        f"{found}: {given}, nor does another name; give a function (outputs, batch) that returns each sample's weight "
        f"in the loss, here {weight:.4g}"
    )


def _unequal_weights(factors: Tensor, loss_reduction: Weighting) -> str:
    listed = ", ".join(f"{factor:.4g}" for factor in factors.tolist())
    given = "" if callable(loss_reduction) else f", and not equally as loss_reduction={loss_reduction!r} says"
    return (
        f"each sample's gradient is off by a factor of its own ({listed}): the samples weigh unequally in the "
        f"loss{given}; give a function (outputs, batch) as loss_reduction that returns each sample's weight in the loss"
    )
