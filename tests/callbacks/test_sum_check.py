"""Where gradients of the samples exist, their weighted sum is compared with what the backward added to .grad."""

from __future__ import annotations

import dataclasses
import warnings

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_persample.callbacks import PerSampleGradientMonitor, observed_step
from lightning_persample.callbacks.observed_step import SumCheck
from lightning_persample.errors import PerSampleWarning
from lightning_persample.gradients import Dense
from lightning_persample.rules import registry
from tests.callbacks.runs import CLASSES, FEATURES, Classifier, Recorder, fit, loader
from tests.callbacks.test_untouched_training import Checkpointed, ResidualInPlace, batch_norm, dropout

BOTH = ("sq_norm", "grad_sample")
START = "The gradients of the samples do not add up to what the backward added to .grad; they are off for "


def texts_of_a_fit(module, callbacks=None, **settings):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, [Recorder(quantities=BOTH)] if callbacks is None else callbacks, **settings)
    texts = [str(each.message) for each in caught if each.category is PerSampleWarning]
    return [text for text in texts if text.startswith(START)]


@pytest.fixture
def results(monkeypatch):
    """What each test of a sum found."""
    finish, found = SumCheck.finish, []
    monkeypatch.setattr(SumCheck, "finish", lambda self, record: found.append(finish(self, record)) or found[-1])
    return found


def fp16():
    return {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))}


WAYS = {
    "plain": (dropout, {}),
    "accumulation": (dropout, {"accumulate_grad_batches": 2}),
    "batch norm": (batch_norm, {}),
    "in place": (ResidualInPlace, {}),
    "bf16": (dropout, {"precision": "bf16-mixed"}),
    "fp16, loss scale": (dropout, fp16()),
    "fp16, accumulation": (dropout, {**fp16(), "accumulate_grad_batches": 3}),
    "checkpointing": (lambda: Checkpointed(False), {}),
    "clipping": (dropout, {"gradient_clip_val": 0.1}),
}


class Cancelling(Classifier):
    """Trains one parameter alone, whose gradient is zero but for rounding: of each sample, or of each entry's terms."""

    def __init__(self, trained):
        super().__init__(nn.Linear(FEATURES, CLASSES))
        self.conv, self.shift = nn.Conv1d(1, 4, 3), nn.Parameter(torch.zeros(()))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name == trained)

    def training_step(self, batch, batch_idx):
        hidden = F.instance_norm(self.conv(batch[0][:, None])).relu().flatten(1)[:, :FEATURES]
        return F.cross_entropy(self.network(hidden) + self.shift, batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], self.lr)


@pytest.mark.parametrize("trained", ["conv.bias", "shift"])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_that_all_cancel_are_no_difference(trained, seed, results):
    torch.manual_seed(seed)
    assert not texts_of_a_fit(Cancelling(trained))
    assert results == [None] * 3


@pytest.mark.parametrize("way", WAYS)
def test_the_sum_fits_in_every_way_of_training(way, results):
    network, settings = WAYS[way]
    assert texts_of_a_fit(Classifier(network()), max_epochs=2, **settings) == []
    assert results == [None] * 6


def weights_by_label(outputs, batch):
    return (1.0 + batch[1]) / (1.0 + batch[1]).sum()


class Weighted(Classifier):
    def training_step(self, batch, batch_idx):
        losses = F.cross_entropy(self.network(batch[0]), batch[1], reduction="none")
        return {"loss": (losses * weights_by_label(None, batch)).sum()}


@pytest.mark.parametrize(
    ("module", "reduction"),
    [(Weighted(), weights_by_label), (Classifier(reduction="sum"), "sum"), (Classifier(reduction="sum"), "mean")],
)
def test_the_sum_fits_for_every_reduction(module, reduction, results):
    """With a wrong reduction as well: the samples' own gradients are off, but not what they add up to."""
    assert texts_of_a_fit(module, [Recorder(quantities=BOTH, loss_reduction=reduction)]) == []
    assert results == [None] * 3


def test_sparse_gradients(results):
    network = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(4 * FEATURES, CLASSES))

    class Tokens(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(((batch[0] * 2).long().clamp(0, 8), batch[1]), batch_idx)

    assert texts_of_a_fit(Tokens(network), accumulate_grad_batches=2) == []
    assert results == [None] * 3


class Penalized(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.network[0].weight.square().sum()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_penalty_is_said_once_with_its_parameter_and_size(accumulate):
    module = Penalized(lr=0.0)
    weight = module.network[0].weight
    inputs, labels = next(iter(loader()))
    whole, own = 2 * weight.detach(), F.cross_entropy(module.network(inputs), labels)
    (own,) = torch.autograd.grad(own, weight)
    (text,) = texts_of_a_fit(module, max_epochs=2, accumulate_grad_batches=accumulate)
    assert text == (
        f"{START}`network.0.weight` by {whole.norm() / (whole + own).norm():.1%}. A term of the loss that belongs to "
        "no sample (a penalty on the parameters) does this and leaves the samples' own gradients exact, and so does a "
        "hook or a `backward` of yours that changes gradients; if there is neither, check the model with "
        "check_per_sample_gradients and report it"
    )


class Doubles(Classifier):
    def backward(self, loss, *args, **kwargs):
        super().backward(loss, *args, **kwargs)
        for parameter in self.network[0].parameters():
            parameter.grad *= 2


def test_a_backward_that_changes_gradients_is_said():
    (text,) = texts_of_a_fit(Doubles())
    assert text.startswith(f"{START}`network.0.weight` by 50.0%, `network.0.bias` by 50.0%. ")


def test_a_rule_that_is_wrong_is_found(monkeypatch):
    rule = registry.find_rule(F.linear)

    def wrong(call, grad_output):
        found = rule.function(call, grad_output)
        return {**found, "weight": Dense(found["weight"].dense() * 0.9)}

    monkeypatch.setitem(registry._RULES, rule.op, dataclasses.replace(rule, function=wrong))
    (text,) = texts_of_a_fit(Classifier())
    assert text.startswith(f"{START}`network.0.weight` by 10.0%, `network.2.weight` by 10.0%. ")


def test_many_parameters_are_listed_in_part(monkeypatch):
    network = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(9)), nn.Linear(FEATURES, CLASSES))

    class All(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + sum(p.square().sum() for p in self.parameters())

    (text,) = texts_of_a_fit(All(network))
    assert text.count("`network.") == 8
    assert " and 12 more. A term" in text


def test_sums_are_not_computed_unless_gradients_are(results):
    fit(Penalized(), [PerSampleGradientMonitor(statistics=())])
    assert results == []


def test_an_overflow_of_half_precision_is_no_difference(results):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    settings = {"plugins": MixedPrecision("16-mixed", "cpu", scaler)}
    assert texts_of_a_fit(Classifier(), **settings) == []
    assert results == [None] * 3


def test_a_parameter_without_gradient_after_the_backward_is_left_out(results):
    class Takes(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(FEATURES, CLASSES)

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.layer(batch[0]), batch[1])

        def backward(self, loss, *args, **kwargs):
            loss.backward()
            self.zero_grad()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    assert texts_of_a_fit(Takes()) == []
    assert results == [None] * 3


def test_too_little_memory_for_the_comparison_leaves_the_run_alone(monkeypatch):
    def without_memory(*args):
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(observed_step, "_dense", without_memory)
    text = "there is not enough memory to compare the sum of the samples' gradients with .grad: it is not compared"
    with pytest.warns(PerSampleWarning, match=text):
        fit(Classifier(), [Recorder(quantities=BOTH)])
