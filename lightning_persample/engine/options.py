"""Which values the options of a capture may have."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from lightning_persample.errors import OptionError

__all__ = ["QUANTITIES", "check_kernel_options", "check_options", "check_samples", "is_int", "shown"]

QUANTITIES = ("sq_norm", "grad_sample", "dot", "square_sum", "projection")


def shown(value: object) -> str:
    """A value in a message: a tensor by its shape and dtype, anything else as Python writes it."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    return repr(value)


def is_int(value: object, least: int) -> bool:
    """Whether the value is an int (a bool is none) that is not less than `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_kernel_options(max_memory: object, fuse_weight_grad: object) -> None:
    """Refuse values of the kernels' options that are not allowed.

    Args:
        max_memory: None or bytes.
        fuse_weight_grad: a bool.

    Raises:
        OptionError: one of them is something else.
    """
    if max_memory is not None and not is_int(max_memory, 1):
        raise OptionError(f"max_memory is {shown(max_memory)}; allowed is None or an integer of at least 1, in bytes")
    if not isinstance(fuse_weight_grad, bool):
        raise OptionError(f"fuse_weight_grad is {shown(fuse_weight_grad)}; allowed are True and False")


def check_samples(samples: object, batch_size: int) -> None:
    """Refuse a choice of samples that is not allowed.

    Args:
        samples: None or places in the batch.
        batch_size: number of samples B.

    Raises:
        OptionError: it is something else.
    """
    if samples is None:
        return
    whole = isinstance(samples, Tensor) and samples.dtype == torch.int64 and samples.dim() == 1 and samples.numel()
    if not isinstance(samples, Tensor) or not whole:
        kind = f"{samples.dtype} of sizes {tuple(samples.shape)}" if isinstance(samples, Tensor) else repr(samples)
        raise OptionError(f"samples is {kind}; allowed is None or an int64 tensor (m,) of places in the batch, m >= 1")
    if int(samples.min()) < 0 or int(samples.max()) >= batch_size:
        raise OptionError(
            f"samples has places from {int(samples.min())} to {int(samples.max())}; allowed are 0 to {batch_size - 1}"
        )


def check_options(
    loss_reduction: object, batch_dim: object, batch_size: object, quantities: Collection[str], unsupported: object
) -> None:
    """Refuse values of a capture's options that are not allowed; `expanded_weights` says what they are.

    Args:
        loss_reduction: "mean", "sum" or a tensor.
        batch_dim: an axis.
        batch_size: None or a number of samples.
        quantities: of `QUANTITIES`.
        unsupported: "warn", "error" or "ignore".

    Raises:
        OptionError: one of them is something else.
    """
    if not isinstance(loss_reduction, Tensor) and loss_reduction not in ("mean", "sum"):
        raise OptionError(
            f"loss_reduction is {shown(loss_reduction)}; allowed are 'mean', 'sum' or a tensor of weights (B,)"
        )
    if not is_int(batch_dim, 0):
        raise OptionError(f"batch_dim is {shown(batch_dim)}; allowed is an integer of at least 0")
    if batch_size is not None and not is_int(batch_size, 1):
        raise OptionError(f"batch_size is {shown(batch_size)}; allowed is None or an integer of at least 1")
    unknown = [quantity for quantity in quantities if quantity not in QUANTITIES]
    if isinstance(quantities, str) or unknown:
        raise OptionError(
            f"quantities is {shown(quantities)}; allowed is a collection such as ('sq_norm', 'grad_sample'), of "
            f"{', '.join(map(repr, QUANTITIES))}"
        )
    if unsupported not in ("warn", "error", "ignore"):
        raise OptionError(f"unsupported is {shown(unsupported)}; allowed are 'warn', 'error' and 'ignore'")
