"""The release of torch that the tests run with: some ops can do more than in the oldest release that is supported."""

from __future__ import annotations

import torch

__all__ = ["OLDEST", "RELEASE"]

OLDEST = (2, 6)
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
