"""Where the batch lies inside a tensor, and what changes of shape do to it.

A tensor that holds the batch has it along one axis ``dim`` of size ``outer * n * inner``: row
``(o * n + e) * inner + i`` of that axis belongs to entry ``e``. Plain activations have one entry per sample, n = B, and
``outer = inner = 1``; ``x.view(B * T, d)`` of a (B, T, d) tensor has ``inner = T``; of a time-major (T, B, d) tensor
``outer = T``. Where rows were picked (``x[mask]``, a shuffle, a packed sequence), an `Owner` says which sample each of
the n entries belongs to.

The axis is declared on the tensors of the batch and followed from there; it is never read off a size that happens to
match.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

Note: TypeAlias = tuple[str, str]


@dataclass(frozen=True, eq=False)
class Owner:
    """The sample that each of the n entries of an axis belongs to.

    Attributes:
        sample: (n,) int64, values from 0 to B - 1; a sample may own any number of entries.
        ranked: whether other samples say at which place an entry stands, as where rows were sorted.
        chosen: whether they say which samples have an entry, as where the largest were picked.
    """

    sample: Tensor
    ranked: bool = False
    chosen: bool = False

    @cached_property
    def order(self) -> Tensor:
        """The entries by sample, (n,)."""
        return torch.argsort(self.sample, stable=True)

    @cached_property
    def only(self) -> int | None:
        """The one sample that all entries belong to, or None."""
        first = int(self.sample[0]) if self.sample.numel() else None
        return first if first is not None and bool((self.sample == first).all()) else None

    def counts(self, batch_size: int) -> Tensor:
        """The number of entries of each sample, (B,); kept, as all calls of a capture are of one batch size."""
        if "_counts" not in self.__dict__:
            self.__dict__["_counts"] = torch.bincount(self.sample, minlength=batch_size)
        return self.__dict__["_counts"]

    def grouped(self, batch_size: int, samples: tuple[int, ...] | None) -> tuple[Tensor, Tensor]:
        """The entries of each sample, (B, most) or (m, most), filled up with its own, and which ones only fill up."""
        known: dict[Any, tuple[Tensor, Tensor]] = self.__dict__.setdefault("_grouped", {})
        if samples not in known:
            counts = self.counts(batch_size)
            starts = counts.cumsum(0) - counts
            if samples is not None:
                counts, starts = counts[list(samples)], starts[list(samples)]
            places = torch.arange(int(counts.max()) if len(self.order) else 0, device=counts.device)
            entries = starts[:, None] + torch.minimum(places[None], (counts - 1).clamp(min=0)[:, None])
            filling = (places[None] >= counts[:, None]).flatten().nonzero().flatten()
            known[samples] = self.order[entries.clamp(max=len(self.order) - 1)], filling
        return known[samples]

    def gathered(self, entries: Tensor, batch_size: int, samples: tuple[int, ...] | None, *, fill: bool) -> Tensor:
        """The entries (n, ...) of all or some (m,) samples, (m, most, ...), filled up with some of theirs or zeros."""
        index, filling = self.grouped(batch_size, samples)
        found = entries.index_select(0, index.flatten().to(entries.device))
        if not fill and len(filling):
            found.index_fill_(0, filling.to(entries.device), 0)
        return found.unflatten(0, index.shape)

    @cached_property
    def is_in_order(self) -> bool:
        """Whether the entries of a sample lie together, those of the first sample first."""
        return bool((self.sample[1:] >= self.sample[:-1]).all())

    def split(self, entries: Tensor, batch_size: int, groups: Sequence[Sequence[int]], *, fill: bool) -> list[Tensor]:
        """What `gathered` gives for each group; of one sample alone it is a view where the entries are in order."""
        alone: Sequence[Tensor] = ()
        if any(len(group) == 1 for group in groups):
            ordered = entries if self.is_in_order else entries.index_select(0, self.order.to(entries.device))
            alone = ordered.unsqueeze(0).split(self._lengths(batch_size), 1)
        return [
            alone[group[0]] if len(group) == 1 else self.gathered(entries, batch_size, tuple(group), fill=fill)
            for group in groups
        ]

    def _lengths(self, batch_size: int) -> list[int]:
        if "_counted" not in self.__dict__:
            self.__dict__["_counted"] = self.counts(batch_size).tolist()
        return self.__dict__["_counted"]

    def same(self, other: Owner | None) -> bool:
        """Whether both give every entry to the same sample."""
        if self is other:
            return True
        return other is not None and torch.equal(self.sample, other.sample.to(self.sample.device))


@dataclass(frozen=True, eq=False)
class BatchAxis:
    """The batch lies along axis `dim`: `outer * inner` rows to an entry, one to a sample unless it has an `owner`.

    Attributes:
        dim: axis that holds the batch, counted from the front.
        outer: rows of one entry that lie n * inner apart.
        inner: rows of one entry that lie next to each other.
        mixing: where a value computed over the whole batch entered this tensor, or None.
        owner: the sample of each entry; None where entry b is sample b.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    mixing: str | None = None
    owner: Owner | None = None

    @property
    def rows(self) -> int:
        """Rows of this axis that belong to one entry."""
        return self.outer * self.inner

    @property
    def ranked(self) -> bool:
        """Whether other samples say at which place a row stands."""
        return self.owner is not None and self.owner.ranked

    @property
    def chosen(self) -> bool:
        """Whether other samples say which samples have a row."""
        return self.owner is not None and self.owner.chosen

    def entries(self, batch_size: int) -> int:
        """The number n of entries."""
        return batch_size if self.owner is None else self.owner.sample.numel()

    def moved(self, dim: int) -> BatchAxis:
        """The same layout along another axis."""
        return self if dim == self.dim else BatchAxis(dim, self.outer, self.inner, self.mixing, self.owner)

    def mixed(self, mixing: str | None) -> BatchAxis:
        """The same layout with a note on where a value computed over the whole batch entered."""
        return self if mixing == self.mixing else BatchAxis(self.dim, self.outer, self.inner, mixing, self.owner)

    def laid_over(self, size: int, batch_size: int) -> BatchAxis:
        """The axis in a result that has `size` rows: those of one entry alone may have been repeated (broadcasting)."""
        if size == self.rows or (self.owner is None and batch_size != 1) or self.entries(batch_size) != 1:
            return self
        return replace(self, outer=1, inner=size)

    def same_layout(self, other: BatchAxis) -> bool:
        """Whether both give the rows of their axis to the samples alike."""
        if (self.outer, self.inner) != (other.outer, other.inner):
            return False
        return other.owner is None if self.owner is None else self.owner.same(other.owner)

    def is_same(self, other: BatchAxis) -> bool:
        """Whether all attributes are the same, with no look at the values of an owner."""
        return self is other or (
            self.dim == other.dim
            and self.outer == other.outer
            and self.inner == other.inner
            and self.owner is other.owner
            and self.mixing is other.mixing
        )

    def same_place(self, other: BatchAxis) -> bool:
        """Whether both are the same axis with the same layout."""
        return self.dim == other.dim and self.same_layout(other)


@dataclass(frozen=True, eq=False)
class Root:
    """A tensor that holds the samples, which others are computed from.

    Attributes:
        values: a copy of it, in float64.
        owners: the sample of each of its entries, -1 where it is none's.
        axis: where the batch lies in it; None where it does along no axis.
        tensor: itself without its gradient; that it lives keeps its memory from being another's.
        differs: whether it has a gradient.
    """

    values: Tensor
    owners: Tensor
    axis: BatchAxis | None
    tensor: Tensor
    differs: bool


@dataclass(frozen=True, eq=False)
class Computed:
    """How a tensor was computed from tensors that hold the samples.

    Attributes:
        roots: these tensors.
        run: gives the tensor for any values of them; if these are of one sample alone, with ones for all numbers beside
            them that may be one for each sample, or their number.
        constants: the other tensors that went in, which may have a row for each sample.
        ops: the calls in it.
        of_sum: what is known of the one root where that is a number, a sum over the samples; else None.
    """

    roots: tuple[Root, ...]
    run: Callable[[Sequence[Tensor], bool], Tensor]
    constants: tuple[Tensor, ...]
    ops: tuple[object, ...]
    of_sum: Lost | None = None


@dataclass(frozen=True, eq=False)
class SampleWeights:
    """What the samples weigh in a loss, see `sample_weights`.

    Attributes:
        candidates: of which one is right, (B,) float64 each, NaN for samples without a part; first the share of each.
        is_known: whether it is certainly one of them.
        is_obscured: whether the terms have factors that cannot be read.
        of_mean: whether the loss is a mean.
    """

    candidates: tuple[Tensor, ...]
    is_known: bool
    is_obscured: bool = False
    of_mean: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class EntryOwners:
    """Whose the entries are of a tensor that holds the samples along no axis.

    Attributes:
        samples: those that it is made of, each alone or added up; empty where they are all or not known.
        entries: the sample of each entry, of the shape of the tensor, -1 where it is none's; None where not known.
        unplaced: it is data of the batch itself, or its entries moved, of which it is not known whose they are.
        listed: it lists places or numbers that occur in the batch, or is one of them.
        orders: it holds places of samples, in an order that other samples say, or is one of them.
        by_rank: where other samples say at which place an entry stands, by what each sample was multiplied, (B,), 0
            where it has no part; else None.
        chosen: the values of the samples say which of them it has, as in a maximum.
    """

    samples: frozenset[int] = frozenset()
    entries: Tensor | None = None
    unplaced: bool = False
    listed: bool = False
    orders: bool = False
    by_rank: Tensor | None = None
    chosen: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class SampleSum:
    """Which sum over the samples a tensor is.

    Attributes:
        reduced: it is a weighted sum over the samples of what each gives alone, as a loss is; None where its axis was
            lost and its entries were added up since: each may be of one sample or of several.
        parts: n where it may be the n-th part of a plain sum over the samples, up to a number that is the user's: 1
            for a sum, the number of samples for a mean; several where that is not known, with 0 among them where the
            number may be any; none where it is neither.
        counts: products of the shape of one sample in that sum, which a user may divide by to average its entries.
        uneven: the number of rows in that sum, where the samples gave unequal numbers of them; else 0.
        totals: of a sum of data, what each sample adds to it, (B,); None where that is not known.
        shares: gives what each sample adds to it, (B, *shape), or None where that is not known.
        weights: what the samples weigh in it; None where that is not known, or was not asked for.
        terms: of a sum of sums over different samples, or where each entry is another sum, the `samples` and `parts` of
            each of them, and how many times it was added; none where it is not known to be one.
    """

    reduced: bool | None = False
    parts: frozenset[int] = frozenset()
    counts: frozenset[int] = frozenset()
    uneven: int = 0
    totals: Tensor | None = None
    shares: Callable[[], Tensor | None] | None = None
    weights: SampleWeights | None = None
    terms: tuple[tuple[frozenset[int], frozenset[int], int], ...] = ()


@dataclass(frozen=True, eq=False)
class Lost(EntryOwners, SampleSum):
    """The tensor depends on the batch, but no axis of it holds the samples one by one.

    What is known of it all the same: whose its entries are, which sum over the samples it is, and how it was computed.

    Attributes:
        reason: since where.
        notes: kind and text of what was said of the calls that made it.
        crossed: samples influence each other in it.
        computed: how it was computed from tensors that hold the samples, see `separable`; None where that is not known.
    """

    reason: str
    notes: frozenset[Note] = frozenset()
    crossed: bool = False
    computed: Computed | None = None

    @property
    def of_others(self) -> bool:
        """Whether it is known to be made of several samples, or of one for all; its axis alone may have been lost."""
        return self.reduced is True or self.crossed or bool(self.samples)

    @property
    def noted(self) -> bool:
        """Whether it has been said already that it is no sum over the samples of what each gives alone."""
        return any(kind == "mixing" for kind, _ in self.notes)

    @property
    def is_plain_sum(self) -> bool:
        """Whether it is a sum over the samples, or a part of one, and nothing further is known of it."""
        said = self.notes or self.samples or self.terms or self.listed or self.unplaced
        return (
            self.reduced is True and bool(self.parts) and not said and self.computed is None
            and self.entries is None and self.totals is None and self.shares is None and self.weights is None
            and self.by_rank is None
        )  # fmt: skip

    @property
    def ranked(self) -> bool:
        """Whether other samples say at which place an entry stands."""
        return self.by_rank is not None

    @property
    def alone(self) -> int | None:
        """The one sample that the tensor belongs to, or None."""
        return next(iter(self.samples)) if len(self.samples) == 1 else None


def batch_first(
    tensor: Tensor, axis: BatchAxis, batch_size: int, *, fill: bool = True, samples: tuple[int, ...] | None = None
) -> Tensor:
    """Bring samples to the front, all or some (m,): (B, *shape with the batch axis reduced to the rows of one)."""
    if samples is not None and axis.owner is None:
        return batch_first(tensor, axis, batch_size)[list(samples)]
    if axis.dim == 0 and axis.outer == 1 and axis.owner is None:  # by far the most: rows of a sample lie together
        if axis.inner == 1 and tensor.shape[0] == batch_size and tensor.layout is torch.strided:
            return tensor.unsqueeze(1)
        return tensor.reshape(batch_size, axis.inner, *tensor.shape[1:])
    before, after = tensor.shape[: axis.dim], tensor.shape[axis.dim + 1 :]
    entries = axis.entries(batch_size)
    split = tensor.reshape(*before, axis.outer, entries, axis.inner, *after)
    first = split.movedim(axis.dim + 1, 0).reshape(entries, *before, axis.rows, *after)
    if axis.owner is None:
        return first
    rows = axis.owner.gathered(first, batch_size, samples, fill=fill)
    return rows.movedim(1, 1 + axis.dim).reshape(len(rows), *before, rows.shape[1] * axis.rows, *after)


_PADDED = 1.25  # rows that samples taken together may be filled up to, over those that they have
_GROUP = 2**20  # multiply-adds that take as long as what a further group of samples costs beside its rows


def groups_of(
    axes: Iterable[BatchAxis], batch_size: int, row_cost: int, *, alone: bool = False
) -> list[list[int]] | None:
    """Samples with about as many rows each, without those that have none; None where all are taken together."""
    # row_cost: multiply-adds of one row; rows that only fill up may cost as much as a further group
    # alone: a sample whose own rows cost as much is a group
    owners = {id(axis.owner): axis.owner for axis in axes if axis.owner is not None}
    if not owners:
        return None
    counts = torch.stack([owner.counts(batch_size).cpu() for owner in owners.values()]).max(0).values.tolist()
    groups: list[list[int]] = []
    rows = 0
    for sample in sorted((sample for sample, count in enumerate(counts) if count), key=counts.__getitem__):
        taken = rows + counts[sample]
        filled = counts[sample] * (len(groups[-1]) + 1) if groups else 0
        is_full = filled > _PADDED * taken and (filled - taken) * row_cost > _GROUP
        if not groups or is_full or (alone and counts[sample] * row_cost >= _GROUP):
            groups.append([])
            taken = counts[sample]
        groups[-1].append(sample)
        rows = taken
    whole = len(groups) == 1 and len(groups[0]) == batch_size
    return None if whole or not groups else [sorted(group) for group in groups]


def one_entry(tensor: Tensor, axis: BatchAxis, batch_size: int, entry: int) -> Tensor:
    """The rows of one entry, with the number of axes kept."""
    before, after = tensor.shape[: axis.dim], tensor.shape[axis.dim + 1 :]
    split = tensor.reshape(*before, axis.outer, axis.entries(batch_size), axis.inner, *after)
    return split.select(axis.dim + 1, entry).reshape(*before, axis.rows, *after)


def row_owners(axis: BatchAxis, batch_size: int, device: torch.device | None = None) -> Tensor:
    """The sample of every row of the axis: (outer * n * inner,)."""
    sample = torch.arange(batch_size, device=device) if axis.owner is None else axis.owner.sample
    return sample.repeat_interleave(axis.inner).repeat(axis.outer)


def picked(dim: int, owners: Tensor, batch_size: int, mixing: str | None = None) -> BatchAxis:
    """The axis whose rows belong to the given samples, in its simplest form."""
    repeats, rest = divmod(owners.numel(), batch_size)
    if repeats and not rest:
        samples = torch.arange(batch_size, device=owners.device)
        if torch.equal(owners, samples.repeat_interleave(repeats)):
            return BatchAxis(dim, inner=repeats, mixing=mixing)
        if torch.equal(owners, samples.repeat(repeats)):
            return BatchAxis(dim, outer=repeats, mixing=mixing)
    return BatchAxis(dim, mixing=mixing, owner=Owner(owners))


def laid_along(rows: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """A number for each row along an axis as one for each entry of a tensor of this shape."""
    return rows.reshape(-1, *(1,) * (len(shape) - dim - 1)).expand(tuple(shape))


def entry_owners(axis: BatchAxis, shape: Sequence[int], batch_size: int, device: torch.device) -> Tensor:
    """The sample of every entry of a tensor of this shape."""
    return laid_along(row_owners(axis, batch_size, device), axis.dim, shape)


def entries_of(place: BatchAxis | Lost, tensor: Tensor, batch_size: int) -> Tensor | None:
    """The sample of each entry of a tensor, -1 where it is none's; None where that is not known."""
    shape, device = tensor.shape, tensor.device
    if isinstance(place, BatchAxis):
        return entry_owners(place, shape, batch_size, device) if place.dim < tensor.dim() else None
    if place.noted or place.crossed or place.unplaced:
        return None
    if place.entries is not None:
        return place.entries if place.entries.shape == shape else None
    return None if place.alone is None else torch.full((), place.alone, device=device).expand(shape)


def together(owners: Iterable[Tensor], shape: torch.Size) -> Tensor | None:
    """The sample of each entry where tensors are laid over each other, or None where one is of several."""
    found: Tensor | None = None
    for each in owners:
        if torch.broadcast_shapes(each.shape, shape) != shape:
            return None
        laid = each.expand(shape)
        if found is not None and bool(((found != laid) & (found >= 0) & (laid >= 0)).any()):
            return None
        found = laid if found is None else torch.maximum(found, laid)
    return found


def by_entries(owners: Tensor, batch_size: int, mixing: str | None) -> BatchAxis | None:
    """The axis each row of which is of one sample, or None; `owners`: the sample of every entry, -1 where none is."""
    if batch_size > 1 and len(owners.unique()) == 2 and bool((owners < 0).any()):
        return None  # (entries of one sample alone say nothing of whose the others are)
    for dim in range(owners.dim() if owners.numel() else 0):
        rows = owners.movedim(dim, 0).reshape(owners.size(dim), -1)
        most = rows.amax(1)
        if bool(((most >= 0) & (torch.where(rows < 0, most[:, None], rows).amin(1) == most)).all()):
            return picked(dim, most, batch_size, mixing)
    return None


def reshaped(axis: BatchAxis, before: Sequence[int], after: Sequence[int], batch_size: int) -> BatchAxis | None:
    """Follow the batch axis through a change of shape that keeps the order of the entries (reshape, view, flatten)."""
    entries = axis.entries(batch_size)
    ahead = math.prod(before[: axis.dim]) * axis.outer
    behind = math.prod(before[axis.dim + 1 :]) * axis.inner
    if ahead * behind * entries != math.prod(after):
        return None
    found: list[BatchAxis] = []
    for dim, size in enumerate(after):
        leading, trailing = math.prod(after[:dim]), math.prod(after[dim + 1 :])
        if leading == 0 or trailing == 0 or ahead % leading or behind % trailing:
            continue
        outer, inner = ahead // leading, behind // trailing
        if size == outer * entries * inner:
            found.append(replace(axis, dim=dim, outer=outer, inner=inner))
    return min(found, key=lambda place: place.rows, default=None)  # several fit one entry alone; all are right
