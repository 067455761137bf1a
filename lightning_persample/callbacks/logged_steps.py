"""What a monitor logged in a fit, kept for the page that it writes at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from lightning import __version__ as lightning_version
from lightning.pytorch import Trainer
from torch import Tensor
from torch import __version__ as torch_version

from lightning_persample.callbacks.worst import SampleNorms
from lightning_persample.callbacks.writer import PerSampleGradientWriter
from lightning_persample.errors import UnsupportedError
from lightning_persample.influence import charts
from lightning_persample.influence.dataset import MANIFEST
from lightning_persample.influence.report import Run, Samples, layers_of, read_run

_MOST = 2048


class LoggedSteps:
    """Values and norms of the logged steps, on the process that writes; of many steps every second, fourth, ..."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, dict[str, float], list[Any]]] = []
        self._coverage: list[float] = []  # of every step
        self._epochs: set[int] = set()
        self._every = 1

    def add(self, trainer: Trainer, step: int, values: Mapping[str, float], norms: Iterable[Tensor]) -> None:
        """Keep a logged step."""
        if not trainer.is_global_zero:
            return
        if len(self._coverage) % self._every == 0:
            self._steps.append((step, dict(values), [each.float().numpy() for each in norms]))
        if len(self._steps) > _MOST:
            self._steps, self._every = self._steps[::2], 2 * self._every
        self._coverage.append(min((value for name, value in values.items() if name.endswith("/coverage")), default=1.0))
        self._epochs.add(trainer.current_epoch)

    @property
    def logged(self) -> dict[str, tuple[Any, Any]]:
        """Steps and values by name."""
        names = dict.fromkeys(name for _, values, _ in self._steps for name in values)
        points = {name: [(step, values[name]) for step, values, _ in self._steps if name in values] for name in names}
        arrays = {name: np.array(each, dtype=np.float64) for name, each in points.items()}
        return {name: (array[:, 0], array[:, 1]) for name, array in arrays.items()}

    def layers(self, prefix: str) -> Any:
        """A picture of the statistics of all groups of parameters over the steps; None without a value."""
        empty = np.empty(0)
        run = Run("", empty, empty, logged={**self.logged, f"{prefix}/coverage": (empty, empty)})
        found = {name: layers_of(run, name) for name in ("norm_mean", "noise_scale", "diversity", "signal_to_noise")}
        draws = [
            partial(charts.layers, edges=each["edges"], names=each["names"], values=each["mean"], label=name)
            for name, each in found.items()
            if each is not None
        ]
        return charts.picture(draws) if draws else None

    def run(self, trainer: Trainer, norms: SampleNorms, settings: Mapping[str, Any]) -> Run:
        """The run that a page shows: of the ledger where the Trainer writes one, with what was logged."""
        writers = [each for each in trainer.callbacks if isinstance(each, PerSampleGradientWriter)]  # type: ignore[attr-defined]
        if writers and (writers[0].dirpath / MANIFEST).is_file():
            run = read_run([writers[0].dirpath])
        else:
            run = self._without_ledger(norms, settings)
        run.logged, run.title = self.logged, type(trainer.lightning_module).__name__
        if self._every > 1:
            run.warnings.append(f"Of the {len(self._coverage):,} logged steps every {self._every}th is in the page.")
        return run

    def _without_ledger(self, norms: SampleNorms, settings: Mapping[str, Any]) -> Run:
        of_steps = [(step, np.concatenate([np.empty(0), *each])) for step, _, each in self._steps]
        sizes = [len(each) for _, each in of_steps]
        return Run(
            "",
            np.repeat([float(step) for step, _ in of_steps], sizes),
            np.concatenate([np.empty(0), *(each for _, each in of_steps)]),
            samples=_samples(norms),
            batch_size=float(np.median(sizes)) if sizes and settings["max_samples"] is None else None,
            coverage=np.array(self._coverage),
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
