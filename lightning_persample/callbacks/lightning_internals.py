"""What is used of Lightning beyond its documentation: names, methods that are replaced, strategies."""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any, TypeGuard

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.states import RunningStage, TrainerStatus
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_persample.capture.failure import once
from lightning_persample.capture.parameters import sharded_elsewhere
from lightning_persample.capture.record import listed
from lightning_persample.errors import OptionError, of_user
from lightning_persample.reference.untouched import replaced
from lightning_persample.torch_internals import has_compiled_part

_PACKAGES = ("lightning", "pytorch_lightning")


def _own_bases(value: Any) -> list[type]:
    """Lightning's own classes that a value is an instance of, the nearest first."""
    return [each for each in type(value).__mro__ if each.__module__.partition(".")[0] in _PACKAGES]


def is_a(value: Any, *names: str) -> bool:
    """Whether a value is an instance of one of Lightning's classes of these names, under either package name."""
    return any(each.__name__ in names for each in _own_bases(value))


def is_lightning_module(value: Any) -> TypeGuard[LightningModule]:
    """Whether a value is a LightningModule under either package name."""
    return is_a(value, "LightningModule")


def lightning_module_for(trainer: Any) -> type[Any]:
    """The class LightningModule of the package that a Trainer is of: it runs no module of the other one."""
    package = next((each.__module__.partition(".")[0] for each in _own_bases(trainer)), "lightning")
    return importlib.import_module(package).LightningModule


_BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def changes_batches(trainer: Trainer) -> bool:
    """Whether the module or the data module has a hook of its own that a batch goes through."""
    owners = [trainer.lightning_module, getattr(trainer, "datamodule", None)]
    hooks = [getattr(owner, name, None) for owner in owners for name in _BATCH_HOOKS]
    return any(getattr(hook, "__module__", "lightning").partition(".")[0] not in _PACKAGES for hook in hooks if hook)


def skips_hooks(trainer: Any) -> bool:
    """Whether a Trainer passes over hooks of callbacks that are None, as every version of Lightning so far does."""
    module = next((sys.modules.get(each.__module__) for each in _own_bases(trainer)), None)
    call = getattr(module, "call", None)
    code = getattr(getattr(call, "_call_callback_hooks", None), "__code__", None)
    return "callable" in getattr(code, "co_names", ())


def holds_compiled_code(pl_module: LightningModule) -> bool:
    """Whether the module or a part of it went through ``torch.compile``."""
    return has_compiled_part(pl_module) or pl_module._compiler_ctx is not None


def logs_copies(pl_module: LightningModule) -> bool:
    """Whether the module's ``log`` is Lightning's own, which copies what it is given, and in no compiled code."""
    is_own = getattr(pl_module.log, "__module__", "").partition(".")[0] in _PACKAGES
    return is_own and not holds_compiled_code(pl_module)


def optimizers_of(configured: Any) -> list[Any]:
    """The optimizers in what ``configure_optimizers`` returned."""
    return list(_configure_optimizers(configured)[0])


logging_step: Callable[[Trainer], int] = attrgetter("fit_loop.epoch_loop._batches_that_stepped")
"""The step number under which Lightning logs what happens in the current batch; asked at every batch."""


logs_now: Callable[[Trainer], bool] = attrgetter("_logger_connector.should_update_logs")
"""Whether Lightning logs what happens in the current batch."""


callback_metrics: Callable[[Trainer], dict[str, torch.Tensor]] = attrgetter("_logger_connector._callback_metrics")
"""`Trainer.callback_metrics` without what `self.log` was given in this batch, which Lightning adds after it."""


def window_continues(trainer: Trainer) -> bool:
    """Whether the current batch ends without an optimizer step, because gradients are being accumulated."""
    return trainer.fit_loop._should_accumulate()


def loss_scale(trainer: Trainer, size: int) -> float:
    """What keeps the gradients of single samples in half precision from vanishing, in a batch of `size` samples."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return 1.0 if scaler is None else max(1.0, scaler.get_scale() / size)


def handed_over(trainer: Trainer, batch: Any) -> Any:
    """A batch of a data loader as a step of the module gets it: in the Trainer's precision, through the batch hooks."""
    batch = of_user(trainer.precision_plugin.convert_input, batch)
    batch = of_user(trainer.lightning_module._on_before_batch_transfer, batch)
    return of_user(trainer.strategy.batch_to_device, batch)


def outputs_of(module: Any, loss: Callable[[Any, Any], Any] | None, batch: Any, batch_idx: int) -> Any:
    """What a user's function ``loss(module, batch)`` returns, or without one `training_step`."""
    if loss is not None:
        return of_user(loss, module, batch)
    takes_number = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    return of_user(module.training_step, batch, *([batch_idx] if takes_number else []))


def validating(trainer: Trainer) -> AbstractContextManager[None]:
    """Let the Trainer be in a validation, as code of the module sees it."""
    return replaced(vars(trainer.state), {"stage": RunningStage.VALIDATING})


prefix_of: Callable[[Any], str] = attrgetter("_prefix")  # of a logger, before each of its names

BEFORE_ITERATORS = "_load_combined_loader_states"  # the method of a fit loop called right before iterators are made
LOADERS = "_flattened"  # the attribute of a CombinedLoader that lists its data loaders
combined_loader: Callable[[Trainer], Any] = attrgetter("fit_loop._combined_loader")  # of the training data, or None
iterators_of: Callable[[Any], list[Any]] = attrgetter("_iterator.iterators")  # of a CombinedLoader, one per loader
structure_of: Callable[[Any], Any] = attrgetter("_spec")  # of a CombinedLoader's collection of loaders


def batches_ahead(trainer: Trainer) -> int:
    """How many batches are fetched beyond the current one."""
    return len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


_ABSENT = object()


class ObservedMethod:
    """Stands in an object's dictionary for one of its methods, and gives it to `run`, as a `Once`, unless it rests."""

    # A deep copy and a pickle of it are the method it stands for, bound to the copied object, so that copies of a
    # module or a Trainer in the middle of a fit carry nothing of ours. What fails in `run` and is not the method's goes
    # to `failed`; `rests` is asked at each call, and must not fail. What a fit that is not live any more left behind,
    # because a hook of another callback kept ours from running, is removed by the next fit.

    def __init__(
        self,
        owner: Any,
        name: str,
        run: Callable[..., Any],
        failed: Callable[[Exception], Any],
        is_live: Callable[[], bool],
        rests: Callable[[], bool] = bool,
    ) -> None:
        left = owner.__dict__.get(name)
        if isinstance(left, ObservedMethod) and not left._is_live():
            left.restore()
        self._is_live: Callable[[], bool] = is_live
        method = getattr(owner, name)
        functools.update_wrapper(self, method)
        # Lightning counts the arguments of one level of __wrapped__: it must find what it would find without us.
        self.__wrapped__ = getattr(method, "__wrapped__", method)
        self._owner = owner
        self._name = name
        self._own = owner.__dict__.get(name, _ABSENT)
        self._method = method
        self._run: Callable[..., Any] | None = once(run, method, failed)
        self._rests: Callable[[], bool] = rests

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the method gives, observed unless it rests."""
        if self._run is None or self._rests():
            return self._method(*args, **kwargs)
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._method, memo)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if self._own is _ABSENT:
            return getattr, (self._owner, self._name)
        return as_it_is, (self._own,)

    def install(self) -> None:
        """Take the method's place."""
        self._owner.__dict__[self._name] = self

    def restore(self) -> None:
        """Put back exactly what was there; where somebody else has replaced the method since, leave theirs alone."""
        # Then theirs may call this one, or put it back later: from now on it is the method, and holds nothing else.
        self._run, self._is_live, self._rests = None, bool, bool  # (which give False)
        if self._owner.__dict__.get(self._name) is not self:
            return
        if self._own is _ABSENT:
            del self._owner.__dict__[self._name]
        else:
            self._owner.__dict__[self._name] = self._own


def as_it_is(value: Any) -> Any:
    """What a pickle of something of ours is made by: the value that stands in for it."""
    return value


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


# By name: importing a strategy's own package is not needed to refuse it.
_REASONS = {
    "DeepSpeedStrategy": "DeepSpeed keeps gradients in buffers of its own and, at stage 3, weights too",
    "FSDPStrategy": "it holds weights of several layers in one flat tensor; use ModelParallelStrategy, fully_shard",
}


def why_no_mean_gradient(trainer: Trainer) -> str:
    """Why ``.grad`` does not hold the mean over all processes under the Trainer's strategy, or "" where it does."""
    hooks = getattr(trainer.strategy.model, "_comm_hooks", ()) if trainer.world_size > 1 else ()
    if not hooks:
        return ""
    hook = hooks[0][0]
    return f"DDP's communication hook `{getattr(hook, '__name__', type(hook).__name__)}` changes the gradients"


def why_unsupported(trainer: Trainer, pl_module: LightningModule) -> str | None:
    """Why this way of training cannot be captured, or None where it can."""
    if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
        return "training_step(self, dataloader_iter) is not supported, because it hides the batch"
    strategy = trainer.strategy
    synchronized = [name for name, part in pl_module.named_modules() if isinstance(part, nn.SyncBatchNorm)]
    if trainer.world_size > 1 and synchronized:
        return (
            f"SyncBatchNorm (`{synchronized[0]}`) is not supported, because samples of all devices influence each "
            "other in it; use GroupNorm, or BatchNorm without synchronization"
        )
    kinds = [kind.__name__ for kind in type(strategy).__mro__]
    for name, reason in _REASONS.items():
        if name in kinds:
            stage = getattr(strategy, "zero_stage_3", False)
            return f"{type(strategy).__name__}{' at ZeRO stage 3' if stage else ''} is not supported, because {reason}"
    if is_a(strategy, "ModelParallelStrategy"):
        return _why_model_parallel_is_unsupported(strategy, pl_module)
    if trainer.world_size > 1 and not is_a(strategy, "DDPStrategy"):
        return f"{type(strategy).__name__} on {trainer.world_size} devices is not supported"
    if strategy.model is not pl_module and not isinstance(strategy.model, DistributedDataParallel):
        wrapper = type(strategy.model).__name__
        return f"{type(strategy).__name__} is not supported, because it wraps the module in {wrapper}"
    return None


def _why_model_parallel_is_unsupported(strategy: Any, pl_module: LightningModule) -> str | None:
    name, size = type(strategy).__name__, strategy.device_mesh["tensor_parallel"].size()
    if size > 1:
        return (
            f"{name} with tensor_parallel_size={size} is not supported, because several devices compute one sample "
            "together; say tensor_parallel_size=1, data_parallel_size=<number of devices> and use fully_shard"
        )
    names = sharded_elsewhere(pl_module)
    if names:
        return (
            f"tensor parallelism is not supported: {listed(names, 1)} is a DTensor in the forward, too, and not "
            "sharded by fully_shard alone"
        )
    return None
