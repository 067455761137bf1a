"""A program gives what the function gives from which it was recorded, or there is none."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_persample.gradients import (
    Dense,
    Indexed,
    Outer,
    Patches,
    PatchGeometry,
    SampleGradient,
    patches,
    sq_norms,
)
from lightning_persample.gradients.program import Program, at_least, record

B = 3
GEOMETRY = PatchGeometry((3, 3), stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1))
STRIDED = PatchGeometry((3, 2), stride=(2, 1), padding=((1, 0), (0, 1)), dilation=(1, 2))
STRUCTURES: dict[str, tuple[Callable[..., SampleGradient], tuple[tuple[int, ...], ...]]] = {
    "dense": (Dense, ((B, 4, 2),)),
    "long rows": (Dense, ((B, 9000),)),
    "one row": (Outer, ((B, 1, 4), (B, 1, 5))),
    "gram": (Outer, ((B, 2, 40), (B, 2, 50))),
    "direct": (Outer, ((B, 30, 2), (B, 30, 3))),
    "convolution": (lambda g, x: Patches(g, x, GEOMETRY), ((B, 1, 4, 6, 6), (B, 1, 2, 6, 6))),
    "deep convolution": (lambda g, x: Patches(g, x, GEOMETRY), ((B, 1, 64, 2, 2), (B, 1, 64, 2, 2))),
    "many positions": (lambda g, x: Patches(g, x, GEOMETRY), ((B, 1, 2, 20, 20), (B, 1, 3, 20, 20))),
    "strided convolution": (lambda g, x: Patches(g, x, STRIDED), ((B, 1, 4, 3, 4), (B, 1, 2, 6, 5))),
}


def drawn(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def recorded(function: Callable[..., Tensor], *given: Tensor) -> Program | str:
    _, program = record(lambda: [function(*given)], given)
    return program


def ran(program: Program | str, *given: Tensor) -> Tensor:
    assert isinstance(program, Program)
    (result,), checks = program.run(given)
    assert all(float(number) >= least for number, least in checks)
    return result


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STRUCTURES)
def test_squared_norms_of_other_tensors_are_those_of_the_gradients(name, dtype):
    build, shapes = STRUCTURES[name]
    program = recorded(lambda *tensors: sq_norms([build(*tensors)])[0], *drawn(shapes, dtype))
    for _ in range(2):
        tensors = drawn(shapes, dtype)
        kept = [tensor.clone() for tensor in tensors]
        expected = build(*(tensor.double() for tensor in tensors)).dense().flatten(1).square().sum(1)
        tolerance = 1e-10 if dtype is torch.float64 else 1e-4
        torch.testing.assert_close(ran(program, *tensors).double(), expected, rtol=tolerance, atol=0.0)
        assert all(map(torch.equal, tensors, kept))


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize(
    "kernel", ["layers", "unfolded", "unfolded gram", "grouped", "autocorrelation", "diagonals", "fourier"]
)
def test_where_a_tensor_begins_in_its_memory_does_not_matter(kernel, padding, monkeypatch):
    monkeypatch.setattr(patches, "patch_kernel", lambda sizes, dense: kernel)
    groups = 3 if kernel in ("diagonals", "fourier") else 1
    outputs, channels = 3 if groups == 3 else 2, 3 // groups
    geometry = PatchGeometry((3, 3), (1, 1), ((padding, padding),) * 2, (1, 1), groups)
    gradients, inputs = drawn(((5 * B, 1, outputs, *geometry.output_size((6, 7))), (5 * B, 1, 3, 6, 7)))
    program = recorded(lambda g, x: Patches(g, x, geometry).sq_norm(), gradients[:B], inputs[:B])
    for g, x in zip(gradients.split(B), inputs.split(B), strict=True):
        shape = (outputs, channels, 3, 3)
        expected = [
            torch.nn.grad.conv2d_weight(x[b], shape, g[b], padding=padding, groups=groups).square().sum()
            for b in range(B)
        ]
        torch.testing.assert_close(ran(program, g, x), torch.stack(expected))


def test_a_program_that_would_ask_where_a_tensor_begins_is_none():
    assert recorded(lambda x: x.as_strided((2,), (1,), x.storage_offset()), torch.ones(3)) == "none"


def test_views_of_views_take_one_step_and_those_that_change_nothing_none():
    def compute(x: Tensor) -> Tensor:
        rows = x.unsqueeze(1).flatten(1)[:, :].transpose(0, 1).view(4, 3, 1).movedim(2, 0)
        rows.mul_(2)  # into what x is made of
        return (x[:, 0] + rows[0, 0]) * x.view(3, 4).reshape(3, 4)[:, 1]

    program = recorded(lambda x: compute(x.mul(1)), *drawn(((3, 4),)))
    names = [function.__name__ for function in program.functions]
    assert names == ["mul", "as_strided", "mul_", "__getitem__", "as_strided", "add", "__getitem__", "mul"]
    (x,) = drawn(((3, 4),))
    torch.testing.assert_close(ran(program, x), compute(x.clone()))
    wide = torch.randn(7, 4)[2:5]
    torch.testing.assert_close(ran(program, wide), compute(wide.clone()))


def test_norms_of_one_row_take_products_and_no_view():
    """As where each sample has one row: of the output's gradient and the input, which the rule lays out anew."""
    grad, x = drawn(((B, 4), (B, 5)))
    _, program = record(lambda: sq_norms([Outer(grad.unsqueeze(1), x.unsqueeze(1)), Dense(grad)]), (grad, x))
    assert isinstance(program, Program)
    names = [getattr(function, "func", function).__name__ for function in program.functions]  # (as given a `dim`)
    assert names == ["linalg_vector_norm", "mul_", "linalg_vector_norm", "mul_", "mul"]


def test_what_is_written_in_place_and_into_parts_is_so_in_a_program():
    def compute(x: Tensor, y: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[1:] = x[1:] * 2
        out += y
        twice = torch.empty(3, 3, dtype=x.dtype)
        torch.bmm(x[None], y[None], out=twice[None])
        return torch.cat([out.mul_(3), x.T.contiguous().T, twice], 1)

    program = recorded(compute, *drawn(((3, 3), (3, 3))))
    x, y = drawn(((3, 3), (3, 3)))
    expected = torch.cat([3 * (y + torch.cat([torch.zeros(1, 3), 2 * x[1:]])), x, x @ y], 1)
    torch.testing.assert_close(ran(program, x, y), expected)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x * float(x.sum()),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x[x > 0].sum().expand(3),
        lambda x: x.new_zeros(3) + x.nonzero().shape[0],
        lambda x: x * torch.rand(3, dtype=x.dtype),
        lambda x: x * KEPT,
        lambda x: x + torch.tensor(x.tolist(), dtype=x.dtype),
        lambda x: x + torch.from_numpy(x.numpy()),
        lambda x: x.unique(),
        lambda x: KEPT,
    ],
)
def test_what_depends_on_values_or_on_other_tensors_is_no_program(compute):
    assert recorded(compute, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)) == "none"


KEPT = torch.ones(3, dtype=torch.float64)


def test_two_names_of_one_tensor_make_no_program():
    x = torch.ones(3)
    assert recorded(torch.add, x, x) == "none"


def test_a_question_about_a_value_is_asked_again():
    def compute(x: Tensor) -> Tensor:
        return x.sum(1) if at_least(x.amin(), 0.0) else x.abs().sum(1)

    program = recorded(compute, torch.ones(B, 2))
    assert isinstance(program, Program)
    for low in (0.0, -1.0, float("nan")):
        _, [(number, least)] = program.run([torch.full((B, 2), low)])
        assert (float(number) >= least) == (low == 0.0)
    assert recorded(compute, -torch.ones(B, 2)) == "not now"


def test_index_structures_look_at_their_values():
    index, right = torch.randint(0, 5, (B, 4)), torch.randn(B, 4, 2)
    assert recorded(lambda i, r: Indexed(i, r, 5).sq_norm(), index, right) == "none"


def test_a_program_runs_where_torch_calls_python():
    program = recorded(lambda left, right: sq_norms([Outer(left, right)])[0], *drawn(STRUCTURES["gram"][1]))
    given = drawn(STRUCTURES["gram"][1])
    with FlopCounterMode(display=False) as counter:
        result = ran(program, *given)
    assert counter.get_total_flops() > 0
    torch.testing.assert_close(result, Outer(*given).dense().flatten(1).square().sum(1))


def test_nothing_is_kept_alive_longer_than_it_is_read():
    alive: list[weakref.ref[Tensor]] = []

    def watched(tensor: Tensor) -> Tensor:
        alive.append(weakref.ref(tensor))
        return tensor

    def compute(x: Tensor) -> Tensor:
        y = watched(x * 2)
        z = y + 1
        return z.sum(1)

    program = recorded(compute, torch.ones(B, 2))
    assert [reference() for reference in alive] == [None]  # nor by the program
    assert torch.equal(ran(program, torch.ones(B, 2)), torch.full((B,), 6.0))
