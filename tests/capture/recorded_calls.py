"""Which ops with a rule a model really calls, and with which arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch.overrides import TorchFunctionMode

from lightning_persample.capture.observing import decomposed, is_composite
from lightning_persample.rules import find_rule

__all__ = ["RecordedCalls"]


class RecordedCalls(TorchFunctionMode):
    """Notes every call of an op that has a rule, also inside torch's own Python functions.

    Attributes:
        calls: op and arguments by name, as the rule binds them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:
                return decomposed(func)(*args, **kwargs)
        rule = find_rule(func)
        bound = None if rule is None else rule.bind(args, kwargs)
        if bound is not None:
            self.calls.append((str(rule.op), bound))
        return func(*args, **kwargs)
