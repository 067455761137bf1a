"""A device "remote" whose memory lies on the CPU: what would make the host wait for an accelerator is seen there.

Its tensors are ordinary ones, so that nothing behaves otherwise than on an accelerator: autograd runs their backward in
a thread of the device, an operation on tensors of two devices raises, and a value is read by operations that a GPU
would have to be waited for. To register a device cannot be undone: whoever imports this is a process of its own.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import _reinterpret_tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

import lightning_persample
from lightning_persample.gradients import host

__all__ = ["DEVICE", "SEEN", "Waits", "refusing", "waits"]

_NAME = "remote"
_PACKAGE = str(Path(lightning_persample.__file__).parent)
# What a kernel of CUDA copies to the host, because the shape of its result depends on it or the result is a number.
_WAITS = {
    "_local_scalar_dense", "_unique", "_unique2", "bincount", "equal", "histc", "is_nonzero", "masked_select",
    "nonzero", "repeat_interleave", "unique_consecutive", "unique_dim", "unique_dim_consecutive",
}  # fmt: skip
_BY_INDEX = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_COPIES = {"_copy_from", "_copy_from_and_resize", "copy_", "set_"}

Waits = Counter[tuple[str, str]]
"""What made the host wait, and the line of the package that asked for it; "" where no line of it was running."""
SEEN: Waits = Counter()
_refuses = False


class _Module(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def get_rng_state(self, device: object = 0) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: object = 0) -> None:
        torch.set_rng_state(state)


backend_registration._setup_privateuseone_for_python_backend(_NAME, backend_module=_Module())
DEVICE = torch.device(_NAME, 0)
_memory: dict[int, torch.UntypedStorage] = {}  # of each storage of the device the bytes, by its address
_lock = threading.RLock()


# A copy that does not wait: the numbers are there once the event after it has been waited for, and not before.
_started: list[tuple[Tensor, Tensor]] = []


class _Event:
    """In the place of ``torch.Event``: it brings what was copied before it was recorded."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == _NAME

    def record(self, stream: torch.Stream) -> None:
        assert stream.device == DEVICE
        self._copies = list(_started)
        _started.clear()

    def synchronize(self) -> None:
        for to, values in self._copies:
            to.copy_(values)
        self._copies.clear()


torch.Event = _Event
host.ASYNCHRONOUS.add(_NAME)


def _is_remote(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == _NAME


def _on_host(tensor: Tensor) -> Tensor:
    """The same numbers as a tensor of the CPU, in the same memory."""
    bytes_ = _memory[tensor.untyped_storage()._cdata]
    found = torch.empty(0, dtype=tensor.dtype).set_(bytes_, tensor.storage_offset(), tensor.size(), tensor.stride())
    found = found._conj() if tensor.is_conj() else found
    return found._neg_view() if tensor.is_neg() else found


def _on_device(tensor: Tensor) -> Tensor:
    made = torch._C._acc.create_empty_tensor(list(tensor.size()), tensor.dtype)
    _memory[made.untyped_storage()._cdata] = tensor.untyped_storage()
    return _reinterpret_tensor(made, list(tensor.size()), list(tensor.stride()), tensor.storage_offset())


def _asking_line() -> str:
    """The innermost line of the package that is running in this thread."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE):
            return f"{path[len(_PACKAGE) + 1 :]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _wait(what: str) -> None:
    line = _asking_line()
    SEEN[what, line] += 1
    if _refuses:
        raise RuntimeError(f"`{what}` waits for the device{f' in {line}' if line else ''}")


def _look_at(name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
    """Note what makes the host wait, and refuse tensors of two devices as an accelerator does."""
    if name in _WAITS:
        _wait(name)
    if name in _BY_INDEX:
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                _wait(f"{name} by a mask")
            if index is not None and not _is_remote(index):
                _wait(f"{name} by an index of the host")
    elif name not in _COPIES:
        for tensor in tensors:
            if tensor.dim() and not _is_remote(tensor):  # (a number is handed over with the call)
                raise RuntimeError(f"{name}: a tensor {tuple(tensor.shape)} is on the {tensor.device}, another remote")
    if name.startswith("_copy_from") and tensors[0].device != tensors[1].device and not _is_started(args):
        _wait("copy to the host" if _is_remote(tensors[0]) else "copy from the host")


def _is_started(args: tuple[Any, ...]) -> bool:
    """Whether the arguments are of a copy to the host that does not wait, as of ``copy_(..., non_blocking=True)``."""
    return len(args) > 2 and bool(args[2]) and not _is_remote(args[1])


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation: that of the CPU, on the same memory."""
    with torch._C.DisableTorchFunction(), _lock:
        name = op._schema.name.removeprefix("aten::")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        _look_at(name, args, tensors)
        known: dict[int, tuple[Tensor, Tensor]] = {}

        def down(leaf: Any) -> Any:
            if _is_remote(leaf):
                found = _on_host(leaf)
                known[id(found)] = found, leaf
                return found
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        args, kwargs = tree_map(down, (args, kwargs))
        if any(argument.name == "device" for argument in op._schema.arguments):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if name.startswith("_copy_from"):
            if _is_started(args):
                _started.append((args[1], args[0].clone()))
                args[1].fill_(1)
            else:
                args[1].copy_(args[0])
            return known[id(args[1])][1] if id(args[1]) in known else args[1]
        result = op(*args, **kwargs)
        for near, remote in known.values():  # what was given as `out` may have got another shape
            bytes_ = _memory[remote.untyped_storage()._cdata]
            if near.size() != remote.size() or near.untyped_storage()._cdata != bytes_._cdata:
                remote.data = _on_device(near)
        owners = {near.untyped_storage()._cdata: remote for near, remote in known.values()}

        def up(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) in known:
                return known[id(leaf)][1]
            owner = owners.get(leaf.untyped_storage()._cdata)
            if owner is None:
                return _on_device(leaf)
            offset = leaf.storage_offset() - owner.storage_offset()
            return _reinterpret_tensor(owner, list(leaf.size()), list(leaf.stride()), offset)

        return tree_map(up, result)


def _convolution(*args: Any) -> Any:
    return _run(torch.ops.aten.convolution.default, *args)


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *others: Any) -> Any:
    *geometry, transposed, output_padding, groups, wanted = others
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    arguments = (grad, x, weight, [channels], *geometry, transposed, output_padding, groups, wanted)
    return _run(torch.ops.aten.convolution_backward.default, *arguments)


_every = torch.library.Library("_", "IMPL")
_every.fallback(_run, "PrivateUse1")
_own = torch.library.Library("aten", "IMPL")
_own.impl("convolution_overrideable", _convolution, "PrivateUse1")
_own.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")


@contextmanager
def waits() -> Iterator[Waits]:
    """What makes the host wait inside."""
    SEEN.clear()
    found: Waits = Counter()
    yield found
    found.update(SEEN)


@contextmanager
def refusing() -> Iterator[None]:
    """Raise where the host would wait."""
    global _refuses
    _refuses = True
    try:
        yield
    finally:
        _refuses = False
