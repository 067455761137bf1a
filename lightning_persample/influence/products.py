"""Rows of two stores that belong together, their inner products, and inverses of their second moments."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from numbers import Real
from typing import Any, NamedTuple, TypedDict

import numpy
import torch
from torch import Tensor

from lightning_persample.errors import OptionError, PerSampleError, UnsupportedError
from lightning_persample.influence.scores import PairScores, TopScores, as_int, grouped
from lightning_persample.influence.store import GradientStore, check_comparable
from lightning_persample.options import check_option, is_none_or_int

StoreOrPath = GradientStore | str | os.PathLike[str]
"""A store, a part of one, or the folder of one."""


def opened(store: StoreOrPath) -> GradientStore:
    """The store that is given, or that in the folder that is given."""
    is_allowed = isinstance(store, GradientStore | str | os.PathLike)
    check_option("store", store, is_allowed, "a GradientStore, or the path of its folder")
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


Transform = Callable[[Tensor], Tensor]
"""Rows (m, K) to as many rows."""


class Rows(NamedTuple):
    """Rows of a store at the same weights, and what a score takes of them: ``a_i f(g_i)``."""

    store: GradientStore
    places: Tensor  # of each one's sample in the scores, (rows,) int64
    transform: Transform | None = None  # f
    factors: Tensor | None = None  # a, (rows,)

    def taken(self, at: Tensor, values: Tensor) -> Tensor:
        """What is taken of the rows at these positions, which have these values."""
        values = values if self.transform is None else self.transform(values)
        return values if self.factors is None else values * self.factors[at, None].to(values)

    def chosen(self, own: Tensor) -> Rows:
        """Some of the rows."""
        factors = None if self.factors is None else self.factors[own]
        return self._replace(store=self.store.select(own), places=self.places[own], factors=factors)

    def in_order(self) -> Rows:
        """The rows in the order of their samples."""
        return self.chosen(self.places.argsort(stable=True))

    def between(self, start: int, stop: int) -> Rows:
        """The rows of the samples from start to stop, of rows that are in order."""
        return self.chosen(torch.arange(*torch.searchsorted(self.places, torch.tensor([start, stop])).tolist()))


Pair = tuple[Rows, Rows]
"""Rows of training and of test samples, whose products are a part of a score; they add up for each pair of samples."""

Terms = Callable[[], Iterable[Pair]]
"""Makes the pairs whose products add up to a score, one after the other, as they may take much memory."""


@dataclass(frozen=True, eq=False)
class Alignment:
    """The rows of two stores, by the weights that their gradients are taken at."""

    train_index: tuple[int, ...]  # of the training samples, ascending
    test_index: tuple[int, ...]  # of the test samples, ascending
    pairs: tuple[Pair, ...]  # for each of the weights
    unknown: int  # number of rows without an index, which are in no pair
    names: tuple[Any, ...]  # of the weights: a checkpoint or a step

    def terms(
        self, factors: Iterable[Tensor | float] | None = None, transform: Transform | None = None
    ) -> Callable[[], list[Pair]]:
        """The rows of all weights, both sides transformed, with a factor of each, or of each training row."""
        pairs: list[Pair] = []
        for (train, test), factor in zip(self.pairs, repeat(None) if factors is None else factors, strict=False):
            if factor is not None:
                factor = torch.as_tensor(factor, dtype=torch.float64).expand(len(train.places))
            pairs.append((train._replace(transform=transform, factors=factor), test._replace(transform=transform)))
        return lambda: pairs

    def scored(self, name: str, convention: str, terms: Terms, products: Products) -> PairScores:
        """The sum of all terms, with the counts of rows that are in none or are not finite."""
        test_index = self.test_index
        if products.groups is not None:
            test_index, places = grouped(products.groups, test_index)
            terms = _by_group(terms, places)
        shape = len(self.train_index), len(test_index)
        nonfinite = sum(int(torch.as_tensor(rows.store.nonfinite).sum()) for pair in self.pairs for rows in pair)
        what: dict[str, Any] = {"name": name, "convention": convention, "unknown": self.unknown, "nonfinite": nonfinite}
        what |= {"train_index": self.train_index, "test_index": test_index}
        if products.top is None:
            return PairScores(**what, scores=products.matrix(shape, terms))
        widths = [test.store.num_columns for _, test in self.pairs]
        return TopScores(**what, **products.best(shape, terms, widths))


def align(train: GradientStore, test: GradientStore, *, why_one: str | None = None) -> Alignment:
    """The rows of two stores by checkpoint, each sample once in each."""
    check_comparable(train, test)
    train, train_unknown = known_rows(train, "train")
    test, test_unknown = known_rows(test, "test")
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
    train, train_unknown = known_rows(train, "train")
    test, test_unknown = known_rows(test, "test")
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
    return tuple(described(store, number).get("step") for number in store.checkpoints)


def is_rate(value: object) -> bool:
    """Whether a value is a learning rate: a finite number."""
    return isinstance(value, Real) and math.isfinite(value)


def given_rates(train: GradientStore, given: Sequence[float]) -> list[float]:
    """Learning rates that are given for the checkpoints of the training store, one for each."""
    rates: Any = given
    if isinstance(rates, Tensor | numpy.ndarray):
        rates = rates.tolist()
    allowed = isinstance(rates, Sequence) and all(map(is_rate, rates))
    check_option("learning_rates", given, allowed, "a list of finite numbers, one for each checkpoint")
    steps = _described_steps(train)
    if len(rates) != len(steps):
        raise OptionError(
            f"learning_rates has {len(rates)} numbers, but the train store has {len(steps)} checkpoints, steps "
            f"{_listed(steps)}: pass one rate for each, in this order"
        )
    return [float(rate) for rate in rates]


def learning_rates_of(
    train: GradientStore, test: GradientStore, given: Sequence[float] | None, name: str
) -> list[float]:
    """The learning rate of each checkpoint that the training store has rows of."""
    if given is not None:
        return given_rates(train, given)
    train_keys, test_keys = _checkpoint_keys(train, test)
    rates = []
    for key, number in train_keys.items():
        found = {
            side: rate
            for side, store, place in (("train", train, number), ("test", test, test_keys.get(key)))
            if place is not None and (rate := described(store, place).get("learning_rate")) is not None
        }
        if not found:
            raise OptionError(
                f"the learning rate of checkpoint {key} is in neither manifest: pass {name}(..., "
                f"learning_rates=[...]), one for each of the {len(train.checkpoints)} checkpoints"
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


def known_rows(store: GradientStore, side: str) -> tuple[GradientStore, int]:
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


def described(store: GradientStore, number: int) -> Mapping[str, Any]:
    """What the manifest says of a checkpoint; nothing of one that it does not list."""
    listed = store.manifest.checkpoints
    return listed[number] if 0 <= number < len(listed) else {}


def _checkpoint_keys(train: GradientStore, test: GradientStore) -> tuple[dict[str, int], dict[str, int]]:
    """What names each checkpoint in both stores: its weights, where both manifests tell them, else its step or path."""
    both = [[described(store, number) for number in store.checkpoints] for store in (train, test)]
    tell_weights = all(each.get("weights") is not None for of_store in both for each in of_store)
    by_weights = _names_of_weights(both) if tell_weights else {}
    repeated = any(count > 1 for store in (train, test) for count in Counter(_described_steps(store)).values())
    found: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for store, keys in zip((train, test), found, strict=True):
        for number in store.checkpoints:
            one = described(store, number)
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


def _names_of_weights(both: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """A name for each fingerprint of weights, of several stores; empty where two checkpoints of one have the same."""
    names: dict[str, str] = {}
    for of_store in both:
        if len({each["weights"] for each in of_store}) < len(of_store):
            return {}
        for each in of_store:
            if each["weights"] not in names or each.get("step") is not None:
                names[each["weights"]] = f"{_step_named(each)} (weights {each['weights']})"
    return names


def _step_named(one: Mapping[str, Any]) -> str:
    step = one.get("step")
    return "an unknown step" if step is None else f"step {step}"


def _by_step(store: GradientStore, side: str) -> dict[int, GradientStore]:
    """The rows of each optimizer step: their own, or that of their checkpoint where they do not say."""
    steps = store.rows["step"].copy()
    for number in store.checkpoints:
        step = described(store, number).get("step")
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


# Products of rows, block by block


class ScoreOptions(TypedDict, total=False):
    """The keyword arguments that all scores of two stores share, which say how they are computed and what is kept.

    Attributes:
        max_memory: bytes for what is held at a time besides the scores; None reads blocks of 64 MiB.
        dtype: torch.float64, or torch.float32, in which the products are computed and the scores are: it takes half of
            the memory and of the time on a CPU, and far less on a GPU, and the last 7 digits or so of 16.
        device: where the products are computed, such as "cuda"; the scores come back to the CPU. An MPS device has no
            float64.
        top: keep the k largest and the k smallest scores of each test sample and their mean over the test samples, as
            `TopScores`, and never the matrix of all pairs: 24 k bytes for each test sample in place of 8 for each
            training sample of it. None keeps all.
        groups: the group of each test sample, ints or strings, in the order of their indices, or a mapping from these:
            the scores are the means over each group, as those of `PairScores.by_group`, and `top` is of the groups.
    """

    max_memory: int | None
    dtype: torch.dtype
    device: torch.device | str
    top: int | None
    groups: Mapping[int, int | str] | Sequence[int | str] | Tensor | None


_BLOCK_BYTES = 1 << 26


def _device(given: torch.device | str) -> torch.device:
    """The device of this name, where there is one that holds numbers."""
    try:
        device = torch.device(given)
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:  # torch raises each of them
        raise OptionError(f"device={given!r} is not allowed: {str(error).splitlines()[0]}") from error
    return device


class Products:
    """Sums of terms, computed block by block."""

    def __init__(self, options: ScoreOptions, share: int = 1) -> None:
        unknown = sorted(options.keys() - ScoreOptions.__annotations__.keys())
        if unknown:
            raise OptionError(
                f"{unknown[0]!r} is no option of a score; there are {', '.join(ScoreOptions.__annotations__)}"
            )
        self.max_memory, self.top = options.get("max_memory"), as_int(options.get("top"))
        self.groups = options.get("groups")
        self.dtype, self.device = options.get("dtype", torch.float64), _device(options.get("device", "cpu"))
        check_option("top", self.top, is_none_or_int(self.top, 1), "None or an int >= 1")
        is_size = is_none_or_int(self.max_memory, 1)
        check_option("max_memory", self.max_memory, is_size, "None or an int >= 1, in bytes")
        allowed = (torch.float32,) if self.device.type == "mps" else (torch.float32, torch.float64)
        names = " or ".join(map(str, allowed)) + (" on an MPS device" if self.device.type == "mps" else "")
        check_option("dtype", self.dtype, self.dtype in allowed, names)
        self._share = share

    @property
    def _bytes(self) -> int:
        """For one of the three things that are held at a time."""
        return _BLOCK_BYTES if self.max_memory is None else self.max_memory // (3 * self._share)

    def blocks(self, store: GradientStore) -> Iterator[tuple[Tensor, Tensor]]:
        """Places and values of rows, each block in a third of the memory: with the one before it, or with a copy."""
        size = None
        row = store.num_columns * (numpy.dtype(store.manifest.dtype).itemsize + 2 * self.dtype.itemsize)  # as in blocks
        if self.max_memory is not None:
            size = self._bytes
            if size < row:
                raise OptionError(
                    f"max_memory={self.max_memory!r} is too little for rows of {store.num_columns} columns: "
                    f"{3 * self._share * row} bytes are needed"
                )
        for places, values in store.blocks(size, self.dtype):
            yield places, values.to(self.device)

    def held(self, tensor: Tensor) -> Tensor:
        """A tensor where the products are computed, and in their type."""
        return tensor.to(self.device, self.dtype)

    def _products(self, train: Rows, right: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The products of training rows with what is taken of test rows, some at a time, and their samples' places."""
        step = max(1, self._bytes // (right.element_size() * max(1, len(right))))
        for at, values in self.blocks(train.store):
            left, places = train.taken(at, values), train.places[at]
            for start in range(0, len(left), step):
                yield places[start : start + step], left[start : start + step] @ right.T

    def matrix(self, shape: tuple[int, int], terms: Terms) -> Tensor:
        """The sum of the terms for all pairs, (train, test)."""
        # The test store is read once for each term, and the training store once for each block of it. Cost: ``2 n m K``
        # operations for n training and m test rows of K columns, besides the transforms.
        scores = torch.zeros(shape, dtype=self.dtype)
        for train, test in terms():
            for at, values in self.blocks(test.store):
                right, columns = test.taken(at, values), test.places[at]
                for rows, products in self._products(train, right):
                    scores.index_put_((rows[:, None], columns), products.cpu(), accumulate=True)
        return scores

    def diagonal(self, samples: int, terms: Terms) -> Tensor:
        """The sum of the terms for each sample with itself, (samples,), where both sides have the same rows."""
        scores = torch.zeros(samples, dtype=torch.float64)
        for train, test in terms():
            for at, values in self.blocks(train.store):
                products = (train.taken(at, values) * test.taken(at, values)).sum(1)
                scores.index_add_(0, train.places[at], products.cpu().double())
        return scores

    def best(self, shape: tuple[int, int], terms: Terms, widths: Sequence[int]) -> dict[str, Any]:
        """The largest and the smallest sums of the terms for each test sample, and their mean, see `TopScores`."""
        # The transformed rows of a block of test samples are held for all terms, while the training store is read once.
        (samples, tests), item = shape, self.dtype.itemsize
        held = sum(widths) if self.max_memory is not None else max(widths)
        size = min(tests, max(1, self._bytes // (3 * item * held)))
        step = max(1, self._bytes // (4 * item * size))
        k, sums = min(self.top or samples, samples), torch.zeros(samples, dtype=torch.float64)
        parts: list[list[Tensor]] = []
        for start in range(0, tests, size):
            stop = min(start + size, tests)
            sides = [(train.in_order(), self._held(test.in_order(), start, stop)) for train, test in terms()]
            largest, smallest = _Largest(k), _Largest(k)
            for first in range(0, samples, step):
                last = min(first + step, samples)
                block = torch.zeros(last - first, stop - start, dtype=self.dtype, device=self.device)
                for train, right in sides:
                    for rows, products in self._products(train.between(first, last), right):
                        block.index_add_(0, rows.to(self.device) - first, products)
                sums[first:last] += block.sum(1).cpu().double()
                largest.add(block, first)
                smallest.add(block, first, -1)
            parts.append([*largest.found(), *smallest.found()])
        values, places, least, least_places = (torch.cat(each, 1) for each in zip(*parts, strict=True))
        return {
            "scores": values,
            "places": places,
            "least": -least,
            "least_places": least_places,
            "means": sums / tests,
        }

    def _held(self, test: Rows, start: int, stop: int) -> Tensor:
        """What is taken of the test samples from start to stop, in this order."""
        test = test.between(start, stop)
        rows = torch.cat([test.taken(at, values) for at, values in self.blocks(test.store)])
        if self.groups is None:
            return rows
        places = (test.places - start).to(rows.device)
        return rows.new_zeros(stop - start, rows.shape[1]).index_add_(0, places, rows)


def _by_group(terms: Terms, places: Tensor) -> Terms:
    """Terms that add up to the means over groups of test samples, by the place of each sample's group."""
    shares = 1 / torch.bincount(places)[places].double()

    def made() -> Iterator[Pair]:
        for train, test in terms():
            own = shares[test.places]
            factors = own if test.factors is None else own * test.factors
            yield train, test._replace(places=places[test.places], factors=factors)

    return made


class _Largest:
    """The k largest of many values in each column, and their places; those that tie in the order of their places."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._values, self._places = torch.empty(0, 0), torch.empty(0, 0, dtype=torch.int64)

    def add(self, values: Tensor, start: int, sign: int = 1) -> None:
        """Take in further rows, from this place on, (rows, columns); for a sign of -1 with the other sign."""
        own: Any = slice(None)
        if len(self._values) == self._k:
            largest = values.amax(0) if sign == 1 else -values.amin(0)
            own = (~(largest <= self._values[-1])).nonzero().flatten()  # where one may be among the k, or is nan
        places = torch.arange(start, start + len(values), device=values.device)[:, None]
        values = sign * values[:, own]
        values = values.masked_fill(values.isnan(), -torch.inf)  # as what is among no k largest
        places = places.expand_as(values)
        if len(self._values):
            values, places = torch.cat([self._values[:, own], values]), torch.cat([self._places[:, own], places])
        values, places = self._of(values, places)
        if isinstance(own, slice):
            self._values, self._places = values, places
        else:
            self._values[:, own], self._places[:, own] = values, places

    def _of(self, values: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        k = min(self._k, len(values))
        ordered = values.topk(min(k + 1, len(values)), 0)
        order = ordered.indices[:k]
        if len(values) > k:  # where more are equal than there is room for
            crowded = (ordered.values[k] == ordered.values[k - 1]).nonzero().flatten()
            order[:, crowded] = values[:, crowded].sort(stable=True, dim=0, descending=True).indices[:k]
        order = order.sort(0).values
        order = order.gather(0, values.gather(0, order).sort(stable=True, dim=0, descending=True).indices)
        return values.gather(0, order), places.gather(0, order)

    def found(self) -> tuple[Tensor, Tensor]:
        """The values, (k, columns), nan where there are fewer, and their places, -1 there."""
        is_none = self._values == -torch.inf
        return self._values.masked_fill(is_none, torch.nan).cpu(), self._places.masked_fill(is_none, -1).cpu()


COSINE = "cosine under the form "

Between = Callable[[Rows, Rows], Iterable[Pair]]
"""What a score of two sides adds up to."""


def normalized(between: Between, pair: Pair, products: Products) -> Terms:
    """Terms that add up to ``s(z, z') / sqrt(s(z, z) s(z', z'))``, of those of s between two sides."""
    sides = []
    for rows in pair:
        own = rows._replace(places=torch.arange(len(rows.places)))  # rows alone
        sides.append(rows._replace(factors=products.diagonal(len(own.places), partial(between, own, own)).rsqrt()))
    return partial(between, *sides)


def unit_rows(values: Tensor) -> Tensor:
    """Each row over its norm; a row of zeros, which has no direction, is nan."""
    return values / torch.linalg.vector_norm(values, dim=1, keepdim=True)


def second_moments(
    store: GradientStore,
    columns: Sequence[slice],
    products: Products,
    *,
    diagonal: bool = False,
    scales: Sequence[float] | None = None,
) -> tuple[list[Tensor], int]:
    """The sums of ``g g^T``, or their diagonals, over the rows that are finite, for each of some ranges of columns."""
    # With scales m of the ranges they are of ``g g^T / sqrt(1 + ||g||^2 / m)``.
    lengths = [part.stop - part.start for part in columns]
    kept = products.dtype if products.device.type == "mps" else torch.float64
    moments = [
        torch.zeros((size,) if diagonal else (size, size), dtype=kept, device=products.device) for size in lengths
    ]
    count = 0
    for _, values in products.blocks(store):
        finite = values[values.isfinite().all(1)]
        count += len(finite)
        for place, (part, moment) in enumerate(zip(columns, moments, strict=True)):
            right = left = finite[:, part]
            if diagonal:
                moment += right.square().sum(0)
                continue
            if scales is not None and scales[place] > 0:
                left = right * (1 + right.square().sum(1, keepdim=True) / scales[place]).rsqrt()
            if moment.dtype == right.dtype:
                moment.addmm_(left.T, right)
            else:
                moment += left.T @ right
    if count == 0:
        raise PerSampleError(f"none of the {len(store)} gradients of the train store is finite")
    return [moment.cpu().double() for moment in moments], count


def checked_damping(damping: object, absolute: object, *, above_zero: bool) -> None:
    """Refuse a damping that is not allowed."""
    is_allowed = isinstance(damping, int | float) and 0 <= damping < math.inf and not (above_zero and damping == 0)
    expected = f"a number {'> 0' if above_zero else '>= 0'} that is finite"
    check_option("damping", damping, is_allowed and not isinstance(damping, bool), expected)
    check_option("absolute", absolute, isinstance(absolute, bool), "True or False")


def cholesky_factor(moment: Tensor, damping: float, unit: float, what: str) -> Tensor:
    """L with ``L L^T = moment + damping * unit I``, a unit of 1 where the damping is absolute."""
    mean = float(moment.diagonal().mean())
    moment.diagonal().add_(damping * unit)
    factor, failed = torch.linalg.cholesky_ex(moment)
    pivots = factor.diagonal().square()
    if mean == 0 and damping * unit == 0:
        raise PerSampleError(f"{what} is 0, and so is every gradient that it is of: there is nothing to score by")
    if failed or pivots.min() <= len(pivots) * torch.finfo(moment.dtype).eps * pivots.max():
        enough = f"{0.1 * mean / unit:.2g}" + (", a tenth of its mean eigenvalue" if unit == 1 else "")
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
