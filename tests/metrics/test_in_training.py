"""Metrics fed in a training loop and logged by a Trainer, against the loop over single samples in float64."""

from __future__ import annotations

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_persample import expanded_weights, loop_per_sample_grads
from lightning_persample.metrics import GradientDiversity, GradientNoiseScale, PerSampleNorm
from tests.metrics import reference
from tests.models import mlp

STEPS, BATCH_SIZE = 4, 8


def sq_norm_of_grad(module):
    return sum(parameter.grad.square().sum() for parameter in module.parameters())


def test_accumulated_batches_of_records():
    module, make_batch, loss_fn = mlp()
    metric, norm, expected = GradientNoiseScale(decay=0.5), PerSampleNorm(quantiles=()), []
    for _ in range(STEPS):
        batch, records = make_batch(BATCH_SIZE), []
        expected.append(reference.flat(loop_per_sample_grads(module, loss_fn, *batch)[1]).numpy())
        for micro_batch in zip(*(each.split(BATCH_SIZE // 2) for each in batch), strict=True):
            with expanded_weights(module, micro_batch) as capture:
                loss = loss_fn(module, *micro_batch)
                capture.attach_loss(loss)  # reads that the gradient accumulates halves
                (loss / 2).backward()
            records.append(capture.record)
        mean = sq_norm_of_grad(module)
        for record in records:
            metric.update(record.norms().square(), mean, batch_size=BATCH_SIZE)
            norm.update(record.norms())
        module.zero_grad()
    S, G2 = zip(*map(reference.noise_scale_terms, expected), strict=True)
    found = metric.terms()
    assert found["S"].item() == pytest.approx(reference.moving_average(S, 0.5), rel=1e-10)
    assert found["G2"].item() == pytest.approx(reference.moving_average(G2, 0.5), rel=1e-10)
    assert metric.counts()["steps"].item() == STEPS
    norms = np.linalg.norm(np.concatenate(expected), axis=1)
    assert norm.compute()["mean"].item() == pytest.approx(norms.mean(), rel=1e-10)


class Logged(L.LightningModule):
    """Logs metric objects, as a user does; the Trainer computes and resets them at the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.make_batch, self.loss_fn = mlp()
        self.norm, self.diversity = PerSampleNorm(), GradientDiversity()
        self.expected = []

    def training_step(self, batch, batch_idx):
        grads = reference.flat(loop_per_sample_grads(self.network, self.loss_fn, *batch)[1])
        self.expected.append(grads.numpy())
        sq_norms, mean = reference.sq_norms(grads)
        self.diversity.update(sq_norms, mean, step=self.global_step)
        self.norm.update(sq_norms.sqrt())
        self.log("diversity", self.diversity, on_step=False, on_epoch=True)
        return self.loss_fn(self.network, *batch)

    def on_train_epoch_end(self):
        self.log_dict(self.norm.compute())
        self.norm.reset()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_trainer_logs_and_resets_them(tmp_path):
    module = Logged()
    batch = module.make_batch(STEPS * BATCH_SIZE)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        log_every_n_steps=1,
    )
    trainer.fit(module, DataLoader(TensorDataset(*batch), BATCH_SIZE))
    last = module.expected[STEPS:]
    logged = trainer.callback_metrics
    assert logged["diversity"].item() == pytest.approx(np.mean([reference.diversity(each) for each in last]), rel=1e-6)
    norms = np.linalg.norm(np.concatenate(last), axis=1)
    assert logged["mean"].item() == pytest.approx(norms.mean(), rel=1e-6)
    assert logged["count"].item() == STEPS * BATCH_SIZE
