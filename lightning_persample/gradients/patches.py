"""Convolutions: the per-sample weight gradient and its squared norm.

Axis letters: b samples, k rows of one sample, c input channels, o output channels, t positions of the output. A
convolution's weight gradient is the sum over k and t of grad_out[k, :, t] (x) patch[k, t], where patch[k, t] holds the
input under the kernel at output position t.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lightning_persample.gradients.cost import PatchKernel, PatchSizes, chunks, fits, forming_kernel, patch_kernel
from lightning_persample.gradients.geometry import PatchGeometry
from lightning_persample.gradients.norms import dense_sq_norm, sum_and_trace, zeros
from lightning_persample.gradients.patch_kernels import DENSE, GRAM, Rows, fourier_gradients, layer_products
from lightning_persample.gradients.precision import Later, accumulation_dtype, corrected, wide_dtype


@lru_cache(4096)
def _bytes_each(kernel: PatchKernel, sizes: PatchSizes, dense: bool) -> int:
    """Bytes of a kernel's temporaries for one sample."""
    groups, result, unfolded = sizes.geometry.groups, sizes.result, sizes.unfolded
    inputs, outputs = sizes.read * sizes.in_channels, sizes.positions * sizes.out_channels
    along_first = sizes.rows * result // sizes.geometry.kernel_size[0]
    numbers = {
        "unfolded": inputs + unfolded + result,
        "layers": inputs + sizes.rows * sizes.layers + (2 * result if dense else outputs + 2 * along_first),
        "grouped": inputs + outputs + 2 * result,
        "diagonals": inputs + outputs + 2 * result + sizes.column_products,
        "unfolded gram": inputs + unfolded + 2 * groups * sizes.positions**2,
        "autocorrelation": inputs + 3 * groups * sizes.read**2,
        "fourier": inputs + outputs + 2 * sizes.frequencies * sizes.rows * sizes.out_channels + result,
    }
    return numbers[kernel] * sizes.item_size


def _real_and_imaginary(grad_out: Tensor, inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Real and imaginary part of a complex gradient as two real ones, with twice the rows."""
    a, b, x, y = grad_out.real, grad_out.imag, inputs.real, inputs.imag
    return [(torch.cat([a, -b], 1), torch.cat([x, y], 1)), (torch.cat([a, b], 1), torch.cat([y, x], 1))]


def patches_dense(grad_out: Tensor, inputs: Tensor, geometry: PatchGeometry) -> Tensor:
    """sum_kt grad_out[k, :, t] (x) patch[k, t], by the cheapest kernel."""
    # grad_out (B, k, O, *out), inputs (B, k, C, *in) -> (B, O, C/groups, *kernel)
    dtype = accumulation_dtype(grad_out, inputs)
    whole = Rows(grad_out, inputs, geometry)
    if dtype.is_complex:
        parts = _real_and_imaginary(grad_out.to(dtype), inputs.to(dtype))
        return torch.complex(*(patches_dense(*part, geometry) for part in parts))
    size = (inputs.shape[0], *whole.weight_shape)
    if not (grad_out.numel() and inputs.numel()):
        return torch.zeros(size, dtype=dtype, device=inputs.device)
    sizes = whole.sizes(dtype)
    return _dense_by(patch_kernel(sizes, dense=True), grad_out, inputs, geometry, sizes)


def _dense_by(
    kernel: PatchKernel, grad_out: Tensor, inputs: Tensor, geometry: PatchGeometry, sizes: PatchSizes
) -> Tensor:
    """The gradients (B, O, C/groups, *kernel) by this kernel."""
    dtype, whole = accumulation_dtype(grad_out, inputs), Rows(grad_out, inputs, geometry)
    parts = list(chunks(inputs.shape[0], _bytes_each(kernel, sizes, True), inputs.device))
    if len(parts) == 1:
        return DENSE[kernel](Rows(grad_out.to(dtype), inputs.to(dtype), geometry)).contiguous()
    result = torch.empty((inputs.shape[0], *whole.weight_shape), dtype=dtype, device=inputs.device)
    for part in parts:
        result[part] = DENSE[kernel](Rows(grad_out[part].to(dtype), inputs[part].to(dtype), geometry))
    return result


def patches_sq_norm(grad_out: Tensor, inputs: Tensor, geometry: PatchGeometry, later: Later | None = None) -> Tensor:
    """|sum_kt grad_out[k, :, t] (x) patch[k, t]|^2, by the cheapest kernel."""
    # grad_out (B, k, O, *out), inputs (B, k, C, *in) -> (B,)
    dtype = accumulation_dtype(grad_out, inputs)
    if dtype.is_complex:
        parts = _real_and_imaginary(grad_out.to(dtype), inputs.to(dtype))
        return patches_sq_norm(*parts[0], geometry) + patches_sq_norm(*parts[1], geometry)
    if not (grad_out.numel() and inputs.numel()):
        return zeros(inputs, dtype)
    sizes = Rows(grad_out, inputs, geometry).sizes(dtype)
    kernel = patch_kernel(sizes, dense=False)
    value, scale = _squares_by(kernel, grad_out, inputs, geometry, sizes)

    def again(some: Tensor) -> Tensor:
        wide = wide_dtype(value)
        return dense_sq_norm(patches_dense(grad_out[some].to(wide), inputs[some].to(wide), geometry)).to(value.dtype)

    return value if scale is None else corrected(value, scale, again, grad_out, later)


def patches_are_formed(grad_out: Tensor, inputs: Tensor, geometry: PatchGeometry) -> bool:
    """Whether the cheapest way to the squared norm forms the gradient."""
    sizes = Rows(grad_out, inputs, geometry).sizes(accumulation_dtype(grad_out, inputs))
    return patch_kernel(sizes, dense=False) not in (*GRAM, "fourier")


def _squares_by(
    kernel: PatchKernel, grad_out: Tensor, inputs: Tensor, geometry: PatchGeometry, sizes: PatchSizes
) -> tuple[Tensor, Tensor | None]:
    """The squared norms (B,) by this kernel, and what to compare them with where errors may show that cancelled."""
    dtype = accumulation_dtype(grad_out, inputs)
    each = _bytes_each(kernel, sizes, False)
    squares, scales = [], []
    for part in chunks(inputs.shape[0], each, inputs.device):
        read = inputs[part].to(dtype)
        if kernel in GRAM:
            square, scale = _gram_sums(GRAM[kernel](Rows(grad_out[part].to(dtype), read, geometry)), geometry.groups)
            scales.append(scale)
        elif kernel == "fourier":
            formed, scale = fourier_gradients(Rows(grad_out[part].to(dtype), read, geometry))
            square = dense_sq_norm(formed)
            scales.append(scale)
        else:
            channels = _output_channels(each, sizes)
            outputs = (grad_out[part] if len(channels) == 1 else grad_out[part, :, some] for some in channels)
            terms = [_formed_squares(kernel, Rows(some.to(dtype), read, geometry)) for some in outputs]
            square = terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)
        squares.append(square)
    return _joined(squares), _joined(scales) if scales else None


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _gram_sums(products: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """All entries of (b G, m, m), and its diagonal, added up for each sample: (b,) and (b,)."""
    sums, diagonal = sum_and_trace(products)
    return (sums, diagonal) if groups == 1 else (sums.view(-1, groups).sum(1), diagonal.view(-1, groups).sum(1))


def _formed_squares(kernel: PatchKernel, rows: Rows) -> Tensor:
    """The squared norm of each sample's gradient, formed by this kernel: (b,)."""
    if kernel != "layers":
        return dense_sq_norm(DENSE[kernel](rows))
    squares = torch.stack([dense_sq_norm(product) for product in layer_products(rows, transposed=True)]).sum(0)
    return squares if rows.geometry.groups == 1 else squares.view(-1, rows.geometry.groups).sum(1)


def _output_channels(each: int, sizes: PatchSizes) -> list[slice]:
    """Which output channels are taken at once: all, unless one sample's gradient alone is too large for the memory."""
    if sizes.geometry.groups > 1 or fits(each, sizes.device):
        return [slice(None)]
    of_channel = 2 * sizes.result // sizes.out_channels * sizes.item_size
    return list(chunks(sizes.out_channels, of_channel, sizes.device))


def patches_sq_norm_and_sum(grad_out: Tensor, inputs: Tensor, geometry: PatchGeometry) -> tuple[Tensor, Tensor]:
    """The squared norms of sum_kt grad_out[k, :, t] (x) patch[k, t], and the sum over the samples, formed once."""
    # grad_out (B, k, O, *out), inputs (B, k, C, *in) -> (B,) and (O, C/groups, *kernel)
    dtype = accumulation_dtype(grad_out, inputs)
    whole = Rows(grad_out, inputs, geometry)
    if not (grad_out.numel() and inputs.numel()):
        return zeros(inputs, dtype), torch.zeros(whole.weight_shape, dtype=dtype, device=inputs.device)
    sizes = whole.sizes(dtype)
    kernel = forming_kernel(sizes)
    bytes_each = _bytes_each(kernel, sizes, False)
    squares: list[Tensor] = []
    total: Tensor | None = None
    for part in chunks(inputs.shape[0], bytes_each, inputs.device):
        rows = Rows(grad_out[part].to(dtype), inputs[part].to(dtype), geometry)
        if kernel == "layers":
            out_channels, channels, _, *others = rows.weight_shape
            terms, sums = [], []
            for product in layer_products(rows, transposed=False):
                formed = product.view(-1, out_channels, channels, *others)
                terms.append(dense_sq_norm(formed))
                sums.append(formed.sum(0))
            squares.append(torch.stack(terms).sum(0))
            added = torch.stack(sums, 2)
        else:
            formed = DENSE[kernel](rows)
            squares.append(dense_sq_norm(formed))
            added = formed.sum(0)
        total = added if total is None else total.add_(added)
    assert total is not None  # there are samples
    return _joined(squares), total


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
    rows = Rows(squares[0], squares[1], geometry)
    kernel_axes = tuple(range(2, 2 + len(geometry.kernel_size)))
    products: Tensor = squares[0].transpose(1, 2) * rows.windows(rows.read()).sum(kernel_axes)
    return products.flatten(1).sum(1)


def patches_row_sums(grad_out: Tensor, inputs: Tensor, geometry: PatchGeometry) -> Tensor:
    """Of the entries in each row of sum_kt grad_out[k, :, t] (x) patch[k, t]: (B, O)."""
    dtype, (B, _, outputs) = accumulation_dtype(grad_out, inputs), grad_out.shape[:3]
    read = torch.unflatten(inputs, 2, (geometry.groups, -1)).sum(3, dtype=dtype)
    rows = Rows(grad_out.to(dtype), read, geometry)
    kernel_axes = tuple(range(2, 2 + len(geometry.kernel_size)))
    covered = rows.windows(rows.read()).sum(kernel_axes).reshape(B * geometry.groups, -1, 1)
    return torch.bmm(rows.output_rows(), covered).view(B, outputs)
