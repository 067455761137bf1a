"""Strategies under which nothing is captured are named, with the reason, and nothing of the module is replaced."""

from __future__ import annotations

import pytest
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy
from torch import nn

from lightning_persample.callbacks import PerSampleGradientMonitor
from lightning_persample.errors import PerSampleWarning, UnsupportedError
from tests.callbacks.runs import Classifier, make_trainer

NOT_CAPTURED = ": no per-sample gradients are captured in this fit"


class WithoutDeepSpeed(DeepSpeedStrategy):
    """What a capture asks of the strategy, where the package deepspeed is not installed."""

    def __init__(self, stage: int) -> None:
        self.config = {"zero_optimization": {"stage": stage}}
        self._lightning_module, self._optimizers = None, []


class WithoutGPU(FSDPStrategy):
    def __init__(self) -> None:
        self._lightning_module, self._optimizers = None, []


class SomebodysStrategy(SingleDeviceStrategy):
    """A strategy that this package does not know."""


def wrapped(module):
    strategy = SingleDeviceStrategy("cpu")
    strategy.connect(nn.Sequential(module))
    return strategy


FLAT = "because it holds weights of several layers in one flat tensor; use ModelParallelStrategy, fully_shard"
DEEPSPEED = "because DeepSpeed keeps gradients in buffers of its own and, at stage 3, weights too"
REFUSED = {
    "deepspeed 3": (
        lambda _: WithoutDeepSpeed(3),
        2,
        f"WithoutDeepSpeed at ZeRO stage 3 is not supported, {DEEPSPEED}",
    ),
    "deepspeed 2": (lambda _: WithoutDeepSpeed(2), 1, f"WithoutDeepSpeed is not supported, {DEEPSPEED}"),
    "fsdp": (lambda _: WithoutGPU(), 2, f"WithoutGPU is not supported, {FLAT}"),
    "unknown": (lambda _: SomebodysStrategy("cpu"), 2, "SomebodysStrategy on 2 devices is not supported"),
    "wrapped": (wrapped, 1, "SingleDeviceStrategy is not supported, because it wraps the module in Sequential"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_strategy_is_refused_by_name(name, monkeypatch):
    make, devices, text = REFUSED[name]
    module = Classifier()
    for unsupported in ("warn", "error"):
        monitor = PerSampleGradientMonitor(unsupported=unsupported)
        trainer = make_trainer([monitor])
        monkeypatch.setattr(trainer._accelerator_connector, "strategy", make(module))
        monkeypatch.setattr(type(trainer), "world_size", property(lambda trainer: devices))
        if unsupported == "error":
            with pytest.raises(UnsupportedError) as error:
                monitor.on_fit_start(trainer, module)
            assert str(error.value) == text + NOT_CAPTURED
        else:
            with pytest.warns(PerSampleWarning) as caught:
                monitor.on_fit_start(trainer, module)
            assert [str(each.message) for each in caught] == [text + NOT_CAPTURED]
        assert "training_step" not in module.__dict__


def test_synchronized_batch_normalization_is_refused_by_name(monkeypatch):
    module = Classifier(nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4)))
    monitor = PerSampleGradientMonitor()
    trainer = make_trainer([monitor])
    monkeypatch.setattr(type(trainer), "world_size", property(lambda trainer: 2))
    text = (
        "SyncBatchNorm (`network.1`) is not supported, because samples of all devices influence each other in it; use "
        "GroupNorm, or BatchNorm without synchronization"
    )
    with pytest.warns(PerSampleWarning) as caught:
        monitor.on_fit_start(trainer, module)
    assert [str(each.message) for each in caught] == [text + NOT_CAPTURED]
    assert "training_step" not in module.__dict__
