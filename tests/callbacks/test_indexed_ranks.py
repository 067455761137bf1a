"""Several processes on one dataset: whose samples each of them has, and one ranking over all of them."""

from __future__ import annotations

import csv

import pytest
import torch

from tests.callbacks.indexed_data import ranked
from tests.callbacks.indexed_ranks import COUNT
from tests.processes import run_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    ended = run_ranks("tests.callbacks.indexed_ranks", str(folder), timeout=100)
    assert ended.codes == [0, 0], "\n".join(output[-3000:] for output in ended.outputs)
    return folder


def both_ranks(folder, name, workers=0):
    return [torch.load(folder / f"{name}.{workers}.{rank}.pt", weights_only=False) for rank in (0, 1)]


def joined(*runs):
    """The norms of each sample in the order in which all processes together saw it; a batch of rank 0 comes first."""
    norms = {}
    for run in runs:
        for index, each in run.items():
            norms.setdefault(index, []).extend(each)
    return norms


def in_order_of_steps(ranks):
    """The norms of each sample by batch, then by rank, from what each rank noted."""
    norms, taken = {}, [{index: list(each) for index, each in rank["norms"].items()} for rank in ranks]
    for batches in zip(*(rank["own"] for rank in ranks), strict=True):
        for left, batch in zip(taken, batches, strict=True):
            for index in batch:
                norms.setdefault(index, []).append(left[index].pop(0))
    return norms


@pytest.mark.parametrize("workers", [0, 2])
def test_each_process_has_the_indices_of_its_own_rows(folder, workers):
    ranks = both_ranks(folder, "watched", workers)
    for rank in ranks:
        assert rank["index"] == rank["own"]
    epoch = [index for rank in ranks for batch in rank["index"][: len(rank["index"]) // 2] for index in batch]
    assert len(epoch) == COUNT + 1
    assert set(epoch) == set(range(COUNT))


@pytest.mark.parametrize("workers", [0, 2])
def test_training_is_untouched(folder, workers):
    for plain, watched in zip(
        both_ranks(folder, "plain", workers), both_ranks(folder, "watched", workers), strict=True
    ):
        assert plain["own"] == watched["own"]
        assert torch.equal(plain["random"], watched["random"])
        for name in ("inputs", "weights"):
            assert all(torch.equal(*pair) for pair in zip(plain[name], watched[name], strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_ranking_is_that_of_all_processes_and_the_same_on_each(folder, workers):
    ranks = both_ranks(folder, "watched", workers)
    assert ranks[0]["worst"] == ranks[1]["worst"]
    assert ranks[0]["samples"] == COUNT
    assert_rows(ranks[0]["worst"], in_order_of_steps(ranks))


def test_a_resumed_fit_goes_on_from_what_all_processes_counted(folder):
    ranks = both_ranks(folder, "resumed")
    assert ranks[0]["worst"] == ranks[1]["worst"]
    assert all(rank["index"] == rank["own"] for rank in ranks)
    assert_rows(ranks[0]["worst"], joined(*(rank["before"] for rank in ranks), in_order_of_steps(ranks)))


def assert_rows(rows, norms):
    for found, row in zip(rows, ranked(norms)[:5], strict=True):
        assert found[0] == row[0]
        assert found[1:3] == pytest.approx(row[1:3], rel=1e-5)
        assert found[3] == row[3]


def test_one_process_writes_the_table(folder):
    with (folder / "worst_samples.csv").open(newline="") as file:
        _, *rows = csv.reader(file)
    worst = both_ranks(folder, "watched", 2)[0]["worst"]
    assert [[float(cell) for cell in row] for row in rows] == [list(row) for row in worst[:4]]
