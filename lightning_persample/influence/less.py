"""LESS: the influence of training with Adam, as the cosine between its step and a test sample's gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from lightning_persample.errors import OptionError
from lightning_persample.gradients.norms import as_real
from lightning_persample.gradients.precision import accumulation_dtype
from lightning_persample.influence.products import (
    Products,
    ScoreOptions,
    StoreOrPath,
    align,
    direction_of,
    learning_rates_of,
    opened,
    unit_rows,
)
from lightning_persample.influence.scores import PairScores


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
