"""Sample inputs that ship inside torch, op by op: a per-sample gradient is exact, or refused by name; never wrong.

Each sample input becomes several trials (see `shipped_trials`): one tensor of the call is the batch and the others are
parameters, or the other way round; under a new leading axis, or along an axis the tensor has; with the batch requiring
gradient behind a parameter of its own, or not.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import pytest

from lightning_persample import supported_ops
from tests.capture.shipped_verdict import Found, assert_none_wrong, judge
from tests.capture.torch_databases import MODULES, OPS, op_cases

pytestmark = [pytest.mark.usefixtures("double_precision"), pytest.mark.timeout(600)]

# fmt: off
WITH_RULE = {
    "add": ("add", "__radd__"),
    "sub": ("sub",),
    "rsub": ("rsub", "__rsub__"),
    "mul": ("mul", "__rmul__"),
    "div": ("div.no_rounding_mode", "div.floor_rounding", "div.trunc_rounding", "true_divide"),
    "rdiv": ("__rdiv__",),
    "matmul": ("matmul", "__rmatmul__"),
    "mm": ("mm",),
    "addmm": ("addmm", "addmm.decomposed"),
    "linear": ("nn.functional.linear",),
    "conv1d": ("nn.functional.conv1d",),
    "conv2d": ("nn.functional.conv2d",),
    "conv3d": ("nn.functional.conv3d",),
    "conv_transpose1d": ("nn.functional.conv_transpose1d",),
    "conv_transpose2d": ("nn.functional.conv_transpose2d",),
    "conv_transpose3d": ("nn.functional.conv_transpose3d",),
    "embedding": ("nn.functional.embedding",),
    "embedding_bag": ("nn.functional.embedding_bag",),
    "layer_norm": ("nn.functional.layer_norm",),
    "rms_norm": ("nn.functional.rms_norm",),
    "group_norm": ("nn.functional.group_norm",),
    "instance_norm": ("nn.functional.instance_norm",),
    "batch_norm": ("nn.functional.batch_norm",),
}
IN_MODULES = {
    "gru": "GRU", "gru_cell": "GRUCell", "lstm": "LSTM", "lstm_cell": "LSTMCell", "rnn_relu": "RNN", "rnn_tanh": "RNN",
    "rnn_relu_cell": "RNNCell", "rnn_tanh_cell": "RNNCell",
}
GENERIC = (
    "einsum", "baddbmm", "bmm", "addbmm", "addmv", "addr", "mv", "dot", "vdot", "inner",
    "outer", "kron", "tensordot", "linalg.multi_dot", "linalg.vecdot", "nn.functional.bilinear", "nn.functional.prelu",
    "nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward",
    "nn.functional.cosine_similarity", "nn.functional.pairwise_distance", "nn.functional.pad.constant",
    "nn.functional.pad.reflect", "cdist", "where", "cat", "stack", "hstack", "vstack", "dstack", "column_stack",
    "gather", "take_along_dim", "index_select", "__getitem__", "index_add", "index_copy", "index_fill", "index_put",
    "scatter", "scatter_add", "select_scatter", "slice_scatter", "masked_fill", "masked_scatter", "addcmul", "addcdiv",
    "lerp", "pow", "__rpow__", "float_power", "maximum", "minimum", "fmax", "fmin", "clamp", "atan2", "hypot",
    "logaddexp", "xlogy", "copysign", "fmod", "remainder", "cross", "expand", "expand_as", "repeat",
    "repeat_interleave", "reshape", "view", "flatten", "unflatten", "permute", "transpose", "movedim", "flip", "roll",
    "narrow", "split", "chunk", "unbind", "squeeze", "unsqueeze", "sum", "mean", "amax", "softmax", "cumsum", "var",
    "linalg.vector_norm", "nn.functional.normalize", "nn.functional.interpolate.bilinear", "nn.functional.grid_sample",
    "linalg.solve", "nn.functional.cross_entropy", "nn.functional.mse_loss",
)
# fmt: on
RULED = tuple(name for names in WITH_RULE.values() for name in names)
FIRST = tuple(names[0] for names in WITH_RULE.values())  # one spelling of each
# Not torch functions of tensors, random in a way that depends on values, or unsafe: torch reads outside memory where
# indices or sizes do not fit.
LEFT_OUT = re.compile(
    r"jiterator|signal|empty|new_empty|lu_unpack|native_batch|_native_batch|_batch_norm|torch._scaled_mm|_segment_reduce"
    r"|linalg.ldl_solve|bernoulli|nn.functional.rrelu|torch.ops|sparse|to_sparse"
)
OTHERS = tuple(name for name in OPS if name not in (*RULED, *GENERIC) and not LEFT_OUT.match(name))
TOLERANCES = {"matrix_exp": 1e-7}  # (its kernel chooses the degree of a polynomial for the whole batch)
MORE = {  # (most inputs are for one sample, or in training)
    "nn.functional.conv1d": 8, "nn.functional.conv_transpose1d": 4, "nn.functional.conv_transpose3d": 4,
    "nn.functional.batch_norm": 10,
}  # fmt: skip


@cache
def verdicts(name: str, most: int, forms: bool = False, every_axis: bool = False) -> Found:
    """The outcome of every trial of an op by the trial's name, under a mean or a sum of losses in turn."""
    found = []
    for place, trial in enumerate(op_cases(name, most, forms=forms, every_axis=every_axis)):
        for reduction in ("mean", "sum") if forms else (("mean", "sum")[place % 2],):
            found.append((f"{trial.name} {reduction}", judge(trial, reduction, TOLERANCES.get(name))))
    return tuple(found)


def few_of(name: str) -> int:
    return MORE.get(name, 3)


def few(name: str) -> Found:
    return verdicts(name, few_of(name))


@pytest.mark.parametrize("name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.slow) for n in RULED])
def test_an_op_with_a_rule_is_exact_or_refused_by_name(name: str) -> None:
    found = few(name)
    assert_none_wrong(found)
    exact = [trial for trial, verdict in found if verdict.outcome == "exact" and verdict.reference == "loop"]
    assert exact, f"none of {len(found)} trials of {few_of(name)} inputs is exact: take more of them, in MORE"


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERIC)
def test_an_op_without_a_rule_is_exact_or_refused_by_name(name: str) -> None:
    assert_none_wrong(few(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RULED, *GENERIC])
def test_along_every_axis_of_more_inputs(name: str) -> None:
    assert_none_wrong(verdicts(name, 20, forms=name in RULED, every_axis=True))


# They choose among the samples, give places or numbers of them, or are given these.
CHOOSING = ("amin", "topk", "argmax", "bucketize", "tensor_split", "as_strided")


@pytest.mark.parametrize("name", [n if n in CHOOSING else pytest.param(n, marks=pytest.mark.slow) for n in OTHERS])
def test_every_other_op_of_torch(name: str) -> None:
    assert_none_wrong(verdicts(name, 6))


def test_every_op_with_a_rule_has_inputs_here() -> None:
    assert set(supported_ops()) == WITH_RULE.keys() | IN_MODULES.keys()
    assert set(RULED) <= OPS.keys()
    assert set(IN_MODULES.values()) <= MODULES.keys()


# By op, what is refused although single samples have a gradient of their own there.
REFUSED = {
    "amax": {"`amax` reduces over the batch axis"},  # (that one sample has every maximum is true of these values alone)
    "kron": {"`kron` gives a sample another value alone than in its batch"},
    "nn.functional.bilinear": {"`bilinear` has a weight that depends on the batch"},
    "nn.functional.conv1d": {"`conv1d` has a weight that depends on the batch"},
    "nn.functional.conv2d": {"`conv2d` has a weight that depends on the batch"},
    "nn.functional.linear": {"`linear` has a weight that depends on the batch"},
    "nn.functional.scaled_dot_product_attention": {"it draws random numbers"},
}
CAUSES = (r"followed here: (.+?) \(shapes", r": ([^:]+); give it a rule", r"^.+?: (.+)$")


def causes(found: Found) -> set[str]:
    """Why parameters were refused where a loop over single samples gives their gradients."""
    details = [v.detail for _, v in found if v.outcome == "unsupported" and v.reference == "loop"]
    matches = [next(m for cause in CAUSES if (m := re.search(cause, detail))) for detail in details]
    return {match.group(1) for match in matches}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FIRST, id="first-spellings"),
        pytest.param(RULED, id="with-a-rule", marks=pytest.mark.slow),
        pytest.param(GENERIC, id="generic", marks=pytest.mark.slow),
    ],
)
def test_refused_although_a_loop_gives_it(names: tuple[str, ...]) -> None:
    found = {name: causes(few(name)) for name in names}
    assert {name: why for name, why in found.items() if why} == {n: why for n, why in REFUSED.items() if n in names}


@pytest.mark.parametrize(
    ("names", "least"),
    [
        pytest.param(FIRST, 130, id="first-spellings"),
        pytest.param(RULED, 220, id="with-a-rule", marks=pytest.mark.slow),
        pytest.param(GENERIC, 600, id="generic", marks=pytest.mark.slow),
    ],
)
def test_counts(names: tuple[str, ...], least: int, capsys: pytest.CaptureFixture[str]) -> None:
    counts = Counter(verdict.outcome for name in names for _, verdict in few(name))
    with capsys.disabled():
        print(f"\nsample inputs of torch, {len(names)} ops: {dict(counts)}")
    assert counts["exact"] >= least
    assert counts["wrong"] == 0
