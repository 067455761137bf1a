"""What each training sample's steps did to the loss on validation data, along the training itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Unpack

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lightning_persample.batch_axis.batch import count_samples
from lightning_persample.callbacks.rows import CapturedRows
from lightning_persample.callbacks.second_pass import second_pass
from lightning_persample.callbacks.writer import Columns, PerSampleGradientWriter
from lightning_persample.capture.failure import of_user
from lightning_persample.capture.record import PerSampleRecord
from lightning_persample.errors import OptionError, UnsupportedError
from lightning_persample.options import CaptureOptions, check_option, is_int
from lightning_persample.reference.samples import gradients_of, loss_of


class InRunInfluence(PerSampleGradientWriter):
    """Writes a ledger with what each sample's part in each captured step did to the loss on validation data.

    It is a `PerSampleGradientWriter` with four columns in place of the norm:

    - "val_dot", ``g_i . g_val``: the sample's gradient with the mean gradient of the validation samples, taken in
      evaluation at the weights of this step, or of the last step at which it was refreshed;
    - "shapley", ``eta w_i g_i . g_val``: by how much the sample's part in this step lowers the validation loss, to
      first order: positive helps. These are the first-order in-run data Shapley values of equation 5 of the reference,
      with the step's own learning rate, which sum over the batch to the first-order change. For Adam and AdamW it is
      ``eta w_i g_i . P g_val``, P the diagonal that the step multiplies the batch's gradient by,
      ``(1 - beta1) / (1 - beta1^t) / (sqrt(v_t / (1 - beta2^t)) + eps)`` with v_t of this step, which is held fixed;
      for SGD with momentum what of the gradient enters this step, without the factor of clipping. It is nan where the
      weight of a sample or the form of the optimizer is not known: of others than these, of Adam under accumulation or
      clipping;
    - "val_loss", the mean loss of the validation samples when their gradient was taken: from one refresh to the next
      it changes by minus the sum of "shapley" and a residual of higher order, of momentum and of staleness;
    - "staleness", how many optimizer steps ago that was.

    `data_shapley` adds up the values of each sample. No gradient is stored and no checkpoint needed.

    The validation pass leaves the training as it is, bit for bit: the module with its buffers and mode, ``.grad``, what
    it logs, and the random numbers are as if it had not run, for which it takes the memory of one more copy of the
    module. Each process runs all of it.

    Cost: a dot for each captured step, about a forward, and a forward and backward of all validation samples for each
    refresh: a few hundred samples, or a refresh each 10 steps, keep it small.

    Args:
        dirpath: the folder of the ledger.
        val_dataloader: batches of the validation samples, gone through once for each refresh.
        every_n_steps: capture every n-th optimizer step; None captures the Trainer's own logging steps.
        refresh_every_n_steps: take the validation gradient again when it is that many optimizer steps old.
        val_loss: a callable ``(module, batch)`` that returns the loss of a validation batch, or a dict with "loss";
            None takes ``module.training_step(batch, batch_idx)``. With loss_reduction="sum" it is a sum over the batch,
            else a mean.
        norms: whether the ledger has the column "norm", which `self_influence` and `grand` need; it takes about as long
            as the dots.
        columns: see `PerSampleGradientWriter`, as all that follow.
        flush_every: count of captured batches from one file to the next.
        overwrite: remove the ledger of another run from the folder.
        capture: `loss_reduction` and further options, see `PerSampleCallback`.

    Raises:
        OptionError: an option has a value that is not allowed.

    Reference: Wang et al. 2024, Data Shapley in one training run, section 4, arXiv 2406.11011.
    """

    def __init__(
        self,
        dirpath: str | Path,
        val_dataloader: Iterable[Any],
        every_n_steps: int | None = 1,
        *,
        refresh_every_n_steps: int = 1,
        val_loss: Callable[[Any, Any], Any] | None = None,
        norms: bool = False,
        columns: Columns = None,
        flush_every: int = 100,
        overwrite: bool = False,
        **capture: Unpack[CaptureOptions],
    ) -> None:
        super().__init__(
            dirpath, every_n_steps, columns=columns, flush_every=flush_every, overwrite=overwrite, **capture
        )
        given: Any = val_dataloader
        has_batches = isinstance(given, Iterable) and not isinstance(given, Iterator)
        check_option("val_dataloader", val_dataloader, has_batches, "batches that can be gone through again")
        is_count = is_int(refresh_every_n_steps, 1)
        check_option("refresh_every_n_steps", refresh_every_n_steps, is_count, "an int >= 1")
        check_option("val_loss", val_loss, val_loss is None or callable(val_loss), "None or a callable (module, batch)")
        check_option("norms", norms, isinstance(norms, bool), "True or False")
        self.val_dataloader, self.val_loss, self.norms = val_dataloader, val_loss, norms
        self.refresh_every_n_steps = refresh_every_n_steps
        self._forget_gradient()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """See that a validation pass steps no optimizer."""
        if stage == "fit" and self.val_loss is None and not pl_module.automatic_optimization:
            raise OptionError(
                "val_loss=None takes module.training_step, which steps the optimizers itself: pass val_loss=..., a "
                "callable (module, batch) that returns the loss of a validation batch"
            )
        super().setup(trainer, pl_module, stage)

    def _forget_gradient(self) -> None:
        self._gradient: dict[str, Tensor] = {}
        self._loss, self._taken_at = float("nan"), -1
        self._without_rate: list[CapturedRows] = []

    def needs(self, trainer: Trainer) -> set[str]:
        """Dots, and norms where they are kept."""
        return {"dot", "sq_norm"} if self.norms else {"dot"}

    def _let_go(self) -> None:
        super()._let_go()
        self._forget_gradient()

    def _added(
        self, trainer: Trainer, pl_module: LightningModule, record: PerSampleRecord, rows: CapturedRows
    ) -> dict[str, Tensor]:
        """The four columns of a backward, each (m,)."""
        if self._taken_at < 0 or not 0 <= rows.step - self._taken_at < self.refresh_every_n_steps:
            self._refresh(trainer, pl_module)
            self._taken_at = rows.step
        unknown = torch.full((len(rows),), float("nan"), dtype=torch.float64)
        found = {
            "val_dot": unknown,
            "shapley": unknown,
            "val_loss": torch.full_like(unknown, self._loss),
            "staleness": torch.full_like(unknown, rows.step - self._taken_at, dtype=torch.int64),
        }
        if record.unsupported:
            named = ", ".join(f"`{name}`" for name in record.unsupported)
            self._warn(f"val_dot and shapley are nan: the capture has no gradients of {named}, see its warning")
            return found
        known = {name: self._gradient[name] for name in record.names if name in self._gradient}
        found["val_dot"] = record.dot(known).double() if known else torch.zeros_like(unknown)
        if record.factor is None:
            reason = record.why_no_factor or "this engine does not know it"
            self._warn(f"shapley is nan: it needs the weight of each sample in the step, and {reason}")
            return found
        weight = record.factor.double() / rows.divisor
        has_one_rate = isinstance(rows.rate, float)
        try:
            factors = _step_factors(trainer, pl_module, known, with_rate=not has_one_rate)
        except UnsupportedError as error:
            self._warn(f"shapley is nan: {error}")
            return found
        found["shapley"] = weight * _dot_with(record, known, factors, found["val_dot"])
        if has_one_rate:
            self._without_rate.append(rows)  # it may still change before the optimizer steps
        return found

    def _flush(self, trainer: Trainer) -> None:
        captured, waiting = {id(rows) for rows in self._captured}, {id(rows) for rows in (*self._current, *self._held)}
        for rows in self._without_rate:
            if id(rows) in captured:
                rows.columns = {**rows.columns, "shapley": rows.columns["shapley"] * rows.rate}
        self._without_rate = [rows for rows in self._without_rate if id(rows) in waiting]
        super()._flush(trainer)

    def _refresh(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the mean loss of the validation samples and its gradient at the weights of now."""
        parameters = {name: each for name, each in pl_module.named_parameters() if each.requires_grad}
        total = {name: torch.zeros_like(each) for name, each in parameters.items()}
        samples, losses = 0, 0.0
        options = self._capture_options()
        with second_pass(trainer, pl_module):
            pl_module.eval()
            for number, given in enumerate(self.val_dataloader):
                batch = trainer.strategy.batch_to_device(given)
                size = count_samples(batch, options["batch_dim"], None, None, options["batch_layout"])
                loss = self._loss_of(pl_module, batch, number)
                share = 1 if options["loss_reduction"] == "sum" else size
                for name, grad in gradients_of(loss, parameters).items():
                    total[name] += grad * share
                samples, losses = samples + size, losses + float(loss.detach()) * share
        if not samples:
            raise OptionError("val_dataloader gave no batch: pass one that can be gone through again and again")
        self._gradient = {name: each / samples for name, each in total.items()}
        self._loss = losses / samples

    def _loss_of(self, pl_module: LightningModule, batch: Any, number: int) -> Tensor:
        if self.val_loss is not None:
            outputs = of_user(self.val_loss, pl_module, batch)
        else:
            step: Any = type(pl_module).training_step  # that of the instance is observed
            needs_number = is_param_in_hook_signature(step, "batch_idx", min_args=2)
            outputs = of_user(step, pl_module, batch, *([number] if needs_number else []))
        loss = loss_of(outputs)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise OptionError(
                "the validation loss is no single number with a graph: return that of the batch, or pass val_loss=..."
            )
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_gradient": {}, "_taken_at": -1, "_without_rate": []}


def _dot_with(
    record: PerSampleRecord, vectors: Mapping[str, Tensor], factors: Mapping[str, Tensor | float], dots: Tensor
) -> Tensor:
    """The dots with vectors times factors, (m,), where those without are known: a dot costs about a forward."""
    numbers = {factor for factor in factors.values() if isinstance(factor, float)}
    if len(numbers) <= 1 and not any(isinstance(factor, Tensor) for factor in factors.values()):
        return dots * (numbers.pop() if numbers else 1.0)
    return record.dot({name: vector * factors[name] for name, vector in vectors.items()}).double()


def _step_factors(
    trainer: Trainer, pl_module: LightningModule, names: Iterable[str], *, with_rate: bool
) -> dict[str, Tensor | float]:
    """By parameter the diagonal, times the rate if asked for, that the next step multiplies a gradient by."""
    groups = {
        id(parameter): (optimizer, group)
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    parameters, found = dict(pl_module.named_parameters()), dict[str, Tensor | float]()
    for name in names:
        if id(parameters[name]) not in groups:
            found[name] = 0.0  # no optimizer moves it
            continue
        optimizer, group = groups[id(parameters[name])]
        factor = _factor(trainer, optimizer, group, parameters[name]) * (-1.0 if group.get("maximize") else 1.0)
        found[name] = factor * float(group["lr"]) if with_rate else factor
    return found


def _factor(
    trainer: Trainer, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: nn.Parameter
) -> Tensor | float:
    """What the next step of an optimizer multiplies a gradient by, entry by entry, besides the learning rate."""
    state, step = optimizer.state.get(parameter, {}), inspect.unwrap(type(optimizer).step)
    if isinstance(optimizer, torch.optim.SGD) and step is inspect.unwrap(torch.optim.SGD.step):
        momentum = float(group["momentum"])
        taken = 1.0 - float(group["dampening"]) if momentum and state.get("momentum_buffer") is not None else 1.0
        return 1.0 + momentum * taken if group["nesterov"] else taken
    if not isinstance(optimizer, torch.optim.Adam) or step is not inspect.unwrap(torch.optim.Adam.step):  # (AdamW's)
        raise UnsupportedError(f"it is known of SGD, Adam and AdamW, and {type(optimizer).__name__} steps otherwise")
    grad = parameter.grad
    if trainer.accumulate_grad_batches != 1 or getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise UnsupportedError("what Adam divides by is not known before the step, of accumulated or scaled gradients")
    if trainer.gradient_clip_val:
        raise UnsupportedError("what Adam divides by is not known before the step, of gradients that are clipped")
    if grad is None:
        return 0.0
    grad = -grad if group["maximize"] else grad
    if group["weight_decay"] and not group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)):
        grad = grad + group["weight_decay"] * parameter.detach()
    (beta1, beta2), t = group["betas"], float(state.get("step", 0)) + 1
    second = (1 - beta2) * grad.square()
    if "exp_avg_sq" in state:
        second = second + beta2 * state["exp_avg_sq"]
    if group["amsgrad"] and "max_exp_avg_sq" in state:
        second = torch.maximum(second, state["max_exp_avg_sq"])
    return (1 - beta1) / (1 - beta1**t) / ((second / (1 - beta2**t)).sqrt() + group["eps"])
