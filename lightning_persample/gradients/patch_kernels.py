"""The kernels of a convolution's per-sample weight gradient: each a way to form it, or to its squared norm.

Axis letters as in `lightning_persample.gradients.patches`, which chooses among them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from operator import mul

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_persample.gradients.cost import PatchKernel, PatchSizes
from lightning_persample.gradients.geometry import PatchGeometry
from lightning_persample.gradients.norms import sq_sum
from lightning_persample.gradients.program import kept


@dataclass(frozen=True, eq=False)
class Rows:
    """Some samples of a convolution's grad_out (b, k, O, *out) and input (b, k, C, *in), as the kernels see them."""

    grad_out: Tensor
    input: Tensor
    geometry: PatchGeometry

    @cached_property
    def out_size(self) -> tuple[int, ...]:
        """Number of output positions along each spatial axis."""
        return tuple(self.grad_out.shape[3:])

    @cached_property
    def extent(self) -> tuple[int, ...]:
        """Number of padded input positions that are read along each spatial axis."""
        return self.geometry.extent(self.out_size)

    @cached_property
    def group_shape(self) -> tuple[int, int]:
        """(b G, T)."""
        b, k = self.grad_out.shape[:2]
        return b * self.geometry.groups, k * prod(self.out_size)

    @cached_property
    def weight_shape(self) -> tuple[int, ...]:
        """(O, C/G, *kernel)."""
        return self.grad_out.shape[2], self.input.shape[2] // self.geometry.groups, *self.geometry.kernel_size

    def part(self, samples: slice, dtype: torch.dtype) -> Rows:
        """Some of the samples, in `dtype`."""
        return Rows(self.grad_out[samples].to(dtype), self.input[samples].to(dtype), self.geometry)

    def sizes(self, dtype: torch.dtype) -> PatchSizes:
        """What the kernels cost depends on this, where sums are taken in `dtype`."""
        rows, channels, device = self.input.shape[1], self.input.shape[2], self.input.device
        return PatchSizes(rows, channels, self.grad_out.shape[2], self.geometry, self.out_size, dtype.itemsize, device)

    def output_rows(self) -> Tensor:
        """grad_out as (b G, O/G, T)."""
        groups, positions = self.group_shape
        return self.grad_out.transpose(1, 2).reshape(groups, self.weight_shape[0] // self.geometry.groups, positions)

    def met(self) -> Tensor:
        """The input as far as patches reach, (b, k, C, *size)."""
        read = self.input
        for axis, (end, (before, _)) in enumerate(zip(self.extent, self.geometry.padding, strict=True), start=3):
            if read.shape[axis] > end - before:
                read = read.narrow(axis, 0, max(end - before, 0))
        return read

    def padding(self, met: Tensor) -> list[int]:
        """By how much `met` grows to the positions that are read, last axis first."""
        pad: list[int] = []
        for size, (first, _), end in zip(met.shape[3:], self.geometry.padding, self.extent, strict=True):
            before = min(first, end)  # (nothing but padding before the input may be read)
            pad[:0] = before, end - size - before
        return pad

    def read(self) -> Tensor:
        """The input positions that are read, padded and cropped: (b, C, k, *extent)."""
        met = self.met()
        pad = self.padding(met)
        return (torch.constant_pad_nd(met, pad) if any(pad) else met).transpose(1, 2)

    def windows(self, read: Tensor) -> Tensor:
        """Every patch of (b, c, k, *extent), as a view: (b, c, *kernel, k, *out)."""
        size = (*read.shape[:2], *self.geometry.kernel_size, read.shape[2], *self.out_size)
        strides = read.stride()[3:]
        along_kernel = map(mul, self.geometry.dilation, strides)
        along_output = map(mul, self.geometry.stride, strides)
        stride = (*read.stride()[:2], *along_kernel, read.stride(2), *along_output)
        return read.as_strided(size, stride)

    def covered(self) -> Tensor:
        """The sum over each patch of every channel: (b, c, k, *out)."""
        met = self.met().transpose(1, 2)
        size, dtype, device = tuple(met.shape[3:]), met.dtype, met.device
        if prod(size) * prod(self.out_size) > _FEW or dtype.is_complex:
            return self.windows(self.read()).sum(tuple(range(2, 2 + len(self.geometry.kernel_size))))
        sums = met.reshape(-1, prod(size)) @ kept(_covers, self.geometry, size, self.out_size, dtype, device)
        return sums.view(*met.shape[:3], *self.out_size)

    def layers(self) -> tuple[Tensor, list[tuple[int, slice]]]:
        """The input with its patches written out along all spatial axes but the first, for one row per sample."""
        # Along the first axis, an offset of the kernel then only shifts the positions: those that fall together after a
        # stride lie in one layer.
        geometry, first = self.geometry, self.out_size[0]
        inner, others = prod(self.out_size[1:]), geometry.kernel_size[1:]
        stride, step = geometry.stride[0], math.gcd(geometry.stride[0], geometry.dilation[0])
        places = geometry.places()
        phases, length = max(phase for phase, _ in places) + 1, places[-1][1] + first
        read = self.read().squeeze(2)
        missing = (phases - 1) * step + (length - 1) * stride + 1 - read.shape[2]
        if missing > 0:
            read = torch.constant_pad_nd(read, (0, 0) * (read.dim() - 3) + (0, missing))
        along = read.stride()[3:]
        kernel = [gap * one for gap, one in zip(geometry.dilation[1:], along, strict=True)]
        output = [step * one for step, one in zip(geometry.stride[1:], along, strict=True)]
        size = (*read.shape[:2], *others, phases, length, *self.out_size[1:])
        strides = (*read.stride()[:2], *kernel, step * read.stride(2), stride * read.stride(2), *output)
        groups, _ = self.group_shape
        written = read.as_strided(size, strides)
        slices = [(phase, slice(start * inner, (start + first) * inner)) for phase, start in places]
        return written.reshape(groups, -1, phases, length * inner), slices

    def unfolded(self) -> Tensor:
        """Every patch: (b G, C K / G, T)."""
        groups, positions = self.group_shape
        return self.windows(self.read()).reshape(groups, prod(self.weight_shape[1:]), positions)


_FEW = 1 << 16  # as many numbers as take less time to be multiplied with than the windows of a patch to be added up


@lru_cache(512)
def _covers(
    geometry: PatchGeometry,
    in_size: tuple[int, ...],
    out_size: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """How often the patch at each position of the output has each position of the input, (P, T)."""
    each = torch.eye(prod(in_size)).view(-1, 1, 1, *in_size)
    rows = Rows(each.new_empty(1, 1, 1, *out_size), each, geometry)
    return rows.windows(rows.read()).sum(tuple(range(2, 2 + len(out_size)))).flatten(1).to(device, dtype)


_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def convolved(inputs: Tensor, kernel: Tensor, geometry: PatchGeometry, out_size: tuple[int, ...]) -> Tensor:
    """The convolution of inputs by a kernel, at the positions of the output."""
    # inputs (n, C, *in), kernel (O, C/groups, *kernel) -> (n, O, *out_size)
    padding = tuple(before for before, _ in geometry.padding)
    if any(before != after for before, after in geometry.padding):
        inputs = torch.constant_pad_nd(inputs, [number for pair in reversed(geometry.padding) for number in pair])
        padding = (0,) * len(padding)
    out = _CONVOLUTIONS[len(out_size)](
        inputs, kernel, None, geometry.stride, padding, geometry.dilation, geometry.groups
    )  # may hold more positions than the output has
    for axis, size in enumerate(out_size, start=2):
        out = out if out.shape[axis] == size else out.narrow(axis, 0, size)
    return out


def _dense_unfolded(rows: Rows) -> Tensor:
    return torch.bmm(rows.output_rows(), rows.unfolded().transpose(1, 2)).view(-1, *rows.weight_shape)


def layer_products(rows: Rows, *, transposed: bool) -> Iterator[Tensor]:
    """The gradient's entries (b G, O/G, C K' / G) for each offset of the kernel along the first axis."""
    b, k, groups = rows.grad_out.shape[0], rows.grad_out.shape[1], rows.geometry.groups
    single = Rows(rows.grad_out.flatten(0, 1).unsqueeze(1), rows.input.flatten(0, 1).unsqueeze(1), rows.geometry)
    outputs = single.output_rows()
    if transposed:
        outputs = outputs.transpose(1, 2).contiguous()
    layers, offsets = single.layers()
    for phase, positions in offsets:
        layer = layers[:, :, phase, positions]
        product = torch.bmm(layer, outputs) if transposed else torch.bmm(outputs, layer.transpose(1, 2))
        yield product if k == 1 else product.view(b, k, groups, *product.shape[1:]).sum(1).flatten(0, 1)


def _dense_layers(rows: Rows) -> Tensor:
    _, channels, _, *others = rows.weight_shape
    products = layer_products(rows, transposed=False)
    parts = [part.view(-1, rows.weight_shape[0], channels, 1, *others) for part in products]
    return torch.cat(parts, 3)


def _in_order(tensor: Tensor) -> Tensor:
    """A tensor whose strides are those of its shape: by those of axes of size 1, torch takes its channels for last."""
    return tensor.contiguous().flatten().view(tensor.shape)


def _dense_grouped(rows: Rows) -> Tensor:
    """The weight gradient of one convolution that has every sample's channels as groups of its own, and batch k."""
    geometry, inputs, out_size = rows.geometry, rows.input, rows.out_size
    padding = tuple(before for before, _ in geometry.padding)
    natural = out_size == geometry.output_size(tuple(inputs.shape[3:]))
    if not natural or any(before != after for before, after in geometry.padding):
        inputs, padding = rows.read().transpose(1, 2), (0,) * len(out_size)
    b = inputs.shape[0]
    weight_grad: Tensor = torch.ops.aten.convolution_backward(
        _in_order(rows.grad_out.transpose(0, 1).flatten(1, 2)),
        _in_order(inputs.transpose(0, 1).flatten(1, 2)),
        inputs.new_empty((b * rows.weight_shape[0], *rows.weight_shape[1:])),  # only its shape is read
        None,
        geometry.stride,
        padding,
        geometry.dilation,
        False,
        (0,) * len(out_size),
        b * geometry.groups,
        (False, True, False),
    )[1]
    return weight_grad.reshape(b, *rows.weight_shape)


def _dense_diagonals(rows: Rows) -> Tensor:
    """The weight gradient of a depthwise convolution over two axes, for each offset along the first of them."""
    # The products of all columns of the output's gradient with all columns of the input that this offset meets: those
    # that an offset along the second axis pairs lie on one diagonal.
    geometry, read = rows.geometry, rows.read()  # (b, C, k, *extent)
    (step, across), (gap, apart) = geometry.stride, geometry.dilation
    height, width = rows.out_size
    length = read.shape[4]
    read = read.reshape(-1, *read.shape[3:])
    b, k, outputs = rows.grad_out.shape[:3]
    groups = b * geometry.groups
    columns = rows.grad_out.transpose(1, 2).reshape(groups, -1, k, height, width).movedim(2, 1)
    columns = columns.transpose(3, 4).reshape(groups * k, -1, height)
    parts = []
    for offset in range(geometry.kernel_size[0]):
        start = offset * gap
        products = torch.bmm(columns, read[:, start : start + (height - 1) * step + 1 : step])
        size = (groups, k, outputs // geometry.groups, geometry.kernel_size[1], width)
        along = (width * length, apart, length + across)
        paired = products.as_strided(size, (k * products.stride(0), products.stride(0), *along))
        parts.append(paired.sum((1, 4)))
    return torch.stack(parts, 2).view(b, *rows.weight_shape)


def _products_autocorrelation(rows: Rows) -> Tensor:
    """Products of the Gram matrices of output gradient and patches, (b G, m, m), without unfolding."""
    # With x x^T over the n positions that are read, the Gram matrix of the patches is the sum of its copies shifted
    # alike along both sides by each offset of the kernel. In memory such a shift is one of n + 1 numbers for every
    # position, so that whole matrices are added, one axis of the kernel after the other; what crosses an edge lies at
    # no output. Padding is added to x x^T, for it takes part in no product.
    geometry, met, k = rows.geometry, rows.met(), rows.grad_out.shape[1]
    groups, _ = rows.group_shape
    size, pad = met.shape[3:], rows.padding(met)
    columns = met.transpose(1, 2).reshape(groups, rows.weight_shape[1], k * prod(size))
    gram = torch.bmm(columns.transpose(1, 2), columns)
    if any(pad):
        gram = torch.constant_pad_nd(gram.view(groups, k, *size, k, *size), [*pad, 0, 0, *pad])
    gram = gram.view(groups, -1)
    positions, strides = k * prod(rows.extent), [prod(rows.extent[axis + 1 :]) for axis in range(len(rows.extent))]
    for count, gap, stride in zip(geometry.kernel_size, geometry.dilation, strides, strict=True):
        if count > 1:
            step = gap * stride * (positions + 1)
            length = gram.shape[1] - (count - 1) * step
            added = gram[:, :length] + gram[:, step : step + length]
            for offset in range(2, count):
                added += gram[:, offset * step : offset * step + length]
            gram = added
    out_size, outputs = (k, *rows.out_size), rows.output_rows()
    products = torch.bmm(outputs.transpose(1, 2), outputs)
    if rows.extent == rows.out_size:  # (of one element, at every position)
        products *= gram.view(products.shape)
        return products
    along = [prod(rows.extent), *(step * stride for step, stride in zip(geometry.stride, strides, strict=True))]
    picked = (gram.stride(0), *(stride * positions for stride in along), *along)
    products.view(groups, *out_size, *out_size).mul_(gram.as_strided((groups, *out_size, *out_size), picked))
    return products


def _products_unfolded(rows: Rows) -> Tensor:
    unfolded, outputs = rows.unfolded(), rows.output_rows()
    products = torch.bmm(unfolded.transpose(1, 2), unfolded)
    products *= torch.bmm(outputs.transpose(1, 2), outputs)
    return products


def fourier_gradients(rows: Rows) -> tuple[Tensor, Tensor]:
    """The weight gradient of a depthwise convolution up to rounding errors beside a size, (b, O, K) and (b,)."""
    # Their sum over the positions of the output is a correlation: the product of both transforms, transformed back.
    geometry, (b, k, outputs), inputs = rows.geometry, rows.grad_out.shape[:3], rows.met()
    size, dtype, device = tuple(inputs.shape[3:]), inputs.dtype, inputs.device
    of_output, of_input, back = (
        kept(_transform, geometry, size, rows.out_size, part, dtype, device) for part in range(3)
    )
    grads, inputs = rows.grad_out.reshape(b * k * outputs, -1), inputs.reshape(b * k * geometry.groups, -1)
    counted = (grads, outputs), (inputs, geometry.groups)
    norms = [torch.linalg.vector_norm(each.view(b, k, n, each.shape[1]), dim=(1, 3)) for each, n in counted]
    scale = sq_sum(norms[0].view(b, geometry.groups, -1) * norms[1].unsqueeze(2))
    transformed = (grads @ of_output).view(b, k, geometry.groups, outputs // geometry.groups, -1)
    transformed *= (inputs @ of_input).view(b, k, geometry.groups, 1, -1)
    total = transformed.squeeze(1) if k == 1 else transformed.sum(1)
    return (total.reshape(b * outputs, -1) @ back).view(b, outputs, -1), scale


@lru_cache(512)
def _transform(
    geometry: PatchGeometry,
    in_size: tuple[int, ...],
    out_size: tuple[int, ...],
    part: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The real matrices (T, F), (P, F) and (F, K) with ``corr(g, x) = ((g @ first) * (x @ second)) @ third``."""
    # Of conj(g) x with complex g = a + ib and x = c + id, of one of two opposite frequencies: the products ac, bd and
    # (a - b)(c + d) = ac + ad - bc - bd.
    sizes, places = [], zip(geometry.padding, in_size, geometry.extent(out_size), strict=True)
    for (before, _), count, end in places:  # as long as the largest distance that is met, so that none is another
        sizes.append(1 + max(end - 1 - before, before + count - 1, 0))
    frequencies = [
        (each, opposite)
        for each in itertools.product(*map(range, sizes))
        if each <= (opposite := tuple(-one % size for one, size in zip(each, sizes, strict=True)))
    ]
    own = torch.tensor(
        [[one / size for one, size in zip(each, sizes, strict=True)] for each, _ in frequencies], dtype=torch.float64
    )
    is_complex = torch.tensor([each != opposite for each, opposite in frequencies])
    steps = {
        0: (out_size, geometry.stride),
        1: (in_size, (1,) * len(in_size)),
        2: (geometry.kernel_size, geometry.dilation),
    }
    counts, step = steps[part]
    axes = [torch.arange(count, dtype=torch.float64) * one for count, one in zip(counts, step, strict=True)]
    if part == 1:
        axes = [axis + before for axis, (before, _) in zip(axes, geometry.padding, strict=True)]
    angles = 2 * math.pi * torch.cartesian_prod(*axes).view(-1, len(axes)) @ own.T
    real, imaginary = angles.cos(), angles.sin()
    if part == 0:
        found = [real, -imaginary[:, is_complex], (real + imaginary)[:, is_complex]]
    elif part == 1:
        found = [real, -imaginary[:, is_complex], (real - imaginary)[:, is_complex]]
    else:
        weight = (1 + is_complex.double()) / math.prod(sizes)
        real, imaginary = real * weight, imaginary * weight * is_complex
        found = [real + imaginary, (real - imaginary)[:, is_complex], -imaginary[:, is_complex]]
    matrix = torch.cat(found, 1).to(device, dtype)
    return matrix.T.contiguous() if part == 2 else matrix


DENSE: dict[PatchKernel, Callable[[Rows], Tensor]] = {
    "unfolded": _dense_unfolded,
    "layers": _dense_layers,
    "grouped": _dense_grouped,
    "diagonals": _dense_diagonals,
}
GRAM: dict[PatchKernel, Callable[[Rows], Tensor]] = {
    "autocorrelation": _products_autocorrelation,
    "unfolded gram": _products_unfolded,
}
