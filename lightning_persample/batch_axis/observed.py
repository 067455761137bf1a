"""One torch call as the engine saw it: the tensors among its arguments and what is known of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_persample.batch_axis.axis import BatchAxis, Lost, Owner
from lightning_persample.torch_internals import TORCH_FOLDER, tree_map, version_counter

_shape = attrgetter("shape")
_OWN_FOLDERS = tuple(f"{folder}{os.sep}" for folder in (TORCH_FOLDER, Path(__file__).parent.parent))


@dataclass(eq=False, slots=True)  # not frozen: one is made for every tensor of every call
class Operand:
    """A tensor among the arguments of a call, with where the batch lies in it (None: it does not hold the batch)."""

    tensor: Tensor
    axis: BatchAxis | Lost | None


@dataclass(eq=False)
class ObservedCall:
    """A `TorchCall` that has run, as propagation rules get it; nothing of it changes afterwards.

    Attributes:
        op: canonical op, see `rules.canonical_op`.
        function: what was called.
        args: positional arguments; for an in-place op the first is a copy from before the call where it was needed.
        kwargs: keyword arguments.
        operands: every tensor among the arguments.
        outputs: every tensor among the results.
        batch_size: number of samples B.
        inplace: whether the call wrote into its first argument.
        random_state: state of the generator before the call, where random numbers have to be drawn again.
        written: ids of the operands that the call wrote into, such as running statistics.
        fused: what its backward takes the sums over the samples from, where it has run fused; else None.
        signature: what the plan of the call is kept under, see `TorchCall`; None where it may not be kept.
        owners: the samples of rows in tensors of the batch that have unequal numbers of them.
        known_rows: gives the sample of each of so many rows as some tensors have, (n,), by what else holds samples.
        row_sums: of constants of the step that were added up, such as a mask drawn in it, the sums of as many rows as
            there are samples, (B,).
        compares_weights: whether somebody asks what the samples weigh in the loss.
        made: ids of constants that the step has drawn, or made of numbers that may be the samples'.
        located: the operands that hold the batch along a known axis.
        lost: the operands that depend on the batch without an axis that holds it.
    """

    op: object
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[Operand, ...]
    outputs: tuple[Tensor, ...]
    batch_size: int
    inplace: bool
    written: frozenset[int]
    random_state: Tensor | None = None
    fused: Any = None
    signature: Hashable | None = None
    owners: Sequence[Owner] = ()
    known_rows: Callable[[int], Sequence[Tensor]] = lambda count: ()
    row_sums: Sequence[Tensor] = ()
    compares_weights: bool = False
    made: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.located = [(o.tensor, o.axis) for o in self.operands if isinstance(o.axis, BatchAxis)]
        self.lost = [(o.tensor, o.axis) for o in self.operands if isinstance(o.axis, Lost)]

    def axis_of(self, tensor: Tensor) -> BatchAxis | Lost | None:
        """Where the batch lies in one of the operands."""
        for operand in self.operands:
            if operand.tensor is tensor:
                return operand.axis
        return None

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """An argument by position or by any of its names."""
        if len(self.args) > position:
            return self.args[position]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    def on(self, change: Callable[[Operand], Operand]) -> ObservedCall:
        """The same call on other tensors in place of its operands."""
        changed = {id(operand.tensor): change(operand) for operand in self.operands}
        args, kwargs = tree_map(
            lambda leaf: changed[id(leaf)].tensor if id(leaf) in changed else leaf, (self.args, dict(self.kwargs))
        )
        operands = tuple(changed[id(operand.tensor)] for operand in self.operands)
        return replace(self, args=args, kwargs=kwargs, operands=operands, signature=None)

    def again(self, change: Callable[[Operand], Tensor]) -> tuple[Tensor, ...]:
        """What the call gives with other tensors in place of its operands."""
        call = self.on(lambda operand: Operand(change(operand), None))
        return tuple(tensors_in(call.function(*call.args, **call.kwargs)))

    def detached(self) -> ObservedCall:
        """The same call on tensors that know nothing of how they were computed."""
        return replace(self.on(lambda operand: Operand(operand.tensor.detach(), operand.axis)), outputs=())

    @property
    def meets_a_weight(self) -> bool:
        """Whether an operand that does not hold the batch has a gradient."""
        return any(operand.axis is None and operand.tensor.requires_grad for operand in self.operands)

    @property
    def sample(self) -> int | None:
        """The one sample that all operands of the batch belong to, where single samples were taken out of it."""
        samples = {axis.owner.only if axis.owner is not None else None for _, axis in self.located}
        samples |= {mark.alone for _, mark in self.lost}
        return samples.pop() if len(samples) == 1 else None

    @property
    def mixing(self) -> str | None:
        """Where a value computed over the whole batch entered an operand that holds the samples along an axis."""
        return next((axis.mixing for _, axis in self.located if axis.mixing), None)

    @property
    def name(self) -> str:
        """The op's name for messages."""
        return name_of(self.op, self.function)

    def describe(self, parameters: Iterable[str] = ()) -> Description:
        """Op, sizes of its tensors and the user's line, for messages; to be asked for while the call's line runs."""
        return describe(self.name, [operand.tensor for operand in self.operands], parameters)


def name_of(op: object, function: Callable[..., Any]) -> str:
    """An op's name for messages."""
    return op if isinstance(op, str) else getattr(function, "__name__", str(function))


class Description(NamedTuple):  # one is made for every call with weights
    """What a call is named in messages; the text is made only where one is given.

    Attributes:
        name: the op's name.
        sizes: of its tensors.
        place: file and line of the user's code, None if it is unknown.
        parameters: names of the parameters among its operands.
    """

    name: str
    sizes: tuple[torch.Size, ...]
    place: tuple[str, int] | None
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The text."""
        sizes = ", ".join(str(tuple(size)) for size in self.sizes)
        named = f" with {', '.join(f'`{name}`' for name in sorted(self.parameters))}" if self.parameters else ""
        return f"`{self.name}` on {sizes}{line_of(self.place)}{named}"


def describe(name: str, tensors: Iterable[Tensor], parameters: Iterable[str] = ()) -> Description:
    """The description of a call of these tensors; to be asked for while the call's line runs."""
    return Description(name, tuple(map(_shape, tensors)), user_place(), tuple(parameters))


def version_of(tensor: Tensor) -> int:
    """How often the tensor was written to; tensors made in inference mode do not count that."""
    return 0 if tensor.is_inference() else version_counter(tensor)


def has_history(tensor: Tensor) -> bool:
    """Whether autograd has what made a tensor; it raises for a view made without gradient and written to since."""
    try:
        return tensor.requires_grad and tensor.grad_fn is not None
    except RuntimeError:  # no call with gradient can use it
        return False


def without_data(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, dtype and device, where no value is read; it holds one entry."""
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)


def flattened(tree: Any, leaves: list[Any]) -> tuple[Any, ...]:
    """Add what nested tuples, lists and dicts hold to `leaves`; -> what `rebuilt` makes them of again."""
    keys = (*tree,) if isinstance(tree, dict) else None
    parts: list[tuple[Any, ...] | None] = []
    for item in tree if keys is None else tree.values():
        if isinstance(item, (tuple, list, dict)) and type(item) is not torch.Size:
            parts.append(flattened(item, leaves))
        else:
            leaves.append(item)
            parts.append(None)
    return list if isinstance(tree, list) else tuple, keys, tuple(parts)


def rebuilt(leaves: Iterable[Any], parts: tuple[Any, ...]) -> Any:
    """The nested tuples, lists and dicts with these leaves."""
    kind, keys, inner = parts
    each = iter(leaves)
    items = []
    for part in inner:
        items.append(next(each) if part is None else rebuilt(each, part))
    return kind(items) if keys is None else dict(zip(keys, items, strict=True))


def operands_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Every tensor among the arguments of a call, in order."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            for item in value:  # numbers, as a rule
                if isinstance(item, (Tensor, tuple, list, dict)):
                    found.extend(tensors_in(item))
        elif isinstance(value, dict):
            found.extend(tensors_in(value))
    return found


def user_line() -> str:
    """Where in the user's code the present torch call stands: ``" at model.py:12"``, or nothing if it is unknown."""
    return line_of(user_place())


def line_of(place: tuple[str, int] | None) -> str:
    """A file and line of the user's code as messages have it."""
    return "" if place is None else f" at {os.path.basename(place[0])}:{place[1]}"


class _OwnFiles(dict[str, bool]):
    """By name of a file whether it is one of torch's or of this package's."""

    def __missing__(self, filename: str) -> bool:
        if len(self) >= _MOST_FILES:
            self.clear()
        self[filename] = found = filename.startswith(_OWN_FOLDERS)
        return found


_MOST_FILES = 4096
is_own: Callable[[str], bool] = _OwnFiles().__getitem__  # (a step asks hundreds of times)
"""Whether a file is one of torch's or of this package's."""


def user_place() -> tuple[str, int] | None:
    """File and line of the innermost frame that is neither torch's nor this package's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def place_of(code: CodeType, instruction: int) -> tuple[str, int]:
    """File and line of an instruction of a function, counted in bytes as by ``frame.f_lasti``."""
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    return code.co_filename, next(lines, None) or code.co_firstlineno
