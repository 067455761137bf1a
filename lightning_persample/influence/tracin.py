"""TracIn: by how much the steps of a training that a sample took part in lowered the loss of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_persample.errors import OptionError, UnsupportedError
from lightning_persample.influence.pairs import PairScores
from lightning_persample.influence.products import (
    Rows,
    StoreOrPath,
    align,
    align_steps,
    given_gradients,
    learning_rates_of,
)


def tracin_cp(
    train: StoreOrPath,
    test: StoreOrPath,
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
        train: gradients of the training samples, (n, K) at each checkpoint; a store or its folder.
        test: gradients of the test samples, (m, K), at the same checkpoints; a store or its folder.
        learning_rates: eta of each checkpoint, in the order of ``train.checkpoints``; None takes what the stores'
            manifests say.
        max_memory: bytes for what is held at a time besides the scores; None reads blocks of 64 MiB.

    Returns:
        The scores, (n, m).

    Reference: Pruthi et al. 2020, Estimating training data influence by tracing gradient descent, section 3,
    arXiv 2002.08484.
    """
    train, test = given_gradients(train, test, "tracin_cp")
    aligned = align(train, test)
    rates = learning_rates_of(train, test, learning_rates, "tracin_cp")
    scores = aligned.products(rates, max_memory=max_memory)
    text = (
        "sum over checkpoints of learning_rate * g . g': positive where small steps of SGD on the training sample at "
        "the checkpoints lower the test sample's loss"
    )
    return aligned.scored("tracin_cp", scores, text)


def tracin(
    train: StoreOrPath,
    test: StoreOrPath,
    learning_rates: Mapping[int, float] | None = None,
    *,
    max_memory: int | None = None,
) -> PairScores:
    """TracIn along a training: ``sum_t eta_t w_t g_t(z) . g_t(z')`` over the rows t of sample z.

    Equation 1 of the reference, with the weight w that the sample had in the step, 1/B for a mean over batches of B.
    For plain SGD, the sum over the samples of a step is the first-order change of the test sample's loss in this step,
    so that the sum of all scores of a test sample is by how much the training lowered its loss, but for terms of second
    order, if every step was written. For other optimizers it is the same formula, with g and not the direction of the
    optimizer. Samples that more steps were written of have larger scores: write every step, or compare with care.

    Where groups of parameters have different learning rates, the rate of a row is a mean that is right for its own norm
    alone, and differs from row to row, which is refused. Add up the groups then, with the rates of each:
    ``tracin(train.parameters(names), test.parameters(names), {step: rate, ...})``.

    Cost: ``2 m K`` operations for each row and m test samples.

    Args:
        train: gradients that were written during training, any number of rows of K columns for each sample; a
            store or its folder.
        test: gradients of the test samples, (m, K) at each step that `train` has rows of; a store or its folder.
        learning_rates: eta of each step; None takes what the rows say.
        max_memory: bytes for what is held at a time besides the scores; None reads blocks of 64 MiB.

    Returns:
        The scores, (n, m).

    Raises:
        OptionError: `learning_rates` has none of a step.

    Reference: Pruthi et al. 2020, Estimating training data influence by tracing gradient descent, equation 1,
    arXiv 2002.08484.
    """
    train, test = given_gradients(train, test, "tracin")
    aligned = align_steps(train, test)
    factors = []
    for step, (train_rows, _) in zip(aligned.names, aligned.pairs, strict=True):
        rate = _rate(train_rows, step) if learning_rates is None else learning_rates.get(step)
        if rate is None:
            raise OptionError(
                f"learning_rates has none of step {step}: pass one for each of the {len(aligned.names)} steps that the "
                "train store has rows of"
            )
        factors.append(rate * _column(train_rows, "weight"))
    scores = aligned.products(factors, max_memory=max_memory)
    text = (
        "sum over the sample's rows of learning_rate * weight * g . g': positive where its own part in the steps of "
        "SGD lowered the test sample's loss, to first order"
    )
    return aligned.scored("tracin", scores, text)


def _rate(rows: Rows, step: int) -> float:
    """The one learning rate of a step."""
    rates = _column(rows, "learning_rate")
    least, most = float(rates.min()), float(rates.max())
    if most - least > 1e-9 * abs(most):
        raise UnsupportedError(
            f"the rows of step {step} have learning rates from {least:.6g} to {most:.6g}, as where groups of "
            "parameters have different ones: add up tracin(train.parameters(names), test.parameters(names), "
            "learning_rates={step: rate, ...}) over the groups"
        )
    return most


def _column(rows: Rows, name: str) -> Tensor:
    values = torch.tensor(rows.store.rows[name], dtype=torch.float64)
    missing = int(values.isnan().sum())
    if missing:
        raise UnsupportedError(
            f"{missing} of {len(values)} rows of the train store at one step have no {name!r}, which tracin needs: its "
            "rows are to be written during training; for gradients that were collected at checkpoints, use tracin_cp"
        )
    return values
