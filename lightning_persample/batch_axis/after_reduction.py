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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from numbers import Real
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_persample.batch_axis.added_up import absent, factors_of, is_share, reduction_of, scaled
from lightning_persample.batch_axis.axis import BatchAxis, Lost, picked
from lightning_persample.batch_axis.base import Entries, Followed, listed, lists
from lightning_persample.batch_axis.indexing import written_entries
from lightning_persample.batch_axis.observed import ObservedCall, Operand, user_line, user_place, version_of
from lightning_persample.batch_axis.ops import POINTWISE, having
from lightning_persample.batch_axis.sample_weights import after

_ADDS, _SUMS, _PICKS, _BOUNDS = having("adds", "chooses"), having("sums"), having("picks"), having("bounds")
_JOINS, _MOVES = having("joins"), having("same", "casts", "moves", "picks", "joins", "passes")
_ENTRYWISE_LOSSES = having("entrywise")
_NOT_A_SUM = "`{name}` of a value computed over the whole batch is not a sum over samples{line}"
_Term: TypeAlias = tuple[frozenset[int], frozenset[int], int]
_Terms: TypeAlias = tuple[_Term, ...]
_Notes: TypeAlias = tuple[str | None, str | None]
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
    call = _counted(call) if call.op == "mul" and len(call.lost) == 2 else call
    written = written_entries(call) if call.op == "setitem" or len(call.lost) > 1 else None
    one = {mark.alone for _, mark in call.lost}
    if written is not None and (None in one or len(one) > 1 or _says_where(call)):
        return written
    followed = _after_reduction(call)
    entries = written.outputs[0].entries if written is not None and isinstance(written.outputs[0], Lost) else None
    terms = _terms(call, followed)
    weights = after(call, _divisor(call, _added(call))) if call.compares_weights and followed.mixing is None else None
    places = (
        replace(mark, entries=entries, shares=_shares_after(call, place), computed=None, terms=terms, weights=weights)
        if isinstance(mark, Lost)
        else mark
        for place, mark in enumerate(followed.outputs)
    )
    followed = replace(followed, outputs=tuple(places))
    return _by_sample(call, followed) if call.meets_a_weight and torch.is_grad_enabled() else followed


def _counted(call: ObservedCall) -> ObservedCall:
    """The call where the number of samples in a sum over some, counted in the batch, is a number as any other."""
    sizes = {len(mark.samples) or call.batch_size for tensor, mark in call.lost if tensor.requires_grad}
    counts = [o for o in call.operands if _is_index(o.tensor) and o.tensor.numel() == 1 and int(o.tensor) in sizes]
    return replace(call, operands=tuple(Operand(o.tensor, None) if o in counts else o for o in call.operands))


def _says_where(call: ObservedCall) -> bool:
    """Whether numbers of the batch say where is written."""
    index = call.args[1] if call.op == "setitem" else ()
    items = index if isinstance(index, (tuple, list)) else (index,)
    return any(item is tensor for item in items for tensor, _ in call.lost)


def _added(call: ObservedCall) -> list[tuple[Tensor, Lost]]:
    """The operands that the result may be a sum of: those with a gradient, which none has in a custom function."""
    if torch.is_grad_enabled():
        return [pair for pair in call.lost if pair[0].requires_grad]
    return call.lost if call.op in _ADDS | _JOINS else call.lost[:1]


def _beside(call: ObservedCall, added: list[tuple[Tensor, Lost]]) -> list[tuple[Tensor, Lost]]:
    """The operands of the batch that are data."""
    own = {id(tensor) for tensor, _ in added}
    return [pair for pair in call.lost if id(pair[0]) not in own] if len(added) < len(call.lost) else []


def _multiplies(call: ObservedCall) -> bool:
    """Whether the one operand of the batch is multiplied, or divided, by another one."""
    number = call.lost[0][0]
    of_vector = call.op == "matmul" and number.dim() == 1 and call.args[0] is number
    return len(call.lost) == 1 and not call.kwargs and len(call.args) == 2 and (of_vector or _scales(call, number))


def _shares_after(call: ObservedCall, output: int) -> Callable[[], Tensor | None] | None:
    """What each sample adds to a multiple or a sum of such numbers, or to some of them, (B, *shape of the output)."""
    if any(mark.shares is None for _, mark in call.lost) or call.inplace or not call.outputs[0].is_floating_point():
        return None
    of_terms = call.op in ("add", "sub") and not call.kwargs and len(call.args) == len(call.operands)
    moves = call.op in _MOVES and call.op not in ("pad", "constant_pad_nd")  # (which may put numbers beside them)
    if not _multiplies(call) and not ((of_terms or moves) and len(call.lost) == len(call.operands)):
        return None
    kept = call.detached()
    versions = [version_of(operand.tensor) for operand in kept.operands]

    def of_one(*rows: Tensor) -> Tensor:
        by_tensor = {id(tensor): row for (tensor, _), row in zip(kept.lost, rows, strict=True)}
        return kept.again(lambda each: by_tensor.get(id(each.tensor), each.tensor))[output]

    def shares() -> Tensor | None:
        rows = [row for _, mark in kept.lost if mark.shares is not None and (row := mark.shares()) is not None]
        if len(rows) < len(kept.lost) or [version_of(operand.tensor) for operand in kept.operands] != versions:
            return None
        try:
            with torch.no_grad():
                result: Tensor = torch.vmap(of_one)(*rows)
        except Exception:  # whatever cannot be computed for all samples at once
            return None
        return result

    return shares


def _by_sample(call: ObservedCall, followed: Followed) -> Followed:
    """A number that is a sum over the samples, times a weight: what each of them adds gives the weight's gradients."""
    source = call.lost[0][1].shares if _multiplies(call) and not call.inplace else None
    rows = None if source is None else source()
    if rows is None:
        return followed
    number, output = call.lost[0][0], call.outputs[0]
    rank = number.dim() if call.op == "matmul" else output.dim()  # (over whose axes the rows of the samples are laid)
    rows = rows.reshape(len(rows), *(1,) * (rank + 1 - rows.dim()), *rows.shape[1:])
    args = tuple(rows if arg is number else arg for arg in call.args)
    entries = Entries(args, {}, torch.Size((call.batch_size, *output.shape)), BatchAxis(0), 1.0)

    def aligned(tensor: Tensor) -> BatchAxis | None:
        return BatchAxis(0) if tensor is rows else None

    return replace(followed, aligned=aligned, entries=lambda: entries)


def _after_reduction(call: ObservedCall) -> Followed:
    marks, added, runs_unseen = [mark for _, mark in call.lost], _added(call), not torch.is_grad_enabled()
    first = added[0][1] if added else marks[0]
    one = first.alone if all(mark.alone == first.alone for mark in marks) else None
    if one is None and lists(call):
        return listed(call)
    if one is not None and (new := _new_axis(call)) is not None:
        return Followed((picked(new, torch.tensor([one], device=call.outputs[0].device), call.batch_size),))
    of_some = (one is None and len(marks) > 1) or (call.op == "stack" and call.batch_size == 1)
    if of_some and (stacked := _stacked(call, marks)) is not None:
        return stacked
    if len(added) == 1 and _leaves_as_is(call, added[0][0]):
        return Followed((first,) * len(call.outputs), by_values=True)
    noted, of_several = next((mark for _, mark in added if mark.noted), None), any(mark.of_others for mark in marks)
    known = all(mark.samples for _, mark in added)
    samples = frozenset[int]().union(*(mark.samples for _, mark in added)) if known else frozenset[int]()
    divisor = _divisor(call, added)
    unplaced = all(mark.unplaced for mark in marks) and call.op in _MOVES | _KEEPS_ENTRIES
    is_listed = first.listed and call.op in _MOVES and len(marks) == 1
    of_data = not added or not (call.outputs[0].requires_grad or runs_unseen)
    chosen = any(mark.chosen for mark in marks) and {*(factors_of(call, call.lost[0][0]) or (1,))} != {0}
    if one is not None or noted is not None or of_data:
        own, is_crossed = (first.samples, first.crossed) if one is not None else (frozenset(), of_several)
        mark = replace(first, samples=own, unplaced=unplaced, crossed=is_crossed, chosen=chosen)
        mark = replace(noted, samples=samples) if noted is not None else mark
        if one is not None and added:
            mark = replace(mark, parts=_parts(call, added, divisor) or frozenset({1}))
        return Followed((replace(mark, listed=is_listed),) * len(call.outputs))
    number, reduced = added[0][0], any(mark.reduced is not False for _, mark in added)
    mixing, weighting = _notes(call, added, reduced, divisor)
    said = mixing is not None or weighting is not None
    adrift = not any(mark.of_others for _, mark in added) and call.outputs[0].dim() > 0
    reduced = reduced or _adds_up(call, len(added))
    alike = all((mark.samples, mark.parts) == (first.samples, first.parts) for _, mark in added)
    parts = _parts(call, added, divisor)
    if not said and parts is None:
        weighting = _why_unequal(call, [mark for _, mark in added])
    apart = call.op in _MOVES and (len(first.terms) > 1 or not alike)
    if apart and weighting is None and _takes_some(call):
        weighting = f"`{call.name}` picks from values of different samples{user_line()}"
    of_terms = len(first.terms) > 1 and not said and _scales(call, number)
    if of_terms and len(set(factors_of(call, number) or ())) > 1:
        weighting = f"`{call.name}` scales values of different samples unequally{user_line()}"
    result = replace(
        first, unplaced=unplaced and runs_unseen, listed=is_listed, reduced=None if reduced and adrift else reduced,
        uneven=max(mark.uneven for _, mark in added),
        parts=(parts or frozenset()) if reduced and not said else frozenset(),
        samples=samples if reduced and mixing is None else frozenset(),
        counts=frozenset().union(*(mark.counts for _, mark in added)), chosen=chosen,
    )  # fmt: skip
    if runs_unseen:
        if not result.parts and of_several:
            text = _NOT_A_SUM.format(name=call.name, line=user_line())
            result = replace(result, crossed=True, reason=first.reason if first.reduced is False else text)
        return Followed((result,) * len(call.outputs))
    is_sure = weighting is not None and divisor is not None and len(added) == len(call.lost)
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


def _leaves_as_is(call: ObservedCall, number: Tensor) -> bool:
    """Whether a number's gradient is what it was: within its bounds."""
    if call.op not in _BOUNDS or number.numel() != 1 or call.outputs[0].numel() != 1 or call.inplace:
        return False
    others = [value for value in (*call.args, *call.kwargs.values()) if value is not number and value is not None]
    value, tensors = number.detach(), [each for each in others if isinstance(each, Tensor)]
    bounds = [*tensors, *(value.new_tensor(float(each)) for each in others if isinstance(each, Real))]
    at_bound = any(bool((value == each).any()) for each in bounds)
    return not at_bound and bool(value != 0) and bool(call.outputs[0].detach() == value)


def _parts(call: ObservedCall, added: list[tuple[Tensor, Lost]], divided_by: Tensor | None) -> frozenset[int] | None:
    """Which parts of a sum over the samples the result may be, see `Lost`; None where its terms are different ones."""
    if not all(mark.parts for _, mark in added):
        return None if any(mark.samples != added[0][1].samples for _, mark in added) else frozenset()
    multiplies = call.op in ("mul", "div") or (call.op in _SUMS and len(added) == 1)
    if multiplies and (data := _beside(call, added)):
        return _after_division(added[0][1], data[0][1], call.batch_size)
    found = []
    for tensor, mark in added:
        factors, size = factors_of(call, tensor), len(mark.samples) or call.batch_size
        stays = _is_chosen(factors, call.batch_size, size) and mark.parts <= {size, call.batch_size}
        parts = mark.parts if stays else _scaled(call, mark.parts, factors, size, mark.counts)
        found.append(parts if stays or not multiplies or divided_by is None else parts | {1, size})
    together, marks = frozenset.intersection(*found), [mark for _, mark in added]
    are_terms = together <= {1, call.batch_size} and not any(mark.chosen for mark in marks)
    if len(added) > 1 and not are_terms and _overlap(marks):
        return together if _adds(call) and _terms(call, Followed(())) else None
    if together and not (multiplies or call.op in _MOVES | _SUMS or _adds(call)):
        return frozenset()
    return together or None


def _scaled(
    call: ObservedCall, parts: frozenset[int], factors: Sequence[float] | None, size: int, counts: frozenset[int]
) -> frozenset[int]:
    return scaled(parts, factors, size, call.batch_size, counts, divides=call.op in ("div", "addcdiv"))


def _terms(call: ObservedCall, followed: Followed) -> _Terms:
    """The sums over different samples that the result adds up, or has for entries; none where that is not known."""
    adds, joins, size = _adds(call), call.op in _JOINS, call.outputs[0].numel()
    found = [(tensor, mark.terms or ((mark.samples, mark.parts, 1),)) for tensor, mark in call.lost]
    unknown = call.op in _MOVES  # (whose each of the entries is that are moved counts only where they are added up)
    known = all(parts and (own or unknown) for _, terms in found for own, parts, _ in terms)
    # What was said of one that is no sum of terms is true of the result, too; of a sum of them its terms may excuse it.
    known = known and all(tensor.requires_grad and (mark.terms or not mark.notes) for tensor, mark in call.lost)
    known = known and call.outputs[0].requires_grad and followed.mixing is None
    if not known or not (adds or joins or (len(found) == 1 and followed.weighting is None)):
        return ()
    factors = [set(factors_of(call, tensor) or ()) for tensor, _ in found]
    if (call.inplace and call.op not in POINTWISE) or any(len(each) != 1 for each in factors):
        return ()
    terms = tuple(
        (own, _scaled(call, parts, [*by], len(own), frozenset()), n)
        for (_, terms), by in zip(found, factors, strict=True)
        for own, parts, n in terms
    )
    numbers = size == max(tensor.numel() for tensor, _ in found) == 1
    if joins:
        return each if len(each := (*dict.fromkeys(terms),)) > 1 else _together(each)
    if (adds and numbers) or (call.op in _SUMS and size == 1):
        return _together(terms)
    stays = len(found) == 1 and size == found[0][0].numel()
    return terms if stays and (len(terms) > 1 or terms[0][0]) else ()


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
    return all(tensor.requires_grad and factors_of(call, tensor) is not None for tensor, _ in call.lost)


def _overlap(marks: list[Lost]) -> bool:
    """Whether terms of some samples alone have samples in common, and are not all of the same ones."""
    owns = [mark.samples for mark in marks]
    return len(set(owns)) > 1 and (not all(owns) or len(frozenset().union(*owns)) < sum(map(len, owns)))


def _why_unequal(call: ObservedCall, marks: list[Lost]) -> str:
    """Terms of a loss that are different parts of a sum over the samples."""
    if any(mark.chosen for mark in marks) and _overlap(marks):
        return f"`{call.name}` takes samples a second time that the values of the whole batch choose{user_line()}"
    kinds = {mark.parts == {1} and len(mark.samples) != 1 for mark in marks}
    if kinds == {True, False}:
        two = f"`{call.name}` puts a mean and a sum over the samples together{user_line()}"
        return f"{two}: take one of the two for both"
    return f"`{call.name}` combines means over different numbers of samples, or over some twice{user_line()}"


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
    of_loss = call.op in _ENTRYWISE_LOSSES and reduction_of(call) != 0
    return call.op in _SUMS or of_loss or (_adds(call) and operands > 1)


def _notes(call: ObservedCall, added: list[tuple[Tensor, Lost]], reduced: bool, divisor: Tensor | None) -> _Notes:
    """What to say of a call on values with gradient that have lost their batch axis: mixing, weighting."""
    (number, first), data = added[0], _beside(call, added)
    if len(added) == 1 and _scales(call, number) and (reduced or all(mark.reduced is not False for _, mark in data)):
        if any(tensor.numel() > 1 for tensor, _ in data):  # (one number for each entry weighs no sample)
            return _NOT_A_SUM.format(name=call.name, line=user_line()), None
        if data or divisor is not None:
            return None, _why_scaled(call, first, data, divisor)
        factors = (factors_of(call, number) or ()) if reduced and (rows := _rows(first)) else ()
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


def _why_scaled(call: ObservedCall, loss: Lost, data: list[tuple[Tensor, Lost]], totals: Tensor | None) -> str | None:
    """What to say of a loss that data scale, or that is divided by a sum: nothing where each sample adds the same."""
    name, line = call.name, user_line()
    if totals is None or (data and not math.isclose(float(data[0][0]), float(totals.sum()), rel_tol=1e-5)):
        return f"`{name}` scales the loss by a number computed over the whole batch{line}"
    own = totals[sorted(loss.samples)] if loss.samples else totals
    alike = bool(own.isclose(own[0], rtol=1e-9).all()) and bool((own.sum() - totals.sum()).abs() <= 1e-9 * own.sum())
    if alike and not (data and not _after_division(loss, data[0][1], call.batch_size)):
        return None
    return f"`{name}` scales the loss by a sum to which the samples add unequally{absent(own)}{line}"


def _is_chosen(factors: Sequence[float] | None, batch_size: int, samples: int) -> bool:
    """Whether the number by which a line multiplies a loss was the same with other numbers of samples."""
    if factors is None or len(factors) != 1 or factors[0] in (0, 1):
        return False
    if len(_FACTORS) >= _MOST:
        _FACTORS.clear()
    of_batch, of_sum = _FACTORS.setdefault((user_place(), factors[0]), (batch_size, samples))
    return of_batch != batch_size and of_sum != samples


def _divisor(call: ObservedCall, added: list[tuple[Tensor, Lost]]) -> Tensor | None:
    """What each sample adds to a sum of data, or each row to one of constants, by which a loss is divided, (B,)."""
    if not added or len(added) < len(call.lost):
        (number, mark), *more = _beside(call, added)
        return mark.totals if added and call.op == "div" and not more and number.numel() == 1 else None
    factors = (factors_of(call, added[0][0]) or ()) if call.row_sums else ()
    if len(factors) != 1:
        return None
    sums = ((rows, factors[0] * float(rows.sum())) for rows in call.row_sums)  # (up to what keeps it from zero)
    return next((rows for rows, one in sums if math.isclose(one, 1, rel_tol=1e-5)), None)


def _after_division(loss: Lost, divisor: Lost, batch_size: int) -> frozenset[int]:
    """Which parts of a sum over the samples a loss is, after it was divided by a sum to which all add alike."""
    size = len(loss.samples) or batch_size
    found = {n * size // m for n in loss.parts for m in divisor.parts if n == m or m == 1}
    return frozenset(found & {1, size})


def _scales(call: ObservedCall, number: Tensor) -> bool:
    """Whether the call multiplies an operand by something else."""
    factors = call.args[:1] if call.op == "div" else call.args[:2] if call.op == "mul" else ()
    return any(each is number for each in factors)


def _is_index(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
