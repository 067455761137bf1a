"""Peak of the bytes that torch's own allocators hand out during a step, which is the same in every run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C._profiler import _EventType
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
    events = list(recorded.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    changes = []
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    own: set[int] = set()
    held = most = 0
    for _, address, size in sorted(changes, key=lambda change: change[0]):
        if size > 0:
            own.add(address)
        elif address not in own:  # what an earlier recording left is no part of this step
            continue
        else:
            own.remove(address)
        held += size
        most = max(most, held)
    return most
