"""Which weights the rows of a step are of: closures that run again, windows that fail, clipping."""

from __future__ import annotations

import pytest
import torch

from lightning_persample import OptionError, PerSampleGradientWriter
from lightning_persample.influence import read_ledger, read_manifest
from tests.callbacks.ledger_runs import NAMES, Noted, SaveAfter, StopAfter, assert_rows, data, fit, rows
from tests.callbacks.runs import make_trainer


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
