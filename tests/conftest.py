"""Every test starts from the same seed and runs torch on one thread: the tensors here are tiny."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest
from _pytest.doctest import DoctestModule

# torch and lightning are imported below: of the processes of xdist one only hands out tests


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """The examples in docstrings are those of the package: no file here is searched for them."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def entry_points_are_read_once():
    """Every Trainer looks for callbacks of other packages, and read the metadata of all that are installed."""
    with pytest.MonkeyPatch.context() as patch:
        read = functools.cache(importlib.metadata.entry_points)
        patch.setattr("lightning.fabric.utilities.registry.entry_points", read)
        yield


@pytest.fixture(scope="module", autouse=True)
def little_for_the_garbage_collector():
    """What is there before the tests of a file stays: many a test collects garbage, which took a second of looking."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def manual_seed():
    """torch.manual_seed also asks after every kind of accelerator, which takes longer than many a test."""
    import torch

    return torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def seed(manual_seed):
    manual_seed(0)


@pytest.fixture
def double_precision() -> Iterator[None]:
    """New tensors are float64 during a test."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    from lightning_persample.rules import registry

    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the gradients that went the general way."""
    from lightning_persample.capture import reporting

    found: list[int] = []
    contribute = reporting.Report.contribute

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(1)
        return contribute(self, *args, **kwargs)

    monkeypatch.setattr(reporting.Report, "contribute", counted)
    return found
