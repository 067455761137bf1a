"""The options of a capture: their types, what each may be, and the one text that refuses another value."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from lightning_persample.errors import OptionError

QUANTITIES = ("sq_norm", "grad_sample", "dot", "square_sum", "projection")


class CaptureOptions(TypedDict, total=False):
    """The keyword arguments that every callback shares; `PerSampleCallback` documents them."""

    loss_reduction: Literal["mean", "sum"] | Callable[[Any, Any], Tensor]
    batch_dim: int
    batch_size: int | None
    batch_layout: Callable[[Any], Mapping[Tensor, Any]] | None
    sample_index: Callable[[Any], Any] | None
    unsupported: Literal["warn", "error", "vmap"]
    engine: Literal["expanded", "vmap", "loop"]
    verify: bool
    fuse_weight_grad: bool
    max_memory: int | None
    max_samples: int | None


CAPTURE_DEFAULTS = CaptureOptions(
    loss_reduction="mean",
    batch_dim=0,
    batch_size=None,
    batch_layout=None,
    sample_index=None,
    unsupported="warn",
    engine="expanded",
    verify=False,
    fuse_weight_grad=False,
    max_memory=None,
    max_samples=None,
)


def is_int(value: object, least: int) -> bool:
    """Whether the value is an int (a bool is none) that is not less than `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_none_or_int(value: object, least: int) -> bool:
    """Whether the value is None or such an int."""
    return value is None or is_int(value, least)


def is_none_or_positive(value: object) -> bool:
    """Whether the value is None or a number greater than 0."""
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0)


def is_path(value: object) -> bool:
    """Whether the value can be the path of a folder."""
    return isinstance(value, (str, Path)) and str(value) != ""


_SHOWN = 200


def shown(value: object) -> str:
    """A value in a message: a tensor by its shape and dtype, anything else as Python writes it, cut off where long."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    if isinstance(value, (list, tuple)):
        first, last = "[]" if isinstance(value, list) else "()"
        comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
        text = f"{first}{', '.join(map(shown, value[:_SHOWN]))}{comma}{last}"
    else:
        text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def check_option(name: str, value: object, allowed: bool, expected: str) -> None:
    """Refuse an option's value that is not `allowed` with an `OptionError` that says what is expected."""
    if not allowed:
        raise OptionError(f"{name}={shown(value)} is not allowed: {name} must be {expected}")


def _are_quantities(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str) and all(each in QUANTITIES for each in value)


def _is_reduction(value: object) -> bool:
    return (isinstance(value, str) and value in ("mean", "sum")) or callable(value)


def _are_places(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, Tensor) and value.dtype == torch.int64 and value.dim() == 1 and value.numel() > 0


# Options that mean the same wherever they stand: which values are allowed, in code and in words.
_FLAG = (lambda value: isinstance(value, bool), "True or False")
_COUNT = (lambda value: is_int(value, 1), "an int >= 1")
_COUNT_OR_NONE = (lambda value: is_none_or_int(value, 1), "None or an int >= 1")
_SHARED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "loss_reduction": (_is_reduction, "'mean', 'sum', or a callable (outputs, batch) -> Tensor of shape (B,)"),
    "batch_dim": (lambda value: is_int(value, 0), "an int >= 0"),
    "batch_layout": (
        lambda value: value is None or callable(value),
        "None or a callable (batch) -> mapping from tensors of the batch to where their samples lie",
    ),
    "sample_index": (lambda value: value is None or callable(value), "None or a callable (batch) -> B ints"),
    **dict.fromkeys(("verify", "fuse_weight_grad", "overwrite", "norms"), _FLAG),
    "max_memory": (lambda value: is_none_or_int(value, 1), "None or an int >= 1, in bytes"),
    **dict.fromkeys(("batch_size", "max_samples", "every_n_steps", "per_layer"), _COUNT_OR_NONE),
    **dict.fromkeys(("worst_samples", "rows_per_shard"), _COUNT_OR_NONE),
    **dict.fromkeys(("k", "flush_every", "refresh_every_n_steps"), _COUNT),
    **dict.fromkeys(("histogram", "prog_bar", "report"), (lambda value: value in (True, False), "True or False")),
    "render": (lambda value: value is None or callable(value), "None or a callable of the sample's index"),
    "quantities": (_are_quantities, f"a collection of {', '.join(map(repr, QUANTITIES))}"),
    "samples": (_are_places, "None or an int64 tensor (m,) of places in the batch, m >= 1"),
}


_PLAIN = frozenset({bool, int, str, tuple, type(None)})  # types of values that are allowed for ever if they are once
_ALLOWED: set[tuple[str, type, object]] = set()
_MOST_ALLOWED = 1024


def check_options(**values: object) -> None:
    """Refuse the first of these options, given by name, whose value is not allowed, with an `OptionError`."""
    for name, value in values.items():
        asked = name, type(value), value
        try:
            if type(value) in _PLAIN and asked in _ALLOWED:  # (without a call: a capture asks at each step)
                continue
        except TypeError:  # a tuple that cannot be hashed
            pass
        is_allowed, expected = _SHARED[name]
        if not is_allowed(value):
            check_option(name, value, False, expected)
        if type(value) in _PLAIN and len(_ALLOWED) < _MOST_ALLOWED:
            _ALLOWED.add(asked)


def checked_capture_options(given: CaptureOptions) -> CaptureOptions:
    """All options of a callback's capture: those given, and the defaults of the others."""
    options = CaptureOptions(**{**CAPTURE_DEFAULTS, **given})
    check_options(**{name: value for name, value in options.items() if name in _SHARED})
    unsupported, engine, fuses = options["unsupported"], options["engine"], options["fuse_weight_grad"]
    check_option("unsupported", unsupported, unsupported in ("warn", "error", "vmap"), "'warn', 'error' or 'vmap'")
    check_option("engine", engine, engine in ("expanded", "vmap", "loop"), "'expanded', 'vmap' or 'loop'")
    if engine != "expanded":
        why = f"with engine={engine!r}, which runs the samples alone"
        check_option("unsupported", unsupported, unsupported != "vmap", f"'warn' or 'error' {why}")
        check_option("verify", options["verify"], not options["verify"], f"False {why}")
        check_option("fuse_weight_grad", fuses, not fuses, f"False {why}")
    if options["max_samples"] is not None:
        why = "with max_samples, because the weight's gradient needs all samples"
        check_option("fuse_weight_grad", fuses, not fuses, f"False {why}")
    return options
