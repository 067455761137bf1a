"""Registration: what is refused, and in which words."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn import functional as F

from lightning_persample.errors import RuleRegistrationError
from lightning_persample.rules import canonical_op, find_rule, register_rule, supported_ops

pytestmark = pytest.mark.usefixtures("own_rules")


def another_linear(call, grad_output):
    return {}


def test_a_second_rule_is_refused():
    register = register_rule(F.linear, arguments=("input", "weight"), batched=("input",), weights=("weight",))
    text = (
        "'linear' already has the rule lightning_persample.rules.linear.linear; pass overwrite=True to replace it by "
        f"{__name__}.another_linear"
    )
    with pytest.raises(RuleRegistrationError, match=f"^{re.escape(text)}$"):
        register(another_linear)
    assert find_rule(F.linear).function is not another_linear


def test_every_spelling_counts_as_the_same_op():
    register = register_rule(torch.Tensor.mul_, arguments=("input", "other"), batched=("input",), weights=("other",))
    with pytest.raises(RuleRegistrationError, match=r"^'mul' already has the rule lightning_persample\.rules\.elem"):
        register(another_linear)


@pytest.mark.parametrize("where", ["batched", "weights", "reads", "per_sample"])
def test_a_name_that_the_op_does_not_have_is_refused(where: str):
    names = {"batched": ("input",), "weights": ("weight",), "reads": ("input",), where: ("input", "wieght")}
    text = "rule for 'bilinear' names ['wieght'], but the op's arguments are ['input', 'weight']"
    with pytest.raises(RuleRegistrationError, match=f"^{re.escape(text)}$"):
        register_rule(torch.bilinear, arguments=("input", "weight"), **names)
    assert find_rule(torch.bilinear) is None


def test_overwrite_replaces():
    register = register_rule(
        F.linear, arguments=("input", "weight"), batched=("input",), weights=("weight",), overwrite=True
    )
    assert register(another_linear) is another_linear
    assert find_rule(F.linear).function is another_linear
    assert find_rule(F.linear).arguments == ("input", "weight")


def test_a_function_of_the_user_is_its_own_op():
    def scale(x, w):
        return x * w

    assert find_rule(scale) is None
    register_rule(scale, arguments=("x", "w"), batched=("x",), weights=("w",))(another_linear)
    assert find_rule(scale).function is another_linear
    assert canonical_op(scale) is scale


def test_a_function_of_the_user_goes_by_its_name():
    def scale(x, w):
        return x * w

    register = register_rule(scale, arguments=("x", "w"), batched=("x",), weights=("w",))
    register(another_linear)
    name = "test_a_function_of_the_user_goes_by_its_name.<locals>.scale"
    assert name in supported_ops()
    with pytest.raises(RuleRegistrationError, match=f"^{re.escape(repr(name))} already has the rule {__name__}"):
        register(another_linear)


def test_reads_are_the_batched_arguments_unless_said_otherwise():
    assert find_rule(F.linear).reads == {"input"}
    assert find_rule(torch.add).reads == {"alpha"}
    assert find_rule(torch.batch_norm).reads == {"input", "running_mean", "running_var"}


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("add", [torch.add, torch.Tensor.add_, torch.Tensor.__add__, torch.Tensor.__radd__, torch.Tensor.__iadd__]),
        ("sub", [torch.sub, torch.subtract, torch.Tensor.sub_, torch.Tensor.__sub__, torch.Tensor.__isub__]),
        ("rsub", [torch.rsub, torch.Tensor.__rsub__]),
        ("mul", [torch.mul, torch.multiply, torch.Tensor.mul_, torch.Tensor.__rmul__, torch.Tensor.__imul__]),
        ("div", [torch.div, torch.true_divide, torch.Tensor.div_, torch.Tensor.__truediv__, torch.Tensor.__itruediv__]),
        ("rdiv", [torch.Tensor.__rdiv__, torch.Tensor.__rtruediv__]),
        ("matmul", [torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__]),
        ("mm", [torch.mm, torch.Tensor.mm]),
        ("linear", [F.linear]),
        ("conv2d", [torch.conv2d, F.conv2d]),
    ],
)
def test_spellings(name: str, spellings: list):
    assert {canonical_op(op) for op in spellings} == {name}
    assert len({find_rule(op) for op in spellings}) == 1
    assert name in supported_ops()
