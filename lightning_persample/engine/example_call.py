"""One example call of an op, cut into samples in several layouts, and its loop over single samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_persample.engine.observed import tensors_in
from lightning_persample.errors import PerSampleError, UnsupportedError
from lightning_persample.rules import Rule, op_name

__all__ = ["ExampleCall", "Samples", "along", "cut", "relative_error"]


@dataclass(frozen=True, eq=False)
class Samples:
    """The batched arguments of a call and the gradients of its outputs, sample by sample.

    Attributes:
        text: the layout, in words.
        dim: the axis along which the op sees the samples in the batched arguments.
        inputs: the batched arguments by name, each (B, *shape with the rows of one sample along `dim`).
        output_dims: the axis along which the samples lie in each output that has a gradient.
        output_grads: the gradient of each of these outputs, (B, *shape as for `inputs`).
        output: the first output, cut likewise.
    """

    text: str
    dim: int
    inputs: Mapping[str, Tensor]
    output_dims: tuple[int, ...] = ()
    output_grads: tuple[Tensor, ...] = ()
    output: Tensor | None = None

    @property
    def count(self) -> int:
        """Number of samples B."""
        return next(iter(self.inputs.values())).shape[0]

    def sample(self, number: int) -> dict[str, Tensor]:
        """The batched arguments with which a loop calls the op for one sample."""
        return {name: tensor[number] for name, tensor in self.inputs.items()}

    def whole(self) -> dict[str, Tensor]:
        """The batched arguments of the call with all samples."""
        return {name: along(tensor, self.dim) for name, tensor in self.inputs.items()}


def cut(tensor: Tensor, dim: int, rows: int) -> Tensor:
    """Samples of `rows` neighbouring rows of axis `dim`: (B, ..., rows, ...); rows left over are dropped."""
    count = tensor.size(dim) // rows
    return tensor.narrow(dim, 0, count * rows).unflatten(dim, (count, rows)).movedim(dim, 0)


def along(samples: Tensor, dim: int) -> Tensor:
    """The inverse of `cut`: the rows of all samples after one another along axis `dim`."""
    return samples.movedim(0, dim).flatten(dim, dim + 1)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest error of a sample, ``max_i ||found[i] - expected[i]|| / ||expected[i]||``."""
    # found (B, *shape), expected (B, *shape)
    wide = torch.promote_types(torch.promote_types(found.dtype, expected.dtype), torch.float32)
    one, two = found.to(wide).reshape(found.shape[0], -1), expected.to(wide).reshape(expected.shape[0], -1)
    if not bool(one.isfinite().all() & two.isfinite().all()):
        return float("nan")
    difference, size = (one - two).norm(dim=1), two.norm(dim=1)
    scale = size.clamp_min(1e-2 * float(size.max()))
    return float(torch.where(difference > 0, difference / scale, 0.0).max())


@dataclass(frozen=True, eq=False)
class ExampleCall:
    """A call of an op with a rule, taken apart so that it can be repeated with other tensors.

    Attributes:
        op: the op.
        rule: its rule.
        args: the positional arguments; every tensor in them is an object of its own.
        kwargs: the keyword arguments.
        named: the arguments by name, as the rule has them; the tensors are those of `args` and `kwargs`.
        batched: names of the arguments that hold the samples.
        weights: names of the arguments whose gradients are compared.
    """

    op: Callable[..., Any]
    rule: Rule
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    named: Mapping[str, Any]
    batched: tuple[str, ...]
    weights: tuple[str, ...]

    def in_precision(self, dtype: torch.dtype) -> ExampleCall:
        """The same call with every floating point and complex tensor in another precision."""
        moved: dict[int, Any] = {}

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return moved.setdefault(id(leaf), _in_precision(leaf, dtype))

        args, kwargs = tree_map(move, self.args), tree_map(move, dict(self.kwargs))
        return replace(self, args=args, kwargs=kwargs, named={name: move(value) for name, value in self.named.items()})

    def run(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """The tensors that the op returns with other values for some of its arguments."""
        replaced = {id(self.named[name]): value for name, value in values.items()}

        def choose(leaf: Any) -> Any:
            return replaced.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf

        return list(tensors_in(self.op(*tree_map(choose, self.args), **tree_map(choose, dict(self.kwargs)))))

    def leaves(self) -> dict[str, Tensor]:
        """Copies of the weights that need a gradient."""
        return {name: self.named[name].detach().clone().requires_grad_() for name in self.weights}

    def laid_out(self, text: str, dim: int, inputs: Mapping[str, Tensor], fallback: Sequence[int] = ()) -> Samples:
        """Samples in one layout, with random gradients for the outputs."""
        samples = Samples(text, dim, inputs)
        name = op_name(self.rule.op)
        with self._explained(f"on {text}"):
            whole = self._differentiable(samples.whole())
            again = self._differentiable(samples.whole())
            alone = [self._differentiable(samples.sample(number)) for number in range(samples.count)]
        if not whole:
            raise UnsupportedError(
                f"no output of {name!r} has a gradient with respect to {', '.join(self.weights)}: an op needs a "
                "backward of its own (torch.library.register_autograd for a custom op) before it can have a rule"
            )
        if not self.rule.several_outputs and len(whole) != 1:
            raise UnsupportedError(
                f"{name!r} has {len(whole)} outputs with a gradient, but its rule takes one: register it with "
                "several_outputs=True"
            )
        if any(
            not torch.allclose(one, two, rtol=0, atol=0, equal_nan=True) for one, two in zip(whole, again, strict=True)
        ):
            raise UnsupportedError(f"{name!r} gives another value each time, so a loop over samples tells nothing")
        generator = torch.Generator().manual_seed(0)
        dims, grads = [], []
        for place, output in enumerate(whole):
            parts = [outputs[place] for outputs in alone]
            axis = fallback[place] if samples.count == 1 and fallback else _sample_axis(output, parts[0])
            if axis is None or not _is_made_of(output, parts, axis):
                raise UnsupportedError(
                    f"{name!r} gives a sample another value alone than in its batch ({text}): it mixes samples, or "
                    "they do not lie along axis `batch_dim` of every batched argument; such an op has no per-sample "
                    "gradient to compare with"
                )
            dims.append(axis)
            grads.append(_random((samples.count, *parts[0].shape), output, generator))
        output = torch.stack([outputs[0] for outputs in alone])
        return Samples(text, dim, inputs, tuple(dims), tuple(grads), output)

    def loop(self, samples: Samples) -> dict[str, Tensor]:
        """The gradients by autograd through the op itself, one sample after the other."""
        rows: dict[str, list[Tensor]] = {name: [] for name in self.weights}
        for number in range(samples.count):
            weights = self.leaves()
            found: list[Tensor | None] = []
            with self._explained("and its backward on one sample alone"), torch.enable_grad():
                outputs = [output for output in self.run({**samples.sample(number), **weights}) if output.requires_grad]
                grads = [grad[number] for grad in samples.output_grads]
                found += torch.autograd.grad(outputs, list(weights.values()), grads, allow_unused=True)
            for (name, weight), grad in zip(weights.items(), found, strict=True):
                rows[name].append(torch.zeros_like(weight) if grad is None else grad.detach().to_dense())
        return {name: torch.stack(row) for name, row in rows.items()}

    def _differentiable(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            outputs = self.run({**{name: tensor.clone() for name, tensor in inputs.items()}, **self.leaves()})
        return [output.detach() for output in outputs if output.requires_grad]

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        dtype = next(iter(self.leaves().values())).dtype
        try:
            yield
        except Exception as error:  # whatever the user's op raises
            raise PerSampleError(
                f"running {op_name(self.rule.op)!r} {doing} in {dtype} failed with {type(error).__name__}: "
                f"{str(error).strip()}; `dtypes` chooses the precisions"
            ) from error


def _random(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Random numbers that every precision can hold."""
    numbers = torch.randn((2, *shape), generator=generator).bfloat16().float()
    value = torch.complex(numbers[0], numbers[1]) if like.is_complex() else numbers[0]
    return value.to(like.device, like.dtype)


def _in_precision(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.is_complex():
        return tensor.detach().to(torch.complex128 if dtype is torch.float64 else torch.complex64)
    return tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()


def _sample_axis(whole: Tensor, part: Tensor) -> int | None:
    """The one axis that shrinks where one sample is taken out of the batch."""
    if whole.dim() != part.dim():
        return None
    changed = [dim for dim in range(whole.dim()) if whole.size(dim) != part.size(dim)]
    return changed[0] if len(changed) == 1 else None


def _is_made_of(whole: Tensor, parts: Sequence[Tensor], axis: int) -> bool:
    joined = torch.cat(list(parts), dim=axis)
    if joined.shape != whole.shape:
        return False
    tolerance = 1e-2 if whole.dtype in (torch.float16, torch.bfloat16) else 1e-4
    scale = float(whole.abs().max()) if whole.numel() else 0.0
    return torch.allclose(joined, whole, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
