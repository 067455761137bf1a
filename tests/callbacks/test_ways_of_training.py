"""What training_step may return, which optimizers may drive it, and what is not supported and said so."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import LearningRateFinder
from torch import nn

from lightning_persample.callbacks import PerSampleGradientMonitor, PerSampleGradientWriter
from lightning_persample.errors import BatchSizeError, OptionError, PerSampleWarning, UnsupportedError
from lightning_persample.influence import read_ledger
from tests.callbacks.runs import (
    CLASSES,
    FEATURES,
    Classifier,
    Recorder,
    WithReference,
    as_loader,
    column,
    fit,
    loader,
    logged,
    make_trainer,
)


class Skips(WithReference):
    """Skips the second of three batches."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*training_step.* returned .*None")
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_training_step_that_returns_none_has_no_record(accumulate, tmp_path):
    module, recorder = Skips(), Recorder()
    trainer = fit(module, [recorder, PerSampleGradientMonitor()], tmp_path, accumulate_grad_batches=accumulate)
    assert recorder.batch_indices == [0, 2]
    first, _, last = module.reference
    expected = [first, last] if accumulate == 1 else [torch.cat((first, last))]
    means = [row["per_sample_grad/norm_mean"] for row in logged(trainer)]
    assert means == pytest.approx([norms.mean().item() for norms in expected], rel=1e-5)


class ReturnsDict(Classifier):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "more": batch[1]}


def test_a_training_step_may_return_a_dict():
    plain, wrapped = Recorder(), Recorder()
    torch.manual_seed(0)
    fit(Classifier(), [plain])
    torch.manual_seed(0)
    fit(ReturnsDict(), [wrapped])
    assert torch.equal(norms_of(plain), norms_of(wrapped))


def norms_of(recorder):
    return torch.cat([record.norms() for record in recorder.records])


class WithLBFGS(WithReference):
    """Its reference is that of the last evaluation of each batch."""

    def __init__(self):
        super().__init__()
        self.evaluations = []

    def training_step(self, batch, batch_idx):
        self.batch = batch
        self.evaluations.append(batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch, batch_idx):
        pass

    def on_before_backward(self, loss):
        del self.reference[self.evaluations[-1] :]
        super().on_train_batch_start(self.batch, self.evaluations[-1])

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


def test_of_several_evaluations_in_one_step_the_last_one_is_logged(tmp_path):
    module, recorder = WithLBFGS(), Recorder()
    trainer = fit(module, [PerSampleGradientMonitor(), recorder], tmp_path)
    assert module.evaluations == recorder.batch_indices
    assert len(module.evaluations) > 3
    means = [row["per_sample_grad/norm_mean"] for row in logged(trainer)]
    assert means == pytest.approx([norms.mean().item() for norms in module.reference], rel=1e-5)


def compiled_submodule(module):
    module.network = torch.compile(module.network, backend="eager")
    return module


def compiled_in_place(module):
    module.network.compile(backend="eager")
    return module


def compiled_whole(module):
    return torch.compile(module, backend="eager")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler, on self.log
@pytest.mark.parametrize("compiled", [compiled_submodule, compiled_in_place, compiled_whole])
def test_captured_steps_of_a_compiled_module_run_as_written(compiled):
    runs = []
    for prepare in (lambda module: module, compiled):
        torch.manual_seed(0)
        module, recorder = Classifier(), Recorder(2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PerSampleWarning)
            fit(prepare(module), [recorder], data=loader(48))
        said = [
            str(warning.message) for warning in caught if "captured steps run compiled code" in str(warning.message)
        ]
        assert len(said) == (prepare is compiled)
        runs.append((norms_of(recorder), *(parameter.detach() for parameter in module.parameters())))
    for plain, watched in zip(*runs, strict=True):
        torch.testing.assert_close(watched, plain)


@pytest.mark.skipif(not hasattr(lightning_callbacks, "WeightAveraging"), reason="came with lightning 2.6")
def test_beside_a_callback_that_averages_weights():
    recorder, module = Recorder(), Classifier()
    fit(module, [lightning_callbacks.WeightAveraging(), recorder])
    assert len(recorder.records) == 3
    assert "training_step" not in module.__dict__


class BreaksOff(WithReference):
    """Ends its first epoch in the middle of an accumulated step."""

    def on_train_batch_start(self, batch, batch_idx):
        if self.current_epoch == 0 and batch_idx == 3:
            return -1
        return super().on_train_batch_start(batch, batch_idx)


def test_an_epoch_that_is_broken_off_leaves_nothing_to_the_next(tmp_path):
    module = BreaksOff(lr=0.0)
    settings = {"accumulate_grad_batches": 2, "max_epochs": 2}
    trainer = fit(module, [PerSampleGradientMonitor()], tmp_path, loader(40), **settings)
    steps = [module.reference[:2], module.reference[3:5], module.reference[5:7], module.reference[7:]]
    means = [row["per_sample_grad/norm_mean"] for row in logged(trainer)]
    assert means == pytest.approx([torch.cat(norms).mean().item() for norms in steps], rel=1e-5)


def test_a_resumed_fit_goes_on_counting_steps(tmp_path):
    trainer = fit(Classifier(), [PerSampleGradientMonitor()], tmp_path / "first", log_every_n_steps=2)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    trainer = make_trainer([PerSampleGradientMonitor()], tmp_path / "second", log_every_n_steps=2, max_epochs=2)
    trainer.fit(Classifier(), loader(), ckpt_path=tmp_path / "last.ckpt")
    steps = [row["step"] for row in logged(trainer)]
    assert steps == [row["step"] for row in logged(trainer, "loss")] == [3, 5]


class TakesIterator(Classifier):
    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return F.cross_entropy(self.network(batch[0]), batch[1])


NOT_CAPTURED = ": no per-sample gradients are captured in this fit"
HIDES_THE_BATCH = "training_step(self, dataloader_iter) is not supported, because it hides the batch"


@pytest.mark.filterwarnings("ignore:.*dataloader_iter.*experimental")
def test_a_way_of_training_that_is_not_supported_warns_once_and_trains():
    recorder = Recorder()
    with pytest.warns(PerSampleWarning) as caught:
        trainer = fit(TakesIterator(), [PerSampleGradientMonitor(), recorder])
    said = [str(each.message) for each in caught if each.category is PerSampleWarning]
    assert said == [HIDES_THE_BATCH + NOT_CAPTURED]
    assert trainer.global_step == 3
    assert recorder.records == []


@pytest.mark.filterwarnings("ignore:.*dataloader_iter.*experimental")
def test_a_way_of_training_that_is_not_supported_raises_if_asked():
    with pytest.raises(UnsupportedError) as error:
        fit(TakesIterator(), [PerSampleGradientMonitor(unsupported="error")])
    assert str(error.value) == HIDES_THE_BATCH + NOT_CAPTURED


def unequal(count=3):
    return [(torch.randn(4, FEATURES), torch.randint(0, CLASSES, (4,)), torch.randn(3)) for _ in range(count)]


class IgnoresTheThird(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch[:2], batch_idx)


def test_a_batch_whose_size_cannot_be_read_warns_once_and_logs_nothing(tmp_path):
    module = IgnoresTheThird()
    weights = module.network[0].weight.detach().clone()
    with pytest.warns(PerSampleWarning, match="batch_size") as caught:
        trainer = fit(module, [PerSampleGradientMonitor()], tmp_path, as_loader(unequal()))
    assert len([each for each in caught if each.category is PerSampleWarning]) == 1
    assert trainer.global_step == 3
    assert not torch.equal(module.network[0].weight, weights)
    assert "per_sample_grad/norm_mean" not in trainer.callback_metrics
    with pytest.raises(BatchSizeError, match="batch_size"):
        fit(IgnoresTheThird(), [PerSampleGradientMonitor(unsupported="error")], data=as_loader(unequal()))


def test_an_optimizer_step_with_a_batch_that_was_not_captured_is_not_logged(tmp_path):
    good = [(each[0], each[1]) for each in unequal(2)]
    data = as_loader([good[0], unequal(1)[0], good[1], good[0]])
    with pytest.warns(PerSampleWarning, match="batch_size"):
        trainer = fit(IgnoresTheThird(), [PerSampleGradientMonitor()], tmp_path, data, accumulate_grad_batches=2)
    assert [row["step"] for row in logged(trainer)] == [1]


class TwoBackwards(Classifier):
    def backward(self, loss, *args, **kwargs):
        (loss / 2).backward(retain_graph=True)
        (loss / 2).backward()


def test_several_backward_passes_in_one_step_are_not_guessed_at():
    text = (
        "2 backward passes ran in training_step and TwoBackwards.backward, but per-sample gradients are those of "
        "exactly one: this step is not reported"
    )
    recorder = Recorder()
    with pytest.warns(PerSampleWarning, match=text) as caught:
        fit(TwoBackwards(), [recorder])
    assert len([each for each in caught if each.category is PerSampleWarning]) == 1
    assert recorder.records == []
    with pytest.raises(UnsupportedError, match=text):
        fit(TwoBackwards(), [Recorder(unsupported="error")])


class ElsewhereThanParameters(Classifier):
    def backward(self, loss, *args, **kwargs):
        gradients = torch.autograd.grad(loss, list(self.parameters()))
        for parameter, gradient in zip(self.parameters(), gradients, strict=True):
            parameter.grad = gradient


def test_a_backward_that_cannot_be_seen_is_said():
    recorder = Recorder()
    with pytest.warns(PerSampleWarning, match="backward reached no trainable parameter by a backward pass that can be"):
        fit(ElsewhereThanParameters(), [recorder])
    assert recorder.records == []


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (lambda outputs, batch: [1.0] * 8, r"loss_reduction returned list, but .* shape \(8,\)"),
        (lambda outputs, batch: torch.ones(3), r"shape \(3,\)"),
    ],
    ids=["no tensor", "another shape"],
)
def test_weights_of_the_wrong_kind_are_said(weights, text):
    recorder = Recorder(loss_reduction=weights)
    with pytest.warns(PerSampleWarning, match=text):
        trainer = fit(Classifier(), [recorder])
    assert (recorder.records, trainer.global_step) == ([], 3)
    with pytest.raises(OptionError, match=text):
        fit(Classifier(), [Recorder(loss_reduction=weights, unsupported="error")])


class NoGradient(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).detach()


def test_a_loss_without_a_graph_fails_as_it_does_without_us():
    with pytest.raises(RuntimeError, match="does not require grad"):
        fit(NoGradient(), [Recorder()])


def whole_batch(network):
    """A network in which every sample influences every other."""
    return nn.Sequential(nn.BatchNorm1d(FEATURES), network)


def test_what_a_user_must_know_is_said_once_in_a_fit():
    network = whole_batch(nn.Linear(FEATURES, CLASSES))
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(Classifier(network), [Recorder(), PerSampleGradientMonitor()], max_epochs=2)
        ours = [str(each.message) for each in caught if each.category is PerSampleWarning]
        assert len(ours) == 1
        assert "influence each other" in ours[0]


class Frozen(Classifier):
    """Trains its last layer first and the others from the second batch on."""

    def on_train_start(self):
        self.network[0].requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        self.network[0].requires_grad_(batch_idx > 0)


def test_layers_may_be_frozen_and_unfrozen_during_a_fit(tmp_path):
    recorder = Recorder()
    trainer = fit(Frozen(), [recorder, PerSampleGradientMonitor(per_layer=2)], tmp_path)
    assert [len(record.names) for record in recorder.records] == [2, 4, 4]
    first, second, _ = logged(trainer)
    assert first["per_sample_grad/network.0/norm_mean"] != first["per_sample_grad/network.0/norm_mean"]  # nan
    assert second["per_sample_grad/network.0/norm_mean"] > 0


def test_a_learning_rate_finder_before_the_fit_is_not_captured(tmp_path):
    recorder = Recorder()
    finder = LearningRateFinder(num_training_steps=5)
    fit(Classifier(), [recorder, finder], data=loader(80), default_root_dir=tmp_path, max_steps=4)
    assert recorder.batch_indices == [0, 1, 2, 3]


class Leaves(Recorder):
    """A trial run in the middle of a fit takes the callbacks out of the Trainer, as Lightning's tuner does."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        callbacks, trainer.callbacks = trainer.callbacks, []
        pl_module.training_step(batch, batch_idx).backward()
        trainer.callbacks = callbacks


def test_a_trial_run_without_the_callbacks_is_not_captured():
    leaves = Leaves()
    fit(Classifier(), [leaves])
    assert leaves.batch_indices == [0, 1, 2]


class GoesOver(WithReference):
    """Optimizes in one way in the first epoch, and in the other one in the second."""

    def __init__(self, automatic):
        super().__init__()
        self.automatic_optimization = self.starts_automatic = automatic

    def on_train_epoch_start(self):
        self.automatic_optimization = self.starts_automatic == (self.current_epoch == 0)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        return optimizer.step()


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.filterwarnings("ignore:noise_scale, diversity")
def test_a_module_may_go_over_to_the_other_way_to_optimize(automatic, tmp_path):
    writer = PerSampleGradientWriter(tmp_path / "ledger")
    callbacks = [PerSampleGradientMonitor(), writer]
    with pytest.warns(PerSampleWarning, match="batches since then have no rows"):
        trainer = fit(module := GoesOver(automatic), callbacks, tmp_path, max_epochs=2)
    means = [float(norms.mean()) for norms in module.reference]
    assert column(trainer, "per_sample_grad/norm_mean") == pytest.approx(means, rel=1e-5)
    table = read_ledger(tmp_path / "ledger")
    assert table["step"].to_pylist() == [step for step in range(3) for _ in range(8)]
    assert table["norm"].to_pylist() == pytest.approx(torch.cat(module.reference[:3]).tolist(), rel=1e-5)
