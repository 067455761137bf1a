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
WAYS = {
    "DDP": (
        "plain", "LBFGS", "clipping by norm", "accumulation schedule", "16-mixed", "bf16-true", "reentrant checkpoint",
        "checkpoint", "compiled part, traced only", "manual", "manual, two backward passes", "GAN, toggled",
        "GAN, not toggled",
    ),
    "FSDP2": (
        "plain", "clipping by norm", "accumulation", "16-mixed", "bf16-true", "reentrant checkpoint", "checkpoint",
        "manual", "GAN, toggled",
    ),
}  # fmt: skip
# Other dtypes of these, another norm, and another backend behind the same tracing.
SLOW = {
    "DDP": ("clipping by value", "bf16-mixed", "64-true", "compiled part", "manual, 16-mixed"),
    "FSDP2": ("clipping by value", "bf16-mixed"),
}
TWO_EPOCHS = ("plain", "accumulation schedule", "GAN, toggled")


@pytest.fixture(scope="module")
def on_several_devices():
    return cache(lambda strategy, names: in_processes(strategy, ENGINES[:1], names, timeout=100, two=TWO_EPOCHS))


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        pytest.param(strategy, name, marks=[*slow, *([not_in_the_oldest] if strategy == "FSDP2" else [])])
        for ways, slow in ((WAYS, []), (SLOW, [pytest.mark.slow]))
        for strategy, names in ways.items()
        for name in names
    ],
)
def test_a_way_of_training_on_several_devices(strategy, name, on_several_devices):
    ways = WAYS if name in WAYS[strategy] else SLOW
    verdict = on_several_devices(strategy, ways[strategy])[name, "expanded"]
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
