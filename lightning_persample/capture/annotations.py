"""What one capture knows of a call and of a tensor: the kind of the call, and where the tensor's values come from."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, UntypedStorage, nn

from lightning_persample.batch_axis.axis import BatchAxis, Lost, by_entries, entries_of, entry_owners
from lightning_persample.batch_axis.base import BY_LAYOUT, is_plain, memory_of
from lightning_persample.batch_axis.observed import (
    ObservedCall,
    has_history,
    operands_of,
    tensors_in,
    user_line,
    user_place,
    version_of,
)
from lightning_persample.batch_axis.ops import LOSSES, OPS, POINTWISE, having
from lightning_persample.capture.observing import is_composite
from lightning_persample.capture.transforms import Inside, innermost, innermost_axis
from lightning_persample.capture.weight import Weight, base_of, places_in
from lightning_persample.rules import canonical_op
from lightning_persample.torch_internals import is_view, is_wrapped_by_transform

_GETTERS = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
_ONE_CALL: dict[Callable[..., Any], object] = {  # whose tensors are those of the call
    nn.functional.batch_norm: "batch_norm",
    nn.functional.cross_entropy: "cross_entropy_loss",
    nn.functional.layer_norm: "layer_norm",
    nn.functional.group_norm: "group_norm",
    nn.functional.rms_norm: "rms_norm",
}
_SUMS = having("adds", "joins")
_NO_TENSOR = frozenset({
    "__set__", "__delete__", "__len__", "size", "dim", "stride", "numel", "is_floating_point", "requires_grad_",
    "retain_grad", "share_memory_", "register_hook", "_set_grad_enabled", "set_", "resize_", "resize_as_",
    "__setstate__", "getweakrefs", "_assert",
})  # fmt: skip
_MOVES = frozenset({"set_", "resize_", "resize_as_", "__setstate__"})
# Ops whose results are data even where they are given none.
DATA_SOURCES = having("draws", "makes")
_ADDED_UP = frozenset({"sum", "mean", "count_nonzero"})
_NEW_ROWS = DATA_SOURCES - having("drops")


def attribute_of(function: Callable[..., Any]) -> str:
    """Which attribute a getter or setter of a tensor is for."""
    return getattr(getattr(function, "__self__", None), "__name__", "")


def is_setter(function: Callable[..., Any], *attributes: str) -> bool:
    """Whether a call assigns to one of these attributes of a tensor."""
    return getattr(function, "__name__", "") == "__set__" and attribute_of(function) in attributes


def op_of(function: Callable[..., Any]) -> object | None:
    """The canonical op of a call, or None where it gives no tensor to follow."""
    name = getattr(function, "__name__", "")
    if name == "__get__" or is_setter(function, "real", "imag"):
        attribute = attribute_of(function)
        return attribute if attribute in _GETTERS else None
    return None if name in _NO_TENSOR else canonical_op(function)


def is_inplace(function: Callable[..., Any]) -> bool:
    """Whether the call writes into its first argument."""
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        if name == "__set__":
            return is_setter(function, "real", "imag")
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_") and not name.startswith("_")


def data_of(op: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments whose values the results are made of, in order."""
    known = OPS.get(op)
    if known is None or not known.converts:
        return operands_of(args, kwargs)
    if op == "arange":  # how far it goes is a size
        starts = args[:1] if len(args) > 1 or "end" in kwargs else ()
        return operands_of((*starts, *args[2:3]), {name: kwargs[name] for name in ("start", "step") if name in kwargs})
    place, name = known.data or (len(args), "")
    return operands_of(args[place : place + 1], {name: kwargs[name]} if name in kwargs else {})


@dataclass(frozen=True, slots=True)
class Kind:
    """What is known of a function before it is called."""

    op: object | None  # canonical op, None where it gives no tensor to follow
    inplace: bool  # whether it writes into its first argument
    pointwise: bool  # whether each entry of its output is computed from the entries at its place
    # whether it is one of torch's Python functions that can be run in the open: its body runs, and each torch call in
    # it is seen as if the user had made it
    composite: bool
    by_layout: bool  # whether the layout of its tensors may decide a call, so that it can have a plan
    converts: bool  # whether some of its tensors give but a dtype, a device or a shape
    moves: bool  # whether its tensors lie in other memory afterwards, or in another part of it
    is_unnoted: bool  # whether it gives no tensor to follow, and changes nothing that is known of those it is given
    # the op of the one call that it makes, for a composite function that does nothing else; the op itself for any other
    makes: object | None


KINDS: dict[Callable[..., Any], Kind] = {}


def kind_of(function: Callable[..., Any]) -> Kind:
    """The kind of a call; that of a function of torch's own is found out once."""
    kind = KINDS.get(function)
    if kind is None:
        op = op_of(function)
        inplace, composite = is_inplace(function), is_composite(function)
        converts = op in OPS and OPS[op].converts
        pointwise = op in POINTWISE
        known = (op in BY_LAYOUT and (pointwise or not converts)) or op in LOSSES
        makes = _ONE_CALL.get(function, op)
        by_layout = (known and (pointwise or not (inplace or composite))) or function in _ONE_CALL
        moves = op is None and (function.__name__ in _MOVES or is_setter(function, "data"))
        is_unnoted = op is None and not moves and function not in (weakref.getweakrefs, Tensor.register_hook)
        kind = Kind(op, inplace, pointwise, composite, by_layout, converts, moves, is_unnoted, makes)
        if op is None or isinstance(op, str):
            KINDS[function] = kind
    return kind


def in_parts(call: ObservedCall) -> tuple[ObservedCall, ...]:
    """A call that does the same to each of its tensors, as one call for each of them."""
    if call.op != "broadcast_tensors":
        return (call,)
    shape = call.outputs[0].shape  # (tensors of this shape are returned as they are, and are no outputs here)
    pairs = zip([o for o in call.operands if o.tensor.shape != shape], call.outputs, strict=True)
    return tuple(
        replace(
            call,
            op="expand",
            function=Tensor.expand,
            args=(operand.tensor, *output.shape),
            kwargs={},
            operands=(operand,),
            outputs=(output,),
            signature=None,
        )
        for operand, output in pairs
    )


def adds_a_term(call: ObservedCall) -> bool:
    """Whether numbers made of weights alone are added to ones computed over the whole batch: a penalty."""
    of_all = all(mark.alone is None and (mark.reduced or tensor.numel() == 1) for tensor, mark in call.lost)
    return call.op in _SUMS and not call.located and of_all


class Constant:
    """Mark of a tensor that holds neither weights nor the batch.

    Args:
        known: it was made of numbers, parameters and buffers alone, so that no sample's data can be in it.
    """

    def __init__(self, *, known: bool) -> None:
        self.known = known


REWRITTEN = Lost("it was made of weights alone, and written to in place through another tensor that shares its memory")
CONSTANT, KNOWN = Constant(known=False), Constant(known=True)

_FEW = 2
_LONG, _MOST_NUMBERS = 6, 1 << 12  # characters of a number, with its point; numbers that have left torch
_MOST, _MOST_SUMS = 1 << 22, 16  # numbers of a constant that are added up once more; such constants of a step

Mark: TypeAlias = Weight | BatchAxis | Lost | Constant
"""The annotation of a tensor: what the capture knows of it."""


class Number(NamedTuple):
    """A number of samples that has left torch: the tensor that it was, and where its samples lie."""

    tensor: Tensor
    axis: Lost


class Marks:
    """A mapping from tensor objects to marks that holds no tensor alive and writes nothing on it."""

    # An entry answers only for the very object it was made for: ids are reused, so the weak reference is compared too.

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        # by the id of a tensor a weak reference to it, and its mark
        self.entries: dict[int, tuple[Callable[[], Tensor | None], Mark]] = {}
        self._written: dict[int, UntypedStorage] = {}
        self._swapped: tuple[Tensor, Mark | None] | None = None
        self._transformed = False
        self.of_weights: set[int] = set()  # where memory begins that weights alone have made
        # ops that drew numbers, or made data of others', as many rows as there are samples, and where; a few
        self.made: dict[tuple[str, tuple[str, int] | None], None] = {}
        # of constants that were added up, the sums of as many rows as there are samples, (B,)
        self.row_sums: deque[Tensor] = deque(maxlen=_MOST_SUMS)
        # what has left torch, and may come back: numbers, with the tensors that they were, None where there are several
        self.numbers: dict[float, Number | None] = {}
        self._places: list[int] = []  # in an order of all samples, those that came back first
        self._picked = 0

    def __setitem__(self, tensor: Tensor, mark: Mark) -> None:
        self.entries[id(tensor)] = (weakref.ref(tensor), mark)

    def __len__(self) -> int:
        """The number of living tensors with a mark."""
        return sum(reference() is not None for reference, _ in self.entries.values())

    def get(self, tensor: Tensor) -> Mark | None:
        """The mark of this tensor object, or None."""
        entry = self.entries.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def of_operand(self, tensor: Tensor) -> Mark | None:
        """What a tensor means as an argument of a call: its own mark, or what its memory or its history tells."""
        entry = self.entries.get(id(tensor))
        mark = entry[1] if entry is not None and entry[0]() is tensor else None
        kind = type(mark)
        if kind is BatchAxis:
            return mark
        if type(mark) is Weight:
            current = mark.derivation is None or mark.is_current(tensor)
            return (mark if current else REWRITTEN) if tensor.requires_grad else None
        unmarked = mark is None or kind is Constant
        if unmarked and self._written and memory_of(tensor) in self._written:
            mark = self._read_from_base(tensor)
        if mark is None and (self._transformed or is_wrapped_by_transform(tensor)):
            mark = self._through_transform(tensor)
        if mark is None and has_history(tensor) and tensor.grad_fn is not None:
            return Lost(
                f"it passed through {tensor.grad_fn.name()}, which is not a torch call that can be seen (a custom "
                "autograd function, TorchScript, a transform such as torch.vmap, or a tensor kept from before this "
                "step)"
            )
        return mark

    def set_innermost(self, output: Tensor, mark: Mark) -> None:
        """Mark what comes out of a transform, where a call inside gave a tensor that wraps it."""
        inner = innermost(output)
        if inner is not output:
            self.entries.pop(id(output), None)
            self._transformed = True
        self.set_result(inner, mark)

    def of_inside(self, tensor: Tensor) -> Mark | None:
        """What a tensor means inside a transform, also where a call on others gave it (random numbers)."""
        mark = self.of_operand(tensor) if is_wrapped_by_transform(tensor) else None
        if isinstance(mark, (BatchAxis, Lost)) and mark is self.get(tensor):
            axis = innermost_axis(tensor, Inside(mark, None)) if isinstance(mark, BatchAxis) else None
            self.set_innermost(tensor, axis or mark)
        return self.of_operand(tensor)

    def _through_transform(self, tensor: Tensor) -> BatchAxis | Lost | None:
        """The mark of what a tensor inside a transform wraps; of one that came out, that of what it is a view of."""
        inner = innermost(tensor)
        if inner is not tensor:
            mark = self.of_operand(inner)
            return mark if isinstance(mark, (BatchAxis, Lost)) else None
        base = base_of(tensor)
        known = None if base is None else self.get(base)
        if isinstance(known, Lost):
            return known
        return self._read_from_base(tensor) if isinstance(known, BatchAxis) else None

    def set_result(self, output: Tensor, mark: Mark) -> None:
        """Mark a result; a parameter that is written to (an update, a clamp) remains what it is."""
        known = self.get(output)
        if not (type(known) is Weight and known.derivation is None):
            self[output] = mark

    def alias(self, tensor: Tensor) -> Tensor | None:
        """Another tensor on the memory of this one, with its samples: it shows them when this one lies elsewhere."""
        mark = self.get(tensor)
        if not isinstance(mark, (BatchAxis, Lost)):
            return None
        alias = tensor.detach()
        self[alias] = mark
        return alias

    def note_moved(self, target: Tensor, source: object) -> None:
        """A tensor that was set to the memory of `source`, or to a part of some memory, holds what lies there."""
        known = self.get(target)
        if isinstance(known, Weight) and known.derivation is None:
            return
        elsewhere = CONSTANT if source is None else Lost(f"it was set to memory that no tensor shows{user_line()}")
        mark = self.of_operand(source) if isinstance(source, Tensor) else self._in_memory(target) or elsewhere
        if isinstance(source, Tensor) and not isinstance(mark, (BatchAxis, Lost)):
            mark = KNOWN if self.is_known(source) else CONSTANT
        if has_history(target) and isinstance(known, (Weight, BatchAxis)):  # its gradient goes where it went before
            if isinstance(known, Weight) and isinstance(mark, Constant):
                known.hidden, known.version = True, version_of(target)
                known.outside |= not mark.known
            if isinstance(mark, Constant) or (
                isinstance(known, BatchAxis) and isinstance(mark, BatchAxis) and mark.is_same(known)
            ):
                return
            mark = Lost(f"its data was replaced by that of other samples{user_line()}")
        self[target] = mark or CONSTANT

    def note_swapped(self, tensor: Tensor) -> None:
        """Before torch swaps the contents of two tensors, it asks of one after the other who refers to them weakly."""
        entry = self.entries.pop(id(tensor), None)
        mark = entry[1] if entry is not None and entry[0]() is tensor else None
        if self._swapped is None:
            self._swapped = tensor, mark
            return
        (other, others), self._swapped = self._swapped, None
        for each, its in ((other, mark), (tensor, others)):
            if its is not None:
                self.entries[id(each)] = partial(_itself, each), its

    def _in_memory(self, tensor: Tensor) -> Mark | None:
        """Where the samples lie in a tensor, as the others on its memory tell; None where there are none."""
        if not is_plain(tensor):
            return Lost(f"it was set to other memory{user_line()}")
        others = list(self._on_memory_of(tensor))
        if not others:
            return None
        for other, known in others:
            if other.dtype == tensor.dtype and other.is_set_to(tensor):
                return known
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        owners, mixing = torch.full((size,), -1, device=tensor.device), None
        for other, known in others:
            if isinstance(known, Lost) or other.dtype != tensor.dtype:
                return Lost(f"it was set to memory that holds samples along no axis{user_line()}")
            owners[_places(other, size)] = entry_owners(known, other.shape, self._batch_size, tensor.device)
            mixing = mixing or known.mixing
        here = owners[_places(tensor, size)]
        if not bool((here >= 0).any()):
            return CONSTANT
        axis = by_entries(here, self._batch_size, mixing)
        return axis or Lost(f"no axis of it holds the samples since it was set to other memory{user_line()}")

    def _on_memory_of(self, tensor: Tensor) -> Iterator[tuple[Tensor, BatchAxis | Lost]]:
        """The tensors that hold samples and share the memory of this one."""
        for other, known in self._sharing(tensor, (BatchAxis, Lost)):
            if other is not tensor:
                yield other, known

    def weights_on_memory_of(self, tensor: Tensor) -> Iterator[tuple[Tensor, Weight]]:
        """The weights that are in the memory of a tensor."""
        return self._sharing(tensor, (Weight,))

    def _sharing(self, tensor: Tensor, kinds: tuple[type, ...]) -> Iterator[tuple[Tensor, Any]]:
        memory = memory_of(tensor)
        for reference, known in list(self.entries.values()) if memory else ():
            other = reference() if isinstance(known, kinds) else None
            if other is not None and memory_of(other) == memory:
                yield other, known

    def is_known(self, tensor: Tensor) -> bool:
        """Whether no sample's data can be in a tensor that is not marked as holding it."""
        mark = self.get(tensor)
        if mark is None:
            return isinstance(tensor, nn.Parameter) or tensor.numel() <= 1
        if isinstance(mark, Weight):
            return not mark.outside
        return isinstance(mark, Constant) and mark.known

    def note_constant(self, op: object, operands: list[Tensor], result: Any) -> None:
        """Mark the results of a call without weights and without the batch, where there is something to know."""
        known = op not in DATA_SOURCES and all(self.is_known(tensor) for tensor in operands)
        made = op in DATA_SOURCES or any(self.get(tensor) is CONSTANT for tensor in operands)
        for output in tensors_in(result):
            if known or made or has_history(output) or self.get(output) is KNOWN:
                self.set_result(output, KNOWN if known else CONSTANT)
            if op in _ADDED_UP and output.numel() == 1 < self._batch_size and len(operands) == 1:
                self._note_row_sums(op, operands[0])
            if op in _NEW_ROWS and output.shape[:1] == (self._batch_size,):
                self._note_made(str(op))

    def note_variables(self, tensors: list[Tensor], marks: list[Mark | None]) -> None:
        """Mark what the step differentiates by, such as an adversarial change, where its rows are laid over samples."""
        first, axis = next((t, mark) for t, mark in zip(tensors, marks, strict=True) if isinstance(mark, BatchAxis))
        for place, (tensor, mark) in enumerate(zip(tensors, marks, strict=True)):
            if not tensor.requires_grad or not tensor.is_leaf or isinstance(mark, (BatchAxis, Lost, Weight)):
                continue
            dim, size = axis.dim + tensor.dim() - first.dim(), first.size(axis.dim)
            if dim >= 0 and tensor.size(dim) == size > 1:
                self[tensor] = marks[place] = axis.moved(dim)

    def _note_row_sums(self, op: object, tensor: Tensor) -> None:
        """Keep what each row adds to a sum of a constant with as many rows as samples, which may weigh these."""
        if (
            self._batch_size in tensor.shape
            and tensor.numel() <= _MOST
            and not tensor.is_complex()
            and is_plain(tensor)
        ):
            rows = (tensor != 0 if op == "count_nonzero" else tensor).movedim(tensor.shape.index(self._batch_size), 0)
            sums = rows.detach().reshape(self._batch_size, -1).sum(1, dtype=torch.float64)
            self.row_sums.append(sums / tensor.numel() if op == "mean" else sums)

    def _note_made(self, name: str) -> None:
        """Keep where the step made data that may be the samples', for a reason."""
        if self._batch_size > 1 and len(self.made) < _FEW:
            self.made[name, user_place()] = None

    def note_written(self, tensor: Tensor) -> None:
        """The batch was written into a tensor: other views of its memory now hold the batch, too."""
        if memory := memory_of(tensor):  # (tensors without entries all begin at 0)
            self._written[memory] = tensor.untyped_storage()

    def note_rewritten(self, target: Tensor, before: Mark | None) -> None:
        """After a write that gave a tensor other samples than `before`, so have its base and all on its memory."""
        mark = self.get(target)
        alike = isinstance(before, BatchAxis) and isinstance(mark, BatchAxis) and before.same_place(mark)
        if mark is None or mark is before or (alike and before.mixing == mark.mixing):  # type: ignore[union-attr]
            return
        others: dict[int, tuple[Tensor, Mark | None]] = {}
        if isinstance(mark, (BatchAxis, Lost)):
            others = {id(other): (other, known) for other, known in self._on_memory_of(target)}
        base = base_of(target) if is_view(target) else None
        if base is not None and not (base.is_leaf and base.requires_grad):
            others[id(base)] = base, self.get(base)
        for other, known in others.values():
            self[other] = self._rewritten(other, known, target, mark)

    def _rewritten(self, other: Tensor, known: Mark | None, target: Tensor, mark: Mark) -> Mark:
        """Where the samples lie in a tensor after another one on its memory, now marked so, was written to."""
        reason = (
            f"it was written to in place through another tensor{user_line()}, and no axis of it holds the samples since"
        )
        if not (is_plain(other) and is_plain(target)) or other.dtype != target.dtype:
            return Lost(reason)
        size = target.untyped_storage().nbytes() // target.element_size()
        here, there = _places(other, size), _places(target, size)
        written = torch.zeros(size, dtype=torch.bool, device=target.device)
        written[there] = True
        is_new = written[here]
        if known is not None and not bool(is_new.any()):
            return known
        now, earlier = self._entries_of(target, mark), None if bool(is_new.all()) else self._entries_of(other, known)
        overlaps = int(written.sum()) < there.numel()  # (which of them stays is not defined)
        is_part = now is None and bool(is_new.all())  # each entry of the other tensor is one of the target
        if isinstance(mark, Lost) and mark.of_others and is_part:
            is_sum = len(mark.terms) <= 1 or other.numel() == target.numel()
            return replace(mark, computed=None, shares=None, totals=None, weights=None) if is_sum else Lost(reason)
        if now is None or overlaps or (earlier is None and not bool(is_new.all())):
            return Lost(reason)
        owners = torch.full((size,), -1, device=target.device)
        owners[there] = now
        entries = owners[here] if earlier is None else torch.where(is_new, owners[here], earlier)
        mixing = next((axis.mixing for axis in (mark, known) if isinstance(axis, BatchAxis) and axis.mixing), None)
        axis = by_entries(entries, self._batch_size, mixing)
        return axis or Lost(reason, entries=None if mixing else entries)

    def _entries_of(self, tensor: Tensor, mark: Mark | None) -> Tensor | None:
        """The sample of each entry of a tensor with this mark, -1 where it is none's; None where that is not known."""
        if mark is None or isinstance(mark, Constant):
            return torch.full(tensor.shape, -1, device=tensor.device)
        return None if isinstance(mark, Weight) else entries_of(mark, tensor, self._batch_size)

    def _read_from_base(self, view: Tensor) -> BatchAxis | Lost:
        """Where the samples lie in a view of a tensor that the batch was written into."""
        base, reason = base_of(view), "it shares its memory with a tensor that the batch was written into"
        known = None if base is None else self.get(base)
        places = None if base is None else places_in(base, view)
        if base is None or places is None or not isinstance(known, (BatchAxis, Lost)):
            return Lost(reason)
        owners = entries_of(known, base, self._batch_size)
        mixing = known.mixing if isinstance(known, BatchAxis) else None
        entries = None if owners is None else owners.flatten()[places]
        axis = None if entries is None else by_entries(entries, self._batch_size, mixing)
        return axis or Lost(reason, entries=None if mixing else entries)

    def note_left(self, result: Any, tensor: Tensor, mark: Mark | None) -> None:
        """Numbers of samples have left torch, as by ``item()``: where they come back they are known by their values."""
        if isinstance(mark, BatchAxis) and tensor.numel() == 1:
            owner = int(entry_owners(mark, tensor.shape, self._batch_size, tensor.device))
            mark = Lost("it is a number of one sample", samples=frozenset({owner}), crossed=mark.mixing is not None)
        if not isinstance(mark, Lost) or self._batch_size == 1:
            return
        if mark.orders:
            self._places += [item for item in (result if isinstance(result, list) else [result]) if type(item) is int]
        elif type(result) is float and _is_long(result) and len(self.numbers) < _MOST_NUMBERS:
            known = self.numbers.get(result)
            is_one = result not in self.numbers or (known is not None and known.axis.samples == mark.samples)
            self.numbers[result] = Number(tensor.detach().clone(), mark) if is_one else None

    @property
    def has_left(self) -> bool:
        """Whether numbers of samples have left torch."""
        return bool(self.numbers or self._places)

    def returned(self, value: Any) -> Number | None:
        """The tensor that a number was before it left torch; None where it did not, or where several were alike."""
        return self.numbers.get(value) if type(value) is float else None

    def place_of(self, row: int) -> Number | None:
        """The place in an order of all samples that has left torch, where rows are picked by it; else None."""
        is_next = self._places[self._picked : self._picked + 1] == [row]
        if not is_next and (not self._picked or self._places[self._picked - 1] != row):
            self._places.clear()  # (it was for something else)
            self._picked = 0
            return None
        self._picked += is_next
        return Number(torch.tensor(row), Lost("it is a place in an order of all samples", crossed=True, orders=True))

    def clear(self) -> None:
        """Forget everything."""
        self.numbers.clear()
        self._places.clear()
        self._picked = 0
        self.entries.clear()
        self._written.clear()
        self._swapped, self._transformed = None, False
        self.of_weights.clear()
        self.row_sums.clear()


def _is_long(number: float) -> bool:
    """Whether a number has more digits than people write."""
    return math.isfinite(number) and len(f"{number:.6e}".partition("e")[0].rstrip("0")) > _LONG


def _places(tensor: Tensor, size: int) -> Tensor:
    """The place of each entry in the memory of a tensor, which has room for `size` entries."""
    places = torch.arange(size, device=tensor.device)
    return places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _itself(tensor: Tensor) -> Tensor:
    """In the place of a weak reference, where none may be."""
    return tensor
