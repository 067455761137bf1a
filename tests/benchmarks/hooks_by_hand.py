"""What bounds the cost of norms: the same kernels under bare module hooks, for layers that are known.

Such hooks know of each layer what it is and that it is called once, along axis 0 of plain tensors laid out as in the
step before, and follow nothing. What is left is the price of the kernels and of the calls that start them. "fused" are
the calls that give the sum over the samples as the weight's gradient where `fuse_weight_grad=True` does.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample.batch_axis.axis import BatchAxis
from lightning_persample.capture.fused import FusedForm, fused_form
from lightning_persample.capture.graph import leaf_of, nodes_below
from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import sq_norms, sq_norms_and_sum
from lightning_persample.gradients.program import Program, record
from lightning_persample.rules import Call, find_rule
from lightning_persample.torch_internals import saved_results, view_base

# By layer the op, the rule's name for its input, the options that both name alike, and those with one value here.
_LAYERS: dict[type[nn.Module], tuple[Callable[..., Tensor], str, tuple[str, ...], dict[str, object]]] = {
    nn.Linear: (F.linear, "input", (), {}),
    nn.Conv2d: (torch.conv2d, "input", ("stride", "padding", "dilation", "groups"), {"padding_mode": "zeros"}),
    nn.GroupNorm: (torch.group_norm, "input", ("num_groups", "eps"), {}),
    nn.LayerNorm: (torch.layer_norm, "input", ("normalized_shape", "eps"), {}),
    nn.Embedding: (torch.embedding, "indices", (), {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": 0}),
    nn.BatchNorm2d: (
        torch.batch_norm,
        "input",
        ("running_mean", "running_var", "training", "eps"),
        {"training": False},
    ),
}


class Scale(nn.Module):
    """A learned factor for each channel, the last axis."""

    def __init__(self, other: nn.Parameter) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        return x * self.other


class Permuted(nn.Module):
    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.axes)


_LAYERS[Scale] = (torch.mul, "input", (), {})


def in_plain_layers(module: nn.Module) -> nn.Module:
    """The module with those of timm's layers that do more than one thing taken apart: it computes the same."""
    to_last, back = Permuted(0, 2, 3, 1), Permuted(0, 3, 1, 2)
    for name, part in module.named_children():
        in_plain_layers(part)
        layer, kind = copy.copy(part), type(part).__name__
        if kind == "ConvNeXtBlock":
            scale = Scale(part.gamma)
            part.mlp = nn.Sequential(part.mlp, *((to_last, scale, back) if part.use_conv_mlp else (scale,)))
            part.gamma = None
        elif kind == "BatchNormAct2d":
            layer.__class__ = nn.BatchNorm2d
            setattr(module, name, nn.Sequential(layer, part.drop, part.act))
        elif kind == "LayerNorm2d":
            layer.__class__ = nn.LayerNorm
            setattr(module, name, nn.Sequential(to_last, layer, back))
        elif kind == "Linear":
            layer.__class__ = nn.Linear
            setattr(module, name, layer)
    return module


class Layer:
    """The hooks of one layer, which add its squared norms to those of the step."""

    def __init__(self, layer: Any, x: Tensor, squares: list[Tensor], fuse: bool) -> None:
        op, input_name, options, _ = _LAYERS[type(layer)]
        self.rule, self.input_name, self.squares = find_rule(op), input_name, squares
        self.weights = dict(layer.named_parameters())
        self.arguments = {name: getattr(layer, name) for name in options} | self.weights
        self.program: Program | str = "not now"
        self.fused: Any = None
        tensors = (x, *self.weights.values())
        form = (
            fused_form(self.rule.op, {"input": x} | self.arguments, tensors, [BatchAxis(0)], len(x), always=False)
            if fuse
            else None
        )
        if form is not None:
            layer.forward = partial(self.run_fused, form)
        layer.register_forward_hook(self.after_forward)

    def run_fused(self, form: FusedForm, x: Tensor) -> Tensor:
        output, self.fused = form.run((x, *self.weights.values()))
        self.fused.names = dict(zip(self.weights, self.weights, strict=True))
        return output

    def after_forward(self, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        base, shape = view_base(output), output.shape
        saved = saved_results(output, self.rule.saved)
        given = inputs[0].detach(), *saved.values()
        node = (output if base is None else base).grad_fn
        node.register_prehook(lambda grads: self.before_backward(grads[0], shape, given, tuple(saved)))

    def before_backward(
        self, grad: Tensor, shape: torch.Size, given: tuple[Tensor, ...], saved: tuple[str, ...]
    ) -> None:
        given, results = (*given, grad.view(shape)), None
        if type(self.program) is Program:
            results, checks = self.program.run(given)
            for number, least in checks:
                if not float(number) >= least:
                    results = None
        if self.program == "not now":
            results, self.program = record(partial(self.compute, given, saved), given)
        elif results is None:
            results = self.compute(given, saved)
        number = len(self.weights)
        self.squares += results[:number]
        if self.fused is not None:
            self.fused.put(grad, zip(self.weights, results[number:], strict=True))

    def compute(self, given: Sequence[Tensor], saved: Sequence[str]) -> list[Tensor]:
        """The squared norms of each weight, and of a fused call the sums."""
        x, *rows, grad = (tensor.unsqueeze(1) for tensor in given)
        call = Call(
            len(x),
            {self.input_name: x} | self.arguments,
            frozenset(self.weights),
            saved=dict(zip(saved, rows, strict=True)),
        )
        found = self.rule.function(call, grad)
        gradients = [found[name] for name in self.weights]
        if self.fused is None:
            return sq_norms(gradients)
        squares, sums = zip(*map(sq_norms_and_sum, gradients), strict=True)
        return [*squares, *sums]


def by_hand(module: nn.Module, x: Tensor, y: Tensor, fuse: bool = False) -> Callable[[], Tensor]:
    """A step with norms; an `UnsupportedError` names what these hooks do not know."""
    squares: list[Tensor] = []
    in_plain_layers(module)
    inputs: dict[nn.Module, list[Tensor]] = {}
    for name, part in module.named_modules():
        *_, only = _LAYERS.get(type(part), (None,))
        if only is not None and all(getattr(part, option) == value for option, value in only.items()):
            part.register_forward_hook(lambda layer, args, output: inputs.setdefault(layer, []).append(args[0]))
        elif [*part.parameters(recurse=False)]:
            raise UnsupportedError(f"hooks by hand know no layer such as `{name}`, {part}")
    below = (edge[0] for node in nodes_below([module(x)]) for edge in node.next_functions if edge[0] is not None)
    uses = Counter(map(leaf_of, below))
    for name, parameter in module.named_parameters():
        if uses[parameter] != 1:
            raise UnsupportedError(
                f"hooks by hand know parameters that are used once, `{name}` is {uses[parameter]} times"
            )
    for layer, (first,) in inputs.items():
        if len(first) != len(x):
            raise UnsupportedError(
                f"hooks by hand know layers of all samples along axis 0, not {layer} on {tuple(first.shape)}"
            )
        layer._forward_hooks.clear()
        Layer(layer, first, squares, fuse)

    def step() -> Tensor:
        module.zero_grad()
        squares.clear()
        F.cross_entropy(module(x), y).backward()
        return torch.stack(squares).sum(0).sqrt() * len(x)

    return step
