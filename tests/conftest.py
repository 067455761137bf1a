"""Every test starts from the same seed and runs torch on one thread: the tensors here are tiny."""

from __future__ import annotations

import gc

import pytest
import torch
from _pytest.doctest import DoctestModule

# torch.manual_seed also asks after every kind of accelerator, which takes longer than many a test
SEED = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """The examples in docstrings are those of the package: no file here is searched for them."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def little_for_the_garbage_collector():
    """What is there before the first test stays: many a test collects garbage, which took a second of looking at it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def seed():
    SEED(0)
