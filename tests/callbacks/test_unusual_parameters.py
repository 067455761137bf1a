"""Gradients of parameters without axes, without entries, or with complex entries: exact, or left out by name."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_persample import (
    PerSampleGradientWriter,
    PerSampleWarning,
    Projection,
    UnsupportedError,
    collect_gradients,
)
from lightning_persample.influence import GradientStore, read_ledger
from tests.callbacks.collect_runs import COUNT, Rows, joined, loader, loop, projected, stored
from tests.callbacks.runs import make_trainer


class Unusual(LightningModule):
    """Has a scalar parameter, as the temperature of CLIP, one that is not used, and layers of size 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.first = nn.Linear(5, 3, dtype=torch.float64)
        self.unused = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        self.empty = nn.Linear(5, 1, dtype=torch.float64)
        self.empty.weight = nn.Parameter(torch.zeros(0, 5, dtype=torch.float64))
        self.empty.bias = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self.after = nn.Parameter(torch.tensor(1.2, dtype=torch.float64))

    def forward(self, inputs):
        return self.first(inputs * self.after) * self.scale.exp() + self.empty(inputs).sum(1, keepdim=True)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.05)


def expected(module, dataset):
    """By the loop, of the parameters with entries; the others have no columns."""
    names = ["scale", "first.weight", "first.bias", "after"]
    return loop(module, dataset, names)


@pytest.mark.parametrize("projection", [None, Projection(4), Projection(10**6)])
def test_scalars_and_parameters_without_entries_are_collected(projection, tmp_path):
    module, data = Unusual(), loader()
    store = collect_gradients(module, data, tmp_path, projection=projection, dtype="float64")
    grads = expected(module, data.dataset)
    values = joined({name: grad.reshape(COUNT, -1) for name, grad in grads.items()})
    if projection is not None:
        values = projected(grads, projection)
    torch.testing.assert_close(stored(store), values, rtol=1e-10, atol=1e-12)
    sizes = {each.name: each.stop - each.start for each in store.manifest.parameters}
    assert (sizes["scale"], sizes["after"], sizes["unused"], sizes["empty.weight"]) == (1, 1, 0, 0)


def test_the_writer_keeps_them_too(tmp_path):
    module = Unusual()
    before = copy.deepcopy(module)
    writer = PerSampleGradientWriter(tmp_path, projection=Projection(10**6), dtype="float64")
    make_trainer([writer], max_steps=1).fit(module, loader(batch_size=COUNT))
    store = GradientStore(tmp_path / "_gradients")
    grads = expected(before, Rows())
    values = joined({name: grad.reshape(COUNT, -1) for name, grad in grads.items()})
    torch.testing.assert_close(stored(store), values, rtol=1e-10, atol=1e-12)


def test_adam_directions_of_scalars(tmp_path):
    module, trainer = Unusual(), make_trainer(max_epochs=2)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    names = ["scale", "first.bias", "after"]
    options = {"checkpoints": [tmp_path / "saved.ckpt"], "direction": "adam", "parameters": names}
    full = collect_gradients(module, loader(), tmp_path / "1", projection=None, dtype="float64", **options)
    rows, own = [], dict(module.named_parameters())
    grads = loop(module, Rows(), names)
    for place in range(COUNT):
        again = copy.deepcopy(module)
        optimizer = again.configure_optimizers()
        optimizer.load_state_dict(copy.deepcopy(trainer.optimizers[0].state_dict()))
        stepped = dict(again.named_parameters())
        for name in names:
            stepped[name].grad = grads[name][place].clone()
        optimizer.step()
        rows.append(torch.cat([((own[name] - stepped[name]) / 0.05).detach().flatten() for name in grads]))
    torch.testing.assert_close(stored(full), torch.stack(rows), rtol=1e-9, atol=1e-11)
    part = collect_gradients(module, loader(), tmp_path / "2", projection=Projection(9), dtype="float64", **options)
    torch.testing.assert_close(stored(part), torch.stack(rows), rtol=1e-9, atol=1e-11)


class Phases(LightningModule):
    """Has complex weights, and real ones if asked."""

    def __init__(self, has_real: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.turn = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))
        self.real = nn.Linear(5, 3, dtype=torch.float64) if has_real else None

    def training_step(self, batch, batch_idx):
        found = (batch[0].to(torch.complex128) @ self.turn).abs()
        return F.cross_entropy(found if self.real is None else found + self.real(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


def test_complex_parameters_are_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedError, match=r"`turn`: gradients of complex parameters are not stored, .* leave"):
        collect_gradients(Phases(True), loader(), tmp_path)
    store = collect_gradients(Phases(True), loader(), tmp_path, parameters=["real.bias"])
    assert store.num_columns == 3


@pytest.mark.parametrize("has_real", [True, False])
def test_the_writer_leaves_complex_parameters_out_by_name_and_training_goes_on(has_real, tmp_path):
    writer = PerSampleGradientWriter(tmp_path, projection=Projection(9))
    with pytest.warns(PerSampleWarning) as caught:
        make_trainer([writer], max_epochs=1).fit(Phases(has_real), DataLoader(Rows(), 4))
    texts = [str(each.message) for each in caught if issubclass(each.category, PerSampleWarning)]
    assert texts[0] == "gradients of `turn` are not stored: they are complex, but rows are of real numbers"
    assert texts[1:] == (
        [] if has_real else ["no gradients are stored: no parameter has per-sample gradients that could be"]
    )
    assert read_ledger(tmp_path).num_rows == COUNT
    if has_real:
        names = [each.name for each in GradientStore(tmp_path / "_gradients").manifest.parameters]
        assert names == ["real.weight", "real.bias"]
