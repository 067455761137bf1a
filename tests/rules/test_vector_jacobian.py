"""The vector-Jacobian product is that of torch.func, also of what torch.func does not know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_persample.rules import pull_each, vector_jacobian


class Product(torch.autograd.Function):
    """With a context that `forward` fills: torch.func refuses it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grad * y.conj(), grad * x.conj()


def outputs_with(product: Any) -> Any:
    def outputs(x: Tensor, y: Tensor, unused: Tensor) -> list[Tensor]:
        return [product(x, y), y.detach() * 2, x.sum()]

    return outputs


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("ambient", [torch.no_grad, torch.enable_grad])
def test_plain_autograd_gives_what_torch_func_gives(dtype: torch.dtype, ambient: Any) -> None:
    inputs = [torch.randn(3, dtype=dtype) for _ in range(3)]
    gradients = [torch.randn(3, dtype=dtype), torch.randn(3, dtype=dtype), torch.randn((), dtype=dtype)]
    known, pull_known = torch.func.vjp(outputs_with(torch.mul), *inputs)
    with ambient():
        found, pull = vector_jacobian(outputs_with(Product.apply), inputs)
        for _ in range(2):
            assert all(map(torch.allclose, pull(gradients), pull_known(gradients)))
    assert all(map(torch.equal, found, known))
    assert not any(output.requires_grad for output in found)
    assert not any(tensor.requires_grad for tensor in inputs)


def test_outputs_that_depend_on_no_input_give_zeros() -> None:
    x = torch.randn(3)
    _, pull = vector_jacobian(lambda x: [Product.apply(x, x).detach()], [x])
    assert torch.equal(pull([torch.ones(3)])[0], torch.zeros(3))


def test_errors_of_the_function_are_its_own() -> None:
    with pytest.raises(RuntimeError, match="size of tensor a"):
        vector_jacobian(lambda x: [x + torch.ones(2)], [torch.ones(3)])


POINTS, STRIDED = torch.randn(4, 3, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)
# Backwards that torch's batching rules compute wrongly where the gradient alone is batched, one that has no such rule,
# and one that is right.
BACKWARDS: dict[str, Any] = {
    "cdist": lambda x: torch.cdist(x, POINTS),
    "cdist-of-itself": lambda x: torch.cdist(x, x, p=1),
    "as-strided-scatter": lambda x: torch.as_strided_scatter(x, STRIDED, (2, 2), (2, 1), 1),
    "pdist": torch.pdist,
    "exp": torch.exp,
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_each_gradient_gives_what_it_gives_alone(name: str) -> None:
    x = torch.randn(5, 3, dtype=torch.float64)
    (value,), pull = vector_jacobian(lambda x: [BACKWARDS[name](x)], [x])
    gradients = torch.randn(6, *value.shape, dtype=torch.float64)
    expected = torch.stack([torch.autograd.functional.vjp(BACKWARDS[name], x, each)[1] for each in gradients])
    for kind in (None, ("a test", name), ("a test", name)):
        torch.testing.assert_close(pull_each(pull, gradients, kind)[0], expected)
