"""From a record to rows of numbers: the gradients of all parameters side by side, projected or in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_persample.engine import PerSampleRecord
from lightning_persample.gradients.projection import Projection
from lightning_persample.influence.store import ParameterColumns, columns_for

__all__ = ["layout_of", "quantity_for", "values_of"]


def layout_of(shapes: Mapping[str, Sequence[int]], projection: Projection | None) -> tuple[ParameterColumns, ...]:
    """Which columns are those of which parameter."""
    sizes = {name: torch.Size(shape) for name, shape in shapes.items()}
    kept = {name: size.numel() if projection is None else projection.size_of(size) for name, size in sizes.items()}
    return columns_for({name: (tuple(size), kept[name]) for name, size in sizes.items()})


def quantity_for(projection: Projection | None) -> str:
    """What a record has to hold for rows of it."""
    return "grad_sample" if projection is None else "projection"


def values_of(record: PerSampleRecord, layout: Sequence[ParameterColumns], projection: Projection | None) -> Tensor:
    """The gradients of a record's samples; -> (m, K)."""
    parts = record.grad_samples if projection is None else record.project(projection)
    dtypes = [part.dtype for part in parts.values()]
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    device = next((part.device for part in parts.values()), torch.device("cpu"))
    values = torch.zeros(record.num_values, layout[-1].stop, dtype=dtype, device=device)
    for each in layout:
        if each.name in parts:
            values[:, each.start : each.stop] = parts[each.name].reshape(len(values), each.stop - each.start)
        elif each.name in record.unsupported:
            values[:, each.start : each.stop] = float("nan")
    return values
