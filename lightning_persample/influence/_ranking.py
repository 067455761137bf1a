"""Samples by their scores: the largest, the smallest, and a short table of both."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_persample.options import check_option

__all__ = ["extremes", "ranked"]

_SHOWN = 3  # of the largest, and of the smallest


def ranked(
    index: Sequence[int | str], scores: Tensor, k: int, *, largest: bool = True
) -> list[tuple[int | str, float]]:
    """The samples with the largest or the smallest scores; ties in the order of `index`, and none that is nan."""
    check_option("k", k, k >= 1, "an int >= 1")
    known = (~scores.isnan()).nonzero().flatten()
    order = known[scores[known].argsort(descending=largest, stable=True)][:k]
    return [(index[place], float(scores[place])) for place in order.tolist()]


def extremes(index: Sequence[int | str], scores: Tensor) -> str:
    """A table of the three largest and the three smallest scores, a line each, and how many are nan."""
    unknown = int(scores.isnan().sum())
    count = len(index) - unknown
    largest = ranked(index, scores, min(count, 2 * _SHOWN) or 1)
    cells = [(str(sample), f"{score:.4g}") for sample, score in largest]
    if count > 2 * _SHOWN:
        smallest = ranked(index, scores, _SHOWN, largest=False)[::-1]
        cells = [*cells[:_SHOWN], ("...", "..."), *((str(sample), f"{score:.4g}") for sample, score in smallest)]
    if cells:
        cells = [("index", "score"), *cells]
    widths = [max((len(row[column]) for row in cells), default=0) for column in range(2)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    if unknown:
        lines.append(f"nan: {unknown} of {len(index)} samples")
    return "".join(f"\n{line}" for line in lines)
