"""Every kernel against one sample at a time in float64, whole and in small parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_persample.gradients import (
    Indexed,
    KernelOptions,
    Outer,
    Patches,
    PatchGeometry,
    Sum,
    indexed,
    kernel_options,
    patches,
)
from lightning_persample.gradients.cost import (
    CPU_MEMORY_BUDGET,
    LEAST_MEMORY_BUDGET,
    PatchKernel,
    chunks,
    memory_budget,
)
from tests.gradients.structures import GEOMETRIES, NO_PAD, SAME, Convolution, assert_close, inner, sq_norm
from tests.in_turn import in_turn

CPU = torch.device("cpu")
KERNELS: list[PatchKernel] = ["autocorrelation", "unfolded gram", "unfolded", "layers", "grouped"]
GRAM = {"product", "autocorrelation", "unfolded gram", "fourier"}
ONE = {
    "one-position": Convolution((3, 2), (3, 2), (1, 1), (NO_PAD, NO_PAD), (1, 1)),
    "one-position-of-many": Convolution((9, 9), (2, 2), (1, 1), (NO_PAD, NO_PAD), (1, 1), crop=7),
    "one-position-dilation-and-padding": Convolution((4, 3), (3, 3), (2, 1), (NO_PAD, SAME), (1, 2), groups=2),
    "one-position-depthwise": Convolution((1, 1), (3, 3), (1, 1), (SAME, SAME), (1, 1), groups=3, channels=(3, 6)),
    "one-position-3d": Convolution((1, 1, 1), (1, 1, 1), (1, 1, 1), (NO_PAD,) * 3, (1, 1, 1)),
}
ODD = {
    "one-channel": Convolution((6, 5), (3, 3), (1, 1), (SAME, SAME), (1, 1), channels=(1, 1)),
    "dilation-and-stride": Convolution((11, 12), (3, 2), (2, 3), ((2, 2), (1, 0)), (2, 3), groups=2),
    "dilation-shares-a-divisor-with-stride": Convolution((13, 9), (3, 3), (4, 2), ((3, 1), SAME), (6, 2)),
    "odd-groups-even-kernel-rows": Convolution(
        (6, 7), (4, 2), (1, 2), ((1, 2), NO_PAD), (1, 1), groups=3, channels=(9, 15), rows=2
    ),
    "depthwise-of-padding-alone": Convolution(
        (1, 3), (1, 3), (3, 3), (SAME, (1, 2)), (1, 1), groups=3, channels=(3, 3)
    ),
    "1d-one-channel-rows": Convolution((8,), (3,), (2,), (SAME,), (2,), channels=(1, 5), rows=4),
    "3d-one-channel": Convolution((3, 4, 3), (2, 2, 2), (1, 2, 1), (SAME, NO_PAD, SAME), (2, 1, 1), channels=(1, 2)),
}
EVERY = GEOMETRIES | ODD | ONE
FORCED: list[tuple[str, PatchKernel]] = [
    *itertools.product(EVERY, KERNELS),
    *itertools.product([name for name in EVERY if "depthwise" in name], ["diagonals", "fourier"]),
    *itertools.product(ONE, ["product"]),
]
MEMORY = {"whole": None, "few-samples": 6000, "rows-of-one-sample": 1}


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    """The same (B, k, C, *spatial) in another order in memory."""
    if layout == "channels-last":
        return tensor.movedim(2, -1).contiguous().movedim(-1, 2)
    if layout == "every-other":
        return torch.stack([tensor, torch.full_like(tensor, torch.nan)], -1)[..., 0]
    return tensor


@pytest.mark.parametrize(
    ("name", "kernel", "memory", "layout"),
    in_turn([(*each, memory) for each in FORCED for memory in MEMORY], ["contiguous", "channels-last", "every-other"]),
)
def test_convolution(name: str, kernel: PatchKernel, memory: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built, expected = EVERY[name].build(torch.float64)
    gradient = Patches(in_layout(built.grad_out, layout), in_layout(built.input, layout), built.geometry)
    monkeypatch.setattr(
        patches, "patch_kernel", lambda sizes, *, dense: "unfolded" if dense and kernel in GRAM else kernel
    )
    with kernel_options(KernelOptions(MEMORY[memory])):
        assert_close(gradient.sq_norm(), sq_norm(expected))
        assert_close(gradient.samples(1, 2).sq_norm(), sq_norm(expected[1:2]))
        assert torch.equal(gradient.samples(1, 1).sq_norm(), torch.zeros(0, dtype=torch.float64))
        if kernel not in GRAM:
            assert_close(gradient.dense(), expected)
            assert gradient.dense().is_contiguous()


OUTER: dict[str, Callable[[Outer], Tensor]] = {
    "gram": lambda gradient: gradient._gram_sq_norm()[0],
    "direct": Outer._direct_sq_norm,
    "gram-inner": lambda gradient: gradient._gram_inner(gradient),
    "direct-inner": lambda gradient: gradient._direct_inner(gradient),
}


@pytest.mark.parametrize("memory", [None, 1000, 1])
@pytest.mark.parametrize("kernel", OUTER)
@pytest.mark.parametrize(("B", "T", "p", "d"), [(3, 1, 5, 7), (5, 4, 1, 1), (2, 9, 3, 1), (1, 2, 11, 6), (0, 3, 2, 2)])
def test_matrix(B: int, T: int, p: int, d: int, kernel: str, memory: int | None) -> None:
    left = torch.randn(T, B, p, dtype=torch.float64).transpose(0, 1)
    right = torch.randn(B, d, T, dtype=torch.float64).transpose(1, 2)
    expected = torch.zeros(B, dtype=torch.float64)
    for b in range(B):
        expected[b] = sum(torch.outer(left[b, t], right[b, t]) for t in range(T)).square().sum()
    with kernel_options(KernelOptions(memory)):
        assert_close(OUTER[kernel](Outer(left, right)), expected)


# Low precision --------------------------------------------------------------------------------------------------------
LOW = [torch.float16, torch.bfloat16]
LOSS_SCALE = 65536.0


def scaled(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """An output's gradient as it is under a loss scale: what float16 holds of it, squares to more than float16 can."""
    return (gradient * 1e-2 * LOSS_SCALE).to(dtype)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        *itertools.product(["2d", "2d-three-rows", "1d-dilation", "one-channel"], KERNELS),
        ("2d-depthwise-all-options", "diagonals"),
        ("2d-depthwise-all-options", "fourier"),
    ],
)
def test_convolution_of_scaled_low_precision(
    name: str, kernel: PatchKernel, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, _ = EVERY[name].build(torch.float32)
    low = Patches(scaled(built.grad_out, dtype), built.input.to(dtype), built.geometry)
    expected = one_at_a_time(low.grad_out.double(), low.input.double(), built.geometry)
    monkeypatch.setattr(
        patches, "patch_kernel", lambda sizes, *, dense: "unfolded" if dense and kernel in GRAM else kernel
    )
    assert low.sq_norm().dtype == torch.float32
    torch.testing.assert_close(low.sq_norm().double(), sq_norm(expected), rtol=1e-5, atol=0)
    torch.testing.assert_close(low.dense().double(), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
    assert sq_norm(expected).min() > torch.finfo(torch.float16).max


def one_at_a_time(grad_out: Tensor, inputs: Tensor, geometry: PatchGeometry) -> Tensor:
    """Autograd's own weight gradient of each sample."""
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(geometry.kernel_size) - 1]
    pad = [number for pair in reversed(geometry.padding) for number in pair]
    grads = []
    for gradient, sample in zip(grad_out, inputs, strict=True):
        shape = (grad_out.shape[2], inputs.shape[2] // geometry.groups, *geometry.kernel_size)
        weight = torch.zeros(shape, dtype=inputs.dtype, requires_grad=True)
        out = convolve(F.pad(sample, pad), weight, None, geometry.stride, 0, geometry.dilation, geometry.groups)
        grads.append(torch.autograd.grad(out, weight, gradient)[0])
    return torch.stack(grads)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("kernel", OUTER)
@pytest.mark.parametrize("T", [1, 33])
def test_matrix_of_scaled_low_precision(T: int, kernel: str, dtype: torch.dtype) -> None:
    left, right = scaled(torch.randn(4, T, 19), dtype), torch.randn(4, T, 23).to(dtype)
    expected = sq_norm(torch.einsum("btp,btd->bpd", left.double(), right.double()))
    got = OUTER[kernel](Outer(left, right))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_rows_of_scaled_low_precision(dtype: torch.dtype) -> None:
    index, right = torch.tensor([[1, 1, 3], [0, 2, 4]]), scaled(torch.randn(2, 3, 17), dtype)
    head = Outer(scaled(torch.randn(2, 5, 6), dtype), torch.randn(2, 5, 17).to(dtype))
    table = Indexed(index, right, 6)
    rows = torch.stack([F.one_hot(i, 6).double().t() @ r.double() for i, r in zip(index, right, strict=True)])
    other = torch.einsum("btp,btd->bpd", head.left.double(), head.right.double())
    torch.testing.assert_close(table.sq_norm().double(), sq_norm(rows), rtol=1e-5, atol=0)
    crossed = inner(rows, other)
    torch.testing.assert_close(table.inner(head).double(), crossed, rtol=1e-4, atol=1e-5 * float(crossed.abs().max()))


INDEX = {
    "all apart": [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]],
    "all the same": [[2, 2, 2, 2], [0, 0, 0, 0], [2, 2, 2, 2]],
    "in one sample": [[0, 1, 2, 3], [3, 0, 3, 3], [1, 0, 2, 3]],
    "in pairs": [[0, 1, 0, 1], [3, 3, 1, 1], [2, 0, 0, 2]],
    "one position": [[1], [1], [0]],
    "no position": [[], [], []],
}


@pytest.mark.parametrize("memory", [None, 1])
@pytest.mark.parametrize("squares", [indexed._squares_by_repeats, indexed._squares_by_groups])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", INDEX)
def test_rows_with_the_same_index(
    name: str, dtype: torch.dtype, squares: Any, memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "_squares_by_repeats", squares)
    index = torch.tensor(INDEX[name], dtype=torch.int64).reshape(3, -1)
    right = torch.randn(3, 5, index.shape[1], dtype=torch.promote_types(dtype, torch.float32)).to(dtype).mT
    rows = torch.zeros(3, 4, 5, dtype=torch.promote_types(dtype, torch.float64))
    for sample, position in itertools.product(range(3), range(index.shape[1])):
        rows[sample, index[sample, position]] += right[sample, position]
    before = right.clone()
    with kernel_options(KernelOptions(memory)):
        got = Indexed(index, right, 4).sq_norm()
    assert torch.equal(right, before)
    torch.testing.assert_close(
        got.double(), rows.abs().square().sum((1, 2)), rtol=1e-5 if dtype in LOW else 1e-12, atol=0
    )
    if index.numel():
        right[1, -1] = torch.nan
        assert Indexed(index, right, 4).sq_norm().isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("memory", [None, 1])
@pytest.mark.parametrize(
    ("name", "kernel"),
    [*(("2d", kernel) for kernel in KERNELS), ("2d-depthwise", "diagonals"), ("2d-depthwise", "fourier")],
)
def test_what_is_not_finite_stays_so(
    name: str,
    kernel: PatchKernel,
    memory: int | None,
    dtype: torch.dtype,
    number: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built, _ = GEOMETRIES[name].build(torch.float32)
    low = Patches(scaled(built.grad_out, dtype), built.input.to(dtype), built.geometry)
    low.grad_out[1, 0, 0, 2, 2] = number
    monkeypatch.setattr(
        patches, "patch_kernel", lambda sizes, *, dense: "unfolded" if dense and kernel in GRAM else kernel
    )
    with kernel_options(KernelOptions(memory)):
        assert low.sq_norm().isfinite().tolist() == [True, False, True]
        for outer in (low.dense().flatten(2), low.grad_out[:, 0].flatten(2).transpose(1, 2)):
            right = torch.randn(3, outer.shape[1], 4).to(dtype)
            assert Outer(outer, right).sq_norm().isfinite().tolist() == [True, False, True]


# Options --------------------------------------------------------------------------------------------------------------
def test_options_hold_within_their_context_alone() -> None:
    before = memory_budget(CPU)
    with kernel_options(KernelOptions(max_memory=100)):
        assert memory_budget(CPU) == memory_budget(torch.device("cuda")) == 100
        with kernel_options(KernelOptions(max_memory=7)):
            assert list(chunks(3, 4, CPU)) == [slice(0, 1), slice(1, 2), slice(2, 3)]
        assert memory_budget(CPU) == 100
    assert memory_budget(CPU) == before
    with pytest.raises(ValueError, match="KernelOptions: max_memory is None or at least 1 byte, got 0"):
        KernelOptions(max_memory=0)


@pytest.mark.parametrize(("size", "limit"), [(32, 9), (64, 18), (5, 3), (7, 1), (100, 64), (3, 2), (9, 8)])
def test_parts_are_of_one_size_and_keep_all_threads_busy(
    size: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    with kernel_options(KernelOptions(max_memory=limit)):
        lengths = [part.stop - part.start for part in chunks(size, 1, CPU)]
    assert sum(lengths) == size
    assert max(lengths) <= limit
    assert len(set(lengths[:-1])) <= 1
    assert limit < 4 or lengths[0] % 4 == 0


@pytest.mark.parametrize("memory", [None, 20_000])
@pytest.mark.parametrize(
    ("name", "kernel"),
    [*(("2d", kernel) for kernel in KERNELS), ("2d-depthwise", "diagonals"), ("2d-depthwise", "fourier")],
)
def test_every_convolution_kernel_is_exact_where_terms_cancel(
    name: str, kernel: PatchKernel, memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        patches, "patch_kernel", lambda sizes, *, dense: "unfolded" if dense and kernel in GRAM else kernel
    )
    gradient, _ = GEOMETRIES[name].build(torch.float64)
    cancelling = Patches(
        torch.cat([gradient.grad_out, -gradient.grad_out], 1), gradient.input.repeat(1, 2, 1, 1, 1), gradient.geometry
    )
    with kernel_options(KernelOptions(memory)):
        assert torch.all(cancelling.sq_norm() <= 1e-25)


@pytest.mark.parametrize("kernel", ["gram", "direct"])
def test_every_matrix_kernel_is_exact(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_persample.gradients.structure.outer_kernel", lambda *_: kernel)
    left, right = torch.randn(3, 6, 5), torch.randn(3, 6, 7)
    expected = torch.einsum("btp,btd->bpd", left, right)
    one, other = Outer(left, right), Outer(right[:, :2, :5], right[:, :2])
    cancelling = Outer(torch.cat([left, -left], 1), torch.cat([right, right], 1))
    assert_close(one.sq_norm(), sq_norm(expected))
    assert_close(one.inner(other), inner(expected, other.dense()))
    assert torch.all(cancelling.sq_norm() <= 1e-8)


@pytest.mark.parametrize(("width", "expected"), [(8, LEAST_MEMORY_BUDGET), (1000, None), (5000, CPU_MEMORY_BUDGET)])
def test_without_a_limit_a_kernel_takes_what_its_use_holds(
    width: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Input and output gradient, weight and weight gradient; in a sum those of all uses."""
    budgets: list[int] = []

    def noting(gradient: Outer) -> str:
        budgets.append(memory_budget(CPU))
        return "gram"

    monkeypatch.setattr(Outer, "_kernel", noting)
    one = Outer(torch.zeros(2, 3, width), torch.zeros(2, 3, 500))
    one.sq_norm()
    held = 4 * (2 * 3 * (width + 500) + 2 * width * 500)
    assert budgets == [held if expected is None else expected]
    terms = one, Indexed(torch.zeros(2, 7, dtype=torch.int64), torch.zeros(2, 7, 500), width)
    Sum(terms).sq_norm()
    held += 8 * 2 * 7 + 4 * 2 * 7 * 500
    assert budgets[1:] in ([], [held if expected is None else expected])  # or added up, where that is small
    assert budgets[1:] or width == 8
