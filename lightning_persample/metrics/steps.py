"""Metrics of optimizer steps, of which a call may hold a part: which parts make up a step, and which steps count.

Sums over samples add up over parts. What depends on a whole step does not (whether it is left out, the sign of an
estimate, its place in a moving average), so that parts are kept until `compute`, and joined to steps there.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_persample.errors import OptionError, PerSampleError
from lightning_persample.metrics.base import PerSampleMetric, as_batch_size, as_scalar, as_vector

__all__ = ["StepMetric", "Steps"]

_COLUMNS = _STEP, _SAMPLES, _NONFINITE, _SUM, _SIZE, _SQ_NORM_OF_MEAN = range(6)  # of a part
_LOOSE_PARTS = 1024  # parts kept as tensors of their own: a small tensor takes many times its numbers
_AGREE = 1e-3  # how far the squared norms of one averaged gradient may differ between processes, relatively


@dataclass(frozen=True)
class Steps:
    """The steps that count, in order, and how many do not.

    Attributes:
        share: n / B, the share of the step's samples that were given, (k,); 1 once all parts are there.
        samples: n, (k,).
        batch_size: B, (k,).
        sum_of_sq_norms: sum of ||g_i||^2 over the samples given, (k,).
        sq_norm_of_mean: ||gbar||^2, (k,).
        skipped: number of steps left out for a sample or a mean that is not finite.
        undefined: number of steps left out because the quantity has no value there.
        nonfinite: number of samples that are not finite.
    """

    share: Tensor
    samples: Tensor
    batch_size: Tensor
    sum_of_sq_norms: Tensor
    sq_norm_of_mean: Tensor
    skipped: Tensor
    undefined: Tensor
    nonfinite: Tensor


class StepMetric(PerSampleMetric):
    """Base of the metrics that have one value for each optimizer step."""

    parts: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._new_list("parts", len(_COLUMNS))

    def update(
        self,
        sq_norms: Tensor,
        sq_norm_of_mean: Tensor | float,
        batch_size: int | None = None,
        step: int | None = None,
    ) -> None:
        """Add a step, or a part of one.

        All calls with the same `step` are parts of one step, on whatever process. Without `step`, consecutive calls
        with the same `batch_size` and the same `sq_norm_of_mean` are, until they make up `batch_size` samples, and the
        k-th steps of all processes are one: every process then calls this for every step, with an empty tensor where it
        has no samples. Give `step` if two steps in a row may have the same batch at the same weights.

        Args:
            sq_norms: ||g_i||^2 of the samples at hand, (n,), of any floating dtype.
            sq_norm_of_mean: ||gbar||^2 of the mean gradient over the effective batch, over all processes and
                accumulated batches: that of the gradient which the optimizer gets, if the loss is a mean over samples.
            batch_size: number of samples B of the effective batch; None if all of them are at hand.
            step: number of the optimizer step, as ``trainer.global_step``; given at every call or at none.

        Raises:
            OptionError: `step` is not an integer.
        """
        if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
            raise OptionError(f"step is {step!r}; allowed is None or the number of the optimizer step")
        norms = as_vector(sq_norms, "sq_norms", self.device)
        mean = as_scalar(sq_norm_of_mean, "sq_norm_of_mean", self.device)
        size = as_batch_size(batch_size, norms.numel())
        finite = norms.isfinite()
        part = mean.new_zeros(1, len(_COLUMNS))
        part[0, _STEP] = math.nan if step is None else step
        part[0, _SAMPLES] = norms.numel()
        part[0, _NONFINITE] = (~finite).sum()
        part[0, _SUM] = norms.where(finite, 0.0).sum()
        part[0, _SIZE] = size
        part[0, _SQ_NORM_OF_MEAN] = mean
        if len(self.parts) >= _LOOSE_PARTS:
            self.parts[:] = [torch.cat(self.parts)]
        self.parts.append(part)

    def counts(self) -> dict[str, Tensor]:
        """What the value rests on, over all processes.

        Returns:
            ``steps`` that count, ``skipped_steps`` with a sample or a mean that is not finite, ``undefined_steps``
            that have no value (one sample, see the class), and ``nonfinite`` samples. A step of which only a part was
            given counts as that part of one.
        """
        with self._synced():
            steps = self._steps()
        return {
            "steps": steps.share.sum(),
            "skipped_steps": steps.skipped,
            "undefined_steps": steps.undefined,
            "nonfinite": steps.nonfinite,
        }

    @abstractmethod
    def _is_defined(self, batch_size: Tensor, sq_norm_of_mean: Tensor) -> Tensor:
        """Whether finite steps have a value, (k,)."""

    def _sync_dist(self, *args: Any, **kwargs: Any) -> None:
        self.parts = [_numbered(self._joined("parts"))]  # while it is known which parts are of this process
        super()._sync_dist(*args, **kwargs)

    def _steps(self) -> Steps:
        columns = _numbered(self._joined("parts")).unbind(1)
        numbers, step = columns[_STEP].unique(return_inverse=True)
        zeros = columns[_STEP].new_zeros(numbers.numel())

        def total(values: Tensor) -> Tensor:
            return zeros.index_add(0, step, values.to(zeros.dtype))

        samples, nonfinite, sum_of_sq_norms = (total(columns[column]) for column in (_SAMPLES, _NONFINITE, _SUM))
        mean_is_finite = columns[_SQ_NORM_OF_MEAN].isfinite()
        skipped = (nonfinite > 0) | (total(~mean_is_finite) > 0)
        size = _one_value(columns[_SIZE], step, numbers, "batch_size", 0.0)
        means = columns[_SQ_NORM_OF_MEAN].where(mean_is_finite & ~skipped[step], 0.0)
        mean = _one_value(means, step, numbers, "sq_norm_of_mean", _AGREE)
        whole = total((columns[_SAMPLES] == columns[_SIZE]) & (columns[_SAMPLES] > 0))
        if (whole > 1).any():
            raise PerSampleError(
                f"step {int(numbers[whole > 1][0])} was given several whole batches: batch_size is the number of "
                "samples of all processes and accumulated batches together, and update() needs it where a call has a "
                "part of them only"
            )
        share = samples / size.clamp(min=1)
        defined = self._is_defined(size, mean)
        used = ~skipped & defined & (samples > 0)
        return Steps(
            share[used],
            samples[used],
            size[used],
            sum_of_sq_norms[used],
            mean[used],
            skipped=share[skipped].sum(),
            undefined=share[~skipped & ~defined].sum(),
            nonfinite=nonfinite.sum(),
        )


def _numbered(parts: Tensor) -> Tensor:
    """Parts of one process in the order of the calls, (k, columns), each with the number of its step."""
    unnumbered = parts[:, _STEP].isnan()
    if not unnumbered.any():
        return parts
    if not unnumbered.all():
        raise PerSampleError("update() was called with step and without; give it at every call or at none")
    samples, size, mean = parts[:, _SAMPLES].long(), parts[:, _SIZE].long(), parts[:, _SQ_NORM_OF_MEAN]
    finite = mean.isfinite()
    same_mean = (mean[1:] == mean[:-1]) | ~(finite[1:] | finite[:-1])
    changes = ~(same_mean & (size[1:] == size[:-1]))
    starts = torch.cat([changes.new_ones(1), changes])  # of runs of parts that agree
    before = samples.cumsum(0) - samples
    before = before - before[starts][starts.long().cumsum(0) - 1]  # samples of the run before each of its parts
    filled = before // size.clamp(min=1)  # steps of the run that they make up
    starts[1:] |= filled[1:] != filled[:-1]
    numbers = (starts.long().cumsum(0) - 1).to(parts.dtype)
    return torch.cat([numbers[:, None], parts[:, _SAMPLES:]], dim=1)


def _one_value(values: Tensor, step: Tensor, numbers: Tensor, name: str, tolerance: float) -> Tensor:
    """What all parts of a step agree on, (k,)."""
    zeros = torch.zeros_like(numbers)
    largest = zeros.scatter_reduce(0, step, values, "amax", include_self=False)
    smallest = zeros.scatter_reduce(0, step, values, "amin", include_self=False)
    differs = largest - smallest > tolerance * largest.abs()
    if differs.any():
        at, least, most = (values[differs][0].item() for values in (numbers, smallest, largest))
        raise PerSampleError(
            f"parts of step {int(at)} disagree on {name}: {least:g} and {most:g}; it is one number for the whole step, "
            "over all processes and accumulated batches. Without step=, every process has to call update() for every "
            "step"
        )
    return largest
