"""Stores whose writer is killed, or whose disk is full: what was written is there, as it was."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_persample import OptionError, PerSampleError
from lightning_persample.influence import GradientStore, StoreWriter, grad_dot, read_ledger
from lightning_persample.influence.shards import Shards, columns_for
from tests.influence.stores import MANIFEST, gradients, made, write
from tests.processes import run_alone


@pytest.fixture
def folder(tmp_path):
    return made(tmp_path / "gradients")


class FullDisk:
    """The n-th call of a function fails, for each n in `full`."""

    def __init__(self, monkeypatch, name, full) -> None:
        self.calls, self.full, self.function = 0, full, getattr(os, name)
        monkeypatch.setattr(os, name, self)

    def __call__(self, *args):
        self.calls += 1
        if self.calls in self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.function(*args)


@pytest.mark.skipif(os.name != "posix", reason="forks")
@pytest.mark.parametrize("moments", [2, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_a_killed_writer_leaves_whole_shards_and_goes_on(tmp_path, moments):
    seed = int.from_bytes(os.urandom(4), "little")
    ended = run_alone("tests.influence.killed_stores", str(tmp_path), str(moments), str(seed), timeout=500)
    assert ended.codes == [0], f"seed {seed}\n{ended.outputs[0]}"
    assert ended.outputs[0].count("whole") == moments


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("first", range(1, 5))
def test_a_full_disk_loses_nothing_that_was_written(folder, monkeypatch, call, first):
    write(folder, gradients(8))
    there = {path.name: path.read_bytes() for path in folder.iterdir()}
    FullDisk(monkeypatch, call, range(first, first + 3))
    writer = StoreWriter(folder, MANIFEST, rows_per_shard=4)
    values = gradients(24, 1)
    failed = []
    for start in range(0, 24, 2):
        try:
            writer.add(values[start : start + 2], {"step": start})
        except OSError as error:
            failed.append(str(error))
        assert {name: (folder / name).read_bytes() for name in there} == there
        assert writer.waiting >= 2 * (start // 2 + 1) - (len(GradientStore(folder)) - 8)
        read = torch.cat([block for _, block in GradientStore(folder).blocks()])
        assert torch.equal(read, torch.cat([gradients(8), values])[: len(read)])
    assert failed == ["[Errno 28] No space left on device"] * 3
    writer.flush()
    assert (writer.waiting, writer.lost) == (0, 0)
    (_, read), *_ = GradientStore(folder).blocks()
    assert torch.equal(read, torch.cat([gradients(8), values]))
    assert GradientStore(folder).rows["step"][8:].tolist() == [start for start in range(0, 24, 2) for _ in range(2)]


def test_rows_that_waited_too_long_are_counted(folder, monkeypatch):
    FullDisk(monkeypatch, "fsync", range(1, 8))
    writer = StoreWriter(folder, MANIFEST, rows_per_shard=4, most_waiting=2)
    for start in range(0, 20, 4):
        with pytest.raises(OSError, match="No space left"):
            writer.add(gradients(4, start), {"step": start})
    assert (writer.waiting, writer.lost) == (8, 12)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            writer.flush()
    writer.flush()
    assert (writer.waiting, writer.lost) == (0, 12)
    assert GradientStore(folder).rows["step"].tolist() == [12] * 4 + [16] * 4


def test_more_rows_at_once_than_may_wait_are_all_written(folder):
    writer = StoreWriter(folder, MANIFEST, rows_per_shard=2, most_waiting=1)
    writer.add(gradients(9), {})
    assert (writer.waiting, writer.lost) == (1, 0)
    assert torch.equal(next(GradientStore(folder).blocks())[1], gradients(8 + 1)[:8])


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the system")
def test_limits_of_the_system(tmp_path):
    ended = run_alone("tests.influence.limited_stores", str(tmp_path))
    assert ended.codes == [0], ended.outputs[0]
    said = json.loads(ended.outputs[0].splitlines()[-1])
    assert said["refused"] == f"[Errno {errno.EFBIG}] File too large"
    assert (said["waiting"], said["rows"], said["whole"], said["later"]) == (999, 200, True, 1199)
    files = [f"shard-00000-00000{i}.npy" for i in (0, 1)]
    assert said["files"] == ["_manifest.json", *files]
    assert said["limit"] < said["store"]
    blocks = ("blocks", "in another order", "of two parameters")
    assert {name: said[name] for name in blocks} == dict.fromkeys(blocks, "right")
    assert {name: said[name] for name in ("all at once", "one block")} == dict.fromkeys(
        ("all at once", "one block"), "MemoryError"
    )


@pytest.mark.parametrize("harm", ["cut off", "values alone", "empty"])
def test_a_shard_that_something_else_broke_is_named(folder, harm):
    write(folder, gradients(4))
    path = folder / "shard-00000-000000.npy"
    values, content = np.load(path), path.read_bytes()
    path.write_bytes(content[:-8] if harm == "cut off" else b"")
    if harm == "values alone":
        np.save(path, values)
    for partial in (False, True):
        with pytest.raises(
            PerSampleError, match=r"shard-00000-000000\.npy' is broken: it is no whole file of its kind"
        ):
            GradientStore(folder, partial=partial)


@pytest.mark.parametrize(
    ("promised", "said"),
    [(-1, "lacks rows (it has 8, and what writes it has not come to its end): "), (12, "lacks 4 of 12 rows: ")],
)
def test_a_store_that_lacks_rows_is_refused_by_scores_and_read_where_that_is_said(folder, promised, said):
    Shards(folder).write_manifest(replace(MANIFEST, rows=promised))
    write(folder, gradients(8), sample_index=torch.arange(8))
    with pytest.raises(PerSampleError) as refused:
        grad_dot(folder, folder)
    assert f"{said}its collection was broken off or goes on, or files were removed. Put" in str(refused.value)
    assert len(GradientStore(folder, partial=True)) == 8
    write(folder, gradients(4))
    if promised == 12:
        assert len(GradientStore(folder)) == 12


def test_a_manifest_of_more_columns_than_there_are_takes_no_memory_for_them(folder):
    write(folder, gradients(4))
    wide = columns_for({"weight": ((10**6, 10**6), 10**12)})
    Shards(folder).write_manifest(replace(MANIFEST, parameters=wide))
    with pytest.raises(PerSampleError, match=r"shape \(4, 20\), but rows up to 0 and 1000000000000 columns are"):
        list(GradientStore(folder).blocks())


def test_a_store_with_rows_of_something_else_is_refused(folder):
    write(folder, gradients(8))
    Shards(folder).write_manifest(replace(MANIFEST, rows=8))
    write(folder, gradients(4))
    text = "has 12 rows, but 8 complete it: files of something else are among its own. Take them out, or write"
    with pytest.raises(PerSampleError, match=text):
        GradientStore(folder)
    assert len(GradientStore(folder, partial=True)) == 12


@pytest.mark.parametrize("shape", [(10**13, 20), (-4, 20), (4, 10**15), (2**63, 2**10), (80,), (2, 2, 20)])
def test_a_shard_whose_head_has_another_shape_is_named(folder, shape):
    write(folder, gradients(4))
    path = folder / "shard-00000-000000.npy"
    start, _ = values_of(path)
    head = io.BytesIO()
    np.lib.format.write_array_header_2_0(head, {"descr": "<f4", "fortran_order": False, "shape": shape})
    path.write_bytes(head.getvalue() + path.read_bytes()[start:])
    with pytest.raises(PerSampleError, match=rf"{path.name}' is broken: it is no whole file of its kind"):
        GradientStore(folder)


@pytest.mark.parametrize("name", ["parameters", "run"])
def test_a_manifest_that_lacks_a_value_is_named(folder, name):
    path = folder / "_manifest.json"
    values = json.loads(path.read_text())
    del values[name]
    path.write_text(json.dumps(values))
    with pytest.raises(PerSampleError, match=r"_manifest\.json' is broken: it is no whole file of its kind"):
        GradientStore(folder)


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "int8"},
        {"parameters": []},
        {"columns": ["step"]},
        {"shape": "ab"},
        {"rows": "12"},
        {"rows": 1e30},
        {"projection": 3},
        {"settings": None},
        {"checkpoints": 3},
        {"samples": "x"},
        {"run": None},
    ],
    ids=str,
)
def test_a_manifest_with_a_value_that_no_store_has_is_named(folder, changed):
    path = folder / "_manifest.json"
    values = json.loads(path.read_text())
    if "shape" in changed:
        values["parameters"][0].update(changed)
    else:
        values.update(changed)
    path.write_text(json.dumps(values))
    with pytest.raises(PerSampleError, match=r"_manifest\.json' is broken: it is no whole file of its kind"):
        GradientStore(folder)


@pytest.mark.parametrize("option", ["rows_per_shard", "most_waiting"])
def test_options_of_the_writer_are_checked(folder, option):
    with pytest.raises(OptionError, match=f"{option}=0; allowed is an int >= 1"):
        StoreWriter(folder, MANIFEST, **{option: 0})


def values_of(path) -> tuple[int, int]:
    """Where the values of a shard start and end."""
    values = np.load(path, mmap_mode="r")
    return values.offset, values.offset + values.nbytes


def _changed(path, place: int, content: bytes) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:place] + content + whole[place + len(content) :])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("columns", [20, 20_000])
@pytest.mark.parametrize("harm", ["a zeroed tail", "one flipped bit", "rows of another run"])
def test_values_that_are_not_those_written_are_refused_when_they_are_read(tmp_path, harm, columns, dtype):
    sizes = {"a": ((columns - 4,), columns - 4), "b": ((4,), 4)}
    manifest = replace(MANIFEST, parameters=columns_for(sizes), dtype=dtype)
    for name in ("one", "other"):
        write(made(tmp_path / name, manifest), gradients(8, len(name), columns=columns), manifest=manifest)
    folder = tmp_path / "one"
    path = folder / "shard-00000-000001.npy"
    whole, row = path.read_bytes(), columns * np.dtype(dtype).itemsize
    start, end = values_of(path)
    others = (tmp_path / "other" / path.name).read_bytes()[start:end]
    first, place, content = {
        "a zeroed tail": (6, end - row - 8, bytes(row + 8)),
        "one flipped bit": (7, end - row // 2, bytes([whole[end - row // 2] ^ 4])),
        "rows of another run": (4, start, others),
    }[harm]
    _changed(path, place, content)
    store = GradientStore(folder)
    expected = gradients(8, 3, columns=columns)[:first]
    read = next(store.select(range(first)).blocks())[1]  # what is as it was written
    torch.testing.assert_close(read.float(), expected, rtol=1e-3, atol=1e-5)
    said = (
        rf"{path.name}' is broken: the values of row {first - 4} are not those that were written .* Put the file back"
    )
    for part in (store, store.select([0, first]), store.parameters(["b", "a"])):
        with pytest.raises(PerSampleError, match=said):
            list(part.blocks())
    path.write_bytes(whole)
    assert sum(len(values) for _, values in store.blocks()) == 8


@pytest.mark.parametrize("place", [0.4, 0.6, 0.9, -1])
def test_rows_that_are_not_those_written_are_refused(folder, place):
    write(folder, gradients(4), sample_index=torch.arange(4))
    path = folder / "shard-00000-000000.npy"
    whole, (_, start) = path.read_bytes(), values_of(path)
    place = len(whole) + place if place < 0 else start + int((len(whole) - start) * place)
    _changed(path, place, bytes([whole[place] ^ 1]))
    for read in (GradientStore, lambda dirpath: Shards(dirpath).open(MANIFEST, {MANIFEST.run: 0})):
        with pytest.raises(PerSampleError, match=rf"{path.name}' is broken: it is no whole file of its kind"):
            read(folder)


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"\xff\xfe", b"1" * 100_000, bytes(300)], ids=["[", "bytes", "1", "0"]
)
def test_a_manifest_that_is_no_text_of_its_kind_is_named(folder, content):
    (folder / "_manifest.json").write_bytes(content)
    for read in (GradientStore, read_ledger):
        with pytest.raises(PerSampleError, match=r"_manifest\.json' is broken: it is no whole file of its kind"):
            read(folder)


def test_every_changed_byte_of_a_header_is_noticed(folder):
    write(folder, gradients(4), sample_index=torch.arange(4))
    path = folder / "shard-00000-000000.npy"
    whole = path.read_bytes()
    ((_, expected),) = GradientStore(folder).blocks()
    for place in range(12 + int.from_bytes(whole[8:12], "little")):
        for flip in (0x02, 0x0F, 0xFF):  # "<f4" becomes ">f4" and "<i4" among them
            path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
            with suppress(PerSampleError):  # but for a space, or the quotes of a name
                ((_, found),) = GradientStore(folder).blocks()
                assert torch.equal(found, expected), (place, flip)


@pytest.mark.parametrize("start", range(8, 128, 8))
def test_a_file_whose_end_was_lost_behind_part_of_its_header_is_named(folder, start):
    write(folder, gradients(4), sample_index=torch.arange(4))
    path = folder / "shard-00000-000000.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:start] + bytes(len(whole) - start))
    with pytest.raises(PerSampleError, match=rf"{path.name}' is broken: it is no whole file of its kind"):
        GradientStore(folder)


def test_a_folder_in_place_of_a_shard_is_named(folder):
    (folder / "shard-00000-000000.npy").mkdir()
    with pytest.raises(PerSampleError, match=r"shard-00000-000000\.npy' is broken: it is no whole file of its kind"):
        GradientStore(folder)


def test_a_file_in_the_place_of_another_is_refused(tmp_path):
    folders = [made(tmp_path / run, replace(MANIFEST, run=run)) for run in ("one", "other")]
    for seed, folder in enumerate(folders):
        write(folder, gradients(8, seed), 0, replace(MANIFEST, run=folder.name))
    own, others = (sorted(folder.glob("shard-*.npy")) for folder in folders)
    contents = [path.read_bytes() for path in own]
    for place, path in enumerate(own):
        for content in (contents[1 - place], others[place].read_bytes()):
            path.write_bytes(content)
            with pytest.raises(PerSampleError, match=rf"{path.name}' is broken"):
                GradientStore(folders[0])
        path.write_bytes(contents[place])
    assert len(GradientStore(folders[0])) == 8
