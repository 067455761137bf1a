"""How well scores of pairs foretell what models give that were trained on parts of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_persample.errors import OptionError
from lightning_persample.influence.scores import PairScores, TopScores


def linear_datamodeling_score(
    scores: PairScores | Tensor, subsets: Tensor | Sequence[Sequence[int]], outputs: Tensor
) -> Tensor:
    """The linear datamodeling score (LDS) of each test sample: how well sums of scores rank trainings on subsets.

    For each subset S of the training samples a model is trained on S, and its output on test sample j is measured. The
    score is Spearman's rank correlation, over the subsets, of these outputs with ``sum_{i in S} scores[i, j]``: 1 where
    the scores rank the trainings perfectly, about 0 where they know nothing. Its mean over the test samples is what
    tables of methods show. Average the outputs of several trainings on each subset: their noise bounds what any score
    can reach.

    >>> scores = torch.tensor([[3.0], [1.0], [0.0]])
    >>> linear_datamodeling_score(scores, [[0], [1], [2]], torch.tensor([[0.9], [0.5], [0.6]]))
    tensor([0.5000], dtype=torch.float64)

    Args:
        scores: of each pair, (n, m); a tensor, or what `ekfac`, `logra`, `trak` and their like return.
        subsets: a mask (s, n), bool, of the training samples that each of s models was trained on; or for each model
            the samples' indices, as in ``scores.train_index``, rows of a tensor.
        outputs: of each model on each test sample, (s, m), the larger the better it is predicted, as all scores of this
            package have it: the margin of the right class (`correct_class_margin`), or minus the loss.

    Returns:
        The score of each test sample, (m,), float64; nan where its scores or outputs are nan, or all sums or all
        outputs are equal.

    Raises:
        OptionError: the shapes do not agree, there are fewer than two subsets, or a subset has a sample without scores.

    Reference: Park et al. 2023, TRAK: attributing model behavior at scale, definition 2.5, arXiv 2303.14186.
    """
    if isinstance(scores, TopScores):
        raise OptionError(
            f"{scores.name} kept the largest scores alone (top={len(scores.scores)}): compute it without `top`"
        )
    values = scores.scores if isinstance(scores, PairScores) else scores
    index = scores.train_index if isinstance(scores, PairScores) else tuple(range(len(values)))
    chosen = _mask(subsets, index)
    if outputs.shape != (len(chosen), values.shape[1]) or len(chosen) < 2:
        raise OptionError(
            f"outputs are of shape {tuple(outputs.shape)}, with {len(chosen)} subsets and scores of shape "
            f"{tuple(values.shape)}: allowed is one output for each of two or more subsets and each test sample, "
            f"({len(chosen)}, {values.shape[1]})"
        )
    return rank_correlation(chosen.double() @ values.double().cpu(), outputs.cpu().double())


def rank_correlation(x: Tensor, y: Tensor) -> Tensor:
    """Spearman's rank correlation of each column, (s, m) and (s, m) to (m,); nan where all of one are equal."""
    one, other = (ranks - ranks.mean(0) for ranks in map(_ranks, (x, y)))
    return (one * other).sum(0) / (one.square().sum(0) * other.square().sum(0)).sqrt()


def _mask(subsets: Any, index: Sequence[int]) -> Tensor:
    """The subsets as a mask (s, n)."""
    try:
        given = torch.as_tensor(subsets).cpu()
    except (TypeError, ValueError):  # of several lengths
        given = None
    if given is not None and given.dtype == torch.bool:
        if given.dim() != 2 or given.shape[1] != len(index):
            raise OptionError(f"subsets are a mask of shape {tuple(given.shape)}; allowed is (subsets, {len(index)})")
        return given
    if given is not None and given.shape == (len(given), len(index)) and bool(((given == 0) | (given == 1)).all()):
        raise OptionError(
            f"subsets are {given.dtype} numbers 0 and 1 of shape {tuple(given.shape)}, which may be a mask or indices: "
            "pass a mask as subsets.bool()"
        )
    places = {sample: place for place, sample in enumerate(index)}
    found = torch.zeros(len(subsets), len(index), dtype=torch.bool)
    for row, subset in zip(found, subsets, strict=True):
        for sample in torch.as_tensor(subset).tolist():
            if sample not in places:
                raise OptionError(
                    f"sample {sample!r} of a subset has no scores: {len(index)} samples have, the first of them "
                    f"{', '.join(map(str, index[:5]))}"
                )
            if row[places[sample]]:
                raise OptionError(f"sample {sample!r} stands twice in a subset; allowed is each sample once")
            row[places[sample]] = True
    return found


def _ranks(values: Tensor) -> Tensor:
    """The ranks in each column, (s, m), equal values with the mean of theirs; nan in a column that has one."""
    columns = values.T.contiguous()
    ordered = columns.sort(1).values
    below, upto = (torch.searchsorted(ordered, columns, right=right) for right in (False, True))
    ranks = (below + upto).double() / 2
    return ranks.masked_fill(columns.isnan().any(1, keepdim=True), float("nan")).T
