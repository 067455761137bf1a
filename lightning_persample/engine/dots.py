"""Dots of the samples' gradients with vectors that are known only after the backward."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_persample.engine.observed import version_of
from lightning_persample.engine.own_scale import OwnScale, summed
from lightning_persample.errors import OptionError, UnsupportedError
from lightning_persample.gradients import SampleGradient

__all__ = ["Dots"]


class Dots:
    """Holds what each sample contributed to the parameters, which takes about the memory of the activations.

    Args:
        structures: the contributions, by parameter.
        own: what the contributions are to be divided by; None where they are of the samples' own losses.
    """

    def __init__(self, structures: Mapping[str, SampleGradient], own: OwnScale | None) -> None:
        self._structures = dict(structures)
        self._own = own
        self._versions = {
            name: [(tensor, version_of(tensor)) for tensor in structure.tensors()]
            for name, structure in structures.items()
        }

    @torch.no_grad()
    def with_vectors(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """Dot of each sample's own gradient with one vector.

        Args:
            vectors: by parameter the vector's part, of the parameter's shape; other parameters count as zero.

        Returns:
            (B,).

        Raises:
            OptionError: a name that has no values, or a vector of another shape.
            UnsupportedError: a tensor that the gradients are made of was changed in place since the backward.
        """
        terms: list[Tensor] = []
        for name, vector in vectors.items():
            structure = self._structures.get(name)
            if structure is None:
                known = ", ".join(f"`{each}`" for each in list(self._structures)[:8])
                raise OptionError(f"dot: `{name}` has no per-sample gradient in this record; it holds {known}")
            if vector.shape != structure.shape:
                raise OptionError(
                    f"dot: the vector of `{name}` has sizes {tuple(vector.shape)}; the parameter's are "
                    f"{tuple(structure.shape)}"
                )
            if any(version_of(tensor) != version for tensor, version in self._versions[name]):
                raise UnsupportedError(
                    f"dot: a tensor that the gradient of `{name}` is made of was changed in place since the backward; "
                    "ask for the dot before that"
                )
            terms.append(structure.dot(vector.detach()))
        if not terms:
            raise OptionError("dot: there is no vector; give one for at least one parameter")
        total = summed(terms)
        return total if self._own is None else self._own.own([total])[0]
