"""What scores are: one for each sample, or for each pair; and those that need nothing but the ledger of a training."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_persample.errors import OptionError, PerSampleError, UnsupportedError
from lightning_persample.influence.by_sample import SampleTable
from lightning_persample.influence.ledger import Ledger
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


_WITHOUT = {
    "learning_rate": "the learning rate of their step is unknown",
    "weight": "their weight in the loss is unknown; pass weighted=False",
}


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
    factors = ("learning_rate", "weight") if weighted else ("learning_rate",)
    sums = _Sums(
        ledger,
        ("norm", *factors),
        lambda rows: math.prod((rows[name] for name in factors), start=np.square(rows["norm"])),
        why="self_influence needs it",
        required={name: _WITHOUT[name] for name in factors},
    )
    form = "sum of learning_rate * weight * norm^2" if weighted else "sum of learning_rate * norm^2"
    text = (
        f"{form} over the rows: never negative; the larger it is, the more a sample's own steps lowered its own loss, "
        "as those of mislabelled and of hard samples do"
    )
    return sums.scores("self_influence", text)


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
    sums = _Sums(ledger, ("shapley",), why="write the ledger with the callback InRunInfluence")
    text = (
        "sum of learning_rate * weight * g . g_val over the rows: positive where a sample lowered the validation loss"
    )
    return sums.scores("data_shapley", text)


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
    sums = _Sums(ledger, ("norm",), steps=steps, why="grand needs it")
    text = "mean norm over the rows: never negative; the larger it is, the harder the sample"
    return sums.scores("grand", text, mean=True)


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
    sums = _Sums(ledger, (column,), steps=steps, why=remedy)
    text = f"mean of {column!r} over the rows: the larger it is, the harder the sample, for errors and losses"
    return sums.scores(column, text, mean=True)


_CHUNK_ROWS = 1 << 17  # of a ledger, which are added up at once

_Numbers = Mapping[str, NDArray[np.float64]]
"""Columns of some rows, each (rows,)."""


def _columns_of(ledger: Any) -> Sequence[str]:
    """The names of the columns of a ledger: of a folder, a table or a data frame."""
    if isinstance(ledger, str | os.PathLike):
        return Ledger(ledger).columns()
    if hasattr(ledger, "to_parquet"):  # a pandas.DataFrame
        return [str(name) for name in ledger.columns]
    if not hasattr(ledger, "column_names"):
        raise OptionError(
            f"ledger is a {type(ledger).__name__}; allowed is its folder, a pyarrow.Table or a pandas.DataFrame"
        )
    names: Sequence[str] = ledger.column_names
    return names


def _tables_of(ledger: Any, columns: list[str]) -> Iterator[Any]:
    """Some columns of a ledger, some rows at a time."""
    if isinstance(ledger, str | os.PathLike):
        for table in Ledger(ledger).tables(columns):
            for name in [name for name in columns if name not in table.column_names]:  # in this file alone
                table = table.append_column(name, arrow().nulls(len(table), arrow().float64()))
            yield table
        return
    for start in range(0, len(ledger), _CHUNK_ROWS):
        if not hasattr(ledger, "to_parquet"):
            yield ledger.select(columns).slice(start, _CHUNK_ROWS)
            continue
        table = arrow().Table.from_pandas(ledger[columns].iloc[start : start + _CHUNK_ROWS], preserve_index=False)
        if arrow().types.is_floating(table["sample_index"].type):  # pandas keeps ints with a null as floats
            table = table.set_column(0, "sample_index", table["sample_index"].cast(arrow().int64()))
        yield table


def _as_numpy(column: Any, dtype: str) -> NDArray[Any]:
    """A column, null as nan; pyarrow's own way would import pandas."""
    column = column.fill_null(math.nan) if column.null_count else column
    size = np.dtype(dtype).itemsize
    parts = [
        np.frombuffer(each.buffers()[1], dtype, len(each), each.offset * size) for each in column.chunks if len(each)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])


class _Sums:
    """The sum of a number over the rows of each sample of a ledger; no other columns are read."""

    def __init__(
        self,
        ledger: Any,
        names: Sequence[str],
        number: Callable[[_Numbers], NDArray[np.float64]] | None = None,
        *,
        why: str,
        steps: Collection[int] | None = None,
        required: Mapping[str, str] | None = None,
    ) -> None:
        self._names, self._required = names, {} if required is None else required
        self._number = number if number is not None else lambda rows: rows[names[0]]
        self._table, self._unknown = SampleTable(sums="<f8", counts="<i4"), 0
        self._missing = dict.fromkeys(self._required, 0)
        self._waiting: list[tuple[Any, NDArray[np.float64]]] = []
        there = _columns_of(ledger)
        needed = ["sample_index", *names, *(() if steps is None else ("step",))]
        for name in needed:
            if name not in there:
                raise OptionError(f"the ledger has no column {name!r}: {why}. Its columns are {', '.join(there)}")
        rows = 0
        for table in _tables_of(ledger, list(dict.fromkeys(needed))):
            if steps is not None:
                table = table.filter(arrow("compute").is_in(table["step"], arrow().array(list(steps), arrow().int64())))
            rows += len(table)
            self._add(table)
        self._settle()
        if rows == 0:
            raise PerSampleError("the ledger has no rows" + ("" if steps is None else " of these steps"))
        if self._unknown == rows:
            raise UnsupportedError(
                "no row of the ledger has a sample_index, so that nothing can be said of single samples: pass "
                "sample_index=<function of the batch that returns the index of each sample> to the writer if the data "
                "carry it"
            )
        for name, count in self._missing.items():
            if count:
                text = f"{count} of {rows - self._unknown} rows of the ledger have no {name!r}"
                raise UnsupportedError(f"{text}: {self._required[name]}")

    def _add(self, table: Any) -> None:
        """Keep the numbers of rows that have an index until there are many."""
        keys = table["sample_index"]
        if keys.null_count:
            self._unknown += keys.null_count
            table = table.filter(keys.is_valid())
            keys = table["sample_index"]
        numbers = {name: _as_numpy(table[name].cast("double"), "<f8") for name in self._names}
        for name in self._missing:
            self._missing[name] += int(np.isnan(numbers[name]).sum())
        is_int = arrow().types.is_integer(keys.type)
        index = _as_numpy(keys.cast("int64"), "<i8") if is_int else keys.to_pylist()
        self._waiting.append((index, self._number(numbers)))
        if sum(len(each) for _, each in self._waiting) >= max(_CHUNK_ROWS, len(self._table) // 4):
            self._settle()

    def _settle(self) -> None:
        """Add what waits; the table is copied where samples are new."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        keys = [each for each, _ in waiting]
        are_ints = all(isinstance(each, np.ndarray) for each in keys)
        places = torch.from_numpy(self._table.places(np.concatenate(keys) if are_ints else [*chain(*keys)]))
        numbers = torch.from_numpy(np.concatenate([each for _, each in waiting]))
        sums, counts = (torch.from_numpy(column) for column in self._table.columns.values())
        sums.index_add_(0, places, numbers)
        counts.index_add_(0, places, torch.ones_like(places, dtype=counts.dtype))

    def scores(self, name: str, convention: str, *, mean: bool = False) -> SampleScores:
        """The sum, or the mean, over the rows of each sample."""
        keys = self._table.keys()
        sums, counts = (torch.from_numpy(column) for column in self._table.columns.values())
        if isinstance(keys, list):
            order = sorted(range(len(keys)), key=keys.__getitem__)
            keys, sums, counts = [keys[place] for place in order], sums[order], counts[order]
        parts = np.array_split(keys, 64) if isinstance(keys, np.ndarray) else []  # no list of all beside the tuple
        index = tuple(chain.from_iterable(part.tolist() for part in parts)) if parts else tuple(keys)
        return SampleScores(name, index, sums / counts if mean else sums, counts.long(), convention, self._unknown)
