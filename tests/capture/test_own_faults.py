"""A fault of this package costs values, which is said; the user's step goes on as if nothing had observed it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_persample import (
    PerSampleWarning,
    UnsupportedError,
    call_for_per_sample_grads,
    expanded_weights,
    torch_internals,
)
from lightning_persample.batch_axis import batch, follow, observed
from lightning_persample.capture import (
    annotations,
    collector,
    contributions,
    dispatch,
    failure,
    graph,
    mode,
    observing,
    parameters,
    plan,
    pull_back,
    record,
    values,
)
from lightning_persample.capture.failure import FAULT
from lightning_persample.gradients import Outer
from tests.own_faults import broken, called, interrupted, name_of

B = 4
ASKED = torch.overrides.has_torch_function
OFFERED = torch.overrides.handle_torch_function


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.conv, self.norm = nn.Conv1d(1, 2, 3), nn.LayerNorm(8)
        self.mix = nn.Parameter(torch.randn(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.conv(self.first(x).relu()[:, None]).flatten(1))
        return self.last(hidden @ (2 * self.mix))


FUNCTIONS: list[Callable[..., Any]] = [
    batch.lay_out,
    pull_back._keep_structure,
    contributions.ByRule.__call__,
    contributions.placement_of,
    collector.Collector.collect,
    collector.Collector.contribute,
    record.classify,
    observing.decomposed_backward,
    observing.is_composite,
    mode.Capture._see_calls,
    collector.WatchedNodes.__init__,
    plan.derive,
    dispatch.Dispatcher._note,
    dispatch.Dispatcher._with_batch,
    dispatch.Dispatcher.check_reduction,
    dispatch.Dispatcher.find_unseen,
    dispatch.Dispatcher.start_backward,
    follow.follow,
    graph.boundary,
    graph.edges_between,
    annotations.in_parts,
    annotations.kind_of,
    plan.TorchCall.__init__,
    annotations.Marks.get,
    annotations.Marks.of_operand,
    annotations.Marks.set_result,
    torch_internals.parameters_and_buffers,
    collector.Notes.reached,
    observed.user_place,
    record.OwnScale.own,
    parameters.WatchedParameters._note,
    parameters.WatchedParameters.watch,
    plan.Report.__init__,
    plan.Report.attach,
    plan.Report.contribute,
    contributions.Use.__init__,
    plan.attach,
    values.read_values,
    collector.WatchedNodes.below,
    collector.WatchedNodes._read_calls,
    collector.WatchedNodes.watch_inside,
    pull_back.settle,
    pull_back.pull_back,
]


def step(module: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    loss = F.cross_entropy(module(x), y)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in module.named_parameters() if p.grad is not None}}


def observed_step(function: Callable[..., Any], kind: str, quantities: tuple[str, ...]) -> tuple[Any, ...]:
    torch.manual_seed(0)
    module, x, y = Network(), torch.randn(B, 5), torch.tensor([0, 2, 1, 1])
    plain = step(module, x, y)
    module.zero_grad()
    plan.PLANS.clear()
    annotations.KINDS.clear()
    with broken(function, kind), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PerSampleWarning)
        with expanded_weights(module, (x, y), quantities=quantities) as capture:
            found = step(module, x, y)
        record = capture.record
    assert plain.keys() == found.keys()
    for name, value in plain.items():
        assert torch.equal(value, found[name]), name
    assert not any(p._backward_hooks for p in module.parameters())
    assert torch.overrides._get_current_function_mode_stack() == []
    assert torch.overrides.has_torch_function is ASKED
    return record, [str(each.message) for each in caught if each.category is PerSampleWarning]


def test_a_fault_while_torch_is_prepared_leaves_it_as_it_was() -> None:
    observing._without_observers.cache_clear()
    observing._stand_ins.cache_clear()
    record, said = observed_step(observing._without_observers.__wrapped__, "RuntimeError", ("sq_norm",))
    assert record.coverage < 1
    assert len(said) == 1


@pytest.mark.parametrize("kind", ["RuntimeError", "OSError", "StopIteration"])
@pytest.mark.parametrize(
    "function", FUNCTIONS, ids=lambda each: f"{each.__module__.split('.')[-1]}-{each.__qualname__}"
)
def test_a_fault_costs_values_and_is_said_once(function: Callable[..., Any], kind: str) -> None:
    record, said = observed_step(function, kind, ("sq_norm", "grad_sample"))
    assert len(said) == 1
    assert f"failed with {kind}: broken inside; this is a fault of lightning_persample (" in said[0]
    assert "please report it" in said[0]
    assert record.unsupported
    assert record.coverage < 1


def broken_program(given: Sequence[Tensor]) -> None:
    """In the place of what was recorded of kernels."""
    raise RuntimeError("broken inside")


@pytest.mark.parametrize(
    "function",
    [
        plan.LossPlan.holds,
        plan.Plan.apply,
        plan.PlannedReport.__init__,
        broken_program,
        collector.Collector.takes_at_once,
    ],
)
def test_a_fault_in_a_warm_step_costs_values_and_is_said_once(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs a second time only: here, the third."""
    plan.PLANS.clear()
    torch.manual_seed(0)
    module, x, y = Network(), torch.randn(B, 5), torch.tensor([0, 2, 1, 1])
    plain = step(module, x, y)
    for fault in (None, None, function):
        module.zero_grad()
        if fault is broken_program:
            programs = [one for each in plan.PLANS.values() if each.slots for one in each.slots.programs.values()]
            assert programs
            for each in programs:
                monkeypatch.setattr(each, "run", broken_program)
        broken_too = broken(fault) if fault not in (None, broken_program) else nullcontext()
        with warnings.catch_warnings(record=True) as caught, broken_too:
            warnings.simplefilter("always", PerSampleWarning)
            with expanded_weights(module, (x, y)) as capture:
                found = step(module, x, y)
        assert all(torch.equal(value, found[name]) for name, value in plain.items())
        assert (capture.record.coverage < 1) == (len(caught) == 1) == (fault is not None)
    assert "broken inside; this is a fault of lightning_persample (" in str(caught[0].message)


@pytest.mark.parametrize(
    "function", [plan.TorchCall.__init__, plan.Report.attach, values.read_values, annotations.kind_of]
)
def test_values_are_absent_and_not_wrong(function: Callable[..., Any]) -> None:
    record, _ = observed_step(function, "KeyError", ("sq_norm",))
    assert record.coverage == 0
    assert record.norms().isnan().all()
    assert set(record.unsupported) == {name for name, _ in Network().named_parameters()}


@pytest.mark.parametrize("function", [dispatch.Dispatcher.fail_at, failure.fault_of])
def test_a_fault_in_the_note_of_a_fault_ends_the_capture_and_no_training(function: Callable[..., Any]) -> None:
    with broken(function):
        record, said = observed_step(plan.TorchCall.__init__, "KeyError", ("sq_norm",))
    assert len(said) == 1
    assert FAULT in said[0]
    assert record.coverage == 0


def test_a_fault_is_an_error_where_the_user_asked_for_it() -> None:
    module, x = Network(), torch.randn(B, 5)
    text = r"following `linear` at test_own_faults\.py:\d+ failed with RuntimeError: broken inside; this is a fault of"
    with (
        broken(plan.TorchCall.__init__),
        pytest.raises(UnsupportedError, match=text),
        expanded_weights(module, (x,), unsupported="error"),
    ):
        module(x).sum(1).mean().backward()


def test_a_fault_in_a_hook_names_its_weights_alone() -> None:
    module, x = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4)), torch.randn(B, 5)
    with (
        broken(Outer.__post_init__),
        pytest.warns(PerSampleWarning, match=r"`0\.weight`, `0\.bias`: `linear` on"),
        expanded_weights(module, (x,), quantities=("grad_sample",)) as capture,
    ):
        module(x).square().sum(1).mean().backward()
    assert set(capture.record.names) == {"1.weight", "1.bias"}


def test_a_fault_leaves_the_tensor_form_without_values_and_says_so() -> None:
    module, x = Network(), torch.randn(B, 5)
    with broken(annotations.Marks.of_operand):
        out = call_for_per_sample_grads(module, loss_reduction="sum")(x)
    assert torch.equal(out, module(x))
    with pytest.raises(UnsupportedError, match="this is a fault of lightning_persample"):
        out.sum().backward()


CALLS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "shapes": lambda m, x: m.first(x[:, :3]),
    "composite": lambda m, x: F.cross_entropy(x, torch.zeros(3, dtype=torch.long)),
    "pointwise": lambda m, x: x + torch.randn(7),
    "constants": lambda m, x: torch.ones(2) + torch.ones(3),
    "index": lambda m, x: x[:, 9],
    "backward": lambda m, x: m.first(x).backward(),
    "gradient": lambda m, x: torch.autograd.grad(m.first(x).sum(), torch.ones(1, requires_grad=True)),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_torch_raises_for_the_users_call_is_what_the_user_sees(name: str) -> None:
    module, x = Network(), torch.randn(B, 5)
    kinds_of_error = (RuntimeError, IndexError, ValueError)
    with pytest.raises(kinds_of_error) as plain:
        CALLS[name](module, x)
    with pytest.raises(kinds_of_error) as seen, expanded_weights(module, (x,)):
        CALLS[name](module, x)
    assert type(seen.value) is type(plain.value)
    assert str(seen.value) == str(plain.value)


def test_an_op_of_the_users_that_raises_runs_once() -> None:
    runs = []

    @torch.overrides.wrap_torch_function(lambda x: (x,))
    def own(x: Tensor) -> Tensor:
        runs.append(x)
        raise KeyError("mine")

    module, x = Network(), torch.randn(B, 5)
    with pytest.raises(KeyError, match="mine"), expanded_weights(module, (x,)) as capture:
        own(module.first(x))
    assert len(runs) == 1
    assert not capture._why_at_fault()


def test_an_op_of_the_users_runs_once_where_this_package_fails() -> None:
    runs = []

    @torch.overrides.wrap_torch_function(lambda x: (x,))
    def own(x: Tensor) -> Tensor:
        runs.append(x)
        return x.square()

    module, x = Network(), torch.randn(B, 5)
    for function in (annotations.Marks.of_operand, dispatch.Dispatcher._note, observed.version_of):
        runs.clear()
        with broken(function), pytest.warns(PerSampleWarning), expanded_weights(module, (x,)):
            own(module.first(x)).sum(1).mean().backward()
        assert len(runs) == 1


class Larger(Network):
    """Calls of many kinds: recurrent, attention, a checkpoint, picked rows, writes in place, views of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gru = nn.Embedding(7, 6), nn.GRU(6, 6, batch_first=True)
        self.attention, self.batch_norm = nn.MultiheadAttention(6, 2, batch_first=True), nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.conv(self.first(x).relu()[:, None]).flatten(1)) @ (2 * self.mix)
        words, _ = self.gru(self.words((x[:, :3] > 0).long()))
        words, _ = self.attention(words, words, words)
        scale = torch.zeros(6)
        scale[:3] = self.scale[:3]
        inner = hidden + words.mean(1) * scale
        hidden = checkpoint(lambda h: F.dropout(self.batch_norm(h).tanh(), 0.5), inner, use_reentrant=False)
        hidden = torch.stack([hidden[place] for place in range(len(hidden))])[x[:, 0].argsort()].clone()
        hidden[:, 0] += 1
        return (
            self.last(hidden)
            + F.pixel_shuffle(hidden[:, :, None, None].expand(-1, -1, 2, 2)[:, :4], 2).sum((1, 2))[:, :3]
        )


# What runs the user's own calls and holds nothing else that could fail, what a user calls and what ends a capture.
BOUNDARY = {
    "capture.observing._backward_in_the_open.<locals>.run",
    "capture.observing._backward_of_torch",
    "capture.observing.decomposed_backward.<locals>.run",
    "capture.dispatch.Dispatcher.call",
    "capture.plan.PlannedReport.contribute",
    "capture.observing.ObservingMode.__enter__",
    "capture.observing.ObservingMode.__exit__",
    "capture.observing.ObservingMode.__init__",
    "capture.observing.ObservingMode.__torch_function__",
    "capture.observing.ObservingMode.release",
    "capture.observing.ObservingMode.stop",
    "capture.observing._offered_at_once.<locals>.handle_torch_function",
    "capture.parameters.WatchedParameters.close",
    "capture.record.warn_user",
    "capture.mode.expanded_weights",
    "capture.record._NotAsked.__init__",
    *(
        f"capture.mode.Capture.{name}"
        for name in (
            "__init__", "__enter__", "__exit__", "_backward", "_check_weighting", "_follow", "_why_at_fault", "call",
            "close", "observe", "record",
        )
    ),
}  # fmt: skip
# What puts torch back is called twice: it may fail once, and not for good.
MAY_FAIL_ONCE = {
    f"capture.observing.{name}"
    for name in ("_WhileAnyIsInside.leave", "_counted", "ObservingMode._leave", "ObservingMode.leave_stack")
}
OPTIONS: dict[str, dict[str, Any]] = {
    "norms": {},
    "all": {"quantities": ("sq_norm", "grad_sample", "square_sum", "dot", "projection"), "max_memory": 1000},
    "some": {"samples": torch.tensor([0, 2]), "quantities": ("square_sum",)},
}


def larger_step(options: dict[str, Any] | None) -> tuple[nn.Module, dict[str, Tensor], Any, list[str]]:
    torch.manual_seed(0)
    module, x, y = Larger(), torch.randn(B, 5), torch.tensor([0, 2, 1, 1])
    plan.PLANS.clear()
    annotations.KINDS.clear()
    if options is None:
        return module, step(module, x, y), None, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PerSampleWarning)
        with expanded_weights(module, (x, y), **options) as capture:
            found = step(module, x, y)
        return module, found, capture.record, [str(each.message) for each in caught]


def is_clean(module: nn.Module) -> bool:
    hooks = [p._backward_hooks or p._post_accumulate_grad_hooks for p in module.parameters()]
    is_torch_its_own = torch.overrides.has_torch_function is ASKED and "set_" not in vars(Tensor)
    is_torch_its_own &= F.handle_torch_function is torch._tensor.handle_torch_function is OFFERED
    return not any(hooks) and torch.overrides._get_current_function_mode_stack() == [] and is_torch_its_own


def sweep(options: dict[str, Any], every: int, calls: int | None) -> None:
    """Break one function after the other, always or at one call, counted from the last where negative."""
    _, plain, _, _ = larger_step(None)
    *_, known, usual = larger_step(options)
    left_out = BOUNDARY | MAY_FAIL_ONCE if calls is None else BOUNDARY
    codes = [
        (code, count)
        for code, count in called(lambda: larger_step(options)).items()
        if name_of(code) not in left_out and not name_of(code).startswith(("capture.failure.", "errors.", "options."))
    ]
    assert len(codes) > 200
    wrong = {}
    for code, count in sorted(codes, key=lambda each: name_of(each[0]))[::every]:
        fault = broken(code) if calls is None else interrupted(code, calls if calls > 0 else count, RuntimeError)
        try:
            with fault:
                module, found, record, said = larger_step(options)
        except Exception as error:
            wrong[name_of(code)] = repr(error)
            continue
        faults = [text for text in said if FAULT in text]
        same_step = plain.keys() == found.keys() and all(torch.equal(value, found[key]) for key, value in plain.items())
        # What is not said to be missing is there.
        complete = said == usual and record.names == known.names and torch.equal(record.norms(), known.norms())
        if not (same_step and is_clean(module) and (len(faults) == 1 or complete)):
            wrong[name_of(code)] = f"{same_step=} {is_clean(module)=} {said=} {record.names=}"
    assert wrong == {}


def test_a_fault_of_a_fused_call_leaves_the_call_to_run_as_it_is_written() -> None:
    options = {"fuse_weight_grad": True, "quantities": ("grad_sample",)}
    _, plain, _, _ = larger_step(None)
    names = {"capture.plan.run_fused", "capture.fused.FusedForm.run", "capture.fused._Fused.forward"}
    codes = [code for code in called(lambda: larger_step(options)) if name_of(code) in names]
    assert len(codes) == len(names)
    for code in codes:
        with broken(code):
            module, found, _, said = larger_step(options)
        assert plain.keys() == found.keys()
        assert all(torch.equal(value, found[key]) for key, value in plain.items())
        assert is_clean(module)
        assert any(FAULT in text for text in said)


def test_a_fault_in_some_of_all_functions_leaves_the_step_as_it_is() -> None:
    sweep(OPTIONS["norms"], every=9, calls=None)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("calls", [None, 1, -1], ids=["always", "first", "last"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_fault_in_any_function_leaves_the_step_as_it_is(name: str, calls: int | None) -> None:
    sweep(OPTIONS[name], every=1, calls=calls)
