"""The bins of a histogram's picture, and what is written in it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_persample.callbacks._histogram_figure import draw_histogram, histogram_bins

pytest.importorskip("matplotlib")

WIDE = [0.001, 0.02, 0.3, 4.0, 50.0]
CASES = {
    "wide": (WIDE, True),
    "narrow": ([1.0, 1.5, 2.0, 2.5, 29.9], False),
    "just wide": ([1.0, 30.1], True),
    "wide with zeros": ([0.0, 0.0, *WIDE], True),
    "zeros and one value": ([0.0, 2.0], False),
    "one value": ([2.5], False),
    "equal values": ([2.5] * 9, False),
    "zeros": ([0.0, 0.0], False),
    "negative": ([-3.0, 0.001, 50.0], False),
    "tiny": ([1e-300, 1e-290], True),
    "huge": ([1e-3, 1e38], True),
    "nearly equal": ([1.0, 1.0 + 1e-15], False),
}


@pytest.mark.parametrize(("values", "is_logarithmic"), CASES.values(), ids=CASES)
def test_every_value_is_in_a_bin(values, is_logarithmic):
    edges, found = histogram_bins(torch.tensor(values, dtype=torch.float64))
    assert found == is_logarithmic
    assert bool((edges[1:] > edges[:-1]).all())
    shown = [value for value in values if value > 0 or not is_logarithmic]
    assert np.histogram(values, edges.numpy())[0].sum() == len(shown)
    steps = edges.log().diff() if is_logarithmic else edges.diff()
    torch.testing.assert_close(steps, steps.mean().expand_as(steps), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("count", "bins"), [(1, 11), (25, 11), (100, 21), (10_000, 41)])
def test_more_values_have_more_bins(count, bins):
    assert len(histogram_bins(torch.rand(count))[0]) == bins + 1


@pytest.mark.parametrize("name", CASES)
def test_the_picture_counts_and_marks(name):
    values = torch.tensor(CASES[name][0], dtype=torch.float64)
    figure = draw_histogram(values, "title", "norm")
    figure.canvas.draw()
    (axes,) = figure.axes
    shown = values[values > 0] if CASES[name][1] else values
    assert sum(patch.get_height() for patch in axes.patches) == len(shown)
    median, high = np.quantile(values, [0.5, 0.95])
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == [f"median {median:.3g}", f"95% quantile {high:.3g}"]
    assert axes.get_xscale() == ("log" if CASES[name][1] else "linear")
    assert (axes.get_title(loc="left"), axes.get_ylabel()) == ("title", "samples")
    hidden = len(values) - len(shown)
    assert axes.get_xlabel() == ("norm" + f"  ({hidden} of {len(values)} are 0 and not shown)" * (hidden > 0))
    low, high = axes.get_xlim()
    inside = [low <= tick <= high for tick in axes.get_xticks()]
    assert sum(inside) >= 2
    lines = [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata())]
    assert all(math.isfinite(place) and low <= place <= high for place in lines)
