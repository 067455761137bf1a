"""How large the mean gradient of a parameter's entries is beside its spread over samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_persample.errors import OptionError
from lightning_persample.metrics.base import PerSampleMetric, accumulation_dtype, check_count, check_tensor
from lightning_persample.metrics.functional import ratio_of_sums


class GradientSignalToNoise(PerSampleMetric):
    """Gradient signal to noise ratio ``(E g)^2 / Var(g)`` of a parameter's entries, averaged over groups of parameters.

    Expectation and variance are over all samples since the last `reset`, see `gradient_signal_to_noise`.

    >>> import torch
    >>> from torch import nn
    >>> metric = GradientSignalToNoise(dict(nn.Linear(2, 1).named_parameters()))
    >>> grads = {"weight": torch.tensor([[[1.0, 4.0]], [[3.0, 0.0]]]), "bias": torch.tensor([[1.0], [2.0]])}
    >>> sums = {name: grad.sum(0) for name, grad in grads.items()}
    >>> sq_sums = {name: grad.square().sum(0) for name, grad in grads.items()}
    >>> metric.update(sums, sq_sums, count=2)
    >>> {group: value.item() for group, value in metric.compute().items()}
    {'weight': 1.25, 'bias': 4.5}

    The ratio is one of the gradients at given weights: give all samples with the same weights, then `compute` and
    `reset`; where the weights change in between, their drift counts as noise. It makes no difference how samples are
    spread over calls and processes; under DDP each process gives its own, not averaged.

    Not finite: sums cannot be taken apart again, so that a call with an entry that is not finite is left out with all
    its samples, for every parameter; ``counts()["nonfinite"]`` counts them. Give smaller parts, or sum finite samples
    only, to lose less. One sample (B = 1) has no variance: nan. Entries on which all samples agree up to rounding have
    no noise to divide by; they are left out of the average and counted in ``counts()["undefined/<group>"]``. A group
    without an entry that counts is nan.

    Memory: 32 bytes for each entry of the parameters, half of them for what `reset` returns to; while processes
    exchange them, 16 bytes more for each process.

    Args:
        parameters: by name, the parameters or any tensors of their shapes.
        groups: by name of the group, the names of its parameters; parameters in none are not counted. None makes a
            group of each parameter.
        **kwargs: those of `torchmetrics.Metric`.

    Raises:
        OptionError: a group without parameters, with one that is not among `parameters`, or one in several groups.

    Reference:
        Liu et al. 2020, Understanding Why Neural Networks Generalize Well Through GSNR of Parameters, arXiv 2001.07384,
        section 2.1.
    """

    plot_lower_bound = 0.0
    _title = "Gradient signal to noise ratio"
    _axis = r"mean of $(\mathrm{E}\,g)^2 \;/\; \mathrm{Var}(g)$"

    sums: Tensor
    sq_sums: Tensor
    samples: Tensor
    nonfinite: Tensor
    rounding: Tensor

    def __init__(
        self, parameters: Mapping[str, Tensor], groups: Mapping[str, Sequence[str]] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.groups = _checked(groups, parameters)
        self._shapes = {name: parameters[name].shape for names in self.groups.values() for name in names}
        entries = sum(shape.numel() for shape in self._shapes.values())
        for name in ("sums", "sq_sums"):
            self.add_state(name, torch.zeros(entries, dtype=accumulation_dtype(self.device)), "sum")
        self._new_state(0.0, "max", "rounding")
        for name in ("samples", "nonfinite"):
            self.add_state(name, torch.tensor(0), "sum")

    def update(self, sums: Mapping[str, Tensor], sq_sums: Mapping[str, Tensor], count: int) -> None:
        """Add samples.

        Args:
            sums: by name of the parameter the sum of the samples' gradients, of the parameter's shape and any floating
                dtype; other names than those of the groups are ignored.
            sq_sums: by name the sum of their squares, entry by entry.
            count: number of samples in the sums.
        """
        check_count(count)
        added, squares = self._flat(sums, "sums"), self._flat(sq_sums, "sq_sums")
        finite = added.isfinite().all() & squares.isfinite().all()
        self.sums = self.sums + added.where(finite, 0.0)
        self.sq_sums = self.sq_sums + squares.where(finite, 0.0)
        self.samples = self.samples + finite * count
        self.nonfinite = self.nonfinite + ~finite * count
        coarsest = max(torch.finfo(given[name].dtype).eps for given in (sums, sq_sums) for name in self._shapes)
        self.rounding = self.rounding.clamp(min=coarsest)

    def compute(self) -> dict[str, Tensor]:
        """The ratios.

        Returns:
            For each group the mean over the entries of its parameters; nan where there is none.
        """
        return {group: ratios.nanmean() for group, ratios in self._ratios().items()}

    def counts(self) -> dict[str, Tensor]:
        """What the values rest on, over all processes.

        Returns:
            ``samples`` that count, ``nonfinite``, the number of those left out, and for each group
            ``undefined/<group>``, the number of its entries that have no ratio.
        """
        with self._synced():
            counts = {"samples": self.samples, "nonfinite": self.nonfinite}
            counts |= {f"undefined/{group}": ratios.isnan().sum() for group, ratios in self._ratios().items()}
            return {name: count.to(self.sums.dtype) for name, count in counts.items()}

    def _ratios(self) -> dict[str, Tensor]:
        """The ratio of every entry, flat, by group."""
        ratios = ratio_of_sums(self.sums, self.sq_sums, self.samples, self.rounding)
        sizes = [sum(self._shapes[name].numel() for name in names) for names in self.groups.values()]
        return dict(zip(self.groups, ratios.split(sizes), strict=True))

    def _flat(self, given: Mapping[str, Tensor], argument: str) -> Tensor:
        missing = [name for name in self._shapes if name not in given]
        if missing:
            raise OptionError(f"{argument} lacks {', '.join(missing)}; it needs every parameter of the groups")
        for name, shape in self._shapes.items():
            value = given[name]
            if value.shape != shape or not value.is_floating_point():
                raise OptionError(
                    f"{argument}[{name!r}] has shape {tuple(value.shape)} and dtype {value.dtype}; the parameter has "
                    f"shape {tuple(shape)}, and a floating dtype is needed"
                )
            check_tensor(value, f"{argument}[{name!r}]", self.device)
        dtype = accumulation_dtype(self.device)
        return torch.cat([given[name].detach().flatten().to(dtype) for name in self._shapes])


def _checked(
    groups: Mapping[str, Sequence[str]] | None, parameters: Mapping[str, Tensor]
) -> dict[str, tuple[str, ...]]:
    given: Mapping[str, Sequence[str]] = {name: [name] for name in parameters} if groups is None else groups
    chosen = {group: tuple(names) for group, names in given.items()}
    if not chosen or not all(chosen.values()):
        raise OptionError("groups has a group without parameters, or none at all; name at least one parameter in each")
    names = [name for group in chosen.values() for name in group]
    unknown = [name for name in names if name not in parameters]
    if unknown:
        raise OptionError(f"groups names {', '.join(unknown)}, which parameters does not have; check the spelling")
    if len(set(names)) < len(names):
        several = sorted({name for name in names if names.count(name) > 1})
        raise OptionError(f"groups names {', '.join(several)} several times; a parameter belongs to one group")
    return chosen
