"""What unequal lengths cost beside as many rows in equal ones: ``python -m tests.benchmarks.cost_of_ragged``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_persample import expanded_weights

B, D, LONGEST, PAIRS = 32, 64, 512, 11


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = nn.Sequential(nn.Linear(D, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8))
    unequal = torch.linspace(1, LONGEST, B).round().long()[torch.randperm(B)]
    equal = torch.full((B,), int(unequal.sum()) // B)

    def step(lengths: Tensor, captured: bool) -> Callable[[], None]:
        owner = torch.arange(B).repeat_interleave(lengths)
        x = torch.randn(len(owner), D)

        def loss() -> Tensor:
            pooled = torch.zeros(B, 8).index_add(0, owner, module(x)) / lengths[:, None]
            return pooled.square().sum(1).mean()

        def run() -> None:
            if captured:
                with expanded_weights(module, x, batch_size=B, batch_layout=lambda batch: {batch: owner}):
                    loss().backward()
            else:
                loss().backward()

        return run

    runs = [step(unequal, True), step(equal, True), step(unequal, False)]
    times: list[list[float]] = [[], [], []]
    for turn in range(PAIRS + 2):
        for run, found in zip(runs, times, strict=True):
            start = time.process_time()
            run()
            if turn > 1:
                found.append(time.process_time() - start)
    ragged, even, plain = times
    ratio = statistics.median(one / two for one, two in zip(ragged, even, strict=True))
    beside = statistics.median(one / two for one, two in zip(ragged, plain, strict=True))
    print(f"{B} samples of 1 to {LONGEST} rows, {int(unequal.sum())} in all; medians of {PAIRS} pairs, CPU time")
    print(f"unequal over equal lengths: {ratio:.2f}; over a plain step: {beside:.2f}")


if __name__ == "__main__":
    main()
