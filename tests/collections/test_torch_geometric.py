"""Graph networks of torch_geometric on a batch of graphs, with losses of graphs and of nodes."""

from __future__ import annotations

from collections.abc import Callable
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
        ring = torch.cat([ring, torch.stack([torch.zeros(nodes - 4).long(), torch.arange(2, nodes - 2)])], 1)
        x, y = torch.randn(nodes, D, dtype=torch.float64), torch.randn(1, 2, dtype=torch.float64)
        made.append(Data(x=x, edge_index=torch.cat([ring, ring.flip(0)], 1), y=y))
    return made


class Network(nn.Module):
    """Two layers of messages, and a head for what a mean over each graph's nodes, or each node, is to be."""

    def __init__(self, layer: Callable[[], nn.Module], pooled: bool = True) -> None:
        super().__init__()
        self.layers, self.head, self.pooled = nn.ModuleList(layer() for _ in range(2)), nn.Linear(D, 2), pooled

    def forward(self, data: Any) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        h = data.x
        for layer in self.layers:
            h = layer(h, data.edge_index).tanh()
        return self.head(global_mean_pool(h, data.batch) if self.pooled else h)


class Pooled(nn.Module):
    """One layer of messages, then `pool`, a function of the nodes and the batch, or a module."""

    def __init__(self, pool: Callable[[], Any], width: int = D) -> None:
        from torch_geometric.nn import GCNConv

        super().__init__()
        self.layer, self.head, self.pool = GCNConv(D, D), nn.Linear(width, 2), pool()

    def forward(self, data: Any) -> Tensor:
        return self.head(self.pool(self.layer(data.x, data.edge_index).sigmoid(), data))


def trial(build: Callable[[], nn.Module], *, of_nodes: bool = False) -> Trial:
    from torch_geometric.data import Batch

    module, made = build().double(), graphs()
    counts = torch.tensor([graph.num_nodes for graph in made]).double()
    singles = [Batch.from_data_list([graph]) for graph in made]

    def loss(module: nn.Module, data: Any) -> Tensor:
        return F.mse_loss(module(data), data.x[:, :2].sin() if of_nodes else data.y)

    share = (lambda batch: counts / counts.sum()) if of_nodes else None
    return Trial(module, Batch.from_data_list(made), loss, share, singles=singles)


def layer(name: str, *args: Any, **options: Any) -> list[Case]:
    """A layer under a loss of graphs and under one of nodes."""

    def build() -> nn.Module:
        import torch_geometric.nn

        return getattr(torch_geometric.nn, name)(*(args or (D, D)), **options)

    def linear() -> nn.Module:
        import torch_geometric.nn

        inner = nn.Sequential(nn.Linear(2 * D if name == "EdgeConv" else D, D), nn.ReLU())
        return getattr(torch_geometric.nn, name)(inner, **options)

    made = linear if name in ("GINConv", "EdgeConv") else build
    title = "-".join([name, *map(str, options.values())])
    return [
        Case(f"{title}-{'nodes' if of_nodes else 'graphs'}", lambda each=of_nodes: trial(
            lambda: Network(made, pooled=not each), of_nodes=each
        ))
        for of_nodes in (False, True)
    ]  # fmt: skip


def pool(name: str, *args: Any, named: str | None = None, width: int = D, **options: Any) -> Case:
    def build() -> Callable[[Tensor, Any], Tensor]:
        import torch_geometric.nn

        return OnNodes(getattr(torch_geometric.nn, name)(*args, **options))

    return Case(name, lambda: trial(lambda: Pooled(build, width)), named)


class OnNodes(nn.Module):
    """A norm or a pool of torch_geometric; what it leaves of the nodes is added up."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor, data: Any) -> Tensor:
        from torch_geometric.nn import global_add_pool

        if hasattr(self.inner, "select"):
            h, _, _, owner, *_ = self.inner(h, data.edge_index, None, data.batch)
            return global_add_pool(h, owner)
        out = self.inner(h, data.batch)
        return global_add_pool(out.square(), data.batch) if len(out) == len(h) else out


def convolved_after_topk() -> Callable[[Tensor, Any], Tensor]:
    from torch_geometric.nn import GraphConv, TopKPooling, global_mean_pool

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.topk, self.layer = TopKPooling(D, 0.5), GraphConv(D, D)

        def forward(self, h: Tensor, data: Any) -> Tensor:
            h, edges, _, owner, *_ = self.topk(h, data.edge_index, None, data.batch)
            return global_mean_pool(self.layer(h, edges).tanh(), owner)

    return Both()


def chebyshev() -> Callable[[Tensor, Any], Tensor]:
    """Scales the Laplacian by a maximum over the whole batch."""
    from torch_geometric.nn import ChebConv, global_mean_pool

    class Chebyshev(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = ChebConv(D, D, 2, normalization=None)

        def forward(self, h: Tensor, data: Any) -> Tensor:
            return global_mean_pool(self.layer(h, data.edge_index, None, data.batch).tanh(), data.batch)

    return Chebyshev()


def dense_attention() -> Callable[[Tensor, Any], Tensor]:
    """Attention among the nodes of each graph, padded by `to_dense_batch`."""
    from torch_geometric.utils import to_dense_batch

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, h: Tensor, data: Any) -> Tensor:
            rows, mask = to_dense_batch(h, data.batch)
            score = (self.q(rows) @ self.k(rows).mT).masked_fill(~mask[:, None], -torch.inf).softmax(-1)
            return ((score @ rows) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    return Attention()


CASES = [
    *(each for name in ("GCNConv", "SAGEConv", "GATConv", "GATv2Conv", "GINConv", "GraphConv") for each in layer(name)),
    *(each for name in ("TransformerConv", "TAGConv", "ARMAConv", "LEConv", "EdgeConv") for each in layer(name)),
    *layer("SAGEConv", aggr="max"),
    *layer("GATConv", D, D // 2, heads=2),
    *layer("PNAConv", D, D, ["mean", "max", "std"], ["identity", "amplification"], deg=torch.tensor([0, 1, 9])),
    *(pool(name, D) for name in ("GraphNorm", "InstanceNorm", "LayerNorm")),
    pool("TopKPooling", D, ratio=0.5),
    pool("SAGPooling", D, ratio=0.5),
    pool("SoftmaxAggregation", learn=True),
    pool("SetTransformerAggregation", D, heads=2),
    pool("GRUAggregation", D, D, named="`setitem` leaves room for rows that a sample of the batch does not have"),
    Case("TopKPooling-GraphConv", lambda: trial(lambda: Pooled(convolved_after_topk))),
    Case("to_dense_batch", lambda: trial(lambda: Pooled(dense_attention))),
    Case("ChebConv", lambda: trial(lambda: Pooled(chebyshev)), named="combines samples with a value computed over"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_batches_of_graphs(case):
    needs("torch_geometric")
    check(case)
