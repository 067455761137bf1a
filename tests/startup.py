"""What is done again and again on behalf of a user who needs it, and no test does."""

from __future__ import annotations

import functools
import os

import torch
from lightning.fabric.utilities import registry


def look_once() -> None:
    """For the rest of this process: metadata of packages are read once, and missing accelerators get no seeds.

    Every Trainer looks for callbacks of other packages in the metadata of all that are installed. `torch.manual_seed`
    notes a stack trace for each kind of accelerator, for the time when it will have been initialized. Files of tests
    need not outlive a power failure, for which each write would wait for the disk.
    """
    os.fsync = lambda descriptor: None
    registry.entry_points = functools.cache(registry.entry_points)
    for accelerator in (torch.cuda, torch.xpu, torch.mtia):
        if not accelerator.is_available():
            accelerator.manual_seed_all = lambda seed: None
