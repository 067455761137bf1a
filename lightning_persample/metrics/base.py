"""What the metrics have in common, and the checks of their inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_persample.errors import OptionError
from lightning_persample.options import is_int

_WITHOUT_DOUBLE = {"mps"}  # device types that hold no float64


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which sums are formed on a device: float64, or float32 where the device has no float64."""
    return torch.float32 if device.type in _WITHOUT_DOUBLE else torch.float64


def as_vector(value: Tensor, name: str, device: torch.device | None = None, size: int | None = None) -> Tensor:
    """One number for each sample, without graph, in the accumulation dtype."""
    check_tensor(value, name, device)
    if value.dim() != 1:
        raise OptionError(f"{name} has shape {tuple(value.shape)}; one number for each sample, shape (n,), is needed")
    if size is not None and value.numel() != size:
        raise OptionError(f"{name} has {value.numel()} samples where the other argument has {size}; give one for each")
    return value.detach().to(accumulation_dtype(value.device))


def as_scalar(value: Tensor | float, name: str, device: torch.device) -> Tensor:
    """One number as a tensor without axes, without graph, in the accumulation dtype."""
    if isinstance(value, Tensor):
        check_tensor(value, name, device)
        if value.numel() != 1:
            raise OptionError(f"{name} has shape {tuple(value.shape)}; one number for the whole batch is needed")
        return value.detach().reshape(()).to(accumulation_dtype(device))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OptionError(f"{name} is of type {type(value).__name__}; a number or a tensor with one entry is needed")
    return torch.tensor(value, dtype=accumulation_dtype(device), device=device)


def as_batch_size(value: int | None, samples: int) -> int:
    """The size B of the effective batch of which `samples` samples are at hand."""
    if value is None:
        return samples
    if not is_int(value, 0):
        raise OptionError(f"batch_size is {value!r}; allowed is None or the number of samples of the effective batch")
    if value < samples:
        raise OptionError(
            f"batch_size is {value}, yet {samples} samples are given; it counts the samples of the whole optimizer "
            "step, over all processes and accumulated batches"
        )
    return value


def check_count(value: int) -> None:
    """Refuse what is not a number of samples."""
    if not is_int(value, 0):
        raise OptionError(f"count is {value!r}; the number of samples in the sums is needed")


def check_tensor(value: object, name: str, device: torch.device | None) -> None:
    """Refuse what is no tensor of floats, or lies on another device."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise OptionError(f"{name} is of type {kind}; a tensor of a floating dtype is needed")
    if device is not None and value.device != device:
        raise OptionError(
            f"{name} is on {value.device}, the metric on {device}; move it with metric.to('{value.device}')"
        )


Values = Tensor | dict[str, Tensor]


class PerSampleMetric(Metric):
    """Base of the metrics over per-sample gradients.

    States are kept in float64, in float32 on a device without it, whatever the dtype of the inputs; moving the metric
    with ``.to(dtype)`` or `set_dtype` changes its device only.
    """

    is_differentiable = False  # what is added up are numbers, detached from any graph
    higher_is_better = None
    full_state_update = False

    _title: ClassVar[str]  # of a plot
    _axis: ClassVar[str]  # what its vertical axis measures, and in which unit
    _counts: ClassVar[tuple[str, ...]] = ()  # keys of `compute` that are counts, and no values to plot

    def __init__(self, **kwargs: Any) -> None:
        # a process that got no samples since the last result would answer from the cache, and the others wait for it
        super().__init__(**{"compute_with_cache": False, **kwargs})
        self._list_rows: dict[str, tuple[int, ...]] = {}

    def plot(self, val: Values | Sequence[Values] | None = None, ax: Any = None) -> Any:
        """Plot one result or a series of them, as the metrics of torchmetrics do.

        Args:
            val: what `compute` or `forward` gave, or a list of it, one for each step; None calls `compute`.
            ax: a matplotlib axis to draw on; None makes a figure.

        Returns:
            Figure (None if `ax` is given) and axis.
        """
        shown = self.compute() if val is None else val
        shown = self._values(shown) if isinstance(shown, (Tensor, dict)) else [self._values(each) for each in shown]
        figure, ax = self._plot(shown, ax)  # type: ignore[arg-type]  # one kind or the other, never mixed
        ax.set_title(self._title)
        ax.set_ylabel(self._axis)
        bottom, top = ax.get_ylim()
        ax.set_ylim(bottom, top + 0.05 * (top - bottom))  # torchmetrics leaves no room above values of one size
        legend = ax.get_legend()
        if isinstance(shown, dict):
            ax.get_xaxis().set_visible(True)
            ax.set_xticks(range(len(shown)), list(shown), rotation=30 if max(map(len, shown)) > 6 else 0)
            if legend is not None:
                legend.remove()
        elif not isinstance(shown, Tensor):
            ax.set_xticks(range(0, len(shown), math.ceil(len(shown) / 10)))  # torchmetrics has one for every result
            if legend is not None and figure is not None:
                ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
            elif legend is not None:
                ax.legend(loc="best")
        if figure is not None:
            figure.set_layout_engine("constrained")
        return figure, ax

    def _values(self, value: Values) -> Values:
        if isinstance(value, dict):
            return {name: each for name, each in value.items() if name not in self._counts}
        return value

    def _new_state(
        self, values: float | Sequence[float], reduction: str | Callable[[Tensor], Tensor], name: str
    ) -> None:
        self.add_state(name, torch.tensor(values, dtype=accumulation_dtype(self.device)), reduction)

    def _new_list(self, name: str, *row: int) -> None:
        """A state that grows by tensors of shape (any, *row)."""
        self.add_state(name, [], "cat")
        self._list_rows[name] = row

    def _joined(self, name: str) -> Tensor:
        """All that a growing state holds, before or after the exchange with other processes."""
        held = getattr(self, name)
        if isinstance(held, Tensor):
            return held
        if not held:
            return torch.empty(0, *self._list_rows[name], dtype=accumulation_dtype(self.device), device=self.device)
        return torch.cat(held)

    def _sync_dist(self, *args: Any, **kwargs: Any) -> None:
        # torchmetrics lets a process without data send float32 where the others send float64
        for name in self._list_rows:
            setattr(self, name, [self._joined(name)])
        super()._sync_dist(*args, **kwargs)

    @contextmanager
    def _synced(self) -> Iterator[None]:
        """States of all processes, as inside `compute`."""
        own = not self._is_synced
        with self.sync_context(
            dist_sync_fn=self.dist_sync_fn, should_sync=own and self.sync_on_compute, should_unsync=own
        ):
            yield

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        dtype = accumulation_dtype(fn(torch.zeros(1, device=self.device)).device)
        self._computed = self._forward_cache = None
        if dtype != torch.float64:
            self._cast(dtype)  # before the move: the device cannot hold what is here

        def moved(state: Tensor) -> Tensor:
            result = fn(state)
            return result if result.dtype == state.dtype else state.to(result.device)

        module = super()._apply(moved, *args, **kwargs)
        self._cast(dtype)
        return module

    def _cast(self, dtype: torch.dtype) -> None:
        def cast(value: Tensor) -> Tensor:
            return value.to(dtype) if value.is_floating_point() else value

        for name, default in self._defaults.items():
            held = getattr(self, name)
            setattr(self, name, [cast(each) for each in held] if isinstance(held, list) else cast(held))
            if isinstance(default, Tensor):
                self._defaults[name] = cast(default)
