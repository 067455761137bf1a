"""check_rule: a rule that reads what it has not declared to read is told what to declare."""

from __future__ import annotations

import pytest
import torch

from lightning_persample import Dense, check_rule
from tests.capture.affine import affine, arguments, found, register, right

pytestmark = pytest.mark.usefixtures("own_rules")

TWO, ALL = "3 samples of 2 rows", "6 samples"


@pytest.mark.parametrize("reads", [(), ("weight",)], ids=["nothing", "another"])
def test_what_is_read_must_be_declared(reads):
    register(right, reads=reads)
    caught = found(check_rule(affine, arguments()), status="raised")
    names = (*reads, "x")
    reason = f"the rule reads x, of which it is promised no values: register it with reads={names!r}"
    assert caught[ALL] == {reason}
    assert f"{TWO}, only bias" not in caught


def test_the_value_of_a_weight_must_be_declared_too():
    def reads_the_weight(call, grad):
        scale = call.arguments["weight"].mean() / call.arguments["weight"].mean()
        return {name: Dense(value.dense() * scale) for name, value in right(call, grad).items()}

    register(reads_the_weight)
    caught = found(check_rule(affine, arguments(), weights=("weight",)), status="raised")
    assert caught[ALL] == {
        "the rule reads weight, of which it is promised no values: register it with reads=('x', 'weight')"
    }
    register(reads_the_weight, reads=("x", "weight"))
    assert check_rule(affine, arguments(), weights=("weight",))


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("meets", [torch.Tensor.mul, torch.Tensor.sub, lambda x, weight: x[..., weight > 0]])
def test_reads_are_named_however_the_rule_fails_without_them(meets, factor: int):
    def reads_all(call, grad):
        meets(grad, call.arguments["weight"])
        call.arguments["bias"] + call.arguments["x"]
        return {name: Dense(factor * value.dense()) for name, value in right(call, grad).items()}

    register(reads_all)
    assert {row.reason for row in check_rule(affine, arguments()).named("raised")} == {
        "the rule reads bias, weight, of which it is promised no values: register it with reads=('x', 'bias', 'weight')"
    }
