"""Columns that a run adds to its ledger."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_persample import PerSampleGradientWriter, PerSampleWarning
from lightning_persample.influence import read_ledger
from tests.callbacks.ledger_runs import Noted, data, fit


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "ledger"


def test_columns_of_a_callable(folder):
    def columns(outputs, batch):
        losses = outputs["per_sample"]["loss"]
        return {"twice": 2 * losses.float(), "rough": losses.bfloat16(), "label": batch[1]}

    loader = data(shuffle=True)
    fit(PerSampleGradientWriter(folder, columns=columns), loader=loader)
    labels = loader.dataset.tensors[1].tolist()
    for row in read_ledger(folder).to_pylist():
        assert row["twice"] == pytest.approx(2 * row["loss"], rel=1e-6)
        assert row["rough"] == torch.tensor(row["loss"], dtype=torch.float64).bfloat16().item()
        assert row["label"] == labels[row["sample_index"]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_column_of_numbers_keeps_ints_that_come_later(folder, dtype):
    large = 2**30 + 1  # which no narrow float holds

    seen: list[int] = []

    def columns(outputs, batch):
        seen.append(len(batch[0]))
        return {
            "mixed": torch.full((seen[-1],), 0.5, dtype=dtype) if len(seen) == 1 else torch.full((seen[-1],), large)
        }

    fit(PerSampleGradientWriter(folder, columns=columns), loader=data(8))
    found = read_ledger(folder)["mixed"].to_pylist()
    assert found[:4] == [0.5] * 4
    assert set(found[4:]) == {float(large)}


def test_a_column_may_be_missing_later(folder):
    class Sometimes(Noted):
        def training_step(self, batch, batch_idx):
            found = super().training_step(batch, batch_idx)
            if batch_idx % 2:
                del found["per_sample"]
            return found

    fit(PerSampleGradientWriter(folder), Sometimes(), data(8, 2))
    assert [value is None for value in read_ledger(folder)["loss"].to_pylist()] == [False, False, True, True] * 2


def by_hand(network, inputs, labels):
    """The columns that are chosen by name, sample by sample, by their formulas."""
    found = {"loss": [], "el2n": [], "margin": []}
    for x, y in zip(inputs, labels.tolist(), strict=True):
        outputs = network(x).tolist()
        total = sum(math.exp(each) for each in outputs)
        p = [math.exp(each) / total for each in outputs]
        found["loss"].append(-math.log(p[y]))
        found["el2n"].append(math.sqrt(sum((each - (c == y)) ** 2 for c, each in enumerate(p))))
        found["margin"].append(outputs[y] - max(each for c, each in enumerate(outputs) if c != y))
    return found


class Plain(Noted):
    """Returns the loss alone, made as asked."""

    def __init__(self, loss=F.cross_entropy, network=None):
        super().__init__()
        self.network = network or self.network
        self.loss, self.expected = loss, {"loss": [], "el2n": [], "margin": []}

    def on_train_batch_start(self, batch, batch_idx):
        for name, values in by_hand(self.network, *batch[:2]).items():
            self.expected[name] += values

    def training_step(self, batch, batch_idx):
        return self.loss(self.network(batch[0]), batch[1])


def nll(outputs, labels):
    return F.nll_loss(outputs.log_softmax(1), labels)


def smoothed(outputs, labels):
    return F.cross_entropy(outputs, target=labels, label_smoothing=0.3)


def of_module(outputs, labels):
    return nn.CrossEntropyLoss()(outputs, labels) + 0.1 * outputs.square().mean()


@pytest.mark.parametrize("loss", [F.cross_entropy, nll, smoothed, of_module])
@pytest.mark.parametrize("options", [{}, {"engine": "loop"}, {"max_samples": 2}], ids=str)
def test_columns_by_name_are_those_of_the_formulas(loss, options, folder):
    module = Plain(loss)
    fit(PerSampleGradientWriter(folder, columns=("margin", "loss", "el2n"), **options), module)
    found = read_ledger(folder).to_pandas()
    places = found["batch_idx"] * 4 + found["row"]
    assert list(found.columns[-3:]) == ["margin", "loss", "el2n"]
    assert len(found) == (22 if "max_samples" not in options else 12)
    for name, values in module.expected.items():
        np.testing.assert_allclose(found[name], np.array(values)[places], rtol=1e-12)


def test_columns_by_name_leave_the_training_and_the_values_as_they_are(folder):
    norms, weights = [], []
    for columns in (None, ("loss", "el2n", "margin")):
        module = Plain()
        fit(PerSampleGradientWriter(folder, columns=columns, overwrite=True), module)
        norms.append(read_ledger(folder)["norm"].to_pylist())
        weights.append(nn.utils.parameters_to_vector(module.parameters()))
    assert norms[0] == norms[1]
    assert torch.equal(*weights)


def test_a_label_that_is_ignored_has_no_values(folder):
    class Ignores(Plain):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.network(batch[0]), batch[1].where(batch[2] % 4 != 1, -100), reduction="sum") / 4

    module = Ignores()
    fit(PerSampleGradientWriter(folder, columns=["loss", "el2n", "margin"]), module, data(8))
    found = read_ledger(folder).to_pandas()
    for name in ("loss", "el2n", "margin"):
        np.testing.assert_allclose(found[name], np.where(found["row"] == 1, np.nan, module.expected[name]), rtol=1e-12)


def test_what_training_step_returns_under_a_name_takes_its_place(folder):
    class Returns(Plain):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "per_sample": {"loss": torch.arange(len(batch[0])), "other": batch[2]}}

    module = Returns()
    fit(PerSampleGradientWriter(folder, columns=("loss", "el2n")), module, data(8))
    found = read_ledger(folder).to_pandas()
    assert found["loss"].tolist() == found["row"].tolist()
    assert found["other"].tolist() == found["sample_index"].tolist()
    np.testing.assert_allclose(found["el2n"], module.expected["el2n"], rtol=1e-12)


def test_backwards_of_manual_optimization_have_the_values_of_their_own_loss(folder):
    class Twice(Plain):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for sign in (1, -1):
                self.optimizers().zero_grad()
                self.manual_backward(F.cross_entropy(sign * self.network(batch[0]), batch[1]))
                if sign < 0:
                    self.optimizers().step()

    module = Twice()
    fit(PerSampleGradientWriter(folder, columns=("loss",)), module, data(8))
    found = read_ledger(folder).to_pandas()
    first, second = (found[found["backward_index"] == n].sort_values("step") for n in (0, 1))
    np.testing.assert_allclose(first["loss"], module.expected["loss"], rtol=1e-12)
    assert np.abs(second["loss"].to_numpy() - first["loss"].to_numpy()).min() > 1e-3


UNREAD = "columns of the ledger are nan: 'loss', 'margin' cannot be read, because "


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda f, y: F.cross_entropy(f, y) + F.cross_entropy(2 * f, y), "once, and it calls them 2 times; let traini"),
        (lambda f, y: F.mse_loss(f, F.one_hot(y, f.shape[1]).double()), "once, and it calls neither; let training_st"),
        (
            lambda f, y: F.cross_entropy(f, F.one_hot(y, f.shape[1]).double()),
            r"F\.cross_entropy takes outputs \(4, 4\) and labels \(4, 4\) of torch\.float64: they are read of outputs",
        ),
        (lambda f, y: F.cross_entropy(f.repeat(2, 1), y.repeat(2)), "the loss has 8 rows, but the batch has 4 sam"),
    ],
)
@pytest.mark.filterwarnings("ignore:Samples of a batch influence each other")
def test_columns_by_name_that_cannot_be_read_are_nan_and_named(loss, why, folder):
    with pytest.warns(PerSampleWarning, match=UNREAD + ".*" + why):
        fit(PerSampleGradientWriter(folder, columns=("loss", "margin")), Plain(loss), data(8))
    assert all(math.isnan(value) for name in ("loss", "margin") for value in read_ledger(folder)[name].to_pylist())
