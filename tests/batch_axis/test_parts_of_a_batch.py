"""A loss of some samples alone: their gradients are exact, and the others have none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample import expanded_weights
from tests.capture.reference import loop

pytestmark = pytest.mark.usefixtures("double_precision")

B, BOTH = 10, ("sq_norm", "grad_sample")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(B, 5), torch.randint(0, 3, (B,))


def loss_of(module: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(module(inputs), labels)


CUTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "chunk": lambda x: x.chunk(4),
    "split": lambda x: x.split([1, 5, 4]),
    "slices": lambda x: tuple(x[start : start + 4] for start in range(0, B, 4)),
    "narrow": lambda x: tuple(x.narrow(0, start, 2) for start in range(0, B, 2)),
    "indices": lambda x: tuple(x[torch.tensor(rows)] for rows in ([7, 2, 5], [0, 1, 3, 4], [9, 8, 6])),
    "masks": lambda x: tuple(x[torch.arange(B) % 3 == rest] for rest in range(3)),
    "one-by-one": lambda x: tuple(x[i : i + 1] for i in range(B)),
}


@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", CUTS)
def test_each_part_with_a_backward_of_its_own_is_exact(name: str, reduction: str, factor: float) -> None:
    module, (inputs, labels) = network(), batch()

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return factor * F.cross_entropy(m(x), y, reduction=reduction)

    expected = loop(module, loss, (inputs, labels))
    with expanded_weights(module, (inputs, labels), loss_reduction=reduction, quantities=BOTH) as capture:
        for part in zip(CUTS[name](inputs), CUTS[name](labels), strict=True):
            loss(module, *part).backward()
    seen: list[int] = []
    for record in capture.records:
        assert (record.mixing, record.axis_lost, record.weighting, record.unsupported) == ((), (), (), {})
        assert record.samples is not None
        own = record.samples.tolist()
        seen += own
        for parameter, grads in expected.items():
            torch.testing.assert_close(record.grad_samples[parameter], grads[own], rtol=1e-9, atol=1e-12)
            squares = grads[own].flatten(1).square().sum(1)
            torch.testing.assert_close(record.sq_norms[parameter], squares, rtol=1e-9, atol=1e-12)
        assert (len(record.norms()), record.in_loss) == (len(own), len(own))
        assert record.nonfinite().tolist() == []
    assert sorted(seen) == list(range(B))


def one_loss(name: str) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    """All samples in one loss, each of them with weight 1/B."""

    def by_parts(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        parts = [loss_of(module, *part) for part in zip(x.split(len(x) // 2), y.split(len(y) // 2), strict=True)]
        return sum(parts) / 2 if name == "added" else torch.stack(parts).mean()

    def one_by_one(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([loss_of(module, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]).mean()

    return one_by_one if name == "one by one" else by_parts


@pytest.mark.parametrize("name", ["added", "stacked", "one by one"])
def test_parts_of_one_size_that_are_put_together_raise_no_alarm(name: str) -> None:
    module, data = network(), batch()
    expected = loop(module, loss_of, data)
    with expanded_weights(module, data, quantities=BOTH) as capture:
        one_loss(name)(module, *data).backward()
    record = capture.record
    assert (record.mixing, record.axis_lost, record.weighting, record.samples) == ((), (), (), None)
    for parameter, grads in expected.items():
        torch.testing.assert_close(record.grad_samples[parameter], grads, rtol=1e-9, atol=1e-12)


UNEQUAL: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "sizes": lambda m, x, y: loss_of(m, x[:3], y[:3]) + loss_of(m, x[3:], y[3:]),
    "overlap": lambda m, x, y: loss_of(m, x[:6], y[:6]) + loss_of(m, x[4:], y[4:]),
    "all-and-some": lambda m, x, y: loss_of(m, x, y) + loss_of(m, x[:5], y[:5]),
    "stacked": lambda m, x, y: torch.stack([loss_of(m, x[:3], y[:3]), loss_of(m, x[3:], y[3:])]).mean(),
    "picked-again": lambda m, x, y: torch.stack([loss_of(m, x[:5], y[:5]), loss_of(m, x[5:], y[5:])])[0],
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_means_over_unequal_parts_are_said(name: str) -> None:
    module, data = network(), batch()
    with expanded_weights(module, data, unsupported="ignore") as capture:
        UNEQUAL[name](module, *data).backward()
    (text,) = capture.record.weighting
    what = "picks from values of different samples" if name == "picked-again" else "or over some twice"
    assert f"{what} at test_parts_of_a_batch.py" in text


CHOSEN: dict[str, Callable[[Tensor], Tensor]] = {
    "maximum": lambda each: each.sum() + each.max(),
    "less the minimum": lambda each: each.sum() - each.amin(),
    "largest": lambda each: each.topk(3).values.sum() + each.sum(),
    "sorted": lambda each: torch.stack([each.sum(), 0.5 * each.sort().values[-2:].sum()]).sum(),
    "places": lambda each: each.sum() + each[each.topk(3).indices].sum(),
    "places of some": lambda each: each[each.argsort()[-2:]].sum() + each.sum(),
    "index_select": lambda each: each.sum() + 0.5 * each.index_select(0, each.topk(3).indices).square().sum(),
    "two choices": lambda each: each.topk(3).values.sum() + torch.relu(each.max()),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_samples_that_their_values_choose_a_second_time_are_said(name: str) -> None:
    module, (inputs, labels) = network(), batch()
    with expanded_weights(module, (inputs, labels), loss_reduction="sum", unsupported="ignore") as capture:
        CHOSEN[name](F.cross_entropy(module(inputs), labels, reduction="none")).backward()
    (text,) = capture.record.weighting
    assert "takes samples a second time that the values of the whole batch choose at test_parts_of_a_batch.py" in text


JOINED: dict[str, Callable[[Tensor], Tensor]] = {
    "maximum": lambda each: torch.cat([each, each.max()[None]]).sum(),
    "largest": lambda each: torch.cat([each, each[each.topk(3).indices]]).sum(),
    "smallest-first": lambda each: torch.cat([each[each.argsort()[:2]], each]).sum(),
}


@pytest.mark.parametrize("name", JOINED)
def test_rows_that_their_values_choose_to_be_joined_a_second_time_are_said(name: str) -> None:
    module, (inputs, labels) = network(), batch()
    with expanded_weights(module, (inputs, labels), loss_reduction="sum", unsupported="ignore") as capture:
        JOINED[name](F.cross_entropy(module(inputs), labels, reduction="none")).backward()
    assert any("`cat` meets samples by their places in an order" in text for text in capture.record.weighting)


@pytest.mark.parametrize(
    "term",
    [lambda each: 0.0 * each.max(), lambda each: 0 * each.topk(3).values.mean(), lambda each: each.max().detach()],
)
def test_a_choice_that_does_not_count_raises_no_alarm(term: Callable[[Tensor], Tensor]) -> None:
    module, data = network(), batch()
    expected = loop(module, loss_of, data)
    with expanded_weights(module, data, quantities=BOTH, unsupported="error") as capture:
        each = F.cross_entropy(module(data[0]), data[1], reduction="none")
        (each.mean() + term(each)).backward()
    assert capture.record.weighting == ()
    for parameter, grads in expected.items():
        torch.testing.assert_close(capture.record.grad_samples[parameter], grads, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("order", ["aab", "aba", "baa"])
def test_a_part_that_is_added_twice_counts_twice_in_any_order(order: str) -> None:
    module, (inputs, labels) = network(), batch()
    with expanded_weights(module, (inputs, labels), quantities=BOTH) as captured:
        each = F.cross_entropy(module(inputs), labels, reduction="none")
        parts = {"a": each[: B // 2], "b": each[B // 2 :]}
        first, second, third = (parts[name].mean() for name in order)
        (first + second + third).backward()
    assert captured.record.weighting == ()
    times = torch.tensor([4.0 if sample < B // 2 else 2.0 for sample in range(B)])
    for name, grads in loop(module, loss_of, (inputs, labels)).items():
        found = captured.record.grad_samples[name]
        torch.testing.assert_close(found, grads * times.view(-1, *(1,) * (grads.dim() - 1)))


def test_notes_are_those_of_their_own_backward() -> None:
    """Neither those of an earlier backward, nor those of a number that is only looked at."""
    module, (inputs, labels) = network(), batch()
    with expanded_weights(module, (inputs, labels), unsupported="ignore") as capture:
        hard = F.cross_entropy(module(inputs), torch.where(labels == 0, -100, labels))
        loss_of(module, inputs, labels).backward()
        hard.backward()
        module(inputs).std().backward()
        loss_of(module, inputs, labels).backward()
    plain, weighed, mixed, again = capture.records
    assert (plain.weighting, plain.mixing, again.weighting, again.mixing) == ((), (), (), ())
    assert len(weighed.weighting) == 1
    assert (weighed.mixing, weighed.axis_lost) == ((), ())
    assert len(mixed.mixing) == 1
    assert mixed.weighting == ()


def test_a_backward_of_a_penalty_alone_has_no_record() -> None:
    module, (inputs, labels) = network(), batch()
    with expanded_weights(module, (inputs, labels)) as capture:
        loss_of(module, inputs, labels).backward()
        sum(0.1 * parameter.square().sum() for parameter in module.parameters()).backward()
    assert [record.coverage for record in capture.records] == [1.0]


def test_gradients_that_the_user_keeps_stay_as_they_are() -> None:
    module, (inputs, labels) = network(), batch()
    with expanded_weights(module, (inputs, labels), loss_reduction="sum", quantities=BOTH) as capture:
        outputs = module(inputs)
        outputs.retain_grad()
        F.cross_entropy(outputs[:4], labels[:4], reduction="sum").backward()
    assert capture.record.samples is not None
    assert capture.record.samples.tolist() == [0, 1, 2, 3]
    assert outputs.grad is not None
    assert outputs.grad[4:].eq(0).all()


def windows(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Some windows of some sequences, drawn at random."""
    rows = torch.randperm(x.size(0) * (x.size(1) - 3), generator=torch.Generator().manual_seed(3))[:7]
    return x.unfold(1, 4, 1).flatten(0, 1)[rows], mask.unfold(1, 4, 1).flatten(0, 1)[rows][:, -1]


WINDOWED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked-mean": lambda losses, mask: (losses * mask).sum() / mask.sum(),
    "mean": lambda losses, mask: losses.mean(),
    "picked": lambda losses, mask: losses[mask > 0].sum() / (mask > 0).sum(),
}


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_drawn_in_the_step_give_shares_of_their_own_samples_alone(name: str) -> None:
    """B times each sample's share, and nothing of a sample without a window; one text says so."""
    torch.manual_seed(4)
    module, x, mask = nn.Linear(4, 1), torch.randn(6, 9), (torch.rand(6, 9) > 0.3).double()
    with expanded_weights(module, (x, mask), unsupported="ignore", quantities=BOTH) as capture:
        rows, kept = windows(x, mask)
        WINDOWED[name]((module(rows).squeeze(1) - 1).square(), kept).backward()
    record, drawn = capture.record, windows(torch.arange(6.0)[:, None].expand(6, 9), mask)[0][:, 0]
    if name == "picked":
        drawn = drawn[kept > 0]
    present = drawn.unique().long().tolist()
    assert 1 < len(present) < 6
    assert record.samples is not None
    assert record.samples.tolist() == present
    assert len(record.weighting) == 1
    assert (record.mixing, record.axis_lost) == ((), ())
    for place, sample in enumerate(present):
        alone = torch.zeros(6, 9).index_fill(0, torch.tensor([sample]), 1.0)
        share = WINDOWED[name]((module(rows).squeeze(1) - 1).square() * windows(alone, mask)[0][:, 0], kept)
        (expected,) = torch.autograd.grad(6 * share, module.weight)
        torch.testing.assert_close(record.grad_samples["weight"][place], expected)
    torch.testing.assert_close(record.grad_samples["weight"].sum(0) / 6, module.weight.grad)


def test_windows_that_weigh_alike_are_the_mean_of_their_samples() -> None:
    module, (inputs, _) = network(), batch()
    kept = torch.tensor([7, 2, 5])

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().sum(1).sum()

    with expanded_weights(module, inputs, unsupported="ignore", quantities=BOTH) as capture:
        loss(module, inputs[kept]).div(torch.ones_like(inputs[kept][:, 0]).sum()).backward()
        (loss(module, inputs[kept]) / (inputs[kept][:, 0] < 99).sum()).backward()
    expected = loop(module, loss, (inputs,))
    for record in capture.records:
        assert record.weighting == ()
        assert record.samples is not None
        assert record.samples.tolist() == [2, 5, 7]
        torch.testing.assert_close(record.grad_samples["0.weight"], expected["0.weight"][[2, 5, 7]])


def test_a_batch_of_which_no_sample_has_a_weight_has_no_values() -> None:
    module, x, y, weights = nn.Linear(5, 3), torch.randn(4, 5), torch.randn(4, 3), torch.zeros(4)
    with expanded_weights(module, (x, y), loss_reduction=weights) as capture:
        ((module(x) - y).square().mean(1) * weights).sum().backward()
    record = capture.record
    assert (record.in_loss, record.num_values, record.norms().tolist()) == (0, 0, [])
    assert record.nonfinite().tolist() == []


# What is read of the batch by a mask beside other indices, from an output z (B, 4, 4) and data x (B, 4)
BESIDE_A_MASK: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a-slice": lambda z, x: z[x[:, 0] > 0, 1:3],
    "a-number": lambda z, x: z[x[:, 0] > 0, 2],
    "a-number-behind": lambda z, x: z[x[:, 0] > 0, ..., -1],
    "a-list": lambda z, x: z[x[:, 0] > 0, :, 1:],
    "classes": lambda z, x: z[x[:, 0] > 0, 1, x.argmax(1)[x[:, 0] > 0]],
    "two-axes-and-a-slice": lambda z, x: z[x > 0, 1:],
    "two-axes-and-a-number": lambda z, x: z[x > 0, 3],
    "two-axes-and-classes": lambda z, x: z[x > 0, (x * 7).long().remainder(4)[x > 0]],
    "a-new-axis": lambda z, x: z[x[:, 0] > 0, None, :2],
    "samples-behind": lambda z, x: z.transpose(0, 1)[1:, x[:, 0] > 0],
    "bytes": lambda z, x: z[(x[:, 0] > 0).byte(), 1:],
    "entries-of-all": lambda z, x: z[:, torch.tensor([True, False, True, True]), 1:],
    "entries-and-a-number": lambda z, x: z[:, torch.tensor([True, False, True, True]), 2],
}


def cubes_by_sample(read: Callable[[Tensor, Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda module, x: read(module(x).tanh().view(-1, 4, 4), x).pow(3).sum() / len(x)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", BESIDE_A_MASK)
def test_what_a_mask_beside_other_indices_reads_is_of_the_samples_that_it_says(name: str) -> None:
    module, x = nn.Linear(4, 16), torch.randn(4, 4)
    x[:, 0] = torch.tensor([0.5, -1.0, 2.0, 1.0])
    loss = cubes_by_sample(BESIDE_A_MASK[name])
    expected = loop(module, loss, (x,))
    with expanded_weights(module, x, quantities=BOTH) as capture:
        loss(module, x).backward()
    record = capture.record
    assert (record.coverage, record.mixing, record.axis_lost) == (1.0, (), ())
    own = list(range(4)) if record.samples is None else record.samples.tolist()
    left_out = [sample for sample in range(4) if sample not in own]
    for parameter, grads in expected.items():
        torch.testing.assert_close(record.grad_samples[parameter], grads[own], rtol=1e-9, atol=1e-12)
        assert not grads[left_out].any()


def test_rows_of_a_table_that_a_mask_of_the_samples_picks_beside_a_slice() -> None:
    table, x = torch.randn(4, 4, 4), torch.randn(4, 4)
    loss = cubes_by_sample(lambda z, x: z[x > 0, 1:] - table[x > 0, :3])
    module = nn.Linear(4, 16)
    with expanded_weights(module, x, quantities=BOTH) as capture:
        loss(module, x).backward()
    z = module(x).tanh().view(-1, 4, 4)
    for sample in range(4):
        own = x[sample] > 0
        alone = (z[sample, own, 1:] - table[sample, own, :3]).pow(3).sum()
        grads = torch.autograd.grad(alone, [*module.parameters()], retain_graph=True)
        for found, grad in zip(capture.record.grad_samples.values(), grads, strict=True):
            torch.testing.assert_close(found[sample], grad, rtol=1e-9, atol=1e-12)


MASKS_OF_OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "along-another-axis": lambda z, x: z[:, x[:, 0] > 0, 1:],
    "classes-of-others": lambda z, x: z[x[:, 0] > 0, 1, x.argmax(1).flip(0)[x[:, 0] > 0]],
    "of-a-mean": lambda z, x: z[:, x.mean(0) > -9, 1:],
    "places-of-others": lambda z, x: z[x > 0, (x * 7).long().remainder(4).flip(0)[x > 0]],
}


@pytest.mark.parametrize("name", MASKS_OF_OTHERS)
def test_what_a_mask_of_other_samples_reads_is_said(name: str) -> None:
    module, x = nn.Linear(4, 16), torch.tensor([0.5, 0.1, 0.2, 0.3]).repeat(4, 1)
    with expanded_weights(module, x, unsupported="ignore") as capture:
        cubes_by_sample(MASKS_OF_OTHERS[name])(module, x).backward()
    record = capture.record
    assert record.mixing or record.axis_lost or record.coverage < 1
