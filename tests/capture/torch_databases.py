"""Sample inputs of torch's own test suite, op by op and module by module."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from tests.capture.shipped_trials import Trial, module_trials, trials

__all__ = ["MODULES", "OPS", "has_parameters", "module_cases", "op_cases"]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db
    from torch.testing._internal.opinfo import core

# Importing torch's test suite forbids setting torch.backends flags from then on; other tests may want to.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

# For each input torch looks through the whole stack for a unittest that asks for it: longer than it makes the input.
for module in (common_utils, core):
    if hasattr(module, "extract_test_fn"):  # (in releases that do)
        module.extract_test_fn = lambda: None

OPS = {f"{info.name}.{info.variant_test_name}".rstrip("."): info for info in op_db}
MODULES = {info.module_cls.__name__: info for info in module_db}


def _constants(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments that can be neither the batch nor parameters."""
    if name in ("index_put", "put"):  # which of two values for one place stays is undefined
        return [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point()]
    if name in ("nn.functional.batch_norm", "nn.functional.instance_norm"):  # running statistics have no gradient
        return [*args[1:3], kwargs.get("running_mean"), kwargs.get("running_var")]
    return [kwargs.get("offsets")]  # of an embedding_bag: the first is 0, and each says where the bag before ends


def _spread(items: Sequence[Any], most: int) -> list[tuple[int, Any]]:
    """At most `most` items with their places, evenly over all of them."""
    step = -(-len(items) // most) if items else 1
    return list(enumerate(items))[::step]


def op_cases(name: str, most: int, *, forms: bool = False, every_axis: bool = False) -> Iterator[Trial]:
    """Trials of up to `most` sample inputs of an op.

    Args:
        name: the op's name in torch's database, with its variant.
        most: sample inputs.
        forms: also call it as a method, in place and as an operator.
        every_axis: try every axis as the batch axis, not only the first.
    """
    info = OPS[name]
    torch.manual_seed(0)
    samples = list(info.sample_inputs("cpu", torch.float64, requires_grad=False))
    kinds = {"": info.op}
    if forms:
        kinds |= {".method": info.method_variant, ".inplace": info.inplace_variant, ".operator": info.operator_variant}
    for place, sample in _spread(samples, most):
        for form, function in kinds.items():
            if function is not None:
                text, args = f"{name}{form}[{place}]", (sample.input, *sample.args)
                inplace = form == ".inplace"
                never = [leaf for leaf in _constants(name, args, sample.kwargs) if isinstance(leaf, torch.Tensor)]
                for trial in trials(
                    text, function, args, sample.kwargs, every_axis=every_axis, inplace=inplace, never=never
                ):
                    if name != "take_along_dim" or _is_within(trial):
                        yield trial


def _is_within(trial: Trial) -> bool:
    """Whether indices are places of the tensor; torch's take_along_dim reads outside of its memory otherwise."""
    (tensor, indices, *dim), _ = tree_unflatten(list(trial.leaves), trial.spec)
    size = tensor.size(dim[0]) if dim and tensor.dim() else tensor.numel()
    return not indices.numel() or (int(indices.max()) < size and int(indices.min()) >= -size)


_RECURRENT = ("RNN", "GRU", "LSTM")


def _is_batched(name: str, given: Any) -> bool:
    """Whether an input of a transformer is for a batch, as about half of them are."""
    if "Transformer" not in name:
        return True
    return next(leaf.dim() for leaf in tree_leaves(given.forward_input.args) if isinstance(leaf, torch.Tensor)) == 3


def module_cases(name: str, training: bool, most: int, *, every_axis: bool = False) -> Iterator[Trial]:
    """Trials of up to `most` inputs of a module; the inputs of recurrent modules are for one sample and are stacked."""
    info = MODULES[name]
    torch.manual_seed(0)
    inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=False, training=training)
    inputs = [given for given in inputs if given.forward_input is not None and _is_batched(name, given)]
    for place, given in _spread(inputs, most):
        made, called = given.constructor_input, given.forward_input
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module: nn.Module = info.module_cls(*made.args, **made.kwargs).double().train(training)
            module(*called.args, **called.kwargs)  # (a lazy module takes its sizes from its first input)
        if not list(module.parameters()):
            continue
        stack, arguments, options = None, called.args, dict(called.kwargs)
        if name == "MultiheadAttention":  # (all its inputs are for one sample)
            axis = 0 if made.kwargs.get("batch_first") else 1
            arguments = tuple(torch.stack([t, 0.8 * t, t.flip(0)], axis) for t in arguments)
            mask = options.get("key_padding_mask")
            options["key_padding_mask"] = None if mask is None else torch.stack([mask] * 3)
        if name in _RECURRENT:
            stack = (0 if made.kwargs.get("batch_first") else 1, 1)
        elif name.endswith("Cell"):
            stack = (0, 0)
        text = f"{name}[{place}] {'train' if training else 'eval'}"
        yield from module_trials(text, module, arguments, options, stack=stack, every_axis=every_axis)


def has_parameters(name: str) -> bool:
    """Whether a module has parameters in one of its inputs."""
    info = MODULES[name]
    inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=False, training=True)
    made = [one.constructor_input for one in inputs[:8]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return any(list(info.module_cls(*given.args, **given.kwargs).parameters()) for given in made)
