"""Data that a training step makes itself, declared with mark_samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample import expanded_weights, loop_per_sample_grads, mark_samples

B, FEATURES, NOISE = 5, 4, 3


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generate, self.judge = nn.Linear(NOISE, FEATURES), nn.Linear(FEATURES, 1)

    def loss(self, x: Tensor, noise: Tensor) -> Tensor:
        joined = F.softplus(self.judge(self.generate(noise))).mean()
        return joined + F.softplus(-self.judge(x)).mean()


@pytest.mark.parametrize("rows", [1, 2])
def test_declared_noise_belongs_to_its_samples(rows: int) -> None:
    module, x, noise = Generator().double(), torch.randn(B, FEATURES).double(), torch.randn(B * rows, NOISE).double()

    def loss(module: Any, x: Tensor, noise: Tensor) -> Tensor:
        return module.loss(x, noise.flatten(0, -2))

    with expanded_weights(module, x, quantities=("grad_sample",)) as capture:
        module.loss(x, mark_samples(noise.clone())).backward()
    _, expected = loop_per_sample_grads(module, loss, x, noise.reshape(B, rows, NOISE))
    assert capture.record.coverage == 1.0
    for name, grads in expected.items():
        torch.testing.assert_close(capture.record.grad_samples[name], grads)


def test_noise_along_another_axis() -> None:
    module, x, noise = nn.Linear(NOISE, 1).double(), torch.randn(B, 1).double(), torch.randn(7, B, NOISE).double()
    with expanded_weights(module, x, quantities=("grad_sample",)) as capture:
        (module(mark_samples(noise, 1)).mean(0) * x).mean().backward()
    expected = noise.mean(0)[:, None] * x[:, None]
    torch.testing.assert_close(capture.record.grad_samples["weight"], expected)


def test_without_the_declaration_it_is_named() -> None:
    module, x = Generator(), torch.randn(B, FEATURES)
    with expanded_weights(module, x, unsupported="ignore") as capture:
        F.softplus(module.judge(module.generate(torch.randn(B, NOISE)))).mean().backward()
    assert set(capture.record.unsupported) == {"generate.weight", "generate.bias", "judge.weight", "judge.bias"}
    assert "and, there, `mark_samples(torch.randn(...))`" in capture.record.unsupported["generate.weight"]


def test_a_penalty_has_no_line_that_draws() -> None:
    module, x = nn.Linear(FEATURES, 1), torch.randn(B, FEATURES)
    with expanded_weights(module, x, unsupported="ignore") as capture:
        (module(x).mean() + module(torch.randn(B + 1, FEATURES)).mean()).backward()
    assert (
        "pass it through mark_samples (`from lightning_persample import mark_samples`)"
        in (capture.record.unsupported["weight"])
    )


def test_rows_that_do_not_fit_are_refused() -> None:
    module, x = nn.Linear(NOISE, 1), torch.randn(B, FEATURES)
    with expanded_weights(module, x, unsupported="ignore") as capture:
        (module(mark_samples(torch.randn(B + 1, NOISE))).sum() * x.mean()).backward()
    text = "the tensor given to mark_samples has shape (6, 3), which does not hold 5 samples along axis 0"
    assert text in capture.record.unsupported["weight"]


def test_what_was_computed_with_parameters_is_not_taken_for_data() -> None:
    module, x = Generator(), torch.randn(B, FEATURES)
    with expanded_weights(module, x, unsupported="ignore") as capture:
        fake = mark_samples(module.generate(torch.randn(B, NOISE)))
        F.softplus(module.judge(fake)).mean().backward()
    assert set(capture.record.unsupported) == {"generate.weight", "generate.bias", "judge.weight", "judge.bias"}


def test_outside_a_capture_it_is_the_tensor_itself() -> None:
    noise = torch.randn(B, NOISE)
    assert mark_samples(noise) is noise
