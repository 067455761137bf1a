"""`call_for_per_sample_grads`: values beside the loop and beside torch's function of that name, and its contract."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

import tests.capture.recurrent_cases  # noqa: F401  (adds its cases)
import tests.capture.twice_cases  # noqa: F401  (adds its cases)
from lightning_persample import PerSampleWarning, UnsupportedError, call_for_per_sample_grads
from lightning_persample.batch_axis.batch import batch_tensors
from lightning_persample.gradients import Dense
from lightning_persample.rules import registry
from tests.capture.model_cases import CASES, Model
from tests.capture.reference import loop
from tests.in_turn import every_other, one_kind_each
from tests.torch_release import not_in_the_oldest

pytestmark = pytest.mark.usefixtures("double_precision")

B = 4


def grad_samples(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad_sample for n, p in module.named_parameters() if getattr(p, "grad_sample", None) is not None}


def clear(module: nn.Module) -> None:
    for p in module.parameters():
        p.grad_sample = None


def rows(module: nn.Module, losses: list[Tensor]) -> dict[str, Tensor]:
    """Each sample's gradient, given each sample's loss."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    grads = [torch.autograd.grad(loss, list(named.values()), retain_graph=True) for loss in losses]
    return {name: torch.stack(column) for name, column in zip(named, zip(*grads, strict=True), strict=True)}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == {name for name, grads in expected.items() if name in found or grads.any()}
    for name, grads in found.items():
        torch.testing.assert_close(
            grads, expected[name], rtol=1e-10, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
        )


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", every_other(one_kind_each(CASES), first=1))
def test_values_are_those_of_the_loop(name: str) -> None:
    case = CASES[name]
    module, batch = case.build(), case.batch(5)
    batch_dim = case.options.get("batch_dim", 0)
    expected = loop(module, case.loss, batch, batch_dim)
    state = torch.get_rng_state()
    plain = module(*batch)
    after = torch.get_rng_state()
    for loss_reduction, factor in (("sum", 5), ("mean", 1)):
        torch.set_rng_state(state)
        out = call_for_per_sample_grads(module, loss_reduction=loss_reduction, batch_first=batch_dim == 0)(*batch)
        assert torch.equal(torch.get_rng_state(), after)
        assert torch.equal(out, plain)
        (factor * case.loss(lambda *_, out=out: out, *batch)).backward()  # the loss is the mean over samples
        assert all(p.grad is None for p in module.parameters())
        assert_same(grad_samples(module), expected)
        clear(module)


def mask(length: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length)


def padding(length: int) -> Tensor:
    hidden = torch.zeros(B, length)
    hidden[0, -1] = hidden[2, -2:] = float("-inf")
    return hidden


class Inside(nn.Module):
    """Calls the layer that it holds with its own arguments."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


@pytest.mark.parametrize("length", [5, B])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("inside", [False, True], ids=["", "inside"])
def test_attention_with_masks(inside: bool, batch_first: bool, length: int) -> None:
    module: nn.Module = nn.MultiheadAttention(6, 2, batch_first=batch_first)
    module = Inside(module) if inside else module
    x, causal, hidden = torch.randn(B, length, 6), mask(length), padding(length)
    layout = lambda x: x if batch_first else x.transpose(0, 1)  # noqa: E731

    def run(call: Callable[..., Any], x: Tensor, hidden: Tensor) -> Tensor:
        x = layout(x)
        return layout(call(x, x, x, key_padding_mask=hidden, attn_mask=causal, need_weights=False)[0])

    expected = rows(module, [run(module, x[i : i + 1], hidden[i : i + 1]).sin().sum() for i in range(B)])
    out = run(call_for_per_sample_grads(module, batch_size=B, batch_first=batch_first), x, hidden)
    assert torch.equal(out, run(module, x, hidden))
    out.sin().sum().backward()
    assert_same(grad_samples(module), expected)


@pytest.mark.parametrize("layers", [2, B])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("inside", [False, True], ids=["", "inside"])
def test_recurrence_with_initial_states(inside: bool, batch_first: bool, layers: int) -> None:
    layer = nn.LSTM(3, 5, layers, batch_first=batch_first)
    module = Inside(layer) if inside else layer
    x, h, c = torch.randn(B, 6, 3), torch.randn(layers, B, 5), torch.randn(layers, B, 5)
    layout = lambda x: x if batch_first else x.transpose(0, 1)  # noqa: E731
    one = [slice(i, i + 1) for i in range(B)]
    losses = [module(layout(x[i]), (h[:, i].contiguous(), c[:, i].contiguous()))[0].sin().sum() for i in one]
    expected = rows(module, losses)
    before = dict(vars(layer))
    call = call_for_per_sample_grads(module, batch_size=B, batch_first=batch_first)
    call(layout(x), (h, c))[0].sin().sum().backward()
    assert_same(grad_samples(module), expected)
    assert all(vars(layer)[name] is value for name, value in before.items())
    assert not layer._forward_pre_hooks
    assert not layer._forward_hooks


def test_padding_that_a_layer_was_called_with_holds_the_samples_after_it() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.MultiheadAttention(6, 2, batch_first=True)
            self.read = nn.Linear(B, 6)

        def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
            out = self.layer(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
            return out, self.read(hidden.exp())

    def loss(outputs: tuple[Tensor, Tensor]) -> Tensor:
        return outputs[0].sin().sum() + outputs[1].cos().sum()

    module, x, hidden = Module(), torch.randn(B, B, 6), padding(B)
    expected = rows(module, [loss(module(x[i : i + 1], hidden[i : i + 1])) for i in range(B)])
    loss(call_for_per_sample_grads(module)(x, hidden)).backward()
    assert_same(grad_samples(module), expected)


def test_packed_sequences() -> None:
    module = nn.GRU(3, 5)
    sequences = [torch.randn(length, 3) for length in (2, 5, 3, 4)]
    expected = rows(module, [module(sequence[:, None])[0].sin().sum() for sequence in sequences])
    out, _ = call_for_per_sample_grads(module)(pack_sequence(sequences, enforce_sorted=False))
    out.data.sin().sum().backward()
    assert_same(grad_samples(module), expected)


PEER: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(6, 4), lambda: torch.randn(B, 3, 6)),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, stride=2, padding=1), lambda: torch.randn(B, 2, 7)),
    "conv2d": (
        lambda: nn.Conv2d(2, 4, 3, groups=2, padding_mode="circular", padding=1),
        lambda: torch.randn(B, 2, 5, 5),
    ),
    "embedding": (lambda: nn.Embedding(7, 3), lambda: torch.randint(0, 7, (B, 5))),
    "layer-norm": (lambda: nn.LayerNorm(6), lambda: torch.randn(B, 3, 6)),
    "group-norm": (lambda: nn.GroupNorm(2, 6), lambda: torch.randn(B, 6, 3)),
    "instance-norm": (lambda: nn.InstanceNorm1d(6, affine=True), lambda: torch.randn(B, 6, 3)),
    "network": (two_layers, lambda: torch.randn(B, 6)),
}


@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
@pytest.mark.parametrize("name", PEER)
def test_the_same_as_torchs_own(name: str, loss_reduction: Any) -> None:
    peer = pytest.importorskip("torch.nn.utils._per_sample_grad")
    build, batch = PEER[name]
    module, x = build(), batch()
    other = copy.deepcopy(module)
    for call, target in ((call_for_per_sample_grads, module), (peer.call_for_per_sample_grads, other)):
        call(target, loss_reduction=loss_reduction)(x).sin().sum().backward()
    assert_same(grad_samples(module), grad_samples(other))


# The contract --------------------------------------------------------------------------------------------------------


def test_gradients_elsewhere_are_as_usual_and_the_module_is_unchanged() -> None:
    module, x = two_layers(), torch.randn(B, 6, requires_grad=True)
    module[2].bias.requires_grad_(False)
    (expected,) = torch.autograd.grad(module(x).sum(), x)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    parameters, state = list(module.parameters()), copy.deepcopy(module.state_dict())
    call = call_for_per_sample_grads(module)
    call(x).sum().backward()
    assert torch.equal(x.grad, expected)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in module.parameters())
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert set(grad_samples(module)) == {"0.weight", "0.bias", "2.weight"}
    copied = pickle.loads(pickle.dumps(module))
    assert torch.equal(copied(x), module(x))


def test_the_call_is_named_like_the_forward() -> None:
    module = nn.Linear(6, 4)
    call = call_for_per_sample_grads(module)
    assert call.__name__ == "forward"
    assert call.__wrapped__ == module.forward  # type: ignore[attr-defined]
    assert call.__doc__ == module.forward.__doc__


@dataclass
class Pair:
    left: Tensor
    right: Tensor


class Adding(nn.Module):
    """Adds up what one layer makes of every tensor among its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.stack([self.a(x) for _, x in batch_tensors((args, kwargs))]).sum(0)


@pytest.mark.parametrize("form", ["tuple", "keywords", "nested", "dataclass"])
def test_inputs_are_found_wherever_they_stand(form: str) -> None:
    module, x, y = Adding(), torch.randn(B, 6), torch.randn(B, 6)
    args: dict[str, tuple[Any, dict[str, Any]]] = {
        "tuple": (((x, y),), {}),
        "keywords": ((), {"x": x, "y": y}),
        "nested": (({"x": [x, "text"]}, 3), {"more": {"y": (y,)}}),
        "dataclass": ((Pair(x, y),), {"text": ""}),
    }
    positional, keywords = args[form]
    expected = rows(module, [module(x[i : i + 1], y[i : i + 1]).sin().sum() for i in range(B)])
    call_for_per_sample_grads(module)(*positional, **keywords).sin().sum().backward()
    assert_same(grad_samples(module), expected)


def test_inputs_of_another_size_are_constants_when_the_batch_size_is_given() -> None:
    module = Model(lambda m, x, keys: m.a(x) @ m.b(keys).t(), a=nn.Linear(6, 4), b=nn.Linear(6, 4))
    x, keys = torch.randn(B, 6), torch.randn(7, 6)
    expected = rows(module, [module(x[i : i + 1], keys).sin().sum() for i in range(B)])
    call_for_per_sample_grads(module, batch_size=B)(x, keys).sin().sum().backward()
    assert_same(grad_samples(module), expected)


def test_several_rows_of_each_sample() -> None:
    module, x = nn.Linear(6, 4), torch.randn(B * 3, 6)
    expected = rows(module, [module(x[3 * i : 3 * i + 3]).sin().sum() for i in range(B)])
    call_for_per_sample_grads(module, batch_size=B)(x).sin().sum().backward()
    assert_same(grad_samples(module), expected)
    clear(module)
    x = torch.randn(2, B * 3, 6)
    expected = rows(module, [module(x[:, i::B]).sin().sum() for i in range(B)])
    call_for_per_sample_grads(module, batch_size=B, batch_first=False)(x).sin().sum().backward()
    assert_same(grad_samples(module), expected)


def test_two_calls_in_one_backward_and_two_backwards_add_up() -> None:
    module, x, y = two_layers(), torch.randn(B, 6), torch.randn(B, 6)
    losses = [module(x[i : i + 1]).sin().sum() + module(y[i : i + 1]).cos().sum() for i in range(B)]
    expected = rows(module, losses)
    call = call_for_per_sample_grads(module)
    loss = call(x).sin().sum() + call(y).cos().sum()
    loss.backward(retain_graph=True)
    assert_same(grad_samples(module), expected)
    loss.backward()
    assert_same(grad_samples(module), {name: 2 * grads for name, grads in expected.items()})


@pytest.mark.parametrize("made", [torch.exp, lambda w: w.exp().sin() * w, torch.conj], ids=["exp", "chain", "conj"])
def test_a_weight_adds_up_its_uses_and_those_of_what_is_made_of_it(made: Callable[[Tensor], Tensor]) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, dtype=torch.cdouble if made is torch.conj else None))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).abs() + (x * made(self.weight)).abs()

    module, x = Both(), torch.randn(B, 3)
    expected = rows(module, [module(x[i : i + 1]).square().sum() for i in range(B)])
    call_for_per_sample_grads(module)(x).square().sum().backward()
    assert_same(grad_samples(module), expected)


class FailsOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fails = nn.Linear(6, 4), nn.Linear(4, 2), False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        hidden.register_hook(self.fail)
        return self.b(hidden)

    def fail(self, grad: Tensor) -> None:
        if self.fails:
            self.fails = False
            raise ArithmeticError("a failure in the middle")


def test_a_backward_that_fails_midway_leaves_nothing() -> None:
    module, x = FailsOnce(), torch.randn(B, 6)
    expected = rows(module, [module(x[i : i + 1]).sin().sum() for i in range(B)])
    loss = call_for_per_sample_grads(module)(x).sin().sum()
    module.fails = True
    with pytest.raises(ArithmeticError, match="a failure in the middle"):
        loss.backward(retain_graph=True)
    assert grad_samples(module) == {}
    loss.backward()
    assert_same(grad_samples(module), expected)


def test_gradients_of_the_inputs_alone_set_nothing() -> None:
    module, x = two_layers(), torch.randn(B, 6, requires_grad=True)
    expected = rows(module, [module(x[i : i + 1]).sin().sum() for i in range(B)])
    loss = call_for_per_sample_grads(module)(x).sin().sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward(inputs=[x], retain_graph=True)
    assert grad_samples(module) == {}
    loss.backward()
    assert_same(grad_samples(module), expected)


def test_nothing_is_kept_alive() -> None:
    module, seen = two_layers(), []
    module[0].register_forward_hook(lambda *found: seen.append(weakref.ref(found[-1])))
    call_for_per_sample_grads(module)(torch.randn(B, 6)).sum().backward()
    clear(module)
    call_for_per_sample_grads(module)(torch.randn(B, 6))  # without a backward
    gc.collect()
    assert [reference() for reference in seen] == [None, None]
    with torch.no_grad():
        assert not call_for_per_sample_grads(module)(torch.randn(B, 6)).requires_grad


def test_batch_normalisation_in_training_gives_contributions_with_one_warning() -> None:
    module, x = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), torch.randn(B, 6)
    with pytest.warns(PerSampleWarning, match="Samples of a batch influence each other") as caught:
        call_for_per_sample_grads(module)(x).sin().sum().backward()
    assert len(caught) == 1
    assert int(module[1].num_batches_tracked) == 1
    module(x).sin().sum().backward()
    for p in module.parameters():
        torch.testing.assert_close(p.grad_sample.sum(0), p.grad)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.a, self.b, self.reentrant = nn.Linear(6, 4), nn.Linear(4, 2), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(lambda x: self.a(x).tanh(), x, use_reentrant=self.reentrant))


def test_activation_checkpointing() -> None:
    module, x = Checkpointed(False), torch.randn(B, 6, requires_grad=True)
    expected = rows(module, [module.b(module.a(x[i : i + 1]).tanh()).sin().sum() for i in range(B)])
    call_for_per_sample_grads(module)(x).sin().sum().backward()
    assert_same(grad_samples(module), expected)
    assert all(p.grad is None for p in module.parameters())
    with pytest.raises(UnsupportedError, match=re.escape("use checkpoint(..., use_reentrant=False)")):
        call_for_per_sample_grads(Checkpointed(True))(x)


def test_a_penalty_that_the_module_returns_belongs_to_no_sample() -> None:
    module, x = Model(lambda m, x: (m.a(x), m.a.weight.square().sum()), a=nn.Linear(6, 4)), torch.randn(B, 6)
    expected = rows(module, [module(x[i : i + 1])[0].sin().sum() for i in range(B)])
    out, penalty = call_for_per_sample_grads(module)(x)
    (out.sin().sum() + penalty).backward()
    assert_same(grad_samples(module), expected)


# Sums that are compared with the gradient of the batch ----------------------------------------------------------------


def weights(size: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(size))


class Attending(nn.Module):
    """Attention by hand: softmax does not see what all keys have in common, so the bias of the keys gets nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.q(x) @ self.k(x).transpose(1, 2), -1) @ self.v(x)


def minus_itself(module: Any, x: Tensor) -> Tensor:
    return module.a(x).sum(1) - module.a(x.flip(1)).sum(1)


CANCELLED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv-instance-norm": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.InstanceNorm1d(4)), (3, 9)),
    "conv-group-norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(4, 4)), (3, 6, 6)),
    "conv-layer-norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.LayerNorm((4, 4))), (3, 6, 6)),
    "layer-norm-of-one": (lambda: nn.Sequential(nn.Linear(6, 1), nn.LayerNorm(1), nn.Linear(1, 2)), (6,)),
    "group-norm-of-one": (
        lambda: Model(
            lambda m, x: torch.group_norm(m.a(x), 4, m.w, m.b), a=nn.Conv2d(3, 4, 1), w=weights(4), b=weights(4)
        ),
        (3, 1, 1),
    ),
    "bias-of-keys": (Attending, (5, 6)),
    "shared-shift": (
        lambda: Model(lambda m, x: (m.a(x) + m.b).softmax(-1), a=nn.Linear(6, 9), b=nn.Parameter(torch.randn(()))),
        (6,),
    ),
    "two-uses": (lambda: Model(minus_itself, a=nn.Linear(6, 4)), (5, 6)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=not_in_the_oldest) if n.endswith("norm-of-one") else n for n in CANCELLED]
)
def test_a_gradient_that_is_zero_but_for_rounding_is_given(name: str, dtype: torch.dtype) -> None:
    build, shape = CANCELLED[name]
    for seed in range(5):
        torch.manual_seed(seed)
        module, x = build(), torch.randn(B, *shape)
        expected = rows(module, [module(x[i : i + 1]).sin().sum() for i in range(B)])
        module.to(dtype)
        call_for_per_sample_grads(module)(x.to(dtype)).sin().sum().backward()
        bound = {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 0.2)
        for parameter_name, grads in grad_samples(module).items():
            allowed = bound * max(1.0, float(expected[parameter_name].abs().max()))
            assert (grads.double() - expected[parameter_name]).abs().max() <= allowed, parameter_name


FACTORS = {torch.float64: 1 - 1e-5, torch.float32: 0.99, torch.float16: 0.5, torch.bfloat16: 0.5}


def planted(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """The rule of linear gives another gradient of the bias."""
    rule = registry.find_rule(torch.nn.functional.linear)

    def wrong(call: Any, grad_output: Tensor) -> dict[str, Any]:
        found = rule.function(call, grad_output)
        return {**found, "bias": Dense(change(found["bias"].dense()))}

    monkeypatch.setitem(registry._RULES, rule.op, dataclasses.replace(rule, function=wrong))


@pytest.mark.parametrize("dtype", FACTORS, ids=str)
@pytest.mark.parametrize("what", ["factor", "one-sample", "doubled", "cancelled"])
def test_a_wrong_sum_is_refused_in_every_precision(
    what: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = nn.Linear(6, 4).to(dtype), torch.rand(B, 5, 6).to(dtype)
    loss = lambda: call_for_per_sample_grads(module)(x).square().sum()  # noqa: E731
    if what == "cancelled":  # then the gradient of the bias is rounding alone, and something else is added to it
        loss = lambda: call_for_per_sample_grads(module)(x).softmax(1)[..., 0].square().sum()  # noqa: E731
    size = 1.0 if dtype.itemsize == 2 else 100 * (1 - FACTORS[dtype])
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "factor": lambda grads: FACTORS[dtype] * grads,
        "one-sample": lambda grads: torch.cat([grads[1:], 0 * grads[:1]]),
        "doubled": lambda grads: 2 * grads,
        "cancelled": lambda grads: grads + size * (torch.arange(B)[:, None] == 1),
    }
    loss().backward()
    clear(module)
    planted(monkeypatch, changes[what])
    with pytest.raises(UnsupportedError, match="`bias`: the samples' gradients do not add up to the gradient of the"):
        loss().backward()
    assert grad_samples(module) == {}


# Gradients that the module computes itself ----------------------------------------------------------------------------


class Forces(nn.Module):
    """An energy and its slope along the input, of which a further layer makes something."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.further, self.twice = nn.Linear(3, 2), twice

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        energy = self.energy(x)
        (slope,) = torch.autograd.grad(energy.sum(), inputs=x, create_graph=self.twice, retain_graph=True)
        return energy, self.further(slope)


def test_a_slope_that_the_module_computes_holds_the_samples() -> None:
    module, x = Forces(twice=False), torch.randn(B, 3)
    expected = rows(module, [sum(out.sin().sum() for out in module(x[i : i + 1])) for i in range(B)])  # type: ignore[misc]
    sum(out.sin().sum() for out in call_for_per_sample_grads(module)(x)).backward()
    assert_same(grad_samples(module), expected)


def test_a_gradient_of_a_gradient_is_refused_by_its_name() -> None:
    module = Forces(twice=True)
    loss = sum(out.sin().sum() for out in call_for_per_sample_grads(module)(torch.randn(B, 3)))
    text = "`energy.0.weight`: its gradient also arrives through TBackward0, of the gradient that was computed with"
    with pytest.raises(UnsupportedError, match=re.escape(text)) as raised:
        loss.backward()
    assert re.search(r"at test_call_for_per_sample_grads\.py:\d+ \(a gradient of a gradient\)", str(raised.value))
    assert "(a gradient of a gradient)" in str(raised.value)
    assert "`further" not in str(raised.value)
