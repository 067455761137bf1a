"""unsupported="vmap": a model that the first engine cannot follow goes over to another one, once, with the reason."""

from __future__ import annotations

import pytest
import torch

from lightning_persample.callbacks import PerSampleGradientMonitor
from lightning_persample.errors import PerSampleWarning, UnsupportedError
from tests.callbacks.runs import Classifier, Recorder, WithReference, fit
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
