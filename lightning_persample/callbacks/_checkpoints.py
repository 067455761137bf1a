"""The weights that gradients are collected at: files, state dicts, or those that the module has."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_persample.errors import OptionError

__all__ = ["Checkpoints", "Source", "learning_rate_of"]

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

    def __len__(self) -> int:
        return 1 if self._sources is None else len(self._sources)

    def read(self, trainer: Trainer, place: int) -> Mapping[str, Any] | None:
        """What a checkpoint holds.

        Args:
            trainer: reads files.
            place: which checkpoint.

        Returns:
            The checkpoint of a Trainer, or a state dict; None for the module as it is.

        Raises:
            OptionError: there is no such file, or it cannot be read.
        """
        if self._sources is None:
            return None
        source = self._sources[place]
        if isinstance(source, Mapping):
            return source
        options = {} if self._weights_only is None else {"weights_only": self._weights_only}
        try:
            found: Mapping[str, Any] = trainer.strategy.load_checkpoint(os.fspath(source), **options)
        except FileNotFoundError:
            raise OptionError(f"checkpoints[{place}]={os.fspath(source)!r}: no such file") from None
        except OSError as error:
            raise OptionError(f"checkpoints[{place}]={os.fspath(source)!r} cannot be read: {error}") from error
        if not isinstance(found, Mapping):
            raise OptionError(
                f"checkpoints[{place}]={os.fspath(source)!r} holds a {type(found).__name__}; allowed is what a Trainer "
                "saved, or a state dict"
            )
        return found

    def load(self, checkpoint: Mapping[str, Any] | None, module: nn.Module) -> None:
        """Give a module the weights and buffers of a checkpoint.

        Args:
            checkpoint: what `read` gave.
            module: the module.
        """
        if checkpoint is None:
            return
        if _is_of_a_trainer(checkpoint) and isinstance(module, LightningModule):
            checkpoint = {**checkpoint, "state_dict": dict(checkpoint["state_dict"])}
            module.on_load_checkpoint(checkpoint)  # which may change it
        module.load_state_dict(_weights(checkpoint), strict=getattr(module, "strict_loading", True))

    def described(self, trainer: Trainer, module: nn.Module) -> tuple[dict[str, Any], ...]:
        """What a manifest says of the checkpoints.

        Args:
            trainer: reads files.
            module: the module as it is.

        Returns:
            For each its optimizer step and learning rate where they are known (those of several groups of parameters
            only if they agree), its path, and a fingerprint of its weights.

        Raises:
            OptionError: one of them holds no weights.
        """
        found = []
        for place in range(len(self)):
            checkpoint = self.read(trainer, place)
            weights = module.state_dict() if checkpoint is None else _weights(checkpoint)
            if not any(isinstance(value, Tensor) for value in weights.values()):
                raise OptionError(f"checkpoints[{place}] holds no weights: pass the path of one, or a state dict")
            source = None if self._sources is None else self._sources[place]
            found.append({
                "step": None if checkpoint is None else checkpoint.get("global_step"),
                "learning_rate": None if checkpoint is None else learning_rate_of(checkpoint),
                "path": None if source is None or isinstance(source, Mapping) else str(Path(source)),
                "weights": _fingerprint(weights),
            })  # fmt: skip
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


def _fingerprint(weights: Mapping[str, Any]) -> str:
    """Tells whether weights are the same as others, bit for bit."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
