"""Activation checkpoints that hand tensors made of weights alone from block to block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_persample import check_per_sample_gradients, expanded_weights
from tests.capture.model_cases import mean_of_squares
from tests.capture.reference import assert_values, loop, record_of

pytestmark = pytest.mark.usefixtures("double_precision")

HANDED_ON = "from weights alone inside an activation checkpoint"


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "one-op": lambda w: w * 2.0,
    "several-ops": lambda w: (w.exp() / 3).view(1, 6).tanh(),
    "in-place": lambda w: (w * 2.0).mul_(3.0),
    "view": lambda w: w.flip(0)[None],
    "detached": lambda w: (w * 2.0).detach(),
    "custom-function": lambda w: Doubled.apply(w),
}


class Block(nn.Module):
    """Makes the bias, or takes the one of an earlier block; hands it on."""

    def __init__(self, make: Callable[[Tensor], Tensor] | None, uses: bool = True, container: str = "tuple") -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.make, self.uses, self.container = make, uses, container
        if make is not None:
            self.bias = nn.Parameter(torch.randn(6))

    def forward(self, h: Tensor, bias: Tensor) -> Any:
        bias = bias if self.make is None else self.make(self.bias)
        h = torch.tanh(self.linear(h) + bias) if self.uses else torch.tanh(self.linear(h))
        return {"h": h, "bias": bias} if self.container == "dict" else (h, bias)


class Stack(nn.Module):
    """Blocks that are each checkpointed or not; `reentrant` None is without checkpoints."""

    def __init__(self, blocks: list[nn.Module], skip: int | None = None, nested: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.reentrant: bool | None = None
        self.skip, self.nested = skip, nested

    def forward(self, x: Tensor) -> Tensor:
        h, bias = x.clone().requires_grad_(), torch.zeros(6)
        for i, block in enumerate(self.blocks):
            if self.reentrant is None or i == self.skip:
                out = block(h, bias)
            elif self.nested:
                out = checkpoint(self.inside, block, h, bias, use_reentrant=self.reentrant)
            else:
                out = checkpoint(block, h, bias, use_reentrant=self.reentrant)
            h, bias = (out["h"], out["bias"]) if isinstance(out, dict) else out
        return h

    def inside(self, block: nn.Module, h: Tensor, bias: Tensor) -> Any:
        return checkpoint(block, h, bias, use_reentrant=self.reentrant)


def stack(make: Callable[[Tensor], Tensor], maker: int = 0, **options: Any) -> Stack:
    return Stack([Block(make if i == maker else None) for i in range(3)], **options)


CASES: dict[str, Callable[[], Stack]] = {
    **{name: lambda make=make: stack(make) for name, make in MADE.items()},  # type: ignore[misc]
    "made-by-the-second": lambda: stack(MADE["one-op"], 1),
    "made-by-the-last": lambda: stack(MADE["one-op"], 2),
    "made-twice": lambda: Stack([Block(MADE["one-op"]), Block(None), Block(MADE["several-ops"]), Block(None)]),
    "not-used-where-it-is-made": lambda: Stack([Block(MADE["one-op"], False), Block(None)]),
    "used-where-it-is-made-alone": lambda: Stack([Block(MADE["one-op"]), Block(None, False)]),
    "a-block-without-a-checkpoint": lambda: stack(MADE["one-op"], skip=1),
    "made-outside": lambda: stack(MADE["one-op"], skip=0),
    "nested": lambda: stack(MADE["one-op"], nested=True),
}
SILENT = {"detached", "made-by-the-last", "used-where-it-is-made-alone"}  # no gradient comes back
OTHER = {"custom-function": "a custom autograd function", "made-outside": "is an input of an activation checkpoint"}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_tensor_of_weights_alone_that_a_checkpoint_hands_on_is_exact_or_refused(name: str, reentrant: bool) -> None:
    module, batch = CASES[name](), torch.randn(5, 6)
    expected = loop(module, mean_of_squares, (batch,))
    module.reentrant = reentrant
    record = record_of(module, mean_of_squares, batch)
    absent = name == "custom-function" or (reentrant and name not in SILENT)
    refused = {n for n, _ in module.named_parameters() if n.endswith(".bias") and "linear" not in n and absent}
    assert set(record.unsupported) == refused
    text = OTHER.get(name, HANDED_ON)
    assert all(text in reason for reason in record.unsupported.values())
    if name != "custom-function":
        assert all("use_reentrant=False" in reason for reason in record.unsupported.values())
    assert (record.mixing, record.axis_lost) == ((), ()) or name == "nested"
    assert_values(record, {n: rows for n, rows in expected.items() if n in record.names})
    assert set(record.names) == {n for n, rows in expected.items() if rows.any()} - refused


def test_blocks_that_give_a_mapping() -> None:
    module, batch = Stack([Block(MADE["one-op"], container="dict"), Block(None)]), torch.randn(5, 6)
    expected = loop(module, mean_of_squares, (batch,))
    module.reentrant = False
    assert_values(record_of(module, mean_of_squares, batch), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_custom_function_inside_a_checkpoint_on_a_weight_that_is_also_seen_is_refused(reentrant: bool) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight + Doubled.apply(self.weight)).tanh()

    module = nn.Sequential(nn.Linear(6, 6), Twice())

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(m[1], m[0](x), use_reentrant=reentrant).square().sum(1).mean()

    record = record_of(module, loss, torch.randn(5, 6))
    assert set(record.unsupported) == {"1.weight"}
    assert "Doubled.apply, a custom autograd function" in record.unsupported["1.weight"]


def test_the_check_says_that_it_cannot_go_through_a_reentrant_checkpoint() -> None:
    module = stack(MADE["one-op"])
    module.reentrant = True
    report = check_per_sample_gradients(module, torch.randn(5, 6), mean_of_squares)
    assert not report
    assert "use checkpoint(..., use_reentrant=False), or go without checkpointing" in report.reason
    assert "batch_dim" not in report.reason


@pytest.mark.parametrize(
    ("shape", "made"),
    [
        ((4,), lambda v: v[None]),
        ((4,), lambda v: v.expand(1, 4)),
        ((3, 4), lambda v: v.view_as(v)),
        ((3, 4), lambda v: v.t().t()),
        ((1, 4), lambda v: v.squeeze(0)),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_view_of_a_weight_that_several_reentrant_checkpoints_add_is_exact(
    batch_size: int, shape: tuple[int, ...], made: Callable[[Tensor], Tensor]
) -> None:
    """Its gradient is that of an output, in the same memory, and becomes `.grad`, to which the other blocks add."""
    torch.manual_seed(0)
    shape = (batch_size, *shape[1:]) if shape[0] == 3 else shape
    module = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
    module.register_parameter("v", nn.Parameter(torch.randn(shape, dtype=torch.float64)))
    x = torch.randn(batch_size, 4, dtype=torch.float64)

    def losses(reentrant: bool) -> Tensor:
        h = x.clone().requires_grad_()
        for layer in module:

            def block(h: Tensor, layer: nn.Module = layer) -> Tensor:
                return (layer(h) + made(module.v)).tanh() + h

            h = checkpoint(block, h, use_reentrant=reentrant)
        return h.square().sum(1)

    expected = torch.stack([torch.autograd.grad(losses(False)[i], module.v)[0] for i in range(batch_size)])
    with expanded_weights(module, x, quantities=("grad_sample",), loss_reduction="sum") as capture:
        losses(True).sum().backward()
    torch.testing.assert_close(capture.record.grad_samples["v"], expected, rtol=1e-10, atol=1e-12)
