"""A network with batch normalization is decided once, too: warm steps give the values and texts of the first."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample import PerSampleRecord, expanded_weights
from lightning_persample.capture import plan

B = 4


class Residual(nn.Module):
    def __init__(self, twice: bool = False, **options: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(3, **options), nn.BatchNorm2d(3)
        self.head, self.twice = nn.Linear(3, 2), twice

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.first(x)), inplace=True)
        if self.twice:
            h = self.norm(h)
        h = self.last(self.second(h)) + x
        return self.head(h.mean((2, 3)))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "residual": Residual,
    "used twice": lambda: Residual(twice=True),
    "without scale": lambda: Residual(affine=False),
    "without running statistics": lambda: Residual(track_running_stats=False),
    "evaluation": lambda: Residual().eval(),
    "before and behind": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(75, 6), nn.LayerNorm(6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 2)
    ),
}


def captured(module: nn.Module, batch_size: int, quantity: str) -> tuple[PerSampleRecord, dict[str, Tensor]]:
    x, y = torch.randn(batch_size, 3, 5, 5), torch.arange(batch_size) % 2
    module.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with expanded_weights(module, (x, y), quantities=(quantity,)) as capture:
            F.cross_entropy(module(x), y).backward()
    return capture.record, {name: p.grad.clone() for name, p in module.named_parameters()}


@pytest.fixture(autouse=True)
def _in_double() -> None:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("batch_size", [B, 1])
@pytest.mark.parametrize("name", NETWORKS)
def test_warm_steps_give_what_the_first_gives(name, batch_size):
    if name == "before and behind" and batch_size == 1:
        pytest.skip("torch refuses one value per channel")
    torch.manual_seed(0)
    module, texts = NETWORKS[name](), []
    plan.PLANS.clear()
    for step in range(5):
        state = {key: value.clone() for key, value in module.state_dict().items()}
        torch.manual_seed(step)
        record, grads = captured(module, batch_size, "sq_norm")
        after = {key: value.clone() for key, value in module.state_dict().items()}
        known = plan.PLANS.copy()
        plan.PLANS.clear()  # and the same step, decided for the first time, with the gradients themselves
        module.load_state_dict(state)
        torch.manual_seed(step)
        whole, _ = captured(module, batch_size, "grad_sample")
        plan.PLANS.clear()
        plan.PLANS.update(known)
        assert record.sq_norms.keys() == whole.grad_samples.keys() == grads.keys()
        for parameter, gradients in whole.grad_samples.items():
            torch.testing.assert_close(record.sq_norms[parameter], gradients.flatten(1).square().sum(1))
            torch.testing.assert_close(gradients.mean(0), grads[parameter])
        assert all(torch.equal(value, after[key]) for key, value in module.state_dict().items())
        assert record.mixing == whole.mixing
        texts.append(record.mixing)
    mixes = name != "evaluation" and batch_size > 1
    assert len(texts[0]) == (0 if not mixes else 1 if name == "before and behind" else 3 if name == "used twice" else 2)
    assert texts.count(texts[0]) == len(texts)


def test_a_module_in_training_and_in_evaluation_in_turn():
    torch.manual_seed(0)
    module = Residual()
    for step in range(8):
        module.train(step % 2 == 0)
        record, _ = captured(module, B, "sq_norm")
        assert len(record.mixing) == (2 if step % 2 == 0 else 0)
