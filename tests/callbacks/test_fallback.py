"""unsupported="vmap": a model that the first engine cannot follow goes over to another one, once, with the reason."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from lightning_persample.callbacks import PerSampleGradientMonitor
from lightning_persample.errors import PerSampleWarning, UnsupportedError
from lightning_persample.reference.loops import loop_per_sample_grads
from tests.callbacks.runs import FEATURES, Classifier, Recorder, WithReference, fit
from tests.callbacks.test_untouched_training import everything_after_training
from tests.callbacks.unseen_models import Hidden, NeedsTwo, Unseen, UnseenByVmap, texts_of

BOTH = ("sq_norm", "grad_sample")


def norms_of(recorder):
    return torch.cat([record.norms() for record in recorder.records])


@pytest.mark.parametrize(("function", "engine"), [(Unseen, "vmap"), (UnseenByVmap, "loop")])
def test_a_model_that_the_first_engine_cannot_follow_falls_back_once_and_says_why(function, engine):
    module, recorder = WithReference(Hidden(function), lr=0.01), Recorder(quantities=BOTH, unsupported="vmap")
    with pytest.warns(PerSampleWarning) as caught:
        fit(module, [PerSampleGradientMonitor(statistics=()), recorder], max_epochs=2)
    (text,) = texts_of(caught)
    assert "missing for 1 parameter" in text
    assert "`network.weight`: its gradient also arrives through" in text
    assert f"\nFrom this step on, captured steps use engine='{engine}', an extra pass over the batch" in text
    assert ("; engine='vmap' failed with RuntimeError: In order to use an autograd.Function" in text) == (
        engine == "loop"
    )
    assert [record.coverage for record in recorder.records] == [1.0] * 6
    torch.testing.assert_close(norms_of(recorder), torch.cat(module.reference), rtol=1e-5, atol=1e-6)


def equation(network, x):
    """Of a physics-informed network: the second derivative along one input, and the first along another."""
    u = network(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
    return (slope[:, 1] - curvature[:, 0] + u[:, 0]).square().mean()


def penalty(network, x):
    """Of a Wasserstein critic."""
    u = network(x)
    (slope,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
    return u.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def forces(network, x):
    """Energies and the forces that follow from them, by `backward`."""
    energy = network(x)[:, 0]
    energy.sum().backward(create_graph=True, inputs=[x])
    return (energy - 1).square().mean() + x.grad.square().mean()


class Differentiated(WithReference):
    def __init__(self, loss) -> None:
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)), lr=0.01)
        self.loss = loss

    def sample_loss(self, batch, i):
        return self.loss(self.network, batch[0][i : i + 1].clone().requires_grad_())

    def training_step(self, batch, batch_idx):
        return self.loss(self.network, batch[0].clone().requires_grad_())


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("loss", [equation, penalty, forces])
def test_a_gradient_of_a_gradient_is_named_with_its_line_and_a_remedy_that_gives_its_values(loss):
    module = Differentiated(loss)
    with pytest.warns(PerSampleWarning) as caught:
        fit(module, [Recorder()])
    (text,) = texts_of(caught)
    assert "missing for 2 parameters" in text
    assert re.search(r"computed with create_graph=True at test_fallback\.py:\d+ \(a gradient of a gradient\)", text)
    assert "engine='loop' in the callback computes it in automatic optimization, loop_per_sample_grads every" in text
    module, recorder = Differentiated(loss), Recorder(engine="loop", unsupported="error")
    fit(module, [recorder])
    assert [record.coverage for record in recorder.records] == [1.0] * 3
    torch.testing.assert_close(norms_of(recorder), torch.cat(module.reference), rtol=1e-4, atol=1e-6)
    module.network.double()
    x = torch.randn(5, FEATURES, dtype=torch.float64)
    _, grads = loop_per_sample_grads(module.network, lambda network, x: loss(network, x.clone().requires_grad_()), x)
    for i in range(5):
        expected = torch.autograd.grad(module.sample_loss((x,), i), list(module.parameters()), allow_unused=True)
        for found, grad in zip(grads.values(), expected, strict=True):
            torch.testing.assert_close(found[i], torch.zeros_like(found[i]) if grad is None else grad)


def test_a_model_that_the_first_engine_follows_does_not_fall_back():
    recorder = Recorder(unsupported="vmap")
    fit(Classifier(), [recorder])
    assert recorder._shared is None
    assert [record.coverage for record in recorder.records] == [1.0] * 3


def test_training_is_equal_bit_for_bit_when_it_falls_back():
    plain, python_state = everything_after_training(Hidden, 3, [])
    recorder = Recorder(1, unsupported="vmap")
    with pytest.warns(PerSampleWarning, match="engine='vmap'"):
        watched, watched_python_state = everything_after_training(Hidden, 3, [recorder])
    assert all(record.coverage == 1.0 for record in recorder.records)
    for name, value in plain.items():
        assert torch.equal(value, watched[name]), name
    assert python_state == watched_python_state


def test_where_no_engine_can_follow_what_is_missing_is_said_as_always():
    recorder = Recorder(unsupported="vmap")
    with pytest.warns(PerSampleWarning) as caught:
        fit(Classifier(NeedsTwo()), [recorder])
    failed, missing, *_ = texts_of(caught)
    assert failed == (
        "No second engine can follow this model; engine='vmap' failed with ValueError: one sample is not enough; "
        "engine='loop' failed with ValueError: one sample is not enough"
    )
    assert "missing for 1 parameter" in missing
    assert [len(record.unsupported) for record in recorder.records] == [1] * 3


def test_one_error_decides_before_one_vmap():
    with pytest.raises(UnsupportedError, match="missing for 1 parameter"):
        fit(Classifier(Hidden()), [Recorder(unsupported="vmap"), Recorder(unsupported="error")])
