"""From what the samples contributed to a weighted, scaled loss to the gradients of their own losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor

__all__ = ["OwnScale", "Weighting", "in_dtype_of", "in_gradient_dtype", "summed"]

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

    def of_samples(self, places: Tensor | None) -> OwnScale:
        """The same for some of the samples, by their places; None is all."""
        if places is None or not isinstance(self.weighting, Tensor):
            return self
        return replace(self, weighting=self.weighting.detach()[places.to(self.weighting.device)])

    def own(self, values: Sequence[Tensor], power: int = 1) -> list[Tensor]:
        """Contributions without w_i and without the scale of the loss; values (B, ...)."""
        like = values[0]
        if isinstance(self.weighting, Tensor):
            weights = self.weighting.detach().to(like.device, like.dtype).pow(power)
            values = [each / weights.reshape(-1, *(1,) * (each.dim() - 1)) for each in values]
        elif self.weighting == "mean":
            values = torch._foreach_mul(list(values), float(self.batch_size) ** power)
        if self.scale is not None:
            values = torch._foreach_div(list(values), self.scale.to(like.device, like.dtype).pow(power))
        return list(values)

    def own_sq_norms(self, sq_norms: Sequence[Tensor]) -> list[Tensor]:
        """`own` of squared norms (B,) of any dtypes and devices, those of a kind in one go; the order is kept."""
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, values in enumerate(sq_norms):
            alike.setdefault((values.device, values.dtype), []).append(place)
        found = list(sq_norms)
        for places in alike.values():
            own = self._own_rows(torch.stack([sq_norms[place] for place in places]))
            for place, values in zip(places, own.unbind(), strict=True):
                found[place] = values
        return found

    def _own_rows(self, rows: Tensor) -> Tensor:
        """`own` of squared norms (parameters, B) in one go."""
        if isinstance(self.weighting, Tensor):
            rows = rows / self.weighting.detach().to(rows.device, rows.dtype).square()
        elif self.weighting == "mean":
            rows = rows * float(self.batch_size) ** 2
        return rows if self.scale is None else rows / self.scale.to(rows.device, rows.dtype).square()

    def own_norms(self, norms: Sequence[Tensor]) -> Tensor:
        """`own` of norms, up to the sign; norms (B,) -> (norms, B)."""
        found = torch.stack(list(norms))
        if isinstance(self.weighting, Tensor):
            weights = self.weighting.detach().to(found.device, found.dtype)
            found /= weights
            found.masked_fill_((found == 0) & (weights.square() == 0), float("nan"))  # it was too small to be seen
        elif self.weighting == "mean":
            found *= _number(float(self.batch_size), found.dtype)
        return found if self.scale is None else found.div_(self.scale.to(found.device, found.dtype))

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


@cache
def _number(value: float, dtype: torch.dtype) -> Tensor:
    """A number as a tensor: to make one each time costs more than the product that it is for."""
    return torch.tensor(value, dtype=dtype, device="cpu")


def in_dtype_of(parameter: Tensor, values: Tensor) -> Tensor:
    """Gradients or norms in the precision of the parameter, which its ``.grad`` has, and float32 at least."""
    return in_gradient_dtype(parameter.dtype, values)


def in_gradient_dtype(parameter: torch.dtype, values: Tensor) -> Tensor:
    """`in_dtype_of` a parameter of this dtype."""
    if values.dtype is parameter and parameter in (torch.float32, torch.float64):
        return values
    dtype = torch.promote_types(parameter, torch.float32)
    if values.is_complex() and not dtype.is_complex:  # the gradient of a real parameter is real
        values = values.real
    return values.to(dtype if values.is_complex() else dtype.to_real())


def nan_but(samples: Sequence[int], values: Tensor) -> Tensor:
    """Values (B, ...) of these samples and nan for the others, in a new tensor: what is given may be shared."""
    of_others = torch.ones(len(values), dtype=torch.bool)
    of_others[list(samples)] = False
    return values.masked_fill(of_others.to(values.device).view(-1, *(1,) * (values.dim() - 1)), float("nan"))


def summed(terms: Sequence[Tensor]) -> Tensor:
    """The sum of terms (B,) that parameters of several devices and dtypes have: on the first device, in the widest."""
    device, dtype = terms[0].device, terms[0].dtype
    if any(term.dtype is not dtype or term.device != device for term in terms):
        dtype = max((term.dtype for term in terms), key=lambda dtype: torch.finfo(dtype).bits)
        terms = [term.to(device, dtype) for term in terms]
    return torch.stack(list(terms)).sum(0)
