"""Charts of a run, drawn by matplotlib: as SVG in the colours of the page that shows them, or in a logger's figure."""

from __future__ import annotations

import html
import importlib
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_persample.influence.optional_packages import matplotlib

Array = NDArray[np.float64]
_INK, _FIRST, _SECOND = "#010203", "#3b82f6", "#f97316"  # ink is replaced by the colour of the page's text
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "report",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}
_LONGEST_NAME, _MOST_NAMES = 24, 40


@contextmanager
def _drawing(style: Any) -> Iterator[None]:
    """The style, whatever the user's is; no warnings of numbers at the ends of the range, or of missing letters."""
    with matplotlib("style").context(style), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # (the reader's browser has it)
        yield


def svg(name: str, label: str, draw: Callable[[Any], None], height: float = 2.9) -> str:
    """What a function draws into axes, as an element of a page: no name of a program, no date and no address in it."""
    text = io.StringIO()
    with _drawing(["default", _STYLE]):
        figure = matplotlib("figure").Figure(figsize=(4.6, height), layout="constrained")
        draw(figure.subplots())
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=nothing, transparent=True, dpi=144)
    drawn = text.getvalue().replace(_INK, "currentColor")
    # in every figure alike
    drawn = re.sub(r" id=\"(?!C\d)[A-Za-z][A-Za-z0-9.]*_\d+\"", "", drawn[drawn.index("<svg") :])
    head = f'<svg id="chart-{name}" role="img" aria-label="{html.escape(label)}"'
    return re.sub(r"<svg [^>]*?(viewBox=\"[^\"]*\")[^>]*>", lambda match: f"{head} {match[1]}>", drawn, count=1)


def picture(draws: Sequence[Callable[[Any], None]]) -> Any:
    """What functions draw into axes of their own, one below the other, as a ``PIL.Image.Image``."""
    content = io.BytesIO()
    with _drawing("default"):
        figure = matplotlib("figure").Figure(figsize=(8, 3 * len(draws)), layout="constrained")
        for draw, axes in zip(draws, figure.subplots(len(draws), squeeze=False)[:, 0], strict=True):
            draw(axes)
        figure.savefig(content, format="png", dpi=100)
    return importlib.import_module("PIL.Image").open(content)


def bands(axes: Any, edges: Array, low: Array, middle: Array, high: Array, floor: float) -> None:
    """Quantiles of the norms in windows of steps, (windows,) each; what is below `floor` is not shown."""
    low = np.maximum(low, floor)
    axes.stairs(high, edges, baseline=low, fill=True, color=_FIRST, alpha=0.25, label="5% to 95% of the samples")
    axes.stairs(middle, edges, baseline=None, color=_FIRST, linewidth=1.4, label="median")
    _steps(axes)
    axes.set(ylabel="gradient norm")
    _scale(axes, np.concatenate([low, high]))
    _legend(axes)


def heat(axes: Any, edges: Array, log_edges: Array, share: Array) -> None:
    """Shares of the samples by norm, (bins, windows), of each window of steps."""
    percent = np.where(share > 0, 100 * share, np.nan)
    largest = np.fmax.reduce(percent, axis=0)  # of each window: some in which all are alike leave room for the others
    top = min(2 * np.nanmedian(largest), np.nanmax(largest))
    colors = matplotlib("colors").PowerNorm(0.5, 0, top)
    mesh = axes.pcolormesh(edges, 10**log_edges, percent, norm=colors, rasterized=True)
    axes.set(ylabel="gradient norm", yscale="log")
    _steps(axes)
    _plain(axes.yaxis)
    extend = "max" if top < np.nanmax(largest) else "neither"
    _bar(axes, mesh, label="% of the samples", extend=extend)


def layers(axes: Any, edges: Array, names: Sequence[str], values: Array, label: str = "mean norm") -> None:
    """Values of groups of parameters in windows of steps, (groups, windows), the first group at the top."""
    positive = values[np.isfinite(values) & (values > 0)]
    colors = matplotlib("colors").LogNorm(positive.min(), positive.max()) if positive.size else None
    mesh = axes.pcolormesh(edges, np.arange(len(names) + 1), values, cmap="viridis", norm=colors, rasterized=True)
    every = -(-len(names) // _MOST_NAMES)
    axes.set_yticks(np.arange(len(names))[::every] + 0.5, [_shortened(name) for name in names[::every]], fontsize=7)
    _steps(axes)
    axes.invert_yaxis()
    _plain(_bar(axes, mesh, label=label).ax.yaxis)


def curves(axes: Any, lines: Mapping[str, tuple[Array, Array]], label: str, batch_size: float | None = None) -> None:
    """Values over steps, and the batch size where there is one."""
    cycle = [_FIRST, "#10b981", "#a855f7", "#eab308"]
    for place, (name, (steps, values)) in enumerate(lines.items()):
        dots = "." if len(steps) < 30 else ""
        axes.plot(steps, values, color=cycle[place % len(cycle)], label=_literal(name), marker=dots)
    if batch_size is not None:
        axes.axhline(batch_size, color=_SECOND, linestyle="--", label=f"batch size {batch_size:g}")
    _steps(axes)
    axes.set(ylabel=label)
    _scale(axes, np.concatenate([values for _, values in lines.values()] + [np.array([batch_size or np.nan])]))
    _legend(axes)


def points(axes: Any, x: Array, y: Array, marked: NDArray[np.bool_] | None, mark: str) -> None:
    """A point for each sample at its loss and its score; those that are marked in another colour."""
    colors = _FIRST if marked is None else np.where(marked, _SECOND, _FIRST)
    axes.scatter(x, y, s=9, c=colors, alpha=0.55, linewidths=0, gid="points")
    axes.set(xlabel="mean loss", ylabel="mean gradient norm")
    _scale(axes, y)
    if marked is not None:
        for color, name in ((_SECOND, _shortened(mark)), (_FIRST, f"not {_shortened(mark)}")):
            axes.scatter([], [], s=14, color=color, label=name)
        _legend(axes)


def _bar(axes: Any, mesh: Any, **options: Any) -> Any:
    """What the colours of a chart mean, beside it."""
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.02, **options)
    bar.outline.set_visible(False)
    return bar


def _steps(axes: Any) -> None:
    axes.set(xlabel="step")
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    _plain(axes.xaxis)


def _legend(axes: Any) -> None:
    """Above the axes, where no value is."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=8, borderpad=0, columnspacing=1.2)


def _scale(axes: Any, values: Array) -> None:
    """A logarithmic axis where all values are positive and far apart."""
    finite = values[np.isfinite(values)]
    if finite.size and finite.min() > 0 and finite.max() > 20 * finite.min():
        axes.set_yscale("log")
    _plain(axes.yaxis)


def _plain(axis: Any) -> None:
    """Numbers as people write them; no label at minor ticks but where there are few major ones."""
    ticker = matplotlib("ticker")
    written = ticker.FuncFormatter(lambda value, _: f"{value:,.0f}" if 1000 <= value < 1e6 else f"{value:g}")
    axis.set_major_formatter(written)
    if axis.get_scale() == "log":
        low, high = axis.get_view_interval()
        if high < 50 * low:
            few = high < 8 * low
            axis.set_major_locator(ticker.MaxNLocator(4) if few else ticker.LogLocator(subs=(1, 2, 5)))
        axis.set_minor_formatter(ticker.NullFormatter())


def _shortened(name: str) -> str:
    half = _LONGEST_NAME // 2
    return _literal(name if len(name) <= _LONGEST_NAME else f"{name[:half]}…{name[1 - half :]}")


def _literal(name: str) -> str:
    """A name in which matplotlib sees no formula."""
    return name.replace("$", r"\$")
