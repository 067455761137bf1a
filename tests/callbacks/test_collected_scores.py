"""From a training and its checkpoints on disk to scores of pairs of samples, against loops over them."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback

from lightning_persample import (
    PerSampleError,
    PerSampleGradientWriter,
    Projection,
    UnsupportedError,
    collect_gradients,
)
from lightning_persample.influence import GradientStore, less, tracin, tracin_cp
from tests.callbacks.collect_runs import Net, Rows, joined, loader, loop
from tests.callbacks.runs import make_trainer
from tests.callbacks.test_collect_adam import Trained, stepped
from tests.callbacks.test_writer_gradients import Kept, data
from tests.torch_release import not_in_the_oldest

FULL = Projection(dim=10**6)


class SavesBefore(Callback):
    """A checkpoint before each step."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.paths = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.paths.append(self.folder / f"{trainer.global_step}.ckpt")
        trainer.save_checkpoint(self.paths[-1])


def test_tracin_of_a_training(tmp_path):
    writer = PerSampleGradientWriter(tmp_path / "ledger", projection=FULL, dtype="float64")
    module, saves = Kept(), SavesBefore(tmp_path)
    make_trainer([writer, saves], max_epochs=2).fit(module, data(12, shuffle=True))
    train, validation = GradientStore(tmp_path / "ledger" / "_gradients"), data(5)
    test = collect_gradients(
        module, validation, tmp_path / "test", checkpoints=saves.paths, projection=FULL, dtype="float64"
    )
    expected = torch.zeros(12, 5, dtype=torch.float64)
    for (step, index), grads in module.kept.items():
        own = torch.cat([grad.flatten() for grad in grads.values()])
        checkpoint = torch.load(saves.paths[step], weights_only=True)
        rate = checkpoint["optimizer_states"][0]["param_groups"][0]["lr"]
        module.load_state_dict(checkpoint["state_dict"])
        for place in range(5):
            loss = module.losses([part[place : place + 1] for part in validation.dataset.tensors]).squeeze()
            other = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(module.parameters()))])
            expected[index, place] += rate / 4 * own @ other
    found = tracin(train, test)
    assert (found.train_index, found.test_index) == (tuple(range(12)), tuple(range(5)))
    torch.testing.assert_close(found.scores, expected, rtol=1e-10, atol=1e-12)
    with pytest.raises(UnsupportedError, match="the train store has rows of 6 steps, 0, 1, 2, 3, 4 and 1 more, and no"):
        tracin_cp(train, test)
    with pytest.raises(PerSampleError, match="is a ledger and no store of gradients"):
        tracin(tmp_path / "ledger", test)


@not_in_the_oldest
def test_tracin_cp_and_less_of_checkpoints(tmp_path):
    def adam(module):
        return torch.optim.Adam(module.parameters(), 0.05)

    saves = SavesBefore(tmp_path)
    make_trainer([saves], max_epochs=1).fit(Trained(adam), loader())
    paths, validation = saves.paths[2:5:2], loader(6)
    options = {"checkpoints": paths, "projection": None, "dtype": "float64"}
    train = collect_gradients(Trained(adam), loader(), tmp_path / "train", **options)
    test = collect_gradients(Trained(adam), validation, tmp_path / "test", **options)
    directions = collect_gradients(Trained(adam), loader(), tmp_path / "directions", direction="adam", **options)
    products = torch.zeros(22, 6, dtype=torch.float64)
    cosines = torch.zeros(22, 6, dtype=torch.float64)
    for path in paths:
        checkpoint = torch.load(path, weights_only=True)
        grads = loop(Net(), Rows(), weights=checkpoint["state_dict"])
        others = joined(loop(Net(), Rows(6), weights=checkpoint["state_dict"]))
        products += 0.05 * joined(grads) @ others.T
        steps = joined(stepped(adam, checkpoint, grads))
        cosines += 0.05 * torch.nn.functional.cosine_similarity(steps[:, None], others[None], dim=2)
    torch.testing.assert_close(tracin_cp(train, test).scores, products, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(less(directions, test).scores, cosines, rtol=1e-8, atol=1e-10)
