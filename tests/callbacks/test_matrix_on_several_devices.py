"""Ways of training in two processes under DDP and FSDP2: training untouched, values exact, nothing left behind."""

from __future__ import annotations

import fnmatch
from functools import cache

import pytest
import torch

from tests.callbacks.cells import ALL_WAYS, ENGINES
from tests.callbacks.matrix_cells import STRATEGIES, in_processes
from tests.callbacks.test_matrix import REFUSED
from tests.torch_release import not_in_the_oldest

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed")

# On several devices, what Lightning or torch itself does not do there is skipped, by what they say without us.
ON_DDP = (
    "plain", "LBFGS", "clipping by value", "clipping by norm", "accumulation schedule", "16-mixed", "bf16-mixed",
    "bf16-true", "64-true", "reentrant checkpoint", "checkpoint", "compiled part", "manual",
    "manual, two backward passes", "manual, 16-mixed", "GAN, toggled", "GAN, not toggled",
)  # fmt: skip
ON_FSDP2 = (
    "plain", "clipping by value", "clipping by norm", "accumulation", "16-mixed", "bf16-mixed", "bf16-true",
    "reentrant checkpoint", "checkpoint", "manual", "GAN, toggled",
)  # fmt: skip


@pytest.fixture(scope="module")
def on_several_devices():
    names = {"DDP": ON_DDP, "FSDP2": ON_FSDP2}
    return cache(lambda strategy: in_processes(strategy, ENGINES[:1], names[strategy], timeout=100))


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        *(("DDP", name) for name in ON_DDP),
        *(pytest.param("FSDP2", name, marks=not_in_the_oldest) for name in ON_FSDP2),
    ],
)
def test_a_way_of_training_on_several_devices(strategy, name, on_several_devices):
    verdict = on_several_devices(strategy)[name, "expanded"]
    assert (verdict.outcome, verdict.why) == ("ok", "")
    assert verdict.logged["per_sample_grad/samples" if "GAN" not in name else "per_sample_grad/optimizer_0/samples"]


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_way_and_engine_on_several_devices(strategy):
    found = in_processes(strategy, ENGINES, list(ALL_WAYS), timeout=600)
    assert {cell: verdict for cell, verdict in found.items() if verdict.outcome == "wrong"} == {}
    for (name, engine), verdict in found.items():
        if verdict.outcome == "refused":
            assert engine != "expanded"
            sharded = " is sharded (fully_shard), so that every process has to take part in each of its forward passes"
            assert fnmatch.fnmatchcase(verdict.why, REFUSED.get((name, engine), "")) or sharded in verdict.why
