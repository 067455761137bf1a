"""Convolutions: the per-sample weight gradient and its squared norm.

Axis letters: b samples, k rows of one sample, c input channels, o output channels, t positions of the output. A
convolution's weight gradient is the sum over k and t of grad_out[k, :, t] (x) patch[k, t], where patch[k, t] holds the
input under the kernel at output position t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_persample.gradients.cost import PatchKernel, PatchSizes, chunks, patch_kernel
from lightning_persample.gradients.geometry import PatchGeometry
from lightning_persample.gradients.norms import cancelled, dense_sq_norm, zeros
from lightning_persample.gradients.precision import accumulation_dtype, wide_dtype

__all__ = ["patches_dense", "patches_sq_norm", "patches_sq_norm_and_sum", "patches_terms_sq_norm"]

_SHARE = 3  # gradients that are summed as soon as they are formed stay in the cache where few are formed at a time


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

    def sizes(self, dtype: torch.dtype) -> PatchSizes:
        """What the kernels cost depends on this, where sums are taken in `dtype`."""
        rows, channels, device = self.input.shape[1], self.input.shape[2], self.input.device
        return PatchSizes(rows, channels, self.grad_out.shape[2], self.geometry, self.out_size, dtype.itemsize, device)

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


def _layer_products(rows: _Rows) -> Iterator[Tensor]:
    """The gradient's entries (b G, O/G, C K' / G) for each offset of the kernel along the first axis."""
    b, k, groups = rows.grad_out.shape[0], rows.grad_out.shape[1], rows.geometry.groups
    single = _Rows(rows.grad_out.flatten(0, 1).unsqueeze(1), rows.input.flatten(0, 1).unsqueeze(1), rows.geometry)
    outputs = single.output_rows()
    layers, offsets = single.layers()
    for phase, positions in offsets:
        product = torch.bmm(outputs, layers[:, :, phase, positions].transpose(1, 2))
        yield product if k == 1 else product.view(b, k, groups, *product.shape[1:]).sum(1).flatten(0, 1)


def _dense_layers(rows: _Rows) -> Tensor:
    _, channels, _, *others = rows.weight_shape
    parts = [part.view(-1, rows.weight_shape[0], channels, 1, *others) for part in _layer_products(rows)]
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


def _products_autocorrelation(rows: _Rows) -> Tensor:
    """Products of the Gram matrices of output gradient and patches, (b G, m, m), without unfolding.

    With x x^T over the n positions that are read, the Gram matrix of the patches is the sum of its copies shifted alike
    along both sides by each offset of the kernel. In memory such a shift is one of n + 1 numbers for every position, so
    that whole matrices are added, one axis of the kernel after the other; what crosses an edge lies at no output.

    Returns:
        One number for each pair of output positions, and zeros.
    """
    geometry, read = rows.geometry, rows.read()
    groups, _ = rows.group_shape
    positions = prod(read.shape[2:])
    columns = read.reshape(groups, -1, positions)
    gram = torch.bmm(columns.transpose(1, 2), columns).view(groups, -1)
    strides = [prod(read.shape[axis + 1 :]) for axis in range(3, read.dim())]
    for size, gap, stride in zip(geometry.kernel_size, geometry.dilation, strides, strict=True):
        if size > 1:
            step = gap * stride * (positions + 1)
            length = gram.shape[1] - (size - 1) * step
            added = gram[:, :length] + gram[:, step : step + length]
            for offset in range(2, size):
                added += gram[:, offset * step : offset * step + length]
            gram = added
    out_size = (rows.grad_out.shape[1], *rows.out_size)
    along = [prod(read.shape[3:]), *(step * stride for step, stride in zip(geometry.stride, strides, strict=True))]
    if set(geometry.stride) == {1}:  # the gradient of the output in the places of the input, so that rows fit to rows
        missing = [one for axis in reversed(range(3, read.dim())) for one in (0, read.shape[axis] - out_size[axis - 2])]
        last = 1 + sum((size - 1) * stride for size, stride in zip(out_size, along, strict=True))
        outputs = F.pad(rows.grad_out, missing).transpose(1, 2).reshape(groups, -1, positions)[:, :, :last]
        products = torch.bmm(outputs.transpose(1, 2), outputs)
        products *= gram.as_strided(products.shape, (gram.stride(0), positions, 1))
        return products
    outputs = rows.output_rows()
    products = torch.bmm(outputs.transpose(1, 2), outputs)
    picked = (gram.stride(0), *(stride * positions for stride in along), *along)
    products.view(groups, *out_size, *out_size).mul_(gram.as_strided((groups, *out_size, *out_size), picked))
    return products


def _products_unfolded(rows: _Rows) -> Tensor:
    unfolded, outputs = rows.unfolded(), rows.output_rows()
    products = torch.bmm(unfolded.transpose(1, 2), unfolded)
    products *= torch.bmm(outputs.transpose(1, 2), outputs)
    return products


_DENSE: dict[PatchKernel, Callable[[_Rows], Tensor]] = {
    "unfolded": _dense_unfolded,
    "layers": _dense_layers,
    "grouped": _dense_grouped,
}
_GRAM: dict[PatchKernel, Callable[[_Rows], Tensor]] = {
    "autocorrelation": _products_autocorrelation,
    "unfolded gram": _products_unfolded,
}


def _bytes_each(kernel: PatchKernel, sizes: PatchSizes) -> int:
    """Bytes of a kernel's temporaries for one sample."""
    groups, rows = sizes.geometry.groups, sizes.rows
    numbers = {
        "unfolded": sizes.unfolded + sizes.result,
        "layers": rows * sizes.layers + sizes.read * sizes.in_channels + 2 * sizes.result,
        "grouped": 2 * sizes.result + sizes.read * sizes.in_channels + sizes.positions * sizes.out_channels,
        "unfolded gram": sizes.unfolded + 2 * groups * sizes.positions**2,
        "autocorrelation": 3 * groups * sizes.read**2,
    }
    return numbers[kernel] * sizes.item_size


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
    result = torch.empty(size, dtype=dtype, device=inputs.device)
    sizes = whole.sizes(dtype)
    kernel = patch_kernel(sizes, dense=True)
    for part in chunks(inputs.shape[0], _bytes_each(kernel, sizes), inputs.device):
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
    value, scale = zeros(inputs, dtype), zeros(inputs, dtype)
    if not (grad_out.numel() and inputs.numel()):
        return value
    sizes = _Rows(grad_out, inputs, geometry).sizes(dtype)
    kernel = patch_kernel(sizes, dense=False)
    for part in chunks(inputs.shape[0], _bytes_each(kernel, sizes), inputs.device):
        rows = _Rows(grad_out[part].to(dtype), inputs[part].to(dtype), geometry)
        if kernel == "layers":
            squares = [dense_sq_norm(product) for product in _layer_products(rows)]
            value[part] = torch.stack(squares).sum(0).view(-1, geometry.groups).sum(1)
            continue
        if kernel in _DENSE:
            value[part] = dense_sq_norm(_DENSE[kernel](rows))
            continue
        products = _GRAM[kernel](rows)
        value[part] = products.flatten(1).sum(1).view(-1, geometry.groups).sum(1)
        diagonal = products.diagonal(dim1=1, dim2=2).sum(1)
        scale[part] = diagonal.view(-1, geometry.groups).sum(1)
    suspect = cancelled(value, scale)
    if kernel in _GRAM and suspect.any():
        wide = wide_dtype(value)
        dense = patches_dense(grad_out[suspect].to(wide), inputs[suspect].to(wide), geometry)
        value[suspect] = dense_sq_norm(dense).to(value.dtype)
    return value


def patches_sq_norm_and_sum(grad_out: Tensor, inputs: Tensor, geometry: PatchGeometry) -> tuple[Tensor, Tensor]:
    """The squared norms of sum_kt grad_out[k, :, t] (x) patch[k, t], and the sum over the samples, formed once.

    Args:
        grad_out: (B, k, O, *out).
        inputs: (B, k, C, *in).
        geometry: where the patches lie.

    Returns:
        (B,) and (O, C/groups, *kernel).
    """
    dtype = accumulation_dtype(grad_out, inputs)
    whole = _Rows(grad_out, inputs, geometry)
    squares = zeros(inputs, dtype)
    out_channels, channels, first, *others = whole.weight_shape
    total = torch.zeros(out_channels, channels, first, prod(others), dtype=dtype, device=inputs.device)
    if not (grad_out.numel() and inputs.numel()):
        return squares, total.view(whole.weight_shape)
    sizes = whole.sizes(dtype)
    kernel = patch_kernel(sizes, dense=True)
    bytes_each = _bytes_each(kernel, sizes) + _SHARE * sizes.result * sizes.item_size
    for part in chunks(inputs.shape[0], bytes_each, inputs.device):
        rows = _Rows(grad_out[part].to(dtype), inputs[part].to(dtype), geometry)
        samples = part.stop - part.start
        if kernel == "layers":
            for offset, product in enumerate(_layer_products(rows)):
                formed = product.view(samples, out_channels, channels, -1)
                squares[part] += dense_sq_norm(formed)
                total[:, :, offset] += formed.sum(0)
        else:
            formed = _DENSE[kernel](rows).view(samples, *total.shape)
            squares[part] = dense_sq_norm(formed)
            total += formed.sum(0)
    return squares, total.view(whole.weight_shape)


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
