"""What a backward brings: contributions to weights, the reasons where there are none, and what is kept of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_persample.engine.failure import FAULT, OverwrittenError, fault_of, guard, in_smaller_chunks, reason_of
from lightning_persample.engine.graph import Node
from lightning_persample.engine.marks import KNOWN, Marks
from lightning_persample.engine.notes import Notes
from lightning_persample.engine.observed import Description, line_of, version_of
from lightning_persample.engine.pull_back import settle_one
from lightning_persample.engine.watched_nodes import WatchedNodes
from lightning_persample.engine.weight import Computation, Weight
from lightning_persample.gradients import Dense, KernelOptions, SampleGradient, sq_norms, sq_norms_and_sum

__all__ = ["USED_AGAIN", "Collector", "Part"]

USED_AGAIN = "it was used again by a call that ran during the backward (activation checkpointing)"


@dataclass(frozen=True)
class Part:
    """The loss of a backward is made of some of the samples alone.

    Attributes:
        samples: which.
        mean_of: it is their sum over this number, up to a number of the user's; 0 where it is not.
        is_sum: it is their sum.
    """

    samples: tuple[int, ...]
    mean_of: int
    is_sum: bool


class Collector:
    """Takes contributions to weights.

    Args:
        weights: the parameters, by name, each with its tensor.
        batch_size: number of samples B.
        keep_structures: keep every contribution until the backward ends, for quantities other than the squared norm.
        buffers: tensors of the module that hold no sample's data.
        fuse: form the sum over the samples, the weight's gradient, from the samples' gradients where that is cheaper.

    Attributes:
        marks: what is known of each tensor.
        nodes: where gradients of weights pass.
        notes: what there is to say.
        keep: what weights are computed from, until the backward.
        refused: by parameter the reason why it has no values.
        accepting: does the present backward count?
        frees: does it free the graph it has gone through?
        kept: parameters of which all contributions are kept, as their sum is compared with the batch's gradient.
        dtypes: those of the gradients from which contributions to them were computed.
        kernel_options: under which contributions are computed.
        samples: the places in the batch of the samples that are followed, (m,); None follows all.
        penalized: parameters whose gradient in this backward has a term that belongs to no sample.
        fault: why nothing of this capture can be relied on: this package itself has failed; "" as nearly always.
        writes: of memory that was written to in place, by where it begins: how often by then, in which call and where.
        noted: the nodes of what notes hold of, by their kind and text.
        excuses: the nodes below which they do not hold.
        got_gradient: parameters that got a gradient in this backward, with this where a hook may have changed it.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        batch_size: int,
        keep_structures: bool = False,
        buffers: Iterable[Tensor] = (),
        fuse: bool = False,
    ) -> None:
        self.batch_size = batch_size
        self.fuse = fuse
        self.marks = Marks(batch_size)
        self.weights: list[Weight] = []
        self.nodes = WatchedNodes(self.marks)
        self.notes = Notes(self)
        self.keep: Callable[[Tensor], Tensor] = Tensor.detach
        for name, parameter in weights.items():
            weight = Weight(frozenset({name}), parameter)
            self.weights.append(weight)
            self.marks[parameter] = weight
        for buffer in buffers:
            self.marks[buffer] = KNOWN
        self.refused: dict[str, str] = {}
        self.accepting = True
        self.frees = False
        self.keep_structures = keep_structures
        self.kept: set[str] = set()
        self.dtypes: set[torch.dtype] = set()
        self.kernel_options = KernelOptions()
        self.samples: Tensor | None = None
        self.penalized: set[str] = set()
        self.got_gradient: dict[str, Tensor | None] = {}
        self.fault = ""
        self.writes: dict[int, tuple[int, str, tuple[str, int] | None]] = {}
        self.noted: dict[tuple[str, str], set[Node]] = {}
        self.excuses: dict[tuple[str, str], set[Node]] = {}

    def fail(self, error: Exception, what: str = "the capture of the training step") -> None:
        """Note that this package itself has failed: no value of this capture is given."""
        self.fault = self.fault or guard(fault_of, lambda _: FAULT)(error, what)

    def contribute(self, weight: Weight, gradient: SampleGradient) -> None:
        """Take what one use contributes."""
        if weight.has_norms:
            self.refuse([weight], USED_AGAIN)
            return
        weight.add(gradient)
        weight.received += 1
        if weight.is_over:
            settle_one(weight, self.fail_to_settle)

    def fail_to_settle(self, weight: Weight, error: Exception, text: Description) -> None:
        """Note that what a derived weight got cannot be moved to what it was computed from."""
        self.refuse([weight], self.why(error, text))

    def note_call(self, weights: Iterable[Weight], compute: Computation, grads: Sequence[Tensor | None]) -> None:
        """Keep what computes the contributions of a call, as far as their sum is going to be compared."""
        if not self.kept:
            return
        self.dtypes |= {grad.dtype for grad in grads if grad is not None}
        for weight in weights:
            if weight.names <= self.kept and (weight.derivation is None or weight.hooked):
                weight.calls.append((compute, grads))

    def collect(
        self, contributions: list[tuple[Weight, SampleGradient]], wants_sums: bool = False
    ) -> list[tuple[Weight, Tensor]]:
        """Take what one call contributes to its weights; where it is all there is, keep only the squared norms."""
        if self.samples is not None:
            contributions = [(weight, gradient.pick(self.samples)) for weight, gradient in contributions]
        sums: list[tuple[Weight, Tensor]] = []
        alone: list[tuple[Weight, SampleGradient]] = []
        for weight, gradient in contributions:
            if self._is_all_there_is(weight):
                alone.append((weight, gradient))
                continue
            if wants_sums and self.keep_structures:  # the gradients are asked for
                gradient = Dense(in_smaller_chunks(gradient.dense))
                sums.append((weight, gradient.grad.sum(0)))
            self.contribute(weight, gradient)
        if wants_sums:
            for weight, gradient in alone:
                weight.sq_norm, total = in_smaller_chunks(partial(sq_norms_and_sum, gradient))
                sums.append((weight, total))
        elif alone:
            squares = in_smaller_chunks(partial(sq_norms, [gradient for _, gradient in alone]))
            for (weight, _), sq_norm in zip(alone, squares, strict=True):
                weight.sq_norm = sq_norm
        return sums

    def wants_no_more(self, weights: Sequence[Weight]) -> bool:
        """Whether nothing but the squared norm of all samples is asked of a call that is the one use of its weights."""
        return self.samples is None and not self.refused and all(map(self._is_all_there_is, weights))

    def _is_all_there_is(self, weight: Weight) -> bool:
        """Whether the one use of a weight contributes now, and nobody asked for more than the squared norm."""
        once = weight.derivation is None and weight.uses == 1 and weight.children == 0 and not weight.has_norms
        return once and not self.keep_structures and not (self.kept and weight.names & self.kept)

    def why(self, error: Exception, what: object) -> str:
        """Why there are no values of a call or weight, with the op in place that overwrote what it needs."""
        if isinstance(error, OverwrittenError):
            times, call, place = self.writes.get(error.tensor.untyped_storage().data_ptr(), (-1, "", None))
            if times == version_of(error.tensor):
                return f"{error.before} by `{call}`{line_of(place)}{error.after}"
        return reason_of(error, what)

    def refuse(self, weights: Iterable[Weight], reason: str) -> None:
        """Note that a gradient of these weights could not be split by sample."""
        for weight in weights:
            for name in weight.names:
                self.refused.setdefault(name, reason)

    @contextmanager
    def not_counting(self) -> Iterator[None]:
        """Report nothing of the gradients computed inside: they are not the training gradient."""
        before, self.accepting = self.accepting, False
        try:
            yield
        finally:
            self.accepting = before
