"""One training step that a capture observes: its losses, the check of their sum, and what is reported of it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_persample.capture.failure import FAULT, fault_of, stop
from lightning_persample.capture.graph import on_arrival
from lightning_persample.capture.mode import expanded_weights
from lightning_persample.capture.parameters import computed_in, default_tolerance
from lightning_persample.capture.record import ROWS_MADE, PerSampleRecord, warn_user, warning_texts
from lightning_persample.errors import OptionError, PerSampleError, UnsupportedError, of_user
from lightning_persample.options import CaptureOptions


class SampleChoice:
    """Chooses samples at random, by random numbers of its own: training draws what it would draw."""

    def __init__(self, most: int | None, seed: int) -> None:
        self._most = most
        self._generator = torch.Generator().manual_seed(seed)

    def of_batch(self, batch_size: int) -> Tensor | None:
        """The places of the samples that are chosen, in order: (m,) int64, different places; None is all."""
        if self._most is None or batch_size <= self._most:
            return None
        return torch.randperm(batch_size, generator=self._generator)[: self._most].sort().values


_NAMED = 8
_OF_LOSS = 1e-3  # a gradient below this share of the loss is compared as if it were that large
_CAUSES = (
    "A term of the loss that belongs to no sample (a penalty on the parameters) does this and leaves the samples' own "
    "gradients exact, and so does a hook or a `backward` of yours that changes gradients; if there is neither, check "
    "the model with check_per_sample_gradients and report it"
)


@dataclass(frozen=True, eq=False)
class Sums:
    """By parameter the gradient of a batch beside the weighted sum of its samples' gradients."""

    loss: Tensor  # the loss of the batch, with every factor that is in its gradient
    dtypes: Collection[torch.dtype]  # that the gradients were computed in
    terms: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, total: Tensor, grad: Tensor, parts: Tensor, before: Tensor | None = None) -> None:
        """Compare a sum over the samples with a gradient that was added to `before`; `parts`: sum_i |w_i| ||g_i||."""
        added = grad if before is None else grad - before
        earlier = torch.zeros_like(parts) if before is None else before.norm()
        self.terms[name] = torch.stack([(total - added).norm(), added.norm(), parts, earlier])

    def too_far(self) -> dict[str, float]:
        """The relative errors of the parameters where they differ by more than rounding."""
        if not self.terms:
            return {}
        errors, sizes, contributions, before = torch.stack(list(self.terms.values())).cpu().unbind(1)
        tolerance = default_tolerance(set(self.dtypes), self.loss.device)
        smallest = 0.01 * max(sizes.norm(), before.norm())
        # Where all gradients cancel (of a bias in front of a normalization), the loss alone tells what rounding makes.
        smallest = smallest.maximum(_OF_LOSS * self.loss.abs().to(smallest))
        allowed = tolerance * torch.maximum(sizes, contributions).clamp_min(smallest)
        return {
            name: float(error / size)
            for name, error, size, most in zip(self.terms, errors, sizes, allowed, strict=True)
            if error > most  # false for what is not finite: an overflow of half precision
        }

    def text(self, compared: str, causes: str) -> str | None:
        """Names the parameters that differ; None where all sums fit."""
        wrong = self.too_far()
        if not wrong:
            return None
        listed = [f"`{name}` by {error:.1%}" for name, error in list(wrong.items())[:_NAMED]]
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        where = f"{', '.join(listed)}{more}"
        return f"The gradients of the samples do not add up to {compared}; they are off for {where}. {causes}"


class SumCheck:
    """Compares ``sum_i w_i g_i`` with what a backward adds to ``.grad``, with the weights w_i of its record."""

    # To be made before that backward. One that is `averaged` over several processes is compared with what this process
    # adds to it, as it arrives; parameters that are sharded are left out.

    def __init__(self, module: nn.Module, loss: Tensor, *, averaged: bool = False) -> None:
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._loss = loss.detach()
        self._dtypes = computed_in(self._parameters.values(), loss.device)
        self._failures: list[Exception] = []
        self._handles: list[RemovableHandle] = []
        self._before: dict[str, Tensor] = {}
        self._averaged = averaged
        self._arrived: dict[str, Tensor] = {}

    def start_backward(self) -> None:
        """Remember the gradients that were accumulated before."""
        if self._averaged:
            for name, parameter in self._parameters.items():
                self._handles.append(on_arrival(parameter, partial(self._arrive, name), self._failures.append))
            return
        self._before = {n: p.grad.detach().clone() for n, p in self._parameters.items() if p.grad is not None}

    @torch.no_grad()
    def finish(self, record: PerSampleRecord) -> str | None:
        """A text that names the parameters that differ, or None where all sums fit; asked for after the backward."""
        self.close()
        if self._failures:
            raise self._failures.pop()
        own = record._own
        if own is None or own.scale is None:
            return None
        sums = Sums(own.scale * self._loss, self._dtypes)
        for name, rows in record.grad_samples.items():
            grad = self._arrived.get(name) if self._averaged else self._parameters[name].grad
            if grad is None:
                continue
            wide, before = torch.promote_types(rows.dtype, torch.float32), self._before.get(name)
            if isinstance(own.weighting, Tensor):
                weights = own.weighting.to(rows.device, wide) * own.scale.to(rows.device, wide)
            else:
                weights = torch.as_tensor(own.factor()).to(rows.device, wide).expand(len(rows))
            total = torch.tensordot(weights, rows.to(wide), dims=1)
            parts = (weights.abs() * record.sq_norms[name].to(rows.device).sqrt()).sum()
            sums.add(name, total, _dense(grad, wide), parts, None if before is None else _dense(before, wide))
        return sums.text("what the backward added to .grad", _CAUSES)

    def close(self) -> None:
        """Remove every hook. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _arrive(self, name: str, grad: Tensor) -> None:
        earlier = self._arrived.get(name)  # a copy: the memory may become .grad, and be averaged there
        self._arrived[name] = grad.detach().clone() if earlier is None else earlier + grad.detach()


def _dense(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return grad.detach().to_dense().to(dtype)


_NO_MEMORY = (
    "there is not enough memory to compare the sum of the samples' gradients with .grad: it is not compared in this fit"
)


class ObservedStep:
    """One training step that a capture observes; `layout` is the batch as the engine looks for its samples."""

    def __init__(
        self,
        module: nn.Module,
        options: CaptureOptions,
        batch: Any,
        layout: Any,
        batch_size: int,
        quantities: Collection[str],
        samples: Tensor | None,
        *,
        sums_differ: bool,
        compare_weights: bool,
        averages: bool,
    ) -> None:
        self.module = module
        self._reduction = options["loss_reduction"]
        self._batch = batch
        self.sums_differ = sums_differ  # whether a sum of gradients was seen not to fit, in this step or before it
        self._has_all = "grad_sample" in quantities and samples is None
        self._averages = averages
        self._sum_check: SumCheck | None = None
        self._lacks_memory = False
        self.capture = expanded_weights(
            module,
            layout,
            loss_reduction="sum" if callable(self._reduction) else self._reduction,
            batch_dim=options["batch_dim"],
            batch_size=batch_size,
            batch_layout=options["batch_layout"],
            quantities=tuple(sorted(quantities)),
            unsupported="ignore",  # what there is to say is for where records are delivered
            fuse_weight_grad=options.get("fuse_weight_grad", False),
            max_memory=options["max_memory"],
            samples=samples,
        )
        if compare_weights and callable(self._reduction):
            self.capture.compare_weights()

    def attach(self, loss: Tensor, outputs: Any) -> None:
        """Tell the capture the loss of the next backward."""
        weights: Tensor | None = None
        if callable(self._reduction):
            with torch.no_grad():
                weights = of_user(self._reduction, outputs, self._batch)
            if not isinstance(weights, Tensor):
                raise OptionError(
                    f"loss_reduction returned {type(weights).__name__}, but it must return a tensor of shape "
                    f"({self.capture.batch_size},) with the weight of each sample in the loss"
                )
        self.capture.attach_loss(loss, weights)
        if self._has_all and not self.sums_differ:
            self._sum_check = SumCheck(self.module, loss, averaged=self._averages)

    def close(self) -> None:
        """Close the capture and remove every hook. May be called twice."""
        self.capture.close()
        if self._sum_check is not None:
            self._sum_check.close()

    def start_backward(self) -> None:
        """Note what ``.grad`` holds before a backward."""
        if self._sum_check is not None:
            try:
                self._sum_check.start_backward()
            except torch.OutOfMemoryError:
                self._sum_check.close()
                self._sum_check, self._lacks_memory = None, True

    def why_sums_differ(self, record: PerSampleRecord) -> str | None:
        """Compare the sums with what the backward added to ``.grad``; said once, and not looked at again."""
        check, self._sum_check = self._sum_check, None
        text = _NO_MEMORY if self._lacks_memory else None
        try:
            text = text if check is None else check.finish(record)
        except torch.OutOfMemoryError:
            text = _NO_MEMORY
        self.sums_differ |= text is not None
        return text


# What the shared capture of a Trainer hands to the callbacks it serves, and says to the user

_SIZES = re.compile(r"\([\d, ]*\)| \(\d+ of \d+ add nothing[^)]*\)|\d+ (?=samples|rows)")


class Reports:
    """Hands records to callbacks, and says each trouble once in a fit, or raises it."""

    def __init__(self, trainer: Trainer, pl_module: LightningModule, *, raises: bool) -> None:
        self._trainer = trainer
        self._module = pl_module
        self._raises = raises
        self._said: set[str] = set()
        self.texts: list[str] = []  # of the warnings, as they were given
        self.has_said_fault = False  # whether values are missing by a fault of this package
        self._grad_samples: dict[torch.nn.Parameter, Tensor] = {}

    def deliver(self, record: PerSampleRecord, receivers: Sequence[Any], batch: Any) -> None:
        """Give a record to the callbacks that want it, and its gradients to the parameters."""
        texts = warning_texts(record)
        if record.unsupported and self._raises:
            stop(UnsupportedError(texts[0]))
        for text in texts:
            self.warn(text)
        grad_samples = record._asked_grad_samples
        if grad_samples:
            parameters = dict(self._module.named_parameters(remove_duplicate=False))
            for name, grad_sample in grad_samples.items():
                self._grad_samples[parameters[name]] = grad_sample  # first: an interrupt may come at any moment
                parameters[name].grad_sample = grad_sample  # type: ignore[attr-defined]
        batch_idx = self._trainer.fit_loop.epoch_loop.batch_idx
        for callback in receivers:
            of_user(callback.on_per_sample_gradients, self._trainer, self._module, record, batch, batch_idx)

    def end_batch(self) -> None:
        """Remove ``grad_sample`` from the parameters."""
        for parameter, grad_sample in self._grad_samples.items():
            if getattr(parameter, "grad_sample", None) is grad_sample:
                del parameter.grad_sample  # type: ignore[attr-defined]
        self._grad_samples = {}

    def report(self, error: PerSampleError) -> None:
        """Say why something is not captured, or raise it if a callback has ``unsupported="error"``."""
        if self._raises:
            stop(error)
        self.warn(str(error))

    def refuse(self, reason: str) -> None:
        """`report` that something is not supported, and why."""
        self.report(UnsupportedError(reason))

    def report_failure(self, error: Exception) -> None:
        """`report` what has failed in this package, by its own fault unless it is a `PerSampleError`."""
        if not isinstance(error, PerSampleError):
            error = UnsupportedError(fault_of(error, "the capture of the training step"))
        self.report(error)

    def warn(self, text: str) -> None:
        """Say each thing once: some of the same calls, with other sizes, are the same, and a fault is one."""
        said = {FAULT} if FAULT in text else {*_SIZES.sub("", ROWS_MADE.sub("", text)).splitlines()}
        self.has_said_fault |= FAULT in text
        if not said <= self._said:
            remedies = set(ROWS_MADE.findall(text))
            for remedy in remedies & self._said:
                text = text.replace(remedy, "")
            self._said |= said | remedies
            self.texts.append(text)
            warn_user(text)
