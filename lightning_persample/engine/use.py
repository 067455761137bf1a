"""One use of weights together with the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_persample.engine.batch_axis import BatchAxis, Lost
from lightning_persample.engine.following import Followed
from lightning_persample.engine.observed import Description, ObservedCall
from lightning_persample.engine.weight import Weight
from lightning_persample.rules import Rule

__all__ = ["Use"]

_ANYWHERE = BatchAxis(0)  # one sample alone needs no axis


class Use:
    """A call that mixes weights with the batch.

    Args:
        call: the call, after it has run.
        followed: where the batch lies in its outputs.
        weights: the weights among its operands, by the id of their tensor.
        rule: the op's own rule, if it has one.

    Attributes:
        whole: there is one sample, and no axis that holds it: every tensor of the batch is the sample's as a whole.
        not_additive: why what the samples alone give does not add up to the gradient of the batch, or None.
        entries: what the call has added up, where its one output is a number.
    """

    def __init__(
        self, call: ObservedCall, followed: Followed, weights: Mapping[int, Weight], rule: Rule | None
    ) -> None:
        self.call = call
        self.followed = followed
        self.weights = weights
        self.rule: Rule | None = None
        self.arguments: dict[str, Any] = {}
        self.mixing: str | None = None
        self._description: Description | None = None
        self.not_additive: str | None = None
        uncertain = bool(call.lost) or any(isinstance(axis, Lost) for axis in followed.outputs)
        self.whole = call.batch_size == 1 and uncertain
        self.entries = followed.entries() if followed.entries is not None and weights and not self.whole else None
        arguments = rule.bind(call.args, call.kwargs) if rule is not None else None
        if rule is None or arguments is None or self.whole or self.entries is not None:
            return
        if rule.mixes_samples is not None and rule.mixes_samples(arguments):
            self.mixing = f"{self.description} normalises with the statistics of the whole batch"
        if self._answered_by(rule, arguments):
            self.rule, self.arguments = rule, arguments
            if call.op == "embedding" and arguments.get("scale_grad_by_freq"):
                self.not_additive = (
                    f"{self.description} divides by how often an index occurs in the whole batch (scale_grad_by_freq), "
                    "a sample alone by how often it occurs in that sample"
                )

    def _answered_by(self, rule: Rule, arguments: Mapping[str, Any]) -> bool:
        """Whether weights and batch stand only where the rule expects them."""
        weights, batched, states = set(), set(), set()
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                if rule.is_weight(name):
                    weights.add(id(value))
                if rule.is_batched(name):
                    batched.add(id(value))
                if rule.is_per_sample(name):
                    states.add(id(value))
        if any(key not in weights for key in self.weights):
            return False
        if any(id(tensor) not in batched for tensor, _ in self.call.located):
            return False
        if any(id(tensor) in self.weights and id(tensor) not in states for tensor, _ in self.call.located):
            return False  # (a derived weight that has rows of its own for each sample)
        aligned = self.followed.aligned
        return aligned is None or not any(
            operand.axis is None and id(operand.tensor) not in states and aligned(operand.tensor) is not None
            for operand in self.call.operands
        )

    @property
    def tainted(self) -> list[str]:
        """Where values computed over the whole batch entered the operands."""
        rule = self.rule
        unread = {
            id(value) for name, value in self.arguments.items() if rule is not None and not rule.is_read(name)
        }  # numbers that only say where things lie
        return [
            axis.mixing
            for tensor, axis in self.call.located
            if axis.mixing is not None and (id(tensor) not in unread or tensor.is_floating_point())
        ]

    @property
    def description(self) -> Description:
        """Op, sizes, line and parameters, for messages; first asked for while the call's line runs."""
        if self._description is None:
            self._description = self.call.describe({n for weight in self.weights.values() for n in weight.names})
        return self._description

    @property
    def outputs(self) -> list[tuple[Tensor, BatchAxis]]:
        """The outputs that can get a gradient and hold the batch along an axis."""
        if self.whole:
            return [(output, _ANYWHERE) for output in self.call.outputs if output.requires_grad]
        if self.entries is not None:
            return [(output, self.entries.axis) for output in self.call.outputs if output.requires_grad]
        pairs = zip(self.call.outputs, self.followed.outputs, strict=False)
        return [(output, axis) for output, axis in pairs if output.requires_grad and isinstance(axis, BatchAxis)]

    def reason_against(self) -> str | None:
        """Why the contributions of this call cannot be separated by sample, or None."""
        pairs = zip(self.call.outputs, self.followed.outputs, strict=False)
        lost = next((axis for output, axis in pairs if output.requires_grad and isinstance(axis, Lost)), None)
        if lost is not None and not self.whole and self.entries is None:
            plain = lost.alone is not None or lost.reason.startswith("batch")  # it came without one
            remedy = "" if plain else "; keep the samples along one axis up to here"
            return f"{self.description}: the batch axis cannot be followed here: {lost.reason}{remedy}"
        several = self.rule is not None and self.rule.several_outputs
        if len(self.outputs) != 1 and not several:
            number = len(self.outputs)
            return f"{self.description} has {number} outputs; give it a rule with register_rule, or use its parts"
        return None
