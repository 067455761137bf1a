"""Adam's direction against the step that torch's Adam really takes, and LESS by hand and by the loop."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from lightning_persample import OptionError
from lightning_persample.influence import adam_direction, less
from tests.influence.loops import data, net, sample_grads, shapes_of, simple, store_of


def trained(kind, steps, **options):
    """A net after some steps of a kind of Adam, and the optimizer."""
    module = net()
    optimizer = kind(module.parameters(), **options)
    inputs, targets = data(12, seed=1)
    for step in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(module(inputs[step % 6 :]), targets[step % 6 :]).backward()
        optimizer.step()
    return module, optimizer


def split(module, grads):
    sizes = [parameter.numel() for parameter in module.parameters()]
    shapes = [parameter.shape for parameter in module.parameters()]
    return [part.reshape(-1, *shape) for part, shape in zip(grads.split(sizes, 1), shapes, strict=True)]


@pytest.mark.parametrize("steps", [0, 1, 7])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(
    "options", [{}, {"betas": (0.5, 0.7), "eps": 1e-3}, {"amsgrad": True, "betas": (0.9, 0.5)}, {"weight_decay": 0.1}]
)
def test_the_direction_is_what_the_optimizer_steps_along(steps, kind, options):
    rate = 0.01
    module, optimizer = trained(kind, steps, lr=rate, **options)
    samples = data(5, seed=2)
    grads = split(module, sample_grads(module, *samples))
    decay = optimizer.param_groups[0]["weight_decay"]
    for i in range(5):
        stepped = copy.deepcopy(module)
        again = kind(stepped.parameters(), lr=rate, **options)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        F.cross_entropy(stepped(samples[0][i : i + 1]), samples[1][i : i + 1]).backward()
        again.step()
        for parameter, moved, grad in zip(module.parameters(), stepped.parameters(), grads, strict=True):
            state = optimizer.state[parameter] if steps else {}
            zeros = torch.zeros_like(parameter)
            own = grad + decay * parameter.detach() if kind is torch.optim.Adam else grad
            found = adam_direction(
                own,
                state.get("exp_avg", zeros),
                state.get("exp_avg_sq", zeros),
                state.get("step", 0),
                optimizer.param_groups[0]["betas"],
                optimizer.param_groups[0]["eps"],
                max_exp_avg_sq=state.get("max_exp_avg_sq", zeros) if options.get("amsgrad") else None,
            )
            before = parameter.detach()
            if kind is torch.optim.AdamW:
                before = before * (1 - rate * decay)
            torch.testing.assert_close(moved.detach(), before - rate * found[i], rtol=1e-13, atol=1e-15)


def test_amsgrad_is_another_direction():
    state = torch.zeros(2), torch.ones(2), 3
    plain = adam_direction(torch.ones(1, 2), *state)
    largest = adam_direction(torch.ones(1, 2), *state, max_exp_avg_sq=torch.full((2,), 100.0))
    assert (largest < plain / 5).all()


def test_a_complex_gradient_has_the_directions_of_its_parts():
    parts = torch.randn(4, 3, 5, 2, dtype=torch.float64)
    parts[2:] = parts[2:].square()
    grads, first, second, most = torch.view_as_complex(parts)
    found = adam_direction(grads[None], first, second, 3, max_exp_avg_sq=most)
    expected = adam_direction(parts[:1], parts[1], parts[2], 3, max_exp_avg_sq=parts[3])
    torch.testing.assert_close(torch.view_as_real(found), expected)


@pytest.mark.parametrize(("dtype", "found"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_the_direction_is_in_float32_at_least(dtype, found):
    state = torch.zeros(3, dtype=dtype)
    assert adam_direction(torch.ones(2, 3, dtype=dtype), state, state, 0).dtype == found


def test_a_state_of_another_parameter_is_refused():
    with pytest.raises(
        OptionError, match=r"exp_avg_sq has shape \(3,\), but a sample's gradient has \(2,\): pass the st"
    ):
        adam_direction(torch.ones(4, 2), torch.ones(2), torch.ones(3), 1)
    with pytest.raises(
        OptionError, match="step=-1 is not allowed: pass the number of steps behind the state, 0 or more"
    ):
        adam_direction(torch.ones(4, 2), torch.ones(2), torch.ones(2), -1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Directions and gradients at two checkpoints of a training with Adam."""
    folder = tmp_path_factory.mktemp("checkpoints")
    parts, train_parts, test_parts = [], [], []
    for number, steps in enumerate((2, 5)):
        module, optimizer = trained(torch.optim.Adam, steps, lr=0.01)
        grads = split(module, sample_grads(module, *data(6, seed=3)))
        directions = torch.cat(
            [
                adam_direction(grad, state["exp_avg"], state["exp_avg_sq"], state["step"]).flatten(1)
                for grad, state in zip(grads, (optimizer.state[each] for each in module.parameters()), strict=True)
            ],
            1,
        )
        test_grads = sample_grads(module, *data(3, seed=4))
        parts.append((directions, test_grads))
        at = {"checkpoint": number, "step": steps}
        train_parts.append((directions, {"sample_index": torch.arange(6), **at}))
        test_parts.append((test_grads, {"sample_index": torch.arange(3), **at}))
    described = [{"step": 2, "learning_rate": 0.01}, {"step": 5, "learning_rate": 0.002}]
    options = {"shapes": shapes_of(net()), "checkpoints": described}
    train = store_of(folder / "train", train_parts, settings={"direction": "adam"}, **options)
    return train, store_of(folder / "test", test_parts, settings={"direction": None}, **options), parts


@pytest.mark.parametrize("rates", [None, (3.0, 2.0)])
def test_less_is_the_sum_of_cosines(checkpoints, rates):
    train, test, parts = checkpoints
    expected = torch.zeros(6, 3, dtype=torch.float64)
    for (directions, test_grads), rate in zip(parts, rates or (0.01, 0.002), strict=True):
        for i, direction in enumerate(directions):
            for j, grad in enumerate(test_grads):
                expected[i, j] += rate * (direction @ grad) / (direction.norm() * grad.norm())
    found = less(train, test, rates)
    torch.testing.assert_close(found.scores, expected, rtol=1e-12, atol=1e-12)
    assert found.convention.startswith("sum over checkpoints of learning_rate * cos(Gamma, g'): positive where")


def test_a_positive_score_is_a_sample_whose_step_of_adam_lowers_the_loss(checkpoints):
    train, test, _ = checkpoints
    scores = less(train.at(1), test.at(1)).scores
    inputs, targets = data(6, seed=3)
    test_inputs, test_targets = data(3, seed=4)
    module, optimizer = trained(torch.optim.Adam, 5, lr=0.01)
    signs = torch.empty_like(scores)
    for i in range(6):
        stepped = copy.deepcopy(module)
        again = torch.optim.Adam(stepped.parameters())
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        again.param_groups[0]["lr"] = 1e-7
        stepped.zero_grad()
        F.cross_entropy(stepped(inputs[i : i + 1]), targets[i : i + 1]).backward()
        again.step()
        with torch.no_grad():
            losses = [F.cross_entropy(each(test_inputs), test_targets, reduction="none") for each in (module, stepped)]
        signs[i] = (losses[0] - losses[1]).sign()
    assert torch.equal(scores.sign(), signs)


def test_numbers_by_hand(tmp_path):
    described = [{"step": 1, "learning_rate": 0.5}, {"step": 2, "learning_rate": 0.25}]
    sides = {"train": ([[3.0, 4.0]], [[0.0, 2.0]]), "test": ([[1.0, 0.0]], [[3.0, 4.0]])}
    train, test = (
        store_of(
            tmp_path / side,
            [
                (torch.tensor(values, dtype=torch.float64), {"sample_index": [0], "checkpoint": number})
                for number, values in enumerate(parts)
            ],
            checkpoints=described,
            settings={"direction": "adam" if side == "train" else None},
        )
        for side, parts in sides.items()
    )
    assert less(train, test).scores.item() == pytest.approx(0.5 * 0.6 + 0.25 * 0.8, rel=1e-15)


def test_directions_in_place_of_test_gradients_are_refused(checkpoints):
    with pytest.raises(OptionError, match="the test store was written with direction='adam', but of test samples less"):
        less(checkpoints[1], checkpoints[0])


@pytest.mark.parametrize("settings", [{}, {"direction": None}])
def test_gradients_in_place_of_train_directions_are_refused(tmp_path, settings):
    store = simple(tmp_path / "store", [[1.0]], settings=settings)
    text = (
        "the train store was written with direction=None, but of training samples less takes what Adam would step "
        "along: collect them with direction='adam'"
    )
    with pytest.raises(OptionError, match=text):
        less(store, store)


def test_rates_are_needed(tmp_path):
    train = simple(tmp_path / "train", [[1.0]], checkpoints=[{"step": 5}], settings={"direction": "adam"})
    test = simple(tmp_path / "test", [[1.0]], checkpoints=[{"step": 5}])
    with pytest.raises(
        OptionError, match=r"step 5 is in neither manifest: pass less\(\.\.\., learning_rates=\[\.\.\.\]\)"
    ):
        less(train, test)


def test_rates_that_are_all_zero_score_nothing(tmp_path):
    described = [{"step": 5, "learning_rate": 0.0}]
    train = simple(tmp_path / "train", [[1.0]], checkpoints=described, settings={"direction": "adam"})
    test = simple(tmp_path / "test", [[1.0]], checkpoints=described)
    text = r"the learning rate of every checkpoint \(step 5\) is 0, .* pass less\(\.\.\., learning_rates=\[\.\.\.\]\)"
    with pytest.raises(OptionError, match=text):
        less(train, test)
    assert float(less(train, test, learning_rates=[1.0]).scores[0, 0]) == pytest.approx(1.0)
