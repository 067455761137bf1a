"""What each sample weighs in a loss, read from the calls that made it, to be compared with what a user declares.

In ``L = sum_i w_i l_i`` a user may take l_i for the mean of sample i's terms or for their sum, with a mask or class
weights or without: each gives weights w_i of its own. These are the candidates; a function that returns none of them is
wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from lightning_persample.batch_axis.added_up import MEAN, averages, factors_of, nodes_that_multiply, reduction_of
from lightning_persample.batch_axis.axis import BatchAxis, SampleWeights, batch_first
from lightning_persample.batch_axis.base import is_plain
from lightning_persample.batch_axis.observed import ObservedCall

OTHER_WEIGHTS = "the weights that loss_reduction gives"
_MOST = 64  # candidates
_MOST_FACTORS = 3  # of entries, of which every product may be a sample's weight
_PICKS = ("Index", "MaskedSelect", "Select", "Slice", "Gather")
_NLL = ("NllLossBackward0", "NllLoss2DBackward0")


def of_class_loss(call: ObservedCall, axis: BatchAxis, counted: Tensor, shares: Tensor) -> SampleWeights:
    """Of a loss over classes: `counted` says which targets count, `shares` what each of them does."""
    by_sample = [
        batch_first(each.double(), axis, call.batch_size, fill=False).flatten(1).sum(1) for each in (shares, counted)
    ]
    candidates, total = (*by_sample, torch.ones_like(by_sample[0])), by_sample[0].sum()
    if reduction_of(call) == MEAN:
        return _known(by_sample[1], [each / total for each in candidates], of_mean=True)
    return _known(by_sample[1], candidates[::-1])


def of_sum(call: ObservedCall) -> SampleWeights | None:
    """Of a sum or mean over a tensor that holds the samples along an axis, or a loss that compares it."""
    if not call.located or call.outputs[0].dim() or not call.outputs[0].requires_grad:
        return None
    tensor, axis = max(call.located, key=lambda pair: (pair[0].requires_grad, pair[0].numel()))
    if axis.mixing is not None or not is_plain(tensor) or tensor.is_complex() or not tensor.numel():
        return None
    is_mean = averages(call)
    counts = (
        torch.ones(call.batch_size, device=tensor.device) if axis.owner is None else axis.owner.counts(call.batch_size)
    )
    counts = counts.double() * (tensor.numel() / axis.entries(call.batch_size))
    is_plain_sum = call.op in ("sum", "mean") and len(call.operands) == 1
    factors, is_known = _factors_within(tensor) if is_plain_sum else ([], False)
    found = [counts, torch.ones_like(counts)][:: 1 if is_mean else -1]
    for some in (some for number in range(len(factors or ())) for some in combinations(factors or (), number + 1)):
        product = math.prod(some[1:], start=some[0])
        rows = batch_first(product.expand(tensor.shape).double(), axis, call.batch_size, fill=False)
        found.append(rows.flatten(1).sum(1))
    divisor = float(tensor.numel()) if is_mean else 1.0
    weights = _known(counts, [each / divisor for each in found], of_mean=is_mean)
    return replace(weights, is_known=is_known, is_obscured=factors is None)


def _factors_within(tensor: Tensor) -> tuple[list[Tensor] | None, bool]:
    """By what entries that are added up were multiplied, None where that cannot be read, and whether that is all."""
    found: list[Tensor] = []
    try:
        for node, factor, _ in nodes_that_multiply(tensor, _PICKS):
            if node.name() in _NLL and node._saved_reduction == 0:
                laid = _laid_over([*found, *_weights_of_entries(node)], tensor)
                return laid, laid is not None
            if factor is None:
                break
            if factor.numel() > 1 and (factor.is_complex() or bool((factor != factor.flatten()[0]).any())):
                found.append(factor.detach())
    except RuntimeError:  # it was written to since
        return None, False
    return _laid_over(found, tensor), False


def _weights_of_entries(node: Any) -> list[Tensor]:
    """What the entries of a class loss without reduction weigh by themselves; nothing where they do alike."""
    target, weights = node._saved_target, node._saved_weight
    counted = target != node._saved_ignore_index
    if weights is None and bool(counted.all()):
        return []
    alike = counted.double()
    return [alike if weights is None else alike * weights.double()[torch.where(counted, target, 0)]]


def _laid_over(factors: Sequence[Tensor], tensor: Tensor) -> list[Tensor] | None:
    """Factors of the entries of a tensor, or of what its rows are sums of, as factors of these entries."""
    laid = []
    for factor in factors:
        sizes = zip(factor.shape[::-1], tensor.shape[::-1], strict=False)
        if factor.dim() <= tensor.dim() and all(size in (1, other) for size, other in sizes):
            laid.append(factor)
        elif tensor.dim() == 1 and factor.dim() > 1 and factor.size(0) == tensor.size(0):
            laid.append(factor.flatten(1).sum(1))
        else:
            return None
    return laid if len(laid) <= _MOST_FACTORS and not any(map(torch.is_complex, laid)) else None


def after(call: ObservedCall, divisor: Tensor | None) -> SampleWeights | None:
    """After a call on numbers that samples were added up to; `divisor`: what each adds to what divides them, (B,)."""
    with_gradient = [(tensor, mark.weights) for tensor, mark in call.lost if tensor.requires_grad]
    known = [(tensor, weights) for tensor, weights in with_gradient if weights is not None]
    if not known or any(each.numel() != 1 for each in (*call.outputs, *(tensor for tensor, _ in with_gradient))):
        return None
    if call.op in ("add", "sub"):
        factors = [factors_of(call, tensor) for tensor, _ in known]
        return _together([_scaled(each, by[0]) for (_, each), by in zip(known, factors, strict=True) if by])
    if len(with_gradient) > 1:
        return None
    ((number, weights),) = known
    if call.op not in ("mul", "div") or call.kwargs:
        return weights
    other = call.args[1] if call.args[0] is number else call.args[0]
    factor = float(other.detach()) if isinstance(other, Tensor) else float(other)
    if call.op == "div":
        factor = 1 / factor if factor and other is not call.args[0] else math.nan
    if divisor is None and len(call.lost) == 1:
        return _scaled(weights, factor)
    if divisor is None or call.op != "div" or weights.is_obscured or math.isnan(factor):
        return None
    totals = divisor.cpu().double()
    there = weights.candidates[0].isnan()
    if totals.shape != there.shape:
        return None
    some = [totals / totals.sum(), *(each * factor for each in weights.candidates), totals * factor]
    return SampleWeights(_few(torch.where(there, math.nan, each) for each in some), is_known=True, of_mean=True)


def _known(counts: Tensor, candidates: Sequence[Tensor], *, of_mean: bool = False) -> SampleWeights:
    """Weights of the samples that have a part, NaN for those that have none."""
    there = counts.cpu() > 0  # (they may be of several devices)
    some = _few(torch.where(there, each.cpu(), math.nan) for each in candidates)
    return SampleWeights(some, is_known=True, of_mean=of_mean)


def _few(candidates: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The different ones, in order."""
    found: list[Tensor] = []
    for each in candidates:
        if not any(_alike(each, other) for other in found):
            found.append(each)
    return tuple(found)


def _alike(one: Tensor, other: Tensor, rtol: float = 1e-6) -> bool:
    """Whether two weights are the same for all samples that have a part in both, of which there must be one."""
    both = ~(one.isnan() | other.isnan())
    one, other = one[both], other[both]
    allowed = rtol * one.abs().maximum(other.abs()) + 1e-9 * other.abs().max() if one.numel() else one
    return bool(((one - other).abs() <= allowed).all())


def _scaled(weights: SampleWeights, factor: float) -> SampleWeights | None:
    """After a product with a number, which a user may count to the weights or to the samples' own losses."""
    factor = abs(factor)
    if factor == 1.0:
        return weights
    is_unknown = factor == 0.0 or not math.isfinite(factor) or not (weights.is_known or factor < 1)
    if is_unknown or 2 * len(weights.candidates) > _MOST:
        return None
    both = [weights.candidates, tuple(each * factor for each in weights.candidates)][:: 1 if weights.of_mean else -1]
    return replace(weights, candidates=_few([*both[0], *both[1]]))


def _together(terms: Sequence[SampleWeights | None]) -> SampleWeights | None:
    """Of a sum of losses: what fits each term of which it is known, or where nothing does, what fits one of them."""
    known = [each for each in terms if each is not None and each.is_known]
    if not known:
        return None
    found = known[0].candidates
    for other in known[1:]:
        pairs = [(one, two) for one in found for two in other.candidates]
        fitting = _few(torch.where(one.isnan(), two, one) for one, two in pairs if _alike(one, two))
        found = fitting or _few([*found, *other.candidates])
        if len(found) > _MOST:
            return None
    return SampleWeights(found, is_known=True)


def why_others(known: SampleWeights, weights: Tensor) -> str | None:
    """What to say of declared weights (B,) that are none of those that the samples can have in the loss."""
    declared = weights.detach().cpu().double()
    total = float(declared.sum())
    if not known.is_known:
        if known.of_mean and total >= len(declared):
            return f"{OTHER_WEIGHTS} add up to {total:.4g}, and those of a mean to 1"
        return None
    fitting, half = known.candidates[0], weights.is_floating_point() and torch.finfo(weights.dtype).bits <= 16
    there = ~fitting.isnan()
    if not bool(there.any()) or any(_alike(declared, each, 2e-2 if half else 1e-3) for each in known.candidates):
        return None
    ratios = declared[there] / fitting[there]
    smallest, largest = float(ratios.min()), float(ratios.max())
    off = (
        f"{largest:.4g} times"
        if math.isclose(smallest, largest, rel_tol=1e-3)
        else f"{smallest:.4g} to {largest:.4g} times"
    )
    return (
        f"{OTHER_WEIGHTS} add up to {float(declared[there].sum()):.4g}, those in the loss to "
        f"{float(fitting[there].sum()):.4g}; a sample's is {off} what it is in the loss"
    )
