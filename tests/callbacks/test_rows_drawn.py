"""In a Trainer the samples of a batch are the rows that the sampler drew, and an extra pass cuts a batch only there."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_persample import PerSampleWarning, mark_samples
from tests.callbacks.runs import Recorder, fit


class Stepping(L.LightningModule):
    """Trains a network by any step."""

    def __init__(self, network: nn.Module, step: Any) -> None:
        super().__init__()
        self.network, self.step = network, step

    def training_step(self, batch, batch_idx):
        return self.step(self.network, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Rows(Dataset):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Any:
        return self.rows[place]


def captured(network: nn.Module, step: Any, data: Any, **options: Any) -> tuple[list[Tensor], list[str]]:
    """The norms of each record of an epoch, and what was warned of; training is as without the callback."""
    weights = []
    for callbacks in ([], [Recorder(1, **options)]):
        module = Stepping(copy.deepcopy(network), step)
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(module, callbacks, data=data)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
    assert torch.equal(*weights)
    texts = [str(each.message) for each in caught if each.category is PerSampleWarning]
    return [record.norms() for record in callbacks[0].records], texts


def one_by_one(network: nn.Module, step: Any, samples: list[Any]) -> Tensor:
    norms = []
    for sample in samples:
        alone = copy.deepcopy(network)
        step(alone, sample).backward()
        norms.append(torch.cat([parameter.grad.flatten() for parameter in alone.parameters()]).norm())
    return torch.stack(norms)


def items(network: nn.Module, batch: Any) -> Tensor:
    return network(torch.stack(list(batch))).square().mean()


class Streamed(IterableDataset):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def named(rows: Any) -> Any:
    return {"x": tuple(rows), "n": len(rows)}


def scaled(rows: Any) -> Any:
    return tuple(row * 1.0 for row in rows)


def zipped(rows: Any) -> Any:
    return tuple(zip(*rows, strict=True))


def of_items(network: nn.Module, batch: Any) -> Tensor:
    return items(network, batch["x"] if isinstance(batch, dict) else batch)


@pytest.mark.parametrize("kind", [Rows, Streamed])
@pytest.mark.parametrize("collate", [list, tuple, named, scaled])
@pytest.mark.parametrize(("count", "size"), [(16, 6), (4, 6), (4, 8), (1, 6)])
def test_samples_in_a_sequence_are_read_by_the_rows_that_were_drawn(kind, collate, count, size):
    rows, network = [torch.randn(size, 5) for _ in range(count)], nn.Linear(5, 2)
    norms, texts = captured(network, of_items, DataLoader(kind(rows), count, collate_fn=collate))
    assert texts == []
    torch.testing.assert_close(norms, [one_by_one(network, of_items, [collate([row]) for row in rows])])


@pytest.mark.parametrize("options", [{}, {"engine": "loop"}], ids=str)
@pytest.mark.parametrize("kind", [Rows, Streamed])
@pytest.mark.parametrize(("collate", "where"), [(list, ""), (tuple, ""), (named, "['x']"), (scaled, "")])
def test_as_many_samples_as_rows_of_each_are_refused(kind, collate, where, options):
    rows = [torch.randn(6, 5) for _ in range(8)]
    norms, texts = captured(nn.Linear(5, 2), of_items, DataLoader(kind(rows), 6, collate_fn=collate), **options)
    assert [len(each) for each in norms] == [2]  # the last batch
    assert texts == [
        f"batch{where} holds 6 tensors for 6 samples, and its tensors have 6 rows along axis 0 each: whether an item "
        "is a sample or holds a row of every sample cannot be read from it; pass batch_size=6 if each is one sample, "
        "and pass a mapping in its place, or batch_layout, if each holds a row of every sample"
    ]


@pytest.mark.parametrize("collate", [list, tuple, named, scaled])
def test_with_a_declared_number_of_samples_as_many_items_are_one_each(collate):
    rows, network = [torch.randn(6, 5) for _ in range(6)], nn.Linear(5, 2)
    data = DataLoader(Rows(rows), 6, collate_fn=collate)
    for options in ({}, {"verify": True}, {"engine": "loop"}):
        norms, texts = captured(network, of_items, data, batch_size=6, **options)
        assert texts == []
        torch.testing.assert_close(norms, [one_by_one(network, of_items, [collate([row]) for row in rows])])


@pytest.mark.parametrize("options", [{}, {"verify": True}, {"engine": "loop"}], ids=str)
@pytest.mark.parametrize("label", [int, torch.tensor, lambda number: torch.tensor([number])])
@pytest.mark.parametrize("collate", [tuple, lambda rows: tuple(zip(*rows, strict=True))], ids=["samples", "fields"])
def test_tuples_of_samples_are_read_alike_by_every_engine_and_by_verify(collate, label, options):
    def step(network: nn.Module, batch: Any) -> Tensor:
        images, labels = batch if len(batch) == 2 else tuple(zip(*batch, strict=True))
        assert isinstance(images, tuple)
        pairs = zip(images, labels, strict=True)
        return torch.stack(
            [F.cross_entropy(network(x).mean(0), torch.as_tensor(y).reshape(())) for x, y in pairs]
        ).mean()

    rows, network = [(torch.randn(2 + n % 3, 5), label(n % 2)) for n in range(3)], nn.Linear(5, 2)
    norms, texts = captured(network, step, DataLoader(Rows(rows), 3, collate_fn=collate), **options)
    assert texts == []
    ones = [((x,), (y,)) for x, y in rows]
    torch.testing.assert_close(norms, [one_by_one(network, step, ones)])


def test_items_that_hold_a_row_of_every_sample_are_declared_by_a_layout():
    def columns(rows: Any) -> Any:
        return list(torch.stack(rows).unbind(1))

    def step(network: nn.Module, batch: Any) -> Tensor:
        return network(torch.stack(list(batch), 1)).square().sum(2).mean()

    rows, network = [torch.randn(6, 5) for _ in range(6)], nn.Linear(5, 2)
    data = DataLoader(Rows(rows), 6, collate_fn=columns)
    norms, texts = captured(network, step, data, batch_layout=lambda batch: dict.fromkeys(batch, 0))
    assert texts == []
    torch.testing.assert_close(norms, [one_by_one(network, step, [columns([row]) for row in rows])])


def test_rows_are_counted_where_a_worker_process_makes_the_batch():
    rows, network = [torch.randn(6, 5) for _ in range(4)], nn.Linear(5, 2)
    norms, texts = captured(network, items, DataLoader(Streamed(rows), 4, collate_fn=tuple, num_workers=1))
    assert texts == []
    torch.testing.assert_close(norms, [one_by_one(network, items, [(row,) for row in rows])])


def of_zipped(network: nn.Module, batch: Any) -> Tensor:
    first, second = batch
    return (network(torch.stack(list(first))) - 2 * network(torch.stack(list(second)))).square().mean()


def of_pairs(network: nn.Module, batch: Any) -> Tensor:
    return of_zipped(network, list(zip(*batch, strict=True)))


@pytest.mark.parametrize("kind", [Rows, Streamed])
@pytest.mark.parametrize("of_row", [tuple, list])
@pytest.mark.parametrize(
    ("collate", "step"),
    [(list, of_pairs), (tuple, of_pairs), (zipped, of_zipped), (lambda r: list(zipped(r)), of_zipped)],
)
def test_pairs_of_two_samples_are_not_taken_for_samples_of_two_parts(kind, of_row, collate, step):
    rows, network = [of_row(torch.randn(2, 6, 5)) for _ in range(2)], nn.Linear(5, 2)
    norms, texts = captured(network, step, DataLoader(kind(rows), 2, collate_fn=collate))
    assert texts == []
    torch.testing.assert_close(norms, [one_by_one(network, step, [collate([row]) for row in rows])])


def test_two_lists_of_which_either_may_hold_the_samples_are_refused():
    rows = [torch.randn(2, 6, 5) for _ in range(2)]
    data = DataLoader(
        Rows(rows), 2, collate_fn=lambda rows: [[row[0] * 1.0 for row in rows], [row[1] * 1.0 for row in rows]]
    )
    norms, texts = captured(nn.Linear(5, 2), of_zipped, data)
    assert norms == []
    assert texts == [
        "batch[0] holds 2 items for 2 samples, and so does a list that it is in: which of them has one item per sample "
        "cannot be read from it; stack items that are one sample each"
    ]


def test_an_item_of_a_stream_that_is_a_batch_is_read_as_one():
    batch, network = (torch.randn(4, 5), torch.randint(0, 2, (4,))), nn.Linear(5, 2)
    norms, texts = captured(network, classify, DataLoader(Streamed([batch]), None))
    assert texts == []
    samples = [(x[None], y[None]) for x, y in zip(*batch, strict=True)]
    torch.testing.assert_close(norms, [one_by_one(network, classify, samples)])


def approach(network: nn.Module, batch: Any) -> Tensor:
    x, y = batch["pair"] if isinstance(batch, dict) else batch
    return (network(x) - y).square().mean()


@pytest.mark.parametrize("kind", [tuple, lambda pair: {"pair": tuple(pair)}], ids=["tuple", "in a dict"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_tuple_of_which_torch_makes_a_list_is_of_fields(kind, workers):
    pair, network = (torch.randn(4, 5), torch.randn(4, 2)), nn.Linear(5, 2)
    norms, texts = captured(network, approach, DataLoader(Streamed([kind(pair)]), None, num_workers=workers))
    assert texts == []
    samples = [(x[None], y[None]) for x, y in zip(*pair, strict=True)]
    torch.testing.assert_close(norms, [one_by_one(network, approach, samples)])


def test_a_list_that_a_stream_gives_as_a_batch_may_hold_samples():
    norms, (text,) = captured(
        nn.Linear(5, 2), approach, DataLoader(Streamed([[torch.randn(4, 5), torch.randn(4, 2)]]), None)
    )
    assert norms == []
    assert "either each of them is one sample, or each holds a row of every sample along axis 0" in text


@pytest.mark.parametrize("count", [2, 5])
def test_lists_that_torch_collates_are_fields(count):
    """A pair of tensors of one kind, also in a batch of two samples."""

    def step(network: nn.Module, batch: Any) -> Tensor:
        return (network(batch[0]) - network(batch[1])).square().sum(1).mean()

    first, second, network = torch.randn(count, 5), torch.randn(count, 5), nn.Linear(5, 2, bias=False)
    norms, texts = captured(network, step, DataLoader(TensorDataset(first, second), count))
    assert texts == []
    samples = [(first[i : i + 1], second[i : i + 1]) for i in range(count)]
    torch.testing.assert_close(norms, [one_by_one(network, step, samples)])


class OnPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 4)

    def forward(self, packed: PackedSequence) -> Tensor:
        rows = packed._replace(data=self.linear(packed.data).tanh())
        return pad_packed_sequence(rows, batch_first=True)[0].square().sum((1, 2)).mean()


def test_packed_sequences_are_exact():
    rows, network = [torch.randn(length, 2) for length in (1, 3, 2)], OnPacked()
    data = DataLoader(Rows(rows), 3, collate_fn=lambda rows: pack_sequence(rows, enforce_sorted=False))
    norms, texts = captured(network, lambda network, batch: network(batch), data)
    assert texts == []
    samples = [pack_sequence([row]) for row in rows]
    torch.testing.assert_close(norms, [one_by_one(network, lambda network, batch: network(batch), samples)])


LABELLED = TensorDataset(torch.randn(4, 5), torch.randint(0, 2, (4,)))


def classify(network: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(network(batch[0]), batch[1])


def dropping(rows: Any) -> Any:
    return torch.stack([x for x, _ in rows[1:]]), torch.stack([y for _, y in rows[1:]])


def doubling(rows: Any) -> Any:
    return torch.stack([x for x, _ in rows for _ in range(2)]), torch.stack([y for _, y in rows for _ in range(2)])


def test_another_batch_axis_is_proposed_where_it_has_as_many_rows_as_were_drawn():
    def step(network: nn.Module, batch: Any) -> Tensor:
        return (network(batch[0])[-1].sum(1) - batch[1]).square().mean()

    def time_major(rows: Any) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in rows], 1)[..., None], torch.stack([y for _, y in rows]).float()

    data = DataLoader(LABELLED, 4, collate_fn=time_major)
    _, texts = captured(nn.Linear(1, 2), step, data)
    assert "pass batch_dim" in texts[0]
    norms, texts = captured(nn.Linear(1, 2), step, data, batch_dim=1)
    assert texts == []
    assert norms[0].isfinite().all()


def test_a_collate_function_that_drops_rows_is_refused_unless_the_samples_are_named():
    data = DataLoader(LABELLED, 4, collate_fn=dropping)
    norms, texts = captured(nn.Linear(5, 2), classify, data)
    assert norms == []
    assert texts == [
        "the tensors of the batch hold 3 samples along axis 0, but the data loader drew 4 rows for this batch, of "
        "which nothing is reported: pass batch_dim if the samples lie along another axis; where a collate function or "
        "a hook of the module adds or drops rows, pass sample_index=<function of the batch that returns the index of "
        "each sample>"
    ]
    network = nn.Linear(5, 2)
    norms, texts = captured(network, classify, data, sample_index=lambda batch: [1, 2, 3])
    assert texts == []
    samples = [(x[None], y[None]) for x, y in LABELLED]
    torch.testing.assert_close(norms, [one_by_one(network, classify, samples[1:])])


def test_rows_that_a_collate_function_doubles_are_named_unless_they_are_declared():
    def declaring(network: nn.Module, batch: Any) -> Tensor:
        return classify(network, (mark_samples(batch[0]), mark_samples(batch[1])))

    data, network = DataLoader(LABELLED, 4, collate_fn=doubling), nn.Linear(5, 2)
    norms, texts = captured(network, classify, data)
    assert norms[0].isnan().all()
    assert (
        "batch[0] has shape (8, 5), 8 rows along axis 0 for 4 samples, and which of them are one sample's" in texts[0]
    )
    norms, texts = captured(network, declaring, data)
    assert texts == []
    samples = [(x.expand(2, -1), y.expand(2)) for x, y in LABELLED]
    torch.testing.assert_close(norms, [one_by_one(network, classify, samples)])


def test_a_batch_size_other_than_the_rows_drawn_is_refused():
    norms, texts = captured(nn.Linear(5, 2), classify, DataLoader(LABELLED, 4), batch_size=2)
    assert norms == []
    assert len(texts) == 1
    what = "batch_size=2, but the data loader drew 4 rows for this batch, of which nothing is reported"
    assert texts[0].startswith(f"{what}: leave batch_size out; where a collate function")


def test_a_stream_whose_rows_are_dropped_is_refused():
    norms, texts = captured(nn.Linear(5, 2), classify, DataLoader(Streamed(LABELLED), 4, collate_fn=dropping))
    assert norms == []
    assert texts[0].startswith(
        "the tensors of the batch hold 3 samples along axis 0, but the data loader drew 4 rows for this batch"
    )


def test_rows_of_a_stream_that_are_stacked_are_samples():
    network = nn.Linear(5, 2)
    norms, texts = captured(network, classify, DataLoader(Streamed(LABELLED), 4))
    assert texts == []
    torch.testing.assert_close(norms, [one_by_one(network, classify, [(x[None], y[None]) for x, y in LABELLED])])


# extra passes


class OnGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, graph: Tensor, y: Tensor) -> Tensor:
        hidden = torch.zeros(len(y), 16).index_add(0, graph, torch.tanh(self.a(x)))
        return (self.b(hidden) - y).square().mean()


@pytest.mark.parametrize("options", [{"engine": "loop"}, {"engine": "vmap"}, {"unsupported": "vmap"}], ids=str)
@pytest.mark.parametrize("nodes", [43, 48])
def test_a_batch_that_cannot_be_cut_is_refused_by_the_second_engines(options, nodes):
    batch = torch.randn(nodes, 3), torch.arange(nodes) % 8, torch.randn(8, 1)
    data = DataLoader(Rows(range(8)), 8, collate_fn=lambda rows: batch)
    norms, texts = captured(OnGraphs(), lambda network, batch: network(*batch), data, **options)
    assert all(each.isnan().all() for each in norms)
    assert f"cannot cut the batch into samples: batch[0] has shape ({nodes}, 3), " in texts[0]
    assert "share out of the batch, as a buffer of the module or a number (rows that offsets, an index or " in texts[0]
    assert "mark_samples give to the samples are for engine='expanded')" in texts[0]


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x[:, None])).flatten(1))


NOT_SUMS = {
    "batch norm": (Normalized, classify),
    "fixed divisor": (lambda: nn.Linear(5, 2), lambda n, batch: classify(n, batch) * len(batch[0]) / 4),
    "sum for a mean": (lambda: nn.Linear(5, 2), lambda network, batch: classify(network, batch) * len(batch[0])),
    "contrast": (lambda: nn.Linear(5, 2), lambda network, batch: network(batch[0]).std(0, unbiased=False).sum()),
    "half of the samples": (lambda: nn.Linear(5, 2), lambda n, batch: classify(n, (batch[0][:2], batch[1][:2]))),
}


@pytest.mark.parametrize("case", NOT_SUMS)
@pytest.mark.parametrize("dropout", [None, 0.5])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_samples_that_do_not_add_up_to_the_gradient_are_refused(case, engine, dropout):
    make, step = NOT_SUMS[case]
    if engine == "vmap" and case == "batch norm":
        pytest.skip("torch.func refuses it")
    network = make() if dropout is None else nn.Sequential(make(), nn.Dropout(dropout))
    norms, texts = captured(network, step, DataLoader(LABELLED, 4), engine=engine)
    assert norms == []
    assert len(texts) == 1
    compared = "the gradient of the batch, both taken without dropout"
    assert texts[0].startswith(
        f"engine={engine!r} is not used in this fit: The gradients of the samples do not add up to {compared}; they "
        "are off for `network."
    )
    if (
        case == "fixed divisor"
    ):  # one sample's loss is divided by 4 as well: "sum" would report a quarter of its gradient
        assert texts[0].endswith("; where it is divided by a fixed number of samples, divide by the rows of the batch")
        return
    if case == "sum for a mean":
        assert "%. The loss is a sum over the samples and no mean: pass loss_reduction='sum'; where it is" in texts[0]
        norms, texts = captured(network, step, DataLoader(LABELLED, 4), engine=engine, loss_reduction="sum")
        assert (len(norms), texts) == (1, [])
        return
    assert texts[0].endswith(
        "The loss of the batch is not made of the losses of its samples as loss_reduction says (samples that weigh "
        "otherwise, samples that influence each other as in batch normalization, a term that belongs to no sample), or "
        "the batch is cut otherwise than its data lie"
    )


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_mean_for_a_sum_is_named(engine):
    data = DataLoader(LABELLED, 4)
    norms, texts = captured(nn.Linear(5, 2), classify, data, engine=engine, loss_reduction="sum")
    assert norms == []
    assert texts[0].endswith("%. The loss is a mean over the samples and no sum: pass loss_reduction='mean'")


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_samples_that_add_up_or_draw_are_not_refused(engine, dropout):
    network = nn.Sequential(nn.Linear(5, 8), nn.Dropout(dropout), nn.Linear(8, 2))
    norms, texts = captured(network, classify, DataLoader(LABELLED, 2), engine=engine)
    assert texts == []
    assert [len(each) for each in norms] == [2, 2]


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_samples_that_draw_without_a_dropout_layer_are_not_compared_with_one_warning(engine):
    def noisy(network: nn.Module, batch: Any) -> Tensor:
        return classify(network, (batch[0] + torch.randn_like(batch[0]), batch[1]))

    norms, texts = captured(nn.Linear(5, 2), noisy, DataLoader(LABELLED, 2), engine=engine)
    assert texts == [
        f"engine={engine!r} could not be compared with the gradient of the batch, because training_step draws random "
        "numbers: where samples influence each other or are weighted differently from loss_reduction, the values are "
        "not those of the training step"
    ]
    assert [len(each) for each in norms] == [2, 2]


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_weighted_losses_add_up_as_they_are_weighted(engine):
    class_weights = torch.tensor([1.0, 3.0])

    def weighted(network: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(network(batch[0]), batch[1], weight=class_weights)

    def shares(outputs: Any, batch: Any) -> Tensor:
        return class_weights[batch[1]] / class_weights[batch[1]].sum()

    norms, texts = captured(nn.Linear(5, 2), weighted, DataLoader(LABELLED, 4), engine=engine, loss_reduction=shares)
    assert texts == []
    assert len(norms) == 1
