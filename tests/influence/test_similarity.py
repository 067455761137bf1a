"""GradDot and GradCos by hand, by the loop, and by really taking the step."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lightning_persample.influence import grad_cos, grad_dot
from tests.influence.loops import data, net, sample_grads, sgd_step, shapes_of, simple, store_of

TRAIN = [[3.0, 4.0], [0.0, 2.0], [-1.0, 0.0]]
TEST = [[1.0, 0.0], [3.0, 4.0]]


def test_numbers_by_hand(tmp_path):
    train, test = simple(tmp_path / "train", TRAIN), simple(tmp_path / "test", TEST)
    dots = grad_dot(train, test)
    assert dots.scores.tolist() == [[3.0, 25.0], [0.0, 8.0], [-1.0, -3.0]]
    assert (dots.name, dots.train_index, dots.test_index) == ("grad_dot", (0, 1, 2), (0, 1))
    assert (dots.unknown, dots.nonfinite) == (0, 0)
    assert dots.convention.startswith("g . g': positive where")
    cosines = grad_cos(train, test)
    torch.testing.assert_close(
        cosines.scores, torch.tensor([[0.6, 1.0], [0.0, 0.8], [-1.0, -0.6]]).double(), rtol=1e-6, atol=1e-6
    )
    assert cosines.convention.startswith("cosine of g and g': positive where")


def test_rows_in_any_order_come_by_index(tmp_path):
    rows = {"sample_index": [7, 2, 5]}
    train = store_of(tmp_path / "train", [(torch.tensor(TRAIN).double(), rows)])
    found = grad_dot(train, simple(tmp_path / "test", TEST))
    assert found.train_index == (2, 5, 7)
    assert found.scores.tolist() == [[0.0, 8.0], [-1.0, -3.0], [3.0, 25.0]]


def test_a_sample_with_itself_has_cosine_one(tmp_path):
    module = net()
    grads = sample_grads(module, *data(7, seed=1)) * torch.logspace(-9, 9, 7, dtype=torch.float64)[:, None]
    store = simple(tmp_path / "store", grads.tolist(), shapes=shapes_of(module))
    found = grad_cos(store, store).scores
    torch.testing.assert_close(found.diagonal(), torch.ones(7, dtype=torch.float64), rtol=1e-14, atol=0)
    for i, one in enumerate(grads.tolist()):
        for j, other in enumerate(grads.tolist()):
            dot = math.fsum(a * b for a, b in zip(one, other, strict=True))
            assert found[i, j].item() == pytest.approx(dot / (math.hypot(*one) * math.hypot(*other)), abs=1e-12)


def test_a_gradient_of_zeros_has_no_cosine(tmp_path):
    train, test = simple(tmp_path / "train", [[0.0, 0.0], [1.0, 0.0]]), simple(tmp_path / "test", [[2.0, 0.0]])
    scores = grad_cos(train, test).scores
    assert math.isnan(scores[0, 0])
    assert scores[1, 0] == 1
    assert grad_dot(train, test).scores.tolist() == [[0.0], [2.0]]


@pytest.mark.parametrize("score", [grad_dot, grad_cos])
def test_a_positive_score_is_a_sample_whose_step_lowers_the_loss(tmp_path, score):
    module = net()
    inputs, targets = data(6, seed=1)
    test_inputs, test_targets = data(5, seed=2)
    grads = sample_grads(module, inputs, targets)
    test_grads = sample_grads(module, test_inputs, test_targets)
    train = simple(tmp_path / "train", grads.tolist(), shapes=shapes_of(module))
    test = simple(tmp_path / "test", test_grads.tolist(), shapes=shapes_of(module))
    scores = score(train, test).scores
    signs = torch.empty_like(scores)
    for i, grad in enumerate(grads):
        before, after = net(), net()
        sgd_step(after, grad, 1e-6)
        with torch.no_grad():
            losses = [F.cross_entropy(each(test_inputs), test_targets, reduction="none") for each in (before, after)]
        signs[i] = (losses[0] - losses[1]).sign()
    assert torch.equal(scores.sign(), signs)
    assert {-1.0, 1.0} <= set(signs.flatten().tolist())


def test_a_row_that_is_not_finite_is_nan_and_counted(tmp_path):
    train = simple(tmp_path / "train", [[3.0, 4.0], [math.inf, 2.0], [-1.0, 0.0]])
    test = simple(tmp_path / "test", [[1.0, 0.0], [math.nan, 4.0]])
    for score in (grad_dot, grad_cos):
        found = score(train, test)
        assert found.nonfinite == 2
        assert found.scores.isnan().tolist() == [[False, True], [True, True], [False, True]]
    assert grad_dot(train, test.select(~test.nonfinite)).top(2) == [(0, 3.0), (2, -1.0)]
