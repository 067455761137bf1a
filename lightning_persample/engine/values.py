"""The values of a record, from what a backward has left of each weight."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from lightning_persample.engine.dispatch import Dispatcher
from lightning_persample.engine.failure import FAILURES, in_smaller_chunks, reason_of
from lightning_persample.engine.own_scale import Weighting, in_dtype_of, own_all, own_values
from lightning_persample.engine.parameters import WatchedParameters
from lightning_persample.engine.weight import Weight
from lightning_persample.errors import PerSampleError
from lightning_persample.gradients import SampleGradient, add_up

__all__ = ["Values", "has_value", "read_values", "why_no_factor"]


@dataclass
class Values:
    """By parameter what was asked for, of each sample's own loss."""

    sq_norms: dict[str, Tensor] = field(default_factory=dict)
    grad_samples: dict[str, Tensor] = field(default_factory=dict)
    square_sums: dict[str, Tensor] = field(default_factory=dict)
    structures: dict[str, SampleGradient] = field(default_factory=dict)


def has_value(weight: Weight) -> bool:
    """Whether a backward has left anything of a weight's per-sample gradient."""
    return weight.sq_norm is not None or bool(weight.contributions)


def read_values(
    watched: WatchedParameters,
    dispatcher: Dispatcher,
    names: Sequence[str],
    quantities: Collection[str],
    weighting: Weighting,
    scale: Tensor | None,
) -> Values:
    """The values of these parameters; the dispatcher is told of those that have none, and why.

    Args:
        watched: the parameters.
        dispatcher: collected the contributions.
        names: the parameters whose weights have something left.
        quantities: what is asked for.
        weighting: the loss is sum_i w_i l_i, see `own_values`; of the samples that are followed.
        scale: what the loss was multiplied by, one number; None where it was not.

    Returns:
        The values.
    """
    values, batch_size = Values(), dispatcher.batch_size
    with torch.no_grad():
        for name in names:
            weight = watched.weight(name)
            try:
                total = add_up(weight.contributions) if weight.contributions else None
                reason = watched.changed_by_hook(name, total)
                if reason is not None:
                    dispatcher.refuse([weight], reason)
                    continue
                values.sq_norms[name] = in_smaller_chunks(partial(_sq_norm_of, weight, total))
                if total is None:
                    continue
                if "grad_sample" in quantities:
                    dense = in_smaller_chunks(total.dense)
                    (own,) = own_values([dense], 1, weighting, batch_size, scale)
                    values.grad_samples[name] = in_dtype_of(weight.tensor, own)
                if "square_sum" in quantities:
                    squares = in_smaller_chunks(partial(_square_sum_of, total, weighting, batch_size, scale))
                    values.square_sums[name] = in_dtype_of(weight.tensor, squares)
                if "dot" in quantities:
                    values.structures[name] = total
            except FAILURES as error:
                dispatcher.refuse([weight], reason_of(error, f"the sum of the uses of `{name}`"))
        own_sq_norms = own_all(list(values.sq_norms.values()), weighting, batch_size, scale)
    for name, own in zip(values.sq_norms, own_sq_norms, strict=True):
        values.sq_norms[name] = in_dtype_of(watched.weight(name).tensor, own)
    return values


def why_no_factor(dispatcher: Dispatcher, weighting: Weighting) -> str:
    """Why ``.grad`` did not get one number times the sum of the samples' own gradients, or "" where it did."""
    if dispatcher.penalized:
        names = ", ".join(f"`{name}`" for name in sorted(dispatcher.penalized)[:3])
        return f"the loss has a term that belongs to no sample, made of {names}"
    if dispatcher.not_additive:
        return next(iter(dispatcher.not_additive))
    if isinstance(weighting, Tensor):
        return "" if bool((weighting == weighting[0]).all()) else "the samples weigh unequally in the loss"
    return next((text for text in dispatcher.weighting if text not in dispatcher.mixing), "")


def _sq_norm_of(weight: Weight, total: SampleGradient | None) -> Tensor:
    if weight.sq_norm is not None:
        return weight.sq_norm
    if total is None:
        raise PerSampleError(f"no contribution was kept for {sorted(weight.names)}")
    return total.sq_norm()


def _square_sum_of(total: SampleGradient, weighting: Weighting, batch_size: int, scale: Tensor | None) -> Tensor:
    if not isinstance(weighting, Tensor):
        (own,) = own_values([total.square_sum()], 2, weighting, batch_size, scale)
        return own
    sums: Tensor | None = None
    for sample in range(total.batch_size):  # each has a weight of its own
        grad = total.samples(sample, sample + 1).dense()
        (own,) = own_values([grad], 1, weighting[sample : sample + 1], batch_size, scale)
        squares = own[0].abs().square()
        sums = squares if sums is None else sums.add_(squares)
    if sums is None:
        raise PerSampleError("there is no sample")
    return sums
