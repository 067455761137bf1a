"""Callbacks for the Trainer: the base for your own, the monitor that logs norms, and the writer of ledgers.

`collect_gradients` uses a Trainer, too: it stores the gradients of a whole dataset.
"""

from lightning_persample.callbacks.base import PerSampleCallback
from lightning_persample.callbacks.collect import collect_gradients
from lightning_persample.callbacks.eigen_projection import EigenProjection
from lightning_persample.callbacks.in_run import InRunInfluence
from lightning_persample.callbacks.label_noise import LabelNoiseProbe, LabelNoiseReport
from lightning_persample.callbacks.monitor import PerSampleGradientMonitor
from lightning_persample.callbacks.worst import WorstSamples
from lightning_persample.callbacks.writer import PerSampleGradientWriter

__all__ = [
    "EigenProjection",
    "InRunInfluence",
    "LabelNoiseProbe",
    "LabelNoiseReport",
    "PerSampleCallback",
    "PerSampleGradientMonitor",
    "PerSampleGradientWriter",
    "WorstSamples",
    "collect_gradients",
]
