"""Train an LSTM on sequences of unequal lengths, packed by the collate function, and see each sequence's gradient."""

import argparse
import logging
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader

from lightning_persample import PerSampleGradientMonitor

Sequences = tuple[PackedSequence, Tensor]


def make_sequence(label: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """A wave of 5 to 60 steps, slow or fast, with noise."""
    steps = int(torch.randint(5, 61, (1,), generator=generator))
    phase = torch.rand(1, generator=generator) * 6.28
    wave = torch.sin(torch.arange(steps) * (0.3 + 0.6 * label) + phase)
    return (wave + 0.2 * torch.randn(steps, generator=generator))[:, None], label


def pack(rows: list[tuple[Tensor, int]]) -> Sequences:
    """What a DataLoader makes of the rows that it drew: all steps that there are, and no padding."""
    sequences, labels = zip(*rows, strict=True)
    return pack_sequence(list(sequences), enforce_sorted=False), torch.tensor(labels)


class WaveClassifier(L.LightningModule):
    """The last state of an LSTM decides; nothing of it knows of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 16), nn.Linear(16, 2)

    def training_step(self, batch: Sequences, batch_idx: int) -> Tensor:
        packed, labels = batch
        _, (last, _) = self.lstm(packed)
        return F.cross_entropy(self.head(last[0]), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--sequences", type=int, default=600)
    arguments.add_argument("--epochs", type=int, default=6)
    options = arguments.parse_args()
    warnings.filterwarnings("ignore", ".*(does not have many workers|treespec).*")
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators"):
        logging.getLogger(name).setLevel(logging.WARNING)

    generator = torch.Generator().manual_seed(0)
    waves = [make_sequence(place % 2, generator) for place in range(options.sequences)]
    L.seed_everything(0, verbose=False)
    monitor = PerSampleGradientMonitor(every_n_steps=1)
    trainer = L.Trainer(
        max_epochs=options.epochs, callbacks=[monitor], accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(WaveClassifier(), DataLoader(waves, batch_size=32, shuffle=True, collate_fn=pack))

    steps = torch.tensor([len(wave) for wave, _ in waves])
    hard = steps[list(monitor.worst(options.sequences // 10).index)]
    print(f"gradient norms of every parameter: coverage {trainer.callback_metrics['per_sample_grad/coverage']:.0%}")
    print(f"mean length of the tenth with the largest norms: {hard.double().mean():.0f} steps, of all: "
          f"{steps.double().mean():.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
