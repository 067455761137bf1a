"""How much memory a kernel may take, and which kernel is cheapest for given shapes.

Costs are in multiply-adds per sample, the unit in which a processor's matrix product counts. What is not a matrix
product costs more per number; the weights below were measured on a CPU for float32 and need only be roughly right,
because the choice changes how long a quantity takes and never its value.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Literal

import torch

from lightning_persample.gradients.options import current_options, held_bytes

__all__ = [
    "CPU_MEMORY_BUDGET",
    "LEAST_MEMORY_BUDGET",
    "MEMORY_BUDGET",
    "MatrixKernel",
    "PatchKernel",
    "chunks",
    "memory_budget",
    "outer_inner_kernel",
    "outer_kernel",
    "patch_kernel",
]

MEMORY_BUDGET = 256 * 2**20
"""Bytes that the temporaries of one kernel may take at most, where the caller sets no limit."""

CPU_MEMORY_BUDGET = 16 * 2**20
"""The same on a CPU, where larger temporaries leave the cache and are returned to the system after each use."""

LEAST_MEMORY_BUDGET = 2 * 2**20
"""Bytes that the temporaries of one kernel may take in any case: less makes many small steps and saves nothing."""

MatrixKernel = Literal["gram", "direct"]
PatchKernel = Literal["autocorrelation", "unfolded gram", "unfolded", "layers", "grouped"]

_ELEMENTWISE = 32  # one number written and read again
_UNFOLDED = 50  # one number of the unfolded patches
_SHIFTED_ADD = 64  # one number of a strided window added to another
_LAYERED = 64  # one number of the layers, in products that are narrower
_STRIDED = 2  # how much longer it takes to unfold what does not lie side by side
_SQUARED = 48  # one number of the gradient, written to be squared
_GROUPED_OUTPUT = 100  # the same for the result of a grouped convolution's weight gradient
_KEPT = 90  # one number of the gradient, written to memory of its own
_FULL_COLUMNS = 32  # a matrix product with fewer columns takes as long as with this many
_FULL_CHANNELS = 16  # a convolution with fewer channels takes as long as with this many


def memory_budget(device: torch.device) -> int:
    """Bytes that the temporaries of one kernel may take on `device`.

    Where the caller sets no limit, it is what the use at hand holds in any case (its input, output gradient, weight and
    weight gradient), within bounds: the peak of a step, where all activations live, then grows by one layer's part.

    Args:
        device: where the temporaries live.

    Returns:
        Bytes, at least 1.
    """
    limit = current_options().max_memory
    if limit is not None:
        return limit
    most = min(MEMORY_BUDGET, CPU_MEMORY_BUDGET) if device.type == "cpu" else MEMORY_BUDGET
    held = held_bytes()
    return most if held is None else min(most, max(LEAST_MEMORY_BUDGET, held))


def chunks(size: int, bytes_each: int, device: torch.device) -> Iterator[slice]:
    """Cut an axis of `size` entries, each of which needs `bytes_each` bytes, into slices that fit the memory budget.

    A slice holds at least one entry, so a kernel stays within the budget as far as one entry does. Slices are of one
    size, and on a CPU a multiple of the number of threads, so that none of them waits for another.

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
    if 1 < step < size:
        threads = torch.get_num_threads() if device.type == "cpu" else 1
        step -= step % threads if step > threads else 0
        step = -(-size // -(-size // step))  # as many slices, of more equal size
        step = step if step < threads else -(-step // threads) * threads
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
    stride: int,
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
        stride: distance of neighbouring patches along the last axis.
        item_size: bytes of one number.
        device: where the kernel will run.
        dense: is the gradient itself asked for, and not only its squared norm? Gram kernels cannot give it.

    Returns:
        The kernel's name.
    """
    offsets, positions, read = prod(kernel_size), rows * prod(out_size), rows * prod(extent)
    unfolded_size, result = positions * in_channels * offsets, out_channels * in_channels // groups * offsets
    products = positions * result
    apart = _STRIDED if stride > 1 else 1
    unfold = _UNFOLDED * apart * unfolded_size if offsets > 1 else 0  # one element has its patches (almost) for free
    gram = positions**2 * (out_channels + _ELEMENTWISE * groups)
    few_channels = groups == 1 and in_channels < _FULL_CHANNELS
    padded_products = products * _FULL_CHANNELS // in_channels if few_channels else products
    columns = in_channels // groups * offsets
    squared = (_SQUARED + _KEPT * dense) * result
    costs: dict[PatchKernel, int] = {"unfolded": unfold + _narrow(products, columns) + squared}
    if rows == 1 and offsets > 1 and device.type == "cpu":
        narrow = _narrow(products, columns // kernel_size[0])
        joined = _KEPT * dense * result  # the offsets' parts are written once more, side by side
        costs["layers"] = _LAYERED * apart * layers + narrow + squared + joined
    if device.type == "cpu" or groups > 1:
        costs["grouped"] = padded_products + (_GROUPED_OUTPUT + _KEPT * dense) * result
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
