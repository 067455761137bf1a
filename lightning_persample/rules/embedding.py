"""Table look-ups."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import Indexed
from lightning_persample.rules.elementwise import widen
from lightning_persample.rules.registry import Call, register_rule

_SUM, _MEAN, _MAX = range(3)


@register_rule(
    torch.embedding,
    arguments=("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse"),
    batched=("indices",),
    weights=("weight",),
)
def embedding(call: Call, grad_output: Tensor) -> dict[str, Indexed]:
    """``y_t = W[index_t]``: dW = sum_t onehot(index_t) (x) g_t; grad_output (B, *t, d)."""
    # The row `padding_idx` gets no gradient (the primitive's -1 means that there is no such row). With
    # `scale_grad_by_freq` each position is divided by how often its index occurs WITHIN THE SAMPLE, which is what a
    # loop over single samples gives; the batch gradient divides by the count in the whole batch instead, so the per-
    # sample gradients do not add up to it. `sparse` changes the layout of the batch gradient only, not a value.
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


@register_rule(
    torch.embedding_bag,
    arguments=(
        *("weight", "indices", "offsets", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights"),
        *("include_last_offset", "padding_idx"),
    ),
    batched=("indices", "offsets", "per_sample_weights"),
    weights=("weight",),
    reads=("indices", "per_sample_weights"),
    per_sample=("indices", "per_sample_weights"),
)
def embedding_bag(call: Call, grad_output: Tensor) -> dict[str, Indexed]:
    """``y = sum_t a_t W[index_t]`` over a sample's bag: dW = sum_t onehot(index_t) (x) a_t g; grad_output (B, 1, d)."""
    # a_t is the position's weight for a sum, one over the number of positions that count for a mean; for a maximum,
    # entry j of g goes to the position whose row is largest there. Rows `padding_idx` do not count.
    table = call.arguments["weight"]
    sizes = f" on a table of shape {tuple(table.shape)}, {call.batch_size} samples"
    if call.get("scale_grad_by_freq", False):
        raise UnsupportedError(
            f"`embedding_bag` with scale_grad_by_freq{sizes}: torch divides its gradient by the counts of other "
            "indices than documented, so that there is no right value; use nn.Embedding with scale_grad_by_freq and sum"
        )
    if grad_output.shape[1] != 1:
        raise UnsupportedError(
            f"`embedding_bag` has {grad_output.shape[1]} bags to a sample{sizes}; give it the bags of one sample as "
            "one, or use nn.Embedding and sum"
        )
    num_rows, width = table.shape
    index = call.arguments["indices"].long()
    grad = widen(grad_output)
    counts = call.counts.get("indices")
    counted = torch.ones_like(index, dtype=torch.bool)
    if counts is not None:
        counted = torch.arange(index.shape[1], device=index.device)[None] < counts.to(index.device)[:, None]
    padding_idx = call.get("padding_idx")
    if padding_idx is not None and padding_idx >= 0:
        counted = counted & (index != padding_idx)
    mode = call.get("mode", _SUM)
    if mode == _MAX:
        rows = widen(table)[index].masked_fill(~counted[..., None], -torch.inf)
        empty = ~counted.any(1)
        index = index.gather(1, rows.argmax(1)) if index.shape[1] else index.new_zeros(len(index), width)
        right = torch.diag_embed(grad.flatten(1).masked_fill(empty[:, None], 0))
        return {"weight": Indexed(index, right, num_rows)}
    share = counted.to(grad.dtype)
    if mode == _MEAN:
        share = share / share.sum(1, keepdim=True).clamp_min(1)
    elif call.get("per_sample_weights") is not None:
        share = share * call.arguments["per_sample_weights"].to(grad.dtype)
    return {"weight": Indexed(index, share[..., None] * grad, num_rows)}


def _occurrences(index: Tensor, num_rows: int) -> Tensor:
    """How often each entry of index (B, T) occurs in its own row, (B, T)."""
    row = torch.arange(index.shape[0], device=index.device).unsqueeze(-1)
    _, inverse, counts = torch.unique(row * num_rows + index, return_inverse=True, return_counts=True)
    return counts[inverse]
