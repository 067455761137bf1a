"""Label noise of a known kind in the training data, and how well each score of the ledger finds it."""

from __future__ import annotations

import copy
import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_persample.batch_axis.batch import batch_tensors
from lightning_persample.callbacks.loggers import log_table, save_table
from lightning_persample.callbacks.sample_index import TrainingView, keys_of, why_no_keys
from lightning_persample.callbacks.writer import Columns, PerSampleGradientWriter
from lightning_persample.capture.failure import guard, stop
from lightning_persample.capture.record import PerSampleRecord
from lightning_persample.errors import OptionError, PerSampleError, UnsupportedError, of_user
from lightning_persample.influence.by_sample import aligned
from lightning_persample.influence.ledger import Manifest, read_manifest
from lightning_persample.influence.optional_packages import pandas
from lightning_persample.influence.scores import el2n, grand
from lightning_persample.influence.tracin import self_influence
from lightning_persample.options import CaptureOptions, check_option, is_int, is_path
from lightning_persample.reference.untouched import untouched

Relabel = Callable[[Any, Callable[[Any], Any]], Any]

_SHARE = 0.2  # of the samples, among which the flipped ones are looked for
_ENOUGH = 100  # flipped samples above a score: their number, and so the estimate, has an error of about a tenth
_REFUSED = 0.05  # how often the upper bound of the share of wrong labels is too small
# The scores, with the sign by which the largest are suspicious, and the column that each needs.
_SCORES: dict[str, tuple[float, str, Callable[[Any], Any]]] = {
    "loss": (1.0, "loss", lambda ledger: el2n(ledger, "loss")),
    "el2n": (1.0, "el2n", el2n),
    "margin": (-1.0, "margin", lambda ledger: el2n(ledger, "margin")),
    "grand": (1.0, "norm", grand),
    "self_influence": (1.0, "norm", self_influence),
}


class LabelNoiseProbe(PerSampleGradientWriter):
    """Flips a known share of the training labels, and reports how well each score of the ledger finds them.

    It tells which score to trust on your own data and model, where nobody knows the wrong labels: some samples, chosen
    uniformly, get the label of another class, chosen uniformly, and at the end of the fit `report` has the AUC and the
    recall of ranking them first by each score of the ledger:

    - "loss", "el2n" and "margin", the means of these columns (see `PerSampleGradientWriter`), the margin with its sign
      turned;
    - "grand", the mean norm, and "self_influence", see the functions of that name.

    It is the one callback that changes the training data, by design: a training with it is a run of its own, with
    `fraction` of its labels wrong. What is changed are samples on their way from the dataset into a training batch.
    Dataset, sampler, DataLoader, data module, module, validation data, the order of the samples and all random numbers
    are those of a fit without it, whatever the fit comes to. The flips depend on `seed` and the length of the dataset
    alone, so that they are the same in each epoch, process and resumed part of a run.

    It is a `PerSampleGradientWriter`: the ledger is in `dirpath`, and the same scores can be made of it. The loggers
    that have tables get the report as one, and the folder has it as ``_label_noise.csv``.

    >>> samples = [(0.5, 0), (0.1, 1), (0.9, 2)]
    >>> probe = LabelNoiseProbe(fraction=0.34, num_classes=3)
    >>> probe.fraction, probe.report is None
    (0.34, True)

    Args:
        fraction: the share of the samples that get a wrong label, at least one.
        seed: of the choice of samples and labels.
        num_classes: the labels are 0 to num_classes - 1; None reads each sample of the dataset once, in each process at
            the start of the fit, and takes the labels that there are but for negative ones: -100, say, which losses
            ignore, is no class. Samples with such a label are not flipped, nothing is flipped to it, and they are left
            out of the report. With a number a negative label of a sample to be flipped is refused.
        relabel: a callable ``(sample, change)`` that returns the sample with ``change(label)`` in place of its label,
            an int: ``lambda sample, change: {**sample, "label": change(sample["label"])}``. It is given a deep copy of
            the sample and may change that in place, while the dataset's own stays as it is. None takes the second part
            of a sample that is a pair: an integer, or an integer tensor or array, without axes for one sample and
            (n,) for a batch of n that the dataset gives as a whole.
        dirpath: the folder of the ledger; None is "label_noise" in the Trainer's `log_dir`. A run that is to be resumed
            needs one.
        every_n_steps: see `PerSampleGradientWriter`, as all that follow.
        columns: further columns; scores whose columns are left out are not reported.
        flush_every: count of captured batches from one file to the next.
        overwrite: remove the ledger of another run from the folder.
        capture: `loss_reduction` and further options, see `PerSampleCallback`; `sample_index` has to be None.

    Attributes:
        report: a `LabelNoiseReport` from the end of a fit on, in each process; None before, and with a warning where
            the ledger cannot be read.

    Raises:
        OptionError: an option has a value that is not allowed; at the start of a fit, the training data are several
            loaders, iterable, or without integer keys or labels.
    """

    def __init__(
        self,
        fraction: float = 0.02,
        *,
        seed: int = 0,
        num_classes: int | None = None,
        relabel: Relabel | None = None,
        dirpath: str | Path | None = None,
        every_n_steps: int | None = 1,
        columns: Columns = ("loss", "el2n", "margin"),
        flush_every: int = 100,
        overwrite: bool = False,
        **capture: Unpack[CaptureOptions],
    ) -> None:
        super().__init__(
            "label_noise" if dirpath is None else dirpath,
            every_n_steps,
            columns=columns,
            flush_every=flush_every,
            overwrite=overwrite,
            **capture,
        )
        share: Any = fraction
        is_share = isinstance(share, (int, float)) and 0 < share < 1
        is_folder = isinstance(share, (str, Path)) and is_path(share)
        hint = f" (the folder of the ledger is dirpath={str(share)!r})" if is_folder else ""
        check_option("fraction", fraction, is_share, f"a number between 0 and 1{hint}")
        check_option("seed", seed, is_int(seed, 0) and seed < 2**64, "an int >= 0 and < 2**64")
        check_option("num_classes", num_classes, num_classes is None or is_int(num_classes, 2), "None or an int >= 2")
        check_option("relabel", relabel, relabel is None or callable(relabel), "None or a callable (sample, change)")
        why = "None here, because labels are flipped by the index that the sampler draws"
        check_option("sample_index", capture.get("sample_index"), capture.get("sample_index") is None, why)
        self.fraction, self.seed, self.num_classes, self.relabel = fraction, seed, num_classes, relabel
        self._is_placed = dirpath is not None
        self._flips: _Flips | None = None
        self.report: LabelNoiseReport | None = None

    @property
    def flipped(self) -> tuple[int, ...]:
        """The indices of the samples with a flipped label, ascending; none before a fit."""
        return () if self._flips is None else tuple(sorted(self._flips.offsets))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the folder, and see that no other callback changes the data."""
        if stage != "fit":
            return
        self._flips, self.report = None, None
        if sum(isinstance(each, LabelNoiseProbe) for each in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise OptionError("this Trainer has two LabelNoiseProbe: let each have a run of its own")
        folder = of_user(getattr, trainer, "log_dir")  # asks all processes, and the logger
        if not self._is_placed:
            self._write_to(Path(folder or trainer.default_root_dir) / "label_noise")
        super().setup(trainer, pl_module, stage)

    def _training_view(self, loaders: list[Any]) -> TrainingView:
        """The training data with flipped labels; whatever keeps it from that is raised as it is."""
        return guard(self._flipped_view, stop)(loaders)

    def _flipped_view(self, loaders: list[Any]) -> TrainingView:
        if len(loaders) != 1:
            raise OptionError(f"LabelNoiseProbe takes one train dataloader, and there are {len(loaders)}")
        unknown = why_no_keys(loaders[0])
        if unknown is not None:
            raise OptionError(f"LabelNoiseProbe flips labels by the index that the sampler draws, but {unknown.why}")
        dataset = loaders[0].dataset
        if not hasattr(dataset, "__len__"):
            raise OptionError(f"LabelNoiseProbe chooses among the samples, but {type(dataset).__name__} has no len()")
        length = len(dataset)
        relabel = _relabel_second if self.relabel is None else _OnCopy(self.relabel)
        if self._flips is None:
            given = self.num_classes
            classes, without = _classes_of(dataset, relabel) if given is None else (range(given), ())
            self._flips = self._choose(length, tuple(classes), frozenset(without), relabel)
        elif self._flips.length != length:
            raise OptionError(
                f"the training dataset has {length} samples now and had {self._flips.length} before: "
                "LabelNoiseProbe needs the same samples in the whole fit"
            )
        return TrainingView(self._flips)

    def _choose(self, length: int, classes: tuple[int, ...], without: frozenset[int], relabel: Relabel) -> _Flips:
        """The samples whose labels are flipped, and by how many classes."""
        if len(classes) < 2:
            there = ", ".join(map(str, classes)) or "none (a negative one is no class)"
            raise OptionError(f"LabelNoiseProbe needs two classes, and the labels are {there}")
        generator = torch.Generator().manual_seed(self.seed)
        order = [index for index in torch.randperm(length, generator=generator).tolist() if index not in without]
        index = order[: max(1, round(self.fraction * len(order)))]
        offsets = torch.randint(1, len(classes), (len(index),), generator=generator).tolist()
        return _Flips(length, classes, without, dict(zip(index, offsets, strict=True)), relabel)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the folder ready, once the labels are flipped."""
        if self._flips is None:
            raise OptionError(
                "LabelNoiseProbe could not flip labels, because the training data were made before the callbacks' "
                "setup, or in a way that it cannot follow"
            )
        super().on_train_start(trainer, pl_module)

    def _new_manifest(self, trainer: Trainer, pl_module: LightningModule) -> Manifest:
        manifest, flips = super()._new_manifest(trainer, pl_module), self._flips
        of_flips = {"fraction": self.fraction, "seed": self.seed}
        if flips is not None:
            of_flips |= {"samples": flips.length, "classes": len(flips.classes)}
        return replace(manifest, settings={**manifest.settings, "label_noise": of_flips})

    def on_per_sample_gradients(
        self, trainer: Trainer, pl_module: LightningModule, record: PerSampleRecord, batch: Any, batch_idx: int
    ) -> None:
        """Keep the norms of a backward, of samples that are known."""
        if not isinstance(keys_of(record), Tensor):
            why = self._why_no_index(trainer)
            if record.sample_index is not None:
                why = "the train dataloader stands in a dict or list: pass it alone"
            stop(UnsupportedError(f"LabelNoiseProbe has no index of the samples of a batch: {why}"))
        super().on_per_sample_gradients(trainer, pl_module, record, batch, batch_idx)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what there is, and rank the samples by each score."""
        is_written = self._parts is not None
        super().on_train_end(trainer, pl_module)
        made: tuple[LabelNoiseReport | None, str] = None, ""
        if is_written and trainer.is_global_zero and self._flips is not None:
            try:
                made = _report_of(self._folder, read_manifest(self._folder).columns, self._flips), ""
            except (PerSampleError, OSError) as error:  # the other processes would wait for this one
                made = None, str(error)
        self.report, why = trainer.strategy.broadcast(made)
        if why:
            self._warn(f"LabelNoiseProbe has no report: {why}")
        if self.report is not None and trainer.is_global_zero:
            rows = self.report.rows()
            save_table(str(self._folder / "_label_noise.csv"), _COLUMNS, rows)  # (readers of Parquet pass over it)
            log_table(trainer.loggers, "label_noise", _COLUMNS, rows, trainer.global_step)


# Flips


@dataclass(frozen=True)
class _Flips:
    """Which samples of a dataset get another label; given items and their keys, it changes those."""

    length: int
    classes: tuple[int, ...]  # ascending
    without: frozenset[int]  # the indices of samples whose label is no class
    offsets: Mapping[int, int]  # by index: so many classes further, around
    relabel: Relabel

    def __call__(self, items: Any, keys: list[Any]) -> list[Any]:
        """The items, those that are flipped with another label."""
        if not isinstance(items, list) or len(items) != len(keys):
            raise OptionError(
                f"LabelNoiseProbe needs one item for each of the {len(keys)} keys that the dataset's __getitems__ is "
                f"given, but it returned {type(items).__name__}"
            )
        return [self._changed(item, key) for item, key in zip(items, keys, strict=True)]

    def _changed(self, item: Any, key: Any) -> Any:
        if isinstance(key, (list, range)) or (hasattr(key, "tolist") and key.ndim == 1):  # of a batch
            offsets = [self._offset(each) for each in key]
            return self.relabel(item, lambda labels: self._of_batch(labels, offsets)) if any(offsets) else item
        offset = self._offset(key)
        return self.relabel(item, lambda label: _like(label, self._next(_int_of(label), offset))) if offset else item

    def _offset(self, key: Any) -> int:
        try:
            index = operator.index(key)
        except TypeError:
            index = -1
        if not 0 <= index < self.length:
            raise OptionError(
                f"LabelNoiseProbe flips labels by their index, 0 to {self.length - 1}, and the sampler draws {key!r}"
            )
        return self.offsets.get(index, 0)

    def _of_batch(self, labels: Any, offsets: list[int]) -> Any:
        if not isinstance(labels, (Tensor, np.ndarray)) or labels.shape != (len(offsets),):
            raise OptionError(
                f"LabelNoiseProbe needs the labels of a batch of {len(offsets)} samples that the dataset gives as a "
                f"whole as a tensor or an array ({len(offsets)},), and they are {_described(labels)}"
            )
        new = [
            self._next(_int_of(each), offset) if offset else int(each)
            for each, offset in zip(labels, offsets, strict=True)
        ]
        return torch.as_tensor(new).to(labels) if isinstance(labels, Tensor) else np.array(new, labels.dtype)

    def _next(self, label: int, offset: int) -> int:
        place = bisect_left(self.classes, label)
        if place == len(self.classes) or self.classes[place] != label:
            raise OptionError(
                f"LabelNoiseProbe knows the {len(self.classes)} labels from {self.classes[0]} to {self.classes[-1]}, "
                f"and a sample has {label}"
            )
        return self.classes[(place + offset) % len(self.classes)]


@dataclass(frozen=True)
class _OnCopy:
    """A `relabel` of the user's that is given copies, so that what it changes in place is not the dataset's."""

    relabel: Relabel

    def __call__(self, sample: Any, change: Callable[[Any], Any]) -> Any:
        is_changed = False

        def noted(label: Any) -> Any:
            nonlocal is_changed
            is_changed = True
            return change(label)

        # Of a view, a deep copy would copy all that shares its memory: the whole dataset.
        copied = {id(tensor): tensor.clone() for _, tensor in batch_tensors(sample)}
        found = self.relabel(copy.deepcopy(sample, copied), noted)
        if found is None or not is_changed:
            did = "returned None" if is_changed else "did not call change"
            raise OptionError(
                f"LabelNoiseProbe needs relabel to return the sample with change(label) in place of its label, and it "
                f"{did} for {_described(sample)}"
            )
        return found


def _relabel_second(sample: Any, change: Callable[[Any], Any]) -> Any:
    """The sample, a pair, with another second part."""
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        raise OptionError(
            f"LabelNoiseProbe takes the second part of a sample that is a pair as its label, and the sample is "
            f"{_described(sample)}: pass relabel=<function (sample, change) that returns the sample with "
            "change(label) in place of its label>"
        )
    kind: Any = type(sample)
    parts = (sample[0], change(sample[1]))
    return kind._make(parts) if hasattr(kind, "_make") else kind(parts)  # (a named tuple has its own way)


def _described(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and dtype {value.dtype}"
    size = f" of length {len(value)}" if isinstance(value, (tuple, list, dict)) else ""
    return f"a {type(value).__name__}{size}"


def _int_of(label: Any) -> int:
    is_int_tensor = (
        isinstance(label, Tensor) and label.dim() == 0 and not (label.is_floating_point() or label.is_complex())
    )
    is_int_array = isinstance(label, (np.ndarray, np.generic)) and label.ndim == 0 and label.dtype.kind in "iub"
    if not (isinstance(label, int) or is_int_tensor or is_int_array):
        raise OptionError(
            f"LabelNoiseProbe flips integer labels, and the label of a sample is {_described(label)}: pass "
            "relabel=<function (sample, change) that gives change an int>"
        )
    return int(label)


def _like(label: Any, value: int) -> Any:
    """A label of the same type."""
    if isinstance(label, Tensor):
        return torch.full_like(label, value)
    if isinstance(label, np.ndarray):
        return np.full_like(label, value)
    return label.dtype.type(value) if isinstance(label, np.generic) else type(label)(value)


def _classes_of(dataset: Any, relabel: Relabel) -> tuple[list[int], set[int]]:
    """The classes of the samples of a dataset, ascending, and the indices of samples whose label is none."""
    found: dict[int, set[int]] = {}

    def note(label: Any) -> Any:
        found.setdefault(_int_of(label), set()).add(index)
        return label

    with untouched(nn.Module()):  # random numbers are as if it had not been read
        for index in range(len(dataset)):
            relabel(dataset[index], note)
    without = [found[label] for label in found if label < 0]
    return sorted(label for label in found if label >= 0), set().union(*without)


# The report

_COLUMNS = ("score", "auc", "corrected_auc", "recall")


@dataclass(frozen=True)
class Detection:
    """How well a score finds the flipped labels.

    >>> Detection(auc=0.94, corrected_auc=0.99, recall=1.0)
    Detection(auc=0.94, corrected_auc=0.99, recall=1.0)

    Attributes:
        auc: of ranking the flipped samples before all others; 0.5 is chance.
        corrected_auc: an estimate of the AUC of ranking wrong labels before right ones; nan where there is none.
        recall: the share of the flipped samples among the first 20% of all.
    """

    auc: float
    corrected_auc: float
    recall: float


@dataclass(frozen=True)
class LabelNoiseReport:
    """How well each score of a ledger finds the labels that a `LabelNoiseProbe` has flipped; ``print`` shows a table.

    AUC is the Mann-Whitney statistic: the share of pairs of a flipped sample and another one in which the flipped one
    has the larger score, a tie being half a pair. Where your data have wrong labels of their own, these rank as high as
    the flipped ones but count as others, and a flip may put a wrong label right: ``auc`` is below what it would be
    with right labels in all others. With a share a of wrong labels among the others and b of right ones among the
    flipped, ``auc = (1 - a - b) auc* + (a + b) / 2`` (the reference), from which ``corrected_auc`` is auc*, with
    ``b = a / (classes - 1)``, the estimate `wrong` in place of a, and 1 where it is larger. It is an estimate, too
    large where `wrong` is, and nan where no auc* has that ``auc``: where ``a + b`` is 1 or more, and where ``auc`` is
    less than ``(a + b) / 2``. Samples whose score is nan are left out of it.

    `wrong` and `wrong_at_most` take wrong labels to look as the flipped ones do: as likely in each sample, and each
    other class as likely. Mistakes between classes that look alike may rank lower, and are then missing in both.

    >>> scores = {"loss": Detection(0.94, 0.99, 1.0)}
    >>> print(LabelNoiseReport(scores, samples=100, flipped=2, wrong=0.1, wrong_at_most=0.4))
    score    AUC  corrected  recall at 20%
     loss  0.940      0.990          1.000
    2 of 100 samples had a flipped label
    of the others an estimated 10.0% look as wrong by their loss, at most 40.0% (95% confidence)

    Attributes:
        scores: by name of the score.
        samples: count of samples that were seen.
        flipped: count of those with a flipped label.
        wrong: an estimate of the share of the other samples whose label is wrong, by the first of the scores: of n
            others X reach the r-th largest score of the f flipped ones, and the estimate is ``X (f + 1) / (r n)``, at
            most 1, with ``r = f / (1 + f / 100)`` rounded, for an error of about a tenth. Its mean over
            the choice of the flips is the share of wrong labels if no right one is among the X, and more than that
            share where right ones look as wrong. nan where nothing was flipped, or all.
        wrong_at_most: an upper bound of that share with 95% confidence: with more wrong labels than these, in at most 5
            of 100 choices of the flips X or fewer would reach the r-th largest score (exact: the wrong and the flipped
            ones stand in every order with equal probability). Right labels that look wrong make it larger.

    Reference: Menon et al. 2015, Learning from corrupted binary labels via class-probability estimation, ICML.
    """

    scores: Mapping[str, Detection]
    samples: int
    flipped: int
    wrong: float
    wrong_at_most: float

    def rows(self) -> list[tuple[Any, ...]]:
        """The table: name, AUC, corrected AUC and recall of each score."""
        return [(name, each.auc, each.corrected_auc, each.recall) for name, each in self.scores.items()]

    def to_pandas(self) -> Any:
        """The table as a ``pandas.DataFrame``."""
        return pandas().DataFrame(self.rows(), columns=list(_COLUMNS))

    def __str__(self) -> str:
        shown = [("score", "AUC", "corrected", "recall at 20%")]
        shown += [(name, *(f"{number:.3f}" for number in numbers)) for name, *numbers in self.rows()]
        lines = [*aligned(shown), f"{self.flipped} of {self.samples} samples had a flipped label"]
        if not math.isnan(self.wrong):
            by = next(iter(self.scores))
            lines.append(
                f"of the others an estimated {self.wrong:.1%} look as wrong by their {by}, at most "
                f"{self.wrong_at_most:.1%} (95% confidence)"
            )
        return "\n".join(lines)


def _report_of(ledger: Any, columns: Collection[str], flips: _Flips) -> LabelNoiseReport:
    """What each score of a ledger with these columns makes of the flips."""
    ranked: dict[str, tuple[Tensor, Tensor]] = {}
    positive = has_class = torch.zeros(0, dtype=torch.bool)
    for name, (sign, column, score_of) in _SCORES.items():
        if column in columns:
            found = score_of(ledger)
            has_class = torch.tensor([index not in flips.without for index in found.index])
            positive = torch.tensor([index in flips.offsets for index in found.index])
            known = has_class & ~found.scores.isnan()
            if known.any():
                ranked[name] = sign * found.scores[known], positive[known]
    wrong, most = next((_share_as_wrong(*pair) for pair in ranked.values()), (math.nan, 1.0))
    noise = wrong + wrong / (len(flips.classes) - 1)
    scores = {}
    for name, pair in ranked.items():
        auc = auc_of(*pair)
        is_possible = noise < 1 and auc >= noise / 2
        corrected = min(1.0, (auc - noise / 2) / (1 - noise)) if is_possible else math.nan
        scores[name] = Detection(auc, corrected, recall_of(*pair))
    return LabelNoiseReport(scores, int(has_class.sum()), int(positive.sum()), wrong, most)


def _share_as_wrong(scores: Tensor, positive: Tensor) -> tuple[float, float]:
    """An estimate of the share of the others that are as the positives, and its upper bound, see `LabelNoiseReport`."""
    flipped = int(positive.sum())
    others = len(scores) - flipped
    if not flipped or not others:
        return math.nan, 1.0
    rank = max(1, round(flipped / (1 + flipped / _ENOUGH)))
    reached = int((scores[~positive] >= scores[positive].topk(rank).values[-1]).sum())
    known = range(min(reached, others), others + 1)  # the first of them is never refused
    allowed = bisect_left(known, True, key=lambda wrong: _share_of_orders(wrong, reached, rank, flipped) <= _REFUSED)
    return min(1.0, reached * (flipped + 1) / (rank * others)), known[allowed - 1] / others


def _share_of_orders(wrong: int, reached: int, rank: int, flipped: int) -> float:
    """The share of orders of wrong and flipped ones in which at most `reached` wrong precede the rank-th flipped."""
    # That is, in which `rank` or more of the flipped are among the first ``reached + rank``: hypergeometric.
    if wrong <= reached:
        return 1.0

    def log_choices(count: int, chosen: Tensor) -> Tensor:
        total = torch.tensor(float(count), dtype=torch.float64)
        return (total + 1).lgamma() - (chosen + 1).lgamma() - (total - chosen + 1).lgamma()

    first = torch.tensor(float(reached + rank), dtype=torch.float64)
    among = torch.arange(rank, min(flipped, reached + rank) + 1, dtype=torch.float64)
    logs = log_choices(flipped, among) + log_choices(wrong, first - among) - log_choices(wrong + flipped, first)
    return float(logs.exp().sum())


def auc_of(scores: Tensor, positive: Tensor) -> float:
    """The Mann-Whitney statistic of scores (n,) and a mask (n,): how often a positive has the larger score."""
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2).double()[place]  # equal scores share the mean of their ranks
    above = int(positive.sum())
    below = len(scores) - above
    pairs = above * below
    return float(ranks[positive].sum() - above * (above + 1) / 2) / pairs if pairs else math.nan


def recall_of(scores: Tensor, positive: Tensor, share: float = _SHARE) -> float:
    """The share of the positives among the first of all, by scores (n,); equal scores share the places."""
    places = int(len(scores) * share)
    if not places or not positive.any():
        return math.nan
    last = scores.topk(places).values[-1]
    above, equal = scores > last, scores == last
    found = positive[above].sum() + positive[equal].sum() * (places - above.sum()) / equal.sum()
    return float(found / positive.sum())
