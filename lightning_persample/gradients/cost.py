"""How much memory a kernel may take, and which kernel is cheapest for given shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from lightning_persample.gradients.geometry import PatchGeometry

Result = TypeVar("Result")


@dataclass(frozen=True)
class KernelOptions:
    """How the kernels of all quantities run, which changes nothing of what they compute."""

    max_memory: int | None = None
    """Bytes for the temporaries of one kernel, at least one sample's or row's; None leaves it to `memory_budget`."""

    def __post_init__(self) -> None:
        if self.max_memory is not None and self.max_memory < 1:
            raise ValueError(f"KernelOptions: max_memory is None or at least 1 byte, got {self.max_memory}.")


DEFAULT_OPTIONS = KernelOptions()


class kernel_options:  # noqa: N801 (a context manager)
    """Run the kernels inside this context with these options, in place of those in force."""

    # They hold in this thread alone: a backward on an accelerator runs in another one, so a hook enters them itself.

    __slots__ = ("_before", "_state")

    def __init__(self, options: KernelOptions) -> None:
        self._state = options, None

    def __enter__(self) -> None:
        self._before = _state.set(self._state)

    def __exit__(self, *error: object) -> None:
        _state.reset(self._before)


# One variable for both: what a use leaves behind that is interrupted ends with the options around it.
_state: ContextVar[tuple[KernelOptions, list[Callable[[], int] | int] | None]] = ContextVar(
    "options of the kernels, and the bytes that the use at hand holds, counted when they are asked for",
    default=(DEFAULT_OPTIONS, None),
)


def current_options() -> KernelOptions:
    """The options in force in this thread."""
    return _state.get()[0]


def _held_bytes() -> int | None:
    """Bytes that the use at hand holds in any case; None outside of one."""
    use = _state.get()[1]
    if use is None:
        return None
    held = use[0]
    if not isinstance(held, int):
        use[0] = held = held()
    return held


def run_for_use(count: Callable[[], int], kernel: Callable[..., Result], *arguments: Any) -> Result:
    """Run a kernel that works on a use which holds so many bytes; what is nested counts as part of it."""
    options, use = _state.get()
    before = _state.set((options, use or [count]))
    try:
        return kernel(*arguments)
    finally:
        _state.reset(before)


MEMORY_BUDGET = 256 * 2**20
"""Bytes that the temporaries of one kernel may take at most, where the caller sets no limit."""

CPU_MEMORY_BUDGET = 8 * 2**20
"""The same on a CPU, where larger temporaries leave the cache and are returned to the system after each use."""

LEAST_MEMORY_BUDGET = 2 * 2**20
"""Bytes that the temporaries of one kernel may take in any case: less makes many small steps and saves nothing."""

_HALVINGS: ContextVar[int] = ContextVar("halvings of the memory budget", default=0)

MatrixKernel = Literal["gram", "direct"]
PatchKernel = Literal[
    "product", "autocorrelation", "unfolded gram", "unfolded", "layers", "grouped", "diagonals", "fourier"
]

_REMEMBERED = 4096  # choices; sizes that change all the time (ragged sequences) push out the oldest
_ELEMENTWISE = 32  # one number written and read again
_FORMING: tuple[PatchKernel, ...] = ("unfolded", "layers", "grouped", "diagonals")
_UNFOLDED = 50  # one number of the unfolded patches
_PICKED = 64  # one number of a strided window multiplied with another
_LAYERED = 64  # one number of the layers, in products that are narrower
_SHORT_ROW = 8  # numbers side by side: a patch with fewer in a row takes as long to write out as with this many
_STRIDED = 2  # how much longer it takes to unfold what does not lie side by side
_SQUARED = 48  # one number of the gradient, written to be squared
_GROUPED_OUTPUT = 100  # the same for the result of a grouped convolution's weight gradient
_KEPT = 90  # one number of the gradient, written to memory of its own
_SUMMED = 24  # one number of a gradient added to the sum over the samples
_FULL_COLUMNS = 32  # a matrix product with fewer columns takes as long as with this many
_DEPTHWISE = 40  # one multiply-add of a convolution that has one input channel in each group
_DEPTHWISE_OF_3 = 10  # the same with a kernel of at most three along each axis
_SMALL = 400  # multiply-adds below which a matrix product of many takes another way
_SMALL_PRODUCT, _SMALL_EACH = 2_000, 70  # such a product, and each of its multiply-adds
_PRODUCT, _EACH = 5_000, 3  # any other one, and each of its multiply-adds
_FULL_CHANNELS = 16  # a convolution with fewer channels takes as long as with this many
_REORDERED = 40  # one number of a convolution's input or output, laid out as its kernel reads it


def memory_budget(device: torch.device) -> int:
    """Bytes that the temporaries of one kernel may take on `device`."""
    # Where the caller sets no limit, it is what the use at hand holds in any case (its input, output gradient, weight
    # and weight gradient), within bounds: the peak of a step, where all activations live, then grows by one layer's
    # part.
    limit = current_options().max_memory
    if limit is not None:
        return halved(limit)
    most = min(MEMORY_BUDGET, CPU_MEMORY_BUDGET) if device.type == "cpu" else MEMORY_BUDGET
    held = _held_bytes()
    return halved(most if held is None else min(most, max(LEAST_MEMORY_BUDGET, held)))


def fits(size: int, device: torch.device) -> bool:
    """Whether temporaries of so many bytes are within `memory_budget`."""
    if size <= min(LEAST_MEMORY_BUDGET, MEMORY_BUDGET) and current_options().max_memory is None and not _HALVINGS.get():
        return True  # without counting what the use holds
    return size <= memory_budget(device)


def halved(budget: int) -> int:
    """A memory budget in bytes, halved as often as `halved_memory_budget` says around the call."""
    return max(1, budget >> _HALVINGS.get())


def samples_at_once(count: int, bytes_each: int, device: torch.device) -> int | None:
    """How many of `count` samples torch may compute in one batch where memory is bounded; None where all may be."""
    if current_options().max_memory is None and not _HALVINGS.get():
        return None
    return max(1, min(count >> _HALVINGS.get(), memory_budget(device) // max(bytes_each, 1)))


@contextmanager
def halved_memory_budget(times: int) -> Iterator[None]:
    """Within this context, kernels take that many halves of their memory budget, in this thread."""
    before = _HALVINGS.set(times)
    try:
        yield
    finally:
        _HALVINGS.reset(before)


def chunks(size: int, bytes_each: int, device: torch.device) -> Iterator[slice]:
    """Cut an axis of `size` entries, each of which needs `bytes_each` bytes, into slices that fit the memory budget."""
    # A slice holds at least one entry, so a kernel stays within the budget as far as one entry does. Slices are of one
    # size, and on a CPU a multiple of the number of threads, so that none of them waits for another.
    if size and fits(size * bytes_each, device):
        yield slice(0, size)
        return
    step = max(1, memory_budget(device) // bytes_each) if bytes_each else max(1, size)
    if 1 < step < size:
        threads = torch.get_num_threads() if device.type == "cpu" else 1
        step -= step % threads if step > threads else 0
        step = -(-size // -(-size // step))  # as many slices, of more equal size
        step = step if step < threads else -(-step // threads) * threads
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def by_chunks(size: int, bytes_each: int, device: torch.device, compute: Callable[[slice], Tensor]) -> Tensor:
    """What is computed of some entries at a time, see `chunks`, joined along its first axis."""
    return joined([compute(part) for part in chunks(size, bytes_each, device)] or [compute(slice(0, 0))])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts along the first axis as one tensor: a part that is alone as it is."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def outer_kernel(positions: int, rows: int, columns: int, others: int | None = None) -> MatrixKernel:
    """The cheaper way to |sum_t left[t] (x) right[t]|^2, or to the inner product of two such sums of T and S terms."""
    # positions T, rows p, columns d, others S (None is T): Gram takes T S (p + d) multiply-adds and a T S product,
    # direct takes (T + S) p d / 2 and a p d square.
    others = positions if others is None else others
    costs: dict[MatrixKernel, int] = {
        "direct": rows * columns * ((positions + others) // 2 + _ELEMENTWISE),
        "gram": positions * others * (rows + columns + _ELEMENTWISE),
    }
    return min(costs, key=lambda kernel: costs[kernel])


def linear_is_fused(positions: int, rows: int, columns: int) -> bool:
    """Whether forming each sum_t left[t] (x) right[t] costs less than its squared norm and their sum apart."""
    # positions T, the number of terms; left[t] (p,), right[t] (d,)
    products = positions * rows * columns
    formed = products + (_ELEMENTWISE + _SUMMED) * rows * columns
    if positions == 1:
        return formed < products + rows + columns
    gram = positions**2 * (rows + columns + _ELEMENTWISE)
    return formed < products + min(gram, products + _ELEMENTWISE * rows * columns)


def _narrow(products: int, columns: int) -> int:
    """Multiply-adds of a matrix product, with few columns counted as many: they take as long."""
    return products * max(columns, _FULL_COLUMNS) // columns


@dataclass(frozen=True)
class PatchSizes:
    """What the kernels of a convolution's weight gradient cost depends on; the sizes are those of one sample."""

    rows: int  # k, of one sample
    in_channels: int  # C
    out_channels: int  # O
    geometry: PatchGeometry
    out_size: tuple[int, ...]  # number of output positions along each spatial axis
    item_size: int  # bytes of one number
    device: torch.device  # where the kernel will run

    @property
    def positions(self) -> int:
        """T, the number of output positions."""
        return self.rows * prod(self.out_size)

    @property
    def read(self) -> int:
        """P, the number of padded input positions that are read."""
        return self.rows * prod(self.geometry.extent(self.out_size))

    @property
    def unfolded(self) -> int:
        """T C K, how many numbers the patches hold when written out."""
        return self.positions * self.in_channels * prod(self.geometry.kernel_size)

    @property
    def layers(self) -> int:
        """How many numbers of one row are written where patches are written out along all axes but the first."""
        geometry, places = self.geometry, self.geometry.places()
        rows = (max(phase for phase, _ in places) + 1) * (places[-1][1] + self.out_size[0])
        return self.in_channels * rows * prod(geometry.kernel_size[1:]) * prod(self.out_size[1:])

    @property
    def column_products(self) -> int:
        """How many products of a column of the output's gradient and one of the input an offset of the kernel has."""
        return self.rows * self.out_channels * self.out_size[-1] * self.geometry.extent(self.out_size)[-1]

    @property
    def unpadded(self) -> int:
        """How many of the positions that are read are no padding, at most."""
        geometry = self.geometry
        axes = zip(geometry.extent(self.out_size), geometry.padding, geometry.stride, strict=True)
        sizes = (end - before - max(after - step + 1, 0) for end, (before, after), step in axes)
        return self.rows * prod(max(size, 0) for size in sizes)

    @property
    def frequencies(self) -> int:
        """F, three numbers for each pair of opposite frequencies with which no shift is taken for another."""
        axes = zip(self.geometry.extent(self.out_size), self.geometry.padding, strict=True)
        return 3 * prod(size - min(pad) for size, pad in axes) // 2

    @property
    def is_depthwise(self) -> bool:
        """Whether each group has one input channel."""
        return self.geometry.groups == self.in_channels > 1

    @property
    def own_products(self) -> int:
        """What torch's own kernel for the weight gradient takes, in multiply-adds of a matrix product."""
        products = self.positions * self.result
        if not self.is_depthwise or self.device.type != "cpu":
            return products
        return products * (_DEPTHWISE if max(self.geometry.kernel_size) > 3 else _DEPTHWISE_OF_3)

    @property
    def result(self) -> int:
        """O C K / G, how many numbers the weight has."""
        return self.out_channels * self.in_channels // self.geometry.groups * prod(self.geometry.kernel_size)


def patch_costs(sizes: PatchSizes, *, dense: bool, budget: int | None = None) -> dict[PatchKernel, int]:
    """Multiply-adds per sample of each way to a convolution's weight gradient or its squared norm, where it fits."""
    # `dense` says that the gradient itself is asked for, which Gram kernels cannot give; at least one way is there. Of
    # T positions of the output, P positions of the padded input that are read, K kernel offsets (K_a along axis a), C
    # input channels, O output channels and G groups:
    # - "autocorrelation" n^2 C + T^2 O for the Gram matrices of input (of n positions without padding) and output
    #   gradient, and P^2 G numbers padded, and added sum_a (K_a - 1) times;
    # - "unfolded gram" T C K numbers unfolded, T^2 (C K + O);
    # - "unfolded" T C K numbers unfolded, T C K O / G;
    # - "layers" the numbers unfolded along all spatial axes but the first, T C K O / G; on a CPU;
    # - "diagonals" K_1 products of all columns of output gradient and input by channel, and sums along diagonals; for
    #   one input channel in each group, on a CPU;
    # - "fourier" matrix products with the sines and cosines of F frequencies, F (P C + (T + K) O), and F O products;
    #   for one input channel in each group, on a CPU;
    # - "product" for T = 1, the squared norms of C K and O numbers;
    # - "grouped" T C K O / G inside a convolution with groups = samples * G, which writes O C K / G numbers slowly, and
    #   on a CPU n C + T O numbers in the order in which it reads them.
    geometry, channels, outputs = sizes.geometry, sizes.in_channels, sizes.out_channels
    kernel_size, groups, on_cpu = geometry.kernel_size, geometry.groups, sizes.device.type == "cpu"
    offsets, positions, read, result = prod(kernel_size), sizes.positions, sizes.read, sizes.result
    products = positions * result
    width = max(sizes.out_size[-1], 1)
    apart = _STRIDED if geometry.stride[-1] > 1 else 1
    # One element has its patches (almost) for free.
    unfold = _UNFOLDED * apart * sizes.unfolded * max(width, _SHORT_ROW) // width if offsets > 1 else 0
    few_channels = groups == 1 and channels < _FULL_CHANNELS
    padded_products = products * _FULL_CHANNELS // channels if few_channels else sizes.own_products
    columns = channels // groups * offsets
    squared = (_SQUARED + _KEPT * dense) * result
    costs: dict[PatchKernel, int] = {"unfolded": unfold + _narrow(products, columns) + squared}
    if sizes.rows == 1 and offsets > 1 and on_cpu:
        narrow = _narrow(products, columns // kernel_size[0])
        joined = _KEPT * dense * result  # the offsets' parts are written once more, side by side
        costs["layers"] = _LAYERED * apart * sizes.layers + narrow + squared + joined
    budget, item_size = memory_budget(sizes.device) if budget is None else budget, sizes.item_size
    if sizes.is_depthwise and len(kernel_size) == 2 and on_cpu and item_size * sizes.column_products <= budget:
        costs["diagonals"] = _diagonal_cost(sizes) + (_SQUARED + _KEPT * dense) * result
    if sizes.is_depthwise and on_cpu and not dense and item_size * 2 * sizes.frequencies * outputs <= budget:
        transformed = sizes.unpadded * channels + (positions + sizes.rows * offsets) * outputs
        costs["fourier"] = sizes.frequencies * (transformed + _ELEMENTWISE * sizes.rows * outputs)
    if on_cpu or groups > 1:
        reordered = _REORDERED * on_cpu * (sizes.unpadded * channels + positions * outputs)
        costs["grouped"] = padded_products + reordered + (_GROUPED_OUTPUT + _KEPT * dense) * result
    if not dense and positions == 1:
        costs["product"] = sizes.unfolded + outputs
    if not dense and item_size * 3 * read**2 * groups <= budget:
        written = (sizes.unpadded < read) + sum(kernel_size) - len(kernel_size)
        each = _ELEMENTWISE if set(geometry.stride) == {1} else _PICKED
        gram = sizes.unpadded**2 * channels + _ELEMENTWISE * read**2 * groups * written
        costs["autocorrelation"] = gram + positions**2 * (outputs + each * groups)
    if not dense and item_size * (2 * positions**2 * groups + sizes.unfolded) <= budget:
        gram = positions**2 * (outputs + _ELEMENTWISE * groups)
        costs["unfolded gram"] = unfold + positions**2 * channels * offsets + gram
    if item_size * sizes.layers > budget:
        costs.pop("layers", None)
    if item_size * sizes.unfolded > budget:
        del costs["unfolded"]
    if not costs:
        costs["grouped"] = padded_products
    return costs


def _diagonal_cost(sizes: PatchSizes) -> int:
    """What small matrix products of all columns, and the sums along their diagonals, take."""
    (height, width), (first, second) = sizes.out_size, sizes.geometry.kernel_size
    number = sizes.rows * sizes.in_channels
    products = height * sizes.column_products // number
    product = _SMALL_PRODUCT + _SMALL_EACH * products if products < _SMALL else _PRODUCT + _EACH * products
    return first * (number * product + _PICKED * sizes.rows * sizes.out_channels * second * width)


def patch_kernel(sizes: PatchSizes, *, dense: bool) -> PatchKernel:
    """The cheapest of `patch_costs`."""
    return next(iter(_cheapest_first(sizes, dense, memory_budget(sizes.device))))


def forming_kernel(sizes: PatchSizes) -> PatchKernel:
    """The cheapest kernel that forms each gradient, where none is kept for longer than it takes to add it to a sum."""
    costs = _cheapest_first(sizes, False, memory_budget(sizes.device))
    return next((kernel for kernel in costs if kernel in _FORMING), None) or patch_kernel(sizes, dense=True)


@lru_cache(_REMEMBERED)
def _cheapest_first(sizes: PatchSizes, dense: bool, budget: int) -> dict[PatchKernel, int]:
    costs = patch_costs(sizes, dense=dense, budget=budget)
    return dict(sorted(costs.items(), key=lambda cost: cost[1]))


def convolution_is_fused(
    input_size: tuple[int, ...], out_channels: int, geometry: PatchGeometry, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether forming each of a convolution's weight gradients costs less than squared norms and sum apart."""
    # input_size (C, *in), with all rows of a sample counted as one
    out_size = geometry.output_size(tuple(input_size[1:]))
    if 0 in (*out_size, *input_size, out_channels):
        return False
    sums = torch.promote_types(dtype, torch.float32)
    sizes = PatchSizes(1, input_size[0], out_channels, geometry, out_size, sums.itemsize, device)
    costs = _cheapest_first(sizes, False, memory_budget(sizes.device))
    formed = next((cost for kernel, cost in costs.items() if kernel in _FORMING), None)
    apart = next(iter(costs.values())) + sizes.own_products
    return formed is not None and formed + _SUMMED * sizes.result < apart
