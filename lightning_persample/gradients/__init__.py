"""The algebra: what one use of one parameter contributes to each sample's gradient."""

from lightning_persample.gradients.composite import Block, Deflated, Ragged, Sum, add_up, at_samples, in_order
from lightning_persample.gradients.cost import KernelOptions, convolution_is_fused, kernel_options, linear_is_fused
from lightning_persample.gradients.geometry import PatchGeometry
from lightning_persample.gradients.indexed import Indexed
from lightning_persample.gradients.patches import Patches
from lightning_persample.gradients.projection import Projection
from lightning_persample.gradients.sample_gradient import SampleGradient
from lightning_persample.gradients.structure import Dense, Outer
from lightning_persample.gradients.together import sq_norms, sq_norms_and_sum

__all__ = [
    "Block",
    "Deflated",
    "Dense",
    "Indexed",
    "KernelOptions",
    "Outer",
    "PatchGeometry",
    "Patches",
    "Projection",
    "Ragged",
    "SampleGradient",
    "Sum",
    "add_up",
    "at_samples",
    "convolution_is_fused",
    "in_order",
    "kernel_options",
    "linear_is_fused",
    "sq_norms",
    "sq_norms_and_sum",
]
