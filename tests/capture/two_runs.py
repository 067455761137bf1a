"""Everything that a training step leaves behind, with and without an observer, to be compared bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_persample.capture.mode import expanded_weights
from lightning_persample.capture.record import PerSampleRecord

__all__ = ["Step", "assert_same", "first_order", "second_order", "second_order_by_backward"]

Facts = dict[str, Any]
Step = Callable[[nn.Module, Sequence[Tensor], Facts], None]


def assert_same(
    module: nn.Module, batch: Sequence[Tensor], step: Step, *, autocast: bool = False, **options: Any
) -> tuple[Facts, PerSampleRecord | None]:
    """Take a step with a copy of the module as it is, and with another one observed.

    Args:
        module: stays as it is.
        batch: its tensors of floating-point numbers are asked for their gradient.
        step: notes what it sees.
        autocast: run the step in bfloat16 where torch knows how to.
        options: of the observer.

    Returns:
        What the plain step noted, and the last record of the observed step if there is one.
    """
    plain, _ = _run(module, batch, step, autocast, None)
    observed, record = _run(module, batch, step, autocast, options)
    assert list(observed) == list(plain)
    different = [name for name, fact in plain.items() if not _same(fact, observed[name])]
    assert not different
    return plain, record


def _run(
    module: nn.Module, batch: Sequence[Tensor], step: Step, autocast: bool, options: dict[str, Any] | None
) -> tuple[Facts, PerSampleRecord | None]:
    facts: Facts = {}
    module = copy.deepcopy(module)
    batch = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in batch]
    handles = [
        part.register_forward_hook(partial(_note_output, facts, name))
        for name, part in module.named_modules(remove_duplicate=False)
    ]
    torch.default_generator.manual_seed(3)  # (torch.manual_seed also asks after every kind of accelerator)
    watched = None if options is None else expanded_weights(module, batch, unsupported="ignore", **options)
    context: AbstractContextManager[Any] = nullcontext() if watched is None else watched
    with context, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        step(module, batch, facts)
    facts["random numbers"] = torch.get_rng_state()
    facts |= {f"{name} afterwards": tensor for name, tensor in module.state_dict().items()}
    facts |= {f"batch {place} afterwards": tensor for place, tensor in enumerate(batch)}
    for handle in handles:
        handle.remove()
    for leaf in (*module.parameters(), *batch):
        leaf.grad = None  # it may hold a graph that holds the leaf
    return facts, watched.records[-1] if watched is not None and watched.records else None


def _note_output(facts: Facts, name: str, part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor):
            same_as = [place for place, given in enumerate(tree_leaves(args)) if given is tensor]
            graph = None if tensor.grad_fn is None else tensor.grad_fn.name()
            view = (tensor._is_view(), tensor.requires_grad, tensor.is_leaf, tensor._version)
            facts[f"output {len(facts)} of {name!r}"] = tensor
            facts[f"kind of output {len(facts)} of {name!r}"] = (same_as, graph, *view, type(tensor))


def _leaves(module: nn.Module, batch: Sequence[Tensor]) -> list[Tensor]:
    return [leaf for leaf in (*module.parameters(), *batch) if leaf.requires_grad]


def _loss(output: Tensor) -> Tensor:
    """A mean over the samples' own losses, with another factor on each entry."""
    entries = output.numel()
    factors = torch.linspace(0.5, 1.5, entries, dtype=torch.float64).to(output.dtype).view(output.shape)
    return (output.square() * factors).sum() / max(entries, 1)


def first_order(module: nn.Module, batch: Sequence[Tensor], facts: Facts) -> None:
    """A training step: what it leaves in ``.grad``."""
    facts["loss"] = loss = _loss(module(*batch))
    loss.backward()
    facts |= {f"gradient {place}": leaf.grad for place, leaf in enumerate(_leaves(module, batch))}


def second_order(module: nn.Module, batch: Sequence[Tensor], facts: Facts) -> None:
    """The gradient of the squared norm of the gradients."""
    leaves = _leaves(module, batch)

    def slopes() -> Sequence[Tensor | None]:
        return torch.autograd.grad(_loss(module(*batch)), leaves, create_graph=True, allow_unused=True)

    _note_second_order(slopes, leaves, facts)


def second_order_by_backward(module: nn.Module, batch: Sequence[Tensor], facts: Facts) -> None:
    """The same, where the first gradients come by ``.grad``."""
    leaves = _leaves(module, batch)

    def slopes() -> Sequence[Tensor | None]:
        _loss(module(*batch)).backward(create_graph=True)
        return [leaf.grad for leaf in leaves]

    _note_second_order(slopes, leaves, facts)


def _note_second_order(slopes: Callable[[], Sequence[Tensor | None]], leaves: list[Tensor], facts: Facts) -> None:
    try:
        first = slopes()
        facts |= {f"gradient {place}": slope for place, slope in enumerate(first)}
        norm = torch.stack([slope.to_dense().square().sum() for slope in first if slope is not None]).sum()
        facts["squared norm"] = norm
        second = torch.autograd.grad(norm, leaves, allow_unused=True)
        facts |= {f"second gradient {place}": slope for place, slope in enumerate(second)}
    except RuntimeError as error:  # torch cannot differentiate everything twice
        facts["error"] = (type(error), str(error))


def _same(one: Any, other: Any) -> bool:
    """Whether two facts are the same; of tensors every bit of the values, the strides and the dtype."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return type(one) is type(other) and one == other
    if one.layout != other.layout or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.layout == torch.sparse_coo:
        parts = ((one._indices(), other._indices()), (one._values(), other._values()))
        return one.is_coalesced() == other.is_coalesced() and all(_same(*pair) for pair in parts)
    laid_out = one.stride() == other.stride() and one.is_contiguous() == other.is_contiguous()
    return laid_out and one.storage_offset() == other.storage_offset() and torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)
