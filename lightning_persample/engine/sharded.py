"""Parameters under `torch.distributed.fsdp.fully_shard`, which are other tensors inside a forward than outside of it.

Outside, a parameter is a `DTensor` that holds this process's shard; inside the forward of its module it is a plain
leaf with all entries, which gets this process's gradient and hands it on to be averaged. Both go by one name: what a
module holds at the moment of a call tells which parameter a tensor is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_persample.engine.collector import Collector
from lightning_persample.engine.failure import guard
from lightning_persample.engine.kinds import kind_of
from lightning_persample.engine.observed import operands_of
from lightning_persample.engine.weight import Weight

__all__ = ["ShardedParameters", "is_sharded", "sharded_elsewhere"]

_UNSEEN = (
    "its gradient came from a forward of a sharded module that cannot be seen: call the module itself, not a method"
)
_DISTRIBUTED = "it is a DTensor in the forward, too (tensor parallelism): a sample's gradient lies on several devices"


def is_sharded(module: nn.Module) -> bool:
    """Whether a part of the module went through ``fully_shard``."""
    return bool(_sharded_modules(module))


def sharded_elsewhere(module: nn.Module) -> list[str]:
    """The parameters that are distributed over devices, but not by ``fully_shard`` alone."""
    if not _has_processes() or "torch.distributed.tensor" not in sys.modules:
        return []
    from torch.distributed.tensor import DTensor, Shard

    gathered = {id(p) for part in _sharded_modules(module).values() for p in part.parameters()}
    return [
        name
        for name, p in module.named_parameters()
        if isinstance(p, DTensor)
        and (id(p) not in gathered or sum(isinstance(each, Shard) for each in p.placements) > 1)
    ]


class ShardedParameters:
    """Tells a capture which parameters the tensors are that appear in the forward of sharded modules.

    Args:
        module: the module whose parameters are followed.
        collector: knows the marks of tensors.
        adopt: takes the name and the tensor of each parameter found.

    Attributes:
        hooks: on the modules that gather parameters; none where there is nothing to find.
    """

    def __init__(self, module: nn.Module, collector: Collector, adopt: Callable[[str, Tensor], Weight]) -> None:
        self._module = module
        self._collector = collector
        self._adopt = adopt
        self._foreign: WeakTensorKeyDictionary | None = None
        self.hooks: list[RemovableHandle] = []
        self._shards: dict[str, nn.Parameter] = {}
        self._before_backward: dict[str, object] = {}
        if not _has_processes():
            return
        parts = _sharded_modules(module).values()
        if parts:  # what is computed from weights is needed after their memory was freed
            collector.keep = _copied
        unsharded = guard(self._unsharded, collector.fail)
        self.hooks = [part.register_forward_pre_hook(unsharded) for part in parts]  # behind fully_shard's own
        self._shards = {name: p for name, p in module.named_parameters() if p.requires_grad} if parts else {}
        for name in sharded_elsewhere(module):
            collector.refused.setdefault(name, _DISTRIBUTED)

    def find(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Adopt the parameters among the arguments of a call, and all that the module holds beside them."""
        if kind_of(function).op is None:
            return
        for tensor in operands_of(args, kwargs):
            if not isinstance(tensor, nn.Parameter) or not tensor.requires_grad or self._is_weight(tensor):
                continue
            if self._foreign is None:
                self._foreign = WeakTensorKeyDictionary()
            if not self._foreign.get(tensor):
                self._adopt_all()
                self._foreign[tensor] = not self._is_weight(tensor)

    def start_backward(self) -> None:
        """Remember the gradients of the shards."""
        self._before_backward = {name: _state(shard.grad) for name, shard in self._shards.items()}

    def refuse_unseen(self, got_gradient: Collection[str]) -> None:
        """After the backward, refuse the parameters whose gradient came from a forward that was not seen."""
        for name, shard in self._shards.items():
            if name not in got_gradient and _state(shard.grad) != self._before_backward[name]:
                self._collector.refused.setdefault(name, _UNSEEN)

    def close(self) -> None:
        """Remove every hook."""
        for handle in self.hooks:
            handle.remove()
        self.hooks.clear()

    def _adopt_all(self) -> None:
        from torch.distributed.tensor import DTensor

        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and not self._is_weight(parameter):
                weight = self._adopt(name, parameter)
                if isinstance(parameter, DTensor):
                    self._collector.refuse([weight], _DISTRIBUTED)

    def _is_weight(self, tensor: Tensor) -> bool:
        return isinstance(self._collector.marks.get(tensor), Weight)

    def _unsharded(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._adopt_all()


def _sharded_modules(module: nn.Module) -> dict[str, nn.Module]:
    if not _has_processes() or "torch.distributed.fsdp" not in sys.modules:  # (the import takes seconds)
        return {}
    from torch.distributed.fsdp import FSDPModule

    kind: type[nn.Module] = FSDPModule  # type: ignore[assignment]
    return {name: part for name, part in module.named_modules() if isinstance(part, kind)}


def _has_processes() -> bool:
    """Whether anything can be sharded: that needs a process group, if only of one process."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _state(grad: Tensor | None) -> object:
    """What changes with every gradient that is written or added."""
    local = getattr(grad, "_local_tensor", grad)
    return None if local is None else (id(local), local._version)
