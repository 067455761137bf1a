"""Models that are put on a device: those of the benchmark, small; layers of every kind; the cases of `model_cases`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.timed_models import cnn, gpt, mlp, resnet18
from tests.capture.model_cases import BATCH_SIZES, CASES

B = 5
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


class Tied(nn.Module):
    """A layer that runs twice, whose norms are known once both have contributed."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(9, 24), nn.Linear(24, 24)

    def forward(self, index: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(self.words(index))))


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
ASKED: dict[str, Callable[[], Built]] = {
    "gradients": partial(timed, partial(gpt, B, 12, 16), quantities=("sq_norm", "grad_sample", "square_sum")),
    "some samples": partial(timed, partial(cnn, B, 8), samples=torch.tensor([3, 0])),
    "tied": lambda: (Tied(), (torch.randint(0, 9, (B, 7)),), lambda module, x: module(x).sin().flatten(1).mean(), {}),
}
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
