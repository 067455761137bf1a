"""Options and batches that are refused, with the text of every refusal."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_persample.capture.mode import expanded_weights
from lightning_persample.errors import BatchSizeError, OptionError, PerSampleError
from lightning_persample.tensor_form.call_for import call_for_per_sample_grads
from tests.capture.model_cases import Model
from tests.capture.reference import assert_exact

BAD_OPTIONS = {
    "loss_reduction": (
        "median",
        "loss_reduction='median' is not allowed: loss_reduction must be 'mean', 'sum' or a tensor of weights",
    ),
    "batch_dim": (-1, "batch_dim=-1 is not allowed: batch_dim must be an int >= 0"),
    "batch_size": (0, "batch_size=0 is not allowed: batch_size must be None or an int >= 1"),
    "quantities": (
        "sq_norm",
        "quantities='sq_norm' is not allowed: quantities must be a collection of 'sq_norm', 'grad_sample'",
    ),
    "unsupported": ("raise", "unsupported='raise' is not allowed: unsupported must be 'warn', 'error' or 'ignore'"),
    "max_memory": (0, "max_memory=0 is not allowed: max_memory must be None or an int >= 1, in bytes"),
}

B = 5


@pytest.mark.parametrize("option", BAD_OPTIONS)
def test_bad_options(option: str) -> None:
    value, text = BAD_OPTIONS[option]
    with pytest.raises(OptionError, match=re.escape(text)):
        expanded_weights(nn.Linear(6, 4), torch.randn(B, 6), **{option: value})


@pytest.mark.parametrize("value", [(["sq_norm"],), ("sq_norm", 1), 1])
def test_values_that_are_like_allowed_ones_are_refused_after_these(value: Any) -> None:
    expanded_weights(nn.Linear(6, 4), torch.randn(B, 6), quantities=("sq_norm",))
    with pytest.raises(OptionError, match=re.escape(f"quantities={value!r} is not allowed")):
        expanded_weights(nn.Linear(6, 4), torch.randn(B, 6), quantities=value)


@pytest.mark.parametrize("value", [-1, True, 2.0**20, "1 GiB"])
def test_memory_is_a_whole_number_of_bytes(value: object) -> None:
    with pytest.raises(OptionError) as error:
        expanded_weights(nn.Linear(6, 4), torch.randn(B, 6), max_memory=value)  # type: ignore[arg-type]
    assert str(error.value) == f"max_memory={value!r} is not allowed: max_memory must be None or an int >= 1, in bytes"


def test_weights_of_another_shape() -> None:
    with pytest.raises(OptionError, match=re.escape("have shape (3,); allowed is one weight per sample, (5,)")):
        expanded_weights(nn.Linear(6, 4), torch.randn(B, 6), loss_reduction=torch.ones(3))


BAD_BATCHES: dict[str, tuple[Any, str]] = {
    "sizes-differ": (
        {"x": torch.zeros(5, 6), "y": torch.zeros(4)},
        "do not agree on a number of samples along axis 0 (batch_dim=0): batch['x']: (5, 6), batch['y']: (4,); pass",
    ),
    "no-tensor": (["text", 3], "the batch holds no tensor with an axis to read a batch size from; pass batch_size"),
    "empty": (torch.zeros(0, 6), "the batch is empty"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_bad_batches(name: str) -> None:
    batch, text = BAD_BATCHES[name]
    with pytest.raises(BatchSizeError, match=re.escape(text)):
        expanded_weights(nn.Linear(6, 4), batch)


def test_no_record_without_a_backward() -> None:
    with expanded_weights(nn.Linear(6, 4), torch.randn(B, 6)) as capture:
        pass
    with pytest.raises(PerSampleError, match=re.escape("there is no record: no backward has reached a parameter")):
        _ = capture.record


MIXED_DTYPES: dict[str, tuple[torch.dtype, Callable[..., Tensor]]] = {
    "wide-number-scales": (torch.float64, lambda m, x: x * m.w.sum()),
    "wide-number-adds": (torch.float64, lambda m, x: x + m.w.sum()),
    "wide-promotes": (torch.float64, lambda m, x: x * m.w),
    "wide-made-narrow": (torch.float64, lambda m, x: nn.functional.linear(x, m.w[None].to(torch.float32))),
    "narrow-promoted": (torch.float32, lambda m, x: x.double() * m.w),
    "narrow-made-wide": (torch.float32, lambda m, x: nn.functional.linear(x.double(), m.w[None].double())),
}


@pytest.mark.parametrize("name", MIXED_DTYPES)
def test_gradients_have_the_dtype_of_the_parameter(name: str) -> None:
    dtype, function = MIXED_DTYPES[name]
    module, x = Model(function, w=nn.Parameter(torch.randn(4, dtype=dtype))), torch.randn(B, 4)
    record = assert_exact(module, lambda m, x: m(x).double().square().mean(), (x,), tolerance=1e-5)
    assert record.grad_samples["w"].dtype == dtype
    call_for_per_sample_grads(module)(x).sum().backward()
    assert module.w.grad_sample.dtype == dtype


def test_gradients_of_low_precision_are_in_single_precision() -> None:
    module = nn.Linear(6, 4).bfloat16()
    with expanded_weights(module, x := torch.randn(B, 6).bfloat16(), quantities=("grad_sample",)) as capture:
        module(x).square().mean().backward()
    assert capture.record.grad_samples["weight"].dtype == torch.float32


def test_a_closed_capture_is_let_go_at_once() -> None:
    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    gc.collect()
    gc.disable()
    try:
        with expanded_weights(module, x) as capture:
            module(x).square().mean().backward()
        seen = weakref.ref(capture)
        del capture
        assert seen() is None
    finally:
        gc.enable()
