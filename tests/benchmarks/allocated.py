"""Peak of the bytes that torch's own allocators hand out during a step, which is the same in every run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["allocated_peak"]


def allocated_peak(step: Callable[[], object], device: torch.device) -> int:
    """Bytes of tensors that a step holds at most, beyond those that are there before it.

    Args:
        step: a training step that starts with ``zero_grad``; it runs three times.
        device: where it runs.

    Returns:
        Bytes. What a library allocates for itself, without torch, is not counted.
    """
    for _ in range(2):
        step()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    kineto = recorded.profiler.kineto_results  # type: ignore[union-attr]
    changes = [(event.start_ns(), event.nbytes()) for event in kineto.events() if event.name() == "[memory]"]
    return max(accumulate(change for _, change in sorted(changes, key=lambda change: change[0])), default=0)
