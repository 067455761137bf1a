"""`vmap_per_sample_grads` beside the loop, and the text of every refusal of the functions of this file."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

import tests.capture.recurrent_cases  # noqa: F401  (adds its cases)
import tests.capture.twice_cases  # noqa: F401  (adds its cases)
from lightning_persample import (
    ExpandedWeight,
    UnsupportedError,
    call_for_per_sample_grads,
    loop_per_sample_grads,
    vmap_per_sample_grads,
)
from lightning_persample.errors import BatchSizeError, OptionError, PerSampleError
from tests.capture.model_cases import CASES, Model, parameter
from tests.capture.reference import loop
from tests.torch_release import OLDEST, RELEASE

pytestmark = pytest.mark.usefixtures("double_precision")

B = 4

# What torch.func cannot run: shapes that depend on the data, recurrent kernels, sparse gradients, writes into buffers,
# a linear map by a vector; in torch 2.6 also grids.
BEYOND_VMAP = re.compile(
    r"(twice-in-a-call-)?(rnn|gru|lstm)(-|$)|tokens-picked|experts|embedding-(max_norm|sparse)|embedding-bag-.*(uneven|empty|max-norm|sparse)|"
    r"instance-norm|time-major|linear-vector" + ("|spatial-transformer" if RELEASE <= OLDEST else "")
)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", [name for name in CASES if not BEYOND_VMAP.match(name)])
def test_vmap_gives_the_values_of_the_loop(name: str) -> None:
    case = CASES[name]
    module, batch = case.build(), case.batch(5)
    expected = loop(module, case.loss, batch)
    losses, grads = vmap_per_sample_grads(module, case.loss, *batch)
    singles = [case.loss(module, *(tensor[i : i + 1] for tensor in batch)) for i in range(5)]
    torch.testing.assert_close(losses, torch.stack(singles).detach(), rtol=1e-10, atol=1e-12)
    assert list(grads) == [name for name, p in module.named_parameters() if p.requires_grad]
    for name, values in grads.items():
        assert not values.requires_grad
        torch.testing.assert_close(values, expected[name], rtol=1e-10, atol=1e-11)


def squares(module: nn.Module, x: Tensor, *_: Any) -> Tensor:
    return module(x).square().sum()


@pytest.mark.parametrize("chunk_size", [1, 3, 10])
def test_chunks_give_the_same(chunk_size: int) -> None:
    module, x = nn.Linear(6, 4), torch.randn(B, 6)
    whole, chunked = (vmap_per_sample_grads(module, squares, x, chunk_size=size) for size in (None, chunk_size))
    torch.testing.assert_close(chunked, whole)


def test_nested_batches_and_what_is_not_a_tensor() -> None:
    module, x, y = nn.Linear(6, 4), torch.randn(B, 6), torch.randint(0, 4, (B,))

    def loss(module: nn.Module, inputs: dict[str, Any], scale: float, offset: Tensor) -> Tensor:
        assert inputs["x"][0].shape == (1, 6)
        return F.cross_entropy(module(inputs["x"][0]), inputs["y"]) * scale + offset

    batch = ({"x": [x, "text"], "y": y, "none": None}, 2.0, torch.tensor(1.0))
    losses, grads = vmap_per_sample_grads(module, loss, *batch)
    expected_losses, expected = loop_per_sample_grads(module, loss, *batch)
    torch.testing.assert_close(losses, expected_losses)
    torch.testing.assert_close(grads, expected)


def test_frozen_tied_and_unused_parameters() -> None:
    module = Model(lambda m, x: F.linear(m.e(x), m.t.weight), e=nn.Embedding(9, 6), t=nn.Linear(6, 9), u=parameter(3))
    module.t.weight = module.e.weight
    module.t.bias.requires_grad_(False)
    x = torch.randint(0, 9, (B, 5))
    _, grads = vmap_per_sample_grads(module, squares, x)
    assert list(grads) == ["u", "e.weight"]
    assert not grads["u"].any()
    assert grads["u"].shape == (B, 3)
    torch.testing.assert_close(grads["e.weight"], loop(module, squares, (x,))["e.weight"])
    for p in module.parameters():
        p.requires_grad_(False)
    losses, grads = vmap_per_sample_grads(module, squares, x)
    assert losses.shape == (B,)
    assert grads == {}


def test_a_loss_without_parameters_has_gradients_of_zero() -> None:
    _, grads = vmap_per_sample_grads(nn.Linear(6, 4), lambda _, x: x.sum(), torch.randn(B, 6))
    assert [(name, bool(values.any())) for name, values in grads.items()] == [("weight", False), ("bias", False)]


def test_the_module_is_unchanged() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False), Counting(), nn.LSTM(4, 2))
    x = torch.randn(B, 3, 6, requires_grad=True)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    state, parameters = copy.deepcopy(module.state_dict()), list(module.parameters())
    vmap_per_sample_grads(module, lambda m, x: m[2](m[1](m[0](x).transpose(1, 2))).sum(), x, chunk_size=2)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in module.parameters())
    assert x.grad is None


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_randomness() -> None:
    module, x = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5)), torch.ones(B, 6)
    state = torch.get_rng_state()
    _, different = vmap_per_sample_grads(module, squares, x)
    assert not torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(different["0.bias"][0], different["0.bias"][1])
    _, same = vmap_per_sample_grads(module, squares, x, randomness="same")
    torch.testing.assert_close(same["0.bias"][0], same["0.bias"][1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap_per_sample_grads(module, squares, x, randomness="error")


@dataclass
class Opaque:
    x: Tensor


def vmapped(*batch: Any, module: Any = None, loss: Any = squares, **options: Any) -> Any:
    return vmap_per_sample_grads(nn.Linear(6, 4) if module is None else module, loss, *batch, **options)


VMAP_REFUSALS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "vmap-no-module": (lambda: vmapped(module=3), PerSampleError, "module must be a torch.nn.Module; got int"),
    "vmap-chunk-size": (
        lambda: vmapped(torch.zeros(B, 6), chunk_size=0),
        OptionError,
        "chunk_size=0 is not allowed: chunk_size must be None or an int >= 1",
    ),
    "vmap-randomness": (
        lambda: vmapped(torch.zeros(B, 6), randomness="some"),
        OptionError,
        "randomness='some' is not allowed: randomness must be 'different', 'same' or 'error'",
    ),
    "vmap-sizes-differ": (
        lambda: vmapped(torch.zeros(B, 6), torch.zeros(5)),
        BatchSizeError,
        "batch[0]: (4, 6), batch[1]: (5,)",
    ),
    "vmap-no-tensor": (lambda: vmapped(3), BatchSizeError, "the batch holds no tensor with an axis"),
    "vmap-opaque": (
        lambda: vmapped(Opaque(torch.zeros(B, 6))),
        BatchSizeError,
        "a Opaque in the batch holds tensors, but cannot be split into samples; pass tensors, tuples, lists and dicts",
    ),
    "loop-opaque": (
        lambda: loop_per_sample_grads(nn.Linear(6, 4), squares, Opaque(torch.zeros(B, 6))),
        BatchSizeError,
        "a Opaque in the batch holds tensors, but cannot be split into samples",
    ),
    "vmap-loss-with-axes": (
        lambda: vmapped(torch.zeros(B, 6), loss=lambda m, x: m(x).sum(1)),
        PerSampleError,
        "loss_fn must give a scalar, a tensor without axes, but gave a tensor of shape (1,); reduce it",
    ),
    "vmap-loss-no-tensor": (
        lambda: vmapped(torch.zeros(B, 6), loss=lambda m, x: 3.0),
        PerSampleError,
        "loss_fn must give a scalar, a tensor without axes, but gave float; reduce it",
    ),
    "vmap-lazy": (
        lambda: vmapped(torch.zeros(B, 6), module=nn.LazyLinear(3)),
        UnsupportedError,
        "parameter `weight` is not initialized yet; run one batch through the module first",
    ),
}


def call(*args: Any, module: Any = None, **options: Any) -> Any:
    return call_for_per_sample_grads(nn.Linear(6, 4) if module is None else module, **options)(*args)


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, *args: Any) -> Tensor:
        raise AssertionError("an input that is refused does not reach the module")


def twice() -> None:
    module = nn.Linear(6, 4)
    for _ in range(2):
        call(torch.randn(B, 6), module=module).sum().backward()


def left_over() -> None:
    module = nn.Linear(6, 4)
    module.bias.grad_sample = torch.zeros(B, 4)
    call_for_per_sample_grads(module)


CALL_REFUSALS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no-module": (lambda: call("x", module="fail"), PerSampleError, "module must be a torch.nn.Module; got str"),
    "float": (lambda: call(batch_size=6.4), OptionError, "batch_size must be an integer; got 6.4, a float"),
    "negative": (lambda: call(batch_size=-6), OptionError, "batch_size must be positive; got -6"),
    "reduction": (lambda: call(loss_reduction=""), OptionError, "loss_reduction must be 'sum' or 'mean'; got ''"),
    "left-over": (
        left_over,
        PerSampleError,
        "parameter `bias` has a grad_sample left over from an earlier backward, to which the next one would add, which "
        "is incorrect for multiple calls; delete it first: `del parameter.grad_sample`",
    ),
    "called-again": (twice, PerSampleError, "parameter `weight` has a grad_sample left over from an earlier backward"),
    "no-tensor": (lambda: call("text"), BatchSizeError, "there is no tensor among the arguments and keyword arguments"),
    "no-tensor-given": (
        lambda: call("text", batch_size=B),
        BatchSizeError,
        "no input holds batch_size=4 samples along axis 0: there is no tensor among them",
    ),
    "no-batch-dimension": (
        lambda: call(torch.tensor(1.0)),
        BatchSizeError,
        "no input has a batch dimension, which must be axis 0: args[0]: shape ()",
    ),
    "no-second-axis": (
        lambda: call(torch.zeros(6), batch_first=False),
        BatchSizeError,
        "no input has a batch dimension, which must be axis 1: args[0]: shape (6,)",
    ),
    "empty": (
        lambda: call(torch.zeros(0, 6)),
        BatchSizeError,
        "the batch is empty, and 0 is not a batch size: args[0]: shape (0, 6)",
    ),
    "sizes-differ": (
        lambda: call(torch.zeros(4, 6), {"y": torch.zeros(5, 6)}, module=Taking()),
        BatchSizeError,
        "the inputs do not agree on a batch size along axis 0: args[0]: shape (4, 6); args[1]['y']: shape (5, 6); pass "
        "batch_size",
    ),
    "another-size": (
        lambda: call(torch.zeros(5, 6), batch_size=B),
        BatchSizeError,
        "no input holds batch_size=4 samples along axis 0: args[0]: shape (5, 6)",
    ),
    "packed-size-differs": (
        lambda: call(pack_sequence([torch.zeros(2, 6)]), torch.zeros(4, 6), module=Taking()),
        BatchSizeError,
        "args[0]: packed sequence of 1; args[1]: shape (4, 6)",
    ),
    "expanded-input": (
        lambda: call(ExpandedWeight(parameter(B, 6), B, "sum")),
        PerSampleError,
        "args[0] is an ExpandedWeight; an input must be a plain tensor",
    ),
    "lazy": (
        lambda: call(torch.zeros(B, 6), module=nn.LazyLinear(3)),
        UnsupportedError,
        "parameter `weight` is not initialized yet; run one batch through the module first",
    ),
}


@pytest.mark.parametrize("name", [*VMAP_REFUSALS, *CALL_REFUSALS])
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_refusals(name: str) -> None:
    act, kind, text = (VMAP_REFUSALS | CALL_REFUSALS)[name]
    with pytest.raises(kind, match=re.escape(text)) as raised:
        act()
    assert isinstance(raised.value, RuntimeError)


class Returning(nn.Module):
    """Returns, beside its output, something made of its weight alone."""

    def __init__(self, extra: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.extra = parameter(6, 4), extra

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.w, self.extra(self.w)


class OwnScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


def penalised(module: nn.Module) -> Tensor:
    x = torch.randn(B, 6, requires_grad=True)
    out = call_for_per_sample_grads(module)(x)
    (slope,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
    return out.sum() + slope.square().sum()


def returned(module: nn.Module) -> Tensor:
    out, extra = call_for_per_sample_grads(module)(torch.randn(B, 6))
    return out.sin().sum() + extra.cos().sum()


def summed(module: nn.Module) -> Tensor:
    return call_for_per_sample_grads(module)(torch.randn(B, 6)).sin().sum()


UNSUPPORTED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor], str]] = {
    "gradient-penalty": (
        lambda: nn.Linear(6, 4),
        penalised,
        "1 of the 2 weights that got a gradient, so none was set; freeze them with requires_grad_(False) to go on "
        "without:\n- `weight`: the samples' gradients do not add up to the gradient of the batch",
    ),
    "weight-returned": (
        lambda: Returning(lambda w: w),
        returned,
        "`w`: the samples' gradients do not add up to the gradient of the batch: part of that comes from elsewhere",
    ),
    "derived-weight-returned": (
        lambda: Returning(lambda w: 2 * w),
        returned,
        "`w`: the module returns `mul` on (6, 4)",
    ),
    "custom-function": (
        lambda: Model(lambda m, x: OwnScale.apply(m.a(x), m.w), a=nn.Linear(6, 4), w=parameter(4)),
        summed,
        "`w`: its gradient also arrives through OwnScale.apply, a custom autograd function, which torch does not show",
    ),
    "batch-axis-lost": (
        lambda: Model(lambda m, x: m.b(m.a(x).t()), a=nn.Linear(6, 4), b=nn.Linear(B, 2)),
        summed,
        "`b.weight`",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_weights_are_named_and_none_is_set(name: str) -> None:
    build, run, text = UNSUPPORTED[name]
    module = build()
    loss = run(module)
    with pytest.raises(UnsupportedError, match=re.escape(text)):
        loss.backward()
    assert not any(hasattr(p, "grad_sample") for p in module.parameters())
    assert all(p.grad is None for p in module.parameters())


def test_a_reentrant_checkpoint_is_refused_where_its_gradients_would_be_zeros():
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return self[1](checkpoint(self[0], x.requires_grad_(), use_reentrant=self.reentrant))

    module = Checkpointed(nn.Linear(3, 4), nn.Linear(4, 2))
    x, y = torch.randn(B, 3), torch.randn(B, 2)
    module.reentrant = True
    with pytest.raises(UnsupportedError, match="use_reentrant=True gives none to it; use checkpoint"):
        loop_per_sample_grads(module, lambda m, x, y: F.mse_loss(m(x), y), x, y)
    module.reentrant = False
    _, grads = loop_per_sample_grads(module, lambda m, x, y: F.mse_loss(m(x), y), x, y)
    _, expected = loop_per_sample_grads(module, lambda m, x, y: F.mse_loss(m[1](m[0](x)), y), x, y)
    for name, rows in grads.items():
        torch.testing.assert_close(rows, expected[name])


def test_a_loss_without_a_graph_gives_zeros_as_vmap_does():
    module, x = nn.Linear(3, 1), torch.tensor([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]])

    def only_positive(module, x):
        return module(x).sum() if x.sum() > 0 else x.sum()

    _, grads = loop_per_sample_grads(module, only_positive, x)
    torch.testing.assert_close(grads["weight"][:, 0], torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]))
