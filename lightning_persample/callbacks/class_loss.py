"""What the cross-entropy of a training step says of each sample: its loss, its error, and its margin."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_persample.capture.observing import ObservingMode, modules_do_not_see, without_compilation

CLASS_LOSSES = (F.cross_entropy, F.nll_loss)  # that are read; both take the labels second
CLASS_COLUMNS = ("loss", "el2n", "margin")
_SIGNATURES = {function: inspect.signature(function) for function in CLASS_LOSSES}


class ClassLosses:
    """The calls of a class loss in a training step, of which one is read."""

    def __init__(self) -> None:
        self._columns: dict[str, Tensor] = {}
        self._calls, self._why = 0, ""

    def note(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Read a call of one of the `CLASS_LOSSES`."""
        self._calls += 1
        given = _SIGNATURES[function].bind(*args, **kwargs)
        given.apply_defaults()
        outputs, labels = given.arguments["input"].detach(), given.arguments["target"].detach()
        self._why = _why_not(function.__name__, outputs, labels)
        if not self._why:
            with torch.no_grad():
                self._columns = class_columns(outputs, labels, given.arguments["ignore_index"])

    def of_samples(self, batch_size: int) -> tuple[dict[str, Tensor], str]:
        """The columns, each (B,), of the one call; or none, and why."""
        if self._calls != 1:
            several = f"it calls them {self._calls} times" if self._calls else "it calls neither"
            return {}, f"they are read where training_step calls F.cross_entropy or F.nll_loss once, and {several}"
        if not self._why and len(self._columns["loss"]) != batch_size:
            rows = len(self._columns["loss"])
            return {}, f"the loss has {rows} rows, but the batch has {batch_size} samples"
        return self._columns, self._why


@contextmanager
def class_losses_noted(note: Callable[..., Any]) -> Iterator[None]:
    """Have the calls of class losses noted in this context, where no capture does."""

    def answer(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function in CLASS_LOSSES:
            note(function, args, kwargs)
        return function(*args, **kwargs)

    with without_compilation(), modules_do_not_see(), ObservingMode(answer).active():
        yield


def _why_not(name: str, outputs: Tensor, labels: Tensor) -> str:
    if outputs.dim() == 2 and labels.dim() == 1 and not labels.is_floating_point():
        return ""
    return (
        f"F.{name} takes outputs {tuple(outputs.shape)} and labels {tuple(labels.shape)} of {labels.dtype}: they are "
        "read of outputs (B, classes) and integer labels (B,)"
    )


def class_columns(outputs: Tensor, labels: Tensor, ignore_index: int = -100) -> dict[str, Tensor]:
    """Of outputs (B, C), or their log-softmax, and labels (B,): the columns, each (B,); nan where one is ignored."""
    outputs = outputs if outputs.dtype in (torch.float32, torch.float64) else outputs.float()
    ignored = labels == ignore_index
    chosen = labels.masked_fill(ignored, 0)[:, None]
    log_p, own = outputs.log_softmax(1), outputs.gather(1, chosen)[:, 0]
    others = outputs.scatter(1, chosen, -torch.inf).amax(1)
    errors = log_p.exp().scatter_add(1, chosen, -torch.ones_like(own)[:, None]).norm(dim=1)
    found = {"loss": -log_p.gather(1, chosen)[:, 0], "el2n": errors, "margin": own - others}
    return {name: values.masked_fill(ignored, torch.nan) for name, values in found.items()}
