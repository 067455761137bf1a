"""All cases, family by family."""

from __future__ import annotations

from collections.abc import Iterator

from tests.rules.case import Case
from tests.rules.convolution_cases import convolution_cases
from tests.rules.elementwise_cases import elementwise_cases
from tests.rules.embedding_cases import embedding_cases
from tests.rules.linear_cases import linear_cases
from tests.rules.normalization_cases import normalization_cases


def all_cases() -> Iterator[Case]:
    yield from linear_cases()
    yield from convolution_cases()
    yield from embedding_cases()
    yield from normalization_cases()
    yield from elementwise_cases()
