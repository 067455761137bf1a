"""A store of other data: refused where the data can be told, else the rows that are kept are counted."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from lightning_persample import OptionError, PerSampleWarning, collect_gradients
from lightning_persample.callbacks.checkpoints import fingerprint_of_data
from tests.callbacks.collect_runs import COUNT, Net, Rows, joined, loader, loop, stored

FULL = {"projection": None, "dtype": "float64"}


class HuggingFace(Dataset):
    """Rows with a fingerprint as those of Hugging Face have it."""

    __module__ = "datasets.arrow_dataset"

    def __init__(self, rows: Rows, fingerprint: str) -> None:
        self.rows = rows
        self._fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int):
        return self.rows[index]


def tensors(rows):
    return TensorDataset(rows.inputs, rows.labels)


def relabelled():
    rows = Rows()
    rows.labels = rows.labels.clone()
    rows.labels[3] = (rows.labels[3] + 1) % 3
    return rows


KINDS = {
    "tensors": tensors,
    "subset": lambda rows: Subset(tensors(rows), range(COUNT)),
    "concat": lambda rows: ConcatDataset([Subset(tensors(rows), range(2)), Subset(tensors(rows), range(2, COUNT))]),
    "datasets": lambda rows: HuggingFace(rows, str(rows.labels.tolist())),
}


@pytest.mark.parametrize("kind", KINDS)
def test_corrected_labels_are_refused_and_the_same_data_go_on(kind, tmp_path):
    before, now = Rows(), relabelled()
    store = collect_gradients(Net(), DataLoader(KINDS[kind](before), 4), tmp_path, **FULL)
    told = store.manifest.settings["data"]
    assert told == fingerprint_of_data(KINDS[kind](Rows()))
    collect_gradients(Net(), DataLoader(KINDS[kind](Rows()), 5), tmp_path, **FULL)  # without a warning
    with pytest.raises(OptionError) as raised:
        collect_gradients(Net(), DataLoader(KINDS[kind](now), 4), tmp_path, **FULL)
    other = fingerprint_of_data(KINDS[kind](now))
    assert f"written with data={told!r}, but now there is data={other!r}: " in str(raised.value)
    store = collect_gradients(Net(), DataLoader(KINDS[kind](now), 4), tmp_path, overwrite=True, **FULL)
    torch.testing.assert_close(stored(store), joined(loop(Net(), now)), rtol=1e-10, atol=1e-12)


def test_of_data_that_cannot_be_told_rows_are_kept_with_a_warning_or_overwritten(tmp_path):
    collect_gradients(Net(), loader(), tmp_path, **FULL)
    now = DataLoader(relabelled(), 4)
    with pytest.warns(PerSampleWarning, match=f"holds {COUNT} of the {COUNT} rows already, which are kept"):
        kept = collect_gradients(Net(), now, tmp_path, **FULL)
    assert kept.manifest.settings["data"] is None
    torch.testing.assert_close(stored(kept), joined(loop(Net(), Rows())), rtol=1e-10, atol=1e-12)
    store = collect_gradients(Net(), now, tmp_path, overwrite=True, **FULL)
    torch.testing.assert_close(stored(store), joined(loop(Net(), now.dataset)), rtol=1e-10, atol=1e-12)
    assert len(store) == COUNT


def test_a_store_that_does_not_know_its_data_goes_on(tmp_path):
    data = DataLoader(tensors(Rows()), 4)
    collect_gradients(Net(), data, tmp_path, **FULL)
    path = tmp_path / "_manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["settings"]["data"]
    path.write_text(json.dumps(manifest))
    with pytest.warns(PerSampleWarning, match="the data are not compared"):
        store = collect_gradients(Net(), data, tmp_path, **FULL)
    assert len(store) == COUNT
    assert store.manifest.settings["data"] is None  # its rows may be of anything


def test_known_data_are_not_continued_with_unknown_ones(tmp_path):
    collect_gradients(Net(), DataLoader(tensors(Rows()), 4), tmp_path, **FULL)
    with pytest.raises(OptionError, match=r"written with data='tensors .*', but now there is data=None"):
        collect_gradients(Net(), loader(), tmp_path, **FULL)


class Own(TensorDataset):
    pass


def test_fingerprints():
    rows = torch.arange(12.0).reshape(4, 3)
    whole = TensorDataset(rows)
    same = [
        TensorDataset(rows.clone()),
        TensorDataset(rows.T.contiguous().T),
        TensorDataset(rows.clone().requires_grad_()),
    ]
    assert {fingerprint_of_data(each) for each in same} == {fingerprint_of_data(whole)}
    others = [
        whole,
        TensorDataset(rows.double()),
        TensorDataset(rows.reshape(4, 3, 1)),
        TensorDataset(rows, rows),
        TensorDataset(-rows),
        Subset(whole, [0, 1]),
        Subset(whole, []),
        Subset(whole, [1, 0]),
        Subset(Subset(whole, [1, 0]), [1, 0]),
        ConcatDataset([whole]),
        ConcatDataset([whole, whole]),
        TensorDataset(rows.bfloat16()),
        TensorDataset(torch.empty(0, 3)),
        TensorDataset(torch.empty(0, 4)),
        TensorDataset(torch.complex(rows, rows)),
        TensorDataset(torch.complex(rows, rows).conj()),
    ]
    found = [fingerprint_of_data(each) for each in others]
    assert None not in found
    assert len(set(found)) == len(others)
    assert fingerprint_of_data(Subset(whole, torch.tensor([0, 1]))) == fingerprint_of_data(Subset(whole, [0, 1]))
    unknown = [None, Own(rows), [1, 2], Rows(), Subset(Rows(), [1]), ConcatDataset([whole, Rows()])]
    unknown += [TensorDataset(rows.to_sparse()), Subset(whole, ["a"])]
    assert [fingerprint_of_data(each) for each in unknown] == [None] * len(unknown)


def test_the_subset_that_a_batch_sampler_draws_from(tmp_path):
    data = DataLoader(Rows(), batch_sampler=BatchSampler(SubsetRandomSampler([5, 2, 9]), 2, True))
    store = collect_gradients(Net(), data, tmp_path, **FULL)
    assert store.rows["sample_index"].tolist() == [2, 5, 9]
    torch.testing.assert_close(stored(store), joined(loop(Net(), Rows()))[[2, 5, 9]], rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("error:`isinstance:FutureWarning")
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_nothing_is_said(package, tmp_path, capfd):
    pytest.importorskip(package)  # the one that was imported last speaks for both
    paths = [tmp_path / f"{seed}.ckpt" for seed in (3, 4)]
    for seed, path in zip((3, 4), paths, strict=True):
        torch.save({"state_dict": Net(seed).state_dict()}, path)
    names = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
    loggers = [logging.getLogger(name) for name in names]
    levels = [each.level for each in loggers]
    records, handler = [], logging.Handler()
    handler.emit = records.append
    try:
        for each in loggers:
            each.setLevel(logging.INFO)
            each.addHandler(handler)
        collect_gradients(Net(), loader(), tmp_path / "store", checkpoints=paths)
        assert [each.level for each in loggers] == [logging.INFO] * 4
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
            each.removeHandler(handler)
    assert capfd.readouterr() == ("", "")
    assert records == []
