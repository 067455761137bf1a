"""The tensors of a batch: how many samples they hold, and where those lie in each."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_persample.batch_axis.axis import BatchAxis, Lost, picked
from lightning_persample.errors import BatchSizeError
from lightning_persample.torch_internals import tree_leaves

Place = BatchAxis | Lost | None
Path = tuple[Any, ...]


class EmptyBatchError(BatchSizeError):
    """The batch has no samples."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class BatchLayout:
    """The samples of a batch.

    Attributes:
        batch_size: number of samples B.
        tensors: every tensor with where it stands in the batch.
        places: where the samples lie in each of them; None for a number.
    """

    batch_size: int
    tensors: list[tuple[str, Tensor]]
    places: list[Place]


def batch_tensors(batch: Any, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a batch with where it stands, such as ``("batch[0]", images)``."""
    # Tuples, lists, mappings, dataclasses and objects are searched.
    yield from _Walk(batch, path).tensors


def lay_out(batch: Any, batch_dim: int, batch_size: int | None = None) -> BatchLayout:
    """How many samples a batch holds and where; raises a `BatchSizeError` where that cannot be known."""
    walk = _Walk(batch, "batch")
    size = _read_batch_size(walk, batch_dim) if batch_size is None else batch_size
    of_one = _items(walk, batch_dim, size)
    places = [of_one.get(id(tensor)) or _place(path, tensor, batch_dim, size) for path, tensor in walk.tensors]
    for path, packed in walk.packed:
        count = int(packed.batch_sizes[0])
        if count == size:
            place: Place = picked(0, packed_owners(packed), size)
        else:
            place = Lost(f"{path} is a packed sequence of {count} samples in a batch of {size}", unplaced=True)
        walk.tensors.append((f"{path}.data", packed.data))
        places.append(place)
    return BatchLayout(size, walk.tensors, places)


def read_batch_size(batch: Any, batch_dim: int) -> int:
    """The number of samples B on which all tensors of a batch agree; raises a `BatchSizeError` where they do not."""
    return lay_out(batch, batch_dim).batch_size


def count_samples(batch: Any, batch_dim: int, declared: int | None, drawn: int | None) -> int:
    """The number of samples B: the rows that a data loader drew, where that is known, else as declared or read."""
    # A collate function that adds or drops rows makes samples of which nobody knows whose they are.
    if drawn is None:
        return read_batch_size(batch, batch_dim) if declared is None else declared
    found = _agreed_size(batch, batch_dim) if declared is None else declared
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
    return drawn


def _agreed_size(batch: Any, batch_dim: int) -> int | None:
    try:
        return read_batch_size(batch, batch_dim)
    except EmptyBatchError:
        raise
    except BatchSizeError:
        return None


def declared_place(path: str, tensor: Tensor, batch_dim: int, batch_size: int) -> Place:
    """Where the samples lie in a tensor that was declared to hold them: k * B rows are k rows of each sample."""
    # k neighbouring rows; along an axis other than the first every B-th row.
    if tensor.is_nested:
        return _nested(path)
    if tensor.dim() == 0:
        return None
    size = tensor.size(batch_dim) if tensor.dim() > batch_dim else 0
    rows, rest = divmod(size, batch_size)
    if rest or not rows:
        shape = tuple(tensor.shape)
        return Lost(f"{path} has shape {shape}, which does not hold {batch_size} samples along axis {batch_dim}")
    return BatchAxis(batch_dim, inner=rows) if batch_dim == 0 else BatchAxis(batch_dim, outer=rows)


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
            tensors = [[leaf for leaf in tree_leaves(each) if isinstance(leaf, Tensor) and leaf.dim()] for each in item]
            pairs = list(zip(tensors, parts, strict=True)) if all(tensors) else []
            if pairs and all({*map(id, own)} <= {*map(id, part)} for own, part in pairs):
                same.append(path)
                return
            if pairs and all({*map(_shape, own)} <= {*map(_shape, part)} for own, part in pairs):
                alike.append(path)
        for place, value in enumerate(item):
            search(value, (*path, place))

    search(batch, ())
    return tuple(same or alike)


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))


def with_samples_at(batch: Any, places: Collection[Path], path: Path = ()) -> Any:
    """The batch with lists at these paths, which hold one item per sample; around and in them, or with none, tuples."""
    if type(batch) in (list, tuple):
        is_field = not places or any(each[: len(path)] == path[: len(each)] for each in places)
        kind = list if path in places else tuple if is_field else type(batch)
        return kind(with_samples_at(item, places, (*path, place)) for place, item in enumerate(batch))
    if type(batch) is dict:
        return {name: with_samples_at(item, places, (*path, name)) for name, item in batch.items()}
    return batch


class _Walk:
    """The tensors of a batch, its lists and its packed sequences, each with where it stands."""

    def __init__(self, batch: Any, path: str) -> None:
        self.tensors: list[tuple[str, Tensor]] = []
        self.lists: list[tuple[str, list[Any]]] = []
        self.packed: list[tuple[str, PackedSequence]] = []
        self._seen: set[int] = set()
        self._visit(batch, path)

    def _visit(self, item: Any, path: str) -> None:
        if isinstance(item, Tensor):
            self.tensors.append((path, item))
            return
        if item is None or isinstance(item, (str, bytes, int, float, complex, type)) or id(item) in self._seen:
            return
        self._seen.add(id(item))
        if isinstance(item, Mapping):
            for key, value in item.items():
                self._visit(value, f"{path}[{key!r}]")
        elif isinstance(item, PackedSequence):
            self.packed.append((path, item))
        elif isinstance(item, (list, tuple)):
            if type(item) is list:
                self.lists.append((path, item))
            for position, value in enumerate(item):
                self._visit(value, f"{path}[{position}]")
        elif dataclasses.is_dataclass(item):
            for entry in dataclasses.fields(item):
                self._visit(getattr(item, entry.name, None), f"{path}.{entry.name}")
        elif hasattr(item, "__dict__"):
            for name, value in vars(item).items():
                self._visit(value, f"{path}.{name}")


def _rows(tensor: Tensor, batch_dim: int) -> int | None:
    """How many rows a tensor has along the batch axis; None without that axis."""
    if tensor.is_nested:
        return None
    if tensor.dim() > batch_dim:
        return tensor.size(batch_dim)
    return tensor.size(0) if tensor.dim() == 1 else None


def _read_batch_size(walk: _Walk, batch_dim: int) -> int:
    nested = next((path for path, tensor in walk.tensors if tensor.is_nested), None)
    if nested is not None:
        raise BatchSizeError(_nested(nested).reason + "; pad it")
    counted = [(path, tensor) for path, tensor in walk.tensors if tensor.dim() > 0]
    if not counted and not walk.packed:
        raise BatchSizeError(
            "the batch holds no tensor with an axis to read a batch size from; pass batch_size, or let the data "
            "loader give tensors"
        )
    sizes = {path: _rows(tensor, batch_dim) for path, tensor in counted}
    sizes |= {path: int(packed.batch_sizes[0]) for path, packed in walk.packed}
    found = set(sizes.values())
    for path, items in walk.lists:
        if len(items) > 1 and is_alike(items) and _hold_all(walk, len(items)):
            if not walk.packed and len(items) not in found - {None}:
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
            f"(batch_dim={batch_dim}): {_shapes(counted)}{_packed(walk)}; pass batch_dim if the samples lie along "
            "another axis, or batch_size to say how many samples there are: tensors without that many rows then count "
            "as data that all samples share"
        )
    (size,) = {size for size in found if size is not None}
    if size == 0:
        raise EmptyBatchError("the batch is empty: its tensors have size 0 along the batch axis")
    return size


def _items(walk: _Walk, batch_dim: int, batch_size: int) -> dict[int, Lost]:
    """The tensors that belong to one sample each, since they stand in a list with one item per sample."""
    of_one: dict[int, Lost] = {}
    for path, items in walk.lists:
        if len(items) != batch_size or not is_alike(items):
            continue
        inner = [list(batch_tensors(item, f"{path}[{place}]")) for place, item in enumerate(items)]
        tensors = [tensor for found in inner for _, tensor in found]
        if all(_rows(tensor, batch_dim) == batch_size for tensor in tensors):
            if batch_size > 1 and tensors:
                raise BatchSizeError(
                    f"{path} holds {batch_size} {_kind_of(items[0])} for {batch_size} samples, and its tensors have "
                    f"{batch_size} rows along axis {batch_dim} each: whether an item is a sample or holds a row of "
                    "every sample cannot be read from it; use a mapping for items that hold a row of every sample, "
                    "and stack items that are one sample each"
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
    lists = [items for _, items in walk.lists if len(items) == size and is_alike(items)]
    found = {id(tensor) for items in lists for _, tensor in batch_tensors(items)}
    return all(id(tensor) in found for _, tensor in walk.tensors)


def is_alike(items: Sequence[Any]) -> bool:
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
    if tensor.is_nested:
        return _nested(path)
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
    elif other is not None:
        reason += f"; if they lie along axis {other}, pass batch_dim={other}"
    return Lost(reason, unplaced=True)


def _nested(path: str) -> Lost:
    return Lost(f"{path} is a nested tensor, which does not hold samples along an axis")


def _kind_of(item: Any) -> str:
    return "tensors" if isinstance(item, Tensor) else f"{type(item).__name__}s"


def _shapes(tensors: Sequence[tuple[str, Tensor]]) -> str:
    most = 8
    shown = ", ".join(f"{path}: {tuple(tensor.shape)}" for path, tensor in tensors[:most])
    return f"{shown} and {len(tensors) - most} more" if len(tensors) > most else shown


def _packed(walk: _Walk) -> str:
    return "".join(f", {path}: packed sequence of {int(packed.batch_sizes[0])}" for path, packed in walk.packed)


@torch.overrides.wrap_torch_function(lambda tensor, batch_dim=0: (tensor,))
def mark_samples(tensor: Tensor, batch_dim: int = 0) -> Tensor:
    """Declare that a tensor made in the training step holds the samples of the batch along an axis.

    Noise of a generator, one row for each sample, is no tensor of the batch: which of its axes counts samples is not
    guessed from its sizes. Without this, what such data contributes to a gradient is reported as unsupported.

    >>> import torch
    >>> noise = mark_samples(torch.randn(4, 2))
    >>> noise.shape
    torch.Size([4, 2])

    Args:
        tensor: data with B rows along `batch_dim`, or k * B, k rows for each sample; what was computed with parameters
            is not changed by it.
        batch_dim: the axis that holds the samples.

    Returns:
        The tensor itself; outside a capture nothing else happens.
    """
    return tensor
