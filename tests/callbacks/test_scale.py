"""Logged values are those of each sample's own loss, whatever multiplies the training loss."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_persample.callbacks import PerSampleGradientMonitor
from tests.callbacks.runs import Classifier, Recorder, WithReference, column, fit, loader, logged, of_norms

QUANTILES = (0.5, 0.95, 0.999)


def assert_logged(trainer, reference, tolerance=1e-5):
    """Every logged statistic is that of the reference norms of its optimizer step."""
    rows = logged(trainer)
    assert len(rows) == len(reference)
    for row, norms in zip(rows, reference, strict=True):
        expected = of_norms(norms, QUANTILES) | {"coverage": 1.0}
        found = {name.removeprefix("per_sample_grad/"): value for name, value in row.items() if name != "step"}
        assert found.keys() - expected.keys() <= {"norm_of_mean", "noise_scale", "diversity"}  # see test_statistics
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=tolerance, nan_ok=True)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_mean_and_sum_with_accumulation_and_a_trailing_window(reduction, accumulate, tmp_path):
    module = WithReference(reduction=reduction, lr=0.02)
    monitor = PerSampleGradientMonitor(loss_reduction=reduction, quantiles=QUANTILES)
    # 5 batches of 8, 8, 8, 8 and 3 samples in each of two epochs: windows of 16, 16 and 3 when two are accumulated.
    trainer = fit(module, [monitor], tmp_path, loader(35), accumulate_grad_batches=accumulate, max_epochs=2)
    epochs = (module.reference[:5], module.reference[5:])
    windows = [torch.cat(epoch[i : i + accumulate]) for epoch in epochs for i in range(0, 5, accumulate)]
    assert_logged(trainer, windows)


def test_accumulating_more_batches_than_an_epoch_has(tmp_path):
    module = WithReference()
    trainer = fit(module, [PerSampleGradientMonitor(quantiles=QUANTILES)], tmp_path, accumulate_grad_batches=10)
    assert_logged(trainer, [torch.cat(module.reference)])


def test_an_accumulated_step_equals_one_big_batch(tmp_path):
    torch.manual_seed(5)
    network = nn.Linear(6, 4)
    values = []
    for name, batch_size, accumulate in (("small", 4, 3), ("big", 12, 1)):
        module = Classifier(nn.Sequential(nn.Linear(6, 4)))
        module.network[0].load_state_dict(network.state_dict())
        data = loader(12, batch_size)
        trainer = fit(module, [PerSampleGradientMonitor()], tmp_path / name, data, accumulate_grad_batches=accumulate)
        (row,) = logged(trainer)
        values.append(row)
    assert values[0] == pytest.approx(values[1], rel=1e-5, nan_ok=True)


class MaskedTokens(WithReference):
    """A loss over tokens: the mean over all unmasked tokens of the batch, so that long samples weigh more."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Embedding(7, 5), nn.LayerNorm(5), nn.Linear(5, 7)))

    def losses(self, tokens):
        return F.cross_entropy(self.network(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")

    def training_step(self, batch, batch_idx):
        tokens, mask = batch
        return {"loss": (self.losses(tokens) * mask).sum() / mask.sum(), "tokens": mask.sum()}

    def sample_loss(self, batch, i):
        tokens, mask = (tensor[i : i + 1] for tensor in batch)
        return (self.losses(tokens) * mask).sum() / mask.sum()


def token_weights(outputs, batch):
    counts = batch[1].sum(1)
    return counts / outputs["tokens"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_callable_weights_give_the_gradient_of_each_samples_token_mean(accumulate, tmp_path):
    tokens = torch.randint(0, 7, (18, 6))
    mask = (torch.arange(5) < torch.randint(1, 6, (18, 1))).float()
    data = DataLoader(TensorDataset(tokens, mask), batch_size=6)
    module = MaskedTokens()
    monitor = PerSampleGradientMonitor(loss_reduction=token_weights, quantiles=QUANTILES, statistics=())
    trainer = fit(module, [monitor], tmp_path, data, accumulate_grad_batches=accumulate)
    windows = [torch.cat(module.reference[i : i + accumulate]) for i in range(0, 3, accumulate)]
    assert_logged(trainer, windows)


class Tripled(WithReference):
    def backward(self, loss, *args, **kwargs):
        (3 * loss).backward(*args, **kwargs)


def test_a_factor_in_the_users_own_backward_is_not_left_in(tmp_path):
    module = Tripled()
    trainer = fit(module, [PerSampleGradientMonitor(quantiles=QUANTILES)], tmp_path, accumulate_grad_batches=2)
    assert_logged(trainer, [torch.cat(module.reference[:2]), module.reference[2]])


def test_the_loss_scale_of_mixed_precision_is_not_left_in(tmp_path):
    module = WithReference()
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=512.0))
    monitor = PerSampleGradientMonitor(quantiles=QUANTILES)
    trainer = fit(module, [monitor], tmp_path, plugins=[plugin], accumulate_grad_batches=2)
    assert_logged(trainer, [torch.cat(module.reference[:2]), module.reference[2]], tolerance=2e-2)


def test_a_batch_of_one_has_a_norm_but_no_deviation(tmp_path):
    module = WithReference()
    trainer = fit(module, [PerSampleGradientMonitor(quantiles=QUANTILES)], tmp_path, loader(3, 1))
    assert_logged(trainer, module.reference)
    assert all(math.isnan(value) for value in column(trainer, "per_sample_grad/norm_std"))


def test_groups_are_norms_over_the_parameters_of_a_layer(tmp_path):
    module = Classifier()
    recorder = Recorder(quantities=("grad_sample",))
    trainer = fit(module, [PerSampleGradientMonitor(per_layer=2), recorder], tmp_path, accumulate_grad_batches=3)
    (row,) = logged(trainer)
    for layer in ("network.0", "network.2"):
        per_batch = [
            torch.cat([record.grad_samples[f"{layer}.{kind}"].flatten(1) for kind in ("weight", "bias")], dim=1)
            for record in recorder.records
        ]
        norms = torch.linalg.vector_norm(torch.cat(per_batch), dim=1)
        assert row[f"per_sample_grad/{layer}/norm_mean"] == pytest.approx(norms.mean().item(), rel=1e-5)


def test_samples_with_a_non_finite_norm_are_counted_and_left_out(tmp_path):
    data = loader(8, 8)
    data.dataset.tensors[0][2] = math.inf
    module = WithReference(nn.Sequential(nn.Linear(6, 4)), lr=0.0)
    trainer = fit(module, [PerSampleGradientMonitor(per_layer=2)], tmp_path, data)
    (row,) = logged(trainer)
    finite = module.reference[0][module.reference[0].isfinite()]
    assert len(finite) == 7
    assert row["per_sample_grad/nonfinite"] == 1
    assert row["per_sample_grad/norm_mean"] == pytest.approx(finite.mean().item(), rel=1e-5)
    assert row["per_sample_grad/norm_max"] == pytest.approx(finite.max().item(), rel=1e-5)
    assert row["per_sample_grad/network.0/norm_mean"] == pytest.approx(finite.mean().item(), rel=1e-5)


class OfOtherSizes(WithReference):
    """Returns a loss that is not one number without axes, and goes backward from it as it must be."""

    def __init__(self, sizes: str) -> None:
        super().__init__()
        self.sizes = sizes

    def training_step(self, batch, batch_idx):
        losses = F.cross_entropy(self.network(batch[0]), batch[1], reduction="none")
        return losses.mean().view(1) if self.sizes == "one" else losses

    def backward(self, loss):
        weights = torch.arange(1.0, 1.0 + loss.numel()) if self.sizes == "weighed" else torch.ones(loss.numel())
        loss.backward(weights / weights.sum())


@pytest.mark.parametrize("sizes", ["one", "per sample", "weighed"])
@pytest.mark.parametrize("quantities", [("sq_norm",), ("sq_norm", "grad_sample")])
def test_a_loss_of_one_entry_or_of_one_per_sample(sizes, quantities):
    module, recorder = OfOtherSizes(sizes), Recorder(1, quantities=quantities)
    fit(module, [recorder])
    assert len(recorder.records) == 3
    for record, expected in zip(recorder.records, module.reference, strict=True):
        torch.testing.assert_close(record.norms(), expected)
        assert record.weighting == ()
