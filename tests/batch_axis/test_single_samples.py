"""Samples that are taken out of the batch one by one, meet weights alone, and are put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_persample.capture.mode import expanded_weights
from lightning_persample.capture.record import PerSampleRecord
from tests.capture.model_cases import Model, parameter

pytestmark = pytest.mark.usefixtures("double_precision")

B, T, D = 4, 5, 3
Step = Callable[[Any, Any], Tensor]


def assert_as_one_by_one(module: nn.Module, step: Step, batch: Any, samples: Sequence[Any], **options: Any) -> None:
    rows = [torch.autograd.grad(step(module, each), [*module.parameters()], materialize_grads=True) for each in samples]
    for _ in range(3):  # what is decided once is replayed
        with expanded_weights(module, batch, quantities=("sq_norm", "grad_sample"), **options) as capture:
            step(module, batch).backward()
        record = capture.record
        assert (record.coverage, record.mixing, record.axis_lost, record.weighting) == (1.0, (), (), ())
        for (name, _), grads in zip(module.named_parameters(), zip(*rows, strict=True), strict=True):
            expected = torch.stack(grads)
            torch.testing.assert_close(record.grad_samples[name], expected)
            torch.testing.assert_close(record.sq_norms[name], expected.flatten(1).square().sum(1))


WAYS: dict[str, Step] = {
    "unbind": lambda one, x: torch.stack([one(z) for z in x.unbind(0)]).mean(),
    "iterated": lambda one, x: sum(one(z) for z in x) / len(x),
    "by-number": lambda one, x: sum(one(x[i]) for i in range(len(x))) / len(x),
    "backwards": lambda one, x: torch.stack([one(x[len(x) - 1 - i]) for i in range(len(x))]).mean(),
    "selected": lambda one, x: torch.stack([one(x.select(0, i)) for i in range(len(x))]).mean(),
    "sliced": lambda one, x: torch.stack([one(x[i : i + 1][0]) for i in range(len(x))]).mean(),
    "split": lambda one, x: torch.stack([one(z.squeeze(0)) for z in x.split(1)]).mean(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dims", [1, 2])
def test_each_way_to_take_samples_out(way: str, dims: int) -> None:
    x, module = torch.randn(B, *(T, D)[2 - dims :]), nn.Linear(D, 2)

    def step(module: Any, x: Tensor) -> Tensor:
        return WAYS[way](lambda z: module(z).tanh().square().mean(), x)

    assert_as_one_by_one(module, step, x, [x[i : i + 1] for i in range(B)])


def model(**parts: Any) -> nn.Module:
    return Model(lambda m, x: x, **parts)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    "convolution-without-a-batch-axis": (
        lambda: model(c=nn.Conv1d(T, 2, 2)), lambda m, z: m.c(z).pow(3).sum()
    ),
    "convolution": (
        lambda: model(c=nn.Conv1d(T, 4, 1), n=nn.GroupNorm(2, 4)), lambda m, z: m.n(m.c(z[None])).pow(3).sum()
    ),
    "lstm": (
        lambda: model(l=nn.LSTM(D, 4, batch_first=True), h=nn.Linear(4, 2)),
        lambda m, z: m.h(m.l(z[None])[0].mean(1)).square().sum(),
    ),
    "lstm-without-a-batch-axis": (
        lambda: model(l=nn.LSTM(D, 4), h=nn.Linear(4, 2)), lambda m, z: m.h(m.l(z)[0].mean(0)).square().sum()
    ),
    "batch-norm-over-its-own-rows": (
        lambda: model(l=nn.Linear(D, 4), n=nn.BatchNorm1d(4, track_running_stats=False)),
        lambda m, z: m.n(m.l(z)).pow(3).sum(),
    ),
    "layer-norm": (lambda: model(l=nn.Linear(D, 4), n=nn.LayerNorm(4)), lambda m, z: m.n(m.l(z)).pow(3).sum()),
    "attention": (
        lambda: model(i=nn.Linear(D, 4), a=nn.MultiheadAttention(4, 2, batch_first=True)),
        lambda m, z: m.a(*[m.i(z)] * 3)[0].square().sum(),
    ),
    "products": (
        lambda: model(w=parameter(D, 4), v=parameter(4, T)), lambda m, z: (m.v @ (z @ m.w)).square().sum()
    ),
    "with-and-without-its-axis": (
        lambda: model(l=nn.Linear(D, D)), lambda m, z: (m.l(z[None])[0] + z + m.l(z) + m.l(z[None])).tanh().sum()
    ),
    "scale-and-shift": (lambda: model(s=parameter(D)), lambda m, z: (z * m.s + m.s).pow(3).sum()),
    "twice": (lambda: model(l=nn.Linear(D, D)), lambda m, z: m.l(m.l(z).tanh()).square().sum()),
    "in-place": (lambda: model(l=nn.Linear(D, D)), lambda m, z: m.l(z).mul_(2).relu_().square().sum()),
}  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_that_meet_one_sample_at_a_time(layer: str) -> None:
    make, one = LAYERS[layer]
    module, x = make(), torch.randn(B, T, D)

    def step(module: Any, x: Tensor) -> Tensor:
        return sum(one(module, z) for z in x) / len(x)

    assert_as_one_by_one(module, step, x, [x[i : i + 1] for i in range(B)])


def test_a_table_that_is_the_head_too() -> None:
    module, ids = model(e=nn.Embedding(7, 4)), torch.randint(7, (B, T))

    def step(m: Any, ids: Tensor) -> Tensor:
        return torch.stack([F.linear(m.e(z).tanh(), m.e.weight).logsumexp(-1).sum() for z in ids]).mean()

    assert_as_one_by_one(module, step, ids, [ids[i : i + 1] for i in range(B)])


@pytest.mark.parametrize("keeps_axis", [True, False])
def test_labels_and_lengths_come_along(keeps_axis: bool) -> None:
    module, x, y = nn.Linear(D, 5), torch.randn(B, T, D), torch.randint(5, (B,))
    lengths = torch.tensor([5, 3, 4, 1])

    def step(m: Any, batch: Any) -> Tensor:
        losses = []
        for z, label, n in zip(*batch, strict=True):
            scores = m(z[:n]).mean(0)
            losses.append(F.cross_entropy(scores[None], label[None]) if keeps_axis else F.cross_entropy(scores, label))
        return sum(losses) / len(losses)

    batch = x, y, lengths
    assert_as_one_by_one(module, step, batch, [tuple(each[i : i + 1] for each in batch) for i in range(B)])


def test_images_of_unequal_sizes_in_a_list() -> None:
    module = model(c=nn.Conv2d(3, 4, 3), h=nn.Linear(4, 2))
    images = [torch.randn(3, 5 + i, 6) for i in range(B)]

    def step(m: Any, images: list[Tensor]) -> Tensor:
        maps = [m.c(image[None]).relu().mean((2, 3)) for image in images]
        return m.h(torch.cat(maps)).square().sum(1).mean()

    assert_as_one_by_one(module, step, images, [[image] for image in images], batch_size=B)


def test_samples_with_fields_in_a_list() -> None:
    module = nn.Linear(D, 2)
    batch = [{"x": torch.randn(3 + i, D), "y": torch.randn(2)} for i in range(B)]

    def step(m: Any, batch: list[dict[str, Tensor]]) -> Tensor:
        return torch.stack([(m(each["x"]).tanh().mean(0) - each["y"]).square().sum() for each in batch]).mean()

    assert_as_one_by_one(module, step, batch, [[each] for each in batch], batch_size=B)


Targets = Callable[[Tensor, int, Tensor], Any]
TARGETS: dict[str, Targets] = {  # an entry of one sample's target for each of its boxes, whose places these say
    "ones": lambda target, i, cells: target.__setitem__((i, cells[:, 0], cells[:, 1]), 1.0),
    "behind": lambda target, i, cells: target.__setitem__((i, ..., cells[:, 0]), 0.5),
    "a-row": lambda target, i, cells: target[i].__setitem__(cells[:, 0], 1.0),
    "beside-a-list": lambda target, i, cells: target.__setitem__((i, [0, 1], cells[0, 0]), 1.0),
    "a-mask": lambda target, i, cells: target[i].__setitem__(F.one_hot(cells[:, 0], 4).sum(0) > 0, 1.0),
    "a-mask-beside": lambda target, i, cells: target.__setitem__((i, F.one_hot(cells[:, 0], 4).sum(0) > 0), 1.0),
    "one-box": lambda target, i, cells: target.__setitem__((i, cells[0, 0], cells[0, 1]), 2.0),
    "box-by-box": lambda target, i, cells: [target.__setitem__((i, *cell), 1.0) for cell in cells],
    "values": lambda target, i, cells: target.__setitem__((i, cells[:, 0], cells[:, 1]), cells.sum(1).double()),
}


@pytest.mark.parametrize("start", ["zeros", "zeros_like", "of-the-output"])
@pytest.mark.parametrize("name", TARGETS)
def test_targets_of_a_detector_that_the_boxes_of_each_image_say(name: str, start: str) -> None:
    module = nn.Conv2d(3, 1, 1)
    batch = [(torch.randn(3, 4, 4), torch.randint(0, 4, (1 + i % 2, 2))) for i in range(B)]

    def step(m: Any, batch: list[tuple[Tensor, Tensor]]) -> Tensor:
        scores = m(torch.stack([image for image, _ in batch])).squeeze(1)
        beginnings = {"zeros": torch.zeros(scores.shape), "zeros_like": torch.zeros_like(scores)}
        target = beginnings.get(start, scores.detach() * 0.1)
        for i, (_, cells) in enumerate(batch):
            TARGETS[name](target, i, cells)
        return F.binary_cross_entropy_with_logits(scores, target) + (scores * target).pow(2).mean()

    assert_as_one_by_one(module, step, batch, [[each] for each in batch], batch_size=B)


def test_targets_of_some_images_alone() -> None:
    """The others have no box, and their targets stay as they were."""
    module = nn.Conv2d(3, 1, 1)
    batch = [(torch.randn(3, 4, 4), torch.randint(0, 4, (i % 2, 2))) for i in range(B)]

    def step(m: Any, batch: list[tuple[Tensor, Tensor]]) -> Tensor:
        scores = m(torch.stack([image for image, _ in batch])).squeeze(1)
        target = torch.zeros_like(scores)
        for i, (_, cells) in enumerate(batch):
            if len(cells):
                target[i, cells[:, 0], cells[:, 1]] = 1.0
        return F.mse_loss(scores, target)

    assert_as_one_by_one(module, step, batch, [[each] for each in batch], batch_size=B)


OF_NEIGHBOURS: dict[str, Callable[[Tensor, int, Tensor], Any]] = {
    "the-next-row": lambda target, i, cells: target.__setitem__((i - 1, cells[:, 0], cells[:, 1]), 1.0),
    "all-rows": lambda target, i, cells: target.__setitem__((slice(None), cells[:, 0], cells[:, 1]), 1.0),
    "the-row-that-it-says": lambda target, i, cells: target.__setitem__((cells[:, 0],), 1.0),
}


@pytest.mark.parametrize("name", OF_NEIGHBOURS)
def test_targets_that_the_boxes_of_another_image_say_are_named(name: str) -> None:
    module = nn.Conv2d(3, 1, 1)
    batch = [(torch.randn(3, 4, 4), torch.randint(0, 4, (2, 2))) for _ in range(B)]
    with expanded_weights(module, batch, batch_size=B, unsupported="ignore") as capture:
        scores = module(torch.stack([image for image, _ in batch])).squeeze(1)
        target = torch.zeros_like(scores)
        for i, (_, cells) in enumerate(batch):
            OF_NEIGHBOURS[name](target, i, cells)
        F.mse_loss(scores, target).backward()
    record = capture.record
    assert record.mixing or record.weighting or record.axis_lost


def captured(step: Step) -> PerSampleRecord:
    module, x = nn.Linear(D, 2), torch.randn(B, D)
    with expanded_weights(module, x, unsupported="ignore") as capture:
        step(module, x).backward()
    return capture.record


@pytest.mark.parametrize(
    "pair",
    [
        lambda m, one, two: (m(one) * m(two)).sum(),
        lambda m, one, two: m(one - two).square().sum(),
        lambda m, one, two: m(torch.cat([one[None], two[None]])).square().mean(0).sum().sqrt(),
        lambda m, one, two: (m(one[None]) @ m(two)).sum(),
    ],
)
def test_two_samples_that_meet_are_named(pair: Callable[..., Tensor]) -> None:
    record = captured(lambda m, x: sum(pair(m, x[i], x[i - 1]) for i in range(len(x))) / len(x))
    assert record.mixing or record.axis_lost or record.coverage == 0


@pytest.mark.parametrize("batch_size", [1, B])
@pytest.mark.parametrize("recurrent", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_recurrent_layer_on_samples_that_were_put_together(recurrent: type[nn.RNNBase], batch_size: int) -> None:
    """Also where the batch has one sample alone, which needs no axis until several outputs ask for it."""
    torch.manual_seed(0)
    module, x = model(w=parameter(D, 4), cell=recurrent(4, 4, batch_first=True)), torch.randn(batch_size, T, D)

    def step(m: Any, x: Tensor) -> Tensor:
        return m.cell(torch.stack([z @ m.w for z in x]))[0].square().sum((1, 2)).mean()

    assert_as_one_by_one(module, step, x, [x[i : i + 1] for i in range(batch_size)])
