"""Observing changes no bit of any op with a rule: outputs, gradients, gradients of gradients, random numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_persample.rules import supported_ops
from tests.capture import recurrent_cases, twice_cases  # noqa: F401  (add to CASES)
from tests.capture.model_cases import CASES
from tests.capture.op_modules import in_place, one_call
from tests.capture.recorded_calls import RecordedCalls
from tests.capture.two_runs import assert_same, first_order, second_order, second_order_by_backward
from tests.in_turn import every_other, in_turn, one_kind_each
from tests.rules.case import Case
from tests.rules.families import all_cases
from tests.rules.test_case_coverage import THROUGH_THE_ENGINE

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "Using padding='same'",
        "LSTM with projections is not supported with oneDNN:UserWarning",
        r"Using backward\(\) with create_graph=True:UserWarning",
        "TF32 acceleration on top of oneDNN",  # what torch says when its own flags are set back
    )
]

OPS = {case.id: case for case in all_cases()}
MODELS = [name for name in CASES if name.startswith(tuple(THROUGH_THE_ENGINE.values()))]
# once with the gradients themselves kept, once only with their norms
QUANTITIES = {torch.float64: ("sq_norm", "grad_sample"), torch.float32: ("sq_norm",)}
IN_PLACE = {
    "add": (torch.Tensor.add_, torch.Tensor.__iadd__),
    "sub": (torch.Tensor.sub_, torch.Tensor.__isub__),
    "mul": (torch.Tensor.mul_, torch.Tensor.__imul__),
    "div": (torch.Tensor.div_, torch.Tensor.__itruediv__),
}
IN_BFLOAT16 = {  # ops with a rule that autocast casts on a CPU
    "linear", "matmul", "mm", "addmm",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
}  # fmt: skip

every_op = [pytest.param(case, id=name) for name, case in OPS.items()]


def _model(name: str, dtype: torch.dtype) -> tuple[nn.Module, list[Tensor]]:
    case = CASES[name]
    torch.default_generator.manual_seed(0)
    return case.build().to(dtype), [t.to(dtype) if t.is_floating_point() else t for t in case.batch(5)]


def _check_first_order(module: nn.Module, batch: list[Tensor], **options: Any) -> dict[str, Any]:
    facts, record = assert_same(module, batch, first_order, **options)
    assert record is not None
    assert record.unsupported == {}
    assert record.coverage == 1.0
    assert record.unused == ()
    return facts


def _check_second_order(module: nn.Module, batch: list[Tensor], *, refused: bool) -> None:
    """Both runs have second gradients, or torch's own error; `refused`: torch may give one."""
    of_parameters = {p.dtype for p in module.parameters()}
    facts, _ = assert_same(module, batch, second_order if torch.float32 in of_parameters else second_order_by_backward)
    assert refused or "error" not in facts


def _differentiable_once(case: Case) -> bool:
    """Torch's backward of a rounded quotient and of a shift without a scale have no gradient of their own."""
    arguments = case.build(1, torch.float32)
    return "rounding_mode" in arguments or arguments.get("weight", ...) is None


def _op(name: str) -> tuple[str, str]:
    """Its op, with the dtype or the function in place."""
    op, *_, form = name.split("-")
    return op, form


@pytest.mark.parametrize(("case", "dtype"), in_turn(every_op, QUANTITIES))
def test_op(case: Case, dtype: torch.dtype) -> None:
    _check_first_order(*one_call(case, dtype), quantities=QUANTITIES[dtype])


@pytest.mark.parametrize(("case", "dtype"), every_other(in_turn(every_op, QUANTITIES), _op))
def test_op_differentiated_twice(case: Case, dtype: torch.dtype) -> None:
    _check_second_order(*one_call(case, dtype), refused=_differentiable_once(case))


def _under_autocast() -> Iterator[Any]:
    """Every case of an op that is cast and one of each other op; all others are slow."""
    met: set[object] = set()
    for case in OPS.values():
        slow = case.rule.op in met and case.rule.op not in IN_BFLOAT16
        yield pytest.param(case, id=case.id, marks=[pytest.mark.slow] if slow else [])
        met.add(case.rule.op)


@pytest.mark.parametrize("case", list(_under_autocast()))
def test_op_under_autocast(case: Case) -> None:
    facts = _check_first_order(*one_call(case, torch.float32), autocast=True)
    cast = {fact.dtype for name, fact in facts.items() if name.startswith("output")} == {torch.bfloat16}
    assert cast == (case.rule.op in IN_BFLOAT16)


def _in_place() -> Iterator[Any]:
    for case in OPS.values():
        functions: tuple[Callable[..., Tensor], ...] = IN_PLACE.get(str(case.rule.op), ())
        options = set(case.build(1, torch.float32)) - {"input", "other"}
        for function in functions:
            if not (options and function.__name__.startswith("__")) and "torch." not in case.id:
                yield pytest.param(in_place(case, function), id=f"{case.id}-{function.__name__}")


@pytest.mark.parametrize("case", every_other(_in_place(), _op))
def test_op_in_place(case: Case) -> None:
    module, batch = one_call(case, torch.float32)
    _check_first_order(module, batch)
    _check_second_order(module, batch, refused=_differentiable_once(case))


@pytest.mark.parametrize(("name", "dtype"), in_turn(one_kind_each(MODELS), QUANTITIES))
def test_model(name: str, dtype: torch.dtype) -> None:
    _check_first_order(*_model(name, dtype), quantities=QUANTITIES[dtype])


@pytest.mark.parametrize(("name", "dtype"), in_turn(one_kind_each(MODELS), QUANTITIES))
def test_model_differentiated_twice(name: str, dtype: torch.dtype) -> None:
    _check_second_order(*_model(name, dtype), refused=name.startswith("embedding-bag"))


@functools.cache
def _onednn_casts_lstm() -> bool:
    """Whether this CPU runs oneDNN's LSTM under autocast: without AVX-512, torch's own call fails."""
    try:
        with torch.autocast("cpu"):
            nn.LSTM(2, 3)(torch.ones(1, 1, 2))
    except RuntimeError as error:
        return "primitive descriptor" not in str(error)
    return True


@pytest.mark.parametrize("name", one_kind_each(MODELS))
def test_model_under_autocast(name: str) -> None:
    with torch.backends.mkldnn.flags(enabled=_onednn_casts_lstm()):
        _check_first_order(*_model(name, torch.float32), autocast=True)


class Outputs(nn.Module):
    """The outputs of a recurrent layer that draws its dropout."""

    def __init__(self, kind: type[nn.RNNBase], batch_first: bool) -> None:
        super().__init__()
        self.axis = 0 if batch_first else 1
        self.layer = kind(6, 4, num_layers=3, dropout=0.5, bidirectional=True, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.movedim(0, self.axis))[0]


@pytest.mark.parametrize(("kind", "batch_first"), in_turn([nn.LSTM, nn.GRU, nn.RNN], [True, False]))
def test_dropout_between_recurrent_layers(kind: type[nn.RNNBase], batch_first: bool) -> None:
    for dtype, quantities in QUANTITIES.items():
        module, batch = Outputs(kind, batch_first).to(dtype), [torch.randn(5, 7, 6, dtype=dtype)]
        facts = _check_first_order(module, batch, quantities=quantities)
        assert not torch.equal(facts["random numbers"], torch.default_generator.manual_seed(3).get_state())
        _check_second_order(module, batch, refused=False)


def test_every_op_is_met() -> None:
    recorded = RecordedCalls()
    with recorded, torch.no_grad():
        for case in OPS.values():
            module, batch = one_call(case, torch.float32)
            module(*batch)
        for name in MODELS:
            module, batch = _model(name, torch.float32)
            module(*batch)
    assert {op for op, _ in recorded.calls} == set(supported_ops())
