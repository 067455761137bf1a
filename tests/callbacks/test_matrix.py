"""Every way of training beside every engine: training untouched, values exact, and nothing left behind."""

from __future__ import annotations

import fnmatch
import warnings
from functools import cache

import pytest
import torch
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.plugins import MixedPrecision
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
    SkipsTheSecond,
    Tripled,
    Way,
    WithLBFGS,
    compiled_submodule,
    compiled_whole,
    run,
    traces,
)

ENGINES = ("expanded", "vmap", "loop")
BOTH = ("sq_norm", "grad_sample")
LOW = 5e-2


def beside(name, **options):
    """Settings with one of Lightning's own callbacks."""

    def settings():
        if not hasattr(lightning_callbacks, name):
            pytest.skip(f"this version of lightning has no {name}")
        return {"callbacks": [getattr(lightning_callbacks, name)(**options)]}

    return settings


def scaled():
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 512.0, growth_interval=3))]}


def twice(trainer, module, folder):
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module)


def resumed(trainer, module, folder):
    """Stops in the middle of an epoch, and goes on from its checkpoint with another Trainer."""
    first = make_trainer(trainer.callbacks, max_steps=BATCHES + 1, max_epochs=-1, default_root_dir=folder)
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
ASIDE = (
    "engine={!r} runs training_step on single samples aside, which would step the optimizers, because in manual "
    "optimization training_step does; use engine='expanded': no per-sample gradients are captured in this fit"
)
FAILED = "engine={!r} failed with RuntimeError: {}"
# Cells without values, with the reason that is said; "*" stands for the rest of a text of torch's own.
REFUSED = {(way, engine): ASIDE.format(engine) for way in MANUAL for engine in ENGINES[1:]}
REFUSED |= {
    ("reentrant checkpoint", "vmap"): FAILED.format(
        "vmap", "In order to use an autograd.Function with functorch transforms*"
    ),
    ("reentrant checkpoint", "loop"): FAILED.format(
        "loop", "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() or passing an `inputs`*"
    ),
    ("checkpoint", "vmap"): FAILED.format(
        "vmap", "torch.func.{grad, vjp, jacrev, hessian} don't yet support saved tensor hooks*"
    ),
}
CELLS = [(way, engine) for way in (*WAYS, *MANUAL) for engine in ENGINES]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Each way without a callback of ours, with the one-sample loop beside it."""

    @cache
    def trained(name):
        return run((WAYS | MANUAL)[name], [], tmp_path_factory.mktemp("plain"), with_reference=True)

    return trained


@pytest.mark.filterwarnings("ignore:.*(training_step.* returned .*None|lr_scheduler.step|The `max_batch|not resumable)")
@pytest.mark.filterwarnings("ignore:.*(`?save_checkpoint|Checkpoint directory|.grad attribute of a Tensor|swa|SWA)")
@pytest.mark.parametrize(("name", "engine"), CELLS)
def test_a_way_of_training_beside_an_engine(name, engine, plain, tmp_path):
    way, without = (WAYS | MANUAL)[name], plain(name)
    recorder = Recorder(way.every, quantities=BOTH, engine=engine)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PerSampleWarning)
        watched = run(
            way, [recorder, PerSampleGradientMonitor(way.every, engine=engine)], tmp_path, with_reference=False
        )
    said = [str(each.message) for each in caught if each.category is PerSampleWarning]

    assert without.state.keys() == watched.state.keys()
    for entry, value in without.state.items():
        assert torch.equal(value, watched.state[entry]), entry
    assert without.saved == watched.saved
    assert traces(without.module) == traces(watched.module)

    if (name, engine) in REFUSED:
        (text,) = set(said)
        assert fnmatch.fnmatchcase(text, REFUSED[name, engine])
        assert recorder.records == []
        return
    assert [text for text in said if "captured steps run compiled code" not in text] == []
    reference = without.module.reference[way.trials :][way.every - 1 :: way.every]
    assert len(recorder.records) == len(reference) > 0
    for record, expected in zip(recorder.records, reference, strict=True):
        assert (record.coverage, record.unsupported) == (1.0, {})
        assert set(record.names) == set(expected)
        for parameter, grads in expected.items():
            found, size = record.grad_samples[parameter].double(), grads.double().norm()
            assert (found - grads.double()).norm() <= way.tolerance * size, parameter
            torch.testing.assert_close(
                record.sq_norms[parameter].double(), grads.double().flatten(1).square().sum(1),
                rtol=3 * way.tolerance, atol=way.tolerance * float(size) ** 2,
            )  # fmt: skip
