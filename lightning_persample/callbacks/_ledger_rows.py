"""From captured batches to the rows of a ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_persample.engine import PerSampleRecord, of_user
from lightning_persample.errors import OptionError
from lightning_persample.influence._arrow import arrow
from lightning_persample.influence.ledger import BASE_COLUMNS, schema_of

__all__ = ["CapturedRows", "checked_types", "columns_of", "keys_of", "table_of"]

_RESULTS = "per_sample"  # what training_step returns its columns under

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # which torch does not join with other ints


@dataclass(eq=False, slots=True)  # not frozen: one is made at every step, and a frozen one takes far longer to make
class CapturedRows:
    """What is kept of a backward until its rows are written: m samples, on the device that had them.

    Attributes:
        step: of the rows, as `epoch`, `batch_idx`, `backward_index` and `coverage`.
        keys: the samples' indices, (m,), or a list of m keys; None where they are unknown.
        samples: their places in the batch, (m,); None where they are all, 0 to m - 1.
        batch_size: number of samples of the batch.
        rate: the learning rate, or that of each sample, (m,).
        factor: the weight of a sample in the step, 0-dimensional, not yet divided by `divisor`; None if unknown.
        divisor: what the factor has to be divided by.
        norms: (m,).
        groups: by group (m,).
        columns: by name the values that the run adds, (m,), known when the batch ends.
    """

    step: int
    epoch: int
    batch_idx: int
    backward_index: int
    coverage: float
    keys: Tensor | list[Any] | None
    samples: Tensor | None
    batch_size: int
    rate: float | Tensor
    factor: Tensor | None
    divisor: float
    norms: Tensor
    groups: Mapping[str, Tensor]
    columns: Mapping[str, Tensor]

    @classmethod
    def of_record(
        cls,
        record: PerSampleRecord,
        step: int,
        epoch: int,
        batch_idx: int,
        rate: float | Tensor,
        divisor: float,
        depth: int | None,
    ) -> CapturedRows:
        """What is kept of a record."""
        return cls(
            step,
            epoch,
            batch_idx,
            record.backward_index,
            record.coverage,
            keys_of(record),
            record.samples,
            record.batch_size,
            rate,
            record.factor,
            divisor,
            record.norms(),
            {} if depth is None else record.group_norms(depth),
            {},
        )

    def __len__(self) -> int:
        return self.norms.shape[0]

    def own(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values that the run adds to these rows."""
        found = {}
        for name, values in columns.items():
            if values.shape == (self.batch_size,):
                places = self.samples
                found[name] = values if places is None else values[places.to(values.device)]
            elif values.shape == (len(self),):
                found[name] = values
            else:
                raise OptionError(
                    f"the column {name!r} has shape {tuple(values.shape)}, but a ledger needs one value for each "
                    f"sample of the batch, ({self.batch_size},)"
                )
        return found


def keys_of(record: PerSampleRecord) -> Tensor | list[Any] | None:
    """The samples' indices, (m,), or a list of m keys; None where they are unknown, or are tensors of a loader each."""
    index = record.sample_index
    is_single = isinstance(index, Tensor) or (isinstance(index, list) and not any(map(_is_of_a_loader, index)))
    return index if is_single else None  # type: ignore[return-value]


def _is_of_a_loader(each: Any) -> bool:
    return each is None or isinstance(each, (Tensor, list, dict))


def columns_of(outputs: Any, batch: Any, columns: Callable[[Any, Any], Any] | None) -> dict[str, Tensor]:
    """The columns that a run adds to the rows of a batch."""
    returned = outputs.get(_RESULTS) if isinstance(outputs, (dict, Mapping)) else None  # a dict is known faster
    if returned is None and columns is None:
        return {}
    found: dict[str, Any] = {}
    for place, given in (
        (f"training_step returned under {_RESULTS!r}", returned),
        ("columns(outputs, batch) returned", None if columns is None else of_user(columns, outputs, batch)),
    ):
        if given is None:
            continue
        if not isinstance(given, Mapping) or not all(isinstance(each, Tensor) for each in given.values()):
            raise OptionError(f"{place} {type(given).__name__}, but it must be a dict of tensors (B,) by name")
        twice = sorted(found.keys() & given.keys())
        if twice:
            raise OptionError(f"{place} a column {twice[0]!r} that training_step returned, too: rename one")
        found.update(given)
    return {str(name): values.detach() for name, values in found.items()}


def kind_of(name: str, values: Tensor) -> str:
    """The Arrow type of a column that the run adds."""
    if values.is_complex() or values.dtype in _UNSIGNED:
        raise OptionError(
            f"the column {name!r} has dtype {values.dtype}; a ledger has real numbers, ints with a sign and bools"
        )
    if values.is_floating_point():
        return "double"
    return "bool" if values.dtype == torch.bool else "int64"


def columns_and_types(groups: Sequence[str], first: CapturedRows, columns: Mapping[str, Tensor]) -> dict[str, str]:
    """All columns of a run, which its first rows decide."""
    known = {**BASE_COLUMNS, **{f"norm/{group}": "double" for group in groups}}
    if isinstance(first.keys, list):
        known["sample_index"] = "string"
    taken = sorted(known.keys() & columns.keys())
    if taken:
        raise OptionError(f"the column {taken[0]!r} of the run has the name of a column of every ledger: rename it")
    return {**known, **{name: kind_of(name, values) for name, values in columns.items()}}


def checked_types(
    types: dict[str, str], groups: Sequence[str], rows: CapturedRows, columns: Mapping[str, Tensor]
) -> dict[str, str]:
    """The types of all columns, which further rows have to fit."""
    types = types or columns_and_types(groups, rows, columns)
    for name, values in columns.items():
        before, now = types.get(name), kind_of(name, values)
        if before is None:
            raise OptionError(
                f"the column {name!r} is new in step {rows.step}: the columns of a ledger are those of its first "
                f"row, {', '.join(types)}; give it a value in every batch"
            )
        if before != now and (before, now) != ("double", "int64"):
            raise OptionError(f"the column {name!r} was of type {before} in the first row and is {now} now")
    return types


def table_of(captured: Sequence[CapturedRows], types: Mapping[str, str], rank: int) -> Any:
    """The rows as a ``pyarrow.Table``; values leave their device here, a column at a time."""
    counts = [len(rows) for rows in captured]
    own = {
        name: _array(np.repeat([getattr(rows, name) for rows in captured], counts), kind)
        for name, kind in types.items()
        if name in ("step", "epoch", "batch_idx", "backward_index", "coverage")
    }
    own["rank"] = _array(np.full(sum(counts), rank), "int64")
    own["row"] = _array(_places(captured, counts), "int64")
    own["sample_index"] = _keys(captured, types["sample_index"])
    own["learning_rate"] = _array(_rates(captured, counts), "double")
    own["weight"] = _weights(captured, counts)
    own["norm"] = _array(_joined([rows.norms for rows in captured]), "double")
    for name, kind in types.items():
        if name.startswith("norm/"):
            group = name.removeprefix("norm/")
            own[name] = _optional([rows.groups.get(group) for rows in captured], counts, kind)
        elif name not in own:
            own[name] = _optional([rows.columns.get(name) for rows in captured], counts, kind)
    return arrow().Table.from_arrays([own[name] for name in types], schema=schema_of(types))


def _places(captured: Sequence[CapturedRows], counts: Sequence[int]) -> np.ndarray[Any, Any]:
    if all(rows.samples is None for rows in captured):
        return np.concatenate([np.arange(count) for count in counts])
    pairs = zip(captured, counts, strict=True)
    return _joined([torch.arange(count) if rows.samples is None else rows.samples for rows, count in pairs])


def _rates(captured: Sequence[CapturedRows], counts: Sequence[int]) -> np.ndarray[Any, Any]:
    if not any(isinstance(rows.rate, Tensor) for rows in captured):
        return np.repeat([rows.rate for rows in captured], counts)
    pairs = zip(captured, counts, strict=True)
    return _joined([torch.as_tensor(rows.rate, dtype=torch.float64).expand(count) for rows, count in pairs])


def _weights(captured: Sequence[CapturedRows], counts: Sequence[int]) -> Any:
    missing = np.array([rows.factor is None for rows in captured])
    factors = [rows.factor for rows in captured if rows.factor is not None]
    weights = np.zeros(len(captured))
    if factors:
        weights[~missing] = _joined(factors, torch.stack)
    weights /= [rows.divisor for rows in captured]
    return _array(np.repeat(weights, counts), "double", np.repeat(missing, counts))


def _keys(captured: Sequence[CapturedRows], kind: str) -> Any:
    if kind == "string":
        listed: list[str | None] = []
        for rows in captured:
            keys = rows.keys.tolist() if isinstance(rows.keys, Tensor) else rows.keys
            listed += [None] * len(rows) if keys is None else [str(key) for key in keys]
        return arrow().array(listed, arrow().string())
    keys = [rows.keys if isinstance(rows.keys, Tensor) else None for rows in captured]
    return _optional(keys, [len(rows) for rows in captured], kind)


def _optional(parts: Sequence[Tensor | None], counts: Sequence[int], kind: str) -> Any:
    """A column in which the rows of some backward passes have no value."""
    missing = np.repeat([part is None for part in parts], counts)
    dtype = next((part.dtype for part in parts if part is not None), torch.float64)
    pairs = zip(parts, counts, strict=True)
    filled = [torch.zeros(count, dtype=dtype) if part is None else part for part, count in pairs]
    return _array(_joined(filled), kind, missing)


def _joined(parts: list[Tensor], join: Callable[[list[Tensor]], Tensor] = torch.cat) -> np.ndarray[Any, Any]:
    on_device = {part.device for part in parts} | {torch.device("cpu")}
    if len(on_device) > 1:  # in one go from where most of them are
        device = max(on_device, key=lambda each: sum(part.device == each for part in parts))
        parts = [part.to(device) for part in parts]
    with torch.no_grad():
        if len({part.dtype for part in parts}) > 1 and any(part.is_floating_point() for part in parts):
            parts = [part.double() for part in parts]  # before they are joined, which rounds ints to a narrow dtype
        joined = join(parts).cpu()
    if joined.is_floating_point():
        joined = joined.double()  # numpy has no bfloat16
    values: np.ndarray[Any, Any] = joined.numpy()
    return values


def _array(values: np.ndarray[Any, Any], kind: str, missing: np.ndarray[Any, Any] | None = None) -> Any:
    dtypes: dict[str, type] = {"int64": np.int64, "double": np.float64, "bool": np.bool_}
    return arrow().array(values.astype(dtypes[kind]), mask=missing)
