"""Data influence: the ledger of a training run, stores of per-sample gradients, and scores of the samples."""

from lightning_persample.influence.datamodeling import linear_datamodeling_score
from lightning_persample.influence.influence_functions import correct_class_margin, ekfac, logra, trak
from lightning_persample.influence.ledger import Manifest, as_tensors, read_ledger, read_manifest
from lightning_persample.influence.products import ScoreOptions
from lightning_persample.influence.report import report
from lightning_persample.influence.scores import (
    PairScores,
    SampleScores,
    TopScores,
    data_shapley,
    el2n,
    grand,
)
from lightning_persample.influence.shards import StoreManifest, StoreWriter
from lightning_persample.influence.store import GradientStore, check_comparable
from lightning_persample.influence.tracin import (
    adam_direction,
    grad_cos,
    grad_dot,
    less,
    self_influence,
    tracin,
    tracin_cp,
)

__all__ = [
    "GradientStore",
    "Manifest",
    "PairScores",
    "SampleScores",
    "ScoreOptions",
    "StoreManifest",
    "StoreWriter",
    "TopScores",
    "adam_direction",
    "as_tensors",
    "check_comparable",
    "correct_class_margin",
    "data_shapley",
    "ekfac",
    "el2n",
    "grad_cos",
    "grad_dot",
    "grand",
    "less",
    "linear_datamodeling_score",
    "logra",
    "read_ledger",
    "read_manifest",
    "report",
    "self_influence",
    "tracin",
    "tracin_cp",
    "trak",
]
