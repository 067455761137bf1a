"""What kind of call this is: its op, whether it writes into its argument, where its values come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from lightning_persample.engine.decompose import is_composite
from lightning_persample.engine.following import BY_LAYOUT, LOSSES, POINTWISE
from lightning_persample.engine.observed import ObservedCall, operands_of
from lightning_persample.rules import canonical_op

__all__ = ["DATA_SOURCES", "Kind", "adds_a_term", "data_of", "in_parts", "kind_of"]

_GETTERS = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
# Ops that take a dtype, a device or a shape from their tensors, with the place and the name of the one argument that is
# data, if there is one. Of any other op every tensor is data.
_CONVERTS: dict[object, tuple[int, str] | None] = {
    **dict.fromkeys(("to", "type_as", "expand_as", "view_as", "reshape_as"), (0, "self")),
    **dict.fromkeys((
        "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones",
        "new_empty", "new_empty_strided",
    )),
    **dict.fromkeys(("zeros", "ones", "empty", "arange", "eye")), "full": (1, "fill_value"),  # (with sizes in tensors)
    "full_like": (1, "fill_value"), "new_full": (2, "fill_value"), "new_tensor": (1, "data"), "new": (1, "data"),
}  # fmt: skip
_ONE_CALL: dict[Callable[..., Any], object] = {  # whose arguments are those of the call, in its order
    nn.functional.cross_entropy: "cross_entropy_loss",
    nn.functional.layer_norm: "layer_norm",
    nn.functional.group_norm: "group_norm",
    nn.functional.rms_norm: "rms_norm",
}
_SUMS = frozenset({"add", "sub", "rsub", "stack", "cat"})
_NO_TENSOR = frozenset({
    "__set__", "__delete__", "__len__", "size", "dim", "stride", "numel", "is_floating_point", "requires_grad_",
    "retain_grad", "share_memory_", "register_hook", "_set_grad_enabled", "set_", "resize_", "resize_as_",
    "__setstate__", "getweakrefs",
})  # fmt: skip
_MOVES = frozenset({"set_", "resize_", "resize_as_", "__setstate__"})
# Ops whose results are data even where they are given none: random numbers, and tensors made of anything.
DATA_SOURCES = frozenset({
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "uniform", "random",
    "bernoulli", "multinomial", "poisson", "exponential", "geometric", "log_normal", "cauchy", "dropout",
    "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "native_dropout", "rrelu", "tensor", "as_tensor",
    "asarray", "from_numpy", "frombuffer", "from_file", "new_tensor", "new",
})  # fmt: skip


def attribute_of(function: Callable[..., Any]) -> str:
    """Which attribute a getter or setter of a tensor is for."""
    return getattr(getattr(function, "__self__", None), "__name__", "")


def is_setter(function: Callable[..., Any], *attributes: str) -> bool:
    """Whether a call assigns to one of these attributes of a tensor."""
    return getattr(function, "__name__", "") == "__set__" and attribute_of(function) in attributes


def op_of(function: Callable[..., Any]) -> object | None:
    """The canonical op of a call, or None where it gives no tensor to follow."""
    name = getattr(function, "__name__", "")
    if name == "__get__" or is_setter(function, "real", "imag"):
        attribute = attribute_of(function)
        return attribute if attribute in _GETTERS else None
    return None if name in _NO_TENSOR else canonical_op(function)


def is_inplace(function: Callable[..., Any]) -> bool:
    """Whether the call writes into its first argument."""
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        if name == "__set__":
            return is_setter(function, "real", "imag")
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_") and not name.startswith("_")


def data_of(op: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments whose values the results are made of, in order."""
    if op not in _CONVERTS:
        return operands_of(args, kwargs)
    if op == "arange":  # how far it goes is a size
        starts = args[:1] if len(args) > 1 or "end" in kwargs else ()
        return operands_of((*starts, *args[2:3]), {name: kwargs[name] for name in ("start", "step") if name in kwargs})
    place, name = _CONVERTS[op] or (len(args), "")
    return operands_of(args[place : place + 1], {name: kwargs[name]} if name in kwargs else {})


@dataclass(frozen=True, slots=True)
class Kind:
    """What is known of a function before it is called.

    Attributes:
        op: canonical op, None where it gives no tensor to follow.
        inplace: whether it writes into its first argument.
        pointwise: whether each entry of its output is computed from the entries at its place.
        composite: whether it is one of torch's Python functions that can be run in the open.
        by_layout: whether what is decided of a call may be remembered under its layout.
        converts: whether some of its tensors give but a dtype, a device or a shape.
        moves: whether its tensors lie in other memory afterwards, or in another part of it.
        makes: the op of the one call that it makes, for a composite function that does nothing else; the op itself for
            any other.
    """

    op: object | None
    inplace: bool
    pointwise: bool
    composite: bool
    by_layout: bool
    converts: bool
    moves: bool
    makes: object | None


_KINDS: dict[Callable[..., Any], Kind] = {}


def kind_of(function: Callable[..., Any]) -> Kind:
    """The kind of a call; that of a function of torch's own is found out once."""
    kind = _KINDS.get(function)
    if kind is None:
        op = op_of(function)
        inplace, composite = is_inplace(function), is_composite(function)
        converts = op in _CONVERTS
        known = (op in BY_LAYOUT and not converts) or op in LOSSES
        makes = _ONE_CALL.get(function, op)
        by_layout = (known and not inplace and not composite) or function in _ONE_CALL
        moves = op is None and (function.__name__ in _MOVES or is_setter(function, "data"))
        kind = Kind(op, inplace, op in POINTWISE, composite, by_layout, converts, moves, makes)
        if op is None or isinstance(op, str):
            _KINDS[function] = kind
    return kind


def in_parts(call: ObservedCall) -> tuple[ObservedCall, ...]:
    """A call that does the same to each of its tensors, as one call for each of them."""
    if call.op != "broadcast_tensors":
        return (call,)
    shape = call.outputs[0].shape  # (tensors of this shape are returned as they are, and are no outputs here)
    pairs = zip([o for o in call.operands if o.tensor.shape != shape], call.outputs, strict=True)
    return tuple(
        replace(
            call,
            op="expand",
            function=Tensor.expand,
            args=(operand.tensor, *output.shape),
            kwargs={},
            operands=(operand,),
            outputs=(output,),
            layout=None,
        )
        for operand, output in pairs
    )


def adds_a_term(call: ObservedCall) -> bool:
    """Whether a number made of weights alone is added to one computed over the whole batch: a penalty."""
    return call.op in _SUMS and not call.located and all(operand.tensor.numel() == 1 for operand in call.operands)
