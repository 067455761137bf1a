"""Noise scale, diversity, cosines and signal to noise, beside NumPy on gradients of a one-sample loop."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from lightning_persample.callbacks import PerSampleGradientMonitor
from lightning_persample.callbacks.statistics import CapturedBatch, LoggedMetrics, SampleMean, StepGradient, StepNorms
from lightning_persample.errors import PerSampleWarning
from lightning_persample.metrics import GradientDiversity
from tests.callbacks import known_noise_scale
from tests.callbacks.runs import CLASSES, FEATURES, Classifier, as_loader, fit, loader, logged, make_trainer, of_norms
from tests.callbacks.step_statistics import ALL, DECAY, WithGradients, check, expected, terms, windows
from tests.in_turn import in_turn
from tests.processes import run_ranks


@pytest.mark.parametrize("quantiles", [(0.5, 0.95), ()])
def test_an_epoch_of_many_steps_has_the_norms_of_all(quantiles):
    statistics, norms = LoggedMetrics("", (), quantiles, ()), np.random.default_rng(0).lognormal(size=(150, 7))
    norms[[3, 100], [0, 6]] = math.inf, math.nan
    for row in torch.from_numpy(norms):
        captured = CapturedBatch(7, torch.stack([row, torch.ones(7)]), 1.0)
        finite = row[row.isfinite()]
        wanted = of_norms(finite, quantiles) | {"nonfinite": len(row) - len(finite), "coverage": 1.0}
        assert statistics.of_step(StepNorms.of_window([captured], ())) == pytest.approx(wanted)
    wanted = of_norms(torch.from_numpy(norms[np.isfinite(norms)]), quantiles) | {"nonfinite": 2.0}
    assert statistics.of_epoch() == pytest.approx({f"{name}_epoch": value for name, value in wanted.items()})
    statistics.start_epoch()
    assert statistics.of_epoch() == {}


def test_an_epoch_of_many_steps_has_the_ratios_of_all():
    rng, statistics = np.random.default_rng(0), LoggedMetrics("", ALL[:2], (), ())
    norms = rng.lognormal(size=(150, 7))
    norms[3, 0] = math.nan  # a step that does not count
    squares = (norms**2).mean(1)
    means = squares * rng.uniform(0.3, 1, size=150)
    for row, mean in zip(norms, means.tolist(), strict=True):
        captured = CapturedBatch(7, torch.from_numpy(np.stack([row, np.ones(7)])), 1.0)
        gradient = StepGradient(SampleMean(7, 1 / 7, 1.0, (), (mean,)), "", (1.0, mean))
        statistics.of_step(StepNorms.of_window([captured], (), gradient))
    S, found = 7 / 6 * (squares - means), statistics.of_epoch()
    assert found["noise_scale_epoch"] == pytest.approx(np.nanmean(S) / np.nanmean(means - S / 7), rel=1e-12)
    assert found["diversity_epoch"] == pytest.approx(np.nanmean(squares / 7 / means), rel=1e-12)


@pytest.mark.parametrize(("reduction", "accumulate"), in_turn(["mean", "sum"], [3, 1, 2]))
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
        S, G2 = np.average([terms(grads) for grads in batches], axis=0, weights=[len(grads) for grads in batches])
        each = expected(batches)
        wanted = of_norms(torch.from_numpy(np.linalg.norm(np.concatenate(batches), axis=1)))
        wanted["noise_scale"] = S / G2 if G2 > 0 else math.nan
        wanted |= {name: np.mean([one[name] for one in each]) for name in ALL[1:]}
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


def test_a_norm_whose_square_leaves_the_range_of_its_dtype_leaves_its_step_out(tmp_path):
    class Mean(Classifier):  # whose samples' gradients are their inputs
        def __init__(self):
            super().__init__()
            self.network = nn.Linear(FEATURES, 1, bias=False)

        def training_step(self, batch, batch_idx):
            return self.network(batch[0]).mean()

    torch.manual_seed(0)
    x = torch.randn(256, FEATURES)
    x[3] *= 1e20  # of which the mean gradient, and its square, are finite
    data = as_loader([(part,) for part in x.split(64)])
    statistics = ("noise_scale", "diversity", "cosine_to_mean")
    trainer = fit(Mean(), [PerSampleGradientMonitor(statistics=statistics)], tmp_path, data)
    first, *rest = logged(trainer)
    assert math.isfinite(first["per_sample_grad/norm_of_mean"])
    assert (first["per_sample_grad/nonfinite"], first["per_sample_grad/coverage"]) == (1.0, 1.0)
    grads = [part.double().numpy() for part in x.split(64)]
    for row, step in zip([first, *rest], [None, *expected(grads[1:])], strict=True):
        for name in ("noise_scale", "diversity"):
            value = math.nan if step is None else step[name]
            assert row[f"per_sample_grad/{name}"] == pytest.approx(value, rel=1e-4, nan_ok=True), name
    (epoch,) = logged(trainer, epochs=True)
    own = np.mean([step["diversity"] for step in expected(grads[1:])])
    assert epoch["per_sample_grad/diversity_epoch"] == pytest.approx(own, rel=1e-4)


def test_the_diversity_of_an_epoch_leaves_out_a_step_of_one_sample_as_the_metric_does(tmp_path):
    module = WithGradients().double()
    trainer = fit(module, [PerSampleGradientMonitor()], tmp_path, loader(17, 8), precision="64-true")
    (epoch,), metric = logged(trainer, epochs=True), GradientDiversity()
    for grads in map(torch.from_numpy, module.batches):
        metric.update(grads.square().sum(1), grads.mean(0).square().sum())
    own = np.mean([step["diversity"] for step in expected(module.batches[:2])])
    assert [len(grads) for grads in module.batches] == [8, 8, 1]
    assert metric.compute().item() == pytest.approx(own)
    assert epoch["per_sample_grad/diversity_epoch"] == pytest.approx(own)


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
        def on_train_batch_start(self, batch, batch_idx):
            if not self.batches:  # all are the same
                super().on_train_batch_start(batch, batch_idx)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.0)

    module = Stays().double()
    (batch,) = list(loader(16, 16))
    data = as_loader([(batch[0].double(), batch[1])] * 100)
    trainer = fit(module, [PerSampleGradientMonitor(max_samples=8)], tmp_path, data, precision="64-true")
    rows = logged(trainer)
    whole = expected(module.batches[:1])[0] | {"norm_mean": np.linalg.norm(module.batches[0], axis=1).mean()}
    for name in ("norm_mean", "diversity"):
        values = np.array([row[f"per_sample_grad/{name}"] for row in rows])
        assert abs(values.mean() - whole[name]) < 4 * values.std() / math.sqrt(len(values)), name


@pytest.mark.parametrize(
    ("ranks", "accumulate"),
    [(2, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 4), (1, 1), (2, 1)))],
)
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


@pytest.mark.parametrize("sizes", [(2, 0, 3, 0), (0, 2, 0, 3), (2, 0, 0, 3), (0, 0, 2, 3)])
def test_a_batch_without_samples_is_a_part_of_its_step(sizes, tmp_path):
    class Masked(WithGradients):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.network(batch[0]), batch[1], reduction="sum") / max(len(batch[0]), 1)

        def on_train_batch_start(self, batch, batch_idx):
            if len(batch[0]):
                super().on_train_batch_start(batch, batch_idx)
            else:
                self.batches.append(np.zeros((0, sum(parameter.numel() for parameter in self.parameters()))))

    torch.manual_seed(3)
    data = as_loader([(torch.randn(n, FEATURES).double(), torch.randint(CLASSES, (n,))) for n in sizes])
    module = Masked().double()
    with pytest.warns(PerSampleWarning, match="the batch is empty") as caught:
        trainer = fit(module, [PerSampleGradientMonitor()], tmp_path, data, accumulate_grad_batches=2)
    assert len([each for each in caught if each.category is PerSampleWarning]) == 1
    steps = [step for step in windows(module.batches, 2) if len(step)]
    if all(len(step) in (2, 3) for step in steps):  # of one size each
        check(trainer, steps)
    assert len(logged(trainer)) == len(steps)
    for row, step in zip(logged(trainer), steps, strict=True):
        assert row["per_sample_grad/norm_max"] == pytest.approx(np.linalg.norm(step, axis=1).max())
