"""What one backward gave: the values handed to callbacks and users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_persample.engine.kept_gradients import KeptGradients
from lightning_persample.engine.own_scale import OwnScale, summed
from lightning_persample.errors import OptionError
from lightning_persample.gradients import Projection

__all__ = ["UNEQUAL_WEIGHTS", "PerSampleRecord", "SampleIndex"]

UNEQUAL_WEIGHTS = "the samples weigh unequally in the loss"

SampleIndex: TypeAlias = "Tensor | Sequence[Any] | Mapping[str, Any] | None"


class _NotAsked(dict[str, Tensor]):
    """Values that were not asked for."""

    def __init__(self, what: str, quantity: str) -> None:
        super().__init__()
        self._what, self._quantity = what, quantity

    def __missing__(self, name: str) -> Tensor:
        raise KeyError(
            f"{name}: the {self._what} were not asked for; pass quantities=('sq_norm', '{self._quantity}') to "
            f"expanded_weights, or let `needs` of the callback return {{'{self._quantity}'}}"
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
        grad_samples: by parameter each sample's gradient ``g_i,p``, shape (B, *parameter.shape); empty unless asked
            for, with "grad_sample" among the quantities.
        square_sums: by parameter the sum over the samples of the squared entries of their gradients,
            ``sum_i g_i,p ** 2``, of the parameter's shape; empty unless asked for, with "square_sum".
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
            the CPU, or a list of B keys where a sampler draws keys that are no ints. With several dataloaders one for
            each, in the structure of the batch (a dict by the loaders' keys), None for a loader that is exhausted or
            has not B rows. None outside a Trainer, for iterable datasets, for data that are no DataLoader, and where
            the rows of the batch are not those that the sampler drew.
    """

    batch_size: int
    sq_norms: Mapping[str, Tensor]
    coverage: float
    grad_samples: Mapping[str, Tensor] = field(
        default_factory=partial(_NotAsked, "gradients themselves", "grad_sample")
    )
    square_sums: Mapping[str, Tensor] = field(
        default_factory=partial(_NotAsked, "sums of squared entries", "square_sum")
    )
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
    _weighted_square_sums: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    sample_index: SampleIndex = None

    def __repr__(self) -> str:
        index = f" at backward {self.backward_index}" if self.backward_index else ""
        return (
            f"<PerSampleRecord of {self.num_values} samples and {len(self.sq_norms)} parameters, coverage "
            f"{self.coverage:.3g}{index}>"
        )

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
        values = list(self.sq_norms.values())
        versions = sum(value._version for value in values)  # a reader may have changed them in place
        if versions not in self._norms_by_version:
            self._norms_by_version[versions] = _root_of_sum(values, self.num_values)
        return self._norms_by_version[versions].clone()  # what one reader does to its own is nothing to the others

    @cached_property
    def _norms_by_version(self) -> dict[int, Tensor]:
        return {}

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

    def _kept_for(self, what: str, quantity: str) -> KeptGradients:
        if self._kept is None or not self._kept.gives(quantity):
            raise OptionError(
                f"{what} were not asked for; pass quantities=('sq_norm', '{quantity}') to expanded_weights, or let "
                f"`needs` of the callback return {{'{quantity}'}}"
            )
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
        return {group: _root_of_sum(terms, self.num_values) for group, terms in groups.items()}


def _as_tensor(number: Tensor | float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64) if isinstance(number, float) else number


def group_name(parameter: str, depth: int) -> str:
    """The group of a parameter: the first `depth` parts of its module's path, or its own name at the root."""
    *path, own = parameter.split(".")
    return ".".join(path[:depth]) if path else own


def _root_of_sum(sq_norms: list[Tensor], batch_size: int) -> Tensor:
    if not sq_norms:
        return torch.full((batch_size,), float("nan"))
    return summed(sq_norms).sqrt()
