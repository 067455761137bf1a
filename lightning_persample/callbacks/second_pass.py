"""Run a training step a second time: nothing is logged, and training goes on as if it had not run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn

from lightning_persample.batch_axis.batch import with_kinds_of
from lightning_persample.capture.observing import without_compilation
from lightning_persample.capture.parameters import is_sharded
from lightning_persample.capture.record import warn_user
from lightning_persample.errors import UnsupportedError, VerificationError
from lightning_persample.options import CaptureOptions
from lightning_persample.reference.samples import loss_of
from lightning_persample.reference.untouched import ModuleState, untouched
from lightning_persample.reference.verify import RANDOM, check_per_sample_gradients
from lightning_persample.torch_internals import COLLECTIVES, TorchDispatchMode

_MUTED = ("log", "log_dict", "print")


class NoLossError(Exception):
    """A training step returned, in a second pass, None: it skips this batch."""


@contextmanager
def second_pass(trainer: Trainer, pl_module: LightningModule) -> Iterator[ModuleState]:
    """Run training steps as the Trainer runs them, and leave no trace of them."""
    # ``log``, ``log_dict`` and ``print`` of the module do nothing, the Trainer's loggers are replaced by dummies,
    # compiled code runs as written, and at the end the module and the random number generators are put back.
    if is_sharded(pl_module):
        raise UnsupportedError(
            f"{type(pl_module).__name__} is sharded (fully_shard), so that every process has to take part in each of "
            "its forward passes, and single samples cannot be run on one of them; use engine='expanded' and "
            "verify=False"
        )
    loggers, caches = trainer.loggers, torch.is_autocast_cache_enabled()
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        with (
            muted(pl_module),
            untouched(pl_module) as state,
            without_compilation(),
            trainer.precision_plugin.train_step_context(),
            torch.enable_grad(),
            _AloneHere() if trainer.world_size > 1 else nullcontext(),
        ):
            # A weight that autocast casts here must not be found by the training step itself.
            torch.set_autocast_cache_enabled(False)
            yield state
    finally:
        torch.set_autocast_cache_enabled(caches)
        trainer.loggers = loggers


@contextmanager
def muted(module: nn.Module) -> Iterator[None]:
    """Let ``log``, ``log_dict`` and ``print`` of a module do nothing in this context."""
    own = {name: module.__dict__[name] for name in _MUTED if name in module.__dict__}
    module.__dict__.update(dict.fromkeys(_MUTED, lambda *args, **kwargs: None))
    try:
        yield
    finally:
        for name in _MUTED:
            del module.__dict__[name]
        module.__dict__.update(own)


def on_other_batches(
    training_step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Any], Any]:
    """The training step as a function of its first argument, the batch."""

    def step(batch: Any) -> Any:
        if args:
            return training_step(batch, *args[1:], **kwargs)
        return training_step(**{**kwargs, **dict.fromkeys(list(kwargs)[:1], batch)})

    return step


class _AloneHere(TorchDispatchMode):
    """Refuses whatever waits for other processes: the next one may have fewer samples, and never come."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the op, unless it is a collective."""
        namespace, _, name = str(func).partition(".")
        if namespace in COLLECTIVES:
            raise UnsupportedError(
                f"training_step waits for other processes (`{name.partition('.')[0]}`: a gathered tensor, synchronized "
                "batch normalization), so that it cannot be run on single samples; use engine='expanded' and "
                "verify=False"
            )
        return func(*args, **(kwargs or {}))


_NAMED = 8


def verify_values(
    trainer: Trainer,
    pl_module: LightningModule,
    options: CaptureOptions,
    training_step: Callable[[Any], Any],
    batch: Any,
    view: Any,
    *,
    allow_missing: bool,
) -> bool:
    """Check the per-sample gradients of a few samples of a batch; `view` is the batch as its samples are looked for."""
    calls, reduction = 0, options["loss_reduction"]

    def loss_fn(module: nn.Module, part: Any) -> Any:
        nonlocal calls
        calls += 1
        outputs = training_step(with_kinds_of(part, batch))
        if loss_of(outputs) is None:
            raise NoLossError("training_step returned None")
        return outputs

    def weights(outputs: Any, part: Any) -> Any:
        assert callable(reduction)
        return reduction(outputs, with_kinds_of(part, batch))

    with second_pass(trainer, pl_module):
        report = check_per_sample_gradients(
            pl_module,
            view,
            loss_fn,
            loss_reduction=weights if callable(reduction) else reduction,
            batch_dim=options["batch_dim"],
            batch_size=options["batch_size"],
            batch_layout=options["batch_layout"],
        )
    if isinstance(report.failure, NoLossError) and calls == 1:
        return False
    right = ("agrees", "unused", "missing") if allow_missing else ("agrees", "unused")
    rest = [row for row in report.parameters if row.status not in right]
    if report.reason or any(row.reason != RANDOM for row in rest):
        raise VerificationError(
            f"verify=True, and not every value is right; with verify=False the fit warns of what it can tell and goes "
            f"on. {report}"
        ) from report.failure
    if rest:
        named = ", ".join(f"`{row.name}`" for row in rest[:_NAMED]) + (", ..." if rest[_NAMED:] else "")
        warn_user(f"verify=True could not compare the gradients of {named}: {RANDOM}")
    return True
