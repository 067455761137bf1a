"""The learning rate that a sample's gradient met, from the groups of parameters that the optimizers have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_persample.engine import PerSampleRecord

__all__ = ["LearningRates"]


class LearningRates:
    """Reads learning rates, cheaply where all parameters have the same.

    Args:
        pl_module: the module that is trained.
        optimizers: its optimizers.
    """

    def __init__(self, pl_module: LightningModule, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._module, self._optimizers = pl_module, optimizers
        self._sizes: list[int] = []
        self._groups: dict[str, int] = {}

    def of_record(self, record: PerSampleRecord) -> float | Tensor:
        """The learning rate eta of each sample, now.

        Args:
            record: the record of a backward.

        Returns:
            One number where all parameters with values have one learning rate; else (samples,) float64, for each sample
            ``sum_p eta_p ||g_p||^2 / ||g||^2``, with 0 for parameters of no optimizer and the largest where g is 0.
        """
        sizes: list[int] = []
        rates: list[float] = []
        for optimizer in self._optimizers:  # at every step: plain loops are the fastest
            for group in optimizer.param_groups:
                sizes.append(len(group["params"]))
                rates.append(float(group["lr"]))
        if sizes != self._sizes:  # a callback may add groups, or parameters to them, as layers thaw
            self._sizes, self._groups = sizes, self._places()
        if rates and rates.count(rates[0]) == len(rates) and self._groups.keys() >= record.sq_norms.keys():
            return rates[0]
        places = {name: self._groups.get(name) for name in record.names}
        by_name = {name: 0.0 if place is None else rates[place] for name, place in places.items()}
        different = set(by_name.values())
        if len(different) <= 1:
            return different.pop() if different else max(rates, default=0.0)
        return _effective(record.sq_norms, by_name)

    def _places(self) -> dict[str, int]:
        """The group of each parameter, by its place among those of all optimizers."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        places = {id(parameter): place for place, group in enumerate(groups) for parameter in group["params"]}
        named = self._module.named_parameters()
        return {name: places[id(parameter)] for name, parameter in named if id(parameter) in places}


def _effective(sq_norms: Mapping[str, Tensor], rates: Mapping[str, float]) -> Tensor:
    device = next(iter(sq_norms.values())).device
    squares = torch.stack([sq_norm.to(device).double() for sq_norm in sq_norms.values()])
    total = squares.sum(0)
    mean = (squares * squares.new_tensor([rates[name] for name in sq_norms])[:, None]).sum(0) / total
    return torch.where(total == 0, max(rates.values()), mean)
