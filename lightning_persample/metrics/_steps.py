"""Metrics of optimizer steps, of which a call may hold a part: which parts make up a step, and which steps count.

Sums over samples add up over parts. What depends on a whole step does not (whether it is left out, the sign of an
estimate, its place in a moving average), so that parts are kept until `compute`, and joined to steps there.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_persample.errors import PerSampleError
from lightning_persample.metrics._inputs import as_batch_size, as_scalar, as_vector
from lightning_persample.metrics.base import PerSampleMetric

__all__ = ["StepMetric", "Steps"]

_COLUMNS = _SAMPLES, _NONFINITE, _SUM, _SIZE, _SQ_NORM_OF_MEAN = range(5)  # of a part
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

    def update(self, sq_norms: Tensor, sq_norm_of_mean: Tensor | float, batch_size: int | None = None) -> None:
        """Add a step, or a part of one.

        Consecutive calls with the same `batch_size` and the same `sq_norm_of_mean` are parts of one step, until they
        make up `batch_size` samples. Under DDP every process calls this for every step, with its own samples (an empty
        tensor if it has none); the k-th steps of all processes are one step.

        Args:
            sq_norms: ||g_i||^2 of the samples at hand, (n,), of any floating dtype.
            sq_norm_of_mean: ||gbar||^2 of the mean gradient over the effective batch, over all processes and
                accumulated batches: that of the gradient which the optimizer gets, if the loss is a mean over samples.
            batch_size: number of samples B of the effective batch; None if all of them are at hand.
        """
        norms = as_vector(sq_norms, "sq_norms", self.device)
        mean = as_scalar(sq_norm_of_mean, "sq_norm_of_mean", self.device)
        size = as_batch_size(batch_size, norms.numel())
        finite = norms.isfinite()
        part = mean.new_zeros(1, len(_COLUMNS))
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
        parts = self._joined("parts")
        parts = _numbered(parts) if parts.shape[1] == len(_COLUMNS) else parts
        numbers, step = parts[:, 0].unique(return_inverse=True)
        zeros = parts.new_zeros(numbers.numel())
        samples, nonfinite, sum_of_sq_norms = (
            zeros.index_add(0, step, parts[:, 1 + column]) for column in (_SAMPLES, _NONFINITE, _SUM)
        )
        size = _same(parts[:, 1 + _SIZE], step, zeros, "batch_size", 0.0)
        is_finite = parts[:, 1 + _SQ_NORM_OF_MEAN].isfinite()
        broken = zeros.index_add(0, step, (~is_finite).to(zeros.dtype)) > 0
        means = parts[:, 1 + _SQ_NORM_OF_MEAN].where(is_finite, 0.0)
        skipped = broken | (nonfinite > 0)
        mean = _same(means, step, zeros, "sq_norm_of_mean", _AGREE, ~broken)
        whole = zeros.index_add(0, step, ((parts[:, 1] > 0) & (parts[:, 1] == parts[:, 1 + _SIZE])).to(zeros.dtype))
        if (~skipped & (whole > 0) & (samples > size)).any():
            raise PerSampleError(
                "several processes gave a whole batch for the same step: batch_size is the number of samples of all "
                "processes together, and it has to be given to update() where a process has a share of them only"
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
            nonfinite=nonfinite.sum().long(),
        )


def _numbered(parts: Tensor) -> Tensor:
    """Parts of one process in the order of the calls, each behind the number of its step, (k, 6)."""
    samples, size, mean = parts[:, _SAMPLES].long(), parts[:, _SIZE].long(), parts[:, _SQ_NORM_OF_MEAN]
    finite = mean.isfinite()
    same_mean = (mean[1:] == mean[:-1]) | ~(finite[1:] | finite[:-1])
    changes = ~(same_mean & (size[1:] == size[:-1]))
    before = samples.cumsum(0) - samples
    first = torch.cat([changes.new_ones(min(1, len(parts))), changes])  # parts that start a run of equal ones
    before = before - before[first][first.long().cumsum(0) - 1]
    filled = before // size.clamp(min=1)  # steps that the run has filled up
    starts = first.clone()
    starts[1:] |= filled[1:] != filled[:-1]
    return torch.cat([(starts.long().cumsum(0) - 1)[:, None].to(parts.dtype), parts], dim=1)


def _same(
    values: Tensor, step: Tensor, zeros: Tensor, name: str, tolerance: float, checked: Tensor | None = None
) -> Tensor:
    """What all parts of a step agree on, (k,)."""
    largest = zeros.scatter_reduce(0, step, values, "amax", include_self=False)
    smallest = zeros.scatter_reduce(0, step, values, "amin", include_self=False)
    differs = largest - smallest > tolerance * largest.abs()
    if (differs if checked is None else differs & checked).any():
        at = int((differs if checked is None else differs & checked).nonzero()[0])
        raise PerSampleError(
            f"processes disagree on {name} of step {at}: {smallest[at].item():g} and {largest[at].item():g}; it is one "
            "number for the whole step, over all processes, and every process calls update() for every step"
        )
    return largest
