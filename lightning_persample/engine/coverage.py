"""Every trainable parameter is reached, unused, or unsupported with a reason; and the texts that say so."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import FrameType

from lightning_persample.engine.failure import stop
from lightning_persample.engine.record import PerSampleRecord
from lightning_persample.errors import PerSampleWarning, UnsupportedError

__all__ = ["OUTSIDE", "Coverage", "classify", "listed", "say", "warn_user", "warning_texts"]

OUTSIDE = (
    "its gradient comes from calls without a tensor of the batch: a term of the loss that belongs to no sample, or "
    "data that is not in the batch (drawn or made into a tensor in the training step, or a copy of the batch's "
    "tensors); put such data into the batch "
    "or pass it through mark_samples, and constants of a penalty into buffers of the module"
)
_NAMED = 8
_LAYER = re.compile(r" with `[^`]+`(, `[^`]+`)*")
_SHAPE = re.compile(r"\([\d, ]*\)")
_REMEDIES = (": pass loss_reduction", ": go backward from", ": give the weight", ": take one of the two")
_REMEDY = " Give the weight of each sample in the loss as loss_reduction, {weights}."
OF_CAPTURE = "a tensor of shape (B,)"
OF_CALLBACK = (
    "a function (outputs, batch) that returns a tensor of shape (B,); outputs is what training_step returns, so let it "
    "return what the weights are made of"
)
_NOT_THE_USERS = frozenset({
    "lightning_persample", "torch", "lightning", "pytorch_lightning", "lightning_fabric", "contextlib", "functools",
})  # fmt: skip


@dataclass(frozen=True)
class Coverage:
    """The trainable parameters of one backward.

    Attributes:
        reached: parameters whose per-sample gradient is known.
        unsupported: parameters that got a gradient whose parts per sample are not known, with the reason.
        unused: parameters that got no gradient.
        share: entries of `reached` over entries of `reached` and `unsupported`.
    """

    reached: tuple[str, ...]
    unsupported: Mapping[str, str]
    unused: tuple[str, ...]
    share: float


def classify(
    sizes: Mapping[str, int], got_gradient: Collection[str], reported: Collection[str], refused: Mapping[str, str]
) -> Coverage:
    """Sort the trainable parameters."""
    if not refused and len(reported) == len(sizes):
        return Coverage(tuple(sizes), {}, (), 1.0)
    unsupported = {name: refused[name] for name in sizes if name in refused}
    unsupported |= {
        name: OUTSIDE for name in sizes if name in got_gradient and name not in reported and name not in refused
    }
    reached = tuple(name for name in sizes if name in reported and name not in unsupported)
    unused = tuple(name for name in sizes if name not in reported and name not in unsupported)
    known, unknown = sum(sizes[name] for name in reached), sum(sizes[name] for name in unsupported)
    share = known / (known + unknown) if known + unknown else 1.0
    return Coverage(reached, unsupported, unused, share)


def warning_texts(record: PerSampleRecord, weights: str = OF_CALLBACK) -> list[str]:
    """What a user must know about a record, at most one text on each kind of trouble; `weights`: how to give them."""
    texts = []
    if record.unsupported:
        reasons: dict[str, list[str]] = {}
        for name, reason in record.unsupported.items():
            reasons.setdefault(reason, []).append(name)
        lines = []
        for alike in _alike(reasons):
            names = [name for reason in alike for name in reasons[reason]]
            lines.append(f"{listed(names)}: {_said_once(alike)}")
        texts.append(
            f"Per-sample gradients are missing for {_counted(record.unsupported)}, which the reported norms leave "
            "out:\n" + _bulleted(lines)
        )
    if not record.sq_norms:  # there are no values to say more of
        return texts
    if record.mixing:
        norm = " (GroupNorm in place of BatchNorm)" if any("batch_norm` on" in text for text in record.mixing) else ""
        texts.append(
            "Samples of a batch influence each other, so a sample has no gradient of its own: reported is each "
            "sample's contribution to the batch gradient. For more, use layers and losses that keep samples apart"
            f"{norm}.\n" + _bullets(record.mixing)
        )
    if record.axis_lost:
        texts.append(
            "The batch axis is lost, and values computed from there on cannot be assigned to samples: reported is each "
            "sample's contribution to the batch gradient, which is its own gradient only where the samples stay apart. "
            "Keep them along one axis, pass data that holds them along another through mark_samples, or register a "
            "rule for an op of your own.\n" + _bullets(record.axis_lost)
        )
    if record.weighting:
        texts.append(
            "The samples weigh in the loss otherwise than loss_reduction says, so their own gradients are off by a "
            "factor: reported is each sample's share of the batch gradient, times B where loss_reduction is 'mean'."
            f"{'' if all(map(_has_remedy, record.weighting)) else _REMEDY.format(weights=weights)}\n"
            + _bullets(record.weighting)
        )
    if record.not_additive:
        texts.append(
            "The batch gradient is not the weighted sum of the samples' gradients: reported is what each sample alone "
            "gives.\n" + _bullets(record.not_additive)
        )
    return texts


def say(record: PerSampleRecord, unsupported: str) -> None:
    """Warn of what a user must know about a record; `unsupported` is "warn", "error" or "ignore"."""
    texts = warning_texts(record, OF_CAPTURE)
    if unsupported == "error" and record.unsupported:
        stop(UnsupportedError(texts[0]))
    if unsupported != "ignore":
        for text in texts:
            warn_user(text)


def warn_user(text: str) -> None:
    """Warn, at the line of the user's code that is running: not at one of this package, of torch or of Lightning."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, PerSampleWarning, stacklevel=level if frame is not None else 2)


def _has_remedy(text: str) -> bool:
    return any(remedy in text for remedy in _REMEDIES)


def _counted(parameters: Mapping[str, str]) -> str:
    return "1 parameter" if len(parameters) == 1 else f"{len(parameters)} parameters"


def _bullets(texts: tuple[str, ...]) -> str:
    """The texts, those of the loss before those of layers, and those that differ in the layer alone as one."""
    groups = sorted(_alike(texts), key=lambda alike: _LAYER.search(alike[0]) is not None)
    return _bulleted([_said_once(alike) for alike in groups])


def _bulleted(lines: list[str]) -> str:
    more = [f"- and {len(lines) - _NAMED} more"] if len(lines) > _NAMED else []
    return "\n".join([f"- {line}" for line in lines[:_NAMED]] + more)


def _alike(texts: Iterable[str]) -> list[list[str]]:
    """The texts in groups that differ in nothing but shapes and the names of a layer's parameters."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(_SHAPE.sub("", _LAYER.sub("", text)), []).append(text)
    return list(groups.values())


def _said_once(alike: list[str]) -> str:
    more = len(alike) - 1
    return alike[0] + (f" (and {more} more such {'call' if more == 1 else 'calls'})" if more else "")


def listed(names: list[str]) -> str:
    """Names of parameters in a message, the first of many."""
    shown = ", ".join(f"`{name}`" for name in names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
