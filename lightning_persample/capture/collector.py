"""What a backward brings: contributions to weights, and the reasons where there are none."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from lightning_persample.batch_axis.base import Padding
from lightning_persample.batch_axis.observed import Description, line_of, version_of
from lightning_persample.capture.annotations import KNOWN, Marks
from lightning_persample.capture.failure import (
    FAULT,
    OverwrittenError,
    attempt,
    fault_of,
    guard,
    in_smaller_chunks,
    reason_of,
)
from lightning_persample.capture.graph import (
    REENTRANT,
    Edges,
    Takers,
    boundary,
    edges_between,
    ends_below,
    ends_below_each,
    gradient_reader,
    hooked_tensor,
    leaf_of,
    on_gradient,
)
from lightning_persample.capture.pull_back import Made, made_for_one_call, settle_one
from lightning_persample.capture.weight import Computation, Weight
from lightning_persample.gradients import Dense, SampleGradient, sq_norms, sq_norms_and_sum
from lightning_persample.gradients.cost import DEFAULT_OPTIONS, MEMORY_BUDGET
from lightning_persample.gradients.host import ASYNCHRONOUS
from lightning_persample.gradients.precision import Later
from lightning_persample.torch_internals import AccumulateGrad


class WatchedNodes:
    """The nodes of one capture."""

    # `marks`: tells the leaves that are weights.

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._weights: dict[Node, list[Weight]] = {}
        self._seen: set[Node] = set()
        # of calls with one output, by the node that gets its gradient first, that of the output, which is another where
        # it is a view, and those of the inputs and of what these are views of
        self.calls: dict[Node, tuple[Node, set[Node]]] = {}
        self._around: dict[Node, tuple[list[Node], list[Weight]]] = {}
        self._handles: list[RemovableHandle] = []
        # a backward has met a checkpoint that runs its forward and a backward of its own in the midst
        self.recomputes = False
        self.padded: dict[Node, Padding] = {}  # by the node of a padded tensor

    def watch(self, node: Node, weight: Weight) -> None:
        """Remember the node of a weight that is no leaf, or whose leaf has no mark."""
        self._weights.setdefault(node, []).append(weight)

    def weights_of(self, node: Node) -> list[Weight]:
        """The weights whose gradient goes through a node."""
        known = self._weights.get(node)
        if known is not None or type(node) is not AccumulateGrad:
            return known or []
        leaf = node.variable  # type: ignore[attr-defined]
        entry = self._marks.entries.get(id(leaf))
        return [entry[1]] if entry is not None and entry[0]() is leaf and type(entry[1]) is Weight else []

    def watch_inside(self, outputs: Sequence[Tensor], stop: set[Node]) -> None:
        """Gradients may enter a call through its outputs only, not through the nodes between them and the weights."""
        node = outputs[0].grad_fn if len(outputs) == 1 else None
        if node is not None:
            for below, _ in node.next_functions:
                if below is not None and below not in stop and type(below) is not AccumulateGrad:
                    break
            else:  # as nearly always: there are none
                self._seen.add(node)
                return
        self._watch_between([output.grad_fn for output in outputs], boundary(outputs), stop)

    def _watch_between(self, tops: Iterable[Node | None], entrances: set[Node], stop: set[Node]) -> Edges:
        inside = edges_between(tops, stop)
        self._seen.update(inside)
        for node, ends in ends_below_each(inside, lambda end: bool(self.weights_of(end))).items():
            if node not in entrances:
                for end in ends:
                    for weight in self.weights_of(end):
                        self.watch(node, weight)
        return inside

    def _read_calls(self) -> None:
        """Watch inside the calls with one output; a walk need not go through them again, but around them."""
        entries = self._marks.entries
        for node, (top, stop) in self.calls.items():
            if node in self._around:
                continue
            further: list[Node] = []
            weights: list[Weight] = []
            inner: list[tuple[Node, list[Weight]]] = []
            edges = top.next_functions
            is_plain = top is node or (len(edges) == 1 and edges[0][0] is node)  # (its output is a view)
            for end, _ in node.next_functions if is_plain else ():
                if end is None:
                    continue
                between = None
                if end not in stop and type(end) is not AccumulateGrad:  # a weight's transpose or the like
                    edges = end.next_functions
                    if len(edges) != 1 or edges[0][0] is None:
                        break
                    between, end = end, edges[0][0]
                reached = self._weights.get(end, [])
                if type(end) is AccumulateGrad:
                    leaf: Tensor = end.variable  # type: ignore[attr-defined]
                    entry = entries.get(id(leaf))
                    if not reached and entry is not None and entry[0]() is leaf and type(entry[1]) is Weight:
                        reached = [entry[1]]
                    weights += reached
                elif end in stop:
                    further.append(end)
                else:
                    break
                if between is not None:
                    inner.append((between, reached))
            else:
                if is_plain:
                    self._seen |= {node, top}
                    for between, reached in inner:
                        self._seen.add(between)
                        self._weights.setdefault(between, []).extend(reached)
                    self._around[node] = further, weights
                    continue
            inside = self._watch_between([top], {top, node}, stop)
            if node in inside:
                ends = ends_below(node, inside)
                self._around[node] = (
                    [end for end in ends if leaf_of(end) is None],
                    [weight for end in ends if leaf_of(end) is not None for weight in self.weights_of(end)],
                )

    def below(self, tops: list[Tensor]) -> tuple[list[tuple[Node, list[Weight]]], list[Weight]]:
        """What a backward will meet: nodes through which weights get a gradient unseen, and weights."""
        self._read_calls()
        unseen: list[tuple[Node, list[Weight]]] = []
        met: list[Weight] = []
        stack = [top.grad_fn for top in tops if top.grad_fn is not None]
        visited = set(stack)
        while stack:
            node = stack.pop()
            call = self._around.get(node)
            if call is not None:  # what is below it is known as far as the nodes of its inputs
                met += call[1]
                for further in call[0]:
                    if further not in visited:
                        visited.add(further)
                        stack.append(further)
                continue
            is_unseen = node not in self._seen
            self.recomputes |= is_unseen and node.name() == REENTRANT
            for following, _ in node.next_functions:
                if following is None:
                    continue
                if is_unseen and (type(following) is AccumulateGrad or following in self._weights):
                    weights = self.weights_of(following)
                    if weights:
                        unseen.append((node, weights))
                if following not in visited:
                    visited.add(following)
                    stack.append(following)
        return unseen, met

    def release_later(self, handle: RemovableHandle) -> None:
        """Take a hook away when no backward will come: it holds nodes that hold it, a circle that no collector sees."""
        self._handles.append(handle)

    def release(self) -> None:
        """Take away the hooks that were to be."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def clear(self) -> None:
        """Forget every node."""
        self.calls.clear()
        self._around.clear()
        self.padded.clear()
        self._weights.clear()
        self._seen.clear()


Kind: TypeAlias = Literal["mixing", "weighting", "not_additive"]


class Observes(Protocol):
    """Tells whether the present backward counts, and takes note of a fault of this package."""

    accepting: bool

    def fail(self, error: Exception) -> None:
        """Take note of it."""


class Notes:
    """Texts on calls and on the loss; a record has those of its own backward."""

    # `collector`: tells whether the present backward counts; it holds the notes, so that they do not hold it.

    def __init__(self, collector: Observes) -> None:
        self._collector = weakref.ref(collector)
        self._texts: dict[Kind, dict[str, None]] = {"mixing": {}, "weighting": {}, "not_additive": {}}
        self._always: set[tuple[Kind, str]] = set()
        self._reached: set[tuple[Kind, str]] = set()
        self._of_loss: dict[str, None] = {}
        self._later: dict[Callable[[], str | None], Kind] = {}
        # the padding that the present backward takes nothing of but sums, to which its zeros add nothing
        self.left_out: frozenset[Padding] = frozenset()
        self.axis_lost: set[str] = set()  # texts after which it is not known whose the values are, and no more
        # the kinds and texts that are not so of the present backward
        self.excused: frozenset[tuple[str, str]] = frozenset()

    def add(self, kind: Kind, text: str, outputs: Iterable[Tensor]) -> None:
        """Say something of a call in every backward that goes through one of its outputs."""
        self._texts[kind].setdefault(text)
        hooked = [output for output in outputs if output.requires_grad]
        if not hooked:
            self._always.add((kind, text))
        for output in hooked:
            on_gradient(output, partial(self._reach, kind, text), self._fail)

    def add_of_padding(self, padding: Padding, output: Tensor) -> None:
        """Say something of a call in every backward that goes through entries of its output that are no sample's."""
        self._texts["mixing"].setdefault(padding.text)
        self.axis_lost.add(padding.text)
        read = gradient_reader(output, hooked_tensor(output))
        on_gradient(output, partial(self._reach_padding, padding, read), self._fail)

    def start_backward(self, padding: Padding, node: Node, takers: Takers) -> None:
        """Find out what a backward takes of a padded tensor: sums, to which zeros add nothing, or a mean of all."""
        entries, self.left_out = padding.entries, self.left_out - {padding}
        rows = entries.size(0) * (entries.size(1) if padding.is_by_sample else 1)
        if takers.count(node, rows):
            self._reached.add(("mixing", padding.text))
        elif padding.axis is not None and takers.add_up(node, padding.axis, entries.dim()):
            self.left_out |= {padding}

    def add_later(self, kind: Kind, text: Callable[[], str | None], output: Tensor) -> None:
        """Ask whether there is something to say of a call, and what, after a backward that goes through its output."""
        if output.requires_grad:
            on_gradient(output, partial(self._ask, kind, text), self._fail)

    def add_of_loss(self, text: str) -> None:
        """Say that the samples are weighted differently from `loss_reduction` in the loss of the next backward."""
        self._of_loss.setdefault(text)

    def known(self, kind: Kind) -> tuple[str, ...]:
        """All texts on calls, whatever a backward goes through."""
        return tuple(self._texts[kind])

    def mixing_of(self, texts: Iterable[str]) -> str | None:
        """The first of these texts that the present backward has gone through already; None where there is none."""
        seen = self._reached - self.excused
        return next((text for text in texts if ("mixing", text) in seen), None)

    def reached(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """By kind the texts on calls that the present backward has gone through, in order, and those on its loss."""
        for ask, of in self._later.items():
            text = ask()
            if text is not None:
                self._texts[of].setdefault(text)
                self._reached.add((of, text))
        self._later.clear()
        mixing, weighting, not_additive = [], [*self._of_loss], []
        if self._always or self._reached:
            seen = (self._always | self._reached) - self.excused
            mixing, calls, not_additive = ([t for t in texts if (of, t) in seen] for of, texts in self._texts.items())
            weighting = calls + weighting
        return tuple(mixing), tuple(weighting), tuple(not_additive)

    def split(self, texts: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Texts on calls by which samples influence each other, and those after which it is not known whether."""
        lost = tuple(text for text in texts if text in self.axis_lost)
        return tuple(text for text in texts if text not in lost), lost

    def forget(self) -> None:
        """The backward is over."""
        self._of_loss.clear()
        self._reached.clear()
        self._later.clear()
        self.excused = frozenset()

    def _fail(self, error: Exception) -> None:
        collector = self._collector()
        if collector is not None:
            collector.fail(error)

    def _ask(self, kind: Kind, text: Callable[[], str | None], grad: Tensor) -> None:
        collector = self._collector()
        if collector is not None and collector.accepting:
            self._later[text] = kind

    def _reach_padding(self, padding: Padding, read: Callable[[Tensor], Tensor], grad: Tensor) -> None:
        if padding not in self.left_out and bool(read(grad).masked_select(padding.entries).any()):
            self._reach("mixing", padding.text, grad)

    def _reach(self, kind: Kind, text: str, grad: Tensor) -> None:
        collector = self._collector()
        if collector is not None and collector.accepting:
            self._reached.add((kind, text))


USED_AGAIN = (
    "it was used again by a call that ran during the backward (activation checkpointing); use "
    "checkpoint(..., use_reentrant=False)"
)


@dataclass(frozen=True)
class Part:
    """The loss of a backward is made of some of the samples alone."""

    samples: tuple[int, ...]  # which
    mean_of: int  # it is their sum over this number, up to a number of the user's; 0 where it is not
    is_sum: bool  # it is their sum


@dataclass(frozen=True)
class Means:
    """The loss of a backward adds up means over different samples."""

    weights: Tensor  # what each sample weighs in it, (B,); 0 where it has no part
    notes: frozenset[tuple[str, str]]  # what was said of the calls that added them up


class Collector:
    """Takes contributions to weights."""

    # `keep_structures`: keep every contribution until the backward ends, for quantities other than the squared norm;
    # `fuse`: form the sum over the samples, the weight's gradient, from the samples' gradients where that is cheaper.

    # whether declared weights of the samples are compared with those that they have in the loss
    compares_weights = False
    takes_norms = True  # whether squared norms are asked for
    # by parameter what all dots that are asked for are with, where that is known; they are taken at once
    vectors: Mapping[str, Tensor] = MappingProxyType({})
    # while a function runs in the open, the last plan that was applied, the id of what the call gave, and the call
    last: tuple[Any, ...] | None = None

    def __init__(
        self,
        weights: Mapping[str, Tensor],  # the parameters, by name, each with its tensor
        batch_size: int,  # number of samples B
        keep_structures: bool = False,
        buffers: Iterable[Tensor] = (),  # tensors of the module that hold no sample's data
        fuse: bool = False,
    ) -> None:
        self.batch_size = batch_size
        self.fuse = fuse
        self.marks = Marks(batch_size)  # what is known of each tensor
        self.weights: list[Weight] = []
        self.nodes = WatchedNodes(self.marks)  # where gradients of weights pass
        self.notes = Notes(self)  # what there is to say
        self.keep: Callable[[Tensor], Tensor] = Tensor.detach  # what weights are computed from, until the backward
        devices: set[torch.device] = set()
        entries = self.marks.entries  # (filled without a call for each: a model has hundreds)
        for name, parameter in weights.items():
            weight = object.__new__(Weight)
            weight.names, weight.tensor = frozenset((name,)), parameter
            self.weights.append(weight)
            entries[id(parameter)] = weakref.ref(parameter), weight
            devices.add(parameter.device)
        for buffer in buffers:
            entries[id(buffer)] = weakref.ref(buffer), KNOWN
        self.refused: dict[str, str] = {}  # by parameter the reason why it has no values
        self.accepting = True  # does the present backward count?
        self.frees = False  # does it free the graph it has gone through?
        self.keep_structures = keep_structures
        # parameters of which all contributions are kept, as their sum is compared with the batch's gradient
        self.kept: set[str] = set()
        self.dtypes: set[torch.dtype] = set()  # those of the gradients from which contributions to them were computed
        self.kernel_options = DEFAULT_OPTIONS  # under which contributions are computed
        # the places in the batch of the samples that are followed, (m,); None follows all
        self.samples: Tensor | None = None
        self._copies: dict[torch.device, Tensor] = {}
        # parameters whose gradient in this backward has a term that belongs to no sample
        self.penalized: set[str] = set()
        # parameters that got a gradient in this backward, with this where a hook may have changed it
        self.got_gradient: dict[str, Tensor | None] = {}
        # why nothing of this capture can be relied on: this package itself has failed; "" as nearly always
        self.fault = ""
        # of memory that was written to in place, by where it begins: how often by then, in which call and where
        self.writes: dict[int, tuple[int, str, tuple[str, int] | None]] = {}
        # of calls that add a term of no sample, by node: why samples mix in the calls that go on with the result
        self.terms: dict[Node, dict[str, None]] = {}
        self.noted: dict[tuple[str, str], set[Node]] = {}  # the nodes of what notes hold of, by their kind and text
        self.excuses: dict[tuple[str, str], set[Node]] = {}  # the nodes below which they do not hold
        # of squared norms, until the backward has ended; None where they are corrected at once
        kinds = map(attrgetter("type"), devices)
        self.corrections: deque[tuple[list[Weight], Later]] | None = None if ASYNCHRONOUS.isdisjoint(kinds) else deque()

    def fail(self, error: Exception, what: str = "the capture of the training step") -> None:
        """Note that this package itself has failed: no value of this capture is given."""
        self.fault = self.fault or guard(fault_of, lambda _: FAULT)(error, what)

    def contribute(self, weight: Weight, gradient: SampleGradient) -> None:
        """Take what one use contributes."""
        if weight.taken is not None:
            self.refuse([weight], USED_AGAIN)
            return
        if self.nodes.recomputes and weight.derivation is not None:
            gradient = gradient._map(Tensor.clone)  # what autograd hands on may become `.grad`, which others add to
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
                weight.calls = [*weight.calls, (compute, grads)]

    def collect(
        self, contributions: list[tuple[Weight, SampleGradient]], wants_sums: bool = False
    ) -> list[tuple[Weight, Tensor]]:
        """Take what one call contributes to its weights; where it is all there is, keep only what is asked of it."""
        if self.samples is not None:
            contributions = [
                (weight, gradient.pick(self._samples_on(gradient.device))) for weight, gradient in contributions
            ]
        sums: list[tuple[Weight, Tensor]] = []
        alone: list[tuple[Weight, SampleGradient]] = []
        for weight, gradient in contributions:
            if self.takes_at_once((weight,)):
                alone.append((weight, gradient))
                continue
            if wants_sums and self.keep_structures:  # the gradients are asked for
                gradient = Dense(in_smaller_chunks(gradient.dense))
                sums.append((weight, gradient.grad.sum(0)))
            self.contribute(weight, gradient)
        if wants_sums:
            for weight, gradient in alone:
                square, total = in_smaller_chunks(partial(sq_norms_and_sum, gradient))
                self.take([weight], [square])
                sums.append((weight, total))
        elif alone:
            later: list[Later | None] | None = None if self.corrections is None else []
            weights, gradients = zip(*alone, strict=True)
            self.take(weights, in_smaller_chunks(partial(self.asked, gradients, self.vectors_of(weights), later)))
            for (weight, _), each in zip(alone, later or (), strict=False):
                if each is not None:
                    self.correct_later([weight], each)
        return sums

    def _samples_on(self, device: torch.device) -> Tensor:
        """The places of the samples that are followed, copied to a device once."""
        known = self._copies.get(device)
        if known is None:
            assert self.samples is not None
            known = self._copies[device] = self.samples.to(device)
        return known

    def correct_later(self, weights: list[Weight], later: Later) -> None:
        """Keep what corrects the squared norms of these weights until the device has them, within bounds of memory."""
        if self.corrections is None or not later.corrections:
            return
        self.corrections.append((weights, later))
        limit = self.kernel_options.max_memory
        while sum(each.size for _, each in self.corrections) > (MEMORY_BUDGET if limit is None else limit):
            self._correct_next()  # (the host waits for what the device was given first)

    def correct(self) -> None:
        """Correct all squared norms in which rounding errors may show; the host waits until the device has them."""
        while self.corrections:
            self._correct_next()

    def _correct_next(self) -> None:
        assert self.corrections is not None
        weights, later = self.corrections.popleft()

        def failed(error: Exception) -> None:
            names = sorted(frozenset().union(*(weight.names for weight in weights)))
            self.refuse(weights, reason_of(error, f"the squared norms of `{', '.join(names)}`"))

        with torch.no_grad():
            for correct in later.corrections:
                attempt(in_smaller_chunks, failed, correct)

    def vectors_of(self, weights: Iterable[Weight]) -> list[Tensor]:
        """The vectors of these parameters; none where no dots are taken at once."""
        return [self.vectors[name] for weight in weights for name in weight.names] if self.vectors else []

    def asked(
        self,
        gradients: Sequence[SampleGradient],
        vectors: Sequence[Tensor],
        later: list[Later | None] | None = None,
    ) -> list[Tensor]:
        """The squared norms (B,) of each, and the dots (B,) with its vector, as far as they are asked for."""
        squares = sq_norms(gradients, later) if self.takes_norms else []
        return squares + [gradient.dot(vector) for gradient, vector in zip(gradients, vectors, strict=False)]

    def take(self, weights: Sequence[Weight], results: Sequence[Tensor]) -> None:
        """Keep what `asked` has given of these weights."""
        count, nothing = len(weights), [None] * len(weights)
        squares = results[:count] if self.takes_norms else nothing
        dots = results[-count:] if self.vectors else nothing
        for weight, square, dot in zip(weights, squares, dots, strict=True):
            weight.taken = square, dot

    def takes_at_once(self, weights: Iterable[Weight]) -> bool:
        """Whether the one use of these weights contributes now, and nothing is asked for that needs it later."""
        if self.keep_structures:
            return False
        for weight in weights:
            once = weight.uses == 1 and weight.derivation is None and not weight.children and weight.taken is None
            if not once or (self.kept and weight.names & self.kept):
                return False
        return True

    def made_for(self, weights: Sequence[Weight]) -> Made | None:
        """What weights of one call are made of, where that can be pulled back now and nothing needs it later."""
        if self.keep_structures or (self.kept and any(weight.names & self.kept for weight in weights)):
            return None
        return made_for_one_call(weights)

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
