"""The tensors of a batch: how many samples they hold, and where those lie in each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from types import MappingProxyType, MemberDescriptorType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_persample.batch_axis.axis import BatchAxis, Lost, picked, row_owners
from lightning_persample.errors import BatchSizeError, OptionError, of_user
from lightning_persample.options import shown
from lightning_persample.torch_internals import tree_leaves

Place = BatchAxis | Lost | None
Path = tuple[Any, ...]
Layout: TypeAlias = Callable[[Any], Mapping[Tensor, Any]]
"""The option `batch_layout`: for tensors of a batch, the axis of the samples, the sample of each row, or None."""


class EmptyBatchError(BatchSizeError):
    """The batch has no samples."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class BatchLayout:
    """The samples of a batch.

    Attributes:
        batch_size: number of samples B.
        tensors: every tensor with where it stands in the batch.
        places: where the samples lie in each of them; None for a number.
        loaders: number of samples of each loader, where a batch has those of several, one after another; else none.
    """

    batch_size: int
    tensors: list[tuple[str, Tensor]]
    places: list[Place]
    loaders: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class OfLoaders:
    """What several loaders gave for one batch, where each row is a sample of its own: first those of the first one.

    Attributes:
        parts: by the loader's name what it gave.
        rows: how many samples these are; 0 where it is exhausted.
    """

    parts: Mapping[str, Any]
    rows: Mapping[str, int]


def batch_tensors(batch: Any, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a batch with where it stands, such as ``("batch[0]", images)``."""
    # Tuples, lists, mappings, dataclasses and objects are searched.
    yield from _Walk(batch, path).tensors


def lay_out(
    batch: Any,
    batch_dim: int,
    batch_size: int | None = None,
    batch_layout: Layout | None = None,
    *,
    is_declared: bool = False,
) -> BatchLayout:
    """How many samples a batch holds and where; raises a `BatchSizeError` where that cannot be known."""
    # Of a number of samples that the user has declared, a list of as many items holds one each, whatever their shape.
    if isinstance(batch, OfLoaders):
        return _one_after_another(batch, batch_dim)
    return _lay_out(batch, "batch", batch_dim, batch_size, batch_layout, is_declared=is_declared)


def _lay_out(
    batch: Any,
    path: str,
    batch_dim: int,
    batch_size: int | None,
    batch_layout: Layout | None = None,
    *,
    is_declared: bool = False,
) -> BatchLayout:
    walk = _Walk(batch, path, {} if batch_layout is None else _declared(batch_layout, batch))
    size = _read_batch_size(walk, batch_dim) if batch_size is None else batch_size
    of_one = _items(walk, batch_dim, size, is_declared, is_read=batch_size is None) if walk.lists else {}
    along = BatchAxis(batch_dim)
    places: list[Place] = []
    for where, tensor in walk.tensors:
        known = walk.known.get(id(tensor))
        if known is not None:
            places.append(known.place(size))
        elif not of_one and tensor.dim() > batch_dim and tensor.size(batch_dim) == size:  # as nearly always
            places.append(along)
        else:
            places.append(of_one.get(id(tensor)) or _place(where, tensor, batch_dim, size))
    return BatchLayout(size, walk.tensors, places)


def _one_after_another(batch: OfLoaders, batch_dim: int) -> BatchLayout:
    """The layout of what several loaders gave: that of each part among its own samples, and these among all."""
    parts = [
        _lay_out(batch.parts[name], f"batch[{name!r}]", batch_dim, count) for name, count in batch.rows.items() if count
    ]
    sizes = tuple(part.batch_size for part in parts)
    if not sizes:
        raise EmptyBatchError("the batch is empty: no data loader gave a row")
    places: list[Place] = []
    for first, part in zip(accumulate(sizes, initial=0), parts, strict=False):
        places += [_among(place, first, part.batch_size, sum(sizes)) for place in part.places]
    return BatchLayout(sum(sizes), [each for part in parts for each in part.tensors], places, sizes)


def _among(place: Place, first: int, count: int, batch_size: int) -> Place:
    """Where the samples lie that are `count` of all, from number `first` on."""
    if isinstance(place, BatchAxis):
        return picked(place.dim, first + row_owners(place, count), batch_size, place.mixing)
    if isinstance(place, Lost):
        return dataclasses.replace(place, samples=frozenset(first + sample for sample in place.samples))
    return None


def read_batch_size(batch: Any, batch_dim: int, batch_layout: Layout | None = None) -> int:
    """The number of samples B on which all tensors of a batch agree; raises a `BatchSizeError` where they do not."""
    return lay_out(batch, batch_dim, None, batch_layout).batch_size


def count_samples(
    batch: Any, batch_dim: int, declared: int | None, drawn: int | None, batch_layout: Layout | None = None
) -> int:
    """The number of samples B: the rows that a data loader drew, where that is known, else as declared or read."""
    # A collate function that adds or drops rows makes samples of which nobody knows whose they are.
    if drawn is None:
        return read_batch_size(batch, batch_dim, batch_layout) if declared is None else declared
    found = _agreed_size(batch, batch_dim, batch_layout) if declared is None else declared
    if found is not None and (found % drawn or declared not in (None, drawn)):
        what, remedy = f"batch_size={declared}", "leave batch_size out"
        if declared is None:
            what = f"the tensors of the batch hold {found} samples along axis {batch_dim}"
            remedy = "pass batch_dim if the samples lie along another axis"
        raise BatchSizeError(
            f"{what}, but the data loader drew {drawn} rows for this batch, of which nothing is reported: {remedy}; "
            "where a collate function or a hook of the module adds or drops rows, pass sample_index=<function of the "
            "batch that returns the index of each sample>"
        )
    if declared is None and found != drawn:  # of a list of as many items as were drawn nobody has asked what it holds
        walk = _Walk(batch, "batch", {} if batch_layout is None else _declared(batch_layout, batch))
        _items(walk, batch_dim, drawn, is_declared=False, is_read=True)
    return drawn


def _agreed_size(batch: Any, batch_dim: int, batch_layout: Layout | None) -> int | None:
    try:
        return read_batch_size(batch, batch_dim, batch_layout)
    except EmptyBatchError:
        raise
    except BatchSizeError:
        return None


def declared_place(path: str, tensor: Tensor, batch_dim: int, batch_size: int, owner: Tensor | None = None) -> Place:
    """Where the samples lie in a tensor that was declared to hold them: k * B rows are k rows of each sample."""
    # k neighbouring rows; along an axis other than the first every B-th row.
    if tensor.is_nested:
        return _of_nested(path, tensor).place(batch_size)
    if tensor.dim() == 0:
        return None
    size = tensor.size(batch_dim) if tensor.dim() > batch_dim else 0
    if owner is not None:
        return _by_owner(path, tensor, batch_dim, batch_size, owner)
    rows, rest = divmod(size, batch_size)
    if rest or not rows:
        shape = tuple(tensor.shape)
        return Lost(f"{path} has shape {shape}, which does not hold {batch_size} samples along axis {batch_dim}")
    return BatchAxis(batch_dim, inner=rows) if batch_dim == 0 else BatchAxis(batch_dim, outer=rows)


def _by_owner(path: str, tensor: Tensor, dim: int, batch_size: int, owner: Tensor) -> Place:
    """The place of rows along an axis of which `owner` (N,) gives the samples."""
    rows = tensor.size(dim) if tensor.dim() > dim else 0
    if owner.shape != (rows,) or owner.is_floating_point() or owner.is_complex() or owner.dtype is torch.bool:
        return Lost(
            f"{path} has shape {tuple(tensor.shape)}, and its owner has shape {tuple(owner.shape)} and dtype "
            f"{owner.dtype}; allowed are integers ({rows},), the sample of each row along axis {dim}"
        )
    if rows and (int(owner.min()) < 0 or int(owner.max()) >= batch_size):
        first, last = int(owner.min()), int(owner.max())
        return Lost(f"{path} has owners from {first} to {last}; allowed are 0 to {batch_size - 1}, one for each sample")
    return picked(dim, owner.detach().long().clone(), batch_size)  # (who gave it may change it)


def declared_places(
    batch: Any, batch_size: int, batch_layout: Layout | None
) -> dict[int, tuple[BatchAxis, Tensor | None] | None]:
    """By tensor of which `batch_layout` says it, where the samples lie, and by which owner; None for shared data."""
    found: dict[int, tuple[BatchAxis, Tensor | None] | None] = {}
    for key, (tensor, where) in ({} if batch_layout is None else _declared(batch_layout, batch)).items():
        dim, owner = _read_declaration("batch_layout", tensor, where)
        place = None if dim is None else declared_place("batch_layout", tensor, dim, batch_size, owner)
        if isinstance(place, Lost):
            raise BatchSizeError(place.reason)
        found[key] = None if place is None else (place, owner)
    return found


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Known:
    """A tensor of the batch of which it is known whose its rows are.

    Attributes:
        place: gives where B samples lie in it.
        count: number of samples that it holds; None where it does not tell.
        text: what to say of it where the batch's tensors do not agree.
    """

    place: Callable[[int], Place]
    count: int | None = None
    text: str = ""


def _declared(batch_layout: Layout, batch: Any) -> dict[int, tuple[Tensor, Any]]:
    """What `batch_layout` says of a batch, by the id of the tensor."""
    layout = of_user(batch_layout, batch)
    if not isinstance(layout, Mapping) or not all(isinstance(tensor, Tensor) for tensor in layout):
        raise OptionError(
            f"batch_layout returned {shown(layout)}; allowed is a mapping from tensors of the batch to the axis of "
            "their samples, to the sample of each of their rows, to (axis, sample of each row along it), or to None "
            "for data that all samples share"
        )
    return {id(tensor): (tensor, where) for tensor, where in layout.items()}


def _as_given(place: Place, batch_size: int) -> Place:
    return place


def _read_declaration(path: str, tensor: Tensor, where: Any) -> tuple[int | None, Tensor | None]:
    """Along which axis the samples lie, None where all share it, and the owner of each row along it, if declared."""
    if where is None or (isinstance(where, int) and not isinstance(where, bool) and 0 <= where < tensor.dim()):
        return where, None
    dim, owner = where if isinstance(where, tuple) and len(where) == 2 else (0, where)
    if isinstance(dim, int) and isinstance(owner, Tensor):
        return dim, owner
    raise OptionError(
        f"batch_layout says {shown(where)} of {path}, {shown(tensor)}; allowed is an axis of it, the sample of each "
        "row as a tensor (N,), a tuple (axis, sample of each row along it), or None for data that all samples share"
    )


def packed_owners(packed: PackedSequence) -> Tensor:
    """The sample of every row of a packed sequence, (N,): all first steps, then all second steps, and so on."""
    order = packed.sorted_indices
    if order is None:
        order = torch.arange(int(packed.batch_sizes[0]))
    return torch.cat([order[: int(size)] for size in packed.batch_sizes])


def places_of_rows(batch: Any, rows: Sequence[Any]) -> tuple[Path, ...]:
    """The paths of lists and tuples in a batch that hold something of one row of the data at each place."""
    same: list[Path] = []  # with the rows' own tensors
    alike: list[Path] = []  # with tensors of their shapes
    plain: list[Path] = []  # with their own numbers and texts, or their own tensors of one number
    parts: list[list[Any]] = []

    def search(item: Any, path: Path) -> None:
        if type(item) is dict:
            for name, value in item.items():
                search(value, (*path, name))
        if type(item) not in (list, tuple):
            return
        if len(item) == len(rows):
            if not parts:
                parts.extend(tree_leaves(row) for row in rows)
            pairs = [(tree_leaves(each), part) for each, part in zip(item, parts, strict=True)]
            have_tensors = all(_shapes_in(own) for own, _ in pairs)
            if all(own and {*map(_itself, own)} <= {*map(_itself, part)} for own, part in pairs):
                (same if have_tensors else plain).append(path)
                return
            if have_tensors and all(_shapes_in(own) <= _shapes_in(part) for own, part in pairs):
                alike.append(path)
        for place, value in enumerate(item):
            search(value, (*path, place))

    search(batch, ())
    return (*(same or alike), *plain)


def _itself(leaf: Any) -> Any:
    """What a leaf of a row is known by where it comes again."""
    return leaf if isinstance(leaf, (int, float, str)) else id(leaf)


def _shapes_in(leaves: Sequence[Any]) -> set[tuple[int, ...]]:
    return {tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}


def with_samples_at(batch: Any, places: Collection[Path], path: Path = ()) -> Any:
    """The batch with lists at these paths, which hold one item per sample; around and in them, or with none, tuples."""
    if type(batch) in (list, tuple):
        is_field = not places or any(each[: len(path)] == path[: len(each)] for each in places)
        kind = list if path in places else tuple if is_field else type(batch)
        return kind(with_samples_at(item, places, (*path, place)) for place, item in enumerate(batch))
    if type(batch) is dict:
        return {name: with_samples_at(item, places, (*path, name)) for name, item in batch.items()}
    return batch


def with_kinds_of(part: Any, batch: Any) -> Any:
    """Some samples of what `with_samples_at` made of a batch, in lists and tuples as the batch itself has them."""
    if type(batch) in (list, tuple) and type(part) in (list, tuple):
        return type(batch)(with_kinds_of(each, batch[min(place, len(batch) - 1)]) for place, each in enumerate(part))
    if type(batch) is dict and type(part) is dict:
        return {name: with_kinds_of(item, batch[name]) for name, item in part.items()}
    return part


def _counted(path: str, kind: str, count: int, place: Callable[[int], Place]) -> _Known:
    """What is known of a container of `count` samples: in a batch of as many, where `place` says."""

    def placed(batch_size: int) -> Place:
        if count == batch_size:
            return place(batch_size)
        return Lost(f"{path} is a {kind} of {count} samples in a batch of {batch_size}", unplaced=True)

    return _Known(placed, count, f"{kind} of {count}")


def _of_packed(path: str, packed: PackedSequence) -> _Known:
    count = int(packed.batch_sizes[0])
    return _counted(path, "packed sequence", count, lambda size: picked(0, packed_owners(packed), size))


def _of_nested(path: str, tensor: Tensor) -> _Known:
    return _counted(path, "nested tensor", tensor.size(0), partial(_as_given, BatchAxis(0)))


def is_batch_of_graphs(item: Any) -> bool:
    """Whether an item is a batch of torch_geometric, of which each row is known to be of one graph."""
    return _slices_of(item) is not None


def _slices_of(item: Any) -> Mapping[Any, Any] | None:
    """Where the rows of each graph begin in every tensor of a batch of graphs, as torch_geometric keeps it, or None."""
    slices = getattr(item, "_slice_dict", None) if isinstance(getattr(type(item), "stores", None), property) else None
    return slices if isinstance(slices, Mapping) else None


def _attributes(item: Any) -> Iterator[tuple[str, Any]]:
    """What an object keeps in its slots and its dictionary; its own code, as `__getattr__`, is not asked."""
    kept = [vars(kind) for kind in type(item).__mro__ if "__slots__" in vars(kind)]
    for name in [name for names in kept for name, value in names.items() if isinstance(value, MemberDescriptorType)]:
        with suppress(AttributeError):  # a slot in which nothing is
            yield name, object.__getattribute__(item, name)
    if type(item).__dictoffset__:
        yield from object.__getattribute__(item, "__dict__").items()


def _graph_tensors(item: Any, path: str, slices: Mapping[Any, Any]) -> Iterator[tuple[str, Any, _Known | None]]:
    """What a batch of graphs of torch_geometric holds, and of which sample each row of it is, where that is known."""
    for store in item.stores:
        kind = store._key
        own = slices if kind is None else slices.get(kind, {})
        where = path if kind is None else f"{path}[{kind!r}]"
        for key, value in store.items():
            starts = own.get(key) if isinstance(value, Tensor) else None
            owner: Tensor
            if key == "batch" and isinstance(value, Tensor):
                owner, dim, count = value, 0, int(item.num_graphs)
            elif isinstance(starts, Tensor):
                axis = item.__cat_dim__(key, value, store)
                dim, count = 0 if axis is None else axis % max(value.dim(), 1), starts.numel() - 1
                owner = torch.arange(count, device=value.device).repeat_interleave(starts.diff().to(value.device))
            elif key == "ptr" and isinstance(value, Tensor):
                begins = Lost(
                    f"{where}.ptr holds where each graph begins in the whole batch", unplaced=True, listed=True
                )
                yield f"{where}.ptr", value, _Known(partial(_as_given, begins))
                continue
            elif isinstance(value, Tensor) and value.dim() and value.size(0) in _uneven_rows(own):
                text = f"{where}.{key} was added to the batch later, and may have a row for each of its nodes or edges"
                yield f"{where}.{key}", value, _Known(partial(_as_given, Lost(text, unplaced=True)))
                continue
            else:
                yield f"{where}.{key}", value, None
                continue
            place = partial(declared_place, f"{where}.{key}", value, dim, owner=owner)
            yield f"{where}.{key}", value, _counted(f"{where}.{key}", "batch of graphs", count, place)


def _uneven_rows(slices: Mapping[Any, Any]) -> set[int]:
    """The numbers of rows of those tensors of which the graphs do not have one row each."""
    starts = [each for each in slices.values() if isinstance(each, Tensor) and each.numel()]
    return {int(each[-1]) for each in starts if bool((each.diff() != 1).any())}


class _Walk:
    """The tensors of a batch, its lists, and what is known of single tensors, each with where it stands."""

    def __init__(
        self, batch: Any, path: str, declared: Mapping[int, tuple[Tensor, Any]] = MappingProxyType({})
    ) -> None:
        self.tensors: list[tuple[str, Tensor]] = []
        self.lists: list[tuple[str, list[Any]]] = []
        self.known: dict[int, _Known] = {}
        self.owned = 0  # of so many samples the declared owners are
        self._declared = declared
        self._seen: set[int] = set()
        self._visit(batch, path)

    def _visit(self, item: Any, path: str) -> None:
        if isinstance(item, Tensor):
            self.tensors.append((path, item))
            if id(item) in self._declared:
                dim, owner = _read_declaration(path, item, self._declared[id(item)][1])
                place: Callable[[int], Place] = partial(_as_given, None)
                if dim is not None:
                    place = partial(declared_place, path, item, dim, owner=owner)
                count = None if dim is None or owner is not None else item.size(dim)
                self.known[id(item)] = _Known(place, count, "declared")
                if owner is not None and owner.numel():
                    self.owned = max(self.owned, int(owner.max()) + 1)
            elif item.is_nested:
                self.known[id(item)] = _of_nested(path, item)
            return
        if item is None or isinstance(item, (str, bytes, int, float, complex, type)) or id(item) in self._seen:
            return
        self._seen.add(id(item))
        if isinstance(item, PackedSequence):
            self._visit(item.data, f"{path}.data")
            self.known.setdefault(id(item.data), _of_packed(path, item))
        elif type(item) is not tuple and (slices := _slices_of(item)) is not None:
            for where, value, known in _graph_tensors(item, path, slices):
                self._visit(value, where)
                if known is not None:
                    self.known.setdefault(id(value), known)
        elif type(item) is not tuple and isinstance(item, Mapping):
            for key, value in item.items():
                self._visit(value, f"{path}[{key!r}]")
        elif isinstance(item, (list, tuple)):
            if type(item) is list:
                self.lists.append((path, item))
            for position, value in enumerate(item):
                if type(value) is Tensor and not (self._declared or value.is_nested):
                    self.tensors.append((f"{path}[{position}]", value))
                else:
                    self._visit(value, f"{path}[{position}]")
        else:
            for name, value in _attributes(item):
                self._visit(value, f"{path}.{name}")


def _rows(tensor: Tensor, batch_dim: int) -> int | None:
    """How many rows a tensor has along the batch axis; None without that axis."""
    if tensor.dim() > batch_dim:
        return tensor.size(batch_dim)
    return tensor.size(0) if tensor.dim() == 1 else None


def _read_batch_size(walk: _Walk, batch_dim: int) -> int:
    counted = []
    found: set[int | None] = set()
    for path, tensor in walk.tensors:
        if tensor.dim() > 0 and id(tensor) not in walk.known:
            counted.append((path, tensor))
            found.add(tensor.size(batch_dim) if tensor.dim() > batch_dim else _rows(tensor, batch_dim))
    known: dict[str, _Known] = {}
    if walk.known:
        known = {path: each for path, tensor in walk.tensors if (each := walk.known.get(id(tensor))) and each.count}
    if not counted and not known and walk.owned:
        return walk.owned
    if not counted and not known:
        raise BatchSizeError(
            "the batch holds no tensor with an axis to read a batch size from; pass batch_size, or a batch of tensors"
        )
    if known:
        found.update(each.count for each in known.values())
    for path, items in walk.lists:
        if len(items) > 1 and _is_alike(items) and _hold_all(walk, len(items)):
            if not known and len(items) not in found - {None}:
                found.add(len(items))  # each item may be a sample
            if len(found) > 1:
                raise BatchSizeError(
                    f"{path} is a list of {len(items)} {_kind_of(items[0])}, {_shapes(counted)}: either each of them "
                    f"is one sample, or each holds a row of every sample along axis {batch_dim}; pass "
                    f"batch_size={len(items)} in the first case, and a tuple or a mapping in place of the list in the "
                    "second"
                )
    if len(found) > 1 or None in found:
        raise BatchSizeError(
            f"the tensors of the batch do not agree on a number of samples along axis {batch_dim} "
            f"(batch_dim={batch_dim}): {_shapes(counted)}{_texts(known)}; pass batch_dim if the samples lie along "
            "another axis, or batch_size to say how many samples there are: tensors without that many rows then count "
            "as data that all samples share"
        )
    (size,) = found
    assert size is not None
    if size == 0:
        raise EmptyBatchError("the batch is empty: its tensors have size 0 along the batch axis")
    return size


def _items(walk: _Walk, batch_dim: int, batch_size: int, is_declared: bool, *, is_read: bool) -> dict[int, Lost]:
    """The tensors that belong to one sample each, since they stand in a list with one item per sample."""
    of_one: dict[int, Lost] = {}
    for path, items in walk.lists:
        if len(items) != batch_size or not _is_alike(items):
            continue
        inner = [list(batch_tensors(item, f"{path}[{place}]")) for place, item in enumerate(items)]
        tensors = [tensor for found in inner for _, tensor in found]
        if all(id(tensor) in walk.known for tensor in tensors):  # batch_layout says it
            continue
        if not (is_declared and batch_size > 1) and all(_rows(tensor, batch_dim) == batch_size for tensor in tensors):
            if batch_size > 1:
                of_samples = f"pass batch_size={batch_size}" if is_read else "stack them"
                raise BatchSizeError(
                    f"{path} holds {batch_size} {_kind_of(items[0])} for {batch_size} samples, and its tensors have "
                    f"{batch_size} rows along axis {batch_dim} each: whether an item is a sample or holds a row of "
                    f"every sample cannot be read from it; {of_samples} if each is one sample, and pass a mapping in "
                    "its place, or batch_layout, if each holds a row of every sample"
                )
            continue
        for place, found in enumerate(inner):
            for where, tensor in found:
                reason = (
                    f"{where} is of one sample, in a list with one item per sample; stack or concatenate the list first"
                )
                one = Lost(reason, samples=frozenset({place}))
                if of_one.setdefault(id(tensor), one).samples != one.samples:
                    raise BatchSizeError(
                        f"{path} holds {batch_size} items for {batch_size} samples, and so does a list that it is in: "
                        "which of them has one item per sample cannot be read from it; stack items that are one sample "
                        "each"
                    )
    return of_one


def _hold_all(walk: _Walk, size: int) -> bool:
    """Whether every tensor of a batch stands in a list of `size` items that may be one sample each."""
    lists = [items for _, items in walk.lists if len(items) == size and _is_alike(items)]
    found = {id(tensor) for items in lists for _, tensor in batch_tensors(items)}
    return all(id(tensor) in found for _, tensor in walk.tensors)


def _is_alike(items: Sequence[Any]) -> bool:
    """Whether the items of a list may be one sample each: tensors of one dtype and rank, or containers of a kind."""
    kinds = {_likeness(item) for item in items}
    return len(kinds) == 1 and None not in kinds


def _likeness(item: Any) -> Any:
    if isinstance(item, Tensor):
        return item.dtype, item.dim()
    if isinstance(item, Mapping):
        return frozenset(item)
    return None if isinstance(item, PackedSequence) else type(item)


def _place(path: str, tensor: Tensor, batch_dim: int, batch_size: int) -> Place:
    """Where the samples lie in a tensor of the batch: along an axis of B rows, or nowhere that is known."""
    if tensor.dim() == 0:
        return None
    size = _rows(tensor, batch_dim)
    if size == batch_size:
        return BatchAxis(min(batch_dim, tensor.dim() - 1))
    reason = f"{path} has shape {tuple(tensor.shape)}, which does not hold {batch_size} samples along axis {batch_dim}"
    other = next((axis for axis, length in enumerate(tensor.shape) if length == batch_size > 1), None)
    if size and size % batch_size == 0:
        reason = (
            f"{path} has shape {tuple(tensor.shape)}, {size} rows along axis {batch_dim} for {batch_size} samples, and "
            f"which of them are one sample's is not declared: where each sample has {size // batch_size} "
            f"{'neighbouring' if batch_dim == 0 else 'equally spaced'} rows, pass the tensor to mark_samples in the "
            "training step"
        )
        reason += "" if other is None else f"; if the samples lie along axis {other}, pass batch_dim={other}"
    elif other is not None:
        reason += f"; if they lie along axis {other}, pass batch_dim={other}; whose each row is, batch_layout says"
    else:
        reason += "; whose each row is, batch_layout says"
    return Lost(reason, unplaced=True)


def _kind_of(item: Any) -> str:
    return "tensors" if isinstance(item, Tensor) else f"{type(item).__name__}s"


def _shapes(tensors: Sequence[tuple[str, Tensor]]) -> str:
    most = 8
    shown = ", ".join(f"{path}: {tuple(tensor.shape)}" for path, tensor in tensors[:most])
    return f"{shown} and {len(tensors) - most} more" if len(tensors) > most else shown


def _texts(known: Mapping[str, _Known]) -> str:
    return "".join(f", {path.removesuffix('.data')}: {each.text or each.count}" for path, each in known.items())


@torch.overrides.wrap_torch_function(lambda tensor, batch_dim=0, *, owner=None: (tensor,))
def mark_samples(tensor: Tensor, batch_dim: int = 0, *, owner: Tensor | None = None) -> Tensor:
    """Declare that a tensor made in the training step holds the samples of the batch along an axis.

    Noise of a generator, one row for each sample, is no tensor of the batch: which of its axes counts samples is not
    guessed from its sizes. Without this, what such data contributes to a gradient is reported as unsupported.

    >>> import torch
    >>> noise = mark_samples(torch.randn(4, 2))
    >>> noise.shape
    torch.Size([4, 2])

    Where samples have unequal numbers of rows, such as tokens without padding or nodes of graphs, `owner` says whose
    each row is:

    >>> lengths = torch.tensor([3, 1])
    >>> tokens = mark_samples(torch.randn(4, 2), owner=torch.arange(2).repeat_interleave(lengths))

    Args:
        tensor: data with B rows along `batch_dim`, or k * B, k rows for each sample, or any number of rows with
            `owner`; what was computed with parameters is not changed by it.
        batch_dim: the axis that holds the samples.
        owner: the sample of each row along `batch_dim`, (N,) integers from 0 to B - 1 in any order.

    Returns:
        The tensor itself; outside a capture nothing else happens.
    """
    return tensor
