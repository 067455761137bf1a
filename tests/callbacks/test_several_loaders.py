"""Several data loaders with unequal batch sizes side by side: each row is a sample of its own."""

from __future__ import annotations

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_persample import PerSampleGradientMonitor, PerSampleGradientWriter, PerSampleWarning
from lightning_persample.influence import read_ledger, self_influence
from tests.callbacks.runs import Recorder

pytestmark = pytest.mark.usefixtures("double_precision")

D, QUANTITIES = 3, ("sq_norm", "grad_sample")


class Stream(IterableDataset):
    def __iter__(self):
        return zip(torch.randn(24, D, generator=torch.Generator().manual_seed(3)), strict=True)


def loaders(sizes=(4, 6), rows=(22, 21)) -> dict[str, DataLoader]:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(count, D, generator=generator) for count in rows]
    labels = torch.randint(0, 2, rows[:1], generator=generator)
    labelled = DataLoader(TensorDataset(inputs[0], labels), sizes[0], shuffle=True)
    return {"labelled": labelled, "more": DataLoader(TensorDataset(inputs[1]), sizes[1], shuffle=True)}


def joined(module, labelled, more) -> Tensor:
    """One call of the network for both, as semi-supervised training does it."""
    out = module.network(torch.cat([labelled[0], more[0]]))
    first, second = out.split([len(labelled[0]), len(more[0])])
    return F.cross_entropy(first, labelled[1]) + second.square().sum(1).mean()


def one_by_one(module, labelled, more) -> Tensor:
    total = 0.0
    total += module.of_labelled(labelled).mean()
    total += module.of_more(more).mean()
    return total


# What is made of the two; the number that the mean of `more` is multiplied by, None of a mean over all rows together.
LOSSES = {
    "two means": (lambda m, a, b: m.of_labelled(a).mean() + m.of_more(b).mean(), 1.0),
    "one network": (joined, 1.0),
    "added in place": (one_by_one, 1.0),
    "stacked": (lambda m, a, b: torch.stack([m.of_labelled(a).mean(), m.of_more(b).mean()]).sum(), 1.0),
    "side by side": (lambda m, a, b: torch.hstack([m.of_labelled(a).mean(), m.of_more(b).mean()]).sum(), 1.0),
    "a product with ones": (
        lambda m, a, b: torch.stack([m.of_labelled(a).mean(), m.of_more(b).mean()]) @ torch.ones(2),
        1.0,
    ),
    "with a weight": (lambda m, a, b: m.of_labelled(a).mean() + 0.6 * m.of_more(b).mean(), 0.6),
    "a sum that is divided": (lambda m, a, b: m.of_labelled(a).sum() / len(a[0]) + m.of_more(b).mean() / 2, 0.5),
    "one mean over all": (lambda m, a, b: torch.cat([m.of_labelled(a), m.of_more(b)]).mean(), 1.0),
    "a sum over all that is divided": (
        lambda m, a, b: (m.of_labelled(a).sum() + m.of_more(b).sum()) / (len(a[0]) + len(b[0])),
        1.0,
    ),
}


class TwoKinds(L.LightningModule):
    """Trains on labelled rows and on others, and keeps the gradients of each row's own loss before each step."""

    def __init__(self, loss, weight: float = 1.0, places=("labelled", "more")) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 2))
        self.loss, self.weight, self.places, self.expected = loss, weight, places, []

    def of_labelled(self, batch) -> Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1], reduction="none")

    def of_more(self, batch) -> Tensor:
        return self.network(batch[0]).square().sum(1)

    def on_train_batch_start(self, batch, batch_idx):
        labelled, more = (batch[place] for place in self.places)
        own = [] if labelled is None else [*self.of_labelled(labelled)]
        own += [] if more is None else [*self.weight * self.of_more(more)]
        rows = [torch.autograd.grad(each, [*self.parameters()], retain_graph=True) for each in own]
        self.expected.append(torch.stack([torch.cat([grad.flatten() for grad in row]) for row in rows]))

    def training_step(self, batch, batch_idx):
        labelled, more = (batch[place] for place in self.places)
        if labelled is None or more is None:
            return self.of_labelled(labelled).mean() if more is None else self.weight * self.of_more(more).mean()
        return self.loss(self, labelled, more)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module, data, *callbacks, **settings) -> None:
    torch.manual_seed(5)
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False} | settings
    L.Trainer(callbacks=[*callbacks], enable_progress_bar=False, accelerator="cpu", **options).fit(module, data)


def assert_exact(recorder, module) -> None:
    assert len(recorder.records) == len(module.expected) > 0
    for record, expected in zip(recorder.records, module.expected, strict=True):
        assert (record.coverage, record.mixing, record.axis_lost, record.weighting) == (1.0, (), (), ())
        found = torch.cat([record.grad_samples[name].flatten(1) for name in record.names], 1)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(record.norms(), expected.norm(dim=1))


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
@pytest.mark.parametrize("name", LOSSES)
def test_each_row_is_a_sample_and_weighs_as_in_its_own_mean(name, mode):
    loss, weight = LOSSES[name]
    module, recorder = TwoKinds(loss, weight), Recorder(1, quantities=QUANTITIES)
    fit(module, CombinedLoader(loaders(), mode), recorder)
    assert_exact(recorder, module)


def test_of_a_sum_each_row_weighs_one():
    module = TwoKinds(lambda m, a, b: m.of_labelled(a).sum() + m.of_more(b).sum())
    recorder = Recorder(1, quantities=QUANTITIES, loss_reduction="sum")
    fit(module, CombinedLoader(loaders(), "min_size"), recorder)
    assert_exact(recorder, module)


def test_weights_of_the_users_follow_the_order_of_the_loaders():
    module = TwoKinds(lambda m, a, b: m.of_labelled(a).mean() + 3 * m.of_more(b).mean())

    def weights(outputs, batch):
        counts = [len(batch["labelled"][0]), len(batch["more"][0])]
        return torch.cat([torch.full((counts[0],), 1 / counts[0]), torch.full((counts[1],), 3 / counts[1])])

    recorder = Recorder(1, quantities=QUANTITIES, loss_reduction=weights)
    fit(module, CombinedLoader(loaders(), "min_size"), recorder)
    assert_exact(recorder, module)


NAMED = {
    "a sum": (
        lambda m, a, b: m.of_labelled(a).sum() + m.of_more(b).sum(),
        "the loss is a sum over the samples, but loss_reduction is 'mean': pass loss_reduction='sum'",
    ),
    "a mean and a sum": (
        lambda m, a, b: m.of_labelled(a).mean() + m.of_more(b).sum(),
        "`add` puts a mean and a sum over the samples together",
    ),
    "twice": (
        lambda m, a, b: m.of_labelled(a).mean() + torch.cat([m.of_labelled(a), m.of_more(b)]).mean(),
        "`add` combines means over different numbers of samples, or over some twice",
    ),
    "class weights": (
        lambda m, a, b: F.cross_entropy(m.network(a[0]), a[1], weight=torch.tensor([1.0, 3.0])) + m.of_more(b).mean(),
        "averages over targets that weigh unequally from sample to sample",
    ),
    "a root": (
        lambda m, a, b: (m.of_labelled(a).mean() + m.of_more(b).mean()).sqrt(),
        "`sqrt` of a value computed over the whole batch is not a sum over samples",
    ),
    "a product": (
        lambda m, a, b: m.of_labelled(a).mean() * m.of_more(b).mean(),
        "`mul` of a value computed over the whole batch is not a sum over samples",
    ),
    "rows of one laid over those of the other": (
        lambda m, a, b: (m.network(a[0][:3]) - m.network(b[0][:3])).square().mean(),
        "`square` of a value computed over the whole batch is not a sum over samples",
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_is_no_sum_of_the_loaders_means_is_named(name):
    loss, text = NAMED[name]
    module, recorder = TwoKinds(loss), Recorder(1, quantities=QUANTITIES)
    with pytest.warns(PerSampleWarning):
        fit(module, CombinedLoader(loaders(), "min_size"), recorder, limit_train_batches=1)
    (record,) = recorder.records
    said = (*record.weighting, *record.mixing, *record.axis_lost, *record.unsupported.values())
    assert any(text in each for each in said), said


@pytest.mark.parametrize("half", [True, False])
def test_one_row_of_each_may_have_two_meanings(half):
    def loss(m, a, b):
        together = m.of_labelled(a).sum() + m.of_more(b).sum()
        return 0.5 * (m.of_labelled(a).mean() + m.of_more(b).mean()) if half else together / (len(a[0]) + len(b[0]))

    module, recorder = TwoKinds(loss, weight=0.5 if half else 1.0), Recorder(1, quantities=QUANTITIES)
    with pytest.warns(PerSampleWarning, match="each data loader gave one row, so that the loss may be the mean over"):
        fit(module, CombinedLoader(loaders((4, 5), (5, 6)), "min_size"), recorder)
    first, second = recorder.records
    assert first.weighting == ()
    assert second.weighting[0].startswith("each data loader gave one row, so that the loss may be the mean over these")


@pytest.mark.parametrize("places", [(0, 1), ("labelled", "more")])
def test_a_sample_is_named_by_its_loader_and_its_index(places, tmp_path):
    module = TwoKinds(LOSSES["two means"][0], places=places)
    data = dict(zip(places, loaders().values(), strict=True))
    if places == (0, 1):
        data = [*data.values()]
    monitor, writer = PerSampleGradientMonitor(1), PerSampleGradientWriter(tmp_path / "ledger", every_n_steps=1)
    recorder = Recorder(1)
    fit(module, data, monitor, writer, recorder)
    names = [f"{places[0]}/{row}" for row in range(22)] + [f"{places[1]}/{row}" for row in range(21)]
    for record in recorder.records:
        assert len(record.sample_index) == record.batch_size
    worst = monitor.worst(100)
    assert set(worst.index) == set(names)
    table = read_ledger(tmp_path / "ledger").to_pydict()
    assert set(table["sample_index"]) == set(names)
    last = dict(zip(table["sample_index"], table["norm"], strict=True))
    assert dict(zip(worst.index, worst.last, strict=True)) == pytest.approx(last)
    assert {index for index, _ in self_influence(read_ledger(tmp_path / "ledger")).top(50)} == set(names)


def test_a_sample_without_an_index_has_none_beside_those_that_have_one(tmp_path):
    data = {"labelled": loaders()["labelled"], "more": DataLoader(Stream(), 6)}
    module, recorder = TwoKinds(LOSSES["two means"][0]), Recorder(1, quantities=QUANTITIES)
    monitor, writer = PerSampleGradientMonitor(1), PerSampleGradientWriter(tmp_path, every_n_steps=1)
    fit(module, CombinedLoader(data, "min_size"), recorder, monitor, writer)
    assert_exact(recorder, module)
    for record in recorder.records:
        assert [key is None for key in record.sample_index] == [False] * 4 + [True] * 6
    assert all(index.startswith("labelled/") for index in monitor.worst(100).index)
    found = read_ledger(tmp_path).to_pydict()["sample_index"]
    assert {index is None for index in found} == {True, False}
    assert "None" not in found


def test_statistics_are_those_of_the_weighted_rows():
    module, monitor = TwoKinds(LOSSES["two means"][0]), PerSampleGradientMonitor(1)
    logged = []

    class Watch(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            logged.append(torch.cat([p.grad.flatten() for p in pl_module.parameters()]).norm())

        def on_train_batch_end(self, trainer, *args):
            logged.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    fit(module, CombinedLoader(loaders(), "min_size"), monitor, Watch(), limit_train_batches=1)
    norm, values = logged
    (grads,) = module.expected
    weighted = grads * torch.tensor([10 / 4] * 4 + [10 / 6] * 6)[:, None]
    torch.testing.assert_close(weighted.mean(0).norm(), norm)
    small, large = weighted.square().sum(1).mean(), weighted.mean(0).square().sum()
    noise = (small - large) * 10 / 9
    expected = {
        "norm_mean": grads.norm(dim=1).mean(),
        "norm_of_mean": norm,
        "noise_scale": noise / (large - noise / 10),
        "diversity": small / large / 10,
    }
    for name, value in expected.items():
        assert values[f"per_sample_grad/{name}"] == pytest.approx(float(value)), name


class ByHand(TwoKinds):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_manual_optimization_reads_the_same_weights():
    module, recorder = ByHand(LOSSES["two means"][0]), Recorder(1, quantities=QUANTITIES)
    fit(module, CombinedLoader(loaders(), "max_size_cycle"), recorder)
    assert_exact(recorder, module)


class Sequences(TwoKinds):
    """The second loader gives packed sequences, of which each is a sample."""

    def of_more(self, batch) -> Tensor:
        out, lengths = pad_packed_sequence(batch, batch_first=True)
        rows = self.network(out).square().sum(2)
        return (rows * (torch.arange(rows.size(1)) < lengths[:, None])).sum(1)


def test_each_loader_holds_its_samples_in_its_own_way():
    sequences = [torch.randn(1 + row % 4, D) for row in range(15)]
    data = {
        "labelled": loaders()["labelled"],
        "more": DataLoader(sequences, 5, collate_fn=lambda rows: pack_sequence(rows, enforce_sorted=False)),
    }
    module, recorder = Sequences(LOSSES["two means"][0]), Recorder(1, quantities=QUANTITIES)
    fit(module, CombinedLoader(data, "min_size"), recorder)
    assert_exact(recorder, module)


def test_with_one_batch_size_a_sample_has_a_row_of_each_and_an_unequal_batch_is_named():
    module, recorder = TwoKinds(LOSSES["two means"][0]), Recorder(1, quantities=QUANTITIES)
    text = (
        r"several data loaders drew unequal numbers of rows for this batch, of which nothing is reported "
        r"\(labelled: 4, more: 2\): as they have one batch size, a sample is made of a row of each; pass "
        "drop_last=True to them"
    )
    with pytest.warns(PerSampleWarning, match=text):
        fit(module, CombinedLoader(loaders((4, 4), (12, 10)), "min_size"), recorder)
    assert [record.batch_size for record in recorder.records] == [4, 4]
    for record, expected in zip(recorder.records, module.expected, strict=False):
        found = torch.cat([record.grad_samples[name].flatten(1) for name in record.names], 1)
        torch.testing.assert_close(found, expected[:4] + expected[4:])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"engine": "loop"}, "engine='loop' runs training_step on single samples, and where several data loaders"),
        ({"engine": "vmap"}, "engine='vmap' runs training_step on single samples, and where several data loaders"),
        ({"verify": True}, "verify=True runs training_step on single samples, and where several data loaders"),
    ],
)
def test_what_runs_single_samples_is_refused_by_name(options, text):
    module, recorder = TwoKinds(LOSSES["two means"][0]), Recorder(1, quantities=QUANTITIES, **options)
    with pytest.warns(PerSampleWarning, match=text):
        fit(module, CombinedLoader(loaders(), "min_size"), recorder)
    assert len(recorder.records) == (4 if "verify" in options else 0)


def test_training_is_untouched():
    trained = []
    for callbacks in ([], [PerSampleGradientMonitor(1)]):
        torch.manual_seed(9)
        module = TwoKinds(joined)
        fit(module, CombinedLoader(loaders(), "max_size_cycle"), *callbacks, max_epochs=2)
        trained.append([*module.parameters()])
    for one, other in zip(*trained, strict=True):
        assert torch.equal(one, other)
