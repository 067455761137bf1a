"""Stored numbers: how far they are off at most, and rows that are not finite."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_persample.influence.shards import StoreWriter
from lightning_persample.influence.store import GradientStore
from tests.influence.stores import MANIFEST, K, by_numpy, gradients, made, write

HALF = replace(MANIFEST, dtype="float16")


def stored(folder, values, manifest=HALF, **rows):
    write(made(folder, manifest), values, 0, manifest, **rows)
    return GradientStore(folder)


def read(store, dtype=None):
    return torch.cat([values for _, values in store.blocks(dtype=dtype)])


@pytest.mark.parametrize("size", [1e-9, 1e-30, 1e-37, 1.0, 1e9, 1e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float16_keeps_gradients_of_any_size(tmp_path, size, dtype):
    values = gradients(10, dtype=dtype) / 4 * size
    store = stored(tmp_path / "a", values)
    off = (read(store, torch.float64) - values.double()).abs()
    largest = values.double().abs().amax(1, keepdim=True)
    assert (off <= torch.maximum(values.double().abs() * 2.0**-11, largest * 2.0**-39)).all()
    assert (read(store) != 0).all()
    assert read(store).dtype == torch.float32
    scale = torch.from_numpy(store.rows["scale"])
    assert ((largest[:, 0] / scale >= 2**14) & (largest[:, 0] / scale < 2**15)).all()
    assert (scale.log2() % 1 == 0).all()


def test_entries_far_below_the_largest_lose_what_the_bound_says(tmp_path):
    exponents = -2.0 * torch.arange(K, dtype=torch.float64)
    values = 1.37 * torch.exp2(exponents) * torch.tensor([[1.0], [-1e-9], [1e-200]], dtype=torch.float64)
    found = read(stored(tmp_path / "a", values), torch.float64)
    off, largest = (found - values).abs(), values.abs().amax(1, keepdim=True)
    assert (off <= torch.maximum(values.abs() * 2.0**-11, largest * 2.0**-39)).all()
    # The bound is no larger than it has to be: one place less does not hold.
    assert (off > torch.maximum(values.abs() * 2.0**-12, largest * 2.0**-40)).any(1).all()
    assert (found[:, :19] != 0).all()


def test_float64_is_rounded_to_float16_once(tmp_path):
    between = 1 + 2.0**-11 + 2.0**-30  # in float32 it lies half-way between two numbers of float16
    values = torch.ones(1, K, dtype=torch.float64)
    values[0, 0] = between
    assert read(stored(tmp_path / "a", values), torch.float64)[0, 0] == 1 + 2.0**-10


def test_extreme_rows(tmp_path):
    values = torch.zeros(4, K, dtype=torch.float64)
    values[1, 0], values[2, 0], values[3, 0] = 2.0**-1000, 1.5e308, 5e-324
    found = read(stored(tmp_path / "a", values), torch.float64)
    off = (found - values).abs()
    assert (off[:, 1:] == 0).all()
    assert off[:, 0].tolist() == [0, 0, pytest.approx(0, abs=1.5e308 * 2.0**-11), 0]


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_are_marked(tmp_path, kind, value):
    manifest = replace(MANIFEST, dtype=kind)
    values = gradients(10, dtype=torch.float64)
    values[3, 5], values[8, K - 1] = value, value
    store = stored(tmp_path / "a", values, manifest, sample_index=torch.arange(10))
    bad = torch.zeros(10, dtype=torch.bool)
    bad[[3, 8]] = True
    assert torch.equal(store.nonfinite, bad)
    found = read(store)
    assert torch.equal(found.isnan(), bad[:, None].expand(10, K))
    assert torch.equal(read(store.parameters(["bias"])).isnan().all(1), bad)
    assert torch.equal(store.select(bad).nonfinite, torch.tensor([True, True]))
    assert store.visited.sum() == 10
    assert sum(bool(np.isnan(row["values"]).all()) for row in by_numpy(tmp_path / "a")) == 2
    tolerance = {"float16": 2.0**-11, "float32": 2.0**-24, "float64": 0}[kind]
    assert ((found[~bad] - values[~bad]).abs() <= tolerance * values[~bad].abs() + 2.0**-38).all()


def test_what_float32_cannot_hold_is_marked_and_float16_holds_it(tmp_path):
    values = gradients(2, dtype=torch.float64)
    values[1, 0] = 1e300
    assert stored(tmp_path / "a", values, MANIFEST).nonfinite.tolist() == [False, True]
    store = stored(tmp_path / "b", values)
    assert store.nonfinite.tolist() == [False, False]
    assert abs(read(store, torch.float64)[1, 0] / 1e300 - 1) <= 2.0**-11


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_float32_and_float64_stores_are_what_torch_converts_to(tmp_path, dtype):
    values = gradients(10, dtype=torch.float64).to(dtype)
    for kind, expected in (("float32", values.float()), ("float64", values.double())):
        found = read(stored(tmp_path / kind, values, replace(MANIFEST, dtype=kind)))
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_what_was_added_may_be_changed_afterwards(tmp_path):
    for kind in ("float32", "float16"):
        folder = made(tmp_path / kind, replace(MANIFEST, dtype=kind))
        writer = StoreWriter(folder, replace(MANIFEST, dtype=kind))
        values = torch.ones(2, K)
        writer.add(values, {})
        values.zero_()
        writer.flush()
        assert torch.equal(read(GradientStore(folder)), torch.ones(2, K))
