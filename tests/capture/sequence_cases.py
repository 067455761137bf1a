"""Attention and recurrent layers, added to the cases of `model_cases`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.model_cases import Model, T, case, mean_of_all, parameter, sequences, time_major, vectors
from tests.torch_release import OLDEST, RELEASE

# Sequences ------------------------------------------------------------------------------------------------------------


class HandWrittenRecurrence(nn.Module):
    """A recurrence that starts from zeros of the batch's size."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(6, 4)
        self.hidden = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 4)
        for step in range(x.shape[1]):
            state = torch.tanh(self.inputs(x[:, step]) + self.hidden(state))
        return state


def last_token(m: Any, x: Tensor) -> Tensor:
    lengths = (x[..., 0] > 0).sum(1).clamp(max=x.shape[1] - 1)
    return m.a(x)[torch.arange(len(x)), lengths]


def attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = (t.view(len(x), -1, 2, 3).transpose(1, 2) for t in m.a(x).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


if RELEASE > OLDEST:  # (before, a weight with one axis needs an input with two)
    case(
        "linear-vector",
        lambda: Model(lambda m, x: F.linear(x, m.w, m.b).tanh(), w=parameter(6), b=parameter()),
        sequences,
    )
    case(
        "linear-vector-frozen-time-major",
        lambda: Model(lambda m, x: F.linear(x, m.w, m.b).tanh(), w=parameter(6).requires_grad_(False), b=parameter()),
        time_major,
        loss=mean_of_all,
        options={"batch_dim": 1},
    )
case("recurrence-by-hand", HandWrittenRecurrence, sequences)
case("last-token", lambda: Model(last_token, a=nn.Linear(6, 4)), sequences)
case("first-token", lambda: Model(lambda m, x: m.b(m.a(x)[:, 0]), a=nn.Linear(6, 4), b=nn.Linear(4, 2)), sequences)
case("mean-pool", lambda: Model(lambda m, x: m.b(m.a(x).mean(1)), a=nn.Linear(6, 4), b=nn.Linear(4, 2)), sequences)
case("max-pool", lambda: Model(lambda m, x: m.b(m.a(x).max(1).values), a=nn.Linear(6, 4), b=nn.Linear(4, 2)), sequences)
case("attention", lambda: Model(attention, a=nn.Linear(6, 18)), sequences)
case(
    "learned-query",
    lambda: Model(lambda m, x: F.scaled_dot_product_attention(m.q, x, x), q=parameter(1, 2, 6)),
    sequences,
)
case(
    "learned-query-expanded",
    lambda: Model(lambda m, x: F.scaled_dot_product_attention(m.q.expand(len(x), -1, -1), x, x), q=parameter(1, 2, 6)),
    sequences,
)
case(
    "multihead-batch-first",
    lambda: Model(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(6, 2, batch_first=True)),
    sequences,
)
case(
    "multihead-time-first",
    lambda: Model(
        lambda m, x: m.a(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))[0].transpose(0, 1),
        a=nn.MultiheadAttention(6, 2),
    ),
    sequences,
)
case(
    "multihead-kdim-vdim-bias",
    lambda: Model(
        lambda m, x: m.a(x, x[..., :4], x[..., :3])[0],
        a=nn.MultiheadAttention(6, 2, kdim=4, vdim=3, add_bias_kv=True, batch_first=True),
    ),
    sequences,
)
case("transformer-encoder-layer", lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), sequences)
case(
    "transformer",
    lambda: Model(lambda m, x: m.a(x, x), a=nn.Transformer(6, 2, 1, 1, 8, dropout=0.0, batch_first=True)),
    sequences,
)

# Recurrent layers -----------------------------------------------------------------------------------------------------


def packed(m: Any, x: Tensor) -> Tensor:
    """Unequal and unsorted lengths, read off the samples themselves."""
    lengths = (x[..., 0] > 0).sum(1).clamp(min=1)
    sequence = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    output, state = m.a(sequence)
    padded, _ = nn.utils.rnn.pad_packed_sequence(output, batch_first=True, total_length=T)
    last = state[0] if isinstance(state, tuple) else state
    return torch.cat([padded.flatten(1), last.transpose(0, 1).flatten(1)], 1)


def from_learned_state(m: Any, x: Tensor) -> Tensor:
    state = m.h.expand(-1, len(x), -1).contiguous()
    return m.a(x, (state, state * 2) if isinstance(m.a, nn.LSTM) else state)[0]


def states_only(m: Any, x: Tensor) -> Tensor:
    _, state = m.a(x)
    return (state[1] if isinstance(state, tuple) else state).transpose(0, 1)


def outputs_only(m: Any, x: Tensor) -> Tensor:
    return m.a(x)[0]


def time_first(m: Any, x: Tensor) -> Tensor:
    return m.a(x.transpose(0, 1))[0].transpose(0, 1)


RECURRENT: dict[str, Callable[..., nn.Module]] = {
    "rnn": nn.RNN,
    "rnn-relu": partial(nn.RNN, nonlinearity="relu"),
    "gru": nn.GRU,
    "lstm": nn.LSTM,
    "lstm-projected": partial(nn.LSTM, proj_size=2),
}
LAYERS: dict[str, dict[str, Any]] = {
    "one-layer": {},
    "two-layers-both-ways": {"num_layers": 2, "bidirectional": True},
    "no-bias": {"bias": False},
}


def recurrent(function: Callable[..., Tensor], layer: Callable[..., nn.Module], **options: Any) -> Callable[[], Model]:
    return lambda: Model(function, a=layer(6, 4, **options))


for kind, layer in RECURRENT.items():
    for shape, more in LAYERS.items():
        case(f"{kind}-{shape}", recurrent(outputs_only, layer, batch_first=True, **more), sequences)
        case(f"{kind}-{shape}-packed", recurrent(packed, layer, batch_first=True, **more), sequences)
    case(f"{kind}-time-first", recurrent(time_first, layer), sequences)
    case(f"{kind}-last-state", recurrent(states_only, layer, batch_first=True), sequences)
for kind in ("rnn", "gru", "lstm"):
    case(
        f"{kind}-learned-state",
        lambda kind=kind: Model(from_learned_state, a=RECURRENT[kind](6, 4, batch_first=True), h=parameter(1, 1, 4)),
        sequences,
    )
case(
    "lstm-cell",
    lambda: Model(lambda m, x: torch.cat(m.a(x[:, 1], m.a(x[:, 0])), 1), a=nn.LSTMCell(6, 4, bias=False)),
    sequences,
)
case(
    "lstm-of-windows",
    lambda: Model(lambda m, x: m.a(x.reshape(-1, 2, 3))[0].reshape(len(x), -1), a=nn.LSTM(3, 4, batch_first=True)),
    vectors,
)
