"""Low precision, autocast and complex numbers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lightning_persample.rules import Call, find_rule
from tests.rules.case import Case, assert_close, reference

LOW = pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


def _answer(op, arguments, weights, grad_output):
    return find_rule(op).function(Call(len(grad_output), arguments, frozenset(weights)), grad_output)


@pytest.mark.parametrize(
    ("op", "shape", "weight"),
    [(F.linear, (1, 7, 5), (3, 5)), (torch.conv1d, (1, 4, 9), (3, 4, 2)), (torch.matmul, (1, 7, 5), (5, 3))],
)
def test_autocast_casts_the_input_as_the_op_did(op, shape, weight):
    """The op saw bfloat16 although its arguments are float32: the rounding of the input is part of the gradient."""
    second = "other" if op is torch.matmul else "weight"
    arguments = {"input": torch.randn(3, *shape), second: torch.randn(weight)}

    def under_autocast(**values):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return op(**values)

    case = Case("autocast", under_autocast, lambda size, dtype: arguments, weights=(second,))
    grad_output = case.output_gradient(arguments)
    assert grad_output.dtype == torch.bfloat16
    structure = _answer(op, arguments, [second], grad_output)[second]
    wide = {"input": arguments["input"].bfloat16().double(), second: arguments[second].double()}
    exact = reference(Case("wide", op, lambda size, dtype: wide, weights=(second,)), wide, grad_output.double())
    expected = reference(case, arguments, grad_output)
    assert_close(structure.dense().float(), expected[second], 2e-2)
    assert_close(structure.sq_norm().double(), exact[second].flatten(1).square().sum(1), 1e-5)


@LOW
def test_sums_of_low_precision_do_not_lose_small_terms(low):
    """4,096 equal terms: a running sum in float16 stops at 2,048, in bfloat16 at 256."""
    grad_output = torch.ones(2, 1, 4096, 3, dtype=low)
    arguments = {"input": torch.ones(2, 1, 4096, 3, dtype=low), "other": torch.ones(3, dtype=low)}
    for op in (torch.add, torch.mul, torch.div):
        found = _answer(op, arguments, ["other"], grad_output)["other"].dense()
        assert found.dtype == torch.float32
        assert torch.equal(found.abs(), torch.full((2, 3), 4096.0))
    linear = {"input": arguments["input"], "weight": torch.ones(3, 3, dtype=low), "bias": torch.ones(3, dtype=low)}
    assert torch.equal(_answer(F.linear, linear, ["bias"], grad_output)["bias"].dense(), torch.full((2, 3), 4096.0))


@LOW
def test_products_of_low_precision_do_not_overflow(low):
    grad_output = torch.full((1, 1, 2), 6e4, dtype=low)
    arguments = {"input": torch.full((1, 1, 2), 100.0, dtype=low), "other": torch.ones(2, dtype=low)}
    found = _answer(torch.mul, arguments, ["other"], grad_output)["other"].dense()
    assert_close(found, torch.full((1, 2), 6e6), 1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_rms_norm_without_eps_uses_the_epsilon_that_torch_uses(dtype):
    """Inputs so small that eps decides the value."""
    tiny = torch.full((2, 1, 4), 3e-8 if dtype is torch.float64 else 3e-4).to(dtype)
    weight = torch.ones(4, dtype=dtype)
    grad_output = torch.ones(2, 1, 4, dtype=dtype)
    arguments = {"input": tiny, "normalized_shape": (4,), "weight": weight, "eps": None}
    found = _answer(torch.rms_norm, arguments, ["weight"], grad_output)["weight"].dense()
    case = Case("rms", torch.rms_norm, lambda size, dtype: arguments, weights=("weight",))
    assert_close(found, reference(case, arguments, grad_output)["weight"].to(found.dtype), 1e-2)


@LOW
@pytest.mark.parametrize("width", [6, 5000])
def test_rms_norm_of_low_precision_equals_that_of_the_rounded_input(low, width):
    x, grad_output = torch.randn(3, 1, 4, width).to(low), torch.randn(3, 1, 4, width).to(low)
    arguments = {"input": x, "normalized_shape": (width,), "weight": torch.ones(width, dtype=low), "eps": 1e-5}
    found = _answer(torch.rms_norm, arguments, ["weight"], grad_output)["weight"].dense()
    wide = {name: v.double() if isinstance(v, torch.Tensor) else v for name, v in arguments.items()}
    case = Case("rms", torch.rms_norm, lambda size, dtype: wide, weights=("weight",))
    assert_close(found, reference(case, wide, grad_output.double())["weight"].float(), 1e-5)


@LOW
def test_norms_of_low_precision_equal_those_of_the_rounded_input(low):
    x, grad_output = torch.randn(3, 1, 4, 6).to(low), torch.randn(3, 1, 4, 6).to(low)
    scale = torch.ones(4, dtype=low)
    for op, options in (
        (torch.group_norm, {"num_groups": 2, "eps": 1e-5}),
        (
            torch.instance_norm,
            {"running_mean": None, "running_var": None, "use_input_stats": True, "momentum": 0.1, "eps": 1e-5},
        ),
        (
            torch.batch_norm,
            {"running_mean": scale, "running_var": scale, "training": False, "momentum": 0.1, "eps": 1e-5},
        ),
    ):
        found = _answer(op, {"input": x, "weight": scale, **options}, ["weight"], grad_output)["weight"].dense()
        wide = {name: v.double() if isinstance(v, torch.Tensor) else v for name, v in options.items()}
        expected = _answer(
            op, {"input": x.double(), "weight": scale.double(), **wide}, ["weight"], grad_output.double()
        )
        assert_close(found, expected["weight"].dense().float(), 1e-5)


@pytest.mark.parametrize("weight_dtype", [torch.complex128, torch.float64], ids=["complex", "real"])
@pytest.mark.parametrize("weight", ["input", "other"])
@pytest.mark.parametrize("op", [torch.add, torch.sub, torch.mul, torch.div])
def test_complex_arithmetic(op, weight, weight_dtype):
    batched = "other" if weight == "input" else "input"
    values = {batched: torch.randn(3, 2, 4, dtype=torch.complex128), weight: torch.rand(4, dtype=weight_dtype) + 0.5}
    arguments = {"input": values["input"], "other": values["other"]}
    if op in (torch.add, torch.sub) and weight_dtype.is_complex:
        arguments["alpha"] = 2 - 1j
    case = Case("complex", op, lambda size, dtype: arguments, batched=(batched,), weights=(weight,))
    grad_output = case.output_gradient(arguments)
    found = _answer(op, arguments, [weight], grad_output)[weight].dense()
    assert_close(found, reference(case, arguments, grad_output)[weight], 1e-10)
    assert found.dtype == weight_dtype


@pytest.mark.parametrize(
    ("op", "shape", "weight", "options"),
    [
        (F.linear, (2, 5), {"weight": (3, 5), "bias": (3,)}, {}),
        (torch.matmul, (2, 5), {"other": (5, 3)}, {}),
        (torch.matmul, (2, 5), {"other": (2, 5, 3)}, {}),
        (torch.conv1d, (1, 2, 6), {"weight": (3, 2, 2), "bias": (3,)}, {"padding": 1}),
    ],
)
def test_complex_linear_maps(op, shape, weight, options):
    weights = {name: torch.randn(size, dtype=torch.complex128) for name, size in weight.items()}
    arguments = {"input": torch.randn(3, *shape, dtype=torch.complex128), **weights, **options}
    case = Case("complex", op, lambda size, dtype: arguments, weights=tuple(weights))
    grad_output = case.output_gradient(arguments)
    expected = reference(case, arguments, grad_output)
    for name, structure in _answer(op, arguments, list(weights), grad_output).items():
        assert_close(structure.dense(), expected[name], 1e-10)
