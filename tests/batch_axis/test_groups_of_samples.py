"""Convolutions whose groups are of one sample each: kernels of their own, or blurs of all channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.model_cases import Model, parameter
from tests.capture.reference import assert_exact, record_of

pytestmark = pytest.mark.usefixtures("double_precision")
B, C, OUT, T = 4, 3, 2, 6


def mean_of_cubes(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).flatten(1).pow(3).mean(1).mean()


def beside(x: Tensor) -> Tensor:
    """All samples' channels along one axis, (1, B * C, ...)."""
    return x.reshape(1, -1, *x.shape[2:])


def modulated(m: Any, x: Tensor) -> Tensor:
    """Kernels scaled by a style of each sample and normalised, as in StyleGAN2 (Karras et al., 2020)."""
    kernels = m.w[None] * m.style(x.mean(-1))[:, None, :, None]
    kernels = kernels * (kernels.square().sum((2, 3), keepdim=True) + 1e-8).rsqrt()
    return F.conv1d(beside(x), kernels.flatten(0, 1), padding=1, groups=len(x)).view(len(x), OUT, -1)


def mixture(m: Any, x: Tensor) -> Tensor:
    """A mixture of kernels by each sample's own weights, as in CondConv (Yang et al., 2019)."""
    weights = m.route(x.mean(-1)).softmax(-1)
    kernels, bias = (weights @ m.kernels.flatten(1)).view(-1, C, 3), (weights @ m.biases).flatten()
    return F.conv1d(beside(x), kernels, bias, 1, 1, 1, len(x)).view(len(x), OUT, -1)


def in_two_dimensions(m: Any, x: Tensor) -> Tensor:
    kernels = (m.w[None] * m.style(x.mean(-1))[:, None, :, None]).flatten(0, 1)
    return F.conv2d(beside(x.unflatten(2, (2, 3))), kernels[:, :, None], padding=(0, 1), groups=len(x)).view(
        len(x), OUT, -1
    )


def transposed(m: Any, x: Tensor) -> Tensor:
    kernels = (m.w.transpose(0, 1)[None] * m.style(x.mean(-1))[:, :, None, None]).flatten(0, 1)
    return F.conv_transpose1d(beside(x), kernels, padding=1, groups=len(x)).view(len(x), OUT, -1)


def blurred(m: Any, x: Tensor) -> Tensor:
    kernel = torch.tensor([0.25, 0.5, 0.25]).expand(len(x) * C, 1, 3)
    return F.conv1d(beside(m.style(x.mT).mT), kernel, padding=1, groups=len(x) * C).view(len(x), C, -1)


FORWARDS: list[Callable[[Any, Tensor], Tensor]] = [modulated, mixture, in_two_dimensions, transposed, blurred]


def model(forward: Callable[[Any, Tensor], Tensor]) -> Model:
    return Model(
        lambda m, x: m.head(forward(m, x).mean(-1)),
        w=parameter(OUT, C, 3),
        kernels=parameter(3, OUT * C, 3),
        biases=parameter(3, OUT),
        style=nn.Linear(C, C),
        route=nn.Linear(C, 3),
        head=nn.Linear(C if forward is blurred else OUT, 2),
    )


@pytest.mark.parametrize("forward", FORWARDS)
def test_groups_of_one_sample_each(forward: Callable[[Any, Tensor], Tensor]) -> None:
    assert_exact(model(forward), mean_of_cubes, (torch.randn(B, C, T),))


def test_groups_of_several_samples_are_named() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return F.conv1d(beside(x), m.w.repeat(len(x), 2, 1), padding=1, groups=len(x) // 2).view(len(x), OUT, -1)

    record = record_of(model(forward), mean_of_cubes, torch.randn(B, C, T))
    assert "needs the samples along its first axis, or in groups of their own" in record.unsupported["w"]


def test_rows_of_one_image_are_not_groups_of_its_channels() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return F.conv2d(x * m.scale, m.w[:, :1, None].expand(B, 1, 3, 3), padding=1, groups=B)

    module = Model(forward, w=parameter(B, C, 3), scale=parameter(B, 1, T))
    record = record_of(module, mean_of_cubes, torch.randn(B, B, T), batch_dim=1)
    reasons = (record.unsupported["w"], *record.axis_lost)
    assert len(reasons) > 1
    assert all("needs the samples along its first axis" in reason for reason in reasons)
