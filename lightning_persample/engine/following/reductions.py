"""Ops with a ``dim`` argument: reductions, and scans that keep the size; losses."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_persample.engine.batch_axis import BatchAxis, Lost, batch_first
from lightning_persample.engine.following.base import Followed, broadcast, dims_argument, follower, keep, lost
from lightning_persample.engine.following.trial import try_on_one_sample
from lightning_persample.engine.observed import ObservedCall, user_line

__all__ = ["added_up", "averages"]

_SUMS = frozenset({"sum", "mean", "nansum", "nanmean"})
# fmt: off
_LOSSES = frozenset({
    "cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "mse_loss", "l1_loss", "smooth_l1_loss",
    "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "soft_margin_loss",
    "multi_margin_loss", "multilabel_margin_loss", "poisson_nll_loss", "hinge_embedding_loss", "margin_ranking_loss",
    "cosine_embedding_loss", "triplet_margin_loss",
})
# fmt: on
_CLASS_LOSSES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"})
_ROW_LOSSES = frozenset({"multi_margin_loss", "cosine_embedding_loss", "multilabel_margin_loss", "triplet_margin_loss"})
_MEAN = 1  # the number by which torch's primitives know reduction="mean"


def averages(call: ObservedCall) -> bool:
    """Whether the call takes a mean over everything it is given."""
    return call.op == "mean" or (call.op in _LOSSES and _reduction(call) == _MEAN)


def _reduction(call: ObservedCall) -> int:
    """The reduction of a loss: an argument by name, or the one whole number among the positional arguments."""
    if "reduction" in call.kwargs:
        return int(call.kwargs["reduction"])
    if call.op in _CLASS_LOSSES:
        return int(call.argument(3, "reduction", default=_MEAN))
    whole = [arg for arg in call.args if isinstance(arg, int) and not isinstance(arg, bool)]
    return whole[-1] if whole else _MEAN


def added_up(call: ObservedCall, *, weighs: bool = False) -> Followed:
    """The samples were added up: the outputs are a weighted sum over the batch; `weighs`: by weights of the caller."""
    sizes = [tuple(o.tensor.shape) for o in call.operands]
    what = f"`{call.name}` reduces over the batch axis (sizes {sizes}{user_line()})"
    with_gradient = [axis for tensor, axis in call.located if tensor.requires_grad]
    note = next((axis.mixing for axis in with_gradient if axis.mixing), None)
    if note is None and weighs:
        note = f"`{call.name}` weighs the samples by a tensor{user_line()}"
    if note is None and averages(call) and any(not _in_equal_numbers(axis, call.batch_size) for axis in with_gradient):
        note = f"`{call.name}` averages over unequal numbers of rows from sample to sample{user_line()}"
    if not any(output.requires_grad for output in call.outputs):
        note = None
    uneven = any(not _in_equal_numbers(axis, call.batch_size) for axis in with_gradient)
    how = "mean" if averages(call) else "sum" if call.op in ("sum", "nansum") or call.op in _LOSSES else None
    mark = Lost(what, reduced=True, uneven=uneven, how=None if weighs else how)
    return Followed((mark,) * len(call.outputs), weighting=note)


def _in_equal_numbers(axis: BatchAxis, batch_size: int) -> bool:
    if axis.owner is None:
        return True
    counts = torch.bincount(axis.owner.sample, minlength=batch_size)
    return bool((counts == counts[0]).all())


@follower(*sorted(_LOSSES))
def _follow_loss(call: ObservedCall) -> Followed:
    """A loss over the whole batch, or with reduction="none" one value per entry."""
    scores = call.argument(0, "input", "self", "input1", "anchor")
    where = call.axis_of(scores)
    compared = min(1, scores.dim() - 1) if call.op in _CLASS_LOSSES else scores.dim() - 1
    if call.op in _CLASS_LOSSES | _ROW_LOSSES and isinstance(where, BatchAxis) and where.dim == compared:
        return lost(call, "compares entries along the batch axis", mixes=True)
    if any(output.dim() > 0 for output in call.outputs):
        return _without_reduction(call)
    meeting = None if call.op in _CLASS_LOSSES | _ROW_LOSSES else broadcast(call)
    if meeting is not None and isinstance(meeting.outputs[0], Lost):
        return meeting
    added = added_up(call)
    unequal = _unequal_weights(call)
    return added if unequal is None else Followed(added.outputs, weighting=unequal)


@follower("ctc_loss")
def _follow_ctc(call: ObservedCall) -> Followed:
    _, axis = call.located[0]
    return added_up(call) if call.outputs[0].dim() == 0 else keep(call, axis.moved(0))


@follower("dot", "vdot")
def _follow_dot(call: ObservedCall) -> Followed:
    located = call.located
    if any(not axis.same_layout(located[0][1]) for _, axis in located) or call.lost:
        return lost(call, "multiplies different samples", mixes=True)
    return added_up(call, weighs=len(located) == 1 and len(call.operands) > 1)


def _without_reduction(call: ObservedCall) -> Followed:
    logits = call.argument(0, "input", "self")
    where = call.axis_of(logits)
    if call.op in _CLASS_LOSSES and isinstance(where, BatchAxis) and where.dim != 1:
        return keep(call, where if where.dim == 0 else where.moved(where.dim - 1))
    return broadcast(call) if call.outputs[0].shape == logits.shape else try_on_one_sample(call)


def _unequal_weights(call: ObservedCall) -> str | None:
    """A mean over classes weighted unequally, or over unequal numbers of targets that count, weights the samples."""
    if call.op not in _CLASS_LOSSES or _reduction(call) != _MEAN:
        return None
    target = call.argument(1, "target")
    weight, ignored = call.argument(2, "weight"), call.argument(4, "ignore_index", default=-100)
    axis = call.axis_of(target)
    if not isinstance(axis, BatchAxis) or target.is_floating_point():
        return None
    counted = target != ignored
    if weight is None and axis.owner is None and bool(counted.all()):
        return None
    shares = counted.to(torch.float64)
    if isinstance(weight, Tensor):
        shares = shares * weight.detach().to(torch.float64)[torch.where(counted, target, 0)]
    totals = batch_first(shares, axis, call.batch_size).flatten(1).sum(1)
    if bool((totals == totals[0]).all()):
        return None
    return f"`{call.name}` averages over targets that weigh unequally from sample to sample{user_line()}"


def _reduce(call: ObservedCall, dims: tuple[int, ...] | None) -> Followed:
    tensor, axis = call.located[0]
    if dims is None or axis.dim in dims:
        return added_up(call) if call.op in _SUMS else lost(call, "reduces over the batch axis", mixes=True)
    outputs = tuple(
        axis if output.dim() == tensor.dim() else axis.moved(axis.dim - sum(dim < axis.dim for dim in dims))
        for output in call.outputs
    )
    return Followed(outputs)


@follower(
    "sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "any", "all", "logsumexp", "nansum", "nanmean", "median",
    "nanmedian", "mode", "std", "var", "std_mean", "var_mean", "count_nonzero", "aminmax", "special_logsumexp",
)  # fmt: skip
def _follow_reduction(call: ObservedCall) -> Followed:
    tensor, _ = call.located[0]
    return _reduce(call, dims_argument(call.argument(1, "dim", "axis"), tensor.dim()))


@follower("max", "min")
def _follow_extremum(call: ObservedCall) -> Followed:
    if isinstance(call.argument(1, "other"), Tensor):
        return broadcast(call)
    return _follow_reduction(call)


@follower("linalg_vector_norm", "linalg_norm", "norm")
def _follow_norm(call: ObservedCall) -> Followed:
    tensor, _ = call.located[0]
    return _reduce(call, dims_argument(call.argument(2, "dim"), tensor.dim()))


def _along(call: ObservedCall, dims: tuple[int, ...] | None) -> Followed:
    _, axis = call.located[0]
    if dims is None or axis.dim in dims:
        return lost(call, "works along the batch axis", mixes=True)
    return keep(call, axis)


@follower(
    "softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin",
    "special_softmax", "special_log_softmax",
)  # fmt: skip
def _follow_scan(call: ObservedCall) -> Followed:
    tensor, _ = call.located[0]
    return _along(call, dims_argument(call.argument(1, "dim", "dims"), tensor.dim()))


@follower("sort", "argsort", "glu", "msort")
def _follow_sort(call: ObservedCall) -> Followed:
    tensor, _ = call.located[0]
    dim = call.argument(1, "dim", default=0 if call.op == "msort" else -1)
    return _along(call, dims_argument(dim, tensor.dim()))


@follower("topk")
def _follow_topk(call: ObservedCall) -> Followed:
    tensor, _ = call.located[0]
    return _along(call, dims_argument(call.argument(2, "dim", default=-1), tensor.dim()))


@follower("nonzero", "argwhere", "unique", "bincount", "histc", "as_strided", "take", "unique_consecutive")
def _follow_scattered(call: ObservedCall) -> Followed:
    return lost(call, "gathers entries across the batch")
