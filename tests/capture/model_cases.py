"""Small models, each with one way in which a parameter meets the batch; built when a test asks for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

T = 5  # length of the sequences
BATCH_SIZES = (5, 6, 4, 3)  # each is also the size of another axis: time, features in, features out, kernel or heads


def mean_of_squares(module: nn.Module, *inputs: Tensor) -> Tensor:
    """Mean over samples of the mean square of a sample's output."""
    return module(*inputs).flatten(1).square().mean(1).mean()


def mean_of_all(module: nn.Module, *inputs: Tensor) -> Tensor:
    """Mean square of the output, for outputs whose first axis is not the batch."""
    return module(*inputs).square().mean()


class Model(nn.Module):
    """A forward function with the modules, parameters and constants it uses."""

    def __init__(self, function: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


class DoubledByNumpy(torch.autograd.Function):
    """Leaves torch on the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


@dataclass(frozen=True)
class ModelCase:
    """What a test needs: a module, a batch and a loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[..., Tensor] = mean_of_squares
    options: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, ModelCase] = {}


def case(name: str, build: Callable[[], nn.Module], batch: Callable[[int], tuple[Tensor, ...]], **more: Any) -> None:
    assert name not in CASES, name
    CASES[name] = ModelCase(build, batch, **more)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def vectors(batch_size: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch_size, 6),)


def sequences(batch_size: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch_size, T, 6),)


def time_major(batch_size: int) -> tuple[Tensor, ...]:
    return (torch.randn(7, batch_size, 6),)


def images(batch_size: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch_size, 4, 6, 6),)


def tokens(batch_size: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 9, (batch_size, T)),)


# Linear layers --------------------------------------------------------------------------------------------------------
case("linear", lambda: nn.Linear(6, 4), vectors)
case("linear-3d", lambda: nn.Linear(6, 4), sequences)
case("linear-4d", lambda: nn.Linear(6, 4), lambda b: (torch.randn(b, 3, 4, 6),))
case("linear-by-keyword", lambda: Model(lambda m, x: m.a(input=x), a=nn.Linear(6, 4)), sequences)
case(
    "linear-keywords-reversed", lambda: Model(lambda m, x: F.linear(weight=m.w, input=x), w=parameter(4, 6)), sequences
)
case("linear-of-non-contiguous", lambda: Model(lambda m, x: m.a(x.permute(0, 2, 1)), a=nn.Linear(5, 4)), sequences)
case("linear-in-place-relu", lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), sequences)


def residual_in_place(m: Any, x: Tensor) -> Tensor:
    hidden = m.a(x)
    hidden += x
    hidden.mul_(2)
    return F.relu(hidden, inplace=True)


case("linear-in-place-residual", lambda: Model(residual_in_place, a=nn.Linear(6, 6)), sequences)
case("time-major", lambda: nn.Linear(6, 4), time_major, loss=mean_of_all, options={"batch_dim": 1})
case(
    "transposed-inside",
    lambda: Model(lambda m, x: m.a(x.transpose(0, 1)).transpose(0, 1), a=nn.Linear(6, 4)),
    sequences,
)
case(
    "transposed-and-flattened-inside",
    lambda: Model(lambda m, x: m.a(x.transpose(0, 1).reshape(-1, 6)).view(T, -1, 4).transpose(0, 1), a=nn.Linear(6, 4)),
    sequences,
)
case("flattened-samples", lambda: Model(lambda m, x: m.a(x.view(-1, 6)).view(len(x), -1), a=nn.Linear(6, 4)), sequences)
case("called-twice", lambda: Model(lambda m, x: m.a(m.a(x).tanh()), a=nn.Linear(6, 6)), sequences)
case(
    "module-and-functional",
    lambda: Model(lambda m, x: F.linear(m.a(x), m.a.weight) + x @ m.a.weight.mT, a=nn.Linear(6, 6)),
    sequences,
)
case("bilinear", lambda: Model(lambda m, x: m.a(x[..., :3], x[..., 3:]), a=nn.Bilinear(3, 3, 4)), sequences)


case(
    "bilinear-with-a-constant",
    lambda: Model(lambda m, x: m.a(x, torch.ones(len(x), 3, dtype=x.dtype)), a=nn.Bilinear(6, 3, 4)),
    vectors,
)


def frozen(part: str) -> nn.Module:
    layer = nn.Linear(6, 4)
    getattr(layer, part).requires_grad_(False)
    return nn.Sequential(layer, nn.LayerNorm(4))


case("frozen-weight", lambda: frozen("weight"), sequences)
case("frozen-bias", lambda: frozen("bias"), sequences)
case(
    "rows-repeated",
    lambda: Model(lambda m, x: m.a(x.repeat_interleave(3, 0)).view(len(x), 3, -1), a=nn.Linear(6, 4)),
    vectors,
)
case(
    "two-views-joined",
    lambda: Model(lambda m, x: torch.stack(m.a(torch.cat([x, -x])).chunk(2), 1), a=nn.Linear(6, 4)),
    vectors,
)

# Custom parameters ----------------------------------------------------------------------------------------------------
case("position-of-length-T", lambda: Model(lambda m, x: m.a(x + m.p), a=nn.Linear(6, 4), p=parameter(T, 6)), sequences)
case(
    "position-table",
    lambda: Model(lambda m, x: m.a(x + m.p(torch.arange(T)[None])), a=nn.Linear(6, 4), p=nn.Embedding(T, 6)),
    sequences,
)
case(
    "position-table-expanded",
    lambda: Model(
        lambda m, x: m.a(x + m.p(torch.arange(T).expand(len(x), T))), a=nn.Linear(6, 4), p=nn.Embedding(T, 6)
    ),
    sequences,
)
for spread in ("expand", "repeat"):
    size = (-1, -1) if spread == "expand" else (1, 1)
    case(
        f"class-token-{spread}",
        lambda spread=spread, size=size: Model(
            lambda m, x: m.a(torch.cat([getattr(m.c, spread)(len(x), *size), x], 1)),
            a=nn.Linear(6, 4),
            c=parameter(1, 1, 6),
        ),
        sequences,
    )
case(
    "class-token-plus-position",
    lambda: Model(
        lambda m, x: m.a(torch.cat([m.c.expand(len(x), -1, -1) + m.p, x], 1)),
        a=nn.Linear(6, 4),
        c=parameter(1, 1, 6),
        p=parameter(6),
    ),
    sequences,
)
case("expand-as", lambda: Model(lambda m, x: m.a(x) * m.p.expand_as(x), a=nn.Linear(6, 6), p=parameter(6)), sequences)
case(
    "scale-shift-divide",
    lambda: Model(
        lambda m, x: (1 - m.a * x) / (2 + m.b.exp()) - m.c, a=parameter(6), b=parameter(1, 6), c=parameter(T, 1)
    ),
    sequences,
)
case("more-axes-than-input", lambda: Model(lambda m, x: (x * m.w).permute(1, 0, 2), w=parameter(3, 1, 6)), vectors)
case("einsum", lambda: Model(lambda m, x: torch.einsum("bti,io->bto", x, m.w), w=parameter(6, 3)), sequences)
case("einsum-heads", lambda: Model(lambda m, x: torch.einsum("bti,hio->bhto", x, m.w), w=parameter(2, 6, 3)), sequences)
case("einsum-ellipsis", lambda: Model(lambda m, x: torch.einsum("...i,oi->...o", x, m.w), w=parameter(3, 6)), sequences)
case(
    "addmm",
    lambda: Model(
        lambda m, x: torch.addmm(m.b, x.reshape(-1, 6), m.w).view(len(x), -1), w=parameter(6, 3), b=parameter(3)
    ),
    sequences,
)
case("matmul", lambda: Model(lambda m, x: x @ m.w + m.b, w=parameter(6, 3), b=parameter(3)), sequences)
case("matmul-from-left", lambda: Model(lambda m, x: m.w @ x.transpose(1, 2), w=parameter(3, 6)), sequences)
case("matmul-vector", lambda: Model(lambda m, x: x @ m.w, w=parameter(6)), sequences)
case("bmm-expanded", lambda: Model(lambda m, x: torch.bmm(x, m.w.expand(len(x), -1, -1)), w=parameter(6, 3)), sequences)
case("prelu", lambda: nn.Sequential(nn.Linear(6, 4), nn.PReLU(4)), vectors)
case(
    "written-by-index",
    lambda: Model(lambda m, x: x.index_copy(-1, torch.tensor([3, 0]), m.w.expand(len(x), -1, -1)), w=parameter(T, 2)),
    sequences,
)
case("where", lambda: Model(lambda m, x: torch.where(x > 0, x, m.t), t=parameter(6)), sequences)
case("table-indexed", lambda: Model(lambda m, x: m.w[x], w=parameter(9, 6)), tokens)
case("sliced-weight", lambda: Model(lambda m, x: F.linear(x, m.w[:3]), w=parameter(5, 6)), vectors)
case(
    "lora-merged",
    lambda: Model(
        lambda m, x: F.linear(x, m.a.weight + m.u @ m.d), a=nn.Linear(6, 4), d=parameter(2, 6), u=parameter(4, 2)
    ),
    sequences,
)
case(
    "lora-beside",
    lambda: Model(lambda m, x: m.a(x) + m.u(m.d(x)), a=nn.Linear(6, 4), d=nn.Linear(6, 2), u=nn.Linear(2, 4)),
    sequences,
)
case(
    "relative-positions",
    lambda: Model(
        lambda m, x: (m.a(x) @ x.transpose(1, 2) + m.t[m.index].squeeze(-1)).softmax(-1) @ x,
        a=nn.Linear(6, 6),
        t=parameter(9, 1),
        index=torch.arange(5)[:, None] - torch.arange(5)[None] + 4,
    ),
    sequences,
)


def multiply_in_place(m: Any, x: Tensor) -> Tensor:
    return m.a(x).mul_(m.w).add_(m.b)


def add_through_view(m: Any, x: Tensor) -> Tensor:
    hidden = m.a(x) * 1.0
    first = hidden[:, 0]
    first += m.w
    return hidden


def written_into_buffer(m: Any, x: Tensor) -> Tensor:
    padded = x.new_zeros(x.shape[0], x.shape[1] + 1, 6)
    padded[:, 1:] = x
    return m.a(padded)


case("scaled-in-place", lambda: Model(multiply_in_place, a=nn.Linear(6, 6), w=parameter(6), b=parameter(6)), sequences)
case("shifted-through-view", lambda: Model(add_through_view, a=nn.Linear(6, 6), w=parameter(6)), sequences)
case("written-into-buffer", lambda: Model(written_into_buffer, a=nn.Linear(6, 4)), sequences)
for name in ("weight_norm", "spectral_norm", "orthogonal"):
    case(name, lambda name=name: getattr(parametrizations, name)(nn.Linear(6, 4)).eval(), sequences)
case(
    "cosine-to-prototype",
    lambda: Model(lambda m, x: F.cosine_similarity(m.a(x), m.p[None, None], dim=-1), a=nn.Linear(6, 6), p=parameter(6)),
    sequences,
)
case("distance-to-prototypes", lambda: Model(lambda m, x: torch.cdist(x, m.p), p=parameter(3, 6)), vectors)
case(
    "normalised-weight",
    lambda: Model(lambda m, x: F.linear(F.normalize(x, dim=-1), F.normalize(m.w, dim=-1)), w=parameter(3, 6)),
    vectors,
)

# Rows picked from the batch -------------------------------------------------------------------------------------------


def tokens_picked(m: Any, x: Tensor) -> Tensor:
    """Only some tokens of each sample go through the layers, unequal numbers of them."""
    mask = x[..., 0] > 0
    hidden = torch.zeros(*x.shape[:2], 6, dtype=x.dtype)
    hidden[mask] = m.b(m.a(x[mask]).relu())
    return hidden


def experts(m: Any, x: Tensor) -> Tensor:
    """Each token goes to the expert that its first entry names."""
    flat = x.reshape(-1, 6)
    result = torch.zeros_like(flat)
    for number, expert in enumerate((m.a, m.b)):
        chosen = (flat[:, 0] > 0) == bool(number)
        result[chosen] = expert(flat[chosen])
    return result.view_as(x)


def shuffled_and_back(m: Any, x: Tensor) -> Tensor:
    order = torch.randperm(len(x))
    return m.b(m.a(x[order]).relu())[order.argsort()]


case("tokens-picked", lambda: Model(tokens_picked, a=nn.Linear(6, 4), b=nn.Linear(4, 6)), sequences)
case("experts", lambda: Model(experts, a=nn.Linear(6, 6), b=nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6))), sequences)
case("shuffled-and-back", lambda: Model(shuffled_and_back, a=nn.Linear(6, 4), b=nn.Linear(4, 2)), sequences)

# Embeddings -----------------------------------------------------------------------------------------------------------
for options in ({"padding_idx": 0}, {"max_norm": 1.0}, {"sparse": True}):
    case(
        f"embedding-{next(iter(options))}",
        lambda options=options: Model(lambda m, x: m.e(x), e=nn.Embedding(9, 6, **options)),
        tokens,
    )


def bags_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """All tokens in one row, and where each sample's begin: sample i has as many as its first token says."""
    lengths = x[:, 0].clamp(min=1, max=T)
    kept = torch.arange(T) < lengths[:, None]
    return x[kept], lengths.cumsum(0) - lengths


def uneven_bags(m: Any, x: Tensor) -> Tensor:
    tokens_in_a_row, offsets = bags_of(x)
    return m.e(tokens_in_a_row, offsets)


for mode in ("sum", "mean", "max"):
    for options in ({}, {"padding_idx": 3}):
        name = "-".join([f"embedding-bag-{mode}", *options])
        bag = partial(nn.EmbeddingBag, 9, 6, mode=mode, **options)
        case(name, lambda bag=bag: Model(lambda m, x: m.e(x), e=bag()), tokens)
        case(f"{name}-uneven", lambda bag=bag: Model(uneven_bags, e=bag()), tokens)
case(
    "embedding-bag-weighted",
    lambda: Model(lambda m, x: m.e(x, per_sample_weights=x.to(m.e.weight.dtype)), e=nn.EmbeddingBag(9, 6, mode="sum")),
    tokens,
)
case("tied-head", lambda: Model(lambda m, x: m.e(x) @ m.e.weight.t(), e=nn.Embedding(9, 6)), tokens)
case("tied-head-linear", lambda: Model(lambda m, x: F.linear(m.e(x), m.e.weight), e=nn.Embedding(9, 6)), tokens)

# Images ---------------------------------------------------------------------------------------------------------------
case("conv", lambda: nn.Conv2d(4, 6, 3, padding=1), images)
case("conv-circular-grouped", lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular", groups=2), images)
case("conv-reflect-same", lambda: nn.Conv2d(4, 6, (3, 2), padding="same", padding_mode="reflect"), images)
case("conv-transpose", lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), images)
case("conv1d", lambda: nn.Conv1d(5, 6, 3, padding="same", dilation=2), lambda b: (torch.randn(b, 5, 9),))
case("conv3d", lambda: nn.Conv3d(2, 4, 2, dilation=2), lambda b: (torch.randn(b, 2, 4, 4, 4),))
case(
    "group-norm", lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(True), nn.MaxPool2d(2)), images
)
case(
    "instance-norm",
    lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.InstanceNorm2d(6, affine=True, track_running_stats=True)),
    images,
)
case("batch-norm-eval", lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)).eval(), images)
case("layer-norm-first", lambda: nn.Sequential(nn.LayerNorm([T, 6]), nn.Linear(6, 2)), sequences)
case("rms-norm", lambda: nn.Sequential(nn.RMSNorm(6), nn.Linear(6, 2)), sequences)
case(
    "patches",
    lambda: Model(lambda m, x: m.a(m.c(x).flatten(2).transpose(1, 2)), c=nn.Conv2d(4, 6, 2, 2), a=nn.Linear(6, 4)),
    images,
)
case(
    "windows",
    lambda: Model(
        lambda m, x: m.a(
            x.roll((1, 1), (2, 3)).reshape(len(x), 4, 2, 3, 2, 3).permute(0, 2, 4, 3, 5, 1).reshape(-1, 9, 4)
        ).view(len(x), -1),
        a=nn.Linear(4, 4),
    ),
    images,
)


def _transformed(m: nn.Module, x: Tensor) -> Tensor:
    """A spatial transformer, of which the grid has the shape of the whole batch among its arguments."""
    theta = m.a(x.mean((2, 3))).view(-1, 2, 3)
    return m.c(F.grid_sample(x, F.affine_grid(theta, x.size(), align_corners=False), align_corners=False))


case("spatial-transformer", lambda: Model(_transformed, a=nn.Linear(4, 6), c=nn.Conv2d(4, 2, 3)), images)

# Ops of no known family, tried out on one sample ----------------------------------------------------------------------
case("unfold", lambda: Model(lambda m, x: m.a(F.unfold(x, 2).transpose(1, 2)), a=nn.Linear(16, 4)), images)
case(
    "interpolate",
    lambda: Model(lambda m, x: m.c(F.interpolate(x, scale_factor=2, mode="bilinear")), c=nn.Conv2d(4, 2, 3)),
    images,
)
case("pixel-shuffle", lambda: Model(lambda m, x: m.c(F.pixel_shuffle(x, 2)), c=nn.Conv2d(1, 2, 3)), images)
case("fourier", lambda: Model(lambda m, x: m.a(torch.fft.rfft(x, dim=-1).abs()), a=nn.Linear(4, 4)), sequences)
case("sort", lambda: Model(lambda m, x: m.a(x.sort(-1).values), a=nn.Linear(6, 4)), sequences)
