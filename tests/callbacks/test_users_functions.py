"""What a function, loader or hook of the user's raises where a callback calls it reaches the user as it is."""

from __future__ import annotations

import traceback

import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from lightning_persample import (
    EigenProjection,
    InRunInfluence,
    LabelNoiseProbe,
    PerSampleGradientMonitor,
    PerSampleGradientWriter,
    collect_gradients,
)
from tests.callbacks.runs import Classifier, Recorder, fit, loader


class Unusual(Exception):
    pass


def fails(*args):
    raise Unusual("in the user's code")


class FailingLogger(DummyLogger):
    save_dir = property(fails)  # which Lightning asks for where the folder of a run is wanted


class FailingSampler(SequentialSampler):
    __len__ = fails


class TwoLoaders(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch["one"], batch_idx)


class Items(Dataset):
    """Those of `loader`, where one item fails."""

    def __init__(self, failing=3):
        self.items, self.failing = loader(8).dataset, failing

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return fails() if index == self.failing else self.items[index]


class Batches:
    """Can be gone through again, and fails where `at` says."""

    def __init__(self, at):
        self.at = at

    def __iter__(self):
        return fails() if self.at == "iter" else self.batches()

    def batches(self):
        yield from loader(8)
        fails()


class FailingHook(Classifier):
    """Fails on its way to the validation alone."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch if self.trainer.training else fails()


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    backward = staticmethod(fails)


def backward_fails(module, batch):
    return Backward.apply(F.cross_entropy(module.network(batch[0]), batch[1]))


class OnLoading(Classifier):
    on_load_checkpoint = fails


class WithAdam(Classifier):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def in_run(val=None, module=None, **options):
    return lambda folder: fit(module or Classifier(), [InRunInfluence(folder, val or loader(8), **options)])


def probe(data=None, **options):
    return lambda folder: fit(Classifier(), [LabelNoiseProbe(0.3, dirpath=folder, **options)], data=data)


def watched(kind=Recorder, **options):
    return lambda folder: fit(Classifier(), [kind(**options)])


def collecting(data=None, module=None, **options):
    return lambda folder: collect_gradients(module or Classifier(), data or loader(8), folder, **options)


def fitting(data=None, **options):
    return lambda folder: EigenProjection.fit(Classifier(), data or loader(8), **options)


CASES = {
    "in run, item": in_run(DataLoader(Items(), 4)),
    "in run, item of the second refresh": in_run(DataLoader(Items(7), 4), refresh_every_n_steps=2),
    "in run, collate_fn": in_run(DataLoader(loader(8).dataset, 4, collate_fn=fails)),
    "in run, iter": in_run(Batches("iter")),
    "in run, next": in_run(Batches("next")),
    "in run, val_loss": in_run(val_loss=fails),
    "in run, backward of val_loss": in_run(val_loss=backward_fails),
    "in run, hook of the batch": in_run(module=FailingHook()),
    "in run, of Adam": lambda folder: fit(WithAdam(), [InRunInfluence(folder, DataLoader(Items(), 4))]),
    "in run, batch_layout": in_run(batch_layout=fails),
    "label noise, relabel": probe(relabel=fails, num_classes=4),
    "label noise, item": probe(DataLoader(Items(), 4), num_classes=4),
    "label noise, item as labels are read": probe(DataLoader(Items(), 4)),
    "label noise, folder of the logger": lambda folder: fit(
        Classifier(), [LabelNoiseProbe(0.3, num_classes=4)], logger=FailingLogger()
    ),
    "monitor, folder of the logger": lambda folder: fit(
        Classifier(), [PerSampleGradientMonitor(1, worst_samples=1)], logger=FailingLogger()
    ),
    "monitor, page in the folder of the logger": lambda folder: fit(
        Classifier(), [PerSampleGradientMonitor(1, report=True)], logger=FailingLogger()
    ),
    "several loaders, sampler": lambda folder: fit(
        TwoLoaders(),
        [Recorder()],
        data={
            "one": loader(),
            "other": DataLoader(loader(8).dataset, batch_sampler=BatchSampler(FailingSampler(range(8)), 4, False)),
        },
    ),
    "monitor, batch_layout": watched(PerSampleGradientMonitor, batch_layout=fails),
    "loop, batch_layout": watched(engine="loop", batch_layout=fails),
    "sample_index": watched(sample_index=fails),
    "loss_reduction": watched(loss_reduction=fails),
    "loop, loss_reduction": watched(engine="loop", loss_reduction=fails),
    "vmap, loss_reduction": watched(engine="vmap", loss_reduction=fails),
    "writer, columns": lambda folder: fit(Classifier(), [PerSampleGradientWriter(folder, 1, columns=fails)]),
    "collect, item": collecting(DataLoader(Items(), 4)),
    "collect, collate_fn": collecting(DataLoader(loader(8).dataset, 4, collate_fn=fails)),
    "collect, loss": collecting(loss=fails),
    "collect, columns": collecting(columns={"own": fails}),
    "collect, sample_index": collecting(sample_index=fails),
    "collect, loss_reduction": collecting(loss_reduction=fails),
    "collect, batch_layout": collecting(batch_layout=fails),
    "collect, batches": collecting(Batches("next"), sample_index=lambda batch: range(8)),
    "collect, on_load_checkpoint": collecting(
        module=OnLoading(), checkpoints=[{"state_dict": Classifier().state_dict()}]
    ),
    "eigen, item": fitting(DataLoader(Items(), 4)),
    "eigen, loss": fitting(loss=fails),
    "eigen, sample_index": fitting(sample_index=fails),
    "eigen, batch_layout": fitting(batch_layout=fails),
}


@pytest.mark.parametrize("run", CASES.values(), ids=CASES)
def test_an_error_of_the_user_reaches_the_user(run, tmp_path):
    with pytest.raises(Unusual, match="in the user's code") as raised:
        run(tmp_path / "folder")
    assert traceback.extract_tb(raised.value.__traceback__)[-1].name == "fails"
