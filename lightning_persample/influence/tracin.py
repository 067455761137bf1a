"""Inner products of two samples' gradients: GradDot, GradCos and LESS at some weights, TracIn along a training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy
import torch
from torch import Tensor
from typing_extensions import Unpack

from lightning_persample.errors import OptionError, UnsupportedError
from lightning_persample.gradients.norms import as_real
from lightning_persample.gradients.precision import accumulation_dtype
from lightning_persample.influence.influence_functions import EKFAC_DAMPING, LOGRA_DAMPING, ekfac_terms, logra_terms
from lightning_persample.influence.products import (
    Between,
    Products,
    Rows,
    ScoreOptions,
    StoreOrPath,
    align,
    align_steps,
    checked_damping,
    described,
    direction_of,
    given_gradients,
    given_rates,
    is_rate,
    known_rows,
    learning_rates_of,
    opened,
    unit_rows,
)
from lightning_persample.influence.scores import LedgerSums, PairScores, SampleScores
from lightning_persample.influence.store import GradientStore
from lightning_persample.options import check_option

_ONE = "take {name}(train.at(checkpoint), test.at(checkpoint)) of one, or tracin_cp for a sum over all of them"


def grad_dot(train: StoreOrPath, test: StoreOrPath, **options: Unpack[ScoreOptions]) -> PairScores:
    """GradDot: ``g(z) . g(z')``, by how much a step of SGD on z lowers the loss of z', to first order, for a rate of 1.

    It is TracInCP with one checkpoint. Of projected gradients it is an unbiased estimate. Cost: ``2 n m K`` operations
    for n training and m test samples and K columns. The same numbers by dask, in the order of the stores' rows:
    ``train.to_dask().astype("float64") @ test.to_dask().astype("float64").T``.

    Args:
        train: gradients of the training samples at one checkpoint, (n, K); a store or its folder.
        test: gradients of the test samples there, (m, K); a store or its folder.
        options: `max_memory`, `dtype`, `device` and `top`, see `ScoreOptions`.

    Returns:
        The scores, (n, m).

    Reference: Pruthi et al. 2020, Estimating training data influence by tracing gradient descent, arXiv 2002.08484;
    Charpiat et al. 2019, Input similarity from the neural network perspective, arXiv 2102.05262.
    """
    train, test = given_gradients(train, test, "grad_dot")
    aligned = align(train, test, why_one=_ONE.format(name="grad_dot"))
    text = "g . g': positive where a small step of SGD on the training sample lowers the test sample's loss"
    return aligned.scored("grad_dot", text, aligned.terms(), Products(options))


def grad_cos(train: StoreOrPath, test: StoreOrPath, **options: Unpack[ScoreOptions]) -> PairScores:
    """GradCos: ``g(z) . g(z') / (||g(z)|| ||g(z')||)``, from -1 to 1, and 1 of a sample with itself.

    A gradient of zeros has no direction, and its scores are nan. Cost: ``2 n m K`` operations, as of `grad_dot`, and
    ``3 n K`` for the norms for each block of test samples.

    Args:
        train: gradients of the training samples at one checkpoint, (n, K); a store or its folder.
        test: gradients of the test samples there, (m, K); a store or its folder.
        options: `max_memory`, `dtype`, `device` and `top`, see `ScoreOptions`.

    Returns:
        The scores, (n, m).

    Reference: Charpiat et al. 2019, Input similarity from the neural network perspective,
    arXiv 2102.05262.
    """
    train, test = given_gradients(train, test, "grad_cos")
    aligned = align(train, test, why_one=_ONE.format(name="grad_cos"))
    text = "cosine of g and g': positive where a small step of SGD on the training sample lowers the test sample's loss"
    return aligned.scored("grad_cos", text, aligned.terms(transform=unit_rows), Products(options))


def tracin_cp(
    train: StoreOrPath,
    test: StoreOrPath,
    learning_rates: Sequence[float] | None = None,
    **options: Unpack[ScoreOptions],
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
        options: `max_memory`, `dtype`, `device` and `top`, see `ScoreOptions`.

    Returns:
        The scores, (n, m).

    Reference: Pruthi et al. 2020, Estimating training data influence by tracing gradient descent, section 3,
    arXiv 2002.08484.
    """
    train, test = given_gradients(train, test, "tracin_cp")
    aligned = align(train, test)
    rates = learning_rates_of(train, test, learning_rates, "tracin_cp")
    text = (
        "sum over checkpoints of learning_rate * g . g': positive where small steps of SGD on the training sample at "
        "the checkpoints lower the test sample's loss"
    )
    return aligned.scored("tracin_cp", text, aligned.terms(rates), Products(options))


def tracin(
    train: StoreOrPath,
    test: StoreOrPath,
    learning_rates: Mapping[int, float] | None = None,
    **options: Unpack[ScoreOptions],
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
        options: `max_memory`, `dtype`, `device` and `top`, see `ScoreOptions`.

    Returns:
        The scores, (n, m).

    Raises:
        OptionError: `learning_rates` has none of a step, or a value that is no finite number.

    Reference: Pruthi et al. 2020, Estimating training data influence by tracing gradient descent, equation 1,
    arXiv 2002.08484.
    """
    given: Any = {} if learning_rates is None else learning_rates
    is_allowed = isinstance(given, Mapping) and all(map(is_rate, given.values()))
    check_option("learning_rates", given, is_allowed, "None or a dict that has a finite number for each step")
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
    text = (
        "sum over the sample's rows of learning_rate * weight * g . g': positive where its own part in the steps of "
        "SGD lowered the test sample's loss, to first order"
    )
    return aligned.scored("tracin", text, aligned.terms(factors), Products(options))


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


def adam_direction(
    grads: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    *,
    max_exp_avg_sq: Tensor | None = None,
) -> Tensor:
    """What ``torch.optim.Adam`` would step along, were a sample's gradient that of its next step.

    For each sample's gradient g, with the optimizer's state (m, v) after s steps and t = s + 1, it is
    ``m_t / (1 - beta1^t) / (sqrt(v_t / (1 - beta2^t)) + eps)``, where ``m_t = beta1 m + (1 - beta1) g`` and
    ``v_t = beta2 v + (1 - beta2) g^2``: Gamma of section 3.1 of the reference. With a learning rate of eta the
    parameter moves by ``-eta`` times the direction. It is AdamW's, too, whose decay of the weights has nothing to do
    with the gradient; for the weight decay of Adam itself, add ``weight_decay * parameter`` to `grads`.

    It is not linear in g and takes each entry alone, so that it comes before any projection. Cost: 10 operations for
    each entry of `grads`.

    >>> adam_direction(torch.tensor([[3.0], [-0.5]]), torch.zeros(1), torch.zeros(1), 0, eps=0.0)
    tensor([[ 1.],
            [-1.]])

    Args:
        grads: gradients of one parameter, (B, *shape).
        exp_avg: m of that parameter in the optimizer's state, (*shape).
        exp_avg_sq: v of that parameter, (*shape).
        step: s, how many steps the state has behind it, 0 or more; a number or the tensor in the state.
        betas: the optimizer's.
        eps: the optimizer's.
        max_exp_avg_sq: that of the state, (*shape), of an optimizer with ``amsgrad=True``, and None of any other.

    Returns:
        The directions, (B, *shape), in float32 at least.

    Raises:
        OptionError: a state of another shape than a gradient, or a negative step.

    Reference: Xia et al. 2024, LESS: selecting influential data for targeted instruction tuning, section 3.1,
    arXiv 2402.04333; Kingma and Ba 2015, Adam, algorithm 1, arXiv 1412.6980.
    """
    states = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "max_exp_avg_sq": max_exp_avg_sq}
    for name, state in states.items():
        if state is not None and state.shape != grads.shape[1:]:
            raise OptionError(
                f"{name} has shape {tuple(state.shape)}, but a sample's gradient has {tuple(grads.shape[1:])}: pass "
                "the state of the parameter that the gradients are of"
            )
    if grads.is_complex():  # torch takes real and imaginary parts for entries of their own
        most = None if max_exp_avg_sq is None else as_real(max_exp_avg_sq)
        averages = as_real(exp_avg), as_real(exp_avg_sq)
        parts = adam_direction(as_real(grads), *averages, step=step, betas=betas, eps=eps, max_exp_avg_sq=most)
        return torch.view_as_complex(parts)
    t = float(step) + 1
    if t < 1:
        raise OptionError(f"step={step!r} is not allowed: pass the number of steps behind the state, 0 or more")
    beta1, beta2 = betas
    dtype = accumulation_dtype(grads, exp_avg)
    grads, exp_avg, exp_avg_sq = (tensor.to(grads.device, dtype) for tensor in (grads, exp_avg, exp_avg_sq))
    first = exp_avg * beta1 + grads * (1 - beta1)
    second = exp_avg_sq * beta2 + grads.square() * (1 - beta2)
    if max_exp_avg_sq is not None:
        second = torch.maximum(second, max_exp_avg_sq.to(grads.device, dtype))
    return first / (1 - beta1**t) / ((second / (1 - beta2**t)).sqrt() + eps)


def less(
    train_directions: StoreOrPath,
    test: StoreOrPath,
    learning_rates: Sequence[float] | None = None,
    **options: Unpack[ScoreOptions],
) -> PairScores:
    """LESS: ``sum_k eta_k cos(g_k(z'), Gamma_k(z))`` over checkpoints k.

    Definition 3.1 of the reference: Gamma is what Adam would step along for the sample (`adam_direction`), taken of the
    gradient in full and projected afterwards; of the test sample it is the gradient itself. The reference means the
    test gradients of a subtask before the cosine, and eta is the mean learning rate of an epoch.

    Cost: ``2 n m K`` operations for each checkpoint, and ``3 n K`` for the norms for each block of test samples.

    Args:
        train_directions: Adam's directions for the training samples, (n, K) at each checkpoint; a store or its folder.
        test: gradients of the test samples, (m, K), at the same checkpoints; a store or its folder.
        learning_rates: eta of each checkpoint, in the order of ``train_directions.checkpoints``; None takes what the
            stores' manifests say.
        options: `max_memory`, `dtype`, `device` and `top`, see `ScoreOptions`.

    Returns:
        The scores, (n, m). Those of a direction or gradient of zeros are nan.

    Raises:
        OptionError: the test store holds directions and not gradients, or the training store gradients.

    Reference: Xia et al. 2024, LESS: selecting influential data for targeted instruction tuning, definition 3.1,
    arXiv 2402.04333.
    """
    train_directions, test = opened(train_directions), opened(test)
    direction = direction_of(test)
    if direction is not None:
        raise OptionError(
            f"the test store was written with direction={direction!r}, but of test samples less takes the gradients: "
            "collect them with direction=None, or pass the stores the other way round"
        )
    direction = direction_of(train_directions)
    if direction != "adam":
        raise OptionError(
            f"the train store was written with direction={direction!r}, but of training samples less takes what Adam "
            "would step along: collect them with direction='adam'"
        )
    aligned = align(train_directions, test)
    rates = learning_rates_of(train_directions, test, learning_rates, "less")
    text = (
        "sum over checkpoints of learning_rate * cos(Gamma, g'): positive where a small step of Adam on the training "
        "sample lowers the test sample's loss"
    )
    return aligned.scored("less", text, aligned.terms(rates, unit_rows), Products(options))


_WITHOUT = {
    "learning_rate": "the learning rate of their step is unknown",
    "weight": "their weight in the loss is unknown; pass weighted=False",
}


def self_influence(
    ledger: Any,
    *,
    weighted: bool = False,
    learning_rates: Sequence[float] | None = None,
    score: Literal["ekfac", "logra"] | None = None,
    damping: float | None = None,
) -> SampleScores:
    """Self-influence of each sample along the training: ``sum_t eta_t ||g_t(z)||^2`` over its rows t.

    It is TracInCP's score of a sample with itself (equation 1 of the reference, without its batch size), every captured
    step a checkpoint, with the learning rates that the optimizer used. The weighted form, the sum of
    ``eta_t w_t ||g_t(z)||^2``, has each sample's weight in its step as a factor, 1/B for a mean over batches of B: by
    so much the sample's own part in the steps of plain SGD lowered its own loss, to first order.

    Of a store of gradients it is the same sum over its rows: those of checkpoints, with the learning rates of these, or
    those that a training wrote. The norms are those of the projected gradients then.

    With `score` it is that of influence functions, ``g(z)^T (H + damping)^-1 g(z)`` at the one checkpoint of a store, H
    that of `ekfac` or of `logra`: how far the model would change for this sample, by what leave-one-out would find.

    Every captured step counts alike. A ledger of a part of the steps, such as ``every_n_steps=10``, gives the sum over
    these alone, so that samples with different `counts` are to be compared with care. For optimizers other than SGD it
    is the same formula, with g itself and not the optimizer's direction.

    >>> import pyarrow
    >>> rows = {"sample_index": [3, 5, 3], "norm": [1.0, 2.0, 3.0], "learning_rate": [0.5, 0.5, 0.1]}
    >>> self_influence(pyarrow.table(rows)).top()
    [(5, 2.0), (3, 1.4)]

    Args:
        ledger: its folder, or a ``pyarrow.Table`` from `read_ledger` or its ``to_pandas()``, or a part of one; or a
            `GradientStore`.
        weighted: whether each row has the sample's weight in the step as a factor.
        learning_rates: eta of each checkpoint of a store, in the order of ``store.checkpoints``; None takes what its
            rows or its manifest say.
        score: "ekfac" or "logra", for a store at one checkpoint; None is the sum along the training.
        damping: of this score; None is its default.

    Returns:
        The scores. A row whose norm is nan makes its sample's score nan.

    Reference: Pruthi et al. 2020, Estimating training data influence by tracing gradient descent, arXiv 2002.08484; of
    influence functions, Koh and Liang 2017, Understanding black-box predictions via influence functions, section 5.4,
    arXiv 1703.04730.
    """
    check_option("score", score, score in (None, *_PRECONDITIONED), "None, 'ekfac' or 'logra'")
    if score is not None:
        return _preconditioned(ledger, score, damping, weighted=weighted, learning_rates=learning_rates)
    check_option("damping", damping, damping is None, "None without `score`, of which it is a part")
    factors = ("learning_rate", "weight") if weighted else ("learning_rate",)
    form = "sum of learning_rate * weight * norm^2" if weighted else "sum of learning_rate * norm^2"
    text = (
        f"{form} over the rows: never negative; the larger it is, the more a sample's own steps lowered its own loss, "
        "as those of mislabelled and of hard samples do"
    )
    if isinstance(ledger, GradientStore):
        return _of_store(ledger, factors, learning_rates, text)
    check_option("learning_rates", learning_rates, learning_rates is None, "None for a ledger, whose rows have theirs")
    sums = LedgerSums(
        ledger,
        ("norm", *factors),
        lambda rows: math.prod((rows[name] for name in factors), start=numpy.square(rows["norm"])),
        why="self_influence needs it",
        required={name: _WITHOUT[name] for name in factors},
    )
    return sums.scores("self_influence", text)


def _of_store(
    store: GradientStore, factors: Sequence[str], learning_rates: Sequence[float] | None, convention: str
) -> SampleScores:
    """The self-influence of the samples of a store."""
    numbers = store.checkpoints
    rates = (
        [described(store, number).get("learning_rate") for number in numbers]
        if learning_rates is None
        else given_rates(store, learning_rates)
    )
    store, unknown = known_rows(store, "train")
    values = {name: torch.tensor(store.rows[name], dtype=torch.float64) for name in factors}
    known = torch.tensor([math.nan if rate is None else float(rate) for rate in rates], dtype=torch.float64)
    known = known[numpy.searchsorted(numbers, store.rows["checkpoint"])]
    of_rows = values["learning_rate"]
    values["learning_rate"] = known.where(of_rows.isnan(), of_rows) if learning_rates is None else known
    for name, column in values.items():
        missing = int(column.isnan().sum())
        if missing:
            remedy = (
                "pass learning_rates=[...], one for each checkpoint"
                if name == "learning_rate"
                else "pass weighted=False"
            )
            raise UnsupportedError(f"{missing} of {len(store)} rows of the store have no {name!r}: {remedy}")
    index, places = (torch.from_numpy(each) for each in numpy.unique(store.rows["sample_index"], return_inverse=True))
    own = Rows(store, places)
    product = math.prod(values.values(), start=torch.ones(len(store), dtype=torch.float64))
    scores = Products({}).diagonal(len(index), lambda: [(own._replace(factors=product), own)])
    return SampleScores("self_influence", tuple(index.tolist()), scores, torch.bincount(places), convention, unknown)


_PRECONDITIONED: dict[str, tuple[Callable[..., Between], float]] = {
    "ekfac": (ekfac_terms, EKFAC_DAMPING),
    "logra": (logra_terms, LOGRA_DAMPING),
}


def _preconditioned(store: Any, score: str, damping: float | None, **others: Any) -> SampleScores:
    """The scores of the samples of a store with themselves, by influence functions."""
    given = next((name for name, value in others.items() if value), None)
    if given is not None:
        raise OptionError(f"{given} is of the sum along a training, and score={score!r} is at one checkpoint: leave it")
    if not isinstance(store, GradientStore):
        raise OptionError(f"score={score!r} takes a GradientStore, and ledger is a {type(store).__name__}")
    terms, default = _PRECONDITIONED[score]
    damping = default if damping is None else damping
    checked_damping(damping, False, above_zero=True)
    store, _ = given_gradients(store, store, score)
    aligned = align(store, store, why_one="take self_influence(store.at(checkpoint), score=...) of one")
    ((rows, _),) = aligned.pairs
    products = Products({})
    between = terms(rows, products, damping, absolute=False)
    scores = products.diagonal(len(aligned.train_index), partial(between, rows, rows))
    text = f"g^T (H + damping)^-1 g by {score}: never negative; the larger, the more the model depends on the sample"
    counts = torch.ones(len(scores), dtype=torch.int64)
    return SampleScores("self_influence", aligned.train_index, scores, counts, text, aligned.unknown // 2)
