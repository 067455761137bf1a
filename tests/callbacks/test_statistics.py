"""Noise scale, diversity, cosines and signal to noise, beside NumPy on gradients of a one-sample loop."""

from __future__ import annotations

import csv
import math
import re
import warnings

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from lightning_persample.callbacks import PerSampleGradientMonitor
from lightning_persample.errors import PerSampleWarning
from tests.callbacks import known_noise_scale
from tests.callbacks.runs import CLASSES, FEATURES, Classifier, as_loader, fit, loader, logged, make_trainer
from tests.processes import run_ranks

ALL = ("noise_scale", "diversity", "cosine_to_mean", "signal_to_noise")
DECAY = 0.95


class WithGradients(Classifier):
    """Computes every sample's own gradient, over all parameters in a row, before the training step sees the batch."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.batches: list[np.ndarray] = []

    def on_train_batch_start(self, batch, batch_idx):
        inputs, labels = batch
        rows = []
        for i in range(len(inputs)):
            loss = F.cross_entropy(self.network(inputs[i : i + 1]), labels[i : i + 1])
            grads = torch.autograd.grad(loss, list(self.parameters()))
            rows.append(torch.cat([grad.flatten() for grad in grads]).double().numpy())
        self.batches.append(np.stack(rows))


def terms(grads: np.ndarray) -> tuple[float, float]:
    B = len(grads)
    mean = grads.mean(0)
    S = B / (B - 1) * ((grads**2).sum(1).mean() - (mean**2).sum())
    return S, (mean**2).sum() - S / B


def expected(steps: list[np.ndarray], columns: slice = slice(None)) -> list[dict[str, float]]:
    """What is logged of optimizer steps on these samples' gradients (samples, entries)."""
    found, S, G2 = [], 0.0, 0.0
    for grads in steps:
        grads = grads[:, columns]
        own = terms(grads)
        S, G2 = DECAY * S + len(grads) * own[0], DECAY * G2 + len(grads) * own[1]
        mean = grads.mean(0)
        cosines = grads @ mean / np.linalg.norm(grads, axis=1) / np.linalg.norm(mean)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = mean**2 / grads.var(0, ddof=1)
        found.append({
            "norm_of_mean": np.linalg.norm(mean),
            "noise_scale": S / G2 if G2 > 0 else math.nan,
            "diversity": (grads**2).sum() / (grads.sum(0) ** 2).sum(),
            "cosine_to_mean": cosines.mean(),
            "cosine_to_mean_min": cosines.min(),
            "signal_to_noise": ratios[np.isfinite(ratios)].mean(),
        })  # fmt: skip
    return found


def check(trainer, steps: list[np.ndarray], rtol: float = 1e-9, prefix: str = "per_sample_grad", **columns) -> None:
    rows = logged(trainer)
    wanted = expected(steps, **columns)
    assert len(rows) == len(wanted)
    for row, values in zip(rows, wanted, strict=True):
        for name, value in values.items():
            if f"{prefix}/{name}" in row:
                assert row[f"{prefix}/{name}"] == pytest.approx(value, rel=rtol, nan_ok=True), name


def windows(batches: list[np.ndarray], accumulate: int) -> list[np.ndarray]:
    return [np.concatenate(batches[start : start + accumulate]) for start in range(0, len(batches), accumulate)]


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_statistic(reduction, accumulate, tmp_path):
    module = WithGradients(reduction=reduction).double()
    monitor = PerSampleGradientMonitor(loss_reduction=reduction, statistics=ALL)
    settings = {"accumulate_grad_batches": accumulate, "max_epochs": 2, "precision": "64-true"}
    trainer = fit(module, [monitor], tmp_path, loader(56), **settings)
    check(trainer, [step for epoch in (module.batches[:7], module.batches[7:]) for step in windows(epoch, accumulate)])


def test_an_epoch_has_those_of_all_its_steps(tmp_path):
    module = WithGradients().double()
    settings = {"max_epochs": 2, "precision": "64-true"}
    trainer = fit(module, [PerSampleGradientMonitor(statistics=ALL)], tmp_path, loader(40), **settings)
    rows = logged(trainer, epochs=True)
    assert [row["step"] for row in rows] == [4, 9]
    for row, batches in zip(rows, (module.batches[:5], module.batches[5:]), strict=True):
        norms = np.linalg.norm(np.concatenate(batches), axis=1)
        S, G2 = np.average([terms(grads) for grads in batches], axis=0, weights=[len(grads) for grads in batches])
        each = expected(batches)
        wanted = {
            "norm_mean": norms.mean(), "norm_std": norms.std(ddof=1), "norm_min": norms.min(), "norm_max": norms.max(),
            "norm_p50": np.quantile(norms, 0.5), "norm_p95": np.quantile(norms, 0.95), "nonfinite": 0.0,
            "noise_scale": S / G2 if G2 > 0 else math.nan,
            **{name: np.mean([one[name] for one in each]) for name in ALL[1:]},
        }  # fmt: skip
        found = {name: value for name, value in row.items() if name.endswith("_epoch")}
        assert found == pytest.approx({f"per_sample_grad/{name}_epoch": v for name, v in wanted.items()}, nan_ok=True)
        assert {n for n in trainer.callback_metrics if n.endswith("_epoch")} == set(found)


def test_groups_have_their_own(tmp_path):
    module = WithGradients().double()
    monitor = PerSampleGradientMonitor(statistics=ALL, per_layer=2)
    trainer = fit(module, [monitor], tmp_path, loader(40), precision="64-true")
    first = FEATURES * 8 + 8
    for prefix, columns in (("network.0", slice(first)), ("network.2", slice(first, None))):
        rows, wanted = logged(trainer), expected(module.batches, columns)
        for row, values in zip(rows, wanted, strict=True):
            for name in ("noise_scale", "diversity", "signal_to_noise"):
                found = row[f"per_sample_grad/{prefix}/{name}"]
                assert found == pytest.approx(values[name], rel=1e-9, nan_ok=True)


def test_clipping_and_what_the_module_does_to_gradients_come_later(tmp_path):
    class Changes(WithGradients):
        def on_after_backward(self):
            for parameter in self.parameters():
                parameter.grad.mul_(5)

    module = Changes().double()
    settings = {"precision": "64-true", "gradient_clip_val": 0.01}
    trainer = fit(module, [PerSampleGradientMonitor(statistics=ALL)], tmp_path, loader(40), **settings)
    check(trainer, module.batches)


def test_the_loss_scale_and_a_factor_of_the_users_are_not_left_in(tmp_path):
    class Triples(WithGradients):
        def backward(self, loss):
            (3 * loss).backward()

    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    module = Triples()
    plugin = MixedPrecision("bf16-mixed", "cpu")
    plugin.scaler = scaler
    trainer = fit(module, [PerSampleGradientMonitor(statistics=ALL[:3])], tmp_path, loader(24), plugins=plugin)
    check(trainer, module.batches, rtol=0.1)


def test_gradients_that_zero_grad_left_as_zeros(tmp_path):
    class Zeros(WithGradients):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad(set_to_none=False)

    module = Zeros().double()
    trainer = fit(module, [PerSampleGradientMonitor(statistics=ALL)], tmp_path, loader(40), precision="64-true")
    check(trainer, module.batches)


def test_a_dead_parameter_and_a_frozen_one_have_no_part(tmp_path):
    class Parts(WithGradients):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(3, 3)
            self.network[0].weight.requires_grad_(False)

        def on_train_batch_start(self, batch, batch_idx):
            inputs, labels = batch
            used = [p for p in self.network.parameters() if p.requires_grad]
            rows = []
            for i in range(len(inputs)):
                grads = torch.autograd.grad(F.cross_entropy(self.network(inputs[i : i + 1]), labels[i : i + 1]), used)
                rows.append(torch.cat([grad.flatten() for grad in grads]).numpy())
            self.batches.append(np.stack(rows))

    module = Parts().double()
    trainer = fit(module, [PerSampleGradientMonitor(statistics=ALL)], tmp_path, loader(40), precision="64-true")
    check(trainer, module.batches)


UNKNOWN = {
    "penalty": (
        lambda self, x, y: F.cross_entropy(self.network(x), y) + self.network[0].weight.square().sum(),
        "the loss has a term that belongs to no sample, made of `network.0.weight`",
    ),
    "weights": (
        lambda self, x, y: F.cross_entropy(self.network(x), y, weight=torch.arange(1.0, 1 + CLASSES)),
        "the samples weigh unequally in the loss",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_where_the_mean_is_not_in_grad_it_is_absent_and_said_so(name, tmp_path):
    loss_fn, reason = UNKNOWN[name]

    class Other(Classifier):
        def training_step(self, batch, batch_idx):
            return loss_fn(self, *batch)

    weights = torch.arange(1.0, 1 + CLASSES)
    options = {"loss_reduction": lambda outputs, batch: weights[batch[1]] / weights[batch[1]].sum()}
    text = f"noise_scale, diversity of `per_sample_grad` are nan at steps where {reason}; statistics=() leaves them out"
    with pytest.warns(PerSampleWarning, match=re.escape(text)) as warned:
        trainer = fit(Other(), [PerSampleGradientMonitor(**(options if name == "weights" else {}))], tmp_path)
    assert sum(each.category is PerSampleWarning for each in warned) == 1
    for row in logged(trainer):
        assert math.isnan(row["per_sample_grad/noise_scale"])
        assert math.isnan(row["per_sample_grad/diversity"])
        assert row["per_sample_grad/norm_mean"] > 0


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


def test_one_sample_has_no_noise_scale(tmp_path):
    module = WithGradients().double()
    trainer = fit(module, [PerSampleGradientMonitor()], tmp_path, loader(3, 1), precision="64-true")
    rows = logged(trainer)
    assert all(math.isnan(row["per_sample_grad/noise_scale"]) for row in rows)
    assert [row["per_sample_grad/diversity"] for row in rows] == pytest.approx([1.0] * 3)


def test_a_sample_that_is_not_finite_leaves_its_step_out(tmp_path):
    x, y = torch.randn(24, FEATURES), torch.randint(CLASSES, (24,))
    x[3] = math.nan

    class Skips(WithGradients):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer_closure()  # such a gradient is not stepped with

    module = Skips().double()
    data = as_loader([(x[i : i + 8].double(), y[i : i + 8]) for i in (0, 8, 16)])
    trainer = fit(module, [PerSampleGradientMonitor()], tmp_path, data, precision="64-true")
    rows = logged(trainer)
    assert [row["per_sample_grad/nonfinite"] for row in rows] == [1.0, 0.0, 0.0]
    assert math.isnan(rows[0]["per_sample_grad/noise_scale"])
    wanted = expected(module.batches[1:])
    for row, values in zip(rows[1:], wanted, strict=True):
        assert row["per_sample_grad/noise_scale"] == pytest.approx(values["noise_scale"], nan_ok=True)


def test_the_noise_scale_goes_on_after_a_checkpoint(tmp_path):
    runs = []
    for epochs, resumed in ((2, False), (1, False), (2, True)):
        torch.manual_seed(0)
        checkpoint = tmp_path / "last.ckpt"
        monitor = PerSampleGradientMonitor()
        trainer = make_trainer([monitor], tmp_path / f"{epochs}{resumed}", max_epochs=epochs)
        trainer.fit(Classifier(), loader(), ckpt_path=checkpoint if resumed else None)
        if (epochs, resumed) == (1, False):
            trainer.save_checkpoint(checkpoint)
        runs.append([row["per_sample_grad/noise_scale"] for row in logged(trainer)])
    whole, first, second = runs
    assert [*first, *second] == pytest.approx(whole, nan_ok=True)


def test_engines_with_passes_of_their_own_leave_them_out(tmp_path):
    trainer = fit(Classifier(), [PerSampleGradientMonitor(engine="loop", statistics=ALL)], tmp_path)
    assert not any("noise_scale" in name or "cosine" in name for row in logged(trainer) for name in row)


@pytest.mark.parametrize("statistics", [(), ("diversity",), ("cosine_to_mean",), ("signal_to_noise", "noise_scale")])
def test_only_what_is_chosen_is_logged(statistics, tmp_path):
    trainer = fit(Classifier(), [PerSampleGradientMonitor(statistics=statistics)], tmp_path)
    found = {name.removeprefix("per_sample_grad/") for row in logged(trainer) for name in row}
    assert {name for name in ALL if name in found} == set(statistics)
    assert ("norm_of_mean" in found) == bool({"noise_scale", "diversity"} & set(statistics))


@pytest.mark.parametrize("engine", ["expanded", "loop"])
def test_some_of_the_samples_alone(engine, tmp_path):
    class Kept(PerSampleGradientMonitor):
        records = ()

        def on_per_sample_gradients(self, trainer, pl_module, record, batch, batch_idx):
            super().on_per_sample_gradients(trainer, pl_module, record, batch, batch_idx)
            self.records = (*self.records, record)

    module = WithGradients().double()
    monitor = Kept(max_samples=5, engine=engine)
    trainer = fit(module, [monitor], tmp_path, loader(44), precision="64-true")
    rows = logged(trainer)
    chosen = [record.samples for record in monitor.records]
    assert [len(each) if each is not None else None for each in chosen] == [5, 5, 5, 5, 5, None]
    assert len({tuple(each.tolist()) for each in chosen[:-1]}) > 1
    S = G2 = 0.0
    for row, grads, samples, record in zip(rows, module.batches, chosen, monitor.records, strict=True):
        part = grads if samples is None else grads[samples.numpy()]
        norms = np.linalg.norm(part, axis=1)
        np.testing.assert_allclose(record.norms().numpy(), norms)
        assert row["per_sample_grad/norm_mean"] == pytest.approx(norms.mean())
        assert record.batch_size == len(grads)
        assert record.sample_index is None or len(record.sample_index) == len(part)
        if engine == "loop":
            continue
        B, sq_mean = len(grads), (grads.mean(0) ** 2).sum()
        own = B / (B - 1) * ((norms**2).mean() - sq_mean)
        S, G2 = DECAY * S + B * own, DECAY * G2 + B * (sq_mean - own / B)
        assert row["per_sample_grad/noise_scale"] == pytest.approx(S / G2 if G2 > 0 else math.nan, nan_ok=True)
        assert row["per_sample_grad/diversity"] == pytest.approx((norms**2).mean() / B / sq_mean)


def test_choosing_samples_leaves_training_as_it_is():
    found = []
    for callbacks in ([], [PerSampleGradientMonitor(max_samples=3, statistics=ALL)]):
        torch.manual_seed(3)
        module = Classifier(nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES)))
        fit(module, callbacks, data=loader(40, shuffle=True), max_epochs=2)
        found.append([parameter.detach().clone() for parameter in module.parameters()] + [torch.rand(1)])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_estimates_from_some_of_the_samples_are_without_bias(tmp_path):
    """The mean over many choices is what the whole batch gives, within four standard errors."""

    class Stays(WithGradients):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.0)

    module = Stays().double()
    (batch,) = list(loader(16, 16))
    data = as_loader([(batch[0].double(), batch[1])] * 300)
    trainer = fit(module, [PerSampleGradientMonitor(max_samples=4)], tmp_path, data, precision="64-true")
    rows = logged(trainer)
    whole = expected(module.batches[:1])[0] | {"norm_mean": np.linalg.norm(module.batches[0], axis=1).mean()}
    for name in ("norm_mean", "diversity"):
        values = np.array([row[f"per_sample_grad/{name}"] for row in rows])
        assert abs(values.mean() - whole[name]) < 4 * values.std() / math.sqrt(len(values)), name


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 1), (1, 4), (2, 1), (2, 2)])
def test_the_noise_scale_of_a_known_problem(ranks, accumulate, tmp_path):
    """Within four standard errors, which are those of a ratio of means of what each step gives."""
    ended = run_ranks("tests.callbacks.known_noise_scale", str(tmp_path), str(accumulate), ranks=ranks)
    assert ended.codes == [0] * ranks, ended.outputs
    (file,) = tmp_path.rglob("metrics.csv")
    with file.open(newline="") as opened:
        rows = [{n.rpartition("/")[2]: float(v) for n, v in row.items() if v} for row in csv.DictReader(opened)]
    steps = [row for row in rows if "norm_of_mean" in row]
    (epoch,) = (row for row in rows if "noise_scale_epoch" in row)
    assert len(steps) == known_noise_scale.STEPS
    B = ranks * accumulate * known_noise_scale.BATCH_SIZE
    sq_mean = np.array([row["norm_of_mean"] ** 2 for row in steps])
    mean_sq = np.array([row["norm_std"] ** 2 * (B - 1) / B + row["norm_mean"] ** 2 for row in steps])
    S = B / (B - 1) * (mean_sq - sq_mean)
    G2 = sq_mean - S / B
    known = known_noise_scale.TRACE / known_noise_scale.SQ_NORM
    for values, wanted in ((S, known_noise_scale.TRACE), (G2, known_noise_scale.SQ_NORM)):
        assert abs(values.mean() - wanted) < 4 * values.std() / math.sqrt(len(values))
    error = (S - known * G2).std() / math.sqrt(len(S)) / G2.mean()
    assert error < 0.2 * known
    assert abs(epoch["noise_scale_epoch"] - known) < 4 * error


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
