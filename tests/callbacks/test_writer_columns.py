"""Columns that a run adds to its ledger."""

from __future__ import annotations

import pytest
import torch

from lightning_persample import PerSampleGradientWriter
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
