"""Gradients are compared at the same weights: their fingerprints decide, where both manifests have them."""

from __future__ import annotations

import pytest
import torch

from lightning_persample import PerSampleError, UnsupportedError
from lightning_persample.influence import grad_dot, tracin, tracin_cp
from tests.influence.loops import store_of

VALUES = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64)
OTHERS = 10 * VALUES.flip(0)


def store(folder, checkpoints, *values, **options):
    rows = [(each, {"checkpoint": number, "sample_index": torch.arange(2)}) for number, each in enumerate(values)]
    return store_of(folder, rows, checkpoints=checkpoints, **options)


def at(weights, step=None, rate=0.5, path=None):
    return {"step": step, "learning_rate": rate, "path": path, "weights": weights}


def test_other_weights_of_one_step_and_path_are_refused_with_both(tmp_path):
    train = store(tmp_path / "train", [at("aaaa", 5, path="last.ckpt")], VALUES)
    test = store(tmp_path / "test", [at("bbbb", 5, path="last.ckpt")], VALUES)
    text = r"the checkpoints step 5 \(weights aaaa\), the test store step 5 \(weights bbbb\): gradients at other"
    for score in (grad_dot, tracin_cp):
        with pytest.raises(PerSampleError, match=text):
            score(train, test)


def test_modules_as_they_are_are_refused_where_they_differ(tmp_path):
    train, test = (store(tmp_path / name, [at(name)], VALUES) for name in ("one", "two"))
    with pytest.raises(PerSampleError, match=r"an unknown step \(weights one\), the test store an unknown step \(w"):
        grad_dot(train, test)


def test_equal_weights_go_together_whatever_their_path_and_step_say(tmp_path):
    train = store(tmp_path / "train", [at("aaaa", 5, path="a.ckpt"), at("bbbb", 9)], VALUES, OTHERS)
    test = store(tmp_path / "test", [at("bbbb", rate=None), at("aaaa", rate=None, path="/a.ckpt")], OTHERS, VALUES)
    expected = 0.5 * (VALUES @ VALUES.T + OTHERS @ OTHERS.T)
    torch.testing.assert_close(tracin_cp(train, test).scores, expected)


def test_checkpoints_of_equal_weights_are_told_apart_by_their_steps(tmp_path):
    described = [at("aaaa", 5, rate=0.5), at("aaaa", 9, rate=2.0)]
    train, test = (store(tmp_path / name, described, VALUES, VALUES) for name in ("train", "test"))
    torch.testing.assert_close(tracin_cp(train, test).scores, 2.5 * VALUES @ VALUES.T)


def test_other_weights_are_refused_where_two_checkpoints_have_the_same(tmp_path):
    train = store(tmp_path / "train", [at("aaaa", 5), at("aaaa", 9)], VALUES, VALUES)
    test = store(tmp_path / "test", [at("aaaa", 5), at("bbbb", 9)], VALUES, VALUES)
    with pytest.raises(PerSampleError, match=r"step 9 \(weights aaaa\), the test store .*step 9 \(weights bbbb\)"):
        tracin_cp(train, test)


def test_tracin_refuses_rows_that_count_batches(tmp_path):
    rows = {"step": 5, "learning_rate": 0.5, "weight": 0.5, "sample_index": torch.arange(2)}
    train = store_of(tmp_path / "train", [(VALUES, rows)], settings={"step_unit": "batches"})
    test = store_of(tmp_path / "test", [(VALUES, rows)])
    with pytest.raises(UnsupportedError, match="the rows of the train store count batches, as those of manual"):
        tracin(train, test)
