"""Where batch normalisation does not run on one sample alone, the error says what helps, and that does help."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_persample import UnsupportedError, loop_per_sample_grads, vmap_per_sample_grads
from tests.capture.reference import loop

pytestmark = pytest.mark.usefixtures("double_precision")

B = 4
KEEPS = (
    "normalises with the statistics of the batch and keeps them in buffers, which vmap over single samples cannot do; "
    "call eval() on it, or build it with track_running_stats=False, or use loop_per_sample_grads (in a callback "
    "engine='loop'): a sample is then normalised without the others; what a sample contributes to the gradient of the "
    "batch is given by expanded_weights and engine='expanded'"
)
ONE_VALUE = (
    "`1` normalises with the statistics of the batch, but a sample alone has one value per channel, and "
    "track_running_stats=False does not help; let it normalise with running statistics (track_running_stats=True and "
    "eval()), or replace it, for example by nn.LayerNorm; what a sample contributes to the gradient of the batch is "
    "given by expanded_weights and engine='expanded'"
)
BOTH = pytest.mark.parametrize("per_sample", [vmap_per_sample_grads, loop_per_sample_grads], ids=["vmap", "loop"])


def squares(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


def after_linear(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), norm)


def after_convolution(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4, **options))


def assert_values(per_sample: Any, module: nn.Module, batch: Tensor) -> None:
    _, grads = per_sample(module, squares, batch)
    for name, expected in loop(module, squares, (batch,)).items():
        torch.testing.assert_close(grads[name], expected)


def test_vmap_cannot_keep_running_statistics() -> None:
    batch = torch.randn(B, 3, 6)
    with pytest.raises(UnsupportedError, match=re.escape(f"`1` {KEEPS}")):
        vmap_per_sample_grads(after_convolution(), squares, batch)
    with pytest.raises(UnsupportedError, match=re.escape(f"the module itself {KEEPS}")):
        vmap_per_sample_grads(nn.BatchNorm1d(3), squares, batch)
    assert_values(vmap_per_sample_grads, after_convolution().eval(), batch)
    assert_values(vmap_per_sample_grads, after_convolution(track_running_stats=False), batch)
    assert_values(loop_per_sample_grads, after_convolution(), batch)


@BOTH
@pytest.mark.parametrize(("keeps", "mode"), [(True, True), (False, True), (False, False)])
def test_one_sample_has_one_value_per_channel(keeps: bool, mode: bool, per_sample: Any) -> None:
    module = after_linear(nn.BatchNorm1d(4, track_running_stats=keeps)).train(mode)
    with pytest.raises(UnsupportedError, match=re.escape(ONE_VALUE)):
        per_sample(module, squares, torch.randn(B, 6))


@BOTH
@pytest.mark.parametrize("build", [lambda: nn.BatchNorm1d(4).eval(), lambda: nn.LayerNorm(4)], ids=["eval", "layer"])
def test_what_is_said_to_help_then_helps(build: Any, per_sample: Any) -> None:
    assert_values(per_sample, after_linear(build()), torch.randn(B, 6))


@BOTH
def test_other_complaints_of_torch_remain_as_they_are(per_sample: Any) -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        per_sample(after_linear(nn.GroupNorm(4, 4)), squares, torch.randn(B, 6))
