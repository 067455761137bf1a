"""Per-sample gradients of one call of a module, left on its parameters by the loss's backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

from torch import nn
from torch.func import functional_call

from lightning_persample.engine.attach import refuse_where_used
from lightning_persample.engine.batch import batch_tensors
from lightning_persample.engine.delivery import DeliveringDispatcher, stand_in
from lightning_persample.engine.expanded_weight import check_batch_size, check_loss_reduction
from lightning_persample.engine.graph import REENTRANT, node_below
from lightning_persample.engine.inputs import call_inputs, layers_with_a_layout, mark_inputs, shared_batch_size
from lightning_persample.engine.members import by_place, check_module, recurrent_layers_kept, trainable
from lightning_persample.engine.weight import Weight
from lightning_persample.errors import PerSampleError, UnsupportedError

__all__ = ["call_for_per_sample_grads"]


def call_for_per_sample_grads(
    module: nn.Module,
    *,
    batch_size: int | None = None,
    loss_reduction: Literal["sum", "mean"] = "sum",
    batch_first: bool = True,
) -> Callable[..., Any]:
    """The module's forward, after which ``loss.backward()`` leaves each sample's gradient in ``grad_sample``.

    The outputs are those of ``module(...)``, bit for bit. After backward every trainable parameter that took part has
    ``grad_sample``, shape (B, *parameter.shape), and its ``.grad`` is as before. With a loss ``L = sum_i w_i l_i`` row
    i is the contribution of sample i to ``dL / d parameter``: ``dl_i / d parameter`` for a loss that is the sum over
    samples; for a mean, ``loss_reduction="mean"`` multiplies by B.

    >>> import torch
    >>> from torch import nn
    >>> model, x = nn.Linear(3, 2), torch.randn(4, 3)
    >>> call_for_per_sample_grads(model)(x).square().sum().backward()
    >>> model.weight.grad_sample.shape, model.weight.grad
    (torch.Size([4, 2, 3]), None)

    The backward raises an `UnsupportedError` that names every parameter whose gradient cannot be split by sample; none
    gets ``grad_sample`` then. Where samples influence each other (batch normalisation in training), the contributions
    are right and a `PerSampleWarning` says so.

    Args:
        module: the module to call; its trainable parameters get the gradients.
        batch_size: number of samples B; by default the size on which all tensors among the inputs agree. Give it where
            some inputs hold no samples: beside an input of B rows, those of another size count as constants. Where no
            input has B rows, ``k * B`` rows are k neighbouring rows of each sample (along the second axis: every B-th
            row), and any other number is refused.
        loss_reduction: "sum" or "mean": how the loss combines the samples' own losses.
        batch_first: whether the samples lie along the first axis of the inputs, or along the second.

    Returns:
        A function of the module's inputs. It raises a `BatchSizeError` where the inputs do not tell the batch size, and
        a `PerSampleError` where a parameter has a ``grad_sample`` left over or an input is an `ExpandedWeight`.
    Arguments that are not allowed give a `PerSampleError` here.
    """
    check_module(module)
    if batch_size is not None:
        check_batch_size(batch_size)
    check_loss_reduction(loss_reduction)
    _refuse_left_over(module)
    axis = 0 if batch_first else 1

    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        _refuse_left_over(module)
        inputs = call_inputs(module, args, kwargs, axis)
        size = shared_batch_size(inputs, axis) if batch_size is None else batch_size
        originals = trainable(module)
        leaves = {name: stand_in(parameter) for name, parameter in originals.items()}
        dispatcher = DeliveringDispatcher(leaves, size, module.buffers())
        dispatcher.add_targets(originals, leaves, size if loss_reduction == "mean" else 1)
        mark_inputs(inputs, axis, size, dispatcher)
        with recurrent_layers_kept(module), layers_with_a_layout(module, inputs, dispatcher):
            call = functools.partial(functional_call, tie_weights=False)
            outputs = dispatcher.observe(call, (module, by_place(module, leaves), args, kwargs), {})
        _look_through(outputs, dispatcher)
        dispatcher.end_forward()
        return outputs

    return forward


def _refuse_left_over(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and getattr(parameter, "grad_sample", None) is not None:
            raise PerSampleError(
                f"parameter `{name}` has a grad_sample left over from an earlier backward, to which the next one would "
                "add, which is incorrect for multiple calls; delete it first: `del parameter.grad_sample`"
            )


def _look_through(outputs: Any, dispatcher: DeliveringDispatcher) -> None:
    """Find what the backward will not see to be wrong: gradients that reach weights by another way than a call."""
    tensors = [tensor for _, tensor in batch_tensors(outputs)]
    if node_below(tensors, REENTRANT):
        raise UnsupportedError(
            "the module uses activation checkpointing with use_reentrant=True, which runs the forward again with "
            "parameters that are not expanded; use checkpoint(..., use_reentrant=False)"
        )
    dispatcher.find_unseen(tensors)
    for tensor in tensors:
        mark = dispatcher.marks.get(tensor)
        if not isinstance(mark, Weight):
            continue
        if mark.derivation is None:
            dispatcher.exposed.add(mark)
        elif tensor.numel() > 1:  # a number is a penalty
            reason = (
                f"the module returns {mark.derivation.text}, made of weights alone; what the loss does with it is not "
                "seen; return what was computed with the inputs"
            )
            refuse_where_used([tensor], [mark], reason, dispatcher)
