"""Temporaries stay within the budget, and its size changes no value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_persample.gradients import Dense, Indexed, Outer, Sum, cost
from tests.gradients.structures import CASES, GEOMETRIES, assert_close, inner, sq_norm

VOCABULARY = 50_000


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest new tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:  # not a view
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.fixture
def tiny_budget(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(cost, "MEMORY_BUDGET", 4096)
    return 4096


def tied_embedding(T: int) -> tuple[Indexed, Outer]:
    index, right = torch.randint(VOCABULARY, (4, T)), torch.randn(4, T, 16)
    index[:, 1] = index[:, 0]
    return Indexed(index, right, VOCABULARY), Outer(torch.randn(4, T, VOCABULARY), torch.randn(4, T, 16))


def test_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """No quantity of a tied embedding and head builds anything of the size of the vocabulary times d."""
    table, head = tied_embedding(6)
    first, second = (x._widened().dense() for x in (table, head))
    expected = {
        "table": sq_norm(first),
        "head": sq_norm(second),
        "inner": inner(first, second),
        "sum": sq_norm(first + second),
    }
    for budget in (cost.MEMORY_BUDGET, 4096):
        monkeypatch.setattr(cost, "MEMORY_BUDGET", budget)
        with LargestTensor() as largest:
            got = {
                "table": table.sq_norm(),
                "head": head.sq_norm(),
                "inner": table.inner(head),
                "sum": Sum([head, table]).sq_norm(),
            }
        for name, value in got.items():
            assert_close(value, expected[name].float())
        assert largest.bytes <= max(cost.CPU_MEMORY_BUDGET if budget > 4096 else 0, 4 * 6 * VOCABULARY)


def test_indexed_with_dense_gathers_rows_alone(tiny_budget: int) -> None:
    table, _ = tied_embedding(3)
    grad = torch.randn(4, VOCABULARY, 16)
    with LargestTensor() as largest:
        got = Dense(grad).inner(table)
    assert_close(got, inner(grad, table.dense()))
    assert largest.bytes <= tiny_budget


@pytest.mark.parametrize("T", [3, 300])
def test_one_sample_larger_than_the_budget(T: int, tiny_budget: int) -> None:
    """Rows of one sample's matrix, or of its Gram matrix, are taken a block at a time."""
    left, right = torch.randn(2, T, 90), torch.randn(2, T, 100)
    expected = torch.einsum("btp,btd->bpd", left, right)
    gradient = Outer(left, right)
    with LargestTensor() as largest:
        got, crossed = gradient.sq_norm(), gradient.inner(Outer(right[:, :, :90], right))
    assert_close(got, sq_norm(expected))
    assert_close(crossed, inner(expected, torch.einsum("btp,btd->bpd", right[:, :, :90], right)))
    assert largest.bytes <= max(tiny_budget, 4 * T * 100)


@pytest.mark.parametrize(("shape", "name"), [(shape, name) for shape in CASES for name in CASES[shape]])
def test_every_structure(shape: tuple[int, ...], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gradient, expected = CASES[shape][name](torch.float64)
    monkeypatch.setattr(cost, "MEMORY_BUDGET", 1)
    vector = torch.randn(shape, dtype=torch.float64)
    assert_close(gradient.dense(), expected)
    assert_close(gradient.sq_norm(), sq_norm(expected))
    assert_close(gradient.dot(vector), inner(expected, vector.expand_as(expected)))
    assert_close(gradient.square_sum(), expected.square().sum(0))
    for other, (second, second_expected) in {k: case(torch.float64) for k, case in CASES[shape].items()}.items():
        assert other in CASES[shape]
        assert_close(gradient.inner(second), inner(expected, second_expected))
        assert_close(Sum([gradient, second]).sq_norm(), sq_norm(expected + second_expected))


@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_convolution(name: str, tiny_budget: int) -> None:
    gradient, expected = GEOMETRIES[name].build(torch.float64)
    vector = torch.randn(gradient.shape, dtype=torch.float64)
    assert_close(gradient.dense(), expected)
    assert_close(gradient.sq_norm(), sq_norm(expected))
    assert_close(gradient.dot(vector), inner(expected, vector.expand_as(expected)))
