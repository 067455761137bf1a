"""What a monitor logged in a fit, kept for the page that it writes at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from lightning import __version__ as lightning_version
from lightning.pytorch import Trainer
from torch import Tensor
from torch import __version__ as torch_version

from lightning_persample.callbacks.worst import SampleNorms
from lightning_persample.callbacks.writer import PerSampleGradientWriter
from lightning_persample.errors import UnsupportedError
from lightning_persample.influence.dataset import MANIFEST
from lightning_persample.influence.report import Run, Samples, read_run


class LoggedSteps:
    """The values of each logged step, and its norms: 4 bytes for each, on the process that writes."""

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[float, float]]] = {}
        self._norms: list[tuple[int, Any]] = []
        self._epochs: set[int] = set()

    def add(self, trainer: Trainer, step: int, values: Mapping[str, float], norms: Iterable[Tensor]) -> None:
        """Keep a logged step."""
        if not trainer.is_global_zero:
            return
        for name, value in values.items():
            self._values.setdefault(name, []).append((step, value))
        self._norms += [(step, each.float().numpy()) for each in norms]
        self._epochs.add(trainer.current_epoch)

    def run(self, trainer: Trainer, norms: SampleNorms, settings: Mapping[str, Any]) -> Run:
        """The run that a page shows: of the ledger where the Trainer writes one, with what was logged."""
        writers = [each for each in trainer.callbacks if isinstance(each, PerSampleGradientWriter)]  # type: ignore[attr-defined]
        if writers and (writers[0].dirpath / MANIFEST).is_file():
            run = read_run([writers[0].dirpath])
        else:
            run = self._without_ledger(norms, settings)
        run.logged = {
            name: (each[:, 0], each[:, 1]) for name, values in self._values.items() for each in [np.array(values)]
        }
        run.title = type(trainer.lightning_module).__name__
        return run

    def _without_ledger(self, norms: SampleNorms, settings: Mapping[str, Any]) -> Run:
        sizes: dict[int, int] = {}
        for step, values in self._norms:
            sizes[step] = sizes.get(step, 0) + len(values)
        return Run(
            "",
            np.array([step for step, values in self._norms for _ in values], dtype=np.float64),
            np.concatenate([np.empty(0), *(values for _, values in self._norms)]).astype(np.float64),
            samples=_samples(norms),
            batch_size=float(np.median(list(sizes.values()))) if sizes and settings["max_samples"] is None else None,
            epochs=len(self._epochs),
            settings=dict(settings),
            libraries={"torch": torch_version, "lightning": lightning_version},
        )


def _samples(norms: SampleNorms) -> Samples | None:
    """What is known of each sample; None where no sample has an index."""
    try:
        worst = norms.worst(2**62)
    except UnsupportedError:
        return None
    ranked = set(worst.index)
    never = [index for index in worst.nonfinite if index not in ranked]
    index, nothing = [*worst.index, *never], [np.nan] * len(never)
    nonfinite = [worst.nonfinite.get(each, 0) for each in index]
    return Samples(
        index,
        np.array([*worst.mean, *nothing]),
        np.array([*worst.last, *nothing]),
        np.array([*worst.seen, *(worst.nonfinite[each] for each in never)], dtype=np.int64),
        np.array(nonfinite, dtype=np.int64),
    )
