"""The mean gradient is what the samples' gradients add up to, or absent and said so."""

from __future__ import annotations

import math
import re
import warnings

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_persample.callbacks import PerSampleGradientMonitor
from lightning_persample.errors import PerSampleWarning
from tests.callbacks.runs import CLASSES, FEATURES, Classifier, as_loader, fit, loader, logged
from tests.callbacks.step_statistics import ALL, WithGradients, check, windows
from tests.callbacks.unseen_models import Hidden

CLASS_WEIGHTS = torch.arange(1.0, 1 + CLASSES)


def test_where_the_mean_is_not_in_grad_it_is_absent_and_said_so(tmp_path):
    """The norm of the gradient of the loss is there all the same."""
    norms = []

    class Penalized(Classifier):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.network(batch[0]), batch[1]) + self.network[0].weight.square().sum()

        def on_after_backward(self):
            norms.append(torch.cat([parameter.grad.flatten() for parameter in self.parameters()]).norm().item())

    text = (
        "noise_scale, diversity of `per_sample_grad` are nan at steps where the loss has a term that belongs to no "
        "sample, made of `network.0.weight`; statistics=() leaves them out"
    )
    with pytest.warns(PerSampleWarning, match=re.escape(text)) as warned:
        trainer = fit(Penalized(), [PerSampleGradientMonitor()], tmp_path)
    assert sum(each.category is PerSampleWarning for each in warned) == 1
    assert [row["per_sample_grad/norm_of_mean"] for row in logged(trainer)] == pytest.approx(norms)
    for row in logged(trainer):
        assert math.isnan(row["per_sample_grad/noise_scale"])
        assert math.isnan(row["per_sample_grad/diversity"])
        assert row["per_sample_grad/norm_mean"] > 0


class Unfollowed(Classifier):
    """Of a network that the second engine alone gives values of."""

    def __init__(self, **options):
        super().__init__(Hidden(), **options)
        self.norms = []

    def training_step(self, batch, batch_idx):
        with torch.autocast("cpu", enabled=False):
            return super().training_step((batch[0].float(), batch[1]), batch_idx)

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(torch.cat([parameter.grad.flatten() for parameter in self.parameters()]).norm().item())


@pytest.mark.filterwarnings("ignore:noise_scale, diversity of `per_sample_grad` are nan")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_norm_of_the_gradient_is_known_of_a_second_engine(accumulate, reduction, tmp_path):
    module, options = Unfollowed(reduction=reduction, lr=0.01), {"unsupported": "vmap", "loss_reduction": reduction}
    with pytest.warns(PerSampleWarning, match="captured steps use engine='vmap'"):
        trainer = fit(
            module,
            [PerSampleGradientMonitor(1, **options)],
            tmp_path,
            data=loader(32, 8),
            accumulate_grad_batches=accumulate,
            gradient_clip_val=0.01,
        )
    size = 8 if reduction == "sum" else 1
    found = [row["per_sample_grad/norm_of_mean"] for row in logged(trainer)]
    assert len(found) == 4 // accumulate
    assert found == pytest.approx([norm / size for norm in module.norms], rel=1e-4)
    assert all(math.isnan(row["per_sample_grad/noise_scale"]) for row in logged(trainer))


@pytest.mark.filterwarnings("ignore:noise_scale, diversity of `per_sample_grad` are nan")
def test_the_norm_of_the_gradient_of_a_second_engine_has_no_loss_scale(tmp_path):
    norms = []
    for name, settings in (
        ("scaled", {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))}),
        ("plain", {}),
    ):
        torch.manual_seed(0)
        with pytest.warns(PerSampleWarning, match="captured steps use engine"):
            trainer = fit(
                Unfollowed(lr=0.0), [PerSampleGradientMonitor(1, unsupported="vmap")], tmp_path / name, **settings
            )
        norms.append([row["per_sample_grad/norm_of_mean"] for row in logged(trainer)])
    assert norms[0] == pytest.approx(norms[1], rel=0.05)


class OfClasses(WithGradients):
    """Its samples weigh in the loss as their classes."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.network(batch[0]), batch[1], weight=CLASS_WEIGHTS.to(batch[0]))

    def weighted(self, data, accumulate):
        weights = [CLASS_WEIGHTS[labels].numpy().astype(float) for _, labels in data]
        rows = [(len(w) * w / w.sum())[:, None] * g for w, g in zip(weights, self.batches, strict=True)]
        return windows(rows, accumulate)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weighted_samples_have_all_statistics(accumulate, tmp_path):
    """Of B w_i g_i, whose mean is the gradient of the loss; norms are of the samples' own losses."""

    def weights(outputs, batch):
        return CLASS_WEIGHTS[batch[1]] / CLASS_WEIGHTS[batch[1]].sum()

    module, data = OfClasses().double(), loader(32)
    monitor = PerSampleGradientMonitor(statistics=ALL, loss_reduction=weights, per_layer=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerSampleWarning)
        trainer = fit(module, [monitor], tmp_path, data, precision="64-true", accumulate_grad_batches=accumulate)
    steps = module.weighted(data, accumulate)
    check(trainer, steps, rtol=1e-6)
    first = FEATURES * 8 + 8
    check(trainer, steps, 1e-6, "per_sample_grad/network.0", columns=slice(0, first))
    for row, grads in zip(logged(trainer), windows(module.batches, accumulate), strict=True):
        assert row["per_sample_grad/norm_mean"] == pytest.approx(np.linalg.norm(grads, axis=1).mean())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_samples_that_are_to_be_unlearnt_have_a_weight_below_zero(accumulate, tmp_path):
    def weights(outputs, batch):
        return torch.where(batch[1] == 0, -0.5, 1.0).double() / len(batch[1])

    class Unlearns(WithGradients):
        def training_step(self, batch, batch_idx):
            return (F.cross_entropy(self.network(batch[0]), batch[1], reduction="none") * weights(None, batch)).sum()

    module, data = Unlearns().double(), loader(32)
    monitor = PerSampleGradientMonitor(statistics=ALL, loss_reduction=weights)
    trainer = fit(module, [monitor], tmp_path, data, precision="64-true", accumulate_grad_batches=accumulate)
    rows = [
        (len(batch[1]) * weights(None, batch)).numpy()[:, None] * grads
        for batch, grads in zip(data, module.batches, strict=True)
    ]
    check(trainer, windows(rows, accumulate), rtol=1e-6)


def test_samples_of_weight_zero_are_in_nothing(tmp_path):
    """They have no part in the loss: no norm, no count among those that are not finite, no place among the worst."""

    class Masked(WithGradients):
        def training_step(self, batch, batch_idx):
            losses = F.cross_entropy(self.network(batch[0]), batch[1], reduction="none")
            kept = (batch[1] > 0).to(losses)
            return (losses * kept).sum() / kept.sum()

    def weights(outputs, batch):
        kept = (batch[1] > 0).double()
        return kept / kept.sum()

    module, data = Masked().double(), loader(24)
    monitor = PerSampleGradientMonitor(1, statistics=ALL, loss_reduction=weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerSampleWarning)
        trainer = fit(module, [monitor], tmp_path, data, precision="64-true")
    steps = [grads[(labels > 0).numpy()] for grads, (_, labels) in zip(module.batches, data, strict=True)]
    check(trainer, steps)
    for row, grads in zip(logged(trainer), steps, strict=True):
        assert row["per_sample_grad/nonfinite"] == 0
        assert row["per_sample_grad/norm_min"] == pytest.approx(np.linalg.norm(grads, axis=1).min())
    worst = monitor.worst(100)
    assert (sorted(worst.index), worst.nonfinite) == (
        [place for place, label in enumerate(data.dataset.tensors[1].tolist()) if label > 0],
        {},
    )
    assert "nan" not in str(worst)


def test_weights_that_are_not_given_leave_the_norm_of_the_gradient(tmp_path):
    module, norms = OfClasses().double(), []

    class Norms(L.Callback):
        def on_after_backward(self, trainer, pl_module):
            norms.append(torch.cat([p.grad.flatten() for p in pl_module.parameters()]).norm().item())

    text = (
        "factor: reported is each sample's share of the batch gradient, times B where loss_reduction is 'mean'. Give "
    )
    text += (
        "the weight of each sample in the loss as loss_reduction, a function (outputs, batch) that returns a tensor "
    )
    text += "of shape (B,), as w[batch[1]] / w[batch[1]].sum() for class weights w"
    with pytest.warns(PerSampleWarning) as caught:
        trainer = fit(module, [PerSampleGradientMonitor(), Norms()], tmp_path, precision="64-true")
    assert any(text in str(each.message) for each in caught)
    assert [row["per_sample_grad/norm_of_mean"] for row in logged(trainer)] == pytest.approx(norms)
    assert all(math.isnan(row["per_sample_grad/diversity"]) for row in logged(trainer))


def test_statistics_of_a_small_part_of_the_weights_come_with_a_remark(tmp_path):
    text = "noise_scale, diversity of `per_sample_grad` are those of the weights that have per-sample gradients alone, "
    with pytest.warns(PerSampleWarning) as caught:
        trainer = fit(Classifier(Hidden()), [PerSampleGradientMonitor()], tmp_path)
    share = logged(trainer)[0]["per_sample_grad/coverage"]
    assert 0 < share < 1
    said = [str(each.message) for each in caught if "they say little of the others" in str(each.message)]
    assert said == [f"{text}{share:.2g} of all that got a gradient (see coverage): they say little of the others"]


def test_statistics_that_are_not_known_come_with_no_remark_on_the_weights_they_are_of(tmp_path):
    class Noisy(Classifier):
        def __init__(self):
            super().__init__()
            self.other = torch.nn.Linear(5, 1)

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + self.other(torch.rand(3, 5)).mean()

    with pytest.warns(PerSampleWarning) as caught:
        trainer = fit(Noisy(), [PerSampleGradientMonitor()], tmp_path)
    assert all(math.isnan(row["per_sample_grad/noise_scale"]) for row in logged(trainer))
    assert not any("they say little of the others" in str(each.message) for each in caught)
    assert any("are nan at steps where" in str(each.message) for each in caught)


def test_gradients_that_were_not_dropped(tmp_path):
    class Keeps(Classifier):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            pass

    with pytest.warns(
        PerSampleWarning, match="there were gradients before the first backward of the optimizer step: call zero_grad"
    ):
        trainer = fit(Keeps(), [PerSampleGradientMonitor()], tmp_path)
    assert [math.isnan(row["per_sample_grad/diversity"]) for row in logged(trainer)] == [False, True, True]


def test_gradients_that_were_changed_between_accumulated_batches(tmp_path):
    class Changes(Classifier):
        def on_after_backward(self):
            self.network[0].weight.grad.mul_(0.5)

    text = "gradients were changed between the backward passes of an optimizer step"
    with pytest.warns(PerSampleWarning, match=text):
        trainer = fit(Changes(), [PerSampleGradientMonitor()], tmp_path, accumulate_grad_batches=2)
    assert [math.isnan(row["per_sample_grad/diversity"]) for row in logged(trainer)] == [True, False]


def test_accumulated_batches_of_different_size(tmp_path):
    x, y = torch.randn(12, FEATURES), torch.randint(CLASSES, (12,))
    uneven, even = [(x[:8], y[:8]), (x[8:], y[8:])], [(x[:6], y[:6]), (x[6:], y[6:])]
    text = "the samples of an optimizer step weigh unequally: its batches differ in size"
    for batches, warns in ((uneven * 2 + even, True), (even + uneven, False)):  # not of the last batch of an epoch
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            data = as_loader(batches)
            trainer = fit(Classifier(), [PerSampleGradientMonitor()], tmp_path, data, accumulate_grad_batches=2)
        assert any(text in str(each.message) for each in caught) == warns
        absent = [math.isnan(row["per_sample_grad/diversity"]) for row in logged(trainer)]
        assert absent == ([True, True, False] if warns else [False, True])


def unfrozen(module: nn.Module) -> nn.Module:
    return module.network[0]


def test_parameters_that_are_unfrozen_in_the_middle_of_a_fit_count(tmp_path):
    class Unfreezes(WithGradients):
        def __init__(self):
            super().__init__()
            unfrozen(self).requires_grad_(False)

        def on_train_epoch_start(self):
            unfrozen(self).requires_grad_(self.current_epoch > 0)

        def on_train_batch_start(self, batch, batch_idx):
            used = [parameter for parameter in self.parameters() if parameter.requires_grad]
            rows = []
            for x, y in zip(*batch, strict=True):
                grads = torch.autograd.grad(F.cross_entropy(self.network(x[None]), y[None]), used)
                rows.append(torch.cat([grad.flatten() for grad in grads]).numpy())
            self.batches.append(np.stack(rows))

    module = Unfreezes().double()
    monitor = PerSampleGradientMonitor(statistics=ALL, per_layer=2)
    trainer = fit(module, [monitor], tmp_path, loader(40), precision="64-true", max_epochs=2)
    check(trainer, module.batches)
    group = [row["per_sample_grad/network.0/norm_mean"] for row in logged(trainer)]
    assert [math.isnan(value) for value in group] == [True] * 5 + [False] * 5


class ClipsInBackward(WithGradients):
    def backward(self, loss):
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters(), 0.01)


def test_what_a_backward_of_the_users_does_to_gradients_comes_later(tmp_path):
    module = ClipsInBackward().double()
    trainer = fit(module, [PerSampleGradientMonitor(statistics=ALL)], tmp_path, loader(40), precision="64-true")
    check(trainer, module.batches)


ADDS = "there were gradients before the first backward of the optimizer step"


def test_gradients_that_are_set_before_the_backward(tmp_path):
    class Decays(Classifier):
        def on_before_backward(self, loss):
            for parameter in self.parameters():
                parameter.grad = 0.1 * parameter.detach()

    with pytest.warns(PerSampleWarning, match=ADDS):
        trainer = fit(Decays(), [PerSampleGradientMonitor(statistics=ALL)], tmp_path)
    assert_absent(logged(trainer))


def assert_absent(rows, count=None):
    for row in rows:
        for name in (*ALL, "norm_of_mean", "cosine_to_mean_min"):
            assert math.isnan(row[f"per_sample_grad/{name}"]), name
        assert row["per_sample_grad/norm_mean"] > 0


def test_a_hook_after_the_accumulation_of_a_gradient(tmp_path):
    module = Classifier()

    def halve(parameter):
        parameter.grad.mul_(0.5)

    module.network[0].weight.register_post_accumulate_grad_hook(halve)
    text = "a hook on `network.0.weight` is called when its gradient was accumulated, and may change it"
    with pytest.warns(PerSampleWarning, match=text):
        trainer = fit(module, [PerSampleGradientMonitor(statistics=ALL)], tmp_path)
    assert_absent(logged(trainer))


@pytest.mark.parametrize("change", [torch.Tensor.neg_, lambda grad: grad.data.mul_(0.5)], ids=["sign", "data"])
def test_gradients_changed_without_a_trace_in_their_norms_or_versions(change, tmp_path):
    class Changes(Classifier):
        def on_after_backward(self):
            change(self.network[0].weight.grad)

    with pytest.warns(PerSampleWarning, match="gradients were changed between the backward passes"):
        trainer = fit(Changes(), [PerSampleGradientMonitor(statistics=ALL)], tmp_path, accumulate_grad_batches=3)
    assert_absent(logged(trainer))


def test_an_optimizer_that_evaluates_batches_again_while_accumulating(tmp_path):
    class Searches(Classifier):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    text = "an optimizer evaluates a batch several times while gradients are accumulated"
    with pytest.warns(PerSampleWarning, match=text):
        trainer = fit(Searches(), [PerSampleGradientMonitor(statistics=ALL)], tmp_path, accumulate_grad_batches=3)
    assert_absent(logged(trainer))
    module = type("SearchesWithGradients", (Searches, WithGradients), {})().double()
    trainer = fit(module, [PerSampleGradientMonitor()], tmp_path / "one", precision="64-true")
    assert all(row["per_sample_grad/diversity"] >= 1 / 8 for row in logged(trainer))


def test_a_layer_that_only_some_accumulated_batches_use(tmp_path):
    """Its gradient is zero for the samples of the others."""

    class Branches(WithGradients):
        def __init__(self):
            super().__init__()
            self.extra = nn.Linear(FEATURES, CLASSES)

        def forward(self, x, extra):
            return self.network(x) + (self.extra(x) if extra else 0.0)

        def on_train_batch_start(self, batch, batch_idx):
            rows = []
            for x, y in zip(*batch, strict=True):
                loss = F.cross_entropy(self(x[None], batch_idx % 2), y[None])
                grads = torch.autograd.grad(loss, list(self.parameters()), allow_unused=True)
                filled = [
                    torch.zeros_like(p) if g is None else g for g, p in zip(grads, self.parameters(), strict=True)
                ]
                rows.append(torch.cat([grad.flatten() for grad in filled]).numpy())
            self.batches.append(np.stack(rows))

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0], batch_idx % 2), batch[1])

    module = Branches().double()
    monitor = PerSampleGradientMonitor(per_layer=1, statistics=ALL[:3])
    settings = {"precision": "64-true", "accumulate_grad_batches": 2}
    trainer = fit(module, [monitor], tmp_path, loader(32), **settings)
    steps = windows(module.batches, 2)
    check(trainer, steps)
    for row, grads in zip(logged(trainer), steps, strict=True):
        own = grads[:, -FEATURES * CLASSES - CLASSES :]
        diversity = (own**2).sum() / (own.sum(0) ** 2).sum()
        assert row["per_sample_grad/extra/diversity"] == pytest.approx(diversity)


def test_equal_samples_have_no_noise(tmp_path):
    x, y = torch.randn(1, FEATURES).expand(8, -1), torch.zeros(8, dtype=torch.int64)
    trainer = fit(Classifier(), [PerSampleGradientMonitor()], tmp_path, as_loader([(x, y)] * 3))
    for row in logged(trainer):
        assert 0 <= row["per_sample_grad/noise_scale"] < 1e-5
        assert row["per_sample_grad/diversity"] == pytest.approx(1 / 8)


def test_a_batch_that_is_changed_before_the_step_is_complete_has_no_cosines(tmp_path):
    class Zeroes(Classifier):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            batch[0].zero_()

    text = "dot: a tensor that the gradient of `network.0.weight` is made of was changed in place since the backward"
    with pytest.warns(PerSampleWarning, match=text):
        trainer = fit(Zeroes(), [PerSampleGradientMonitor(statistics=ALL[2:3])], tmp_path, accumulate_grad_batches=3)
    assert all(math.isnan(row["per_sample_grad/cosine_to_mean"]) for row in logged(trainer))


def test_max_samples_of_a_step_in_the_signal_to_noise_ratio(tmp_path):
    """The squares are of some samples, the mean of all: without bias as the noise scale's S, entry by entry."""
    module = WithGradients().double()
    monitor = PerSampleGradientMonitor(max_samples=5, statistics=ALL)
    recorded = []

    class Kept(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            recorded.append(trainer.callback_metrics["per_sample_grad/signal_to_noise"].item())

    fit(module, [monitor, Kept()], tmp_path, loader(40), precision="64-true")
    draws = torch.Generator().manual_seed(0)
    for grads, found in zip(module.batches, recorded, strict=True):
        chosen = grads[torch.randperm(8, generator=draws)[:5].sort().values.numpy()]
        mean, B = grads.mean(0), len(grads)
        variance = B / (B - 1) * ((chosen**2).mean(0) - mean**2)
        ratios = (mean**2 / variance)[variance > 8 * np.finfo(float).eps * (chosen**2).mean(0)]
        assert found == pytest.approx(ratios.mean(), rel=1e-6)


def test_values_of_a_second_engine_have_no_mean_gradient(tmp_path):
    """The reason is that of the values that are logged, not one of several devices."""
    monitor = PerSampleGradientMonitor(unsupported="vmap")
    with pytest.warns(PerSampleWarning) as caught:
        trainer = fit(Classifier(Hidden()), [monitor], tmp_path)
    texts = [str(each.message) for each in caught if "statistics=()" in str(each.message)]
    assert len(texts) == 1
    assert "the samples run in a pass of their own" in texts[0]
    assert all(math.isnan(row["per_sample_grad/diversity"]) for row in logged(trainer))
