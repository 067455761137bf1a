"""The parameters and buffers of a module, found in one walk."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

__all__ = ["parameters_and_buffers"]

_OF_ROOT = tuple((name, getattr(nn.Module, name)) for name in ("named_parameters", "named_buffers", "_named_members"))
_OF_EACH = nn.Module.named_modules


def parameters_and_buffers(module: nn.Module) -> tuple[dict[str, nn.Parameter], list[Tensor]]:
    """``dict(module.named_parameters())`` and ``list(module.buffers())``, which walk through the modules once each.

    Args:
        module: the module; where a class of it has ways of its own to list them, these are asked.

    Returns:
        The parameters by name, and the buffers.
    """
    parameters: dict[str, nn.Parameter] = {}
    buffers: list[Tensor] = []
    own = any(getattr(getattr(module, name), "__func__", None) is not known for name, known in _OF_ROOT)
    if own or not _walk(module, "", set(), parameters, buffers):
        return dict(module.named_parameters()), list(module.buffers())
    return parameters, buffers


def _walk(
    module: nn.Module, prefix: str, seen: set[Any], parameters: dict[str, nn.Parameter], buffers: list[Tensor]
) -> bool:
    """Add what a module holds that was not met before; false where one of the modules lists its parts itself."""
    if getattr(module.named_modules, "__func__", None) is not _OF_EACH:
        return False
    seen.add(module)
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter not in seen:
            seen.add(parameter)
            parameters[prefix + name] = parameter
    for buffer in module._buffers.values():
        if buffer is not None and buffer not in seen:
            seen.add(buffer)
            buffers.append(buffer)
    for name, part in module._modules.items():
        if part is not None and part not in seen and not _walk(part, f"{prefix}{name}.", seen, parameters, buffers):
            return False
    return True
