"""Numbers on their way from a device to the host, which goes on until it needs them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ASYNCHRONOUS = {"cuda"}  # kinds of devices that write to pinned memory while the host goes on


def on_its_way(tensor: Tensor) -> Callable[[], Tensor]:
    """Start to copy a tensor to the host; what is returned gives the copy, and waits for what came before it alone."""
    if tensor.device.type not in ASYNCHRONOUS:
        return tensor.cpu
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    copy.copy_(tensor, non_blocking=True)
    arrived = torch.Event(device=tensor.device)
    # On the stream that runs this, which in a backward hook is that of the call's forward. What is read belongs to this
    # stream, and so does the copy: no other stream may take its memory before.
    arrived.record(torch.accelerator.current_stream(tensor.device))

    def read() -> Tensor:
        arrived.synchronize()
        return copy

    return read
