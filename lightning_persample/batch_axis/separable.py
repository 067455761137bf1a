"""Whether a number that was computed over the whole batch is a sum of what each sample alone gives.

What has lost its batch axis in a call of which nothing better is known keeps how it was computed. Once it is one
number, its gradient tells: it is a weighted sum over the samples where the part of the gradient that belongs to one
sample stays as it is whatever the others hold, as that of ``norm(x) ** 2``, ``losses.cumsum(0)[-1]`` and
``losses.diag().trace()`` does. Where it is a constant, it holds the weights themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, count
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_persample.batch_axis.added_up import UNKNOWN, products_of, scaled
from lightning_persample.batch_axis.axis import BatchAxis, Computed, Lost, Note, Root, entries_of, one_entry
from lightning_persample.batch_axis.base import Followed, is_plain
from lightning_persample.batch_axis.observed import ObservedCall, tensors_in, user_line, user_place
from lightning_persample.batch_axis.ops import having
from lightning_persample.gradients.precision import without_autocast
from lightning_persample.rules import generators_kept
from lightning_persample.torch_internals import tree_flatten, tree_unflatten

_MOST = 1 << 16  # entries of what a number is computed from
_NEAR = 1e-3  # a change of a number around which it may be bent
_STEP, _SAME = 1e-5, 1e-10  # a change of the values, and one of their gradient that is rounding
_CHOSEN = 3  # 2 may as well be a number that somebody chose, and not the size of the batch
_LONGEST = 32  # calls that are made again
_ALONE = 6  # samples that are looked at alone beside the first and the last

_ORDERS = having("orders")

# Lines, ops and shapes of numbers: those that were looked at in vain, and those, with the values of the constants and
# owners in them, that are looked at by one split at a time from then on, another one at each step.
_NO_SUM: set[Hashable] = set()
_SUMS: set[Hashable] = set()
_SEEDS = count()


def by_what_samples_give(call: ObservedCall, followed: Followed) -> Followed:
    """The answer of a follower, corrected where the output is one number that is a sum over the samples after all."""
    if followed.is_sure:
        return followed
    marks = list(followed.outputs)
    said = followed.mixing or followed.weighting
    for place, (mark, output) in enumerate(zip(marks, call.outputs, strict=False)):
        if not isinstance(mark, Lost) or not output.requires_grad or (mark.parts and not said) or call.batch_size == 1:
            continue
        computed = _computed(call, place) if _is_of_torch(call) else None
        computed = None if computed is None or len(computed.ops) > _LONGEST else computed
        is_number, verdict = output.numel() == 1, None
        if computed is not None and is_number and sum(each.requires_grad for each in call.outputs) == 1:
            verdict = _verdict(call, computed, mark, followed.weighting)
        if verdict is not None:
            excused = frozenset[Note]().union(*(mark.notes for _, mark in call.lost if mark.computed is not None))
            return replace(verdict, outputs=(*marks[:place], *verdict.outputs, *marks[place + 1 :]), excused=excused)
        if computed is not None:
            mark = replace(mark, computed=computed)
        if is_number and not (mark.notes or mark.crossed or mark.samples) and _adds_up(call):
            mark = Lost(mark.reason, notes=mark.notes | {("mixing", mark.reason)}, computed=mark.computed)
            followed = replace(followed, mixing=mark.reason)
        marks[place] = mark
    return replace(followed, outputs=tuple(marks))


def _adds_up(call: ObservedCall) -> bool:
    """Whether a number may be made of several samples, of which nothing was known before."""
    return any(operand.axis is not None and operand.tensor.numel() > 1 for operand in call.operands)


def _is_of_torch(call: ObservedCall) -> bool:
    """Whether torch's own function was called: what a user's own leaves in Python is not undone after another run."""
    return (getattr(call.function, "__module__", None) or "torch").partition(".")[0] == "torch"


def _computed(call: ObservedCall, place: int) -> Computed | None:
    """How an output of a call was computed; None where that is not known, or is too large."""
    if call.kwargs.get("out") is not None or any(not is_plain(operand.tensor) for operand in call.operands):
        return None
    leaves, spec = tree_flatten((call.args, dict(call.kwargs)))
    roots: list[Root] = []
    of_sum: Lost | None = None
    constants: list[Tensor] = []
    ops: tuple[object, ...] = (call.op,)
    sources: dict[int, tuple[list[int], Callable[[Sequence[Tensor], bool], Tensor]]] = {}
    is_product = call.op in ("mul", "div") and call.batch_size >= _CHOSEN
    counts = (call.batch_size, 1 / call.batch_size) if is_product else ()
    for at, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        mark = call.axis_of(leaf)
        if leaf.numel() > _MOST or leaf.is_complex() or (mark is not None and call.inplace and at == 0):
            return None
        owners = None if mark is None or not leaf.is_floating_point() else _owners(mark, leaf, call.batch_size)
        if owners is not None:
            axis = mark if isinstance(mark, BatchAxis) else None
            root = Root(_exact(leaf), owners, axis, leaf.detach(), leaf.requires_grad)
            sources[at] = [_place_of(root, roots)], _itself
        elif isinstance(mark, Lost) and mark.computed is not None and leaf.requires_grad:
            sources[at] = [_place_of(root, roots) for root in mark.computed.roots], mark.computed.run
            constants += mark.computed.constants
            ops += mark.computed.ops
            of_sum = of_sum or mark.computed.of_sum
        elif isinstance(mark, Lost) and mark.reduced and mark.parts and leaf.numel() == 1 and leaf.requires_grad:
            of_sum = mark
            root = Root(_exact(leaf), torch.full(leaf.shape, -1, device=leaf.device), None, leaf.detach(), True)
            sources[at] = [_place_of(root, roots)], _itself
        elif mark is not None or (leaf.requires_grad and not (call.inplace and at == 0)):
            return None
        else:
            leaves[at] = _exact(leaf)
            constants.append(leaves[at])
    if not any(root.differs for root in roots) or (of_sum is not None and len(roots) > 1):
        return None

    def run(values: Sequence[Tensor], alone: bool) -> Tensor:
        filled = [_of_one(leaf, call.batch_size, counts) for leaf in leaves] if alone else list(leaves)
        for at, (places, source) in sources.items():
            filled[at] = source([values[each] for each in places], alone)
        if call.inplace and isinstance(filled[0], Tensor):
            filled[0] = filled[0].clone()
        args, kwargs = tree_unflatten(filled, spec)
        result: Any = call.function(*args, **kwargs)
        return tuple(tensors_in(filled[0] if result is None else result))[place]

    return Computed(tuple(roots), run, tuple(constants), ops, of_sum)


def _owners(mark: BatchAxis | Lost, tensor: Tensor, batch_size: int) -> Tensor | None:
    """The sample of each entry of what a number is computed from; None where that is not known, or is one number."""
    if isinstance(mark, BatchAxis) and mark.mixing is not None:
        return None
    if isinstance(mark, Lost) and (mark.of_others or mark.entries is None):
        return None
    return entries_of(mark, tensor, batch_size)


def _place_of(root: Root, roots: list[Root]) -> int:
    """The place of a root among others, added to them where it is none of them."""
    for at, other in enumerate(roots):
        if root.tensor is other.tensor or (root.tensor.is_set_to(other.tensor) and root.values.equal(other.values)):
            return at
    roots.append(root)
    return len(roots) - 1


def _itself(values: Sequence[Tensor], alone: bool) -> Tensor:
    return values[0]


def _of_one(leaf: Any, batch_size: int, counts: Sequence[float]) -> Any:
    """What stands beside one sample alone: ones for a tensor with a row for each sample, and for their number."""
    number = leaf.detach() if isinstance(leaf, Tensor) and leaf.numel() == 1 else leaf
    is_number = number is not leaf or isinstance(leaf, Real)
    if is_number and any(math.isclose(float(number), count, rel_tol=1e-5) for count in counts):
        return leaf / leaf
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or batch_size not in leaf.shape:
        return leaf
    return leaf.new_ones([1 if size == batch_size else size for size in leaf.shape])


def _exact(tensor: Tensor) -> Tensor:
    """A copy, numbers in float64."""
    return tensor.detach().to(torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)


def _verdict(call: ObservedCall, computed: Computed, mark: Lost, weighting: str | None) -> Followed | None:
    """What is known of one number that was computed so; None where it is not known to be a sum over the samples."""
    if call.outputs[0].is_meta:
        return None
    if computed.of_sum is not None:
        return _multiple(call, computed, computed.of_sum) if weighting is None else None
    key = (user_place(), computed.ops, *(root.values.shape for root in computed.roots))
    if key in _NO_SUM:
        return None
    beside = (*computed.constants, *(root.owners for root in computed.roots))
    with_values = (*key, *(hash(each.cpu().numpy().tobytes()) for each in beside))
    try:
        with generators_kept(root.values for root in computed.roots), without_autocast(call.outputs[0].device.type):
            number = _Number(computed, call.batch_size)
            found = number.as_a_sum(splits=1 if with_values in _SUMS else None)
    except Exception:  # whatever a function of the user's raises with other values
        return None
    if number.samples and (found is None or found[0] is not None):
        known = _NO_SUM if found is None else _SUMS
        if len(known) >= _MOST:
            known.clear()
        known.add(key if found is None else with_values)
    if found is None or (found[0] is None and weighting is not None):
        return None
    parts, samples = found
    note = f"`{call.name}` gives the samples unequal weights{user_line()}" if parts is None else None
    some = samples if len(samples) < call.batch_size else frozenset[int]()
    counts = frozenset[int]().union(*(products_of(root.values.shape) for root in computed.roots))
    place = Lost(mark.reason, reduced=len(samples) != 1, parts=parts or frozenset(), samples=some, counts=counts)
    if some and number.weight and not _ORDERS.isdisjoint(computed.ops):  # (which they are is up to the values of all)
        weights = torch.zeros(call.batch_size, dtype=torch.float64, device="cpu")
        weights[sorted(some)] = number.weight
        place = replace(place, by_rank=weights, chosen=True)
    return Followed((place,), weighting=note, by_values=True)


def _multiple(call: ObservedCall, computed: Computed, of: Lost) -> Followed | None:
    """What is known of a number computed from one that is a sum over the samples: a multiple of it, or None."""
    number = computed.roots[0].values
    try:
        with torch.no_grad(), generators_kept([number]):
            at = [float(computed.run([number * (1 + step * _NEAR)], False)) for step in (0, -2, -1, 1, 2)]
    except Exception:  # whatever a function of the user's raises with other values
        return None
    value, *around = at
    if not math.isclose(value, float(call.outputs[0].detach()), rel_tol=0.01):  # it may be random
        return None
    change = around[-1] - around[0]
    expected = [value + change * step / 4 for step in (-2, -1, 1, 2)]
    size = max(map(abs, at))
    is_affine = all(abs(x - y) <= _SAME * abs(change) + 1e-15 * size for x, y in zip(around, expected, strict=True))
    if not is_affine or abs(change) <= 1e-10 * size:
        return None
    slope, size = change / (4 * _NEAR * float(number)), len(of.samples) or call.batch_size
    parts = scaled(of.parts, [slope], size, call.batch_size, of.counts)
    return Followed((replace(of, parts=parts, shares=None, weights=None),), by_values=True)


@lru_cache(maxsize=4)
def _codes(least: int) -> Tensor:
    """As many different codes at least, (codes, length), of equally many true entries: either of two has one alone."""
    length = next(length for length in count(2) if math.comb(length, length // 2) >= least)
    places = torch.tensor([*combinations(range(length), length // 2)], device="cpu")
    return torch.zeros(len(places), length, dtype=torch.bool, device="cpu").scatter_(1, places, True)


class _Number:
    """A number that was computed from tensors that hold the samples, and its gradient by them."""

    def __init__(self, computed: Computed, batch_size: int) -> None:
        self.computed, self.batch_size = computed, batch_size
        self.values = [root.values for root in computed.roots]
        self.owners = [root.owners for root in computed.roots]
        self.gradients = _gradients(computed, self.values)
        weighed = [
            owner[(gradient != 0) & (owner >= 0)] for owner, gradient in zip(self.owners, self.gradients, strict=True)
        ]
        self.counts = torch.cat(weighed).bincount(minlength=batch_size)  # of entries with a part in it
        self.samples = self.counts.nonzero().flatten().tolist()
        self.size = max(float(gradient.abs().max()) for gradient in self.gradients if gradient.numel())
        self.weight = 0.0  # of each sample, where it has one entry in a sum
        self._random = torch.Generator().manual_seed(next(_SEEDS))  # (the user's is left as it is)

    def as_a_sum(self, splits: int | None = None) -> tuple[frozenset[int] | None, frozenset[int]] | None:
        """Which parts of a sum over which samples it is: none where that is not known, None where they differ."""
        samples = frozenset(self.samples)
        if not samples or not math.isfinite(self.size):
            return None
        is_linear = self._is_linear()
        pairs = zip(self.owners, self.gradients, strict=True)
        weights = torch.cat([gradient[(gradient != 0) & (owner >= 0)] for owner, gradient in pairs])
        counts = self.counts[self.samples]
        if is_linear and self._is_rounding(weights - weights[0]) and bool((counts == counts[0]).all()):
            count, weight = int(counts[0]), float(weights[0])
            self.weight = weight if count == 1 else 0.0
            parts = self._parts_at(weight) if count == 1 else None  # (a mean may be written out)
            alone = None if parts and self._takes_all() else self._parts_of_alone(splits == 1)
            if alone is not None or self._takes_all() or self._is_separable(splits):
                found = self._parts_at(weight) | self._parts_at(weight * count)  # (where the terms may be either)
                is_any = len(found) > 1 or self.batch_size < _CHOSEN
                return parts or alone or (found | {UNKNOWN} if is_any else found), samples
            return None  # (which of a sample's entries are chosen is up to the others)
        if not self._is_separable(splits):
            return None
        parts = self._parts_of_alone(splits == 1)
        if parts is None and not self._weighs_alike(is_linear):
            return (None, samples) if is_linear else None  # (numbers that are no sample's may differ beside them)
        return parts or frozenset(), samples

    def _weighs_alike(self, is_linear: bool) -> bool:
        """Whether each sample has the same gradient where all hold the same."""
        equal, orders = [], []
        for owner, each in zip(self.owners, self.values, strict=True):
            counts = owner[owner >= 0].bincount(minlength=self.batch_size)
            if not bool((counts == counts[0]).all()):
                return False
            order = owner.flatten().argsort(stable=True)[int((owner < 0).sum()) :].view(self.batch_size, -1)
            of_one = each.flatten()[order[self.samples[0]]].expand(order.shape)
            equal.append(each.flatten().index_put((order,), of_one).view(each.shape))
            orders.append(order)
        found = self.gradients if is_linear else _gradients(self.computed, equal)
        rows = torch.cat([each.flatten()[order] for each, order in zip(found, orders, strict=True)], 1)[self.samples]
        rows, size = rows.sort(1).values, rows.abs().max()
        return 0 < float(size) < math.inf and bool(((rows - rows[0]).abs() <= _SAME * size).all())

    def _takes_all(self) -> bool:
        """Whether a sample that has a part in it has one with all its entries."""
        differing = [
            owner.flatten() for owner, root in zip(self.owners, self.computed.roots, strict=True) if root.differs
        ]
        entries = torch.cat(differing).bincount(minlength=self.batch_size)
        return torch.equal(entries[self.samples], self.counts[self.samples])

    def _is_linear(self) -> bool:
        """Whether its gradient is a constant around these values: it holds the weights of the entries."""
        near = [each * (1 + _STEP * self._drawn(each)) + _STEP**2 * self._drawn(each) for each in self.values]
        changes = self._changes(near)
        return all(root.differs for root in self.computed.roots) and changes is not None and self._is_rounding(*changes)

    def _is_separable(self, splits: int | None) -> bool:
        """Whether the gradient of each sample stays as it is whatever the others hold; all `splits` show any pair."""
        # Of each two samples, either is once moved alone: autograd's gradients need not be those of one function, so
        # that the gradient of one may depend on the other alone.
        codes = _codes(self.batch_size)
        codes = codes[torch.randperm(len(codes), generator=self._random)[: self.batch_size]]
        for is_moved in codes.T[:splits]:
            moves = [is_moved.to(owner.device)[owner] & (owner >= 0) for owner in self.owners]
            drawn = [self._drawn(each) for each in self.values]
            larger = [each * (0.5 + 1.5 * r) + _STEP * (each == 0) for each, r in zip(self.values, drawn, strict=True)]
            away = [3 * each.abs().max() * (0.5 + r) for each, r in zip(self.values, drawn, strict=True)]
            # (and all ranks change)
            above, below = ([*map(move, self.values, away)] for move in (torch.add, torch.sub))
            for others, must_be_defined in ((larger, True), (above, False), (below, False)):
                changes = self._changes([*map(torch.where, moves, others, self.values)])
                if changes is None and must_be_defined:
                    return False
                if changes is not None and not self._is_rounding(*(c[~m] for c, m in zip(changes, moves, strict=True))):
                    return False
        return True

    def _parts_of_alone(self, few: bool) -> frozenset[int] | None:
        """The parts, from some samples alone; None where they cannot be taken alone, or have unequal parts."""
        roots = self.computed.roots
        axes = [root.axis for root in roots if root.axis is not None and root.axis.owner is None]
        if len(axes) < len(roots):
            return None
        order = torch.randperm(len(self.samples), generator=self._random).tolist()
        factors: list[float] = []
        for place in order[:2] if few else {0, len(order) - 1, *order[:_ALONE]}:
            values, of_batch = (
                [
                    one_entry(each, axis, self.batch_size, self.samples[place])
                    for axis, each in zip(axes, entries, strict=True)
                ]
                for entries in (self.values, self.gradients)
            )
            own = torch.cat([each.flatten() for each in of_batch])
            try:
                alone = torch.cat([each.flatten() for each in _gradients(self.computed, values, alone=True)])
            except Exception:  # whatever a function of the user's raises with fewer rows
                return None
            factors.append(float(own @ alone / (alone @ alone)))
            if not self._is_rounding(own - factors[-1] * alone):
                return None
        if any(not math.isclose(factor, factors[0], rel_tol=1e-8) for factor in factors):
            return None
        parts = self._parts_at(factors[0])
        return parts or (None if any(each.numel() > 1 for each in self.computed.constants) else parts)

    def _parts_at(self, weight: float) -> frozenset[int]:
        """The parts that a weight of each sample stands for."""
        sizes = (1, len(self.samples), self.batch_size)
        return frozenset(size for size in sizes if math.isclose(weight * size, 1, rel_tol=1e-8))

    def _changes(self, values: Sequence[Tensor]) -> list[Tensor] | None:
        """What becomes of the gradient at other values; None where it is not defined."""
        try:
            found = _gradients(self.computed, values)
        except Exception:  # whatever a function of the user's raises with other values
            return None
        if not all(bool(gradient.isfinite().all()) for gradient in found):
            return None
        return [new - old for new, old in zip(found, self.gradients, strict=True)]

    def _is_rounding(self, *changes: Tensor) -> bool:
        return all(bool((change.abs() <= _SAME * self.size).all()) for change in changes)

    def _drawn(self, like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=self._random, dtype=like.dtype).to(like.device)


def _gradients(computed: Computed, values: Sequence[Tensor], alone: bool = False) -> list[Tensor]:
    """The gradient of a number by the roots that have one, zeros for the others; nan where the number is not finite."""
    with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):  # (those of a checkpoint count tensors)
        inputs = [each.detach().requires_grad_() for each in values]
        number = computed.run(inputs, alone).sum()
        found: tuple[Tensor | None, ...] = torch.autograd.grad(number, inputs, allow_unused=True)
    undefined = number.detach() * 0  # of a logarithm of what is negative, torch gives a gradient all the same
    return [
        torch.zeros_like(each) if gradient is None or not root.differs else gradient + undefined
        for root, each, gradient in zip(computed.roots, values, found, strict=True)
    ]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
