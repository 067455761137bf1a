"""Manual optimization: one record for each backward inside training_step, and training stays as it is."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision

from lightning_persample import PerSampleGradientMonitor, mark_samples
from lightning_persample.errors import OptionError, PerSampleWarning, UnsupportedError
from tests.callbacks.runs import Recorder, as_loader, column, fit, logged, make_trainer
from tests.callbacks.ways import (
    BATCH,
    BATCHES,
    FEATURES,
    GAN,
    NOISE,
    Classifier,
    GANUntoggled,
    Manual,
    ManualAccumulates,
    ManualDirect,
    ManualLBFGS,
    ManualTwice,
    Way,
    run,
)

BOTH = ("sq_norm", "grad_sample")


def recorder(**kwargs):
    return Recorder(1, quantities=BOTH, **kwargs)


def norms(grads):
    return torch.cat([each.flatten(1) for each in grads.values()], 1).norm(dim=1)


@pytest.fixture
def compare(tmp_path):
    """Trains twice, with the loop beside it and watched, and compares records with the loop's."""

    def compared(kind, *callbacks, tolerance=1e-5, **settings):
        way = Way(kind, lambda: {"max_epochs": 1, **settings})
        plain = run(way, [], tmp_path / "plain", with_reference=True)
        watcher = recorder()
        watched = run(way, [watcher, *callbacks], tmp_path / "watched", with_reference=False)
        for name, value in plain.state.items():
            assert torch.equal(value, watched.state[name]), name
        assert len(watcher.records) == len(plain.module.reference) > 0
        for record, reference in zip(watcher.records, plain.module.reference, strict=True):
            assert (record.coverage, record.unsupported) == (1.0, {})
            torch.testing.assert_close(record.norms(), norms(reference), rtol=tolerance, atol=1e-6)
        return plain.module.reference, watcher.records, watched.trainer

    return compared


@pytest.mark.parametrize("kind", [Manual, ManualDirect])
def test_one_backward_has_one_record(compare, kind):
    _, records, _ = compare(kind)
    assert [record.backward_index for record in records] == [0] * BATCHES


@pytest.mark.parametrize("kind", [GAN, GANUntoggled])
def test_a_generator_and_a_critic_have_a_record_each(compare, kind):
    _, records, _ = compare(kind)
    assert [record.backward_index for record in records] == [0, 1] * BATCHES
    parts = [{name.split(".")[0] for name in record.names} for record in records]
    assert parts == [{"generator"} if kind is GAN else {"generator", "critic"}, {"critic"}] * BATCHES


@pytest.mark.parametrize("kind", [GAN, GANUntoggled])
def test_each_optimizer_of_a_gan_has_names_of_its_own(compare, kind, tmp_path):
    monitor = PerSampleGradientMonitor(1, per_layer=1)
    reference, _, trainer = compare(kind, monitor, logger=CSVLogger(tmp_path))
    rows = logged(trainer)
    assert len(rows) == BATCHES
    for place, (row, part) in enumerate((row, part) for row in rows for part in ("generator", "critic")):
        own = norms({name: grads for name, grads in reference[place].items() if name.startswith(part)})
        prefix = f"per_sample_grad/optimizer_{place % 2}"
        assert row[f"{prefix}/norm_mean"] == pytest.approx(own.mean().item(), rel=1e-5)
        assert row[f"{prefix}/norm_max"] == pytest.approx(own.max().item(), rel=1e-5)
        assert row[f"{prefix}/{part}/norm_mean"] == pytest.approx(own.mean().item(), rel=1e-5)
        assert (row[f"{prefix}/coverage"], row[f"{prefix}/nonfinite"]) == (1.0, 0.0)
    assert not any(name.startswith("per_sample_grad/norm") or "optimizer_0/critic" in name for name in rows[0])
    assert trainer.callback_metrics["per_sample_grad/optimizer_1/norm_mean"] == pytest.approx(
        rows[-1]["per_sample_grad/optimizer_1/norm_mean"]
    )


class CriticTwice(GAN):
    """Trains the generator on every other batch, the critic twice on each."""

    def training_step(self, batch, batch_idx):
        real, noise = batch[0], mark_samples(torch.randn(len(batch[0]), NOISE))
        generator, critic = self.optimizers()
        for _ in range(2):
            self.optimize(critic, self.critic_loss, real, noise)
        if batch_idx % 2:
            self.optimize(generator, self.generator_loss, noise)


def test_an_optimizer_that_rests_has_no_values_and_one_that_steps_twice_its_last(compare, tmp_path):
    reference, _, trainer = compare(CriticTwice, PerSampleGradientMonitor(1), logger=CSVLogger(tmp_path))
    means = [norms(each).mean().item() for each in reference]
    assert column(trainer, "per_sample_grad/optimizer_1/norm_mean") == pytest.approx([means[1], means[3], means[6]])
    generator = column(trainer, "per_sample_grad/optimizer_0/norm_mean")
    assert generator == pytest.approx([math.nan, means[4], math.nan], nan_ok=True)
    assert trainer.callback_metrics["per_sample_grad/optimizer_0/norm_mean"] == pytest.approx(means[4])


@pytest.mark.parametrize("kind", [ManualTwice, ManualAccumulates, ManualLBFGS])
def test_logged_are_all_samples_of_an_optimizer_step(compare, kind, tmp_path):
    reference, records, trainer = compare(kind, PerSampleGradientMonitor(1), logger=CSVLogger(tmp_path))
    rows = [norms(each) for each in reference]
    if kind is ManualTwice:
        expected = [torch.cat(rows[i : i + 2]) for i in range(0, len(rows), 2)]
    elif kind is ManualLBFGS:
        last = [i for i, record in enumerate(records) if i + 1 == len(records) or records[i + 1].backward_index == 0]
        assert len(last) == BATCHES < len(records)
        expected = [rows[i] for i in last]
    else:
        expected = rows
    assert column(trainer, "per_sample_grad/norm_mean") == pytest.approx([each.mean().item() for each in expected])
    assert column(trainer, "per_sample_grad/norm_std") == pytest.approx([each.std().item() for each in expected])


@pytest.mark.parametrize("kind", [Manual, ManualTwice, GAN])
def test_the_loss_scale_of_mixed_precision_is_not_left_in(compare, kind):
    plugin = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=2))]
    compare(kind, tolerance=3e-2, plugins=plugin)


class OwnFactor(Manual):
    """Divides by the batches it accumulates, and multiplies in its own backward."""

    def go_backward(self, loss):
        self.manual_backward(loss / 4)

    def backward(self, loss, *args, **kwargs):
        (3 * loss).backward(*args, **kwargs)


def test_a_factor_in_the_loss_belongs_to_the_loss_and_one_in_backward_does_not():
    found = {}
    for reduction in ("mean", lambda loss, batch: torch.full((BATCH,), 1 / (4 * BATCH))):
        torch.manual_seed(0)
        watcher = recorder(loss_reduction=reduction)
        fit(OwnFactor(False), [watcher], data=OwnFactor(False).train_dataloader())
        found[reduction] = watcher.records[0].norms()
    divided, own = found.values()
    torch.manual_seed(0)
    module = Classifier(False)
    inputs, labels = next(iter(module.train_dataloader()))
    torch.manual_seed(0)
    module = Classifier(True)
    module.training_step((inputs, labels), 0)
    torch.testing.assert_close(own, norms(module.reference[0]))
    torch.testing.assert_close(divided, norms(module.reference[0]) / 4)


class SeesGradients(Recorder):
    def on_per_sample_gradients(self, trainer, pl_module, record, batch, batch_idx):
        super().on_per_sample_gradients(trainer, pl_module, record, batch, batch_idx)
        assert len(batch[0]) == record.batch_size == BATCH
        for name in record.names:
            parameter = pl_module.get_parameter(name)
            torch.testing.assert_close(parameter.grad, record.grad_samples[name].mean(0))
            assert parameter.grad_sample is record.grad_samples[name]


class LooksAfterTheStep(GAN):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        assert all(hasattr(parameter, "grad_sample") for parameter in self.parameters())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert not any(hasattr(parameter, "grad_sample") for parameter in self.parameters())


def test_a_record_comes_before_the_optimizer_steps():
    module, watcher = LooksAfterTheStep(False), SeesGradients(quantities=BOTH)
    fit(module, [watcher], data=module.train_dataloader())
    assert watcher.batch_indices == [0, 0, 1, 1, 2, 2]
    assert all(vars(parameter) == {} for parameter in module.parameters())


@pytest.mark.parametrize(("every", "trainers"), [(None, 2), (2, 1), (3, 50)])
def test_the_schedule_counts_training_steps(every, trainers, tmp_path):
    watcher, module = Recorder(every), GAN(False)
    settings = {"log_every_n_steps": trainers, "max_epochs": 2}
    trainer = fit(module, [watcher, PerSampleGradientMonitor(every)], tmp_path, module.train_dataloader(), **settings)
    steps = [step for step in range(2 * BATCHES) if (step + 1) % (every or trainers) == 0]
    assert watcher.batch_indices == [step % BATCHES for step in steps for _ in range(2)]
    assert [row["step"] for row in logged(trainer)] == steps
    assert trainer.global_step == 4 * BATCHES  # (two optimizers)


class UntoggledAccumulation(GANUntoggled):
    def training_step(self, batch, batch_idx):
        self.generator_loss(mark_samples(torch.randn(BATCH, NOISE))).backward()


def test_a_backward_that_could_be_any_optimizers_is_in_no_statistics(tmp_path):
    module = UntoggledAccumulation(False)
    with pytest.warns(PerSampleWarning) as caught:
        trainer = fit(module, [PerSampleGradientMonitor()], tmp_path, module.train_dataloader())
    assert [str(each.message) for each in caught if each.category is PerSampleWarning] == [
        "backward 0 of a training step reached parameters of the optimizers [0, 1], and none of them stepped after it: "
        "it is in no statistics. Toggle the optimizers (self.toggle_optimizer), so that a backward reaches the "
        "parameters of one of them alone"
    ]
    assert "per_sample_grad/optimizer_0/norm_mean" not in trainer.callback_metrics


NOT_CAPTURED = ": no per-sample gradients are captured in this fit"
ASIDE = "runs training_step again on single samples, which would step the optimizers, because in manual optimization "


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_an_extra_pass_would_step_the_optimizers(engine):
    module, watcher = Manual(False), recorder(engine=engine)
    text = f"engine={engine!r} {ASIDE}training_step does; use engine='expanded'{NOT_CAPTURED}"
    with pytest.warns(PerSampleWarning) as caught:
        trainer = fit(module, [watcher], data=module.train_dataloader())
    assert [str(each.message) for each in caught if each.category is PerSampleWarning] == [text]
    assert (trainer.global_step, watcher.records) == (BATCHES, [])
    with pytest.raises(UnsupportedError) as error:
        fit(module, [recorder(engine=engine, unsupported="error")], data=module.train_dataloader())
    assert str(error.value) == text


def test_verification_is_said_not_to_run():
    module, watcher = Manual(False), recorder(verify=True)
    with pytest.warns(PerSampleWarning) as caught:
        fit(module, [watcher], data=module.train_dataloader())
    assert [str(each.message) for each in caught if each.category is PerSampleWarning] == [
        f"verify=True {ASIDE}training_step does: the values are not checked; call check_per_sample_gradients on the "
        "module and a loss function instead"
    ]
    assert len(watcher.records) == BATCHES


class Undeclared(GAN):
    def training_step(self, batch, batch_idx):
        generator, _ = self.optimizers()
        z = torch.randn(BATCH, NOISE)
        self.optimize(generator, self.generator_loss, z)


OUTSIDE = "its gradient comes from calls without a tensor of the batch"
MADE = (
    "makes as many rows as there are samples: if each of them is one sample's, add "
    "`from lightning_persample import mark_samples` and, there, "
)
NO_FALLBACK = (
    "unsupported='vmap' would run training_step again on single samples, which would step the optimizers, because in "
    "manual optimization training_step does: parameters whose gradients are not known are named and left out, as with "
    "unsupported='warn'"
)


@pytest.mark.parametrize("unsupported", ["warn", "vmap"])
def test_noise_that_is_not_declared_is_named_and_not_guessed(unsupported):
    module, watcher = Undeclared(False), recorder(unsupported=unsupported)
    with pytest.warns(PerSampleWarning) as caught:
        fit(module, [watcher], data=module.train_dataloader())
    said = [str(each.message) for each in caught if each.category is PerSampleWarning]
    place = f"`randn` at {Path(__file__).name}:{Undeclared.training_step.__code__.co_firstlineno + 2}"
    assert f"{OUTSIDE}; {place} {MADE}`z = mark_samples(torch.randn(...))`" in said[-1]
    assert said[:-1] == ([NO_FALLBACK] if unsupported == "vmap" else [])
    assert [record.coverage for record in watcher.records] == [0.0] * BATCHES
    with pytest.raises(UnsupportedError, match="mark_samples"):
        fit(module, [recorder(unsupported="error")], data=module.train_dataloader())
    assert "manual_backward" not in vars(module)


class UndeclaredTwice(GAN):
    """Both optimizers see the same noise, from one of torch's distributions."""

    def training_step(self, batch, batch_idx):
        generator, critic = self.optimizers()
        drawn = torch.distributions.Normal(0.0, 1.0).sample((BATCH, NOISE))
        self.optimize(generator, self.generator_loss, drawn)
        self.optimize(critic, lambda noise: self.critic(self.generator(noise).detach()).mean(), drawn)


def test_the_line_to_add_is_said_once():
    module = UndeclaredTwice(False)
    with pytest.warns(PerSampleWarning) as caught:
        fit(module, [recorder()], data=module.train_dataloader())
    said = [str(each.message) for each in caught if each.category is PerSampleWarning]
    assert [text.count("`from lightning_persample import mark_samples`") for text in said] == [1, 0]
    assert said[0].endswith(f"{MADE}`drawn = mark_samples(drawn)`")
    assert said[1].endswith(OUTSIDE)


class UndeclaredForTheCritic(GANUntoggled):
    """The generator's noise is declared, the critic's is not."""

    def training_step(self, batch, batch_idx):
        generator, critic = self.optimizers()
        self.optimize(generator, self.generator_loss, mark_samples(torch.randn(BATCH, NOISE)))
        self.optimize(critic, lambda noise: self.critic(2 * noise).mean(), torch.randn(BATCH, FEATURES))


def test_coverage_is_that_of_an_optimizers_own_parameters(tmp_path):
    module = UndeclaredForTheCritic(False)
    with pytest.warns(PerSampleWarning, match="mark_samples"):
        trainer = fit(module, [PerSampleGradientMonitor()], tmp_path, module.train_dataloader())
    assert column(trainer, "per_sample_grad/optimizer_0/coverage") == [1.0] * BATCHES
    assert column(trainer, "per_sample_grad/optimizer_1/coverage") == [0.0] * BATCHES
    assert all(math.isnan(mean) for mean in column(trainer, "per_sample_grad/optimizer_1/norm_mean"))


class Assigns(Manual):
    def go_backward(self, loss):
        for parameter, grad in zip(self.parameters(), torch.autograd.grad(loss, list(self.parameters())), strict=True):
            parameter.grad = grad


class Rests(Manual):
    def training_step(self, batch, batch_idx):
        return None


def test_a_step_without_a_backward_that_can_be_seen_is_said():
    text = "an optimizer stepped in training_step, but no backward pass that can be seen reached a trainable parameter"
    with pytest.warns(PerSampleWarning, match=text) as caught:
        fit(Assigns(False), [recorder()], data=Assigns(False).train_dataloader())
    assert len([each for each in caught if each.category is PerSampleWarning]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerSampleWarning)
        fit(Rests(False), [recorder()], data=Rests(False).train_dataloader())


class InnerOptimizer(torch.optim.Optimizer):
    """Sharpness-aware, as it is commonly written: the optimizer that steps is one inside it."""

    def __init__(self, params, radius=0.05, **settings):
        super().__init__(params, {"radius": radius, **settings})
        self.inner = torch.optim.SGD(self.param_groups, **settings)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def move(self):
        (group,) = self.param_groups
        norm = torch.stack([parameter.grad.norm() for parameter in group["params"]]).norm()
        self.before = [parameter.clone() for parameter in group["params"]]
        for parameter in group["params"]:
            parameter.add_(group["radius"] * parameter.grad / norm)
        self.zero_grad()

    @torch.no_grad()
    def move_back_and_step(self):
        for parameter, value in zip(self.param_groups[0]["params"], self.before, strict=True):
            parameter.copy_(value)
        self.inner.step()
        self.zero_grad()


class SharpnessAware(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        inputs, labels = batch
        self.go_backward(self.loss(inputs, labels))
        optimizer.move()
        self.go_backward(self.loss(inputs, labels))
        optimizer.move_back_and_step()

    def configure_optimizers(self):
        return InnerOptimizer(self.parameters(), lr=0.1)


class StepsByHand(Manual):
    @torch.no_grad()
    def training_step(self, batch, batch_idx):
        with torch.enable_grad():
            self.go_backward(self.loss(*batch))
        for parameter in self.parameters():
            parameter.sub_(0.1 * parameter.grad)
        self.zero_grad()


def test_a_step_of_the_optimizer_inside_another_counts_as_its_step():
    watcher, monitor = Recorder(1), PerSampleGradientMonitor(1)
    trainer = fit(SharpnessAware(False), [watcher, monitor], data=SharpnessAware(False).train_dataloader())
    assert [record.backward_index for record in watcher.records] == [0, 1] * BATCHES
    mean = trainer.callback_metrics["per_sample_grad/norm_mean"]
    torch.testing.assert_close(mean, watcher.records[-1].norms().mean())


def test_records_that_no_step_used_are_said():
    text = "`per_sample_grad` has logged nothing: no step of an optimizer of the Trainer, or of one inside it"
    with pytest.warns(PerSampleWarning, match=text):
        fit(StepsByHand(False), [PerSampleGradientMonitor(1)], data=StepsByHand(False).train_dataloader())


def test_a_batch_that_cannot_be_captured_is_said_and_training_goes_on():
    class Loose(Manual):
        def training_step(self, batch, batch_idx):
            super().training_step(batch[:2], batch_idx)

    data = as_loader([(torch.randn(4, FEATURES), torch.zeros(4).long(), torch.randn(3))] * 2)
    with pytest.warns(PerSampleWarning, match="do not agree on a number of samples"):
        trainer = fit(Loose(False), [recorder()], data=data)
    assert trainer.global_step == 2


def test_weights_of_the_wrong_kind_are_said():
    module, watcher = Manual(False), recorder(loss_reduction=lambda loss, batch: [1.0])
    with pytest.warns(PerSampleWarning, match="loss_reduction returned list"):
        trainer = fit(module, [watcher], data=module.train_dataloader())
    assert (trainer.global_step, watcher.records) == (BATCHES, [])
    options = {"loss_reduction": lambda loss, batch: [1.0], "unsupported": "error"}
    with pytest.raises(OptionError, match="loss_reduction returned list"):
        fit(module, [recorder(**options)], data=module.train_dataloader())


class Penalized(Manual):
    def go_backward(self, loss):
        super().go_backward(loss + 0.1 * sum(parameter.square().sum() for parameter in self.parameters()))


def test_sums_that_do_not_fit_are_said_once():
    module = Penalized(False)
    with pytest.warns(PerSampleWarning, match="do not add up to what the backward added to .grad") as caught:
        fit(module, [recorder()], data=module.train_dataloader())
    assert len([each for each in caught if each.category is PerSampleWarning]) == 1


class Fails(Manual):
    where = ""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        if self.where == "step":
            raise KeyError("mine")

    def backward(self, loss, *args, **kwargs):
        super().backward(loss, *args, **kwargs)
        if self.where == "backward":
            raise KeyError("mine")


@pytest.mark.parametrize("where", ["step", "backward"])
def test_after_an_error_the_module_is_as_before(where):
    module = Fails(False)
    module.where = where
    trainer = make_trainer([recorder(), PerSampleGradientMonitor()])
    with pytest.raises(KeyError, match="mine"):
        trainer.fit(module)
    assert not {"training_step", "manual_backward", "backward"} & vars(module).keys()
    for parameter in module.parameters():
        assert (vars(parameter), parameter._backward_hooks or {}) == ({}, {})
    module.where = ""
    watcher = recorder()
    fit(module, [watcher], data=module.train_dataloader())
    assert len(watcher.records) == BATCHES


def test_a_backward_outside_of_training_step_is_said_and_left_alone():
    module, watcher = Manual(False), Recorder(2)

    class Again(Recorder):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            pl_module.manual_backward(F.cross_entropy(pl_module.network(batch[0]), batch[1]))

    with pytest.warns(PerSampleWarning) as caught:
        fit(module, [watcher, Again(2)], data=module.train_dataloader())
    assert watcher.batch_indices == [1]
    assert [str(each.message) for each in caught if each.category is PerSampleWarning] == [
        "manual_backward was called outside of training_step: this backward has no record and is in no statistics; "
        "call it in training_step"
    ]
