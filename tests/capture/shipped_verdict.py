"""The engine on a trial beside the truth: exact, refused by name, or wrong."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_persample.capture.mode import expanded_weights
from lightning_persample.capture.record import PerSampleRecord
from tests.capture.shipped_trials import REJECTED, Trial
from tests.capture.shipped_truth import Truth, close, truth

__all__ = ["Found", "Verdict", "assert_none_wrong", "judge"]

_OP = re.compile(r"`[\w.]+`")
_NODE = re.compile(r"also arrives through \w+Backward\d*")
_SIZES = re.compile(r"\((\d+(, \d+)*,?)?\)")
_OUTSIDE = "comes from calls without a tensor of the batch"


@dataclass(frozen=True)
class Verdict:
    """How a trial ended.

    Attributes:
        outcome: "exact"; "unsupported" (some parameters are named with a reason, the others are exact); "noted"
            (samples influence each other, and the record says so); "cautious" (they do not, but the record says so);
            "no call" (torch itself refuses it); "undecided" (nothing gets a gradient, or no reference knows the
            samples' own gradients); "wrong".
        reference: see `Truth.reference`; "" where there is none.
        detail: the reasons, or what is wrong.
    """

    outcome: str
    reference: str = ""
    detail: str = ""


Found = tuple[tuple[str, Verdict], ...]


def assert_none_wrong(found: Found) -> None:
    wrong = [f"{name}: {verdict.detail}" for name, verdict in found if verdict.outcome == "wrong"]
    assert not wrong, f"{len(wrong)} of {len(found)} are wrong\n" + "\n".join(wrong[:5])


def judge(trial: Trial, loss_reduction: str, tolerance: float | None = None) -> Verdict:
    """Compare the engine's record of a trial with the truth.

    Args:
        trial: the call.
        loss_reduction: "sum" or "mean", for a call that does not give the loss itself.
        tolerance: relative to a sample's norm, by default what the dtypes allow.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            grads, loss = _plain(trial, loss_reduction, by_call=False)
        except REJECTED as error:
            return Verdict("no call", detail=f"torch raises {type(error).__name__}")
        if not grads:
            return Verdict("undecided", detail="no gradient")
        known = truth(trial)
        number = known.kind in ("sum", "mean")
        reduction = known.kind if number else loss_reduction
        if number:
            grads, loss = _plain(trial, reduction, by_call=True)
        if not all(bool(g.isfinite().all()) for g in [*grads.values(), *known.gradients.values()]):
            return Verdict("undecided", detail="a gradient is not finite")
        try:
            record, seen, seen_loss = _observed(trial, reduction, by_call=number)
        except Exception as error:  # (whatever it is, the plain call does not raise it)
            return Verdict("wrong", known.reference, f"raised {type(error).__name__}: {error}")
        if not _same(loss, seen_loss, grads, seen) and _repeats(trial, reduction, number):
            return Verdict("wrong", known.reference, "the loss or .grad is not bit for bit that of the plain call")
    if record is None and known.kind == "no sample" and not any(bool(grad.any()) for grad in grads.values()):
        return Verdict("undecided", detail="a loss of no sample, which has no record")
    if record is None:
        return Verdict("wrong", known.reference, "no record, though there are gradients")
    return _compare(trial, known, record, grads, reduction, trial.tolerance if tolerance is None else tolerance)


def _observed(
    trial: Trial, loss_reduction: str, by_call: bool
) -> tuple[PerSampleRecord | None, dict[str, Tensor], Tensor]:
    """The record, `.grad` of each parameter and the loss under observation."""
    module, batch = trial.module(), trial.tensors()
    with expanded_weights(
        module,
        tuple(batch),  # (the items of a list may be samples)
        batch_dim=trial.batch_dim,
        loss_reduction=loss_reduction,  # type: ignore[arg-type]
        quantities=("sq_norm", "grad_sample"),
        unsupported="ignore",
    ) as capture:
        grads, loss = _step(trial, module, batch, loss_reduction, by_call)
    return (capture.records[-1] if capture.records else None), grads, loss


def _plain(trial: Trial, loss_reduction: str, by_call: bool) -> tuple[dict[str, Tensor], Tensor]:
    return _step(trial, trial.module(), trial.tensors(), loss_reduction, by_call)


def _step(
    trial: Trial, module: nn.Module, batch: list[Tensor], loss_reduction: str, by_call: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """The gradients and the loss of one forward and backward."""
    loss = trial.loss(trial.outputs(module, batch))
    if loss_reduction == "mean" and not by_call:
        loss = loss / trial.batch_size
    if loss.requires_grad:
        loss.backward()
    grads = {n: p.grad.to_dense() for n, p in module.named_parameters() if p.grad is not None}
    return grads, loss.detach()


def _same(loss: Tensor, seen_loss: Tensor, grads: dict[str, Tensor], seen: dict[str, Tensor]) -> bool:
    if grads.keys() != seen.keys() or not all(torch.equal(grads[name], seen[name]) for name in grads):
        return False
    return torch.allclose(loss, seen_loss, rtol=0.0, atol=0.0, equal_nan=True)


def _repeats(trial: Trial, reduction: str, by_call: bool) -> bool:
    """Whether the plain call gives the same bits every time: some kernels round by the address of their input."""
    grads, loss = _plain(trial, reduction, by_call)
    kept = []
    for size in range(1, 30):
        kept.append(torch.empty(size))
        again, loss_again = _plain(trial, reduction, by_call)
        if not _same(loss, loss_again, grads, again):
            return False
    return True


def _compare(
    trial: Trial, known: Truth, record: PerSampleRecord, grads: dict[str, Tensor], reduction: str, tolerance: float
) -> Verdict:
    """The verdict on all parameters, in one scale.

    The loss is the sum over its samples, divided by the batch size B under a mean. Where it is made of m samples alone
    and their weight in it is not known to be 1/B, it is a mean over these m, and m/B belongs to their own losses.
    """
    found = _compare_in_scale(trial, known, record, grads, reduction, tolerance, trial.batch_size)
    if found.outcome == "wrong" and reduction == "mean" and record.samples is not None and not record.weighting:
        return _compare_in_scale(trial, known, record, grads, reduction, tolerance, record.num_values)
    return found


def _compare_in_scale(
    trial: Trial,
    known: Truth,
    record: PerSampleRecord,
    grads: dict[str, Tensor],
    reduction: str,
    tolerance: float,
    weight: int,
) -> Verdict:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in record.unsupported.items())
    noted = "; ".join((*record.mixing, *record.axis_lost, *record.weighting))
    fault = _inconsistency(trial, known, record, grads, reduction, tolerance, weight)
    if fault is not None:
        return Verdict("wrong", known.reference, fault)
    if known.kind in ("unknown", "no sample"):
        return Verdict("undecided", detail=noted or reasons or "no reference")
    if known.kind == "mixing":
        live = [name for name in record.names if bool(record.grad_samples[name].any())]
        if live and not noted:
            return Verdict("wrong", detail=f"samples influence each other, unsaid, in {live}; {reasons}")
        return Verdict("noted" if noted else "unsupported" if reasons else "undecided", detail=noted or reasons)
    size, own = record.num_values, _own(trial, known, record, weight)
    norms = torch.stack([g.abs().square().reshape(size, -1).sum(1) for g in own.values()]).sum(0).sqrt()
    allowed = tolerance * (norms + 0.01 * (1 + norms.max()))
    for name in record.names:
        worst = (record.grad_samples[name] - own[name]).abs().reshape(size, -1)
        if bool((worst > allowed[:, None]).any()):
            if (
                noted and known.reference == "whole batch"
            ):  # (an experiment may miss an influence, a saturated softmax's)
                return Verdict("noted", detail=noted)
            ratio = float((worst / (norms[:, None] + 1e-12)).max())
            return Verdict("wrong", known.reference, f"{name} differs by {ratio:.1e} of the sample's norm")
    if any(bool(g.any()) for name, g in known.gradients.items() if name in record.unused):
        return Verdict("wrong", known.reference, f"with a gradient, but unused: {record.unused}")
    return Verdict("unsupported" if reasons else "cautious" if noted else "exact", known.reference, reasons or noted)


def _own(trial: Trial, known: Truth, record: PerSampleRecord, weight: int) -> dict[str, Tensor]:
    """By parameter, the truth for the samples that a record has values for, of a mean over so many samples."""
    rows = torch.arange(trial.batch_size) if record.samples is None else record.samples
    return {name: grad[rows] * (weight / trial.batch_size) for name, grad in known.gradients.items()}


def _inconsistency(
    trial: Trial,
    known: Truth,
    record: PerSampleRecord,
    grads: dict[str, Tensor],
    reduction: str,
    tolerance: float,
    weight: int,
) -> str | None:
    """What is wrong with a record in itself and beside `.grad`."""
    if sorted((*record.names, *record.unsupported, *record.unused)) != sorted(n for n, _ in trial.named_parameters()):
        return "a parameter is not in exactly one place: reached, unsupported or unused"
    if any(bool(grads[name].any()) for name in record.unused if name in grads):
        return "a parameter with a gradient counts as unused"
    for name, reason in record.unsupported.items():
        named = _NODE.search(reason) or (_OP.search(reason) and _SIZES.search(reason))
        if _OUTSIDE not in reason and not named:
            return f"the reason for {name} does not name op and sizes: {reason}"
    chosen = set(range(trial.batch_size) if record.samples is None else record.samples.tolist())
    in_loss = set(known.samples) if known.samples or known.gradients else chosen
    if len(chosen) != record.num_values or (record.samples is not None and chosen != in_loss):
        return f"values are for {record.num_values} samples, {sorted(chosen)}, but the loss is of {sorted(in_loss)}"
    own_gradients = _own(trial, known, record, weight)
    weight = weight if reduction == "mean" else 1
    for name in record.names:
        if name not in grads:
            return f"{name} has values, but no .grad"
        own = record.grad_samples[name].double()
        expected = own_gradients[name].sum(0) / weight if name in own_gradients else grads[name]
        adds_up = name not in known.outside and close(expected, grads[name])  # (not where a scale counts the batch)
        if adds_up and not close(own.sum(0) / weight, grads[name], tolerance):
            return f"contributions to {name} do not sum to .grad"
        if not close(record.sq_norms[name], own.reshape(record.num_values, -1).square().sum(1), tolerance):
            return f"sq_norm of {name} is not that of its grad_sample"
    return None
