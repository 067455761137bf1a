"""From derived weights to the parameters they are made of.

Contributions to u = f(w) are summed first and then pulled back to w through the vector-Jacobian product of f, sample by
sample; a transpose keeps the structure.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import vmap

from lightning_persample.engine.blocks import copied, looked_up, row_by_row
from lightning_persample.engine.failure import OverwrittenError, attempt
from lightning_persample.engine.following import POINTWISE
from lightning_persample.engine.observed import Description, version_of
from lightning_persample.engine.weight import Derivation, Weight
from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import Block, Dense, Outer, SampleGradient, add_up
from lightning_persample.gradients.cost import halved
from lightning_persample.gradients.options import current_options
from lightning_persample.rules import Pull, other_generators_kept, vector_jacobian

__all__ = ["pull_back", "settle", "settle_one"]

_SAME_ENTRIES = frozenset(
    {"clone", "contiguous", "to", "type", "type_as", "float", "double", "half", "bfloat16", "alias", "cuda", "cpu"}
)
_TRANSPOSES = frozenset(
    {"t", "T", "mT", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "H", "mH"}
)
_REPEATS = {torch.float32: 1e-5, torch.float64: 1e-10}
_BUDGET = 64 * 2**20


def settle(
    weights: Sequence[Weight],
    failed: Callable[[Weight, Exception, Description], None],
    changed: Callable[[Weight, Tensor | None, SampleGradient | None], str | None] | None = None,
) -> None:
    """Move the contributions of all derived weights to the parameters."""

    def checked(weight: Weight) -> None:
        if weight.arrived is not None and changed is not None:
            total = add_up(weight.contributions) if weight.contributions else None
            reason = changed(weight, weight.arrived, total)
            if reason is not None:
                raise UnsupportedError(reason)
        pull_back(weight)

    for weight in reversed(weights):
        if weight.derivation is not None:
            settle_one(weight, failed, checked)


def settle_one(
    weight: Weight,
    failed: Callable[[Weight, Exception, Description], None],
    settled: Callable[[Weight], None] | None = None,
) -> None:
    """Move the contributions of one derived weight to what it was computed from."""
    derivation = weight.derivation
    assert derivation is not None

    def fail(error: Exception) -> None:
        failed(weight, error, derivation.text)

    with torch.no_grad(), torch.autocast(derivation.value.device.type, enabled=False):
        attempt(settled or pull_back, fail, weight)


def pull_back(weight: Weight) -> None:
    """Move the contributions of a derived weight to the weights it was computed from."""
    # A computation that gives another value when it is repeated (it is random, or its inputs were changed in place
    # since) gives an `UnsupportedError`.
    derivation = weight.derivation
    if derivation is None or not weight.contributions:
        return
    blocks = [term for term in weight.contributions if isinstance(term, Block)]
    others = [term for term in weight.contributions if not isinstance(term, Block)]
    weight.contributions.clear()
    for terms in (blocks, others):
        if terms:
            _pull_back_one(derivation, add_up(terms))


def _pull_back_one(derivation: Derivation, gradient: SampleGradient) -> None:
    parents = list(derivation.parents.values())
    of_table = looked_up(derivation, gradient)
    if of_table is not None:
        _as_read(derivation, parents_too=False)
        parents[0].add(of_table)
        return
    entries = copied(derivation, gradient) if isinstance(gradient, Block) else None
    if entries is not None:
        _as_read(derivation, parents_too=False)
        for parent, part in entries:
            parent.add(part)
        return
    if len(parents) == 1:
        kept = _keep_structure(derivation, parents[0], gradient)
        if kept is not None:
            parents[0].add(kept)
            return
    devices = [derivation.value.device] if derivation.value.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), other_generators_kept() as others_drawn:
        derivation = _as_read(derivation)
        one = _of_one_row(derivation, gradient) if isinstance(gradient, Block) else None
        rows = row_by_row(derivation, gradient) if isinstance(gradient, Block) and one is None else None
        block, derivation = gradient, one or derivation
        inputs = [derivation.leaves[position] for position in derivation.parents]
        if rows is not None:
            _check_repeats(derivation, derivation.compute(*inputs), inputs)
            for parent, part in rows:
                parent.add(part)
            return
        (value,), pull = vector_jacobian(lambda *inputs: [derivation.compute(*inputs)], inputs)
        _check_repeats(derivation, value, inputs)
        before = _random_states(devices)
        others_drawn()
        pulled = _pulled(value, pull, gradient if one is None else Dense(block.tensors()[0]))
        if others_drawn() or not all(map(torch.equal, before, _random_states(devices))):
            raise UnsupportedError(
                f"{derivation.text} computes a weight, and draws random numbers in its backward; keep such an op away "
                "from the weights"
            )
    for parent, grads in zip(parents, pulled, strict=True):
        parent.add(replace(block, grad=grads) if isinstance(block, Block) and one else Dense(grads))


def _random_states(devices: list[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def _pulled(value: Tensor, pull: Pull, gradient: SampleGradient) -> list[Tensor]:
    """The gradients of the parents, (B, *shape) each, in parts of the batch that fit into the memory budget."""
    limit = halved(current_options().max_memory or _BUDGET)
    step = max(1, limit // (value.element_size() * max(1, math.prod(gradient.shape))))
    pieces: list[tuple[Tensor, ...]] = []
    for start in range(0, gradient.batch_size, step):
        cotangents = gradient.samples(start, min(start + step, gradient.batch_size)).dense().to(value.dtype)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", "There is a performance drop because we have not yet implemented the batching"
                )
                pieces.append(vmap(pull)([cotangents]))
        except torch.OutOfMemoryError:
            raise
        except (
            RuntimeError,
            NotImplementedError,
        ):  # no batching rule for the backward of this op: one sample at a time
            pieces.append(tuple(torch.stack(column) for column in zip(*(pull([c]) for c in cotangents), strict=True)))
    return [column[0] if len(column) == 1 else torch.cat(column) for column in zip(*pieces, strict=True)]


def _keep_structure(derivation: Derivation, parent: Weight, gradient: SampleGradient) -> SampleGradient | None:
    if derivation.value.is_complex() or parent.tensor.is_complex():
        return None
    if derivation.op in _SAME_ENTRIES and parent.shape == gradient.shape:
        return gradient
    matrix = len(parent.shape) == 2 and len(gradient.shape) == 2
    if derivation.op in _TRANSPOSES and matrix and isinstance(gradient, Outer):
        moved = derivation.compute(torch.empty(2, 3, device="meta"))
        return gradient if moved.shape == (2, 3) else Outer(gradient.right, gradient.left)
    return None


def _as_read(derivation: Derivation, *, parents_too: bool = True, for_value: bool = False) -> Derivation:
    """The derivation with the values that the call read: derived weights that were overwritten are computed again."""
    leaves = list(derivation.leaves)
    for place, (leaf, version) in enumerate(zip(leaves, derivation.versions, strict=True)):
        parent = derivation.parents.get(place)
        if not isinstance(leaf, Tensor) or version_of(leaf) == version or not (parents_too or parent is None):
            continue
        is_hidden = parent is not None and parent.hidden and not for_value
        if is_hidden and not derivation.inplace and _is_on_memory_of(leaf, derivation.value):
            continue  # a view, whose derivative reads no value
        if parent is None or parent.derivation is None or parent.hidden:
            raise OverwrittenError(
                f"{derivation.text} computes a weight from a tensor of shape {tuple(leaf.shape)} that was changed in "
                "place",
                leaf,
                " before the backward ended; change it afterwards, or change a copy of it",
            )
        made = _as_read(parent.derivation, for_value=True)
        leaves[place] = made.compute(*(made.leaves[position] for position in made.parents))
    return replace(derivation, leaves=tuple(leaves))


def _is_on_memory_of(tensor: Tensor, other: Tensor) -> bool:
    plain = tensor.layout is other.layout is torch.strided
    return plain and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _of_one_row(derivation: Derivation, gradient: Block) -> Derivation | None:
    """A pointwise computation of rows that are all equal, one for each sample, for one of the rows."""
    value, leaves, dim = derivation.value, list(derivation.leaves), gradient.dim
    has_rows = gradient.total == value.size(dim) and not derivation.inplace
    if derivation.op not in POINTWISE or not has_rows or version_of(value) != derivation.made:
        return None
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or (leaf.numel() == 1 and place not in derivation.parents):
            continue
        if leaf.shape != value.shape or not _has_equal_rows(leaf, dim):
            return None
        leaves[place] = leaf.narrow(dim, 0, 1)
    if not _has_equal_rows(value, dim):
        return None
    return replace(derivation, leaves=tuple(leaves), value=value.narrow(dim, 0, 1))


def _has_equal_rows(tensor: Tensor, dim: int) -> bool:
    return tensor.stride(dim) == 0 or torch.equal(tensor, tensor.narrow(dim, 0, 1).expand_as(tensor))


def _check_repeats(derivation: Derivation, value: Tensor, inputs: Sequence[Tensor]) -> None:
    recorded = derivation.value
    if version_of(recorded) != derivation.made:  # overwritten: what is random differs from one repetition to the next
        recorded = derivation.compute(*inputs)
    if value.shape == recorded.shape:
        if not recorded.numel() or not recorded.is_floating_point() or torch.equal(value, recorded):
            return
        exact = _REPEATS.get(recorded.dtype, 1e-2)  # (autocast, under which a call may have run, is off by now)
        tolerance = exact * float(recorded.abs().max())
        if torch.allclose(value, recorded.to(value.dtype), rtol=exact, atol=tolerance, equal_nan=True):
            return
    raise UnsupportedError(
        f"{derivation.text} computes a weight, but gives another value when it is repeated: it is random, or its "
        "inputs were changed in place before the backward; keep such an op away from the weights"
    )
