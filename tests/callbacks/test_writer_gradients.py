"""The gradients that a writer keeps beside its ledger, against those of one-sample autograd at each step."""

from __future__ import annotations

import errno

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_persample import OptionError, PerSampleGradientWriter, PerSampleWarning, Projection
from lightning_persample.influence import GradientStore, read_ledger, shards
from lightning_persample.influence.dataset import GRADIENTS
from tests.callbacks.collect_runs import projected
from tests.callbacks.indexed_data import ByName, Follows, Names
from tests.callbacks.ledger_runs import Noted, SaveAfter, StopAfter, WithDropout, data, fit
from tests.callbacks.runs import CLASSES, FEATURES, Classifier, make_trainer
from tests.callbacks.unseen_models import Hidden
from tests.in_turn import in_turn

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")

SMALL = Projection(dim=6, seed=3)
FULL = Projection(dim=10**6)


class Kept(Noted):
    """Keeps the gradients of every sample by step and sample."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {}

    def on_train_batch_start(self, batch, batch_idx):
        named = {name: p for name, p in self.named_parameters() if p.requires_grad}
        for place, index in enumerate(batch[2].tolist()):
            loss = self.losses([part[place : place + 1] for part in batch]).squeeze()
            grads = torch.autograd.grad(loss, list(named.values()))
            self.kept[self.trainer.global_step, index] = dict(zip(named, grads, strict=True))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "ledger"


def writer_of(folder, projection=SMALL, **options):
    return PerSampleGradientWriter(folder, projection=projection, dtype="float64", **options)


def assert_kept(folder, kept, projection=SMALL):
    """A row for each row of the ledger, of the gradient at its step."""
    store, ledger = GradientStore(folder / "_gradients"), read_ledger(folder)
    shared = ("step", "sample_index", "learning_rate", "weight")
    told = sorted(zip(*(store.rows[name].tolist() for name in shared), strict=True))
    assert told == sorted(zip(*(ledger[name].to_pylist() for name in shared), strict=True))
    assert sorted(kept) == [row[:2] for row in told]
    values = torch.cat([block for _, block in store.blocks()])
    rows = [kept[key] for key in zip(store.rows["step"].tolist(), store.rows["sample_index"].tolist(), strict=True)]
    expected = projected({name: torch.stack([row[name] for row in rows]) for name in rows[0]}, projection)
    torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-12)
    return store


@pytest.mark.parametrize("projection", [SMALL, FULL], ids=["projected", "full"])
def test_rows_are_the_gradients_at_their_step(projection, folder):
    module = fit(writer_of(folder, projection, flush_every=4), Kept(), max_epochs=2)
    store = assert_kept(folder, module.kept, projection)
    assert len(store) == 44
    assert len(set(store.rows["learning_rate"])) == 6
    assert store.manifest.projection == projection.settings()
    assert store.num_columns == sum(projection.size_of(p.shape) for p in module.parameters())
    assert store.manifest.run
    assert store.manifest.settings["step_unit"] == "optimizer steps"
    norms = torch.as_tensor(read_ledger(folder)["norm"].to_numpy().copy()).sort().values
    if projection is FULL:
        found = torch.cat([block for _, block in store.blocks()]).norm(dim=1).sort().values
        torch.testing.assert_close(found, norms, rtol=1e-10, atol=0)


def test_accumulated_batches(folder):
    module = fit(writer_of(folder), Kept(), data(20), accumulate_grad_batches=2, max_epochs=2)
    store = assert_kept(folder, module.kept)
    assert store.rows["weight"].tolist() == pytest.approx([1 / 8] * 40)


def test_chosen_steps_and_samples(folder):
    module = fit(writer_of(folder, every_n_steps=2, max_samples=3), Kept(), max_epochs=2)
    store = GradientStore(folder / "_gradients")
    there = set(zip(store.rows["step"].tolist(), store.rows["sample_index"].tolist(), strict=True))
    assert_kept(folder, {key: grads for key, grads in module.kept.items() if key in there})
    assert len(store) == 16


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_the_other_engines(engine, folder):
    module = fit(writer_of(folder, engine=engine), Kept())
    ledger, store = read_ledger(folder), GradientStore(folder / "_gradients")
    assert store.rows["weight"].tolist() == pytest.approx([float("nan")] * 22, nan_ok=True)
    assert ledger["weight"].null_count == 22
    values = torch.cat([block for _, block in store.blocks()])
    keys = zip(store.rows["step"].tolist(), store.rows["sample_index"].tolist(), strict=True)
    rows = [module.kept[key] for key in keys]
    expected = projected({name: torch.stack([row[name] for row in rows]) for name in rows[0]}, SMALL)
    torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-12)


def test_training_is_untouched(folder):
    results = []
    for callbacks in ([], [writer_of(folder, flush_every=2)]):
        module = WithDropout()
        make_trainer(callbacks, max_epochs=3, accumulate_grad_batches=2).fit(module, data(shuffle=True))
        results.append((list(module.parameters()), torch.get_rng_state()))
    (plain, plain_state), (written, written_state) = results
    assert all(torch.equal(*pair) for pair in zip(plain, written, strict=True))
    assert torch.equal(plain_state, written_state)
    assert len(GradientStore(folder / "_gradients")) == 66


@pytest.mark.parametrize(("flush_every", "is_behind"), in_turn([1, 3, 100], [True, False]))
def test_a_resumed_fit_goes_on_from_its_checkpoint(flush_every, is_behind, folder, tmp_path):
    saves, writer = SaveAfter(8, tmp_path / "saved.ckpt"), writer_of(folder, flush_every=flush_every)
    callbacks = [writer, saves] if is_behind else [saves, writer]
    trainer = make_trainer([*callbacks, StopAfter(11)], max_epochs=3)
    with pytest.raises(KeyError, match="stopped"):
        trainer.fit(first := Kept(), data(24, shuffle=True))
    run = GradientStore(folder / "_gradients").manifest.run
    assert set(GradientStore(folder / "_gradients").rows["step"]) == set(range(11))
    writer = writer_of(folder, flush_every=flush_every)
    second = fit(writer, Kept(), data(24, shuffle=True), tmp_path / "saved.ckpt", max_epochs=3)
    early = {key: grads for key, grads in first.kept.items() if key[0] < 8}
    assert_kept(folder, early | second.kept)
    assert len(early | second.kept) == 72
    assert GradientStore(folder / "_gradients").manifest.run == run


def test_a_fit_that_fails_leaves_both_readable(folder):
    module = Kept()
    with pytest.raises(KeyError, match="stopped"):
        fit(writer_of(folder), module, callbacks=[StopAfter(4)])
    kept = {key: grads for key, grads in module.kept.items() if key[0] < 4}
    assert_kept(folder, kept)


def test_a_further_fit_of_the_same_trainer_goes_on(folder):
    module = Kept()
    trainer = make_trainer([writer_of(folder)], max_epochs=1)
    trainer.fit(module, data())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data())
    assert_kept(folder, module.kept)


def test_another_run_is_refused_or_removed(folder):
    fit(writer_of(folder), Kept())
    with pytest.raises(OptionError, match="holds the ledger of run"):
        fit(writer_of(folder), Kept())
    module = fit(writer_of(folder, FULL, overwrite=True), Kept())
    assert_kept(folder, module.kept, FULL)


def test_gradients_of_another_run_are_removed_by_one_that_keeps_none(folder):
    fit(writer_of(folder), Kept())
    (folder / GRADIENTS / "notes.txt").write_text("the user's")
    fit(writer_of(folder, None, overwrite=True), Kept())
    assert [each.name for each in (folder / GRADIENTS).iterdir()] == ["notes.txt"]
    fit(writer_of(folder, overwrite=True), Kept())
    (folder / GRADIENTS / "notes.txt").unlink()
    fit(writer_of(folder, None, overwrite=True), Kept())
    assert not (folder / GRADIENTS).exists()


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_run_that_goes_on_without_gradients_loses_those_of_abandoned_steps(overwrite, folder, tmp_path):
    fit(writer_of(folder), first := Kept(), callbacks=[SaveAfter(3, path := tmp_path / "saved.ckpt")])
    writer = writer_of(folder, None, overwrite=overwrite)
    fit(writer, Kept(), data(shuffle=True), path, callbacks=[SaveAfter(2, later := tmp_path / "later.ckpt")])
    store = GradientStore(folder / GRADIENTS)
    assert set(store.rows["step"]) == {0, 1, 2}
    third = fit(writer_of(folder), Kept(), ckpt_path=later, max_epochs=2)  # and keeps them again
    store, ledger = GradientStore(folder / GRADIENTS), read_ledger(folder)
    there = set(zip(store.rows["step"].tolist(), store.rows["sample_index"].tolist(), strict=True))
    assert there == {key for key in first.kept if key[0] < 3} | set(third.kept)
    assert there < set(zip(ledger["step"].to_pylist(), ledger["sample_index"].to_pylist(), strict=True))


def test_gradients_whose_ledger_is_gone_are_refused(folder):
    fit(writer_of(folder), Kept())
    for path in (*folder.glob("*.parquet"), folder / "_manifest.json"):
        path.unlink()
    for projection in (SMALL, None):
        with pytest.raises(OptionError, match=r"holds the gradients of run .*remove its rows with overwrite=True"):
            fit(writer_of(folder, projection), Kept())
        assert [path.name for path in folder.iterdir()] == [GRADIENTS]
    fit(writer_of(folder, None, overwrite=True), Kept())
    assert not (folder / GRADIENTS).exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"projection": Projection(dim=7, seed=3)},
            r"projection={'dim': 6, .*}, but now there is projection={'dim': 7, ",
        ),
        ({"dtype": "float16"}, "dtype='float64', but now there is dtype='float16'"),
    ],
)
def test_a_run_that_goes_on_with_other_values_is_refused(options, text, folder, tmp_path):
    path = tmp_path / "saved.ckpt"
    fit(writer_of(folder), Kept(), callbacks=[SaveAfter(3, path)])
    writer = PerSampleGradientWriter(folder, **{"projection": SMALL, "dtype": "float64", **options})
    with pytest.raises(OptionError, match=text):
        fit(writer, Kept(), ckpt_path=path, max_epochs=2)
    assert len(GradientStore(folder / "_gradients")) == read_ledger(folder).num_rows == 22


def test_other_parameters_are_refused_when_a_run_goes_on(folder, tmp_path):
    path = tmp_path / "saved.ckpt"
    fit(writer_of(folder), Kept(), callbacks=[SaveAfter(3, path)])
    module = Kept()
    module.network[0].weight.requires_grad_(False)
    with pytest.raises(
        OptionError, match=r"with 4 parameters, .*'network\.0\.weight' .* but now there is 3 parameters"
    ):
        fit(writer_of(folder), module, ckpt_path=path, max_epochs=2)


def test_frozen_parameters_have_no_columns(folder):
    module = Kept()
    module.network[0].weight.requires_grad_(False)
    fit(writer_of(folder), module)
    store = assert_kept(folder, module.kept)
    assert [each.name for each in store.manifest.parameters] == ["network.0.bias", "network.2.weight", "network.2.bias"]


def test_unsupported_parameters_have_no_columns(folder):
    with pytest.warns(PerSampleWarning, match="Per-sample gradients are missing for 1 parameter"):
        fit(writer_of(folder, columns=lambda outputs, batch: {}), Classifier(Hidden()), two_columns())
    store = GradientStore(folder / "_gradients")
    assert [each.name for each in store.manifest.parameters] == ["network.last.weight", "network.last.bias"]
    assert not store.nonfinite.any()


class WithOthers(Kept):
    """One parameter has no entries and one is complex, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.phase = nn.Parameter(torch.ones(CLASSES, dtype=torch.complex128) * (1 + 0.5j))

    def losses(self, batch):
        logits = self.network(batch[0]) * self.phase.abs()
        return F.cross_entropy(logits, batch[1], reduction="none") + self.empty.sum()


def test_empty_and_complex_parameters_have_no_columns(folder):
    with pytest.warns(PerSampleWarning) as said:
        module = fit(writer_of(folder), WithOthers())
    (text,) = [text for each in said if "not stored" in (text := str(each.message))]
    assert text == "gradients of `phase` are not stored: they are complex, but rows are of real numbers"
    kept = {
        key: {name: grad for name, grad in row.items() if name.startswith("network")}
        for key, row in module.kept.items()
    }
    store = assert_kept(folder, kept)
    assert len(store.manifest.parameters) == 5


def test_a_module_of_complex_parameters_has_a_ledger_alone(folder):
    class Complex(Noted):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Linear(FEATURES, CLASSES, bias=False, dtype=torch.complex128)

        def losses(self, batch):
            logits = self.network(batch[0].to(torch.complex128)).abs()
            return F.cross_entropy(logits, batch[1], reduction="none")

        def on_train_batch_start(self, batch, batch_idx):
            """Note nothing."""

    with pytest.warns(PerSampleWarning) as said:
        fit(writer_of(folder), Complex())
    texts = [str(each.message) for each in said]
    assert any("no parameter has per-sample gradients that could be" in text for text in texts)
    assert read_ledger(folder).num_rows == 22
    assert not (folder / GRADIENTS / "_manifest.json").exists()


def test_keys_that_are_no_ints_are_said_once(folder):
    class Named(Follows):
        def training_step(self, batch, batch_idx):
            return self.loss(batch)

    with pytest.warns(PerSampleWarning, match="keys that are no ints") as said:
        make_trainer([writer_of(folder)]).fit(Named(), DataLoader(ByName(), 4, sampler=Names()))
    assert sum("keys that are no ints" in str(each.message) for each in said) == 1
    assert set(GradientStore(folder / GRADIENTS).rows["sample_index"]) == {-1}


def test_an_optimizer_that_runs_its_closure_again(folder):
    class Closure(Kept):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)

    assert_kept(folder, fit(writer_of(folder), Closure()).kept)


def two_columns():
    rows = data().dataset.tensors
    return DataLoader(TensorDataset(rows[0].float(), rows[1]), 4)


class ByHand(Kept):
    """Two backward passes a batch, each of a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for layer in (self.network[0], self.network[2]):
            self.network.requires_grad_(False)
            layer.requires_grad_(True)
            optimizer.zero_grad()
            self.manual_backward(self.losses(batch).mean())
        self.network.requires_grad_(True)
        return {"per_sample": {}}


def test_manual_optimization_has_a_row_for_each_backward(folder):
    module = fit(writer_of(folder, FULL), ByHand(), data(4))
    store = GradientStore(folder / "_gradients")
    assert len(store) == read_ledger(folder).num_rows == 8
    assert store.manifest.settings["step_unit"] == "batches"
    values = torch.cat([block for _, block in store.blocks()])
    for place, index in enumerate(store.rows["sample_index"].tolist()):
        for name, grad in module.kept[0, index].items():
            is_its_turn = name.startswith("network.0") == (place < 4)
            expected = grad.flatten() if is_its_turn else torch.zeros(grad.numel(), dtype=torch.float64)
            torch.testing.assert_close(values[place, store.columns_of(name)], expected, rtol=1e-10, atol=1e-12)


def test_a_full_disk_is_said_once_and_rows_wait(folder, monkeypatch):
    write, calls = shards.Shards.write, []

    def full(*args, **kwargs):
        calls.append(args)
        if len(calls) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args, **kwargs)

    monkeypatch.setattr(shards.Shards, "write", full)
    with pytest.warns(PerSampleWarning, match="gradients in .* cannot be written: .*No space left on device.*goes on"):
        module = fit(writer_of(folder, flush_every=1), Kept())
    assert_kept(folder, module.kept)


def test_options_that_are_not_allowed(folder):
    with pytest.raises(
        OptionError, match=r"projection=256 is not allowed: projection must be None or .* as Projection\(dim=64\)"
    ):
        PerSampleGradientWriter(folder, projection=256)
    with pytest.raises(OptionError, match="dtype='bfloat16' is not allowed"):
        PerSampleGradientWriter(folder, dtype="bfloat16")
