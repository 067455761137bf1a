"""Rows of the batch written into places that indices name along another axis than the batch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample.capture.mode import expanded_weights
from lightning_persample.capture.record import PerSampleRecord
from tests.capture.model_cases import Model, parameter
from tests.capture.reference import assert_exact, record_of

B, T, D = 4, 4, 4  # of one size, so that no axis can be told by it
PLACES: dict[str, tuple[Any, Any]] = {  # where to write, and what of the layer's output
    "list": ((slice(None), [1, 3]), lambda y: y[:, :2]),
    "tensor": ((slice(None), torch.tensor([3, 0, 1])), lambda y: y[:, 1:]),
    "twice-the-same": ((slice(None), [2, 2]), lambda y: y[:, :1]),
    "last-axis": ((..., [0, 2]), lambda y: y[..., :2]),
    "matrix": ((slice(None), torch.tensor([[0, 1], [2, 3]])), lambda y: y.unflatten(1, (2, 2))),
    "two-together": ((slice(None), [0, 1, 2], [3, 0, 2]), lambda y: y[:, :3, 0]),
    "beside-a-number": ((slice(None), 2, [0, 1]), lambda y: y[:, 0, :2]),
    "beside-a-slice": ((slice(None), [0, 3], slice(1, 3)), lambda y: y[:, :2, :2]),
    "of-one-size-with-all": ((slice(None), [3, 1, 0, 2]), lambda y: y),
}


def mean_of_cubes(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).flatten(1).pow(3).mean(1).mean()


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("onto", ["zeros", "batch", "weight"])
@pytest.mark.parametrize("place", PLACES)
def test_rows_written_by_index_stay_with_their_samples(place: str, onto: str) -> None:
    index, part = PLACES[place]

    def forward(m: Any, x: Tensor) -> Tensor:
        target = {"zeros": x.new_zeros(x.shape), "batch": m.a(x), "weight": m.w.expand(x.shape).clone()}[onto]
        target[index] = part(m.b(x))
        return m.c(target)

    layers = {name: nn.Linear(D, D) for name in "abc"}
    module = Model(forward, **layers, w=parameter(T, D))
    assert_exact(module, mean_of_cubes, (torch.randn(B, T, D),))


@pytest.mark.usefixtures("double_precision")
def test_across_two_separate_indices() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        target = x.new_zeros(len(x), 3, T, 3, D)
        target[:, [0, 2], :, [1, 2]] = m.a(x).expand(2, *x.shape)
        return m.c(target)

    assert_exact(Model(forward, a=nn.Linear(D, D), c=nn.Linear(D, D)), mean_of_cubes, (torch.randn(B, T, D),))


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    "index",
    [[1, 0, 3, 2], (slice(None), [0, 1, 2, 3])],
    ids=["along-the-batch", "along-another-axis"],
)
def test_rows_written_to_places_of_other_samples_are_what_each_sample_adds(index: Any) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        target = x.new_zeros(B, B, D)
        target[index] = m.a(x) if isinstance(index, tuple) else m.a(x)[:, None]
        return m.c(target)

    module, x = Model(forward, a=nn.Linear(D, D), c=nn.Linear(D, D)), torch.randn(B, D)
    record = record_of(module, mean_of_cubes, x)
    assert (record.coverage, record.mixing, record.axis_lost) == (1.0, (), ())
    for sample in range(B):
        own = torch.zeros(B, B, 1)
        own[(slice(None), sample) if isinstance(index, tuple) else index[sample]] = 1
        adds = (module(x).pow(3) * own).mean() * B
        for name, expected in zip(record.grad_samples, torch.autograd.grad(adds, [*module.parameters()]), strict=True):
            torch.testing.assert_close(record.grad_samples[name][sample], expected)


@pytest.mark.usefixtures("double_precision")
def test_rows_written_to_places_of_other_samples_do_not_meet_those_samples_in_silence() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        target = x.new_zeros(x.shape)
        target[[1, 0, 3, 2]] = m.a(x)
        return m.c(target * x)

    record = record_of(Model(forward, a=nn.Linear(D, D), c=nn.Linear(D, D)), mean_of_cubes, torch.randn(B, D))
    assert any("combines different samples" in text for text in record.mixing)


def margin(z: Tensor, y: Tensor) -> Tensor:
    """One number in each row, at the place of the sample's class."""
    t = torch.zeros(z.shape)
    t[torch.arange(len(z)), y] = 0.1
    return z - t


def masked_margin(z: Tensor, y: Tensor) -> Tensor:
    mask = torch.zeros(z.shape, dtype=torch.bool)
    mask[range(len(z)), y] = True
    return torch.where(mask, z * 0.9, z)


def own_margins(z: Tensor, y: Tensor) -> Tensor:
    t = z.new_zeros(z.shape)
    t[torch.arange(len(z)), y] = z[torch.arange(len(z)), y].sigmoid()
    return z - t


def several_places(z: Tensor, y: Tensor) -> Tensor:
    t = torch.zeros(z.shape)
    t[torch.arange(len(z))[:, None], torch.stack([y, (y + 1) % z.size(1)], dim=1)] = 0.5
    return z * (1 - t)


def in_a_plane(z: Tensor, y: Tensor) -> Tensor:
    t = torch.zeros(2, len(z), z.size(1))
    t[1, torch.arange(len(z)), y] = 0.3
    return z + t[1]


def along_columns(z: Tensor, y: Tensor) -> Tensor:
    t = torch.ones(z.size(1), len(z))
    t[y, torch.arange(len(z))] = 2.0
    return z * t.T


def counted(z: Tensor, y: Tensor) -> Tensor:
    t = torch.zeros(z.shape)
    t[torch.arange(len(z)), y] += 1.0
    t[torch.arange(len(z)), -y - 1] += 0.5
    return z * t


def in_place(z: Tensor, y: Tensor) -> Tensor:
    z = z.clone()
    z[torch.arange(len(z)), y] -= 0.1
    return z


MARGINS = [in_place, margin, masked_margin, own_margins, several_places, in_a_plane, along_columns, counted]


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("shape", [(5, 3), (4, 4)])
@pytest.mark.parametrize("written", MARGINS)
def test_a_row_written_at_the_places_of_its_own_sample(written: Callable[..., Tensor], shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    module, batch = nn.Linear(6, shape[1]), (torch.randn(shape[0], 6), torch.randint(0, shape[1], (shape[0],)))
    record = assert_exact(module, lambda m, x, y: F.cross_entropy(written(m(x), y), y), batch)
    assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())
    assert record.factor is not None


ELSEWHERE: dict[str, Callable[[Tensor, Tensor], None]] = {
    "one-row": lambda t, y: t.__setitem__((0, y), 0.1),
    "all-rows": lambda t, y: t.__setitem__((slice(None), y), 0.1),
    "other-rows": lambda t, y: t.__setitem__((torch.arange(len(t)).flip(0), y), 0.1),
    "rows-of-the-batch": lambda t, y: t.__setitem__((y, torch.arange(len(t))), 0.1),
    "shuffled-places": lambda t, y: t.__setitem__((torch.arange(len(t)), y.flip(0)), 0.1),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_places_of_other_samples_are_said(name: str) -> None:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        t = torch.zeros(len(x), len(x))
        ELSEWHERE[name](t, y)
        return F.cross_entropy(m(x) - t, y)

    record = record_of_both(nn.Linear(6, 5), loss, (torch.randn(5, 6), torch.randint(0, 5, (5,))))
    assert (*record.mixing, *record.axis_lost, *record.weighting) != ()


def record_of_both(module: nn.Module, loss: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> PerSampleRecord:
    with expanded_weights(module, batch, unsupported="ignore") as capture:
        loss(module, *batch).backward()
    return capture.record


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    "place",
    [slice(None, 2), 0, -1, slice(1, 3), slice(None, None, 2), (0, 0), (slice(1, None), 1), [0, 2], torch.tensor([0])],
    ids=str,
)
def test_a_weight_written_into_rows_of_some_samples_is_never_given_to_all(place: Any) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = x.clone()
        x[place] = m.w[0] if isinstance(place, tuple) else m.w
        return m.c(x)

    module, x = Model(forward, w=parameter(D), c=nn.Linear(D, D)), torch.randn(B, D)
    record = record_of(module, mean_of_cubes, x)
    (grad,) = torch.autograd.grad(mean_of_cubes(module, x), [module.w])
    if "w" in record.names:
        torch.testing.assert_close(record.grad_samples["w"].mean(0), grad)
    else:
        assert "rows of some samples" in record.unsupported["w"]


LISTED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "where": lambda h, mask: h.__setitem__(torch.where(mask), h[torch.where(mask)] * 2.0),
    "nonzero": lambda h, mask: h.__setitem__(mask.nonzero(as_tuple=True), h[mask].sin()),
    "a-constant": lambda h, mask: h.__setitem__(mask.nonzero(as_tuple=True), 0.5),
    "constants": lambda h, mask: h.__setitem__(mask.nonzero(as_tuple=True), torch.ones(h.shape[-1], dtype=h.dtype)),
    "index_put": lambda h, mask: h.index_put_(torch.where(mask), h[mask].square()),
}


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("way", LISTED)
def test_places_that_a_mask_of_the_batch_lists(way: str) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m[0](x).clone()
        LISTED[way](h, x[..., 0] > 0)
        return m[1](h).square().sum((1, 2)).mean()

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    record = assert_exact(module, forward, (torch.randn(4, 5, 3),))
    assert record.mixing == record.axis_lost == ()


def test_rows_of_another_sample_at_listed_places_are_named() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h, (i, j) = m[0](x).clone(), torch.where(x[..., 0] > 0)
        h[i, j] = h[i.flip(0), j]
        return m[1](h).square().sum((1, 2)).mean()

    torch.manual_seed(0)
    record = record_of(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), forward, torch.randn(4, 5, 3))
    assert set(record.unsupported) == {"1.weight", "1.bias"}


def segments(x: Tensor) -> Tensor:
    return (x[..., 0] > 0).long()


ADDED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "rows": lambda m, x, h: x.new_zeros(len(x), 2, D).index_put((rows_of(x), segments(x)), h, accumulate=True),
    "rows-in-place": lambda m, x, h: x.new_zeros(len(x), 2, D).index_put_((rows_of(x), segments(x)), h, True),
    "one-column": lambda m, x, h: x.new_zeros(len(x), 2, D).index_put((rows_of(x)[:, :1], segments(x)), h, True),
    "one-for-all": lambda m, x, h: x.new_zeros(len(x), 2, D).index_put((rows_of(x), segments(x)), h[:, :1], True),
    "numbers": lambda m, x, h: x.new_zeros(len(x), 2).index_put((rows_of(x), segments(x)), h[..., 0], True),
    "time-first": lambda m, x, h: torch.index_put(
        x.new_zeros(2, len(x), D), (segments(x).T, rows_of(x).T), h.transpose(0, 1), accumulate=True
    ).transpose(0, 1),
    "onto-the-batch": lambda m, x, h: h.index_put((rows_of(x), segments(x)), h.tanh(), accumulate=True),
    "by-a-mask": lambda m, x, h: h.index_put((x[..., 0] > 0,), h[x[..., 0] > 0].tanh(), accumulate=True),
    "a-weight-by-a-mask": lambda m, x, h: h.index_put((x[..., 0] > 0,), m.w, accumulate=True),
    "in-the-order-of-values": lambda m, x, h: torch.index_put(
        torch.zeros_like(h), indices=(rows_of(x), x[..., 0].argsort(1)), values=h, accumulate=False
    ),
}


def rows_of(x: Tensor) -> Tensor:
    return torch.arange(len(x))[:, None].expand(-1, T)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("name", ADDED)
def test_rows_added_or_written_at_places_that_the_samples_name(name: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.c(ADDED[name](m, x, m.a(x)).reshape(len(x), -1, 2).tanh())

    module = Model(forward, a=nn.Linear(D, D), c=nn.Linear(2, 3), w=parameter(D))
    record = assert_exact(module, mean_of_cubes, (torch.randn(B, T, D),))
    assert record is None or (record.mixing, record.axis_lost) == ((), ())


@pytest.mark.usefixtures("double_precision")
def test_rows_added_at_rows_of_other_samples_are_their_own() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        rows = torch.arange(len(x)).roll(1)[:, None].expand(-1, T)
        return m.c(x.new_zeros(len(x), 2, D).index_put((rows, segments(x)), m.a(x), accumulate=True))

    assert_exact(Model(forward, a=nn.Linear(D, D), c=nn.Linear(D, D)), mean_of_cubes, (torch.randn(B, T, D),))


@pytest.mark.usefixtures("double_precision")
def test_rows_added_beside_rows_of_other_samples_are_not_assigned_to_these() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        rows = torch.arange(len(x)).roll(1)[:, None].expand(-1, T)
        return m.c(m.a(x)[:, :2].index_put((rows, segments(x)), m.a(x), accumulate=True))

    record = record_of(Model(forward, a=nn.Linear(D, D), c=nn.Linear(D, D)), mean_of_cubes, torch.randn(B, T, D))
    assert "c.weight" in record.unsupported
    assert "writes into places that depend on other samples" in record.unsupported["c.weight"]


MASKED: dict[
    str, Callable[[Any, Tensor], Tensor]
] = {  # a tensor without samples, of which a mask of theirs takes a part
    "weight-into-zeros": lambda m, x: put(torch.zeros(x.shape), x[..., 0] > 0, m.w),
    "weight-into-a-weight": lambda m, x: put((2 * m.w).expand(x.shape).contiguous(), x[..., 0] > 0, m.w.tanh()),
    "zero-into-a-weight": lambda m, x: put(m.w.repeat(len(x), T, 1), x[..., 0] > 0, 0.0),
    "number-by-entry": lambda m, x: put(torch.zeros(x.shape), x > 0, m.w[0]),
    "time-first": lambda m, x: put(torch.zeros(T, len(x), D), (x[..., 0] > 0).T, m.w).transpose(0, 1),
    "last-axes": lambda m, x: put(torch.zeros(D, len(x), T), (slice(None), x[..., 0] > 0), m.w[:, None]).permute(
        1, 2, 0
    ),
    "along-time": lambda m, x: put(torch.zeros(T, len(x), D), (slice(None), x[:, 0, 0] > 0), m.w).transpose(0, 1),
}


def put(target: Tensor, index: Any, value: Any) -> Tensor:
    target[index] = value
    return target


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("name", MASKED)
def test_a_weight_written_by_a_mask_of_the_samples(name: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.c(MASKED[name](m, x) * x)

    assert_exact(Model(forward, c=nn.Linear(D, D), w=parameter(D)), mean_of_cubes, (torch.randn(B, T, D),))
