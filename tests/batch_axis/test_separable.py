"""Numbers computed over the whole batch in ways of no family: known as sums over the samples where they are."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_persample.batch_axis import separable
from lightning_persample.capture.mode import expanded_weights
from tests.capture.reference import assert_values, loop, record_of

pytestmark = pytest.mark.usefixtures("double_precision")


def shares(losses: Tensor) -> Tensor:
    return torch.full_like(losses.detach(), 1 / len(losses))


def first(losses: Tensor) -> Tensor:
    return torch.zeros(len(losses), dtype=torch.int64)


SUMS = {
    "topk": lambda losses: losses.topk(len(losses)).values.sum(),
    "sort": lambda losses: losses.sort().values.sum(),
    "cumsum": lambda losses: losses.cumsum(0)[-1],
    "diag-trace": lambda losses: losses.diag().trace(),
    "diag-scaled": lambda losses: 0.5 * torch.trace(torch.diag(losses)),
    "scatter-add": lambda losses: torch.zeros(1).scatter_add(0, first(losses), losses).squeeze(),
    "index-add": lambda losses: torch.zeros(1).index_add(0, first(losses), losses)[0],
    "index-add-in-place": lambda losses: torch.zeros(1).index_add_(0, first(losses), losses).sum(),
    "index-put": lambda losses: torch.zeros(1).index_put((first(losses),), losses, accumulate=True)[0],
    "linear": lambda losses: F.linear(losses, torch.ones(1, len(losses))).squeeze(),
    "addmv": lambda losses: torch.addmv(torch.zeros(1), torch.ones(1, len(losses)), losses)[0],
    "multi-dot": lambda losses: torch.linalg.multi_dot([losses, torch.ones(len(losses))]),
    "norm-squared": lambda losses: torch.linalg.vector_norm(losses) ** 2,
    "norm-times-itself": lambda losses: losses.norm() * losses.norm(),
    "norm-of-absolutes": lambda losses: torch.linalg.vector_norm(losses, 1),
    "ldexp": lambda losses: torch.ldexp(losses.cumsum(0)[-1], torch.tensor(-3)),
    "root-of-a-square": lambda losses: (losses.sum() ** 2).sqrt(),
    "logarithm-of-an-exponential": lambda losses: 0.5 * (losses.sum() / 64).exp().log(),
    "flooded": lambda losses: (losses.sum() - 1e4).abs() + 1e4,
    "determinant": lambda losses: torch.logdet(torch.diag(torch.exp(losses))),
    "determinant-by-its-root": lambda losses: (
        2 * torch.linalg.cholesky(torch.diag(losses.exp())).diagonal().log().sum()
    ),
    "trapezoid-and-the-ends": lambda losses: torch.trapezoid(
        torch.cat([torch.zeros(1), losses.cumsum(0).diff(prepend=torch.zeros(1)), torch.zeros(1)])
    ),
}
MEANS = {
    "topk": lambda losses: losses.topk(len(losses)).values.mean(),
    "sort": lambda losses: losses.sort(descending=True)[0].mean(),
    "msort": lambda losses: losses.msort().mean(),
    "cumsum": lambda losses: losses.cumsum(0)[-1] / len(losses),
    "cumsum-of-parts": lambda losses: (losses.cumsum(0) / len(losses))[-1],
    "diag-trace": lambda losses: losses.diag().trace() / len(losses),
    "linear": lambda losses: F.linear(losses, shares(losses)[None]),
    "linear-of-one-axis": lambda losses: F.linear(losses, shares(losses)),
    "matmul": lambda losses: losses @ shares(losses),
    "mv": lambda losses: torch.mv(shares(losses)[None], losses).sum(),
    "einsum": lambda losses: torch.einsum("b,b->", losses, shares(losses)),
    "convolution": lambda losses: F.conv1d(losses[None, None], shares(losses)[None, None]).sum(),
    "pool": lambda losses: F.avg_pool1d(losses[None], len(losses)).sum(),
    "adaptive-pool": lambda losses: F.adaptive_avg_pool1d(losses[None], 1).squeeze(),
    "scatter-reduce": lambda losses: torch.zeros(1).scatter_reduce(
        0, first(losses), losses, "mean", include_self=False
    ),
    "segments": lambda losses: torch.segment_reduce(losses, "mean", lengths=torch.tensor([len(losses)])).sum(),
    "norm-squared": lambda losses: torch.linalg.vector_norm(losses) ** 2 / len(losses),
    "square-of-a-root": lambda losses: losses.mean().sqrt().square(),
    "flooded": lambda losses: (losses.mean() - 1e4).abs() + 1e4,
    "ldexp": lambda losses: torch.ldexp(losses.mean(), torch.tensor(-3)),
    "kron": lambda losses: torch.kron(losses, torch.ones(1)).mean(),
}
OF_RESIDUALS = {
    "vector-norm": lambda r, n: torch.linalg.vector_norm(r) ** 2 / n,
    "norm": lambda r, n: r.norm().square().div(n),
    "matrix-norm": lambda r, n: torch.linalg.matrix_norm(r).pow(2) / n,
    "dist": lambda r, n: torch.dist(r, torch.zeros(())).square() / n,
    "product": lambda r, n: (r @ r.T).trace() / n,
    "product-of-columns": lambda r, n: (r.T @ r).trace() / n,
    "third-powers": lambda r, n: torch.linalg.vector_norm(r, 3) ** 3 / n,
    "product-by-a-unit-matrix": lambda r, n: (r[:, 0] @ torch.eye(n) @ r[:, 0]) / n,
    "product-by-a-mean": lambda r, n: r[:, 0] @ (torch.eye(n) / n) @ r[:, 0],
    "entries-on-the-diagonal": lambda r, n: ((r @ r.T) * torch.eye(n)).sum() / n,
    "product-divided-first": lambda r, n: (r @ r.T / n).trace(),
    "product-times-a-share": lambda r, n: torch.trace((1 / n) * (r @ r.T)),
    "product-divided-by-a-tensor": lambda r, n: (r @ r.T).div(torch.tensor(float(n))).trace(),
    "exponentials": lambda r, n: r.flatten().logsumexp(0).exp() / n,
}  # fmt: skip


def losses_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum(1)


def assert_known_as(true: str, declared: str, module: nn.Module, loss: Callable[..., Tensor], batch: Tensor) -> None:
    """The values are the loop's without a note under the right reduction, and the wrong one is named."""
    record = record_of(module, loss, batch, loss_reduction=declared)
    assert (record.mixing, record.axis_lost) == ((), ())
    if declared == true:
        assert record.weighting == ()
        assert_values(record, loop(module, loss, (batch,)))
    else:
        (text,) = record.weighting
        assert text.startswith(f"the loss is a {true} over the samples, but loss_reduction is '{declared}'")


@pytest.mark.parametrize("declared", ["mean", "sum"])
@pytest.mark.parametrize(("true", "name"), [*(("sum", name) for name in SUMS), *(("mean", name) for name in MEANS)])
def test_a_number_that_is_a_sum_over_the_samples_is_known_as_one(true: str, name: str, declared: str) -> None:
    module, batch, reduce = nn.Linear(6, 4), torch.randn(7, 6), (SUMS if true == "sum" else MEANS)[name]

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return reduce(losses_of(m, x)).squeeze()

    assert_known_as(true, declared, module, loss, batch)


@pytest.mark.parametrize("name", OF_RESIDUALS)
def test_a_function_of_all_residuals_that_is_a_sum_is_known_as_one(name: str) -> None:
    module, batch = nn.Linear(6, 4), torch.randn(7, 6)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return OF_RESIDUALS[name](m(x) - x[:, :4], len(x))

    assert_known_as("mean", "mean", module, loss, batch)
    assert_known_as("mean", "sum", module, loss, batch)


@pytest.mark.parametrize("name", ["norm-squared", "norm-times-itself", "root-of-a-square"])
def test_a_number_in_a_checkpoint_is_known_as_outside(name: str) -> None:
    module, batch = nn.Linear(6, 4), torch.randn(7, 6)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda h: SUMS[name](losses_of(m, h)), x, use_reentrant=False)

    assert_known_as("sum", "sum", module, loss, batch)
    assert_known_as("sum", "mean", module, loss, batch)


@pytest.mark.parametrize("scale", [lambda s: s.exp(), lambda s: s, lambda s: 1 / s.square()])
@pytest.mark.parametrize(("true", "declared"), [("mean", "sum"), ("sum", "mean")])
def test_a_learned_scale_does_not_hide_which_of_the_two_a_loss_is(true: str, declared: str, scale) -> None:
    module, batch = nn.Linear(6, 4), torch.randn(7, 6)
    module.scale = nn.Parameter(torch.tensor(0.3))
    record = record_of(
        module, lambda m, x: getattr(losses_of(m, x), true)() * scale(m.scale), batch, loss_reduction=declared
    )
    (text,) = record.weighting
    assert text.startswith(f"the loss is a {true} over the samples, but loss_reduction is '{declared}'")


CHOOSES = {
    "hardest": (3, lambda losses: losses.topk(3).values.mean()),
    "easiest": (3, lambda losses: losses.sort().values[:3].mean()),
    "trimmed": (5, lambda losses: losses.sort().values[1:-1].mean()),
    "maximum": (1, lambda losses: losses.max()),
    "minimum": (1, lambda losses: losses.amin(0)),
    "median": (1, lambda losses: losses.median()),
    "between": (2, lambda losses: losses[:6].quantile(0.5)),
    "third": (1, lambda losses: losses.kthvalue(3).values),
    "largest-until-the-last": (1, lambda losses: losses.cummax(0).values[-1]),
    "maximum-that-keeps-its-axis": (1, lambda losses: losses.max(0, keepdim=True).values.sum()),
    "minimum-over-every-axis": (1, lambda losses: torch.stack([losses, losses + 1], 1).amin((0, -1), True).squeeze()),
    "largest-of-a-number-each": (1, lambda losses: losses.topk(1, -1, True, True).values.squeeze()),
    "maximum-by-a-mask": (1, lambda losses: torch.masked.amax(losses, 0, mask=losses.detach() > 0)),
}


@pytest.mark.parametrize("name", CHOOSES)
def test_samples_that_are_chosen_have_their_gradients_and_the_others_none(name: str) -> None:
    """What is chosen weighs alike: values are those of the loop, and nothing is said."""
    module, batch, (count, choose) = nn.Linear(6, 4), torch.randn(7, 6), CHOOSES[name]
    losses = losses_of(module, batch).detach().requires_grad_()
    choose(losses).backward()
    places = losses.grad.nonzero().flatten()
    assert len(places) == count
    record = record_of(module, lambda m, x: choose(losses_of(m, x)), batch)
    assert (record.mixing, record.axis_lost, record.weighting) == ((), (), ())
    assert record.samples.tolist() == places.tolist()
    expected = loop(module, lambda m, x: losses_of(m, x).sum(), (batch,))
    for parameter, values in record.grad_samples.items():
        torch.testing.assert_close(values, expected[parameter][places], rtol=1e-9, atol=1e-12)


ENTRIES_CHOSEN = {
    "largest": lambda z: z.amax(0).sum(),
    "smallest": lambda z: z.min(0).values.mean(),
    "sorted": lambda z: z.sort(0, descending=True).values[0].sum(),
    "middle": lambda z: z.median(0).values.sum(),
    "quantile": lambda z: z.quantile(0.5, 0).sum(),
    "hardest-of-all": lambda z: z.flatten().topk(len(z)).values.mean(),
    "stacked": lambda z: torch.stack(list(z.unbind())).amax(0).sum(),
}


@pytest.mark.parametrize("name", ENTRIES_CHOSEN)
def test_entries_of_a_sample_that_are_chosen_beside_those_of_others_are_named(name: str) -> None:
    """Also where as many of each sample are chosen: which ones is up to the others."""
    module, choose = nn.Linear(5, 5), ENTRIES_CHOSEN[name]
    for _ in range(10):
        largest = torch.eye(5)[torch.randperm(5)]
        batch = (4 * (largest + 2 * largest.roll(1, 0) * (name in ("middle", "quantile"))) + torch.rand(5, 5)).roll(1)
        module.weight.data, module.bias.data = torch.eye(5), torch.zeros(5)
        for reduction in ("sum", "mean"):
            record = record_of(module, lambda m, x: choose(m(x)), batch, loss_reduction=reduction)
            assert (*record.mixing, *record.axis_lost) != ()


MIXES = {
    "norm": lambda z, x: z.norm(),
    "third-power-of-a-norm": lambda z, x: z.norm() ** 3,
    "norm-and-its-square": lambda z, x: (lambda n: n + n**2)(z.norm()),
    "log-of-exponentials": lambda z, x: z.flatten().logsumexp(0),
    "product": lambda z, x: z.square().sum(1).prod(),
    "deviation": lambda z, x: z.std(),
    "ranks": lambda z, x: (z[:, 0].sort().values - torch.arange(len(z))).square().mean(),
    "weights-by-rank": lambda z, x: z.square().sum(1).sort().values @ torch.arange(1.0, 1 + len(z)),
    "root-and-its-square": lambda z, x: (lambda r: r + r.square())(z.square().mean().sqrt()),
    "exponential": lambda z, x: (z.square().mean() / 1e4).exp(),
    "covariance": lambda z, x: z[:, 0] @ (torch.eye(len(z)) + 0.1) @ z[:, 0],
    "rows-that-weigh-unequally": lambda z, x: z[:, 0] @ torch.arange(1.0, 1 + len(z)).diag() @ z[:, 0],
    "exponents-changed-in-place": lambda z, x: (z.flatten().logsumexp(0) * 1).mul_(-2).exp(),
    "distances": lambda z, x: torch.cdist(z, z).sum(),
    "distances-of-absolutes": lambda z, x: torch.cdist(z, z, p=1).sum(),
    "neighbours": lambda z, x: z.square().sum(1).cumsum(0).square().sum(),
    "neighbours-averaged": lambda z, x: F.avg_pool1d(z.sum(1)[None], 2).square().sum(),
    "softmax": lambda z, x: (z.sum(1).softmax(0) * z.sum(1)).sum(),
    "unequal-numbers-of-patches": lambda z, x: F.unfold(z[:, 0].reshape(1, 1, -1, 1), 3, padding=1).square().sum(),
    "determinant": lambda z, x: (z.T @ z).logdet(),
}


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("name", MIXES)
def test_a_number_that_is_no_sum_over_the_samples_is_named(name: str, scale: float) -> None:
    batch = torch.randn(7, 6)
    for _ in range(2):
        record = record_of(nn.Linear(6, 4), lambda m, x: MIXES[name](scale * m(x), x), batch)
        assert (*record.mixing, *record.axis_lost) != ()


def test_a_number_is_looked_at_as_at_first_where_other_constants_go_into_it() -> None:
    batch, rows = torch.randn(8, 6), torch.arange(8)
    swaps = [
        rows.index_put((torch.tensor(two),), torch.tensor(two[::-1])) for two in itertools.combinations(range(8), 2)
    ]
    for places in (rows, *swaps):
        record = record_of(nn.Linear(6, 2), lambda m, x, by=places: (m(x) @ m(x).T)[rows, by].sum(), batch)
        assert bool((*record.mixing, *record.axis_lost)) == (places is not rows)
        separable._NO_SUM.clear()


WEIGHS = {
    "linear": lambda losses: F.linear(losses, torch.arange(1.0, 1 + len(losses))),
    "trapezoid": lambda losses: torch.trapezoid(losses),
    "cumsum": lambda losses: losses.cumsum(0).sum(),
    "pool": lambda losses: F.avg_pool1d(losses[None], 3, 2, 1).sum(),
}


@pytest.mark.parametrize("name", WEIGHS)
def test_a_sum_in_which_the_samples_weigh_unequally_is_named_so(name: str) -> None:
    for _ in range(3):  # also where the line is known from an earlier step
        record = record_of(nn.Linear(6, 4), lambda m, x: WEIGHS[name](losses_of(m, x)), torch.randn(7, 6))
        assert (record.mixing, record.axis_lost) == ((), ())
        (text,) = record.weighting
        assert "gives the samples unequal weights at test_separable.py:" in text


def test_what_is_said_of_a_norm_is_said_of_each_backward_that_goes_through_it_alone() -> None:
    module, batch = nn.Linear(6, 4), torch.randn(7, 6)
    with expanded_weights(module, batch, unsupported="ignore") as capture:
        norm = module(batch).norm()
        square = norm**2
        (square / 7).backward(retain_graph=True)
        (square + 1e-9 * norm).backward(retain_graph=True)
        norm.backward(retain_graph=True)
        square.backward()
    assert [record.mixing != () for record in capture.records] == [False, True, True, False]


@pytest.mark.parametrize(
    "read", [lambda t: t[0], lambda t: t[:1].squeeze(), lambda t: t.view(-1)[-1], lambda t: t.clone()[0]]
)
@pytest.mark.parametrize("reduce", [lambda z: z.amax(0), lambda z: z.sort(0).values[0], lambda z: z.cumsum(0)[2]])
def test_one_entry_that_is_read_excuses_no_other(
    reduce: Callable[[Tensor], Tensor], read: Callable[[Tensor], Tensor]
) -> None:
    def loss(m: nn.Module, x: Tensor) -> Tensor:
        over_the_batch = reduce(m(x))
        read(over_the_batch)  # as for a log
        return (over_the_batch * m.bias).square().sum()

    assert record_of(nn.Linear(6, 4), loss, torch.randn(7, 6)).mixing != ()


def test_samples_that_meet_before_are_named_all_the_same() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    record = record_of(module, lambda m, x: m(x).norm() ** 2 / len(x), torch.randn(7, 6))
    assert any("`batch_norm` on" in text for text in record.mixing)


def test_nothing_of_the_step_changes_where_a_number_is_looked_at() -> None:
    """Random numbers, hooks and gradients are those of a step without a capture."""
    found = []
    for observed in (False, True):
        torch.manual_seed(0)
        module, batch, seen = nn.Linear(6, 4), torch.randn(7, 6), []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with expanded_weights(module, batch, unsupported="ignore") if observed else warnings.catch_warnings():
                losses = losses_of(module, batch)
                losses.register_hook(lambda grad, seen=seen: seen.append(grad.clone()))
                (
                    torch.linalg.vector_norm(F.dropout(losses.sort().values)) ** 2 * 0 + losses.cumsum(0)[-1] / 7
                ).backward()
        found.append((*(p.grad for p in module.parameters()), *seen, torch.rand(3)))
    assert len(found[0]) == len(found[1]) == 4
    assert all(map(torch.equal, *found))


class Unseen(torch.autograd.Function):
    """A loss in a custom autograd function: its calls run without gradient."""

    @staticmethod
    def forward(ctx, losses, reduce):
        ctx.save_for_backward(losses)
        ctx.reduce = reduce
        return reduce(losses)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            losses = ctx.saved_tensors[0].detach().requires_grad_()
            return *torch.autograd.grad(ctx.reduce(losses), losses, grad), None


def one_by_one(losses: Tensor) -> Tensor:
    total = losses.new_zeros(())
    for place in range(len(losses)):
        total = total + losses[place]
    return total / len(losses)


IN_A_FUNCTION = {
    "sum": ("sum", lambda losses: losses.sum()),
    "sum-scaled": ("sum", lambda losses: -0.5 * -losses.sum()),
    "sum-of-two": ("sum", lambda losses: losses.sum() + 0.1 * losses.sum()),
    "mean": ("mean", lambda losses: losses.mean()),
    "mean-by-hand": ("mean", lambda losses: losses.sum() / len(losses)),
    "mean-by-a-count": ("mean", lambda losses: losses.sum() / (losses >= 0).sum()),
    "mean-by-a-bounded-count": ("mean", lambda losses: losses.sum() / (losses >= 0).sum().clamp(min=1)),
    "one-by-one": ("mean", one_by_one),
    "sum-on-a-constant": ("sum", lambda losses: losses.new_zeros(()) + losses.sum()),
    "sum-between-two": ("sum", lambda losses: torch.lerp(losses.sum(), 3 * losses.sum(), 0.3)),
    "mean-and-a-share-of-another": ("mean", lambda losses: torch.add(losses.mean(), losses.mean(), alpha=0.3)),
    "means-stacked": ("mean", lambda losses: torch.stack([losses.mean(), 3 * losses.mean()]).sum()),
}


@pytest.mark.parametrize("after", [lambda each: each, lambda each: 2 * each])
@pytest.mark.parametrize("declared", ["mean", "sum"])
@pytest.mark.parametrize("name", IN_A_FUNCTION)
def test_a_sum_in_a_custom_function_is_known_as_one(name: str, declared: str, after) -> None:
    module, batch, (true, reduce) = nn.Linear(6, 4), torch.randn(7, 6), IN_A_FUNCTION[name]

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return after(Unseen.apply(losses_of(m, x), reduce))

    assert_known_as(true, declared, module, loss, batch)


MIXED_IN_A_FUNCTION = {
    "log-of-exponentials": (lambda losses: losses.logsumexp(0), "`logsumexp` reduces over the batch axis"),
    "root": (lambda losses: losses.mean().sqrt(), "`sqrt` of a value computed over the whole batch is not a sum"),
    "product": (lambda losses: losses[:, None] * losses, "`mul` meets two tensors of the batch"),
    "sums-so-far": (lambda losses: losses.cumsum(0), "`cumsum` works along the batch axis"),
    "shares": (lambda losses: losses.softmax(0).square(), "`softmax` works along the batch axis"),
}


@pytest.mark.parametrize("after", [Tensor.sum, lambda each: each.mean() / 7, lambda each: each.sum().exp().log()])
@pytest.mark.parametrize("name", MIXED_IN_A_FUNCTION)
def test_samples_that_meet_in_a_custom_function_are_named(name: str, after) -> None:
    reduce, text = MIXED_IN_A_FUNCTION[name]
    module, batch = nn.Linear(6, 4), torch.randn(7, 6)
    record = record_of(module, lambda m, x: after(Unseen.apply(losses_of(m, x), reduce)), batch)
    assert any(each.startswith(text) for each in record.mixing), record.mixing
    beside = record_of(
        module, lambda m, x: losses_of(m, x).mean() + after(Unseen.apply(losses_of(m, x), reduce)), batch
    )
    assert any(each.startswith(text) for each in beside.mixing), beside.mixing


def test_a_function_of_the_users_that_counts_its_calls_runs_as_often_as_without() -> None:
    calls: list[int] = []

    @torch.overrides.wrap_torch_function(lambda losses: (losses,))
    def annealed(losses: Tensor) -> Tensor:
        calls.append(1)
        return losses.square().sum() * (1 + 0.1 * len(calls))

    module, x = nn.Linear(3, 1), torch.randn(4, 3)
    values, counts = [], []
    for observed in (True, False):
        calls.clear()
        module.zero_grad()
        if observed:
            with warnings.catch_warnings(), expanded_weights(module, x, loss_reduction="sum"):
                warnings.simplefilter("ignore")
                annealed(losses_of(module, x)).backward()
        else:
            annealed(losses_of(module, x)).backward()
        values.append(module.weight.grad.clone())
        counts.append(len(calls))
    assert torch.equal(values[0], values[1])
    assert counts[0] == counts[1] == 1


@pytest.mark.parametrize("size", [*range(3, 11), 5000])
def test_a_gradient_that_depends_on_another_sample_in_one_direction_alone_is_named(size: int) -> None:
    rows = torch.arange(size).clamp(max=size - 2)  # torch gives the overwritten row the gradient of the other

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return torch.zeros(size, 3).index_copy(0, rows, m(x)).square().mean()

    record = record_of(nn.Linear(4, 3), loss, torch.randn(size, 4))
    assert any("`index_copy` takes places along the batch axis" in text for text in record.axis_lost)
