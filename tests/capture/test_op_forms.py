"""Which forms of ops the engine sees, so that a rule is found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_persample import check_rule, expanded_weights, supported_ops
from lightning_persample.capture.contributions import Use
from lightning_persample.rules import canonical_op, find_rule
from tests.capture.affine import Affine, B, affine, arguments, asks_itself, custom_affine, found, plain, register, right

pytestmark = pytest.mark.usefixtures("own_rules")


FORMS = {
    "custom_op": custom_affine,
    "packet": torch.ops.persample_test.affine,
    "overload": torch.ops.persample_test.affine.default,
    "library": torch.ops.persample_test.defined_affine,
    "wrapped": affine,
    "asks itself": asks_itself,
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_ops_that_are_seen(form: str):
    register(right, FORMS[form])
    report = check_rule(FORMS[form], arguments())
    assert report, str(report)


def test_a_custom_op_is_one_op_in_all_its_forms():
    forms = [custom_affine, torch.ops.persample_test.affine, torch.ops.persample_test.affine.default]
    assert {canonical_op(op) for op in forms} == {"persample_test.affine"}
    register(right, custom_affine)
    assert all(find_rule(op).function is right for op in forms)
    assert "persample_test.affine" in supported_ops()


@pytest.mark.parametrize(
    ("op", "name", "inside"),
    [(plain, "plain", "addcmul"), (Affine.apply, Affine.apply.__qualname__, "mul, add")],
    ids=["plain", "apply"],
)
def test_forms_of_ops_that_are_not_seen(op, name: str, inside: str):
    register(right, op)
    report = check_rule(op, arguments())
    assert {row.status for row in report.checks if row.call.startswith("expanded_weights")} == {"not found"}
    assert {row.status for row in report.checks if not row.call.startswith("expanded_weights")} == {"agrees"}
    text = (
        f"the rule is never asked, because torch does not show the call of {name!r}, but what is inside it: {inside}. "
        "Make the op a torch.library.custom_op, or decorate a Python function that calls it with "
        "torch.overrides.wrap_torch_function, and register the rule for that"
    )
    assert found(report, status="not found")["expanded_weights, 6 samples"] == {text}


def test_a_call_that_the_engine_does_not_bring_to_the_rule(monkeypatch: pytest.MonkeyPatch):
    register(right)
    monkeypatch.setattr(Use, "_answered_by", lambda self, rule, arguments: False)
    assert found(check_rule(affine, arguments()), status="not found")["expanded_weights, 6 samples"] == {
        "the rule is never asked, although torch shows the call: the op was called in a way that `arguments`, "
        "`batched` and `weights` of the rule do not describe"
    }


def test_a_wrapped_function_is_seen_in_a_module_and_leaves_the_fused_paths_alone():
    register(right)
    weight, bias = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
    module = nn.Module()
    module.register_parameter("weight", weight)
    module.register_parameter("bias", bias)
    x = torch.randn(B, 3)
    with expanded_weights(module, x, loss_reduction="sum", unsupported="error") as capture:
        assert not torch.overrides.has_torch_function((x,))
        affine(x, weight, bias).sum().backward()
    assert capture.record.names == ("weight", "bias")
