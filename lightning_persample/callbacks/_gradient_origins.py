"""Of which backward passes ``.grad`` of each parameter is made, read from ``.grad`` itself."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

__all__ = ["GradientOrigins"]


@dataclass(eq=False)
class _Held:
    """What ``.grad`` of one parameter was when it was last looked at.

    Attributes:
        parameter: the parameter.
        grad: the tensor in ``.grad``; None where there was none.
        version: how often it had been written to.
        filled: whether it had an entry other than zero, as a tensor without axes; None where that does not matter.
        of: the numbers of the backward passes that are in it.
        doubtful: those of them that may have been dropped.
        replaced: another tensor than the one that backward filled was put there.
    """

    parameter: nn.Parameter
    grad: weakref.ref[Tensor] | None = None
    version: int = 0
    filled: Tensor | None = None
    of: set[int] = field(default_factory=set)
    doubtful: set[int] = field(default_factory=set)
    replaced: bool = False

    def is_same(self, grad: Tensor) -> bool:
        """Whether this is the tensor of the last look."""
        return self.grad is not None and self.grad() is grad

    def drop(self, *, replaced: bool = False) -> None:
        """No backward is in it any more."""
        self.of, self.doubtful, self.replaced = set(), set(), replaced

    def note(self, filled: Tensor | None = None) -> None:
        """Remember what is there now."""
        grad = self.parameter.grad
        self.grad, self.version = (None, 0) if grad is None else (weakref.ref(grad), grad._version)
        self.filled = _is_filled(grad) if filled is None and self.of and grad is not None else filled


class GradientOrigins:
    """Follows ``.grad`` through a training step; to be looked at before and after each backward, and at each step.

    A gradient that is None has been dropped, and so has one that was not zero and is: `zero_grad` has two forms, and
    users have more. Whatever else is done to it in place (clipping, unscaling) leaves it one of the same samples.

    Args:
        parameters: by name.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._held = {name: _Held(parameter) for name, parameter in parameters}
        for held in self._held.values():
            held.note()

    def look(self) -> None:
        """Take note of what was dropped or replaced since the last look."""
        before: list[Tensor] = []
        after: list[tuple[_Held, Tensor]] = []
        for held in self._held.values():
            grad = held.parameter.grad
            if grad is not None and held.is_same(grad) and held.of and held.filled is not None:
                before.append(held.filled)
                after.append((held, _is_filled(grad)))
                continue
            if grad is None or not held.is_same(grad):
                held.drop(replaced=grad is not None)
            held.note()
        if not after:
            return
        flags = torch.stack([flag.to(before[0].device) for flag in (*before, *(now for _, now in after))]).tolist()
        for (held, now), was_filled, is_filled in zip(after, flags, flags[len(before) :], strict=False):
            if was_filled and not is_filled:
                held.drop()
            elif not is_filled and held.parameter.grad is not None and held.parameter.grad._version != held.version:
                held.doubtful |= held.of  # setting zeros to zero and scaling them look the same
            held.note(now)

    def add(self, backward: int, reached: Collection[str]) -> None:
        """A backward has run.

        Args:
            backward: its number.
            reached: the parameters whose ``.grad`` it added to.
        """
        for name, held in self._held.items():
            if name in reached and held.parameter.grad is not None:
                held.of.add(backward)
            held.note()

    def holders(self, backward: int, names: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
        """The parameters among these whose ``.grad`` holds a backward, and those for which that cannot be told."""
        found = {name for name in names if backward in self._held[name].of}
        doubtful = frozenset(name for name in found if backward in self._held[name].doubtful)
        return frozenset(found - doubtful), doubtful

    def replaced(self, names: Collection[str]) -> list[str]:
        """The parameters among these whose ``.grad`` is a tensor that no backward filled."""
        return [name for name, held in self._held.items() if name in names and held.replaced]


def _is_filled(grad: Tensor) -> Tensor:
    """Whether a gradient has an entry other than zero; of a sharded one what this process holds."""
    values: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    if values.layout == torch.sparse_coo:
        values = values._values()
    if values.numel() == 0:
        return torch.zeros((), dtype=torch.bool, device=values.device)
    return torch.linalg.vector_norm(values.detach(), float("inf")) != 0
