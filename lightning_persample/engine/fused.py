"""A call whose backward forms each sample's weight gradient once, for the record and for ``.grad``.

With ``fuse_weight_grad=True`` a linear map or a convolution runs in an autograd function of its own. Where the samples'
gradients are formed for their norms anyway, their sum is what the function returns as the weight's gradient, so that
autograd's hooks (and those of DistributedDataParallel) see it as any other. All else is computed as autograd does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from lightning_persample.engine.batch_axis import BatchAxis
from lightning_persample.gradients import PatchGeometry, convolution_is_fused, linear_is_fused
from lightning_persample.gradients.precision import without_autocast
from lightning_persample.rules import Rule
from lightning_persample.rules.convolution import per_axis, resolve_padding

__all__ = ["FusedCall", "fused_call"]

Sums: TypeAlias = "Mapping[str, Tensor]"
Gradients: TypeAlias = "tuple[Tensor | None, Tensor | None, Tensor | None]"
Wanted: TypeAlias = "tuple[bool, bool, bool]"

_CONVOLUTIONS = {"conv1d": torch.conv1d, "conv2d": torch.conv2d, "conv3d": torch.conv3d}


class FusedCall(ABC):
    """One call that runs fused.

    Args:
        tensors: input, weight and bias.
        dtype: in which autocast would have it computed, else None.

    Attributes:
        sums: given the output's gradient, notes what the samples contribute and returns those sums over the samples
            that it has formed, by argument. None where nothing is to be told apart; then autograd's own way is taken.
    """

    def __init__(self, tensors: tuple[Tensor, Tensor, Tensor | None], dtype: torch.dtype | None) -> None:
        self._tensors: tuple[Tensor, Tensor, Tensor | None] | None = tensors
        self.dtype = dtype
        self.sums: Callable[[Tensor, bool], Sums] | None = None

    def run(self) -> Tensor:
        """Make the call, once; the tensors are kept by autograd alone."""
        tensors, self._tensors = self._tensors, None
        assert tensors is not None
        return self.shaped(_Fused.apply(self, *tensors), tensors[0])

    def shaped(self, output: Tensor, x: Tensor) -> Tensor:
        """The output as the op gives it; the function must not return a view, which an op in place could not follow."""
        return output

    def cast(self, tensor: Tensor) -> Tensor:
        """A tensor as autocast would have it."""
        return tensor if self.dtype is None else tensor.to(self.dtype)

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output."""

    @abstractmethod
    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: Wanted) -> Gradients:
        """The gradients of input, weight and bias, as autograd computes them and differentiable again."""


class _Linear(FusedCall):
    def shaped(self, output: Tensor, x: Tensor) -> Tensor:
        return output if x.dim() == 2 else output.view(*x.shape[:-1], output.shape[1])

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x.flatten(0, -2), weight, bias)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: Wanted) -> Gradients:
        return (
            (grad @ weight).view(x.shape) if wanted[0] else None,
            grad.t() @ x.flatten(0, -2) if wanted[1] else None,
            grad.sum(0) if wanted[2] else None,
        )


class _Convolution(FusedCall):
    def __init__(self, geometry: PatchGeometry, *rest: Any) -> None:
        super().__init__(*rest)
        self._stride, self._dilation, self._groups = geometry.stride, geometry.dilation, geometry.groups
        self._padding = tuple(before for before, _ in geometry.padding)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        convolution = _CONVOLUTIONS[f"conv{x.dim() - 2}d"]
        return convolution(x, weight, bias, self._stride, self._padding, self._dilation, self._groups)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: Wanted) -> Gradients:
        if not any(wanted):
            return None, None, None
        found: Gradients = torch.ops.aten.convolution_backward(
            grad, x, weight, [weight.shape[0]], self._stride, self._padding, self._dilation, False,
            [0] * len(self._stride), self._groups, wanted,
        )  # fmt: skip
        return found


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: FusedCall, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.call, ctx.dtypes = call, [None if tensor is None else tensor.dtype for tensor in (x, weight, bias)]
        with without_autocast(x.device.type):
            kept = call.cast(x)
            ctx.save_for_backward(kept, weight)
            return call.forward(kept, call.cast(weight), None if bias is None else call.cast(bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call, (x, weight) = ctx.call, ctx.saved_tensors
        again = torch.is_grad_enabled()  # the gradients will be differentiated themselves
        sums = {} if call.sums is None else call.sums(grad, not again)
        wanted = ctx.needs_input_grad[1:]
        missing = (wanted[0], wanted[1] and "weight" not in sums, wanted[2] and "bias" not in sums)
        with torch._C.DisableTorchFunction(), without_autocast(x.device.type):
            plain = call.backward(grad, x, call.cast(weight), missing)
        found = (plain[0], sums.get("weight", plain[1]), sums.get("bias", plain[2]))
        typed = [
            None if g is None or dtype is None else g.to(dtype) for g, dtype in zip(found, ctx.dtypes, strict=True)
        ]
        return None, *typed


def fused_call(
    op: object,
    rule: Rule | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    place: Callable[[Tensor], object],
    batch_size: int,
    always: bool,
) -> FusedCall | None:
    """The call in its fused form, or None where there is none or where it would cost more.

    Args:
        op: canonical op.
        rule: its rule.
        args: positional arguments.
        kwargs: keyword arguments.
        place: where the batch lies in a tensor: a `BatchAxis`, or anything else where that is not known.
        batch_size: number of samples B.
        always: the samples' gradients are asked for, so that they are formed in any case.

    Returns:
        A call to run in place of the op.
    """
    if (op != "linear" and op not in _CONVOLUTIONS) or rule is None:
        return None
    arguments = rule.bind(args, kwargs)
    if arguments is None:
        return None
    x, weight, bias = (arguments.get(name) for name in ("input", "weight", "bias"))
    if not (isinstance(x, Tensor) and isinstance(weight, Tensor) and _are_plain(x, weight, bias)):
        return None
    axis = place(x)
    if not isinstance(axis, BatchAxis) or axis.owner is not None:
        return None
    if weight.grad_fn is not None or not weight.requires_grad or (bias is not None and bias.grad_fn is not None):
        return None
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
    if dtype is not None and torch.float64 in (x.dtype, weight.dtype):
        return None
    if dtype is None and not x.dtype == weight.dtype == (x if bias is None else bias).dtype:
        return None
    if op == "linear":
        return _fused_linear(x, weight, bias, axis, batch_size, always, dtype)
    return _fused_convolution(arguments, axis, always, dtype)


def _are_plain(*tensors: Any) -> bool:
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False
    return all(
        tensor is None
        or (type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and tensor.is_floating_point())
        for tensor in tensors
    )


def _fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    axis: BatchAxis,
    batch_size: int,
    always: bool,
    dtype: torch.dtype | None,
) -> FusedCall | None:
    if x.dim() < 2 or weight.dim() != 2 or axis.dim == x.dim() - 1 or (bias is not None and bias.dim() != 1):
        return None
    if bias is not None and bias.shape[0] != weight.shape[0]:
        return None
    positions = x.numel() // max(1, batch_size * x.shape[-1])
    if not positions or not (always or linear_is_fused(positions, *weight.shape)):
        return None
    return _Linear((x, weight, bias), dtype)


def _fused_convolution(
    arguments: Mapping[str, Any], axis: BatchAxis, always: bool, dtype: torch.dtype | None
) -> FusedCall | None:
    x, weight, bias = arguments["input"], arguments["weight"], arguments.get("bias")
    axes = weight.dim() - 2
    if x.dim() != axes + 2 or axis.dim != 0:
        return None
    kernel_size = tuple(weight.shape[2:])
    stride, dilation = (per_axis(arguments.get(name, 1), axes) for name in ("stride", "dilation"))
    padding = resolve_padding(arguments.get("padding", 0), kernel_size, dilation)
    if any(before != after for before, after in padding):
        return None
    geometry = PatchGeometry(kernel_size, stride, padding, dilation, arguments.get("groups", 1))
    computed_in = x.dtype if dtype is None else dtype
    if not always and not convolution_is_fused(tuple(x.shape[1:]), weight.shape[0], geometry, computed_in, x.device):
        return None
    return _Convolution(geometry, (x, weight, bias), dtype)
