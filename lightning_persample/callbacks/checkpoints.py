"""The weights that gradients are collected at, with their fingerprints and the state of Adam."""

from __future__ import annotations

import copy
import hashlib
import inspect
import os
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from lightning_persample.callbacks.lightning_internals import is_lightning_module, optimizers_of
from lightning_persample.capture.record import listed
from lightning_persample.errors import OptionError, UnsupportedError
from lightning_persample.influence.tracin import adam_direction
from lightning_persample.reference.untouched import replaced
from lightning_persample.torch_internals import COMPILED


def _fingerprint(value: Any) -> str:
    """The fingerprint of tensors, and of what mappings and lists of them hold."""
    digest = hashlib.sha256()
    _add(digest, value)
    return digest.hexdigest()[:16]


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if plain.numel():  # an empty one may have strides that no view takes
            digest.update(plain.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        for key, each in value.items():
            digest.update(f"{key!r}:".encode())
            _add(digest, each)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)} ".encode())
        for each in value:
            _add(digest, each)
    else:
        digest.update(f"{value!r} ".encode())


def fingerprint_of_data(dataset: Any) -> str | None:
    """The fingerprint of a dataset whose content can be known cheaply and exactly."""
    kind = type(dataset)  # a subclass may give other rows
    if kind is TensorDataset:
        are_plain = all(
            isinstance(each, Tensor) and each.layout is torch.strided and not each.is_quantized
            for each in dataset.tensors
        )
        return f"tensors {_fingerprint(dataset.tensors)}" if are_plain else None
    if kind is Subset:
        of_all, indices = fingerprint_of_data(dataset.dataset), np.asarray(dataset.indices)
        if of_all is None or indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
            return None
        return f"subset {_fingerprint([of_all, torch.from_numpy(indices.astype(np.int64))])}"
    if kind is ConcatDataset:
        parts = [fingerprint_of_data(part) for part in dataset.datasets]
        return None if None in parts else f"concat {_fingerprint(parts)}"
    fingerprint = getattr(dataset, "_fingerprint", None)
    return fingerprint if kind.__module__.partition(".")[0] == "datasets" and isinstance(fingerprint, str) else None


@contextmanager
def requiring_gradients(module: nn.Module, wanted: Mapping[str, bool]) -> Iterator[None]:
    """Let parameters of a module require gradients or not, and put all back afterwards."""
    before = {parameter: parameter.requires_grad for parameter in module.parameters()}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(wanted.get(name, False))
    try:
        yield
    finally:
        for parameter, required in before.items():
            parameter.requires_grad_(required)


_NAMED = 4
# What torch's Adam and AdamW keep, and what no other optimizer does: RAdam has their state, but other options.
_REQUIRED = {"step", "exp_avg", "exp_avg_sq"}
_STATE = {*_REQUIRED, "max_exp_avg_sq"}
_OPTIONS = {"betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"}


Direction: TypeAlias = Callable[[Tensor], Tensor]
"""What Adam's next step would go along, were a sample's gradient that of the step; (B, *shape) -> (B, *shape)."""


def adam_directions(
    checkpoint: Mapping[str, Any] | None,
    module: nn.Module,
    trainer: Trainer,
    names: Collection[str],
    requires_grad: Mapping[str, bool],
) -> dict[str, Direction]:
    """The direction of each parameter."""
    # The state in a checkpoint counts parameters through. Which one is which the names say that an optimizer of
    # named parameters saves, else by the order that the Trainer's optimizers have, or those of `configure_optimizers`.
    states = [] if checkpoint is None else checkpoint.get("optimizer_states") or []
    if not states:
        raise UnsupportedError(
            "direction='adam' needs the state of the optimizer, which a checkpoint does not have: pass the path of one "
            "that ModelCheckpoint saved, without save_weights_only"
        )
    held = sorted({key for state in states for each in state["state"].values() for key in each})
    if not {"exp_avg", "exp_avg_sq"} <= set(held):
        has_not_stepped = not held and any("betas" in group for state in states for group in state["param_groups"])
        raise UnsupportedError(
            "direction='adam': the optimizer of the checkpoint keeps no Adam state (its state holds "
            f"{', '.join(held) or 'nothing'}): "
            + ("it has made no step yet, pass a later checkpoint" if has_not_stepped else "pass one of Adam or AdamW")
        )
    parameters = dict(module.named_parameters())
    found: dict[str, Direction] = {}
    orders = _orders(states, module, trainer, requires_grad)
    for state, order in zip(states, orders, strict=True):
        for group, group_names in zip(state["param_groups"], order, strict=True):
            for number, name in zip(group["params"], group_names, strict=True):
                if name in names and number in state["state"]:
                    found[name] = _direction_of(name, state["state"][number], group, parameters[name])
    missing = [name for name in names if name not in found]
    if missing:
        raise UnsupportedError(
            f"direction='adam': the optimizer of the checkpoint has no state of {listed(missing, _NAMED)}, which it "
            "has not stepped yet, or does not have: leave them out with parameters=[...]"
        )
    return found


def _orders(
    states: Sequence[Mapping[str, Any]], module: nn.Module, trainer: Trainer, requires_grad: Mapping[str, bool]
) -> list[list[list[str]]]:
    """By optimizer and group the names of the parameters, in the order of the state."""
    if all("param_names" in group for state in states for group in state["param_groups"]):
        return [[_names_of_module(group["param_names"], module) for group in state["param_groups"]] for state in states]
    places = {id(parameter): name for name, parameter in module.named_parameters()}

    def order_of(optimizer: Any) -> list[list[str]]:
        return [[places.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]

    orders = [order for order in map(order_of, trainer.optimizers) if all(map(all, order))]
    if not orders and is_lightning_module(module):
        orders = [order_of(each) for each in _configured(module, trainer, requires_grad)]
    sizes = [[len(group["params"]) for group in state["param_groups"]] for state in states]
    now = [[len(group) for group in order] for order in orders]
    if sizes != now:
        raise UnsupportedError(
            f"direction='adam': the optimizers of the checkpoint have groups of {sizes} parameters, but those of the "
            f"module have {now}, so that nobody knows which state is whose: give the module the optimizers of its "
            "training, or save names with them (torch.optim.Adam(module.named_parameters()))"
        )
    return orders


def _configured(module: LightningModule, trainer: Trainer, requires_grad: Mapping[str, bool]) -> list[Any]:
    def refuse() -> None:
        raise UnsupportedError(
            "direction='adam' asks configure_optimizers which parameter each state is of, but that of "
            f"{type(module).__name__} needs the training data (trainer.estimated_stepping_batches), which are absent: "
            "pass the module that was trained, and the Trainer of its fit, trainer=...; or save names with the states, "
            "torch.optim.Adam(module.named_parameters())"
        )

    # without data it would give a number of -1 steps
    with replaced(vars(trainer.fit_loop), {"setup_data": refuse}), requiring_gradients(module, requires_grad):
        return optimizers_of(module.configure_optimizers())


def _names_of_module(names: Sequence[str], module: nn.Module) -> list[str]:
    """The names as the module has them: an optimizer may have been given those of a part of it."""
    known = [name for name, _ in module.named_parameters()]
    places = []
    for name in names:
        same = [each for each in known if each == name] or [each for each in known if each.endswith(f".{name}")]
        if len(same) != 1:
            raise UnsupportedError(
                f"direction='adam': the optimizer of the checkpoint names a parameter `{name}`, which is "
                f"{'none' if not same else f'one of {len(same)}'} of the module"
            )
        places += same
    return places


def _direction_of(name: str, state: Mapping[str, Any], group: Mapping[str, Any], parameter: Tensor) -> Direction:
    foreign = sorted(set(state) - _STATE)
    lacking = sorted(_REQUIRED - set(state)) + sorted(_OPTIONS - set(group))
    if foreign or lacking:
        said = f"it also keeps {', '.join(foreign)}" if foreign else f"it does not keep {', '.join(lacking)}"
        raise UnsupportedError(f"direction='adam': the optimizer of `{name}` is not torch's Adam or AdamW ({said})")
    if group.get("maximize"):
        raise UnsupportedError(f"direction='adam': the optimizer of `{name}` maximizes, which has no such direction")
    if state["exp_avg"].shape != parameter.shape:
        raise UnsupportedError(
            f"direction='adam': the state of `{name}` has shape {tuple(state['exp_avg'].shape)}, but the parameter has "
            f"{tuple(parameter.shape)}: the optimizers of the module are not in the order of the checkpoint's"
        )
    decay = float(group.get("weight_decay", 0.0))
    if decay and "decoupled_weight_decay" not in group:
        raise UnsupportedError(
            f"direction='adam': the checkpoint does not say whether weight_decay={decay} of `{name}` is that of "
            "Adam or of AdamW (torch < 2.7): take one of a newer torch"
        )
    has_largest = group.get("amsgrad") and "max_exp_avg_sq" in state
    names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if has_largest else ()))
    options: dict[str, Any] = {each: state[each].detach().to(parameter.device) for each in names}
    options |= {"step": float(state["step"]), "betas": tuple(map(float, group["betas"])), "eps": float(group["eps"])}
    if group.get("decoupled_weight_decay"):  # that of AdamW has nothing to do with the gradient
        decay = 0.0

    def direction(grads: Tensor) -> Tensor:
        if decay:
            grads = grads + decay * parameter.detach().to(grads.dtype)
        return adam_direction(grads, **options)

    return direction


Source: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any]"


class Checkpoints:
    """Reads checkpoints, one at a time: paths and state dicts; None is the module as it is."""

    def __init__(self, sources: Sequence[Source | None], weights_only: bool | None) -> None:
        self._sources = sources
        self._weights_only = weights_only
        self._given: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self._sources)

    def read(self, trainer: Trainer, place: int) -> Mapping[str, Any] | None:
        """What a checkpoint holds."""
        source = self._sources[place]
        if source is None or isinstance(source, Mapping):
            return source
        where = f"checkpoints[{place}]={os.fspath(source)!r}"
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
            raise OptionError(f"{where}: no such file") from None
        except pickle.UnpicklingError as error:
            kinds = "it holds other things than tensors and plain values (hyperparameters?), or is cut off"
            raise OptionError(f"{where} cannot be read: {kinds}; if you trust it, pass weights_only=False") from error
        except (OSError, EOFError, RuntimeError) as error:  # (a broken archive is a RuntimeError of torch)
            raise OptionError(f"{where} cannot be read: {error}") from error
        if not isinstance(found, Mapping):
            raise OptionError(
                f"{where} holds a {type(found).__name__}; allowed is what a Trainer saved, or a state dict"
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
                f"checkpoints[{place}] is of another module: its weights are {listed(weights, _NAMED)}, but those of "
                f"{type(module).__name__} are {listed(own, _NAMED)}, and none is alike: {_renamed(weights, own)}"
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
            source = self._sources[place]
            found.append({
                "step": None if checkpoint is None else checkpoint.get("global_step"),
                "learning_rate": None if checkpoint is None else _learning_rate_of(checkpoint),
                "path": None if source is None or isinstance(source, Mapping) else str(Path(source)),
                "weights": _fingerprint(dict(sorted(each for each in weights.items() if isinstance(each[1], Tensor)))),
            })  # fmt: skip
            if has_optimizer and checkpoint is not None:
                found[-1]["optimizer"] = _fingerprint(checkpoint.get("optimizer_states"))
        return tuple(found)


def _learning_rate_of(checkpoint: Mapping[str, Any]) -> float | None:
    """The learning rate that a Trainer's checkpoint has for all parameters, or None."""
    states = checkpoint.get("optimizer_states", ()) if _is_of_a_trainer(checkpoint) else ()
    rates = {float(group["lr"]) for state in states for group in state["param_groups"]}
    return rates.pop() if len(rates) == 1 else None


def _is_of_a_trainer(checkpoint: Mapping[str, Any]) -> bool:
    return isinstance(checkpoint.get("state_dict"), Mapping)


def _weights(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    return checkpoint["state_dict"] if _is_of_a_trainer(checkpoint) else checkpoint


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
    lacks, adds = ([n for n in a if n not in b] for a, b in ((own, weights), (weights, own)))
    names = [f"it lacks {listed(lacks, _NAMED)}"] if lacks else []
    names += [f"it has {listed(adds, _NAMED)}, which the module does not have"] if adds else []
    return ", ".join(shapes[:_NAMED] + more + names)


def _fitting(weights: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """Weights without what torch.compile and DistributedDataParallel put before names, where then all of them fit."""
    own = module.state_dict().keys()
    for drops_module, drops_compiled in ((False, False), (False, True), (True, False), (True, True)):
        named = {}
        for name, value in weights.items():
            kept = name.replace(f"{COMPILED}.", "") if drops_compiled else name
            named[kept.removeprefix("module.") if drops_module else kept] = value
        if len(named) == len(weights) and named.keys() <= own:
            return named
    return weights
