"""One cell of the matrix: a way of training, a strategy and an engine, beside a fit without any callback of ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim.swa_utils import get_ema_avg_fn

from lightning_persample import PerSampleGradientMonitor
from lightning_persample.errors import PerSampleWarning
from tests.callbacks.runs import Recorder, make_trainer
from tests.callbacks.ways import (
    BATCHES,
    GAN,
    Checkpointed,
    CheckpointedReference,
    Classifier,
    GANUntoggled,
    Manual,
    ManualAccumulates,
    ManualClips,
    ManualDirect,
    ManualLBFGS,
    ManualTwice,
    ReturnsDict,
    Run,
    SkipsTheSecond,
    Tripled,
    Way,
    WithLBFGS,
    compiled_submodule,
    compiled_whole,
    run,
    traced_submodule,
    traces,
)

ENGINES = ("expanded", "vmap", "loop")
BOTH = ("sq_norm", "grad_sample")
LOW = 5e-2


class NotThereError(Exception):
    """This version of lightning lacks something."""


def beside(name: str, **options: Any) -> Callable[[], dict[str, Any]]:
    """Settings with one of Lightning's own callbacks."""

    def settings() -> dict[str, Any]:
        if not hasattr(lightning_callbacks, name):
            raise NotThereError(f"this version of lightning has no {name}")
        return {"callbacks": [getattr(lightning_callbacks, name)(**options)]}

    return settings


def scaled() -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 512.0, growth_interval=3))]}


def twice(trainer, module, folder):
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module)


def resumed(trainer, module, folder):
    """Stops in the middle of an epoch, and goes on from its checkpoint with another Trainer."""
    settings: dict[str, Any] = {"max_steps": BATCHES + 1, "max_epochs": -1, "default_root_dir": folder}
    processes = trainer.world_size
    if processes > 1:
        sharded = isinstance(trainer.strategy, ModelParallelStrategy)
        size = {"data_parallel_size": processes, "tensor_parallel_size": 1}
        settings |= {"devices": processes, "use_distributed_sampler": False}
        settings["strategy"] = ModelParallelStrategy(**size) if sharded else "ddp"
    first = make_trainer(trainer.callbacks, **settings)
    first.fit(module)
    first.save_checkpoint(folder / "middle.ckpt")
    trainer.fit(module, ckpt_path=folder / "middle.ckpt")


WAYS = {
    "plain": Way(Classifier),
    "a dict": Way(ReturnsDict),
    "None": Way(SkipsTheSecond),
    "LBFGS": Way(WithLBFGS),
    "own backward": Way(Tripled),
    "clipping by value": Way(Classifier, lambda: {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
    "clipping by norm": Way(Classifier, lambda: {"gradient_clip_val": 0.05}),
    "accumulation": Way(Classifier, lambda: {"accumulate_grad_batches": 2}),
    "accumulation schedule": Way(Classifier, beside("GradientAccumulationScheduler", scheduling={0: 1, 1: 2})),
    "16-mixed": Way(Classifier, scaled, tolerance=LOW),
    "16-mixed, accumulation": Way(Classifier, lambda: {**scaled(), "accumulate_grad_batches": 2}, tolerance=LOW),
    "bf16-mixed": Way(Classifier, lambda: {"precision": "bf16-mixed"}, tolerance=LOW),
    "bf16-true": Way(Classifier, lambda: {"precision": "bf16-true"}, tolerance=LOW),
    "64-true": Way(Classifier, lambda: {"precision": "64-true"}, tolerance=1e-10),
    "reentrant checkpoint": Way(lambda r: CheckpointedReference(r, lambda: Checkpointed(True))),
    "checkpoint": Way(lambda r: Classifier(r, lambda: Checkpointed(False))),
    "compiled module": Way(Classifier, prepare=compiled_whole, every=2),
    "compiled part": Way(Classifier, prepare=compiled_submodule, every=2),
    "compiled part, traced only": Way(Classifier, prepare=traced_submodule, every=2),
    "WeightAveraging": Way(Classifier, beside("WeightAveraging", avg_fn=get_ema_avg_fn(0.9))),
    "EMA": Way(Classifier, beside("EMAWeightAveraging", decay=0.9)),
    "StochasticWeightAveraging": Way(
        Classifier, lambda: {**beside("StochasticWeightAveraging", swa_lrs=0.05, swa_epoch_start=1)(), "max_epochs": 3}
    ),
    "Timer": Way(Classifier, beside("Timer", duration={"hours": 1})),
    "BatchSizeFinder": Way(
        Classifier, beside("BatchSizeFinder", steps_per_trial=1, init_val=2, max_trials=1), trials=1
    ),
    "LearningRateFinder": Way(
        Classifier, beside("LearningRateFinder", num_training_steps=4, update_attr=False), trials=4
    ),
    "fit twice": Way(Classifier, fit=twice),
    "resumed": Way(Classifier, fit=resumed),
}
MANUAL = {
    "manual": Way(Manual),
    "manual, loss.backward()": Way(ManualDirect),
    "manual, two backward passes": Way(ManualTwice),
    "manual, accumulation": Way(ManualAccumulates),
    "manual, clipping": Way(ManualClips),
    "manual, LBFGS": Way(ManualLBFGS),
    "manual, 16-mixed": Way(Manual, scaled, tolerance=LOW),
    "manual, compiled part": Way(Manual, prepare=compiled_submodule, every=2),
    "manual, resumed": Way(Manual, fit=resumed),
    "GAN, toggled": Way(GAN),
    "GAN, not toggled": Way(GANUntoggled),
    "GAN, 16-mixed": Way(GAN, scaled, tolerance=LOW),
}
ALL_WAYS = WAYS | MANUAL


@dataclass(frozen=True)
class Verdict:
    """What became of a cell.

    Attributes:
        outcome: "ok": training as without us, values exact, nothing left behind; "refused": no values, and said why;
            "skipped": the way does not run here without us; "wrong".
        why: the reason of any but "ok".
        logged: what the monitor left in the Trainer's metrics.
    """

    outcome: str
    why: str = ""
    logged: dict[str, float] = field(default_factory=dict, compare=False)


def plain_run(name: str, folder: Path, *, with_reference: bool = True, **strategy: Any) -> Run | Verdict:
    """A way without a callback of ours, by default with the one-sample loop beside it; why it does not run here."""
    try:
        return run(ALL_WAYS[name], [], folder, with_reference=with_reference, **strategy)
    except (Exception, CheckpointException) as error:  # whatever Lightning and torch refuse by themselves
        text = next(iter(str(error).strip().splitlines()), "")
        return Verdict("skipped", f"torch/Lightning itself: {type(error).__name__}: {text[:160]}")


def cell(
    name: str, engine: str, without: Run | Verdict, folder: Path, reference: Run | None = None, **strategy: Any
) -> Verdict:
    """Run a way beside an engine and compare.

    Args:
        name: the way.
        engine: the engine of the callbacks.
        without: the same way without them.
        folder: where the Trainer may write.
        reference: the run that has the one-sample loop, where `without` has none.
        **strategy: settings of the Trainer.
    """
    if isinstance(without, Verdict):
        return without
    way = ALL_WAYS[name]
    recorder = Recorder(way.every, quantities=BOTH, engine=engine)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PerSampleWarning)
        monitor = PerSampleGradientMonitor(way.every, engine=engine)
        watched = run(way, [recorder, monitor], folder, with_reference=False, **strategy)
    said = {str(each.message) for each in caught if issubclass(each.category, PerSampleWarning)}
    said -= {text for text in said if "captured steps run compiled code" in text}
    logged = {key: float(value) for key, value in watched.trainer.callback_metrics.items() if "per_sample" in key}

    trouble = _training_differs(without, watched)
    if trouble:
        return Verdict("wrong", trouble)
    if not recorder.records and len(said) == 1:
        return Verdict("refused", said.pop())
    if said:
        return Verdict("wrong", f"said {sorted(said)}")
    expected = (reference or without).module.reference[way.trials :][way.every - 1 :: way.every]
    trouble = _values_differ(recorder.records, expected, way.tolerance)
    return Verdict("wrong", trouble) if trouble else Verdict("ok", "", logged)


def _training_differs(without: Run, watched: Run) -> str:
    if without.state.keys() != watched.state.keys():
        return f"training: {sorted(without.state.keys() ^ watched.state.keys())} on one side alone"
    for entry, value in without.state.items():
        if not torch.equal(value, watched.state[entry]):
            return f"training: {entry} differs"
    if without.saved != watched.saved:
        return "training: the pickled module differs"
    left, before = traces(watched.module), traces(without.module)
    return "" if left == before else f"left behind: {left} instead of {before}"


def _values_differ(records: list[Any], expected: list[Any], tolerance: float) -> str:
    if not len(records) == len(expected) > 0:
        return f"{len(records)} records, but {len(expected)} backward passes"
    for number, (record, reference) in enumerate(zip(records, expected, strict=True)):
        if (record.coverage, record.unsupported) != (1.0, {}) or set(record.names) != set(reference):
            return f"record {number}: coverage {record.coverage}, {dict(record.unsupported)}, {record.names}"
        for parameter, grads in reference.items():
            grads = grads.double()
            size = float(grads.norm())
            if float((record.grad_samples[parameter].double() - grads).norm()) > tolerance * size:
                return f"record {number}: the gradients of {parameter} differ"
            squares = grads.flatten(1).square().sum(1)
            allowed = 3 * tolerance * squares + tolerance * size**2
            if bool(((record.sq_norms[parameter].double() - squares).abs() > allowed).any()):
                return f"record {number}: the squared norms of {parameter} differ"
    return ""
