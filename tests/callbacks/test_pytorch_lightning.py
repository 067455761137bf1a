"""The older name of the same library: modules, Trainers and loggers of `pytorch_lightning` with our callbacks."""

from __future__ import annotations

import csv
import os

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from torch import nn

from lightning_persample import PerSampleGradientMonitor, collect_gradients, loop_per_sample_grads
from lightning_persample.errors import OptionError
from tests.callbacks.runs import CLASSES, FEATURES, Classifier, Recorder, loader, make_trainer

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


class Collected(Foreign):
    def training_step(self, batch, batch_idx):
        assert self.trainer.predicting
        self.log("loss", 1.0)
        return F.cross_entropy(self.network(batch[0]), batch[1])


def quiet(**settings):
    return pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [Collected, Classifier])
@pytest.mark.parametrize("of", [lambda: None, make_trainer, quiet], ids=["none", "lightning", "pytorch_lightning"])
def test_gradients_of_either_name_are_collected_by_either_trainer(kind, of, tmp_path):
    module, data = kind(), loader()
    store = collect_gradients(module, data, tmp_path / "store", projection=None, trainer=of())
    batch = next(iter(torch.utils.data.DataLoader(data.dataset, 24)))
    _, expected = loop_per_sample_grads(module, lambda m, x, y: F.cross_entropy(m.network(x), y), *batch)
    found = torch.cat([values for _, values in store.blocks()])
    torch.testing.assert_close(found, torch.cat([grads.flatten(1) for grads in expected.values()], 1))
    assert module._trainer is None


@pytest.mark.parametrize("base", [LightningDataModule, pl.LightningDataModule])
def test_a_data_module_is_no_loader(base, tmp_path):
    with pytest.raises(OptionError) as refused:
        collect_gradients(Foreign(), type("Data", (base,), {})(), tmp_path / "store")
    assert str(refused.value) == (
        "dataloader is the LightningDataModule Data, which has several: call its setup('fit') and pass one of its "
        "loaders, e.g. dataloader=datamodule.train_dataloader()"
    )
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "loss", ["training_step", lambda m, b: F.cross_entropy(m.network(b[0]), b[1], reduction="none")]
)
def test_a_loss_of_each_sample_is_no_loss_of_the_batch(loss, tmp_path):
    module, given = Foreign(), None if loss == "training_step" else loss
    if given is None:
        module.training_step = lambda batch, batch_idx: F.cross_entropy(
            module.network(batch[0]), batch[1], reduction="none"
        )
    with pytest.raises(OptionError) as refused:
        collect_gradients(module, loader(), tmp_path / "store", loss=given)
    name = "Foreign.training_step" if given is None else "loss(module, batch)"
    assert str(refused.value) == (
        f"{name} gave a loss of shape (8,); allowed is one number, the loss of the batch: reduce it, with .mean() for "
        "loss_reduction='mean' or .sum() for 'sum'"
    )
