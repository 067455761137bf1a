"""A weight that is laid over the batch before it meets it: exact, and nothing of B * B entries is made on the way."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_persample.capture.mode import expanded_weights
from tests.capture.model_cases import Model, mean_of_squares, parameter
from tests.capture.reference import assert_exact, assert_values, loop, record_of
from tests.in_turn import in_turn

pytestmark = pytest.mark.usefixtures("double_precision")

WIDTH = 12


class Largest(TorchDispatchMode):
    """Records the largest number of entries of a tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


def module(laid: Callable[[Any, Tensor], Tensor], *shape: int, **layers: nn.Module) -> nn.Module:
    """``a(x)`` times what `laid` makes of the weight r and the number of samples."""
    forward = lambda m, x: m.a(x) * laid(m, x)  # noqa: E731
    return Model(forward, a=nn.Linear(4, WIDTH), r=parameter(*(shape or (WIDTH,))), **layers)


def negative_binomial(m: Any, x: Tensor) -> Tensor:
    mu, theta = torch.broadcast_tensors(m.a(x).exp(), m.r.exp())
    return torch.lgamma(theta + 1) - theta * (theta + mu).log() + (theta + 1e-8).log()


def queries(m: Any, x: Tensor) -> Tensor:
    keys = m.a(x).unflatten(1, (3, 4))
    return m.attend(m.r.unsqueeze(0).repeat(len(x), 1, 1), keys, keys, need_weights=False)[0].flatten(1)


def normal(m: Any, x: Tensor) -> Tensor:
    return torch.distributions.Normal(m.a(x), m.r.exp()).log_prob(x[:, :1])


CASES: dict[str, Callable[[], nn.Module]] = {
    "broadcast_tensors": lambda: Model(negative_binomial, a=nn.Linear(4, WIDTH), r=parameter(WIDTH)),
    "distribution": lambda: Model(normal, a=nn.Linear(4, WIDTH), r=parameter(WIDTH)),
    "expand": lambda: module(lambda m, x: m.r.expand(len(x), -1).exp()),
    "repeat": lambda: module(lambda m, x: m.r.repeat(len(x), 1)),
    "repeat-inside-a-row": lambda: module(lambda m, x: m.r.repeat(len(x), 3), 4),
    "repeat-then-op": lambda: module(lambda m, x: m.r.repeat(len(x), 1).softmax(-1)),
    "two-uses": lambda: module(lambda m, x: (lambda r: r.exp() * x[:, :1] + r)(m.r.repeat(len(x), 1))),
    "two-weights-of-equal-rows": lambda: module(lambda m, x: m.r.expand(len(x), -1) * m.r.exp().repeat(len(x), 1)),
    "a-scalar-weight": lambda: module(lambda m, x: m.r.expand(len(x), -1) * m.r.sum(), WIDTH),
    "along-the-second-axis": lambda: module(lambda m, x: m.r[:, None].expand(-1, len(x)).exp().lgamma().t()),
    "times-ones": lambda: module(lambda m, x: (torch.ones(len(x), 1) @ m.r[None]).exp()),
    "tile": lambda: module(lambda m, x: torch.tile(m.r, (len(x), 1))),
    "repeat_interleave": lambda: module(lambda m, x: m.r[None].repeat_interleave(len(x), 0)),
    "zeros": lambda: module(lambda m, x: m.r + torch.zeros(len(x), 1)),
    "stack": lambda: module(lambda m, x: torch.stack([m.r] * len(x))),
    "cat": lambda: module(lambda m, x: torch.cat([m.r[None]] * len(x))),
    "cat-with-a-constant": lambda: module(
        lambda m, x: torch.cat([m.r.repeat(len(x), 1), torch.ones(len(x), 4)], 1), WIDTH - 4
    ),
    "index": lambda: module(lambda m, x: m.r[torch.arange(len(x)) % 5].exp(), 5, WIDTH),
    "rows-of-a-table": lambda: module(lambda m, x: m.r[torch.arange(len(x))], 50, WIDTH),
    "reshape": lambda: module(lambda m, x: m.r.expand(len(x), -1, -1).reshape(len(x), -1), 3, 4),
    "transpose": lambda: module(lambda m, x: m.r.expand(len(x), -1, -1).transpose(1, 2).flatten(1), 3, 4),
    "chunk": lambda: module(lambda m, x: torch.cat(m.r.expand(len(x), -1).chunk(2, 1)[::-1], 1)),
    "flipped-samples": lambda: module(lambda m, x: m.r.repeat(len(x), 1).flip(0).tanh()),
    "bmm": lambda: module(
        lambda m, x: torch.bmm(m.r.repeat(len(x), 1, 1), x[:, :, None]).squeeze(-1), WIDTH, 4
    ),
    "addmm": lambda: module(lambda m, x: torch.addmm(m.r.expand(len(x), -1), x, m.b.weight), b=nn.Linear(WIDTH, 4)),
    "queries": lambda: module(queries, 3, 4, attend=nn.MultiheadAttention(4, 2, batch_first=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_loop(name: str) -> None:
    network, batch = CASES[name](), torch.rand(5, 4)
    if name in ("index", "rows-of-a-table"):  # one sample alone would meet another row
        batch = batch[:1].expand(5, 4).clone()
        with expanded_weights(network, batch, quantities=("grad_sample",)) as capture:
            mean_of_squares(network, batch).backward()
        torch.testing.assert_close(capture.record.grad_samples["r"].mean(0), network.r.grad)
        rows = torch.arange(5)
        own = capture.record.grad_samples["r"]
        assert own[rows, rows].abs().sum(1).min() > 0
        own[rows, rows] = 0
        assert not own.any()
        return
    record = record_of(network, mean_of_squares, batch)
    assert record.unsupported == {}
    assert_values(record, loop(network, mean_of_squares, (batch,)))


@pytest.mark.parametrize("name", [name for name in CASES if name != "flipped-samples"])  # (whose rows change places)
def test_nothing_grows_with_the_square_of_the_batch(name: str) -> None:
    network, size = CASES[name](), 48
    with Largest() as largest, expanded_weights(network, batch := torch.rand(size, 4)) as capture:
        mean_of_squares(network, batch).backward()
    assert capture.record.unsupported == {}
    assert size * WIDTH <= largest.numel < size * size * WIDTH / 3


@pytest.mark.parametrize("name", ["repeat-then-op", "two-uses", "flipped-samples", "chunk"])
def test_some_of_the_samples_alone(name: str) -> None:
    network, batch, samples = CASES[name](), torch.rand(5, 4), torch.tensor([3, 1])
    expected = loop(network, mean_of_squares, (batch,))
    with expanded_weights(network, batch, quantities=("grad_sample",), samples=samples) as capture:
        mean_of_squares(network, batch).backward()
    for parameter_name, grads in capture.record.grad_samples.items():
        torch.testing.assert_close(grads, expected[parameter_name][samples], rtol=1e-10, atol=1e-12)


ARITHMETIC = {
    "add": lambda a, b: torch.add(a, b, alpha=3),
    "sub": lambda a, b: torch.sub(a, b, alpha=2),
    "rsub": lambda a, b: torch.rsub(a, b, alpha=2),
    "mul": torch.mul,
    "div": torch.div,
    "rdiv": Tensor.__rdiv__,
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor") + b,
    "in-place": lambda a, b: (a * 1).expand(torch.broadcast_shapes(a.shape, b.shape)).clone().mul_(b),
}
OPERANDS: dict[str, Callable[[Any, Tensor], tuple[Tensor, Tensor]]] = {
    "alike": lambda m, x: (m.r.exp().expand(len(x), -1), m.a(x).exp()),
    "beside-more-axes": lambda m, x: (m.r.exp().expand(len(x), -1), m.a(x).exp().expand(3, -1, -1)),
    "beside-fewer-axes": lambda m, x: (m.r.exp()[:, None, None].expand(-1, len(x), -1), m.a(x).exp()),
    "beside-one-column": lambda m, x: (m.r.exp().repeat(len(x), 1), m.a(x).exp().sum(1, keepdim=True)),
    "times-a-shared-weight": lambda m, x: (m.r.exp().repeat(len(x), 1) * m.s, m.a(x).exp()),
    "over-a-shared-weight": lambda m, x: (m.s / (m.r.repeat(len(x), 1) + torch.ones(len(x), 1)).exp(), m.a(x).exp()),
}


@pytest.mark.parametrize(
    ("op", "operands", "swapped", "size"), in_turn(product(ARITHMETIC, OPERANDS, [False, True]), [2, WIDTH])
)
def test_arithmetic_with_a_weight_that_is_laid_over_the_batch(op: str, swapped: bool, operands: str, size: int) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        pair = OPERANDS[operands](m, x)
        result = ARITHMETIC[op](*reversed(pair) if swapped else pair)
        return result if result.dim() == 2 else result[:3].square().sum(0)

    step = Model(forward, a=nn.Linear(4, WIDTH), r=parameter(WIDTH), s=parameter(WIDTH))
    x = torch.randn(size, 4)
    for _ in range(2):  # the second time by what was decided the first time
        record = record_of(step, mean_of_squares, x)
        assert (record.unsupported, record.axis_lost, record.mixing) == ({}, (), ())
    assert_values(record, loop(step, mean_of_squares, (x,)))


def nothing_laid(m: Any, x: Tensor) -> Tensor:
    return m.a(x + m.r[:0].expand(len(x), 0).tanh().sum(1, keepdim=True))


def written_after_use(m: Any, x: Tensor) -> Tensor:
    laid = m.r.expand(len(x), -1) * 2
    h = x + laid
    laid.add_(1)
    return m.a(h + laid.square())


@pytest.mark.parametrize("forward", [nothing_laid, written_after_use])
@pytest.mark.parametrize("size", [1, 4])
def test_no_entries_and_a_write_after_the_use_are_no_obstacle(forward: Any, size: int) -> None:
    network, batch = Model(forward, a=nn.Linear(4, 3), r=parameter(4)), torch.rand(size, 4)
    record = record_of(network, mean_of_squares, batch)
    assert record.unsupported == {}
    assert_values(record, loop(network, mean_of_squares, (batch,)))


OPS_WITHOUT_A_FAMILY = {
    "cross": lambda m, x: torch.cross(m.a(x), m.w.expand(len(x), -1), dim=1),
    "cross-of-a-stack": lambda m, x: torch.cross(torch.stack([m.w] * len(x)), m.a(x), dim=1),
    "distances": lambda m, x: torch.cdist(m.a(x)[:, None], m.w.expand(len(x), 2, -1)),
    "distances-along-another-axis": lambda m, x: torch.cdist(
        m.a(x)[None, :, None].expand(2, -1, -1, -1), m.w.expand(2, len(x), 2, -1)
    ).movedim(1, 0),
    "beside-constant-rows": lambda m, x: torch.cross(
        m.a(x) * m.w, torch.tensor([1.0, -2.0, 0.5]).expand(len(x), -1), dim=1
    ),
}


@pytest.mark.parametrize("size", [2, 3, 5, 20])
@pytest.mark.parametrize("name", OPS_WITHOUT_A_FAMILY)
def test_ops_without_a_family_beside_a_weight_that_is_laid_over_the_batch(name: str, size: int) -> None:
    step = Model(OPS_WITHOUT_A_FAMILY[name], a=nn.Linear(4, 3), w=parameter(3))
    x = torch.randn(size, 4)
    record = record_of(step, mean_of_squares, x)
    assert (record.unsupported, record.axis_lost, record.mixing) == ({}, (), ())
    assert_values(record, loop(step, mean_of_squares, (x,)))


def halves(m: Any, rows: Tensor) -> Tensor:
    with_, without = m.a(rows).tanh().chunk(2)
    return without + 1.5 * (with_ - without)


JOINED = {
    "zeros_like": lambda m, x: halves(m, torch.cat([x, torch.zeros_like(x)])),
    "first": lambda m, x: halves(m, torch.cat([x.new_full((len(x), 4), 0.3), x])),
    "equal-rows-of-several-values": lambda m, x: halves(m, torch.cat([x, torch.arange(4.0).expand(len(x), -1)])),
    "along-another-axis": lambda m, x: halves(m, torch.cat([x.t(), torch.ones(4, len(x))], 1).t()),
    "stack": lambda m, x: m.a(torch.stack([x, torch.ones_like(x)])).tanh().prod(0),
    "beside-picked-rows": lambda m, x: halves(m, torch.cat([x.flip(0), torch.ones_like(x)])).flip(0) * m.a(x),
    "beside-rows-of-tokens": lambda m, x: m.a(torch.cat([x.repeat_interleave(2, 0), torch.zeros(2 * len(x), 4)])),
    "beside-a-part": lambda m, x: m.a(
        torch.cat([torch.cat([x[:1], torch.ones(1, 4)]), torch.cat([x[1:], torch.ones(len(x) - 1, 4)])])
    ),
    "nothing": lambda m, x: m.a(torch.cat([torch.empty(0, 4), x])),
    "vstack": lambda m, x: halves(m, torch.vstack([x, torch.ones_like(x)])),
    "a-learned-row": lambda m, x: halves(m, torch.cat([x, m.r.expand(len(x), -1)])),
    "a-learned-row-first": lambda m, x: halves(
        m, torch.cat([m.r.exp().expand(len(x), -1), x.square(), x])[: 2 * len(x)]
    ),
    "a-learned-row-of-tokens": lambda m, x: m.a(torch.cat([x.repeat_interleave(2, 0), m.r.expand(2 * len(x), -1)])),
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("name", JOINED)
def test_equal_rows_joined_to_the_rows_of_the_batch_are_one_for_each_sample(name: str, size: int) -> None:
    step, x = Model(JOINED[name], a=nn.Linear(4, 3), r=parameter(4)), torch.randn(size, 4)
    loss = lambda m, x: m(x).square().mean()  # noqa: E731
    for _ in range(2):
        record = record_of(step, loss, x)
        assert (record.unsupported, record.axis_lost, record.mixing, record.weighting) == ({}, (), (), ())
        assert record.why_no_factor == ""
        assert_values(record, loop(step, loss, (x,)))


REFUSED = {
    "other-rows": lambda m, x: torch.cat([x, torch.arange(4.0 * len(x)).view(-1, 4)]),
    "one-row": lambda m, x: torch.cat([x, torch.zeros(1, 4)]),
    "more-rows": lambda m, x: torch.cat([x, torch.zeros(2 * len(x), 4)]),
    "two-parts-of-one-length": lambda m, x: torch.cat([x[:2], torch.zeros(2, 4), x[2:4]]),
    "nan": lambda m, x: torch.cat([x, torch.full_like(x, torch.nan)]).nan_to_num(),
    "a-table-of-zeros": lambda m, x: torch.cat([x, m.t]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_may_be_of_any_sample_are_named(name: str) -> None:
    step = Model(lambda m, x: m.a(REFUSED[name](m, x)), a=nn.Linear(4, 3), t=nn.Parameter(torch.zeros(5, 4)))
    for joined in (lambda m, x: torch.cat([x, torch.zeros_like(x)]), REFUSED[name]) * 2:  # of one layout
        both = Model(lambda m, x, joined=joined: m.a(joined(m, x)), a=step.a, t=step.t)
        record = record_of(both, mean_of_squares, torch.randn(5, 4))
        reasons = " ".join([*record.unsupported.values(), *record.axis_lost])
        named = "`cat` puts rows of the batch beside rows that belong to no sample" in reasons
        assert named == (joined is REFUSED[name])


INITIAL = {
    "expand": lambda m, size: m.r.expand(-1, size, -1),
    "contiguous": lambda m, size: m.r.expand(-1, size, -1).contiguous(),
    "repeat": lambda m, size: m.r.repeat(1, size, 1),
    "computed": lambda m, size: m.r.exp().expand(-1, size, -1).contiguous().tanh().clone(),
    "constant": lambda m, size: torch.full((len(m.r), size, m.r.size(-1)), 0.3),
}
KINDS: dict[str, Callable[..., nn.Module]] = {
    "gru": nn.GRU,
    "lstm": nn.LSTM,
    "rnn": nn.RNN,
    "lstm-deep": lambda *args, **options: nn.LSTM(*args, num_layers=2, bidirectional=True, **options),
    "gru-deep": lambda *args, **options: nn.GRU(*args, num_layers=2, bidirectional=True, **options),
}


LENGTHS = [[2, 4, 3, 1], [4, 3, 3, 1], [1, 2, 3, 4], [3]]


@pytest.mark.parametrize(("kind", "initial", "lengths"), in_turn(product(KINDS, INITIAL), LENGTHS))
def test_learned_state_of_packed_sequences_in_any_order(kind: str, initial: str, lengths: list[int]) -> None:
    step = nn.Module()
    step.a = KINDS[kind](3, 2, batch_first=True)
    step.r = parameter(4 if "deep" in kind else 1, 1, 2)
    x = torch.randn(len(lengths), 4, 3)

    def loss(m: Any, x: Tensor, lengths: Tensor, *, listed: bool = False) -> Tensor:
        state = INITIAL[initial](m, len(x))
        state = (state, INITIAL[initial](m, len(x)) * 2) if isinstance(m.a, nn.LSTM) else state
        many = lengths.tolist() if listed else lengths
        packed = nn.utils.rnn.pack_padded_sequence(x, many, batch_first=True, enforce_sorted=False)
        out, last = m.a(packed, state)
        last = sum(last) if isinstance(last, tuple) else last
        padded = nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=4)[0]
        return (padded.square().sum((1, 2)) + last.transpose(0, 1).flatten(1).exp().sum(1)).mean()

    expected = loop(step, loss, (x, torch.tensor(lengths)))
    for listed in (False, True):
        record = record_of(step, lambda *args, listed=listed: loss(*args, listed=listed), x, torch.tensor(lengths))
        assert (record.unsupported, record.mixing, record.why_no_factor) == ({}, (), "")
        assert_values(record, expected)


def test_a_state_with_a_row_of_its_own_for_each_place_is_named() -> None:
    """Rows that are equal by chance: which of them a sample gets depends on the other samples."""
    step = nn.Module()
    step.a, step.t = nn.GRU(3, 2, batch_first=True), nn.Parameter(torch.zeros(1, 4, 2))

    def loss(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return m.a(packed, m.t)[1][-1].square().sum(1).mean()

    record = record_of(step, loss, torch.randn(4, 4, 3), torch.tensor([2, 4, 3, 1]))
    assert "`sort` works along the batch axis" in record.unsupported["t"]


@pytest.mark.parametrize("change", [lambda state: state, torch.tanh])
def test_a_laid_over_state_that_was_overwritten_without_gradient_is_not_of_copies(change: Any) -> None:
    step = nn.Module()
    step.a, step.r = nn.GRU(3, 2, batch_first=True), parameter(1, 1, 2)
    lengths = torch.tensor([2, 4, 3, 1])

    def loss(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        state = m.r.expand(1, len(x), 2).contiguous()
        with torch.no_grad():
            state[:, :1] = 0.7
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return m.a(packed, change(state))[1][-1].square().sum(1).mean()

    record = record_of(step, loss, torch.randn(4, 4, 3), lengths)
    assert "`sort` works along the batch axis" in record.unsupported["r"]


def test_rows_of_the_batch_that_are_taken_from_beside_others_are_exact() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.a(torch.cat([x, torch.full_like(x, torch.nan)])[: len(x)])

    assert_exact(Model(forward, a=nn.Linear(4, 3)), mean_of_squares, (torch.randn(5, 4),))
