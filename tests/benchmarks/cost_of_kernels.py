"""What bounds the cost of norms: the same kernels by hand, under bare module hooks, for the models that are timed.

    python -m tests.benchmarks.cost_of_kernels [--models mlp cnn resnet18 gpt] [--pairs 15] [--row 0.05]

Such hooks know of each layer what it is and that it is called once, along axis 0 of plain float32 tensors, and follow
nothing. What is left is the price of the kernels and of the calls that start them. "fused" are autograd functions that
give the sum over the samples as the weight's gradient where `fuse_weight_grad=True` does. Beside them are the
multiply-adds of products and convolutions, as --scaling of `cost_of_norms` counts them, and what the package takes.
"""

from __future__ import annotations

import platform
import warnings
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample.gradients import (
    Dense,
    Indexed,
    Outer,
    Patches,
    PatchGeometry,
    SampleGradient,
    convolution_is_fused,
    linear_is_fused,
    sq_norms_and_sum,
)
from lightning_persample.rules import Call, find_rule
from lightning_persample.torch_internals import saved_results
from tests.benchmarks.cost_of_norms import operations, parser_of, prepared, shown, times
from tests.benchmarks.engines import ENGINES, Step
from tests.benchmarks.timed_models import MODELS

BY_HAND, FUSED_BY_HAND = "kernels by hand", "fused by hand"
COLUMNS = (BY_HAND, "lightning_persample", FUSED_BY_HAND, "fuse_weight_grad=True")


def of_linear(layer: nn.Linear, x: Tensor, grad: Tensor) -> list[SampleGradient]:
    return [Outer(grad, x), Dense(grad.sum(1))]


def of_one_row(x: Tensor, grad: Tensor) -> list[Tensor]:
    """The squared norms of g (x) x and of g, by two kernels over rows."""
    rows = torch.linalg.vector_norm(grad, dim=1).square()
    return [torch.linalg.vector_norm(x, dim=1).square() * rows, rows]


def geometry_of(layer: nn.Conv2d) -> PatchGeometry:
    padding = tuple((before, before) for before in layer.padding)
    return PatchGeometry(layer.kernel_size, layer.stride, padding, layer.dilation, layer.groups)


def of_convolution(layer: nn.Conv2d, x: Tensor, grad: Tensor) -> list[SampleGradient]:
    weight = Patches(grad.unsqueeze(1), x.unsqueeze(1), geometry_of(layer))
    return [weight] if layer.bias is None else [weight, Dense(grad.flatten(2).sum(2))]


def of_norm(layer: nn.Module, x: Tensor, grad: Tensor, saved: dict[str, Tensor]) -> list[SampleGradient]:
    """By the rule, which shares its kernel among several norms."""
    if isinstance(layer, nn.GroupNorm):
        rule, options = find_rule(torch.group_norm), {"num_groups": layer.num_groups}
    else:
        rule, options = find_rule(torch.layer_norm), {"normalized_shape": layer.normalized_shape}
    arguments = {"input": x.unsqueeze(1), "weight": layer.weight, "bias": layer.bias, "eps": layer.eps, **options}
    rows = {name: result.unsqueeze(1) for name, result in saved.items()}
    call = Call(len(x), arguments, frozenset(("weight", "bias")), saved=rows)
    return list(rule.function(call, grad.unsqueeze(1)).values())


class Fused(torch.autograd.Function):
    """A linear map or a convolution whose backward forms each sample's gradient once."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, squares: list[Tensor], x: Tensor, *weights: Tensor) -> Tensor:
        ctx.layer, ctx.squares = layer, squares
        ctx.save_for_backward(x, layer.weight)
        return type(layer).forward(layer, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_layer = of_linear if isinstance(ctx.layer, nn.Linear) else of_convolution
        sums = []
        for gradient in of_layer(ctx.layer, x, grad):
            square, total = sq_norms_and_sum(gradient)
            ctx.squares.append(square)
            sums.append(total)
        if not ctx.needs_input_grad[2]:
            return None, None, None, *sums
        if isinstance(ctx.layer, nn.Linear):
            return None, None, grad @ weight, *sums
        layer, nothing = ctx.layer, [0, 0]
        found = torch.ops.aten.convolution_backward(
            grad, x, weight, None, layer.stride, layer.padding, layer.dilation, False, nothing, 1, (True, False, False)
        )
        return None, None, found[0], *sums


def forms_gradients(layer: nn.Module, x: Tensor) -> bool:
    if isinstance(layer, nn.Linear):
        return x.dim() == 3 and linear_is_fused(x.shape[1], *layer.weight.shape)
    if isinstance(layer, nn.Conv2d):
        sizes = tuple(x.shape[1:]), layer.out_channels
        return convolution_is_fused(*sizes, geometry_of(layer), torch.float32, torch.device("cpu"))
    return False


def by_hand(module: nn.Module, x: Tensor, y: Tensor, fuse: bool = False) -> Step:
    squares: list[Tensor] = []

    def watch(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        read = inputs[0].detach()
        saved = saved_results(output, ("result1", "result2")) if isinstance(layer, (nn.GroupNorm, nn.LayerNorm)) else {}

        def note(grad: Tensor) -> None:
            if isinstance(layer, nn.Linear) and read.dim() == 2:
                squares.extend(of_one_row(read, grad))
                return
            if isinstance(layer, nn.Linear):
                found = of_linear(layer, read, grad)
            elif isinstance(layer, nn.Conv2d):
                found = of_convolution(layer, read, grad)
            elif isinstance(layer, nn.Embedding):
                found = [Indexed(read, grad, layer.num_embeddings)]
            else:
                found = of_norm(layer, read, grad, saved)
            squares.extend(gradient.sq_norm() for gradient in found)

        output.register_hook(note)

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        if forms_gradients(layer, x):
            return Fused.apply(layer, squares, x, *layer.parameters())
        output = type(layer).forward(layer, x)
        watch(layer, (x,), output)
        return output

    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and fuse:
            layer.forward = partial(call, layer)
        elif isinstance(layer, (nn.Linear, nn.Conv2d, nn.Embedding, nn.GroupNorm, nn.LayerNorm)):
            layer.register_forward_hook(watch)

    def step() -> Tensor:
        module.zero_grad()
        squares.clear()
        F.cross_entropy(module(x), y).backward()
        return torch.stack(squares).sum(0).sqrt() * len(x)

    return step


def main() -> None:
    options = parser_of(__doc__).parse_args()
    warnings.simplefilter("ignore")
    device = torch.device("cpu")
    ENGINES.update({BY_HAND: by_hand, FUSED_BY_HAND: partial(by_hand, fuse=True)})
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {options.pairs} pairs\n"
    )
    print(f"| model | plain step | multiply-adds, and fused | {' | '.join(COLUMNS)} |")
    print(f"|---|---|---|{'---|' * len(COLUMNS)}")
    for model in options.models:
        title, build = MODELS[model]
        norms = [prepared(build, engine, device)() for engine in COLUMNS]
        for other in norms[1:]:
            torch.testing.assert_close(other, norms[0], rtol=1e-4, atol=1e-6)
        plain, *counts = (operations(prepared(build, engine, device)) for engine in ("plain", COLUMNS[1], COLUMNS[3]))
        found = times(build, list(COLUMNS), options.pairs, device, options.row)
        cells = [shown(found[engine]) for engine in COLUMNS]
        shares = ", ".join(f"{count / plain:.3f}x" for count in counts)
        print(f"| {title} | {found['plain']['ms']:.1f} ms | {shares} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
