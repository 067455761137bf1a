"""Manual optimization: the statistics of a step are of the samples whose gradients the optimizer steps with."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_persample import PerSampleGradientMonitor
from lightning_persample.errors import PerSampleWarning
from tests.callbacks.runs import Recorder, column, fit, logged
from tests.callbacks.ways import BATCH, BATCHES, CLASSES, FEATURES, Classifier, Referred


def norms(grads, *parts):
    """The loop's norms over the parameters whose names start so."""
    return torch.cat([g.to_dense().flatten(1) for name, g in grads.items() if name.startswith(parts)], 1).norm(dim=1)


def trained(kind, tmp_path, **settings):
    """The loop's gradients of each backward, and a monitored fit whose weights are those of one without a monitor."""
    modules = []
    for callbacks in ([], [PerSampleGradientMonitor()]):
        torch.manual_seed(0)
        module = kind(not callbacks)
        trainer = fit(module, callbacks, tmp_path, module.train_dataloader(), **settings)
        modules.append(module)
    for plain, watched in zip(*(module.state_dict().values() for module in modules), strict=True):
        assert torch.equal(plain, watched)
    assert all(not o._optimizer_step_pre_hooks and not o._optimizer_step_post_hooks for o in trainer.optimizers)
    return modules[0].reference, trainer


def assert_logged(trainer, expected, optimizer=None):
    """What is logged at each step is of these norms."""
    prefix = "per_sample_grad" if optimizer is None else f"per_sample_grad/optimizer_{optimizer}"
    assert column(trainer, f"{prefix}/norm_mean") == pytest.approx([each.mean().item() for each in expected], rel=1e-5)
    assert column(trainer, f"{prefix}/norm_std") == pytest.approx([each.std().item() for each in expected], rel=1e-4)
    assert column(trainer, f"{prefix}/norm_max") == pytest.approx([each.max().item() for each in expected], rel=1e-5)
    assert column(trainer, f"{prefix}/coverage") == [1.0] * len(expected)


class Trunk(Referred):
    """A trunk with two heads; the trunk and the first head have one optimizer, the second head has the other."""

    steps_with_pl = True

    def __init__(self, with_reference):
        super().__init__(with_reference)
        self.automatic_optimization = False
        self.trunk = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh())
        self.first, self.second = nn.Linear(6, CLASSES), nn.Linear(6, CLASSES)

    def loss_of_first(self, inputs, labels):
        return F.cross_entropy(self.first(self.trunk(inputs)), labels)

    def loss_of_second(self, inputs, labels):
        return F.cross_entropy(self.second(self.trunk(inputs)), labels)

    def loss_of_both(self, inputs, labels):
        return self.loss_of_first(inputs, labels) + self.loss_of_second(inputs, labels)

    def go_backward(self, loss, *batch):
        self.refer(lambda i: loss(*(part[i : i + 1] for part in batch)), len(batch[0]))
        self.manual_backward(loss(*batch))

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers(use_pl_optimizer=self.steps_with_pl)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.go_backward(self.loss_of_both, *batch)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self):
        return (
            torch.optim.SGD([*self.trunk.parameters(), *self.first.parameters()], 0.1),
            torch.optim.Adam(self.second.parameters(), 0.01),
        )


class TrunkWithoutWrappers(Trunk):
    steps_with_pl = False


@pytest.mark.parametrize("kind", [Trunk, TrunkWithoutWrappers])
def test_one_backward_may_serve_two_optimizers(kind, tmp_path):
    reference, trainer = trained(kind, tmp_path)
    assert_logged(trainer, [norms(each, "trunk", "first") for each in reference], 0)
    assert_logged(trainer, [norms(each, "second") for each in reference], 1)


class TwoLosses(Trunk):
    """A backward for each head, then both optimizers step."""

    def training_step(self, batch, batch_idx):
        self.go_backward(self.loss_of_first, *batch)
        self.go_backward(self.loss_of_second, *batch)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


def test_two_losses_may_serve_two_optimizers(tmp_path):
    reference, trainer = trained(TwoLosses, tmp_path)
    pairs = list(zip(reference[::2], reference[1::2], strict=True))
    assert_logged(trainer, [torch.cat([norms(a, "trunk", "first"), norms(b, "trunk", "first")]) for a, b in pairs], 0)
    assert_logged(trainer, [norms(b, "second") for _, b in pairs], 1)


class DropsATrunk(TwoLosses):
    """The first loss's gradient of the trunk alone is dropped before the second loss."""

    def training_step(self, batch, batch_idx):
        self.go_backward(self.loss_of_first, *batch)
        self.trunk.zero_grad()
        self.go_backward(self.loss_of_second, *batch)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


def test_what_is_dropped_in_some_parameters_counts_in_the_others(tmp_path):
    reference, trainer = trained(DropsATrunk, tmp_path)
    pairs = list(zip(reference[::2], reference[1::2], strict=True))
    assert_logged(trainer, [torch.cat([norms(a, "first"), norms(b, "trunk")]) for a, b in pairs], 0)


class Sharpness(Classifier):
    """Sharpness-aware: the gradients of a first backward move the weights, and are dropped."""

    def __init__(self, with_reference):
        super().__init__(with_reference)
        self.automatic_optimization = False

    def drop(self):
        self.optimizers().zero_grad()

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        moved = [0.05 * parameter.grad for parameter in self.parameters()]
        self.move(moved, 1)
        self.drop()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.move(moved, -1)
        self.optimizers().step()
        self.drop()

    @torch.no_grad()
    def move(self, by, sign):
        for parameter, step in zip(self.parameters(), by, strict=True):
            parameter += sign * step


class SharpnessByZeros(Sharpness):
    def drop(self):
        self.optimizers().zero_grad(set_to_none=False)


class SharpnessByData(Sharpness):
    def drop(self):
        for parameter in self.parameters():
            parameter.grad.data.zero_()


@pytest.mark.parametrize("kind", [Sharpness, SharpnessByZeros, SharpnessByData])
def test_gradients_that_are_dropped_do_not_count(kind, tmp_path):
    reference, trainer = trained(kind, tmp_path)
    assert_logged(trainer, [norms(each, "network") for each in reference[1::2]])


def test_gradients_that_are_dropped_do_not_count_with_a_loss_scale(tmp_path):
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=512.0))
    reference, trainer = trained(Trunk, tmp_path, plugins=[plugin])
    found = column(trainer, "per_sample_grad/optimizer_1/norm_mean")
    assert found == pytest.approx([norms(each, "second").mean().item() for each in reference], rel=3e-2)


class SharpSGD(torch.optim.SGD):
    """The same as an optimizer, which runs a closure at the moved weights and clears gradients in the end."""

    def step(self, closure):
        with torch.enable_grad():
            closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        moved = [0.05 * p.grad for p in parameters]
        torch._foreach_add_([p.data for p in parameters], moved)
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        torch._foreach_sub_([p.data for p in parameters], moved)
        super().step()
        self.zero_grad()
        return loss


class Closure(Classifier):
    def __init__(self, with_reference):
        super().__init__(with_reference)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        def closure():
            loss = Classifier.training_step(self, batch, batch_idx)
            self.manual_backward(loss)
            return loss

        self.optimizers(use_pl_optimizer=self.wrapped).step(closure=closure)

    def configure_optimizers(self):
        return SharpSGD(self.parameters(), 0.1)


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_closure_is_followed_inside_a_step(wrapped, tmp_path):
    reference, trainer = trained(type("Kind", (Closure,), {"wrapped": wrapped}), tmp_path)
    assert_logged(trainer, [norms(each, "network") for each in reference[1::2]])


class Clips(Trunk):
    def training_step(self, batch, batch_idx):
        self.go_backward(self.loss_of_both, *batch)
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, 1e-3, "norm")
            optimizer.step()
            optimizer.zero_grad()


def test_clipping_drops_nothing(tmp_path):
    reference, trainer = trained(Clips, tmp_path)
    assert_logged(trainer, [norms(each, "second") for each in reference], 1)


class SparseAndLazy(Sharpness):
    """Gradients of an embedding are sparse, and the last layer gets its shape in the first step."""

    def __init__(self, with_reference):
        super().__init__(with_reference)
        self.table, self.last = nn.Embedding(CLASSES, FEATURES, sparse=True), nn.LazyLinear(CLASSES)

    def loss(self, inputs, labels):
        return F.cross_entropy(self.last(self.network(inputs + self.table(labels))), labels)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        with torch.no_grad():
            self.loss(*batch)
        for _ in range(2):
            self.manual_backward(Classifier.training_step(self, batch, batch_idx))
            if batch_idx != 1:
                optimizer.zero_grad(set_to_none=batch_idx == 0)
        self.manual_backward(Classifier.training_step(self, batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_sparse_gradients_and_lazy_parameters(tmp_path):
    reference, trainer = trained(SparseAndLazy, tmp_path)
    rows = [norms(each, "") for each in reference]
    assert_logged(trainer, [rows[2], torch.cat(rows[3:6]), rows[8]])


class WithoutEffect(Sharpness):
    """The first loss is multiplied by zero, and its gradients are zeros before they are set to zero."""

    def training_step(self, batch, batch_idx):
        self.manual_backward(0.0 * Classifier.training_step(self, batch, batch_idx))
        self.optimizers().zero_grad(set_to_none=False)
        self.manual_backward(Classifier.training_step(self, batch, batch_idx))
        self.optimizers().step()


def test_zeros_that_are_set_to_zero_are_not_guessed_at(tmp_path):
    with pytest.warns(PerSampleWarning, match="it is not known whether optimizer 0 stepped with it: let zero_grad"):
        reference, trainer = trained(WithoutEffect, tmp_path)
    assert [row["step"] for row in logged(trainer)] == [1, 2]  # later, zeros are added to what the last step left
    assert_logged(trainer, [norms(each, "network") for each in reference[3::2]])


class LowRank(Sharpness):
    """One factor is zero at first, so that the other one's gradients are zeros, of every sample."""

    def __init__(self, with_reference):
        super().__init__(with_reference)
        self.down, self.up = nn.Linear(FEATURES, 2, bias=False), nn.Linear(2, CLASSES, bias=False)
        nn.init.zeros_(self.up.weight)

    def loss(self, inputs, labels):
        return F.cross_entropy(self.network(inputs) + self.up(self.down(inputs)), labels)

    def drop(self):
        self.optimizers().zero_grad(set_to_none=False)

    def training_step(self, batch, batch_idx):
        for _ in range(2):
            self.drop()
            self.manual_backward(Classifier.training_step(self, batch, batch_idx))
        self.optimizers().step()


def test_zeros_of_every_sample_make_no_difference(tmp_path):
    reference, trainer = trained(LowRank, tmp_path, max_epochs=1)
    assert_logged(trainer, [norms(each, "network", "up", "down") for each in reference[1::2]])


class PenaltyOfItsOwn(Sharpness):
    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(Classifier.training_step(self, batch, batch_idx))
        self.manual_backward(0.01 * sum(parameter.square().sum() for parameter in self.parameters()))
        self.optimizers().step()


def test_a_backward_of_a_penalty_is_of_no_sample(tmp_path):
    reference, trainer = trained(PenaltyOfItsOwn, tmp_path)
    assert len(reference[0]["network.0.weight"]) == BATCH
    assert_logged(trainer, [norms(each, "network") for each in reference])
    assert len(reference) == BATCHES


class MicroBatches(Sharpness):
    """A backward for each part of the batch; the last part is smaller."""

    sizes = (3, 1)
    factor = 1.0

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        for inputs, labels in zip(*(part.split(self.sizes) for part in batch), strict=True):
            self.refer(lambda i, x=inputs, y=labels: self.factor * self.loss(x[i : i + 1], y[i : i + 1]), len(inputs))
            self.manual_backward(self.factor * self.loss(inputs, labels))
        self.optimizers().step()


class HalvedMicroBatches(MicroBatches):
    sizes, factor = (2, 2), 0.5


class SampleBySample(MicroBatches):
    sizes = (1, 1, 1, 1)


@pytest.mark.parametrize("kind", [MicroBatches, HalvedMicroBatches, SampleBySample])
def test_parts_of_a_batch_with_a_backward_each_are_one_step(kind, tmp_path):
    reference, trainer = trained(kind, tmp_path)
    parts = len(kind.sizes)
    rows = [norms(each, "network") for each in reference]
    expected = [torch.cat(rows[start : start + parts]) for start in range(0, len(rows), parts)]
    assert [len(each) for each in expected] == [BATCH] * BATCHES
    assert_logged(trainer, expected)


def test_sums_are_those_of_the_part(tmp_path):
    """The check of the sums of gradients counts the samples of each part, too."""
    watcher = Recorder(quantities=("sq_norm", "grad_sample"))
    module = MicroBatches(False)
    fit(module, [watcher], tmp_path, module.train_dataloader())
    assert [record.samples.tolist() for record in watcher.records] == [[0, 1, 2], [3]] * BATCHES


class SumsUp(Sharpness):
    def training_step(self, batch, batch_idx):
        self.manual_backward(F.cross_entropy(self.network(batch[0]), batch[1], reduction="sum"))


def test_a_warning_points_at_the_users_line(tmp_path):
    module = SumsUp(False)
    with pytest.warns(PerSampleWarning, match="pass loss_reduction='sum'") as caught:
        fit(module, [Recorder()], tmp_path, module.train_dataloader())
    assert [each.filename for each in caught if each.category is PerSampleWarning] == [__file__]
