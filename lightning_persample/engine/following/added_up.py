"""Calls that add up the samples: sums and means over the batch axis, and losses with a reduction of their own."""

from __future__ import annotations

import torch

from lightning_persample.engine.batch_axis import Lost
from lightning_persample.engine.following.base import Followed
from lightning_persample.engine.observed import ObservedCall, user_line

__all__ = ["LOSSES", "MEAN", "added_up", "averages", "reduction_of"]

# Losses, each with the place of `reduction` among its positional arguments.
LOSSES = {
    "cross_entropy_loss": 3, "nll_loss": 3, "nll_loss_nd": 3, "nll_loss2d": 3, "mse_loss": 2, "l1_loss": 2,
    "smooth_l1_loss": 2, "huber_loss": 2, "binary_cross_entropy": 3, "binary_cross_entropy_with_logits": 4, "kl_div": 2,
    "soft_margin_loss": 2, "multi_margin_loss": 5, "multilabel_margin_loss": 2, "poisson_nll_loss": 5,
    "hinge_embedding_loss": 3, "margin_ranking_loss": 4, "cosine_embedding_loss": 4, "triplet_margin_loss": 7,
}  # fmt: skip
MEAN = 1  # the number by which torch's primitives know reduction="mean"


def averages(call: ObservedCall) -> bool:
    """Whether the call takes a mean over everything it is given."""
    return call.op == "mean" or (call.op in LOSSES and reduction_of(call) == MEAN)


def reduction_of(call: ObservedCall) -> int:
    """The reduction of a loss, as torch's primitives number them."""
    return int(call.argument(LOSSES[str(call.op)], "reduction", default=MEAN))


def added_up(call: ObservedCall, *, weighs: bool = False) -> Followed:
    """The samples were added up: the outputs are a weighted sum over the batch; `weighs`: by weights of the caller."""
    sizes = [tuple(o.tensor.shape) for o in call.operands]
    what = f"`{call.name}` reduces over the batch axis (sizes {sizes}{user_line()})"
    with_gradient = [axis for tensor, axis in call.located if tensor.requires_grad]
    counts = [
        torch.bincount(axis.owner.sample, minlength=call.batch_size) for axis in with_gradient if axis.owner is not None
    ]
    uneven = any(not bool((each[each > 0] == each.max()).all()) for each in counts)
    samples = frozenset[int]()
    if len(counts) == len(with_gradient) > 0 and not any(axis.mixing for axis in with_gradient):
        present = (sum(counts) > 0).nonzero().flatten().tolist()  # type: ignore[union-attr]
        samples = frozenset(present) if len(present) < call.batch_size else samples
    if len(samples) == 1:
        return Followed((Lost(what, samples=samples),) * len(call.outputs))
    mean = averages(call)
    note = None
    if any(output.requires_grad for output in call.outputs):
        note = next((axis.mixing for axis in with_gradient if axis.mixing), None)
        if note is None and weighs:
            note = f"`{call.name}` weighs the samples by a tensor{user_line()}"
        if note is None and mean and uneven:
            note = f"`{call.name}` averages over unequal numbers of rows from sample to sample{user_line()}"
    how = "mean" if mean else "sum" if call.op in ("sum", "nansum") or call.op in LOSSES else None
    averaged = (len(samples) or call.batch_size) if mean and not uneven and not weighs else 0
    mark = Lost(what, reduced=True, uneven=uneven, how=None if weighs else how, samples=samples, averaged=averaged)
    return Followed((mark,) * len(call.outputs), weighting=note)
