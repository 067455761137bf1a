"""Cut a batch into batches of fewer samples, and read what a loss function or a training step returned."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode

from lightning_persample.batch_axis.axis import BatchAxis, row_owners
from lightning_persample.batch_axis.batch import (
    Layout,
    batch_tensors,
    declared_places,
    is_alike,
    is_batch_of_graphs,
    mark_samples,
)
from lightning_persample.capture.graph import REENTRANT, node_below
from lightning_persample.errors import OptionError, PerSampleError, UnsupportedError

Weighting: TypeAlias = Literal["mean", "sum"] | Callable[[Any, Any], Tensor]

NOT_REENTRANT = (
    "gradients are taken with torch.autograd.grad here, so that no hook of the training runs, and activation "
    "checkpointing with use_reentrant=True gives none to it; use checkpoint(..., use_reentrant=False), or go without "
    "checkpointing"
)

_PLAIN = (str, bytes, int, float, complex, type, type(None))


def take(
    batch: Any, start: int, stop: int, *, batch_size: int, batch_dim: int = 0, batch_layout: Layout | None = None
) -> Any:
    """The samples `start` to `stop` of a batch, as a batch of that many samples."""
    # Tensors are copied, so that nothing done to the result reaches the batch. A tensor with k * B rows has k rows per
    # sample, as everywhere in the engine; one without rows of samples (class weights) is kept whole. A list or tuple of
    # B items is cut itself where its tensors do not all have B rows (images of unequal sizes, texts), and the batch
    # itself is, where none of its tensors has; so are packed sequences and batches of graphs.
    declared = declared_places(batch, batch_size, batch_layout)
    owners = {id(place[1]) for place in declared.values() if place is not None}

    def rows(tensor: Tensor) -> Tensor:
        if id(tensor) in declared:
            return declared_rows(tensor, declared[id(tensor)])
        found = _rows_per_sample(tensor, batch_size, batch_dim)
        whole = tensor.detach()
        if not found:
            return whole.clone()
        if batch_dim == 0:  # sample-major
            return whole[start * found : stop * found].clone()
        parts = whole.unflatten(batch_dim, (found, batch_size)).narrow(batch_dim + 1, start, stop - start)
        return parts.flatten(batch_dim, batch_dim + 1).clone()

    def declared_rows(tensor: Tensor, place: tuple[BatchAxis, Tensor | None] | None) -> Tensor:
        if place is None:
            return tensor.detach().clone()
        axis, _ = place
        owner = row_owners(axis, batch_size, tensor.device)
        own = tensor.detach().index_select(axis.dim, ((owner >= start) & (owner < stop)).nonzero().flatten())
        return own - start if id(tensor) in owners else own  # (which says by number whose the rows are)

    def items(item: Any) -> Any:
        if isinstance(item, PackedSequence):
            if int(item.batch_sizes[0]) != batch_size:
                return None
            padded, lengths = pad_packed_sequence(item, batch_first=True)
            return pack_padded_sequence(padded[start:stop], lengths[start:stop], batch_first=True, enforce_sorted=False)
        if is_batch_of_graphs(item):
            return type(item).from_data_list([item.get_example(sample) for sample in range(start, stop)])
        if not _is_one_item_per_sample(item, batch_size, batch_dim, item is batch):
            return None
        return _rebuilt(item[start:stop], lambda tensor: copied(tensor.detach().clone(), tensor))

    def copied(part: Tensor, tensor: Tensor) -> Tensor:
        return part.requires_grad_(tensor.requires_grad)

    return _rebuilt(batch, lambda tensor: copied(rows(tensor), tensor), items)


class Marked(TorchFunctionMode):
    """Notes what `mark_samples` declares in a step that runs on a copy of a batch, of the tensors of the batch itself.

    Args:
        batch: the batch.
        copied: a copy of it, on which the step runs.

    Attributes:
        layout: for tensors of the batch, whose rows they have, as `batch_layout` says it.
        made: whether the step declares owners of rows in tensors that are none of the batch.
    """

    def __init__(self, batch: Any, copied: Any) -> None:
        super().__init__()
        copies, originals = tensors_of(copied), tensors_of(batch)
        alike = len(copies) == len(originals)  # (a packed sequence may be packed in another order)
        self._originals = {id(copy): each for copy, each in zip(copies, originals, strict=True)} if alike else {}
        self.layout: dict[Tensor, Any] = {}
        self.made = False

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


def has_ragged_samples(batch: Any, batch_size: int, batch_dim: int = 0, batch_layout: Layout | None = None) -> bool:
    """Whether a batch holds one item for each sample instead of rows, so that its samples cannot be stacked."""
    found: list[Any] = [
        place for place in declared_places(batch, batch_size, batch_layout).values() if place and place[1] is not None
    ]

    def items(item: Any) -> None:
        if (
            isinstance(item, PackedSequence)
            or is_batch_of_graphs(item)
            or _is_one_item_per_sample(item, batch_size, batch_dim, item is batch)
        ):
            found.append(item)

    _rebuilt(batch, lambda tensor: tensor, items)
    return bool(found)


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


def gradients_of(loss: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of a loss by name, of those parameters that it depends on; each (*shape), dense."""
    if not loss.requires_grad:
        return {}
    if node_below([loss], REENTRANT):  # torch refuses it only where a gradient goes through the checkpoint
        raise UnsupportedError(NOT_REENTRANT)
    grads: tuple[Tensor | None, ...] = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: grad.to_dense() for name, grad in zip(parameters, grads, strict=True) if grad is not None}


def _rows_per_sample(tensor: Tensor, batch_size: int, batch_dim: int) -> int:
    """How many rows each sample has in a tensor; 0 where the tensor does not hold the samples."""
    if tensor.dim() <= batch_dim:
        return 0
    rows, rest = divmod(tensor.size(batch_dim), batch_size)
    return 0 if rest else rows


def _is_one_item_per_sample(item: Sequence[Any], batch_size: int, batch_dim: int, is_batch: bool) -> bool:
    if len(item) != batch_size or isinstance(item, torch.Size):
        return False
    fields = list if isinstance(item, list) else (list, tuple)  # (tuples in a list are samples, whatever their length)
    if any(isinstance(inner, fields) and len(inner) == batch_size for inner in item):
        return False
    tensors = [tensor for _, tensor in batch_tensors(item) if tensor.dim() > 0]
    if not tensors:
        return isinstance(item, list) or all(isinstance(inner, str) for inner in item)
    have_rows = [tensor.dim() > batch_dim and tensor.size(batch_dim) == batch_size for tensor in tensors]
    # A list of items of one kind is read as `lay_out` reads it: an item may have B rows by chance.
    return not any(have_rows) if is_batch and not (isinstance(item, list) and is_alike(item)) else not all(have_rows)


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
