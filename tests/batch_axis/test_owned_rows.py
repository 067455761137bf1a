"""Batches of which each row says whose it is: tokens without padding, nodes and edges of graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample import (
    BatchSizeError,
    OptionError,
    PerSampleRecord,
    check_per_sample_gradients,
    expanded_weights,
    mark_samples,
)

pytestmark = pytest.mark.usefixtures("double_precision")

B, D, H = 5, 3, 4
LENGTHS = (4, 2, 6, 1, 5)
Batch = Mapping[str, Tensor]


def graphs(lengths: tuple[int, ...] = LENGTHS, *, seed: int = 0) -> Batch:
    """Graphs of so many nodes in one batch; the last node of the first and third has no edge."""
    torch.manual_seed(seed)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    edges, of_edge = [], []
    for graph, nodes in enumerate(lengths):
        linked = nodes - 1 if nodes > 3 else nodes
        edges.append(torch.randint(linked, (2, 2 * nodes)) + starts[graph])
        of_edge += [graph] * (2 * nodes)
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return {
        "x": torch.randn(sum(lengths), D),
        "edges": torch.cat(edges, 1),
        "attr": torch.rand(len(of_edge)),
        "owner": owner,
        "of_edge": torch.tensor(of_edge),
        "y": torch.randint(H, (len(lengths),)),
    }


def graph(batch: Batch, sample: int) -> Batch:
    own, own_edge = batch["owner"] == sample, batch["of_edge"] == sample
    first = int(own.nonzero()[0])
    return {
        "x": batch["x"][own],
        "edges": batch["edges"][:, own_edge] - first,
        "attr": batch["attr"][own_edge],
        "owner": torch.zeros(int(own.sum()), dtype=torch.int64),
        "of_edge": torch.zeros(int(own_edge.sum()), dtype=torch.int64),
        "y": batch["y"][sample : sample + 1],
    }


def layout(batch: Batch) -> dict[Tensor, Any]:
    return {
        batch["x"]: batch["owner"],
        batch["owner"]: batch["owner"],
        batch["edges"]: (1, batch["of_edge"]),
        batch["attr"]: batch["of_edge"],
        batch["of_edge"]: batch["of_edge"],
    }


def pooled(h: Tensor, batch: Batch) -> Tensor:
    return h.new_zeros(len(batch["y"]), h.size(1)).index_add(0, batch["owner"], h)


def sums(h: Tensor, batch: Batch) -> Tensor:
    source, target = batch["edges"]
    return torch.zeros_like(h).index_add(0, target, h[source] * batch["attr"][:, None])


def scattered(h: Tensor, batch: Batch) -> Tensor:
    source, target = batch["edges"]
    index = target[:, None].expand(-1, h.size(1))
    return h + h.new_zeros(h.shape).scatter_add_(0, index, h.index_select(0, source))


def means(h: Tensor, batch: Batch) -> Tensor:
    source, target = batch["edges"]
    index = target[:, None].expand(-1, h.size(1))
    return h.scatter_reduce(0, index, h[source], "mean", include_self=True)


def largest(h: Tensor, batch: Batch) -> Tensor:
    source, target = batch["edges"]
    return h.new_zeros(h.shape).index_reduce_(0, target, h[source], "amax", include_self=False)


def with_loops(h: Tensor, batch: Batch) -> Tensor:
    loops = torch.arange(len(h)).expand(2, -1)
    source, target = torch.cat([batch["edges"], loops], 1)
    weights = torch.cat([batch["attr"], torch.ones(len(h))])
    degree = torch.zeros(len(h)).index_add_(0, target, torch.ones(len(target)))
    messages = h[source] * (weights / degree[source].sqrt() / degree[target].sqrt())[:, None]
    return torch.zeros_like(h).index_add(0, target, messages)


def attention(h: Tensor, batch: Batch) -> Tensor:
    source, target = batch["edges"]
    score = (h[source] * h[target]).sum(1)
    top = torch.full((len(h),), -torch.inf).scatter_reduce(0, target, score.detach(), "amax")
    weight = (score - top[target]).exp()
    total = torch.zeros(len(h)).index_add(0, target, weight)
    return torch.zeros_like(h).index_add(0, target, (weight / total[target])[:, None] * h[source])


def loops_written(h: Tensor, batch: Batch) -> Tensor:
    """The weights of self loops are written over ones, by the numbers of the nodes that have such an edge."""
    source, target = batch["edges"]
    weights, same = torch.ones(len(h)), source == target
    weights[source[same]] = batch["attr"][same]
    return h * weights[:, None]


PASSING: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "index_add": sums, "scatter_add": scattered, "scatter_reduce": means, "index_reduce": largest,
    "self-loops": with_loops, "attention": attention, "loops-written": loops_written,
}  # fmt: skip


class Network(nn.Module):
    def __init__(self, passing: Callable[[Tensor, Batch], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(D, H), nn.Linear(H, H), nn.Linear(H, H)
        self.scale, self.passing = nn.Parameter(torch.rand(H)), passing

    def forward(self, batch: Batch) -> Tensor:
        h = torch.tanh(self.first(batch["x"]))
        return self.second(self.passing(h, batch)) * self.scale

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.head(pooled(self(batch), batch)), batch["y"])


def loop(module: nn.Module, loss: Callable[[Any], Tensor], samples: list[Any]) -> dict[str, Tensor]:
    names = [*dict(module.named_parameters())]
    rows = [torch.autograd.grad(loss(sample), [*module.parameters()], materialize_grads=True) for sample in samples]
    return {name: torch.stack(grads) for name, grads in zip(names, zip(*rows, strict=True), strict=True)}


def assert_exact(record: PerSampleRecord, expected: Mapping[str, Tensor]) -> None:
    assert (record.coverage, record.mixing, record.axis_lost, record.weighting) == (1.0, (), (), ())
    for name, grads in expected.items():
        torch.testing.assert_close(record.grad_samples[name], grads)
        torch.testing.assert_close(record.sq_norms[name], grads.flatten(1).square().sum(1))


def captured(module: Any, batch: Any, loss: Callable[[], Tensor], **options: Any) -> PerSampleRecord:
    quantities = options.pop("quantities", ("sq_norm", "grad_sample"))
    with expanded_weights(module, batch, quantities=quantities, **options) as capture:
        loss().backward()
    return capture.record


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("passing", PASSING)
def test_messages_along_edges_stay_in_their_graphs(passing: str) -> None:
    module = Network(PASSING[passing])
    for step in range(3):  # other graphs of other sizes each time
        batch = graphs(LENGTHS[step:] + LENGTHS[:step], seed=step)
        record = captured(module, batch, lambda batch=batch: module.loss(batch), batch_layout=layout)
        assert_exact(record, loop(module, module.loss, [graph(batch, sample) for sample in range(B)]))


def test_losses_of_nodes_belong_to_their_graphs() -> None:
    module, batch = Network(sums), graphs()

    def loss(batch: Batch) -> Tensor:
        of_node = module.head(module(batch)).square().sum(1, keepdim=True)
        return pooled(of_node, batch).mean()

    record = captured(module, batch, lambda: loss(batch), batch_layout=layout)
    assert_exact(record, loop(module, loss, [graph(batch, sample) for sample in range(B)]))


def one_hot(batch: Batch) -> Tensor:
    return F.one_hot(batch["owner"], len(batch["y"])).double()


BY_MATRIX: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "matmul": lambda h, batch: one_hot(batch).T @ h,
    "from-the-right": lambda h, batch: torch.mm(h.T, one_hot(batch)).T,
    "einsum": lambda h, batch: torch.einsum("nb,nd->bd", one_hot(batch), h),
    "times-a-number": lambda h, batch: 2.5 * one_hot(batch).T @ h,
    "shares": lambda h, batch: (one_hot(batch) / B).T @ h,
    "comparison": lambda h, batch: (torch.arange(len(batch["y"]))[:, None] == batch["owner"]).double() @ h,
}


@pytest.mark.parametrize("name", BY_MATRIX)
def test_rows_pooled_by_a_matrix_with_one_number_for_each_are_of_their_graphs(name: str) -> None:
    module = Network(sums)

    def loss(batch: Batch) -> Tensor:
        return F.cross_entropy(module.head(BY_MATRIX[name](module(batch), batch)), batch["y"])

    for seed in range(2):
        batch = graphs(seed=seed)
        record = captured(module, batch, lambda batch=batch: loss(batch), batch_layout=layout)
        assert_exact(record, loop(module, loss, [graph(batch, sample) for sample in range(B)]))


@pytest.mark.parametrize("name", ["two-graphs-in-a-row", "two-ones-for-a-row", "means"])
def test_rows_of_several_graphs_pooled_by_a_matrix_are_named(name: str) -> None:
    module, batch = Network(sums), graphs()
    matrix = one_hot(batch).T.contiguous()
    if name == "two-ones-for-a-row":
        matrix = matrix[[0, 0, 2, 3, 4]]
    else:
        matrix = matrix.roll(1, 1) if name == "two-graphs-in-a-row" else matrix + 1 / B

    def loss() -> Tensor:
        return F.cross_entropy(module.head(matrix @ module(batch)), batch["y"])

    record = captured(module, batch, loss, batch_layout=layout, unsupported="ignore")
    assert (*record.mixing, *record.axis_lost) != ()


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_stays_with_its_sample(number: float) -> None:
    module, batch = Network(sums), graphs()
    expected = loop(module, module.loss, [graph(batch, sample) for sample in range(B)])
    batch["x"][batch["owner"] == 0] = number
    record = captured(module, batch, lambda: module.loss(batch), batch_layout=layout)
    for name, grads in expected.items():
        assert not record.sq_norms[name][0].isfinite()
        torch.testing.assert_close(record.sq_norms[name][1:], grads.flatten(1).square().sum(1)[1:])


def test_batch_norm_in_evaluation_is_a_scale_of_each_row() -> None:
    module, batch = Network(sums), graphs()
    norm = nn.BatchNorm1d(H).eval()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    module.second = nn.Sequential(module.second, norm)
    record = captured(module, batch, lambda: module.loss(batch), batch_layout=layout)
    assert_exact(record, loop(module, module.loss, [graph(batch, sample) for sample in range(B)]))


def test_batch_norm_in_training_gives_what_each_graph_adds() -> None:
    module, batch = Network(sums), graphs()
    module.second = nn.Sequential(module.second, nn.BatchNorm1d(H))
    record = captured(module, batch, lambda: module.loss(batch), batch_layout=layout, unsupported="ignore")
    assert (record.coverage, record.axis_lost) == (1.0, ())
    assert all("batch_norm" in text for text in record.mixing)
    assert record.mixing
    rows: dict[str, Tensor] = {}
    module.second[1].register_forward_hook(lambda layer, given, out: rows.update(given=given[0], out=out))
    loss = module.loss(batch)
    (grad,) = torch.autograd.grad(loss, [rows["out"]], retain_graph=True)
    x = rows["given"]
    normed = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()
    for name, of_row in {"second.1.weight": grad * normed, "second.1.bias": grad}.items():
        expected = torch.zeros(B, H).index_add(0, batch["owner"], of_row) * B
        torch.testing.assert_close(record.grad_samples[name], expected.detach())
    for (name, _), total in zip(
        module.named_parameters(), torch.autograd.grad(loss, [*module.parameters()]), strict=True
    ):
        torch.testing.assert_close(record.grad_samples[name].mean(0), total)


def test_an_edge_between_two_graphs_is_named() -> None:
    module, batch = Network(sums), graphs()
    batch["edges"][1, 0] = len(batch["x"]) - 1
    record = captured(module, batch, lambda: module.loss(batch), batch_layout=layout, unsupported="ignore")
    assert record.coverage < 1 or record.mixing


def test_rows_in_any_order_are_declared_in_the_step() -> None:
    module, lengths, order = nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, 1)), torch.tensor(LENGTHS), 17
    tokens, owner = torch.randn(18, D), torch.arange(B).repeat_interleave(lengths)
    mixed = torch.randperm(18, generator=torch.Generator().manual_seed(order))
    tokens, owner, y = tokens[mixed], owner[mixed], torch.randn(B)

    def loss(tokens: Tensor, owner: Tensor, y: Tensor) -> Tensor:
        out = module(tokens)[:, 0]
        return (torch.zeros(len(y)).index_add(0, owner, out) * y).mean()

    record = captured(module, y, lambda: loss(mark_samples(tokens, owner=owner), owner, y))
    alone = [(tokens[owner == i], torch.zeros(int(lengths[i]), dtype=torch.int64), y[i : i + 1]) for i in range(B)]
    assert_exact(record, loop(module, lambda sample: loss(*sample), alone))


class Wide(nn.Module):
    """Linear maps of every spelling, wide enough that a sample of many rows is taken alone."""

    def __init__(self, width: int = 160) -> None:
        super().__init__()
        self.first, self.table = nn.Linear(width, width), nn.Embedding(9, width, scale_grad_by_freq=False)
        self.second, self.third = (nn.Parameter(torch.randn(width, width) / 12) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        names = tokens[:, 0].detach().abs().mul(4).long().clamp(max=8)
        rows = torch.tanh(self.first(tokens) + self.table(names))
        return torch.tanh(rows @ self.second).mm(self.third).square().mean(1)


@pytest.mark.parametrize("in_order", [True, False])
def test_samples_of_many_rows_and_of_few(in_order: bool) -> None:
    module, lengths = Wide(), torch.tensor([1, 90, 7, 150, 45, 6, 60])
    tokens, owner = torch.randn(int(lengths.sum()), 160), torch.arange(7).repeat_interleave(lengths)
    if not in_order:
        mixed = torch.randperm(len(owner), generator=torch.Generator().manual_seed(0))
        tokens, owner = tokens[mixed], owner[mixed]

    def loss(tokens: Tensor, owner: Tensor) -> Tensor:
        return torch.zeros(int(owner.max()) + 1).index_add(0, owner, module(tokens)).mean()

    places = {"batch_size": 7, "batch_layout": lambda batch: {batch: owner}}
    alone = [(tokens[owner == i], torch.zeros(int(lengths[i]), dtype=torch.int64)) for i in range(7)]
    expected = loop(module, lambda sample: loss(*sample), alone)
    assert_exact(captured(module, tokens, lambda: loss(tokens, owner), **places), expected)
    record = captured(
        module, tokens, lambda: loss(tokens, owner), quantities=("sq_norm", "dot", "projection"), **places
    )
    vectors = {name: torch.randn_like(parameter) for name, parameter in module.named_parameters()}
    dots = sum((grads.flatten(1) @ vectors[name].flatten() for name, grads in expected.items()), torch.zeros(7))
    torch.testing.assert_close(record.dot(vectors), dots)
    for name, grads in expected.items():
        torch.testing.assert_close(record.sq_norms[name], grads.flatten(1).square().sum(1))


@pytest.mark.parametrize(
    ("owner", "text"),
    [
        (torch.zeros(4, dtype=torch.int64), "its owner has shape (4,) and dtype torch.int64; allowed are integers"),
        (torch.zeros(6), "dtype torch.float32; allowed are integers"),
        (torch.tensor([0, 0, 1, 1, 2, 5]), "has owners from 0 to 5; allowed are 0 to 4"),
        (torch.tensor([0, 0, 1, 1, 2, -1]), "has owners from -1 to 2"),
    ],
)
def test_owners_that_do_not_fit_are_named(owner: Tensor, text: str) -> None:
    module, y = nn.Linear(D, 1), torch.randn(B)
    record = captured(
        module, y, lambda: module(mark_samples(torch.randn(6, D), owner=owner)).sum() * y.mean(), unsupported="ignore"
    )
    assert text in record.unsupported["weight"]


def test_an_axis_and_shared_data_are_declared() -> None:
    module = nn.Linear(D, 1)
    batch = {"state": torch.randn(7, B, D), "anchors": torch.randn(B, D), "y": torch.randn(B)}

    def loss(batch: Batch) -> Tensor:
        return (module(batch["state"]).mean(0)[:, 0] * batch["y"]).mean() * batch["anchors"].square().mean()

    where = {"state": 1, "anchors": None}
    record = captured(module, batch, lambda: loss(batch), batch_layout=lambda b: {b[k]: v for k, v in where.items()})
    alone = [
        {"state": batch["state"][:, i : i + 1], "anchors": batch["anchors"], "y": batch["y"][i : i + 1]}
        for i in range(B)
    ]
    assert_exact(record, loop(module, loss, alone))


def test_two_loaders_with_unequal_numbers_of_rows_side_by_side() -> None:
    module, x, y, u = nn.Linear(D, 2), torch.randn(4, D), torch.tensor([0, 1, 1, 0]), torch.randn(2, D)

    def layout(batch: Any) -> dict[Tensor, Tensor]:
        return {batch["a"][0]: torch.arange(4), batch["a"][1]: torch.arange(4), batch["b"]: torch.tensor([4, 5])}

    def loss() -> Tensor:
        return F.cross_entropy(module(x), y) + module(u).square().sum(1).mean()

    weights = torch.tensor([1 / 4] * 4 + [1 / 2] * 2)
    record = captured(module, {"a": (x, y), "b": u}, loss, batch_layout=layout, loss_reduction=weights)
    own = [*F.cross_entropy(module(x), y, reduction="none"), *module(u).square().sum(1)]
    rows = [torch.autograd.grad(each, [*module.parameters()], retain_graph=True) for each in own]
    weight, bias = (torch.stack(grads) for grads in zip(*rows, strict=True))
    assert_exact(record, {"weight": weight, "bias": bias})


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda batch: [batch], "batch_layout returned .*; allowed is a mapping from tensors of the batch"),
        (lambda batch: {batch: "rows"}, "batch_layout says 'rows' of batch, a tensor of shape"),
        (lambda batch: {batch: 2}, "batch_layout says 2 of batch, a tensor of shape"),
        (lambda batch: {batch: True}, "batch_layout says True of batch, a tensor of shape"),
    ],
)
def test_an_answer_that_says_nothing_is_refused(answer: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        expanded_weights(nn.Linear(D, 1), torch.randn(B, D), batch_layout=answer)


def test_a_layout_that_does_not_agree_is_refused() -> None:
    batch = {"a": torch.randn(3, B), "b": torch.randn(4, D)}
    with pytest.raises(BatchSizeError, match=r"do not agree on a number of samples.*batch\['a'\]: declared"):
        expanded_weights(nn.Linear(D, 1), batch, batch_layout=lambda batch: {batch["a"]: 1})


@dataclass
class BatchOfGraphs:
    """What is read of a batch of torch_geometric."""

    x: Tensor
    edge_index: Tensor
    weight: Tensor
    batch: Tensor
    ptr: Tensor
    y: Tensor
    num_graphs: int
    _slice_dict: Mapping[str, Tensor]

    @property
    def stores(self) -> list[Any]:
        names = ("x", "edge_index", "weight", "y", "batch", "ptr")
        return [SimpleNamespace(_key=None, items=lambda: [(name, getattr(self, name)) for name in names])]

    def __cat_dim__(self, key: str, value: Any, store: Any) -> int:
        return -1 if "index" in key else 0

    @classmethod
    def of(cls, batch: Batch) -> BatchOfGraphs:
        rows = [batch["owner"].bincount(), batch["of_edge"].bincount(), torch.ones(len(batch["y"]), dtype=torch.int64)]
        starts, of_edge, each = (torch.cat([torch.zeros(1, dtype=torch.int64), n]).cumsum(0) for n in rows)
        slices = {"x": starts, "edge_index": of_edge, "weight": of_edge, "y": each}
        parts = batch["x"], batch["edges"], batch["attr"], batch["owner"], starts, batch["y"]
        return cls(*parts, len(batch["y"]), slices)

    def get_example(self, sample: int) -> Batch:
        return graph(self.parts(), sample)

    @classmethod
    def from_data_list(cls, samples: list[Batch]) -> BatchOfGraphs:
        before = torch.tensor([0, *(len(each["x"]) for each in samples)]).cumsum(0)
        joined = {name: torch.cat([each[name] for each in samples]) for name in ("x", "attr", "y")}
        joined["edges"] = torch.cat([each["edges"] + n for each, n in zip(samples, before, strict=False)], 1)
        for name, like in (("owner", "x"), ("of_edge", "attr")):
            counts = torch.tensor([len(each[like]) for each in samples])
            joined[name] = torch.arange(len(samples)).repeat_interleave(counts)
        return cls.of(joined)

    def parts(self) -> Batch:
        of_edge = torch.arange(self.num_graphs).repeat_interleave(self._slice_dict["weight"].diff())
        edges = {"edges": self.edge_index, "attr": self.weight, "of_edge": of_edge}
        return {"x": self.x, "owner": self.batch, "y": self.y, **edges}


@pytest.mark.parametrize("passing", ["index_add", "self-loops", "loops-written"])
def test_a_batch_of_graphs_needs_no_declaration(passing: str) -> None:
    module, batch = Network(PASSING[passing]), graphs()
    held = BatchOfGraphs.of(batch)
    record = captured(module, held, lambda: module.loss(held.parts()))
    assert_exact(record, loop(module, module.loss, [graph(batch, sample) for sample in range(B)]))


def test_graphs_and_owned_rows_are_cut_for_a_check() -> None:
    module, batch = Network(with_loops), graphs()
    held = BatchOfGraphs.of(batch)
    assert check_per_sample_gradients(module, held, lambda m, b: m.loss(b.parts()))

    def loss(module: Any, batch: Batch) -> Tensor:
        return (pooled(module.head(torch.tanh(module.first(batch["x"]))), batch)[:, 0] * batch["y"]).mean()

    rows = {name: batch[name] for name in ("x", "owner", "y")}
    report = check_per_sample_gradients(
        module, rows, loss, batch_layout=lambda b: {b["x"]: b["owner"], b["owner"]: b["owner"]}
    )
    assert report, report


@pytest.mark.parametrize("with_owner", [True, False])
def test_a_check_cuts_what_the_step_declares(with_owner: bool) -> None:
    module, lengths = nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, 1)), torch.tensor([2, 3, 1, 4, 2, 1])
    batch = {"x": torch.randn(13, D), "lengths": lengths, "y": torch.randn(6)}
    if with_owner:
        batch["owner"] = torch.arange(6).repeat_interleave(lengths)

    def loss(module: Any, batch: Batch) -> Tensor:
        owner = batch["owner"] if with_owner else torch.arange(len(batch["y"])).repeat_interleave(batch["lengths"])
        rows = module(mark_samples(batch["x"], owner=owner))[:, 0]
        return F.mse_loss(torch.zeros(len(batch["y"])).index_add(0, owner, rows), batch["y"])

    report = check_per_sample_gradients(module, batch, loss, batch_size=6)
    assert report, report
    assert report.samples == 4


def test_a_check_says_of_rows_that_the_step_makes_why_they_differ() -> None:
    module, batch = nn.Linear(1, 1), {"x": torch.randn(3, 5), "lengths": torch.tensor([2, 3, 1])}

    def loss(module: Any, batch: Batch) -> Tensor:
        owner = torch.arange(len(batch["lengths"])).repeat_interleave(batch["lengths"])
        rows = module(mark_samples(1.0 + torch.arange(len(owner))[:, None], owner=owner))[:, 0].square()
        return torch.zeros(len(batch["lengths"])).index_add(0, owner, rows).mean()

    batch["more"] = torch.randn(7)
    report = check_per_sample_gradients(module, batch, loss, batch_size=3)
    assert {row.reason for row in report.named("differs")} == {
        "the step declares by mark_samples whose rows it makes, and of a single sample it may make others: put such "
        "rows into the batch"
    }


def test_constant_rows_that_may_be_of_either_sample_are_named() -> None:
    """As many nodes as graphs, one of which is empty: its row of the pooled ones is not a node's."""
    module, x, owner = nn.Linear(D, 2), torch.randn(3, D), torch.tensor([0, 0, 2])

    def loss(x: Tensor, owner: Tensor, B: int) -> Tensor:
        return module(torch.zeros(B, D).index_add(0, owner, x)).square().sum(1).mean()

    record = captured(
        module, x, lambda: loss(x, owner, 3), batch_size=3, batch_layout=lambda b: {b: owner}, unsupported="ignore"
    )
    assert record.coverage == 0
    apart = torch.tensor([0, 0, 0, 2])  # more nodes than graphs
    x = torch.randn(4, D)
    record = captured(module, x, lambda: loss(x, apart, 3), batch_size=3, batch_layout=lambda b: {b: apart})
    empty = torch.zeros(0, dtype=torch.int64)
    alone = [(x[:3], torch.zeros(3, dtype=torch.int64)), (x[:0], empty), (x[3:], torch.zeros(1, dtype=torch.int64))]
    assert_exact(record, loop(module, lambda sample: loss(*sample, 1), alone))


def test_an_owner_that_changes_after_it_was_declared_is_kept_as_it_was() -> None:
    module, x, owner = nn.Linear(D, 2), torch.randn(6, D), torch.tensor([0, 1, 1, 0, 2, 1])
    before = owner.clone()

    def loss() -> Tensor:
        rows = module(mark_samples(x, owner=owner)).square().sum(1)
        owner.zero_()
        return rows.sum()

    record = captured(module, torch.randn(3, 1), loss, loss_reduction="sum")
    alone = [x[before == sample] for sample in range(3)]
    assert_exact(record, loop(module, lambda x: module(x).square().sum(), alone))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_sum_over_one_sample_that_is_divided_by_the_batch_size_is_a_part_of_a_mean(reduction: str) -> None:
    module, x = nn.Linear(D, 2), torch.randn(5, D)
    options = {"loss_reduction": reduction, "unsupported": "ignore"}
    record = captured(module, x, lambda: module(x[1:2]).square().sum() / 5, **options)
    assert record.samples is not None
    assert record.samples.tolist() == [1]
    (expected,) = torch.autograd.grad(module(x[1:2]).square().sum(), [module.weight])
    if reduction == "mean":
        torch.testing.assert_close(record.grad_samples["weight"][0], expected)
    else:
        assert "the loss is a mean over the samples, but loss_reduction is 'sum'" in record.weighting[0]


def test_an_expert_without_a_row_changes_nothing() -> None:
    module = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 1)])
    x = torch.randn(B, D)

    def loss(x: Tensor) -> Tensor:
        chosen, out = torch.zeros(len(x), dtype=torch.int64), torch.zeros(len(x), D)
        for number in range(2):
            rows = (chosen == number).nonzero().flatten()
            out.index_add_(0, rows, module[number](x[rows]))
        return module[2](out).square().mean()

    record = captured(module, x, lambda: loss(x))
    assert (record.mixing, record.axis_lost, record.unsupported) == ((), (), {})
    expected = loop(module, loss, [x[i : i + 1] for i in range(B)])
    for name, grads in record.grad_samples.items():
        torch.testing.assert_close(grads, expected[name])


def test_a_tensor_added_to_a_batch_of_graphs_is_not_taken_for_rows_of_samples() -> None:
    batch = graphs((2, 1, 1), seed=3)
    held = BatchOfGraphs.of(batch)
    held._slice_dict = {name: starts for name, starts in held._slice_dict.items() if name != "weight"}
    module = nn.Linear(1, 1)
    held.weight = torch.randn(len(batch["x"]), 1)  # one number for each node
    record = captured(module, held, lambda: module(held.weight).square().mean(), unsupported="ignore")
    assert "was added to the batch later" in record.unsupported["weight"]


def lengths_of(batch: Batch) -> Tensor:
    lengths: Tensor = batch["lengths"]
    return lengths


PLACES: dict[str, Callable[[Batch], Tensor]] = {
    "picked": lambda batch: (lengths_of(batch).cumsum(0) - lengths_of(batch))[batch["owner"]],
    "repeated": lambda batch: F.pad(lengths_of(batch).cumsum(0), (1, 0))[:-1].repeat_interleave(lengths_of(batch)),
}


def embedded(module: Any, batch: Batch, places: Tensor) -> Tensor:
    return pooled((module["first"](batch["x"]) + module["table"](places)).tanh(), batch)


def in_order(module: Any, batch: Batch, places: Tensor) -> Tensor:
    lengths = lengths_of(batch)
    dense = torch.zeros(len(lengths), int(lengths.max()), H)
    dense[batch["owner"], places] = module["first"](batch["x"]) + module["table"].weight[0]
    return module["recurrent"](dense)[0][torch.arange(len(lengths)), lengths - 1]


@pytest.mark.parametrize("use", [embedded, in_order])
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("lengths", [LENGTHS, (3, 3), (1, 1, 2)])
def test_places_of_rows_in_their_sample_are_its_own_where_all_lengths_say_where_it_begins(
    lengths: tuple[int, ...], name: str, use: Callable[..., Tensor]
) -> None:
    def with_lengths(batch: Batch) -> Batch:
        return {**batch, "lengths": batch["owner"].bincount()}

    def loss(batch: Batch) -> Tensor:
        places = torch.arange(len(batch["x"])) - PLACES[name](batch)
        return F.cross_entropy(use(module, batch, places), batch["y"])

    module = nn.ModuleDict(
        {"first": nn.Linear(D, H), "table": nn.Embedding(9, H), "recurrent": nn.GRU(H, H, batch_first=True)}
    )
    batch = with_lengths(graphs(lengths))
    record = captured(module, batch, lambda: loss(batch), batch_layout=layout, batch_size=len(lengths))
    assert (record.mixing, record.axis_lost, record.unsupported) == ((), (), {})
    expected = loop(module, loss, [with_lengths(graph(batch, sample)) for sample in range(len(lengths))])
    for parameter, grads in record.grad_samples.items():
        torch.testing.assert_close(grads, expected[parameter])


@pytest.mark.parametrize("name", PLACES)
def test_numbers_of_other_samples_that_are_no_places_in_the_sample_are_noted(name: str) -> None:
    module = nn.ModuleDict({"first": nn.Linear(D, H), "table": nn.Embedding(sum(LENGTHS), H)})
    batch = graphs()
    batch = {**batch, "lengths": batch["owner"].bincount()}

    def loss() -> Tensor:
        return F.cross_entropy(embedded(module, batch, PLACES[name](batch)), batch["y"])

    record = captured(module, batch, loss, batch_layout=layout, batch_size=B, unsupported="ignore")
    assert any("combine" in text or "`cumsum` works along the batch axis" in text for text in record.mixing)
