"""What ``.grad`` is when an optimizer steps: the gradient of the loss, and the mean of the samples' own gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_persample.capture.record import PerSampleRecord, group_name
from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients.precision import wide_dtype
from lightning_persample.metrics.functional import cosine_to_mean, ratio_of_sums
from lightning_persample.torch_internals import (
    hooks_after_accumulation,
    local_part,
    parameters_and_buffers,
    version_counter,
)

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
