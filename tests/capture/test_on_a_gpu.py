"""Captured steps on a CUDA device; ``.ci/gpu`` runs these, the other tests marked `gpu` and the benchmark.

What can be seen without a device, `test_waiting` shows on one that is written in Python.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_persample import PerSampleGradientMonitor, expanded_weights
from tests.benchmarks.timed_models import cnn, gpt, mlp
from tests.capture.device_models import LAYERS, MODELS, ZOO, Built, classified
from tests.capture.reference import assert_exact

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),
]
GPU = torch.device("cuda", 0)
STEPS = 6
SMALL = {"mlp": partial(mlp, 8, 16), "cnn": partial(cnn, 8, 8), "gpt": partial(gpt, 8, 12, 16)}
UNEQUAL = {"padded"}  # whose samples weigh unequally, which the loop does not know
# Cases whose modules make tensors on the CPU while they run.
ON_THE_CPU = (
    "bilinear-with", "embedding-bag", "position-table", "spatial", "tokens-picked", "written-by-index",
)  # fmt: skip


@contextmanager
def deterministic() -> Iterator[None]:
    """The same kernels in the same order in every run; what has none of these warns."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def on_gpu(build: Callable[[], Built]) -> Built:
    module, batch, loss, options = build()
    return module.to(GPU), tuple(tensor.to(GPU) for tensor in batch), loss, options


def step(built: Built, **more: Any) -> Tensor:
    module, batch, loss, options = built
    module.zero_grad()
    with expanded_weights(module, batch, unsupported="error", **options, **more) as capture:
        loss(module, *batch).backward()
    return capture.record.norms()


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("name", [name for name in MODELS | LAYERS if name not in UNEQUAL])
def test_values_are_those_of_a_loop(name):
    module, batch, loss, options = on_gpu((MODELS | LAYERS)[name])
    module.eval() if name == "dropout" else None  # (a loop draws otherwise)
    assert_exact(module, loss, batch, tolerance=1e-8, **options)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("name", [name for name in ZOO if not name.removeprefix("case ").startswith(ON_THE_CPU)])
def test_every_way_in_which_a_parameter_meets_the_batch(name):
    module, batch, loss, options = on_gpu(ZOO[name])
    assert_exact(module, loss, batch, tolerance=1e-8, **options)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_a_warm_step_does_not_synchronize(name, fuse):
    module, x = SMALL[name]()
    built = module.to(GPU), (x.to(GPU), torch.randint(0, 10, (len(x),), device=GPU)), classified, {}
    norms = [step(built, fuse_weight_grad=fuse) for _ in range(3)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        norms.append(step(built, fuse_weight_grad=fuse))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(norms[-1], norms[0])


@pytest.mark.parametrize("name", SMALL)
def test_a_step_on_another_stream(name):
    """Hooks run on the stream of the call's forward, and what they hold is used and freed there alone."""
    module, x = SMALL[name]()
    built = module.to(GPU), (x.to(GPU), torch.randint(0, 10, (len(x),), device=GPU)), classified, {}
    expected = step(built)
    stream = torch.cuda.Stream()
    for _ in range(20):  # memory that was freed too early would be taken by one of the next
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            norms = step(built)
        torch.cuda.current_stream().wait_stream(stream)
        torch.testing.assert_close(norms, expected)


def test_a_layer_that_runs_on_a_stream_of_its_own():
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(24, 24), nn.Linear(24, 24)
            self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None

        def forward(self, x: Tensor) -> Tensor:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                beside = self.two(x)
            here = self.one(x)
            torch.cuda.current_stream().wait_stream(self.stream)
            beside.record_stream(torch.cuda.current_stream())
            return (here + beside).tanh().mean(1)[:, :10]

    module, x, y = Beside().to(GPU), torch.randn(8, 4, 24, device=GPU), torch.randint(0, 10, (8,), device=GPU)
    alone = copy.copy(module)
    alone.forward = lambda x: (module.one(x) + module.two(x)).tanh().mean(1)[:, :10]
    expected = step((alone, (x, y), classified, {}))
    for _ in range(20):
        torch.testing.assert_close(step((module, (x, y), classified, {})), expected)


class Classifier(L.LightningModule):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.module(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Values(L.Callback):
    """What was logged at each step."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        found = trainer.callback_metrics.get("per_sample_grad/norm_mean")
        self.norms += [] if found is None else [float(found)]


def fitted(name: str, monitored: bool, **settings: Any) -> tuple[dict[str, Tensor], list[float]]:
    """The weights after a few steps, and the mean norm of each."""
    torch.manual_seed(0)
    module, x = SMALL[name]()
    data = TensorDataset(torch.cat([x] * STEPS), torch.randint(0, 10, (STEPS * len(x),)))
    values = Values()
    trainer = L.Trainer(
        max_epochs=1, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        callbacks=[PerSampleGradientMonitor(every_n_steps=1), values] if monitored else [], **settings,
    )  # fmt: skip
    classifier = Classifier(module)
    with warnings.catch_warnings(), deterministic():
        warnings.simplefilter("ignore")
        trainer.fit(classifier, DataLoader(data, batch_size=len(x)))
    return {key: value.cpu() for key, value in classifier.state_dict().items()}, values.norms


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("name", SMALL)
def test_training_is_the_same_bit_for_bit(name, precision):
    """With 16-mixed Lightning scales the loss by a GradScaler, whose factor is no part of a norm."""
    plain, _ = fitted(name, monitored=False, precision=precision)
    watched, norms = fitted(name, monitored=True, precision=precision)
    for key, value in plain.items():
        assert torch.equal(value, watched[key]), key
    _, expected = fitted(name, monitored=True, precision="32-true")
    assert len(norms) == len(expected) == STEPS
    assert norms[0] == pytest.approx(expected[0], rel=5e-2)


def test_a_gradient_scaler_by_hand():
    torch.manual_seed(0)
    module, x = SMALL["mlp"]()
    module, x, y = module.to(GPU), x.to(GPU), torch.randint(0, 10, (len(x),), device=GPU)
    expected = step((module, (x, y), classified, {}))
    module.zero_grad()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    with expanded_weights(module, (x, y), unsupported="error") as capture:
        with torch.autocast("cuda", torch.float16):
            loss = classified(module, x, y)
        capture.attach_loss(loss)
        scaler.scale(loss).backward()
    torch.testing.assert_close(capture.record.norms(), expected, rtol=5e-2, atol=1e-3)
