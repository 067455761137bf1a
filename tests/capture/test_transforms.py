"""Data of the batch that goes through torch.vmap and torch.func: it comes out as data of the batch."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp

from lightning_persample import PerSampleWarning
from lightning_persample.capture.mode import expanded_weights
from tests.capture.model_cases import Model
from tests.capture.reference import assert_exact

pytestmark = [
    pytest.mark.usefixtures("double_precision"),
    pytest.mark.filterwarnings(  # (torch's own, of forward differentiation)
        "ignore:`torch.jit.script:DeprecationWarning", "ignore:`torch.jit.script:FutureWarning"
    ),
]
B, D, C = 5, 4, 3

Forward: TypeAlias = Callable[[Any, Tensor, Tensor], Tensor]


def model(forward: Forward) -> nn.Module:
    torch.manual_seed(0)
    return Model(forward, a=nn.Linear(D, C))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(B, D), torch.randint(C, (B,))


def error(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return module(x, y)


def fed(change: Callable[[Tensor], Tensor]) -> Forward:
    """The layer reads what `change` makes of the batch."""
    return lambda m, x, y: F.cross_entropy(m.a(change(x)), y)


def adversarial(scale: Callable[[Tensor], Tensor], *, by_row: bool = False) -> Forward:
    """The layer reads the batch beside its own gradient, of frozen weights."""

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        frozen = {name: parameter.detach() for name, parameter in m.a.named_parameters()}

        def loss(v: Tensor, t: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(m.a, frozen, (v,)), t, reduction="sum")

        slope = torch.vmap(grad(loss))(x, y) if by_row else grad(loss)(x, y)
        return F.cross_entropy(m.a(x + scale(slope)), y)

    return forward


def centred(m: Any, x: Tensor, y: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
    z = m.a(x)
    return F.cross_entropy(z - mean(z.detach()), y)


def weighted(m: Any, x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(m.a(x), y, reduction="none")
    weights = torch.vmap(torch.square)(losses.detach())
    return (losses * weights / weights.mean()).mean()


def taught(x: Tensor) -> Tensor:
    """What several frozen models give, averaged: (B, C)."""
    models = torch.linspace(-1, 1, 7 * C * D).reshape(7, C, D)
    return torch.vmap(lambda weight: F.linear(x, weight))(models).mean(0)


def noisy(z: Tensor) -> Tensor:
    """What dropout makes of each sample, averaged over several masks."""
    return torch.vmap(lambda scale: scale * F.dropout(z).mul(2), randomness="different")(torch.ones(7)).mean(0)


EXACT: dict[str, Forward] = {
    "vmap": fed(torch.vmap(lambda row: row - row.mean())),
    "vmap of other axes": fed(lambda x: torch.vmap(lambda row: 2 * row, 0, 1)(x).T),
    "vmap in chunks": fed(torch.vmap(lambda row: row - row.mean(), chunk_size=2)),
    "vmap over features": fed(torch.vmap(torch.sin, 1, 1)),
    "vmap that writes": fed(torch.vmap(lambda row: row.clone().mul_(2))),
    "vmap of a constant": fed(lambda x: x * torch.vmap(torch.sin)(torch.ones(D, 2))[:, 0]),
    "vmap of activations": lambda m, x, y: torch.vmap(lambda z, t: F.cross_entropy(z[None], t[None]))(m.a(x), y).mean(),
    "vmap of values": lambda m, x, y: centred(m, x, y, torch.vmap(lambda z: z.mean(0, keepdim=True))),
    "vmap over teachers": lambda m, x, y: F.cross_entropy(m.a(x), taught(x).softmax(-1)),
    "grad": fed(grad(lambda v: v.sin().sum())),
    "grad of a model": adversarial(lambda slope: slope / slope.norm(dim=1, keepdim=True)),
    "grad of a model by row": adversarial(lambda slope: slope.sign(), by_row=True),
    "vjp": fed(lambda x: vjp(torch.sin, x)[1](torch.ones_like(x))[0]),
    "jvp": fed(lambda x: jvp(torch.sin, (x,), (torch.ones_like(x),))[1]),
    "jacrev": fed(lambda x: torch.vmap(jacrev(torch.sin))(x).sum(1)),
    "jacfwd": fed(lambda x: torch.vmap(jacfwd(torch.sin))(x).sum(1)),
    "hessian": fed(lambda x: torch.vmap(hessian(lambda row: row.sin().sum()))(x).sum(1)),
}


@pytest.mark.parametrize("case", EXACT)
def test_samples_that_stay_apart(case: str) -> None:
    module, data = model(EXACT[case]), batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerSampleWarning)
        record = assert_exact(module, error, data)
    assert record.mixing == ()


OVER_ALL = r"combines samples with a value computed over the whole batch"
TOGETHER: dict[str, tuple[Forward, str]] = {
    "mean of a vmap": (
        lambda m, x, y: centred(m, x, y, lambda z: torch.vmap(torch.sin)(z).mean(0)),
        f"`sub` {OVER_ALL}",
    ),
    "random numbers of a vmap": (
        lambda m, x, y: centred(m, x, y, lambda z: noisy(z).mean(0)),
        f"`sub` {OVER_ALL}|inside a transform of torch\\.func at test_transforms\\.py:\\d+ could not be followed",
    ),
    "weights of a vmap": (weighted, f"`div` {OVER_ALL}"),
    "norm of a gradient": (adversarial(lambda slope: slope / slope.norm()), f"`div` {OVER_ALL}"),
    "gradient of a square": (fed(grad(lambda v: v.sum(0).square().sum())), "`sum` reduces over the batch axis"),
    "the same without a transform": (
        fed(lambda x: torch.autograd.grad((v := x.clone().requires_grad_()).sum(0).square().sum(), v)[0]),
        "`sum` reduces over the batch axis",
    ),
    "cotangents of others": (
        fed(lambda x: vjp(lambda v: v.flip(0) * 1.0, x)[1](x)[0]),
        "`grad` is given other samples as `grad_outputs` than it differentiates",
    ),
    "others from outside a vmap": (
        lambda m, x, y: centred(m, x, y, lambda z: torch.vmap(lambda row: (row - z).abs().sum(0))(z)),
        r"`sub` inside a transform of torch\.func at test_transforms\.py:\d+ could not be followed",
    ),
    "over features, centred": (fed(torch.vmap(lambda column: column - column.mean(), 1, 1)), f"`sub` {OVER_ALL}"),
    "mean of teachers": (lambda m, x, y: centred(m, x, y, lambda z: taught(x).mean(0)), f"`sub` {OVER_ALL}"),
    "a layer, without gradient": (
        lambda m, x, y: centred(m, x, y, lambda z: torch.vmap(lambda row: m.a(row).detach())(x).mean(0)),
        r"`linear` inside a transform of torch\.func at test_transforms\.py:\d+ could not be followed",
    ),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_samples_that_meet(case: str) -> None:
    forward, text = TOGETHER[case]
    module, data = model(forward), batch()
    with pytest.warns(PerSampleWarning, match=text), expanded_weights(module, data) as seen:
        module(*data).backward()
    assert seen.record.coverage == 1.0


def test_a_layer_that_reads_what_could_not_be_followed() -> None:
    module, data = model(lambda m, x, y: F.cross_entropy(m.a(torch.vmap(lambda row: (row - x).sum(0))(x)), y)), batch()
    with expanded_weights(module, data, unsupported="ignore") as seen:
        module(*data).backward()
    assert sorted(seen.record.unsupported) == ["a.bias", "a.weight"]
    text = r"the batch axis cannot be followed here: `sub` inside a transform of torch\.func at test_"
    for reason in seen.record.unsupported.values():
        assert re.search(text, reason)
