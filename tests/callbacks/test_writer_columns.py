"""Columns that a run adds to its ledger."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_persample import OptionError, PerSampleGradientWriter, PerSampleWarning
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


def test_columns_in_memory_that_is_used_again(folder):
    kept, returned = torch.arange(4), torch.arange(4)

    class Counts(Noted):
        def training_step(self, batch, batch_idx):
            found = super().training_step(batch, batch_idx)
            returned.add_(4)
            return {**found, "per_sample": {**found["per_sample"], "returned": returned}}

    fit(PerSampleGradientWriter(folder, columns=lambda outputs, batch: {"own": kept.add_(4)}), Counts(), data(16))
    ledger = read_ledger(folder).sort_by([("step", "ascending"), ("row", "ascending")])
    for name in ("own", "returned"):
        assert ledger[name].to_pylist() == list(range(4, 4 + len(ledger)))


@pytest.mark.parametrize("kind", [list, np.array])
def test_what_training_step_returns_that_is_no_tensor_is_named(kind, folder):
    class Returns(Noted):
        def training_step(self, batch, batch_idx):
            found = super().training_step(batch, batch_idx)
            return {**found, "per_sample": {**found["per_sample"], "weights": kind([1.0] * len(batch[0]))}}

    named = kind([]).__class__.__name__
    text = f"training_step returned under 'per_sample' 'weights': {named}, but it must be a tensor (B,)"
    with pytest.raises(OptionError, match=re.escape(text)):
        fit(PerSampleGradientWriter(folder), Returns(), data(8))


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


UNREAD = "columns of the ledger are nan: 'loss', 'margin' cannot be read, because "


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


def unseen(outputs, labels):
    with torch.no_grad():
        F.cross_entropy(outputs, labels)
    return outputs.logsumexp(1).mean() - outputs.gather(1, labels[:, None]).mean()


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


def by_first_input(outputs, labels):
    order = outputs[:, 1].argsort()
    return F.cross_entropy(outputs[order], labels[order])


def in_halves(outputs, labels):
    return F.cross_entropy(torch.cat([outputs[2:], outputs[:2]]), torch.cat([labels[2:], labels[:2]]))


@pytest.mark.parametrize("loss", [by_first_input, in_halves])
@pytest.mark.parametrize("options", [{}, {"max_samples": 2}], ids=str)
def test_rows_in_another_order_are_followed_to_their_samples(loss, options, folder):
    module = Plain(loss)
    fit(PerSampleGradientWriter(folder, columns=("loss", "el2n", "margin"), **options), module)
    found = read_ledger(folder).to_pandas()
    places = found["batch_idx"] * 4 + found["row"]
    for name, values in module.expected.items():
        np.testing.assert_allclose(found[name], np.array(values)[places], rtol=1e-12)


class SortsFirst(Plain):
    """Sorts the samples before the network sees them, in a batch of two loaders with the second one first."""

    def on_train_batch_start(self, batch, batch_idx):
        for part in batch.values():
            super().on_train_batch_start(part, batch_idx)

    def training_step(self, batch, batch_idx):
        inputs, labels = (torch.cat([batch["b"][place], batch["a"][place]]) for place in (0, 1))
        order = inputs[:, 0].argsort()
        return self.loss(self.network(inputs[order]), labels[order])


def test_rows_of_several_loaders_in_another_order_are_followed_to_their_samples(folder):
    module = SortsFirst()
    fit(PerSampleGradientWriter(folder, columns=("loss", "margin")), module, {"a": data(8), "b": data(16, 2)})
    found = read_ledger(folder).to_pandas().sort_values(["step", "row"])
    assert len(found) == len(module.expected["loss"]) > 12
    for name in ("loss", "margin"):
        np.testing.assert_allclose(found[name], module.expected[name], rtol=1e-12)


def test_an_extra_pass_reads_columns_where_the_labels_are_those_of_the_batch(folder):
    with pytest.warns(PerSampleWarning, match=UNREAD + "an extra pass cannot follow rows, and the labels of the loss"):
        fit(PerSampleGradientWriter(folder, columns=("loss", "margin"), engine="loop"), Plain(by_first_input), data(8))
    assert read_ledger(folder).to_pandas()["loss"].isna().all()


def test_rows_that_influence_each_other_have_the_values_of_their_outputs(folder):
    class Normalizes(Plain):
        def training_step(self, batch, batch_idx):
            outputs = F.batch_norm(self.network(batch[0]), None, None, training=True)
            self.seen.append(F.cross_entropy(outputs.detach(), batch[1], reduction="none"))
            return F.cross_entropy(outputs, batch[1])

    module = Normalizes()
    module.seen = []
    with pytest.warns(PerSampleWarning, match="Samples of a batch influence each other"):
        fit(PerSampleGradientWriter(folder, columns=("loss",)), module, data(8))
    np.testing.assert_allclose(read_ledger(folder)["loss"].to_numpy(), torch.cat(module.seen), rtol=1e-12)


def test_labels_in_bytes_have_the_columns_of_their_classes(folder):
    module = Plain(lambda outputs, labels: F.cross_entropy(outputs, labels.to(torch.uint8)))
    fit(PerSampleGradientWriter(folder, columns=("loss", "el2n", "margin")), module)
    for name, values in module.expected.items():
        np.testing.assert_allclose(read_ledger(folder)[name].to_numpy(), values, rtol=1e-12)


def test_a_call_that_raises_or_has_no_gradient_is_not_the_loss(folder):
    def guarded(outputs, labels):
        with torch.no_grad():
            F.cross_entropy(2 * outputs, labels)
        F.cross_entropy(2 * outputs.detach(), labels)
        with pytest.raises(IndexError):
            F.cross_entropy(outputs, labels + 4)
        return F.cross_entropy(outputs, labels)

    module = Plain(guarded)
    fit(PerSampleGradientWriter(folder, columns=("loss",)), module)
    np.testing.assert_allclose(read_ledger(folder)["loss"].to_numpy(), module.expected["loss"], rtol=1e-12)


def test_one_class_has_no_margin(folder):
    module = Plain(lambda outputs, labels: F.cross_entropy(outputs[:, :1], 0 * labels))
    why = "columns of the ledger are nan: 'margin' cannot be read, because the outputs have one class, and no other"
    with pytest.warns(PerSampleWarning, match=why):
        fit(PerSampleGradientWriter(folder, columns=("loss", "margin")), module, data(8))
    found = read_ledger(folder).to_pandas()
    assert found["loss"].eq(0).all()
    assert found["margin"].isna().all()


def test_a_failure_of_reading_costs_the_columns_alone(folder, monkeypatch):
    def fails(*args):
        raise RuntimeError("of ours")

    monkeypatch.setattr("lightning_persample.callbacks.class_loss.class_columns", fails)
    with pytest.warns(PerSampleWarning, match=UNREAD + "reading the loss failed with RuntimeError: of ours; this is a"):
        fit(PerSampleGradientWriter(folder, columns=("loss", "margin")), Plain(), data(8))
    found = read_ledger(folder).to_pandas()
    assert found["loss"].isna().all()
    assert len(found) == 8
    assert found["norm"].notna().all()


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
        (
            lambda f, y: F.cross_entropy(f[[0, 0, 1, 1]], y[[0, 0, 1, 1]]),
            "some samples have several rows in the loss, and others none; let training_step",
        ),
        (lambda f, y: F.cross_entropy(f, y.flip(0)), "the loss pairs outputs with labels of other samples; let"),
        (
            lambda f, y: F.cross_entropy(f.sort(0).values, y),
            "not known whose the rows of its outputs are: `sort` works along the batch axis",
        ),
        (
            lambda f, y: F.cross_entropy(f.flip(0) + f.roll(1, 0), y.flip(0)),
            "in another order than the batch, and `add` combines different samples",
        ),
        (unseen, "once, and it calls neither; let training_step return them"),
    ],
)
@pytest.mark.filterwarnings("ignore:Samples of a batch influence each other")
def test_columns_by_name_that_cannot_be_read_are_nan_and_named(loss, why, folder):
    with pytest.warns(PerSampleWarning, match=UNREAD + ".*" + why):
        fit(PerSampleGradientWriter(folder, columns=("loss", "margin")), Plain(loss), data(8))
    assert all(math.isnan(value) for name in ("loss", "margin") for value in read_ledger(folder)[name].to_pylist())
