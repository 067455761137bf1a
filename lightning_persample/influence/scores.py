"""What scores are: one for each sample, or for each pair; and those that need nothing but the ledger of a training."""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_persample.errors import OptionError, PerSampleError, UnsupportedError
from lightning_persample.influence.ledger import read_ledger
from lightning_persample.influence.optional_packages import arrow
from lightning_persample.options import check_option

_SHOWN = 3  # of the largest, and of the smallest


def ranked(
    index: Sequence[int | str], scores: Tensor, k: int, *, largest: bool = True
) -> list[tuple[int | str, float]]:
    """The samples with the largest or the smallest scores; ties in the order of `index`, and none that is nan."""
    check_option("k", k, k >= 1, "an int >= 1")
    known = (~scores.isnan()).nonzero().flatten()
    order = known[scores[known].argsort(descending=largest, stable=True)][:k]
    return [(index[place], float(scores[place])) for place in order.tolist()]


def extremes(index: Sequence[int | str], scores: Tensor) -> str:
    """A table of the three largest and the three smallest scores, a line each, and how many are nan."""
    unknown = int(scores.isnan().sum())
    count = len(index) - unknown
    largest = ranked(index, scores, min(count, 2 * _SHOWN) or 1)
    cells = [(str(sample), f"{score:.4g}") for sample, score in largest]
    if count > 2 * _SHOWN:
        smallest = ranked(index, scores, _SHOWN, largest=False)[::-1]
        cells = [*cells[:_SHOWN], ("...", "..."), *((str(sample), f"{score:.4g}") for sample, score in smallest)]
    if cells:
        cells = [("index", "score"), *cells]
    widths = [max((len(row[column]) for row in cells), default=0) for column in range(2)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    if unknown:
        lines.append(f"nan: {unknown} of {len(index)} samples")
    return "".join(f"\n{line}" for line in lines)


@dataclass(frozen=True, eq=False, repr=False)
class SampleScores:
    """One score for each sample of a dataset; ``print`` shows the largest and the smallest.

    >>> SampleScores("grand", (2, 5, 7), torch.tensor([2.0, 4.0, 3.0]), torch.tensor([1, 1, 3]), "mean norm")
    grand of 3 samples
    index  score
        5      4
        7      3
        2      2

    Attributes:
        name: which score.
        index: the samples' indices in the dataset, ascending.
        scores: their scores, (samples,), float64.
        counts: from how many rows of the ledger each one is, (samples,), int64.
        convention: what a large score means.
        unknown: number of rows without an index, which are in no score.
    """

    name: str
    index: tuple[int | str, ...]
    scores: Tensor
    counts: Tensor
    convention: str
    unknown: int = 0

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        return f"{self.name} of {len(self)} samples{extremes(self.index, self.scores)}"

    def top(self, k: int = 10) -> list[tuple[int | str, float]]:
        """The samples with the largest scores, largest first; a score that is nan is left out.

        Args:
            k: how many.

        Returns:
            At most k pairs of index and score.
        """
        return ranked(self.index, self.scores, k)

    def bottom(self, k: int = 10) -> list[tuple[int | str, float]]:
        """The samples with the smallest scores, smallest first; a score that is nan is left out.

        Args:
            k: how many.

        Returns:
            At most k pairs of index and score.
        """
        return ranked(self.index, self.scores, k, largest=False)

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with the columns index, score and count."""
        pandas: Any = importlib.import_module("pandas")
        columns = {"index": list(self.index), "score": self.scores.numpy(), "count": self.counts.numpy()}
        return pandas.DataFrame(columns)


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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the scores to a file, for `load`.

        Args:
            path: of the file.
        """
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PairScores:
        """The scores that `save` has written.

        Args:
            path: of the file.

        Returns:
            Equal scores.
        """
        return cls(**torch.load(path, map_location="cpu", weights_only=True))

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


def self_influence(ledger: Any, *, weighted: bool = False) -> SampleScores:
    """Self-influence of each sample along the training: ``sum_t eta_t ||g_t(z)||^2`` over its rows t.

    It is TracInCP's score of a sample with itself (equation 1 of the reference, without its batch size), every captured
    step a checkpoint, with the learning rates that the optimizer used. The weighted form, the sum of
    ``eta_t w_t ||g_t(z)||^2``, has each sample's weight in its step as a factor, 1/B for a mean over batches of B: by
    so much the sample's own part in the steps of plain SGD lowered its own loss, to first order.

    Every captured step counts alike. A ledger of a part of the steps, such as ``every_n_steps=10``, gives the sum over
    these alone, so that samples with different `counts` are to be compared with care. For optimizers other than SGD it
    is the same formula, with g itself and not the optimizer's direction.

    >>> import pyarrow
    >>> rows = {"sample_index": [3, 5, 3], "norm": [1.0, 2.0, 3.0], "learning_rate": [0.5, 0.5, 0.1]}
    >>> self_influence(pyarrow.table(rows)).top()
    [(5, 2.0), (3, 1.4)]

    Args:
        ledger: its folder, or a ``pyarrow.Table`` from `read_ledger` or its ``to_pandas()``, or a part of one.
        weighted: whether each row has the sample's weight in the step as a factor.

    Returns:
        The scores. A row whose norm is nan makes its sample's score nan.

    Reference: Pruthi et al. 2020, Estimating training data influence by tracing gradient descent, arXiv 2002.08484.
    """
    names = ("norm", "learning_rate", *(("weight",) if weighted else ()))
    rows = _Rows(ledger, names, why="self_influence needs it")
    rows.require("learning_rate", "the learning rate of their step is unknown")
    if weighted:
        rows.require("weight", "their weight in the loss is unknown; pass weighted=False")
    values = rows["learning_rate"] * rows["norm"].square()
    if weighted:
        values = values * rows["weight"]
    form = "sum of learning_rate * weight * norm^2" if weighted else "sum of learning_rate * norm^2"
    text = (
        f"{form} over the rows: never negative; the larger it is, the more a sample's own steps lowered its own loss, "
        "as those of mislabelled and of hard samples do"
    )
    return rows.summed("self_influence", values, text)


def data_shapley(ledger: Any) -> SampleScores:
    """First-order in-run data Shapley values: the sum of ``eta_t w_t g_t(z) . g_val`` over the rows t of each sample.

    By so much a sample's part in the captured steps lowered the loss on the validation data, to first order; the values
    of all samples sum to the first-order change of the validation loss. The ledger is one of `InRunInfluence`.

    >>> import pyarrow
    >>> data_shapley(pyarrow.table({"sample_index": [3, 5, 3], "shapley": [0.5, -0.25, 1.0]})).top()
    [(3, 1.5), (5, -0.25)]

    Args:
        ledger: its folder, or a ``pyarrow.Table`` from `read_ledger` or its ``to_pandas()``, or a part of one.

    Returns:
        The scores, positive where a sample helped. A row whose value is nan makes its sample's score nan.

    Reference: Wang et al. 2024, Data Shapley in one training run, section 4, arXiv 2406.11011.
    """
    rows = _Rows(ledger, ("shapley",), why="write the ledger with the callback InRunInfluence")
    text = (
        "sum of learning_rate * weight * g . g_val over the rows: positive where a sample lowered the validation loss"
    )
    return rows.summed("data_shapley", rows["shapley"], text)


def grand(ledger: Any, steps: Collection[int] | None = None) -> SampleScores:
    """GraNd of each sample: the mean of ``||g_t(z)||`` over its rows t.

    The reference means over several trainings from other initial weights, at a fixed early step: put their tables
    together for that. At initialisation alone it says little.

    >>> import pyarrow
    >>> rows = {"sample_index": [3, 5, 3], "norm": [1.0, 2.0, 5.0], "step": [0, 0, 1]}
    >>> grand(pyarrow.table(rows)).top(), grand(pyarrow.table(rows), steps=[0]).top()
    ([(3, 3.0), (5, 2.0)], [(5, 2.0), (3, 1.0)])

    Args:
        ledger: its folder, or a ``pyarrow.Table`` from `read_ledger` or its ``to_pandas()``, or a part of one.
        steps: the optimizer steps whose rows count; None counts all.

    Returns:
        The scores. A row whose norm is nan makes its sample's score nan.

    Reference: Paul et al. 2021, Deep learning on a data diet, definition 2.1, arXiv 2107.07075.
    """
    rows = _Rows(ledger, ("norm",), steps=steps, why="grand needs it")
    text = "mean norm over the rows: never negative; the larger it is, the harder the sample"
    return rows.averaged("grand", rows["norm"], text)


def el2n(ledger: Any, column: str = "el2n", steps: Collection[int] | None = None) -> SampleScores:
    """EL2N of each sample: the mean over its rows of ``||softmax(f(z)) - onehot(y)||``, which the run has to write.

    >>> import pyarrow
    >>> el2n(pyarrow.table({"sample_index": [3, 5, 3], "el2n": [1.0, 0.5, 0.5]})).top()
    [(3, 0.75), (5, 0.5)]

    Args:
        ledger: its folder, or a ``pyarrow.Table`` from `read_ledger` or its ``to_pandas()``, or a part of one.
        column: the column that has the error; any other column of numbers (a loss) is averaged in the same way.
        steps: the optimizer steps whose rows count; None counts all.

    Returns:
        The scores. A row whose value is nan or null makes its sample's score nan.

    Reference: Paul et al. 2021, Deep learning on a data diet, definition 2.2, arXiv 2107.07075.
    """
    remedy = (
        "write it with {'loss': ..., 'per_sample': {" + repr(column) + ": tensor of shape (B,)}} as what "
        "training_step returns, or with the writer's option `columns`"
    )
    rows = _Rows(ledger, (column,), steps=steps, why=remedy)
    text = f"mean of {column!r} over the rows: the larger it is, the harder the sample, for errors and losses"
    return rows.averaged(column, rows[column], text)


class _Rows:
    """The rows of a ledger that have an index, and which sample each is of."""

    def __init__(self, ledger: Any, names: Collection[str], *, why: str, steps: Collection[int] | None = None) -> None:
        table = read_ledger(ledger) if isinstance(ledger, (str, os.PathLike, Path)) else ledger
        if hasattr(table, "to_parquet"):  # a pandas.DataFrame
            table = arrow().Table.from_pandas(table, preserve_index=False)
            if "sample_index" in table.column_names and arrow().types.is_floating(table["sample_index"].type):
                place = table.column_names.index("sample_index")  # pandas keeps ints with a null as floats
                table = table.set_column(place, "sample_index", table["sample_index"].cast(arrow().int64()))
        if not hasattr(table, "column_names"):
            raise OptionError(
                f"ledger is a {type(table).__name__}; allowed is its folder, a pyarrow.Table or a pandas.DataFrame"
            )
        needed = ["sample_index", *names, *(() if steps is None else ("step",))]
        for name in needed:
            if name not in table.column_names:
                raise OptionError(
                    f"the ledger has no column {name!r}: {why}. Its columns are {', '.join(table.column_names)}"
                )
        table = table.select(list(dict.fromkeys(needed)))
        if steps is not None:
            table = table.filter(arrow("compute").is_in(table["step"], arrow().array(list(steps), arrow().int64())))
        keys = table["sample_index"]
        self.unknown = keys.null_count
        if table.num_rows == 0:
            raise PerSampleError("the ledger has no rows" + ("" if steps is None else " of these steps"))
        if self.unknown == table.num_rows:
            raise UnsupportedError(
                "no row of the ledger has a sample_index, so that nothing can be said of single samples: pass "
                "sample_index=<function of the batch that returns the index of each sample> to the writer if the data "
                "carry it"
            )
        if self.unknown:
            table = table.filter(keys.is_valid())
            keys = keys.drop_null()
        self._columns = {name: torch.tensor(table[name].cast("double").to_numpy()) for name in names}
        coded = keys.combine_chunks().dictionary_encode()
        found = coded.dictionary.to_pylist()
        self._keys = sorted(found)
        places = {key: place for place, key in enumerate(self._keys)}
        self._places = torch.tensor([places[key] for key in found])[torch.tensor(coded.indices.to_numpy()).long()]

    def __getitem__(self, name: str) -> Tensor:
        return self._columns[name]

    def require(self, name: str, text: str) -> None:
        """Refuse rows without a value in a column."""
        missing = int(self._columns[name].isnan().sum())
        if missing:
            raise UnsupportedError(f"{missing} of {len(self._places)} rows of the ledger have no {name!r}: {text}")

    def summed(self, name: str, values: Tensor, convention: str) -> SampleScores:
        """The sum over each sample's rows."""
        sums = torch.zeros(len(self._keys), dtype=torch.float64).index_add_(0, self._places, values)
        counts = torch.bincount(self._places, minlength=len(self._keys))
        return SampleScores(name, tuple(self._keys), sums, counts, convention, self.unknown)

    def averaged(self, name: str, values: Tensor, convention: str) -> SampleScores:
        """The mean over each sample's rows."""
        sums = self.summed(name, values, convention)
        return SampleScores(name, sums.index, sums.scores / sums.counts, sums.counts, convention, self.unknown)
