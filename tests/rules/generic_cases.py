"""Calls that only the generic rule answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tests.torch_release import OLDEST, RELEASE

B = 3


@dataclass(frozen=True)
class GenericCase:
    """A call of an op on the batch-first tensors of all samples.

    Attributes:
        id: name of the case.
        function: the op.
        args: positional arguments; a `Rows` stands for a tensor that depends on the sample.
        kwargs: keyword arguments, likewise.
        weights: leaves whose gradients are asked for.
        outputs: which of the op's tensor outputs have a gradient, None where the op has one output.
    """

    id: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    weights: frozenset[int]
    outputs: tuple[bool, ...] | None = None

    def leaves(self) -> tuple[list[Any], Any]:
        leaves, spec = tree_flatten((self.args, dict(self.kwargs)))
        return leaves, spec

    @property
    def batched(self) -> dict[int, Tensor]:
        return {leaf: value.tensor for leaf, value in enumerate(self.leaves()[0]) if isinstance(value, Rows)}

    def whole(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as the op saw them for the batch: here simply the batch-first tensors."""
        leaves, spec = self.leaves()
        return tree_unflatten([value.tensor if isinstance(value, Rows) else value for value in leaves], spec)

    def one_sample(self, sample: int) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Run the op on one sample by itself: its tensor outputs, and its weights as leaves of a graph."""
        leaves, spec = self.leaves()
        leaves = [value.tensor[sample] if isinstance(value, Rows) else value for value in leaves]
        weights = {leaf: leaves[leaf].detach().clone().requires_grad_() for leaf in self.weights}
        for leaf, weight in weights.items():
            leaves[leaf] = weight
        if self.in_place:
            leaves[0] = leaves[0].clone()
        args, kwargs = tree_unflatten(leaves, spec)
        output = self.function(*args, **kwargs)
        output = args[0] if output is None else output
        return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)], weights

    @property
    def in_place(self) -> bool:
        name = self.function.__name__
        return name in ("__imul__", "__setitem__") or (name.endswith("_") and not name.startswith("__"))


@dataclass(frozen=True)
class Rows:
    """A tensor (B, *per-sample shape) that depends on the sample."""

    tensor: Tensor


def rows(*shape: int) -> Rows:
    return Rows(torch.rand(B, *shape, dtype=torch.float64) + 0.5)


def weight(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) + 0.5


def gated(x: Tensor, *, parts: list[Tensor], power: float = 2.0) -> dict[str, Tensor]:
    """An op of the user with lists, keywords and a dictionary of outputs."""
    scale, shift = parts
    return {"left": (x * scale).sin(), "right": (x + shift) ** power}


def without_effect(x: Tensor, w: Tensor) -> Tensor:
    """An op whose output does not depend on the weight."""
    return x * w.detach()


def _case(name: str, function: Any, *args: Any, at: tuple[int, ...], outputs: Any = None, **kwargs: Any) -> GenericCase:
    return GenericCase(name, function, args, kwargs, frozenset(at), outputs)


def generic_cases() -> Iterator[GenericCase]:
    yield _case("einsum", torch.einsum, "ntd,dp->ntp", rows(1, 5, 4), weight(4, 3), at=(2,))
    yield _case("addmm", torch.addmm, weight(3), rows(2, 4), weight(4, 3), at=(0, 2), beta=0.5, alpha=2.0)
    yield _case("prelu", F.prelu, Rows(torch.randn(B, 1, 4, 3, dtype=torch.float64)), weight(4), at=(1,))
    yield _case("bilinear", F.bilinear, rows(2, 3), rows(2, 4), weight(5, 3, 4), weight(5), at=(2, 3))
    yield _case("pow", torch.pow, rows(2, 4), weight(4), at=(1,))
    yield _case("rpow", torch.Tensor.__rpow__, rows(2, 4), 2.5, at=(0,))
    yield _case("maximum", torch.maximum, rows(2, 4), weight(4), at=(1,))
    yield _case("where", torch.where, Rows(torch.rand(B, 2, 4) > 0.5), rows(2, 4), weight(4), at=(2,))
    yield _case("cat", torch.cat, [rows(1, 2, 4), weight(1, 1, 4)], at=(1,), dim=1)
    yield _case("stack_of_two_weights", torch.stack, [weight(1, 4), rows(1, 4), weight(1, 4)], at=(0, 2))
    yield _case("matmul_weight_left", torch.matmul, weight(3, 4), rows(1, 4, 2), at=(0,))
    yield _case("bmm", torch.bmm, rows(2, 3, 4), weight(2, 4, 5), at=(1,))
    yield _case("cosine_similarity", F.cosine_similarity, rows(1, 4), weight(1, 4), at=(1,))
    yield _case("scaled_dot_product_attention", F.scaled_dot_product_attention, rows(1, 2, 5, 4), weight(1, 2, 6, 4),
                weight(1, 2, 6, 4), at=(1, 2))  # fmt: skip
    for groups in (1, 2):
        yield _case(f"conv_transpose2d-{groups}", torch.conv_transpose2d, rows(1, 4, 5, 4), weight(4, 2, 3, 2),
                    weight(2 * groups), at=(1, 2), stride=2, padding=1, output_padding=1, groups=groups,
                    dilation=2)  # fmt: skip
    yield _case("weight_with_rows", torch.pow, rows(2, 4), rows(2, 4), at=(1,))
    yield from _arithmetic()
    yield _case("both_with_rows", torch.atan2, rows(2, 4), rows(2, 4), at=(0, 1))
    yield _case("weight_without_effect", without_effect, rows(2, 4), weight(4), at=(1,))

    yield _case(
        "max_values", lambda x, w: torch.max(x * w, dim=-1), rows(2, 4), weight(4), at=(1,), outputs=(True, False)
    )
    if RELEASE > OLDEST:  # (before, it has no derivative)
        yield _case(
            "aminmax", lambda x, w: torch.aminmax(x * w, dim=-1), rows(2, 4), weight(4), at=(1,), outputs=(True, True)
        )
    lstm = (rows(1, 4), (rows(1, 3), rows(1, 3)), weight(12, 4), weight(12, 3), weight(12), weight(12))
    yield _case("lstm_cell", torch.lstm_cell, *lstm, at=(3, 4, 5, 6), outputs=(True, True))
    yield _case("lstm_cell-one_gradient", torch.lstm_cell, *lstm, at=(3, 4, 5, 6), outputs=(False, True))
    yield _case(
        "user_op", gated, rows(2, 4), parts=[weight(4), weight(2, 1)], at=(1, 2), power=3.0, outputs=(True, True)
    )
    yield _case(
        "user_op-one_gradient", gated, rows(2, 4), parts=[weight(4), weight(4)], at=(1, 2), outputs=(False, True)
    )

    yield _case("mul_", torch.Tensor.mul_, rows(2, 4), weight(4), at=(1,))
    yield _case("imul", torch.Tensor.__imul__, rows(2, 4), weight(4), at=(1,))
    yield _case("pow_", torch.Tensor.pow_, rows(2, 4), weight(4), at=(1,))
    yield _case("addcmul_", torch.Tensor.addcmul_, rows(2, 4), rows(2, 4), weight(4), at=(2,), value=0.5)
    yield _case("addcmul_-target_without_rows", torch.Tensor.addcmul_, weight(2, 4), rows(2, 4), weight(4), at=(2,))
    yield _case("addcmul_-target_is_the_weight", torch.Tensor.addcmul_, weight(2, 4), rows(2, 4), weight(4), at=(0, 2))
    yield _case("copy_", torch.Tensor.copy_, rows(2, 4), weight(4), at=(1,))
    yield _case("lerp_", torch.Tensor.lerp_, rows(2, 4), weight(2, 4), rows(2, 4), at=(1,))
    yield _case("setitem", torch.Tensor.__setitem__, rows(2, 5, 4), (slice(None), 0), weight(4), at=(3,))
    yield _case("setitem-target_without_rows", torch.Tensor.__setitem__, weight(2, 5, 4), (slice(None), 0), rows(2, 4),
                at=(0,))  # fmt: skip


def _arithmetic() -> Iterator[GenericCase]:
    """Weights with rows of their own for each sample, and others beside them."""
    add, sub, mul = torch.Tensor.add, torch.Tensor.sub, torch.Tensor.mul
    for function in (add, sub, torch.rsub, mul):
        name = f"rows-{function.__name__}"
        yield _case(f"{name}-right", function, rows(2, 4), rows(2, 4), at=(1,))
        yield _case(f"{name}-left", function, rows(2, 4), rows(2, 4), at=(0,))
        yield _case(f"{name}-broadcast", function, rows(5, 2, 4), rows(2, 1), at=(1,))
        yield _case(f"{name}-of_more_axes", function, rows(4), rows(2, 1, 4), at=(1,))
        yield _case(f"{name}-one_row", function, rows(2, 1), rows(1), at=(0,))
        yield _case(f"{name}-beside_shared", function, rows(1, 4), weight(5, 1), at=(0,))
        yield _case(f"{name}-both", function, rows(1, 4), weight(5, 1), at=(0, 1))
        yield _case(f"{name}-both_with_rows", function, rows(1, 4), rows(5, 1), at=(0, 1))
    for function in (add, sub, torch.rsub):
        yield _case(f"rows-{function.__name__}-alpha", function, rows(2, 4), rows(4), at=(1,), alpha=-0.7)
        yield _case(f"rows-{function.__name__}-alpha-both", function, rows(2, 4), rows(4), at=(0, 1), alpha=2)
    complex_rows = Rows(torch.randn(B, 2, 4, dtype=torch.complex128))
    for function in (add, sub, mul):
        yield _case(f"rows-{function.__name__}-complex", function, rows(2, 4), complex_rows, at=(1,))
        yield _case(f"rows-{function.__name__}-real_of_complex", function, rows(2, 1), complex_rows, at=(0,))
    yield _case("rows-add_", torch.Tensor.add_, rows(2, 4), rows(4), at=(1,), alpha=0.5)
    yield _case("rows-add_-target", torch.Tensor.add_, rows(2, 4), rows(4), at=(0,))
    yield _case("rows-mul_-both", torch.Tensor.mul_, rows(2, 4), rows(4), at=(0, 1))
    yield _case("rows-radd", torch.Tensor.__radd__, rows(2, 4), 1.5, at=(0,))
    yield _case("rows-rsub_number", torch.Tensor.__rsub__, rows(2, 4), 1.5, at=(0,))
    yield _case("rows-mul_number", mul, rows(2, 4), -1.5, at=(0,))
