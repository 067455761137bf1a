"""The context form: observe the torch calls of a training step and its backward, and give a record."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_persample.batch_axis.axis import Lost
from lightning_persample.batch_axis.batch import BatchLayout, Layout, declared_place, lay_out, mark_samples
from lightning_persample.batch_axis.observed import tensors_in
from lightning_persample.batch_axis.sample_weights import OTHER_WEIGHTS
from lightning_persample.capture.dispatch import Dispatcher
from lightning_persample.capture.failure import fault_of, guard, run_all, stop
from lightning_persample.capture.graph import on_arrival
from lightning_persample.capture.observing import ObservingMode, decomposed_backward
from lightning_persample.capture.parameters import (
    ShardedParameters,
    WatchedParameters,
    unwrapped,
)
from lightning_persample.capture.pull_back import settle
from lightning_persample.capture.record import (
    OF_KEPT,
    OwnScale,
    PerSampleRecord,
    asks_norms,
    classify,
    say,
    sq_norms_of,
    warn_user,
)
from lightning_persample.capture.values import (
    read_values,
    samples_with_values,
    why_no_factor,
)
from lightning_persample.errors import BatchSizeError, OptionError, PerSampleError, UnsupportedError
from lightning_persample.gradients import KernelOptions, kernel_options
from lightning_persample.options import check_option, check_options
from lightning_persample.torch_internals import (
    current_backward,
    has_processes,
    is_recomputing,
    parameters_and_buffers,
    set_grad_enabled,
)

_UNSUPPORTED = ("warn", "error", "ignore")
_BACKWARD = (torch.Tensor.backward, torch.autograd.backward)
_CLOSED = "this capture is closed; make a new one with expanded_weights for every training step"


def expanded_weights(
    module: nn.Module,
    batch: Any,
    *,
    loss_reduction: Literal["mean", "sum"] | Tensor = "mean",
    batch_dim: int = 0,
    batch_size: int | None = None,
    batch_layout: Layout | None = None,
    quantities: Collection[str] = ("sq_norm",),
    unsupported: Literal["warn", "error", "ignore"] = "warn",
    fuse_weight_grad: bool = False,
    max_memory: int | None = None,
    samples: Tensor | None = None,
) -> Capture:
    """Let every trainable parameter behave as if it had one copy per sample, in forward and backward in this context.

    The calls run natively on the real parameters: outputs, ``.grad`` and random numbers are those of a run without it.

    >>> import torch
    >>> from torch import nn
    >>> model, x, y = nn.Linear(3, 2), torch.randn(4, 3), torch.randn(4, 2)
    >>> with expanded_weights(model, (x, y)) as capture:
    ...     nn.functional.mse_loss(model(x), y).backward()
    >>> capture.record.norms().shape
    torch.Size([4])

    Args:
        module: the module whose parameters are followed.
        batch: whatever holds the batch's tensors: nested tuples, lists, mappings, dataclasses or plain objects. The
            module has to be called on these very tensors: ``data[i]`` a second time is another one.
        loss_reduction: how the loss combines the samples' own losses: "mean" (w_i = 1/B), "sum" (w_i = 1) or the
            weights w_i as a tensor (B,). Values are divided by w_i.
        batch_dim: the axis that holds the samples in the batch's tensors.
        batch_size: number of samples B; by default the size on which all tensors of the batch agree.
        batch_layout: a callable ``(batch)`` that says where the samples lie in tensors that do not hold them along
            `batch_dim`: a mapping from each such tensor to the axis of its samples, to the sample of each of its rows
            as integers (N,), to a tuple ``(axis, sample of each row along it)``, or to None for data that all samples
            share. Batches of torch_geometric and packed sequences need none.
        quantities: what the record holds: "sq_norm", "grad_sample" for the gradients themselves, "square_sum" for the
            sums over the samples of their squared entries, "dot" to ask it for dots with vectors, and "projection" for
            random projections. With one of the last two and without "sq_norm" norms are computed when they are read.
        unsupported: what to do about parameters whose per-sample gradient is not known: "warn", raise an "error" at
            the end of the backward, or "ignore" (the record names them in any case).
        fuse_weight_grad: where the samples' gradients are formed for their norms anyway, take their sum as ``.grad``
            and skip autograd's own product. Saves time with convolutions and long sequences; ``.grad`` then differs
            from that of a run without it in the last digits, as the order of the sums is another.
        max_memory: bytes that the temporaries of one kernel may take; the batch is cut into parts that fit. None takes
            as much as the layer at hand holds in any case, within bounds.
        samples: the samples that values are computed for, by place in the batch, (m,) int64; None is all. The rest of
            the batch then costs nothing; not together with `fuse_weight_grad`, which needs all.

    Returns:
        A context manager; after a backward under it, ``record`` holds the values.
    An option with a value that is not allowed gives an `OptionError`, a batch whose size cannot be read a
    `BatchSizeError`.
    """
    if not isinstance(module, nn.Module):
        check_option("module", module, False, "an instance of torch.nn.Module")
    if not isinstance(loss_reduction, Tensor) and loss_reduction not in ("mean", "sum"):
        check_option("loss_reduction", loss_reduction, False, "'mean', 'sum' or a tensor of weights (B,)")
    if unsupported not in _UNSUPPORTED:
        check_option("unsupported", unsupported, False, "'warn', 'error' or 'ignore'")
    check_options(
        batch_dim=batch_dim,
        batch_size=batch_size,
        batch_layout=batch_layout,
        quantities=quantities,
        fuse_weight_grad=fuse_weight_grad,
        max_memory=max_memory,
        samples=samples,
    )
    capture = Capture(module, loss_reduction, quantities, unsupported)
    capture._follow(batch, batch_dim, batch_size, batch_layout, samples, fuse_weight_grad, max_memory)
    return capture


class Capture:
    """One observed training step; see `expanded_weights` for the arguments.

    >>> import torch
    >>> from lightning_persample import expanded_weights
    >>> module, batch = torch.nn.Linear(3, 2), torch.randn(4, 3)
    >>> with expanded_weights(module, batch) as capture:
    ...     for part in batch.chunk(2):
    ...         module(part).square().mean().backward()
    >>> capture.batch_size, [record.samples.tolist() for record in capture.records]
    (4, [[0, 1], [2, 3]])

    Attributes:
        batch_size: number of samples B.
        records: one record per backward, in order.
        before_backward: is given what each backward starts from, before it runs.
        after_backward: is given each record as soon as its backward has run, before the next line of the step; None
            for a backward that has none.
    """

    def __init__(
        self,
        module: nn.Module,
        weighting: Literal["mean", "sum"] | Tensor,
        quantities: Collection[str],
        unsupported: str,
    ) -> None:
        self._fault = ""
        self._module = module
        self.records: list[PerSampleRecord] = []
        self._unsupported = unsupported
        self._quantities = frozenset(quantities)
        self._weighting = weighting
        self._scale: Tensor | None = None
        self._read_weights: Tensor | None = None
        self._handles: list[RemovableHandle] = []
        self.before_backward: Callable[[list[Tensor]], None] | None = None
        self.after_backward: Callable[[PerSampleRecord | None], None] | None = None
        self._closed = self._loss_is_known = self._has_said_fault = False
        self._mode = ObservingMode(self.call)
        self._sharded: ShardedParameters | None = None
        self._depth = 0

    def _follow(
        self,
        batch: Any,
        batch_dim: int,
        batch_size: int | None,
        batch_layout: Layout | None,
        samples: Tensor | None,
        fuse_weight_grad: bool,
        max_memory: int | None,
    ) -> None:
        """Mark the tensors of the batch and the parameters."""
        layout = guard(lay_out, self._cannot_lay_out)(
            batch, batch_dim, batch_size, batch_layout, is_declared=batch_size is not None
        )
        self.batch_size = layout.batch_size
        if samples is not None and not self._fault:
            are_places = int(samples.min()) >= 0 and int(samples.max()) < self.batch_size
            check_option("samples", samples.tolist(), are_places, f"places from 0 to {self.batch_size - 1}")
        if samples is not None and fuse_weight_grad:
            raise OptionError("samples and fuse_weight_grad=True do not go together: the weight's gradient needs all")
        if isinstance(self._weighting, Tensor):
            self._check_weighting(self._weighting)
        guard(self._set_up, self._cannot_be_set_up)(layout, samples, fuse_weight_grad, max_memory)

    def _set_up(
        self, layout: BatchLayout, samples: Tensor | None, fuse_weight_grad: bool, max_memory: int | None
    ) -> None:
        self._module = unwrapped(self._module)
        self._parameters, buffers = parameters_and_buffers(self._module)
        keep = bool(self._quantities - {"sq_norm"})
        self._dispatcher = Dispatcher(self._parameters, self.batch_size, keep, buffers, fuse_weight_grad)
        if max_memory is not None:
            self._dispatcher.kernel_options = KernelOptions(max_memory)
        self._dispatcher.samples = samples
        self._dispatcher.has_loaders = bool(layout.loaders)
        self._dispatcher.is_scripted = partial(_is_scripted, self._module)
        self._dispatcher.compares_weights = isinstance(self._weighting, Tensor)
        self._dispatcher.visible = self._mode
        self._dispatcher.accepting = False  # a backward that is not seen (of another thread) belongs to no record
        for (_, tensor), place in zip(layout.tensors, layout.places, strict=True):
            if place is not None:
                self._dispatcher.mark_batch(tensor, place)
        self._watched = WatchedParameters(self._parameters, self._dispatcher)
        if has_processes():
            self._sharded = ShardedParameters(self._module, self._dispatcher, self._watched.adopt)
        self._dispatcher.others = dict.fromkeys((*_BACKWARD, torch.autograd.grad, mark_samples), self.call)
        self._see_calls()

    def _see_calls(self) -> None:
        """Let the dispatcher answer, where every call goes there but for those that it hands back."""
        if not self._fault and (self._sharded is None or not self._sharded.hooks):
            self._mode.answer = self._dispatcher.call

    @property
    def record(self) -> PerSampleRecord:
        """The record of the last backward.

        Raises:
            PerSampleError: no backward has run under observation.
        """
        if not self.records and self._why_at_fault():
            return self._without_values()
        if not self.records:
            raise PerSampleError(
                "there is no record: no backward has reached a parameter of the module under expanded_weights; call "
                "loss.backward() inside the context, on a loss of samples"
            )
        return self.records[-1]

    def __enter__(self) -> Capture:
        if self._closed:
            raise PerSampleError(_CLOSED)
        guard(self._mode.start, self._fail)(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            guard(run_all, self._fail)(partial(self._mode.stop, self), self.close)
        except BaseException:  # an interrupt may have come before the first line of any of these
            self._mode.stop(self)
            raise
        if exception[0] is None and self._why_at_fault() and not self._has_said_fault:
            guard(self._say_fault, self._fail)()

    @contextmanager
    def observe(self) -> Iterator[Capture]:
        """Observe the calls inside this context and keep what is known for a later one, such as the backward.

        Yields:
            The capture.

        Raises:
            PerSampleError: the capture was closed.
        """
        if self._closed:
            raise PerSampleError(_CLOSED)
        with self._mode.observing():
            yield self

    def attach_loss(self, loss: Tensor, weights: Tensor | None = None) -> None:
        """Read the factor between this loss and what backward is called on: accumulation, loss scaling and the like.

        Args:
            loss: the loss of the training step, sum_i w_i l_i.
            weights: w_i, shape (B,), in place of the `loss_reduction` given at the start; another shape gives an
                `OptionError`.
        It holds for the next backward.
        """
        self._forget_loss()
        if weights is not None:
            self._check_weighting(weights)
            self._weighting = weights
        self._loss_is_known = True
        if not self._fault:
            guard(self._dispatcher.check_reduction, self._fail)([loss], [None], self._weighting)
        if loss.requires_grad:
            self._handles.append(on_arrival(loss, self._keep_scale, self._fail))

    def take_dots(self, vectors: Mapping[str, Tensor]) -> None:
        """Take the dots with these vectors while the backward runs, and keep nothing for others after it.

        Args:
            vectors: by parameter, for all or for none; `PerSampleRecord.dot` is to be given these very tensors.
        """
        if vectors and not self._fault and not self._dispatcher.fuse and vectors.keys() >= self._parameters.keys():
            self._dispatcher.vectors, self._dispatcher.keep_structures = vectors, False
            self._dispatcher.takes_norms = asks_norms(self._quantities)

    def compare_weights(self) -> None:
        """Compare the weights that `attach_loss` will be given with those in the loss, where its calls say them."""
        if not self._fault:
            self._dispatcher.compares_weights = True

    def backward_into_record(self, loss: Tensor) -> None:
        """A backward that gives a record, but writes no ``.grad`` and runs none of the hooks that wait for one.

        Args:
            loss: the loss of the training step.
        """
        inputs = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        self._backward(torch.autograd.grad, (loss,), {"inputs": inputs, "allow_unused": True})

    def note_calls(self, functions: Collection[Callable[..., Any]], note: Callable[..., Any]) -> None:
        """Have each call of some functions noted once it has run.

        Args:
            functions: which, as they are called: of composite functions the outer ones.
            note: is given the function, its arguments, its keyword arguments as a dict, and what it returned.
        """
        if not self._fault:
            noted = dict.fromkeys(functions, partial(self._noted, note))
            self._dispatcher.others = {**self._dispatcher.others, **noted}

    def _noted(
        self, note: Callable[..., Any], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        others = self._dispatcher.others
        self._dispatcher.others = {each: answer for each, answer in others.items() if each is not function}
        try:
            result = self._dispatcher.call(function, args, kwargs)
        finally:
            self._dispatcher.others = others
        note(function, args, kwargs, result)
        return result

    def mark_of(self, tensor: Tensor) -> object:
        """What is known of a tensor of this step: where the samples lie in it, or why they do not."""
        return None if self._why_at_fault() else self._dispatcher.marks.of_operand(tensor)

    def run_copying(self, number: object, run: Callable[[], Any]) -> Any:
        """Run what does nothing but copy a number, as ``self.log`` does; its copies are not followed one by one.

        Args:
            number: the number; of what is no sum over the samples every call is followed.
            run: makes the copies.

        Returns:
            What `run` returns.
        """
        copying = None if self._fault else guard(self._dispatcher.copying, self._fail)(number)
        before, self._mode.answer = self._mode.answer, copying or self._mode.answer
        try:
            return run()
        finally:
            self._mode.answer = before

    def close(self) -> None:
        """Forget every mark and remove every hook; the records stay."""
        self._closed = True
        self.before_backward = self.after_backward = None
        ends: list[Callable[[], None]] = [self._mode.release, self._forget_loss]
        if not self._fault:
            nodes, dispatcher = self._dispatcher.nodes, self._dispatcher
            ends += [self._watched.close, nodes.release, dispatcher.close]
            ends += [self._sharded.close] if self._sharded is not None else []
        run_all(*ends)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer one torch call under the mode."""
        if self._depth and guard(is_recomputing, self._fail)():
            return function(*args, **kwargs)
        if function in _BACKWARD:
            return self._backward(function, args, kwargs)
        if self._fault:
            return function(*args, **kwargs)
        if function is mark_samples:
            guard(self._declare, self._fail)(*args, **kwargs)
            return function(*args, **kwargs)  # (which a capture around this one sees)
        if self._sharded is not None and self._sharded.hooks:
            guard(self._sharded.find, self._fail)(function, args, kwargs)
        if function is not torch.autograd.grad:
            return self._dispatcher.call(function, args, kwargs)
        return self._dispatcher.differentiate(function, args, kwargs)

    def _cannot_lay_out(self, error: Exception) -> BatchLayout:
        if isinstance(error, BatchSizeError):
            stop(error)
        self._cannot_be_set_up(error)
        return BatchLayout(1, [], [])

    def _cannot_be_set_up(self, error: Exception) -> None:
        self._fault = fault_of(error, "the capture of the training step")

    def _fail(self, error: Exception) -> None:
        if not self._fault:
            self._dispatcher.fail(error)

    def _why_at_fault(self) -> str:
        return self._fault or self._dispatcher.fault

    def _declare(self, tensor: Tensor, batch_dim: int = 0, *, owner: Tensor | None = None) -> None:
        place = declared_place("the tensor given to mark_samples", tensor, batch_dim, self.batch_size, owner)
        if place is not None and not tensor.requires_grad:
            self._dispatcher.mark_batch(tensor, place)

    def _keep_scale(self, grad: Tensor) -> None:
        if grad.numel() == 1:
            self._scale = grad.detach().reshape(())
        elif tuple(grad.shape) == (self.batch_size,):  # one loss per sample: this is what each weighs
            self._read_weights = grad.detach()
        else:
            self._cannot_read(grad)

    def _read_gradients(self, losses: list[Tensor], gradients: list[Tensor | None]) -> None:
        """Read what each sample weighs from what `backward` is given: of one loss per sample, its weight."""
        gradients += [None] * (len(losses) - len(gradients))
        for loss, gradient in zip(losses, gradients, strict=True):
            if gradient is None or loss.numel() == 1 or self.batch_size == 1:
                continue
            if len(losses) == 1 and tuple(loss.shape) == (self.batch_size,) and self._dispatcher.is_by_sample(loss):
                self._read_weights = gradient.detach()
                return
            mark = self._dispatcher.marks.get(loss)
            is_unknown = isinstance(mark, Lost) and not (mark.parts or mark.noted)
            if is_unknown or not bool((gradient == gradient.flatten()[0]).all()):
                self._cannot_read(loss)
                return
        self._dispatcher.check_reduction(losses, gradients, self._weighting)

    def _cannot_read(self, loss: Tensor) -> None:
        self._dispatcher.notes.add_of_loss(
            f"the loss has shape {tuple(loss.shape)}, so that what a sample weighs in it cannot be read: go backward "
            "from one number, or from one per sample"
        )

    def _forget_loss(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._loss_is_known = False

    def _check_weighting(self, weighting: Tensor) -> None:
        if tuple(weighting.shape) != (self.batch_size,) and not self._fault:
            raise OptionError(
                f"{OTHER_WEIGHTS} have shape {tuple(weighting.shape)}; allowed is one weight per sample, "
                f"({self.batch_size},)"
            )

    def _backward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = guard(decomposed_backward, self._fail)(function, self._mode) or function
        if self._depth:
            if current_backward() >= 0 and not self._fault:  # inside another
                guard(self._look_inside, self._fail)(args, kwargs)
            return run(*args, **kwargs)
        guard(self._before, self._fail)(args, kwargs)
        self._depth += 1
        self._mode.answer = self._mode.first
        try:
            result = run(*args, **kwargs)
        except BaseException:
            guard(self._forget, self._fail)()
            raise
        finally:
            self._depth -= 1
            if not self._fault:
                self._dispatcher.frees = self._dispatcher.accepting = False
                guard(self._see_calls, self._fail)()
        guard(self._after, self._fail_at_end)(args, kwargs)
        return result

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        losses, gradients = _tops_and_gradients(args, kwargs)
        if self.before_backward is not None:
            self.before_backward(losses)
        if not self._fault:
            self._start_backward(losses, gradients, args, kwargs)

    def _after(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record = None if self._fault else guard(self._finish, self._fail)()
        if self._why_at_fault():
            record, self._has_said_fault = self._without_values(), True
        self._forget()
        if self._loss_is_known:
            self._forget_loss()
        if record is not None:
            self.records.append(record)
            say(record, self._unsupported)
        if self.after_backward is not None:
            self.after_backward(record)
        if kwargs.get("create_graph") or args[3:4] == (True,):  # the step may make a term of its loss of them
            self._mark_grads(_tops_and_gradients(args, kwargs)[0], kwargs.get("inputs"))

    def _fail_at_end(self, error: Exception) -> None:
        self._fail(error)
        if not self._has_said_fault:
            self._say_fault()

    def _say_fault(self) -> None:
        self._has_said_fault = True
        if self._unsupported == "error":
            stop(UnsupportedError(self._why_at_fault()))
        if self._unsupported == "warn":
            warn_user(self._why_at_fault())

    def _look_inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._dispatcher.find_unseen_inside(*_tops_and_gradients(args, kwargs))
        self._watched.watch()

    def _start_backward(
        self, losses: list[Tensor], gradients: list[Tensor | None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        dispatcher = self._dispatcher
        dispatcher.accepting = True
        met = dispatcher.find_unseen(losses)
        apart = len(args) > 4 or kwargs.get("inputs") is not None
        self._watched.watch(() if apart else met)  # (to these inputs alone a gradient comes)
        if self._sharded is not None:
            self._sharded.start_backward()
        dispatcher.start_backward(losses)
        if not self._loss_is_known:
            self._read_gradients(losses, gradients)
        options = dict(zip(("gradient", "retain_graph", "create_graph"), args[1:], strict=False)) | kwargs
        retain = options.get("retain_graph")
        dispatcher.frees = not (options.get("create_graph") if retain is None else retain)

    def _mark_grads(self, losses: list[Tensor], inputs: Any) -> None:
        own = [*self._parameters.values(), *tensors_in((inputs,))]
        self._dispatcher.mark_gradients([parameter.grad for parameter in own], losses, own)

    def _finish(self) -> PerSampleRecord | None:
        dispatcher = self._dispatcher
        with_grad = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            with kernel_options(dispatcher.kernel_options):
                if dispatcher.corrections:
                    dispatcher.correct()
                settle(dispatcher.weights, dispatcher.fail_to_settle, self._watched.changed_by_hook)
                if self._sharded is not None:
                    self._sharded.refuse_unseen(dispatcher.got_gradient)
                counts = dispatcher.got_gradient and not dispatcher.of_no_sample
                return self._build() if counts else None
        finally:
            set_grad_enabled(with_grad)

    def _without_values(self) -> PerSampleRecord:
        """The record of a backward of which nothing can be relied on, with the reason."""
        trainable = [name for name, p in self._module.named_parameters() if p.requires_grad]
        got = () if self._fault else self._dispatcher.got_gradient
        missing = [name for name in trainable if name in got] or trainable
        asked: dict[str, Any] = {f"{each}s": {} for each in self._quantities & {"grad_sample", "square_sum"}}
        return PerSampleRecord(
            self.batch_size,
            {},
            coverage=0.0,
            unsupported=dict.fromkeys(missing, self._why_at_fault()),
            unused=tuple(name for name in trainable if name not in missing),
            backward_index=len(self.records),
            **asked,
        )

    def _forget(self) -> None:
        """Drop what a backward left, also one that was broken off."""
        if not self._fault:
            guard(self._dispatcher.forget_backward, self._fail)()
        self._scale = self._read_weights = None

    def _build(self) -> PerSampleRecord:
        dispatcher, watched, scale = self._dispatcher, self._watched, self._scale
        weights = self._weighting if self._read_weights is None else self._read_weights
        is_declared = isinstance(weights, Tensor)
        if dispatcher.means is not None:
            weights = dispatcher.means.weights
            dispatcher.notes.excused |= dispatcher.means.notes
        part = dispatcher.part
        counted = part.mean_of if part is not None and part.mean_of else self.batch_size
        trainable = watched.trainable
        reported = []  # what the backward has left anything of
        for name in trainable:
            weight = watched.weights[name]
            if name in dispatcher.got_gradient and (weight.taken is not None or weight.contributions):
                reported.append(name)
        of_part = None if part is None else part.samples
        in_loss, samples, places = samples_with_values(dispatcher.samples, of_part, weights)
        counted = len(in_loss) if in_loss is not None and isinstance(weights, Tensor) else counted
        own = OwnScale(weights, counted, scale)
        own = own if samples is None else own.of_samples(samples)
        values = read_values(watched, dispatcher, reported, self._quantities, own, places)
        coverage = classify(
            trainable, dispatcher.got_gradient, reported, dispatcher.refused, dispatcher.penalized, dispatcher.outside
        )
        reached = coverage.reached
        notes = dispatcher.notes
        of_calls, weighing, not_additive = notes.reached()
        if part is not None and not (part.mean_of or part.is_sum or of_calls or weighing) and weights == "mean":
            notes.add_of_loss(
                f"the loss takes {len(part.samples)} of the {self.batch_size} samples alone, and not by one mean: give "
                "the weight of each sample in the loss as loss_reduction"
            )
            weighing = notes.reached()[1]
        mixing, axis_lost = notes.split(of_calls) if of_calls else ((), ())
        weighting = [] if is_declared else [text for text in weighing if text not in (*mixing, *axis_lost)]
        others = [dispatcher.other_weights] if is_declared and dispatcher.other_weights else []
        asked = {}
        if "grad_sample" in self._quantities:
            asked["grad_samples"] = {name: values.grad_samples[name] for name in reached}
        if "square_sum" in self._quantities:
            asked["square_sums"] = {name: values.square_sums[name] for name in reached}
        kept = values.kept(reached, own, self._quantities) if OF_KEPT & self._quantities else None
        found = values.sq_norms
        are_all = tuple(found) == tuple(reached)
        reason = why_no_factor(dispatcher.penalized, not_additive, weighting, own)
        return PerSampleRecord(
            batch_size=self.batch_size,
            sq_norms=found if are_all else sq_norms_of(reached, found, kept),
            coverage=coverage.share,
            **asked,
            unsupported=coverage.unsupported,
            unused=coverage.unused,
            mixing=mixing,
            axis_lost=axis_lost,
            weighting=tuple(weighting or others),
            not_additive=not_additive,
            backward_index=len(self.records),
            samples=samples,
            in_loss=self.batch_size if in_loss is None else len(in_loss),
            why_no_factor=reason,
            _own=own,
            _weighted_square_sums=values.weighted_square_sums,
            _kept=kept,
            _rows=values.rows if are_all else None,
        )


def _is_scripted(module: nn.Module, name: str) -> bool:
    """Whether the parameter of this name is in a TorchScript module."""
    path = [module]
    for part in name.split(".")[:-1]:
        path.append(getattr(path[-1], part))
    return any(isinstance(each, torch.jit.ScriptModule) for each in path)


def _tops_and_gradients(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], list[Any]]:
    """What a backward starts from, and the gradients that it is started with, if any."""
    first = args[0] if args else kwargs.get("tensors")
    tops = [first] if type(first) is Tensor else list(tensors_in(first))
    found = args[1] if len(args) > 1 else kwargs.get("gradient", kwargs.get("grad_tensors"))
    return tops, list(found) if isinstance(found, (tuple, list)) else [found]
