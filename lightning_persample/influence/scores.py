"""What scores are: one for each sample, or for each pair; and those that need nothing but the ledger of a training."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_persample.errors import OptionError, PerSampleError, UnsupportedError
from lightning_persample.influence.by_sample import SampleTable, aligned, together
from lightning_persample.influence.dataset import load_values, save_values
from lightning_persample.influence.ledger import Ledger
from lightning_persample.influence.optional_packages import arrow, pandas
from lightning_persample.options import check_option, check_options

_SHOWN = 3  # of the largest, and of the smallest


def as_int(value: Any) -> Any:
    """An integer of NumPy's as Python's; anything else as it is."""
    return int(value) if isinstance(value, np.integer) else value


def grouped(
    groups: Mapping[int, int | str] | Sequence[int | str] | Tensor, test_index: Sequence[int]
) -> tuple[tuple[Any, ...], Tensor]:
    """The different groups, ascending, and the place among them of each test sample's."""
    if isinstance(groups, Mapping):
        absent = [index for index in test_index if index not in groups]
        if absent:
            raise OptionError(f"groups has none of test sample {absent[0]!r}, and of {len(absent)} in all")
        groups = [groups[index] for index in test_index]
    named: Any = groups.tolist() if isinstance(groups, Tensor | np.ndarray) else groups
    are_groups = isinstance(named, Iterable) and not isinstance(named, str)
    named = list(named) if are_groups else []
    are_groups &= any(all(isinstance(each, kind) for each in named) for kind in (Integral, str))
    expected = "the group of each test sample, ints alone or strings alone, or a mapping from their indices to these"
    check_option("groups", groups, are_groups, expected)
    if len(named) != len(test_index):
        raise OptionError(
            f"groups has {len(named)} entries; allowed is one for each of the {len(test_index)} test samples, "
            "in the order of test_index, or a mapping from their indices"
        )
    found = sorted(set(named))
    places = {group: place for place, group in enumerate(found)}
    return tuple(found), torch.tensor([places[group] for group in named])


def ranked(
    index: Sequence[int | str], scores: Tensor, k: int, *, largest: bool = True
) -> list[tuple[int | str, float]]:
    """The samples with the largest or the smallest scores; ties in the order of `index`, and none that is nan."""
    k = as_int(k)
    check_options(k=k)
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
    lines = aligned(cells)
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
        columns = {"index": list(self.index), "score": self.scores.numpy(), "count": self.counts.numpy()}
        return pandas().DataFrame(columns)


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
        scores: (train, test), float64, or float32 if asked for; nan for a sample with a gradient that is not finite.
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
        return f"{self.name} of {size}{extremes(self.train_index, self._means())}"

    def top(self, k: int = 10, *, test: int | None = None) -> list[tuple[int | str, float]]:
        """The training samples with the largest scores, largest first; a score that is nan is left out.

        Args:
            k: how many.
            test: index of the test sample whose scores count; None is for the mean over all of them.

        Returns:
            At most k pairs of index and score.
        """
        return self._ranked(k, test, largest=True)

    def bottom(self, k: int = 10, *, test: int | None = None) -> list[tuple[int | str, float]]:
        """The training samples with the smallest scores, smallest first: below 0, those that harm most.

        Args:
            k: how many; a score that is nan is left out.
            test: index of the test sample whose scores count; None is for the mean over all of them.

        Returns:
            At most k pairs of index and score.
        """
        return self._ranked(k, test, largest=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the scores to a file, for `load`.

        Args:
            path: of the file; one that is there is replaced when all is written, and stays where that fails.
        """
        save_values(Path(path), "scores", vars(self))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> PairScores:
        """The scores that `save` has written.

        Args:
            path: of the file.

        Returns:
            Equal scores, `TopScores` where those were saved. A file that is broken, or of something else, is a
            `PerSampleError`.
        """
        values = load_values(Path(path), "scores", "compute the scores again")
        return TopScores(**values) if "places" in values else PairScores(**values)

    def _means(self) -> Tensor:
        """The mean over the test samples, (train,)."""
        return self.scores.mean(1)

    def _column(self, test: int) -> int:
        """The place of a test sample."""
        if test not in self.test_index:
            raise OptionError(
                f"test={test!r} is not the index of a test sample: {len(self.test_index)} have scores, "
                f"the first of them {', '.join(map(str, self.test_index[:5]))}"
            )
        return self.test_index.index(test)

    def _ranked(self, k: int, test: int | None, *, largest: bool) -> list[tuple[int | str, float]]:
        scores = self._means() if test is None else self.scores[:, self._column(test)]
        return ranked(self.train_index, scores, k, largest=largest)

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
        return SampleScores(self.name, self.train_index, self._means(), counts, text, self.unknown)

    def by_group(self, groups: Mapping[int, int | str] | Sequence[int | str] | Tensor) -> PairScores:
        """The mean over each group of test samples, such as those of a class.

        >>> scores = torch.tensor([[1.0, 3.0, 8.0], [0.0, 2.0, -8.0]], dtype=torch.float64)
        >>> pairs = PairScores("grad_dot", (3, 5), (0, 1, 2), scores, "positive: helps")
        >>> pairs.by_group(["cat", "cat", "dog"]).top(1, test="cat")
        [(3, 2.0)]

        Args:
            groups: the group of each test sample, in the order of `test_index`; or a mapping from their indices.

        Returns:
            The scores, with the groups, ascending, for test samples.

        It is an `OptionError` where a test sample has no group, or groups are neither ints alone nor strings alone.
        """
        found, places = grouped(groups, self.test_index)
        sums = self.scores.new_zeros(len(self.scores), len(found)).index_add_(1, places, self.scores)
        scores = sums / torch.bincount(places, minlength=len(found))
        return replace(self, test_index=found, scores=scores)

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` of the scores, its index the training samples and its columns the test samples."""
        train, test = pandas().Index(self.train_index, name="train"), pandas().Index(self.test_index, name="test")
        return pandas().DataFrame(self.scores.numpy(), index=train, columns=test)


@dataclass(frozen=True, eq=False, repr=False)
class TopScores(PairScores):
    """The largest and the smallest scores of each test sample, where ``top=k`` asked for no others.

    It has the methods of `PairScores`, and `mean` is over all test samples as there: 24 k bytes for each test sample,
    and 8 for each training sample. `top` and `bottom` of one test sample give what `PairScores` gives, but no more
    than were kept. What needs the whole matrix (`linear_datamodeling_score`, `by_group`) is refused; the option
    `groups` of the score gives what `by_group` would.

    Attributes:
        scores: the k largest scores of each test sample, (k, test), largest first; nan where fewer are numbers.
        places: the places of their training samples in `train_index`, (k, test), int64; -1 where there is none.
        least: the k smallest, (k, test), smallest first.
        least_places: the places of theirs.
        means: the mean over the test samples, (train,), float64.
    """

    _: KW_ONLY
    places: Tensor
    least: Tensor
    least_places: Tensor
    means: Tensor

    def _means(self) -> Tensor:
        return self.means

    def _ranked(self, k: int, test: int | None, *, largest: bool) -> list[tuple[int | str, float]]:
        if test is None:
            return ranked(self.train_index, self.means, k, largest=largest)
        kept = (self.scores, self.places) if largest else (self.least, self.least_places)
        scores, places = (each[:, self._column(test)] for each in kept)
        return ranked([self.train_index[place] for place in places.tolist()], scores, k, largest=largest)

    def by_group(self, groups: Mapping[int, int | str] | Sequence[int | str] | Tensor) -> PairScores:
        """Refused: the means of groups need the scores of all pairs."""
        raise OptionError(
            f"{self.name} kept the largest scores alone (top={len(self.scores)}): compute it with groups=..., or "
            "without `top`"
        )

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with the columns test, rank (from 1), train and score of the largest scores."""
        kept, tests = self.scores.shape
        index = np.append(np.array(self.train_index), -1)
        columns = {
            "test": np.repeat(np.array(self.test_index), kept),
            "rank": np.tile(np.arange(1, kept + 1), tests),
            "train": index[self.places.T.flatten().numpy()],
            "score": self.scores.T.flatten().numpy(),
        }
        frame = pandas().DataFrame(columns)
        return frame[columns["train"] >= 0].reset_index(drop=True)


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
    sums = LedgerSums(ledger, ("shapley",), why="write the ledger with the callback InRunInfluence")
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
    sums = LedgerSums(ledger, ("norm",), steps=steps, why="grand needs it")
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
    sums = LedgerSums(ledger, (column,), steps=steps, why=remedy)
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
    return ledger.column_names


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


def _as_numpy(column: Any) -> NDArray[Any]:
    """A column of numbers, null as nan; pyarrow's own way would import pandas."""
    column = column.fill_null(math.nan) if column.null_count else column
    return np.from_dlpack(column.combine_chunks())


class LedgerSums:
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
        listed: Any = steps.tolist() if isinstance(steps, Tensor | np.ndarray) else steps
        listed = [as_int(each) for each in listed] if isinstance(listed, Iterable) else listed
        are_ints = isinstance(listed, list) and all(isinstance(each, int) for each in listed)
        check_option("steps", steps, steps is None or are_ints, "None or ints, the numbers of optimizer steps")
        chosen = None if steps is None else arrow().array(listed, arrow().int64())
        rows = 0
        for table in _tables_of(ledger, list(dict.fromkeys(needed))):
            if chosen is not None:
                table = table.filter(arrow("compute").is_in(table["step"], chosen))
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
        numbers = {name: _as_numpy(table[name].cast("double")) for name in self._names}
        for name in self._missing:
            self._missing[name] += int(np.isnan(numbers[name]).sum())
        is_int = arrow().types.is_integer(keys.type)
        index = _as_numpy(keys.cast("int64")) if is_int else keys.to_pylist()
        self._waiting.append((index, self._number(numbers)))
        if sum(len(each) for _, each in self._waiting) >= max(_CHUNK_ROWS, len(self._table) // 2):
            self._settle()

    def _settle(self) -> None:
        """Add what waits; the table is copied where samples are new."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        places = torch.from_numpy(self._table.places(together([each for each, _ in waiting])))
        numbers = torch.from_numpy(np.concatenate([each for _, each in waiting]))
        sums, counts = (torch.from_numpy(column) for column in self._table.columns.values())
        sums.index_add_(0, places, numbers)
        counts.index_add_(0, places, torch.ones(1, dtype=counts.dtype).expand(len(places)))

    def scores(self, name: str, convention: str, *, mean: bool = False) -> SampleScores:
        """The sum, or the mean, over the rows of each sample."""
        table, self._table = self._table, SampleTable()
        sums, counts = map(torch.from_numpy, table.columns.values())
        keys = table.keys()
        if isinstance(keys, list):
            order = sorted(range(len(keys)), key=keys.__getitem__)
            index, sums, counts = tuple(keys[place] for place in order), sums[order], counts[order]
        else:  # no list of all beside the tuple, whose ints take more than all else
            index = tuple(chain.from_iterable(part.tolist() for part in np.array_split(keys, 64)))
        del table, keys
        return SampleScores(name, index, sums / counts if mean else sums, counts.long(), convention, self._unknown)
