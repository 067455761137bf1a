"""The table of the worst samples, read back from what loggers wrote."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from PIL import Image

from lightning_persample.callbacks import PerSampleGradientMonitor, loggers
from tests.callbacks.runs import Classifier, fit
from tests.callbacks.written_media import read_tensorboard, read_wandb

pytest.importorskip("tensorboard")
wandb = pytest.importorskip("wandb")


def test_the_worst_samples_are_a_table_in_the_loggers_that_have_tables(tmp_path, monkeypatch):
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monitor = PerSampleGradientMonitor(every_n_steps=1, worst_samples=3)
    offline = wandb.Settings(silent=True, disable_git=True, console="off")
    writers = [
        CSVLogger(tmp_path, "csv"),
        TensorBoardLogger(tmp_path, "tensorboard"),
        WandbLogger(save_dir=tmp_path, offline=True, settings=offline),
    ]
    fit(Classifier(), [monitor], logger=writers)
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


def grey(index):
    return torch.full((1, 4, 4), index * 10.0) / 255


def test_pictures_of_the_worst_samples_go_where_pictures_are_shown(tmp_path, monkeypatch):
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    tables, log = [], loggers._log_to_wandb  # (pictures are no part of the table's file)
    monkeypatch.setattr(loggers, "_log_to_wandb", lambda *args, **table: tables.append(table) or log(*args, **table))
    monitor = PerSampleGradientMonitor(
        1, worst_samples=9, render=lambda index: torch.full((1, 4, 4), index * 10.0) / 255
    )
    offline = wandb.Settings(silent=True, disable_git=True, console="off")
    writers = [
        TensorBoardLogger(tmp_path / "tensorboard"),
        WandbLogger(save_dir=tmp_path, offline=True, settings=offline),
    ]
    fit(Classifier(), [monitor], logger=writers)
    wandb.finish()
    index = monitor.worst(9).index
    (event,) = read_tensorboard(tmp_path / "tensorboard").Images("worst_samples_pictures")
    pixels = np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))
    assert pixels.shape == (2 * 120, 8 * 120, 3)
    for place, sample in enumerate(index):
        top, left = 120 * (place // 8), 120 * (place % 8)
        assert (pixels[top + 4 : top + 100, left + 12 : left + 108] == 10 * sample).all()
        assert (pixels[top + 104 : top + 112, left + 12 : left + 60] < 128).any()  # its caption
    (table,) = tables
    assert table["columns"] == [*monitor.worst(9).columns, "picture"]
    for sample, line in zip(index, table["data"], strict=True):
        assert line[0] == sample
        assert (np.asarray(line[-1].image) == 10 * sample).all()


def test_texts_of_the_worst_samples_are_a_column(tmp_path):
    monitor = PerSampleGradientMonitor(1, worst_samples=2, render=lambda index: f"text | of {index}")
    fit(Classifier(), [monitor], logger=TensorBoardLogger(tmp_path))
    (file,) = tmp_path.rglob("worst_samples.csv")
    with file.open(newline="") as opened:
        header, *rows = csv.reader(opened)
    assert header[-1] == "sample"
    assert [row[-1] for row in rows] == [f"text | of {index}" for index in monitor.worst(2).index]
    events = read_tensorboard(tmp_path)
    (table,) = events.Tensors("worst_samples/text_summary")
    assert table.tensor_proto.string_val[0].decode().splitlines()[0].endswith("| nonfinite | sample |")
    assert events.Tags()["images"] == []
