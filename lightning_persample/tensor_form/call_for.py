"""Per-sample gradients of one call of a module, left on its parameters by the loss's backward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence

from lightning_persample.batch_axis.axis import BatchAxis, picked
from lightning_persample.batch_axis.batch import batch_tensors, packed_owners
from lightning_persample.capture.annotations import CONSTANT, Mark
from lightning_persample.capture.dispatch import Dispatcher
from lightning_persample.capture.graph import REENTRANT, node_below
from lightning_persample.capture.parameters import by_place, check_module, recurrent_layers_kept, trainable
from lightning_persample.capture.plan import refuse_where_used
from lightning_persample.capture.weight import Weight
from lightning_persample.errors import BatchSizeError, PerSampleError, UnsupportedError
from lightning_persample.tensor_form.delivery import DeliveringDispatcher, stand_in
from lightning_persample.tensor_form.expanded_weight import ExpandedWeight, check_batch_size, check_loss_reduction
from lightning_persample.torch_internals import tree_leaves

# Arguments of torch's own layers that hold no samples, or hold them along an axis of their own, whatever the layout of
# the others: masks and initial states. The ops that read them know where the samples are.
_MASKS = ("attn_mask", "mask", "src_mask", "tgt_mask", "memory_mask")
_PADDING = ("key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask")
_OWN_LAYOUT: tuple[tuple[type[nn.Module], tuple[str, ...]], ...] = (
    (nn.RNNBase, ("hx",)),
    (nn.MultiheadAttention, _MASKS + _PADDING),
    (nn.TransformerEncoderLayer, _MASKS + _PADDING),
    (nn.TransformerDecoderLayer, _MASKS + _PADDING),
    (nn.TransformerEncoder, _MASKS + _PADDING),
    (nn.TransformerDecoder, _MASKS + _PADDING),
    (nn.Transformer, _MASKS + _PADDING),
)


@dataclass(frozen=True, eq=False)
class _Input:
    """A tensor among the arguments of a call."""

    path: str  # where it stands, for example ``args[0]['image']``
    tensor: Tensor  # for a packed sequence its data
    size: int | None  # how many samples it holds along the batch's axis; None where it has no such axis
    packed: PackedSequence | None = None  # that it is the data of

    def __str__(self) -> str:
        kind = "packed sequence of" if self.packed is not None else "shape"
        return f"{self.path}: {kind} {self.size if self.packed is not None else tuple(self.tensor.shape)}"


def _call_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], axis: int) -> list[_Input]:
    """The tensors among the arguments of a module's call, wherever they stand in tuples, mappings and dataclasses."""
    skipped = [path for path, _ in _of_own_layout(module, args, kwargs)]
    arguments = [(f"args[{position}]", argument) for position, argument in enumerate(args)]
    arguments += [(f"kwargs[{name!r}]", argument) for name, argument in kwargs.items()]
    found = [given for path, argument in arguments if path not in skipped for given in _inputs_in(argument, path, axis)]
    for given in found:
        if isinstance(given.tensor, ExpandedWeight):
            raise PerSampleError(
                f"{given.path} is an ExpandedWeight; an input must be a plain tensor, and the module's own parameters "
                "are expanded here"
            )
    return found


def _shared_batch_size(inputs: list[_Input], axis: int) -> int:
    """The number of samples on which all inputs agree."""
    if not inputs:
        raise BatchSizeError(
            "there is no tensor among the arguments and keyword arguments to read the batch size from; pass the data "
            "as tensors, also in tuples, lists, mappings or dataclasses"
        )
    counted = [given for given in inputs if given.tensor.dim() > 0] or inputs
    listed = "; ".join(map(str, counted))
    if all(given.size is None for given in counted):
        raise BatchSizeError(f"no input has a batch dimension, which must be axis {axis}: {listed}")
    sizes = {given.size for given in counted}
    if len(sizes) > 1:
        raise BatchSizeError(
            f"the inputs do not agree on a batch size along axis {axis}: {listed}; pass batch_size to say how many "
            "samples there are, or batch_first to say whether they lie along the first axis or the second"
        )
    (size,) = {given.size or 0 for given in counted}
    if size == 0:
        raise BatchSizeError(f"the batch is empty, and 0 is not a batch size: {listed}")
    return size


def _mark_inputs(inputs: list[_Input], axis: int, batch_size: int, dispatcher: Dispatcher) -> None:
    """Declare to a dispatcher where the samples lie in the inputs."""
    # Inputs of another size than the batch's hold no samples; but if all are of another size, k * B rows are read as k
    # rows of each sample.
    whole = [given for given in inputs if given.size == batch_size]
    parts = [given for given in inputs if given.size and given.size % batch_size == 0]
    if not whole and not parts:
        listed = "; ".join(map(str, inputs)) or "there is no tensor among them"
        raise BatchSizeError(f"no input holds batch_size={batch_size} samples along axis {axis}: {listed}")
    for given in whole or parts:
        rows = (given.size or 0) // batch_size
        if given.packed is not None:
            dispatcher.mark_batch(given.tensor, picked(0, packed_owners(given.packed), batch_size))
        else:
            dispatcher.mark_batch(
                given.tensor, BatchAxis(axis, inner=rows) if axis == 0 else BatchAxis(axis, outer=rows)
            )


@contextmanager
def _layers_with_a_layout(module: nn.Module, inputs: list[_Input], dispatcher: Dispatcher) -> Iterator[None]:
    """While torch's own layers run, inputs in their `_OWN_LAYOUT` arguments are not the batch's rows."""
    # A mask (T, T) or a state (layers, B, d) may be as long as the batch by chance; elsewhere such an input stays
    # marked.
    marks, known = dispatcher.marks, {id(given.tensor) for given in inputs}
    before: list[list[tuple[Tensor, Mark | None]]] = []

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = tree_leaves([argument for _, argument in _of_own_layout(layer, args, kwargs)])
        before.append([(leaf, marks.get(leaf)) for leaf in leaves if id(leaf) in known])
        for tensor, _ in before[-1]:
            marks[tensor] = CONSTANT

    def leave(*_: Any) -> None:
        for tensor, mark in before.pop():
            marks[tensor] = mark or CONSTANT

    with ExitStack() as hooks:
        for layer in module.modules() if known else ():
            if isinstance(layer, tuple(kind for kind, _ in _OWN_LAYOUT)):
                hooks.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
                hooks.callback(layer.register_forward_hook(leave, always_call=True).remove)
        yield


def _of_own_layout(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The arguments of a layer's call that have a layout of their own, each with its place."""
    names = next((names for kind, names in _OWN_LAYOUT if isinstance(module, kind)), ())
    positions = zip(inspect.signature(module.forward).parameters, enumerate(args), strict=False) if names else ()
    found = [(f"args[{position}]", argument) for name, (position, argument) in positions if name in names]
    return found + [(f"kwargs[{name!r}]", argument) for name, argument in kwargs.items() if name in names]


def _inputs_in(argument: Any, path: str, axis: int) -> Iterator[_Input]:
    leaves = tree_leaves(argument, is_leaf=lambda leaf: isinstance(leaf, PackedSequence))
    packed = [leaf for leaf in leaves if isinstance(leaf, PackedSequence)]
    parts = {id(part) for sequence in packed for part in sequence if part is not None}
    for sequence in packed:
        yield _Input(path, sequence.data, int(sequence.batch_sizes[0]), sequence)
    for place, tensor in batch_tensors(argument, path):
        if id(tensor) not in parts:
            yield _Input(place, tensor, tensor.size(axis) if tensor.dim() > axis else None)


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
        inputs = _call_inputs(module, args, kwargs, axis)
        size = _shared_batch_size(inputs, axis) if batch_size is None else batch_size
        originals = trainable(module)
        leaves = {name: stand_in(parameter) for name, parameter in originals.items()}
        dispatcher = DeliveringDispatcher(leaves, size, module.buffers())
        dispatcher.add_targets(originals, leaves, size if loss_reduction == "mean" else 1)
        _mark_inputs(inputs, axis, size, dispatcher)
        with recurrent_layers_kept(module), _layers_with_a_layout(module, inputs, dispatcher):
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
