"""What the cross-entropy of a training step says of each sample: its loss, its error, and its margin."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_persample.batch_axis.axis import BatchAxis, Lost
from lightning_persample.batch_axis.batch import BatchLayout
from lightning_persample.capture.failure import fault_of
from lightning_persample.capture.observing import ObservingMode

CLASS_LOSSES = (F.cross_entropy, F.nll_loss)  # that are read; both take the labels second
CLASS_COLUMNS = ("loss", "el2n", "margin")
_SIGNATURES = {function: inspect.signature(function) for function in CLASS_LOSSES}


class ClassLosses:
    """The calls of a class loss in a training step, of which one is read."""

    def __init__(self) -> None:
        # Of each call where the samples lie in its rows, and the columns; or why it cannot be read
        self._calls: list[tuple[BatchAxis, dict[str, Tensor]] | str] = []

    def note(
        self,
        place_of: Callable[[Tensor, Tensor], BatchAxis | str],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        """Read a call of one of the `CLASS_LOSSES`, if it may be of the loss; `place_of` finds the samples in it."""
        if not result.requires_grad:
            return
        given = _SIGNATURES[function].bind(*args, **kwargs)
        given.apply_defaults()
        outputs, labels = given.arguments["input"], given.arguments["target"]
        place = _why_not(function.__name__, outputs, labels) or place_of(outputs, labels)
        if isinstance(place, str):
            self._calls.append(place)
            return
        with torch.no_grad():
            self._calls.append((place, class_columns(outputs.detach(), labels, given.arguments["ignore_index"])))

    def fail(self, error: Exception) -> None:
        """Have no columns, because a call could not be read."""
        self._calls = [fault_of(error, "reading the loss")]

    def of_samples(self, batch_size: int) -> tuple[dict[str, Tensor], str]:
        """The columns, each (B,), of the one call, and why some are missing."""
        if len(self._calls) != 1:
            several = f"it calls them {len(self._calls)} times" if self._calls else "it calls neither"
            return {}, (
                "they are read where training_step calls F.cross_entropy or F.nll_loss, on outputs with a gradient, "
                f"once, and {several}"
            )
        (call,) = self._calls
        if isinstance(call, str):
            return {}, call
        place, found = call
        why = _why_not_in_order(place, len(found["loss"]), batch_size)
        if why:
            return {}, why
        if place.owner is not None:
            found = {name: values[place.owner.order.to(values.device)] for name, values in found.items()}
        return found, "" if "margin" in found else "the outputs have one class, and no other to compare with"


def place_by_marks(mark_of: Callable[[Tensor], object], outputs: Tensor, labels: Tensor) -> BatchAxis | str:
    """Where the samples lie in the rows of a loss, by what a capture knows of its tensors; or why it is not known."""
    place, other = mark_of(outputs), mark_of(labels)
    unknown = "it is not known whose the rows of its {} are"
    if not isinstance(place, BatchAxis):
        return unknown.format("outputs") + (f": {place.reason}" if isinstance(place, Lost) else "")
    if isinstance(other, Lost):
        return f"{unknown.format('labels')}: {other.reason}"
    if isinstance(other, BatchAxis) and not other.same_place(place):
        return "the loss pairs outputs with labels of other samples"
    return place


def place_in_batch(layout: BatchLayout, outputs: Tensor, labels: Tensor) -> BatchAxis | str:
    """Where the samples lie in the rows of a loss whose labels are a tensor of the batch as it came."""
    for (_, tensor), place in zip(layout.tensors, layout.places, strict=True):
        is_same = tensor.numel() == labels.numel() and tensor.data_ptr() == labels.data_ptr()
        if is_same and tensor.is_contiguous() and labels.is_contiguous() and isinstance(place, BatchAxis):
            return place.moved(0)
    return "an extra pass cannot follow rows, and the labels of the loss are not a tensor of the batch as it came"


def _why_not_in_order(place: BatchAxis, rows: int, batch_size: int) -> str:
    """Why the rows of a loss are not those of the samples, each once, in an order that is known."""
    if rows != batch_size:
        return f"the loss has {rows} rows, but the batch has {batch_size} samples"
    if place.dim != 0 or place.rows != 1:
        return "the rows of the loss are not one of each sample"
    if place.owner is None:
        return ""
    if place.mixing is not None:  # of several samples, the owner may be any
        return f"the rows of the loss are in another order than the batch, and {place.mixing}"
    each = torch.arange(batch_size, device=place.owner.sample.device)
    is_order = torch.equal(place.owner.sample.sort().values, each)
    return "" if is_order else "some samples have several rows in the loss, and others none"


@contextmanager
def class_losses_noted(note: Callable[..., Any]) -> Iterator[None]:
    """Have the calls of class losses noted in this context, where no capture does."""

    def answer(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        if function in CLASS_LOSSES:
            note(function, args, kwargs, result)
        return result

    with ObservingMode(answer).observing():
        yield


def _why_not(name: str, outputs: Tensor, labels: Tensor) -> str:
    if outputs.dim() == 2 and labels.dim() == 1 and not labels.is_floating_point():
        return ""
    return (
        f"F.{name} takes outputs {tuple(outputs.shape)} and labels {tuple(labels.shape)} of {labels.dtype}: they are "
        "read of outputs (B, classes) and integer labels (B,)"
    )


def class_columns(outputs: Tensor, labels: Tensor, ignore_index: int = -100) -> dict[str, Tensor]:
    """Of outputs (B, C), or their log-softmax, and labels (B,): the columns, each (B,); nan where one is no class."""
    outputs = outputs if outputs.dtype in (torch.float32, torch.float64) else outputs.float()
    labels, classes = labels.long(), outputs.shape[1]
    ignored = (labels == ignore_index) | (labels < 0) | (labels >= classes)
    chosen = labels.masked_fill(ignored, 0)[:, None]
    log_p, own = outputs.log_softmax(1), outputs.gather(1, chosen)[:, 0]
    errors = log_p.exp().scatter_add(1, chosen, -torch.ones_like(own)[:, None]).norm(dim=1)
    found = {"loss": -log_p.gather(1, chosen)[:, 0], "el2n": errors}
    if classes > 1:
        found["margin"] = own - outputs.scatter(1, chosen, -torch.inf).amax(1)
    return {name: values.masked_fill(ignored, torch.nan) for name, values in found.items()}
