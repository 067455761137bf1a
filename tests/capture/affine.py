"""One op, x * weight + bias, in every form in which a user may write it, and its rule."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_persample import Dense, RuleReport, register_rule

B = 6


class Affine(torch.autograd.Function):
    """x (B, ..., d) * weight (d,) + bias (d,), fused."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x * weight + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).flatten(0, -2).sum(0), grad.flatten(0, -2).sum(0)


def _with_backward(op):
    def backward(ctx, grad):
        return Affine.backward(ctx, grad)

    torch.library.register_autograd(
        op, backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2])
    )


@torch.library.custom_op("persample_test::affine", mutates_args=())
def custom_affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x * weight + bias


_with_backward("persample_test::affine")
LIBRARY = torch.library.Library("persample_test", "FRAGMENT")
LIBRARY.define("defined_affine(Tensor x, Tensor weight, Tensor bias) -> Tensor")
LIBRARY.impl("defined_affine", lambda x, weight, bias: x * weight + bias, "CompositeExplicitAutograd")
_with_backward("persample_test::defined_affine")


@torch.overrides.wrap_torch_function(lambda x, weight, bias: (x, weight, bias))
def affine(x, weight, bias):
    return Affine.apply(x, weight, bias)


def asks_itself(x, weight, bias):
    if torch.overrides.has_torch_function((x, weight, bias)):
        return torch.overrides.handle_torch_function(asks_itself, (x, weight, bias), x, weight, bias)
    return Affine.apply(x, weight, bias)


def right(call, grad):
    """The rule of all forms of affine."""
    found = {}
    if "weight" in call.weights:
        found["weight"] = Dense((grad * call.arguments["x"]).flatten(1, -2).sum(1))
    if "bias" in call.weights:
        found["bias"] = Dense(grad.flatten(1, -2).sum(1))
    return found


def register(rule, op=affine, **options):
    register_rule(
        op,
        **{
            "arguments": ("x", "weight", "bias"),
            "batched": ("x",),
            "weights": ("weight", "bias"),
            "overwrite": True,
            **options,
        },
    )(rule)


def arguments(size: int = B) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(size, 3), torch.randn(3), torch.randn(3)


def found(report: RuleReport, *, status: str) -> dict[str, set[str]]:
    """The reasons of the rows with a status, by call; the report is false and its table has each reason."""
    assert not report
    rows = report.named(status)
    assert rows, str(report)
    for row in rows:
        assert row.reason in str(report)
    return {row.call: {other.reason for other in rows if other.call == row.call} for row in rows}


def plain(x, weight, bias):
    return torch.addcmul(bias, x, weight)
