"""The two stores that a score is given: opened where it is given a folder, and of what the score is made of."""

from __future__ import annotations

import os
from typing import Any

from lightning_persample.errors import OptionError
from lightning_persample.influence.store import GradientStore

__all__ = ["StoreOrPath", "direction_of", "given_gradients", "opened"]

StoreOrPath = GradientStore | str | os.PathLike[str]
"""A store, a part of one, or the folder of one."""


def opened(store: StoreOrPath) -> GradientStore:
    """The store that is given, or that in the folder that is given."""
    return store if isinstance(store, GradientStore) else GradientStore(store)


def given_gradients(train: StoreOrPath, test: StoreOrPath, name: str) -> tuple[GradientStore, GradientStore]:
    """The stores of a score that is made of gradients."""
    stores = opened(train), opened(test)
    for side, store in zip(("train", "test"), stores, strict=True):
        direction = direction_of(store)
        if direction is not None:
            raise OptionError(
                f"the {side} store was written with direction={direction!r}, but {name} takes gradients: collect them "
                "with direction=None; less takes Adam's directions, of the training samples"
            )
    return stores


def direction_of(store: GradientStore) -> Any:
    """What the rows of a store are in place of gradients: "adam"; None of gradients."""
    return store.manifest.settings.get("direction")
