"""What a ledger costs: a whole Trainer.fit with the monitor and the writer at every step beside one without the writer.

    python -m tests.benchmarks.cost_of_ledger [--models small mlp cnn] [--pairs 9] [--steps 300] [--json FILE]
        [--flush-every 100] [--profile FILE]

Both fits of a pair run in this process, one after the other, and which of them comes first alternates. Every ratio is
that of a pair. Shown are the median and the middle half of the ratios, of the time that passed and of the time that
the process spent on its processors, which other programs of the machine disturb less, and last the ratio of the least
of the latter, which they disturb least. OMP_NUM_THREADS=1 makes all of them steadier. --profile writes where the time
of one more fit with both callbacks goes, for pstats.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import logging
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_persample import PerSampleGradientMonitor, PerSampleGradientWriter
from tests.benchmarks.timed_fits import EPOCH, middle, prepared_fit
from tests.benchmarks.timed_models import MODELS, Built


def small(batch_size: int = 32, width: int = 64) -> Built:
    """20-64-64-10: a step is little but what Python does in it."""
    module = nn.Sequential(*(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)))
    return module, torch.randn(batch_size, 20)


TIMED: dict[str, tuple[str, Callable[[], Built]]] = {
    "small": ("MLP 20-64-64-10, batch 32", small),
    **{name: MODELS[name] for name in ("mlp", "cnn")},
}


def fit_seconds(
    build: Callable[[], Built], steps: int, written: bool, flush_every: int, profile: cProfile.Profile | None = None
) -> tuple[float, float]:
    """Seconds that pass, and that this process computes, in a fit."""
    with tempfile.TemporaryDirectory() as folder:
        callbacks: list[L.Callback] = [PerSampleGradientMonitor(every_n_steps=1)]
        if written:
            callbacks.append(PerSampleGradientWriter(Path(folder) / "ledger", flush_every=flush_every))
        fit = prepared_fit(build, steps, folder, callbacks)
        if profile is not None:
            profile.enable()
        passed, computed = time.perf_counter(), time.process_time()
        fit()
        passed, computed = time.perf_counter() - passed, time.process_time() - computed
        if profile is not None:
            profile.disable()
        return passed, computed


def compare(build: Callable[[], Built], steps: int, pairs: int, flush_every: int) -> dict[str, Any]:
    """The ratios of the pairs, and the milliseconds of a step in the median of the fits."""
    for written in (False, True):  # what is done once in a process
        fit_seconds(build, EPOCH, written, flush_every)
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for pair in range(pairs):
        for written in (False, True) if pair % 2 == 0 else (True, False):
            seconds[written].append(fit_seconds(build, steps, written, flush_every))
    found: dict[str, Any] = {}
    for place, kind in enumerate(("wall", "process")):
        alone, both = ([fit[place] for fit in seconds[written]] for written in (False, True))
        found[kind] = {
            **middle([b / a for a, b in zip(alone, both, strict=True)]),
            "of_fastest": min(both) / min(alone),
            "alone_ms": 1e3 * statistics.median(alone) / steps,
            "with_ledger_ms": 1e3 * statistics.median(both) / steps,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(TIMED), default=list(TIMED))
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--flush-every", type=int, default=100)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path)
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error("--pairs: a spread needs at least 2")
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    threads = f"{torch.get_num_threads()} threads"
    machine = f"{platform.machine()}, {threads}, torch {torch.__version__}, float32, {options.pairs} pairs"
    print(f"{machine}, {options.steps} steps\n")
    print("| model | monitor alone | with writer | wall | process | process, fastest |\n|---|---|---|---|---|---|")
    results = {}
    for model in options.models:
        title, build = TIMED[model]
        one = results[model] = compare(build, options.steps, options.pairs, options.flush_every)
        cells = [f"{t['ratio']:.3f}x ({t['low']:.3f} to {t['high']:.3f})" for t in (one["wall"], one["process"])]
        wall = one["wall"]
        times = f"{wall['alone_ms']:.2f} ms | {wall['with_ledger_ms']:.2f} ms"
        print(f"| {title} | {times} | {' | '.join(cells)} | {one['process']['of_fastest']:.3f}x |", flush=True)
    if options.json:
        shown = {"machine": machine, "steps": options.steps, "results": results}
        options.json.write_text(json.dumps(shown, indent=2))
    if options.profile:
        profile = cProfile.Profile()
        fit_seconds(TIMED[options.models[0]][1], options.steps, True, options.flush_every, profile)
        profile.dump_stats(options.profile)


if __name__ == "__main__":
    main()
