"""Scores of influence of pairs of samples by this package and by its peers, each in the lines that its user writes.

A method is a function of a trained module, the data to train and to test, a folder for its files and a damping in
units of its own (None: its default). It returns the scores (train, test), positive where a training sample helps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_persample import EigenProjection, Projection, collect_gradients
from lightning_persample.influence import PairScores, correct_class_margin, ekfac, grad_dot, logra, trak

__all__ = ["METHODS", "Method"]


class Method(NamedTuple):
    """A method, what has to be installed, and the dampings that are tried."""

    title: str
    function: Callable[..., Tensor]
    package: str | None
    dampings: tuple[float, ...]

    @property
    def is_here(self) -> bool:
        return self.package is None or find_spec(self.package) is not None


def loss_of(module: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


def with_eigen_projection(
    module: nn.Module,
    train: TensorDataset,
    test: TensorDataset,
    folder: Path,
    damping: float | None = None,
    *,
    score: Callable[..., PairScores],
    dim: int | None,
) -> Tensor:
    loaders = [DataLoader(data, 100) for data in (train, test)]
    projection = EigenProjection.fit(module, loaders[0], dim, loss=loss_of)
    stores = [
        collect_gradients(module, loader, folder / name, loss=loss_of, projection=projection)
        for loader, name in zip(loaders, ("train", "test"), strict=True)
    ]
    return (score(*stores) if damping is None else score(*stores, damping)).scores


def with_random_logra(
    module: nn.Module, train: TensorDataset, test: TensorDataset, folder: Path, damping: float | None = None
) -> Tensor:
    stores = [
        collect_gradients(module, DataLoader(data, 100), folder / name, loss=loss_of, projection=Projection(256))
        for data, name in ((train, "train"), (test, "test"))
    ]
    return (logra(*stores) if damping is None else logra(*stores, damping)).scores


def with_grad_dot(
    module: nn.Module, train: TensorDataset, test: TensorDataset, folder: Path, damping: float | None = None
) -> Tensor:
    stores = [
        collect_gradients(module, DataLoader(data, 100), folder / name, loss=loss_of, projection=Projection(256))
        for data, name in ((train, "train"), (test, "test"))
    ]
    return grad_dot(*stores).scores


def with_trak(
    module: nn.Module, train: TensorDataset, test: TensorDataset, folder: Path, damping: float | None = None
) -> Tensor:
    def margin_of(module: nn.Module, batch: Any) -> dict[str, Tensor]:
        margins = correct_class_margin(module(batch[0]), batch[1])
        return {"loss": margins.mean(), "margins": margins}

    def one_minus_p(outputs: Any, batch: Any) -> Tensor:
        return torch.sigmoid(-outputs["margins"])

    columns = {"one_minus_p": one_minus_p}
    stores = [
        collect_gradients(module, DataLoader(data, 100), folder / name, loss=margin_of, columns=columns)
        for data, name in ((train, "train"), (test, "test"))
    ]
    return (trak(*stores) if damping is None else trak(*stores, damping)).scores


def with_kronfluence(
    module: nn.Module, train: TensorDataset, test: TensorDataset, folder: Path, damping: float | None = 1e-8
) -> Tensor:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import ScoreArguments
    from kronfluence.task import Task

    class Classification(Task):  # type: ignore[misc]
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            logits = model(batch[0])
            labels = torch.multinomial(logits.detach().softmax(-1), 1).flatten() if sample else batch[1]
            return F.cross_entropy(logits, labels, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    task = Classification()
    analyzer = Analyzer("scores", prepare_model(module, task), task, cpu=True, output_dir=str(folder))
    analyzer.fit_all_factors("factors", train, per_device_batch_size=100)
    analyzer.compute_pairwise_scores(
        "pairs",
        "factors",
        query_dataset=test,
        train_dataset=train,
        per_device_query_batch_size=100,
        per_device_train_batch_size=100,
        score_args=ScoreArguments(damping_factor=damping),
    )
    return analyzer.load_pairwise_scores("pairs")["all_modules"].T


def with_dattri_ekfac(
    module: nn.Module, train: TensorDataset, test: TensorDataset, folder: Path, damping: float | None = 0.0
) -> Tensor:
    from dattri.algorithm.influence_function import IFAttributorEKFAC
    from dattri.task import AttributionTask

    def loss(params: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = data[0].double(), data[1]
        images, labels = (images, labels) if labels.dim() else (images.unsqueeze(0), labels.unsqueeze(0))
        return F.cross_entropy(torch.func.functional_call(module, params, (images,)), labels)

    module.double()  # in float32 its eigenvectors of the layer of 784 features fail to converge
    task = AttributionTask(loss, module, module.state_dict())
    attributor = IFAttributorEKFAC(task, damping=damping)
    attributor.cache(DataLoader(train, 100))
    # It takes the test gradients to the eigenbasis again for each batch of training samples: few are large.
    return attributor.attribute(DataLoader(train, 1000), DataLoader(test, 250))


def with_dattri_logra(
    module: nn.Module, train: TensorDataset, test: TensorDataset, folder: Path, damping: float | None = None
) -> Tensor:
    from dattri.algorithm.logra import LoGraAttributor
    from dattri.task import AttributionTask

    class OneOrMany(nn.Sequential):  # it first gives the module a single image, without the axis of a batch
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images if images.dim() == 4 else images.unsqueeze(0))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor], device: str) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    module = OneOrMany(module)
    task = AttributionTask(loss, module, module.state_dict())
    attributor = LoGraAttributor(task, damping=damping, proj_dim=256, cache_dir=str(folder))
    attributor.cache(DataLoader(train, 100))
    return attributor.attribute(DataLoader(train, 100), DataLoader(test, 100))


def with_dattri_trak(
    module: nn.Module, train: TensorDataset, test: TensorDataset, folder: Path, damping: float | None = 0.0
) -> Tensor:
    from dattri.algorithm.trak import TRAKAttributor
    from dattri.task import AttributionTask

    def margin(params: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
        logits = torch.func.functional_call(module, params, (data[0].unsqueeze(0),))
        p = torch.exp(-F.cross_entropy(logits, data[1].unsqueeze(0)))
        return torch.logit(p, eps=1e-6)

    def correct_probability(params: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
        logits = torch.func.functional_call(module, params, (data[0].unsqueeze(0),))
        return torch.exp(-F.cross_entropy(logits, data[1].unsqueeze(0)))

    task = AttributionTask(margin, module, module.state_dict())
    attributor = TRAKAttributor(task, correct_probability, {"proj_dim": 512}, regularization=damping)
    attributor.cache(DataLoader(train, 500))
    return attributor.attribute(DataLoader(test, 500))


def with_traker(
    module: nn.Module, train: TensorDataset, test: TensorDataset, folder: Path, damping: float | None = 0.0
) -> Tensor:
    from trak import TRAKer

    sizes = {"train_set_size": len(train), "proj_dim": 512}
    traker = TRAKer(
        module,
        "image_classification",
        **sizes,
        save_dir=str(folder),
        device="cpu",
        use_half_precision=False,
        lambda_reg=damping,
    )
    traker.load_checkpoint(module.state_dict(), model_id=0)
    for batch in DataLoader(train, 500):
        traker.featurize(batch, num_samples=len(batch[0]))
    traker.finalize_features()
    traker.start_scoring_checkpoint("test", module.state_dict(), model_id=0, num_targets=len(test))
    for batch in DataLoader(test, 500):
        traker.score(batch, num_samples=len(batch[0]))
    return torch.from_numpy(traker.finalize_scores("test").copy())


def with_captum_tracin(
    module: nn.Module, train: TensorDataset, test: TensorDataset, folder: Path, damping: float | None = None
) -> Tensor:
    from captum.influence import TracInCP

    checkpoint = folder / "last.pt"
    torch.save(module.state_dict(), checkpoint)
    tracin = TracInCP(module, train, [str(checkpoint)], loss_fn=nn.CrossEntropyLoss(reduction="none"), batch_size=100)
    return tracin.influence(test.tensors).T


def with_captum_arnoldi(
    module: nn.Module, train: TensorDataset, test: TensorDataset, folder: Path, damping: float | None = 1e-3
) -> Tensor:
    from captum.influence._core.arnoldi_influence_function import ArnoldiInfluenceFunction

    checkpoint = folder / "last.pt"
    torch.save(module.state_dict(), checkpoint)
    arnoldi = ArnoldiInfluenceFunction(
        module,
        train,
        str(checkpoint),
        loss_fn=nn.CrossEntropyLoss(reduction="none"),
        batch_size=100,
        hessian_reg=damping,
    )
    return arnoldi.influence(test.tensors).T


OF_SUM = (1e-5, 3e-5, 5e-5, 1e-4, 2e-4, 3e-4, 1e-3)  # of the eigenvalues
OF_MEAN = (0.01, 0.1, 0.3, 1, 10)
ABSOLUTE = (1e-5, 1e-4, 1e-3, 1e-2)

METHODS = {
    **{
        name: Method(
            f"`{score.__name__}`, `EigenProjection({dim})`",
            partial(with_eigen_projection, score=score, dim=dim),
            None,
            OF_SUM,
        )
        for name, score, dim in (
            ("ekfac", ekfac, None),
            ("ekfac 1024", ekfac, 1024),
            ("logra", logra, 256),
            ("logra 1024", logra, 1024),
        )
    },
    "random logra": Method("`logra`, `Projection(256)`", with_random_logra, None, OF_SUM),
    "trak": Method("`trak`, `Projection(256)`", with_trak, None, OF_MEAN),
    "grad_dot": Method("`grad_dot`, `Projection(256)`", with_grad_dot, None, ()),
    "kronfluence": Method("kronfluence, EK-FAC", with_kronfluence, "kronfluence", ABSOLUTE),
    "dattri ekfac": Method("dattri, EK-FAC", with_dattri_ekfac, "dattri", (*ABSOLUTE, 0.1)),
    "dattri logra": Method("dattri, LoGra of 256", with_dattri_logra, "dattri", OF_MEAN),
    "dattri trak": Method("dattri, TRAK of 512", with_dattri_trak, "dattri", (1e-4, 1e-2, 1)),
    "traker": Method("traker, TRAK of 512", with_traker, "trak", (1e-4, 1e-2, 1)),
    "captum tracin": Method("captum, TracInCP", with_captum_tracin, "captum", ()),
    "captum arnoldi": Method("captum, Arnoldi", with_captum_arnoldi, "captum", ()),
}
