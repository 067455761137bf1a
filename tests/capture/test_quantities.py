"""Dots with vectors, sums of squared entries, some of the samples alone, and what ``.grad`` got of each sample."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_persample.capture.mode import expanded_weights
from lightning_persample.capture.record import PerSampleRecord
from lightning_persample.errors import OptionError, UnsupportedError
from tests.capture import recurrent_cases, twice_cases  # noqa: F401  (add to CASES)
from tests.capture.model_cases import CASES
from tests.capture.reference import loop
from tests.in_turn import every_other, in_turn, one_kind_each
from tests.models import MODELS
from tests.torch_release import not_in_the_oldest

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")

ALL = ("sq_norm", "grad_sample", "dot", "square_sum")


def close(found: Tensor, expected: Tensor, size: float = 0.0) -> None:
    """Relative to the largest entry, or to this size where that of all parameters is larger."""
    largest = max(size, float(expected.abs().max()) if expected.numel() else 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10 * largest)


def check(module: nn.Module, loss_fn: Any, batch: tuple[Tensor, ...], samples: Tensor | None, **options: Any) -> None:
    batch_dim = options.get("batch_dim", 0)
    expected = loop(module, loss_fn, batch, batch_dim)
    vectors = {name: torch.randn(grads.shape[1:], dtype=grads.dtype) for name, grads in expected.items()}
    later = (ALL, ("dot", "square_sum"), ("sq_norm",))
    at_once = (("dot",), ("sq_norm", "dot"), ("dot",))  # (programs are recorded the second time, and run the third)
    for quantities in later + at_once:
        module.zero_grad()
        with expanded_weights(
            module, batch, quantities=quantities, unsupported="error", samples=samples, **options
        ) as capture:
            if quantities in at_once:
                capture.take_dots(vectors)
            loss_fn(module, *batch).backward()
        record = capture.record
        places = torch.arange(record.batch_size) if samples is None else samples
        used = {name: grads[places].flatten(1) if grads.dim() > 1 else grads[places, None]
                for name, grads in expected.items() if name in record.names}  # fmt: skip
        size = max(float(grads.abs().max()) for grads in expected.values())  # biases before a normalization have none
        assert record.num_values == len(places)
        if "sq_norm" in quantities or quantities not in at_once:
            close(record.norms().square(), sum(grads.square().sum(1) for grads in used.values()))
        if "dot" in quantities:
            close(
                record.dot({name: vectors[name] for name in used}),
                sum(g @ vectors[n].flatten() for n, g in used.items()),
            )
        for name, grads in used.items():
            if "square_sum" in quantities:
                close(record.square_sums[name].flatten(), grads.square().sum(0), size**2)
            if "grad_sample" in quantities:
                close(record.grad_samples[name].reshape(grads.shape), grads, size)
        if not record.mixing and not record.axis_lost and not record.not_additive and not record.weighting:
            assert record.why_no_factor == ""
            for name in used:
                grad = module.get_parameter(name).grad
                assert grad is not None
                close(grad.to_dense(), record.factor * expected[name].sum(0), size)
    module.zero_grad()


@pytest.mark.parametrize(("name", "part"), every_other(in_turn(one_kind_each(CASES), ["all", "some"]), first=1))
def test_one_way_to_meet_the_batch(name: str, part: str) -> None:
    case = CASES[name]
    module = case.build().double()
    batch = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in case.batch(5))
    check(module, case.loss, batch, torch.tensor([3, 0, 4]) if part == "some" else None, **case.options)


@pytest.mark.parametrize("part", ["all", "some"])
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, part: str) -> None:
    model = MODELS[name](dtype=torch.float64)
    check(model.module, model.loss_fn, model.make_batch(6), torch.tensor([5, 2]) if part == "some" else None)


X, Y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)


def weighted(module: nn.Module, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    return (F.mse_loss(module(x), y, reduction="none").mean(1) * weights).sum()


@pytest.mark.parametrize("samples", [None, torch.tensor([2, 1])], ids=["all", "some"])
@pytest.mark.parametrize("equal", [True, False])
def test_weights_of_the_samples_are_taken_out(equal: bool, samples: Tensor | None) -> None:
    module = nn.Linear(3, 2).double()
    weights = torch.full((4,), 0.3).double() if equal else torch.tensor([0.1, 0.5, 2.0, 0.7]).double()
    own = loop(module, lambda m, x, y: F.mse_loss(m(x), y), (X, Y))
    with expanded_weights(module, (X, Y), loss_reduction=weights, quantities=ALL, samples=samples) as capture:
        weighted(module, X, Y, weights).backward()
    record, places = capture.record, range(4) if samples is None else samples.tolist()
    for name, grads in own.items():
        picked = grads[list(places)]
        close(record.square_sums[name], picked.square().sum(0))
        close(record.grad_samples[name], picked)
        close(record.dot({name: grads[0]}), (picked * grads[0]).flatten(1).sum(1))
    if equal:
        assert record.factor is not None
        close(record.factor, torch.tensor(0.3).double())
    else:
        assert (record.factor, record.why_no_factor) == (None, "the samples weigh unequally in the loss")


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_factor_has_the_scale_of_the_loss(scale: float) -> None:
    module = nn.Linear(3, 2).double()
    own = loop(module, lambda m, x, y: F.mse_loss(m(x), y), (X, Y))
    with expanded_weights(module, (X, Y)) as capture:
        loss = F.mse_loss(module(X), Y)
        capture.attach_loss(loss)
        (loss * scale).backward()
    assert capture.record.factor is not None
    close(capture.record.factor, torch.tensor(scale / 4).double())
    close(module.weight.grad, capture.record.factor * own["weight"].sum(0))


PENALTIES = {
    "added": lambda module, loss: (loss + 0.1 * module.weight.square().sum()).backward(),
    "added in place": lambda module, loss: loss.add_(module.weight.square().sum()).backward(),
    "of two": lambda module, loss: (loss + (module.weight.sum() * module.bias.sum())).backward(),
    "a root of its own": lambda module, loss: torch.autograd.backward([loss, module.weight.square().sum()]),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=not_in_the_oldest if name == "a root of its own" else ()) for name in PENALTIES]
)
def test_a_term_of_no_sample_leaves_no_factor(name: str) -> None:
    module = nn.Linear(3, 2).double()
    with expanded_weights(module, (X, Y), unsupported="ignore") as capture:
        PENALTIES[name](module, F.mse_loss(module(X), Y))
    record = capture.record
    made_of = "`bias`, `weight`" if name == "of two" else "`weight`"
    assert record.factor is None
    assert record.why_no_factor == f"the loss has a term that belongs to no sample, made of {made_of}"


def test_a_term_that_is_not_differentiated_leaves_the_factor() -> None:
    module = nn.Linear(3, 2).double()
    with expanded_weights(module, (X, Y)) as capture:
        loss = F.mse_loss(module(X), Y)
        assert (loss + module.weight.square().sum()).item() > 0
        loss.backward()
    assert capture.record.factor is not None
    with expanded_weights(module, (X, Y)) as capture:
        (F.mse_loss(module(X), Y) + module.weight.square().sum()).backward()
        F.mse_loss(module(X), Y).backward()
    assert [record.factor is None for record in capture.records] == [True, False]


def test_only_what_was_asked_for() -> None:
    module = nn.Linear(3, 2).double()
    with expanded_weights(module, (X, Y)) as capture:
        F.mse_loss(module(X), Y).backward()
    record = capture.record
    with pytest.raises(OptionError, match=re.escape("dots were not asked for; pass quantities=('sq_norm', 'dot') to")):
        record.dot({"weight": module.weight})
    with pytest.raises(OptionError, match=re.escape("the sums of squared entries were not asked for; pass")):
        record.square_sums["weight"]
    remedy = re.escape(
        "the gradients themselves were not asked for; pass quantities=('sq_norm', 'grad_sample') to expanded_weights, "
        "or let `needs` of the callback return {'grad_sample'}"
    )
    for read in (dict, list, len, bool, lambda grads: grads["weight"], lambda grads: grads.get("weight")):
        with pytest.raises(OptionError, match=remedy):
            read(record.grad_samples)
    assert repr(record.grad_samples) == "<the gradients themselves: not asked for>"
    asked = ("sq_norm", "grad_sample", "square_sum")
    with expanded_weights(module, (X, Y), quantities=asked, unsupported="ignore") as capture:
        capture._dispatcher.fail(ValueError("a fault"))
        F.mse_loss(module(X), Y).backward()
    assert (capture.record.coverage, capture.record.grad_samples, capture.record.square_sums) == (0, {}, {})


def test_vectors_that_do_not_fit() -> None:
    module = nn.Linear(3, 2).double()
    with expanded_weights(module, (X, Y), quantities=("dot",)) as capture:
        F.mse_loss(module(X), Y).backward()
    dot = capture.record.dot
    with pytest.raises(
        OptionError,
        match=r"dot: `scale` has no per-sample gradient in this record; it holds `weight`, `bias`\. Leave out "
        "parameters that are frozen, unused or unsupported: `record.names` has the others",
    ):
        dot({"scale": module.weight})
    with pytest.raises(
        OptionError, match=re.escape("dot: the vector of `weight` has shape (3, 2); the parameter's is (2, 3)")
    ):
        dot({"weight": module.weight.T})
    with pytest.raises(OptionError, match="dot: there is no vector; give one for at least one parameter"):
        dot({})


def test_dots_after_a_change_in_place_are_refused() -> None:
    module, x = nn.Linear(3, 2).double(), X.clone()
    with expanded_weights(module, (x, Y), quantities=("dot",)) as capture:
        F.mse_loss(module(x), Y).backward()
    x.zero_()
    text = "dot: a tensor that the gradient of `weight` is made of was changed in place since the backward"
    with pytest.raises(UnsupportedError, match=text):
        capture.record.dot({"weight": module.weight})


def test_dots_that_are_taken_at_once_keep_nothing() -> None:
    module, inputs = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), []
    module[2].register_forward_hook(
        lambda layer, args, output: inputs.append(StorageWeakRef(args[0].untyped_storage()))
    )
    vectors = {name: torch.randn_like(parameter) for name, parameter in module.named_parameters()}
    others = {name: vector.clone() for name, vector in vectors.items()}
    for take in (True, True, True, False):
        with expanded_weights(module, (X, Y), quantities=("dot",)) as capture:
            if take:
                capture.take_dots(vectors)
            F.mse_loss(module(X), Y).backward()
        record = capture.record
        record.dot(vectors)
        assert inputs[-1].expired() == take
        if take:
            with pytest.raises(OptionError, match="dots were not asked for; pass quantities="):
                record.dot(others)
            with pytest.raises(
                OptionError, match=r"norms were not asked for; pass quantities=\('sq_norm', 'sq_norm'\)"
            ):
                record.norms()
    close(record.dot(others), record.dot(vectors))


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        (
            [0],
            "samples=[0] is not allowed: samples must be None or an int64 tensor (m,) of places in the batch, m >= 1",
        ),
        (
            torch.zeros(2),
            "samples=a tensor of shape (2,) and dtype torch.float32 is not allowed: samples must be None or an int64",
        ),
        (torch.zeros(0, dtype=torch.int64), "samples=a tensor of shape (0,) and dtype torch.int64 is not allowed"),
        (torch.tensor([0, 4]), "samples=[0, 4] is not allowed: samples must be places from 0 to 3"),
    ],
)
def test_samples_that_are_not_allowed(samples: Any, text: str) -> None:
    with pytest.raises(OptionError, match=re.escape(text)):
        expanded_weights(nn.Linear(3, 2), (X, Y), samples=samples)


def test_samples_need_gradients_that_are_not_fused() -> None:
    text = "samples and fuse_weight_grad=True do not go together: the weight's gradient needs all"
    with pytest.raises(OptionError, match=text):
        expanded_weights(nn.Linear(3, 2), (X, Y), samples=torch.tensor([0]), fuse_weight_grad=True)


def test_what_a_reader_does_to_its_norms_is_not_seen_by_the_next():
    record = PerSampleRecord(2, {"weight": torch.tensor([9.0, 16.0]), "bias": torch.tensor([16.0, 0.0])}, 1.0)
    record.norms().zero_()
    assert record.norms().tolist() == [5.0, 4.0]
