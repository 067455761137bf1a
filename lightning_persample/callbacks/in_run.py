"""What each training sample's steps did to the loss on validation data, along the training itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_persample.batch_axis.batch import count_samples
from lightning_persample.callbacks.checkpoints import requiring_gradients
from lightning_persample.callbacks.lightning_internals import handed_over, outputs_of, validating
from lightning_persample.callbacks.manual import SeenGrad, unseen
from lightning_persample.callbacks.rows import CapturedRows
from lightning_persample.callbacks.second_pass import second_pass
from lightning_persample.callbacks.session import shared_capture
from lightning_persample.callbacks.writer import Columns, PerSampleGradientWriter
from lightning_persample.capture.record import PerSampleRecord
from lightning_persample.errors import OptionError, UnsupportedError, each_of_user
from lightning_persample.gradients.norms import as_real
from lightning_persample.options import CaptureOptions, check_option, check_options
from lightning_persample.reference.samples import gradients_of, loss_of
from lightning_persample.reference.untouched import recurrent_layers_can_go_backward


class InRunInfluence(PerSampleGradientWriter):
    """Writes a ledger with what each sample's part in each captured step did to the loss on validation data.

    It is a `PerSampleGradientWriter` with four columns in place of the norm:

    - "val_dot", ``g_i . g_val``: the sample's gradient with the mean gradient of the validation samples, taken as in a
      validation at the weights of this step, or of the last step at which it was refreshed;
    - "shapley", ``eta w_i g_i . g_val``: by how much the sample's part in this step lowers the validation loss, to
      first order: positive helps. These are the first-order in-run data Shapley values of equation 5 of the reference,
      with the step's own learning rate, which sum over the batch to the first-order change. For Adam and AdamW it is
      ``eta w_i g_i . P g_val``, P the diagonal that the step multiplies the batch's gradient by,
      ``(1 - beta1) / (1 - beta1^t) / (sqrt(v_t / (1 - beta2^t)) + eps)`` with v_t of this step, which is held fixed;
      for SGD with momentum what of the gradient enters this step, without the factor of clipping. A backward that no
      optimizer steps with has 0: a step that is skipped, gradients that are dropped in manual optimization. It is nan
      where the weight of a sample or the form of the optimizer is not known: of others than these, of Adam where its
      gradients are accumulated, clipped, or changed by a hook;
    - "val_loss", the mean loss of the validation samples when their gradient was taken: from one refresh to the next
      it changes by minus the sum of "shapley" and a residual of higher order, of momentum and of staleness;
    - "staleness", how many optimizer steps ago that was.

    `data_shapley` adds up the values of each sample. No gradient is stored and no checkpoint needed.

    The validation pass leaves the training as it is, bit for bit: the module with its buffers and mode, ``.grad``, what
    it logs, and the random numbers are as if it had not run, for which it takes the memory of one more copy of the
    module. What training_step changes in objects of other packages than the module's is not put back: pass `val_loss`
    then. Each process runs all of it.

    Cost: a dot for each captured step, about a forward, and a forward and backward of all validation samples for each
    refresh: a few hundred samples, or a refresh each 10 steps, keep it small. Dots are taken while the backward runs;
    for Adam and AdamW, in manual optimization and beside a callback that reads more of the gradients, what they are
    made of is held until it has ended, about the memory of the activations.

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
        listed = given if isinstance(given, (list, tuple)) else ()
        has_batches = isinstance(given, Iterable) and not isinstance(given, (Iterator, Mapping))
        has_batches &= not any(isinstance(each, DataLoader) for each in listed)
        expected = "one DataLoader, or a list of batches, that can be gone through again"
        check_option("val_dataloader", val_dataloader, has_batches, expected)
        check_options(refresh_every_n_steps=refresh_every_n_steps, norms=norms)
        check_option("val_loss", val_loss, val_loss is None or callable(val_loss), "None or a callable (module, batch)")
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
        self._shares: list[_Share] = []  # of backward passes whose optimizer step is still to come
        self._waits = False  # validation gradients are taken after the backward, whose graph the module holds
        self._device = "cpu"

    def needs(self, trainer: Trainer) -> set[str]:
        """Dots, and norms where they are kept or where the rate of a sample is a mean over them."""
        names = (name for name, p in trainer.lightning_module.named_parameters() if p.requires_grad)
        has_one_rate = self._rates is None or self._rates.are_alike(names)
        return {"dot"} if has_one_rate and not self.norms else {"dot", "sq_norm"}

    def _norms_of(self, record: PerSampleRecord) -> Tensor | None:
        return record.norms() if self.norms else None

    def _let_go(self) -> None:
        super()._let_go()
        self._forget_gradient()

    def _added(
        self, trainer: Trainer, pl_module: LightningModule, record: PerSampleRecord, rows: CapturedRows
    ) -> dict[str, Tensor]:
        """The four columns of a backward, each (m,); "shapley" is added up as the optimizers step."""
        self._refresh_if_old(trainer, pl_module, rows.step, record.names)
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
        vectors = {name: self._gradient[name] for name in record.names}
        try:
            if record.factor is None:
                reason = record.why_no_factor or "this engine does not know it"
                raise UnsupportedError(f"it needs the weight of each sample in the step, and {reason}")
            parameters = dict(pl_module.named_parameters())
            moves = _moves(trainer, {name: parameters[name] for name in vectors})
        except UnsupportedError as error:
            self._warn(f"shapley is nan: {error}")
            found["val_dot"] = _dot(record, vectors, unknown)
            return found
        found["val_dot"], found["shapley"] = torch.zeros_like(unknown), torch.zeros_like(unknown)
        shares: dict[int, _Share] = {}
        for move in moves:
            own = {name: vectors[name] for name in move.factors}
            dots = _dot(record, own, unknown)
            found["val_dot"] += dots
            if move.group is None:
                continue  # no optimizer moves these
            if move.is_number:
                dots = dots * next(iter(move.factors.values()))
            else:
                dots = _dot(record, {name: _times(vector, move.factors[name]) for name, vector in own.items()}, unknown)
            share = shares.setdefault(move.optimizer, _Share(rows, self._batches, move.optimizer))
            share.dots.append((move.group, record.factor.double() / rows.divisor * dots))
            share.note(move, parameters)
        self._shares += shares.values()
        return found

    def _stepped(self, trainer: Trainer, place: int) -> None:
        """An optimizer has stepped: add its rates times what it stepped with."""
        own = [share for share in self._shares if share.optimizer == place]
        if not own:
            return
        self._shares = [share for share in self._shares if share.optimizer != place]
        shared = shared_capture(trainer)
        content = None if shared is None or shared.manual is None else shared.manual.steps.get(place)
        with unseen(self._device):
            for share in own:
                if self._was_automatic:
                    why = share.why_unknown(share.grads)
                elif content is None or share.batch != self._batches:
                    why = share.why_unknown([name for name, each in share.grads.items() if each.is_there()])
                else:
                    of_now = content if isinstance(content, str) else content.get(share.rows.backward_index, ())
                    why = of_now if isinstance(of_now, str) else share.why_unknown(of_now)
                if why:
                    self._warn(f"shapley is nan where {why}")
                    share.add(float("nan"))
                elif why is not None:
                    share.add()

    def _follow(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super()._follow(trainer, pl_module)
        self._device = pl_module.device.type
        if self._rates is not None:
            self._rates.after_step = partial(self._stepped, trainer)

    def _forget_steps(self) -> None:
        super()._forget_steps()
        self._shares = []  # what no optimizer has stepped with is in no step

    def _flush(self, trainer: Trainer) -> None:
        # In manual optimization rows are written whether their step has come or not.
        captured = {id(rows) for rows in self._captured}
        for share in self._shares:
            if id(share.rows) in captured:
                if share.is_of_adam:
                    self._warn("shapley is nan where a row was written before the step of Adam that its backward is in")
                share.add(float("nan") if share.is_of_adam else 1.0)
        self._shares = [share for share in self._shares if id(share.rows) not in captured]
        super()._flush(trainer)

    def _vectors_of_dots(self, trainer: Trainer, pl_module: LightningModule) -> Mapping[str, Tensor]:
        """The validation gradient, where there is no further dot with what it is multiplied by entry by entry."""
        is_adaptive = any(isinstance(each, _ADAPTIVE) for each in trainer.optimizers)
        if self._rates is None or is_adaptive or self._backwards > 1:  # (a closure that runs again has no rows)
            return {}
        names = [name for name, p in pl_module.named_parameters() if p.requires_grad]
        is_new = self._refresh_if_old(trainer, pl_module, trainer.global_step, names, before_backward=True)
        return self._gradient if is_new else {}

    def _refresh_if_old(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        step: int,
        names: Collection[str],
        *,
        before_backward: bool = False,
    ) -> bool:
        """Whether the validation gradient is new enough now; False where it has to wait for the end of the backward."""
        is_old = self._taken_at < 0 or not 0 <= step - self._taken_at < self.refresh_every_n_steps
        if is_old or not self._gradient.keys() >= set(names):  # (what began to train has none yet)
            if (before_backward and self._waits) or not self._refresh(trainer, pl_module, before_backward):
                return False
            self._taken_at = step
        return True

    def _refresh(self, trainer: Trainer, pl_module: LightningModule, before_backward: bool) -> bool:
        """Take the mean loss of the validation samples and its gradient at the weights of now, if that can be now."""
        # An optimizer that is toggled off for a moment has parameters that require no gradient then.
        moved = {id(p) for each in trainer.optimizers for group in each.param_groups for p in group["params"]}
        parameters = {name: p for name, p in pl_module.named_parameters() if p.requires_grad or id(p) in moved}
        total = {name: torch.zeros_like(each) for name, each in parameters.items()}
        samples, losses, left_out = 0, 0.0, 0
        options = self._capture_options()
        with (
            second_pass(trainer, pl_module) as state,
            requiring_gradients(pl_module, dict.fromkeys(parameters, True)),
            validating(trainer),
            recurrent_layers_can_go_backward(pl_module.eval()),
        ):
            self._waits |= before_backward and state.holds_graph
            if before_backward and self._waits:  # the module would write to that graph, or free it
                return False
            first = torch.zeros((), requires_grad=True).clone()  # of the graphs made here; a cache may hold others
            for number, given in enumerate(each_of_user(self.val_dataloader)):
                batch = handed_over(trainer, given)
                size = count_samples(batch, options["batch_dim"], None, None, options["batch_layout"])
                loss = self._loss_of(pl_module, batch, number)
                if loss is None:
                    left_out += size
                    continue
                share = 1 if options["loss_reduction"] == "sum" else size
                for name, grad in gradients_of(loss, parameters, first).items():
                    total[name] += grad * share
                samples, losses = samples + size, losses + float(loss.detach()) * share
                del loss  # with its graph
        if left_out:
            self._warn(
                f"the validation loss of {left_out} of {left_out + samples} samples is None, as where training_step "
                "skips a batch: they are left out of the mean gradient, and val_dot and shapley are nan where all are"
            )
        elif not samples:
            raise OptionError("val_dataloader gave no batch: pass one that can be gone through again and again")
        self._gradient = {name: each / samples for name, each in total.items()}
        self._loss = losses / samples if samples else float("nan")
        return True

    def _loss_of(self, pl_module: LightningModule, batch: Any, number: int) -> Tensor | None:
        outputs = outputs_of(pl_module, self.val_loss, batch, number)  # (training_step is not observed in a validation)
        if outputs is None:
            return None
        loss = loss_of(outputs)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise OptionError(
                "the validation loss is no single number with a graph: return that of the batch, or pass val_loss=..."
            )
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_gradient": {}, "_taken_at": -1, "_shares": []}


def _dot(record: PerSampleRecord, vectors: Mapping[str, Tensor], unknown: Tensor) -> Tensor:
    """The dots with these vectors, (m,), float64; of none they are 0."""
    return record.dot(vectors).double() if vectors else torch.zeros_like(unknown)


def _times(vector: Tensor, factor: Tensor | float) -> Tensor:
    """A vector times a factor of each real number of it."""
    if vector.is_complex():
        return torch.view_as_complex(as_real(vector) * factor)
    return vector * factor


@dataclass(frozen=True, eq=False)
class _Move:
    """Parameters that one group of an optimizer moves alike, and what a gradient is multiplied by besides its rate."""

    optimizer: int
    group: Mapping[str, Any] | None  # None of those that no optimizer moves
    factors: Mapping[str, Tensor | float]  # one number of all, or a tensor for each
    is_number: bool


def _moves(trainer: Trainer, parameters: Mapping[str, nn.Parameter]) -> list[_Move]:
    """How the next step of each optimizer moves these parameters."""
    groups: dict[int, tuple[int, Any, Any, Any]] = {}
    for place, optimizer in enumerate(trainer.optimizers):
        kind = _kind_of(optimizer)
        for group in optimizer.param_groups:
            groups.update(dict.fromkeys(map(id, group["params"]), (place, optimizer, kind, group)))
    found = dict[Any, tuple[Any, dict[str, Tensor | float]]]()
    for name, parameter in parameters.items():
        place, optimizer, kind, group = groups.get(id(parameter), (-1, None, None, None))
        factor: Tensor | float = 0.0
        if group is not None:
            factor = _factor(trainer, optimizer, kind, group, parameter) * (-1.0 if group.get("maximize") else 1.0)
        number = factor if isinstance(factor, float) else None
        found.setdefault((place, id(group), number), (group, {}))[1][name] = factor
    return [_Move(key[0], group, factors, key[2] is not None) for key, (group, factors) in found.items()]


@dataclass(eq=False)
class _Share:
    """What a backward gives to the next step of one optimizer: its weighted dots by group, but for the rate."""

    rows: CapturedRows
    batch: int
    optimizer: int
    dots: list[tuple[Mapping[str, Any], Tensor]] = field(default_factory=list)  # each (m,)
    grads: dict[str, SeenGrad] = field(default_factory=dict)
    is_of_adam: bool = False  # whose factors are those of the gradients of now

    def note(self, move: _Move, parameters: Mapping[str, nn.Parameter]) -> None:
        """Remember the gradients of some parameters."""
        self.is_of_adam |= not move.is_number
        self.grads |= {name: SeenGrad(parameters[name]) for name in move.factors}

    def why_unknown(self, held: Collection[str]) -> str | None:
        """Why it is not known what of it is in a step, by the parameters whose ``.grad`` hold it; "", or None of no."""
        own = self.grads.keys() & set(held)
        if not own:
            return None
        if len(own) < len(self.grads):
            return "the gradients of some parameters alone were dropped between the backward and the optimizer step"
        if self.is_of_adam and not all(each.is_unchanged() for each in self.grads.values()):
            return (
                "gradients were changed between the backward and the step of Adam (clipped or scaled by a hook, added "
                "to by another backward), which divides by them"
            )
        return ""

    def add(self, factor: float = 1.0) -> None:
        """Add it to the rows, with the rates of now."""
        value = sum(float(group["lr"]) * dots for group, dots in self.dots) * factor
        self.rows.columns = {**self.rows.columns, "shapley": self.rows.columns["shapley"] + value}


_ADAPTIVE = (torch.optim.Adam, torch.optim.AdamW)  # (the latter is one of the former since torch 2.7)


def _kind_of(optimizer: torch.optim.Optimizer) -> type | None:
    """As which of those that are known an optimizer steps."""
    step = inspect.unwrap(type(optimizer).step)
    known = (torch.optim.SGD, *_ADAPTIVE)
    return next((kind for kind in known if isinstance(optimizer, kind) and step is inspect.unwrap(kind.step)), None)


def _factor(
    trainer: Trainer,
    optimizer: torch.optim.Optimizer,
    kind: type | None,
    group: Mapping[str, Any],
    parameter: nn.Parameter,
) -> Tensor | float:
    """What the next step of an optimizer multiplies each real number of a gradient by, besides the learning rate."""
    state = optimizer.state.get(parameter, {})
    if kind is torch.optim.SGD:
        momentum = float(group["momentum"])
        taken = 1.0 - float(group["dampening"]) if momentum and state.get("momentum_buffer") is not None else 1.0
        return 1.0 + momentum * taken if group["nesterov"] else taken
    if kind is None:
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
    second = (1 - beta2) * as_real(grad).square()
    if "exp_avg_sq" in state:
        second = second + beta2 * as_real(state["exp_avg_sq"])
    if group["amsgrad"] and "max_exp_avg_sq" in state:
        second = torch.maximum(second, as_real(state["max_exp_avg_sq"]))
    return (1 - beta1) / (1 - beta1**t) / ((second / (1 - beta2**t)).sqrt() + group["eps"])
