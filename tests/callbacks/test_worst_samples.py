"""The worst samples: against a dictionary of lists that a loop over single samples fills."""

from __future__ import annotations

import csv
import math
import re
import sys
import tracemalloc
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_persample import PerSampleGradientMonitor, PerSampleRecord, WorstSamples
from lightning_persample.callbacks.worst import SampleNorms
from lightning_persample.errors import OptionError, PerSampleWarning, UnsupportedError
from tests.callbacks.indexed_data import (
    LOADERS,
    ByHand,
    Indexed,
    Stream,
    WithNorms,
    combined,
    ranked,
    seed_all,
    train,
)
from tests.callbacks.runs import Recorder, make_trainer

INCOMPARABLE = (
    "norms change in a training: samples that were captured at different times are not comparable; every_n_steps=1, "
    "without max_samples, captures each in every epoch"
)


def assert_same(worst: WorstSamples, norms, k=10):
    rows = ranked(norms)
    assert worst.samples == len(rows)
    assert worst.times == (min(map(len, norms.values())), max(map(len, norms.values())))
    assert [row[0] for row in worst.rows()] == [row[0] for row in rows[:k]]
    for found, row in zip(worst.rows(), rows, strict=False):
        assert found[1:3] == pytest.approx(row[1:3], rel=1e-5)
        assert found[3] == row[3]
    assert len(worst) == min(k, len(rows))


@pytest.mark.parametrize("name", ["shuffled", "drawn with replacement", "names", "weighted", "2 workers"])
def test_ranking_mean_last_and_number(name):
    monitor = PerSampleGradientMonitor(1)
    module, _, _ = train(LOADERS[name], [monitor], kind=WithNorms, max_epochs=3)
    for k in (1, 10, 100):
        assert_same(monitor.worst(k), module.norms, k)


def test_norms_are_exact_under_accumulation_and_in_half_of_the_steps():
    monitor = PerSampleGradientMonitor(2)
    module, _, _ = train(LOADERS["shuffled"], [monitor], kind=WithNorms, accumulate_grad_batches=2, max_epochs=4)
    captured = monitor.worst(100)
    assert 0 < sum(captured.seen) < sum(map(len, module.norms.values()))
    for index, _, last, _, _ in captured.rows():
        assert any(last == pytest.approx(norm, rel=1e-5) for norm in module.norms[index])


def test_many_batches_leave_the_device_in_several_goes():
    monitor = PerSampleGradientMonitor(1)
    module, _, _ = train(
        lambda: DataLoader(Indexed(150), 1, shuffle=True),
        [monitor],
        kind=WithNorms,
        limit_train_batches=None,
        max_epochs=1,
    )
    assert_same(monitor.worst(150), module.norms, 150)


def test_a_second_fit_starts_anew():
    monitor = PerSampleGradientMonitor(1)
    train(LOADERS["plain"], [monitor], kind=WithNorms)
    module, _, _ = train(lambda: DataLoader(Indexed(8), 4), [monitor], kind=WithNorms)
    assert_same(monitor.worst(), module.norms)


SHOWN = {"prog_bar": True, "quantiles": (0.9,), "statistics": (), "per_layer": 1, "histogram": True, "verify": True}


@pytest.mark.parametrize(("stop", "options"), [(3, {}), (6, SHOWN), (9, {})])
def test_a_resumed_fit_goes_on(tmp_path, stop, options):
    """Whatever else is logged and shown then."""
    seed_all()
    first, module = PerSampleGradientMonitor(1), WithNorms()
    trainer = make_trainer([first], max_steps=stop, max_epochs=-1)
    trainer.fit(module, LOADERS["shuffled"]())
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    assert_same(first.worst(100), module.norms, 100)
    second, resumed = PerSampleGradientMonitor(1, **options), WithNorms()
    make_trainer([second], max_epochs=3).fit(resumed, LOADERS["shuffled"](), ckpt_path=tmp_path / "middle.ckpt")
    assert resumed.norms
    norms = {index: list(each) for index, each in module.norms.items()}
    for index, each in resumed.norms.items():
        norms.setdefault(index, []).extend(each)
    assert_same(second.worst(100), norms, 100)


def test_the_state_is_made_of_tensors_and_plain_containers(tmp_path):
    for name in ("plain", "names"):
        monitor = PerSampleGradientMonitor(1)
        train(LOADERS[name], [monitor])
        torch.save(monitor.state_dict(), tmp_path / "state.pt")
        other = PerSampleGradientMonitor(1)
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert other.worst(100) == monitor.worst(100)


class WithTest(WithNorms):
    def test_step(self, batch, batch_idx):
        pass


def test_a_checkpoint_that_is_tested_is_not_counted_twice(tmp_path):
    monitor, module = PerSampleGradientMonitor(1), WithTest()
    trainer = make_trainer([monitor], max_epochs=2)
    trainer.fit(module, LOADERS["plain"]())
    worst = monitor.worst(100)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    trainer.test(module, LOADERS["plain"](), ckpt_path=tmp_path / "end.ckpt", verbose=False)
    assert monitor.worst(100) == worst


class WithLBFGS(WithNorms):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=3)


def test_of_several_records_of_a_batch_the_last_counts():
    monitor = PerSampleGradientMonitor(1)
    module, _, _ = train(LOADERS["plain"], [monitor], kind=WithLBFGS, max_epochs=1)
    assert set(monitor.worst(100).seen) == {1}
    assert set(monitor.worst(100).index) == set(module.norms)


def test_of_a_sample_that_is_in_a_batch_twice_the_last_row_counts():
    norms = SampleNorms()
    for place, values in enumerate(([3.0, 1.0, 2.0], [1.0, math.inf, 4.0])):
        squares = torch.tensor(values).square()
        index = torch.tensor([7, 7, 2])
        norms.add(PerSampleRecord(3, {"weight": squares}, 1.0, sample_index=index), place, "")
    assert norms.worst(2).rows() == [(2, 3.0, 4.0, 2, 0), (7, pytest.approx(5 / 3), 1.0, 4, 1)]


def counted(kept: SampleNorms, batches, dtype=torch.float32):
    """A dictionary of lists of what is added: a norm for each sample, some of them not finite."""
    generator, norms = torch.Generator().manual_seed(0), {}
    for place, index in enumerate(batches):
        values = torch.rand(len(index), dtype=dtype, generator=generator) + 0.5
        values[torch.rand(len(index), generator=generator) < 0.1] = math.nan
        record = PerSampleRecord(len(index), {"weight": values.square()}, 1.0, sample_index=index)
        kept.add(record, place, "")
        keys = index.tolist() if isinstance(index, torch.Tensor) else index
        for key, norm in zip(keys, record.norms().tolist(), strict=True):
            norms.setdefault(key, []).append(norm)
    return norms


INDICES = {
    "shuffled": lambda generator: torch.randperm(40_000, generator=generator).split(64) * 2,
    "far apart": lambda generator: torch.randint(-(2**62), 2**62, (2000,), generator=generator).split(16) * 3,
    "repeated": lambda generator: torch.randint(0, 50, (4000,), generator=generator).split(32),
    "names": lambda generator: [[f"n{key}" for key in range(start, start + 5)] for start in range(0, 300, 3)],
    "ints, then names": lambda generator: [torch.arange(9), [3, "a", 11], torch.tensor([3, 12])],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", INDICES)
def test_whatever_is_drawn_gives_what_a_dictionary_gives(name, dtype):
    kept = SampleNorms()
    norms = counted(kept, INDICES[name](torch.Generator().manual_seed(1)), dtype)
    finite = {key: [norm for norm in each if math.isfinite(norm)] for key, each in norms.items()}
    restored = SampleNorms()
    restored.absorb(kept.state())
    for found in (kept.worst(2**62), restored.worst(2**62)):
        assert found.samples == len(norms)
        assert dict(found.nonfinite) == {key: n for key in norms if (n := len(norms[key]) - len(finite[key]))}
        rows = {row[0]: row[1:4] for row in found.rows()}
        assert rows.keys() == {key for key, each in finite.items() if each}
        for key, (mean, last, seen) in rows.items():
            assert mean == pytest.approx(sum(finite[key]) / len(finite[key]), rel=1e-12)
            assert (last, seen) == (finite[key][-1], len(norms[key]))
        assert list(found.mean) == sorted(found.mean, reverse=True)
        assert found.rows()[:7] == kept.worst(7).rows()


SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("samples", [100_000, pytest.param(10_000_000, marks=SLOW)])
def test_few_bytes_are_kept_for_each_sample(samples):
    index = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    size = samples // 200
    norms = torch.ones(size)
    tracemalloc.start()
    kept = SampleNorms()
    for _ in range(2):
        for place, part in enumerate(index.split(size)):
            kept.add(PerSampleRecord(size, {"weight": norms}, 1.0, sample_index=part), place, "")
    kept.settle()
    held, _ = tracemalloc.get_traced_memory()  # NumPy's arrays are in it; tensors, of batches that wait, are not
    tracemalloc.stop()
    assert 32 * samples < held < 40 * samples
    assert kept.worst(1).rows() == [(0, 1.0, 1.0, 2, 0)]
    assert kept.worst(1).samples == samples


def test_in_manual_optimization_every_backward_counts():
    monitor = PerSampleGradientMonitor(1)
    train(LOADERS["plain"], [monitor], kind=ByHand, max_epochs=1)
    assert set(monitor.worst(100).seen) == {2}


class Broken(Indexed):
    """Row 5 is not a number; row 9 is one time in two."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def __getitem__(self, key):
        inputs, index = super().__getitem__(key)
        if index == 9:
            self.asked += 1
        factor = math.nan if index == 5 or (index == 9 and self.asked % 2) else 1.0
        return inputs * factor, index


class Still(WithNorms):
    """Does not learn, so that a bad row does not spoil the weights."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)

    def on_after_backward(self):
        self.zero_grad()


def test_norms_that_are_not_finite_are_named_and_in_no_mean(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monitor = PerSampleGradientMonitor(1, worst_samples=30)
    module, _, _ = train(lambda: DataLoader(Broken(), 4), [monitor], kind=Still, max_epochs=2)
    worst = monitor.worst(100)
    assert worst.nonfinite == {5: 2, 9: 1}
    assert 5 not in worst.index
    finite = {index: [norm for norm in each if math.isfinite(norm)] for index, each in module.norms.items()}
    del finite[5]
    for index, mean, last, seen, broken in worst.rows():
        assert mean == pytest.approx(sum(finite[index]) / len(finite[index]), rel=1e-5)
        assert last == pytest.approx(finite[index][-1], rel=1e-5)
        assert (seen, broken) == ((2, 1) if index == 9 else (2, 0))
    assert worst.samples == 22
    assert str(worst).endswith("21 of 22 samples captured, 2 times each: all of the dataset\ninf or nan: 5, 9")
    assert written("worst_samples.csv")[-1] == ["5", "", "", "", "2"]


def written(path):
    with Path(path).open(newline="") as file:
        return list(csv.reader(file))


def test_the_table_is_written_only_where_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(LOADERS["plain"], [PerSampleGradientMonitor(1)])
    assert not Path("worst_samples.csv").exists()
    monitor = PerSampleGradientMonitor(1, worst_samples=3)
    train(LOADERS["plain"], [monitor], default_root_dir=tmp_path / "runs")
    header, *rows = written("runs/worst_samples.csv")
    assert header == ["index", "mean", "last", "seen", "nonfinite"]
    assert [[float(cell) for cell in row] for row in rows] == [list(row) for row in monitor.worst(3).rows()]


def test_a_table_without_samples_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.warns(PerSampleWarning, match=r"worst_samples.csv is not written: no captured sample has an index"):
        train(lambda: DataLoader(Stream(), 4), [PerSampleGradientMonitor(1, worst_samples=3)])
    assert not Path("worst_samples.csv").exists()


class Batches:
    """An iterable of batches that is no DataLoader."""

    def __iter__(self):
        return iter(DataLoader(Indexed(), 4))


@pytest.mark.parametrize(
    ("make_data", "every", "why"),
    [
        (lambda: DataLoader(Stream(), 4), 1, "the rows of a Stream have no indices"),
        (
            lambda: Batches(),
            1,
            "the training data come from a Batches, not from a DataLoader",
        ),
        (
            lambda: combined("min_size"),
            1,
            "there are several train dataloaders, and a sample is made of a row of each",
        ),
        (
            lambda: [DataLoader(Indexed(), 4), DataLoader(Indexed(), 4)],
            1,
            "there are several train dataloaders, and a sample is made of a row of each",
        ),
    ],
    ids=["stream", "no loader", "several", "a list"],
)
def test_without_an_index_the_error_says_why(make_data, every, why):
    monitor = PerSampleGradientMonitor(every)
    train(make_data, [monitor])
    with pytest.raises(UnsupportedError) as error:
        monitor.worst()
    assert str(error.value) == (
        f"no captured sample has an index in the dataset: {why}; pass sample_index=<function of the batch that returns "
        "the index of each sample> to the callback if the data carry it"
    )


@pytest.mark.parametrize("every", [100, None])
def test_where_no_step_was_due_it_is_said_once_and_why(every, tmp_path):
    monitor, other = PerSampleGradientMonitor(every, prefix="own"), PerSampleGradientMonitor(1)
    with pytest.raises(UnsupportedError, match=r"^no step was captured: this callback was in no fit; where a library"):
        monitor.worst()
    trainer = make_trainer([monitor, other], max_epochs=2, log_every_n_steps=50, accumulate_grad_batches=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PerSampleWarning)
        trainer.fit(WithNorms(), DataLoader(Indexed(32), 2))
    name = "the Trainer's log_every_n_steps is 50" if every is None else "every_n_steps is 100"
    why = f"the fit had 16 optimizer steps, and {name}; every_n_steps=1 captures all of them"
    texts = [str(each.message) for each in caught if each.category is PerSampleWarning]
    assert texts == [f"`own` has logged nothing: {why}"]
    with pytest.raises(UnsupportedError, match=rf"^no step was captured: {re.escape(why)}$"):
        monitor.worst()
    assert len(other.worst(100)) == 32


class WithAnEnd(Recorder):
    """Has a hook of its own at the end, without super()."""

    def on_train_end(self, trainer, pl_module):
        self.has_ended = True


@pytest.mark.parametrize("make", [Recorder, WithAnEnd])
def test_a_callback_that_got_no_record_says_so(make):
    callback = make()
    with pytest.warns(PerSampleWarning) as caught:
        make_trainer([callback], log_every_n_steps=50).fit(WithNorms(), DataLoader(Indexed(32), 2))
    assert [str(each.message) for each in caught if each.category is PerSampleWarning] == [
        f"{make.__name__} got no record: the fit had 16 optimizer steps, and the Trainer's log_every_n_steps is 50; "
        "every_n_steps=1 captures all of them"
    ]
    assert callback.records == []
    assert make is Recorder or callback.has_ended
    for settings in ({"log_every_n_steps": 0}, {"fast_dev_run": 3, "log_every_n_steps": 50}, {"log_every_n_steps": 16}):
        make_trainer([make()], **settings).fit(WithNorms(), DataLoader(Indexed(32), 2))


@pytest.mark.parametrize(
    ("every", "options", "footer"),
    [
        (1, {}, "3 of 22 samples captured, 4 times each: all of the dataset"),
        (None, {}, "3 of 22 samples captured, 4 times each: all of the dataset"),  # log_every_n_steps=1
        (5, {}, "3 of 16 samples captured, once each; 6 of the dataset never\n" + INCOMPARABLE),
        (4, {}, "3 of 10 samples captured, 2 times each; 12 of the dataset never\n" + INCOMPARABLE),
        (1, {"sample_index": lambda batch: batch[1] + 100}, "3 of 22 samples captured, 4 times each"),
        (1, {"max_samples": 4}, "3 of 22 samples captured, 4 times each: all of the dataset\n" + INCOMPARABLE),
    ],
)
def test_the_table_says_how_often_samples_were_captured_and_which_compare(every, options, footer, tmp_path):
    """Of 22 samples in 6 batches an epoch, in the order of the dataset."""
    monitor = PerSampleGradientMonitor(every, worst_samples=3, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PerSampleWarning)
        train(
            lambda: DataLoader(Indexed(22), 4), [monitor], max_epochs=4, log_every_n_steps=1, default_root_dir=tmp_path
        )
    assert str(monitor.worst(3)).partition("\n3 of ")[1:] == ("\n3 of ", footer.removeprefix("3 of "))
    said = [str(each.message) for each in caught if "worst_samples.csv" in str(each.message)]
    expected = f"worst_samples.csv has {footer.replace(chr(10), '; ')}"
    assert said == ([expected] if INCOMPARABLE in footer else [])
    seen = monitor.worst(100).seen
    assert monitor.worst(1).times == (min(seen), max(seen))
    other = PerSampleGradientMonitor(every)
    other.load_state_dict(monitor.state_dict())
    assert other.worst(3) == monitor.worst(3)


class Unmeasured(Indexed):
    """Has no length outside of the loader."""

    def __len__(self):
        raise NotImplementedError


def test_a_dataset_without_a_length_is_captured_all_the_same():
    monitor = PerSampleGradientMonitor(1)
    train(lambda: DataLoader(Unmeasured(), 4, sampler=range(22)), [monitor], max_epochs=2)
    assert str(monitor.worst(3)).endswith("3 of 22 samples captured, 2 times each")


def test_a_dry_run_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monitor = PerSampleGradientMonitor(1, worst_samples=3, report=True)
    train(LOADERS["plain"], [monitor], fast_dev_run=2, logger=False)
    assert len(monitor.worst(3)) == 3
    assert [*tmp_path.rglob("*")] == []


def test_labels_are_columns_of_the_table(tmp_path):
    labels = {"label": torch.arange(22) % 3, "kind": lambda index: f"kind {index}", "note": {}}
    monitor = PerSampleGradientMonitor(1, worst_samples=3, labels=labels, render=lambda index: f"sample {index}")
    train(lambda: DataLoader(Indexed(22), 4), [monitor], default_root_dir=tmp_path)
    header, *rows = written(tmp_path / "worst_samples.csv")
    assert header == ["index", "mean", "last", "seen", "nonfinite", "label", "kind", "note", "sample"]
    index = monitor.worst(3).index
    assert [row[5:] for row in rows] == [[str(i % 3), f"kind {i}", "", f"sample {i}"] for i in index]


def test_how_many_must_be_a_number():
    with pytest.raises(OptionError, match=r"k=0 is not allowed: k must be an int >= 1"):
        PerSampleGradientMonitor().worst(0)


WORST = WorstSamples((7, 12), (2.5, 0.125), (12345.678, 0.1), (3, 12), {7: 1, 3: 2}, 40, (1, 12), 1040, False)


def test_it_prints_as_a_table():
    assert str(WORST) == (
        "index   mean       last  seen\n"
        "    7    2.5  1.235e+04     3\n"
        "   12  0.125        0.1    12\n"
        "2 of 40 samples captured, 1 to 12 times each; 1,000 of the dataset never\n"
        f"{INCOMPARABLE}\n"
        "inf or nan: 7, 3"
    )
    many = WorstSamples((), (), (), (), dict.fromkeys(range(12), 1), 12, (1, 1), None, True)
    assert "\n0 of 12 samples captured, once each\n" in str(many)
    assert str(many).endswith("inf or nan: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more")


def test_it_becomes_a_data_frame():
    pytest.importorskip("pandas")
    frame = WORST.to_pandas()
    assert list(frame.columns) == ["index", "mean", "last", "seen", "nonfinite"]
    assert frame.values.tolist() == [[7, 2.5, 12345.678, 3, 1], [12, 0.125, 0.1, 12, 0]]


def test_without_pandas_the_import_error_is_pythons_own(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pandas"):
        WORST.to_pandas()
