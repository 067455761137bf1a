"""Which samples a captured batch holds: equal to what the rows carry themselves, and nobody's batches are changed."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_persample.callbacks import PerSampleGradientMonitor
from lightning_persample.callbacks.sample_index import Drawn, _Tagged
from tests.callbacks.indexed_data import (
    COMBINED,
    FEATURES,
    LOADERS,
    PARTS,
    ByHand,
    Follows,
    Indexed,
    as_lists,
    combined,
    own_index,
    same,
    seed_all,
    train,
    watch,
)
from tests.callbacks.runs import Recorder, make_trainer
from tests.in_turn import in_turn

# Lightning's advice about workers that are spawned anew in each epoch.
pytestmark = pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers=True`:UserWarning")


def marked(name):
    return pytest.param(name, marks=pytest.mark.slow) if "spawned" in name else name


@pytest.mark.parametrize("name", [marked(name) for name in LOADERS])
def test_the_index_is_what_the_rows_carry(name):
    if name == "2 workers, any order":  # which batch comes first is a matter of time
        recorder = Recorder(1)
        module, _, _ = train(LOADERS[name], [recorder])
        batches, records = module.batches, recorder.records
    else:
        again = "worker" not in name or name in ("2 workers", "2 workers, persistent")  # starting them takes long
        batches, records = watch(LOADERS[name], max_epochs=2 if again else 1)
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


@pytest.mark.parametrize(("mode", "workers"), in_turn(COMBINED, [0, 2]))
def test_several_loaders_have_an_index_each(mode, workers):
    batches, records = watch(lambda: combined(mode, workers), max_epochs=1 if workers else 2)
    assert [as_lists(record.sample_index) for record in records] == [own_index(batch) for batch in batches]
    exhausted = [record for record in records if record.sample_index["short"] is None]
    assert bool(exhausted) == (mode == "max_size")


def test_the_index_of_nested_loaders_has_the_structure_of_the_batch():
    def data():
        return {"a": [LOADERS["shuffled"](), LOADERS["plain"]()], "b": LOADERS["own generator"]()}

    batches, records = watch(data)
    for batch, record in zip(batches, records, strict=True):
        assert [each.tolist() for each in record.sample_index["a"]] == [own_index(part) for part in batch["a"]]
        assert record.sample_index["b"].tolist() == own_index(batch["b"])


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


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        pytest.param(setting, name, marks=[pytest.mark.slow] if "workers" in name and "limit" not in setting else [])
        for setting in SETTINGS
        for name in ("plain", "shuffled", "2 workers", "batch_sampler without a length")
    ],
)
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
        if batch_idx in (0, 4):
            next(iter(self.trainer.train_dataloader))


@pytest.mark.parametrize("name", ["shuffled", "2 workers", "batch_sampler without a length"])
def test_validation_in_mid_epoch_and_other_iterators_of_the_same_loader(name):
    settings = {"val_check_interval": 2, "num_sanity_val_steps": 1, "max_epochs": 1 if "workers" in name else 2}
    batches, records = watch(LOADERS[name], kind=Validates, **settings)
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
    resume(LOADERS[name], tmp_path)


def resume(make_data, tmp_path):
    """Fits that stop in mid-epoch and go on with another Trainer, with and without a callback."""
    runs = []
    for callbacks in ([], [Recorder(1)]):
        seed_all()
        first, second = Follows(), Follows()
        trainer = make_trainer(callbacks, max_steps=4, max_epochs=-1)
        trainer.fit(first, make_data())
        trainer.save_checkpoint(tmp_path / "middle.ckpt")
        make_trainer(callbacks, max_epochs=3).fit(second, make_data(), ckpt_path=tmp_path / "middle.ckpt")
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


@pytest.mark.parametrize(("kind", "workers"), in_turn([Looks, Stops], [2, 0]))
def test_loader_and_dataset_are_as_before(kind, workers):
    found = []
    for callbacks in ([], [Recorder(1)]):
        seed_all()
        loader = DataLoader(Indexed(), 4, num_workers=workers)
        trainer = make_trainer(callbacks, max_epochs=1 if workers else 2)
        before = dict(vars(loader)), dict(vars(loader.dataset))
        with pytest.raises(RuntimeError, match="a mistake") if kind is Stops else nullcontext():
            trainer.fit(kind(), loader)
        for was, each in zip(before, (loader, loader.dataset), strict=True):
            assert {
                name: value for name, value in vars(each).items() if name not in was or was[name] is not value
            } == {}
            assert was.keys() == vars(each).keys()
        found.append(traces(loader, trainer))
    assert found[0] == found[1]


def test_a_combined_loader_of_the_user_is_as_before():
    loader = combined("min_size")
    before = list(vars(loader))
    train(lambda: loader, [Recorder(1)])
    assert type(loader) is CombinedLoader
    assert list(vars(loader)) == before


class Counting(Indexed):
    """A dataset with a state, which torchdata saves."""

    def __init__(self):
        super().__init__()
        self.given = 0

    def __getitem__(self, key):
        self.given += 1
        inputs, index = super().__getitem__(key)
        return inputs + self.given, index

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_of_torchdata(workers, tmp_path):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def make_data():
        return stateful(Counting(), 4, shuffle=True, num_workers=workers)

    batches, records = watch(make_data)
    assert [as_lists(record.sample_index) for record in records] == [own_index(batch) for batch in batches]
    resume(make_data, tmp_path)


def test_a_tagged_batch_in_pinned_memory_is_the_users_pinned_batch(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *device: tensor + 1)
    tagged = pin_memory(_Tagged({"a": [torch.zeros(2)], "b": "text"}, Drawn([3, 4])))
    assert same(tagged.batch, pin_memory({"a": [torch.zeros(2)], "b": "text"}))
    assert tagged.drawn.keys == [3, 4]


def test_lightning_still_refuses_what_it_refuses():
    with pytest.raises(ValueError, match="does not support the `CombinedLoader"):
        train(lambda: combined("sequential", endless=LOADERS["endless"]()), [Recorder(1)])


class Hashed(torch.utils.data.Dataset):
    """Rows under keys of 64 bits without a sign."""

    def __init__(self) -> None:
        self.keys = [2**63 + 11 * place for place in range(6)]

    def __getitem__(self, key):
        return torch.full((FEATURES,), float(self.keys.index(key))), 0

    def __len__(self):
        return len(self.keys)


def test_keys_that_are_no_int64_are_a_list():
    data = Hashed()
    monitor, recorder = PerSampleGradientMonitor(every_n_steps=1), Recorder()
    trainer = make_trainer([monitor, recorder])
    trainer.fit(Follows(), DataLoader(data, batch_size=3, sampler=data.keys))
    assert [record.sample_index for record in recorder.records] == [data.keys[:3], data.keys[3:]]
    assert set(monitor.worst(6).index) == set(data.keys)
