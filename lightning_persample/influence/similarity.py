"""GradDot and GradCos: how alike the gradients of two samples are, at one set of weights."""

from __future__ import annotations

from lightning_persample.influence.pairs import PairScores
from lightning_persample.influence.products import StoreOrPath, align, given_gradients, unit_rows

_ONE = "take {name}(train.at(checkpoint), test.at(checkpoint)) of one, or tracin_cp for a sum over all of them"


def grad_dot(train: StoreOrPath, test: StoreOrPath, *, max_memory: int | None = None) -> PairScores:
    """GradDot: ``g(z) . g(z')``, by how much a step of SGD on z lowers the loss of z', to first order, for a rate of 1.

    It is TracInCP with one checkpoint. Of projected gradients it is an unbiased estimate. Cost: ``2 n m K`` operations
    for n training and m test samples and K columns. The same numbers by dask, in the order of the stores' rows:
    ``train.to_dask().astype("float64") @ test.to_dask().astype("float64").T``.

    Args:
        train: gradients of the training samples at one checkpoint, (n, K); a store or its folder.
        test: gradients of the test samples there, (m, K); a store or its folder.
        max_memory: bytes for what is held at a time besides the scores; None reads blocks of 64 MiB.

    Returns:
        The scores, (n, m).

    Reference: Pruthi et al. 2020, Estimating training data influence by tracing gradient descent, arXiv 2002.08484;
    Charpiat et al. 2019, Input similarity from the neural network perspective, arXiv 2102.05262.
    """
    train, test = given_gradients(train, test, "grad_dot")
    aligned = align(train, test, why_one=_ONE.format(name="grad_dot"))
    scores = aligned.products(max_memory=max_memory)
    text = "g . g': positive where a small step of SGD on the training sample lowers the test sample's loss"
    return aligned.scored("grad_dot", scores, text)


def grad_cos(train: StoreOrPath, test: StoreOrPath, *, max_memory: int | None = None) -> PairScores:
    """GradCos: ``g(z) . g(z') / (||g(z)|| ||g(z')||)``, from -1 to 1, and 1 of a sample with itself.

    A gradient of zeros has no direction, and its scores are nan. Cost: ``2 n m K`` operations, as of `grad_dot`, and
    ``3 n K`` for the norms for each block of test samples.

    Args:
        train: gradients of the training samples at one checkpoint, (n, K); a store or its folder.
        test: gradients of the test samples there, (m, K); a store or its folder.
        max_memory: bytes for what is held at a time besides the scores; None reads blocks of 64 MiB.

    Returns:
        The scores, (n, m).

    Reference: Charpiat et al. 2019, Input similarity from the neural network perspective,
    arXiv 2102.05262.
    """
    train, test = given_gradients(train, test, "grad_cos")
    aligned = align(train, test, why_one=_ONE.format(name="grad_cos"))
    scores = aligned.products(max_memory=max_memory, of_train=unit_rows, of_test=unit_rows)
    text = "cosine of g and g': positive where a small step of SGD on the training sample lowers the test sample's loss"
    return aligned.scored("grad_cos", scores, text)
