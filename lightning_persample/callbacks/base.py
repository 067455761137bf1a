"""The base of every callback that uses per-sample gradients."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast, get_type_hints

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import Unpack

from lightning_persample.callbacks.lightning_internals import logging_step
from lightning_persample.callbacks.sample_index import BatchIndices, TrainingView
from lightning_persample.callbacks.session import SharedCapture, is_logging_step, shared_capture
from lightning_persample.capture.failure import fault_of, guard, run_all
from lightning_persample.capture.record import PerSampleRecord, warn_user
from lightning_persample.errors import is_of_package
from lightning_persample.options import CAPTURE_DEFAULTS, CaptureOptions, check_options, checked_capture_options


class PerSampleCallback(Callback):
    """Receives the per-sample gradients of captured training steps; subclass it and override `on_per_sample_gradients`.

    All per-sample callbacks of a Trainer share one capture per step: the model runs once, and what is computed is the
    union of their needs. Nothing about the training changes: weights are equal bit for bit with and without callback.

    Lightning's own hooks can be overridden as in any callback, and need no call of ``super()``: what the capture does
    in `setup`, `on_fit_start`, `on_train_batch_end`, `on_fit_end`, `teardown` and `on_exception` is added to a
    subclass's own.

    Args:
        every_n_steps: capture every n-th optimizer step; None captures the Trainer's own logging steps.
        loss_reduction: how the training loss L is made of the samples' own losses l_i. "mean" is L = sum_i l_i / B,
            "sum" is L = sum_i l_i, and a callable ``(outputs, batch) -> w`` with w of shape (B,) is L = sum_i w_i l_i,
            where outputs is what `training_step` returned. Reported gradients are those of l_i, whatever the reduction.
            Weights that differ from those in the loss are warned of where its calls say them; `verify` finds all.
            In manual optimization L is what `manual_backward` is given, and so is outputs; what you divide L by
            yourself (a number of accumulated batches) belongs to l_i unless a callable says otherwise.
        batch_dim: the axis of the batch's tensors that counts samples.
        batch_size: number of samples B; None reads it from the batch's tensors. A list of B items is then one of
            samples, each of one.
        batch_layout: a callable ``(batch)`` that says where the samples lie in tensors that do not hold them along
            `batch_dim`: a mapping from each such tensor to the axis of its samples, to the sample of each of its rows
            as integers (N,), to a tuple ``(axis, sample of each row along it)``, or to None for data that all samples
            share. Batches of torch_geometric and packed sequences need none.
        sample_index: gives each record's `sample_index` where the data carry it themselves: a callable ``(batch)`` that
            returns the index of each sample, a tensor (B,) or a sequence of B ints. None takes what the sampler of the
            train dataloader drew, without any change to the data.
        unsupported: what to do where a per-sample gradient cannot be given exactly. "warn" says so once for each cause
            and counts the parameter out of the record's coverage; "error" raises `UnsupportedError`; "vmap" goes over
            to the engine "vmap" for the rest of the fit, or to "loop" where that fails, with one warning. Callbacks of
            one Trainer may differ: one "error" decides for all, else one "vmap" does.
        engine: "expanded" observes the training step and its backward. "vmap" and "loop" are for models that it cannot
            follow: at captured steps only, an extra pass before the training step runs `training_step` again on each
            sample alone, all at once with `torch.func.vmap`, or one after the other, which works with anything but
            reentrant activation checkpointing. The pass has random numbers of its own (dropout masks differ from those
            of the training step). Where samples influence each other (batch normalization in training mode), their
            gradients do not add up to that of the batch, which the first captured step compares, without dropout: the
            engine is then not used.
        verify: before the first captured batch, compare the engine with the one-sample loop on a few of its samples,
            and raise `VerificationError` with a table and the reasons if a value is missing or wrong. Dropout layers
            have probability 0 during the check. One callback with True decides for all callbacks of the Trainer.
        fuse_weight_grad: take the sum of the samples' gradients as the weight's gradient where they are formed for
            their norms anyway (convolutions, long sequences), which spares autograd's own product. It changes the order
            in which captured steps sum ``.grad``, and so the last digits: this alone of all options touches training.
        max_memory: bytes that the temporaries of one kernel of the engine "expanded" may take, see `expanded_weights`.
        max_samples: the most samples of a batch that values are computed for; of a larger one, a random choice of so
            many, another one each time and the same in every run, drawn without the global random numbers. The record's
            `samples` says which; it saves the engine's work on the others. None is all.

    In manual optimization there is one record for each backward inside `training_step`, from `manual_backward` or from
    ``loss.backward()``, that goes through samples; `PerSampleRecord.backward_index` counts them, the parameters in it
    tell whose they are, and `PerSampleRecord.samples` which part of the batch, where it is not all of it.
    Noise that is drawn in `training_step` goes through `mark_samples`. An extra pass is not possible there: it would
    step the optimizers.

    Extra passes (`verify`, and every engine but "expanded") log nothing and leave the training as it is, bit for bit:
    what `training_step` changes in the module, its submodules and metrics, and in the random number generators is put
    back, for which they take the memory of one more copy of the module. Only what it changes elsewhere stays changed:
    objects of your own that are no modules, files, and loggers that are not the Trainer's.

    Raises:
        OptionError: an option has a value that is not allowed.
    """

    _says_nothing_came = True  # where no step of a fit was due
    engine: str
    loss_reduction: Any
    max_samples: int | None
    sample_index: Callable[[Any], Any] | None

    def __init__(
        self,
        every_n_steps: int | None = None,
        **capture: Unpack[CaptureOptions],
    ) -> None:
        super().__init__()
        unknown = [name for name in capture if name not in CAPTURE_DEFAULTS]
        if unknown:
            raise TypeError(f"PerSampleCallback.__init__() got an unexpected keyword argument {unknown[0]!r}")
        check_options(every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        for name, value in checked_capture_options(capture).items():
            setattr(self, name, value)
        self._shared: SharedCapture | None = None
        self._indices: BatchIndices | None = None
        self._key: str | None = None
        self._has_failed = self._skips = False

    def needs(self, trainer: Trainer) -> set[str]:
        """The quantities this callback reads from the record of the current step.

        Args:
            trainer: the Trainer, at the entry of `training_step`.

        Returns:
            Any of "sq_norm", "grad_sample", "dot", "square_sum" and "projection"; by default {"sq_norm"}.
        """
        return {"sq_norm"}

    def should_capture(self, trainer: Trainer) -> bool:
        """Whether this callback wants the record of the current batch.

        With several devices the answer has to be the same on each of them: a monitor asks for it again at the end of a
        batch, to tell whether all of them exchange what they have.

        Args:
            trainer: the Trainer, at the entry of `training_step`.

        Returns:
            By default True for every batch of an optimizer step whose ``self.log`` values reach the loggers, or of
            every `every_n_steps`-th optimizer step.
        """
        return is_logging_step(trainer, self.every_n_steps)

    def on_per_sample_gradients(
        self, trainer: Trainer, pl_module: LightningModule, record: PerSampleRecord, batch: Any, batch_idx: int
    ) -> None:
        """Called right after the backward of each captured batch, before clipping and the optimizer step.

        The parameters' ``.grad`` are the accumulated gradients of the training loss. If a callback of the Trainer needs
        "grad_sample", the parameters also carry ``.grad_sample`` until the batch ends. An optimizer that evaluates its
        closure several times for one batch (LBFGS) leads to several calls with one `batch_idx`: the last one counts.
        In manual optimization there is a call after each backward, inside `training_step`.

        Args:
            trainer: the Trainer.
            pl_module: the module that is trained.
            record: per-sample gradients of each sample's own loss, without any factor of reduction, accumulation or
                loss scaling.
            batch: the batch as `training_step` got it.
            batch_idx: its index.
        """

    def _backward_starts(self, trainer: Trainer) -> None:
        """The backward of a captured batch is about to run, in automatic optimization."""

    def _backward_ended(self, trainer: Trainer, record: PerSampleRecord | None) -> None:
        """It has run, and nothing else since: gradients are as it left them; None of a batch without samples."""

    def _vectors_of_dots(self, trainer: Trainer, pl_module: LightningModule) -> Mapping[str, Tensor]:
        """The vectors with which all dots are that it asks for, where they are known before the backward; else none."""
        return {}

    def _training_view(self, loaders: list[Any]) -> TrainingView | None:
        """How this callback changes the samples of the training loaders, if it does."""
        return None

    def _reads_class_losses(self) -> bool:
        """Whether the calls of class losses are noted for this callback."""
        return False

    def _goes_by_steps(self) -> bool:
        """Whether the option `every_n_steps` decides which batches are captured."""
        is_own = type(self).should_capture is PerSampleCallback.should_capture
        return is_own and "should_capture" not in vars(self)

    def _is_done(self, *, automatic: bool) -> bool:
        """Whether nothing of earlier batches is left to be done, so that batches that are not captured need no hook."""
        return True

    def _rest(self, *, automatic: bool) -> bool:
        """Let Lightning skip the hooks that are of use at captured batches alone, if nothing is left to do in them."""
        if not self._is_done(automatic=automatic):
            return False
        self._skip_hooks(own=True)
        return True

    def _end_rest(self, *, has_missed: bool) -> None:
        """The batch that begins is captured; `has_missed` says that one of the same optimizer step was not."""
        self._restore_hooks()
        self._skip_hooks()

    def _skip_hooks(self, *, own: bool = False) -> None:
        """Let Lightning skip the hooks of a batch that are its own empty ones, or `own` those of this package."""
        # What it does around each costs more than a step of ours. A hook of a user's is never skipped.
        for name in _BATCH_HOOKS if self._skips else ():
            hook = getattr(type(self), name)
            if hook is getattr(Callback, name) or (own and is_of_package(hook)):
                vars(self).setdefault(name, None)

    def _restore_hooks(self) -> None:
        for name in _BATCH_HOOKS:
            if vars(self).get(name, self) is None:
                del vars(self)[name]

    def receives_records(self) -> bool:
        """Whether this class does anything with the records."""
        return type(self).on_per_sample_gradients is not PerSampleCallback.on_per_sample_gradients

    @property
    def state_key(self) -> str:
        """Names the class and what its state is of, for checkpoints; Lightning refuses two callbacks that agree in it.

        Of a monitor it has `prefix`, `every_n_steps` and how the values are computed, but not what is logged of them
        (`per_layer`, `statistics` and the like), of a writer `dirpath`, of any other callback all options of a capture.
        """
        return self._key or guard(self._key_by_settings, self._key_by_class)()

    def _key_by_settings(self) -> str:
        return self._generate_state_key(
            **{name: name_of(value) if callable(value) else value for name, value in self._settings().items()}
        )

    def _key_by_class(self, error: Exception) -> str:
        """Another one for each callback, as Lightning demands; `setup` says what has failed."""
        return f"{type(self).__qualname__} {id(self)}"

    def _capture_options(self) -> CaptureOptions:
        return cast("CaptureOptions", {name: getattr(self, name) for name in CAPTURE_DEFAULTS})

    def _settings(self) -> dict[str, Any]:
        return {"every_n_steps": self.every_n_steps, **self._capture_options()}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Follow which samples the training batches hold, if this is the first per-sample callback of the Trainer."""
        self._has_failed = False
        callbacks = _per_sample_callbacks(trainer)
        # Before the strategy's set-up: a scheduler that asks for the number of steps has the data made in it.
        if stage == "fit" and self in callbacks[:1]:
            self._end_capture()
            asked = any(each.receives_records() for each in callbacks)
            view_of = partial(_training_view, callbacks)
            self._indices = BatchIndices(trainer, self.sample_index, is_asked=asked, view_of=view_of)
        self._key = self._key_by_settings()  # which Lightning asks for at every hook

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the shared capture, if this is the first per-sample callback of the Trainer."""
        callbacks = _per_sample_callbacks(trainer)
        shared = self._shared
        is_open = shared is not None and shared.trainer is trainer and shared.module is pl_module
        if self not in callbacks[:1] or is_open:
            return
        self._close()
        self._shared = SharedCapture(trainer, pl_module, callbacks, self._indices)
        self._shared.install()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Forget the batch's record, after the last per-sample callback has seen its end."""
        callbacks = _per_sample_callbacks(trainer)
        if self in callbacks[-1:] and callbacks[0]._shared is not None:
            callbacks[0]._shared.end_batch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say where no step of the fit was due, so that there was no record."""
        shared, why = shared_capture(trainer), "" if self._never(trainer) else self._why_no_step(trainer)
        if why and self._says_nothing_came and shared is not None and not shared.reports.has_said_fault:
            shared.reports.warn(f"{type(self).__name__} got no record: {why}")

    def _never(self, trainer: Trainer) -> bool:
        """Whether the user asks for no step."""
        return self.every_n_steps is None and not trainer.log_every_n_steps  # type: ignore[attr-defined]

    def _why_no_step(self, trainer: Trainer) -> str:
        """Why no step of the fit was due to be captured, or "" where one was."""
        every, name = self.every_n_steps, "every_n_steps"
        if every is None:
            every, name = trainer.log_every_n_steps, "the Trainer's log_every_n_steps"  # type: ignore[attr-defined]
        steps, overridden = logging_step(trainer), type(self).should_capture is not PerSampleCallback.should_capture
        if trainer.fast_dev_run or overridden or steps == 0 or (every and steps >= every):  # type: ignore[attr-defined]
            return ""
        return f"the fit had {steps} optimizer steps, and {name} is {every}; every_n_steps=1 captures all of them"

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the module as it was before the fit."""
        self._end_capture()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the module as it was before the fit."""
        self._end_capture()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the module as it was before the fit."""
        self._end_capture()

    def _end_capture(self) -> None:
        self._key = None
        run_all(self._close, *([] if self._indices is None else [self._indices.uninstall]), self._let_go)
        self._indices = None

    def _let_go(self) -> None:
        """Forget what a subclass keeps for the time of a fit."""

    def _fail(self, trainer: Trainer | None, error: Exception) -> None:
        """Say once that this callback has failed, by a fault of this package, and let it rest until the next fit."""
        found: list[Any] = [] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
        others = [each for each in found if isinstance(each, PerSampleCallback)]  # (their own search may have failed)
        if not any(each._has_failed for each in (self, *others)):
            text = f"{type(self).__name__} gives nothing more in this fit: {fault_of(error, 'a hook of it')}"
            shared = others[0]._shared if others else None
            (warn_user if shared is None else shared.reports.warn)(text)
        self._has_failed = True

    def _close(self) -> None:
        # Forgotten when all is put back: an interrupt in the middle leads to `on_exception`, which ends it.
        if self._shared is not None:
            self._shared.uninstall()
        self._shared = None

    def _why_no_index(self, trainer: Trainer) -> str:
        indices = _per_sample_callbacks(trainer)[0]._indices
        return "" if indices is None else indices.why_absent

    def __getstate__(self) -> dict[str, Any]:
        # A running capture belongs to this process and this module: a copy of the callback starts its own.
        kept = {name: value for name, value in self.__dict__.items() if name not in _BATCH_HOOKS or value is not None}
        return {**kept, "_shared": None, "_indices": None, "_key": None, "_skips": False}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__.__signature__ = _with_capture_options(inspect.signature(cls.__init__))  # type: ignore[attr-defined]
        if is_of_package(cls):  # what a class of the user's raises is the user's
            _guard_hooks(cls)
        for name in _FIT_HOOKS:
            hook = getattr(cls, name)
            if hook is not getattr(PerSampleCallback, name) and not hasattr(hook, "_with_capture"):
                setattr(cls, name, _with_capture(name, hook))


# The entries from Lightning into a callback, and what they give where this package has failed.
_ENTRIES: dict[str, Callable[[], Any]] = {
    **dict.fromkeys((
        "setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_before_backward",
        "on_per_sample_gradients", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end",
        "on_train_end", "on_fit_end", "teardown", "on_exception", "on_save_checkpoint", "on_load_checkpoint",
        "load_state_dict", "_backward_starts", "_backward_ended",
    ), type(None)),
    "needs": set, "state_dict": dict, "_vectors_of_dots": dict, "should_capture": bool,
}  # fmt: skip


def _guard_hooks(kind: type[PerSampleCallback]) -> None:
    """Let no failure of this package leave the hooks that a class defines."""
    for name, answer in _ENTRIES.items():
        if name in vars(kind):
            setattr(kind, name, _guarded(vars(kind)[name], answer, is_base=kind is PerSampleCallback))


def _guarded(hook: Callable[..., Any], answer: Callable[[], Any], *, is_base: bool) -> Callable[..., Any]:
    @functools.wraps(hook)
    def run(self: PerSampleCallback, *args: Any, **kwargs: Any) -> Any:
        if self._has_failed and not is_base:
            return answer()

        def failed(error: Exception) -> Any:
            self._fail(next((each for each in args if isinstance(each, Trainer)), None), error)
            return answer()

        return guard(hook, failed)(self, *args, **kwargs)

    return run


_guard_hooks(PerSampleCallback)


_FIT_HOOKS = (
    "setup", "on_fit_start", "on_train_batch_end", "on_train_end", "on_fit_end", "teardown", "on_exception",
)  # fmt: skip
_BATCH_HOOKS = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end",
)  # fmt: skip


def _with_capture(name: str, hook: Callable[..., None]) -> Callable[..., None]:
    """The hook of a subclass, together with what the capture does there; a call of ``super()`` in it does no harm."""
    own = getattr(PerSampleCallback, name)

    @functools.wraps(hook)
    def both(self: PerSampleCallback, *args: Any, **kwargs: Any) -> None:
        if name == "on_train_batch_end":  # the subclass still sees grad_sample
            hook(self, *args, **kwargs)
            own(self, *args, **kwargs)
        else:
            own(self, *args, **kwargs)
            hook(self, *args, **kwargs)

    both._with_capture = True  # type: ignore[attr-defined]
    return both


def _per_sample_callbacks(trainer: Trainer) -> list[PerSampleCallback]:
    return [callback for callback in trainer.callbacks if isinstance(callback, PerSampleCallback)]  # type: ignore[attr-defined]


def _training_view(callbacks: Iterable[PerSampleCallback], loaders: list[Any]) -> TrainingView | None:
    for each in callbacks:  # (a generator would hide a StopIteration of the user's)
        view = each._training_view(loaders)
        if view is not None:
            return view
    return None


def name_of(value: Any) -> str:
    """Where the code of a value stands, or of its type."""
    # Not repr(): the address in it would change from run to run, and the state of a checkpoint would not be found.
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _with_capture_options(signature: inspect.Signature) -> inspect.Signature:
    """A signature of an ``__init__`` with the options in place of ``**capture``."""
    parameters = dict(signature.parameters)
    if parameters.pop("capture", None) is not None:
        types = get_type_hints(CaptureOptions)
        for name, default in CAPTURE_DEFAULTS.items():
            parameters[name] = inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name]
            )
    return signature.replace(parameters=list(parameters.values()))


PerSampleCallback.__init__.__signature__ = _with_capture_options(inspect.signature(PerSampleCallback.__init__))  # type: ignore[attr-defined]
