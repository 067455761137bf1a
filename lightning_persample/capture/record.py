"""What one backward gave: values for callbacks and users, and the coverage with its reasons."""

from __future__ import annotations

import linecache
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch import Tensor

from lightning_persample.batch_axis.observed import line_of, version_of
from lightning_persample.batch_axis.sample_weights import OTHER_WEIGHTS
from lightning_persample.capture.failure import in_smaller_chunks, stop
from lightning_persample.errors import OptionError, PerSampleWarning, UnsupportedError
from lightning_persample.gradients import Projection, SampleGradient, kernel_options
from lightning_persample.gradients.cost import current_options
from lightning_persample.gradients.moments import Moments
from lightning_persample.gradients.together import dots
from lightning_persample.torch_internals import version_counter, view_base

OF_KEPT = frozenset({"dot", "projection"})
"""The quantities for which gradients are kept after the backward."""


def asks_norms(quantities: Collection[str]) -> bool:
    """Whether squared norms are taken in any case."""
    return "sq_norm" in quantities or OF_KEPT.isdisjoint(quantities)


class KeptGradients:
    """Holds what each sample contributed to the parameters, which takes about the memory of the activations.

    Args:
        structures: the contributions, by parameter.
        dtypes: of the parameters, by name.
        own: what the contributions are to be divided by; None where they are of the samples' own losses.
        quantities: what was asked for, of `OF_KEPT` and others.
        dots: by parameter that nothing was kept of, a vector and the dots (B,) of the contributions with it.
    """

    def __init__(
        self,
        structures: Mapping[str, SampleGradient],
        dtypes: Mapping[str, torch.dtype],
        own: OwnScale | None,
        quantities: Collection[str],
        dots: Mapping[str, tuple[Tensor, Tensor]] = MappingProxyType({}),
    ) -> None:
        self._structures, self._dots = dict(structures), dots
        self._dtypes = {name: dtypes[name] for name in structures}
        self._own = own
        self._quantities = OF_KEPT & frozenset(quantities)
        self._options = current_options()
        self._versions = {
            name: [(tensor, version_of(tensor)) for tensor in structure.tensors()]
            for name, structure in structures.items()
        }

    def gives(self, quantity: str) -> bool:
        """Whether this quantity was asked for."""
        return quantity in self._quantities

    @torch.no_grad()
    def with_vectors(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """Dot of each sample's own gradient with one vector; -> (B,)."""
        structures: list[SampleGradient] = []
        others: list[Tensor] = []
        terms: list[Tensor] = []
        for name, vector in vectors.items():
            if name in self._dots:
                own_vector, dot = self._dots[name]
                if vector is not own_vector:
                    raise not_asked("dots", "dot")
                terms.append(dot)
                continue
            structure = self._structures.get(name)
            if structure is None:
                known = ", ".join(f"`{each}`" for each in [*self._structures, *self._dots][:8])
                raise OptionError(
                    f"dot: `{name}` has no per-sample gradient in this record; it holds {known}. Leave out parameters "
                    "that are frozen, unused or unsupported: `record.names` has the others"
                )
            if vector.shape != structure.shape:
                raise OptionError(
                    f"dot: the vector of `{name}` has shape {tuple(vector.shape)}; the parameter's is "
                    f"{tuple(structure.shape)}"
                )
            self._refuse_changed(name, "dot")
            structures.append(structure)
            others.append(vector.detach())
        if not (structures or terms):
            raise OptionError("dot: there is no vector; give one for at least one parameter")
        with kernel_options(self._options):
            total = summed(terms + dots(structures, others))
        return total if self._own is None else self._own.own(total)

    @torch.no_grad()
    def sq_norm(self, name: str) -> Tensor:
        """The squared norm of each sample's own gradient of a parameter; -> (B,)."""
        if name in self._dots:
            raise not_asked("norms", "sq_norm")
        self._refuse_changed(name, "norms")
        with kernel_options(self._options):
            found = in_smaller_chunks(self._structures[name].sq_norm)
        own = found if self._own is None else self._own.own(found, power=2)
        return in_gradient_dtype(self._dtypes[name], own)

    @torch.no_grad()
    def project(self, projection: Projection) -> dict[str, Tensor]:
        """Each sample's own gradient, projected parameter by parameter."""
        if not isinstance(projection, Projection):
            raise OptionError(f"project: projection is {projection!r}; allowed is a Projection")
        projected: dict[str, Tensor] = {}
        for name, structure in self._structures.items():
            self._refuse_changed(name, "project")
            with kernel_options(self._options):
                rows = in_smaller_chunks(partial(structure.project, projection, name))
            own = rows if self._own is None else self._own.own(rows)
            projected[name] = in_gradient_dtype(self._dtypes[name], own)
        return projection.joined(projected)

    @torch.no_grad()
    def moments(self, samples: Tensor) -> Iterator[tuple[str, Moments, Tensor | None]]:
        """By parameter the moments of some samples' own gradients, (m,) places, and what a column of ones would get."""
        for name, structure in self._structures.items():
            self._refuse_changed(name, "project")
            ones = torch.ones(structure.batch_size, dtype=structure.dtype, device=structure.device)
            factors = ones if self._own is None else self._own.own(ones)
            with kernel_options(self._options):
                own = structure.pick(samples).scaled(factors[samples])
                is_vector = len(own.shape) < 2
                yield name, own.moments(), own.dense() if is_vector else own.times_one()

    def _refuse_changed(self, name: str, method: str) -> None:
        if any(version_of(tensor) != version for tensor, version in self._versions[name]):
            asked = "projection" if method == "project" else method
            raise UnsupportedError(
                f"{method}: a tensor that the gradient of `{name}` is made of was changed in place since the backward; "
                f"ask for the {asked} before that"
            )


class _WhenRead(Mapping[str, Tensor]):
    """Squared norms by parameter, those that are not known computed when they are read first."""

    def __init__(self, names: Sequence[str], known: Mapping[str, Tensor], kept: KeptGradients) -> None:
        self._names, self._known, self._kept = tuple(names), dict(known), kept

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._known:
            if name not in self._names:
                raise KeyError(name)
            self._known[name] = self._kept.sq_norm(name)
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def sq_norms_of(names: Sequence[str], known: Mapping[str, Tensor], kept: KeptGradients | None) -> Mapping[str, Tensor]:
    """The squared norms of these parameters, in this order: those that are known, and the others when they are read."""
    if kept is None or known.keys() >= set(names):
        return {name: known[name] for name in names}
    return _WhenRead(names, known, kept)


Weighting: TypeAlias = Literal["mean", "sum"] | Tensor


@dataclass(frozen=True, eq=False)
class OwnScale:
    """What contributions are divided by: each sample's weight in the loss, and what the loss was multiplied by.

    Attributes:
        weighting: the loss is sum_i w_i l_i: "mean" (w_i = 1/B), "sum" (w_i = 1) or w_i itself, (B,).
        batch_size: number of samples B.
        scale: what the loss was multiplied by, one number; None where it was not.
    """

    weighting: Weighting
    batch_size: int
    scale: Tensor | None

    def of_samples(self, places: Tensor) -> OwnScale:
        """The same for some of the samples, by their places."""
        if not isinstance(self.weighting, Tensor):
            return self
        return replace(self, weighting=self.weighting.detach()[places.to(self.weighting.device)])

    def own(self, values: Tensor, power: int = 1, dim: int = 0) -> Tensor:
        """Contributions without w_i and without the scale of the loss, or their powers; values (..., B, ...)."""
        if isinstance(self.weighting, Tensor):
            weights = self.weighting.detach().to(values.device, values.dtype).pow(power)
            values = values / weights.reshape(-1, *(1,) * (values.dim() - 1 - dim))
        elif self.weighting == "mean":
            values = values * float(self.batch_size) ** power
        return values if self.scale is None else values / self.scale.to(values.device, values.dtype).pow(power)

    def is_equal(self) -> bool:
        """Whether all samples weigh alike."""
        return not isinstance(self.weighting, Tensor) or bool((self.weighting == self.weighting[:1]).all())

    def factor(self) -> Tensor | float:
        """What each sample's own gradient is multiplied by in the gradient of the batch, where all weigh alike."""
        if isinstance(self.weighting, Tensor):
            weight = self.weighting.detach()[0]
        else:
            share = 1.0 / self.batch_size if self.weighting == "mean" else 1.0
            if self.scale is None:
                return share
            weight = torch.tensor(share, dtype=torch.float64)
        return weight if self.scale is None else weight * self.scale

    def loss_scale(self) -> Tensor | float:
        """What the gradient of the mean over the samples was multiplied by: of the loss itself, where it is no sum."""
        samples = float(self.batch_size) if self.weighting == "sum" else 1.0
        return samples if self.scale is None else samples * self.scale


def in_gradient_dtype(parameter: torch.dtype, values: Tensor) -> Tensor:
    """Gradients or norms in the precision of the parameter, which its ``.grad`` has, and float32 at least."""
    if values.dtype is parameter and parameter in (torch.float32, torch.float64):
        return values
    dtype = torch.promote_types(parameter, torch.float32)
    if values.is_complex() and not dtype.is_complex:  # the gradient of a real parameter is real
        values = values.real
    return values.to(dtype if values.is_complex() else dtype.to_real())


def summed(terms: Sequence[Tensor]) -> Tensor:
    """The sum of terms (B,) that parameters of several devices and dtypes have: on the first device, in the widest."""
    device, dtype, are_alike = terms[0].device, terms[0].dtype, True
    for term in terms:
        are_alike = are_alike and term.dtype is dtype and term.device == device
    if not are_alike:
        dtype = max((term.dtype for term in terms), key=lambda dtype: torch.finfo(dtype).bits)
        terms = [term.to(device, dtype) for term in terms]
    return torch.stack(list(terms)).sum(0)


UNEQUAL_WEIGHTS = "the samples weigh unequally in the loss"

SampleIndex: TypeAlias = "Tensor | Sequence[Any] | Mapping[str, Any] | None"


class _NotAsked(Mapping[str, Tensor]):
    """Values that were not asked for: whoever reads them learns how to."""

    __hash__ = object.__hash__  # (so that one object serves all records)

    def __init__(self, what: str, quantity: str) -> None:
        self._what, self._quantity = what, quantity

    def _refuse(self) -> NoReturn:
        raise not_asked(self._what, self._quantity)

    def __getitem__(self, name: str) -> Tensor:
        self._refuse()

    def __iter__(self) -> Iterator[str]:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()

    def __repr__(self) -> str:
        return f"<{self._what}: not asked for>"


def not_asked(what: str, quantity: str) -> OptionError:
    """The error of who reads what was not asked for, with the remedy."""
    return OptionError(
        f"{what} were not asked for; pass quantities=('sq_norm', '{quantity}') to expanded_weights, or let `needs` of "
        f"the callback return {{'{quantity}'}}"
    )


@dataclass(frozen=True, eq=False)
class PerSampleRecord:
    """Per-sample gradients of one backward, of each sample's OWN loss.

    With the training loss ``L = sum_i w_i l_i`` and the parameters ``theta``, everything here is made of
    ``g_i = d l_i / d theta``, whatever the reduction of the loss (mean: w_i = 1/B, sum: w_i = 1). So the gradient of
    the batch is ``sum_i w_i g_i``, for a mean the mean of the g_i. In a Trainer neither gradient accumulation nor the
    scale of mixed precision is multiplied in; without one, L is what ``backward`` is called on.

    Samples are in the batch's order. Tensors have no graph, and are on the parameter's device, in its dtype and float32
    at least (under a callback's ``engine="vmap"`` and "loop" gradients are in the parameter's own). Parameters have the
    names of ``module.named_parameters()``, in that order; one with several names (tied weights) has its first. Frozen
    parameters are nowhere.

    >>> import torch
    >>> from torch import nn
    >>> from lightning_persample import expanded_weights
    >>> module, x, y = nn.Linear(3, 2), torch.randn(4, 3), torch.randn(4, 2)
    >>> with expanded_weights(module, (x, y), quantities=("sq_norm", "grad_sample")) as capture:
    ...     nn.functional.mse_loss(module(x), y).backward()
    >>> record = capture.record
    >>> record.norms().shape, record.sq_norms["weight"].shape, record.grad_samples["weight"].shape
    (torch.Size([4]), torch.Size([4]), torch.Size([4, 2, 3]))
    >>> torch.allclose(record.grad_samples["weight"].mean(0), module.weight.grad, atol=1e-6)
    True

    Attributes:
        batch_size: number of samples B.
        sq_norms: by parameter p the squared norm ``||g_i,p||^2`` of each sample's gradient, shape (B,), real; of the
            parameters in `names`.
        grad_samples: by parameter each sample's gradient ``g_i,p``, shape (B, *parameter.shape); an `OptionError`
            where they were not asked for, with "grad_sample" among the quantities.
        square_sums: by parameter the sum over the samples of the squared entries of their gradients,
            ``sum_i g_i,p ** 2``, of the parameter's shape; an `OptionError` where they were not asked for, with
            "square_sum".
        coverage: of the weights that got a gradient in this backward, the share (by number of entries, in [0, 1]) whose
            per-sample gradient is known. Below 1 the norms leave weights out; at 0 they are nan.
        unsupported: parameters that got a gradient but have no value here, with the reason and what helps.
        unused: trainable parameters that got no gradient in this backward.
        mixing: the calls by which samples influence each other (batch normalisation in training): each value is then
            the sample's contribution to the batch gradient, divided by w_i, not what the sample alone would give. Empty
            where there are none, as the next three.
        axis_lost: the calls after which it is not known whose the values are, since no axis holds the samples any more.
            Whether samples influence each other there is not known: where they do, each value is as with `mixing`.
        weighting: the calls by which the loss gives samples weights w_i that `loss_reduction` does not tell: each value
            is then the sample's share of the batch gradient over the assumed weight (B times it for a mean), and off
            by the factor between the true w_i and the assumed one, a squared norm by its square.
        not_additive: the calls through which the batch gradient is not the weighted sum of these values (an embedding
            that divides by how often an index occurs in the batch): each value is what the sample alone would give.
        backward_index: which backward of the training step this is, counted from 0; those that reach no parameter do
            not count.
        samples: the places in the batch of the samples that values are for, (m,) int64; then (B,) is (m,) everywhere
            here. They are those chosen, or those that the loss of this backward is made of, as when each part of a
            batch has a backward of its own (a mean is then one over these), or samples have a weight of 0. None where
            they are all.
        in_loss: number of samples that the loss of this backward is made of, as far as is known.
        why_no_factor: the reason, where `factor` is None.
        sample_index: which samples these are: the indices of the dataset that the train dataloader has, (B,), int64, on
            the CPU, or a list of B keys where a sampler draws keys that are no ints. With several dataloaders of one
            batch size one for each, in the structure of the batch (a dict by the loaders' keys), None for a loader that
            is exhausted or has not B rows; of unequal batch sizes a list of texts such as "labelled/17", the loader's
            key and the index in its dataset, with None for rows that have none. None outside a Trainer, for iterable
            datasets, for data that are no DataLoader, and where the rows of the batch are not those that the sampler
            drew.
    """

    batch_size: int
    sq_norms: Mapping[str, Tensor]
    coverage: float
    grad_samples: Mapping[str, Tensor] = _NotAsked("the gradients themselves", "grad_sample")
    square_sums: Mapping[str, Tensor] = _NotAsked("the sums of squared entries", "square_sum")
    unsupported: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    mixing: tuple[str, ...] = ()
    axis_lost: tuple[str, ...] = ()
    weighting: tuple[str, ...] = ()
    not_additive: tuple[str, ...] = ()
    backward_index: int = 0
    samples: Tensor | None = None
    in_loss: int | None = None
    why_no_factor: str = ""
    _kept: KeptGradients | None = field(default=None, repr=False)
    _own: OwnScale | None = field(default=None, repr=False)
    _rows: Tensor | None = field(default=None, repr=False)  # (parameters, B), where the squared norms are its rows
    _weighted_square_sums: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    sample_index: SampleIndex = None
    _sums_by_version: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __repr__(self) -> str:
        index = f" at backward {self.backward_index}" if self.backward_index else ""
        return (
            f"<PerSampleRecord of {self.num_values} samples and {len(self.sq_norms)} parameters, coverage "
            f"{self.coverage:.3g}{index}>"
        )

    @property
    def _asked_grad_samples(self) -> Mapping[str, Tensor]:
        """The gradients themselves; none where they were not asked for."""
        return {} if isinstance(self.grad_samples, _NotAsked) else self.grad_samples

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that have values, in the order of ``module.named_parameters()``."""
        return tuple(self.sq_norms)

    @property
    def factor(self) -> Tensor | None:
        """What this backward added to ``.grad`` of the parameters in `names` is ``factor * sum_i g_i``.

        The sum is over all samples of its loss, and the factor w_i times every factor of the loss (accumulation, loss
        scaling), 0-dimensional. None where it is something else.
        """
        return None if self.why_no_factor or self._own is None else _as_tensor(self._own.factor())

    @property
    def _relative_weights(self) -> Tensor | None:
        """What the samples weigh in the mean that is their loss, ``B w_i``, (B,); None where w is no tensor."""
        # B counts the samples of the loss. With these, the gradient of the loss is the mean of ``B w_i g_i``.
        if self._own is None or not isinstance(self._own.weighting, Tensor):
            return None
        return self._own.weighting.detach() * self._own.batch_size

    @property
    def _mean_factor(self) -> Tensor | None:
        """By what `.grad` got the sum of the samples' gradients, each times its relative weight; None if otherwise."""
        if self._own is None or self.why_no_factor not in ("", UNEQUAL_WEIGHTS):
            return None
        if self._relative_weights is None:
            return _as_tensor(self._own.factor())
        return _as_tensor(self._own.loss_scale()) / self._own.batch_size

    @property
    def _loss_scale(self) -> Tensor | None:
        """What the gradient of the loss, of a sum divided by its number of samples, was multiplied by in `.grad`."""
        return None if self._own is None else _as_tensor(self._own.loss_scale())

    @property
    def num_values(self) -> int:
        """Number of samples that values are for: all B, or those in `samples`."""
        return self.batch_size if self.samples is None else self.samples.numel()

    def norms(self) -> Tensor:
        """Norm of each sample's gradient over all parameters in `names`: ``sqrt(sum_p ||g_i,p||^2)``.

        Returns:
            One norm per sample, shape (B,), of the gradient of the sample's own loss; nan where no parameter has
            values.
        """
        values, rows = list(self.sq_norms.values()), self._rows
        if rows is not None and (len(rows) != len(values) or {*map(id, map(view_base, values))} != {id(rows)}):
            rows = None  # (the record is of some of these parameters)
        # a reader may have changed them in place
        versions = sum(map(version_counter, values)) if rows is None else version_counter(rows)
        if versions not in self._sums_by_version:
            self._sums_by_version[versions] = _sum(values, self.num_values) if rows is None else rows.sum(0)
        return self._sums_by_version[versions].sqrt()  # what one reader does to its own is nothing to the others

    def dot(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """Dot of each sample's gradient with one vector, ``sum_p <g_i,p, v_p>``, at the cost of a forward.

        Args:
            vectors: by parameter the vector's part v_p, of the parameter's shape, which may be scaled in any way;
                parameters that are left out count as zero.

        Returns:
            One number per sample, (B,), in units of gradient times vector.

        It is an `OptionError` where dots were not asked for or a vector does not fit a parameter in `names`, and an
        `UnsupportedError` where a tensor that the gradients are made of was changed in place since the backward.
        """
        return self._kept_for("dots", "dot").with_vectors(vectors)

    def project(self, projection: Projection) -> dict[str, Tensor]:
        """Each sample's gradient, projected at random to few numbers that keep dots between gradients in the mean.

        >>> import torch
        >>> from torch import nn
        >>> from lightning_persample import Projection, expanded_weights
        >>> module, x, y = nn.Linear(300, 200), torch.randn(4, 300), torch.randn(4, 200)
        >>> with expanded_weights(module, (x, y), quantities=("projection",)) as capture:
        ...     nn.functional.mse_loss(module(x), y).backward()
        >>> {name: tuple(rows.shape) for name, rows in capture.record.project(Projection(dim=256)).items()}
        {'weight': (4, 256), 'bias': (4, 200)}

        Args:
            projection: says to how many numbers, and by which matrices; use one object for all records, for it keeps
                the matrices that it has drawn.

        Returns:
            By parameter in `names` (B, k) with ``k = projection.size_of(parameter.shape)``, of the gradient of the
            sample's own loss.
        It is an `OptionError` where projections were not asked for, and an `UnsupportedError` where a tensor that the
        gradients are made of was changed in place since the backward.
        """
        return self._kept_for("projections", "projection").project(projection)

    def moments(self) -> Iterator[tuple[str, Moments, Tensor | None]]:
        """What `EigenProjection.fit` adds up, of the samples whose gradient is finite."""
        finite = self.norms().isfinite().nonzero().flatten()
        return self._kept_for("projections", "projection").moments(finite)

    def _kept_for(self, what: str, quantity: str) -> KeptGradients:
        if self._kept is None or not self._kept.gives(quantity):
            raise not_asked(what, quantity)
        return self._kept

    def nonfinite(self) -> Tensor:
        """The samples whose norm is inf or nan (a loss that overflowed, bad data), by their place in the batch.

        Returns:
            Indices along the batch, (samples,), int64; all samples that values are for where no parameter has any.
        """
        found = (~self.norms().isfinite()).nonzero().flatten()
        return found if self.samples is None else self.samples.to(found.device)[found]

    def group_norms(self, depth: int) -> dict[str, Tensor]:
        """Norm of each sample's gradient over groups of parameters: ``sqrt(sum_{p in group} ||g_i,p||^2)``.

        The squares of all groups add up to the square of `norms`. "network.0.weight" and "network.0.bias" are in the
        group "network" at depth 1, in "network.0" at depth 2 and beyond.

        Args:
            depth: how many leading parts of a parameter's module path name its group; parameters of the root module
                are grouped under their own name.

        Returns:
            By group name one norm per sample, shape (B,), in the order of the parameters.

        Raises:
            OptionError: `depth` is less than 1.
        """
        if depth < 1:
            raise OptionError(f"depth is {depth!r}; allowed is an integer of at least 1")
        groups: dict[str, list[Tensor]] = {}
        for name, sq_norm in self.sq_norms.items():
            groups.setdefault(group_name(name, depth), []).append(sq_norm)
        return {group: _sum(terms, self.num_values).sqrt() for group, terms in groups.items()}


def _as_tensor(number: Tensor | float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64) if isinstance(number, float) else number


def group_name(parameter: str, depth: int) -> str:
    """The group of a parameter: the first `depth` parts of its module's path, or its own name at the root."""
    *path, own = parameter.split(".")
    return ".".join(path[:depth]) if path else own


def _sum(sq_norms: list[Tensor], batch_size: int) -> Tensor:
    return summed(sq_norms) if sq_norms else torch.full((batch_size,), float("nan"))


OUTSIDE = "its gradient comes from calls without a tensor of the batch"
_PENALTY = (
    ": a term of the loss that belongs to no sample, or data that is not in the batch, such as a copy of its tensors; "
    "put such data into the batch or pass it through mark_samples (`from lightning_persample import mark_samples`), "
    "and constants of a penalty into buffers of the module"
)
_ROWS_MADE = (
    "; {} makes as many rows as there are samples: if each of them is one sample's, add "
    "`from lightning_persample import mark_samples` and, there, `{}`"
)
ROWS_MADE = re.compile(r"; `\w+`(?: at \S+)? makes as many rows as[^\n]*?and, there, `[^`\n]+`")
_ASSIGNED = re.compile(r"\s*(\w+) = ")
_NAMED = 8
_LAYER = re.compile(r" with `[^`]+`(, `[^`]+`)*")
_SHAPE = re.compile(r"\([\d, ]*\)")
_REMEDIES = (": pass loss_reduction", ": go backward from", ": give the weight", ": take one of the two")
_REMEDY = " Give the weight of each sample in the loss as loss_reduction, {weights}."
OF_CAPTURE = "a tensor of shape (B,)"
OF_CALLBACK = (
    "a function (outputs, batch) that returns a tensor of shape (B,), as w[batch[1]] / w[batch[1]].sum() for class "
    "weights w (losses.md in the guide has more); outputs is what training_step returns, so let it return what the "
    "weights are made of"
)
_COMPARE = {
    OF_CAPTURE: "check_per_sample_gradients compares them sample by sample",
    OF_CALLBACK: "verify=True compares them sample by sample",
}
_NOT_THE_USERS = frozenset({
    "lightning_persample", "torch", "lightning", "pytorch_lightning", "lightning_fabric", "contextlib", "functools",
})  # fmt: skip


@dataclass(frozen=True)
class Coverage:
    """The trainable parameters of one backward.

    Attributes:
        reached: parameters whose per-sample gradient is known.
        unsupported: parameters that got a gradient whose parts per sample are not known, with the reason.
        unused: parameters that got no gradient.
        share: entries of `reached` over entries of `reached` and `unsupported`.
    """

    reached: tuple[str, ...]
    unsupported: Mapping[str, str]
    unused: tuple[str, ...]
    share: float


def classify(
    parameters: Mapping[str, Tensor],
    got_gradient: Collection[str],
    reported: Collection[str],
    refused: Mapping[str, str],
    penalized: Collection[str] = (),
    outside: Callable[[], str] = lambda: OUTSIDE + _PENALTY,
) -> Coverage:
    """Sort the trainable parameters; one that a penalty of weights alone has reached, and nothing else, is unused."""
    if not refused and len(reported) == len(parameters):
        return Coverage(tuple(parameters), {}, (), 1.0)
    unsupported = {name: refused[name] for name in parameters if name in refused}
    known = {*reported, *refused, *penalized}
    unsupported |= {name: outside() for name in parameters if name in got_gradient and name not in known}
    reached = tuple(name for name in parameters if name in reported and name not in unsupported)
    unused = tuple(name for name in parameters if name not in reported and name not in unsupported)
    with_values, without = (sum(parameters[name].numel() for name in names) for names in (reached, unsupported))
    share = with_values / (with_values + without) if with_values + without else 1.0
    return Coverage(reached, unsupported, unused, share)


def outside_text(made: Iterable[tuple[str, tuple[str, int] | None]]) -> str:
    """Why a weight has no values whose gradient no tensor of the batch has a part in; `made`: ops that made B rows."""
    if not made:
        return OUTSIDE + _PENALTY
    texts = []
    for op, place in made:
        line = "" if place is None else linecache.getline(*place)
        call, target = f"torch.{op}(", _ASSIGNED.match(line)
        name = "z" if target is None else target[1]
        if call not in line:
            marked = f"{name} = mark_samples({name})"
        else:
            marked = f"{f'{name} = ' if line.lstrip().startswith(f'{name} = {call}') else ''}mark_samples({call}...))"
        texts.append(_ROWS_MADE.format(f"`{op}`{line_of(place)}", marked))
    return OUTSIDE + "".join(texts)


def warning_texts(record: PerSampleRecord, weights: str = OF_CALLBACK) -> list[str]:
    """What a user must know about a record, at most one text on each kind of trouble; `weights`: how to give them."""
    texts = []
    if record.unsupported:
        reasons: dict[str, list[str]] = {}
        for name, reason in record.unsupported.items():
            reasons.setdefault(reason, []).append(name)
        lines = []
        for alike in _alike(reasons):
            names = [name for reason in alike for name in reasons[reason]]
            lines.append(f"{listed(names)}: {_said_once(alike)}")
        texts.append(
            f"Per-sample gradients are missing for {_counted(record.unsupported)}, which the reported norms leave "
            "out:\n" + _bulleted(lines)
        )
    if not record.sq_norms:  # there are no values to say more of
        return texts
    if record.mixing:
        norm = " (GroupNorm in place of BatchNorm)" if any("batch_norm` on" in text for text in record.mixing) else ""
        texts.append(
            "Samples of a batch influence each other, so a sample has no gradient of its own: reported is each "
            "sample's contribution to the batch gradient. Layers and losses that keep samples apart"
            f"{norm} give it one.\n" + _bullets(record.mixing)
        )
    if record.axis_lost:
        texts.append(
            "The batch axis is lost, and values computed from there on cannot be assigned to samples: reported is each "
            "sample's contribution to the batch gradient, which is its own gradient only where the samples stay apart. "
            "Keep them along one axis, pass data that holds them along another through mark_samples, or register a "
            "rule for an op of your own.\n" + _bullets(record.axis_lost)
        )
    if record.weighting:
        texts.append(
            "The samples are weighted differently from loss_reduction, so their own gradients are off by a factor: "
            f"reported is each sample's share of the batch gradient, {_remedy_of_weights(record.weighting, weights)}\n"
            + _bullets(record.weighting)
        )
    if record.not_additive:
        texts.append(
            "The batch gradient is not the weighted sum of the samples' gradients: reported is what each sample alone "
            "gives.\n" + _bullets(record.not_additive)
        )
    return texts


def say(record: PerSampleRecord, unsupported: str) -> None:
    """Warn of what a user must know about a record; `unsupported` is "warn", "error" or "ignore"."""
    if unsupported == "ignore":
        return
    texts = warning_texts(record, OF_CAPTURE)
    if unsupported == "error" and record.unsupported:
        stop(UnsupportedError(texts[0]))
    for text in texts:
        warn_user(text)


def warn_user(text: str) -> None:
    """Warn, at the line of the user's code that is running: not at one of this package, of torch or of Lightning."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, PerSampleWarning, stacklevel=level if frame is not None else 2)


def _has_remedy(text: str) -> bool:
    return any(remedy in text for remedy in _REMEDIES)


def _remedy_of_weights(texts: tuple[str, ...], weights: str) -> str:
    """What is reported of samples that are weighted differently, and what to give."""
    if all(text.startswith(OTHER_WEIGHTS) for text in texts):
        return f"divided by the weight that loss_reduction gives it. {_COMPARE[weights]}."
    said = "times B where loss_reduction is 'mean'."
    return said if all(map(_has_remedy, texts)) else said + _REMEDY.format(weights=weights)


def _counted(parameters: Mapping[str, str]) -> str:
    return "1 parameter" if len(parameters) == 1 else f"{len(parameters)} parameters"


def _bullets(texts: tuple[str, ...]) -> str:
    """The texts, those of the loss before those of layers, and those that differ in the layer alone as one."""
    groups = sorted(_alike(texts), key=lambda alike: _LAYER.search(alike[0]) is not None)
    return _bulleted([_said_once(alike) for alike in groups])


def _bulleted(lines: list[str]) -> str:
    more = [f"- and {len(lines) - _NAMED} more"] if len(lines) > _NAMED else []
    return "\n".join([f"- {line}" for line in lines[:_NAMED]] + more)


def _alike(texts: Iterable[str]) -> list[list[str]]:
    """The texts in groups that differ in nothing but shapes and the names of a layer's parameters."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(_SHAPE.sub("", _LAYER.sub("", text)), []).append(text)
    return list(groups.values())


def _said_once(alike: list[str]) -> str:
    more = len(alike) - 1
    return alike[0] + (f" (and {more} more such {'call' if more == 1 else 'calls'})" if more else "")


def listed(names: Collection[str], most: int = _NAMED) -> str:
    """Names of parameters in a message, the first of many."""
    shown = ", ".join(f"`{name}`" for name in list(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
