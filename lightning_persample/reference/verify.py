"""Check per-sample gradients on a module of one's own against a loop over single samples, and say why they differ."""

from __future__ import annotations

import inspect
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from lightning_persample.batch_axis.axis import Lost
from lightning_persample.batch_axis.batch import Layout, batch_tensors, read_batch_size
from lightning_persample.batch_axis.ops import having
from lightning_persample.capture.graph import REENTRANT, node_below
from lightning_persample.capture.mode import expanded_weights
from lightning_persample.capture.observing import ObservingMode, decomposed, is_composite
from lightning_persample.capture.parameters import computed_in, default_tolerance, unwrapped
from lightning_persample.capture.record import PerSampleRecord
from lightning_persample.errors import BatchSizeError, PerSampleError
from lightning_persample.gradients.norms import as_rows
from lightning_persample.gradients.precision import accumulation_dtype
from lightning_persample.options import check_option, check_options, is_int, is_none_or_positive
from lightning_persample.reference.samples import (
    NOT_REENTRANT,
    Marked,
    Samples,
    Weighting,
    gradients_of,
    loss_of,
    own_loss,
)
from lightning_persample.reference.untouched import ModuleState, untouched, without_dropout
from lightning_persample.rules import canonical_op

PENALTY = (
    "apart from one term, the same in every one-sample loss: a penalty on the parameters, or another term of the loss "
    "that belongs to no sample, is in no sample's own gradient"
)
RANDOM = (
    "the loss changes with the random seed, by numbers that are not drawn by torch with one row for each sample: a "
    "batch and a single sample cannot draw the same, so the two cannot be compared; draw them by torch, or check with "
    "noise that comes with the batch, one row per sample"
)
_MADE = (
    "the step declares by mark_samples whose rows it makes, and of a single sample it may make others: put such rows "
    "into the batch"
)
_UNKNOWN = "no cause was found: a fault of lightning_persample or of a registered rule, please report it"
_OTHER_WEIGHTS = "the weights that loss_reduction returns are not those of the samples in the loss"
_SMALLEST_PART = 1e-2


@dataclass(frozen=True)
class Comparison:
    """By parameter name finite gradients of the engine and of the one-sample loop, each as real rows (B, numbers)."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    tolerance: float

    def error(self, name: str, factor: Tensor | float = 1.0) -> float:
        """Largest relative error of one parameter's gradients against the loop's, multiplied by `factor` (B,)."""
        engine, loop = self.pairs[name]
        factors = torch.as_tensor(factor, dtype=loop.dtype, device=loop.device).reshape(-1, 1)
        difference = (engine - factors * loop).norm(dim=1)
        scale = factors.abs().flatten() * loop.norm(dim=1).clamp_min(self._smallest())
        return float(torch.where(difference == 0, 0.0, difference / scale).max())

    def agrees(self, name: str, factor: Tensor | float = 1.0) -> bool:
        """Whether a parameter's gradients equal the loop's times `factor`."""
        return self.error(name, factor) <= self.tolerance

    def factors(self) -> Tensor:
        """For each sample the multiple of the loop's gradient closest to the engine's, (B,); of zeros, their mean."""
        products = [(engine * loop).sum(1).double().cpu() for engine, loop in self.pairs.values()]
        squares = [loop.square().sum(1).double().cpu() for _, loop in self.pairs.values()]
        product, square = torch.stack(products).sum(0), torch.stack(squares).sum(0)
        zeros = (product == 0) & (square == 0)
        return torch.where(zeros, (product / square)[~zeros].mean(), product / square)

    def error_beside_a_constant(self, name: str) -> float:
        """Largest relative error of one parameter, apart from a difference that is the same for all samples."""
        engine, loop = self.pairs[name]
        scale = float(loop.norm(dim=1).max().clamp_min(self._smallest()))
        if _spread(loop) <= self.tolerance * scale:
            return math.inf
        return _spread(loop - engine) / scale

    def _smallest(self) -> float:
        squares = [loop.square().sum(1) for _, loop in self.pairs.values()]
        return _SMALLEST_PART * float(torch.stack([each.cpu() for each in squares]).sum(0).max().sqrt())


def _spread(rows: Tensor) -> float:
    return float((rows - rows[:1]).norm(dim=1).max())


def _why_different(
    compared: Comparison,
    record: PerSampleRecord,
    loss_reduction: Weighting,
    is_random: Callable[[], bool],
    other_axes: str,
) -> str:
    """The reason that fits the parameters that differ."""
    factors = compared.factors()
    mean = float(factors.mean())
    if mean and all(compared.agrees(name, mean) for name in compared.pairs):
        return _wrong_reduction(mean, record, loss_reduction)
    if record.mixing or record.axis_lost:
        cause = (
            "samples influence each other, so a sample in its batch and the same sample alone have different gradients"
            if record.mixing
            else "the batch axis is lost, and values computed from there on cannot be assigned to samples"
        )
        return f"{cause}; the engine gives each sample's contribution to the batch's gradient: {_noted(record)}"
    if is_random():
        return RANDOM
    if bool(factors.isfinite().all() & (factors != 0).all()) and all(
        compared.agrees(name, factors.to(loop)) for name, (_, loop) in compared.pairs.items()
    ):
        return "; ".join((_unequal_weights(factors, loss_reduction), *record.weighting))
    if record.weighting:
        return "; ".join(record.weighting)
    return other_axes or _UNKNOWN


def _noted(record: PerSampleRecord) -> str:
    """The calls that let samples influence each other or lose the batch axis, and what helps against the former."""
    norm = " (GroupNorm in place of BatchNorm, or BatchNorm in evaluation mode)"
    is_norm = any("batch_norm` on" in text for text in record.mixing)
    remedy = f"use layers and losses that keep samples apart{norm if is_norm else ''}"
    return "; ".join((*record.mixing, *record.axis_lost, *([remedy] if record.mixing else [])))


def _wrong_reduction(factor: float, record: PerSampleRecord, loss_reduction: Weighting) -> str:
    found = f"every value of the engine is {factor:.4g} times the loop's"
    if callable(loss_reduction):
        return f"{found}: {_OTHER_WEIGHTS}"
    given = f"loss_reduction={loss_reduction!r} does not fit the loss"
    weight = factor / record.batch_size if loss_reduction == "mean" else factor
    for fitting, expected in (("sum", 1.0), ("mean", 1 / record.batch_size), ("mean", 1 / record.num_values)):
        if abs(weight - expected) <= 0.01 * expected:
            return f"{found}: {given}, loss_reduction={fitting!r} does"
    return (
        f"{found}: {given}, nor does another name; give a function (outputs, batch) that returns each sample's weight "
        f"in the loss, here {weight:.4g}"
    )


def _unequal_weights(factors: Tensor, loss_reduction: Weighting) -> str:
    listed = ", ".join(f"{factor:.4g}" for factor in factors.tolist())
    off = f"each sample's gradient is off by a factor of its own ({listed})"
    if callable(loss_reduction):
        return f"{off}: {_OTHER_WEIGHTS}"
    return (
        f"{off}: the samples weigh unequally in the loss, and not equally as loss_reduction={loss_reduction!r} says; "
        "give a function (outputs, batch) as loss_reduction that returns each sample's weight in the loss"
    )


_HEADER = ("parameter", "largest relative error", "status", "reason")


@dataclass(frozen=True)
class ParameterCheck:
    """One row of a `VerificationReport`.

    >>> import torch
    >>> from lightning_persample import check_per_sample_gradients
    >>> module, batch = torch.nn.Linear(3, 2), torch.randn(4, 3)
    >>> report = check_per_sample_gradients(module, batch, lambda module, batch: module(batch).square().mean())
    >>> [(check.name, check.status) for check in report.parameters]
    [('weight', 'agrees'), ('bias', 'agrees')]

    Attributes:
        name: the parameter.
        error: largest error of a sample's gradient, ``max_i ||g_i - r_i|| / ||r_i||`` with the one-sample loop's r_i (a
            norm below 1% of the whole gradient's counts as 1% of it); nan where there is nothing to compare.
        status: "agrees"; "differs"; "missing": the engine gives no value; "unused": neither has a gradient;
            "not compared": one of the two could not be run, or gave no finite values.
        reason: why, where the status is not plain "agrees" or "unused".
    """

    name: str
    error: float
    status: Literal["agrees", "differs", "missing", "unused", "not compared"]
    reason: str = ""


@dataclass(frozen=True)
class VerificationReport:
    """Per-sample gradients of the engine beside those of the one-sample loop; true where all parameters agree.

    >>> import torch
    >>> from lightning_persample import check_per_sample_gradients
    >>> module, batch = torch.nn.Linear(3, 2), torch.randn(4, 3)
    >>> report = check_per_sample_gradients(module, batch, lambda module, batch: module(batch).square().mean())
    >>> bool(report), report.samples
    (True, 4)

    Attributes:
        parameters: one row for each trainable parameter.
        samples: how many samples were compared.
        tolerance: largest relative error that counts as agreement.
        reason: why nothing could be compared, or "".
        failure: the exception that kept the check from running, or None.
    """

    parameters: tuple[ParameterCheck, ...]
    samples: int
    tolerance: float
    reason: str = ""
    failure: Exception | None = field(default=None, compare=False, repr=False)

    def __bool__(self) -> bool:
        return not self.reason and all(row.status in ("agrees", "unused") for row in self.parameters)

    def named(self, status: str) -> tuple[ParameterCheck, ...]:
        """The rows with one status."""
        return tuple(row for row in self.parameters if row.status == status)

    def __str__(self) -> str:
        """The table, with each reason written once below it."""
        return f"{self._summary()}\n{table(_HEADER, self.parameters)}"

    def _summary(self) -> str:
        if self.reason:
            return f"Per-sample gradients could not be compared with the one-sample loop: {self.reason}"
        agree, unknown = len(self.named("agrees")) + len(self.named("unused")), len(self.named("not compared"))
        rest = f", {unknown} could not be compared" if unknown else ""
        return (
            f"Per-sample gradients of {self.samples} samples, compared with the one-sample loop (tolerance "
            f"{self.tolerance:.0e}): {agree} of {len(self.parameters) - unknown} parameters agree{rest}"
        )


def table(header: Sequence[str], checks: Sequence[Any]) -> str:
    """Rows of a report (names, error, status, reason) as text, with each reason written once below the table."""
    reasons = list(dict.fromkeys(check.reason for check in checks if check.reason))
    cells = [tuple(header)]
    for *names, error, status, reason in map(astuple, checks):
        number = f"[{reasons.index(reason) + 1}]" if reason else ""
        cells.append((*names, "-" if math.isnan(error) else f"{error:.1e}", status, number))
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(
        [line.rstrip() for line in lines] + [f"[{n}] {reason}" for n, reason in enumerate(reasons, start=1)]
    )


Step: TypeAlias = Callable[[Any], Any]
Rows: TypeAlias = dict[str, Tensor]


def check_per_sample_gradients(
    module: nn.Module,
    batch: Any,
    loss_fn: Callable[..., Any],
    *,
    samples: int = 4,
    loss_reduction: Weighting = "mean",
    batch_dim: int = 0,
    batch_size: int | None = None,
    batch_layout: Layout | None = None,
    tolerance: float | None = None,
) -> VerificationReport:
    """Compare the per-sample gradients of `expanded_weights` with those of a loop over single samples.

    Forward and backward run once on the first `samples` samples of the batch, and once on each of these samples alone:
    ``r_i = d l_i / d theta`` with the loss l_i of a batch that holds only sample i. Where the two differ, the report
    says why. Dropout has probability 0 meanwhile, and a sample alone gets its rows of what torch draws (``randn_like``,
    ``torch.distributions``) for the batch. Afterwards module and random number generators are as before:
    parameters, ``.grad``, buffers, modes.

    >>> import torch
    >>> from torch import nn
    >>> model, batch = nn.Linear(3, 2), (torch.randn(8, 3), torch.randn(8, 2))
    >>> report = check_per_sample_gradients(model, batch, lambda m, b: nn.functional.mse_loss(m(b[0]), b[1]))
    >>> bool(report)
    True

    Args:
        module: the module whose trainable parameters are checked, in the mode (training, evaluation) it is in.
        batch: a batch as the loss function takes it.
        loss_fn: ``loss_fn(module, batch)`` gives the batch's loss; or the module's own ``module.training_step``, called
            with the batch and a batch index of 0. Either may return a mapping with the loss as "loss".
        samples: how many samples to check, at least 2; fewer if the batch has fewer.
        loss_reduction: "mean", "sum", or a callable ``(outputs, batch)`` that gives the weight of each sample in the
            loss, (B,); see `expanded_weights`.
        batch_dim: the axis that holds the samples in the batch's tensors.
        batch_size: number of samples B in the batch; by default the size on which all its tensors agree.
        batch_layout: says where the samples lie in tensors that do not hold them along `batch_dim`, see
            `expanded_weights`.
        tolerance: largest relative error that counts as agreement; by default what the precision of the parameters
            (under autocast: its precision) allows, from 1e-7 in double to 0.1 in half precision.

    Returns:
        The report: true where all parameters agree, and a table with the reasons when printed.

    Raises:
        PerSampleError: the loss is not one number, or an option has a value that is not allowed (`OptionError`).
    """
    check_option("samples", samples, is_int(samples, 2), "an int >= 2")
    check_options(loss_reduction=loss_reduction, batch_dim=batch_dim, batch_size=batch_size, batch_layout=batch_layout)
    check_option("tolerance", tolerance, is_none_or_positive(tolerance), "None or a number > 0")
    trainable = {name: p for name, p in unwrapped(module).named_parameters() if p.requires_grad}
    device = next((parameter.device for parameter in trainable.values()), torch.device("cpu"))
    allowed = default_tolerance(computed_in(trainable.values(), device), device) if tolerance is None else tolerance
    other_axes = _other_axes([tensor for _, tensor in batch_tensors(batch)], batch_dim)
    try:
        size = read_batch_size(batch, batch_dim, batch_layout) if batch_size is None else batch_size
    except BatchSizeError as error:
        return _nothing(trainable, 0, allowed, "; ".join(text for text in (str(error), other_axes) if text), error)
    count = min(samples, size)
    draws, layout = Draws(count), {"batch_dim": batch_dim, "batch_layout": batch_layout}
    record: PerSampleRecord | None = None
    doing = f"on the first {count} samples"
    with warnings.catch_warnings(), without_dropout(module), untouched(module) as state, torch.enable_grad():
        check = _Check(_as_step(module, loss_fn), trainable, loss_reduction, layout, state)
        # A LightningModule without a Trainer says so each time its training step logs.
        warnings.filterwarnings("ignore", r"You are trying to `self\.log\(\)`")
        try:
            every = Samples(batch, size, batch_dim, batch_layout, is_declared=batch_size is not None)
            marked = check.marked(batch, every, size)
            if marked is not None:
                every = Samples(batch, size, batch_dim, lambda _: marked.layout)
                other_axes = other_axes or (_MADE if marked.made else "")
            few = every.take(0, count)
            with draws.keep():
                record = check.engine(module, few, count)
            rows = []
            for sample in range(count):
                doing = f"on sample {sample} alone"
                with draws.again(sample):
                    rows.append(check.one_sample(every.take(sample, sample + 1)))
        except PerSampleError:
            raise
        except Exception as error:  # whatever the user's own code raises, which the report names
            reason = f"running the loss {doing} failed with {type(error).__name__}: {str(error).strip()}"
            noted = ""
            if record is not None and (record.mixing or record.axis_lost):
                noted = "samples influence each other" if record.mixing else "the batch axis is lost"
                noted = f"{noted}: {_noted(record)}"
            hint = other_axes if str(error) != NOT_REENTRANT else ""
            reason = "; ".join(text for text in (reason, noted, hint) if text)
            return _nothing(trainable, count, allowed, reason, error)
        loop = {name: torch.stack([row[name] for row in rows]) for name in trainable}

        def is_random() -> bool:
            return draws.unequal or check.changes_with_the_seed(every.take(0, count), partial(draws.again, None))

        return VerificationReport(
            _compare(record, loop, loss_reduction, allowed, is_random, other_axes), count, allowed
        )


@dataclass(frozen=True, eq=False)
class _Check:
    """Runs the loss of some samples, each time from the same state of module and random number generators."""

    step: Step
    trainable: dict[str, nn.Parameter]
    weighting: Weighting
    layout: Mapping[str, Any]
    state: ModuleState

    def engine(self, module: nn.Module, batch: Any, count: int) -> PerSampleRecord:
        """The record of one observed forward and backward."""
        with expanded_weights(
            module,
            batch,
            loss_reduction="sum" if callable(self.weighting) else self.weighting,
            **self.layout,
            batch_size=count,
            quantities=("grad_sample",),
            unsupported="ignore",
        ) as capture:
            outputs = self.step(batch)
            loss = _checked_loss(outputs)
            if node_below([loss], REENTRANT):
                raise RuntimeError(NOT_REENTRANT)
            if callable(self.weighting):
                with torch.no_grad():
                    capture.attach_loss(loss, self.weighting(outputs, batch))
            capture.backward_into_record(loss)  # hooks on `.grad` average it over devices, or take an optimizer's step
        self.state.restore()
        return capture.record

    def marked(self, batch: Any, samples: Samples, size: int) -> Marked | None:
        """What the step declares of tensors of which the batch does not tell whose rows they have; None of no such."""
        places = () if self.layout["batch_layout"] is not None else samples.layout.places
        if not any(isinstance(place, Lost) and place.unplaced and not place.listed for place in places):
            return None
        copied = samples.take(0, size)
        with Marked(batch, copied) as marked:
            self.step(copied)
        self.state.restore()
        return marked

    def one_sample(self, batch: Any) -> Rows:
        """The gradients of one sample's own loss, zero where the loss does not depend on a parameter."""
        loss = own_loss(self.step(batch), batch, self.weighting)
        rows = {name: torch.zeros_like(p) for name, p in self.trainable.items()} | gradients_of(loss, self.trainable)
        self.state.restore()
        return rows

    def changes_with_the_seed(self, batch: Any, drawing: Callable[[], AbstractContextManager[None]]) -> bool:
        """Whether two runs on the same samples with different seeds give different losses, `drawing` the same."""
        losses = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            with drawing():
                losses.append(loss_of(self.step(batch)).detach())
            self.state.restore()
        return not torch.equal(*losses)


# Not dropout, whose probability is 0 meanwhile, nor a permutation of the batch, which is of no sample.
_DRAWS = having("draws") - having("drops") - {"randperm"}


class Draws:
    """Keeps the tensors that torch draws for a batch, and puts their rows into what is drawn for one sample of it."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._kept: list[Tensor] = []
        self.unequal = False  # whether a sample drew otherwise than the batch, so that it had numbers of its own

    def keep(self) -> AbstractContextManager[None]:
        """Keep what is drawn in this context."""
        return _drawing(lambda drawn: self._kept.append(drawn.detach().clone()))

    @contextmanager
    def again(self, sample: int | None) -> Iterator[None]:
        """Draw the same again in this context, for one sample or for all."""
        left = iter(self._kept)
        with _drawing(lambda drawn: self._put_into(drawn, next(left, None), sample)):
            yield
        self.unequal |= next(left, None) is not None

    def _put_into(self, drawn: Tensor, kept: Tensor | None, sample: int | None) -> None:
        rows = None if kept is None else self._rows(kept, drawn, sample)
        if rows is None:
            self.unequal = True
            return
        with torch.no_grad():
            drawn.copy_(rows)

    def _rows(self, kept: Tensor, drawn: Tensor, sample: int | None) -> Tensor | None:
        """The part of what the batch drew that a sample draws alone; None where their shapes do not tell."""
        if kept.shape == drawn.shape:
            return kept
        if sample is None or kept.dim() != drawn.dim():
            return None
        axes = [axis for axis, size in enumerate(kept.shape) if size != drawn.shape[axis]]
        if len(axes) != 1 or (kept.shape[axes[0]], drawn.shape[axes[0]]) != (self._batch_size, 1):
            return None
        return kept.narrow(axes[0], sample, 1)


def _drawing(on_draw: Callable[[Tensor], None]) -> AbstractContextManager[None]:
    """Hand every tensor that torch draws in this context to `on_draw`."""

    def answer(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_composite(function):  # such as gumbel_softmax, which draws inside
            with mode:
                return decomposed(function)(*args, **kwargs)
        result = function(*args, **kwargs)
        if canonical_op(function) in _DRAWS and isinstance(result, Tensor):
            on_draw(result)
        return result

    mode = ObservingMode(answer)
    return mode.active()


def _compare(
    record: PerSampleRecord,
    loop: Rows,
    loss_reduction: Weighting,
    tolerance: float,
    is_random: Callable[[], bool],
    other_axes: str,
) -> tuple[ParameterCheck, ...]:
    taken = slice(None) if record.samples is None else record.samples
    both = {
        name: tuple(as_rows(each.to(accumulation_dtype(each))) for each in (record.grad_samples[name], rows[taken]))
        for name, rows in loop.items()
        if name in record.grad_samples
    }
    whole = both if record.samples is None or _are_those_alone(record.samples, record.grad_samples, loop) else {}
    finite = {n: (e, r) for n, (e, r) in whole.items() if bool(e.isfinite().all() & r.isfinite().all())}
    compared = Comparison(finite, tolerance)
    noted = record.mixing or record.axis_lost
    beside = {} if noted else {n: compared.error_beside_a_constant(n) for n in finite if not compared.agrees(n)}
    penalized = {name: error for name, error in beside.items() if error <= tolerance}
    differing = [n for n in finite if n not in penalized and not compared.agrees(n)]
    reason = _why_different(compared, record, loss_reduction, is_random, other_axes) if differing else ""

    def row(name: str, rows: Tensor) -> ParameterCheck:
        if name in record.unsupported:
            return ParameterCheck(name, math.nan, "missing", record.unsupported[name])
        if name not in both:
            if not rows.any():
                return ParameterCheck(name, math.nan, "unused")
            return ParameterCheck(name, math.nan, "missing", "only the loss of a single sample depends on it")
        if name not in finite:
            why = "some of its gradients are infinite or not a number"
            if record.samples is not None:
                why = f"of the {record.batch_size} samples compared, the loss takes {len(record.samples)} alone"
            return ParameterCheck(name, math.nan, "not compared", why)
        if name in differing and reason == RANDOM:
            return ParameterCheck(name, math.nan, "not compared", reason)
        if name in differing:
            return ParameterCheck(name, compared.error(name), "differs", reason)
        if name in penalized:
            return ParameterCheck(name, penalized[name], "agrees", PENALTY)
        return ParameterCheck(name, compared.error(name), "agrees")

    return tuple(row(name, rows) for name, rows in loop.items())


def _are_those_alone(samples: Tensor, grad_samples: Mapping[str, Tensor], loop: Rows) -> bool:
    """Whether the samples that the loss of a batch takes are those that have a gradient alone (not 0, nor 0/0)."""

    def reached(gradients: Mapping[str, Tensor]) -> Tensor:
        rows = [as_rows(gradients[name]) for name in loop.keys() & grad_samples.keys()]
        return torch.stack([(each.ne(0) & ~each.isnan()).any(1) for each in rows]).any(0).nonzero()[:, 0]

    if not loop.keys() & grad_samples.keys():
        return False
    return torch.equal(reached(loop).cpu(), samples.cpu()[reached(grad_samples).cpu()])


def _nothing(
    trainable: dict[str, nn.Parameter], count: int, tolerance: float, reason: str, failure: Exception
) -> VerificationReport:
    rows = tuple(ParameterCheck(name, math.nan, "not compared") for name in trainable)
    return VerificationReport(rows, count, tolerance, reason, failure)


def _as_step(module: nn.Module, loss_fn: Callable[..., Any]) -> Step:
    """`loss_fn` as a function of the batch alone; a method of the module is taken for a training step."""
    if getattr(loss_fn, "__self__", None) is not module:
        return lambda batch: loss_fn(module, batch)
    required = [p for p in inspect.signature(loss_fn).parameters.values() if p.default is p.empty]
    return (lambda batch: loss_fn(batch)) if len(required) == 1 else lambda batch: loss_fn(batch, 0)


def _checked_loss(outputs: Any) -> Tensor:
    loss = loss_of(outputs)
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    found = type(loss).__name__
    if isinstance(loss, Tensor):
        found = f"a tensor of shape {tuple(loss.shape)}" if loss.numel() != 1 else "a tensor that needs no gradient"
    raise PerSampleError(
        f"loss_fn returned {found}, but it must return the loss of the batch: a tensor with one entry that needs "
        "gradient, or a mapping that holds it as 'loss'"
    )


def _other_axes(tensors: list[Tensor], batch_dim: int) -> str:
    """A text on the axes other than `batch_dim` along which all tensors have one size, or ""."""
    counted = [tensor for tensor in tensors if tensor.dim() > 0]
    for axis in range(min((tensor.dim() for tensor in counted), default=0)):
        sizes = {tensor.size(axis) for tensor in counted}
        if axis != batch_dim and len(sizes) == 1:
            return (
                f"all tensors of the batch have size {sizes.pop()} along axis {axis}: are the samples there "
                f"(batch_dim={axis}, not {batch_dim})?"
            )
    return ""
