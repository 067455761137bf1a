"""A fault of this package in a fit costs values, which is said once; the training is that without the callbacks."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, default_collate

from lightning_persample import PerSampleGradientMonitor, PerSampleGradientWriter
from lightning_persample.callbacks import (
    _gradient_origins,
    _learning_rates,
    _ledger_rows,
    _logged_values,
    _logger_media,
    _manual_step,
    _mean_gradient,
    _observed_step,
    _reports,
    _row_order,
    _sample_choice,
    _sample_index,
    _statistics,
    _step_norms,
    _strategies,
    _sum_check,
    _tagged_loader,
    _training_step,
    _window,
    _worst_samples,
    base,
    monitor,
)
from lightning_persample.engine import coverage, dispatch, fast_path, kinds, layout, marks, mode, observing, reporting
from lightning_persample.engine.record import PerSampleRecord
from lightning_persample.errors import PerSampleWarning
from lightning_persample.influence import _parts, ledger
from tests.callbacks.runs import Classifier as Plain
from tests.callbacks.runs import Recorder, fit, make_trainer
from tests.callbacks.ways import Classifier, Manual, traces
from tests.own_faults import broken, called, interrupted, name_of

AUTOMATIC: list[Callable[..., Any]] = [
    _learning_rates.LearningRates._now,
    _ledger_rows.CapturedRows.__len__,
    _ledger_rows.checked_types,
    _ledger_rows.columns_of,
    _ledger_rows.table_of,
    _logged_values.log_metrics,
    _mean_gradient.MeanGradient.after_backward,
    _mean_gradient.MeanGradient.before_backward,
    _mean_gradient.MeanGradient.numbers,
    _observed_step.ObservedStep.__init__,
    _observed_step.ObservedStep.attach,
    _observed_step.ObservedStep.start_backward,
    _observed_step.ObservedStep.why_sums_differ,
    _reports.Reports.deliver,
    _row_order.RowOrder.start,
    _row_order.RowOrder.why_lost,
    _sample_choice.SampleChoice.of_batch,
    _sample_index.BatchIndices.attach,
    _sample_index.BatchIndices._of_current_batch,
    _statistics.Statistics.of_step,
    _statistics.Statistics.of_epoch,
    _step_norms.StepNorms.of_window.__func__,
    _strategies.why_strategy_is_unsupported,
    _sum_check.SumCheck._keep_scale,
    _sum_check.SumCheck.finish,
    _tagged_loader._plain,
    _tagged_loader.is_followed,
    _tagged_loader.places_of_rows,
    _training_step.SharedCapture._deliver,
    _training_step.SharedCapture._open,
    _training_step.SharedCapture._run_once,
    _training_step.SharedCapture.install,
    _training_step.is_logging_step,
    _window.Window.add,
    _window.captured,
    _worst_samples.SampleNorms.add,
    _worst_samples.SampleNorms.settle,
    _worst_samples.SampleNorms.worst,
    _worst_samples.write_worst_samples,
    _logger_media.save_table,
    base.PerSampleCallback._key_by_settings,
    base.PerSampleCallback._settings,
    monitor.PerSampleGradientMonitor._let_go,
    coverage.classify,
    dispatch.Dispatcher._note,
    kinds.kind_of,
    ledger.check_ledger,
    ledger.open_ledger,
    layout.layout_of,
    marks.Marks.of_operand,
    mode.Capture.attach_loss,
    mode.Capture.close,
    mode.Capture._finish,
    _parts.Parts.add,
    _parts.Parts.write,
    PerSampleRecord.norms,
    reporting.Report.note_gradient,
]
MANUAL: list[Callable[..., Any]] = [
    _gradient_origins.GradientOrigins.look,
    _manual_step.ManualStep.__init__,
    _manual_step.ManualStep._after,
    _manual_step.ManualStep._before,
    _manual_step.ManualStep._stepped,
    _manual_step.ManualStep._stepping,
    _manual_step.ManualStep.manual_backward,
    _training_step.SharedCapture._optimized_manually,
    _training_step.SharedCapture._run_manual_backward,
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
    plain, _, _ = trained(kind, [], tmp_path / "plain")
    layout._PLANS.clear()
    kinds._KINDS.clear()
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
    "callbacks._observed_method.ObservedMethod.",
    "callbacks._sample_index._following.<locals>.",
    "callbacks._sample_index.BatchIndices._let_go",
    "callbacks._sample_index.BatchIndices.uninstall",
    "callbacks._tagged_loader.TaggedLoader.__",
    "callbacks._tagged_loader._KeyedCollate.__call__",
    "callbacks._tagged_loader._KeyedDataset.__",
    "callbacks._tagged_loader._Tagged.__init__",
    "callbacks._tagged_loader._untagging.<locals>.",
    "callbacks._tagged_loader.note_failures",
    "callbacks._training_step.SharedCapture._rests",
    "callbacks._training_step.SharedCapture.uninstall",
    "callbacks.base.PerSampleCallback._end_capture",
    "callbacks.base.PerSampleCallback.state_key",
    "callbacks.base._guarded.<locals>.run",
    "callbacks.base._with_capture.<locals>.both",
)


def sweep(kind: type, tmp_path: Any, every: int, calls: int | None) -> None:
    """Break one function after the other, always or at one call, counted from the last where negative."""
    plain, _, _ = trained(kind, [], tmp_path / "plain")
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
    assert traces(module) == traces_of_a_fit(kind, tmp_path)
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
    return modes, torch.overrides.has_torch_function, torch.autograd.backward, torch._C._is_torch_function_enabled()


@functools.cache
def traces_of_a_fit(kind: type, tmp_path: Any) -> Any:
    return traces(trained(kind, [], tmp_path / "plain")[0])


INTERRUPTED: list[tuple[Callable[..., Any], int]] = [
    (TorchFunctionMode.__enter__, 1),
    (TorchFunctionMode.__exit__, 1),
    (TorchFunctionMode.__exit__, 2),
    (fast_path._WhileAnyIsInside._enter, 1),
    (fast_path._WhileAnyIsInside._leave, 1),
    (fast_path._WhileAnyIsInside._leave, 4),
    (fast_path._not_counted.__wrapped__, 2),  # type: ignore[attr-defined]
    (observing.ObservingMode.active.__wrapped__, 2),  # type: ignore[attr-defined]
    (mode.Capture.close, 1),
    (mode.Capture._after, 2),
    (_training_step.SharedCapture.uninstall, 1),
    (_observed_step.ObservedStep.attach, 2),
    (_tagged_loader.TaggedLoader.__iter__, 1),
    (base.PerSampleCallback._end_capture, 2),
]


@pytest.fixture
def unseeded_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning itself gives every loader a `worker_init_fn` after ``seed_everything(..., workers=True)``."""
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)


@pytest.mark.usefixtures("unseeded_workers")
@pytest.mark.parametrize(
    ("function", "call"), INTERRUPTED, ids=[f"{each.__qualname__}-{call}" for each, call in INTERRUPTED]
)
def test_an_interrupt_leaves_nothing(function: Callable[..., Any], call: int, tmp_path: Any) -> None:
    assert interrupted_fit(Classifier, function.__code__, call, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("unseeded_workers")
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
