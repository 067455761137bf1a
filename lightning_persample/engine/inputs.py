"""The inputs of a module's call: which of its tensors hold the samples, and how many there are."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from lightning_persample.engine.batch import batch_tensors, packed_owners
from lightning_persample.engine.batch_axis import BatchAxis, picked
from lightning_persample.engine.dispatch import Dispatcher
from lightning_persample.engine.expanded_weight import ExpandedWeight
from lightning_persample.engine.marks import CONSTANT, Mark
from lightning_persample.errors import BatchSizeError, PerSampleError

__all__ = ["Input", "call_inputs", "layers_with_a_layout", "mark_inputs", "shared_batch_size"]

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
class Input:
    """A tensor among the arguments of a call.

    Attributes:
        path: where it stands, for example ``args[0]['image']``.
        tensor: the tensor; for a packed sequence its data.
        size: how many samples it holds along the batch's axis; None where it has no such axis.
        packed: the packed sequence that it is the data of.
    """

    path: str
    tensor: Tensor
    size: int | None
    packed: PackedSequence | None = None

    def __str__(self) -> str:
        kind = "packed sequence of" if self.packed is not None else "shape"
        return f"{self.path}: {kind} {self.size if self.packed is not None else tuple(self.tensor.shape)}"


def call_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], axis: int) -> list[Input]:
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


def shared_batch_size(inputs: list[Input], axis: int) -> int:
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


def mark_inputs(inputs: list[Input], axis: int, batch_size: int, dispatcher: Dispatcher) -> None:
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
def layers_with_a_layout(module: nn.Module, inputs: list[Input], dispatcher: Dispatcher) -> Iterator[None]:
    """While torch's own layers inside the module run, inputs in their `_OWN_LAYOUT` arguments are not the batch's rows.

    A mask (T, T) or a state (layers, B, d) may be as long as the batch by chance; elsewhere such an input stays marked.
    """
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


def _inputs_in(argument: Any, path: str, axis: int) -> Iterator[Input]:
    leaves = tree_leaves(argument, is_leaf=lambda leaf: isinstance(leaf, PackedSequence))
    packed = [leaf for leaf in leaves if isinstance(leaf, PackedSequence)]
    parts = {id(part) for sequence in packed for part in sequence if part is not None}
    for sequence in packed:
        yield Input(path, sequence.data, int(sequence.batch_sizes[0]), sequence)
    for place, tensor in batch_tensors(argument, path):
        if id(tensor) not in parts:
            yield Input(place, tensor, tensor.size(axis) if tensor.dim() > axis else None)
