"""What torchmetrics promises of every metric: reset, forward, copies, collections, devices and dtypes."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torchmetrics import MetricCollection

from lightning_persample.metrics import GradientNoiseScale, base
from tests.metrics.inputs import CASES, batches, results


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request):
    return request.param


def updated(case, given, **settings):
    metric = case.make(**settings)
    for batch in given:
        metric.update(**case.arguments(batch, batch))
    return metric


def close(found):
    return pytest.approx(found, rel=1e-12, nan_ok=True)


def test_without_data_torchmetrics_warns_and_the_value_is_nan(case):
    metric = case.make()
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        found = results(metric)
    for name, value in found.items():
        if name in {"count", "nonfinite", "undefined", "samples"} or name.endswith("steps"):
            assert value == 0, name
        elif name.startswith("undefined/"):
            assert value == 3
        else:
            assert math.isnan(value), name


def test_reset_starts_anew(case):
    first, *others = batches()
    metric = updated(case, others)
    metric.compute()
    metric.reset()
    metric.update(**case.arguments(first, first))
    assert results(metric) == close(results(updated(case, [first])))


def test_forward_gives_the_value_of_its_batch_and_adds_it(case):
    metric = case.make()
    for batch in batches():
        value = metric(**case.arguments(batch, batch))
        expected = updated(case, [batch]).compute()
        assert torch.allclose(*map(_stacked, (value, expected)), rtol=1e-12, equal_nan=True)
    assert results(metric) == close(results(updated(case, batches())))


def _stacked(value):
    return torch.stack([each.double() for each in value.values()]) if isinstance(value, dict) else value


@pytest.mark.parametrize("way", ["clone", "deepcopy", "pickle"])
def test_copies_go_on_by_themselves(case, way):
    *first, last = batches()
    metric = updated(case, first)
    metric.compute()
    ways = {"clone": lambda m: m.clone(), "deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}
    other = ways[way](metric)
    other.update(**case.arguments(last, last))
    assert results(other) == close(results(updated(case, batches())))
    assert results(metric) == close(results(updated(case, first)))


def test_state_dict_restores_a_persistent_metric(case):
    metric = updated(case, batches())
    metric.persistent(True)
    other = case.make()
    other.persistent(True)
    other.load_state_dict(metric.state_dict())
    other._update_count = 1  # torchmetrics keeps it out of the state_dict and would warn
    assert results(other) == close(results(metric))


def test_merged_metrics_hold_the_samples_of_both(case):
    first, second = updated(case, batches()[:2]), updated(case, batches()[2:])
    second.merge_state(first)
    assert results(second) == close(results(updated(case, batches())))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_inputs_of_low_precision_are_added_up_in_float64(case, dtype):
    lower, same = case.make(), case.make()
    for batch in batches():
        given = {name: _cast(value, dtype) for name, value in case.arguments(batch, batch).items()}
        lower.update(**given)
        same.update(**{name: _cast(value, torch.float64) for name, value in given.items()})
    assert results(lower) == close(results(same))


def _cast(value, dtype):
    if isinstance(value, dict):
        return {name: each.to(dtype) for name, each in value.items()}
    return value.to(dtype) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(
    "lower", [lambda m: m.half(), lambda m: m.to(torch.float16), lambda m: m.set_dtype(torch.half)]
)
def test_states_keep_their_precision(case, lower):
    *first, last = batches()
    metric = lower(updated(case, first))
    metric.update(**case.arguments(last, last))
    assert results(metric) == close(results(updated(case, batches())))


def test_states_follow_to_a_device_without_float64(case, monkeypatch):
    monkeypatch.setattr(base, "_WITHOUT_DOUBLE", {"meta"})
    metric = updated(case, batches())
    metric.compute()
    metric.to("meta")
    assert metric.device.type == "meta"
    states = [
        each for state in metric.metric_state.values() for each in (state if isinstance(state, list) else [state])
    ]
    assert {state.device.type for state in states} == {"meta"}
    assert {state.dtype for state in states} <= {torch.float32, torch.int64}
    batch = batches()[0].float().to("meta")
    metric.update(**case.arguments(batch, batch))


def test_updates_work_where_float64_is_missing(case, monkeypatch):
    monkeypatch.setattr(base, "_WITHOUT_DOUBLE", {"cpu"})
    metric = case.make()
    for batch in batches():
        metric.update(**case.arguments(batch.float(), batch.float()))
    states = [
        each for state in metric.metric_state.values() for each in (state if isinstance(state, list) else [state])
    ]
    assert {state.dtype for state in states} <= {torch.float32, torch.int64}
    found = results(metric)
    monkeypatch.undo()
    assert found == pytest.approx(results(updated(case, batches())), rel=1e-3)
    metric.to("cpu")
    states = [
        each for state in metric.metric_state.values() for each in (state if isinstance(state, list) else [state])
    ]
    assert {state.dtype for state in states} <= {torch.float64, torch.int64}


def test_a_graph_is_not_kept(case):
    batch = batches()[0].requires_grad_()
    metric = case.make()
    value = metric(**case.arguments(batch, batch))
    assert not _stacked(value).requires_grad


def test_compute_on_cpu(case):
    assert results(updated(case, batches(), compute_on_cpu=True)) == close(results(updated(case, batches())))


@pytest.mark.parametrize("compute_groups", [True, False])
def test_a_collection_takes_the_arguments_of_all(compute_groups):
    chosen = {name: case for name, case in CASES.items() if name != "signal to noise"}
    collection = MetricCollection({name: case.make() for name, case in chosen.items()}, compute_groups=compute_groups)
    for batch in batches():
        arguments = {}
        for case in chosen.values():
            arguments |= case.arguments(batch, batch)
        collection.update(**arguments)
    alone = {}
    for name, case in chosen.items():
        value = updated(case, batches()).compute()
        if isinstance(value, dict):  # torchmetrics puts the metric's name before keys that several metrics have
            alone |= {f"{name}_{key}": each.item() for key, each in value.items()}
        else:
            alone[name] = value.item()
    found = {key: value.item() for key, value in collection.compute().items()}
    assert {key: value for key, value in found.items() if key in alone} == close(alone)
    collection.reset()
    assert not any(metric.update_called for metric in collection.values())


def test_flags_of_torchmetrics(case):
    metric = case.make()
    assert (metric.higher_is_better, metric.is_differentiable, metric.full_state_update) == (None, False, False)


def test_loose_parts_are_joined_on_the_host_too():
    metric = GradientNoiseScale(compute_on_cpu=True)
    for step in range(1100):
        metric.update(torch.tensor([1.0, 2.0]), 0.5 + step)
    assert len(metric.parts) < 100
    assert metric.counts()["steps"].item() == 1100
