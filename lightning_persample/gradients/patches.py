"""Gradients of a convolution's weight, by the cheapest of several kernels.

Axis letters: b samples, k rows of one sample, c input channels, o output channels, t positions of the output. A
convolution's weight gradient is the sum over k and t of grad_out[k, :, t] (x) patch[k, t], where patch[k, t] holds the
input under the kernel at output position t.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from lightning_persample.gradients import norms, precision
from lightning_persample.gradients.cost import (
    PatchKernel,
    PatchSizes,
    by_chunks,
    chunks,
    fits,
    forming_kernel,
    joined,
    patch_costs,
    patch_kernel,
)
from lightning_persample.gradients.geometry import PatchGeometry
from lightning_persample.gradients.moments import Moments, moment, with_one
from lightning_persample.gradients.patch_kernels import (
    DENSE,
    GRAM,
    Rows,
    convolved,
    fourier_gradients,
    layer_products,
)
from lightning_persample.gradients.precision import accumulation_dtype
from lightning_persample.gradients.projection import Factors
from lightning_persample.gradients.sample_gradient import SampleGradient
from lightning_persample.gradients.structure import shapes

_WRITTEN = 32  # one number of a projected side, written and read again, in multiply-adds


@dataclass(frozen=True, eq=False)
class Patches(SampleGradient):
    """A convolution's weight gradient, g[b] = sum_kt grad_out[b, k, :, t] (x) patch[b, k, t]; nothing is conjugated.

    patch[b, k, t] is what the kernel covers at output position t of input[b, k]; it is not built unless this is the
    cheapest way. With groups, each group of output channels sees its own group of input channels.

    >>> geometry = PatchGeometry((3, 3), stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1))
    >>> gradient = Patches(torch.ones(4, 1, 8, 5, 5), torch.ones(4, 1, 2, 5, 5), geometry)
    >>> gradient.shape, gradient.dense().shape
    (torch.Size([8, 2, 3, 3]), torch.Size([4, 8, 2, 3, 3]))

    Attributes:
        grad_out: (B, k, O, *out), k rows per sample.
        input: (B, k, C, *in).
        geometry: where the patches lie in the input.

    Raises:
        ValueError: when the shapes do not agree with each other or with the geometry.
    """

    grad_out: Tensor
    input: Tensor
    geometry: PatchGeometry

    def __post_init__(self) -> None:
        axes, groups = 3 + len(self.geometry.kernel_size), self.geometry.groups
        of_output, of_input = self.grad_out.shape, self.input.shape
        if not (len(of_output) == len(of_input) == axes) or of_output[:2] != of_input[:2]:
            raise ValueError(
                f"Patches: grad_out has shape (B, k, O, *out) and input (B, k, C, *in) with {axes - 3} spatial axes, "
                f"got {self._sizes()}."
            )
        if of_output[2] % groups or of_input[2] % groups:
            raise ValueError(f"Patches: O and C are multiples of groups, got {self._sizes()} and {groups} groups.")
        most = self.geometry.output_size(tuple(of_input[3:]))
        if of_output[3:] != most and any(out > limit for out, limit in zip(of_output[3:], most, strict=True)):
            raise ValueError(
                f"Patches: at most {most} patches fit into the input, got {self._sizes()} and {self.geometry}."
            )

    def _sizes(self) -> str:
        return shapes(grad_out=self.grad_out, input=self.input)

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter, (O, C/groups, *kernel_size)."""
        channels = self.input.shape[2] // self.geometry.groups
        return torch.Size((self.grad_out.shape[2], channels, *self.geometry.kernel_size))

    def _rows(self) -> Rows:
        return Rows(self.grad_out, self.input, self.geometry)

    def _is_empty(self) -> bool:
        return not (self.grad_out.numel() and self.input.numel())

    def _real_and_imaginary(self) -> tuple[Patches, Patches]:
        """Both parts of a complex gradient as real ones, with twice the rows."""
        grad_out, inputs = self.grad_out.to(self.dtype), self.input.to(self.dtype)
        a, b, x, y = grad_out.real, grad_out.imag, inputs.real, inputs.imag
        real = Patches(torch.cat([a, -b], 1), torch.cat([x, y], 1), self.geometry)
        return real, Patches(torch.cat([a, b], 1), torch.cat([y, x], 1), self.geometry)

    def _dense(self) -> Tensor:
        dtype, rows = self.dtype, self._rows()
        if dtype.is_complex:
            one, other = self._real_and_imaginary()
            return torch.complex(one._dense(), other._dense())
        if self._is_empty():
            return torch.zeros(self.batch_size, *rows.weight_shape, dtype=dtype, device=self.device)
        sizes = rows.sizes(dtype)
        kernel = patch_kernel(sizes, dense=True)
        parts = list(chunks(self.batch_size, _bytes_each(kernel, sizes, True), self.device))
        if len(parts) == 1:
            return DENSE[kernel](rows.part(slice(None), dtype)).contiguous()
        result = torch.empty(self.batch_size, *rows.weight_shape, dtype=dtype, device=self.device)
        for part in parts:
            result[part] = DENSE[kernel](rows.part(part, dtype))
        return result

    def _sq_norm(self, later: precision.Later | None = None) -> Tensor:
        dtype = self.dtype
        if dtype.is_complex:
            one, other = self._real_and_imaginary()
            return one._sq_norm() + other._sq_norm()
        if self._is_empty():
            return self._zeros(dtype)
        rows = self._rows()
        sizes = rows.sizes(dtype)
        value, scale = self._squares(patch_kernel(sizes, dense=False), rows, sizes, dtype)

        def again(some: Tensor) -> Tensor:
            return norms.dense_sq_norm(self.pick(some)._widened()._dense()).to(value.dtype)

        return value if scale is None else precision.corrected(value, scale, again, self.grad_out, later)

    _sq_norm_or_later = _sq_norm

    def _squares(
        self, kernel: PatchKernel, rows: Rows, sizes: PatchSizes, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """The squared norms (B,) by a kernel, and what to compare them with where errors may show that cancelled."""
        each = _bytes_each(kernel, sizes, False) + norms.bytes_to_widen(self.grad_out, self.input, dtype=dtype)
        squares, scales = [], []
        for part in chunks(self.batch_size, each, self.device):
            if kernel in GRAM:
                sums = norms.sum_and_trace(GRAM[kernel](rows.part(part, dtype)))
                square, scale = (_of_groups(each, self.geometry.groups) for each in sums)
                scales.append(scale)
            elif kernel == "fourier":
                formed, scale = fourier_gradients(rows.part(part, dtype))
                square = norms.dense_sq_norm(formed)
                scales.append(scale)
            elif kernel == "product":
                square = _product_squares(rows.part(part, dtype))
            else:
                read, channels = self.input[part].to(dtype), _output_channels(each, sizes)
                grads = self.grad_out[part]
                outputs = (grads if len(channels) == 1 else grads[:, :, some] for some in channels)
                terms = [_formed_squares(kernel, Rows(some.to(dtype), read, self.geometry)) for some in outputs]
                square = terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)
            squares.append(square)
        return joined(squares), joined(scales) if scales else None

    def _is_formed(self) -> bool:
        return self._is_empty() or patch_kernel(self._rows().sizes(self.dtype), dense=False) in DENSE

    def _sq_norm_and_sum(self) -> tuple[Tensor, Tensor]:
        dtype, rows = self.dtype, self._rows()
        if dtype.is_complex:
            return super()._sq_norm_and_sum()
        if self._is_empty():
            return self._zeros(dtype), torch.zeros(rows.weight_shape, dtype=dtype, device=self.device)
        sizes = rows.sizes(dtype)
        kernel = forming_kernel(sizes)
        squares: list[Tensor] = []
        total: Tensor | None = None
        for part in chunks(self.batch_size, _bytes_each(kernel, sizes, False), self.device):
            if kernel == "layers":
                out_channels, channels, _, *others = rows.weight_shape
                terms, sums = [], []
                for product in layer_products(rows.part(part, dtype), transposed=False):
                    formed = product.view(-1, out_channels, channels, *others)
                    terms.append(norms.dense_sq_norm(formed))
                    sums.append(formed.sum(0))
                squares.append(torch.stack(terms).sum(0))
                added = torch.stack(sums, 2)
            else:
                formed = DENSE[kernel](rows.part(part, dtype))
                squares.append(norms.dense_sq_norm(formed))
                added = formed.sum(0)
            total = added if total is None else total.add_(added)
        assert total is not None  # there are samples
        return joined(squares), total

    def _terms_sq_norm(self) -> Tensor:
        dtype, groups = self.dtype, self.geometry.groups
        if self._is_empty():
            return self._zeros(dtype)
        outputs, inputs = (
            torch.unflatten(x.to(dtype).abs().square(), 2, (groups, -1)).sum(3).to(dtype.to_real())
            for x in (self.grad_out, self.input)
        )
        return (outputs.transpose(1, 2) * Rows(outputs, inputs, self.geometry).covered()).flatten(1).sum(1)

    def _dot(self, vector: Tensor) -> Tensor:
        # That is the convolution of the inputs by the vector, at the positions of the output, with grad_out.
        grad_out, inputs, dtype = self.grad_out, self.input, accumulation_dtype(self.grad_out, self.input, vector)
        if self._is_empty():
            return self._zeros(dtype)
        kernel, out_size = vector.to(dtype).conj().resolve_conj(), tuple(grad_out.shape[3:])

        def dots(part: slice) -> Tensor:
            grads = grad_out[part].to(dtype)
            out = convolved(inputs[part].to(dtype).flatten(0, 1), kernel, self.geometry, out_size)
            return norms.real_sum(out.unflatten(0, grads.shape[:2]).mul_(grads))

        bytes_each = 2 * (grad_out[:1].numel() + inputs[:1].numel()) * dtype.itemsize
        return by_chunks(self.batch_size, bytes_each, self.device, dots)

    def _row_dots(self, rows: Tensor) -> Tensor:
        # A convolution of the inputs by the rows, with grad_out.
        geometry, dtype, (_, _, outputs, *out_size) = self.geometry, self.dtype, self.grad_out.shape
        are_ones = {geometry.groups, *geometry.kernel_size, *geometry.stride} == {1}
        is_product = are_ones and [*self.input.shape[3:]] == out_size and not any(map(any, geometry.padding))
        kernel = rows.to(dtype) if is_product else rows.to(dtype).reshape(outputs, -1, *geometry.kernel_size)

        def dots(part: slice) -> Tensor:
            read, grads = self.input[part].to(dtype).flatten(0, 1), self.grad_out[part].to(dtype).flatten(3)
            # The product is of kernels of one element, without the copy of the kernel that a convolution makes.
            out = kernel @ read.flatten(2) if is_product else convolved(read, kernel, geometry, tuple(out_size))
            products = (grads * out.reshape(grads.shape)).sum(3)
            return products.squeeze(1) if products.shape[1] == 1 else products.sum(1)

        each = 2 * (norms.bytes_of_sample(self.grad_out, dtype) + norms.bytes_of_sample(self.input, dtype))
        return by_chunks(self.batch_size, each, self.device, dots)

    def _row_sums(self) -> Tensor:
        geometry, dtype = self.geometry, self.dtype
        read = torch.unflatten(self.input, 2, (geometry.groups, -1)).sum(3, dtype=dtype)
        rows = Rows(self.grad_out.to(dtype), read, geometry)
        covered = rows.covered().reshape(self.batch_size * geometry.groups, -1, 1)
        return torch.bmm(rows.output_rows(), covered).view(self.batch_size, self.grad_out.shape[2])

    def _by_row(self, factor: Tensor) -> Patches:
        grad_out = self.grad_out * factor.reshape(-1, *(1,) * (self.grad_out.dim() - 3))
        return Patches(grad_out, self.input, self.geometry)

    def _project(self, factors: Factors) -> Tensor:
        # The projected patches are the convolution of the inputs by the right matrix, so that nothing is unfolded.
        # Where few channels see each other, forming the small gradients costs less.
        a, b, dtype, right, rows = factors.rows, factors.columns, factors.dtype, factors.right, self._rows()
        if self._is_empty():
            return torch.zeros(self.batch_size, a * b, dtype=dtype, device=self.device)
        sizes = rows.sizes(dtype)
        if dtype.is_complex or _forming_is_cheaper(sizes, factors):
            return factors.by_chunks(
                self.grad_out, 2 * sizes.result, lambda part: factors.of(self._formed(part).flatten(2).to(dtype))
            )
        k, groups, (out_channels, channels, *kernel_size) = sizes.rows, self.geometry.groups, rows.weight_shape
        if right is None:
            right = torch.eye(b, dtype=dtype, device=self.device)
        kernel = right.view(b, channels, *kernel_size).repeat(groups, *(1,) * (1 + len(kernel_size)))
        left = None if factors.left is None else factors.left.view(a, groups, -1).transpose(0, 1)
        read, every = k * self.input[0, 0].numel(), torch.arange(groups, device=self.device)
        numbers = 2 * read + sizes.positions * (groups * (a + 2 * b) + out_channels) + k * groups * a * b

        def project(part: slice) -> Tensor:
            samples = part.stop - part.start
            patches = convolved(self.input[part].flatten(0, 1).to(dtype), kernel, self.geometry, rows.out_size)
            grads = self.grad_out[part].to(dtype).reshape(samples * k, groups, out_channels // groups, -1)
            if left is None:
                own = grads.new_zeros(samples * k, groups, *grads.shape[1:])  # each group's rows are zero elsewhere
                own[:, every, every] = grads
            elif groups == 1:
                own = torch.bmm(left.expand(samples * k, -1, -1), grads[:, 0])
            else:
                own = torch.einsum("gai,ngit->ngat", left, grads)
            own = own.reshape(samples * k * groups, a, -1)
            product = torch.bmm(own, patches.reshape(samples * k * groups, b, -1).mT)
            return product if k * groups == 1 else product.view(samples, k * groups, a, b).sum(1)

        return factors.by_chunks(self.grad_out, numbers, project)

    def _moments(self) -> Moments:
        # Of the output gradients and of the unfolded patches, those of all groups of channels together.
        grad_out, inputs = self.grad_out.to(self.dtype), self.input.to(self.dtype)
        whole = Rows(grad_out, inputs, self.geometry)
        of_rows = moment(grad_out.transpose(1, 2).flatten(2).mT.flatten(0, 1))
        each = 3 * whole.sizes(inputs.dtype).unfolded * inputs.dtype.itemsize
        of_columns = moment(inputs.new_zeros(0, prod(whole.weight_shape[1:]) + 1))
        for part in chunks(self.batch_size, each, self.device):
            rows = whole.part(part, inputs.dtype)
            counted = rows.output_rows().any(1).flatten()
            of_columns = of_columns + moment(with_one(rows.unfolded().mT.flatten(0, 1)[counted], 1.0))
        return of_rows, of_columns

    def times_one(self) -> Tensor:
        """The sum over rows and positions of the output gradients, (B, O)."""
        return self.grad_out.transpose(1, 2).flatten(2).sum(2, dtype=self.dtype)


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
        "fourier": 2 * sizes.frequencies * sizes.rows * sizes.out_channels + result,
        "product": unfolded,
    }
    return numbers[kernel] * sizes.item_size


def _of_groups(values: Tensor, groups: int) -> Tensor:
    """What the groups of channels of each sample have, (b G,), added up: (b,)."""
    return values if groups == 1 else values.view(-1, groups).sum(1)


def _product_squares(rows: Rows) -> Tensor:
    """The squared norm of each sample's gradient, of one product for each group of channels: (b,)."""
    squares = norms.sq_sum(rows.output_rows().squeeze(2)) * norms.sq_sum(rows.unfolded().squeeze(2))
    return _of_groups(squares, rows.geometry.groups)


def _formed_squares(kernel: PatchKernel, rows: Rows) -> Tensor:
    """The squared norm of each sample's gradient, formed by this kernel: (b,)."""
    if kernel != "layers":
        return norms.dense_sq_norm(DENSE[kernel](rows))
    squares = torch.stack([norms.dense_sq_norm(product) for product in layer_products(rows, transposed=True)]).sum(0)
    return _of_groups(squares, rows.geometry.groups)


def _output_channels(each: int, sizes: PatchSizes) -> list[slice]:
    """Which output channels are taken at once: all, unless one sample's gradient alone is too large for the memory."""
    if sizes.geometry.groups > 1 or fits(each, sizes.device):
        return [slice(None)]
    of_channel = 2 * sizes.result // sizes.out_channels * sizes.item_size
    return list(chunks(sizes.out_channels, of_channel, sizes.device))


def _forming_is_cheaper(sizes: PatchSizes, factors: Factors) -> bool:
    """Whether to form each sample's gradient and project that."""
    a, b = factors.rows, factors.columns
    groups, unfolded = sizes.geometry.groups, sizes.unfolded // sizes.positions
    d = unfolded // groups
    formed = min(patch_costs(sizes, dense=True).values())
    formed += min(sizes.out_channels * b * (d + a), d * a * (sizes.out_channels + b))
    each = unfolded * b + sizes.out_channels * a + groups * (a * b + _WRITTEN * (a + b))
    return formed < sizes.positions * each


MOST_SHIFT = 16
"""How many times as large as a row of an output's product a shift may be, whose rounding errors then do not show."""


def row_dots_of_output(
    grad_out: Tensor,
    output: Tensor,
    inputs: Tensor,
    shift: Tensor | None,
    sums: Tensor | None,
    lengths: Tensor,
    times: float,
) -> tuple[Tensor, Tensor]:
    """Dots of the rows of a convolution's weight with their gradients, (B, O), and what is above 0 where to rely on."""
    # grad_out, output (B, O, *out), inputs (B, C, *in), shift (O,), sums (B, O) of grad_out over positions if they are
    # known, squared norms of the rows `lengths` (O,) with `times` these those times the rows' length: the sum over
    # positions of grad_out and the output less the shift. Errors of the output are those of the shift, too, if it is
    # the larger.
    grads = grad_out.flatten(2)
    dots = (grads * output.flatten(2)).sum(2)
    if shift is None:
        return dots, lengths
    of_inputs = torch.linalg.vector_norm(inputs)  # the mean square of a patch is this one's share
    most = max(inputs.numel(), 1) / (times * MOST_SHIFT**2)
    sure = torch.addcmul(lengths * of_inputs.square(), shift, shift, value=-most)
    return torch.addcmul(dots, grads.sum(2) if sums is None else sums, shift, value=-1), sure
