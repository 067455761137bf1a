"""What is given in place of two stores of gradients: their folders, and what is refused by what it holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_persample import OptionError, PerSampleError, UnsupportedError
from lightning_persample.influence import (
    GradientStore,
    el2n,
    grad_cos,
    grad_dot,
    grand,
    less,
    logra,
    read_ledger,
    self_influence,
    tracin,
    tracin_cp,
    trak,
)
from lightning_persample.influence.ledger import Ledger, Manifest
from tests.influence.loops import simple, store_of

SCORES = {score.__name__: score for score in (grad_dot, grad_cos, tracin, tracin_cp, trak, logra, less)}
ADAM = {"direction": "adam"}


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("name", SCORES)
def test_folders_in_place_of_stores(tmp_path, name, kind):
    rows = {"step": 5, "learning_rate": 0.5, "weight": 0.5, "one_minus_p": 0.5, "sample_index": torch.arange(5)}
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    options = {"columns": ("one_minus_p",), "settings": ADAM if name == "less" else {}}
    train = store_of(tmp_path / "train", [(values, rows)], **options)
    test = store_of(tmp_path / "test", [(values, rows)], columns=("one_minus_p",))
    found = SCORES[name](kind(tmp_path / "train"), kind(tmp_path / "test"))
    assert torch.equal(found.scores, SCORES[name](train, test).scores)


@pytest.mark.parametrize("name", SCORES)
def test_the_folder_of_a_ledger_is_refused_with_where_its_gradients_are(tmp_path, name):
    Ledger(tmp_path).write_manifest(Manifest("run", {}, ("weight",)))
    text = (
        f"{str(tmp_path)!r} is a ledger and no store of gradients: its gradients, if it was written with `projection`, "
        f"are in {str(tmp_path / '_gradients')!r}; its rows are read with read_ledger"
    )
    for score in (GradientStore, lambda folder: SCORES[name](folder, folder)):
        with pytest.raises(PerSampleError) as refused:
            score(str(tmp_path))
        assert str(refused.value) == text


@pytest.mark.parametrize("read", [read_ledger, self_influence, grand, el2n])
def test_the_folder_of_a_store_is_refused_where_a_ledger_is_wanted(tmp_path, read):
    simple(tmp_path / "_gradients", [[1.0]])
    with pytest.raises(PerSampleError) as refused:
        read(tmp_path / "_gradients")
    assert str(refused.value) == (
        f"{str(tmp_path / '_gradients')!r} is a store of gradients and no ledger: open it with GradientStore; its "
        f"ledger, if it was written during training as the folder '_gradients' of one, is in {str(tmp_path)!r}"
    )


@pytest.mark.parametrize("side", ["train", "test"])
@pytest.mark.parametrize("name", sorted(set(SCORES) - {"less"}))
def test_directions_in_place_of_gradients_are_refused(tmp_path, name, side):
    stores = [
        simple(tmp_path / each, [[1.0]], settings={"direction": "adam" if each == side else None})
        for each in ("train", "test")
    ]
    text = f"the {side} store was written with direction='adam', but {name} takes gradients: collect them with dir"
    with pytest.raises(OptionError, match=text):
        SCORES[name](*stores)


@pytest.mark.parametrize("name", sorted(set(SCORES) - {"tracin"}))
def test_a_store_of_a_training_is_refused_by_all_but_tracin(tmp_path, name):
    rows = {"sample_index": [0, 1, 0, 1], "step": [3, 3, 4, 4], "learning_rate": 0.5, "weight": 0.5, "one_minus_p": 0.5}
    options = {"checkpoints": (), "columns": ("one_minus_p",)}
    values = torch.ones(4, 2, dtype=torch.float64)
    store = store_of(tmp_path / "store", [(values, rows)], settings=ADAM if name == "less" else {}, **options)
    test = store_of(tmp_path / "test", [(values, rows)], **options)
    text = (
        "the train store has rows of 2 steps, 3, 4, and no checkpoints: they were written during training, and scores "
        "along a training are those of tracin, with test gradients at each of these steps"
    )
    with pytest.raises(UnsupportedError, match=text):
        SCORES[name](store, test)
