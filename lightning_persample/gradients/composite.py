"""Structures of a parameter that holds the batch itself, and sums of structures."""

from __future__ import annotations

import functools
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from lightning_persample.gradients import norms, precision
from lightning_persample.gradients.cost import by_chunks, fits, memory_budget
from lightning_persample.gradients.indexed import Indexed
from lightning_persample.gradients.moments import Moments, total_moments
from lightning_persample.gradients.patches import Patches
from lightning_persample.gradients.projection import Factors
from lightning_persample.gradients.sample_gradient import SampleGradient
from lightning_persample.gradients.structure import Dense, Outer


@lru_cache(64)
def in_order(size: int, device: torch.device) -> Tensor:
    """The place of each sample where they stand in order: one tensor, by which blocks are known to be alike."""
    return torch.arange(size, device=device)


@dataclass(frozen=True, eq=False)
class Block(SampleGradient):
    """The gradient of a parameter along whose axis `dim` the batch lies, zero outside the sample's own rows."""

    # The axis has size outer_size * total * inner_size, and sample number n of the total owns the entries
    # (o * total + n) * inner_size + i for all o and i. The squared norm is that of `grad`.

    grad: Tensor  # (B, *shape with shape[dim] replaced by outer_size * inner_size), o before i
    dim: int  # counted without the axis B
    outer_size: int  # number of times that the batch is repeated along the axis
    inner_size: int  # number of neighbouring entries that belong to one sample
    # (B,) int64, the number n of each sample; range(B) where it is left out, so that it is always a tensor
    position: Tensor = None  # type: ignore[assignment]
    total: int = 0  # number of samples in the parameter; 0 is B

    def __post_init__(self) -> None:
        shape = tuple(self.grad.shape)
        if not 0 <= self.dim < len(shape) - 1 or shape[self.dim + 1] != self.outer_size * self.inner_size:
            raise ValueError(
                f"Block: grad has shape (B, *shape) with {self.outer_size} * {self.inner_size} entries along axis "
                f"{self.dim} of shape, got grad {shape}."
            )
        if self.position is None:
            object.__setattr__(self, "position", in_order(shape[0], self.grad.device))
        elif self.position.shape != shape[:1]:
            raise ValueError(f"Block: position has shape ({shape[0]},), got {tuple(self.position.shape)}.")
        object.__setattr__(self, "total", self.total or shape[0])

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter."""
        size = list(self.grad.shape[1:])
        size[self.dim] = self.outer_size * self.total * self.inner_size
        return torch.Size(size)

    def _sq_norm(self) -> Tensor:
        return norms.dense_sq_norm(self.grad)

    def _dense(self) -> Tensor:
        result = torch.zeros(self.batch_size, *self.shape, dtype=self.dtype, device=self.device)
        self._own_axis_first(result)[self._own_rows()] = self._own_axis_first(self.grad.to(self.dtype), 1)[:, 0]
        return result

    def _inner(self, other: SampleGradient) -> Tensor | None:
        if isinstance(other, Sum):
            return None
        if isinstance(other, Block) and self._layout() == other._layout():
            return norms.dense_inner(self.grad, other.grad).where(self.position == other.position, 0)

        def inner(part: slice) -> Tensor:
            mine = self.samples(part.start, part.stop)
            own = self._own_axis_first(other._formed(part))[mine._own_rows()]
            return norms.dense_inner(self._own_axis_first(mine.grad, 1)[:, 0], own)

        return by_chunks(self.batch_size, 3 * other._dense_bytes(), self.device, inner)

    def _layout(self) -> tuple[int, int, int, int]:
        return self.dim, self.outer_size, self.total, self.inner_size

    def _own_rows(self) -> tuple[Tensor, Tensor]:
        """Where the own rows lie in what `_own_axis_first` returns."""
        return torch.arange(self.batch_size, device=self.device), self.position

    def _own_axis_first(self, tensor: Tensor, total: int | None = None) -> Tensor:
        """View (b, *shape) as (b, total, ..., outer_size, inner_size, ...)."""
        sizes = (self.outer_size, self.total if total is None else total, self.inner_size)
        return torch.unflatten(tensor, self.dim + 1, sizes).movedim(self.dim + 2, 1)


AnyComposed = TypeVar("AnyComposed", bound="_Composed")


@dataclass(frozen=True, eq=False)
class _Composed(SampleGradient):
    """What is the sum of other structures, `terms`, of all its samples or of some."""

    terms: Sequence[SampleGradient]

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter."""
        return self.terms[0].shape

    @property
    def batch_size(self) -> int:
        """Number of samples, B."""
        return self.terms[0].batch_size

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.terms[0].device

    def tensors(self) -> list[Tensor]:
        """The tensors of all terms."""
        return [tensor for term in self.terms for tensor in term.tensors()]

    @abstractmethod
    def _joined(self, found: Iterable[Tensor]) -> Tensor:
        """What each term gives as what the sum gives: (B, *rest)."""

    def _map(self: AnyComposed, function: Callable[[Tensor], Tensor]) -> AnyComposed:
        return replace(self, terms=[term._map(function) for term in self.terms])

    def _dense(self) -> Tensor:
        return self._joined(term._dense().to(self.dtype) for term in self.terms)

    def _terms_sq_norm(self) -> Tensor:
        return self._joined(term._terms_sq_norm() for term in self.terms)

    def _dot(self, vector: Tensor) -> Tensor:
        return self._joined(term._dot(vector) for term in self.terms)

    def _project(self, factors: Factors) -> Tensor:
        return self._joined(term._project(factors) for term in self.terms)

    def _moments(self) -> Moments:
        return total_moments(term._moments() for term in self.terms)

    def times_one(self) -> Tensor | None:
        """What the terms give, None where one gives none."""
        parts = [term.times_one() for term in self.terms]
        known = [part for part in parts if part is not None]
        return self._joined(known) if len(known) == len(parts) else None

    def scaled(self: AnyComposed, factors: Tensor | float) -> AnyComposed:
        """The terms, each scaled."""
        return replace(self, terms=[term.scaled(factors) for term in self.terms])


@dataclass(frozen=True, eq=False)
class Sum(_Composed):
    """The sum of structures of one parameter, g[b] = sum_n terms[n][b]; squared norms alone do not add."""

    # |g|^2 = sum_n |terms[n]|^2 + 2 sum_{n < m} <terms[n], terms[m]>, or the terms are added up one by one where the
    # gradient is no larger than what they hold.

    def __post_init__(self) -> None:
        if error := _disagreement(self.terms):
            raise ValueError(f"Sum: {error}")
        object.__setattr__(self, "terms", tuple(self.terms))

    def samples(self, start: int, stop: int) -> Sum:
        """The same sum for samples start to stop - 1 alone."""
        return Sum(tuple(term.samples(start, stop) for term in self.terms))

    def pick(self, samples: Tensor) -> Sum:
        """The same sum for the samples at these places alone, (m,) integers."""
        return Sum(tuple(term.pick(samples) for term in self.terms))

    def _joined(self, found: Iterable[Tensor]) -> Tensor:
        return functools.reduce(torch.add, found)

    def _sq_norm(self, later: precision.Later | None = None) -> Tensor:
        if self._fits_dense() and prod(self.shape) <= self._numbers():
            return self._sq_norm_by_adding()
        value, scale = self._sq_norm_by_pairs()

        def again(some: Tensor) -> Tensor:
            wide = self.pick(some)._widened()
            found = wide._sq_norm_by_adding() if wide._fits_dense() else wide._sq_norm_by_pairs()[0]
            return found.to(value.dtype).clamp_min(0)

        return precision.corrected(value, scale, again, later=later)

    _sq_norm_or_later = _sq_norm

    def _inner(self, other: SampleGradient) -> Tensor | None:
        return self._joined(term.inner(other) for term in self.terms)

    def _fits_dense(self) -> bool:
        """Is one sample's gradient within the memory budget?"""
        return 2 * self._dense_bytes() <= memory_budget(self.device)

    def _sq_norm_by_adding(self) -> Tensor:
        return self._by_chunks(2, lambda part: norms.dense_sq_norm(self._formed(part)))

    def _sq_norm_by_pairs(self) -> tuple[Tensor, Tensor]:
        """The squared norm, and the size of what was added up for it."""
        squares = [term._sq_norm() for term in self.terms]
        value = self._joined(squares)
        for one, two in itertools.combinations(self.terms, 2):
            value = value + 2 * one.inner(two)
        scales = [torch.maximum(sq, term._terms_sq_norm()) for sq, term in zip(squares, self.terms, strict=True)]
        return value, self._joined(scales)


@dataclass(frozen=True, eq=False)
class Deflated(SampleGradient):
    """Another structure in another shape, less what lies along two directions in each row of what it is made of."""

    # g[b, o] = source[b, o] - sum_k (source[b, o] . direction[k, o]) direction[k, o]: for a row of equal entries, of
    # norm 1, if it is centred, and a direction orthogonal to that. A weight gets it whose rows are normalised. With
    # dots c[b, k, o], |g|^2 = |source|^2 - sum (2 - |direction|^2) c^2, for which nothing has to be formed.

    source: Outer | Patches | Dense  # with rows o
    size: torch.Size  # the shape of the parameter, which holds as many entries
    removed: Tensor | None = None  # what is taken from the squared norm, (B,); None where nothing is taken away
    direction: Callable[[], Tensor] | None = None  # gives (O, n)
    centred: bool = False  # whether the mean of each row is taken away

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter."""
        return self.size

    @property
    def batch_size(self) -> int:
        """Number of samples, B."""
        return self.source.batch_size

    def tensors(self) -> list[Tensor]:
        """The tensors of what it is made of, and what is taken from its squared norm."""
        return [*self.source.tensors(), *(() if self.removed is None else (self.removed,))]

    def _map(self, function: Callable[[Tensor], Tensor]) -> Deflated:
        removed = None if self.removed is None else function(self.removed)
        return replace(self, source=self.source._map(function), removed=removed)

    def scaled(self, factors: Tensor | float) -> Deflated:
        """What it is made of scaled, and with it what is taken from that."""
        removed = self.removed
        if removed is not None:
            squares = factors.to(removed).square() if isinstance(factors, Tensor) else factors**2
            removed = removed * squares
        return replace(self, source=self.source.scaled(factors), removed=removed)

    def _dense(self) -> Tensor:
        rows = self.source._dense().reshape(self.batch_size, self.source.shape[0], -1)
        if self.centred:
            rows = rows - rows.mean(2, keepdim=True)
        if self.direction is not None:
            direction = self.direction().to(rows.dtype)
            rows = torch.addcmul(rows, (rows * direction).sum(2, keepdim=True), direction, value=-1)
        return rows.reshape(self.batch_size, *self.size)

    def _sq_norm(self, later: precision.Later | None = None) -> Tensor:
        scale = self.source._sq_norm()
        if self.removed is None:
            return scale

        def again(some: Tensor) -> Tensor:
            return norms.dense_sq_norm(self.pick(some)._widened()._dense()).to(scale.dtype)

        return precision.corrected(scale - self.removed, scale, again, self.source.tensors()[0], later)

    _sq_norm_or_later = _sq_norm

    def _terms_sq_norm(self) -> Tensor:
        return self.source._sq_norm()


def at_samples(groups: Sequence[Sequence[int]], values: Tensor, total: int) -> Tensor:
    """Values (m, *rest) of the samples of groups, one group after another, among those of all, the others zero."""
    places = torch.tensor([*itertools.chain(*groups)], dtype=torch.int64, device=values.device)
    return values.new_zeros(total, *values.shape[1:]).index_copy_(0, places, values)


@dataclass(frozen=True, eq=False)
class Ragged(_Composed):
    """Gradients of samples with unequal numbers of rows: one structure for each group of samples, zero for the rest."""

    groups: Sequence[Sequence[int]]  # the samples of each, in the order of the structure's; none stands in two
    total: int  # number of samples B

    def __post_init__(self) -> None:
        sizes = [(len(group), self.terms[0].shape) for group in self.groups]
        if [(term.batch_size, term.shape) for term in self.terms] != sizes:
            raise ValueError(f"Ragged: each term holds the samples of its group, got {self.terms} for {self.groups}.")
        object.__setattr__(self, "terms", tuple(self.terms))
        object.__setattr__(self, "groups", tuple(map(tuple, self.groups)))

    @property
    def batch_size(self) -> int:
        """Number of samples, B."""
        return self.total

    def samples(self, start: int, stop: int) -> Ragged:
        """The same for samples start to stop - 1 alone."""
        return self._of(range(self.total)[start:stop])

    def pick(self, samples: Tensor) -> Ragged:
        """The same for the samples at these places alone, (m,) integers."""
        return self._of(samples.tolist())

    def _of(self, samples: Sequence[int]) -> Ragged:
        places: dict[int, list[int]] = {}
        for place, sample in enumerate(samples):
            places.setdefault(sample, []).append(place)
        terms, groups = [], []
        for term, group in zip(self.terms, self.groups, strict=True):
            found = [(own, place) for own, sample in enumerate(group) for place in places.get(sample, ())]
            if found:
                own, there = zip(*found, strict=True)
                terms.append(
                    term
                    if own == (*range(len(group)),)
                    else term.pick(torch.tensor(own, dtype=torch.int64, device=term.device))
                )
                groups.append(there)
        if not terms:  # (a structure of no samples says of which shape and dtype)
            terms, groups = [self.terms[0].samples(0, 0)], [()]
        return Ragged(terms, groups, len(samples))

    def _joined(self, found: Iterable[Tensor]) -> Tensor:
        """What each group gives, (m, *rest), at the places of its samples: (B, *rest)."""
        return at_samples(self.groups, torch.cat([*found]), self.total)

    def _with_places(self) -> Iterator[tuple[SampleGradient, Tensor]]:
        """The structure of each group, and its samples."""
        for term, group in zip(self.terms, self.groups, strict=True):
            yield term, torch.tensor(group, dtype=torch.int64, device=term.device)

    def _sq_norm(self) -> Tensor:
        alone: list[Outer] = []
        parts: list[Tensor | None] = []
        for term in self.terms:
            if isinstance(term, Outer) and len(term.left) == 1 and term._is_formed():
                alone.append(term)
                parts.append(None)
            else:
                parts.append(term._sq_norm())
        formed = iter(_sq_norms_by_forming(alone).split(1) if alone else ())
        return self._joined(next(formed) if part is None else part for part in parts)

    def _inner(self, other: SampleGradient) -> Tensor:
        dtype = torch.promote_types(self.dtype, other.dtype).to_real()
        return self._joined(term._inner_of(other.pick(place)).to(dtype) for term, place in self._with_places())

    def _square_sum(self) -> Tensor:
        return torch.stack([term._square_sum() for term in self.terms]).sum(0)

    def scaled(self, factors: Tensor | float) -> Ragged:
        """The groups, each scaled."""
        if not isinstance(factors, Tensor):
            return super().scaled(factors)
        scaled = [term.scaled(factors[place.to(factors.device)]) for term, place in self._with_places()]
        return replace(self, terms=scaled)


def _sq_norms_by_forming(terms: Sequence[Outer]) -> Tensor:
    """The squared norms (n,) of n structures of one sample each, with a number of positions of its own."""
    first = terms[0]
    if not fits(first._dense_bytes(), first.device):
        return torch.cat([term._direct_sq_norm() for term in terms])
    lengths = first.left.new_empty(len(terms), first.shape[0], dtype=first.dtype.to_real())
    formed = first.left.new_empty(1, *first.shape, dtype=first.dtype)
    for term, own in zip(terms, lengths.split(1), strict=True):
        torch.bmm(term.left.to(first.dtype).mT, term.right.to(first.dtype), out=formed)
        norms.row_norms(formed, own)
    return norms.squared(lengths).sum(1)


def _disagreement(terms: Sequence[SampleGradient]) -> str:
    """Why these terms cannot be added, empty if they can."""
    if not terms:
        return "got no terms; without a term the shape of the gradient is unknown."
    if len({(term.batch_size, tuple(term.shape)) for term in terms}) == 1:
        return ""
    got = ", ".join(f"{type(term).__name__} {term.batch_size} x {tuple(term.shape)}" for term in terms)
    return f"terms belong to the same samples and the same parameter, got {got}."


def add_up(terms: Sequence[SampleGradient], *, into_first: bool = False) -> SampleGradient:
    """Add structures of the same samples and the same parameter: what is of one kind becomes one, the rest a `Sum`."""
    # Dense and Block add, Outer and Indexed concatenate along T, Patches of equal geometry and sizes along k. With
    # `into_first` the memory of the first term may be that of the sum.
    if error := _disagreement(terms):
        raise ValueError(f"add_up: {error}")
    if len(terms) == 1:
        return terms[0]
    flat: list[SampleGradient] = []
    for term in terms:
        flat.extend(term.terms if isinstance(term, Sum) else [term])
    ragged = [term for term in flat if isinstance(term, Ragged)]
    if len(ragged) > 1:
        flat = [term for term in flat if not isinstance(term, Ragged)] + _regrouped(ragged)
    merged: list[SampleGradient] = []
    by_kind: dict[object, list[SampleGradient]] = {}
    for term in flat:
        by_kind.setdefault(_kind(term), []).append(term)
    for same in by_kind.values():
        merged.append(same[0] if len(same) == 1 else _merge(same, into_first and same[0] is terms[0]))
    return merged[0] if len(merged) == 1 else Sum(merged)


def _regrouped(ragged: Sequence[Ragged]) -> list[SampleGradient]:
    """As few as possible in which no sample stands twice; of groups of the same samples the structures are added."""
    layers: list[dict[tuple[int, ...], list[SampleGradient]]] = []
    taken: list[set[int]] = []
    for term in ragged:
        for part, group in zip(term.terms, term.groups, strict=True):
            fits = next(
                (n for n, layer in enumerate(layers) if group in layer or taken[n].isdisjoint(group)), len(layers)
            )
            if fits == len(layers):
                layers.append({})
                taken.append(set())
            layers[fits].setdefault(tuple(group), []).append(part)
            taken[fits].update(group)
    return [Ragged([*map(add_up, layer.values())], [*layer], ragged[0].total) for layer in layers]


def _kind(term: SampleGradient) -> object:
    """Terms of equal kind can become one structure."""
    if isinstance(term, Patches):
        return Patches, term.geometry, term.grad_out.shape[2:], term.input.shape[2:]
    if isinstance(term, Block):
        return Block, term._layout(), id(term.position)
    return type(term) if isinstance(term, Dense | Outer | Indexed) else object()


def _merge(terms: Sequence[SampleGradient], into_first: bool) -> SampleGradient:
    """One structure for terms of one kind."""
    first = terms[0]
    if isinstance(first, Dense | Block):
        grads = [term.tensors()[0].to(term.dtype) for term in terms]
        total, *others = grads if into_first else (grads[0] + grads[1], *grads[2:])
        for grad in others:  # in place as a rule: a tensor of this size is often more to make than to fill
            fits = grad.dtype == total.dtype and not grad.requires_grad and not total.requires_grad
            total = total.add_(grad) if fits else total + grad
        return replace(first, grad=total)
    tensors = [torch.cat(same, 1) for same in zip(*(term.tensors() for term in terms), strict=True)]
    if isinstance(first, Outer):
        return Outer(*tensors)
    if isinstance(first, Indexed):
        return Indexed(tensors[0], tensors[1], first.num_rows)
    if isinstance(first, Patches):
        return Patches(tensors[0], tensors[1], first.geometry)
    raise TypeError(f"{type(first).__name__} has no merged form.")  # pragma: no cover
