"""The engines "vmap" and "loop": exact for models the first engine cannot follow, and training stays as it is."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_persample.callbacks import PerSampleGradientMonitor
from lightning_persample.errors import OptionError, PerSampleWarning, UnsupportedError
from tests.callbacks.runs import CLASSES, FEATURES, Classifier, Recorder, WithReference, as_loader, column, fit, loader
from tests.callbacks.test_untouched_training import (
    STEPS,
    Checkpointed,
    ResidualInPlace,
    batch_norm,
    dropout,
    everything_after_training,
)
from tests.callbacks.unseen_models import Hidden, NeedsTwo, texts_of, traces_after_training
from tests.models import OddShapes

ENGINES = ["vmap", "loop"]
BOTH = ("sq_norm", "grad_sample")


def norms_of(recorder):
    return torch.cat([record.norms() for record in recorder.records])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("engine", ENGINES)
def test_values_are_those_of_each_sample_alone(engine, reduction, accumulate, tmp_path):
    module = WithReference(Hidden(), reduction=reduction, lr=0.01)
    options = {"engine": engine, "loss_reduction": reduction}
    recorder = Recorder(1, quantities=BOTH, **options)
    monitor = PerSampleGradientMonitor(1, **options)
    trainer = fit(module, [recorder, monitor], tmp_path, accumulate_grad_batches=accumulate)
    expected = torch.cat(module.reference)
    torch.testing.assert_close(norms_of(recorder), expected[: len(norms_of(recorder))], rtol=1e-5, atol=1e-6)
    assert recorder.batch_indices == [0, 1, 2]
    for record in recorder.records:
        assert (record.coverage, record.unsupported, record.unused) == (1.0, {}, ())
        for name, grads in record.grad_samples.items():
            torch.testing.assert_close(grads.flatten(1).square().sum(1), record.sq_norms[name])
    assert column(trainer, "per_sample_grad/coverage") == [1.0] * (3 if accumulate == 1 else 2)


@pytest.mark.parametrize("engine", ["expanded", *ENGINES])
def test_numbers_and_complex_weights_have_norms(engine):
    module = WithReference(OddShapes(FEATURES, CLASSES), lr=0.01)
    recorder = Recorder(1, quantities=(*BOTH, "square_sum"), engine=engine)
    fit(module, [recorder])
    torch.testing.assert_close(norms_of(recorder), torch.cat(module.reference), rtol=1e-4, atol=1e-6)
    for record in recorder.records:
        assert all(values.dtype is torch.float32 for values in record.sq_norms.values())
        for name, grads in record.grad_samples.items():
            torch.testing.assert_close(record.square_sums[name], grads.abs().square().sum(0))


def weights_by_label(outputs, batch):
    return (1.0 + batch[1]) / (1.0 + batch[1]).sum()


class Weighted(WithReference):
    def training_step(self, batch, batch_idx):
        losses = F.cross_entropy(self.network(batch[0]), batch[1], reduction="none")
        return {"loss": (losses * weights_by_label(None, batch)).sum()}


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_given_by_a_function_are_those_of_a_batch_of_one(engine):
    module, recorder = Weighted(), Recorder(engine=engine, loss_reduction=weights_by_label)
    fit(module, [recorder])
    torch.testing.assert_close(norms_of(recorder), torch.cat(module.reference), rtol=1e-5, atol=1e-6)


def weights_of_some(outputs, batch):
    present = (batch[1] > 0).float()
    return present / present.sum()


class OfSome(WithReference):
    def training_step(self, batch, batch_idx):
        losses = F.cross_entropy(self.network(batch[0]), batch[1], reduction="none")
        return (losses * weights_of_some(None, batch)).sum()


@pytest.mark.parametrize("max_samples", [None, 5])
@pytest.mark.parametrize("engine", ENGINES)
def test_samples_of_weight_zero_have_no_part_and_make_no_nan(engine, max_samples):
    module, quantities = OfSome(), (*BOTH, "square_sum")
    options = {"engine": engine, "loss_reduction": weights_of_some, "max_samples": max_samples}
    recorder = Recorder(1, quantities=quantities, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerSampleWarning)
        fit(module, [recorder], data=loader(24, 8))
    labels = torch.cat([batch[1] for batch in loader(24, 8)]).split(8)
    assert any(bool((each == 0).any()) for each in labels)
    for record, reference, own in zip(recorder.records, module.reference, labels, strict=True):
        present = (own > 0).nonzero().flatten()
        assert record.in_loss == len(present)
        assert set(record.samples.tolist()) <= set(present.tolist())
        assert max_samples is not None or torch.equal(record.samples, present)
        torch.testing.assert_close(record.norms(), reference[record.samples], rtol=1e-5, atol=1e-6)
        for name, grads in record.grad_samples.items():
            torch.testing.assert_close(record.square_sums[name], grads.square().sum(0))


class CheckpointedFirst(Classifier):
    """Nothing that is trained lies in front of its reentrant checkpoint, so that torch.autograd.grad passes it by."""

    def training_step(self, batch, batch_idx):
        hidden = checkpoint(self.network[:2], batch[0].requires_grad_(), use_reentrant=True)
        return F.cross_entropy(self.network[2](hidden), batch[1])


def test_a_reentrant_checkpoint_that_grad_passes_by_is_refused_and_no_zero():
    recorder = Recorder(engine="loop")
    with pytest.warns(PerSampleWarning, match="use_reentrant=True gives none to it; use checkpoint"):
        fit(CheckpointedFirst(), [recorder])
    assert recorder.records == []


class TimeMajor(Classifier):
    def training_step(self, batch, batch_idx):
        steps = self.network(batch["steps"])  # (T, B, C)
        return F.cross_entropy(steps.transpose(0, 1).flatten(0, 1), batch["labels"].T.flatten())


@pytest.mark.parametrize("engine", ENGINES)
def test_the_batch_axis_may_be_another(engine):
    batch = {"steps": torch.randn(3, 5, FEATURES), "labels": torch.randint(0, CLASSES, (3, 5))}
    found = []
    for options in ({"engine": engine}, {}):
        torch.manual_seed(0)
        recorder = Recorder(batch_dim=1, **options)
        fit(TimeMajor(), [recorder], data=as_loader([batch]))
        found.append(norms_of(recorder))
    torch.testing.assert_close(*found)


class OnLists(WithReference):
    """Samples of unequal sizes, one item of a list each, as in object detection."""

    def training_step(self, batch, batch_idx):
        images, targets = batch
        losses = [
            F.cross_entropy(self.network(image).mean(0), target["label"])
            for image, target in zip(images, targets, strict=True)
        ]
        return torch.stack(losses).mean()

    def sample_loss(self, batch, i):
        return type(self).training_step(self, (batch[0][i : i + 1], batch[1][i : i + 1]), 0)


def test_the_loop_follows_samples_of_unequal_sizes():
    images = [torch.randn(rows, FEATURES) for rows in (5, 3, 7)]
    batch = (images, [{"label": torch.tensor(label)} for label in (0, 1, 2)])
    module, recorder = OnLists(), Recorder(engine="loop", batch_size=3)
    fit(module, [recorder], data=as_loader([batch]))
    torch.testing.assert_close(norms_of(recorder), module.reference[0])
    text = "the batch holds one item per sample, not rows of tensors, which vmap cannot stack"
    with pytest.warns(PerSampleWarning, match=text):
        fit(OnLists(), [Recorder(engine="vmap", batch_size=3)], data=as_loader([batch]))


@pytest.mark.parametrize("engine", ENGINES)
def test_batch_normalization_that_one_sample_alone_cannot_have_is_said_with_what_helps(engine):
    network = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))
    text = "`network.1` normalises with the statistics of the batch, but a sample alone has one value per channel"
    with pytest.warns(PerSampleWarning, match=text):
        fit(Classifier(network), [Recorder(engine=engine)])


SAME = {
    "dropout": (dropout, ENGINES, {}),
    "in place": (ResidualInPlace, ENGINES, {}),
    "batch norm": (batch_norm, ["loop"], {}),
    "autocast": (dropout, ENGINES, {"precision": "bf16-mixed"}),
    "checkpointing": (lambda: Checkpointed(False), ["loop"], {}),
}


@pytest.mark.parametrize(("way", "engine"), [(way, engine) for way in SAME for engine in SAME[way][1]])
def test_training_is_equal_bit_for_bit(way, engine, tmp_path):
    network, _, settings = SAME[way]
    plain, python_state = everything_after_training(network, 1, [], **settings)
    recorder = Recorder(4, quantities=BOTH, engine=engine)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "engine='loop' is not used in this fit")
        watched, watched_python_state = everything_after_training(network, 1, [recorder], tmp_path=tmp_path, **settings)
    assert len(recorder.records) == (0 if network is batch_norm else STEPS // 4)  # its samples influence each other
    assert all(record.coverage == 1.0 for record in recorder.records)
    assert plain.keys() == watched.keys()
    for name, value in plain.items():
        assert torch.equal(value, watched[name]), name
    assert python_state == watched_python_state


@pytest.mark.filterwarnings("ignore:engine='loop' could not be compared")
def test_what_a_training_step_changes_and_logs_is_not_changed_by_the_extra_pass(tmp_path):
    plain, plain_rest = traces_after_training([], tmp_path / "plain")
    recorder = Recorder(1, engine="loop")
    watched, watched_rest = traces_after_training([recorder], tmp_path / "watched")
    assert len(recorder.records) == 6
    for name, value in plain.items():
        assert torch.equal(value, watched[name]), name
    assert plain_rest == watched_rest


class ChangesItsBatch(Classifier):
    def training_step(self, batch, batch_idx):
        batch[0].mul_(0.5)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "reduction", ["mean", lambda outputs, batch: torch.full_like(batch[0][:, 0], 1 / len(batch[0]))]
)
def test_a_step_that_changes_its_batch_in_place_trains_as_without(engine, reduction):
    plain = ChangesItsBatch(dropout())
    watched = ChangesItsBatch(dropout())
    watched.load_state_dict(plain.state_dict())
    for module, callbacks in ((plain, []), (watched, [Recorder(1, engine=engine, loss_reduction=reduction)])):
        torch.manual_seed(3)
        fit(module, callbacks)
    assert len(callbacks[0].records) == 3
    for value, expected in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(value, expected)


def test_gradients_in_half_precision_do_not_vanish():
    precision = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    plugin = pytest.importorskip("lightning.pytorch.plugins").MixedPrecision("16-mixed", "cpu", precision)

    class Faint(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 1e-6

    found = []
    for settings in ({"plugins": plugin}, {}):
        torch.manual_seed(0)
        recorder = Recorder(engine="loop")
        fit(Faint(), [recorder], data=loader(8), **settings)
        found.append(norms_of(recorder))
    torch.testing.assert_close(*found, rtol=0.05, atol=0.0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler, on self.log
@pytest.mark.parametrize("engine", ENGINES)
def test_compiled_modules_run_second_pass_as_written(engine):
    module, recorder = Classifier(), Recorder(2, engine=engine)
    module.network = torch.compile(module.network, backend="eager")
    fit(module, [recorder], data=loader(48))
    assert [record.coverage for record in recorder.records] == [1.0] * 3


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_fails_on_single_samples_is_said_once_and_trains(engine):
    text = f"engine='{engine}' failed with ValueError: one sample is not enough"
    recorder = Recorder(engine=engine)
    with pytest.warns(PerSampleWarning) as caught:
        trainer = fit(Classifier(NeedsTwo()), [recorder])
    assert (texts_of(caught), recorder.records, trainer.global_step) == ([text], [], 3)
    with pytest.raises(UnsupportedError) as error:
        fit(Classifier(NeedsTwo()), [Recorder(engine=engine, unsupported="error")])
    assert str(error.value) == text


class Skips(Classifier):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class SkipsSingleSamples(Classifier):
    def training_step(self, batch, batch_idx):
        return None if len(batch[0]) == 1 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*training_step.* returned .*None")
def test_a_step_that_is_skipped_has_no_record():
    recorder = Recorder(engine="loop")
    fit(Skips(), [recorder])
    assert recorder.batch_indices == [0, 2]
    with pytest.warns(PerSampleWarning, match="training_step returned None in the extra pass of engine='loop'"):
        fit(SkipsSingleSamples(), [Recorder(engine="loop")])


class WithLBFGS(Classifier):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def test_an_optimizer_that_runs_the_step_several_times():
    networks = []
    for callbacks in ([], [Recorder(engine="loop")]):
        torch.manual_seed(0)
        module = WithLBFGS()
        fit(module, callbacks)
        networks.append(module.network[0].weight)
    assert len(callbacks[0].records) > 3
    assert torch.equal(*networks)


def test_the_first_batch_of_a_lazy_module_is_not_run_second_pass():
    def lazy():
        return Classifier(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, CLASSES)))

    found = []
    for callbacks in ([], [Recorder(engine="loop")]):
        torch.manual_seed(0)
        module = lazy()
        if callbacks:
            with pytest.warns(PerSampleWarning, match=r"parameter `network.0.weight` is not initialized yet"):
                fit(module, callbacks)
        else:
            fit(module, callbacks)
        found.append(module.network[0].weight)
    assert torch.equal(*found)
    assert callbacks[0].batch_indices == [1, 2]


def test_a_quantity_that_a_second_engine_does_not_give_raises():
    with pytest.raises(OptionError) as error:
        fit(Classifier(), [Recorder(quantities=("hessian",), engine="loop")])
    assert str(error.value) == (
        "engine='loop' does not give the quantities ['hessian']; it gives 'sq_norm', 'grad_sample', 'dot', "
        "'square_sum', 'projection'"
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("option", "value", "allowed"), [("unsupported", "vmap", "'warn' or 'error'"), ("verify", True, "False")]
)
def test_options_of_the_first_engine_are_refused(engine, option, value, allowed):
    with pytest.raises(OptionError) as error:
        PerSampleGradientMonitor(engine=engine, **{option: value})
    assert str(error.value) == (
        f"{option}={value!r} is not allowed: {option} must be {allowed} with engine='{engine}', which runs the samples "
        "alone"
    )
