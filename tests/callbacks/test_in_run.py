"""In-run influence against loops by hand, in float64: dots, Shapley values, and a training that it does not touch."""

from __future__ import annotations

import copy
import random
import re
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_persample import (
    InRunInfluence,
    OptionError,
    PerSampleCallback,
    PerSampleError,
    PerSampleGradientMonitor,
    PerSampleRecord,
    PerSampleWarning,
)
from lightning_persample.influence import data_shapley, read_ledger, report, self_influence
from tests.callbacks.runs import make_trainer

pytest.importorskip("pyarrow")
B, STEPS = 4, 6
SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 3, (count,), generator=generator))


TRAIN, VAL = DataLoader(data(B * STEPS, 1), B), DataLoader(data(7, 2), 3)


class Net(LightningModule):
    """A small classifier with an optimizer to be chosen."""

    def __init__(self, make=SGD, **options):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.make, self.options = make, {"lr": 0.1, **options}

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.make(self.parameters(), **self.options)


def loss_of(module, batch):
    return F.cross_entropy(module.net(batch[0]), batch[1])


def written(folder, module, **options):
    """The ledger of one epoch, in the order of the samples."""
    of_trainer = {
        name: options.pop(name)
        for name in ("accumulate_grad_batches", "gradient_clip_val", "precision")
        if name in options
    }
    train = options.pop("train", TRAIN)
    callback = InRunInfluence(folder, options.pop("val", VAL), overwrite=True, **options)
    make_trainer([callback], max_epochs=1, **of_trainer).fit(module, train)
    return read_ledger(folder).to_pandas().sort_values(["step", "row"])


def flat(loss, module, **options):
    grads = torch.autograd.grad(loss, list(module.parameters()), **options)
    return torch.cat([grad.flatten() for grad in grads])


def stepped(module, grad):
    """The parameters after one step of a copy of the module's optimizer along this gradient."""
    module = copy.deepcopy(module)
    for parameter, part in zip(module.parameters(), grad.split([p.numel() for p in module.parameters()]), strict=True):
        parameter.grad = part.view_as(parameter).clone()
    module.optimizer.step()
    return nn.utils.parameters_to_vector(module.parameters()).detach()


class ByHand:
    """What one step makes of each sample's gradient: without it, SGD's step is another one by just its part."""

    def __init__(self, module):
        self.module = module
        module.optimizer = module.configure_optimizers()

    def parts(self, grads):
        whole = stepped(self.module, grads.mean(0))
        return torch.stack([stepped(self.module, grads.mean(0) - grad / len(grads)) - whole for grad in grads])


class AdamByHand(ByHand):
    """Algorithm 1 of Kingma and Ba, whose second moment is held fixed."""

    def __init__(self, module):
        super().__init__(module)
        self.t, self.v = 0, 0.0

    def parts(self, grads):
        lr, (b1, b2), decay = (self.module.options.get(name, other) for name, other in DEFAULTS.items())
        sign = -1.0 if self.module.options.get("maximize") else 1.0
        total = sign * grads.mean(0)
        if self.module.make is ADAM:
            total = total + decay * nn.utils.parameters_to_vector(self.module.parameters()).detach()
        self.t, self.v = self.t + 1, b2 * self.v + (1 - b2) * total.square()
        down = (self.v / (1 - b2**self.t)).sqrt() + 1e-8
        return sign * lr * (1 - b1) / (1 - b1**self.t) * grads / len(grads) / down


DEFAULTS = {"lr": 0.1, "betas": (0.9, 0.999), "weight_decay": 0.0}


class SignSGD(SGD):
    """It has the parent's options, and a step of its own."""

    def step(self, closure=None):
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(group["lr"] * parameter.grad.sign())
        return loss


class SignAdam(ADAM):
    """The same of Adam."""

    step = SignSGD.step


def by_hand(module, *, refresh=1):
    """The columns of a training that is run by hand, sample by sample."""
    rule = (ByHand if module.make is SGD else AdamByHand)(module)
    found = {"val_dot": [], "shapley": [], "val_loss": [], "staleness": []}
    val_inputs, val_labels = VAL.dataset.tensors
    for step, (inputs, labels) in enumerate(TRAIN):
        if step % refresh == 0:
            val_loss = F.cross_entropy(module.net(val_inputs), val_labels)
            val_grad = flat(val_loss, module)
        losses = F.cross_entropy(module.net(inputs), labels, reduction="none")
        grads = torch.stack([flat(loss, module, retain_graph=True) for loss in losses])
        found["val_dot"] += (grads @ val_grad).tolist()
        found["shapley"] += (rule.parts(grads) @ val_grad).tolist()
        found["val_loss"] += [val_loss.item()] * B
        found["staleness"] += [step % refresh] * B
        module.optimizer.zero_grad()
        losses.mean().backward()
        module.optimizer.step()
    return found


@pytest.mark.parametrize(
    ("make", "options", "refresh"),
    [
        (SGD, {}, 1),
        (SGD, {}, 4),
        (SGD, {"momentum": 0.9, "weight_decay": 0.1}, 1),
        (SGD, {"momentum": 0.9, "dampening": 0.5}, 2),
        (SGD, {"momentum": 0.9, "nesterov": True}, 1),
        (ADAM, {}, 1),
        (ADAM, {"betas": (0.5, 0.9), "weight_decay": 0.1}, 2),
        (ADAM, {"maximize": True, "weight_decay": 0.3}, 1),
        (ADAMW, {"weight_decay": 0.1}, 1),
        (ADAMW, {"maximize": True, "weight_decay": 0.3}, 1),
    ],
    ids=str,
)
def test_dots_and_shapley_values_are_those_of_a_loop(make, options, refresh, tmp_path):
    rows = written(tmp_path / "ledger", Net(make, **options), refresh_every_n_steps=refresh)
    expected = by_hand(Net(make, **options), refresh=refresh)
    for name, values in expected.items():
        np.testing.assert_allclose(rows[name], values, rtol=1e-10, atol=1e-12)
    sums = data_shapley(rows)
    np.testing.assert_allclose(sums.scores, rows.groupby("sample_index")["shapley"].sum(), rtol=1e-12)
    assert sums.convention.endswith("positive where a sample lowered the validation loss")


def test_rates_by_group_and_rates_that_change_before_the_step(tmp_path):
    class Groups(Net):
        def configure_optimizers(self):
            first, last = self.net[0].parameters(), self.net[2].parameters()
            return SGD([{"params": first, "lr": 0.3}, {"params": last, "lr": 0.05}])

    class Changes(Net):
        def on_before_optimizer_step(self, optimizer):
            optimizer.param_groups[0]["lr"] = 0.7

    rows, expected = written(tmp_path / "groups", Groups()), by_hand(Groups())
    np.testing.assert_allclose(rows["shapley"], expected["shapley"], rtol=1e-10, atol=1e-12)
    rows = written(tmp_path / "changes", Changes())
    np.testing.assert_allclose(rows["shapley"], 0.7 / B * rows["val_dot"], rtol=1e-12)


@pytest.mark.parametrize("make", [SGD, ADAM])
def test_rates_of_several_groups_that_change_before_the_step(make, tmp_path):
    class Groups(Net):
        rates = (0.03, 0.2)

        def configure_optimizers(self):
            layers = zip((self.net[0], self.net[2]), self.rates, strict=True)
            return self.make([{"params": layer.parameters(), "lr": rate} for layer, rate in layers])

    class Warmed(Groups):
        rates = (0.1, 0.1)

        def on_before_optimizer_step(self, optimizer):
            for group, rate in zip(optimizer.param_groups, Groups.rates, strict=True):
                group["lr"] = rate

        def on_train_batch_end(self, outputs, batch, batch_idx):
            for group in self.optimizers().param_groups:
                group["lr"] = 0.1

    expected, rows = (written(tmp_path / kind.__name__, kind(make)) for kind in (Groups, Warmed))
    np.testing.assert_allclose(rows["shapley"], expected["shapley"], rtol=1e-12)
    if make is SGD:
        np.testing.assert_allclose(rows["shapley"], by_hand(Groups())["shapley"], rtol=1e-10, atol=1e-12)
        pair = [written(tmp_path / f"{k.__name__} 2", k(), accumulate_grad_batches=2) for k in (Groups, Warmed)]
        np.testing.assert_allclose(*(each["shapley"] for each in pair), rtol=1e-12)


def clipped_in(hook):
    def clip(module, *args, **kwargs):
        nn.utils.clip_grad_norm_(module.parameters(), 0.01)

    return type("Clipped", (Net,), {hook: clip})


@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"])
def test_gradients_that_a_hook_changes_make_it_nan_of_adam_alone(hook, tmp_path):
    with pytest.warns(PerSampleWarning, match=r"nan where gradients were changed .* the step of Adam \(clipp"):
        rows = written(tmp_path / "adam", clipped_in(hook)(ADAM))
    assert rows["shapley"].isna().all()
    assert rows["val_dot"].notna().all()
    rows = written(tmp_path / "sgd", clipped_in(hook)())
    np.testing.assert_allclose(rows["shapley"], 0.1 / B * rows["val_dot"], rtol=1e-12)


@pytest.mark.parametrize("flush_every", [100, 1])
def test_a_step_that_is_skipped_has_no_part_of_any_sample(flush_every, tmp_path):
    class Skips(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, closure):
            optimizer.step(closure) if batch_idx % 2 else closure()

    rows = written(tmp_path / "ledger", Skips(), flush_every=flush_every)
    has_stepped = rows["batch_idx"] % 2 == 1
    np.testing.assert_allclose(rows["shapley"], np.where(has_stepped, 0.1 / B * rows["val_dot"], 0.0), rtol=1e-12)


def test_rows_of_a_fit_that_fails_have_their_rates(tmp_path):
    class Fails(Net):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                raise KeyError

    with pytest.raises(KeyError):
        written(tmp_path / "ledger", Fails())
    rows = read_ledger(tmp_path / "ledger").to_pandas()
    assert len(rows) == 2 * B
    np.testing.assert_allclose(rows["shapley"], 0.1 / B * rows["val_dot"], rtol=1e-12)


def test_what_begins_to_train_is_in_the_next_dot(tmp_path):
    class Thaws(Net):
        def __init__(self, frozen):
            super().__init__()
            if frozen:
                self.net[0].requires_grad_(False)

        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 3:
                self.net[0].requires_grad_(True)

        def configure_optimizers(self):
            return SGD([p for p in self.parameters() if p.requires_grad], 0.0)

    rows, expected = (written(tmp_path / str(f), Thaws(f), refresh_every_n_steps=10) for f in (True, False))
    later = rows["batch_idx"] >= 3
    np.testing.assert_allclose(rows["val_dot"][later], expected["val_dot"][later], rtol=1e-12)
    assert rows["staleness"].tolist() == [0] * B + [1] * B + [2] * B + [0] * B + [1] * B + [2] * B
    assert not np.isclose(rows["val_dot"][~later], expected["val_dot"][~later]).any()


class Filter(Net):
    """A filter of frequencies, as a complex parameter, or as the same numbers in pairs."""

    def __init__(self, make, is_complex):
        super().__init__(make)
        pairs = torch.randn(3, 2, dtype=torch.float64)
        self.filter = nn.Parameter(torch.view_as_complex(pairs) if is_complex else pairs)

    def training_step(self, batch, batch_idx):
        factors = self.filter if self.filter.is_complex() else torch.view_as_complex(self.filter)
        return super().training_step((torch.fft.irfft(torch.fft.rfft(batch[0]) * factors, n=5), batch[1]), batch_idx)


@pytest.mark.parametrize("make", [SGD, ADAM, ADAMW])
def test_a_complex_parameter_moves_as_its_parts_do(make, tmp_path):
    options = {} if make is SGD else {"amsgrad": True, "weight_decay": 0.1}
    pair = []
    for is_complex in (True, False):
        torch.manual_seed(1)
        module = Filter(make, is_complex)
        module.options |= options
        pair.append(written(tmp_path / str(is_complex), module))
    for name in ("val_dot", "shapley"):
        np.testing.assert_allclose(*(rows[name] for rows in pair), rtol=1e-9, atol=1e-12)


class Quadratic(LightningModule):
    """A quadratic loss, of which the second-order change is known."""

    def __init__(self):
        super().__init__()
        self.point = nn.Linear(3, 1, bias=False).double()
        nn.init.ones_(self.point.weight)

    def training_step(self, batch, batch_idx):
        return (self.point(batch[0][:, :3]).square()).mean()

    def configure_optimizers(self):
        return SGD(self.parameters(), 0.01)


def test_values_sum_to_the_change_of_the_validation_loss_up_to_second_order(tmp_path):
    rows = written(tmp_path / "ledger", Quadratic())
    steps = rows.groupby("step")
    change, first_order = -steps["val_loss"].first().diff().iloc[1:].to_numpy(), steps["shapley"].sum().to_numpy()
    weight = torch.ones(3, dtype=torch.float64)
    inputs = VAL.dataset.tensors[0][:, :3]
    hessian = 2 * inputs.T @ inputs / len(inputs)
    for step, (batch, _) in enumerate(TRAIN):
        moved = 0.01 * 2 * batch[:, :3].T @ (batch[:, :3] @ weight) / B
        taylor = float(moved @ hessian @ weight)
        assert first_order[step] == pytest.approx(taylor, rel=1e-10)
        if step < len(change):
            assert change[step] == pytest.approx(taylor - float(moved @ hessian @ moved) / 2, rel=1e-10)
        weight = weight - moved


class Manual(Net):
    """Steps its optimizer itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_manual_optimization_and_accumulation(tmp_path):
    expected = by_hand(Net())
    rows = written(tmp_path / "manual", Manual(), val_loss=loss_of)
    for name, values in expected.items():
        np.testing.assert_allclose(rows[name], values, rtol=1e-10, atol=1e-12)
    with pytest.raises(
        OptionError, match=r"val_loss=None takes module\.training_step, which steps the optimizers itself"
    ):
        written(tmp_path / "refused", Manual())
    rows = written(tmp_path / "accumulated", Net(), accumulate_grad_batches=2)
    np.testing.assert_allclose(rows["shapley"], 0.1 / (2 * B) * rows["val_dot"], rtol=1e-12)
    np.testing.assert_allclose(rows["val_dot"][rows["batch_idx"] == 0], expected["val_dot"][:B], rtol=1e-10)


class SharpnessAware(Manual):
    """Drops the gradients of its first backward."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for is_last in (False, True):
            optimizer.zero_grad(set_to_none=batch_idx % 2 == 0)
            self.manual_backward(loss_of(self, batch) * (1.0 if is_last else 5.0))
        optimizer.step()


def test_gradients_that_are_dropped_before_the_step_have_no_part_in_it(tmp_path):
    rows = written(tmp_path / "ledger", SharpnessAware(), val_loss=loss_of)
    is_last = rows["backward_index"] == 1
    np.testing.assert_allclose(rows["shapley"], np.where(is_last, 0.1 / B * rows["val_dot"], 0.0), rtol=1e-12)


class Pair(Manual):
    """A head and a body with an optimizer each, of which the body is trained by the first of two backward passes."""

    def __init__(self, toggles, *, head_first=False):
        super().__init__()
        self.toggles, self.head_first = toggles, head_first

    def training_step(self, batch, batch_idx):
        for place in (1, 0) if self.head_first else (0, 1):
            optimizer = self.optimizers()[place]
            if self.toggles:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss_of(self, batch))
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return SGD(self.net[0].parameters(), 0.1), SGD(self.net[2].parameters(), 0.3)


@pytest.mark.parametrize("head_first", [False, True])
def test_each_optimizer_counts_what_it_steps_with(head_first, tmp_path):
    frames = []
    for toggles in (True, False):
        module = Pair(toggles, head_first=head_first)
        frame = written(tmp_path / str(toggles), module, val_loss=loss_of, refresh_every_n_steps=100)
        frames.append(frame.sort_values(["step", "backward_index", "row"]))
    toggled, untoggled = frames
    assert toggled["staleness"].tolist() == np.repeat(range(STEPS), 2 * B).tolist()  # one gradient of all, at the first
    np.testing.assert_allclose(toggled["shapley"], untoggled["shapley"], rtol=1e-12)
    rates = np.where((toggled["backward_index"] == 1) == head_first, 0.1, 0.3)
    np.testing.assert_allclose(toggled["shapley"], rates / B * toggled["val_dot"], rtol=1e-12)


class Accumulated(Manual):
    """Steps at every second batch."""

    def training_step(self, batch, batch_idx):
        self.manual_backward(loss_of(self, batch))
        if batch_idx % 2:
            self.optimizers().param_groups[0]["lr"] = 0.1 * batch_idx
            self.optimizers().step()
            self.optimizers().zero_grad()


def test_batches_that_are_accumulated_by_hand_wait_for_their_step(tmp_path):
    rows = written(tmp_path / "sgd", Accumulated(), val_loss=loss_of)
    rates = 0.1 * (rows["batch_idx"] // 2 * 2 + 1)
    np.testing.assert_allclose(rows["shapley"], rates / B * rows["val_dot"], rtol=1e-12)
    module = Accumulated()
    module.make = ADAM
    with pytest.warns(PerSampleWarning, match="shapley is nan where gradients were changed between the backward and"):
        rows = written(tmp_path / "adam", module, val_loss=loss_of)
    assert (rows["shapley"].isna() == (rows["batch_idx"] % 2 == 0)).all()
    with pytest.warns(
        PerSampleWarning, match="the learning rate changed between a backward and its optimizer step, aft"
    ):
        early = written(tmp_path / "early", Accumulated(), val_loss=loss_of, flush_every=1)
    was = np.where(early["batch_idx"] % 2, 0.1 * early["batch_idx"], 0.1 * (early["batch_idx"] - 1).clip(lower=1))
    np.testing.assert_allclose(early["shapley"], was / B * early["val_dot"], rtol=1e-12)


class TwoBackwards(Manual):
    """Goes backward twice through one graph."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        logits = self.net(batch[0])
        self.manual_backward(F.cross_entropy(logits, batch[1]), retain_graph=True)
        self.manual_backward(logits.square().mean())
        optimizer.step()


def test_a_validation_pass_between_two_backwards_of_one_graph(tmp_path):
    ends = []
    for is_on in (False, True):
        module = TwoBackwards()
        callbacks = [InRunInfluence(tmp_path, VAL, val_loss=loss_of)] if is_on else []
        make_trainer(callbacks, max_epochs=1).fit(module, TRAIN)
        ends.append(nn.utils.parameters_to_vector(module.parameters()))
    assert torch.equal(*ends)


class Restless(Net):
    """Draws random numbers, counts, logs, and has layers and buffers that change in training."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3)).double()
        self.register_buffer("count", torch.zeros(()))
        self.drawn = []

    def training_step(self, batch, batch_idx):
        self.count += 1
        self.drawn.append((torch.rand(()).item(), random.random(), np.random.rand()))
        loss = super().training_step(batch, batch_idx) * self.count  # (which is read again in the backward)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def test_the_validation_pass_changes_nothing(tmp_path):
    states = []
    for is_on in (False, True):
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        module = Restless()
        val = DataLoader(VAL.dataset, 3, shuffle=True)
        callbacks = [InRunInfluence(tmp_path / "ledger", val, unsupported="warn")] if is_on else []
        trainer = make_trainer(callbacks, max_epochs=2)
        with pytest.warns(PerSampleWarning) if is_on else nullcontext():
            trainer.fit(module, DataLoader(TRAIN.dataset, B, shuffle=True))
        logged = {name: value.item() for name, value in trainer.logged_metrics.items()}
        states.append((module.state_dict(), module.drawn, logged, torch.rand(3), random.random(), np.random.rand()))
        assert module.training
        assert all("training_step" not in each for each in (vars(module),))
    (one, *rest), (other, *others) = states
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert rest[:2] == others[:2]
    assert torch.equal(rest[2], others[2])
    assert rest[3:] == others[3:]


class Holding(Net):
    """Keeps a part of its graph until the batch ends: a derived weight, or a factor that it writes to in place."""

    def __init__(self, kept, is_own=True):
        super().__init__()
        self.kept, self.is_own, self.of_batch = kept, is_own, {}

    @property
    def others(self):
        return self.of_batch if self.is_own else _CACHE

    def on_train_batch_start(self, batch, batch_idx):
        self.others.clear()
        self.others["factor"] = torch.ones(1, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        weight = torch.tanh(self.net[2].weight)
        if self.kept == "weight":
            weight = self.others.setdefault("weight", weight)
        if self.kept == "factor":
            self.others["factor"] += 0 * weight.sum()
            weight = weight * self.others["factor"]
        return F.cross_entropy(F.linear(self.net[:2](batch[0]), weight, self.net[2].bias), batch[1])


_CACHE = {}


@pytest.mark.parametrize("kept", ["weight", "factor"])
def test_a_graph_that_the_module_holds_goes_backward_all_the_same(kept, tmp_path):
    ends = []
    text = (
        r"gives nothing more in this fit: the loss goes back into a graph that was made before, from `net.2.weight` "
        r"\(a derived weight .* compute that again in each forward pass, .*(graph a second time|inplace operation)"
    )
    for callbacks in ([], [InRunInfluence(tmp_path / "ledger", VAL)]):
        module = Holding(kept)
        with pytest.warns() if callbacks else nullcontext() as said:
            make_trainer(callbacks).fit(module, TRAIN)
        ends.append(nn.utils.parameters_to_vector(module.parameters()))
    assert any(re.search(text, str(each.message)) for each in said)
    assert torch.equal(*ends)
    _CACHE.clear()
    rows = written(tmp_path / "others", Holding("weight", is_own=False))
    expected = written(tmp_path / "expected", Holding("nothing"))
    np.testing.assert_allclose(rows[COLUMNS], expected[COLUMNS], rtol=1e-10)


def with_inputs(loader, change):
    inputs, labels = loader.dataset.tensors
    return DataLoader(TensorDataset(change(inputs), labels), loader.batch_size)


COLUMNS = ["val_dot", "shapley", "val_loss"]


def test_validation_batches_go_the_way_of_those_of_a_validation(tmp_path):
    """Through all hooks, but without what a hook does in the training alone; in the Trainer's precision."""

    class Augmented(Net):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return [2 * batch[0], batch[1]]

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [batch[0] + 0.5 if self.trainer.training else batch[0], batch[1]]

    loaders = {"train": with_inputs(TRAIN, lambda x: 2 * x + 0.5), "val": with_inputs(VAL, lambda x: 2 * x)}
    expected = written(tmp_path / "expected", Net(), **loaders)
    np.testing.assert_allclose(written(tmp_path / "hooks", Augmented())[COLUMNS], expected[COLUMNS], rtol=1e-12)
    narrow = {name: with_inputs(each, torch.Tensor.float) for name, each in (("train", TRAIN), ("val", VAL))}
    rows = written(tmp_path / "precision", Net(), precision="64-true", **narrow)
    np.testing.assert_allclose(rows[COLUMNS], written(tmp_path / "wide", Net())[COLUMNS], rtol=1e-4, atol=1e-7)


def test_a_training_step_of_the_instance_is_that_of_the_validation_pass(tmp_path):
    class Smoothed(Net):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1], label_smoothing=0.3)

    module = Net()
    module.training_step = lambda batch, batch_idx: Smoothed.training_step(module, batch, batch_idx)
    rows = [written(tmp_path / str(number), each) for number, each in enumerate((module, Smoothed()))]
    np.testing.assert_allclose(rows[0][COLUMNS], rows[1][COLUMNS], rtol=1e-12)


def test_what_is_not_known_is_nan_and_said(tmp_path):
    with pytest.warns(PerSampleWarning, match="shapley is nan: it is known of SGD, Adam and AdamW, and RMSprop steps"):
        rows = written(tmp_path / "other", Net(torch.optim.RMSprop))
    assert rows["shapley"].isna().all()
    assert rows["val_dot"].notna().all()
    text = "shapley is nan: it needs the weight of each sample in the step, and "
    with pytest.warns(PerSampleWarning, match=text):
        rows = written(tmp_path / "loop", Net(), engine="loop")
    assert rows["shapley"].isna().all()
    assert rows["val_dot"].notna().all()
    with pytest.warns(PerSampleWarning, match="shapley is nan: what Adam divides by is not known before the step"):
        rows = written(tmp_path / "accumulated", Net(ADAM), accumulate_grad_batches=2)
    assert rows["shapley"].isna().all()
    with pytest.warns(PerSampleWarning, match="what Adam divides by is not known .*, of gradients that are clipped"):
        rows = written(tmp_path / "clipped", Net(ADAM), gradient_clip_val=0.01)
    assert rows["shapley"].isna().all()
    for make in (SignSGD, SignAdam):
        with pytest.warns(PerSampleWarning, match=f"SGD, Adam and AdamW, and {make.__name__} steps otherwise"):
            rows = written(tmp_path / make.__name__, Net(make))
        assert rows["shapley"].isna().all()
    val = list(VAL)
    rows = written(tmp_path / "list", Net(), val=val)
    np.testing.assert_allclose(rows["val_dot"], by_hand(Net())["val_dot"], rtol=1e-10)


class Checkpointed(Net):
    """Nothing that is trained lies in front of its checkpoint: torch.autograd.grad passes a reentrant one by."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def training_step(self, batch, batch_idx):
        hidden = checkpoint(self.net[:2], batch[0].requires_grad_(), use_reentrant=self.reentrant)
        return F.cross_entropy(self.net[2](hidden), batch[1])


def test_a_reentrant_checkpoint_in_the_validation_pass_is_refused_and_no_zero(tmp_path):
    with pytest.warns(PerSampleWarning, match="use_reentrant=True gives none to it; use checkpoint"):
        make_trainer([InRunInfluence(tmp_path / "refused", VAL)], max_epochs=1).fit(Checkpointed(True), TRAIN)
    assert len(read_ledger(tmp_path / "refused", partial=True)) == 0
    rows = written(tmp_path / "not_reentrant", Checkpointed(False))
    np.testing.assert_allclose(rows["val_dot"], by_hand(Net())["val_dot"], rtol=1e-10)


def test_validation_batches_without_a_loss_are_left_out(tmp_path):
    def some(module, batch):
        return loss_of(module, batch) if len(batch[0]) == 3 else None

    with pytest.warns(PerSampleWarning, match="the validation loss of 1 of 7 samples is None, as where training_step"):
        rows = written(tmp_path / "some", Net(), val_loss=some)
    expected = written(tmp_path / "expected", Net(), val=DataLoader(VAL.dataset, 3, drop_last=True))
    np.testing.assert_allclose(rows["val_dot"], expected["val_dot"], rtol=1e-12)
    with pytest.warns(PerSampleWarning, match="the validation loss of 7 of 7 samples is None"):
        rows = written(tmp_path / "none", Net(), val_loss=lambda module, batch: None)
    assert rows[["val_dot", "shapley", "val_loss"]].isna().all(axis=None)


def test_text_of_errors(tmp_path):
    for given in (iter([]), [VAL], {"val": VAL}, 3):
        with pytest.raises(OptionError, match=r"val_dataloader=.* must be one DataLoader, or a list of batches"):
            InRunInfluence(tmp_path, given)
    with pytest.raises(
        OptionError, match="refresh_every_n_steps=0 is not allowed: refresh_every_n_steps must be an in"
    ):
        InRunInfluence(tmp_path, VAL, refresh_every_n_steps=0)
    with pytest.raises(OptionError, match="val_dataloader gave no batch"):
        written(tmp_path / "none", Net(), val=[])
    with pytest.raises(OptionError, match="the validation loss is no single number with a graph"):
        written(tmp_path / "bad", Net(), val_loss=lambda module, batch: torch.zeros(2))
    with pytest.raises(ZeroDivisionError):  # as it is
        written(tmp_path / "raises", Net(), val_loss=lambda module, batch: 1 / 0)
    with pytest.raises(OptionError, match="the column 'shapley' of the run has the name of one of InRunInfluence"):
        written(tmp_path / "taken", Net(), columns=lambda outputs, batch: {"shapley": batch[1]})


def test_norms_are_a_column_where_they_are_asked_for(tmp_path):
    ledgers = tmp_path / "without", tmp_path / "with"
    without, with_norms = (
        written(folder, Net(), norms=norms) for folder, norms in zip(ledgers, (False, True), strict=True)
    )
    assert with_norms.drop(columns="norm").equals(without)
    module, norms = Net(), []
    optimizer = module.configure_optimizers()
    for inputs, labels in TRAIN:
        losses = F.cross_entropy(module.net(inputs), labels, reduction="none")
        norms += [float(flat(loss, module, retain_graph=True).norm()) for loss in losses]
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    np.testing.assert_allclose(with_norms["norm"], norms, rtol=1e-10)
    with pytest.raises(OptionError, match="the ledger has no column 'norm': self_influence needs it"):
        self_influence(ledgers[0])
    with pytest.raises(PerSampleError, match=r"has no norms, .*: write them with InRunInfluence\(\.\.\., norms=True\)"):
        report(ledgers[0])
    with pytest.raises(OptionError, match="norms=1 is not allowed: norms must be True or False"):
        InRunInfluence(tmp_path, VAL, norms=1)


def test_rates_by_group_are_known_without_the_norms(tmp_path):
    class Groups(Net):
        def configure_optimizers(self):
            first, last = self.net[0].parameters(), self.net[2].parameters()
            return SGD([{"params": first, "lr": 0.3}, {"params": last, "lr": 0.05}])

        def on_before_optimizer_step(self, optimizer):
            optimizer.param_groups[0]["lr"] *= 0.9

    rows = [written(tmp_path / str(norms), Groups(), norms=norms) for norms in (False, True)]
    np.testing.assert_allclose(*(each["learning_rate"] for each in rows), rtol=1e-12)


def columns_beside(folder, others, module=None, **options):
    """What a fit with further callbacks writes."""
    callback = InRunInfluence(folder, VAL, refresh_every_n_steps=2, **options)
    make_trainer([callback, *others], max_epochs=1).fit(module or Net(), TRAIN)
    return read_ledger(folder).to_pandas().sort_values(["step", "row"])[[*COLUMNS, "staleness"]]


class Reader(PerSampleCallback):
    """Reads more of the gradients than their dots with the validation gradient."""

    def __init__(self, quantity, **options):
        super().__init__(every_n_steps=1, **options)
        self.quantity, self.read = quantity, []

    def needs(self, trainer):
        return {self.quantity}

    def on_per_sample_gradients(self, trainer, pl_module, record, batch, batch_idx):
        vectors = {name: torch.ones_like(pl_module.get_parameter(name)) for name in record.names}
        self.read.append(record.dot(vectors) if self.quantity == "dot" else dict(record.square_sums))


@pytest.mark.parametrize("quantity", ["dot", "sq_norm", "square_sum"])
def test_other_readers_of_the_gradients_change_nothing(quantity, tmp_path):
    expected = columns_beside(tmp_path / "alone", [])
    if quantity == "sq_norm":
        others = [PerSampleGradientMonitor(every_n_steps=1), InRunInfluence(tmp_path / "other", list(VAL)[:1])]
    else:
        others = [Reader(quantity)]
    rows = columns_beside(tmp_path / "beside", others)
    np.testing.assert_allclose(rows, expected, rtol=1e-12)
    if quantity != "sq_norm":
        assert len(others[0].read) == STEPS
    some = columns_beside(tmp_path / "some", [], max_samples=B - 1)
    kept = columns_beside(tmp_path / "kept", [Reader("dot", max_samples=B - 1)], max_samples=B - 1)
    np.testing.assert_allclose(some, kept, rtol=1e-12)


def test_dots_are_taken_in_the_backward_where_they_can_be(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(
        InRunInfluence,
        "_added",
        lambda self, trainer, module, record, rows, added=InRunInfluence._added: (
            kept.append(len(record._kept._structures)) or added(self, trainer, module, record, rows)
        ),
    )
    for make, structures in ((SGD, 0), (ADAM, 4)):
        written(tmp_path / make.__name__, Net(make))
        assert kept == [structures] * STEPS
        kept.clear()


@pytest.mark.parametrize(
    ("make", "options", "dots"),
    [(SGD, {}, 1), (SGD, {"momentum": 0.9, "nesterov": True}, 1), (SGD, {"maximize": True}, 1), (ADAM, {}, 2)],
    ids=str,
)
def test_a_step_takes_no_more_dots_than_it_needs(make, options, dots, tmp_path, monkeypatch):
    taken, dot = [], PerSampleRecord.dot
    monkeypatch.setattr(PerSampleRecord, "dot", lambda record, vectors: taken.append(1) or dot(record, vectors))
    written(tmp_path / "ledger", Net(make, **options))
    assert len(taken) == dots * STEPS
