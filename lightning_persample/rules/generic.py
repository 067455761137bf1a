"""The rule for an op that has no rule of its own: differentiate the op itself, one sample at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_persample.errors import UnsupportedError
from lightning_persample.rules.elementwise import widen
from lightning_persample.rules.generators import generators_kept, other_generators_kept
from lightning_persample.rules.registry import canonical_op, op_name
from lightning_persample.rules.vector_jacobian import vector_jacobian
from lightning_persample.torch_internals import tree_flatten, tree_leaves, tree_unflatten

_RANDOM = "it draws random numbers"

_IN_PLACE_OPERATORS = frozenset({
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ifloordiv__", "__imod__",
    "__ipow__",
})  # fmt: skip


def generic_rule(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    batched: Mapping[int, Tensor],
    weights: frozenset[int],
    grad_output: Tensor | Sequence[Tensor | None],
    *,
    chunk_size: int | None = None,
    description: object = None,
) -> dict[int, Tensor]:
    """Per-sample gradients of any op by `vmap` over its vector-Jacobian product, (B, *shape of the weight) by leaf."""
    # Sample i's gradient is what calling ``function`` on the i-th entry of every batched leaf gives. The op is run
    # again, on copies where it works in place, so nothing of the caller is modified; float16 and bfloat16 leaves are
    # computed in float32. An op that torch cannot run batched is run on one sample after another. An op that mixes
    # samples, or whose plain arguments (an index, an axis, a size) address the batch axis, means something else on one
    # sample: the caller must not bring it here. Leaves are numbered in the order of ``tree_leaves((args, kwargs))``,
    # counting every leaf, tensor or not. Those that depend on the sample are `batched`, (B, *the shape that the op sees
    # for one sample); one that is also in `weights` has rows of its own for each sample. Of several outputs
    # `grad_output` has one entry per floating point output in order, or one per tensor output; None for an output
    # without a gradient. An error calls the op by `description`.
    call = _Call(function, args, kwargs, batched, weights, description)
    grads = [grad_output] if isinstance(grad_output, Tensor) else list(grad_output)
    present = [widen(grad) for grad in grads if grad is not None]
    if call.has_out:
        raise UnsupportedError(call.complaint("it writes to the argument `out`: call it without one"))
    batch_size = next(iter([*batched.values(), *present])).shape[0] if batched or present else 0
    if not present or batch_size == 0:
        return {leaf: call.zeros(leaf, batch_size) for leaf in weights}
    wanted = [grad is not None for grad in grads]
    sample_leaves = call.sample_leaves(batch_size)

    def one_sample(values: dict[int, Tensor], cotangents: list[Tensor]) -> dict[int, Tensor]:
        asked = [values.get(leaf, call.start[leaf]) for leaf in weights]

        def outputs(*asked: Tensor) -> list[Tensor]:
            return call.outputs({**values, **dict(zip(weights, asked, strict=True))}, wanted)

        found, pull_back = vector_jacobian(outputs, asked)
        matched = []
        for output, cotangent in zip(found, cotangents, strict=True):
            if output.shape != cotangent.shape:
                raise UnsupportedError(
                    call.complaint(
                        f"on one sample its output has shape {tuple(output.shape)}, its output's gradient "
                        f"{tuple(cotangent.shape)}: a size among its arguments addresses the batch axis"
                    )
                )
            matched.append(cotangent.to(output.dtype))
        return dict(zip(weights, pull_back(matched), strict=True))

    try:
        with torch.no_grad(), other_generators_kept() as drawn, warnings.catch_warnings():
            # An op that torch cannot batch runs sample by sample, and the values are right all the same.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            per_sample = torch.vmap(one_sample, randomness="error", chunk_size=chunk_size)
            result: dict[int, Tensor] = per_sample(sample_leaves, present)
            is_random = drawn()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever an op of the user's raises; sample by sample it may run
        if "random operation" in str(error):
            raise UnsupportedError(call.complaint(_RANDOM)) from error
        return _one_after_another(call, one_sample, sample_leaves, present)
    if is_random:
        raise UnsupportedError(call.complaint(_RANDOM))
    return result


def _one_after_another(
    call: _Call,
    one_sample: Callable[[dict[int, Tensor], list[Tensor]], dict[int, Tensor]],
    sample_leaves: Mapping[int, Tensor],
    cotangents: Sequence[Tensor],
) -> dict[int, Tensor]:
    """The slow way, for an op that torch cannot run on samples in a batch (a mask decides its sizes)."""
    found = []
    with torch.no_grad(), generators_kept(cotangents[:1]) as drawn:
        for sample in range(len(cotangents[0])):
            values = {leaf: value[sample] for leaf, value in sample_leaves.items()}
            try:
                found.append(one_sample(values, [cotangent[sample] for cotangent in cotangents]))
            except (UnsupportedError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # whatever an op of the user's raises, which the reason names
                reason = f"running it on one sample alone raised {type(error).__name__}"
                raise UnsupportedError(call.complaint(reason)) from error
        if drawn():
            raise UnsupportedError(call.complaint(_RANDOM))
    return {leaf: torch.stack([gradients[leaf] for gradients in found]) for leaf in found[0]}


class _Call:
    """One call of an op, taken apart into leaves so that it can be repeated on one sample."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        batched: Mapping[int, Tensor],
        weights: frozenset[int],
        description: object,
    ) -> None:
        self.function = function
        self._description = description or f"`{op_name(canonical_op(function))}`"
        self.has_out = kwargs.get("out") is not None
        leaves, self.spec = tree_flatten((args, dict(kwargs)))
        self.start = [widen(leaf.detach()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.batched = {leaf: widen(value.detach()) for leaf, value in batched.items()}
        # The target of an in-place op is the first leaf.
        self.in_place = _is_in_place(function) and (0 in batched or isinstance(self.start[0], Tensor))

    def sample_leaves(self, batch_size: int) -> dict[int, Tensor]:
        """The leaves that `vmap` slices: the batched ones, and the target of an in-place op, which becomes so."""
        if self.in_place and 0 not in self.batched:
            target: Tensor = self.start[0]
            return {**self.batched, 0: target.expand(batch_size, *target.shape)}
        return dict(self.batched)

    def zeros(self, leaf: int, batch_size: int) -> Tensor:
        """The gradient of a weight that no output with a gradient depends on."""
        weight: Tensor = self.batched.get(leaf, self.start[leaf])
        shape = weight.shape[1:] if leaf in self.batched else weight.shape
        return weight.new_zeros((batch_size, *shape))

    def outputs(self, values: Mapping[int, Tensor], wanted: Sequence[bool]) -> list[Tensor]:
        """Run the op on one sample and return those of its outputs that have a gradient."""
        leaves = [values.get(leaf, value) for leaf, value in enumerate(self.start)]
        if self.in_place:
            leaves[0] = leaves[0].clone()
        args, kwargs = tree_unflatten(leaves, self.spec)
        result = self.function(*args, **kwargs)
        if self.in_place and result is None:
            result = leaves[0]
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if len(tensors) != len(wanted):
            tensors = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
        if len(tensors) != len(wanted):
            raise UnsupportedError(
                self.complaint(f"it has {len(tensors)} floating point outputs, but {len(wanted)} gradients were given")
            )
        return [tensor for tensor, asked in zip(tensors, wanted, strict=True) if asked]

    def complaint(self, reason: str) -> str:
        """The text of an error: the call, why, and what to do."""
        return f"{self._description}: {reason}; give it a rule of its own with lightning_persample.register_rule"


def _is_in_place(function: Callable[..., Any]) -> bool:
    """Does the op write to its first argument: ``mul_``, ``__imul__``, ``__setitem__``?"""
    name = getattr(function, "__name__", "")
    if name.startswith("__") and name.endswith("__"):
        return name in _IN_PLACE_OPERATORS
    return name.endswith("_")
