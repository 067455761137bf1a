"""The module is as before, whatever happens in a fit."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader

from lightning_persample.callbacks import PerSampleCallback, PerSampleGradientMonitor, sample_index
from lightning_persample.callbacks.lightning_internals import ObservedMethod
from lightning_persample.callbacks.observed_step import Reports
from lightning_persample.callbacks.sample_index import BatchIndices
from lightning_persample.errors import PerSampleWarning
from tests.callbacks.runs import Classifier, Recorder, fit, loader, logged, make_trainer

# What a Trainer itself leaves in a module's instance dictionary.
LIGHTNINGS_OWN = ("_trainer", "_current_fx_name", "_device", "_hparams", "_hparams_name", "_metric_attributes")


def instance_dictionary(module):
    return {name: value for name, value in module.__dict__.items() if name not in LIGHTNINGS_OWN}


def recorder():
    return Recorder(quantities=("sq_norm", "grad_sample"))


def test_the_modules_instance_dictionary_is_as_before():
    module = Classifier()
    before, keys = instance_dictionary(module), list(module.state_dict())
    fit(module, [recorder()])
    after = instance_dictionary(module)
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert list(module.state_dict()) == keys
    assert all(vars(parameter) == {} for parameter in module.parameters())


def test_a_users_own_instance_attributes_are_put_back():
    module = Classifier()
    calls = []

    def own_training_step(batch, batch_idx):
        calls.append(batch_idx)
        return F.cross_entropy(module.network(batch[0]), batch[1])

    def own_backward(loss, *args, **kwargs):
        calls.append("backward")
        loss.backward(*args, **kwargs)

    module.training_step, module.backward = own_training_step, own_backward
    callback = recorder()
    fit(module, [callback])
    assert calls == [0, "backward", 1, "backward", 2, "backward"]
    assert len(callback.records) == 3
    assert module.training_step is own_training_step
    assert module.backward is own_backward


class Fails(Classifier):
    def __init__(self, where, error):
        super().__init__()
        self.where, self.error = where, error

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.where == "training_step":
            raise self.error
        return loss

    def backward(self, loss, *args, **kwargs):
        super().backward(loss, *args, **kwargs)
        if self.where == "backward":
            raise self.error

    def on_before_optimizer_step(self, optimizer):
        if self.where == "optimizer_step":
            assert all(hasattr(parameter, "grad_sample") for parameter in self.parameters())
            raise self.error


@pytest.mark.parametrize("where", ["training_step", "backward", "optimizer_step"])
@pytest.mark.parametrize(("error", "surfaces"), [(KeyError("mine"), KeyError), (KeyboardInterrupt(), SystemExit)])
def test_the_original_error_surfaces_and_the_module_is_as_before(where, error, surfaces):
    module = Fails(where, error)
    before = list(instance_dictionary(module))
    with pytest.raises(surfaces) as raised:
        fit(module, [recorder(), PerSampleGradientMonitor()])
    assert raised.value is error or raised.value.__context__ is error
    assert list(instance_dictionary(module)) == before
    assert "set_" not in vars(torch.Tensor)
    assert not any(hasattr(parameter, "grad_sample") for parameter in module.parameters())


class DoesNothing(PerSampleCallback):
    pass


@pytest.mark.filterwarnings("error::lightning_persample.PerSampleWarning")
def test_a_warning_that_is_an_error_leaves_module_and_trainer_as_before():
    module, trainer = Classifier(), make_trainer([DoesNothing()])
    before = list(instance_dictionary(module))
    with pytest.raises(PerSampleWarning, match="nothing is done"):
        trainer.fit(module, loader())
    assert list(instance_dictionary(module)) == before
    assert "_load_combined_loader_states" not in vars(trainer.fit_loop)


@pytest.mark.parametrize(
    ("kind", "name"), [(ObservedMethod, "restore"), (BatchIndices, "_let_go"), (Reports, "end_batch")]
)
def test_an_interrupt_while_things_are_put_back_leaves_nothing(kind, name, monkeypatch):
    method = getattr(kind, name)
    module, data, trainer = Classifier(), loader(), make_trainer([recorder()])
    before = list(instance_dictionary(module))
    raised: list[bool] = []

    def interrupted(*args):
        if trainer.global_step == 3 and not raised:
            raised.append(True)
            raise KeyboardInterrupt
        method(*args)

    monkeypatch.setattr(kind, name, interrupted)
    with pytest.raises(SystemExit):
        trainer.fit(module, data)
    assert raised
    assert list(instance_dictionary(module)) == before
    assert "_load_combined_loader_states" not in vars(trainer.fit_loop)
    assert type(trainer.fit_loop._combined_loader) is CombinedLoader
    assert not any(hasattr(parameter, "grad_sample") for parameter in module.parameters())


def test_an_interrupt_while_a_loader_is_prepared_leaves_it_as_it_was(monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    data = loader()
    before = dict(vars(data))
    monkeypatch.setattr(sample_index, "_KeyedCollate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        iter(sample_index.TaggedLoader(data))
    assert dict(vars(data)) == before


class FailsInSetup(Classifier):
    def setup(self, stage):
        raise KeyError("mine")


def test_an_error_before_the_fit_starts_is_what_the_user_sees():
    with pytest.raises(KeyError, match="mine"):
        fit(FailsInSetup(), [PerSampleGradientMonitor()])


def test_hooks_that_end_a_fit_do_no_harm_without_one():
    monitor, trainer, module = PerSampleGradientMonitor(), make_trainer(), Classifier()
    for _ in range(2):
        monitor.on_exception(trainer, module, KeyError("mine"))
        monitor.on_fit_end(trainer, module)
        monitor.teardown(trainer, module, "fit")
    assert "training_step" not in module.__dict__


def test_a_second_fit_with_the_same_trainer(tmp_path):
    callback, module = recorder(), Classifier()
    trainer = make_trainer([callback, PerSampleGradientMonitor()], tmp_path)
    trainer.fit(module, loader())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader())
    assert len(callback.records) == 9
    assert [row["step"] for row in logged(trainer)] == list(range(9))
    other = Classifier()
    trainer.fit_loop.max_epochs = 4
    trainer.fit(other, loader())
    assert len(callback.records) == 12
    assert not {"training_step", "backward", "log"} & (module.__dict__.keys() | other.__dict__.keys())


def test_a_fit_after_one_that_failed():
    module, callback = Fails("backward", KeyError("mine")), recorder()
    trainer = make_trainer([callback])
    with pytest.raises(KeyError):
        trainer.fit(module, loader())
    module.where = None
    trainer.fit(module, loader())
    assert len(callback.records) == 3


class CopiesItself(Classifier):
    """Copies itself in the middle of a fit, between forward and backward of the second batch too."""

    def __init__(self):
        super().__init__()
        self.copies = []

    def __getstate__(self):
        return {**super().__getstate__(), "copies": []}

    def copy_all(self):
        file = io.BytesIO()
        torch.save(self, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        self.copies += [copy.deepcopy(self), pickle.loads(pickle.dumps(self)), loaded]

    def on_train_batch_start(self, batch, batch_idx):
        self.copy_all()

    def on_before_backward(self, loss):
        self.copy_all()


def test_copies_made_in_the_middle_of_a_fit_have_plain_methods_of_their_own():
    module = CopiesItself()
    fit(module, [recorder()])
    assert len(module.copies) == 18
    for each in module.copies:
        for name in ("training_step", "backward", "log"):
            method = getattr(each, name)
            assert type(method) is type(each.configure_optimizers)  # a bound method
            assert method.__self__ is each
            assert method.__func__ is getattr(CopiesItself, name)
    trained = module.copies[0]
    callback = recorder()
    fit(trained, [callback])
    assert len(callback.records) == 3


@pytest.mark.filterwarnings("ignore:.*training_step.* returned .*None")
def test_a_copy_of_a_users_own_instance_attribute_is_that_attribute():
    module = CopiesItself()
    module.training_step = own_training_step
    fit(module, [recorder()])
    assert all(each.training_step is own_training_step for each in module.copies)


def own_training_step(batch, batch_idx):
    return None


class WithoutIndex(Classifier):
    def training_step(self, batch):
        return F.cross_entropy(self.network(batch[0]), batch[1])


class Keyword(Classifier):
    def training_step(self, batch, *args, **kwargs):
        assert args == (0,)
        return F.cross_entropy(self.network(batch[0]), batch[1])


@pytest.mark.parametrize("module", [WithoutIndex, Keyword])
def test_lightning_still_counts_the_arguments_of_training_step(module):
    callback = recorder()
    fit(module(), [callback], limit_train_batches=1)
    assert len(callback.records) == 1


class Validates(Classifier):
    def __init__(self):
        super().__init__()
        self.validated = 0

    def validation_step(self, batch, batch_idx):
        self.validated += 1
        self.training_step(batch, batch_idx)


def test_validation_in_between_is_not_captured(tmp_path):
    module, callback = Validates(), recorder()
    trainer = make_trainer([callback, PerSampleGradientMonitor()], tmp_path, val_check_interval=2, max_epochs=2)
    trainer.fit(module, loader(32), loader(16))
    assert module.validated == 2 + 2 * 2 * 2
    assert callback.batch_indices == [0, 1, 2, 3] * 2
    assert [row["step"] for row in logged(trainer)] == list(range(8))
    trainer.validate(module, loader(16), verbose=False)
    assert "training_step" not in module.__dict__


class Peeks(Classifier):
    """Runs itself under no_grad between training steps, in training mode."""

    def on_train_batch_start(self, batch, batch_idx):
        with torch.no_grad():
            for _ in range(100):
                self.training_step(batch, batch_idx)


class Counts(L.Callback):
    """Counts the tensors that are alive."""

    def __init__(self) -> None:
        self.tensors = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        gc.collect()
        self.tensors.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))


def test_forwards_without_gradients_between_steps_leave_nothing_behind():
    grown = []
    for module in (Peeks(), Classifier()):
        counts = Counts()
        fit(module, [PerSampleGradientMonitor(2, per_layer=2), counts], data=loader(80))
        grown.append([counts.tensors[batch] - counts.tensors[3] for batch in (5, 7, 9)])
    assert grown[0] == grown[1]
    assert grown[0][0] <= 9  # norms, which wait for the others, and sums of a logged step


class SeesTensor(L.Callback):
    """Keeps what the class `Tensor` has of its own after each step."""

    def __init__(self) -> None:
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(dict(vars(torch.Tensor)))


def test_the_class_tensor_changes_once_in_a_fit_and_is_as_before_afterwards():
    before, inside, beside = dict(vars(torch.Tensor)), SeesTensor(), SeesTensor()
    fit(Classifier(), [PerSampleGradientMonitor(2), inside], data=loader(48))
    assert dict(vars(torch.Tensor)) == before
    fit(Classifier(), [beside], data=loader(48))
    assert all(seen == before for seen in beside.seen)
    first, *rest = inside.seen[1:]
    assert first != before
    assert rest == [first] * 4


def test_what_the_monitor_keeps_of_logged_steps_is_added_up_64_steps_at_a_time():
    counts = Counts()
    fit(Classifier(), [PerSampleGradientMonitor(1, per_layer=2), counts], data=loader(8 * 132))
    assert counts.tensors[64] - counts.tensors[4] > 6 * 60
    assert counts.tensors[130] - counts.tensors[65] <= 2 * 65  # norms of each step, for the quantiles of the epoch


def test_nothing_of_a_run_is_kept_alive():
    module = Classifier()
    trainer = make_trainer([PerSampleGradientMonitor(), Recorder(quantities=("grad_sample",))])
    trainer.fit(module, loader())
    callbacks = trainer.callbacks
    gone = weakref.ref(trainer)
    module.trainer = None
    del trainer
    gc.collect()
    assert gone() is None
    pickle.dumps(callbacks[0])


def test_a_callback_can_be_copied_and_pickled_in_the_middle_of_a_fit():
    class Copies(Recorder):
        copied = None

        def on_per_sample_gradients(self, trainer, pl_module, record, batch, batch_idx):
            monitor = trainer.callbacks[0]
            self.copied = copy.deepcopy(monitor), pickle.loads(pickle.dumps(monitor))

    monitor, copies = PerSampleGradientMonitor(), Copies()
    fit(Classifier(), [monitor, copies])
    assert all(each.state_key == monitor.state_key for each in copies.copied)


class CopiesTheTrainer(L.Callback):
    copies = ()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.copies = copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))


def test_a_trainer_can_be_copied_and_pickled_in_the_middle_of_a_fit():
    copier = CopiesTheTrainer()
    fit(Classifier(), [PerSampleGradientMonitor(), copier])
    for trainer in copier.copies:
        own = [*vars(trainer.fit_loop).values(), *vars(trainer.lightning_module).values()]
        assert not any(isinstance(value, ObservedMethod) for value in own)
        assert type(trainer.fit_loop._combined_loader) is CombinedLoader


class WrapsLater(L.Callback):
    """Takes the place of training_step after ours did, and puts back what it found when ours has gone."""

    def on_fit_start(self, trainer, pl_module):
        self.found = pl_module.training_step
        pl_module.training_step = lambda *args, **kwargs: self.found(*args, **kwargs)

    def teardown(self, trainer, pl_module, stage):
        pl_module.training_step = self.found


def test_a_method_that_somebody_else_puts_back_holds_nothing_of_the_run():
    module = Classifier()
    trainer = make_trainer([PerSampleGradientMonitor(), WrapsLater()])
    trainer.fit(module, loader())
    batch = next(iter(loader()))
    module.log = lambda *args, **kwargs: None
    assert module.training_step(batch, 0).requires_grad
    gone = weakref.ref(trainer)
    module.trainer = None
    del trainer
    gc.collect()
    assert gone() is None


def test_a_barebones_trainer_is_not_logged_to():
    monitor = PerSampleGradientMonitor(every_n_steps=1)
    trainer = L.Trainer(barebones=True, max_epochs=1, callbacks=[monitor], accelerator="cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Classifier(), loader())
    assert not [each for each in caught if "per_sample_grad" in str(each.message)]
