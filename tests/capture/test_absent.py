"""What is not known by sample is named with its reason and left out; nothing of it is guessed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.map import map as control_flow_map
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from lightning_persample.batch_axis.base import PROPAGATION_RULES
from lightning_persample.capture.mode import expanded_weights
from lightning_persample.capture.record import PerSampleRecord
from lightning_persample.errors import PerSampleWarning, UnsupportedError
from lightning_persample.reference.loops import loop_per_sample_grads
from lightning_persample.rules import find_rule, registry
from tests.capture.model_cases import DoubledByNumpy, Model, mean_of_all, mean_of_squares, parameter
from tests.capture.reference import assert_exact, assert_values, loop, record_of
from tests.torch_release import not_in_the_oldest

pytestmark = pytest.mark.usefixtures("double_precision")

B = 5


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


class OwnMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad


def assert_missing(record: PerSampleRecord, module: nn.Module, expected: dict[str, str]) -> None:
    assert set(record.unsupported) == set(expected)
    for name, text in expected.items():
        assert re.search(text, record.unsupported[name]), record.unsupported[name]
    sizes = {name: p.numel() for name, p in module.named_parameters() if name not in record.unused}
    known = sum(size for name, size in sizes.items() if name not in expected)
    assert record.coverage == pytest.approx(known / sum(sizes.values()))
    assert not set(record.names) & set(expected)


def two_layers(between: Callable[[Tensor], Tensor]) -> nn.Module:
    return Model(lambda m, x: m.b(between(m.a(x))), a=nn.Linear(6, 4), b=nn.Linear(4, 2))


def vectors() -> Tensor:
    return torch.randn(B, 6)


def sequences() -> Tensor:
    return torch.randn(B, B, 6)


AFTER_THE_BATCH = {
    "mean-over-batch": (lambda h: h.mean(0), r"`linear` on \(4,\), .*with `b.bias`, `b.weight`.*`mean` reduces over"),
    "own-function-without-torch-calls": (DoubledByNumpy.apply, r"passed through DoubledByNumpyBackward"),
}


@pytest.mark.parametrize("name", AFTER_THE_BATCH)
def test_a_lost_batch_axis_is_named_where_a_weight_needs_it(name: str) -> None:
    between, text = AFTER_THE_BATCH[name]
    module = two_layers(between)
    record = record_of(module, mean_of_all, vectors())
    assert_missing(record, module, {"b.weight": text, "b.bias": text})


def test_what_is_made_of_one_sample_is_that_samples_whatever_shape_it_gets() -> None:
    module, x = two_layers(lambda h: (2 * h[0]).expand(len(h), -1)), vectors()
    record = record_of(module, mean_of_all, x)
    assert (record.coverage, record.mixing, record.axis_lost, record.weighting) == (1.0, (), (), ())
    assert record.samples is not None
    assert record.samples.tolist() == [0]
    expected = torch.autograd.grad(mean_of_all(module, x[:1]), [*module.parameters()])
    for name, grads in zip(record.sq_norms, expected, strict=True):
        torch.testing.assert_close(record.sq_norms[name], grads.square().sum()[None])


def test_samples_along_an_axis_that_the_op_does_not_keep() -> None:
    module = nn.Conv1d(B, 4, 3)
    record = record_of(module, mean_of_all, torch.randn(7, B, 6), batch_dim=1)
    text = r"`conv1d` on \(7, 5, 6\), \(4, 5, 3\), \(4,\).*needs the samples along its first axis"
    assert_missing(record, module, {"weight": text, "bias": text})


def test_a_batch_size_that_the_batch_does_not_hold() -> None:
    module = nn.Linear(6, 4)
    record = record_of(module, mean_of_all, vectors(), batch_size=2)
    text = r"batch\[0\] has shape \(5, 6\), which does not hold 2 samples along axis 0"
    assert_missing(record, module, {"weight": text, "bias": text})


def test_an_op_without_a_batch_dimension() -> None:
    module = Model(lambda m, x: F.linear(m.w, x), w=parameter(3, 6))
    record = record_of(module, mean_of_all, vectors())
    assert_missing(
        record, module, {"w": r"`linear` on \(3, 6\), \(5, 6\).*with `w`.*has a weight that depends on the batch"}
    )


def test_a_weight_used_by_a_custom_autograd_function() -> None:
    module = Model(lambda m, x: OwnMatmul.apply(x, m.w) + x @ m.w, w=parameter(6, 4))
    text = (
        r"its gradient also arrives through OwnMatmul\.apply, a custom autograd function, which torch does not show; "
        r"call it in a function decorated with @torch\.overrides\.wrap_torch_function\(lambda \*args: args\) "
        r"\(register_rule then makes it fast\), or use engine='loop' in the callback"
    )
    assert_missing(record_of(module, mean_of_squares, vectors()), module, {"w": text})


class WithoutWeight(OwnMatmul):
    """As a straight-through estimator that leaves its weight alone."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad @ ctx.saved_tensors[1].T, None


@torch.overrides.wrap_torch_function(lambda x, weight: (x, weight))
def without_weight(x: Tensor, weight: Tensor) -> Tensor:
    return WithoutWeight.apply(x, weight)


def made(weight: Tensor) -> Tensor:
    """What weights alone have made, with a hook of the user's on it."""
    double = 2 * weight
    double.register_hook(lambda grad: grad)
    return double


WITHOUT_GRADIENT = {
    "wrapped": (lambda m, x: without_weight(m.a(x), m.w), (4, 2)),
    "derived": (lambda m, x: without_weight(m.a(x), made(m.w)), (4, 2)),
    "op-of-no-entries": (
        lambda m, x: (
            m.a(x) + torch.ormqr(x.new_zeros(len(x), 0, 5), m.w, x.new_zeros(len(x), 0, 5)).sum((1, 2))[:, None]
        ),
        (B, 0),
    ),
}


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_a_weight_that_autograd_hands_no_gradient_counts_as_unused(name: str) -> None:
    forward, shape = WITHOUT_GRADIENT[name]
    module = Model(forward, a=nn.Linear(6, 4), w=parameter(*shape))
    for _ in range(2):
        record = record_of(module, mean_of_squares, vectors())
        assert module.w.grad is None
        assert record.unused == ("w",)
        assert (record.names, record.unsupported) == (("a.weight", "a.bias"), {})


def test_a_custom_autograd_function_of_torch_calls_on_activations_is_exact() -> None:
    module, batch = two_layers(Square.apply), sequences()
    record = record_of(module, mean_of_squares, batch)
    assert record.coverage == 1.0
    assert_values(record, loop(module, mean_of_squares, (batch,)))


def test_a_gradient_penalty() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    batch = vectors().requires_grad_()

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        output = module(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output.mean() + slope.square().sum(1).mean()

    record = record_of(module, loss, batch)
    text = r"its gradient also arrives through TBackward0, of the gradient .* at test_absent\.py:\d+ \(a gradient of a"
    assert_missing(record, module, {"0.weight": text, "2.weight": text})
    assert_values(record, loop(module, loss, (batch,)))


def test_a_gradient_of_weights_alone_hides_these_and_no_sample() -> None:
    module, batch = Model(lambda m, x: m.a(x * slope_of(m.w)), a=nn.Linear(6, 4), w=parameter(6)), vectors()

    def slope_of(weight: Tensor) -> Tensor:
        return torch.autograd.grad(weight.pow(3).sum(), weight, create_graph=True)[0]

    record = record_of(module, mean_of_squares, batch)
    assert_missing(
        record, module, {"w": r"its gradient also arrives through \w+, of the gradient .* \(a gradient of a"}
    )
    assert (record.mixing, record.axis_lost) == ((), ())
    expected = loop(module, mean_of_squares, (batch,))
    assert_values(record, {name: expected[name] for name in ("a.weight", "a.bias")})


def test_a_forward_outside_the_step_is_named() -> None:
    module = Model(lambda m, x: m.a(x) * outside, a=nn.Linear(6, 4))
    outside = module.a.weight.sum()
    text = r"through SumBackward0, a node of no torch call that can be followed: it is of a tensor from before"
    assert_missing(record_of(module, mean_of_squares, vectors()), module, {"a.weight": text})


def test_the_slope_along_a_vector_holds_the_samples() -> None:
    module, x = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)), vectors()

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        _, slope = torch.autograd.functional.jvp(module, x, torch.ones_like(x), create_graph=True)
        return slope.square().mean()

    record = record_of(module, loss, x)
    assert (record.mixing, record.axis_lost) == ((), ())
    assert_values(record, loop(module, loss, (x,)))


def test_a_gradient_asked_for_aside_is_not_the_training_gradient() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    batch = vectors().requires_grad_()

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        output = module(x)
        (slope,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
        return (output.flatten() * slope.square().sum(1)).mean()

    record = record_of(module, loss, batch)
    assert record.coverage == 1.0
    assert_values(record, loop(module, loss, (batch,)))


def test_a_penalty_belongs_to_no_sample() -> None:
    module = Model(lambda m, x: m.a(x), a=nn.Linear(6, 4), w=parameter(3))
    batch = vectors()

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return mean_of_squares(module, x) + 0.1 * sum(p.square().sum() for p in module.parameters())

    record = record_of(module, loss, batch)
    assert record.unsupported == {}
    assert record.unused == ("w",)
    assert_values(record, loop(module, mean_of_squares, (batch,)))


def test_a_learned_weight_of_a_loss_has_gradients_without_the_term_of_no_sample() -> None:
    module, batch = Model(lambda m, x: m.a(x), a=nn.Linear(6, 4), s=parameter()), vectors()

    def scaled(module: Any, x: Tensor) -> Tensor:
        return mean_of_squares(module, x) * (-module.s).exp()

    record = record_of(module, lambda m, x: scaled(m, x) + m.s, batch)
    assert_missing(record, module, {})
    assert_values(record, loop(module, scaled, (batch,)))


def test_noise_alone_is_not_the_batch() -> None:
    module = Model(lambda m, x: m.a(torch.randn(len(x), 6)), a=nn.Linear(6, 4))
    text = r"`randn` at test_absent.py:\d+ makes as many rows .* and, there, `mark_samples\(torch.randn\(...\)\)`$"
    assert_missing(record_of(module, mean_of_squares, vectors()), module, {"a.weight": text, "a.bias": text})


def test_a_random_op_on_a_weight_is_drawn_again() -> None:
    module = Model(lambda m, x: F.linear(x, F.dropout(m.w, 0.5)), w=parameter(40, 6))
    record = record_of(module, mean_of_squares, vectors())
    torch.testing.assert_close(record.grad_samples["w"].mean(0), module.w.grad)


def test_a_value_changed_in_place_before_the_backward() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        mask = torch.ones(B, B, 1)
        hidden = torch.lerp(x, m.w, mask.detach())
        mask.zero_()
        return hidden

    module = Model(forward, w=parameter(6))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        record_of(module, mean_of_squares, sequences())


def test_a_weight_used_inside_vmap() -> None:
    module = Model(lambda m, x: torch.vmap(lambda row: F.linear(row, m.w))(x), w=parameter(4, 6))
    record = record_of(module, mean_of_squares, vectors())
    text = r"through \w+, a node of no torch call that can be followed: .*, or of torch\.vmap or another transform"
    assert_missing(record, module, {"w": text})


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("traced", [True, False])
def test_torchscript_is_named_with_its_remedies(traced: bool) -> None:
    body = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
    scripted = torch.jit.trace(body, vectors()) if traced else torch.jit.script(body)
    module = Model(lambda m, x: m.body(x) * m.w, body=scripted, w=parameter(4))
    text = (
        r"^its gradient also arrives through TorchScript \(torch\.jit\.script or torch\.jit\.trace\), whose calls "
        r"torch does not show; use the module or function that was scripted as it was written, or engine='loop' in the"
    )
    beside = (
        r"not a torch call that can be seen \(a custom autograd function, TorchScript, a transform such as torch\.vmap"
    )
    for _ in range(3):  # (the second call compiles it, and the third runs what was compiled)
        record = record_of(module, mean_of_squares, vectors())
        assert_missing(record, module, {"body.0.weight": text, "body.0.bias": text, "w": beside})
    batch = vectors()
    _, rows = loop_per_sample_grads(module, mean_of_squares, batch)
    as_written = Model(lambda m, x: m.body(x) * m.w, body=body, w=module.w)
    for name, grads in loop(as_written, mean_of_squares, (batch,)).items():
        torch.testing.assert_close(rows[name], grads)


def scale_and_tanh(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).tanh()


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_torchscript_function_is_named_with_its_remedies() -> None:
    scripted = torch.jit.script(scale_and_tanh)
    module = Model(lambda m, x: scripted(x, m.w), w=parameter(6))
    text = (
        r"of torch\.func, or of a TorchScript function \(which engine='loop'|arrives through TorchScript \(torch\.jit"
    )
    for _ in range(3):
        assert_missing(record_of(module, mean_of_squares, vectors()), module, {"w": text})


def test_frozen_unused_and_detached_parameters() -> None:
    module = Model(lambda m, x: m.b(m.a(x).detach()), a=nn.Linear(6, 4), b=nn.Linear(4, 2), c=nn.Linear(2, 2))
    module.b.bias.requires_grad_(False)
    record = record_of(module, mean_of_squares, vectors())
    assert record.names == ("b.weight",)
    assert record.unused == ("a.weight", "a.bias", "c.weight", "c.bias")
    assert record.coverage == 1.0


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_values(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.inner = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4))
            self.on = True

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            return checkpoint(self.inner, hidden, use_reentrant=reentrant) if self.on else self.inner(hidden)

    module, batch = Checkpointed(), sequences()
    record = record_of(module, mean_of_squares, batch)
    module.on = False
    assert record.unsupported == {}
    assert_values(record, loop(module, mean_of_squares, (batch,)))


def test_two_backwards_give_two_records() -> None:
    module, batch = nn.Linear(6, 4), vectors()
    with expanded_weights(module, batch) as capture:
        loss = mean_of_squares(module, batch)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
    first, second = capture.records
    torch.testing.assert_close(second.norms(), 2 * first.norms())


def test_warnings_name_parameters_and_reasons() -> None:
    module = two_layers(lambda h: h.mean(0))
    with pytest.warns(PerSampleWarning) as caught, expanded_weights(module, vectors()) as capture:
        mean_of_all(module, torch.randn(B, 6)).backward()
    assert "missing for 4 parameters" in str(caught[0].message)
    assert capture.record.names == ()
    assert capture.record.norms().isnan().all()


def test_unsupported_as_an_error() -> None:
    module, batch = two_layers(lambda h: h.mean(0)), vectors()
    with (
        pytest.raises(UnsupportedError, match=r"missing for 2 parameters.*\n- `b.weight`, `b.bias`: `linear` on"),
        expanded_weights(module, batch, unsupported="error"),
    ):
        mean_of_all(module, batch).backward()


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("lightning_persample.rules.linear", "computing .* failed with IndexError: off by one; .*report"),
        ("someone.else", r"its rule someone.else.*faulty failed with IndexError: off by one; check_rule shows"),
    ],
)
def test_a_faulty_rule_refuses_its_parameters_and_lets_training_go_on(
    place: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(call: object, grad_output: Tensor) -> None:
        raise IndexError("off by one")

    faulty.__module__ = place
    rule = find_rule(F.linear)
    monkeypatch.setitem(registry._RULES, "linear", replace(rule, function=faulty))
    module, batch = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4)), vectors()
    record = record_of(module, mean_of_squares, batch)
    text = rf"`linear` on .*with `0.bias`, `0.weight`: {text}"
    assert_missing(record, module, {"0.weight": text, "0.bias": text})


def test_a_fault_in_following_leaves_no_values_as_nothing_can_be_said_of_the_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def faulty(call: object) -> None:
        raise ValueError("no such axis")

    monkeypatch.setitem(PROPAGATION_RULES, "softmax", faulty)
    module = two_layers(lambda h: h.softmax(-1))
    record = record_of(module, mean_of_squares, vectors())
    text = r"following `softmax` at test_absent\.py:\d+ failed with ValueError: no such axis; this is a fault of"
    assert_missing(record, module, dict.fromkeys(("a.weight", "a.bias", "b.weight", "b.bias"), text))
    assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())


def test_bags_scaled_by_frequency_and_several_bags_to_a_sample() -> None:
    tokens = torch.randint(0, 9, (B, 4))
    scaled = Model(lambda m, x: m.e(x), e=nn.EmbeddingBag(9, 3, scale_grad_by_freq=True))
    text = r"`embedding_bag` with scale_grad_by_freq on a table of shape \(9, 3\), 5 samples: torch divides"
    assert_missing(record_of(scaled, mean_of_squares, tokens), scaled, {"e.weight": text})
    several = Model(lambda m, x: m.e(x.view(-1, 2)).view(len(x), -1), e=nn.EmbeddingBag(9, 3))
    text = r"`embedding_bag` has 2 bags to a sample on a table of shape \(9, 3\), 5 samples; give it"
    assert_missing(record_of(several, mean_of_squares, tokens), several, {"e.weight": text})


@pytest.mark.parametrize("hidden", [False, True], ids=["seen", "through-data"])
def test_a_weight_stepped_during_the_backward_is_refused_where_it_has_to_be_computed_again(hidden: bool) -> None:
    module = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4)), nn.Tanh(), nn.Linear(4, 2))

    def step(weight: Tensor) -> None:
        with torch.no_grad():
            (weight.data if hidden else weight).sub_(1e-3 * weight.grad)

    for weight in module.parameters():
        weight.register_post_accumulate_grad_hook(step)
    record = record_of(module, mean_of_squares, vectors())
    seen = r"was changed in place by `sub_` at test_absent\.py:\d+ before the backward ended"
    text = "gives another value when it is repeated" if hidden else seen
    names = [name for name, _ in module.named_parameters() if "original" in name]
    assert_missing(record, module, dict.fromkeys(names, text))


@pytest.mark.parametrize("hidden", [False, True], ids=["seen", "through-data"])
def test_a_weight_stepped_during_the_backward_is_refused_where_rows_are_computed_of_it(hidden: bool) -> None:
    queries = Model(lambda m, x: m.out(x * m.l(m.q.expand(len(x), 6)).tanh()), l=nn.Linear(6, 6), out=nn.Linear(6, 3))
    queries.q = nn.Parameter(torch.randn(1, 6))

    def step(weight: Tensor) -> None:
        with torch.no_grad():
            (weight.data if hidden else weight).sub_(weight.grad)

    assert_exact(queries, mean_of_squares, (vectors(),))
    for weight in queries.parameters():
        weight.register_post_accumulate_grad_hook(step)
    record = record_of(queries, mean_of_squares, vectors())
    seen = r"was changed in place by `sub_` at test_absent\.py:\d+ before the backward ended"
    text = "gives another value when it is repeated" if hidden else seen
    assert_missing(record, queries, dict.fromkeys(("q", "l.weight", "l.bias"), text))


def test_an_output_that_was_overwritten_is_named_where_dropout_is_drawn_again_for_it() -> None:
    module = Model(lambda m, x: m.a(x)[0].mul_(2.0), a=nn.LSTM(6, 4, 2, dropout=0.5, batch_first=True))
    record = record_of(module, mean_of_squares, torch.randn(B, 3, 6))
    text = r"`lstm` on .* a tensor of shape \(5, 3, 4\) .* was changed in place by `mul_` at test_absent\.py:\d+ "
    assert_missing(record, module, {name: text for name, _ in module.named_parameters()})


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def tripled(x: Tensor) -> Tensor:
    return 3 * x


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler asks
@pytest.mark.parametrize(
    "apply",
    [
        pytest.param(lambda h: torch.cond(h.sum() > 0, doubled, tripled, (h,)), id="cond"),
        pytest.param(lambda h: control_flow_map(doubled, h), id="map", marks=not_in_the_oldest),
    ],
)
def test_control_flow_of_torch_runs_as_without_a_capture_and_is_named(apply: Callable[[Tensor], Tensor]) -> None:
    """It is right only where torch compiles it, and no call inside of it is seen."""
    module, x = Model(lambda m, x: m.head(apply(m.body(x))), body=nn.Linear(6, 4), head=nn.Linear(4, 2)), vectors()
    mean_of_all(module, x).backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    compiler = torch.compile
    record = record_of(module, mean_of_all, x)
    assert torch.compile is compiler
    for weight, grad in zip(module.parameters(), expected, strict=True):
        assert torch.equal(weight.grad, grad)
    assert "it passed through" in record.unsupported["head.weight"]
    assert record.axis_lost
