"""Of which backward passes ``.grad`` of each parameter is made, read from ``.grad`` itself."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_persample.callbacks._gradient_entries import entries

__all__ = ["GradientOrigins"]


@dataclass(eq=False)
class _Held:
    """What ``.grad`` of one parameter was when it was last looked at.

    Attributes:
        parameter: the parameter.
        grad: the tensor in ``.grad``; None where there was none.
        version: how often it had been written to.
        sizes: its largest entry and two norms, (3,); None where they do not matter.
        of: the numbers of the backward passes that are in it.
        doubtful: those of them that may have been dropped.
        replaced: another tensor than the one that backward filled was put there, or other numbers were written to it.
    """

    parameter: nn.Parameter
    grad: weakref.ref[Tensor] | None = None
    version: int = 0
    sizes: Tensor | None = None
    of: set[int] = field(default_factory=set)
    doubtful: set[int] = field(default_factory=set)
    replaced: bool = False

    def is_same(self, grad: Tensor) -> bool:
        """Whether this is the tensor of the last look."""
        return self.grad is not None and self.grad() is grad

    def drop(self, *, replaced: bool = False) -> None:
        """No backward is in it any more."""
        self.of, self.doubtful, self.replaced = set(), set(), replaced

    def note(self, sizes: Tensor | None = None) -> None:
        """Remember what is there now."""
        grad = self.parameter.grad
        self.grad, self.version = (None, 0) if grad is None else (weakref.ref(grad), grad._version)
        self.sizes = _sizes(grad) if sizes is None and self.of and grad is not None else sizes


class GradientOrigins:
    """Follows ``.grad`` through a training step; to be looked at before and after each backward, and at each step.

    A gradient that is None has been dropped, and so has one that was not zero and is: `zero_grad` has two forms, and
    users have more. What multiplies it (clipping, unscaling) leaves it one of the same samples. Where other numbers are
    written to it, as those of several backward passes merged by hand, it is not known of which.

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
            if grad is not None and held.is_same(grad) and held.of and held.sizes is not None:
                before.append(held.sizes)
                after.append((held, _sizes(grad)))
                continue
            if grad is None or not held.is_same(grad):
                held.drop(replaced=grad is not None)
            held.note()
        if not after:
            return
        found = torch.stack([each.to(before[0].device) for each in (*before, *(now for _, now in after))]).tolist()
        for (held, now), was, is_now in zip(after, found, found[len(before) :], strict=False):
            if was[0] and not is_now[0]:
                held.drop()
            elif held.parameter.grad is not None and held.parameter.grad._version != held.version:
                if not is_now[0]:
                    held.doubtful |= held.of  # setting zeros to zero and scaling them look the same
                elif not _are_multiples(was, is_now):
                    held.drop(replaced=True)
            held.note(now)

    def add(self, backward: int, reached: Collection[str]) -> None:
        """A backward has run."""
        for name, held in self._held.items():
            if name in reached and held.parameter.grad is not None:
                held.of.add(backward)
            held.note()

    def holders(self, backward: int, names: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
        """The parameters among these whose ``.grad`` holds a backward, and those for which that is not known."""
        found = {name for name in names if backward in self._held[name].of}
        doubtful = frozenset(name for name in found if backward in self._held[name].doubtful)
        return frozenset(found - doubtful), doubtful

    def replaced(self, names: Collection[str]) -> list[str]:
        """The parameters among these whose ``.grad`` is a tensor that no backward filled."""
        return [name for name, held in self._held.items() if name in names and held.replaced]


def _sizes(grad: Tensor) -> Tensor:
    """Largest entry, Euclidean norm and sum of the absolute values of a gradient; of a sharded one, of its shard."""
    flat = entries(grad).flatten()
    if flat.numel() == 0:
        return torch.zeros(3, device=flat.device)
    wide = torch.promote_types(flat.dtype, torch.float32)
    return torch.stack([torch.linalg.vector_norm(flat, order, dtype=wide) for order in (float("inf"), 2, 1)])


def _are_multiples(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether one factor leads from one gradient's sizes to the other's, as far as rounding lets see."""
    if not all(map(math.isfinite, (*before, *after))):
        return True  # of what overflowed nothing can be said, and nothing is averaged
    factors = [now / was if was else math.nan for was, now in zip(before, after, strict=True)]
    return all(math.isclose(factor, factors[0], rel_tol=1e-3) for factor in factors)
