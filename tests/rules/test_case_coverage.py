"""Every op with a rule has cases, and every option of it takes at least two values in them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from lightning_persample.rules import find_rule, supported_ops
from tests.capture import recurrent_cases, twice_cases  # noqa: F401  (add to CASES)
from tests.capture.model_cases import CASES
from tests.rules.families import all_cases

# (op, argument): why one value is enough. "*" stands for every op.
EXEMPT = {
    ("*", "cudnn_enable"): "chooses a kernel, not a value",
    ("*", "cudnn_enabled"): "chooses a kernel, not a value",
    ("*", "momentum"): "enters the update of the running statistics only, which rules never read after an update",
    ("group_norm", "weight"): "None is the other value, and torch cannot differentiate a shift without a scale",
}


def _described(value: Any) -> str:
    return f"{value.dtype}{tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


# Ops whose cases are whole models, because only the engine sorts out their lists of weights, outputs and states; their
# options are looked at in tests/capture/test_case_options.py.
THROUGH_THE_ENGINE = {
    "embedding_bag": "embedding-bag-",
    "lstm": "lstm-",
    "gru": "gru-",
    "rnn_tanh": "rnn-",
    "rnn_relu": "rnn-relu-",
    "lstm_cell": "lstm-cell",
    "gru_cell": "gru-cell",
    "rnn_tanh_cell": "rnn-cell",
    "rnn_relu_cell": "rnn-relu-cell",
}


def test_every_op_has_cases():
    assert {str(case.rule.op) for case in all_cases()} | set(THROUGH_THE_ENGINE) == set(supported_ops())


def test_every_op_with_whole_models_as_cases_has_some():
    for start in THROUGH_THE_ENGINE.values():
        assert any(name.startswith(start) for name in CASES), start


def test_every_option_takes_two_values():
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    rules = {}
    for case in all_cases():
        arguments = case.build(2, torch.float32)
        op = str(case.rule.op)
        rules[op] = case.rule
        for name in case.rule.arguments:
            values[op, name].add(_described(arguments.get(name, "left out")))
    lacking = [
        f"{op}: {name}"
        for op, rule in rules.items()
        for name in rule.arguments
        if len(values[op, name]) < 2 and (op, name) not in EXEMPT and ("*", name) not in EXEMPT
    ]
    assert not lacking


def test_cases_use_names_that_the_rule_knows():
    for case in all_cases():
        assert set(case.build(2, torch.float32)) <= set(case.rule.arguments), case.id


def test_case_ids_are_unique():
    ids = [case.id for case in all_cases()]
    assert len(ids) == len(set(ids))


def test_ops_whose_samples_mix_say_so():
    mixing = {str(case.rule.op) for case in all_cases() if case.rule.mixes_samples is not None}
    assert mixing == {"batch_norm"}
    decide = find_rule(torch.batch_norm).mixes_samples
    assert decide({"training": True}) is True
    assert decide({"training": False}) is False
