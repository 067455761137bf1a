"""What is logged, at which steps, and to whom."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_persample.callbacks import PerSampleCallback, PerSampleGradientMonitor
from tests.callbacks.runs import Classifier, column, fit, loader, logged

NAMES = {f"norm_{kind}" for kind in ("mean", "std", "min", "max", "p50", "p95")} | {"coverage", "nonfinite"}
OF_MEAN = {"norm_of_mean", "noise_scale", "diversity"}
OF_GROUP = {"norm_mean", "noise_scale", "diversity"}
OF_EPOCH = {f"{name}_epoch" for name in (NAMES | OF_MEAN) - {"coverage", "norm_of_mean"}}


def steps(trainer, start="per_sample_grad/"):
    return [row["step"] for row in logged(trainer, start)]


def last_steps(trainer, epochs):
    return [(epoch + 1) * trainer.global_step // epochs - 1 for epoch in range(epochs)]


def names(row, prefix="per_sample_grad"):
    return {name.removeprefix(f"{prefix}/") for name in row if name.startswith(prefix)}


def ends_of_epochs_with_several(logged_steps, ends):
    """The last steps of the epochs with more than one logged step, whose own values say something else."""
    begins = [-1, *ends[:-1]]
    return [
        end for begin, end in zip(begins, ends, strict=True) if sum(begin < step <= end for step in logged_steps) > 1
    ]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("every", [1, 3])
def test_logs_on_the_trainers_own_logging_steps(accumulate, every, tmp_path):
    settings = {"accumulate_grad_batches": accumulate, "log_every_n_steps": every, "max_epochs": 3}
    trainer = fit(Classifier(), [PerSampleGradientMonitor()], tmp_path, loader(40), **settings)
    assert steps(trainer) == steps(trainer, "loss")
    assert len(steps(trainer)) == math.ceil(5 / accumulate) * 3 // every
    assert all(names(row) == NAMES | OF_MEAN for row in logged(trainer))
    epochs = logged(trainer, epochs=True)
    ends = last_steps(trainer, 3)
    assert [row["step"] for row in epochs] == ends_of_epochs_with_several(steps(trainer), ends)
    assert all(names(row) == OF_EPOCH for row in epochs)


class StopsEarly(Classifier):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.should_stop = True


def test_logs_with_the_trainer_when_it_is_told_to_stop(tmp_path):
    settings = {"log_every_n_steps": 4, "min_steps": 3, "max_epochs": 3}
    trainer = fit(StopsEarly(), [PerSampleGradientMonitor()], tmp_path, loader(40), **settings)
    # Told so at the end of the first batch, when it is too late to capture that one.
    assert steps(trainer, "loss") == [0, *steps(trainer)] == [0, 1, 2, 3, 4]


def test_logs_on_a_schedule_of_its_own(tmp_path):
    callbacks = [PerSampleGradientMonitor(2), PerSampleGradientMonitor(3, prefix="third")]
    trainer = fit(Classifier(), callbacks, tmp_path, loader(56))
    assert steps(trainer) == [1, 3, 5]
    assert steps(trainer, "third/") == [2, 5]
    assert all(names(row, "third") == NAMES | OF_MEAN for row in logged(trainer, "third/"))


def test_a_trainer_that_never_logs_logs_nothing_unless_asked(tmp_path):
    trainer = fit(Classifier(), [PerSampleGradientMonitor()], tmp_path, log_every_n_steps=0)
    assert not (Path(trainer.logger.log_dir) / "metrics.csv").exists()
    assert "per_sample_grad/norm_mean" not in trainer.callback_metrics
    trainer = fit(Classifier(), [PerSampleGradientMonitor(3)], tmp_path, log_every_n_steps=0)
    assert steps(trainer) == [2]


def test_names_follow_prefix_and_quantiles(tmp_path):
    monitor = PerSampleGradientMonitor(prefix="grads", quantiles=(0.29, 0.999), per_layer=1)
    (row, *_) = logged(fit(Classifier(), [monitor], tmp_path), "grads/")
    expected = {name for name in NAMES | OF_MEAN if name not in ("norm_p50", "norm_p95")}
    of_group = {f"network/{name}" for name in OF_GROUP}
    assert names(row, "grads") == expected | {"norm_p29", "norm_p99.9"} | of_group


def test_no_quantiles_is_allowed(tmp_path):
    (row, *_) = logged(fit(Classifier(), [PerSampleGradientMonitor(quantiles=())], tmp_path))
    assert names(row) == (NAMES | OF_MEAN) - {"norm_p50", "norm_p95"}


class Alternating(nn.Module):
    """Uses its second branch on every other call only."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(6, 4), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.scale * (self.always(x) + (self.sometimes(x) if self.calls % 2 == 0 else 0))


def test_group_names_are_the_same_at_every_step(tmp_path):
    trainer = fit(Classifier(Alternating()), [PerSampleGradientMonitor(per_layer=2)], tmp_path)
    groups = {f"network{name}/{kind}" for name in ("", ".always", ".sometimes") for kind in OF_GROUP}
    rows = logged(trainer)
    assert all(names(row) == NAMES | OF_MEAN | groups for row in rows)
    absent = [math.isnan(row["per_sample_grad/network.sometimes/norm_mean"]) for row in rows]
    assert absent == [True, False, True]


def test_callback_metrics_hold_what_was_logged_last(tmp_path):
    trainer = fit(Classifier(), [PerSampleGradientMonitor(per_layer=1)], tmp_path, log_every_n_steps=2, max_epochs=2)
    last = logged(trainer)[-1] | logged(trainer, epochs=True)[-1]
    found = {name: value.item() for name, value in trainer.callback_metrics.items() if "per_sample" in name}
    assert found == pytest.approx({n: value for n, value in last.items() if n != "step"}, rel=1e-6, nan_ok=True)


def test_values_of_an_epoch_with_one_logged_step_are_for_callbacks_alone(tmp_path):
    trainer = fit(Classifier(), [PerSampleGradientMonitor(3)], tmp_path)
    assert logged(trainer, epochs=True) == []
    (mean,) = column(trainer, "per_sample_grad/norm_mean")
    assert trainer.callback_metrics["per_sample_grad/norm_mean_epoch"].item() == pytest.approx(mean, rel=1e-6)


def test_model_checkpoint_monitors_the_mean_norm(tmp_path):
    monitor = "per_sample_grad/norm_mean"
    checkpoint = ModelCheckpoint(tmp_path / "best", monitor=monitor, every_n_train_steps=1, save_top_k=-1)
    trainer = fit(Classifier(), [PerSampleGradientMonitor(), checkpoint], tmp_path, enable_checkpointing=True)
    values = [row[monitor] for row in logged(trainer)]
    assert checkpoint.best_model_score.item() == pytest.approx(min(values), rel=1e-6)
    saved = sorted(value.item() for value in checkpoint.best_k_models.values())
    assert saved == pytest.approx(sorted(values), rel=1e-6)


def test_early_stopping_monitors_the_mean_norm():
    stopping = EarlyStopping("per_sample_grad/norm_mean", stopping_threshold=1e6, check_on_train_epoch_end=True)
    trainer = fit(Classifier(), [stopping, PerSampleGradientMonitor()], max_epochs=5)
    assert trainer.current_epoch == 1


@pytest.mark.parametrize("prog_bar", [False, True])
def test_the_progress_bar_shows_the_mean_norm_under_a_short_name_if_asked(prog_bar, tmp_path):
    trainer = fit(Classifier(), [PerSampleGradientMonitor(prog_bar=prog_bar)], tmp_path)
    (*_, last) = column(trainer, "per_sample_grad/norm_mean")
    assert trainer.progress_bar_metrics == ({"norm_mean": pytest.approx(last)} if prog_bar else {})
    every = NAMES | OF_MEAN | OF_EPOCH
    assert set(trainer.callback_metrics) == {"loss"} | {f"per_sample_grad/{name}" for name in every}


def test_of_several_monitors_all_but_the_first_show_their_prefix_in_the_progress_bar():
    monitors = [PerSampleGradientMonitor(prog_bar=True), PerSampleGradientMonitor(prefix="second")]
    assert list(fit(Classifier(), monitors).progress_bar_metrics) == ["norm_mean"]
    monitors[1].prog_bar = True
    shown = list(fit(Classifier(), monitors).progress_bar_metrics)
    assert shown == ["norm_mean", "second/norm_mean"]


class Bar(TQDMProgressBar):
    """Keeps what it shows after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        super().on_train_batch_end(trainer, pl_module, *args)
        self.shown.append(self.train_progress_bar.postfix)


def test_what_the_bar_of_the_terminal_shows_stays_until_the_next_logged_step(tmp_path):
    bar = Bar()
    callbacks = [PerSampleGradientMonitor(2, prog_bar=True), bar]
    trainer = fit(Classifier(), callbacks, tmp_path, loader(40), enable_progress_bar=True, max_epochs=2)
    values = column(trainer, "per_sample_grad/norm_mean")
    texts = [f"v_num=0, norm_mean={Tqdm.format_num(value)}" for value in values]
    assert bar.shown == ["v_num=0", *(text for text in texts for _ in range(2))][:10]


def test_every_logger_gets_the_values_once_per_logged_step(tmp_path, monkeypatch):
    loggers = [CSVLogger(tmp_path, name="one"), CSVLogger(tmp_path, name="two")]
    calls = []
    for logger in loggers:
        monkeypatch.setattr(
            logger, "log_metrics", lambda metrics, step=None, to=logger: calls.append((to.name, step, metrics))
        )
    fit(Classifier(), [PerSampleGradientMonitor()], logger=loggers, accumulate_grad_batches=2)
    ours = [(name, step) for name, step, metrics in calls if "per_sample_grad/norm_mean" in metrics]
    assert ours == [("one", 0), ("two", 0), ("one", 1), ("two", 1)]
    assert all(type(value) is float for _, _, metrics in calls for name, value in metrics.items() if "per_" in name)


def test_fast_dev_run_logs_as_lightning_does():
    trainer = fit(Classifier(), [PerSampleGradientMonitor(50)], fast_dev_run=2)
    assert trainer.global_step == 2
    assert trainer.callback_metrics["per_sample_grad/norm_mean"] > 0


class LogsItself(PerSampleCallback):
    def on_per_sample_gradients(self, trainer, pl_module, record, batch, batch_idx):
        pl_module.log("largest", record.norms().max(), on_step=True, batch_size=record.batch_size)


def test_a_subclass_may_log_through_the_module(tmp_path):
    trainer = fit(Classifier(), [LogsItself(), PerSampleGradientMonitor()], tmp_path)
    largest = [row["largest"] for row in logged(trainer, "largest")]
    assert largest == pytest.approx([row["per_sample_grad/norm_max"] for row in logged(trainer)])
