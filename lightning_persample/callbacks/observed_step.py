"""One training step that a capture observes, what is known of its losses, and the check of their sum."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_persample.capture.failure import of_user
from lightning_persample.capture.graph import on_arrival
from lightning_persample.capture.mode import expanded_weights
from lightning_persample.capture.parameters import default_tolerance
from lightning_persample.capture.record import PerSampleRecord
from lightning_persample.errors import OptionError
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
_OF_BACKWARD = "what the backward added to .grad"
_OF_BATCH = "the gradient of the batch, both taken without dropout"
_CAUSES = (
    "A term of the loss that belongs to no sample (a penalty on the parameters) does this and leaves the samples' own "
    "gradients exact, and so does a hook or a `backward` of yours that changes gradients; if there is neither, check "
    "the model with check_per_sample_gradients and report it"
)


class SumCheck:
    """Compares ``sum_i w_i g_i`` with what a backward adds to ``.grad``; weights w_i (B,), or one number for all."""

    # To be made before that backward. One that is `averaged` over several processes is compared with what this process
    # adds to it, as it arrives; parameters that are sharded are left out.

    def __init__(self, module: nn.Module, loss: Tensor, weights: Tensor | float, *, averaged: bool = False) -> None:
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._weights = weights
        self._scale: Tensor | None = None
        self._loss = loss.detach()
        self._failures: list[Exception] = []
        self._handles = [on_arrival(loss, self._keep_scale, self._failures.append)]
        self._before: dict[str, Tensor] = {}
        self._averaged = averaged
        self._arrived: dict[str, Tensor] = {}
        self._grads: Mapping[str, Tensor] | None = None
        self._autocast = (
            {torch.get_autocast_dtype(loss.device.type)} if torch.is_autocast_enabled(loss.device.type) else set()
        )

    def start_backward(self) -> None:
        """Remember the gradients that were accumulated before."""
        if self._averaged:
            for name, parameter in self._parameters.items():
                self._handles.append(on_arrival(parameter, partial(self._arrive, name), self._failures.append))
            return
        self._before = {n: p.grad.detach().clone() for n, p in self._parameters.items() if p.grad is not None}

    def weigh(self, weight: float) -> None:
        """Tell what each sample turned out to weigh, after the backward: the loss may be a mean over some alone."""
        self._weights = weight

    def finish(
        self,
        record: PerSampleRecord,
        totals: Mapping[str, Tensor] | None = None,
        causes: str = _CAUSES,
        grads: Mapping[str, Tensor] | None = None,
    ) -> str | None:
        """A text that names the parameters that differ, or None where all sums fit; asked for after the backward."""
        # `totals` are the weighted sums over the samples by name; None takes those of the record's gradients.
        # `grads` are the gradients of the batch by name; None takes ``.grad``.
        self._grads = grads
        self.close()
        if self._failures:
            raise self._failures.pop()
        if self._scale is None:
            return None
        terms = self._terms(record, totals, self._scale)
        if not terms:
            return None
        errors, sizes, contributions, before = torch.stack(list(terms.values())).cpu().unbind(1)
        dtypes = {self._parameters[name].dtype for name in terms} | self._autocast
        tolerance = default_tolerance(dtypes, next(iter(self._parameters.values())).device)
        smallest = 0.01 * max(sizes.norm(), before.norm())
        # Where all gradients cancel (of a bias in front of a normalization), the loss alone tells what rounding makes.
        smallest = smallest.maximum(_OF_LOSS * (self._scale * self._loss).abs().to(smallest))
        allowed = tolerance * torch.maximum(sizes, contributions).clamp_min(smallest)
        wrong = {
            name: float(error / size)
            for name, error, size, most in zip(terms, errors, sizes, allowed, strict=True)
            if error > most  # false for what is not finite: an overflow of half precision
        }
        if not wrong:
            return None
        fitting = "" if totals is None else self._reduction_that_fits(totals, record, allowed)
        return _text(wrong, fitting or causes, _OF_BACKWARD if grads is None else _OF_BATCH)

    def _reduction_that_fits(self, totals: Mapping[str, Tensor], record: PerSampleRecord, allowed: Tensor) -> str:
        """What helps where the samples of a mean add up to the gradient as those of a sum, or the reverse."""
        weights = torch.as_tensor(self._weights)
        size = weights.numel()
        for given, fitting, factor in (("mean", "sum", float(size)), ("sum", "mean", 1.0 / size)):
            if size == 1 or self._scale is None or not bool((weights * (1.0 if given == "sum" else size) == 1.0).all()):
                continue
            terms = self._terms(record, totals, self._scale * factor)
            if bool((torch.stack(list(terms.values()))[:, 0].cpu() <= allowed).all()):
                found = f"The loss is a {fitting} over the samples and no {given}: pass loss_reduction={fitting!r}"
                if fitting == "mean":
                    return found
                return f"{found}; where it is divided by a fixed number of samples, divide by the rows of the batch"
        return ""

    def close(self) -> None:
        """Remove every hook. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _arrive(self, name: str, grad: Tensor) -> None:
        earlier = self._arrived.get(name)  # a copy: the memory may become .grad, and be averaged there
        self._arrived[name] = grad.detach().clone() if earlier is None else earlier + grad.detach()

    def _grad(self, name: str) -> Tensor | None:
        if self._grads is not None:
            return self._grads.get(name)
        return self._arrived.get(name) if self._averaged else self._parameters[name].grad

    def _keep_scale(self, grad: Tensor) -> None:
        self._scale = grad.detach().reshape(()) if grad.numel() == 1 else None

    @torch.no_grad()
    def _terms(self, record: PerSampleRecord, totals: Mapping[str, Tensor] | None, scale: Tensor) -> dict[str, Tensor]:
        """Norms of the error, of what was added, of the samples' parts together, and of what was there before, (4,)."""
        found = {}
        for name, rows in (record.grad_samples if totals is None else totals).items():
            grad, before = self._grad(name), self._before.get(name)
            if grad is None:
                continue
            wide = torch.promote_types(rows.dtype, torch.float32)
            device, factor = rows.device, scale.to(rows.device, wide)
            added = _dense(grad, wide) if before is None else _dense(grad, wide) - _dense(before, wide)
            norms = record.sq_norms[name].to(device, wide).sqrt()
            if isinstance(self._weights, Tensor):
                weights = self._weights.detach().to(device, wide)
                weights = weights if record.samples is None else weights[record.samples.to(device)]
                total = rows if totals is not None else torch.tensordot(weights, rows.to(wide), dims=1)
                parts = (weights.abs() * norms).sum()
            else:
                total = rows if totals is not None else rows.sum(0, dtype=wide) * self._weights
                parts = norms.sum() * self._weights
            earlier = added.new_zeros(()) if before is None else _dense(before, wide).norm()
            found[name] = torch.stack([(total * factor - added).norm(), added.norm(), parts * factor.abs(), earlier])
        return found


def _dense(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return grad.detach().to_dense().to(dtype)


def _text(wrong: Mapping[str, float], causes: str, compared: str) -> str:
    listed = [f"`{name}` by {error:.1%}" for name, error in list(wrong.items())[:_NAMED]]
    more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    where = f"{', '.join(listed)}{more}"
    return f"The gradients of the samples do not add up to {compared}; they are off for {where}. {causes}"


_NO_MEMORY = (
    "there is not enough memory to compare the sum of the samples' gradients with .grad: it is not compared in this fit"
)


class ObservedStep:
    """One training step that a capture observes; `layout` is the batch as the engine looks for its samples."""

    def __init__(
        self,
        pl_module: LightningModule,
        options: CaptureOptions,
        batch: Any,
        layout: Any,
        batch_size: int,
        quantities: Collection[str],
        choice: SampleChoice,
        *,
        sums_differ: bool,
        compare_weights: bool,
        averages: bool,
    ) -> None:
        self.module = pl_module
        self._reduction = options["loss_reduction"]
        self._batch = batch
        self.sums_differ = sums_differ  # whether a sum of gradients was seen not to fit, in this step or before it
        samples = choice.of_batch(batch_size)
        self._has_all = "grad_sample" in quantities and samples is None
        self._averages = averages
        self._sum_check: SumCheck | None = None
        self.weights: Tensor | float | None = None  # of each sample in the loss, (B,) or one number, once there is one
        self._lacks_memory = False
        self.capture = expanded_weights(
            pl_module,
            layout,
            loss_reduction="sum" if callable(self._reduction) else self._reduction,
            batch_dim=options["batch_dim"],
            batch_size=batch_size,
            batch_layout=options["batch_layout"],
            quantities=tuple(sorted(quantities)),
            unsupported="ignore",  # what there is to say is for where records are delivered
            fuse_weight_grad=options["fuse_weight_grad"],
            max_memory=options["max_memory"],
            samples=samples,
        )
        if compare_weights and callable(self._reduction):
            self.capture.compare_weights()

    def attach(self, loss: Tensor, outputs: Any) -> None:
        """Tell the capture the loss of the next backward."""
        reduction, size = self._reduction, self.capture.batch_size
        weights: Tensor | float = 1.0 if reduction == "sum" else 1.0 / size
        if callable(reduction):
            with torch.no_grad():
                weights = of_user(reduction, outputs, self._batch)
            if not isinstance(weights, Tensor):
                raise OptionError(
                    f"loss_reduction returned {type(weights).__name__}, but it must return a tensor of shape "
                    f"({size},) with the weight of each sample in the loss"
                )
            self.capture.attach_loss(loss, weights)
        else:
            self.capture.attach_loss(loss)
            weights = weights if self.capture.weights is None else self.capture.weights
        self.weights = weights
        if self._has_all and not self.sums_differ:
            self._sum_check = SumCheck(self.module, loss, weights, averaged=self._averages)

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
        if check is not None and self._reduction == "mean" and not isinstance(self.weights, Tensor):
            check.weigh(1.0 / self.capture.counted)
        text = _NO_MEMORY if self._lacks_memory else None
        try:
            text = text if check is None else check.finish(record)
        except torch.OutOfMemoryError:
            text = _NO_MEMORY
        self.sums_differ |= text is not None
        return text
