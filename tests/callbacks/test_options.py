"""Options are checked where they are given, and the text says what is allowed."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import pydoc
import typing
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import nn

from lightning_persample import expanded_weights
from lightning_persample.callbacks import (
    PerSampleCallback,
    PerSampleGradientMonitor,
    PerSampleGradientWriter,
    observed_step,
)
from lightning_persample.errors import OptionError, PerSampleError
from lightning_persample.options import CaptureOptions
from tests.callbacks.runs import Classifier, Recorder, fit, make_trainer

NONE_OR_POSITIVE = "None or an int >= 1"
REDUCTIONS = "'mean', 'sum', or a callable (outputs, batch) -> Tensor of shape (B,)"
QUANTILES = "a sequence of numbers strictly between 0 and 1 without duplicates"
PREFIX = "a str that is not empty and does not end with '/'"
BASE = [
    ("every_n_steps", 0, NONE_OR_POSITIVE),
    ("every_n_steps", -3, NONE_OR_POSITIVE),
    ("every_n_steps", True, NONE_OR_POSITIVE),
    ("every_n_steps", 2.0, NONE_OR_POSITIVE),
    ("loss_reduction", "none", REDUCTIONS),
    ("loss_reduction", None, REDUCTIONS),
    ("loss_reduction", 3, REDUCTIONS),
    ("batch_dim", -1, "an int >= 0"),
    ("batch_dim", None, "an int >= 0"),
    ("batch_dim", False, "an int >= 0"),
    ("batch_dim", 1.0, "an int >= 0"),
    ("batch_size", 0, NONE_OR_POSITIVE),
    ("batch_size", True, NONE_OR_POSITIVE),
    ("batch_size", "8", NONE_OR_POSITIVE),
    ("sample_index", 0, "None or a callable (batch) -> B ints"),
    ("sample_index", "index", "None or a callable (batch) -> B ints"),
    ("unsupported", "ignore", "'warn', 'error' or 'vmap'"),
    ("unsupported", None, "'warn', 'error' or 'vmap'"),
]
BASE += [
    ("engine", "hooks", "'expanded', 'vmap' or 'loop'"),
    ("engine", None, "'expanded', 'vmap' or 'loop'"),
    ("verify", "yes", "True or False"),
    ("verify", None, "True or False"),
    ("fuse_weight_grad", 1, "True or False"),
    ("fuse_weight_grad", None, "True or False"),
    ("max_memory", 0, f"{NONE_OR_POSITIVE}, in bytes"),
    ("max_memory", True, f"{NONE_OR_POSITIVE}, in bytes"),
    ("max_memory", 2.0**20, f"{NONE_OR_POSITIVE}, in bytes"),
]
MONITOR = [
    ("per_layer", 0, NONE_OR_POSITIVE),
    ("per_layer", True, NONE_OR_POSITIVE),
    ("per_layer", "2", NONE_OR_POSITIVE),
    ("quantiles", 0.5, QUANTILES),
    ("quantiles", "0.5", QUANTILES),
    ("quantiles", (0.0, 0.5), QUANTILES),
    ("quantiles", (0.5, 1), QUANTILES),
    ("quantiles", (0.5, math.nan), QUANTILES),
    ("quantiles", ("0.5",), QUANTILES),
    ("quantiles", (0.5, 0.5), QUANTILES),
    ("prefix", "", PREFIX),
    ("prefix", "grads/", PREFIX),
    ("prefix", None, PREFIX),
    ("prog_bar", "yes", "True or False"),
    ("histogram", "yes", "True or False"),
    ("histogram", None, "True or False"),
    ("worst_samples", 0, NONE_OR_POSITIVE),
    ("worst_samples", True, NONE_OR_POSITIVE),
    ("labels", [1, 2], "None or a dict of sequences, mappings or callables by name"),
]


@pytest.mark.parametrize(
    ("callback", "option", "value", "allowed"),
    [(PerSampleCallback, *case) for case in BASE] + [(PerSampleGradientMonitor, *case) for case in BASE + MONITOR],
)
def test_a_value_that_is_not_allowed_raises_at_construction(callback, option, value, allowed):
    with pytest.raises(OptionError) as error:
        callback(**{option: value})
    assert str(error.value) == f"{option}={value!r} is not allowed: {option} must be {allowed}"
    assert isinstance(error.value, (ValueError, PerSampleError))


def test_a_tensor_that_is_not_allowed_is_named_by_its_shape():
    with pytest.raises(OptionError) as error:
        PerSampleCallback(loss_reduction=torch.ones(2, 3))
    got = "loss_reduction=a tensor of shape (2, 3) and dtype torch.float32 is not allowed"
    assert str(error.value) == f"{got}: loss_reduction must be {REDUCTIONS}"


def test_tensors_in_a_value_that_is_not_allowed_are_named_by_their_shapes():
    with pytest.raises(OptionError) as error:
        PerSampleCallback(loss_reduction=[torch.ones(2000), (1,)])
    got = "loss_reduction=[a tensor of shape (2000,) and dtype torch.float32, (1,)] is not allowed"
    assert str(error.value) == f"{got}: loss_reduction must be {REDUCTIONS}"
    with pytest.raises(OptionError, match=r"engine='x{199}\.\.\. is not allowed"):
        PerSampleCallback(engine="x" * 5000)


def test_allowed_values_are_kept():
    def weights(outputs, batch):
        return torch.ones(1)

    monitor = PerSampleGradientMonitor(
        7, loss_reduction=weights, batch_dim=1, batch_size=4, per_layer=2, quantiles=[0.25], unsupported="error"
    )
    assert (monitor.every_n_steps, monitor.loss_reduction, monitor.batch_dim, monitor.batch_size) == (7, weights, 1, 4)
    assert (monitor.per_layer, monitor.quantiles, monitor.unsupported) == (2, (0.25,), "error")


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    ("setting", "counts"),
    [
        ({"every_n_steps": 3}, True),
        ({"loss_reduction": "sum"}, True),
        ({"batch_dim": 1}, True),
        ({"batch_size": 2}, True),
        ({"per_layer": 1}, False),
        ({"quantiles": (0.1,)}, False),
        ({"statistics": ()}, False),
        ({"unsupported": "error"}, False),
        ({"engine": "loop"}, True),
        ({"verify": True}, False),
        ({"fuse_weight_grad": True}, False),
        ({"max_memory": 2**20}, False),
        ({"prefix": "other"}, True),
        ({"prog_bar": True}, False),
        ({"histogram": True}, False),
        ({"sample_index": len}, True),
        ({"worst_samples": 3}, False),
        ({"labels": {"label": [1]}}, False),
    ],
    ids=lambda setting: next(iter(setting)) if isinstance(setting, dict) else "",
)
def test_the_state_key_of_a_monitor_names_what_its_numbers_are_of(setting, counts, own):
    """And of any other callback all that tells two of one class apart."""
    if own:
        assert (PerSampleGradientMonitor(**setting).state_key != PerSampleGradientMonitor().state_key) is counts
        assert PerSampleGradientMonitor(**setting).state_key == PerSampleGradientMonitor(**setting).state_key
    elif setting.keys() <= Recorder()._settings().keys():
        assert Recorder(**setting).state_key != Recorder().state_key


def weigh(outputs, batch, factor=1.0):
    return torch.ones(1)


@pytest.mark.parametrize("reduction", [weigh, functools.partial(weigh, factor=2.0)], ids=["function", "partial"])
def test_the_state_key_of_a_callable_is_the_same_in_every_process(reduction):
    key = PerSampleGradientMonitor(loss_reduction=reduction).state_key
    assert "0x" not in key
    assert ("test_options.weigh" in key) == (reduction is weigh)


class Stateful(Recorder):
    def state_dict(self):
        return {"count": len(self.records)}


def test_callbacks_with_state_need_different_settings():
    make_trainer([Stateful(), Stateful(2)])
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `Stateful`"):
        make_trainer([Stateful(2), Stateful(2)])


def test_lightning_refuses_two_monitors_that_differ_in_what_they_log_alone(tmp_path):
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `PerSampleGradientMonitor`"):
        make_trainer([PerSampleGradientMonitor(1), PerSampleGradientMonitor(1, per_layer=1)])
    fit(
        Classifier(), [PerSampleGradientMonitor(1), PerSampleGradientMonitor(1, per_layer=1, prefix="layers")], tmp_path
    )
    with pytest.raises(OptionError, match="give each monitor a prefix of its own"):
        fit(Classifier(), [PerSampleGradientMonitor(1), PerSampleGradientMonitor(5)], tmp_path)


@pytest.mark.parametrize(
    ("option", "values", "shown"),
    [
        ("loss_reduction", ("mean", "sum"), ("'mean'", "'sum'")),
        ("batch_dim", (0, 1), ("0", "1")),
        ("batch_size", (None, 8), ("None", "8")),
        ("sample_index", (None, len), ("None", "<built-in function len>")),
        ("engine", ("expanded", "loop"), ("'expanded'", "'loop'")),
        ("max_memory", (None, 4096), ("None", "4096")),
    ],
)
def test_callbacks_that_disagree_on_the_capture_raise_at_the_start_of_the_fit(option, values, shown):
    callbacks = [PerSampleGradientMonitor(**{option: values[0]}), Recorder(**{option: values[1]})]
    module = Classifier()
    with pytest.raises(OptionError) as error:
        fit(module, callbacks)
    assert str(error.value) == (
        f"PerSampleGradientMonitor (callbacks[0]) has {option}={shown[0]}, but Recorder (callbacks[1]) has "
        f"{option}={shown[1]}: all per-sample callbacks of a Trainer share one capture, so {option} must be the same "
        "for all of them"
    )
    assert "training_step" not in module.__dict__


def test_a_quantity_that_does_not_exist_is_the_callbacks_mistake_and_raises():
    with pytest.raises(OptionError, match="hessian"):
        fit(Classifier(), [Recorder(quantities=("hessian",))])


@pytest.mark.filterwarnings("ignore")  # Lightning and jsonargparse disagree on names that are deprecated
def test_the_command_line_of_lightning_reads_the_options(tmp_path):
    pytest.importorskip("jsonargparse")
    options = ["every_n_steps=5", "quantiles=[0.1, 0.9]", "loss_reduction=sum", "per_layer=null", "prog_bar=true"]
    options += ["engine=loop", "unsupported=error", "verify=false"]
    arguments = [f"--trainer.callbacks={PerSampleGradientMonitor.__module__}.PerSampleGradientMonitor"]
    arguments += [f"--trainer.callbacks.{option}" for option in options]
    arguments += [f"--trainer.default_root_dir={tmp_path}", "--trainer.logger=false"]
    cli = LightningCLI(Untrained, run=False, args=arguments)
    (monitor,) = [each for each in cli.trainer.callbacks if isinstance(each, PerSampleGradientMonitor)]
    assert (monitor.every_n_steps, monitor.quantiles, monitor.loss_reduction) == (5, (0.1, 0.9), "sum")
    assert (monitor.per_layer, monitor.prog_bar, monitor.unsupported) == (None, True, "error")
    assert (monitor.engine, monitor.verify) == ("loop", False)


class Untrained(LightningModule):
    pass


def test_memory_reaches_the_capture_and_leave_the_values(monkeypatch):
    taken = []

    def recording(*args, **options):
        taken.append(options["max_memory"])
        return expanded_weights(*args, **options)

    monkeypatch.setattr(observed_step, "expanded_weights", recording)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    norms = []
    for options in ({}, {"max_memory": 64}):
        recorder = Recorder(1, **options)
        fit(Classifier(copy.deepcopy(network)), [recorder])
        norms.append(torch.cat([record.norms() for record in recorder.records]))
    assert list(dict.fromkeys(taken)) == [None, 64]
    torch.testing.assert_close(norms[1], norms[0])


def test_the_shared_options_are_those_of_the_base_and_every_signature_shows_them():
    shared = inspect.signature(PerSampleCallback, eval_str=True).parameters
    types = typing.get_type_hints(CaptureOptions)
    assert {name: each.annotation for name, each in shared.items() if name != "every_n_steps"} == types
    assert {name: each.default for name, each in shared.items()} == {
        **dict.fromkeys(("every_n_steps", "batch_size", "batch_layout", "sample_index", "max_memory", "max_samples")),
        "batch_dim": 0,
        "loss_reduction": "mean", "unsupported": "warn", "engine": "expanded", "verify": False,
        "fuse_weight_grad": False,
    }  # fmt: skip

    class MyCallback(PerSampleGradientMonitor):
        def __init__(self, mine: int, **capture: Any) -> None:
            super().__init__(**capture)

    for kind in (PerSampleGradientMonitor, PerSampleGradientWriter, MyCallback):
        shown = inspect.signature(kind).parameters
        assert {name: shown[name].default for name in types} == {name: shared[name].default for name in types}
        assert all(f"{name}: " in pydoc.plaintext.document(kind) for name in types)
        assert "capture" not in shown
    assert MyCallback(1, batch_dim=2).batch_dim == 2
    for kind in (PerSampleCallback, PerSampleGradientMonitor):
        with pytest.raises(TypeError, match=r"PerSampleCallback\.__init__\(\) got an unexpected .* 'batch_axis'"):
            kind(batch_axis=1)  # type: ignore[call-arg]
