"""Calls on what was already computed over the whole batch: is the loss still a weighted sum of the samples' own losses?

Values divided by w_i are the gradients of the samples' own losses l_i only where the loss is ``sum_i w_i l_i``. A sum
or mean over the batch keeps that form, and so does every linear op after it. Anything else (a square root of a mean,
a product of two means) makes one sample's gradient depend on the others, which must be said.

A tensor may also have lost its batch axis with every entry still of one sample: the batch was cut apart, padded, put
beside other rows. It keeps that through ops that compute each entry from the one at its place or only move entries; an
op that adds entries up makes it a sum over samples; of any other it must be said that it may mix them. What was taken
from one sample alone stays that sample's, whatever is done to it, and samples stacked again are a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_persample.batch_axis.added_up import absent, factors_beside, is_share, reduction_of, scaled
from lightning_persample.batch_axis.axis import BatchAxis, Lost, picked
from lightning_persample.batch_axis.base import Entries, Followed, listed, lists
from lightning_persample.batch_axis.indexing import written_entries
from lightning_persample.batch_axis.observed import ObservedCall, tensors_in, user_line, user_place, version_of
from lightning_persample.batch_axis.ops import LOSSES, POINTWISE, having
from lightning_persample.batch_axis.sample_weights import after
from lightning_persample.torch_internals import tree_flatten, tree_unflatten

_ADDS, _SUMS, _PICKS, _BOUNDS = having("adds", "chooses"), having("sums"), having("picks"), having("bounds")
_MOVES = having("same", "casts", "moves", "picks", "joins", "passes")
_ENTRYWISE_LOSSES = having("entrywise")
_SCALED = "`{name}` scales the loss by a number computed over the whole batch{line}"
_UNEQUALLY = "`{name}` scales the loss by a sum to which the samples add unequally{absent}{line}"
_NOT_A_SUM = "`{name}` of a value computed over the whole batch is not a sum over samples{line}"
_Term: TypeAlias = tuple[frozenset[int], frozenset[int], int]
_Terms: TypeAlias = tuple[_Term, ...]
# number of samples of the batch and of the sum when a line first took this factor
_FACTORS: dict[tuple[tuple[str, int] | None, float], tuple[int, int]] = {}
_MOST = 1024
_KEEPS_ENTRIES = POINTWISE | _ENTRYWISE_LOSSES
COPIES = frozenset(("clone", "detach", "squeeze"))


def copied(mark: Lost, copy: Tensor) -> Lost:
    """What a copy or a view of a number is that is a plain sum, as at every step where the loss is logged."""
    crossed = torch.is_grad_enabled() and (mark.crossed or not copy.requires_grad)
    return mark if mark.crossed == crossed else replace(mark, crossed=crossed)


def after_reduction(call: ObservedCall) -> Followed:
    """Follow a call whose only operands of the batch hold it along no axis."""
    written = written_entries(call) if call.op == "setitem" or len(call.lost) > 1 else None
    one = {mark.alone for _, mark in call.lost}
    if written is not None and (None in one or len(one) > 1 or _says_where(call)):
        return written
    followed = _after_reduction(call)
    entries = written.outputs[0].entries if written is not None and isinstance(written.outputs[0], Lost) else None
    terms = _terms(call, followed)
    weights = after(call, _constant_divisor(call)) if call.compares_weights and followed.mixing is None else None
    places = [
        replace(
            mark,
            entries=entries,
            shares=_shares_after(call, place),
            computed=None,
            terms=terms,
            weights=weights,
        )
        if isinstance(mark, Lost)
        else mark
        for place, mark in enumerate(followed.outputs)
    ]
    followed = replace(followed, outputs=tuple(places))
    return _by_sample(call, followed) if _meets_a_weight(call) and torch.is_grad_enabled() else followed


def _says_where(call: ObservedCall) -> bool:
    """Whether numbers of the batch say where is written."""
    index = call.args[1] if call.op == "setitem" else ()
    items = index if isinstance(index, (tuple, list)) else (index,)
    return any(item is tensor for item in items for tensor, _ in call.lost)


def _meets_a_weight(call: ObservedCall) -> bool:
    return any(operand.axis is None and operand.tensor.requires_grad for operand in call.operands)


def _multiplies(call: ObservedCall) -> bool:
    """Whether the one operand of the batch is multiplied, or divided, by another one."""
    number = call.lost[0][0]
    factors = call.args[:2] if call.op == "mul" else call.args[:1] if call.op in ("div", "matmul") else ()
    is_factor = any(arg is number for arg in factors) and (call.op != "matmul" or number.dim() == 1)
    return len(call.lost) == 1 and not call.kwargs and len(call.args) == 2 and is_factor


def _shares_after(call: ObservedCall, output: int) -> Callable[[], Tensor | None] | None:
    """What each sample adds to a multiple or a sum of such numbers, or to some of them, (B, *shape of the output)."""
    if any(mark.shares is None for _, mark in call.lost) or call.inplace or not call.outputs[0].is_floating_point():
        return None
    of_terms = call.op in ("add", "sub") and not call.kwargs and len(call.args) == len(call.operands)
    moves = call.op in _MOVES and call.op not in ("pad", "constant_pad_nd")  # (which may put numbers beside them)
    if not _multiplies(call) and not ((of_terms or moves) and len(call.lost) == len(call.operands)):
        return None
    leaves, spec = tree_flatten((call.args, dict(call.kwargs)))
    by_tensor = {id(tensor): mark.shares for tensor, mark in call.lost if mark.shares is not None}
    sources = {place: by_tensor[id(leaf)] for place, leaf in enumerate(leaves) if id(leaf) in by_tensor}
    kept = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    versions = [(leaf, version_of(leaf)) for leaf in kept if isinstance(leaf, Tensor)]
    kept = [None if place in sources else leaf for place, leaf in enumerate(kept)]
    function = call.function

    def of_one(*rows: Tensor) -> Tensor:
        filled = list(kept)
        for place, row in zip(sources, rows, strict=True):
            filled[place] = row
        args, kwargs = tree_unflatten(filled, spec)
        return tuple(tensors_in(function(*args, **kwargs)))[output]

    def shares() -> Tensor | None:
        rows = [row for source in sources.values() if (row := source()) is not None]
        if len(rows) < len(sources) or any(version_of(leaf) != version for leaf, version in versions):
            return None
        try:
            with torch.no_grad():
                result: Tensor = torch.vmap(of_one)(*rows)
        except Exception:  # whatever cannot be computed for all samples at once
            return None
        return result

    return shares


def _laid(shares: Tensor | None, rank: int) -> Tensor | None:
    """Shares (B, *shape) with axes of size 1 behind the first, so that they are laid over a tensor of `rank` axes."""
    if shares is None:
        return None
    return shares.reshape(shares.size(0), *(1,) * (rank + 1 - shares.dim()), *shares.shape[1:])


def _by_sample(call: ObservedCall, followed: Followed) -> Followed:
    """A number that is a sum over the samples, times a weight: what each of them adds gives the weight's gradients."""
    output = call.outputs[0]
    if not _multiplies(call) or call.inplace or call.lost[0][1].shares is None:
        return followed
    ((number, mark),) = call.lost
    rank = number.dim() if call.op == "matmul" else output.dim()
    rows = _laid(mark.shares() if mark.shares is not None else None, rank)
    if rows is None:
        return followed
    args = tuple(rows if arg is number else arg for arg in call.args)
    entries = Entries(args, {}, torch.Size((call.batch_size, *output.shape)), BatchAxis(0), 1.0)

    def aligned(tensor: Tensor) -> BatchAxis | None:
        return BatchAxis(0) if tensor is rows else None

    return replace(followed, aligned=aligned, entries=lambda: entries)


def _after_reduction(call: ObservedCall) -> Followed:
    marks = [mark for _, mark in call.lost]
    with_gradient = [mark for tensor, mark in call.lost if tensor.requires_grad]
    first = with_gradient[0] if with_gradient else marks[0]
    one = first.alone if all(mark.alone == first.alone for mark in marks) else None
    if one is None and lists(call):
        return listed(call)
    if one is not None and (new := _new_axis(call)) is not None:
        return Followed((picked(new, torch.tensor([one], device=call.outputs[0].device), call.batch_size),))
    if (one is None and len(marks) > 1) or (call.op == "stack" and call.batch_size == 1):
        stacked = _stacked(call, marks)
        if stacked is not None:
            return stacked
    if len(with_gradient) == 1 and _leaves_as_is(call):
        return Followed((first,) * len(call.outputs), by_values=True)
    noted = next((mark for mark in with_gradient if mark.noted), None)
    known = all(mark.samples for mark in with_gradient)
    samples = frozenset().union(*(mark.samples for mark in with_gradient)) if known else frozenset()
    if one is None and noted is None and not torch.is_grad_enabled():
        return _without_gradient(call, marks)
    divisor = _constant_divisor(call)
    if one is not None or noted is not None or not with_gradient or not call.outputs[0].requires_grad:
        unplaced = all(mark.unplaced for mark in marks) and call.op in _MOVES | _KEEPS_ENTRIES
        mark = replace(first, samples=first.samples if one is not None else frozenset(), unplaced=unplaced)
        mark = replace(mark, crossed=first.crossed if one is not None else any(other.of_others for other in marks))
        mark = replace(noted, samples=samples) if noted is not None else mark
        if one is not None and with_gradient:
            mark = replace(mark, parts=_parts(call, with_gradient, divisor) or frozenset({1}))
        mark = replace(mark, listed=first.listed and call.op in _MOVES and len(marks) == 1)
        return Followed((mark,) * len(call.outputs))
    reduced = any(mark.reduced is not False for mark in with_gradient)
    mixing, weighting = _notes(call, first, len(with_gradient), reduced, divisor)
    said = mixing is not None or weighting is not None
    adrift = not any(mark.of_others for mark in with_gradient) and call.outputs[0].dim() > 0
    reduced = reduced or _adds_up(call, len(with_gradient))
    alike = all((mark.samples, mark.parts) == (first.samples, first.parts) for mark in with_gradient)
    parts = _parts(call, with_gradient, divisor)
    if not said and parts is None:
        weighting = _why_unequal(call, with_gradient)
    apart = call.op in _MOVES and (len(first.terms) > 1 or not alike)
    if apart and weighting is None and _takes_some(call):
        weighting = f"`{call.name}` picks from values of different samples{user_line()}"
    if len(first.terms) > 1 and _scales(call) and not said and len(set(_factors(call) or ())) > 1:
        weighting = f"`{call.name}` scales values of different samples unequally{user_line()}"
    result = replace(
        first, unplaced=False, reduced=None if reduced and adrift else reduced,
        uneven=max(mark.uneven for mark in with_gradient),
        parts=(parts or frozenset()) if reduced and not said else frozenset(),
        samples=samples if reduced and mixing is None else frozenset(),
        counts=frozenset().union(*(mark.counts for mark in with_gradient)),
    )  # fmt: skip
    is_sure = weighting is not None and divisor is not None
    return Followed((result,) * len(call.outputs), mixing=mixing, weighting=weighting, is_sure=is_sure)


def _takes_some(call: ObservedCall) -> bool:
    """Whether a call that moves entries may leave some out, or take some twice."""
    if call.lost[0][0].numel() == 1:
        return False
    if call.op == "pad":
        return call.argument(2, "mode", default="constant") != "constant"
    items = call.args[1] if call.op == "getitem" else ()
    items = items if isinstance(items, tuple) else (items,)
    by_place = all(item is None or isinstance(item, (int, slice, type(...))) for item in items)
    takes_all = call.op == "getitem" and by_place and call.outputs[0].numel() == call.args[0].numel()
    return call.op in _PICKS and not takes_all


def _without_gradient(call: ObservedCall, marks: list[Lost]) -> Followed:
    """Follow a call on data, or in a custom autograd function, where the result may be a part of the loss."""
    first, number = marks[0], call.lost[0][0]
    one = len(marks) == 1 and number.numel() == 1 and not number.is_meta
    same = one and call.op in _BOUNDS and torch.equal(number, call.outputs[0])
    known = all(mark.samples for mark in marks)
    samples = frozenset().union(*(mark.samples for mark in marks)) if known else frozenset[int]()
    size, parts = len(samples) or call.batch_size, frozenset[int]()
    if (same or call.op in _MOVES) and len(marks) == 1:
        parts = first.parts
    elif call.op in _ADDS - {"lerp", "where"} and len(marks) == len(call.operands) and "alpha" not in call.kwargs:
        parts = frozenset.intersection(*(mark.parts for mark in marks))
    elif call.op in ("mul", "div") and call.args[0] is number and len(marks) == 1:
        factors = _factors(call)
        parts = scaled(first.parts, factors, size, call.batch_size, first.counts, divides=call.op == "div")
        parts = parts if factors else frozenset()
    elif call.op == "div" and call.args[0] is number and _why_scaled(call, first, marks[1:]) is None:
        parts = _after_division(first, marks[1], call.batch_size)
    unplaced = all(mark.unplaced for mark in marks) and call.op in _MOVES | _KEEPS_ENTRIES
    crossed = not parts and any(mark.of_others for mark in marks)
    is_sum = first.reduced is not False
    reason = _NOT_A_SUM.format(name=call.name, line=user_line()) if is_sum and crossed else first.reason
    reduced = (
        first.reduced if is_sum else any(mark.reduced is not False for mark in marks) or _adds_up(call, len(marks))
    )
    first = replace(first, reason=reason, reduced=reduced, samples=samples if parts else frozenset(), parts=parts)
    mark = replace(first, unplaced=unplaced, crossed=crossed)
    mark = replace(mark, listed=first.listed and call.op in _MOVES and len(marks) == 1)
    mark = mark if same or call.op in _MOVES else replace(mark, totals=None)
    return Followed((mark,) * len(call.outputs))


def _leaves_as_is(call: ObservedCall) -> bool:
    """Whether a number's gradient is what it was: within its bounds, to the power of 1, with a constant added."""
    number = next(tensor for tensor, _ in call.lost if tensor.requires_grad)
    others = [value for value in (*call.args, *call.kwargs.values()) if value is not number and value is not None]
    if number.numel() != 1 or call.outputs[0].numel() != 1 or call.inplace:
        return False
    if call.op in ("addcmul", "addcdiv"):
        return number is call.args[0]
    if call.op in ("pow", "float_power"):
        return number is call.args[0] and all(isinstance(each, (int, float)) and each == 1 for each in others)
    if call.op not in _BOUNDS:
        return False
    value, bounds = number.detach(), [each for each in others if isinstance(each, (int, float, Tensor))]
    at_bound = any(bool((value == each).any()) for each in bounds)
    return not at_bound and bool(value != 0) and bool(call.outputs[0].detach() == value)


def _parts(call: ObservedCall, marks: list[Lost], divided_by: Tensor | None) -> frozenset[int] | None:
    """Which parts of a sum over the samples the result may be, see `Lost`; None where its terms are different ones."""
    if not all(mark.parts for mark in marks):
        return None if any(mark.samples != marks[0].samples for mark in marks) else frozenset()
    sizes = [len(mark.samples) or call.batch_size for mark in marks]
    terms = [mark.parts for mark in marks]
    scales = [_factor_of(call, tensor) for tensor, _ in call.lost if tensor.requires_grad]
    terms = [
        mark.parts
        if scale is None
        else scaled(mark.parts, [scale], size, call.batch_size, mark.counts, divides=call.op == "addcdiv")
        for mark, size, scale in zip(marks, sizes, scales, strict=True)
    ]
    together = frozenset.intersection(*terms)
    if not together:
        return None
    if len(marks) > 1 and not together <= {1, call.batch_size} and _overlap(marks):
        return together if _adds(call) and _terms(call, Followed(())) else None
    if call.op in ("mul", "div", "rmul") or (call.op in _SUMS and len(marks) == 1):
        divisor = next((mark for tensor, mark in call.lost if not tensor.requires_grad), None)
        if divisor is not None:
            return _after_division(marks[0], divisor, call.batch_size)
        factors = _factors(call)
        samples = frozenset().union(*(mark.samples for mark in marks))
        size = len(samples) or call.batch_size
        if _is_chosen(factors, call.batch_size, size) and together <= {size, call.batch_size}:
            return together
        parts = scaled(together, factors, size, call.batch_size, marks[0].counts, divides=call.op == "div")
        return parts if divided_by is None else parts | {1, size}
    return together if call.op in _MOVES | _SUMS or _adds(call) else frozenset()


def _terms(call: ObservedCall, followed: Followed) -> _Terms:
    """The sums over different samples that the result adds up, or has for entries; none where that is not known."""
    found = [
        (tensor, mark.terms or ((mark.samples, mark.parts, 1),)) for tensor, mark in call.lost if tensor.requires_grad
    ]
    unknown = call.op in _MOVES  # (whose each of the entries is that are moved counts only where they are added up)
    known = all(parts and (own or unknown) for _, terms in found for own, parts, _ in terms)
    known = known and call.outputs[0].requires_grad
    # What was said of one that is no sum of terms is true of the result, too; of a sum of them its terms may excuse it.
    known = known and all(mark.terms or not mark.notes for _, mark in call.lost)
    if not found or not known or len(found) < len(call.lost) or followed.mixing is not None:
        return ()
    (first, terms), size = found[0], call.outputs[0].numel()
    if _adds(call):
        factors = [factor for tensor, _ in found if (factor := _factor_of(call, tensor))]
        if len(terms) > 1 and len(found) == len(factors) == 1 and size == first.numel():
            return _multiplied(call, terms, factors[0])
        if len(factors) < len(found) or max(size, *(tensor.numel() for tensor, _ in found)) > 1:
            return ()
        pairs = zip(found, factors, strict=True)
        return _together(term for (_, terms), factor in pairs for term in _multiplied(call, terms, factor))
    if call.op in ("stack", "cat", "concat", "concatenate"):
        each = tuple(dict.fromkeys(term for _, terms in found for term in terms))
        return each if len(each) > 1 else _together(each)
    if len(found) > 1 or (call.inplace and call.op not in POINTWISE) or followed.weighting is not None:
        return ()
    if call.op in ("sum", "mean") and size == 1 and first.numel():
        return _together(_multiplied(call, terms, 1 / first.numel() if call.op == "mean" else 1.0))
    if _scales(call) and not _meets_a_weight(call):
        beside = set(_factors(call) or ())
        return _multiplied(call, terms, beside.pop()) if len(beside) == 1 else ()
    stays = _scales(call) or call.op == "neg" or (call.op in _MOVES and size == first.numel())
    return terms if stays and (len(terms) > 1 or terms[0][0]) else ()


def _multiplied(call: ObservedCall, terms: _Terms, factor: float) -> _Terms:
    size, divides = call.batch_size, call.op == "div"
    return tuple((own, scaled(p, [factor], len(own), size, frozenset(), divides=divides), n) for own, p, n in terms)


def _together(terms: Iterable[_Term]) -> _Terms:
    """Terms over the same samples as one, where the others have no sample in common; else none."""
    found: dict[frozenset[int], tuple[frozenset[int], int]] = {}
    for own, parts, count in terms:
        before, counted = found.get(own, (parts, 0))
        found[own] = before & parts, counted + count
    apart = all(found) and sum(map(len, found)) == len(frozenset[int]().union(*found))
    together = tuple((own, *each) for own, each in found.items())
    return together if apart and all(parts for _, parts, _ in together) else ()


def _rows(loss: Lost) -> int:
    """How many rows of samples, or means over these, a sum has, where they gave unequal numbers of them; else 0."""
    if loss.uneven or len({count for _, _, count in loss.terms}) < 2:
        return loss.uneven
    return sum(count * (len(own) if 1 in parts else 1) for own, parts, count in loss.terms)


def _adds(call: ObservedCall) -> bool:
    """Whether the output is a sum of the operands with gradient, each times a number."""
    if call.op not in ("addcmul", "addcdiv"):
        return call.op in _ADDS
    return all(tensor.requires_grad and _factor_of(call, tensor) is not None for tensor, _ in call.lost)


def _factor_of(call: ObservedCall, tensor: Tensor) -> float | None:
    """By what number an operand is multiplied in a sum of operands; None where that is not known."""
    first, second = call.args[0] if call.args else None, call.argument(1, "end", "tensor1", "other")
    if call.op in ("add", "sub"):
        factor: object = 1 if tensor is first else call.kwargs.get("alpha", 1)
    elif call.op == "lerp":
        weight = _number(call.argument(2, "weight"))
        factor = weight if weight is None or tensor is second else 1 - weight
    elif call.op in ("addcmul", "addcdiv"):
        third = call.argument(2, "tensor2")
        if tensor is first and tensor is not second and tensor is not third:
            return 1.0
        is_factor = tensor is third and call.op == "addcmul"
        other, value = _number(second if is_factor else third), _number(call.kwargs.get("value", 1))
        if (tensor is not second and not is_factor) or other is None or value is None or other == 0:
            return None
        factor = value * other if call.op == "addcmul" else value / other
    else:
        return None
    return _number(factor)


def _number(value: object) -> float | None:
    """One number that has no gradient; None where it is something else."""
    if isinstance(value, Tensor):
        plain = value.numel() == 1 and not value.requires_grad and not value.is_complex() and not value.is_meta
        return float(value) if plain else None
    return float(value) if isinstance(value, (int, float)) else None


def _factors(call: ObservedCall) -> list[float] | None:
    """By what a loss is multiplied; None where that is not known."""
    if call.op == "mean":  # of several parts of the batch
        if len(call.lost[0][1].terms) < 2:
            return None
        return [call.outputs[0].numel() / max(call.lost[0][0].numel(), 1)]
    found = factors_beside(call, 64) if call.op not in ("sum", "nansum") and not _meets_a_weight(call) else None
    return [1 / each if each else 0.0 for each in found] if found and call.op == "div" else found


def _overlap(marks: list[Lost]) -> bool:
    """Whether terms of some samples alone have samples in common, and are not all of the same ones."""
    together = frozenset().union(*(mark.samples for mark in marks))
    return any(mark.samples != marks[0].samples for mark in marks) and (
        not all(mark.samples for mark in marks) or len(together) < sum(len(mark.samples) for mark in marks)
    )


def _why_unequal(call: ObservedCall, marks: list[Lost]) -> str:
    """Terms of a loss that are different parts of a sum over the samples."""
    kinds = {mark.parts == {1} and len(mark.samples) != 1 for mark in marks}
    if kinds == {True, False}:
        two = f"`{call.name}` puts a mean and a sum over the samples together{user_line()}"
        return f"{two}: take one of the two for both"
    return f"`{call.name}` combines means over different numbers of samples, or over some twice{user_line()}"


Notes = tuple[str | None, str | None]


_STACKS = ("stack", "pad_sequence")


def _stacked(call: ObservedCall, marks: list[Lost]) -> Followed | None:
    """Tensors of one sample each, joined along an axis: that axis holds the samples."""
    samples = [mark.alone for mark in marks]
    if call.op not in (*_STACKS, "cat", "concat", "concatenate") or len(marks) < len(call.operands):
        return None
    if call.op == "pad_sequence":
        dim = 0 if call.argument(1, "batch_first", default=False) else 1
    else:
        dim = int(call.argument(1, "dim", "axis", default=0)) % call.outputs[0].dim()
    owners: list[int] = []
    for sample, (tensor, _) in zip(samples, call.lost, strict=True):
        if sample is None:
            return None
        owners += [sample] * (1 if call.op in _STACKS else tensor.size(dim))
    rows = torch.tensor(owners, device=call.outputs[0].device)
    return Followed((picked(dim, rows, call.batch_size),))


def _new_axis(call: ObservedCall) -> int | None:
    """Where ``unsqueeze(dim)`` or ``x[None]`` adds an axis, or None."""
    if call.op == "unsqueeze":
        return int(call.argument(1, "dim")) % call.outputs[0].dim()
    index = call.args[1] if call.op == "getitem" else ()
    first = index[0] if isinstance(index, tuple) and index else index
    return 0 if first is None and len(call.operands) == 1 else None


def _adds_up(call: ObservedCall, operands: int) -> bool:
    """Whether an entry of the output is a sum over entries that may be of several samples."""
    of_loss = call.op in _ENTRYWISE_LOSSES and reduction_of(call) != 0 and str(call.op) in LOSSES
    return call.op in _SUMS or of_loss or (_adds(call) and operands > 1)


def _notes(call: ObservedCall, first: Lost, operands: int, reduced: bool, divisor: Tensor | None) -> Notes:
    """What to say of a call on values with gradient that have lost their batch axis: mixing, weighting."""
    data = [(tensor, mark) for tensor, mark in call.lost if not tensor.requires_grad]
    if operands == 1 and _scales(call) and (reduced or all(mark.reduced is not False for _, mark in data)):
        if any(tensor.numel() > 1 for tensor, _ in data):  # (one number for each entry weighs no sample)
            return _NOT_A_SUM.format(name=call.name, line=user_line()), None
        if data:
            return None, _why_scaled(call, first, [mark for _, mark in data])
        if divisor is not None:
            return None, _why_unlike(call, first, divisor)
        factors = (_factors(call) or []) if reduced and (rows := _rows(first)) else []
        counts = any(is_share(each, rows, first.counts) for each in factors)
        return None, f"`{call.name}` averages over unequal numbers of rows{user_line()}" if counts else None
    if call.op in _MOVES and any(_is_index(tensor) for tensor, _ in data):
        text = f"`{call.name}` picks entries by values computed over the whole batch{user_line()}"
        return next((mark.reason for tensor, mark in data if _is_index(tensor) and not mark.of_others), text), None
    chosen = bool(data) and call.op in ("where", "lerp")  # by values of the batch
    if ((call.op in _MOVES or _adds(call)) and not chosen) or (call.op in _SUMS and len(call.lost) == 1):
        return None, None
    if reduced:
        text = _NOT_A_SUM.format(name=call.name, line=user_line())
        return text if first.of_others else first.reason, None
    if call.op in _KEEPS_ENTRIES and len(call.lost) == 1:
        return None, None
    return first.reason, None


def _why_scaled(call: ObservedCall, loss: Lost, data: list[Lost]) -> str | None:
    """What to say of a loss that is divided by a sum of data: nothing where each sample adds the same to that sum."""
    totals = data[0].totals if call.op == "div" and len(data) == 1 else None
    number = next(tensor for tensor, mark in call.lost if mark is data[0])
    if totals is None or number.numel() != 1:
        return _SCALED.format(name=call.name, line=user_line())
    if not math.isclose(float(number), float(totals.sum()), rel_tol=1e-5):
        return _SCALED.format(name=call.name, line=user_line())
    unlike = _why_unlike(call, loss, totals)
    if unlike is None and not _after_division(loss, data[0], call.batch_size):
        return _UNEQUALLY.format(name=call.name, absent="", line=user_line())
    return unlike


def _why_unlike(call: ObservedCall, loss: Lost, totals: Tensor) -> str | None:
    """What to say of a loss that is divided by a sum of data (B,); nothing where each sample adds the same to it."""
    own = totals[sorted(loss.samples)] if loss.samples else totals
    alike = bool(own.isclose(own[0], rtol=1e-9).all()) and bool((own.sum() - totals.sum()).abs() <= 1e-9 * own.sum())
    return None if alike else _UNEQUALLY.format(name=call.name, absent=absent(own), line=user_line())


def _is_chosen(factors: list[float] | None, batch_size: int, samples: int) -> bool:
    """Whether the number by which a line multiplies a loss was the same with other numbers of samples."""
    if factors is None or len(factors) != 1 or factors[0] in (0, 1):
        return False
    if len(_FACTORS) >= _MOST:
        _FACTORS.clear()
    of_batch, of_sum = _FACTORS.setdefault((user_place(), factors[0]), (batch_size, samples))
    return of_batch != batch_size and of_sum != samples


def _constant_divisor(call: ObservedCall) -> Tensor | None:
    """What each row adds to a sum of constants by which a loss is divided, up to what keeps it from zero, (B,)."""
    factors = (_factors(call) or []) if call.row_sums else []
    if len(factors) != 1:
        return None
    sums = ((rows, factors[0] * float(rows.sum())) for rows in call.row_sums)
    return next((rows for rows, one in sums if math.isclose(one, 1, rel_tol=1e-5)), None)


def _after_division(loss: Lost, divisor: Lost, batch_size: int) -> frozenset[int]:
    """Which parts of a sum over the samples a loss is, after it was divided by a sum to which all add alike."""
    size = len(loss.samples) or batch_size
    found = {n * size // m for n in loss.parts for m in divisor.parts if n == m or m == 1}
    return frozenset(found & {1, size})


def _scales(call: ObservedCall) -> bool:
    """Whether the call multiplies its one operand with gradient by something else."""
    factor = next(tensor for tensor, _ in call.lost if tensor.requires_grad)
    scaled = call.args[:1] if call.op == "div" else call.args[:2] if call.op == "mul" else ()
    return any(tensor is factor for tensor in scaled)


def _is_index(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
