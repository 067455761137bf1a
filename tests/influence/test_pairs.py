"""The matrix of scores, and what is read off it."""

from __future__ import annotations

import errno
import math
import signal
import sys

import numpy
import pytest
import torch

from lightning_persample import OptionError, PerSampleError
from lightning_persample.influence import PairScores, TopScores
from lightning_persample.influence.dataset import save_values

SCORES = torch.tensor([[1.0, 0.5], [-2.0, 4.0], [0.0, 0.5], [1.0, math.nan]], dtype=torch.float64)


def pairs() -> PairScores:
    return PairScores("grad_dot", (3, 5, 8, 9), (0, 4), SCORES, "positive: helps", unknown=2, nonfinite=1)


def test_top_of_one_test_sample_leaves_nan_out_and_keeps_ties_in_order():
    assert pairs().top(3, test=0) == [(3, 1.0), (9, 1.0), (8, 0.0)]
    assert pairs().top(test=4) == [(5, 4.0), (3, 0.5), (8, 0.5)]


def test_top_without_a_test_sample_is_of_the_mean():
    assert pairs().top(2) == [(5, 1.0), (3, 0.75)]


def test_bottom_is_the_smallest_first_without_nan():
    assert pairs().bottom(3, test=0) == [(5, -2.0), (8, 0.0), (3, 1.0)]
    assert pairs().bottom(test=4) == [(3, 0.5), (8, 0.5), (5, 4.0)]
    assert pairs().bottom(2) == [(8, 0.25), (3, 0.75)]


def test_a_few_scores_are_printed_all_and_nan_is_counted():
    assert repr(pairs()) == (
        "grad_dot of 4 training samples, mean over 2 test samples\n"
        "index  score\n"
        "    5      1\n"
        "    3   0.75\n"
        "    8   0.25\n"
        "nan: 1 of 4 samples"
    )


def test_many_scores_are_printed_by_the_three_largest_and_smallest():
    scores = torch.tensor([[3.0], [-1.5], [1234.5678], [0.0], [1e-9], [-7.0], [2.0]], dtype=torch.float64)
    found = PairScores("tracin", (3, 5, 8, 90, 100, 2000, 2001), (0,), scores, "positive: helps")
    assert str(found) == (
        "tracin of 7 training samples, mean over 1 test samples\n"
        "index  score\n"
        "    8   1235\n"
        "    3      3\n"
        " 2001      2\n"
        "  ...    ...\n"
        "   90      0\n"
        "    5   -1.5\n"
        " 2000     -7"
    )


def test_without_a_number_there_is_no_table():
    found = PairScores("tracin", (3, 5), (0,), torch.full((2, 1), math.nan), "positive: helps")
    assert repr(found) == "tracin of 2 training samples, mean over 1 test samples\nnan: 2 of 2 samples"


def test_mean_over_the_test_samples():
    found = pairs().mean()
    assert (found.name, found.index, found.unknown) == ("grad_dot", (3, 5, 8, 9), 2)
    assert found.scores[:3].tolist() == [0.75, 1.0, 0.25]
    assert math.isnan(found.scores[3])
    assert found.counts.tolist() == [2, 2, 2, 2]
    assert found.convention == "mean over 2 test samples; positive: helps"


def test_a_dataframe_has_training_samples_as_rows():
    frame = pairs().to_pandas()
    assert (frame.index.tolist(), frame.columns.tolist()) == ([3, 5, 8, 9], [0, 4])
    assert (frame.index.name, frame.columns.name) == ("train", "test")
    assert frame.loc[5, 4] == 4.0


def test_a_test_sample_without_scores_is_refused():
    with pytest.raises(
        OptionError, match=r"test=3 is not the index of a test sample: 2 have scores, the first .* 0, 4"
    ):
        pairs().top(test=3)
    with pytest.raises(OptionError, match="test=3 is not the index of a test sample"):
        pairs().bottom(test=3)
    with pytest.raises(OptionError, match="k=0 is not allowed"):
        pairs().top(0)
    with pytest.raises(OptionError, match="k=0 is not allowed"):
        pairs().bottom(0)


def test_saved_scores_are_read_as_they_were(tmp_path):
    scores = torch.tensor([[1.0, float("nan")], [-2.0, 0.5]], dtype=torch.float64)
    pairs = PairScores("ekfac", (3, 8), (0, 5), scores, "positive: helps", 2, 1)
    pairs.save(tmp_path / "scores.pt")
    found = PairScores.load(tmp_path / "scores.pt")
    assert (found.name, found.train_index, found.test_index) == ("ekfac", (3, 8), (0, 5))
    assert (found.convention, found.unknown, found.nonfinite) == ("positive: helps", 2, 1)
    assert found.scores.dtype == torch.float64
    assert found.scores.nan_to_num(7.0).equal(scores.nan_to_num(7.0))


@pytest.mark.parametrize("content", [b"", b"no scores", "half"])
def test_a_file_of_scores_that_is_broken_is_named(tmp_path, content):
    path = tmp_path / "scores.pt"
    pairs().save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    with pytest.raises(
        PerSampleError, match=r"scores\.pt' is broken: .* Put it back from a copy, or compute the scores"
    ):
        PairScores.load(path)
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        PairScores.load(tmp_path / "none.pt")


@pytest.mark.parametrize("groups", [["b", "a", "b"], {9: "b", 0: "b", 4: "a", 5: "z"}, torch.tensor([7, 2, 7])])
def test_the_mean_over_groups_of_test_samples(groups):
    scores = torch.tensor([[1.0, 0.5, 5.0], [-2.0, 4.0, 1.0], [0.0, math.nan, math.inf]], dtype=torch.float64)
    found = PairScores("grad_dot", (3, 5, 8), (0, 4, 9), scores, "positive: helps", 2, 1).by_group(groups)
    first, second = found.test_index
    assert (first, second) == ((2, 7) if isinstance(groups, torch.Tensor) else ("a", "b"))
    assert found.top(test=first) == [(5, 4.0), (3, 0.5)]
    assert found.top(test=second) == [(8, math.inf), (3, 3.0), (5, -0.5)]
    assert (found.train_index, found.convention, found.unknown, found.nonfinite) == ((3, 5, 8), "positive: helps", 2, 1)


_KINDS = "ints alone or strings alone, or a mapping from their indices to these"


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        (["a"], "groups has 1 entries; allowed is one for each of the 2 test samples, in the order of test_index, or"),
        ({0: "a"}, "groups has none of test sample 4, and of 1 in all"),
        *(
            (groups, f"groups=.* is not allowed: groups must be the group of each test sample, {_KINDS}")
            for groups in (
                [1, "a"],
                [1, None],
                [None, None],
                {0: "a", 4: None},
                torch.zeros(2, 1, dtype=torch.int64),
                [0.5, math.nan],
                [torch.tensor(1), torch.tensor(1)],
                "ab",
                2,
            )
        ),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups, text):
    with pytest.raises(OptionError, match=f"^{text}"):
        pairs().by_group(groups)


def test_every_changed_byte_of_a_file_of_scores_is_noticed(tmp_path):
    path = tmp_path / "scores.pt"
    PairScores("grad_dot", (3, 5), (0,), SCORES[:2, :1], "positive: helps").save(path)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x11]) + whole[place + 1 :])
        with pytest.raises(PerSampleError, match=r"scores\.pt' is broken: it is no whole file of its kind"):
            PairScores.load(path)
    path.write_bytes(whole)
    assert PairScores.load(path).scores.equal(SCORES[:2, :1])


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 1000])
def test_a_file_of_scores_that_was_cut_off_is_named(tmp_path, size):
    path = tmp_path / "scores.pt"
    pairs().save(path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(PerSampleError, match=r"scores\.pt' is broken: .* or compute the scores again"):
        PairScores.load(path)


def test_what_holds_no_scores_is_refused_by_name(tmp_path):
    save_values(tmp_path / "other.pt", "EigenProjection", {"dim": 3})
    with pytest.raises(PerSampleError) as refused:
        PairScores.load(tmp_path / "other.pt")
    assert str(refused.value) == (
        f"{str(tmp_path / 'other.pt')!r} is of format 'lightning_persample EigenProjection', but is to be read as "
        "'lightning_persample scores'"
    )
    torch.save(vars(pairs()), tmp_path / "plain.pt")
    with pytest.raises(PerSampleError, match=r"plain\.pt' is broken: it is no whole file of its kind"):
        PairScores.load(tmp_path / "plain.pt")
    with pytest.raises(PerSampleError, match="is broken: it is no whole file of its kind"):
        PairScores.load(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of a file's size")
@pytest.mark.parametrize("limit", [0, 1000, 50_000])
def test_scores_that_do_not_fit_on_the_disk_leave_those_that_are_there(tmp_path, limit):
    import resource

    path = tmp_path / "scores.pt"
    pairs().save(path)
    places, scores = tuple(range(100)), torch.ones(100, 100, dtype=torch.float64)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as refused:
            PairScores("grad_dot", places, places, scores, "positive: helps").save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert str(refused.value) == f"[Errno {errno.EFBIG}] File too large: {str(path)!r}"
    assert [each.name for each in tmp_path.iterdir()] == ["scores.pt"]
    assert PairScores.load(path).scores.nan_to_num(7.0).equal(SCORES.nan_to_num(7.0))


def test_a_folder_that_is_not_there_is_named(tmp_path):
    path = tmp_path / "none" / "scores.pt"
    with pytest.raises(FileNotFoundError) as refused:
        pairs().save(path)
    assert refused.value.filename == str(path)


@pytest.mark.parametrize("groups", [numpy.array([7, 2]), numpy.array(["b", "a"]), [numpy.int64(7), numpy.int64(2)]])
def test_groups_of_numpy(groups):
    found = pairs().by_group(groups)
    assert found.test_index == tuple(sorted(groups))
    assert found.top(1, test=sorted(groups)[0]) == [(5, 4.0)]


@pytest.mark.parametrize("k", [0, -1, 1.5, "a", True, None])
def test_how_many_is_an_int(k):
    index, scores = (3, 5), torch.tensor([[1.0], [2.0]])
    places = torch.tensor([[1], [0]])
    kept = {"places": places, "least": scores, "least_places": places.flip(0), "means": scores[:, 0].double()}
    best = TopScores("grad_dot", index, (0,), scores.flip(0), "positive: helps", **kept)
    for each in (pairs().mean(), pairs(), best):
        for ask in (each.top, each.bottom):
            with pytest.raises(OptionError, match=f"^k={k!r} is not allowed: k must be an int >= 1"):
                ask(k)
    with pytest.raises(OptionError, match=f"^k={k!r} is not allowed: k must be an int >= 1"):
        best.top(k, test=0)
    assert best.top(1, test=0) == [(5, 2.0)]
