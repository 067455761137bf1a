"""The models that are timed, each with a batch: MLP, CNN and ResNet-18 with GroupNorm, a small GPT; large tables."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MODELS", "TABLES", "Built", "cnn", "gpt", "mlp", "resnet18"]

Built = tuple[nn.Module, Tensor]


def mlp(batch_size: int = 256, width: int = 512) -> Built:
    """784-width-width-10."""
    module = nn.Sequential(
        *(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    )
    return module, torch.randn(batch_size, 784)


def cnn(batch_size: int = 64, channels: int = 32) -> Built:
    """Five convolutions with GroupNorm on images of 3 x 32 x 32."""
    layers: list[nn.Module] = []
    c = channels
    for inputs, outputs, stride in ((3, c, 1), (c, 2 * c, 2), (2 * c, 2 * c, 1), (2 * c, 4 * c, 2), (4 * c, 4 * c, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(8, outputs), nn.ReLU()]
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * c, 10))
    return module, torch.randn(batch_size, 3, 32, 32)


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


def resnet18(batch_size: int = 32) -> Built:
    """ResNet-18 with GroupNorm on images of 3 x 32 x 32."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(16, 64), nn.ReLU()]
    channels = 64
    for outputs, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers.append(Residual(channels, outputs, stride))
        channels = outputs
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    return module, torch.randn(batch_size, 3, 32, 32)


class Block(nn.Module):
    """Causal attention and a feed-forward network, norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Token and position embeddings, blocks, a head on the mean over tokens."""

    def __init__(self, tokens: int, width: int, layers: int, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(1000, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, index: Tensor) -> Tensor:
        positions = self.positions(torch.arange(index.shape[1], device=index.device).expand_as(index))
        return self.head(self.norm(self.blocks(self.tokens(index) + positions)).mean(1))


def gpt(batch_size: int = 16, tokens: int = 128, width: int = 256) -> Built:
    """Four layers."""
    return GPT(tokens, width, 4), torch.randint(0, 1000, (batch_size, tokens))


MODELS: dict[str, tuple[str, Callable[[], Built]]] = {
    "mlp": ("MLP 784-512-512-10, batch 256", mlp),
    "cnn": ("CNN with GroupNorm, batch 64 x 3x32x32", cnn),
    "resnet18": ("ResNet-18 with GroupNorm, batch 32 x 3x32x32", resnet18),
    "gpt": ("GPT 4 layers, width 256, 128 tokens, batch 16", gpt),
}


class Words(nn.Module):
    """The mean of a text's word vectors, and a head: of its own, or the table itself."""

    def __init__(self, words: int, width: int, tied: bool) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(words, width), nn.Linear(width, width)
        self.head = None if tied else nn.Linear(width, 10)

    def forward(self, index: Tensor) -> Tensor:
        text = torch.tanh(self.inner(self.words(index).mean(1)))
        return F.linear(text, self.words.weight) if self.head is None else self.head(text)


def embedding(batch_size: int = 100, tokens: int = 20) -> Built:
    """A table of 10,000 x 300 and a small head."""
    return Words(10_000, 300, tied=False), torch.randint(0, 10_000, (batch_size, tokens))


def tied_head(batch_size: int = 32, tokens: int = 16) -> Built:
    """A table of 50,000 x 64 that is the head, too."""
    return Words(50_000, 64, tied=True), torch.randint(0, 50_000, (batch_size, tokens))


class Dispersed(nn.Module):
    """A weight for each output, laid over the batch before it meets it, as in models of single cells."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.decoder, self.dispersion = nn.Linear(32, outputs), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        mean, total = torch.broadcast_tensors(self.decoder(x).exp(), self.dispersion.exp())
        return torch.lgamma(mean + total) - torch.lgamma(total) - total * (total + mean).log()


def dispersed(batch_size: int = 128) -> Built:
    """1,500 outputs of each sample, with a dispersion each."""
    return Dispersed(1500), torch.randn(batch_size, 32) * 0.1


TABLES: dict[str, tuple[str, Callable[[], Built]]] = {
    "embedding": ("embedding 10,000 x 300, batch 100", embedding),
    "tied_head": ("embedding 50,000 x 64 tied to the head, batch 32", tied_head),
    "dispersed": ("1,500 dispersions laid over the batch, batch 128", dispersed),
}
