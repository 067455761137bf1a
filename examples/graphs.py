"""Train a graph network of torch_geometric on generated graphs, a tenth of them with a wrong label, and find these."""

import argparse
import logging
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_mean_pool

from lightning_persample import PerSampleGradientMonitor

KINDS = ("ring", "star")


def make_graph(kind: str, generator: torch.Generator) -> Data:
    """A ring or a star of 5 to 20 nodes with a few further edges, and random numbers at its nodes."""
    nodes = int(torch.randint(5, 21, (1,), generator=generator))
    number = torch.arange(nodes)
    other = (number + 1) % nodes if kind == "ring" else torch.zeros_like(number)
    extra = torch.randint(nodes, (2, nodes // 4), generator=generator)
    edges = torch.cat([torch.stack([number, other]), extra], 1)
    return Data(
        x=torch.randn(nodes, 4, generator=generator),
        edge_index=torch.cat([edges, edges.flip(0)], 1),
        y=torch.tensor([KINDS.index(kind)]),
    )


class GraphClassifier(L.LightningModule):
    """Two rounds of message passing and a mean over the nodes of each graph; nothing of it knows of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.first = GINConv(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32)))
        self.second = GINConv(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)))
        self.head = nn.Linear(32, len(KINDS))

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        h = self.first(batch.x, batch.edge_index).relu()
        h = self.second(h, batch.edge_index).relu()
        loss = F.cross_entropy(self.head(global_mean_pool(h, batch.batch)), batch.y)
        self.log("train_loss", loss, batch_size=batch.num_graphs)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--graphs", type=int, default=500)
    arguments.add_argument("--epochs", type=int, default=8)
    options = arguments.parse_args()
    warnings.filterwarnings("ignore", ".*(does not have many workers|treespec).*")
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators"):
        logging.getLogger(name).setLevel(logging.WARNING)

    generator = torch.Generator().manual_seed(0)
    graphs = [make_graph(KINDS[place % 2], generator) for place in range(options.graphs)]
    flipped = torch.randperm(len(graphs), generator=generator)[: len(graphs) // 10].tolist()
    for place in flipped:
        graphs[place].y = 1 - graphs[place].y

    L.seed_everything(0, verbose=False)
    monitor = PerSampleGradientMonitor(every_n_steps=1)
    trainer = L.Trainer(
        max_epochs=options.epochs, callbacks=[monitor], accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(GraphClassifier(), DataLoader(graphs, batch_size=32, shuffle=True))

    worst = monitor.worst(len(flipped))
    found = len(set(worst.index) & set(flipped))
    print(f"gradient norms of every parameter: coverage {trainer.callback_metrics['per_sample_grad/coverage']:.0%}")
    print(f"of the {len(flipped)} graphs with the largest norms, {found} have a wrong label ({len(flipped)} of all do)")


if __name__ == "__main__":
    main()
