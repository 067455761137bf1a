"""What in-run influence costs: captured steps of a Trainer.fit beside the steps between them, which are not captured.

    python -m tests.benchmarks.cost_of_in_run [--models resnet18 gpt] [--pairs 9] [--json FILE]

One fit captures every second step, so that each captured step has a plain one right before it, and what else runs on
the machine is nearly the same for both. Every ratio is that of such a pair; the median and the middle half of them are
shown, of the time that the process spent on its processors and of the time that passed: of steps that take the dots
with a validation gradient that is there, and of those that take this gradient again, of one batch, too. A fit that
takes it again every n steps, and captures all, has the mean of n - 1 of the former and one of the latter.
"""

from __future__ import annotations

import argparse
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

import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

from lightning_persample import InRunInfluence
from tests.benchmarks.timed_fits import middle, prepared_fit
from tests.benchmarks.timed_models import MODELS, Built

_FRESH = 4  # every so many captured steps take the validation gradient again
_WARM = 4  # pairs that are not counted


class Watch(Callback):
    """Notes how long each step takes: what passes, and what the process computes."""

    def __init__(self) -> None:
        self.seconds: list[tuple[float, float]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self._start = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, *args: Any) -> None:
        passed, computed = self._start
        self.seconds.append((time.perf_counter() - passed, time.process_time() - computed))


def compare(build: Callable[[], Built], pairs: int) -> dict[str, Any]:
    """The ratios of the pairs, and the milliseconds of a plain step."""
    captured = _WARM + -(-pairs * _FRESH // (_FRESH - 1)) + 1
    watch, inputs = Watch(), build()[1]
    validation = DataLoader(TensorDataset(inputs, torch.randint(0, 10, (len(inputs),))), len(inputs))
    with tempfile.TemporaryDirectory() as folder:
        every = {"every_n_steps": 2, "refresh_every_n_steps": 2 * _FRESH}
        in_run = InRunInfluence(Path(folder) / "ledger", validation, **every)
        prepared_fit(build, 2 * captured, folder, [in_run, watch])()
    found: dict[str, Any] = {}
    for place, kind in enumerate(("passed", "computed")):
        plain, with_dots = ([step[place] for step in watch.seconds[first::2]] for first in (0, 1))
        ratios = [b / a for a, b in zip(plain, with_dots, strict=True)]
        counted = range(_WARM, captured)
        found[kind] = {
            "dots": middle([ratios[n] for n in counted if n % _FRESH][:pairs]),
            "dots and gradient": middle([ratios[n] for n in counted if n % _FRESH == 0]),
            "plain_ms": 1e3 * statistics.median(plain[_WARM:]),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["resnet18", "gpt"])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.pairs < 6:
        parser.error("--pairs: at least 6")
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    threads = f"{torch.get_num_threads()} threads"
    machine = f"{platform.machine()}, {threads}, torch {torch.__version__}, float32, {options.pairs} pairs"
    print(f"{machine}\n\n| model | time | plain | dots | dots and a new validation gradient |\n|---|---|---|---|---|")
    results = {}
    for model in options.models:
        title, build = MODELS[model]
        results[model] = compare(build, options.pairs)
        for kind, one in results[model].items():
            cells = ["{ratio:.2f}x ({low:.2f} to {high:.2f})".format(**one[name]) for name in list(one)[:2]]
            print(f"| {title} | {kind} | {one['plain_ms']:.1f} ms | {' | '.join(cells)} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=2))


if __name__ == "__main__":
    main()
