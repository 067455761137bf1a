"""Group norm's rule takes its statistics from what autograd keeps, where that is safe, and computes them elsewhere."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_persample.capture.mode import expanded_weights
from lightning_persample.rules import normalization
from tests.capture.reference import assert_exact, loop
from tests.torch_release import not_in_the_oldest


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Sizes of the rows for which statistics were computed again."""
    sizes: list[tuple[int, ...]] = []
    again = normalization._statistics_of_groups

    def counted(rows: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
        sizes.append(tuple(rows.shape))
        return again(rows, groups, eps)

    monkeypatch.setattr(normalization, "_statistics_of_groups", counted)
    return sizes


def images(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def cubes(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).flatten(1).pow(3).mean(1).mean()


@not_in_the_oldest
def test_kept_statistics_are_read(computed: list[tuple[int, ...]]) -> None:
    assert_exact(nn.GroupNorm(2, 4).double(), cubes, (images(5, 4, 3, 2),))
    assert computed == []


@not_in_the_oldest
@pytest.mark.parametrize("batch_dim", [0, 1])
def test_several_rows_of_a_sample(batch_dim: int, computed: list[tuple[int, ...]]) -> None:
    def loss(module: nn.Module, x: Tensor) -> Tensor:
        normalized = module(x.flatten(0, 1)).unflatten(0, x.shape[:2]).movedim(batch_dim, 0)
        return normalized.flatten(1).pow(3).mean(1).mean()

    assert_exact(nn.GroupNorm(2, 4).double(), loss, (images(3, 5, 4, 6),), batch_dim=batch_dim)
    assert computed == []


def test_rows_that_were_picked(computed: list[tuple[int, ...]]) -> None:
    """A shuffle, and a row of nobody's: there the rows' statistics are computed in their new order."""
    order = torch.tensor([2, 0, 3, 1])

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        shuffled = module(x[order[: len(x)]] if len(x) == 4 else x)
        return shuffled.flatten(1).pow(3).mean(1).sum()

    assert_exact(nn.GroupNorm(2, 4).double(), loss, (images(4, 4, 6),), loss_reduction="sum")
    assert computed


def test_under_checkpointing_they_are_not_unpacked(computed: list[tuple[int, ...]]) -> None:
    norm, x = nn.GroupNorm(2, 4).double(), images(5, 4, 6)
    expected = loop(norm, cubes, (x,))
    runs = []
    norm.register_forward_pre_hook(lambda module, args: runs.append(1))
    with expanded_weights(norm, x) as capture:
        output = checkpoint(norm, x.clone().requires_grad_(), use_reentrant=False)
        assert len(runs) == 1
        output.flatten(1).pow(3).mean(1).mean().backward()
    assert len(runs) == 2
    assert computed
    for name, grads in expected.items():
        torch.testing.assert_close(capture.record.sq_norms[name], grads.square().sum(1), rtol=1e-10, atol=0)


@not_in_the_oldest
@pytest.mark.parametrize("frozen", [None, "weight", "bias"])
@pytest.mark.parametrize("shape", [(8,), (3, 8)])
def test_layer_norm_by_kept_statistics(
    shape: tuple[int, ...], frozen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows lie apart, statistics are computed again."""
    samples, used = [], normalization._sums_of_centred
    monkeypatch.setattr(normalization, "_sums_of_centred", lambda *given: (samples.append(1), used(*given))[1])
    norm = nn.LayerNorm(shape).double()
    nn.init.normal_(norm.weight)
    if frozen is not None:
        getattr(norm, frozen).requires_grad_(False)
    each = 0 if frozen == "weight" else 2
    assert_exact(norm, cubes, (images(5, 6, 3, 8),))
    assert_exact(norm, cubes, (images(5, 6, 3, 8).transpose(0, 1),))
    assert len(samples) == 2 * each
    assert_exact(
        norm, lambda m, x: m(x).movedim(1, 0).flatten(1).pow(3).mean(1).mean(), (images(6, 5, 3, 8),), batch_dim=1
    )
    assert len(samples) == 2 * each

    def rows(module: nn.Module, x: Tensor) -> Tensor:
        return module(x.flatten(0, 1)).unflatten(0, x.shape[:2]).flatten(1).pow(3).mean(1).mean()

    assert_exact(norm, rows, (images(5, 2, 6, 3, 8),))
    assert len(samples) == 3 * each


@not_in_the_oldest
@pytest.mark.parametrize("shape", [(8,), (3, 8)])
@pytest.mark.parametrize("sizes", [(5, 6, 3, 8), (1, 6, 3, 8), (5, 1, 3, 8)])
def test_layer_norm_a_sample_at_a_time(shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    norm = nn.LayerNorm(shape).double()
    nn.init.normal_(norm.weight)
    assert_exact(norm, cubes, (images(*sizes),), max_memory=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layer_norm_far_from_zero(dtype: torch.dtype) -> None:
    """The mean is subtracted before anything is added up; what has been rounded is the input, not the sums."""
    norm, x = nn.LayerNorm(32).to(dtype), (images(5, 7, 32) + 100).to(dtype)
    wide = nn.LayerNorm(32).double()
    with expanded_weights(norm, x, loss_reduction="sum") as capture:
        norm(x).float().sum().backward()
    expected = loop(wide, lambda m, x: m(x).sum(), (x.double(),))["weight"].square().sum(1)
    torch.testing.assert_close(capture.record.sq_norms["weight"].double(), expected, rtol=1e-3, atol=1e-3)


def test_the_graph_goes_with_its_output() -> None:
    norm, x = nn.GroupNorm(2, 4).double(), images(5, 4, 6)
    gc.collect()
    gc.disable()
    try:
        with expanded_weights(norm, x):
            output = norm(x)
            node: Any = weakref.ref(output)
            del output
            assert node() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_in_low_precision_are_computed_in_single_precision(
    dtype: torch.dtype, computed: list[tuple[int, ...]]
) -> None:
    """The rule's rows are float32; the mean of bfloat16 numbers rounded to bfloat16 would not do."""
    norm = nn.GroupNorm(2, 4).to(dtype)
    x = (images(5, 4, 64) + 20).to(dtype)
    with expanded_weights(norm, x, loss_reduction="sum") as capture:
        norm(x).float().sum().backward()
    wide = x.double().unflatten(1, (2, 2))
    mean = wide.mean((2, 3), keepdim=True)
    normalized = ((wide - mean) / (wide.var((2, 3), correction=0, keepdim=True) + norm.eps).sqrt()).flatten(1, 2)
    expected = normalized.sum(2)
    found = capture.record.sq_norms["weight"]
    torch.testing.assert_close(found.double(), expected.square().sum(1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_layer_norm_adds_up_many_rows_in_float32(threads: int) -> None:
    before, norm, x = torch.get_num_threads(), nn.LayerNorm(4), torch.randn(2, 50_000, 4)
    torch.set_num_threads(threads)
    try:
        with expanded_weights(norm, x) as capture:
            (0.1 * norm(x)).sum((1, 2)).mean().backward()
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(capture.record.sq_norms["bias"], torch.full((2,), 4 * 5000.0**2), rtol=1e-5, atol=0)
