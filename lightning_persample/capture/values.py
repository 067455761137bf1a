"""The values of a record, from what a backward has left of each weight."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from lightning_persample.capture.collector import USED_AGAIN
from lightning_persample.capture.dispatch import Dispatcher
from lightning_persample.capture.failure import attempt, in_smaller_chunks, reason_of
from lightning_persample.capture.parameters import WatchedParameters
from lightning_persample.capture.record import (
    OF_KEPT,
    UNEQUAL_WEIGHTS,
    KeptGradients,
    OwnScale,
    asks_norms,
    in_gradient_dtype,
)
from lightning_persample.capture.weight import Weight
from lightning_persample.errors import PerSampleError
from lightning_persample.gradients import SampleGradient, add_up


@dataclass
class Values:
    """By parameter what was asked for, of each sample's own loss."""

    sq_norms: dict[str, Tensor] = field(default_factory=dict)
    rows: Tensor | None = None  # all of these, (parameters, B), where they lie together
    grad_samples: dict[str, Tensor] = field(default_factory=dict)
    square_sums: dict[str, Tensor] = field(default_factory=dict)
    weighted_square_sums: dict[str, Tensor] = field(default_factory=dict)  # of B w_i g_i, where w_i differ
    structures: dict[str, SampleGradient] = field(default_factory=dict)
    dots: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # with their vectors, where taken at once
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def kept(self, names: Sequence[str], own: OwnScale, quantities: Collection[str]) -> KeptGradients:
        """The gradients of these parameters for what is computed of them later."""
        structures = {name: self.structures[name] for name in names if name not in self.dots}
        return KeptGradients(structures, self.dtypes, own, quantities, self.dots)


def read_values(
    watched: WatchedParameters,
    dispatcher: Dispatcher,
    names: Sequence[str],
    quantities: Collection[str],
    own: OwnScale,
    places: Tensor | None,
) -> Values:
    """The values of these parameters; the dispatcher takes those that have none, and why."""
    values = Values()
    sq_norms: dict[str, Tensor] = {}
    are_asked = asks_norms(quantities)  # else they are taken when they are read

    places_on: dict[torch.device, Tensor] = {}
    if places is not None:
        places_on = {device: places.to(device) for device in {watched.weights[name].tensor.device for name in names}}

    def read(name: str, weight: Weight) -> None:
        taken, weight.taken = weight.taken, None  # put back where nothing is against it
        total = add_up(weight.contributions) if weight.contributions else None
        if taken is None or total is None:
            reason = watched.changed_by_hook(weight, dispatcher.got_gradient.get(name), total)
        else:
            reason = USED_AGAIN  # through a weight that was derived from it
        if reason is not None:
            dispatcher.refuse([weight], reason)
            return
        some = places_on.get(weight.tensor.device)
        if taken is not None:
            square, dot = (each if each is None or some is None else each[some] for each in taken)
            weight.taken = square, dot
            return
        if total is None:
            raise PerSampleError(f"no contribution was kept for {sorted(weight.names)}")
        if some is not None:
            total = total.pick(some)
        if are_asked:
            sq_norms[name] = in_smaller_chunks(partial(_sq_norm_of, weight, total, dispatcher))
        if "grad_sample" in quantities:
            dense = in_smaller_chunks(total.dense)
            values.grad_samples[name] = in_gradient_dtype(weight.tensor.dtype, own.own(dense))
        if "square_sum" in quantities:
            squares = in_smaller_chunks(partial(_square_sum_of, total, own))
            values.square_sums[name] = in_gradient_dtype(weight.tensor.dtype, squares)
            if isinstance(own.weighting, Tensor):
                squares = replace(own, weighting="sum").own(total.square_sum(), power=2)
                values.weighted_square_sums[name] = in_gradient_dtype(weight.tensor.dtype, squares * own.batch_size**2)
        if OF_KEPT.intersection(quantities):
            values.structures[name], values.dtypes[name] = total, weight.tensor.dtype

    def failed(name: str, error: Exception) -> None:
        dispatcher.refuse([watched.weights[name]], reason_of(error, f"the sum of the uses of `{name}`"))

    # Hooks of layers that ran on another stream have made their part there. At the end the engine makes the stream of
    # whoever called `backward` wait for all streams that lead to a leaf, so that these kernels come after; and a layer
    # with a stream of its own waits for this one before the next forward, which alone takes the memory again.
    for name in names:
        weight = watched.weights[name]
        if weight.contributions or places is not None:
            attempt(read, partial(failed, name), name, weight)
        if weight.taken is not None:  # all that was asked for, mostly of a parameter without hooks
            square, dot = weight.taken
            if square is not None:
                sq_norms[name] = square
            if dot is not None:
                values.dots[name] = dispatcher.vectors[name], dot
    if dispatcher.corrections:
        dispatcher.correct()
    alike: dict[tuple[torch.dtype, torch.dtype, torch.device], list[str]] = {}  # those of a kind in one go
    for name, sq_norm in sq_norms.items():
        alike.setdefault((sq_norm.dtype, watched.weights[name].tensor.dtype, sq_norm.device), []).append(name)
    for (_, dtype, _), same in alike.items():
        rows = own.own(torch.stack([sq_norms[name] for name in same]), power=2, dim=1)
        rows = in_gradient_dtype(dtype, rows)
        values.sq_norms.update(zip(same, rows.unbind(), strict=True))
        values.rows = rows if len(alike) == 1 else None
    return values


def samples_with_values(
    followed: Tensor | None, of_part: Sequence[int] | None, weights: object
) -> tuple[Sequence[int] | None, Tensor | None, Tensor | None]:
    """Which samples have a part in the loss, which of these have values, and where these are among those followed."""
    in_loss = of_part
    if isinstance(weights, Tensor) and not bool((weights != 0).all()):  # a sample of weight 0 has none
        some: list[int] = (weights != 0).nonzero().flatten().tolist()
        in_loss = some if of_part is None else sorted(set(some) & set(of_part))
    if in_loss is None:
        return None, followed, None
    own = torch.tensor(in_loss, dtype=torch.int64)
    if followed is None:
        return in_loss, own, own
    places = torch.isin(followed.cpu(), own).nonzero().flatten()
    return in_loss, followed.cpu()[places], places


def why_no_factor(
    penalized: Collection[str], not_additive: Sequence[str], weighting: Sequence[str], own: OwnScale
) -> str:
    """Why ``.grad`` did not get one number times the sum of the samples' own gradients, or "" where it did."""
    if penalized:
        names = ", ".join(f"`{name}`" for name in sorted(penalized)[:3])
        more = f" and {len(penalized) - 3} more" if len(penalized) > 3 else ""
        return f"the loss has a term that belongs to no sample, made of {names}{more}"
    if not_additive:
        return not_additive[0]
    if weighting:
        return weighting[0]
    return "" if own.is_equal() else UNEQUAL_WEIGHTS


def _sq_norm_of(weight: Weight, total: SampleGradient, dispatcher: Dispatcher) -> Tensor:
    if dispatcher.corrections is None:
        return total.sq_norm()
    value, later = total.sq_norm_or_later()
    dispatcher.correct_later([weight], later)
    return value


def _square_sum_of(total: SampleGradient, own: OwnScale) -> Tensor:
    if not isinstance(own.weighting, Tensor):
        return own.own(total.square_sum(), power=2)
    sums = torch.zeros(total.shape, dtype=total.dtype.to_real(), device=total.device)
    for sample in range(total.batch_size):  # each has a weight of its own
        place = torch.tensor([sample])
        grad = own.of_samples(place).own(total.samples(sample, sample + 1).dense())
        sums += grad[0].abs().square()
    return sums
