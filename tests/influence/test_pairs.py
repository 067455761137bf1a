"""The matrix of scores, and what is read off it."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_persample import OptionError
from lightning_persample.influence import PairScores

SCORES = torch.tensor([[1.0, 0.5], [-2.0, 4.0], [0.0, 0.5], [1.0, math.nan]], dtype=torch.float64)


def pairs() -> PairScores:
    return PairScores("grad_dot", (3, 5, 8, 9), (0, 4), SCORES, "positive: helps", unknown=2, nonfinite=1)


def test_top_of_one_test_sample_leaves_nan_out_and_keeps_ties_in_order():
    assert pairs().top(3, test=0) == [(3, 1.0), (9, 1.0), (8, 0.0)]
    assert pairs().top(test=4) == [(5, 4.0), (3, 0.5), (8, 0.5)]


def test_top_without_a_test_sample_is_of_the_mean():
    assert pairs().top(2) == [(5, 1.0), (3, 0.75)]


def test_mean_over_the_test_samples():
    found = pairs().mean()
    assert (found.name, found.index, found.unknown) == ("grad_dot", (3, 5, 8, 9), 2)
    assert found.scores[:3].tolist() == [0.75, 1.0, 0.25]
    assert math.isnan(found.scores[3])
    assert found.counts.tolist() == [2, 2, 2, 2]
    assert found.convention == "mean over 2 test samples; positive: helps"


def test_a_dataframe_has_training_samples_as_rows():
    frame = pairs().to_pandas()
    assert (frame.index.tolist(), frame.columns.tolist()) == ([3, 5, 8, 9], [0, 4])
    assert (frame.index.name, frame.columns.name) == ("train", "test")
    assert frame.loc[5, 4] == 4.0


def test_a_test_sample_without_scores_is_refused():
    with pytest.raises(
        OptionError, match=r"test=3 is not the index of a test sample: 2 have scores, the first .* 0, 4"
    ):
        pairs().top(test=3)
    with pytest.raises(OptionError, match="k=0 is not allowed"):
        pairs().top(0)
