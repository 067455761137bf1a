"""Any torch call on any arguments as a module: some of its tensors are the batch, others are parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

__all__ = ["REJECTED", "TOLERANCE", "ModuleTrial", "Trial", "is_number", "losses", "module_trials", "trials"]

REJECTED = (ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError,
            ValueError)  # fmt: skip
TOLERANCE = 1e-10
COARSEST = 1e-2
_TOLERANCES = {torch.float64: TOLERANCE, torch.complex128: TOLERANCE, torch.float32: 1e-5, torch.complex64: 1e-5}
LEADING = 3
MOST = 16  # samples in a batch: the reference needs several calls for each


class Operands(nn.Module):
    """Parameters of a call: tensors among its arguments, a gain on each batch tensor and one on the outputs."""

    def __init__(self, operands: dict[int, Tensor], gains: Sequence[int], last: bool) -> None:
        super().__init__()
        for position, tensor in operands.items():
            self.register_parameter(f"operand{position}", nn.Parameter(tensor.detach().clone()))
        for position in gains:
            self.register_parameter(f"gain{position}", nn.Parameter(torch.ones(())))
        if last:
            self.last = nn.Parameter(torch.full((), 1.1))


@dataclass(frozen=True, eq=False)
class Trial:
    """One call with a choice of batch and parameters.

    Attributes:
        name: for messages.
        function: what is called.
        leaves: flattened (args, kwargs).
        spec: how the leaves make up (args, kwargs).
        batch: leaves that are the batch.
        operands: leaves that are parameters.
        batch_dim: the axis of the batch leaves that holds the samples.
        gains: multiply batch and outputs by parameters of their own, and let the batch require gradient.
        inplace: the call writes into its first argument.
    """

    name: str
    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: TreeSpec
    batch: tuple[int, ...]
    operands: tuple[int, ...]
    batch_dim: int
    gains: bool = False
    inplace: bool = False
    coefficients: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)

    @property
    def batch_size(self) -> int:
        return self.leaves[self.batch[0]].size(self.batch_dim)

    @property
    def tolerance(self) -> float:
        """1e-10 of a sample's norm in float64, more where the call or its inputs are in a coarser dtype."""
        return max(_TOLERANCES.get(dtype, COARSEST) for dtype in self.dtypes)

    def module(self) -> nn.Module:
        gains = [p for p in self.batch if self.gains and self.leaves[p].is_floating_point()]
        return Operands({p: self.leaves[p] for p in self.operands}, gains, self.gains)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.module().named_parameters())

    def tensors(self) -> list[Tensor]:
        """The batch, in fresh tensors."""
        fresh = [self.leaves[p].detach().clone() for p in self.batch]
        return [t.requires_grad_() if self.gains and t.is_floating_point() else t for t in fresh]

    def outputs(self, module: nn.Module, batch: Sequence[Tensor]) -> list[Tensor]:
        leaves = list(self.leaves)
        for position in self.operands:
            leaves[position] = getattr(module, f"operand{position}")
        for position, tensor in zip(self.batch, batch, strict=True):
            gain = getattr(module, f"gain{position}", None)
            leaves[position] = tensor if gain is None else tensor * gain
        if self.inplace and leaves[0].requires_grad is False:
            leaves[0] = leaves[0].clone()
        args, kwargs = tree_unflatten(leaves, self.spec)
        torch.manual_seed(0)
        result = self.run(module, args, kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(output.layout != torch.strided for output in outputs):
            raise NotImplementedError("the tests know strided tensors only")
        if not any(output.is_floating_point() or output.is_complex() for output in outputs):
            outputs = [output.to(torch.float64) for output in outputs]
        outputs = [output for output in outputs if output.is_floating_point() or output.is_complex()]
        given = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.dtypes.update(t.dtype for t in (*outputs, *given) if t.is_floating_point() or t.is_complex())
        last = getattr(module, "last", None)
        return outputs if last is None or is_number(outputs) else [output * last for output in outputs]

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.function(*args, **kwargs)

    def entries(self, output: Tensor) -> Tensor:
        """The loss of each entry of an output."""
        return losses(output, self.coefficients_for(output))

    def coefficients_for(self, output: Tensor) -> Tensor:
        shape = tuple(output.shape)
        if shape not in self.coefficients:
            self.coefficients[shape] = 0.5 + torch.rand(shape, dtype=torch.float64)
        return self.coefficients[shape]

    def loss(self, outputs: Sequence[Tensor]) -> Tensor:
        if is_number(outputs):
            return outputs[0]
        return torch.stack([self.entries(output).sum() for output in outputs]).sum()

    def sample(self, batch: Sequence[Tensor], index: int) -> list[Tensor]:
        return [tensor.narrow(self.batch_dim, index, 1) for tensor in batch]


@dataclass(frozen=True, eq=False)
class ModuleTrial(Trial):
    """A call of a module that has parameters of its own: `function` is the module."""

    def module(self) -> nn.Module:
        gains = [p for p in self.batch if self.gains and self.leaves[p].is_floating_point()]
        whole = Operands({}, gains, self.gains)
        whole.inner = copy.deepcopy(self.function)
        return whole

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return module.inner(*args, **kwargs)


def losses(output: Tensor, coefficients: Tensor) -> Tensor:
    if output.is_complex():
        return (output.real + 0.5 * output.imag) * coefficients + 0.5 * output.real.square()
    output = output.double() if output.dtype != torch.float64 else output
    return output * coefficients + 0.5 * output.square()


def is_number(outputs: Sequence[Tensor]) -> bool:
    return len(outputs) == 1 and outputs[0].dim() == 0 and not outputs[0].is_complex()


def _stacked_batch(tensor: Tensor) -> Tensor:
    """Under a new leading axis: the tensor and smaller versions of it, or its entries in another order."""
    parts = [tensor]
    for index in range(1, LEADING):
        if tensor.is_floating_point():
            parts.append(tensor * (1 - 0.15 * index - 0.02 * torch.rand_like(tensor)))
        else:
            parts.append(tensor.flatten()[torch.randperm(tensor.numel())].view_as(tensor))
    return torch.stack(parts)


def trials(
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    every_axis: bool = False,
    inplace: bool = False,
    never: Sequence[Tensor] = (),
) -> Iterator[Trial]:
    """Every way to make one tensor, all but one or all the batch, under a new leading axis and along those it has.

    Args:
        name: for messages.
        function: what is called.
        args: positional arguments.
        kwargs: keyword arguments.
        every_axis: try every axis as the batch axis, not only the first.
        inplace: the call writes into its first argument.
        never: tensors that are neither made the batch nor parameters.
    """
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [p for p, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if any(leaves[p].layout != torch.strided or leaves[p].is_complex() or leaves[p].is_quantized for p in tensors):
        return
    able = [p for p in tensors if all(leaves[p] is not tensor for tensor in never)]
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    for batch, operands in _choices(able, [p for p in able if leaves[p].dtype == torch.float64]):
        text = f"{name} batch={list(batch)} operands={list(operands)}"
        extended = list(leaves)
        for p in batch:
            extended[p] = _stacked_batch(leaves[p])
        for gains in (False, True) if operands else (True,):
            note = " gains" if gains else ""
            yield Trial(f"{text} leading{note}", function, tuple(extended), spec, batch, operands, 0, gains, inplace)
            most = max(leaves[p].dim() for p in batch)
            for dim in range(most if every_axis else min(most, 1)):
                if len({leaves[p].size(dim) if leaves[p].dim() > dim else -1 for p in batch}) > 1:
                    continue
                if 1 < leaves[batch[0]].size(dim) <= MOST:
                    here = f"{text} axis={dim}{note}"
                    yield Trial(here, function, tuple(leaves), spec, batch, operands, dim, gains, inplace)


def _choices(tensors: Sequence[int], floating: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Which leaves are the batch and which are parameters."""
    one = [((p,), tuple(q for q in floating if q != p)) for p in tensors]
    rest = [(tuple(q for q in tensors if q != p), (p,)) for p in floating]
    every = [(tuple(tensors), ())] if tensors else []
    return list(dict.fromkeys(choice for choice in (*one, *rest, *every) if choice[0]))


def module_trials(
    name: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    stack: tuple[int, int] | None = None,
    every_axis: bool = False,
) -> Iterator[ModuleTrial]:
    """The batch along each axis of the first input, in all inputs that agree on its size, and in fewer of them.

    `stack` makes a batch of inputs that are for one sample: along the first axis for the input and the second for
    everything else (states).
    """
    leaves, spec = tree_flatten((args, kwargs))
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    tensors = [p for p, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if not tensors or leaves[tensors[0]].is_complex():
        return
    first = tensors[0]
    dims = range(leaves[first].dim() if every_axis else min(leaves[first].dim(), 2))
    if stack is not None:
        for p in tensors:
            leaves[p] = _stacked_batch(leaves[p]).movedim(0, stack[0] if p == first else stack[1]).contiguous()
        dims = range(stack[0], stack[0] + 1)
    for dim in dims:
        size = leaves[first].size(dim)
        agreeing = tuple(p for p in tensors if leaves[p].dim() > dim and leaves[p].size(dim) == size)
        if stack is not None and stack[0] != stack[1]:
            agreeing = (first,)
        alike = tuple(p for p in agreeing if leaves[p].dim() == leaves[first].dim())
        for batch in dict.fromkeys((agreeing, alike, (first,))):
            for gains in (False, True):
                if 1 < size <= MOST:
                    text = f"{name} batch={list(batch)} axis={dim}{' gains' if gains else ''}"
                    yield ModuleTrial(text, module, tuple(leaves), spec, batch, (), dim, gains)
