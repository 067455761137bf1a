"""Stores that go on: what is refused, with both values, and which rows are kept."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from lightning_persample import OptionError, PerSampleError
from lightning_persample.influence import GradientStore, StoreWriter, check_comparable
from lightning_persample.influence.shards import Shards, columns_for
from tests.influence.stores import CHECKPOINTS, MANIFEST, SIZES, by_numpy, gradients, made, names, write

PROJECTED = replace(MANIFEST, projection={"dim": 256, "kind": "normal", "seed": 0}, settings={"loss_reduction": "mean"})
SECOND = replace(MANIFEST, run="second")

DIFFERENT = [
    (
        {"projection": {"dim": 64, "kind": "normal", "seed": 0}},
        "projection={'dim': 256, 'kind': 'normal', 'seed': 0}",
        "projection={'dim': 64, 'kind': 'normal', 'seed': 0}",
    ),
    (
        {"projection": {"dim": 256, "kind": "normal", "seed": 1}},
        "projection={'dim': 256, 'kind': 'normal', 'seed': 0}",
        "projection={'dim': 256, 'kind': 'normal', 'seed': 1}",
    ),
    ({"projection": None}, "projection={'dim': 256, 'kind': 'normal', 'seed': 0}", "projection=None"),
    (
        {"parameters": columns_for({**SIZES, "bias": ((2, 2), 4)})},
        "3 parameters, where they differ first 'bias' of shape (4,) in 4 numbers",
        "3 parameters, where they differ first 'bias' of shape (2, 2) in 4 numbers",
    ),
    (
        {"parameters": columns_for({"weight": SIZES["weight"], "shift": ((4,), 4)})},
        "3 parameters, where they differ first 'bias' of shape (4,) in 4 numbers",
        "2 parameters, where they differ first 'shift' of shape (4,) in 4 numbers",
    ),
    (
        {"parameters": columns_for({"weight": SIZES["weight"], "bias": SIZES["bias"]})},
        "3 parameters, where they differ first 'scale' of shape (2, 2) in 4 numbers",
        "2 parameters and no further one",
    ),
]
DIFFERENT_RUN = [
    *DIFFERENT,
    ({"dtype": "float16"}, "dtype='float32'", "dtype='float16'"),
    ({"columns": ("el2n",)}, "columns=('loss',)", "columns=('el2n',)"),
    ({"samples": 31}, "samples=30", "samples=31"),
    ({"settings": {"loss_reduction": "sum"}}, "loss_reduction='mean'", "loss_reduction='sum'"),
    ({"settings": {"loss_reduction": "mean", "x": 1}}, "x=None", "x=1"),
    (
        {"checkpoints": ({"step": 6, "learning_rate": 0.1, "path": "a.ckpt"},)},
        "checkpoint 0 {'step': 5, 'learning_rate': 0.1, 'path': 'a.ckpt'}",
        "checkpoint 0 {'step': 6, 'learning_rate': 0.1, 'path': 'a.ckpt'}",
    ),
]


@pytest.mark.parametrize(("changed", "before", "now"), DIFFERENT)
def test_stores_that_differ_are_not_compared(tmp_path, changed, before, now):
    one = GradientStore(made(tmp_path / "one", PROJECTED))
    other = GradientStore(made(tmp_path / "other", replace(PROJECTED, **changed)))
    with pytest.raises(PerSampleError) as refused:
        check_comparable(one, other)
    assert f"{str(tmp_path / 'one')!r} has {before}, and" in str(refused.value)
    assert f"{str(tmp_path / 'other')!r} has {now}; collect both with the same" in str(refused.value)
    check_comparable(one, one)


@pytest.mark.parametrize("changed", [changed for changed, _, _ in DIFFERENT_RUN[len(DIFFERENT) :]])
def test_stores_of_the_same_numbers_are_compared(tmp_path, changed):
    one = GradientStore(made(tmp_path / "one", PROJECTED))
    check_comparable(one, GradientStore(made(tmp_path / "other", replace(PROJECTED, **changed))))


def test_what_two_stores_have_in_common_is_compared(tmp_path):
    one = GradientStore(made(tmp_path / "one", MANIFEST))
    sizes = {"other": ((3,), 3), "bias": SIZES["bias"], "weight": SIZES["weight"]}
    other = GradientStore(made(tmp_path / "other", replace(MANIFEST, parameters=columns_for(sizes))))
    check_comparable(one.parameters(["bias", "weight"]), other.parameters(["bias", "weight"]))
    with pytest.raises(PerSampleError, match="differ first 'weight' of shape"):
        check_comparable(one, other)


def test_another_version_is_refused_with_both(tmp_path):
    folder = made(tmp_path / "one")
    found = json.loads((folder / "_manifest.json").read_text())
    (folder / "_manifest.json").write_text(json.dumps({**found, "format_version": 2}))
    with pytest.raises(PerSampleError) as refused:
        GradientStore(folder)
    assert "is of format 'lightning_persample gradients', version 2; this version of" in str(refused.value)
    assert "reads format 'lightning_persample gradients', version 4" in str(refused.value)


@pytest.mark.parametrize(("changed", "before", "now"), DIFFERENT_RUN)
def test_a_run_that_is_not_alike_is_refused_with_both_values(tmp_path, changed, before, now):
    folder = made(tmp_path / "one", PROJECTED)
    write(folder, gradients(5), manifest=PROJECTED)
    there = {path.name: path.read_bytes() for path in folder.iterdir()}
    new = replace(PROJECTED, run="second", **changed)
    with pytest.raises(OptionError) as refused:
        Shards(folder).open(new)
    assert f"holds gradients that were written with {before}, but now there is {now}: go on" in str(refused.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == there
    assert Shards(folder).open(new, {}, overwrite=True) == new
    assert names(folder) == ["_manifest.json"]


def test_any_run_of_the_same_values_goes_on(tmp_path):
    folder = made(tmp_path / "one", PROJECTED)
    write(folder, gradients(5), manifest=PROJECTED)
    (folder / ".shard-00001-000001.npy.tmp").write_bytes(b"half of a")
    before = [name for name in names(folder) if name.startswith("shard-00000")]
    further = (*CHECKPOINTS, {"step": 20, "learning_rate": 0.01, "path": "c.ckpt"})
    found = Shards(folder).open(replace(PROJECTED, run="second", libraries={"torch": "3"}, checkpoints=further))
    assert found == replace(PROJECTED, libraries={"torch": "3"}, checkpoints=further)
    assert Shards(folder).manifest() == found
    assert names(folder) == ["_manifest.json", *before]
    assert Shards(folder).open(replace(PROJECTED, checkpoints=CHECKPOINTS[:1])).checkpoints == further


def test_rows_of_another_run_are_kept_unless_told(tmp_path):
    folder = made(tmp_path / "one")
    write(folder, gradients(5))
    with pytest.raises(OptionError, match=r"holds the gradients of run first \(2 files\), but this one starts a new"):
        Shards(folder).open(SECOND, {})
    (folder / "_manifest.json").unlink()
    with pytest.raises(OptionError, match=r"holds the gradients of a run without manifest .*, but this one continues"):
        Shards(folder).open(SECOND, {"third": 4})
    assert Shards(folder).open(SECOND, {}, overwrite=True) == SECOND
    assert names(folder) == ["_manifest.json"]
    assert Shards(folder).open(MANIFEST, {}) == MANIFEST  # there is nothing to lose


def test_a_run_of_which_a_shard_was_removed_does_not_go_on(tmp_path):
    folder = made(tmp_path / "one")
    write(folder, gradients(12), step=torch.arange(12))
    (folder / "shard-00000-000001.npy").unlink()
    with pytest.raises(OptionError, match="lacks file 1 of process 0, which has written 3: put the files of this"):
        Shards(folder).open(SECOND, {"first": 12})
    assert Shards(folder).open(SECOND, {"first": 4}) == MANIFEST
    assert GradientStore(folder).rows["step"].tolist() == [0, 1, 2, 3]


def test_a_run_goes_on_where_its_checkpoint_was(tmp_path):
    folder = made(tmp_path / "one")
    steps = torch.arange(12) // 2
    values = gradients(12)
    for rank in (0, 1):
        write(folder, values + rank, rank, step=steps, sample_index=steps)
    assert Shards(folder).open(SECOND, {"first": 3}) == MANIFEST
    store = GradientStore(folder)
    assert store.rows["step"].tolist() == [0, 0, 1, 1, 2, 2] * 2
    assert torch.equal(next(store.blocks())[1], torch.cat([values[:6], values[:6] + 1]))
    assert [name for name in names(folder) if "00000-" in name] == ["shard-00000-000000.npy", "shard-00000-000001.npy"]
    write(folder, values[6:], 0, step=steps[6:])
    assert "shard-00000-000002.npy" in names(folder)
    found = [row["step"] for row in by_numpy(folder)]
    assert sorted(found) == sorted([0, 0, 1, 1, 2, 2] * 2 + [3, 3, 4, 4, 5, 5])
    Shards(folder).open(SECOND, {"first": 0})
    assert names(folder) == ["_manifest.json"]


def test_rows_are_dropped_wherever_they_are(tmp_path):
    folder = made(tmp_path / "one")
    steps = torch.tensor([5, 0, 7, 1, 2, 9, 3, 8, 9, 9, 9, 9])
    values = gradients(12)
    write(folder, values, step=steps)
    Shards(folder).drop_rows(4)
    Shards(folder).drop_rows(4)
    kept = steps < 4
    store = GradientStore(folder)
    assert store.rows["step"].tolist() == steps[kept].tolist()
    assert torch.equal(next(store.blocks())[1], values[kept])
    Shards(folder).drop_rows(2)
    assert torch.equal(next(GradientStore(folder).blocks())[1], values[steps < 2])


def test_a_writer_counts_on(tmp_path):
    folder = made(tmp_path / "one")
    write(folder, gradients(5), 1)
    (folder / "shard-00001-000000.npy").unlink()
    writer = StoreWriter(folder, MANIFEST, 1)
    writer.add(gradients(1), {})
    writer.flush()
    assert "shard-00001-000002.npy" in names(folder)
    assert len(GradientStore(folder)) == 2
