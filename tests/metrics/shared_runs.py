"""Metrics of which each process gets a share of the samples; run as ``python -m tests.metrics.shared_runs FOLDER``."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchmetrics import MetricCollection

from lightning_persample.errors import PerSampleError
from lightning_persample.metrics import GradientNoiseScale
from tests.metrics.inputs import CASES, batches, results
from tests.torch_release import OLDEST, RELEASE

SHARES = {  # rows of each batch of 6 that either process gets, in one call each
    "halves": ([[slice(0, 3)]], [[slice(3, 6)]]),
    "accumulated": ([[slice(0, 2), slice(2, 3), slice(3, 4)]], [[slice(4, 6)]]),
    "unequal": ([[slice(0, 5)]], [[slice(5, 6)]]),
    "none at one step": ([[slice(0, 6)], [slice(0, 2)]], [[slice(0, 0)], [slice(2, 6)]]),
    "one process has none": ([[slice(0, 6)]], [[]]),
}


KINDS = ("finite", "samples that are not", "a step twice")


def given_batches(kind: str):
    """Batches of which samples are not finite, or two are the same, as with a learning rate of zero."""
    given = [*batches(), *batches()]
    if kind == "samples that are not":
        given[2][4], given[5][0] = torch.nan, torch.inf
    if kind == "a step twice":
        given[3] = given[2]
    return given


def add_share(metric, case, kind, shares, steps):
    """Give a metric this process's rows of some steps, with the numbers of steps that batches do not tell apart."""
    given = given_batches(kind)
    for step in steps:
        number = metric._filter_kwargs(step=step) if kind == "a step twice" else {}
        for rows in shares[step % len(shares)]:
            metric.update(**case.arguments(given[step][rows], given[step]), **number)
    return metric


def misread() -> str:
    """What a metric says that takes a process's share for the whole batch."""
    metric = GradientNoiseScale()
    metric.update(torch.tensor([1.0, 2.0]), 0.5)
    try:
        metric.compute()
    except PerSampleError as error:
        return str(error)
    return "nothing"


def collected(rows) -> dict[str, float]:
    """What a collection says whose metrics share their states, after an exchange in between."""
    chosen = {name: CASES[name] for name in ("cosine", "noise scale", "diversity", "moving noise scale")}
    collection = MetricCollection({name: case.make() for name, case in chosen.items()})
    for step, batch in enumerate(given_batches("finite")):
        collection.update(**CASES["cosine"].arguments(batch[rows], batch))
        if step == 3:
            collection.compute()
    return {name: each.item() for name, each in collection.compute().items()}


def main(folder: str) -> None:
    """Save what every metric says on this process, by share and kind of batches."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    found = {}
    for share, by_rank in SHARES.items():
        for kind in KINDS:
            for name, case in CASES.items():
                metric = add_share(case.make(), case, kind, by_rank[rank], range(4))
                if kind == "finite":
                    metric.compute()  # exchanges, and goes back to the own share
                add_share(metric, case, kind, by_rank[rank], range(4, 8))
                found[share, kind, name] = results(metric)
    on_step = {}
    for name, case in CASES.items():
        metric = case.make(dist_sync_on_step=True)
        batch = batches()[0]
        value = metric(**case.arguments(batch[3 * rank : 3 * rank + 3], batch))
        on_step[name] = {key: each.item() for key, each in (value if isinstance(value, dict) else {"": value}).items()}
    together = collected(slice(3 * rank, 3 * rank + 3))
    said = {"found": found, "on_step": on_step, "collected": together, "misread": misread()}
    torch.save(said, Path(folder, f"{rank}.pt"))
    if RELEASE > OLDEST:  # torch 2.6 sometimes never returns from it
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
