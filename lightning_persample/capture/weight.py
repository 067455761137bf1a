"""Parameters and what is made of them: the weights whose per-sample gradients are collected.

A call with a weight and nothing of the batch makes a *derived weight* u = f(w): a transpose, weight_norm, B @ A of
LoRA, a broadcast position embedding. What it gets is moved to w by `pull_back`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_persample.batch_axis.observed import Description, flattened, name_of, rebuilt, tensors_in, version_of
from lightning_persample.batch_axis.ops import POINTWISE
from lightning_persample.gradients import Block, Dense, SampleGradient, Sum, add_up
from lightning_persample.torch_internals import view_base

Contributions: TypeAlias = "list[tuple[Weight, SampleGradient]]"
Taken: TypeAlias = "tuple[Tensor | None, Tensor | None]"
"""Squared norm and dot with the parameter's vector, (B,) each; None of what nobody asked for."""
Computation: TypeAlias = Callable[[Sequence["Tensor | None"]], Contributions]


@dataclass(frozen=True, eq=False, slots=True)
class Recipe:
    """What calls that are laid out alike have in common, by which weights are derived."""

    op: object  # canonical op
    function: Callable[..., Any]  # what was called
    leaves: tuple[Any, ...]  # flattened arguments, None in the place of tensors
    spec: tuple[Any, ...]  # how the leaves make up (args, kwargs)
    places: tuple[int, ...]  # of the tensors among the leaves
    inplace: bool  # whether the call writes into its first argument
    name: str  # the op in messages
    is_kept: bool  # whether every call that is laid out alike has this very recipe


def recipe_of(
    op: object,
    function: Callable[..., Any],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    inplace: bool = False,
    *,
    is_kept: bool = False,
) -> tuple[Recipe, list[Tensor]]:
    """The recipe of a call with weights, and the tensors among its arguments (args, kwargs)."""
    leaves: list[Any] = []
    spec = flattened(arguments, leaves)
    places = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    tensors = [leaves[place] for place in places]
    for place in places:
        leaves[place] = None
    return Recipe(op, function, tuple(leaves), spec, places, inplace, name_of(op, function), is_kept), tensors


@dataclass(eq=False, slots=True)
class Derivation:
    """How a derived weight was computed."""

    recipe: Recipe  # what was called
    leaves: Sequence[Any]  # flattened arguments, detached
    parents: Mapping[int, Weight]  # weights among the leaves, by position
    output: int  # which of the call's output tensors this is
    value: Tensor  # the derived weight itself, detached
    made: int  # how often the derived weight had been written to when the call was done
    place: tuple[str, int] | None  # file and line of the user's code
    # how often each leaf had been written to when the call read it; None of what was overwritten by it
    versions: Sequence[int | None]
    random_state: Tensor | None = None  # state of the generator before the call, where it drew random numbers
    kept: Tensor | None = None  # what autograd keeps of the sizes of a weight's rows, which the call normalizes

    @property
    def op(self) -> object:
        """The canonical op."""
        return self.recipe.op

    @property
    def text(self) -> Description:
        """Op, sizes and the user's line, for messages."""
        sizes = tuple(self.leaves[place].shape for place in self.recipe.places)
        return Description(self.recipe.name, sizes, self.place)

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors of `parents`, in their order."""
        return [self.leaves[place] for place in self.parents]

    def arguments(self, leaves: Sequence[Any] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of the call, or of one with other leaves."""
        args, kwargs = rebuilt(self.leaves if leaves is None else leaves, self.recipe.spec)
        return args, kwargs

    def tensors(self) -> list[Tensor] | None:
        """What it was computed from, and the value; None where one of them was written to since."""
        if version_of(self.value) != self.made:
            return None
        found = [self.value]
        for place in self.recipe.places:
            leaf = self.leaves[place]
            if version_of(leaf) != self.versions[place]:
                return None
            found.append(leaf)
        return found

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
        if self.recipe.inplace:
            leaves[0] = leaves[0].clone()
        if self.random_state is not None:
            torch.set_rng_state(self.random_state)
        return self.called(leaves)

    def called(self, leaves: Sequence[Any]) -> Tensor:
        """What the call gives of these leaves."""
        args, kwargs = self.arguments(leaves)
        result = self.recipe.function(*args, **kwargs)
        return list(tensors_in(leaves[0] if result is None else result))[self.output]


class Weight:
    """A parameter, or a tensor computed from parameters alone."""

    names: frozenset[str]  # the parameters it is made of; a parameter has its own name only
    tensor: Tensor  # the parameter, or a detached alias of the derived weight
    # What nothing has changed is read of the class: models have hundreds of weights.
    derivation: Derivation | None = None  # how it was computed; None for a parameter
    outside = False  # data that is in neither the batch nor the module took part
    uses = 0  # arguments of calls seen that use it together with the batch
    received = 0  # how many of those uses have contributed in the present backward
    children = 0  # weights derived from it
    contributions: Sequence[SampleGradient] = ()  # what those calls contributed in the present backward
    # what computes it and from which gradients of the outputs, where the sum is going to be compared
    calls: Sequence[tuple[Computation, Sequence[Tensor | None]]] = ()
    taken: Taken | None = None  # all that was asked for, where it could be taken at once and the structure let go
    reports = False  # the call that uses it reports that it gets a gradient, so that no hook on it has to
    version = 0  # how often a derived weight had been written to when it was computed
    hidden = False  # it was written to where autograd did not see it
    adds = False  # the last of the contributions is a sum, in memory of its own
    hooked = False  # the user registered a hook on it, a derived weight
    arrived: Tensor | None = None  # the gradient behind that hook

    def __init__(
        self, names: frozenset[str], tensor: Tensor, derivation: Derivation, *, outside: bool, version: int
    ) -> None:
        self.names, self.tensor, self.derivation, self.outside, self.version = (
            names, tensor, derivation, outside, version
        )  # fmt: skip

    def is_current(self, tensor: Tensor) -> bool:
        """Whether the tensor still holds this weight: a derived one may have been overwritten through another view."""
        return self.derivation is None or version_of(tensor) == self.version

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
                self.contributions, self.adds = [*self.contributions[:-1], total], True
                return
        self.contributions, self.adds = [*self.contributions, gradient], False

    def forget(self) -> None:
        """Drop what the last backward left."""
        self.contributions = self.calls = ()
        self.received = 0
        self.taken = self.arrived = None


def base_of(view: Tensor) -> Tensor | None:
    """The tensor that this is a view of; None where it is of none, or has got memory of its own since."""
    base = view_base(view)
    if base is None or base.layout != torch.strided or view.layout != torch.strided:
        return base
    return base if base.untyped_storage().data_ptr() == view.untyped_storage().data_ptr() else None


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


def in_one_row(value: Tensor, op: object, operands: Sequence[Tensor]) -> Tensor:
    """The output of a pointwise op or repeat, in memory of one row where one row of each is laid over an axis."""
    if op != "repeat" and (op not in POINTWISE or not all(each.dim() == 0 or 0 in each.stride() for each in operands)):
        return value  # as nearly always

    def is_laid(operand: Tensor, dim: int) -> bool:
        if op == "repeat":
            return operand.dim() <= (behind := value.dim() - 1 - dim) or operand.size(-1 - behind) == 1
        return operand.dim() == 0 or (operand.shape == value.shape and operand.stride(dim) == 0)

    for dim in range(value.dim()):
        if value.size(dim) > 1 and all(is_laid(operand, dim) for operand in operands):
            return value.narrow(dim, 0, 1).clone().expand_as(value)
    return value
