"""The older name of the same library: modules, Trainers and loggers of `pytorch_lightning` with our callbacks."""

from __future__ import annotations

import csv
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_persample import PerSampleGradientMonitor, loop_per_sample_grads
from tests.callbacks.runs import CLASSES, FEATURES, Recorder, loader

# (its own warnings on import are not ours)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
pl = pytest.importorskip("pytorch_lightning")


class Foreign(pl.LightningModule):
    manual = False

    def __init__(self):
        super().__init__()
        self.automatic_optimization = not self.manual
        self.network = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss)
        if self.manual:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class ForeignManual(Foreign):
    manual = True


def trained(kind, callbacks, folder):
    torch.manual_seed(0)
    module = kind()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=pl.loggers.CSVLogger(folder), log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(module, loader())
    return module, trainer


@pytest.mark.parametrize(("kind", "engine"), [(Foreign, "expanded"), (Foreign, "loop"), (ForeignManual, "expanded")])
def test_a_trainer_of_the_other_name(kind, engine, tmp_path):
    recorder = Recorder(quantities=("sq_norm", "grad_sample"), engine=engine)
    plain, _ = trained(kind, [], tmp_path / "plain")
    watched, trainer = trained(kind, [PerSampleGradientMonitor(engine=engine), recorder], tmp_path / "watched")
    for name, value in plain.state_dict().items():
        assert torch.equal(value, watched.state_dict()[name]), name
    assert not {"training_step", "backward", "manual_backward"} & vars(watched).keys()
    assert len(recorder.records) == 3
    assert [record.sample_index.tolist() for record in recorder.records] == torch.arange(24).view(3, 8).tolist()

    torch.manual_seed(0)
    _, expected = loop_per_sample_grads(kind(), lambda m, x, y: F.cross_entropy(m.network(x), y), *next(iter(loader())))
    for name, grads in expected.items():
        torch.testing.assert_close(recorder.records[0].grad_samples[name], grads)
    with open(os.path.join(trainer.logger.log_dir, "metrics.csv"), newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("per_sample_grad/norm_mean")]
    means = [record.norms().mean().item() for record in recorder.records]
    assert [float(row["per_sample_grad/norm_mean"]) for row in rows] == pytest.approx(means)
    assert trainer.callback_metrics["per_sample_grad/norm_mean"] == pytest.approx(means[-1])


class Fails(Foreign):
    def on_before_zero_grad(self, optimizer):
        raise KeyError("mine")


def test_after_an_error_the_module_is_as_before(tmp_path):
    module = Fails()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[PerSampleGradientMonitor(1)],
    )  # fmt: skip
    with pytest.raises(KeyError, match="mine"):
        trainer.fit(module, loader())
    assert not {"training_step", "backward"} & vars(module).keys()
