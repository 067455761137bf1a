"""EK-FAC against a dense eigendecomposition of each layer's moments, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_persample import EigenProjection, OptionError, collect_gradients
from lightning_persample.influence import ekfac, grad_dot
from tests.callbacks.eigen_cases import CASES, loss_of, sample_grads, seen_by, sides, span, with_bias
from tests.influence.loops import simple

EIGEN = {"kind": "eigen", "dim": None, "digest": "0"}


def collected(folder, module, dataset, projection, dtype="float64"):
    options = {"projection": projection, "dtype": dtype, "loss": loss_of}
    return collect_gradients(module, DataLoader(dataset, 4), folder, **options)


def dense(matrices, left, right, damping, *, absolute):
    """g^T H^-1 g', H = Q diag(mean (Q^T g)^2) Q^T + damping of one layer, Q the Kronecker product of eigenvectors."""
    basis = torch.kron(torch.linalg.eigh(span(left))[1], torch.linalg.eigh(span(right))[1])
    rows = matrices.flatten(1)
    hessian = basis @ torch.diag((rows @ basis).square().mean(0)) @ basis.T
    added = damping if absolute else damping * hessian.trace()
    return rows @ torch.linalg.inv(hessian + added * torch.eye(len(hessian), dtype=torch.float64)) @ rows.T


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_dense_formula(case, absolute, tmp_path):
    module, dataset, left, right = seen_by(case)
    projection = EigenProjection.fit(module, DataLoader(dataset, 4), None, loss=loss_of)
    store = collected(tmp_path / "store", module, dataset, projection)
    grads, of_head = sample_grads(module, dataset), sides(module, module.head, dataset)
    inputs = torch.cat([x for x, _ in of_head])
    inputs = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=torch.float64)], 1)
    outputs = torch.cat([g for _, g in of_head])
    expected = dense(with_bias(grads, "layer"), left, right, 0.3, absolute=absolute)
    expected += dense(with_bias(grads, "head"), outputs, inputs, 0.3, absolute=absolute)
    found = ekfac(store, store, 0.3, absolute=absolute)
    torch.testing.assert_close(found.scores, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ekfac(store, store, 0.3, absolute=absolute, max_memory=20_000).scores, found.scores)
    assert found.convention.startswith("g^T (Lambda + damping)^-1 g' in the eigenbasis of each layer")


def test_numbers_by_hand(tmp_path):
    shapes = {"a": (1,), "b": (2,), "c": (1,)}
    values = [[2.0, 1.0, 0.0, 0.0], [0.0, 0.0, 3.0, 0.0], [math.inf, 0.0, 0.0, 0.0]]
    train = simple(tmp_path / "train", values, shapes=shapes, projection=EIGEN)
    test = simple(tmp_path / "test", [[1.0, 2.0, 4.0, 5.0], [math.nan] * 4], shapes=shapes, projection=EIGEN)
    found = ekfac(train, test, 0.1)  # lambda is 2, and (0.5, 4.5) of sum 5
    expected = [2 * 1 / 2.2 + 1 * 2 / 1.0, 3 * 4 / 5.0]
    assert found.scores[:2, 0].tolist() == pytest.approx(expected, rel=1e-12)
    assert found.scores.isnan().tolist() == [[False, True], [False, True], [True, True]]
    roots = [math.sqrt(4 / 2.2 + 1 / 1.0), math.sqrt(9 / 5.0)], math.sqrt(1 / 2.2 + 4 / 1.0 + 16 / 5.0)
    cosines = [each / root / roots[1] for each, root in zip(expected, roots[0], strict=True)]
    normalized = ekfac(train, test, 0.1, normalize=True)
    assert normalized.scores[:2, 0].tolist() == pytest.approx(cosines, rel=1e-12)
    assert torch.equal(normalized.scores.isnan(), found.scores.isnan())
    with pytest.raises(OptionError, match="normalize=1 is not allowed: normalize must be True or False"):
        ekfac(train, test, normalize=1)
    assert found.nonfinite == 2


def test_with_much_damping_it_is_along_grad_dot(tmp_path):
    module, dataset, *_ = seen_by("conv")
    projection = EigenProjection.fit(module, DataLoader(dataset, 4), 9, loss=loss_of)
    store = collected(tmp_path / "store", module, dataset, projection, "float16")
    found = ekfac(store, store, 1e9, absolute=True).scores * 1e9
    torch.testing.assert_close(found, grad_dot(store, store).scores, rtol=1e-6, atol=1e-6)


def test_what_is_refused(tmp_path):
    plain, eigen = simple(tmp_path / "plain", [[1.0]]), simple(tmp_path / "eigen", [[1.0]], projection=EIGEN)
    text = r"projection=None, and ekfac takes one of an eigenbasis: collect both stores with projection=EigenProjection"
    with pytest.raises(OptionError, match=text):
        ekfac(plain, plain)
    for damping in (0, -1.0, math.nan, None):
        with pytest.raises(
            OptionError, match=f"damping={damping} is not allowed: damping must be a number > 0 that is finite"
        ):
            ekfac(eigen, eigen, damping)
    with pytest.raises(OptionError, match="absolute=1 is not allowed: absolute must be True or False"):
        ekfac(eigen, eigen, absolute=1)
