"""Declared weights of the samples are compared with those in the loss, where the calls that made it say them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample import PerSampleRecord, expanded_weights
from lightning_persample.batch_axis.sample_weights import OTHER_WEIGHTS

BATCH, CLASSES = 8, 5
_GENERATOR = torch.Generator().manual_seed(0)
LENGTHS = torch.randint(3, 12, (BATCH,), generator=_GENERATOR)
TOKENS = torch.randint(1, CLASSES, (BATCH, 12), generator=_GENERATOR)
TOKENS = TOKENS.masked_fill(torch.arange(12) >= LENGTHS[:, None], 0)
INPUTS, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]
MASK = TARGETS != 0
CLASS_WEIGHTS = torch.tensor([0.1, 1.0, 2.0, 3.0, 4.0])
IMPORTANCE = torch.rand(BATCH, generator=_GENERATOR) + 0.5

COUNTS = MASK.sum(1)
SHARES = COUNTS / COUNTS.sum()
UNSHIFTED = (TOKENS != 0).sum(1) / (TOKENS != 0).sum()
EQUAL = torch.full((BATCH,), 1 / BATCH)
ONES = torch.ones(BATCH)
OF_CLASSES = CLASS_WEIGHTS[TARGETS].sum(1)
OF_COUNTED = (CLASS_WEIGHTS[TARGETS] * MASK).sum(1)
MODEL = nn.Sequential(nn.Embedding(CLASSES, 6), nn.Linear(6, CLASSES))

Loss = Callable[[], Tensor]


def by_row(reduction: str = "mean", **options: Any) -> Tensor:
    return F.cross_entropy(MODEL(INPUTS).transpose(1, 2), TARGETS, reduction=reduction, **options)


def flat(reduction: str = "mean", **options: Any) -> Tensor:
    return F.cross_entropy(MODEL(INPUTS).reshape(-1, CLASSES), TARGETS.reshape(-1), reduction=reduction, **options)


def log_likelihood(reduction: str = "mean", **options: Any) -> Tensor:
    scores = MODEL(INPUTS).reshape(-1, CLASSES).log_softmax(1)
    return F.nll_loss(scores, TARGETS.reshape(-1), reduction=reduction, **options)


def masked(losses: Callable[..., Tensor]) -> Tensor:
    return losses("none") * (MASK if losses is by_row else MASK.flatten())


def record_of(loss: Loss, weights: Tensor) -> tuple[PerSampleRecord, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batch = (INPUTS, TARGETS, MASK, IMPORTANCE)
        with expanded_weights(MODEL, batch, batch_size=BATCH, loss_reduction=weights) as capture:
            loss().backward()
    return capture.record, [str(each.message) for each in caught]


def in_place() -> Tensor:
    loss = by_row(ignore_index=0)
    loss += by_row(ignore_index=0) * 0.5
    return loss


CASES: dict[str, tuple[Loss, list[Tensor], list[Tensor]]] = {}  # the loss, weights that are right, weights that are not
for _name, _losses in {"by_row": by_row, "flat": flat, "nll_loss": log_likelihood}.items():
    CASES |= {
        f"{_name}-ignore_index": (
            lambda f=_losses: f(ignore_index=0),
            [SHARES, ONES / COUNTS.sum(), SHARES.half()],
            [COUNTS.float(), UNSHIFTED, EQUAL, ONES],
        ),
        f"{_name}-class_weights": (
            lambda f=_losses: f(weight=CLASS_WEIGHTS),
            [OF_CLASSES / OF_CLASSES.sum(), ONES / OF_CLASSES.sum()],
            [EQUAL, SHARES, OF_CLASSES],
        ),
        f"{_name}-both": (
            lambda f=_losses: f(weight=CLASS_WEIGHTS, ignore_index=0),
            [OF_COUNTED / OF_COUNTED.sum(), COUNTS / OF_COUNTED.sum()],
            [SHARES, OF_CLASSES / OF_CLASSES.sum()],
        ),
        f"{_name}-plain": (lambda f=_losses: f(), [EQUAL, ONES / MASK.numel()], [SHARES, ONES, COUNTS.float()]),
        f"{_name}-sum": (lambda f=_losses: f("sum", ignore_index=0), [ONES, COUNTS.float()], [SHARES, EQUAL]),
        f"{_name}-sum_then_divide": (
            lambda f=_losses: f("sum", ignore_index=0) / MASK.sum(),
            [SHARES, ONES / COUNTS.sum()],
            [COUNTS.float(), UNSHIFTED, EQUAL],
        ),
        f"{_name}-sum_over_a_number": (
            lambda f=_losses: f("sum", ignore_index=0) / MASK.sum().item(),
            [SHARES, ONES / COUNTS.sum()],
            [UNSHIFTED, EQUAL],
        ),
        f"{_name}-masked_mean": (
            lambda f=_losses: masked(f).sum() / MASK.sum(),
            [SHARES, ONES / COUNTS.sum()],
            [COUNTS.float(), UNSHIFTED, EQUAL],
        ),
        f"{_name}-selected": (
            lambda f=_losses: f("none")[MASK if f is by_row else MASK.flatten()].mean(),
            [SHARES, ONES / COUNTS.sum()],
            [COUNTS.float(), UNSHIFTED, EQUAL],
        ),
        f"{_name}-times_a_number": (
            lambda f=_losses: 3 * f(ignore_index=0) / 2,
            [SHARES, SHARES * 1.5],
            [COUNTS.float(), UNSHIFTED, EQUAL],
        ),
        f"{_name}-several": (
            lambda f=_losses: (
                f(ignore_index=0) + 0.3 * f(ignore_index=0, label_smoothing=0.1)
                if f is not log_likelihood
                else f(ignore_index=0) + 0.3 * f(ignore_index=0)
            ),
            [SHARES],
            [COUNTS.float(), UNSHIFTED, EQUAL],
        ),
        f"{_name}-penalty": (
            lambda f=_losses: f(ignore_index=0) + 0.3 * MODEL[1].weight.square().sum(),
            [SHARES],
            [COUNTS.float(), UNSHIFTED, EQUAL],
        ),
    }
CASES |= {
    "rows_added_up": (lambda: masked(by_row).sum(1).sum() / MASK.sum(), [SHARES], [UNSHIFTED, COUNTS.float()]),
    "means_of_rows": (lambda: (masked(by_row).sum(1) / COUNTS).mean(), [EQUAL], [COUNTS.float()]),
    "written_by_hand": (
        lambda: (MODEL(INPUTS).square().mean(2) * MASK).sum() / MASK.sum(),
        [SHARES],
        [UNSHIFTED, COUNTS.float()],
    ),
    "mean_by_hand": (lambda: MODEL(INPUTS).square().mean(), [EQUAL, SHARES], [COUNTS.float()]),
    "mse_loss": (lambda: F.mse_loss(MODEL(INPUTS)[..., 0], TARGETS.float()), [EQUAL], [COUNTS.float()]),
    "mask_inside": (lambda: (MODEL(INPUTS)[..., 0] * MASK).square().mean(), [EQUAL, COUNTS / MASK.numel()], []),
    "importance": (lambda: (by_row("none").mean(1) * IMPORTANCE).sum(), [IMPORTANCE, ONES], [SHARES, EQUAL]),
    "two_losses": (
        lambda: F.mse_loss(MODEL(INPUTS)[..., 0], TARGETS.float()) + by_row(),
        [EQUAL],
        [SHARES, COUNTS.float()],
    ),
    "in_place": (in_place, [SHARES], [UNSHIFTED, EQUAL]),
    "learned_scale": (lambda: by_row(ignore_index=0) * MODEL[1].bias.sum().exp(), [SHARES], [UNSHIFTED]),
    "log": (lambda: by_row(ignore_index=0).log(), [SHARES, EQUAL], []),  # of which nothing is known
}


@pytest.mark.parametrize("name", CASES)
def test_weights_that_fit_are_no_trouble_and_others_are_named(name: str) -> None:
    loss, right, wrong = CASES[name]
    for weights in right:
        record, texts = record_of(loss, weights)
        assert record.weighting == (), record.weighting
        assert not any("loss_reduction" in text for text in texts), texts
    for weights in wrong:
        record, texts = record_of(loss, weights)
        assert [text.startswith(OTHER_WEIGHTS) for text in record.weighting] == [True]
        assert any("weighted differently from loss_reduction" in text for text in texts)


def test_the_text_names_both_sums_and_the_ratios() -> None:
    record, texts = record_of(lambda: by_row(ignore_index=0), COUNTS.float())
    total = int(COUNTS.sum())
    (found,) = record.weighting
    assert found == (
        f"the weights that loss_reduction gives add up to {total}, those in the loss to 1; a sample's is {total} times "
        "what it is in the loss"
    )
    assert texts == [
        "The samples are weighted differently from loss_reduction, so their own gradients are off by a factor: "
        "reported is each sample's share of the batch gradient, divided by the weight that loss_reduction gives it. "
        f"check_per_sample_gradients compares them sample by sample.\n- {found}"
    ]
    ratios = UNSHIFTED / SHARES
    (found,) = record_of(lambda: by_row(ignore_index=0), UNSHIFTED)[0].weighting
    assert found.endswith(f"a sample's is {ratios.min():.4g} to {ratios.max():.4g} times what it is in the loss")
    (found,) = record_of(lambda: MODEL(INPUTS).square().mean(), COUNTS.float())[0].weighting
    assert found == f"the weights that loss_reduction gives add up to {total}, and those of a mean to 1"


def test_samples_without_a_target_that_counts_may_have_any_weight() -> None:
    targets = TARGETS.clone()
    targets[2] = 0
    counts = (targets != 0).sum(1)
    for weights in (counts / counts.sum(), (counts / counts.sum()).clamp_min(1e-3)):
        with expanded_weights(MODEL, (INPUTS, targets), loss_reduction=weights) as capture:
            F.cross_entropy(MODEL(INPUTS).transpose(1, 2), targets, ignore_index=0).backward()
        assert capture.record.weighting == ()


def test_losses_of_parts_of_the_batch() -> None:
    def loss() -> Tensor:
        halves = [
            F.cross_entropy(MODEL(inputs).transpose(1, 2), targets, ignore_index=0)
            for inputs, targets in zip(INPUTS.split(4), TARGETS.split(4), strict=True)
        ]
        return (halves[0] + halves[1]) / 2

    right = torch.cat([part / part.sum() for part in COUNTS.split(4)]) / 2
    assert record_of(loss, right)[0].weighting == ()
    assert record_of(loss, right * 2)[0].weighting == ()  # (the 2 may belong to the samples' own losses)
    assert len(record_of(loss, SHARES)[0].weighting) == 1


@pytest.mark.parametrize("function", [torch.sqrt, torch.square, torch.log])
def test_a_function_of_samples_weighed_unequally_is_named_also_where_the_weights_are_declared(function) -> None:
    """Weights that fit the sum excuse it, and not what is computed from the sum."""
    record, _ = record_of(lambda: function(masked(by_row).sum() / MASK.sum()), SHARES)
    (found,) = record.mixing
    assert found.startswith(f"`{function.__name__}` of a value computed over the whole batch is not a sum over samples")
