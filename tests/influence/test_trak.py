"""TRAK against explicit matrices, and the margin that its gradients are of."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lightning_persample import OptionError, PerSampleError
from lightning_persample.influence import correct_class_margin, trak
from tests.influence.loops import data, net, sample_grads, sgd_step, shapes_of, simple, store_of


def margin(logits, targets):
    """log(p / (1 - p)), as it is written."""
    p = logits.softmax(-1).gather(-1, targets[:, None])[:, 0]
    return (p / (1 - p)).log()


def features(seed, count, module):
    inputs, targets = data(count, seed)
    with torch.no_grad():
        p = module(inputs).softmax(-1).gather(-1, targets[:, None])[:, 0]
    return sample_grads(module, inputs, targets, margin), 1 - p


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Margin gradients of 9 training and 4 test samples by two nets."""
    folder = tmp_path_factory.mktemp("models")
    parts, train_parts, test_parts = [], [], []
    for number, seed in enumerate((0, 1)):
        module = net(seed)
        phi, mistaken = features(3, 9, module)
        test_phi, _ = features(4, 4, module)
        parts.append((phi, mistaken, test_phi))
        at = {"checkpoint": number, "step": 7}
        train_parts.append((phi, {"sample_index": torch.arange(9), "one_minus_p": mistaken, **at}))
        test_parts.append((test_phi, {"sample_index": torch.arange(4), **at}))
    options = {"shapes": shapes_of(net()), "checkpoints": [{"step": 7, "path": f"{seed}.ckpt"} for seed in (0, 1)]}
    train = store_of(folder / "train", train_parts, columns=("one_minus_p",), **options)
    return train, store_of(folder / "test", test_parts, **options), parts


def dense(phi, test_phi, damping=None):
    if damping is None:
        damping = 0.3 * torch.linalg.eigvalsh(phi.T @ phi).mean()
    inverse = torch.linalg.inv(phi.T @ phi + damping * torch.eye(phi.shape[1], dtype=phi.dtype))
    return phi @ inverse @ test_phi.T


def test_one_model_is_the_dense_formula(models):
    train, test, ((phi, mistaken, test_phi), _) = models
    found = trak(train.at(0), test.at(0), 0.1, absolute=True)
    torch.testing.assert_close(found.scores, mistaken[:, None] * dense(phi, test_phi, 0.1), rtol=1e-9, atol=1e-11)
    assert found.convention.startswith("(1 - p) phi^T (Phi^T Phi + damping)^-1 phi': positive where")


def test_several_models_are_the_mean_of_the_kernels_times_the_mean_of_one_minus_p(models):
    train, test, parts = models
    kernel = sum(dense(phi, test_phi, 0.1) for phi, _, test_phi in parts) / 2
    mistaken = sum(mistaken for _, mistaken, _ in parts) / 2
    torch.testing.assert_close(
        trak(train, test, 0.1, absolute=True).scores, mistaken[:, None] * kernel, rtol=1e-9, atol=1e-11
    )


def test_the_damping_by_default_is_a_part_of_the_mean_eigenvalue_of_each_model(models):
    train, test, parts = models
    kernel = sum(dense(phi, test_phi) for phi, _, test_phi in parts) / 2
    mistaken = sum(mistaken for _, mistaken, _ in parts) / 2
    torch.testing.assert_close(trak(train, test).scores, mistaken[:, None] * kernel, rtol=1e-9, atol=1e-11)


def test_a_layer_with_bias_has_no_inverse_without_damping_and_one_by_default(tmp_path):
    """The margin does not change where the same is added to all logits, however many samples there are."""
    module = net().requires_grad_(False)
    module[2].requires_grad_(True)
    head = torch.nn.Sequential(module[2])
    inputs, targets = data(200, 3)
    phi = sample_grads(head, module[:2](inputs), targets, margin)
    assert phi[:, 8:].sum(1).abs().max() < 1e-12
    rows = {"sample_index": torch.arange(200), "one_minus_p": 0.5}
    train = store_of(tmp_path / "train", [(phi, rows)], columns=("one_minus_p",))
    test = simple(tmp_path / "test", phi[:3].tolist())
    with pytest.raises(PerSampleError, match=r"Phi.T Phi of 200 samples and 10 columns has no inverse with damping=0:"):
        trak(train, test, 0)
    torch.testing.assert_close(trak(train, test).scores, 0.5 * dense(phi, phi[:3]), rtol=1e-9, atol=1e-11)


def test_without_damping_of_more_samples_than_columns(tmp_path):
    generator = torch.Generator().manual_seed(0)
    phi, test_phi = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (8, 2))
    rows = {"sample_index": torch.arange(8), "wrong": torch.linspace(0, 1, 8)}
    train = store_of(tmp_path / "train", [(phi, rows)], columns=("wrong",))
    found = trak(train, simple(tmp_path / "test", test_phi.tolist()), 0, one_minus_p="wrong")
    expected = torch.linspace(0, 1, 8).double()[:, None] * dense(phi, test_phi, 0)
    torch.testing.assert_close(found.scores, expected, rtol=1e-6, atol=1e-9)


def hand(tmp_path, values, mistaken):
    rows = {"sample_index": torch.arange(len(values)), "one_minus_p": mistaken}
    phi = torch.tensor(values, dtype=torch.float64)
    return store_of(tmp_path / "train", [(phi, rows)], columns=("one_minus_p",))


def test_numbers_by_hand(tmp_path):
    train = hand(tmp_path, [[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]], [0.5, 0.25, 1.0])
    found = trak(train, simple(tmp_path / "test", [[10.0, 4.0]]), 1.0, absolute=True)  # Phi^T Phi + I = diag(6, 2)
    expected = [[0.5 * 2 * 10 / 6], [0.25 * 1 * 4 / 2], [1.0 * 1 * 10 / 6]]
    torch.testing.assert_close(found.scores, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    found = trak(train, simple(tmp_path / "other", [[10.0, 4.0]]))  # mean eigenvalue 3, so diag(5.9, 1.9)
    expected = [[0.5 * 2 * 10 / 5.9], [0.25 * 1 * 4 / 1.9], [1.0 * 1 * 10 / 5.9]]
    torch.testing.assert_close(found.scores, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_a_sample_whose_step_raises_the_margin_has_a_positive_score(tmp_path):
    """With damping far above Phi^T Phi the score is along (1 - p) phi . phi', the change of one step of SGD."""
    module = net()
    phi, mistaken = features(3, 9, module)
    test_inputs, test_targets = data(4, 4)
    rows = {"sample_index": torch.arange(9), "one_minus_p": mistaken}
    options = {"shapes": shapes_of(module)}
    train = store_of(tmp_path / "train", [(phi, rows)], columns=("one_minus_p",), **options)
    test_phi = sample_grads(module, test_inputs, test_targets, margin)
    test = simple(tmp_path / "test", test_phi.tolist(), **options)
    scores = trak(train, test, 1e6, absolute=True).scores
    signs = torch.empty_like(scores)
    inputs, targets = data(9, 3)
    for i, grad in enumerate(sample_grads(module, inputs, targets)):
        after = net()
        sgd_step(after, grad, 1e-6)
        with torch.no_grad():
            losses = [F.cross_entropy(each(test_inputs), test_targets, reduction="none") for each in (module, after)]
        signs[i] = (losses[0] - losses[1]).sign()
    assert torch.equal(scores.sign(), signs)


def test_a_row_that_is_not_finite_is_left_out_of_the_others_scores(tmp_path):
    train = hand(tmp_path, [[2.0, 0.0], [math.nan, 1.0], [0.0, 1.0]], [0.5, math.nan, 0.25])
    found = trak(train, simple(tmp_path / "test", [[10.0, 4.0], [math.inf, 0.0]]), 1.0, absolute=True)
    assert found.scores.isnan().tolist() == [[False, True], [True, True], [False, True]]
    assert found.scores[[0, 2], 0].tolist() == pytest.approx([0.5 * 2 * 10 / 5, 0.25 * 4 / 2])
    assert found.nonfinite == 2


@pytest.mark.parametrize(
    ("values", "mistaken", "options", "error", "text"),
    [
        (
            [[1.0, 2.0]],
            [0.5],
            {"damping": 0.0},
            PerSampleError,
            "Phi.T Phi of 1 samples and 2 columns has no inverse with damping=0.0",
        ),
        (
            [[1.0, 0.0]] * 3,
            [0.5] * 3,
            {"damping": 0},
            PerSampleError,
            r"pass a larger one, for example damping=0.1",
        ),
        (
            [[1.0, 2.0], [0.0, 1.0]],
            [0.5, 1.5],
            {},
            OptionError,
            "1 of 2 rows .* 'one_minus_p', as sample 1 has 1.5: trak",
        ),
        ([[1.0]], [math.nan], {}, OptionError, "sample 0 has nan: trak needs 1 - p"),
        (
            [[1.0]],
            [0.5],
            {"damping": -1.0},
            OptionError,
            "damping=-1.0 is not allowed: damping must be a number >= 0",
        ),
        ([[1.0]], [0.5], {"one_minus_p": "p"}, OptionError, "no column 'p', the 1 - p .* Its columns are one_minus_p"),
        (
            [[0.0, 0.0]],
            [0.5],
            {},
            PerSampleError,
            "Phi.T Phi of 1 samples and 2 columns is 0, and so is every",
        ),
        ([[math.nan]], [0.5], {}, PerSampleError, "none of the 1 gradients of the train store is finite"),
    ],
)
def test_what_is_refused(tmp_path, values, mistaken, options, error, text):
    train = hand(tmp_path, values, mistaken)
    test = simple(tmp_path / "test", [[1.0] * len(values[0])])
    with pytest.raises(error, match=text):
        trak(train, test, **options)


def test_the_margin_is_the_log_odds_of_the_right_class():
    logits = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    targets = torch.tensor([0, 3, 1, 2, 2])
    found = correct_class_margin(logits, targets)
    torch.testing.assert_close(found, margin(logits, targets), rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(each.sum(), logits)[0] for each in (found, margin(logits, targets))]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)
    p = logits.softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(torch.sigmoid(-found), 1 - p, rtol=1e-12, atol=1e-12)
    batched = correct_class_margin(logits.expand(2, 5, 4), targets.expand(2, 5))
    torch.testing.assert_close(batched, found.expand(2, 5))


def test_the_margin_is_finite_where_the_probability_rounds_to_one():
    logits = torch.tensor([[1000.0, 0.0, 0.0], [0.0, 1000.0, 0.0]], requires_grad=True)
    found = correct_class_margin(logits, torch.tensor([0, 0]))
    assert found.tolist() == pytest.approx([1000 - math.log(2), -1000])
    found.sum().backward()
    assert logits.grad.tolist() == [[1.0, -0.5, -0.5], [1.0, -1.0, 0.0]]


def test_a_margin_needs_two_classes():
    with pytest.raises(
        OptionError, match=r"logits of shape \(3, 1\) have 1 class, and a margin is between two or more"
    ):
        correct_class_margin(torch.zeros(3, 1), torch.zeros(3, dtype=torch.long))
