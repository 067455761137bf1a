"""Every example runs, quickly, and prints what it promises."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, output: Path) -> str:
    """The text an example prints with --fast; its logs and plots go to `output`."""
    return started(output, name, "--fast", "--output", str(output)).stdout


def started(output: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """An example that ran in the directory `output` without an error."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "PYTHONIOENCODING": "utf-8"}
    result = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", check=False, cwd=output, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result


def test_digits_norms_finds_the_flipped_labels(tmp_path):
    printed = run("digits_norms.py", tmp_path)
    flipped, clean = re.search(r"norm: ([\d.]+) of flipped samples, ([\d.]+) of clean", printed).groups()
    assert float(flipped) > 2 * float(clean)
    count, found = re.search(r"of the (\d+) samples with the largest norms, (\d+) have", printed).groups()
    assert int(found) > 0.8 * int(count)
    assert (tmp_path / "norms.png").read_bytes().startswith(b"\x89PNG")

    (log,) = tmp_path.glob("csv/version_0/metrics.csv")
    with log.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["per_sample_grad/norm_mean"]]
    assert [int(row["step"]) for row in rows] == list(range(9, 87, 10))
    assert all(float(row["per_sample_grad/coverage"]) == 1 for row in rows)
    assert all(float(row["per_sample_grad/nonfinite"]) == 0 for row in rows)
    assert list(tmp_path.glob("tensorboard/version_0/events*"))


def test_find_mislabelled_ranks_flipped_labels_first(tmp_path):
    pytest.importorskip("pyarrow")
    printed = run("find_mislabelled.py", tmp_path)
    table = {
        name: (float(auc), float(share))
        for name, auc, share in re.findall(r"^(\S.*?) +([\d.]+) +([\d.]+)$", printed, re.M)
    }
    assert list(table) == ["self-influence", "mean loss", "EL2N", "GraNd", "GraNd at initialisation"]
    assert table["self-influence"][0] >= 0.98
    assert table["self-influence"][1] >= 0.9
    assert 0.4 < table["GraNd at initialisation"][0] < 0.6
    assert re.search(r"^(\d+) rows of 1797 samples", printed, re.MULTILINE)[1] == str(5 * 1797)


def test_cli_trains_as_its_file_says(tmp_path):
    pytest.importorskip("jsonargparse")
    arguments = ["fit", "--config", str(EXAMPLES / "cli.yaml"), "--trainer.max_epochs", "2"]
    result = started(tmp_path, "cli.py", *arguments, "--trainer.enable_progress_bar", "false")
    assert "PerSampleWarning" not in result.stderr
    (log,) = tmp_path.glob("digits_cli/*/version_0/metrics.csv")
    with log.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["per_sample_grad/norm_p95"]]
    assert [int(row["step"]) for row in rows] == [9, 19, 29, 39]
    assert all(float(row["per_sample_grad/coverage"]) == 1 for row in rows)
    assert all(float(row["per_sample_grad/encoder/norm_mean"]) > 0 for row in rows)
    pictures = sorted((log.parent / "per_sample_grad" / "norm_histogram").iterdir())
    assert [picture.name for picture in pictures] == [f"step_{step:06d}.png" for step in (9, 19, 29, 39)]
    assert len(list(log.parent.glob("checkpoints/epoch=*.ckpt"))) == 1
