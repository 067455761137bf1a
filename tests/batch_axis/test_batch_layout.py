"""Where the samples of a batch lie: by what the batch is made of, and never by a shape that happens to fit."""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from lightning_persample import BatchSizeError, PerSampleRecord, expanded_weights, mark_samples

Step = Callable[[nn.Module, Any], Tensor]


def observed(module: nn.Module, batch: Any, step: Step, **options: Any) -> PerSampleRecord:
    """The record of one step, which gives no warning unless parameters are missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with expanded_weights(
            module, batch, quantities=("sq_norm", "grad_sample"), unsupported="ignore", **options
        ) as capture:
            step(module, batch).backward()
    return capture.record


def assert_as_one_by_one(module: nn.Module, record: PerSampleRecord, samples: list[Any], step: Step) -> None:
    """Every gradient is that of the step on the batch of one sample."""
    assert record.coverage == 1
    assert (record.batch_size, record.mixing, record.axis_lost, record.weighting) == (len(samples), (), (), ())
    for place, sample in enumerate(samples):
        alone = copy.deepcopy(module)
        alone.zero_grad()
        step(alone, sample).backward()
        for name, parameter in alone.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(record.grad_samples[name][place], expected)


def assert_named(record: PerSampleRecord, text: str) -> None:
    assert record.coverage == 0
    assert all(re.search(text, reason) for reason in record.unsupported.values()), record.unsupported


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


# one tensor per sample in a list


def mean_of_items(module: nn.Module, batch: list[Tensor]) -> Tensor:
    return torch.stack([module(item).square().mean() for item in batch]).mean()


@pytest.mark.parametrize("shapes", [[(6, 5)] * 16, [(3, 5), (1, 5), (4, 5)], [(5,)] * 4])
@pytest.mark.parametrize("join", ["stack", "cat"])
def test_a_list_of_samples_that_are_joined_is_exact(shapes: list[tuple[int, ...]], join: str) -> None:
    if join == "stack" and len(set(shapes)) > 1:
        pytest.skip("of unequal shapes")
    batch, module = [torch.randn(shape) for shape in shapes], nn.Linear(5, 2)

    def step(module: nn.Module, batch: list[Tensor]) -> Tensor:
        if join == "stack":
            return module(torch.stack(batch)).square().sum() / len(batch)
        rows = [item.reshape(-1, 5) for item in batch]
        return module(torch.cat(rows)).square().sum() / len(batch)

    record = observed(module, batch, step, batch_size=len(batch))
    assert_as_one_by_one(module, record, [[item] for item in batch], step)


@pytest.mark.parametrize("shape", [(6, 5), (4, 5), (2, 5)])
def test_a_list_of_samples_that_meet_a_weight_one_by_one_is_exact(shape: tuple[int, ...]) -> None:
    batch, module = [torch.randn(shape) for _ in range(3)], nn.Linear(5, 2)
    record = observed(module, batch, mean_of_items, batch_size=3)
    assert_as_one_by_one(module, record, [[item] for item in batch], mean_of_items)


@pytest.mark.parametrize("rows", [6, 3])
def test_a_list_that_may_hold_samples_or_fields_is_refused(rows: int) -> None:
    batch = [torch.randn(rows, 5) for _ in range(16)]
    with pytest.raises(BatchSizeError) as error:
        expanded_weights(nn.Linear(5, 2), batch)
    assert str(error.value).startswith(f"batch is a list of 16 tensors, batch[0]: ({rows}, 5), ")
    assert str(error.value).endswith(
        " and 8 more: either each of them is one sample, or each holds a row of every sample along axis 0; pass "
        "batch_size=16 in the first case, and a tuple or a mapping in place of the list in the second"
    )


@dataclasses.dataclass
class Pair:
    inputs: Tensor
    targets: Tensor


@pytest.mark.parametrize(
    "collate",
    [
        lambda pairs: tuple(map(list, zip(*pairs, strict=True))),
        lambda pairs: dict(zip("xy", map(list, zip(*pairs, strict=True)), strict=True)),
        lambda pairs: [Pair(*pair) for pair in pairs],
    ],
)
def test_samples_in_lists_of_fields_and_in_lists_of_objects_are_refused(collate: Any) -> None:
    batch = collate([(torch.randn(6, 5), torch.zeros(6)) for _ in range(4)])
    with (
        pytest.raises(BatchSizeError, match=r"is a list of 4 .*; pass batch_size=4 in the first case"),
        expanded_weights(nn.Linear(5, 2), batch),
    ):
        pass


def test_a_square_list_is_of_samples_where_their_number_is_declared() -> None:
    batch, module = [torch.randn(3, 5) for _ in range(3)], nn.Linear(5, 2)
    with pytest.raises(
        BatchSizeError, match="a row of every sample cannot be read from it; pass batch_size=3 if each is one sample"
    ):
        expanded_weights(module, batch)
    record = observed(module, batch, mean_of_items, batch_size=3)
    assert_as_one_by_one(module, record, [[item] for item in batch], mean_of_items)


@pytest.mark.parametrize("container", [tuple, lambda views: dict(enumerate(views))])
@pytest.mark.parametrize("B", [2, 3])
def test_views_in_a_tuple_or_mapping_are_fields(container: Any, B: int) -> None:
    views, module = [torch.randn(B, 5), torch.randn(B, 5)], nn.Linear(5, 2)

    def step(module: nn.Module, batch: Any) -> Tensor:
        return (module(batch[0]) * module(batch[1])).sum(1).mean()

    record = observed(module, container(views), step)
    assert_as_one_by_one(module, record, [container([v[i : i + 1] for v in views]) for i in range(B)], step)


def test_fields_of_different_kinds_in_a_list_are_read_as_such() -> None:
    x, y, module = torch.randn(2, 5), torch.randint(0, 3, (2,)), nn.Linear(5, 3)

    def step(module: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(module(batch[0]), batch[1])

    record = observed(module, [x, y], step)
    assert_as_one_by_one(module, record, [[x[i : i + 1], y[i : i + 1]] for i in range(2)], step)


def test_targets_in_a_list_of_mappings_belong_to_their_samples() -> None:
    """Boxes of a detector: one sample has as many of them as the batch has samples."""
    images, module = torch.randn(3, 5), nn.Linear(5, 4)
    targets = [{"boxes": torch.randn(count, 4)} for count in (3, 1, 2)]

    def step(module: nn.Module, batch: Any) -> Tensor:
        found = module(batch[0])
        return sum((f - t["boxes"]).square().sum() for f, t in zip(found, batch[1], strict=True)) / len(found)

    record = observed(module, (images, targets), step, batch_size=3)
    assert_as_one_by_one(module, record, [(images[i : i + 1], targets[i : i + 1]) for i in range(3)], step)


# packed sequences, tokens with lengths or offsets


class OnPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 4)
        self.lstm = nn.LSTM(4, 3, bidirectional=True)

    def forward(self, packed: PackedSequence) -> Tensor:
        rows = self.linear(packed.data).tanh()
        out, _ = self.lstm(packed._replace(data=rows))
        return pad_packed_sequence(out, batch_first=True)[0].square().sum((1, 2))


@pytest.mark.parametrize("lengths", [(3, 1), (1, 3), (2, 5, 1, 5)])
@pytest.mark.parametrize("declared", [False, True])
def test_packed_sequences_are_exact(lengths: tuple[int, ...], declared: bool) -> None:
    sequences, module = [torch.randn(length, 2) for length in lengths], OnPacked()
    options = {"batch_size": len(lengths)} if declared else {}

    def step(module: nn.Module, batch: Any) -> Tensor:
        return module(batch["x"]).mean()

    record = observed(module, {"x": pack_sequence(sequences, enforce_sorted=False)}, step, **options)
    assert_as_one_by_one(module, record, [{"x": pack_sequence([each])} for each in sequences], step)


class ByHand(nn.Module):
    """A recurrence over packed rows that starts from a constant state for each sample, in the order of the packing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(3, 4), nn.Linear(4, 4), nn.Parameter(torch.rand(4))
        self.starts = nn.Buffer(torch.randn(4, 4))

    def forward(self, packed: Any, starts: Tensor) -> Tensor:
        start, first, ended = 0, int(packed.batch_sizes[0]), []
        h = torch.tanh(self.b(starts) * self.scale)
        for count in packed.batch_sizes.tolist():
            if count < len(h):
                ended.append(h[count:])
            h = torch.tanh(self.a(packed.data[start : start + count]) + self.b(h[:count]))
            start += count
        last = torch.cat([h, *reversed(ended)])
        assert len(last) == first
        return last[packed.unsorted_indices].pow(2).sum(1)


def test_a_recurrence_over_packed_rows_that_is_written_by_hand_is_exact() -> None:
    module = ByHand().double()
    sequences = [torch.randn(length, 3, dtype=torch.float64) for length in (3, 5, 1, 4)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    for _ in range(3):
        record = observed(module, packed, lambda m, batch: m(batch, m.starts).mean())
        assert (record.coverage, record.mixing, record.axis_lost) == (1.0, (), ())
        for sample, sequence in enumerate(sequences):
            place = packed.sorted_indices.tolist().index(sample)
            alone = module(pack_sequence([sequence], enforce_sorted=False), module.starts[place : place + 1]).sum()
            grads = torch.autograd.grad(alone, [*module.parameters()])
            for (name, _), expected in zip(module.named_parameters(), grads, strict=True):
                torch.testing.assert_close(record.grad_samples[name][sample], expected)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_recurrent_layer_whose_input_all_samples_share(layer: Any, batch_first: bool) -> None:
    T, B = 5, 4
    recurrent = layer(3, 4, batch_first=batch_first, bidirectional=True)
    module = nn.ModuleDict({"table": nn.Embedding(T, 3), "layer": recurrent, "a": nn.Linear(3, 8)}).double()
    x = torch.randn(B, 3, dtype=torch.float64)

    def step(m: Any, x: Tensor) -> Tensor:
        steps = m["table"](torch.arange(T))
        steps = steps.expand(len(x), T, 3) if batch_first else steps[:, None].expand(T, len(x), 3)
        h = m["a"](x).unflatten(1, (2, 4)).transpose(0, 1).contiguous()
        out, _ = m["layer"](steps, (h, h.tanh()) if layer is nn.LSTM else h)
        return (out if batch_first else out.transpose(0, 1)).square().sum((1, 2)).mean()

    record = observed(module, x, step)
    assert_as_one_by_one(module, record, [x[i : i + 1] for i in range(B)], step)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("way", ["values", "unbind", "padded"])
def test_a_jagged_tensor_is_a_batch(way: str) -> None:
    module, lengths = nn.Linear(3, 2), (3, 1, 4)
    sequences = [torch.randn(length, 3) for length in lengths]

    def step(m: Any, nested: Any) -> Tensor:
        if way == "padded":
            padded = nested.to_padded_tensor(torch.inf)
            there = padded.isfinite().all(2)
            return (m(padded.where(there[..., None], 0)).tanh().square().sum(2) * there).sum(1).mean()
        if way == "unbind":
            return torch.stack([m(each).tanh().square().sum() for each in nested.unbind()]).mean()
        rows = m(nested.values()).tanh().square().sum(1)
        return torch.segment_reduce(rows, "sum", lengths=nested.offsets().diff(), initial=0).mean()

    def jagged(parts: list[Tensor]) -> Tensor:
        return torch.nested.nested_tensor(parts, layout=torch.jagged)

    batch = jagged(sequences)
    record = observed(module, batch, step)
    assert_as_one_by_one(module, record, [jagged([each]) for each in sequences], step)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_mean_over_a_padded_jagged_tensor_is_named() -> None:
    nested = torch.nested.nested_tensor([torch.randn(3, 3), torch.randn(1, 3)], layout=torch.jagged)
    record = observed(nn.Linear(3, 2), nested, lambda m, x: m(x).to_padded_tensor(0.0).square().mean())
    (text,) = record.axis_lost
    assert "`to_padded_tensor` leaves room for rows that a sample of the batch does not have" in text


def test_a_packed_sequence_of_another_number_of_samples_is_named() -> None:
    packed = pack_sequence([torch.randn(3, 2), torch.randn(1, 2)])
    record = observed(OnPacked(), packed, lambda m, batch: m(batch).mean(), batch_size=4)
    assert_named(record, "batch is a packed sequence of 2 samples in a batch of 4|batch axis")


@pytest.mark.parametrize("lengths", [(3, 1), (1, 2, 3), (2, 2)])
def test_tokens_with_lengths_are_named(lengths: tuple[int, ...]) -> None:
    """Also where as many of them as samples could be k rows of each."""
    tokens, count = torch.randn(sum(lengths), 2), torch.tensor(lengths)

    def step(module: nn.Module, batch: Any) -> Tensor:
        return torch.stack([part.square().sum() for part in module(batch[0]).split(batch[1].tolist())]).mean()

    record = observed(nn.Linear(2, 3), (tokens, count), step, batch_size=len(lengths))
    assert_named(record, r"batch\[0\] has shape \(\d, 2\), ")
    with pytest.raises(BatchSizeError, match="do not agree on a number of samples along axis 0"):
        expanded_weights(nn.Linear(2, 3), (tokens, count))


@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
@pytest.mark.parametrize("offsets", [(0, 3, 4, 9), (0, 0, 13, 13), (0, 1, 2, 3)])
@pytest.mark.parametrize("tokens", [13, 16])
def test_tokens_and_offsets_of_an_embedding_bag_are_exact(mode: str, offsets: tuple[int, ...], tokens: int) -> None:
    index, starts = torch.randint(0, 20, (tokens,)), torch.tensor(offsets)
    ends = [*offsets[1:], tokens]
    module = nn.ModuleDict({"bag": nn.EmbeddingBag(20, 4, mode=mode), "head": nn.Linear(4, 2)})

    def step(module: Any, batch: Any) -> Tensor:
        return module["head"](module["bag"](*batch)).square().sum(1).mean()

    record = observed(module, (index, starts), step, batch_size=4)
    samples = [(index[a:b], torch.tensor([0])) for a, b in zip(offsets, ends, strict=True)]
    assert_as_one_by_one(module, record, samples, step)


# initial states, time-major batches, rows that no one declared


class Recurrent(nn.Module):
    def __init__(self, layers: int, bidirectional: bool) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4, num_layers=layers, bidirectional=bidirectional, batch_first=True)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return self.gru(x, state)[0].square().sum((1, 2))


@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (2, False), (2, True), (3, False), (1, True)])
@pytest.mark.parametrize("B", [2, 3, 4])
def test_an_initial_state_beside_a_batch_first_input(layers: int, bidirectional: bool, B: int) -> None:
    rows = layers * (2 if bidirectional else 1)
    x, state, module = torch.randn(B, 5, 3), torch.randn(rows, B, 4), Recurrent(layers, bidirectional)
    samples = [(x[i : i + 1], state[:, i : i + 1]) for i in range(B)]

    def step(module: nn.Module, batch: Any) -> Tensor:
        return module(*batch).mean()

    def declaring(module: nn.Module, batch: Any) -> Tensor:
        return module(batch[0], mark_samples(batch[1], batch_dim=1)).mean()

    assert_as_one_by_one(module, observed(module, (x, state), declaring, batch_size=B), samples, step)
    record = observed(module, (x, state), step, batch_size=B)
    if rows == B:
        assert_named(record, r"axis 1 of its initial state.*call mark_samples\(state, batch_dim=1\)")
    else:
        assert_as_one_by_one(module, record, samples, step)


@pytest.mark.parametrize("T", [5, 3])
def test_labels_beside_time_major_tokens_are_exact(T: int) -> None:
    module = nn.ModuleDict({"table": nn.Embedding(9, 4), "head": nn.Linear(4, 3)})
    tokens, labels = torch.randint(0, 9, (T, 3)), torch.randint(0, 3, (3,))

    def step(module: Any, batch: Any) -> Tensor:
        return F.cross_entropy(module["head"](module["table"](batch[0]).mean(0)), batch[1])

    samples = [(tokens[:, i : i + 1], labels[i : i + 1]) for i in range(3)]
    assert_as_one_by_one(module, observed(module, (tokens, labels), step, batch_dim=1), samples, step)


def pairs(module: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch[0]).reshape(-1, 2, 3).mean(1), batch[1])


def test_several_rows_of_a_sample_are_exact_where_they_are_declared() -> None:
    x, y, module = torch.randn(8, 5), torch.randint(0, 3, (4,)), nn.Linear(5, 3)

    def declaring(module: nn.Module, batch: Any) -> Tensor:
        return pairs(module, (mark_samples(batch[0]), batch[1]))

    samples = [(x[2 * i : 2 * i + 2], y[i : i + 1]) for i in range(4)]
    assert_as_one_by_one(module, observed(module, (x, y), declaring, batch_size=4), samples, pairs)
    assert_named(
        observed(module, (x, y), pairs, batch_size=4),
        r"batch\[0\] has shape \(8, 5\), 8 rows along axis 0 for 4 samples, and which of them are one sample's is not "
        "declared: where each sample has 2 neighbouring rows, pass the tensor to mark_samples in the training step$",
    )


def test_rows_that_are_steps_of_time_are_told_of_the_axis_that_may_hold_the_samples() -> None:
    x, y, module = torch.randn(8, 4, 5), torch.randint(0, 3, (4,)), nn.Linear(5, 3)

    def step(module: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(module(batch[0]).mean(0), batch[1])

    text = r"in the training step; if the samples lie along axis 1, pass batch_dim=1$"
    assert_named(observed(module, (x, y), step, batch_size=4), text)
    samples = [(x[:, i : i + 1], y[i : i + 1]) for i in range(4)]
    assert_as_one_by_one(module, observed(module, (x, y), step, batch_size=4, batch_dim=1), samples, step)


@pytest.mark.parametrize("where", ["first", "last"])
def test_data_that_all_samples_share_may_stand_in_the_batch(where: str) -> None:
    """Class weights, anchors, a mask over positions: a constant of each sample's own loss."""
    x, y, module = torch.randn(4, 5), torch.randint(0, 3, (4,)), nn.Linear(5, 3)
    scale, anchors = torch.rand(5) + 0.5, torch.randn(7, 3)
    batch = {"scale": scale, "anchors": anchors, "x": x, "y": y}
    batch = batch if where == "first" else dict(reversed(batch.items()))

    def step(module: nn.Module, batch: Any) -> Tensor:
        out = module(batch["x"] * batch["scale"])
        return F.cross_entropy(-torch.cdist(out, batch["anchors"].double()), batch["y"])

    record = observed(module, batch, step, batch_size=4)
    assert_as_one_by_one(module, record, [{**batch, "x": x[i : i + 1], "y": y[i : i + 1]} for i in range(4)], step)


@pytest.mark.parametrize("nodes", [43, 48])
def test_rows_of_graphs_are_named(nodes: int) -> None:
    class OnGraphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 16), nn.Linear(16, 1)

        def forward(self, x: Tensor, graph: Tensor, y: Tensor) -> Tensor:
            hidden = torch.zeros(len(y), 16).index_add(0, graph, torch.tanh(self.a(x)))
            return (self.b(hidden) - y).square().mean()

    batch = torch.randn(nodes, 3), torch.randint(0, 8, (nodes,)), torch.randn(8, 1)
    assert_named(observed(OnGraphs(), batch, lambda m, b: m(*b), batch_size=8), r"batch\[0\] has shape|batch axis")


class WithSlots:
    """A batch without a dictionary of attributes; one slot stays empty."""

    __slots__ = ("absent", "inputs", "targets")

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets


class Strict:
    """A batch that refuses to be asked for what it does not have, otherwise than by an AttributeError."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __getattr__(self, name: str) -> Any:
        raise ValueError(f"there is no field {name}")


@dataclasses.dataclass(slots=True)
class SlottedPair:
    inputs: Tensor
    targets: Tensor


@pytest.mark.parametrize("kind", [Pair, SlottedPair, WithSlots, Strict])
def test_tensors_of_an_object_are_found_without_asking_its_code(kind: Any) -> None:
    batch, module = kind(torch.randn(4, 5), torch.randn(4, 2)), nn.Linear(5, 2)
    with expanded_weights(module, batch) as capture:
        (module(batch.inputs) - batch.targets).square().sum(1).mean().backward()
    expected = torch.stack([
        torch.cat([
            grad.flatten()
            for grad in torch.autograd.grad((module(x) - y).square().sum(), [*module.parameters()])
        ]).norm()
        for x, y in zip(batch.inputs, batch.targets, strict=True)
    ])  # fmt: skip
    torch.testing.assert_close(capture.record.norms(), expected)
    assert capture.record.coverage == 1.0
