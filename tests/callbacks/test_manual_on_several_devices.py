"""Manual optimization under DDP: records of each process, statistics of all of them, and nobody waits for anybody."""

from __future__ import annotations

import math

import pytest
import torch

from tests.callbacks.manual_runs import STEPS
from tests.callbacks.test_optimizer_steps import norms
from tests.callbacks.ways import BATCH
from tests.processes import run_ranks, saved_by_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed")

NAMES = ("Trunk", "GAN", "RestsOnOneRank", "Accumulates", "FailsOnOneRank", "NoBackwardOnOneRank")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every run gave on both ranks, from one pair of processes."""
    folder = tmp_path_factory.mktemp("manual")
    ended = run_ranks("tests.callbacks.manual_runs", str(folder), *NAMES, timeout=60)

    return saved_by_ranks(ended, folder)


@pytest.mark.parametrize("name", NAMES)
def test_training_is_untouched_and_records_are_those_of_the_loop(results, name):
    for rank in results(name):
        for parameter, value in rank["plain"]["weights"].items():
            assert torch.equal(value, rank["watched"]["weights"][parameter]), parameter
        assert not rank["watched"]["left"]
        reference = rank["plain"]["reference"]
        if rank["watched"]["warnings"]:
            continue
        assert len(reference) == len(rank["watched"]["norms"]) > 0
        for found, expected in zip(rank["watched"]["norms"], reference, strict=True):
            torch.testing.assert_close(found, norms(expected, ""), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_logs_the_same_with_one_collective_at_each_logged_step(results, name):
    first, second = results(name)
    assert repr(first["watched"]["values"]) == repr(second["watched"]["values"])
    logged = [1, 2, 3, 5] if name == "GAN" else list(range(STEPS))
    for rank in (first, second):
        own = list(rank["watched"]["calls"])
        for call in rank["plain"]["calls"]:
            own.remove(call)
        assert own == [(batch, "all_gather") for batch in logged]
        assert rank["watched"]["collectives"] - rank["plain"]["collectives"] == len(logged)


def assert_values(values, optimizer, expected, prefix="per_sample_grad"):
    found = {
        key.rsplit("/", 1)[1]: v for key, v in values.items() if key.startswith(f"{prefix}/optimizer_{optimizer}/")
    }
    assert found["norm_mean"] == pytest.approx(expected.mean().item(), rel=1e-4)
    assert found["norm_p95"] == pytest.approx(expected.quantile(0.95).item(), rel=1e-4)
    assert (found["samples"], found["coverage"]) == (len(expected), 1.0)


def of_both(ranks, number, *parts):
    return torch.cat([norms(rank["plain"]["reference"][number], *parts) for rank in ranks])


def test_statistics_are_of_the_samples_of_all_ranks(results):
    ranks = results("Trunk")
    for batch, values in enumerate(ranks[0]["watched"]["values"]):
        assert_values(values, 0, of_both(ranks, batch, "trunk", "first"))
        assert_values(values, 1, of_both(ranks, batch, "second"))
    ranks = results("GAN")
    for batch in (1, 3, 5):
        values = ranks[0]["watched"]["values"][batch]
        assert_values(values, 0, of_both(ranks, 2 * batch, "generator"))
        assert_values(values, 1, of_both(ranks, 2 * batch + 1, "critic"))
    assert_values(values, 1, of_both(ranks, 2 * batch + 1, "critic"), "per_sample_third")


def test_an_optimizer_may_rest_on_one_rank_or_on_all(results):
    ranks = results("RestsOnOneRank")
    values = ranks[0]["watched"]["values"]
    for batch in range(STEPS - 1):
        own = ranks if batch % 2 == 0 else ranks[:1]
        assert_values(values[batch], 1, of_both(own, batch, "second"))
        assert_values(values[batch], 0, of_both(ranks, batch, "trunk", "first"))
    before = values[-2]["per_sample_grad/optimizer_1/norm_mean"]
    assert values[-1]["per_sample_grad/optimizer_1/norm_mean"] == before  # (in the loggers it is nan)


def test_backward_passes_that_do_not_synchronize_count(results):
    ranks = results("Accumulates")
    for batch, values in enumerate(ranks[0]["watched"]["values"]):
        parts = [of_both(ranks, number, "trunk", "first") for number in (2 * batch, 2 * batch + 1)]
        assert_values(values, 0, torch.cat(parts))


@pytest.mark.parametrize("name", ["FailsOnOneRank", "NoBackwardOnOneRank"])
def test_nobody_waits_for_a_rank_without_a_record(results, name):
    ranks = results(name)
    values = ranks[0]["watched"]["values"]
    samples = [each["per_sample_grad/optimizer_1/samples"] for each in values]
    assert samples == [2 * BATCH, 2 * BATCH, BATCH, 2 * BATCH, 2 * BATCH, 2 * BATCH]
    assert not any(math.isnan(value) for each in values for value in each.values())
    assert ranks[0]["watched"]["warnings"] == []
