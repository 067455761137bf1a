"""Runs every case of every library that is installed, or those whose names hold an argument, and prints one table."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import time
from collections import Counter

import torch

from tests.collections.comparison import compare

LIBRARIES = {
    "timm": "test_timm",
    "torchvision": "test_torchvision",
    "transformers": "test_transformers",
    "peft": "test_peft",
    "diffusers": "test_diffusers",
    "torch_geometric": "test_torch_geometric",
    "segmentation_models_pytorch": "test_segmentation_models_pytorch",
}


def main(*chosen: str) -> int:
    torch.set_num_threads(1)
    table, bad = [], 0
    for library, file in LIBRARIES.items():
        cases = importlib.import_module(f"tests.collections.{file}").CASES
        cases = [case for case in cases if not chosen or any(part in f"{library}/{case.name}" for part in chosen)]
        if not cases:
            continue
        try:
            importlib.import_module(library)
        except ImportError as error:
            print(f"{library}: left out, {error}", file=sys.stderr)
            continue
        counts: Counter[str] = Counter()
        for case in cases:
            start = time.perf_counter()
            try:
                verdict = compare(case.build)
            except Exception as error:
                print(f"{library}/{case.name}: no verdict, {type(error).__name__}: {str(error)[:300]}", flush=True)
                counts["no verdict"] += 1
                continue
            counts[verdict.state] += 1
            seconds = time.perf_counter() - start
            unexpected = "" if (verdict.state == "exact") == (case.named is None) else " (another is expected)"
            print(f"{library}/{case.name} [{seconds:.1f} s]: {verdict.state}{unexpected}", end="", flush=True)
            print(f" {verdict.coverage:.3f}", flush=True)
            if verdict.state != "exact":
                print("    " + "\n    ".join(str(verdict).splitlines()[1:12]), flush=True)
        version = importlib.metadata.version(library.replace("_", "-"))
        table.append((f"{library} {version}", counts))
        bad += counts["wrong"] + counts["false warning"] + counts["no verdict"]
    table.append(("all", sum((counts for _, counts in table), Counter())))
    print("\n| library | models tried | exact | named | wrong | false warnings |\n|---|---|---|---|---|---|")
    for title, counts in table:
        numbers = [sum(counts.values()), *(counts[state] for state in ("exact", "named", "wrong", "false warning"))]
        print(f"| {title} | " + " | ".join(map(str, numbers)) + " |")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
