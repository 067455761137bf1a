"""Which parameters of a module require gradients, for as long as a context lasts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

__all__ = ["requiring_gradients"]


@contextmanager
def requiring_gradients(module: nn.Module, wanted: Mapping[str, bool]) -> Iterator[None]:
    """Let parameters of a module require gradients or not, and put all back afterwards."""
    before = {parameter: parameter.requires_grad for parameter in module.parameters()}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(wanted.get(name, False))
    try:
        yield
    finally:
        for parameter, required in before.items():
            parameter.requires_grad_(required)
