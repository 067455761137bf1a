"""What decides the numbers of a projection; ``python -m tests.gradients.projection_digests SEED KINDS NAME...``.

Kinds are given with commas between them.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch

from lightning_persample import Projection


def digest(projection: Projection, names: list[str]) -> dict[str, str]:
    """By name and shape, the hash of all numbers."""
    found = {}
    for name in names:
        for shape in ((300,), (40, 50)):
            joined = torch.cat([matrix.flatten() for matrix in projection.matrices(name, shape)])
            found[f"{name} {shape}"] = hashlib.sha256(joined.numpy().tobytes()).hexdigest()
    return found


def main(seed: str, kinds: str, *names: str) -> None:
    print(json.dumps([digest(Projection(kind=kind, seed=int(seed)), list(names)) for kind in kinds.split(",")]))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
