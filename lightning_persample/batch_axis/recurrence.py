"""How recurrent layers, their cells and packed sequences move the batch axis."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_persample.batch_axis.axis import BatchAxis, Lost, picked, row_owners
from lightning_persample.batch_axis.base import Followed, beyond, keep, lost, meeting, padded, propagation_rule
from lightning_persample.batch_axis.observed import ObservedCall, tensors_in
from lightning_persample.torch_internals import padded_length


@propagation_rule("recurrent_layer")
def _follow_layer(call: ObservedCall) -> Followed:
    data, second = call.args[0], call.args[1]
    packed = isinstance(second, Tensor) and not second.is_floating_point()
    axis, given = call.axis_of(data), None
    if axis is None and not packed:  # what all samples share, laid over the samples of the initial state
        given = next((where for where in map(call.axis_of, tensors_in(second)) if isinstance(where, BatchAxis)), None)
        axis = None if given is None or given.dim != 1 else given.moved(0 if call.args[8] else 1)
    if not isinstance(axis, BatchAxis) or call.lost:
        return lost(call, "has an initial state or weights that depend on the batch", mixes=None)
    if packed:
        if axis.dim != 0:
            return lost(call, "works on a packed sequence that does not hold the batch along its rows", mixes=None)
        owners = row_owners(axis, call.batch_size, data.device)
        state = picked(1, owners[: int(second[0])], call.batch_size, axis.mixing)
    else:
        if axis.dim != (0 if call.args[8] else 1):
            return lost(call, _another_axis("takes", axis, 1 - int(call.args[8])), mixes=None)
        state = axis.moved(1)
    hidden = list(tensors_in(call.args[2] if packed else second))
    known = [where for where in map(call.axis_of, hidden) if isinstance(where, BatchAxis)]
    others = [tensor for tensor, _ in call.located if tensor is not data and all(tensor is not h for h in hidden)]
    laid = axis
    if others or any(not where.same_layout(state) for where in known):
        return lost(call, "has an initial state or weights that order the samples differently", mixes=None)
    if any(where.dim != 1 for where in known):
        what = "holds the samples along axis 1 of its initial state, which is declared to hold them along another"
        return lost(call, f"{what}: call mark_samples(state, batch_dim=1) in the training step before")
    outputs = [axis.mixed(call.mixing), *[state.mixed(call.mixing)] * (len(call.outputs) - 1)]

    def aligned(tensor: Tensor) -> BatchAxis | None:
        if tensor is data:
            return laid
        return state if any(tensor is part for part in hidden) else None

    return Followed(tuple(outputs), aligned)


@propagation_rule("recurrent_cell")
def _follow_cell(call: ObservedCall) -> Followed:
    states = [call.args[0], *tensors_in(call.args[1])]
    located = call.located
    _, axis = located[0]
    others = [tensor for tensor, _ in located if all(tensor is not state for state in states)]
    apart = any(not where.same_place(axis) for _, where in located) and call.batch_size > 1
    if others or call.lost or axis.dim != 0 or apart:
        return lost(call, "has a state or weights that order the samples differently", mixes=None)

    def aligned(tensor: Tensor) -> BatchAxis | None:
        return axis if any(tensor is state for state in states) else None

    return keep(call, axis.mixed(call.mixing), aligned)


def _another_axis(verb: str, axis: BatchAxis, expected: int) -> str:
    """What to say where samples lie along another axis than a layer takes for theirs, and what helps."""
    return (
        f"{verb} axis {expected} for the samples, which lie along axis {axis.dim}: give it "
        f"batch_first={expected == 1}, or pass batch_dim={expected} where the batch has them along axis {expected}"
    )


@propagation_rule("pack")
def _follow_pack(call: ObservedCall) -> Followed:
    """(T, B, *) to rows: all samples' first steps, all second steps of those that have one, ..."""
    data, lengths, batch_first = call.args[0], call.args[1], call.args[2]
    axis = call.axis_of(data)
    if not isinstance(axis, BatchAxis):
        return lost(call, "packs a tensor of which no axis holds the samples", mixes=None)
    if axis.dim != 1 - int(batch_first):
        return lost(call, _another_axis("packs", axis, 1 - int(batch_first)), mixes=None)
    owners = row_owners(axis, call.batch_size, data.device)
    steps = torch.arange(data.size(1 if batch_first else 0), device=owners.device)
    present = steps[:, None] < lengths.to(owners.device)[None]
    rows = owners[None].expand(len(steps), -1)[present]
    mixing = axis.mixing or _why_of_others(call, lengths, owners)
    return Followed((picked(0, rows, call.batch_size, mixing), None))


def _why_of_others(call: ObservedCall, lengths: Tensor, owners: Tensor) -> str | None:
    """Why the lengths (B,) of sequences are not those of the samples `owners` (B,), as far as it is known."""
    where, own = call.axis_of(lengths), None
    if isinstance(where, BatchAxis):
        if where.mixing is not None:
            return where.mixing
        own = row_owners(where, call.batch_size)
    elif isinstance(where, Lost):
        own = where.entries
        if own is None and where.of_others and call.batch_size > 1:
            return meeting(call)
    return None if own is None or torch.equal(own.cpu(), owners.cpu()) else meeting(call)


@propagation_rule("unpack")
def _follow_pad(call: ObservedCall) -> Followed:
    data, batch_sizes, batch_first = call.args[0], call.args[1], call.args[2]
    axis = call.axis_of(data)
    if not isinstance(axis, BatchAxis) or axis.dim != 0:
        return lost(call, "pads a packed sequence that does not hold the batch along its rows", mixes=None)
    owners = row_owners(axis, call.batch_size, data.device)[: int(batch_sizes[0])]
    dim = 0 if batch_first else 1
    place = picked(dim, owners, call.batch_size, axis.mixing)
    lengths = picked(0, owners, call.batch_size)
    if padded_length() is not None:  # each sample alone is padded to as many, too
        return Followed((place, lengths), by_values=True)
    found = padded(call, place, beyond(call.outputs[1], call.outputs[0], dim), 1 - dim)
    return replace(found, outputs=(place, lengths))
