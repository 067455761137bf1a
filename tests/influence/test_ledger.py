"""The files of a ledger: whole or not there, of one schema, read together, cut at a step."""

from __future__ import annotations

import errno
import importlib
import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.dataset
import pytest
import torch

from lightning_persample import OptionError, PerSampleError
from lightning_persample.influence import Manifest, as_tensors, read_ledger, read_manifest
from lightning_persample.influence.dataset import PartWriter, write_atomically
from lightning_persample.influence.ledger import BASE_COLUMNS, Ledger, schema_of

COLUMNS = {**BASE_COLUMNS, "loss": "double"}
SETTINGS = {"loss_reduction": "mean", "per_layer": 1}
MANIFEST = Manifest("first", COLUMNS, ("weight", "bias"), settings=SETTINGS, libraries={"torch": "2"}, processes=2)


def table(steps, rank=0, **values):
    """Two rows for each step."""
    steps = [step for step in steps for _ in range(2)]
    own = {name: [0] * len(steps) for name in COLUMNS} | {"step": steps, "rank": [rank] * len(steps)}
    return pyarrow.table({**own, "row": [0, 1] * (len(steps) // 2), **values}, schema=schema_of(COLUMNS))


def write(folder, rank, *parts):
    parts_of_rank = PartWriter(Ledger(folder), rank, 16)
    for steps in parts:
        parts_of_rank.wait(table(steps, rank))
        parts_of_rank.write()


@pytest.fixture
def folder(tmp_path):
    Ledger(tmp_path).write_manifest(MANIFEST)
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_file_names_tell_process_and_order(folder):
    write(folder, 0, [0, 1], [2, 5])
    write(folder, 1, [0, 1])
    write(folder, 0, [6])
    assert names(folder) == [
        "_manifest.json",
        "rows-00000-000000.parquet",
        "rows-00000-000001.parquet",
        "rows-00000-000002.parquet",
        "rows-00001-000000.parquet",
    ]


def test_all_processes_are_read_in_the_order_of_steps(folder):
    write(folder, 1, [0, 1], [2])
    write(folder, 0, [0], [1, 2])
    (folder / ".rows-00000-000002.parquet.tmp").write_bytes(b"half of a")
    (folder / "notes.txt").write_text("of the user")
    found = read_ledger(folder)
    assert found["step"].to_pylist() == [0] * 4 + [1] * 4 + [2] * 4
    assert found["rank"].to_pylist() == [0, 0, 1, 1] * 3
    assert found["row"].to_pylist() == [0, 1] * 6
    assert list(found.to_pandas().columns) == list(COLUMNS)


def test_the_folder_is_read_as_it_is(folder):
    write(folder, 0, [0, 1], [2])
    write(folder, 1, [0, 1, 2])
    files = sorted(str(path) for path in folder.glob("*.parquet"))
    assert pyarrow.dataset.dataset(files, format="parquet").to_table().num_rows == 12


def test_a_ledger_without_rows_has_columns(folder):
    found = read_ledger(folder)
    assert (found.num_rows, found.column_names) == (0, list(COLUMNS))
    Ledger(folder).write_manifest(replace(MANIFEST, columns={}))
    assert read_ledger(folder).column_names == list(BASE_COLUMNS)


def test_columns_as_tensors(folder):
    known = {"loss": [0.5, None], "sample_index": [2**60 + 1, 7]}
    found = as_tensors(table([3], **known))
    assert found["sample_index"].tolist() == [2**60 + 1, 7]
    assert found["sample_index"].dtype == torch.int64
    assert found["loss"].dtype == torch.float64
    assert torch.equal(found["loss"].isnan(), torch.tensor([False, True]))
    assert as_tensors(pyarrow.table({"sample_index": ["a", None], "good": [True, False]}))["sample_index"] == [
        "a",
        None,
    ]
    with pytest.raises(PerSampleError) as refused:
        as_tensors(table([3], sample_index=[1, None]))
    assert "column 'sample_index' has no value in 1 of 2 rows, and int64 has nothing to say so" in str(refused.value)


def test_rows_after_a_step_are_dropped(folder):
    write(folder, 0, [0, 1], [2, 3, 4], [5, 6])
    write(folder, 1, [0], [1, 3], [4])
    Ledger(folder).drop_rows(3)
    parts = Ledger(folder).parts()
    assert [(part.rank, Ledger(folder).read(part)["step"].to_pylist()) for part in parts] == [
        (0, [0, 0, 1, 1]),
        (0, [2, 2]),
        (1, [0, 0]),
        (1, [1, 1]),
    ]
    assert sorted(set(read_ledger(folder)["step"].to_pylist())) == [0, 1, 2]
    before = names(folder)
    Ledger(folder).drop_rows(3)
    assert names(folder) == before
    write(folder, 0, [3])
    assert Ledger(folder).parts()[2].counter == 2  # behind those that were kept
    Ledger(folder).drop_rows(0)
    assert names(folder) == ["_manifest.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_what_was_there(folder, monkeypatch, call):
    write(folder, 0, [0])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    parts = PartWriter(Ledger(folder), 0, most_waiting=2)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    for step in (1, 2, 3):
        parts.wait(table([step]))
        with pytest.raises(OSError, match="No space left"):
            parts.write()
    with pytest.raises(OSError, match="No space left"):
        Ledger(folder).write_manifest(replace(MANIFEST, run="second"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert (parts.waiting, parts.lost) == (4, 2)
    monkeypatch.undo()
    parts.write()
    assert parts.waiting == 0
    assert sorted(set(read_ledger(folder)["step"].to_pylist())) == [0, 2, 3]


def test_a_name_that_cannot_be_forced_to_the_disk_doubles_no_row(folder, monkeypatch):
    calls, fsync = [], os.fsync

    def fails_second(number):  # the first one is of the file
        calls.append(number)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        fsync(number)

    monkeypatch.setattr(os, "fsync", fails_second)
    parts = PartWriter(Ledger(folder), 0, 16)
    parts.wait(table([1]))
    parts.write()
    with pytest.raises(OSError, match="Input/output error"):
        parts.settle()
    parts.wait(table([2]))
    parts.write()
    parts.settle()
    assert len(calls) == 4
    parts.settle()  # nothing is new
    assert len(calls) == 4
    assert read_ledger(folder)["step"].to_pylist() == [1, 1, 2, 2]


def test_a_file_is_replaced_in_one_step(tmp_path):
    write_atomically(tmp_path / "_manifest.json", b"one")
    write_atomically(tmp_path / "_manifest.json", b"two")
    assert (names(tmp_path), (tmp_path / "_manifest.json").read_bytes()) == (["_manifest.json"], b"two")


def test_the_manifest_is_read_back(folder):
    assert read_manifest(folder) == MANIFEST


def test_what_is_no_ledger_is_refused(tmp_path):
    with pytest.raises(PerSampleError) as refused:
        read_ledger(tmp_path)
    assert str(refused.value) == f"{str(tmp_path)!r} holds no ledger: _manifest.json is missing"
    (tmp_path / "_manifest.json").write_text(json.dumps({"format": "lightning_persample ledger", "format_version": 7}))
    with pytest.raises(PerSampleError) as refused:
        read_ledger(tmp_path)
    assert "is of format 'lightning_persample ledger', version 7; this version of" in str(refused.value)
    assert "reads format 'lightning_persample ledger', version 4" in str(refused.value)


SECOND = replace(MANIFEST, run="second", columns={})


def test_a_run_goes_on_where_its_checkpoint_was(folder):
    write(folder, 0, [0, 1, 2])
    (folder / ".rows-00000-000001.parquet.tmp").write_bytes(b"half of a")
    found = Ledger(folder).open(SECOND, {"first": 2}, overwrite=False)
    assert found == MANIFEST
    assert names(folder) == ["_manifest.json", "rows-00000-000000.parquet"]


@pytest.mark.parametrize(
    ("new", "text"),
    [
        (replace(SECOND, settings={**MANIFEST.settings, "per_layer": 2}), "per_layer=1, but now there is per_layer=2"),
        (
            replace(SECOND, settings={**MANIFEST.settings, "loss_reduction": "sum"}),
            "loss_reduction='mean', but now there is loss_reduction='sum'",
        ),
        (
            replace(SECOND, parameters=("weight",)),
            "2 parameters, where they differ first 'bias', but now there is 1 parameters and no further one",
        ),
        (
            replace(SECOND, parameters=("weight", "bias", "x")),
            "2 parameters and no further one, but now there is 3 parameters, where they differ first 'x'",
        ),
    ],
)
def test_a_run_that_is_not_alike_is_refused_with_both_values(folder, new, text):
    write(folder, 0, [0, 1])
    before = names(folder)
    with pytest.raises(OptionError) as refused:
        Ledger(folder).open(new, {"first": 1}, overwrite=False)
    assert text in str(refused.value)
    assert names(folder) == before


def test_rows_of_another_run_are_kept_unless_told(folder):
    write(folder, 0, [0, 1])
    with pytest.raises(OptionError, match=r"holds the ledger of run first \(1 files\), but this one starts a new"):
        Ledger(folder).open(SECOND, {}, overwrite=False)
    (folder / "_manifest.json").unlink()
    with pytest.raises(OptionError, match=r"of a run without manifest \(1 files\), .* another dirpath, put its _manif"):
        Ledger(folder).open(SECOND, {"third": 4}, overwrite=False)
    assert Ledger(folder).open(SECOND, {}, overwrite=True) == SECOND
    assert names(folder) == ["_manifest.json"]
    Ledger(folder).remove_if_empty("first")
    assert names(folder) == ["_manifest.json"]
    Ledger(folder).remove_if_empty("second")
    assert Ledger(folder).open(MANIFEST, {}, overwrite=False).run == "first"


def test_without_pyarrow_the_extra_is_named(folder, monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ModuleNotFoundError) as refused:
        read_ledger(folder)
    assert "pip install 'lightning-persample[influence]'" in str(refused.value)


@pytest.mark.parametrize(("lost", "said"), [(0, "file 0 of process 0, which has written 3"), (2, "2 of 6 rows")])
def test_a_file_that_was_removed_is_noticed(folder, lost, said):
    write(folder, 0, [0], [1], [2])
    Ledger(folder).promise(read_manifest(folder).run)
    assert read_ledger(folder).num_rows == 6
    Ledger(folder).parts()[lost].path.unlink()
    with pytest.raises(PerSampleError) as refused:
        read_ledger(folder)
    text = (
        f"lacks {said}: files were removed, or the disk was full when they were to be written: put them back, or read"
    )
    assert text in str(refused.value)
    assert read_ledger(folder, partial=True).num_rows == 4
    with pytest.raises(OptionError, match=f"lacks {said}: put the files of this run back, or pass another dirpath"):
        Ledger(folder).check(read_manifest(folder), {read_manifest(folder).run: 3}, overwrite=False)


def test_a_run_that_ended_and_is_killed_while_it_drops_rows_goes_on(folder, monkeypatch):
    write(folder, 0, [0], [1], [2], [3])
    Ledger(folder).promise("first")
    unlink = Path.unlink

    def killed_at_the_second_file(path, **options):
        if path.name == "rows-00000-000002.parquet":
            raise KeyboardInterrupt
        unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed_at_the_second_file)
        with pytest.raises(KeyboardInterrupt):
            Ledger(folder).open(SECOND, {"first": 1})
    assert Ledger(folder).open(SECOND, {"first": 1}) == replace(MANIFEST, rows=-1)
    Ledger(folder).promise("first")
    assert read_ledger(folder)["step"].to_pylist() == [0, 0]


def test_a_file_in_which_one_bit_was_flipped_is_named(folder):
    parts = PartWriter(Ledger(folder), 0, 16)
    parts.wait(table([0, 1, 2], learning_rate=[1.5] * 6))
    parts.write()
    path = folder / "rows-00000-000000.parquet"
    whole = path.read_bytes()
    place = whole.index(struct.pack("<d", 1.5))
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
    with pytest.raises(PerSampleError, match=rf"{path.name}' is broken: it is no whole file of its kind"):
        read_ledger(folder)


@pytest.mark.parametrize("name", ["_manifest.json", "rows-00000-000000.parquet"])
def test_a_file_that_was_cut_off_is_named(folder, name):
    write(folder, 0, [0, 1, 2])
    path = folder / name
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(PerSampleError) as refused:
        read_ledger(folder)
    assert str(refused.value) == (
        f"{str(path)!r} is broken: it is no whole file of its kind (cut off, or changed by something else). Put it "
        "back from a copy, or write the folder again"
    )


def test_every_changed_byte_of_a_footer_is_noticed(folder):
    write(folder, 0, [0, 1, 2])
    path = folder / "rows-00000-000000.parquet"
    whole = path.read_bytes()
    start = len(whole) - 12 - int.from_bytes(whole[-8:-4], "little")  # of its checksum
    assert b"norm" in whole[start:]
    for place in range(start, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x0D]) + whole[place + 1 :])
        with pytest.raises(PerSampleError, match=rf"{path.name}' is broken: it is no whole file of its kind"):
            read_ledger(folder)
    path.write_bytes(whole)
    assert read_ledger(folder)["step"].to_pylist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("columns", [["norm"], None])
def test_a_folder_in_place_of_a_ledgers_file_is_named(folder, columns):
    path = folder / "rows-00000-000000.parquet"
    path.mkdir()
    with pytest.raises(PerSampleError, match=rf"{path.name}' is broken: it is no whole file of its kind"):
        list(Ledger(folder).tables(columns))


@pytest.mark.parametrize("size", range(14))
def test_a_file_of_a_few_bytes_is_named(folder, size):
    write(folder, 0, [0, 1, 2])
    path = folder / "rows-00000-000000.parquet"
    path.write_bytes(path.read_bytes()[len(path.read_bytes()) - size :])
    with pytest.raises(PerSampleError, match=rf"{path.name}' is broken: it is no whole file of its kind"):
        read_ledger(folder)


def test_a_file_in_the_place_of_another_is_refused(tmp_path):
    ledgers = [tmp_path / "one", tmp_path / "other"]
    for place, each in enumerate(ledgers):
        each.mkdir()
        Ledger(each).write_manifest(replace(MANIFEST, run=f"run {place}"))
        write(each, 0, [0, 1], [2, 3])
        write(each, 1, [0, 1])
    own, others = ([each / part.path.name for part in Ledger(ledgers[0]).parts()] for each in ledgers)
    contents = [path.read_bytes() for path in own]
    assert len(read_ledger(ledgers[0], partial=True)) == 12
    for place, path in enumerate(own):
        for content in [*contents[:place], *contents[place + 1 :], others[place].read_bytes()]:
            path.write_bytes(content)
            with pytest.raises(PerSampleError, match=rf"{path.name}' is broken"):
                read_ledger(ledgers[0], partial=True)
        path.write_bytes(contents[place])
    assert len(read_ledger(ledgers[0], partial=True)) == 12
