"""What every score of two stores has in common: which rows go together, little memory, stored types, dask."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace

import numpy
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_persample import OptionError, PerSampleError, UnsupportedError
from lightning_persample.influence import (
    TopScores,
    grad_cos,
    grad_dot,
    less,
    linear_datamodeling_score,
    logra,
    tracin,
    tracin_cp,
    trak,
)
from tests.in_turn import in_turn
from tests.influence.loops import simple, store_of


def less_of(train, test, **options):
    """LESS of training rows that are said to be Adam's directions."""
    directions = copy.copy(train)
    directions.manifest = replace(train.manifest, settings={"direction": "adam"})
    return less(directions, test, **options)


SHAPES = {"a": (4, 3), "b": (5,), "c": (3,)}
SCORES = {
    "grad_dot": grad_dot,
    "grad_cos": grad_cos,
    "tracin": tracin,
    "tracin_cp": tracin_cp,
    "trak": lambda train, test, **options: trak(train, test, 0.1, **options),
    "logra": logra,
    "less": less_of,
}
OF_ONE = {"grad_dot", "grad_cos", "logra"}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """30 training and 16 test samples of 20 columns at two checkpoints, in no order and shards of 7, by stored type."""
    generator = torch.Generator().manual_seed(0)
    checkpoints = [{"step": 10, "learning_rate": 0.5}, {"step": 20, "learning_rate": 0.1}]
    found = {}
    sides = {"train": 30, "test": 16}
    parts = {
        side: [
            (
                torch.randn(count, 20, generator=generator, dtype=torch.float64),
                {
                    "sample_index": 3 * torch.randperm(count, generator=generator),
                    "checkpoint": number,
                    "step": described["step"],
                    "learning_rate": described["learning_rate"],
                    "weight": 0.25,
                    "one_minus_p": torch.rand(count, generator=generator),
                },
            )
            for number, described in enumerate(checkpoints)
        ]
        for side, count in sides.items()
    }
    for dtype in ("float16", "float32", "float64"):
        folder = tmp_path_factory.mktemp(dtype)
        options = {"shapes": SHAPES, "checkpoints": checkpoints, "columns": ("one_minus_p",), "rows_per_shard": 7}
        found[dtype] = tuple(store_of(folder / side, parts[side], dtype=dtype, **options) for side in sides)
    return found


def scored(name, stores, **options):
    train, test = stores
    if name in OF_ONE:
        train, test = train.at(1), test.at(1)
    return SCORES[name](train, test, **options)


@pytest.mark.parametrize(("name", "dtype", "max_memory"), in_turn(SCORES, ["float16", "float64"], [4000, 20_000]))
def test_little_memory_gives_the_same_numbers(stores, name, dtype, max_memory):
    unlimited = scored(name, stores[dtype])
    found = scored(name, stores[dtype], max_memory=max_memory)
    torch.testing.assert_close(found.scores, unlimited.scores, rtol=1e-12, atol=1e-13)
    assert (found.train_index, found.test_index) == (tuple(range(0, 90, 3)), tuple(range(0, 48, 3)))


class LiveBytes(TorchDispatchMode):
    """The largest size of all tensors together that were there at any operation."""

    def __init__(self):
        super().__init__()
        self.sizes, self.largest = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, found)):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.sizes[StorageWeakRef(storage)] = storage.nbytes()
        self.sizes = {storage: size for storage, size in self.sizes.items() if not storage.expired()}
        self.largest = max(self.largest, sum(self.sizes.values()))
        return found


@pytest.mark.parametrize(("name", "dtype"), in_turn(SCORES, ["float16", "float64"]))
def test_what_is_held_at_a_time_is_within_the_memory(tmp_path, name, dtype):
    """Two stores of 96 kB in float64, of which 60 kB are held, besides scores, indices and matrices."""
    shapes = {f"layer.{i}": (40,) for i in range(5)}
    rows = {"step": 5, "learning_rate": 0.5, "weight": 0.5, "one_minus_p": 0.5}
    generator = torch.Generator().manual_seed(0)
    stores = [
        store_of(
            tmp_path / side,
            [(torch.randn(60, 200, generator=generator), {"sample_index": torch.arange(60), **rows})],
            shapes=shapes,
            columns=("one_minus_p",),
            dtype=dtype,
            rows_per_shard=30,
        )
        for side in ("train", "test")
    ]
    limit = 60_000
    live = LiveBytes()
    with live:
        found = SCORES[name](*stores, max_memory=limit)
    aside = found.scores.nbytes + 8 * 60 * 8  # indices and factors
    aside += 2 * 200 * 200 * 8 if name == "trak" else 0
    assert live.largest <= limit + aside
    unlimited = LiveBytes()
    with unlimited:
        expected = SCORES[name](*stores)
    assert unlimited.largest > limit + aside
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-10, atol=1e-12)


def test_products_of_blocks_of_many_rows_are_within_the_memory(tmp_path):
    """Two columns: blocks have 138 rows, whose products are larger than the blocks are."""
    values = torch.randn(300, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    store = simple(tmp_path / "store", values, rows_per_shard=300)
    live = LiveBytes()
    with live:
        found = grad_dot(store, store, max_memory=20_000)
    assert live.largest <= 20_000 + found.scores.nbytes + 8 * 300 * 8
    expected = torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(found.scores, expected @ expected.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SCORES)
def test_too_little_memory_is_refused_with_what_is_needed(stores, name):
    few = [each.select(numpy.flatnonzero(each.rows["sample_index"] < 30)) for each in stores["float64"]]
    with pytest.raises(OptionError, match=r"max_memory=300 is too little for rows of \d+ columns") as refused:
        scored(name, few, max_memory=300)
    needed = int(re.search(r": (\d+) bytes are needed$", str(refused.value))[1])
    assert needed == (6 * 12 * 24 if name == "logra" else 3 * 20 * 24)
    torch.testing.assert_close(scored(name, few, max_memory=needed).scores, scored(name, few).scores)


@pytest.mark.parametrize("name", SCORES)
def test_other_stored_types_are_as_near_as_they_hold(stores, name):
    exact = scored(name, stores["float64"]).scores
    largest = exact.abs().max()
    for dtype, bound in (("float32", 1e-6), ("float16", 3e-3)):
        assert (scored(name, stores[dtype]).scores - exact).abs().max() < bound * largest


def test_the_dask_form_gives_the_same_numbers(stores):
    pytest.importorskip("dask.array")
    train, test = stores["float32"]
    products = []
    for number, rate in enumerate((0.5, 0.1)):
        one, other = train.at(number), test.at(number)
        product = one.to_dask(max_memory=2000).astype("float64") @ other.to_dask(max_memory=2000).astype("float64").T
        order = one.rows["sample_index"].argsort(), other.rows["sample_index"].argsort()
        found = torch.from_numpy(product.compute(scheduler="synchronous"))[order[0]][:, order[1]]
        torch.testing.assert_close(found, grad_dot(one, other).scores, rtol=1e-12, atol=1e-12)
        products.append(rate * found)
    torch.testing.assert_close(sum(products), tracin_cp(train, test).scores, rtol=1e-12, atol=1e-12)


def pair(tmp_path, train=None, test=None, **options):
    values = torch.ones(2, 2, dtype=torch.float64)
    sides = {"train": train or {}, "test": test or {}}
    return tuple(
        store_of(tmp_path / side, [(values, {"sample_index": [0, 1], **rows})], **options)
        for side, rows in sides.items()
    )


@pytest.mark.parametrize("score", [grad_dot, grad_cos, tracin_cp, logra, less_of])
def test_other_checkpoints_are_refused_with_both(tmp_path, score):
    train = simple(tmp_path / "train", [[1.0]], checkpoints=[{"step": 5, "learning_rate": 1.0}])
    test = simple(tmp_path / "test", [[1.0]], checkpoints=[{"step": 6, "learning_rate": 1.0}])
    text = r"the train store has the checkpoints step 5, the test store step 6: gradients at other weights"
    with pytest.raises(PerSampleError, match=text):
        score(train, test)


def test_checkpoints_of_one_step_are_told_apart_by_their_path(tmp_path):
    def described(*paths):
        return [{"step": 5, "learning_rate": 1.0, "path": path} for path in paths]

    def part(number, value):
        return torch.tensor([[value]], dtype=torch.float64), {"sample_index": [0], "checkpoint": number}

    train = store_of(tmp_path / "train", [part(0, 1.0), part(1, 10.0)], checkpoints=described("a.ckpt", "b.ckpt"))
    test = store_of(tmp_path / "test", [part(0, 2.0), part(1, 3.0)], checkpoints=described("b.ckpt", "a.ckpt"))
    assert tracin_cp(train, test).scores.item() == 1 * 3 + 10 * 2
    other = store_of(tmp_path / "other", [part(0, 2.0), part(1, 3.0)], checkpoints=described("b.ckpt", "c.ckpt"))
    with pytest.raises(PerSampleError, match=r"step 5 \(a.ckpt\), step 5 \(b.ckpt\), the test store step 5"):
        tracin_cp(train, other)
    alike = store_of(tmp_path / "alike", [part(0, 2.0), part(1, 3.0)], checkpoints=described(None, None))
    with pytest.raises(PerSampleError, match=r"two checkpoints step 5 \(no path\), which nothing tells apart: take"):
        tracin_cp(alike, alike)


def test_checkpoints_of_unknown_step_are_compared_by_path(tmp_path):
    train, test, other = (
        simple(tmp_path / name, [[1.0]], checkpoints=[{"path": path}]) for name, path in zip("xyz", "aab", strict=True)
    )
    assert grad_dot(train, test).scores.tolist() == [[1.0]]
    with pytest.raises(PerSampleError, match=r"an unknown step \(a\), the test store an unknown step \(b\)"):
        grad_dot(train, other)


def test_another_projection_is_refused_with_both(tmp_path):
    train = simple(tmp_path / "train", [[1.0]], projection={"dim": 8, "kind": "normal", "seed": 0})
    test = simple(tmp_path / "test", [[1.0]], projection={"dim": 8, "kind": "normal", "seed": 1})
    for name in ("grad_dot", "tracin_cp", "tracin", "logra", "less"):
        with pytest.raises(PerSampleError, match=r"cannot be compared: .*'seed': 0.*'seed': 1"):
            SCORES[name](train, test)


def test_other_parameters_are_refused_with_both(tmp_path):
    train = simple(tmp_path / "train", [[1.0, 2.0]], shapes={"weight": (1,), "bias": (1,)})
    test = simple(tmp_path / "test", [[1.0]], shapes={"weight": (1,)})
    with pytest.raises(PerSampleError, match=r"2 parameters, where they differ first 'bias' .*1 parameters and no"):
        grad_dot(train, test)
    assert grad_dot(train.parameters(["weight"]), test).scores.tolist() == [[1.0]]


@pytest.mark.parametrize("side", ["train", "test"])
def test_two_rows_of_a_sample_at_a_checkpoint_are_refused(tmp_path, side):
    train, test = pair(tmp_path, **{side: {"sample_index": [4, 4]}})
    text = rf"sample 4 has 2 rows at step 5 of the {side} store, and one is wanted: take the first of each with (.*); t"
    for name in ("grad_dot", "grad_cos", "tracin_cp", "logra", "less"):
        with pytest.raises(PerSampleError, match=text) as error:
            SCORES[name](train, test)
    stores = {"train": train, "test": test}
    part = eval(re.search(text, str(error.value))[1], {"numpy": numpy, **stores})
    assert len(part) == 1
    assert grad_dot(**{**stores, side: part}).scores.shape == ((1, 2) if side == "train" else (2, 1))


def test_two_rows_of_a_test_sample_at_a_step_are_refused_by_tracin(tmp_path):
    train, test = pair(
        tmp_path,
        train={"step": 3, "weight": 1.0, "learning_rate": 1.0, "sample_index": [4, 4]},
        test={"step": 3, "sample_index": [4, 4]},
    )
    with pytest.raises(PerSampleError, match="sample 4 has 2 rows at step 3 of the test store"):
        tracin(train, test)


def test_a_sample_without_a_row_at_a_checkpoint_is_refused(stores):
    train, test = stores["float64"]
    short = train.select(~((train.rows["checkpoint"] == 1) & (train.rows["sample_index"] < 9)))
    text = (
        "3 of the train store's 30 samples have no row at step 20, the first of them sample 0: collect the rest, or "
        "leave the samples out with (.*)$"
    )
    for name in ("tracin_cp", "trak", "less"):
        with pytest.raises(PerSampleError, match=text) as error:
            SCORES[name](short, test)
    part = eval(re.search(text, str(error.value))[1], {"numpy": numpy, "train": short})
    assert len(tracin_cp(part, test).train_index) == 27


@pytest.mark.parametrize(("name", "remedy"), [("grad_dot", "tracin_cp"), ("grad_cos", "tracin_cp"), ("logra", "last")])
def test_several_checkpoints_are_refused_where_one_counts(stores, name, remedy):
    text = rf"the stores have 2 checkpoints, step 10, step 20: take {name}\(train.at\(checkpoint\), .*{remedy}"
    with pytest.raises(OptionError, match=text):
        SCORES[name](*stores["float64"])


@pytest.mark.parametrize("side", ["train", "test"])
def test_an_empty_store_is_refused(stores, side):
    pair = dict(zip(("train", "test"), stores["float64"], strict=True))
    pair[side] = pair[side].select([])
    for score in SCORES.values():
        with pytest.raises(PerSampleError, match=f"the {side} store has no rows"):
            score(*pair.values())


@pytest.mark.parametrize("side", ["train", "test"])
def test_rows_without_an_index_are_counted_and_refused_if_all_are(tmp_path, side):
    train, test = pair(tmp_path, **{side: {"sample_index": [6, -1]}})
    found = grad_dot(train, test)
    assert found.unknown == 1
    assert (found.train_index if side == "train" else found.test_index) == (6,)
    assert found.scores.flatten().tolist() == [2.0, 2.0]
    (tmp_path / "all").mkdir()
    train, test = pair(tmp_path / "all", **{side: {"sample_index": [-1, -1]}})
    with pytest.raises(UnsupportedError, match=f"no row of the {side} store has a sample_index, so that nothing"):
        grad_dot(train, test)


@pytest.mark.parametrize("name", SCORES)
def test_a_row_that_is_not_finite_makes_its_own_scores_nan_alone(tmp_path, stores, name):
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sides = {}
    for side, place, broken in (("train", 3, math.nan), ("test", 1, math.inf)):
        own = values.clone()
        own[place, 1] = broken
        rows = {"step": 5, "learning_rate": 0.5, "weight": 0.5, "one_minus_p": 0.5, "sample_index": torch.arange(5)}
        sides[side] = store_of(tmp_path / side, [(own, rows)], columns=("one_minus_p",))
    found = SCORES[name](*sides.values())
    expected = torch.zeros(5, 5, dtype=torch.bool)
    expected[3] = expected[:, 1] = True
    assert torch.equal(found.scores.isnan(), expected)
    assert found.nonfinite == 2


def place_of(found, name):
    """The largest and smallest scores of each test sample, as the whole matrix gives them."""
    return [found.top(5, test=test) if name == "top" else found.bottom(5, test=test) for test in found.test_index]


@pytest.mark.parametrize(("name", "max_memory"), in_turn(SCORES, [None, 6000, 20_000]))
def test_the_largest_are_those_of_the_whole_matrix(stores, name, max_memory):
    whole = scored(name, stores["float64"])
    found = scored(name, stores["float64"], top=5, max_memory=max_memory)
    assert isinstance(found, TopScores)
    assert (found.name, found.train_index, found.test_index) == (whole.name, whole.train_index, whole.test_index)
    for kind in ("top", "bottom"):
        for one, other in zip(place_of(found, kind), place_of(whole, kind), strict=True):
            assert [index for index, _ in one] == [index for index, _ in other]
            assert [score for _, score in one] == pytest.approx([score for _, score in other], rel=1e-11, abs=1e-12)
    torch.testing.assert_close(found.mean().scores, whole.mean().scores, rtol=1e-11, atol=1e-12)
    assert [index for index, _ in found.top(7)] == [index for index, _ in whole.top(7)]
    assert str(found) == str(whole)


@pytest.mark.parametrize(("name", "max_memory"), in_turn(SCORES, [None, 6000, 20_000]))
def test_groups_are_the_means_over_their_test_samples(stores, name, max_memory):
    whole = scored(name, stores["float64"])
    groups = {index: "abc"[place % 3] for place, index in enumerate(whole.test_index)}
    expected = whole.by_group(groups)
    found = scored(name, stores["float64"], groups=groups, max_memory=max_memory)
    assert found.test_index == expected.test_index == ("a", "b", "c")
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-10, atol=1e-12)
    kept = scored(name, stores["float64"], groups=list(groups.values()), top=numpy.int64(5), max_memory=max_memory)
    assert isinstance(kept, TopScores)
    for kind in ("top", "bottom"):
        for one, other in zip(place_of(kept, kind), place_of(expected, kind), strict=True):
            assert [index for index, _ in one] == [index for index, _ in other]
            assert [score for _, score in one] == pytest.approx([score for _, score in other], rel=1e-10, abs=1e-12)
    torch.testing.assert_close(kept.mean().scores, expected.mean().scores, rtol=1e-10, atol=1e-12)
    assert kept.top(numpy.int32(2), test="b") == kept.top(2, test="b")
    with pytest.raises(OptionError, match=r"^groups has 1 entries; allowed is one for each of the"):
        scored(name, stores["float64"], groups=["a"])


@pytest.mark.parametrize("top", [None, 5])
@pytest.mark.parametrize("name", SCORES)
def test_float32_is_as_near_as_it_holds(stores, name, top):
    exact = scored(name, stores["float64"], top=top).scores
    found = scored(name, stores["float64"], top=top, dtype=torch.float32).scores
    assert (exact.dtype, found.dtype) == (torch.float64, torch.float32)
    assert 0 < (found - exact).abs().max() < 2e-5 * exact.abs().max()


def test_ties_and_numbers_that_are_none(tmp_path):
    """Scores 1, 0, 0, nan, -1, 0, 2 with the first test sample, twice as large with the second, nan with the third."""
    values = [[1.0], [0.0], [0.0], [math.nan], [-1.0], [0.0], [2.0]]
    train, test = simple(tmp_path / "train", values), simple(tmp_path / "test", [[1.0], [2.0], [math.nan]])
    for k in (2, 3, 5, 6, 7, 100):
        for max_memory in (None, 3 * 24, 200):  # one row, and a few, at a time
            found = grad_dot(train, test, top=k, max_memory=max_memory)
            whole = grad_dot(train, test)
            kept = min(k, 7)
            assert found.scores.shape == found.least_places.shape == (kept, 3)
            for index in (0, 1):
                assert found.top(kept, test=index) == whole.top(kept, test=index)
                assert found.bottom(kept, test=index) == whole.bottom(kept, test=index)
            assert found.top(1, test=2) == found.bottom(kept, test=2) == []
            assert found.scores[6:, 0].isnan().all()
            assert (found.places[:, 2] == -1).all()
            assert found.mean().scores.isnan().all()
            assert (found.nonfinite, found.unknown) == (2, 0)


def test_the_largest_of_many_pairs_take_no_matrix_of_them(tmp_path):
    generator = torch.Generator().manual_seed(0)
    sides = []
    for side, count in (("train", 3000), ("test", 800)):
        rows = {"sample_index": torch.randperm(count, generator=generator), "step": 1}
        sides.append(
            store_of(tmp_path / side, [(torch.randn(count, 4, generator=generator), rows)], shapes={"a": (4,)})
        )
    live = LiveBytes()
    with live:
        found = grad_dot(*sides, top=3, max_memory=300_000)
    kept = 800 * 3 * 8 * 4 * 3 + 3800 * 8 * 6  # of each block and joined; indices and means
    assert live.largest < 300_000 + kept < 3000 * 800 * 8 / 10
    expected = grad_dot(*sides)
    values, places = expected.scores.topk(3, 0)
    assert torch.equal(found.places, places)
    torch.testing.assert_close(found.scores, values, rtol=1e-12, atol=1e-13)
    values, places = expected.scores.topk(3, 0, largest=False)
    assert torch.equal(found.least_places, places)
    torch.testing.assert_close(found.least, values, rtol=1e-12, atol=1e-13)


def test_what_the_options_of_scores_are(stores, tmp_path):
    train, test = (each.at(1) for each in stores["float64"])
    for options, text in (
        ({"top": 0}, "top=0 is not allowed: top must be None or an int >= 1"),
        ({"max_memory": 1e9}, "max_memory=1000000000.0 is not allowed: max_memory must be None or an int >= 1, in"),
        ({"max_memory": "1 GB"}, "max_memory='1 GB' is not allowed: max_memory must be None or an int >= 1, in bytes"),
        ({"dtype": torch.float16}, "dtype=torch.float16 is not allowed: dtype must be torch.float32 or torch.float64"),
        ({"device": "gpu"}, "device='gpu' is not allowed: Expected one of cpu, cuda"),
        ({"device": "meta"}, "device='meta' is not allowed: Cannot copy out of meta tensor; no data!"),
        ({"device": None}, "device=None is not allowed: "),
        ({"largest": 3}, "'largest' is no option of a score; there are max_memory, dtype, device, top, groups"),
    ):
        with pytest.raises(OptionError, match=f"^{text}"):
            grad_dot(train, test, **options)
    with pytest.raises(OptionError, match="store=5 is not allowed: store must be a GradientStore, or the path of its"):
        grad_dot(train, 5)
    found = grad_cos(train, test, top=4)
    assert found.top(5, test=0) == found.top(test=0) == grad_cos(train, test).top(4, test=0)
    with pytest.raises(OptionError, match="k=0 is not allowed: k must be an int >= 1"):
        found.top(0, test=0)
    with pytest.raises(OptionError, match="test=1 is not the index of a test sample"):
        found.bottom(1, test=1)
    text = r"grad_cos kept the largest scores alone \(top=4\): compute it with"
    with pytest.raises(OptionError, match=rf"{text} groups=\.\.\., or without `top`"):
        found.by_group([0] * 16)
    with pytest.raises(OptionError, match=f"{text}out `top`"):
        linear_datamodeling_score(found, [[0], [3]], None)
    found.save(tmp_path / "scores.pt")
    again = TopScores.load(tmp_path / "scores.pt")
    assert place_of(again, "top") == place_of(found, "top")
    frame = found.to_pandas()
    assert list(frame.columns) == ["test", "rank", "train", "score"]
    assert list(frame[frame.test == 3][["train", "score"]].itertuples(index=False, name=None)) == found.top(4, test=3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_a_gpu_gives_what_a_cpu_gives(stores, name, dtype, bound):
    expected = scored(name, stores["float64"])
    found = scored(name, stores["float64"], device="cuda", dtype=dtype)
    assert (found.scores.device.type, found.scores.dtype) == ("cpu", dtype)
    assert (found.scores - expected.scores).abs().max() < bound * expected.scores.abs().max()
    kept = scored(name, stores["float64"], device="cuda", dtype=dtype, top=3)
    assert kept.places.device.type == "cpu"
    torch.testing.assert_close(kept.scores, found.scores.topk(3, 0).values, rtol=bound, atol=bound)
