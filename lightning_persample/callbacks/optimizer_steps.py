"""Which backward passes are in ``.grad``, read from it itself, and whose parameters those are."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_persample.torch_internals import version_counter


def is_distributed(grad: Tensor) -> bool:
    """Whether a gradient is spread over devices."""
    return hasattr(grad, "placements")


def local(grad: Tensor) -> Tensor:
    """This process's shard of a gradient that is spread over devices, and any other gradient as it is; no graph."""
    own: Tensor = grad.to_local() if hasattr(grad, "placements") else grad  # type: ignore[attr-defined]
    return own.detach()


def entries(grad: Tensor) -> Tensor:
    """The entries that are stored here, those of a sparse gradient each once: a tensor of the same norms."""
    own = local(grad)
    return own.coalesce().values() if own.is_sparse else own


@dataclass(eq=False)
class _Seen:
    """What ``.grad`` of one parameter was when it was last looked at."""

    parameter: nn.Parameter
    grad: weakref.ref[Tensor] | None = None  # the tensor in ``.grad``
    version: int = 0  # how often it had been written to
    magnitudes: Tensor | None = None  # its largest entry and two norms, (3,); None where they do not matter
    of: set[int] = field(default_factory=set)  # the numbers of the backward passes that are in it
    doubtful: set[int] = field(default_factory=set)  # those of them that may have been dropped
    replaced: bool = False  # another tensor than backward filled was put there, or other numbers were written to it

    def is_same(self, grad: Tensor) -> bool:
        """Whether this is the tensor of the last look."""
        return self.grad is not None and self.grad() is grad

    def drop(self, *, replaced: bool = False) -> None:
        """No backward is in it any more."""
        self.of, self.doubtful, self.replaced = set(), set(), replaced

    def note(self, magnitudes: Tensor | None = None) -> None:
        """Remember what is there now."""
        grad = self.parameter.grad
        self.grad, self.version = (None, 0) if grad is None else (weakref.ref(grad), version_counter(grad))
        self.magnitudes = _magnitudes(grad) if magnitudes is None and self.of and grad is not None else magnitudes


class GradientOrigins:
    """Follows ``.grad`` through a training step; to be looked at before and after each backward, and at each step."""

    # A gradient that is None has been dropped, and so has one that was not zero and is: `zero_grad` has two forms, and
    # users have more. What multiplies it (clipping, unscaling) leaves it one of the same samples. Where other numbers
    # are written to it, as those of several backward passes merged by hand, it is not known of which.
    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._seen = {name: _Seen(parameter) for name, parameter in parameters}
        for seen in self._seen.values():
            seen.note()

    def look(self) -> None:
        """Take note of what was dropped or replaced since the last look."""
        before: list[Tensor] = []
        after: list[tuple[_Seen, Tensor]] = []
        for seen in self._seen.values():
            grad = seen.parameter.grad
            if grad is not None and seen.is_same(grad) and seen.of and seen.magnitudes is not None:
                before.append(seen.magnitudes)
                after.append((seen, _magnitudes(grad)))
                continue
            if grad is None or not seen.is_same(grad):
                seen.drop(replaced=grad is not None)
            seen.note()
        if not after:
            return
        found = torch.stack([each.to(before[0].device) for each in (*before, *(now for _, now in after))]).tolist()
        for (seen, now), was, is_now in zip(after, found, found[len(before) :], strict=False):
            if was[0] and not is_now[0]:
                seen.drop()
            elif seen.parameter.grad is not None and version_counter(seen.parameter.grad) != seen.version:
                if not is_now[0]:
                    seen.doubtful |= seen.of  # setting zeros to zero and scaling them look the same
                elif not _are_multiples(was, is_now):
                    seen.drop(replaced=True)
            seen.note(now)

    def add(self, backward: int, reached: Collection[str]) -> None:
        """A backward has run."""
        for name, seen in self._seen.items():
            if name in reached and seen.parameter.grad is not None:
                seen.of.add(backward)
            seen.note()

    def holders(self, backward: int, names: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
        """The parameters among these whose ``.grad`` holds a backward, and those for which that is not known."""
        found = {name for name in names if backward in self._seen[name].of}
        doubtful = frozenset(name for name in found if backward in self._seen[name].doubtful)
        return frozenset(found - doubtful), doubtful

    def replaced(self, names: Collection[str]) -> list[str]:
        """The parameters among these whose ``.grad`` is a tensor that no backward filled."""
        return [name for name, seen in self._seen.items() if name in names and seen.replaced]


def _magnitudes(grad: Tensor) -> Tensor:
    """Largest entry, Euclidean norm and sum of the absolute values of a gradient; of a sharded one, of its shard."""
    flat = entries(grad).flatten()
    if flat.numel() == 0:
        return torch.zeros(3, device=flat.device)
    wide = torch.promote_types(flat.dtype, torch.float32)
    return torch.stack([torch.linalg.vector_norm(flat, order, dtype=wide) for order in (float("inf"), 2, 1)])


def _are_multiples(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether one factor leads from one gradient's magnitudes to the other's, as far as rounding lets see."""
    if not all(map(math.isfinite, (*before, *after))):
        return True  # of what overflowed nothing can be said, and nothing is averaged
    factors = [now / was if was else math.nan for was, now in zip(before, after, strict=True)]
    return all(math.isclose(factor, factors[0], rel_tol=1e-3) for factor in factors)


def names_by_optimizer(
    pl_module: LightningModule, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[frozenset[str], ...]:
    """The names of the parameters that each optimizer holds."""
    parts = [{id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
    named = list(pl_module.named_parameters())
    return tuple(frozenset(name for name, parameter in named if id(parameter) in ids) for ids in parts)
