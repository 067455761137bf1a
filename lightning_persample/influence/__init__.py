"""Data influence: the ledger of a training run, and scores of its samples."""

from lightning_persample.influence.ledger import Manifest, as_tensors, read_ledger, read_manifest
from lightning_persample.influence.scores import SampleScores, el2n, grand, self_influence

__all__ = [
    "Manifest",
    "SampleScores",
    "as_tensors",
    "el2n",
    "grand",
    "read_ledger",
    "read_manifest",
    "self_influence",
]
