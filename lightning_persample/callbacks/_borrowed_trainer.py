"""A Trainer for one pass over data, which afterwards is as it was."""

from __future__ import annotations

import copy
import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_persample.errors import OptionError

__all__ = ["borrowed", "quiet_trainer"]


def quiet_trainer() -> Trainer:
    """A Trainer of one device that logs, saves and shows nothing."""
    world_size = os.environ.get("WORLD_SIZE", "")
    processes = int(world_size) if world_size.isdigit() else 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        processes = torch.distributed.get_world_size()
    if processes > 1:
        raise OptionError(
            f"trainer=None takes one device, but there are {processes} processes, and each would write all rows to the "
            "same folder: pass the Trainer of them all (strategy='ddp'), or in one of them alone Trainer(devices=1)"
        )
    with _silent():
        return Trainer(
            devices=1,
            num_nodes=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )


@contextmanager
def borrowed(trainer: Trainer, callbacks: Sequence[Callback]) -> Iterator[None]:
    """Predict with a Trainer that knows nothing of it afterwards."""
    # Its own callbacks, loggers, data module, profiler and limits have no part in what runs in this context. Gradients
    # can be computed in it: ``torch.inference_mode`` is off.
    if trainer.state.status == TrainerStatus.RUNNING:
        function = getattr(trainer.state.fn, "value", "run")
        raise OptionError(f"trainer is in the middle of its {function}: pass another one, or None for one of its own")
    changed = [trainer, trainer.state, trainer.strategy, trainer._data_connector, trainer._logger_connector]
    changed += [trainer._checkpoint_connector, *_loops(trainer)]
    changed += [loop._data_source for loop in _loops(trainer) if hasattr(loop, "_data_source")]
    before = [(each, dict(vars(each))) for each in changed]
    device = trainer.strategy.root_device
    generators = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    random_state = None if generators is None else generators.get_rng_state(device)
    trainer.callbacks = list(callbacks)  # type: ignore[attr-defined]
    trainer.loggers = [DummyLogger()]  # a step that asks for the logger finds one
    trainer.datamodule = None  # type: ignore[attr-defined]
    trainer.profiler = PassThroughProfiler()  # type: ignore[attr-defined]
    trainer.predict_loop.batch_progress = copy.deepcopy(trainer.predict_loop.batch_progress)
    trainer.predict_loop.inference_mode = False
    trainer.limit_predict_batches = 1.0  # fast_dev_run sets it, too
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        with _silent():
            yield
    finally:
        if interrupt is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)  # which Lightning ignores for good once there was one
        for each, attributes in before:
            vars(each).clear()
            vars(each).update(attributes)
        if generators is not None:
            generators.set_rng_state(random_state, device)


def _loops(trainer: Trainer) -> list[Any]:
    fit = trainer.fit_loop
    inner = [fit.epoch_loop, fit.epoch_loop.val_loop]
    return [fit, *inner, trainer.validate_loop, trainer.test_loop, trainer.predict_loop]


@contextmanager
def _silent() -> Iterator[None]:
    """Lightning says nothing of the devices that it finds; its warnings stay, but for one that no user can help."""
    # By the package `pytorch_lightning`, once it is imported, speaks `lightning`, too.
    names = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(max(logger.getEffectiveLevel(), logging.WARNING))
    try:
        with warnings.catch_warnings():
            # how Lightning walks through batches; newer torch deprecates it
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
