"""Tensors that lie in other memory than before: `.data = ...`, `set_`, `resize_`, swapped contents, parts assigned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import swap_tensors

from lightning_persample.capture.mode import expanded_weights
from tests.capture.model_cases import Model, parameter
from tests.capture.reference import assert_exact, record_of

B, D = 4, 5


def error(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return module(x, y)


def model(forward: Callable[[Any, Tensor, Tensor], Tensor]) -> nn.Module:
    return Model(forward, a=nn.Linear(D, D), c=nn.Linear(D, 3), v=parameter(D), w=parameter(3, D))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(B, D), torch.randint(3, (B,))


def through(m: Any, z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.c(torch.tanh(m.a(z))), y)


def _changed(change: Callable[[Tensor, Tensor], object]) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """The forward of a copy of x that `change` lets hold the samples in reverse order."""

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        z = x.clone()
        change(z, x.flip(0))
        return through(m, z, y.flip(0))

    return forward


def _assign(z: Tensor, other: Tensor) -> None:
    z.data = other


def _set_through_storage(z: Tensor, other: Tensor) -> None:
    z.set_(other.untyped_storage(), 0, other.shape, other.stride())  # type: ignore[call-overload]


def _state(z: Tensor, other: Tensor) -> None:
    z.__setstate__((other.untyped_storage(), 0, tuple(other.shape), other.stride()))  # type: ignore[operator]


def _fresh(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z = torch.empty(0)
    z.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())  # type: ignore[call-overload]
    return through(m, z, y)


def _other_axis(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z = x[:, None].repeat(1, len(x), 1)
    z.set_(x[None].repeat(len(x), 1, 1))
    return through(m, z[0], y)


def _storage_with_other_axis(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z, other = x[:, None].repeat(1, len(x), 1), x[None].repeat(len(x), 1, 1)
    z.set_(other.untyped_storage(), 0, other.shape, other.stride())  # type: ignore[call-overload]
    return through(m, z[0], y)


def _resized(resize: Callable[[Tensor], object]) -> Callable[[Any, Tensor, Tensor], Tensor]:
    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        z = x[None].repeat(len(x), 1, 1)
        resize(z)
        return through(m, z[0].view(x.shape), y)

    return forward


def _no_data_any_more(assign: Callable[[Tensor, Tensor], object]) -> Callable[[Any, Tensor, Tensor], Tensor]:
    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        z = x.clone()
        assign(z, torch.ones(7, D))
        return F.cross_entropy(m.c(torch.tanh(m.a(x))) + m.c(m.a(z)).sum(0), y)

    return forward


def _swapped_with_a_constant(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z, ones = x.clone(), torch.ones(7, D)
    torch.utils.swap_tensors(z, ones)
    return F.cross_entropy(m.c(torch.tanh(m.a(ones))) + m.c(m.a(z)).sum(0), y)


def _swapped_activations(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z, other = m.a(x), x.flip(0) * m.v
    swap_tensors(z, other)
    return F.cross_entropy(m.c(z), y.flip(0))


def _swapped_and_back(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z, other = x.clone(), x.flip(0)
    swap_tensors(z, other)
    swap_tensors(other, z)
    return through(m, z, y)


def _swap_refused(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z = m.a(x)
    kept = z * z
    with pytest.raises(RuntimeError, match="use_count"):
        swap_tensors(z, x)
    return F.cross_entropy(m.c(z + kept + x), y)


def _part(name: str) -> Callable[[Any, Tensor, Tensor], Tensor]:
    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        z = torch.ones(x.shape, dtype=torch.complex128)
        setattr(z, name, m.a(x))
        return F.cross_entropy(m.c(z.abs() + getattr(z, name)), y)

    return forward


def _weight_with_other_data(m: Any, x: Tensor, y: Tensor) -> Tensor:
    w = m.w * 1.0
    w.data = 2 * w.data
    return F.cross_entropy(F.linear(m.a(x), w * w), y)


def _activation_with_constant_data(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z = m.a(x)
    z.data = torch.ones_like(z)
    return F.cross_entropy(m.c(z), y)


EXACT = {
    "data": _changed(_assign),
    "set": _changed(lambda z, other: z.set_(other)),
    "set-source": _changed(lambda z, other: z.set_(source=other)),
    "set-storage": _changed(_set_through_storage),
    "setstate": _changed(_state),
    "swap": _changed(swap_tensors),
    "fresh": _fresh,
    "other-axis": _other_axis,
    "storage-with-other-axis": _storage_with_other_axis,
    "resize": _resized(lambda z: z.resize_(len(z), len(z) * D)),
    "resize-as": _resized(lambda z: z.resize_as_(torch.empty(len(z), len(z) * D))),
    "constant-data": _no_data_any_more(_assign),
    "constant-set": _no_data_any_more(lambda z, other: z.set_(other)),
    "swapped-with-a-constant": _swapped_with_a_constant,
    "swapped-activations": _swapped_activations,
    "swapped-and-back": _swapped_and_back,
    "swap-refused": _swap_refused,
    "real": _part("real"),
    "imag": _part("imag"),
    "weight-with-other-data": _weight_with_other_data,
    "activation-with-constant-data": _activation_with_constant_data,
}


@pytest.mark.usefixtures("double_precision")
@pytest.mark.filterwarnings("error::lightning_persample.PerSampleWarning")
@pytest.mark.parametrize("name", EXACT)
def test_a_tensor_holds_what_lies_in_its_memory(name: str) -> None:
    assert_exact(model(EXACT[name]), error, batch())


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("name", EXACT)
def test_training_is_equal_bit_for_bit(name: str) -> None:
    module, (x, y) = model(EXACT[name]), batch()
    error(module, x, y).backward()
    expected = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    with expanded_weights(module, (x, y)):
        error(module, x, y).backward()
    for key, p in module.named_parameters():
        torch.testing.assert_close(p.grad, expected[key], rtol=0.0, atol=0.0)


def _in_a_graph(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z = m.a(x)
    z.data = x.flip(0)
    return F.cross_entropy(m.c(z), y.flip(0))


def _storage_alone(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z, storage = x.clone(), x.flip(0).untyped_storage()
    z.set_(storage, 0, x.shape, x.stride())  # type: ignore[call-overload]
    return through(m, z, y)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (_in_a_graph, "its data was replaced by that of other samples at test_moved_memory.py:"),
        (_storage_alone, "it was set to memory that no tensor shows at test_moved_memory.py:"),
    ],
)
def test_what_cannot_be_followed_is_named(forward: Callable[[Any, Tensor, Tensor], Tensor], reason: str) -> None:
    record = record_of(model(forward), error, *batch())
    assert reason in record.unsupported["c.weight"]
    assert any(reason in text for text in record.axis_lost)


def test_tensors_are_as_before_afterwards() -> None:
    before = dict(vars(Tensor)), torch.utils.weakref  # type: ignore[attr-defined]
    module = model(EXACT["swap"])
    with expanded_weights(module, batch()) as capture:
        assert dict(vars(Tensor)) != before[0]
    assert (dict(vars(Tensor)), torch.utils.weakref) == before  # type: ignore[attr-defined]
    assert capture.records == []


@pytest.mark.usefixtures("double_precision")
def test_a_batch_that_was_written_into_a_tensor_beside_a_transform():
    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        z.copy_(x)
        return through(m, m.a(x) + torch.func.vmap(lambda row: 2 * row)(x) + z, y)

    assert_exact(model(forward), error, batch())


@pytest.mark.usefixtures("double_precision")
def test_tensors_without_entries_share_no_memory() -> None:
    """All of them begin at 0, as every tensor of a device without addresses does."""

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        written = x.new_zeros(len(x), 0)
        written.copy_(x[:, :0])
        return F.cross_entropy(torch.cat([x.new_zeros(len(x), 0), m.c(torch.tanh(m.a(x)))], 1), y)

    record = assert_exact(model(forward), error, batch())
    assert (record.mixing, record.axis_lost) == ((), ())
