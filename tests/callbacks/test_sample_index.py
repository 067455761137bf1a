"""Which samples a captured batch holds: equal to what the rows carry themselves, and nobody's batches are changed."""

from __future__ import annotations

import pytest
import torch

from tests.callbacks.indexed_data import COMBINED, LOADERS, PARTS, ByHand, combined, same, train
from tests.callbacks.runs import Recorder

# Lightning's advice about workers that are spawned anew in each epoch.
pytestmark = pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers=True`:UserWarning")


def own_index(batch):
    """What the rows of a batch say of themselves."""
    if isinstance(batch, dict) and "index" not in batch:
        return {name: None if part is None else own_index(part) for name, part in batch.items()}
    index = batch["index"] if isinstance(batch, dict) else batch[1]
    return index.tolist() if isinstance(index, torch.Tensor) else list(index)


def as_lists(index):
    if isinstance(index, dict):
        return {name: as_lists(part) for name, part in index.items()}
    return index.tolist() if isinstance(index, torch.Tensor) else index


def watch(make_data, recorder=None, **settings):
    """A fit without and one with a callback: the same batches, weights and generators; gives batches and records."""
    recorder = recorder or Recorder(1)
    plain, weights, states = train(make_data, **settings)
    watched, weights_beside, states_beside = train(make_data, [recorder], **settings)
    assert len(plain.batches) > 1
    assert same(plain.batches, watched.batches)
    assert weights == weights_beside
    assert states == states_beside
    return watched.batches, recorder.records


def marked(name):
    return pytest.param(name, marks=pytest.mark.slow) if "spawned" in name else name


@pytest.mark.parametrize("name", [marked(name) for name in LOADERS])
def test_the_index_is_what_the_rows_carry(name):
    if name == "2 workers, any order":  # which batch comes first is a matter of time
        recorder = Recorder(1)
        module, _, _ = train(LOADERS[name], [recorder])
        batches, records = module.batches, recorder.records
    else:
        batches, records = watch(LOADERS[name])
    assert [as_lists(record.sample_index) for record in records] == [own_index(batch) for batch in batches]
    for record in records:
        if name == "names":
            assert isinstance(record.sample_index, list)
        else:
            assert record.sample_index.dtype == torch.int64
            assert record.sample_index.shape == (record.batch_size,)


@pytest.mark.parametrize("name", PARTS)
def test_the_index_is_that_of_the_dataset_that_the_loader_has(name):
    batches, records = watch(PARTS[name])
    dataset = PARTS[name]().dataset
    found = [[dataset[index][1] for index in record.sample_index.tolist()] for record in records]
    assert found == [own_index(batch) for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", COMBINED)
def test_several_loaders_have_an_index_each(mode, workers):
    batches, records = watch(lambda: combined(mode, workers))
    assert [as_lists(record.sample_index) for record in records] == [own_index(batch) for batch in batches]
    exhausted = [record for record in records if record.sample_index["short"] is None]
    assert bool(exhausted) == (mode == "max_size")


@pytest.mark.parametrize("engine", ["expanded", "vmap", "loop"])
def test_every_engine(engine):
    batches, records = watch(LOADERS["shuffled"], Recorder(1, engine=engine))
    assert [as_lists(record.sample_index) for record in records] == [own_index(batch) for batch in batches]


def test_manual_optimization_has_one_index_for_each_backward():
    batches, records = watch(LOADERS["shuffled"], kind=ByHand)
    found = [(record.backward_index, as_lists(record.sample_index)) for record in records]
    assert found == [(backward, own_index(batch)) for batch in batches for backward in (0, 1)]
