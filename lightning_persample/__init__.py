"""Per-sample gradients in a PyTorch Lightning Trainer: one callback, no change to the model."""

# In a Trainer
from lightning_persample.batch_axis.batch import mark_samples
from lightning_persample.callbacks import (
    EigenProjection,
    InRunInfluence,
    LabelNoiseProbe,
    LabelNoiseReport,
    PerSampleCallback,
    PerSampleGradientMonitor,
    PerSampleGradientWriter,
    WorstSamples,
    collect_gradients,
)

# Without a Trainer
from lightning_persample.capture.mode import Capture, expanded_weights
from lightning_persample.capture.record import PerSampleRecord

# What can go wrong
from lightning_persample.errors import (
    BatchSizeError,
    OptionError,
    PerSampleError,
    PerSampleWarning,
    RuleRegistrationError,
    UnsupportedError,
    VerificationError,
)

# Projections of gradients to few numbers; structured per-sample gradients, and rules for further ops
from lightning_persample.gradients import Dense, Indexed, Outer, Patches, PatchGeometry, Projection, SampleGradient
from lightning_persample.reference.check_rule import RuleCheck, RuleReport, check_rule
from lightning_persample.reference.loops import loop_per_sample_grads, vmap_per_sample_grads
from lightning_persample.reference.verify import ParameterCheck, VerificationReport, check_per_sample_gradients
from lightning_persample.rules import Call, Rule, register_rule, supported_ops
from lightning_persample.tensor_form.call_for import call_for_per_sample_grads
from lightning_persample.tensor_form.expanded_weight import ExpandedWeight

__version__ = "0.1.0"

__all__ = [
    "BatchSizeError",
    "Call",
    "Capture",
    "Dense",
    "EigenProjection",
    "ExpandedWeight",
    "InRunInfluence",
    "Indexed",
    "LabelNoiseProbe",
    "LabelNoiseReport",
    "OptionError",
    "Outer",
    "ParameterCheck",
    "PatchGeometry",
    "Patches",
    "PerSampleCallback",
    "PerSampleError",
    "PerSampleGradientMonitor",
    "PerSampleGradientWriter",
    "PerSampleRecord",
    "PerSampleWarning",
    "Projection",
    "Rule",
    "RuleCheck",
    "RuleRegistrationError",
    "RuleReport",
    "SampleGradient",
    "UnsupportedError",
    "VerificationError",
    "VerificationReport",
    "WorstSamples",
    "__version__",
    "call_for_per_sample_grads",
    "check_per_sample_gradients",
    "check_rule",
    "collect_gradients",
    "expanded_weights",
    "loop_per_sample_grads",
    "mark_samples",
    "register_rule",
    "supported_ops",
    "vmap_per_sample_grads",
]
