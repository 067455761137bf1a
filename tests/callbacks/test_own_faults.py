"""A fault of this package in a fit costs values, which is said once; the training is that without the callbacks."""

from __future__ import annotations

import functools
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, default_collate

from lightning_persample import PerSampleGradientMonitor, PerSampleGradientWriter, expanded_weights
from lightning_persample.callbacks import (
    base,
    lightning_internals,
    loggers,
    manual,
    monitor,
    observed_step,
    rows,
    sample_index,
    session,
    statistics,
    worst,
)
from lightning_persample.capture import annotations, dispatch, mode, observing, plan, record
from lightning_persample.capture.failure import run_all
from lightning_persample.capture.record import PerSampleRecord
from lightning_persample.errors import PerSampleWarning
from lightning_persample.influence import dataset
from tests.callbacks.runs import Classifier as Plain
from tests.callbacks.runs import Recorder, fit, make_trainer
from tests.callbacks.ways import Classifier, Manual, traces
from tests.own_faults import broken, called, interrupted, name_of

AUTOMATIC: list[Callable[..., Any]] = [
    rows.LearningRates._now,
    rows.CapturedRows.__len__,
    rows.checked_types,
    rows.columns_of,
    rows.table_of,
    loggers.log_metrics,
    statistics.MeanGradient.after_backward,
    statistics.MeanGradient.before_backward,
    statistics.MeanGradient._look,
    observed_step.ObservedStep.__init__,
    observed_step.ObservedStep.attach,
    observed_step.ObservedStep.start_backward,
    observed_step.ObservedStep.why_sums_differ,
    observed_step.Reports.deliver,
    sample_index.RowOrder.start,
    sample_index.RowOrder.why_lost,
    observed_step.SampleChoice.of_batch,
    sample_index.BatchIndices.attach,
    sample_index.BatchIndices._of_current_batch,
    statistics.LoggedMetrics.of_step,
    statistics.LoggedMetrics.of_epoch,
    statistics.StepNorms.of_window.__func__,
    lightning_internals.why_unsupported,
    observed_step.SumCheck.finish,
    sample_index._plain,
    sample_index.is_followed,
    sample_index.places_of_rows,
    session.SharedCapture._deliver,
    session.SharedCapture._open,
    session.SharedCapture._run_once,
    session.SharedCapture.install,
    session.is_logging_step,
    statistics.Window.add,
    statistics.CapturedBatch.of.__func__,
    worst.SampleNorms.add,
    worst.SampleNorms.settle,
    worst.SampleNorms.worst,
    worst.write_worst_samples,
    loggers.save_table,
    base.PerSampleCallback._training_view,
    base.PerSampleCallback._key_by_settings,
    base.PerSampleCallback._settings,
    monitor.PerSampleGradientMonitor._let_go,
    record.classify,
    dispatch.Dispatcher._note,
    annotations.kind_of,
    dataset.Dataset.check,
    dataset.Dataset.open,
    plan.TorchCall.__init__,
    annotations.Marks.set_result,
    mode.Capture.attach_loss,
    mode.Capture.close,
    mode.Capture._finish,
    dataset.PartWriter.wait,
    dataset.PartWriter.write,
    PerSampleRecord.norms,
    plan.Report.contribute,
]
MANUAL: list[Callable[..., Any]] = [
    manual.GradientOrigins.look,
    manual.ManualStep.__init__,
    manual.ManualStep._after,
    manual.ManualStep._before,
    manual.ManualStep._stepped,
    manual.ManualStep._stepping,
    manual.ManualStep.manual_backward,
    session.SharedCapture._optimized_manually,
    session.SharedCapture._run_manual_backward,
    mode.Capture._start_backward,
]


def trained(kind: type, callbacks: list[Any], tmp_path: Any) -> tuple[Any, Any, list[str]]:
    torch.manual_seed(0)
    module = kind(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PerSampleWarning)
        trainer = make_trainer(callbacks, tmp_path, max_epochs=2)
        data = module.train_dataloader()
        trainer.fit(module, DataLoader(data.dataset, data.batch_size, collate_fn=lambda rows: default_collate(rows)))
    return module, trainer, [str(each.message) for each in caught if each.category is PerSampleWarning]


@functools.cache
def without_us(kind: type) -> Any:
    """A module that was trained without any callback."""
    with tempfile.TemporaryDirectory() as folder:
        return trained(kind, [], Path(folder))[0]


def all_of_ours(tmp_path: Any) -> list[Any]:
    statistics = ("noise_scale", "diversity", "cosine_to_mean", "signal_to_noise")
    monitor = PerSampleGradientMonitor(1, per_layer=1, statistics=statistics, worst_samples=2)
    writer = PerSampleGradientWriter(tmp_path / "ledger", flush_every=2)
    return [monitor, Recorder(1, quantities=("sq_norm", "grad_sample")), writer]


CASES = [(Classifier, each) for each in AUTOMATIC] + [(Manual, each) for each in MANUAL]


@pytest.mark.parametrize(
    ("kind", "function"), CASES, ids=[f"{f.__module__.split('.')[-1]}-{f.__qualname__}" for _, f in CASES]
)
def test_a_fault_is_said_once_and_the_training_is_that_without_us(
    kind: type, function: Callable[..., Any], tmp_path: Any
) -> None:
    plain = without_us(kind)
    plan.PLANS.clear()
    annotations.KINDS.clear()
    with broken(function, "KeyError"):
        module, trainer, said = trained(kind, all_of_ours(tmp_path), tmp_path / "watched")
    for name, value in plain.state_dict().items():
        assert torch.equal(value, module.state_dict()[name]), name
    assert len(said) == 1, said
    assert "KeyError: 'broken inside'; this is a fault of lightning_persample (" in said[0]
    assert said[0].endswith("please report it") or "; pass sample_index=" in said[0] or "\n" in said[0]
    if function is not mode.Capture.close:  # which removes the hooks
        assert traces(module) == traces(plain)
    assert type(trainer.fit_loop._combined_loader).__name__ == "CombinedLoader"
    assert "_load_combined_loader_states" not in vars(trainer.fit_loop)
    assert torch.overrides._get_current_function_mode_stack() == []


# What runs the user's own code and holds nothing else that could fail, and what puts things back at the end.
BOUNDARY = (
    "callbacks.lightning_internals.ObservedMethod.",
    "callbacks.sample_index._following.<locals>.",
    "callbacks.sample_index.BatchIndices._let_go",
    "callbacks.sample_index.BatchIndices.uninstall",
    "callbacks.sample_index.TaggedLoader.__",
    "callbacks.sample_index._KeyedCollate.__call__",
    "callbacks.sample_index._KeyedDataset.__",
    "callbacks.sample_index._Tagged.__init__",
    "callbacks.sample_index._untagging.<locals>.",
    "callbacks.sample_index.note_failures",
    "callbacks.session.Rest.goes_on",
    "callbacks.session.SharedCapture.uninstall",
    "callbacks.base.PerSampleCallback._end_capture",
    "callbacks.base.PerSampleCallback.state_key",
    "callbacks.base._guarded.<locals>.run",
    "callbacks.base._with_capture.<locals>.both",
)


def sweep(kind: type, tmp_path: Any, every: int, calls: int | None) -> None:
    """Break one function after the other, always or at one call, counted from the last where negative."""
    plain = without_us(kind)
    callbacks = all_of_ours(tmp_path)
    codes = {
        code: count
        for code, count in called(lambda: trained(kind, callbacks, tmp_path / "called")).items()
        if name_of(code).startswith(("callbacks.", "influence.")) and not name_of(code).startswith(BOUNDARY)
    }
    assert len(codes) > 150
    wrong = {}
    for place, code in enumerate(sorted(codes, key=name_of)[::every]):
        folder = tmp_path / str(place)
        folder.mkdir()
        callbacks = all_of_ours(folder)
        number = 1 if calls == 1 else codes[code]
        try:
            with broken(code) if calls is None else interrupted(code, number, RuntimeError):
                module, _, said = trained(kind, callbacks, folder / "watched")
        except Exception as error:
            wrong[name_of(code)] = repr(error)
            continue
        same = all(torch.equal(value, module.state_dict()[name]) for name, value in plain.state_dict().items())
        is_fault = len(said) == 1 and "this is a fault of lightning_persample" in said[0]
        if not (same and (is_fault or not said) and traces(module) == traces(plain)):
            wrong[name_of(code)] = f"{same=} {said=} {traces(module) == traces(plain)}"
    assert wrong == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of files that a fault leaves open
def test_a_fault_in_some_of_all_functions_leaves_the_training_as_it_is(tmp_path: Any) -> None:
    sweep(Classifier, tmp_path, every=25, calls=None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("calls", [None, 1, -1], ids=["always", "first", "last"])
@pytest.mark.parametrize("kind", [Classifier, Manual])
def test_a_fault_in_any_function_leaves_the_training_as_it_is(kind: type, calls: int | None, tmp_path: Any) -> None:
    sweep(kind, tmp_path, every=1, calls=calls)


def interrupted_fit(kind: type, function: types.CodeType, call: int, tmp_path: Any) -> bool:
    """Interrupt a fit at the n-th call of a function, and check that nothing is left; whether it was interrupted."""
    torch.manual_seed(0)
    module = kind(False)
    loader = module.train_dataloader()
    callbacks, of_loader, of_torch = all_of_ours(tmp_path), dict(vars(loader)), of_process()
    trainer = make_trainer(callbacks, tmp_path, max_epochs=1)
    was_interrupted = False
    try:
        with interrupted(function, call):
            trainer.fit(module, loader)
    except (SystemExit, KeyboardInterrupt, RuntimeError):  # (as Lightning ends where loaders have no iterators yet)
        was_interrupted = True
    assert traces(module) == traces(without_us(kind))
    assert not any(optimizer._optimizer_step_pre_hooks for optimizer in trainer.optimizers)
    assert type(trainer.fit_loop._combined_loader) in (CombinedLoader, type(None))
    assert "_load_combined_loader_states" not in vars(trainer.fit_loop)
    assert dict(vars(loader)) == of_loader
    assert of_process() == of_torch
    assert all(each._shared is each._indices is None for each in callbacks)
    assert not any(name.startswith("on_") for each in callbacks for name in vars(each))
    return was_interrupted


def of_process() -> tuple[Any, ...]:
    """What a capture changes for the whole process, and takes back."""
    modes = [type(each) for each in torch.overrides._get_current_function_mode_stack()]
    offers = torch.nn.functional.handle_torch_function, torch._tensor.handle_torch_function
    asked = torch.overrides.has_torch_function, torch.autograd.backward, torch._C._is_torch_function_enabled()
    return modes, offers, asked


INTERRUPTED: list[tuple[Callable[..., Any], int]] = [
    (observing.ObservingMode.__enter__, 1),
    (observing.ObservingMode.__exit__, 1),
    (observing._WhileAnyIsInside.enter, 1),
    (observing._WhileAnyIsInside.leave, 1),
    (observing._WhileAnyIsInside.leave, 4),
    (observing._not_counted, 1),
    (observing._counted, 1),
    (observing.ObservingMode.start, 1),
    (observing.ObservingMode._leave, 1),
    (mode.Capture.close, 1),
    (mode.Capture._after, 2),
    (session.SharedCapture.uninstall, 1),
    (observed_step.ObservedStep.attach, 2),
    (sample_index.TaggedLoader.__iter__, 1),
    (base.PerSampleCallback._end_capture, 2),
]


@pytest.mark.parametrize(
    ("function", "call"), INTERRUPTED, ids=[f"{each.__qualname__}-{call}" for each, call in INTERRUPTED]
)
def test_an_interrupt_leaves_nothing(function: Callable[..., Any], call: int, tmp_path: Any) -> None:
    assert interrupted_fit(Classifier, function.__code__, call, tmp_path)


def active() -> Any:
    return observing.ObservingMode(lambda function, args, kwargs: function(*args, **kwargs)).active()


def observed() -> Any:
    return observing.ObservingMode(lambda function, args, kwargs: function(*args, **kwargs)).observing()


def captured() -> Any:
    return expanded_weights(torch.nn.Linear(3, 2), (torch.ones(4, 3),))


@pytest.mark.parametrize(
    ("context", "function"),
    [
        (active, observing.ObservingMode.leave_stack),
        (observed, observing.ObservingMode._leave),
        (observed, observing.ObservingMode.leave_stack),
        (captured, run_all),
        (captured, observing.ObservingMode.stop),
        (captured, observing.ObservingMode._leave),
    ],
    ids=lambda each: each.__name__,
)
def test_an_interrupt_on_the_way_out_leaves_no_mode(context: Callable[[], Any], function: Callable[..., Any]) -> None:
    before = of_process()
    with pytest.raises(KeyboardInterrupt), interrupted(function.__code__, 1), context():
        pass
    assert of_process() == before


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of generators that are closed
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("kind", [Classifier, Manual])
def test_an_interrupt_in_any_function_leaves_nothing(kind: type, is_last: bool, tmp_path: Any) -> None:
    callbacks = all_of_ours(tmp_path)
    codes = called(lambda: trained(kind, callbacks, tmp_path / "called"))
    assert len(codes) > 400
    for place, code in enumerate(sorted(codes, key=name_of)[::2]):
        interrupted_fit(kind, code, codes[code] // 2 if is_last else 1, tmp_path / str(place))


def test_a_fault_in_the_search_for_the_callbacks_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(trainer: Any) -> None:
        raise ValueError("mistaken")

    monkeypatch.setattr(base, "_per_sample_callbacks", fails)
    with pytest.warns(PerSampleWarning) as caught:
        fit(Plain(), [PerSampleGradientMonitor(), Recorder(), Recorder(2)])
    texts = [str(each.message) for each in caught if each.category is PerSampleWarning]
    assert len(texts) == 1, texts
    assert "gives nothing more in this fit: a hook of it failed with ValueError: mistaken" in texts[0]
