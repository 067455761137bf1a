"""What Lightning says about small runs is not about this package."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(HERE):  # an epoch of a few batches is meant
            item.add_marker(pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"))


@pytest.fixture(autouse=True, scope="session")
def quiet_lightning():
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
