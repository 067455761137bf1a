"""Train for thousands of steps with a capture at every step: memory, open files and hooks must stay as they are.

    python -m tests.benchmarks.soak [--steps 3000] [--way automatic|manual]

Prints a row for every tenth of the run and ends with exit status 1 if something grew after the first fifth: resident
memory by more than `MEMORY` bytes, or open files, hooks, tensors, modes or warnings at all. Linux alone has /proc.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_persample import PerSampleCallback, PerSampleGradientMonitor
from lightning_persample.errors import PerSampleWarning

BATCH, FEATURES, CLASSES = 16, 20, 5
MEMORY = 4 * 2**20
HEADER = ("step", "seconds", "resident MB", "files", "hooks", "tensors", "modes", "warnings")


class Network(nn.Module):
    """Layers with rules of several kinds, and a weight that is derived and used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 32)
        self.norm = nn.LayerNorm(32)
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.gru = nn.GRU(4, 8, batch_first=True)
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm(self.first(x)), inplace=True)
        h, _ = self.gru(self.conv(h[:, None]).transpose(1, 2))
        return self.head(torch.tanh(self.last(self.last(h[:, -1]))))


class Trained(L.LightningModule):
    """Cross entropy with Adam; in manual optimization two backward passes before each step."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.network = Network()
        self.automatic_optimization = not manual

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.network(inputs), labels)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        if self.automatic_optimization:
            return self.loss(inputs, labels)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(inputs, labels))
        self.loss(-inputs, labels).backward()
        return optimizer.step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


class WantsGradients(PerSampleCallback):
    """Lets every quantity be computed."""

    def needs(self, trainer):
        return {"sq_norm", "grad_sample"}

    def on_per_sample_gradients(self, trainer, pl_module, record, batch, batch_idx):
        if record.coverage < 1 or not bool(record.norms().isfinite().all()):
            raise AssertionError(f"coverage {record.coverage}, {dict(record.unsupported)}")


class Watches(L.Callback):
    """Measures the process ten times."""

    def __init__(self, steps: int, said: list) -> None:
        self.every = max(1, steps // 10)
        self.said = said
        self.start = time.perf_counter()
        self.rows: list[tuple[float, ...]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        step = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        if step % self.every:
            return
        gc.collect()
        row = (
            step,
            time.perf_counter() - self.start,
            resident_bytes() / 2**20,
            len(os.listdir("/proc/self/fd")),
            hooks_in(pl_module),
            sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),
            len(torch.overrides._get_current_function_mode_stack()),
            sum(issubclass(each.category, PerSampleWarning) for each in self.said),
        )
        self.rows.append(row)
        cells = (f"{value:.1f}" if isinstance(value, float) else str(value) for value in row)
        print("".join(cell.rjust(12) for cell in cells), flush=True)


def resident_bytes() -> int:
    """VmRSS of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def hooks_in(module: nn.Module) -> int:
    """Hooks on parameters and modules."""
    of_parameters = sum(
        len(parameter._backward_hooks or {}) + len(parameter._post_accumulate_grad_hooks or {})
        for parameter in module.parameters()
    )
    of_modules = sum(
        len(value) for part in module.modules() for name, value in vars(part).items() if name.endswith("_hooks")
    )
    return of_parameters + of_modules


def main() -> int:
    """Run, and tell what grew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--way", choices=("automatic", "manual"), default="automatic")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(50 * BATCH, FEATURES), torch.randint(0, CLASSES, (50 * BATCH,)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", PerSampleWarning)
        watches = Watches(options.steps, said)
        trainer = L.Trainer(
            accelerator="cpu", devices=1, max_epochs=-1 if options.way == "automatic" else options.steps // 50,
            max_steps=options.steps if options.way == "automatic" else -1, log_every_n_steps=1, logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            callbacks=[PerSampleGradientMonitor(1, per_layer=2), WantsGradients(1), watches],
        )  # fmt: skip
        print("".join(name.rjust(12) for name in HEADER), flush=True)
        trainer.fit(Trained(options.way == "manual"), DataLoader(data, BATCH, shuffle=True))
    warm, last = watches.rows[len(watches.rows) // 5], watches.rows[-1]
    grown = [name for name, before, after in zip(HEADER[3:], warm[3:], last[3:], strict=True) if after > before]
    if (last[2] - warm[2]) * 2**20 > MEMORY:
        grown.append(HEADER[2])
    print(f"grown after step {warm[0]}: {', '.join(grown) or 'nothing'}; memory by {last[2] - warm[2]:+.1f} MB")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
