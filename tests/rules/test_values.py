"""Every rule against a loop over single samples."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from tests.in_turn import in_turn
from tests.rules.case import Case, assert_close, reference, rule_call, strided
from tests.rules.families import all_cases

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
# torch warns that it pads a copy where padding="same" is not symmetric.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")

CASES = [pytest.param(case, id=case.id) for case in all_cases()]
every_case = pytest.mark.parametrize("case", CASES)


@pytest.mark.parametrize(("case", "dtype"), in_turn(CASES, TOLERANCE))
def test_equals_the_loop_whichever_weights_are_frozen(case: Case, dtype: torch.dtype):
    arguments = case.build(3, dtype)
    grad_output = case.output_gradient(arguments)
    expected = reference(case, arguments, grad_output)
    names = case.asked(arguments)
    assert names
    for count in range(1, len(names) + 1):
        for weights in combinations(names, count):
            with torch.no_grad():
                found = case.rule.function(rule_call(case, arguments, frozenset(weights)), grad_output)
            assert set(found) == set(weights)
            for name, structure in found.items():
                assert structure.batch_size == 3
                assert structure.shape == arguments[name].shape
                assert_close(structure.dense(), expected[name], TOLERANCE[dtype])


@every_case
def test_strides_do_not_matter(case: Case):
    arguments = case.build(2, torch.float64)
    grad_output = case.output_gradient(arguments)
    expected = reference(case, arguments, grad_output)
    moved = {name: strided(value) if name in case.batched else value for name, value in arguments.items()}
    call = rule_call(case, moved, frozenset(expected))
    for name, structure in case.rule.function(call, strided(grad_output)).items():
        assert_close(structure.dense(), expected[name], 1e-10)


@pytest.mark.parametrize(("case", "size"), in_turn(CASES, [0, 1]))
def test_small_batches(case: Case, size: int):
    arguments = case.build(size, torch.float64)
    grad_output = case.output_gradient(arguments)
    names = case.asked(arguments)
    found = case.rule.function(rule_call(case, arguments, frozenset(names)), grad_output)
    assert set(found) == set(names)
    expected = reference(case, arguments, grad_output) if size else {}
    for name, structure in found.items():
        assert structure.batch_size == size
        assert structure.dense().shape == (size, *arguments[name].shape)
        if size:
            assert_close(structure.dense(), expected[name], 1e-10)


@every_case
def test_nothing_of_the_caller_is_modified(case: Case):
    arguments = case.build(2, torch.float64)
    grad_output = case.output_gradient(arguments)
    tensors = [value for value in (*arguments.values(), grad_output) if isinstance(value, Tensor)]
    before = [tensor.clone() for tensor in tensors]
    case.rule.function(rule_call(case, arguments, frozenset(case.asked(arguments))), grad_output)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, before, strict=True))


def test_no_weight_asked_gives_nothing():
    for case in all_cases():
        arguments = case.build(2, torch.float32)
        grad_output = case.output_gradient(arguments)
        assert not case.rule.function(rule_call(case, arguments, frozenset()), grad_output), case.id
