"""Reading no more than is asked for: memory of blocks and of parts, and stores as dask arrays."""

from __future__ import annotations

import importlib
import pickle
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_persample.influence import GradientStore, StoreWriter
from lightning_persample.influence.shards import columns_for
from tests.influence.stores import MANIFEST, gradients, made

SIZES = {"a": ((600,), 600), "b": ((24,), 24), "c": ((400,), 400)}
COLUMNS, ROWS = 1024, 2048  # 8 MiB in float32, in shards of 2 MiB
SLACK = 1 << 17  # for objects that are no values


MORE_TYPES = [pytest.param(name, marks=pytest.mark.slow) for name in ("float32", "float64")]


@pytest.fixture(scope="module", params=["float16", *MORE_TYPES])
def large(request, tmp_path_factory):
    manifest = replace(MANIFEST, parameters=columns_for(SIZES), samples=None, dtype=request.param)
    folder = made(tmp_path_factory.mktemp("store") / request.param, manifest)
    values = gradients(ROWS, columns=COLUMNS, dtype=torch.float64)
    values[7, 3] = torch.inf
    for rank, own in enumerate((values[:1000], values[1000:])):
        writer = StoreWriter(folder, manifest, rank, rows_per_shard=512)
        writer.add(own, {"sample_index": torch.arange(len(own))})
        writer.flush()
    store = GradientStore(folder)
    assert len(store) == ROWS
    return store


def peak(read) -> int:
    """The most bytes that numpy and Python take for a while."""
    # The less of two times: tables that a long process keeps grow once in a while, by MB, whoever is running.
    return min(_peak_once(read), _peak_once(read))


def _peak_once(read) -> int:
    tracemalloc.start()
    try:
        read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def consume(store, **options) -> None:
    for positions, values in store.blocks(**options):  # noqa: B007, holds a block while the next one is read
        pass


@pytest.mark.parametrize(
    ("max_memory", "dtype"),
    [
        (1 << 20, torch.float64),
        (3 << 20, None),
        pytest.param(1 << 20, None, marks=pytest.mark.slow),
        pytest.param(3 << 20, torch.float64, marks=pytest.mark.slow),
    ],
)
def test_blocks_take_no_more_than_they_may(large, max_memory, dtype):
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    for store in (large, large.select(order), large.parameters(["c", "a"])):
        taken = peak(lambda store=store: consume(store, max_memory=max_memory, dtype=dtype))
        assert max_memory / 3 < taken < max_memory + SLACK
    assert peak(lambda: consume(large, max_memory=1 << 40)) > 8 << 20  # what the bound would not let pass


def test_parts_copy_no_shard(large):
    """A part is made without any value, and read without those beside it."""
    part = large.at(0).select(range(5, 2000, 200)).parameters(["b"])
    assert peak(lambda: large.at(0).select(range(5, 2000, 200)).parameters(["b"])) < SLACK + 80 * ROWS
    assert peak(lambda: consume(part)) < SLACK
    one = large.select([700])
    assert peak(lambda: consume(one)) < SLACK
    assert peak(lambda: consume(large.parameters(["b"]))) < SLACK + ROWS * 24 * 16


def test_making_a_part_opens_no_file(large, monkeypatch):
    expected = next(large.select([3]).parameters(["c"]).blocks())[1]
    monkeypatch.setattr(np, "load", lambda *args, **options: pytest.fail("read"))
    part = large.at(0).select([3]).parameters(["c"])
    monkeypatch.undo()
    assert torch.equal(next(part.blocks())[1], expected)


def every(store) -> np.ndarray:
    return torch.cat([values for _, values in store.blocks()]).numpy()


def test_a_dask_array_holds_the_same_numbers(large):
    order = np.random.default_rng(0).permutation(ROWS)[:300]
    for store in (large, large.select(order), large.parameters(["c", "a"]), large.select(order).parameters(["b"])):
        expected = every(store)
        for options in ({}, {"max_memory": 1 << 20}):
            array = store.to_dask(**options)
            assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
            assert np.array_equal(array.compute(scheduler="synchronous"), expected, equal_nan=True)
    array = large.to_dask(max_memory=1 << 20)
    assert array.numblocks[0] > 4
    found = (array[10:300] @ array[1500:1700].T).compute(scheduler="threads", num_workers=2)
    expected = every(large)
    assert found == pytest.approx(expected[10:300] @ expected[1500:1700].T, rel=1e-4, abs=1e-3)


def test_a_dask_array_reads_when_it_is_computed(large, monkeypatch):
    expected = every(large.select(range(4)))
    monkeypatch.setattr(np, "load", lambda *args, **options: pytest.fail("read"))
    array = large.to_dask(max_memory=1 << 20)
    monkeypatch.undo()
    assert np.array_equal(array[:4].compute(scheduler="synchronous"), expected, equal_nan=True)
    assert peak(lambda: array[-1].compute(scheduler="synchronous")) < (1 << 20) + SLACK
    assert len(pickle.dumps(array)) < SLACK + 100 * ROWS  # what goes to the machines of a cluster


def test_a_store_without_rows_is_a_dask_array(tmp_path):
    assert GradientStore(made(tmp_path / "empty")).to_dask().shape == (0, 20)


def test_without_dask_the_extra_is_named(large, monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ModuleNotFoundError) as refused:
        large.to_dask()
    assert "pip install 'lightning-persample[dask]'" in str(refused.value)
