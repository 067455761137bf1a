"""Histograms and tables, written by real loggers in a fit and read back from what they wrote."""

from __future__ import annotations

import csv
import importlib.util
import json
import random
import warnings
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lightning_persample.callbacks import PerSampleGradientMonitor, loggers, monitor
from lightning_persample.callbacks.loggers import log_histogram, log_table
from lightning_persample.errors import PerSampleWarning
from lightning_persample.influence import charts
from tests.callbacks.runs import Classifier, WithReference, fit, loader
from tests.callbacks.ways import GAN, Way, run
from tests.callbacks.written_media import read_tensorboard, read_wandb
from tests.processes import run_alone, run_ranks

pytest.importorskip("tensorboard")
wandb = pytest.importorskip("wandb")
if importlib.util.find_spec("mlflow") is None:  # which writes to the home directory where it is imported too early
    pytest.skip("MLflow is not installed", allow_module_level=True)

HISTOGRAM = "per_sample_grad/norm_histogram"
STEPS = [0, 1, 2]
COLUMNS = ["sample", "norm", "text"]
ROWS = [[3, 0.1 + 0.2, "a|b"], [7, 1e-9, None]]


class Kept(Logger):
    """A logger of one's own, which has no directory."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    name = "kept"
    version = 0

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params, *args, **kwargs):
        pass


class InFolder(Kept):
    """One that has a directory."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    @property
    def save_dir(self):
        return str(self.folder)


def generators():
    return [str(random.getstate()), str(np.random.get_state()), torch.get_rng_state().tolist()]


class WritesMedia(L.Callback):
    """A histogram and a table after every batch, and whether that left the generators of random numbers alone."""

    def __init__(self, histogram: bool = True) -> None:
        self.histogram = histogram
        self.same: list[bool] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        before = generators()
        log_table(trainer.loggers, "media/table", COLUMNS, ROWS, batch_idx)
        if self.histogram:
            log_histogram(trainer.loggers, "media/histogram", torch.arange(9.0), batch_idx)
        self.same += [a == b for a, b in zip(before, generators(), strict=True)]


@pytest.fixture(scope="module")
def own_environment(tmp_path_factory):
    """W&B and MLflow stay without network and away from the home directory."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
            patch.setenv(name, str(home))
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3.17 refuses its file store without it
        patch.setenv("MLFLOW_TRACKING_URI", f"file:{home / 'unused'}")  # which MLFlowLogger sets anew
        yield
        wandb.teardown()  # ends its process


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch):
    monkeypatch.setattr(loggers, "_SAID", set())


@pytest.fixture(scope="module")
def written(own_environment, tmp_path_factory):
    """One fit with all loggers together, and the folder that they wrote to."""
    folder = tmp_path_factory.mktemp("written")
    loggers = {
        "csv": CSVLogger(folder / "csv"),
        "tensorboard": TensorBoardLogger(folder / "tensorboard"),
        "mlflow": MLFlowLogger(tracking_uri=f"file:{folder / 'mlflow'}"),
        "wandb": WandbLogger(save_dir=folder / "wandb", offline=True, settings=wandb.Settings(console="off")),
        "folder": InFolder(folder / "own"),
        "kept": Kept(),
    }
    torch.manual_seed(0)
    module = WithReference()
    data = list(loader())
    data[2][0][5] = torch.nan  # one sample of the last batch has no finite norm
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callbacks = [PerSampleGradientMonitor(histogram=True), WritesMedia()]
        fit(module, callbacks, logger=list(loggers.values()), data=torch.utils.data.DataLoader(data, None))
    wandb.finish()
    said = [str(each.message) for each in caught if each.category is PerSampleWarning]
    return {"folder": folder, "loggers": loggers, "module": module, "said": said, "same": callbacks[1].same}


@pytest.fixture
def norms(written):
    """The finite norms of each step, by plain autograd."""
    return [each[each.isfinite()].double().numpy() for each in written["module"].reference]


def test_the_fit_had_a_sample_without_a_finite_norm(norms):
    assert [len(each) for each in norms] == [8, 8, 7]
    assert all(len(np.unique(each)) == len(each) for each in norms)


def test_generators_and_weights_are_untouched(written):
    assert written["same"] == [True] * 9
    torch.manual_seed(0)
    plain = WithReference()
    data = list(loader())
    data[2][0][5] = torch.nan
    fit(plain, data=torch.utils.data.DataLoader(data, None))
    for value, expected in zip(written["module"].parameters(), plain.parameters(), strict=True):
        np.testing.assert_array_equal(value.detach().numpy(), expected.detach().numpy())


def test_tensorboard(written, norms):
    events = read_tensorboard(written["folder"] / "tensorboard")
    histograms = events.Histograms(HISTOGRAM)
    assert [each.step for each in histograms] == STEPS
    for event, expected in zip(histograms, norms, strict=True):
        found = event.histogram_value
        assert (found.min, found.max) == pytest.approx((expected.min(), expected.max()), rel=1e-5)
        assert (found.num, found.sum) == pytest.approx((len(expected), expected.sum()), rel=1e-5)
        counts, _ = np.histogram(expected, [-np.inf, *found.bucket_limit])
        assert found.bucket == counts.tolist()
    assert [event.step for event in events.Scalars("per_sample_grad/norm_mean")] == STEPS
    assert {tag for tag in events.Tags()["scalars"] if "histogram" in tag} == set()

    assert events.Tags()["images"] == []
    tables = events.Tensors("media/table/text_summary")
    assert [each.step for each in tables] == STEPS
    lines = ["| sample | norm | text |", "| --- | --- | --- |", r"| 3 | 0.3 | a\|b |", "| 7 | 1e-09 |  |"]
    assert tables[0].tensor_proto.string_val[0].decode().splitlines() == lines


def test_wandb(written, norms):
    rows, files = read_wandb(written["folder"] / "wandb")
    assert [row["_step"] for row in rows] == list(range(len(rows)))  # nothing was dropped for its step
    histograms = [row for row in rows if f"{HISTOGRAM}/_type" in row]
    assert [row["trainer/global_step"] for row in histograms] == STEPS
    for row, expected in zip(histograms, norms, strict=True):
        bins, counts = row[f"{HISTOGRAM}/bins"], row[f"{HISTOGRAM}/values"]
        assert (bins[0], bins[-1]) == pytest.approx((expected.min(), expected.max()), rel=1e-5)
        assert len(counts) == 64
        # Reference and engine differ in the last bits, by which no norm may be in another bin.
        bins[0], bins[-1] = -np.inf, np.inf
        assert counts == np.histogram(expected, bins)[0].tolist()
    assert [row["trainer/global_step"] for row in rows if "per_sample_grad/norm_mean" in row] == STEPS

    tables = [row for row in rows if "media/table/_type" in row]
    assert [row["trainer/global_step"] for row in tables] == STEPS
    table = json.loads((files / tables[0]["media/table/path"]).read_text())
    assert (table["columns"], table["data"]) == (COLUMNS, ROWS)


def check_files(folder):
    """CSV files of all steps, and no picture beside them."""
    found = sorted(path.relative_to(folder).as_posix() for kind in ("png", "csv") for path in folder.rglob(f"*.{kind}"))
    assert found == [f"media/table/step_{step:06d}.csv" for step in STEPS]
    for step in STEPS:
        with (folder / f"media/table/step_{step:06d}.csv").open(newline="") as file:
            header, *rows = csv.reader(file)
        assert header == COLUMNS
        assert [(int(a), float(b), c) for a, b, c in rows] == [(a, b, c or "") for a, b, c in ROWS]


def test_mlflow(written):
    logger = written["loggers"]["mlflow"]
    client = logger.experiment
    history = client.get_metric_history(logger.run_id, "per_sample_grad/norm_mean")
    assert [each.step for each in history] == STEPS
    artifacts = client.list_artifacts(logger.run_id, "media/table")
    assert sorted(each.path for each in artifacts) == [f"media/table/step_{step:06d}.csv" for step in STEPS]
    assert {each.is_dir for each in artifacts} == {False}
    folder = next((written["folder"] / "mlflow").glob(f"*/{logger.run_id}/artifacts"))
    check_files(folder)


def test_csv_has_the_values_alone(written):
    folder = Path(written["loggers"]["csv"].log_dir)
    assert sorted(path.name for path in folder.rglob("*.csv")) == ["metrics.csv"]
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["per_sample_grad/norm_mean"]] == STEPS
    assert not any("histogram" in name or "media" in name for name in rows[0])


def test_a_logger_of_ones_own_gets_the_values_alone(written):
    assert not (written["folder"] / "own").exists()
    rows = [(step, row) for step, row in written["loggers"]["kept"].rows if "per_sample_grad/norm_mean" in row]
    assert [step for step, _ in rows] == STEPS
    assert all(list(row) == list(rows[0][1]) for _, row in rows)


def test_no_logger_and_lightnings_dummy():
    fit(Classifier(), [PerSampleGradientMonitor(histogram=True), WritesMedia()], logger=False)
    fit(Classifier(), [PerSampleGradientMonitor(histogram=True), WritesMedia()], logger=Kept(), fast_dev_run=2)


def test_loggers_that_have_no_histograms_are_named_once(tmp_path):
    loggers = [CSVLogger(tmp_path / "csv"), InFolder(tmp_path)]
    with pytest.warns(PerSampleWarning) as caught:
        fit(Classifier(), [PerSampleGradientMonitor(histogram=True)], logger=loggers)
    (text,) = [str(each.message) for each in caught if each.category is PerSampleWarning]
    assert text == (
        f"`{HISTOGRAM}` is not written: CSVLogger, InFolder takes no histogram, TensorBoardLogger and WandbLogger do. "
        "PerSampleGradientWriter keeps the norm of every sample"
    )
    assert list(tmp_path.rglob("*.png")) == []


class MyTensorBoard(TensorBoardLogger):
    """Of a class derived from a logger that is known."""


def test_prefixes_of_loggers_are_those_of_their_values(tmp_path, own_environment):
    tensorboard = MyTensorBoard(tmp_path / "tensorboard", prefix="mine")
    files = MLFlowLogger(tracking_uri=f"file:{tmp_path / 'mlflow'}", prefix="mine")
    fit(Classifier(), [PerSampleGradientMonitor(3, histogram=True), WritesMedia()], logger=[tensorboard, files])
    events = read_tensorboard(tmp_path / "tensorboard")
    assert set(events.Tags()["histograms"]) == {f"mine-{HISTOGRAM}", "mine-media/histogram"}
    assert f"mine-{HISTOGRAM.replace('histogram', 'mean')}" in events.Tags()["scalars"]
    assert len(list((tmp_path / "mlflow").glob("*/*/artifacts/mine-media/table/*.csv"))) == 3


def test_each_optimizer_has_a_histogram_of_its_own(tmp_path):
    way = Way(GAN, lambda: {"max_epochs": 1, "logger": TensorBoardLogger(tmp_path)})
    run(way, [PerSampleGradientMonitor(2, histogram=True)], tmp_path, with_reference=False)
    events = read_tensorboard(tmp_path)
    for optimizer in ("per_sample_grad/optimizer_0", "per_sample_grad/optimizer_1"):
        means = events.Scalars(f"{optimizer}/norm_mean")
        found = events.Histograms(f"{optimizer}/norm_histogram")
        assert [each.step for each in found] == [each.step for each in means] != []
        for event, mean in zip(found, means, strict=True):
            assert event.histogram_value.sum / event.histogram_value.num == pytest.approx(mean.value, rel=1e-5)
    assert len(events.Tags()["histograms"]) == 2


def test_nothing_finite_is_nothing_to_write(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    log_histogram([logger], "name", torch.tensor([torch.nan, torch.inf]), 0)
    log_histogram([logger], "name", torch.empty(0), 0)
    assert list(tmp_path.rglob("events*")) == []


@pytest.mark.parametrize("norms", [[1e25, 3e25, 1e150], [2.0, 1e22], [0.0, 0.0], [1.5, 1.5 + 4e-16], [0.0, 1e-162]])
def test_histograms_hold_every_finite_norm(tmp_path, own_environment, norms):
    """Norms of a training that diverges in float64, and those that differ by rounding alone."""
    tensorboard = TensorBoardLogger(tmp_path / "tensorboard")
    online = WandbLogger(save_dir=tmp_path / "wandb", offline=True, settings=wandb.Settings(console="off"))
    log_histogram([tensorboard, online], "name", torch.tensor(norms, dtype=torch.float64), 4)
    tensorboard.finalize("success")
    wandb.finish()
    (event,) = read_tensorboard(tmp_path / "tensorboard").Histograms("name")
    assert sum(event.histogram_value.bucket) == event.histogram_value.num == len(norms)
    (row,) = [row for row in read_wandb(tmp_path / "wandb")[0] if "name/_type" in row]
    assert sum(row["name/values"]) == len(norms)


def test_cells_of_several_types_are_texts_in_wandb(tmp_path, own_environment):
    rows = [[3, 0.5, "a", True, (1, 2), None], ["b/4", 1, 2, 0, (3,), True], [5, None, None, True, None, False]]
    logger = WandbLogger(save_dir=tmp_path, offline=True, settings=wandb.Settings(console="off"))
    log_table([logger], "table", list("abcdef"), rows, 1)
    wandb.finish()
    written, files = read_wandb(tmp_path)
    (path,) = [row["table/path"] for row in written if "table/path" in row]
    assert json.loads((files / path).read_text())["data"] == [
        ["3", 0.5, "a", "True", "(1, 2)", None],
        ["b/4", 1, "2", "0", "(3,)", True],
        ["5", None, None, "True", None, False],
    ]


class Failing(TensorBoardLogger):
    @property
    def experiment(self):
        raise RuntimeError("no connection")


def test_what_a_logger_raises_is_raised_as_in_lightning(tmp_path):
    with pytest.raises(RuntimeError, match="no connection"):
        log_table([Failing(tmp_path)], "media/table", COLUMNS, ROWS, 1)


@pytest.fixture
def full_disk(monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loggers, "_SAID", set())
    monkeypatch.setattr(loggers, "_save", full)


def test_a_full_disk_costs_tables_with_one_warning(full_disk, tmp_path):
    plain, module = Classifier(), Classifier()
    module.load_state_dict(plain.state_dict())
    fit(plain)
    with pytest.warns(PerSampleWarning) as caught:
        fit(module, [PerSampleGradientMonitor(1, worst_samples=3)], tmp_path, max_epochs=2)
    (said,) = [str(each.message) for each in caught if each.category is PerSampleWarning]
    assert "worst_samples.csv` is not written: No space left on device. Training goes on without it" in said
    fit(plain)
    for key, value in plain.state_dict().items():
        assert torch.equal(value, module.state_dict()[key])


def test_a_full_disk_of_tensorboard_costs_the_values_with_a_warning(tmp_path):
    class Full(TensorBoardLogger):  # (the class's own log_metrics makes a ValueError of what is raised here)
        def add_scalar(self, name, *args):
            if name.startswith("per_sample_grad"):  # others are of Lightning's own logging
                raise OSError(28, "No space left on device")

        experiment = property(lambda self: self)
        finalize = save = log_hyperparams = log_graph = lambda *args, **kwargs: None

    plain, module = Classifier(), Classifier()
    module.load_state_dict(plain.state_dict())
    with pytest.warns(PerSampleWarning) as caught:
        fit(module, [PerSampleGradientMonitor(1)], logger=Full(tmp_path), max_epochs=2)
    assert [str(each.message) for each in caught if each.category is PerSampleWarning] == [
        f"`per_sample_grad/{name}` is not written: No space left on device. Training goes on without it"
        for name in ("norm_mean", "norm_mean_epoch")
    ]
    fit(plain, max_epochs=2)
    for key, value in plain.state_dict().items():
        assert torch.equal(value, module.state_dict()[key])


def test_loggers_of_the_older_name_are_known(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, on import
        older = pytest.importorskip("pytorch_lightning.loggers")
    values = torch.rand(100, generator=torch.Generator().manual_seed(0)).bfloat16()
    logger = older.TensorBoardLogger(tmp_path)
    log_histogram([logger], "name", values, 4)
    logger.finalize("success")
    (event,) = read_tensorboard(tmp_path).Histograms("name")
    assert (event.step, event.histogram_value.num) == (4, 100)


def test_no_library_is_imported_but_those_of_the_loggers_in_use(tmp_path):
    ended = run_alone("tests.callbacks.media_runs", "csv", str(tmp_path), timeout=100)
    assert ended.codes == [0], ended.outputs
    assert "wandb" not in ended.outputs[0]
    assert "mlflow" not in ended.outputs[0]


def test_two_ranks_write_one_histogram_of_all_samples(tmp_path):
    ended = run_ranks("tests.callbacks.media_runs", "ranks", str(tmp_path), timeout=100)
    assert ended.codes == [0, 0], ended.outputs
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1)]
    events = read_tensorboard(tmp_path / "tensorboard")
    histograms = events.Histograms(HISTOGRAM)
    assert [each.step for each in histograms] == ranks[0]["steps"] == [1, 3, 5]
    for event in histograms:
        norms = torch.cat([rank["reference"][event.step] for rank in ranks]).numpy()
        found = event.histogram_value
        assert (found.num, found.sum) == pytest.approx((7, norms.sum()), rel=1e-9)
        assert found.bucket == np.histogram(norms, [-np.inf, *found.bucket_limit])[0].tolist()
    assert [rank["collectives"] for rank in ranks] == [3, 3]


def test_means_of_layers_are_one_figure_in_place_of_curves(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(charts, "layers", lambda axes, **found: drawn.append(found))
    monkeypatch.setattr(monitor, "_BETWEEN_FIGURES", 0)
    both = [TensorBoardLogger(tmp_path / "tensorboard"), CSVLogger(tmp_path / "csv")]
    trainer = fit(Classifier(), [PerSampleGradientMonitor(1, per_layer=2)], logger=both, max_epochs=2)
    events = read_tensorboard(tmp_path / "tensorboard")
    curves = [name for name in events.Tags()["scalars"] if name.startswith("per_sample_grad/")]
    assert curves != []
    assert all(name.count("/") == 1 for name in curves)
    assert events.Tags()["images"] == ["per_sample_grad/layers"]
    assert [each.step for each in events.Images("per_sample_grad/layers")] == [2, 5]  # once at the end
    norms, noise, diversity = drawn[-3:]
    assert (norms["label"], noise["label"], diversity["label"]) == ("norm_mean", "noise_scale", "diversity")
    for place, name in enumerate(("network.0", "network.2")):
        assert norms["names"][place] == name
        with (Path(both[1].log_dir) / "metrics.csv").open(newline="") as file:  # a logger of numbers has them all
            values = [row[f"per_sample_grad/{name}/norm_mean"] for row in csv.DictReader(file)]
        expected = [float(value) for value in values if value]
        assert norms["values"][place].tolist() == pytest.approx(expected, rel=1e-6)
        assert f"per_sample_grad/{name}/norm_mean" in trainer.callback_metrics


def test_without_matplotlib_layers_are_curves(tmp_path, monkeypatch):
    monkeypatch.setattr(monitor, "find_spec", lambda name: None)
    fit(Classifier(), [PerSampleGradientMonitor(1, per_layer=2)], logger=TensorBoardLogger(tmp_path))
    events = read_tensorboard(tmp_path)
    assert "per_sample_grad/network.0/norm_mean" in events.Tags()["scalars"]
    assert events.Tags()["images"] == []
