"""Every per-sample gradient and norm equals the one-sample loop's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_persample.capture.mode import expanded_weights
from tests.capture import recurrent_cases, twice_cases  # noqa: F401  (add to CASES)
from tests.capture.model_cases import BATCH_SIZES, CASES, ModelCase, mean_of_squares, parameter
from tests.capture.model_cases import Model as OneUse
from tests.capture.reference import assert_exact
from tests.in_turn import in_turn
from tests.models import MODELS, Model, gpt

# torch says once that it has no oneDNN kernel for projections
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")

DTYPES = {"float64": (torch.float64, 1e-10), "float32": (torch.float32, 1e-4)}


@pytest.mark.parametrize(("name", "batch_size"), in_turn(CASES, BATCH_SIZES))
def test_one_way_to_meet_the_batch(name: str, batch_size: int) -> None:
    _check_case(CASES[name], batch_size, "float64")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_way_to_meet_the_batch_in_single_precision(name: str) -> None:
    _check_case(CASES[name], 7, "float32")


def _check_case(case: ModelCase, batch_size: int, dtype: str) -> None:
    kind, tolerance = DTYPES[dtype]
    module = case.build().to(kind)
    batch = tuple(tensor.to(kind) if tensor.is_floating_point() else tensor for tensor in case.batch(batch_size))
    assert_exact(module, case.loss, batch, tolerance=tolerance, **case.options)


@pytest.mark.parametrize(("name", "dtype", "batch_size"), in_turn(itertools.product(MODELS, DTYPES), [1, 3, 5, 16]))
def test_model(name: str, batch_size: int, dtype: str) -> None:
    kind, tolerance = DTYPES[dtype]
    _check_model(MODELS[name](dtype=kind), batch_size, tolerance)


@pytest.mark.parametrize("manual_attention", [False, True])
def test_gpt_with_as_many_samples_as_tokens(manual_attention: bool) -> None:
    _check_model(gpt(length=6, manual_attention=manual_attention), 6, 1e-10)


def _check_model(model: Model, batch_size: int, tolerance: float) -> None:
    record = assert_exact(model.module, model.loss_fn, model.make_batch(batch_size), tolerance=tolerance)
    assert set(record.names) == {name for name, _ in model.module.named_parameters()}
    assert (record.mixing, record.axis_lost) == ((), ())
    assert record.weighting == ()


@pytest.mark.parametrize(("kind", "batch_first"), in_turn([nn.RNN, nn.GRU, nn.LSTM], [True, False]))
def test_dropout_between_recurrent_layers_is_drawn_again(kind: type[nn.RNNBase], batch_first: bool) -> None:
    """A loop would draw other masks: the contributions of all samples must sum to the gradient of the batch instead."""
    layer = kind(6, 4, num_layers=3, dropout=0.5, bidirectional=True, batch_first=batch_first, dtype=torch.float64)
    batch = torch.randn(5, 7, 6, dtype=torch.float64)
    with expanded_weights(layer, batch, quantities=("grad_sample",), unsupported="error") as capture:
        output = layer(batch if batch_first else batch.transpose(0, 1))[0]
        output.square().sum().div(len(batch)).backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(capture.record.grad_samples[name].mean(0), p.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_output_of_a_recurrent_layer_may_be_overwritten(kind: type[nn.RNNBase]) -> None:
    module = OneUse(lambda m, x: m.a(x)[0].mul_(2.0), a=kind(6, 4, 2, batch_first=True)).double()
    assert_exact(module, mean_of_squares, (torch.randn(5, 7, 6, dtype=torch.float64),))


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_an_op_that_torch_cannot_run_batched(batch_size: int) -> None:
    """A learned token in the places that a mask tells: how many there are differs from sample to sample."""

    def fill_masked(m: Any, x: Tensor) -> Tensor:
        x = x.clone()
        x[x[..., 0] > 0] = m.t
        return m.a(x)

    module = OneUse(fill_masked, a=nn.Linear(6, 4), t=parameter(6)).double()
    assert_exact(module, mean_of_squares, (torch.randn(batch_size, 5, 6, dtype=torch.float64),))


PICKED: dict[str, Callable[..., Tensor]] = {
    "gather-along-the-batch": lambda m, x: m.t.gather(0, ((x[:, 0] > 0).long() + 1)[:, :4]),
    "gather-in-own-rows": lambda m, x: m.t[:1].expand(len(x), -1).gather(1, (x[:, 0, :3] > 0).long() + 1),
    "take-along-the-batch": lambda m, x: m.t.take_along_dim((x[:, 0, :4] > 0).long() + 1, 0),
    "take-flattened-rows": lambda m, x: torch.take_along_dim(m.t[:1], (x[:, 0, :3] > 0).long(), 1),
    "index-select": lambda m, x: m.t.index_select(0, (x[:, 0, 0] > 0).long() + 1),
    "attention-of-learned-queries": lambda m, x: nn.functional.scaled_dot_product_attention(
        m.t[None, :, None].expand(len(x), -1, 2, -1), x[:, None, :, :4], x[:, None, :, :4]
    ),
    "attention-to-learned-keys": lambda m, x: nn.functional.scaled_dot_product_attention(
        x[:, None, :, :4], m.t[None, None].expand(len(x), 1, -1, -1), m.t[None, None].expand(len(x), 1, -1, -1)
    ),
    "solve": lambda m, x: torch.linalg.solve(m.t[:4, :4] + 9 * torch.eye(4), x[:, :4, :4]),
}


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(("name", "batch_size"), in_turn(PICKED, BATCH_SIZES))
def test_a_table_of_parameters_read_by_the_batch(name: str, batch_size: int) -> None:
    module = OneUse(PICKED[name], t=parameter(6, 4))
    assert_exact(module, mean_of_squares, (torch.randn(batch_size, 5, 6),))
