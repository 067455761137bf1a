"""Numbers, histograms and tables in every logger of Lightning."""

from __future__ import annotations

import csv
import importlib
import io
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lightning_persample.callbacks.lightning_internals import callback_metrics, is_a, prefix_of
from lightning_persample.capture.record import warn_user
from lightning_persample.errors import of_user
from lightning_persample.influence.pictures import montage

_SAID: set[str] = set()
# TensorBoard's bins of a histogram end at 1e20, and it fails where all values are above: these hold any finite norm.
_EDGES = np.append(0.0, 1e-12 * 1.1 ** np.arange(4020))
_BINS = 64  # of W&B


@rank_zero_only
def log_histogram(loggers: Sequence[Logger], name: str, values: Tensor, step: int) -> None:
    """Write the distribution of the finite values of (n,) to the loggers that have histograms."""
    finite = values.detach()[values.isfinite()].cpu().double().numpy()  # NumPy has no bfloat16
    takers = [each for each in loggers if is_a(each, "TensorBoardLogger", "WandbLogger", "DummyLogger")]
    if loggers and not takers:
        names = ", ".join(dict.fromkeys(type(logger).__name__ for logger in loggers))
        _say_once(
            f"`{name}` is not written: {names} takes no histogram, TensorBoardLogger and WandbLogger do. "
            "PerSampleGradientWriter keeps the norm of every sample"
        )
    for logger in takers if finite.size else ():
        with _said_if_disk_fails(name):
            if is_a(logger, "TensorBoardLogger"):
                of_user(_experiment(logger).add_histogram, _prefixed(logger, name), finite, step, _EDGES)
            elif is_a(logger, "WandbLogger"):
                low, high = finite.min(), finite.max()
                ends = low, max(high, low * (1 + 1e-9))  # of norms that are alike, too
                counted = np.histogram(finite, _BINS, ends)
                _log_to_wandb(logger, name, "Histogram", np_histogram=counted, step=step)


def takes_pictures(logger: Logger) -> bool:
    """Whether a logger shows pictures, and so figures in place of many curves."""
    return is_a(logger, "TensorBoardLogger", "WandbLogger")


@rank_zero_only
def log_picture(loggers: Sequence[Logger], name: str, image: Any, step: int) -> None:
    """Write a ``PIL.Image.Image`` to the loggers that have pictures."""
    for logger in filter(takes_pictures, loggers):
        with _said_if_disk_fails(name):
            if is_a(logger, "TensorBoardLogger"):
                pixels = np.asarray(image.convert("RGB"))
                of_user(_experiment(logger).add_image, _prefixed(logger, name), pixels, step, dataformats="HWC")
            else:
                _log_to_wandb(logger, name, "Image", image, step=step)


@rank_zero_only
def log_table(
    loggers: Sequence[Logger],
    name: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    step: int,
    images: Sequence[Any] = (),
) -> None:
    """Write a table to the loggers that have tables, with an image or None for each row where there are any."""
    for logger in loggers:
        with _said_if_disk_fails(name):
            if is_a(logger, "TensorBoardLogger"):
                of_user(_experiment(logger).add_text, _prefixed(logger, name), _markdown(columns, rows), step)
                if images:
                    captions = [f"{_markdown_cell(row[0])}: {_markdown_cell(row[1])}" for row in rows]
                    log_picture([logger], f"{name}_pictures", montage(images, captions), step)
            elif is_a(logger, "WandbLogger"):
                alike = map(_of_one_type, zip(*rows, strict=True))
                shown, data = [*columns], [[*row] for row in zip(*alike, strict=True)]
                if images:
                    make: Any = importlib.import_module("wandb").Image
                    shown.append("picture")
                    data = [[*row, image and make(image)] for row, image in zip(data, images, strict=True)]
                _log_to_wandb(logger, name, "Table", step=step, columns=shown, data=data)
            elif is_a(logger, "MLFlowLogger"):
                # Not log_table of MLflow, which needs pandas and adds rows to what is there.
                folder = "/".join(re.sub(r"[^\w. -]", "_", part) for part in _prefixed(logger, name).split("/"))
                path = f"{folder}/step_{step:06d}.csv"
                of_user(_experiment(logger).log_text, logger.version, _comma_separated(columns, rows), path)


def _of_one_type(cells: Sequence[Any]) -> Sequence[Any]:
    """The cells of a column of W&B, which refuses several types in one: texts, unless all are numbers, or all bools."""
    known = [cell for cell in cells if cell is not None]
    are_bools = {isinstance(cell, bool) for cell in known}
    if len(are_bools) < 2 and all(isinstance(cell, (bool, int, float)) for cell in known):
        return cells
    return [None if cell is None else str(cell) for cell in cells]


def save_table(path: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Write a table as a file of comma-separated values."""
    with _said_if_disk_fails(path):
        _save(path, _comma_separated(columns, rows).encode())


def _save(path: str, content: bytes) -> None:
    files = get_filesystem(path)  # it may be in a bucket
    files.makedirs(path.rpartition("/")[0], exist_ok=True)
    with files.open(path, "wb") as file:
        file.write(content)


@contextmanager
def _said_if_disk_fails(name: str) -> Iterator[None]:
    """Where something is written: an `OSError` (the disk is full) is a warning, once."""
    try:
        yield
    except (OSError, ValueError) as error:  # Lightning's TensorBoardLogger makes a ValueError of each
        why = error.__cause__ if isinstance(error, ValueError) else error
        if not isinstance(why, OSError):
            raise
        _say_once(f"`{name}` is not written: {why.strerror or why}. Training goes on without it")


def _experiment(logger: Logger) -> Any:
    return of_user(getattr, logger, "experiment")


def _prefixed(logger: Logger, name: str) -> str:
    """The name as the logger's own ``log_metrics`` writes it."""
    prefix = prefix_of(logger)
    return f"{prefix}{logger.LOGGER_JOIN_CHAR}{name}" if prefix else name  # type: ignore[attr-defined]


def _log_to_wandb(logger: Logger, name: str, kind: str, *args: Any, step: int, **kwargs: Any) -> None:
    make: Callable[..., Any] = getattr(importlib.import_module("wandb"), kind)
    # Through the logger, which writes the step as "trainer/global_step": W&B drops rows whose own step= goes back.
    of_user(logger.log_metrics, {name: make(*args, **kwargs)}, step=step)


def _say_once(text: str) -> None:
    if text not in _SAID:
        _SAID.add(text)
        warn_user(text)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_markdown_cell(cell) for cell in line) + " |" for line in lines)


def _markdown_cell(cell: Any) -> str:
    text = "" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell)
    return " ".join(text.replace("|", r"\|").split())


def _comma_separated(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()


def log_metrics(
    trainer: Trainer, metrics: Mapping[str, float], new: Mapping[str, float], *, step: int, drawn: Collection[str] = ()
) -> None:
    """Write values at one step to every logger, and those that are new to `callback_metrics`.

    Those that are `drawn` in figures are no curves of loggers that have pictures.
    """
    # With the epoch, as Lightning adds it to the values of its own.
    for logger in trainer.loggers:
        left_out = drawn if takes_pictures(logger) else ()
        values = {name: value for name, value in metrics.items() if name not in left_out}
        if not values:
            continue
        values["epoch"] = float(trainer.current_epoch)
        with _said_if_disk_fails(next(iter(metrics), "")):
            of_user(logger.log_metrics, values, step=step)
    if not trainer.barebones:
        # Not by self.log, which goes through everything that was ever logged for each of the names.
        callback_metrics(trainer).update(zip(new, torch.tensor([*new.values()]).unbind(), strict=True))


def show_means(trainer: Trainer, name: str, means: Sequence[float | None]) -> None:
    """Show values in the progress bar."""
    names = [name] if len(means) == 1 else [f"{name}_{place}" for place in range(len(means))]
    # Not by log(..., prog_bar=True), whose names are also those of callback_metrics.
    trainer.progress_bar_metrics.update(
        {n: mean for n, mean in zip(names, means, strict=True) if mean is not None and math.isfinite(mean)}
    )
