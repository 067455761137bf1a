"""Parameters and what is made of them: the weights whose per-sample gradients are collected.

A call with a weight and nothing of the batch makes a *derived weight* u = f(w): a transpose, weight_norm, B @ A of
LoRA, a broadcast position embedding. Contributions to u are summed first and then pulled back to w through the
vector-Jacobian product of f, sample by sample; a transpose keeps the structure.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import TreeSpec, tree_unflatten

from lightning_persample.engine.blocks import copied, looked_up, row_by_row
from lightning_persample.engine.by_rule import Computation
from lightning_persample.engine.failure import OverwrittenError, attempt
from lightning_persample.engine.following import POINTWISE
from lightning_persample.engine.observed import Description, tensors_in, version_of
from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import Block, Dense, Outer, SampleGradient, Sum, add_up
from lightning_persample.gradients.cost import halved
from lightning_persample.gradients.options import current_options
from lightning_persample.rules import Pull, other_generators_kept, vector_jacobian

__all__ = [
    "Derivation",
    "Weight",
    "in_one_row",
    "part_of",
    "places_in",
    "pull_back",
    "settle",
    "settle_one",
    "with_part",
]

_SAME_ENTRIES = frozenset(
    {"clone", "contiguous", "to", "type", "type_as", "float", "double", "half", "bfloat16", "alias", "cuda", "cpu"}
)
_TRANSPOSES = frozenset(
    {"t", "T", "mT", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "H", "mH"}
)
_REPEATS = {torch.float32: 1e-5, torch.float64: 1e-10}
_BUDGET = 64 * 2**20


@dataclass(frozen=True, eq=False)
class Derivation:
    """How a derived weight was computed.

    Attributes:
        op: canonical op.
        function: what was called.
        leaves: flattened arguments, detached.
        spec: how the leaves make up (args, kwargs).
        parents: weights among the leaves, by position.
        output: which of the call's output tensors this is.
        value: the derived weight itself, detached.
        inplace: whether the call wrote into its first argument.
        text: op, sizes and the user's line, for messages.
        random_state: state of the generator before the call, where it drew random numbers.
        versions: how often each leaf had been written to when the call read it; None of what was overwritten by it.
        made: how often the derived weight had been written to when the call was done.
    """

    op: object
    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: TreeSpec
    parents: Mapping[int, Weight]
    output: int
    value: Tensor
    inplace: bool
    text: Description
    random_state: Tensor | None = None
    versions: tuple[int | None, ...] = ()
    made: int = 0

    def copied_leaves(self) -> list[Any]:
        """The leaves with copies of those that are no weights: the call may write into them (observers, statistics)."""
        return [
            leaf.clone() if isinstance(leaf, Tensor) and position not in self.parents else leaf
            for position, leaf in enumerate(self.leaves)
        ]

    def compute(self, *parents: Tensor) -> Tensor:
        """The derived weight as a function of its parents, in the order of `self.parents`."""
        leaves = self.copied_leaves()
        for position, tensor in zip(self.parents, parents, strict=True):
            leaves[position] = tensor
        if self.inplace:
            leaves[0] = leaves[0].clone()
        if self.random_state is not None:
            torch.set_rng_state(self.random_state)
        args, kwargs = tree_unflatten(leaves, self.spec)
        result = self.function(*args, **kwargs)
        return list(tensors_in(leaves[0] if result is None else result))[self.output]


@dataclass(eq=False, slots=True)
class Weight:
    """A parameter, or a tensor computed from parameters alone.

    Attributes:
        names: the parameters it is made of; a parameter has its own name only.
        tensor: the parameter, or a detached alias of the derived weight.
        outside: data that is in neither the batch nor the module took part.
        derivation: how it was computed; None for a parameter.
        uses: arguments of calls seen that use it together with the batch.
        children: weights derived from it.
        contributions: what those calls contributed in the present backward.
        calls: what computes it and from which gradients of the outputs, where the sum is going to be compared.
        sq_norm: the squared norm (B,), where it could be taken at once and the structure let go.
        norm: the norm (B,) in its place.
        told: whether the call that uses it tells that it gets a gradient, so that no hook on it has to.
        version: how often a derived weight had been written to when it was computed.
        hidden: it was written to where autograd did not see it.
        adds: the last of the contributions is a sum, in memory of its own.
        received: how many of those uses have contributed in the present backward.
        hooked: the user registered a hook on it, a derived weight.
        arrived: the gradient behind that hook.
    """

    names: frozenset[str]
    tensor: Tensor
    derivation: Derivation | None = None
    outside: bool = False
    uses: int = 0
    children: int = 0
    contributions: list[SampleGradient] = field(default_factory=list)
    calls: list[tuple[Computation, Sequence[Tensor | None]]] = field(default_factory=list)
    sq_norm: Tensor | None = None
    norm: Tensor | None = None
    told: bool = False
    version: int = 0
    hidden: bool = False
    adds: bool = False
    received: int = 0
    hooked: bool = False
    arrived: Tensor | None = None

    def is_current(self, tensor: Tensor) -> bool:
        """Whether the tensor still holds this weight: a derived one may have been overwritten through another view."""
        return self.derivation is None or version_of(tensor) == self.version

    @property
    def has_norms(self) -> bool:
        """Whether all that was asked for has been taken of what it got."""
        return self.norm is not None or self.sq_norm is not None

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight."""
        return self.tensor.shape

    @property
    def is_over(self) -> bool:
        """Whether all that a derived weight gets is there, and takes no less memory than what its parents get of it."""
        made = self.derivation
        if made is None or self.children or self.hooked or self.received != self.uses or made.op not in POINTWISE:
            return False
        sizes = {parent.shape for parent in made.parents.values()}
        return sizes == {self.shape} and all(isinstance(term, (Dense, Block)) for term in self.contributions)

    def add(self, gradient: SampleGradient) -> None:
        """Take what one use contributes; numbers of the weight's own size are added up as they come."""
        last = self.contributions[-1] if self.contributions else None
        if isinstance(gradient, (Dense, Block)) and type(last) is type(gradient):
            total = add_up([last, gradient], into_first=self.adds)
            if not isinstance(total, Sum):
                self.contributions[-1], self.adds = total, True
                return
        self.contributions.append(gradient)
        self.adds = False

    def forget(self) -> None:
        """Drop what the last backward left."""
        self.contributions.clear()
        self.calls.clear()
        self.received = 0
        self.sq_norm = self.norm = self.arrived = None


def places_in(base: Tensor, view: Tensor) -> Tensor | None:
    """The place of each entry of a view among the entries of its base, of the view's shape; None where it has none."""
    if view.dtype != base.dtype or base.is_complex() or not torch.ops.aten.is_non_overlapping_and_dense(base):
        return None
    places = torch.empty_strided(base.shape, base.stride(), dtype=torch.int64, device=base.device)
    places.copy_(torch.arange(base.numel(), device=base.device).view(base.shape))
    return places.as_strided(view.shape, view.stride(), view.storage_offset() - base.storage_offset())


def part_of(base: Tensor, places: Tensor) -> Tensor:
    """A view as a function of its base."""
    return base.reshape(-1)[places]


def with_part(base: Tensor, part: Tensor, places: Tensor) -> Tensor:
    """A base of which one view was overwritten, as a function of what it was and of the view."""
    return base.reshape(-1).scatter(0, places.reshape(-1), part.reshape(-1)).reshape(base.shape)


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


def _as_read(derivation: Derivation, *, parents_too: bool = True) -> Derivation:
    """The derivation with the values that the call read: derived weights that were overwritten are computed again."""
    leaves = list(derivation.leaves)
    for place, (leaf, version) in enumerate(zip(leaves, derivation.versions, strict=True)):
        parent = derivation.parents.get(place)
        if not isinstance(leaf, Tensor) or version_of(leaf) == version or not (parents_too or parent is None):
            continue
        if parent is None or parent.derivation is None or parent.hidden:
            raise OverwrittenError(
                f"{derivation.text} computes a weight from a tensor of shape {tuple(leaf.shape)} that was changed in "
                "place",
                leaf,
                " before the backward ended; change it afterwards, or change a copy of it",
            )
        made = _as_read(parent.derivation)
        leaves[place] = made.compute(*(made.leaves[position] for position in made.parents))
    return replace(derivation, leaves=tuple(leaves))


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


def in_one_row(value: Tensor, op: object, operands: Sequence[Tensor]) -> Tensor:
    """The output of a pointwise op, in memory of one row where one row of each operand is laid over an axis."""
    for dim in range(value.dim()) if op in POINTWISE else ():
        if value.size(dim) > 1 and all(
            operand.dim() == 0 or (operand.shape == value.shape and operand.stride(dim) == 0) for operand in operands
        ):
            return value.narrow(dim, 0, 1).clone().expand_as(value)
    return value


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
