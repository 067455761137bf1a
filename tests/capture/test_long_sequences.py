"""What a captured step of a recurrent layer takes grows as its sequences do, and no faster."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.autograd.profiler import profile

from lightning_persample import expanded_weights
from lightning_persample.capture.graph import ends_below, ends_below_each


def test_the_ends_below_each_node_are_those_below_it_alone():
    generator = random.Random(0)
    inside = {node: generator.sample(range(node + 1, 60), min(3, 59 - node)) for node in range(50)}
    found = ends_below_each(inside, lambda end: end % 2 == 0)
    assert found == {node: {end for end in ends_below(node, inside) if end % 2 == 0} for node in inside}
    assert any(found.values())


def test_a_long_chain_is_walked_once():
    asked = []
    chain = {node: [node + 1, -1] for node in range(20_000)}
    found = ends_below_each(chain, lambda end: asked.append(end) or True)
    assert sorted(asked) == [-1, 20_000]
    assert all(ends == {-1, 20_000} for ends in found.values())


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_a_replay_takes_no_tensor_of_all_steps_apart_at_each_of_them(kind):
    module, x = kind(3, 4, batch_first=True), torch.randn(2, 30, 3)

    def counted(is_captured: bool) -> int:
        module.zero_grad()
        with profile() as events:
            if is_captured:
                with expanded_weights(module, x, unsupported="error"):
                    module(x)[0].square().mean().backward()
            else:
                module(x)[0].square().mean().backward()
        return sum(event.name == "aten::select_backward" for event in events.function_events)

    assert counted(True) <= counted(False) + 2
