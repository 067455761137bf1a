"""Statistics of an optimizer step over all its samples, batches and processes, and what is logged of them.

A `Window` gathers a `CapturedBatch` for each batch of a step, and what its `MeanGradient` says of ``.grad``, and gives
its `StepNorms`; `AllProcesses` joins those of every process, and `LoggedMetrics` makes of them the values that are
logged.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_persample.capture.record import PerSampleRecord, group_name
from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients.precision import wide_dtype
from lightning_persample.metrics import GradientDiversity, GradientNoiseScale, PerSampleNorm
from lightning_persample.metrics.functional import (
    cosine_to_mean,
    diversity_of_sums,
    ratio_of_sums,
    statistics_of_values,
    terms_of_sums,
)
from lightning_persample.metrics.steps import MeanOverSteps
from lightning_persample.torch_internals import (
    hooks_after_accumulation,
    local_part,
    parameters_and_buffers,
    version_counter,
)

# What ``.grad`` is when an optimizer steps: the gradient of the loss, and the mean of the samples' own gradients

UNEQUAL = "the samples of an optimizer step weigh unequally: its batches differ in size"
DEVICES_DIFFER = "the devices have numbers of samples, or parameters with values, that differ"
NOTHING = "`.grad` was empty after the backward, or the last batch of the step had no loss"
_CHANGED = "gradients were changed between the backward passes of an optimizer step"
_DIFFERENT = "the parameters without per-sample gradients differ between the backward passes of an optimizer step"
_NOT_EMPTY = "there were gradients before the first backward of the optimizer step: call zero_grad, and add nothing"
_AGAIN = "an optimizer evaluates a batch several times while gradients are accumulated"
_SHARES = "max_samples takes different shares of its batches"


@dataclass(frozen=True, eq=False)
class SampleMean:
    """The part of the mean of the samples' gradients that one process knows."""

    samples: int  # of this process
    factor: float  # of a sample's own gradient in ``.grad``, before processes are averaged
    share: float  # of the samples that values are computed for
    unsupported: tuple[str, ...]  # parameters without per-sample gradients
    sq_norms: tuple[float, ...]  # of ``.grad``, over all other parameters and of each group


@dataclass(frozen=True, eq=False)
class StepGradient:
    """What one process knows of ``.grad`` after the last backward of an optimizer step, on the host."""

    mean: SampleMean | None = None
    why_no_mean: str = NOTHING  # or ""
    loss: tuple[float, float] | None = None  # what the loss was multiplied by, and the squared norm of its gradient
    cosines: Tensor | None = None  # of each sample with the mean, (samples,); None where not asked for
    why_no_cosines: str = ""
    signal_to_noise: Tensor | None = None  # of all parameters and of each group, (1 + groups,); None where unknown


def agree_on_mean(gradients: Sequence[StepGradient]) -> bool:
    """Whether the processes with these gradients hold one mean over all their samples."""
    means = [each.mean for each in gradients if each.mean is not None]
    return len(means) == len(gradients) > 0 and all(
        (each.share, each.unsupported) == (means[0].share, means[0].unsupported)
        and math.isclose(each.factor, means[0].factor, rel_tol=1e-5)
        for each in means
    )


def sq_norms_of_mean(gradients: Sequence[StepGradient], groups: int) -> tuple[Tensor, float]:
    """Squared norms of the mean over all samples, (1 + groups,), nan where unknown, and the number of samples."""
    size = float(sum(each.mean.samples for each in gradients if each.mean is not None)) if gradients else math.nan
    if not agree_on_mean(gradients):
        return torch.full((1 + groups,), math.nan, dtype=torch.float64), size
    means = [each.mean for each in gradients if each.mean is not None]
    total = means[0].factor * size
    scale = len(means) / total if total else math.inf
    sq_norms = [sum(each) * scale * scale for each in zip(*(mean.sq_norms for mean in means), strict=True)]
    return torch.tensor(sq_norms, dtype=torch.float64), size


def norm_of_loss_gradient(gradients: Sequence[StepGradient]) -> float:
    """Norm of the gradient of the loss over all processes, of a sum over its number of samples; nan where unknown."""
    known = [each.loss for each in gradients if each.loss is not None]
    if not known or len(known) < len(gradients):
        return math.nan
    scales, squares = zip(*known, strict=True)
    return math.sqrt(sum(squares)) / abs(sum(scales) / len(scales)) if all(scales) else math.nan


class MeanGradient:
    """Follows ``.grad`` through the backward passes of each optimizer step, and says what it is after the last one."""

    def __init__(
        self,
        pl_module: LightningModule,
        depth: int | None,
        groups: Sequence[str],
        processes: int,
        statistics: Collection[str],
        why_not: Callable[[], str] = str,
    ) -> None:
        self._module, self._why_not = pl_module, why_not  # why ``.grad`` is not the mean over the processes, or ""
        self._depth, self._groups, self._processes = depth, tuple(groups), processes
        self._wants_cosines = "cosine_to_mean" in statistics
        self._wants_ratios = "signal_to_noise" in statistics and processes == 1
        self.start()

    def start(self) -> None:
        """An optimizer step begins."""
        self.found = StepGradient()
        self._parameters: dict[str, Tensor] = {}
        self._seen: set[int] = set()  # batches whose backward has run
        self._left: list[tuple[Tensor, int]] = []  # gradients and their versions, as the last backward left them
        self._left_sq_norms: Tensor | None = None
        # What must hold for ``.grad`` to be the gradient of the loss, and to be the mean, each with what is wrong where
        # it does not: looked at after the last backward, so that no device is waited for in between
        self._of_loss: list[tuple[Tensor | bool, str]] = []
        self._of_mean: list[tuple[Tensor | bool, str]] = []
        # Of the backward passes so far:
        self._loss_scale: Tensor | None = None
        self._factor: Tensor | None = None
        self._share: float | None = None
        self._unsupported: tuple[str, ...] | None = None
        self._samples = 0
        self._records: list[PerSampleRecord] = []

    def before_backward(self, batch_idx: int) -> None:
        """Look at what ``.grad`` holds; to be called right before the backward itself."""
        is_first, is_again = not self._seen - {batch_idx}, batch_idx in self._seen
        if is_first:
            self.start()
            named, _ = parameters_and_buffers(self._module)  # a fit may unfreeze parameters, and make new ones
            self._parameters = {name: p for name, p in named.items() if p.requires_grad}
            for reason in filter(None, (self._why_not(), _why_hooked(self._parameters))):
                self._of_loss.append((False, reason))
            if grads := list(self._grads().values()):
                self._of_loss.append((_sq_norms(grads).sum() == 0, _NOT_EMPTY))
            return
        if is_again:
            self._of_loss.append((False, _AGAIN))
        grads = list(self._grads().values())
        unchanged = len(grads) == len(self._left) and all(
            grad is before and version_counter(grad) == version
            for grad, (before, version) in zip(grads, self._left, strict=True)
        )
        self._of_loss.append((unchanged, _CHANGED))
        if unchanged and self._left_sq_norms is not None:  # what is done to ``.grad.data`` changes no version
            self._of_loss.append(((_sq_norms(grads) == self._left_sq_norms).all(), _CHANGED))

    def after_backward(self, batch_idx: int, record: PerSampleRecord | None, *, is_last: bool) -> None:
        """Take note of a backward that has run; to be called before anything else can change ``.grad``."""
        self._seen.add(batch_idx)
        if record is not None:
            self._count(record)
        if is_last:
            self.found = self._look()
            return
        grads = self._grads().values()
        self._left = [(grad, version_counter(grad)) for grad in grads]
        self._left_sq_norms = _sq_norms(grads)

    def replace_engine(self, why_no_mean: str) -> None:
        """The values of the last backward are those of another engine, which does not know their mean."""
        self.found = replace(self.found, mean=None, why_no_mean=why_no_mean)

    def _count(self, record: PerSampleRecord) -> None:
        """Add the samples of a backward to those of the step."""
        if self._wants_cosines or self._wants_ratios:
            self._records.append(record)
        samples = record.batch_size if record.in_loss is None else record.in_loss
        share, unsupported = record.num_values / max(samples, 1) or 1.0, tuple(record.unsupported)
        factor, scale = record._mean_factor, record._loss_scale
        self._of_mean.append((self._share in (None, share), _SHARES))
        self._of_mean.append((self._unsupported in (None, unsupported), _DIFFERENT))
        if factor is None:
            self._of_mean.append((False, record.why_no_factor or NOTHING))
        elif self._factor is not None:
            self._of_mean.append((torch.isclose(factor, self._factor.to(factor), rtol=1e-5, atol=0), UNEQUAL))
        self._factor = factor if self._factor is None else self._factor
        self._share, self._unsupported = share, unsupported
        self._samples += samples
        if scale is not None:
            self._loss_scale = scale if self._loss_scale is None else self._loss_scale + scale.to(self._loss_scale)

    def _grads(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def _look(self) -> StepGradient:
        """What ``.grad`` is after the last backward."""
        grads = self._grads()
        if why := _first_wrong(self._of_loss) or ("" if grads else NOTHING):
            return StepGradient(why_no_mean=why)
        copies = _copies(grads.values(), self._processes)
        squares = [square / n for square, n in zip(_sq_norms(grads.values()).tolist(), copies, strict=True)]
        loss = None if self._loss_scale is None else (float(self._loss_scale), sum(squares))
        counted = [name for name in grads if name not in frozenset(self._unsupported or ())]
        factor, share = self._factor, self._share
        why = _first_wrong(self._of_mean)
        if why or not counted or factor is None or share is None:
            return StepGradient(why_no_mean=why or NOTHING, loss=loss)
        by_name = dict(zip(grads, squares, strict=True))
        sq_norms = tuple(sum(by_name[name] for name in names) for names in self._members(counted))
        mean = SampleMean(self._samples, float(factor), share, self._unsupported or (), sq_norms)
        own, cosines, why_no_cosines = {name: grads[name] for name in counted}, None, ""
        if self._wants_cosines:
            try:
                cosines = self._cosines(own, factor)
            except UnsupportedError as error:
                why_no_cosines = str(error)
        ratios = self._signal_to_noise(own, factor, share) if self._wants_ratios else None
        return StepGradient(mean, "", loss, cosines, why_no_cosines, ratios)

    def _members(self, names: Iterable[str]) -> list[list[str]]:
        """All of these parameters, and those of each group."""
        members: dict[str, list[str]] = {group: [] for group in self._groups}
        every = list(names)
        for name in every if members else ():
            group = group_name(name, self._depth or 1)
            if group in members:  # a layer that was made in the middle of the fit is in none
                members[group].append(name)
        return [every, *members.values()]

    def _cosines(self, grads: Mapping[str, Tensor], factor: Tensor) -> Tensor:
        """Cosines of the samples with the mean gradient, g_i . gbar / (||g_i|| ||gbar||), (samples,)."""
        own = {name: grad for name, grad in grads.items() if not _is_distributed(grad)}
        total = _sq_norms(own.values()).sum()
        cosines = [torch.empty(0, dtype=torch.float64)]
        for record in self._records:
            vectors = {name: own[name].detach().to_dense() for name in record.names if name in own}
            if vectors:
                dots, weights = record.dot(vectors).to(total.device), record._relative_weights
                dots = dots * factor.sign().to(dots) * (1.0 if weights is None else weights.sign().to(dots))
                cosines.append(cosine_to_mean(dots, record.norms().square(), total).cpu().double())
        return torch.cat(cosines)

    def _signal_to_noise(self, grads: Mapping[str, Tensor], factor: Tensor, share: float) -> Tensor:
        """Mean over the entries of all parameters, and of each group, of the gradient signal to noise ratio."""
        ratios: dict[str, Tensor] = {}
        for name, grad in grads.items():
            squares = [
                record._weighted_square_sums.get(name, record.square_sums[name])
                for record in self._records
                if name in record.square_sums
            ]
            if squares:
                sums = local_part(grad).detach().to_dense().double() / factor.to(grad.device).double()
                wide = torch.stack([each.double() for each in squares]).sum(0) / share
                eps = torch.finfo(squares[0].dtype).eps
                ratios[name] = ratio_of_sums(sums, wide, wide.new_tensor(self._samples), eps).flatten()
        return torch.stack([_finite_mean([ratios[name] for name in names]) for names in self._members(ratios)])


def _first_wrong(checks: Iterable[tuple[Tensor | bool, str]]) -> str:
    return next((reason for holds, reason in checks if not bool(holds)), "")


def _finite_mean(parts: Iterable[Tensor]) -> Tensor:
    nothing = torch.empty(0, dtype=torch.float64)
    return torch.cat([nothing, *(part[part.isfinite()].cpu() for part in parts)]).mean()


def _sq_norms(grads: Collection[Tensor]) -> Tensor:
    """Squared norm of each, in double precision on one device: (len,)."""
    flat = [entries(grad) for grad in grads]
    if not flat:
        return torch.zeros(0, dtype=torch.float64)
    device, wide = flat[0].device, wide_dtype(flat[0]).to_real()
    norms = [torch.linalg.vector_norm(each, dtype=torch.promote_types(each.dtype, torch.float32)) for each in flat]
    if len({(norm.device, norm.dtype) for norm in norms}) > 1:
        norms = [norm.to(device, wide) for norm in norms]
    return torch.stack(norms).to(wide).square()


def _is_distributed(grad: Tensor) -> bool:
    """Whether a gradient is spread over devices."""
    return hasattr(grad, "placements")


def entries(grad: Tensor) -> Tensor:
    """The entries that are stored here, those of a sparse gradient each once: a tensor of the same norms."""
    own = local_part(grad).detach()
    return own.coalesce().values() if own.is_sparse else own


def _copies(grads: Iterable[Tensor], processes: int) -> list[int]:
    """In how many processes each gradient is the same."""
    copies = []
    for grad in grads:
        if _is_distributed(grad):
            mesh, placements = grad.device_mesh, grad.placements  # type: ignore[attr-defined]
            copies.append(math.prod(mesh.size(n) for n, each in enumerate(placements) if each.is_replicate()))
        else:
            copies.append(processes)
    return copies


def _why_hooked(parameters: Mapping[str, Tensor]) -> str:
    """Why something else than the backward may write to ``.grad`` in the middle of it, or ""."""
    for name, parameter in parameters.items():
        if hooks_after_accumulation(parameter):
            return f"a hook on `{name}` is called when its gradient was accumulated, and may change it"
    return ""


# Norms of the samples, of all batches and processes


@dataclass(frozen=True, eq=False)
class CapturedBatch:
    """What is kept of one batch of `batch_size` samples."""

    batch_size: int
    # Norms over all parameters, those of each group, and B times the samples' weights in the loss, (1 + groups + 1, B);
    # None if no parameter was captured
    rows: Tensor | None
    coverage: float

    @classmethod
    def of(cls, record: PerSampleRecord, depth: int | None, groups: Sequence[str]) -> CapturedBatch:
        """What is kept of a record."""
        rows = None
        if record.names:
            norms, of_group = record.norms(), {} if depth is None else record.group_norms(depth)
            absent, weights = torch.full_like(norms, math.nan) if groups else norms, record._relative_weights
            weights = torch.ones_like(norms) if weights is None else weights.to(norms)
            rows = torch.stack([norms, *[of_group.get(group, absent).to(norms.dtype) for group in groups], weights])
        return cls(record.num_values, rows, record.coverage)


@dataclass(frozen=True, eq=False)
class StepNorms:
    """The norms of the samples of one optimizer step, on the host in double precision."""

    norms: Tensor  # of each sample, over all parameters, (samples,)
    # For all parameters and for each group the sum of the finite norms, their number and the sum of their squares times
    # the samples' weights, (1 + groups, 3), of samples whose norm over all parameters is finite
    sums: Tensor
    samples: int  # captured, those without a norm included
    batches: int  # captured
    coverage: float  # the least of the batches; infinite where there is none
    gradients: tuple[StepGradient, ...] = ()  # of each process; none where not asked for

    @classmethod
    def of_window(
        cls, window: Sequence[CapturedBatch], groups: Sequence[str], gradient: StepGradient | None = None
    ) -> StepNorms:
        """Join the batches of this process, in one transfer from their device."""
        blocks = [each.rows for each in window if each.rows is not None]
        rows = torch.cat(blocks or [torch.empty(2 + len(groups), 0)], dim=1).cpu().double()
        norms, values, weights = rows[0], rows[:-1], rows[-1]
        counted = norms.isfinite() & ~values.isnan()
        finite = values.where(counted, 0.0)
        return cls(
            norms,
            torch.stack([finite, counted.double(), (finite * weights).square()], dim=1).sum(2),
            samples=sum(each.batch_size for each in window),
            batches=len(window),
            coverage=min((each.coverage for each in window), default=math.inf),
            gradients=() if gradient is None else (gradient,),
        )

    @classmethod
    def joined(cls, parts: Sequence[StepNorms]) -> StepNorms:
        """Those of all processes together."""
        return cls(
            torch.cat([each.norms for each in parts]),
            torch.stack([each.sums for each in parts]).sum(0),
            samples=sum(each.samples for each in parts),
            batches=sum(each.batches for each in parts),
            coverage=min(each.coverage for each in parts),
            gradients=tuple(gradient for each in parts for gradient in each.gradients),
        )


class AllProcesses:
    """Joins the norms of all processes with one collective for each step."""

    # Each process sends what it has in as many bytes as the largest step so far took. Where a process has more, all of
    # them learn it from what they receive, and exchange once more: only a step that is larger than all before costs two
    # collectives. An exchange by torchmetrics would take one for each state, and quantiles need every norm.
    _room = 1 << 15  # bytes for each process
    _LENGTH = 8  # bytes that say how many follow

    def join(self, own: Sequence[StepNorms], device: torch.device) -> list[StepNorms]:
        """Each of these over all processes; every one has to call this, also one that has none, and gets the same."""
        sent = pickle.dumps(own)
        received = self._exchange(sent, device)
        most = max(length for length, _ in received)
        if most > self._room:
            self._room = 2 ** math.ceil(math.log2(most))
            received = self._exchange(sent, device)
        parts: list[Sequence[StepNorms]] = [pickle.loads(each[:length]) for length, each in received]
        return [StepNorms.joined(each) for each in zip(*parts, strict=True)]

    def _exchange(self, sent: bytes, device: torch.device) -> list[tuple[int, bytes]]:
        """What every process sent, as far as there is room for it, and how long it is."""
        content = (len(sent).to_bytes(self._LENGTH, "big") + sent)[: self._LENGTH + self._room]
        padded = bytearray(content.ljust(self._LENGTH + self._room, b"\0"))
        own = torch.frombuffer(padded, dtype=torch.uint8).to(device)
        received = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(received, own)
        found = [each.cpu().numpy().tobytes() for each in received]
        return [(int.from_bytes(each[: self._LENGTH], "big"), each[self._LENGTH :]) for each in found]


STATISTICS = ("noise_scale", "diversity", "cosine_to_mean", "signal_to_noise")
_DECAY = 0.95  # of the moving sums of the noise scale, at each step
_TOGETHER = 64  # steps that are taken in for the epoch in one go


class LoggedMetrics:
    """The metrics behind what is logged of one optimizer's steps, of all parameters and of each group."""

    def __init__(self, prefix: str, chosen: Collection[str], quantiles: Sequence[float], groups: Sequence[str]) -> None:
        self.prefix, self.groups = prefix, tuple(groups)
        self._chosen, self._quantiles = frozenset(chosen), tuple(quantiles)
        # The noise scale's S, |G|^2 and weight of all parameters and of each group, as moving sums; none before a step
        self._running: list[list[float]] = []
        self._norms = PerSampleNorm(self._quantiles, sync_on_compute=False)
        of_epoch = {"norm_mean": MeanOverSteps, "noise_scale": GradientNoiseScale, "diversity": GradientDiversity}
        kept = [name for name in ("norm_mean", *STATISTICS) if name in self._chosen or (name == "norm_mean" and groups)]
        self._of_steps = {name: of_epoch.get(name, MeanOverSteps)(sync_on_compute=False) for name in kept}
        self.start_epoch()

    def start_epoch(self) -> None:
        """Forget the steps of the last epoch."""
        self._waiting: dict[str, list[tuple[Any, ...]]] = {name: [] for name in ("norms", *self._of_steps)}
        self.steps = 0  # logged in this epoch
        for metric in (self._norms, *self._of_steps.values()):
            metric.reset()

    def of_step(self, step: StepNorms) -> dict[str, float]:
        """What is logged of a step, by name without prefix."""
        totals, counts, sq_sums = step.sums.unbind(1)
        finite, norms = int(counts[0]), step.norms
        nonfinite = norms.numel() - finite
        if len(self._waiting["norms"]) >= _TOGETHER:
            self._settle()
        self._waiting["norms"].append((norms,))
        self.steps += 1
        statistics = statistics_of_values(norms[norms.isfinite()] if nonfinite else norms, self._quantiles)
        values = {f"norm_{name}": value for name, value in statistics.items()}
        if self.groups:
            values |= self._add("norm_mean", totals[1:] / counts[1:], counts[1:])
        if self._chosen:
            values |= self._of_mean(step.gradients, sq_sums * math.nan if nonfinite else sq_sums, finite)
        return values | {"nonfinite": float(nonfinite), "coverage": step.coverage}

    def _of_mean(self, gradients: Sequence[StepGradient], sums: Tensor, samples: int) -> dict[str, float]:
        """Statistics of the mean gradient, from sums of squared norms over the samples captured, (1 + groups,)."""
        # Sums are nan where a sample is not finite: it is in the mean gradient, which may be finite all the same.
        # (A sample whose batch has no use of a group has a gradient of zero there.)
        values = {}
        means, size = sq_norms_of_mean(gradients, len(self.groups))
        if "cosine_to_mean" in self._chosen:
            cosines = torch.cat([sums.new_empty(0), *(each.cosines for each in gradients if each.cosines is not None)])
            found = statistics_of_values(cosines[cosines.isfinite() & means[0].isfinite()])
            values = self._add("cosine_to_mean", sums.new_tensor([found["mean"]]))
            values["cosine_to_mean_min"] = found["min"]
        share = size / samples if samples else math.nan  # of what is estimated in what is captured
        if self._chosen & {"noise_scale", "diversity"}:
            values["norm_of_mean"] = norm_of_loss_gradient(gradients)
        for name in ("noise_scale", "diversity"):
            if name in self._chosen:
                self._waiting[name].append((sums, means, size, float(samples)))
        if "noise_scale" in self._chosen:
            terms = torch.stack(terms_of_sums(sums, samples, size, means), dim=1) * share
            values |= self._named("noise_scale", self._ratios(terms.tolist(), size))
        if "diversity" in self._chosen:
            values |= self._named("diversity", (diversity_of_sums(sums, size, means) * share).tolist())
        if "signal_to_noise" in self._chosen:
            known = [each.signal_to_noise for each in gradients if each.signal_to_noise is not None]
            values |= self._add("signal_to_noise", known[0] if known else torch.full_like(means, math.nan))
        return values

    def _ratios(self, terms: Sequence[Sequence[float]], size: float) -> list[float]:
        """The noise scales of the moving sums, after those of a step, S and |G|^2, are in them; nan without a value."""
        ratios, self._running = [], self._running or [[0.0] * 3 for _ in terms]
        for place, of_step in enumerate(terms):
            counts = all(map(math.isfinite, of_step))
            if counts:
                rows = zip(self._running[place], (*of_step, 1.0), strict=True)
                self._running[place] = [_DECAY * before + size * new for before, new in rows]
            S, G2, _ = self._running[place]
            ratios.append(S / G2 if counts and G2 > 0 else math.nan)
        return ratios

    def _add(self, name: str, *row: Tensor) -> dict[str, float]:
        """Keep values of a step, and what they weigh, for their mean over steps."""
        self._waiting[name].append(row)
        return self._named(name, row[0].tolist())

    def _named(self, name: str, values: Sequence[float]) -> dict[str, float]:
        """Values of groups, (groups,), or of all parameters and of groups, (1 + groups,), by their names."""
        names = [name, *(f"{group}/{name}" for group in self.groups)]
        return dict(zip(names[1:] if name == "norm_mean" else names, values, strict=False))

    def _settle(self) -> None:
        """Take in the steps that wait, for the values of the epoch."""
        for name, rows in self._waiting.items():
            if not rows:
                continue
            columns = [*zip(*rows, strict=True)]
            if name == "norms":
                self._norms.update(torch.cat(columns[0]))
            else:
                metric: Any = self._of_steps[name]
                add = metric.update if isinstance(metric, MeanOverSteps) else metric.update_sums
                add(*map(_column, columns))
            rows.clear()

    def of_epoch(self) -> dict[str, float]:
        """What is logged at the end of an epoch, of all samples of its logged steps, by name without prefix."""
        self._settle()
        if not self._norms.update_called:
            return {}
        found = {name: float(value) for name, value in self._norms.compute().items() if name != "count"}
        values = {name if name == "nonfinite" else f"norm_{name}": value for name, value in found.items()}
        for name, metric in self._of_steps.items():
            values |= self._named(name, metric.compute().reshape(-1).tolist())
        return {f"{name}_epoch": value for name, value in values.items()}

    @cached_property
    def names(self) -> list[str]:
        """The names that `of_step` gives."""
        shadow = LoggedMetrics(self.prefix, self._chosen, self._quantiles, self.groups)
        return list(shadow.of_step(StepNorms.of_window([], self.groups)))

    def state_dict(self) -> list[list[float]]:
        """The running sums, in plain containers."""
        return [list(sums) for sums in self._running]

    def load_state_dict(self, state: list[list[float]]) -> None:
        """Go on from sums that `state_dict` gave for as many groups."""
        if len(state) == 1 + len(self.groups):
            self._running = [list(sums) for sums in state]


def _column(values: Sequence[Any]) -> Tensor:
    """What several steps have, numbers or tensors of one shape: (steps, ...)."""
    return torch.stack([*values]) if isinstance(values[0], Tensor) else torch.tensor(values, dtype=torch.float64)


_MANUAL = "optimization is manual"
_MAY_PASS = (UNEQUAL, DEVICES_DIFFER, NOTHING)  # reasons that the last batch of an epoch has, and that alone


class Window:
    """Gathers the batches whose gradients are accumulated for one optimizer step."""

    def __init__(self, depth: int | None = None, groups: Sequence[str] = (), mean: MeanGradient | None = None) -> None:
        self._depth, self._groups, self._mean = depth, tuple(groups), mean
        self._has_said, self._unknown_steps = False, 0
        self._weighting: set[str] = set()
        self.start()

    def start(self) -> None:
        """An optimizer step begins."""
        self._batches: dict[int, CapturedBatch | None] = {}  # None of a batch without samples
        self._is_whole = True
        if self._mean is not None:
            self._mean.start()

    @property
    def is_new(self) -> bool:
        """Whether nothing has happened since `start`."""
        return self._is_whole and not self._batches

    @property
    def is_empty(self) -> bool:
        """Whether no batch of the step has a record."""
        return not any(self._batches.values())

    def before_backward(self, batch_idx: int) -> None:
        """A backward of a batch that is captured begins."""
        if self._mean is not None:
            self._mean.before_backward(batch_idx)

    def after_backward(self, batch_idx: int, record: PerSampleRecord | None, *, is_last: bool) -> None:
        """That backward has run, and nothing else since."""
        if record is None:
            self._batches[batch_idx] = None
        if self._mean is not None:
            self._mean.after_backward(batch_idx, record, is_last=is_last)

    def add(self, batch_idx: int, record: PerSampleRecord) -> None:
        """Take the record of a batch; of several (a closure that runs again) the last one counts."""
        self._batches[batch_idx] = CapturedBatch.of(record, self._depth, self._groups)
        self._weighting.update(record.weighting)
        if self._mean is not None and record._mean_factor is None:  # that of another engine, perhaps
            self._mean.replace_engine(record.why_no_factor)

    def end_batch(self, batch_idx: int | None) -> None:
        """A batch has ended; None for one that has no part in the gradient."""
        if not self._has_part(batch_idx):
            self.miss_batch()

    def miss_batch(self) -> None:
        """A batch of the step was not captured."""
        self._is_whole = False

    def norms(self, last: int | None) -> StepNorms:
        """The norms of the step; of none, unless every batch of it was captured, the last one included."""
        is_whole = self._is_whole and self._has_part(last)
        batches = [each for each in self._batches.values() if each is not None and is_whole]
        found = None if self._mean is None else self._mean.found if is_whole else StepGradient()
        return StepNorms.of_window(batches, self._groups, found)

    def _has_part(self, batch_idx: int | None) -> bool:
        return batch_idx is None or batch_idx in self._batches

    def why_unknown(self, step: StepNorms) -> str:
        """Why the mean gradient of a logged step is not known, and what to do; said once in a fit, else ""."""
        if self._mean is None or self._has_said or step.coverage == 0:  # then no norms either: a warning says so
            return ""
        own, several = self._mean.found, len(step.gradients) > 1
        if not step.gradients:  # the module has gone over to it in the middle of the fit
            reason = _MANUAL
        elif not agree_on_mean(step.gradients):
            reason = DEVICES_DIFFER if several and own.why_no_mean in ("", NOTHING) else own.why_no_mean
        else:
            reason = own.why_no_cosines
        self._unknown_steps = self._unknown_steps + 1 if reason else 0
        # The last batch of an epoch is often a smaller one, which alone is nothing to warn of.
        self._has_said = bool(reason) and (reason not in _MAY_PASS or self._unknown_steps > 1)
        if not self._has_said:
            return ""
        is_weighting = reason in self._weighting
        return f"{reason}; {'give loss_reduction, as above' if is_weighting else 'statistics=() leaves them out'}"
