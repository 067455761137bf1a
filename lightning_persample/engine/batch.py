"""Find the tensors of a batch, and the batch size they agree on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from lightning_persample.engine.batch_axis import BatchAxis, Lost
from lightning_persample.errors import BatchSizeError

__all__ = ["EmptyBatchError", "batch_tensors", "place_in_batch", "read_batch_size"]


class EmptyBatchError(BatchSizeError):
    """The batch has no samples."""


def batch_tensors(batch: Any, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a batch with where it stands; tuples, lists, mappings, dataclasses and objects are searched.

    Args:
        batch: whatever the data loader gives.
        path: how messages name the batch.

    Yields:
        (path, tensor), for example ``("batch[0]", images)``.
    """
    yield from _walk(batch, path, set())


def _walk(item: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(item, Tensor):
        yield path, item
        return
    if item is None or isinstance(item, (str, bytes, int, float, complex, type)) or id(item) in seen:
        return
    seen.add(id(item))
    if isinstance(item, Mapping):
        for key, value in item.items():
            yield from _walk(value, f"{path}[{key!r}]", seen)
    elif isinstance(item, (list, tuple)):
        for position, value in enumerate(item):
            yield from _walk(value, f"{path}[{position}]", seen)
    elif dataclasses.is_dataclass(item):
        for entry in dataclasses.fields(item):
            yield from _walk(getattr(item, entry.name, None), f"{path}.{entry.name}", seen)
    elif hasattr(item, "__dict__"):
        for name, value in vars(item).items():
            yield from _walk(value, f"{path}.{name}", seen)


def read_batch_size(tensors: list[tuple[str, Tensor]], batch_dim: int) -> int:
    """The size on which all tensors of the batch agree along `batch_dim`.

    Args:
        tensors: the batch's tensors with their paths; those without axes do not count.
        batch_dim: the axis that holds the samples.

    Returns:
        The number of samples B, at least 1.

    Raises:
        BatchSizeError: there is no tensor to read it from, or the sizes differ.
        EmptyBatchError: there is no sample.
    """
    if tensors and all(not tensor.is_nested and tensor.dim() > batch_dim for _, tensor in tensors):
        (size, *others) = {tensor.shape[batch_dim] for _, tensor in tensors}
        if size and not others:
            return size
    nested = next((path for path, tensor in tensors if tensor.is_nested), None)
    if nested is not None:
        raise BatchSizeError(f"{nested} is a nested tensor, which does not hold samples along an axis; pad it")
    counted = [(path, tensor) for path, tensor in tensors if tensor.dim() > 0]
    if not counted:
        raise BatchSizeError(
            "the batch holds no tensor with an axis to read a batch size from; pass batch_size, or let the data "
            "loader give tensors"
        )
    sizes = {path: tensor.size(batch_dim) if tensor.dim() > batch_dim else None for path, tensor in counted}
    if len(set(sizes.values())) > 1 or None in sizes.values():
        shapes = ", ".join(f"{path}: {tuple(tensor.shape)}" for path, tensor in counted)
        raise BatchSizeError(
            f"the tensors of the batch do not agree on a size along axis {batch_dim} (batch_dim={batch_dim}): "
            f"{shapes}; pass "
            "batch_dim if the samples lie along another axis, or batch_size to say how many samples there are"
        )
    (size,) = {size for size in sizes.values() if size is not None}
    if size == 0:
        raise EmptyBatchError("the batch is empty: its tensors have size 0 along the batch axis")
    return size


def place_in_batch(path: str, tensor: Tensor, batch_dim: int, batch_size: int) -> BatchAxis | Lost | None:
    """Where the samples lie in a tensor of the batch, by declaration.

    Args:
        path: where the tensor stands in the batch.
        tensor: the tensor.
        batch_dim: the axis that holds the samples.
        batch_size: number of samples B.

    Returns:
        The batch axis; k * B rows are read as k rows per sample, sample-major (time-major with a `batch_dim` other than
        0); None for a number; `Lost` where the size does not fit.
    """
    if tensor.is_nested:
        return Lost(f"{path} is a nested tensor, which does not hold samples along an axis")
    if tensor.dim() == 0:
        return None
    size = tensor.size(batch_dim) if tensor.dim() > batch_dim else 0
    rows, rest = divmod(size, batch_size)
    if rest or not rows:
        return Lost(
            f"{path} has sizes {tuple(tensor.shape)}, which do not hold {batch_size} samples along axis {batch_dim}"
        )
    return BatchAxis(batch_dim, inner=rows) if batch_dim == 0 else BatchAxis(batch_dim, outer=rows)
