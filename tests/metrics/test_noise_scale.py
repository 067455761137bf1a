"""GradientNoiseScale against NumPy, against a problem solved by hand, and however a step is split."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_persample.errors import PerSampleError
from lightning_persample.metrics import GradientNoiseScale, noise_scale_terms, simple_noise_scale
from tests.metrics import reference
from tests.metrics.reference import sq_norms


def some_grads(steps: int = 5, batch_size: int = 6, signal: float = 1.0) -> list[torch.Tensor]:
    return [signal + torch.randn(batch_size, 3, dtype=torch.float64) for _ in range(steps)]


def metric_of(grads, decay=None, parts=None):
    """One call for each part of each step; all samples in one call without parts."""
    metric = GradientNoiseScale(decay)
    for each in grads:
        norms, mean = sq_norms(each)
        for part in norms.split(parts or len(norms)):
            metric.update(part, mean, len(norms))
    return metric


@pytest.mark.parametrize("batch_size", [2, 6])
def test_terms_equal_the_sample_covariance(batch_size):
    (grads,) = some_grads(1, batch_size)
    S, G2 = noise_scale_terms(*sq_norms(grads))
    assert (S.item(), G2.item()) == pytest.approx(reference.noise_scale_terms(grads.numpy()), rel=1e-12)


def test_terms_of_parts_add_up():
    (grads,) = some_grads(1, 7)
    norms, mean = sq_norms(grads)
    parts = [noise_scale_terms(part, mean, 7) for part in norms.split((1, 4, 2))]
    for whole, *pieces in zip(noise_scale_terms(norms, mean), *parts, strict=True):
        assert sum(pieces).item() == pytest.approx(whole.item(), rel=1e-12)


def test_of_a_models_gradients_is_the_ratio_of_averages():
    grads = [reference.flat(each) for each in reference.model_grads()]
    expected = np.mean([reference.noise_scale_terms(each.numpy()) for each in grads], axis=0)
    metric = metric_of(grads)
    assert list(metric.terms()) == ["S", "G2"]
    assert [value.item() for value in metric.terms().values()] == pytest.approx(expected, rel=1e-12)
    ratio = expected[0] / expected[1] if expected[1] > 0 else math.nan
    assert metric.compute().item() == pytest.approx(ratio, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_moving_averages(decay):
    grads = some_grads()
    S, G2 = zip(*(reference.noise_scale_terms(each.numpy()) for each in grads), strict=True)
    expected = reference.moving_average(S, decay), reference.moving_average(G2, decay)
    metric = metric_of(grads, decay)
    assert [value.item() for value in metric.terms().values()] == pytest.approx(expected, rel=1e-12)
    assert metric.compute().item() == pytest.approx(expected[0] / expected[1], rel=1e-12)


@pytest.mark.parametrize("parts", [1, 4, 5])
@pytest.mark.parametrize("decay", [None, 0.9])
@pytest.mark.parametrize("signal", [0.1, 1.0])
def test_split_steps_equal_whole_ones(parts, decay, signal):
    grads = some_grads(20, signal=signal)
    whole, split = metric_of(grads, decay), metric_of(grads, decay, parts)
    for name, value in (whole.terms() | whole.counts()).items():
        assert (split.terms() | split.counts())[name].item() == pytest.approx(value.item(), rel=1e-12), name
    assert split.compute().item() == pytest.approx(whole.compute().item(), rel=1e-12, nan_ok=True)
    if signal == 0.1:
        assert 0 < whole.counts()["negative_steps"] < 20


def test_equal_steps_are_counted_apart():
    (grads,) = some_grads(1)
    for parts in (2, 6):
        assert metric_of([grads] * 3, parts=parts).counts()["steps"].item() == 3


def test_many_steps_take_48_bytes_each():
    metric = GradientNoiseScale()
    norms = torch.ones(2)
    for step in range(2500):
        metric.update(norms, 0.5 + step)
    assert len(metric.parts) < 1100
    assert sum(part.numel() * part.element_size() for part in metric.parts) == 48 * 2500
    assert metric.counts()["steps"].item() == 2500


def test_one_sample_has_no_noise_scale():
    alone, others = some_grads(2, 1), some_grads(3)
    metric = metric_of(alone)
    assert math.isnan(metric.compute())
    assert metric.counts()["undefined_steps"].item() == 2
    assert metric.counts()["steps"].item() == 0
    mixed = metric_of([others[0], *alone, *others[1:]], decay=0.9)
    assert mixed.compute().item() == metric_of(others, decay=0.9).compute().item()
    S, G2 = noise_scale_terms(torch.ones(1), 1.0)
    assert math.isnan(S)
    assert math.isnan(G2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("parts", [None, 2])
@pytest.mark.parametrize("of_mean", [True, False])
def test_a_step_that_is_not_finite_is_left_out_whole(value, parts, of_mean):
    grads = some_grads()
    metric = metric_of(grads[:2], 0.9, parts)
    norms, mean = sq_norms(grads[2])
    mean = torch.tensor(value) if of_mean else mean
    norms[4] = value
    for part in norms.split(parts or 6):
        metric.update(part, mean, 6)
    for each in grads[3:]:
        metric.update(*sq_norms(each))
    rest = metric_of(grads[:2] + grads[3:], 0.9)
    assert metric.compute().item() == pytest.approx(rest.compute().item(), rel=1e-12)
    counts = {name: count.item() for name, count in metric.counts().items()}
    negative = rest.counts()["negative_steps"].item()
    assert counts == {
        "steps": 4,
        "skipped_steps": 1,
        "undefined_steps": 0,
        "nonfinite": 1,
        "negative_steps": negative,
    }
    S, G2 = noise_scale_terms(norms, mean)
    assert math.isnan(S)
    assert math.isnan(G2)


def test_a_negative_average_gives_no_ratio():
    grads = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    metric = metric_of([grads, grads])
    assert math.isnan(metric.compute())
    assert metric.terms()["G2"].item() == -1
    assert metric.counts()["negative_steps"].item() == 2
    assert simple_noise_scale(torch.tensor([2.0, 2.0, 2.0]), torch.tensor([4.0, 0.0, -1.0])).tolist()[0] == 0.5
    assert simple_noise_scale(torch.tensor([2.0, 2.0]), torch.tensor([0.0, -1.0])).isnan().all()


def test_an_empty_batch_is_no_step():
    metric = metric_of(some_grads(2))
    before = metric.compute().item()
    metric.update(torch.empty(0), torch.tensor(math.nan))
    assert metric.compute().item() == before
    assert metric.counts()["steps"].item() == 2


def test_a_step_without_samples_has_no_place_in_an_average():
    first, last = some_grads(2)
    metric = metric_of([first], 0.5)
    metric.update(torch.empty(0), 1.0, batch_size=6)
    metric.update(*sq_norms(last))
    assert metric.compute().item() == pytest.approx(metric_of([first, last], 0.5).compute().item(), rel=1e-12)


def test_processes_that_misread_the_batch_size_are_told():
    metric = metric_of(some_grads(1))
    metric._sync_dist(lambda parts, group: [parts, parts])
    with pytest.raises(PerSampleError, match=r"^step 0 was given several whole batches: batch_size is"):
        metric._steps()


@pytest.mark.parametrize(("column", "name"), [(4, "batch_size"), (5, "sq_norm_of_mean")])
def test_processes_that_disagree_are_told(column, name):
    metric = metric_of(some_grads(1), parts=3)

    def other_process(parts, group):
        others = parts.clone()
        others[:, column] *= 2
        return [parts, others]

    metric._sync_dist(other_process)
    with pytest.raises(PerSampleError, match=f"^parts of step 0 disagree on {name}: "):
        metric._steps()


def test_linear_regression_has_the_noise_scale_worked_out_by_hand():
    # y = x.w* + e with x ~ N(0, I) in d dimensions and e ~ N(0, s^2); loss 1/2 (x.w - y)^2, so that with u = w - w*
    #   g = x (x.u - e),   G = E g = E[x x^T] u = u.
    # E ||g||^2 = E[||x||^2 (x.u)^2] + E[||x||^2] s^2 = (d + 2) ||u||^2 + d s^2, as E[x x^T ||x||^2] = (d + 2) I. Hence
    #   |G|^2 = ||u||^2,   tr(Sigma) = E ||g||^2 - ||G||^2 = (d + 1) ||u||^2 + d s^2.
    # Steps are independent: the standard error of an average over steps is std / sqrt(steps), and that of the ratio
    # r = S / |G|^2 follows from the spread of S - r |G|^2.
    dimensions, noise, steps, batch_size = 5, 0.7, 400, 16
    generator = torch.Generator().manual_seed(7)
    u = torch.linspace(0.2, 1.0, dimensions, dtype=torch.float64)
    x = torch.randn(steps, batch_size, dimensions, generator=generator, dtype=torch.float64)
    e = noise * torch.randn(steps, batch_size, generator=generator, dtype=torch.float64)
    grads = x * (x @ u - e)[:, :, None]
    true_G2 = u.square().sum().item()
    true_S = (dimensions + 1) * true_G2 + dimensions * noise**2

    metric = metric_of(grads)
    each = np.array([reference.noise_scale_terms(grad.numpy()) for grad in grads])
    errors = each.std(0, ddof=1) / math.sqrt(steps)
    found = [value.item() for value in metric.terms().values()]
    assert abs(found[0] - true_S) < 4 * errors[0]
    assert abs(found[1] - true_G2) < 4 * errors[1]
    true_ratio = true_S / true_G2
    ratio_error = (each[:, 0] - true_ratio * each[:, 1]).std(ddof=1) / math.sqrt(steps) / true_G2
    assert abs(metric.compute().item() - true_ratio) < 4 * ratio_error
    assert ratio_error < 0.1 * true_ratio  # the bound means something


def test_numbered_steps_come_in_any_order():
    grads = some_grads()
    metric = GradientNoiseScale(0.5)
    for step, rows in [(7, [0, 1]), (3, [2]), (7, [2, 3, 4]), (9, [0, 1, 2, 3, 4, 5]), (3, [0, 1, 3, 4, 5]), (7, [5])]:
        norms, mean = sq_norms(grads[step % 5])
        metric.update(norms[rows], mean, 6, step=step)
    whole = metric_of([grads[3], grads[2], grads[4]], 0.5)
    assert metric.compute().item() == pytest.approx(whole.compute().item(), rel=1e-12)
    assert metric.counts()["steps"].item() == 3


def test_numbers_of_steps_are_given_always_or_never():
    metric = metric_of(some_grads(1))
    metric.update(*sq_norms(some_grads(1)[0]), step=1)
    with pytest.raises(PerSampleError, match=r"^update\(\) was called with step and without; give it at every call or"):
        metric.compute()


def test_a_number_that_comes_twice_is_refused():
    metric = GradientNoiseScale()
    for each in some_grads(2):
        metric.update(*sq_norms(each), step=1)
    with pytest.raises(PerSampleError, match=r"^parts of step 1 disagree on sq_norm_of_mean: "):
        metric.compute()


def test_a_step_weighs_by_its_number_of_samples() -> None:
    """A small batch after a large one hardly changes the ratio."""
    metric, decayed = GradientNoiseScale(), GradientNoiseScale(decay=0.9)
    torch.manual_seed(0)
    steps = [torch.randn(size, 3, dtype=torch.float64) + 1 for size in (64, 5, 64, 2)]
    for grads in steps:
        for each in (metric, decayed):
            each.update(grads.square().sum(1), grads.mean(0).square().sum())
    terms = np.array([reference.noise_scale_terms(grads.numpy()) for grads in steps])
    sizes = np.array([len(grads) for grads in steps])
    for each, weights in ((metric, sizes), (decayed, sizes * 0.9 ** np.arange(3, -1, -1))):
        S, G2 = np.average(terms, axis=0, weights=weights)
        assert each.compute().item() == pytest.approx(S / G2, rel=1e-12)


def sums_of(steps, groups):
    """What `update_sums` takes of steps: of each group of columns the sums of squared norms and those of the means."""
    sums = torch.stack([torch.stack([grads[:, columns].square().sum() for columns in groups]) for grads in steps])
    means = [torch.stack([grads[:, columns].mean(0).square().sum() for columns in groups]) for grads in steps]
    sizes = torch.tensor([float(len(grads)) for grads in steps])
    return sums, torch.stack(means), sizes, sizes


@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("decay", [None, 0.9])
def test_steps_given_as_sums_take_no_memory_and_have_a_value_for_each_group(decay, together):
    grads, groups = some_grads(), [slice(None), slice(0, 1), slice(1, None)]
    metric = GradientNoiseScale(decay)
    given = [*grads[:2], torch.full_like(grads[0], math.nan), *grads[2:]]
    for start in range(0, len(given), together):
        own = metric.update_sums(*sums_of(given[start : start + together], groups))
        for step, found in zip(given[start:], own.unbind(1), strict=False):
            wanted = [reference.noise_scale_terms(step[:, columns].numpy()) for columns in groups]
            assert found.T.numpy() == pytest.approx(np.array(wanted), rel=1e-12, nan_ok=True)
    assert metric.folded.shape == (3, 3)
    assert metric.parts == []
    for place, columns in enumerate(groups):
        each = [reference.noise_scale_terms(grad[:, columns].numpy()) for grad in grads]
        S, G2 = np.average(each, axis=0, weights=[1.0] * 5 if decay is None else 0.9 ** np.arange(4, -1, -1))
        assert metric.terms()["S"][place].item() == pytest.approx(S, rel=1e-12)
        ratio = S / G2 if G2 > 0 else math.nan
        assert metric.compute()[place].item() == pytest.approx(ratio, rel=1e-12, nan_ok=True)
    metric.reset()
    metric.update(*sq_norms(grads[0]))
    S, G2 = reference.noise_scale_terms(grads[0].numpy())
    assert metric.compute().item() == pytest.approx(S / G2 if G2 > 0 else math.nan, nan_ok=True)


def test_sums_over_some_of_the_samples_stand_for_the_whole_step():
    (grads,) = some_grads(1)
    norms, mean = sq_norms(grads)
    variance = 6 / 5 * (norms[:4].mean() - mean).item()
    found = GradientNoiseScale().update_sums(
        norms[None, :4].sum(1), mean[None], torch.tensor([6.0]), torch.tensor([4.0])
    )
    assert found.flatten().tolist() == pytest.approx([variance, mean.item() - variance / 6], rel=1e-12)


@pytest.mark.parametrize("decay", [None, 0.5])
def test_steps_given_as_sums_come_before_those_of_update_and_are_not_exchanged(decay):
    grads = some_grads()
    metric, sent = GradientNoiseScale(decay), []
    for each in grads[:2]:
        sums, means, *sizes = sums_of([each], [slice(None)])
        metric.update_sums(sums[:, 0], means[:, 0], *sizes)
    for each in grads[2:]:
        alone = metric_of([each]).compute().item()
        assert metric(*sq_norms(each)).item() == pytest.approx(alone, rel=1e-12, nan_ok=True)
    whole = [value.item() for value in metric_of(grads, decay).terms().values()]
    assert [value.item() for value in metric.terms().values()] == pytest.approx(whole, rel=1e-12)
    metric._sync_dist(lambda state, group: sent.append(state.shape) or [state])
    assert sent == [(3, 6)]
    assert [value.item() for value in metric.terms().values()] == pytest.approx(whole, rel=1e-12)


def test_equal_samples_have_no_negative_variance():
    grads = torch.full((6, 3), 0.1, dtype=torch.float64)
    norms, mean = sq_norms(grads)
    for scale in (1.0, 1 + 1e-15):
        S, _ = noise_scale_terms(norms, mean * scale)
        assert 0 <= S.item() < 1e-15
