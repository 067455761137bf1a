"""Data whose rows carry their own index, every setting of a DataLoader for them, and fits that keep what they saw."""

from __future__ import annotations

import random
from collections import namedtuple

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from tests.callbacks.runs import Recorder, make_trainer

FEATURES = 3
Named = namedtuple("Named", ["inputs", "index"])


class Indexed(Dataset):
    """Rows of noisy features, drawn from the global generators, with the index that was asked for."""

    def __init__(self, count: int = 22, start: int = 0) -> None:
        self.count = count
        self.start = start

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key):
        index = int(key)
        if not 0 <= index < self.count:
            raise IndexError(index)
        noise = random.random() + float(np.random.rand())
        return torch.rand(FEATURES) + index / self.count + noise, self.start + index


class Fetched(Indexed):
    """Gives many rows at once."""

    def __getitems__(self, keys):
        return [self[key] for key in reversed(keys)][::-1]

    def __getitem__(self, key):
        return super().__getitem__(key)


class AsDict(Indexed):
    def __getitem__(self, key):
        inputs, index = super().__getitem__(key)
        return {"inputs": inputs, "index": index}


class AsNamed(Indexed):
    def __getitem__(self, key):
        return Named(*super().__getitem__(key))


class ByName(Indexed):
    """Asked for by names."""

    def __getitem__(self, key):
        inputs, _ = super().__getitem__(int(key.removeprefix("row ")))
        return inputs, key


class WholeBatches(Indexed):
    """Takes a list of indices."""

    def __getitem__(self, keys):
        rows = [super(WholeBatches, self).__getitem__(key) for key in keys]
        return torch.stack([inputs for inputs, _ in rows]), torch.tensor([index for _, index in rows])


class Stream(IterableDataset):
    def __iter__(self):
        yield from ((torch.rand(FEATURES), index) for index in range(12))


class Names(Sampler):
    def __iter__(self):
        return (f"row {index}" for index in torch.randperm(22).tolist())

    def __len__(self):
        return 22


class Endless(Sampler):
    """Has no length and no end."""

    def __iter__(self):
        while True:
            yield from torch.randperm(22)


class Uneven:
    """A batch sampler of batches of unequal sizes, without a length."""

    def __iter__(self):
        order = torch.randperm(22).tolist()
        for size in (4, 1, 7, 10):
            yield [order.pop() for _ in range(size)]


class Reused(Uneven):
    """Gives one list of its own again and again."""

    def __iter__(self):
        batch = []
        for each in super().__iter__():
            batch[:] = each
            yield batch


class Generated(Uneven):
    """Its batches can be walked through once."""

    def __iter__(self):
        for batch in super().__iter__():
            yield (np.int64(key) for key in list(batch))


def keep_list(rows):
    """A collate function that gives the containers of its own."""
    return [torch.stack([inputs for inputs, _ in rows]), torch.tensor([index for _, index in rows])]


def remember_dataset(worker_id):
    """Fails in a worker that does not show the user's own dataset."""
    dataset = get_worker_info().dataset
    if type(dataset) is not Indexed or dataset.__class__ is not Indexed:
        raise TypeError(f"the worker shows a {type(dataset)}")
    dataset.start = 0
    torch.rand(worker_id + 1)


class AsksTheWorker(Indexed):
    def __getitem__(self, key):
        info = get_worker_info()
        if info is not None and type(info.dataset) is not AsksTheWorker:
            raise TypeError(f"the worker shows a {type(info.dataset)}")
        return super().__getitem__(key)


def split():
    return random_split(Indexed(40), [22, 18], torch.Generator().manual_seed(3))[0]


WORKERS = {"num_workers": 2}
# By name what makes the training data; all of them anew at each call.
LOADERS = {
    "plain": lambda: DataLoader(Indexed(), 4),
    "shuffled": lambda: DataLoader(Indexed(), 4, shuffle=True),
    "own generator": lambda: DataLoader(Indexed(), 4, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "drop_last": lambda: DataLoader(Indexed(), 4, shuffle=True, drop_last=True),
    "batches of one": lambda: DataLoader(Indexed(7), 1, shuffle=True),
    "one batch": lambda: DataLoader(Indexed(), 22, shuffle=True),
    "rows fetched together": lambda: DataLoader(Fetched(), 4, shuffle=True),
    "dicts": lambda: DataLoader(AsDict(), 4, shuffle=True),
    "named tuples": lambda: DataLoader(AsNamed(), 4, shuffle=True),
    "own collate": lambda: DataLoader(Indexed(), 4, shuffle=True, collate_fn=keep_list),
    "weighted": lambda: DataLoader(Indexed(), 4, sampler=WeightedRandomSampler(torch.arange(22.0), 20)),
    "drawn with replacement": lambda: DataLoader(Indexed(), 4, sampler=RandomSampler(Indexed(), True, 50)),
    "batch_sampler": lambda: DataLoader(
        Indexed(), batch_sampler=BatchSampler(RandomSampler(range(22)), 5, drop_last=False)
    ),
    "batch_sampler without a length": lambda: DataLoader(Indexed(), batch_sampler=Uneven()),
    "batch_sampler with one list": lambda: DataLoader(Indexed(), batch_sampler=Reused()),
    "batches that are iterators": lambda: DataLoader(Indexed(), batch_sampler=Generated()),
    "endless": lambda: DataLoader(Indexed(), 4, sampler=Endless()),
    "batch_size=None": lambda: DataLoader(
        WholeBatches(), batch_size=None, sampler=BatchSampler(RandomSampler(range(22)), 4, drop_last=False)
    ),
    "names": lambda: DataLoader(ByName(), 4, sampler=Names()),
    "2 workers": lambda: DataLoader(Indexed(), 4, shuffle=True, **WORKERS),
    "2 workers, persistent": lambda: DataLoader(Indexed(), 4, shuffle=True, persistent_workers=True, **WORKERS),
    "2 workers, spawned": lambda: DataLoader(
        Indexed(), 4, shuffle=True, multiprocessing_context="spawn", worker_init_fn=remember_dataset, **WORKERS
    ),
    "a worker, prefetch_factor": lambda: DataLoader(Indexed(), 4, shuffle=True, prefetch_factor=5, num_workers=1),
    "2 workers, any order": lambda: DataLoader(Indexed(), 4, shuffle=True, in_order=False, **WORKERS),
    "a worker, worker_init_fn": lambda: DataLoader(
        Indexed(), 4, shuffle=True, worker_init_fn=remember_dataset, num_workers=1
    ),
    "a worker, get_worker_info": lambda: DataLoader(AsksTheWorker(), 4, shuffle=True, num_workers=1),
    "a worker, own collate": lambda: DataLoader(Indexed(), 4, shuffle=True, collate_fn=keep_list, num_workers=1),
    "2 workers, batch_sampler without a length": lambda: DataLoader(Indexed(), batch_sampler=Uneven(), **WORKERS),
    "a worker, batch_size=None": lambda: DataLoader(
        WholeBatches(),
        batch_size=None,
        sampler=BatchSampler(RandomSampler(range(22)), 4, drop_last=False),
        num_workers=1,
    ),
    "a worker, endless": lambda: DataLoader(Indexed(), 4, sampler=Endless(), num_workers=1),
}
# The index is that of the dataset that the loader has; what the rows carry is the whole dataset's.
PARTS = {
    "Subset": lambda: DataLoader(Subset(Indexed(40), [3, 30, 7, 9, 20, 1, 39, 12, 5]), 4, shuffle=True),
    "ConcatDataset": lambda: DataLoader(ConcatDataset([Indexed(9), Indexed(13, 9)]), 4, shuffle=True),
    "random_split": lambda: DataLoader(split(), 4, shuffle=True),
    "random_split, 2 workers": lambda: DataLoader(split(), 4, shuffle=True, **WORKERS),
}
COMBINED = ("max_size_cycle", "max_size", "min_size")


def combined(mode, workers=0, **others):
    """Two loaders of unequal lengths under their names."""
    several = {
        "short": DataLoader(Indexed(12), 4, shuffle=True, num_workers=workers),
        "long": DataLoader(Indexed(24), 4, shuffle=True, num_workers=workers),
        **others,
    }
    return CombinedLoader(several, mode)


class Follows(L.LightningModule):
    """Keeps every batch of every training step."""

    def __init__(self, data=None) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)
        self.batches = []
        self.data = data

    def loss(self, batch):
        if isinstance(batch, dict) and "inputs" not in batch:
            return sum(self.loss(part) for part in batch.values() if part is not None)
        if not isinstance(batch, dict) and isinstance(batch[0], (list, tuple)):
            return sum(map(self.loss, batch))
        inputs = batch["inputs"] if isinstance(batch, dict) else batch[0]
        return F.softplus(self.layer(inputs)).mean()

    def training_step(self, batch, batch_idx):
        self.batches.append(batch)
        return self.loss(batch)

    def train_dataloader(self):
        return self.data()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class WithNorms(Follows):
    """Notes each sample's norm under its index, one sample at a time and in float64, before the step sees the batch."""

    def __init__(self, data=None) -> None:
        super().__init__(data)
        self.norms: dict[object, list[float]] = {}

    def on_train_batch_start(self, batch, batch_idx):
        weight, bias = (parameter.detach().double() for parameter in self.layer.parameters())
        for inputs, index in zip(batch[0].double(), batch[1], strict=True):
            slope = torch.sigmoid(weight @ inputs + bias)
            gradient = torch.cat([(slope * inputs), slope])
            key = index.item() if isinstance(index, torch.Tensor) else index
            self.norms.setdefault(key, []).append(float(torch.linalg.vector_norm(gradient)))


class ByHand(Follows):
    """Two backward passes on each batch."""

    def __init__(self, data=None) -> None:
        super().__init__(data)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.batches.append(batch)
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


def seed_all(seed: int = 7) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def train(make_data, callbacks=(), kind=Follows, **settings):
    """Fit a new module on new data; what it saw, its weights, and the generators' states afterwards."""
    seed_all()
    module = kind()
    data = make_data()
    trainer = make_trainer(callbacks, **{"max_epochs": 2, "limit_train_batches": 7, **settings})
    trainer.fit(module, data)
    return module, [parameter.tolist() for parameter in module.parameters()], random_states()


def same(one, other) -> bool:
    """Whether two batches are equal in their types, their order and their values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def ranked(norms):
    """Rows of index, mean, last and number, largest mean first."""
    rows = [(index, sum(each) / len(each), each[-1], len(each)) for index, each in norms.items()]
    return sorted(rows, key=lambda row: -row[1])


def own_index(batch):
    """What the rows of a batch say of themselves."""
    if isinstance(batch, dict) and "index" not in batch:
        return {name: None if part is None else own_index(part) for name, part in batch.items()}
    index = batch["index"] if isinstance(batch, dict) else batch[1]
    return index.tolist() if isinstance(index, torch.Tensor) else list(index)


def as_lists(index):
    if isinstance(index, dict):
        return {name: as_lists(part) for name, part in index.items()}
    return index.tolist() if isinstance(index, torch.Tensor) else index


def watch(make_data, recorder=None, **settings):
    """A fit without and one with a callback: the same batches, weights and generators; gives batches and records."""
    recorder = recorder or Recorder(1)
    plain, weights, states = train(make_data, **settings)
    watched, weights_beside, states_beside = train(make_data, [recorder], **settings)
    assert len(plain.batches) > 1
    assert same(plain.batches, watched.batches)
    assert weights == weights_beside
    assert states == states_beside
    return watched.batches, recorder.records
