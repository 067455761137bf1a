"""Models that the first engine cannot follow, and a training step that changes whatever it can."""

from __future__ import annotations

import random
from collections import OrderedDict

import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn

from lightning_persample.errors import PerSampleWarning
from tests.callbacks.runs import CLASSES, FEATURES, Classifier, fit


class Unseen(torch.autograd.Function):
    """A matrix product; the first engine does not see into its backward, vmap does."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight):
        return x @ weight.T

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class UnseenByVmap(torch.autograd.Function):
    """The same, and vmap does not know it either."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    backward = Unseen.backward


class Hidden(nn.Module):
    def __init__(self, function=Unseen) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, FEATURES))
        self.last = nn.Linear(8, CLASSES)
        self.function = function

    def forward(self, x):
        return self.last(self.function.apply(x, self.weight).tanh())


class NeedsTwo(Hidden):
    def forward(self, x):
        if len(x) < 2:
            raise ValueError("one sample is not enough\nsecond line")
        return super().forward(x)


class LeavesTraces(Classifier):
    """Its training step changes whatever a training step can change in a module."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 8, max_norm=0.5)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("last", torch.zeros(1))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES)
        self.history, self.running, self.count = [], {"loss": torch.zeros(())}, 0
        self.generator, self.recent, self.hook = torch.Generator().manual_seed(5), OrderedDict(), None

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        inputs += torch.randn(FEATURES, generator=self.generator) * random.random()
        hidden = self.network[0](inputs) + self.embedding(labels)
        logits = self.network[2](hidden)
        loss = F.cross_entropy(logits, labels)
        with torch.no_grad():
            self.steps += 1
            self.last = loss.detach()[None]
            self.frozen.data = self.frozen.data + loss
            self.frozen.data.mul_(0.9)
            self.network[0].bias.data.clamp_(-0.3, 0.3)
            self.running["loss"] += loss
        self.history.append(float(loss.detach()))
        self.count += 1
        self.recent[len(self.recent)] = self.count
        if self.hook is not None:
            self.hook.remove()
        self.hook = self.network[0].register_forward_hook(lambda *found: found[-1] * 0.9)
        self.optimizers().param_groups[0]["lr"] *= 0.9
        self.lr_schedulers().step()
        self.accuracy(logits, labels)
        self.log("accuracy", self.accuracy)
        self.log_dict({"loss": loss})
        self.logger.log_metrics({"direct": self.count}, step=self.count)
        self.logger.experiment.log_metrics({"direct": self.count}, step=self.count)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]


def traces_after_training(callbacks, folder):
    torch.manual_seed(0)
    random.seed(0)
    module = LeavesTraces()
    trainer = fit(module, callbacks, folder, max_epochs=2)
    state = {**module.state_dict(), "running": module.running["loss"], "rng": torch.get_rng_state()}
    files = (trainer.logger.experiment.metrics_file_path, trainer.logger.experiment.metrics)
    with open(files[0], encoding="utf-8") as file:
        return state, (module.history, module.count, random.getstate(), file.read())


def texts_of(caught):
    """The texts of this package's warnings."""
    return [str(each.message) for each in caught if each.category is PerSampleWarning]
