"""Rows of a table that do not depend on the batch, laid over it: positions, repeated for every sample or not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_persample.capture import pull_back
from tests.capture.model_cases import Model, parameter
from tests.capture.reference import assert_exact, loop, record_of
from tests.in_turn import in_turn

T, D = 4, 3
pytestmark = pytest.mark.usefixtures("double_precision")

Index = Callable[[Tensor], Tensor]
# Batch first, x (B, T, D)
FIRST: dict[str, Index] = {
    "shared": lambda x: torch.arange(T),
    "one-row": lambda x: torch.arange(T)[None],
    "expanded": lambda x: torch.arange(T).expand(len(x), T),
    "repeated": lambda x: torch.arange(T).repeat(len(x), 1),
    "twice-the-same": lambda x: (torch.arange(T) // 2).expand(len(x), T),
    "all-the-same": lambda x: torch.full((len(x), T), 2),
    "one-for-all-positions": lambda x: torch.full((len(x), 1), 3),
    "one-of-all": lambda x: torch.tensor([[2]]),
    "one-number": lambda x: torch.tensor(2),
}
# Time first, x (T, B, D)
SECOND: dict[str, Index] = {
    "shared": lambda x: torch.arange(T)[:, None],
    "expanded": lambda x: torch.arange(T)[:, None].expand(T, x.size(1)),
    "repeated": lambda x: torch.arange(T).flip(0)[:, None].repeat(1, x.size(1)),
    "without-time": lambda x: torch.full((x.size(1),), 1),
    "twice-the-same": lambda x: (torch.arange(T) // 2)[:, None].expand(T, x.size(1)),
}
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, u: x + u,
    "add-left": lambda x, u: torch.add(u, x, alpha=0.5),
    "sub": lambda x, u: torch.sub(x, u, alpha=-2.0),
    "rsub": lambda x, u: torch.rsub(x, u),
    "mul": lambda x, u: x * u,
    "mul-left": lambda x, u: u * x,
    "add-in-place": lambda x, u: x.clone().add_(u),
    "by-another-way": lambda x, u: (2 * u).tanh() * x,
}
TABLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"padding_idx": 2},
    "largest-norm": {"max_norm": 1.0},
    "by-frequency": {"scale_grad_by_freq": True},
    "sparse": {"sparse": True},
}


def cubes(batch_dim: int) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda module, x: module(x).movedim(batch_dim, 0).flatten(1).pow(3).mean(1).mean()


def layouts(others: Iterable[str]) -> list[Any]:
    """Each with each of the others."""
    first = [(index, 0, f"batch-first-{name}") for name, index in FIRST.items()]
    every = first + [(index, 1, f"time-first-{name}") for name, index in SECOND.items()]
    return [pytest.param(*layout, other, id=f"{name}-{other}") for *layout, name in every for other in others]


def check(function: Callable[[Any, Tensor], Tensor], B: int, batch_dim: int, rows: int = 6, **options: Any) -> None:
    x = torch.randn((B, T, D) if batch_dim == 0 else (T, B, D))
    module = Model(function, table=nn.Embedding(rows, D, **options), scale=parameter(D))
    assert_exact(module, cubes(batch_dim), (x,), batch_dim=batch_dim)
    assert_exact(module, cubes(batch_dim), (x,), batch_dim=batch_dim, max_memory=1)


@pytest.mark.parametrize(("index", "batch_dim", "op", "B"), in_turn(layouts(OPS), [1, 3, T]))
def test_ops_and_layouts(index: Index, batch_dim: int, op: str, B: int) -> None:
    check(lambda m, x: OPS[op](x * m.scale, m.table(index(x))), B, batch_dim)


@pytest.mark.parametrize(("index", "batch_dim", "options", "rows"), in_turn(layouts(TABLES), [T, 50]))
def test_options_of_the_table(index: Index, batch_dim: int, options: str, rows: int) -> None:
    check(lambda m, x: x * m.scale + m.table(index(x)), 3, batch_dim, rows, **TABLES[options])


@pytest.mark.parametrize("op", ["add", "mul"])
def test_samples_and_positions_on_one_axis(op: str) -> None:
    def sample_major(m: Any, x: Tensor) -> Tensor:
        return OPS[op](x.flatten(0, 1), m.table(torch.arange(T).repeat(len(x)))).view_as(x)

    def time_major(m: Any, x: Tensor) -> Tensor:
        return OPS[op](x.flatten(0, 1), m.table(torch.arange(T).repeat_interleave(x.size(1)))).view_as(x)

    check(sample_major, 3, 0)
    check(time_major, 3, 1)


def test_several_look_ups_of_one_table() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        spread = torch.arange(T).expand(len(x), T)
        shared, own = m.table(torch.arange(T)), m.table(spread) + m.table(spread // 2)
        return (x + own) * shared + m.table(((x[..., 0] > 0) * 2).long())

    check(function, 3, 0)


def test_relative_positions() -> None:
    """More look-ups than rows, laid over every sample."""
    index = torch.arange(T)[:, None] - torch.arange(T)[None] + T - 1
    check(lambda m, x: (x.unsqueeze(2) + m.table(index)).sum(2), 3, 0, rows=2 * T - 1)
    check(lambda m, x: (x.unsqueeze(2) * m.table(index.expand(len(x), T, T))).sum(2), 3, 0, rows=2 * T - 1)


def test_positions_do_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("row_by_row", "vector_jacobian"):
        monkeypatch.setattr(pull_back, name, lambda *given: pytest.fail("a look-up was differentiated once more"))
    for index in (FIRST["expanded"], FIRST["shared"]):
        check(lambda m, x, index=index: x * m.scale + m.table(index(x)), 3, 0)


def test_an_index_that_was_changed_is_refused() -> None:
    """Torch notices it where it comes before the table's own gradient; after that, this does."""
    index = torch.arange(T).repeat(3, 1)
    module = Model(lambda m, x: x + m.table(index), table=nn.Embedding(6, D))

    def change(table: Tensor) -> None:
        index.copy_(index.flip(1))

    module.table.weight.register_post_accumulate_grad_hook(change)
    record = record_of(module, cubes(0), torch.randn(3, T, D))
    text = r"changed in place by `copy_` at test_table_rows\.py:\d+ before the backward ended"
    assert re.search(text, record.unsupported["table.weight"])


def test_a_table_that_has_stepped_already() -> None:
    """An optimizer that steps in the backward leaves another table, which plays no part."""
    module = Model(lambda m, x: x + m.table(torch.arange(T).expand(len(x), T)), table=nn.Embedding(6, D))
    x = torch.randn(3, T, D)
    expected = loop(module, cubes(0), (x,))["table.weight"]

    def step(table: Tensor) -> None:
        table.data.add_(table.grad, alpha=-0.1)

    handle = module.table.weight.register_post_accumulate_grad_hook(step)
    record = record_of(module, cubes(0), x)
    handle.remove()
    torch.testing.assert_close(record.grad_samples["table.weight"], expected, rtol=1e-10, atol=1e-12)
