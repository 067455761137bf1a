"""From captured batches to the rows of a ledger and of the store of projected gradients beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_persample.callbacks.sample_index import PASS_INDEX, keys_of
from lightning_persample.capture.failure import guard
from lightning_persample.capture.record import PerSampleRecord, listed
from lightning_persample.errors import OptionError, PerSampleError, of_user
from lightning_persample.gradients.projection import Projection
from lightning_persample.influence.dataset import FolderLock
from lightning_persample.influence.ledger import BASE_COLUMNS, schema_of
from lightning_persample.influence.optional_packages import arrow
from lightning_persample.influence.shards import ParameterColumns, Shards, StoreManifest, StoreWriter, columns_for

T = TypeVar("T")
_ATTRIBUTES = {"learning_rate": "rate", "weight": "factor", "norm": "norms"}  # of `CapturedRows`, by column
_ATTRIBUTES |= {name: name for name in ("step", "epoch", "batch_idx", "backward_index", "coverage")}
_DTYPES: dict[str, type] = {"int64": np.int64, "double": np.float64, "bool": np.bool_}
_RESULTS = "per_sample"  # what training_step returns its columns under

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # which torch does not join with other ints


@dataclass(eq=False, slots=True)  # not frozen: one is made at every step, and a frozen one takes far longer to make
class CapturedRows:
    """What is kept of a backward until its rows are written: m samples, on the device that had them."""

    step: int
    epoch: int
    batch_idx: int
    backward_index: int
    coverage: float
    keys: Tensor | list[Any] | None  # the samples' indices, (m,), or a list of m keys; None where they are unknown
    samples: Tensor | None  # their places in the batch, (m,); None where they are all, 0 to m - 1
    batch_size: int
    rate: float | Tensor  # the learning rate, or that of each sample, (m,)
    factor: Tensor | None  # the weight of a sample in the step times `divisor`, 0-dimensional; None if unknown
    divisor: float
    norms: Tensor | None  # (m,); None where they are not asked for
    groups: Mapping[str, Tensor]  # the norms over groups, each (m,)
    values: Tensor | None  # the gradients, (m, K), until the store has them
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # what the run adds, each (m,), when the batch ends

    def __len__(self) -> int:
        return self.batch_size if self.samples is None else self.samples.numel()

    def column(self, name: str) -> Any:
        """What the ledger has of these rows: a number of all, or a tensor (m,); None where they have nothing."""
        if name == "row":
            return torch.arange(len(self)) if self.samples is None else self.samples
        if name == "sample_index":
            return self.keys if isinstance(self.keys, Tensor) else None
        if name.startswith("norm/"):
            return self.groups.get(name.removeprefix("norm/"))
        return getattr(self, _ATTRIBUTES[name]) if name in _ATTRIBUTES else self.columns.get(name)

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
        if not isinstance(given, Mapping):
            raise OptionError(f"{place} {type(given).__name__}, but it must be a dict of tensors (B,) by name")
        for name, each in given.items():
            if not isinstance(each, Tensor):
                raise OptionError(f"{place} {name!r}: {type(each).__name__}, but it must be a tensor (B,)")
        twice = sorted(found.keys() & given.keys())
        if twice:
            raise OptionError(f"{place} a column {twice[0]!r} that training_step returned, too: rename one")
        found.update(given)
    # (copies: rows wait to be written, and the run may use its memory again)
    return {str(name): values.detach().clone() for name, values in found.items()}


def kind_of(name: str, values: Tensor) -> str:
    """The Arrow type of a column that the run adds."""
    if values.is_complex() or values.dtype in _UNSIGNED:
        raise OptionError(
            f"the column {name!r} has dtype {values.dtype}; a ledger has real numbers, ints with a sign and bools"
        )
    if values.is_floating_point():
        return "double"
    return "bool" if values.dtype == torch.bool else "int64"


def _columns_and_types(groups: Sequence[str], first: CapturedRows, columns: Mapping[str, Tensor]) -> dict[str, str]:
    """All columns of a run, which its first rows decide."""
    known = {**BASE_COLUMNS, **{f"norm/{group}": "double" for group in groups}}
    if first.norms is None:
        del known["norm"]
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
    types = types or _columns_and_types(groups, rows, columns)
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
    columns = []
    for name, kind in types.items():
        if name == "sample_index" and kind == "string":
            columns.append(_names(captured))
            continue
        of_rows = [rank if name == "rank" else rows.column(name) for rows in captured]
        values = _joined(of_rows, counts)
        if name == "weight":
            values = values / np.repeat([rows.divisor for rows in captured], counts)
        missing = np.repeat([part is None for part in of_rows], counts)
        columns.append(arrow().array(values.astype(_DTYPES[kind]), mask=missing if missing.any() else None))
    return arrow().Table.from_arrays(columns, schema=schema_of(types))


def _names(captured: Sequence[CapturedRows]) -> Any:
    listed: list[str | None] = []
    for rows in captured:
        keys = rows.keys.tolist() if isinstance(rows.keys, Tensor) else rows.keys
        listed += [None] * len(rows) if keys is None else [None if key is None else str(key) for key in keys]
    return arrow().array(listed, arrow().string())


def _joined(parts: Sequence[Any], counts: Sequence[int]) -> np.ndarray[Any, Any]:
    """One value for each row, of numbers and tensors of one or of all rows of a backward; 0 where there is None."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if not tensors:
        return np.repeat([0 if part is None else part for part in parts], counts)
    # In one go from where most of them are; ints are joined with floats in float64, which a narrow dtype would round.
    devices = [part.device for part in tensors]
    device = max(set(devices), key=devices.count)
    is_real = any(part.is_floating_point() for part in tensors)
    dtype = (
        tensors[0].dtype if len({part.dtype for part in tensors}) == 1 else torch.float64 if is_real else torch.int64
    )
    with torch.no_grad():
        filled = [
            torch.as_tensor(0 if part is None else part, dtype=dtype, device=device).expand(count)
            for part, count in zip(parts, counts, strict=True)
        ]
        joined = torch.cat(filled).cpu()
    return (joined.double() if is_real else joined).numpy()  # numpy has no bfloat16


def layout_of(shapes: Mapping[str, Sequence[int]], projection: Projection | None) -> tuple[ParameterColumns, ...]:
    """Which columns are those of which parameter."""
    sizes = {name: torch.Size(shape) for name, shape in shapes.items()}
    for name, column in {} if projection is None else projection.appended.items():
        if column in sizes and name not in sizes:
            raise OptionError(
                f"`{column}` is a further column of `{name}` in this projection, and that is not stored: store both, "
                "or fit the projection to the parameters that are stored, with parameters=[...]"
            )
    kept = {
        name: size.numel() if projection is None else projection.size_of(size, name) for name, size in sizes.items()
    }
    return columns_for({name: (tuple(size), kept[name]) for name, size in sizes.items()})


def values_of(record: PerSampleRecord, layout: Sequence[ParameterColumns], projection: Projection | None) -> Tensor:
    """The gradients of a record's samples; -> (m, K)."""
    parts = record.grad_samples if projection is None else record.project(projection)
    dtypes = [part.dtype for part in parts.values()]
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    device = next((part.device for part in parts.values()), torch.device("cpu"))
    values = torch.zeros(record.num_values, layout[-1].stop, dtype=dtype, device=device)
    appended = {} if projection is None else projection.appended
    unknown = record.unsupported.keys() & {each.name for each in layout}
    for each in layout:
        if each.name in unknown or appended.get(each.name) in unknown:
            values[:, each.start : each.stop] = float("nan")
        elif each.name in parts:
            values[:, each.start : each.stop] = parts[each.name].reshape(len(values), each.stop - each.start)
    return values


def opened(trainer: Trainer, lock: FolderLock, open_folder: Callable[[], T], what: str) -> T:
    """What the first process alone opens, on all processes; what it refuses all of them raise."""
    made: tuple[T | None, PerSampleError | None] = None, None
    if trainer.is_global_zero:
        try:
            lock.take()
            made = open_folder(), None
        except PerSampleError as error:  # the other processes would wait for this one
            made = None, error
        except OSError as error:
            made = None, OptionError(f"dirpath={str(lock.dirpath)!r} cannot hold {what}: {error}")
    found, refusal = trainer.strategy.broadcast(made)
    if refusal is not None:
        lock.release()
        raise refusal
    return found  # type: ignore[return-value]


class GradientRows:
    """Writes the gradients of the rows of a fit, in this process; what goes wrong is a warning."""

    # The manifest, of these fields, is written as soon as the parameters are known; `there` is that of rows that go on.

    def __init__(
        self,
        shards: Shards,
        projection: Projection,
        module: nn.Module,
        rank: int,
        warn: Callable[[str], None],
        there: StoreManifest | None,
        fields: Mapping[str, Any],
    ) -> None:
        self._shards, self._projection, self._rank, self._warn = shards, projection, rank, warn
        self._there, self._fields = there, fields
        self._writer: StoreWriter | None = None
        self._layout: tuple[ParameterColumns, ...] = ()
        trainable = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self._shapes = {name: p.shape for name, p in trainable.items() if not p.is_complex()}
        self._left_out = frozenset(trainable) - frozenset(self._shapes)
        if self._left_out:
            names = listed(sorted(self._left_out))
            self._warn(f"gradients of {names} are not stored: they are complex, but rows are of real numbers")

    def values_of(self, record: PerSampleRecord) -> Tensor | None:
        """The gradients of a record, (m, K), if any are stored."""
        if self._writer is None:
            self._open(record)
        if self._writer is None:
            return None
        others = [name for name in record.names if name not in self._shapes and name not in self._left_out]
        if others:
            self._warn(f"gradients of {listed(others)} are not stored: they became trainable after the fit had started")
        if isinstance(keys_of(record), list):
            self._warn(
                "the sampler draws keys that are no ints: the ledger has them, but the store of gradients has "
                "sample_index -1, so that no score can tell its samples apart; let the sampler draw ints, or "
                f"{PASS_INDEX}"
            )
        return values_of(record, self._layout, self._projection)

    def _open(self, record: PerSampleRecord) -> None:
        """The first record with values tells which parameters have none."""
        shapes = {name: shape for name, shape in self._shapes.items() if name not in record.unsupported}
        if not any(shape.numel() for shape in shapes.values()):
            self._warn("no gradients are stored: no parameter has per-sample gradients that could be")
            return
        self._layout = layout_of(shapes, self._projection)
        manifest = StoreManifest(
            parameters=self._layout, projection=self._projection.settings(), rows=-1, **self._fields
        )
        unlike = "" if self._there is None else self._shards.unlike(self._there, manifest)
        if unlike:
            raise OptionError(unlike)
        self._writer = StoreWriter(self._shards.dirpath, manifest, self._rank)
        if self._rank == 0:
            self._try(partial(self._shards.write_manifest, manifest))

    def add(self, captured: Sequence[CapturedRows]) -> None:
        """Hand on the rows of an optimizer step that is over."""
        for rows in captured:
            values, rows.values = rows.values, None
            if values is not None and self._writer is not None:
                described = {
                    "step": rows.step,
                    "learning_rate": torch.as_tensor(rows.rate, dtype=torch.float64),
                    "weight": None if rows.factor is None else rows.factor.double() / rows.divisor,
                    "sample_index": rows.keys if isinstance(rows.keys, Tensor) else None,
                }
                self._try(partial(self._writer.add, values, described))

    def flush(self) -> None:
        """Write the rows that were handed on."""
        if self._writer is not None:
            self._try(self._writer.flush)

    def finish(self) -> int:
        """Write the rows that were handed on, and say how many are missing."""
        self.flush()
        writer, self._writer = self._writer, None
        count = 0 if writer is None else writer.lost + writer.waiting
        if count:
            self._warn(f"{count} rows of gradients in {str(self._shards.dirpath)!r} were not written")
        return count

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._warn(
                f"the gradients in {str(self._shards.dirpath)!r} cannot be written: {error}. Training goes on; the "
                "rows are kept in memory and tried again with the next ones"
            )


_LATE = (
    "the learning rate changed between a backward and its optimizer step, after the rows of that backward were "
    "written: they have that of the backward"
)


_NO_NORM = torch.empty(0)  # of what has one rate whatever its norms are


@dataclass(eq=False)
class _Waiting:
    """Rows whose optimizer step is still to come: their rates by group, and the groups that have not stepped yet."""

    rows: CapturedRows
    sq_norms: Mapping[str, Tensor]
    rates: list[float]
    places: set[int]


class LearningRates:
    """Reads learning rates, cheaply where all parameters have the same, and notes those of each optimizer step."""

    def __init__(
        self,
        pl_module: LightningModule,
        optimizers: Sequence[torch.optim.Optimizer],
        warn: Callable[[str], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._module, self._optimizers, self._warn = pl_module, optimizers, warn
        self.after_step: Callable[[int], None] | None = None  # is given the place of each optimizer that has stepped
        self._last: list[float] = []
        self._sizes: list[int] = []
        self._groups: dict[str, int] = {}
        self._waiting: list[_Waiting] = []
        self._written: dict[int, float] = {}
        self._handles: list[RemovableHandle] = []
        for place, optimizer in enumerate(optimizers):
            if isinstance(optimizer, torch.optim.Optimizer):
                self._handles.append(optimizer.register_step_post_hook(guard(partial(self._stepped, place), failed)))

    def close(self) -> None:
        """Leave the optimizers as they were. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.forget()

    def forget(self) -> None:
        """The optimizer step is over; rows that still wait are of one that was skipped."""
        self._waiting, self._written = [], {}

    def are_alike(self, names: Iterable[str]) -> bool:
        """Whether all these parameters have one rate, whatever it will be."""
        return len(self._now()) == 1 and self._groups.keys() >= set(names)

    def of_record(self, record: PerSampleRecord) -> float | Tensor:
        """The learning rate eta of each sample, now."""
        self._last = self._now()
        return self._of_norms(record.sq_norms, self._last)

    def wait(self, rows: CapturedRows, record: PerSampleRecord) -> None:
        """Correct the rate of rows if it is another one when the optimizer steps; to be called after `of_record`."""
        places = {self._groups[name] for name in record.sq_norms if name in self._groups}
        if places and self._handles:
            # Norms that are computed when they are read would hold what they are made of until the step.
            has_one_rate = self.are_alike(record.names)
            norms = dict.fromkeys(record.sq_norms, _NO_NORM) if has_one_rate else dict(record.sq_norms)
            self._waiting.append(_Waiting(rows, norms, self._last, places))

    def wrote(self, others: Sequence[object]) -> None:
        """Rows have been written and cannot be corrected any more: all that wait but `others`."""
        kept = {id(rows) for rows in others}
        for each in self._waiting:
            for place in each.places if id(each.rows) not in kept else ():
                rate = each.rates[place]
                self._written[place] = rate if self._written.get(place, rate) == rate else math.nan
        self._waiting = [each for each in self._waiting if id(each.rows) in kept]

    def _now(self) -> list[float]:
        sizes: list[int] = []
        rates: list[float] = []
        for optimizer in self._optimizers:  # at every step: plain loops are the fastest
            for group in optimizer.param_groups:
                sizes.append(len(group["params"]))
                rates.append(float(group["lr"]))
        if sizes != self._sizes:  # a callback may add groups, or parameters to them, as layers thaw
            if len(sizes) != len(self._sizes):
                self.forget()
            self._sizes, self._groups = sizes, self._places()
        return rates

    def _of_norms(self, sq_norms: Mapping[str, Tensor], rates: Sequence[float]) -> float | Tensor:
        if rates and rates.count(rates[0]) == len(rates) and self._groups.keys() >= sq_norms.keys():
            return rates[0]
        places = {name: self._groups.get(name) for name in sq_norms}
        by_name = {name: 0.0 if place is None else rates[place] for name, place in places.items()}
        different = set(by_name.values())
        if len(different) <= 1:
            return different.pop() if different else max(rates, default=0.0)
        return _effective(sq_norms, by_name)

    def _stepped(self, optimizer: int, *args: Any) -> None:
        if self._waiting or self._written:
            self._correct(optimizer)
        if self.after_step is not None:
            self.after_step(optimizer)

    def _correct(self, optimizer: int) -> None:
        """Give the rows that wait for this optimizer the rates of its step."""
        rates = self._now()
        first = sum(len(each.param_groups) for each in self._optimizers[:optimizer])
        own = range(first, first + len(self._optimizers[optimizer].param_groups))
        if any(place in self._written and self._written.pop(place) != rates[place] for place in own):
            self._warn(_LATE)
        for each in self._waiting:
            places = each.places.intersection(own)
            each.places -= places
            if any(each.rates[place] != rates[place] for place in places):
                each.rates = [rates[n] if n in places else rate for n, rate in enumerate(each.rates)]
                with torch.no_grad():
                    each.rows.rate = self._of_norms(each.sq_norms, each.rates)
        self._waiting = [each for each in self._waiting if each.places]

    def _places(self) -> dict[str, int]:
        """The group of each parameter, by its place among those of all optimizers."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        places = {id(parameter): place for place, group in enumerate(groups) for parameter in group["params"]}
        named = self._module.named_parameters()
        return {name: places[id(parameter)] for name, parameter in named if id(parameter) in places}


def _effective(sq_norms: Mapping[str, Tensor], rates: Mapping[str, float]) -> Tensor:
    device = next(iter(sq_norms.values())).device
    squares = torch.stack([sq_norm.to(device).double() for sq_norm in sq_norms.values()])
    total = squares.sum(0)
    mean = (squares * squares.new_tensor([rates[name] for name in sq_norms])[:, None]).sum(0) / total
    return torch.where(total == 0, max(rates.values()), mean)
