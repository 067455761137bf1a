"""TracIn and TracInCP against hand loops over pairs, and against what training really did."""

from __future__ import annotations

import math
import re

import numpy
import pyarrow
import pytest
import torch
import torch.nn.functional as F

from lightning_persample import OptionError, PerSampleError, UnsupportedError
from lightning_persample.influence import self_influence, tracin, tracin_cp
from tests.influence.loops import data, net, sample_grads, shapes_of, simple, store_of

RATES = (0.3, 0.05)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two epochs of SGD over shuffled data: every step's gradients, and those of all samples after each epoch."""
    folder = tmp_path_factory.mktemp("run")
    module = net()
    train_data, test_data = data(11, seed=1), data(4, seed=2)
    generator = torch.Generator().manual_seed(3)
    steps, test_steps, checkpoints = [], [], []
    train_parts, test_parts = [], []
    for rate in RATES:
        optimizer = torch.optim.SGD(module.parameters(), lr=rate)
        for indices in torch.randperm(11, generator=generator).split(4):
            batch = tuple(each[indices] for each in train_data)
            steps.append((indices, sample_grads(module, *batch), rate, 1 / len(indices)))
            test_steps.append(sample_grads(module, *test_data))
            optimizer.zero_grad()
            F.cross_entropy(module(batch[0]), batch[1]).backward()
            optimizer.step()
        number = len(checkpoints)
        checkpoints.append({"step": len(steps), "learning_rate": rate, "path": f"{number}.ckpt"})
        order, test_order = torch.randperm(11, generator=generator), torch.randperm(4, generator=generator)
        at = {"checkpoint": number, "step": len(steps)}
        train_parts.append((sample_grads(module, *train_data)[order], {"sample_index": order, **at}))
        test_parts.append((sample_grads(module, *test_data)[test_order], {"sample_index": test_order, **at}))
    in_run = [
        (grads, {"sample_index": indices, "step": step, "learning_rate": rate, "weight": weight})
        for step, (indices, grads, rate, weight) in enumerate(steps)
    ]
    at_steps = [
        (grads, {"sample_index": torch.arange(4), "step": step, "checkpoint": step})
        for step, grads in enumerate(test_steps)
    ]
    options = {"shapes": shapes_of(module)}
    return {
        "in_run": store_of(folder / "in_run", in_run, checkpoints=(), **options),
        "at_steps": store_of(
            folder / "at_steps", at_steps, checkpoints=[{"step": step} for step in range(len(steps))], **options
        ),
        "train": store_of(folder / "train", train_parts, checkpoints=checkpoints, **options),
        "test": store_of(folder / "test", test_parts, checkpoints=checkpoints, **options),
        "steps": steps,
        "test_steps": test_steps,
        "train_parts": train_parts,
        "test_parts": test_parts,
    }


def by_hand(run, rates=RATES):
    """TracInCP, pair by pair and entry by entry."""
    expected = torch.zeros(11, 4, dtype=torch.float64)
    for (grads, rows), (test_grads, test_rows), rate in zip(run["train_parts"], run["test_parts"], rates, strict=True):
        for i, sample in enumerate(rows["sample_index"].tolist()):
            for j, test_sample in enumerate(test_rows["sample_index"].tolist()):
                products = [a * b for a, b in zip(grads[i].tolist(), test_grads[j].tolist(), strict=True)]
                expected[sample, test_sample] += rate * math.fsum(products)
    return expected


def test_tracin_cp_is_the_loop_over_pairs(run):
    found = tracin_cp(run["train"], run["test"])
    torch.testing.assert_close(found.scores, by_hand(run), rtol=1e-10, atol=1e-10)
    assert (found.train_index, found.test_index) == (tuple(range(11)), tuple(range(4)))
    assert found.convention.startswith("sum over checkpoints of learning_rate * g . g': positive")


def test_tracin_cp_takes_the_rates_that_are_given(run):
    found = tracin_cp(run["train"], run["test"], [2.0, 0.5])
    torch.testing.assert_close(found.scores, by_hand(run, (2.0, 0.5)), rtol=1e-10, atol=1e-10)


def test_parameters_with_rates_of_their_own_are_a_sum_over_groups(run):
    groups = {("0.weight", "0.bias"): (0.3, 0.05), ("2.weight", "2.bias"): (0.03, 0.005)}
    found = sum(
        tracin_cp(run["train"].parameters(names), run["test"].parameters(names), rates).scores
        for names, rates in groups.items()
    )
    own = torch.tensor([1.0] * 16 + [0.1] * 10, dtype=torch.float64)
    scaled = {**run, "train_parts": [(grads * own, rows) for grads, rows in run["train_parts"]]}
    torch.testing.assert_close(found, by_hand(scaled), rtol=1e-10, atol=1e-10)


def test_tracin_is_the_loop_over_the_steps_that_a_sample_took_part_in(run):
    expected = torch.zeros(11, 4, dtype=torch.float64)
    for (indices, grads, rate, weight), test_grads in zip(run["steps"], run["test_steps"], strict=True):
        for i, sample in enumerate(indices.tolist()):
            for j in range(4):
                products = [a * b for a, b in zip(grads[i].tolist(), test_grads[j].tolist(), strict=True)]
                expected[sample, j] += rate * weight * math.fsum(products)
    found = tracin(run["in_run"], run["at_steps"])
    torch.testing.assert_close(found.scores, expected, rtol=1e-10, atol=1e-10)
    assert found.convention.startswith("sum over the sample's rows of learning_rate * weight * g . g': positive")


def test_on_a_quadratic_tracin_is_the_first_order_change_of_every_step(tmp_path):
    """For the loss (w . x - y)^2 / 2 the second-order term of a step is known, and the rest is the sum of scores."""
    generator = torch.Generator().manual_seed(5)
    inputs, targets = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, 3), (6,)))
    test_inputs, test_targets = torch.ones(1, 3).double(), torch.tensor([0.5]).double()
    weight, rate = torch.zeros(3, dtype=torch.float64), 0.1
    in_run, at_steps, remainder = [], [], 0.0

    def loss(w):
        return ((test_inputs @ w - test_targets) ** 2 / 2).item()

    start = loss(weight)
    for step in range(4):
        grads = (inputs @ weight - targets)[:, None] * inputs
        rows = {"sample_index": torch.arange(6), "step": step, "learning_rate": rate, "weight": 1 / 6}
        in_run.append((grads, rows))
        test_grads = (test_inputs @ weight - test_targets)[:, None] * test_inputs
        at_steps.append((test_grads, {"sample_index": [0], "step": step}))
        move = -rate * grads.mean(0)
        remainder += ((test_inputs @ move) ** 2 / 2).item()
        weight = weight + move
    found = tracin(
        store_of(tmp_path / "train", in_run, checkpoints=()), store_of(tmp_path / "test", at_steps, checkpoints=())
    )
    assert found.scores.sum().item() - remainder == pytest.approx(start - loss(weight), rel=1e-12)


def test_rows_of_one_sample_in_one_step_add_up(tmp_path):
    rows = {"sample_index": [3, 3], "step": 2, "learning_rate": 0.5, "weight": [0.5, 0.25]}
    train = store_of(tmp_path / "train", [(torch.tensor([[1.0, 2.0], [4.0, 0.0]]).double(), rows)], checkpoints=())
    test = store_of(tmp_path / "test", [(torch.tensor([[1.0, 1.0]]).double(), {"sample_index": [0], "step": 2})])
    found = tracin(train, test)
    assert found.scores.tolist() == [[0.25 * 3 + 0.125 * 4]]
    assert found.train_index == (3,)


def test_learning_rates_that_differ_from_row_to_row_are_refused(tmp_path):
    """As the writer's are of groups of parameters: 0.5 and 0.1 for the two entries, weighted by their squares."""
    values = torch.tensor([[1.0, 2.0], [4.0, 0.0]], dtype=torch.float64)
    rows = {"sample_index": [0, 1], "step": 2, "learning_rate": [0.18, 0.5], "weight": 0.5}
    shapes = {"one": (1,), "other": (1,)}
    train = store_of(tmp_path / "train", [(values, rows)], checkpoints=(), shapes=shapes)
    at = {"sample_index": [0], "step": 2}
    test = store_of(tmp_path / "test", [(torch.ones(1, 2).double(), at)], checkpoints=(), shapes=shapes)
    with pytest.raises(
        UnsupportedError, match=r"step 2 have learning rates from 0\.18 to 0\.5, as where groups of param"
    ):
        tracin(train, test)
    found = sum(
        tracin(train.parameters([name]), test.parameters([name]), {2: rate}).scores
        for name, rate in (("one", 0.5), ("other", 0.1))
    )
    torch.testing.assert_close(found, torch.tensor([[0.25 * 1 + 0.05 * 2], [0.25 * 4]], dtype=torch.float64))
    with pytest.raises(
        OptionError, match="learning_rates has none of step 2: pass one for each of the 1 steps that the"
    ):
        tracin(train, test, {3: 0.5})


def test_the_step_of_a_checkpoint_stands_for_that_of_its_rows(tmp_path):
    rows = {"sample_index": [3], "step": 2, "learning_rate": 0.5, "weight": 0.5}
    train = store_of(tmp_path / "train", [(torch.ones(1, 2).double(), rows)], checkpoints=())
    test = simple(tmp_path / "test", [[1.0, 1.0]], checkpoints=[{"step": 2}])
    assert tracin(train, test).scores.tolist() == [[0.5]]


def test_steps_without_test_gradients_are_refused(run):
    part = run["at_steps"].select(run["at_steps"].rows["step"] != 4)
    text = (
        r"the train store has rows of 6 steps, 0, 1, 2, 3, 4 and 1 more, and the test store has none of 1 of these, 4, "
        r"but of 0, 1, 2, 3, 5: collect the test gradients at checkpoints of these steps, or leave the rows out with "
        r"(train\.select\(.*\))\. A checkpoint of step t is one that is saved before step t, after t steps, as in "
        r"on_train_batch_start; ModelCheckpoint saves after a step, so that it has none of step 0$"
    )
    with pytest.raises(PerSampleError, match=text) as error:
        tracin(run["in_run"], part)
    advice = re.search(text, str(error.value))[1]
    found = tracin(eval(advice, {"numpy": numpy, "train": run["in_run"], "test": part}), part)
    assert found.scores.shape == (11, 4)


def test_a_store_that_was_not_written_during_training_has_no_weights(run):
    with pytest.raises(
        UnsupportedError, match=r"11 of 11 rows .* have no 'learning_rate', which tracin needs: .*tracin_cp"
    ):
        tracin(run["train"], run["test"])


def test_an_unknown_step_is_refused(tmp_path):
    store = simple(tmp_path / "store", [[1.0]], checkpoints=())
    with pytest.raises(UnsupportedError, match="the step of 1 of 1 rows of the train store is unknown"):
        tracin(store, store)


@pytest.mark.parametrize(
    ("checkpoints", "rates", "text"),
    [
        (
            [{"step": 5}],
            None,
            r"the learning rate of checkpoint step 5 is in neither manifest: pass tracin_cp\(\.\.\., ",
        ),
        ([{"step": 5, "learning_rate": 0.2}], None, "step 5 is 0.1 in the train store and 0.2 in the test store: pass"),
        (
            [{"step": 5}],
            [0.1, 0.2],
            r"learning_rates has 2 numbers, but the train store has 1 checkpoints, steps 5: pass",
        ),
    ],
)
def test_rates_that_are_not_known_are_refused(tmp_path, checkpoints, rates, text):
    own = {} if "learning_rate" in checkpoints[0] else {"checkpoints": checkpoints}
    train = simple(tmp_path / "train", [[1.0]], **own)
    test = simple(tmp_path / "test", [[1.0]], checkpoints=checkpoints)
    with pytest.raises(OptionError, match=text):
        tracin_cp(train, test, rates)


def test_a_rate_that_one_manifest_knows_is_taken(tmp_path):
    train = simple(tmp_path / "train", [[2.0]], checkpoints=[{"step": 5}])
    test = simple(tmp_path / "test", [[3.0]], checkpoints=[{"step": 5, "learning_rate": 0.5}])
    assert tracin_cp(train, test).scores.tolist() == [[3.0]]


def test_self_influence_of_a_store_is_that_of_its_rows(run):
    train, values = run["in_run"], torch.cat([block for _, block in run["in_run"].blocks()])
    rates = train.rows["learning_rate"]
    expected = dict.fromkeys(sorted(set(train.rows["sample_index"].tolist())), 0.0)
    weighted = dict(expected)
    for index, row, rate, weight in zip(
        train.rows["sample_index"].tolist(), values, rates.tolist(), train.rows["weight"].tolist(), strict=True
    ):
        expected[index] += rate * float(row @ row)
        weighted[index] += rate * weight * float(row @ row)
    for found, wanted in ((self_influence(train), expected), (self_influence(train, weighted=True), weighted)):
        assert found.index == tuple(wanted)
        assert found.scores.tolist() == pytest.approx(list(wanted.values()), rel=1e-12)
        assert int(found.counts.sum()) == len(train)
    assert self_influence(train).convention.startswith("sum of learning_rate * norm^2 over the rows: never negative")


def test_self_influence_of_a_store_at_checkpoints_takes_their_rates(tmp_path):
    checkpoints = [{"step": 1, "learning_rate": 0.5}, {"step": 2}]
    rows = [{"sample_index": torch.tensor([4, 2]), "checkpoint": number} for number in (0, 1)]
    values = torch.tensor([[3.0, 4.0], [0.0, 2.0]], dtype=torch.float64)
    store = store_of(tmp_path / "store", [(values, rows[0]), (2 * values, rows[1])], checkpoints=checkpoints)
    with pytest.raises(
        UnsupportedError, match=r"2 of 4 rows of the store have no 'learning_rate': pass learning_rates="
    ):
        self_influence(store)
    found = self_influence(store, learning_rates=[0.5, 1.0])
    assert (found.top(), found.counts.tolist()) == ([(4, 0.5 * 25 + 100), (2, 0.5 * 4 + 16)], [2, 2])
    assert self_influence(store.at(0)).top() == [(4, 12.5), (2, 2.0)]
    assert found.scores.tolist() == tracin_cp(store, store, [0.5, 1.0]).scores.diagonal().tolist()
    with pytest.raises(UnsupportedError, match=r"2 of 2 rows of the store have no 'weight': pass weighted=False"):
        self_influence(store.at(0), weighted=True)
    with pytest.raises(OptionError, match=r"learning_rates=\[1\.0\] is not allowed: .* None for a ledger"):
        self_influence(pyarrow.table({"sample_index": [1]}), learning_rates=[1.0])


ALLOWED = "learning_rates must be a list of finite numbers, one for each checkpoint"
TWO = r"but the train store has 2 checkpoints, steps 1, 2: pass one rate for each, in this order"


@pytest.mark.parametrize(
    ("rates", "text"),
    [
        ([], f"learning_rates has 0 numbers, {TWO}"),
        ([0.5], f"learning_rates has 1 numbers, {TWO}"),
        ([0.5, 1.0, 2.0], f"learning_rates has 3 numbers, {TWO}"),
        ({0: 0.5, 1: 1.0}, rf"learning_rates=\{{0: 0.5, 1: 1.0\}} is not allowed: {ALLOWED}"),
        ([0.5, math.nan], rf"learning_rates=\[0.5, nan\] is not allowed: {ALLOWED}"),
        ([0.5, math.inf], rf"learning_rates=\[0.5, inf\] is not allowed: {ALLOWED}"),
        ([0.5, None], rf"learning_rates=\[0.5, None\] is not allowed: {ALLOWED}"),
        ("ab", f"learning_rates='ab' is not allowed: {ALLOWED}"),
        (0.5, f"learning_rates=0.5 is not allowed: {ALLOWED}"),
        (torch.ones(2, 1), f"learning_rates=.* is not allowed: {ALLOWED}"),
    ],
)
def test_rates_that_do_not_fit_the_checkpoints_are_refused(tmp_path, rates, text):
    store = _at_two_checkpoints(tmp_path)
    for score in (lambda: self_influence(store, learning_rates=rates), lambda: tracin_cp(store, store, rates)):
        with pytest.raises(OptionError, match=f"^{text}"):
            score()


@pytest.mark.parametrize("kind", [list, tuple, numpy.array, torch.tensor])
def test_rates_of_the_checkpoints_as_numbers_of_any_kind(tmp_path, kind):
    store = _at_two_checkpoints(tmp_path)
    assert self_influence(store, learning_rates=kind([0.5, 2.0])).top() == [(4, 0.5 * 9 + 2 * 16)]
    assert tracin_cp(store, store, kind([0.5, 2.0])).scores.tolist() == [[0.5 * 9 + 2 * 16]]


def _at_two_checkpoints(tmp_path):
    """A store of one sample."""
    rows = [{"sample_index": torch.tensor([4]), "checkpoint": number} for number in (0, 1)]
    values = [torch.tensor([[number]], dtype=torch.float64) for number in (3, 4)]
    checkpoints = [{"step": 1}, {"step": 2}]
    return store_of(tmp_path / "store", [*zip(values, rows, strict=True)], checkpoints=checkpoints)


def test_the_rates_are_those_of_all_checkpoints_though_the_samples_of_one_are_unknown(tmp_path):
    rows = [{"sample_index": torch.tensor([index]), "checkpoint": number} for number, index in enumerate((-1, 4))]
    values = [torch.tensor([[number]], dtype=torch.float64) for number in (3, 4)]
    checkpoints = [{"step": 1}, {"step": 2}]
    store = store_of(tmp_path / "store", [*zip(values, rows, strict=True)], checkpoints=checkpoints)
    found = self_influence(store, learning_rates=[0.5, 2.0])
    assert (found.top(), found.unknown) == ([(4, 2.0 * 16)], 1)


@pytest.mark.parametrize("rates", [[0.5], {5: math.nan}, {5: "0.1"}])
def test_rates_of_steps_that_are_no_numbers_are_refused(tmp_path, rates):
    store = simple(tmp_path / "store", [[1.0]], checkpoints=())
    with pytest.raises(OptionError, match="learning_rates must be None or a dict that has a finite number for each"):
        tracin(store, store, rates)
