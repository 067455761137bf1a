"""Scores from rows of which every sum can be done by hand."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pyarrow
import pytest
import torch

from lightning_persample import OptionError, PerSampleError, UnsupportedError
from lightning_persample.influence import Manifest, el2n, grand, read_ledger, self_influence
from lightning_persample.influence.ledger import BASE_COLUMNS, Ledger, schema_of

ROWS = {
    "step": [0, 0, 1, 1, 2],
    "sample_index": [7, 2, 7, 5, 7],
    "norm": [1.0, 2.0, 3.0, 4.0, 5.0],
    "learning_rate": [0.5, 0.5, 0.25, 0.25, 0.125],
    "weight": [0.5, 0.5, 0.5, 0.5, 1.0],
    "el2n": [0.5, 0.25, 0.75, 1.0, 0.25],
}


def table(**columns):
    return pyarrow.table({**ROWS, **columns})


def test_self_influence_is_the_sum_of_rate_times_squared_norm():
    found = self_influence(table())
    assert found.index == (2, 5, 7)
    assert found.scores.tolist() == [0.5 * 4, 0.25 * 16, 0.5 * 1 + 0.25 * 9 + 0.125 * 25]
    assert found.counts.tolist() == [1, 1, 3]
    assert found.convention.startswith("sum of learning_rate * norm^2 over the rows: never negative")
    assert found.top(2) == [(7, 5.875), (5, 4.0)]
    assert len(found) == 3


def test_bottom_is_the_smallest_first():
    found = self_influence(table(norm=[1.0, 2.0, math.nan, 4.0, 5.0]))
    assert found.bottom(1) == [(2, 2.0)]
    assert found.bottom() == [(2, 2.0), (5, 4.0)]
    assert [index for index, _ in grand(table(norm=[1.0] * 5)).bottom()] == [2, 5, 7]
    with pytest.raises(OptionError, match="k=0 is not allowed"):
        found.bottom(0)


def test_scores_are_printed_as_a_short_table():
    assert repr(self_influence(table())) == (
        "self_influence of 3 samples\nindex  score\n    7  5.875\n    5      4\n    2      2"
    )
    named = grand(
        table(sample_index=["a long name", "b", "a long name", "e", "g"], norm=[1.0, 2.0, 1.0, math.nan, 0.5])
    )
    assert repr(named) == (
        "grand of 4 samples\n"
        "      index  score\n"
        "          b      2\n"
        "a long name      1\n"
        "          g    0.5\n"
        "nan: 1 of 4 samples"
    )


def test_the_weighted_form_has_the_weight_in_the_step():
    found = self_influence(table(), weighted=True)
    assert found.scores.tolist() == [1.0, 2.0, 0.25 + 1.125 + 3.125]
    assert found.convention.startswith("sum of learning_rate * weight * norm^2")


def test_grand_is_the_mean_norm():
    assert grand(table()).scores.tolist() == [2.0, 4.0, 3.0]
    found = grand(table(), steps=[0, 2])
    assert (found.index, found.scores.tolist(), found.counts.tolist()) == ((2, 7), [2.0, 3.0], [1, 2])


def test_el2n_is_the_mean_of_its_column():
    assert el2n(table()).scores.tolist() == [0.25, 1.0, 0.5]
    for steps in ({1}, range(1, 2), np.array([1], np.int32), torch.tensor([1]), (np.int64(1),)):
        assert el2n(table(), steps=steps).top() == [(5, 1.0), (7, 0.75)]
    assert el2n(table(error=[1, 2, 3, 4, 5]), "error").scores.tolist() == [2.0, 4.0, 3.0]


def test_a_dataframe_of_scores():
    frame = grand(table()).to_pandas()
    assert frame.to_dict("list") == {"index": [2, 5, 7], "score": [2.0, 4.0, 3.0], "count": [1, 1, 3]}


def test_a_dataframe_gives_the_scores_of_its_table():
    rows = table(sample_index=[7, 2, 7, None, 7], norm=[1.0, 2.0, 3.0, 4.0, math.nan])
    for score in (self_influence, grand, el2n):
        expected, found = score(rows), score(rows.to_pandas())
        assert found.index == expected.index == (2, 7)
        assert all(type(each) is int for each in found.index)
        assert found.unknown == expected.unknown == 1
        torch.testing.assert_close(found.scores, expected.scores, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(OptionError, match=r"^ledger is a dict; allowed is its folder, a pyarrow.Table or a pandas"):
        self_influence(dict(ROWS))


def test_keys_may_be_strings():
    found = grand(table(sample_index=["g", "b", "g", "e", "g"]))
    assert found.top() == [("e", 4.0), ("g", 3.0), ("b", 2.0)]


def test_rows_without_an_index_are_counted():
    found = grand(table(sample_index=[7, None, 7, 5, None]))
    assert (found.index, found.scores.tolist(), found.unknown) == ((5, 7), [4.0, 2.0], 2)


def test_a_norm_that_is_no_number_stays_one():
    found = self_influence(table(norm=[1.0, 2.0, math.nan, math.inf, 5.0]))
    assert math.isnan(found.scores[2])
    assert found.top() == [(5, math.inf), (2, 2.0)]


def test_ties_come_in_the_order_of_the_dataset():
    assert [index for index, _ in grand(table(norm=[1.0] * 5)).top()] == [2, 5, 7]


def test_many_rows_give_what_a_loop_gives():
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, 50, (2000,), generator=generator).tolist()
    norms, rates = torch.rand(2, 2000, dtype=torch.float64, generator=generator).tolist()
    rows = pyarrow.concat_tables(
        [
            pyarrow.table({"sample_index": index[part], "norm": norms[part], "learning_rate": rates[part]})
            for part in (slice(0, 700), slice(700, 2000))
        ]
    )
    expected = dict.fromkeys(sorted(set(index)), 0.0)
    for key, norm, rate in zip(index, norms, rates, strict=True):
        expected[key] += rate * norm**2
    found = self_influence(rows)
    assert found.index == tuple(expected)
    assert found.scores.tolist() == pytest.approx(list(expected.values()), rel=1e-12)


@pytest.fixture
def folder(tmp_path):
    """A ledger of 200 rows in four files, of 50 samples."""
    generator = torch.Generator().manual_seed(0)
    columns = {**BASE_COLUMNS, "loss": "double"}
    ledger = Ledger(tmp_path)
    ledger.write_manifest(Manifest("first", columns, ("weight",), rows=200))
    for part in range(4):
        ints = {name: torch.randint(0, 50, (50,), generator=generator).tolist() for name in columns}
        numbers = {
            name: torch.rand(50, dtype=torch.float64, generator=generator).tolist()
            for name in ("learning_rate", "weight", "norm", "loss")
        }
        rows = {**ints, **numbers, "coverage": [1.0] * 50, "step": [part] * 50}
        ledger.write(ledger.part(0, part), pyarrow.table(rows, schema=schema_of(columns)))
    return tmp_path


def test_a_folder_gives_the_scores_of_its_table_and_other_columns_are_not_read(folder, monkeypatch):
    rows, asked = read_ledger(folder), []
    read = Ledger.read
    monkeypatch.setattr(Ledger, "read", lambda self, part, columns: asked.append(columns) or read(self, part, columns))
    for score, columns in (
        (self_influence, ["sample_index", "norm", "learning_rate"]),
        (partial(self_influence, weighted=True), ["sample_index", "norm", "learning_rate", "weight"]),
        (grand, ["sample_index", "norm"]),
        (partial(grand, steps=[1, 3]), ["sample_index", "norm", "step"]),
        (partial(el2n, column="loss"), ["sample_index", "loss"]),
    ):
        expected, found = score(rows), score(folder)
        assert (found.index, found.counts.tolist()) == (expected.index, expected.counts.tolist())
        torch.testing.assert_close(found.scores, expected.scores, rtol=1e-14, atol=0)
        assert asked == [columns] * 4
        asked.clear()


def test_a_folder_that_lacks_rows_or_a_column_has_no_scores(folder):
    with pytest.raises(
        OptionError, match=r"^the ledger has no column 'el2n': write it with .* Its columns are step, e"
    ):
        el2n(folder)
    Ledger(folder).parts()[3].path.unlink()
    with pytest.raises(PerSampleError, match=r"lacks 50 of 200 rows: files were removed, or the disk"):
        grand(folder)


def test_a_column_that_one_file_lacks_is_nan_there(folder):
    part = Ledger(folder).parts()[2]
    Ledger(folder).write(part, Ledger(folder).read(part).drop_columns("loss"))
    touched = set(Ledger(folder).read(part)["sample_index"].to_pylist())
    found = el2n(folder, "loss")
    assert {index for index, score in zip(found.index, found.scores.tolist(), strict=True) if score != score} == touched


@pytest.mark.parametrize(
    ("score", "error", "text"),
    [
        (
            lambda: grand(table(sample_index=pyarrow.nulls(5, pyarrow.int64()))),
            UnsupportedError,
            "no row of the ledger has a sample_index, so that nothing can be said of single samples: pass",
        ),
        (
            lambda: el2n(table().drop_columns("el2n")),
            OptionError,
            "the ledger has no column 'el2n': write it with {'loss': ..., 'per_sample': {'el2n': tensor of shape",
        ),
        (
            lambda: el2n(table(), "margin"),
            OptionError,
            "Its columns are step, sample_index, norm, learning_rate",
        ),
        (
            lambda: self_influence(table(weight=[0.5, None, 0.5, None, 0.5]), weighted=True),
            UnsupportedError,
            "2 of 5 rows of the ledger have no 'weight': their weight in the loss is unknown; pass weighted=False",
        ),
        (lambda: grand(table(), steps=[9]), PerSampleError, "the ledger has no rows of these steps"),
        *(
            (partial(score, table(), steps=steps), OptionError, f"steps={steps!r} is not allowed: steps must be")
            for score in (grand, el2n)
            for steps in ([0, 1.5], 1, "1", [1.0])
        ),
        (lambda: grand(table().slice(0, 0)), PerSampleError, "the ledger has no rows"),
        (lambda: grand(table()).top(0), OptionError, "k=0 is not allowed: k must be an int >= 1"),
    ],
)
def test_what_cannot_be_said_is_refused(score, error, text):
    with pytest.raises(error) as refused:
        score()
    assert text in str(refused.value)
