"""The tensor form: values, what it answers as a tensor, and the text of every refusal."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_sequence

from lightning_persample import ExpandedWeight, UnsupportedError
from lightning_persample.errors import BatchSizeError, OptionError, PerSampleError

pytestmark = pytest.mark.usefixtures("double_precision")

B = 4
rand = torch.randn


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(rand(shape))


def expanded(*shape: int, batch_size: int = B, **options: Any) -> ExpandedWeight:
    return ExpandedWeight(parameter(*shape), batch_size, options.pop("loss_reduction", "sum"), **options)


def tokens() -> Tensor:
    return torch.randint(0, 7, (B, 5))


def loop(function: Callable[..., Tensor], x: Tensor, weights: list[nn.Parameter]) -> list[Tensor]:
    """Each sample's gradient of each weight, with torch.autograd.grad alone."""
    rows = [torch.autograd.grad(function(x[i : i + 1], *weights).sin().sum(), weights) for i in range(len(x))]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], Callable[[], Tensor]]] = {
    "linear": (F.linear, [(3, 6), (3,)], lambda: rand(B, 6)),
    "linear-3d": (F.linear, [(3, 6), (3,)], lambda: rand(B, 5, 6)),
    "linear-by-keyword": (lambda x, w: F.linear(weight=w, input=x), [(3, 6)], lambda: rand(B, 6)),
    "conv": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(3, 2, 3, 3), (3,)], lambda: rand(B, 2, 5, 5)),
    "conv-transpose": (F.conv_transpose1d, [(2, 3, 2)], lambda: rand(B, 2, 5)),
    "embedding": (lambda x, w: F.embedding(x, w, padding_idx=2), [(7, 3)], tokens),
    "embedding-bag": (F.embedding_bag, [(7, 3)], tokens),
    "layer-norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), [(6,), (6,)], lambda: rand(B, 5, 6)),
    "group-norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(6,), (6,)], lambda: rand(B, 6, 3)),
    "instance-norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), [(6,), (6,)], lambda: rand(B, 6, 3)),
    "prelu": (F.prelu, [(6,)], lambda: rand(B, 6)),
    "bilinear": (lambda x, w: F.bilinear(x, x, w), [(3, 6, 6)], lambda: rand(B, 6)),
    "transposed": (lambda x, w: x @ w.t(), [(3, 6)], lambda: rand(B, 6)),
    "attribute-T": (lambda x, w: x @ w.T, [(3, 6)], lambda: rand(B, 6)),
    "sliced": (lambda x, w: F.linear(x, w[:2]) + F.linear(x, w[1:]), [(3, 6)], lambda: rand(B, 6)),
    "split": (lambda x, w: F.linear(F.linear(x, w.split(3)[0]), w.split(3)[1]), [(6, 3)], lambda: rand(B, 3)),
    "merged": (lambda x, w, u, d: F.linear(x, w + u @ d), [(3, 6), (3, 2), (2, 6)], lambda: rand(B, 6)),
    "normalised": (lambda x, w: F.linear(x, F.normalize(w, dim=1)), [(3, 6)], lambda: rand(B, 6)),
    "scaled": (lambda x, w: w * x, [(6,)], lambda: rand(B, 6)),
    "shifted": (lambda x, w: x + w, [(6,)], lambda: rand(B, 6)),
    "class-token": (lambda x, w: torch.cat([w.expand(len(x), -1, -1), x], 1), [(1, 1, 6)], lambda: rand(B, 5, 6)),
    "table": (lambda x, w: w[x], [(7, 3)], tokens),
    "singular-values": (lambda x, w: x * torch.linalg.svd(w).S, [(3, 6)], lambda: rand(B, 3)),
    "tied": (lambda x, w: F.linear(F.embedding(x, w), w), [(7, 3)], tokens),
    "twice": (lambda x, w: F.linear(F.linear(x, w).tanh(), w), [(6, 6)], lambda: rand(B, 6)),
    "no-rule": (lambda x, w: torch.cdist(x, w), [(3, 6)], lambda: rand(B, 6)),
}


@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_loop(name: str, loss_reduction: Any) -> None:
    function, shapes, batch = CASES[name]
    x, weights = batch(), [parameter(*shape) for shape in shapes]
    expected = loop(function, x, weights)
    out = function(x, *(ExpandedWeight(weight, B, loss_reduction) for weight in weights))
    assert type(out) is Tensor
    assert torch.equal(out, function(x, *weights))
    (out.sin().sum() / (B if loss_reduction == "mean" else 1)).backward()
    for weight, grads in zip(weights, expected, strict=True):
        assert weight.grad is None
        torch.testing.assert_close(weight.grad_sample, grads, rtol=1e-10, atol=1e-11)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "lstm": (lambda: nn.LSTM(3, 5, 2, batch_first=True), lambda: rand(B, 6, 3)),
    "gru-cell": (lambda: nn.GRUCell(3, 5), lambda: rand(B, 3)),
    "transformer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), lambda: rand(B, 5, 6)),
    "batch-norm": (lambda: nn.BatchNorm1d(3).eval(), lambda: rand(B, 3)),
    "circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), lambda: rand(B, 2, 4, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_in_place_of_the_parameters_of_a_layer(name: str) -> None:
    build, batch = LAYERS[name]
    layer, x = build(), batch()
    first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
    parameters = dict(layer.named_parameters())
    expected = loop(lambda x, *_: first(layer(x)), x, list(parameters.values()))
    out = functional_call(layer, {n: ExpandedWeight(p, B, "sum") for n, p in parameters.items()}, (x,))
    assert torch.equal(first(out), first(layer(x)))
    first(out).sin().sum().backward()
    for parameter, grads in zip(parameters.values(), expected, strict=True):
        assert parameter.grad is None
        torch.testing.assert_close(parameter.grad_sample, grads, rtol=1e-10, atol=1e-11)


def test_samples_along_the_second_axis() -> None:
    weight, x = parameter(3, 6), rand(5, B, 6)
    (expected,) = loop(lambda x, w: F.linear(x, w), x.transpose(0, 1), [weight])
    F.linear(x, ExpandedWeight(weight, B, "sum", batch_first=False)).sin().sum().backward()
    torch.testing.assert_close(weight.grad_sample, expected, rtol=1e-10, atol=1e-11)


def test_it_answers_as_the_original_does() -> None:
    original = nn.Parameter(rand(6, 3).t())
    weight = ExpandedWeight(original, B, "mean")
    assert isinstance(weight, Tensor)
    assert weight.orig_weight is original
    assert (weight.batch_size, weight.loss_reduction, weight.batch_first) == (B, "mean", True)
    for attribute in ("dtype", "shape", "device", "is_cuda", "ndim", "requires_grad", "layout", "grad"):
        assert getattr(weight, attribute) == getattr(original, attribute)
    for method in ("data_ptr", "get_device", "stride", "is_contiguous", "size", "dim", "numel", "__repr__", "__len__"):
        assert getattr(weight, method)() == getattr(original, method)()
    assert torch.equal(weight.data, original.data)
    assert weight.data.data_ptr() == weight.untyped_storage().data_ptr() == original.data_ptr()


def test_a_result_of_weights_alone_is_an_expanded_weight() -> None:
    weight = expanded(3, 6)
    transposed = weight.t()
    assert isinstance(transposed, ExpandedWeight)
    assert transposed.shape == (6, 3)
    assert type(weight.detach()) is Tensor
    with torch.no_grad():
        assert weight.mul_(2) is weight
        assert type(F.linear(rand(B, 6), weight)) is Tensor


def test_a_gradient_that_is_zero_but_for_rounding() -> None:
    weight, x = parameter(3), rand(B, 3, 7)
    F.instance_norm(x, weight=ExpandedWeight(weight, B, "sum")).sum().backward()
    assert weight.grad_sample.shape == (B, 3)
    assert weight.grad_sample.abs().max() < 1e-12


def test_two_calls_add_up_and_so_do_two_backwards() -> None:
    weight, x = parameter(3, 6), rand(B, 6)
    form = ExpandedWeight(weight, B, "sum")
    loss = F.linear(x, form).sum() + F.linear(x, ExpandedWeight(weight, B, "sum")).sum()
    loss.backward(retain_graph=True)
    torch.testing.assert_close(weight.grad_sample, 2 * x[:, None].expand(B, 3, 6))
    loss.backward()
    torch.testing.assert_close(weight.grad_sample, 4 * x[:, None].expand(B, 3, 6))


def test_a_penalty_belongs_to_no_sample() -> None:
    weight, x = parameter(3, 6), rand(B, 6)
    form = ExpandedWeight(weight, B, "sum")
    (F.linear(x, form).sum() + form.square().sum()).backward()
    torch.testing.assert_close(weight.grad_sample, x[:, None].expand(B, 3, 6))


def test_a_frozen_weight_and_a_constant_that_needs_gradient_stay_what_they_are() -> None:
    weight, scale, x = parameter(3, 6), parameter(B, 1), rand(B, 6)
    factor = scale.exp()[:3]
    F.linear(x, ExpandedWeight(weight, B, "sum") * factor, rand(3)).sum().backward()
    torch.testing.assert_close(weight.grad_sample, (x[:, None] * factor).detach())
    assert scale.grad is not None


class OwnMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, ctx.saved_tensors[0].t() @ grad


BAD_WEIGHTS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no-tensor": (
        lambda: ExpandedWeight([1.0], B, "sum"),  # type: ignore[arg-type]
        PerSampleError,
        "only a tensor can be an expanded weight; got list",
    ),
    "frozen": (lambda: ExpandedWeight(rand(3), B, "sum"), PerSampleError, "shape (3,) requires no gradient"),
    "nested": (lambda: ExpandedWeight(expanded(3), B, "sum"), PerSampleError, "is an ExpandedWeight already"),
    "float": (
        lambda: ExpandedWeight(parameter(3), 4.0, "sum"),  # type: ignore[arg-type]
        OptionError,
        "batch_size must be an integer; got 4.0, a float",
    ),
    "zero": (lambda: ExpandedWeight(parameter(3), 0, "sum"), OptionError, "batch_size must be positive; got 0"),
    "reduction": (
        lambda: ExpandedWeight(parameter(3), B, "max"),  # type: ignore[arg-type]
        OptionError,
        "loss_reduction must be 'sum' or 'mean'; got 'max'",
    ),
}

BAD_CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "input-expanded": (
        lambda: F.linear(expanded(5, 6), expanded(3, 6)),
        PerSampleError,
        "`linear`: its input is an ExpandedWeight; the input must be a tensor that holds the batch",
    ),
    "input-no-tensor": (
        lambda: F.layer_norm([1.0], (1,), expanded(1)),  # type: ignore[arg-type]
        PerSampleError,
        "`layer_norm`: its first input must be a tensor to read the batch dimension from; got list",
    ),
    "no-batch-dimension": (
        lambda: F.linear(torch.tensor(1.0), expanded(3, 1)),
        BatchSizeError,
        "`linear`: its input of shape () has no batch dimension; the samples must lie along axis 0",
    ),
    "empty": (
        lambda: F.linear(rand(0, 6), expanded(3, 6)),
        BatchSizeError,
        "`linear`: its input of shape (0, 6) is empty: 0 is not a batch size",
    ),
    "another-size": (
        lambda: F.embedding(torch.zeros(5, 3, dtype=torch.long), expanded(3, 6)),
        BatchSizeError,
        "`embedding`: its input of shape (5, 3) holds 5 samples along axis 0, but the expanded weight was made for a "
        "batch size of 4",
    ),
    "reductions-meet": (
        lambda: F.linear(rand(B, 6), expanded(3, 6), expanded(3, loss_reduction="mean")),
        OptionError,
        "expanded weights with loss_reduction='sum' and loss_reduction='mean' meet in one call",
    ),
    "sizes-meet": (
        lambda: F.linear(rand(B, 6), expanded(3, 6), expanded(3, batch_size=5)),
        OptionError,
        "expanded weights with batch_size=4 and batch_size=5 meet in one call; make all of them alike",
    ),
    "packed": (
        lambda: functional_call(
            nn.GRU(3, 2), {"weight_ih_l0": expanded(6, 3)}, (pack_sequence([rand(2, 3), rand(1, 3)]),)
        ),
        UnsupportedError,
        "cannot tell whose the rows of a packed sequence are; use call_for_per_sample_grads on the module",
    ),
    "written-into": (
        lambda: rand(3, 6).copy_(expanded(3, 6)),
        UnsupportedError,
        "`copy_` writes an ExpandedWeight into a plain tensor, whose further use is not seen",
    ),
    "custom-function": (
        lambda: OwnMatmul.apply(rand(B, 3), expanded(3, 6)).sum().backward(),
        UnsupportedError,
        "was used by something that is not a torch call, such as a custom autograd function",
    ),
    "no-batch": (
        lambda: torch.add(rand(3, 6), expanded(6)).sum().backward(),
        UnsupportedError,
        "of shape (6,)`: its gradient comes from calls without a tensor of the batch",
    ),
}


@pytest.mark.parametrize("name", [*BAD_WEIGHTS, *BAD_CALLS])
def test_refusals(name: str) -> None:
    act, kind, text = (BAD_WEIGHTS | BAD_CALLS)[name]
    with pytest.raises(kind, match=re.escape(text)) as raised:
        act()
    assert isinstance(raised.value, RuntimeError)


def test_sizes_that_differ_between_backwards() -> None:
    weight = parameter(3, 6)
    F.linear(rand(B, 6), ExpandedWeight(weight, B, "sum")).sum().backward()
    text = "has a grad_sample of shape (4, 3, 6) from a batch of another size than 2; delete it with `del"
    with pytest.raises(BatchSizeError, match=re.escape(text)):
        F.linear(rand(2, 6), ExpandedWeight(weight, 2, "sum")).sum().backward()
