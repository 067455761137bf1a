"""Data from outside the batch, and marks that could get lost: the values are right, or the weight is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample.capture.mode import expanded_weights
from lightning_persample.errors import PerSampleError
from tests.capture.model_cases import DoubledByNumpy, Model, mean_of_squares, parameter
from tests.capture.reference import assert_values, loop, record_of

pytestmark = pytest.mark.usefixtures("double_precision")

B = 4


def vectors() -> Tensor:
    return torch.randn(B, 6)


def by_assignment(x: Tensor) -> Tensor:
    room = torch.zeros(1)
    room.data = 2 * x
    return room


def through_an_older_view(x: Tensor) -> Tensor:
    room = torch.zeros_like(x)
    flat = room.view(-1)
    room.copy_(2 * x)
    return flat.view(-1, 6)


SECOND_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "numpy": lambda x: torch.from_numpy(x.numpy() * 1.1),
    "list": lambda x: torch.tensor([[value * 1.1 for value in row] for row in x.tolist()]),
    "new-tensor": lambda x: x.new_tensor((x * 1.1).tolist()),
    "out-argument": lambda x: torch.mul(x, 2, out=torch.zeros_like(x)),
    "assignment-of-data": by_assignment,
    "older-view": through_an_older_view,
    "custom-function": DoubledByNumpy.apply,
}


@pytest.mark.parametrize("name", SECOND_VIEWS)
def test_a_second_view_of_the_data_is_exact_or_the_weight_is_named(name: str) -> None:
    module, batch = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), vectors()

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().mean() + m(SECOND_VIEWS[name](x)).square().mean()

    record = record_of(module, loss, batch)
    assert set(record.names) | set(record.unsupported) == {"0.weight", "0.bias"}
    assert_values(record, loop(module, loss, (batch,)))


def test_a_critic_on_real_and_generated_data_is_named() -> None:
    class Adversarial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.critic = nn.Linear(6, 6), nn.Linear(6, 1)

    def critic_loss(m: Any, x: Tensor) -> Tensor:
        generated = m.generator(torch.randn(len(x), 6)).detach()
        return F.softplus(-m.critic(x)).mean() + F.softplus(m.critic(generated)).mean()

    def joint_loss(m: Any, x: Tensor) -> Tensor:
        generated = m.generator(torch.randn(len(x), 6)).detach()
        return (F.softplus(-m.critic(x)) + F.softplus(m.critic(generated))).mean()

    module = Adversarial()
    record = record_of(module, critic_loss, vectors())
    assert set(record.unsupported) == {"critic.weight", "critic.bias"}
    assert "`randn` at test_outside.py:" in record.unsupported["critic.weight"]
    module.zero_grad()
    record = record_of(module, joint_loss, vectors())
    torch.testing.assert_close(record.grad_samples["critic.weight"].mean(0), module.critic.weight.grad)


def test_penalties_on_buffers_and_old_parameters_raise_no_alarm() -> None:
    module = nn.Linear(6, 4)
    module.register_buffer("old", torch.randn(4, 6))
    frozen, batch = nn.Parameter(torch.randn(4, 6), requires_grad=False), vectors()

    def loss(m: Any, x: Tensor) -> Tensor:
        penalty = (m.weight - m.old).square().sum() + (m.weight - frozen).abs().sum()
        return mean_of_squares(m, x) + penalty + (m.weight @ m.weight.T - torch.eye(4)).square().sum()

    record = record_of(module, loss, batch)
    assert record.unsupported == {}
    assert_values(record, loop(module, mean_of_squares, (batch,)))


# Terms of weights that no sample uses, and whether something else than weights is in them.
UNUSED: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "squares": (lambda w: 0.1 * w.square().sum(), False),
    "norm": (lambda w: w.norm(), False),
    "orthogonal": (lambda w: (w @ w.T - torch.eye(4)).square().sum(), False),
    "noise": (lambda w: w.square().sum() + (w * torch.randn(4, 6)).sum(), True),
}


@pytest.mark.parametrize("name", UNUSED)
def test_a_penalty_alone_is_no_use_of_a_parameter(name: str) -> None:
    term, has_data = UNUSED[name]
    module, batch = Model(lambda m, x: m.a(x), a=nn.Linear(6, 3), w=nn.Parameter(torch.randn(4, 6))), vectors()
    record = record_of(module, lambda m, x: mean_of_squares(m, x) + term(m.w), batch)
    assert set(record.unsupported) == ({"w"} if has_data else set())
    assert record.unused == (() if has_data else ("w",))
    assert_values(record, loop(module, mean_of_squares, (batch,)))


@pytest.mark.parametrize(
    "layer", [lambda: nn.Linear(6, 3), lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 3, 2))]
)
def test_hooks_that_change_the_gradient_of_an_output(layer: Callable[[], nn.Module]) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = m.a(x)
        hidden.register_hook(lambda grad: 2 * grad)
        return hidden

    module, batch = Model(forward, a=layer()), vectors()
    assert_values(record_of(module, mean_of_squares, batch), loop(module, mean_of_squares, (batch,)))


def test_a_hook_that_changes_the_gradient_of_a_parameter_is_named() -> None:
    module, batch = nn.Linear(6, 3), vectors()
    module.weight.register_hook(lambda grad: grad * torch.eye(3, 6))
    module.bias.register_hook(lambda grad: None)
    record = record_of(module, mean_of_squares, batch)
    assert set(record.unsupported) == {"weight"}
    assert "a hook registered on it changes its gradient" in record.unsupported["weight"]
    assert record.names == ("bias",)


@pytest.mark.parametrize("of", [lambda w: w * 2, lambda w: w.T.contiguous().T, lambda w: w[:, [1, 0, 2, 3, 4, 5]]])
def test_a_hook_that_changes_the_gradient_of_what_a_weight_is_made_into_is_named(
    of: Callable[[Tensor], Tensor],
) -> None:
    def loss(m: Any, x: Tensor, hook: Callable[[Tensor], Tensor | None] = lambda grad: None) -> Tensor:
        made = of(m.weight)
        made.register_hook(hook)
        return nn.functional.linear(x, made, m.bias).square().sum(1).mean()

    module, batch = nn.Linear(6, 3), vectors()
    record = record_of(module, loss, batch)
    assert record.unsupported == {}
    assert_values(record, loop(module, loss, (batch,)))
    record = record_of(module, lambda m, x: loss(m, x, lambda grad: grad * torch.eye(3, 6)), batch)
    assert set(record.unsupported) == {"weight"}
    assert "a hook registered on what `" in record.unsupported["weight"]
    assert record.names == ("bias",)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_hook_on_a_gradient_that_is_zero_but_for_rounding(dtype: torch.dtype) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Conv1d(3, 4, 3), nn.InstanceNorm1d(4)).to(dtype)
        module[0].bias.register_hook(lambda grad: None)
        assert record_of(module, mean_of_squares, torch.randn(B, 3, 9, dtype=dtype)).unsupported == {}
    module[0].bias.register_hook(lambda grad: grad + 1e-2)
    record = record_of(module, mean_of_squares, torch.randn(B, 3, 9, dtype=dtype))
    assert "a hook registered on it changes its gradient" in record.unsupported["0.bias"]


def test_an_index_that_is_an_array_of_numpy() -> None:
    module, batch = nn.Linear(6, 3), torch.randn(B, B, 6)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x.transpose(0, 1)[np.array([0, 2, 1, 3])].transpose(0, 1)).square().mean((1, 2)).mean()

    assert_values(record_of(module, loss, batch), loop(module, loss, (batch,)))


@pytest.mark.parametrize("turn", [lambda w: w.mH, lambda w: w.H, lambda w: w.adjoint()])
def test_complex_weights_are_conjugated(turn: Callable[[Tensor], Tensor]) -> None:
    module = Model(lambda m, x: x @ turn(m.w), w=nn.Parameter(torch.randn(3, 6, dtype=torch.complex128)))
    batch = torch.randn(B, 6, dtype=torch.complex128)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).abs().square().mean()

    assert_values(record_of(module, loss, batch), loop(module, loss, (batch,)))


def test_a_real_weight_used_as_a_complex_one() -> None:
    module = Model(lambda m, x: (x @ m.w.to(torch.complex128)).abs(), w=parameter(6, 3))
    batch = torch.randn(B, 6, dtype=torch.complex128)
    record = record_of(module, mean_of_squares, batch)
    assert record.grad_samples["w"].dtype == torch.float64
    assert_values(record, loop(module, mean_of_squares, (batch,)))


def test_a_backward_that_raises_leaves_nothing_for_the_next() -> None:
    module, batch = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)), vectors()

    def stop(grad: Tensor) -> None:
        raise ZeroDivisionError

    with expanded_weights(module, batch, quantities=("grad_sample",), unsupported="error") as capture:
        hidden = module[0](batch)
        hidden.register_hook(stop)
        with pytest.raises(ZeroDivisionError):
            mean_of_squares(module[1:], hidden).backward()
        mean_of_squares(module, batch).backward()
    assert_values(capture.record, loop(module, mean_of_squares, (batch,)))


def test_parameters_written_to_under_observation_remain_weights() -> None:
    module, batch = nn.Linear(6, 4), vectors()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    with expanded_weights(module, batch, quantities=("grad_sample",), unsupported="error") as capture:
        mean_of_squares(module, batch).backward()
        optimizer.step()
        mean_of_squares(module, batch).backward()
    assert_values(capture.record, loop(module, mean_of_squares, (batch,)))


def test_features_of_inference_mode() -> None:
    with torch.inference_mode():
        batch = vectors()
    module = Model(lambda m, x: torch.cat([m.c.expand(len(x), -1), x + m.p], 1), c=parameter(1, 6), p=parameter(6))
    assert_values(record_of(module, mean_of_squares, batch), loop(module, mean_of_squares, (batch,)))


def test_lazy_layers_are_followed_from_their_first_step() -> None:
    module, batch = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2)), vectors()
    record = record_of(module, mean_of_squares, batch)
    assert record.coverage == 1.0
    assert_values(record, loop(module, mean_of_squares, (batch,)))


SINGLE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "squeeze": lambda m, x: m.b(m.a(x).squeeze(0)),
    "first": lambda m, x: m.b(m.a(x)[0]),
    "mean-over-batch": lambda m, x: m.b(m.a(x).mean(0)),
    "centred": lambda m, x: m.b(m.a(x) - m.a(x).mean(0) / 2),
}


@pytest.mark.parametrize("name", SINGLE)
def test_one_sample_mixes_with_none(name: str) -> None:
    module, batch = Model(SINGLE[name], a=nn.Linear(6, 4), b=nn.Linear(4, 2)), torch.randn(1, 6)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().mean()

    record = record_of(module, loss, batch)
    assert (record.mixing, record.axis_lost, record.weighting, record.unsupported) == ((), (), (), {})
    assert_values(record, loop(module, loss, (batch,)))


def test_backward_into_some_parameters_only() -> None:
    module, batch = nn.Linear(6, 4), vectors()
    with expanded_weights(module, batch) as capture:
        mean_of_squares(module, batch).backward(inputs=[module.weight])
    assert capture.record.names == ("weight",)
    assert capture.record.unused == ("bias",)


def test_a_closed_capture_is_not_used_again() -> None:
    module, batch = nn.Linear(6, 4), vectors()
    capture = expanded_weights(module, batch)
    with capture:
        mean_of_squares(module, batch).backward()
    with pytest.raises(PerSampleError, match="this capture is closed; make a new one with expanded_weights"), capture:
        pass


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, generator: torch.poisson(x.abs(), generator=generator),
        lambda x, generator: torch.normal(x, 1.0, generator=generator),
    ],
)
def test_a_generator_of_its_own_is_drawn_from_once(draw: Callable[[Tensor, torch.Generator], Tensor]) -> None:
    module, batch = nn.Linear(6, 4), vectors()

    def run(observed: bool) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        if not observed:
            return draw(batch, generator)
        with expanded_weights(module, batch, unsupported="ignore"):
            return draw(batch, generator)

    assert torch.equal(run(False), run(True))
