"""An op of one's own on weights alone makes a weight: its values are exact, and it runs again without a trace."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import wrap_torch_function

from lightning_persample import (
    UnsupportedError,
    call_for_per_sample_grads,
    expanded_weights,
    vmap_per_sample_grads,
)
from lightning_persample.capture import pull_back
from tests.capture.model_cases import Model, mean_of_squares, parameter
from tests.capture.reference import assert_exact, assert_values, loop, record_of
from tests.capture.two_runs import assert_same, first_order

pytestmark = pytest.mark.usefixtures("double_precision")


@torch.library.custom_op("persample_test::rounded", mutates_args=())
def rounded(w: Tensor, step: float) -> Tensor:
    return torch.round(w / step) * step


@torch.library.custom_op("persample_test::product", mutates_args=(), schema="(Tensor[] parts, Tensor factor) -> Tensor")
def product(parts: list[Tensor], factor: Tensor) -> Tensor:
    return parts[0] @ parts[1] * factor


@torch.library.custom_op("persample_test::cubed_by_numpy", mutates_args=())
def cubed_by_numpy(w: Tensor) -> Tensor:
    return torch.from_numpy(w.detach().numpy() ** 3)


@torch.library.custom_op("persample_test::doubled_with_noise", mutates_args=())
def doubled_with_noise(w: Tensor, place: str) -> Tensor:
    return 2 * w + (draw(place) if place.startswith("forward") else 0.0)


@torch.library.custom_op("persample_test::scaled_with_noise", mutates_args=())
def scaled_with_noise(x: Tensor, w: Tensor) -> Tensor:
    return x * w * (1 + random.random() + float(np.random.rand()))


def draw(place: str) -> float:
    draws = {"torch": lambda: torch.rand(()), "numpy": np.random.rand, "python": random.random}
    return float(draws[place.split()[1]]())


def keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.inputs = inputs


def product_backward(ctx: Any, grad: Tensor) -> tuple[list[Tensor], Tensor]:
    (left, right), factor = ctx.inputs
    grad_left, grad_right = factor * grad @ right.T, factor * (left.T @ grad)
    return [grad_left, grad_right], (grad * (left @ right)).sum()


def cubed_backward(ctx: Any, grad: Tensor) -> Tensor:
    return torch.from_numpy(3 * ctx.inputs[0].detach().numpy() ** 2 * grad.numpy())


def noise_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    place = ctx.inputs[1]
    return 2 * grad * (1 + draw(place) if place.startswith("backward") else 1.0), None


rounded.register_autograd(lambda ctx, grad: (grad * (ctx.inputs[0].abs() < 1), None), setup_context=keep_inputs)
product.register_autograd(product_backward, setup_context=keep_inputs)
cubed_by_numpy.register_autograd(cubed_backward, setup_context=keep_inputs)
doubled_with_noise.register_autograd(noise_backward, setup_context=keep_inputs)
scaled_with_noise.register_autograd(
    lambda ctx, grad: (grad * ctx.inputs[1], (grad * ctx.inputs[0]).sum(0)), setup_context=keep_inputs
)


class Clipped(torch.autograd.Function):
    """With a context that `forward` fills, as most autograd functions in use."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return w.clamp(-0.5, 0.5)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.5


@wrap_torch_function(lambda w: (w,))
def clipped(w: Tensor) -> Tensor:
    return Clipped.apply(w)


@wrap_torch_function(lambda w, count: (w, count))
def counted(w: Tensor, count: Tensor) -> Tensor:
    with torch.no_grad():
        count += 1
    return 2 * w


EXACT: dict[str, Callable[[Any], Tensor]] = {
    "custom-op": lambda m: rounded(m.w, 0.1),
    "a-list-of-weights": lambda m: product([m.a, m.b], m.s),
    "one-of-them-frozen": lambda m: product([m.a.detach(), m.b], m.s),
    "backward-by-numpy": lambda m: cubed_by_numpy(m.w),
    "autograd-function": lambda m: clipped(m.w),
    "one-after-another": lambda m: rounded(cubed_by_numpy(m.w.t()).t(), 0.1),
    "batch-norm-with-statistics": lambda m: F.batch_norm(m.w, m.mean, m.var, training=True),
    "a-call-that-counts": lambda m: counted(m.w, m.count),
}


def module_of(make: Callable[[Any], Tensor]) -> nn.Module:
    module = Model(
        lambda m, x: F.linear(x, make(m)), w=parameter(4, 6), a=parameter(4, 3), b=parameter(3, 6), s=parameter()
    )
    module.register_buffer("mean", torch.zeros(6))
    module.register_buffer("var", torch.ones(6))
    module.register_buffer("count", torch.zeros(()))
    return module


@pytest.mark.parametrize("name", EXACT)
def test_values_are_exact(name: str) -> None:
    module, batch = module_of(EXACT[name]), torch.randn(5, 6)
    assert_exact(module, mean_of_squares, (batch,))
    call_for_per_sample_grads(module, loss_reduction="mean")(batch).square().mean().backward()
    for key, grads in loop(module, mean_of_squares, (batch,)).items():
        found = getattr(module.get_parameter(key), "grad_sample", None)
        assert grads.any() == (found is not None)
        assert found is None or torch.allclose(found, grads, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", EXACT)
def test_training_is_equal_bit_for_bit(name: str) -> None:
    assert_same(module_of(EXACT[name]), [torch.randn(5, 6)], first_order)


def test_a_call_on_rows_of_a_weight_that_counts_counts_once() -> None:
    module = Model(lambda m, x: x * counted(m.w.expand(len(x), -1), m.count), w=parameter(6))
    module.register_buffer("count", torch.zeros(()))
    batch = torch.randn(5, 6)
    assert_exact(module, mean_of_squares, (batch,))
    assert_same(module, [batch], first_order)


@pytest.mark.parametrize("steps", [1, 3])
def test_observers_of_a_weight_see_it_once(steps: int) -> None:
    class Observed(nn.Module):
        """Quantisation-aware training: torch's op moves the range that it has seen in buffers, unseen by autograd."""

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 6, dtype=torch.float32))
            self.register_buffer("range", torch.tensor([[float("inf")], [-float("inf")]], dtype=torch.float32))
            self.register_buffer("scale", torch.ones(1, dtype=torch.float32))
            self.register_buffer("zero", torch.zeros(1, dtype=torch.int32))

        def forward(self, x: Tensor) -> Tensor:
            on = torch.ones(1, dtype=torch.int64)
            w = torch.fused_moving_avg_obs_fake_quant(
                self.w, on, on, *self.range, self.scale, self.zero, 0.01, -128, 127, 0, False, True
            )
            return F.linear(x, w)

    def train(module: nn.Module, batch: list[Tensor], facts: dict[str, Any]) -> None:
        for _ in range(steps):
            first_order(module, batch, facts)
            with torch.no_grad():
                module.w -= 0.1 * module.w.grad

    assert_same(Observed(), [torch.randn(5, 6, dtype=torch.float32)], train)


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(), np.random.rand()


def seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_op_that_draws_is_refused_and_draws_nothing_more(where: str, kind: str) -> None:
    module, batch = module_of(lambda m: doubled_with_noise(m.w, f"{where} {kind}")), torch.randn(5, 6)
    seeded()
    mean_of_squares(module, batch).backward()
    plain, after = module.w.grad, states()
    module.zero_grad()
    seeded()
    record = record_of(module, mean_of_squares, batch)
    assert after == states()
    assert torch.equal(plain, module.w.grad)
    text = "draws random numbers in its backward" if where == "backward" else "gives another value when it is repeated"
    assert text in record.unsupported["w"]


@pytest.mark.parametrize("size", [1, 5])
def test_an_op_on_a_weight_and_the_batch_that_draws_is_refused_and_draws_nothing_more(size: int) -> None:
    module, batch = Model(lambda m, x: scaled_with_noise(x, m.w), w=parameter(6)), torch.randn(size, 6)
    seeded()
    mean_of_squares(module, batch).backward()
    after = states()
    seeded()
    record = record_of(module, mean_of_squares, batch)
    assert after == states()
    assert "w" in record.unsupported


# Distances of weights alone, whose backward torch computes wrongly in batches.
DISTANCES: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "of-themselves": lambda m, x: torch.exp(-(torch.cdist(m.z, m.z) ** 2)),
    "of-two": lambda m, x: torch.cdist(m.z * 2, m.z, p=1),
    "of-heads": lambda m, x: torch.cdist(m.z.expand(2, 4, 3) * 1.5, m.z.expand(2, 4, 3), p=3).sum(0),
    "to-a-constant": lambda m, x: torch.cdist(m.z, torch.eye(4, 3)),
}


def distances(name: str) -> tuple[Model, Callable[..., Tensor]]:
    module = Model(lambda m, x: x @ DISTANCES[name](m, x), z=parameter(4, 3))
    return module, lambda module, x: module(x).square().sum(1).mean()


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_of_weights(name):
    module, loss_fn = distances(name)
    x = torch.randn(6, 4)
    expected = loop(module, loss_fn, (x,))
    assert_values(record_of(module, loss_fn, x), expected)
    call_for_per_sample_grads(module, loss_reduction="mean")(x).square().sum(1).mean().backward()
    torch.testing.assert_close(module.z.grad_sample, expected["z"])


@pytest.mark.parametrize("start", [0.0, math.nan])
@pytest.mark.parametrize("name", DISTANCES)
def test_distances_of_weights_that_were_equal_or_nan_at_first(name, start):
    """Where the derivative is zero or nan, computing it in batches goes wrong unseen, and says nothing of later."""
    pull_back.BATCHES.clear()
    module, loss_fn = distances(name)
    first = module.z.detach().clone()
    with torch.no_grad():
        module.z.fill_(start)
    for _ in range(2):
        record_of(module, loss_fn, torch.randn(6, 4))
        module.zero_grad()
    with torch.no_grad():
        module.z.copy_(first)
    for _ in range(4):
        x = torch.randn(6, 4)
        assert_values(record_of(module, loss_fn, x), loop(module, loss_fn, (x,)))


@pytest.mark.parametrize("name", DISTANCES)
def test_the_second_engine_refuses_what_torch_computes_wrongly_in_batches(name):
    module, loss_fn = distances(name)
    with pytest.raises(UnsupportedError, match="another gradient of `z` for the last sample in the batch"):
        vmap_per_sample_grads(module, loss_fn, torch.randn(6, 4))


TOP = torch.eye(4, 3) > 0
# Weights with entries that are infinite or nan on the way, and one cut at places that a tensor holds.
ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "infinite": lambda w: (w + torch.where(TOP, -torch.inf, 0.0)).softmax(1),
    "infinite-powers": lambda w: w.masked_fill(TOP, -torch.inf).exp(),
    "nan": lambda w: (w - 10).log().nan_to_num(0.0) + w,
    "all-nan": lambda w: torch.where(TOP | ~TOP, w, (w - 100).log()),
    "tensor-split": lambda w: torch.cat(torch.tensor_split(w, torch.tensor([1, 3]))),
}


@pytest.mark.parametrize("name", ODD)
def test_entries_that_are_not_finite_on_the_way(name):
    module = Model(lambda m, x: x @ ODD[name](m.w), w=parameter(4, 3))
    x = torch.randn(5, 4)
    record = record_of(module, mean_of_squares, x)
    assert record.unsupported == {}
    assert_values(record, loop(module, mean_of_squares, (x,)))


def test_an_infinite_entry_does_not_hide_that_an_op_draws():
    far = torch.where(torch.arange(6) > 4, torch.inf, 0.0)
    module = Model(lambda m, x: x * doubled_with_noise(m.w + far, "forward python").clamp(max=9.0), w=parameter(6))
    record = record_of(module, mean_of_squares, torch.randn(5, 6))
    assert "gives another value when it is repeated" in record.unsupported["w"]


def standardised(w: Tensor, gain: Tensor) -> Tensor:
    return F.batch_norm(w.reshape(1, 4, 6), None, None, (gain * 0.5).view(-1), training=True, eps=1e-5).reshape_as(w)


# What is made of weights, and whether its kernels alone say so.
WARM: dict[str, tuple[Callable[[Any], Tensor], bool]] = {
    "standardised": (lambda m: standardised(m.w, m.gain), True),
    "by-hand": (lambda m: (m.w - m.w.mean(1, keepdim=True)) / (m.w.std(1, keepdim=True) + 1e-5) * m.gain, True),
    "weight-norm": (lambda m: torch._weight_norm(m.w, m.gain, 0), True),
    "product": (lambda m: m.a @ m.b * m.s, True),
    "of-itself": (lambda m: m.w * m.w + m.w.roll(1, 0), True),
    "cut": (lambda m: torch.cat([m.w[:, 3:], m.w[:, :3].tanh()], 1), True),
    "masked": (lambda m: m.w.masked_fill(TOP_LEFT, 0.5) + m.w[1:2], True),
    "solved": (lambda m: torch.linalg.solve(m.a.T @ m.a + torch.eye(3), m.a.T).T @ m.b, True),
    "einsum": (lambda m: torch.einsum("ik,kj,ik->ij", m.a, m.b, m.a), True),
    "attention": (lambda m: F.scaled_dot_product_attention(m.w, m.w.sin(), m.w), True),
    "largest": (lambda m: m.w * m.w.max(), True),
    "in-place": (lambda m: (m.w + 1).mul_(2.0).add_(m.w), False),
    "distances": (lambda m: torch.cdist(m.a, m.b.T), False),
    "product-of-entries": (lambda m: m.w + m.w.prod(1, keepdim=True), True),
    "sorted": (lambda m: m.w.sort(1).values, True),
    "median": (lambda m: m.w - m.w.median(), True),
    "permuted": (lambda m: m.w[:, m.order], False),
}
TOP_LEFT = torch.eye(4, 6) > 0


def test_a_weight_times_a_number_is_never_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_back, "vector_jacobian", lambda *given: pytest.fail("it was"))
    for make in (lambda m: m.w * 0.3, lambda m: 2 * m.w.t().t(), lambda m: (m.w * 0.1).mul_(7)):
        assert_exact(module_of(make), mean_of_squares, (torch.randn(5, 6),))


@pytest.mark.parametrize("name", WARM)
def test_values_stay_exact_while_weights_and_shapes_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, by_kernels = WARM[name]
    module, differentiated = module_of(make), []
    module.gain = nn.Parameter(torch.rand(4, 1) + 0.5)
    module.register_buffer("order", torch.arange(6))
    jacobian = pull_back.vector_jacobian
    monkeypatch.setattr(pull_back, "vector_jacobian", lambda *given: differentiated.append(step) or jacobian(*given))
    for step in range(6):
        assert_exact(module, mean_of_squares, (torch.randn(5 if step != 3 else 3, 6),))
        module.order.copy_(torch.randperm(6))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
                if step == 2:  # (as when a checkpoint is loaded)
                    parameter.data = parameter * 2
    assert (5 not in differentiated) == by_kernels
    assert_same(module, [torch.randn(5, 6)], first_order)


MADE = ["standardised", "by-hand", "weight-norm", "product", "of-itself", "cut", "masked", "attention"]


def assert_norms(module: nn.Module, x: Tensor) -> None:
    with expanded_weights(module, (x,), unsupported="error") as capture:
        mean_of_squares(module, x).backward()
    expected = loop(module, mean_of_squares, (x,))
    found = capture.record.sq_norms
    assert found.keys() == {name for name, grads in expected.items() if grads.any()}
    for name, sq_norm in found.items():
        torch.testing.assert_close(sq_norm, expected[name].reshape(5, -1).square().sum(1), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", MADE)
def test_norms_of_what_one_call_uses_are_replayed_in_its_hook(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(WARM[name][0])
    module.gain = nn.Parameter(torch.rand(4, 1) + 0.5)
    for _ in range(4):
        assert_norms(module, torch.randn(5, 6))
    monkeypatch.setattr(pull_back, "pull_back", lambda weight: pytest.fail("it was pulled back afterwards"))
    monkeypatch.setattr(pull_back, "_pulled", lambda *given: pytest.fail("it was computed anew"))
    with torch.no_grad():
        module.w.mul_(-2.0)
    assert_norms(module, torch.randn(5, 6))


JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": torch.mul,
    "add": torch.add,
    "matmul": torch.matmul,
    "cat": lambda u, v: torch.cat([u, v]),
}


@pytest.mark.parametrize("name", JOINS)
def test_norms_are_replayed_for_weights_that_are_made_alike_alone(name: str) -> None:
    """Of two weights one is squared once and the other twice, by calls of the same ops; then it is the other way."""

    def forward(m: Any, x: Tensor) -> Tensor:
        u, v = m.p * m.p, m.q * m.q
        return F.linear(x, JOINS[name](u, v * v) if m.turned else JOINS[name](u * u, v))

    module: Any = Model(forward, p=parameter(6, 6), q=parameter(6, 6))
    for step in range(9):
        module.turned = step % 8 > 3
        assert_norms(module, torch.randn(5, 6))


def test_zeros_of_two_signs_and_a_result_that_is_an_argument() -> None:
    """`copysign` tells 0.0 from -0.0; `atleast_2d` gives a matrix as it is, and a vector as a matrix."""

    def forward(m: Any, x: Tensor) -> Tensor:
        matrix, row = torch.atleast_2d(m.w, m.v)
        return F.linear(x, torch.copysign(matrix, -0.0 if m.turned else 0.0) + row)

    module: Any = Model(forward, w=parameter(4, 6), v=parameter(6))
    for step in range(8):
        module.turned = step % 2 == 1
        assert_norms(module, torch.randn(5, 6))


def test_norms_of_what_several_calls_use() -> None:
    def twice(m: Any, x: Tensor) -> Tensor:
        made = torch._weight_norm(m.w, m.gain, 0)
        return F.linear(x, made).tanh() + F.linear(x.flip(1), made) * made.sum(1)

    for _ in range(4):
        assert_norms(Model(twice, w=parameter(4, 6), gain=parameter(4, 1)), torch.randn(5, 6))


def test_a_weight_changed_unseen_between_two_steps_is_refused_in_a_replay() -> None:
    module, x = (
        Model(lambda m, x: F.linear(x, torch._weight_norm(m.w, m.gain, 0)), w=parameter(4, 6)),
        torch.randn(5, 6),
    )
    module.gain = nn.Parameter(torch.rand(4, 1) + 0.5)
    for _ in range(4):
        assert_norms(module, x)
    with expanded_weights(module, (x,), unsupported="ignore") as capture:
        loss = mean_of_squares(module, x)
        module.w.data[2, 3] += 1e-3  # which no version shows
        loss.backward()
    assert set(capture.record.unsupported) == {"w", "gain"}
    assert "gives another value when it is repeated" in capture.record.unsupported["w"]
