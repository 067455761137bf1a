"""Every way of training beside every engine: training untouched, values exact, and nothing left behind."""

from __future__ import annotations

import fnmatch
from functools import cache

import pytest

from tests.callbacks.cells import ALL_WAYS, ENGINES, MANUAL, cell, plain_run
from tests.in_turn import in_turn
from tests.torch_release import OLDEST, RELEASE

ASIDE = (
    "engine={!r} runs training_step again on single samples, which would step the optimizers, because in manual "
    "optimization training_step does; use engine='expanded': no per-sample gradients are captured in this fit"
)
FAILED = "engine={!r} failed with RuntimeError: {}"
# Cells without values, with the reason that is said; "*" stands for the rest of a text of torch's own.
REFUSED = {(way, engine): ASIDE.format(engine) for way in MANUAL for engine in ENGINES[1:]}
REFUSED |= {
    ("reentrant checkpoint", "vmap"): FAILED.format(
        "vmap", "In order to use an autograd.Function with functorch transforms*"
    ),
    ("reentrant checkpoint", "loop"): (
        "gradients are taken with torch.autograd.grad here, so that no hook of the training runs, and activation "
        "checkpointing with use_reentrant=True gives none to it; use checkpoint(..., use_reentrant=False), or go "
        "without checkpointing"
    ),
    ("checkpoint", "vmap"): FAILED.format(
        "vmap",
        "*You tried to vmap over _NoopSaveInputs*"
        if RELEASE <= OLDEST
        else "torch.func.{grad, vjp, jacrev, hessian} don't yet support saved tensor hooks*",
    ),
}
# Of the two engines with passes of their own, one is tried by default where it is not refused for its own reason.
# A module that is traced and no more is a compiled one; `test_ways_of_training` has it by default, too.
SLOW = {way: [pytest.mark.slow] if "traced" in way else [] for way in ALL_WAYS}
CELLS = [pytest.param(way, ENGINES[0], marks=SLOW[way], id=f"{way}-{ENGINES[0]}") for way in ALL_WAYS]
CELLS += [(way, engine) for way in ("reentrant checkpoint", "checkpoint") for engine in ENGINES[1:]]
CELLS += in_turn(
    [pytest.param(way, marks=SLOW[way], id=way) for way in ALL_WAYS if "checkpoint" not in way], ENGINES[1:]
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Each way without a callback of ours, with the one-sample loop beside it."""
    return cache(lambda name: plain_run(name, tmp_path_factory.mktemp("plain")))


@pytest.mark.filterwarnings("ignore:.*(training_step.* returned .*None|lr_scheduler.step|The `max_batch|not resumable)")
@pytest.mark.filterwarnings("ignore:.*(`?save_checkpoint|Checkpoint directory|.grad attribute of a Tensor|swa|SWA)")
@pytest.mark.parametrize(("name", "engine"), CELLS)
def test_a_way_of_training_beside_an_engine(name, engine, plain, tmp_path):
    verdict = cell(name, engine, plain(name), tmp_path)
    if verdict.outcome == "skipped" and "NotThereError" in verdict.why:
        pytest.skip(verdict.why)
    if (name, engine) in REFUSED:
        assert verdict.outcome == "refused", verdict
        assert fnmatch.fnmatchcase(verdict.why, REFUSED[name, engine])
    else:
        assert (verdict.outcome, verdict.why) == ("ok", "")
