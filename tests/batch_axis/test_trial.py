"""An op of no known family is tried on samples alone: what mixes them shows, and nothing is drawn."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.capture.reference import assert_values, loop, record_of

pytestmark = pytest.mark.usefixtures("double_precision")


@torch.library.custom_op("persample_test::swap_two", mutates_args=())
def swap_two(x: Tensor) -> Tensor:
    y = x.clone()
    if len(x) > 2:
        y[1], y[2] = x[2], x[1]
    return y


@torch.library.custom_op("persample_test::a_little_of_all", mutates_args=())
def a_little_of_all(x: Tensor) -> Tensor:
    return x + 3e-5 * x.mean(0)


@torch.library.custom_op("persample_test::foreign_noise", mutates_args=())
def foreign_noise(x: Tensor) -> Tensor:
    return x + float(np.random.rand()) * 0.1 + random.random() * 0.1


@torch.library.custom_op("persample_test::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


swap_two.register_autograd(lambda ctx, grad: swap_two(grad))
a_little_of_all.register_autograd(lambda ctx, grad: grad + 3e-5 * grad.mean(0))
foreign_noise.register_autograd(lambda ctx, grad: grad)
cube.register_autograd(
    lambda ctx, grad: 3 * ctx.saved_tensors[0] ** 2 * grad,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def batch(size: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.randn(size, 3)


@pytest.mark.parametrize("op", [swap_two, a_little_of_all], ids=["two-in-the-middle", "a-little"])
def test_an_op_that_mixes_is_said(op: object) -> None:
    record = record_of(nn.Linear(4, 3), lambda m, x, y: F.mse_loss(op(m(x)), y), *batch())
    assert "gives a sample another value alone than in its batch" in record.axis_lost[0]


@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_an_op_that_does_not_mix_is_exact(size: int) -> None:
    module, data = nn.Linear(4, 3), batch(size)
    record = record_of(module, lambda m, x, y: F.mse_loss(cube(m(x)), y), *data)
    assert (record.mixing, record.axis_lost) == ((), ())
    assert_values(record, loop(module, lambda m, x, y: F.mse_loss(cube(m(x)), y), data))


def test_random_numbers_of_python_and_numpy_go_on_as_without() -> None:
    module, (x, y) = nn.Linear(4, 3), batch()
    following = []
    for observed in (False, True):
        np.random.seed(0)
        random.seed(0)
        if observed:
            record_of(module, lambda m, x, y: F.mse_loss(foreign_noise(m(x)), y), x, y)
        else:
            F.mse_loss(foreign_noise(module(x)), y).backward()
        following.append((np.random.rand(), random.random()))
    assert following[0] == following[1]


class Counted(TorchFunctionMode):
    """Counts the calls of functions of one name."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += getattr(function, "__name__", "") == self.name
        return function(*args, **kwargs or {})


def unpooled(h: Tensor) -> Tensor:
    pooled, places = F.max_pool2d(h, 2, return_indices=True)
    return F.max_unpool2d(pooled, places, 2)


BY_ROWS = {
    "upsample_nearest2d": nn.Upsample(scale_factor=2),
    "_upsample_nearest_exact2d": nn.Upsample(scale_factor=2, mode="nearest-exact"),
    "upsample_bilinear2d": nn.Upsample(size=(7, 3), mode="bilinear"),
    "upsample_bicubic2d": nn.Upsample(scale_factor=2, mode="bicubic"),
    "_upsample_bilinear2d_aa": lambda h: F.interpolate(h, size=(2, 3), mode="bilinear", antialias=True),
    "pixel_shuffle": nn.PixelShuffle(2),
    "pixel_unshuffle": nn.PixelUnshuffle(2),
    "channel_shuffle": nn.ChannelShuffle(2),
    "prelu": lambda h: F.prelu(h, torch.linspace(-1, 1, 4)),
    "im2col": nn.Unfold(3, padding=1),
    "col2im": lambda h: F.fold(h.flatten(2), (8, 8), 2, stride=2),
    "max_unpool2d": unpooled,
    "grid_sampler": lambda h: F.grid_sample(h, h[:, :2].movedim(1, -1).tanh(), align_corners=False),
    "stft": lambda h: torch.view_as_real(torch.stft(h.flatten(1), 16, window=torch.ones(16), return_complex=True)),
    "quantile": lambda h: h.quantile(torch.tensor([0.2, 0.7]), dim=2).movedim(0, -1),
    "nanquantile": lambda h: h.nanquantile(0.3, dim=-1),
    "kthvalue": lambda h: h.kthvalue(2, dim=1)[0],
    "trapezoid": lambda h: torch.trapezoid(h, dx=0.5, dim=1),
    "pairwise_distance": lambda h: F.pairwise_distance(h[:, :2], h[:, 2:] + 1),
    "cosine_similarity": lambda h: F.cosine_similarity(h, h.flip(1) + 1),
}


@pytest.mark.parametrize("name", BY_ROWS)
def test_an_op_whose_rows_are_apart_is_tried_once_and_stays_exact(name: str) -> None:
    module = nn.Conv2d(2, 4, 1)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return BY_ROWS[name](m(x)).square().flatten(1).sum(1).mean()

    counts = []
    for scale in (1.0, 0.0, 1e3, -1.0):  # values that are remembered must not be those of the first call
        data = (scale * torch.randn(5, 2, 4, 4),)
        with Counted(name) as counted:
            record = record_of(module, loss, *data)
        counts.append(counted.count)
        assert (record.mixing, record.axis_lost) == ((), ())
        assert record.coverage == 1
        assert_values(record, loop(module, loss, data))
    assert counts[1:] == [1, 1, 1], counts


def test_a_learned_slope_is_tried_once_and_stays_exact() -> None:
    module, counts = nn.Sequential(nn.Linear(3, 4), nn.PReLU(4)), []

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().sum(1).mean()

    for scale in (1.0, 0.0, 1e3, -1.0):
        data = (scale * torch.randn(5, 3),)
        with Counted("prelu") as counted:
            record = record_of(module, loss, *data)
        counts.append(counted.count)
        assert_values(record, loop(module, loss, data))
    assert counts[1:] == [1, 1, 1], counts


FOURIER = {
    "fft_fft": lambda h: torch.fft.fft(h),
    "fft_irfft": lambda h: torch.fft.irfft(h.to(torch.complex128), 5, 2),
    "fft_rfft2": lambda h: torch.fft.rfft2(h),
    "fft_ifft2": lambda h: torch.fft.ifft2(h, dim=(1, -1)),
    "fft_rfftn": lambda h: torch.fft.rfftn(h, s=(3, 4, 5)),
    "fft_fftn": lambda h: torch.fft.fftn(h, dim=(1, 2)),
}


@pytest.mark.parametrize("name", FOURIER)
def test_a_fourier_transform_is_known_by_its_axes(name: str) -> None:
    module, data = nn.Conv2d(2, 4, 1), (torch.randn(5, 2, 4, 4),)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return FOURIER[name](m(x)).abs().square().flatten(1).sum(1).mean()

    with Counted(name) as counted:
        record = record_of(module, loss, *data)
    assert (counted.count, record.mixing, record.axis_lost, record.coverage) == (1, (), (), 1)
    assert_values(record, loop(module, loss, data))


@pytest.mark.parametrize(
    "transform",
    [lambda h: torch.fft.fft(h, dim=-4), torch.fft.fftn, lambda h: torch.fft.rfft2(h, dim=(0, 1))],
    ids=["fft", "fftn", "rfft2"],
)
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_a_fourier_transform_over_the_batch_is_said(transform: Callable[[Tensor], Tensor], scale: float) -> None:
    x = scale * torch.randn(5, 2, 4, 4)
    record = record_of(nn.Conv2d(2, 4, 1), lambda m, x: transform(m(x)).abs().square().mean(), x)
    assert "works along the batch axis" in record.mixing[0]


@pytest.mark.parametrize("first_is_tame", [True, False])
def test_an_op_whose_values_decide_is_tried_at_every_step(first_is_tame: bool) -> None:
    """Along the features, `renorm` changes a row's norm over all samples beyond its maximum alone."""
    module = nn.Linear(4, 3)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).renorm(2, 1, 5.0).square().sum(1).mean()

    for tame in (first_is_tame, not first_is_tame, first_is_tame):
        x = torch.randn(5, 4) * (1e-2 if tame else 1e3)
        record = record_of(module, loss, x)
        assert ((*record.mixing, *record.axis_lost) == ()) is tame
        if tame:
            assert_values(record, loop(module, loss, (x,)))


@pytest.mark.parametrize("first_is_zero", [True, False])
def test_neighbours_of_zero_decide_nothing_for_others(first_is_zero: bool) -> None:
    """Samples along the height of one image: `unfold` lays neighbours into a patch, which zeros do not show."""
    module = nn.Linear(1, 1, bias=False)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return F.unfold(m(x).reshape(1, 1, -1, 1), 3, padding=1).sum(1).square().mean()

    for zero in (first_is_zero, not first_is_zero):
        record = record_of(module, loss, torch.zeros(5, 1) if zero else torch.randn(5, 1))
        assert zero or record.axis_lost != ()
