"""Every quantity of every structure, and of every pair of them, against dense gradients."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_persample.gradients import Dense, Indexed, Outer, Patches, Sum, add_up
from tests.gradients.structures import CASES, assert_close, inner, random_tensor, sq_norm
from tests.in_turn import in_turn

DTYPES = [torch.float64, torch.float32, torch.complex64, torch.complex128]
SINGLE = [pytest.param(shape, name, id=f"{name}-{len(shape)}d") for shape in CASES for name in CASES[shape]]
PAIRS = [
    pytest.param(shape, one, two, id=f"{one}-with-{two}-{len(shape)}d")
    for shape in CASES
    for one, two in itertools.product(CASES[shape], repeat=2)
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "name"), SINGLE)
def test_one_structure(shape: tuple[int, ...], name: str, dtype: torch.dtype) -> None:
    gradient, expected = CASES[shape][name](dtype)
    assert (gradient.batch_size, tuple(gradient.shape), gradient.dtype) == (3, shape, dtype)
    assert_close(gradient.dense(), expected)
    assert_close(gradient.sq_norm(), sq_norm(expected))
    vector = random_tensor(*shape, dtype=dtype)
    assert_close(gradient.dot(vector), inner(expected, vector.expand_as(expected)))
    assert_close(gradient.square_sum(), expected.abs().square().sum(0))
    assert_close(gradient.samples(2, 99).sq_norm(), sq_norm(expected[2:]))
    part = gradient.samples(1, 3)
    assert_close(part.dot(vector), inner(expected[1:], vector.expand_as(expected[1:])))
    assert type(part) is type(gradient)
    assert (part.batch_size, tuple(part.shape)) == (2, shape)
    assert_close(part.dense(), expected[1:])
    assert_close(part.sq_norm(), sq_norm(expected[1:]))
    assert_close(part.samples(1, 2).inner(gradient.samples(2, 3)), sq_norm(expected[2:]))


@pytest.mark.parametrize(("shape", "one", "two", "dtype"), in_turn(PAIRS, [torch.float64, torch.complex64]))
def test_two_structures(shape: tuple[int, ...], one: str, two: str, dtype: torch.dtype) -> None:
    first, first_dense = CASES[shape][one](dtype)
    second, second_dense = CASES[shape][two](dtype)
    assert_close(first.inner(second), inner(first_dense, second_dense))
    total = first_dense + second_dense
    vector = random_tensor(*shape, dtype=dtype)
    for added in (Sum((first, second)), add_up([first, second])):
        assert_close(added.dense(), total)
        assert_close(added.sq_norm(), sq_norm(total))
        assert_close(added.dot(vector), inner(total, vector.expand_as(total)))
        assert_close(added.square_sum(), total.abs().square().sum(0))
        assert_close(added.samples(2, 3).sq_norm(), sq_norm(total[2:]))
        assert_close(added.inner(second), inner(total, second_dense))
        assert_close(second.inner(added), inner(total, second_dense))


@pytest.mark.parametrize("shape", CASES, ids=lambda shape: f"{len(shape)}d")
def test_everything_added_up(shape: tuple[int, ...]) -> None:
    built = [case(torch.float64) for case in CASES[shape].values()]
    total = torch.stack([dense for _, dense in built]).sum(0)
    added = add_up([gradient for gradient, _ in built])
    assert_close(added.dense(), total)
    assert_close(added.sq_norm(), sq_norm(total))
    assert_close(add_up([added, added]).sq_norm(), 4 * sq_norm(total))
    by_pairs = Sum([gradient for gradient, _ in built])._sq_norm_by_pairs()[0]
    assert_close(by_pairs, sq_norm(total))


def test_pairs_with_terms_larger_than_the_gradient_and_smaller() -> None:
    """Both ways to the squared norm of a sum are taken."""
    for T, p in ((50, 3), (2, 60)):
        left, right = torch.randn(4, T, p, dtype=torch.float64), torch.randn(4, T, 50, dtype=torch.float64)
        index = torch.randint(p, (4, T))
        rows = Indexed(index, right, p)
        added = Sum([Outer(left, right), rows])
        expected = torch.einsum("btp,btd->bpd", left, right) + rows.dense()
        assert (added._numbers() >= 50 * p) == (T == 50)
        assert_close(added.sq_norm(), sq_norm(expected))


def test_add_up_merges_what_is_of_one_kind() -> None:
    for shape, name, kind in [
        ((6, 9), "dense", Dense),
        ((6, 9), "outer-few-positions", Outer),
        ((6, 9), "indexed-repeated", Indexed),
        ((6, 4, 2), "patches", Patches),
    ]:
        first, second = (CASES[shape][name](torch.float64) for _ in range(2))
        added = add_up([first[0], second[0]])
        assert type(added) is kind
        assert_close(added.sq_norm(), sq_norm(first[1] + second[1]))
    small, large = (CASES[6, 4, 2][name](torch.float64)[0] for name in ("patches", "patches-larger-input"))
    assert type(add_up([small, large])) is Sum
    assert add_up([small]) is small


def test_indices_of_any_integer_dtype() -> None:
    right = torch.randn(1, 2, 3)
    for dtype in (torch.int32, torch.uint8, torch.int64):
        gradient = Indexed(torch.tensor([[4, 4]], dtype=dtype), right, 5)
        assert_close(gradient.sq_norm(), right.sum(1).square().sum(1))
        assert_close(gradient.dense()[:, 4], right.sum(1))


@pytest.mark.parametrize("T", [0, 1, 30])
def test_squared_norm_of_orthogonal_terms(T: int) -> None:
    left, right = torch.randn(3, T, 4, dtype=torch.complex128), torch.randn(3, T, 5, dtype=torch.complex128)
    terms = torch.einsum("btp,btd->btpd", left, right)
    gradient = Outer(left, right)
    assert_close(gradient._terms_sq_norm(), sq_norm(terms))
    assert_close(Sum([gradient, Dense(gradient.dense())])._terms_sq_norm(), sq_norm(terms) + sq_norm(terms.sum(1)))
    assert_close(Indexed(torch.randint(9, (3, T)), right, 9)._terms_sq_norm(), sq_norm(right))
