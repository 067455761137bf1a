"""What a score of training samples against test samples is: a matrix, and whose its rows and columns are."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_persample.errors import OptionError
from lightning_persample.influence.scores import SampleScores, extremes, ranked


@dataclass(frozen=True, eq=False, repr=False)
class PairScores:
    """One score for each pair of a training sample and a test sample; ``print`` shows the extremes of their mean.

    Every score of this package has one sign: positive where, to first order, a small step on the training sample at
    that checkpoint lowers the test sample's loss. The step is that of the score, as `convention` says. It is no
    forecast of what retraining without the sample would do.

    >>> scores = torch.tensor([[1.0, 0.5], [-2.0, 4.0], [0.0, 0.5]], dtype=torch.float64)
    >>> pairs = PairScores("grad_dot", (3, 5, 8), (0, 1), scores, "positive: helps")
    >>> pairs.top(1), pairs.top(2, test=0)
    ([(5, 1.0)], [(3, 1.0), (8, 0.0)])
    >>> pairs.bottom(1, test=0)
    [(5, -2.0)]
    >>> pairs
    grad_dot of 3 training samples, mean over 2 test samples
    index  score
        5      1
        3   0.75
        8   0.25

    Attributes:
        name: which score.
        train_index: indices of the training samples in their dataset, ascending.
        test_index: indices of the test samples in theirs, ascending.
        scores: (train, test), float64; nan for a sample with a gradient that is not finite.
        convention: what a positive score means.
        unknown: number of rows, of both stores together, without an index; they are in no score.
        nonfinite: number of rows, of both stores together, that are not finite.
    """

    name: str
    train_index: tuple[int, ...]
    test_index: tuple[int, ...]
    scores: Tensor
    convention: str
    unknown: int = 0
    nonfinite: int = 0

    def __repr__(self) -> str:
        size = f"{len(self.train_index)} training samples, mean over {len(self.test_index)} test samples"
        return f"{self.name} of {size}{extremes(self.train_index, self.scores.mean(1))}"

    def top(self, k: int = 10, *, test: int | None = None) -> list[tuple[int | str, float]]:
        """The training samples with the largest scores, largest first; a score that is nan is left out.

        Args:
            k: how many.
            test: index of the test sample whose scores count; None is for the mean over all of them.

        Returns:
            At most k pairs of index and score.
        """
        return ranked(self.train_index, self._against(test), k)

    def bottom(self, k: int = 10, *, test: int | None = None) -> list[tuple[int | str, float]]:
        """The training samples with the smallest scores, smallest first: below 0, those that harm most.

        Args:
            k: how many; a score that is nan is left out.
            test: index of the test sample whose scores count; None is for the mean over all of them.

        Returns:
            At most k pairs of index and score.
        """
        return ranked(self.train_index, self._against(test), k, largest=False)

    def _against(self, test: int | None) -> Tensor:
        """The scores against a test sample, or their mean over all, (train,)."""
        if test is None:
            return self.scores.mean(1)
        if test not in self.test_index:
            raise OptionError(
                f"test={test!r} is not the index of a test sample: {len(self.test_index)} have scores, "
                f"the first of them {', '.join(map(str, self.test_index[:5]))}"
            )
        return self.scores[:, self.test_index.index(test)]

    def mean(self) -> SampleScores:
        """The mean over the test samples, for each training sample.

        It is the score against the mean loss of the test samples where the score is linear in the test sample's
        gradient, as all are but those with a cosine. One test sample that is not finite makes every mean nan: leave it
        out of the store with ``test.select(~test.nonfinite)``.

        Returns:
            The scores; `counts` is the number of test samples.
        """
        text = f"mean over {len(self.test_index)} test samples; {self.convention}"
        counts = torch.full((len(self.train_index),), len(self.test_index))
        return SampleScores(self.name, self.train_index, self.scores.mean(1), counts, text, self.unknown)

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` of the scores, its index the training samples and its columns the test samples."""
        pandas: Any = importlib.import_module("pandas")
        index = pandas.Index(self.train_index, name="train")
        return pandas.DataFrame(self.scores.numpy(), index=index, columns=pandas.Index(self.test_index, name="test"))
