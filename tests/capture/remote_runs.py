"""Captured steps on a device that the host would wait for: what does wait, and the values beside those of the CPU."""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_persample import PerSampleGradientMonitor, PerSampleGradientWriter, expanded_weights
from lightning_persample.capture import plan
from tests.benchmarks.timed_models import mlp
from tests.capture.device_models import ASKED, FUSED, LAYERS, MODELS, ZOO, B, Built, classified, padded
from tests.remote_device import DEVICE, SEEN, refusing, waits


class NotOnDevice(Exception):
    """The plain step does not run there: it makes tensors on the CPU, or the device lacks what it calls."""


def plain(built: Built) -> Tensor:
    module, batch, loss, _ = built
    module.zero_grad()
    found = loss(module, *batch)
    found.backward()
    return found


def captured(built: Built, unsupported: str = "warn") -> Any:
    module, batch, loss, options = built
    module.zero_grad()
    with expanded_weights(module, batch, unsupported=unsupported, **options) as capture:
        loss(module, *batch).backward()
    return capture.record


def run(build: Callable[[], Built]) -> dict[str, Any]:
    """What waits in a plain step, in the first captured one and in a warm one, and how far the values are apart."""
    torch.manual_seed(0)
    module, batch, loss, options = build()
    torch.manual_seed(1)
    expected = captured((module, batch, loss, options))
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    built = module.to(DEVICE), tuple(tensor.to(DEVICE) for tensor in batch), loss, options
    found: dict[str, Any] = {"noted": [], "expected notes": list(expected.weighting)}
    with waits() as of_plain:
        try:
            plain(built)
        except Exception as error:
            raise NotOnDevice from error
    plan.PLANS.clear()  # (the run on the CPU has made some)
    for when in ("cold", "warm", "third", "fourth", "warmer"):
        torch.manual_seed(1)
        with waits() as of_captured:
            record = captured(built)
        more = of_captured.copy()
        for (what, _), times in of_plain.items():  # the user's own, of which the line is ours: it makes the call
            for key in [key for key in more if key[0] == what and key[1].startswith("capture/dispatch.py:call")]:
                taken = min(times, more[key])
                more[key] -= taken
                times -= taken
        found[when] = sorted({line for (_, line), times in more.items() if times > 0})
        found["noted"].append(list(record.weighting))
    found["plain"] = sorted({what for what, _ in of_plain})
    found["coverage"], found["expected coverage"] = record.coverage, expected.coverage
    assert record.names == expected.names, record.unsupported
    size = max((value.max().item() for value in expected.sq_norms.values()), default=0.0)
    found["off"] = max(
        ((record.sq_norms[n].cpu() - v).abs().max().item() / size for n, v in expected.sq_norms.items() if size),
        default=0.0,
    )
    moved = {name: p.grad.cpu() for name, p in module.named_parameters() if p.grad is not None}
    largest = max((g.abs().max().item() for g in grads.values()), default=0.0)
    found["grads off"] = max(((moved[n] - g).abs().max().item() / largest for n, g in grads.items()), default=0.0)
    if not found["warmer"] and not found["plain"]:
        with refusing():  # what is counted is what would raise
            captured(built, unsupported="error")
    return found


def targets_left_out_at_last() -> list[list[str]]:
    """What is noted of three steps in which all targets count, and of two in which some samples have fewer."""

    def loss(module: nn.Module, index: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(module(index).flatten(0, 1), labels.flatten())  # on a line of its own

    module, (index, labels), _, options = padded(unequal=False)
    module, labels = module.to(DEVICE), labels.clamp_min(1)
    fewer = labels.clone()
    fewer[0, 3:] = -100
    built = ((module, (index.to(DEVICE), each.to(DEVICE)), loss, options) for each in (*[labels] * 3, *[fewer] * 2))
    return [list(captured(each).weighting) for each in built]


class Cancelling(nn.Module):
    """Positions nearly alike, whose output gradients add up to zero: nearly nothing is left of their products."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24)
        self.register_buffer("factors", torch.randn(4, 24))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        self.seen = h
        return ((h - h.mean(1, keepdim=True)) * self.factors).flatten(1).sum(1)


def void(result: object) -> None:
    """Nothing: a hook that gives something replaces the gradient."""


def what_cancels(writes: bool) -> dict[str, Any]:
    """How far the norms of the weight are from those in float64, what waited, and why there are none."""
    torch.manual_seed(0)
    module, x = Cancelling(), (1 + 1e-4 * torch.randn(B, 4, 24)).float().double()

    def loss(module: nn.Module, x: Tensor, writes: bool = writes) -> Tensor:
        x = x * torch.ones_like(x, requires_grad=True)
        found = module(x).mean()
        kept: list[Tensor] = []
        if writes:  # a gradient, once what it was handed to has run
            module.seen.register_hook(kept.append)
            x.register_hook(lambda grad: void(kept.pop().mul_(2)))
        return found

    expected = captured((module, (x,), lambda module, x: module(x).mean(), {})).sq_norms["inner.weight"]
    module, x = module.float().to(DEVICE), x.float().to(DEVICE)
    for _ in range(2):  # nothing cancels, and how the norms are computed is remembered
        captured((module, (torch.randn_like(x),), partial(loss, writes=False), {}))
    module.zero_grad()
    with waits() as found:
        record = captured((module, (x,), loss, {}))
    value = record.sq_norms.get("inner.weight")
    off = None if value is None else ((value.cpu() - expected).abs() / expected).max().item()
    return {"off": off, "lines": sorted({line for _, line in found}), "reason": record.unsupported.get("inner.weight")}


class Remote(Accelerator):
    """The device for a Trainer."""

    parse_devices = staticmethod(int)
    get_parallel_devices = staticmethod(lambda devices: [DEVICE] * devices)
    auto_device_count = staticmethod(lambda: 1)
    is_available = staticmethod(lambda: True)
    name = staticmethod(lambda: "remote")

    def setup_device(self, device: torch.device) -> None:
        """There is nothing to set up."""

    def teardown(self) -> None:
        """Nor to take down."""


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.module, _ = mlp(4, 16)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return classified(self.module, *batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Lines(L.Callback):
    """What waits at each batch, by the line of the package."""

    def __init__(self) -> None:
        self.found: list[list[str]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        SEEN.clear()

    def on_train_batch_end(self, *_: Any) -> None:
        self.found.append(sorted({line for _, line in SEEN if line}))


def fit(*callbacks: L.Callback, **settings: Any) -> list[list[str]]:
    """What waits at each of eight batches; those of a first fit have read the targets once."""
    for _ in range(2):
        torch.manual_seed(0)
        lines = Lines()
        trainer = L.Trainer(
            max_epochs=1, strategy=SingleDeviceStrategy(DEVICE, accelerator=Remote()), logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[*map(copy.copy, callbacks), lines], **settings,
        )  # fmt: skip
        data = TensorDataset(torch.randn(32, 784), torch.randint(0, 10, (32,)))
        trainer.fit(Classifier(), DataLoader(data, batch_size=4))
    return lines.found


def fits() -> dict[str, list[list[str]]]:
    with tempfile.TemporaryDirectory() as folder:
        return {
            "without": fit(),
            "every step": fit(PerSampleGradientMonitor(every_n_steps=1)),
            "every fourth step": fit(PerSampleGradientMonitor(every_n_steps=4)),
            "four batches a step": fit(PerSampleGradientMonitor(every_n_steps=1), accumulate_grad_batches=4),
            "ledger": fit(PerSampleGradientWriter(folder, overwrite=True)),
        }


def main(path: str, *names: str) -> None:
    """Do the runs and write what each of them found, or the error."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {}
    if not names or "what is read at last" in names:
        found["targets left out at last"] = targets_left_out_at_last()
        found["fits"] = fits()
        found["what cancels"] = [what_cancels(writes) for writes in (False, True)]
    for name, build in (MODELS | FUSED | ASKED | LAYERS | ZOO).items():
        if names and name not in names and name.partition(" ")[0] not in names:
            continue
        try:
            found[name] = run(build)
        except NotOnDevice:
            continue
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    Path(path).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
