"""What per-sample gradient norms cost: this package and its peers beside a plain training step, in one run.

    python -m tests.benchmarks.cost_of_norms                    the table: time, and peak memory above the model's own
    python -m tests.benchmarks.cost_of_norms --fit              a whole Trainer.fit with the monitor beside one without
    python -m tests.benchmarks.cost_of_norms --scaling          as batch, tokens, width and channels grow
    python -m tests.benchmarks.cost_of_norms --memory           peak of what torch allocates, with large tables, too
    python -m tests.benchmarks.cost_of_norms --calls            what is the same in every run: Python calls of a warm
                                                                step, and multiply-adds of products and convolutions
    options: [--models mlp cnn resnet18 gpt bert mobilenet convnext nfnet llama] [--pairs 15] [--row 0.05]
        [--engines "hooks by hand" lightning_persample ...] [--device cuda] [--json FILE]

The hooks by hand (`hooks_by_hand`) are what bounds this package: the same kernels, and nothing that finds out which.

Every ratio is that of a pair: plain steps, then steps with norms. Plain and all engines take turns, so that what else
the machine does falls on all. A turn is of one step, or of as many in a row as take 0.05 s: as in a training that
captures every step. With --row 0 it is of one step, whose code the other engines have driven out of the caches in
between: as in a training that captures a step now and then. Shown are the median and the middle half of the ratios.

Peak memory is that of a process of its own (on an accelerator: of the allocator), less what the process holds before
the first step. On a CPU this has what malloc keeps between the tensors and the code that is loaded, and differs from
run to run; --memory counts the tensors alone. Where a peer is not installed its cell is "-": the guide's page on
benchmarks says how to install them. The last column counts the calls of Python functions of a warm step with norms
beyond those of a plain one: on a GPU, where kernels are short, a step takes as long as these. It is the same in every
run.

Without --models it runs the four models of this folder; the others are of the packages of the extra "collections".
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_persample import PerSampleGradientMonitor
from lightning_persample.errors import UnsupportedError
from tests.benchmarks.allocated import allocated_peak
from tests.benchmarks.collection_models import COLLECTIONS, missing
from tests.benchmarks.engines import ENGINES, Step, available
from tests.benchmarks.python_calls import python_calls
from tests.benchmarks.timed_fits import middle, prepared_fit
from tests.benchmarks.timed_models import MODELS, TABLES, Built, cnn, gpt, mlp

OURS, FUSED, BY_HAND = "lightning_persample", "fuse_weight_grad=True", "hooks by hand"
FIT_STEPS = {"mlp": 400, "cnn": 100, "resnet18": 50, "gpt": 100} | dict.fromkeys(COLLECTIONS, 50)
ALL = MODELS | COLLECTIONS


def prepared(build: Callable[[], Built], engine: str, device: torch.device) -> Step:
    torch.manual_seed(0)
    module, x = build()
    y = torch.randint(0, 10, (len(x),))
    return ENGINES[engine](module.to(device), x.to(device), y.to(device))


def seconds(step: Step, device: torch.device, times: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(times):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


# Time and memory ------------------------------------------------------------------------------------------------------
def times(
    build: Callable[[], Built], engines: list[str], pairs: int, device: torch.device, row: float
) -> dict[str, Any]:
    """For each engine the ratios to the plain steps before, or why it fails; a turn is of `row` seconds at least."""
    plain, found, steps = prepared(build, "plain", device), {}, {}
    for engine in engines:
        try:
            steps[engine] = prepared(build, engine, device)
            steps[engine]()
            steps[engine]()
        except Exception as error:  # strangers' code: whatever it raises is what its user would see
            steps.pop(engine, None)
            found[engine] = {"fails": f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"}
    plain()

    def in_row(step: Step) -> int:
        return max(1, math.ceil(row / min(seconds(step, device) for _ in range(2))))

    plain_times, times_of = in_row(plain), {engine: in_row(step) for engine, step in steps.items()}
    ratios: dict[str, list[float]] = {engine: [] for engine in steps}
    alone = []
    for _ in range(pairs):
        for engine, step in steps.items():
            alone.append(seconds(plain, device, plain_times) / plain_times)
            ratios[engine].append(seconds(step, device, times_of[engine]) / times_of[engine] / alone[-1])
    return {"plain": {"ms": 1e3 * statistics.median(alone)}} | found | {e: middle(r) for e, r in ratios.items()}


def resident(entry: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" at most; Linux keeps both."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(entry))


def peak_bytes(model: str, engine: str, device: torch.device) -> int:
    """Peak memory of three steps above what is held before them, measured in this process."""
    step = prepared(ALL[model][1], engine, device)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    for _ in range(3):
        step()
    return (torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident("VmHWM")) - before


def peak_in_another_process(model: str, engine: str, device: torch.device) -> int | None:
    command = [sys.executable, "-m", __spec__.name, "--peak", model, engine, "--device", str(device)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    return int(done.stdout) if done.returncode == 0 else None


def memory(models: list[str], engines: list[str], device: torch.device) -> dict[str, Any]:
    engines = [engine for engine in engines if available(engine)]
    print(f"| model | plain step | {' | '.join(engines)} |\n|---|---|{'---|' * len(engines)}")
    results: dict[str, Any] = {}
    for model, (title, build) in ({m: ALL[m] for m in models} | TABLES).items():
        one = results[model] = {"plain": allocated_peak(prepared(build, "plain", device), device)}
        for engine in engines:
            try:
                one[engine] = allocated_peak(prepared(build, engine, device), device)
            except Exception as error:  # strangers' code: whatever it raises is what its user would see
                print(f"{engine} on {model} fails: {type(error).__name__}", file=sys.stderr)
        cells = [f"{one[e] / one['plain']:.2f}x" if e in one else "refuses" for e in engines]
        print(f"| {title} | {one['plain'] / 2**20:.1f} MiB | {' | '.join(cells)} |", flush=True)
    return results


def calls(models: list[str], device: torch.device) -> dict[str, Any]:
    columns = "of these in the package | its files | beyond it, by hand | multiply-adds, with norms | and fused |"
    print(f"| model | plain step | beyond it, with norms | {columns}\n|---|---|---|---|---|---|---|---|")
    results: dict[str, Any] = {}
    for model in models:
        title, build = ALL[model]
        plain, _ = python_calls(prepared(build, "plain", device))
        captured, files = python_calls(prepared(build, OURS, device))
        try:
            hooked = python_calls(prepared(build, BY_HAND, device))[0]
        except UnsupportedError:
            hooked = None
        base, *counts = (operations(prepared(build, engine, device)) for engine in ("plain", OURS, FUSED))
        one = {"plain": plain, "captured": captured, "files": dict(files), "by hand": hooked}
        results[model] = one | {"multiply-adds": [base, *counts]}
        shares = " | ".join(f"{count / base:.3f}x" for count in counts)
        beyond = "refuses" if hooked is None else f"{hooked - plain:,}"
        cells = f"{plain:,} | {captured - plain:,} | {files.total():,} | {len(files)} | {beyond} | {shares}"
        print(f"| {title} | {cells} |", flush=True)
    return results


def table(models: list[str], engines: list[str], pairs: int, device: torch.device, row: float) -> dict[str, Any]:
    print(f"| model | plain step | {' | '.join(engines)} | Python calls of {OURS} beyond it |")
    print(f"|---|---|{'---|' * len(engines)}---|")
    results = {}
    for model in models:
        title, build = ALL[model]
        here = [engine for engine in engines if available(engine)]
        result = results[model] = times(build, here, pairs, device, row)
        for engine in ["plain", *[e for e in here if "fails" not in result[e]]]:
            result[engine]["peak"] = peak_in_another_process(model, engine, device)
        base = result["plain"]["peak"]

        def cell(engine: str, result: dict[str, Any] = result, base: int | None = base) -> str:
            if engine not in result:
                return "-"
            if "fails" in result[engine]:
                return "refuses"
            one = result[engine]
            memory = f", {one['peak'] / base:.2f}x memory" if one["peak"] is not None and base else ""
            return f"{shown(one)}{memory}"

        size = f", {base / 2**20:.0f} MiB" if base else ""
        calls = result["plain"]["calls"] = python_calls(prepared(build, "plain", device))[0]
        beyond = "-"
        if "fails" not in result.get(OURS, {"fails": ""}):
            result[OURS]["calls"] = python_calls(prepared(build, OURS, device))[0]
            beyond = f"{result[OURS]['calls'] - calls:,}"
        cells = " | ".join(map(cell, engines))
        print(f"| {title} | {result['plain']['ms']:.1f} ms{size} | {cells} | {beyond} |", flush=True)
    for model, result in results.items():
        for engine, one in result.items():
            if "fails" in one:
                print(f"\n{engine} refuses {model}: {one['fails']}")
    return results


# A whole run ----------------------------------------------------------------------------------------------------------
def fit_seconds(build: Callable[[], Built], steps: int, device: torch.device, monitored: bool) -> float:
    callbacks = [PerSampleGradientMonitor()] if monitored else []
    with tempfile.TemporaryDirectory() as folder:
        accelerator = "gpu" if device.type == "cuda" else "cpu"
        fit = prepared_fit(build, steps, folder, callbacks, accelerator)
        start = time.perf_counter()
        fit()
        return time.perf_counter() - start


def fits(models: list[str], pairs: int, device: torch.device) -> dict[str, Any]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print("| model | steps | Trainer.fit without | with PerSampleGradientMonitor() |\n|---|---|---|---|")
    results = {}
    for model in models:
        title, build = ALL[model]
        steps = FIT_STEPS[model]
        for monitored in (False, True):
            fit_seconds(build, 2, device, monitored)
        timed = [[fit_seconds(build, steps, device, monitored) for monitored in (False, True)] for _ in range(pairs)]
        one = results[model] = middle([own / alone for alone, own in timed])
        alone = statistics.median(alone for alone, _ in timed)
        print(f"| {title} | {steps} | {alone:.2f} s | {one['ratio']:.3f}x ({one['low']:.3f} to {one['high']:.3f}) |")
    return results


# Growth ---------------------------------------------------------------------------------------------------------------
GROWTH: dict[str, list[tuple[int, Callable[[], Built]]]] = {
    "MLP, batch": [(b, lambda b=b: mlp(batch_size=b)) for b in (16, 64, 256, 1024)],
    "MLP, width": [(w, lambda w=w: mlp(width=w)) for w in (64, 256, 1024, 2048)],
    "CNN, batch": [(b, lambda b=b: cnn(batch_size=b)) for b in (4, 16, 64)],
    "CNN, channels": [(c, lambda c=c: cnn(batch_size=16, channels=c)) for c in (8, 32, 128)],
    "GPT, batch": [(b, lambda b=b: gpt(batch_size=b)) for b in (2, 8, 32)],
    "GPT, tokens": [(t, lambda t=t: gpt(batch_size=4, tokens=t)) for t in (32, 128, 512)],
    "GPT, width": [(w, lambda w=w: gpt(batch_size=4, width=w)) for w in (64, 256, 1024)],
}


def of_convolution_backward(
    grad_shape: Sequence[int], input_shape: object, weight_shape: Sequence[int], *rest: Any, out_shape: object = None
) -> int:
    """Those of the gradients of input and weight; torch's own count forgets that groups do not see each other."""
    for_input, for_weight, _ = rest[7]
    return 2 * prod(grad_shape) * prod(weight_shape[1:]) * (for_input + for_weight)


def operations(step: Step) -> int:
    """Multiplications and additions in products and convolutions."""
    counts = {torch.ops.aten.convolution_backward: of_convolution_backward}
    with FlopCounterMode(display=False, custom_mapping=counts) as counter:
        step()
    return int(counter.get_total_flops())


def scaling(pairs: int, device: torch.device, row: float) -> dict[str, Any]:
    print("| grows | size | plain step | with norms | operations of products, plain | with norms |")
    print("|---|---|---|---|---|---|")
    results: dict[str, Any] = {}
    for what, sizes in GROWTH.items():
        for size, build in sizes:
            found = times(build, [OURS], pairs, device, row)
            counts = [operations(prepared(build, engine, device)) for engine in ("plain", OURS)]
            one = {"ms": found["plain"]["ms"], **found[OURS], "operations": counts}
            results.setdefault(what, {})[size] = one
            print(
                f"| {what} | {size} | {one['ms']:.1f} ms | {one['ratio']:.2f}x | {counts[0] / 1e9:.2f} G | "
                f"{counts[1] / counts[0]:.2f}x |",
                flush=True,
            )
    return results


def shown(ratios: dict[str, Any]) -> str:
    return f"{ratios['ratio']:.2f}x ({ratios['low']:.2f} to {ratios['high']:.2f})"


def parser_of(description: str | None, models: Collection[str] = MODELS) -> argparse.ArgumentParser:
    """The options of every program that times pairs of steps."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(models), default=list(MODELS))
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--row", type=float, default=0.05, help="seconds of plain steps in a row, one step at least")
    return parser


def main() -> None:
    parser = parser_of(__doc__, ALL)
    others = [engine for engine in ENGINES if engine != "plain"]
    parser.add_argument("--engines", nargs="+", choices=others, default=others)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for model in COLLECTIONS.keys() & {*options.models}:
        if needed := missing(model):
            parser.error(f'{model} needs {" and ".join(needed)}, of the extra "collections"')
    warnings.simplefilter("ignore")
    device = torch.device(options.device)
    if options.peak:
        print(peak_bytes(*options.peak, device))
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    machine = f"{platform.machine()}, {name}, torch {torch.__version__}, float32, {options.pairs} pairs"
    print(f"{machine}\n")
    if options.fit:
        results = fits(options.models, options.pairs, device)
    elif options.memory:
        results = memory(options.models, options.engines, device)
    elif options.calls:
        results = calls(options.models, device)
    elif options.scaling:
        results = scaling(options.pairs, device, options.row)
    else:
        results = table(options.models, options.engines, options.pairs, device, options.row)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=2))


if __name__ == "__main__":
    main()
