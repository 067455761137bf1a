"""A collection that goes on where it was interrupted, another store in the folder, and several processes."""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader, SubsetRandomSampler

from lightning_persample import (
    EigenProjection,
    OptionError,
    PerSampleError,
    PerSampleWarning,
    Projection,
    UnsupportedError,
    collect_gradients,
)
from lightning_persample.influence import GradientStore
from tests.callbacks.collect_runs import COUNT, Net, Rows, Stream, joined, loader, loop, stored
from tests.callbacks.runs import make_trainer
from tests.in_turn import in_turn
from tests.processes import run_ranks, saved_by_ranks

FULL = {"projection": None, "dtype": "float64"}
SOURCES = [Net(seed).state_dict() for seed in (3, 4)]


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def assert_whole(store, sources=SOURCES):
    """Each sample once at each checkpoint, with the values of the loop."""
    assert len(store) == COUNT * len(sources)
    for place, weights in enumerate(sources):
        assert_equal(stored(store, place), joined(loop(Net(), Rows(), weights=weights)))


@contextmanager
def warns_of_kept(kept, of):
    """One warning, at the line of the user's call."""
    text = f"holds {kept} of the {of} rows already, which are kept; the data.* are not compared .* or overwrite=True"
    with pytest.warns(PerSampleWarning, match=text) as told:
        yield
    assert [each.filename for each in told] == [__file__]


class StopsAt:
    """A loss that fails when it has been asked so many times."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.sizes: list[int] = []

    def __call__(self, module, batch):
        if len(self.sizes) == self.times:
            raise KeyError("stopped")
        self.sizes.append(len(batch[0]))
        return F.cross_entropy(module(batch[0]), batch[1])


@pytest.mark.parametrize(("times", "rows_per_shard"), in_turn([0, 1, 4, 6, 9], [3, None]))
def test_an_interrupted_collection_goes_on(times, rows_per_shard, tmp_path):
    options = {"checkpoints": SOURCES, "rows_per_shard": rows_per_shard, **FULL}
    with pytest.raises(KeyError, match="stopped"):
        collect_gradients(Net(), loader(), tmp_path, loss=StopsAt(times), **options)
    done = len(GradientStore(tmp_path, partial=True))
    assert done == (4 * times if times <= 5 else 4 * times - 2)
    with pytest.raises(
        PerSampleError, match=f"lacks {2 * COUNT - done} of {2 * COUNT} rows: its collection was broken off"
    ):
        GradientStore(tmp_path)
    data, rest = loader(), StopsAt(-1)
    with warns_of_kept(done, 2 * COUNT) if done else nullcontext():
        store = collect_gradients(Net(), data, tmp_path, loss=rest, **options)
    assert sum(rest.sizes) == 2 * COUNT - done
    assert len(data.dataset.asked) == 2 * COUNT - done
    assert_whole(store)
    again = StopsAt(0)
    with warns_of_kept(2 * COUNT, 2 * COUNT):
        assert len(collect_gradients(Net(), loader(), tmp_path, loss=again, **options)) == 2 * COUNT
    assert again.sizes == []


def test_what_a_killed_process_left_in_part_is_made_anew(tmp_path):
    options = {"checkpoints": SOURCES, "rows_per_shard": 3, **FULL}
    store = collect_gradients(Net(), loader(), tmp_path, **options)
    names = sorted(path.name for path in tmp_path.iterdir() if path.name.endswith(".npy"))
    (tmp_path / names[2]).unlink()
    (tmp_path / ".shard-00000-000099.npy.tmp").write_bytes(b"in part")
    assert len(GradientStore(tmp_path, partial=True)) == len(store) - 3
    with warns_of_kept(2 * COUNT - 3, 2 * COUNT):
        assert_whole(collect_gradients(Net(), loader(), tmp_path, **options))
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def test_the_folder_of_a_collection_that_goes_on_is_refused(tmp_path):
    def collects(module, batch):
        with pytest.raises(OptionError, match="is being written to by another fit or collection"):
            collect_gradients(Net(), loader(), tmp_path, overwrite=True, **FULL)
        return F.cross_entropy(module(batch[0]), batch[1])

    assert len(collect_gradients(Net(), loader(), tmp_path, loss=collects, **FULL)) == COUNT
    assert not [*tmp_path.glob("*.lock")]


def test_more_checkpoints_are_added(tmp_path):
    collect_gradients(Net(), loader(), tmp_path, checkpoints=SOURCES[:1], **FULL)
    data = loader()
    with warns_of_kept(COUNT, 2 * COUNT):
        store = collect_gradients(Net(), data, tmp_path, checkpoints=SOURCES, **FULL)
    assert len(data.dataset.asked) == COUNT
    assert_whole(store)
    with warns_of_kept(COUNT, COUNT):
        collect_gradients(Net(), loader(), tmp_path, checkpoints=SOURCES[:1], **FULL)
    with warns_of_kept(4, 4):
        collect_gradients(
            Net(), loader(sampler=SubsetRandomSampler([7, 3, 1, 5])), tmp_path, checkpoints=SOURCES[:1], **FULL
        )


def test_batches_whose_samples_are_partly_there(tmp_path):
    asked = []

    def loss(module, batch):
        asked.append(batch[2].tolist())
        if len(asked) == 2:
            raise KeyError("stopped")
        return F.cross_entropy(module(batch[0]), batch[1])

    options = {"sample_index": lambda batch: batch[2], "loss": loss, **FULL}
    with pytest.raises(KeyError):
        collect_gradients(Net(), DataLoader(Stream(), 3), tmp_path, **options)
    assert len(GradientStore(tmp_path, partial=True)) == 3
    with pytest.warns(PerSampleWarning, match="holds 3 rows already, .*; the data, loss .* are not compared"):
        store = collect_gradients(Net(), DataLoader(Stream(), 4), tmp_path, **options)
    assert asked[2] == [100, 101, 102, 103]
    assert store.rows["sample_index"].tolist() == list(range(100, 110))
    assert_equal(stored(store), joined(loop(Net(), Rows()))[:10])


@pytest.mark.parametrize(
    ("changed", "before", "now"),
    [
        ({"projection": Projection(dim=9)}, "projection=None", "projection={'dim': 9, 'kind': 'normal', 'seed': 0}"),
        ({"dtype": "float16"}, "dtype='float64'", "dtype='float16'"),
        ({"columns": {"one": lambda *_: 1}}, r"columns=\(\)", r"columns=\('one',\)"),
        ({"parameters": ["last.bias"]}, "6 parameters, .*'first.weight' .*", "1 parameters, .*'last.bias' .*"),
        ({"dataloader": loader(9)}, f"samples={COUNT}", "samples=9"),
        ({"loss_reduction": "sum"}, "loss_reduction='mean'", "loss_reduction='sum'"),
        ({"loss": StopsAt(9)}, "loss=None", "loss='.*test_collect_again.StopsAt'"),
        ({"direction": "adam"}, "direction=None", "direction='adam'"),
        ({"checkpoints": SOURCES[1:]}, "checkpoint 0 {.*'weights': '.*'}", "checkpoint 0 {.*'weights': '.*'}"),
    ],
)
def test_another_store_is_refused_with_both_values(changed, before, now, tmp_path):
    options = {"dataloader": loader(), "checkpoints": SOURCES[:1], **FULL}
    collect_gradients(Net(), dirpath=tmp_path, **options)
    there = {path: path.read_bytes() for path in tmp_path.iterdir()}
    loaders = dict(vars(DataLoader))
    with pytest.raises(OptionError, match=f"holds gradients that were written with {before}, but now there is {now}: "):
        collect_gradients(Net(), dirpath=tmp_path, **{**options, **changed})
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == there
    assert dict(vars(DataLoader)) == loaders  # an error in a hook that Lightning asks for data would change it
    if not {"direction", "columns", "loss_reduction"} & set(changed):
        store = collect_gradients(Net(), dirpath=tmp_path, overwrite=True, **{**options, **changed})
        assert set(store.rows["sample_index"]) == set(range(len(changed.get("dataloader", loader()).dataset)))


def test_a_checkpoint_that_was_moved_is_the_same(tmp_path):
    torch.save(SOURCES[0], tmp_path / "old.ckpt")
    options = {"dirpath": tmp_path / "store", **FULL}
    collect_gradients(Net(), loader(), checkpoints=[tmp_path / "old.ckpt"], **options)
    (tmp_path / "old.ckpt").rename(tmp_path / "new.ckpt")
    with warns_of_kept(COUNT, 2 * COUNT):
        store = collect_gradients(Net(), loader(), checkpoints=[tmp_path / "new.ckpt", SOURCES[1]], **options)
    assert_whole(store)
    torch.save(SOURCES[1], tmp_path / "new.ckpt")
    with pytest.raises(OptionError, match="written with checkpoint 0 "):
        collect_gradients(Net(), loader(), checkpoints=[tmp_path / "new.ckpt"], **options)


def test_a_folder_of_another_kind_is_refused(tmp_path):
    (tmp_path / "_manifest.json").write_text('{"format": "ledger"}')
    with pytest.raises(PerSampleError, match="manifest"):
        collect_gradients(Net(), loader(), tmp_path, **FULL)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot hold gradients: "):
        collect_gradients(Net(), loader(), tmp_path / "file", **FULL)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    collect_gradients(Net(), loader(), folder / "again", checkpoints=SOURCES[:1], **FULL)
    with pytest.raises(KeyError):
        collect_gradients(Net(), loader(), folder / "half", loss=StopsAt(7), checkpoints=SOURCES, **FULL)
    ended = run_ranks("tests.callbacks.collect_runs", str(folder), timeout=100)
    return folder, saved_by_ranks(ended, folder)


def test_two_processes_give_the_store_of_one(ranks):
    folder, saved = ranks
    found = saved("new")
    assert sorted(found[0]["asked"] + found[1]["asked"]) == sorted([*range(COUNT)] * 2)
    assert found[0]["asked"][:3] == [0, 2, 4]
    assert [each["rows"] for each in found] == [2 * COUNT] * 2
    assert_whole(GradientStore(folder / "new"))


def test_two_processes_go_on_with_the_store_of_one(ranks):
    folder, saved = ranks
    found = saved("again")
    assert sorted(found[0]["asked"] + found[1]["asked"]) == list(range(COUNT))
    assert_whole(GradientStore(folder / "again"))


def test_what_cannot_be_split_is_refused_by_both(ranks):
    texts = ranks[1]("refused")
    expected = "the samples cannot be split among 2 processes, because the rows of a Stream have no indices: pass a Dat"
    assert [text.startswith(expected) for text in texts] == [True, True]


def test_two_processes_fit_the_projection_of_one(ranks):
    found, expected = ranks[1]("eigen"), EigenProjection.fit(Net(), loader(), 9).bases
    for name, basis in expected.items():
        for place, one in enumerate(basis):
            first, second = (each[name][place] for each in found)
            assert torch.equal(first, second)
            torch.testing.assert_close(first.T @ first, one.T @ one, rtol=1e-7, atol=1e-7)


def test_two_processes_keep_the_gradients_of_a_fit(ranks):
    folder, saved = ranks
    saved("fit")
    store = GradientStore(folder / "ledger" / "_gradients")
    assert store.rows["weight"].tolist() == [0.1] * 20
    assert sorted(store.rows["sample_index"].tolist()) == list(range(20))
    first = store.select(store.rows["step"] == 0)
    assert sorted(store.rows["step"].tolist()) == [0] * 10 + [1] * 10
    index = torch.as_tensor(first.rows["sample_index"])
    values = torch.cat([block for _, block in first.blocks()])
    assert_equal(values, joined(loop(Net(), Rows(20)))[index])


def test_one_of_several_processes_needs_a_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="trainer=None takes one device, but there are 2 processes, and each would"):
        collect_gradients(Net(), loader(), tmp_path, **FULL)
    assert os.listdir(tmp_path) == []


def test_a_strategy_that_shards_is_refused(tmp_path):
    trainer = make_trainer(strategy=ModelParallelStrategy(), devices=1)
    with pytest.raises(UnsupportedError, match="ModelParallelStrategy: gradients are collected on one device, or und"):
        collect_gradients(Net(), loader(), tmp_path, trainer=trainer)
    assert os.listdir(tmp_path) == []
