"""A table of samples against a dictionary."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lightning_persample.influence.by_sample import SampleTable

DRAWN = {
    "every sample in turn": lambda draw: [[n] for n in range(100)],
    "from the last to the first": lambda draw: [[99 - n] for n in range(100)],
    "without order": lambda draw: [[draw.randrange(50) for _ in range(7)] for _ in range(30)],
    "few of many": lambda draw: [[draw.randrange(-(2**63), 2**63) for _ in range(7)] for _ in range(30)],
    "the ends": lambda draw: [[2**63 - 1], [-(2**63)], [0, 2**63 - 1, -(2**63)], [1, -1]],
    "nothing": lambda draw: [[], [3, 3], [], [2]],
    "names": lambda draw: [[str(draw.randrange(50)) for _ in range(7)] for _ in range(30)],
    "ints, then names": lambda draw: [[7, 3], ["a", 3], [5, 7, 3]],
}


@pytest.mark.parametrize("drawn", DRAWN)
def test_each_sample_has_a_place_of_its_own(drawn):
    table, expected = SampleTable(sums="<f8", counts="<i4"), {}
    for n, keys in enumerate(DRAWN[drawn](random.Random(0))):
        are_ints = all(isinstance(key, int) for key in keys)
        places = table.places(np.array(keys, np.int64) if are_ints else keys)
        assert places.dtype == np.int64
        np.add.at(table.columns["sums"], places, n + 0.5)
        np.add.at(table.columns["counts"], places, 1)
        for key in keys:
            total, count = expected.get(key, (0.0, 0))
            expected[key] = total + n + 0.5, count + 1
    keys = list(table.keys())
    assert len(table) == len(expected)
    assert dict(zip(keys, zip(*(c.tolist() for c in table.columns.values()), strict=True), strict=True)) == expected
    if isinstance(table.keys(), np.ndarray):
        assert keys == sorted(keys)
