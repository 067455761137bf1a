"""Callbacks from the YAML files of LightningCLI."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_persample
from lightning_persample import (
    InRunInfluence,
    OptionError,
    PerSampleCallback,
    PerSampleGradientMonitor,
    PerSampleGradientWriter,
    Projection,
)
from lightning_persample.influence import GradientStore
from tests.callbacks.runs import CLASSES, FEATURES, Classifier, column, loader

pytest.importorskip("jsonargparse")
# Lightning and jsonargparse disagree on names that are deprecated; that a run warns of nothing is tested elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore")

PUBLIC = [getattr(lightning_persample, name) for name in lightning_persample.__all__]
CALLBACKS = [each for each in PUBLIC if isinstance(each, type) and issubclass(each, Callback)]
SHARED = set(inspect.signature(PerSampleCallback).parameters)
REQUIRED = {"dirpath": "written"}  # values of options without a default; a path is below the test's folder
EXPANDED = {
    "every_n_steps": 2,
    "loss_reduction": f"{__name__}.half_of_a_mean",
    "batch_dim": 0,
    "batch_size": 8,
    "unsupported": "error",
    "verify": False,
    "fuse_weight_grad": True,
    "max_memory": 2**20,
    "per_layer": 1,
    "quantiles": [0.25, 0.5],
    "statistics": ["diversity", "cosine_to_mean"],
    "sample_index": f"{__name__}.places",
    "batch_layout": f"{__name__}.no_layout",
    "worst_samples": 3,
    "report": True,
    "render": f"{__name__}.described",
    "labels": {"label": [0, 1, 2]},
    "histogram": True,
    "prefix": "grads",
    "prog_bar": True,
}
LOOP = {
    "engine": "loop",
    "loss_reduction": "mean",
    "every_n_steps": None,
    "per_layer": None,
    "quantiles": [],
    "max_samples": 4,
}
WRITER = {
    "every_n_steps": 2,
    "columns": f"{__name__}.labels",
    "per_layer": 1,
    "projection": {"dim": 8, "kind": "rademacher", "seed": 3},
    "dtype": "float16",
    "flush_every": 2,
    "overwrite": True,
}
WRONG = {
    "every_n_steps": 0,
    "quantiles": [0.5, 1.5],
    "prefix": "grads/",
    "max_memory": 0,
    "per_layer": -1,
    "batch_dim": -1,
    "loss_reduction": "median",
}


def half_of_a_mean(outputs: Any, batch: Any) -> Tensor:
    """As if the training loss were half of the mean of the samples' own losses."""
    return torch.full((len(batch[0]),), 0.5 / len(batch[0]))


class OnHeldOut(InRunInfluence):
    """With validation samples, which no file holds."""

    def __init__(self, dirpath: str, every_n_steps: int | None = None) -> None:
        data = TensorDataset(torch.randn(6, FEATURES), torch.randint(CLASSES, (6,)))
        super().__init__(dirpath, DataLoader(data, batch_size=3), every_n_steps)


def places(batch: Any) -> Tensor:
    """An index of each sample that is the same in every batch."""
    return torch.arange(len(batch[0]))


def no_layout(batch: Any) -> dict[Tensor, int]:
    """Where the samples lie in no tensor that does not hold them along the first axis."""
    return {}


def labels(outputs: Any, batch: Any) -> dict[str, Tensor]:
    """A column of a ledger."""
    return {"label": batch[1]}


def described(index: int) -> str:
    """What is shown of a sample."""
    return f"sample {index}"


class Trained(Classifier):
    """Brings its data."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()

    def train_dataloader(self):
        return loader()


def path_of(kind: type) -> str:
    return f"lightning_persample.{kind.__name__}"


def write(file: Path, callbacks: list[dict[str, Any]]) -> Path:
    """A configuration file with these callbacks."""
    trainer = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(file.parent)}},
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": callbacks,
    }
    file.write_text(yaml.safe_dump({"trainer": trainer}))
    return file


def monitor(**options: Any) -> dict[str, Any]:
    return {"class_path": path_of(PerSampleGradientMonitor), "init_args": options}


def command(*arguments: str) -> LightningCLI:
    return LightningCLI(Trained, args=list(arguments), save_config_callback=None)


def found(cli: LightningCLI, kind: type) -> Any:
    (callback,) = [each for each in cli.trainer.callbacks if type(each) is kind]
    return callback


@pytest.mark.parametrize("kind", CALLBACKS, ids=lambda kind: kind.__name__)
def test_every_public_callback_fits_from_a_file(kind, tmp_path):
    options = {}
    kind, path = (OnHeldOut, f"{__name__}.OnHeldOut") if kind is InRunInfluence else (kind, path_of(kind))
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.default is parameter.empty:
            assert name in REQUIRED, f"{kind.__name__} needs {name}: give a value for it in REQUIRED"
            options[name] = str(tmp_path / REQUIRED[name])
    file = write(tmp_path / "config.yaml", [{"class_path": path, "init_args": options}])
    cli = command("fit", "--config", str(file))
    assert found(cli, kind).every_n_steps == inspect.signature(kind).parameters["every_n_steps"].default
    assert cli.trainer.global_step == 3


@pytest.mark.parametrize("options", [EXPANDED, LOOP], ids=["expanded", "loop"])
def test_options_of_the_monitor_reach_it_and_the_fit_runs(options, tmp_path):
    cli = command("fit", "--config", str(write(tmp_path / "config.yaml", [monitor(**options)])))
    callback = found(cli, PerSampleGradientMonitor)
    expected = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    functions = {
        "loss_reduction": half_of_a_mean,
        "sample_index": places,
        "batch_layout": no_layout,
        "render": described,
    }
    for name, function in functions.items():
        given = getattr(callback, name)
        if callable(given):
            assert given is function or given.__name__ == function.__name__
            del expected[name]
    assert {name: getattr(callback, name) for name in expected} == expected
    assert len(column(cli.trainer, f"{callback.prefix}/norm_mean")) == (1 if options is EXPANDED else 3)


def test_options_of_the_writer_reach_it_and_the_fit_runs(tmp_path):
    init_args = {"dirpath": str(tmp_path / "ledger"), **WRITER}
    written = {"class_path": path_of(PerSampleGradientWriter), "init_args": init_args}
    callback = found(
        command("fit", "--config", str(write(tmp_path / "config.yaml", [written]))), PerSampleGradientWriter
    )
    expected = {**WRITER, "columns": labels, "projection": Projection(8, "rademacher", 3)}
    assert callback.columns.__name__ == expected.pop("columns").__name__
    assert {name: getattr(callback, name) for name in expected} == expected
    store = GradientStore(tmp_path / "ledger" / "_gradients")
    assert (len(store), store.manifest.dtype) == (8, "float16")
    assert store.manifest.projection == {"dim": 8, "kind": "rademacher", "seed": 3}


def test_options_are_all_tried():
    own = inspect.signature(PerSampleGradientWriter).parameters.keys() - SHARED - {"dirpath"}
    assert own | {"every_n_steps"} == WRITER.keys(), "give WRITER every option that is the writer's own"
    missing = inspect.signature(PerSampleGradientMonitor).parameters.keys() - EXPANDED.keys() - LOOP.keys()
    assert not missing, f"add {sorted(missing)} to EXPANDED with values that are not the default"


def test_a_function_named_by_its_path_weighs_the_samples(tmp_path):
    (tmp_path / "mean").mkdir()
    plain = command("fit", "--config", str(write(tmp_path / "mean" / "config.yaml", [monitor()])))
    reduction = f"{__name__}.half_of_a_mean"
    halved = command("fit", "--config", str(write(tmp_path / "config.yaml", [monitor(loss_reduction=reduction)])))
    expected = [2 * value for value in column(plain.trainer, "per_sample_grad/norm_mean")]
    assert column(halved.trainer, "per_sample_grad/norm_mean") == pytest.approx(expected, rel=1e-6)


def printed(file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        command("fit", "--config", str(file), "--print_config")
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


def test_the_printed_configuration_is_read_back_as_it_was(tmp_path, capsys):
    first = printed(write(tmp_path / "config.yaml", [monitor(**EXPANDED)]), capsys)
    again = tmp_path / "again.yaml"
    again.write_text(first)
    assert printed(again, capsys) == first
    (callback,) = yaml.safe_load(first)["trainer"]["callbacks"]
    options = callback["init_args"]
    assert {name: options[name] for name in EXPANDED} == EXPANDED
    assert options.keys() == inspect.signature(PerSampleGradientMonitor).parameters.keys()
    cli = command("fit", "--config", str(again))
    assert len(column(cli.trainer, "grads/norm_mean")) == 1


@pytest.mark.parametrize(("option", "value"), WRONG.items(), ids=WRONG)
def test_a_value_that_is_not_allowed_is_refused_in_our_words(option, value, tmp_path, capsys):
    with pytest.raises(OptionError) as ours:
        PerSampleGradientMonitor(**{option: value})
    file = write(tmp_path / "config.yaml", [monitor(**{option: value})])
    with pytest.raises((ValueError, SystemExit)) as refused:
        LightningCLI(Trained, run=False, args=["--config", str(file)])
    said = f"{refused.value}\n{capsys.readouterr().err}"
    if option == "loss_reduction":  # its type says as much: the parser is first
        assert "Expected a typing.Literal['mean', 'sum']" in said
    else:
        assert str(ours.value) in said


def test_a_type_that_is_not_allowed_names_the_option(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command("fit", "--config", str(write(tmp_path / "config.yaml", [monitor(every_n_steps="two")])))
    said = capsys.readouterr().err
    assert "every_n_steps" in said
    assert "two" in said
