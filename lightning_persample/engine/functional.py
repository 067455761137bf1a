"""Per-sample gradients as plain functions: for one call of a module, by vmap, and by the loop that is the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_persample.engine.attach import refuse_where_used
from lightning_persample.engine.batch import batch_tensors, read_batch_size
from lightning_persample.engine.batch_statistics import batch_statistics_explained
from lightning_persample.engine.delivery import DeliveringDispatcher, stand_in
from lightning_persample.engine.expanded_weight import check_batch_size, check_loss_reduction
from lightning_persample.engine.graph import REENTRANT, node_below
from lightning_persample.engine.inputs import call_inputs, layers_with_a_layout, mark_inputs, shared_batch_size
from lightning_persample.engine.members import unwrapped
from lightning_persample.engine.weight import Weight
from lightning_persample.errors import BatchSizeError, PerSampleError, UnsupportedError
from lightning_persample.options import check_option, is_none_or_int

__all__ = ["call_for_per_sample_grads", "loop_per_sample_grads", "vmap_per_sample_grads"]


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
    _check_module(module)
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
        originals = _trainable(module)
        leaves = {name: stand_in(parameter) for name, parameter in originals.items()}
        dispatcher = DeliveringDispatcher(leaves, size, module.buffers())
        dispatcher.add_targets(originals, leaves, size if loss_reduction == "mean" else 1)
        mark_inputs(inputs, axis, size, dispatcher)
        with _recurrent_layers_kept(module), layers_with_a_layout(module, inputs, dispatcher):
            call = functools.partial(functional_call, tie_weights=False)
            outputs = dispatcher.observe(call, (module, _by_place(module, leaves), args, kwargs), {})
        _look_through(outputs, dispatcher)
        dispatcher.end_forward()
        return outputs

    return forward


def vmap_per_sample_grads(
    module: nn.Module,
    loss_fn: Callable[..., Tensor],
    *batch: Any,
    chunk_size: int | None = None,
    randomness: Literal["different", "same", "error"] = "different",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Each sample's loss and gradient by `torch.func`: `torch.func.vmap` over the gradient of one sample's loss.

    ``g_i = d loss_fn(module, *batch[i:i+1]) / d theta``, as `loop_per_sample_grads` gives it, in one pass over all
    samples. Module, ``.grad`` and buffers are unchanged afterwards. Random numbers (dropout) are drawn from torch's
    generator; the masks are others than those of a training forward.

    >>> import torch
    >>> from torch import nn
    >>> model, x, y = nn.Linear(3, 2), torch.randn(4, 3), torch.randn(4, 2)
    >>> losses, grads = vmap_per_sample_grads(model, lambda m, x, y: nn.functional.mse_loss(m(x), y), x, y)
    >>> losses.shape, grads["weight"].shape
    (torch.Size([4]), torch.Size([4, 2, 3]))

    Args:
        module: the module whose trainable parameters count.
        loss_fn: ``loss_fn(module, *batch)`` gives the loss of a batch, a tensor without axes. It is called with batches
            of one sample, and with this module, whose parameters are replaced during the call.
        *batch: tensors (or nested tuples, lists and dicts of tensors) with the samples along the first axis.
        chunk_size: how many samples to compute at once, all by default; memory grows with it.
        randomness: whether samples draw "different" random numbers, all the "same", or drawing is an "error".

    Returns:
        The losses (B,), and by name the gradients (B, *parameter.shape); zeros for a parameter that a sample's loss
        does not depend on.

    An option with a value that is not allowed gives an `OptionError`. What torch.func cannot follow gives an
    `UnsupportedError` where the reason is known (batch normalisation that keeps statistics of the batch), tensors that
    do not agree on a batch size a `BatchSizeError`.
    """
    _check_module(module)
    check_option("chunk_size", chunk_size, is_none_or_int(chunk_size, 1), "None or an int >= 1")
    check_option(
        "randomness", randomness, randomness in ("different", "same", "error"), "'different', 'same' or 'error'"
    )
    read_batch_size(batch, 0)
    leaves, spec = tree_flatten(_splittable(batch))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    module = unwrapped(module)
    parameters = {name: parameter.detach() for name, parameter in _trainable(module).items()}
    buffers = dict(module.named_buffers())
    holder = _LossOf(module, loss_fn)

    def loss_of(parameters: dict[str, Tensor], *rows: Tensor) -> Tensor:
        one = list(leaves)
        for place, row in zip(places, rows, strict=True):
            one[place] = row.unsqueeze(0)
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        replaced = {f"module.{name}": tensor for name, tensor in _by_place(module, parameters | copies).items()}
        loss = functional_call(holder, replaced, tree_unflatten(one, spec), tie_weights=False)
        _check_loss(loss)
        return loss

    with_grads = grad_and_value(loss_of) if parameters else lambda *args: ({}, loss_of(*args))
    over_samples = vmap(with_grads, in_dims=(None, *(0 for _ in places)), chunk_size=chunk_size, randomness=randomness)
    with torch.no_grad(), _recurrent_layers_kept(module), batch_statistics_explained(module):
        grads, losses = over_samples(parameters, *(leaves[place].detach() for place in places))
    return losses, grads


def loop_per_sample_grads(
    module: nn.Module, loss_fn: Callable[..., Tensor], *batch: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Each sample's loss and gradient by running forward and backward on one sample at a time.

    Slow and simple on purpose: ``g_i = d loss_fn(module, *batch[i:i+1]) / d theta``. Neither ``.grad`` nor buffers are
    changed; every sample sees the buffers and the random numbers that the first one saw.

    Args:
        module: the module whose trainable parameters count.
        loss_fn: ``loss_fn(module, *batch)`` gives the loss of a batch; called with batches of one sample.
        *batch: tensors (or nested tuples, lists and dicts of tensors) with the samples along the first axis.

    Returns:
        The losses (B,), and by name the gradients (B, *parameter.shape); zeros for a parameter that a sample's loss
        does not depend on.
    Tensors that do not agree on a batch size give a `BatchSizeError`, and batch normalisation in training of which a
    sample alone has one value per channel an `UnsupportedError`.
    """
    batch_size = read_batch_size(_splittable(batch), 0)
    parameters = {name: p for name, p in unwrapped(module).named_parameters() if p.requires_grad}
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    losses: list[Tensor] = []
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}

    def restore_buffers() -> None:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])

    for sample in range(batch_size):
        one = tree_map(lambda leaf: _sample(leaf, sample), batch)  # noqa: B023  (called at once)
        devices = _devices(parameters)
        with torch.random.fork_rng(devices=devices), torch.enable_grad(), batch_statistics_explained(module):
            loss = loss_fn(module, *one)
            grads: tuple[Tensor | None, ...] = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        losses.append(loss.detach())
        for (name, parameter), grad in zip(parameters.items(), grads, strict=True):
            rows[name].append(torch.zeros_like(parameter) if grad is None else grad.to_dense().detach())
        restore_buffers()
    return torch.stack(losses), {name: torch.stack(grads) for name, grads in rows.items()}


class _LossOf(nn.Module):
    """A loss function as a module that holds the module it is about."""

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module = module
        self._loss_fn = loss_fn

    def forward(self, *batch: Any) -> Tensor:
        return self._loss_fn(self.module, *batch)


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise PerSampleError(f"module must be a torch.nn.Module; got {type(module).__name__}")


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.dim() > 0:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise PerSampleError(
            f"loss_fn must give a scalar, a tensor without axes, but gave {found}; reduce it, for example with .sum()"
        )


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    lazy = [name for name, p in module.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise UnsupportedError(f"parameter `{lazy[0]}` is not initialized yet; run one batch through the module first")
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _by_place(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name, for every place that holds what they replace, once each."""
    # A layer that is held twice has one place and two names: of those, `functional_call` would put back one alone.
    named: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    replacing = {id(named[name]): tensor for name, tensor in tensors.items()}
    return {
        f"{path}.{name}" if path else name: replacing[id(held)]
        for path, part in module.named_modules()
        for name, held in (part._parameters | part._buffers).items()
        if id(held) in replacing
    }


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


def _splittable(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """The batch, if all its tensors stand in containers that can be rebuilt with other tensors."""
    for leaf in tree_flatten(batch)[0]:
        hidden = None if isinstance(leaf, Tensor) else next(batch_tensors(leaf), None)
        if hidden is not None:
            raise BatchSizeError(
                f"a {type(leaf).__name__} in the batch holds tensors, but cannot be split into samples; pass tensors, "
                "tuples, lists and dicts"
            )
    return batch


@contextmanager
def _recurrent_layers_kept(module: nn.Module) -> Iterator[None]:
    """Recurrent layers hold their weights a second time, where `functional_call` leaves what it had put in place."""
    names = ("_flat_weights", "_flat_weight_refs")
    layers = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    kept = [{name: vars(layer)[name] for name in names if name in vars(layer)} for layer in layers]
    try:
        yield
    finally:
        for layer, values in zip(layers, kept, strict=True):
            vars(layer).update(values)


def _sample(leaf: Any, sample: int) -> Any:
    return leaf[sample : sample + 1] if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf


def _devices(parameters: dict[str, nn.Parameter]) -> list[torch.device]:
    return list({parameter.device for parameter in parameters.values() if parameter.device.type == "cuda"})
