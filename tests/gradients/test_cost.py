"""The choice of kernels, for shapes whose kernels were timed."""

from __future__ import annotations

import pytest
import torch

from lightning_persample.gradients import PatchGeometry, cost

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

# channels, outputs, input size, kernel size, stride, groups -> a kernel that was at most 1.3 times slower than the best
TIMED = [
    (3, 32, 32, 3, 1, 1, "unfolded"),
    (32, 64, 32, 3, 2, 1, "grouped"),
    (64, 64, 16, 3, 1, 1, "grouped"),
    (128, 128, 8, 3, 1, 1, "autocorrelation"),
    (64, 64, 32, 3, 1, 1, "grouped"),
    (128, 128, 16, 3, 1, 1, "autocorrelation"),
    (256, 256, 8, 3, 1, 1, "autocorrelation"),
    (512, 512, 4, 3, 1, 1, "autocorrelation"),
    (64, 128, 16, 1, 1, 1, "unfolded"),
    (64, 64, 32, 3, 1, 64, "grouped"),
    (88, 88, 12, 3, 1, 88, "grouped"),
    (40, 40, 16, 7, 1, 40, "diagonals"),
    (80, 80, 8, 7, 1, 80, "fourier"),
    (240, 240, 6, 5, 1, 240, "fourier"),
    (576, 576, 3, 5, 1, 576, "fourier"),
    (160, 160, 4, 7, 1, 160, "fourier"),
    (64, 64, 32, 3, 1, 8, "grouped"),
    (3, 768, 112, 16, 16, 1, "unfolded gram"),
    (64, 128, 16, 3, 2, 1, "unfolded gram"),
    (64, 128, 32, 3, 2, 1, "grouped"),
    (128, 256, 16, 3, 2, 1, "unfolded gram"),
    (256, 512, 8, 3, 2, 1, "autocorrelation"),
    (64, 128, 32, 1, 2, 1, "unfolded"),
]
# The same for the gradients themselves.
TIMED_DENSE = [
    (32, 64, 32, 3, 2, 1, "grouped"),
    (64, 64, 16, 3, 1, 1, "grouped"),
    (128, 128, 8, 3, 1, 1, "unfolded"),
    (64, 64, 32, 3, 1, 1, "grouped"),
    (256, 256, 8, 3, 1, 1, "unfolded"),
    (128, 256, 16, 3, 2, 1, "unfolded"),
    (3, 32, 32, 3, 1, 1, "unfolded"),
]


def choose(case: tuple[int, int, int, int, int, int], *, device: torch.device, dense: bool) -> str:
    channels, outputs, size, kernel, stride, groups = case
    out = size // stride
    pad = kernel // 2 if kernel % 2 else 0
    geometry = PatchGeometry((kernel,) * 2, (stride,) * 2, ((pad, pad),) * 2, (1, 1), groups)
    sizes = cost.PatchSizes(1, channels, outputs, geometry, (out,) * 2, item_size=4, device=device)
    return cost.patch_kernel(sizes, dense=dense)


@pytest.mark.parametrize("case", TIMED, ids=str)
def test_patches(case: tuple[int, int, int, int, int, int, str]) -> None:
    assert choose(case[:6], device=CPU, dense=False) == case[6]
    assert choose(case[:6], device=CPU, dense=True) in {"unfolded", "layers", "grouped", "diagonals"}
    assert choose(case[:6], device=CUDA, dense=True) == ("grouped" if case[5] > 1 else "unfolded")


@pytest.mark.parametrize("case", TIMED_DENSE, ids=str)
def test_patches_whose_gradients_are_kept(case: tuple[int, int, int, int, int, int, str]) -> None:
    assert choose(case[:6], device=CPU, dense=True) == case[6]


def test_patches_too_large_to_unfold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "MEMORY_BUDGET", 1000)
    for case in TIMED:
        for device in (CPU, CUDA):
            assert choose(case[:6], device=device, dense=False) == "grouped"


@pytest.mark.parametrize(
    ("positions", "rows", "columns", "kernel"),
    [(1, 5, 5, "gram"), (16, 512, 512, "gram"), (1024, 64, 64, "direct"), (300, 1, 300, "direct")],
)
def test_outer(positions: int, rows: int, columns: int, kernel: str) -> None:
    assert cost.outer_kernel(positions, rows, columns) == kernel


def test_budget_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cost.memory_budget(CPU) == cost.CPU_MEMORY_BUDGET < cost.memory_budget(CUDA) == cost.MEMORY_BUDGET
    monkeypatch.setattr(cost, "MEMORY_BUDGET", 10)
    assert cost.memory_budget(CPU) == cost.memory_budget(CUDA) == 10
    assert list(cost.chunks(5, 4, CPU)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert list(cost.chunks(2, 100, CPU)) == [slice(0, 1), slice(1, 2)]
    assert list(cost.chunks(0, 4, CPU)) == []
    assert list(cost.chunks(3, 0, CPU)) == [slice(0, 3)]
