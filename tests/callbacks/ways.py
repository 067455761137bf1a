"""Ways to train with Lightning on one device, each with the one-sample loop beside every backward.

A module with `with_reference` computes, before each backward, the gradient of each sample's own loss by plain autograd;
run it without any callback of ours. The run that is watched does without, and its training must be the same.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_persample import mark_samples
from tests.callbacks.runs import make_trainer

FEATURES, CLASSES, NOISE = 5, 3, 2
BATCH, BATCHES = 4, 3


class Referred(L.LightningModule):
    """Keeps each sample's own gradients of every backward."""

    def __init__(self, with_reference: bool, lr: float = 0.1) -> None:
        super().__init__()
        self.with_reference = with_reference
        self.lr = lr
        self.batch_size = BATCH
        self.reference: list[dict[str, Tensor]] = []

    def refer(self, sample_loss: Callable[[int], Tensor], count: int) -> None:
        """Run the one-sample loop."""
        if not self.with_reference:
            return
        names, parameters = zip(*[(n, p) for n, p in self.named_parameters() if p.requires_grad], strict=True)
        rows = [torch.autograd.grad(sample_loss(i), parameters, allow_unused=True) for i in range(count)]
        columns = zip(names, zip(*rows, strict=True), strict=True)
        self.reference.append({name: torch.stack(grads) for name, grads in columns if grads[0] is not None})

    def train_dataloader(self) -> DataLoader:
        """Of several processes, each has samples of its own."""
        generator = torch.Generator().manual_seed(1)
        processes, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        count = BATCH * BATCHES * processes
        inputs = torch.randn(count, FEATURES, generator=generator, dtype=torch.float32)
        labels = torch.randint(0, CLASSES, (count,), generator=generator)
        return DataLoader(TensorDataset(inputs[rank::processes], labels[rank::processes]), self.batch_size)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES))


class Classifier(Referred):
    def __init__(self, with_reference: bool, network: Callable[[], nn.Module] = mlp) -> None:
        super().__init__(with_reference)
        self.network = network()

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.network(inputs), labels)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        self.refer(lambda i: self.loss(inputs[i : i + 1], labels[i : i + 1]), len(inputs))
        return self.loss(inputs, labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


class ReturnsDict(Classifier):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "batch": batch_idx}


class SkipsTheSecond(Classifier):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class WithLBFGS(Classifier):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)


class Tripled(Classifier):
    def backward(self, loss, *args, **kwargs):
        (3 * loss).backward(*args, **kwargs)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.last = nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.middle, self.first(x), use_reentrant=self.use_reentrant))


class CheckpointedReference(Classifier):
    """The reference of a reentrant checkpoint, which autograd.grad cannot go through, is that without it."""

    def loss(self, inputs, labels):
        network = self.network
        if self.with_reference and len(inputs) == 1:
            return F.cross_entropy(network.last(network.middle(network.first(inputs))), labels)
        return super().loss(inputs, labels)


class Manual(Classifier):
    """One backward and one step in each training step."""

    direct = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def go_backward(self, loss):
        if self.direct:
            loss.backward()
        else:
            self.manual_backward(loss)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.go_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class ManualDirect(Manual):
    direct = True


class ManualTwice(Manual):
    """Two backward passes of one step, the second on other inputs."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        inputs, labels = batch
        self.go_backward(Classifier.training_step(self, batch, batch_idx))
        self.go_backward(Classifier.training_step(self, (2 * inputs, labels), batch_idx))
        optimizer.step()


class ManualClips(Manual):
    def go_backward(self, loss):
        super().go_backward(loss)
        self.clip_gradients(self.optimizers(), gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class ManualAccumulates(Manual):
    """Steps on the last batch alone, with the gradients of all."""

    def training_step(self, batch, batch_idx):
        self.go_backward(Classifier.training_step(self, batch, batch_idx))
        if batch_idx == BATCHES - 1:
            self.optimizers().step()
            self.optimizers().zero_grad()


class ManualLBFGS(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = Classifier.training_step(self, batch, batch_idx)
            self.go_backward(loss)
            return loss

        optimizer.step(closure)

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)


class GAN(Referred):
    """Generator and critic with an optimizer each; the noise is drawn in the step and declared."""

    toggles, direct = True, False

    def __init__(self, with_reference: bool) -> None:
        super().__init__(with_reference)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(NOISE, 4), nn.Tanh(), nn.Linear(4, FEATURES))
        self.critic = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))

    def generator_loss(self, noise):
        return F.softplus(-self.critic(self.generator(noise))).mean()

    def critic_loss(self, real, noise):
        fake = self.generator(noise).detach()
        return (F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake)).mean()) / 2

    def optimize(self, optimizer, loss, *data):
        if self.toggles:
            self.toggle_optimizer(optimizer)
        self.refer(lambda i: loss(*(each[i : i + 1] for each in data)), len(data[0]))
        optimizer.zero_grad()
        value = loss(*data)
        if self.direct:
            value.backward()
        else:
            self.manual_backward(value)
        optimizer.step()
        if self.toggles:
            self.untoggle_optimizer(optimizer)

    def training_step(self, batch, batch_idx):
        real = batch[0]
        noise = mark_samples(torch.randn(len(real), NOISE, dtype=real.dtype))
        generator, critic = self.optimizers()
        self.optimize(generator, self.generator_loss, noise)
        self.optimize(critic, self.critic_loss, real, noise)

    def configure_optimizers(self):
        return torch.optim.SGD(self.generator.parameters(), 0.1), torch.optim.Adam(self.critic.parameters(), 0.01)


class GANUntoggled(GAN):
    toggles, direct = False, True


def compiled_submodule(module: Classifier) -> Any:
    module.network = torch.compile(module.network, backend="aot_eager")
    return module


def traced_submodule(module: Classifier) -> Any:
    module.network = torch.compile(module.network, backend="eager")
    return module


def compiled_whole(module: Classifier) -> Any:
    return torch.compile(module, backend="eager")


def as_it_is(module: Any) -> Any:
    return module


@dataclass(frozen=True)
class Way:
    """A way of training.

    Attributes:
        module: given whether to compute the reference, the module.
        settings: of the Trainer; those that are made for each run are given by a function.
        prepare: what becomes of the module before the fit.
        fit: how the fit is run.
        tolerance: relative, between the engine's values and the loop's.
        every: which training steps are captured.
        trials: how many training steps run first, in trials that are not captured.
    """

    module: Callable[[bool], Referred]
    settings: Callable[[], dict[str, Any]] = dict
    prepare: Callable[[Any], Any] = as_it_is
    fit: Callable[[L.Trainer, Any, Any], None] = field(default=lambda trainer, module, folder: trainer.fit(module))
    tolerance: float = 1e-4
    every: int = 1
    trials: int = 0


@dataclass
class Run:
    """What a fit left."""

    module: Referred
    trainer: L.Trainer
    state: dict[str, Tensor]
    saved: bytes


def run(way: Way, callbacks: list[Any], folder: Any, *, with_reference: bool, **strategy: Any) -> Run:
    """Train from a fixed seed, on one device unless `strategy` has settings of the Trainer that say otherwise."""
    torch.manual_seed(3)
    module = way.module(with_reference)
    settings = way.settings()
    trainer = make_trainer(
        [*callbacks, *settings.pop("callbacks", [])],
        **{"default_root_dir": folder, "max_epochs": 2, **settings, **strategy},
    )
    way.fit(trainer, way.prepare(module), folder)
    torch._dynamo.reset() if way.prepare is not as_it_is else None
    state = {f"module.{name}": value for name, value in module.state_dict().items()}
    state |= {f"grad.{name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    for place, optimizer in enumerate(trainer.optimizers):
        for index, values in optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{place}.{index}.{n}": v for n, v in values.items() if isinstance(v, Tensor)}
    state = {n: value.full_tensor() if hasattr(value, "full_tensor") else value for n, value in state.items()}
    state["rng"] = torch.get_rng_state()
    file = io.BytesIO()
    torch.save({name: value for name, value in state.items() if name.startswith("module.")}, file)
    return Run(module, trainer, state, file.getvalue())


def traces(module):
    """What could be left of a capture in a module."""
    hooks = [
        {name: len(value) for name, value in vars(part).items() if name.endswith("_hooks") and value}
        for part in module.modules()
    ]
    of_parameters = [
        (
            [name for name in vars(parameter) if "dynamo" not in name],
            dict(parameter._backward_hooks or {}),
            dict(parameter._post_accumulate_grad_hooks or {}),
        )
        for parameter in module.parameters()
    ]
    methods = [type(getattr(module, name)) for name in ("training_step", "backward", "manual_backward", "log")]
    return sorted(vars(module)), hooks, of_parameters, methods
