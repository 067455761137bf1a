"""The state of Adam for each parameter by name, from the checkpoint of a Trainer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import _configure_optimizers
from torch import Tensor, nn

from lightning_persample.callbacks._lightning_names import is_lightning_module
from lightning_persample.callbacks._requires_grad import requiring_gradients
from lightning_persample.errors import UnsupportedError
from lightning_persample.influence.less import adam_direction

__all__ = ["AdamState", "adam_states"]

_NAMED = 8
# What torch's Adam and AdamW keep, and what no other optimizer does: RAdam has their state, but other options.
_REQUIRED = {"step", "exp_avg", "exp_avg_sq"}
_STATE = {*_REQUIRED, "max_exp_avg_sq"}
_OPTIONS = {"betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"}


@dataclass(frozen=True, eq=False)
class AdamState:
    """What Adam knows of one parameter after some steps.

    Attributes:
        exp_avg: the mean of its gradients.
        exp_avg_sq: the mean of their squares.
        max_exp_avg_sq: the largest such mean, with ``amsgrad=True``, else None.
        step: how many steps it has made.
        betas: the optimizer's.
        eps: the optimizer's.
        weight_decay: what the optimizer adds to a gradient, as a factor of the weights; 0 for AdamW.
    """

    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    step: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    def direction(self, grads: Tensor, parameter: Tensor) -> Tensor:
        """What the next step would go along, were a sample's gradient that of the step."""
        # grads (B, *shape) -> (B, *shape)
        if self.weight_decay:
            grads = grads + self.weight_decay * parameter.detach().to(grads.dtype)
        return adam_direction(
            grads,
            self.exp_avg,
            self.exp_avg_sq,
            self.step,
            self.betas,
            self.eps,
            max_exp_avg_sq=self.max_exp_avg_sq,
        )


def adam_states(
    checkpoint: Mapping[str, Any] | None,
    module: nn.Module,
    trainer: Trainer,
    names: Collection[str],
    requires_grad: Mapping[str, bool],
) -> dict[str, AdamState]:
    """The state of each parameter."""
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
    found: dict[str, AdamState] = {}
    orders = _orders(states, module, trainer, requires_grad)
    for state, order in zip(states, orders, strict=True):
        for group, group_names in zip(state["param_groups"], order, strict=True):
            for number, name in zip(group["params"], group_names, strict=True):
                if name in names and number in state["state"]:
                    found[name] = _state_of(name, state["state"][number], group, parameters[name])
    missing = [name for name in names if name not in found]
    if missing:
        shown = ", ".join(f"`{name}`" for name in missing[:_NAMED])
        more = f" and {len(missing) - _NAMED} more" if missing[_NAMED:] else ""
        raise UnsupportedError(
            f"direction='adam': the optimizer of the checkpoint has no state of {shown}{more}, which it has not "
            "stepped yet, or does not have: leave them out with parameters=[...]"
        )
    return found


def _orders(
    states: Sequence[Mapping[str, Any]], module: nn.Module, trainer: Trainer, requires_grad: Mapping[str, bool]
) -> list[list[list[str]]]:
    """By optimizer and group the names of the parameters, in the order of the state."""
    if all("param_names" in group for state in states for group in state["param_groups"]):
        names = [list(group["param_names"]) for state in states for group in state["param_groups"]]
        own = _names_of_module(names, module)
        counts = [len(state["param_groups"]) for state in states]
        starts = [sum(counts[:place]) for place in range(len(counts))]
        return [own[start : start + count] for start, count in zip(starts, counts, strict=True)]
    places = {id(parameter): name for name, parameter in module.named_parameters()}
    optimizers = [each for each in trainer.optimizers if _is_of(each, places)]
    if not optimizers and is_lightning_module(module):
        optimizers = _configured(module, trainer, requires_grad)
    sizes = [[len(group["params"]) for group in state["param_groups"]] for state in states]
    now = [[len(group["params"]) for group in each.param_groups] for each in optimizers]
    if sizes != now:
        raise UnsupportedError(
            f"direction='adam': the optimizers of the checkpoint have groups of {sizes} parameters, but those of the "
            f"module have {now}, so that nobody knows which state is whose: give the module the optimizers of its "
            "training, or save names with them (torch.optim.Adam(module.named_parameters()))"
        )
    return [
        [[places.get(id(parameter), "") for parameter in group["params"]] for group in each.param_groups]
        for each in optimizers
    ]


def _configured(module: LightningModule, trainer: Trainer, requires_grad: Mapping[str, bool]) -> list[Any]:
    def refuse() -> None:
        raise UnsupportedError(
            "direction='adam' asks configure_optimizers which parameter each state is of, but that of "
            f"{type(module).__name__} needs the training data (trainer.estimated_stepping_batches), which are absent: "
            "pass the module that was trained, and the Trainer of its fit, trainer=...; or save names with the states, "
            "torch.optim.Adam(module.named_parameters())"
        )

    loop: Any = trainer.fit_loop
    loop.setup_data = refuse  # without data it would give a number of -1 steps
    try:
        with requiring_gradients(module, requires_grad):
            configured: Any = module.configure_optimizers()
    finally:
        del loop.setup_data
    return list(_configure_optimizers(configured)[0])


def _is_of(optimizer: Any, places: Mapping[int, str]) -> bool:
    return all(id(parameter) in places for group in optimizer.param_groups for parameter in group["params"])


def _names_of_module(groups: list[list[str]], module: nn.Module) -> list[list[str]]:
    """The names as the module has them: an optimizer may have been given those of a part of it."""
    known = [name for name, _ in module.named_parameters()]
    found = []
    for group in groups:
        places = []
        for name in group:
            same = [each for each in known if each == name] or [each for each in known if each.endswith(f".{name}")]
            if len(same) != 1:
                raise UnsupportedError(
                    f"direction='adam': the optimizer of the checkpoint names a parameter `{name}`, which is "
                    f"{'none' if not same else f'one of {len(same)}'} of the module"
                )
            places += same
        found.append(places)
    return found


def _state_of(name: str, state: Mapping[str, Any], group: Mapping[str, Any], parameter: Tensor) -> AdamState:
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
    largest = state.get("max_exp_avg_sq") if group.get("amsgrad") else None
    return AdamState(
        _on(state["exp_avg"], parameter),
        _on(state["exp_avg_sq"], parameter),
        None if largest is None else _on(largest, parameter),
        float(state["step"]),
        (float(group["betas"][0]), float(group["betas"][1])),
        float(group["eps"]),
        0.0 if group.get("decoupled_weight_decay") else decay,
    )


def _on(state: Tensor, parameter: Tensor) -> Tensor:
    return state.detach().to(parameter.device)
