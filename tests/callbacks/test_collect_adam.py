"""Directions of Adam from the optimizer's state in a checkpoint, against steps of torch.optim itself."""

from __future__ import annotations

import copy

import pytest
import torch

from lightning_persample import Projection, UnsupportedError, collect_gradients
from tests.callbacks.collect_runs import Net, joined, loader, loop, projected, stored
from tests.callbacks.runs import make_trainer
from tests.torch_release import not_in_the_oldest

OPTIONS = {"projection": None, "dtype": "float64", "direction": "adam"}


class Trained(Net):
    """Is trained by what `make` makes of it."""

    def __init__(self, make, seed: int = 3) -> None:
        super().__init__(seed)
        self.make = make

    def configure_optimizers(self):
        return self.make(self)


def in_two_groups(module):
    groups = [
        {"params": [module.last.bias, module.first.weight], "lr": 0.02, "betas": (0.7, 0.9)},
        {"params": [module.norm.weight, module.first.bias, module.last.weight, module.norm.bias], "eps": 1e-3},
    ]
    return [torch.optim.Adam(groups, 0.05)], []


def named(module):
    groups = [
        {"params": [(name, p) for name, p in module.named_parameters() if name.endswith("bias")], "lr": 0.01},
        {"params": [(name, p) for name, p in module.named_parameters() if name.endswith("weight")]},
    ]
    return torch.optim.Adam(groups, 0.05)


def scheduled(module):
    optimizer = torch.optim.Adam(module.parameters(), 0.05)
    return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


MAKES = {
    "one group": lambda module: torch.optim.Adam(module.parameters(), 0.05),
    "two groups, in another order": in_two_groups,
    "named": named,
    "weight decay": lambda module: torch.optim.Adam(module.parameters(), 0.05, weight_decay=0.1),
    "AdamW": lambda module: torch.optim.AdamW(module.parameters(), 0.05, weight_decay=0.1),
    "amsgrad": lambda module: torch.optim.Adam(module.parameters(), 0.05, amsgrad=True),
    "fused": lambda module: torch.optim.Adam(module.parameters(), 0.05, fused=True),
    "with a schedule": scheduled,
}


def trained(make, path, module=None):
    """A checkpoint after some steps."""
    module = module or Trained(make)
    trainer = make_trainer(max_epochs=2)
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    return torch.load(path, weights_only=True)


def stepped(make, checkpoint, grads):
    """By parameter what one step of the optimizer goes along for each sample's gradient, learning rate apart."""
    names = list(grads)
    rows = {name: [] for name in names}
    for place in range(len(grads[names[0]])):
        module = Trained(make)
        module.load_state_dict(checkpoint["state_dict"])
        configured = module.configure_optimizers()
        optimizer = configured[0][0] if isinstance(configured, tuple) else configured
        optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer_states"][0]))  # it steps in the state itself
        own = dict(module.named_parameters())
        for name in names:
            own[name].grad = grads[name][place].clone()
        before = {name: own[name].detach().clone() for name in names}
        optimizer.step()
        group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for name in names:
            group = group_of[id(own[name])]
            kept = 1 - group["lr"] * group["weight_decay"] if group["decoupled_weight_decay"] else 1
            rows[name].append((kept * before[name] - own[name].detach()) / group["lr"])
    return {name: torch.stack(each) for name, each in rows.items()}


@not_in_the_oldest
@pytest.mark.parametrize("name", MAKES)
def test_what_adam_would_step_along(name, tmp_path):
    make, data = MAKES[name], loader()
    checkpoint = trained(make, tmp_path / "saved.ckpt")
    grads = loop(Net(), data.dataset, weights=checkpoint["state_dict"])
    expected = stepped(make, checkpoint, grads)
    module = Trained(make, seed=9)
    options = {**OPTIONS, "checkpoints": [tmp_path / "saved.ckpt"]}
    store = collect_gradients(module, data, tmp_path / "full", **options)
    torch.testing.assert_close(stored(store), joined(expected), rtol=1e-9, atol=1e-11)
    assert store.manifest.settings["direction"] == "adam"
    options["projection"] = Projection(dim=6)
    store = collect_gradients(module, data, tmp_path / "projected", **options)
    torch.testing.assert_close(stored(store), projected(expected, Projection(dim=6)), rtol=1e-9, atol=1e-11)


@not_in_the_oldest
def test_the_optimizers_of_the_trainer_of_the_fit(tmp_path):
    module, data = Trained(in_two_groups), loader()
    trainer = make_trainer(max_epochs=2)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    checkpoint = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    module.configure_optimizers = lambda: 1 / 0
    store = collect_gradients(module, data, tmp_path / "store", checkpoints=[checkpoint], trainer=trainer, **OPTIONS)
    del module.configure_optimizers
    expected = stepped(in_two_groups, checkpoint, loop(module, data.dataset, weights=checkpoint["state_dict"]))
    torch.testing.assert_close(stored(store), joined(expected), rtol=1e-9, atol=1e-11)


@not_in_the_oldest
def test_frozen_parameters_need_no_state_and_thawed_ones_are_refused_by_name(tmp_path):
    def frozen(module):
        module.first.requires_grad_(False)
        return torch.optim.Adam(module.parameters(), 0.05)

    checkpoint = trained(frozen, tmp_path / "saved.ckpt")
    module, data = Trained(frozen), loader()
    options = {**OPTIONS, "checkpoints": [checkpoint]}
    with pytest.raises(
        UnsupportedError, match=r"has no state of `first.weight`, `first.bias`, which it has not stepped"
    ):
        collect_gradients(module, data, tmp_path / "store", **options)
    module.first.requires_grad_(False)
    store = collect_gradients(module, data, tmp_path / "store", overwrite=True, **options)
    grads = loop(module, data.dataset, weights=checkpoint["state_dict"])
    assert list(grads) == ["norm.weight", "norm.bias", "last.weight", "last.bias"]
    torch.testing.assert_close(stored(store), joined(stepped(frozen, checkpoint, grads)), rtol=1e-9, atol=1e-11)


@not_in_the_oldest
def test_several_checkpoints_have_states_of_their_own(tmp_path):
    make, data = in_two_groups, loader()
    checkpoints = [trained(make, tmp_path / "1"), trained(make, tmp_path / "2", Trained(make, seed=8))]
    store = collect_gradients(Trained(make), data, tmp_path / "store", checkpoints=checkpoints, **OPTIONS)
    for place, checkpoint in enumerate(checkpoints):
        grads = loop(Net(), data.dataset, weights=checkpoint["state_dict"])
        torch.testing.assert_close(
            stored(store, place), joined(stepped(make, checkpoint, grads)), rtol=1e-9, atol=1e-11
        )


def sgd(module):
    return torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)


def plain_sgd(module):
    return torch.optim.SGD(module.parameters(), 0.05)


def maximizing(module):
    return torch.optim.Adam(module.parameters(), 0.05, maximize=True)


@pytest.mark.parametrize(
    ("make", "other", "text"),
    [
        (sgd, sgd, r"keeps no Adam state \(its state holds momentum_buffer\): pass one of Adam or AdamW"),
        (plain_sgd, plain_sgd, r"keeps no Adam state \(its state holds nothing\): pass one of Adam or AdamW"),
        (maximizing, maximizing, "the optimizer of `first.weight` maximizes"),
        (
            in_two_groups,
            MAKES["one group"],
            r"have groups of \[\[2, 4\]\] parameters, but those of the module have \[\[6\]\]",
        ),
    ],
)
def test_states_of_no_use_are_refused(make, other, text, tmp_path):
    checkpoint = trained(make, tmp_path / "saved.ckpt")
    with pytest.raises(UnsupportedError, match=f"direction='adam': .*{text}"):
        collect_gradients(Trained(other), loader(), tmp_path / "store", checkpoints=[checkpoint], **OPTIONS)


def test_a_checkpoint_before_the_first_step(tmp_path):
    checkpoint = trained(MAKES["one group"], tmp_path / "saved.ckpt")
    checkpoint["optimizer_states"][0]["state"] = {}
    text = "its state holds nothing\\): it has made no step yet, pass a later checkpoint"
    with pytest.raises(UnsupportedError, match=text):
        collect_gradients(Trained(MAKES["one group"]), loader(), tmp_path / "s", checkpoints=[checkpoint], **OPTIONS)


def test_states_that_are_of_other_parameters_are_refused(tmp_path):
    def reordered(module):
        return torch.optim.Adam(list(module.parameters())[::-1], 0.05)

    checkpoint = trained(MAKES["one group"], tmp_path / "saved.ckpt")
    with pytest.raises(
        UnsupportedError, match=r"the state of `last.bias` has shape \(7, 5\), but the parameter has \(3,\)"
    ):
        collect_gradients(Trained(reordered), loader(), tmp_path / "store", checkpoints=[checkpoint], **OPTIONS)


@pytest.mark.parametrize("checkpoints", [None, [Net().state_dict()]], ids=["as it is", "state dict"])
def test_a_state_is_needed(checkpoints, tmp_path):
    with pytest.raises(UnsupportedError, match="direction='adam' needs the state of the optimizer"):
        collect_gradients(Net(), loader(), tmp_path / "store", checkpoints=checkpoints, **OPTIONS)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (torch.optim.NAdam, "it also keeps mu_product"),
        (torch.optim.RAdam, "it does not keep amsgrad, fused"),
    ],
)
def test_relatives_of_adam_step_otherwise(optimizer, said, tmp_path):
    def make(module):
        return optimizer(module.parameters(), 0.05)

    checkpoint = trained(make, tmp_path / "saved.ckpt")
    text = rf"the optimizer of `first.weight` is not torch's Adam or AdamW \({said}\)"
    with pytest.raises(UnsupportedError, match=text):
        collect_gradients(Trained(make), loader(), tmp_path / "store", checkpoints=[checkpoint], **OPTIONS)


class Alike(Net):
    """Has layers of equal sizes, of which the first is frozen, and an optimizer of those that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(7, 7, bias=False) for _ in range(3))).double()
        self.layers[0].requires_grad_(False)

    def forward(self, inputs):
        return self.last(torch.tanh(self.layers(torch.tanh(self.first(inputs)))))

    def configure_optimizers(self):
        named = self.layers.parameters()
        return torch.optim.Adam([p for p in named if p.requires_grad], 0.05)


def test_configure_optimizers_finds_the_trainable_parameters_that_training_has(tmp_path):
    checkpoint = trained(None, tmp_path / "saved.ckpt", Alike())
    options = {**OPTIONS, "checkpoints": [checkpoint]}
    name, module, data = "layers.1.weight", Alike(), loader()
    with pytest.raises(UnsupportedError, match=r"the checkpoint has no state of `layers.0.weight`, which"):
        collect_gradients(module, data, tmp_path / "1", parameters=["layers.0.weight", name], **options)
    store = collect_gradients(module, data, tmp_path / "2", parameters=[name], **options)
    assert [each.requires_grad for each in module.layers.parameters()] == [False, True, True]
    rows = []
    for grad in loop(module, data.dataset, [name], checkpoint["state_dict"])[name]:
        again = Alike()
        again.load_state_dict(checkpoint["state_dict"])
        optimizer = again.configure_optimizers()
        optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer_states"][0]))
        weight = again.layers[1].weight
        before, weight.grad = weight.detach().clone(), grad.clone()
        optimizer.step()
        rows.append((before - weight.detach()) / 0.05)
    torch.testing.assert_close(stored(store), torch.stack(rows).flatten(1), rtol=1e-9, atol=1e-11)


def test_optimizers_that_need_the_training_data(tmp_path):
    def make(module):
        optimizer = torch.optim.Adam(module.parameters(), 0.05)
        steps = module.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]

    module, trainer = Trained(make), make_trainer(max_epochs=2)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    options = {**OPTIONS, "checkpoints": [tmp_path / "saved.ckpt"]}
    text = r"that of Trained needs the training data \(trainer.estimated_stepping_batches\), which are absent: pass"
    with pytest.raises(UnsupportedError, match=text):
        collect_gradients(Trained(make), loader(), tmp_path / "store", **options)
    assert len(collect_gradients(module, loader(), tmp_path / "store", trainer=trainer, **options)) == 22
