"""The rows that a fit writes, against what the module notes of each sample by itself."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

from lightning_persample import (
    OptionError,
    PerSampleError,
    PerSampleGradientMonitor,
    PerSampleGradientWriter,
    PerSampleWarning,
    Projection,
)
from lightning_persample.influence import GradientStore, dataset, ledger, read_ledger, read_manifest, self_influence
from tests.callbacks.indexed_data import ByName, Follows, Names
from tests.callbacks.ledger_runs import NAMES, Noted, SaveAfter, StopAfter, WithDropout, assert_rows, data, fit, rows
from tests.callbacks.runs import make_trainer
from tests.in_turn import in_turn
from tests.processes import run_alone, run_ranks


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "ledger"


def assert_whole(folder):
    """Nothing but whole files of one schema, and the manifest that tells it."""
    names = sorted(path.name for path in folder.iterdir())
    assert [name for name in names if not name.startswith("rows-")] == ["_manifest.json"]
    for part in ledger.Ledger(folder).parts():
        schema = ledger.Ledger(folder).read(part).schema
        assert {field.name: str(field.type) for field in schema} == dict(read_manifest(folder).columns)


@pytest.mark.parametrize("flush_every", [1, 4, 100])
def test_a_row_for_each_sample_of_each_step(folder, flush_every):
    writer = PerSampleGradientWriter(folder, per_layer=2, flush_every=flush_every)
    module = fit(writer, max_epochs=2)
    assert len(module.notes) == 44
    assert len({note["learning_rate"] for note in module.notes}) == 6
    assert_rows(rows(folder), module.notes)
    table = read_ledger(folder)
    sizes = {step: table["step"].to_pylist().count(step) for step in set(table["step"].to_pylist())}
    assert all(row["weight"] == pytest.approx(1 / sizes[row["step"]]) for row in table.to_pylist())
    assert set(table["coverage"].to_pylist()) == {1.0}
    assert_whole(folder)
    assert len(ledger.Ledger(folder).parts()) == {1: 12, 4: 3, 100: 1}[flush_every]


def test_the_manifest_tells_what_the_rows_are(folder):
    module = fit(PerSampleGradientWriter(folder, per_layer=2))
    found = json.loads((folder / "_manifest.json").read_text())
    assert found["format"] == "lightning_persample ledger"
    assert found["format_version"] == 4
    assert found["parameters"] == [name for name, _ in module.named_parameters()]
    assert found["settings"]["loss_reduction"] == "mean"
    assert found["libraries"]["torch"] == torch.__version__
    assert found["columns"]["is_first"] == "bool"
    assert found["columns"]["norm/network.2"] == "double"
    assert found["processes"] == 1


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_is_untouched(folder, accumulate):
    settings = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    results = []
    for callbacks in ([], [PerSampleGradientWriter(folder, flush_every=2)]):
        module = WithDropout()
        make_trainer(callbacks, **settings).fit(module, data(shuffle=True))
        results.append((list(module.parameters()), torch.get_rng_state()))
    (plain, plain_state), (written, written_state) = results
    assert all(torch.equal(*pair) for pair in zip(plain, written, strict=True))
    assert torch.equal(plain_state, written_state)
    assert read_ledger(folder).num_rows == 66


def test_accumulated_batches_have_rows_of_one_step_with_the_weight_of_their_share(folder):
    module = fit(PerSampleGradientWriter(folder), loader=data(20), accumulate_grad_batches=2, max_epochs=2)
    assert_rows(rows(folder, NAMES[:-2]), module.notes)
    table = read_ledger(folder)
    assert table["step"].to_pylist() == [step for step in (0, 0, 1, 1, 2, 3, 3, 4, 4, 5) for _ in range(4)]
    assert table["weight"].to_pylist() == pytest.approx([1 / 8] * 40)


def test_every_second_step_and_a_choice_of_samples(folder):
    module = fit(PerSampleGradientWriter(folder, 2, max_samples=3), max_epochs=2)
    found = rows(folder, NAMES[:-2])
    places = {(row["step"], row["row"]) for row in found}
    assert_rows(found, [note for note in module.notes if (note["step"], note["row"]) in places])
    assert {step: sum(row["step"] == step for row in found) for step in (1, 3, 5, 7, 9, 11)} == {
        **dict.fromkeys((1, 3, 7, 9), 3), 5: 2, 11: 2,
    }  # fmt: skip


class TwoRates(Noted):
    """Each layer has a learning rate of its own, and one parameter none."""

    def on_train_batch_start(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        first, _, second = self.network
        return torch.optim.SGD([{"params": first.parameters(), "lr": 0.1}, {"params": [second.weight], "lr": 0.02}])


def test_different_learning_rates_give_each_sample_its_own(folder):
    module, loader = TwoRates(), data()
    batch = next(iter(loader))
    expected = []
    for i in range(4):
        loss = module.losses([part[i : i + 1] for part in batch]).sum()
        first, bias, second, _ = (g.square().sum() for g in torch.autograd.grad(loss, list(module.parameters())))
        expected.append(float(0.1 * (first + bias) + 0.02 * second))
    fit(PerSampleGradientWriter(folder), module, loader, max_steps=1)
    table = read_ledger(folder).to_pylist()
    assert [row["learning_rate"] * row["norm"] ** 2 for row in table] == pytest.approx(expected, rel=1e-10)


def test_the_scale_of_mixed_precision_is_in_no_weight(folder):
    class Half(Noted):
        def losses(self, batch):
            return super().losses((batch[0].float(), *batch[1:])).float()

        def on_train_batch_start(self, batch, batch_idx):
            pass

    module = Half()
    module.float()
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    settings = {"plugins": MixedPrecision("16-mixed", "cpu", scaler), "accumulate_grad_batches": 2}
    fit(PerSampleGradientWriter(folder), module, data(16), **settings)
    assert read_ledger(folder)["weight"].to_pylist() == pytest.approx([1 / 8] * 16)


class ByHand(Noted):
    """Steps after two backward passes, on one half of the batch each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)  # the Trainer does not count its steps
        losses = self.losses(batch)
        optimizer.zero_grad()
        for part in losses.split(2):
            self.manual_backward(part.mean(), retain_graph=True)
        optimizer.step()
        return {"per_sample": {"loss": losses}}


def test_manual_optimization_has_a_row_for_each_backward(folder):
    module = fit(PerSampleGradientWriter(folder), ByHand(), data(8), max_epochs=2)
    assert read_manifest(folder).settings["step_unit"] == "batches"
    found = rows(folder, ("step", "backward_index", "row", "sample_index", "norm", "loss", "weight"))
    assert [row.pop("step") for row in found] == [step for step in range(4) for _ in range(4)]
    assert [row.pop("backward_index") for row in found] == [0, 0, 1, 1] * 4
    assert [row.pop("weight") for row in found] == [0.5] * 16
    assert_rows(found, module.notes)


def test_keys_that_are_no_ints_are_strings(folder):
    class Named(Follows):
        def training_step(self, batch, batch_idx):
            return self.loss(batch)

    module = Named()
    make_trainer([PerSampleGradientWriter(folder)]).fit(module, DataLoader(ByName(), 4, sampler=Names()))
    table = read_ledger(folder)
    assert sorted(table["sample_index"].to_pylist()) == sorted(f"row {index}" for index in range(22))
    assert sorted(self_influence(table).index) == sorted(f"row {index}" for index in range(22))


def test_an_index_that_is_unknown_is_null(folder):
    loader = DataLoader([tuple(data(8, 4).dataset.tensors)], batch_size=None)
    fit(PerSampleGradientWriter(folder), loader=loader)
    assert read_ledger(folder)["sample_index"].null_count == 8


def test_a_fit_that_fails_has_its_rows(folder):
    with pytest.raises(KeyError, match="stopped"):
        fit(PerSampleGradientWriter(folder), module := Noted(), callbacks=[StopAfter(3)])
    assert_rows(rows(folder, NAMES[:-2]), module.notes)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize(
    ("kind", "step", "accumulate", "is_behind"),
    in_turn(
        [(Noted, 2, 1), (Noted, 6, 1), (Noted, 3, 2), (Noted, 8, 1), (ByHand, 2, 1), (ByHand, 6, 1), (ByHand, 8, 1)],
        [True, False],
    ),
)
def test_a_resumed_fit_leaves_every_step_once(folder, tmp_path, kind, step, accumulate, is_behind):
    settings = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    writer = PerSampleGradientWriter(folder, flush_every=5)
    saves = SaveAfter(step * accumulate, tmp_path / "middle.ckpt")
    trainer = make_trainer([*([writer, saves] if is_behind else [saves, writer]), StopAfter(15)], **settings)
    with pytest.raises(KeyError, match="stopped"):
        trainer.fit(first := kind(), data(24, shuffle=True))
    kept = [note for note in first.notes if place(note) < place(first.notes[step * accumulate * 4])]
    run = read_manifest(folder).run
    second = fit(
        PerSampleGradientWriter(folder, flush_every=3), kind(), data(24, shuffle=True), tmp_path / "middle.ckpt",
        **settings,
    )  # fmt: skip
    assert read_manifest(folder).run == run
    names = [name for name in NAMES[:-3] if kind is Noted or name not in ("step", "row")]
    assert len(kept) == step * accumulate * 4
    assert_rows(rows(folder, names), kept + second.notes)
    make_trainer([], **settings).fit(plain := kind(), data(24, shuffle=True), ckpt_path=tmp_path / "middle.ckpt")
    assert len(kept + second.notes) == len(kept + plain.notes) == 72
    steps = read_ledger(folder)["step"].to_pylist()
    assert steps == sorted(steps)
    assert set(steps) == set(range(math.ceil(18 / accumulate)))
    assert_whole(folder)


class Killed(Exception):
    """Of the process, as far as the ledger can tell."""


def killed(folder, checkpoint, monkeypatch, *others, **options):
    """A fit that saves a checkpoint after six batches, in files of two, and is killed after nine."""

    class Kills(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx + trainer.current_epoch * trainer.num_training_batches == 9:
                raise Killed

    writer = PerSampleGradientWriter(folder, flush_every=2, **options)
    trainer = make_trainer([writer, SaveAfter(6, checkpoint), Kills()], max_epochs=4)
    with monkeypatch.context() as patch:
        patch.setattr(PerSampleGradientWriter, "on_exception", lambda self, *args: self._lock.release())
        with pytest.raises(Killed):
            trainer.fit(Noted(), data())
    return checkpoint


def test_the_ledger_of_a_killed_fit_is_refused_and_read_where_that_is_said(folder, tmp_path, monkeypatch):
    checkpoint = killed(folder, tmp_path / "middle.ckpt", monkeypatch)
    there = read_ledger(folder, partial=True).num_rows
    text = (
        rf"lacks rows \(it has {there}, and what writes it has not come to its end\): its fit goes on, was killed, or"
    )
    for read in (read_ledger, self_influence):
        with pytest.raises(PerSampleError, match=rf"{text} .* with read_ledger\(\.\.\., partial=True\)$"):
            read(folder)
    make_trainer([PerSampleGradientWriter(folder)], max_epochs=4).fit(Noted(), data(), ckpt_path=checkpoint)
    assert_whole(folder)
    assert read_ledger(folder).num_rows == 88 > there > 0


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["rows-00000-000000.parquet"], "file 0 of process 0, which has written 4"),
        (["rows-00000-000002.parquet"], "file 2 of process 0, which had written 3 when the checkpoint was saved"),
        (["rows-00000-000002.parquet", "rows-00000-000003.parquet"], "file 2 of process 0, which had written 3 when"),
        (["_gradients/shard-00000-000001.npy"], "file 1 of process 0, which has written 4"),
        ([f"_gradients/shard-00000-00000{n}.npy" for n in (2, 3)], "file 2 of process 0, which had written 3 when the"),
    ],
)
def test_a_fit_does_not_go_on_where_a_file_of_its_checkpoint_was_removed(folder, tmp_path, monkeypatch, names, says):
    options = {"projection": Projection(4)} if "gradients" in names[0] else {}
    checkpoint = killed(folder, tmp_path / "middle.ckpt", monkeypatch, **options)
    contents = {name: (folder / name).read_bytes() for name in names}
    for name in names:
        (folder / name).unlink()
    again = make_trainer([PerSampleGradientWriter(folder, **options)], max_epochs=4)
    with pytest.raises(OptionError, match=rf"lacks {says}.*: put the files of this run back, or pass another dirpath"):
        again.fit(Noted(), data(), ckpt_path=checkpoint)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    again = make_trainer([PerSampleGradientWriter(folder, **options)], max_epochs=4)
    again.fit(Noted(), data(), ckpt_path=checkpoint)
    assert read_ledger(folder).num_rows == 88
    assert not options or len(GradientStore(folder / "_gradients")) == 88


def test_a_fit_that_is_interrupted_has_all_rows_of_what_it_has_trained(folder):
    class Interrupts(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 5:
                raise KeyboardInterrupt

    with contextlib.suppress(SystemExit, KeyboardInterrupt):
        make_trainer([PerSampleGradientWriter(folder, flush_every=2), Interrupts()], max_epochs=4).fit(Noted(), data())
    assert read_ledger(folder).num_rows == 20
    (folder / "rows-00000-000002.parquet").unlink()
    with pytest.raises(PerSampleError, match=r"lacks 4 of 20 rows: files were removed, or the disk was full"):
        read_ledger(folder)


@pytest.mark.parametrize("is_behind", [True, False])
def test_what_a_checkpoint_has_is_on_the_disk(folder, tmp_path, is_behind):
    class Looks(SaveAfter):
        def on_train_batch_end(self, *args):
            super().on_train_batch_end(*args)
            self.at_end = read_ledger(folder, partial=True).num_rows

        def on_train_batch_start(self, *args):
            self.at_start = read_ledger(folder, partial=True).num_rows

    writer, looks = PerSampleGradientWriter(folder, flush_every=100), Looks(3, tmp_path / "middle.ckpt")
    make_trainer([writer, looks] if is_behind else [looks, writer], max_steps=4).fit(Noted(), data())
    assert (looks.at_end, looks.at_start) == (12, 12)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_batches_whose_gradients_a_checkpoint_loses_lose_their_rows(folder, tmp_path):
    """A checkpoint between two accumulated batches: the gradient of the first is in no step of the resumed fit."""
    settings = {"max_epochs": 1, "accumulate_grad_batches": 2, "ckpt_path": None}
    saves = SaveAfter(3, tmp_path / "middle.ckpt")
    fit(PerSampleGradientWriter(folder, flush_every=1), first := Noted(), data(24), callbacks=[saves], **settings)
    settings["ckpt_path"] = tmp_path / "middle.ckpt"
    fit(PerSampleGradientWriter(folder, flush_every=2), second := Noted(), data(24), **settings)
    assert [note["batch_idx"] for note in second.notes[::4]] == [3, 4, 5]
    assert_rows(rows(folder, NAMES[:-2]), first.notes[:8] + second.notes)
    assert read_ledger(folder)["step"].to_pylist() == [0] * 8 + [1] * 4 + [2] * 8


def place(note):
    return note["epoch"], note["batch_idx"]


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    ended = run_ranks("tests.callbacks.ledger_runs", "ranks", str(folder), timeout=80)
    assert ended.codes == [0, 0], "\n".join(output[-3000:] for output in ended.outputs)
    return folder


def test_two_processes_write_the_rows_of_one(of_two_processes, tmp_path):
    alone, together = tmp_path / "alone", of_two_processes / "ledger"
    fit(PerSampleGradientWriter(alone, per_layer=2), loader=data(24, 6), max_epochs=2)
    names = [name for name in NAMES if name not in ("rank", "row")] + ["weight"]
    order = [("step", "ascending"), ("sample_index", "ascending")]
    expected = read_ledger(alone).sort_by(order).select(names).to_pylist()
    assert_rows(read_ledger(together).sort_by(order).select(names).to_pylist(), expected)
    assert_whole(together)
    for rank in (0, 1):
        own = torch.load(of_two_processes / f"ranks.{rank}.pt")
        assert "holds the ledger of run" in own["refused"]
        assert_rows([row for row in rows(together) if row["rank"] == rank], own["notes"])


def test_a_checkpoint_is_saved_after_the_rows_of_all_processes(of_two_processes):
    """Killed right after, a process that had not written its rows yet would miss them after a resume for good."""
    found = [tuple(row.values()) for row in torch.load(of_two_processes / "at_checkpoint.pt")]
    assert found == [(step, process, row) for step in range(3) for process in (0, 1) for row in range(3)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fits are killed in forks of a process that imports once")
@pytest.mark.parametrize("moments", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_fit_loses_no_row_before_its_last_flush_and_doubles_none(tmp_path, moments):
    ended = run_alone("tests.callbacks.killed_runs", str(tmp_path), str(moments), "0", timeout=110)
    assert ended.codes == [0], ended.outputs[0][-3000:]
    assert ended.outputs[0].count("times, whole") == moments
    assert "a run killed before its first row: its folder is free" in ended.outputs[0]


class FullDisk:
    """Has no room for the files with these numbers."""

    def __init__(self, monkeypatch, full) -> None:
        self.calls, self.full, self.fsync = 0, full, os.fsync
        monkeypatch.setattr(dataset.os, "fsync", self)

    def __call__(self, number):
        self.calls += 1
        if self.calls in self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.fsync(number)


def test_a_full_disk_gives_one_warning_and_the_rows_are_written_later(folder, monkeypatch):
    FullDisk(monkeypatch, range(7, 13))
    with pytest.warns(PerSampleWarning, match="No space left on device") as said:
        module = fit(PerSampleGradientWriter(folder, flush_every=1), max_epochs=2)
    assert len([each for each in said if each.category is PerSampleWarning]) == 1
    assert_rows(rows(folder, NAMES[:-2]), module.notes)
    assert_whole(folder)


def test_a_disk_that_stays_full_loses_rows_and_says_how_many(folder, monkeypatch):
    FullDisk(monkeypatch, range(9, 1000))
    with pytest.warns(PerSampleWarning) as said:
        module = fit(PerSampleGradientWriter(folder, flush_every=1), max_epochs=4)
    texts = [str(each.message) for each in said if each.category is PerSampleWarning]
    written = rows(folder, NAMES[:-2], partial=True)
    assert 0 < len(written) < len(module.notes)
    assert_rows(written, module.notes[: len(written)])
    assert len(texts) == 2
    assert f"{len(module.notes) - len(written)} rows of the ledger in" in texts[1]
    with pytest.raises(
        PerSampleError, match=rf"lacks rows \(it has {len(written)}, .* or had no room on the disk: wait"
    ):
        read_ledger(folder)
    assert_whole(folder)


def test_names_are_forced_to_the_disk_before_a_checkpoint_and_at_the_end(folder, tmp_path, monkeypatch):
    """Each file's content is forced when it is written; the names, which cost as much, once for all that are new."""
    forced, force_names = [], dataset.force_names

    def noted(dirpath):
        forced.append(len(ledger.Ledger(dirpath).parts()))
        force_names(dirpath)

    monkeypatch.setattr(dataset, "force_names", noted)
    writer, saves = PerSampleGradientWriter(folder, flush_every=2), SaveAfter(5, tmp_path / "middle.ckpt")
    fit(writer, callbacks=[saves], max_epochs=2)
    assert forced == [3, 7]
    saves.batches = 1
    fit(PerSampleGradientWriter(tmp_path / "other"), callbacks=[saves], max_steps=1)
    assert forced == [3, 7, 1]  # nothing is new at the end


def test_names_that_cannot_be_forced_to_the_disk_give_one_warning_and_double_no_row(folder, monkeypatch):
    def fails(dirpath):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(dataset, "force_names", fails)
    with pytest.warns(PerSampleWarning, match="Input/output error .of the names of its files") as said:
        module = fit(PerSampleGradientWriter(folder), callbacks=[SaveAfter(3, folder.with_name("middle.ckpt"))])
    assert len([each for each in said if each.category is PerSampleWarning]) == 1
    assert_rows(rows(folder, NAMES[:-2]), module.notes)


class OfOnesOwn(PerSampleGradientWriter):
    """Changes nothing."""


def test_a_subclass_goes_on_in_a_folder_that_was_moved(folder, tmp_path):
    trainer = make_trainer([OfOnesOwn(folder)])
    trainer.fit(first := Noted(), data())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    folder.rename(tmp_path / "moved")
    writer = OfOnesOwn(tmp_path / "moved")
    with pytest.warns(UserWarning, match="callbacks used to create the checkpoint need to be provided"):
        second = fit(writer, loader=data(), ckpt_path=tmp_path / "end.ckpt", max_epochs=2)
    assert_rows(rows(tmp_path / "moved", NAMES[:-2]), first.notes + second.notes)


def test_a_second_fit_of_one_trainer_goes_on(folder):
    trainer = make_trainer([PerSampleGradientWriter(folder)])
    trainer.fit(module := Noted(), data())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data())
    assert_rows(rows(folder, NAMES[:-2]), module.notes)


def test_one_capture_is_shared_with_a_monitor(folder):
    module = fit(PerSampleGradientWriter(folder), callbacks=[PerSampleGradientMonitor()])
    assert_rows(rows(folder, NAMES[:-2]), module.notes)
