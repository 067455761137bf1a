"""Captured steps on a device that the host would wait for: what does wait, and the values beside those of the CPU."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample import expanded_weights
from lightning_persample.capture import plan
from tests.benchmarks.timed_models import cnn, gpt, mlp, resnet18
from tests.capture.model_cases import BATCH_SIZES, CASES
from tests.remote_device import DEVICE, refusing, waits

B = 5
Step = Callable[[], Tensor]
Built = tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor], dict[str, Any]]


def classified(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x), y)


def timed(build: Callable[[], tuple[nn.Module, Tensor]], **options: Any) -> Built:
    module, x = build()
    return module, (x, torch.randint(0, 10, (len(x),))), classified, options


def of_case(name: str) -> Built:
    case = CASES[name]
    return case.build(), case.batch(BATCH_SIZES[0]), case.loss, {"batch_dim": 0, **case.options}


class Padded(nn.Module):
    """Scores of every word at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(9, 6, padding_idx=0), nn.Linear(6, 6), nn.Linear(6, 9)

    def forward(self, index: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.words(index))))


def by_token(module: nn.Module, index: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(module(index).flatten(0, 1), labels.flatten())


def padded(unequal: bool) -> Built:
    index, labels = torch.randint(1, 9, (B, 7)), torch.randint(1, 9, (B, 7))
    labels[:, 5:] = -100  # as many in each sample
    if unequal:
        labels[0, 3:] = -100
    return Padded(), (index, labels), by_token, {}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def spectral() -> tuple[nn.Module, Tensor]:
    normed = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(normed(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 10)).eval(), torch.randn(B, 6)


def weight_normed() -> tuple[nn.Module, Tensor]:
    normed = nn.utils.parametrizations.weight_norm
    return nn.Sequential(normed(nn.Conv1d(3, 8, 3)), nn.Tanh(), nn.Flatten(), nn.Linear(40, 10)), torch.randn(B, 3, 7)


def of_layer(*layers: nn.Module, shape: tuple[int, ...]) -> tuple[nn.Module, Tensor]:
    x = torch.randn(B, *shape)
    body = nn.Sequential(*layers, nn.Tanh(), nn.Flatten())
    with torch.no_grad():
        width = body(x).shape[1]
    return nn.Sequential(body, nn.Linear(width, 10)), x


MODELS: dict[str, Callable[[], Built]] = {
    "mlp": partial(timed, partial(mlp, B, 16)),
    "cnn": partial(timed, partial(cnn, B, 8)),
    "resnet18": partial(timed, partial(resnet18, 2)),
    "gpt": partial(timed, partial(gpt, B, 12, 16)),
}
FUSED = {f"{name}, fused": partial(build, fuse_weight_grad=True) for name, build in MODELS.items()}
LAYERS: dict[str, Callable[[], Built]] = {
    "conv1d": lambda: timed(partial(of_layer, nn.Conv1d(3, 4, 3), shape=(3, 8))),
    "conv2d, grouped": lambda: timed(partial(of_layer, nn.Conv2d(4, 8, 3, groups=2), shape=(4, 6, 6))),
    "conv3d": lambda: timed(partial(of_layer, nn.Conv3d(2, 4, 2), shape=(2, 4, 4, 4))),
    "transposed": lambda: timed(partial(of_layer, nn.ConvTranspose2d(3, 4, 3), shape=(3, 4, 4))),
    "instance norm": lambda: timed(
        partial(of_layer, nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), shape=(3, 8, 8))
    ),
    "rms norm": lambda: timed(partial(of_layer, nn.RMSNorm(6), nn.Linear(6, 4), shape=(7, 6))),
    "prelu": lambda: timed(partial(of_layer, nn.Linear(6, 4), nn.PReLU(4), shape=(6,))),
    "dropout": lambda: timed(partial(of_layer, nn.Linear(6, 4), nn.Dropout(0.5), shape=(6,))),
    "pooled": lambda: timed(partial(of_layer, nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), shape=(3, 8, 8))),
    "upsampled": lambda: timed(partial(of_layer, nn.Upsample(scale_factor=2), nn.Conv2d(3, 4, 3), shape=(3, 4, 4))),
    "attention": lambda: timed(lambda: (Attention(), torch.randn(B, 7, 8))),
    "weight norm": lambda: timed(weight_normed),
    "spectral norm": lambda: timed(spectral),
    "padded alike": partial(padded, unequal=False),
    "padded": partial(padded, unequal=True),
}
ZOO = {f"case {name}": partial(of_case, name) for name in CASES}


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
    plan._PLANS.clear()  # (the run on the CPU has made some)
    for when in ("cold", "warm", "warmer"):
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

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        x = x * torch.ones_like(x, requires_grad=True)
        found = module(x).mean()
        kept: list[Tensor] = []
        if writes:  # a gradient, once what it was handed to has run
            module.seen.register_hook(kept.append)
            x.register_hook(lambda grad: void(kept.pop().mul_(2)))
        return found

    expected = captured((module, (x,), lambda module, x: module(x).mean(), {})).sq_norms["inner.weight"]
    module, x = module.float().to(DEVICE), x.float().to(DEVICE)
    module.zero_grad()
    with waits() as found:
        record = captured((module, (x,), loss, {}))
    value = record.sq_norms.get("inner.weight")
    off = None if value is None else ((value.cpu() - expected).abs() / expected).max().item()
    return {"off": off, "lines": sorted({line for _, line in found}), "reason": record.unsupported.get("inner.weight")}


def main(path: str, *names: str) -> None:
    """Do the runs and write what each of them found, or the error."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {}
    if not names or "what is read at last" in names:
        found["targets left out at last"] = targets_left_out_at_last()
        found["what cancels"] = [what_cancels(writes) for writes in (False, True)]
    for name, build in (MODELS | FUSED | LAYERS | ZOO).items():
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
