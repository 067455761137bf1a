"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_persample.engine import reporting
from lightning_persample.rules import registry


@pytest.fixture
def double_precision() -> Iterator[None]:
    """New tensors are float64 during a test."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the gradients that went the general way."""
    found: list[int] = []
    contribute = reporting.Report.contribute

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(1)
        return contribute(self, *args, **kwargs)

    monkeypatch.setattr(reporting.Report, "contribute", counted)
    return found
