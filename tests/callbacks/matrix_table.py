"""Runs every cell of the matrix and prints what became of it: ``python -m tests.callbacks.matrix_table``.

The columns are strategies and engines, the rows ways of training. A cell is "ok" where training was equal bit for bit
to a fit without callbacks, every value equal to the one-sample loop, and nothing was left behind; else a letter says
why not. It takes a few minutes.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from tests.callbacks.cells import ALL_WAYS, ENGINES, Verdict, cell, plain_run
from tests.callbacks.matrix_cells import STRATEGIES, Joined, in_processes

ONE_DEVICE = "one device"


def on_one_device() -> Joined:
    """The verdicts of every way and engine in this process."""
    found: Joined = {}
    for name in ALL_WAYS:
        with tempfile.TemporaryDirectory() as folder:
            without = plain_run(name, Path(folder, "plain"))
            for engine in ENGINES:
                found[name, engine] = cell(name, engine, without, Path(folder, engine))
    return found


def table(columns: dict[str, Joined]) -> str:
    """The cells as a table in Markdown, with the reasons below it."""
    reasons: dict[str, str] = {}

    def entry(verdict: Verdict) -> str:
        if verdict.outcome == "ok":
            return "ok"
        text = f"{verdict.outcome}: {verdict.why}"
        return f"{verdict.outcome} ({reasons.setdefault(text, _letters(len(reasons)))})"

    heads = [f"{strategy}, {engine}" for strategy in columns for engine in ENGINES]
    lines = [f"| way of training | {' | '.join(heads)} |", f"|{'---|' * (len(heads) + 1)}"]
    for name in ALL_WAYS:
        cells = [entry(found[name, engine]) for found in columns.values() for engine in ENGINES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    counts: dict[str, int] = {}
    for found in columns.values():
        for verdict in found.values():
            counts[verdict.outcome] = counts.get(verdict.outcome, 0) + 1
    lines += ["", ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())), ""]
    return "\n".join(lines + [f"({letter}) {text}" for text, letter in reasons.items()])


def _letters(number: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return letters[number] if number < 26 else _letters(number // 26 - 1) + letters[number % 26]


def main() -> int:
    """Run all cells; the exit code tells whether one of them was wrong."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    columns = {ONE_DEVICE: on_one_device()}
    for strategy in STRATEGIES:
        columns[f"{strategy}, 2 processes"] = in_processes(strategy, ENGINES, list(ALL_WAYS), timeout=600)
    print(table(columns))
    return int(any(verdict.outcome == "wrong" for found in columns.values() for verdict in found.values()))


if __name__ == "__main__":
    sys.exit(main())
