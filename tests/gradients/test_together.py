"""Squared norms of the weight and the bias of one call, with and without numbers in common."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_persample.gradients import Dense, Indexed, Outer, SampleGradient, sq_norms

B, P, D = 6, 5, 4


def rows(*sizes: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*sizes, dtype=dtype, generator=torch.Generator().manual_seed(sum(sizes)))


def expected(gradient: SampleGradient) -> Tensor:
    """By adding up the gradient's entries one sample at a time, in double precision."""
    wide = torch.complex128 if gradient.dense().is_complex() else torch.float64
    return torch.stack([each.to(wide).abs().square().sum() for each in gradient.dense()])


def shared(dtype: torch.dtype = torch.float64, columns: int = P) -> list[SampleGradient]:
    g = rows(B, columns, dtype=dtype)
    return [Outer(g[:, None], rows(B, 1, D, dtype=dtype)), Dense(g)]


def square() -> list[SampleGradient]:
    """The same memory read along other axes: (B, B), once transposed."""
    g = rows(B, B)
    return [Outer(g.T[:, None], rows(B, 1, D)), Dense(g)]


def overlapping() -> list[SampleGradient]:
    """Rows that begin at the same place in memory and have other lengths or strides."""
    g = rows(2 * B, P)
    return [Outer(g[::2, None], rows(B, 1, D)), Dense(g[:B]), Dense(g[:B, :3]), Outer(g[:B, None, :3], rows(B, 1, D))]


CASES = {
    "shared": shared,
    "shared-float32": lambda: shared(torch.float32),
    "shared-complex": lambda: shared(torch.complex128),
    "shared-long-rows": lambda: shared(columns=5000),
    "square": square,
    "overlapping": overlapping,
    "several-positions": lambda: [Outer(rows(B, 3, P), rows(B, 3, D)), Dense(rows(B, P))],
    "other-dtypes": lambda: [Outer(shared(torch.float32)[1].grad[:, None], rows(B, 1, D)), Dense(rows(B, P))],
    "low-precision": lambda: [Outer(rows(B, 1, P).half(), rows(B, 1, D).half()), Dense(rows(B, P).half())],
    "no-rows": lambda: [Dense(rows(B)), Dense(rows(B, P, D))],
    "other-kinds": lambda: [Indexed(torch.zeros(B, 2, dtype=torch.long), rows(B, 2, D), 3), Dense(rows(B, D))],
    "alone": lambda: [Dense(rows(B, P))],
    "none": list,
}


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    gradients = CASES[name]()
    found = sq_norms(gradients)
    assert len(found) == len(gradients)
    tolerance = 1e-5 if any(gradient.dtype == torch.float32 for gradient in gradients) else 1e-12
    for gradient, values in zip(gradients, found, strict=True):
        torch.testing.assert_close(values.double(), expected(gradient), rtol=tolerance, atol=0.0)


def test_rows_in_common_are_read_once(monkeypatch):
    weight, bias = shared()
    read = []
    norm = torch.linalg.vector_norm
    monkeypatch.setattr(
        torch.linalg, "vector_norm", lambda x, *args, **options: read.append(x) or norm(x, *args, **options)
    )
    sq_norms([weight, bias])
    assert sorted(x.shape[-1] for x in read) == [D, P]
