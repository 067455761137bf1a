"""Lightning has two package names, `lightning` and `pytorch_lightning`, and under each a class of its own."""

from __future__ import annotations

import importlib
import sys
from typing import Any, TypeGuard

from lightning.pytorch import LightningModule

__all__ = ["is_a", "is_lightning_module", "lightning_module_for", "ranked_bases", "skips_hooks"]

_PACKAGES = ("lightning", "pytorch_lightning")


def ranked_bases(value: Any) -> list[str]:
    """The names of Lightning's own classes that a value is an instance of, the nearest first."""
    return [each.__name__ for each in type(value).__mro__ if each.__module__.partition(".")[0] in _PACKAGES]


def is_a(value: Any, *names: str) -> bool:
    """Whether a value is an instance of one of Lightning's classes of these names, under either package name."""
    return not set(names).isdisjoint(ranked_bases(value))


def is_lightning_module(value: Any) -> TypeGuard[LightningModule]:
    """Whether a value is a LightningModule under either package name."""
    return is_a(value, "LightningModule")


def lightning_module_for(trainer: Any) -> type[Any]:
    """The class LightningModule of the package that a Trainer is of: it runs no module of the other one."""
    packages = [each.__module__.partition(".")[0] for each in type(trainer).__mro__]
    package = next((each for each in packages if each in _PACKAGES), "lightning")
    found: type[Any] = importlib.import_module(package).LightningModule
    return found


def skips_hooks(trainer: Any) -> bool:
    """Whether a Trainer passes over hooks of callbacks that are None, as every version of Lightning so far does."""
    kind = next((each for each in type(trainer).__mro__ if each.__module__.partition(".")[0] in _PACKAGES), None)
    call = getattr(sys.modules.get(getattr(kind, "__module__", "")), "call", None)
    code = getattr(getattr(call, "_call_callback_hooks", None), "__code__", None)
    return "callable" in getattr(code, "co_names", ())
