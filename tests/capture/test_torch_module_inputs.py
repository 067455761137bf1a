"""Module inputs that ship inside torch: every module with parameters is exact, or refused by name; never wrong."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.capture.shipped_verdict import Found, assert_none_wrong, judge
from tests.capture.torch_databases import MODULES, has_parameters, module_cases
from tests.torch_release import OLDEST, RELEASE

pytestmark = pytest.mark.usefixtures("double_precision")

# fmt: off
KNOWN = (
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d",
    "ConvTranspose3d", "LazyConv1d", "LazyConv2d", "LazyConv3d", "LazyConvTranspose1d", "LazyConvTranspose2d",
    "LazyConvTranspose3d", "Linear", "Bilinear", "LinearCrossEntropyLoss", "GroupNorm", "InstanceNorm1d",
    "InstanceNorm2d", "InstanceNorm3d", "LayerNorm", "RMSNorm", "TransformerEncoder", "TransformerEncoderLayer",
    "TransformerDecoderLayer", "Transformer", "MultiheadAttention", "Embedding", "PReLU", "RNNCell", "GRUCell",
    "LSTMCell", "RNN", "GRU", "LSTM",
)
# fmt: on
NAMES = tuple(name for name in KNOWN if name in MODULES)  # (an older torch has fewer)
EAGER = tuple(name for name in NAMES if not name.startswith("Lazy"))  # a lazy one is its layer after its first call
MORE = {
    "LinearCrossEntropyLoss": 2,
    "MultiheadAttention": 2,
    "PReLU": 5,
    "InstanceNorm1d": 8,
    "InstanceNorm2d": 8,
    "InstanceNorm3d": 8,
}


# What looks whether it is trained; the others do the same in evaluation.
IN_TWO_WAYS = ("BatchNorm", "InstanceNorm", "Transformer", "MultiheadAttention", "RNN", "GRU", "LSTM")


@cache
def verdicts(name: str, most: int, every_axis: bool = False, evaluated: bool = True) -> Found:
    """The outcome of every trial of a module by the trial's name, in training and evaluation, mean and sum in turn."""
    found = []
    for training in (True, False) if evaluated else (True,):
        for place, trial in enumerate(module_cases(name, training, most, every_axis=every_axis)):
            reduction = ("mean", "sum")[place % 2]
            found.append((f"{trial.name} {reduction}", judge(trial, reduction)))
    return tuple(found)


def few(name: str, evaluated: bool = False) -> Found:
    looks = name.startswith(IN_TWO_WAYS) and not name.endswith("Cell")
    return verdicts(name, MORE.get(name, 1 if "Transformer" in name else 3), evaluated=evaluated or looks)


@pytest.mark.parametrize("name", [n if n in EAGER else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_a_module_is_exact_or_refused_by_name(name: str) -> None:
    found = few(name)
    assert_none_wrong(found)
    if RELEASE > OLDEST or not name.startswith("InstanceNorm"):  # (of which torch 2.6 ships no batch)
        assert any(verdict.outcome == "exact" and verdict.reference == "loop" for _, verdict in found)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_along_every_axis_of_more_inputs(name: str) -> None:
    assert_none_wrong(verdicts(name, 24, every_axis=True))


@pytest.mark.parametrize("name", ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d"])
def test_batch_norm_says_that_it_mixes_samples_in_training(name: str) -> None:
    found = [(trial, verdict) for trial, verdict in few(name) if "train" in trial and "axis=0" in trial]
    assert found
    for trial, verdict in found:
        assert verdict.outcome == "noted", trial
        assert "normalises with the statistics of the whole batch" in verdict.detail


def test_every_module_with_parameters_has_inputs_here() -> None:
    assert {name for name in MODULES if has_parameters(name)} <= set(KNOWN)


def test_refused_although_a_loop_gives_it() -> None:
    outcomes = {name: {(v.outcome, v.reference) for _, v in few(name)} for name in EAGER}
    assert [name for name, found in outcomes.items() if ("unsupported", "loop") in found] == []


@pytest.mark.parametrize(
    ("evaluated", "least"),
    [(False, 200 if RELEASE > OLDEST else 180), pytest.param(True, 250, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_counts(evaluated: bool, least: int, capsys: pytest.CaptureFixture[str]) -> None:
    counts = Counter(verdict.outcome for name in EAGER for _, verdict in few(name, evaluated))
    with capsys.disabled():
        print(f"\nmodule inputs of torch: {dict(counts)}")
    assert counts["exact"] >= least
    assert counts["wrong"] == 0
