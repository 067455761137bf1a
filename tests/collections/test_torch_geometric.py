"""Graph networks of torch_geometric on a batch of graphs: rows of no sample are named until they are followed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.collections.comparison import Case, Trial, check, needs

D = 6  # features of a node


def graphs() -> list[Any]:
    from torch_geometric.data import Data

    made = []
    for nodes in (4, 5, 7):
        ring = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
        x, y = torch.randn(nodes, D, dtype=torch.float64), torch.randn(1, 2, dtype=torch.float64)
        made.append(Data(x=x, edge_index=torch.cat([ring, ring.flip(0)], 1), y=y))
    return made


class Network(nn.Module):
    """Two graph convolutions and a mean over each graph's nodes."""

    def __init__(self, name: str, **options: Any) -> None:
        import torch_geometric.nn

        super().__init__()
        layer = getattr(torch_geometric.nn, name)
        if name == "GINConv":
            self.layers = nn.ModuleList(layer(nn.Sequential(nn.Linear(D, D), nn.ReLU())) for _ in range(2))
        else:
            self.layers = nn.ModuleList(layer(D, D, **options) for _ in range(2))
        self.head = nn.Linear(D, 2)

    def forward(self, data: Any) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        h = data.x
        for layer in self.layers:
            h = layer(h, data.edge_index).tanh()
        return self.head(global_mean_pool(h, data.batch))


def network(name: str, **options: Any) -> Trial:
    from torch_geometric.data import Batch

    module, made = Network(name, **options).double(), graphs()
    singles = [Batch.from_data_list([graph]) for graph in made]
    return Trial(module, Batch.from_data_list(made), lambda m, data: F.mse_loss(m(data), data.y), singles=singles)


def case(name: str, **options: Any) -> Case:
    return Case(name, lambda: network(name, **options))


CASES = [
    case("GCNConv"),
    case("SAGEConv"),
    case("GATConv"),
    case("GATv2Conv"),
    case("GINConv"),
    case("GraphConv"),
    case("TransformerConv"),
    case("TAGConv"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_batches_of_graphs(case):
    needs("torch_geometric")
    check(case)
