"""What is used of torch beyond its documentation, each with what it is used for.

Names are bound here, at import, so that a call costs no more than that of torch's own name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import Variable, forward_ad
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase
from torch.nn.utils.rnn import pad_packed_sequence
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
from torch.utils.data._utils.pin_memory import pin_memory

__all__ = [
    "COLLECTIVES",
    "COMPILED",
    "CONTROL_FLOW",
    "KEPT_ITERATOR",
    "MAKE_ITERATORS",
    "OFFERING",
    "RUN_BACKWARD",
    "SECOND_WEIGHTS",
    "TORCH_FOLDER",
    "WRAPPER_OF_FABRIC",
    "AccumulateGrad",
    "BatchNormBase",
    "DropoutBase",
    "NormBase",
    "OpOverload",
    "TensorBase",
    "TorchDispatchMode",
    "TreeSpec",
    "after_backward",
    "any_autocast_is_on",
    "as_called",
    "backward_hooks",
    "backward_keeps_graph",
    "calls_run_as_written",
    "collate_of",
    "collates_rows",
    "count_function_modes",
    "current_backward",
    "disabled_torch_function",
    "dynamo_is_imported",
    "function_modes",
    "has_compiled_part",
    "has_processes",
    "hooks_after_accumulation",
    "innermost_transform",
    "is_recomputing",
    "is_torch_op",
    "is_view",
    "is_wrapped_by_transform",
    "local_part",
    "make_subclass",
    "name_of_custom_op",
    "number_of_node",
    "parameters_and_buffers",
    "pin_memory",
    "pop_function_mode",
    "push_function_mode",
    "recurrent_functions",
    "run_eagerly",
    "saved_results",
    "set_grad_enabled",
    "tensors_held_by",
    "torch_function_is_enabled",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "unwrapped",
    "version_counter",
    "version_kept",
    "view_base",
    "vmap_axis",
    "vmap_level",
    "with_torch_function",
    "without_subclasses",
    "without_torch_function",
]

TORCH_FOLDER = Path(torch.__file__).parent

# Torch functions, and the modes and subclasses they are offered to
without_torch_function = torch._C.DisableTorchFunction  # a context: nothing is offered to anybody
with_torch_function = torch._C._EnableTorchFunction  # a context within that one: calls are offered again
without_subclasses = torch._C.DisableTorchFunctionSubclass  # a context: calls are offered to modes alone
count_function_modes = torch._C._len_torch_function_stack
pop_function_mode = torch._C._pop_torch_function_stack
push_function_mode = torch._C._push_on_torch_function_stack
torch_function_is_enabled = torch._C._is_torch_function_enabled
disabled_torch_function = torch._C._disabled_torch_function_impl  # the ``__torch_function__`` of nn.Parameter

# The modules most of whose functions are Python and offer themselves by their `handle_torch_function`.
OFFERING: tuple[Any, ...] = (torch.nn.functional, torch._tensor)
CONTROL_FLOW = "torch._higher_order_ops"  # the modules of `torch.cond` and its like

# torch.func and forward differentiation
innermost_transform = torch._C._functorch.peek_interpreter_stack  # None outside all of them
is_wrapped_by_transform = torch._C._functorch.is_functorch_wrapped_tensor
unwrapped = torch._C._functorch.get_unwrapped  # what comes out of the transform, the very object
vmap_axis = torch._C._functorch.maybe_get_bdim  # the axis of what it wraps that a vmap hides; -1 for other transforms
vmap_level = torch._C._functorch.maybe_get_level

# Autograd
AccumulateGrad: type = vars(torch._C._functions)["AccumulateGrad"]  # the node that adds to the gradient of a leaf
current_backward = torch._C._current_graph_task_id  # the number of the backward that runs in this thread, or -1
backward_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
after_backward: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
RUN_BACKWARD = "_engine_run_backward"  # what torch.autograd.backward calls after it has checked its arguments
set_grad_enabled = torch._C._set_grad_enabled  # at once, where a context takes four calls
any_autocast_is_on = torch._C._is_any_autocast_enabled  # for a device of any type

# Tensors
TensorBase = torch._C.TensorBase  # the class that Tensor derives its attributes from
make_subclass = torch.Tensor._make_subclass
version_counter: Callable[[Tensor], int] = attrgetter("_version")  # how often its memory was written to
version_kept = torch.autograd.grad_mode._unsafe_preserve_version_counter  # at its end, this number is as at its start
number_of_node: Callable[[Any], int] = methodcaller("_sequence_nr")  # nodes of a thread are counted as they are made
view_base: Callable[[Tensor], Tensor | None] = attrgetter("_base")  # the tensor that one is a view of, or None
is_view = Tensor._is_view
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # attributes: hooks on a tensor by number, or None
backward_hooks: Callable[[Tensor], dict[int, Any] | None] = attrgetter(TENSOR_HOOKS[0])
hooks_after_accumulation: Callable[[Tensor], object] = attrgetter(TENSOR_HOOKS[1])

# Names of ops: the namespaces of what processes do together
COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd")

# Modules and data loaders
WRAPPER_OF_FABRIC = "_FabricModule"  # by name, for nothing but callbacks imports lightning
SECOND_WEIGHTS = ("_flat_weights", "_flat_weight_refs")  # where a recurrent layer holds its weights a second time
COMPILED = "_orig_mod"  # the attribute in which what ``torch.compile`` made of a module holds the module
MAKE_ITERATORS = ("__iter__", "_get_iterator")  # methods of a DataLoader
KEPT_ITERATOR = "_iterator"  # the attribute of a DataLoader that holds persistent workers
collates_rows: Callable[[Any], bool] = attrgetter("_auto_collation")  # of a DataLoader: it does not draw whole batches


def collate_of(iterator: object) -> object:
    """The collate function of an iterator of a DataLoader, or None."""
    return getattr(iterator, "_collate_fn", None)


def local_part(tensor: Any) -> Any:
    """The part of a DTensor on this device; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def tensors_held_by(module: nn.Module) -> dict[str, Tensor | None]:
    """The parameters and buffers of a module without those of its parts."""
    return {**module._parameters, **module._buffers}


_OF_ROOT = tuple((name, getattr(nn.Module, name)) for name in ("named_parameters", "named_buffers", "_named_members"))
_OF_EACH = nn.Module.named_modules


def parameters_and_buffers(module: nn.Module) -> tuple[dict[str, nn.Parameter], list[Tensor]]:
    """``dict(module.named_parameters())`` and ``list(module.buffers())``, by one walk through the modules."""
    parameters: dict[str, nn.Parameter] = {}
    buffers: list[Tensor] = []
    # Apart by kind: a parameter may be a buffer of another module, too.
    seen: set[int] = set()
    seen_parameters: set[int] = set()
    seen_buffers: set[int] = set()
    lists_its_own = False  # rather than what it holds
    for name, known in _OF_ROOT:
        lists_its_own |= getattr(getattr(module, name), "__func__", None) is not known
    rest = [(module, "")]
    while rest and not lists_its_own:
        part, prefix = rest.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        lists_its_own = getattr(part.named_modules, "__func__", None) is not _OF_EACH
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in seen_parameters:
                seen_parameters.add(id(parameter))
                parameters[prefix + name] = parameter
        for buffer in part._buffers.values():
            if buffer is not None and id(buffer) not in seen_buffers:
                seen_buffers.add(id(buffer))
                buffers.append(buffer)
        for name, child in reversed(part._modules.items()):
            if child is not None:
                rest.append((child, f"{prefix}{name}."))
    return (dict(module.named_parameters()), list(module.buffers())) if lists_its_own else (parameters, buffers)


_WORLD = torch.distributed.distributed_c10d._world if torch.distributed.is_available() else None


def has_processes() -> bool:
    """Whether there is a process group, if only of one process."""
    return _WORLD is not None and _WORLD.default_pg is not None


def dynamo_is_imported() -> bool:
    """Whether anything can have been compiled; to import it takes seconds."""
    return "torch._dynamo" in sys.modules


def run_eagerly() -> Callable[[], object]:
    """Run compiled code as it was written, from now on; -> what takes that back."""
    if not dynamo_is_imported():  # nothing is compiled
        return bool  # which does nothing
    frame: Any = torch._dynamo.eval_frame
    return partial(frame._set_stance, frame._set_stance(_eager_stance()))


@cache
def _eager_stance() -> Any:
    """What `torch.compiler.set_stance("force_eager")` sets."""
    changed = torch.compiler.set_stance("force_eager")
    changed.__exit__(None, None, None)
    return changed.stance


def has_compiled_part(module: nn.Module) -> bool:
    """Whether the module or a part of it went through ``torch.compile``."""
    if not dynamo_is_imported():
        return False
    compiled = torch._dynamo.eval_frame.OptimizedModule
    return any(isinstance(part, compiled) or part._compiled_call_impl is not None for part in module.modules())


def recurrent_functions(kind: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The functions of torch for a recurrent layer of a kind ("lstm", "gru", ...), and for its cell."""
    return getattr(torch._VF, kind), getattr(torch._VF, f"{kind}_cell")


def is_torch_op(op: object) -> bool:
    """Whether this is a function or a method of torch's own."""
    owner = getattr(op, "__objclass__", None)
    module = getattr(op, "__module__", None) or getattr(owner, "__module__", None) or ""
    return module == "torch" or module.startswith(
        ("torch._C", "torch._tensor", "torch.nn.functional", "torch.functional")
    )


def as_called(function: Callable[..., Any]) -> Callable[..., Any]:
    """What ``torch.ops.aten.<op>`` calls, for it is a Python object itself; any other function as it is."""
    return function._op if isinstance(function, (OpOverload, OpOverloadPacket)) else function


def name_of_custom_op(op: object) -> object:
    """The name under which torch knows a custom op, whichever of its forms is called; anything else as it is."""
    if isinstance(op, CustomOpDef):
        op = op._opoverload
    if isinstance(op, OpOverload):
        op = op.overloadpacket
    return str(op) if isinstance(op, OpOverloadPacket) else op


_TOP_HOOKS = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # torch 2.6 has no way to ask


def calls_run_as_written() -> bool:
    """Whether a call and its backward will run as they stand."""
    # Other function modes may change what the call gives, transforms and forward differentiation have rules of their
    # own, and what hooks on saved tensors do (activation checkpointing, offloading) depends on which tensors are saved.
    return (
        (not count_function_modes() or all(type(mode) is DeviceContext for mode in function_modes()))
        and innermost_transform() is None
        and forward_ad._current_level < 0
        and not _saved_tensors_are_hooked()
    )


def _saved_tensors_are_hooked() -> bool:
    """Whether hooks on saved tensors are in place, or may be: activation checkpointing and offloading put them."""
    return _TOP_HOOKS is None or _TOP_HOOKS(False) is not None


def is_recomputing() -> bool:
    """Whether a checkpoint that is not reentrant computes again what it did not keep; no gradient comes to this."""
    hooks = None if _TOP_HOOKS is None else _TOP_HOOKS(False)
    if hooks is None:
        return False
    pack = hooks[0]
    of_checkpoint = getattr(pack, "__module__", "") == "torch.utils.checkpoint"
    return of_checkpoint and getattr(pack, "__qualname__", "").startswith("_recomputation_hook.")


def counted_from_front(dims: Iterable[int], rank: int) -> list[int]:
    """The axes that a node of autograd has saved: those counted from the end are numbers without a sign there."""
    return [(dim - 2**64 if dim >= 2**63 else dim) % rank for dim in dims]


def padded_length() -> int | None:
    """The `total_length` of the `pad_packed_sequence` that is running; None where it pads to the longest sequence."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not pad_packed_sequence.__code__:
        frame = frame.f_back
    return frame.f_locals.get("total_length") if frame.f_code is pad_packed_sequence.__code__ else None


def saved_results(output: Tensor, names: tuple[str, ...], axis: int = 0) -> dict[str, Tensor]:
    """What autograd keeps of a call's results, by the rows along an axis, for the backward of its output's node."""
    # Nothing where hooks on saved tensors are in place: to read what they have packed (activation checkpointing) would
    # run the forward again.
    node = output.grad_fn
    if not names or node is None or _TOP_HOOKS is None or _TOP_HOOKS(False) is not None:  # (one call less)
        return {}
    rows, found = output.shape[axis : axis + 1], {}
    for name in names:
        result = getattr(node, f"_saved_{name}", None)
        if isinstance(result, Tensor) and result.shape[:1] == rows:
            found[name] = result.detach()
    return found
