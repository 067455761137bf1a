"""Small versions of the models that per-sample gradients must be exact for.

Each function returns ``(module, make_batch, loss_fn)``: ``make_batch(batch_size)`` draws the tensors of a batch, and
``loss_fn(module, *batch)`` is the mean over the samples of each sample's own loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Model(NamedTuple):
    """A module with what it takes to train it."""

    module: nn.Module
    make_batch: Callable[[int], tuple[Tensor, ...]]
    loss_fn: Callable[..., Tensor]


def _classifier(module: nn.Module, input_shape: tuple[int, ...], classes: int, dtype: torch.dtype) -> Model:
    def make_batch(batch_size: int) -> tuple[Tensor, ...]:
        return torch.randn(batch_size, *input_shape, dtype=dtype), torch.randint(0, classes, (batch_size,))

    def loss_fn(module: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(module(inputs), labels)

    return Model(module.to(dtype), make_batch, loss_fn)


def mlp(*, dtype: torch.dtype = torch.float64) -> Model:
    """Three linear layers."""
    module = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5))
    return _classifier(module, (12,), 5, dtype)


def cnn(*, dtype: torch.dtype = torch.float64) -> Model:
    """Convolutions with GroupNorm and in-place activations."""

    def block(inputs: int, outputs: int, stride: int) -> tuple[nn.Module, ...]:
        return nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(4, outputs), nn.ReLU(inplace=True)

    features = (*block(3, 8, 1), *block(8, 16, 2), *block(16, 16, 1))
    module = nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
    return _classifier(module, (3, 8, 8), 5, dtype)


class OddShapes(nn.Module):
    """A number, complex weights and a weight without entries between two layers."""

    def __init__(self, inputs: int = 5, outputs: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, 4), nn.Linear(4, outputs)
        self.scale, self.filter = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(3, dtype=torch.cfloat))
        self.phase, self.empty = nn.Parameter(torch.randn((), dtype=torch.cfloat)), nn.Parameter(torch.randn(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh() * self.scale
        hidden = torch.fft.irfft(torch.fft.rfft(hidden) * self.filter * self.phase, n=4)
        return self.last(hidden + F.linear(hidden, self.empty).sum(1, keepdim=True))


class BasicBlock(nn.Module):
    """The residual block of ResNet-18, with GroupNorm."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.GroupNorm(groups, outputs))

    def forward(self, x: Tensor) -> Tensor:
        residual = F.relu(self.norm1(self.conv1(x)), inplace=True)
        residual = self.norm2(self.conv2(residual))
        residual += self.shortcut(x)
        return F.relu(residual, inplace=True)


def resnet18(width: int = 4, *, size: int = 32, dtype: torch.dtype = torch.float64) -> Model:
    """ResNet-18 with GroupNorm: the real structure, its stem and four stages of two blocks, at a reduced width."""
    groups = max(1, width // 2)
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.GroupNorm(groups, width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = width
    for stage in range(4):
        outputs = width * 2**stage
        for block in range(2):
            layers.append(BasicBlock(channels, outputs, 2 if stage and not block else 1, groups))
            channels = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5)]
    return _classifier(nn.Sequential(*layers), (3, size, size), 5, dtype)


class Block(nn.Module):
    """A pre-norm transformer block with layer scale."""

    def __init__(self, width: int, heads: int, manual_attention: bool) -> None:
        super().__init__()
        self.heads = heads
        self.manual_attention = manual_attention
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.scale1 = nn.Parameter(torch.full((width,), 0.5))
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.scale2 = nn.Parameter(torch.full((width,), 0.5))

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if self.manual_attention:
            future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf)
            mixed = scores.softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale1 * self.attention(self.norm1(x))
        return x + self.scale2 * self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A causal language model: tied embedding and head, learned positions, a class token, layer scale."""

    def __init__(
        self, vocabulary: int, length: int, width: int, depth: int, heads: int, manual_attention: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.blocks = nn.ModuleList(Block(width, heads, manual_attention) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.3)
        self.head.weight = self.tokens.weight

    def forward(self, index: Tensor) -> Tensor:
        batch, length = index.shape
        x = self.tokens(index) + self.positions(torch.arange(length, device=index.device))
        x = torch.cat((self.class_token.expand(batch, -1, -1), x), dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 1:]))


def gpt(length: int = 6, *, manual_attention: bool = False, dtype: torch.dtype = torch.float64) -> Model:
    """A small GPT on sequences of `length` tokens; a batch of `length` samples makes T equal to B."""
    vocabulary = 11
    module = GPT(vocabulary, length, width=16, depth=2, heads=2, manual_attention=manual_attention).to(dtype)

    def make_batch(batch_size: int) -> tuple[Tensor, ...]:
        text = torch.randint(0, vocabulary, (batch_size, length + 1))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def loss_fn(module: nn.Module, index: Tensor, following: Tensor) -> Tensor:
        return F.cross_entropy(module(index).flatten(0, 1), following.flatten())

    return Model(module, make_batch, loss_fn)


MODELS: dict[str, Callable[..., Model]] = {"mlp": mlp, "cnn": cnn, "resnet18": resnet18, "gpt": gpt}
