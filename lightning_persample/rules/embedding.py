"""Table look-ups."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_persample.gradients import Indexed
from lightning_persample.rules.elementwise import widen
from lightning_persample.rules.registry import Call, register_rule

__all__ = ["embedding"]


@register_rule(
    torch.embedding,
    arguments=("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse"),
    batched=("indices",),
    weights=("weight",),
)
def embedding(call: Call, grad_output: Tensor) -> dict[str, Indexed]:
    """``y_t = W[index_t]``: dW = sum_t onehot(index_t) (x) g_t.

    The row `padding_idx` gets no gradient (the primitive's -1 means that there is no such row). With
    `scale_grad_by_freq` each position is divided by how often its index occurs WITHIN THE SAMPLE, which is what a loop
    over single samples gives; the batch gradient divides by the count in the whole batch instead, so the per-sample
    gradients do not add up to it. `sparse` changes the layout of the batch gradient only, not a value.

    Args:
        call: weight (num_rows, d); indices (B, *t), int32 or int64.
        grad_output: (B, *t, d).

    Returns:
        weight: `Indexed`, with index (B, T) and right (B, T, d).
    """
    if "weight" not in call.weights:
        return {}
    num_rows = call.arguments["weight"].shape[0]
    index = call.arguments["indices"].flatten(1).long()
    right = grad_output.flatten(1, -2)
    if call.get("scale_grad_by_freq", False):
        right = widen(right) / _occurrences(index, num_rows).unsqueeze(-1)
    padding_idx = call.get("padding_idx", -1)
    if padding_idx >= 0:
        right = right.masked_fill((index == padding_idx).unsqueeze(-1), 0)
    return {"weight": Indexed(index, right, num_rows)}


def _occurrences(index: Tensor, num_rows: int) -> Tensor:
    """How often each entry of index (B, T) occurs in its own row, (B, T)."""
    row = torch.arange(index.shape[0], device=index.device).unsqueeze(-1)
    _, inverse, counts = torch.unique(row * num_rows + index, return_inverse=True, return_counts=True)
    occurrences: Tensor = counts[inverse]
    return occurrences
