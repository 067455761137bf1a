"""Collecting gradients leaves the module, the Trainer, the random numbers and the files as they were."""

from __future__ import annotations

import copy
import random
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.states import TrainerStatus
from torch import nn

from lightning_persample import OptionError, collect_gradients
from tests.callbacks.collect_runs import Net, loader
from tests.callbacks.runs import make_trainer


class Noisy(Callback):
    """Says when Lightning calls it."""

    def __init__(self) -> None:
        self.called = []

    def __getattribute__(self, name):
        if name.startswith("on_predict") or name in ("setup", "teardown", "on_exception"):
            object.__getattribute__(self, "called").append(name)
        return object.__getattribute__(self, name)


def state_of(module):
    """Everything of a module, by value and by identity."""
    found = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                found[f"{path}.{name}"] = (id(value), copy.copy(value) if isinstance(value, (list, dict)) else None)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        found[name] = (id(tensor), tensor.data_ptr(), tensor.detach().clone(), tensor.requires_grad)
        found[f"{name}.grad"] = (id(tensor.grad), None if tensor.grad is None else tensor.grad.clone())
    return found


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or bool(one == other)


def random_state():
    return torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()


def files(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()}


def prepare(module):
    """Put a module in a state that is none's default."""
    module.norm.eval()
    module.first.bias.requires_grad_(False)
    F.cross_entropy(module(torch.randn(6, 5, dtype=torch.float64)), torch.zeros(6, dtype=torch.long)).backward()


def raising(module, batch):
    if 9 in batch[0][:, 0]:
        module.norm.running_mean += 1
        module.first.weight.data *= 2
        module.extra = nn.Linear(1, 1)
        module.seen.append(5)
        raise KeyError("this batch")
    return F.cross_entropy(module(batch[0]), batch[1])


@pytest.mark.parametrize("direct", [True, False], ids=["own trainer", "trainer of a fit"])
@pytest.mark.parametrize("fails", [False, True])
def test_module_random_numbers_and_files(direct, fails, tmp_path):
    data, module = loader(batch_size=3, shuffle=True), Net()
    trainer = None
    if not direct:
        trainer = make_trainer([Noisy()], logger=CSVLogger(tmp_path), max_epochs=1, default_root_dir=tmp_path)
        trainer.fit(module, loader())
    prepare(module)
    if fails:
        data.dataset.inputs[10, 0] = 9
    options = {"projection": None, "checkpoints": [Net(5).state_dict()], "trainer": trainer}
    before, numbers, there = state_of(module), random_state(), files(tmp_path)
    if fails:
        with pytest.raises(KeyError, match="this batch"):
            collect_gradients(module, data, tmp_path / "store", loss=raising, **options)
    else:
        assert collect_gradients(module, data, tmp_path / "store", **options).visited.all()
    after = state_of(module)
    assert before.keys() == after.keys()
    assert [name for name in before if not same(before[name], after[name])] == []
    assert all(same(*pair) for pair in zip(numbers, random_state(), strict=True))
    assert {path: each for path, each in files(tmp_path).items() if tmp_path / "store" not in path.parents} == there


def test_after_an_interrupt_the_next_one_is_heard(tmp_path):
    def interrupted(module, batch):
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        collect_gradients(Net(), loader(), tmp_path / "store", loss=interrupted)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("fails", [False, True])
def test_the_trainer_is_as_before_and_goes_on_as_without(fails, tmp_path):
    results = []
    for collects in (False, True):
        module, noisy = Net(), Noisy()
        torch.manual_seed(11)
        trainer = make_trainer([noisy], max_epochs=1, default_root_dir=tmp_path)
        trainer.fit(module, loader(shuffle=True))
        if collects:
            seen = ("callbacks", "loggers", "train_dataloader", "global_step", "current_epoch", "lightning_module")
            seen += ("model", "optimizers", "callback_metrics", "num_training_batches", "profiler", "state", "strategy")
            before = {name: getattr(trainer, name) for name in seen}
            status, loop = copy.copy(trainer.state), trainer.predict_loop
            progress, called = copy.deepcopy(loop.batch_progress), list(noisy.called)
            if fails:
                with pytest.raises(ZeroDivisionError):
                    collect_gradients(module, loader(), tmp_path / "store", loss=lambda *_: 1 / 0, trainer=trainer)
            else:
                collect_gradients(module, loader(), tmp_path / "store", trainer=trainer)
            assert {name: getattr(trainer, name) for name in seen} == before
            assert trainer.state == status
            assert trainer.state.status == TrainerStatus.FINISHED
            assert loop.inference_mode
            assert loop.batch_progress == progress
            assert noisy.called == called
            assert module.trainer is trainer
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, loader(shuffle=True))
        results.append((list(module.state_dict().values()), torch.get_rng_state(), len(module.seen)))
    (plain, plain_state, steps), (collected, collected_state, collected_steps) = results
    assert all(torch.equal(*pair) for pair in zip(plain, collected, strict=True))
    assert torch.equal(plain_state, collected_state)
    assert steps == collected_steps


def test_nothing_is_logged_and_the_module_can_ask_for_its_logger(tmp_path):
    class Asks(Net):
        def training_step(self, batch, batch_idx):
            self.logger.log_metrics({"seen": 1.0})
            self.logger.experiment.add_scalar("seen", 1.0)
            self.print("nobody reads this")
            return super().training_step(batch, batch_idx)

    module = Asks()
    assert collect_gradients(module, loader(), tmp_path / "store", projection=None).visited.all()
    assert module._trainer is None
    assert module.seen == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


def test_a_trainer_in_the_middle_of_a_fit_is_refused_and_another_one_is_not(tmp_path):
    stores = []

    class Collects(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 2:
                folder = tmp_path / str(trainer.current_epoch)
                with pytest.raises(OptionError, match="trainer is in the middle of its fit: pass another one"):
                    collect_gradients(pl_module, loader(), folder, trainer=trainer)
                stores.append(collect_gradients(pl_module, loader(), folder, projection=None))
                assert pl_module.trainer is trainer

    results = []
    for callbacks in ([], [Collects()]):
        module = Net()
        torch.manual_seed(11)
        make_trainer(callbacks, max_epochs=2).fit(module, loader(shuffle=True))
        results.append(list(module.state_dict().values()))
    assert [store.visited.all() for store in stores] == [True, True]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
