"""The tensor form of an expanded weight: a tensor to use in place of a weight, one torch call at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import attrgetter
from typing import Any, Literal, TypeAlias

import torch.nn.functional as F
from torch import Tensor

from lightning_persample.batch_axis.axis import BatchAxis
from lightning_persample.batch_axis.observed import tensors_in
from lightning_persample.capture.annotations import Constant
from lightning_persample.capture.observing import is_composite
from lightning_persample.capture.weight import Weight
from lightning_persample.errors import BatchSizeError, OptionError, PerSampleError, UnsupportedError
from lightning_persample.rules import find_rule
from lightning_persample.tensor_form.delivery import DeliveringDispatcher, Target, stand_in
from lightning_persample.torch_internals import make_subclass, tree_map_only, without_subclasses

_Function: TypeAlias = Callable[..., Any]

_PRODUCTS = frozenset({"matmul", "mm"})
_number = itertools.count(1)


class ExpandedWeight(Tensor):
    """A weight that behaves as if it had one copy per sample: after backward the weight itself has ``grad_sample``.

    With the loss ``L = sum_i w_i l_i`` row i of ``grad_sample``, shape (B, *weight.shape), is the contribution of
    sample i to ``dL / d weight``: ``dl_i / d weight`` for a loss that is the sum over samples; for a mean,
    ``loss_reduction="mean"`` multiplies by B. ``weight.grad`` is left as it is. A second backward adds to
    ``grad_sample``.

    In a call of a layer's function (`torch.nn.functional.linear` and the like) the input must have the batch along its
    first axis. In a call of any other op every tensor whose first axis has the size of the batch is taken to hold the
    samples. An op on expanded weights alone, ``weight.t()``, gives an expanded weight. All else about it, its data,
    dtype, sizes and text, is the original weight's; no memory is copied.

    >>> import torch
    >>> weight, x = torch.nn.Parameter(torch.randn(3, 2)), torch.randn(4, 2)
    >>> torch.nn.functional.linear(x, ExpandedWeight(weight, 4, "sum")).sum().backward()
    >>> weight.grad_sample.shape, weight.grad
    (torch.Size([4, 3, 2]), None)

    Args:
        orig_weight: the weight, a tensor that requires gradient.
        batch_size: number of samples B.
        loss_reduction: "sum" or "mean": how the loss combines the samples' own losses.
        batch_first: whether the samples lie along the first axis of the tensors it meets, or along the second.
    """

    orig_weight: Tensor
    batch_size: int
    loss_reduction: str
    batch_first: bool
    _leaf: Tensor
    _weight: Weight
    _lineage: tuple[Weight, ...]
    _targets: Mapping[str, Target]

    def __new__(
        cls,
        orig_weight: Tensor,
        batch_size: int,
        loss_reduction: Literal["sum", "mean"],
        *,
        batch_first: bool = True,
    ) -> ExpandedWeight:
        """Check the arguments and wrap the weight."""
        if not isinstance(orig_weight, Tensor):
            raise PerSampleError(f"only a tensor can be an expanded weight; got {type(orig_weight).__name__}")
        if isinstance(orig_weight, ExpandedWeight):
            raise PerSampleError("the weight is an ExpandedWeight already; give its orig_weight")
        if not orig_weight.requires_grad:
            raise PerSampleError(
                f"the weight of shape {tuple(orig_weight.shape)} requires no gradient, so it can have no grad_sample; "
                "use it as it is, or call requires_grad_() on it"
            )
        check_batch_size(batch_size)
        check_loss_reduction(loss_reduction)
        name = f"ExpandedWeight {next(_number)} of shape {tuple(orig_weight.shape)}"
        leaf = stand_in(orig_weight)
        dispatcher = DeliveringDispatcher({name: leaf}, batch_size)
        dispatcher.add_targets({name: orig_weight}, {name: leaf}, batch_size if loss_reduction == "mean" else 1)
        (weight,) = dispatcher.weights
        dispatcher.end_forward()
        return cls._wrapped(orig_weight, leaf, weight, dispatcher, batch_size, loss_reduction, batch_first)

    @classmethod
    def _wrapped(
        cls,
        original: Tensor,
        leaf: Tensor,
        weight: Weight,
        dispatcher: DeliveringDispatcher,
        batch_size: int,
        loss_reduction: str,
        batch_first: bool,
    ) -> ExpandedWeight:
        wrapped = make_subclass(cls, leaf.detach(), True)
        with without_subclasses():
            wrapped.register_hook(_refuse_gradient)
        wrapped.orig_weight, wrapped._leaf, wrapped._weight = original, leaf, weight
        wrapped.batch_size, wrapped.loss_reduction, wrapped.batch_first = batch_size, loss_reduction, batch_first
        wrapped._lineage, wrapped._targets = tuple(dispatcher.weights), dict(dispatcher.targets)
        return wrapped

    @classmethod
    def __torch_function__(
        cls,
        func: _Function,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a torch call on the leaves that stand in for the weights, and take note of it."""
        kwargs = dict(kwargs or {})
        weights = list(dict.fromkeys(t for t in tensors_in((args, kwargs)) if isinstance(t, ExpandedWeight)))
        first = weights[0]
        _check_agreement(weights)
        plain = [t for t in tensors_in((args, kwargs)) if not isinstance(t, ExpandedWeight)]
        inputs, axis = _inputs(func, args, kwargs, 0 if first.batch_first else 1)
        if inputs is not None:
            _check_input(func, inputs[0], first.batch_size, axis)
        dispatcher = DeliveringDispatcher({}, first.batch_size)
        for weight in weights:
            dispatcher.adopt(weight._leaf, weight._weight, weight._lineage, weight._targets)
        _declare(plain if inputs is None else [t for t in inputs if isinstance(t, Tensor)], axis, dispatcher)
        args, kwargs = tree_map_only(ExpandedWeight, lambda weight: weight._leaf, (args, kwargs))
        result = dispatcher.observe(func, args, kwargs)
        if any(isinstance(dispatcher.marks.get(tensor), Weight) for tensor in plain):
            raise UnsupportedError(
                f"`{func.__name__}` writes an ExpandedWeight into a plain tensor, whose further use is not seen; "
                "compute a new tensor instead, for example with torch.cat or torch.where"
            )
        given = {id(weight._leaf): weight for weight in weights}
        wrapped = tree_map_only(Tensor, lambda output: _wrap(output, given, dispatcher, first), result)
        dispatcher.end_forward()
        return wrapped

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return repr(self.orig_weight)


for _name in ("dtype", "shape", "device", "is_cuda", "data", "data_ptr", "get_device", "stride", "is_contiguous"):
    setattr(ExpandedWeight, _name, property(attrgetter(f"orig_weight.{_name}"), doc="Of the original weight."))


def check_batch_size(batch_size: object) -> None:
    """Refuse a batch size that is none."""
    if not isinstance(batch_size, int) or isinstance(batch_size, bool):
        raise OptionError(f"batch_size must be an integer; got {batch_size!r}, a {type(batch_size).__name__}")
    if batch_size < 1:
        raise OptionError(f"batch_size must be positive; got {batch_size}")


def check_loss_reduction(loss_reduction: object) -> None:
    """Refuse a loss reduction that is none."""
    if not isinstance(loss_reduction, str) or loss_reduction not in ("sum", "mean"):
        raise OptionError(f"loss_reduction must be 'sum' or 'mean'; got {loss_reduction!r}")


def _check_agreement(weights: list[ExpandedWeight]) -> None:
    for attribute in ("batch_size", "loss_reduction", "batch_first"):
        values = list(dict.fromkeys(getattr(weight, attribute) for weight in weights))
        if len(values) > 1:
            raise OptionError(
                f"expanded weights with {attribute}={values[0]!r} and {attribute}={values[1]!r} meet in one call; make "
                "all of them alike"
            )


def _inputs(
    function: _Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], axis: int
) -> tuple[list[Any] | None, int]:
    """The input of a layer's function, then what else may hold the batch, and the axis; None where any tensor may."""
    if function is F.multi_head_attention_forward:  # always time-major
        given = dict(zip(("query", "key", "value"), args, strict=False))
        return [(given | dict(kwargs)).get(name) for name in ("query", "key", "value")], 1
    rule = find_rule(function)
    if rule is None or rule.op in _PRODUCTS or rule.weights <= rule.batched:
        return None, axis
    if is_composite(function):  # the order of its arguments is not that of the op of its name
        return [args[0] if args else kwargs.get("input")], axis
    bound = rule.bind(args, kwargs)
    if bound is None:
        return None, axis
    if bound.get("batch_sizes") is not None:
        raise UnsupportedError(
            f"`{rule.op}`: an ExpandedWeight cannot tell whose the rows of a packed sequence are; use "
            "call_for_per_sample_grads on the module"
        )
    names = [name for name in rule.arguments if name in rule.batched - (rule.weights - {"input"}) and name in bound]
    if "batch_first" in bound:
        axis = 0 if bound["batch_first"] else 1
    return [bound[name] for name in names], axis


def _check_input(function: _Function, value: Any, batch_size: int, axis: int) -> None:
    name = f"`{getattr(function, '__name__', function)}`"
    if isinstance(value, ExpandedWeight):
        raise PerSampleError(f"{name}: its input is an ExpandedWeight; the input must be a tensor that holds the batch")
    if not isinstance(value, Tensor):
        raise PerSampleError(
            f"{name}: its first input must be a tensor to read the batch dimension from; got {type(value).__name__}"
        )
    shape = tuple(value.shape)
    if value.dim() <= axis:
        raise BatchSizeError(
            f"{name}: its input of shape {shape} has no batch dimension; the samples must lie along axis {axis}"
        )
    if value.size(axis) == 0:
        raise BatchSizeError(f"{name}: its input of shape {shape} is empty: 0 is not a batch size")
    if value.size(axis) != batch_size:
        raise BatchSizeError(
            f"{name}: its input of shape {shape} holds {value.size(axis)} samples along axis {axis}, but the expanded "
            f"weight was made for a batch size of {batch_size}"
        )


def _declare(tensors: Iterable[Tensor], axis: int, dispatcher: DeliveringDispatcher) -> None:
    """Every tensor with the size of the batch along the batch's axis holds the samples there; the others hold none."""
    for tensor in tensors:
        if tensor.dim() > axis and tensor.size(axis) == dispatcher.batch_size:
            dispatcher.mark_batch(tensor, BatchAxis(axis))
        elif tensor.numel() != 1:
            dispatcher.marks[tensor] = Constant(known=False)


def _wrap(
    output: Tensor, given: Mapping[int, ExpandedWeight], dispatcher: DeliveringDispatcher, like: ExpandedWeight
) -> Tensor:
    if id(output) in given:
        return given[id(output)]
    mark = dispatcher.marks.get(output)
    if not isinstance(mark, Weight) or not output.requires_grad:
        return output
    return ExpandedWeight._wrapped(
        output, output, mark, dispatcher, like.batch_size, like.loss_reduction, like.batch_first
    )


def _refuse_gradient(grad: Tensor) -> None:
    """Torch calls run on the leaf: a gradient of the wrapper itself came by another way."""
    raise UnsupportedError(
        "an ExpandedWeight was used by something that is not a torch call, such as a custom autograd function, so its "
        "grad_sample is not known; write that function with torch's own ops"
    )
