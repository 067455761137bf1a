"""What in-run influence costs: a whole Trainer.fit with InRunInfluence at every step beside one without.

    python -m tests.benchmarks.cost_of_in_run [--models resnet18 gpt] [--pairs 9] [--steps 20] [--refresh 10]
        [--json FILE] [--profile FILE]

The validation data are one batch of the size of a training batch, whose gradient is taken again every `--refresh`
steps; a refresh is part of what is timed. Both fits of a pair run in this process, one after the other, and which of
them comes first alternates. Every ratio is that of a pair: the median and the middle half of them are shown, of the
time that passed and of the time that the process spent on its processors. --profile writes where the time of one more
fit with the callback goes, for pstats.
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
from torch.utils.data import DataLoader, TensorDataset

from lightning_persample import InRunInfluence
from tests.benchmarks.timed_fits import middle, prepared_fit
from tests.benchmarks.timed_models import MODELS, Built


def fit_seconds(
    build: Callable[[], Built], steps: int, refresh: int | None, profile: cProfile.Profile | None = None
) -> tuple[float, float]:
    """Seconds that pass, and that this process computes, in a fit; None is without the callback."""
    with tempfile.TemporaryDirectory() as folder:
        callbacks: list[L.Callback] = []
        if refresh is not None:
            inputs = build()[1]
            validation = DataLoader(TensorDataset(inputs, torch.randint(0, 10, (len(inputs),))), len(inputs))
            callbacks.append(InRunInfluence(Path(folder) / "ledger", validation, refresh_every_n_steps=refresh))
        fit = prepared_fit(build, steps, folder, callbacks)
        if profile is not None:
            profile.enable()
        passed, computed = time.perf_counter(), time.process_time()
        fit()
        passed, computed = time.perf_counter() - passed, time.process_time() - computed
        if profile is not None:
            profile.disable()
        return passed, computed


def compare(build: Callable[[], Built], steps: int, refresh: int, pairs: int) -> dict[str, Any]:
    """The ratios of the pairs, and the milliseconds of a step in the median of the fits."""
    for every in (None, refresh):  # what is done once in a process
        fit_seconds(build, 2, every)
    seconds: dict[int | None, list[tuple[float, float]]] = {None: [], refresh: []}
    for pair in range(pairs):
        for every in (None, refresh) if pair % 2 == 0 else (refresh, None):
            seconds[every].append(fit_seconds(build, steps, every))
    found: dict[str, Any] = {}
    for place, kind in enumerate(("wall", "process")):
        plain, with_callback = ([fit[place] for fit in seconds[every]] for every in (None, refresh))
        found[kind] = {
            **middle([b / a for a, b in zip(plain, with_callback, strict=True)]),
            "plain_ms": 1e3 * statistics.median(plain) / steps,
            "with_in_run_ms": 1e3 * statistics.median(with_callback) / steps,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["resnet18", "gpt"])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--refresh", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path)
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error("--pairs: a spread needs at least 2")
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    threads = f"{torch.get_num_threads()} threads"
    machine = f"{platform.machine()}, {threads}, torch {torch.__version__}, float32, {options.pairs} pairs"
    print(f"{machine}, {options.steps} steps, refreshed every {options.refresh}\n")
    print("| model | plain | with InRunInfluence | wall | process |\n|---|---|---|---|---|")
    results = {}
    for model in options.models:
        title, build = MODELS[model]
        one = results[model] = compare(build, options.steps, options.refresh, options.pairs)
        cells = [f"{t['ratio']:.3f}x ({t['low']:.3f} to {t['high']:.3f})" for t in (one["wall"], one["process"])]
        times = f"{one['wall']['plain_ms']:.1f} ms | {one['wall']['with_in_run_ms']:.1f} ms"
        print(f"| {title} | {times} | {' | '.join(cells)} |", flush=True)
    if options.json:
        shown = {"machine": machine, "steps": options.steps, "refresh": options.refresh, "results": results}
        options.json.write_text(json.dumps(shown, indent=2))
    if options.profile:
        profile = cProfile.Profile()
        fit_seconds(MODELS[options.models[0]][1], options.steps, options.refresh, profile)
        profile.dump_stats(options.profile)


if __name__ == "__main__":
    main()
