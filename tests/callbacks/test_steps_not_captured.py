"""A batch that nobody wants costs next to nothing, and what is captured after it is what it would be without."""

from __future__ import annotations

import collections
import copy
import gc
import os
import pickle
import sys

import pytest
import torch
from lightning.pytorch import Callback

from lightning_persample import PerSampleGradientMonitor, PerSampleGradientWriter
from lightning_persample.callbacks import session, statistics
from lightning_persample.callbacks.base import _BATCH_HOOKS
from lightning_persample.callbacks.lightning_internals import skips_hooks
from lightning_persample.capture import dispatch, mode
from tests.callbacks.runs import Classifier, Recorder, loader, logged, make_trainer
from tests.own_faults import broken

NOTHING = ("`per_sample_grad` has logged nothing", ".* got no record")
pytestmark = [pytest.mark.filterwarnings(f"ignore:{text}") for text in NOTHING]

BATCHES = 8
PACKAGE = os.path.dirname(statistics.__file__.removesuffix("statistics.py").rstrip(os.sep))


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


class CountsCalls(Callback):
    """Counts the calls of Python functions from one start of a batch to the next."""

    def __init__(self) -> None:
        self.steps: list[collections.Counter] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        sys.setprofile(None)
        self.steps.append(collections.Counter())
        sys.setprofile(self._count)

    def on_train_end(self, trainer, pl_module):
        sys.setprofile(None)

    def _count(self, frame, event, argument):
        if event == "call":
            self.steps[-1][frame.f_code] += 1


def calls_of_each_step(kind, callbacks, **options):
    torch.manual_seed(0)
    counter = CountsCalls()
    previous = sys.getprofile()
    gc.collect()
    gc.disable()  # what it finds may call functions of others
    try:
        make_trainer([counter, *callbacks], max_epochs=1, **options).fit(kind(), loader(4 * BATCHES, 4))
    finally:
        gc.enable()
        sys.setprofile(previous)
    return counter.steps[2:-1]  # the last one holds the end of the epoch


WATCHED = {
    "monitor": (lambda folder: [PerSampleGradientMonitor(100)], 10),
    "log_every_n_steps": (lambda folder: [PerSampleGradientMonitor()], 10),
    "writer": (lambda folder: [PerSampleGradientWriter(folder, 100)], 12),
    "both": (lambda folder: [PerSampleGradientMonitor(100), PerSampleGradientWriter(folder, 100)], 12),
}


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("name", WATCHED)
def test_a_batch_that_is_not_captured_costs_a_handful_of_calls(name, accumulated, tmp_path):
    options = {"log_every_n_steps": 100, "accumulate_grad_batches": accumulated}
    callbacks, most = WATCHED[name]
    plain = calls_of_each_step(Classifier, [], **options)
    watched = calls_of_each_step(Classifier, callbacks(tmp_path), **options)
    more = [sum(w.values()) - sum(p.values()) for w, p in zip(watched, plain, strict=True)]
    assert max(more) <= most, watched[more.index(max(more))] - plain[more.index(max(more))]


def test_so_it_is_in_manual_optimization():
    plain = calls_of_each_step(Manual, [])
    watched = calls_of_each_step(Manual, [PerSampleGradientMonitor(100)])
    assert max(sum(w.values()) - sum(p.values()) for w, p in zip(watched, plain, strict=True)) <= 11


@pytest.mark.parametrize(("name", "most"), [("monitor", 640), ("both", 728)])
def test_a_warm_captured_step_calls_no_more_functions_of_the_package(name, most, tmp_path):
    """The bounds are what was counted, and a tenth."""
    callbacks = [PerSampleGradientMonitor(1)] + [PerSampleGradientWriter(tmp_path)] * (name == "both")
    step = calls_of_each_step(Classifier, callbacks)[-1]
    assert 0 < sum(count for code, count in step.items() if PACKAGE in code.co_filename) <= most


class CountsHooks(PerSampleGradientMonitor):
    """A class of a user's, with hooks of its own."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.started = [*getattr(self, "started", []), batch_idx]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.ended = [*getattr(self, "ended", []), batch_idx]


def trained(kind, callbacks, tmp_path=None, **options):
    torch.manual_seed(0)
    trainer = make_trainer(callbacks, tmp_path, max_epochs=2, **options)
    trainer.fit(kind(), loader(4 * BATCHES, 4))
    return trainer


@pytest.mark.parametrize("kind", [Classifier, Manual])
def test_hooks_of_a_users_subclass_run_at_every_batch(kind):
    monitor = CountsHooks(3)
    trained(kind, [monitor])
    assert monitor.started == monitor.ended == [*range(8)] * 2


class StopsAt(Callback):
    """Ends the fit in the middle of an optimizer step, at which Lightning logs then."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.should_stop or batch_idx == 4


def test_a_step_of_which_a_batch_was_not_captured_is_not_logged(tmp_path):
    monitor, recorder = PerSampleGradientMonitor(), Recorder()
    options = {"accumulate_grad_batches": 2, "log_every_n_steps": 50, "min_epochs": 2}
    trainer = trained(Classifier, [monitor, recorder, StopsAt()], tmp_path, **options)
    assert recorder.batch_indices == [5, 6, 7, *range(8)]  # 5 is the second batch of a step
    assert [row["step"] for row in logged(trainer)] == [3, 4, 5, 6, 7]


class Looks(Callback):
    def __init__(self, monitor) -> None:
        self.monitor, self.found, self.copies = monitor, [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.found.append([name for name in _BATCH_HOOKS if vars(self.monitor).get(name, self) is None])
        self.copies = [copy.deepcopy(self.monitor), pickle.loads(pickle.dumps(self.monitor))]


def test_what_lightning_skips_is_there_again_after_the_fit_and_in_copies():
    monitor = PerSampleGradientMonitor(100)
    looks = Looks(monitor)
    trainer = trained(Classifier, [looks, monitor])
    assert skips_hooks(trainer)
    assert set(looks.found[3]) == set(_BATCH_HOOKS)
    assert not set(_BATCH_HOOKS) & set(vars(monitor))
    assert all(callable(getattr(each, name)) for each in (monitor, *looks.copies) for name in _BATCH_HOOKS)


def test_so_it_is_after_an_error():
    class Fails(Classifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 4:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    monitor = PerSampleGradientMonitor(100)
    with pytest.raises(KeyError, match="mine"):
        trained(Fails, [monitor])
    assert not set(_BATCH_HOOKS) & set(vars(monitor))


class AsksAlways(Recorder):
    """Says at each batch whether it wants it: what a user has overridden is asked at every batch."""

    def should_capture(self, trainer):
        self.asked = getattr(self, "asked", 0) + 1
        return self.asked % 3 == 0


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_what_is_captured_is_the_same_beside_a_callback_that_is_asked_at_every_batch(every):
    """Beside it no batch is skipped."""
    alone, beside, asks = Recorder(every), Recorder(every), AsksAlways()
    trained(Classifier, [alone])
    trained(Classifier, [beside, asks])
    assert (asks.asked, len(asks.records)) == (16, 5)
    assert alone.batch_indices == beside.batch_indices
    assert alone.batch_indices == [step % BATCHES for step in range(16) if (step + 1) % every == 0]
    for one, other, batch in zip(alone.records, beside.records, alone.batch_indices, strict=True):
        assert torch.equal(one.norms(), other.norms())
        assert one.sample_index.tolist() == other.sample_index.tolist() == list(range(4 * batch, 4 * batch + 4))


@pytest.mark.parametrize(
    "function",
    [
        *(session.Rest._not_resting, session.Rest._end, statistics.Window.is_new.fget),
        *(session.SharedCapture._run_log, mode.Capture.run_copying, dispatch.Dispatcher.copying),
    ],
)
def test_a_fault_in_it_ends_no_training(function):
    plain = trained(Classifier, []).model
    with broken(function), pytest.warns(UserWarning, match="this is a fault of lightning_persample"):
        watched = trained(Classifier, [PerSampleGradientMonitor(3)]).model
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)
