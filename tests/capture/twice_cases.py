"""One parameter given to one call more than once; added to the cases that every test of exactness runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.model_cases import Model, case, parameter, sequences, vectors


def tied(layer: nn.Module) -> nn.Module:
    layer.weight_hh_l0 = layer.weight_ih_l0
    layer.bias_hh_l0 = layer.bias_ih_l0
    return layer


TWICE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "scale-and-shift-of-layer-norm": lambda m, x: F.layer_norm(m.a(x), (4,), m.w, m.w).pow(3),
    "scale-and-shift-of-group-norm": lambda m, x: F.group_norm(m.a(x)[..., None], 2, m.w, m.w).pow(3),
    "both-factors": lambda m, x: torch.addcmul(m.a(x), m.w, m.w),
    "both-ends": lambda m, x: m.a(x).clamp(m.w, m.w + m.w.exp()).square() + m.w.lerp(m.w, m.a(x)),
    "weight-and-bias": lambda m, x: (
        F.linear(m.a(x), m.square, m.square[0]) + torch.addmm(m.square[:1], m.a(x), m.square)
    ),
    "keys-and-values": lambda m, x: F.scaled_dot_product_attention(m.a(x)[:, None], m.table, m.table),
    "branches": lambda m, x: torch.where(m.a(x) > 0, m.w, m.w * 2) + torch.where(m.a(x) > 0, m.w, m.w),
}
for name, function in TWICE.items():
    case(
        f"twice-in-a-call-{name}",
        lambda function=function: Model(
            function, a=nn.Linear(6, 4), w=parameter(4), table=parameter(1, 3, 4), square=parameter(4, 4)
        ),
        vectors,
    )
for layer in (nn.RNN, nn.GRU, nn.LSTM):
    case(
        f"twice-in-a-call-{layer.__name__.lower()}",
        lambda layer=layer: Model(lambda m, x: m.a(x)[0], a=tied(layer(6, 6, batch_first=True))),
        sequences,
    )
