"""Projected gradients in a Trainer, from every engine, beside plain autograd on one sample at a time."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from lightning_persample import Projection
from tests.callbacks.runs import CLASSES, FEATURES, Classifier, Recorder, WithReference, fit
from tests.in_turn import in_turn

ENGINES = ["expanded", "vmap", "loop"]
PROJECTION = Projection(20, seed=4)


class WithGradients(WithReference):
    """Computes each sample's own gradients before the training step sees the batch."""

    def on_train_batch_start(self, batch, batch_idx):
        named = {name: p for name, p in self.named_parameters() if p.requires_grad}
        rows = []
        for i in range(len(batch[0])):
            grads = torch.autograd.grad(self.sample_loss(batch, i), list(named.values()))
            rows.append([grad.double() for grad in grads])
        self.reference.append(
            {name: torch.stack(grads) for name, grads in zip(named, zip(*rows, strict=True), strict=True)}
        )


class Projected(Recorder):
    """Projects what it gets at once."""

    def __init__(self, **options):
        super().__init__(1, quantities=("projection",), **options)
        self.projected = []

    def on_per_sample_gradients(self, trainer, pl_module, record, batch, batch_idx):
        super().on_per_sample_gradients(trainer, pl_module, record, batch, batch_idx)
        self.projected.append(record.project(PROJECTION))


def network():
    return nn.Sequential(nn.Linear(FEATURES, 30), nn.Tanh(), nn.Linear(30, CLASSES))


@pytest.mark.parametrize(
    ("engine", "max_samples", "settings"),
    in_turn(product(ENGINES, [None, 3]), [{}, {"accumulate_grad_batches": 2}]),
)
def test_values_are_those_of_each_sample_alone(engine, max_samples, settings):
    module = WithGradients(network())
    recorder = Projected(engine=engine, max_samples=max_samples)
    fit(module, [recorder], precision="64-true", **settings)
    assert len(recorder.projected) == len(recorder.records) == 3
    for record, projected, reference in zip(recorder.records, recorder.projected, module.reference, strict=True):
        assert list(projected) == list(reference)
        chosen = slice(None) if max_samples is None else record.samples
        for name, rows in projected.items():
            left, right = PROJECTION.matrices(name, reference[name].shape[1:])
            grads = reference[name][chosen]
            matrices = grads.reshape(len(grads), left.shape[1], right.shape[1])
            expected = torch.einsum("ap,npd,bd->nab", left, matrices, right).flatten(1)
            assert rows.dtype == torch.float64
            torch.testing.assert_close(rows, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_capture_serves_dots_and_projections(engine):
    class Both(Projected):
        def needs(self, trainer):
            return {"dot", "projection"}

        def on_per_sample_gradients(self, trainer, pl_module, record, batch, batch_idx):
            super().on_per_sample_gradients(trainer, pl_module, record, batch, batch_idx)
            full = record.project(Projection(10_000))
            vectors = {name: rows[0].view_as(pl_module.get_parameter(name)) for name, rows in full.items()}
            expected = sum(rows @ rows[0] for rows in full.values())
            torch.testing.assert_close(record.dot(vectors), expected)

    recorder = Both(engine=engine)
    fit(Classifier(network()), [recorder])
    assert len(recorder.projected) == 3


@pytest.mark.parametrize("engine", ENGINES)
def test_training_is_equal_bit_for_bit(engine):
    found = []
    for callbacks in ([], [Projected(engine=engine)]):
        torch.manual_seed(0)
        module = Classifier(nn.Sequential(nn.Linear(FEATURES, 30), nn.Dropout(), nn.Linear(30, CLASSES)))
        fit(module, callbacks)
        found.append((*module.state_dict().values(), torch.rand(3)))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
