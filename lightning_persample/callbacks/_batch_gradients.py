"""The gradients of one batch's samples, each of its own loss, or an error that says why they are not known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lightning_persample.callbacks._adam_states import AdamState
from lightning_persample.callbacks._gradient_values import quantity_for, values_of
from lightning_persample.engine import PerSampleRecord, expanded_weights, warn_user, warning_texts
from lightning_persample.engine.samples import Weighting, loss_of
from lightning_persample.engine.untouched import without_dropout
from lightning_persample.errors import OptionError, UnsupportedError
from lightning_persample.gradients import Dense
from lightning_persample.gradients.projection import Projection
from lightning_persample.influence.store import ParameterColumns

__all__ = ["BatchGradients", "GradientOptions"]


@dataclass(frozen=True, eq=False)
class GradientOptions:
    """How gradients are computed; see `collect_gradients` for each."""

    loss: Callable[[Any, Any], Any] | None
    columns: Mapping[str, Callable[[Any, Any], Tensor]]
    projection: Projection | None
    direction: Literal["adam"] | None
    loss_reduction: Weighting
    batch_dim: int
    batch_size: int | None
    max_memory: int | None


class _Found(NamedTuple):
    """Of m samples of a batch: their places in it, (m,), their values, (m, K), and the columns of the user, (m,)."""

    samples: Tensor
    values: Tensor
    columns: dict[str, Tensor]


class BatchGradients:
    """Computes the gradients of one batch after the other.

    Args:
        module: the module, in the state that it has.
        layout: the parameters and their columns.
        options: how.
    """

    def __init__(self, module: nn.Module, layout: Sequence[ParameterColumns], options: GradientOptions) -> None:
        self._module = module
        self._layout = layout
        self._options = options
        self._has_warned = False

    def of(
        self,
        batch: Any,
        view: Any,
        number: int,
        samples: Tensor,
        size: int,
        scale: float,
        adam: Mapping[str, AdamState],
    ) -> _Found:
        """The gradients of a batch."""
        options = self._options
        quantity = "grad_sample" if options.direction else quantity_for(options.projection)
        capture = expanded_weights(
            self._module,
            view,
            loss_reduction="sum" if callable(options.loss_reduction) else options.loss_reduction,
            batch_dim=options.batch_dim,
            batch_size=size,
            quantities=("sq_norm", quantity),
            unsupported="ignore",  # said by us, as an error
            max_memory=options.max_memory,
            samples=None if len(samples) == size else samples,
        )
        try:
            with capture.observe(), _recurrent_layers_can_go_backward(self._module):
                outputs = self._outputs(batch, number)
                loss = loss_of(outputs)
                if not isinstance(loss, Tensor) or not loss.requires_grad:
                    got = "a loss without a graph" if isinstance(loss, Tensor) else type(loss).__name__
                    raise UnsupportedError(f"{self._said_loss} gave {got}, but gradients need the loss of every batch")
                if loss.numel() != 1:
                    raise OptionError(
                        f"{self._said_loss} gave a loss of shape {tuple(loss.shape)}; allowed is one number, the loss "
                        "of the batch: reduce it, with .mean() for loss_reduction='mean' or .sum() for 'sum'"
                    )
                if callable(options.loss_reduction):
                    with torch.no_grad():
                        capture.attach_loss(loss, options.loss_reduction(outputs, batch))
                else:
                    capture.attach_loss(loss)
                with torch.autocast(loss.device.type, enabled=False):
                    capture.backward_into_record(loss * scale)
            record = capture.record
            self._check(record)
            if record.samples is not None:
                samples = record.samples.cpu()
            values = self._directions(record, adam) if options.direction else None
            if values is None:
                values = values_of(record, self._layout, options.projection)
            return _Found(samples, values, self._columns(outputs, batch, size, samples))
        finally:
            capture.close()

    @property
    def _said_loss(self) -> str:
        return f"{type(self._module).__name__}.training_step" if self._options.loss is None else "loss(module, batch)"

    def _outputs(self, batch: Any, number: int) -> Any:
        if self._options.loss is not None:
            return self._options.loss(self._module, batch)
        step: Any = self._module.training_step
        needs_number = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        return step(batch, number) if needs_number else step(batch)

    def _check(self, record: PerSampleRecord) -> None:
        """Refuse values that are missing, or that are not those of each sample's own loss."""
        stored = {each.name for each in self._layout}
        if any(name in stored for name in record.unsupported):
            raise UnsupportedError(
                f"{warning_texts(record)[0]}\nLeave them out with parameters=[...], the names of all others, or change "
                "the texts on them"
            )
        rest = [text for text in warning_texts(record) if not text.startswith("Per-sample gradients are missing")]
        if record.mixing or record.axis_lost:
            raise UnsupportedError(f"{rest[0]}\nThis is not collected: pass loss=..., or a module, without such calls")
        if record.weighting:
            raise UnsupportedError(rest[0])
        if record.not_additive and not self._has_warned:
            self._has_warned = True
            warn_user(rest[0])

    def _directions(self, record: PerSampleRecord, adam: Mapping[str, AdamState]) -> Tensor:
        parameters = dict(self._module.named_parameters())
        parts = []
        for each in self._layout:
            parameter = parameters[each.name]
            grads = record.grad_samples[each.name] if each.name in record.names else None
            if grads is None:
                grads = parameter.new_zeros(record.num_values, *each.shape)
            found = adam[each.name].direction(grads, parameter)
            projection = self._options.projection
            projected = found if projection is None else Dense(found).project(projection, each.name)
            parts.append(projected.reshape(len(grads), each.stop - each.start))
        return torch.cat(parts, 1)

    def _columns(self, outputs: Any, batch: Any, size: int, samples: Tensor) -> dict[str, Tensor]:
        found = {}
        for name, column in self._options.columns.items():
            with torch.no_grad():
                values: Any = column(outputs, batch)
            if not isinstance(values, Tensor) or tuple(values.shape) != (size,) or values.is_complex():
                is_tensor = isinstance(values, Tensor)
                got = f"a tensor of shape {tuple(values.shape)}" if is_tensor else type(values).__name__
                raise OptionError(f"columns[{name!r}] returned {got}; allowed is one real number per sample, ({size},)")
            found[name] = values.detach().to("cpu", torch.float64)[samples]
        return found


@contextmanager
def _recurrent_layers_can_go_backward(module: nn.Module) -> Iterator[None]:
    """A recurrent layer of cuDNN has no backward in evaluation: without dropout, training is the same."""
    layers = [
        each
        for each in module.modules()
        if isinstance(each, nn.RNNBase) and not each.training and any(p.is_cuda for p in each.parameters())
    ]
    with without_dropout(module):
        for each in layers:
            each.training = True
        try:
            yield
        finally:
            for each in layers:
                each.training = False
