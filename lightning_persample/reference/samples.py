"""Cut a batch into batches of fewer samples, and read what a loss function or a training step returned."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode

from lightning_persample.batch_axis.axis import BatchAxis, Lost, row_owners
from lightning_persample.batch_axis.batch import (
    Layout,
    batch_tensors,
    declared_place,
    declared_places,
    is_batch_of_graphs,
    lay_out,
    mark_samples,
    with_kinds_of,
)
from lightning_persample.capture.graph import REENTRANT, node_below, nodes_below
from lightning_persample.errors import OptionError, PerSampleError, UnsupportedError, of_user
from lightning_persample.torch_internals import number_of_node

Weighting: TypeAlias = Literal["mean", "sum"] | Callable[[Any, Any], Tensor]

NOT_REENTRANT = (
    "gradients are taken with torch.autograd.grad here, so that no hook of the training runs, and activation "
    "checkpointing with use_reentrant=True gives none to it; use checkpoint(..., use_reentrant=False), or go without "
    "checkpointing"
)

_PLAIN = (str, bytes, int, float, complex, type, type(None))


class Samples:
    """A batch from which samples can be taken, as smaller batches; where they lie is read as a capture does."""

    # `like` is a batch with the kinds of lists and tuples that the parts are to have, None the batch itself;
    # `is_declared` says whether the user has declared the number of samples, see `lay_out`.

    def __init__(
        self,
        batch: Any,
        batch_size: int,
        batch_dim: int = 0,
        batch_layout: Layout | None = None,
        *,
        is_declared: bool = False,
        like: Any = None,
    ) -> None:
        self._batch, self._size, self._dim, self._like = batch, batch_size, batch_dim, like
        self.layout = lay_out(batch, batch_dim, batch_size, batch_layout, is_declared=is_declared)
        pairs = zip(self.layout.tensors, self.layout.places, strict=True)
        self._places = {id(tensor): place for (_, tensor), place in pairs}
        declared = declared_places(batch, batch_size, batch_layout).values()
        self._owners = {id(place[1]) for place in declared if place is not None}

    def take(self, start: int, stop: int) -> Any:
        """The samples from `start` to `stop`; tensors are copied, so that nothing done to them reaches the batch."""

        def items(item: Any) -> Any:
            if isinstance(item, PackedSequence):
                if int(item.batch_sizes[0]) != self._size:
                    return None
                padded, lengths = pad_packed_sequence(item, batch_first=True)
                rows, lengths = padded[start:stop], lengths[start:stop]
                return pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
            if is_batch_of_graphs(item):
                return type(item).from_data_list([item.get_example(sample) for sample in range(start, stop)])
            if not self._has_one_each(item):
                return None
            return _rebuilt(item[start:stop], lambda tensor: copied(tensor.detach().clone(), tensor))

        def copied(part: Tensor, tensor: Tensor) -> Tensor:
            return part.requires_grad_(tensor.requires_grad)

        part = _rebuilt(self._batch, lambda tensor: copied(self._rows(tensor, start, stop), tensor), items)
        return part if self._like is None else with_kinds_of(part, self._like)

    def are_ragged(self) -> bool:
        """Whether a sample is an item of a list, or any number of rows, so that samples cannot be stacked."""
        found: list[Any] = [each for each in self._places.values() if isinstance(each, BatchAxis) and each.owner]

        def note(item: Any) -> None:
            if isinstance(item, PackedSequence) or is_batch_of_graphs(item) or self._has_one_each(item):
                found.append(item)

        _rebuilt(self._batch, lambda tensor: tensor, note)
        return bool(found)

    def _rows(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """The rows of these samples; a tensor without rows of samples (class weights) is kept whole."""
        place, whole = self._places.get(id(tensor)), tensor.detach()
        if isinstance(place, Lost) and place.unplaced and not place.listed:  # k * B rows, which the step may declare
            place = declared_place("", tensor, self._dim, self._size)
        if not isinstance(place, BatchAxis):
            return whole.clone()
        if place.owner is None and (place.dim, place.outer) == (0, 1):
            own = whole[start * place.inner : stop * place.inner].clone()
        else:
            owner = row_owners(place, self._size, tensor.device)
            own = whole.index_select(place.dim, ((owner >= start) & (owner < stop)).nonzero().flatten())
        return own - start if id(tensor) in self._owners else own  # (which says by number whose the rows are)

    def _has_one_each(self, items: Sequence[Any]) -> bool:
        """Whether a list or tuple has one item for each sample."""
        if len(items) != self._size or isinstance(items, torch.Size):
            return False
        inside = [
            (self._places.get(id(tensor)), n) for n, item in enumerate(items) for _, tensor in batch_tensors(item)
        ]
        if inside:
            return all(isinstance(place, Lost) and place.alone == n for place, n in inside)
        has_lists = any(isinstance(item, (list, tuple)) and len(item) == self._size for item in items)
        return not has_lists and (isinstance(items, list) or all(isinstance(item, str) for item in items))


class Marked(TorchFunctionMode):
    """Notes what `mark_samples` declares in a step on a copy of a batch, of the tensors of the batch itself."""

    def __init__(self, batch: Any, copied: Any) -> None:
        super().__init__()
        copies, originals = tensors_of(copied), tensors_of(batch)
        alike = len(copies) == len(originals)  # (a packed sequence may be packed in another order)
        self._originals = {id(copy): each for copy, each in zip(copies, originals, strict=True)} if alike else {}
        self.layout: dict[Tensor, Any] = {}  # by tensor of the batch whose rows they are, as `batch_layout` says it
        self.made = False  # whether the step declares owners of rows in tensors that are none of the batch

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the call, and note what it declares."""
        if func is mark_samples:
            self._note(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _note(self, tensor: Tensor, batch_dim: int = 0, *, owner: Tensor | None = None) -> None:
        original = self._originals.get(id(tensor))
        self.made |= original is None and owner is not None
        if original is not None:
            self.layout[original] = batch_dim if owner is None else (batch_dim, owner.detach().clone())
        if owner is not None and id(owner) in self._originals:
            self.layout[self._originals[id(owner)]] = self._originals[id(owner)]


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in the order in which `with_tensors` puts others in their place."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _rebuilt(batch, note)
    return found


def with_tensors(batch: Any, tensors: Sequence[Tensor]) -> Any:
    """A batch of the same structure with other tensors."""
    following: Iterator[Tensor] = iter(tensors)
    return _rebuilt(batch, lambda _: next(following))


def loss_of(outputs: Any) -> Any:
    """The loss in what a training step returned: the tensor itself, or the entry "loss" of a mapping."""
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs


def described(value: object) -> str:
    """What a value is, in a message: a tensor of which shape, or its type."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def own_loss(outputs: Any, batch: Any, weighting: Weighting) -> Tensor:
    """A sample's own loss l from the loss w l of a batch that holds this sample alone."""
    loss = loss_of(outputs)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise PerSampleError(
            f"the loss of a batch is {described(loss)}, but must be a tensor with one entry, or the entry 'loss' of a "
            "mapping"
        )
    if callable(weighting):
        weight: Any = weighting(outputs, batch)
        if not isinstance(weight, Tensor) or weight.shape != (1,):
            returned = f"loss_reduction returned {described(weight)} for a batch of one sample"
            raise OptionError(f"{returned}; allowed is a tensor (1,)")
        loss = loss / weight.detach()
    return loss.reshape(())


def gradients_of(loss: Tensor, parameters: Mapping[str, Tensor], first: Tensor | None = None) -> dict[str, Tensor]:
    """The gradients of a loss by name, of those parameters that it depends on; each (*shape), dense."""
    # A graph that goes on below what was made before the tensor `first` is left to who made that.
    if not loss.requires_grad:
        return {}
    if node_below([loss], REENTRANT):  # torch refuses it only where a gradient goes through the checkpoint
        raise UnsupportedError(NOT_REENTRANT)
    differentiate = partial(torch.autograd.grad, loss, list(parameters.values()), allow_unused=True)
    grads: tuple[Tensor | None, ...]
    if first is None:
        grads = differentiate()
    else:
        grads = _beside_other_graphs(differentiate, loss, parameters, number_of_node(first.grad_fn))
    return {name: grad.to_dense() for name, grad in zip(parameters, grads, strict=True) if grad is not None}


def _beside_other_graphs(
    differentiate: Callable[..., Any], loss: Tensor, parameters: Mapping[str, Tensor], start: int
) -> Any:
    """What `differentiate` gives, which frees no node that was made before the one with this number."""
    earlier = [node for node in nodes_below([loss]) if number_of_node(node) < start]
    try:
        return of_user(differentiate, retain_graph=bool(earlier))
    except RuntimeError as error:
        if not earlier:
            raise
        leaves = {id(getattr(leaf, "variable", None)) for node in earlier for leaf, _ in node.next_functions}
        named = ", ".join(f"`{name}`" for name, parameter in parameters.items() if id(parameter) in leaves)
        raise UnsupportedError(
            f"the loss goes back into a graph that was made before, from {named or 'other tensors'} (a derived weight "
            "that the module keeps, say), and cannot go backward through it: compute that again in each forward pass, "
            f"or let val_loss drop it first. torch says: {next(iter(str(error).splitlines()), '')}"
        ) from error


def _rebuilt(
    batch: Any,
    on_tensor: Callable[[Tensor], Tensor],
    on_sequence: Callable[[Any], Any] = lambda _: None,
) -> Any:
    """A copy of a batch's containers with other tensors; `on_sequence` may replace a whole list or tuple."""
    memo: dict[int, Any] = {}

    def rebuild(item: Any) -> Any:
        if isinstance(item, Tensor):
            return on_tensor(item)
        if isinstance(item, _PLAIN):
            return item
        if id(item) not in memo:
            memo[id(item)] = item  # what holds itself is not followed round in a circle
            memo[id(item)] = rebuild_container(item)
        return memo[id(item)]

    def rebuild_container(item: Any) -> Any:
        if isinstance(item, (list, tuple)) or is_batch_of_graphs(item):
            replaced = on_sequence(item)
            if replaced is not None:
                return replaced
        if isinstance(item, (list, tuple)):
            return rebuild_sequence(item)
        if isinstance(item, Mapping):
            rebuilt: Any = copy.copy(item) if hasattr(item, "__setitem__") else dict(item)
            for key, value in item.items():
                rebuilt[key] = rebuild(value)
            return rebuilt
        if next(iter(batch_tensors(item)), None) is None:
            return item
        rebuilt = copy.copy(item)
        fields = dataclasses.fields(item) if dataclasses.is_dataclass(item) else ()
        for name in [entry.name for entry in fields] or list(vars(item)):
            object.__setattr__(rebuilt, name, rebuild(getattr(item, name, None)))
        return rebuilt

    def rebuild_sequence(item: Any) -> Any:
        parts = [rebuild(inner) for inner in item]
        if isinstance(item, tuple):
            return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
        rebuilt = copy.copy(item)
        rebuilt[:] = parts
        return rebuilt

    return rebuild(batch)
