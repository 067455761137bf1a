"""check_per_sample_gradients: what agrees, what differs and why, and that nothing is left behind."""

from __future__ import annotations

import copy
import dataclasses
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample import ParameterCheck, VerificationReport, check_per_sample_gradients, mark_samples
from lightning_persample.errors import OptionError, PerSampleError
from lightning_persample.gradients import Dense
from lightning_persample.reference.verify import PENALTY, default_tolerance
from lightning_persample.rules import registry
from tests.in_turn import in_turn
from tests.models import MODELS, OddShapes

B = 6


def network(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 4), *(between or (nn.Tanh(),)), nn.Linear(4, 3))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(B, 5), torch.randint(0, 3, (B,))


def mean_loss(module, batch):
    return F.cross_entropy(module(batch[0]), batch[1])


def sum_loss(module, batch):
    return F.cross_entropy(module(batch[0]), batch[1], reduction="sum")


def reason_of(report: VerificationReport, count: int, status: str = "differs") -> str:
    """The one reason of the `count` parameters with this status; all others agree."""
    assert not report
    assert not report.reason
    assert len(report.named(status)) == count
    assert len(report.named("agrees")) == len(report.parameters) - count
    (reason,) = {row.reason for row in report.named(status)}
    assert f"\n[1] {reason}" in str(report)
    return reason


@pytest.mark.parametrize(("name", "dtype"), in_turn(MODELS, [torch.float64, torch.float32, torch.bfloat16]))
def test_common_models_agree(name, dtype):
    torch.manual_seed(1)
    model = MODELS[name](dtype=dtype)
    report = check_per_sample_gradients(model.module, model.make_batch(B), lambda m, b: model.loss_fn(m, *b))
    assert report, str(report)
    assert report.samples == 4
    assert {row.status for row in report.parameters} == {"agrees"}
    assert [row.name for row in report.parameters] == [name for name, _ in model.module.named_parameters()]
    assert report.tolerance == {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 1e-1}[dtype]
    assert dtype != torch.float64 or max(row.error for row in report.parameters) < 1e-11


@pytest.mark.parametrize("inside", [False, True], ids=["", "penalty"])
def test_numbers_and_complex_weights_are_compared(inside):
    module = OddShapes().double()

    def loss(module, batch):
        return mean_loss(module, batch) + (module.scale.square() if inside else 0.0)

    data = (torch.randn(B, 5, dtype=torch.float64), torch.randint(0, 3, (B,)))
    report = check_per_sample_gradients(module, data, loss)
    assert report, str(report)
    assert {row.status for row in report.parameters} == {"agrees"}
    assert all(row.error < 1e-11 or row.reason == PENALTY for row in report.parameters)
    assert not check_per_sample_gradients(module, data, loss, loss_reduction="sum")


def test_the_report_prints_as_a_table():
    rows = (
        ParameterCheck("layer.weight", 1.234e-8, "agrees"),
        ParameterCheck("b", 2.0, "differs", "two"),
        ParameterCheck("c", float("nan"), "missing", "one"),
        ParameterCheck("d", 3.0, "differs", "two"),
    )
    assert str(VerificationReport(rows, 4, 1e-3)).splitlines() == [
        "Per-sample gradients of 4 samples, compared with the one-sample loop (tolerance 1e-03): "
        "1 of 4 parameters agree",
        "parameter     largest relative error  status   reason",
        "------------  ----------------------  -------  ------",
        "layer.weight  1.2e-08                 agrees",
        "b             2.0e+00                 differs  [1]",
        "c             -                       missing  [2]",
        "d             3.0e+00                 differs  [1]",
        "[1] two",
        "[2] one",
    ]
    assert VerificationReport(rows[:1], 4, 1e-3)
    assert not VerificationReport(rows[:1], 4, 1e-3, "no")
    assert not VerificationReport(rows[2:3], 4, 1e-3)


@pytest.mark.parametrize(
    ("loss_fn", "given", "fitting", "factor"),
    [(sum_loss, "mean", "sum", "4"), (mean_loss, "sum", "mean", "0.25")],
)
def test_a_reduction_that_does_not_fit_is_named_with_the_one_that_does(loss_fn, given, fitting, factor):
    module, data = network(), batch()
    report = check_per_sample_gradients(module, data, loss_fn, loss_reduction=given)
    assert reason_of(report, 4) == (
        f"every value of the engine is {factor} times the loop's: loss_reduction='{given}' does not fit the loss, "
        f"loss_reduction='{fitting}' does"
    )
    assert check_per_sample_gradients(module, data, loss_fn, loss_reduction=fitting)


def test_another_factor_is_named_with_the_weight():
    report = check_per_sample_gradients(network(), batch(), lambda m, b: sum_loss(m, b) / len(b[0]) ** 0.5)
    assert reason_of(report, 4) == (
        "every value of the engine is 2 times the loop's: loss_reduction='mean' does not fit the loss, nor does "
        "another name; give a function (outputs, batch) that returns each sample's weight in the loss, here 0.5"
    )


def weigh(outputs, batch):
    return (1.0 + batch[1]) / (1.0 + batch[1]).sum()


def weighted_loss(module, batch):
    losses = F.cross_entropy(module(batch[0]), batch[1], reduction="none")
    return {"loss": (weigh(None, batch) * losses).sum()}


def test_unequal_weights_are_named():
    module, data = network(), (torch.randn(B, 5), torch.tensor([0, 1, 2, 0, 1, 2]))
    report = check_per_sample_gradients(module, data, weighted_loss)
    assert reason_of(report, 4).startswith(
        "each sample's gradient is off by a factor of its own (0.5714, 1.143, 1.714, 0.5714): the samples weigh "
        "unequally in the loss, and not equally as loss_reduction='mean' says; give a function (outputs, batch) as "
        "loss_reduction that returns each sample's weight in the loss"
    )
    assert check_per_sample_gradients(module, data, weighted_loss, loss_reduction=weigh)
    report = check_per_sample_gradients(module, data, weighted_loss, loss_reduction=lambda o, b: 1.0 + b[1])
    assert reason_of(report, 4) == (
        "each sample's gradient is off by a factor of its own (0.1429, 0.2857, 0.4286, 0.1429): the weights that "
        "loss_reduction returns are not those of the samples in the loss"
    )
    report = check_per_sample_gradients(module, data, mean_loss, loss_reduction=lambda o, b: torch.ones(len(b[1])))
    assert reason_of(report, 4) == (
        "every value of the engine is 0.25 times the loop's: the weights that loss_reduction returns are not those of "
        "the samples in the loss"
    )


def test_a_sample_without_targets_is_no_difference():
    targets = torch.tensor([[0, 1], [-100, -100], [2, -100], [1, 1]])

    def loss_fn(module, batch):
        return F.cross_entropy(module(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")

    data = torch.randn(4, 2, 5), targets
    assert check_per_sample_gradients(network(), data, loss_fn, loss_reduction="sum")
    report = check_per_sample_gradients(network(), data, loss_fn)
    assert "loss_reduction='sum' does" in reason_of(report, 4)


def test_batch_normalization_is_explained():
    layers = nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(6, 3)
    module, data = nn.Sequential(*layers), batch()
    assert reason_of(check_per_sample_gradients(module, data, mean_loss), 6).startswith(
        "samples influence each other, so a sample in its batch and the same sample alone have different gradients; "
        "the engine gives each sample's contribution to the batch's gradient: `batch_norm` on (4, 2, 3)"
    )
    assert check_per_sample_gradients(module.eval(), data, mean_loss)


def test_a_layer_that_fails_on_one_sample_is_explained():
    report = check_per_sample_gradients(network(nn.BatchNorm1d(4)), batch(), mean_loss)
    assert not report
    assert isinstance(report.failure, ValueError)
    assert report.reason.startswith(
        "running the loss on sample 0 alone failed with ValueError: Expected more than 1 value per channel when "
        "training, got input size torch.Size([1, 4]); samples influence each other: `batch_norm` on (4, 4)"
    )
    assert {row.status for row in report.parameters} == {"not compared"}
    assert str(report).startswith(
        f"Per-sample gradients could not be compared with the one-sample loop: {report.reason}\n"
    )


class NumpyNoise(nn.Module):
    def forward(self, x):
        return x * torch.from_numpy(np.random.rand(*x.shape)).to(x)


class PythonNoise(nn.Module):
    def forward(self, x):
        return x * torch.tensor([[random.random()] for _ in x])


class Noise(nn.Module):
    def forward(self, x):
        return x * torch.rand_like(x)


def test_dropout_has_probability_0_in_the_check():
    class Drops(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5, self.training)

    module, data = network(nn.Dropout(0.5), Drops()), batch()
    random_state = torch.get_rng_state()
    report = check_per_sample_gradients(module, data, mean_loss)
    assert [row.status for row in report.parameters] == ["agrees"] * 4
    assert (module[1].p, module.training) == (0.5, True)
    assert torch.equal(torch.get_rng_state(), random_state)


class Permuted(nn.Module):
    def forward(self, x):
        return x + torch.randperm(len(x))[:, None]


class MoreForOne(nn.Module):
    """Draws as many numbers for one sample as for four."""

    def forward(self, x):
        return x * torch.rand(4, 1)[: len(x)].roll(1, 0) * torch.rand(len(x) + 1, 1)[1:]


class Drawn(nn.Module):
    """Draws in every way: for all samples together, along another axis, in place, in torch's Python functions."""

    def forward(self, x):
        x = x + torch.randn(1) + torch.randn(3, len(x), 1).mean(0) + torch.empty(len(x), 1).uniform_()
        x = x * torch.distributions.Normal(x, x.exp()).rsample() + torch.normal(x.detach(), 0.5)
        return x * F.gumbel_softmax(x, dim=1) + torch.bernoulli(x.sigmoid().detach())


@pytest.mark.parametrize("layer", [Noise(), Drawn()], ids=["noise", "every way"])
def test_a_sample_alone_draws_what_it_drew_in_the_batch(layer):
    module, data = network(layer).double(), [each.double() if each.is_floating_point() else each for each in batch()]
    report = check_per_sample_gradients(module, data, mean_loss)
    assert [row.status for row in report.parameters] == ["agrees"] * 4
    assert max(row.error for row in report.parameters) < 1e-12
    report = check_per_sample_gradients(module, data, mean_loss, loss_reduction="sum")
    assert "loss_reduction='mean' does" in reason_of(report, 4, "differs")


@pytest.mark.parametrize(
    "layer", [NumpyNoise(), PythonNoise(), Permuted(), MoreForOne()], ids=["numpy", "python", "permuted", "more"]
)
def test_random_numbers_are_explained(layer):
    module, data = network(layer), batch()
    report = check_per_sample_gradients(module, data, mean_loss)
    assert str(report).splitlines()[0] == (
        "Per-sample gradients of 4 samples, compared with the one-sample loop (tolerance 1e-03): 0 of 0 parameters "
        "agree, 4 could not be compared"
    )
    assert reason_of(report, 4, "not compared") == (
        "the loss changes with the random seed, by numbers that are not drawn by torch with one row for each sample: a "
        "batch and a single sample cannot draw the same, so the two cannot be compared; draw them by torch, or check "
        "with noise that comes with the batch, one row per sample"
    )


def test_a_penalty_on_the_parameters_belongs_to_no_sample():
    module = network()

    def loss_fn(module, batch):
        return mean_loss(module, batch) + module[0].weight.square().sum()

    report = check_per_sample_gradients(module, batch(), loss_fn)
    assert report
    assert {row.name: row.reason for row in report.parameters if row.reason} == {"0.weight": PENALTY}
    assert max(row.error for row in report.parameters) < 1e-5
    same = tuple(tensor[:1].expand(4, *tensor.shape[1:]) for tensor in batch())
    assert not check_per_sample_gradients(module, same, loss_fn)  # equal samples: nothing can be told


class OwnMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(OwnMatmul.apply(x, self.weight).tanh())


def test_what_the_engine_cannot_follow_is_missing_with_its_reason():
    report = check_per_sample_gradients(Hidden(), batch(), mean_loss)
    assert "OwnMatmul.apply" in reason_of(report, 1, "missing")
    assert report.parameters[0].name == "weight"


def test_a_rule_that_is_wrong_is_found(monkeypatch):
    rule = registry.find_rule(F.linear)

    def wrong(call, grad_output):
        found = rule.function(call, grad_output)
        return {**found, "weight": Dense(found["weight"].dense().roll(1, dims=2))}

    monkeypatch.setitem(registry._RULES, rule.op, dataclasses.replace(rule, function=wrong))
    assert reason_of(check_per_sample_gradients(network(), batch(), mean_loss), 2) == (
        "no cause was found: a fault of lightning_persample or of a registered rule, please report it"
    )


def test_frozen_and_unused_parameters():
    module = network()
    module[0].bias.requires_grad_(False)
    report = check_per_sample_gradients(module, batch(), lambda m, b: m[0](b[0]).square().mean())
    assert report
    assert [(row.name, row.status) for row in report.parameters] == [
        ("0.weight", "agrees"),
        ("2.weight", "unused"),
        ("2.bias", "unused"),
    ]


def test_a_batch_axis_that_the_tensors_do_not_share_is_said_with_the_one_they_share():
    report = check_per_sample_gradients(network(), batch(), mean_loss, batch_dim=1)
    assert report.reason.endswith(
        "all tensors of the batch have size 6 along axis 0: are the samples there (batch_dim=0, not 1)?"
    )
    assert (
        "do not agree on a number of samples along axis 1 (batch_dim=1): batch[0]: (6, 5), batch[1]: (6,)"
        in report.reason
    )
    assert (report.samples, {row.status for row in report.parameters}) == (0, {"not compared"})


def test_a_batch_axis_on_which_the_loss_fails_is_said():
    data = torch.randn(B, 5), torch.randn(B, 5)
    report = check_per_sample_gradients(network(), data, lambda m, b: m(b[0]).square().mean(), batch_dim=1)
    assert report.reason == (
        "running the loss on the first 4 samples failed with RuntimeError: mat1 and mat2 shapes cannot be multiplied "
        "(6x4 and 5x4); all tensors of the batch have size 6 along axis 0: are the samples there (batch_dim=0, not 1)?"
    )


def test_time_major_batches_and_batch_sizes():
    module = nn.GRU(5, 4)
    data = {"x": torch.randn(7, B, 5), "state": torch.randn(1, B, 4)}

    def loss_fn(module, batch):
        return module(batch["x"], batch["state"])[0].square().mean()

    assert check_per_sample_gradients(module, data, loss_fn, batch_dim=1)
    rows = torch.randn(3 * B, 5), torch.randn(B)

    def rows_loss(module, batch):
        return (module(mark_samples(batch[0])).sum(1).unflatten(0, (-1, 3)).sum(1) * batch[1]).mean()

    assert check_per_sample_gradients(network(), rows, rows_loss, batch_size=B, samples=2)


def test_samples_that_have_no_part_in_the_loss_are_left_out():
    def loss_of_some(module, batch, reduction="mean"):
        is_in = batch[1] != 1
        return F.cross_entropy(module(batch[0])[is_in], batch[1][is_in], reduction=reduction)

    data = torch.randn(4, 5), torch.tensor([0, 1, 2, 1])
    report = check_per_sample_gradients(network(), data, loss_of_some)
    assert report, str(report)
    report = check_per_sample_gradients(network(), data, loss_of_some, loss_reduction="sum")
    assert "loss_reduction='mean' does" in reason_of(report, 4)
    report = check_per_sample_gradients(network(), data, lambda module, batch: loss_of_some(module, batch, "sum"))
    assert "loss_reduction='sum' does" in reason_of(report, 4)


def test_samples_that_the_batch_selects_are_not_compared():
    def loss_of_the_worse_half(module, batch):
        losses = F.cross_entropy(module(batch[0]), batch[1], reduction="none")
        return losses.topk(len(losses) // 2).values.mean()  # of one sample alone none

    report = check_per_sample_gradients(network(), batch(), loss_of_the_worse_half)
    assert reason_of(report, 4, "not compared") == "of the 4 samples compared, the loss takes 2 alone"


def test_a_loss_that_is_infinite_is_not_compared():
    def loss_fn(module, batch):
        return (module(batch[0]).sum(1) / (batch[1] - batch[1][:1])).mean()

    report = check_per_sample_gradients(network(), (torch.randn(4, 5), torch.arange(4.0)), loss_fn)
    assert {row.status for row in report.parameters} == {"not compared"}
    assert reason_of(report, 4, "not compared") == "some of its gradients are infinite or not a number"


class Step(nn.Module):
    """A training step that logs, counts and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network(nn.Dropout(0.0))
        self.register_buffer("steps", torch.zeros(1))
        self.seen: list[int] = []

    def training_step(self, batch, batch_idx):
        self.steps += 1
        self.seen.append(batch_idx)
        batch[0].add_(torch.rand(1) * 0)
        return {"loss": mean_loss(self.network, batch)}

    def with_batch_only(self, batch):
        return self.training_step(batch, 7)


@pytest.mark.parametrize("method", ["training_step", "with_batch_only"])
def test_a_training_step_is_checked_and_nothing_is_left_behind(method):
    module, data = Step(), batch()
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    module.network[1].eval()
    before, inputs = copy.deepcopy(module.state_dict()), data[0].clone()
    grads = [parameter.grad for parameter in module.parameters()]
    states = torch.get_rng_state(), random.getstate()
    assert check_per_sample_gradients(module, data, getattr(module, method))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is grad and bool((grad == 3).all()) for p, grad in zip(module.parameters(), grads, strict=True))
    assert (module.seen, module.training, module.network[1].training) == ([], True, False)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert torch.equal(data[0], inputs)
    assert not any(hasattr(parameter, "grad_sample") for parameter in module.parameters())


def test_autocast_counts_as_low_precision():
    with torch.autocast("cpu", torch.bfloat16):
        report = check_per_sample_gradients(network(), batch(), mean_loss)
    assert report
    assert report.tolerance == 1e-1
    assert check_per_sample_gradients(network(), batch(), mean_loss, tolerance=0.5).tolerance == 0.5
    assert default_tolerance({torch.float32}, torch.device("cuda")) == 1e-2


@pytest.mark.parametrize(
    ("outputs", "found"),
    [
        (None, "NoneType"),
        (torch.ones(3), "a tensor of shape (3,)"),
        (torch.ones(()), "a tensor that needs no gradient"),
        ({"other": 1}, "NoneType"),
    ],
)
def test_a_loss_that_cannot_be_used_is_said(outputs, found):
    with pytest.raises(PerSampleError) as error:
        check_per_sample_gradients(network(), batch(), lambda m, b: outputs)
    assert str(error.value) == (
        f"loss_fn returned {found}, but it must return the loss of the batch: a tensor with one entry that needs "
        "gradient, or a mapping that holds it as 'loss'"
    )


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("samples", 1, "an int >= 2"),
        ("samples", 2.0, "an int >= 2"),
        ("loss_reduction", "none", "'mean', 'sum', or a callable (outputs, batch) -> Tensor of shape (B,)"),
        ("batch_dim", -1, "an int >= 0"),
        ("batch_size", 0, "None or an int >= 1"),
        ("tolerance", 0.0, "None or a number > 0"),
        ("tolerance", "small", "None or a number > 0"),
    ],
)
def test_a_value_that_is_not_allowed_raises(option, value, allowed):
    with pytest.raises(OptionError) as error:
        check_per_sample_gradients(network(), batch(), mean_loss, **{option: value})
    assert str(error.value) == f"{option}={value!r} is not allowed: {option} must be {allowed}"


def test_a_tensor_of_weights_is_refused_by_its_shape():
    with pytest.raises(
        OptionError, match=r"loss_reduction=a tensor of shape \(4,\) and dtype torch.float32 is not allowed"
    ):
        check_per_sample_gradients(network(), batch(), mean_loss, loss_reduction=torch.ones(4))
