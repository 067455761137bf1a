"""check_rule: right rules agree, and every kind of wrong rule is caught and named."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lightning_persample import Dense, Outer, check_rule
from lightning_persample.reference.check_rule import relative_error
from lightning_persample.rules import find_rule
from tests.capture.affine import B, affine, arguments, found, register, right

pytestmark = pytest.mark.usefixtures("own_rules")


BUILT_IN = {
    "linear": lambda: check_rule(F.linear, (torch.randn(B, 3), torch.randn(2, 3), torch.randn(2))),
    "linear, time first": lambda: check_rule(
        F.linear, {"input": torch.randn(5, B, 3), "weight": torch.randn(2, 3)}, batch_dim=1
    ),
    "matmul, complex": lambda: check_rule(
        torch.matmul, (torch.randn(B, 3, dtype=torch.complex64), torch.randn(3, 2, dtype=torch.complex64))
    ),
    "conv2d": lambda: check_rule(F.conv2d, (torch.randn(B, 2, 4, 4), torch.randn(3, 2, 3, 3), torch.randn(3))),
    "mul": lambda: check_rule(torch.mul, (torch.randn(B, 3), torch.randn(2, 1, 3)), weights=("other",)),
    "div": lambda: check_rule(torch.div, (torch.randn(3), torch.rand(B, 3) + 1), batched=("other",)),
    "embedding": lambda: check_rule(torch.embedding, (torch.randn(5, 3), torch.randint(0, 5, (B, 4)))),
    "layer_norm": lambda: check_rule(
        torch.layer_norm,
        (torch.randn(B, 4), (4,), torch.randn(4), torch.randn(4)),
        dtypes=(torch.float64, torch.float32, torch.bfloat16),
    ),
    "gru_cell": lambda: check_rule(
        torch.gru_cell, (torch.randn(B, 2), torch.randn(B, 3), *map(torch.randn, ((9, 2), (9, 3), 9, 9)))
    ),
    "lstm": lambda: check_rule(
        torch.lstm,
        (torch.randn(4, B, 2), [torch.randn(1, B, 3)] * 2, [*map(torch.randn, ((12, 2), (12, 3), 12, 12))],
         True, 1, 0.0, True, False, False),
        batch_dim=1, further_axis=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BUILT_IN)
def test_rules_of_this_package_agree(case: str):
    report = BUILT_IN[case]()
    assert report, str(report)


def test_the_ways_of_calling():
    register(right)
    report = check_rule(affine, arguments())
    assert report, str(report)
    assert list(dict.fromkeys(row.call for row in report.checks)) == [
        "6 samples",
        "3 samples of 2 rows",
        "2 samples of 3 rows",
        "1 sample",
        "3 samples, then 2 positions",
        "2 positions, then 3 samples",
        "3 samples of 2 rows, only weight",
        "3 samples of 2 rows, only bias",
        "3 samples of 2 rows, strided",
        "3 samples of 2 rows, float32",
        "expanded_weights, 6 samples",
        "expanded_weights, 3 samples of 2 rows",
        "expanded_weights, 2 samples of 3 rows",
        "expanded_weights, 3 samples, then 2 positions",
        "expanded_weights, 2 positions, then 3 samples",
    ]
    lines = str(report).splitlines()
    assert lines[0] == "The rule of 'affine', compared with a loop over single samples: 28 of 28 checks agree"
    assert lines[1].split() == ["call", "weight", "largest", "relative", "error", "status", "reason"]
    assert len(lines) == 3 + 28
    assert not any("position" in row.call for row in check_rule(affine, arguments(), further_axis=False).checks)


def test_ways_that_the_op_does_not_allow_are_named():
    report = BUILT_IN["conv2d"]()
    assert report.left_out == ("3 samples, then 2 positions", "2 positions, then 3 samples")
    assert str(report).endswith(
        "left out, because the op does not allow it: 3 samples, then 2 positions, 2 positions, then 3 samples"
    )


# wrong rule: (the calls in which it is caught, the status, the reason)
def wrong_values(call, grad):
    return {name: Dense(2 * value.dense()) for name, value in right(call, grad).items()}


def not_a_number(call, grad):
    return {name: Dense(value.dense() * float("nan")) for name, value in right(call, grad).items()}


def missing_bias(call, grad):
    return {name: value for name, value in right(call, grad).items() if name == "weight"}


def always_both(call, grad):
    x = call.arguments["x"]
    return {"weight": Dense((grad * x).flatten(1, -2).sum(1)), "bias": Dense(grad.flatten(1, -2).sum(1))}


def wrong_shape(call, grad):
    return {name: Dense(value.dense()[:, :1]) for name, value in right(call, grad).items()}


def one_row_only(call, grad):
    x = call.arguments["x"]
    return {
        name: Dense((grad * x if name == "weight" else grad)[(slice(None), *(0,) * (grad.dim() - 2))])
        for name in call.weights
    }


def averaged(call, grad):
    return {name: Dense(value.dense() / call.batch_size) for name, value in right(call, grad).items()}


def not_a_structure(call, grad):
    return {name: value.dense() for name, value in right(call, grad).items()}


def a_tuple(call, grad):
    return tuple(right(call, grad).values())


def a_tensor(call, grad):
    return grad


def writes(call, grad):
    grad.mul_(1)
    return right(call, grad)


def raises(call, grad):
    raise IndexError("no such row")


REMEDY = "Dense(...) around a tensor (samples, *shape of the weight) is one"
RETURNS = "a rule returns a dict with a structure (Dense, Outer, Indexed or Patches) for each argument asked for"
TWO, ALL = "3 samples of 2 rows", "6 samples"


@pytest.mark.parametrize(
    ("rule", "where", "status", "reason"),
    [
        (wrong_values, ALL, "differs", "every value of the gradients is 2 times the loop's"),
        (not_a_number, ALL, "differs", "the gradients hold values that are not finite"),
        (missing_bias, ALL, "missing", f"the rule gave nothing for bias, only for weight; {RETURNS}"),
        (a_tuple, ALL, "missing", f"the rule gave a tuple; {RETURNS}"),
        (a_tensor, ALL, "missing", f"the rule gave a Tensor; {RETURNS}"),
        (one_row_only, TWO, "differs", "the gradients are off by more than 1e-07"),
        (averaged, ALL, "differs", "every value of the gradients is 0.1667 times the loop's"),
        (
            writes,
            ALL,
            "differs",
            "the rule writes into grad_output[0], which belongs to the caller: write to a copy",
        ),
        (raises, ALL, "raised", "IndexError: no such row"),
    ],
)
def test_wrong_rules_are_caught(rule, where: str, status: str, reason: str):
    register(rule)
    report = check_rule(affine, arguments())
    assert found(report, status=status)[where] == {reason}


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (not_a_structure, f"the rule gave a Tensor for %s; {RETURNS}: {REMEDY}"),
        (wrong_shape, "the rule gave shape (6, 1) for %s, but (samples, *shape of the weight) is (6, 3)"),
    ],
)
def test_answers_of_another_form_are_caught_for_each_weight(rule, reason: str):
    register(rule)
    caught = found(check_rule(affine, arguments()), status="differs")[ALL]
    assert caught == {reason % "weight", reason % "bias"}


def test_a_rule_may_give_more_than_it_is_asked_for():
    register(always_both)
    report = check_rule(affine, arguments())
    assert report, str(report)


def test_the_error_shown_is_that_of_the_gradients():
    register(wrong_values)
    shown = {row.error for row in check_rule(affine, arguments(), dtypes=(torch.float64,)).checks}
    assert max(shown) == pytest.approx(1.0)
    assert min(shown) == pytest.approx(1.0)


def test_a_rule_for_one_row_agrees_where_a_sample_has_one():
    register(one_row_only)
    caught = found(check_rule(affine, arguments()), status="differs")
    assert ALL not in caught
    assert {TWO, "2 samples of 3 rows", f"expanded_weights, {TWO}", "3 samples, then 2 positions"} <= caught.keys()


def test_a_rule_that_scales_by_the_batch_is_right_for_one_sample():
    register(averaged)
    assert "1 sample" not in found(check_rule(affine, arguments()), status="differs")


def test_a_sample_whose_gradients_are_zero_does_not_fail_a_right_rule():
    @torch.overrides.wrap_torch_function(lambda x, weight, bias: (x, weight, bias))
    def gated(x, weight, bias):
        return torch.where(x[..., :1] > 0, x * weight, x + bias)

    def rule(call, grad):
        x = call.arguments["x"]
        off = torch.zeros_like(grad)
        return {
            "weight": Dense(torch.where(x[..., :1] > 0, grad * x, off).flatten(1, -2).sum(1)),
            "bias": Dense(torch.where(x[..., :1] > 0, off, grad).flatten(1, -2).sum(1)),
        }

    register(rule, gated)
    x, weight, bias = arguments()
    x[:, 0] = torch.tensor([-1.0, 1.0, 1.0, -1.0, -1.0, 1.0])
    report = check_rule(gated, (x, weight, bias))
    assert report, str(report)
    (row,) = report.named("not compared")
    assert (row.call, row.weight) == ("1 sample", "weight")
    x[:, 0] = -1
    assert {row.weight for row in check_rule(gated, (x, weight, bias)).named("not compared")} == {"weight"}
    assert not check_rule(gated, (x, weight, bias))


def test_a_sample_alone_is_one_that_proves_something():
    @torch.overrides.wrap_torch_function(lambda x, weight, bias: (x, weight, bias))
    def rectified(x, weight, bias):
        return (x * weight + bias).relu()

    def rule(call, grad):
        a = call.arguments
        return right(call, grad * (a["x"] * a["weight"] + a["bias"] > 0))

    register(rule, rectified, reads=("x", "weight", "bias"))
    x = torch.tensor([-1.0, -1.0, -1.0, 1.0, 1.0, -1.0])[:, None].expand(6, 3)
    report = check_rule(rectified, (x, torch.ones(3), torch.zeros(3)))
    assert len(report.named("agrees")) == len(report.checks), str(report)


def test_a_wrong_squared_norm_of_a_structure_of_ones_own():
    class Halved(Dense):
        def _sq_norm(self):
            return super()._sq_norm() / 2

    register(lambda call, grad: {name: Halved(value.grad) for name, value in right(call, grad).items()})
    assert found(check_rule(affine, arguments()), status="differs")[ALL] == {
        "the squared norms are off by more than 1e-07"
    }


def test_an_error_of_single_precision_alone_is_caught():
    def coarse(call, grad):
        off = 1.0 if grad.dtype is torch.float64 else 1.01
        return {name: Dense(value.dense() * off) for name, value in right(call, grad).items()}

    register(coarse)
    assert found(check_rule(affine, arguments()), status="differs").keys() == {f"{TWO}, float32"}
    assert check_rule(affine, arguments(), dtypes=(torch.float64,))
    assert check_rule(affine, arguments(), tolerance=0.1)


def test_an_error_with_other_strides_alone_is_caught():
    def contiguous(call, grad):
        return right(call, grad.view(-1).view(grad.shape))

    register(contiguous)
    caught = found(check_rule(affine, arguments(), further_axis=False), status="raised")
    assert f"{TWO}, strided" in caught
    assert TWO not in caught


@pytest.mark.parametrize("name", ["x", "weight", "grad"])
def test_a_rule_that_reads_memory_in_its_order_is_caught(name: str):
    def as_if_contiguous(tensor):
        return tensor.as_strided(tensor.shape, torch.empty(tensor.shape).stride(), tensor.storage_offset())

    @torch.overrides.wrap_torch_function(lambda x, weight: (x, weight))
    def squared(x, weight):
        return x @ weight.square().T

    def rule(call, grad):
        given = {"x": call.arguments["x"], "weight": call.arguments["weight"], "grad": grad}
        given[name] = as_if_contiguous(given[name])
        rows = Outer(given["grad"].flatten(1, -2), given["x"].flatten(1, -2)).dense()
        return {"weight": Dense(2 * given["weight"] * rows)}

    declared = {"arguments": ("x", "weight"), "batched": ("x",), "weights": ("weight",), "reads": ("x", "weight")}
    register(rule, squared, **declared)
    caught = found(check_rule(squared, (torch.randn(B, 3), torch.randn(2, 3))), status="differs")
    assert f"{TWO}, strided" in caught
    assert TWO not in caught


def test_a_weight_without_axes():
    @torch.overrides.wrap_torch_function(lambda x, weight: (x, weight))
    def scaled(x, weight):
        return x * weight

    declared = {"arguments": ("x", "weight"), "batched": ("x",), "weights": ("weight",)}
    register(lambda call, g: {"weight": Dense((g * call.arguments["x"]).flatten(1).sum(1))}, scaled, **declared)
    report = check_rule(scaled, (torch.randn(B, 3), torch.randn(())))
    assert report, str(report)
    register(lambda call, g: {"weight": Dense((g * call.arguments["x"])[:, 0].sum(-1))}, scaled, **declared)
    assert TWO in found(check_rule(scaled, (torch.randn(B, 3), torch.randn(()))), status="differs")


def test_gradients_that_are_zero_prove_nothing():
    register(right)
    report = check_rule(affine, (torch.zeros(B, 3), torch.randn(3), torch.randn(3)))
    assert found(report, status="not compared")[ALL] == {
        "the loop's gradients are all zero, which proves nothing: give other example arguments"
    }


def test_nan_equals_nothing():
    nan = torch.full((2, 3), float("nan"))
    assert relative_error(nan, nan) != relative_error(nan, nan)
    assert relative_error(torch.ones(2, 3), torch.ones(2, 3)) == 0
    assert relative_error(torch.ones(2, 3), torch.zeros(2, 3)) == float("inf")
    assert relative_error(torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [2.0]])) == 0.5


def test_several_batched_arguments():
    @torch.overrides.wrap_torch_function(lambda x, weight, bias, mask: (x, weight, bias, mask))
    def masked(x, weight, bias, mask):
        return (x * weight + bias) * mask

    names = ("x", "weight", "bias", "mask")
    register(
        lambda call, grad: right(call, grad * call.arguments["mask"]), masked, arguments=names, batched=("x", "mask")
    )
    assert check_rule(masked, (*arguments(), torch.rand(B, 1)))


def test_the_check_leaves_no_trace():
    register(right)
    before, given = find_rule(affine), arguments()
    copies, state = [tensor.clone() for tensor in given], torch.get_rng_state()
    check_rule(affine, given)
    assert find_rule(affine) is before
    assert all(map(torch.equal, given, copies))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_structure_with_its_sides_exchanged():
    def exchanged(call, grad):
        return {"weight": Outer(call.arguments["input"].flatten(1, -2), grad.flatten(1, -2))}

    register(exchanged, F.linear, arguments=("input", "weight"), batched=("input",), weights=("weight",))
    report = check_rule(F.linear, (torch.randn(B, 3), torch.randn(2, 3)))
    assert found(report, status="differs")[ALL] == {
        "the rule gave shape (6, 3, 2) for weight, but (samples, *shape of the weight) is (6, 2, 3)"
    }
