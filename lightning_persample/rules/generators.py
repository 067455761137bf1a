"""An op that is run again takes no number out of the streams that the training draws from."""

from __future__ import annotations

import pickle
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Functions without a line of Python, which draws from neither; to read NumPy's state takes longer than most of them.
_COMPILED = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)
_MODULES = tuple(function.__module__ for function in (F.relu, torch.einsum, Tensor.norm))


def is_of_torch(function: object) -> bool:
    """Whether a function is torch's own, and no op that a user has added."""
    return isinstance(function, _COMPILED) or getattr(function, "__module__", None) in _MODULES


@contextmanager
def other_generators_kept(function: object = None) -> Iterator[Callable[[], bool]]:
    """The random numbers of Python and NumPy go on afterwards as if nothing had drawn any; torch's are not its task."""
    # Gives what tells whether anything has drawn from them inside, since it was last asked; `function` is all that
    # runs.
    if isinstance(function, _COMPILED):
        yield lambda: False
        return
    numpy = sys.modules.get("numpy")  # what has not been imported has not been drawn from

    def states() -> tuple[Any, Any]:
        return random.getstate(), None if numpy is None else numpy.random.get_state(legacy=False)

    state, numpy_state = seen = states()

    def drawn() -> bool:
        nonlocal seen
        before, seen = seen, states()
        return before[0] != seen[0] or pickle.dumps(before[1]) != pickle.dumps(seen[1])

    try:
        yield drawn
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


@contextmanager
def generators_kept(tensors: Iterable[Tensor], function: object = None) -> Iterator[Callable[[], bool]]:
    """As `other_generators_kept`, with torch's generators: that of the host and those of the tensors' devices."""
    devices = [*{tensor.device for tensor in tensors if tensor.is_cuda}]

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]

    with torch.random.fork_rng(devices=devices), other_generators_kept(function) as others_drawn:
        seen = states()

        def drawn() -> bool:
            nonlocal seen
            before, seen = seen, states()
            return others_drawn() or not all(map(torch.equal, before, seen))

        yield drawn
