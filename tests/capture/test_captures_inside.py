"""A capture inside another one: both see the step, and each has the record of its own module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_persample import PerSampleRecord, expanded_weights, mark_samples
from tests.capture.reference import assert_values, loop
from tests.torch_release import not_in_the_oldest

OPTIONS = [{}, {"fuse_weight_grad": True}]


class Pair(nn.Module):
    """A generator and what judges it."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.critic = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))
        self.recompute = recompute

    def run(self, part: nn.Module, x: Tensor) -> Tensor:
        if self.recompute is None:
            return part(x)
        found: Tensor = checkpoint(part, x, use_reentrant=self.recompute)
        return found

    def forward(self, noise: Tensor) -> Tensor:
        return F.softplus(self.run(self.critic, self.run(self.generator, noise))).mean()


def assert_of_part(record: PerSampleRecord, expected: dict[str, Tensor], part: str) -> None:
    own = {name.removeprefix(f"{part}."): rows for name, rows in expected.items() if name.startswith(part)}
    assert sorted(record.names) == sorted(own)
    assert record.coverage == 1.0
    assert_values(record, own)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("recompute", [None, False, True])
def test_each_has_the_record_of_its_own_module(recompute: bool | None, options: dict[str, Any]) -> None:
    pair, noise = Pair().double(), torch.randn(4, 3).double()
    expected = loop(pair, lambda module, x: module(x), (noise,))
    pair(noise).backward()
    grads = [parameter.grad for parameter in pair.parameters()]
    pair.zero_grad()
    pair.recompute = recompute
    noise.requires_grad_(bool(recompute))
    asked = {"quantities": ("sq_norm", "grad_sample"), "unsupported": "error", **options}
    with (
        expanded_weights(pair.generator, noise, **asked) as outer,
        expanded_weights(pair.critic, noise, **asked) as inner,
        expanded_weights(pair, noise, **asked) as all_of_it,
    ):
        pair(noise).backward()
    assert [len(capture.records) for capture in (outer, inner, all_of_it)] == [1, 1, 1]
    assert_of_part(outer.record, expected, "generator")
    assert_of_part(inner.record, expected, "critic")
    assert_values(all_of_it.record, expected)
    for parameter, grad in zip(pair.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-12 if options else 0.0, atol=0.0)


@not_in_the_oldest
def test_a_backward_that_is_broken_off_is_none_for_both() -> None:
    pair, noise = Pair().double(), torch.randn(4, 3).double()
    expected = loop(pair, lambda module, x: module(x), (noise,))

    def broken(grad: Tensor) -> Tensor:
        raise KeyError("broken off")

    asked = {"quantities": ("sq_norm", "grad_sample")}
    with (
        expanded_weights(pair.generator, noise, **asked) as outer,
        expanded_weights(pair.critic, noise, **asked) as inner,
    ):
        loss = pair(noise)
        handle = loss.register_hook(broken)
        with pytest.raises(KeyError, match="broken off"):
            loss.backward()
        handle.remove()
        assert (outer.records, inner.records) == ([], [])
        torch.autograd.backward([pair(noise)])
    assert_of_part(outer.record, expected, "generator")
    assert_of_part(inner.record, expected, "critic")


def test_what_is_marked_is_marked_for_both() -> None:
    pair, x = Pair().double(), torch.randn(4, 2).double()
    asked = {"quantities": ("sq_norm", "grad_sample"), "unsupported": "error"}
    with expanded_weights(pair.generator, x, **asked) as outer, expanded_weights(pair.critic, x, **asked) as inner:
        noise = mark_samples(torch.randn(4, 3).double())
        (pair(noise) + F.softplus(-pair.critic(x)).mean()).backward()

    def loss(module: nn.Module, noise: Tensor, x: Tensor) -> Tensor:
        total: Tensor = module(noise) + F.softplus(-module.critic(x)).mean()
        return total

    expected = loop(pair, loss, (noise, x))
    assert_of_part(outer.record, expected, "generator")
    assert_of_part(inner.record, expected, "critic")
