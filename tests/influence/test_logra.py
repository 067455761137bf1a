"""LoGra against explicit matrices, parameter by parameter."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F

from lightning_persample import OptionError, PerSampleError
from lightning_persample.influence import ekfac, grad_dot, logra, self_influence
from tests.influence.loops import data, net, sample_grads, sgd_step, shapes_of, simple

EIGEN = {"kind": "eigen", "dim": None, "digest": "0"}


@pytest.fixture(scope="module")
def nets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nets")
    module = net()
    grads, test_grads = (sample_grads(module, *data(n, seed)) for n, seed in ((9, 1), (4, 2)))
    stores = [
        simple(folder / name, values.tolist(), shapes=shapes_of(module))
        for name, values in (("train", grads), ("test", test_grads))
    ]
    return *stores, grads, test_grads


def dense(grads, test_grads, sizes, damping=2e-4, *, shrinkage=0.0, robust=False, absolute=False, of=None):
    """Each parameter's own matrix, inverted; that of `grads` if not said otherwise."""
    total = torch.zeros(len(grads), len(test_grads), dtype=torch.float64)
    of = grads if of is None else of
    for own, test_own, seen in zip(*(each.split(sizes, 1) for each in (grads, test_grads, of)), strict=True):
        mean = sum(row @ row for row in seen) / len(seen)
        weights = [1 / (1 + row @ row / mean) ** 0.5 if robust else 1.0 for row in seen]
        hessian = sum(weight * torch.outer(row, row) for weight, row in zip(weights, seen, strict=True)) / len(seen)
        hessian = shrinkage * torch.diag(hessian.diagonal()) + (1 - shrinkage) * hessian
        added = damping if absolute else damping * torch.linalg.eigvalsh(hessian).sum()
        total += own @ torch.linalg.inv(hessian + added * torch.eye(len(hessian), dtype=torch.float64)) @ test_own.T
    return total


@pytest.mark.parametrize("absolute", [False, True])
def test_the_dense_formula(nets, absolute):
    train, test, grads, test_grads = nets
    found = logra(train, test, 0.5, absolute=absolute)
    expected = dense(grads, test_grads, [12, 4, 8, 2], 0.5, absolute=absolute)
    torch.testing.assert_close(found.scores, expected, rtol=1e-10, atol=1e-10)
    assert found.convention.startswith("g^T (H + damping)^-1 g', H the mean of g g^T by parameter: positive where")


@pytest.mark.parametrize("options", [{}, {"max_memory": 6000}, {"max_memory": 6000, "top": 9}, {"top": 9}])
def test_the_normalized_form_is_a_cosine(nets, options):
    train, test, grads, test_grads = nets
    roots = [dense(each, each, [12, 4, 8, 2], of=grads).diagonal().sqrt() for each in (grads, test_grads)]
    expected = dense(grads, test_grads, [12, 4, 8, 2]) / roots[0][:, None] / roots[1]
    found = logra(train, test, normalize=True, **options)
    scores = found.scores.gather(0, found.places.argsort(0)) if "top" in options else found.scores
    torch.testing.assert_close(scores, expected, rtol=1e-10, atol=1e-10)
    assert found.convention.startswith("cosine under the form g^T (H + damping)^-1 g'")
    same = logra(train, train, normalize=True, **options)
    assert [same.top(1, test=index)[0] for index in range(9)] == [(index, pytest.approx(1)) for index in range(9)]


def test_groups_of_parameters_in_little_memory_give_the_same(nets):
    train, test, grads, test_grads = nets
    found = logra(train, test, max_memory=6000)
    torch.testing.assert_close(found.scores, dense(grads, test_grads, [12, 4, 8, 2]), rtol=1e-10, atol=1e-10)


def test_numbers_by_hand(tmp_path):
    shapes = {"a": (1,), "b": (2,)}
    train = simple(tmp_path / "train", [[2.0, 1.0, 0.0], [0.0, 0.0, 3.0]], shapes=shapes)
    test = simple(tmp_path / "test", [[1.0, 2.0, 4.0]], shapes=shapes)
    # H of a is 4 / 2, of b diag(1, 9) / 2
    found = logra(train, test, 1.0, absolute=True)
    expected = [[2 * 1 / 3 + 1 * 2 / 1.5], [3 * 4 / 5.5]]
    torch.testing.assert_close(found.scores, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    found = logra(train, test, 0.1)  # eigenvalues of sums 2 and 5
    expected = [[2 * 1 / 2.2 + 1 * 2 / 1.0], [3 * 4 / 5.0]]
    torch.testing.assert_close(found.scores, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("max_memory", [None, 6000])
def test_shrinkage_and_weights_are_of_an_eigenbasis(nets, tmp_path, max_memory):
    train, test, grads, test_grads = nets
    shapes = {"weight": (14,), "bias": (12,)}
    stores = [
        simple(tmp_path / name, values.tolist(), shapes=shapes, projection=EIGEN)
        for name, values in (("train", grads), ("test", test_grads))
    ]
    for given, used in (({}, (0.5, True)), ({"shrinkage": 0.0}, (0.0, True)), ({"robust": False}, (0.5, False))):
        found = logra(*stores, **given, max_memory=max_memory).scores
        expected = dense(grads, test_grads, [14, 12], shrinkage=used[0], robust=used[1])
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    found = logra(*stores, 5e-5, shrinkage=1.0, robust=False, max_memory=max_memory).scores
    torch.testing.assert_close(found, ekfac(*stores).scores, rtol=1e-10, atol=1e-10)
    expected = dense(grads, test_grads, [12, 4, 8, 2], shrinkage=0.3, robust=True)
    found = logra(train, test, shrinkage=0.3, robust=True, max_memory=max_memory).scores
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_self_influence_is_the_score_of_a_sample_with_itself(nets, tmp_path):
    train, _, grads, _ = nets
    found = self_influence(train, score="logra")
    torch.testing.assert_close(found.scores, dense(grads, grads, [12, 4, 8, 2]).diagonal(), rtol=1e-8, atol=1e-8)
    assert found.index == tuple(range(9))
    assert found.counts.tolist() == [1] * 9
    assert found.convention.startswith("g^T (H + damping)^-1 g by logra: never negative")
    eigen = simple(tmp_path / "eigen", grads.tolist(), shapes={"weight": (14,), "bias": (12,)}, projection=EIGEN)
    for name, score in (("ekfac", ekfac), ("logra", logra)):
        for damping in (None, 0.3):
            expected = score(eigen, eigen, **({} if damping is None else {"damping": damping})).scores.diagonal()
            found = self_influence(eigen, score=name, damping=damping).scores
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"score": "trak"}, "score='trak' is not allowed: score must be None, 'ekfac' or 'logra'"),
        ({"damping": 0.1}, "damping=0.1 is not allowed: damping must be None without `score`, of which it is a part"),
        ({"score": "logra", "damping": 0}, "damping=0 is not allowed: damping must be a number > 0 that is finite"),
        ({"score": "logra", "weighted": True}, "weighted is of the sum along a training, and score='logra' is at one"),
        ({"score": "ekfac"}, "the train store has projection=None, and ekfac takes one of an eigenbasis: collect both"),
    ],
)
def test_options_of_self_influence_by_a_score(nets, options, text):
    with pytest.raises(OptionError, match=re.escape(text)):
        self_influence(nets[0], **options)


def test_self_influence_by_a_score_is_of_a_store():
    with pytest.raises(OptionError, match="score='logra' takes a GradientStore, and ledger is a str"):
        self_influence("ledger", score="logra")


def test_robust_is_a_flag(nets):
    with pytest.raises(OptionError, match=r"robust=0\.5 is not allowed: robust must be None, True or False"):
        logra(nets[0], nets[1], robust=0.5)


@pytest.mark.parametrize("shrinkage", [-0.1, 1.1, math.nan, True, "half"])
def test_shrinkage_is_a_share(nets, shrinkage):
    text = f"shrinkage={shrinkage!r} is not allowed: shrinkage must be None or a number from 0 to 1"
    with pytest.raises(OptionError, match=text):
        logra(nets[0], nets[1], shrinkage=shrinkage)


def test_a_parameter_whose_training_gradients_are_zero_adds_nothing(tmp_path):
    shapes = {"a": (1,), "b": (1,)}
    train = simple(tmp_path / "train", [[2.0, 0.0], [1.0, 0.0]], shapes=shapes)
    test = simple(tmp_path / "test", [[1.0, 5.0], [math.nan, 0.0]], shapes=shapes)
    scores = logra(train, test, 0.5, absolute=True).scores
    assert scores[:, 0].tolist() == pytest.approx([2 / 3, 1 / 3])
    assert scores[:, 1].isnan().all()
    assert logra(train.parameters(["b"]), test.parameters(["b"])).scores[:, 1].isnan().all()


def test_with_much_damping_it_is_along_grad_dot(nets):
    train, test, *_ = nets
    found = logra(train, test, 1e9, absolute=True).scores * 1e9
    torch.testing.assert_close(found, grad_dot(train, test).scores, rtol=1e-6, atol=1e-6)


def test_a_positive_score_is_a_sample_whose_newton_step_lowers_the_loss(nets):
    train, test, grads, _ = nets
    scores = logra(train, test, 0.2, absolute=True).scores
    test_inputs, test_targets = data(4, 2)
    signs = torch.empty_like(scores)
    for i in range(len(grads)):
        step = []
        for own, row in zip(grads.split([12, 4, 8, 2], 1), grads[i].split([12, 4, 8, 2]), strict=True):
            hessian = own.T @ own / len(own) + 0.2 * torch.eye(own.shape[1], dtype=torch.float64)
            step.append(torch.linalg.solve(hessian, row))
        before, after = net(), net()
        sgd_step(after, torch.cat(step), 1e-7)
        with torch.no_grad():
            losses = [F.cross_entropy(each(test_inputs), test_targets, reduction="none") for each in (before, after)]
        signs[i] = (losses[0] - losses[1]).sign()
    assert torch.equal(scores.sign(), signs)


def test_a_row_that_is_not_finite_is_left_out_of_the_others_scores(tmp_path):
    train = simple(tmp_path / "train", [[2.0, 0.0], [math.inf, 0.0], [0.0, 2.0]])
    found = logra(train, simple(tmp_path / "test", [[1.0, 4.0]]), 1.0, absolute=True)
    assert found.scores[[0, 2], 0].tolist() == pytest.approx([2 / 3, 8 / 3])
    assert found.scores[1].isnan().all()
    assert found.nonfinite == 1


@pytest.mark.parametrize("damping", [0.0, -1.0, math.nan, math.inf, True])
def test_damping_is_above_zero(nets, damping):
    with pytest.raises(
        OptionError, match=f"damping={damping} is not allowed: damping must be a number > 0 that is finite"
    ):
        logra(nets[0], nets[1], damping)


def test_a_damping_that_is_nothing_beside_the_matrix_is_refused(nets):
    text = (
        r"H of '0\.weight', of 9 samples and 12 columns, has no inverse with damping=1e-30: pass a larger one, for exa"
    )
    with pytest.raises(PerSampleError, match=text):
        logra(nets[0], nets[1], 1e-30)
