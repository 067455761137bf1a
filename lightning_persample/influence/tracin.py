"""TracIn: by how much the steps of a training that a sample took part in lowered the loss of another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_persample.errors import UnsupportedError
from lightning_persample.influence._alignment import Rows, align, align_steps, learning_rates_of
from lightning_persample.influence._products import add_products
from lightning_persample.influence.pairs import PairScores
from lightning_persample.influence.store import GradientStore

__all__ = ["tracin", "tracin_cp"]


def tracin_cp(
    train: GradientStore,
    test: GradientStore,
    learning_rates: Sequence[float] | None = None,
    *,
    max_memory: int | None = None,
) -> PairScores:
    """TracInCP: ``sum_k eta_k g_k(z) . g_k(z')`` over checkpoints k.

    Checkpoints stand for the steps between them, as if each sample took part once. The
    sum over checkpoints and that over parameters may change places, so that a model whose parameters have different
    learning rates is the sum of ``tracin_cp(train.parameters(names), test.parameters(names), rates)`` over its groups.
    Cost: ``2 n m K`` operations for each checkpoint. The same numbers by dask, in the order of the stores' rows:
    the sum over k of ``eta_k * train.at(k).to_dask().astype("float64") @ test.at(k).to_dask().astype("float64").T``.

    Args:
        train: gradients of the training samples, (n, K) at each checkpoint.
        test: gradients of the test samples, (m, K), at the same checkpoints.
        learning_rates: eta of each checkpoint, in the order of ``train.checkpoints``; None takes what the stores'
            manifests say.
        max_memory: bytes for what is held at a time besides the scores; None reads blocks of 64 MiB.

    Returns:
        The scores, (n, m).

    Reference: Pruthi et al. 2020, Estimating training data influence by tracing gradient descent, section 3,
    arXiv 2002.08484.
    """
    aligned = align(train, test)
    rates = learning_rates_of(train, test, learning_rates, "tracin_cp")
    scores = aligned.zeros()
    for (train_rows, test_rows), rate in zip(aligned.pairs, rates, strict=True):
        factors = torch.full((len(train_rows.places),), rate, dtype=torch.float64)
        add_products(scores, train_rows, test_rows, max_memory=max_memory, factors=factors)
    text = (
        "sum over checkpoints of learning_rate * g . g': positive where steps of SGD on the training sample lower the "
        "test sample's loss"
    )
    return aligned.scored("tracin_cp", scores, text)


def tracin(train: GradientStore, test: GradientStore, *, max_memory: int | None = None) -> PairScores:
    """TracIn along a training: ``sum_t eta_t w_t g_t(z) . g_t(z')`` over the rows t of sample z.

    Equation 1 of the reference, with the weight w that the sample had in the step, 1/B for a mean over batches of B.
    For plain SGD, the sum over the samples of a step is the first-order change of the test sample's loss in this step,
    so that the sum of all scores of a test sample is by how much the training lowered its loss, but for terms of second
    order, if every step was written. For other optimizers it is the same formula, with g and not the direction of the
    optimizer. Samples that more steps were written of have larger scores: write every step, or compare with care.

    Cost: ``2 m K`` operations for each row and m test samples.

    Args:
        train: gradients that were written during training, any number of rows of K columns for each sample.
        test: gradients of the test samples, (m, K) at each step that `train` has rows of.
        max_memory: bytes for what is held at a time besides the scores; None reads blocks of 64 MiB.

    Returns:
        The scores, (n, m).

    Reference: Pruthi et al. 2020, Estimating training data influence by tracing gradient descent, equation 1,
    arXiv 2002.08484.
    """
    aligned = align_steps(train, test)
    scores = aligned.zeros()
    for train_rows, test_rows in aligned.pairs:
        factors = _column(train_rows, "learning_rate") * _column(train_rows, "weight")
        add_products(scores, train_rows, test_rows, max_memory=max_memory, factors=factors)
    text = (
        "sum over the sample's rows of learning_rate * weight * g . g': positive where its own part in the steps of "
        "SGD lowered the test sample's loss"
    )
    return aligned.scored("tracin", scores, text)


def _column(rows: Rows, name: str) -> Tensor:
    values = torch.tensor(rows.store.rows[name], dtype=torch.float64)
    missing = int(values.isnan().sum())
    if missing:
        raise UnsupportedError(
            f"{missing} of {len(values)} rows of the train store at one step have no {name!r}, which tracin needs: its "
            "rows are to be written during training; for gradients that were collected at checkpoints, use tracin_cp"
        )
    return values
