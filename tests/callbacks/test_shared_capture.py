"""All per-sample callbacks of a Trainer share one capture per step."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from lightning_persample.callbacks import PerSampleCallback, PerSampleGradientMonitor
from lightning_persample.errors import BatchSizeError, OptionError
from lightning_persample.rules import registry
from tests.callbacks.runs import Classifier, Recorder, as_loader, column, fit, loader


@pytest.fixture
def linear_rule_calls(monkeypatch):
    """Counts the evaluations of the rule of F.linear."""
    rule = registry.find_rule(F.linear)
    calls = []

    def counting(*args):
        calls.append(args)
        return rule.function(*args)

    monkeypatch.setitem(registry._RULES, rule.op, dataclasses.replace(rule, function=counting))
    return calls


@pytest.mark.parametrize(
    "callbacks",
    [
        lambda: [PerSampleGradientMonitor()],
        lambda: [PerSampleGradientMonitor(), Recorder(), Recorder(quantities=("sq_norm", "grad_sample"))],
    ],
    ids=["one callback", "three callbacks"],
)
def test_rules_run_once_per_use_and_step(callbacks, linear_rule_calls):
    fit(Classifier(), callbacks())
    assert len(linear_rule_calls) == 3 * 2  # batches, layers


def test_rules_run_only_on_steps_that_somebody_wants(linear_rule_calls):
    fit(Classifier(), [PerSampleGradientMonitor(2), Recorder(3)], data=loader(48))
    assert len(linear_rule_calls) == 2 * len({1, 3, 5} | {2, 5})


def test_a_record_reaches_every_callback_that_wants_the_step(tmp_path):
    second, third = Recorder(2), Recorder(3)
    trainer = fit(Classifier(), [second, PerSampleGradientMonitor(), third], tmp_path, loader(48))
    assert second.batch_indices == [1, 3, 5]
    assert third.batch_indices == [2, 5]
    assert second.records[-1] is third.records[-1]
    means = column(trainer, "per_sample_grad/norm_mean")
    assert [record.norms().mean().item() for record in second.records] == pytest.approx(means[1::2])
    assert [record.norms().mean().item() for record in third.records] == pytest.approx(means[2::3])


class SeesGradients(Recorder):
    """Compares the record with the parameters' own gradients, and looks for grad_sample at every later moment."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.carried = []

    def on_per_sample_gradients(self, trainer, pl_module, record, batch, batch_idx):
        for name, parameter in pl_module.named_parameters():
            # The Trainer divides by the two accumulated batches; the first batch of a window has only its own part.
            total = record.grad_samples[name].mean(0) / 2
            if batch_idx % 2 == 0:
                torch.testing.assert_close(parameter.grad, total)
            assert parameter.grad_sample is record.grad_samples[name]
            assert parameter.grad_sample.shape == (record.batch_size, *parameter.shape)
        super().on_per_sample_gradients(trainer, pl_module, record, batch, batch_idx)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.carried.append(all(hasattr(parameter, "grad_sample") for parameter in pl_module.parameters()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.carried.append(all(hasattr(parameter, "grad_sample") for parameter in pl_module.parameters()))


class AfterTheBatch(Classifier):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert not any(hasattr(parameter, "grad_sample") for parameter in self.parameters())


@pytest.mark.parametrize("callbacks_after", [0, 1])
def test_parameters_carry_grad_sample_until_the_batch_ends(callbacks_after):
    callback = SeesGradients(quantities=("sq_norm", "grad_sample"))
    fit(AfterTheBatch(), [callback, *(Recorder() for _ in range(callbacks_after))], accumulate_grad_batches=2)
    assert callback.batch_indices == [0, 1, 2]
    assert callback.carried == [True] * 5


def test_grad_sample_is_not_computed_unless_somebody_needs_it():
    recorder = Recorder()
    fit(Classifier(), [PerSampleGradientMonitor(), recorder])
    for record in recorder.records:
        with pytest.raises(OptionError, match=r"or let `needs` of the callback return {'grad_sample'}"):
            dict(record.grad_samples)


class ForgetsSuper(Recorder):
    """Overrides every hook the capture uses, without a call of super()."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.hooks = []

    def on_fit_start(self, trainer, pl_module):
        self.hooks.append("on_fit_start")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.hooks.append("on_train_batch_end")

    def on_fit_end(self, trainer, pl_module):
        self.hooks.append("on_fit_end")

    def teardown(self, trainer, pl_module, stage):
        self.hooks.append("teardown")

    def on_exception(self, trainer, pl_module, exception):
        self.hooks.append("on_exception")


class CallsSuper(ForgetsSuper):
    def on_fit_start(self, trainer, pl_module):
        super().on_fit_start(trainer, pl_module)
        PerSampleCallback.on_fit_start(self, trainer, pl_module)

    def teardown(self, trainer, pl_module, stage):
        super().teardown(trainer, pl_module, stage)
        PerSampleCallback.teardown(self, trainer, pl_module, stage)


class Mixin:
    def on_fit_start(self, trainer, pl_module):
        self.mixed_in = True


class WithMixin(Mixin, Recorder):
    pass


@pytest.mark.parametrize("callback", [ForgetsSuper, CallsSuper, WithMixin])
def test_subclasses_may_override_lightnings_hooks_with_and_without_super(callback):
    recorder, module = callback(quantities=("grad_sample",)), Classifier()
    fit(module, [recorder])
    assert len(recorder.records) == 3
    assert not {"training_step", "backward"} & module.__dict__.keys()
    assert not any(hasattr(parameter, "grad_sample") for parameter in module.parameters())
    if callback is WithMixin:
        assert recorder.mixed_in
    else:
        assert recorder.hooks == ["on_fit_start", *["on_train_batch_end"] * 3, "on_fit_end", "teardown"]


def test_a_callback_with_error_decides_for_all():
    callbacks = [PerSampleGradientMonitor(), Recorder(unsupported="error")]
    with pytest.raises(BatchSizeError, match="do not agree on a number of samples"):
        fit(Classifier(), callbacks, data=as_loader([(torch.randn(4, 6), torch.zeros(3).long())]))


class AwayFromGrad(PerSampleCallback):
    """The callback of the guide."""

    def __init__(self, **options):
        super().__init__(**options)
        self.dots = []

    def needs(self, trainer):
        return {"dot"}

    def on_per_sample_gradients(self, trainer, pl_module, record, batch, batch_idx):
        grads = {name: parameter.grad for name, parameter in pl_module.named_parameters() if name in record.names}
        total = sum(grad.double().square().sum() for grad in grads.values())
        self.dots.append(float(record.dot(grads).double().mean() / total))


def test_the_dots_with_grad_leave_out_frozen_parameters():
    module, callback = Classifier(), AwayFromGrad()
    frozen = next(module.parameters()).requires_grad_(False)
    fit(module, [callback])
    assert frozen.grad is None
    assert callback.dots == pytest.approx([1.0] * 3, rel=1e-4)  # .grad is the mean of the samples' gradients
