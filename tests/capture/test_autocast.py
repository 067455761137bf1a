"""Norms under autocast and a loss scale, against each sample alone under the same autocast and scale."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample import expanded_weights
from tests.capture.reference import loop

B = 8
LOSS_SCALE = 65536.0
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}  # of the loop, whose weight gradients are rounded to dtype


class TransformerBlock(nn.Module):
    """Embedding, causal attention and a feed-forward network, norms first, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm1, self.norm2 = nn.Embedding(20, 16), nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 5)

    def forward(self, index: Tensor) -> Tensor:
        x = self.words(index)
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head((x + self.down(F.gelu(self.up(self.norm2(x))))).mean(1))


def cnn() -> tuple[nn.Module, Tensor]:
    module = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()),
        *(nn.Conv2d(8, 12, 3, 2, 1, groups=2), nn.GroupNorm(3, 12), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5)),
    )
    return module, torch.randn(B, 3, 9, 9)


def transformer() -> tuple[nn.Module, Tensor]:
    return TransformerBlock(), torch.randint(0, 20, (B, 7))


class Derived(nn.Module):
    """Weights of a product, which autocast rounds, and of a standardisation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.w = (nn.Parameter(torch.randn(shape) / 4) for shape in ((16, 4), (4, 12), (12, 16)))

    def forward(self, x: Tensor) -> Tensor:
        wide = F.linear(x, self.a @ self.b.tanh()).relu()
        rows = F.batch_norm(self.w.reshape(1, 12, 16), None, None, training=True, eps=0.1)
        return F.linear(wide, rows.reshape(12, 16))[:, :5]


def derived() -> tuple[nn.Module, Tensor]:
    return Derived(), torch.randn(B, 12)


MODELS = {"cnn": cnn, "transformer": transformer, "derived": derived}


@pytest.mark.parametrize("options", [{}, {"max_memory": 1}], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_norms_under_a_loss_scale(model: str, dtype: torch.dtype, options: dict[str, int]) -> None:
    torch.manual_seed(0)
    module, x = MODELS[model]()
    y = torch.randint(0, 5, (B,))

    def loss_fn(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return F.cross_entropy(module(x), y)

    scaled = loop(module, lambda *batch: loss_fn(*batch) * (LOSS_SCALE / B), (x, y))
    expected = {name: grads.double() / (LOSS_SCALE / B) for name, grads in scaled.items()}
    for _ in range(4 if model == "derived" else 1):  # from the third on it is replayed how weights were made
        with expanded_weights(module, (x, y), unsupported="error", **options) as capture:
            loss = loss_fn(module, x, y)
            capture.attach_loss(loss)
            (loss * LOSS_SCALE).backward()
    record = capture.record
    assert record.coverage == 1.0
    squares = {name: grads.flatten(1).square().sum(1) for name, grads in expected.items()}
    total = torch.stack(list(squares.values())).sum(0)
    torch.testing.assert_close(record.norms().double(), total.sqrt(), rtol=TOLERANCE[dtype], atol=0)
    for name, sq_norm in record.sq_norms.items():
        assert sq_norm.dtype == torch.float32, name
        apart = (sq_norm.double().sqrt() - squares[name].sqrt()).abs()
        assert torch.all(apart <= TOLERANCE[dtype] * total.sqrt()), name


@pytest.mark.parametrize("model", MODELS)
def test_a_scale_that_overflows_shows(model: str) -> None:
    """What GradScaler skips the step for is neither zero nor finite in the norms."""
    module, x = MODELS[model]()
    y = torch.randint(0, 5, (B,))
    with expanded_weights(module, (x, y), unsupported="error") as capture:
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(module(x), y)
        capture.attach_loss(loss)
        (loss * 2.0**40).backward()
    assert not torch.isfinite(capture.record.norms()).any()
