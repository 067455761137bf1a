"""TRAK: the influence on the margin of a classifier, from a linear model of its projected gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from typing_extensions import Unpack

from lightning_persample.errors import OptionError
from lightning_persample.influence.products import (
    Pair,
    Products,
    ScoreOptions,
    StoreOrPath,
    align,
    checked_damping,
    cholesky_factor,
    given_gradients,
    second_moments,
    solved_by,
)
from lightning_persample.influence.scores import PairScores
from lightning_persample.influence.store import GradientStore


def correct_class_margin(logits: Tensor, targets: Tensor) -> Tensor:
    """The margin ``f = log(p / (1 - p))`` of the right class, whose gradients `trak` is made of.

    It is ``logit_y - logsumexp(the other logits)``, which is finite where p rounds to 1. The column that `trak` needs
    beside it, 1 - p, is ``torch.sigmoid(-f)``.

    >>> correct_class_margin(torch.tensor([[0.0, 0.0], [100.0, 0.0]]), torch.tensor([0, 1]))
    tensor([   0., -100.])

    Args:
        logits: (..., C), for 2 classes or more.
        targets: indices of the right classes, (...).

    Returns:
        The margins, (...); differentiable.

    Raises:
        OptionError: there are fewer than two classes.

    Reference: Park et al. 2023, TRAK: attributing model behavior at scale, section 3.1, arXiv 2303.14186.
    """
    classes = logits.shape[-1]
    if classes < 2:
        raise OptionError(
            f"logits of shape {tuple(logits.shape)} have {classes} class, and a margin is between two or more: for one "
            "logit of a binary classifier, the margin is the logit itself, with the sign of the label"
        )
    right = torch.arange(classes, device=logits.device) == targets.unsqueeze(-1)
    others = logits.masked_fill(right, -torch.inf).logsumexp(-1)
    return logits.masked_fill(~right, 0).sum(-1) - others


def trak(
    train: StoreOrPath,
    test: StoreOrPath,
    damping: float = 0.3,
    *,
    absolute: bool = False,
    one_minus_p: str = "one_minus_p",
    **options: Unpack[ScoreOptions],
) -> PairScores:
    """TRAK: ``phi(z')^T (Phi^T Phi + damping I)^-1 phi(z) (1 - p(z))``, averaged over models as the reference does.

    Both stores hold gradients phi of the margin of the right class (`correct_class_margin`), not of the loss, and those
    of one model at each checkpoint; Phi has the training samples' as its rows. Over several checkpoints, the mean of
    ``1 - p(z)`` multiplies the mean of the rest, as in the reference, whose soft thresholding is left out.

    Training on z raises its margin by ``eta (1 - p(z)) phi(z)`` to first order, so that a positive score raises the
    margin of z' and lowers its loss. A training row that is not finite is left out of ``Phi^T Phi``.

    Cost, for each checkpoint: ``2 n K^2 + K^3 / 3 + 2 m K^2 + 2 n m K`` operations for n training and m test samples.

    Args:
        train: margin gradients of the training samples, (n, K) at each checkpoint; a store or its folder.
        test: margin gradients of the test samples, (m, K), at the same checkpoints; a store or its folder.
        damping: what is added to the diagonal of ``Phi^T Phi``, 0 or more, as a multiple of the mean of its eigenvalues
            at each checkpoint. With 0 it has no inverse where the logits are of a layer with bias, as the
            gradients of a margin sum to 0 over the logits, or where samples are fewer than columns.
        absolute: whether `damping` is added as it is.
        one_minus_p: the column of the training store that has 1 - p, in [0, 1].
        options: `max_memory`, `dtype`, `device` and `top`, see `ScoreOptions`. Two matrices (K, K) are held besides,
            and with `top` and several models each one is made again for each block of test samples.

    Returns:
        The scores, (n, m).

    Raises:
        OptionError: `damping` is negative, or the training store has no such column.

    Reference: Park et al. 2023, TRAK: attributing model behavior at scale, section 3,
    arXiv 2303.14186.
    """
    checked_damping(damping, absolute, above_zero=False)
    train, test = given_gradients(train, test, "trak")
    if one_minus_p not in train.manifest.columns:
        raise OptionError(
            f"the train store has no column {one_minus_p!r}, the 1 - p of each sample that trak needs: collect it "
            f"beside the gradients as torch.sigmoid(-correct_class_margin(logits, targets)). Its columns are "
            f"{', '.join(train.manifest.columns) or 'none'}"
        )
    aligned = align(train, test)
    mistaken = torch.zeros(len(aligned.train_index), dtype=torch.float64)
    for train_rows, _ in aligned.pairs:
        mistaken[train_rows.places] += _probabilities(train_rows.store, one_minus_p)
    products = Products(options)

    def terms() -> Iterator[Pair]:
        for train_rows, test_rows in aligned.pairs:
            size = train_rows.store.num_columns
            (gram,), count = second_moments(train_rows.store, [slice(0, size)], products)
            unit = 1.0 if absolute else float(gram.diagonal().mean())
            factor = cholesky_factor(gram, damping, unit, f"Phi^T Phi of {count} samples and {size} columns")
            solved = partial(solved_by, factors=[(slice(0, size), products.held(factor))])
            factors = mistaken[train_rows.places] / len(aligned.pairs) ** 2
            yield train_rows._replace(factors=factors), test_rows._replace(transform=solved)

    text = (
        "(1 - p) phi^T (Phi^T Phi + damping)^-1 phi': positive where a small step along "
        "(Phi^T Phi + damping)^-1 phi raises the test sample's margin, and so lowers its loss"
    )
    made = [*terms()] if len(aligned.pairs) == 1 else None
    return aligned.scored("trak", text, terms if made is None else lambda: made, products)


def _probabilities(store: GradientStore, name: str) -> Tensor:
    """A column of probabilities, (rows,), float64."""
    values = torch.tensor(store.rows[name], dtype=torch.float64)
    wrong = ~((values >= 0) & (values <= 1)) & ~store.nonfinite
    if wrong.any():
        place = int(wrong.nonzero()[0])
        raise OptionError(
            f"{int(wrong.sum())} of {len(values)} rows of the train store have no probability in column {name!r}, as "
            f"sample {store.rows['sample_index'][place]} has {float(values[place])}: trak needs 1 - p, in [0, 1]"
        )
    return values
