"""How much memory a kernel may take, and which kernel is cheapest for given shapes.

Costs are in multiply-adds per sample, the unit in which a processor's matrix product counts. What is not a matrix
product costs more per number; the weights below were measured on a CPU for float32 and need only be roughly right,
because the choice changes how long a quantity takes and never its value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Literal

import torch

__all__ = [
    "CPU_MEMORY_BUDGET",
    "MEMORY_BUDGET",
    "MatrixKernel",
    "PatchKernel",
    "chunks",
    "halved",
    "halved_memory_budget",
    "memory_budget",
    "outer_inner_kernel",
    "outer_kernel",
    "patch_kernel",
]

MEMORY_BUDGET = 256 * 2**20
"""Bytes that the temporaries of one kernel may take."""

CPU_MEMORY_BUDGET = 16 * 2**20
"""The same on a CPU, where larger temporaries leave the cache and are returned to the system after each use."""

_HALVINGS: ContextVar[int] = ContextVar("halvings of the memory budget", default=0)

MatrixKernel = Literal["gram", "direct"]
PatchKernel = Literal["autocorrelation", "unfolded gram", "unfolded", "layers", "grouped"]

_ELEMENTWISE = 32  # one number written and read again
_SHIFTED_ADD = 64  # one number of a strided window added to another
_LAYERED = 48  # one number of the layers, in products that are narrower
_GROUPED_OUTPUT = 100  # one number of the result of a grouped convolution's weight gradient
_FULL_COLUMNS = 32  # a matrix product with fewer columns takes as long as with this many
_FULL_CHANNELS = 8  # a convolution with fewer channels takes as long as with this many


def memory_budget(device: torch.device) -> int:
    """Bytes that the temporaries of one kernel may take on `device`."""
    budget = min(MEMORY_BUDGET, CPU_MEMORY_BUDGET) if device.type == "cpu" else MEMORY_BUDGET
    return halved(budget)


def halved(budget: int) -> int:
    """A memory budget in bytes, halved as often as `halved_memory_budget` says around the call."""
    return budget >> _HALVINGS.get()


@contextmanager
def halved_memory_budget(times: int) -> Iterator[None]:
    """Within this context, kernels take that many halves of their memory budget, in this thread.

    Args:
        times: how often to halve it.

    Yields:
        Nothing.
    """
    before = _HALVINGS.set(times)
    try:
        yield
    finally:
        _HALVINGS.reset(before)


def chunks(size: int, bytes_each: int, device: torch.device) -> Iterator[slice]:
    """Cut an axis of `size` entries, each of which needs `bytes_each` bytes, into slices that fit the memory budget.

    A slice holds at least one entry, so a kernel stays within the budget as far as one entry does.

    Example:
        >>> [(part.start, part.stop) for part in chunks(5, MEMORY_BUDGET // 2, torch.device("meta"))]
        [(0, 2), (2, 4), (4, 5)]

    Args:
        size: number of entries.
        bytes_each: bytes of temporaries for one entry.
        device: where the temporaries live.

    Yields:
        Slices that cover 0 to `size`, in order, none of them empty.
    """
    step = max(1, memory_budget(device) // bytes_each) if bytes_each else max(1, size)
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def outer_kernel(positions: int, rows: int, columns: int) -> MatrixKernel:
    """The cheaper way to the squared norm of sum_t left[t] (x) right[t].

    Gram takes T^2 (p + d) multiply-adds and a T^2 product, direct takes T p d and a p d square.

    Example:
        >>> outer_kernel(positions=16, rows=512, columns=512), outer_kernel(positions=4096, rows=64, columns=64)
        ('gram', 'direct')

    Args:
        positions: T, the number of terms.
        rows: p, the size of left[t].
        columns: d, the size of right[t].

    Returns:
        "gram" or "direct".
    """
    return outer_inner_kernel(positions, positions, rows, columns)


def outer_inner_kernel(positions: int, other_positions: int, rows: int, columns: int) -> MatrixKernel:
    """The cheaper way to the inner product of two sums of outer products, with T and S terms.

    Args:
        positions: T, the number of terms of the one.
        other_positions: S, the number of terms of the other.
        rows: p.
        columns: d.

    Returns:
        "gram" (T S (p + d)) or "direct" ((T + S) p d / 2, the mean, so that a squared norm needs one of the two).
    """
    gram = positions * other_positions * (rows + columns + _ELEMENTWISE)
    direct = rows * columns * ((positions + other_positions) // 2 + _ELEMENTWISE)
    return "gram" if gram < direct else "direct"


def _narrow(products: int, columns: int) -> int:
    """Multiply-adds of a matrix product, with few columns counted as many: they take as long."""
    return products * max(columns, _FULL_COLUMNS) // columns


def patch_kernel(
    rows: int,
    in_channels: int,
    out_channels: int,
    groups: int,
    kernel_size: tuple[int, ...],
    extent: tuple[int, ...],
    out_size: tuple[int, ...],
    layers: int,
    *,
    item_size: int,
    device: torch.device,
    dense: bool,
) -> PatchKernel:
    """The cheapest way to a convolution's per-sample weight gradient or to its squared norm.

    Per sample, with T positions of the output, P positions of the padded input that are read, K kernel offsets,
    C input channels, O output channels and G groups:

    - "autocorrelation" P^2 C + T^2 O for the Gram matrices of input and output gradient, T^2 K G shifted adds;
    - "unfolded gram" T C K numbers unfolded, T^2 (C K + O);
    - "unfolded" T C K numbers unfolded, T C K O / G;
    - "layers" the numbers unfolded along all spatial axes but the first, T C K O / G; on a CPU;
    - "grouped" T C K O / G inside a convolution with groups = samples * G, which writes O C K / G numbers slowly.

    Args:
        rows: k, rows of one sample.
        in_channels: C.
        out_channels: O.
        groups: G.
        kernel_size: size of the kernel along each spatial axis.
        extent: number of padded input positions that are read, along each spatial axis.
        out_size: number of output positions along each spatial axis.
        layers: numbers written for one sample where patches are unfolded along all spatial axes but the first.
        item_size: bytes of one number.
        device: where the kernel will run.
        dense: is the gradient itself asked for, and not only its squared norm? Gram kernels cannot give it.

    Returns:
        The kernel's name.
    """
    offsets, positions, read = prod(kernel_size), rows * prod(out_size), rows * prod(extent)
    unfolded_size, result = positions * in_channels * offsets, out_channels * in_channels // groups * offsets
    products = positions * result
    unfold = _ELEMENTWISE * unfolded_size if offsets > 1 else 0  # a kernel of one element has its patches for free
    gram = positions**2 * (out_channels + _ELEMENTWISE * groups)
    few_channels = groups == 1 and in_channels < _FULL_CHANNELS
    padded_products = products * _FULL_CHANNELS // in_channels if few_channels else products
    columns = in_channels // groups * offsets
    costs: dict[PatchKernel, int] = {"unfolded": unfold + _narrow(products, columns) + _ELEMENTWISE * result}
    if rows == 1 and offsets > 1 and device.type == "cpu":
        narrow = _narrow(products, columns // kernel_size[0])
        costs["layers"] = _LAYERED * layers + narrow + _ELEMENTWISE * result
    if device.type == "cpu" or groups > 1:
        costs["grouped"] = padded_products + _GROUPED_OUTPUT * result
    budget = memory_budget(device)
    if not dense and item_size * (read**2 + 3 * positions**2) * groups <= budget:
        shifted = positions**2 * offsets * groups * _SHIFTED_ADD
        costs["autocorrelation"] = read**2 * in_channels + gram + shifted
    if not dense and item_size * (2 * positions**2 * groups + unfolded_size) <= budget:
        costs["unfolded gram"] = unfold + positions**2 * in_channels * offsets + gram
    if item_size * layers > budget:
        costs.pop("layers", None)
    if item_size * unfolded_size > budget:
        del costs["unfolded"]
    if not costs:
        costs["grouped"] = padded_products
    return min(costs, key=lambda kernel: costs[kernel])
