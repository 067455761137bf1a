"""What decides which rows a repeated collection keeps, and that none is missing at its end."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_persample import OptionError, PerSampleError, PerSampleWarning, collect_gradients
from lightning_persample.callbacks.collect import SamplesOnce
from lightning_persample.influence import GradientStore
from lightning_persample.influence.shards import StoreWriter
from tests.callbacks.collect_runs import COUNT, Net, Rows, joined, loop, stored
from tests.callbacks.runs import make_trainer
from tests.callbacks.test_collect_again import FULL, StopsAt, assert_equal


def weighted(module, batch, weight):
    return weight * F.cross_entropy(module(batch[0]), batch[1])


def constant(outputs, batch):
    return torch.ones(len(batch[0]))


def tensors(dtype=torch.float64):
    rows = Rows()
    return DataLoader(TensorDataset(rows.inputs.to(dtype), rows.labels), 4)


def test_a_partial_of_another_value_is_refused_and_one_of_the_same_goes_on(tmp_path):
    first = collect_gradients(Net(), tensors(), tmp_path, loss=partial(weighted, weight=1), **FULL)
    assert len(collect_gradients(Net(), tensors(), tmp_path, loss=partial(weighted, weight=1), **FULL)) == len(first)
    text = r"with loss='partial\(.*weighted, weight=1\)', but now there is loss='partial\(.*weighted, weight=5\)'"
    with pytest.raises(OptionError, match=text):
        collect_gradients(Net(), tensors(), tmp_path, loss=partial(weighted, weight=5), **FULL)
    store = collect_gradients(Net(), tensors(), tmp_path, loss=partial(weighted, weight=5), overwrite=True, **FULL)
    assert_equal(stored(store), 5 * joined(loop(Net(), Rows())))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"loss": lambda module, batch: weighted(module, batch, 1)}, "loss"),
        ({"loss": partial(lambda module, batch: weighted(module, batch, 1))}, "loss"),
        ({"columns": {"one": lambda outputs, batch: constant(outputs, batch)}}, r"columns\['one'\]"),
        ({"columns": {"one": constant}, "loss": partial(weighted, weight=2)}, None),
    ],
)
def test_callables_that_no_name_tells_are_named_where_rows_are_kept(options, name, tmp_path):
    collect_gradients(Net(), tensors(), tmp_path, **options, **FULL)
    if name is None:
        collect_gradients(Net(), tensors(), tmp_path, **options, **FULL)
        return
    text = rf"holds {COUNT} of the {COUNT} rows already, which are kept; {name} \(a lambda, or an object\) are not comp"
    with pytest.warns(PerSampleWarning, match=text):
        collect_gradients(Net(), tensors(), tmp_path, **options, **FULL)


def test_rows_of_another_precision_are_refused(tmp_path):
    stops = StopsAt(2)
    options = {"loss": stops, "projection": None}
    with pytest.raises(KeyError):
        collect_gradients(
            Net().float(), tensors(torch.float32), tmp_path, trainer=make_trainer(precision="bf16-mixed"), **options
        )
    stops.times = -1
    with pytest.raises(OptionError, match="with precision='bf16-mixed', but now there is precision='32-true'"):
        collect_gradients(Net().float(), tensors(torch.float32), tmp_path, **options)


@pytest.mark.parametrize("limits", [{"limit_predict_batches": 1}, {"limit_predict_batches": 0}, {"fast_dev_run": True}])
def test_limits_of_a_trainer_leave_no_sample_out(limits, tmp_path):
    trainer = make_trainer(**limits)
    store = collect_gradients(Net(), tensors(), tmp_path, trainer=trainer, **FULL)
    assert_equal(stored(store), joined(loop(Net(), Rows())))
    assert trainer.limit_predict_batches == limits.get("limit_predict_batches", 1)


class EndsAt(Rows):
    """Gives a StopIteration for one of its rows, which looks as the end of all."""

    def __getitem__(self, index: int):
        if index == 9:
            raise StopIteration
        return super().__getitem__(index)


def test_a_dataset_that_ends_early_is_named(tmp_path):
    text = r"the loader ended after 2 of 6 batches: one of the samples \[8, 9, 10, 11\] gave a StopIteration"
    with pytest.raises(PerSampleError, match=text):
        collect_gradients(Net(), DataLoader(EndsAt(), 4), tmp_path, **FULL)
    assert GradientStore(tmp_path, partial=True).rows["sample_index"].tolist() == list(
        range(4)
    )  # one batch is fetched ahead


def test_a_store_that_lacks_samples_is_named():
    samples = SamplesOnce(tensors(), has_index=False)
    rows = np.zeros(COUNT, [("sample_index", "i8"), ("checkpoint", "i8")])
    rows["sample_index"] = np.arange(COUNT)
    samples.check_complete(rows, 1)
    with pytest.raises(PerSampleError, match=r"2 samples have no row at checkpoint 0: 3, 4. The call can be repeated"):
        samples.check_complete(np.delete(rows, [3, 4]), 1)
    with pytest.raises(PerSampleError, match=r"22 samples have no row at checkpoint 1: 0, 1, 2, 3, 4, 5, 6, 7, ..."):
        samples.check_complete(rows, 2)


@pytest.mark.parametrize("is_file_first", [True, False])
def test_a_file_and_a_state_dict_of_the_same_weights_go_on(is_file_first, tmp_path, monkeypatch):
    module, trainer = Net(), make_trainer(max_epochs=1)
    trainer.fit(module, tensors())
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    monkeypatch.chdir(tmp_path)
    sources = ["saved.ckpt", tmp_path / "saved.ckpt", module.state_dict()]
    stops = StopsAt(2)
    for source in sources if is_file_first else sources[::-1]:
        if stops.times >= 0:
            with pytest.raises(KeyError):
                collect_gradients(Net(), tensors(), "store", loss=stops, checkpoints=[source], **FULL)
            stops.times = -1
            continue
        with pytest.warns(PerSampleWarning, match="rows already, which are kept; loss "):
            store = collect_gradients(Net(), tensors(), "store", loss=stops, checkpoints=[source], **FULL)
    assert_equal(stored(store), joined(loop(module, Rows())))
    assert set(store.rows["step"].tolist()) == {6 if is_file_first else -1}


def test_it_runs_in_inference_mode(tmp_path):
    module, data = Net(), tensors()
    with torch.inference_mode():
        store = collect_gradients(module, data, tmp_path, **FULL)
        with pytest.raises(OptionError, match=r"`first.weight` was made under torch.inference_mode"):
            collect_gradients(Net(), data, tmp_path, **FULL)
    assert_equal(stored(store), joined(loop(Net(), Rows())))


def test_a_full_disk_names_the_folder_and_the_call_goes_on(tmp_path, monkeypatch):
    def full(self):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "flush", full)
        with pytest.raises(PerSampleError, match=f"dirpath='{tmp_path}' cannot be written: .*No space left"):
            collect_gradients(Net(), tensors(), tmp_path, **FULL)
    assert_equal(stored(collect_gradients(Net(), tensors(), tmp_path, **FULL)), joined(loop(Net(), Rows())))
