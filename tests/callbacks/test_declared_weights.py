"""A function given as loss_reduction is compared with the loss of training_step, without a second pass."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_persample.callbacks import PerSampleGradientMonitor, collect_gradients
from lightning_persample.callbacks.observed_step import ObservedStep
from lightning_persample.capture.mode import Capture
from lightning_persample.errors import PerSampleWarning, UnsupportedError
from tests.callbacks.runs import CLASSES, Classifier, Recorder, fit

WEIGHTS = torch.arange(1.0, 1 + CLASSES)
DIFFERENT = "The samples are weighted differently from loss_reduction"
TOKENS = torch.randint(1, 7, (48, 6)).masked_fill(torch.arange(6) >= torch.randint(2, 7, (48, 1)), 0)


class NextToken(Classifier):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7)))

    def training_step(self, batch, batch_idx):
        logits = self.network(batch[0][:, :-1]).transpose(1, 2)
        return F.cross_entropy(logits, batch[0][:, 1:], ignore_index=0)


class ByClass(Classifier):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.network(batch[0]), batch[1], weight=WEIGHTS)


def shares(outputs, batch):
    counts = (batch[0][:, 1:] != 0).sum(1)
    return counts / counts.sum()


def counts(outputs, batch):
    return (batch[0][:, 1:] != 0).sum(1)


def unshifted(outputs, batch):
    return (batch[0] != 0).sum(1) / (batch[0] != 0).sum()


def of_classes(outputs, batch):
    return WEIGHTS[batch[1]] / WEIGHTS[batch[1]].sum()


def texts_of(module, callback, **settings):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, [callback], **settings)
    return [str(each.message) for each in caught if each.category is PerSampleWarning]


def tokens(size=8):
    return {"data": DataLoader(TensorDataset(TOKENS), size)}


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 3}, {"precision": "bf16-mixed"}])
def test_right_weights_are_no_trouble(settings):
    for module, weights, data in ((NextToken(), shares, tokens()), (ByClass(), of_classes, {})):
        recorder = Recorder(loss_reduction=weights)
        assert texts_of(module, recorder, **data, **settings) == []
        assert recorder.records
        assert all(record.weighting == () for record in recorder.records)


@pytest.mark.parametrize("weights", [counts, unshifted])
@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 3}])
def test_other_weights_are_said_once_and_stand_in_every_record(weights, settings):
    recorder = Recorder(loss_reduction=weights)
    (text,) = texts_of(NextToken(), recorder, **tokens(), **settings)
    assert text.startswith(f"{DIFFERENT}, so their own gradients are off by a factor")
    assert "verify=True compares them sample by sample.\n- the weights that loss_reduction gives add up to " in text
    assert len(recorder.records) == 6
    assert {record.weighting for record in recorder.records} == {recorder.records[0].weighting}
    assert recorder.records[0].weighting[0] in text


def test_they_are_compared_at_steps_1_2_4_and_so_on(monkeypatch):
    compared, opened = [], []
    compare, start = Capture.compare_weights, ObservedStep.__init__
    monkeypatch.setattr(Capture, "compare_weights", lambda self: compared.append(len(opened)) or compare(self))
    monkeypatch.setattr(
        ObservedStep, "__init__", lambda self, *args, **options: opened.append(1) or start(self, *args, **options)
    )
    assert texts_of(NextToken(), Recorder(loss_reduction=shares), **tokens(4)) == []
    assert (len(opened), compared) == (12, [1, 2, 4, 8])
    opened.clear(), compared.clear()
    texts_of(NextToken(), Recorder(loss_reduction=counts), **tokens(4))
    assert (len(opened), compared) == (12, [1])


def test_a_store_of_gradients_is_not_written_with_other_weights(tmp_path):
    loader = tokens()["data"]
    collect_gradients(NextToken(), loader, tmp_path / "right", loss_reduction=shares)
    with pytest.raises(UnsupportedError, match=DIFFERENT):
        collect_gradients(NextToken(), loader, tmp_path / "wrong", loss_reduction=counts)


def test_weights_of_another_shape_name_the_option():
    text = "the weights that loss_reduction gives have shape (8, 6); allowed is one weight per sample, (8,)"
    assert texts_of(NextToken(), Recorder(loss_reduction=lambda _, batch: batch[0] != 0), **tokens()) == [text]


def test_the_warning_on_nan_statistics_names_the_same_remedy():
    first, second = texts_of(ByClass(), PerSampleGradientMonitor())
    example = re.escape("as w[batch[1]] / w[batch[1]].sum() for class weights w (losses.md in the guide has more)")
    assert first.startswith(DIFFERENT)
    assert re.search(example, first)
    assert second.startswith("noise_scale, diversity of `per_sample_grad` are nan at steps where `cross_entropy_loss`")
    assert second.endswith("; give loss_reduction, as above")
