"""The mode that offers torch calls to whoever observes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

__all__ = ["ObservingMode"]


class ObservingMode(TorchFunctionMode):
    """Offers every torch call to a capture.

    Args:
        answer: given the function, its arguments and its keyword arguments, gives what the call returns.
    """

    def __init__(self, answer: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._answer = answer

    @contextmanager
    def active(self) -> Iterator[None]:
        """Offer the calls in this context; an interrupt, too, leaves the mode on no stack."""
        try:
            with self:
                yield
        finally:
            while self in (stack := _get_current_function_mode_stack()):
                above = [_pop_mode() for _ in stack[stack.index(self) :]][:-1]
                for mode in reversed(above):
                    _push_mode(mode)

    def offer(self, function: Callable[..., Any], *args: Any) -> Any:
        """Offer a call that torch does not offer to modes."""
        return self._answer(function, args, {})

    def release(self) -> None:
        """Let calls run as they are from now on, and let go of the capture: a cycle would keep it for some time."""
        self._answer = _as_it_is

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Hand the call on; torch calls this with the mode itself switched off."""
        return self._answer(func, args, kwargs or {})


def _as_it_is(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)
