"""Parameters under ``fully_shard`` on two processes: the values of the loop, and gradients left as they were."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.capture.sharded_runs import BATCHES, CASES
from tests.in_turn import in_turn
from tests.processes import run_ranks
from tests.torch_release import not_in_the_oldest

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed"),
    not_in_the_oldest,
]

HIDDEN = [f"{name}, {reshard}" for name in CASES if name.startswith("hidden") for reshard in (True, False)]
RESHARDED = in_turn([name for name in CASES if not name.startswith("hidden")], [True, False])
SLOW = [f"{case.values[0]}, {case.values[1]}" for case in RESHARDED if case.marks]
EXACT = ["replicated and sharded", *(f"{case.values[0]}, {case.values[1]}" for case in RESHARDED)]
OTHERS = ["half precision", "tensor parallel", "tensor parallel, sharded"]
DISTRIBUTED = "it is a DTensor in the forward, too (tensor parallelism): a sample's gradient lies on several devices"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What both ranks found by the key of a case. One pair of processes does all that are not slow."""

    @cache
    def of_all(slow):
        folder = tmp_path_factory.mktemp("sharded")
        keys = SLOW if slow else [key for key in (*HIDDEN, *EXACT, *OTHERS) if key not in SLOW]
        ended = run_ranks("tests.capture.sharded_runs", str(folder), *keys, timeout=90)
        assert ended.codes == [0, 0], "\n".join(output[-4000:] for output in ended.outputs)
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]

    return lambda key: [rank[key] for rank in of_all(key in SLOW)]


def marked(keys):
    return [pytest.param(key, marks=pytest.mark.slow) if key in SLOW else key for key in keys]


def steps(found, key):
    return [step for rank in found(key) for step in rank]


@pytest.mark.parametrize("key", marked([*EXACT, *HIDDEN, "half precision"]))
def test_gradients_are_equal_bit_for_bit(found, key):
    for step in steps(found, key):
        assert step["grads"].keys() == step["plain"].keys()
        for name, grad in step["plain"].items():
            assert torch.equal(grad, step["grads"][name]), name


@pytest.mark.parametrize("key", marked(EXACT))
def test_values_are_those_of_the_loop(found, key):
    assert len(steps(found, key)) == 2 * BATCHES
    for step in steps(found, key):
        assert step["unsupported"] == {}
        assert step["coverage"] == 1.0
        assert step["grad_samples"].keys() == step["loop"].keys() == step["sq_norms"].keys()
        for name, expected in step["loop"].items():
            torch.testing.assert_close(step["grad_samples"][name], expected, rtol=1e-9, atol=1e-12)
            norms = torch.linalg.vector_norm(expected.flatten(1), dim=1)
            torch.testing.assert_close(step["sq_norms"][name].sqrt(), norms, rtol=1e-9, atol=1e-12)


def test_values_in_half_precision_are_those_of_the_loop(found):
    for step in steps(found, "half precision"):
        assert step["grad_samples"].keys() == step["loop"].keys()
        for name, expected in step["loop"].items():
            grads = step["grad_samples"][name]
            assert grads.dtype == torch.float32
            assert (grads - expected).norm() <= 0.02 * expected.float().norm(), name


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(
    ("case", "parameter", "texts"),
    [
        ("hidden", "1.weight", ("its gradient also arrives through MulBackward0",)),
        (
            "hidden, other method",
            "1.other.inner.weight",
            ("its gradient came from a forward of a sharded module that cannot be seen", "its gradient also arrives"),
        ),
    ],
)
def test_a_weight_that_is_used_unseen_is_refused_by_name(found, case, parameter, texts, reshard):
    for step in steps(found, f"{case}, {reshard}"):
        assert step["unsupported"].keys() == {parameter, "2.weight", "2.bias"}  # the batch is lost behind it
        assert step["unsupported"][parameter].startswith(texts)
        assert step["coverage"] < 1
        assert step["grad_samples"].keys() == step["loop"].keys() - step["unsupported"].keys()
        for name, grads in step["grad_samples"].items():
            torch.testing.assert_close(grads, step["loop"][name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("key", ["tensor parallel", "tensor parallel, sharded"])
def test_tensor_parallelism_is_refused_by_name(found, key):
    for step in found(key):
        assert step["sharded"] == (key == "tensor parallel, sharded")
        assert step["elsewhere"][0] == ("0.weight" if key == "tensor parallel" else "2.weight")
        assert step["sq_norms"] == {}
        for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
            assert step["unsupported"][name] == DISTRIBUTED
