"""Stores of gradients: what is written is read, as a whole or in part, in one order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_persample import OptionError, PerSampleError
from lightning_persample.influence.shards import Shards, StoreManifest, StoreWriter, columns_for
from lightning_persample.influence.store import GradientStore
from tests.influence.stores import MANIFEST, PARAMETERS, K, by_numpy, gradients, made, names, write


def whole(store, **options):
    """All values of a store, from its blocks."""
    positions, values = zip(*store.blocks(**options), strict=True)
    assert torch.equal(torch.cat(positions), torch.arange(len(store)))
    return torch.cat(values)


@pytest.fixture
def folder(tmp_path):
    return made(tmp_path / "gradients")


@pytest.fixture
def store(folder):
    """Two processes, two checkpoints: samples 0 to 9 and 10 to 15 at each."""
    for checkpoint in (1, 0):
        write(folder, gradients(10, checkpoint), 0, sample_index=torch.arange(10), checkpoint=checkpoint, step=5)
        write(
            folder,
            gradients(6, 7 + checkpoint),
            1,
            sample_index=range(10, 16),
            checkpoint=checkpoint,
            loss=2.0,
            weight=None,
        )
    return GradientStore(folder)


def test_rows_are_ordered_by_checkpoint_process_and_writing(store):
    assert len(store) == 32
    assert store.rows["checkpoint"].tolist() == [0] * 16 + [1] * 16
    assert store.rows["sample_index"].tolist() == [*range(16)] * 2
    assert store.checkpoints == (0, 1)
    expected = [gradients(10, 0), gradients(6, 7), gradients(10, 1), gradients(6, 8)]
    assert torch.equal(whole(store), torch.cat(expected))
    assert store.rows["step"].tolist() == ([5] * 10 + [-1] * 6) * 2
    assert np.isnan(store.rows["weight"]).all()
    assert store.rows["loss"][10] == 2.0
    assert np.isnan(store.rows["loss"][0])


def test_shards_have_the_rows_they_were_given(folder, store):
    shards = [name for name in names(folder) if name.startswith("shard-00000")]
    assert shards == [f"shard-00000-{i:06d}.npy" for i in range(6)]
    assert [len(np.load(folder / name)) for name in shards] == [4, 4, 2] * 2
    found = by_numpy(folder)
    assert len(found) == 32
    for row in found:
        at = (store.rows["checkpoint"] == row["checkpoint"]) & (store.rows["sample_index"] == row["sample_index"])
        ((_, values),) = store.select(at).blocks()
        assert np.array_equal(values[0].numpy(), row["values"])


def test_parts_of_a_store(store):
    values = whole(store)
    assert torch.equal(whole(store.at(1)), values[16:])
    order = [31, 0, 17, 16, 5]
    part = store.select(order)
    assert torch.equal(whole(part), values[order])
    assert part.rows["sample_index"].tolist() == [15, 0, 1, 0, 5]
    mask = torch.arange(32) % 3 == 0
    assert torch.equal(whole(store.select(mask)), values[mask])
    assert torch.equal(whole(store.select(mask).select([1, 0])), values[[3, 0]])
    assert len(store.select([])) == 0
    assert list(store.select([]).blocks()) == []
    assert torch.equal(whole(store), values)


def test_parameters_of_a_store(store):
    values = whole(store)
    assert store.columns_of("bias") == slice(12, 16)
    part = store.parameters(["scale", "weight"])
    assert [each.name for each in part.manifest.parameters] == ["scale", "weight"]
    assert (part.num_columns, part.columns_of("scale"), part.columns_of("weight")) == (16, slice(0, 4), slice(4, 16))
    assert torch.equal(whole(part), torch.cat([values[:, 16:], values[:, :12]], 1))
    assert torch.equal(whole(part.parameters(["weight"]).at(0).select([3])), values[3:4, :12])
    assert torch.equal(whole(part.parameters(["weight", "scale"])), torch.cat([values[:, :12], values[:, 16:]], 1))
    assert store.num_columns == K


@pytest.mark.parametrize("rows", [1, 3, 5, 32, 100])
def test_blocks_of_any_size_are_the_same_rows(store, rows):
    values = whole(store)
    assert torch.equal(whole(store, max_memory=rows * K * 12), values)
    sizes = [len(block) for _, block in store.blocks(max_memory=rows * K * 12 + 7)]
    assert sizes == [rows] * (32 // rows) + [32 % rows] * (32 % rows > 0)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(whole(store.select(order), max_memory=rows * K * 12), values[order])


def test_which_samples_are_there(store):
    expected = torch.arange(30) < 16
    assert torch.equal(store.visited, expected)
    assert torch.equal(store.at(0).select([2, 4]).visited, (torch.arange(30) == 2) | (torch.arange(30) == 4))
    assert store.has(1, [15, 16, 0]).tolist() == [True, False, True]
    with pytest.raises(PerSampleError, match=r"does not know the size of its dataset: ask for samples, has\("):
        GradientStore(made(store.dirpath, replace(MANIFEST, samples=None))).visited  # noqa: B018
    assert store.has(2, torch.tensor([15])).tolist() == [False]


def test_the_manifest_is_read_back(folder):
    manifest = replace(MANIFEST, projection={"dim": 4, "kind": "normal", "seed": 3}, settings={"a": 1.5})
    assert Shards(made(folder, manifest)).manifest() == manifest
    assert len(GradientStore(folder)) == 0


def test_what_is_no_store_is_refused(tmp_path):
    with pytest.raises(PerSampleError) as refused:
        GradientStore(tmp_path)
    assert str(refused.value) == f"{str(tmp_path)!r} holds no store of gradients: _manifest.json is missing"


def test_manifests_are_checked():
    with pytest.raises(OptionError, match=r"dtype='bfloat16'; allowed is one of 'float16', 'float32', 'float64'"):
        StoreManifest("a", PARAMETERS, dtype="bfloat16")
    with pytest.raises(OptionError, match="they must start at 0 and be 12, all entries as there is no projection"):
        StoreManifest("a", columns_for({"weight": ((4, 3), 6)}))
    with pytest.raises(OptionError, match="must start at 0 and be one at least"):
        StoreManifest("a", PARAMETERS[1:], projection={})
    with pytest.raises(OptionError, match="a store needs one at least"):
        StoreManifest("a", ())
    with pytest.raises(OptionError, match="each needs a name of its own, other than sample_index"):
        StoreManifest("a", PARAMETERS, columns=("step",))


def test_rows_that_do_not_fit_are_refused(folder):
    writer = StoreWriter(folder, MANIFEST)
    for values, rows, text in (
        (gradients(3, columns=K + 1), {}, r"values are torch.float32 of shape \(3, 21\); a store of these parameters"),
        (torch.zeros(3, K, dtype=torch.int64), {}, "values are torch.int64"),
        (gradients(3), {"los": 1.0}, "rows have a column 'los'; this store has sample_index, checkpoint"),
        (gradients(3), {"loss": torch.zeros(2)}, r"'loss' is of shape \(2,\), but there are 3 rows"),
        (gradients(3), {"step": torch.zeros(3)}, "'step' is of type float32, but must be of integers"),
        (gradients(3), {"sample_index": [1, 2, 30]}, "sample_index 30, but the dataset has 30 samples"),
    ):
        with pytest.raises(OptionError, match=text):
            writer.add(values, rows)
    writer.add(gradients(0), {"sample_index": []})  # none at all is allowed
    writer.flush()
    assert names(folder) == ["_manifest.json"]


def test_what_a_store_does_not_have_is_named(store):
    for call, text in (
        (lambda: store.columns_of("x"), "has no parameter 'x'; it has weight, bias, scale"),
        (lambda: store.parameters(["bias", "bias"]), "each named once"),
        (lambda: store.at(2), r"has no checkpoint 2; it has \(0, 1\)"),
        (lambda: store.select([32]), r"a mask of shape \(32,\), or positions from 0 to 31"),
        (lambda: store.select([True]), r"rows are bool of shape \(1,\)"),
        (lambda: list(store.blocks(max_memory=100)), "does not hold one row of 20 numbers; it takes 240 bytes"),
        (lambda: list(store.blocks(max_memory="1GB")), "max_memory=.1GB. is not allowed: it must be None or an int"),
        (lambda: list(store.blocks(dtype=torch.float16)), "allowed is None, torch.float32 or torch.float64"),
    ):
        with pytest.raises(OptionError, match=text):
            call()
