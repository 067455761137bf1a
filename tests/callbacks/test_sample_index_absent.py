"""Where a batch has no index of its dataset, who says so, and the index that the user's own function gives."""

from __future__ import annotations

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from lightning_persample.callbacks import PerSampleCallback, PerSampleGradientMonitor, sample_index
from lightning_persample.errors import OptionError, PerSampleWarning
from tests.callbacks.indexed_data import LOADERS, Indexed, Stream, as_lists, keep_list, own_index, train, watch
from tests.callbacks.runs import Recorder


class GivesNothing(PerSampleCallback):
    """Receives no records."""


@pytest.mark.filterwarnings("ignore:GivesNothing does not override")
@pytest.mark.parametrize("callback", [GivesNothing(1), Recorder(1, sample_index=lambda batch: batch[1])])
def test_nothing_is_tagged_where_nobody_asks(callback, monkeypatch):
    def refuse(loader):
        raise AssertionError("a loader was tagged")

    monkeypatch.setattr(sample_index, "TaggedLoader", refuse)
    train(LOADERS["plain"], [callback])


def index_of(*answers):
    """A callable that gives each of these answers in turn."""
    left = list(answers)
    return lambda batch: left.pop(0)


@pytest.mark.parametrize(
    "answer",
    [
        [3, 1, 2, 0],
        (3, 1, 2, 0),
        np.array([3, 1, 2, 0]),
        torch.tensor([3, 1, 2, 0], dtype=torch.int32),
        range(3, -1, -1),
    ],
    ids=["list", "tuple", "array", "tensor", "range"],
)
def test_an_index_of_the_users_own(answer):
    recorder = Recorder(1, sample_index=lambda batch: answer)
    train(LOADERS["plain"], [recorder], limit_train_batches=1, max_epochs=1)
    (record,) = recorder.records
    assert record.sample_index.dtype == torch.int64
    assert as_lists(record.sample_index) == list(answer)


@pytest.mark.parametrize("kept", [torch.arange(4), np.arange(4)], ids=["tensor", "array"])
def test_an_index_in_memory_that_is_used_again(kept):
    def next_four(batch):
        kept[:] += 4
        return kept

    recorder, monitor = Recorder(1, sample_index=next_four), PerSampleGradientMonitor(1, sample_index=next_four)
    train(LOADERS["plain"], [recorder, monitor], limit_train_batches=2, max_epochs=1)
    first, second = (as_lists(record.sample_index) for record in recorder.records)
    assert [each + first[0] for each in range(4)] == first
    assert set(first).isdisjoint(second)
    assert monitor.worst(100).samples == 8


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (None, "NoneType"),
        ("abcd", "str"),
        ([1, 2, 3], "list of shape (3,) and dtype torch.int64"),
        ([1.0, 2.0, 3.0, 4.0], "list of shape (4,) and dtype torch.float32"),
        ([True, False, True, False], "list of shape (4,) and dtype torch.bool"),
        (torch.zeros(4, 1, dtype=torch.int64), "Tensor of shape (4, 1) and dtype torch.int64"),
        ([[1], [2, 3], [4], [5]], "list"),
        (7, "int of shape () and dtype torch.int64"),
    ],
)
def test_an_answer_that_is_no_index_is_an_error(answer, got):
    with pytest.raises(OptionError) as error:
        train(LOADERS["plain"], [Recorder(1, sample_index=lambda batch: answer)])
    assert str(error.value) == (
        f"sample_index returned {got}, but it must return the index of each sample of the batch: a tensor or a "
        "sequence of 4 ints"
    )


class OwnIterator(DataLoader):
    """Gives its batches from a generator."""

    def __iter__(self):
        yield from super().__iter__()


def test_where_the_rows_are_not_known_there_is_no_index_and_one_warning():
    recorder = Recorder(1)
    with pytest.warns(PerSampleWarning) as caught:
        train(lambda: OwnIterator(Indexed(), 4), [recorder])
    assert [str(each.message) for each in caught if each.category is PerSampleWarning] == [
        "record.sample_index is None, because OwnIterator makes its batches in an iterator of its own; pass "
        "sample_index=<function of the batch that returns the index of each sample> to the callback"
    ]
    assert {record.sample_index for record in recorder.records} == {None}


class AsksTooEarly(L.LightningDataModule):
    """Has the data made before any callback is set up."""

    def setup(self, stage):
        assert self.trainer.estimated_stepping_batches > 1

    def train_dataloader(self):
        return LOADERS["plain"]()


def test_data_that_are_made_too_early_have_no_index_and_a_warning():
    recorder = Recorder(1)
    with pytest.warns(PerSampleWarning, match="the training data were made before the callbacks' setup; pass sample_"):
        train(AsksTooEarly, [recorder])
    assert {record.sample_index for record in recorder.records} == {None}


@pytest.mark.parametrize(
    "make_data",
    [lambda: DataLoader(Stream(), 4), lambda: DataLoader([keep_list([Indexed()[0]] * 4)] * 3, batch_size=None)],
    ids=["iterable", "whole batches"],
)
def test_where_rows_have_no_index_it_is_none_without_a_word(make_data):
    _, records = watch(make_data)
    assert {record.sample_index for record in records} == {None}


def test_of_several_loaders_one_has_rows_of_another_kind():
    def data():
        several = {"rows": DataLoader(Indexed(), 4), "stream": DataLoader(Stream(), 4)}
        return CombinedLoader(several, "min_size")

    batches, records = watch(data)
    found = [as_lists(record.sample_index) for record in records]
    assert found == [{"rows": own_index(batch["rows"]), "stream": None} for batch in batches]
