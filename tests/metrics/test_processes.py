"""Two processes with a share of the samples each say what one process with all of them says."""

from __future__ import annotations

import pytest
import torch

from tests.metrics.inputs import CASES, batches, results
from tests.metrics.shared_runs import KINDS, SHARES, add_share, collected
from tests.processes import run_ranks


def _as_long(by_rank):
    longest = max(map(len, by_rank))
    return [own * (longest // len(own)) for own in by_rank]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    ended = run_ranks("tests.metrics.shared_runs", str(folder), timeout=90)
    assert ended.codes == [0, 0], "\n".join(ended.outputs)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", SHARES)
def test_two_processes_equal_one(runs, share, kind, name):
    alone = results(add_share(CASES[name].make(), CASES[name], kind, [[slice(0, 6)]], range(8)))
    if (
        kind == "samples that are not" and name == "signal to noise"
    ):  # a call is left out whole, on a process and so alone
        shares = [[part for each in own for part in each] for own in zip(*_as_long(SHARES[share]), strict=True)]
        alone = results(add_share(CASES[name].make(), CASES[name], kind, shares, range(8)))
    for run in runs:
        assert run["found"][share, kind, name] == pytest.approx(alone, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("name", CASES)
def test_forward_may_exchange_at_each_step(runs, name):
    batch = batches()[0]
    value = CASES[name].make()(**CASES[name].arguments(batch, batch))
    expected = {key: each.item() for key, each in (value if isinstance(value, dict) else {"": value}).items()}
    for run in runs:
        assert run["on_step"][name] == pytest.approx(expected, rel=1e-12)


def test_a_collection_exchanges_as_its_metrics_do(runs):
    alone = collected(slice(0, 6))
    for run in runs:
        assert run["collected"] == pytest.approx(alone, rel=1e-12)


def test_a_share_taken_for_the_whole_batch_is_refused(runs):
    for run in runs:
        assert run["misread"].startswith("step 0 was given several whole batches")
