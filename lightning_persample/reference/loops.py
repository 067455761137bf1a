"""Per-sample gradients as plain functions: by vmap, and by the loop that is the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.linalg import vector_norm

from lightning_persample.batch_axis.batch import batch_tensors, read_batch_size
from lightning_persample.capture.parameters import by_place, check_module, recurrent_layers_kept, trainable, unwrapped
from lightning_persample.errors import BatchSizeError, PerSampleError, UnsupportedError
from lightning_persample.gradients.precision import wide_dtype
from lightning_persample.options import check_option, is_none_or_int
from lightning_persample.reference.samples import described, gradients_of
from lightning_persample.rules import generators_kept
from lightning_persample.torch_internals import (
    BatchNormBase,
    NormBase,
    any_autocast_is_on,
    tree_flatten,
    tree_map,
    tree_unflatten,
)

_KEPT, _ONE_VALUE = "running_mean or running_var", "more than 1 value per channel"
_INSTEAD = "; what a sample contributes to the gradient of the batch is given by expanded_weights and engine='expanded'"


@contextmanager
def batch_statistics_explained(module: nn.Module) -> Iterator[None]:
    """Say what helps where a module that runs on single samples normalises with the statistics of the batch."""
    try:
        yield
    except RuntimeError as error:
        if _KEPT not in str(error):
            raise
        keeping = _parts(module, NormBase, lambda part: part.training and part.running_mean is not None)
        raise UnsupportedError(
            f"{_listed(keeping) or 'a batch normalisation'} normalises with the statistics of the batch and keeps them "
            "in buffers, which vmap over single samples cannot do; call eval() on it, or build it with "
            "track_running_stats=False, or use loop_per_sample_grads (in a callback engine='loop'): a sample is then "
            f"normalised without the others{_INSTEAD}"
        ) from error
    except ValueError as error:
        of_the_batch = _parts(module, BatchNormBase, lambda part: part.training or part.running_mean is None)
        if _ONE_VALUE not in str(error) or not of_the_batch:  # group normalisation may say the same
            raise
        raise UnsupportedError(
            f"{_listed(of_the_batch)} normalises with the statistics of the batch, but a sample alone has one value "
            "per channel, and track_running_stats=False does not help; let it normalise with running statistics "
            f"(track_running_stats=True and eval()), or replace it, for example by nn.LayerNorm{_INSTEAD}"
        ) from error


def _parts(module: nn.Module, kind: type[nn.Module], is_one: Callable[[Any], bool]) -> list[str]:
    return [name for name, part in module.named_modules() if isinstance(part, kind) and is_one(part)]


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" if name else "the module itself" for name in names)


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
    check_module(module)
    check_option("chunk_size", chunk_size, is_none_or_int(chunk_size, 1), "None or an int >= 1")
    check_option(
        "randomness", randomness, randomness in ("different", "same", "error"), "'different', 'same' or 'error'"
    )
    read_batch_size(batch, 0)
    leaves, spec = tree_flatten(_splittable(batch))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    module = unwrapped(module)
    parameters = {name: parameter.detach() for name, parameter in trainable(module).items()}
    buffers = dict(module.named_buffers())
    holder = _LossOf(module, loss_fn)

    def loss_of(parameters: dict[str, Tensor], *rows: Tensor) -> Tensor:
        one = list(leaves)
        for place, row in zip(places, rows, strict=True):
            one[place] = row.unsqueeze(0)
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        replaced = {f"module.{name}": tensor for name, tensor in by_place(module, parameters | copies).items()}
        loss = functional_call(holder, replaced, tree_unflatten(one, spec), tie_weights=False)
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            raise PerSampleError(
                f"loss_fn must give a scalar, a tensor without axes, but gave {described(loss)}; reduce it, for "
                "example with .sum()"
            )
        return loss

    with_grads = grad_and_value(loss_of) if parameters else lambda *args: ({}, loss_of(*args))
    over_samples = vmap(with_grads, in_dims=(None, *(0 for _ in places)), chunk_size=chunk_size, randomness=randomness)
    with torch.no_grad(), recurrent_layers_kept(module), batch_statistics_explained(module):
        rows = [leaves[place].detach() for place in places]
        last = [row[-1:].clone() for row in rows]
        grads, losses = over_samples(parameters, *rows)
        _check_last(over_samples, parameters, last, grads)
    return losses, grads


def _check_last(
    over_samples: Callable[..., Any], parameters: dict[str, Tensor], last: list[Tensor], grads: dict[str, Tensor]
) -> None:
    """The last sample is run alone, too: a batching rule of torch may be wrong (that of the backward of `cdist` is)."""
    with generators_kept(last[:1]) as drawn:
        alone, _ = over_samples(parameters, *last)
        if drawn():
            return  # other random numbers, another gradient
    norms = {name: vector_norm(grad.to(wide_dtype(grad))) for name, grad in alone.items()}
    total = vector_norm(torch.stack([*norms.values()])) if norms else 0.0
    differ = []
    for name, grad in alone.items():
        half = any_autocast_is_on() or torch.finfo(grad.dtype).eps > 1e-4
        bound = (0.1 if half else 1e-3) * (norms[name] + total)  # of a gradient that is zero but for rounding, too
        if vector_norm(grads[name][-1:].to(wide_dtype(grad)) - grad.to(wide_dtype(grad))) > bound:
            differ.append(name)
    if differ:
        raise UnsupportedError(
            f"torch.func gives another gradient of {_listed(differ)} for the last sample in the batch than for that "
            "sample alone: it runs an op of the model wrongly in batches; use loop_per_sample_grads (in a callback "
            "engine='loop')"
        )


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
    sample alone has one value per channel an `UnsupportedError`, as does activation checkpointing with
    use_reentrant=True.
    """
    batch_size = read_batch_size(_splittable(batch), 0)
    parameters = {name: p for name, p in unwrapped(module).named_parameters() if p.requires_grad}
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    devices = list({parameter.device for parameter in parameters.values() if parameter.device.type == "cuda"})
    losses: list[Tensor] = []
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for sample in range(batch_size):

        def cut(leaf: Any, own: slice = slice(sample, sample + 1)) -> Any:
            return leaf[own] if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf

        one = tree_map(cut, batch)
        with torch.random.fork_rng(devices=devices), torch.enable_grad(), batch_statistics_explained(module):
            loss = loss_fn(module, *one)
            grads = gradients_of(loss, parameters)
        losses.append(loss.detach())
        for name, parameter in parameters.items():
            rows[name].append(grads[name].detach() if name in grads else torch.zeros_like(parameter))
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
    return torch.stack(losses), {name: torch.stack(grads) for name, grads in rows.items()}


class _LossOf(nn.Module):
    """A loss function as a module that holds the module it is about."""

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module = module
        self._loss_fn = loss_fn

    def forward(self, *batch: Any) -> Tensor:
        return self._loss_fn(self.module, *batch)


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
