"""Batch normalisation in training does not run on one sample alone, and torch's errors do not say what helps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from lightning_persample.errors import UnsupportedError

__all__ = ["batch_statistics_explained"]

_KEPT, _ONE_VALUE = "running_mean or running_var", "more than 1 value per channel"
_INSTEAD = "; what a sample contributes to the gradient of the batch is given by expanded_weights and engine='expanded'"


@contextmanager
def batch_statistics_explained(module: nn.Module) -> Iterator[None]:
    """Say what helps where a module that runs on single samples normalises with the statistics of the batch."""
    try:
        yield
    except RuntimeError as error:
        if _KEPT not in str(error):
            raise
        keeping = [
            name
            for name, part in module.named_modules()
            if isinstance(part, _NormBase) and part.training and part.running_mean is not None
        ]
        raise UnsupportedError(
            f"{_listed(keeping) or 'a batch normalisation'} normalises with the statistics of the batch and keeps them "
            "in buffers, which vmap over single samples cannot do; call eval() on it, or build it with "
            "track_running_stats=False, or use loop_per_sample_grads (in a callback engine='loop'): a sample is then "
            f"normalised without the others{_INSTEAD}"
        ) from error
    except ValueError as error:
        of_the_batch = [
            name
            for name, part in module.named_modules()
            if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
        ]
        if _ONE_VALUE not in str(error) or not of_the_batch:  # group normalisation may say the same
            raise
        raise UnsupportedError(
            f"{_listed(of_the_batch)} normalises with the statistics of the batch, but a sample alone has one value "
            "per channel, and track_running_stats=False does not help; let it normalise with running statistics "
            f"(track_running_stats=True and eval()), or replace it, for example by nn.LayerNorm{_INSTEAD}"
        ) from error


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" if name else "the module itself" for name in names)
