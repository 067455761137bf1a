"""How much longer a training step takes when per-sample gradient norms are captured: paired ratios, one table.

A step is zero_grad, forward, cross-entropy and backward. Plain and captured steps alternate, so that what else the
machine does falls on both; the ratio is the median over pairs. Run it by hand:

    python -m tests.benchmarks.norms_beside_a_plain_step [--pairs 15] [--device cuda]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample import expanded_weights


def mlp() -> tuple[nn.Module, Tensor]:
    """784-512-512-10, 256 samples."""
    module = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return module, torch.randn(256, 784)


def cnn() -> tuple[nn.Module, Tensor]:
    """Five convolutions with GroupNorm, 64 images of 3 x 32 x 32."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(8, outputs), nn.ReLU()]
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return module, torch.randn(64, 3, 32, 32)


class Residual(nn.Module):
    """A ResNet-18 block with GroupNorm."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(16, outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(16, outputs)),
        )
        same = stride == 1 and inputs == outputs
        shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(16, outputs))
        self.shortcut = nn.Identity() if same else shortcut

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x) + self.shortcut(x))


def resnet18() -> tuple[nn.Module, Tensor]:
    """ResNet-18 with GroupNorm, 32 images of 3 x 32 x 32."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(16, 64), nn.ReLU()]
    channels = 64
    for outputs, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers.append(Residual(channels, outputs, stride))
        channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)), torch.randn(32, 3, 32, 32)


class Transformer(nn.Module):
    """Four encoder layers on 128 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(1000, 256), nn.Embedding(128, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, index: Tensor) -> Tensor:
        positions = self.positions(torch.arange(index.shape[1], device=index.device))
        return self.head(self.layers(self.tokens(index) + positions).mean(1))


def transformer() -> tuple[nn.Module, Tensor]:
    """Four encoder layers of width 256, 16 sequences of 128 tokens."""
    return Transformer(), torch.randint(0, 1000, (16, 128))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "MLP": mlp,
    "CNN with GroupNorm": cnn,
    "ResNet-18 with GroupNorm": resnet18,
    "transformer encoder": transformer,
}


def seconds(step: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def compare(build: Callable[[], tuple[nn.Module, Tensor]], pairs: int, device: torch.device) -> tuple[float, float]:
    """Median milliseconds of a plain step, and the median ratio of a captured step to the plain one beside it."""
    torch.manual_seed(0)
    module, inputs = build()
    module, inputs = module.to(device), inputs.to(device)
    labels = torch.randint(0, 10, (len(inputs),), device=device)

    def plain() -> None:
        module.zero_grad()
        F.cross_entropy(module(inputs), labels).backward()

    def captured() -> None:
        module.zero_grad()
        with expanded_weights(module, (inputs, labels), unsupported="error") as capture:
            F.cross_entropy(module(inputs), labels).backward()
        capture.record.norms()

    for step in (plain, captured):
        step()
    timed = [(seconds(plain, device), seconds(captured, device)) for _ in range(pairs)]
    return 1e3 * statistics.median(p for p, _ in timed), statistics.median(c / p for p, c in timed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    place = torch.device(options.device)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, float32, {options.pairs} pairs")
    print("| model | plain step | step with norms |\n|---|---|---|")
    for title, build in MODELS.items():
        milliseconds, ratio = compare(build, options.pairs, place)
        print(f"| {title} | {milliseconds:.1f} ms | {ratio:.2f}x |")
