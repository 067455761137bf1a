"""The formulas: tensors in, tensors out, nothing kept.

B is the size of the effective batch, that is of all samples whose gradients one optimizer step averages, g_i the
gradient of sample i's own loss, and gbar = 1/B sum_i g_i. The n samples given may be a part of the batch (a process's
share, an accumulated batch); gbar and B are always those of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_persample.errors import OptionError
from lightning_persample.metrics.base import accumulation_dtype, as_batch_size, as_scalar, as_vector, check_count


def noise_scale_terms(
    sq_norms: Tensor, sq_norm_of_mean: Tensor | float, batch_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Unbiased estimates of the gradient's variance tr(Sigma) and of the squared norm of the true gradient.

    ``S = B/(B-1) (1/B sum_i ||g_i||^2 - ||gbar||^2)`` and ``|G|^2 = ||gbar||^2 - S/B``. Both are sums over samples: for
    a part of n samples ``S = (sum_i ||g_i||^2 - n ||gbar||^2) / (B-1)`` and ``|G|^2 = n/B ||gbar||^2 - S/B``, so that
    what the parts of a batch give adds up to what the batch gives.

    >>> import torch
    >>> grads = torch.tensor([[3.0, 0.0], [1.0, 0.0]])
    >>> S, G2 = noise_scale_terms(grads.square().sum(1), grads.mean(0).square().sum())
    >>> S.item(), G2.item()
    (2.0, 3.0)

    Args:
        sq_norms: ||g_i||^2 of the samples at hand, (n,).
        sq_norm_of_mean: ||gbar||^2 over the effective batch.
        batch_size: B; None if all samples are at hand.

    Returns:
        S and |G|^2, each of shape (), in float64 where the device has it; nan with B < 2 or a number that is not
        finite. |G|^2 may be negative.

    Reference:
        McCandlish et al. 2018, An Empirical Model of Large-Batch Training, arXiv 1812.06162, the unbiased estimates of
        appendix A.1 with a small batch of size 1 and a big one of size B.
    """
    sq_norms = as_vector(sq_norms, "sq_norms")
    mean = as_scalar(sq_norm_of_mean, "sq_norm_of_mean", sq_norms.device)
    size = as_batch_size(batch_size, sq_norms.numel())
    S, G2 = terms_of_sums(sq_norms.sum(), sq_norms.numel(), size, mean)
    finite = S.isfinite() & G2.isfinite()
    return S.where(finite, math.nan), G2.where(finite, math.nan)


def terms_of_sums(
    sum_of_sq_norms: Tensor, samples: Tensor | float, batch_size: Tensor | float, sq_norm_of_mean: Tensor
) -> tuple[Tensor, Tensor]:
    """S and |G|^2 as in `noise_scale_terms`, from sums of squared norms; any shape, not both finite with B < 2."""
    of_mean = samples * sq_norm_of_mean
    S = (sum_of_sq_norms - of_mean) / (batch_size - 1)
    is_whole = torch.as_tensor(batch_size == samples, device=S.device)  # a variance, which only rounding makes negative
    return S.clamp(min=0).where(is_whole, S), (of_mean - S) / batch_size


def simple_noise_scale(S: Tensor, G2: Tensor) -> Tensor:
    """The simple noise scale ``B_simple = S / |G|^2``, in samples.

    >>> import torch
    >>> simple_noise_scale(torch.tensor([6.0, 6.0]), torch.tensor([3.0, -1.0]))
    tensor([2., nan])

    Args:
        S: estimate of the gradient's variance, summed over the parameters, any shape.
        G2: estimate of the squared norm of the true gradient, of the same shape.

    Returns:
        The ratio; nan where |G|^2 is not positive.

    Reference:
        McCandlish et al. 2018, arXiv 1812.06162, equation 2.9.
    """
    return (S / G2).where(G2 > 0, math.nan)


def gradient_diversity(sq_norms: Tensor, sq_norm_of_mean: Tensor | float, batch_size: int | None = None) -> Tensor:
    """How little the gradients of a batch point the same way: 1/B if all are equal, 1 if orthogonal.

    ``sum_i ||g_i||^2 / ||sum_i g_i||^2 = sum_i ||g_i||^2 / (B^2 ||gbar||^2)``. What the parts of a batch give adds up
    to what the batch gives.

    >>> import torch
    >>> grads = torch.eye(4)
    >>> gradient_diversity(grads.square().sum(1), grads.mean(0).square().sum()).item()
    1.0

    Args:
        sq_norms: ||g_i||^2 of the samples at hand, (n,).
        sq_norm_of_mean: ||gbar||^2 over the effective batch.
        batch_size: B; None if all samples are at hand.

    Returns:
        The diversity, shape (), in float64 where the device has it; nan where gbar is zero, B < 1 or a number is not
        finite.

    Reference:
        Yin et al. 2018, Gradient Diversity, arXiv 1706.05699, definition 1.
    """
    sq_norms = as_vector(sq_norms, "sq_norms")
    mean = as_scalar(sq_norm_of_mean, "sq_norm_of_mean", sq_norms.device)
    return diversity_of_sums(sq_norms.sum(), as_batch_size(batch_size, sq_norms.numel()), mean)


def diversity_of_sums(sum_of_sq_norms: Tensor, batch_size: Tensor | float, sq_norm_of_mean: Tensor) -> Tensor:
    """As `gradient_diversity`, from the sum of the squared norms; any shape."""
    ratio = sum_of_sq_norms / batch_size**2 / sq_norm_of_mean
    return ratio.where((ratio * sq_norm_of_mean).isfinite(), math.nan)  # not of infinities, nor of a mean of 0


def cosine_to_mean(dots: Tensor, sq_norms: Tensor, sq_norm_of_mean: Tensor | float) -> Tensor:
    """Cosine of the angle between each sample's gradient and the mean: ``g_i . gbar / (||g_i|| ||gbar||)``.

    >>> import torch
    >>> grads = torch.tensor([[3.0, 4.0], [3.0, -4.0]])
    >>> cosine_to_mean(grads @ grads.mean(0), grads.square().sum(1), grads.mean(0).square().sum())
    tensor([0.6000, 0.6000], dtype=torch.float64)

    Args:
        dots: g_i . gbar of the samples at hand, (n,).
        sq_norms: ||g_i||^2, (n,).
        sq_norm_of_mean: ||gbar||^2 over the effective batch.

    Returns:
        The cosines (n,), in float64 where the device has it; nan where a gradient is zero or not finite.
    """
    dots = as_vector(dots, "dots")
    sq_norms = as_vector(sq_norms, "sq_norms", dots.device, dots.numel())
    mean = as_scalar(sq_norm_of_mean, "sq_norm_of_mean", dots.device)
    cosines = dots / sq_norms.sqrt() / mean.sqrt()  # the product of the two squared norms could leave the dtype's range
    return cosines.where(cosines.isfinite() & sq_norms.isfinite() & mean.isfinite(), math.nan)


def gradient_signal_to_noise(sums: Tensor, sq_sums: Tensor, count: int) -> Tensor:
    """Gradient signal to noise ratio of each entry of a parameter: ``(E g)^2 / Var(g)`` over n samples.

    With the sums over samples ``s = sum_i g_i`` and ``q = sum_i g_i^2``, entry by entry, ``E g = s/n`` and
    ``Var(g) = (q - s^2/n) / (n-1)``.

    >>> import torch
    >>> grads = torch.tensor([[1.0, 2.0], [3.0, 2.0]])
    >>> gradient_signal_to_noise(grads.sum(0), grads.square().sum(0), count=2)
    tensor([2., nan], dtype=torch.float64)

    Args:
        sums: s, of the parameter's shape.
        sq_sums: q, of the same shape.
        count: number of samples n.

    Returns:
        The ratio of each entry, in float64 where the device has it; nan with n < 2, and where all samples agree up to
        the rounding of the sums, so that no variance is left to divide by.

    Raises:
        OptionError: the shapes differ.

    Reference:
        Liu et al. 2020, Understanding Why Neural Networks Generalize Well Through GSNR of Parameters, arXiv 2001.07384,
        section 2.1.
    """
    if sums.shape != sq_sums.shape:
        raise OptionError(
            f"sums has shape {tuple(sums.shape)} and sq_sums {tuple(sq_sums.shape)}; both are the parameter's"
        )
    check_count(count)
    eps = max(torch.finfo(each.dtype).eps for each in (sums, sq_sums))
    dtype = accumulation_dtype(sums.device)
    return ratio_of_sums(sums.detach().to(dtype), sq_sums.detach().to(dtype), sums.new_tensor(count, dtype=dtype), eps)


def ratio_of_sums(sums: Tensor, sq_sums: Tensor, count: Tensor, eps: Tensor | float) -> Tensor:
    """As `gradient_signal_to_noise`; what is left of the squares below 8 `eps` of them counts as no variance."""
    left = sq_sums - sums * sums / count
    ratio = (sums / count).square() / (left / (count - 1))
    return ratio.where((left > 8 * eps * sq_sums) & (count > 1) & ratio.isfinite(), math.nan)


def moments(values: Tensor) -> Tensor:
    """Number, mean and sum of squared deviations of the finite values of (n,), (3,); a mean of 0 if there is none."""
    finite = values.isfinite()
    count = finite.sum().to(values.dtype)
    mean = values.where(finite, 0.0).sum() / count.clamp(min=1)
    return torch.stack([count, mean, (values - mean).where(finite, 0.0).square().sum()])


def merge_moments(parts: Tensor) -> Tensor:
    """Join `moments` of disjoint sets, (k, 3), without the cancellation that sums of squares have, to (3,)."""
    # Chan, Golub, LeVeque 1983, Algorithms for Computing the Sample Variance, equation 2.1
    counts, means, deviations = parts.unbind(1)
    count = counts.sum()
    mean = (counts * means).sum() / count.clamp(min=1)
    return torch.stack([count, mean, (deviations + counts * (means - mean).square()).sum()])


def statistics_of_moments(
    count: Tensor | int, mean: Tensor, deviations: Tensor, smallest: Any, largest: Any
) -> dict[str, Tensor]:
    """Mean, unbiased standard deviation (nan with one value) and extremes, from `moments`."""
    return {"mean": mean, "std": (deviations / (count - 1)).sqrt(), "min": smallest, "max": largest}


def statistics_of_values(values: Tensor, quantiles: Sequence[float] = ()) -> dict[str, float]:
    """Those of finite values (n,) on the host, and quantiles of them; nan if there is none."""
    ordered = values.sort().values if values.numel() else values.new_full((1,), math.nan)
    mean = ordered.mean()
    deviations, numbers = (ordered - mean).square().sum(), ordered.numpy()  # whose entries are read faster
    found: dict[str, Any] = statistics_of_moments(len(numbers), mean, deviations, numbers[0], numbers[-1])
    return {name: float(value) for name, value in (found | quantiles_of_sorted(numbers, quantiles)).items()}


def quantiles_of_sorted(values: Any, quantiles: Sequence[float]) -> dict[str, Any]:
    """Quantiles of a sorted array (n,), interpolated linearly, named by percent; torch.quantile takes 16 million."""
    found = {}
    for quantile in quantiles:
        at = quantile * (len(values) - 1)
        low, high = values[math.floor(at)], values[math.ceil(at)]
        found[percent(quantile)] = low + (high - low) * (at - math.floor(at))
    return found


def percent(quantile: float) -> str:
    """The name of a quantile."""
    return f"p{100 * quantile:.10g}"


def are_quantiles(values: Sequence[object]) -> bool:
    """Whether these are numbers strictly between 0 and 1 of different names."""
    numbers = [value for value in values if isinstance(value, (int, float)) and 0 < value < 1]
    return len({percent(number) for number in numbers}) == len(values)
