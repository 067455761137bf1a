"""The probe's flips against flips by hand, its report against loops and scikit-learn, data that stay as they are."""

from __future__ import annotations

import copy
import itertools
import math
import random
from fractions import Fraction
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_persample import (
    LabelNoiseProbe,
    LabelNoiseReport,
    OptionError,
    PerSampleGradientMonitor,
    PerSampleGradientWriter,
    UnsupportedError,
)
from lightning_persample.callbacks.label_noise import _share_as_wrong, _share_of_orders, auc_of, recall_of
from lightning_persample.influence import read_ledger
from tests.callbacks.label_noise_runs import (
    CLASSES,
    COUNT,
    Noting,
    Pair,
    Samples,
    Validating,
    as_dict,
    fit,
    noisy,
    parts,
    relabel_dict,
)
from tests.callbacks.runs import make_trainer
from tests.processes import run_ranks

pytest.importorskip("pyarrow")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "ledger"


def probe_in(folder, fraction=0.2, **options):
    return LabelNoiseProbe(fraction, dirpath=folder, **options)


def flips(labels):
    return tuple((labels != parts()[1]).nonzero().flatten().tolist())


class OwnItems(Samples):
    def __getitems__(self, keys):
        return [self[key] for key in keys]


def with_labels(kind):
    """Samples as lists of an array and a label of this kind."""
    return DataLoader(Samples(lambda x, y: [x.numpy(), kind(y.item())]), 8, shuffle=True)


def as_pair(x, y):
    return (x, y)


DATA = {
    "tensors": lambda: DataLoader(TensorDataset(*parts()), 8, shuffle=True),
    "workers": lambda: DataLoader(TensorDataset(*parts()), 8, shuffle=True, num_workers=2),
    "kept workers": lambda: DataLoader(Samples(), 8, shuffle=True, num_workers=1, persistent_workers=True),
    "named": lambda: DataLoader(Samples(Pair), 8, shuffle=True),
    "ints": lambda: with_labels(int),
    "NumPy's": lambda: with_labels(np.int64),
    "arrays": lambda: with_labels(np.array),
    "items": lambda: DataLoader(OwnItems(), 8, shuffle=True),
    "dicts": lambda: DataLoader(Samples(as_dict), 8, shuffle=True),
    "weighted": lambda: DataLoader(Samples(), 8, sampler=WeightedRandomSampler(torch.ones(COUNT), COUNT)),
    "batches": lambda: DataLoader(
        TensorDataset(*parts()), None, sampler=BatchSampler(RandomSampler(range(COUNT)), 8, False)
    ),
    "spawned": lambda: DataLoader(
        Samples(as_pair), 8, shuffle=True, num_workers=1, multiprocessing_context="spawn", persistent_workers=True
    ),
    "subset": lambda: DataLoader(Subset(TensorDataset(*parts(2 * COUNT)), range(COUNT)), 8, shuffle=True),
}


SLOW = {"spawned"}  # a process that imports everything


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in DATA])
def test_a_known_share_of_the_labels_is_flipped_and_nothing_else(kind, folder):
    _, labels = parts()
    if kind == "subset":
        labels = parts(2 * COUNT)[1][:COUNT]
    loader = DATA[kind]()
    before = copy.deepcopy([value for value in vars(loader.dataset).values() if isinstance(value, torch.Tensor)])
    attributes = dict(vars(loader))
    probe = probe_in(folder, relabel=relabel_dict if kind == "dicts" else None)
    module, plain = fit(probe, data=loader), fit(None, data=DATA[kind]())
    new = noisy(labels)
    assert [index for index, _ in module.trained] == [index for index, _ in plain.trained]  # in the same order
    assert plain.trained == [(index, int(labels[index])) for index, _ in plain.trained]
    assert module.trained == [(index, int(new[index])) for index, _ in module.trained]
    assert probe.flipped == tuple((new != labels).nonzero().flatten().tolist())
    assert len(probe.flipped) == round(0.2 * COUNT)
    assert vars(loader) == attributes
    after = [value for value in vars(loader.dataset).values() if isinstance(value, torch.Tensor)]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    again = fit(None, Noting(), loader)  # with the very same loader, and its workers if they are kept
    assert again.trained == [(index, int(labels[index])) for index, _ in again.trained]


def test_a_training_is_that_on_labels_flipped_by_hand(folder):
    inputs, labels = parts()
    results = []
    for probe, given in ((probe_in(folder), labels), (None, noisy(labels))):
        random.seed(0), np.random.seed(0)
        data = DataLoader(TensorDataset(inputs, given), 8, shuffle=True)
        module = fit(probe, data=data, max_epochs=3, accumulate_grad_batches=2)
        results.append((module.state_dict(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1]))
    (one, *states), (other, *others) = results
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(states[0], others[0])
    assert states[1] == others[1]
    assert (states[2] == others[2]).all()


class Drawing(Samples):
    """Draws random numbers from every generator at each access."""

    def __getitem__(self, index):
        noise = torch.rand(()).item() + random.random() + np.random.rand()
        inputs = self.inputs[index].clone()
        inputs[1] += noise
        return inputs, self.labels[index]


def test_reading_the_labels_leaves_random_numbers_as_they_are(folder):
    results = []
    for classes in (None, CLASSES):
        random.seed(0), np.random.seed(0)
        probe = probe_in(folder, num_classes=classes, overwrite=True)
        module = fit(probe, data=DataLoader(Drawing(), 8, shuffle=True))
        results.append((module.state_dict(), module.trained))
    (one, seen), (other, others) = results
    assert seen == others
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_validation_sees_the_labels_of_the_data(folder):
    data = TensorDataset(*parts())
    loaders = [DataLoader(data, 8, num_workers=1, persistent_workers=True) for _ in range(2)]
    module = fit(probe_in(folder), Validating(), loaders[0], validation=loaders[1])
    labels = parts()[1].tolist()
    assert len(module.validated) > COUNT
    assert all(labels[index] == label for index, label in module.validated)
    assert any(labels[index] != label for index, label in module.trained)


class Module(L.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.data = TensorDataset(*parts())

    def train_dataloader(self):
        return DataLoader(self.data, 8, shuffle=True)


def test_a_data_module_whose_loaders_are_made_again(folder):
    probe, data = probe_in(folder), Module()
    module = fit(probe, data=data, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    new = noisy(parts()[1])
    assert module.trained == [(index, int(new[index])) for index, _ in module.trained]
    assert len(module.trained) == 3 * COUNT
    assert torch.equal(data.data.tensors[1], parts()[1])


class Fails(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        raise KeyError("stopped")


def test_a_fit_that_fails_leaves_everything_as_it_was(folder):
    loader = DATA["kept workers"]()
    attributes = dict(vars(loader))
    probe = probe_in(folder)
    with pytest.raises(KeyError, match="stopped"):
        fit(probe, data=loader, callbacks=[Fails()])
    assert probe.report is None
    assert vars(loader) == attributes
    again = fit(None, Noting(), loader)
    assert dict(again.trained) == dict(enumerate(parts()[1].tolist()))


def test_seeds_and_classes_decide_the_flips():
    """Each sample alike, and each other class alike: counts against the binomial distribution, 6 deviations wide."""
    _, labels = parts()
    probe = LabelNoiseProbe(0.25, num_classes=CLASSES)
    counts, further = torch.zeros(COUNT), torch.zeros(CLASSES)
    for seed in range(1000):
        probe.seed, probe._flips = seed, None
        view = probe._training_view([DataLoader(TensorDataset(*parts()))])
        new = torch.stack([label for _, label in view.change(list(zip(*parts(), strict=True)), list(range(COUNT)))])
        counts += new != labels
        further += torch.bincount((new - labels) % CLASSES, minlength=CLASSES)
        assert torch.equal(new, noisy(labels, 0.25, seed))
    assert (counts - 250).abs().max() < 6 * math.sqrt(1000 * 0.25 * 0.75)
    assert (further[1:] - 10_000 / 3).abs().max() < 6 * math.sqrt(10_000 * 2 / 9)


def test_labels_that_are_not_counted_from_zero(folder):
    inputs, labels = parts()
    own = torch.tensor([3, 2, 8, 5])[labels]

    class Maps(Noting):
        def inputs_and_labels(self, batch):
            return batch[0], torch.searchsorted(torch.tensor([2, 3, 5, 8]), batch[1])

    module = fit(probe_in(folder), Maps(), DataLoader(TensorDataset(inputs, own), 8))
    new = noisy(own, classes=(2, 3, 5, 8))
    expected = torch.searchsorted(torch.tensor([2, 3, 5, 8]), new)
    assert module.trained[:COUNT] == list(enumerate(expected.tolist()))


@pytest.mark.filterwarnings("ignore:The samples are weighted differently")
def test_a_negative_label_is_no_class(folder):
    inputs, labels = parts()
    labels[::5] = -100
    probe = probe_in(folder, 0.5)
    module = fit(probe, data=DataLoader(TensorDataset(inputs, labels), 8, shuffle=True), max_epochs=3)
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(0)).tolist()
    assert probe.flipped == tuple(sorted([index for index in order if index % 5][:16]))  # half of the other 32
    assert all((label == -100) == (index % 5 == 0) for index, label in module.trained)
    assert {index for index, label in module.trained if label != labels[index]} == {*probe.flipped}
    assert (probe.report.samples, probe.report.flipped) == (32, 16)
    rows = read_ledger(folder).to_pandas().query("sample_index % 5 != 0").groupby("sample_index")
    positive = np.isin(np.array([index for index in range(COUNT) if index % 5]), probe.flipped)
    for name, column in (("loss", "loss"), ("grand", "norm")):
        assert probe.report.scores[name].auc == pytest.approx(by_pairs(rows[column].mean().to_numpy(), positive))


class Nested:
    """A sample that is an object."""

    def __init__(self, inputs, label):
        self.parts = {"inputs": inputs, "label": [label]}


def relabel_in_place(sample, change):
    sample["label"] = change(sample["label"])
    return sample


def relabel_tensor_in_place(sample, change):
    sample[1]["label"].fill_(int(change(sample[1]["label"])))
    return sample


def relabel_object_in_place(sample, change):
    sample.parts["label"][0] = change(sample.parts["label"][0])
    sample.parts["inputs"][1:] += 0.5
    return sample


def of_objects(samples):
    return torch.utils.data.default_collate([(each.parts["inputs"], each.parts["label"][0]) for each in samples])


def of_lists(samples):
    return torch.utils.data.default_collate([(each[0], each[1]["label"]) for each in samples])


@pytest.mark.parametrize("classes", [None, CLASSES])
@pytest.mark.parametrize(
    ("make", "relabel", "collate"),
    [
        (lambda x, y: {"inputs": x, "label": int(y)}, relabel_in_place, None),
        (lambda x, y: [x, {"label": y}], relabel_tensor_in_place, of_lists),
        (lambda x, y: Nested(x, y), relabel_object_in_place, of_objects),
    ],
)
def test_a_relabel_that_works_in_place_leaves_the_dataset_as_it_is(make, relabel, collate, classes, folder):
    inputs, labels = parts()
    samples = [make(x, y) for x, y in zip(inputs, labels, strict=True)]  # whose tensors are views of two
    data = DataLoader(samples, 8, shuffle=True, collate_fn=collate)
    probe = probe_in(folder, num_classes=classes, relabel=relabel)
    module = fit(probe, Validating(), data, validation=DataLoader(samples, 8, collate_fn=collate))
    new = noisy(labels)
    assert module.trained == [(index, int(new[index])) for index, _ in module.trained]
    assert [*dict(module.validated).values()] == labels.tolist()
    assert all(torch.equal(*pair) for pair in zip(parts(), (inputs, labels), strict=True))


def test_a_copy_for_relabel_does_not_copy_the_memory_that_a_sample_is_a_view_of(folder):
    probe = probe_in(folder, num_classes=CLASSES, relabel=relabel_object_in_place)
    probe._training_view([DataLoader(TensorDataset(*parts()))])
    index, (inputs, labels) = probe.flipped[0], parts()
    (copied,) = probe._flips([Nested(inputs[index], labels[index])], [index])
    assert copied.parts["inputs"].untyped_storage().nbytes() == inputs[index].numel() * 8


# The report


def by_pairs(scores, positive):
    """The AUC, pair by pair."""
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[positive] for b in scores[~positive]]
    return float(sum(pairs)) / len(pairs)


@pytest.mark.parametrize("seed", range(5))
def test_auc_and_recall_are_those_of_their_definitions(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(37, generator=generator, dtype=torch.float64).mul(2).round()  # with ties
    positive = torch.rand(37, generator=generator) < 0.3
    scores[3] = torch.inf
    assert auc_of(scores, positive) == pytest.approx(by_pairs(scores, positive), abs=1e-15)
    orders = [scores.add(torch.rand(37, generator=generator) * 1e-3).argsort(descending=True) for _ in range(4000)]
    expected = torch.stack([positive[order[:7]].sum() / positive.sum() for order in orders]).mean()
    assert recall_of(scores, positive) == pytest.approx(expected.item(), abs=0.02)
    metrics = pytest.importorskip("sklearn.metrics")
    scores[3] = 99.0
    assert auc_of(scores, positive) == pytest.approx(metrics.roc_auc_score(positive, scores), abs=1e-14)


def test_auc_without_pairs_is_not_a_number():
    assert math.isnan(auc_of(torch.ones(3), torch.ones(3) > 0))
    assert math.isnan(auc_of(torch.ones(3), torch.ones(3) > 1))
    assert math.isnan(recall_of(torch.ones(3), torch.ones(3) > 0))  # no place among the first 20% of 3
    assert (auc_of(torch.ones(10), torch.arange(10) < 5), recall_of(torch.ones(10), torch.arange(10) < 5)) == (
        0.5,
        pytest.approx(0.2),
    )


def test_the_report_is_that_of_the_rows(folder):
    probe = probe_in(folder)
    fit(probe, max_epochs=20)
    rows = read_ledger(folder).to_pandas()
    assert len(rows) == 20 * COUNT
    rows["self_influence"], rows["grand"] = rows["learning_rate"] * rows["norm"] ** 2, rows["norm"]
    report = probe.report
    positive = np.isin(np.arange(COUNT), flips(noisy(parts()[1])))
    assert list(report.scores) == ["loss", "el2n", "margin", "grand", "self_influence"]
    for name, found in report.scores.items():
        mean = rows.groupby("sample_index")[name].mean().to_numpy() * (-1 if name == "margin" else 1)
        assert found.auc == pytest.approx(by_pairs(mean, positive))
        first = np.argsort(-mean)[: COUNT // 5]
        assert found.recall == pytest.approx(positive[first].sum() / positive.sum())
    mean = rows.groupby("sample_index")["loss"].mean().to_numpy()
    reached = sum(each >= sorted(mean[positive])[-7] for each in mean[~positive])  # 8 / 1.08 is 7
    a = report.wrong
    assert a == pytest.approx(reached * (8 + 1) / (7 * (COUNT - 8)))
    assert report.wrong_at_most == pytest.approx(most_by_counting(reached, 7, 8, COUNT - 8) / (COUNT - 8))
    b = a / (CLASSES - 1)
    assert a + b < 0.5
    for found in report.scores.values():
        assert found.corrected_auc == pytest.approx(min(1, (found.auc - (a + b) / 2) / (1 - a - b)))
    assert (report.samples, report.flipped) == (COUNT, 8)
    assert str(report).startswith("         score    AUC  corrected  recall at 20%\n          loss  ")
    assert str(report).endswith(
        "8 of 40 samples had a flipped label\n"
        f"of the others an estimated {a:.1%} look as wrong by their loss, at most {report.wrong_at_most:.1%} "
        "(95% confidence)"
    )
    assert list(report.to_pandas().columns) == ["score", "auc", "corrected_auc", "recall"]


def most_by_counting(reached, rank, flipped, others):
    """The bound by its definition, from the exact share of the orders of so many wrong and flipped ones."""

    def share(wrong):
        first = min(reached + rank, wrong + flipped)
        counts = (
            math.comb(flipped, there) * math.comb(wrong, first - there)
            for there in range(rank, min(flipped, first) + 1)
        )
        return Fraction(sum(counts), math.comb(wrong + flipped, first))

    return max(wrong for wrong in range(min(reached, others), others + 1) if share(wrong) > Fraction(1, 20))


@pytest.mark.parametrize(("wrong", "flipped"), [(5, 4), (7, 1), (3, 6)])
def test_how_many_orders_have_so_few_wrong_ones_is_counted(wrong, flipped):
    for rank in range(1, flipped + 1):
        above = []  # how many wrong ones are before the rank-th flipped one, of each order
        for places in itertools.combinations(range(wrong + flipped), flipped):
            above.append(places[rank - 1] - (rank - 1))
        for reached in range(wrong + 2):
            share = sum(each <= reached for each in above) / len(above)
            assert _share_of_orders(wrong, reached, rank, flipped) == pytest.approx(share, rel=1e-12)


@pytest.mark.parametrize("noise", [0.0, 0.04, 0.08, 0.15])
@pytest.mark.parametrize("shift", [8.0, 2.0])
def test_the_share_of_wrong_labels_is_estimated_and_bounded_as_it_says(noise, shift):
    """Of known distributions: right labels from N(0, 1), wrong ones from N(shift, 1); 36 flips as in digits."""
    generator, others, flipped, repeats = torch.Generator().manual_seed(0), 1760, 36, 400
    positive = torch.arange(others + flipped) < flipped
    wrong = torch.arange(others + flipped) < flipped + round(noise * others)
    truth = round(noise * others) / others
    found = []
    for _ in range(repeats):
        scores = torch.randn(others + flipped, generator=generator) + shift * wrong
        found.append(_share_as_wrong(scores, positive))
    estimates, bounds = torch.tensor(found, dtype=torch.float64).T
    error = 4 * estimates.std() / math.sqrt(repeats)
    assert (bounds >= truth).double().mean() >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / repeats)
    assert estimates.mean() >= truth - error
    if shift == 8.0:  # no right label looks as wrong
        assert estimates.mean() <= truth + error
        assert bounds.mean() <= 1.35 * truth + 2.01 / others  # (where none reaches, two may be wrong)
        assert noise == 0 or (bounds >= truth).double().mean() <= 0.99
    else:
        assert estimates.mean() > truth + 0.03


@pytest.mark.parametrize(
    ("positive", "expected"),
    [([], (math.nan, 1.0)), (range(6), (math.nan, 1.0)), ([5], (0.0, 1.0)), ([0], (1.0, 1.0)), ([4, 5], (0.0, 1.0))],
)
def test_the_share_of_wrong_labels_of_few_samples(positive, expected):
    mask = torch.tensor([place in positive for place in range(6)])
    assert _share_as_wrong(torch.arange(6.0), mask) == pytest.approx(expected, nan_ok=True)


class Digits(Noting):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("noise", [0.0, 0.04, 0.08, 0.15])
def test_the_share_of_wrong_digits_is_estimated_and_bounded_as_it_says(noise, folder):
    datasets, repeats, found = pytest.importorskip("sklearn.datasets"), 20, []
    pixels, labels = (torch.tensor(each) for each in datasets.load_digits(return_X_y=True))
    for seed in range(repeats):
        generator, given = torch.Generator().manual_seed(100 + seed), labels.clone()
        wrong = torch.randperm(len(labels), generator=generator)[: round(noise * len(labels))]
        given[wrong] = (labels[wrong] + torch.randint(1, 10, wrong.shape, generator=generator)) % 10
        data = DataLoader(TensorDataset(pixels.float() / 16, given), 64, shuffle=True)
        probe = LabelNoiseProbe(0.02, seed=seed, dirpath=folder, overwrite=True, num_classes=10)
        fit(probe, Digits(), data, seed=seed, max_epochs=12)
        is_wrong = torch.tensor(
            [index in probe.flipped or bool(given[index] != labels[index]) for index in range(1797)]
        )
        others = torch.tensor([index not in probe.flipped for index in range(1797)])
        truth = is_wrong[others].double().mean().item()
        loss = torch.tensor(read_ledger(folder).to_pandas().groupby("sample_index")["loss"].mean().to_numpy())
        corrected = probe.report.scores["loss"].corrected_auc
        row = (truth, probe.report.wrong, probe.report.wrong_at_most, corrected - auc_of(loss, is_wrong))
        found.append(row)
    truth, estimate, bound, error = torch.tensor(found, dtype=torch.float64).T
    print(
        f"wrong {truth.mean():.3f}, estimated {estimate.mean():.3f} ({estimate.min():.3f} to {estimate.max():.3f}), "
        f"bound {bound.mean():.3f} holds in {(bound >= truth).sum()} of {repeats}, "
        f"corrected AUC off by {error.mean():+.4f} ({error.min():+.3f} to {error.max():+.3f})"
    )
    assert (estimate - truth).mean().abs() < 0.1 * truth.mean() + 0.005
    assert (bound >= truth).sum() >= 16  # of 20, where each holds with 95%, fewer are as rare as 1 in 400
    assert bound.mean() < 1.5 * truth.mean() + 0.01
    assert error.mean().abs() < 0.01
    assert error.abs().max() < 0.05


class Rows:
    """A ledger of scores drawn from known distributions: wrong labels from N(2, 1), right ones from N(0, 1)."""

    def __init__(self, count, noise, fraction, seed, shift):
        generator = np.random.default_rng(seed)
        labels = generator.integers(0, CLASSES, count)
        given = np.where(
            generator.random(count) < noise, (labels + generator.integers(1, CLASSES, count)) % CLASSES, labels
        )
        self.probe = LabelNoiseProbe(fraction, num_classes=CLASSES, seed=seed)
        self.probe._training_view([DataLoader(TensorDataset(torch.zeros(count), torch.tensor(given)))])
        changed = self.probe._flips(list(zip(range(count), torch.tensor(given), strict=True)), list(range(count)))
        wrong = np.array([int(label) for _, label in changed]) != labels
        self.scores = generator.standard_normal(count) + shift * wrong


@pytest.mark.parametrize(("shift", "within"), [(4.0, 0.005), (3.0, 0.01)])
def test_the_corrected_auc_is_that_of_wrong_labels_against_right_ones(shift, within):
    import pyarrow

    from lightning_persample.callbacks.label_noise import _report_of

    rows = Rows(100_000, 0.1, 0.02, 3, shift)
    table = pyarrow.table({"sample_index": list(range(100_000)), "loss": rows.scores})
    report = _report_of(table, table.column_names, rows.probe._flips)
    exact = 0.5 * (1 + math.erf(shift / 2))  # P(N(shift, 1) > N(0, 1))
    (found,) = report.scores.values()
    assert found.corrected_auc == pytest.approx(exact, abs=within)
    assert found.auc < exact - 0.04
    assert report.wrong == pytest.approx(0.1, abs=0.02)
    assert 0.1 < report.wrong_at_most < 0.14


@pytest.mark.parametrize(("flipped", "corrected"), [(0.5, None), (2.0, None), (-1.0, math.nan)])
def test_the_corrected_auc_is_an_auc_or_not_a_number(flipped, corrected):
    """Of flipped samples in the middle, before and behind all others; of these a share of 0.05 is above."""
    import pyarrow

    from lightning_persample.callbacks.label_noise import _report_of

    probe = LabelNoiseProbe(0.1, num_classes=CLASSES)
    probe._training_view([DataLoader(TensorDataset(*parts(200)))])
    margins = -torch.linspace(0, 1, 200).double()
    margins[list(probe.flipped)] = -flipped
    losses = torch.arange(200) * 0.001 + 2 * torch.tensor([index in probe.flipped for index in range(200)])
    losses[[index for index in range(200) if index not in probe.flipped][:9]] = 3.0  # as wrong as the flipped
    table = pyarrow.table({"sample_index": list(range(200)), "loss": losses.numpy(), "margin": margins.numpy()})
    report = _report_of(table, table.column_names, probe._flips)
    noise = report.wrong * (1 + 1 / (CLASSES - 1))
    found = report.scores["margin"]
    assert noise == pytest.approx(9 * 21 / (17 * 180) * 4 / 3)
    if corrected is None:
        assert found.corrected_auc == pytest.approx(min(1, (found.auc - noise / 2) / (1 - noise)))
    else:
        assert found.auc == 0
        assert math.isnan(found.corrected_auc)


def test_a_score_that_is_not_known_is_left_out(folder):
    class Squares(Noting):
        def training_step(self, batch, batch_idx):
            return self.net(batch[0][:, 1:]).square().mean()

    probe = probe_in(folder)
    with pytest.warns(match="columns of the ledger are nan: 'loss', 'el2n', 'margin' cannot be read"):
        fit(probe, Squares())
    assert list(probe.report.scores) == ["grand", "self_influence"]
    probe = probe_in(folder, columns=("margin",), overwrite=True)
    fit(probe)
    assert list(probe.report.scores) == ["margin", "grand", "self_influence"]


def test_the_ledger_and_the_table_are_in_the_log_dir(tmp_path):
    probe = LabelNoiseProbe(0.2)
    fit(probe, callbacks=[PerSampleGradientMonitor()], default_root_dir=tmp_path)
    assert probe.dirpath == tmp_path / "label_noise"
    table = (tmp_path / "label_noise" / "_label_noise.csv").read_text().splitlines()
    assert table[0] == "score,auc,corrected_auc,recall"
    assert table[1].split(",")[:2] == ["loss", str(probe.report.scores["loss"].auc)]
    assert read_ledger(tmp_path / "label_noise").num_rows == 2 * COUNT


@pytest.mark.skipif(
    L.__version__ < "2.6", reason="Lightning 2.5 itself draws another order where a training is resumed"
)
def test_a_run_that_is_resumed_has_the_report_of_one(folder, tmp_path):
    whole, first, second = (probe_in(tmp_path / name) for name in ("whole", "part", "part"))
    fit(whole, max_epochs=12)
    loader = DataLoader(TensorDataset(*parts()), 8, shuffle=True)
    module, resumed = Noting(), Noting()
    trainer = make_trainer([first], max_epochs=5)
    torch.manual_seed(5)
    trainer.fit(module, loader)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    state = torch.get_rng_state()
    trainer = make_trainer([second], max_epochs=12)
    torch.set_rng_state(state)
    trainer.fit(resumed, loader, ckpt_path=tmp_path / "one.ckpt")
    assert second.report == whole.report
    assert second.flipped == whole.flipped
    other = make_trainer([probe_in(tmp_path / "part", 0.3)], max_epochs=13)
    with pytest.raises(OptionError, match=r"written with label_noise=\{'fraction': 0.2.*but now there is .*0.3"):
        other.fit(Noting(), loader, ckpt_path=tmp_path / "one.ckpt")


def test_a_dry_run_flips_and_reports_nothing(folder):
    probe = probe_in(folder)
    module = fit(probe, fast_dev_run=2)
    new = noisy(parts()[1])
    assert module.trained == [(index, int(new[index])) for index, _ in module.trained]
    assert probe.report is None
    assert not folder.exists()


def test_two_processes_flip_alike_and_have_one_report(tmp_path):
    ended = run_ranks("tests.callbacks.label_noise_runs", "ranks", str(tmp_path), timeout=80)
    assert ended.codes == [0, 0], "\n".join(output[-3000:] for output in ended.outputs)
    one, other = (torch.load(tmp_path / f"ranks.{rank}.pt", weights_only=False) for rank in (0, 1))
    new = noisy(parts()[1])
    assert {index for index, _ in one["trained"] + other["trained"]} == set(range(COUNT))
    assert all(label == new[index] for index, label in one["trained"] + other["trained"])
    assert isinstance(one["report"], LabelNoiseReport)
    assert one["report"] == other["report"]
    assert (one["report"].samples, one["report"].flipped) == (COUNT, 8)
    assert one["flipped"] == other["flipped"] == flips(new)


# What is refused


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*parts(), strict=True))


class Batches:
    """Batches that no DataLoader makes."""

    def __iter__(self):
        return iter(DATA["tensors"]())


class Keyed(Samples):
    """Is asked by names."""

    def __getitem__(self, key):
        return super().__getitem__(int(str(key).removeprefix("n")))


class Names(torch.utils.data.Sampler):
    def __init__(self, names):
        self.names = names

    def __iter__(self):
        return iter(self.names)

    def __len__(self):
        return len(self.names)


class Backwards(Samples):
    def __getitems__(self, keys):
        return super().__getitem__(keys)


def by_label(rows):
    return torch.utils.data.default_collate(sorted(rows, key=lambda row: int(row[1])))


def relabel_nothing(sample, change):
    return sample


def relabel_without_return(sample, change):
    sample[1] = change(sample[1])


def three(x, y):
    return x, y, y


@pytest.mark.parametrize(
    ("loader", "options", "text"),
    [
        (
            lambda: DataLoader(Stream(), 8),
            {},
            "by the index that the sampler draws, but the rows of a Stream have no ind",
        ),
        (
            lambda: {"a": DATA["tensors"](), "b": DATA["tensors"]()},
            {},
            "LabelNoiseProbe takes one train dataloader, and there are 2",
        ),
        (Batches, {}, "the training data come from a Batches, not from a DataLoader"),
        (lambda: DataLoader(Samples(three), 8), {}, "label, and the sample is a tuple of length 3: pass relabel="),
        (lambda: DataLoader(Samples(as_dict), 8), {}, "label, and the sample is a dict of length 2: pass relabel="),
        (
            lambda: DataLoader(Samples(lambda x, y: (x, y.double())), 8),
            {},
            "integer labels, and the label of a sample is a Tensor of shape () and dtype torch.float64: pass relabel=",
        ),
        (
            lambda: DataLoader(Samples(lambda x, y: (x, y[None])), 8),
            {},
            "integer labels, and the label of a sample is a Tensor of shape (1,) and dtype torch.int64",
        ),
        (lambda: DataLoader(Samples(labels=torch.ones(COUNT).int()), 8), {}, "needs two classes, and the labels are 1"),
        (
            lambda: DataLoader(Samples(labels=torch.full((COUNT,), 7)), 8),
            {"num_classes": 4},
            "from 0 to 3, and a sample has 7",
        ),
        (
            lambda: DataLoader(Samples(labels=torch.full((COUNT,), -100)), 8),
            {"num_classes": 4},
            "from 0 to 3, and a sample has -100",
        ),
        (
            lambda: DataLoader(Samples(labels=torch.full((COUNT,), -100)), 8),
            {},
            "needs two classes, and the labels are none (a negative one is no class)",
        ),
        (
            lambda: DataLoader(Samples(), 8),
            {"relabel": relabel_nothing, "num_classes": 4},
            "change(label) in place of its label, and it did not call change for a tuple of length 2",
        ),
        (
            lambda: DataLoader(Samples(lambda x, y: [x, y]), 8),
            {"relabel": relabel_without_return},
            "change(label) in place of its label, and it returned None for a list of length 2",
        ),
        (
            lambda: DataLoader(Keyed(), 8, sampler=Names([f"n{place}" for place in range(COUNT)])),
            {},
            "by their index, 0 to 39, and the sampler draws 'n0'",
        ),
        (
            lambda: DataLoader(Samples(), 8, sampler=Names([3, -1])),
            {},
            "by their index, 0 to 39, and the sampler draws -1",
        ),
        (
            lambda: DataLoader(Backwards(), 8, collate_fn=tuple),
            {},
            "one item for each of the 8 keys that the dataset's __getitems__ is given, but it returned tuple",
        ),
    ],
)
def test_data_whose_labels_cannot_be_flipped_are_refused(loader, options, text, folder):
    with pytest.raises(OptionError) as refused:
        fit(probe_in(folder, 0.5, **options), data=loader())
    assert text in str(refused.value)


def test_batches_whose_samples_are_not_known_are_refused(folder):
    text = "changes the order of the rows"
    with (
        pytest.warns(match=text),
        pytest.raises(UnsupportedError, match="no index of the samples of a batch: the collate function by_label cha"),
    ):
        fit(probe_in(folder), data=DataLoader(Samples(), 8, collate_fn=by_label))


class InDict(Noting):
    def inputs_and_labels(self, batch):
        return batch["only"]


def test_a_loader_in_a_dict_is_refused(folder):
    with pytest.raises(UnsupportedError, match="a batch: the train dataloader stands in a dict or list: pass it alone"):
        fit(probe_in(folder), InDict(), {"only": DATA["tensors"]()})


class Grows(L.LightningDataModule):
    length = COUNT

    def train_dataloader(self):
        self.length -= 8
        return DataLoader(Subset(TensorDataset(*parts()), range(self.length)), 8)


def test_data_that_are_others_in_the_middle_are_refused(folder):
    with pytest.raises(OptionError, match="the training dataset has 24 samples now and had 32 before"):
        fit(probe_in(folder), data=Grows(), reload_dataloaders_every_n_epochs=1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fraction": 0}, "fraction=0 is not allowed: fraction must be a number between 0 and 1"),
        ({"fraction": 1.0}, "fraction=1.0 is not allowed"),
        ({"fraction": "2%"}, "fraction='2%' is not allowed: fraction must be a number between 0 and 1"),
        ({"fraction": "ledger"}, "a number between 0 and 1 (the folder of the ledger is dirpath='ledger')"),
        ({"fraction": Path("ledger")}, "a number between 0 and 1 (the folder of the ledger is dirpath='ledger')"),
        ({"seed": -1}, "seed=-1 is not allowed: seed must be an int >= 0 and < 2**64"),
        ({"seed": 2**64}, "is not allowed: seed must be an int >= 0 and < 2**64"),
        ({"num_classes": 1}, "num_classes=1 is not allowed: num_classes must be None or an int >= 2"),
        ({"relabel": 1}, "relabel=1 is not allowed: relabel must be None or a callable (sample, change)"),
        (
            {"sample_index": len},
            "sample_index must be None here, because labels are flipped by the index that the samp",
        ),
        ({"dirpath": ""}, "dirpath='' is not allowed: dirpath must be the path of a folder"),
        ({"every_n_steps": 0}, "every_n_steps=0 is not allowed"),
    ],
)
def test_options_that_are_not_allowed(options, text):
    with pytest.raises(OptionError) as refused:
        LabelNoiseProbe(**options)
    assert text in str(refused.value)


class Broken(Samples):
    def __getitem__(self, index):
        raise ZeroDivisionError("of the dataset")


def broken(sample, change):
    raise ZeroDivisionError("of relabel")


class Ends(Samples):
    def __getitem__(self, index):
        raise StopIteration("of the dataset")


class Measured(Samples):
    def __len__(self):
        raise ZeroDivisionError("of len()")


@pytest.mark.parametrize(
    ("data", "options", "text"), [(Ends, {}, "of the dataset"), (Measured, {"num_classes": CLASSES}, r"of len\(\)")]
)
def test_what_a_dataset_raises_is_raised_whatever_it_is(data, options, text, folder):
    with pytest.raises((StopIteration, ZeroDivisionError), match=text):
        fit(probe_in(folder, **options), data=DataLoader(data(), 8, sampler=range(COUNT)))


@pytest.mark.parametrize(("data", "relabel"), [(Broken, None), (Samples, broken)])
def test_what_the_data_or_a_function_raise_is_raised(data, relabel, folder):
    with pytest.raises(ZeroDivisionError, match="of the dataset" if relabel is None else "of relabel"):
        fit(probe_in(folder, relabel=relabel), data=DataLoader(data(), 8))


def test_two_probes_of_a_trainer_are_refused(tmp_path):
    with pytest.raises(OptionError, match="this Trainer has two LabelNoiseProbe: let each have a run of its own"):
        fit(probe_in(tmp_path / "one"), callbacks=[probe_in(tmp_path / "two")])


def test_a_writer_beside_the_probe_has_the_rows_of_the_flipped_labels(folder, tmp_path):
    fit(probe_in(folder), callbacks=[PerSampleGradientWriter(tmp_path / "other", columns=("loss",))])
    one, other = (read_ledger(each).to_pandas() for each in (folder, tmp_path / "other"))
    assert one["loss"].tolist() == other["loss"].tolist()
