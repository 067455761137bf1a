"""The page on a run: its numbers against NumPy's from the Parquet files, its texts, and the page in a browser."""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from PIL import Image

from lightning_persample import OptionError, PerSampleError
from lightning_persample.__main__ import main
from lightning_persample.influence import charts, report
from lightning_persample.influence.ledger import BASE_COLUMNS, Ledger, Manifest, schema_of
from lightning_persample.influence.report import advice

EXTRA = {"loss": "double", "label": "int64", "norm/encoder": "double", "norm/head": "double"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def write_ledger(folder, steps=30, batch=8, samples=40, ranks=1, parts=2, change=None, **settings):
    """A ledger of random numbers; `change` may alter its columns, NumPy arrays by name, before they are written."""
    rng, columns = np.random.default_rng(0), {**BASE_COLUMNS, **EXTRA}
    rows = steps * batch
    step = np.repeat(np.arange(steps), batch)
    values = {name: np.zeros(rows) for name in columns}
    values |= {"step": step, "epoch": step // 10, "rank": np.arange(rows) % ranks, "row": np.arange(rows) % batch}
    values |= {
        "sample_index": rng.integers(0, samples, rows),
        "coverage": np.ones(rows),
        "weight": np.ones(rows) / batch,
    }
    values["norm"] = rng.lognormal(0, 1, rows) * (1 + values["sample_index"])
    values |= {"loss": values["norm"] ** 0.5 + rng.random(rows), "label": values["sample_index"] % 3}
    values |= {"norm/encoder": values["norm"] * 0.8, "norm/head": values["norm"] * 0.6}
    if change is not None:
        change(values)
    if values["sample_index"].dtype == object:
        columns["sample_index"] = "string"
    folder.mkdir(exist_ok=True)
    settings = {
        "loss_reduction": "mean",
        "step_unit": "optimizer steps",
        "per_layer": 1,
        "max_samples": None,
        **settings,
    }
    manifest = Manifest("run", columns, ("w",), settings=settings, libraries={"torch": "2"}, processes=ranks, rows=rows)
    ledger = Ledger(folder)
    ledger.write_manifest(manifest)
    integers = [name for name, kind in columns.items() if kind == "int64"]
    table = {
        name: each.astype(np.int64) if name in integers and each.dtype != object else each
        for name, each in values.items()
    }
    for rank in range(ranks):
        for counter, of_part in enumerate(np.array_split(np.flatnonzero(table["rank"] == rank), parts)):
            part = pyarrow.table({name: each[of_part] for name, each in table.items()}, schema=schema_of(columns))
            ledger.write(ledger.part(rank, counter), part)
    return folder


@pytest.fixture
def undrawn(monkeypatch):
    """Charts are not drawn, which takes a second for each page."""
    monkeypatch.setattr(charts, "svg", lambda name, *_: f"<svg>{name}</svg>")


def set_(name, place, value):
    return lambda values: values[name].__setitem__(place, value)


def texts(page):
    """The page's text, without tags, styles and scripts."""
    body = re.sub(r"(?s)<(style|script).*?</\1>", "", page.read_text("utf-8"))
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body)))


def numbers(page):
    return json.loads(re.search(r'(?s)id="numbers">(.*?)</script>', page.read_text("utf-8"))[1])


def panel(page, name):
    return re.search(rf'(?s)<section id="{name}">.*?</section>', page.read_text("utf-8"))[0]


def rows_of(folder):
    """The rows as pandas reads them, and the window of each among `count`."""
    return pandas.concat([pandas.read_parquet(path) for path in sorted(folder.glob("rows-*"))])


def not_finite(values):
    values["norm"][[3, 17]] = np.inf, np.nan


@pytest.mark.parametrize("ranks", [1, 2])
def test_numbers_are_those_of_the_parquet_files(tmp_path, ranks, undrawn):
    folder = write_ledger(tmp_path / "ledger", steps=200, ranks=ranks, change=not_finite)
    found, rows = numbers(report(folder, out=tmp_path / "report.html")), rows_of(folder)
    rows["norm"] = rows["norm"].where(np.isfinite(rows["norm"]))  # which pandas leaves out everywhere

    windows = pandas.cut(rows["step"], np.linspace(-0.5, 199.5, 81), right=False)
    norms = rows["norm"].groupby(windows, observed=True)
    np.testing.assert_allclose(found["bands"]["edges"], np.linspace(-0.5, 199.5, 81))
    for name, quantile in (("p5", 0.05), ("p50", 0.5), ("p95", 0.95)):
        np.testing.assert_allclose(found["bands"][name], norms.quantile(quantile), rtol=1e-5)

    for name, chosen in (("first", rows["step"] <= 19.9), ("last", rows["step"] >= 179.1)):
        expected = rows["norm"][chosen].quantile([0.05, 0.5, 0.95])
        np.testing.assert_allclose(found["bands"][name], expected, rtol=1e-5)

    assert found["layers"]["names"] == ["encoder", "head"]
    for name, means in zip(("norm/encoder", "norm/head"), found["layers"]["mean"], strict=True):
        np.testing.assert_allclose(means, rows[name].groupby(windows, observed=True).mean(), rtol=1e-5)

    share = np.array(found["histogram"]["share"], dtype=float)
    bins = np.array(found["histogram"]["log10_norm"])
    assert share.shape == (len(bins) - 1, 80)
    for window in (0, 41, 79):
        logs = np.log10(rows["norm"][windows.cat.codes == window].dropna())
        for low, high, value in zip(bins, bins[1:], share[:, window], strict=False):
            in_bin = ((logs >= low) & (logs < high)).mean()
            assert value == pytest.approx(in_bin, abs=1e-5 + 1 / 16 * np.isclose(logs, low, atol=1e-5).any())
    np.testing.assert_allclose(share.sum(0), 1, rtol=1e-4)

    index, loss, mean = found["scores"]["points"]
    by_sample = rows.groupby("sample_index")
    np.testing.assert_array_equal([int(each) for each in index], by_sample["norm"].mean().index)
    np.testing.assert_allclose(mean, by_sample["norm"].mean(), rtol=1e-5)
    np.testing.assert_allclose(loss, by_sample["loss"].mean(), rtol=1e-5)
    expected = by_sample["loss"].mean().rank().corr(by_sample["norm"].mean().rank())
    assert found["scores"]["rank_correlation"] == pytest.approx(expected, rel=1e-5)


def test_the_table_has_the_largest_the_smallest_and_those_not_finite(tmp_path, undrawn):
    folder = write_ledger(tmp_path / "ledger", samples=60, change=set_("norm", [0, 9], np.inf))
    page = report(folder, out=tmp_path / "report.html", k=3, labels={"even": lambda index: index % 2 == 0})
    found, rows = numbers(page)["samples"], rows_of(folder)
    table = pandas.DataFrame(found["rows"], columns=found["columns"])
    wrong = set(rows["sample_index"][~np.isfinite(rows["norm"])])
    rows["finite"] = rows["norm"].where(np.isfinite(rows["norm"]))
    means = rows.groupby("sample_index")["finite"].mean().sort_values(ascending=False)
    means = means.dropna()
    assert wrong | set(means.index[:3]) | set(means.index[-3:]) == set(table["index"])
    for _, row in table.iterrows():
        of_sample = rows[rows["sample_index"] == row["index"]].sort_values(["step", "row"])
        assert row["mean norm"] == pytest.approx(of_sample["finite"].mean(), rel=1e-5)
        assert row["loss"] == pytest.approx(of_sample["loss"].mean(), rel=1e-5)
        assert (row["label"], row["even"]) == (of_sample["label"].iloc[-1], row["index"] % 2 == 0)
        assert (row["seen"], row["inf or nan"]) == (len(of_sample), (~np.isfinite(of_sample["norm"])).sum())
        assert row["rank"] == list(means.index).index(row["index"]) + 1
        if np.isfinite(of_sample["norm"].iloc[-1]):
            assert row["last norm"] == pytest.approx(of_sample["norm"].iloc[-1], rel=1e-5)
    assert "2 samples had a norm that is inf or nan, which is in no mean and no quantile. The first was at step 0." in (
        texts(page)
    )


def test_what_a_run_lacks_is_said_in_place_of_a_chart(tmp_path, undrawn):
    def bare(values):
        for name in ("loss", "norm/encoder", "norm/head"):
            values[name][:] = np.nan

    page = report(write_ledger(tmp_path / "ledger", change=bare), out=tmp_path / "report.html")
    for name, text in {
        "noise": "The run has no noise scale: PerSampleGradientMonitor logs it",
        "layers": "No layer has a finite norm.",
        "scores": "No sample has both a finite loss and a finite norm. A warning of the training says why.",
    }.items():
        assert text in panel(page, name)
        assert "<svg" not in panel(page, name)
    assert "<svg" in panel(page, "norms")
    assert {"loss", "inf or nan"}.isdisjoint(numbers(page)["samples"]["columns"])  # nothing is in them


def test_layers_that_no_one_asked_for_are_named(tmp_path, undrawn):
    write_csv(tmp_path / "logs")
    page = report(tmp_path / "logs", out=tmp_path / "report.html")
    assert "The run has no norms of layers: per_layer=1 (or 2) records them." in panel(page, "layers")


def test_losses_that_no_one_asked_for_are_named(tmp_path, undrawn, monkeypatch):
    monkeypatch.delitem(EXTRA, "loss")
    folder = write_ledger(tmp_path / "ledger", change=lambda values: values.pop("loss"))
    text = "The run has no losses of samples: PerSampleGradientWriter(..., columns=(&quot;loss&quot;,)) writes"
    assert text in panel(report(folder, out=tmp_path / "report.html"), "scores")


def test_norms_far_below_the_median_are_in_the_lowest_row_and_at_the_edge(tmp_path, monkeypatch):
    def learnt(values):
        values["norm"][values["sample_index"] == 5] = 1e-15

    drawn = []
    monkeypatch.setattr(charts, "points", lambda axes, x, y, **_: drawn.append(y))
    folder = write_ledger(tmp_path / "ledger", change=learnt)
    page = report(folder, out=tmp_path / "report.html")
    found, rows = numbers(page), rows_of(folder)
    floor = np.array(found["bands"]["p50"]).min() / 100
    assert 10 ** found["histogram"]["log10_norm"][0] == pytest.approx(floor, rel=1e-4)
    np.testing.assert_allclose(np.array(found["histogram"]["share"]).sum(0), 1, rtol=1e-4)
    assert f"Its lowest row has {(rows['norm'] < floor).sum()} smaller ones, too." in texts(page)
    means = rows.groupby("sample_index")["norm"].mean()
    np.testing.assert_allclose(drawn[0], np.maximum(means, means.median() / 100), rtol=1e-5)
    below = (means < means.median() / 100).sum()
    assert f"{below} of less than a hundredth of the median norm are at the lower edge." in texts(page)


def test_a_line_is_between_the_largest_and_the_smallest(tmp_path, undrawn):
    folder = write_ledger(tmp_path / "ledger", samples=60)
    samples = panel(report(folder, out=tmp_path / "report.html", k=3), "samples")
    (place,) = [n for n, row in enumerate(samples.split("<tr")[2:]) if row.startswith(' class="gap"')]
    assert place == 3
    assert "gap" not in panel(report(folder, out=tmp_path / "report.html", k=40), "samples")


def test_norms_of_which_none_is_finite_are_no_chart(tmp_path, undrawn):
    page = report(write_ledger(tmp_path / "ledger", change=set_("norm", slice(None), np.nan)), out=tmp_path / "r.html")
    assert "No captured row has a finite norm." in panel(page, "norms")
    assert "No captured row has a positive finite norm." in panel(page, "histogram")
    assert "No sample has both a finite loss and a finite norm." in panel(page, "scores")
    assert "samples had a norm that is inf or nan" in texts(page)
    assert re.search(r'data-value="">nan</td>', panel(page, "samples"))


@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_of_one_sample_and_few_steps_has_a_page(tmp_path, steps):
    page = report(write_ledger(tmp_path / "ledger", steps=steps, batch=1, samples=1), out=tmp_path / "report.html")
    assert len(numbers(page)["bands"]["p50"]) == steps
    assert "1 of 1 samples" in texts(page)


def test_steps_that_were_not_captured_leave_a_gap(tmp_path, undrawn):
    def resumed(values):
        values["step"][values["step"] >= 15] += 60

    folder = write_ledger(tmp_path / "ledger", change=resumed)
    found = numbers(report(folder, out=tmp_path / "report.html"))["bands"]
    edges, step = np.array(found["edges"]), rows_of(folder)["step"].to_numpy()
    is_empty = [not ((step >= low) & (step < high)).any() for low, high in itertools.pairwise(edges)]
    assert [each is None for each in found["p50"]] == is_empty
    assert sum(is_empty) > 10


LINES = {
    "noise_scale": [50.0, 300.0, 640.0],
    "norm_mean": [1.0, 2.0, 3.0],
    "coverage": [1.0] * 3,
    "nonfinite": [0.0] * 3,
}


def write_csv(folder, first=0, lines=LINES, prefix="grads/"):
    folder.mkdir(parents=True)
    names = list(lines)
    head = ",".join(["epoch", "step", "loss", *(f"{prefix}{name}" for name in names)])
    rows = [
        f"0,{first + 10 * place},," + ",".join(map(str, row))
        for place, row in enumerate(zip(*lines.values(), strict=True))
    ]
    (folder / "metrics.csv").write_text("\n".join([head, *rows, f"0,{first + 25},0.5" + "," * len(names)]))


def write_events(folder, lines=LINES, prefix="grads/"):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder) as writer:
        for name, values in lines.items():
            for place, value in enumerate(values):
                writer.add_scalar(f"{prefix}{name}", value, 10 * place)
                writer.add_scalar("loss", value, 10 * place)


@pytest.mark.parametrize("write", [write_csv, write_events])
def test_the_noise_scale_is_that_of_the_logs(tmp_path, write, undrawn):
    folder = write_ledger(tmp_path / "ledger")
    write(tmp_path / "logs")
    page = report(folder, tmp_path / "logs", out=tmp_path / "report.html")
    assert numbers(page)["logged"]["grads/noise_scale"] == [[0, 10, 20], [50, 300, 640]]
    assert "about 300 samples, the median over the run" in panel(page, "noise")
    assert "The batch of 8 is much smaller" in panel(page, "noise")


@pytest.mark.parametrize("write", [write_csv, write_events])
def test_a_coverage_of_the_users_is_that_of_no_monitor(tmp_path, write, undrawn):
    others = {"val/coverage": [0.31, 0.4, 0.5], "val/noise_scale": [7.0, 7.0, 7.0], "val/norm_mean": [1.0, 1.0, 1.0]}
    write(tmp_path / "theirs", lines=others, prefix="")
    with pytest.raises(PerSampleError, match=r"and no log of a PerSampleGradientMonitor"):
        report(tmp_path / "theirs", out=tmp_path / "report.html")
    write(tmp_path / "both", lines={**others, **{f"grads/{name}": each for name, each in LINES.items()}}, prefix="")
    page = report(tmp_path / "both", out=tmp_path / "report.html")
    assert {name.partition("/")[0] for name in numbers(page)["logged"]} == {"grads"}
    assert "100%" in panel(page, "coverage")
    assert "31%" not in panel(page, "coverage")


def test_texts_in_a_log_are_passed_over_and_a_broken_one_is_named(tmp_path, undrawn):
    write_csv(
        tmp_path / "logs",
        lines={**{f"grads/{name}": each for name, each in LINES.items()}, "my/text": list("abc")},
        prefix="",
    )
    page = report(tmp_path / "logs", out=tmp_path / "report.html")
    assert numbers(page)["logged"]["grads/noise_scale"] == [[0, 10, 20], [50, 300, 640]]
    path = tmp_path / "logs" / "metrics.csv"
    text = path.read_bytes()
    for broken in (text.replace(b"300.0", b"3\xff0"), text.replace(b"300.0", b"3x")):
        path.write_bytes(broken)
        with pytest.raises(PerSampleError, match=r"metrics.csv' is broken: .* or pass folders without it"):
            report(tmp_path / "logs", out=tmp_path / "report.html")


def test_logs_of_a_run_that_was_resumed_are_joined(tmp_path, undrawn):
    write_csv(tmp_path / "version_0")
    write_csv(tmp_path / "version_1", first=30)
    page = report(tmp_path, out=tmp_path / "report.html")
    assert numbers(page)["logged"]["grads/noise_scale"][0] == [0, 10, 20, 30, 40, 50]
    assert "Several logs" not in texts(page)
    assert "No norms of samples are here: PerSampleGradientWriter keeps them" in panel(page, "histogram")
    write_csv(tmp_path / "version_2", first=50)
    text = "Several logs have values of the same steps; those of "
    assert text in texts(report(tmp_path, out=tmp_path / "report.html"))


@pytest.mark.parametrize(
    ("batch_size", "text"),
    [
        (10, "The batch of 10 is much smaller, and its gradient mostly noise"),
        (100, "The batch of 100 is near it: nothing to change."),
        (1000, "The batch of 1000 is much larger"),
        (None, "The batch size of the run is not known."),
    ],
)
def test_advice(batch_size, text):
    assert text in advice(120.0, batch_size)


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)> & \"'"


def test_texts_of_users_are_escaped(tmp_path, undrawn):
    def named(values):
        values["sample_index"] = np.array([f"{EVIL} {each}" for each in values["sample_index"]], dtype=object)

    folder = write_ledger(tmp_path / "ledger", samples=3, change=named, loss_reduction=EVIL)
    labels = {EVIL: lambda index: EVIL, "long \ud800 π": lambda index: "π" * 10_000}
    page = report(folder, out=tmp_path / "report.html", render=lambda index: EVIL, labels=labels, title=EVIL)
    text = page.read_text("utf-8")
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert text.count("</script>") == 2
    assert texts(page).count(EVIL) >= 12
    assert "π" * 401 not in text
    assert numbers(page)["samples"]["columns"][3] == EVIL


def failing(index):
    raise RuntimeError(f"no picture of {index}")


@pytest.mark.parametrize(
    ("render", "cell"),
    [
        (lambda index: torch.rand(3, 8, 9), "data:image/png"),
        (lambda index: np.zeros((200, 300)), "data:image/webp"),
        (lambda index: np.full((5, 5, 3), np.nan), "data:image/png"),
        (lambda index: torch.arange(16).view(1, 4, 4), "data:image/png"),
        (lambda index: torch.rand(4, 4, dtype=torch.bfloat16) > 0.5, "data:image/png"),
        (lambda index: Image.new("P", (4, 4)), "data:image/png"),
        (lambda index: np.zeros((7, 5, 5)), "[[["),
        (lambda index: np.empty((0, 3)), "[]"),
        (lambda index: None, "<td"),
        (lambda index: {"a": 1}, "{&#x27;a&#x27;: 1}"),
        (failing, "render failed: RuntimeError: no picture of"),
    ],
)
def test_what_render_returns_is_shown(tmp_path, render, cell, undrawn):
    page = report(write_ledger(tmp_path / "ledger", steps=2), out=tmp_path / "report.html", render=render, k=2)
    assert cell in panel(page, "samples")
    assert ("A sample is not shown: render failed" in texts(page)) == (render is failing)


def test_pictures_have_the_values_of_the_array(tmp_path):
    from lightning_persample.influence.pictures import rendered

    array = np.random.default_rng(0).random((3, 6, 5))
    expected = (np.moveaxis(array, 0, -1) * 255).round()
    assert (np.asarray(rendered(lambda _: torch.tensor(array), 0)) == expected).all()
    assert (np.asarray(rendered(lambda _: np.moveaxis(array, 0, -1), 0)) == expected).all()
    scaled = np.asarray(rendered(lambda _: np.array([[-2.0, 0.0, 2.0]]), 0))
    assert scaled[..., 0].tolist() == [[0, 128, 255]]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_pictures_of_more_than_8_bits_keep_their_values(dtype):
    from lightning_persample.influence.pictures import rendered

    array = (np.arange(16).reshape(4, 4) * 4000).astype(dtype)
    found = np.asarray(rendered(lambda _: Image.fromarray(array), 0))
    assert (found[..., 0] == (array / array.max() * 255).round()).all()
    assert (found == np.asarray(rendered(lambda _: array, 0))).all()


def test_labels_of_any_kind_are_columns(tmp_path, undrawn):
    labels = {
        "$a$b_{x": lambda index: index % 2 == 0,  # no formula of matplotlib's
        "tensor": torch.arange(40),
        "mapping": {7: "seven"},
        "pairs": torch.zeros(40, 2),
        "failing": failing,
    }
    page = report(write_ledger(tmp_path / "ledger"), out=tmp_path / "report.html", labels=labels, k=40)
    found = numbers(page)["samples"]
    for row in (dict(zip(found["columns"], row, strict=True)) for row in found["rows"]):
        assert (row["$a$b_{x"], row["tensor"]) == (row["index"] % 2 == 0, row["index"])
        assert row["mapping"] == ("seven" if row["index"] == 7 else None)
        assert row["pairs"] == "tensor([0., 0.])"
        assert row["failing"] == f"failed: RuntimeError: no picture of {row['index']}"


@pytest.mark.parametrize(
    "value", [1e300, *(pytest.param(each, marks=pytest.mark.slow) for each in (5e-324, 0.0, np.inf))]
)
def test_numbers_at_the_ends_of_the_range_are_drawn(tmp_path, value):
    folder = write_ledger(tmp_path / "ledger", steps=2, batch=2, change=set_("norm", [0], value))
    text = report(folder, out=tmp_path / "r.html", labels={"$odd$ $": lambda index: index % 2 == 0}).read_text("utf-8")
    assert text.count("<svg") == 4
    assert "$odd$" in text


def two_passes(values):
    values["backward_index"] = values["row"] // 4


@pytest.mark.parametrize(
    ("change", "settings", "text"),
    [
        (lambda values: None, {"max_samples": 4}, "max_samples=4: of larger batches a random part was captured."),
        (
            two_passes,
            {},
            "A batch has up to 2 backward passes (manual optimization): the charts have the norms of all.",
        ),
        (two_passes, {}, " 4 batch size"),
        (set_("coverage", 3, 0.25), {}, "At the least covered step the norms are over 25% of the weights"),
        (set_("norm", 3, 0.0), {}, "1 rows with a norm of 0 are not in it."),
    ],
)
def test_what_is_unusual_is_named(tmp_path, change, settings, text, undrawn):
    assert text in texts(report(write_ledger(tmp_path / "ledger", change=change, **settings), out=tmp_path / "r.html"))


def test_files_that_are_missing_are_named(tmp_path, undrawn):
    folder = write_ledger(tmp_path / "ledger")
    (folder / "rows-00000-000001.parquet").unlink()
    assert "The ledger lacks 120 of 240 rows: the page shows what there is." in texts(
        report(folder, out=tmp_path / "r")
    )


def test_folders_that_hold_no_run_are_refused(tmp_path, capsys, undrawn):
    (tmp_path / "empty").mkdir()
    with pytest.raises(PerSampleError, match=r"holds no ledger .* and no log of a PerSampleGradientMonitor"):
        report(tmp_path / "empty")
    with pytest.raises(PerSampleError, match=r"is no folder"):
        report(tmp_path / "absent")
    write_ledger(tmp_path / "one"), write_ledger(tmp_path / "two")
    with pytest.raises(PerSampleError, match=r"these are 2 ledgers: .*one', .*two': pass one of them"):
        report(tmp_path)
    with pytest.raises(OptionError, match=r"k=0 is not allowed: k must be an int >= 1"):
        report(tmp_path / "one", k=0)
    with pytest.raises(OptionError, match=r"labels=.* is not allowed: labels must be None or a dict of sequences"):
        report(tmp_path / "one", labels={"label": "a_module.labels"})
    for out, shown in ((tmp_path, re.escape(repr(tmp_path))), ("", "''"), (3, "3")):
        with pytest.raises(OptionError, match=f"out={shown} is not allowed: out must be the path of a file, not of a"):
            report(tmp_path / "one", out=out)
    assert main(["report", str(tmp_path / "one"), "--out", str(tmp_path)]) == 1
    assert "out must be the path of a file, not of a folder" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "empty")]) == 1
    assert "holds no ledger" in capsys.readouterr().err


def test_the_command_is_that_of_the_package():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    assert f'lightning-persample = "{main.__module__}:{main.__name__}"' in text


def test_the_command_writes_the_page(tmp_path, monkeypatch, capsys, undrawn):
    folder = write_ledger(tmp_path / "ledger")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures_of_mine.py").write_text("def show(index):\n    return f'sample number {index}'\n")
    assert main(["report", "ledger", "--out", "new/page.html", "--render", "pictures_of_mine:show", "-k", "2"]) == 0
    assert capsys.readouterr().out.startswith("new/page.html (0.")
    assert "sample number " in texts(tmp_path / "new" / "page.html")
    assert main(["report", "ledger", "--render", "pictures_of_mine:absent"]) == 1
    assert "--render must be MODULE:FUNCTION, a function that can be imported" in capsys.readouterr().err
    (tmp_path / "labels_of_mine.py").write_text("def kind(index):\n    return f'kind {index}'\n\nof = {'kind': kind}\n")
    assert main(["report", "ledger", "--out", "labelled.html", "--labels", "labels_of_mine:of"]) == 0
    assert "kind 1" in texts(tmp_path / "labelled.html")
    assert main(["report", "ledger", "--labels", "labels_of_mine:kind"]) == 1
    assert "--labels must be MODULE:NAME, a dict that can be imported" in capsys.readouterr().err
    assert folder.is_dir()


PROBE = """
<script>
const errors = [], probe = document.createElement("pre");
addEventListener("error", event => errors.push(String(event.message || event.target)), true);
addEventListener("securitypolicyviolation", event => errors.push("asked for " + event.blockedURI));
addEventListener("load", () => setTimeout(() => {
  const read = name => {
    const header = [...document.querySelectorAll("th")].find(each => each.textContent === name);
    return [...document.querySelectorAll("tbody tr")].map(row => row.cells[header.cellIndex].textContent);
  };
  const press = name => [...document.querySelectorAll("th button")].find(each => each.textContent === name).click();
  const orders = {};
  for (const name of ["mean norm", "label", "name"]) {
    press(name); orders[name + " down"] = read(name);
    press(name); orders[name + " up"] = read(name);
  }
  const point = document.querySelectorAll("#points use")[3];
  point.dispatchEvent(new Event("pointerenter"));
  probe.id = "probe";
  probe.textContent = JSON.stringify({
    errors, orders, pointed: document.getElementById("point").textContent, width: document.documentElement.scrollWidth,
    requests: performance.getEntriesByType("resource").map(each => each.name).filter(each => !each.startsWith("data:")),
    points: document.querySelectorAll("#points use").length,
  });
  document.body.append(probe);
}, 50));
</script>
"""
POLICY = """<meta http-equiv="Content-Security-Policy" content="default-src 'unsafe-inline' data:">"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_the_page_in_a_browser(tmp_path):
    folder = write_ledger(tmp_path / "ledger", change=set_("norm", slice(0, 8), np.inf))
    write_csv(tmp_path / "logs")
    labels = {"name": [f"name {index % 7}" for index in range(40)]}
    page = report(
        folder, tmp_path / "logs", out=tmp_path / "page.html", labels=labels, render=lambda i: torch.rand(4, 4)
    )
    text = page.read_text("utf-8")
    page.write_text(text.replace("<head>", f"<head>{POLICY}{PROBE}", 1), "utf-8")
    options = "headless=new no-sandbox disable-gpu no-first-run disable-background-networking disable-component-update"
    options += (
        f" disable-sync hide-scrollbars enable-logging=stderr window-size=500,900 user-data-dir={tmp_path}/profile"
    )
    command = [
        CHROMIUM,
        *(f"--{each}" for each in options.split()),
        "--dump-dom",
        "--virtual-time-budget=2000",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "CONSOLE" not in done.stderr
    probe = json.loads(html.unescape(re.search(r'(?s)<pre id="probe">(.*?)</pre>', done.stdout)[1]))
    assert (probe["errors"], probe["requests"]) == ([], [])
    assert probe["width"] <= 500  # nothing but the table scrolls sideways, and that in itself
    found = numbers(page)
    assert probe["points"] == len(found["scores"]["points"][0])
    assert probe["pointed"].startswith(f"sample {found['scores']['points'][0][3]}: loss ")
    for name in ("mean norm", "label"):
        down, up = (
            [float(each.replace(",", "")) for each in probe["orders"][f"{name} {way}"]] for way in ("down", "up")
        )
        known = [each for each in down if np.isfinite(each)]
        assert known == sorted(known, reverse=True)
        assert [each for each in up if np.isfinite(each)] == sorted(known)
        assert len(set(known)) > 2
    assert probe["orders"]["name up"] == sorted(probe["orders"]["name up"])
