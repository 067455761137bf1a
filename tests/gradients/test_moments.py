"""Scaled structures and their second moments, of every structure, against its dense gradient or its own sides."""

from __future__ import annotations

import pytest
import torch

from lightning_persample.gradients import Deflated, Indexed, Outer, Patches, Ragged, SampleGradient, Sum, moments
from lightning_persample.gradients.patch_kernels import Rows
from tests.gradients.structures import CASES, GEOMETRIES, assert_close

ALL = [(shape, name) for shape, cases in CASES.items() for name in cases]
F64 = torch.float64


def deflated():
    source = Outer(torch.randn(3, 2, 6, dtype=F64), torch.randn(3, 2, 9, dtype=F64))
    direction = torch.nn.functional.normalize(torch.randn(6, 9, dtype=F64))
    along = (source.dense() * direction).sum(2)
    gradient = Deflated(source, torch.Size((6, 9)), along.square().sum(1), lambda: direction)
    return gradient, source.dense() - along.unsqueeze(2) * direction


def built(shape, name):
    torch.manual_seed(0)
    return CASES[shape][name](F64)


def sides(gradient):
    """The left and the right sides at every position of a structure, (N, p) and (N, d + 1); None where it has none."""
    if isinstance(gradient, Outer):
        return gradient.left.flatten(0, 1), with_one(gradient.right.flatten(0, 1), 1)
    if isinstance(gradient, Indexed):
        hot = torch.nn.functional.one_hot(gradient.index, gradient.num_rows).flatten(0, 1).double()
        return hot, with_one(gradient.right.flatten(0, 1), 0)
    if isinstance(gradient, Patches):
        rows = Rows(gradient.grad_out, gradient.input, gradient.geometry)
        left = gradient.grad_out.movedim(2, -1).flatten(0, -2)
        return left, with_one(rows.unfolded().mT.flatten(0, 1), 1)
    matrices = gradient.dense()
    matrices = matrices.reshape(len(matrices), 1, -1) if matrices.dim() < 3 else matrices.flatten(2)
    return matrices.mT.flatten(0, 1), with_one(matrices.flatten(0, 1), 0)


def with_one(columns, one):
    return torch.cat([columns, torch.full((len(columns), 1), one, dtype=F64)], 1)


def full(moment):
    return torch.diag(moment) if moment.dim() == 1 else moment


def check(gradient, dense):
    factors = torch.tensor([2.0, 0.5, -1.0], dtype=F64)
    scaled = gradient.scaled(factors)
    assert_close(scaled.dense(), dense * factors.view(-1, *(1,) * (dense.dim() - 1)))
    assert_close(scaled.sq_norm(), gradient.sq_norm() * factors.square())
    terms = [sides(term) for term in (gradient.terms if isinstance(gradient, (Ragged, Sum)) else [gradient])]
    for side, found in enumerate(gradient.moments()):
        assert_close(full(found), sum(each[side].T @ each[side] for each in terms))
    ones = gradient.times_one()
    if ones is not None:
        assert_close(ones.sum(0), sum(left.T @ right[:, -1] for left, right in terms))


@pytest.mark.parametrize(("shape", "name"), ALL)
def test_every_structure(shape, name):
    check(*built(shape, name))


@pytest.mark.parametrize("name", [name for name, each in GEOMETRIES.items() if each.groups == 1])
def test_every_convolution(name):
    torch.manual_seed(0)
    check(*GEOMETRIES[name].build(F64))


@pytest.mark.parametrize("name", [name for name, each in GEOMETRIES.items() if each.groups > 1])
def test_groups_of_channels_add_up(name):
    torch.manual_seed(0)
    gradient, _ = GEOMETRIES[name].build(F64)
    _, columns = gradient.moments()
    _, right = sides(gradient)
    assert_close(columns, right.T @ right)


@pytest.mark.parametrize(("shape", "name"), ALL)
def test_no_samples_have_moments_of_zero(shape, name):
    gradient, dense = built(shape, name)
    rows, columns = gradient.pick(torch.empty(0, dtype=torch.int64)).moments()
    p = dense.shape[1] if dense.dim() > 2 else 1
    assert torch.equal(full(rows), torch.zeros(p, p, dtype=F64))
    d = dense[0].numel() // p
    assert torch.equal(columns, torch.zeros(d + 1, d + 1, dtype=F64))


def test_what_is_taken_from_another_structure():
    torch.manual_seed(0)
    check(*deflated())


def test_every_kind_of_structure_is_here():
    kinds = {type(built(shape, name)[0]) for shape, name in ALL} | {Deflated}
    defined = [each for kind in SampleGradient.__subclasses__() for each in kind.__subclasses__() or [kind]]
    assert kinds == {kind for kind in defined if kind.__module__.startswith("lightning_per")}


def test_positions_without_gradient_do_not_count():
    left, right = torch.zeros(2, 3, 2, dtype=F64), torch.randn(2, 3, 4, dtype=F64)
    left[0, 1] = 1.0
    _, columns = Outer(left, right).moments()
    row = with_one(right[0, 1:2], 1)
    assert_close(columns, row.T @ row)


def test_a_long_axis_has_its_diagonal_alone(monkeypatch):
    gradient, _ = built((6, 9), "outer-few-positions")
    rows, columns = gradient.moments()
    monkeypatch.setattr(moments, "LONGEST", 6)
    same, diagonal = gradient.moments()
    assert_close(same, rows)
    assert_close(diagonal, columns.diagonal())
