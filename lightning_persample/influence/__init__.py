"""Data influence: the ledger of a training run, stores of per-sample gradients, and scores of the samples."""

from lightning_persample.influence.ledger import Manifest, as_tensors, read_ledger, read_manifest
from lightning_persample.influence.scores import SampleScores, el2n, grand, self_influence
from lightning_persample.influence.store import GradientStore, StoreManifest, StoreWriter, check_comparable

__all__ = [
    "GradientStore",
    "Manifest",
    "SampleScores",
    "StoreManifest",
    "StoreWriter",
    "as_tensors",
    "check_comparable",
    "el2n",
    "grand",
    "read_ledger",
    "read_manifest",
    "self_influence",
]
