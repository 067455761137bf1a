"""EK-FAC: influence functions with a Hessian that is diagonal in the eigenbasis of each layer's two sides."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from typing_extensions import Unpack

from lightning_persample.errors import OptionError
from lightning_persample.influence.products import (
    COSINE,
    Between,
    Products,
    Rows,
    ScoreOptions,
    StoreOrPath,
    align,
    checked_damping,
    given_gradients,
    normalized,
    second_moments,
)
from lightning_persample.influence.scores import PairScores
from lightning_persample.influence.store import GradientStore
from lightning_persample.options import check_option

EKFAC_DAMPING = 5e-5

_ONE = "take ekfac(train.at(checkpoint), test.at(checkpoint)) of one, with an EigenProjection that was fitted there"


def ekfac(
    train: StoreOrPath,
    test: StoreOrPath,
    damping: float = EKFAC_DAMPING,
    *,
    absolute: bool = False,
    normalize: bool = False,
    **options: Unpack[ScoreOptions],
) -> PairScores:
    """The influence ``sum_k g_k(z') g_k(z) / (lambda_k + damping_b)`` over directions k of an `EigenProjection`.

    lambda_k is ``(1 / n) sum_i g_k(z_i)^2`` over the training samples: the diagonal of the empirical Fisher information
    in the Kronecker-factored eigenbasis, corrected by the samples' own second moments, in place of the Hessian. Both
    stores are collected with one `EigenProjection`, and the store keeps all that is needed: with ``dim=None`` it is
    EK-FAC's, and with fewer directions that of the gradients' parts within them. A training row that is not finite is
    left out of lambda.

    Cost: ``2 n m K`` operations for n training and m test samples of K columns in all, and one more reading of the
    training store. No matrix is inverted: K may be as large as the disk.

    Args:
        train: gradients of the training samples at one checkpoint, (n, K); a store or its folder.
        test: gradients of the test samples there, (m, K); a store or its folder.
        damping: what is added to every lambda_k, above 0, as a multiple of the sum of the lambda of the parameter b
            that k is of: most of them are far below their mean, and however many there are, the sum stays. The less it
            is, the more the directions count in which samples hardly differ.
        absolute: whether `damping` is added as it is, for all parameters alike.
        normalize: whether each score is divided by the roots of both samples' scores with themselves: the cosine under
            ``(Lambda + damping)^-1``, which is not led by gradients that are large. A gradient of zeros has none.
        options: `max_memory`, `dtype`, `device` and `top`, see `ScoreOptions`.

    Returns:
        The scores, (n, m).

    It is an `OptionError` where `damping` is not above 0, the stores have several checkpoints, or were not collected
    with an `EigenProjection`.

    Reference: George et al. 2018, Fast approximate natural gradient descent in a Kronecker-factored eigenbasis,
    arXiv 1806.03884; Grosse et al. 2023, Studying large language model generalization with influence functions,
    section 2.4 and equation 20, arXiv 2308.03296.
    """
    checked_damping(damping, absolute, above_zero=True)
    check_option("normalize", normalize, isinstance(normalize, bool), "True or False")
    train, test = given_gradients(train, test, "ekfac")
    check_eigenbasis(train)
    aligned = align(train, test, why_one=_ONE)
    (pair,), products = aligned.pairs, Products(options)
    between = ekfac_terms(pair[0], products, damping, absolute)
    terms = normalized(between, pair, products) if normalize else partial(between, *pair)
    text = (
        "g^T (Lambda + damping)^-1 g' in the eigenbasis of each layer, Lambda the mean of g^2 by direction: positive "
        "where a small step along (Lambda + damping)^-1 g lowers the test sample's loss"
    )
    return aligned.scored("ekfac", COSINE + text if normalize else text, terms, products)


def check_eigenbasis(train: GradientStore) -> None:
    """Refuse gradients in other directions."""
    if not train.manifest.is_eigen:
        raise OptionError(
            f"the train store has projection={train.manifest.projection!r}, and ekfac takes one of an eigenbasis: "
            "collect both stores with projection=EigenProjection.fit(module, dataloader); logra takes any"
        )


def ekfac_terms(train: Rows, products: Products, damping: float, absolute: bool) -> Between:
    """What the scores of two sides add up to, Lambda that of these training rows."""
    store = train.store
    (moments,), count = second_moments(store, [slice(0, store.num_columns)], products, diagonal=True)
    weights = torch.zeros_like(moments)
    for parameter in store.manifest.parameters:
        own = moments[parameter.start : parameter.stop] / count
        if own.any():  # else its part of every training gradient is 0, and so is its part of every score
            added = damping if absolute else damping * own.sum()
            weights[parameter.start : parameter.stop] = 1 / (own + added)
    weights = products.held(weights)

    def weighted(values: Tensor) -> Tensor:
        return values * weights

    return lambda train, test: [(train, test._replace(transform=weighted))]
