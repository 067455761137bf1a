"""Peak memory of a captured step beside a plain one, as torch's allocator counts it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_persample import expanded_weights
from tests.benchmarks.allocated import allocated_peak
from tests.benchmarks.timed_models import MODELS, TABLES, Built, cnn
from tests.torch_release import not_in_the_oldest

CPU = torch.device("cpu")
BOUNDS = dict.fromkeys(MODELS, 1.10) | dict.fromkeys(TABLES, 1.20)


def peaks(
    build: Callable[[], Built], y: Tensor | None = None, *, with_dots: bool = False, **options: Any
) -> tuple[int, int]:
    """Of a plain step and of one with norms, or with dots."""
    torch.manual_seed(0)
    module, x = build()
    target = torch.randint(0, 10, (len(x),)) if y is None else y
    vectors = {name: torch.randn_like(parameter) for name, parameter in module.named_parameters()}

    def plain() -> None:
        module.zero_grad()
        F.cross_entropy(module(x), target).backward()

    def captured() -> Tensor:
        module.zero_grad()
        with expanded_weights(module, (x, target), unsupported="error", **options) as capture:
            capture.take_dots(vectors if with_dots else {})
            F.cross_entropy(module(x), target).backward()
        return capture.record.dot(vectors) if with_dots else capture.record.norms()

    return allocated_peak(plain, CPU), allocated_peak(captured, CPU)


@pytest.mark.parametrize(
    "model", [n if n not in ("resnet18", "gpt") else pytest.param(n, marks=pytest.mark.slow) for n in BOUNDS]
)
def test_a_captured_step_takes_hardly_more_than_a_plain_one(model: str) -> None:
    plain, captured = peaks((MODELS | TABLES)[model][1])
    assert captured <= BOUNDS[model] * plain, f"{captured / plain:.3f}"


@pytest.mark.parametrize(
    "model", [n if n not in ("resnet18", "gpt") else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_dots_in_the_backward_take_hardly_more_than_a_plain_step(model: str) -> None:
    plain, captured = peaks(MODELS[model][1], with_dots=True, quantities=("dot",))
    assert captured <= BOUNDS[model] * plain, f"{captured / plain:.3f}"


class LanguageModel(nn.Module):
    """Scores of every word at every position, by the table of the words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(50_000, 64), nn.Linear(64, 64)

    def forward(self, index: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.inner(self.words(index))), self.words.weight).transpose(1, 2)


def test_a_tied_head_at_every_position() -> None:
    y = torch.randint(0, 50_000, (4, 32))
    plain, captured = peaks(lambda: (LanguageModel(), torch.randint(0, 50_000, (4, 32))), y)
    assert captured <= 1.2 * plain, f"{captured / plain:.3f}"


def test_max_memory_bounds_what_a_step_takes_beside_the_plain_one() -> None:
    """A first convolution whose temporaries would set the peak, in parts of any size."""
    plain, _ = peaks(lambda: cnn(batch_size=8))
    taken = [peaks(lambda: cnn(batch_size=8), max_memory=size)[1] - plain for size in (2**17, 2**30)]
    assert taken[0] <= 2**20
    assert taken[0] <= taken[1]


class Blocks(nn.Module):
    """Blocks of linear maps, each under activation checkpointing if asked for."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        block = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.Tanh())]
        self.blocks = nn.ModuleList([nn.Sequential(*copy.deepcopy(block)) for _ in range(6)])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.flatten(1)


@not_in_the_oldest
@pytest.mark.parametrize("shape", [(1024, 128), (128, 8, 128)])
def test_under_checkpointing_a_step_takes_little_more_than_without_it(shape: tuple[int, ...]) -> None:
    """What layers inside of checkpoints get is kept for the norms, but not what they get when they run again."""
    plain, _ = peaks(lambda: (Blocks(checkpointed=False), torch.randn(shape)))
    _, captured = peaks(lambda: (Blocks(checkpointed=True), torch.randn(shape)))
    assert captured <= 1.15 * plain, f"{captured / plain:.3f}"
