"""What a caller asks of the kernels: how much memory they may take."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass

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


class _Within:
    """A context in which kernels run so, for that use; entered for every use of every parameter, hence no generator."""

    __slots__ = ("_before", "_state")

    def __init__(self, options: KernelOptions, use: _Use | None) -> None:
        self._state = options, use

    def __enter__(self) -> None:
        self._before = _state.set(self._state)

    def __exit__(self, *error: object) -> None:
        _state.reset(self._before)


# One variable for both: what a use leaves behind that is interrupted ends with the options around it.
_state: ContextVar[tuple[KernelOptions, _Use | None]] = ContextVar(
    "options of the kernels and the use at hand",
    default=(KernelOptions(), None),
)


def current_options() -> KernelOptions:
    """The options in force in this thread."""
    return _state.get()[0]


def held_bytes() -> int | None:
    """Bytes that the use at hand holds in any case; None outside of one."""
    use = _state.get()[1]
    return None if use is None else use.size


def kernel_options(options: KernelOptions) -> AbstractContextManager[None]:
    """Run the kernels inside this context with these options.

    They hold in this thread alone: a backward on an accelerator runs in another one, so a hook enters them itself.

    Args:
        options: in place of those in force.

    Returns:
        The context.
    """
    return _Within(options, None)


def held_by_use(count: Callable[[], int]) -> AbstractContextManager[None]:
    """Within this context, kernels work on a use that holds so many bytes; what is nested counts as part of it."""
    options, use = _state.get()
    return _Within(options, use or _Use(count))
