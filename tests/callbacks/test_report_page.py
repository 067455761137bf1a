"""The page that a monitor writes at the end of a fit."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lightning_persample.callbacks import InRunInfluence, PerSampleGradientMonitor, PerSampleGradientWriter
from lightning_persample.errors import OptionError, PerSampleWarning
from lightning_persample.influence import charts, optional_packages
from tests.callbacks.runs import Classifier, WithReference, column, fit, loader
from tests.callbacks.ways import BATCH, GAN, Way, run


@pytest.fixture(autouse=True)
def unsaved(monkeypatch):
    """Charts are not drawn, which takes a second for each page."""
    monkeypatch.setattr(charts, "svg", lambda name, *_: f"<svg>{name}</svg>")


def page_of(trainer):
    return (Path(trainer.log_dir) / "report.html").read_text("utf-8")


def numbers(page):
    return json.loads(re.search(r'(?s)id="numbers">(.*?)</script>', page)[1])


def test_a_monitor_alone_shows_the_norms_that_plain_autograd_gives(tmp_path):
    module = WithReference()
    labels = {"label": torch.arange(24) % 5}
    monitor = PerSampleGradientMonitor(report=True, per_layer=2, render=lambda index: f"picture {index}", labels=labels)
    trainer = fit(module, [monitor], tmp_path, max_epochs=2)
    page, reference = page_of(trainer), torch.stack(module.reference).double().numpy()
    found = numbers(page)
    assert len(reference) == 6
    for name, quantile in (("p5", 0.05), ("p50", 0.5), ("p95", 0.95)):
        np.testing.assert_allclose(found["bands"][name], np.quantile(reference, quantile, axis=1), rtol=1e-4)
    steps, values = found["logged"]["per_sample_grad/noise_scale"]
    assert steps == list(range(6))
    np.testing.assert_allclose(
        np.array(values, float), column(trainer, "per_sample_grad/noise_scale"), rtol=1e-4, equal_nan=True
    )
    assert found["layers"]["names"] == ["network.0", "network.2"]
    expected = column(trainer, "per_sample_grad/network.0/norm_mean")
    np.testing.assert_allclose(found["layers"]["mean"][0], expected, rtol=1e-4)
    by_sample = reference.reshape(2, 24).mean(0)  # no shuffling: the rows are the samples
    rows = [dict(zip(found["samples"]["columns"], row, strict=True)) for row in found["samples"]["rows"]]
    assert [row["index"] for row in rows] == np.argsort(-by_sample).tolist()
    np.testing.assert_allclose([row["mean norm"] for row in rows], np.sort(by_sample)[::-1], rtol=1e-4)
    assert rows[0]["sample"] == f"picture {rows[0]['index']}"
    assert [row["label"] for row in rows] == [row["index"] % 5 for row in rows]
    assert "24 of 24 samples captured, 2 times each: all of the dataset. Rank 1 has" in page
    assert "not comparable" not in page
    assert "<dd>8</dd>" not in page
    assert "<b>8</b><span>batch size</span>" in page


class WithLosses(Classifier):
    def training_step(self, batch, batch_idx):
        losses = nn.functional.cross_entropy(self.network(batch[0]), batch[1], reduction="none")
        return {"loss": losses.mean(), "per_sample": {"loss": losses}}


def test_with_a_writer_the_page_is_of_the_ledger(tmp_path):
    monitor = PerSampleGradientMonitor(2, report=True)
    trainer = fit(WithLosses(), [monitor, PerSampleGradientWriter(tmp_path / "ledger")], tmp_path, max_epochs=2)
    found = numbers(page_of(trainer))
    assert len(found["bands"]["p50"]) == 6  # every step, and not those alone that were logged
    assert len(found["logged"]["per_sample_grad/noise_scale"][0]) == 3
    assert found["scores"]["samples"] == 24
    assert "24 of 24 samples captured, 2 times each: all of the dataset. Rank 1 has" in page_of(trainer)
    assert "The ledger lacks" not in page_of(trainer)


def test_a_ledger_without_norms_is_passed_over(tmp_path):
    validation = InRunInfluence(tmp_path / "in_run", loader())
    trainer = fit(Classifier(), [validation, PerSampleGradientMonitor(2, report=True)], tmp_path, max_epochs=2)
    assert len(numbers(page_of(trainer))["bands"]["p50"]) == 3  # of the logged steps
    monitor, writer = PerSampleGradientMonitor(2, report=True), PerSampleGradientWriter(tmp_path / "ledger")
    validation = InRunInfluence(tmp_path / "other", loader())
    trainer = fit(Classifier(), [validation, monitor, writer], tmp_path / "second", max_epochs=2)
    assert len(numbers(page_of(trainer))["bands"]["p50"]) == 6


def test_a_page_of_some_steps_says_which_samples_compare(tmp_path):
    trainer = fit(Classifier(), [PerSampleGradientMonitor(2, report=True)], tmp_path, max_epochs=1)
    assert "8 of 8 samples captured, once each; 16 of the dataset never. Rank 1 has" in page_of(trainer)
    assert "Norms change in a training: samples that were captured at different times are not" in page_of(trainer)


class Mixed(Classifier):
    """Normalizes over the batch, which is warned of."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)))


def test_warnings_of_the_fit_are_in_the_page(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(Mixed(), [PerSampleGradientMonitor(report=True)], tmp_path)
    said = [str(each.message) for each in caught if each.category is PerSampleWarning]
    assert any("network.1" in text for text in said)
    assert "network.1" in re.search(r'(?s)<section id="warnings">.*?</section>', page_of(trainer))[0]


def test_training_is_untouched_and_nothing_is_written_unless_asked(tmp_path):
    weights = []
    for report in (False, True):
        torch.manual_seed(0)
        module = Classifier()
        trainer = fit(module, [PerSampleGradientMonitor(report=report)], tmp_path)
        weights.append([parameter.detach().clone() for parameter in module.parameters()])
        assert (Path(trainer.log_dir) / "report.html").exists() == report
    assert all(map(torch.equal, *weights))


def test_a_fit_without_a_logged_step_has_a_page_that_says_so(tmp_path):
    with pytest.warns(PerSampleWarning, match="has logged nothing: the fit had 3 optimizer steps"):
        trainer = fit(Classifier(), [PerSampleGradientMonitor(report=True)], tmp_path, log_every_n_steps=50)
    assert "captured steps" in page_of(trainer)
    assert "No norms of samples are here" in page_of(trainer)
    assert "the fit had 3 optimizer steps, and the Trainer&#x27;s log_every_n_steps is 50" in page_of(trainer)


def test_optimizers_have_a_curve_each(tmp_path):
    page = page_of(run(Way(GAN), [PerSampleGradientMonitor(1, report=True)], tmp_path, with_reference=False).trainer)
    assert {"per_sample_grad/optimizer_0/coverage", "per_sample_grad/optimizer_1/coverage"} <= set(
        numbers(page)["logged"]
    )
    assert f"<b>{BATCH}</b><span>batch size</span>" in page  # and not the samples of both
    assert "but not in manual optimization" in page


def test_a_page_that_cannot_be_written_costs_a_warning(tmp_path):
    (tmp_path / "report.html" / "in the way").mkdir(parents=True)
    with pytest.warns(PerSampleWarning, match=r"report.html is not written: .*report.html"):
        trainer = fit(Classifier(), [PerSampleGradientMonitor(report=True)], default_root_dir=tmp_path)
    assert trainer.global_step == 3


def test_fast_dev_run_writes_none(tmp_path):
    fit(Classifier(), [PerSampleGradientMonitor(1, report=True)], fast_dev_run=True, default_root_dir=tmp_path)
    assert not list(tmp_path.rglob("report.html"))


def test_what_draws_the_page_is_missed_before_the_fit(monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(optional_packages.importlib, "import_module", absent)
    with pytest.raises(OptionError, match=r"a report is drawn by matplotlib, which is not installed: pip install"):
        fit(Classifier(), [PerSampleGradientMonitor(report=True)], data=loader())
