"""Every structure, each with its dense gradient computed another way: the lazy case list of tests/gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_persample.gradients import (
    Block,
    Dense,
    Indexed,
    Outer,
    Patches,
    PatchGeometry,
    Ragged,
    SampleGradient,
    Sum,
)

Built = tuple[SampleGradient, Tensor]
CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


def random_tensor(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)


def outer(dtype: torch.dtype, B: int, T: int, p: int, d: int) -> Built:
    left, right = random_tensor(B, T, p, dtype=dtype), random_tensor(B, T, d, dtype=dtype)
    return Outer(left, right), torch.einsum("btp,btd->bpd", left, right)


def indexed(dtype: torch.dtype, B: int, T: int, rows: int, d: int) -> Built:
    index, right = torch.randint(rows, (B, T)), random_tensor(B, T, d, dtype=dtype)
    dense = torch.zeros(B, rows, d, dtype=dtype)
    for b in range(B):
        for t in range(T):
            dense[b, index[b, t]] += right[b, t]
    return Indexed(index, right, rows), dense


def dense(dtype: torch.dtype, *shape: int) -> Built:
    grad = random_tensor(*shape, dtype=dtype)
    return Dense(grad), grad


def block(dtype: torch.dtype, B: int, shape: tuple[int, ...], dim: int, outer_size: int) -> Built:
    inner_size = shape[dim] // (outer_size * B)
    own = (*shape[:dim], outer_size * inner_size, *shape[dim + 1 :])
    grad = random_tensor(B, *own, dtype=dtype)
    expected = torch.zeros(B, *shape, dtype=dtype)
    for b in range(B):
        for o in range(outer_size):
            for i in range(inner_size):
                row = (o * B + b) * inner_size + i
                expected[b].select(dim, row).copy_(grad[b].select(dim, o * inner_size + i))
    return Block(grad, dim, outer_size, inner_size), expected


@dataclass(frozen=True)
class Convolution:
    """A convolution's sizes, one entry per spatial axis; `crop` output positions are left out at the end."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    channels: tuple[int, int] = (4, 6)
    rows: int = 1
    crop: int = 0

    def build(self, dtype: torch.dtype, B: int = 3) -> Built:
        C, outputs = self.channels
        pad = [number for pair in reversed(self.padding) for number in pair]
        inputs = random_tensor(B, self.rows, C, *self.size, dtype=dtype)
        geometry = PatchGeometry(self.kernel, self.stride, self.padding, self.dilation, self.groups)
        convolve, everything = CONVOLUTIONS[len(self.size) - 1], slice(None)
        kept = (everything, everything, *(slice(None, -self.crop or None) for _ in self.size))
        grads, dense = [], []
        for b in range(B):
            weight = torch.zeros(outputs, C // self.groups, *self.kernel, dtype=dtype, requires_grad=True)
            padded = F.pad(inputs[b].conj(), pad)  # autograd conjugates the input, a structure does not
            out = convolve(padded, weight, None, self.stride, 0, self.dilation, self.groups)[kept]
            grads.append(random_tensor(*out.shape, dtype=dtype))
            dense.append(torch.autograd.grad(out, weight, grads[-1])[0])
        return Patches(torch.stack(grads), inputs, geometry), torch.stack(dense)


NO_PAD, SAME = (0, 0), (1, 1)
GEOMETRIES = {
    "1d": Convolution((9,), (3,), (1,), (SAME,), (1,)),
    "1d-stride-leaves-a-rest": Convolution((10,), (2,), (3,), (NO_PAD,), (1,), rows=2),
    "1d-same-even-kernel": Convolution((7,), (4,), (1,), ((1, 2),), (1,)),
    "1d-dilation": Convolution((11,), (3,), (1,), ((2, 2),), (2,), groups=2),
    "2d": Convolution((5, 6), (3, 3), (1, 1), (SAME, SAME), (1, 1)),
    "2d-one-by-one": Convolution((4, 3), (1, 1), (1, 1), (NO_PAD, NO_PAD), (1, 1)),
    "2d-one-by-one-stride": Convolution((5, 4), (1, 1), (2, 2), (NO_PAD, NO_PAD), (1, 1), groups=2),
    "2d-stride": Convolution((7, 6), (3, 2), (2, 3), (SAME, NO_PAD), (1, 1)),
    "2d-same-even-kernel": Convolution((5, 4), (2, 4), (1, 1), ((0, 1), (1, 2)), (1, 1)),
    "2d-dilation": Convolution((7, 8), (2, 3), (1, 2), ((2, 2), (1, 1)), (3, 2)),
    "2d-groups": Convolution((5, 5), (3, 3), (1, 1), (SAME, SAME), (1, 1), groups=2),
    "2d-as-many-groups-as-elements": Convolution((5, 5), (2, 2), (1, 1), (NO_PAD, NO_PAD), (1, 1), 4, (4, 8)),
    "2d-depthwise": Convolution((5, 4), (3, 3), (1, 1), (SAME, SAME), (1, 1), groups=4, channels=(4, 4)),
    "2d-depthwise-multiplier": Convolution((5, 4), (3, 3), (2, 1), (SAME, SAME), (1, 1), groups=4, channels=(4, 8)),
    "2d-depthwise-all-options": Convolution(
        (9, 11), (3, 5), (2, 1), ((2, 2), (1, 3)), (2, 1), groups=4, channels=(4, 8), rows=3
    ),
    "2d-depthwise-stride": Convolution(
        (8, 9), (5, 2), (1, 3), (SAME, NO_PAD), (1, 2), groups=3, channels=(3, 3), crop=1
    ),
    "2d-three-rows": Convolution((5, 4), (3, 2), (2, 1), (SAME, (0, 1)), (1, 1), groups=2, rows=3),
    "2d-fewer-outputs-than-fit": Convolution((7, 7), (2, 2), (2, 2), (SAME, SAME), (3, 3), crop=1),
    "2d-kernel-as-large-as-input": Convolution((4, 4), (4, 4), (4, 4), (NO_PAD, NO_PAD), (1, 1)),
    "3d": Convolution((4, 3, 4), (2, 3, 2), (1, 1, 1), (NO_PAD, SAME, SAME), (1, 1, 1)),
    "3d-all-options": Convolution((5, 4, 5), (2, 2, 3), (2, 1, 1), (SAME, (0, 1), SAME), (1, 2, 1), groups=2, rows=2),
}

MATRIX, KERNEL = (6, 9), (6, 4, 2)
CASES: dict[tuple[int, ...], dict[str, Callable[[torch.dtype], Built]]] = {
    MATRIX: {
        "dense": lambda dtype: dense(dtype, 3, *MATRIX),
        "outer-one-position": lambda dtype: outer(dtype, 3, 1, *MATRIX),
        "outer-few-positions": lambda dtype: outer(dtype, 3, 2, *MATRIX),
        "outer-many-positions": lambda dtype: outer(dtype, 3, 40, *MATRIX),
        "outer-no-position": lambda dtype: outer(dtype, 3, 0, *MATRIX),
        "indexed-one-position": lambda dtype: indexed(dtype, 3, 1, *MATRIX),
        "indexed-repeated": lambda dtype: indexed(dtype, 3, 20, *MATRIX),
        "indexed-no-position": lambda dtype: indexed(dtype, 3, 0, *MATRIX),
        "block-leading": lambda dtype: block(dtype, 3, MATRIX, 0, 2),
        "block-trailing": lambda dtype: block(dtype, 3, MATRIX, 1, 1),
        "block-one-entry-each": lambda dtype: block(dtype, 3, MATRIX, 1, 3),
        "ragged": lambda dtype: ragged([outer(dtype, 1, 5, *MATRIX), indexed(dtype, 2, 3, *MATRIX)], [(1,), (2, 0)]),
        "ragged-without-some": lambda dtype: ragged([outer(dtype, 1, 2, *MATRIX)], [(2,)]),
        "sum": lambda dtype: both(outer(dtype, 3, 2, *MATRIX), indexed(dtype, 3, 3, *MATRIX)),
    },
    KERNEL: {
        "dense": lambda dtype: dense(dtype, 3, *KERNEL),
        "block": lambda dtype: block(dtype, 3, KERNEL, 0, 1),
        "ragged": lambda dtype: ragged(
            [Convolution((6,), (2,), (1,), (NO_PAD,), (1,)).build(dtype, 1), dense(dtype, 1, *KERNEL)], [(2,), (0,)]
        ),
        "patches": Convolution((5,), (2,), (1,), (NO_PAD,), (1,)).build,
        "patches-larger-input": Convolution((12,), (2,), (2,), (SAME,), (3,)).build,
    },
    (): {"dense": lambda dtype: dense(dtype, 3)},
}


def ragged(parts: list[Built], groups: list[tuple[int, ...]], B: int = 3) -> Built:
    expected = torch.zeros(B, *parts[0][1].shape[1:], dtype=parts[0][1].dtype)
    for (_, part), group in zip(parts, groups, strict=True):
        expected[list(group)] = part
    return Ragged([gradient for gradient, _ in parts], groups, B), expected


def both(one: Built, two: Built) -> Built:
    return Sum((one[0], two[0])), one[1] + two[1]


def sq_norm(dense: Tensor) -> Tensor:
    return dense.abs().square().unsqueeze(-1).flatten(1).sum(1)


def inner(one: Tensor, two: Tensor) -> Tensor:
    return (one.conj() * two).real.unsqueeze(-1).flatten(1).sum(1)


def assert_close(got: Tensor, expected: Tensor) -> None:
    """1e-10 relative in float64, 1e-4 in float32; of the size of the numbers where they cancel."""
    precise = got.dtype in {torch.float64, torch.complex128}
    rtol = 1e-10 if precise else 1e-4
    atol = (1e-12 if precise else 1e-5) * float(expected.abs().max() if expected.numel() else 0)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
