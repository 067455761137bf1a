"""Observing changes nothing: outputs, gradients, random numbers, buffers, hooks and memory are those of a plain run."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_persample import ExpandedWeight
from lightning_persample.capture.mode import expanded_weights
from lightning_persample.reference.loops import loop_per_sample_grads
from tests.capture import recurrent_cases, twice_cases  # noqa: F401  (add to CASES)
from tests.capture.model_cases import CASES, mean_of_squares
from tests.in_turn import one_kind_each
from tests.models import MODELS

# torch says once that it has no oneDNN kernel for projections
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")


def _run(module: nn.Module, loss_fn: object, batch: tuple[Tensor, ...], observed: bool, options: dict) -> list[Tensor]:
    torch.manual_seed(3)
    if observed:
        with expanded_weights(module, batch, unsupported="ignore", **options):
            loss = loss_fn(module, *batch)
            loss.backward()
    else:
        loss = loss_fn(module, *batch)
        loss.backward()
    grads = [torch.zeros(()) if p.grad is None else p.grad.to_dense() for p in module.parameters()]
    return [loss.detach(), *grads, *module.buffers(), torch.get_rng_state()]


def _assert_same(module: nn.Module, loss_fn: object, batch: tuple[Tensor, ...], options: dict) -> None:
    plain, observed = copy.deepcopy(module), copy.deepcopy(module)
    copied = tuple(tensor.clone() for tensor in batch)
    expected = _run(plain, loss_fn, batch, False, options)
    found = _run(observed, loss_fn, copied, True, options)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(one, other) for one, other in zip(batch, copied, strict=True))


@pytest.mark.parametrize("name", one_kind_each(CASES))
def test_every_way_to_meet_the_batch(name: str) -> None:
    case = CASES[name]
    _assert_same(case.build().train(), case.loss, case.batch(5), case.options)


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    model = MODELS[name](dtype=torch.float32)
    _assert_same(model.module, model.loss_fn, model.make_batch(4), {})


def test_random_layers_draw_the_same_numbers() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.RReLU(), nn.Linear(8, 2))
    _assert_same(module, mean_of_squares, (torch.randn(5, 6),), {})


def test_recurrent_layers_without_a_rule_yet() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.LSTM(6, 4, dropout=0.5, num_layers=2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.recurrent(x)[0][:, -1]

    _assert_same(Last(), mean_of_squares, (torch.randn(5, 3, 6),), {})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_a_teacher_in_evaluation_mode_takes_the_same_path() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    teacher, student = nn.TransformerEncoder(layer, 2).eval(), nn.Linear(16, 16)
    batch, padded = torch.randn(5, 7, 16), torch.arange(7) >= torch.tensor([7, 6, 5, 4, 3])[:, None]

    def distil(observed: bool, mask: Tensor | None) -> Tensor:
        def targets() -> Tensor:
            with torch.no_grad():
                return teacher(batch, src_key_padding_mask=mask)

        if not observed:
            return targets()
        with expanded_weights(student, batch, unsupported="ignore") as capture:
            given = targets()
            (student(batch) - given).square().mean().backward()
        assert capture.record.coverage == 1.0
        return given

    for mask in (None, padded):
        assert torch.equal(distil(False, mask), distil(True, mask))
    assert torch.overrides.has_torch_function is torch._C._has_torch_function


def test_captures_that_overlap_in_two_threads_leave_the_process_as_it_was() -> None:
    module, batch = nn.Linear(6, 4), torch.randn(5, 6)
    asked, stance = torch.overrides.has_torch_function, torch._dynamo.eval_frame._stance
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def first() -> None:
        with expanded_weights(copy.deepcopy(module), batch):
            first_is_in.set()
            second_is_in.wait(60)
        first_is_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    first_is_in.wait(60)
    with expanded_weights(module, batch) as seen:
        second_is_in.set()
        first_is_out.wait(60)
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
        mean_of_squares(module, batch).backward()
    thread.join()
    assert seen.record.coverage == 1.0
    assert torch.overrides.has_torch_function is asked
    assert torch._dynamo.eval_frame._stance == stance


def test_double_backward_is_the_same() -> None:
    module, batch = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 6, requires_grad=True)

    def second_order(observed: bool) -> list[Tensor]:
        def slopes() -> Tensor:
            (slope,) = torch.autograd.grad(module(batch).sum(), batch, create_graph=True)
            return slope.square().sum()

        if observed:
            with expanded_weights(module, batch, unsupported="ignore"):
                return list(torch.autograd.grad(slopes(), list(module.parameters()), allow_unused=True))
        return list(torch.autograd.grad(slopes(), list(module.parameters()), allow_unused=True))

    for one, other in zip(second_order(False), second_order(True), strict=True):
        assert one is other is None or torch.equal(one, other)


def test_module_is_clean_afterwards() -> None:
    module, batch = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), torch.randn(5, 6)
    before = {name: dict(vars(part)) for name, part in module.named_modules()}
    with pytest.warns(match="Samples of a batch influence"), expanded_weights(module, batch):
        mean_of_squares(module, batch).backward()
    assert {name: dict(vars(part)) for name, part in module.named_modules()} == before
    for tensor in (*module.parameters(), *module.buffers(), batch):
        assert vars(tensor) == {}
        assert not tensor._backward_hooks


def test_hooks_are_removed_after_an_exception() -> None:
    module, batch = nn.Linear(6, 4), torch.randn(5, 6)

    def interrupted() -> None:
        with expanded_weights(module, batch):
            module(batch)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not module.weight._backward_hooks
    mean_of_squares(module, batch).backward()


def test_nothing_is_kept_alive() -> None:
    module, batch = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(5, 6)
    with expanded_weights(module, batch) as capture:
        hidden = module[0](batch)
        seen = weakref.ref(hidden)
        loss = mean_of_squares(module[1:], hidden)
        loss.backward()
    del hidden, loss
    gc.collect()
    assert seen() is None
    assert capture.record.norms().shape == (5,)


def test_nothing_is_left_to_the_garbage_collector() -> None:
    module = nn.Sequential(
        nn.Conv1d(1, 3, 3), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 4)
    )
    batch, target = torch.randn(5, 1, 6), torch.zeros(5, dtype=torch.int64)

    def step() -> None:
        with expanded_weights(module, [batch, (target,)], unsupported="error") as capture:
            torch.nn.functional.cross_entropy(module(batch), target).backward()
        assert capture.record.sq_norms["0.bias"].shape == capture.record.norms().shape == (5,)

    step()
    gc.collect()
    gc.disable()
    try:
        step()
        assert gc.collect() == 0
    finally:
        gc.enable()


def _of_lstm(module: nn.Module, batch: Tensor) -> tuple[Tensor, ...]:
    output, (hidden, cell) = module(batch)
    return output, hidden, cell


SEVERAL_OUTPUTS = {
    "lstm": (lambda: nn.LSTM(6, 4, batch_first=True), _of_lstm),
    "lstm, two layers both ways": (
        lambda: nn.LSTM(6, 4, num_layers=2, bidirectional=True, batch_first=True),
        _of_lstm,
    ),
    "lstm, step by step": (lambda: nn.LSTM(6, 4, batch_first=True, proj_size=2), _of_lstm),
    "lstm cell": (lambda: nn.LSTMCell(6, 4), lambda module, batch: module(batch[:, 0])),
    "gru": (lambda: nn.GRU(6, 4, batch_first=True), lambda module, batch: module(batch)),
    "rnn": (lambda: nn.RNN(6, 4, batch_first=True), lambda module, batch: module(batch)),
}


@pytest.mark.parametrize("with_backward", [True, False])
@pytest.mark.parametrize("name", SEVERAL_OUTPUTS)
def test_calls_with_several_outputs_leave_nothing(name: str, with_backward: bool) -> None:
    """Nothing grows from capture to capture, and the activations go without the garbage collector."""
    build, call = SEVERAL_OUTPUTS[name]
    module, batch = build(), torch.randn(5, 3, 6)

    def step() -> list[weakref.ref[Tensor]]:
        with expanded_weights(module, batch, unsupported="error") as capture:
            outputs = call(module, batch)
            seen = [weakref.ref(output) for output in outputs]
            storages = [StorageWeakRef(output.untyped_storage()) for output in outputs]
            if with_backward:
                sum(output.square().sum(-1).mean() for output in outputs).backward()
                assert capture.record.coverage == 1.0
        del outputs
        assert all(storage.expired() for storage in storages)
        return seen

    for _ in range(3):
        step()
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(10):
            assert all(output() is None for output in step())
        assert len(gc.get_objects()) - before < 10  # less than one for each capture
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("retain", [False, True])
def test_activations_are_let_go_when_autograd_lets_them_go(retain: bool) -> None:
    first, second, batch = nn.Linear(6, 8), nn.Linear(8, 4), torch.randn(5, 6, requires_grad=True)
    alive: list[bool] = []
    with expanded_weights(nn.ModuleList([first, second]), batch) as capture:
        hidden = first(batch).tanh()
        storage = StorageWeakRef(hidden.untyped_storage())
        loss = second(hidden * 1.0).square().mean()
        del hidden
        batch.register_hook(lambda _: alive.append(not storage.expired()))  # the last thing in the backward
        loss.backward(retain_graph=retain)
        if retain:
            loss.backward()
    assert alive == ([True, False] if retain else [False])
    assert [record.coverage for record in capture.records] == [1.0] * len(alive)
    assert all(torch.equal(record.norms(), capture.record.norms()) for record in capture.records)


def test_a_second_backward_through_a_freed_graph_is_refused() -> None:
    weight, batch = nn.Parameter(torch.randn(6)), torch.randn(5, 6)
    module = nn.ParameterList([weight])
    with expanded_weights(module, batch, unsupported="ignore") as capture:
        loss = (batch * weight).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            loss.backward()
    assert len(capture.records) == 1
    assert capture.record.coverage == 1.0


def test_a_second_backward_through_calls_that_saved_nothing_is_named() -> None:
    weight, batch = nn.Parameter(torch.randn(5, 6)), torch.randn(5, 6)
    with expanded_weights(nn.ParameterList([weight]), batch, unsupported="ignore") as capture:
        loss = torch.lerp(batch, weight, 0.5).sum()
        loss.backward()
        loss.backward()
    assert capture.records[0].coverage == 1.0
    assert "the first one was to free the graph; pass retain_graph=True" in capture.record.unsupported["0"]


def test_forwards_without_gradient_keep_nothing() -> None:
    module, batch = nn.Linear(6, 4), torch.randn(5, 6)
    with expanded_weights(module, batch) as capture, torch.no_grad():
        for _ in range(100):
            module(batch)
        weights = capture._dispatcher.weights
        assert [weight.uses for weight in weights] == [0, 0]
        assert len(capture._dispatcher.marks) == 3  # the batch and two parameters


def test_the_reference_loop_restores_buffers_and_random_numbers() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.InstanceNorm1d(3, track_running_stats=True))
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    state = torch.get_rng_state()
    losses, grads = loop_per_sample_grads(module, mean_of_squares, torch.randn(5, 3, 6))
    assert losses.shape == (5,)
    assert grads["0.weight"].shape == (5, 4, 6)
    assert not torch.equal(torch.get_rng_state(), state)  # drawn by torch.randn above
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, buffers[name])
    assert all(p.grad is None for p in module.parameters())


def test_no_warning_where_there_is_nothing_to_say() -> None:
    module, batch = nn.Linear(6, 4), torch.randn(5, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with expanded_weights(module, batch):
            mean_of_squares(module, batch).backward()


@pytest.mark.parametrize("retained", [False, True], ids=["one backward", "two backwards"])
@pytest.mark.parametrize("name", ["lstm", "lstm cell", "gru"])
def test_calls_with_several_outputs_leave_nothing_without_a_capture(name: str, retained: bool) -> None:
    """The same where nothing closes: a backward ends what it goes through."""
    build, call = SEVERAL_OUTPUTS[name]
    module, batch = build(), torch.randn(5, 3, 6)

    def step() -> None:
        weights = {key: ExpandedWeight(parameter, 5, "sum") for key, parameter in module.named_parameters()}
        outputs = call(lambda x: functional_call(module, weights, (x,)), batch)
        loss = sum(output.square().sum() for output in (outputs if isinstance(outputs, tuple) else (outputs,)))
        if retained:
            loss.backward(retain_graph=True)
        loss.backward()

    for _ in range(3):
        step()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(10):
        step()
    gc.collect()
    assert len(gc.get_objects()) - before < 10  # less than one for each
