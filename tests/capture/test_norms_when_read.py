"""Norms that nobody asked for are computed when they are read, and are those that are computed at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_persample import UnsupportedError, expanded_weights


def network(dtype):
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(2, 4, 3),
        nn.ReLU(),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.Linear(64, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    )
    return nn.Sequential(*layers).to(dtype)


def record_of(module, quantities, reduction="mean", samples=None, tied=False):
    torch.manual_seed(1)
    dtype = next(module.parameters()).dtype
    x, y = torch.randn(6, 2, 6, 6, dtype=dtype), torch.randint(0, 3, (6,))
    weights = torch.rand(6, dtype=dtype) + 0.1
    given = weights if reduction == "weights" else reduction
    with expanded_weights(module, (x, y), quantities=quantities, loss_reduction=given, samples=samples) as capture:
        losses = F.cross_entropy(module(x), y, reduction="none")
        loss = (losses * weights).sum() if reduction == "weights" else getattr(losses, reduction)()
        loss = loss + (F.cross_entropy(module(x), y, reduction=reduction) if tied else 0)
        loss.backward()
    return capture.record, x


@pytest.mark.parametrize("quantity", ["dot", "projection"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", [
    {}, {"reduction": "sum"}, {"reduction": "weights"}, {"samples": torch.tensor([1, 4])}, {"tied": True},
], ids=str)  # fmt: skip
def test_they_are_those_that_are_computed_at_once(quantity, dtype, options):
    late, _ = record_of(network(dtype), (quantity,), **options)
    at_once, _ = record_of(network(dtype), (quantity, "sq_norm"), **options)
    assert late.names == at_once.names
    assert len(late.sq_norms) == len(late.names) == 8
    for name in late.names:
        assert torch.equal(late.sq_norms[name], at_once.sq_norms[name])
        assert late.sq_norms[name].dtype is at_once.sq_norms[name].dtype
    assert torch.equal(late.norms(), at_once.norms())
    assert "elsewhere" not in late.sq_norms
    with pytest.raises(KeyError, match="elsewhere"):
        late.sq_norms["elsewhere"]


def test_what_was_changed_since_is_refused_by_name():
    record, x = record_of(network(torch.float64), ("dot",))
    x.zero_()
    text = (
        r"norms: a tensor that the gradient of `0\.weight` is made of was changed in place since .* ask for the norms"
    )
    with pytest.raises(UnsupportedError, match=text):
        record.norms()
    assert record.sq_norms["6.bias"].shape == (6,)
