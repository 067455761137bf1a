"""Faults of rules, other callbacks and the machine: a run goes on or ends as without us, and nothing is left."""

from __future__ import annotations

import dataclasses
import json
import os
import traceback
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lightning_persample
from lightning_persample import Outer, PerSampleGradientMonitor
from lightning_persample.callbacks import second_pass
from lightning_persample.capture import collector
from lightning_persample.errors import PerSampleWarning, UnsupportedError
from lightning_persample.gradients.cost import CPU_MEMORY_BUDGET, memory_budget
from lightning_persample.rules import registry
from tests.callbacks.runs import Recorder, column, fit, logged, make_trainer
from tests.callbacks.ways import BATCH, BATCHES, CLASSES, FEATURES, GAN, Classifier, Manual, Way, run, traces
from tests.in_turn import in_turn
from tests.processes import run_alone

PACKAGE = f"{Path(lightning_persample.__file__).parent}{os.sep}"
BOTH = ("sq_norm", "grad_sample")


class Unusual(Exception):
    pass


@pytest.fixture
def rule_of_linear(monkeypatch):
    """Replaces the rule of F.linear."""
    rule = registry.find_rule(F.linear)

    def replaced(function):
        def called(*args):
            return function(rule.function, *args)

        called.__module__, called.__qualname__ = "mine", "rule"
        monkeypatch.setitem(registry._RULES, rule.op, dataclasses.replace(rule, function=called))

    return replaced


def said_in(caught):
    return [str(each.message) for each in caught if each.category is PerSampleWarning]


def assert_same_training(kind, callbacks, tmp_path):
    """Train with and without the callbacks; gives the watched run and what was said."""
    way = Way(kind)
    plain = run(way, [], tmp_path / "plain", with_reference=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PerSampleWarning)
        watched = run(way, callbacks, tmp_path / "watched", with_reference=False)
    for name, value in plain.state.items():
        assert torch.equal(value, watched.state[name]), name
    assert plain.saved == watched.saved
    assert traces(plain.module) == traces(watched.module)
    return watched, said_in(caught)


@pytest.mark.parametrize(
    ("error", "kind"),
    in_turn([RuntimeError, AssertionError, OSError, StopIteration, Unusual], [Classifier, Manual, GAN]),
)
def test_a_rule_that_raises_is_named_and_training_goes_on(kind, error, rule_of_linear, tmp_path):
    def raising(rule, call, grad):
        raise error("broken")

    rule_of_linear(raising)
    recorder = Recorder(1, quantities=BOTH)
    _, said = assert_same_training(kind, [recorder, PerSampleGradientMonitor(1)], tmp_path)
    assert len(said) == (2 if kind is GAN else 1)
    assert f"its rule mine.rule failed with {error.__name__}: broken; check_rule shows in which calls" in said[0]
    assert {record.coverage for record in recorder.records} == {0.0}
    assert all(record.norms().isnan().all() for record in recorder.records)
    with pytest.raises(UnsupportedError, match=f"its rule mine.rule failed with {error.__name__}: broken"):
        fit(kind(False), [Recorder(1, unsupported="error")], data=kind(False).train_dataloader())


@torch.overrides.wrap_torch_function(lambda inputs, weight: (inputs, weight))
def needs_two(inputs, weight):
    if len(inputs) < 2:
        raise Unusual("one sample is not enough")
    return inputs @ weight.T


@torch.overrides.wrap_torch_function(lambda inputs, weight: (inputs, weight))
def no_functorch(inputs, weight):
    if torch._C._functorch.is_batchedtensor(inputs) or torch._C._functorch.is_gradtrackingtensor(weight):
        raise Unusual("not under functorch")
    return inputs @ weight.T


class OwnOp(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op
        self.first, self.last = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.last(self.op(x, self.first.weight))


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (needs_two, "the batch axis cannot be followed here: `needs_two` cannot be followed (Unusual on one sample"),
        (no_functorch, "running it on one sample alone raised Unusual"),
    ],
    ids=["in forward", "in backward"],
)
@pytest.mark.parametrize("kind", [Classifier, Manual])
def test_an_op_of_the_users_that_raises_on_one_sample_is_named(kind, op, text, tmp_path):
    recorder = Recorder(1)
    _, said = assert_same_training(lambda r: kind(r, lambda: OwnOp(op)), [recorder], tmp_path)
    assert len(said) == 1
    assert text in said[0]
    assert all("network.first.weight" in record.unsupported for record in recorder.records)


def test_an_interrupt_inside_a_rule_is_an_interrupt(rule_of_linear):
    def interrupted(rule, call, grad):
        raise KeyboardInterrupt

    rule_of_linear(interrupted)
    module = Classifier(False)
    before = traces(module)
    with pytest.raises(SystemExit):
        make_trainer([Recorder(1)]).fit(module)
    assert traces(module)[1:] == before[1:]


@pytest.mark.parametrize("kind", [Classifier, Manual])
def test_too_little_memory_for_a_kernel_gives_smaller_chunks(kind, rule_of_linear, tmp_path):
    budgets = []

    def needing_memory(rule, call, grad):
        budgets.append(memory_budget(torch.device("cpu")))
        if budgets[-1] > CPU_MEMORY_BUDGET // 4:
            raise torch.OutOfMemoryError("out of memory")
        return rule(call, grad)

    plain, recorder = Recorder(1, quantities=BOTH), Recorder(1, quantities=BOTH)
    run(Way(kind), [plain], tmp_path / "enough", with_reference=False)
    rule_of_linear(needing_memory)
    _, said = assert_same_training(kind, [recorder], tmp_path)
    assert said == []
    assert budgets[:3] == [CPU_MEMORY_BUDGET, CPU_MEMORY_BUDGET // 2, CPU_MEMORY_BUDGET // 4]
    assert memory_budget(torch.device("cpu")) == CPU_MEMORY_BUDGET
    for expected, found in zip(plain.records, recorder.records, strict=True):
        assert found.coverage == 1.0
        torch.testing.assert_close(found.norms(), expected.norms())


@pytest.mark.parametrize("where", ["rule", "sq_norm", "dense"])
@pytest.mark.parametrize("kind", [Classifier, Manual])
def test_too_little_memory_gives_up_the_step_and_training_goes_on(kind, where, rule_of_linear, monkeypatch, tmp_path):
    calls = []

    def out_of_memory(*args):
        calls.append(args)
        raise torch.OutOfMemoryError("out of memory")

    if where == "rule":
        rule_of_linear(out_of_memory)
    elif where == "sq_norm":
        monkeypatch.setattr(collector, "sq_norms", out_of_memory)
    else:
        monkeypatch.setattr(Outer, where, out_of_memory)
    recorder = Recorder(1, quantities=BOTH if where == "dense" else ("sq_norm",))
    _, said = assert_same_training(kind, [recorder, PerSampleGradientMonitor(1)], tmp_path)
    text = "there was not enough memory for its per-sample gradient, in kernels of 1/8 of their usual memory either"
    assert text in said[0]
    assert all("of all that got a gradient (see coverage)" in each for each in said[1:])  # of statistics of the biases
    assert len(said) == (2 if (kind, where) == (Classifier, "dense") else 1)
    assert len(recorder.records) == 2 * BATCHES
    if where == "dense":  # the biases have theirs
        assert all(set(record.names) == {"network.0.bias", "network.2.bias"} for record in recorder.records)
    else:  # the rules of the layers below are not asked at all
        assert {record.coverage for record in recorder.records} == {0.0}
        programs = len(calls) - 4 * 2 * BATCHES  # that were tried, too
        assert programs >= 0 if where == "sq_norm" else programs == 0
    strict = Recorder(1, quantities=recorder.quantities, unsupported="error")
    with pytest.raises(UnsupportedError, match=text):
        fit(kind(False), [strict], data=kind(False).train_dataloader())


@pytest.mark.parametrize("least", [1, 0], ids=["suffices for one sample", "never suffices"])
def test_an_extra_pass_takes_fewer_samples_at_once_where_memory_does_not_suffice(least, monkeypatch, tmp_path):
    sizes, plain = [], Recorder(1, quantities=BOTH, engine="vmap")
    run(Way(Classifier), [plain], tmp_path / "enough", with_reference=False)
    vmap = second_pass.vmap_per_sample_grads

    def needing_memory(module, loss_fn, *batch, **options):
        sizes.append(len(batch[0]))
        if sizes[-1] > least:
            raise torch.OutOfMemoryError("out of memory")
        return vmap(module, loss_fn, *batch, **options)

    monkeypatch.setattr(second_pass, "vmap_per_sample_grads", needing_memory)
    bytes_each = sum(parameter.numel() * parameter.element_size() for parameter in Classifier(False).parameters())
    monkeypatch.setattr(second_pass, "MEMORY_BUDGET", BATCH * bytes_each)
    recorder = Recorder(1, quantities=BOTH, engine="vmap")
    _, said = assert_same_training(Classifier, [recorder], tmp_path)
    if not least:
        assert said == ["engine='vmap' failed with OutOfMemoryError: out of memory"]
        assert recorder.records == []
        return
    assert said == []
    assert sizes == [4, 2, 1, 1, 1, 1] * 2 * BATCHES
    for expected, found in zip(plain.records, recorder.records, strict=True):
        torch.testing.assert_close(found.norms(), expected.norms())


HOOKS = ["on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"]
HOOKS += ["on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end", "on_train_end"]


@pytest.mark.parametrize(
    ("kind", "hook", "first"),  # Lightning does not call on_before_zero_grad in manual optimization
    in_turn(
        [
            (kind, hook)
            for kind in (Classifier, Manual)
            for hook in HOOKS
            if (kind, hook) != (Manual, "on_before_zero_grad")
        ],
        [True, False],
    ),
)
def test_an_error_in_another_callback_is_what_the_user_sees(kind, hook, first):
    class Fails(L.Callback):
        calls = 0

    def failing(self, *args, **kwargs):
        self.calls += 1
        if self.calls == 2 or hook in ("on_train_epoch_end", "on_train_end"):
            raise Unusual("not ours")

    setattr(Fails, hook, failing)
    ours = [Recorder(1, quantities=BOTH), PerSampleGradientMonitor(1)]
    module, plain = kind(False), kind(False)
    with pytest.raises(Unusual, match="not ours"):
        make_trainer([Fails()]).fit(plain)
    with pytest.raises(Unusual, match="not ours"):
        make_trainer([Fails(), *ours] if first else [*ours, Fails()]).fit(module)
    assert traces(module) == traces(plain)
    again = Recorder(1)
    fit(module, [again], data=module.train_dataloader())
    assert len(again.records) == BATCHES


class FailsInItsStep(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            raise Unusual("in the step")
        return loss


@pytest.mark.parametrize("engine", ["expanded", "vmap", "loop"])
def test_an_error_in_training_step_is_what_the_user_sees(engine):
    module = FailsInItsStep(False)
    before, hooks = traces(FailsInItsStep(False)), len(torch.overrides._get_current_function_mode_stack())
    with pytest.raises(Unusual, match="in the step"):
        make_trainer([Recorder(1, quantities=BOTH, engine=engine)]).fit(module)
    assert traces(module)[1:] == before[1:]
    assert len(torch.overrides._get_current_function_mode_stack()) == hooks == 0


class Ends(torch.autograd.Function):
    """Returns its input, and raises in the pass that `where` names."""

    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        if where == "function forward":
            raise Unusual("in the user's code")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.where == "function backward":
            raise Unusual("in the user's code")
        return grad, None


class FailsInItsCode(Classifier):
    """Raises in the second step, in one place of the user's code."""

    def __init__(self, where):
        super().__init__(False)
        self.where, self.at = where, ""
        hooks = {
            "forward hook": self.network[0].register_forward_hook,
            "forward pre-hook": self.network[0].register_forward_pre_hook,
            "backward hook": self.network[2].register_full_backward_hook,
            "parameter hook": next(self.parameters()).register_hook,
            "accumulate hook": next(self.parameters()).register_post_accumulate_grad_hook,
        }
        self.hook = hooks[where](self.raising) if where in hooks else None

    def raising(self, *args):
        if self.at == self.where:
            raise Unusual("in the user's code")

    def loss(self, outputs, labels):
        if self.at == "loss":
            raise Unusual("in the user's code")
        if self.at == "torch":
            return F.cross_entropy(outputs[:, :, None], labels)
        return F.cross_entropy(outputs, labels)

    def training_step(self, batch, batch_idx):
        self.at = self.where if batch_idx == 1 else ""
        inputs, labels = batch
        outputs = self.network(inputs)
        if self.at == "tensor hook":
            outputs.register_hook(self.raising)
        return self.loss(Ends.apply(outputs, self.at), labels)


PLACES = ["forward hook", "forward pre-hook", "backward hook", "parameter hook", "accumulate hook", "tensor hook"]
PLACES += ["loss", "torch", "function forward", "function backward"]


@pytest.mark.parametrize(
    ("where", "engine"),
    [*((where, "expanded") for where in PLACES), ("loss", "vmap"), ("function backward", "loop"), ("torch", "loop")],
)
@pytest.mark.filterwarnings("ignore::lightning_persample.PerSampleWarning")
def test_an_error_in_the_users_code_passes_unchanged(where, engine):
    found = []
    for callbacks in ([], [Recorder(1, quantities=BOTH, engine=engine), PerSampleGradientMonitor(1, engine=engine)]):
        torch.manual_seed(0)
        module, tensor = FailsInItsCode(where), dict(vars(torch.Tensor))
        before = traces(module)
        with pytest.raises(RuntimeError if where == "torch" else Unusual) as raised:
            make_trainer(callbacks).fit(module)
        frames = traceback.extract_tb(raised.value.__traceback__)
        last = [frame for frame in frames if not frame.filename.startswith(PACKAGE)][-1]
        found.append((type(raised.value), str(raised.value), last.filename, last.lineno, module.state_dict()))
        assert traces(module)[1:] == before[1:]
        assert dict(vars(torch.Tensor)) == tensor
        assert torch.overrides._get_current_function_mode_stack() == []
        assert raised.value.__cause__ is None
    (*plain, state), (*seen, state_seen) = found
    assert seen == plain
    assert all(torch.equal(value, state_seen[name]) for name, value in state.items())


class HasBadData(Classifier):
    """The second sample of each batch holds an inf, the last one a nan; the weights stay as they are."""

    def train_dataloader(self):
        loader = super().train_dataloader()
        inputs = loader.dataset.tensors[0].view(BATCHES, BATCH, -1)
        inputs[:, 1, 0], inputs[:, -1, 2] = torch.inf, torch.nan
        return loader

    def on_before_optimizer_step(self, optimizer):
        optimizer.zero_grad()


@pytest.mark.parametrize("engine", ["expanded", "vmap", "loop"])
def test_samples_that_are_not_finite_are_counted_named_and_left_out(engine, tmp_path):
    plain = run(Way(HasBadData), [], tmp_path / "plain", with_reference=True).module
    recorder, module = Recorder(1, engine=engine), HasBadData(False)
    module.load_state_dict(plain.state_dict())
    monitor = PerSampleGradientMonitor(1, engine=engine)
    trainer = fit(module, [recorder, monitor], tmp_path, module.train_dataloader())
    for record, row, reference in zip(recorder.records, logged(trainer), plain.reference[:BATCHES], strict=True):
        norms = torch.cat([grads.flatten(1) for grads in reference.values()], 1).norm(dim=1)
        finite = norms[norms.isfinite()]
        assert record.nonfinite().tolist() == (~norms.isfinite()).nonzero().flatten().tolist() == [1, BATCH - 1]
        assert row["per_sample_grad/nonfinite"] == 2
        assert row["per_sample_grad/norm_mean"] == pytest.approx(finite.mean().item(), rel=1e-5)
        assert row["per_sample_grad/norm_max"] == pytest.approx(finite.max().item(), rel=1e-5)
    assert column(trainer, "per_sample_grad/coverage") == [1.0] * BATCHES


@pytest.mark.skipif(os.name == "nt", reason="a process there cannot be sent SIGINT")
def test_an_interrupt_leaves_the_module_as_it_was():
    """Under automatic and under manual optimization."""
    ended = run_alone("tests.callbacks.interrupted_runs")
    assert [json.loads(line) for line in ended.outputs[0].splitlines()] == [["SystemExit", True, 0, BATCHES]] * 2
