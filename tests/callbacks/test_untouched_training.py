"""Training is the same bit for bit with the callback on every step and without it."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_persample.callbacks import PerSampleGradientMonitor
from lightning_persample.capture import fused
from tests.callbacks.runs import CLASSES, FEATURES, Classifier, Recorder, fit, loader
from tests.in_turn import in_turn
from tests.torch_release import not_in_the_oldest

STEPS = 14  # the last ones in a second epoch


class ResidualInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        h = self.relu(self.first(x))
        h = self.second(h)
        h += x
        return self.last(F.dropout(F.relu(h, inplace=True), 0.2, self.training))


def dropout():
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, CLASSES))


def batch_norm():
    layers = (nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
    return nn.Sequential(*layers, nn.Dropout1d(0.2), nn.Flatten(), nn.Linear(16, CLASSES))


class Converting(nn.Module):
    """Has constants that are no buffers, and takes them to the batch's device and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.temperature = torch.tensor(2.0)
        self.mask = torch.arange(FEATURES) % 2

    def forward(self, x):
        logits = F.linear(x, self.layer.weight * self.mask.to(x), self.layer.bias)
        return logits / self.temperature.to(logits)


class Scheduled(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def everything_after_training(network, accumulate, callbacks, **kwargs):
    torch.manual_seed(3)
    random.seed(3)
    module = Scheduled(network())
    trainer = fit(
        module,
        callbacks,
        data=loader(64, 6, shuffle=True),
        max_epochs=-1,
        max_steps=STEPS,
        accumulate_grad_batches=accumulate,
        **kwargs,
    )
    assert trainer.global_step == STEPS
    state = {f"module.{name}": value for name, value in module.state_dict().items()}
    for index, parameter_state in trainer.optimizers[0].state_dict()["state"].items():
        state |= {f"optimizer.{index}.{name}": value for name, value in parameter_state.items()}
    state |= {f"grad.{name}": parameter.grad for name, parameter in module.named_parameters()}
    state["rng"] = torch.get_rng_state()
    return state, random.getstate()


@pytest.mark.parametrize(("network", "accumulate"), in_turn([dropout, batch_norm, ResidualInPlace, Converting], [1, 3]))
@pytest.mark.filterwarnings("ignore::lightning_persample.errors.PerSampleWarning")  # batch norm mixes samples
def test_training_is_equal_bit_for_bit(network, accumulate, tmp_path):
    monitor = PerSampleGradientMonitor(1, per_layer=1)
    recorder = Recorder(1, quantities=("sq_norm", "grad_sample"))
    plain, python_state = everything_after_training(network, accumulate, [])
    watched, watched_python_state = everything_after_training(
        network, accumulate, [monitor, recorder], tmp_path=tmp_path
    )
    assert len(recorder.records) >= STEPS * accumulate * 0.9  # the last window of an epoch is shorter
    assert all(record.coverage == 1.0 for record in recorder.records)
    assert plain.keys() == watched.keys()
    for name, value in plain.items():
        assert torch.equal(value, watched[name]), name
    assert python_state == watched_python_state


class Checkpointed(nn.Module):
    """Runs its middle again in backward, dropout included."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(FEATURES, 8)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8))
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.last(checkpoint(self.middle, self.first(x), use_reentrant=self.use_reentrant))


WAYS = {
    "clipping": (dropout, {"gradient_clip_val": 0.1}),
    "autocast": (dropout, {"precision": "bf16-mixed"}),
    "checkpointing, reentrant": (lambda: Checkpointed(True), {}),
    "checkpointing, not reentrant": (lambda: Checkpointed(False), {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_training_is_equal_in_other_ways_of_training(way):
    network, settings = WAYS[way]
    recorder = Recorder(1)
    plain, _ = everything_after_training(network, 1, [], **settings)
    watched, _ = everything_after_training(network, 1, [recorder], **settings)
    assert [record.coverage for record in recorder.records] == [1.0] * STEPS
    for name, value in plain.items():
        assert torch.equal(value, watched[name]), name


def small_images():
    layers = (nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Dropout(0.2))
    return nn.Sequential(*layers, nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(), nn.Linear(48, CLASSES))


@not_in_the_oldest
@pytest.mark.parametrize(
    ("quantities", "accumulate"),
    in_turn([pytest.param(("sq_norm",), id="norms"), pytest.param(("sq_norm", "grad_sample"), id="gradients")], [3, 1]),
)
def test_fused_weight_gradients_train_alike_up_to_the_order_of_sums(quantities, accumulate, monkeypatch):
    monkeypatch.setattr(fused, "convolution_is_fused", lambda *sizes: True)
    plain, _ = everything_after_training(small_images, accumulate, [Recorder(1)], precision="64-true")
    recorder = Recorder(1, quantities=quantities, fuse_weight_grad=True)
    found, _ = everything_after_training(small_images, accumulate, [recorder], precision="64-true")
    assert {record.coverage for record in recorder.records} == {1.0}
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)
    weights = [name for name in plain if name.startswith("module.network.1")]
    assert not all(torch.equal(plain[name], found[name]) for name in weights)  # it did sum in another order
