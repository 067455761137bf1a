"""The picture of a histogram, for loggers that have no histograms of their own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_histogram", "histogram_bins"]

_FEWEST, _MOST = 11, 41  # bins: odd, so that a single value is in the middle of one
_WIDE = 30.0  # ratio of largest to smallest value from which on bins grow with the values


def histogram_bins(values: Tensor) -> tuple[Tensor, bool]:
    """Edges of bins that hold all values, in double precision.

    Args:
        values: finite values, at least one, (n,).

    Returns:
        The edges of about 2 sqrt(n) bins, ascending, and whether they are spaced by their logarithm. They are where
        the largest value is more than 30 times the smallest one above 0 and none is negative; values of 0 are then
        below the first edge.
    """
    values = values.double()
    positive = values[values > 0]
    count = min(max(2 * math.isqrt(values.numel()) + 1, _FEWEST), _MOST)
    low, high = float(values.min()), float(values.max())
    if low >= 0 and positive.numel() and high > _WIDE * float(positive.min()):
        low = float(positive.min())
        edges = torch.logspace(math.log10(low), math.log10(high), count + 1, dtype=torch.float64)
        is_logarithmic = True
    else:
        if high - low <= 1e-12 * max(abs(low), abs(high)):  # one value alone has bins around it
            margin = 0.5 * abs(high) or 0.5
            low, high = low - margin, high + margin
        edges = torch.linspace(low, high, count + 1, dtype=torch.float64)
        is_logarithmic = False
    edges[0], edges[-1] = low, high  # not rounded past the values
    return edges, is_logarithmic


def draw_histogram(values: Tensor, title: str, label: str) -> Figure:
    """Bars of how many values are in each bin, with median and 95% quantile marked.

    Args:
        values: finite values, at least one, (n,).
        title: what is written above.
        label: what the values are.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    values = values.double().cpu()
    edges, is_logarithmic = histogram_bins(values)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.set_xlim(float(edges[0]), float(edges[-1]))  # before the scale, whose own margins may not be finite
    shown = values[values >= edges[0]]
    axes.hist(shown.numpy(), edges.tolist(), color="tab:blue", alpha=0.75, edgecolor="white", linewidth=0.4)
    if is_logarithmic:
        _number_logarithmic_axis(axes, edges)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    hidden = values.numel() - shown.numel()
    if hidden:
        label += f"  ({hidden} of {values.numel()} are 0 and not shown)"
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set(xlabel=label, ylabel="samples")
    quantiles = torch.quantile(values, values.new_tensor([0.5, 0.95])).tolist()
    for name, style, value in zip(("median", "95% quantile"), ("-", "--"), quantiles, strict=True):
        if value >= edges[0]:
            axes.axvline(value, color="tab:red", linestyle=style, linewidth=1.5, label=f"{name} {value:.3g}")
        else:
            axes.plot([], [], color="tab:red", linestyle=style, label=f"{name} {value:.3g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.08)
    figure.legend(loc="outside upper right", frameon=False, ncols=2)
    return figure


def _number_logarithmic_axis(axes: Axes, edges: Tensor) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    decades = math.log10(float(edges[-1] / edges[0]))
    # Over few decades 1, 10, 100 alone would leave most of the axis without a number.
    numbered = (1.0, 2.0, 5.0) if decades < 4 else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=numbered, numticks=15))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
