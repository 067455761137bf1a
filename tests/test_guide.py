"""The code in the guide runs, is short, and gives the values that it promises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_persample import expanded_weights
from lightning_persample.batch_axis import base, follow, ops
from tests.influence.loops import simple

GUIDE = Path(__file__).parents[1] / "examples" / "guide"


def blocks(page: str) -> list[str]:
    text = (GUIDE / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def contributed(own_rules, monkeypatch) -> dict[str, Any]:
    """What the page for contributors defines; what it registers is gone afterwards."""
    for module, name in ((ops, "OPS"), (base, "PROPAGATION_RULES")):
        for key in {"logdet", "det"}:
            monkeypatch.setitem(getattr(module, name), key, None)
            del getattr(module, name)[key]
    monkeypatch.setattr(base, "BY_LAYOUT", set(base.BY_LAYOUT))
    namespace: dict[str, Any] = {"__name__": "contributing"}
    for number, block in enumerate(blocks("contributing.md")):
        exec(compile(block, f"contributing.md, block {number}", "exec"), namespace)
    return namespace


def test_each_addition_takes_less_than_20_lines():
    lengths = [len([line for line in block.splitlines() if line.strip()]) for block in blocks("contributing.md")]
    assert len(lengths) >= 4
    assert max(lengths) < 20


class Matrices(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.linear, self.shift = dim, nn.Linear(2, 9), nn.Parameter(torch.rand(3))

    def forward(self, x):
        matrices = torch.hypot(self.linear(x).unflatten(1, (3, 3)), self.shift)
        return torch.logdet(matrices.transpose(0, self.dim) if self.dim else matrices @ matrices.mT)


def test_an_op_added_as_the_page_says_is_followed_and_exact(contributed, monkeypatch):
    monkeypatch.setattr(follow, "try_on_one_sample", lambda call: pytest.fail(f"{call.name} was tried"))
    module, x = Matrices(0).double(), torch.randn(4, 2, dtype=torch.float64)
    with expanded_weights(module, x, loss_reduction="sum") as capture:
        module(x).sum().backward()
    for i, norm in enumerate(capture.record.norms()):
        grads = torch.autograd.grad(module(x[i : i + 1]).sum(), list(module.parameters()))
        torch.testing.assert_close(norm, sum(grad.square().sum() for grad in grads).sqrt())


def test_a_statistic_added_as_the_page_says(contributed):
    metric = contributed["ParticipationRatio"]()
    metric.update(torch.ones(3))
    metric.update(torch.zeros(1))
    assert metric.compute().item() == pytest.approx(3 / 4)


def test_a_score_added_as_the_page_says(contributed, tmp_path):
    train, test = simple(tmp_path / "train", [[3.0, 4.0], [0.0, 2.0]]), simple(tmp_path / "test", [[1.0, 1.0]])
    scores = contributed["relative_grad_dot"](train, test).scores
    torch.testing.assert_close(scores, torch.tensor([[7 / 5], [1.0]], dtype=torch.float64))
