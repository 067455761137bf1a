"""What floating point does: cancellation, NaN and infinity, low precision, nothing at all."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lightning_persample.gradients import (
    Block,
    Dense,
    Indexed,
    Outer,
    Patches,
    PatchGeometry,
    SampleGradient,
    Sum,
    patches,
)
from tests.gradients.structures import CASES, GEOMETRIES, assert_close, sq_norm

LOW = [torch.float16, torch.bfloat16]


def nearly_cancelling(*shape: int, size: float) -> Tensor:
    """Positions (axis 1) in pairs that cancel up to `size`, in float32."""
    half = torch.randn(shape)
    return torch.cat([half, -half + size * torch.randn(shape)], 1)


@pytest.mark.parametrize("size", [1e-1, 1e-2, 1e-3, 1e-5])
def test_outer_that_nearly_cancels(size: float) -> None:
    left = nearly_cancelling(6, 4, 300, size=size)
    right = torch.randn(6, 1, 200).expand(6, 8, 200)
    left[0] = torch.randn(8, 300)  # one sample that does not cancel
    gradient = Outer(left, right)
    expected = sq_norm(torch.einsum("btp,btd->bpd", left.double(), right.double()))
    got = gradient.sq_norm()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("size", [1e-2, 1e-4])
@pytest.mark.parametrize("kernel", ["autocorrelation", "unfolded gram"])
def test_patches_that_nearly_cancel(kernel: str, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    gradient, _ = GEOMETRIES["1d-same-even-kernel"].build(torch.float32)
    inputs = torch.cat([gradient.input, gradient.input], 1)
    grad_out = torch.cat([gradient.grad_out, size * torch.randn_like(gradient.grad_out) - gradient.grad_out], 1)
    cancelling = Patches(grad_out, inputs, gradient.geometry)
    expected = sq_norm(Patches(grad_out.double(), inputs.double(), gradient.geometry).dense())
    monkeypatch.setattr(patches, "patch_kernel", lambda sizes, *, dense: "unfolded" if dense else kernel)
    torch.testing.assert_close(cancelling.sq_norm().double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("rows", [40, 40_000], ids=["fits", "larger-than-budget"])
@pytest.mark.parametrize("size", [1e-2, 1e-4])
def test_sum_that_nearly_cancels(size: float, rows: int) -> None:
    """An embedding and its tied head whose gradients all but cancel."""
    index, right = torch.randint(rows, (3, 2)), torch.randn(3, 2, 64)
    left = -torch.nn.functional.one_hot(index, rows).float() * (1 + size * torch.randn(3, 2, 1))
    terms = Outer(left, right), Indexed(index, right, rows)
    wide = [Outer(left.double(), right.double()).dense(), Indexed(index, right.double(), rows).dense()]
    torch.testing.assert_close(Sum(terms).sq_norm().double(), sq_norm(wide[0] + wide[1]), rtol=1e-4, atol=0)


def test_what_cancels_is_zero_and_never_negative() -> None:
    left, right = torch.randn(50, 2, 64), torch.randn(50, 2, 64)
    outer = Outer(torch.cat([left, -left], 1), torch.cat([right, right], 1))
    assert torch.all(outer.sq_norm() >= 0)
    assert torch.all(outer.sq_norm() <= 1e-25)
    apart = Sum([Outer(left, right), Outer(-left, right)])
    assert torch.all(apart.sq_norm() >= 0)
    assert torch.all(apart.sq_norm() <= 1e-10 * Outer(left, right).sq_norm())


@pytest.mark.parametrize(("of_input", "of_output"), [(1e10, 1e-25), (1.0, 0.0)])
@pytest.mark.parametrize("kernel", ["autocorrelation", "unfolded gram", "layers"])
def test_products_that_underflow(
    kernel: str, of_input: float, of_output: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Gram matrices of the output's gradient are zero in float32, the gradient is not."""
    monkeypatch.setattr(patches, "patch_kernel", lambda sizes, *, dense: "unfolded" if dense else kernel)
    whole, _ = GEOMETRIES["2d-groups"].build(torch.float32)
    gradient = Patches(whole.grad_out * of_output, whole.input * of_input, whole.geometry)
    torch.testing.assert_close(gradient.sq_norm().double(), gradient._widened().sq_norm(), rtol=1e-4, atol=0)
    outer = Outer(torch.randn(3, 4, 65) * of_output, torch.randn(3, 4, 66) * of_input)
    torch.testing.assert_close(outer.sq_norm().double(), sq_norm(outer._widened().dense()), rtol=1e-4, atol=0)


def test_patches_that_read_nothing_but_padding() -> None:
    geometry = PatchGeometry((1, 1), (7, 7), ((3, 3),) * 2, (1, 1))
    gradient = Patches(torch.ones(2, 1, 4, 1, 1), torch.ones(2, 1, 3, 1, 1), geometry)
    assert torch.equal(gradient.dense(), torch.zeros(2, 4, 3, 1, 1))
    assert torch.equal(gradient.sq_norm(), torch.zeros(2))


@pytest.mark.parametrize("T", [1, 3, 500])
def test_long_sums_in_float32(T: int) -> None:
    left, right = torch.rand(2, T, 700) + 1, torch.rand(2, T, 900) + 1
    expected = sq_norm(torch.einsum("btp,btd->bpd", left.double(), right.double()))
    torch.testing.assert_close(Outer(left, right).sq_norm().double(), expected, rtol=2e-6, atol=0)
    grad = torch.rand(1, 3_000_001) + 1
    torch.testing.assert_close(Dense(grad).sq_norm().double(), grad.double().square().sum(1), rtol=2e-6, atol=0)


SINGLE = [pytest.param(shape, name, id=f"{name}-{len(shape)}d") for shape in CASES for name in CASES[shape]]


def low_precision(gradient: SampleGradient, dtype: torch.dtype) -> SampleGradient:
    return gradient._map(lambda x: x.to(dtype) if x.is_floating_point() else x)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(("shape", "name"), SINGLE)
def test_low_precision_is_added_up_in_float32(shape: tuple[int, ...], name: str, dtype: torch.dtype) -> None:
    low = low_precision(CASES[shape][name](torch.float32)[0], dtype)
    same = low._widened()
    assert low.dense().dtype == low.sq_norm().dtype == low.inner(low).dtype == torch.float32
    assert_close(low.dense(), same.dense().float())
    torch.testing.assert_close(low.sq_norm().double(), same.sq_norm(), rtol=1e-5, atol=0)
    torch.testing.assert_close(low.inner(low).double(), same.sq_norm(), rtol=1e-5, atol=0)
    vector = same.dense()[0]  # the dot of the first sample with itself does not cancel
    assert low.dot(vector.float()).dtype == low.square_sum().dtype == torch.float32
    torch.testing.assert_close(low.dot(vector.float()).double()[0], same.sq_norm()[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(low.square_sum().double(), same.dense().square().sum(0), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kernel", ["unfolded", "grouped", "autocorrelation", "unfolded gram"])
def test_mixed_precision(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast the output's gradient and the input may have different dtypes."""
    monkeypatch.setattr(
        patches, "patch_kernel", lambda sizes, *, dense: "unfolded" if dense and "a" in kernel else kernel
    )
    gradient, _ = GEOMETRIES["2d-groups"].build(torch.float32)
    mixed = Patches(gradient.grad_out.bfloat16(), gradient.input, gradient.geometry)
    torch.testing.assert_close(mixed.sq_norm().double(), mixed._widened().sq_norm(), rtol=1e-5, atol=0)
    outer = Outer(torch.randn(3, 4, 5).half(), torch.randn(3, 4, 6, dtype=torch.float64))
    assert_close(outer.sq_norm(), sq_norm(torch.einsum("btp,btd->bpd", outer.left.double(), outer.right)))


@pytest.mark.parametrize(("shape", "name"), SINGLE)
def test_autocast_changes_nothing(shape: tuple[int, ...], name: str) -> None:
    gradient, _ = CASES[shape][name](torch.float32)
    outside = gradient.dense(), gradient.sq_norm(), gradient.inner(gradient)
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradient.dense(), gradient.sq_norm(), gradient.inner(gradient)
    for one, two in zip(outside, inside, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("shape", "name"), [c for c in SINGLE if "no-position" not in str(c.id) and "ragged" not in str(c.id)]
)
def test_nan_and_infinity_show(shape: tuple[int, ...], name: str, number: float) -> None:
    gradient, _ = CASES[shape][name](torch.float32)
    clean = gradient.sq_norm()
    spoiled = gradient._map(torch.clone)
    for tensor in spoiled.tensors():
        if tensor.is_floating_point():
            tensor[1] = number
    got = spoiled.sq_norm()
    assert not torch.isfinite(got[1])
    assert not torch.isfinite(spoiled.inner(gradient)[1])
    assert not torch.isfinite(spoiled.dense()[1]).all()
    assert_close(got[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("kernel", ["unfolded", "grouped", "autocorrelation", "unfolded gram"])
def test_nan_shows_in_every_convolution_kernel(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        patches, "patch_kernel", lambda sizes, *, dense: "unfolded" if dense and "a" in kernel else kernel
    )
    gradient, expected = GEOMETRIES["2d"].build(torch.float32)
    gradient.grad_out[1, 0, 0, 0, 0] = float("nan")
    got = gradient.sq_norm()
    assert torch.isnan(got).tolist() == [False, True, False]
    assert_close(got[[0, 2]], sq_norm(expected)[[0, 2]])


def test_an_overflow_of_the_gram_matrix_alone_is_repaired() -> None:
    left = torch.full((1, 2, 30), 1e19)
    left[:, 1] *= -1
    right = torch.ones(1, 2, 30)
    assert torch.equal(Outer(left, right).sq_norm(), torch.zeros(1))


@pytest.mark.parametrize("B", [0, 1])
@pytest.mark.parametrize(("shape", "name"), SINGLE)
def test_no_sample_and_one_sample(shape: tuple[int, ...], name: str, B: int) -> None:
    gradient, expected = CASES[shape][name](torch.float64)
    few, expected = gradient.samples(1, 1 + B), expected[1 : 1 + B]
    assert few.batch_size == B
    assert_close(few.dense(), expected)
    assert_close(few.sq_norm(), sq_norm(expected))
    assert_close(few.inner(few), sq_norm(expected))
    assert_close(Sum([few, few])._sq_norm_by_pairs()[0], 4 * sq_norm(expected))


@pytest.mark.parametrize(("shape", "name"), SINGLE)
def test_zero_gradients(shape: tuple[int, ...], name: str) -> None:
    gradient, _ = CASES[shape][name](torch.float32)
    zero = gradient._map(lambda x: x * 0 if x.is_floating_point() else x)
    assert torch.equal(zero.sq_norm(), torch.zeros(3))
    assert torch.equal(zero.inner(gradient), torch.zeros(3))
    assert torch.equal(zero.dense(), torch.zeros(3, *shape))


def test_no_rows_no_channels_no_outputs() -> None:
    gradient, _ = GEOMETRIES["2d"].build(torch.float32)
    for rows, outputs, channels, height in itertools.product([0, 1], [0, 6], [0, 4], [0, 5]):
        empty = Patches(
            gradient.grad_out[:, :rows, :outputs, :height], gradient.input[:, :rows, :channels], gradient.geometry
        )
        if rows and outputs and channels and height:
            continue
        assert torch.equal(empty.sq_norm(), torch.zeros(3))
        assert torch.equal(empty._terms_sq_norm(), torch.zeros(3))
        assert torch.equal(empty.dense(), torch.zeros(3, outputs, channels, 3, 3))
    assert torch.equal(Outer(torch.zeros(2, 3, 0), torch.zeros(2, 3, 4)).sq_norm(), torch.zeros(2))
    assert Block(torch.zeros(0, 4), 0, 1, 4).dense().shape == (0, 0)


@pytest.mark.parametrize("T", [1, 2, 40])
def test_matrices_that_are_not_contiguous(T: int) -> None:
    left, right = torch.randn(T, 5, 4, dtype=torch.float64), torch.randn(5, 6, T, dtype=torch.float64)
    outer = Outer(left.transpose(0, 1), right.transpose(1, 2))
    expected = torch.einsum("tbp,bdt->bpd", left, right)
    assert_close(outer.sq_norm(), sq_norm(expected))
    assert_close(outer.dense(), expected)
    index = torch.randint(4, (T, 5)).t()
    rows = Indexed(index, outer.right, 4)
    again = Indexed(index.contiguous(), outer.right.contiguous(), 4).dense()
    assert_close(rows.dense(), again)
    assert_close(rows.sq_norm(), sq_norm(again))
    assert_close(rows.inner(outer), (again * expected).sum((1, 2)))
    conjugate = Outer(torch.complex(left, left).transpose(0, 1).conj(), outer.right)
    assert_close(conjugate.sq_norm(), 2 * sq_norm(expected))


@pytest.mark.parametrize(("positions", "width"), [(1, 63), (3, 399), (1, 400), (5, 768), (3, 591), (2, 4096), (0, 80)])
def test_a_dot_over_rows_of_any_length(positions: int, width: int) -> None:
    left, right, vector = torch.randn(4, positions, width), torch.randn(4, positions, width), torch.randn(width, width)
    expected = torch.einsum("btp,btd,pd->b", left.double(), right.double(), vector.double())
    tolerance = 1e-6 * width * positions**0.5  # (of sums of as many products of random numbers)
    torch.testing.assert_close(Outer(left, right).dot(vector).double(), expected, rtol=0, atol=tolerance)
    double = Outer(left.double(), right.double()).dot(vector.double())
    torch.testing.assert_close(double, expected, rtol=1e-10, atol=1e-10)
