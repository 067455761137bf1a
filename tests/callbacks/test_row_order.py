"""A collate function that changes the order of the rows is noticed, and one that keeps it is not suspected."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_persample.callbacks import collect_gradients
from lightning_persample.callbacks.sample_index import RowOrder
from lightning_persample.errors import PerSampleWarning, UnsupportedError
from tests.callbacks.indexed_data import LOADERS, Follows, own_index, train
from tests.callbacks.runs import Recorder


def sequences(count=6):
    """Rows of unequal length, an integer label and a number."""
    generator = torch.Generator().manual_seed(2)
    lengths = [3, 7, 2, 5, 4, 6][:count]
    return [(torch.randn(length, 2, generator=generator), place % 3, place / 7) for place, length in enumerate(lengths)]


def by_length(rows):
    return sorted(rows, key=lambda row: len(row[0]), reverse=True)


def padded(rows, **options):
    inputs, labels, numbers = zip(*rows, strict=True)
    return pad_sequence(list(inputs), batch_first=True, **options), torch.tensor(labels), torch.tensor(numbers)


def sorted_in_place(rows):
    rows.sort(key=lambda row: -len(row[0]))
    return padded(rows)


def mixed_up(rows):
    """Keeps the labels, and has them in another order beside."""
    labels = torch.tensor([row[1] for row in rows])
    order = torch.tensor([2, 0, 1, 5, 4, 3])
    return torch.stack([row[0][:2] for row in rows]) / 2, labels, labels[order]


def as_dicts(rows):
    """Takes the labels out of the rows."""
    rows = [{"tokens": row[0][:, 0].tolist(), "label": row[1]} for row in rows]
    longest = max(len(row["tokens"]) for row in rows)
    labels = [row.pop("label") for row in rows]
    tokens = [row["tokens"] + [0.0] * (longest - len(row["tokens"])) for row in rows]
    return {"tokens": torch.tensor(tokens), "labels": torch.tensor(labels)}


KEEP = {
    "default": lambda rows: default_collate([(row[0][:2], *row[1:]) for row in rows]),
    "padded": padded,
    "padded, time first": lambda rows: pad_sequence([row[0] for row in rows]),
    "mixed up": mixed_up,
    "dictionaries": as_dicts,
    "arrays": lambda rows: [np.array([row[1] for row in rows]), np.stack([row[0][:2].numpy() for row in rows])],
    "lists": lambda rows: {"labels": [row[1] for row in rows], "inputs": [row[0] for row in rows]},
    "sums": lambda rows: torch.stack([row[0].sum(0) for row in rows]),
    "nothing": lambda rows: None,
    "labels turned around": lambda rows: (
        torch.tensor([row[2] for row in rows]),
        torch.tensor([2 - row[1] for row in rows]),
    ),
    "packed": lambda rows: pack_sequence([row[0] for row in rows], enforce_sorted=False),
}
CHANGE = {
    "one row for another": lambda rows: padded([*rows[:-1], rows[0]]),
    "a row twice": lambda rows: padded([rows[0], *rows[:-1]]),
    "sorted": lambda rows: padded(by_length(rows)),
    "sorted in place": sorted_in_place,
    "sorted, inputs alone": lambda rows: pad_sequence([row[0] for row in by_length(rows)], batch_first=True),
    "sorted, time first": lambda rows: pad_sequence([row[0] for row in by_length(rows)]),
    "sorted, labels alone": lambda rows: torch.tensor([row[1] for row in by_length(rows)]),
    "sorted, lengths alone": lambda rows: torch.tensor([len(row[0]) for row in by_length(rows)]),
    "sorted, single precision": lambda rows: torch.tensor([row[2] for row in by_length(rows)], dtype=torch.float32),
    "sorted dictionaries": lambda rows: as_dicts(by_length(rows)),
    "backwards": lambda rows: padded(rows[::-1]),
    "sorted lists": lambda rows: {"labels": [row[1] for row in by_length(rows)]},
}


def looked_at(collate, rows):
    order = RowOrder(collate)
    columns = order.start(rows)
    return order.why_lost(columns, collate(rows))


@pytest.mark.parametrize("name", KEEP)
def test_an_order_that_is_kept_is_not_suspected(name):
    assert looked_at(KEEP[name], sequences()) == ""


@pytest.mark.parametrize("name", CHANGE)
def test_an_order_that_is_changed_is_noticed(name):
    collate = CHANGE[name]
    assert (
        looked_at(collate, sequences()) == f"the collate function {collate.__qualname__} changes the order of the rows"
    )


def test_rows_that_already_are_in_that_order_are_no_evidence():
    assert looked_at(CHANGE["sorted"], by_length(sequences())) == ""


@pytest.mark.parametrize(
    "row",
    [
        object(),
        None,
        (),
        torch.randn(2, 2, dtype=torch.complex64),
        torch.eye(2).to_sparse(),
        np.array(["a", "b"]),
        np.array([1, "b"], dtype=object),
        [[], [1]],
        2**80,
        1e300,
        {"a": {1: "text"}},
        torch.empty(0),
    ],
)
def test_rows_of_any_kind_are_looked_at_without_harm(row):
    assert looked_at(lambda rows: rows, [row, row]) == ""
    assert looked_at(lambda rows: rows[::-1], [row, (row, 1)]) == ""


class Sequences(Dataset):
    """Unequal lengths; a row says which it is."""

    def __len__(self):
        return 18

    def __getitem__(self, index):
        return torch.full((1 + index * 5 % 7, 3), 1.0 + index), index


def collate_sorted(rows):
    inputs, index = zip(*sorted(rows, key=lambda row: len(row[0])), strict=True)
    return pad_sequence(list(inputs), batch_first=True).sum(1), torch.tensor(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_changed_order_is_a_warning_and_no_index(workers):
    recorder = Recorder(1)
    with pytest.warns(PerSampleWarning) as caught:
        train(lambda: DataLoader(Sequences(), 6, collate_fn=collate_sorted, num_workers=workers), [recorder])
    assert [str(each.message) for each in caught if each.category is PerSampleWarning] == [
        "record.sample_index is None, because the collate function collate_sorted changes the order of the rows; pass "
        "sample_index=<function of the batch that returns the index of each sample> to the callback"
    ]
    assert [record.sample_index for record in recorder.records] == [None] * 6


def test_with_the_remedy_it_is_right():
    recorder = Recorder(1, sample_index=lambda batch: batch[1])
    module, _, _ = train(lambda: DataLoader(Sequences(), 6, collate_fn=collate_sorted), [recorder])
    found = [record.sample_index.tolist() for record in recorder.records]
    assert found == [batch[1].tolist() for batch in module.batches]


class Moves(Follows):
    """Gives the batch another form on its way to the device."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [2 * batch[0], *batch[1:]]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0].mul_(0.5), *batch[1:]]


class Reverses(Moves):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [part.flip(0) for part in batch]


class ReversesInPlace(Moves):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [part.copy_(part.flip(0)) for part in batch]


HOOKS = "a hook that a batch goes through on its way to the device changes the order of the rows"


@pytest.mark.parametrize("kind", [Reverses, ReversesInPlace])
@pytest.mark.parametrize("every", [1, 3])
def test_a_hook_that_changes_the_order_is_noticed(kind, every):
    recorder = Recorder(every)
    with pytest.warns(PerSampleWarning, match=f"record.sample_index is None, because {HOOKS}; pass sample_index="):
        train(LOADERS["shuffled"], [recorder], kind)
    assert recorder.records
    assert {record.sample_index for record in recorder.records} == {None}


@pytest.mark.parametrize("every", [1, 3])
def test_hooks_that_keep_the_order_are_not_suspected(every):
    recorder = Recorder(every)
    module, *_ = train(LOADERS["shuffled"], [recorder], Moves)
    found = [record.sample_index.tolist() for record in recorder.records]
    assert found == [own_index(batch) for batch in module.batches[every - 1 :: every]]


def test_samples_of_a_batch_that_a_hook_turns_round_are_not_collected(tmp_path):
    for kind in (Reverses, ReversesInPlace):
        with pytest.raises(UnsupportedError, match=f"the samples of a batch are unknown, because {HOOKS}"):
            collect_gradients(kind(), LOADERS["shuffled"](), tmp_path / kind.__name__)
    assert len(collect_gradients(Moves(), LOADERS["shuffled"](), tmp_path / "moves")) == len(
        LOADERS["shuffled"]().dataset
    )
