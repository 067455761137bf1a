"""Metrics that average over optimizer steps, of which a call may hold a part.

Sums over samples add up over parts. What depends on a whole step does not (whether it is left out, the sign of an
estimate, its place in a moving average), so that parts are kept until `compute`, and joined to steps there. A step
that is given whole, as sums over all its samples, is added to the averages at once.
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
from lightning_persample.metrics.functional import diversity_of_sums, simple_noise_scale, terms_of_sums

_COLUMNS = _STEP, _SAMPLES, _NONFINITE, _SUM, _SIZE, _SQ_NORM_OF_MEAN = range(6)  # of a part
_LOOSE_PARTS = 1024  # parts kept as tensors of their own: a small tensor takes many times its numbers
_AGREE = 1e-3  # how far the squared norms of one averaged gradient may differ between processes, relatively


@dataclass(frozen=True)
class _Steps:
    """The steps that count, in order, each number (k,), and how many do not."""

    share: Tensor  # n / B, the share of the step's samples that were given; 1 once all parts are there
    samples: Tensor  # n
    batch_size: Tensor  # B
    sum_of_sq_norms: Tensor  # of the samples given
    sq_norm_of_mean: Tensor
    skipped: Tensor  # number of steps left out for a sample or a mean that is not finite
    undefined: Tensor  # number of steps left out because the quantity has no value there
    nonfinite: Tensor  # number of samples that are not finite


class _AverageOverSteps(PerSampleMetric):
    """Base of the metrics whose terms are averaged over steps, in a state of one size."""

    decay: float | None = None
    folded: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._new_state(0.0, "sum", "folded")

    def _fold(self, terms: Tensor, weights: Tensor | float) -> None:
        """Add steps in order by their terms, (terms, k, ...); where one of them is not finite, none of a step count."""
        counts = terms.isfinite().all(0)
        rows = (weights * torch.cat([terms, torch.ones_like(terms[:1])])).where(counts, 0.0)
        counted = counts.to(terms.dtype)
        later = counted.flip(0).cumsum(0).flip(0) - counted  # how many steps count after each
        decay = 1.0 if self.decay is None else self.decay
        self.folded = decay ** counted.sum(0) * self.folded + (decay**later * rows).sum(1)

    def _totals(self) -> Tensor:
        """Weighted sums of the terms, and below them of the weights, (terms + 1, ...)."""
        return self.folded if self.folded.dim() else self.folded.new_zeros(2)

    def _averages(self) -> Tensor:
        """The average of each term, (terms, ...); nan where no step counts."""
        totals = self._totals()
        return (totals[:-1] / totals[-1]).where(totals[-1] > 0, math.nan)


class MeanOverSteps(_AverageOverSteps):
    """Mean over steps of any values, (...), each of the steps where it is finite."""

    _title, _axis = "Mean over steps", "mean"

    def update(self, values: Tensor, weights: Tensor | float = 1.0) -> None:
        """Add the values of steps, (k, ...)."""
        self._fold(values[None], weights)

    def compute(self) -> Tensor:
        """The means, (...)."""
        return self._averages()[0]


class _StepMetric(_AverageOverSteps):
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

    def update_sums(
        self, sum_of_sq_norms: Tensor, sq_norm_of_mean: Tensor, batch_size: Tensor, samples: Tensor
    ) -> Tensor:
        """Add whole steps from sums over the samples of all processes, each given once, in memory of one size.

        Nothing is exchanged with other processes, and `counts` leaves the steps out. Their place in a moving average is
        before the steps of `update`. Sums of several groups of parameters give a value for each.

        Args:
            sum_of_sq_norms: sum of ||g_i||^2 of k steps, (k, ...), for example one for each group of parameters.
            sq_norm_of_mean: ||gbar||^2, of the same shape.
            batch_size: number of samples B of the effective batch, (k,).
            samples: of how many of them, chosen at random, the sum is, (k,); what it lacks is estimated.

        Returns:
            The steps' own terms, (terms, k, ...), which are averaged over steps that have a value (see the class).
        """
        self._update_count += 1
        ones = [1] * (sum_of_sq_norms.dim() - 1)
        size, samples = batch_size.view(-1, *ones), samples.view(-1, *ones)
        terms = self._terms(sum_of_sq_norms, samples, size, sq_norm_of_mean) * (size / samples)
        self._fold(terms.where(self._is_defined(size, sq_norm_of_mean), math.nan), self._weight(size))
        return terms

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

    @abstractmethod
    def _terms(self, sums: Tensor, samples: Tensor, batch_size: Tensor, sq_norm_of_mean: Tensor) -> Tensor:
        """What is averaged over steps, (terms, ...), of parts of steps their share."""

    def _weight(self, batch_size: Tensor) -> Tensor:
        """How much each step weighs."""
        return torch.ones_like(batch_size)

    def _totals(self) -> Tensor:
        if self.folded.dim() and len(self.parts) == 0:
            return self.folded
        steps = self._steps()
        terms = self._terms(steps.sum_of_sq_norms, steps.samples, steps.batch_size, steps.sq_norm_of_mean)
        decay = steps.share.new_tensor(1.0 if self.decay is None else self.decay)
        ages = torch.arange(len(steps.share), device=decay.device).flip(0)
        weights = self._weight(steps.batch_size) * decay.pow(ages)
        added = (weights * torch.cat([terms, steps.share[None]])).sum(1)
        return decay.pow(len(ages)) * self.folded + added.view(-1, *[1] * (self.folded.dim() - 1))

    def _sync_dist(self, *args: Any, **kwargs: Any) -> None:
        self.parts = [_numbered(self._joined("parts"))]  # while it is known which parts are of this process
        reductions = self._reductions
        self._reductions = {"parts": reductions["parts"]}  # what is folded is of all processes
        try:
            super()._sync_dist(*args, **kwargs)
        finally:
            self._reductions = reductions

    def _steps(self) -> _Steps:
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
        undefined = ~skipped & ~self._is_defined(size, mean)
        used = ~skipped & ~undefined & (samples > 0)
        counted = share[used], samples[used], size[used], sum_of_sq_norms[used], mean[used]
        return _Steps(
            *counted, skipped=share[skipped].sum(), undefined=share[undefined].sum(), nonfinite=nonfinite.sum()
        )


class GradientNoiseScale(_StepMetric):
    """The simple noise scale ``B_simple = S / |G|^2``, in samples: a ratio of averages over optimizer steps.

    S estimates the variance of a sample's gradient, tr(Sigma), and |G|^2 the squared norm of the true gradient, both
    unbiased, see `noise_scale_terms`. Both are averaged over steps before the ratio is taken: a ratio of single steps
    is neither unbiased nor tame. A step weighs by the size of its batch, because |G|^2 of a small one is mostly noise:
    the short last batch of an epoch counts for as many samples as it has.

    >>> import torch
    >>> metric = GradientNoiseScale()
    >>> for grads in torch.tensor([[[3.0, 0.0], [1.0, 0.0]], [[2.0, 1.0], [2.0, -1.0]]]):
    ...     metric.update(grads.square().sum(1), grads.mean(0).square().sum())
    >>> round(metric.compute().item(), 4)  # S is 2 and 2, |G|^2 is 3 and 3
    0.6667

    Under DDP and gradient accumulation `update` gets the samples at hand, the squared norm of the averaged gradient of
    the step and the size of its effective batch, see there; the result is that of one process with all samples in one
    call. `forward` gives the value of its call alone.

    Not finite: a step with a sample or a mean that is not finite is left out as a whole and counted in
    ``counts()["skipped_steps"]``. B = 1: a step of one sample has no variance; it is left out and counted in
    ``counts()["undefined_steps"]``. Without any step that counts, and where the averaged |G|^2 is not positive, the
    result is nan; more steps are then needed.

    Memory: 48 bytes for each call of `update` since the last `reset`, none for `update_sums`.

    Args:
        decay: how much of its weight a step keeps at each later one, at least 0 and less than 1, for exponential moving
            averages; None weighs all samples equally.
        **kwargs: those of `torchmetrics.Metric`.

    Raises:
        OptionError: `decay` has a value that is not allowed.

    Reference:
        McCandlish et al. 2018, An Empirical Model of Large-Batch Training, arXiv 1812.06162, equation 2.9 and
        appendix A.1.
    """

    plot_lower_bound = 0.0
    _title = "Gradient noise scale"
    _axis = r"noise scale $B_\mathrm{simple}$ (samples)"

    def __init__(self, decay: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        is_number = isinstance(decay, (int, float)) and not isinstance(decay, bool)
        if decay is not None and not (is_number and 0 <= decay < 1):
            raise OptionError(f"decay is {decay!r}; allowed is None or a number of at least 0 and less than 1")
        self.decay = decay

    def compute(self) -> Tensor:
        """The noise scale.

        Returns:
            The ratio of the averages of S and |G|^2, shape (); nan where there is none.
        """
        return simple_noise_scale(*self._averages())

    def terms(self) -> dict[str, Tensor]:
        """Both averages, over all processes.

        Returns:
            ``S``, the estimate of tr(Sigma), and ``G2``, that of the squared norm of the true gradient, which may be
            negative; nan without any step that counts.
        """
        with self._synced():
            return dict(zip(("S", "G2"), self._averages(), strict=True))

    def counts(self) -> dict[str, Tensor]:
        """What the value rests on, over all processes.

        Returns:
            ``steps`` that count; ``negative_steps``, those of them whose own |G|^2 is negative; ``skipped_steps`` with
            a sample or a mean that is not finite; ``undefined_steps`` of one sample; and ``nonfinite`` samples. A step
            of which only a part was given counts as that part of one.
        """
        with self._synced():
            steps = self._steps()
        _, G2 = self._terms(steps.sum_of_sq_norms, steps.samples, steps.batch_size, steps.sq_norm_of_mean)
        return super().counts() | {"negative_steps": steps.share[G2 < 0].sum()}

    def _is_defined(self, batch_size: Tensor, sq_norm_of_mean: Tensor) -> Tensor:
        return batch_size > 1

    def _terms(self, sums: Tensor, samples: Tensor, batch_size: Tensor, sq_norm_of_mean: Tensor) -> Tensor:
        return torch.stack(terms_of_sums(sums, samples, batch_size, sq_norm_of_mean))

    def _weight(self, batch_size: Tensor) -> Tensor:
        return batch_size


class GradientDiversity(_StepMetric):
    """Gradient diversity ``sum_i ||g_i||^2 / ||sum_i g_i||^2`` of a batch, averaged over optimizer steps.

    It is 1/B if all gradients of a batch of B samples are equal, 1 if they are orthogonal, and larger if they cancel.

    >>> import torch
    >>> metric = GradientDiversity()
    >>> for grads in (torch.eye(2), torch.ones(2, 2)):
    ...     metric.update(grads.square().sum(1), grads.mean(0).square().sum())
    >>> metric.compute().item()
    0.75

    Under DDP and gradient accumulation `update` gets the samples at hand, the squared norm of the averaged gradient of
    the step and the size of its effective batch, see there; the result is that of one process with all samples in one
    call. `forward` gives the value of its call alone.

    Not finite: a step with a sample or a mean that is not finite is left out as a whole and counted in
    ``counts()["skipped_steps"]``. B = 1: the diversity of one sample is 1 whatever its gradient; such a step says
    nothing, is left out and counted in ``counts()["undefined_steps"]``, as is one whose gradients cancel to exactly
    zero. Without any step that counts the result is nan.

    Memory: 48 bytes for each call of `update` since the last `reset`, none for `update_sums`.

    Args:
        **kwargs: those of `torchmetrics.Metric`.

    Reference:
        Yin et al. 2018, Gradient Diversity, arXiv 1706.05699, definition 1.
    """

    plot_lower_bound = 0.0
    _title = "Gradient diversity"
    _axis = r"diversity $\Sigma_i\,\|g_i\|^2 \;/\; \|\Sigma_i\,g_i\|^2$"

    def compute(self) -> Tensor:
        """The diversity.

        Returns:
            The average over steps, shape (); nan where there is none.
        """
        return self._averages()[0]

    def _is_defined(self, batch_size: Tensor, sq_norm_of_mean: Tensor) -> Tensor:
        return (batch_size > 1) & (sq_norm_of_mean > 0)

    def _terms(self, sums: Tensor, samples: Tensor, batch_size: Tensor, sq_norm_of_mean: Tensor) -> Tensor:
        return diversity_of_sums(sums, batch_size, sq_norm_of_mean)[None]


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
