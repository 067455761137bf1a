"""Recurrent layers and cells: rnn_tanh, rnn_relu, gru, lstm.

The layer itself runs as torch's own kernel. In backward its recurrence is replayed step by step, with a zero added to
the pre-activations of the gates, whose gradient is the gates' own. A weight's gradient is then a sum of outer products
over time, as for a linear layer. The replay is compared with what the kernel gave: where it differs (dropout between
layers drawn by a kernel whose random numbers cannot be drawn again), the weights are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import Dense, Outer, SampleGradient
from lightning_persample.rules.registry import Call, register_rule
from lightning_persample.torch_internals import recurrent_functions

_LAYER = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")
_PACKED = ("input", "batch_sizes", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_CELL = ("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh")
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@dataclass(frozen=True)
class _Weights:
    """Weights of one direction of one layer, and the names under which the call knows them."""

    values: Mapping[str, Tensor]
    names: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class _Direction:
    """What the replay of one direction of one layer leaves: leaves for gradients, and what multiplies the weights."""

    weights: _Weights
    inputs: Tensor
    previous: Tensor
    from_inputs: Tensor
    from_previous: Tensor
    projected: Tensor | None = None
    unprojected: Tensor | None = None


def bind_layer(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Arguments of a recurrent layer by name; a packed sequence has its batch sizes as second argument."""
    packed = len(args) > 1 and isinstance(args[1], Tensor) and not args[1].is_floating_point()
    names = _PACKED if packed else _LAYER
    return None if len(args) > len(names) else {**dict(zip(names, args, strict=False)), **kwargs}


def _draws(arguments: Mapping[str, Any], output: Tensor) -> list[Tensor]:
    """The dropout masks between layers, drawn as the kernel draws them: one for each layer but the last."""
    if not arguments["train"] or not arguments["dropout"] or arguments["num_layers"] == 1:
        return []
    ones = torch.ones_like(output.transpose(0, 1) if arguments.get("batch_first") else output).contiguous()
    masks = [F.dropout(ones, arguments["dropout"]) for _ in range(arguments["num_layers"] - 1)]
    return [mask.transpose(0, 1) if arguments.get("batch_first") else mask for mask in masks]


def recurrent_layer(kind: str, call: Call, grad_outputs: tuple[Tensor | None, ...]) -> dict[str, SampleGradient]:
    """``h_t = cell(x_t, h_{t-1})`` over time, layers and directions."""
    # dW_ih = sum_t a_t (x) x_t, dW_hh = sum_t a_t (x) h_{t-1} with a_t the gradient of the gates' pre-activations.
    arguments = call.arguments
    time_first = not arguments.get("batch_first", False)
    packed = "batch_sizes" in arguments
    states = [name for name in arguments if name.split("[")[0] == "hx"]
    rows = arguments[states[0]].shape[2]

    def sequences(tensor: Tensor) -> Tensor:
        """(B * k, T, d) of a tensor that is laid out as the input."""
        if packed:
            return tensor
        return (tensor.transpose(1, 2) if time_first else tensor).flatten(0, 1)

    def columns(tensor: Tensor) -> Tensor:
        """(layers, B * k, H) of a state."""
        return tensor.transpose(0, 1).flatten(1, 2)

    dtype = next(grad.dtype for grad in grad_outputs if grad is not None)
    inputs = sequences(arguments["input"]).to(dtype).requires_grad_("input" in call.weights)
    steps = torch.arange(inputs.shape[1], device=inputs.device)
    valid = steps[None] < call.counts["input"][:, None] if packed and "input" in call.counts else None
    initial = [columns(arguments[name]).to(dtype).requires_grad_() for name in states]
    layers = _layers(arguments, kind, dtype)
    masks = [sequences(mask).to(dtype) for mask in call.draws]
    with torch.enable_grad():
        output, finals, replayed = _replay(kind, inputs, initial, layers, valid, masks)
    _check(kind, output, sequences(call.output) if call.output is not None else None, valid)
    given = [
        None if grad is None else columns(grad) if place else sequences(grad) for place, grad in enumerate(grad_outputs)
    ]
    found, grads = _pulled_back(call, replayed, [*initial, *[inputs] * inputs.requires_grad], [output, *finals], given)
    for name, grad in zip(states, grads, strict=False):
        if name in call.weights:
            found[name] = Dense(grad.unflatten(1, (call.batch_size, rows)).transpose(0, 1))
    if inputs.requires_grad:
        grad = grads[-1].unflatten(0, (call.batch_size, -1))
        found["input"] = Dense(grad.transpose(1, 2) if time_first else grad)
    return found


def recurrent_cell(kind: str, call: Call, grad_outputs: tuple[Tensor | None, ...]) -> dict[str, SampleGradient]:
    """One step of a recurrent layer."""
    arguments = call.arguments
    dtype = next(grad.dtype for grad in grad_outputs if grad is not None)
    states = [name for name in arguments if name.split("[")[0] == "hx"]
    names = {name: name for name in ("w_ih", "w_hh", "b_ih", "b_hh") if arguments.get(name) is not None}
    weights = _Weights({name: arguments[name].to(dtype) for name in names}, names)
    inputs = arguments["input"].to(dtype).flatten(0, 1).unsqueeze(1)
    initial = [arguments[name].to(dtype).flatten(0, 1)[None].requires_grad_() for name in states]
    with torch.enable_grad():
        _, finals, replayed = _replay(kind, inputs, initial, [[weights]], None, [], apart=call.nested)
    given = [None if grad is None else grad.flatten(0, 1)[None] for grad in grad_outputs]
    found, grads = _pulled_back(call, replayed, initial, finals, given)
    for name, grad in zip(states, grads, strict=True):
        if name in call.weights:
            found[name] = Dense(grad[0].unflatten(0, (call.batch_size, -1)))
    return found


def _pulled_back(
    call: Call, replayed: list[_Direction], others: list[Tensor], outputs: list[Tensor], given: list[Tensor | None]
) -> tuple[dict[str, SampleGradient], tuple[Tensor, ...]]:
    """From gradients of the outputs of a replay those of the weights, by sample, and of other leaves."""
    leaves = [leaf for part in replayed for leaf in _leaves(part)]
    reached = [output for output, grad in zip(outputs, given, strict=True) if grad is not None]
    known = [grad for grad in given if grad is not None]
    grads = torch.autograd.grad(reached, [*leaves, *others], known, materialize_grads=True)
    by_leaf = dict(zip(map(id, leaves), grads, strict=False))
    found: dict[str, SampleGradient] = {}
    for part in replayed:
        found |= _of_direction(part, by_leaf, call)
    return found, grads[len(leaves) :]


def _layers(arguments: Mapping[str, Any], kind: str, dtype: torch.dtype) -> list[list[_Weights]]:
    """The flat list of weights, by layer and direction."""
    names = [name for name in arguments if name.split("[")[0] == "params"]
    directions = 2 if arguments["bidirectional"] else 1
    roles = ["w_ih", "w_hh", *(["b_ih", "b_hh"] if arguments["has_biases"] else [])]
    per_direction = len(names) // (arguments["num_layers"] * directions)
    if per_direction > len(roles):
        roles.append("w_hr")
    groups = [names[start : start + per_direction] for start in range(0, len(names), per_direction)]
    weights = [
        _Weights(
            {role: arguments[name].to(dtype) for role, name in zip(roles, group, strict=True)},
            dict(zip(roles, group, strict=True)),
        )
        for group in groups
    ]
    return [weights[layer * directions : (layer + 1) * directions] for layer in range(arguments["num_layers"])]


def _replay(
    kind: str,
    inputs: Tensor,
    initial: list[Tensor],
    layers: list[list[_Weights]],
    valid: Tensor | None,
    masks: list[Tensor],
    *,
    apart: bool = False,
) -> tuple[Tensor, list[Tensor], list[_Direction]]:
    """All layers over (N, T, d): output (N, T, H), final states (layers * directions, N, H), what directions left."""
    replayed: list[_Direction] = []
    finals: list[list[Tensor]] = []
    for layer, directions in enumerate(layers):
        outputs = []
        for number, weights in enumerate(directions):
            state = [part[len(replayed)] for part in initial]
            reverse = number == 1
            output, last, left = _replay_direction(kind, inputs, state, weights, valid, reverse=reverse, apart=apart)
            outputs.append(output)
            finals.append(last)
            replayed.append(left)
        inputs = torch.cat(outputs, 2)
        if layer < len(masks):
            inputs = inputs * masks[layer]
    return inputs, [torch.stack(part) for part in zip(*finals, strict=True)], replayed


def _replay_direction(
    kind: str,
    inputs: Tensor,
    state: list[Tensor],
    weights: _Weights,
    valid: Tensor | None,
    *,
    reverse: bool,
    apart: bool,
) -> tuple[Tensor, list[Tensor], _Direction]:
    rows, steps, _ = inputs.shape
    values = weights.values
    gates = _GATES[kind] * state[-1].shape[1]
    from_inputs = inputs.new_zeros(rows, steps, gates).requires_grad_()
    from_previous = inputs.new_zeros(rows, steps, gates).requires_grad_() if kind == "gru" else from_inputs
    projected = inputs.new_zeros(rows, steps, state[0].shape[1]).requires_grad_() if "w_hr" in values else None
    # Taken apart once: the gradient of each step of an index would be a tensor of all steps.
    driven = (F.linear(inputs, values["w_ih"], values.get("b_ih")) + from_inputs).unbind(1)
    added = from_previous.unbind(1)
    outputs: list[Tensor] = [inputs] * steps
    previous: list[Tensor] = [inputs] * steps
    unprojected: list[Tensor] = [inputs] * steps
    for step in reversed(range(steps)) if reverse else range(steps):
        previous[step] = state[0].detach()
        recurrent = F.linear(state[0], values["w_hh"], values.get("b_hh"))
        if kind == "gru":
            recurrent = recurrent + added[step]
        following = _step(kind, driven[step], recurrent, state, apart=apart)
        if projected is not None:
            unprojected[step] = following[0].detach()
            following[0] = F.linear(following[0], values["w_hr"]) + projected[:, step]
        if valid is not None:
            there = valid[:, step, None]
            outputs[step] = torch.where(there, following[0], 0)
            following = [torch.where(there, new, old) for new, old in zip(following, state, strict=True)]
        else:
            outputs[step] = following[0]
        state = following
    left = _Direction(
        weights,
        inputs.detach(),
        torch.stack(previous, 1),
        from_inputs,
        from_previous,
        projected,
        torch.stack(unprojected, 1) if projected is not None else None,
    )
    return torch.stack(outputs, 1), state, left


def _step(kind: str, driven: Tensor, recurrent: Tensor, state: list[Tensor], *, apart: bool) -> list[Tensor]:
    """The state after one step from the gates' two pre-activations; `apart`: nothing flows from h back to c."""
    if kind == "lstm":
        gate_in, gate_forget, cell, gate_out = (driven + recurrent).chunk(4, 1)
        memory = gate_forget.sigmoid() * state[1] + gate_in.sigmoid() * cell.tanh()
        return [gate_out.sigmoid() * (memory.detach() if apart else memory).tanh(), memory]
    if kind == "gru":
        reset, update, new = driven.chunk(3, 1)
        reset_from, update_from, new_from = recurrent.chunk(3, 1)
        candidate = (new + (reset + reset_from).sigmoid() * new_from).tanh()
        gate = (update + update_from).sigmoid()
        return [(1 - gate) * candidate + gate * state[0]]
    total = driven + recurrent
    return [total.tanh() if kind == "rnn_tanh" else total.relu()]


def _leaves(part: _Direction) -> list[Tensor]:
    leaves = [part.from_inputs]
    if part.from_previous is not part.from_inputs:
        leaves.append(part.from_previous)
    return leaves if part.projected is None else [*leaves, part.projected]


def _of_direction(part: _Direction, by_leaf: Mapping[int, Tensor], call: Call) -> dict[str, SampleGradient]:
    def by_sample(tensor: Tensor) -> Tensor:
        """(B, k * T, d) of (B * k, T, d)."""
        return tensor.unflatten(0, (call.batch_size, -1)).flatten(1, 2)

    of_inputs = by_sample(by_leaf[id(part.from_inputs)])
    of_previous = by_sample(by_leaf[id(part.from_previous)])
    found: dict[str, SampleGradient] = {}
    for role, name in part.weights.names.items():
        if name not in call.weights:
            continue
        if role == "w_ih":
            found[name] = Outer(of_inputs, by_sample(part.inputs))
        elif role == "w_hh":
            found[name] = Outer(of_previous, by_sample(part.previous))
        elif role == "w_hr" and part.projected is not None and part.unprojected is not None:
            found[name] = Outer(by_sample(by_leaf[id(part.projected)]), by_sample(part.unprojected))
        else:
            found[name] = Dense((of_inputs if role == "b_ih" else of_previous).sum(1))
    return found


def _check(kind: str, replayed: Tensor, given: Tensor | None, valid: Tensor | None) -> None:
    if given is None:
        return
    replayed, given = replayed.detach(), given.to(replayed.dtype)
    if valid is not None:
        given = torch.where(valid[:, :, None], given, 0)
    scale = float(given.abs().max()) if given.numel() else 0.0
    tolerance = 1e-2 if given.dtype != torch.float64 else 1e-6
    if not torch.allclose(replayed, given, rtol=tolerance, atol=tolerance * max(scale, 1e-30), equal_nan=True):
        raise UnsupportedError(
            f"the replay of `{kind}` does not give what the layer gave: dropout between its layers was drawn by a "
            "kernel whose random numbers cannot be drawn again; use one layer each, with nn.Dropout between them"
        )


def _register(kind: str) -> None:
    layer, cell = recurrent_functions(kind)

    names = tuple(dict.fromkeys((*_LAYER, *_PACKED)))
    register_rule(
        layer,
        arguments=names,
        batched=("input", "hx"),
        weights=("params", "hx", "input"),
        reads=("input", "batch_sizes", "hx", "params"),
        bind=bind_layer,
        several_outputs=True,
        draws=_draws,
        per_sample=("input", "hx"),
    )(update_wrapper(partial(recurrent_layer, kind), recurrent_layer))
    register_rule(
        cell,
        arguments=_CELL,
        batched=("input", "hx"),
        weights=("hx", *_CELL[2:]),
        reads=_CELL,
        several_outputs=True,
        per_sample=("hx",),
    )(update_wrapper(partial(recurrent_cell, kind), recurrent_cell))


for _kind in _GATES:
    _register(_kind)
