"""What a writer refuses: rows of another run, options and columns that do not fit."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import shutil

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_persample import OptionError, PerSampleGradientWriter, PerSampleWarning
from lightning_persample.gradients import Projection
from lightning_persample.influence import GradientStore, dataset, read_ledger, read_manifest
from tests.callbacks.ledger_runs import NAMES, Noted, SaveAfter, StopAfter, assert_rows, data, fit, rows
from tests.callbacks.runs import make_trainer
from tests.processes import run_alone


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "ledger"


def test_a_fit_without_pyarrow_does_not_start(folder, monkeypatch):
    imported = importlib.import_module

    def without_pyarrow(name, *package):
        if name == "pyarrow":
            raise ModuleNotFoundError("No module named 'pyarrow'", name=name)
        return imported(name, *package)

    monkeypatch.setattr(importlib, "import_module", without_pyarrow)
    module = Noted()
    with pytest.raises(
        OptionError, match="a ledger is written and read by pyarrow, which is not installed: pip install"
    ):
        fit(PerSampleGradientWriter(folder), module)
    assert module.notes == []


def test_another_run_is_refused(folder):
    fit(PerSampleGradientWriter(folder))
    run = read_manifest(folder).run
    with pytest.raises(OptionError) as refused:
        fit(PerSampleGradientWriter(folder))
    text = f"dirpath={str(folder)!r} holds the ledger of run {run} (1 files), but this one starts a new run"
    assert text in str(refused.value)
    assert "overwrite=True" in str(refused.value)
    module = fit(PerSampleGradientWriter(folder, overwrite=True), max_epochs=2)
    assert read_manifest(folder).run != run
    assert_rows(rows(folder, NAMES[:-2]), module.notes)


def test_a_checkpoint_of_another_run_or_of_other_settings_is_refused(folder, tmp_path):
    other = PerSampleGradientWriter(tmp_path / "other")
    trainer = make_trainer([other])
    trainer.fit(Noted(), data())
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    fit(PerSampleGradientWriter(folder))
    with pytest.raises(OptionError) as refused:
        fit(PerSampleGradientWriter(tmp_path / "other", per_layer=2), ckpt_path=tmp_path / "other.ckpt", max_epochs=2)
    assert "written with per_layer=None, but now there is per_layer=2" in str(refused.value)
    (tmp_path / "moved").symlink_to(folder)
    runs = [read_manifest(path).run for path in (folder, tmp_path / "other")]
    with pytest.warns(UserWarning, match="callbacks used to create"), pytest.raises(OptionError) as refused:
        fit(PerSampleGradientWriter(tmp_path / "moved"), ckpt_path=tmp_path / "other.ckpt", max_epochs=2)
    assert f"holds the ledger of run {runs[0]}" in str(refused.value)
    assert f"this one continues run {runs[1]}" in str(refused.value)


class FitsInBetween(Callback):
    """Starts another fit in the folder before the first one has written a row."""

    def __init__(self, folder, **options) -> None:
        self.folder, self.options = folder, options

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 1:
            fit(PerSampleGradientWriter(self.folder, **self.options))


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_folder_of_a_fit_that_goes_on_is_refused(folder, overwrite):
    with pytest.raises(OptionError, match="ledger' is being written to by another fit or collection, in this process"):
        fit(PerSampleGradientWriter(folder), callbacks=[FitsInBetween(folder, overwrite=overwrite)])
    assert read_ledger(folder).num_rows == 4
    other = folder.with_name("other")
    module = fit(PerSampleGradientWriter(folder, overwrite=True), callbacks=[FitsInBetween(other)])
    assert_rows(rows(folder, NAMES[:-2]), module.notes)
    assert read_ledger(other).num_rows == 22
    assert not [*folder.glob("*.lock"), *other.glob("*.lock")]


@pytest.fixture(scope="module")
def two_writers(tmp_path_factory):
    ended = run_alone("tests.callbacks.two_writers", str(tmp_path_factory.mktemp("two")))
    assert ended.codes == [0], ended.outputs[0]
    return json.loads(ended.outputs[0].splitlines()[-1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("kind", ["fit", "collect"])
def test_two_processes_on_one_folder_are_refused_and_that_of_a_killed_one_is_taken_over(two_writers, kind, batch):
    found = two_writers[f"{kind} {batch}"]
    assert found["untouched"]
    for text in found["while"].values():
        assert "is being written to by another fit or collection, in this process or another: wait for its end" in text
    complete, partial = found["left"]
    assert "lacks rows (it has " in complete if kind == "fit" else f"lacks {22 - 4 * batch} of 22 rows" in complete
    assert partial == str(4 * batch)
    if kind == "fit" and batch:  # rows that were written are kept, unless it is said that they may go
        assert "holds the ledger of run" in found["after"]["plain"]
        assert "(2 files), but this one starts a new run: pass another dirpath" in found["after"]["plain"]
    else:
        assert found["after"]["plain"] == "None"
    assert (found["after"]["overwrite"], found["rows"]) == ("None", "22")


def take_and_release(folder):
    lock = dataset.FolderLock(folder)
    lock.take()
    lock.release()


class Fails(Noted):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise ValueError("of the user's")
        return super().training_step(batch, batch_idx)


def test_a_fit_that_fails_holds_the_folder_until_its_last_rows_are_written(folder, monkeypatch):
    flush, refused = PerSampleGradientWriter._flush, []

    def watched(self, trainer):
        with pytest.raises(OptionError) as error:
            take_and_release(folder)
        refused.append(str(error.value))
        flush(self, trainer)

    monkeypatch.setattr(PerSampleGradientWriter, "_flush", watched)
    with pytest.raises(ValueError, match="of the user's"):
        make_trainer([PerSampleGradientWriter(folder)]).fit(Fails(), data())
    assert len(refused) == 1
    assert "is being written to by another fit" in refused[0]
    assert read_ledger(folder).num_rows > 0
    take_and_release(folder)


def test_a_writer_that_has_failed_lets_go_of_its_folder(folder, monkeypatch):
    def fault(self, *args, **kwargs):
        raise RuntimeError("a fault")

    monkeypatch.setattr(PerSampleGradientWriter, "_complete", fault)
    writer = PerSampleGradientWriter(folder)
    with pytest.warns(PerSampleWarning, match="gives nothing more in this fit"):
        make_trainer([writer]).fit(Noted(), data())
    take_and_release(folder)


def test_a_fit_whose_folder_another_one_takes_stops_writing_and_goes_on(folder, monkeypatch):
    """Where the system knows no locks."""

    def unknown(file):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(dataset, "_lock", unknown)
    projection = Projection(dim=4)
    between = FitsInBetween(folder, overwrite=True, projection=projection)
    with pytest.warns(PerSampleWarning, match="was taken by run") as caught:
        module = fit(PerSampleGradientWriter(folder, flush_every=1, projection=projection), callbacks=[between])
    (text,) = [str(each.message) for each in caught if each.category is PerSampleWarning]
    run = read_manifest(folder).run
    assert text.startswith(f"the folder {str(folder)!r} was taken by run {run} (overwrite=True) while this fit, run ")
    assert text.endswith("rows of this fit are no longer written. Give each fit its dirpath")
    assert len(module.notes) == 22
    table = read_ledger(folder)
    assert table.num_rows == 22  # of the other run alone, which is complete
    assert len(GradientStore(folder / "_gradients")) == 22


class RemovesFolder(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 1:
            shutil.rmtree(self.folder)


def test_a_folder_that_is_removed_in_a_fit_costs_its_rows_alone(folder):
    writer = PerSampleGradientWriter(folder, flush_every=1)
    with pytest.warns(PerSampleWarning) as caught:
        fit(writer, callbacks=[RemovesFolder(folder)], max_epochs=1)
    first, last = [str(each.message) for each in caught if each.category is PerSampleWarning]
    assert "cannot be written: [Errno 2] No such file or directory" in first
    assert re.search(r"\d+ rows of the ledger in '.*' were not written", last)


def test_two_writers_of_a_trainer_need_a_folder_each(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    with pytest.raises(OptionError, match="'ledger': two writers of this Trainer have one folder"):
        fit(PerSampleGradientWriter("ledger"), callbacks=[PerSampleGradientWriter(folder, 2)])
    assert not folder.exists()


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("is_first", [True, False])
def test_a_checkpoint_of_two_writers_has_the_files_of_each(is_first, tmp_path):
    def writers():
        often, seldom = (
            PerSampleGradientWriter(tmp_path / "often", flush_every=1),
            PerSampleGradientWriter(tmp_path / "seldom", 2),
        )
        return (often, seldom) if is_first else (seldom, often)

    one, other = writers()
    trainer = make_trainer([one, other, SaveAfter(4, tmp_path / "last.ckpt"), StopAfter(4)], max_epochs=1)
    with pytest.raises(KeyError, match="stopped"):
        trainer.fit(Noted(), data())
    counts = {each.name: len(list(each.glob("*.parquet"))) for each in (tmp_path / "often", tmp_path / "seldom")}
    assert counts == {"often": 4, "seldom": 1}
    one, other = writers()
    fit(one, loader=data(), callbacks=[other], ckpt_path=tmp_path / "last.ckpt", max_epochs=2)
    found = {name: set(read_ledger(tmp_path / name)["step"].to_pylist()) for name in counts}
    steps = max(found["often"]) + 1
    assert found == {"often": {*range(steps)}, "seldom": {*range(1, steps, 2)}}
    for path in sorted((tmp_path / "often").glob("*.parquet"))[3:]:
        path.unlink()
    text = "often' lacks file 3 of process 0, which had written 4 when the checkpoint was saved"
    one, other = writers()
    with pytest.raises(OptionError, match=text):
        fit(one, loader=data(), callbacks=[other], ckpt_path=tmp_path / "last.ckpt", max_epochs=2)


def test_a_fit_that_failed_before_its_first_row_leaves_the_folder_to_the_next(folder):
    class Fails(Noted):
        def training_step(self, batch, batch_idx):
            raise KeyError("mistaken")

    with pytest.raises(KeyError, match="mistaken"):
        fit(PerSampleGradientWriter(folder), Fails())
    assert not any(folder.iterdir())
    module = fit(PerSampleGradientWriter(folder))
    assert_rows(rows(folder, NAMES[:-2]), module.notes)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dirpath": ""}, "dirpath='' is not allowed: dirpath must be the path of a folder"),
        ({"dirpath": 3}, "dirpath=3 is not allowed"),
        ({"flush_every": 0}, "flush_every=0 is not allowed: flush_every must be an int >= 1"),
        ({"per_layer": 0}, "per_layer=0 is not allowed: per_layer must be None or an int >= 1"),
        ({"columns": 1}, "columns=1 is not allowed: columns must be None, some of 'loss', 'el2n', 'margin', or a call"),
        ({"columns": "loss"}, "columns='loss' is not allowed: columns must be None, some of 'loss', 'el2n', 'margin'"),
        ({"columns": ("aum",)}, "columns=('aum',) is not allowed: columns must be None, some of 'loss', 'el2n'"),
        ({"overwrite": None}, "overwrite=None is not allowed: overwrite must be True or False"),
        ({"every_n_steps": 0}, "every_n_steps=0 is not allowed"),
    ],
)
def test_options_that_are_not_allowed(options, text):
    with pytest.raises(OptionError) as refused:
        PerSampleGradientWriter(**{"dirpath": "ledger", **options})
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (lambda outputs, batch: [1], "columns(outputs, batch) returned list, but it must be a dict of tensors (B,)"),
        (
            lambda outputs, batch: {"x": 1.0},
            "columns(outputs, batch) returned 'x': float, but it must be a tensor (B,)",
        ),
        (lambda outputs, batch: {"x": torch.zeros(3)}, "column 'x' has shape (3,), but a ledger needs one value for"),
        (lambda outputs, batch: {"norm": torch.zeros(4)}, "column 'norm' of the run has the name of a column of every"),
        (lambda outputs, batch: {"loss": torch.zeros(4)}, "a column 'loss' that training_step returned, too"),
        (lambda outputs, batch: {"x": torch.zeros(4) * 1j}, "column 'x' has dtype torch.complex64; a ledger has real"),
        (
            lambda outputs, batch: {"x": torch.zeros(4).to(torch.uint16)},
            "dtype torch.uint16; a ledger has real numbers, ints with",
        ),
        (
            lambda outputs, batch: {f"x{int(batch[2][0] > 3)}": torch.zeros(len(batch[0]))},
            "column 'x1' is new in step 1: the columns of a ledger are those of its first row, step, epoch",
        ),
        (
            lambda outputs, batch: {"x": torch.zeros(len(batch[0])).to(torch.int if batch[2][0] < 3 else torch.float)},
            "column 'x' was of type int64 in the first row and is double now",
        ),
    ],
)
def test_columns_that_do_not_fit_are_refused(folder, columns, text):
    with pytest.raises(OptionError) as refused:
        fit(PerSampleGradientWriter(folder, columns=columns), loader=data())
    assert text in str(refused.value)


class ChangesFolder(Callback):
    def __init__(self, monkeypatch, folder) -> None:
        self.monkeypatch, self.folder = monkeypatch, folder

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.monkeypatch.chdir(self.folder)


def test_a_relative_folder_is_that_of_the_start_wherever_the_fit_goes(tmp_path, monkeypatch):
    start, elsewhere = tmp_path / "start", tmp_path / "elsewhere"
    start.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(start)
    projection = Projection(dim=4)
    writer = PerSampleGradientWriter("ledger", projection=projection, flush_every=2)
    module = fit(writer, callbacks=[ChangesFolder(monkeypatch, elsewhere)])
    assert_rows(rows(start / "ledger", NAMES[:-2]), module.notes)
    assert len(GradientStore(start / "ledger" / "_gradients")) == len(module.notes)
    assert not any(elsewhere.iterdir())


def test_a_dry_run_writes_nothing_and_leaves_the_folder_to_the_fit(folder):
    writer = PerSampleGradientWriter(folder, projection=Projection(dim=4))
    fit(writer, fast_dev_run=2)
    assert not folder.exists()
    module = fit(writer)
    assert_rows(rows(folder, NAMES[:-2]), module.notes)
    with pytest.raises(OptionError, match="column 'x' has shape"):  # it shows what the fit would refuse
        fit(PerSampleGradientWriter(folder, columns=lambda outputs, batch: {"x": torch.zeros(3)}), fast_dev_run=1)
    assert_rows(rows(folder, NAMES[:-2]), module.notes)
