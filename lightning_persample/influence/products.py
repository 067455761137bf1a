"""Rows of two stores that belong together, their inner products, and inverses of their second moments."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from lightning_persample.errors import OptionError, PerSampleError, UnsupportedError
from lightning_persample.influence.scores import PairScores
from lightning_persample.influence.store import GradientStore, check_comparable
from lightning_persample.options import check_option

StoreOrPath = GradientStore | str | os.PathLike[str]
"""A store, a part of one, or the folder of one."""


def opened(store: StoreOrPath) -> GradientStore:
    """The store that is given, or that in the folder that is given."""
    return store if isinstance(store, GradientStore) else GradientStore(store)


def given_gradients(train: StoreOrPath, test: StoreOrPath, name: str) -> tuple[GradientStore, GradientStore]:
    """The stores of a score that is made of gradients."""
    stores = opened(train), opened(test)
    for side, store in zip(("train", "test"), stores, strict=True):
        direction = direction_of(store)
        if direction is not None:
            raise OptionError(
                f"the {side} store was written with direction={direction!r}, but {name} takes gradients: collect them "
                "with direction=None; less takes Adam's directions, of the training samples"
            )
    return stores


def direction_of(store: GradientStore) -> Any:
    """What the rows of a store are in place of gradients: "adam"; None of gradients."""
    return store.manifest.settings.get("direction")


_SHOWN = 5  # of what a message lists


class Rows(NamedTuple):
    """Rows of a store at the same weights, and the place of each one's sample in the scores, (rows,) int64."""

    store: GradientStore
    places: Tensor


@dataclass(frozen=True, eq=False)
class Alignment:
    """The rows of two stores, by the weights that their gradients are taken at."""

    train_index: tuple[int, ...]  # of the training samples, ascending
    test_index: tuple[int, ...]  # of the test samples, ascending
    pairs: tuple[tuple[Rows, Rows], ...]  # of training and test samples, for each of the weights
    unknown: int  # number of rows without an index, which are in no pair
    names: tuple[Any, ...]  # of the weights: a checkpoint or a step

    def zeros(self) -> Tensor:
        """A matrix of zeros, (train, test), float64."""
        return torch.zeros(len(self.train_index), len(self.test_index), dtype=torch.float64)

    def products(self, factors: Iterable[Tensor | float] | None = None, **options: Any) -> Tensor:
        """The sum of `add_products` over all pairs, (train, test), with a factor of each, or of each training row."""
        scores = self.zeros()
        for pair, factor in zip(self.pairs, (None,) * len(self.pairs) if factors is None else factors, strict=True):
            add_products(scores, *pair, factors=factor, **options)
        return scores

    def scored(self, name: str, scores: Tensor, convention: str) -> PairScores:
        """Scores of these samples, with the counts of rows that are in none or are not finite."""
        nonfinite = sum(int(torch.as_tensor(rows.store.nonfinite).sum()) for pair in self.pairs for rows in pair)
        return PairScores(name, self.train_index, self.test_index, scores, convention, self.unknown, nonfinite)


def align(train: GradientStore, test: GradientStore, *, why_one: str | None = None) -> Alignment:
    """The rows of two stores by checkpoint, each sample once in each."""
    check_comparable(train, test)
    train, train_unknown = _known(train, "train")
    test, test_unknown = _known(test, "test")
    _check_of_checkpoints(train, "train")
    _check_of_checkpoints(test, "test")
    train_keys, test_keys = _checkpoint_keys(train, test)
    if sorted(train_keys, key=repr) != sorted(test_keys, key=repr):
        raise PerSampleError(
            f"the train store has the checkpoints {_listed(train_keys)}, the test store {_listed(test_keys)}: "
            "gradients at other weights cannot be compared; take store.at(checkpoint) of one that both have, or "
            "collect the rest"
        )
    if why_one is not None and len(train_keys) > 1:
        raise OptionError(f"the stores have {len(train_keys)} checkpoints, {_listed(train_keys)}: {why_one}")
    train_parts = {key: train.at(number) for key, number in train_keys.items()}
    test_parts = {key: test.at(number) for key, number in test_keys.items()}
    train_index, train_rows = _placed(train_parts, "train", "checkpoint")
    test_index, test_rows = _placed(test_parts, "test", "checkpoint")
    pairs = tuple((train_rows[key], test_rows[key]) for key in train_keys)
    return Alignment(train_index, test_index, pairs, train_unknown + test_unknown, tuple(train_keys))


def align_steps(train: GradientStore, test: GradientStore) -> Alignment:
    """The rows of a store that was written during training with those of test samples, by optimizer step."""
    check_comparable(train, test)
    if train.manifest.settings.get("step_unit", "optimizer steps") != "optimizer steps":
        raise UnsupportedError(
            f"the rows of the train store count {train.manifest.settings['step_unit']}, as those of manual "
            "optimization do, and checkpoints count optimizer steps: tracin cannot tell which weights a row was taken "
            "at; collect gradients at checkpoints and use tracin_cp"
        )
    train, train_unknown = _known(train, "train")
    test, test_unknown = _known(test, "test")
    train_parts, test_parts = _by_step(train, "train"), _by_step(test, "test")
    missing = sorted(set(train_parts) - set(test_parts))
    if missing:
        raise PerSampleError(
            f"the train store has rows of {len(train_parts)} steps, {_listed(sorted(train_parts))}, and the test store "
            f"has none of {len(missing)} of these, {_listed(missing)}, but of {_listed(sorted(test_parts))}: collect "
            "the test gradients at checkpoints of these steps, or leave the rows out with "
            "train.select(numpy.isin(train.rows['step'], test.rows['step'])). A checkpoint of step t is one that is "
            "saved before step t, after t steps, as in on_train_batch_start; ModelCheckpoint saves after a step, so "
            "that it has none of step 0"
        )
    test_index, test_rows = _placed({step: test_parts[step] for step in train_parts}, "test", "step")
    train_index, train_rows = _placed(train_parts, "train", "step", repeats=True)
    pairs = tuple((train_rows[step], test_rows[step]) for step in train_parts)
    return Alignment(train_index, test_index, pairs, train_unknown + test_unknown, tuple(train_parts))


def _check_of_checkpoints(store: GradientStore, side: str) -> None:
    """Refuse rows of a training, whose weights are as many as its steps."""
    steps = numpy.unique(store.rows["step"])
    if not store.manifest.checkpoints and len(steps) > 1:
        raise UnsupportedError(
            f"the {side} store has rows of {len(steps)} steps, {_listed(steps.tolist())}, and no checkpoints: they "
            "were written during training, and scores along a training are those of tracin, with test gradients at "
            "each of these steps; for this score, collect gradients at checkpoints with collect_gradients"
        )


def _described_steps(store: GradientStore) -> tuple[int | None, ...]:
    """The optimizer step of each checkpoint that has rows, None where it is unknown."""
    return tuple(_described(store, number).get("step") for number in store.checkpoints)


def learning_rates_of(
    train: GradientStore, test: GradientStore, given: Sequence[float] | None, name: str
) -> list[float]:
    """The learning rate of each checkpoint that the training store has rows of."""
    steps = _described_steps(train)
    if given is not None:
        if len(given) != len(steps):
            raise OptionError(
                f"learning_rates has {len(given)} numbers, but the train store has {len(steps)} checkpoints, steps "
                f"{_listed(steps)}: pass one rate for each, in this order"
            )
        return [float(rate) for rate in given]
    train_keys, test_keys = _checkpoint_keys(train, test)
    rates = []
    for key, number in train_keys.items():
        found = {
            side: rate
            for side, store, place in (("train", train, number), ("test", test, test_keys.get(key)))
            if place is not None and (rate := _described(store, place).get("learning_rate")) is not None
        }
        if not found:
            raise OptionError(
                f"the learning rate of checkpoint {key} is in neither manifest: pass {name}(..., "
                f"learning_rates=[...]), one for each of the {len(steps)} checkpoints"
            )
        if len(set(found.values())) > 1:
            raise OptionError(
                f"the learning rate of checkpoint {key} is {found['train']} in the train store and {found['test']} in "
                f"the test store: pass {name}(..., learning_rates=[...])"
            )
        rates.append(float(next(iter(found.values()))))
    if not any(rates):
        raise OptionError(
            f"the learning rate of every checkpoint ({_listed(train_keys)}) is 0, as after a schedule that ends "
            f"there, and every score would be 0: pass {name}(..., learning_rates=[...]), such as the mean rate of the "
            "steps before it, or take earlier checkpoints"
        )
    return rates


def _known(store: GradientStore, side: str) -> tuple[GradientStore, int]:
    """The rows that have an index, and how many have none."""
    if len(store) == 0:
        raise PerSampleError(f"the {side} store has no rows")
    known = store.rows["sample_index"] >= 0
    unknown = int((~known).sum())
    if unknown == len(store):
        raise UnsupportedError(
            f"no row of the {side} store has a sample_index, so that nothing can be said of single samples: collect "
            "the gradients with sample_index=<function of the batch that returns the index of each sample>"
        )
    return (store.select(known), unknown) if unknown else (store, 0)


def _described(store: GradientStore, number: int) -> Mapping[str, Any]:
    """What the manifest says of a checkpoint; nothing of one that it does not list."""
    listed = store.manifest.checkpoints
    return listed[number] if 0 <= number < len(listed) else {}


def _checkpoint_keys(train: GradientStore, test: GradientStore) -> tuple[dict[str, int], dict[str, int]]:
    """What names each checkpoint in both stores: its weights, where both manifests tell them, else its step or path."""
    described = [[_described(store, number) for number in store.checkpoints] for store in (train, test)]
    tell_weights = all(each.get("weights") is not None for of_store in described for each in of_store)
    by_weights = _names_of_weights(described) if tell_weights else {}
    repeated = any(count > 1 for store in (train, test) for count in Counter(_described_steps(store)).values())
    found: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for store, keys in zip((train, test), found, strict=True):
        for number in store.checkpoints:
            one = _described(store, number)
            if by_weights:
                key = by_weights[one["weights"]]
            else:
                key = _step_named(one)
                if repeated or one.get("step") is None:
                    key = f"{key} ({one.get('path') or 'no path'})"
                if tell_weights:
                    key = f"{key} (weights {one['weights']})"
            if key in keys:
                raise PerSampleError(
                    f"a store has two checkpoints {key}, which nothing tells apart: take store.at(checkpoint) of one"
                )
            keys[key] = number
    return found


def _names_of_weights(described: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """A name for each fingerprint of weights, of several stores; empty where two checkpoints of one have the same."""
    names: dict[str, str] = {}
    for of_store in described:
        if len({each["weights"] for each in of_store}) < len(of_store):
            return {}
        for each in of_store:
            if each["weights"] not in names or each.get("step") is not None:
                names[each["weights"]] = f"{_step_named(each)} (weights {each['weights']})"
    return names


def _step_named(described: Mapping[str, Any]) -> str:
    step = described.get("step")
    return "an unknown step" if step is None else f"step {step}"


def _by_step(store: GradientStore, side: str) -> dict[int, GradientStore]:
    """The rows of each optimizer step: their own, or that of their checkpoint where they do not say."""
    steps = store.rows["step"].copy()
    for number in store.checkpoints:
        step = _described(store, number).get("step")
        if step is not None:
            steps[(store.rows["checkpoint"] == number) & (steps < 0)] = step
    if (steps < 0).any():
        raise UnsupportedError(
            f"the step of {int((steps < 0).sum())} of {len(steps)} rows of the {side} store is unknown, which tracin "
            "goes by: collect them from checkpoints that tell their step, or use tracin_cp"
        )
    order = numpy.argsort(steps, kind="stable")
    found, starts = numpy.unique(steps[order], return_index=True)
    return {int(step): store.select(part) for step, part in zip(found, numpy.split(order, starts[1:]), strict=True)}


def _placed(
    parts: Mapping[Any, GradientStore], side: str, column: str, *, repeats: bool = False
) -> tuple[tuple[int, ...], dict[Any, Rows]]:
    """The samples of all parts, ascending, and in each part the place of each row's sample among them."""
    columns = {key: store.rows["sample_index"] for key, store in parts.items()}
    index = numpy.unique(numpy.concatenate(list(columns.values())))
    rows = {}
    for key, samples in columns.items():
        places = numpy.searchsorted(index, samples)
        if not repeats:
            counts = numpy.bincount(places, minlength=len(index))
            name = key if isinstance(key, str) else f"step {key}"
            if counts.max() > 1:
                raise PerSampleError(
                    f"sample {index[counts.argmax()]} has {counts.max()} rows at {name} of the {side} store, and one "
                    f"is wanted: take the first of each with {side}.select(numpy.unique({side}.rows[['{column}', "
                    "'sample_index']], return_index=True)[1]); tracin adds up the rows of a store that was written "
                    "during training"
                )
            if counts.min() == 0:
                raise PerSampleError(
                    f"{int((counts == 0).sum())} of the {side} store's {len(index)} samples have no row at {name}, the "
                    f"first of them sample {index[counts.argmin()]}: collect the rest, or leave the samples out with "
                    f"{side}.select(numpy.isin({side}.rows['sample_index'], {side}.rows['sample_index']["
                    f"{side}.rows['{column}'] == {parts[key].rows[column][0]}]))"
                )
        rows[key] = Rows(parts[key], torch.from_numpy(places.astype(numpy.int64)))
    return tuple(index.tolist()), rows


def _listed(values: Any) -> str:
    shown = [str(value) for value in values]
    return ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")


_PRODUCT_BYTES = 1 << 26

_Transform = Callable[[Tensor], Tensor]
"""Rows (m, K) in float64 to as many rows."""


def add_products(
    scores: Tensor,
    train: Rows,
    test: Rows,
    *,
    max_memory: int | None,
    share: int = 1,
    factors: Tensor | float | None = None,
    of_train: _Transform | None = None,
    of_test: _Transform | None = None,
) -> None:
    """Add ``factor_i * f(g_i) . h(g'_j)`` to the score of each pair of rows, in float64."""
    # The test store is read once, and the training store once for each block of it. Cost: ``2 n m K`` operations for n
    # training and m test rows of K columns, besides the transforms.
    product_bytes = _PRODUCT_BYTES if max_memory is None else max_memory // (3 * share)
    for test_at, right in _float64_blocks(test.store, max_memory, share):
        right = right if of_test is None else of_test(right)
        columns = test.places[test_at]
        for train_at, left in _float64_blocks(train.store, max_memory, share):
            left = left if of_train is None else of_train(left)
            if factors is not None:
                left = left * (factors[train_at, None] if isinstance(factors, Tensor) else factors)
            rows = train.places[train_at]
            step = max(1, product_bytes // (8 * len(right)))
            for start in range(0, len(left), step):
                part = slice(start, start + step)
                scores.index_put_((rows[part, None], columns), left[part] @ right.T, accumulate=True)


def _float64_blocks(store: GradientStore, max_memory: int | None, share: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of rows in float64, each in a third of the memory: with the block before it, or with a copy of itself."""
    size = None
    if max_memory is not None:
        row = store.num_columns * (numpy.dtype(store.manifest.dtype).itemsize + 16)  # as stored, and two in float64
        size = max_memory // (3 * share)
        if size < row:
            raise OptionError(
                f"max_memory={max_memory!r} is too little for rows of {store.num_columns} columns: "
                f"{3 * share * row} bytes are needed"
            )
    yield from store.blocks(size, torch.float64)


def unit_rows(values: Tensor) -> Tensor:
    """Each row over its norm; a row of zeros, which has no direction, is nan."""
    return values / torch.linalg.vector_norm(values, dim=1, keepdim=True)


def second_moments(
    store: GradientStore, columns: Sequence[slice], *, max_memory: int | None, share: int = 1, diagonal: bool = False
) -> tuple[list[Tensor], int]:
    """The sums of ``g g^T``, or their diagonals, over the rows that are finite, for each of some ranges of columns."""
    lengths = [part.stop - part.start for part in columns]
    moments = [torch.zeros((size,) if diagonal else (size, size), dtype=torch.float64) for size in lengths]
    count = 0
    for _, values in _float64_blocks(store, max_memory, share):
        finite = values[values.isfinite().all(1)]
        count += len(finite)
        for part, moment in zip(columns, moments, strict=True):
            if diagonal:
                moment += finite[:, part].square().sum(0)
            else:
                moment.addmm_(finite[:, part].T, finite[:, part])
    if count == 0:
        raise PerSampleError(f"none of the {len(store)} gradients of the train store is finite")
    return moments, count


def checked_damping(damping: object, absolute: object, *, above_zero: bool) -> None:
    """Refuse a damping that is not allowed."""
    if not isinstance(damping, int | float) or not (damping > 0 or (damping == 0 and not above_zero)):
        allowed = "> 0" if above_zero else ">= 0"
        raise OptionError(f"damping={damping!r} is not allowed: damping must be a number {allowed}")
    check_option("absolute", absolute, isinstance(absolute, bool), "True or False")


def cholesky_factor(moment: Tensor, damping: float, absolute: bool, what: str) -> Tensor:
    """L with ``L L^T = moment + damping I``, the damping a multiple of the mean eigenvalue if it is not absolute."""
    mean = float(moment.diagonal().mean())
    moment.diagonal().add_(damping if absolute else damping * mean)
    factor, failed = torch.linalg.cholesky_ex(moment)
    pivots = factor.diagonal().square()
    if mean == 0 and not (absolute and damping > 0):
        raise PerSampleError(f"{what} is 0, and so is every gradient that it is of: there is nothing to score by")
    if failed or pivots.min() <= len(pivots) * torch.finfo(moment.dtype).eps * pivots.max():
        enough = f"{0.1 * mean:.2g}, a tenth of its mean eigenvalue" if absolute else "0.1"
        raise PerSampleError(
            f"{what} has no inverse with damping={damping!r}: pass a larger one, for example damping={enough}, or "
            "a store of fewer columns (a Projection of smaller dim)"
        )
    return factor


def solved_by(values: Tensor, factors: Sequence[tuple[slice, Tensor | None]]) -> Tensor:
    """``(L L^T)^-1`` times each row, for the factor L of each range of columns; 0 where there is none."""
    found = values * 0  # a row that is nan stays it
    for columns, factor in factors:
        if factor is not None:
            found[:, columns] = torch.cholesky_solve(values[:, columns].T, factor).T
    return found
