"""Which kernel is fastest, measured once for each kind of work and remembered for the process."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

__all__ = ["fastest", "forget_measurements"]

Name = TypeVar("Name", bound=str)

_MOST = 2048  # kinds of work remembered; sizes that change all the time (ragged sequences) push out the oldest
_REPEATS = 3

_known: OrderedDict[Hashable, str] = OrderedDict()
_lock = threading.Lock()


def fastest(work: Hashable, candidates: Mapping[Name, Callable[[], object]], device: torch.device) -> Name:
    """The candidate that takes the least time; measured when this work is met for the first time.

    Args:
        work: what is computed: quantity, shapes, geometry, dtypes, memory.
        candidates: ways to do it, by name, at least one.
        device: where it runs, which is waited for around each measurement.

    Returns:
        A name out of `candidates`.
    """
    if len(candidates) == 1:
        return next(iter(candidates))
    key = (work, device)
    with _lock:
        known = _known.get(key)
        if known is not None:
            _known.move_to_end(key)
    name = next((candidate for candidate in candidates if candidate == known), None)
    if name is None:  # two threads may both measure; each gets a right answer
        times = {candidate: _seconds(run, device) for candidate, run in candidates.items()}
        name = min(times, key=lambda candidate: times[candidate])
        with _lock:
            _known[key] = name
            if len(_known) > _MOST:
                _known.popitem(last=False)
    return name


def forget_measurements() -> None:
    """Measure again from now on."""
    with _lock:
        _known.clear()


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The shortest of a few runs, after one that loads and compiles what is needed."""
    run()
    shortest = float("inf")
    for _ in range(_REPEATS):
        _wait_for(device)
        start = time.perf_counter()
        run()
        _wait_for(device)
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
