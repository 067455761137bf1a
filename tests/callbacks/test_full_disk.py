"""A ledger on a disk that is really full: a file system of 4 MiB in memory, filled to its last byte."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch

from tests.callbacks.full_disk_runs import BATCHES, EPOCHS, FIRST
from tests.callbacks.ledger_runs import assert_rows
from tests.processes import run_alone


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if sys.platform != "linux":
        pytest.skip("mounts a small file system as Linux does")
    mounted, results = tmp_path_factory.mktemp("mounted"), tmp_path_factory.mktemp("results")
    ended = run_alone("tests.callbacks.full_disk_runs", str(mounted), str(results))
    assert ended.codes == [0], ended.outputs[0][-6000:]
    assert not list(mounted.iterdir())  # nothing was written below the file system
    found = torch.load(results / "found.pt", weights_only=False)
    if isinstance(found, str):
        pytest.skip(f"no file system may be mounted here: {found}")
    return found


@pytest.mark.parametrize("name", ["nothing", "half", "late", "never"])
def test_training_goes_on_bit_for_bit(found, name):
    assert found["without"].keys() == found[name]["weights"].keys()
    for parameter, value in found["without"].items():
        assert torch.equal(value, found[name]["weights"][parameter]), parameter
    assert len(found[name]["notes"]) == EPOCHS * BATCHES * 4


@pytest.mark.parametrize(("name", "room"), [("nothing", 0), ("half", 4096)])
def test_rows_are_written_once_room_is_made(found, name, room):
    """Also where the first part of a file still fits."""
    if room % mmap.PAGESIZE:
        pytest.skip(f"a page of this system, {mmap.PAGESIZE} bytes, holds a whole file")
    assert found[name]["room"] == [room] * 4
    (text,) = found[name]["texts"]
    assert text.startswith("the ledger in '")
    assert f"{name}' cannot be written: [Errno 28] No space left on device. Training goes on; the rows are kept" in text
    assert_rows(found[name]["rows"], found[name]["notes"])
    assert found[name]["lacks"] == ""
    sizes = found[name]["sizes"]
    assert sizes.keys() == {"_manifest.json", *map(file_name, range(EPOCHS * BATCHES))}
    assert min(sizes[name] for name in sizes if name.startswith("rows-")) > 4096


def file_name(counter):
    return f"rows-00000-{counter:06d}.parquet"


def test_room_that_is_made_too_late_costs_the_oldest_rows(found):
    """Those of 16 files wait; how many were given up is said at the end."""
    first, second = found["late"]["texts"]
    assert "No space left on device" in first
    batches = EPOCHS * BATCHES - FIRST - 16
    assert second.startswith(f"{batches * 4} rows of the ledger in '")
    assert second.endswith("' were not written")
    assert (
        f"late' lacks {batches * 4} of {EPOCHS * BATCHES * 4} rows: files were removed, or the disk"
        in found["late"]["lacks"]
    )
    notes = found["late"]["notes"]
    assert_rows(found["late"]["rows"], notes[: FIRST * 4] + notes[(FIRST + batches) * 4 :])


def test_a_disk_that_stays_full_keeps_what_was_written(found):
    first, second = found["never"]["texts"]
    assert "No space left on device" in first
    assert second.startswith(f"{(EPOCHS * BATCHES - FIRST) * 4} rows of the ledger in '")
    assert f"never' lacks rows (it has {FIRST * 4}, and what writes it has not" in found["never"]["lacks"]
    assert_rows(found["never"]["rows"], found["never"]["notes"][: FIRST * 4])
    assert found["never"]["sizes"].keys() == {
        "_manifest.json",
        *map(file_name, range(FIRST)),
    }


def test_a_disk_that_is_full_from_the_start_is_refused_before_training(found):
    trained, text = found["start"]
    assert trained == 0
    assert text.endswith("cannot hold a ledger: [Errno 28] No space left on device")
