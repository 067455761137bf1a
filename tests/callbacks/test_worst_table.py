"""The table of the worst samples, read back from what loggers wrote."""

from __future__ import annotations

import csv
import json

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from lightning_persample.callbacks import PerSampleGradientMonitor
from tests.callbacks.runs import Classifier, fit
from tests.callbacks.written_media import read_tensorboard, read_wandb

pytest.importorskip("tensorboard")
wandb = pytest.importorskip("wandb")


def test_the_worst_samples_are_a_table_in_the_loggers_that_have_tables(tmp_path, monkeypatch):
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monitor = PerSampleGradientMonitor(every_n_steps=1, worst_samples=3)
    offline = wandb.Settings(silent=True, disable_git=True, console="off")
    loggers = [
        CSVLogger(tmp_path, "csv"),
        TensorBoardLogger(tmp_path, "tensorboard"),
        WandbLogger(save_dir=tmp_path, offline=True, settings=offline),
    ]
    fit(Classifier(), [monitor], logger=loggers)
    wandb.finish()
    worst = monitor.worst(3)
    (file,) = tmp_path.rglob("worst_samples.csv")
    with file.open(newline="") as opened:
        written = list(csv.reader(opened))
    assert written[0] == list(worst.columns)
    assert [int(row[0]) for row in written[1:]] == list(worst.index)
    (table,) = read_tensorboard(tmp_path / "tensorboard").Tensors("worst_samples/text_summary")
    lines = table.tensor_proto.string_val[0].decode().splitlines()
    assert lines[0] == "| index | mean | last | seen | nonfinite |"
    assert [int(line.split("|")[1]) for line in lines[2:]] == list(worst.index)
    rows, files = read_wandb(tmp_path)
    (row,) = (row for row in rows if "worst_samples/path" in row)
    found = json.loads((files / row["worst_samples/path"]).read_text())
    assert found["columns"] == list(worst.columns)
    assert [each[0] for each in found["data"]] == list(worst.index)
