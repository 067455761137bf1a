"""The files of a ledger, opened by DuckDB and by Polars as they are, hold the rows that `read_ledger` gives."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_persample import PerSampleGradientWriter, Projection
from lightning_persample.influence import read_ledger, self_influence
from tests.callbacks.indexed_data import ByName, Follows, Names
from tests.callbacks.ledger_runs import Noted, data, fit
from tests.callbacks.runs import make_trainer

ORDER = ("step", "rank", "epoch", "batch_idx", "backward_index", "row")


def rows_of_duckdb(folder):
    duckdb = pytest.importorskip("duckdb")
    order = ", ".join(f'"{name}"' for name in ORDER)
    with duckdb.connect() as connection:
        found = connection.execute(f"SELECT * FROM '{folder}/*.parquet' ORDER BY {order}")
        names = [column[0] for column in found.description]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def rows_of_polars(folder):
    polars = pytest.importorskip("polars")
    return polars.read_parquet(f"{folder}/*.parquet").sort(ORDER).to_dicts()


@pytest.fixture(params=[rows_of_duckdb, rows_of_polars], ids=["duckdb", "polars"])
def rows_of(request):
    return request.param


def assert_same(found, expected):
    """The same names in the same order, and equal values of the same types; nan is no null."""
    assert len(found) == len(expected) > 0
    for row, other in zip(found, expected, strict=True):
        assert list(row) == list(other)
        for name, value in row.items():
            assert type(value) is type(other[name]), name
            both_nan = isinstance(value, float) and math.isnan(value) and math.isnan(other[name])
            assert both_nan or value == other[name], name


class OfEachType(Noted):
    """Returns columns of every type, nan among them, and leaves some out after the first batch."""

    def training_step(self, batch, batch_idx):
        losses = self.losses(batch)
        whole = torch.where(batch[2] % 5 == 0, torch.nan, losses)
        columns = {"loss": whole, "is_first": batch[2] == 0}
        if batch_idx == 0:
            columns |= {"count": batch[2] + 2**60, "seldom": losses, "is_odd": batch[2] % 2 == 1}
        return {"loss": losses.mean(), "per_sample": columns}


def test_columns_of_every_type_with_nan_and_null(rows_of, tmp_path):
    fit(PerSampleGradientWriter(tmp_path, per_layer=2, flush_every=2), OfEachType(), max_epochs=2)
    table = read_ledger(tmp_path)
    assert len(list(tmp_path.glob("*.parquet"))) == 6
    assert [table[name].null_count for name in ("count", "seldom", "is_odd")] == [36] * 3
    assert sum(math.isnan(value) for value in table["loss"].to_pylist()) == 10
    assert max(value or 0 for value in table["count"].to_pylist()) > 2**60  # what a double cannot hold
    assert {"norm/network.0", "norm/network.2"} < set(table.column_names)
    assert_same(rows_of(tmp_path), table.to_pylist())


def test_unknown_weights_are_null(rows_of, tmp_path):
    fit(PerSampleGradientWriter(tmp_path, engine="loop"))
    assert read_ledger(tmp_path)["weight"].null_count == 22
    assert_same(rows_of(tmp_path), read_ledger(tmp_path).to_pylist())


def test_unknown_samples_are_null(rows_of, tmp_path):
    fit(PerSampleGradientWriter(tmp_path), loader=DataLoader([tuple(data(8, 4).dataset.tensors)], batch_size=None))
    assert read_ledger(tmp_path)["sample_index"].null_count == 8
    assert_same(rows_of(tmp_path), read_ledger(tmp_path).to_pylist())


def test_keys_that_are_strings(rows_of, tmp_path):
    class Named(Follows):
        def training_step(self, batch, batch_idx):
            return self.loss(batch)

    loader = DataLoader(ByName(), 4, sampler=Names())
    make_trainer([PerSampleGradientWriter(tmp_path, flush_every=2)]).fit(Named(), loader)
    found = rows_of(tmp_path)
    assert {row["sample_index"] for row in found} == {f"row {index}" for index in range(22)}
    assert_same(found, read_ledger(tmp_path).to_pylist())


def test_self_influence_in_sql(tmp_path):
    duckdb = pytest.importorskip("duckdb")
    fit(PerSampleGradientWriter(tmp_path, flush_every=2), max_epochs=3)
    with duckdb.connect() as connection:
        found = connection.execute(
            f"SELECT sample_index, sum(learning_rate * norm^2) AS score FROM '{tmp_path}/*.parquet' "
            "GROUP BY sample_index ORDER BY score DESC LIMIT 5"
        ).fetchall()
    assert found == [(index, pytest.approx(score, rel=1e-12)) for index, score in self_influence(tmp_path).top(5)]


def test_pandas_and_arrow_read_the_folder_itself(tmp_path):
    pandas, dataset = pytest.importorskip("pandas"), pytest.importorskip("pyarrow.dataset")
    fit(PerSampleGradientWriter(tmp_path / "ledger", flush_every=2, projection=Projection(dim=4)))
    expected = read_ledger(tmp_path / "ledger")
    for found in (
        pandas.read_parquet(tmp_path / "ledger"),
        dataset.dataset(tmp_path / "ledger", format="parquet").to_table().to_pandas(),
    ):
        pandas.testing.assert_frame_equal(
            found.sort_values(list(ORDER), ignore_index=True), expected.to_pandas(), check_exact=True
        )
