"""What torch and Lightning look for again and again, on behalf of a user who has it, and no test needs."""

from __future__ import annotations

import functools

import torch
from lightning.fabric.utilities import registry


def look_once() -> None:
    """For the rest of this process: metadata of packages are read once, and missing accelerators get no seeds.

    Every Trainer looks for callbacks of other packages in the metadata of all that are installed. `torch.manual_seed`
    notes a stack trace for each kind of accelerator, for the time when it will have been initialized.
    """
    registry.entry_points = functools.cache(registry.entry_points)
    for accelerator in (torch.cuda, torch.xpu, torch.mtia):
        if not accelerator.is_available():
            accelerator.manual_seed_all = lambda seed: None
