"""Every test starts from the same seed and runs torch on one thread: the tensors here are tiny."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest
from _pytest.doctest import DoctestModule

# torch and lightning are imported below: of the processes of xdist one only hands out tests


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Everything that is made while tests are collected stays: there is nothing to find for the garbage collector."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """The examples in docstrings are those of the package: no file here is searched for them."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files at the top hold the longest tests: where they come first, processes of xdist end at one time."""
    items.sort(key=lambda item: item.path.parent.name != "tests")


@pytest.fixture(scope="session", autouse=True)
def torch_of_small_tests():
    import torch

    from tests import processes
    from tests.startup import look_once

    if sys.platform == "linux":
        processes.copy_of_this_process()
    torch.set_num_threads(1)
    look_once()


@pytest.fixture(scope="module", autouse=True)
def little_for_the_garbage_collector():
    """What is there before the tests of a file stays: many a test collects garbage, which took a second of looking."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed():
    import torch

    torch.manual_seed(0)
    os.environ.pop("PL_SEED_WORKERS", None)  # with which Lightning gives every loader a worker_init_fn


@pytest.fixture
def double_precision() -> Iterator[None]:
    """New tensors are float64 during a test."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def own_rules() -> Iterator[None]:
    """What a test registers is gone after it."""
    from lightning_persample.rules import registry

    before = dict(registry._RULES)
    yield
    registry._RULES.clear()
    registry._RULES.update(before)
