"""Where a rule cannot answer it says so; what it must not read it does not read."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn import functional as F

from lightning_persample.errors import UnsupportedError
from lightning_persample.rules import Call, find_rule
from lightning_persample.rules.convolution import resolve_padding


def _answer(op, arguments, weights, grad_output):
    return find_rule(op).function(Call(len(grad_output), arguments, frozenset(weights)), grad_output)


@pytest.mark.parametrize(
    ("op", "name", "weight"),
    [
        (F.linear, "weight", (3, 5)),
        (F.linear, "weight", (5,)),
        (torch.matmul, "other", (5, 3)),
        (torch.matmul, "other", (5,)),
        (torch.matmul, "other", (1, 5, 3)),
        (torch.mm, "mat2", (5, 3)),
    ],
)
def test_a_linear_map_that_sums_over_the_batch(op, name, weight):
    """x.T @ w: the axis that is multiplied away is the batch."""
    arguments = {"input": torch.randn(4, 6, 1), name: torch.randn(weight)}
    grad_output = torch.randn(4, 2, 3) if len(weight) > 1 else torch.randn(4, 2)
    with pytest.raises(UnsupportedError, match=rf"^{op.__name__} sums over the batch axis: its input has .* move the"):
        _answer(op, arguments, [name], grad_output)


@pytest.mark.parametrize("op", [torch.conv1d, torch.conv_transpose1d])
def test_a_convolution_without_a_batch_axis(op):
    arguments = {"input": torch.randn(4, 1, 9), "weight": torch.randn(3, 4, 2)}
    text = f"{op.__name__} was called on one sample without a batch axis (batch-first shape (4, 1, 9)); give it an"
    with pytest.raises(UnsupportedError, match=f"^{re.escape(text)} input of 3 axes$"):
        _answer(op, arguments, ["weight"], torch.randn(4, 3, 8))


def test_an_unknown_padding():
    with pytest.raises(UnsupportedError, match=r"^padding='full' is not a padding of a convolution: 'same', 'valid'"):
        resolve_padding("full", (3,), (1,))


@pytest.mark.parametrize("op", [torch.layer_norm, torch.rms_norm])
@pytest.mark.parametrize("sample", [(1, 5), (4, 5)])
def test_a_norm_over_the_batch_axis(op, sample):
    arguments = {"input": torch.randn(4, *sample), "normalized_shape": (4, 5), "weight": torch.randn(4, 5)}
    text = f"{op.__name__} normalizes over the batch axis: normalized_shape is (4, 5), the per-sample output {sample};"
    with pytest.raises(UnsupportedError, match=f"^{re.escape(text)}"):
        _answer(op, arguments, ["weight"], torch.randn(4, *sample))


@pytest.mark.parametrize("weight", [(4, 5), (2, 1, 1, 5)])
def test_a_weight_that_spans_the_batch(weight):
    arguments = {"input": torch.randn(4, 1, 5), "other": torch.randn(weight)}
    text = f"a weight of shape {weight} does not broadcast to the per-sample shape (1, 5): its own axes must not span"
    with pytest.raises(UnsupportedError, match=f"^{re.escape(text)}"):
        _answer(torch.add, arguments, ["other"], torch.randn(4, 1, 5))


@pytest.mark.parametrize("op", [torch.batch_norm, torch.instance_norm])
def test_statistics_that_the_forward_updated_are_not_read(op):
    """In training the running statistics hold another value by the time of the backward."""
    flag = "training" if op is torch.batch_norm else "use_input_stats"
    poison = torch.full((4,), float("nan"))
    arguments = {
        "input": torch.randn(3, 1, 4, 6),
        "weight": torch.ones(4),
        "running_mean": poison,
        "running_var": poison,
    }
    arguments |= {flag: True, "momentum": 0.1, "eps": 1e-5}
    found = _answer(op, arguments, ["weight"], torch.randn(3, 1, 4, 6))
    assert found["weight"].dense().isfinite().all()
    assert poison.isnan().all()


def test_contributions_of_a_batch_norm_in_training_add_up_to_the_gradient_of_the_batch():
    x, scale, grad = torch.randn(5, 1, 4, 3), torch.randn(4, requires_grad=True), torch.randn(5, 1, 4, 3)
    output = torch.batch_norm(x.flatten(0, 1), scale, None, None, None, True, 0.1, 1e-5, False)
    (expected,) = torch.autograd.grad(output, scale, grad.flatten(0, 1))
    arguments = {"input": x, "weight": scale, "training": True, "momentum": 0.1, "eps": 1e-5}
    found = _answer(torch.batch_norm, arguments, ["weight"], grad)["weight"].dense().sum(0)
    torch.testing.assert_close(found.detach(), expected, rtol=1e-5, atol=1e-5)


def test_scale_grad_by_freq_counts_within_the_sample():
    """Sample 0 has index 1 twice, sample 1 once: the batch holds it three times, which plays no part."""
    arguments = {"weight": torch.randn(3, 1), "indices": torch.tensor([[1, 1], [1, 2]]), "scale_grad_by_freq": True}
    found = _answer(torch.embedding, arguments, ["weight"], torch.ones(2, 2, 1))["weight"].dense()
    assert found.squeeze(-1).tolist() == [[0.0, 1.0, 0.0], [0.0, 1.0, 1.0]]


def test_padding_gets_no_gradient_even_where_its_gradient_is_not_finite():
    arguments = {"weight": torch.randn(3, 1), "indices": torch.tensor([[0, 1], [0, 2]]), "padding_idx": 0}
    grad_output = torch.tensor([float("inf"), 1.0]).view(1, 2, 1).expand(2, 2, 1)
    found = _answer(torch.embedding, arguments, ["weight"], grad_output)["weight"].dense()
    assert found.squeeze(-1).tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
