"""Batches that are parts of one larger tensor begin elsewhere in its memory at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample import expanded_weights

B, STEPS = 4, 6
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one channel": (lambda: nn.Conv2d(1, 8, 3), (1, 28, 28)),
    "patches": (lambda: nn.Conv2d(3, 64, 8, stride=8), (3, 32, 32)),
    "padded": (lambda: nn.Conv2d(3, 16, 3, padding=1), (3, 16, 16)),
    "deep": (lambda: nn.Conv2d(32, 64, 3), (32, 5, 5)),
    "signals": (lambda: nn.Conv1d(2, 5, 4, dilation=2), (2, 40)),
    "volumes": (lambda: nn.Conv3d(1, 4, 2), (1, 6, 6, 6)),
    "linear": (lambda: nn.Linear(9, 4), (9,)),
    "positions": (lambda: nn.Linear(9, 4), (7, 9)),
    "norm": (lambda: nn.GroupNorm(2, 4), (4, 5, 5)),
    "layer norm": (lambda: nn.LayerNorm(6), (3, 6)),
}
PARTS: dict[str, Callable[[Tensor], Iterator[Tensor]]] = {
    "split": lambda data: iter(data.flatten(0, 1).split(B)),
    "select": lambda data: (data.select(0, step) for step in range(STEPS)),
    "picked": lambda data: (data.transpose(0, 1).contiguous()[:, step] for step in range(STEPS)),
    "reversed": lambda data: reversed(data.unbind()),
}


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", LAYERS)
def test_every_step_gives_the_norms_of_its_own_samples(name, parts, fuse):
    torch.manual_seed(0)
    build, shape = LAYERS[name]
    layer = build().double()
    data = torch.randn(STEPS, B, *shape, dtype=torch.float64)
    for x in PARTS[parts](data):
        target = torch.randn_like(layer(x))
        expected = {key: [] for key, _ in layer.named_parameters()}
        for sample in range(B):
            layer.zero_grad()
            F.mse_loss(layer(x[sample : sample + 1]), target[sample : sample + 1]).backward()
            for key, parameter in layer.named_parameters():
                expected[key].append(parameter.grad.clone())
        layer.zero_grad()
        with expanded_weights(layer, (x, target), fuse_weight_grad=fuse, unsupported="error") as capture:
            F.mse_loss(layer(x), target).backward()
        for key, parameter in layer.named_parameters():
            grads = torch.stack(expected[key])
            torch.testing.assert_close(capture.record.sq_norms[key], grads.flatten(1).square().sum(1))
            torch.testing.assert_close(parameter.grad, grads.mean(0))


def test_the_ways_in_which_tensors_lie_in_memory_are_bounded():
    from lightning_persample.capture import plan

    layer = nn.Linear(3, 2)
    plan.PLANS.clear()
    for width in range(3, 3 + 2 * plan._MOST_PROGRAMS):
        x = torch.randn(B, width)[:, :3]
        for _ in range(2):
            with expanded_weights(layer, (x,)):
                layer(x).square().sum(1).mean().backward()
    counts = [len(each.slots.programs) for each in plan.PLANS.values() if each.slots is not None]
    assert 0 < max(counts) <= plan._MOST_PROGRAMS
