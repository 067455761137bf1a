"""Every option of recurrent layers, of cells and of bags of embeddings, added to the cases of `model_cases`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.model_cases import Model, T, bags_of, case, parameter, sequences, tokens, uneven_bags
from tests.capture.sequence_cases import RECURRENT, from_learned_state, outputs_only

# Options of recurrent layers that few models use ----------------------------------------------------------------------

SUBSETS = {"inputs": ("_ih",), "recurrence": ("_hh",), "matrices": ("weight_",), "biases": ("bias_",)}


def only(subset: tuple[str, ...], layer: nn.Module) -> nn.Module:
    """The layer with all parameters frozen but those of which the name holds one of the texts."""
    for name, p in layer.named_parameters():
        p.requires_grad_(any(text in name for text in subset))
    return layer


def from_both_learned_states(m: Any, x: Tensor) -> Tensor:
    state, cell = (part.expand(-1, len(x), -1).contiguous() for part in (m.h, m.c))
    return m.a(x, (state, cell))[0]


def from_learned_cell_state(m: Any, x: Tensor) -> Tensor:
    cell = m.c.expand(-1, len(x), -1).contiguous()
    return m.a(x, (torch.zeros_like(cell), cell))[0]


def from_state_of_sample(m: Any, x: Tensor) -> Tensor:
    state = m.h(x[:, 0])[None]
    return m.a(x, (state, state.tanh()) if isinstance(m.a, nn.LSTM) else state)[0]


def over_shared_steps(m: Any, x: Tensor) -> Tensor:
    """The steps are the same for all samples, which differ by the state that they begin with."""
    x = m.h(x) if hasattr(m, "h") else x
    state = x[:, :1, : m.a.proj_size or m.a.hidden_size].transpose(0, 1).contiguous()
    cell = x[:, 1:2, : m.a.hidden_size].transpose(0, 1).contiguous()
    return m.a(m.e.expand(len(x), -1, -1), (state, cell) if isinstance(m.a, nn.LSTM) else state)[0]


def packed_equal(m: Any, x: Tensor) -> Tensor:
    """All sequences are equally long."""
    packed, _ = m.a(nn.utils.rnn.pack_padded_sequence(x, [T] * len(x), batch_first=True))
    return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0]


def on_rows(m: Any, x: Tensor) -> Tensor:
    """Several short sequences to a sample."""
    return m.a(x.reshape(-1, 2, 3))[0].reshape(len(x), -1)


def on_rows_time_first(m: Any, x: Tensor) -> Tensor:
    return m.a(x.reshape(-1, 2, 3).transpose(0, 1))[0].transpose(0, 1).reshape(len(x), -1)


for kind, layer in RECURRENT.items():
    subsets = {**SUBSETS, "projection": ("_hr",)} if kind == "lstm-projected" else SUBSETS
    for name, subset in subsets.items():
        case(
            f"{kind}-only-{name}",
            lambda layer=layer, subset=subset: Model(outputs_only, a=only(subset, layer(6, 4, batch_first=True))),
            sequences,
        )
    case(
        f"{kind}-over-shared-steps",
        lambda layer=layer: Model(
            over_shared_steps, a=layer(6, 4, batch_first=True), e=parameter(T, 6), h=nn.Linear(6, 6)
        ),
        sequences,
    )
    for name, subset in {**subsets, "steps": ()}.items():
        case(
            f"{kind}-over-shared-steps-and-{name}",
            lambda layer=layer, subset=subset: Model(
                over_shared_steps, a=only(subset, layer(6, 4, batch_first=True)), e=parameter(T, 6)
            ),
            sequences,
        )
    case(
        f"{kind}-evaluated-with-dropout",
        lambda layer=layer: Model(outputs_only, a=layer(6, 4, 2, dropout=0.5, batch_first=True)).eval(),
        sequences,
    )
    case(
        f"{kind}-above-a-layer",
        lambda layer=layer: Model(lambda m, x: m.a(m.b(x))[0], a=layer(3, 4, batch_first=True), b=nn.Linear(6, 3)),
        sequences,
    )
    case(f"{kind}-packed-equal", lambda layer=layer: Model(packed_equal, a=layer(6, 4, batch_first=True)), sequences)
    case(f"{kind}-on-rows", lambda layer=layer: Model(on_rows, a=layer(3, 4, batch_first=True)), sequences)
    case(f"{kind}-on-rows-time-first", lambda layer=layer: Model(on_rows_time_first, a=layer(3, 4)), sequences)
    if kind == "lstm-projected":
        continue
    case(
        f"{kind}-only-learned-state",
        lambda layer=layer: Model(from_learned_state, a=only((), layer(6, 4, batch_first=True)), h=parameter(1, 1, 4)),
        sequences,
    )
    case(
        f"{kind}-state-of-sample",
        lambda layer=layer: Model(from_state_of_sample, a=layer(6, 4, batch_first=True), h=nn.Linear(6, 4)),
        sequences,
    )
case("rnn-relu-learned-state", lambda: Model(from_learned_state, a=nn.RNN(6, 4, nonlinearity="relu", batch_first=True),
     h=parameter(1, 1, 4)), sequences)  # fmt: skip
for name, subset in (("learned-states", ("_",)), ("only-learned-states", ())):
    case(
        f"lstm-projected-{name}",
        lambda subset=subset: Model(
            from_both_learned_states,
            a=only(subset, nn.LSTM(6, 4, proj_size=2, batch_first=True)),
            h=parameter(1, 1, 2),
            c=parameter(1, 1, 4),
        ),
        sequences,
    )
case(
    "lstm-learned-cell-state",
    lambda: Model(from_learned_cell_state, a=nn.LSTM(6, 4, batch_first=True), c=parameter(1, 1, 4)),
    sequences,
)

# Cells ----------------------------------------------------------------------------------------------------------------

CELLS: dict[str, Callable[..., nn.Module]] = {
    "rnn-cell": nn.RNNCell,
    "rnn-relu-cell": partial(nn.RNNCell, nonlinearity="relu"),
    "gru-cell": nn.GRUCell,
    "lstm-cell": nn.LSTMCell,
}


def state_of(step: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return torch.cat(step, 1) if isinstance(step, tuple) else step


def two_steps(m: Any, x: Tensor) -> Tensor:
    return state_of(m.a(x[:, 1], m.a(x[:, 0])))


def two_cells(m: Any, x: Tensor) -> Tensor:
    lower = m.a(x[:, 0])
    return state_of(m.b(lower[0] if isinstance(lower, tuple) else lower))


def cell_on_rows(m: Any, x: Tensor) -> Tensor:
    return state_of(m.a(x.reshape(-1, 3))).reshape(len(x), -1)


def cell_from_learned_state(m: Any, x: Tensor) -> Tensor:
    state = m.h.expand(len(x), -1)
    return state_of(m.a(x[:, 1], (state, state * 2) if isinstance(m.a, nn.LSTMCell) else state))


for kind, cell in CELLS.items():
    case(f"{kind}-two-steps", lambda cell=cell: Model(two_steps, a=cell(6, 4)), sequences)
    if kind != "lstm-cell":  # the case of that name has none
        case(f"{kind}-no-bias", lambda cell=cell: Model(two_steps, a=cell(6, 4, bias=False)), sequences)
    case(f"{kind}-two-cells", lambda cell=cell: Model(two_cells, a=cell(6, 4), b=cell(4, 3)), sequences)
    case(f"{kind}-on-rows", lambda cell=cell: Model(cell_on_rows, a=cell(3, 4)), sequences)
    for name, subset in SUBSETS.items():
        case(
            f"{kind}-only-{name}",
            lambda cell=cell, subset=subset: Model(two_steps, a=only(subset, cell(6, 4))),
            sequences,
        )
    for name, subset in (("learned-state", ("_",)), ("only-learned-state", ())):
        case(
            f"{kind}-{name}",
            lambda cell=cell, subset=subset: Model(
                cell_from_learned_state, a=only(subset, cell(6, 4)), h=parameter(1, 4)
            ),
            sequences,
        )

# Bags of embeddings ---------------------------------------------------------------------------------------------------


def bags_ended_by_the_last_offset(m: Any, x: Tensor) -> Tensor:
    return m.e(x.flatten(), torch.arange(0, x.numel() + 1, x.shape[1]))


def bags_some_empty(m: Any, x: Tensor) -> Tensor:
    lengths = (x[:, 0] - 3).clamp(min=0, max=T)
    kept = torch.arange(T) < lengths[:, None]
    return m.e(x[kept], lengths.cumsum(0) - lengths)


def weighted_by_token(m: Any, x: Tensor) -> Tensor:
    return m.e(x, per_sample_weights=m.w[x])


def weighted_uneven(m: Any, x: Tensor) -> Tensor:
    tokens_in_a_row, offsets = bags_of(x)
    return m.e(tokens_in_a_row, offsets, tokens_in_a_row.to(m.e.weight.dtype))


for mode in ("sum", "mean", "max"):
    bag = partial(nn.EmbeddingBag, 9, 4, mode=mode)
    case(
        f"embedding-bag-{mode}-last-offset",
        lambda bag=bag: Model(bags_ended_by_the_last_offset, e=bag(include_last_offset=True)),
        tokens,
    )
    case(f"embedding-bag-{mode}-some-empty", lambda bag=bag: Model(bags_some_empty, e=bag()), tokens)
    case(f"embedding-bag-{mode}-int32", lambda bag=bag: Model(lambda m, x: m.e(x.int()), e=bag()), tokens)
    case(f"embedding-bag-{mode}-max-norm", lambda bag=bag: Model(lambda m, x: m.e(x), e=bag(max_norm=1.0)), tokens)
    if mode != "max":
        case(f"embedding-bag-{mode}-sparse", lambda bag=bag: Model(uneven_bags, e=bag(sparse=True)), tokens)
bag = partial(nn.EmbeddingBag, 9, 6, mode="sum")
case("embedding-bag-weighted-uneven", lambda: Model(weighted_uneven, e=bag(padding_idx=3)), tokens)
case("embedding-bag-weights-learned", lambda: Model(weighted_by_token, e=bag(), w=parameter(9)), tokens)
case(
    "embedding-bag-frozen",
    lambda: Model(lambda m, x: m.a(m.e(x)), e=bag().requires_grad_(False), a=nn.Linear(6, 4)),
    tokens,
)
