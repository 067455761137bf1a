"""Where the samples lie inside torch.vmap and torch.func: the tensors there wrap others, and those come out of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_persample.batch_axis.axis import BatchAxis
from lightning_persample.torch_internals import is_wrapped_by_transform, unwrapped, vmap_axis, vmap_level


@dataclass(frozen=True)
class Inside:
    """Where a call inside a transform meets the samples.

    Attributes:
        axis: along which axis of the tensor as the call sees it; of the innermost tensor where a vmap goes over them.
        level: of the vmap that goes over the samples, so that no call inside can mix them; None where none does.
    """

    axis: BatchAxis
    level: int | None


def innermost(tensor: Tensor) -> Tensor:
    """The ordinary tensor inside a wrapped one; any other tensor as it is."""
    while is_wrapped_by_transform(tensor):
        tensor = unwrapped(tensor)
    return tensor


def first_of_all(tensor: Tensor) -> Tensor:
    """What a call inside sees of the first of all that vmaps go over, as an ordinary tensor."""
    first = innermost(tensor)
    for _, dim in reversed(hidden_axes(tensor)):
        first = first.select(dim, 0)
    return first


def hidden_axes(tensor: Tensor) -> list[tuple[int, int]]:
    """The axes that vmaps hide, each with its level and its place in what that vmap wraps, outermost first."""
    hidden = []
    while is_wrapped_by_transform(tensor):
        if (dim := vmap_axis(tensor)) >= 0:
            hidden.append((vmap_level(tensor), dim))
        tensor = unwrapped(tensor)
    return hidden


def inside(tensor: Tensor, axis: BatchAxis) -> Inside:
    """Where a tensor holds the samples as a call sees it, of which the innermost one holds them along `axis`."""
    dim = axis.dim
    for level, hidden in reversed(hidden_axes(tensor)):
        if dim == hidden:
            return Inside(axis, level)
        dim -= hidden < dim
    return Inside(axis.moved(dim), None)


def innermost_axis(tensor: Tensor, place: Inside) -> BatchAxis | None:
    """The reverse: along which axis of its innermost tensor a tensor with this place holds the samples."""
    hidden = hidden_axes(tensor)
    dim = place.axis.dim
    if place.level is not None:
        levels = [level for level, _ in hidden]
        if place.level not in levels:
            return None
        at = levels.index(place.level)
        dim, hidden = hidden[at][1], hidden[at + 1 :]
    for _, other in hidden:
        dim += other <= dim
    return place.axis.moved(dim)


def common_place(tensors: Sequence[Tensor], axes: Sequence[BatchAxis]) -> Inside | None:
    """The place of the samples in all operands, its axis counted from the right; None where it is not one."""
    places = [from_right(tensor, inside(tensor, axis)) for tensor, axis in zip(tensors, axes, strict=True)]
    first = places[0]
    same = all(place.level == first.level and place.axis.is_same(first.axis) for place in places)
    return first if same else None


def from_right(tensor: Tensor, place: Inside) -> Inside:
    """The place with its axis counted from the right, or from the front again; a vmap over it leaves none to count."""
    if place.level is not None:
        return replace(place, axis=place.axis.moved(0))
    rank = tensor.dim() if place.axis.dim < 0 else -tensor.dim()
    return replace(place, axis=place.axis.moved(place.axis.dim + rank))
