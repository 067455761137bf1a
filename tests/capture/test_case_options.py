"""Ops whose cases are whole models: every option takes two values in them, and every set of weights that matters."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_persample.rules import find_rule
from tests.capture import recurrent_cases, twice_cases  # noqa: F401  (add to CASES)
from tests.capture.model_cases import CASES
from tests.capture.recorded_calls import RecordedCalls
from tests.rules.test_case_coverage import THROUGH_THE_ENGINE

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")

OPS = {"embedding_bag": torch.embedding_bag}
for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    OPS |= {kind: getattr(torch._VF, kind), f"{kind}_cell": getattr(torch._VF, f"{kind}_cell")}

# (op, argument): why one value is enough
EXEMPT = {("embedding_bag", "scale_grad_by_freq"): "the rule refuses True, for torch itself has no right value for it"}

# what the flat list of a layer's weights holds for each direction, in this order
ROLES = ("w_ih", "w_hh", "b_ih", "b_hh", "w_hr")


@cache
def _calls() -> dict[str, list[dict[str, Any]]]:
    """What the models give to each op, a layer's weights by role."""
    torch.manual_seed(0)
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, case in CASES.items():
        if name.startswith(tuple(THROUGH_THE_ENGINE.values())):
            with RecordedCalls() as recorded:
                case.build()(*case.batch(5))
            for op, arguments in recorded.calls:
                found[op].append(_by_role(arguments))
    return found


def _by_role(arguments: dict[str, Any]) -> dict[str, Any]:
    """``params[k]`` under the name of its role, with layer and direction."""
    named = {name: value for name, value in arguments.items() if not name.startswith("params[")}
    weights = [value for name, value in arguments.items() if name.startswith("params[")]
    if weights:
        per_direction = len(weights) // (arguments["num_layers"] * (2 if arguments["bidirectional"] else 1))
        roles = [role for role in ROLES if arguments["has_biases"] or not role.startswith("b_")][: per_direction - 1]
        roles.append("w_hr" if per_direction in (3, 5) else ROLES[3 if arguments["has_biases"] else 1])
        for place, weight in enumerate(weights):
            named[f"{roles[place % per_direction]}[{place // per_direction}]"] = weight
    return named


def _argument(name: str) -> str:
    return name.split("[")[0]


def _described(op: str, name: str, value: Any) -> str:
    """Of a tensor, what does not depend on the numbers in it or on the size of the batch."""
    if not isinstance(value, Tensor):
        return repr(value)
    if name == "batch_sizes":
        return "equal lengths" if value.unique().numel() == 1 else "unequal lengths"
    rule = find_rule(OPS[op])
    assert rule is not None
    shape = f"{value.dim()} axes" if rule.is_batched(name) else f"{tuple(value.shape)}"
    return f"{value.dtype} {shape}{' with gradient' if value.requires_grad else ''}"


def _weights(op: str) -> set[str]:
    rule = find_rule(OPS[op])
    assert rule is not None
    roles = set(ROLES) if op == "lstm" else set(ROLES) - {"w_hr"}
    return (set(rule.weights) - {"params"}) | (roles if "params" in rule.weights else set())


def test_every_such_op_is_looked_at() -> None:
    assert set(OPS) == set(THROUGH_THE_ENGINE)
    assert set(OPS) <= set(_calls())


@pytest.mark.parametrize("op", OPS)
def test_every_option_takes_two_values(op: str) -> None:
    values: dict[str, set[str]] = defaultdict(set)
    for arguments in _calls()[op]:
        for name, value in arguments.items():
            values[_argument(name)].add(_described(op, name, value))
    rule = find_rule(OPS[op])
    assert rule is not None
    expected = (set(rule.arguments) - {"params"}) | _weights(op)
    lacking = {name: values[name] for name in expected if len(values[name]) < 2 and (op, name) not in EXEMPT}
    assert lacking == {}


@pytest.mark.parametrize("op", OPS)
def test_every_exemption_is_needed(op: str) -> None:
    for exempt, name in EXEMPT:
        if exempt == op:
            assert len({_described(op, name, arguments[name]) for arguments in _calls()[op]}) == 1


@pytest.mark.parametrize("op", OPS)
def test_every_weight_is_there_and_left_out(op: str) -> None:
    """Biases and projections: layers have them or not."""
    for weight in _weights(op) & {"b_ih", "b_hh", "w_hr"}:
        there = {
            any(_argument(name) == weight and value is not None for name, value in arguments.items())
            for arguments in _calls()[op]
        }
        assert there == {True, False}, weight


@pytest.mark.parametrize("op", OPS)
def test_every_weight_is_trained_without_each_other(op: str) -> None:
    weights = _weights(op)
    patterns = []
    for arguments in _calls()[op]:
        tensors = [(_argument(name), value) for name, value in arguments.items() if isinstance(value, Tensor)]
        trained = {name for name, value in tensors if value.requires_grad}
        patterns.append((trained & weights, {name for name, _ in tensors} & weights))
    for weight in weights:
        assert any(weight in there and weight not in trained for trained, there in patterns), f"{weight} frozen"
        assert any(weight in trained for trained, _ in patterns), f"{weight} trained"
    for one, other in permutations(sorted(weights), 2):
        apart = any(one in trained and other in there - trained for trained, there in patterns)
        assert apart, f"{one} trained and {other} frozen"
    assert any(trained == there for trained, there in patterns), "all trained"
