"""Several processes on the CPU: what each of them records, what all of them log, and how they wait for each other."""

from __future__ import annotations

import math
import os

import pytest
import torch

from lightning_persample.callbacks import PerSampleGradientMonitor
from tests.callbacks.runs import Recorder, as_loader, fit, of_norms
from tests.callbacks.strategy_models import STEPS, Referenced, joined, network
from tests.callbacks.strategy_runs import RUNS, SHARDED, WAYS
from tests.processes import run_alone, run_ranks, saved_by_ranks
from tests.torch_release import OLDEST, RELEASE, not_in_the_oldest

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed")

MODULE, LAUNCHED = "tests.callbacks.strategy_runs", "tests.callbacks.launched_runs"
TOGETHER = [name for name in RUNS if not name.startswith("failing") and not name.endswith(("on gpus", "on one device"))]
TOGETHER.append("callbacks that monitor")
if RELEASE <= OLDEST:
    TOGETHER = [name for name in TOGETHER if "sharded" not in name]
ALIKE = [*WAYS, *SHARDED, "more than there is room for"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every run gave on both ranks. One pair of processes does them all, because starting it takes longest."""
    folder = tmp_path_factory.mktemp("strategies")
    ended = run_ranks(MODULE, str(folder), *TOGETHER, timeout=100)
    saved = saved_by_ranks(ended, folder)

    def of_ranks(name):
        if name not in TOGETHER:
            pytest.skip("FSDP2 of torch 2.6 needs a GPU")
        return saved(name)

    return of_ranks


@pytest.fixture
def watched(results):
    return lambda name: [result["watched"] for result in results(name)]


def settings_of(name):
    return {**WAYS, **SHARDED, "more than there is room for": {"every": 1, "sizes": (5, 2)}}[name]


def logged_batches(name):
    """The batches after which the monitor logs: the last one of every second optimizer step, or of each."""
    settings = settings_of(name)
    window, every = settings.get("accumulate_grad_batches", 1), settings.get("every", 2)
    ends = [batch for batch in range(STEPS) if (batch + 1) % window == 0 or batch == STEPS - 1]
    return ends[every - 1 :: every]


def norms_until(ranks, batch, window):
    """The reference norms of all ranks in the accumulation window that ends with a batch."""
    first = batch - batch % window
    return torch.cat([rank["reference"][each] for rank in ranks for each in range(first, batch + 1)])


@pytest.mark.parametrize("name", ALIKE)
def test_weights_are_equal_bit_for_bit_on_every_rank(results, name):
    ranks = results(name)
    expected = ranks[0]["plain"]["weights"]
    for rank in ranks:
        for run in ("plain", "watched"):
            assert rank[run]["weights"].keys() == expected.keys()
            for parameter, value in rank[run]["weights"].items():
                assert torch.equal(value, expected[parameter]), (run, parameter)
        assert not rank["watched"]["left"]


@pytest.mark.parametrize("name", ["fused", "sharded, fused"])
def test_fused_gradients_are_averaged_as_any_other(results, name):
    """They reach the hooks of DDP and fully_shard: all ranks end with the weights of a plain run but for sums."""
    ranks = results(name)
    for rank in ranks:
        for parameter, value in rank["watched"]["weights"].items():
            assert torch.equal(value, ranks[0]["watched"]["weights"][parameter])
            torch.testing.assert_close(value, rank["plain"]["weights"][parameter], rtol=1e-10, atol=1e-13)
        assert rank["watched"]["warnings"] == []
        for found, expected in zip(rank["watched"]["norms"], rank["watched"]["reference"], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ALIKE)
def test_norms_are_those_of_plain_autograd_sample_by_sample(watched, name):
    for rank, size in zip(watched(name), settings_of(name).get("sizes", (4, 4)), strict=True):
        assert [len(norms) for norms in rank["reference"]] == [size] * STEPS
        captured = [norms for norms in rank["reference"] if len(norms)]
        assert len(rank["norms"]) == len(captured)
        for norms, expected in zip(rank["norms"], captured, strict=True):
            torch.testing.assert_close(norms, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_logged_is_of_the_samples_of_all_ranks(watched, name):
    ranks = watched(name)
    window = settings_of(name).get("accumulate_grad_batches", 1)
    for batch in logged_batches(name):
        values = {key.removeprefix("per_sample_grad/"): v for key, v in ranks[0]["values"][batch].items()}
        norms = norms_until(ranks, batch, window)
        for key, value in (of_norms(norms) | {"coverage": 1.0, "samples": len(norms)}).items():
            assert values.pop(key) == pytest.approx(value, rel=1e-6), key
        of_mean = set() if settings_of(name).get("options", {}).get("engine") else {"noise_scale", "diversity"}
        of_group = {f"{group}/{kind}" for group in groups(ranks[0]) for kind in of_mean | {"norm_mean"}}
        of_epoch = {f"{name}_epoch" for name in values if f"{name}_epoch" in values}
        assert values.keys() - of_epoch == of_group | of_mean | ({"norm_of_mean"} if of_mean else set())


def groups(rank):
    return {".".join(name.split(".")[:-1][:2]) for name in rank["weights"]}


@pytest.mark.parametrize("name", [*ALIKE, "capture fails on one rank", "one rank is told to stop"])
def test_every_rank_sees_the_same_values(watched, name):
    first, second = (rank["values"] for rank in watched(name))
    assert [list(values) for values in first] == [list(values) for values in second]
    for mine, other in zip(first, second, strict=True):
        assert all(other[key] == value or (math.isnan(value) and math.isnan(other[key])) for key, value in mine.items())


@pytest.mark.parametrize("name", [*WAYS, *SHARDED])
def test_there_is_one_collective_at_each_logged_step_and_none_elsewhere(results, name):
    logged = logged_batches(name)
    for rank in results(name):
        own = list(rank["watched"]["calls"])
        for call in rank["plain"]["calls"]:  # those of the Trainer itself
            own.remove(call)
        assert own == [(batch, "all_gather") for batch in logged]
        assert rank["watched"]["collectives"] - rank["plain"]["collectives"] == len(logged)


def test_gradients_that_a_communication_hook_changes_are_no_mean(watched):
    text = "DDP's communication hook `fp16_compress_hook` changes the gradients; statistics=() leaves them out"
    for rank in watched("communication hook"):
        (said,) = rank["warnings"]
        assert said == f"noise_scale, diversity of `per_sample_grad` are nan at steps where {text}"
        for batch in (1, 3, 5):
            assert rank["values"][batch]["per_sample_grad/norm_mean"] > 0
            assert math.isnan(rank["values"][batch]["per_sample_grad/norm_of_mean"])


def test_two_monitors_share_one_collective(results):
    ranks = results("two monitors")
    for rank in ranks:
        assert [batch for batch, name in rank["watched"]["calls"] if name == "all_gather"] == [1, 2, 3, 5]
        assert rank["watched"]["collectives"] - rank["plain"]["collectives"] == 4
    first, second = (rank["watched"]["values"] for rank in ranks)
    assert all(mine == pytest.approx(other, rel=0, nan_ok=True) for mine, other in zip(first, second, strict=True))
    norms = torch.cat([rank["watched"]["reference"][-1] for rank in ranks])
    for prefix in ("per_sample_grad", "per_sample_third"):
        assert first[-1][f"{prefix}/norm_mean"] == pytest.approx(float(norms.mean()), rel=1e-6)
        assert first[-1][f"{prefix}/norm_p95"] == pytest.approx(float(norms.quantile(0.95)), rel=1e-6)
    assert "per_sample_third/network.0/norm_mean" not in first[-1]
    assert "per_sample_grad/network.0/norm_mean" in first[-1]


def test_a_step_that_is_larger_than_all_before_costs_a_second_collective(results):
    for rank in results("more than there is room for"):
        assert rank["watched"]["collectives"] - rank["plain"]["collectives"] == STEPS + 1


UNEQUAL = (
    "are nan at steps where the devices have numbers of samples, or parameters with values, that differ; "
    "statistics=() leaves them out"
)


@pytest.mark.parametrize("name", ALIKE)
def test_there_is_nothing_to_warn_of(watched, name):
    empty = ["the batch is empty: its tensors have size 0 along the batch axis"]
    said = [[text for text in rank["warnings"] if "statistics=()" not in text] for rank in watched(name)]
    of_mean = [[text for text in rank["warnings"] if "statistics=()" in text] for rank in watched(name)]
    sizes = settings_of(name).get("sizes", (4, 4))
    if (sizes[0] == sizes[1] and name != "one rank falls back") or settings_of(name).get("options", {}).get("engine"):
        assert of_mean == [[], []]
    else:
        assert all(f"noise_scale, diversity of `per_sample_grad` {UNEQUAL}" in texts for texts in of_mean[1:])
    if name == "one rank falls back":
        (text,) = said[0]
        assert "`network.scale`" in text
        assert "From this step on, captured steps use engine='loop'" in text
        said[0] = []
    assert said == [[], empty if name == "no samples on one rank" else []]


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_are_one_process_on_the_joined_batch(watched, accumulate, sharded):
    names = ("sharded", "sharded, accumulation") if sharded else ("plain", "accumulation")
    ranks = watched(names[accumulate - 1])
    every = 2 if accumulate == 1 else 1
    recorder = Recorder(1)
    callbacks = [PerSampleGradientMonitor(every, per_layer=2), recorder]
    trainer = fit(Referenced(network()), callbacks, data=as_loader(joined()), accumulate_grad_batches=accumulate)
    for index, record in enumerate(recorder.records):
        together = torch.cat([rank["norms"][index] for rank in ranks])
        torch.testing.assert_close(together, record.norms(), rtol=1e-9, atol=0)
    for key, value in ranks[0]["values"][-1].items():
        if key != "per_sample_grad/samples":
            assert value == pytest.approx(float(trainer.callback_metrics[key]), rel=1e-6, nan_ok=True), key
            assert not math.isnan(value) or key.endswith("noise_scale"), key


def test_a_layer_that_one_rank_uses_is_named_on_all(watched):
    first, second = watched("unequal layers")
    assert set(first["names"][0]) == {f"network.{layer}.{kind}" for layer in ("shared", "own.0") for kind in WB}
    assert set(second["names"][0]) == {f"network.{layer}.{kind}" for layer in ("shared", "own.1") for kind in WB}


WB = ("weight", "bias")


def test_a_rank_without_a_capture_counts_no_samples_and_nobody_waits_for_it(watched):
    ranks = watched("capture fails on one rank")
    samples = [values["per_sample_grad/samples"] for values in ranks[0]["values"]]
    assert samples == [8, 8, 4, 8, 8, 8]
    norms = ranks[0]["reference"][2]
    values = ranks[0]["values"][2]
    assert values["per_sample_grad/norm_mean"] == pytest.approx(float(norms.mean()), rel=1e-6)
    assert values["per_sample_grad/nonfinite"] == 0
    of_mean = ("noise_scale", "diversity", "norm_of_mean")
    absent = {(n, key) for n, values in enumerate(ranks[0]["values"]) for key in values if math.isnan(values[key])}
    assert {(n, key) for n, key in absent if not key.endswith("noise_scale")} == {
        (2, f"per_sample{prefix}/{name}") for prefix in ("_grad", "_2") for name in of_mean[1:]
    }
    assert all(text.startswith("noise_scale, diversity of") and UNEQUAL in text for text in ranks[0]["warnings"])
    (text,) = (text for text in ranks[1]["warnings"] if UNEQUAL not in text)
    assert "batch_size" in text


def test_a_rank_with_a_part_of_its_accumulated_batches_counts_none(watched):
    values = watched("capture fails within a window")[0]["values"]
    for prefix in ("per_sample_grad", "per_sample_2"):
        assert [values[batch][f"{prefix}/samples"] for batch in (1, 3, 5)] == [16, 8, 16]


def test_a_rank_that_is_told_to_stop_logs_with_the_others(watched):
    for rank in watched("one rank is told to stop"):
        assert [batch for batch, name in rank["calls"] if name == "all_gather"] == [1, 3, 5]


def test_callbacks_that_monitor_decide_alike_on_both_ranks(results):
    first, second = results("callbacks that monitor")
    assert first["scores"] == second["scores"]
    assert 0 < first["scores"]["stopped"] == first["watched"]["epochs"] - 1
    seen = [values["per_sample_grad/norm_max"] for values in first["watched"]["values"][STEPS - 1 :: STEPS]]
    assert first["scores"]["checkpoint"] == first["scores"]["stopping"] == min(seen)
    largest = [rank["watched"]["reference"][STEPS - 1].max() for rank in (first, second)]
    assert seen[0] == pytest.approx(float(max(largest)), rel=1e-6)
    assert largest[0] != largest[1]


@not_in_the_oldest
def test_a_sharded_module_on_one_device(tmp_path):
    name = "sharded on one device"
    ended = run_ranks(MODULE, str(tmp_path), name, ranks=1, timeout=60)
    assert ended.codes == [0], ended.outputs
    runs = torch.load(tmp_path / f"{name}.0.pt", weights_only=False)
    for parameter, value in runs["plain"]["weights"].items():
        assert torch.equal(value, runs["watched"]["weights"][parameter])
    for norms, expected in zip(runs["watched"]["norms"], runs["watched"]["reference"], strict=True):
        torch.testing.assert_close(norms, expected, rtol=1e-9, atol=0)
    assert runs["watched"]["warnings"] == []


WAITS = (
    "training_step waits for other processes (`allreduce_`: a gathered tensor, synchronized batch normalization), so "
    "that it cannot be run on single samples; use engine='expanded' and verify=False"
)
SHARDED_TEXT = (
    "Sharded is sharded (fully_shard), so that every process has to take part in each of its forward passes, and "
    "single samples cannot be run on one of them; use engine='expanded' and verify=False"
)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_an_extra_pass_that_would_wait_for_other_ranks_is_refused(watched, engine):
    for rank in watched(f"extra pass, {engine}"):
        assert rank["warnings"] == [WAITS]
        assert len(rank["values"]) == STEPS
        assert rank["values"][-1] == {}


def test_a_check_that_would_wait_for_other_ranks_is_refused(results):
    assert [rank["watched"]["warnings"] for rank in results("extra pass, verify")] == [[WAITS]] * 2


def test_an_extra_pass_of_a_sharded_module_is_refused(results):
    for rank in results("extra pass, sharded, loop"):
        assert rank["watched"]["warnings"] == [SHARDED_TEXT]
        assert rank["watched"]["collectives"] - rank["plain"]["collectives"] == STEPS // 2
        for name, value in rank["plain"]["weights"].items():
            assert torch.equal(value, rank["watched"]["weights"][name])
    assert [rank["watched"]["warnings"] for rank in results("extra pass, sharded, verify")] == [[SHARDED_TEXT]] * 2


def test_tensor_parallelism_is_refused(watched):
    for rank in watched("tensor parallel"):
        assert rank["warnings"] == [
            "ModelParallelStrategy with tensor_parallel_size=2 is not supported, because several devices compute one "
            "sample together; say tensor_parallel_size=1, data_parallel_size=<number of devices> and use fully_shard: "
            "no per-sample gradients are captured in this fit"
        ]
        assert rank["values"] == [{}] * STEPS
        assert not any(name == "all_gather" for _, name in rank["calls"])


@pytest.mark.parametrize(("name", "text"), [("step", "training_step"), ("callback", "a callback")])
def test_an_error_on_one_rank_ends_all_of_them(name, text, tmp_path):
    ended = run_ranks(MODULE, str(tmp_path), f"failing {name}", timeout=60)
    assert None not in ended.codes, "a rank still waited"
    assert 0 not in ended.codes
    assert f"RuntimeError: a mistake in {text}" in ended.outputs[1]
    assert all("left behind: False" in output for output in ended.outputs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ddp_on_gpus(tmp_path):
    count = torch.cuda.device_count()
    ended = run_ranks(MODULE, str(tmp_path), "ddp on gpus", ranks=min(count, 2), on_gpu=True)
    assert set(ended.codes) == {0}, ended.outputs
    for rank in range(min(count, 2)):
        run = torch.load(tmp_path / f"ddp on gpus.{rank}.pt", weights_only=False)
        for name, value in run["plain"]["weights"].items():
            assert torch.equal(value, run["watched"]["weights"][name])
        for norms, expected in zip(run["watched"]["norms"], run["watched"]["reference"], strict=True):
            torch.testing.assert_close(norms, expected.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_sharded_module_on_a_gpu(tmp_path):
    ended = run_ranks(MODULE, str(tmp_path), "sharded on gpus", ranks=1, on_gpu=True)
    assert ended.codes == [0], ended.outputs
    run = torch.load(tmp_path / "sharded on gpus.0.pt", weights_only=False)
    for name, value in run["plain"]["weights"].items():
        assert torch.equal(value, run["watched"]["weights"][name])
    for norms, expected in zip(run["watched"]["norms"], run["watched"]["reference"], strict=True):
        torch.testing.assert_close(norms, expected.cpu(), rtol=1e-6, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fsdp_strategy_is_refused_and_trains_on(tmp_path):
    ended = run_ranks(MODULE, str(tmp_path), "fsdp on gpus", ranks=1, on_gpu=True)
    assert ended.codes == [0], ended.outputs
    run = torch.load(tmp_path / "fsdp on gpus.0.pt", weights_only=False)
    (text,) = run["watched"]["warnings"]
    assert text.startswith(
        "FSDPStrategy is not supported, because it holds weights of several layers in one flat tensor"
    )
    for name, value in run["plain"]["weights"].items():
        assert torch.equal(value, run["watched"]["weights"][name])


CAN_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


@pytest.mark.parametrize(
    ("strategy", "fits"),
    [("ddp", 2), pytest.param("ddp_fork", 2, marks=CAN_FORK), pytest.param("ddp_spawn", 1, marks=pytest.mark.slow)],
)
def test_processes_that_the_trainer_starts(strategy, fits, tmp_path):
    ended = run_alone(LAUNCHED, strategy, str(tmp_path), str(fits), timeout=100)
    assert ended.codes == [0], ended.outputs
    assert "left behind: True" not in ended.outputs[0]
    last = [torch.load(tmp_path / f"watched.{fits - 1}.{rank}.pt", weights_only=False) for rank in (0, 1)]
    for rank, run in enumerate(last):
        plain = torch.load(tmp_path / f"plain.{fits - 1}.{rank}.pt", weights_only=False)
        for name, value in plain["weights"].items():
            assert torch.equal(value, run["weights"][name]), name
            assert torch.equal(value, last[0]["weights"][name]), name
        assert len(run["norms"]) == len(run["reference"]) > 0
        for norms, expected in zip(run["norms"], run["reference"], strict=True):
            torch.testing.assert_close(norms, expected, rtol=1e-9, atol=0)
    norms = torch.cat([run["reference"][-1] for run in last])
    assert last[0]["values"] == last[1]["values"]
    assert last[0]["values"][-1]["per_sample_grad/norm_max"] == pytest.approx(float(norms.max()), rel=1e-6)


@CAN_FORK
def test_an_error_in_a_started_process_is_what_the_user_sees(tmp_path):
    ended = run_alone(LAUNCHED, "ddp_fork", str(tmp_path), "fails", timeout=60)
    assert ended.codes == [1]
    assert "RuntimeError: a mistake in training_step" in ended.outputs[0] or "Connection closed" in ended.outputs[0]
    assert "AttributeError" not in ended.outputs[0]
