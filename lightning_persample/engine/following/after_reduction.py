"""Calls on what was already computed over the whole batch: is the loss still a weighted sum of the samples' own losses?

Values divided by w_i are the gradients of the samples' own losses l_i only where the loss is ``sum_i w_i l_i``. A sum
or mean over the batch keeps that form, and so does every linear op after it. Anything else (a square root of a mean,
a product of two means) makes one sample's gradient depend on the others, which must be said.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_persample.engine.following.base import Followed
from lightning_persample.engine.following.reductions import averages
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


def after_reduction(call: ObservedCall) -> Followed:
    """Follow a call whose only operands of the batch hold it along no axis.

    Args:
        call: the call, after it has run.

    Returns:
        `Lost` for every output, with a note where the loss stops being a weighted sum over samples.
    """
    marks = [mark for _, mark in call.lost]
    first = next((mark for tensor, mark in call.lost if tensor.requires_grad), marks[0])
    mixing = weighting = None
    if any(output.requires_grad for output in call.outputs) and first.reduced and not first.noted:
        mixing, weighting = _notes(call)
    result = replace(first, noted=first.noted or mixing is not None)
    if weighting is None and not first.reduced and not first.noted and averages(call) and call.outputs[0].requires_grad:
        weighting = f"`{call.name}` averages over entries taken from the whole batch{user_line()}"
        result = replace(first, noted=True)
    return Followed((result,) * len(call.outputs), mixing=mixing, weighting=weighting)


def _notes(call: ObservedCall) -> tuple[str | None, str | None]:
    if call.op in _LINEAR:
        return None, None
    factors = [tensor for tensor, _ in call.lost if tensor.requires_grad]
    scaled = call.args[:1] if call.op == "div" else call.args[:2] if call.op == "mul" else ()
    if len(factors) == 1 and any(tensor is factors[0] for tensor in scaled):
        constant = len(call.lost) == 1
        note = f"`{call.name}` scales the loss by a number computed over the whole batch{user_line()}"
        return None, None if constant else note
    return f"`{call.name}` of a value computed over the whole batch is not a sum over samples{user_line()}", None
