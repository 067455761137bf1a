"""The generic rule against a loop over single samples, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_persample.errors import UnsupportedError
from lightning_persample.rules import generic_rule
from tests.rules.case import assert_close, strided
from tests.rules.generic_cases import B, GenericCase, generic_cases

every_case = pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in generic_cases()])


def _output_gradients(case: GenericCase) -> list[Tensor | None]:
    """One gradient per tensor output, None where the case has none."""
    outputs, _ = case.one_sample(0)
    asked = case.outputs or (True,)
    assert len(asked) == len(outputs)
    return [
        torch.randn((B, *output.shape), dtype=output.dtype) if has_gradient else None
        for output, has_gradient in zip(outputs, asked, strict=True)
    ]


def _reference(case: GenericCase, grads: Sequence[Tensor | None]) -> dict[int, Tensor]:
    found: dict[int, list[Tensor]] = {leaf: [] for leaf in case.weights}
    for sample in range(B):
        outputs, weights = case.one_sample(sample)
        paired = [(output, grad[sample]) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
        if any(output.requires_grad for output, _ in paired):
            gradients = torch.autograd.grad(
                [output for output, _ in paired],
                list(weights.values()),
                [grad for _, grad in paired],
                allow_unused=True,
            )
        else:
            gradients = (None,) * len(weights)
        for (leaf, weight), gradient in zip(weights.items(), gradients, strict=True):
            found[leaf].append(torch.zeros_like(weight) if gradient is None else gradient)
    return {leaf: torch.stack(rows) for leaf, rows in found.items()}


def _answer(case: GenericCase, grads: Sequence[Tensor | None], **options) -> dict[int, Tensor]:
    args, kwargs = case.whole()
    grad_output = grads[0] if case.outputs is None else tuple(grads)
    return generic_rule(case.function, args, kwargs, case.batched, case.weights, grad_output, **options)


@every_case
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_equals_the_loop(case: GenericCase, chunk_size: int | None):
    grads = _output_gradients(case)
    found = _answer(case, grads, chunk_size=chunk_size)
    expected = _reference(case, grads)
    assert set(found) == case.weights
    for leaf, gradient in found.items():
        assert_close(gradient, expected[leaf], 1e-10)


@every_case
def test_nothing_of_the_caller_is_modified_and_no_graph_is_built(case: GenericCase):
    args, kwargs = case.whole()
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    before = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.requires_grad_()
    grads = _output_gradients(case)
    grad_output = grads[0] if case.outputs is None else tuple(grads)
    found = generic_rule(case.function, args, kwargs, case.batched, case.weights, grad_output)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, before, strict=True))
    assert not any(gradient.requires_grad for gradient in found.values())
    for tensor in tensors:
        tensor.requires_grad_(False)


@every_case
def test_small_batches(case: GenericCase):
    args, kwargs = case.whole()
    grads = _output_gradients(case)
    for size in (0, 1):
        batched = {leaf: value[:size] for leaf, value in case.batched.items()}
        cut = [None if grad is None else grad[:size] for grad in grads]
        found = generic_rule(
            case.function, args, kwargs, batched, case.weights, cut[0] if case.outputs is None else cut
        )
        expected = _answer(case, grads)
        assert set(found) == case.weights
        for leaf, gradient in found.items():
            assert_close(gradient, expected[leaf][:size], 1e-10)


def test_gradients_of_floating_point_outputs_only():
    """Where the op also has an index among its outputs, one gradient per floating point output is enough."""
    case = next(case for case in generic_cases() if case.id == "max_values")
    grads = _output_gradients(case)
    args, kwargs = case.whole()
    found = generic_rule(case.function, args, kwargs, case.batched, case.weights, (grads[0],))
    assert_close(found[1], _answer(case, grads)[1], 1e-10)


def test_no_output_has_a_gradient():
    case = next(case for case in generic_cases() if case.id == "lstm_cell")
    found = _answer(case, (None, None))
    assert {leaf: tuple(value.shape) for leaf, value in found.items()} == {
        3: (B, 12, 4), 4: (B, 12, 3), 5: (B, 12), 6: (B, 12),
    }  # fmt: skip
    assert not any(value.any() for value in found.values())


def test_strides_do_not_matter():
    x, w, grad = torch.randn(3, 2, 4), torch.randn(4, 5), torch.randn(3, 2, 5)
    args = ("nd,dp->np", x, w)
    expected = generic_rule(torch.einsum, args, {}, {1: x}, frozenset({2}), grad)[2]
    found = generic_rule(torch.einsum, args, {}, {1: strided(x)}, frozenset({2}), strided(grad))[2]
    assert_close(found, expected, 1e-6)


def test_a_batched_leaf_may_be_left_out_of_the_arguments():
    """The engine need not keep the original of a tensor that it gives batch-first."""
    x, w, grad = torch.rand(3, 2, 4), torch.rand(4), torch.randn(3, 2, 4)
    for function in (torch.Tensor.pow, torch.Tensor.pow_):
        expected = generic_rule(function, (x, w), {}, {0: x}, frozenset({1}), grad)[1]
        assert torch.equal(generic_rule(function, (None, w), {}, {0: x}, frozenset({1}), grad)[1], expected)


def test_inside_a_backward():
    args = ("nd,dp->np", torch.randn(3, 4), torch.randn(4, 5, requires_grad=True))
    x, w = args[1:]
    found = {}

    def keep(grad: Tensor) -> None:
        found.update(generic_rule(torch.einsum, args, {}, {1: x.unsqueeze(1)}, frozenset({2}), grad.unsqueeze(1)))

    output = torch.einsum(*args)
    output.register_hook(keep)
    output.square().sum().backward()
    assert_close(found[2].sum(0), w.grad, 1e-5)


def test_autocast_had_cast_the_arguments():
    """Outside autocast the op would refuse bfloat16 beside float32: both are computed in float32."""
    x, w = torch.randn(3, 2, 4).bfloat16(), torch.randn(4, 5)
    grad = torch.randn(3, 2, 5).bfloat16()
    found = generic_rule(torch.einsum, ("nd,dp->np", x, w), {}, {1: x}, frozenset({2}), grad)[2]
    assert found.dtype == torch.float32
    assert_close(found, torch.einsum("bnd,bnp->bdp", x.float(), grad.float()), 1e-5)


def test_out_is_refused():
    x, w = torch.randn(3, 1, 4), torch.randn(4, 5)
    text = (
        "`matmul`: it writes to the argument `out`: call it without one; give it a rule of its own with "
        "lightning_persample.register_rule"
    )
    with pytest.raises(UnsupportedError, match=f"^{re.escape(text)}$"):
        generic_rule(torch.matmul, (x, w), {"out": torch.empty(3, 1, 5)}, {0: x}, frozenset({1}), torch.ones(3, 1, 5))


def depends_on_values(x: Tensor, w: Tensor) -> Tensor:
    return x * w if x.sum().item() > 0 else x + w


def noisy(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(x * w)


def raises(error: Exception):
    def op(x: Tensor, w: Tensor) -> Tensor:
        raise error

    return op


def test_an_op_that_cannot_be_batched_runs_sample_by_sample():
    x, w, grad = torch.randn(5, 1, 4), torch.randn(4), torch.randn(5, 1, 4)
    found = generic_rule(depends_on_values, (x, w), {}, {0: x}, frozenset({1}), grad)[1]
    for row, own, upstream in zip(found, x, grad, strict=True):
        expected = own * upstream if own.sum() > 0 else upstream
        assert_close(row, expected.sum(0), 1e-10)


@pytest.mark.parametrize(
    ("op", "cause"),
    [
        (raises(NotImplementedError("no batching rule")), NotImplementedError),
        (raises(TypeError("not a tensor")), TypeError),
        (raises(ValueError("secret tensor(1.25)")), ValueError),
    ],
    ids=["NotImplementedError", "TypeError", "ValueError"],
)
def test_what_fails_on_one_sample(op, cause):
    x, w = torch.randn(3, 1, 4), torch.randn(4)
    with pytest.raises(UnsupportedError) as raised:
        generic_rule(op, (x, w), {}, {0: x}, frozenset({1}), torch.ones(3, 1, 4))
    assert str(raised.value) == (
        f"`{op.__qualname__}`: running it on one sample alone raised {cause.__name__}; give it a rule of its own with "
        "lightning_persample.register_rule"
    )
    assert type(raised.value.__cause__) is cause


def noisy_by_values(x: Tensor, w: Tensor) -> Tensor:
    scale = 1 if x.sum().item() > 0 else 2
    return F.dropout(x * w * scale)


@pytest.mark.parametrize("op", [noisy, noisy_by_values])
def test_a_random_op_is_refused_and_draws_nothing(op):
    x, w, state = torch.randn(3, 1, 4), torch.randn(4), torch.get_rng_state()
    text = f"`{op.__name__}`: it draws random numbers; give it a rule of its own"
    with pytest.raises(UnsupportedError, match=re.escape(text)):
        generic_rule(op, (x, w), {}, {0: x}, frozenset({1}), torch.ones(3, 1, 4))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_size_that_addresses_the_batch():
    """``table.expand(B, -1, -1) * x`` written as one op of the user: on one sample it would still make B rows."""

    def op(x: Tensor, w: Tensor) -> Tensor:
        return w.expand(3, 4) * x

    x = torch.randn(3, 1, 4)
    text = (
        "on one sample its output has shape (3, 4), its output's gradient (1, 4): a size among its arguments addresses "
        "the batch axis; give it a rule of its own"
    )
    with pytest.raises(UnsupportedError, match=re.escape(text)):
        generic_rule(op, (x, torch.randn(4)), {}, {0: x}, frozenset({1}), torch.ones(3, 1, 4))


def test_gradients_that_do_not_match_the_outputs():
    x, w = torch.randn(3, 1, 4), torch.randn(4)
    grads = (torch.ones(3, 1, 4), torch.ones(3, 1, 4))
    with pytest.raises(UnsupportedError, match="it has 1 floating point outputs, but 2 gradients were given"):
        generic_rule(torch.pow, (x, w), {}, {0: x}, frozenset({1}), grads)


def test_out_of_memory_is_raised_as_it_is():
    x, w = torch.randn(3, 1, 4), torch.randn(4)
    error = torch.OutOfMemoryError("no memory")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        generic_rule(raises(error), (x, w), {}, {0: x}, frozenset({1}), torch.ones(3, 1, 4))
    assert raised.value is error
