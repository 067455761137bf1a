"""The parameters and buffers of a module, found in one walk."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

__all__ = ["parameters_and_buffers", "unwrapped"]

_OF_ROOT = tuple((name, getattr(nn.Module, name)) for name in ("named_parameters", "named_buffers", "_named_members"))
_OF_EACH = nn.Module.named_modules


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's module, where ``fabric.setup`` has wrapped it: parameters have the names that they have in it."""
    inner: Any = module.module if type(module).__name__ == "_FabricModule" else module
    return inner


def parameters_and_buffers(module: nn.Module) -> tuple[dict[str, nn.Parameter], list[Tensor]]:
    """``dict(module.named_parameters())`` and ``list(module.buffers())``, which walk through the modules once each."""
    parameters: dict[str, nn.Parameter] = {}
    buffers: list[Tensor] = []
    own = any(getattr(getattr(module, name), "__func__", None) is not known for name, known in _OF_ROOT)
    if own or not _walk(module, "", _Seen(), parameters, buffers):
        return dict(module.named_parameters()), list(module.buffers())
    return parameters, buffers


class _Seen:
    """The ids of what was met; apart by kind, for a parameter may be a buffer of another module, too."""

    __slots__ = ("buffers", "modules", "parameters")

    def __init__(self) -> None:
        self.modules: set[int] = set()
        self.parameters: set[int] = set()
        self.buffers: set[int] = set()


def _walk(
    module: nn.Module, prefix: str, seen: _Seen, parameters: dict[str, nn.Parameter], buffers: list[Tensor]
) -> bool:
    """Add what a module holds that was not met before; false where one of the modules lists its parts itself."""
    if getattr(module.named_modules, "__func__", None) is not _OF_EACH:
        return False
    seen.modules.add(id(module))
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in seen.parameters:
            seen.parameters.add(id(parameter))
            parameters[prefix + name] = parameter
    for buffer in module._buffers.values():
        if buffer is not None and id(buffer) not in seen.buffers:
            seen.buffers.add(id(buffer))
            buffers.append(buffer)
    for name, part in module._modules.items():
        if part is None or id(part) in seen.modules:
            continue
        if not _walk(part, f"{prefix}{name}.", seen, parameters, buffers):
            return False
    return True
