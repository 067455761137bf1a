"""Modules, callbacks and batches that do unusual things: training goes on as if the callback were not there."""

from __future__ import annotations

import logging
import warnings

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_persample import PerSampleCallback, PerSampleGradientMonitor
from lightning_persample.callbacks.lightning_internals import ObservedMethod
from lightning_persample.errors import OptionError, PerSampleWarning
from tests.callbacks.runs import CLASSES, FEATURES, Classifier, Recorder, as_loader, fit, loader


class OwnLogMethod(Classifier):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def log(self, name, value):
        raise AssertionError("not for Lightning's values")


class OwnLogAttribute(OwnLogMethod):
    def __init__(self):
        super().__init__()
        self.log = logging.getLogger("own")


@pytest.mark.parametrize("kind", [OwnLogMethod, OwnLogAttribute])
def test_a_module_with_a_log_of_its_own(kind):
    trainer = fit(kind(), [PerSampleGradientMonitor(prog_bar=True)])
    assert trainer.callback_metrics["per_sample_grad/norm_mean"] > 0


class ScalesByWhatItLogged(Classifier):
    def logged(self):
        return self.trainer.callback_metrics["loss"]

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.logged()


class KeepsWhatItLogs(ScalesByWhatItLogged):
    """Has a `log` that does more than Lightning's: calls in it are seen."""

    def log(self, name, value):
        super().log(name, value)
        self.kept = 2 * value.detach()

    def logged(self):
        return self.kept


class KeepsALoss(KeepsWhatItLogs):
    """What its `log` computes goes into the loss."""

    def log(self, name, value):
        self.kept = self.network[0].bias.square().sum()

    def training_step(self, batch, batch_idx):
        return Classifier.training_step(self, batch, batch_idx) + self.kept


@pytest.mark.filterwarnings("ignore:.*weighted differently from loss_reduction")
@pytest.mark.parametrize("kind", [ScalesByWhatItLogged, KeepsWhatItLogs])
def test_a_logged_number_remains_one_of_the_whole_batch(kind):
    plain, scaled = Recorder(1), Recorder(1)
    for recorder, module in ((plain, Classifier(lr=0.0)), (scaled, kind(lr=0.0))):
        torch.manual_seed(1)
        module.network.apply(lambda part: getattr(part, "reset_parameters", lambda: None)())
        fit(module, [recorder])
    for one, other in zip(plain.records, scaled.records, strict=True):
        assert not one.weighting
        (note,) = other.weighting
        assert note.startswith("`mul` scales the loss by a number computed over the whole batch")
        ratio = other.norms() / one.norms()
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))


def test_a_penalty_made_in_a_log_of_its_own_is_no_samples():
    recorder = Recorder(1)
    fit(KeepsALoss(), [recorder])
    assert recorder.records
    assert all(record.coverage == 1.0 and not record.unsupported for record in recorder.records)


def test_two_monitors_need_two_prefixes():
    text = r"prefix='per_sample_grad' is that of 2 monitors, callbacks \[0\], \[1\] of the Trainer: give each"
    with pytest.raises(OptionError, match=text):
        fit(Classifier(), [PerSampleGradientMonitor(2), PerSampleGradientMonitor(3)])
    trainer = fit(Classifier(), [PerSampleGradientMonitor(), PerSampleGradientMonitor(prefix="other")])
    assert trainer.callback_metrics["other/norm_mean"] == trainer.callback_metrics["per_sample_grad/norm_mean"]


class FailsInItsStep(Classifier):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        raise ZeroDivisionError


def test_an_error_inside_a_captured_step_leaves_no_hook():
    module = FailsInItsStep()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fit(module, [PerSampleGradientMonitor()])
    assert all(not parameter._backward_hooks for parameter in module.parameters())
    assert not any(isinstance(value, ObservedMethod) for value in vars(module).values())


class FailsOnException(L.Callback):
    def on_exception(self, trainer, pl_module, exception):
        raise RuntimeError("clean-up failed")


class FailsOnce(Classifier):
    failing = True

    def on_before_zero_grad(self, optimizer):
        if self.failing:
            raise ZeroDivisionError


def test_what_an_interrupted_fit_left_behind_is_removed_by_the_next():
    module = FailsOnce()
    with pytest.raises(RuntimeError, match="clean-up failed"):
        fit(module, [FailsOnException(), PerSampleGradientMonitor()])
    assert isinstance(vars(module)["training_step"], ObservedMethod)
    module.failing, recorder = False, Recorder()
    fit(module, [recorder])
    assert len(recorder.records) == 3
    assert "training_step" not in vars(module)


class RequiresGradInItsStep(Classifier):
    def training_step(self, batch, batch_idx):
        for parameter in self.network.parameters():
            parameter.requires_grad_(True)
        return super().training_step(batch, batch_idx)


def test_requires_grad_in_the_step_loses_no_parameter():
    recorder = Recorder(unsupported="error")
    fit(RequiresGradInItsStep(), [recorder])
    assert [record.coverage for record in recorder.records] == [1.0] * 3


def test_the_same_trouble_with_other_sizes_is_said_once():
    network = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PerSampleWarning)
        fit(Classifier(network), [PerSampleGradientMonitor()], data=loader(22))
    assert len([warning for warning in caught if warning.category is PerSampleWarning]) == 1


class Padded(Classifier):
    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        labels = labels.masked_fill(torch.arange(len(labels)) <= batch_idx, -100)  # of one more sample each time
        return nn.functional.cross_entropy(self.network(inputs), labels)


def test_the_same_trouble_with_other_numbers_of_samples_is_said_once():
    dropping = torch.utils.data.DataLoader(
        loader(22).dataset, 8, collate_fn=lambda samples: torch.utils.data.default_collate(samples[:-1])
    )
    for module, data in ((Padded(), loader(22)), (Classifier(), dropping)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PerSampleWarning)
            fit(module, [PerSampleGradientMonitor(1, statistics=())], data=data)
        assert len([warning for warning in caught if warning.category is PerSampleWarning]) == 1


class ByTasks(Classifier):
    """A mean for each task that has samples in the batch: other ones from batch to batch."""

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        losses = nn.functional.cross_entropy(self.network(inputs), labels, reduction="none")
        loss = losses[labels < 1 + batch_idx % 2].mean() + losses[:3].mean()
        return loss if batch_idx % 2 else loss + losses[:2].mean()


def test_some_of_the_calls_that_were_named_are_not_named_again():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PerSampleWarning)
        fit(ByTasks(), [PerSampleGradientMonitor(1, statistics=())], data=loader(32))
    texts = [str(warning.message) for warning in caught if warning.category is PerSampleWarning]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("- ")]
    assert texts
    assert len(lines) == len({*lines})


class Misspelt(PerSampleCallback):
    def on_per_sample_gradient(self, *args):
        raise AssertionError


def test_a_callback_that_does_nothing_is_named():
    with pytest.warns(PerSampleWarning, match="Misspelt does not override on_per_sample_gradients"):
        fit(Classifier(), [Misspelt()])


class OnNestedTensors(Classifier):
    def training_step(self, batch, batch_idx):
        return self.network(batch.to_padded_tensor(0.0)).square().mean()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.filterwarnings("error::lightning_persample.errors.PerSampleWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_a_batch(layout):
    nested = torch.nested.nested_tensor([torch.randn(3, FEATURES), torch.randn(5, FEATURES)], layout=layout)
    trainer = fit(OnNestedTensors(), [PerSampleGradientMonitor()], data=as_loader([nested, nested]))
    assert trainer.global_step == 2
    assert trainer.callback_metrics["per_sample_grad/coverage"] == 1.0


class FitsItselfElsewhere(L.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        other = L.Trainer(
            accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        other.fit(pl_module, loader(16))
        pl_module.trainer = trainer


def test_another_trainers_fit_of_the_same_module_is_not_captured():
    recorder = Recorder()
    fit(Classifier(), [recorder, FitsItselfElsewhere()])
    assert recorder.batch_indices == [0, 1, 2]


NAMELESS = """
class Module(Classifier):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.network(batch[0]), batch[1])

class Own(Recorder):
    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)

def weights(outputs, batch):
    return torch.full((len(batch[0]),), 1 / len(batch[0]))
"""


def test_code_that_belongs_to_no_module():
    """As `exec` makes it without a `__name__`."""
    names = {"Classifier": Classifier, "Recorder": Recorder, "F": F, "torch": torch}
    exec(NAMELESS, names)
    assert names["weights"].__module__ is None
    own = names["Own"](loss_reduction=names["weights"])
    trainer = fit(names["Module"](), [own, PerSampleGradientMonitor(loss_reduction=names["weights"])])
    assert trainer.callback_metrics["per_sample_grad/coverage"] == 1
    assert own.records
