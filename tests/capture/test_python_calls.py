"""What a warm captured step costs in calls of Python functions, which no machine makes faster or slower."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_persample.capture.mode import expanded_weights
from tests.benchmarks.python_calls import python_calls
from tests.benchmarks.timed_models import Block

B = 8


def mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3)), torch.randn(B, 6)


def cnn() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3)), torch.randn(B, 3, 8, 8)


class Small(nn.Module):
    """Two blocks of the GPT of the benchmark."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks, self.head = (
            nn.Embedding(11, 8),
            nn.Sequential(Block(8, 2), Block(8, 2)),
            nn.Linear(8, 3),
        )

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(index)).mean(1))


def gpt() -> tuple[nn.Module, torch.Tensor]:
    return Small(), torch.randint(0, 11, (B, 5))


class Standardised(nn.Conv2d):
    """A convolution whose weight is standardised, as those of NFNet are."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.gain = nn.Parameter(torch.ones(self.out_channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(rows, None, None, self.gain * 0.5, training=True).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias)


def standardised_cnn() -> tuple[nn.Module, torch.Tensor]:
    layers = [Standardised(3, 4, 3), nn.ReLU(), Standardised(4, 4, 3), nn.ReLU(), Standardised(4, 4, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3)), torch.randn(B, 3, 8, 8)


# The bounds are what was counted, and a tenth: a change that adds a call to every call is seen.
@pytest.mark.parametrize(
    ("build", "fuse", "most"),
    [(mlp, False, 168), (cnn, False, 185), (gpt, False, 438), (standardised_cnn, False, 681), (cnn, True, 207)],
)
def test_a_warm_step_calls_no_more_functions_of_the_package(build, fuse, most):
    module, x = build()
    y = torch.randint(0, 3, (B,))

    def step() -> None:
        module.zero_grad()
        with expanded_weights(module, (x, y), unsupported="error", fuse_weight_grad=fuse) as capture:
            F.cross_entropy(module(x), y).backward()
        capture.record.norms()

    _, own = python_calls(step)
    assert 0 < own.total() <= most
