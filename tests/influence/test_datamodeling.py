"""The linear datamodeling score against scipy, column by column."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from lightning_persample import OptionError
from lightning_persample.influence import PairScores, linear_datamodeling_score


def drawn(seed=0, n=9, m=4, s=12):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(n, m, generator=generator, dtype=torch.float64)
    mask = torch.rand(s, n, generator=generator) < 0.5
    return scores, mask, torch.randn(s, m, generator=generator)


@pytest.mark.parametrize("are_tied", [False, True])
def test_it_is_spearmans_correlation_over_the_subsets(are_tied):
    scores, mask, outputs = drawn()
    if are_tied:
        scores, outputs = scores.round(), outputs.round()
    expected = []
    for j in range(scores.shape[1]):
        sums = [math.fsum(float(scores[i, j]) for i in range(len(scores)) if row[i]) for row in mask]
        expected.append(spearmanr(sums, outputs[:, j].numpy()).statistic)
    found = linear_datamodeling_score(scores, mask, outputs)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_indices_are_those_of_the_samples():
    scores, mask, outputs = drawn()
    names = tuple(range(100, 120))[: len(scores)]
    pairs = PairScores("ekfac", names, (0, 1, 2, 3), scores, "positive: helps")
    subsets = [[names[i] for i in row.nonzero().flatten()] for row in mask]
    expected = linear_datamodeling_score(scores, mask, outputs)
    assert torch.equal(linear_datamodeling_score(pairs, subsets, outputs), expected)
    assert torch.equal(linear_datamodeling_score(pairs, [torch.tensor(each) for each in subsets], outputs), expected)
    assert torch.equal(linear_datamodeling_score(pairs, mask.numpy(), outputs), expected)
    equal = torch.tensor([[0, 1], [2, 3], [7, 8]])
    dense = torch.zeros(3, 9, dtype=torch.bool).scatter_(1, equal, True)
    assert torch.equal(
        linear_datamodeling_score(scores, equal, outputs[:3]), linear_datamodeling_score(scores, dense, outputs[:3])
    )


def test_perfect_opposite_and_unknown():
    scores, mask, _ = drawn()
    sums = mask.double() @ scores
    outputs = torch.stack([sums[:, 0].exp(), -sums[:, 1], torch.ones(12), sums[:, 3]], 1)
    scores[2, 3] = math.nan
    found = linear_datamodeling_score(scores, mask, outputs)
    assert found[:2].tolist() == pytest.approx([1, -1])
    assert found[2:].isnan().all()


def test_what_is_refused():
    scores, mask, outputs = drawn()
    text = r"outputs are of shape \(4, 12\), with 12 subsets and scores of shape \(9, 4\): allowed is .*, \(12, 4\)"
    with pytest.raises(OptionError, match=text):
        linear_datamodeling_score(scores, mask, outputs.T)
    with pytest.raises(OptionError, match=r"with 1 subsets .*: allowed is one output for each of two or more subsets"):
        linear_datamodeling_score(scores, mask[:1], outputs[:1])
    with pytest.raises(OptionError, match=r"subsets are a mask of shape \(12, 8\); allowed is \(subsets, 9\)"):
        linear_datamodeling_score(scores, mask[:, 1:], outputs)
    with pytest.raises(OptionError, match=r"numbers 0 and 1 of shape \(12, 9\), .*: pass a mask as subsets.bool\(\)"):
        linear_datamodeling_score(scores, mask.long(), outputs)
    with pytest.raises(OptionError, match="sample 0 stands twice in a subset"):
        linear_datamodeling_score(scores, [[0, 1, 0], [1]], outputs[:2])
    with pytest.raises(OptionError, match=r"sample 9 of a subset has no scores: 9 samples have, the first .* 0, 1, 2"):
        linear_datamodeling_score(scores, [[0, 9], [1]], outputs[:2])
