"""Influence functions: EK-FAC, LoGra and TRAK, with inverses of second moments of the gradients for the Hessian's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from typing_extensions import Unpack

from lightning_persample.errors import OptionError
from lightning_persample.influence.products import (
    COSINE,
    Between,
    Pair,
    Products,
    Rows,
    ScoreOptions,
    StoreOrPath,
    Transform,
    align,
    checked_damping,
    cholesky_factor,
    given_gradients,
    normalized,
    second_moments,
    solved_by,
)
from lightning_persample.influence.scores import PairScores
from lightning_persample.influence.store import GradientStore
from lightning_persample.options import check_option

EKFAC_DAMPING, LOGRA_DAMPING = 5e-5, 2e-4

_MATRIX_BYTES = 1 << 30


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
    one = "with an EigenProjection that was fitted there"
    text = (
        "g^T (Lambda + damping)^-1 g' in the eigenbasis of each layer, Lambda the mean of g^2 by direction: positive "
        "where a small step along (Lambda + damping)^-1 g lowers the test sample's loss"
    )
    terms = partial(ekfac_terms, damping=damping, absolute=absolute)
    return _scored("ekfac", train, test, text, terms, one, options, normalize=normalize)


def logra(
    train: StoreOrPath,
    test: StoreOrPath,
    damping: float = LOGRA_DAMPING,
    *,
    shrinkage: float | None = None,
    robust: bool | None = None,
    absolute: bool = False,
    normalize: bool = False,
    **options: Unpack[ScoreOptions],
) -> PairScores:
    """The influence ``sum_b g_b(z')^T (H_b + damping_b I)^-1 g_b(z)`` over parameters b.

    H_b is ``(1 / n) sum_i g_b(z_i) g_b(z_i)^T`` over the training samples: the empirical Fisher information of one
    parameter's projected gradient, in place of the Hessian. With `Projection`, which projects both sides of a matrix's
    gradient, it is LoGra's; gradients in full give the same with no projection. A training row that is not finite is
    left out of H.

    In the directions of an `EigenProjection` H_b is nearly diagonal, and entries beside the diagonal are mostly the
    noise of n samples, and of a few with large gradients above all. They are multiplied by ``1 - shrinkage`` there,
    half of them by default: so it lies between LoGra (0) and `ekfac` (1), and foretells retraining better than either.
    And it is `robust`, ``H_b = (1 / n) sum_i g_b g_b^T / sqrt(1 + ||g_b||^2 / m)``, m the mean of ``||g_b||^2``: a
    sample that is fitted badly counts with its error, as in the Hessian of a cross entropy, and not with its square.

    Cost: ``2 n m K`` operations for n training and m test samples of K columns in all, and for each parameter of k
    columns ``2 n k^2 + k^3 / 3 + 2 m k^2``; one more reading of the training store if `robust`.

    Args:
        train: gradients of the training samples at one checkpoint, (n, K); a store or its folder.
        test: gradients of the test samples there, (m, K); a store or its folder.
        damping: what is added to the diagonal of every H_b, above 0, as a multiple of the sum of its eigenvalues.
        shrinkage: by what share, from 0 to 1, the entries of H_b beside its diagonal are made smaller; None is 0.5 for
            stores of an `EigenProjection`, and 0 for others, whose directions are random.
        robust: whether samples with large gradients count less in H_b; None is True for stores of an `EigenProjection`,
            and False for others.
        absolute: whether `damping` is added as it is, to all alike.
        normalize: whether each score is divided by the roots of both samples' scores with themselves: the cosine under
            ``(H + damping)^-1``, which is not led by gradients that are large. It takes ``2 n k^2`` operations more for
            each parameter. A gradient of zeros has none.
        options: `max_memory`, `dtype`, `device` and `top`, see `ScoreOptions`; the less memory, the more often the
            stores are read. H_b of the largest parameter is held in any case, twice. None holds matrices of 1 GiB; with
            `top`, more of them are made again for each block of test samples.

    Returns:
        The scores, (n, m).

    It is an `OptionError` where `damping` is not above 0, `shrinkage` is none from 0 to 1, or the stores have several
    checkpoints.

    Reference: Choe et al. 2024, What is your data worth to GPT? LLM-scale data valuation with influence functions,
    section 3, arXiv 2405.13954; the damping is that of Grosse et al. 2023, Studying large language model generalization
    with influence functions, arXiv 2308.03296; the shrinkage that of Schäfer and Strimmer 2005, A shrinkage approach
    to large-scale covariance matrix estimation, table 2, target D, doi 10.2202/1544-6115.1175; the weights of `robust`
    are those of an M-estimator of scatter, Maronna 1976, Robust M-estimators of multivariate location and scatter.
    """
    checked_damping(damping, absolute, above_zero=True)
    is_share = isinstance(shrinkage, int | float) and not isinstance(shrinkage, bool) and 0 <= shrinkage <= 1
    check_option("shrinkage", shrinkage, shrinkage is None or is_share, "None or a number from 0 to 1")
    check_option("robust", robust, robust is None or isinstance(robust, bool), "None, True or False")
    text = (
        "g^T (H + damping)^-1 g', H the mean of g g^T by parameter: positive where a small step along "
        "(H + damping)^-1 g lowers the test sample's loss"
    )
    terms = partial(logra_terms, damping=damping, shrinkage=shrinkage, robust=robust, absolute=absolute)
    return _scored("logra", train, test, text, terms, "as a rule the last", options, normalize=normalize, share=2)


def _scored(
    name: str,
    train: StoreOrPath,
    test: StoreOrPath,
    text: str,
    terms_of: Callable[[Rows, Products], Between],
    one: str,
    options: ScoreOptions,
    *,
    normalize: bool,
    share: int = 1,
) -> PairScores:
    """The scores at one checkpoint, of terms that are made of its training rows."""
    check_option("normalize", normalize, isinstance(normalize, bool), "True or False")
    train, test = given_gradients(train, test, name)
    aligned = align(train, test, why_one=f"take {name}(train.at(checkpoint), test.at(checkpoint)) of one, {one}")
    (pair,), products = aligned.pairs, Products(options, share)
    between = terms_of(pair[0], products)
    terms = normalized(between, pair, products) if normalize else partial(between, *pair)
    return aligned.scored(name, COSINE + text if normalize else text, terms, products)


def ekfac_terms(train: Rows, products: Products, damping: float, absolute: bool) -> Between:
    """What the scores of two sides add up to, Lambda that of these training rows."""
    store = train.store
    if not store.manifest.is_eigen:
        raise OptionError(
            f"the train store has projection={store.manifest.projection!r}, and ekfac takes one of an eigenbasis: "
            "collect both stores with projection=EigenProjection.fit(module, dataloader); logra takes any"
        )
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


def logra_terms(
    train: Rows,
    products: Products,
    damping: float,
    shrinkage: float | None = None,
    robust: bool | None = None,
    absolute: bool = False,
) -> Between:
    """What the scores of two sides add up to, H that of these training rows."""
    store, is_eigen = train.store, train.store.manifest.is_eigen
    share = (0.5 if is_eigen else 0.0) if shrinkage is None else shrinkage
    has_weights = is_eigen if robust is None else robust
    groups = _groups(store, products.max_memory)

    def factors_of(names: list[str]) -> Iterator[tuple[slice, Tensor | None]]:
        """For each parameter its columns and L with ``L L^T = H + damping I``, H shrunk; None where it is 0."""
        own, scales = store.parameters(names), None
        columns = [own.columns_of(name) for name in names]
        if has_weights:
            squares, count = second_moments(own, columns, products, diagonal=True)
            scales = [float(each.sum()) / count for each in squares]
        moments, count = second_moments(own, columns, products, scales=scales)
        for name, part, moment in zip(names, columns, moments, strict=True):
            moment /= count
            if not moment.diagonal().any():  # its part of every training gradient is 0, and so is that of every score
                yield part, None
                continue
            if share:
                diagonal = moment.diagonal().clone()
                moment *= 1 - share
                moment.diagonal().copy_(diagonal)
            unit = 1.0 if absolute else float(moment.diagonal().sum())
            what = f"H of {name!r}, of {count} samples and {len(moment)} columns,"
            yield part, products.held(cholesky_factor(moment, damping, unit, what))

    def solvers() -> Iterator[tuple[list[str], Transform]]:
        for names in groups:
            yield names, partial(solved_by, factors=[*factors_of(names)])

    made = [*solvers()] if len(groups) == 1 else None

    def between(train: Rows, test: Rows) -> Iterator[Pair]:
        for names, solved in solvers() if made is None else made:
            one, other = (rows._replace(store=rows.store.parameters(names)) for rows in (train, test))
            yield one, other._replace(transform=solved)

    return between


def _groups(store: GradientStore, max_memory: int | None) -> list[list[str]]:
    """The parameters, in groups whose matrices fit in half of `max_memory`; a larger one is a group of its own."""
    groups: list[list[str]] = []
    room = 0
    for parameter in store.manifest.parameters:
        needed = 16 * (parameter.stop - parameter.start) ** 2  # H and its factor
        if needed > room:
            groups.append([])
            room = _MATRIX_BYTES if max_memory is None else max_memory // 2
        groups[-1].append(parameter.name)
        room -= needed
    return groups


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
