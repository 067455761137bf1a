"""The mean gradient of an optimizer step, read off ``.grad``, beside the gradients of its samples.

Training adds ``factor * sum_i g_i`` to ``.grad`` in every backward of a step, and averages over the processes. So the
mean over all samples of the step is there for nothing, before clipping and the optimizer change it, if ``.grad`` was
empty when the step began, nothing else was added, and all samples weigh alike, or each as a callable says: then the
mean is one of ``B w_i g_i``. Each of this is looked at, and where it does not hold there is no mean, and a reason.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_persample.callbacks._gradient_entries import entries, is_distributed, local
from lightning_persample.engine import PerSampleRecord, group_name
from lightning_persample.gradients.precision import wide_dtype
from lightning_persample.metrics.functional import cosine_to_mean, ratio_of_sums

__all__ = [
    "DEVICES_DIFFER",
    "NOTHING",
    "UNEQUAL",
    "MeanGradient",
    "is_known",
    "joined_sq_norms",
    "norm_of_loss_gradient",
    "without_mean",
]

_OF_MEAN = 5  # whether the mean is known, the factor, the samples, their share, the parameters that count
_HEAD = 8  # and whether ``.grad`` is the gradient of the loss, times what, and this process's share of its squared norm
UNEQUAL = "the samples of an optimizer step weigh unequally: its batches differ in size"
DEVICES_DIFFER = "the devices have numbers of samples, or parameters with values, that differ"
_CHANGED = "gradients were changed between the backward passes of an optimizer step"
_DIFFERENT = "the parameters without per-sample gradients differ between the backward passes of an optimizer step"
_NOT_EMPTY = "there were gradients before the first backward of the optimizer step: call zero_grad, and add nothing"
_AGAIN = "an optimizer evaluates a batch several times while gradients are accumulated"
_SHARES = "max_samples takes different shares of its batches"
NOTHING = "`.grad` was empty after the backward, or the last batch of the step had no loss"


class MeanGradient:
    """Follows ``.grad`` through the backward passes of each optimizer step.

    Args:
        pl_module: the module that is trained.
        depth: how many leading parts of a parameter's module path name its group; None makes no groups.
        groups: the names of the groups.
        processes: number of processes whose gradients are averaged.
        why_not: why ``.grad`` does not hold the mean over the processes, or "".

    Attributes:
        processes: as given.
        reason: why the mean of the step was not known when `numbers` was asked for, or "".
    """

    def __init__(
        self,
        pl_module: LightningModule,
        depth: int | None,
        groups: Sequence[str],
        processes: int,
        why_not: Callable[[], str] = str,
    ) -> None:
        self._module, self._why_not = pl_module, why_not
        self._depth, self._groups, self.processes = depth, tuple(groups), processes
        self.start()

    def start(self) -> None:
        """An optimizer step begins."""
        self._checks: list[tuple[Tensor, str]] = []  # what must hold, and what is wrong where it does not
        self._of_samples: list[
            tuple[Tensor, str]
        ] = []  # the same, where the gradient of the loss is known all the same
        self._scale: Tensor | None = None
        self._parameters: dict[str, Tensor] = {}
        self._last: list[tuple[Tensor, int]] = []
        self._sizes: Tensor | None = None
        self._factor: Tensor | None = None
        self._unsupported: tuple[str, ...] | None = None
        self._samples = 0
        self._share: float | None = None
        self.reason = NOTHING
        self._records: list[PerSampleRecord] = []

    def before_backward(self, *, first: bool, again: bool) -> None:
        """Look at what ``.grad`` holds; to be called right before the backward itself."""
        if first:
            self.start()
            # A fit may unfreeze parameters, and make new ones.
            self._parameters = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
            self._refuse(self._why_not())
            self._refuse(_why_hooked(self._parameters))
        elif again:
            self._refuse(_AGAIN)
        held = [p.grad for p in self._parameters.values() if p.grad is not None]
        if first and held:
            self._checks.append((_sq_norms(held).sum() == 0, _NOT_EMPTY))
        if not first:
            unchanged = len(held) == len(self._last) and all(
                grad is before and grad._version == version
                for grad, (before, version) in zip(held, self._last, strict=True)
            )
            self._refuse("" if unchanged else _CHANGED)
            if unchanged and self._sizes is not None:  # what is done to ``.grad.data`` changes no version
                self._checks.append(((_sq_norms(held) == self._sizes).all(), _CHANGED))

    def after_backward(self, record: PerSampleRecord | None, *, keep: bool, is_last: bool) -> None:
        """Take note of a backward that has run; to be called before anything else can change ``.grad``."""
        if record is not None:
            self._count(record)
        held = [p.grad for p in self._parameters.values() if p.grad is not None]
        self._last = [(grad, grad._version) for grad in held]
        self._sizes = None if is_last else _sq_norms(held)
        if keep and record is not None:
            self._records.append(record)

    def _count(self, record: PerSampleRecord) -> None:
        """Add the samples of a backward to those of the step."""
        samples = record.batch_size if record.in_loss is None else record.in_loss
        self._samples += samples
        share = record.num_values / max(samples, 1)
        self._refuse_mean(_SHARES if self._share not in (None, share) else "")
        self._share = share
        unsupported = tuple(record.unsupported)
        self._refuse_mean(_DIFFERENT if self._unsupported not in (None, unsupported) else "")
        self._unsupported = unsupported
        factor, scale = record._mean_factor, record._loss_scale
        if factor is None:
            self._refuse_mean(record.why_no_factor)
        elif self._factor is None:
            self._factor = factor
        else:
            self._of_samples.append((torch.isclose(factor, self._factor.to(factor), rtol=1e-5, atol=0), UNEQUAL))
        if scale is not None:
            self._scale = scale if self._scale is None else self._scale + scale.to(self._scale)

    def refuse_record(self, record: PerSampleRecord) -> None:
        """Note that another record took the place of the backward's own."""
        self.reason = record.why_no_factor

    def _refuse_mean(self, reason: str) -> None:
        if reason:
            self._of_samples.append((torch.tensor(False), reason))

    def _refuse(self, reason: str) -> None:
        if reason:
            self._checks.append((torch.tensor(False), reason))

    def _grads(self) -> dict[str, Tensor]:
        """The gradients that the samples' add up to."""
        left_out = frozenset(self._unsupported or ())
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None and name not in left_out}

    def _members(self, names: Iterable[str]) -> list[list[int]]:
        """The places of the parameters of each group."""
        found: dict[str, list[int]] = {group: [] for group in self._groups}
        for place, name in enumerate(names if found else ()):
            group = group_name(name, self._depth or 1)
            if group in found:  # a layer that was made in the middle of the fit is in none
                found[group].append(place)
        return list(found.values())

    def nothing(self) -> Tensor:
        """What `numbers` gives where nothing is known."""
        return torch.zeros(_HEAD + 1 + len(self._groups), dtype=torch.float64)

    def numbers(self) -> Tensor:
        """What this process knows, on the host in double precision, to be joined by `joined_sq_norms`."""
        numbers = self.nothing()
        grads = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        self.reason = next((text for holds, text in self._checks if not bool(holds)), "")
        if self.reason or not grads:
            self.reason = self.reason or NOTHING
            return numbers
        shares = _shares(grads.values(), self.processes)
        squares = _sq_norms(grads.values()).cpu()  # first: groups are then summed without further transfers
        if any(share != 1 for share in shares):
            squares = squares / torch.tensor(shares, dtype=torch.float32)
        if self._scale is not None:
            numbers[_OF_MEAN:_HEAD] = torch.tensor([1.0, float(self._scale), float(squares.sum())], dtype=torch.float64)
        self.reason = next((text for holds, text in self._of_samples if not bool(holds)), "")
        counted = self._grads()
        if self.reason or self._factor is None or not counted:
            self.reason = self.reason or NOTHING
            return numbers
        squares = squares[[place for place, name in enumerate(grads) if name in counted]]
        parts = [squares.sum(), *(squares[own].sum() for own in self._members(counted))]
        kind = zlib.crc32("\n".join(self._unsupported or ()).encode())
        head = [1.0, float(self._factor), self._samples, self._share or 1.0, kind]
        numbers[:_OF_MEAN] = torch.tensor(head, dtype=torch.float64)
        numbers[_HEAD:] = torch.stack(parts)
        return numbers

    def cosines(self) -> list[Tensor]:
        """Cosines of the samples with the mean gradient, g_i . gbar / (||g_i|| ||gbar||)."""
        grads = {name: grad for name, grad in self._grads().items() if not is_distributed(grad)}
        total = _sq_norms(grads.values()).sum()
        found = []
        for record in self._records:
            vectors = {name: local(grads[name]).to_dense() for name in record.names if name in grads}
            if not vectors or self._factor is None:
                continue
            sign = self._factor.sign().to(total.device)
            found.append(cosine_to_mean(record.dot(vectors).to(total.device) * sign, record.norms().square(), total))
        return found

    def signal_to_noise(self) -> Tensor:
        """Mean over all entries of the parameters of the gradient signal to noise ratio, and that of each group."""
        ratios: dict[str, Tensor] = {}
        for name, grad in self._grads().items():
            squares = [
                record._weighted_square_sums.get(name, record.square_sums[name])
                for record in self._records
                if name in record.square_sums
            ]
            if squares and self._factor is not None:
                sums = local(grad).to_dense().double() / self._factor.to(grad.device).double()
                wide = torch.stack([each.double() for each in squares]).sum(0) / (self._share or 1.0)
                count = wide.new_tensor(self._samples)
                ratios[name] = ratio_of_sums(sums, wide, count, torch.finfo(squares[0].dtype).eps).flatten()
        every = list(ratios.values())
        groups = (_finite_mean(every[place] for place in own) for own in self._members(ratios))
        return torch.stack([_finite_mean(every), *groups])


def is_known(numbers: Tensor) -> bool:
    """Whether the processes with these `MeanGradient.numbers` hold one mean gradient over all their samples."""
    heads = numbers[:, :_OF_MEAN].tolist()
    _, first, _, *alike = heads[0]
    return all(
        known and parts == alike and math.isclose(factor, first, rel_tol=1e-5) for known, factor, _, *parts in heads
    )


def joined_sq_norms(numbers: Tensor) -> Tensor:
    """Squared norm of the mean gradient over the samples of all processes."""
    if not is_known(numbers):
        return numbers.new_full((numbers.shape[1] - _HEAD,), math.nan)
    _, factor, samples, *_ = numbers[:, :_OF_MEAN].unbind(1)
    scale = numbers.shape[0] / (factor[0] * samples.sum())
    joined: Tensor = numbers[:, _HEAD:].sum(0) * scale.square()
    return joined


def without_mean(numbers: Tensor) -> Tensor:
    """`MeanGradient.numbers` of a step of which the gradient of the loss alone is known."""
    found = torch.zeros_like(numbers)
    found[_OF_MEAN:_HEAD] = numbers[_OF_MEAN:_HEAD]
    return found


def norm_of_loss_gradient(numbers: Tensor) -> float:
    """Norm of the gradient of the loss over all processes, of a sum over its number of samples; nan where unknown."""
    if not numbers.shape[1] or not bool(numbers[:, _OF_MEAN].all()):
        return math.nan
    _, scale, squares = numbers[:, _OF_MEAN:_HEAD].unbind(1)
    return float(squares.sum().sqrt() / scale.mean().abs())


def _finite_mean(parts: Iterable[Tensor]) -> Tensor:
    values = [part[part.isfinite()].cpu() for part in parts]
    joined = torch.cat(values) if values else torch.empty(0, dtype=torch.float64)
    return joined.mean() if joined.numel() else torch.tensor(math.nan, dtype=torch.float64)


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


def _shares(grads: Iterable[Tensor], processes: int) -> list[int]:
    """In how many processes each gradient is held alike."""
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
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"a hook on `{name}` is called when its gradient was accumulated, and may change it"
    return ""
