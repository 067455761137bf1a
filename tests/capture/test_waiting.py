"""A captured step lets the host go on: nothing in it waits for the device, but what is listed here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.utils import backend_registration

from tests.processes import run_alone

# In a process of their own: a device that has been registered stays.
MODELS = ("mlp", "cnn", "gpt", "mlp, fused", "cnn, fused", "gpt, fused")
ASKED = ("gradients", "some samples", "tied")
LARGE = ("resnet18", "resnet18, fused")
LAYERS = (
    "conv1d", "conv2d, grouped", "conv3d", "transposed", "instance norm", "rms norm", "prelu", "dropout", "pooled",
    "upsampled", "attention", "weight norm", "spectral norm", "padded alike", "padded",
)  # fmt: skip
TARGETS = {f"batch_axis/{each}" for each in ("losses.py:every_target_counts", "losses.py:_unequal_weights")}
READ: dict[str, set[str]] = {
    "some samples": {"capture/collector.py:_samples_on"},  # which come from the host, once a step
    # Whose targets were left out in unequal numbers before: from then on before it is decided how the samples weigh.
    "padded": TARGETS | {"batch_axis/added_up.py:absent"},
}
pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this release of torch has no device that is written in Python",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, dict[str, Any]]:
    path = tmp_path_factory.mktemp("remote") / "found.json"
    return found_by(path, *MODELS, *ASKED, *LAYERS, "what is read at last")


@pytest.fixture(scope="module")
def long_runs(tmp_path_factory) -> dict[str, dict[str, Any]]:
    return found_by(tmp_path_factory.mktemp("remote") / "found.json", *LARGE, "case", timeout=500)


def found_by(path: Path, *names: str, timeout: float = 110) -> dict[str, dict[str, Any]]:
    ended = run_alone("tests.capture.remote_runs", str(path), *names, timeout=timeout)
    assert ended.codes == [0], ended.outputs
    return json.loads(path.read_text())


def assert_as_on_the_cpu(found: dict[str, Any]) -> None:
    assert "error" not in found, found["error"]
    assert found["coverage"] == found["expected coverage"] == 1
    assert found["off"] < 1e-10
    assert found["grads off"] < 1e-10
    assert found["noted"] == [found["expected notes"]] * 5


@pytest.mark.parametrize("name", [*MODELS, *ASKED, *LAYERS])
def test_values_and_gradients_are_those_of_the_cpu(runs, name):
    assert_as_on_the_cpu(runs[name])


@pytest.mark.parametrize("name", [*MODELS, *ASKED, *LAYERS])
def test_a_warm_step_waits_for_nothing(runs, name):
    assert set(runs[name]["warmer"]) <= READ.get(name, set())
    assert runs[name]["plain"] == []


@pytest.mark.parametrize("name", MODELS)
def test_the_first_step_reads_the_targets_of_the_loss_and_whether_norms_cancel(runs, name):
    targets = {"batch_axis/losses.py:every_target_counts"}
    assert set(runs[name]["cold"]) - {"gradients/program.py:at_least"} == targets | READ.get(name, set())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_large_models_and_every_way_in_which_a_parameter_meets_the_batch(long_runs):
    assert len(long_runs) > 70  # (some make tensors on the CPU, whatever device they are on)
    for name, found in long_runs.items():
        assert_as_on_the_cpu(found)
        if name in LARGE:
            assert found["warmer"] == []
            assert found["plain"] == []


def test_targets_that_are_left_out_are_noticed_when_the_device_has_read_them(runs):
    *equal, found, again = runs["targets left out at last"]
    assert equal == [[]] * 3
    (text,) = found
    assert text.startswith("`cross_entropy_loss` averages over targets that weigh unequally from sample to sample at ")
    assert again == found


def test_what_cancels_is_computed_again_when_the_device_has_it(runs):
    found, written = runs["what cancels"]
    assert found["off"] < 1e-2  # in float32 the products have 1e-8 of what is added up for them
    assert "gradients/precision.py:suspect" in found["lines"]
    assert found["reason"] is None
    assert written["off"] is None
    assert written["reason"] == (
        "rounding errors may show in its norms, and what they are computed from was changed in place during the "
        "backward, before the device had them; change a copy"
    )


def test_of_a_fit_those_steps_alone_wait_that_are_logged(runs):
    fits = runs["fits"]
    nothing: list[list[str]] = [[]] * 8
    assert fits["without"] == nothing
    assert fits["ledger"] == nothing  # which reads its rows at the end
    for name, waiting in (("every step", 1), ("every fourth step", 4), ("four batches a step", 4)):
        for batch, lines in enumerate(fits[name], start=1):
            if batch % waiting:
                assert lines == []
            else:  # for the numbers that are logged, once the step has run
                assert lines
                assert all(line.startswith("callbacks/") for line in lines)
