"""Projections of gradients to the directions in which activations and output gradients vary most."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Trainer
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_persample.callbacks.checkpoints import Source
from lightning_persample.callbacks.collect import Pass, Passing, run_pass
from lightning_persample.callbacks.lightning_internals import quiet_trainer
from lightning_persample.capture.record import PerSampleRecord
from lightning_persample.errors import OptionError, UnsupportedError
from lightning_persample.gradients.moments import Moments, total_moments
from lightning_persample.gradients.projection import Factors, Projection, as_matrix
from lightning_persample.influence.dataset import load_values, save_values
from lightning_persample.influence.influence_functions import LOGRA_DAMPING
from lightning_persample.options import CaptureOptions

_TOLERANCE = 1e-2  # of a bias' gradient to a column of ones, in low precision


class Basis(NamedTuple):
    """The directions of a parameter read as a matrix (p, d): rows (a, p), columns (b, d), or (b, d + 1) with a bias."""

    rows: Tensor
    columns: Tensor


class EigenProjection(Projection):
    """A projection of every parameter's gradient to the top eigenvectors of its two sides' second moments.

    A parameter is read as a matrix G (p, d), as by `Projection`, whose gradient is ``sum_t left_t right_t^T`` over
    positions t: of a linear layer the output gradients and the inputs, of a convolution the output gradients and the
    unfolded patches, of a transposed one the inputs and the unfolded output gradients, of an embedding one-hot rows and
    the output gradients; of any other parameter rows and columns of the gradient itself. It becomes ``Q_left G
    Q_right^T``, (a, b), whose rows are the a and b top eigenvectors of ``sum left_t left_t^T`` and ``sum right_t
    right_t^T`` over samples and positions whose output gradient is not 0. Of every pair of them the product of their
    eigenvalues, as a share l of all, says how much of the parameter's gradients lies there, and ``(l / (l + 2e-4))^2``,
    how much of the variance of `logra`'s scores: a and b are those that keep most of it, and numbers go to the
    parameters where they add most. A parameter has at most ``2 dim`` of them, and all together ``dim`` for each. The
    bias of a linear map or a convolution is a further column of the weight, whose right side is 1: the weight's numbers
    are of both, and the bias has none. An axis longer than 4096 keeps its entries of the largest second moment.

    It keeps more of what tells samples apart than `Projection` of equal size does, and is the basis of `ekfac`. Dots of
    projected gradients are dots of the gradients' parts within it, and not unbiased estimates of the dots.

    It is made by `fit`, or by `load` of what `save` has written, and used wherever `Projection` is:

    >>> from lightning_persample import EigenProjection
    >>> module, x, y = nn.Linear(20, 3), torch.randn(8, 20), torch.randn(8, 3)
    >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 4)
    >>> loss = lambda module, batch: nn.functional.mse_loss(module(batch[0]), batch[1])
    >>> projection = EigenProjection.fit(module, loader, dim=30, loss=loss)
    >>> projection.size_of((3, 20), "weight") <= 30, projection.size_of((3,), "bias")
    (True, 0)

    Attributes:
        dim: the numbers that are kept of one parameter in the mean, at most; None keeps the whole eigenbasis.
        bases: by parameter its directions.
        appended: by weight the bias that is a further column of it.

    Reference: George et al. 2018, Fast approximate natural gradient descent in a Kronecker-factored eigenbasis, section
    3, arXiv 1806.03884; Grosse et al. 2023, Studying large language model generalization with influence functions,
    section 2.4, arXiv 2308.03296; Choe et al. 2024, What is your data worth to GPT?, section 3.2 (the initialization of
    LoGra by principal components), arXiv 2405.13954.
    """

    bases: Mapping[str, Basis]
    appended: Mapping[str, str]

    def __init__(self, dim: int | None, bases: Mapping[str, Basis], appended: Mapping[str, str]) -> None:
        super().__init__(1 if dim is None else dim)
        for name, value in {"dim": dim, "bases": dict(bases), "appended": dict(appended)}.items():
            object.__setattr__(self, name, value)

    @classmethod
    def fit(
        cls,
        module: nn.Module,
        dataloader: Iterable[Any],
        dim: int | None = 256,
        *,
        checkpoint: Source | None = None,
        loss: Callable[[Any, Any], Any] | None = None,
        parameters: Iterable[str] | None = None,
        loss_reduction: Literal["mean", "sum"] | Callable[[Any, Any], Tensor] = "mean",
        batch_dim: int = 0,
        batch_size: int | None = None,
        batch_layout: Callable[[Any], Mapping[Tensor, Any]] | None = None,
        sample_index: Callable[[Any], Any] | None = None,
        trainer: Trainer | None = None,
        max_memory: int | None = None,
        weights_only: bool | None = None,
    ) -> EigenProjection:
        """The projection to the directions of these samples, in one pass that forms no gradient of a single sample.

        The pass is that of `collect_gradients`: in evaluation mode, every sample once, and the module, the Trainer and
        the random numbers as before. A sample whose gradient is not finite does not count. Give it the training data
        (a part of some thousands will do), and the checkpoint and the loss that gradients are collected with.

        Cost: besides the forward and backward ``p^2 + d^2`` operations for each position, and the eigenvectors of
        matrices of p and d rows, in float64 on the CPU.

        Args:
            module: whose gradients are to be projected.
            dataloader: a DataLoader of a dataset with a length, or batches with `sample_index`.
            dim: the numbers that are kept of one parameter in the mean, at most; None keeps all, in the eigenbasis.
            checkpoint: the weights, a path or a state dict; None takes the module as it is.
            loss: see `collect_gradients`, as all that follow.
            parameters: the names of the parameters that are projected; None takes all that are trainable.
            loss_reduction: how the loss is made of the samples' own losses.
            batch_dim: the axis of the batch's tensors that counts samples.
            batch_size: number of samples B of each batch; None reads it from the batch's tensors.
            batch_layout: says where the samples lie in tensors that do not hold them along `batch_dim`.
            sample_index: a callable ``(batch)`` that returns the index of each sample, for batches without it.
            trainer: decides on devices, strategy and precision.
            max_memory: bytes that the temporaries of one kernel may take.
            weights_only: whether files of checkpoints may hold nothing but tensors and plain values.

        Returns:
            The projection, in float64 where the module's parameters are and float32 elsewhere; the same one on all
            processes.

        Raises:
            UnsupportedError: a gradient is not known exactly, or the module is sharded; the text says why.

        It is an `OptionError` where an option has a value that is not allowed.
        """
        if dim is not None:
            Projection(dim)  # refuses what is not allowed
        asked = Pass(
            module,
            dataloader,
            sources=None if checkpoint is None else (checkpoint,),
            loss=loss,
            parameters=None if parameters is None else list(parameters),
            sample_index=sample_index,
            weights_only=weights_only,
            capture=CaptureOptions(
                loss_reduction=loss_reduction,
                batch_dim=batch_dim,
                batch_size=batch_size,
                batch_layout=batch_layout,
                max_memory=max_memory,
            ),
            quantity="projection",
        )
        fitted = run_pass(asked, quiet_trainer() if trainer is None else trainer, Fitting)
        if not fitted.sums:
            raise UnsupportedError(
                "the Trainer's strategy runs in other processes, which keep what they see: take strategy='ddp' of "
                "processes that are started together, or one process"
            )
        found = {}
        for name, parameter in asked.module.named_parameters():
            if name in asked.names and name not in fitted.appended.values():
                rows, columns = fitted.sums[name]
                d = as_matrix(parameter.shape)[1] + (name in fitted.appended)
                found[name] = _sorted(rows), _sorted(columns[:d] if columns.dim() == 1 else columns[:d, :d])
        values = {name: (rows[0], columns[0]) for name, (rows, columns) in found.items()}
        sizes = {name: (len(rows), len(columns)) for name, (rows, columns) in values.items()}
        bases = {}
        for name, size in (sizes if dim is None else _shared_out(values, dim)).items():
            is_double = asked.module.get_parameter(name).dtype == torch.float64
            kept = (top(count) for (_, top), count in zip(found[name], size, strict=True))
            bases[name] = Basis(*(each.to(torch.float64 if is_double else torch.float32) for each in kept))
        return cls(dim, bases, fitted.appended)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the projection to a file, so that later stores are of the same numbers.

        Args:
            path: of the file; one that is there is replaced when all is written, and stays where that fails.
        """
        bases = {name: tuple(basis) for name, basis in self.bases.items()}
        save_values(Path(path), "EigenProjection", {"dim": self.dim, "bases": bases, "appended": dict(self.appended)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EigenProjection:
        """The projection that `save` has written.

        Args:
            path: of the file.

        Returns:
            An equal projection. A file that is broken, or of something else, is a `PerSampleError`.
        """
        found = load_values(Path(path), "EigenProjection", "fit the projection again")
        bases = {name: Basis(*basis) for name, basis in found["bases"].items()}
        return cls(found["dim"], bases, found["appended"])

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and other processes get the same matrices."""
        return type(self), (self.dim, self.bases, self.appended)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EigenProjection) and self.settings() == other.settings()

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dim={self.dim}, {len(self.bases)} parameters, {self._digest})"

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.blake2b(repr(sorted(self.appended.items())).encode(), digest_size=8)
        for name, basis in sorted(self.bases.items()):
            for side in basis:
                digest.update(f"{name} {side.dtype} {tuple(side.shape)}".encode())
                digest.update(side.contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def settings(self) -> dict[str, Any]:
        """What decides the projection, for a manifest.

        Returns:
            "dim", "kind" ("eigen") and "digest", of the matrices.
        """
        return {"dim": self.dim, "kind": "eigen", "digest": self._digest}

    def size_of(self, shape: Any, name: str = "") -> int:
        """How many numbers a parameter becomes.

        Args:
            shape: of the parameter.
            name: of the parameter.

        Returns:
            a * b, with those of its bias; 0 for a bias that is a further column of its weight.

        It is an `OptionError` where it was not fitted to such a parameter.
        """
        if name in self.appended.values():
            return 0
        basis = self._basis(name, shape)
        return len(basis.rows) * len(basis.columns)

    def factors(self, name: str, shape: Any, dtype: torch.dtype, device: torch.device) -> Factors:
        """The matrices as the structures use them.

        Args:
            name: of the parameter.
            shape: of the parameter.
            dtype: of the matrices.
            device: of the matrices.

        Returns:
            The factors; of a bias that is a further column those of the weight's rows.

        It is an `OptionError` where it was not fitted to such a parameter.
        """
        weight = next((weight for weight, bias in self.appended.items() if bias == name), None)
        if weight is not None:
            rows = self._on(weight, "rows", dtype, device)
            return Factors(None, rows, 1, len(rows), dtype)
        self._basis(name, shape)
        rows, columns = (self._on(name, side, dtype, device) for side in ("rows", "columns"))
        return Factors(rows, columns, len(rows), len(columns), dtype)

    def _on(self, name: str, side: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """One side of a basis without its column of ones."""
        key = (name, side, 0, 0, dtype, device)
        if key not in self._kept:
            matrix = getattr(self.bases[name], side)
            if side == "columns" and name in self.appended:
                matrix = matrix[:, :-1]
            self._kept[key] = matrix.to(device, dtype).contiguous()
        return self._kept[key]

    def _basis(self, name: str, shape: Any) -> Basis:
        basis = self.bases.get(name)
        p, d = as_matrix(shape)
        if basis is None or (basis.rows.shape[1], basis.columns.shape[1] - (name in self.appended)) != (p, d):
            known = "no such parameter" if basis is None else "a parameter of another shape"
            raise OptionError(
                f"this EigenProjection was fitted to {known} as `{name}` of shape {tuple(shape)}: fit it again with "
                "the module and the parameters whose gradients are projected"
            )
        return basis

    def joined(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Projected gradients by parameter, (B, k), those of a bias added to the matrix that it is a column of."""
        for weight, bias in self.appended.items():
            if bias in rows:
                of_bias = rows[bias]
                column = self.bases[weight].columns[:, -1].to(of_bias)
                more = (of_bias.unsqueeze(2) * column).flatten(1)
                rows[weight] = rows[weight] + more if weight in rows else more
                rows[bias] = of_bias[:, :0]
        return rows


def _sorted(moment: Tensor) -> tuple[Tensor, Callable[[int], Tensor]]:
    """The eigenvalues of a second moment (k, k) or (k,), largest first, and what gives the top vectors as rows."""
    if moment.dim() > 1 and not (moment - moment.diagonal().diag_embed()).any():
        moment = moment.diagonal()
    if moment.dim() == 1:
        values, order = moment.sort(descending=True, stable=True)
        size = len(moment)
        return values, lambda count: values.new_zeros(count, size).scatter_(1, order[:count].unsqueeze(1), 1.0)
    values, vectors = torch.linalg.eigh(moment)
    vectors = vectors.mT.flip(0)
    largest = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
    vectors = vectors * torch.where(largest < 0, -1.0, 1.0)  # one sign, whatever the algorithm
    return values.flip(0).clamp_min(0), lambda count: vectors[:count].clone()


def _corners(rows: NDArray[np.float64], columns: NDArray[np.float64], most: int) -> list[tuple[float, int, int]]:
    """How much of the scores' variance sizes (a, b), ``a b <= most``, keep: a concave curve, from (1, 1)."""
    # sum_{i < a, j < b} (l / (l + damping))^2, l the product of eigenvalues i and j as a share of all
    best, rows_of = np.zeros(most + 1), np.zeros(most + 1, np.int64)
    sums = np.zeros(min(len(columns), most))
    for a, value in enumerate(rows[:most], 1):
        sums = sums[: most // a]
        share = value * columns[: len(sums)]
        sums += np.square(share / (share + LOGRA_DAMPING))
        kept, sizes = sums.cumsum(), a * np.arange(1, len(sums) + 1)
        is_more = kept > best[sizes]
        best[sizes[is_more]], rows_of[sizes[is_more]] = kept[is_more], a
    corners = [(float(best[1]), 1, 1)]
    for size in range(2, most + 1):
        if best[size] <= corners[-1][0]:
            continue
        corner = float(best[size]), int(rows_of[size]), size // int(rows_of[size])
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) <= _slope(corners[-1], corner):
            corners.pop()
        corners.append(corner)
    return corners


def _slope(one: tuple[float, int, int], other: tuple[float, int, int]) -> float:
    """By how much more a number adds, from one size of a parameter to another."""
    return (other[0] - one[0]) / (other[1] * other[2] - one[1] * one[2])


def _shared_out(values: Mapping[str, tuple[Tensor, Tensor]], dim: int) -> dict[str, tuple[int, int]]:
    """The sizes (a, b) of each parameter, by its eigenvalues, where numbers add most to the variance of scores."""
    sizes, steps = dict.fromkeys(values, (1, 1)), []
    for name, sides in values.items():
        rows, columns = (side.numpy() / max(float(side.sum()), 1e-300) for side in sides)
        corners = _corners(rows, columns, 2 * dim)
        steps += [(_slope(*pair), name, pair[1][1:]) for pair in pairwise(corners)]
    left, is_full = (dim - 1) * len(values), set[str]()
    for _, name, (a, b) in sorted(steps, key=lambda step: step[0], reverse=True):  # of each parameter in their order
        more = a * b - sizes[name][0] * sizes[name][1]
        if more > left:
            is_full.add(name)
        elif name not in is_full:
            sizes[name], left = (a, b), left - more
    return sizes


def _biases(names: Collection[str], module: nn.Module) -> dict[str, str]:
    """By matrix the vector beside it that may be its bias, by their names."""
    shapes = {name: parameter.shape for name, parameter in module.named_parameters() if name in names}
    found = {}
    for name, shape in shapes.items():
        path, dot, own = name.rpartition(".")
        bias = path + dot + own.replace("weight", "bias")
        if bias != name and len(shape) > 1 and shapes.get(bias) == shape[:1]:
            found[name] = bias
    return found


class Fitting(Passing):
    """Adds up the moments of the samples that it sees."""

    def __init__(self, asked: Pass) -> None:
        super().__init__(asked)
        self.sums: dict[str, Moments] = {}
        self.appended = _biases(asked.names, asked.module)

    def _take(self, record: PerSampleRecord, outputs: Any, fetched: Any, index: Tensor, samples: Tensor) -> None:
        of_ones: dict[str, Tensor | None] = {}
        for name, moments, of_ones[name] in record.moments():
            if name in self._asked.names:
                self._add(name, (moments[0].double().cpu(), moments[1].double().cpu()))
        for name, bias in list(self.appended.items()):
            one, other = of_ones.get(name), of_ones.get(bias)
            if other is not None and not (one is not None and _are_close(one, other)):
                del self.appended[name]  # it is added elsewhere, or as a row

    def _add(self, name: str, moments: Moments) -> None:
        self.sums[name] = total_moments([self.sums[name], moments]) if name in self.sums else moments

    def on_predict_end(self) -> None:
        """Add up what all processes have seen."""
        if self.trainer.world_size > 1:
            parts: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(parts, (self.sums, self.appended))
            self.sums = {}
            for sums, appended in parts:
                self.appended = {name: bias for name, bias in self.appended.items() if name in appended}
                for name, moments in sums.items():
                    self._add(name, moments)
        for name, parameter in self.module.named_parameters():
            if name in self._asked.names and name not in self.sums:  # no sample has reached it
                self.sums[name] = tuple(torch.zeros(k, dtype=torch.float64) for k in as_matrix(parameter.shape))  # type: ignore[assignment]
                self.appended.pop(name, None)


def _are_close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().amax() <= _TOLERANCE * other.abs().amax()) if other.numel() else True
