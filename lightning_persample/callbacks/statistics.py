"""Statistics of an optimizer step over all its samples, batches and processes, and what is logged of them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_persample.capture.record import PerSampleRecord, group_name
from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients.precision import wide_dtype
from lightning_persample.metrics import GradientDiversity, GradientNoiseScale, PerSampleNorm
from lightning_persample.metrics.functional import cosine_to_mean, ratio_of_sums, statistics_of_values
from lightning_persample.metrics.steps import MeanOverSteps
from lightning_persample.torch_internals import (
    hooks_after_accumulation,
    local_part,
    parameters_and_buffers,
    version_counter,
)

_OF_MEAN = 5  # whether the mean is known, the factor, the samples, their share, the parameters that count
_HEAD = 8  # and whether ``.grad`` is the gradient of the loss, times what, and this process's share of its squared norm
_UNEQUAL = "the samples of an optimizer step weigh unequally: its batches differ in size"
_DEVICES_DIFFER = "the devices have numbers of samples, or parameters with values, that differ"
_CHANGED = "gradients were changed between the backward passes of an optimizer step"
_DIFFERENT = "the parameters without per-sample gradients differ between the backward passes of an optimizer step"
_NOT_EMPTY = "there were gradients before the first backward of the optimizer step: call zero_grad, and add nothing"
_AGAIN = "an optimizer evaluates a batch several times while gradients are accumulated"
_SHARES = "max_samples takes different shares of its batches"
_NOTHING = "`.grad` was empty after the backward, or the last batch of the step had no loss"


class MeanGradient:
    """Follows ``.grad`` through the backward passes of each optimizer step: the mean of the samples' gradients."""

    def __init__(
        self,
        pl_module: LightningModule,
        depth: int | None,
        groups: Sequence[str],
        processes: int,
        why_not: Callable[[], str] = str,
    ) -> None:
        self._module, self._why_not = pl_module, why_not  # why ``.grad`` is not the mean over the processes, or ""
        self._depth, self._groups, self.processes = depth, tuple(groups), processes
        self.start()

    def start(self) -> None:
        """An optimizer step begins."""
        # What must hold, what is wrong where it does not, and whether the gradient of the loss is known all the same
        self._checks: list[tuple[Tensor | bool, str, bool]] = []
        self._scale: Tensor | None = None
        self._parameters: dict[str, Tensor] = {}
        self._last: list[tuple[Tensor, int]] = []
        self._last_sq_norms: Tensor | None = None
        self._factor: Tensor | None = None
        self._unsupported: tuple[str, ...] | None = None
        self._samples = 0
        self._share: float | None = None
        self.reason = _NOTHING  # why the mean was not known when `numbers` was asked for, or ""
        self._records: list[PerSampleRecord] = []

    def before_backward(self, *, first: bool, again: bool) -> None:
        """Look at what ``.grad`` holds; to be called right before the backward itself."""
        if first:
            self.start()
            named, _ = parameters_and_buffers(self._module)  # a fit may unfreeze parameters, and make new ones
            self._parameters = {name: p for name, p in named.items() if p.requires_grad}
            self._refuse(self._why_not())
            self._refuse(_why_hooked(self._parameters))
        elif again:
            self._refuse(_AGAIN)
        grads = list(self._grads().values())
        if first and grads:
            self._refuse(_NOT_EMPTY, unless=_sq_norms(grads).sum() == 0)
        if not first:
            unchanged = len(grads) == len(self._last) and all(
                grad is before and version_counter(grad) == version
                for grad, (before, version) in zip(grads, self._last, strict=True)
            )
            self._refuse(_CHANGED, unless=unchanged)
            if unchanged and self._last_sq_norms is not None:  # what is done to ``.grad.data`` changes no version
                self._refuse(_CHANGED, unless=(_sq_norms(grads) == self._last_sq_norms).all())

    def after_backward(self, record: PerSampleRecord | None, *, keep: bool, is_last: bool) -> None:
        """Take note of a backward that has run; to be called before anything else can change ``.grad``."""
        if record is not None:
            self._count(record)
        grads = self._grads().values()
        self._last = [(grad, version_counter(grad)) for grad in grads]
        self._last_sq_norms = None if is_last else _sq_norms(grads)
        if keep and record is not None:
            self._records.append(record)

    def _count(self, record: PerSampleRecord) -> None:
        """Add the samples of a backward to those of the step."""
        samples = record.batch_size if record.in_loss is None else record.in_loss
        self._samples += samples
        share = record.num_values / max(samples, 1)
        self._refuse(_SHARES, unless=self._share in (None, share), of_mean=True)
        self._share = share
        unsupported = tuple(record.unsupported)
        self._refuse(_DIFFERENT, unless=self._unsupported in (None, unsupported), of_mean=True)
        self._unsupported = unsupported
        factor, scale = record._mean_factor, record._loss_scale
        if factor is None:
            self._refuse(record.why_no_factor, of_mean=True)
        elif self._factor is None:
            self._factor = factor
        else:
            agree = torch.isclose(factor, self._factor.to(factor), rtol=1e-5, atol=0)
            self._refuse(_UNEQUAL, unless=agree, of_mean=True)
        if scale is not None:
            self._scale = scale if self._scale is None else self._scale + scale.to(self._scale)

    def _refuse(self, reason: str, *, unless: Tensor | bool = False, of_mean: bool = False) -> None:
        """Note why the gradient of the loss, or only the mean `of_mean` of the samples, is not known."""
        if reason and unless is not True:
            self._checks.append((unless, reason, of_mean))

    def _refused(self, *, of_mean: bool) -> str:
        return next((reason for holds, reason, each in self._checks if each == of_mean and not bool(holds)), "")

    def _grads(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def _counted(self) -> dict[str, Tensor]:
        """The gradients that the samples' add up to."""
        left_out = frozenset(self._unsupported or ())
        return {name: grad for name, grad in self._grads().items() if name not in left_out}

    def _members(self, names: Iterable[str]) -> list[list[int]]:
        """The places of the parameters of each group."""
        places: dict[str, list[int]] = {group: [] for group in self._groups}
        for place, name in enumerate(names if places else ()):
            group = group_name(name, self._depth or 1)
            if group in places:  # a layer that was made in the middle of the fit is in none
                places[group].append(place)
        return list(places.values())

    def nothing(self) -> Tensor:
        """What `numbers` gives where nothing is known."""
        return torch.zeros(_HEAD + 1 + len(self._groups), dtype=torch.float64)

    def numbers(self) -> Tensor:
        """What this process knows, on the host in double precision, to be joined by `_joined_sq_norms`."""
        numbers, grads = self.nothing(), self._grads()
        self.reason = self._refused(of_mean=False) or ("" if grads else _NOTHING)
        if self.reason:
            return numbers
        squares = _sq_norms(grads.values()).cpu()  # first: groups are then summed without further transfers
        squares = squares / torch.tensor(_copies(grads.values(), self.processes), dtype=squares.dtype)
        if self._scale is not None:
            numbers[_OF_MEAN:_HEAD] = torch.tensor([1.0, float(self._scale), float(squares.sum())], dtype=torch.float64)
        counted, factor = self._counted(), self._factor
        self.reason = self._refused(of_mean=True) or ("" if counted and factor is not None else _NOTHING)
        if self.reason or factor is None:
            return numbers
        squares = squares[[place for place, name in enumerate(grads) if name in counted]]
        kind = zlib.crc32("\n".join(self._unsupported or ()).encode())
        head = [1.0, float(factor), self._samples, self._share or 1.0, kind]
        numbers[:_OF_MEAN] = torch.tensor(head, dtype=torch.float64)
        numbers[_HEAD:] = torch.stack([squares.sum(), *[squares[own].sum() for own in self._members(counted)]])
        return numbers

    def cosines(self) -> list[Tensor]:
        """Cosines of the samples with the mean gradient, g_i . gbar / (||g_i|| ||gbar||)."""
        grads = {name: grad for name, grad in self._counted().items() if not is_distributed(grad)}
        total = _sq_norms(grads.values()).sum()
        cosines = []
        for record in self._records:
            vectors = {name: grads[name].detach().to_dense() for name in record.names if name in grads}
            if vectors and self._factor is not None:
                dots = record.dot(vectors).to(total.device) * self._factor.sign().to(total.device)
                cosines.append(cosine_to_mean(dots, record.norms().square(), total))
        return cosines

    def signal_to_noise(self) -> Tensor:
        """Mean over the entries of all parameters, and of each group, of the gradient signal to noise ratio."""
        ratios: dict[str, Tensor] = {}
        for name, grad in self._counted().items():
            squares = [
                record._weighted_square_sums.get(name, record.square_sums[name])
                for record in self._records
                if name in record.square_sums
            ]
            if squares and self._factor is not None:
                sums = local_part(grad).detach().to_dense().double() / self._factor.to(grad.device).double()
                wide = torch.stack([each.double() for each in squares]).sum(0) / (self._share or 1.0)
                eps = torch.finfo(squares[0].dtype).eps
                ratios[name] = ratio_of_sums(sums, wide, wide.new_tensor(self._samples), eps).flatten()
        every = list(ratios.values())
        groups = [[every[place] for place in own] for own in self._members(ratios)]
        return torch.stack([_finite_mean(part) for part in (every, *groups)])


def is_known(numbers: Tensor) -> bool:
    """Whether the processes with these `MeanGradient.numbers` hold one mean gradient over all their samples."""
    heads = numbers[:, :_OF_MEAN].tolist()
    _, first, _, *alike = heads[0]
    return all(
        known and parts == alike and math.isclose(factor, first, rel_tol=1e-5) for known, factor, _, *parts in heads
    )


def _joined_sq_norms(numbers: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Squared norms of the mean gradient over the samples of all processes, nan where unknown, and their number."""
    if not numbers.shape[1]:
        return numbers.new_full((groups,), math.nan), numbers.new_tensor(math.nan)
    _, factor, samples, *_ = numbers[:, :_OF_MEAN].unbind(1)
    size = samples.sum()
    if not is_known(numbers):
        return numbers.new_full((groups,), math.nan), size
    scale = numbers.shape[0] / (factor[0] * size)
    return numbers[:, _HEAD:].sum(0) * scale.square(), size


def _norm_of_loss_gradient(numbers: Tensor) -> float:
    """Norm of the gradient of the loss over all processes, of a sum over its number of samples; nan where unknown."""
    if not numbers.shape[1] or not bool(numbers[:, _OF_MEAN].all()):
        return math.nan
    _, scale, squares = numbers[:, _OF_MEAN:_HEAD].unbind(1)
    return float(squares.sum().sqrt() / scale.mean().abs())


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


def is_distributed(grad: Tensor) -> bool:
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
        if is_distributed(grad):
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


_HEAD_OF_NORMS = 5  # numbers that say how many norms and cosines, samples and batches, and the coverage


@dataclass(frozen=True)
class CapturedBatch:
    """What is kept of one batch of `batch_size` samples."""

    batch_size: int
    # Norms over all parameters, those of each group, and B times the samples' weights in the loss, (1 + groups + 1, B);
    # None if no parameter was captured
    rows: Tensor | None
    coverage: float


def captured(record: PerSampleRecord, depth: int | None, groups: Sequence[str]) -> CapturedBatch:
    """What is kept of a record."""
    rows = None
    if record.names:
        norms, of_group = record.norms(), {} if depth is None else record.group_norms(depth)
        absent, weights = torch.full_like(norms, math.nan), record._relative_weights
        weights = torch.ones_like(norms) if weights is None else weights.to(norms)
        rows = torch.stack([norms, *[of_group.get(group, absent).to(norms.dtype) for group in groups], weights])
    return CapturedBatch(record.num_values, rows, record.coverage)


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
    gradient: Tensor  # `MeanGradient.numbers` of each process, (processes, numbers); no numbers where not asked for
    cosines: Tensor  # of each sample with the mean gradient, (samples,); empty where not asked for

    @classmethod
    def of_window(
        cls,
        window: Sequence[CapturedBatch],
        groups: Sequence[str],
        gradient: Tensor | None = None,
        cosines: Sequence[Tensor] = (),
    ) -> StepNorms:
        """Join the batches of this process, in one transfer from their device."""
        blocks = [each.rows for each in window if each.rows is not None]
        rows = torch.cat(blocks or [torch.empty(2 + len(groups), 0)], dim=1).cpu().double()
        norms, weights = rows[0], rows[-1]
        counted = norms.isfinite() & ~rows[:-1].isnan()
        finite = rows[:-1].where(counted, 0.0)
        nothing = norms.new_empty(1, 0)
        return cls(
            norms,
            torch.stack([finite.sum(1), counted.sum(1).double(), (finite * weights).square().sum(1)], dim=1),
            samples=sum(each.batch_size for each in window),
            batches=len(window),
            coverage=min((each.coverage for each in window), default=math.inf),
            gradient=nothing if gradient is None else gradient[None],
            cosines=torch.cat([each.cpu().double() for each in cosines]) if cosines else nothing[0],
        )


class NormsOfAllProcesses:
    """Joins the norms of all processes with one collective for each step."""

    # Quantiles need every norm, so each process sends its own in a tensor with room for as many as any process has had
    # so far, together with everything else. Where a process has more, all of them learn it from what they receive, and
    # exchange once more with enough room: only a step that is larger than all before costs two collectives. An exchange
    # by torchmetrics would take a collective for each state, and the norms one more for their number.
    _room = 1024  # norms of a process that the exchange has room for

    def join(self, own: Sequence[StepNorms], device: torch.device) -> list[StepNorms]:
        """The norms of all processes; each has to call this, also one that has none, and gets the same."""
        parts = self._exchange(own, device)
        most = max(int(rows[:, :2].sum(1).max()) for rows in parts)
        if most > self._room:
            self._room = 2 ** math.ceil(math.log2(most))
            parts = self._exchange(own, device)
        return [_joined(rows, each) for rows, each in zip(parts, own, strict=True)]

    def _exchange(self, own: Sequence[StepNorms], device: torch.device) -> tuple[Tensor, ...]:
        """For each of `own` what every process sent, (processes, numbers)."""
        sent = [self._numbers(each) for each in own]
        together = torch.cat(sent).to(device)
        received = [torch.empty_like(together) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(received, together)
        return torch.stack(received).cpu().split([numbers.numel() for numbers in sent], dim=1)

    def _numbers(self, own: StepNorms) -> Tensor:
        counts = [own.norms.numel(), own.cosines.numel(), own.samples, own.batches, own.coverage]
        fixed = torch.cat([own.norms.new_tensor(counts), own.sums.flatten(), own.gradient.flatten()])
        sent = torch.cat([fixed, own.norms, own.cosines, fixed.new_zeros(self._room)])
        return sent[: fixed.numel() + self._room]


def _joined(rows: Tensor, own: StepNorms) -> StepNorms:
    sizes = [_HEAD_OF_NORMS, own.sums.numel(), own.gradient.numel()]
    head, sums, gradient, values = rows.split([*sizes, rows.shape[1] - sum(sizes)], dim=1)
    ends = [(row, int(norms), int(norms + cosines)) for row, (norms, cosines, *_) in zip(values, head, strict=True)]
    return StepNorms(
        norms=torch.cat([row[:norms] for row, norms, _ in ends]),
        sums=sums.sum(0).view_as(own.sums),
        samples=int(head[:, 2].sum()),
        batches=int(head[:, 3].sum()),
        coverage=float(head[:, 4].min()),
        gradient=gradient,
        cosines=torch.cat([row[norms:end] for row, norms, end in ends]),
    )


STATISTICS = ("noise_scale", "diversity", "cosine_to_mean", "signal_to_noise")
_TOGETHER = 64  # steps whose norms are taken in for the epoch in one go


class LoggedMetrics:
    """The metrics behind what is logged of one optimizer's steps, of all parameters and of each group."""

    def __init__(self, prefix: str, chosen: Collection[str], quantiles: Sequence[float], groups: Sequence[str]) -> None:
        self.prefix, self.groups = prefix, tuple(groups)
        self._chosen, self._quantiles = frozenset(chosen), tuple(quantiles)
        self._running = GradientNoiseScale(decay=0.95, sync_on_compute=False)
        self._norms = PerSampleNorm(self._quantiles, sync_on_compute=False)
        of_epoch = {"norm_mean": MeanOverSteps, "noise_scale": GradientNoiseScale, "diversity": GradientDiversity}
        kept = [name for name in ("norm_mean", *STATISTICS) if name in self._chosen or (name == "norm_mean" and groups)]
        self._of_steps = {name: of_epoch.get(name, MeanOverSteps)(sync_on_compute=False) for name in kept}
        self.start_epoch()

    def start_epoch(self) -> None:
        """Forget the steps of the last epoch."""
        self._waiting: list[Tensor] = []
        self.steps = 0  # logged in this epoch
        for metric in (self._norms, *self._of_steps.values()):
            metric.reset()

    def of_step(self, step: StepNorms, signal_to_noise: Tensor | None = None) -> dict[str, float]:
        """What is logged of a step, by name without prefix."""
        finite = step.norms.isfinite()
        norms = step.norms[finite]
        self._waiting.append(step.norms)
        self.steps += 1
        if len(self._waiting) >= _TOGETHER:
            self._settle()
        statistics = statistics_of_values(norms, self._quantiles)
        values = {f"norm_{name}": value.item() for name, value in statistics.items()}
        totals, counts, sq_sums = step.sums.unbind(1)
        if self.groups:
            values |= self._add("norm_mean", totals[1:] / counts[1:], counts[1:])
        if self._chosen:
            values |= self._of_mean(step, sq_sums, norms.numel())
        if "signal_to_noise" in self._chosen:
            absent = torch.full((1 + len(self.groups),), math.nan, dtype=torch.float64)
            values |= self._add("signal_to_noise", absent if signal_to_noise is None else signal_to_noise)
        return values | {"nonfinite": float(finite.numel() - norms.numel()), "coverage": step.coverage}

    def _of_mean(self, step: StepNorms, sums: Tensor, samples: int) -> dict[str, float]:
        """Statistics of the mean gradient, from sums of squared norms over the samples captured, (1 + groups,)."""
        # A sample that is not finite is in the mean gradient, too, which is then not finite either.
        # (A sample whose batch has no use of a group has a gradient of zero there.)
        values = {}
        means, size = _joined_sq_norms(step.gradient, len(sums))
        if "cosine_to_mean" in self._chosen:
            cosines = step.cosines[step.cosines.isfinite() & means[0].isfinite()]
            found = statistics_of_values(cosines)
            values = self._add("cosine_to_mean", found["mean"][None])
            values["cosine_to_mean_min"] = found["min"].item()
        if self._chosen & {"noise_scale", "diversity"}:
            values["norm_of_mean"] = _norm_of_loss_gradient(step.gradient)
        if "noise_scale" in self._chosen:
            terms = self._running.update_sums(sums, means, size, samples)
            self._of_steps["noise_scale"].fold(terms, size)
            ratios = self._running.compute().where(terms.isfinite().all(0), math.nan)
            values |= self._named("noise_scale", ratios)
        if "diversity" in self._chosen:
            (diversity,) = self._of_steps["diversity"].update_sums(sums, means, size, samples)
            values |= self._named("diversity", diversity)
        return values

    def _add(self, name: str, values: Tensor, weight: Tensor | float = 1.0) -> dict[str, float]:
        """Add values of a step to their mean over steps."""
        self._of_steps[name].fold(values[None], weight)
        return self._named(name, values)

    def _named(self, name: str, values: Tensor) -> dict[str, float]:
        """Values of groups, (groups,), or of all parameters and of groups, (1 + groups,), by their names."""
        numbers = values.reshape(-1).tolist()
        names = [name, *(f"{group}/{name}" for group in self.groups)]
        return dict(zip(names[1:] if name == "norm_mean" else names, numbers, strict=False))

    def _settle(self) -> None:
        """Take in the norms that wait, for the values of the epoch."""
        if self._waiting:
            self._norms.update(torch.cat(self._waiting))
            self._waiting = []

    def of_epoch(self) -> dict[str, float]:
        """What is logged at the end of an epoch, of all samples of its logged steps, by name without prefix."""
        self._settle()
        if not self._norms.update_called:
            return {}
        found = {name: float(value) for name, value in self._norms.compute().items() if name != "count"}
        values = {name if name == "nonfinite" else f"norm_{name}": value for name, value in found.items()}
        for name, metric in self._of_steps.items():
            values |= self._named(name, metric.compute())
        return {f"{name}_epoch": value for name, value in values.items()}

    @cached_property
    def names(self) -> list[str]:
        """The names that `of_step` gives."""
        shadow = LoggedMetrics(self.prefix, self._chosen, self._quantiles, self.groups)
        return list(shadow.of_step(StepNorms.of_window([], self.groups)))

    def state_dict(self) -> list[list[float]]:
        """The running sums, in plain containers."""
        sums: list[list[float]] = self._running.folded.T.tolist() if self._running.folded.dim() else []
        return sums

    def load_state_dict(self, state: list[list[float]]) -> None:
        """Go on from sums that `state_dict` gave for as many groups."""
        if len(state) == 1 + len(self.groups):
            self._running.folded = torch.tensor(state, dtype=torch.float64).T


_MANUAL = "optimization is manual"
_MAY_PASS = (_UNEQUAL, _DEVICES_DIFFER, _NOTHING)  # reasons that the last batch of an epoch has, and that alone


class Window:
    """Gathers the batches whose gradients are accumulated for one optimizer step."""

    def __init__(
        self,
        depth: int | None = None,
        groups: Sequence[str] = (),
        mean: MeanGradient | None = None,
        statistics: Sequence[str] = (),
    ) -> None:
        self._depth, self._groups, self._mean = depth, tuple(groups), mean
        self._keeps = bool({"cosine_to_mean", "signal_to_noise"} & set(statistics))
        self._has_said, self._unknown_steps, self._cosines_absent = False, 0, ""
        self._weighting: set[str] = set()
        self._cosines = "cosine_to_mean" in statistics
        self._ratios = "signal_to_noise" in statistics and mean is not None and mean.processes == 1
        self.start()

    def start(self) -> None:
        """An optimizer step begins."""
        self._batches: dict[int, CapturedBatch] = {}
        self._seen: set[int] = set()
        self._empty: set[int] = set()
        self._found_cosines: list[Tensor] = []
        self._is_whole = True
        self.signal_to_noise: Tensor | None = None
        self._numbers: Tensor | None = None
        if self._mean is not None:
            self._mean.start()

    @property
    def is_new(self) -> bool:
        """Whether nothing has happened since `start`."""
        return self._is_whole and not (self._seen or self._batches)

    def miss_batch(self) -> None:
        """A batch of the step was not captured."""
        self._is_whole = False

    @property
    def is_empty(self) -> bool:
        """Whether no batch of the step has a record."""
        return not self._batches

    def why_unknown(self, step: StepNorms) -> str:
        """Why the mean gradient of a logged step is not known, and what to do; said once in a fit, else ""."""
        if self._mean is None or self._has_said or step.coverage == 0:  # then no norms either: a warning says so
            return ""
        if not step.gradient.shape[1]:  # the module has gone over to it in the middle of the fit
            reason = _MANUAL
        else:
            reason = "" if is_known(step.gradient) else self._mean.reason or _DEVICES_DIFFER
        if reason == _NOTHING and len(step.gradient) > 1:
            reason = _DEVICES_DIFFER
        if self._cosines_absent and not reason:
            reason = self._cosines_absent
        self._unknown_steps = self._unknown_steps + 1 if reason else 0
        # The last batch of an epoch is often a smaller one, which alone is nothing to warn of.
        self._has_said = bool(reason) and (reason not in _MAY_PASS or self._unknown_steps > 1)
        if not self._has_said:
            return ""
        is_weighting = reason in self._weighting
        return f"{reason}; {'give loss_reduction, as above' if is_weighting else 'statistics=() leaves them out'}"

    def before_backward(self, batch_idx: int) -> None:
        """A backward of a batch that is captured begins."""
        if self._mean is not None:
            others = bool(self._seen - {batch_idx})
            self._mean.before_backward(first=not others, again=batch_idx in self._seen)

    def after_backward(self, batch_idx: int, record: PerSampleRecord | None, *, is_last: bool) -> None:
        """That backward has run, and nothing else since."""
        mean = self._mean
        self._seen.add(batch_idx)
        if record is None:
            self._empty.add(batch_idx)
        if mean is None:
            return
        mean.after_backward(record, keep=self._keeps, is_last=is_last)
        if not is_last:
            return
        self._numbers, self.signal_to_noise, self._found_cosines = mean.numbers(), None, []
        if mean.reason:
            return
        if self._cosines:
            try:
                self._found_cosines = mean.cosines()
            except UnsupportedError as error:
                self._cosines_absent = str(error)
        if self._ratios:
            self.signal_to_noise = mean.signal_to_noise()

    def add(self, batch_idx: int, record: PerSampleRecord) -> None:
        """Take the record of a batch; of several (a closure that runs again) the last one counts."""
        self._batches[batch_idx] = captured(record, self._depth, self._groups)
        self._weighting.update(record.weighting)
        if self._mean is not None and record._mean_factor is None:  # that of another engine, perhaps
            self._mean.reason = record.why_no_factor
            if self._numbers is not None:  # then the gradient of the loss alone is known
                self._numbers[:_OF_MEAN] = self._numbers[_HEAD:] = 0.0

    def end_batch(self, batch_idx: int | None) -> None:
        """A batch has ended; None for one that has no part in the gradient."""
        if not self._holds(batch_idx):
            self.miss_batch()

    def norms(self, last: int | None) -> StepNorms:
        """The norms of the step; of none, unless every batch of it was captured, the last one included."""
        whole = self._is_whole and self._holds(last)
        batches = list(self._batches.values()) if whole else []
        if self._mean is None:
            return StepNorms.of_window(batches, self._groups)
        numbers = self._numbers if whole and self._numbers is not None else self._mean.nothing()
        return StepNorms.of_window(batches, self._groups, numbers, self._found_cosines if whole else ())

    def _holds(self, batch_idx: int | None) -> bool:
        return batch_idx is None or batch_idx in self._batches or batch_idx in self._empty
