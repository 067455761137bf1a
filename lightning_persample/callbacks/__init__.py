"""Callbacks for the Trainer: the base for your own, and the monitor that logs per-sample gradient norms."""

from lightning_persample.callbacks._worst_samples import WorstSamples
from lightning_persample.callbacks.base import PerSampleCallback
from lightning_persample.callbacks.monitor import PerSampleGradientMonitor

__all__ = ["PerSampleCallback", "PerSampleGradientMonitor", "WorstSamples"]
