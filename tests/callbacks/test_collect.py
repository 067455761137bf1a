"""What collect_gradients stores, against one-sample autograd in float64."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_persample import OptionError, PerSampleWarning, Projection, UnsupportedError, collect_gradients
from tests.callbacks.collect_runs import COUNT, Net, Rows, Stream, joined, loader, loop, projected, stored
from tests.callbacks.runs import make_trainer
from tests.callbacks.unseen_models import Unseen

FULL = {"projection": None, "dtype": "float64"}


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"shuffle": True, "drop_last": True}], ids=str)
def test_full_gradients_are_those_of_the_loop(options, tmp_path):
    module, data = Net(), loader(**options)
    store = collect_gradients(module, data, tmp_path / "store", **FULL)
    assert_equal(stored(store), joined(loop(module, data.dataset)))
    assert store.visited.all()
    assert store.rows["sample_index"].tolist() == list(range(COUNT))
    assert store.manifest.samples == COUNT
    assert [each.name for each in store.manifest.parameters] == [name for name, _ in module.named_parameters()]


@pytest.mark.parametrize("projection", [Projection(dim=6), Projection(dim=9, kind="rademacher", seed=2)], ids=str)
def test_projected_gradients_are_the_projections_of_the_loops(projection, tmp_path):
    module, data = Net(), loader()
    store = collect_gradients(module, data, tmp_path / "store", projection=projection, dtype="float64")
    assert_equal(stored(store), projected(loop(module, data.dataset), projection))
    assert store.manifest.projection == projection.settings()


def test_several_checkpoints_of_each_kind(tmp_path):
    module, data = Net(), loader()
    saved = ModelCheckpoint(tmp_path / "saved", save_top_k=-1, every_n_train_steps=3)
    make_trainer([saved], max_epochs=1, enable_checkpointing=True).fit(module, loader())
    paths = sorted((tmp_path / "saved").iterdir())
    whole = torch.load(paths[0], weights_only=True)
    assert len(paths) == 2
    sources = [*paths, Net(8).state_dict(), whole, {name: v + 0.1 for name, v in whole["state_dict"].items()}]
    store = collect_gradients(module, data, tmp_path / "store", checkpoints=sources, **FULL)
    for place, source in enumerate(sources):
        found = source if isinstance(source, dict) else torch.load(source, weights_only=True)
        assert_equal(stored(store, place), joined(loop(module, data.dataset, weights=found.get("state_dict", found))))
    told = [(each["step"], each["learning_rate"], each["path"]) for each in store.manifest.checkpoints]
    assert told[:2] == [(3, 0.05, str(paths[0])), (6, 0.05, str(paths[1]))]
    assert told[2:] == [(None, None, None), (3, 0.05, None), (None, None, None)]
    assert store.at(1).rows["step"].tolist() == [6] * COUNT
    assert store.at(1).rows["learning_rate"].tolist() == [0.05] * COUNT
    assert store.at(2).rows["step"].tolist() == [-1] * COUNT


class Renames(Net):
    """Has other names than its checkpoints."""

    def __init__(self) -> None:
        super().__init__(9)
        self.head = self.last
        del self.last

    def forward(self, inputs):
        return self.head(torch.tanh(self.norm(self.first(inputs))))

    def on_load_checkpoint(self, checkpoint):
        weights = checkpoint["state_dict"]
        for name in ("weight", "bias"):
            weights[f"head.{name}"] = weights.pop(f"last.{name}")


def test_a_module_that_changes_what_it_loads(tmp_path):
    data, whole = loader(), {"state_dict": Net(8).state_dict(), "global_step": 7}
    for _ in range(2):
        store = collect_gradients(Renames(), data, tmp_path / "store", checkpoints=[whole], overwrite=True, **FULL)
        assert_equal(stored(store), joined(loop(Net(), Rows(), weights=whole["state_dict"])))
    assert "last.weight" in whole["state_dict"]


def test_a_loss_and_columns_of_its_own_with_a_plain_module(tmp_path):
    module, data = Net().last, Rows()
    data.inputs = torch.randn(COUNT, 7, dtype=torch.float64)

    def loss(module, batch):
        logits = module(batch[0])
        return {"loss": F.cross_entropy(logits, batch[1], reduction="sum"), "logits": logits}

    def one_minus_p(outputs, batch):
        return 1 - outputs["logits"].softmax(1).gather(1, batch[1][:, None]).squeeze(1)

    store = collect_gradients(
        module, DataLoader(data, 4), tmp_path / "store", loss=loss, loss_reduction="sum",
        columns={"one_minus_p": one_minus_p}, **FULL,
    )  # fmt: skip
    assert_equal(stored(store), joined(loop(module, data)))
    expected = 1 - module(data.inputs).softmax(1).gather(1, data.labels[:, None]).squeeze(1)
    assert_equal(torch.as_tensor(store.rows["one_minus_p"]), expected.detach())


def test_a_loss_that_weighs_its_samples(tmp_path):
    module, data = Net(), loader()

    def loss(module, batch):
        losses = F.cross_entropy(module(batch[0]), batch[1], reduction="none")
        return (losses * (1.0 + batch[1])).sum()

    store = collect_gradients(
        module, data, tmp_path / "store", loss=loss, loss_reduction=lambda outputs, batch: 1.0 + batch[1], **FULL
    )
    assert_equal(stored(store), joined(loop(module, data.dataset)))


def test_chosen_parameters_frozen_or_not(tmp_path):
    module, data = Net(), loader()
    module.last.weight.requires_grad_(False)
    names = ["last.weight", "first.bias"]
    store = collect_gradients(module, data, tmp_path / "store", parameters=names, **FULL)
    assert [each.name for each in store.manifest.parameters] == ["first.bias", "last.weight"]
    assert_equal(stored(store), joined(loop(module.requires_grad_(True), data.dataset, names)))


def test_frozen_parameters_are_left_out_and_unused_ones_are_zero(tmp_path):
    module, data = Net(), loader()
    module.first.requires_grad_(False)
    module.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    store = collect_gradients(module, data, tmp_path / "store", **FULL)
    assert "first.weight" not in [each.name for each in store.manifest.parameters]
    found = stored(store)
    assert (found[:, store.columns_of("unused")] == 0).all()
    del module.unused
    assert_equal(found[:, 2:], joined(loop(module, data.dataset)))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_stored_in_fewer_bits(dtype, tmp_path):
    module, data = Net(), loader()
    store = collect_gradients(module, data, tmp_path / "store", projection=None, dtype=dtype)
    expected = joined(loop(module, data.dataset))
    error = (stored(store) - expected).abs().amax(1) / expected.abs().amax(1)
    assert error.max() < {"float16": 2**-11, "float32": 2**-23}[dtype]


@pytest.mark.parametrize(
    "sampler", [RandomSampler(range(COUNT)), WeightedRandomSampler(torch.ones(COUNT), 5)], ids=["random", "weighted"]
)
def test_a_sampler_plays_no_part(sampler, tmp_path):
    store = collect_gradients(Net(), loader(sampler=sampler), tmp_path / "store", **FULL)
    assert store.rows["sample_index"].tolist() == list(range(COUNT))


def test_the_samples_of_a_subset(tmp_path):
    module, data = Net(), loader(sampler=SubsetRandomSampler([17, 3, 8, 9, 1]))
    store = collect_gradients(module, data, tmp_path / "store", **FULL)
    assert store.rows["sample_index"].tolist() == [1, 3, 8, 9, 17]
    assert_equal(stored(store), joined(loop(module, data.dataset))[[1, 3, 8, 9, 17]])


def of_two(module, batch):
    return F.cross_entropy(module(batch[0]), batch[1])


def test_data_that_tell_their_own_indices(tmp_path):
    module, data = Net(), DataLoader(Stream(), 4)
    with pytest.raises(UnsupportedError, match="the rows of a Stream have no indices; pass sample_index="):
        collect_gradients(module, data, tmp_path / "store", loss=of_two, **FULL)
    for warns in (nullcontext(), pytest.warns(PerSampleWarning, match="holds 10 rows already, which are kept")):
        with warns:
            store = collect_gradients(
                module, data, tmp_path / "store", loss=of_two, sample_index=lambda batch: batch[2], **FULL
            )
        assert store.rows["sample_index"].tolist() == list(range(100, 110))
    assert_equal(stored(store), joined(loop(module, Rows()))[:10])


def test_samples_whose_gradient_is_not_finite_are_marked(tmp_path):
    module, data = Net(), loader()
    data.dataset.inputs[5, 2] = float("nan")
    data.dataset.inputs[9] = float("inf")
    store = collect_gradients(module, data, tmp_path / "store", **FULL)
    assert store.nonfinite.nonzero().flatten().tolist() == [5, 9]
    assert store.visited.all()
    expected = joined(loop(module, data.dataset))
    good = ~store.nonfinite
    assert stored(store)[5].isnan().all()
    assert_equal(stored(store)[good], expected[good])


class Mean(nn.Module):
    def forward(self, inputs):
        return inputs - inputs.mean(0)


def test_samples_that_influence_each_other_are_refused(tmp_path):
    module = Net()
    module.dropout = Mean()
    with pytest.raises(UnsupportedError, match=r"Samples of a batch influence each other(?s:.)*pass loss="):
        collect_gradients(module, loader(), tmp_path / "store", **FULL)


def test_a_loss_that_is_no_mean_is_refused(tmp_path):
    def loss(module, batch):
        return F.cross_entropy(module(batch[0]), batch[1], reduction="sum")

    with pytest.raises(UnsupportedError, match="loss_reduction"):
        collect_gradients(Net(), loader(), tmp_path / "store", loss=loss, **FULL)


class WithUnseen(Net):
    def forward(self, inputs):
        return self.last(torch.tanh(Unseen.apply(inputs, self.first.weight) + self.first.bias))


def test_unsupported_parameters_are_named_and_can_be_left_out(tmp_path):
    module, data = WithUnseen(), loader()
    with pytest.raises(UnsupportedError, match=r"`first\.weight`(?s:.)*parameters=\[\.\.\.\]"):
        collect_gradients(module, data, tmp_path / "store", **FULL)
    names = ["first.bias", "last.weight", "last.bias"]
    store = collect_gradients(module, data, tmp_path / "store", parameters=names, overwrite=True, **FULL)
    assert_equal(stored(store), joined(loop(module, data.dataset, names)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dirpath": ""}, "dirpath='' is not allowed"),
        ({"dirpath": None}, "dirpath=None is not allowed: dirpath must be the path of a folder"),
        ({"overwrite": "yes"}, "overwrite='yes' is not allowed: overwrite must be True or False"),
        ({"weights_only": "no"}, "weights_only='no' is not allowed: weights_only must be None, True or False"),
        ({"loss": "mean"}, "loss='mean' is not allowed: loss must be None or a callable"),
        ({"sample_index": 2}, "sample_index=2 is not allowed: sample_index must be None or a callable"),
        ({"columns": ["loss"]}, r"columns=\['loss'\] is not allowed: columns must be None or a dict of callables"),
        ({"checkpoints": "a.ckpt"}, "checkpoints='a.ckpt' is not allowed: checkpoints must be a list"),
        ({"checkpoints": Path("a.ckpt")}, r"checkpoints=\w+\('a.ckpt'\) is not allowed: checkpoints must be a list"),
        ({"checkpoints": []}, r"checkpoints=\[\] is not allowed: checkpoints must be a list of at least one"),
        ({"checkpoints": [Net().state_dict(), 3]}, r"checkpoints\[1\]=3 is not allowed: .* a state dict"),
        ({"checkpoints": ["nope.ckpt"]}, r"^checkpoints\[0\]='nope.ckpt': no such file$"),
        ({"checkpoints": [Net().state_dict(), "."]}, r"^checkpoints\[1\]='.' cannot be read: "),
        ({"checkpoints": [{"a": 1}]}, r"checkpoints\[0\] holds no weights"),
        ({"direction": "sgd"}, "direction='sgd' is not allowed"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16'"),
        ({"projection": 256}, r"projection=256 is not allowed: projection must be None .* as Projection\(dim=64\)$"),
        ({"parameters": ["first"]}, r"parameters: 'first' is none; allowed are names of module.named_parameters\(\)"),
        ({"parameters": "first.bias"}, "parameters: 'first.bias' is not a list of names"),
        ({"columns": {"norm": lambda outputs, batch: 1}}, r"columns\['norm'\] returned int; allowed is one real num"),
        ({"columns": {"step": lambda outputs, batch: 1}}, "each needs a name of its own"),
        ({"loss": lambda module, batch: None}, r"loss\(module, batch\) gave NoneType"),
        ({"sample_index": lambda batch: [1]}, "sample_index returned list of shape"),
        ({"batch_size": 3, "sample_index": lambda batch: [1]}, "sample_index returned"),
    ],
)
def test_options_that_are_not_allowed(options, text, tmp_path):
    with pytest.raises((OptionError, UnsupportedError), match=text):
        collect_gradients(Net(), loader(), **{"dirpath": tmp_path / "store", **FULL, **options})


def test_a_file_that_holds_no_weights(tmp_path):
    torch.save(torch.ones(3), path := tmp_path / "tensor.ckpt")
    with pytest.raises(OptionError, match=r"checkpoints\[0\]='.*tensor.ckpt' holds a Tensor; allowed is what a"):
        collect_gradients(Net(), loader(), tmp_path / "store", checkpoints=[path], **FULL)


def test_what_has_no_training_step(tmp_path):
    with pytest.raises(OptionError, match="pass a LightningModule, or loss="):
        collect_gradients(nn.Linear(2, 2), loader(), tmp_path / "store")
    module = Net()
    module.automatic_optimization = False
    with pytest.raises(OptionError, match="steps the optimizers itself"):
        collect_gradients(module, loader(), tmp_path / "store")


class InFloat32(Net):
    def __init__(self) -> None:
        super().__init__()
        self.float()

    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0].float(), batch[1]), batch_idx)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"precision": "bf16-mixed"}, 2e-2),
        ({"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))}, 2e-3),
        ({"precision": "64-true"}, 1e-7),
    ],
    ids=["bf16", "fp16", "64"],
)
def test_the_precision_of_the_trainer(settings, error, tmp_path):
    module, data = InFloat32() if "64-true" not in settings.values() else Net().float(), loader()
    store = collect_gradients(module, data, tmp_path / "store", trainer=make_trainer(**settings), **FULL)
    expected = joined(loop(Net(), data.dataset))
    assert (stored(store) - expected).abs().max() < error * expected.abs().max()
    assert module.first.weight.dtype == torch.float32


class Recurrent(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(5, 4, 2, dropout=0.5, batch_first=True, dtype=torch.float64)
        self.head = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, inputs):
        return self.head(self.layer(inputs[:, None].expand(-1, 3, -1))[0][:, -1])


def test_a_compiled_module_and_recurrent_layers(tmp_path):
    torch.manual_seed(0)
    module, data = Recurrent(), loader()
    names = [name for name, _ in module.named_parameters() if name.startswith(("layer", "head"))]
    expected = joined(loop(module, data.dataset, names))
    compiled = torch.compile(module, backend="eager")
    store = collect_gradients(compiled, data, tmp_path / "store", parameters=names, **FULL)
    assert_equal(stored(store), expected)
    module.compile(backend="eager")
    store = collect_gradients(module, data, tmp_path / "other", parameters=names, **FULL)
    assert_equal(stored(store), expected)


class Prepares(Net):
    """Gets its batches ready in hooks, where the loader gives dicts."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch["inputs"], batch["labels"]

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return [2 * batch[0], batch[1]]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] / 2, batch[1]


def as_dict(rows):
    return {"inputs": torch.stack([row[0] for row in rows]), "labels": torch.stack([row[1] for row in rows])}


def test_hooks_that_move_a_batch(tmp_path):
    module, data = Prepares(), loader(collate_fn=as_dict)
    store = collect_gradients(module, data, tmp_path / "store", **FULL)
    assert_equal(stored(store), joined(loop(module, data.dataset)))
