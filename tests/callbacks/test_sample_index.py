"""Which samples a captured batch holds: equal to what the rows carry themselves, and nobody's batches are changed."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, default_collate

from lightning_persample.callbacks import PerSampleCallback, _sample_index
from lightning_persample.errors import OptionError, PerSampleWarning
from tests.callbacks.indexed_data import (
    COMBINED,
    LOADERS,
    PARTS,
    ByHand,
    Follows,
    Indexed,
    Stream,
    combined,
    keep_list,
    same,
    seed_all,
    train,
)
from tests.callbacks.runs import Recorder, make_trainer

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


class WithReloads(L.LightningDataModule):
    """Has other data in each epoch."""

    def train_dataloader(self):
        return DataLoader(Indexed(12, 100 * self.trainer.current_epoch), 4, shuffle=True)


SETTINGS = {
    "accumulation": {"accumulate_grad_batches": 3},
    "limit_train_batches": {"limit_train_batches": 3},
    "a share of the batches": {"limit_train_batches": 0.5},
    "overfit_batches": {"overfit_batches": 2, "limit_train_batches": None},
    "fast_dev_run": {"fast_dev_run": 3},
    "max_steps": {"max_steps": 8, "max_epochs": -1},
}


@pytest.mark.parametrize("name", ["plain", "shuffled", "2 workers", "batch_sampler without a length"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train dataloader shuffling")
def test_settings_of_the_trainer(setting, name):
    if setting == "a share of the batches" and "without" in name:
        pytest.skip("a share of what has no length")
    batches, records = watch(LOADERS[name], **SETTINGS[setting])
    assert [as_lists(record.sample_index) for record in records] == [own_index(batch) for batch in batches]


def test_only_captured_batches_are_looked_at():
    batches, records = watch(LOADERS["shuffled"], Recorder(3), max_epochs=3)
    assert [as_lists(record.sample_index) for record in records] == [own_index(batch) for batch in batches[2::3]]


class Validates(Follows):
    """Looks into its training data in between, too."""

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            next(iter(self.trainer.train_dataloader))

    def val_dataloader(self):
        return DataLoader(Indexed(8, 1000), 4)

    def on_train_batch_start(self, batch, batch_idx):
        next(iter(self.trainer.train_dataloader))


@pytest.mark.parametrize("name", ["shuffled", "2 workers", "batch_sampler without a length"])
def test_validation_in_mid_epoch_and_other_iterators_of_the_same_loader(name):
    batches, records = watch(LOADERS[name], kind=Validates, val_check_interval=2, num_sanity_val_steps=1)
    assert [as_lists(record.sample_index) for record in records] == [own_index(batch) for batch in batches]


@pytest.mark.parametrize("every", [1, 2])
def test_data_that_are_made_anew(every):
    batches, records = watch(WithReloads, reload_dataloaders_every_n_epochs=every, max_epochs=4)
    found = [[index % 100 for index in own_index(batch)] for batch in batches]
    assert [as_lists(record.sample_index) for record in records] == found
    assert max(max(own_index(batch)) for batch in batches) >= 200


class AsksForSteps(Follows):
    """Has its data made before the fit starts, as schedulers do."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 1
        return super().configure_optimizers()


def test_data_that_are_made_before_the_fit_starts():
    batches, records = watch(LOADERS["shuffled"], kind=AsksForSteps, limit_train_batches=None)
    assert [as_lists(record.sample_index) for record in records] == [own_index(batch) for batch in batches]


@pytest.mark.parametrize("name", ["shuffled", "2 workers"])
def test_a_fit_that_is_resumed_in_mid_epoch(name, tmp_path):
    runs = []
    for callbacks in ([], [Recorder(1)]):
        seed_all()
        first, second = Follows(), Follows()
        trainer = make_trainer(callbacks, max_steps=4, max_epochs=-1)
        trainer.fit(first, LOADERS[name]())
        trainer.save_checkpoint(tmp_path / "middle.ckpt")
        make_trainer(callbacks, max_epochs=3).fit(second, LOADERS[name](), ckpt_path=tmp_path / "middle.ckpt")
        assert len(first.batches) == 4
        assert second.batches
        runs.append(first.batches + second.batches)
    assert same(*runs)
    assert [as_lists(record.sample_index) for record in callbacks[0].records] == [own_index(each) for each in runs[1]]


def test_two_fits_of_one_trainer_and_two_trainers_with_one_loader():
    loader, recorder = LOADERS["2 workers, persistent"](), Recorder(1)
    module, trainer = Follows(), make_trainer([recorder], max_epochs=1)
    trainer.fit(module, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)
    make_trainer([recorder]).fit(module, loader)
    assert len(module.batches) == 18
    assert [as_lists(record.sample_index) for record in recorder.records] == [own_index(b) for b in module.batches]


def traces(loader, trainer):
    """Everything that a fit could change in the loader and around it."""
    combined = trainer.fit_loop._combined_loader
    kinds = type(loader), type(loader.dataset), type(combined)
    return kinds, loader._iterator, list(vars(loader)), list(vars(combined)), sorted(vars(trainer.fit_loop))


class Looks(Follows):
    """Its training data are what was passed, during the fit, too, and can be copied."""

    def training_step(self, batch, batch_idx):
        loader = self.trainer.train_dataloader
        assert type(loader) is DataLoader
        assert type(loader.dataset) is Indexed
        assert loader.collate_fn is default_collate
        combined = self.trainer.fit_loop._combined_loader
        assert isinstance(combined, CombinedLoader)
        if batch_idx == 0:
            for other in (copy.deepcopy(combined), pickle.loads(pickle.dumps(combined))):
                assert type(other) is CombinedLoader
                assert len(list(other)) == 6
        return super().training_step(batch, batch_idx)


class Stops(Looks):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise RuntimeError("a mistake in training_step")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [Looks, Stops])
@pytest.mark.parametrize("workers", [0, 2])
def test_loader_and_dataset_are_as_before(kind, workers):
    found = []
    for callbacks in ([], [Recorder(1)]):
        seed_all()
        loader, trainer = DataLoader(Indexed(), 4, num_workers=workers), make_trainer(callbacks, max_epochs=2)
        before = dict(vars(loader)), dict(vars(loader.dataset))
        with pytest.raises(RuntimeError, match="a mistake") if kind is Stops else nullcontext():
            trainer.fit(kind(), loader)
        assert before == (vars(loader), vars(loader.dataset))
        found.append(traces(loader, trainer))
    assert found[0] == found[1]


def test_a_combined_loader_of_the_user_is_as_before():
    loader = combined("min_size")
    before = list(vars(loader))
    train(lambda: loader, [Recorder(1)])
    assert type(loader) is CombinedLoader
    assert list(vars(loader)) == before


class GivesNothing(PerSampleCallback):
    """Receives no records."""


@pytest.mark.filterwarnings("ignore:GivesNothing does not override")
@pytest.mark.parametrize("callback", [GivesNothing(1), Recorder(1, sample_index=lambda batch: batch[1])])
def test_nothing_is_tagged_where_nobody_asks(callback, monkeypatch):
    def refuse(loader):
        raise AssertionError("a loader was tagged")

    monkeypatch.setattr(_sample_index, "TaggedLoader", refuse)
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


def half(rows):
    return keep_list(rows[::2])


class OwnIterator(DataLoader):
    """Gives its batches from a generator."""

    def __iter__(self):
        yield from super().__iter__()


@pytest.mark.parametrize(
    ("make_data", "why"),
    [
        (
            lambda: DataLoader(Indexed(), 4, collate_fn=half),
            "the sampler drew 4 rows for a batch of 2 samples (a collate function or a hook of the module adds or "
            "drops rows)",
        ),
        (lambda: OwnIterator(Indexed(), 4), "OwnIterator makes its batches in an iterator of its own"),
    ],
    ids=["rows are dropped", "own iterator"],
)
def test_where_the_rows_are_not_known_there_is_no_index_and_one_warning(make_data, why):
    recorder = Recorder(1)
    with pytest.warns(PerSampleWarning) as caught:
        train(make_data, [recorder])
    assert [str(each.message) for each in caught if each.category is PerSampleWarning] == [
        f"record.sample_index is None, because {why}; pass sample_index=<function of the batch that returns the index "
        "of each sample> to the callback"
    ]
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


def test_a_stateful_loader_of_torchdata():
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    for workers in (0, 2):
        batches, records = watch(lambda workers=workers: stateful(Indexed(), 4, shuffle=True, num_workers=workers))
        assert [as_lists(record.sample_index) for record in records] == [own_index(batch) for batch in batches]
