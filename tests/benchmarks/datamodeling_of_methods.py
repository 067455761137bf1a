"""How well scores of this package and of its peers foretell trainings on halves of the data, and what they take.

    python -m tests.benchmarks.datamodeling_of_methods [--tasks mlp cnn] [--methods ekfac ...] [--by-default]
        [--kept FOLDER] [--json FILE]

A network is trained on all data, and 50 times 3 networks on random halves of it. A method gives the scores of each
pair of a training and a test sample at the first network's weights. Shown is the mean linear datamodeling score over
250 test samples, at the method's damping by default and at the best of some dampings, which nobody knows beforehand;
seconds of processor time and resident memory of one run by default, in a process of its own, imports not counted; and
the lines that its user writes. Peers that are not installed are named. With `--kept` the trainings on halves are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from lightning_persample.influence import linear_datamodeling_score
from tests.benchmarks.influence_methods import METHODS, Method
from tests.benchmarks.retrained_models import REPORTED, TASKS, Task, data_of, trained, truth_of
from tests.benchmarks.scores_at_scale import resident


def lines_of(method: Method) -> int:
    """The lines of a method that are not blank, without its signature."""
    source, _ = inspect.getsourcelines(getattr(method.function, "func", method.function))
    start = next(number for number, line in enumerate(source) if line.rstrip().endswith("-> Tensor:"))
    return sum(bool(line.strip()) for line in source[start + 1 :])


def measure(task: Task, method: Method, kept: Path, dampings: bool) -> dict[str, Any]:
    """The score by default, with seconds and bytes, and those of some dampings."""
    (train, test), truth = data_of(task), truth_of(task, kept)
    module = trained(task, *train.tensors, seed=0)

    def lds(scores: torch.Tensor) -> float:
        return float(linear_datamodeling_score(scores, truth.halves, truth.margins).nanmean())

    with tempfile.TemporaryDirectory() as path:
        folders = [Path(path, name) for name in ("imports", "default", *map(str, method.dampings))]
        for folder in folders:
            folder.mkdir()
        few = (TensorDataset(*(each[:50] for each in data.tensors)) for data in (train, test))
        method.function(deepcopy(module), *few, folders[0])
        used, clone = module, deepcopy(module)
        Path("/proc/self/clear_refs").write_text("5")
        before, start = resident("VmRSS"), time.process_time()
        scores = method.function(used, train, test, folders[1])
        seconds, memory = time.process_time() - start, resident("VmHWM") - before
        found = {"default": lds(scores), "seconds": seconds, "memory": memory, "dampings": {}}
        for damping, folder in zip(method.dampings if dampings else (), folders[2:], strict=False):
            folder = folders[1] if method.package is None else folder  # where the stores lie
            scores = method.function(deepcopy(clone), train, test, folder, damping)
            found["dampings"][damping] = lds(scores)
    return found


def row_of(method: Method, found: dict[str, Any]) -> str:
    """A row of the table."""
    best = max(found["dampings"].values(), default=None)
    cells = [method.title, f"{found['default']:.3f}", "" if best is None else f"{best:.3f}"]
    cells += [f"{found['seconds']:.1f} s", f"{found['memory'] / 2**20:.0f} MiB", str(lines_of(method))]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=REPORTED)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--by-default", action="store_true", help="no dampings but each method's own")
    parser.add_argument("--kept", type=Path, help="a folder for the trainings on halves")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.measure:
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            task, method = TASKS[options.tasks[0]], METHODS[options.methods[0]]
            found = measure(task, method, options.kept, not options.by_default)
        options.json.write_text(json.dumps(found))
        return
    results: dict[str, dict[str, Any]] = {}
    print(f"{platform.machine()}, one thread, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) if options.kept is None else options.kept
        for name in options.tasks:
            truth_of(TASKS[name], kept)
            print(f"\n{TASKS[name].title}\n\n| | by default | best damping | seconds | memory | lines |")
            print("|---|---|---|---|---|---|", flush=True)
            for each in options.methods:
                method, answer = METHODS[each], Path(folder) / "answer.json"
                if not method.is_here:
                    print(f"| {method.title} | {method.package} is not installed | | | | {lines_of(method)} |")
                    continue
                command = [sys.executable, "-m", "tests.benchmarks.datamodeling_of_methods", "--measure"]
                command += ["--tasks", name, "--methods", each, "--kept", str(kept), "--json", str(answer)]
                command += ["--by-default"] if options.by_default else []
                run = subprocess.run(command, stderr=subprocess.PIPE, text=True)
                if run.returncode:
                    print(f"| {method.title} | fails: {run.stderr.strip().splitlines()[-1][:80]} | | | | |", flush=True)
                    continue
                results.setdefault(name, {})[each] = json.loads(answer.read_text())
                print(row_of(method, results[name][each]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
