"""The norms of the hooks by hand that the benchmarks set as the bound are those of a loop over single samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_persample import loop_per_sample_grads
from lightning_persample.errors import UnsupportedError
from tests.benchmarks.hooks_by_hand import by_hand
from tests.benchmarks.timed_models import Built, cnn, dispersed, gpt, mlp, resnet18, tied_head

B = 3


def batch_norm() -> Built:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), torch.randn(B, 2)


BUILDS: dict[str, Callable[[], Built]] = {
    "mlp": lambda: mlp(B, 8),
    "cnn": lambda: cnn(B, 8),
    "resnet18": lambda: resnet18(B),
    "gpt": lambda: gpt(B, 64, 16),
}


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", [n if n != "resnet18" else pytest.param(n, marks=pytest.mark.slow) for n in BUILDS])
def test_the_norms_are_those_of_a_loop(name: str, fuse: bool) -> None:
    torch.manual_seed(0)
    module, x = BUILDS[name]()
    y, x = torch.randint(0, 10, (B,)), x.double() if x.is_floating_point() else x
    _, grads = loop_per_sample_grads(module.double(), lambda m, x, y: F.cross_entropy(m(x), y), x, y)
    right = torch.stack([grad.flatten(1).square().sum(1) for grad in grads.values()]).sum(0).sqrt()
    step = by_hand(module, x, y, fuse)
    for _ in range(3):  # one that is recorded, and what was recorded
        torch.testing.assert_close(step(), right)
        for parameter, grad in zip(module.parameters(), grads.values(), strict=True):
            torch.testing.assert_close(parameter.grad, grad.mean(0))
    assert fuse == any("forward" in vars(part) for part in module.modules()) or name == "mlp"


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (batch_norm, "no layer such as `1`, BatchNorm1d"),
        (lambda: dispersed(B), "no layer such as ``, Dispersed"),
        (lambda: tied_head(B), "`words.weight` is 2 times"),
    ],
)
def test_what_they_do_not_know_is_named(build: Callable[[], Built], named: str) -> None:
    module, x = build()
    with pytest.raises(UnsupportedError, match=named):
        by_hand(module, x, torch.zeros(B, dtype=torch.long))
