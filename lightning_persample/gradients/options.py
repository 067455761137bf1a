"""What a caller asks of the kernels: how much memory they may take."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["KernelOptions", "current_options", "held_by_use", "held_bytes", "kernel_options"]


@dataclass(frozen=True)
class KernelOptions:
    """How the kernels of all quantities run; no option changes what they compute.

    Attributes:
        max_memory: bytes that the temporaries of one kernel may take; None leaves it to
            `lightning_persample.gradients.cost.memory_budget`. One sample's, or one row's where rows can be
            separated, are taken in any case.

    Raises:
        ValueError: when max_memory is less than one byte.
    """

    max_memory: int | None = None

    def __post_init__(self) -> None:
        if self.max_memory is not None and self.max_memory < 1:
            raise ValueError(f"KernelOptions: max_memory is None or at least 1 byte, got {self.max_memory}.")


Value = TypeVar("Value")


class _Use:
    """What the use at hand holds, counted when it is asked for: most kernels do not ask."""

    __slots__ = ("_count", "_size")

    def __init__(self, count: Callable[[], int]) -> None:
        self._count, self._size = count, -1

    @property
    def size(self) -> int:
        if self._size < 0:
            self._size = self._count()
        return self._size


class _Within(Generic[Value]):
    """A context in which a variable has a value; entered for every use of every parameter, hence no generator."""

    __slots__ = ("_before", "_value", "_variable")

    def __init__(self, variable: ContextVar[Value], value: Value) -> None:
        self._variable, self._value = variable, value

    def __enter__(self) -> None:
        self._before: Token[Value] = self._variable.set(self._value)

    def __exit__(self, *error: object) -> None:
        self._variable.reset(self._before)


_options: ContextVar[KernelOptions] = ContextVar("options of the kernels", default=KernelOptions())  # noqa: B039 (frozen)
_use: ContextVar[_Use | None] = ContextVar("the use at hand", default=None)


def current_options() -> KernelOptions:
    """The options in force in this thread."""
    return _options.get()


def held_bytes() -> int | None:
    """Bytes that the use at hand holds in any case; None outside of one."""
    use = _use.get()
    return None if use is None else use.size


def kernel_options(options: KernelOptions) -> AbstractContextManager[None]:
    """Run the kernels inside this context with these options.

    They hold in this thread alone: a backward on an accelerator runs in another one, so a hook enters them itself.

    Args:
        options: in place of those in force.

    Returns:
        The context.
    """
    return _Within(_options, options)


def held_by_use(count: Callable[[], int]) -> AbstractContextManager[None]:
    """Within this context, kernels work on a use that holds so many bytes; what is nested counts as part of it."""
    return _Within(_use, _use.get() or _Use(count))
