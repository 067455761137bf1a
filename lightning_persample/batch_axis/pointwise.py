"""Ops that compute each output entry from the entries at its place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_persample.batch_axis.axis import BatchAxis
from lightning_persample.batch_axis.base import Followed, broadcast, follower, is_plain, listed, lists
from lightning_persample.batch_axis.observed import ObservedCall

__all__ = ["POINTWISE", "common_axis"]

# fmt: off
POINTWISE = frozenset({
    "abs", "absolute", "acos", "acosh", "add", "addcdiv", "addcmul", "alpha_dropout", "angle", "arccos", "arccosh",
    "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "asin", "asinh", "atan", "atan2", "atanh", "bernoulli",
    "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "bool",
    "and", "or", "xor", "invert", "lshift", "rshift", "byte", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clip",
    "clone", "conj", "contiguous", "copy", "copysign", "cos", "cosh", "cpu", "cuda", "data", "deg2rad", "detach",
    "digamma", "div", "double", "dropout", "elu", "eq", "erf", "erfc", "erfinv", "exp", "exp2", "expm1",
    "feature_alpha_dropout", "feature_dropout", "fill", "fix", "float", "float_power", "floor", "floor_divide",
    "floordiv", "fmax", "fmin", "fmod", "frac", "ge", "gelu", "greater", "greater_equal", "gt", "half", "hardshrink",
    "hardsigmoid", "hardswish", "hardtanh", "heaviside", "hypot", "i0", "imag", "int", "isclose", "isfinite", "isinf",
    "isnan", "isneginf", "isposinf", "isreal", "ldexp", "le", "leaky_relu", "lerp", "less", "less_equal", "lgamma",
    "log", "log10", "log1p", "log2", "log_sigmoid", "logaddexp", "logaddexp2", "logical_and", "logical_not",
    "logical_or", "logical_xor", "logit", "logsigmoid", "long", "lt", "masked_fill", "maximum", "minimum", "mish",
    "mod", "mul", "ne", "neg", "negative", "nextafter", "not_equal", "pos", "positive", "pow", "rad2deg", "rdiv",
    "real", "reciprocal", "relu", "relu6", "remainder", "requires_grad", "resolve_conj", "resolve_neg", "rpow", "rrelu",
    "rrelu_with_noise", "rsqrt", "rsub", "selu", "sgn", "short", "sigmoid", "sign", "signbit", "silu", "sin", "sinc",
    "sinh", "softplus", "softshrink", "special_digamma", "special_entr", "special_erf", "special_erfc", "special_erfcx",
    "special_erfinv", "special_exp2", "special_expit", "special_expm1", "special_gammaln", "special_i0", "special_i0e",
    "special_i1", "special_i1e", "special_log1p", "special_log_ndtr", "special_logit", "special_ndtr", "special_ndtri",
    "special_psi", "special_round", "special_sinc", "special_xlog1py", "special_xlogy", "sqrt", "square", "round",
    "sub", "tan", "tanh", "threshold", "to", "trunc", "truediv", "type", "type_as", "xlogy", "zero", "bfloat16",
    "cfloat", "cdouble", "float16", "native_dropout", "as_tensor",
})
# fmt: on


def common_axis(tensors: Sequence[Tensor], marks: Sequence[object]) -> tuple[BatchAxis | None, int]:
    """The axis along which operands that are laid over each other all hold the samples, where it is the same."""
    found, rank = None, 0
    for tensor, mark in zip(tensors, marks, strict=True):
        if len(tensors) > 1 and not is_plain(tensor):
            return None, 0
        if not isinstance(mark, BatchAxis):
            continue
        if found is None:
            found, rank = mark, tensor.dim()
            continue
        same = (mark.outer, mark.inner, mark.dim - tensor.dim()) == (found.outer, found.inner, found.dim - rank)
        if not same or mark.owner is not found.owner or mark.mixing is not found.mixing:
            return None, 0
    return found, rank


@follower(*sorted(POINTWISE - {"copy"}), by_layout=True)
def _follow_pointwise(call: ObservedCall) -> Followed:
    return broadcast(call)


@follower("copy", by_layout=True)
def _follow_copy(call: ObservedCall) -> Followed:
    """``target.copy_(source)``: of the target nothing is left."""
    target, source = call.argument(0, "self", "input"), call.argument(1, "src", "other")
    axis = call.axis_of(source) if isinstance(source, Tensor) and source is not target else None
    if not call.inplace or not isinstance(axis, BatchAxis):
        return broadcast(call)
    return Followed((axis.moved(axis.dim + target.dim() - source.dim()),))


@follower("where", by_layout=True)
def _follow_where(call: ObservedCall) -> Followed:
    return listed(call) if lists(call) else broadcast(call)
