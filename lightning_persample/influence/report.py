"""One page that shows a run: the norms of its samples, its layers, its noise scale, and which samples stand out."""

from __future__ import annotations

import csv
import html
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_persample.errors import PerSampleError
from lightning_persample.influence import charts
from lightning_persample.influence.by_sample import AT_DIFFERENT_TIMES, columns_of, how_often
from lightning_persample.influence.charts import Array
from lightning_persample.influence.datamodeling import rank_correlation
from lightning_persample.influence.dataset import GRADIENTS, MANIFEST, broken_files_named, write_atomically
from lightning_persample.influence.ledger import BASE_COLUMNS, Ledger, read_ledger
from lightning_persample.influence.optional_packages import arrow, matplotlib
from lightning_persample.influence.pictures import Render, data_address, rendered, shortened
from lightning_persample.options import check_option, check_options

_MOST_WINDOWS, _BINS, _MOST_POINTS, _MOST_CURVE = 80, 36, 5000, 600
_QUANTILES = (0.05, 0.5, 0.95)


@dataclass
class Samples:
    """What is known of each sample that was captured, (samples,) each."""

    index: list[Any]
    mean: Array  # of its finite norms; nan without one
    last: Array
    seen: NDArray[np.int64]
    nonfinite: NDArray[np.int64]
    columns: dict[str, list[Any]] = field(default_factory=dict)  # means of floats, the last of others
    dataset: int | None = None  # how many samples the dataset has, where that is known
    is_complete: bool = False  # whether every step was captured, with all of its samples


@dataclass
class Run:
    """What a page shows."""

    title: str
    step: Array  # of each row, (rows,)
    norm: Array  # nan where there is none
    groups: dict[str, Array] = field(default_factory=dict)
    samples: Samples | None = None
    batch_size: float | None = None
    coverage: Array = field(default_factory=lambda: np.empty(0))
    epochs: int = 0
    logged: dict[str, tuple[Array, Array]] = field(default_factory=dict)  # steps and values by name
    settings: dict[str, Any] = field(default_factory=dict)
    libraries: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    step_unit: str = "optimizer steps"


def report(
    *dirpaths: str | os.PathLike[str],
    out: str | os.PathLike[str] = "report.html",
    render: Render | None = None,
    labels: Mapping[str, Any] | None = None,
    k: int = 25,
    title: str | None = None,
) -> Path:
    """Write one page on a run: a file that opens in any browser, without a network and without any other file.

    It shows the norms of the samples over the steps (median and 5% to 95%, and their distribution), each layer's mean
    norm, the noise scale beside the batch size, each sample's loss and mean norm, the samples with the largest and the
    smallest mean norms, coverage, options and versions. What a run has not recorded the page names in one sentence.

    Charts are SVG by matplotlib: they take the colours of the page, light and dark, need no script, and the loggers'
    figures are the same. (Plotly's and Bokeh's own scripts are larger than everything else in the page, and draw into
    colours that do not follow the reader's.) The table is one of HTML, which 15 lines of script sort.

    Args:
        dirpaths: the folder of a ledger, one that holds it, and folders with the logs of a `PerSampleGradientMonitor`
            (those of Lightning's CSVLogger or TensorBoardLogger), which has the noise scale; all of one run.
        out: the file; one that is there is replaced.
        render: ``render(index)`` gives what is shown for the sample with this index in the dataset: an image (PIL,
            tensor or array of (H, W), (C, H, W) or (H, W, C); other than uint8 from 0 to 1, else scaled) or a text.
        labels: further columns of the table by name: a sequence by index, a mapping, or a callable of the index. The
            first one of bools colours the samples in the chart of losses.
        k: how many of the samples with the largest and the smallest norms are in the table, each.
        title: of the page; None takes the folder's name.

    Returns:
        The path of the file. Where there is neither a ledger nor a log of the monitor, where there are several ledgers,
        or where one is broken, a `PerSampleError` says so.
    """
    check_option("dirpaths", dirpaths, bool(dirpaths), "at least one folder")
    check_option("out", out, _may_be_file(out), "the path of a file, not of a folder")
    check_options(k=k, render=render)
    check_labels(labels)
    run = read_run([Path(each) for each in dirpaths])
    if title is not None:
        run.title = title
    return write_report(run, Path(out), render, labels, k)


def check_labels(labels: object) -> None:
    """Raise an `OptionError` where the option `labels` is not what is allowed."""
    is_allowed = labels is None or (
        isinstance(labels, Mapping) and not any(isinstance(each, str) for each in labels.values())
    )
    check_option("labels", labels, is_allowed, "None or a dict of sequences, mappings or callables by name")


def _may_be_file(path: object) -> bool:
    return isinstance(path, str | os.PathLike) and not Path(path).is_dir()


# What is read


def read_run(dirpaths: Sequence[Path]) -> Run:
    """The run that lies in some folders."""
    for each in dirpaths:
        if not each.is_dir():
            raise PerSampleError(f"{os.fspath(each)!r} is no folder")
    manifests = [path for each in dirpaths for path in each.rglob(MANIFEST) if path.parent.name != GRADIENTS]
    ledgers = sorted({path.parent.resolve() for path in manifests})
    if len(ledgers) > 1:
        named = ", ".join(repr(os.fspath(path)) for path in ledgers)
        raise PerSampleError(f"a report is of one run, and these are {len(ledgers)} ledgers: {named}: pass one of them")
    empty = np.empty(0)
    run = _of_ledger(ledgers[0]) if ledgers else Run(dirpaths[0].resolve().name, empty, empty)
    run.logged, text = read_logs(dirpaths)
    run.warnings += [text] if text else []
    if not ledgers and not run.logged:
        named = ", ".join(repr(os.fspath(path)) for path in dirpaths)
        raise PerSampleError(
            f"{named} holds no ledger ({MANIFEST} is missing) and no log of a PerSampleGradientMonitor (metrics.csv or "
            "events of TensorBoard): pass the dirpath of the PerSampleGradientWriter, or the Trainer's log_dir"
        )
    return run


def _of_ledger(dirpath: Path) -> Run:
    ledger, table = Ledger(dirpath), read_ledger(dirpath, partial=True)
    manifest, warnings = ledger.manifest(), []
    if missing := ledger.gap() or ledger.lacking(manifest, len(table)):
        warnings.append(f"The ledger lacks {missing}: the page shows what there is.")
    settings = {**manifest.settings, "processes": manifest.processes, "run": manifest.run}
    names = [name for name in table.column_names if name.startswith("norm/")]
    if "norm" not in table.column_names:
        raise PerSampleError(
            f"the ledger in {os.fspath(dirpath)!r} has no norms, which the page is made of: write them with "
            "InRunInfluence(..., norms=True)"
        )
    step, norm = _floats(table, "step"), _floats(table, "norm")
    if absent := table["norm"].null_count:
        warnings.append(f"{absent:,} of {len(table):,} rows have no norm: no parameter had a per-sample gradient.")
    if unknown := table["sample_index"].null_count:
        warnings.append(
            f"{unknown:,} of {len(table):,} rows have no sample_index: they are in no sample's mean. "
            "`sample_index=` of PerSampleGradientWriter gives the index where the data carry it."
        )
    if len(table) and (passes := int(table["backward_index"].to_numpy().max()) + 1) > 1:
        text = f"A batch has up to {passes} backward passes (manual optimization): the charts have the norms of all."
        warnings.append(text)
    if manifest.settings.get("max_samples") is not None:
        warnings.append(
            f"max_samples={manifest.settings['max_samples']}: of larger batches a random part was captured."
        )
    return Run(
        dirpath.name,
        step,
        norm,
        {name.removeprefix("norm/"): _floats(table, name) for name in names},
        _samples_of(table, norm, manifest.settings),
        _batch_size(table, manifest.settings),
        _floats(table, "coverage"),
        len(np.unique(table["epoch"].to_numpy())),
        settings=settings,
        libraries=dict(manifest.libraries),
        warnings=warnings,
        step_unit=manifest.settings.get("step_unit", "optimizer steps"),
    )


def _floats(table: Any, name: str) -> Array:
    return np.asarray(table[name].to_numpy(), dtype=np.float64)


def _batch_size(table: Any, settings: Mapping[str, Any]) -> float | None:
    """Samples of an optimizer step over all processes: the median over the steps; None where it is not known."""
    if not len(table):
        return None
    if settings.get("max_samples") is None:
        first = table["step"].to_numpy()[table["backward_index"].to_numpy() == 0]  # others are of the same samples
        return float(np.median(np.unique(first, return_counts=True)[1])) if len(first) else None
    weights = _floats(table, "weight")
    known = weights[np.isfinite(weights) & (weights > 0)]
    return float(np.median(1 / known)) if known.size and settings.get("loss_reduction") == "mean" else None


def _samples_of(table: Any, norm: Array, settings: Mapping[str, Any]) -> Samples | None:
    """Means of each sample over its rows, and the last of what is no float; None where no row has an index."""
    known = np.asarray(table["sample_index"].is_valid()) & ~np.asarray(table["norm"].is_null())
    if not known.any():
        return None
    chosen, norm = table.filter(arrow().array(known)), norm[known]
    index, place = np.unique(chosen["sample_index"].to_numpy(), return_inverse=True)
    latest = np.zeros(len(index), dtype=np.int64)
    latest[place] = np.arange(len(place))  # rows are in the order of the steps
    columns: dict[str, list[Any]] = {}
    for name in chosen.column_names:
        if name in BASE_COLUMNS or name.startswith("norm/"):
            continue
        if str(chosen[name].type) == "double":
            columns[name] = _means(place, _floats(chosen, name), len(index)).tolist()
        else:
            columns[name] = chosen[name].take(latest).to_pylist()
    seen, nonfinite = np.bincount(place), np.bincount(place[~np.isfinite(norm)], minlength=len(index))
    is_complete = settings.get("every_n_steps") == 1 and settings.get("max_samples") is None
    means = _means(place, norm, len(index))
    return Samples(index.tolist(), means, norm[latest], seen, nonfinite, columns, is_complete=is_complete)


def _means(place: NDArray[np.int64], values: Array, count: int) -> Array:
    """The mean of the finite values at each place, (count,); nan without one."""
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.bincount(place[finite], values[finite], count) / np.bincount(place[finite], minlength=count)


def read_logs(dirpaths: Sequence[Path]) -> tuple[dict[str, tuple[Array, Array]], str]:
    """What the monitor logged, by name, from metrics.csv, or else from events of TensorBoard; and a warning or ""."""
    tables = sorted({path.resolve() for each in dirpaths for path in each.rglob("metrics.csv")}, key=_age)
    events = {path.resolve().parent for each in dirpaths for path in each.rglob("events.out.tfevents.*")}
    for places, read in ((tables, _of_csv), (sorted(events, key=_age), _of_events)):
        found = [(place, of_place) for place in places if (of_place := read(place))]
        points: dict[str, dict[float, float]] = {}
        twice = ""
        for place, values in found:  # what a run that was resumed wrote later counts
            for name, (steps, numbers) in values.items():
                there = points.setdefault(name, {})
                if there.keys() & set(steps):
                    twice = f"Several logs have values of the same steps; those of {os.fspath(place)} are shown. "
                there.update(zip(steps, numbers, strict=True))
        if found:
            joined = {name: np.array(sorted(values.items())).T for name, values in points.items()}
            text = twice and f"{twice}If they are of several runs, pass the folder of one."
            return {name: (array[0], array[1]) for name, array in joined.items()}, text
    return {}, ""


Logged = dict[str, tuple[list[float], list[float]]]


def _age(path: Path) -> tuple[float, str]:
    return path.stat().st_mtime, os.fspath(path)


def _of_csv(path: Path) -> Logged:
    found: Logged = {}
    with broken_files_named(path, "pass folders without it"), path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        names = _of_monitor(reader.fieldnames or ())
        for row in reader:
            for name in names:
                text = row[name]
                if text and row.get("step"):
                    steps, values = found.setdefault(name, ([], []))
                    steps.append(float(row["step"]))
                    values.append(float(text))
    return found


def _of_events(path: Path) -> Logged:
    try:
        events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    except ModuleNotFoundError:
        return {}
    reader = events.EventAccumulator(os.fspath(path), {"scalars": 0})
    reader.Reload()
    scalars = {name: reader.Scalars(name) for name in _of_monitor(reader.Tags()["scalars"])}
    return {name: ([each.step for each in all_], [each.value for each in all_]) for name, all_ in scalars.items()}


def _of_monitor(names: Collection[str]) -> list[str]:
    """The values of a monitor, which alone logs a coverage beside a number of norms that are not finite, of steps."""
    prefixes = tuple(name.removesuffix("coverage") for name in names if name.endswith("/coverage"))
    prefixes = tuple(prefix for prefix in prefixes if f"{prefix}nonfinite" in names)
    return [name for name in names if name.startswith(prefixes) and not name.endswith("_epoch")]


# What is computed


def windows(steps: Array, most: int = _MOST_WINDOWS) -> Array:
    """Edges of windows of steps, all of one width; a window without a captured step stays empty."""
    captured = np.unique(steps)
    half = float(np.median(np.diff(captured))) / 2 if len(captured) > 1 else 0.5
    return np.linspace(captured[0] - half, captured[-1] + half, min(len(captured), most) + 1)


def _window_of(edges: Array, steps: Array) -> NDArray[np.int64]:
    return np.clip(np.searchsorted(edges, steps, side="right") - 1, 0, len(edges) - 2)


def _bands(run: Run) -> dict[str, Any] | None:
    """Quantiles of the finite norms in each window of steps, and in the first and in the last tenth of the steps."""
    finite = np.isfinite(run.norm)
    if not finite.any():
        return None
    steps, norms = run.step[finite], run.norm[finite]
    edges = windows(steps)
    place = _window_of(edges, steps)
    order = np.argsort(place, kind="stable")
    split = np.split(norms[order], np.searchsorted(place[order], np.arange(1, len(edges) - 1)))
    found = [np.quantile(each, _QUANTILES) if each.size else np.full(3, math.nan) for each in split]
    bands = {"edges": edges, **dict(zip(("p5", "p50", "p95"), np.array(found).T, strict=True))}
    tenth = (steps.max() - steps.min()) / 10
    bands["first"] = np.quantile(norms[steps <= steps.min() + tenth], _QUANTILES)
    bands["last"] = np.quantile(norms[steps >= steps.max() - tenth], _QUANTILES)
    return bands


def _floor(medians: Array) -> float:
    """The least norm that a chart shows: two decades below the least median, where what is learnt goes down to 0."""
    known = medians[np.isfinite(medians) & (medians > 0)]
    return float(known.min()) / 100 if known.size else 0.0


def _histogram(run: Run, floor: float) -> dict[str, Any] | None:
    """The share of each window's samples in bins of log10 of the norm, (bins, windows)."""
    positive = np.isfinite(run.norm) & (run.norm > 0)
    if not positive.any():
        return None
    edges, logs = windows(run.step[positive]), np.log10(run.norm[positive])
    lowest = max(logs.min(), math.log10(floor)) if floor > 0 else logs.min()  # smaller ones are in the lowest bin
    ends = (lowest, logs.max()) if logs.max() - lowest > 1e-6 else (logs.min() - 0.5, logs.max() + 0.5)
    bins, count = np.linspace(*ends, _BINS + 1), len(edges) - 1
    place = np.clip(((logs - ends[0]) / (ends[1] - ends[0]) * _BINS).astype(int), 0, _BINS - 1)
    place = place * count + _window_of(edges, run.step[positive])
    counts = np.bincount(place, minlength=_BINS * count).reshape(_BINS, count)
    with np.errstate(invalid="ignore"):
        return {"edges": edges, "log10_norm": bins, "share": counts / counts.sum(0)}


def _groups(run: Run, statistic: str = "norm_mean") -> dict[str, tuple[Array, Array]]:
    """Steps and values of a statistic of each group of parameters."""
    end = f"/{statistic}"
    return {name: (run.step, values) for name, values in run.groups.items()} or {
        name.removesuffix(end).removeprefix(prefix): values
        for prefix in _prefixes(run)
        for name, values in run.logged.items()
        if name.startswith(prefix) and name.endswith(end) and name.count("/") > prefix.count("/")
    }


def layers_of(run: Run, statistic: str = "norm_mean") -> dict[str, Any] | None:
    """The mean of a statistic of each group of parameters in each window of steps, (groups, windows)."""
    groups = {name: each for name, each in _groups(run, statistic).items() if np.isfinite(each[1]).any()}
    if not groups:
        return None
    edges = windows(np.concatenate([steps for steps, _ in groups.values()]))
    means = [_means(_window_of(edges, steps), values, len(edges) - 1) for steps, values in groups.values()]
    return {"edges": edges, "names": list(groups), "mean": np.array(means)}


def _prefixes(run: Run) -> list[str]:
    """What the names of the monitor's values start with, one for each optimizer that it logs."""
    return [name.removesuffix("coverage") for name in run.logged if name.endswith("/coverage")]


def _thinned(steps: Array, values: Array) -> tuple[Array, Array]:
    """At most `_MOST_CURVE` values of a curve, evenly."""
    every = -(-len(steps) // _MOST_CURVE) or 1
    return steps[::every], values[::every]


def _scores(samples: Samples) -> dict[str, Any] | None:
    """Loss and mean norm of each sample that has both, and their rank correlation."""
    loss = np.array(samples.columns.get("loss", [math.nan] * len(samples.index)), dtype=np.float64)
    known = (np.isfinite(loss) & np.isfinite(samples.mean)).nonzero()[0]
    if not known.size:
        return None
    shown = np.sort(np.random.default_rng(0).permutation(known)[:_MOST_POINTS])
    points = [[samples.index[place] for place in shown], loss[shown], samples.mean[shown]]
    columns = (torch.from_numpy(each[known])[:, None] for each in (loss, samples.mean))
    correlation = float(rank_correlation(*columns))
    return {"samples": len(known), "rank_correlation": correlation, "points": points}


def _table(samples: Samples, k: int) -> list[int]:
    """The places of the k samples with the largest means, of k without a finite mean, and of the k smallest."""
    order = np.argsort(-samples.mean, kind="stable")  # nan comes last
    finite, others = np.split(order, [int(np.isfinite(samples.mean).sum())])
    partly = [place for place in (samples.nonfinite > 0).nonzero()[0] if np.isfinite(samples.mean[place])]
    return list(dict.fromkeys([*others[:k].tolist(), *partly[:k], *finite[:k].tolist(), *finite[-k:].tolist()]))


# What is shown


def write_report(run: Run, out: Path, render: Render | None, labels: Mapping[str, Any] | None, k: int) -> Path:
    """Write the page of a run."""
    run.logged = {name: each if name.endswith("/coverage") else _thinned(*each) for name, each in run.logged.items()}
    labels, bands = columns_of(labels), _bands(run)
    numbers: dict[str, Any] = {
        "bands": bands,
        "histogram": _histogram(run, 0.0 if bands is None else _floor(bands["p50"])),
        "layers": layers_of(run),
        "logged": {
            prefix + name: list(_thinned(*run.logged[prefix + name]))
            for prefix in _prefixes(run)
            for name in ("noise_scale", "norm_p50", "coverage")
            if prefix + name in run.logged
        },
        "scores": None if run.samples is None else _scores(run.samples),
    }
    warnings = [*_warnings_on_norms(run), *run.warnings]
    table = _samples_panel(run, numbers, render, labels, k, warnings)
    panels = [_norms_panel(run, numbers["bands"]), _histogram_panel(run, numbers["histogram"])]
    panels += [_layers_panel(run, numbers["layers"]), _noise_panel(run), _scores_panel(run, numbers["scores"], labels)]
    panels.append(_coverage_panel(run))
    listed = "".join(f"<li>{_text(each)}</li>" for each in warnings)
    libraries = {**run.libraries, "python": sys.version.split()[0], "matplotlib": matplotlib().__version__}
    package = importlib.import_module("lightning_persample")
    libraries["lightning_persample"] = package.__version__
    page = Template(files("lightning_persample.influence").joinpath("report.html").read_text(encoding="utf-8"))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(
        out,
        page.substitute(
            title=_text(run.title),
            subtitle=_text(_subtitle(run)),
            tiles="".join(f"<div><b>{_text(value)}</b><span>{_text(name)}</span></div>" for name, value in _tiles(run)),
            warnings=f'<section id="warnings"><h2>Warnings</h2><ul>{listed}</ul></section>' if listed else "",
            panels="\n".join(panels),
            table=table,
            settings=_listed("Options", run.settings) + _listed("Versions", libraries),
            numbers=_json(numbers),
        ).encode(),
    )
    return out


def _panel(name: str, title: str, chart: str, text: str) -> str:
    absent = "" if chart else ' class="absent"'
    return f'<section id="{name}"><h2>{title}</h2>{chart}<p{absent}>{_text(text)}</p></section>'


def _norms_panel(run: Run, found: dict[str, Any] | None) -> str:
    name, title = "norms", "Gradient norms of the samples"
    if found is not None:
        (_, first, _), (_, median, high) = found["first"], found["last"]
        text = f"The line is the median sample, the band holds 90% of them. The median is {_short(first)}"
        if len(found["edges"]) > 2:
            text += f" in the first tenth of the steps and {_short(median)} in the last"
        text += f", where 5% of the samples are above {_short(high)}"
        text += f", {_short(high / median)} times the median. " if median > 0 else ". "
        text += "Where the band grows upwards, few samples drive the training: hard or mislabelled ones."
        quantiles = {"low": found["p5"], "middle": found["p50"], "high": found["p95"]}
        draw = partial(charts.bands, edges=found["edges"], floor=_floor(found["p50"]), **quantiles)
        return _panel(name, title, charts.svg(name, f"{title} over the steps", draw), text)
    if not (lines := _of_prefixes(run, "norm_p50")):
        return _panel(name, title, "", _NOT_FINITE if run.norm.size else _NO_ROWS)
    if not any(np.isfinite(values).any() for _, values in lines.values()):
        return _panel(name, title, "", _NOT_FINITE)
    text = "The median over the samples of each logged step. With PerSampleGradientWriter the page has all quantiles."
    return _panel(name, title, charts.svg(name, title, partial(charts.curves, lines=lines, label="norm")), text)


def _histogram_panel(run: Run, found: dict[str, Any] | None) -> str:
    name, title = "histogram", "Distribution of the norms"
    if found is None:
        return _panel(name, title, "", "No captured row has a positive finite norm." if run.norm.size else _NO_ROWS)
    text = (
        "Each column is a histogram of the samples of some steps: the brighter, the more of them have that norm. Two "
        "ridges are two kinds of samples, the upper one often those with wrong labels."
    )
    zeros = int((run.norm == 0).sum())
    text += f" {zeros:,} rows with a norm of 0 are not in it." if zeros else ""
    below = int(((run.norm > 0) & (run.norm < 10 ** found["log10_norm"][0] * (1 - 1e-9))).sum())
    text += f" Its lowest row has {below:,} smaller ones, too." if below else ""
    draw = partial(charts.heat, edges=found["edges"], log_edges=found["log10_norm"], share=found["share"])
    return _panel(name, title, charts.svg(name, f"{title} over the steps", draw), text)


def _layers_panel(run: Run, found: dict[str, Any] | None) -> str:
    name, title = "layers", "Mean norm of each layer"
    if found is None:
        absent = "The run has no norms of layers: per_layer=1 (or 2) records them."
        return _panel(name, title, "", "No layer has a finite norm." if _groups(run) else absent)
    text = (
        "First layers at the top. Compare a row with its own past: one that has turned dark has stopped to learn, one "
        "that brightens until the end becomes unstable. (A layer of few weights is darker than a large one.)"
    )
    draw = partial(charts.layers, edges=found["edges"], names=found["names"], values=found["mean"])
    height = min(2.9 + max(0, len(found["names"]) - 20) * 0.08, 5.0)
    return _panel(name, title, charts.svg(name, f"{title} over the steps", draw, height), text)


def _noise_panel(run: Run) -> str:
    name, title = "noise", "Noise scale and batch size"
    lines = _of_prefixes(run, "noise_scale")
    if not lines:
        text = (
            "The run has no noise scale: PerSampleGradientMonitor logs it, but not in manual optimization and not with "
            'the engines "vmap" and "loop".'
        )
        return _panel(name, title, "", text)
    known = {part: values[np.isfinite(values)] for part, (_, values) in lines.items()}
    if not any(values.size for values in known.values()):
        text = "The noise scale is nan at all logged steps: the mean gradient is below the noise, or it is not known."
        return _panel(name, title, "", text)
    part, values = next((part, values) for part, values in known.items() if values.size)
    text = advice(float(np.median(values)), run.batch_size)
    text = text if len(lines) == 1 else f"Of {part}: {text}"
    draw = partial(charts.curves, lines=lines, label="samples", batch_size=run.batch_size)
    return _panel(name, title, charts.svg(name, f"{title} over the steps", draw), text)


def advice(noise_scale: float, batch_size: float | None) -> str:
    """What a noise scale says of a batch size."""
    text = (
        f"The noise scale is about {_short(noise_scale)} samples, the median over the run: at such a batch size "
        "training takes about twice the fewest steps. Well below it a larger batch saves steps, well above hardly any."
    )
    if batch_size is None:
        return f"{text} The batch size of the run is not known."
    ratio = noise_scale / batch_size
    if ratio > 3:
        return (
            f"{text} The batch of {batch_size:g} is much smaller, and its gradient mostly noise: if time matters more "
            "than data, try a larger batch with a larger learning rate."
        )
    if ratio < 1 / 3:
        return (
            f"{text} The batch of {batch_size:g} is much larger: a smaller one takes hardly more steps, each of them "
            "cheaper."
        )
    return f"{text} The batch of {batch_size:g} is near it: nothing to change."


def _scores_panel(run: Run, found: dict[str, Any] | None, labels: Mapping[str, Callable[[Any], Any]]) -> str:
    name, title = "scores", "Loss and gradient norm of each sample"
    if found is None:
        text = "Nothing is known of single samples."
        if run.samples is not None and "loss" in run.samples.columns:
            text = "No sample has both a finite loss and a finite norm. A warning of the training says why."
        elif run.samples is not None:
            text = (
                'The run has no losses of samples: PerSampleGradientWriter(..., columns=("loss",)) writes those of '
                'F.cross_entropy, and any that training_step returns, {"loss": loss, "per_sample": {"loss": losses}}.'
            )
        return _panel(name, title, "", text)
    index, loss, norm = found["points"]
    marks = {each: [look_up(sample) for sample in index] for each, look_up in labels.items()}
    mark = next((each for each, values in marks.items() if {type(value) for value in values} == {bool}), "")
    marked = np.array(marks[mark]) if mark else None
    correlation = found["rank_correlation"]
    text = f"Rank correlation {correlation:.2f}. " if math.isfinite(correlation) else ""
    text += "Samples at the upper right are the ones that the network cannot fit: hard, rare or mislabelled."
    if len(index) < found["samples"]:
        text += f" {len(index):,} of {found['samples']:,} samples are drawn, chosen at random."
    floor = _floor(np.array([np.median(norm)]))
    if below := int((norm < floor).sum()):
        text += f" {below:,} of less than a hundredth of the median norm are at the lower edge."
    norm = np.maximum(norm, floor)
    chart = charts.svg(name, title, partial(charts.points, x=loss, y=norm, marked=marked, mark=mark))
    return _panel(name, title, f'{chart}<output id="point">Point at a sample to see its index.</output>', text)


def _coverage_panel(run: Run) -> str:
    values = run.coverage[np.isfinite(run.coverage)]
    if not values.size:
        values = np.concatenate([values, *(each for _, each in _of_prefixes(run, "coverage").values())])
    if not values.size:
        return _panel("coverage", "Coverage", "", "The run has no coverage.")
    least, text = float(values.min()), "The norms are over all weights that have a gradient, at every captured step."
    if least < 1:
        text = (
            f"At the least covered step the norms are over {100 * least:.3g}% of the weights that have a gradient, "
            f"{100 * float(values.mean()):.3g}% on average. The warnings of the training name the others, and why."
        )
    bar = f'<meter min="0" max="1" value="{least}" aria-label="coverage"></meter> <b>{100 * least:.3g}%</b>'
    return _panel("coverage", "Coverage", bar, text)


_NO_ROWS = "No norms of samples are here: PerSampleGradientWriter keeps them, and a monitor with report=True."
_NOT_FINITE = "No captured row has a finite norm."


def _of_prefixes(run: Run, name: str) -> dict[str, tuple[Array, Array]]:
    """What was logged of all parameters under a name, by optimizer."""
    prefixes = _prefixes(run)
    own = {prefix: prefix.rstrip("/").rpartition("/")[2] if len(prefixes) > 1 else name for prefix in prefixes}
    return {own[prefix]: run.logged[prefix + name] for prefix in prefixes if prefix + name in run.logged}


def _warnings_on_norms(run: Run) -> list[str]:
    found = []
    wrong = ~np.isfinite(run.norm)
    if run.samples is not None and (several := int((run.samples.nonfinite > 0).sum())):
        text = f"{several:,} samples had a norm that is inf or nan, which is in no mean and no quantile."
        if wrong.any():
            text += f" The first was at step {run.step[wrong][0]:.0f}."
        found.append(text)
    elif wrong.any():
        found.append(f"{int(wrong.sum()):,} rows have no finite norm, the first at step {run.step[wrong][0]:.0f}.")
    return found


def _samples_panel(
    run: Run,
    numbers: dict[str, Any],
    render: Render | None,
    labels: Mapping[str, Callable[[Any], Any]],
    k: int,
    warnings: list[str],
) -> str:
    title, samples = "Samples with the largest and the smallest norms", run.samples
    if samples is None:
        text = (
            "No captured norm has a sample_index, so nothing is known of single samples." if run.norm.size else _NO_ROWS
        )
        return _panel("samples", title, "", text)
    places = _table(samples, k)
    ranks = np.argsort(np.argsort(-samples.mean, kind="stable"), kind="stable") + 1
    names = ["rank", *(["sample"] if render is not None else []), "index", *labels, "mean norm", "last norm"]
    columns = {name: values for name, values in samples.columns.items() if name not in labels and _has_some(values)}
    is_finite = not samples.nonfinite.any()
    names += [*columns, "seen", *([] if is_finite else ["inf or nan"])]
    rows, failed = [], ""
    for place in places:
        index = samples.index[place]
        finite = math.isfinite(samples.mean[place])
        row: list[Any] = [int(ranks[place]) if finite else None]
        if render is not None:
            row.append(rendered(render, index))
            failed = failed or (row[-1] if isinstance(row[-1], str) and row[-1].startswith("render failed") else "")
        row += [index, *(look_up(index) for look_up in labels.values())]
        row += [float(samples.mean[place]), float(samples.last[place]), *(each[place] for each in columns.values())]
        rows.append([*row, int(samples.seen[place]), *([] if is_finite else [int(samples.nonfinite[place])])])
    if failed:
        warnings.append(f"A sample is not shown: {failed}.")
    numbers["samples"] = {
        "columns": names,
        "rows": [[None if _is_image(each) else each for each in row] for row in rows],
    }
    kinds = [' class="number"' if any(map(_is_number, column)) else "" for column in zip(*rows, strict=True)]
    head = "".join(
        f'<th scope="col"{kind}><button>{_text(name)}</button></th>' for name, kind in zip(names, kinds, strict=True)
    )
    below = int(np.isfinite(samples.mean).sum()) - k + 1  # the rank of the first of the smallest
    classes = [' class="gap"' if below > k + 1 and ranks[place] == below else "" for place in places]
    body = "".join(f"<tr{kind}>{''.join(map(_cell, row))}</tr>" for kind, row in zip(classes, rows, strict=True))
    times = int(samples.seen.min()), int(samples.seen.max())
    text = f"{len(rows):,} of {how_often(len(samples.index), times, samples.dataset)}. "
    text += "Rank 1 has the largest mean norm over the captured steps. Click a column's name to sort by it."
    text += "" if samples.is_complete else f" {AT_DIFFERENT_TIMES[0].upper()}{AT_DIFFERENT_TIMES[1:]}."
    text += "" if render is not None else " With render=function of an index the samples themselves are shown."
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return f'<section id="samples"><h2>{title}</h2><p class="soft">{_text(text)}</p>{table}</section>'


def _has_some(values: Sequence[Any]) -> bool:
    return not all(isinstance(each, float) and math.isnan(each) for each in values)


def _is_image(value: Any) -> bool:
    return hasattr(value, "save") and hasattr(value, "size")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if _is_image(value):
        return f'<td data-value=""><img src="{data_address(value)}" alt=""></td>'
    if isinstance(value, bool):
        return f'<td data-value="{int(value)}">{"yes" if value else "no"}</td>'
    if _is_number(value):
        return f'<td class="number" data-value="{value if math.isfinite(value) else ""}">{_short(value)}</td>'
    text = "" if value is None else _text(shortened(str(value)))
    return f'<td class="text{" long" if len(text) > 40 else ""}"><div>{text}</div></td>'


def _tiles(run: Run) -> list[tuple[str, str]]:
    found = [("captured steps", f"{len(np.unique(run.step)):,}")]
    if run.samples is not None:
        found.append(("samples", f"{len(run.samples.index):,}"))
    if (finite := run.norm[np.isfinite(run.norm)]).size:
        found.append(("median norm", _short(float(np.median(finite)))))
    if run.batch_size is not None:
        found.append(("batch size", _short(run.batch_size)))
    for part, (_, values) in _of_prefixes(run, "noise_scale").items():
        if np.isfinite(values).any():
            found.append((part.replace("_", " "), _short(float(np.median(values[np.isfinite(values)])))))
    if wrong := int((~np.isfinite(run.norm)).sum()):
        found.append(("norms inf or nan", f"{wrong:,}"))
    return found


def _subtitle(run: Run) -> str:
    if not run.step.size:
        return "values of the monitor's logs"
    epochs = f" in {run.epochs:,} epoch{'s' * (run.epochs != 1)}" if run.epochs else ""
    steps = f"{run.step_unit} {run.step.min():.0f} to {run.step.max():.0f}"
    return f"Per-sample gradients of {steps}{epochs}, {run.norm.size:,} norms"


def _listed(title: str, values: Mapping[str, Any]) -> str:
    if not values:
        return _panel(title.lower(), title, "", "The run has recorded none.")
    listed = "".join(f"<dt>{_text(name)}</dt><dd>{_text(shortened(str(each)))}</dd>" for name, each in values.items())
    return f'<section id="{title.lower()}"><h2>{title}</h2><dl>{listed}</dl></section>'


def _short(value: float) -> str:
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def _text(value: object) -> str:
    """A text of a user, as a page shows it."""
    return html.escape(str(value).encode(errors="replace").decode())


def _json(value: object) -> str:
    """Numbers for a script of the page: null for what is not finite, and nothing that ends the script."""
    given = json.dumps(value, default=lambda each: each.tolist() if isinstance(each, np.ndarray) else str(each))
    plain = json.loads(given, parse_float=lambda digits: float(f"{float(digits):.6g}"), parse_constant=lambda _: None)
    return json.dumps(plain, allow_nan=False).replace("<", "\\u003c")
