"""What a structure of per-sample gradients is: the quantities, and the slow way to each.

Every quantity (squared norm, inner product, dot, the gradient itself) is a method of the structure, so that a new op
never touches a quantity and a new quantity never touches an op. Nothing is rescaled: the gradients are those of what
was differentiated. Low precision (float16, bfloat16) is added up and returned in float32. Complex parameters have |.|^2
as squared norm and Re(conj(a) b), summed, as inner product.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_persample.gradients import norms, precision
from lightning_persample.gradients.cost import Result, by_chunks, chunks, run_for_use
from lightning_persample.gradients.moments import Moments, dense_moments, total_moments
from lightning_persample.gradients.projection import Factors, Projection

AnyGradient = TypeVar("AnyGradient", bound="SampleGradient")


@dataclass(frozen=True, eq=False)
class SampleGradient(ABC):
    """The gradient of each of B samples with respect to one parameter.

    >>> import torch
    >>> from lightning_persample import Outer
    >>> gradient = Outer(torch.ones(4, 5, 2), torch.ones(4, 5, 3))  # of a linear layer on five positions
    >>> gradient.sq_norm().round(), gradient.dense().shape
    (tensor([150., 150., 150., 150.]), torch.Size([4, 2, 3]))

    A subclass is a frozen dataclass of tensors first, all with the batch as their first axis. It defines `shape` and
    `_dense`, which give the default, slow way to every quantity, and overrides what it can do cheaper.
    """

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Shape of the parameter."""

    @abstractmethod
    def _dense(self) -> Tensor: ...

    @property
    def batch_size(self) -> int:
        """Number of samples, B."""
        return next(iter(vars(self).values())).shape[0]  # (of its first tensor)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the gradient is added up: float32 at least."""
        return precision.accumulation_dtype(*self.tensors())

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return next(iter(vars(self).values())).device

    def dense(self) -> Tensor:
        """The gradient of each sample.

        Returns:
            (B, *shape), float32 at least.
        """
        return self._run(self._dense)

    def sq_norm(self) -> Tensor:
        """The squared norm of each sample's gradient, sum |g[b]|^2.

        Returns:
            (B,), real, float32 at least, never negative; NaN or infinite where the gradient is.
        """
        return self._run(self._sq_norm)

    def sq_norm_or_later(self) -> tuple[Tensor, precision.Later]:
        """`sq_norm` without waiting for a device.

        Returns:
            (B,), and what makes it what `sq_norm` gives, once its ``corrections`` have been called; they hold the
            tensors of the structure.
        """
        later = precision.Later(self.tensors())
        value = self._run(self._sq_norm_or_later, later)
        later.corrections = [partial(self._run, correct) for correct in later.corrections]
        return value, later

    def inner(self, other: SampleGradient) -> Tensor:
        """The inner product of each sample's gradient with the same sample's in `other`, sum Re(conj(g[b]) h[b]).

        Args:
            other: another structure of the same samples and parameter.

        Returns:
            (B,), real, float32 at least.

        Raises:
            ValueError: when batch size or shape differ.
        """
        if (self.batch_size, self.shape) != (other.batch_size, other.shape):
            raise ValueError(
                f"inner: {_describe(self)} and {_describe(other)} do not belong to the same samples and parameter."
            )
        return self._run(self._inner_of, other, beside=other)

    def _inner_of(self, other: SampleGradient) -> Tensor:
        for one, two in ((self, other), (other, self)):
            known = one._inner(two)
            if known is not None:
                return known
        return self._by_chunks(3, lambda part: norms.dense_inner(self._formed(part), other._formed(part)))

    def _run(self, kernel: Callable[..., Result], *arguments: Any, beside: SampleGradient | None = None) -> Result:
        """Run a kernel out of autocast, with memory counted by what this structure holds, and the one beside it."""
        count = self._held_bytes if beside is None else lambda: self._held_bytes() + beside._held_bytes()
        with precision.without_autocast(self.device.type):
            return run_for_use(count, kernel, *arguments)

    def dot(self, vector: Tensor) -> Tensor:
        """The dot of each sample's gradient with one vector, sum Re(conj(g[b]) v).

        Args:
            vector: a tensor of the parameter's shape.

        Returns:
            (B,), real, float32 at least.

        Raises:
            ValueError: when the vector has another shape.
        """
        if vector.shape != self.shape:
            raise ValueError(f"dot: {_describe(self)} with a vector of shape {tuple(vector.shape)}.")
        return self._run(self._dot, vector)

    def project(self, projection: Projection, name: str) -> Tensor:
        """Each sample's gradient, projected to few numbers, ``left G right^T`` of its matrix G, row after row.

        Args:
            projection: says to how many numbers, and at random by which matrices.
            name: of the parameter, which has matrices of its own.

        Returns:
            (B, projection.size_of(shape)), float32 at least, in new memory.
        """
        factors = projection.factors(name, self.shape, self.dtype, self.device)
        if factors.size == 0:  # of a parameter without entries
            return torch.zeros(self.batch_size, 0, dtype=self.dtype, device=self.device)
        return self._run(self._project, factors)

    def square_sum(self) -> Tensor:
        """The sum over the samples of the squares of the gradient's entries, sum_b |g[b]|^2 entry by entry.

        Returns:
            (*shape), real, float32 at least; not of the samples' norms, whose sum of squares is the sum of its entries.
        """
        return self._run(self._square_sum)

    def moments(self) -> Moments:
        """The second moments of what the gradients' rows and columns are made of, over samples and positions.

        Returns:
            (p, p) and (d + 1, d + 1) for a parameter read as a matrix (p, d), the last row and column of ones that are
            appended where a bias would be; a vector of the diagonal where an axis is too long.
        """
        return self._run(self._moments)

    def times_one(self) -> Tensor | None:
        """What the gradient would have as a further column, of ones on the right side, (B, p); None without sides."""
        return None

    def scaled(self: AnyGradient, factors: Tensor | float) -> AnyGradient:
        """The same structure with each sample's gradient times a number, (B,) or one for all."""
        fields = [field.name for field in dataclasses.fields(self)]
        name = next(each for each in fields if getattr(self, each).is_floating_point())  # the gradient is linear in it
        tensor = getattr(self, name).to(self.dtype)
        if isinstance(factors, Tensor):
            factors = factors.to(tensor).reshape(-1, *(1,) * (tensor.dim() - 1))
        return dataclasses.replace(self, **{name: tensor * factors})

    def tensors(self) -> list[Tensor]:
        """The tensors that the structure holds."""
        return [x for x in vars(self).values() if isinstance(x, Tensor)]

    def samples(self: AnyGradient, start: int, stop: int) -> AnyGradient:
        """The same structure for samples start to stop - 1 alone; its tensors are views."""
        return self._map(lambda tensor: tensor[start:stop])

    def pick(self: AnyGradient, samples: Tensor) -> AnyGradient:
        """The same structure for the samples at these places alone, (m,) integers; its tensors are copies."""
        return self._map(lambda tensor: tensor[samples])

    def _formed(self, part: slice) -> Tensor:
        """The gradients of some samples."""
        is_all = part.stop - part.start == self.batch_size
        return (self if is_all else self.samples(part.start, part.stop))._dense()

    def _by_chunks(self, copies: int, compute: Callable[[slice], Tensor]) -> Tensor:
        """What is computed of some samples at a time, whose gradients are held so many times: (B, ...)."""
        return by_chunks(self.batch_size, copies * self._dense_bytes(), self.device, compute)

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        """One real zero for each sample, in the precision of `dtype`: (B,)."""
        return torch.zeros(self.batch_size, dtype=dtype.to_real(), device=self.device)

    def _sq_norm(self) -> Tensor:
        return norms.dense_sq_norm(self._dense())

    def _sq_norm_or_later(self, later: precision.Later) -> Tensor:
        return self._sq_norm()

    def _sq_norm_and_sum(self) -> tuple[Tensor, Tensor]:
        """The squared norms and the sum over the samples, with each gradient formed once."""
        total, squares = torch.zeros(self.shape, dtype=self.dtype, device=self.device), self._zeros(self.dtype)
        for part in chunks(self.batch_size, self._dense_bytes(), self.device):
            formed = self._formed(part)
            squares[part] = norms.dense_sq_norm(formed)
            total += formed[0] if len(formed) == 1 else formed.sum(0)
        return squares, total

    def _terms_sq_norm(self) -> Tensor:
        """Squared norm if what is added up were orthogonal; `_sq_norm` where it is far below this has cancelled."""
        return self._sq_norm()

    def _dot(self, vector: Tensor) -> Tensor:
        return self._by_chunks(2, lambda part: norms.dense_dot(self._formed(part), vector))

    def _project(self, factors: Factors) -> Tensor:
        return self._by_chunks(2, lambda part: factors.of_gradients(self._formed(part)))

    def _square_sum(self) -> Tensor:
        total = torch.zeros(self.shape, dtype=self.dtype.to_real(), device=self.device)
        for part in chunks(self.batch_size, 2 * self._dense_bytes(), self.device):
            total += _squares(self._formed(part)).sum(0)
        return total

    def _moments(self) -> Moments:
        parts = list(chunks(self.batch_size, 3 * self._dense_bytes(), self.device)) or [slice(0, 0)]
        return total_moments(dense_moments(self._formed(part)) for part in parts)

    def _inner(self, other: SampleGradient) -> Tensor | None:
        """Inner product with a kind for which this structure knows a cheap way, else None."""
        return None

    def _map(self: AnyGradient, function: Callable[[Tensor], Tensor]) -> AnyGradient:
        """The same structure with `function` applied to each of its tensors."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **{k: function(v) for k, v in values.items() if isinstance(v, Tensor)})

    def _widened(self: AnyGradient) -> AnyGradient:
        """The same structure in the widest precision of its device."""
        return self._map(lambda x: x.to(precision.wide_dtype(x)) if x.is_floating_point() or x.is_complex() else x)

    def _numbers(self) -> int:
        """How many numbers the structure holds for one sample."""
        return sum(prod(tensor.shape[1:]) for tensor in self.tensors())

    def _held_bytes(self) -> int:
        """Bytes that the use holds in any case: the structure's tensors, the parameter and its ``.grad``."""
        held = 2 * self._dense_bytes()
        for tensor in self.tensors():
            held += tensor.numel() * tensor.element_size()
        return held

    def _dense_bytes(self) -> int:
        """Bytes of one sample's gradient."""
        return prod(self.shape) * self.dtype.itemsize


def _describe(gradient: SampleGradient) -> str:
    return f"{type(gradient).__name__} of {gradient.batch_size} samples and shape {tuple(gradient.shape)}"


def _squares(grads: Tensor) -> Tensor:
    """|.|^2 of every entry."""
    return torch.view_as_real(grads.resolve_conj()).square().sum(-1) if grads.is_complex() else grads.square()
