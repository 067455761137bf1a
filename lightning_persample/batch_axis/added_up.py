"""Calls that add up the samples: sums and means over the batch axis, and losses with a reduction of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from lightning_persample.batch_axis.axis import Lost, batch_first
from lightning_persample.batch_axis.base import Followed, dims_argument, is_plain, of_loss
from lightning_persample.batch_axis.observed import ObservedCall, user_line, version_of
from lightning_persample.batch_axis.ops import OPS, having
from lightning_persample.torch_internals import counted_from_front

_MOST_FACTORS = 65536  # numbers that are read to tell whether they are alike
MOST_KEPT = 1 << 16  # numbers that are kept for those who ask what each sample adds to their sum
_MOST = 1 << 22  # numbers in data of the batch that are added up once more
_MOVES, _MULTIPLIES = having("same", "casts", "moves", "picks", "joins", "passes"), having("sums") | {"mul", "div"}
# Nodes that add, with the place of the input that they multiply, and those that move, add up or negate entries.
_ADDS = {"AddBackward0": 1, "SubBackward0": 1, "RsubBackward0": 0, "RsubBackward1": 0}
_DIVIDES = ("DivBackward0", "AddcdivBackward0")
_MOVES_ENTRIES = (
    "Neg", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Transpose", "TBackward", "Permute", "Clone",
    "ToCopy", "SumBackward1", "MeanBackward1",
)  # fmt: skip
MEAN = 1  # the number by which torch's primitives know reduction="mean"


def averages(call: ObservedCall) -> bool:
    """Whether the call takes a mean over everything it is given."""
    return call.op in ("mean", "nanmean") or reduction_of(call) == MEAN


def reduction_of(call: ObservedCall) -> int | None:
    """The reduction of a loss, as torch's primitives number them; None of another op."""
    op = OPS.get(call.op)
    return None if op is None or op.reduction is None else int(call.argument(op.reduction, "reduction", default=MEAN))


def added_up(call: ObservedCall, *, weighs: bool = False) -> Followed:
    """The samples were added up: the outputs are a weighted sum over the batch; `weighs`: by weights of the caller."""
    sizes = [tuple(o.tensor.shape) for o in call.operands]
    what = f"`{call.name}` reduces over the batch axis (shapes {sizes}{user_line()})"
    with_gradient = [(tensor, axis) for tensor, axis in call.located if tensor.requires_grad]
    if not with_gradient:
        parts = frozenset({call.batch_size if averages(call) else 1})
        mark = Lost(what, reduced=True, parts=parts, totals=_totals(call), shares=_shares_of_sum(call))
        return Followed((mark,) * len(call.outputs))
    counts = [axis.owner.counts(call.batch_size) for _, axis in with_gradient if axis.owner is not None]
    differ = [each for each in counts if not bool((each[each > 0] == each.max()).all())]
    if call.op == "nanmean":
        tensor, axis = call.located[0]
        there = batch_first((~tensor.isnan()).long(), axis, call.batch_size, fill=False).flatten(1).sum(1)
        differ += [there] if bool((there != there[0]).any()) else []
    uneven = int(differ[0].sum()) * with_gradient[0][1].rows if differ else 0
    samples = frozenset[int]()
    mixing = next((axis.mixing for _, axis in with_gradient if axis.mixing), None)
    if len(counts) == len(with_gradient) and mixing is None:
        present = (sum(counts) > 0).nonzero().flatten().tolist()  # type: ignore[union-attr]
        samples = frozenset(present) if len(present) < call.batch_size else samples
    size = len(samples) or call.batch_size
    mean = averages(call)
    parts = frozenset({size if mean else 1} if mixing is None and not (mean and uneven) else ())
    if parts and not mean and not any(tensor.numel() for tensor, _ in with_gradient):  # (nothing is a part of any sum)
        parts |= {call.batch_size}
    note, found = mixing, [*_factors_within(call)] if parts and not (weighs or mean) else []
    if weighs and parts:
        factors = factors_beside(call) or []
        if len(set(factors)) == 1:
            found = [(factors[0], len(factors) > 1)]  # (one number for all may be a scale of the user's)
        else:
            parts, note = frozenset(), f"`{call.name}` weighs the samples by a tensor{user_line()}"
    for factor, by_sample in found:
        inside = frozenset[int]() if weighs else _counts(call)
        parts = scaled(parts, [factor], size, call.batch_size, inside, divides=by_sample)
    scale = math.prod(factor for factor, _ in found)
    if note is None and uneven and (mean or is_share(scale, uneven, _counts(call))):
        note = f"`{call.name}` averages over unequal numbers of rows from sample to sample{user_line()}"
    one = len(samples) == 1 and not weighs
    mark = Lost(
        what, reduced=not one, uneven=0 if one else uneven, parts=parts, counts=_counts(call), samples=samples,
        shares=_shares_of_sum(call), chosen=any(axis.chosen for _, axis in with_gradient),
    )  # fmt: skip
    return of_loss(call, Followed((mark,) * len(call.outputs)), None if one else note)


def _rows_added(call: ObservedCall) -> Callable[..., Tensor] | None:
    """Gives what each sample adds to a sum or mean of such values, (B, *shape of the output)."""
    if call.op not in ("sum", "mean") or len(call.operands) != 1 or not is_plain(call.operands[0].tensor):
        return None
    ((tensor, axis),), batch_size = call.located, call.batch_size
    dims = dims_argument(call.argument(1, "dim", "axis"), tensor.dim()) or tuple(range(tensor.dim()))
    keepdim = call.outputs[0].dim() == tensor.dim()
    share = call.outputs[0].numel() / max(tensor.numel(), 1) if averages(call) else 1.0

    def added(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        rows = batch_first(values, axis, batch_size, fill=False)
        return rows.sum([dim + 1 for dim in dims], keepdim, dtype=dtype) * share

    return None if axis.mixing is not None else added


def _shares_of_sum(call: ObservedCall) -> Callable[[], Tensor | None] | None:
    """What each sample adds to a sum or mean, (B, *shape of the output)."""
    added = _rows_added(call)
    if added is None:
        return None
    kept = call.operands[0].tensor.detach()
    if kept.numel() > MOST_KEPT:
        found = added(kept)
        return lambda: found
    version = version_of(kept)
    return lambda: added(kept) if version_of(kept) == version else None


def _factors_within(call: ObservedCall) -> Iterator[tuple[float, bool]]:
    """By what the entries of a sum were multiplied, all alike, and whether by one each or by a division."""
    tensor = call.located[0][0]
    if len(call.operands) > 1:
        return
    try:
        for node, factor, below in nodes_that_multiply(tensor):
            if factor is None or not 0 < factor.numel() <= _MOST_FACTORS or factor.requires_grad or factor.is_complex():
                return
            found = set(factor.flatten().tolist())
            number = found.pop()
            if found:
                return
            if number != 1:
                divides = node.name() in _DIVIDES and math.isclose(number * call.batch_size, 1)
                divides = divides and _summed_by(below) != call.batch_size  # (of as many entries it is an average)
                yield number, divides or 1 < factor.numel() in (tensor.numel(), call.batch_size)
    except RuntimeError:  # it was written to since, or a backward has freed it
        return


def nodes_that_multiply(tensor: Tensor, picks: tuple[str, ...] = ()) -> Iterator[tuple[Any, Tensor | None, Any]]:
    """The nodes that made a tensor, the last first, each with what it multiplies by, None at the end, and the next."""
    node: Any = tensor.grad_fn
    while node is not None:
        places = [place for place, (below, _) in enumerate(node.next_functions) if below is not None]
        factor = None
        if len(places) == 1:
            factor = torch.ones(()) if picks and node.name().startswith(picks) else factor_at(node, places[0])
        below = None if factor is None else node.next_functions[places[0]][0]
        yield node, factor, below
        node = below


def _summed_by(node: Any) -> int:
    """How many entries each one of a sum along axes adds up; 1 of any other node."""
    if node.name() != "SumBackward1":
        return 1
    shape = node._saved_self_sym_sizes
    return math.prod(shape[dim] for dim in counted_from_front(node._saved_dim, len(shape)))


def _is_of_all(node: Any) -> bool:
    """Whether a slice is the whole axis, as that of ``x[:, None]`` in torch 2.6."""
    size = node._saved_self_sym_sizes[node._saved_dim]
    return not node._saved_start and node._saved_step == 1 and (node._saved_end is None or node._saved_end >= size)


def factor_at(node: Any, place: int) -> Tensor | None:
    """What a node multiplies its one input by, apart from the sign; None where that is not known."""
    name = node.name()
    if name.startswith(_MOVES_ENTRIES) or (name == "SliceBackward0" and _is_of_all(node)):
        return torch.ones(())
    if name == "MulBackward0":
        return node._saved_other if node._saved_self is None else node._saved_self
    if name == "DivBackward0" and place == 0:
        return torch.as_tensor(node._saved_other).double().reciprocal()
    if name in _ADDS:
        return torch.as_tensor(node._saved_alpha if place == _ADDS[name] else 1.0)
    if name in ("AddcmulBackward0", "AddcdivBackward0") and place == 0:
        return torch.ones(())
    if name == "AddcmulBackward0":
        return node._saved_value * (node._saved_tensor2 if place == 1 else node._saved_tensor1)
    if name == "AddcdivBackward0" and place == 1:
        return node._saved_value / node._saved_tensor2
    if name in ("LerpBackward0", "LerpBackward1"):
        return torch.as_tensor(node._saved_weight if place == 1 else 1 - node._saved_weight)
    return None


UNKNOWN = 0  # among the parts: the loss was multiplied by what may be any number that somebody chose
_CHOSEN = 3  # 2 may as well be a number that somebody chose, and not the size of the batch


def scaled(
    parts: frozenset[int],
    factors: Sequence[float] | None,
    samples: int,
    batch_size: int,
    counts: frozenset[int],
    *,
    divides: bool = False,
) -> frozenset[int]:
    """Which parts of a sum over the samples a loss may be after it was multiplied."""
    found = [
        frozenset[int]().union(*(_scaled(n, abs(factor), samples, batch_size, counts, divides) for n in parts))
        for factor in set(factors or ())
    ]
    return (frozenset.intersection(*found) or frozenset.union(*found)) if found else parts


def _scaled(
    n: int, factor: float, samples: int, batch_size: int, counts: frozenset[int], divides: bool
) -> frozenset[int]:
    if factor == 0:  # (nothing, as in ``+ 0 * logits.sum()``, is a part of any sum)
        return frozenset({n, 1, samples, batch_size})
    if factor == 1 or not math.isfinite(factor) or n == UNKNOWN:
        return frozenset({n})
    is_count = isinstance(factor, int)  # the scale of a GradScaler, which may be any power of 2, is none
    for size in (samples, batch_size, 1):
        if size != n and math.isclose(n / factor, size, rel_tol=1e-5):
            by_hand = n == samples < batch_size and _is_whole(1 / factor)
            by_chance = by_hand or not divides if size > 1 else not is_count or n < _CHOSEN
            is_written = not divides and _decimals(factor) < 3
            is_any = is_written or size < _CHOSEN or (1 < samples < batch_size and samples in (n, size))
            return frozenset(({n, size, UNKNOWN} if is_any else {n, size}) if by_chance else {size})
    if n > 1:
        each = factor / n
        return frozenset({1}) if is_count and _is_whole(each) and round(each) in counts else frozenset({n})
    each = 1 / factor / samples  # a mean over samples, times one over this
    if each < 1:  # a share of a data set, N / B, has more digits than a number that somebody chose
        return frozenset({1} if factor < 1 or _is_whole(factor) or _digits(factor) < 3 else {1, samples, UNKNOWN})
    counted = _is_whole(each) and (divides and (round(each) == 2 or round(each) in counts))
    digits, of_divisor = _digits(each), _digits(1 / factor)
    if not counted and (digits < of_divisor or (_is_whole(each) and digits == of_divisor > 2)):
        return frozenset({1, samples, UNKNOWN})
    return frozenset({1, samples}) if counted else frozenset({1})


def _is_whole(number: float) -> bool:
    return number > 0.5 and math.isclose(number, round(number), rel_tol=1e-5)


def _digits(number: float) -> int:
    """With how many digits a number, or one over it, is written: people write few, counts of samples have any."""
    return min(_decimals(number), _decimals(1 / number))


def _decimals(number: float) -> int:
    return len(f"{number:.6e}".partition("e")[0].replace(".", "").rstrip("0"))


def factors_beside(call: ObservedCall, most: int = _MOST_FACTORS) -> list[float] | None:
    """The numbers, `most` of them, that a product has beside its one operand with a gradient; None where unknown."""
    followed = {id(operand.tensor) for operand in call.operands if operand.axis is not None}
    others = [operand.tensor for operand in call.operands if id(operand.tensor) not in followed]
    found: list[float] = []
    for tensor in others:
        if tensor.numel() > most or tensor.is_complex() or not is_plain(tensor) or tensor.is_meta:
            return None
        found += tensor.detach().flatten().tolist()
    numbers = [each for each in call.args if isinstance(each, Real) and not isinstance(each, bool)]
    if len(others) + len(numbers) != 1:
        return None
    return found or [int(number) if isinstance(number, Integral) else float(number) for number in numbers]


def factors_of(call: ObservedCall, tensor: Tensor) -> Sequence[float] | None:
    """By what an operand is multiplied in the result, or each of its entries; None where that is not known."""
    first, factor = call.args[0] if call.args else None, None
    if call.op in ("add", "sub", "rsub"):
        factor = call.kwargs.get("alpha", 1) if (tensor is first) is (call.op == "rsub") else 1
    elif call.op == "lerp":
        weight = _number(call.argument(2, "weight"))
        factor = weight if weight is None or tensor is not first else 1 - weight
    elif call.op in ("addcmul", "addcdiv"):
        second, third = call.argument(1, "tensor1"), call.argument(2, "tensor2")
        value = _number(call.kwargs.get("value", 1))
        is_factor = tensor is third and call.op == "addcmul"
        other = _number(second if is_factor else third)
        if tensor is first and tensor is not second and tensor is not third:
            factor = 1
        elif (tensor is second or is_factor) and value is not None and other:
            factor = value * other if call.op == "addcmul" else value / other
    elif call.op in ("sum", "nansum") or call.op in _MOVES:
        factor = 1
    elif call.op == "mean":  # (of entries that are all one sum it is one, too)
        terms = next((len(mark.terms) for each, mark in call.lost if each is tensor), 0)
        factor = call.outputs[0].numel() / max(tensor.numel(), 1) if terms > 1 else 1
    elif call.op in _MULTIPLIES:
        found = [1] if call.meets_a_weight else factors_beside(call, 64)  # (what is learned is the samples' own)
        return [1 / each if each else 0.0 for each in found] if found and call.op == "div" else found
    number = _number(factor)
    return None if number is None else (number,)


def _number(value: object) -> float | None:
    """One number that has no gradient; None where it is something else."""
    if isinstance(value, Tensor):
        plain = value.numel() == 1 and not value.requires_grad and not value.is_complex() and not value.is_meta
        return float(value) if plain else None
    return float(value) if isinstance(value, Real) else None


def absent(totals: Tensor) -> str:
    """What to say of the samples that have no part in a sum: their own losses are not in the loss."""
    count = int((totals == 0).sum())
    return f" ({count} of {len(totals)} add nothing, so that their norm is 0)" if count else ""


def is_share(factor: float, rows: int, counts: frozenset[int]) -> bool:
    """Whether a sum times this is an average over so many rows, or over their entries, or these by the count."""
    each = 1 / factor / rows if factor not in (0, 1) else 0.0
    return any(math.isclose(each, n, rel_tol=1e-5) or math.isclose(each * n, 1, rel_tol=1e-5) for n in (1, *counts))


def _counts(call: ObservedCall) -> frozenset[int]:
    """Products of axes of one sample's part in the operands."""
    found = frozenset[int]()
    for tensor, axis in call.located:
        sizes = [size for dim, size in enumerate(tensor.shape) if dim != axis.dim]
        found |= products_of([*sizes, tensor.size(axis.dim) // max(axis.entries(call.batch_size), 1)])
    return found


def products_of(sizes: Sequence[int]) -> frozenset[int]:
    """Products of some of these sizes."""
    some = (each for taken in range(1, len(sizes) + 1) for each in combinations(sizes, taken))
    return frozenset(map(math.prod, some)) - {0, 1}


def _totals(call: ObservedCall) -> Tensor | None:
    """What each sample adds to a sum of data that has no axes left: (B,)."""
    tensor, added = call.operands[0].tensor, _rows_added(call)
    unfit = call.outputs[0].dim() or tensor.is_complex() or tensor.numel() > _MOST
    return None if added is None or unfit else added(tensor, torch.float64)
