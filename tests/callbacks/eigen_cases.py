"""Small classifiers of one layer and a head, and what hooks and one-sample autograd see of them, in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

COUNT = 11


class Pooled(nn.Module):
    """A layer, its positions averaged, and classes."""

    def __init__(self, layer: nn.Module, features: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = layer, nn.Linear(features, 3)
        self.double()

    def forward(self, inputs):
        out = self.layer(inputs)
        out = out.flatten(2).mean(2) if out.dim() == inputs.dim() > 3 else out if out.dim() == 2 else out.mean(1)
        return self.head(torch.tanh(out))


def loss_of(module, batch):
    return F.cross_entropy(module(batch[0]), batch[1])


def data(*shape: int, tokens: int | None = None) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(COUNT, *shape, generator=generator, dtype=torch.float64)
    if tokens is not None:
        inputs = torch.randint(0, tokens, (COUNT, *shape), generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (COUNT,), generator=generator))


def sample_grads(module, dataset):
    rows = []
    for inputs, label in dataset:
        loss = loss_of(module, (inputs[None], label[None]))
        grads = torch.autograd.grad(loss, list(module.parameters()))
        rows.append(dict(zip(dict(module.named_parameters()), grads, strict=True)))
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def sides(module, layer, dataset):
    """Inputs and output gradients of a layer, sample by sample."""
    seen = []

    def see(_, inputs, out):
        out.retain_grad()
        seen.append((inputs[0], out))

    hook = layer.register_forward_hook(see)
    for inputs, label in dataset:
        loss_of(module, (inputs[None], label[None])).backward()
    hook.remove()
    module.zero_grad()
    return [(x.detach(), out.grad) for x, out in seen]


def span(rows):
    return rows.T @ rows


def unfolded(conv, x):
    """Patches as rows of a linear map, (N, C K / groups), those of all groups together."""
    size = {"kernel_size": conv.kernel_size, "dilation": conv.dilation, "padding": conv.padding, "stride": conv.stride}
    return torch.cat([F.unfold(part, **size)[0].T for part in x.chunk(conv.groups, 1)])


CASES = {
    "linear": (lambda: nn.Linear(5, 4), 4, (5,), lambda layer, x: x.flatten(0, -2)),
    "linear-positions": (lambda: nn.Linear(5, 4), 4, (3, 5), lambda layer, x: x.flatten(0, -2)),
    "linear-no-bias": (lambda: nn.Linear(5, 4, bias=False), 4, (3, 5), lambda layer, x: x.flatten(0, -2)),
    "conv": (lambda: nn.Conv2d(2, 4, 3), 4, (2, 6, 5), unfolded),
    "conv-stride-dilation": (lambda: nn.Conv2d(2, 4, (2, 3), (2, 1), (1, 0), (1, 2)), 4, (2, 6, 7), unfolded),
    "conv-groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), 6, (4, 4, 3), unfolded),
}


def seen_by(case: str):
    """Of a case the module, the data, and the layer's sides: output gradients (N, p) and inputs with ones (N, d)."""
    make, features, shape, rows_of = CASES[case]
    layer = make()
    module, dataset = Pooled(layer, features), data(*shape)
    seen = sides(module, layer, dataset)
    right = torch.cat([rows_of(layer, x) for x, _ in seen])
    left = torch.cat([g.flatten(2)[0].T if g.dim() == 4 else g.flatten(0, -2) for _, g in seen])
    if layer.bias is not None:
        right = torch.cat([right, torch.ones(len(right), 1, dtype=torch.float64)], 1)
    return module, dataset, left, right


def with_bias(grads: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The gradients of a layer as matrices, the bias a further column, (n, p, d + 1)."""
    weight, bias = grads[f"{name}.weight"].flatten(2), grads.get(f"{name}.bias")
    return weight if bias is None else torch.cat([weight, bias[:, :, None]], 2)
