"""What is used of torch beyond its documentation, each with what it is used for."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["is_recomputing", "saved_results", "saved_tensors_are_hooked"]

_TOP_HOOKS = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # torch 2.6 has no way to ask


def saved_tensors_are_hooked() -> bool:
    """Whether hooks on saved tensors are in place, or may be: activation checkpointing and offloading put them."""
    return _TOP_HOOKS is None or _TOP_HOOKS(False) is not None


def is_recomputing() -> bool:
    """Whether a checkpoint that is not reentrant computes again what it did not keep; no gradient comes to this."""
    hooks = None if _TOP_HOOKS is None else _TOP_HOOKS(False)
    if hooks is None:
        return False
    pack = hooks[0]
    of_checkpoint = getattr(pack, "__module__", "") == "torch.utils.checkpoint"
    return of_checkpoint and getattr(pack, "__qualname__", "").startswith("_recomputation_hook.")


def saved_results(output: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    """What autograd keeps of a call's results for the backward of the node that made its output."""
    # Nothing where hooks on saved tensors are in place: to read what they have packed (activation checkpointing) would
    # run the forward again.
    if output.grad_fn is None or saved_tensors_are_hooked():
        return {}
    found = {name: getattr(output.grad_fn, f"_saved_{name}", None) for name in names}
    rows = output.shape[:1]
    return {
        n: result.detach() for n, result in found.items() if isinstance(result, Tensor) and result.shape[:1] == rows
    }
