"""A ledger on a disk that is really full: a file system of 4 MiB in memory, filled to its last byte."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.callbacks.full_disk_runs import BATCHES, EPOCHS, FIRST
from tests.callbacks.ledger_runs import assert_rows
from tests.processes import ROOT

# A name space of its own: the file system is seen by these processes alone, and is gone when they end.
ALONE = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
MOUNT = 'mount -t tmpfs -o size=4m tmpfs "$0" && exec "$@"'


def in_small_file_system(mounted, *command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*ALONE, MOUNT, str(mounted), *command],
        cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace", timeout=100, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if shutil.which("unshare") is None:
        pytest.skip("this system has no `unshare` to mount a small file system with")
    mounted, results = tmp_path_factory.mktemp("mounted"), tmp_path_factory.mktemp("results")
    tried = in_small_file_system(mounted, "true")
    if tried.returncode != 0:
        pytest.skip(f"no file system may be mounted here: {tried.stderr.strip()}")
    ended = in_small_file_system(
        mounted, sys.executable, "-W", "ignore", "-m", "tests.callbacks.full_disk_runs", str(mounted), str(results)
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert not list(mounted.iterdir())  # nothing was written below the file system
    return torch.load(results / "found.pt", weights_only=False)


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
    notes = found["late"]["notes"]
    assert_rows(found["late"]["rows"], notes[: FIRST * 4] + notes[(FIRST + batches) * 4 :])


def test_a_disk_that_stays_full_keeps_what_was_written(found):
    first, second = found["never"]["texts"]
    assert "No space left on device" in first
    assert second.startswith(f"{(EPOCHS * BATCHES - FIRST) * 4} rows of the ledger in '")
    assert_rows(found["never"]["rows"], found["never"]["notes"][: FIRST * 4])
    assert found["never"]["sizes"].keys() == {
        "_manifest.json",
        *map(file_name, range(FIRST)),
    }


def test_a_disk_that_is_full_from_the_start_is_refused_before_training(found):
    trained, text = found["start"]
    assert trained == 0
    assert text.endswith("cannot hold a ledger: [Errno 28] No space left on device")
