"""The parameters and buffers of a module, found in one walk, and calls of it with others in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lightning_persample.errors import PerSampleError, UnsupportedError

__all__ = ["by_place", "check_module", "parameters_and_buffers", "recurrent_layers_kept", "trainable", "unwrapped"]

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


def check_module(module: object) -> None:
    """Raise a `PerSampleError` for what is not a module."""
    if not isinstance(module, nn.Module):
        raise PerSampleError(f"module must be a torch.nn.Module; got {type(module).__name__}")


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name; an `UnsupportedError` where one is not initialized."""
    lazy = [name for name, p in module.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise UnsupportedError(f"parameter `{lazy[0]}` is not initialized yet; run one batch through the module first")
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def by_place(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name, for every place that holds what they replace, once each."""
    # A layer that is held twice has one place and two names: of those, `functional_call` would put back one alone.
    named: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    replacing = {id(named[name]): tensor for name, tensor in tensors.items()}
    return {
        f"{path}.{name}" if path else name: replacing[id(held)]
        for path, part in module.named_modules()
        for name, held in (part._parameters | part._buffers).items()
        if id(held) in replacing
    }


@contextmanager
def recurrent_layers_kept(module: nn.Module) -> Iterator[None]:
    """Recurrent layers hold their weights a second time, where `functional_call` leaves what it had put in place."""
    names = ("_flat_weights", "_flat_weight_refs")
    layers = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    kept = [{name: vars(layer)[name] for name in names if name in vars(layer)} for layer in layers]
    try:
        yield
    finally:
        for layer, values in zip(layers, kept, strict=True):
            vars(layer).update(values)
