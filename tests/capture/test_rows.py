"""Linear maps of rows, a sample's side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_persample.capture.mode import expanded_weights
from lightning_persample.rules import register_rule, registry
from tests.capture.reference import assert_exact

B, D, P = 5, 4, 3


class Linear(nn.Linear):
    """A module whose forward is one call."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], bias: bool = True, dtype: torch.dtype = torch.float64):
        super().__init__(D, P, bias=bias, dtype=dtype)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def plain(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.weight, m.bias)


def squares(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum(-1).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_an_ordinary_call(bias, dtype):
    module, x = Linear(plain, bias, dtype), torch.randn(B, D, dtype=dtype)
    with expanded_weights(module, x) as seen:
        squares(module, x).backward()
    for place, one in enumerate(x):
        module.zero_grad()
        squares(module, one[None]).backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(seen.record.sq_norms[name][place], parameter.grad.square().sum())


OTHERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "positions": lambda m, x: F.linear(x[:, None].expand(-1, 2, -1), m.weight, m.bias).sum(1),
    "called-twice": lambda m, x: plain(m, x) + plain(m, 2 * x),
    "weight-used-elsewhere": lambda m, x: plain(m, x) + x @ m.weight.t(),
    "weight-derived": lambda m, x: F.linear(x, 2 * m.weight, m.bias),
    "bias-derived": lambda m, x: F.linear(x, m.weight, m.bias.exp()),
    "samples-last": lambda m, x: F.linear(x.t().contiguous().t(), m.weight, m.bias),
    "two-rows-each": lambda m, x: F.linear(x.repeat_interleave(2, 0), m.weight, m.bias).view(-1, 2, P).sum(1),
    "turned-round": lambda m, x: plain(m, x[torch.arange(len(x)).flip(0)])[torch.arange(len(x)).flip(0)],
    "by-keyword": lambda m, x: F.linear(input=x, weight=m.weight, bias=m.bias),
    "wide": lambda m, x: F.linear(x.repeat(1, 1500), m.weight.repeat(1, 1500), m.bias),
}


@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("frozen", ["", "weight", "bias"])
def test_other_calls_are_exact_too(call, frozen):
    module, x = Linear(call), torch.randn(B, D, dtype=torch.float64)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name != frozen)
    assert_exact(module, squares, (x,))


@pytest.mark.parametrize("options", [{"quantities": ("sq_norm", "grad_sample")}, {"samples": torch.tensor([3, 1])}])
def test_where_more_is_asked_for(options):
    module, x = Linear(plain), torch.randn(B, D, dtype=torch.float64)
    with expanded_weights(module, x, **options) as seen:
        squares(module, x).backward()
    places = options.get("samples", torch.arange(B))
    for place, norm in zip(places, seen.record.sq_norms["weight"], strict=True):
        module.zero_grad()
        squares(module, x[place][None]).backward()
        torch.testing.assert_close(norm, module.weight.grad.square().sum())


def test_fusing_where_it_saves_nothing():
    """One row per sample: no gradient of a sample is formed for its norm, so ``.grad`` is autograd's own."""
    module, x = Linear(plain), torch.randn(B, D, dtype=torch.float64)
    squares(module, x).backward()
    expected = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    module.zero_grad()
    with expanded_weights(module, x, fuse_weight_grad=True) as seen:
        squares(module, x).backward()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, expected[name])
    for place, one in enumerate(x):
        module.zero_grad()
        squares(module, one[None]).backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(seen.record.sq_norms[name][place], parameter.grad.square().sum())


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_parameter_that_is_frozen_for_one_of_two_calls_gets_what_the_other_gives(frozen):
    module, x = Linear(plain), torch.randn(B, D, dtype=torch.float64)

    def toggled(module: nn.Module, x: Tensor) -> Tensor:
        module.get_parameter(frozen).requires_grad_(False)
        first = module(x).square().sum(-1)
        module.get_parameter(frozen).requires_grad_()
        return (first + module(2 * x).square().sum(-1)).mean()

    assert_exact(module, toggled, (x,))


def test_squared_norms_are_a_dict():
    """As tools for collections of tensors expect it, which make another one of its class."""
    module, x = Linear(plain), torch.randn(B, D, dtype=torch.float64)
    with expanded_weights(module, x) as seen:
        squares(module, x).backward()
    sq_norms = seen.record.sq_norms
    assert type(sq_norms) is dict
    assert list(sq_norms) == ["weight", "bias"]
    assert sq_norms["bias"].is_contiguous()
    first = seen.record.norms()
    torch.testing.assert_close(first, sum(sq_norms.values()).sqrt())
    torch.testing.assert_close(copy.deepcopy(seen.record).norms(), first)
    sq_norms["bias"].zero_()
    torch.testing.assert_close(seen.record.norms(), sq_norms["weight"].sqrt())


def test_an_input_that_changes_unseen_is_read_when_autograd_reads_it():
    module, x = Linear(plain), torch.randn(B, D, dtype=torch.float64)
    with expanded_weights(module, x) as seen:
        y = x * 1
        loss = squares(module, y)
        y.data.mul_(2)
        loss.backward()
    own = torch.einsum("bp,bd->bpd", 2 * module(x).detach(), 2 * x)  # the first 2 is that of the square
    torch.testing.assert_close(module.weight.grad, own.mean(0))
    torch.testing.assert_close(seen.record.sq_norms["weight"], own.square().sum((1, 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weight_too_small_for_squares_gives_no_zero(dtype):
    module, x = Linear(plain, dtype=dtype), torch.randn(B, D, dtype=dtype)
    weights = torch.ones(B, dtype=dtype)
    weights[1] = torch.finfo(dtype).tiny ** 0.8
    with expanded_weights(module, x, loss_reduction=weights) as seen:
        (module(x).square().sum(-1) @ weights).backward()
    assert seen.record.nonfinite().tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weighting", ["mean", "sum", "each"])
def test_norms_of_every_weighting(weighting, dtype):
    module, x = Linear(plain, dtype=dtype), torch.randn(B, D, dtype=dtype)
    weights = torch.linspace(-1, 2, B, dtype=torch.float64)
    reduced = {"mean": Tensor.mean, "sum": Tensor.sum, "each": lambda losses: losses @ weights.to(dtype)}[weighting]
    with expanded_weights(module, x, loss_reduction=weights if weighting == "each" else weighting) as seen:
        loss = reduced(module(x).square().sum(-1))
        seen.attach_loss(loss)
        (0.125 * loss).backward()
    totals = []
    for one in x:
        module.zero_grad()
        module(one[None]).square().sum().backward()
        totals.append(sum(parameter.grad.square().sum() for parameter in module.parameters()).sqrt())
    torch.testing.assert_close(seen.record.norms(), torch.stack(totals))
    torch.testing.assert_close(sum(seen.record.sq_norms.values()).sqrt(), torch.stack(totals))
    assert seen.record.norms().dtype is dtype


def test_an_input_that_is_written_to_fails_as_it_does_without():
    module, x = Linear(plain), torch.randn(B, D, dtype=torch.float64)
    with expanded_weights(module, x, unsupported="error") as seen:
        loss = squares(module, x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert not seen.records


def test_a_second_backward_through_a_freed_call_is_named():
    module, x = Linear(plain), torch.randn(B, D, dtype=torch.float64)
    with expanded_weights(module, x, unsupported="ignore") as seen:
        out = module(x)
        out.sum(-1).mean().backward(retain_graph=True)
        out.square().sum(-1).mean().backward()
    assert [set(record.sq_norms) for record in seen.records] == [{"weight", "bias"}] * 2
    torch.testing.assert_close(seen.records[0].sq_norms["bias"], torch.full((B,), float(P), dtype=torch.float64))


def test_a_rule_of_the_users_is_asked():
    rule = registry.rule_of("linear")

    @register_rule(F.linear, arguments=rule.arguments, batched=("input",), weights=("weight", "bias"), overwrite=True)
    def other(call: Any, grad_output: Tensor) -> Any:
        return rule.function(call, 2 * grad_output)

    try:
        module, x = Linear(plain), torch.ones(B, D, dtype=torch.float64)
        with expanded_weights(module, x) as seen:
            module(x).sum(-1).mean().backward()
            torch.testing.assert_close(seen.record.sq_norms["bias"], torch.full((B,), 4.0 * P, dtype=torch.float64))
    finally:
        registry._RULES["linear"] = rule


def test_a_loss_is_looked_at_again_when_a_target_is_ignored():
    module, x = nn.Linear(D, P), torch.randn(B, D)
    targets = torch.tensor([0, 1, 2, 0, 1])

    def weighting(y: Tensor) -> tuple[str, ...]:
        with expanded_weights(module, (x, y), unsupported="ignore") as seen:
            F.cross_entropy(module(x), y).backward()
        return seen.record.weighting

    found = [weighting(y) for y in (targets, targets, targets.masked_fill(targets == 1, -100), targets)]
    assert [len(each) for each in found] == [0, 0, 1, 0]


def test_what_is_said_of_a_loss_names_its_own_line():
    module, x, y = nn.Linear(D, P), torch.randn(B, D), torch.zeros(B, dtype=torch.int64)
    marks = []
    for step in (
        lambda: F.cross_entropy(module(x), y),
        lambda: F.cross_entropy(module(x), y),
    ):
        with expanded_weights(module, (x, y)) as seen:
            marks.append(seen._dispatcher.marks.get(step()).reason)
    lines = [int(reason.rsplit(":", 1)[1].strip(" )")) for reason in marks]
    assert lines[1] == lines[0] + 1


def test_norms_follow_a_change_in_place_and_are_each_readers_own():
    module, x = Linear(plain), torch.randn(B, D, dtype=torch.float64)
    with expanded_weights(module, x) as seen:
        squares(module, x).backward()
    first = seen.record.norms()
    seen.record.norms().zero_()
    assert torch.equal(seen.record.norms(), first)
    seen.record.sq_norms["bias"].zero_()
    torch.testing.assert_close(seen.record.norms(), seen.record.sq_norms["weight"].sqrt())


@pytest.mark.parametrize("bias", [torch.ones(1), torch.ones(P)], ids=["one", "each"])
def test_a_bias_that_is_broadcast(bias):
    module = Linear(plain, dtype=torch.float64)
    module.bias = nn.Parameter(bias.double())
    assert_exact(module, squares, (torch.randn(B, D, dtype=torch.float64),))


class Inside(nn.Module):
    """Differentiates by torch.func inside its forward; what the layer meets is not wrapped."""

    def __init__(self, transform: str) -> None:
        super().__init__()
        self.layer, self.transform = nn.Linear(D, P, dtype=torch.float64), transform

    def forward(self, x: Tensor) -> Tensor:
        def function(t: Tensor) -> Tensor:
            return (self.layer(x) * t).sum()

        t = torch.ones((), dtype=torch.float64)
        if self.transform == "jvp":
            return self.layer(x) + torch.func.jvp(function, (t,), (t,))[1].detach()
        return self.layer(x) + getattr(torch.func, self.transform)(function)(t).detach()


@pytest.mark.filterwarnings(  # (torch's own, of forward differentiation)
    "ignore:`torch.jit.script:DeprecationWarning", "ignore:`torch.jit.script:FutureWarning"
)
@pytest.mark.parametrize("transform", ["grad", "jvp", "jacrev", "jacfwd", "hessian"])
def test_a_layer_inside_a_transform_runs_as_without(transform):
    module, x = Inside(transform), torch.randn(B, D, dtype=torch.float64)
    expected = module(x)
    with expanded_weights(module, x, unsupported="ignore") as seen:
        found = module(x)
        found.square().sum(-1).mean().backward()
    assert torch.equal(found, expected)
    assert seen.record.coverage in (0.0, 1.0)


def test_tensors_without_values_pass():
    module, x, y = nn.Linear(D, P), torch.randn(B, D), torch.zeros(B, dtype=torch.int64)
    with expanded_weights(module, (x, y), unsupported="ignore") as seen:
        loss = F.cross_entropy(module(x), y)
        shape = F.linear(x.to("meta"), module.weight.detach().to("meta")).shape
        loss.backward()
    assert shape == (B, P)
    assert set(seen.record.sq_norms) == {"weight", "bias"}
    for device in ("cpu", "meta"):  # of one layout
        other, batch = module.to(device), (x.to(device), y.to(device))
        with expanded_weights(other, batch) as seen:
            F.cross_entropy(other(batch[0]), batch[1]).backward()
        assert seen.record.norms().shape == (B,)


def test_a_hook_registered_inside_the_step_is_seen():
    module, x = Linear(plain), torch.randn(B, D, dtype=torch.float64)
    with expanded_weights(module, x, unsupported="ignore") as seen:
        loss = squares(module, x)
        handle = module.weight.register_hook(lambda grad: 2 * grad)
        loss.backward()
    handle.remove()
    assert "a hook registered on it changes its gradient" in seen.record.unsupported["weight"]


def test_a_weight_that_a_recomputation_derives_another_from_is_named():
    class Twice(Linear):
        def forward(self, x: Tensor) -> Tensor:
            again = checkpoint(lambda h: F.linear(h, self.weight * 2), x.requires_grad_(), use_reentrant=True)
            return plain(self, x) + again

    module, x = Twice(plain), torch.randn(B, D, dtype=torch.float64)
    with expanded_weights(module, x, unsupported="ignore") as seen:
        squares(module, x).backward()
    record = seen.record
    if "weight" in record.sq_norms:
        for place in range(B):
            module.zero_grad()
            squares(module, x[place][None].detach()).backward()
            torch.testing.assert_close(record.sq_norms["weight"][place], module.weight.grad.square().sum())
    else:
        assert "activation checkpointing" in record.unsupported["weight"]


def test_an_engine_that_is_replaced_later_runs_the_backward(monkeypatch):
    module, x = Linear(plain), torch.randn(B, D, dtype=torch.float64)
    with expanded_weights(module, x):
        squares(module, x).backward()
    calls, engine = [], torch.autograd._engine_run_backward
    monkeypatch.setattr(
        torch.autograd, "_engine_run_backward", lambda *args, **kwargs: calls.append(1) or engine(*args, **kwargs)
    )
    with expanded_weights(module, x):
        squares(module, x).backward()
    assert calls == [1]
