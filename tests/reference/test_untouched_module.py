"""What a module does in a second pass is undone."""

from __future__ import annotations

import copy
import functools
import random
from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_persample.errors import PerSampleError
from lightning_persample.reference.untouched import recurrent_layers_can_go_backward, untouched


class Changing(nn.Module):
    """Changes everything it has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.teacher = [nn.Linear(2, 2)]  # not registered
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("positions", torch.arange(3).expand(2, -1), persistent=False)
        self.plain = torch.zeros(2)
        self.resized = torch.zeros(2)
        self.values = {"list": [1], "set": {1}, "deque": deque([1, 2], maxlen=2), "tensors": [torch.zeros(1)]}
        self.number = 0
        self.generator = torch.Generator().manual_seed(1)
        self.generators = [np.random.default_rng(1), np.random.RandomState(1), random.Random(1), random.SystemRandom()]
        self.array, self.fixed = np.zeros((2, 3)), np.zeros(2)
        self.fixed.flags.writeable = False

    def change(self) -> None:
        with torch.no_grad():
            self.layer.weight += 1
            self.layer.bias.data.mul_(2)
            self.teacher[0].weight.data = torch.zeros(5)
            self.count += 1
            self.plain += 1
            self.resized.resize_(4)
        self.plain = None
        self.values["list"].append(2)
        self.values["set"].clear()
        self.values["deque"].append(3)
        self.values["tensors"][0] += 1
        self.values["new"] = [1]
        self.number += 1
        self.array[1] += 1
        self.new = 1
        self.eval()
        self.layer.weight.grad = torch.ones(2, 2)
        self.layer = nn.Linear(2, 2)
        self.register_parameter("extra", nn.Parameter(torch.zeros(1)))


def described(module: Changing) -> list[object]:
    values = {k: [t.tolist() for t in v] if k == "tensors" else list(v) for k, v in module.values.items()}
    tensors = [*module.state_dict().items(), *module.teacher[0].state_dict().items(), ("plain", module.plain)]
    return [
        sorted(module.__dict__),
        [(name, str(tensor)) for name, tensor in tensors],
        [(id(p), p.data_ptr()) for p in (*module.parameters(), *module.teacher[0].parameters())],
        values,
        (module.number, module.training, module.layer.training, module.resized.tolist(), module.array.tolist()),
        (module.generator.get_state().tolist(), *copies_draw(module)),
        (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
    ]


def copies_draw(module: Changing) -> list[float]:
    return [copy.deepcopy(each).random() for each in module.generators[:2]] + [module.generators[2].getstate()[1][-1]]


def draw(module: Changing) -> None:
    for each in module.generators:
        each.random()
    torch.rand(3, generator=module.generator)
    torch.rand(3)
    random.random()
    np.random.rand(3)


def test_everything_is_put_back():
    module = Changing()
    grad = torch.zeros(2, 2)
    module.layer.weight.grad = grad
    before, containers = described(module), {name: id(value) for name, value in module.values.items()}
    with untouched(module) as state:
        for _ in range(2):
            module.change()
            draw(module)
            assert described(module) != before
            state.restore()
            assert described(module) == before
        module.change()
        draw(module)
    assert described(module) == before
    assert module.layer.weight.grad is grad
    assert {name: id(value) for name, value in module.values.items()} == containers
    assert module.values["deque"].maxlen == 2


def test_it_is_put_back_after_an_error():
    module = Changing()
    before = described(module)

    def fail() -> None:
        with untouched(module):
            module.change()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert described(module) == before


def test_random_numbers_may_go_on():
    module = Changing()
    with untouched(module) as state:
        start = torch.get_rng_state()
        draw(module)
        module.change()
        after = described(module)[-2:]
        state.restore(random_states=False)
        assert described(module)[-2:] == after
        assert module.number == 0
    assert torch.equal(torch.get_rng_state(), start)


def test_a_tensor_of_a_computation_is_left_alone():
    module = nn.Linear(2, 2)
    module.hidden = module(torch.randn(1, 2))
    hidden = module.hidden
    with untouched(module):
        module.hidden = None
    assert module.hidden is hidden
    module.hidden.sum().backward()


def test_a_graph_that_was_made_before_goes_backward_and_one_whose_tensors_were_written_to_does_not():
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    x = torch.randn(4, 2)
    (expected,) = torch.autograd.grad(module(x).square().sum(), [module[0].weight])
    loss = module(x).square().sum()
    with untouched(module) as state, torch.no_grad():
        for _ in range(2):
            module[1].weight.mul_(2)
            state.restore()
        module[1].weight.add_(1)
    assert torch.equal(torch.autograd.grad(loss, [module[0].weight])[0], expected)
    loss = module(x).square().sum()
    with torch.no_grad():
        module[1].weight.mul_(1)
    with untouched(module), torch.no_grad():
        module[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Average:
    """An object of the user's own class."""

    def __init__(self) -> None:
        self.count, self.shadow, self.inside = 0, {"weight": torch.zeros(2)}, [Tag(1)]

    def update(self) -> None:
        self.count += 1
        self.shadow["weight"] += 1
        self.shadow["bias"] = torch.ones(1)
        self.inside[0].number += 1
        self.new = self


@dataclass
class Tag:
    number: int


class Data(Dataset):
    def __init__(self) -> None:
        self.read = 0


def test_objects_of_the_users_own_classes_are_put_back_and_data_are_not_looked_into():
    module = Changing()
    module.average, module.data, module.others = Average(), Data(), Callback()
    module.average.module, module.others.count = module, 0
    with untouched(module):
        module.average.update()
        module.data.read = module.others.count = 1
    assert vars(module.average).keys() == {"count", "shadow", "inside", "module"}
    assert module.average.shadow.keys() == {"weight"}
    assert (module.average.count, module.average.inside[0].number) == (0, 1)
    assert torch.equal(module.average.shadow["weight"], torch.zeros(2))
    assert module.data.read == module.others.count == 1


@dataclass(slots=True)
class Tally:
    count: int
    values: list[int]


class Call(functools.partial):
    """Its attributes cannot be set."""


def test_objects_with_slots_are_put_back():
    module = Changing()
    module.tally, module.call = Tally(1, [1]), Call(int, "1")
    with untouched(module):
        module.tally.count = 2
        module.tally.values.append(2)
    assert module.tally == Tally(1, [1])
    assert module.call() == 1


def test_an_ordered_dict_keeps_its_order():
    module = Changing()
    module.recent = recent = OrderedDict(a=1, b=2)
    with untouched(module):
        recent.popitem(last=False)
        recent["c"] = 3
        recent.move_to_end("b")
    assert list(recent.items()) == list(dict(recent).items()) == [("a", 1), ("b", 2)]
    assert recent.popitem(last=False) == ("a", 1)


def drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def test_hooks_attributes_and_whether_a_gradient_is_required_are_put_back():
    module = Changing()
    weight, bias = module.layer.weight, module.layer.bias
    kept = weight.register_hook(lambda grad: grad * 2)
    weight.calls = [1]
    with untouched(module) as state:
        for _ in range(2):
            weight.calls.append(2)
            weight.added = 1
            kept.remove()
            weight.register_hook(torch.zeros_like)
            bias.register_hook(torch.zeros_like)
            bias.register_post_accumulate_grad_hook(drop_gradient)
            weight.requires_grad_(False)
            module.plain.add_(bias.sum())
            module.layer.register_forward_hook(lambda *found: None)
            state.restore()
    assert vars(weight) == {"calls": [1]}
    assert weight.requires_grad
    assert not module.plain.requires_grad
    assert list(module.layer._forward_hooks.items()) == []
    module.layer(torch.ones(1, 2)).sum().backward()
    assert torch.equal(weight.grad, torch.full((2, 2), 2.0))
    assert torch.equal(bias.grad, torch.ones(2))


@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState, random.Random, torch.Generator])
def test_a_generator_of_the_module_tells_that_numbers_were_drawn(make):
    module = nn.Module()
    module.generator = generator = make()
    with untouched(module) as state:
        assert not state.drew_random_numbers()
        torch.rand(1, generator=generator) if isinstance(generator, torch.Generator) else generator.random()
        assert state.drew_random_numbers()


def test_a_parameter_that_does_not_exist_yet_is_said():
    with pytest.raises(PerSampleError) as error, untouched(nn.Sequential(nn.LazyLinear(2))):
        pass
    assert str(error.value) == (
        "parameter `0.weight` is not initialized yet, and running the module again would create it; run one batch "
        "through the module first"
    )


def test_recurrent_layers_without_a_backward_in_evaluation_compute_the_same_in_training(monkeypatch):
    monkeypatch.setattr(Tensor, "is_cuda", True)  # cuDNN alone lacks it
    module = nn.Sequential(nn.LSTM(3, 4, num_layers=2, dropout=0.5), nn.Dropout())
    module.eval()
    expected = module[0](torch.ones(2, 3))[0]
    with recurrent_layers_can_go_backward(module):
        assert module[0].training
        assert not module[1].training
        torch.testing.assert_close(module[0](torch.ones(2, 3))[0], expected, rtol=0, atol=0)
    assert (module[0].training, module[0].dropout) == (False, 0.5)
    with recurrent_layers_can_go_backward(module.train()):
        assert module[0].dropout == 0.5
    assert module[0].training
