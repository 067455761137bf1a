"""The vector-Jacobian product of any op, also of one that torch.func does not know."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.func import vjp, vmap

Pull: TypeAlias = Callable[[list[Tensor]], tuple[Tensor, ...]]

# An autograd.Function whose `forward` fills the context, as that of every custom op does and most in use do; a function
# that reads the numbers of a tensor, as `tensor_split` does with its places.
_UNKNOWN_TO_FUNC = ("must override the setup_context", "Cannot access data pointer")
BATCHES: dict[Hashable, bool] = {}
"""Whether torch's batching rules gave what an op gives of one gradient, by what tells it from others."""
_MOST = 4096


def vector_jacobian(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> tuple[list[Tensor], Pull]:
    """Run a function, and give what takes gradients of its outputs, any number of times, to those of its inputs."""
    # The function gives a list of tensors, here without a graph; it is called twice where torch.func does not know what
    # is inside. An input that no output depends on gets zeros.
    with torch.enable_grad():
        try:
            outputs, pull = vjp(function, *inputs)[:2]
            return outputs, pull
        except RuntimeError as error:
            if not any(text in str(error) for text in _UNKNOWN_TO_FUNC):
                raise
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        found = function(*leaves)

    def pull_by_autograd(gradients: list[Tensor]) -> tuple[Tensor, ...]:
        pairs = [pair for pair in zip(found, gradients, strict=True) if pair[0].requires_grad]
        if not pairs:
            return tuple(map(torch.zeros_like, leaves))
        tops, given = zip(*pairs, strict=True)
        return torch.autograd.grad(tops, leaves, given, retain_graph=True, materialize_grads=True)

    return [output.detach() for output in found], pull_by_autograd


def pull_each(pull: Pull, cotangents: Tensor, kind: Hashable | None) -> tuple[Tensor, ...]:
    """What `pull` gives of each cotangent, (n, *shape) to (n, *input) for each input: at once if that is the same."""
    # `pull` is of a function with one output; `kind` tells this function from others, as far as shapes and dtypes go,
    # None where nothing does.
    batches = BATCHES.get(kind) if kind is not None else None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented the b")
            if batches is None:  # the batching rule of torch for the backward of `cdist` takes all for the first one
                batches = _gives_the_same(pull, cotangents)
            if batches:
                found: tuple[Tensor, ...] = vmap(pull)([cotangents])
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError):  # no batching rule for the backward of this op
        batches = False
    if kind is not None and batches is not None and len(BATCHES) < _MOST:
        BATCHES[kind] = batches
    return found if batches else _one_after_another(pull, cotangents)


def _one_after_another(pull: Pull, cotangents: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.stack(column) for column in zip(*(pull([each]) for each in cotangents), strict=True))


def _gives_the_same(pull: Pull, like: Tensor) -> bool | None:
    """Whether both ways agree; None where they do as zeros or nan do, which says nothing of other values."""
    count = like[0].numel()
    probes = torch.arange(2 * count, device=like.device).float().cos().to(like.dtype).view(2, *like.shape[1:])
    bound = torch.finfo(like.dtype).eps ** 0.5
    pairs = [*zip(vmap(pull)([probes]), _one_after_another(pull, probes), strict=True)]
    if not all(agree(batch, alone, bound) for batch, alone in pairs):
        return False
    return True if all(bool(alone.isfinite().all()) and not torch.equal(*alone) for _, alone in pairs) else None


def agree(found: Tensor, expected: Tensor, bound: float) -> bool:
    """Whether two computations of one tensor differ by no more than a share of its largest finite entry."""
    known = expected[expected.isfinite()]
    largest = float(known.abs().max()) if known.numel() else 0.0
    return torch.allclose(found, expected.to(found.dtype), rtol=bound, atol=bound * largest, equal_nan=True)
