"""Layouts of batches that nobody planned for, such as streams, lattices, beams and neighbours: exact or named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_persample.capture.mode import expanded_weights
from tests.callbacks.runs import Recorder

pytestmark = pytest.mark.usefixtures("double_precision")

B = 4
Loss = Callable[..., Tensor]


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.tokens, self.query, self.key = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.experts, self.gate = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 3)
        self.recurrent, self.kernels = nn.GRU(6, 6, batch_first=True), nn.Linear(6, 3)


@dataclass
class Case:
    """A loss of a batch, the same of one sample, and what is declared."""

    batch: tuple[Tensor, ...]
    loss: Loss
    of_one: Callable[[Any, int], Tensor]
    options: dict[str, Any] = field(default_factory=dict)


def by_slices(loss: Loss, *batch: Tensor) -> Case:
    return Case(batch, loss, lambda m, i: loss(m, *(tensor[i : i + 1] for tensor in batch)))


def per_sample(values: Tensor, owner: Tensor) -> Tensor:
    """The mean over the samples of the mean of each one's rows."""
    return (torch.zeros(B).index_add(0, owner, values) / torch.bincount(owner, minlength=B)).mean()


def halves() -> Case:
    """Two crops of each sample, one half of the rows after the other."""
    x, owner = torch.randn(2 * B, 5), torch.arange(B).repeat(2)

    def loss(m: Any, x: Tensor) -> Tensor:
        one, two = m.hidden(m.first(x).relu()).chunk(2)
        return (one - two).square().sum(1).mean()

    return Case((x,), loss, lambda m, i: loss(m, x[[i, i + B]]), {"batch_layout": lambda batch: {batch[0]: owner}})


def crops() -> Case:
    """A student's crops beside a teacher's."""

    def loss(m: Any, *crops: Tensor) -> Tensor:
        teacher, *students = m.last(m.first(torch.cat(crops)).relu()).chunk(len(crops))
        shares = teacher.detach().softmax(-1)
        return -sum((shares * each.log_softmax(-1)).sum(-1).mean() for each in students) / len(students)

    return by_slices(loss, *(torch.randn(B, 5) for _ in range(3)))


def documents() -> Case:
    """Documents of sentences of tokens."""
    sentence, document = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3, 4, 5, 5]), torch.tensor([0, 0, 1, 2, 2, 3])
    tokens, labels = torch.randint(0, 11, (11,)), torch.randint(0, 3, (B,))

    def loss(m: Any, tokens: Tensor, sentence: Tensor, document: Tensor, labels: Tensor) -> Tensor:
        h = m.hidden(m.tokens(tokens)).tanh()
        sums = torch.zeros(len(document), 6).index_add(0, sentence, h)
        means = m.query(sums / torch.bincount(sentence, minlength=len(document))[:, None]).tanh()
        return F.cross_entropy(m.last(torch.zeros(len(labels), 6).index_add(0, document, means)), labels)

    def of_one(m: Any, i: int) -> Tensor:
        own = (document == i).nonzero().flatten()
        rows = document[sentence] == i
        return loss(m, tokens[rows], sentence[rows] - own[0], torch.zeros_like(own), labels[i : i + 1])

    layout = {"batch_layout": lambda b: {b[0]: document[sentence], b[1]: document[sentence], b[2]: document, b[3]: 0}}
    return Case((tokens, sentence, document, labels), loss, of_one, layout)


def edges() -> Case:
    """A loss of each edge of a batch of graphs."""
    graph = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3, 3])
    ends, x = torch.tensor([[0, 1, 2, 3, 5, 6, 8, 0], [1, 2, 0, 4, 6, 7, 9, 2]]), torch.randn(10, 5)
    labels = torch.rand(8)

    def scores(m: Any, x: Tensor, ends: Tensor) -> Tensor:
        h = m.first(x).relu()
        h = h + torch.zeros_like(h).index_add(0, ends[1], m.hidden(h)[ends[0]])
        return (h[ends[0]] * h[ends[1]]).sum(1)

    def loss(m: Any, x: Tensor, ends: Tensor, graph: Tensor, labels: Tensor) -> Tensor:
        losses = F.binary_cross_entropy_with_logits(scores(m, x, ends), labels, reduction="none")
        return per_sample(losses, graph[ends[0]])

    def of_one(m: Any, i: int) -> Tensor:
        nodes, some = (graph == i).nonzero().flatten(), graph[ends[0]] == i
        return F.binary_cross_entropy_with_logits(scores(m, x[nodes], ends[:, some] - nodes[0]), labels[some])

    layout = {"batch_layout": lambda b: {b[0]: graph, b[1]: None, b[2]: graph, b[3]: graph[ends[0]]}, "batch_size": B}
    return Case((x, ends, graph, labels), loss, of_one, layout)


def stream() -> Case:
    """Windows of a stream that joins the samples, none across a border."""

    def loss(m: Any, x: Tensor) -> Tensor:
        windows = x.flatten().unfold(0, 4, 4)
        return m.hidden(m.first(F.pad(windows, (0, 1))).relu()).square().mean()

    return by_slices(loss, torch.randn(B, 12))


def capacity() -> Case:
    """Experts with room for some of the rows sent to them; the others pass by."""
    x = torch.randn(B, 5)

    def routed(m: Any, h: Tensor) -> tuple[Tensor, Tensor]:
        weights, expert = m.gate(h).softmax(-1).max(-1)
        sent = F.one_hot(expert, 3)
        return weights, torch.where((sent.cumsum(0) * sent).sum(-1) <= 1, expert, -1)

    def by_experts(m: Any, h: Tensor, weights: Tensor, expert: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        for number, layer in enumerate(m.experts):
            rows = torch.where(expert == number)[0]
            out[rows] = layer(h[rows]) * weights[rows, None]
        return m.last(out + h).square().mean()

    def loss(m: Any, x: Tensor) -> Tensor:
        h = m.first(x).relu()
        return by_experts(m, h, *routed(m, h))

    def of_one(m: Any, i: int) -> Tensor:
        expert = routed(m, m.first(x).relu())[1][i : i + 1]
        h = m.first(x[i : i + 1]).relu()
        return by_experts(m, h, routed(m, h)[0], expert)

    return Case((x,), loss, of_one)


def kernels() -> Case:
    """A convolution of each sample by a kernel that was made of it."""

    def loss(m: Any, x: Tensor) -> Tensor:
        made = m.kernels(m.first(x).relu()).view(-1, 1, 3)
        return F.conv1d(F.pad(x, (0, 3))[None], made, groups=len(x)).square().mean()

    return by_slices(loss, torch.randn(B, 5))


def beams() -> Case:
    """The two best continuations of each sample, step by step."""

    def loss(m: Any, x: Tensor) -> Tensor:
        h, scores = m.first(x).relu().repeat_interleave(2, 0), torch.tensor([[0.0, -1.0]]).expand(len(x), -1)
        for _ in range(2):
            further = m.last(m.hidden(h).tanh()).log_softmax(-1).view(len(x), 2, 3)
            scores, place = (scores[..., None] + further).view(len(x), -1).topk(2, 1)
            rows = (place // 3 + torch.arange(len(x))[:, None] * 2).flatten()
            h = h[rows] + m.tokens(place % 3).view(-1, 6)
        return -scores.max(1).values.mean()

    return by_slices(loss, torch.randn(B, 5))


def neighbours() -> Case:
    """The nearest points of each point of a sample, gathered from the points of all."""

    def loss(m: Any, x: Tensor) -> Tensor:
        h, nearest = m.first(x), torch.cdist(x, x).topk(3, largest=False).indices
        rows = (nearest + torch.arange(len(x))[:, None, None] * 7).view(-1)
        found = h.view(-1, 6)[rows].view(len(x), 7, 3, 6)
        return m.last(m.hidden(found - h[:, :, None]).relu().amax(2).mean(1)).square().mean()

    return by_slices(loss, torch.randn(B, 7, 5))


def points() -> Case:
    """The nearest points of each point, picked by an index that repeats the sample for each of them."""

    def loss(m: Any, x: Tensor) -> Tensor:
        h, nearest = m.first(x), torch.cdist(x, x).topk(3, largest=False).indices
        sample = torch.arange(len(x)).view(-1, 1, 1).repeat(1, *nearest.shape[1:])
        found = h[sample, nearest]
        later = h.transpose(0, 1)[torch.arange(3)[:, None].expand(3, len(x)), torch.arange(len(x)).expand(3, -1)]
        return m.last(m.hidden(found).relu().amax(2).mean(1) + m.query(later).mean(0)).square().mean()

    return by_slices(loss, torch.randn(B, 7, 5))


def none_picked() -> Case:
    """An index that picks nothing of any sample, as of those above a threshold that none is, put behind all."""

    def loss(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        picked = h[torch.arange(len(x))[:, None].expand(len(x), 0), torch.zeros(len(x), 0, dtype=torch.long)]
        return m.last(torch.cat([h, picked], 1).relu().sum(1)).square().mean()

    return by_slices(loss, torch.randn(B, 7, 5))


def lattice() -> Case:
    """The sum over all paths through a lattice of steps and labels."""

    def loss(m: Any, x: Tensor) -> Tensor:
        labels = m.tokens(torch.arange(4)).expand(len(x), 4, 6).unsqueeze(1)
        logs = m.last((m.hidden(m.first(x)).unsqueeze(2) + labels).tanh()).log_softmax(-1)
        paths: dict[tuple[int, int], Tensor] = {(0, 0): torch.zeros(len(x))}
        for step, label in ((s, n) for s in range(3) for n in range(4) if s or n):
            ways = [paths[step - 1, label] + logs[:, step - 1, label, 0]] if step else []
            ways += [paths[step, label - 1] + logs[:, step, label - 1, 1]] if label else []
            paths[step, label] = torch.stack(ways).logsumexp(0)
        return -paths[2, 3].mean()

    return by_slices(loss, torch.randn(B, 3, 5))


def alignments() -> Case:
    """Labels of all samples joined for a CTC loss."""
    x, counts = torch.randn(B, 7, 5), torch.tensor([3, 1, 2, 2])
    labels = torch.randint(1, 3, (8,))

    def loss(m: Any, x: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        logs = m.last(m.hidden(m.first(x))).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logs, labels, torch.full((len(x),), 7), counts, zero_infinity=True)

    owner = torch.arange(B).repeat_interleave(counts)
    return Case(
        (x, labels, counts),
        loss,
        lambda m, i: loss(m, x[i : i + 1], labels[owner == i], counts[i : i + 1]),
        {"batch_layout": lambda b: {b[0]: 0, b[1]: owner, b[2]: 0}},
    )


def frames() -> Case:
    """Frames of videos as rows of the batch, features moved to the frames before and after."""

    def loss(m: Any, x: Tensor) -> Tensor:
        h = m.first(x.view(-1, 5)).view(len(x), -1, 6)
        moved = torch.zeros_like(h)
        moved[:, :-1, :2], moved[:, 1:, 2:4], moved[:, :, 4:] = h[:, 1:, :2], h[:, :-1, 2:4], h[:, :, 4:]
        return m.last(m.hidden(moved.view(-1, 6))).view(len(x), -1, 3).mean(1).square().mean()

    return by_slices(loss, torch.randn(B, 6, 5))


def lists() -> Case:
    """Candidates of a query, ranked among themselves; the candidates come first."""

    def loss(m: Any, x: Tensor) -> Tensor:
        scores = m.last(m.first(x.transpose(0, 1).reshape(-1, 5)).relu())[:, 0].view(-1, len(x))
        return -scores.log_softmax(0)[0].mean()

    return by_slices(loss, torch.randn(B, 6, 5))


EXACT = (
    halves,
    crops,
    documents,
    edges,
    stream,
    capacity,
    kernels,
    beams,
    neighbours,
    points,
    none_picked,
    lattice,
    alignments,
    frames,
    lists,
)


def values_and_loop(case: Case) -> tuple[Any, dict[str, Tensor]]:
    """The record of a step, and each sample's gradients by a loop."""
    torch.manual_seed(0)
    module = Parts()
    with expanded_weights(
        module, case.batch, quantities=("grad_sample",), unsupported="ignore", **case.options
    ) as capture:
        case.loss(module, *case.batch).backward()
    names, weights = zip(*module.named_parameters(), strict=True)
    rows = [torch.autograd.grad(case.of_one(module, i), weights, allow_unused=True) for i in range(B)]
    columns = zip(weights, zip(*rows, strict=True), strict=True)
    grads = [
        torch.stack([torch.zeros_like(weight) if each is None else each for each in column])
        for weight, column in columns
    ]
    return capture.record, dict(zip(names, grads, strict=True))


@pytest.mark.parametrize("made", EXACT, ids=lambda made: made.__name__)
def test_a_layout_is_followed(made: Callable[[], Case]) -> None:
    record, expected = values_and_loop(made())
    assert (record.mixing, record.axis_lost, record.weighting, record.unsupported) == ((), (), (), {})
    for name, grads in expected.items():
        if name in record.names:
            torch.testing.assert_close(record.grad_samples[name], grads, rtol=1e-9, atol=1e-12)
        else:
            assert not grads.any()


class Trained(L.LightningModule):
    """A module whose loss a case gives."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.parts, self.case = Parts(), case

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return self.case.loss(self.parts, *batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("made", EXACT, ids=lambda made: made.__name__)
def test_a_layout_is_followed_in_a_trainer(made: Callable[[], Case]) -> None:
    case = made()
    _, expected = values_and_loop(case)
    torch.manual_seed(0)
    module, recorder = Trained(case), Recorder(every_n_steps=1, sample_index=lambda batch: range(B), **case.options)
    loader = DataLoader(range(B), batch_size=B, collate_fn=lambda rows: case.batch)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[recorder],
    )  # fmt: skip
    trainer.fit(module, loader)
    (record,) = recorder.records
    assert (record.mixing, record.axis_lost, record.weighting, record.unsupported) == ((), (), (), {})
    norms = torch.stack([grads.flatten(1).square().sum(1) for grads in expected.values()]).sum(0).sqrt()
    torch.testing.assert_close(record.norms(), norms, rtol=1e-9, atol=1e-12)


def border() -> Loss:
    """Windows of a stream across the borders of the samples."""
    return lambda m, x: m.hidden(m.first(x.flatten().unfold(0, 5, 5)).relu()).square().mean()


def dispatched() -> Loss:
    """Rows sent to experts by a product, which puts rows of several samples into one."""

    def loss(m: Any, x: Tensor) -> Tensor:
        h = m.first(x[:, :5]).relu()
        sent = m.gate(h).softmax(-1)
        out = torch.stack([layer(row) for layer, row in zip(m.experts, sent.T @ h, strict=True)])
        return m.last(sent @ out).square().mean()

    return loss


def cut_layer() -> Loss:
    """A layer on rows of which no axis holds the samples."""
    return lambda m, x: m.hidden(m.first(x[:, :5]).view(2, 2, 6)).square().mean()


def sparse() -> Loss:
    """A sparse tensor of the batch."""
    return lambda m, x: torch.sparse.mm(x[:, :5].to_sparse(), m.first.weight.T).square().mean()


@pytest.mark.parametrize("made", [border, dispatched, cut_layer, sparse], ids=lambda made: made.__name__)
def test_a_layout_that_is_not_followed_is_named(made: Callable[[], Loss]) -> None:
    record, _ = values_and_loop(Case((torch.randn(B, 12),), made(), lambda m, i: m.first.weight.sum()))
    assert (*record.mixing, *record.axis_lost) != ()
    assert record.unsupported != {}
