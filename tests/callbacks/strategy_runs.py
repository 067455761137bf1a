"""Fits in one of several processes, each named; run as ``python -m tests.callbacks.strategy_runs FOLDER NAME...``.

What a run gave goes to ``FOLDER/<name>.<rank>.pt``. `tests.processes` starts the processes.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from lightning_persample.callbacks import PerSampleGradientMonitor, statistics
from lightning_persample.errors import PerSampleWarning, UnsupportedError
from tests.callbacks.runs import Classifier, Recorder, as_loader, make_trainer
from tests.callbacks.strategy_models import (
    STEPS,
    EachHasItsOwn,
    HiddenOnOneRank,
    Referenced,
    Sharded,
    TensorParallel,
    joined,
    network,
    own_batches,
    rank,
)

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "reduce")
COLLECTIVES += ("broadcast_object_list", "gather", "gather_object", "scatter", "reduce_scatter", "barrier")
BOTH = ("sq_norm", "grad_sample")


class Steps(L.Callback):
    """What other callbacks see after each step: the monitor's values."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        found = {name: float(value) for name, value in trainer.callback_metrics.items() if "per_sample" in name}
        self.values.append(found)


class Collectives:
    """The calls of torch.distributed's functions, by batch, and how many collectives ran, those of DDP included."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str]] = []
        self.trainer: L.Trainer | None = None

    def __enter__(self):
        self._own = {name: getattr(dist, name) for name in COLLECTIVES}
        for name, function in self._own.items():
            setattr(dist, name, partial(self._call, name, function))
        self._before = self._sequence()
        return self

    def __exit__(self, *exception):
        for name, function in self._own.items():
            setattr(dist, name, function)
        self.total = self._sequence() - self._before

    def _call(self, name, function, *args, **kwargs):
        if self.trainer is not None and self.trainer.training:
            self.calls.append((self.trainer.fit_loop.epoch_loop.batch_idx, name))
        return function(*args, **kwargs)

    def _sequence(self) -> int:
        return dist.group.WORLD._get_sequence_number_for_group() if dist.is_initialized() else 0


def trained(module, callbacks, data, strategy, **settings) -> dict[str, Any]:
    """Fit, and give everything that tests compare."""
    steps, recorder = Steps(), next((each for each in callbacks if isinstance(each, Recorder)), Recorder())
    settings = {"devices": int(os.environ["WORLD_SIZE"]), "use_distributed_sampler": False} | settings
    with warnings.catch_warnings(record=True) as caught, Collectives() as collectives:
        warnings.simplefilter("always")
        trainer = collectives.trainer = make_trainer([*callbacks, steps], strategy=strategy, **settings)
        trainer.fit(module, as_loader(data))
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return {
        "weights": {n: (w.full_tensor() if hasattr(w, "full_tensor") else w).cpu() for n, w in weights.items()},
        "values": steps.values,
        "calls": collectives.calls,
        "collectives": collectives.total,
        "warnings": [
            str(each.message)
            for each in caught
            if each.category is PerSampleWarning
            or ("per_sample" in str(each.message) and "sync_dist" in str(each.message))
        ],
        "reference": getattr(module, "reference", None),
        "norms": [record.norms().cpu() for record in recorder.records],
        "names": [record.names for record in recorder.records],
        "left": "training_step" in module.__dict__,
        "epochs": trainer.current_epoch,
    }


SHARED: dict[str, dict[str, Any]] = {}


def shared(run: Callable[[], dict[str, Any]], *key: Any) -> dict[str, Any]:
    """What a run gave that is the same for all runs with this key, which is done once."""
    return SHARED.get(repr(key)) or SHARED.setdefault(repr(key), run())


def ddp(
    make_network=network, sizes=(4, 4), every=2, quantities=("sq_norm",), options=None, arguments=None, **settings
) -> dict[str, Any]:
    """A fit without and one with callbacks."""
    reduction, arguments, data = settings.pop("reduction", "mean"), arguments or {}, own_batches(sizes)
    plain = shared(
        lambda: trained(
            Referenced(make_network(), reduction=reduction), [], data, DDPStrategy(**arguments), **settings
        ),
        *(make_network, sizes, reduction, arguments, settings),
    )
    options = {"loss_reduction": reduction, **(options or {})}
    callbacks = [PerSampleGradientMonitor(every, per_layer=2, **options), Recorder(1, quantities=quantities, **options)]
    module = Referenced(make_network(), reduction=reduction)
    watched = trained(module, callbacks, data, DDPStrategy(**arguments), **settings)
    return {"plain": plain, "watched": watched}


def fsdp2(sizes=(4, 4), every=2, quantities=("sq_norm",), options=None, **settings) -> dict[str, Any]:
    """A fit under DDP with a reference, one of the sharded module without callbacks, and one with them."""
    data, size = own_batches(sizes), {"data_parallel_size": len(sizes), "tensor_parallel_size": 1}
    replicated = shared(
        lambda: trained(Referenced(network()), [Recorder(1)], data, DDPStrategy(), **settings),
        *("replicated", sizes, settings),
    )
    plain = shared(
        lambda: trained(Sharded(network()), [], data, ModelParallelStrategy(**size), **settings),
        *("sharded", sizes, settings),
    )
    callbacks = [
        PerSampleGradientMonitor(every, per_layer=2, **(options or {})),
        Recorder(1, quantities=quantities, **(options or {})),
    ]
    watched = trained(Sharded(network()), callbacks, data, ModelParallelStrategy(**size), **settings)
    return {"replicated": replicated, "plain": plain, "watched": {**watched, "reference": replicated["reference"]}}


class Compresses(Referenced):
    """Gradients travel in half precision."""

    def on_train_start(self):
        self.trainer.strategy.model.register_comm_hook(None, fp16_compress_hook)


def communication_hook() -> dict[str, Any]:
    """Lightning itself passes such a hook on with GPUs alone."""
    return {"watched": trained(Compresses(network()), [PerSampleGradientMonitor(2)], own_batches(), DDPStrategy())}


def two_monitors() -> dict[str, Any]:
    """One logs at every second step and one at every third, so that both log at the sixth."""
    monitors = [PerSampleGradientMonitor(2, per_layer=2), PerSampleGradientMonitor(3, prefix="per_sample_third")]
    plain = trained(Referenced(network()), [], own_batches((5, 2)), DDPStrategy())
    return {"plain": plain, "watched": trained(Referenced(network()), monitors, own_batches((5, 2)), DDPStrategy())}


class FailsOnOneRank(Referenced):
    """Takes a batch whose tensors do not agree about its size."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch[:2], batch_idx)


def capture_fails_on_one_rank(batch: int = 2, **settings: Any) -> dict[str, Any]:
    """The size of one batch of rank 1 cannot be read."""
    data: list[Any] = list(own_batches())
    if rank() == 1:
        data[batch] = (*data[batch], torch.zeros(3, 2))
    monitors = [PerSampleGradientMonitor(1), PerSampleGradientMonitor(1, prefix="per_sample_2")]
    return {"watched": trained(FailsOnOneRank(network()), monitors, data, DDPStrategy(), **settings)}


def more_than_there_is_room_for() -> dict[str, Any]:
    """The first exchange has room for fewer bytes than any process sends."""
    room, statistics.AllProcesses._room = statistics.AllProcesses._room, 2
    try:
        return ddp(sizes=(5, 2), every=1)
    finally:
        statistics.AllProcesses._room = room


class ToldToStop(Referenced):
    """Rank 0 alone is told to stop after the first batch, which it may not before the fourth."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.should_stop = rank() == 0 or batch_idx >= 3


def one_rank_is_told_to_stop() -> dict[str, Any]:
    """What is logged must not depend on it."""
    settings = {"log_every_n_steps": 2, "min_steps": 4}
    monitor = PerSampleGradientMonitor()
    return {"watched": trained(ToldToStop(network()), [monitor], own_batches(), DDPStrategy(), **settings)}


def callbacks_that_monitor(folder: str) -> dict[str, Any]:
    """Each rank alone would see another largest norm, and another epoch to stop after."""
    name = "per_sample_grad/norm_max"
    stopping = EarlyStopping(name, patience=0, mode="min", check_on_train_epoch_end=True)
    checkpoint = ModelCheckpoint(
        Path(folder, "checkpoints"), monitor=name, mode="min", save_top_k=2, save_on_train_epoch_end=True
    )
    settings = {"max_epochs": 8, "enable_checkpointing": True}
    callbacks = [PerSampleGradientMonitor(STEPS), stopping, checkpoint]
    watched = trained(Referenced(network(), lr=4.0), callbacks, own_batches(), DDPStrategy(), **settings)
    scores = {"stopped": stopping.stopped_epoch, "stopping": float(stopping.best_score)}
    scores |= {"path": checkpoint.best_model_path, "checkpoint": float(checkpoint.best_model_score)}
    return {"watched": watched, "scores": scores}


class Waits(Referenced):
    """Waits for the other ranks in the middle of its training step."""

    def training_step(self, batch, batch_idx):
        dist.all_reduce(torch.ones(1))
        return super().training_step(batch, batch_idx)


def extra_pass_that_would_wait(**options: Any) -> dict[str, Any]:
    """Rank 0 has five samples and rank 1 two: one pass over each sample would wait forever."""
    callbacks = [PerSampleGradientMonitor(1, **options)]
    try:
        return {"watched": trained(Waits(network()), callbacks, own_batches((5, 2)), DDPStrategy())}
    except UnsupportedError as error:
        return {"error": str(error)}


def extra_pass_of_a_sharded_module(**options: Any) -> dict[str, Any]:
    """Refused before anything is gathered."""
    try:
        return fsdp2(sizes=(5, 2), options=options)
    except UnsupportedError as error:
        return {"error": str(error)}


def tensor_parallel() -> dict[str, Any]:
    """Two devices compute one sample together."""
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    data = [tuple(part.float() if part.is_floating_point() else part for part in batch) for batch in joined()]
    return {"watched": trained(TensorParallel(network().float()), [PerSampleGradientMonitor(1)], data, strategy)}


class Fails(Referenced):
    """Rank 1 fails in its fourth training step."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and rank() == 1:
            raise RuntimeError("a mistake in training_step")
        return super().training_step(batch, batch_idx)


class FailsBefore(L.Callback):
    """Rank 1 fails right before the monitor's turn."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 3 and rank() == 1:
            raise RuntimeError("a mistake in a callback")


def failing(module: Referenced, *callbacks: L.Callback) -> dict[str, Any]:
    """The error must be what the user sees, and nobody may wait for this rank."""
    try:
        trained(module, [*callbacks, PerSampleGradientMonitor(1)], own_batches(), DDPStrategy())
    finally:
        print("left behind:", "training_step" in module.__dict__)
    return {}


def on_gpus(strategy: str) -> dict[str, Any]:
    """As many processes as there are devices."""
    data = [tuple(part.float() if part.is_floating_point() else part for part in batch) for batch in own_batches()]
    arguments = {"accelerator": "gpu"}
    make: Any = {"ddp": DDPStrategy, "fsdp": FSDPStrategy}[strategy]
    plain = trained(Classifier(network().float()), [], data, make(), **arguments)
    callbacks = [PerSampleGradientMonitor(2), Recorder(1)]
    kind = Referenced if strategy == "ddp" else Classifier
    watched = trained(kind(network().float()), callbacks, data, make(), **arguments)
    return {"plain": plain, "watched": watched}


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "find_unused_parameters": {"arguments": {"find_unused_parameters": True}},
    "static_graph": {"arguments": {"static_graph": True}},
    "gradient_as_bucket_view": {"arguments": {"gradient_as_bucket_view": True}},
    "accumulation": {"accumulate_grad_batches": 2, "every": 1},
    "accumulation with a short last window": {"accumulate_grad_batches": 4, "every": 1},
    "fewer samples on one rank": {"sizes": (5, 2)},
    "no samples on one rank": {"sizes": (5, 0), "reduction": "sum"},
    "unequal layers": {"make_network": EachHasItsOwn, "arguments": {"find_unused_parameters": True}},
    "gradients": {"quantities": BOTH},
    "gradients, accumulation, bucket view": {
        "quantities": BOTH,
        "accumulate_grad_batches": 2,
        "every": 1,
        "arguments": {"gradient_as_bucket_view": True},
    },
    "vmap": {"options": {"engine": "vmap"}, "sizes": (5, 2)},
    "loop": {"options": {"engine": "loop"}, "sizes": (5, 2)},
    "one rank falls back": {
        "make_network": HiddenOnOneRank,
        "options": {"unsupported": "vmap"},
        "arguments": {"find_unused_parameters": True},
    },
    "verify": {"options": {"verify": True}, "sizes": (5, 2)},
    "verify, static_graph": {"options": {"verify": True}, "arguments": {"static_graph": True}},
}
SHARDED: dict[str, dict[str, Any]] = {
    "sharded": {},
    "sharded, accumulation": {"accumulate_grad_batches": 2, "every": 1},
    "sharded, fewer samples on one rank": {"sizes": (5, 2)},
    "sharded, gradients": {"quantities": BOTH},
}
RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: partial(ddp, **settings) for name, settings in WAYS.items()},
    **{name: partial(fsdp2, **settings) for name, settings in SHARDED.items()},
    "communication hook": communication_hook,
    "fused": partial(ddp, quantities=BOTH, options={"fuse_weight_grad": True}),
    "sharded, fused": partial(fsdp2, quantities=BOTH, options={"fuse_weight_grad": True}),
    "sharded on one device": partial(fsdp2, sizes=(4,), quantities=BOTH),
    "capture fails on one rank": capture_fails_on_one_rank,
    "capture fails within a window": partial(capture_fails_on_one_rank, batch=3, accumulate_grad_batches=2),
    "more than there is room for": more_than_there_is_room_for,
    "two monitors": two_monitors,
    "one rank is told to stop": one_rank_is_told_to_stop,
    "extra pass, loop": partial(extra_pass_that_would_wait, engine="loop"),
    "extra pass, vmap": partial(extra_pass_that_would_wait, engine="vmap"),
    "extra pass, verify": partial(extra_pass_that_would_wait, verify=True),
    "extra pass, sharded, loop": partial(extra_pass_of_a_sharded_module, engine="loop"),
    "extra pass, sharded, verify": partial(extra_pass_of_a_sharded_module, verify=True),
    "tensor parallel": tensor_parallel,
    "failing step": lambda: failing(Fails(network())),
    "failing callback": lambda: failing(Referenced(network()), FailsBefore()),
    "ddp on gpus": partial(on_gpus, "ddp"),
    "fsdp on gpus": partial(on_gpus, "fsdp"),
    "sharded on gpus": partial(fsdp2, sizes=(4,), quantities=BOTH, accelerator="gpu"),
}


def main(folder: str, *names: str) -> None:
    """Do the named runs."""
    torch.set_num_threads(1)
    for name in names:
        run = partial(callbacks_that_monitor, folder) if name == "callbacks that monitor" else RUNS[name]
        torch.save(run(), Path(folder) / f"{name}.{rank()}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
