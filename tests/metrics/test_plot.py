"""Plots of every metric say what they show."""

from __future__ import annotations

import math

import pytest

from tests.metrics.inputs import CASES, batches

matplotlib = pytest.importorskip("matplotlib")


@pytest.fixture(params=CASES.values(), ids=CASES)
def metric_and_results(request):
    matplotlib.use("Agg")
    metric = request.param.make()
    results = [metric(**request.param.arguments(batch, batch)) for batch in batches()]
    yield metric, results
    matplotlib.pyplot.close("all")


def values_in(result):
    counts = {"count", "nonfinite", "undefined", "opposed"}
    values = {name: each for name, each in result.items() if name not in counts} if isinstance(result, dict) else result
    return {name: each.item() for name, each in values.items()} if isinstance(values, dict) else {"": values.item()}


def drawn(axis):
    return [[float(value) for value in line.get_ydata()] for line in axis.get_lines()]


def test_one_result(metric_and_results):
    metric, _ = metric_and_results
    figure, axis = metric.plot()
    figure.canvas.draw()
    values = values_in(metric.compute())
    assert axis.get_title() == metric._title
    assert axis.get_ylabel() == metric._axis
    assert drawn(axis) == [[pytest.approx(value)] for value in values.values()]
    if list(values) != [""]:
        assert [label.get_text() for label in axis.get_xticklabels()] == list(values)
    bottom, top = axis.get_ylim()
    assert all(bottom < value < top for value in values.values())


def test_a_series_of_results(metric_and_results):
    metric, results = metric_and_results
    figure, axis = metric.plot(results * 25)
    figure.canvas.draw()
    series = [values_in(result) for result in results * 25]
    assert drawn(axis) == [[pytest.approx(each[name]) for each in series] for name in series[0]]
    assert axis.get_xlabel() == "Step"
    assert len(axis.get_xticks()) <= 10
    if len(series[0]) > 1:
        assert [text.get_text() for text in axis.get_legend().get_texts()] == list(series[0])


def test_on_an_axis_of_the_callers(metric_and_results):
    metric, results = metric_and_results
    own, axes = matplotlib.pyplot.subplots(1, 2)
    layout = own.get_layout_engine()
    assert metric.plot(ax=axes[0]) == (None, axes[0])
    assert metric.plot(results, ax=axes[1]) == (None, axes[1])
    assert own.get_layout_engine() is layout
    assert axes[1].get_title() == metric._title


def test_a_result_that_is_absent(metric_and_results):
    metric, _ = metric_and_results
    metric.reset()
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        _, axis = metric.plot()
    assert all(math.isnan(value) for line in drawn(axis) for value in line)
