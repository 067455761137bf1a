"""Every error and warning this package raises."""

from __future__ import annotations


class PerSampleError(RuntimeError):
    """Base of every error of this package."""


class UnsupportedError(PerSampleError):
    """A per-sample gradient that was asked for cannot be given exactly; the text names op, parameter and remedy."""


class BatchSizeError(PerSampleError):
    """The batch size cannot be read from the batch, or the sizes found disagree."""


class OptionError(PerSampleError, ValueError):
    """An option has a value that is not allowed; the text names the value and what is allowed."""


class RuleRegistrationError(PerSampleError):
    """A rule is registered twice, or names an argument that its op does not have; or an op to be checked has none."""


class VerificationError(PerSampleError):
    """Per-sample gradients differ from those of the one-sample loop; the text is the report's table."""


class PerSampleWarning(UserWarning):
    """Something about the reported values that a user must know: a missing parameter, a layer that mixes samples."""
