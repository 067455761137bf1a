"""Fingerprints of what a store of gradients is of: weights and data. They tell equal from other, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

__all__ = ["fingerprint_of_data", "fingerprint_of_states", "fingerprint_of_weights"]

_LENGTH = 16


def fingerprint_of_weights(weights: Mapping[str, Any]) -> str:
    """The fingerprint of the tensors of a state dict."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} ".encode())
            _add_tensor(digest, value)
    return digest.hexdigest()[:_LENGTH]


def fingerprint_of_states(states: Any) -> str:
    """The fingerprint of the state dicts of optimizers."""
    digest = hashlib.sha256()
    _add(digest, states)
    return digest.hexdigest()[:_LENGTH]


def fingerprint_of_data(dataset: Any) -> str | None:
    """The fingerprint of a dataset whose content can be known cheaply and exactly."""
    kind = type(dataset)  # a subclass may give other rows
    if kind is TensorDataset:
        return _of_tensors(dataset.tensors)
    if kind is Subset:
        return _of_subset(dataset)
    if kind is ConcatDataset:
        parts = [fingerprint_of_data(part) for part in dataset.datasets]
        return None if None in parts else f"concat {_hashed(repr(parts).encode())}"
    fingerprint = getattr(dataset, "_fingerprint", None)
    return fingerprint if kind.__module__.partition(".")[0] == "datasets" and isinstance(fingerprint, str) else None


def _of_tensors(tensors: Sequence[Any]) -> str | None:
    digest = hashlib.sha256()
    for each in tensors:
        if not isinstance(each, Tensor) or each.layout is not torch.strided or each.is_quantized:
            return None
        _add_tensor(digest, each)
    return f"tensors {digest.hexdigest()[:_LENGTH]}"


def _of_subset(dataset: Subset[Any]) -> str | None:
    whole = fingerprint_of_data(dataset.dataset)
    indices = np.asarray(dataset.indices)
    if whole is None or indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
        return None
    return f"subset {_hashed(whole.encode(), indices.astype(np.int64).tobytes())}"


def _hashed(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:_LENGTH]


def _add_tensor(digest: Any, value: Tensor) -> None:
    digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    digest.update(plain.reshape(-1).view(torch.uint8).numpy())


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        _add_tensor(digest, value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            digest.update(f"{key!r}:".encode())
            _add(digest, each)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)} ".encode())
        for each in value:
            _add(digest, each)
    else:
        digest.update(f"{value!r} ".encode())
