"""The weights that gradients are collected at: files, state dicts, or those that the module has."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_persample.callbacks._fingerprints import fingerprint_of_states, fingerprint_of_weights
from lightning_persample.callbacks._lightning_names import is_lightning_module
from lightning_persample.errors import OptionError

__all__ = ["Checkpoints", "Source", "learning_rate_of"]

_NAMED = 4

Source: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any]"


class Checkpoints:
    """Reads checkpoints, one at a time.

    Args:
        sources: paths and state dicts; None is the module as it is, alone.
        weights_only: whether a file may hold nothing but tensors and plain values; None is Lightning's own choice.
    """

    def __init__(self, sources: tuple[Source, ...] | None, weights_only: bool | None) -> None:
        self._sources = sources
        self._weights_only = weights_only
        self._given: dict[str, Any] | None = None

    def __len__(self) -> int:
        return 1 if self._sources is None else len(self._sources)

    def read(self, trainer: Trainer, place: int) -> Mapping[str, Any] | None:
        """What a checkpoint holds."""
        if self._sources is None:
            return None
        source = self._sources[place]
        if isinstance(source, Mapping):
            return source
        options = {} if self._weights_only is None else {"weights_only": self._weights_only}
        try:
            inspect.signature(trainer.strategy.load_checkpoint).bind(source, **options)
        except TypeError:  # (Lightning before 2.6)
            raise OptionError(
                f"weights_only={self._weights_only}: `load_checkpoint` of {type(trainer.strategy).__name__} does not "
                "take it in this version of Lightning; leave it None, or upgrade Lightning"
            ) from None
        try:
            found: Mapping[str, Any] = trainer.strategy.load_checkpoint(os.fspath(source), **options)
        except FileNotFoundError:
            raise OptionError(f"checkpoints[{place}]={os.fspath(source)!r}: no such file") from None
        except pickle.UnpicklingError as error:
            kinds = "it holds other things than tensors and plain values (hyperparameters?), or is cut off"
            raise OptionError(
                f"checkpoints[{place}]={os.fspath(source)!r} cannot be read: {kinds}; if you trust it, pass "
                "weights_only=False"
            ) from error
        except (OSError, EOFError, RuntimeError) as error:  # (a broken archive is a RuntimeError of torch)
            raise OptionError(f"checkpoints[{place}]={os.fspath(source)!r} cannot be read: {error}") from error
        if not isinstance(found, Mapping):
            raise OptionError(
                f"checkpoints[{place}]={os.fspath(source)!r} holds a {type(found).__name__}; allowed is what a Trainer "
                "saved, or a state dict"
            )
        return found

    def load(self, place: int, checkpoint: Mapping[str, Any] | None, module: nn.Module) -> None:
        """Give a module the weights and buffers of a checkpoint."""
        # What a checkpoint lacks (``strict_loading=False``) is that of the module as it was given.
        if checkpoint is None:
            return
        is_strict = getattr(module, "strict_loading", True)
        if not is_strict and self._given is None:
            self._given = copy.deepcopy(dict(module.state_dict()))
        elif self._given is not None:
            module.load_state_dict(self._given)
        if _is_of_a_trainer(checkpoint) and is_lightning_module(module):
            checkpoint = {**checkpoint, "state_dict": dict(checkpoint["state_dict"])}
            module.on_load_checkpoint(checkpoint)  # which may change it
        weights, own = _fitting(_weights(checkpoint), module), module.state_dict()
        if not own.keys() & weights.keys():
            raise OptionError(
                f"checkpoints[{place}] is of another module: its weights are {_shown(weights)}, but those of "
                f"{type(module).__name__} are {_shown(own)}, and none is alike: {_renamed(weights, own)}"
            )
        try:
            module.load_state_dict(weights, strict=is_strict)
        except RuntimeError as error:
            raise OptionError(
                f"checkpoints[{place}] does not fit {type(module).__name__}: {_difference(weights, own) or error}; "
                "pass the module as it was when the checkpoint was saved, or checkpoints as state dicts that fit it"
            ) from error

    def described(self, trainer: Trainer, module: nn.Module, has_optimizer: bool) -> tuple[dict[str, Any], ...]:
        """What a manifest says of the checkpoints."""
        found = []
        for place in range(len(self)):
            checkpoint = self.read(trainer, place)
            weights = module.state_dict() if checkpoint is None else _fitting(_weights(checkpoint), module)
            if not any(isinstance(value, Tensor) for value in weights.values()):
                raise OptionError(f"checkpoints[{place}] holds no weights: pass the path of one, or a state dict")
            source = None if self._sources is None else self._sources[place]
            found.append({
                "step": None if checkpoint is None else checkpoint.get("global_step"),
                "learning_rate": None if checkpoint is None else learning_rate_of(checkpoint),
                "path": None if source is None or isinstance(source, Mapping) else str(Path(source)),
                "weights": fingerprint_of_weights(weights),
            })  # fmt: skip
            if has_optimizer and checkpoint is not None:
                found[-1]["optimizer"] = fingerprint_of_states(checkpoint.get("optimizer_states"))
        return tuple(found)


def learning_rate_of(checkpoint: Mapping[str, Any]) -> float | None:
    """The learning rate that a Trainer's checkpoint has for all parameters, or None."""
    states = checkpoint.get("optimizer_states", ()) if _is_of_a_trainer(checkpoint) else ()
    rates = {float(group["lr"]) for state in states for group in state["param_groups"]}
    return rates.pop() if len(rates) == 1 else None


def _is_of_a_trainer(checkpoint: Mapping[str, Any]) -> bool:
    return isinstance(checkpoint.get("state_dict"), Mapping)


def _weights(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    return checkpoint["state_dict"] if _is_of_a_trainer(checkpoint) else checkpoint


def _shown(weights: Mapping[str, Any]) -> str:
    names = [f"`{name}`" for name in weights]
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if names[_NAMED:] else "")


def _renamed(weights: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """How to give weights the names that a module has."""
    first = next(iter(own), "")
    prefix = next((name.removesuffix(first) for name in weights if first and name.endswith(f".{first}")), "")
    if not prefix or any(prefix + name not in weights for name in own):
        return "rename them"
    return (
        f"pass them without {prefix!r}, checkpoints=[{{name.removeprefix({prefix!r}): weight for name, weight in "
        f"torch.load(path)['state_dict'].items() if name.startswith({prefix!r})}}]"
    )


def _difference(weights: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Where weights are not those of a module: other shapes, and names that only one of them has."""
    shapes = [
        f"`{name}` has shape {tuple(weights[name].shape)} there and {tuple(value.shape)} in the module"
        for name, value in own.items()
        if isinstance(weights.get(name), Tensor) and isinstance(value, Tensor) and weights[name].shape != value.shape
    ]
    more = [f"{len(shapes) - _NAMED} more shapes differ"] if shapes[_NAMED:] else []
    lacks, adds = ({n: None for n in a if n not in b} for a, b in ((own, weights), (weights, own)))
    names = [f"it lacks {_shown(lacks)}"] if lacks else []
    names += [f"it has {_shown(adds)}, which the module does not have"] if adds else []
    return ", ".join(shapes[:_NAMED] + more + names)


def _fitting(weights: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """Weights without what torch.compile and DistributedDataParallel put before names, where then all of them fit."""
    own = module.state_dict().keys()
    for drops_module, drops_compiled in ((False, False), (False, True), (True, False), (True, True)):
        named = {}
        for name, value in weights.items():
            kept = name.replace("_orig_mod.", "") if drops_compiled else name
            named[kept.removeprefix("module.") if drops_module else kept] = value
        if len(named) == len(weights) and named.keys() <= own:
            return named
    return weights
