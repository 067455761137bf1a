"""Keep torch's fused inference paths as they are while calls are observed.

`nn.TransformerEncoderLayer` and `nn.MultiheadAttention` in evaluation mode without gradient (a frozen teacher in a
training step) take a fused path, unless ``torch.overrides.has_torch_function`` is true, which any torch function
mode makes it. The fused path rounds differently: without this, observing a step would change what it computes.
A function that asks because it offers itself to overrides (`torch.overrides.wrap_torch_function`) gets the true answer.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

__all__ = ["modules_do_not_see", "without_compilation"]


class _WhileAnyIsInside(AbstractContextManager[None]):
    """A change of what belongs to the whole process, for as long as any thread is inside.

    Args:
        change: makes the context of the change.
    """

    def __init__(self, change: Callable[[], AbstractContextManager[object]]) -> None:
        self._change, self._inside, self._lock = change, 0, threading.Lock()
        self._changed: AbstractContextManager[object] = nullcontext()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                changed = self._change()
                changed.__enter__()
                self._changed = changed
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._changed.__exit__(None, None, None)


def _eager() -> AbstractContextManager[object]:
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


_WITHOUT_COMPILATION = _WhileAnyIsInside(_eager)


def without_compilation() -> AbstractContextManager[object]:
    """Run compiled code as it was written, because nothing of it can be seen; the next step is compiled again."""
    return _WITHOUT_COMPILATION


@cache
def modules_do_not_see(kind: type[TorchFunctionMode]) -> AbstractContextManager[object]:
    """Within this context, modules that ask whether an override is active do not count modes of this kind."""
    return _WhileAnyIsInside(partial(_not_counted, kind))


@contextmanager
def _not_counted(kind: type[TorchFunctionMode]) -> Iterator[None]:
    asked = torch.overrides.has_torch_function

    def has_torch_function(args: Iterable[Any]) -> bool:
        offers_itself = "handle_torch_function" in sys._getframe(1).f_code.co_names
        if offers_itself or any(not isinstance(mode, kind) for mode in _get_current_function_mode_stack()):
            return bool(asked(args))
        return any(_overrides(type(arg)) for arg in args)

    backward = torch.autograd.backward
    torch.overrides.has_torch_function = has_torch_function
    if "handle_torch_function" not in backward.__code__.co_names:
        torch.autograd.backward = _offered(backward)
    try:
        yield
    finally:
        torch.overrides.has_torch_function, torch.autograd.backward = asked, backward


def _offered(backward: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.autograd.backward`` of old releases of torch, which do not offer it to modes; checkpoints call it."""

    @wraps(backward)
    def offer(*args: Any, **kwargs: Any) -> Any:
        if not (torch._C._is_torch_function_enabled() and _get_current_function_mode_stack()):
            return backward(*args, **kwargs)
        return torch.overrides.handle_torch_function(backward, (), *args, **kwargs)

    return offer


def _overrides(kind: type) -> bool:
    own = getattr(kind, "__torch_function__", None)
    return kind is not Tensor and own is not None and own is not torch._C._disabled_torch_function_impl
