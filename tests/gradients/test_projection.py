"""Random projections: of every structure against dense gradients, what they keep in the mean, and what decides them."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_persample.errors import OptionError
from lightning_persample.gradients import Dense, Indexed, Outer, Projection, SampleGradient, Sum, add_up, cost
from tests.gradients.projection_digests import digest
from tests.gradients.structures import CASES, GEOMETRIES, SAME, Convolution, assert_close, block, indexed, outer
from tests.gradients.test_memory import LargestTensor
from tests.in_turn import in_turn
from tests.processes import run_alone

# What is kept in full, on one side, on both; with more and with less than the sizes of the cases.
DIMS = [1, 2, 7, 20, 36, 53, 256]
SINGLE = [pytest.param(shape, name, id=f"{name}-{len(shape)}d") for shape in CASES for name in CASES[shape]]


def expected_of(projection: Projection, name: str, dense: Tensor) -> Tensor:
    """The projected gradients, from the matrices and the dense gradients alone."""
    left, right = projection.matrices(name, dense.shape[1:])
    wide = dense.to(torch.complex128 if dense.is_complex() else torch.float64)
    matrices = wide.reshape(len(dense), left.shape[1], right.shape[1])
    return torch.einsum("ap,npd,bd->nab", left.to(wide.dtype), matrices, right.to(wide.dtype)).flatten(1)


def check(gradient: SampleGradient, dense: Tensor, dims: list[int] = DIMS) -> None:
    for dim in dims:
        projection = Projection(dim, seed=3)
        got = gradient.project(projection, "weight")
        assert got.shape == (len(dense), projection.size_of(gradient.shape))
        assert got.dtype == gradient.dtype
        assert_close(got, expected_of(projection, "weight", dense).to(got.dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize(("shape", "name"), SINGLE)
def test_every_structure(shape: tuple[int, ...], name: str, dtype: torch.dtype) -> None:
    gradient, dense = CASES[shape][name](dtype)
    check(gradient, dense)
    check(gradient.samples(1, 3), dense[1:], [20])
    check(gradient.samples(1, 1), dense[:0], [20])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_convolution(name: str, dtype: torch.dtype) -> None:
    check(*GEOMETRIES[name].build(dtype))


@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_convolution_without_forming_and_by_forming(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gradient, dense = GEOMETRIES[name].build(torch.float64)
    for forming in (True, False):
        monkeypatch.setattr(
            "lightning_persample.gradients.patches._forming_is_cheaper", lambda *_, forming=forming: forming
        )
        check(gradient, dense)


ODD: dict[str, Callable[[torch.dtype], Any]] = {
    "outer 1 x 7": lambda dtype: outer(dtype, 3, 4, 1, 7),
    "outer 7 x 1": lambda dtype: outer(dtype, 3, 4, 7, 1),
    "outer one position, wide": lambda dtype: outer(dtype, 2, 1, 3, 401),
    "outer one position, tall": lambda dtype: outer(dtype, 2, 1, 401, 3),
    "outer many positions, wide": lambda dtype: outer(dtype, 2, 600, 5, 131),
    "outer many positions, tall": lambda dtype: outer(dtype, 2, 600, 131, 5),
    "outer many positions": lambda dtype: outer(dtype, 2, 301, 67, 73),
    "indexed, few rows": lambda dtype: indexed(dtype, 3, 11, 2, 301),
    "indexed, many rows": lambda dtype: indexed(dtype, 3, 11, 501, 3),
    "block of a vector": lambda dtype: block(dtype, 3, (18,), 0, 2),
    "block of a long vector": lambda dtype: block(dtype, 3, (300,), 0, 1),
    "block in the middle": lambda dtype: block(dtype, 2, (3, 8, 5), 1, 2),
    "block of many axes": lambda dtype: block(dtype, 3, (20, 3, 6, 5), 2, 2),
    "block of rows": lambda dtype: block(dtype, 3, (60, 3, 7), 0, 2),
    "convolution of few channels": Convolution((9, 9), (3, 3), (1, 1), (SAME, SAME), (1, 1), channels=(1, 40)).build,
    "convolution of many channels": Convolution((3,), (3,), (1,), (SAME,), (1,), channels=(38, 40)).build,
    "groups of few positions": Convolution((3,), (3,), (1,), (SAME,), (1,), groups=2, channels=(38, 40)).build,
    "depthwise, many positions": Convolution((200,), (3,), (1,), (SAME,), (1,), groups=40, channels=(40, 40)).build,
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_sizes(name: str) -> None:
    check(*ODD[name](torch.float64))


def test_a_sum_of_everything() -> None:
    for cases in CASES.values():
        built = [case(torch.float64) for case in cases.values()]
        gradients, total = [gradient for gradient, _ in built], torch.stack([dense for _, dense in built]).sum(0)
        check(add_up(gradients), total)
        check(Sum(gradients), total)


def test_a_sum_of_two_precisions_is_projected_in_the_higher() -> None:
    left, right = torch.randn(3, 4, 30), torch.randn(3, 4, 20)
    rows = torch.randn(3, 30, 20, dtype=torch.float64)
    check(Sum([Outer(left, right), Dense(rows)]), torch.einsum("btp,btd->bpd", left.double(), right.double()) + rows)


def test_a_gradient_that_is_kept_in_full_is_new_memory_in_the_gradients_order() -> None:
    grad = torch.randn(3, 4, 5)
    got = Dense(grad).project(Projection(20), "weight")
    assert torch.equal(got, grad.flatten(1))
    assert got.data_ptr() != grad.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["dense", "outer", "indexed", "patches", "block"])
def test_low_precision_is_summed_in_float32(kind: str, dtype: torch.dtype) -> None:
    build: dict[str, Callable[[torch.dtype], Any]] = {
        "dense": CASES[6, 9]["dense"],
        "outer": lambda dtype: outer(dtype, 3, 2000, 20, 30),
        "indexed": lambda dtype: indexed(dtype, 3, 200, 20, 30),
        "patches": GEOMETRIES["2d"].build,
        "block": CASES[6, 9]["block-leading"],
    }
    low, _ = build[kind](dtype)
    wide = low._widened()
    assert low.project(Projection(20), "w").dtype == torch.float32
    check(low, wide.dense(), [20, 53])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(low, wide.dense(), [20])


@pytest.mark.parametrize("max_memory", [1, 4096])
def test_memory_budget(max_memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "MEMORY_BUDGET", max_memory)
    for cases in (*CASES.values(), ODD):
        for build in cases.values():
            check(*build(torch.float64), [7, 53])
    for convolution in GEOMETRIES.values():
        check(*convolution.build(torch.float64), [7, 53])


def test_nothing_of_the_parameters_size_is_formed_for_a_sample() -> None:
    """A table and a head of 50,000 x 64, and a linear map of 2,000 x 3,000."""
    rows = torch.randn(4, 6, 64)
    table = Indexed(torch.randint(50_000, (4, 6)), rows, 50_000)
    head = Outer(torch.randn(4, 6, 50_000), rows)
    linear = Outer(torch.randn(4, 6, 2000), torch.randn(4, 6, 3000))
    projection = Projection()
    for gradient in (table, head, Sum([table, head]), linear):
        projection.factors("w", gradient.shape, torch.float32, torch.device("cpu"))
        with LargestTensor() as largest:
            gradient.project(projection, "w")
        assert largest.bytes <= 4 * max(4 * 256, 4 * 6 * 16)  # what is projected, and its sides


# What a projection keeps in the mean ----------------------------------------------------------------------------------
SHAPES = {
    "scalar": (),
    "vector": (40,),
    "wide": (3, 50),
    "tall": (50, 3),
    "square": (12, 11),
    "convolution": (8, 3, 3, 3),
    "table": (90, 4),
}
SIZES = ("tall", "square", "table")  # of a matrix as "wide" is one


EACH_SHAPE = [
    pytest.param(
        *case.values, id=case.id, marks=[*case.marks, *([pytest.mark.slow] if case.values[0] in SIZES else [])]
    )
    for case in in_turn(product(SHAPES, ["normal", "rademacher"]), [5, 16])
]


@pytest.mark.parametrize(("name", "kind", "dim"), EACH_SHAPE)
def test_dots_of_projected_gradients_are_in_the_mean_those_of_the_gradients(name: str, kind: Any, dim: int) -> None:
    pair = torch.randn(2, *SHAPES[name], dtype=torch.float64)
    pair[1] += pair[0]  # so that the true dot is of the size of the squared norms
    gradient, flat = Dense(pair), pair.reshape(2, -1)
    found = []
    for seed in range(2000):
        projected = gradient.project(Projection(dim, kind, seed), "weight")
        found.append([projected[0] @ projected[1], projected[0] @ projected[0]])
    values = torch.tensor(found, dtype=torch.float64)
    true = torch.stack([flat[0] @ flat[1], flat[0] @ flat[0]])
    error = (values.mean(0) - true).abs()
    assert (error <= 4 * values.std(0) / math.sqrt(len(values)) + 1e-12).all()
    assert (values.std(0) > 0).all() == (flat.shape[1] > dim)
    assert (values.std(0) <= 2.5 * flat[0].norm() * flat[1].norm()).all()


@pytest.mark.parametrize("kind", ["normal", "rademacher"])
@pytest.mark.parametrize("shape", [(1000,), (300, 400)], ids=str)
def test_entries_have_mean_zero_and_variance_one_over_the_number_of_rows(shape: tuple[int, ...], kind: Any) -> None:
    for matrix in Projection(256, kind).matrices("weight", shape)[-len(shape) :]:
        number = matrix.numel()
        scaled = matrix * math.sqrt(matrix.shape[0])
        assert abs(scaled.mean()) <= 4 / math.sqrt(number)
        assert abs(scaled.square().mean() - 1) <= 4 * math.sqrt(2 / number)
        if kind == "rademacher":
            assert torch.equal(scaled.abs().round(decimals=6), torch.ones_like(scaled))


def test_error_of_a_dot_shrinks_with_dim() -> None:
    pair = torch.randn(2, 64, 64, dtype=torch.float64)
    pair[1] += pair[0]
    true, errors = pair[0].flatten() @ pair[1].flatten(), []
    for dim in (16, 256):
        one, two = zip(*(Dense(pair).project(Projection(dim, seed=seed), "w") for seed in range(200)), strict=True)
        errors.append(((torch.stack(one) * torch.stack(two)).sum(1) / true - 1).std())
    assert 2.5 * errors[1] < errors[0]


# What decides a projection --------------------------------------------------------------------------------------------
def test_equal_seeds_agree_whatever_the_order_and_the_process() -> None:
    names, found = ["a.weight", "b.weight", "c"], {}
    for kind in ("normal", "rademacher"):
        found[kind] = digest(Projection(kind=kind, seed=5), names)  # type: ignore[arg-type]
        torch.manual_seed(123)
        assert digest(Projection(kind=kind, seed=5), names[::-1]) == found[kind]  # type: ignore[arg-type]
        assert len(set(found[kind].values())) == len(found[kind])
    ended = run_alone("tests.gradients.projection_digests", "5", ",".join(found), *names[1:])
    for here, there in zip(found.values(), json.loads(ended.outputs[0]), strict=True):
        assert there == {key: value for key, value in here.items() if not key.startswith("a")}


def test_the_numbers_are_those_of_this_version() -> None:
    """A store on disk is read with other projections of the same seed: a change of the numbers must not go unseen."""
    left = Projection(64, seed=1).matrices("head.weight", (30, 50))[0]
    torch.testing.assert_close(left[7, 20:25], torch.tensor(LEFT, dtype=torch.float64), rtol=0.0, atol=1e-4)
    signs = Projection(4, "rademacher", seed=1).matrices("head.weight", (3, 5))[1]
    assert (signs.flatten() > 0).tolist() == SIGNS


LEFT = [0.0010, 0.6374, -0.2360, 0.1051, 0.5741]
SIGNS = [False, False, True, False, False, True, True, False, False, False]


def test_different_seeds_names_and_sides_differ() -> None:
    base, shape = Projection(seed=0), (300, 300)
    left, right = base.matrices("weight", shape)
    assert not torch.equal(left, right)
    for other in (Projection(seed=1).matrices("weight", shape), base.matrices("bias", shape)):
        for mine, theirs in zip((left, right), other, strict=True):
            correlation = (mine * theirs).sum() / (mine.norm() * theirs.norm())
            assert abs(correlation) < 4 / math.sqrt(mine.numel())


def test_the_global_generator_is_not_touched() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    for kind in ("normal", "rademacher"):
        Dense(torch.ones(2, 60, 70)).project(Projection(kind=kind), "weight")  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_devices_and_modes_around_the_call_do_not_matter() -> None:
    expected = Projection().matrices("weight", (60, 70))
    projection = Projection()
    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        inside = projection.matrices("weight", (60, 70))
        assert projection.matrices("bias", (4,))[1].device.type == "cpu"
    assert all(torch.equal(one, two) for one, two in zip(inside, expected, strict=True))
    grad = torch.randn(2, 60, 70, dtype=torch.float64, requires_grad=True)
    Dense(grad).project(projection, "weight").sum().backward()
    assert grad.grad is not None


def test_copies_are_equal_and_leave_the_drawn_matrices_behind() -> None:
    projection = Projection(64, "rademacher", 9)
    drawn = projection.matrices("weight", (30, 40))
    for other in (
        pickle.loads(pickle.dumps(projection)),
        copy.deepcopy(projection),
        Projection(**projection.settings()),
    ):
        assert (other, hash(other), other._kept) == (projection, hash(projection), {})
        assert all(torch.equal(a, b) for a, b in zip(drawn, other.matrices("weight", (30, 40)), strict=True))
    assert projection != Projection(64, "rademacher", 8)
    assert projection.settings() == {"dim": 64, "kind": "rademacher", "seed": 9}
    assert repr(projection) == "Projection(dim=64, kind='rademacher', seed=9)"


def test_matrices_are_drawn_once_and_no_more_than_fit_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("weight", (50, 60), torch.float32, torch.device("cpu"))
    projection = Projection(16)
    assert projection.factors(*arguments).left is projection.factors(*arguments).left
    monkeypatch.setattr("lightning_persample.gradients.projection._MOST_KEPT", 4 * 50 * 4)
    projection = Projection(16)
    one, two = projection.factors(*arguments), projection.factors(*arguments)
    assert one.left is two.left
    assert one.right is not two.right
    assert torch.equal(one.right, two.right)  # type: ignore[arg-type]
    given = projection.matrices("weight", (50, 60))[0]
    given.zero_()
    assert projection.matrices("weight", (50, 60))[0].any()


@pytest.mark.parametrize(
    ("dim", "shape", "sizes"),
    [
        (256, (), (1, 1)),
        (256, (256,), (1, 256)),
        (256, (257,), (1, 256)),
        (256, (16, 16), (16, 16)),
        (256, (2, 128), (2, 128)),
        (256, (17, 17), (16, 16)),
        (256, (10, 512), (10, 25)),
        (256, (512, 10), (25, 10)),
        (256, (1, 999), (1, 256)),
        (256, (999, 1), (256, 1)),
        (256, (64, 3, 7, 7), (16, 16)),
        (8, (90, 90), (2, 4)),
        (8, (90, 3), (2, 3)),
        (1, (90, 90), (1, 1)),
        (256, (0, 5), (0, 5)),
    ],
)
def test_how_many_numbers_are_kept(dim: int, shape: tuple[int, ...], sizes: tuple[int, int]) -> None:
    projection = Projection(dim)
    left, right = projection.matrices("w", shape)
    assert (left.shape[0], right.shape[0]) == sizes
    assert projection.size_of(shape) == left.shape[0] * right.shape[0] <= dim


# Errors ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dim": 0}, "Projection: dim is 0; allowed is an integer of at least 1"),
        ({"dim": 2.0}, "Projection: dim is 2.0; allowed is an integer of at least 1"),
        ({"dim": True}, "Projection: dim is True; allowed is an integer of at least 1"),
        ({"seed": -1}, "Projection: seed is -1; allowed is an integer of at least 0"),
        ({"seed": None}, "Projection: seed is None; allowed is an integer of at least 0"),
        ({"kind": "sparse"}, "Projection: kind is 'sparse'; allowed are 'normal' and 'rademacher'"),
        ({"kind": ["normal"]}, "Projection: kind is ['normal']; allowed are 'normal' and 'rademacher'"),
    ],
)
def test_text_of_errors(options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=re.escape(text)):
        Projection(**options)
