"""Per-sample gradients of a whole dataset at given weights, in a store on disk."""

from __future__ import annotations

import functools
import inspect
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from lightning import __version__ as lightning_version
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch import __version__ as torch_version

from lightning_persample.callbacks.base import name_of
from lightning_persample.callbacks.checkpoints import Checkpoints, Source, requiring_gradients
from lightning_persample.callbacks.collecting import Collection, Kind, Pass, SamplesOnce, Storing, made_for
from lightning_persample.callbacks.lightning_internals import borrowed, is_a, is_lightning_module, quiet_trainer
from lightning_persample.callbacks.rows import layout_of
from lightning_persample.capture.parameters import is_sharded
from lightning_persample.errors import OptionError, UnsupportedError
from lightning_persample.gradients.projection import Projection
from lightning_persample.influence.shards import StoreManifest
from lightning_persample.influence.store import GradientStore
from lightning_persample.options import CaptureOptions, check_option, check_options, is_none_or_int, is_path
from lightning_persample.reference.untouched import untouched
from lightning_persample.torch_internals import COMPILED

_ADDRESS = " at 0x"  # in what Python shows of an object that says nothing of itself


def named(value: Any) -> str | None:
    """An option as a manifest names it."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, functools.partial):
        given = [_shown(each) for each in value.args]
        given += [f"{name}={_shown(each)}" for name, each in value.keywords.items()]
        return f"partial({', '.join([str(named(value.func)), *given])})"
    return name_of(value)


def _is_known_by_name(value: Any) -> bool:
    """Whether two options of equal names are alike, as long as nobody edits their code."""
    if value is None or isinstance(value, (str, type)):
        return True
    if isinstance(value, functools.partial):
        return _is_known_by_name(value.func) and not any(
            _ADDRESS in repr(each) for each in (value.args, value.keywords)
        )
    if inspect.ismethod(value) and not isinstance(value.__self__, (nn.Module, type)):
        return False
    return inspect.isroutine(value) and "<" not in value.__qualname__


def _shown(value: Any) -> str:
    shown = repr(value)
    return type(value).__qualname__ if _ADDRESS in shown else shown


_DEFAULT_PROJECTION = Projection()


def collect_gradients(
    module: nn.Module,
    dataloader: Iterable[Any],
    dirpath: str | os.PathLike[str],
    *,
    checkpoints: Sequence[Source] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    columns: Mapping[str, Callable[[Any, Any], Tensor]] | None = None,
    projection: Projection | None = _DEFAULT_PROJECTION,
    dtype: Literal["float16", "float32", "float64"] = "float32",
    direction: Literal["adam"] | None = None,
    parameters: Sequence[str] | None = None,
    loss_reduction: Literal["mean", "sum"] | Callable[[Any, Any], Tensor] = "mean",
    batch_dim: int = 0,
    batch_size: int | None = None,
    batch_layout: Callable[[Any], Mapping[Tensor, Any]] | None = None,
    sample_index: Callable[[Any], Any] | None = None,
    trainer: Trainer | None = None,
    rows_per_shard: int | None = None,
    max_memory: int | None = None,
    weights_only: bool | None = None,
    overwrite: bool = False,
) -> GradientStore:
    """Store the gradient of each sample's own loss, for every sample of a dataset at each checkpoint.

    The module runs in evaluation mode, through ``trainer.predict``. Every sample of ``dataloader.dataset`` is visited
    once, in order, in batches as the loader makes them: its sampler plays no part, so that a loader that shuffles will
    do (of a ``SubsetRandomSampler``, the subset). Of several processes (``strategy="ddp"``) each visits its share. The
    module has to be complete; of its hooks only those that move a batch to the device run, and what it logs is dropped.

    Afterwards the module (weights, buffers, mode, ``.grad``, ``requires_grad``, every attribute), the Trainer and the
    random numbers are as before, also after an error, for which the memory of one more copy of the module is taken.

    A call that was interrupted is repeated: it goes on where the store ends. A folder that holds a store of other
    gradients is refused, as far as that is known: by the options, the weights, and the data where the dataset is a
    ``TensorDataset``, one of Hugging Face, or a ``Subset`` or ``ConcatDataset`` of such, without `sample_index`. For
    other data a warning counts the rows that are kept: after a change of inputs or labels pass another folder, or
    ``overwrite=True``. The code of the module, of the loss and of a collate function is not compared.

    Samples whose gradient is not finite have rows of nan and are marked in ``store.nonfinite``.

    Args:
        module: whose gradients they are.
        dataloader: a DataLoader of a dataset with a length. Anything else that gives batches needs `sample_index`, and
            one process.
        dirpath: the folder of the store, which all processes share.
        checkpoints: the weights that gradients are taken at: paths of what a Trainer or ``ModelCheckpoint`` saved, or
            state dicts (of the module, or a Trainer's whole checkpoint). None takes the module as it is.
        loss: a callable ``(module, batch)`` that returns the loss, or a dict with "loss" and whatever `columns` need.
            None takes ``module.training_step(batch, batch_idx)``.
        columns: further columns: by name a callable ``(outputs, batch)`` that returns one number per sample, (B,),
            where outputs is what the loss was taken from.
        projection: what is kept of a gradient; None keeps it in full.
        dtype: of the stored numbers. In "float16" each row has a scale of its own.
        direction: "adam" stores in place of a gradient g what Adam would step along if g were the gradient of the next
            step, from the optimizer's state in the checkpoint, see `adam_direction`.
        parameters: the names of the parameters whose gradients are stored, trainable or not; None takes all that are
            trainable.
        loss_reduction: how the loss is made of the samples' own losses, see `PerSampleCallback`; a callable is given
            what the loss was taken from, and the batch.
        batch_dim: the axis of the batch's tensors that counts samples.
        batch_size: number of samples B of each batch; None reads it from the batch's tensors.
        batch_layout: says where the samples lie in tensors that do not hold them along `batch_dim`, see
            `PerSampleCallback`.
        sample_index: a callable ``(batch)`` that returns the index of each sample, in place of that in the dataset.
        trainer: decides on devices, strategy and precision; its own callbacks, loggers and data module have no part.
            None takes one of one device that shows nothing; of several processes each needs to be given one.
        rows_per_shard: number of rows of a file; None takes as many as 64 MiB hold. A process that is killed loses no
            more than the rows of one.
        max_memory: bytes that the temporaries of one kernel may take, see `expanded_weights`.
        weights_only: whether files of checkpoints may hold nothing but tensors and plain values; None is the choice of
            Lightning and torch.
        overwrite: remove the store that is in the folder, whatever it is of, and begin again.

    Returns:
        The store, with the rows of all processes.

    It is an `OptionError` where an option has a value that is not allowed or the folder holds another store, and an
    `UnsupportedError` where a gradient is not known exactly or the module is sharded; the text says why.
    """
    path = os.fspath(dirpath) if isinstance(dirpath, os.PathLike) else dirpath
    check_option("dirpath", dirpath, is_path(path), "the path of a folder")
    folder = Path(dirpath).absolute()  # wherever a loader goes
    check_options(overwrite=overwrite)
    check_option("direction", direction, direction in (None, "adam"), "None or 'adam'")
    is_projection = projection is None or isinstance(projection, Projection)
    check_option("projection", projection, is_projection, "None (in full) or a Projection as Projection(dim=64)")
    check_option("rows_per_shard", rows_per_shard, is_none_or_int(rows_per_shard, 1), "None or an int >= 1")
    by_name: Any = {} if columns is None else columns
    are_columns = isinstance(by_name, Mapping) and all(map(callable, by_name.values()))
    check_option("columns", columns, are_columns, "None or a dict of callables (outputs, batch)")
    common = checked_pass(
        module,
        dataloader,
        checkpoints=checkpoints,
        loss=loss,
        parameters=parameters,
        sample_index=sample_index,
        weights_only=weights_only,
        quantity="grad_sample" if direction or projection is None else "projection",
        loss_reduction=loss_reduction,
        batch_dim=batch_dim,
        batch_size=batch_size,
        batch_layout=batch_layout,
        max_memory=max_memory,
    )
    module = common.module
    known = dict(module.named_parameters())
    columns = {} if columns is None else dict(columns)
    trainer = quiet_trainer() if trainer is None else trainer
    callables: dict[str, Any] = {"loss": loss, "loss_reduction": loss_reduction}
    callables |= {f"columns[{name!r}]": column for name, column in columns.items()}
    manifest = StoreManifest(
        run=uuid.uuid4().hex,
        parameters=layout_of({name: known[name].shape for name in common.names}, projection),
        projection=None if projection is None else projection.settings(),
        dtype=dtype,
        columns=tuple(columns),
        settings={
            "direction": direction,
            **{name: named(each) for name, each in callables.items()},
            "precision": trainer.precision,
        },
        libraries={"torch": torch_version, "lightning": lightning_version, "numpy": np.__version__},
        samples=None if sample_index is not None else common.samples.size,
    )
    asked = Collection(
        **vars(common),
        dirpath=folder,
        manifest=manifest,
        trainable={name: parameter.requires_grad for name, parameter in known.items()},
        not_compared=[name for name, each in callables.items() if not _is_known_by_name(each)],
        columns=columns,
        projection=projection,
        direction=direction,
        rows_per_shard=rows_per_shard,
        overwrite=overwrite,
    )
    run_pass(asked, trainer, Storing, [_WritesInAnyCase()])
    store = GradientStore(folder, partial=True)
    common.samples.check_complete(store.rows, len(common.checkpoints))
    return store


class _WritesInAnyCase(Callback):
    """Writes what was collected before an error: the next call goes on behind it."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the rows that wait."""
        if isinstance(pl_module, Storing):
            try:
                pl_module.write()
            finally:
                pl_module.lock.release()


def checked_pass(
    module: nn.Module,
    dataloader: Iterable[Any],
    *,
    checkpoints: Sequence[Source] | None,
    loss: Callable[[Any, Any], Any] | None,
    parameters: Sequence[str] | None,
    sample_index: Callable[[Any], Any] | None,
    weights_only: bool | None,
    quantity: str,
    **capture: Any,
) -> Pass:
    """The options of a pass over a dataset, where all of them are allowed."""
    for name, given in {"loss": loss, "sample_index": sample_index}.items():
        check_option(name, given, given is None or callable(given), "None or a callable")
    check_options(**capture)
    check_option("weights_only", weights_only, weights_only in (None, True, False), "None, True or False")
    module = getattr(module, COMPILED, module)  # what torch.compile wraps
    if loss is None and not is_lightning_module(module):
        raise OptionError("loss=None takes module.training_step: pass a LightningModule, or loss=...")
    if loss is None and not module.automatic_optimization:
        raise OptionError("loss=None takes module.training_step, which steps the optimizers itself: pass loss=...")
    chosen = _chosen(module, parameters)
    places = _places(checkpoints)
    if is_a(dataloader, "LightningDataModule"):
        raise OptionError(
            f"dataloader is the LightningDataModule {type(dataloader).__name__}, which has several: call its "
            "setup('fit') and pass one of its loaders, e.g. dataloader=datamodule.train_dataloader()"
        )
    samples = SamplesOnce(dataloader, sample_index is not None)
    known = dict(module.named_parameters())
    refused = [name for name in chosen if known[name].is_complex()]
    if refused:
        raise UnsupportedError(
            f"{', '.join(f'`{name}`' for name in refused)}: gradients of complex parameters are not stored, but "
            "only real ones: leave them out with parameters=[...], the names of all others"
        )
    frozen = [name for name, parameter in known.items() if parameter.is_inference()]
    if frozen:
        raise OptionError(f"`{frozen[0]}` was made under torch.inference_mode and has no gradient: make it outside")
    options = cast("CaptureOptions", capture)
    return Pass(module, samples, Checkpoints(places, weights_only), chosen, loss, options, quantity, sample_index)


def run_pass(asked: Pass, trainer: Trainer, kind: type[Kind], callbacks: Sequence[Callback] = ()) -> Kind:
    """Let a Trainer predict with a module of this kind, and leave the user's module and the Trainer as they were."""
    module = asked.module
    if is_sharded(module) or not is_a(trainer.strategy, "SingleDeviceStrategy", "DDPStrategy"):
        held = f"{type(module).__name__} is sharded" if is_sharded(module) else type(trainer.strategy).__name__
        raise UnsupportedError(f"{held}: gradients are collected on one device, or under strategy='ddp'")
    with (
        torch.inference_mode(False),
        borrowed(trainer, list(callbacks)),
        untouched(module),
        requiring_gradients(module, dict.fromkeys(asked.names, True)),
    ):
        made = made_for(trainer, kind)(asked)
        trainer.predict(made, return_predictions=False)
    return made


def _places(checkpoints: Any) -> tuple[Source, ...] | None:
    if checkpoints is None:
        return None
    is_list = isinstance(checkpoints, Iterable) and not isinstance(checkpoints, (str, os.PathLike, Mapping))
    found = tuple(checkpoints) if is_list else ()
    check_option("checkpoints", checkpoints, bool(found), "a list of at least one")
    for place, each in enumerate(found):
        is_source = isinstance(each, (str, os.PathLike, Mapping))
        check_option(f"checkpoints[{place}]", each, is_source, "the path of a checkpoint, or a state dict")
    return found


def _chosen(module: nn.Module, names: Sequence[str] | None) -> list[str]:
    """The parameters that are stored, in the order of the module."""
    known = dict(module.named_parameters())
    if names is None:
        found = [name for name, parameter in known.items() if parameter.requires_grad]
        if not found:
            raise OptionError(f"{type(module).__name__} has no trainable parameter: name some with parameters=[...]")
        return found
    unknown = [name for name in names if name not in known]
    if isinstance(names, str) or unknown or not names:
        shown = (
            f"{unknown[0]!r} is none" if unknown and not isinstance(names, str) else f"{names!r} is not a list of names"
        )
        raise OptionError(f"parameters: {shown}; allowed are names of module.named_parameters(): {', '.join(known)}")
    return [name for name in known if name in set(names)]
