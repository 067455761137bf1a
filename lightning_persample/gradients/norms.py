"""Norms, squared norms and dots of structured gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_persample.gradients.cost import MatrixKernel, chunks, fits, memory_budget, outer_inner_kernel
from lightning_persample.gradients.geometry import PatchGeometry
from lightning_persample.gradients.precision import accumulation_dtype

LONGEST_ROW = 4096
"""Numbers that are added up in a row; longer sums in float32 are split, for their error grows with the length."""

_FULL_ROWS = 256  # a matrix product with fewer rows takes longer for each
_SHORTEST_ROW = 64  # shorter ones cost more each than they hold


def as_real(tensor: Tensor) -> Tensor:
    """The same numbers as reals: a complex tensor gets a last axis of size 2."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_rows(tensor: Tensor) -> Tensor:
    """The real numbers of each sample in a row: (b, numbers)."""
    return as_real(tensor).unsqueeze(-1).flatten(1)


def sq_sum(tensor: Tensor) -> Tensor:
    """Sum |tensor[b]|^2 over all but the first axis, in the tensor's own precision: (b,)."""
    if tensor.dim() == 2 and tensor.shape[1] <= LONGEST_ROW and not tensor.is_complex():
        return squared(torch.linalg.vector_norm(tensor, dim=1))
    count, length = _rows_of(tensor.shape)
    if length and tensor.is_contiguous() and not tensor.is_complex():
        squares = squared(torch.linalg.vector_norm(tensor.view(-1, count, length), dim=2))
        return squares.squeeze(1) if count == 1 else squares.sum(1)
    flat = as_rows(tensor)
    whole = flat.shape[1] // LONGEST_ROW * LONGEST_ROW
    if whole == 0:
        return squared(torch.linalg.vector_norm(flat, dim=1))
    rows = squared(torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, LONGEST_ROW)), dim=2)).sum(1)
    return rows if whole == flat.shape[1] else rows + squared(torch.linalg.vector_norm(flat[:, whole:], dim=1))


def squared(numbers: Tensor) -> Tensor:
    """The squares in place, by a kernel that a step runs anyway: the first call of one takes as long as ten others."""
    return numbers.mul_(numbers)


@lru_cache(4096)
def _rows_of(shape: torch.Size) -> tuple[int, int]:
    """How many rows of which length the trailing axes of each sample make without a rest; no length if none fits."""
    length = 1
    for size in reversed(shape[1:]):
        if length * size > LONGEST_ROW:
            break
        length *= size
    return (prod(shape[1:]) // length, length) if length >= _SHORTEST_ROW and shape[0] else (0, 0)


def dot_sum(a: Tensor, b: Tensor) -> Tensor:
    """Sum Re(conj(a[b]) b[b]) over all but the first axis: (b,)."""
    return (as_real(a) * as_real(b)).unsqueeze(-1).flatten(1).sum(1)


def row_sq_norms(tensor: Tensor) -> Tensor:
    """|tensor[b, t]|^2: (b, t, d) to (b, t)."""
    if tensor.shape[2] <= LONGEST_ROW and not tensor.is_complex():
        return squared(torch.linalg.vector_norm(tensor, dim=2))
    return sq_sum(tensor.flatten(0, 1)).view(tensor.shape[:2])


def row_norms(tensor: Tensor, out: Tensor) -> None:
    """Write |tensor[b, t]|, (b, t), for a tensor (b, t, d)."""
    if tensor.shape[2] <= LONGEST_ROW:
        torch.linalg.vector_norm(tensor, dim=2, out=out)
    else:
        torch.sqrt(row_sq_norms(tensor), out=out)


def zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    """One real zero for each sample, in the precision of `dtype`: (B,)."""
    return torch.zeros(like.shape[0], dtype=dtype.to_real(), device=like.device)


def bytes_of_sample(tensor: Tensor, dtype: torch.dtype) -> int:
    """Bytes of one sample of the tensor in `dtype`."""
    return tensor[:1].numel() * dtype.itemsize if tensor.shape[0] else 0


def bytes_to_widen(*tensors: Tensor, dtype: torch.dtype) -> int:
    """Bytes of one sample of those tensors that have to be copied to `dtype`."""
    return sum(bytes_of_sample(tensor, dtype) for tensor in tensors if tensor.dtype != dtype)


def by_chunks(like: Tensor, dtype: torch.dtype, bytes_each: int, compute: Callable[[slice], Tensor]) -> Tensor:
    """One number per sample, some samples at a time; -> (B,)."""
    parts = [compute(part) for part in chunks(like.shape[0], bytes_each, like.device)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else zeros(like, dtype)


def dense_sq_norm(grad: Tensor) -> Tensor:
    """Sum |grad[b]|^2, grad (B, *shape): (B,)."""
    if grad.dtype is torch.float32 or (dtype := accumulation_dtype(grad)) is grad.dtype:  # nothing has to be copied
        return sq_sum(grad)
    return by_chunks(grad, dtype, bytes_to_widen(grad, dtype=dtype), lambda part: sq_sum(grad[part].to(dtype)))


def dense_inner(a: Tensor, b: Tensor) -> Tensor:
    """Sum Re(conj(a[b]) b[b]), both (B, *shape): (B,)."""
    dtype = accumulation_dtype(a, b)
    return by_chunks(a, dtype, bytes_of_sample(a, dtype), lambda part: dot_sum(a[part].to(dtype), b[part].to(dtype)))


def outer_terms_sq_norm(left: Tensor, right: Tensor) -> Tensor:
    """sum_t |left[t]|^2 |right[t]|^2, the squared norm if the terms were orthogonal: (B,)."""
    dtype = accumulation_dtype(left, right)

    def terms(part: slice) -> Tensor:
        products = row_sq_norms(left[part].to(dtype)) * row_sq_norms(right[part].to(dtype))
        return products.squeeze(1) if products.shape[1] == 1 else products.sum(1)

    return by_chunks(left, dtype, bytes_to_widen(left, right, dtype=dtype), terms)


def outer_gram_sq_norm(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The squared norm of sum_t left[t] (x) right[t] from the Gram matrices of both sides."""
    # left (B, T, p), right (B, T, d)
    dtype, (B, T, _) = accumulation_dtype(left, right), left.shape
    if B == 0 or not fits(3 * T * T * dtype.itemsize, left.device):
        return outer_gram_inner(left, right, left, right), outer_terms_sq_norm(left, right)

    bytes_each = 2 * T * T * dtype.itemsize + bytes_to_widen(left, right, dtype=dtype)
    parts = [_gram_sums(left[part].to(dtype), right[part].to(dtype)) for part in chunks(B, bytes_each, left.device)]
    value, scale = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    return value, scale


def _gram_sums(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """All entries of the product of both Gram matrices, and its diagonal, added up: (b,) and (b,)."""
    products = torch.bmm(left.conj(), left.mT)
    products *= torch.bmm(right.conj(), right.mT)
    value, scale = sum_and_trace(products)
    return value.real, scale.real


def sum_and_trace(products: Tensor) -> tuple[Tensor, Tensor]:
    """All entries of each matrix (b, m, m), and those of its diagonal, added up: (b,) and (b,)."""
    return products.flatten(1).sum(1), products.diagonal(dim1=1, dim2=2).sum(1)


def outer_gram_inner(left: Tensor, right: Tensor, other_left: Tensor, other_right: Tensor) -> Tensor:
    """sum_ts Re(conj(left[t]) . other_left[s] conj(right[t]) . other_right[s])."""
    # left (B, T, p), right (B, T, d), other_left (B, S, p), other_right (B, S, d) -> (B,)
    dtype = accumulation_dtype(left, right, other_left, other_right)
    (B, T), S = left.shape[:2], other_left.shape[1]
    result = zeros(left, dtype)
    for part in chunks(B, 3 * T * S * dtype.itemsize, left.device):
        samples = part.stop - part.start
        transposed = [x[part].to(dtype).transpose(1, 2) for x in (other_left, other_right)]
        for rows in chunks(T, 3 * samples * S * dtype.itemsize, left.device):
            left_gram = torch.bmm(left[part, rows].to(dtype).conj(), transposed[0])
            right_gram = torch.bmm(right[part, rows].to(dtype).conj(), transposed[1])
            result[part] += (left_gram * right_gram).flatten(1).sum(1).real
    return result


def outer_direct_sq_norm(left: Tensor, right: Tensor) -> Tensor:
    """|left^T right|^2, left (B, T, p) and right (B, T, d), formed a part at a time: (B,)."""
    dtype, budget = accumulation_dtype(left, right), memory_budget(left.device)
    lengths = left.new_empty(left.shape[0], left.shape[2], dtype=dtype.to_real())
    for part, place, formed in outer_parts(left, right, budget):
        row_norms(formed, lengths[part, place])
    return squared(lengths).sum(1)


def outers_direct_sq_norm(sides: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The same for each of n pairs of left (1, T, p) and right (1, T, d), each with a T of its own: (n,)."""
    left, right = sides[0]
    dtype, p, d = accumulation_dtype(left, right), left.shape[2], right.shape[2]
    if not fits(p * d * dtype.itemsize, left.device):
        return torch.cat([outer_direct_sq_norm(*pair) for pair in sides])
    lengths, formed = left.new_empty(len(sides), p, dtype=dtype.to_real()), left.new_empty(1, p, d, dtype=dtype)
    for (left, right), own in zip(sides, lengths.split(1), strict=True):
        torch.bmm(left.to(dtype).mT, right.to(dtype), out=formed)
        row_norms(formed, own)
    return squared(lengths).sum(1)


def outer_parts(left: Tensor, right: Tensor, most: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Form sum_t left[t] (x) right[t] a part at a time, by few calls: on a CPU each costs as much as reading 200 KB."""
    # left (B, T, p), right (B, T, d)
    dtype = accumulation_dtype(left, right)
    (B, _, p), d = left.shape, right.shape[2]
    numbers = most // dtype.itemsize
    samples = max(1, min(B, numbers // max(1, min(p, _FULL_ROWS) * d)))
    rows = max(1, min(p, numbers // max(1, samples * d)))
    memory = left.new_empty(samples * rows * d, dtype=dtype)
    across = left.transpose(1, 2)
    for start in range(0, B, samples):
        part = slice(start, min(start + samples, B))
        of_part, columns = (across, right.to(dtype)) if samples == B else (across[part], right[part].to(dtype))
        for first in range(0, p, rows):
            place = slice(first, min(first + rows, p))
            size = (columns.shape[0], place.stop - first, d)
            formed = memory[: prod(size)].view(size)
            torch.bmm(of_part[:, place].to(dtype), columns, out=formed)
            yield part, place, formed


def outer_inner(left: Tensor, right: Tensor, other_left: Tensor, other_right: Tensor) -> Tensor:
    """Inner product of sum_t left[t] (x) right[t] with sum_s other_left[s] (x) other_right[s], the cheaper way."""
    # left (B, T, p), right (B, T, d), other_left (B, S, p), other_right (B, S, d) -> (B,)
    terms = left, right, other_left, other_right
    kernels: dict[MatrixKernel, Callable[[], Tensor]] = {
        "gram": partial(outer_gram_inner, *terms),
        "direct": partial(_outer_direct_inner, *terms),
    }
    return kernels[outer_inner_kernel(left.shape[1], other_left.shape[1], left.shape[2], right.shape[2])]()


def _outer_direct_inner(left: Tensor, right: Tensor, other_left: Tensor, other_right: Tensor) -> Tensor:
    dtype, p, d = accumulation_dtype(left, right, other_left, other_right), left.shape[2], right.shape[2]
    result = zeros(left, dtype)
    for part in chunks(left.shape[0], 3 * p * d * dtype.itemsize, left.device):
        samples, columns, other_columns = part.stop - part.start, right[part].to(dtype), other_right[part].to(dtype)
        for rows in chunks(p, 3 * samples * d * dtype.itemsize, left.device):
            mine = torch.bmm(left[part, :, rows].to(dtype).transpose(1, 2), columns)
            others = torch.bmm(other_left[part, :, rows].to(dtype).transpose(1, 2), other_columns)
            result[part] += dot_sum(mine, others)
    return result


def dense_outer_inner(grad: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """sum_t left[t]^T grad right[t] (conjugated as it must be): (B,)."""
    # grad (B, p, d), left (B, T, p), right (B, T, d) -> (B,)
    dtype = accumulation_dtype(grad, left, right)
    result = zeros(grad, dtype)
    each = 2 * bytes_of_sample(right, dtype) + bytes_to_widen(grad, dtype=dtype)
    for part in chunks(grad.shape[0], each, grad.device):
        rows = torch.bmm(left[part].to(dtype).conj(), grad[part].to(dtype))
        result[part] = dot_sum(right[part].to(dtype), rows)
    return result


_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def _sum(terms: Tensor) -> Tensor:
    """Sum of the real parts over all but the first axis."""
    real = terms.real if terms.is_complex() else terms
    return real.reshape(real.shape[0], -1).sum(1)


def dense_dot(grad: Tensor, vector: Tensor) -> Tensor:
    """Of grad (B, *shape) with vector (*shape): (B,)."""
    dtype = accumulation_dtype(grad, vector)
    other = vector.to(dtype).conj().reshape(-1)
    bytes_each = 0 if grad.dtype == dtype else other.numel() * dtype.itemsize

    def dots(part: slice) -> Tensor:
        product = grad[part].reshape(-1, other.numel()).to(dtype) @ other
        return product.real if dtype.is_complex else product

    return by_chunks(grad, dtype, bytes_each, dots)


_LONGEST_PRODUCT = 400  # from there on torch's batched product on a CPU is MKL's, which takes three times as long


def _sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """Sum of the real parts of a * b over all but the first axis, where it can be in one pass, in rows."""
    # a and b (b, ...), of one floating dtype
    length = prod(a.shape[1:])
    while length >= _LONGEST_PRODUCT and length % 2 == 0:
        length //= 2
    is_of_rows = a.numel() and _SHORTEST_ROW <= length < _LONGEST_PRODUCT
    if not is_of_rows or a.is_complex() or not (a.is_contiguous() and b.is_contiguous()):
        return _sum(a * b)
    return torch.bmm(a.view(-1, 1, length), b.view(-1, length, 1)).view(len(a), -1).sum(1)


def outer_dot(left: Tensor, right: Tensor, vector: Tensor) -> Tensor:
    """Of sum_t left[b, t] (x) right[b, t], left (B, T, p), right (B, T, d), with vector (p, d): (B,)."""
    dtype = accumulation_dtype(left, right, vector)
    matrix = vector.to(dtype).conj()
    if left.shape[2] < right.shape[2]:  # the product with the vector is as wide as the narrower of the two
        left, right, matrix = right, left, matrix.mT
    bytes_each = left.shape[1] * (2 * right.shape[2] + left.shape[2]) * dtype.itemsize

    def dots(part: slice) -> Tensor:
        return _sum_of_products(left[part].to(dtype) @ matrix, right[part].to(dtype))

    return by_chunks(left, dtype, bytes_each, dots)


def indexed_dot(index: Tensor, right: Tensor, vector: Tensor) -> Tensor:
    """Of sum_t onehot(index[b, t]) (x) right[b, t], index (B, T), right (B, T, d), with vector (rows, d): (B,)."""
    dtype = accumulation_dtype(right, vector)
    bytes_each = 3 * right.shape[1] * right.shape[2] * dtype.itemsize

    def dots(part: slice) -> Tensor:
        return _sum(vector[index[part]].to(dtype).conj() * right[part].to(dtype))

    return by_chunks(right, dtype, bytes_each, dots)


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


def patches_dot(grad_out: Tensor, inputs: Tensor, geometry: PatchGeometry, vector: Tensor) -> Tensor:
    """Of sum_kt grad_out[b, k, :, t] (x) patch[b, k, t] with vector (O, C/groups, *kernel): (B,)."""
    # grad_out (B, k, O, *out), inputs (B, k, C, *in), vector (O, C/groups, *kernel) -> (B,)
    # That is the convolution of the inputs by the vector, at the positions of the output, with grad_out.
    dtype = accumulation_dtype(grad_out, inputs, vector)
    kernel = vector.to(dtype).conj().resolve_conj()
    bytes_each = 2 * (grad_out[:1].numel() + inputs[:1].numel()) * dtype.itemsize if grad_out.shape[0] else 0

    def dots(part: slice) -> Tensor:
        grads = grad_out[part].to(dtype)
        if not (grads.numel() and inputs.numel()):
            return grads.new_zeros(grads.shape[0], dtype=dtype.to_real())
        out = convolved(inputs[part].to(dtype).flatten(0, 1), kernel, geometry, tuple(grads.shape[3:]))
        return _sum_of_products(out.unflatten(0, grads.shape[:2]), grads)

    return by_chunks(inputs, dtype, bytes_each, dots)


def dense_row_dots(grad: Tensor, rows: Tensor) -> Tensor:
    """Of each row of grad (B, p, d) with its own of rows (p, d): (B, p)."""
    dtype = accumulation_dtype(grad, rows)
    return torch.bmm(grad.transpose(0, 1).to(dtype), rows.to(dtype).unsqueeze(2)).squeeze(2).mT


def outer_row_dots(left: Tensor, right: Tensor, rows: Tensor) -> Tensor:
    """Of each row of sum_t left[b, t] (x) right[b, t] with its own of rows (p, d): (B, p)."""
    dtype = accumulation_dtype(left, right)
    each, across = left.shape[1] * (2 * left.shape[2] + right.shape[2]) * dtype.itemsize, rows.to(dtype).mT
    parts = chunks(left.shape[0], each, left.device)
    found = [(left[part].to(dtype) * (right[part].to(dtype) @ across)).sum(1) for part in parts]
    return found[0] if len(found) == 1 else torch.cat(found or [left.new_empty(0, left.shape[2], dtype=dtype)])


def outer_row_sums(left: Tensor, right: Tensor) -> Tensor:
    """Of the entries in each row of sum_t left[b, t] (x) right[b, t]: (B, p)."""
    dtype = accumulation_dtype(left, right)
    return torch.bmm(left.to(dtype).mT, right.sum(2, keepdim=True, dtype=dtype)).squeeze(2)


def patches_row_dots(grad_out: Tensor, inputs: Tensor, geometry: PatchGeometry, rows: Tensor) -> Tensor:
    """Of each row of sum_kt grad_out[b, k, :, t] (x) patch[b, k, t] with its own of rows (O, n): (B, O)."""
    # grad_out (B, k, O, *out), inputs (B, k, C, *in): a convolution of the inputs by the rows, with grad_out
    dtype, outputs = accumulation_dtype(grad_out, inputs), grad_out.shape[2]
    is_product = {geometry.groups, *geometry.kernel_size, *geometry.stride} == {1} and not any(
        map(any, geometry.padding)
    )
    kernel = rows.to(dtype)
    if not is_product:
        kernel = kernel.reshape(outputs, -1, *geometry.kernel_size)
    found = []
    each = 2 * (bytes_of_sample(grad_out, dtype) + bytes_of_sample(inputs, dtype))
    for part in chunks(grad_out.shape[0], each, grad_out.device):
        read, grads = inputs[part].to(dtype).flatten(0, 1), grad_out[part].to(dtype).flatten(3)
        if is_product and read.shape[2:] == grad_out.shape[3:]:
            out = kernel @ read.flatten(2)  # of one element, without the copy of the kernel that a convolution makes
        else:
            out = convolved(read, kernel.view(outputs, -1, *geometry.kernel_size), geometry, tuple(grad_out.shape[3:]))
        products = (grads * out.reshape(grads.shape)).sum(3)
        found.append(products.squeeze(1) if products.shape[1] == 1 else products.sum(1))
    return found[0] if len(found) == 1 else torch.cat(found or [grad_out.new_empty(0, outputs, dtype=dtype)])
