"""Every kernel of the convolution structure on every geometry, against autograd of one sample at a time."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_persample.gradients import Deflated, Dense, Outer, Patches, PatchGeometry, Sum, patches
from tests.gradients.structures import GEOMETRIES, MATRIX, assert_close, inner, outer, sq_norm
from tests.in_turn import in_turn

KERNELS = ["unfolded", "layers", "grouped", "autocorrelation", "unfolded gram"]
GRAM = {"autocorrelation", "unfolded gram", "fourier"}
FORCED = [
    *itertools.product(GEOMETRIES, KERNELS),
    *itertools.product([name for name in GEOMETRIES if "depthwise" in name], ["diagonals", "fourier"]),
]


@pytest.mark.parametrize(
    ("name", "kernel", "dtype"),
    in_turn(FORCED, [torch.float64, torch.float32, torch.complex64]),
)
def test_kernel(name: str, kernel: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    gradient, expected = GEOMETRIES[name].build(dtype)
    monkeypatch.setattr(
        patches, "patch_kernel", lambda sizes, *, dense: "unfolded" if dense and kernel in GRAM else kernel
    )
    assert_close(gradient.sq_norm(), sq_norm(expected))
    if kernel not in GRAM:
        assert_close(gradient.dense(), expected)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_chosen_kernel(name: str) -> None:
    gradient, expected = GEOMETRIES[name].build(torch.float64, B=2)
    other, other_expected = GEOMETRIES[name].build(torch.float64, B=2)
    assert tuple(gradient.shape) == tuple(expected.shape[1:])
    assert_close(gradient.dense(), expected)
    assert_close(gradient.sq_norm(), sq_norm(expected))
    assert_close(gradient.samples(1, 2).sq_norm(), sq_norm(expected[1:]))
    assert_close(gradient.inner(other), inner(expected, other_expected))
    assert_close(gradient.inner(Dense(other_expected)), inner(expected, other_expected))
    assert_close(Sum([gradient, other]).sq_norm(), sq_norm(expected + other_expected))


@pytest.mark.parametrize("name", GEOMETRIES)
def test_squared_norm_of_orthogonal_terms(name: str) -> None:
    """With one position alone different from zero, there is nothing that could fail to be orthogonal."""
    gradient, _ = GEOMETRIES[name].build(torch.float64)
    alone = torch.zeros_like(gradient.grad_out)
    corner = (slice(None), -1, slice(None), *[-1] * len(gradient.geometry.kernel_size))
    alone[corner] = gradient.grad_out[corner]
    single = Patches(alone, gradient.input, gradient.geometry)
    assert_close(single._terms_sq_norm(), sq_norm(single.dense()))


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_position_with_strides_of_another_order(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An axis of size 1 may have any stride, as one has after a transpose: the values are those of any other."""
    geometry = PatchGeometry((3,), (1,), ((1, 1),), (1,), 1)
    gradients = torch.randn(2, 3, 1, 4, 1, dtype=torch.float64)
    plain = Patches(*gradients, geometry)
    turned = Patches(*(each.clone().as_strided((3, 1, 4, 1), (4, 4, 1, 4)) for each in gradients), geometry)
    monkeypatch.setattr(patches, "patch_kernel", lambda sizes, *, dense: "unfolded" if kernel in GRAM else kernel)
    assert_close(turned.dense(), plain.dense())
    assert_close(turned.sq_norm(), sq_norm(plain.dense()))


@pytest.mark.parametrize("layout", ["channels-last", "transposed", "expanded"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_inputs_that_are_not_contiguous(layout: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gradient, expected = GEOMETRIES["2d-three-rows"].build(torch.float64)
    monkeypatch.setattr(
        patches, "patch_kernel", lambda sizes, *, dense: "unfolded" if dense and kernel in GRAM else kernel
    )
    tensors = [gradient.grad_out, gradient.input]
    if layout == "channels-last":
        tensors = [x.movedim(2, -1).contiguous().movedim(-1, 2) for x in tensors]
    elif layout == "transposed":
        tensors = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]
    else:
        tensors = [x[:1].expand(3, *[-1] * 4) for x in tensors]
        expected = expected[:1].expand(3, *[-1] * 4)
    same = Patches(tensors[0], tensors[1], gradient.geometry)
    assert_close(same.dense(), expected)
    assert_close(same.sq_norm(), sq_norm(expected))


def test_geometry_counts_outputs() -> None:
    geometry = PatchGeometry((3, 2), stride=(2, 1), padding=((1, 1), (0, 1)), dilation=(1, 2))
    out = torch.nn.functional.conv2d(torch.zeros(1, 1, 10, 8), torch.zeros(1, 1, 3, 2), None, (2, 1), (1, 0), (1, 2))
    assert geometry.output_size((8, 7)) == (4, 6)
    assert PatchGeometry((3, 2), (2, 1), ((1, 1), (0, 0)), (1, 2)).output_size((10, 8)) == tuple(out.shape[2:])
    assert geometry.output_size((0, 1)) == (0, 0)
    assert geometry.extent((4, 6)) == (9, 8)


def deflated(
    source: Outer | Patches | Dense, rows: torch.Tensor, size: tuple[int, ...], parts: str
) -> tuple[Deflated, torch.Tensor]:
    """A structure, and what it is by the projections of its rows (B, O, n) in float64; parts may be mean, direction."""
    batch_size, outputs, n = rows.shape
    rows, direction, removed = rows.double(), None, None
    expected = rows
    if "mean" in parts:
        removed = source._row_sums().square().sum(1) / n
        expected = expected - rows.mean(2, keepdim=True)
    if "direction" in parts:
        direction = torch.randn(outputs, n, dtype=torch.float64)
        direction = 0.9 * torch.nn.functional.normalize(direction - direction.mean(1, keepdim=True), dim=1)
        removed = removed + (2 - 0.9**2) * source._row_dots(direction).square().sum(1)
        expected = expected - (rows * direction).sum(2, keepdim=True) * direction
    gradient = Deflated(
        source, torch.Size(size), removed, None if direction is None else lambda: direction, "mean" in parts
    )
    return gradient, expected.reshape(batch_size, *size)


@pytest.mark.parametrize("parts", ["", "mean", "mean direction"])
@pytest.mark.parametrize("name", [*GEOMETRIES, "outer", "dense"])
def test_rows_less_what_lies_along_directions(name: str, parts: str) -> None:
    dtype = torch.float64
    source, dense = outer(dtype, 3, 4, *MATRIX) if name in ("outer", "dense") else GEOMETRIES[name].build(dtype)
    source = Dense(dense) if name == "dense" else source
    gradient, expected = deflated(source, dense.flatten(2), (1, dense[0].numel()), parts)
    assert (gradient.batch_size, tuple(gradient.shape)) == (len(dense), (1, dense[0].numel()))
    assert_close(gradient.dense(), expected)
    assert_close(gradient.sq_norm(), sq_norm(expected))
    assert_close(gradient.samples(1, 3).sq_norm(), sq_norm(expected[1:]))
    assert_close(gradient.inner(Dense(expected)), sq_norm(expected))
    assert_close(Sum([gradient, gradient]).sq_norm(), 4 * sq_norm(expected))
    assert_close(gradient.scaled(-2.0).sq_norm(), 4 * sq_norm(expected))
    factor = torch.randn(dense.shape[1], dtype=dtype)
    assert_close(source._by_row(factor).dense(), dense * factor.reshape(-1, *(1,) * (dense.dim() - 2)))


@pytest.mark.parametrize("rest", [1e-2, 1e-4, 0.0])
def test_rows_that_lie_along_a_direction_nearly(rest: float) -> None:
    q = torch.nn.functional.normalize(torch.randn(1, 600), dim=1)
    right = q.expand(3, 2, -1) + rest * torch.randn(3, 2, 600) / 600**0.5
    source = Outer(torch.randn(3, 2, 8), right)
    direction = q.expand(8, -1)
    removed = source._row_dots(direction).square().sum(1)
    gradient = Deflated(source, source.shape, removed, lambda: direction)
    rows = torch.einsum("btp,btd->bpd", source.left.double(), right.double())
    expected = sq_norm(rows - (rows @ q[0].double()).unsqueeze(2) * q.double())
    torch.testing.assert_close(
        gradient.sq_norm().double(), expected, rtol=2e-3, atol=1e-12 * float(sq_norm(rows).max())
    )
    assert bool((gradient.sq_norm() >= 0).all())
