"""Which weights the rows of a step are of: closures that run again, windows that fail, clipping."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from lightning_persample import OptionError, PerSampleGradientWriter, PerSampleWarning, Projection
from lightning_persample.influence import GradientStore, read_ledger, read_manifest
from tests.callbacks.ledger_runs import NAMES, Noted, SaveAfter, StopAfter, assert_rows, data, fit, rows
from tests.callbacks.runs import make_trainer
from tests.in_turn import in_turn


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "ledger"


class Closure(Noted):
    """An optimizer that evaluates its closure at several weights in a step, but in its last ones once."""

    def configure_optimizers(self):
        return SeveralTimes(self.parameters(), 0.1)


class SeveralTimes(torch.optim.LBFGS):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr, max_iter=3)
        self.steps = 0

    def step(self, closure):
        self.steps += 1
        self.param_groups[0]["max_iter"] = 3 if self.steps < 5 else 1
        return super().step(closure)


def test_an_optimizer_that_runs_its_closure_again_has_one_row_for_each_sample(folder):
    """It is of the weights at the start of its step; what the run returns is known of the last weights alone."""
    module = fit(PerSampleGradientWriter(folder, per_layer=2), Closure())
    names = [name for name in NAMES if name not in ("loss", "is_first")]
    assert_rows(rows(folder, names), module.notes)
    table = read_ledger(folder)
    assert set(table["step"].to_pylist()) == set(range(6))
    assert table["loss"].to_pylist()[:16] == table["is_first"].to_pylist()[:16] == [None] * 16
    assert_rows(rows(folder, ("loss", "is_first"))[16:], module.notes[16:])


def test_a_fit_that_failed_in_a_window_goes_on_with_the_same_trainer(folder):
    """Lightning starts the epoch anew from the weights that are there; the window that failed is in no step."""
    trainer = make_trainer([PerSampleGradientWriter(folder), StopAfter(5)], max_epochs=1, accumulate_grad_batches=4)
    with pytest.raises(KeyError, match="stopped"):
        trainer.fit(first := Noted(), data())
    assert {note["step"] for note in first.notes} == {0, 1}
    again = trainer.global_step
    kept, first.notes = first.notes[:16], []
    trainer.fit(first, data())
    assert again == 1
    assert_rows(rows(folder, NAMES[:-2]), kept + first.notes)
    assert read_ledger(folder)["step"].to_pylist() == [0] * 16 + [1] * 16 + [2] * 6


def test_the_manifest_says_what_steps_count(folder):
    class ByHand(Noted):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    fit(PerSampleGradientWriter(folder), callbacks=[SaveAfter(3, path := folder.with_name("saved.ckpt"))])
    assert read_manifest(folder).settings["step_unit"] == "optimizer steps"
    with pytest.raises(OptionError, match="step_unit='optimizer steps', but now there is step_unit='batches'"):
        fit(PerSampleGradientWriter(folder), ByHand(), ckpt_path=path, max_epochs=2)


def test_a_weight_is_that_before_clipping(folder):
    fit(PerSampleGradientWriter(folder), module := Noted(), gradient_clip_val=1e-3)
    assert_rows(rows(folder, NAMES[:-2]), module.notes)
    assert read_ledger(folder)["weight"].to_pylist() == [1 / 4] * 20 + [1 / 2] * 2


def rate_of(step: int, group: int = 0) -> float:
    return 0.1 / (1 + step) / (1 + group)


class Scheduled(Noted):
    """Has the learning rate of each step from `rate_of`, set at some moment before it."""

    when = "training_step"

    def schedule(self, when):
        if when == self.when:
            for group, each in enumerate(self.optimizers(use_pl_optimizer=False).param_groups):
                each["lr"] = rate_of(self.trainer.global_step, group)

    def training_step(self, batch, batch_idx):
        self.schedule("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        self.schedule("on_before_optimizer_step")

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        self.schedule("optimizer_step")
        if self.when == "after the closure":
            optimizer_closure()
            self.schedule(self.when)
            optimizer.step()
        else:
            optimizer.step(closure=optimizer_closure)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.7)


class InGroups(Scheduled):
    def on_train_batch_start(self, batch, batch_idx):
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.7
        super().on_train_batch_start(batch, batch_idx)

    def configure_optimizers(self):
        first, last = self.network[0].parameters(), self.network[2].parameters()
        return torch.optim.SGD([{"params": first}, {"params": last}], 0.7)


MOMENTS = ["training_step", "optimizer_step", "on_before_optimizer_step", "after the closure"]


@pytest.mark.parametrize(("kind", "moment", "accumulate"), in_turn(product([Scheduled, InGroups], MOMENTS), [1, 3]))
def test_a_learning_rate_is_that_of_the_optimizer_step_whenever_it_was_set(kind, moment, accumulate, folder):
    (module := kind()).when = moment
    writer = PerSampleGradientWriter(folder, per_layer=2, flush_every=1, projection=Projection(dim=4))
    fit(writer, module, accumulate_grad_batches=accumulate, max_epochs=2)
    expected = {}
    for note in module.notes:
        squares = [note["norm/network.0"] ** 2, note["norm/network.2"] ** 2]
        own = [rate_of(note["step"], group if kind is InGroups else 0) for group in range(2)]
        rate = sum(eta * square for eta, square in zip(own, squares, strict=True)) / sum(squares)
        expected[note["step"], note["sample_index"]] = pytest.approx(rate, rel=1e-10)
    for told in (read_ledger(folder).to_pandas(), GradientStore(folder / "_gradients").rows):
        step, index, rate = (told[name].tolist() for name in ("step", "sample_index", "learning_rate"))
        assert dict(zip(zip(step, index, strict=True), rate, strict=True)) == expected
    assert not any(optimizer._optimizer_step_post_hooks for optimizer in module.trainer.optimizers)


class ByHand(Noted):
    """Steps after every second batch, with a rate that is set right before the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        self.manual_backward(outputs["loss"])
        if batch_idx % 2:
            optimizer = self.optimizers()
            optimizer.param_groups[0]["lr"] = rate_of(batch_idx)
            optimizer.step()
            optimizer.zero_grad()
        return outputs

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.7)


def test_a_learning_rate_by_hand_is_that_of_the_optimizer_step(folder):
    fit(PerSampleGradientWriter(folder), ByHand(), data(24))
    rates = {place: rate_of(place + 1 - place % 2) for place in range(6)}
    table = read_ledger(folder)
    assert table["learning_rate"].to_pylist() == [rates[place] for place in table["batch_idx"].to_pylist()]


def test_a_learning_rate_that_changes_after_rows_were_written_is_said(folder):
    with pytest.warns(PerSampleWarning, match="have that of the backward") as caught:
        fit(PerSampleGradientWriter(folder, flush_every=1), ByHand(), data(24))
    assert len([each for each in caught if each.category is PerSampleWarning]) == 1


class BreaksOff(Noted):
    """Ends its first epoch after four batches."""

    def on_train_batch_start(self, batch, batch_idx):
        if self.current_epoch == 0 and batch_idx == 4:
            return -1
        return super().on_train_batch_start(batch, batch_idx)


@pytest.mark.parametrize("flush_every", [1, 100])
def test_batches_whose_step_never_comes_have_no_rows(folder, flush_every):
    """The window of the fourth batch ends with the epoch, and Lightning drops its gradient."""
    writer = PerSampleGradientWriter(folder, flush_every=flush_every, projection=Projection(dim=4))
    module = fit(writer, BreaksOff(), accumulate_grad_batches=3, max_epochs=2)
    stepped = [note for note in module.notes if (note["epoch"], note["batch_idx"]) != (0, 3)]
    assert len(stepped) == len(module.notes) - 4
    assert_rows(rows(folder, NAMES[:-2]), stepped)
    kept = GradientStore(folder / "_gradients").rows["sample_index"].tolist()
    assert kept == read_ledger(folder)["sample_index"].to_pylist() == [note["sample_index"] for note in stepped]
