"""verify=True: the first captured batch is checked in a second pass; what is wrong ends the training with a table."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_persample.callbacks import PerSampleGradientMonitor
from lightning_persample.errors import PerSampleError, PerSampleWarning, VerificationError
from lightning_persample.reference.untouched import without_dropout
from tests.callbacks.runs import CLASSES, FEATURES, Classifier, Recorder, as_loader, fit, loader
from tests.callbacks.test_untouched_training import STEPS, ResidualInPlace, dropout, everything_after_training
from tests.callbacks.unseen_models import Hidden, traces_after_training
from tests.in_turn import in_turn


@pytest.mark.parametrize(("settings", "accumulate"), in_turn([{}, {"precision": "bf16-mixed"}], [3, 1]))
def test_training_is_equal_bit_for_bit(accumulate, settings, tmp_path):
    plain, python_state = everything_after_training(dropout, accumulate, [], **settings)
    callbacks = [PerSampleGradientMonitor(5, verify=True), Recorder(1)]
    watched, watched_python_state = everything_after_training(
        dropout, accumulate, callbacks, tmp_path=tmp_path, **settings
    )
    assert len(callbacks[1].records) >= STEPS * accumulate * 0.9
    for name, value in plain.items():
        assert torch.equal(value, watched[name]), name
    assert python_state == watched_python_state


def test_what_a_training_step_changes_and_logs_is_not_changed_by_the_check(tmp_path):
    plain, plain_rest = traces_after_training([], tmp_path / "plain")
    watched, watched_rest = traces_after_training([Recorder(verify=True)], tmp_path / "watched")
    for name, value in plain.items():
        assert torch.equal(value, watched[name]), name
    assert plain_rest == watched_rest


class Counts(Classifier):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sizes = []
        self.outside = SimpleNamespace(sizes=[])  # a second pass does not look into objects of others' classes

    def training_step(self, batch, batch_idx):
        self.sizes.append(len(batch[0]))
        self.outside.sizes.append(len(batch[0]))
        self.log("size", float(len(batch[0])))
        return super().training_step(batch, batch_idx)


def test_the_check_runs_once_on_a_few_samples():
    module = Counts()
    trainer = fit(module, [PerSampleGradientMonitor(2, verify=True), Recorder(3)], data=loader(48), max_epochs=2)
    assert module.sizes == [8] * 12
    assert module.outside.sizes == [8, 4, 1, 1, 1, 1, *[8] * 11]
    assert float(trainer.callback_metrics["size"]) == 8.0


def test_nothing_is_checked_unless_asked():
    module = Counts()
    fit(module, [PerSampleGradientMonitor()])
    assert module.outside.sizes == [8] * 3


def test_a_wrong_reduction_ends_the_training_with_the_table():
    module = Classifier(reduction="sum")
    weight = module.network[0].weight.detach().clone()
    with pytest.raises(VerificationError) as error:
        fit(module, [Recorder(), PerSampleGradientMonitor(verify=True)])
    first, *table = str(error.value).splitlines()
    assert first == (
        "verify=True, and not every value is right; with verify=False the fit warns of what it can tell and goes on. "
        "Per-sample gradients of 4 samples, compared with the one-sample loop (tolerance 1e-03): 0 of 4 parameters "
        "agree"
    )
    assert table[0].split() == ["parameter", "largest", "relative", "error", "status", "reason"]
    assert table[2].split() == ["network.0.weight", "3.0e+00", "differs", "[1]"]
    assert table[-1] == (
        "[1] every value of the engine is 4 times the loop's: loss_reduction='mean' does not fit the loss, "
        "loss_reduction='sum' does"
    )
    assert isinstance(error.value, PerSampleError)
    assert torch.equal(module.network[0].weight, weight)
    assert not {"training_step", "backward", "log", "log_dict", "print"} & module.__dict__.keys()
    fit(Classifier(reduction="sum"), [PerSampleGradientMonitor(verify=True, loss_reduction="sum")])


@pytest.mark.filterwarnings("ignore:Found 1 module.* in eval mode")
def test_batch_normalization_ends_the_training_with_the_reason():
    layers = nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(16, CLASSES)
    with pytest.raises(
        VerificationError, match=r"\[1\] samples influence each other, so a sample in its batch and"
    ) as error:
        fit(Classifier(nn.Sequential(*layers)), [Recorder(verify=True)])
    apart = (
        "; use layers and losses that keep samples apart (GroupNorm in place of BatchNorm, or BatchNorm in evaluation "
    )
    assert str(error.value).endswith(f"{apart}mode)")

    class Frozen(Classifier):
        def on_train_start(self):
            self.network[2].eval()

    fit(Frozen(nn.Sequential(*layers)), [Recorder(verify=True)])
    fit(Classifier(nn.Sequential(*layers[:2], nn.GroupNorm(2, 4), *layers[3:])), [Recorder(verify=True)])
    layers[2].train()
    with pytest.warns(PerSampleWarning, match="Samples of a batch influence each other"):
        fit(Classifier(nn.Sequential(*layers)), [recorder := Recorder(verify=False)])
    assert recorder.records[0].mixing


class Noisy(ResidualInPlace):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


class NoisyByNumPy(ResidualInPlace):
    def forward(self, x):
        return super().forward(x + torch.from_numpy(np.random.rand(*x.shape)).to(x))


def test_a_model_that_draws_noise_is_compared():
    fit(Classifier(Noisy()), [recorder := Recorder(verify=True)])
    assert all(record.coverage == 1 for record in recorder.records)
    with pytest.raises(VerificationError, match="'mean' does"):
        fit(Classifier(Noisy()), [Recorder(verify=True, loss_reduction="sum")])


def test_a_model_that_draws_noise_elsewhere_cannot_be_compared_and_trains():
    text = r"verify=True could not compare the gradients of `network\..*: the loss changes with the random seed"
    with pytest.warns(PerSampleWarning, match=text):
        fit(Classifier(NoisyByNumPy()), [recorder := Recorder(verify=True)])
    assert all(record.coverage == 1 for record in recorder.records)


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)
        self.recurrent = nn.GRU(1, 4, num_layers=2, dropout=0.3, batch_first=True)
        self.drop = nn.AlphaDropout(0.2)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x):
        hidden = self.recurrent(x[..., None])[0]
        return self.last(self.drop(self.attention(hidden, hidden, hidden, need_weights=False)[0]).mean(1))


def test_dropout_functions_do_not_drop_during_the_check():
    fit(Classifier(ResidualInPlace()), [recorder := Recorder(verify=True)])
    assert all(record.coverage == 1 for record in recorder.records)
    x = torch.ones(64, 2, 3)
    with without_dropout(nn.Identity()):
        for drop in (F.dropout, F.dropout1d, F.alpha_dropout, F.feature_alpha_dropout):
            assert torch.equal(drop(x, 0.5, True), x)
            assert torch.equal(drop(x, p=0.5, training=True), x)
            assert torch.equal(drop(x, training=True), x)
        assert torch.equal(torch.dropout(x, 0.5, True), x)
        attended = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        assert torch.equal(attended, F.scaled_dot_product_attention(x, x, x, None, 0.5))
    torch.testing.assert_close(attended, x)
    assert not torch.equal(F.dropout(x, 0.5, True), x)


def test_dropout_layers_do_not_drop_during_the_check():
    module = Classifier(Drops())
    fit(module, [Recorder(verify=True)])
    layers = module.network
    assert (layers.attention.dropout, layers.recurrent.dropout, layers.drop.p) == (0.3, 0.3, 0.2)
    with without_dropout(module):
        assert (layers.attention.dropout, layers.recurrent.dropout, layers.drop.p) == (0.0, 0.0, 0.0)


class SkipsTheFirst(Counts):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 0 else loss


@pytest.mark.filterwarnings("ignore:.*training_step.* returned .*None")
def test_a_batch_that_is_skipped_is_not_the_one_that_is_checked():
    module = SkipsTheFirst()
    fit(module, [Recorder(verify=True)])
    assert module.outside.sizes == [4, 8, 4, 1, 1, 1, 1, 8, 8]


class SkipsSingleSamples(Classifier):
    def training_step(self, batch, batch_idx):
        return None if len(batch[0]) == 1 else super().training_step(batch, batch_idx)


def test_a_check_that_cannot_run_ends_the_training():
    text = "running the loss on sample 0 alone failed with NoLossError: training_step returned None"
    with pytest.raises(VerificationError, match=text):
        fit(SkipsSingleSamples(), [Recorder(verify=True)])
    with pytest.raises(
        VerificationError, match="the tensors of the batch do not agree on a number of samples along axis 0"
    ):
        fit(Classifier(), [Recorder(verify=True)], data=as_loader([(torch.randn(4, FEATURES), torch.zeros(3).long())]))


def weights_by_label(outputs, batch):
    return (1.0 + batch[1]) / (1.0 + batch[1]).sum()


class Weighted(Classifier):
    def training_step(self, batch, batch_idx):
        losses = F.cross_entropy(self.network(batch[0]), batch[1], reduction="none")
        return {"loss": (losses * weights_by_label(None, batch)).sum()}


def test_the_options_of_the_callbacks_are_those_of_the_check():
    fit(Weighted(), [Recorder(verify=True, loss_reduction=weights_by_label)])
    with pytest.raises(VerificationError, match="the samples weigh unequally in the loss"):
        fit(Weighted(), [Recorder(verify=True)])


def test_a_parameter_without_values_ends_the_training_unless_another_engine_gives_them():
    with pytest.raises(VerificationError, match=r"network\.weight +- +missing +"):
        fit(Classifier(Hidden()), [Recorder(verify=True)])
    recorder = Recorder(verify=True, unsupported="vmap")
    with pytest.warns(PerSampleWarning, match="engine='vmap'"):
        fit(Classifier(Hidden()), [recorder])
    assert [record.coverage for record in recorder.records] == [1.0] * 3
