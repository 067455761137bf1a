"""Convolutions: the per-sample weight gradient and its squared norm.

Axis letters: b samples, k rows of one sample, c input channels, o output channels, t positions of the output. A
convolution's weight gradient is the sum over k and t of grad_out[k, :, t] (x) patch[k, t], where patch[k, t] holds the
input under the kernel at output position t.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_persample.gradients.autotune import fastest
from lightning_persample.gradients.cost import PatchKernel, chunks, memory_budget, patch_kernel
from lightning_persample.gradients.geometry import PatchGeometry
from lightning_persample.gradients.norms import cancelled, dense_sq_norm, zeros
from lightning_persample.gradients.options import current_options, kernel_options
from lightning_persample.gradients.precision import accumulation_dtype, wide_dtype

__all__ = ["PatchGeometry", "patches_dense", "patches_sq_norm", "patches_terms_sq_norm"]


@dataclass(frozen=True, eq=False)
class _Rows:
    """Some samples of a convolution's grad_out (b, k, O, *out) and input (b, k, C, *in), as the kernels see them."""

    grad_out: Tensor
    input: Tensor
    geometry: PatchGeometry

    @property
    def out_size(self) -> tuple[int, ...]:
        return tuple(self.grad_out.shape[3:])

    @property
    def group_shape(self) -> tuple[int, int]:
        """(b G, T)."""
        b, k = self.grad_out.shape[:2]
        return b * self.geometry.groups, k * prod(self.out_size)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """(O, C/G, *kernel)."""
        return self.grad_out.shape[2], self.input.shape[2] // self.geometry.groups, *self.geometry.kernel_size

    def output_rows(self) -> Tensor:
        """grad_out as (b G, O/G, T)."""
        groups, positions = self.group_shape
        return self.grad_out.transpose(1, 2).reshape(groups, self.weight_shape[0] // self.geometry.groups, positions)

    def read(self) -> Tensor:
        """The input positions that are read, padded and cropped: (b, C, k, *extent)."""
        extent = self.geometry.extent(self.out_size)
        axes = list(zip(self.input.shape[3:], self.geometry.padding, extent, strict=True))
        pad = [number for size, (before, _), end in reversed(axes) for number in (before, end - size - before)]
        return (F.pad(self.input, pad) if any(pad) else self.input).transpose(1, 2)

    def windows(self, read: Tensor) -> Tensor:
        """Every patch of (b, c, k, *extent), as a view: (b, c, *kernel, k, *out)."""
        size = (*read.shape[:2], *self.geometry.kernel_size, read.shape[2], *self.out_size)
        strides = read.stride()[3:]
        along_kernel = (gap * stride for gap, stride in zip(self.geometry.dilation, strides, strict=True))
        along_output = (step * stride for step, stride in zip(self.geometry.stride, strides, strict=True))
        stride = (*read.stride()[:2], *along_kernel, read.stride(2), *along_output)
        return read.as_strided(size, stride, read.storage_offset())

    def layers(self) -> tuple[Tensor, list[tuple[int, slice]]]:
        """The input with its patches written out along all spatial axes but the first, for one row per sample.

        Along the first axis, an offset of the kernel then only shifts the positions: those that fall together after a
        stride lie in one layer.

        Returns:
            Layers (b G, C K' / G, phases, positions), with K' offsets of the kernel along the other axes; and for each
            offset along the first axis its layer and the positions in it.
        """
        geometry, first = self.geometry, self.out_size[0]
        inner, others = prod(self.out_size[1:]), geometry.kernel_size[1:]
        stride, step = geometry.stride[0], math.gcd(geometry.stride[0], geometry.dilation[0])
        places = geometry.places()
        phases, length = max(phase for phase, _ in places) + 1, places[-1][1] + first
        read = self.read().squeeze(2)
        missing = (phases - 1) * step + (length - 1) * stride + 1 - read.shape[2]
        if missing > 0:
            read = F.pad(read, (0, 0) * (read.dim() - 3) + (0, missing))
        along = read.stride()[3:]
        kernel = [gap * one for gap, one in zip(geometry.dilation[1:], along, strict=True)]
        output = [step * one for step, one in zip(geometry.stride[1:], along, strict=True)]
        size = (*read.shape[:2], *others, phases, length, *self.out_size[1:])
        strides = (*read.stride()[:2], *kernel, step * read.stride(2), stride * read.stride(2), *output)
        groups, _ = self.group_shape
        written = read.as_strided(size, strides, read.storage_offset())
        slices = [(phase, slice(start * inner, (start + first) * inner)) for phase, start in places]
        return written.reshape(groups, -1, phases, length * inner), slices

    def unfolded(self) -> Tensor:
        """Every patch: (b G, C K / G, T)."""
        groups, positions = self.group_shape
        return self.windows(self.read()).reshape(groups, prod(self.weight_shape[1:]), positions)


def _dense_unfolded(rows: _Rows) -> Tensor:
    return torch.bmm(rows.output_rows(), rows.unfolded().transpose(1, 2)).view(-1, *rows.weight_shape)


def _layer_products(rows: _Rows, *, transposed: bool) -> Iterator[Tensor]:
    """The gradient's entries (b G, O/G, C K' / G) for each offset of the kernel along the first axis.

    Args:
        rows: the samples.
        transposed: give (b G, C K' / G, O/G), which is faster: both factors of the product then lie as it reads them.

    Yields:
        One tensor for each offset.
    """
    b, k, groups = rows.grad_out.shape[0], rows.grad_out.shape[1], rows.geometry.groups
    single = _Rows(rows.grad_out.flatten(0, 1).unsqueeze(1), rows.input.flatten(0, 1).unsqueeze(1), rows.geometry)
    outputs = single.output_rows()
    if transposed:
        outputs = outputs.transpose(1, 2).contiguous()
    layers, offsets = single.layers()
    for phase, positions in offsets:
        layer = layers[:, :, phase, positions]
        product = torch.bmm(layer, outputs) if transposed else torch.bmm(outputs, layer.transpose(1, 2))
        yield product if k == 1 else product.view(b, k, groups, *product.shape[1:]).sum(1).flatten(0, 1)


def _dense_layers(rows: _Rows) -> Tensor:
    _, channels, _, *others = rows.weight_shape
    products = _layer_products(rows, transposed=False)
    parts = [part.view(-1, rows.weight_shape[0], channels, 1, *others) for part in products]
    return torch.cat(parts, 3)


def _dense_grouped(rows: _Rows) -> Tensor:
    """The weight gradient of one convolution that has every sample's channels as groups of its own, and batch k."""
    geometry, inputs, out_size = rows.geometry, rows.input, rows.out_size
    padding = tuple(before for before, _ in geometry.padding)
    natural = out_size == geometry.output_size(tuple(inputs.shape[3:]))
    if not natural or any(before != after for before, after in geometry.padding):
        inputs, padding = rows.read().transpose(1, 2), (0,) * len(out_size)
    b = inputs.shape[0]
    weight_grad: Tensor = torch.ops.aten.convolution_backward(
        rows.grad_out.transpose(0, 1).flatten(1, 2).contiguous(),
        inputs.transpose(0, 1).flatten(1, 2).contiguous(),
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


def _gram_autocorrelation(rows: _Rows) -> Tensor:
    """The Gram matrices of the patches (b G, T, T), from that of the input: the sum of its windows shifted alike."""
    geometry, read = rows.geometry, rows.read()
    groups, positions = rows.group_shape
    columns = read.reshape(groups, -1, prod(read.shape[2:]))
    gram = torch.bmm(columns.transpose(1, 2), columns).view(groups, *read.shape[2:], *read.shape[2:])
    result = read.new_zeros(groups, *(read.shape[2], *rows.out_size) * 2)
    for offset in itertools.product(*map(range, geometry.kernel_size)):
        axes = zip(offset, geometry.dilation, geometry.stride, rows.out_size, strict=True)
        window = tuple(slice(o * gap, o * gap + step * (out - 1) + 1, step) for o, gap, step, out in axes)
        whole = slice(None)
        result += gram[(whole, whole, *window, whole, *window)]
    return result.view(groups, positions, positions)


def _gram_unfolded(rows: _Rows) -> Tensor:
    unfolded = rows.unfolded()
    return torch.bmm(unfolded.transpose(1, 2), unfolded)


_DENSE: dict[PatchKernel, Callable[[_Rows], Tensor]] = {
    "unfolded": _dense_unfolded,
    "layers": _dense_layers,
    "grouped": _dense_grouped,
}
_GRAM: dict[PatchKernel, Callable[[_Rows], Tensor]] = {
    "autocorrelation": _gram_autocorrelation,
    "unfolded gram": _gram_unfolded,
}


def _choose(grad_out: Tensor, inputs: Tensor, geometry: PatchGeometry, dtype: torch.dtype, dense: bool) -> PatchKernel:
    out_size = tuple(grad_out.shape[3:])
    likely = patch_kernel(
        rows=inputs.shape[1],
        in_channels=inputs.shape[2],
        out_channels=grad_out.shape[2],
        groups=geometry.groups,
        kernel_size=geometry.kernel_size,
        extent=geometry.extent(out_size),
        out_size=out_size,
        layers=geometry.layer_numbers(inputs.shape[2], out_size),
        stride=geometry.stride[-1],
        item_size=dtype.itemsize,
        device=inputs.device,
        dense=dense,
    )
    if not current_options().autotune:
        return likely
    whole, budget = _Rows(grad_out, inputs, geometry), memory_budget(inputs.device)
    fitting = [
        kernel
        for kernel in (_DENSE if dense else _DENSE | _GRAM)
        if kernel == likely or _bytes_each(kernel, whole, dtype, dense) <= budget
    ]
    run = _dense_by if dense else _squares_by
    work = ("patches", dense, grad_out.shape, inputs.shape, grad_out.dtype, inputs.dtype, geometry, budget)
    return fastest(
        work, {kernel: partial(run, kernel, grad_out, inputs, geometry) for kernel in fitting}, inputs.device
    )


def _bytes_each(kernel: PatchKernel, rows: _Rows, dtype: torch.dtype, dense: bool) -> int:
    """Bytes of a kernel's temporaries for one sample."""
    _, positions = rows.group_shape
    result, unfolded = prod(rows.weight_shape), positions * rows.input.shape[2] * prod(rows.geometry.kernel_size)
    read = rows.input.shape[1] * prod(rows.geometry.extent(rows.out_size))
    inputs, outputs = read * rows.input.shape[2], positions * rows.weight_shape[0]
    layers = rows.input.shape[1] * rows.geometry.layer_numbers(rows.input.shape[2], rows.out_size)
    along_first = rows.input.shape[1] * result // rows.geometry.kernel_size[0]
    numbers = {
        "unfolded": inputs + unfolded + result,
        "layers": inputs + layers + (2 * result if dense else outputs + 2 * along_first),
        "grouped": inputs + outputs + 2 * result,
        "unfolded gram": inputs + unfolded + 3 * rows.geometry.groups * positions**2,
        "autocorrelation": inputs + rows.geometry.groups * (read**2 + 3 * positions**2),
    }
    return numbers[kernel] * dtype.itemsize


def _real_and_imaginary(grad_out: Tensor, inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Real and imaginary part of a complex gradient as two real ones, with twice the rows."""
    a, b, x, y = grad_out.real, grad_out.imag, inputs.real, inputs.imag
    return [(torch.cat([a, -b], 1), torch.cat([x, y], 1)), (torch.cat([a, b], 1), torch.cat([y, x], 1))]


def patches_dense(grad_out: Tensor, inputs: Tensor, geometry: PatchGeometry) -> Tensor:
    """sum_kt grad_out[k, :, t] (x) patch[k, t], by the cheapest kernel.

    Args:
        grad_out: (B, k, O, *out).
        inputs: (B, k, C, *in).
        geometry: where the patches lie.

    Returns:
        (B, O, C/groups, *kernel).
    """
    dtype = accumulation_dtype(grad_out, inputs)
    whole = _Rows(grad_out, inputs, geometry)
    if dtype.is_complex:
        parts = _real_and_imaginary(grad_out.to(dtype), inputs.to(dtype))
        return torch.complex(*(patches_dense(*part, geometry) for part in parts))
    size = (inputs.shape[0], *whole.weight_shape)
    if not (grad_out.numel() and inputs.numel()):
        return torch.zeros(size, dtype=dtype, device=inputs.device)
    return _dense_by(_choose(grad_out, inputs, geometry, dtype, dense=True), grad_out, inputs, geometry)


def _dense_by(kernel: PatchKernel, grad_out: Tensor, inputs: Tensor, geometry: PatchGeometry) -> Tensor:
    """The gradients (B, O, C/groups, *kernel) by this kernel."""
    dtype, whole = accumulation_dtype(grad_out, inputs), _Rows(grad_out, inputs, geometry)
    parts = list(chunks(inputs.shape[0], _bytes_each(kernel, whole, dtype, dense=True), inputs.device))
    if len(parts) == 1:
        return _DENSE[kernel](_Rows(grad_out.to(dtype), inputs.to(dtype), geometry)).contiguous()
    result = torch.empty((inputs.shape[0], *whole.weight_shape), dtype=dtype, device=inputs.device)
    for part in parts:
        result[part] = _DENSE[kernel](_Rows(grad_out[part].to(dtype), inputs[part].to(dtype), geometry))
    return result


def patches_sq_norm(grad_out: Tensor, inputs: Tensor, geometry: PatchGeometry) -> Tensor:
    """|sum_kt grad_out[k, :, t] (x) patch[k, t]|^2, by the cheapest kernel.

    Args:
        grad_out: (B, k, O, *out).
        inputs: (B, k, C, *in).
        geometry: where the patches lie.

    Returns:
        (B,).
    """
    dtype = accumulation_dtype(grad_out, inputs)
    if dtype.is_complex:
        parts = _real_and_imaginary(grad_out.to(dtype), inputs.to(dtype))
        return patches_sq_norm(*parts[0], geometry) + patches_sq_norm(*parts[1], geometry)
    if not (grad_out.numel() and inputs.numel()):
        return zeros(inputs, dtype)
    kernel = _choose(grad_out, inputs, geometry, dtype, dense=False)
    value, scale = _squares_by(kernel, grad_out, inputs, geometry)
    suspect = cancelled(value, scale)
    if kernel in _GRAM and suspect.any():
        wide = wide_dtype(value)
        with kernel_options(replace(current_options(), autotune=False)):  # each batch has another number of them
            dense = patches_dense(grad_out[suspect].to(wide), inputs[suspect].to(wide), geometry)
        value[suspect] = dense_sq_norm(dense).to(value.dtype)
    return value


def _squares_by(
    kernel: PatchKernel, grad_out: Tensor, inputs: Tensor, geometry: PatchGeometry
) -> tuple[Tensor, Tensor]:
    """The squared norms (B,) by this kernel, and for a Gram kernel what they were if the terms were orthogonal."""
    dtype, whole = accumulation_dtype(grad_out, inputs), _Rows(grad_out, inputs, geometry)
    value, scale = zeros(inputs, dtype), zeros(inputs, dtype)
    each = _bytes_each(kernel, whole, dtype, dense=False)
    for part in chunks(inputs.shape[0], each, inputs.device):
        for outputs in _output_channels(kernel, each, whole, dtype):
            rows = _Rows(grad_out[part, :, outputs].to(dtype), inputs[part].to(dtype), geometry)
            if kernel == "layers":
                squares = [dense_sq_norm(product) for product in _layer_products(rows, transposed=True)]
                value[part] += torch.stack(squares).sum(0).view(-1, geometry.groups).sum(1)
                continue
            if kernel in _DENSE:
                value[part] += dense_sq_norm(_DENSE[kernel](rows))
                continue
            columns = rows.output_rows()
            products = torch.bmm(columns.transpose(1, 2), columns) * _GRAM[kernel](rows)
            value[part] = products.flatten(1).sum(1).view(-1, geometry.groups).sum(1)
            diagonal = products.diagonal(dim1=1, dim2=2).sum(1)
            scale[part] = diagonal.view(-1, geometry.groups).sum(1)
    return value, scale


def _output_channels(kernel: PatchKernel, each: int, rows: _Rows, dtype: torch.dtype) -> list[slice]:
    """Which output channels are taken at once: all, unless one sample's gradient alone is too large for the memory."""
    if kernel in _GRAM or rows.geometry.groups > 1 or each <= memory_budget(rows.input.device):
        return [slice(None)]
    return list(chunks(rows.weight_shape[0], 2 * prod(rows.weight_shape[1:]) * dtype.itemsize, rows.input.device))


def patches_terms_sq_norm(grad_out: Tensor, inputs: Tensor, geometry: PatchGeometry) -> Tensor:
    """sum_kt |grad_out[k, :, t]|^2 |patch[k, t]|^2, the squared norm if the terms were orthogonal: (B,)."""
    dtype = accumulation_dtype(grad_out, inputs)
    if not (grad_out.numel() and inputs.numel()):
        return zeros(inputs, dtype)
    groups = geometry.groups
    squares = [
        torch.unflatten(x.to(dtype).abs().square(), 2, (groups, -1)).sum(3).to(dtype.to_real())
        for x in (grad_out, inputs)
    ]
    rows = _Rows(squares[0], squares[1], geometry)
    kernel_axes = tuple(range(2, 2 + len(geometry.kernel_size)))
    products: Tensor = squares[0].transpose(1, 2) * rows.windows(rows.read()).sum(kernel_axes)
    return products.flatten(1).sum(1)
