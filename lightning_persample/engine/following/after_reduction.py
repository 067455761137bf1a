"""Calls on what was already computed over the whole batch: is the loss still a weighted sum of the samples' own losses?

Values divided by w_i are the gradients of the samples' own losses l_i only where the loss is ``sum_i w_i l_i``. A sum
or mean over the batch keeps that form, and so does every linear op after it. Anything else (a square root of a mean,
a product of two means) makes one sample's gradient depend on the others, which must be said.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_persample.engine.batch_axis import Lost
from lightning_persample.engine.following.base import Followed
from lightning_persample.engine.observed import ObservedCall, user_line

__all__ = ["after_reduction"]

# fmt: off
_LINEAR = frozenset({
    "add", "sub", "rsub", "neg", "negative", "positive", "sum", "mean", "nansum", "reshape", "view", "view_as",
    "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "getitem", "stack", "cat", "clone", "contiguous", "to",
    "type", "float", "double", "half", "bfloat16", "cpu", "cuda", "detach", "data", "permute", "transpose", "t", "T",
    "select", "unbind", "split", "chunk", "narrow",
})
# fmt: on
_SUMS = frozenset({"add", "sum", "nansum"})
_JOINS = frozenset({"cat", "stack", "concat"})


def after_reduction(call: ObservedCall) -> Followed:
    """Follow a call whose only operands of the batch hold it along no axis.

    Args:
        call: the call, after it has run.

    Returns:
        `Lost` for every output, with a note where the loss stops being a weighted sum over samples.
    """
    marks = [mark for _, mark in call.lost]
    with_gradient = [mark for tensor, mark in call.lost if tensor.requires_grad]
    first = with_gradient[0] if with_gradient else marks[0]
    if first.noted or not any(output.requires_grad for output in call.outputs):
        return Followed((first,) * len(call.outputs))
    mixing, weighting = _of_sum(call, first) if first.reduced else _of_rows(call, len(with_gradient))
    adds = call.op in _SUMS and (first.reduced or call.outputs[0].numel() == 1)
    said = mixing is not None or weighting is not None
    how = first.how if call.op in _LINEAR and all(mark.how == first.how for mark in with_gradient) else None
    result = replace(first, noted=said, reduced=first.reduced or adds, how=how)
    return Followed((result,) * len(call.outputs), mixing=mixing, weighting=weighting)


Notes = tuple[str | None, str | None]


def _of_sum(call: ObservedCall, summed: Lost) -> Notes:
    """What to say of a call on a weighted sum over the samples: mixing, weighting."""
    if call.op in _LINEAR:
        return None, None
    factors = [tensor for tensor, _ in call.lost if tensor.requires_grad]
    scaled = call.args[:1] if call.op == "div" else call.args[:2] if call.op == "mul" else ()
    if len(factors) == 1 and any(tensor is factors[0] for tensor in scaled):
        if len(call.lost) > 1:
            return None, f"`{call.name}` scales the loss by a number computed over the whole batch{user_line()}"
        return None, f"`{call.name}` averages over unequal numbers of rows{user_line()}" if summed.uneven else None
    return f"`{call.name}` of a value computed over the whole batch is not a sum over samples{user_line()}", None


def _of_rows(call: ObservedCall, operands: int) -> Notes:
    """What to say of a call on rows of which it is not known whose they are."""
    if operands > 1 and call.op not in _JOINS and call.outputs[0].numel() > 1:
        return f"`{call.name}` combines values of the batch that may belong to different samples{user_line()}", None
    return None, None
