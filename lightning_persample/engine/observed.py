"""One torch call as the engine saw it: the tensors among its arguments and what is known of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from lightning_persample.engine.batch_axis import BatchAxis, Lost

__all__ = ["ObservedCall", "Operand", "tensors_in", "user_line", "version_of"]

_OWN_FOLDERS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parent.parent))


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor among the arguments of a call, with where the batch lies in it (None: it does not hold the batch)."""

    tensor: Tensor
    axis: BatchAxis | Lost | None


@dataclass(frozen=True, eq=False)
class ObservedCall:
    """A call that has run.

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

    @property
    def located(self) -> list[tuple[Tensor, BatchAxis]]:
        """The operands that hold the batch along a known axis."""
        return [(o.tensor, o.axis) for o in self.operands if isinstance(o.axis, BatchAxis)]

    @property
    def lost(self) -> list[tuple[Tensor, Lost]]:
        """The operands that depend on the batch without an axis that holds it."""
        return [(o.tensor, o.axis) for o in self.operands if isinstance(o.axis, Lost)]

    def axis_of(self, tensor: Tensor) -> BatchAxis | Lost | None:
        """Where the batch lies in one of the operands."""
        return next((o.axis for o in self.operands if o.tensor is tensor), None)

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """An argument by position or by any of its names."""
        if len(self.args) > position:
            return self.args[position]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    @property
    def name(self) -> str:
        """The op's name for messages."""
        return self.op if isinstance(self.op, str) else getattr(self.function, "__name__", str(self.function))

    def describe(self) -> str:
        """Op, sizes of its tensors and the user's line, for messages."""
        sizes = ", ".join(str(tuple(o.tensor.shape)) for o in self.operands)
        return f"`{self.name}` on {sizes}{user_line()}"


def version_of(tensor: Tensor) -> int:
    """How often the tensor was written to; tensors made in inference mode do not count that."""
    return 0 if tensor.is_inference() else tensor._version


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


def user_line() -> str:
    """Where in the user's code the present torch call stands: ``" at model.py:12"``, or nothing if it is unknown."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_FOLDERS):
        frame = frame.f_back
    return "" if frame is None else f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
