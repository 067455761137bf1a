"""Per-sample gradients in a PyTorch Lightning Trainer: one callback, no change to the model."""

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
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
else:
    # A name is imported when it is asked for first: what needs none of Lightning, as the command, does not wait for it.
    _HOMES = (
        "errors", "gradients", "batch_axis.batch", "rules", "capture.record", "capture.mode", "reference.check_rule",
        "reference.loops", "reference.verify", "tensor_form.call_for", "tensor_form.expanded_weight", "callbacks",
    )  # fmt: skip

    def __getattr__(name):
        """A public name, or a part of the package."""
        from importlib import import_module

        if name in __all__:
            homes = (import_module(f"{__name__}.{home}") for home in _HOMES)
            found = next(getattr(home, name) for home in homes if hasattr(home, name))
        elif name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        else:
            try:
                found = import_module(f"{__name__}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{__name__}.{name}":
                    raise
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        globals()[name] = found
        return found

    def __dir__():
        return [*globals(), *__all__]
