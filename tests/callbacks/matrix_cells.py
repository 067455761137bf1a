"""Cells of the matrix in processes: ``python -m tests.callbacks.matrix_cells FOLDER STRATEGY ENGINES TWO WAY...``

Each process writes its verdicts to ``FOLDER/<rank>.json`` after each way; `in_processes` starts them and joins what
they say. Engines are given with semicolons between them, as are the ways that train for two epochs; the others train
for one. "*" stands for all.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.callbacks.cells import ALL_WAYS, Verdict, cell, plain_run
from tests.callbacks.ways import Referred
from tests.processes import run_ranks

STRATEGIES = ("DDP", "FSDP2")
Joined: TypeAlias = dict[tuple[str, str], Verdict]


class Sharded(Referred):
    """Shards each layer that has parameters of its own, and what is around them."""

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        roots = [part for part in self.children() if any(True for _ in part.parameters())]
        for root in roots:
            if isinstance(root, FSDPModule):
                return
            layers = [each for each in root.modules() if each is not root and each._parameters]
            for each in (*layers, root):
                fully_shard(each, mesh=mesh)


def sharded(make: Callable[[bool], Referred], with_reference: bool) -> Referred:
    """The same module as a sharded one."""
    module = make(with_reference)
    kind = type(module)
    module.__class__ = type(f"Sharded{kind.__name__}", (Sharded, kind), {})
    return module


def replicated(make: Callable[[bool], Referred], with_reference: bool) -> Referred:
    """The same module under DDP, which averages gradients of `manual_backward` alone."""
    module = make(with_reference)
    module.direct = False
    return module


def settings_of(strategy: str, name: str, two: list[str]) -> dict[str, Any]:
    """What a Trainer gets for it; a backward of a GAN does not reach all parameters."""
    processes = int(os.environ["WORLD_SIZE"])
    own = {
        "DDP": lambda: DDPStrategy(find_unused_parameters=name.startswith("GAN")),
        "FSDP2": lambda: ModelParallelStrategy(data_parallel_size=processes, tensor_parallel_size=1),
    }
    epochs = {} if name in two or two == ["*"] else {"max_epochs": 1}
    return {"strategy": own[strategy](), "devices": processes, "use_distributed_sampler": False, **epochs}


def verdicts(name: str, strategy: str, engines: list[str], two: list[str], folder: Path) -> dict[str, Verdict]:
    """Those of each engine."""
    found: dict[str, Verdict] = {}
    without = plain_run(name, folder / "plain", with_reference=strategy == "DDP", **settings_of(strategy, name, two))
    reference = None
    if strategy == "FSDP2" and not isinstance(without, Verdict):
        own, ALL_WAYS[name] = (
            ALL_WAYS[name],
            replace(ALL_WAYS[name], module=partial(replicated, PLAIN_WAYS[name].module)),
        )
        found_there = plain_run(name, folder, **settings_of("DDP", name, two))
        ALL_WAYS[name] = own
        if isinstance(found_there, Verdict):
            without = Verdict("skipped", f"no reference under DDP: {found_there.why}")
        else:
            reference = found_there
    for engine in engines:
        try:
            found[engine] = cell(name, engine, without, folder / engine, reference, **settings_of(strategy, name, two))
        except Exception as error:  # a cell that fails leaves the others their turn
            text = str(error).strip().replace("\n", " ")
            found[engine] = Verdict("wrong", f"{type(error).__name__}: {text[:300]}")
        torch._dynamo.reset() if "compiled" in name else None
    return found


PLAIN_WAYS = dict(ALL_WAYS)


def in_processes(
    strategy: str, engines: Sequence[str], names: Sequence[str], timeout: float, two: Sequence[str] = ("*",)
) -> Joined:
    """The verdicts of the named ways by way and engine, those of both processes joined."""
    with tempfile.TemporaryDirectory() as folder:
        ended = run_ranks(
            "tests.callbacks.matrix_cells", folder, strategy, *map(";".join, (engines, two)), *names, timeout=timeout
        )
        files = [Path(folder) / f"{rank}.json" for rank in (0, 1)]
        ranks = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    joined: Joined = {}
    for name in names:
        for engine in engines:
            each = [Verdict(**rank[name][engine]) if name in rank else None for rank in ranks]
            first, second = each
            if first is None or second is None:
                said = " | ".join(output[-300:] for output in ended.outputs)
                verdict = Verdict("wrong", f"did not end; exit codes {ended.codes}: {said}")
            elif first == second and _same(first.logged, second.logged):
                verdict = first
            else:
                verdict = Verdict("wrong", f"the processes differ: {first} and {second}")
            joined[name, engine] = verdict
    return joined


def _same(one: dict[str, float], other: dict[str, float]) -> bool:
    """Whether two processes logged the same, nan included."""
    return repr(one) == repr(other)


def main(folder: str, strategy: str, engines: str, two: str, *names: str) -> None:
    """Run the cells of the named ways, or of all."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if strategy == "FSDP2":
        for name, way in PLAIN_WAYS.items():
            ALL_WAYS[name] = replace(way, module=partial(sharded, way.module))
    written = Path(folder) / f"{os.environ['RANK']}.json"
    done: dict[str, dict[str, Any]] = {}
    for name in names:
        print(name, flush=True)
        own = verdicts(name, strategy, engines.split(";"), two.split(";"), Path(folder) / name)
        done[name] = {engine: asdict(verdict) for engine, verdict in own.items()}
        written.write_text(json.dumps(done))


if __name__ == "__main__":
    main(*sys.argv[1:])
