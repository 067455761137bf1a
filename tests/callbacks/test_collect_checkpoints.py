"""Checkpoints that hold a part of the weights, or have the names of a wrapper, against the one-sample loop."""

from __future__ import annotations

from inspect import signature

import pytest
import torch
from lightning.pytorch.strategies import Strategy

from lightning_persample import OptionError, collect_gradients
from lightning_persample.influence import GradientStore
from tests.callbacks.collect_runs import Net, joined, loader, loop, stored
from tests.in_turn import in_turn

FULL = {"projection": None, "dtype": "float64"}


def assert_at(store, place, weights):
    torch.testing.assert_close(
        stored(store, place), joined(loop(Net(), loader().dataset, weights=weights)), rtol=1e-10, atol=1e-12
    )


def test_what_a_checkpoint_lacks_is_that_of_the_module_as_given(tmp_path):
    module, other = Net(5), Net(6).state_dict()
    module.strict_loading = False
    before = {name: value.clone() for name, value in module.state_dict().items()}
    part = {name: value for name, value in Net(7).state_dict().items() if name.startswith("last")}
    store = collect_gradients(module, loader(), tmp_path, checkpoints=[other, part, other], **FULL)
    assert_at(store, 0, other)
    assert_at(store, 1, {**before, **part})
    assert_at(store, 2, other)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


WRAPPED = {
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "DistributedDataParallel": lambda name: f"module.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "both, the other way": lambda name: f"_orig_mod.module.{name}",
    "a compiled layer": lambda name: name.replace("first.", "first._orig_mod."),
}


@pytest.mark.parametrize(("name", "is_strict"), in_turn(WRAPPED, [True, False]))
def test_the_names_of_wrappers_are_understood(name, is_strict, tmp_path):
    weights = Net(6).state_dict()
    wrapped = {WRAPPED[name](each): value for each, value in weights.items()}
    module = Net(5)
    module.strict_loading = is_strict
    store = collect_gradients(module, loader(), tmp_path / "1", checkpoints=[wrapped], **FULL)
    assert_at(store, 0, weights)
    again = collect_gradients(module, loader(9), tmp_path / "2", checkpoints=[{"state_dict": weights}], **FULL)
    assert again.manifest.checkpoints[0]["weights"] == store.manifest.checkpoints[0]["weights"]


@pytest.mark.parametrize("is_strict", [True, False])
def test_weights_of_another_module_are_refused(is_strict, tmp_path):
    module = Net(5)
    module.strict_loading = is_strict
    weights = {f"model.{name}": value for name, value in Net(6).state_dict().items()}
    text = r"checkpoints\[1\] is of another module: its weights are `model.steps`, .* but those of Net are `steps`, "
    with pytest.raises(OptionError, match=text):
        collect_gradients(module, loader(), tmp_path, checkpoints=[Net(6).state_dict(), weights], **FULL)
    assert GradientStore(tmp_path, partial=True).checkpoints == (0,)


def test_weights_with_a_prefix_are_refused_with_the_line_that_takes_it_off(tmp_path):
    weights = Net(6).state_dict()
    torch.save({"state_dict": {f"network.{name}": value for name, value in weights.items()}}, tmp_path / "last.ckpt")
    with pytest.raises(OptionError, match=r"none is alike: pass them without 'network\.', checkpoints=\[\{") as refused:
        collect_gradients(Net(5), loader(), tmp_path / "1", checkpoints=[tmp_path / "last.ckpt"], **FULL)
    remedy = str(refused.value).partition("checkpoints=")[2]
    checkpoints = eval(remedy, {"torch": torch, "path": tmp_path / "last.ckpt"})  # the remedy, as it is written
    assert_at(collect_gradients(Net(5), loader(), tmp_path / "2", checkpoints=checkpoints, **FULL), 0, weights)


def changed(**weights):
    own = {**Net(6).state_dict(), **weights}
    return {name: value for name, value in own.items() if value is not None}


UNFIT = {
    "other shapes": (
        changed(**{"last.bias": torch.zeros(7)}),
        r"checkpoints\[0\] does not fit Net: `last\.bias` has shape \(7,\) there and \(3,\) in the module; pass",
    ),
    "a name that is missing": (changed(**{"last.bias": None}), r"does not fit Net: it lacks `last\.bias`; pass the"),
    "a name too many": (changed(ema=torch.ones(2)), r"does not fit Net: it has `ema`, which the module does not have"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_weights_that_do_not_fit_are_named_with_their_shapes(name, tmp_path):
    weights, text = UNFIT[name]
    with pytest.raises(OptionError, match=text):
        collect_gradients(Net(5), loader(), tmp_path, checkpoints=[weights], **FULL)


def test_weights_only_is_refused_where_lightning_does_not_take_it(tmp_path, monkeypatch):
    monkeypatch.setattr(Strategy, "load_checkpoint", lambda self, checkpoint_path: torch.load(checkpoint_path))
    torch.save(Net(6).state_dict(), tmp_path / "last.ckpt")
    text = (
        "weights_only=True: `load_checkpoint` of SingleDeviceStrategy does not take it in this version of Lightning; "
        "leave it None, or upgrade Lightning"
    )
    with pytest.raises(OptionError, match=text):
        collect_gradients(
            Net(5), loader(), tmp_path / "1", checkpoints=[tmp_path / "last.ckpt"], weights_only=True, **FULL
        )


@pytest.mark.parametrize("content", ["an object", "cut off"])
def test_a_file_that_cannot_be_read_is_named(content, tmp_path):
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": Net(6).state_dict(), "hyper_parameters": {"loader": loader}}, path)
    if "weights_only" not in signature(Strategy.load_checkpoint).parameters:
        pytest.skip("this version of lightning does not say whether a checkpoint holds tensors alone")
    if content == "cut off":
        path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(OptionError, match=r"checkpoints\[0\]='.*last\.ckpt' cannot be read: ") as refused:
        collect_gradients(Net(5), loader(), tmp_path / "1", checkpoints=[path], weights_only=True, **FULL)
    assert ("if you trust it, pass weights_only=False" in str(refused.value)) == (content == "an object")
