"""Manual optimization: one record for each backward inside a training step, before the optimizer steps."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_persample.callbacks.observed_step import ObservedStep, Reports
from lightning_persample.callbacks.statistics import entries
from lightning_persample.capture.failure import guard
from lightning_persample.capture.record import PerSampleRecord, listed
from lightning_persample.errors import PerSampleError
from lightning_persample.gradients.precision import without_autocast
from lightning_persample.torch_internals import version_counter, without_torch_function

_STEPS = "would step the optimizers, because in manual optimization training_step does"

NOT_VERIFIED = (
    f"verify=True runs training_step again on single samples, which {_STEPS}: the values are not checked; call "
    "check_per_sample_gradients on the module and a loss function instead"
)
NO_FALLBACK = (
    f"unsupported='vmap' would run training_step again on single samples, which {_STEPS}: parameters whose gradients "
    "are not known are named and left out, as with unsupported='warn'"
)


def why_not_manual(engine: str) -> str | None:
    """Why an engine cannot be used in manual optimization, as the start of a sentence, or None."""
    if engine == "expanded":
        return None
    return f"engine={engine!r} runs training_step again on single samples, which {_STEPS}; use engine='expanded'"


StepContent: TypeAlias = Mapping[int, frozenset[str]] | str
"""The backward passes in a step of an optimizer, each with the parameters that hold it; or why they are unknown."""


class ManualStep:
    """Attends to the backward passes inside one training step, and tells what its optimizers step with."""

    # An optimizer steps with the backward passes that are in ``.grad`` of its parameters. Of several steps of one
    # optimizer in a training step the last one counts. Where an optimizer takes no step (gradients are accumulated over
    # training steps), the backward passes that are in ``.grad`` of its parameters alone count as its own.
    def __init__(
        self,
        step: ObservedStep,
        pl_module: LightningModule,
        optimizers: Sequence[torch.optim.Optimizer],
        deliver: Callable[[PerSampleRecord], None],
        reports: Reports,
    ) -> None:
        self._step, self._module = step, pl_module
        self._optimizers = optimizers
        self._deliver = deliver
        self._reports = reports
        self._announced: Tensor | None = None
        self._weights_are_wrong = False
        self._device = pl_module.device.type
        self._parameters = dict(pl_module.named_parameters())
        self._names = self._held = names_by_optimizer(pl_module, optimizers)
        if len(self._names) == 1:  # of a single one, all parameters are reported
            self._names = (frozenset(self._parameters),)
        self._origins = GradientOrigins(self._parameters)
        self._records: list[PerSampleRecord | None] = []
        self.steps: dict[int, StepContent] = {}  # what each optimizer has stepped with last
        self._running: dict[int, torch.optim.Optimizer] = {}  # who is in a step, by the optimizer that it counts for
        self._decided: set[int] = set()  # those of them whose closure has run
        step.capture.before_backward = self._before
        step.capture.after_backward = guard(self._after, reports.report_failure)

    @contextmanager
    def watching_optimizers(self) -> Iterator[None]:
        """See every step on the parameters of an optimizer, whoever takes it, in this context."""
        failed = self._reports.report_failure
        before = register_optimizer_step_pre_hook(guard(self._stepping, failed))
        after = register_optimizer_step_post_hook(guard(self._stepped, failed))
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _place(self, optimizer: torch.optim.Optimizer) -> int | None:
        """Which optimizer of the Trainer this step is of: it itself, or one inside it of the same parameters."""
        for place, each in enumerate(self._optimizers):
            if each is optimizer:
                return place
        (names,) = names_by_optimizer(self._module, [optimizer])
        return self._held.index(names) if names and self._held.count(names) == 1 else None

    def manual_backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `manual_backward` of the module: what it multiplies its loss by (loss scaling) is not left in."""
        loss = args[0] if args else kwargs.get("loss")
        self._announced = loss if isinstance(loss, Tensor) and loss.requires_grad else None
        try:
            return backward(*args, **kwargs)
        finally:
            self._announced = None

    def at_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The Trainer's hook before a step, after any closure: gradients are unscaled, the step may yet be skipped."""
        for place, each in enumerate(self._optimizers):
            if each is optimizer:
                with unseen(self._device):
                    self.steps[place] = self._content(place)
                self._decided.add(place)

    def _stepping(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        place = self._place(optimizer)
        if place is None or place in self._running:
            return
        with unseen(self._device):
            self.steps[place] = self._content(place)
        self._running[place] = optimizer

    def _stepped(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        place = next((place for place, each in self._running.items() if each is optimizer), None)
        if place is None:
            return
        del self._running[place]
        if place not in self._decided:
            with unseen(self._device):
                content = self._content(place)
            if content:  # it may have dropped its gradients
                self.steps[place] = content
        self._decided.discard(place)

    def _before(self, roots: list[Tensor]) -> None:
        loss = self._announced
        if loss is None and len(roots) == 1:
            (loss,) = roots
        self._weights_are_wrong = False
        with unseen(self._device):
            self._origins.look()
        if loss is not None and loss.requires_grad:
            try:
                self._step.attach(loss, loss)
            except PerSampleError as error:
                self._weights_are_wrong = True
                self._reports.report(error)
        self._step.start_backward()

    def _after(self, record: PerSampleRecord | None) -> None:
        # Forward and backward are in one autocast region here; a callback's own arithmetic belongs to neither.
        with unseen(self._device):
            self._note(record)
        if self._weights_are_wrong or record is None:
            return
        with without_autocast(self._device), torch.enable_grad():
            text = self._step.why_sums_differ(record)
            if text is not None:
                self._reports.warn(text)
            self._deliver(record)

    def _note(self, record: PerSampleRecord | None) -> None:
        reached = () if record is None else (*record.sq_norms, *record.unsupported)
        self._origins.add(len(self._records), reached)
        if record is not None:
            self._records.append(None if self._weights_are_wrong else record)
        for place in self._running:  # in a closure
            self.steps[place] = self._content(place)

    def end(self) -> dict[int, list[PerSampleRecord]]:
        """The training step has ended."""
        taken = {number for content in self.steps.values() if not isinstance(content, str) for number in content}
        waiting: dict[int, dict[int, frozenset[str]]] = {}
        self._origins.look()
        for number in range(len(self._records)):
            owners = {
                place: names
                for place, own in enumerate(self._names)
                if number not in taken and (names := self._origins.holders(number, own)[0])
            }
            if len(owners) == 1:
                ((place, names),) = owners.items()
                waiting.setdefault(place, {})[number] = names
            elif owners and not any(isinstance(self.steps.get(place), str) for place in owners):
                self._reports.warn(
                    f"backward {number} of a training step reached parameters of the optimizers {list(owners)}, and "
                    "none of them stepped after it: it is in no statistics. Toggle the optimizers "
                    "(self.toggle_optimizer), so that a backward reaches the parameters of one of them alone"
                )
        steps: dict[int, list[PerSampleRecord]] = {}
        for place, content in {**waiting, **self.steps}.items():
            if isinstance(content, str):
                self._reports.warn(f"{content}; the statistics of that step are left out")
                continue
            records = [self._restricted(self._records[number], names) for number, names in content.items()]
            known = [record for record in records if record is not None]
            if known and len(known) == len(records):
                steps[place] = known
        return steps

    def _content(self, optimizer: int) -> StepContent:
        """The backward passes in ``.grad`` of an optimizer, each with its parameters; or why they are unknown."""
        self._origins.look()
        names = self._names[optimizer]
        found: dict[int, frozenset[str]] = {}
        replaced = self._origins.replaced(names) if self._records else []
        if replaced:
            return (
                f"`.grad` of {listed(replaced, 1)} was replaced after a backward pass, or written to otherwise than by "
                f"a factor, so that it is not known with which samples optimizer {optimizer} stepped"
            )
        for number, record in enumerate(self._records):
            sure, doubtful = self._origins.holders(number, names)
            if doubtful and not self._makes_no_difference(record, doubtful, names, whole=bool(sure)):
                return (
                    f"`.grad` of {listed(sorted(doubtful), 1)} was zero after a backward pass and was then written to, "
                    f"so that it is not known whether optimizer {optimizer} stepped with it: let zero_grad set "
                    "gradients to None, as it does by default"
                )
            if sure:
                found[number] = sure | doubtful
        return found

    def _makes_no_difference(
        self, record: PerSampleRecord | None, doubtful: Collection[str], names: Collection[str], *, whole: bool
    ) -> bool:
        """Whether other parameters tell what became of a backward, and these add nothing to its samples' norms."""
        if record is None or any(name not in record.sq_norms or record.sq_norms[name].any() for name in doubtful):
            return False
        return whole or any(n in names and n not in doubtful for n in (*record.sq_norms, *record.unsupported))

    def _restricted(self, record: PerSampleRecord | None, names: Collection[str]) -> PerSampleRecord | None:
        """The record of some of the parameters alone, with norms and coverage over these."""
        if record is None or all(name in names for name in (*record.sq_norms, *record.unsupported)):
            return record
        kept = {name: sq_norm for name, sq_norm in record.sq_norms.items() if name in names}
        missing = {name: reason for name, reason in record.unsupported.items() if name in names}
        known, unknown = (sum(self._parameters[name].numel() for name in part) for part in (kept, missing))
        share = known / (known + unknown) if known + unknown else 1.0
        return replace(record, sq_norms=kept, unsupported=missing, coverage=share)


def names_by_optimizer(
    pl_module: LightningModule, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[frozenset[str], ...]:
    """The names of the parameters that each optimizer holds."""
    parts = [{id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
    named = list(pl_module.named_parameters())
    return tuple(frozenset(name for name, parameter in named if id(parameter) in ids) for ids in parts)


@contextmanager
def unseen(device: str) -> Iterator[None]:
    """What is computed in this context is in no graph, and the capture does not see it."""
    with without_torch_function(), torch.no_grad(), without_autocast(device):
        yield


# Which backward passes are in ``.grad``, read from it itself


class SeenGrad:
    """What ``.grad`` of a parameter was at a look: which tensor, and how often it had been written to."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.look()

    def look(self) -> None:
        """Remember what is there now."""
        grad = self.parameter.grad
        self._tensor: weakref.ref[Tensor] | None = None if grad is None else weakref.ref(grad)
        self._version = 0 if grad is None else version_counter(grad)

    def is_there(self) -> bool:
        """Whether ``.grad`` is the tensor that it was."""
        return self._tensor is not None and self._tensor() is self.parameter.grad

    def is_unchanged(self) -> bool:
        """Whether it is, or is None as before, and was not written to since."""
        grad = self.parameter.grad
        if grad is None:
            return self._tensor is None
        return self.is_there() and version_counter(grad) == self._version


class _Followed(SeenGrad):
    """What ``.grad`` of one parameter was when it was last looked at, and which backward passes are in it."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.drop()
        super().__init__(parameter)

    def drop(self, *, replaced: bool = False) -> None:
        """No backward is in it any more."""
        self.of: set[int] = set()  # the numbers of the backward passes that are in it
        self.doubtful: set[int] = set()  # those of them that may have been dropped
        self.replaced = replaced  # by another tensor than backward filled, or by other numbers in it

    def look(self, magnitudes: Tensor | None = None) -> None:
        """Remember what is there now; of its numbers the largest entry and two norms, (3,), where they matter."""
        super().look()
        grad = self.parameter.grad
        self.magnitudes = _magnitudes(grad) if magnitudes is None and self.of and grad is not None else magnitudes


class GradientOrigins:
    """Follows ``.grad`` through a training step; to be looked at before and after each backward, and at each step."""

    # A gradient that is None has been dropped, and so has one that was not zero and is: `zero_grad` has two forms, and
    # users have more. What multiplies it (clipping, unscaling) leaves it one of the same samples. Where other numbers
    # are written to it, as those of several backward passes merged by hand, it is not known of which.
    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._seen = {name: _Followed(parameter) for name, parameter in parameters.items()}

    def look(self) -> None:
        """Take note of what was dropped or replaced since the last look."""
        before: list[Tensor] = []
        after: list[tuple[_Followed, Tensor]] = []
        for seen in self._seen.values():
            grad = seen.parameter.grad
            if grad is not None and seen.is_there() and seen.of and seen.magnitudes is not None:
                before.append(seen.magnitudes)
                after.append((seen, _magnitudes(grad)))
                continue
            if grad is None or not seen.is_there():
                seen.drop(replaced=grad is not None)
            seen.look()
        if not after:
            return
        found = torch.stack([each.to(before[0].device) for each in (*before, *(now for _, now in after))]).tolist()
        for (seen, now), was, is_now in zip(after, found, found[len(before) :], strict=False):
            if was[0] and not is_now[0]:
                seen.drop()
            elif not seen.is_unchanged():
                if not is_now[0]:
                    seen.doubtful |= seen.of  # setting zeros to zero and scaling them look the same
                elif not _are_multiples(was, is_now):
                    seen.drop(replaced=True)
            seen.look(now)

    def add(self, backward: int, reached: Collection[str]) -> None:
        """A backward has run."""
        for name, seen in self._seen.items():
            if name in reached and seen.parameter.grad is not None:
                seen.of.add(backward)
            seen.look()

    def holders(self, backward: int, names: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
        """The parameters among these whose ``.grad`` holds a backward, and those for which that is not known."""
        found = {name for name in names if backward in self._seen[name].of}
        doubtful = frozenset(name for name in found if backward in self._seen[name].doubtful)
        return frozenset(found - doubtful), doubtful

    def replaced(self, names: Collection[str]) -> list[str]:
        """The parameters among these whose ``.grad`` is a tensor that no backward filled."""
        return [name for name, seen in self._seen.items() if name in names and seen.replaced]


def _magnitudes(grad: Tensor) -> Tensor:
    """Largest entry, Euclidean norm and sum of the absolute values of a gradient; of a sharded one, of its shard."""
    flat = entries(grad).flatten()
    if flat.numel() == 0:
        return torch.zeros(3, device=flat.device)
    wide = torch.promote_types(flat.dtype, torch.float32)
    return torch.stack([torch.linalg.vector_norm(flat, order, dtype=wide) for order in (float("inf"), 2, 1)])


def _are_multiples(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether one factor leads from one gradient's magnitudes to the other's, as far as rounding lets see."""
    if not all(map(math.isfinite, (*before, *after))):
        return True  # of what overflowed nothing can be said, and nothing is averaged
    factors = [now / was if was else math.nan for was, now in zip(before, after, strict=True)]
    return all(math.isclose(factor, factors[0], rel_tol=1e-3) for factor in factors)
