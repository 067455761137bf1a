"""The algebra: what one use of one parameter contributes to each sample's gradient."""

from lightning_persample.gradients.composite import Block, Sum, add_up
from lightning_persample.gradients.patches import PatchGeometry
from lightning_persample.gradients.structure import Dense, Indexed, Outer, Patches, SampleGradient
from lightning_persample.gradients.together import sq_norms

__all__ = [
    "Block",
    "Dense",
    "Indexed",
    "Outer",
    "PatchGeometry",
    "Patches",
    "SampleGradient",
    "Sum",
    "add_up",
    "sq_norms",
]
