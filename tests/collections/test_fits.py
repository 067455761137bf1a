"""Modules of libraries built on Lightning, in a fit: trained as without the callback, values as in a loop."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_persample import PerSampleRecord, PerSampleWarning
from lightning_persample.callbacks import PerSampleCallback, PerSampleGradientMonitor
from tests.collections.comparison import needs

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Looped(PerSampleCallback):
    """The norms of every step beside those of a loop over single samples, `loss(module, batch, i)`."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss, self.pairs = loss, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        parameters = [p for p in pl_module.parameters() if p.requires_grad]
        rows = []
        for i in range(self.size(batch)):
            grads = torch.autograd.grad(self.loss(pl_module, batch, i), parameters, allow_unused=True)
            rows.append(torch.stack([g.square().sum() for g in grads if g is not None]).sum().sqrt())
        self.expected = torch.stack(rows)

    @staticmethod
    def size(batch: Any) -> int:
        while not isinstance(batch, Tensor):
            batch = batch["decoder_target"] if isinstance(batch, dict) else batch[0]
        return len(batch)

    def needs(self, trainer) -> set[str]:
        return {"sq_norm"}

    def on_per_sample_gradients(self, trainer, pl_module, record: PerSampleRecord, batch, batch_idx) -> None:
        self.pairs.append((record, self.expected))


def fitted(lightning: Any, make: Any, callbacks: list[Any], **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module, loader = make()
    torch.manual_seed(1)
    trainer = lightning.Trainer(
        max_epochs=1, limit_train_batches=4, log_every_n_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", precision="64-true",
        callbacks=callbacks, **options,
    )  # fmt: skip
    trainer.fit(module, loader)
    return {name: value.clone() for name, value in module.state_dict().items()}


def check_fit(lightning: Any, make: Any, loss: Any, **options: Any) -> None:
    plain, looped = fitted(lightning, make, [], **options), Looped(loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained = fitted(lightning, make, [PerSampleGradientMonitor(), looped], **options)
    assert plain.keys() == trained.keys()
    assert [name for name in plain if not torch.equal(plain[name], trained[name])] == []
    assert [str(each.message) for each in caught if issubclass(each.category, PerSampleWarning)] == []
    assert len(looped.pairs) == 4
    for record, expected in looped.pairs:
        assert record.coverage == 1
        torch.testing.assert_close(record.norms(), expected, rtol=1e-5, atol=1e-7)  # (losses are in float32 in part)


# pytorch-forecasting --------------------------------------------------------------------------------------------------
def windows(**options: Any) -> Any:
    import numpy
    import pandas
    from pytorch_forecasting import TimeSeriesDataSet

    numbers = numpy.random.default_rng(0).normal(size=(2, 96)).astype("float32")
    frame = pandas.DataFrame({
        "series": numpy.repeat(list("abcd"), 24), "time": numpy.tile(numpy.arange(24), 4), "value": numbers[0],
        "price": numbers[1],
    })  # fmt: skip
    return TimeSeriesDataSet(
        frame, time_idx="time", target="value", group_ids=["series"], max_encoder_length=6, max_prediction_length=2,
        min_encoder_length=6, time_varying_unknown_reals=["value"], **options,
    )  # fmt: skip


def forecaster(name: str, options: dict[str, Any], **of_module: Any) -> Any:
    import pytorch_forecasting

    data = windows(**options)
    module = getattr(pytorch_forecasting, name).from_dataset(data, log_interval=-1, **of_module)
    return module, data.to_dataloader(train=True, batch_size=5, num_workers=0, shuffle=False)


def of_one_window(module: Any, batch: Any, i: int) -> Tensor:
    x, (y, _) = batch
    one = {name: value[i : i + 1] if isinstance(value, Tensor) else value for name, value in x.items()}
    return module.loss(module(one)["prediction"], (y[i : i + 1], None))


COVARIATES = {"time_varying_known_reals": ["price"], "static_categoricals": ["series"]}


@pytest.mark.parametrize("name", ["NBeats", "DeepAR", "TemporalFusionTransformer"])
def test_forecasters(name):
    needs("pytorch_forecasting")
    import lightning.pytorch
    from pytorch_forecasting.metrics import MAE, NormalDistributionLoss, QuantileLoss

    made = {
        "NBeats": lambda: forecaster(
            name, {"target_normalizer": None}, widths=[8, 8], num_blocks=[1, 1], num_block_layers=[2, 2], dropout=0.0,
            loss=MAE(),
        ),
        "DeepAR": lambda: forecaster(
            name, COVARIATES, hidden_size=6, rnn_layers=2, dropout=0.0, loss=NormalDistributionLoss()
        ),
        "TemporalFusionTransformer": lambda: forecaster(
            name, COVARIATES | {"add_relative_time_idx": True}, hidden_size=4, attention_head_size=2,
            hidden_continuous_size=4, dropout=0.0, loss=QuantileLoss(),
        ),
    }  # fmt: skip
    check_fit(lightning.pytorch, made[name], of_one_window, gradient_clip_val=0.1)


# lightly --------------------------------------------------------------------------------------------------------------
def encoder() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(1))


def test_a_classifier_of_lightly_that_is_finetuned():
    needs("lightly")
    import pytorch_lightning
    from lightly.utils.benchmarking import FinetuneClassifier

    class Finetuned(FinetuneClassifier):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    def make():
        data = TensorDataset(torch.randn(20, 3, 8, 8), torch.randint(0, 4, (20,)))
        return Finetuned(encoder(), 5, feature_dim=6, num_classes=4, topk=(1, 2)), DataLoader(data, 5)

    def of_one_image(module, batch, i):
        return module.criterion(module(batch[0][i : i + 1]), batch[1][i : i + 1])

    check_fit(pytorch_lightning, make, of_one_image)


def test_a_contrastive_embedding_of_lightly_is_said_to_mix():
    needs("lightly")
    import pytorch_lightning
    from lightly.embedding import SelfSupervisedEmbedding
    from lightly.loss import NTXentLoss

    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = encoder()

        def forward(self, x0, x1):
            return self.network(x0), self.network(x1)

    def make():
        model = Pairs()
        views = [((torch.randn(3, 8, 8), torch.randn(3, 8, 8)), 0, "name") for _ in range(20)]
        optimizer, loader = torch.optim.SGD(model.parameters(), 0.1), DataLoader(views, 5)
        return SelfSupervisedEmbedding(model, NTXentLoss(), optimizer, loader), loader

    plain = fitted(pytorch_lightning, make, [])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained = fitted(pytorch_lightning, make, [PerSampleGradientMonitor()])
    assert [name for name in plain if not torch.equal(plain[name], trained[name])] == []
    (text,) = [str(each.message) for each in caught if issubclass(each.category, PerSampleWarning)]
    assert text.startswith("Samples of a batch influence each other")
