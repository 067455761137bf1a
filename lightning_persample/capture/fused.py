"""A call whose backward forms each sample's weight gradient once, for the record and for ``.grad``.

With ``fuse_weight_grad=True`` a linear map or a convolution runs in an autograd function of its own. Where the samples'
gradients are formed for their norms anyway, their sum is what the function returns as the weight's gradient, so that
autograd's hooks (and those of DistributedDataParallel) see it as any other. All else is computed as autograd does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample.batch_axis.axis import BatchAxis
from lightning_persample.capture.weight import Weight
from lightning_persample.errors import UnsupportedError
from lightning_persample.gradients import PatchGeometry, convolution_is_fused, linear_is_fused
from lightning_persample.gradients.precision import autocast_is_on, without_autocast
from lightning_persample.rules.convolution import per_axis, resolve_padding
from lightning_persample.torch_internals import calls_run_as_written, version_counter, without_torch_function

Places: TypeAlias = "tuple[int, int, int | None]"
Gradients: TypeAlias = "tuple[Tensor | None, Tensor | None, Tensor | None]"
Wanted: TypeAlias = "tuple[bool, bool, bool]"

_CONVOLUTIONS = {"conv1d": torch.conv1d, "conv2d": torch.conv2d, "conv3d": torch.conv3d}


class FusedCall:
    """One call that has run fused, and the sums over the samples that its backward need not form."""

    def __init__(self, form: FusedForm) -> None:
        self.form = form
        self.names: Mapping[Weight, str] = {}  # the names of its arguments that are weights
        self._sums: tuple[Tensor, int, dict[str, Tensor]] | None = None

    def put(self, grad: Tensor | None, sums: Iterable[tuple[Weight, Tensor]]) -> None:
        """Take the sums that were formed of this gradient of the output."""
        if grad is not None:
            by_name = {self.names[weight]: total.to(grad.dtype) for weight, total in sums}
            self._sums = grad, version_counter(grad), by_name

    def take(self, grad: Tensor) -> dict[str, Tensor]:
        """The sums by argument; none where a hook of the user's has changed the gradient since."""
        found, self._sums = self._sums, None
        if found is None or found[0] is not grad or found[1] != version_counter(grad):
            return {}
        return found[2]


class FusedForm(ABC):
    """How calls of one signature run fused."""

    # `places`: where input, weight and bias are among the tensors of the call; `dtype`: what autocast makes of them,
    # None where it is off.

    def __init__(self, places: Places, dtype: torch.dtype | None) -> None:
        self._places, self._dtype = places, dtype

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a call may run so now."""
        x = tensors[self._places[0]]
        return self._dtype is _autocast_dtype(x) and calls_run_as_written()

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, FusedCall]:
        """Make a call."""
        call, (of_x, of_weight, of_bias) = FusedCall(self), self._places
        x, weight, bias = tensors[of_x], tensors[of_weight], None if of_bias is None else tensors[of_bias]
        if self._dtype is not None:  # as autocast would have them, with a history of their own
            x, weight, bias = x.to(self._dtype), weight.to(self._dtype), None if bias is None else bias.to(self._dtype)
        return self.call(call, x, weight, bias), call

    @abstractmethod
    def call(self, call: FusedCall, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output as the op gives it; `_Fused` must not return a view, which an op in place could not follow."""

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output of `_Fused`."""

    @abstractmethod
    def kept(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """What autograd would keep of input and weight; were it more, changes in place would be forbidden, too."""

    @abstractmethod
    def backward(self, grad: Tensor, x: Tensor, weight: Tensor | None, wanted: Wanted) -> Gradients:
        """The gradients of input, weight and bias, as autograd computes them and differentiable again."""


class _Linear(FusedForm):
    def call(self, call: FusedCall, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows: Tensor = _Fused.apply(call, x.flatten(0, -2), weight, bias)
        return rows if x.dim() == 2 else rows.view(*x.shape[:-1], rows.shape[1])

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def kept(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, weight if x.requires_grad else None

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor | None, wanted: Wanted) -> Gradients:
        return (
            grad @ weight if wanted[0] and weight is not None else None,
            grad.t() @ x if wanted[1] else None,
            grad.sum(0) if wanted[2] else None,
        )


class _Convolution(FusedForm):
    def __init__(self, places: Places, dtype: torch.dtype | None, geometry: PatchGeometry) -> None:
        super().__init__(places, dtype)
        self._stride, self._dilation, self._groups = geometry.stride, geometry.dilation, geometry.groups
        self._padding = tuple(before for before, _ in geometry.padding)

    def call(self, call: FusedCall, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _Fused.apply(call, x, weight, bias)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        convolution = _CONVOLUTIONS[f"conv{x.dim() - 2}d"]
        return convolution(x, weight, bias, self._stride, self._padding, self._dilation, self._groups)

    def kept(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, weight

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor | None, wanted: Wanted) -> Gradients:
        if weight is None or not any(wanted):
            return None, None, None
        return torch.ops.aten.convolution_backward(
            grad, x, weight, [weight.shape[0]], self._stride, self._padding, self._dilation, False,
            [0] * len(self._stride), self._groups, wanted,
        )  # fmt: skip


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: FusedCall, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*call.form.kept(x, weight))
        with without_autocast(x.device.type):  # (what it would cast has been cast)
            return call.form.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:  # as autograd does: what is not used gets no gradient, rather than zeros
            return None, None, None, None
        x, weight = ctx.saved_tensors
        with without_torch_function():
            sums, wanted = ctx.call.take(grad), ctx.needs_input_grad[1:]
            missing = (wanted[0], wanted[1] and "weight" not in sums, wanted[2] and "bias" not in sums)
            plain = ctx.call.form.backward(grad, x, weight, missing)
        return None, plain[0], sums.get("weight", plain[1]), sums.get("bias", plain[2])


def fused_form(
    op: object,
    arguments: Mapping[str, Any],
    tensors: Sequence[Tensor],
    marks: Sequence[object],
    batch_size: int,
    always: bool,
) -> FusedForm | None:
    """How a call of these arguments runs fused; None where it cannot, or where it would cost more."""
    if (op != "linear" and op not in _CONVOLUTIONS) or not calls_run_as_written():
        return None
    x, weight, bias = (arguments.get(name) for name in ("input", "weight", "bias"))
    if not (isinstance(x, Tensor) and isinstance(weight, Tensor) and _are_plain(x, weight, bias)):
        return None
    ids = [*map(id, tensors)]
    places = ids.index(id(x)), ids.index(id(weight)), None if bias is None else ids.index(id(bias))
    axis, dtype = marks[places[0]], _autocast_dtype(x)
    if not isinstance(axis, BatchAxis) or axis.owner is not None:
        return None
    if weight.grad_fn is not None or not weight.requires_grad or (bias is not None and bias.grad_fn is not None):
        return None
    if dtype is not None and torch.float64 in (x.dtype, weight.dtype):
        return None
    if dtype is None and not x.dtype == weight.dtype == (x if bias is None else bias).dtype:
        return None
    if op == "linear":
        if not _linear_fits(x, weight, bias, axis, batch_size):
            return None
        pays = always or linear_is_fused(x.numel() // (batch_size * x.shape[-1]), *weight.shape)
        return _Linear(places, dtype) if pays else None
    geometry = _geometry_of(arguments, x, weight, bias, axis)
    if geometry is None:
        return None
    likely, size = dtype or x.dtype, tuple(x.shape[1:])
    pays = always or convolution_is_fused(size, weight.shape[0], geometry, likely, x.device)
    return _Convolution(places, dtype, geometry) if pays else None


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    return torch.get_autocast_dtype(x.device.type) if autocast_is_on(x.device.type) else None


def _are_plain(*tensors: Any) -> bool:
    return all(
        tensor is None
        or (type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and tensor.is_floating_point())
        for tensor in tensors
    )


def _linear_fits(x: Tensor, weight: Tensor, bias: Tensor | None, axis: BatchAxis, batch_size: int) -> bool:
    """Whether this is ``x W^T + b`` with the batch among the rows of x; what else there is, torch itself takes."""
    if x.dim() < 2 or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or axis.dim == x.dim() - 1:
        return False
    return x.numel() >= batch_size * x.shape[-1] > 0 and (bias is None or bias.shape == weight.shape[:1])


def _geometry_of(
    arguments: Mapping[str, Any], x: Tensor, weight: Tensor, bias: Tensor | None, axis: BatchAxis
) -> PatchGeometry | None:
    """Where the patches lie, if the arguments are such as torch accepts; it says itself what is wrong with others."""
    axes, padding, groups = weight.dim() - 2, arguments.get("padding", 0), arguments.get("groups", 1)
    if x.dim() != axes + 2 or axis.dim != 0 or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    fit = isinstance(groups, int) and groups >= 1 and x.shape[1] == weight.shape[1] * groups
    if not fit or weight.shape[0] % groups or 0 in weight.shape:
        return None
    kernel_size = tuple(weight.shape[2:])
    try:
        stride, dilation = (per_axis(arguments.get(name, 1), axes) for name in ("stride", "dilation"))
        geometry = PatchGeometry(kernel_size, stride, resolve_padding(padding, kernel_size, dilation), dilation, groups)
    except (TypeError, ValueError, UnsupportedError):
        return None
    if any(before != after for before, after in geometry.padding) or (padding == "same" and set(stride) != {1}):
        return None
    return geometry if min(geometry.output_size(tuple(x.shape[2:])), default=1) > 0 else None
