"""The engine: from the torch calls of a training step to a record of per-sample gradients."""

from lightning_persample.engine.coverage import warning_texts
from lightning_persample.engine.functional import loop_per_sample_grads
from lightning_persample.engine.mode import Capture, expanded_weights
from lightning_persample.engine.record import PerSampleRecord, group_name

__all__ = ["Capture", "PerSampleRecord", "expanded_weights", "group_name", "loop_per_sample_grads", "warning_texts"]
