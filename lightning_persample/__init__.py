"""Per-sample gradients in a PyTorch Lightning Trainer: one callback, no change to the model."""

# In a Trainer
from lightning_persample.callbacks import PerSampleCallback, PerSampleGradientMonitor

# Without a Trainer
from lightning_persample.engine import Capture, PerSampleRecord, expanded_weights, loop_per_sample_grads

# What can go wrong
from lightning_persample.errors import (
    BatchSizeError,
    OptionError,
    PerSampleError,
    PerSampleWarning,
    RuleRegistrationError,
    UnsupportedError,
)

# Structured per-sample gradients, and rules for further ops
from lightning_persample.gradients import Dense, Indexed, Outer, Patches, SampleGradient
from lightning_persample.rules import register_rule, supported_ops

__version__ = "0.1.0"

__all__ = [
    "BatchSizeError",
    "Capture",
    "Dense",
    "Indexed",
    "OptionError",
    "Outer",
    "Patches",
    "PerSampleCallback",
    "PerSampleError",
    "PerSampleGradientMonitor",
    "PerSampleRecord",
    "PerSampleWarning",
    "RuleRegistrationError",
    "SampleGradient",
    "UnsupportedError",
    "__version__",
    "expanded_weights",
    "loop_per_sample_grads",
    "register_rule",
    "supported_ops",
]
