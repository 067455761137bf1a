"""What is remembered of a call answers only for calls that are laid out alike: pairs of steps made to be confused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample import Outer, mark_samples, register_rule
from lightning_persample.batch_axis.axis import BatchAxis, Lost, Owner
from lightning_persample.capture import plan
from lightning_persample.capture.annotations import kind_of
from lightning_persample.capture.collector import Collector
from lightning_persample.capture.mode import expanded_weights
from tests.capture.model_cases import mean_of_squares
from tests.capture.reference import assert_exact, capture, loop, record_of

pytestmark = pytest.mark.usefixtures("double_precision")

B = T = D = 5  # every axis has the same size, so that nothing but the layout tells them apart


class Step(nn.Module):
    """A weight and a bias, and what is done with them."""

    def __init__(self, forward: Callable[..., Tensor], frozen: tuple[str, ...] = (), seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.w = nn.Parameter(torch.randn(D, D, generator=generator), "w" not in frozen)
        self.b = nn.Parameter(torch.randn(D, generator=generator), "b" not in frozen)
        self._step = forward

    def forward(self, *batch: Tensor) -> Tensor:
        return self._step(self.w, self.b, *batch)


def cube(seed: int = 0) -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layered(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Linear, something in between that moves the batch, linear; the rows are weighed so that their order counts."""

    def forward(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        h = change(F.linear(x, w, b).tanh())
        return F.linear(h, w, b) * torch.linspace(1, 2, D)

    return forward


def rows(x: Tensor) -> Tensor:
    return x.reshape(-1, D)


def rows_time_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).reshape(-1, D)


def axis_is_a_tensor(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda h: h.unsqueeze(torch.tensor(dim)).expand(*h.shape[:dim], 2, *h.shape[dim:]) * 1.0


def without_record(h: Tensor) -> Tensor:
    with torch.no_grad():
        mask = F.linear(h, torch.ones(D, D)).sigmoid()
    return h * mask


MOVES: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "rows-of-one-sample-apart-or-together": (rows, rows_time_first),
    "axes": (lambda h: h.transpose(0, 1), lambda h: h.transpose(1, 2), lambda h: h.transpose(0, 2).transpose(1, 2)),
    "permutations": (lambda h: h.permute(1, 0, 2), lambda h: h.permute(2, 0, 1), lambda h: h.permute((0, 2, 1))),
    "softmax-axes": (lambda h: h.softmax(1), lambda h: h.softmax(2), lambda h: torch.softmax(h, dim=-2)),
    "sums": (lambda h: h.sum(1), lambda h: h.sum(1, True), lambda h: h.mean(dim=(1,), keepdim=True)),
    "sum-over-a-moved-axis": (lambda h: h.transpose(0, 1).sum(0), lambda h: h.sum(1).unsqueeze(0)),
    "slices": (lambda h: h[:, 1:3], lambda h: h[:, :, [0, 1, 2, 3, 4]], lambda h: h[:, None, 2], lambda h: h[None]),
    "indices": (lambda h: h[:, torch.tensor([0, 2])], lambda h: h[:, torch.tensor([[1], [2]])]),
    "shuffles": (lambda h: h[torch.arange(len(h)).flip(0)], lambda h: h[torch.arange(len(h)).roll(1)]),
    "views-of-views": (lambda h: h.flatten(1).unflatten(1, (T, D)), lambda h: h.flatten(0, 1).view(-1, T, D)),
    "strides": (lambda h: h, lambda h: h.transpose(1, 2).contiguous().transpose(1, 2), lambda h: h.flip(1)),
    "axis-is-a-tensor": (axis_is_a_tensor(1), axis_is_a_tensor(2), axis_is_a_tensor(0)),
    "twice-the-same": (lambda h: h @ h.mT, lambda h: h @ h.sin().mT, lambda h: h * h),
    "joined": (lambda h: torch.cat([h, h.sin()], 1), lambda h: torch.cat([h, h.sin()]), lambda h: torch.stack([h], 1)),
    "in-place": (lambda h: h.sin().relu_() + h, lambda h: h.sin().relu() + h, lambda h: F.relu(h.sin(), inplace=True)),
    "without-gradient": (without_record, lambda h: h * F.linear(h, torch.ones(D, D)).sigmoid()),
    "chunks": (lambda h: h.chunk(T, 1)[0], lambda h: torch.cat(h.transpose(0, 1).chunk(T, 0)[:2], 0).transpose(0, 1)),
    "products": (
        lambda h: torch.einsum("bti,bsi->bts", h, h.cos()),
        lambda h: torch.einsum("bti,bis->bts", h, h.cos()),
        lambda h: torch.einsum("bti,bsi->tbs", h, h.cos()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
def test_moves_that_look_alike(name):
    for _ in range(2):  # first each is decided, then each is remembered
        for change in MOVES[name]:
            assert_exact(Step(layered(change)), mean_of_squares, (cube(),))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_batch_along_another_axis_of_the_same_size(order):
    for batch_dim in order * 2:
        step = Step(layered(lambda h: h.flatten(1, 2).unflatten(1, (-1, D)).sin()))
        assert_exact(step, mean_of_squares, (cube(),), batch_dim=batch_dim)


def test_another_number_of_samples_in_tensors_of_the_same_sizes():
    x = cube().reshape(-1, D)[:20]
    step = Step(lambda w, b, x: F.linear(x, w, b).tanh())
    each_row = loop(step, mean_of_squares, (x,))
    for batch_size in (20, 10, 5, 20, 10, 5):
        record = record_of(step, lambda m, x: mean_of_squares(m, mark_samples(x)), x, batch_size=batch_size)
        for name, gradients in each_row.items():
            expected = gradients.unflatten(0, (batch_size, -1)).mean(1)
            torch.testing.assert_close(record.grad_samples[name], expected)


def test_frozen_parts_change_between_steps():
    step = Step(layered(torch.sin))
    for weight, bias in ((True, True), (False, True), (True, False), (True, True), (False, True)):
        step.w.requires_grad_(weight)
        step.b.requires_grad_(bias)
        record = assert_exact(step, mean_of_squares, (cube(),))
        assert set(record.names) == {name for name, trained in (("w", weight), ("b", bias)) if trained}


def test_other_dtypes_in_turn():
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)) * 2:
        step = Step(lambda w, b, x: F.linear(F.linear(x, w, b).sin(), w)).to(dtype)
        assert_exact(step, mean_of_squares, (cube().to(dtype),), tolerance=tolerance)
        assert capture(step, mean_of_squares, (cube().to(dtype),)).norms().dtype is dtype


def test_operands_of_the_batch_and_constants_of_the_same_size():
    constant = torch.randn(T, D)
    table = torch.tensor([0, 1, 2, 3, 4])

    def with_table(w: Tensor, b: Tensor, x: Tensor, index: Tensor) -> Tensor:
        return F.embedding(index, w) + F.embedding(table[: x.size(1)], w) + x

    steps = [
        (Step(lambda w, b, x, z: F.linear(x, w, b) + constant), (cube(), cube(1))),
        (Step(lambda w, b, x, z: F.linear(x, w, b) + z), (cube(), cube(1))),
        (Step(lambda w, b, x, z: F.linear(x, w, b) + w), (cube(), cube(1))),
        (Step(lambda w, b, x, z: torch.matmul(x, w) @ z), (cube(), cube(1))),
        (Step(lambda w, b, x, z: torch.matmul(x, z) @ w), (cube(), cube(1))),
        (Step(lambda w, b, x, z: torch.matmul(x, constant) @ w), (cube(), cube(1))),
        (Step(with_table), (cube(), torch.randint(0, D, (B, T)))),
    ]
    for step, batch in steps * 2:
        assert_exact(step, mean_of_squares, batch)


def test_tensors_made_in_inference_mode():
    with torch.inference_mode():
        fixed = cube(1)
    for z in (cube(1), fixed, cube(1), fixed):
        step = Step(lambda w, b, x, z: F.linear(x, w, b) + z)
        inside = cube()
        record = record_of(step, mean_of_squares, inside, z)
        expected = loop(step, mean_of_squares, (inside, cube(1)))
        for name in ("w", "b"):
            torch.testing.assert_close(record.grad_samples[name], expected[name])


def test_what_is_said_of_a_call_is_said_in_every_step():
    def centred(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        h = F.linear(x, w, b)
        return h - h.mean(0)

    normalised = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, D))
    across = Step(lambda w, b, x: F.linear(x, w, b).softmax(0))
    for module, x in ((Step(centred), cube()), (normalised, cube()[0]), (across, cube())):
        records = [record_of(module, mean_of_squares, x) for _ in range(3)]
        assert any((*records[0].mixing, *records[0].axis_lost, *records[0].weighting, *records[0].unsupported.values()))
        for record in records[1:]:
            assert (record.mixing, record.axis_lost) == (records[0].mixing, records[0].axis_lost)
            assert record.weighting == records[0].weighting
            assert record.unsupported == records[0].unsupported


NORMALISATIONS = {
    "by place": lambda w, b, x: F.layer_norm(x.sin(), (D,), b, b, 0.1),
    "by name": lambda w, b, x: F.layer_norm(x.sin(), (D,), bias=b, eps=0.1, weight=b),
    "another epsilon": lambda w, b, x: F.layer_norm(x.sin(), (D,), b, b, 0.7),
    "no shift": lambda w, b, x: F.layer_norm(x.sin(), (D,), b),
    "two axes": lambda w, b, x: F.layer_norm(x.sin(), (T, D), w, eps=0.2),
    "torch's own": lambda w, b, x: torch.layer_norm(x.sin(), (D,), b, b, 0.1),
    "one group": lambda w, b, x: F.group_norm(x.sin(), 1, b, b, 0.1),
    "each channel": lambda w, b, x: F.group_norm(x.sin(), T, bias=b, weight=b, eps=0.3),
    "one group, no shift": lambda w, b, x: F.group_norm(x.sin(), 1, b, eps=0.2),
    "root mean square": lambda w, b, x: F.rms_norm(x.sin(), (D,), b),
    "root mean square, epsilon": lambda w, b, x: F.rms_norm(x.sin(), (D,), weight=b, eps=0.4),
    "scale from a linear map": lambda w, b, x: F.layer_norm(F.linear(x, w).sin(), (D,), b, b, 0.1),
    "the batch as scale": lambda w, b, x: F.layer_norm(b + x.sin(), (D,)) * w,
}


@pytest.mark.parametrize("frozen", [(), ("b",)])
def test_normalisations_that_look_alike(frozen):
    """From the third step on, each is followed as one call."""
    for _ in range(4):
        for forward in NORMALISATIONS.values():
            step = Step(lambda w, b, x, forward=forward: forward(w, b, x) + F.linear(x, w), frozen)
            assert_exact(step, mean_of_squares, (cube(),))
    assert {F.layer_norm, F.group_norm, F.rms_norm} <= {key[0] for key in plan.PLANS}


def test_a_normalisation_of_the_samples_is_refused_in_every_step():
    step = Step(lambda w, b, x: F.layer_norm(x.transpose(0, 2).sin(), (D,), b).transpose(0, 2))
    for _ in range(4):
        assert "batch" in record_of(step, mean_of_squares, cube()).unsupported["b"]


def test_training_and_evaluation_of_batch_normalisation_in_turn():
    module = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D))
    for training in (False, True, False, True):
        module.train(training)
        assert bool(record_of(module, mean_of_squares, cube()[0]).mixing) is training


@pytest.mark.usefixtures("own_rules")
def test_a_rule_that_is_replaced_between_two_steps_answers_at_once():
    step = Step(lambda w, b, x: F.linear(x, w))
    before = record_of(step, mean_of_squares, cube())

    names = ("input", "weight", "bias")

    @register_rule(F.linear, arguments=names, batched=("input",), weights=("weight",), overwrite=True)
    def twice(call: Any, grad_output: Tensor) -> dict[str, Outer]:
        return {"weight": Outer(2 * grad_output.flatten(1, -2), call.arguments["input"].flatten(1, -2))}

    after = record_of(step, mean_of_squares, cube())
    torch.testing.assert_close(after.grad_samples["w"], 2 * before.grad_samples["w"])


def test_a_weight_that_is_written_to_before_the_backward_is_refused_in_every_step():
    reasons = []
    for _ in range(3):
        step, x = Step(lambda w, b, x: x * b), cube()
        with expanded_weights(step, x, unsupported="ignore") as seen:
            loss = mean_of_squares(step, x)
            with torch.no_grad():
                step.b.mul_(2)
            loss.backward()
        reasons.append(dict(seen.record.unsupported))
    text = r"changed in place by `mul_` at test_layout\.py:\d+ between forward and backward; write the result to a new"
    assert re.search(text, reasons[0]["b"])
    assert reasons[1] == reasons[0]
    assert reasons[2] == reasons[0]


def test_what_is_remembered_is_bounded_and_may_be_forgotten_at_any_time(monkeypatch):
    plan.PLANS.clear()
    monkeypatch.setattr(plan, "_MOST", 3)
    for size in (2, 3, 4, 5, 2, 3):
        assert_exact(Step(layered(lambda h: h.transpose(1, 2).mT)), mean_of_squares, (cube()[:, :size],))
        assert 0 < len(plan.PLANS) <= 3


AXIS = BatchAxis(0)
NO_KEY: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "picked-from-the-batch": ((torch.ones(B, 2),), (BatchAxis(0, owner=Owner(torch.arange(B))),)),
    "lost": ((torch.ones(B, 2),), (Lost("there"),)),
    "sparse": ((torch.ones(B, 2).to_sparse(),), (AXIS,)),
    "a-class-of-its-own": ((torch.ones(B, 2).as_subclass(type("Own", (Tensor,), {})),), (AXIS,)),
    "an-axis-as-tensor": ((torch.ones(B, 2), torch.tensor(1)), (AXIS, None)),
    "sizes-as-tensor": ((torch.ones(B, 2), torch.tensor([1, 1])), (AXIS, None)),
    "an-object": ((torch.ones(B, 2), object()), (AXIS,)),
    "a-generator": ((torch.ones(B, 2), torch.Generator()), (AXIS,)),
}


def key_of(function: Any, args: Any, kwargs: Any, tensors: Any, marks: Any, batch_size: int) -> Any:
    collector = Collector({}, batch_size)
    known = collector.marks
    for tensor, mark in zip(tensors, marks, strict=True):
        if mark is not None:
            known[tensor] = mark
    return plan.TorchCall(function, args, kwargs, kind_of(function), collector).signature


@pytest.mark.parametrize("name", NO_KEY)
def test_calls_that_are_decided_anew_each_time(name):
    args, marks = NO_KEY[name]
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    assert key_of(torch.sum, args, {}, tensors, marks, B) is None
    assert key_of(torch.sum, args[:0], {"input": args[0], "x": args[1:]}, tensors, marks, B) is None


def test_a_tensor_given_twice_or_written_to_has_no_key():
    x = torch.ones(B, 2)
    assert key_of(torch.matmul, (x, x), {}, [x, x], [AXIS, AXIS], B) is None
    assert key_of(torch.sum, (x, 1), {"out": x.clone()}, [x, x.clone()], [AXIS, None], B) is None
    assert key_of(Tensor.__getitem__, (x, x), {}, [x, torch.ones(2)], [AXIS, None], B) is None


def test_keys_tell_apart_all_that_decides():
    x = torch.ones(B, B)
    trained = torch.ones(B, B, requires_grad=True)
    calls: list[tuple[Any, ...]] = [
        (torch.sum, (x, 1), {}, AXIS, B),
        (torch.mean, (x, 1), {}, AXIS, B),
        (torch.sum, (x, 0), {}, AXIS, B),
        (torch.sum, (x, True), {}, AXIS, B),
        (torch.sum, (x, 1.0), {}, AXIS, B),
        (torch.sum, (x, (1,)), {}, AXIS, B),
        (torch.sum, (x, [1]), {}, AXIS, B),
        (torch.sum, (x,), {"dim": 1}, AXIS, B),
        (torch.sum, (x,), {"axis": 1}, AXIS, B),
        (torch.sum, (x, 1), {"keepdim": True}, AXIS, B),
        (torch.sum, (x, 1), {"keepdim": False}, AXIS, B),
        (torch.sum, (x, 1), {}, AXIS, 1),
        (torch.sum, (x, 1), {}, BatchAxis(1), B),
        (torch.sum, (x, 1), {}, BatchAxis(0, outer=5), 1),
        (torch.sum, (x, 1), {}, BatchAxis(0, inner=5), 1),
        (torch.sum, (x, 1), {}, None, B),
        (torch.sum, (trained, 1), {}, AXIS, B),
        (torch.sum, (x.float(), 1), {}, AXIS, B),
        (torch.sum, (x[:, :4], 1), {}, AXIS, B),
        (torch.sum, (x, slice(1)), {}, AXIS, B),
        (torch.sum, (x, slice(1, None)), {}, AXIS, B),
        (torch.sum, (x, (slice(None), 1)), {}, AXIS, B),
        (torch.sum, (x, None), {}, AXIS, B),
        (torch.sum, (x, ...), {}, AXIS, B),
        (torch.sum, (x, ()), {}, AXIS, B),
    ]  # fmt: skip
    keys = [key_of(op, args, kwargs, args[:1], [mark], size) for op, args, kwargs, mark, size in calls]
    with torch.no_grad():
        keys.append(key_of(torch.sum, (x, 1), {}, [x], [AXIS], B))
    assert None not in keys
    assert len(set(keys)) == len(keys)
    twice = x * 2
    assert key_of(torch.sum, (twice, 1), {}, [twice], [BatchAxis(0)], B) == keys[0]
