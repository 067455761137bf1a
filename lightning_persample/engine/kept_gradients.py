"""What of the samples' gradients is computed after the backward: dots with vectors, and random projections."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

import torch
from torch import Tensor

from lightning_persample.engine.failure import in_smaller_chunks
from lightning_persample.engine.observed import version_of
from lightning_persample.engine.own_scale import OwnScale, in_gradient_dtype, summed
from lightning_persample.errors import OptionError, UnsupportedError
from lightning_persample.gradients import Projection, SampleGradient, kernel_options
from lightning_persample.gradients.options import current_options

__all__ = ["OF_KEPT", "KeptGradients"]

OF_KEPT = frozenset({"dot", "projection"})
"""The quantities for which gradients are kept after the backward."""


class KeptGradients:
    """Holds what each sample contributed to the parameters, which takes about the memory of the activations.

    Args:
        structures: the contributions, by parameter.
        dtypes: of the parameters, by name.
        own: what the contributions are to be divided by; None where they are of the samples' own losses.
        quantities: what was asked for, of `OF_KEPT` and others.
    """

    def __init__(
        self,
        structures: Mapping[str, SampleGradient],
        dtypes: Mapping[str, torch.dtype],
        own: OwnScale | None,
        quantities: Collection[str],
    ) -> None:
        self._structures = dict(structures)
        self._dtypes = {name: dtypes[name] for name in structures}
        self._own = own
        self._quantities = OF_KEPT & frozenset(quantities)
        self._options = current_options()
        self._versions = {
            name: [(tensor, version_of(tensor)) for tensor in structure.tensors()]
            for name, structure in structures.items()
        }

    def gives(self, quantity: str) -> bool:
        """Whether this quantity was asked for."""
        return quantity in self._quantities

    @torch.no_grad()
    def with_vectors(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """Dot of each sample's own gradient with one vector; -> (B,)."""
        terms: list[Tensor] = []
        for name, vector in vectors.items():
            structure = self._structures.get(name)
            if structure is None:
                known = ", ".join(f"`{each}`" for each in list(self._structures)[:8])
                raise OptionError(f"dot: `{name}` has no per-sample gradient in this record; it holds {known}")
            if vector.shape != structure.shape:
                raise OptionError(
                    f"dot: the vector of `{name}` has shape {tuple(vector.shape)}; the parameter's is "
                    f"{tuple(structure.shape)}"
                )
            self._refuse_changed(name, "dot")
            with kernel_options(self._options):
                terms.append(structure.dot(vector.detach()))
        if not terms:
            raise OptionError("dot: there is no vector; give one for at least one parameter")
        total = summed(terms)
        return total if self._own is None else self._own.own([total])[0]

    @torch.no_grad()
    def project(self, projection: Projection) -> dict[str, Tensor]:
        """Each sample's own gradient, projected parameter by parameter."""
        if not isinstance(projection, Projection):
            raise OptionError(f"project: projection is {projection!r}; allowed is a Projection")
        projected: dict[str, Tensor] = {}
        for name, structure in self._structures.items():
            self._refuse_changed(name, "project")
            with kernel_options(self._options):
                rows = in_smaller_chunks(partial(structure.project, projection, name))
            (own,) = [rows] if self._own is None else self._own.own([rows])
            projected[name] = in_gradient_dtype(self._dtypes[name], own)
        return projected

    def _refuse_changed(self, name: str, method: str) -> None:
        if any(version_of(tensor) != version for tensor, version in self._versions[name]):
            asked = "dot" if method == "dot" else "projection"
            raise UnsupportedError(
                f"{method}: a tensor that the gradient of `{name}` is made of was changed in place since the backward; "
                f"ask for the {asked} before that"
            )
