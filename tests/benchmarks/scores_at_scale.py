"""Scores of many samples: seconds, and resident memory beside what the process had before. For Linux.

    python -m tests.benchmarks.scores_at_scale [--rows 5000000] [--samples 500000 5000000] [--worst 10000000]
        [--train 200000] [--test 2000] [--repeats 3] [--json FILE]

`self_influence` of a ledger of so many rows beside the same aggregate by DuckDB and by NumPy (pyarrow reads the three
columns), for so many different samples; what `worst` keeps of so many samples; and `grad_dot` of two stores of 256
columns, the whole matrix or the ten largest of each test sample. Each is measured in a process of its own, the imports
done; shown is the fastest of the repeats, and the largest memory.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from pyarrow import parquet

from lightning_persample import PerSampleRecord
from lightning_persample.callbacks.worst import SampleNorms
from lightning_persample.influence import GradientStore, Manifest, StoreManifest, StoreWriter, grad_dot, self_influence
from lightning_persample.influence.ledger import BASE_COLUMNS, Ledger, schema_of
from lightning_persample.influence.shards import Shards, columns_for

BATCH, ROWS_OF_A_FILE, COLUMNS = 128, 12_800, 256


def write_ledger(folder: Path, rows: int, samples: int) -> None:
    """A ledger as a fit writes it: batches of 128 drawn without repetition, 100 of them in a file."""
    generator, ledger = np.random.default_rng(0), Ledger(folder)
    folder.mkdir()
    ledger.write_manifest(Manifest("run", BASE_COLUMNS, ("weight",), rows=rows))
    index = np.concatenate([generator.permutation(samples) for _ in range(-(-rows // samples))])[:rows]
    for part, start in enumerate(range(0, rows, ROWS_OF_A_FILE)):
        row = np.arange(start, min(start + ROWS_OF_A_FILE, rows))
        norms = generator.gamma(2.0, size=len(row)).astype(np.float32)
        columns = {
            "step": row // BATCH,
            "epoch": row // samples,
            "batch_idx": row % samples // BATCH,
            "backward_index": np.zeros_like(row),
            "rank": np.zeros_like(row),
            "row": row % BATCH,
            "sample_index": index[row],
            "learning_rate": 0.1 / (1 + row // BATCH // 1000),
            "weight": np.full(len(row), 1 / BATCH),
            "norm": norms,
            "coverage": np.ones(len(row)),
        }
        ledger.write(ledger.part(0, part), pyarrow.table(columns, schema=schema_of(BASE_COLUMNS)))


def write_store(folder: Path, rows: int) -> None:
    """A store of float32 rows."""
    folder.mkdir()
    manifest = StoreManifest("run", columns_for({"weight": ((COLUMNS,), COLUMNS)}), checkpoints=({"step": 1},))
    Shards(folder).write_manifest(manifest)
    writer, generator = StoreWriter(folder, manifest), torch.Generator().manual_seed(rows)
    for start in range(0, rows, 10_000):
        own = torch.arange(start, min(start + 10_000, rows))
        writer.add(torch.randn(len(own), COLUMNS, generator=generator), {"sample_index": own})
    writer.flush()


def by_duckdb(folder: Path) -> Callable[[], Any]:
    import duckdb

    duckdb.sql("SELECT 1").fetchall()
    query = f"""SELECT sample_index, sum(learning_rate * norm * norm) AS score, count(*) AS count
        FROM '{folder}/*.parquet' GROUP BY sample_index ORDER BY sample_index"""
    return lambda: duckdb.sql(query).fetchnumpy()["score"]


def by_numpy(folder: Path) -> Any:
    table = parquet.read_table(folder, columns=["sample_index", "norm", "learning_rate"])
    index, norm, rate = (column.to_numpy() for column in table.columns)
    _, places = np.unique(index, return_inverse=True)
    return np.bincount(places, rate * norm**2)


def worst_of(samples: int) -> Callable[[], Any]:
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0)).split(256)
    norms = torch.rand(256) + 0.5

    def keep() -> Any:
        kept = SampleNorms()
        for epoch in range(2):
            for step, index in enumerate(order):
                record = PerSampleRecord(len(index), {"weight": norms[: len(index)]}, 1.0, sample_index=index)
                kept.add(record, (epoch, step), "")
        return kept.worst(10), kept

    return keep


MEASURED: dict[str, Callable[..., Callable[[], Any]]] = {
    "self_influence": lambda folder: lambda: self_influence(folder).scores.numpy(),
    "DuckDB": lambda folder: by_duckdb(Path(folder)),
    "NumPy": lambda folder: lambda: by_numpy(Path(folder)),
    "worst": lambda samples: worst_of(int(samples)),
    "grad_dot": lambda *stores: lambda: grad_dot(*map(GradientStore, stores)),
    "grad_dot, float32": lambda *stores: lambda: grad_dot(*map(GradientStore, stores), dtype=torch.float32),
    "grad_dot, float32, top=10": lambda *stores: (
        lambda: grad_dot(*map(GradientStore, stores), dtype=torch.float32, top=10)
    ),
}


def resident(name: str) -> int:
    """Bytes: VmRSS now, VmHWM at most since it was reset."""
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


def measure(name: str, *given: str) -> None:
    """Print what one of them takes, and a sum to compare."""
    function = MEASURED[name](*given)
    Path("/proc/self/clear_refs").write_text("5")
    before, start = resident("VmRSS"), time.perf_counter()
    found = function()
    seconds = time.perf_counter() - start
    total = float(np.nansum(found)) if isinstance(found, np.ndarray) else 0.0
    sizes = {"seconds": seconds, "peak": resident("VmHWM") - before, "kept": resident("VmRSS") - before, "sum": total}
    print(json.dumps(sizes))


def measured(repeats: int, name: str, *given: object) -> dict[str, float]:
    """The fastest of some processes, and the largest memory."""
    command = [sys.executable, "-m", "tests.benchmarks.scores_at_scale", "--measure", name, *map(str, given)]
    runs = [json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout) for _ in range(repeats)]
    return {**runs[0], "seconds": min(r["seconds"] for r in runs), "peak": max(r["peak"] for r in runs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--samples", type=int, nargs="+", default=[500_000, 5_000_000])
    parser.add_argument("--worst", type=int, default=10_000_000)
    parser.add_argument("--train", type=int, default=200_000)
    parser.add_argument("--test", type=int, default=2_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", nargs="+")
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure)
        return
    found: dict[str, dict[str, float]] = {}
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| | seconds | resident memory |\n|---|---|---|")

    def show(title: str, name: str, *given: object, per: int = 0) -> None:
        one = found[title] = measured(1 if per else options.repeats, name, *given)
        memory = f"{one['peak'] / 2**20:.0f} MiB"
        if per:
            memory = f"{one['kept'] / per:.1f} bytes a sample, {one['peak'] / per:.1f} at most"
        print(f"| {title} | {one['seconds']:.2f} | {memory} |", flush=True)

    with tempfile.TemporaryDirectory() as path:
        for samples in options.samples:
            ledger = Path(path, f"ledger_{samples}")
            write_ledger(ledger, options.rows, samples)
            for name in ("self_influence", "DuckDB", "NumPy"):
                show(f"{name}, {options.rows:,} rows of {samples:,} samples", name, ledger)
            sums = [each["sum"] for title, each in found.items() if title.endswith(f"of {samples:,} samples")]
            np.testing.assert_allclose(sums, sums[0], rtol=1e-9)
        show(f"worst, {options.worst:,} samples twice", "worst", options.worst, per=options.worst)
        stores = [Path(path, name) for name in ("train", "test")]
        for store, rows in zip(stores, (options.train, options.test), strict=True):
            write_store(store, rows)
        for name in ("grad_dot", "grad_dot, float32", "grad_dot, float32, top=10"):
            show(f"{name}, {options.train:,} x {options.test:,}", name, *stores)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
