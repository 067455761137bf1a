"""A model of another library beside a loop over single samples in float64, written with torch.autograd.grad alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_persample import PerSampleRecord, expanded_weights

B = 3  # no width, length or number of layers of a case is this, but where a library leaves no choice


@dataclass
class Trial:
    """What a case is run on: a module, its batch, and the loss of a batch, of B samples or of one."""

    module: nn.Module
    batch: Any
    loss: Callable[[nn.Module, Any], Tensor]
    share: Callable[[Any], Tensor] | None = None  # (batch) -> each sample's weight in the loss, (B,); None is 1/B
    tolerance: float = 1e-8  # of the norm of a sample's gradient; larger where a model computes in float32 in any case
    rows: int = 1  # how often the loop takes a sample in its mean
    singles: list[Any] | None = None  # the batches of one sample, where the batch's first axis does not hold them


@dataclass
class Case:
    """`build` makes the trial; `named` is a part of the reasons of what is absent today, None where all is exact."""

    name: str
    build: Callable[[], Trial]
    named: str | None = None


@dataclass
class Verdict:
    state: str  # "exact", "named", "wrong" or "false warning"
    coverage: float
    reasons: str = ""
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.state}, coverage {self.coverage:.3f}\n" + "\n".join([*self.faults, self.reasons])


# The models and their losses ------------------------------------------------------------------------------------------
def outputs_of(out: Any) -> Tensor:
    """All floating-point outputs of a model, one row per sample, (B, n)."""
    if hasattr(out, "to_tuple"):
        out = out.to_tuple()
    leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.cat([leaf.flatten(1) for leaf in leaves if leaf.dim()], 1)


def distance(module: nn.Module, batch: Any) -> Tensor:
    """The outputs' mean squared distance from what no sample and no parameter has a part in."""
    out = outputs_of(module(**batch) if isinstance(batch, dict) else module(*batch))
    steps = torch.arange(out.size(1), dtype=out.dtype)
    return (out - (2.0 * steps).sin()).square().mean()


def calm(module: nn.Module) -> nn.Module:
    """In float64 and in training mode, as a fit has it, but that nothing is drawn and batch statistics are kept."""
    for part in module.modules():
        for owner in (part, getattr(part, "config", None)):
            for name, value in list(vars(owner).items()) if hasattr(owner, "__dict__") else []:
                if ("drop" in name or name == "p") and isinstance(value, float):
                    setattr(owner, name, 0.0)
    module.double().train()
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.eval()
    with torch.no_grad():
        for p in module.parameters():
            if p.is_floating_point() and not p.any():  # an adapter or a gate that begins at 0 hides what it multiplies
                p.add_(torch.randn_like(p), alpha=0.1)
    return module


# The comparison -------------------------------------------------------------------------------------------------------
def single_samples(trial: Trial) -> list[Any]:
    if trial.singles is not None:
        return trial.singles
    places = [[i] * trial.rows for i in range(B)]
    return [tree_map_only(Tensor, lambda tensor, at=at: tensor[at], trial.batch) for at in places]


def loop(trial: Trial, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Each sample's gradient by name, (B, *shape), float64."""
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for one in single_samples(trial):
        trained(trial, one)
        for name, p in parameters.items():
            rows[name].append(torch.zeros_like(p) if p.grad is None else p.grad.to_dense())
    trial.module.zero_grad()
    return {name: torch.stack(grads) for name, grads in rows.items()}


def trained(trial: Trial, batch: Any) -> None:
    """`.grad` of one batch, as a training step leaves it."""
    torch.manual_seed(1)
    trial.module.zero_grad()
    trial.loss(trial.module, batch).backward()


def captured(trial: Trial, **options: Any) -> tuple[PerSampleRecord, list[str]]:
    share = "mean" if trial.share is None else trial.share(trial.batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with expanded_weights(trial.module, trial.batch, batch_size=B, loss_reduction=share, **options) as capture:
            trained(trial, trial.batch)
    own = [str(each.message) for each in caught if "PerSample" in each.category.__name__]
    return capture.record, own


def compare(build: Callable[[], Trial]) -> Verdict:
    """The gradients and the norms that a capture gives beside the loop's, and `.grad` beside that of a plain step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        trial = build()
        parameters = {name: p for name, p in trial.module.named_parameters() if p.requires_grad}
        expected = loop(trial, parameters)
        trained(trial, trial.batch)
        plain = {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()}
    record, said = captured(trial, quantities=("sq_norm", "grad_sample"))
    faults = []
    for name, p in parameters.items():
        same = p.grad is None if plain[name] is None else p.grad is not None and torch.equal(p.grad, plain[name])
        faults += [] if same else [f".grad of {name} is another than without the capture"]
    lean, _ = captured(trial)
    trial.module.zero_grad()

    size = torch.stack([grads.reshape(B, -1).square().sum(1) for grads in expected.values()]).sum(0).sqrt()
    assert size.isfinite().all(), "the loop itself gives no finite norms"
    assert size.all(), "the loss of some sample has no gradient"
    for name, grads in expected.items():
        if name in record.names:
            off = ((record.grad_samples[name] - grads).reshape(B, -1).norm(dim=1) / size).max().item()
            faults += [] if off <= trial.tolerance else [f"{name}: the gradients are off by {off:.1e} of the norm"]
        elif grads.any() and name not in record.unsupported:
            faults.append(f"{name} has a gradient and is named nowhere")
        for each in (record, lean):
            if name in each.names:
                off = ((each.sq_norms[name] - grads.reshape(B, -1).square().sum(1)).abs() / size**2).max().item()
                faults += [] if off <= trial.tolerance else [f"{name}: the squared norms are off by {off:.1e}"]
    if record.names != lean.names:
        faults.append(f"parameters of two captures differ: {sorted(set(record.names) ^ set(lean.names))}")
    if record.mixing and not said:
        faults.append(f"samples influence each other, and no warning says so: {record.mixing}")
    noted = (*record.mixing, *record.axis_lost, *record.weighting)
    reasons = "\n".join([*dict.fromkeys(record.unsupported.values()), *noted, *said])
    # what batch statistics mix is no sample's own gradient: the values are declared as something else
    declared = bool(noted) and all("off by" in fault for fault in faults)
    if faults and not declared:
        return Verdict("wrong", record.coverage, reasons, faults)
    if record.mixing and not faults:  # the samples are said to influence each other, and they do not
        return Verdict("false warning", record.coverage, reasons)
    if record.coverage < 1 or faults:
        return Verdict("named", record.coverage, reasons, faults)
    return Verdict("false warning" if said else "exact", record.coverage, reasons)


def check(case: Case) -> None:
    """The test of one case: exact without a word, or named by the reason that it is known to have."""
    verdict = compare(case.build)
    if case.named is None:
        assert verdict.state == "exact", str(verdict)
    else:
        assert verdict.state == "named", str(verdict)
        assert case.named in verdict.reasons, str(verdict)


def needs(*libraries: str) -> None:
    for library in libraries:
        pytest.importorskip(library)
