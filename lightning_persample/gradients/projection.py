"""Random projections of gradients: what a parameter's gradient is multiplied by, whatever structure holds it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isqrt, prod
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_persample.errors import OptionError
from lightning_persample.gradients.cost import by_chunks

Kind = Literal["normal", "rademacher"]
_Key = tuple[str, str, int, int, torch.dtype, torch.device]

_MOST_KEPT = 256 * 2**20  # bytes of drawn matrices that a projection keeps; further ones are drawn again at each use


@dataclass(frozen=True, eq=False)
class Factors:
    """The two matrices that project a parameter read as a matrix (p, d): G becomes left G right^T, (a, b)."""

    left: Tensor | None  # (a, p); None leaves the rows as they are (a = p)
    right: Tensor | None  # (b, d); None leaves the columns as they are (b = d)
    rows: int  # a
    columns: int  # b
    dtype: torch.dtype  # of the matrices, in which sums are taken

    @property
    def size(self) -> int:
        """How many numbers a gradient becomes, a b."""
        return self.rows * self.columns

    def on_rows(self, tensor: Tensor) -> Tensor:
        """Project the last axis where it holds the parameter's rows: (..., p) to (..., a)."""
        return tensor if self.left is None else F.linear(tensor, self.left)

    def on_columns(self, tensor: Tensor) -> Tensor:
        """Project the last axis where it holds the parameter's columns: (..., d) to (..., b)."""
        return tensor if self.right is None else F.linear(tensor, self.right)

    def rows_of(self, matrices: Tensor) -> Tensor:
        """Project the rows of matrices: (n, p, c) to (n, a, c)."""
        return matrices if self.left is None else torch.bmm(self.left.expand(len(matrices), -1, -1), matrices)

    def by_chunks(self, like: Tensor, numbers_each: int, project: Callable[[slice], Tensor]) -> Tensor:
        """(B, a b), some samples at a time, each of which needs so many numbers for its temporaries."""
        bytes_each = (numbers_each + self.size) * self.dtype.itemsize
        return by_chunks(len(like), bytes_each, like.device, project).reshape(-1, self.size)

    def of_gradients(self, grad: Tensor) -> Tensor:
        """Project gradients (B, *shape): (B, a b)."""
        shape, dtype = grad.shape[1:], self.dtype
        p = shape[0] if len(shape) > 1 else 1
        if self.left is None and self.right is None:
            return grad.reshape(grad.shape[0], self.size).to(dtype, copy=True)
        d = shape.numel() // p
        numbers = copied_numbers(grad, dtype) + min(p * self.columns, d * self.rows)
        return self.by_chunks(grad, numbers, lambda part: self.of(grad[part].to(dtype).reshape(-1, p, d)))

    def of(self, matrices: Tensor) -> Tensor:
        """Project both sides of matrices, in the cheaper order: (n, p, d) to (n, a, b)."""
        (p, d), a, b = matrices.shape[1:], self.rows, self.columns
        if p * d * b + p * a * b <= p * d * a + a * d * b or self.left is None:
            return self.rows_of(self.on_columns(matrices))
        return self.on_columns(self.rows_of(matrices))


@dataclass(frozen=True)
class Projection:
    """A random projection of every parameter's gradient to at most `dim` numbers, decided by the seed.

    A parameter is read as a matrix G (p, d), its first axis by all others (a vector as one row), and becomes
    ``left G right^T``, (a, b) with ``a * b <= dim``. Entries of left (a, p) have mean 0 and variance 1/a, those of
    right (b, d) 1/b: dots of projected gradients are in the mean those of the gradients, whatever the parameter's
    shape. An axis that is no larger than its share of `dim`, its root, stays as it is and leaves its room to the other,
    so that a parameter of at most `dim` numbers is kept in full, in order.

    The random numbers depend on the seed, the parameter's name, the side and the matrix's sizes alone: they are equal
    in every process, on every device and whatever the order of the parameters. They come from a generator of their own,
    and matrices that were drawn are kept with the projection.

    >>> projection = Projection(dim=256)
    >>> projection.size_of((10,)), projection.size_of((512, 784)), projection.size_of((10, 512))
    (10, 256, 250)
    >>> left, right = projection.matrices("head.weight", (10, 512))
    >>> left.shape, right.shape  # 10 is less than a share of 16: the rows stay
    (torch.Size([10, 10]), torch.Size([25, 512]))

    Attributes:
        dim: the most numbers that are kept of one parameter.
        kind: what the entries are drawn from: "normal", or "rademacher" (one of two numbers, with equal chance).
        seed: another one gives another, independent projection.

    Raises:
        OptionError: one of them has a value that is not allowed.
    """

    dim: int = 256
    kind: Kind = "normal"
    seed: int = 0
    appended: Mapping[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)  # see `joined`
    _kept: dict[_Key, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, least in (("dim", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise OptionError(f"Projection: {name} is {value!r}; allowed is an integer of at least {least}")
        if self.kind not in get_args(Kind):
            raise OptionError(f"Projection: kind is {self.kind!r}; allowed are 'normal' and 'rademacher'")

    def __reduce__(self) -> tuple[type[Projection], tuple[int, str, int]]:
        """Copies and other processes draw the same matrices again."""
        return type(self), (self.dim, self.kind, self.seed)

    def settings(self) -> dict[str, Any]:
        """What decides the projection, for a manifest: `Projection(**settings)` is an equal one.

        Returns:
            "dim", "kind" and "seed".
        """
        return {"dim": self.dim, "kind": self.kind, "seed": self.seed}

    def size_of(self, shape: Sequence[int], name: str = "") -> int:
        """How many numbers a parameter of this shape becomes.

        Args:
            shape: of the parameter.
            name: of the parameter, which plays a part for an `EigenProjection` alone.

        Returns:
            a * b: all of them where they are at most `dim`.
        """
        return prod(self._sizes(*as_matrix(shape)))

    def matrices(self, name: str, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The two matrices by which the gradient of a parameter is projected.

        Args:
            name: of the parameter.
            shape: of the parameter.

        Returns:
            left (a, p) and right (b, d), float64 on the CPU, identities where an axis stays as it is. The projected
            gradient is ``left @ gradient.reshape(p, d) @ right.T``, row after row.
        """
        (p, d), found = as_matrix(shape), self.factors(name, shape, torch.float64, torch.device("cpu"))
        left, right = (
            torch.eye(size, dtype=torch.float64, device="cpu") if matrix is None else matrix.clone()
            for size, matrix in ((p, found.left), (d, found.right))
        )
        return left, right

    def factors(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Factors:
        """The matrices as the structures use them.

        Args:
            name: of the parameter.
            shape: of the parameter.
            dtype: of the matrices; the same numbers, rounded.
            device: of the matrices.

        Returns:
            The factors, whose matrices are shared and must not be changed.
        """
        p, d = as_matrix(shape)
        a, b = self._sizes(p, d)
        left = None if a == p else self._matrix((name, "left", a, p, dtype, device))
        right = None if b == d else self._matrix((name, "right", b, d, dtype, device))
        return Factors(left, right, a, b, dtype)

    def joined(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Projected gradients by parameter, (B, k), each with those of the vector that is appended to it."""
        return rows

    def _sizes(self, p: int, d: int) -> tuple[int, int]:
        share = isqrt(self.dim)
        if p * d <= self.dim:
            return p, d
        if d <= share:
            return min(p, self.dim // d), d
        a = min(p, share)
        return a, min(d, self.dim // a)

    def _matrix(self, key: _Key) -> Tensor:
        found = self._kept.get(key)
        if found is None:
            found = self._drawn(*key)
            if found.nbytes + sum(matrix.nbytes for matrix in self._kept.values()) <= _MOST_KEPT:
                self._kept[key] = found
        return found

    @torch.inference_mode(False)  # a matrix that is kept may be used outside of inference mode later
    @torch.no_grad()
    def _drawn(self, name: str, side: str, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        digest = hashlib.blake2b(f"{self.seed}/{side}/{rows}x{columns}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
        size = (rows, columns)
        if self.kind == "normal":
            drawn = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
        else:
            drawn = torch.randint(0, 2, size, generator=generator, dtype=torch.float32, device="cpu") * 2 - 1
        return drawn.to(device, dtype) * rows**-0.5


def copied_numbers(tensor: Tensor, dtype: torch.dtype) -> int:
    """How many numbers of one sample are copied for a product in `dtype`."""
    return tensor[:1].numel() if tensor.dtype != dtype or not tensor.is_contiguous() else 0


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """The rows and columns (p, d) of a parameter: its first axis by the rest, a vector as one row."""
    return (1, prod(shape)) if len(shape) < 2 else (shape[0], prod(shape[1:]))
