"""What is refused, and the text with which it is; shapes, never tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lightning_persample.gradients import Block, Dense, Indexed, Outer, Patches, PatchGeometry, Sum, add_up

GEOMETRY = PatchGeometry((3,), (2,), ((1, 1),), (1,), groups=2)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "dense-without-batch": (
        lambda: Dense(zeros()),
        "Dense: grad has shape (B, *shape), got a tensor without axes.",
    ),
    "dot-shape": (
        lambda: Dense(zeros(4, 2, 3)).dot(zeros(3, 2)),
        "dot: Dense of 4 samples and shape (2, 3) with a vector of shape (3, 2).",
    ),
    "outer-axes": (
        lambda: Outer(zeros(2, 3), zeros(2, 3, 4)),
        "Outer: left has shape (B, T, p) and right (B, T, d), got left (2, 3), right (2, 3, 4).",
    ),
    "outer-positions": (
        lambda: Outer(zeros(2, 5, 4), zeros(2, 3, 4)),
        "Outer: left has shape (B, T, p) and right (B, T, d), got left (2, 5, 4), right (2, 3, 4).",
    ),
    "indexed-positions": (
        lambda: Indexed(zeros(2, 5).long(), zeros(2, 3, 4), 10),
        "Indexed: index has shape (B, T) and right (B, T, d), got index (2, 5), right (2, 3, 4).",
    ),
    "indexed-dtype": (
        lambda: Indexed(zeros(2, 3), zeros(2, 3, 4), 10),
        "Indexed: index has an integer dtype, got torch.float32.",
    ),
    "patches-axes": (
        lambda: Patches(zeros(2, 4, 5), zeros(2, 1, 4, 9), GEOMETRY),
        "Patches: grad_out has shape (B, k, O, *out) and input (B, k, C, *in) with 1 spatial axes, "
        "got grad_out (2, 4, 5), input (2, 1, 4, 9).",
    ),
    "patches-rows": (
        lambda: Patches(zeros(2, 3, 4, 5), zeros(2, 1, 4, 9), GEOMETRY),
        "Patches: grad_out has shape (B, k, O, *out) and input (B, k, C, *in) with 1 spatial axes, "
        "got grad_out (2, 3, 4, 5), input (2, 1, 4, 9).",
    ),
    "patches-groups": (
        lambda: Patches(zeros(2, 1, 3, 5), zeros(2, 1, 4, 9), GEOMETRY),
        "Patches: O and C are multiples of groups, got grad_out (2, 1, 3, 5), input (2, 1, 4, 9) and 2 groups.",
    ),
    "patches-outputs": (
        lambda: Patches(zeros(2, 1, 4, 6), zeros(2, 1, 4, 9), GEOMETRY),
        "Patches: at most (5,) patches fit into the input, got grad_out (2, 1, 4, 6), input (2, 1, 4, 9) and "
        "PatchGeometry(kernel_size=(3,), stride=(2,), padding=((1, 1),), dilation=(1,), groups=2).",
    ),
    "geometry-axes": (
        lambda: PatchGeometry((3, 3), (1,), ((1, 1),), (1,)),
        "PatchGeometry: kernel_size, stride, padding and dilation have [2, 1, 1, 1] entries; "
        "each needs one entry per spatial axis.",
    ),
    "geometry-range": (
        lambda: PatchGeometry((3,), (0,), ((1, 1),), (1,)),
        "PatchGeometry: kernel_size, stride, dilation and groups are at least 1, got "
        "PatchGeometry(kernel_size=(3,), stride=(0,), padding=((1, 1),), dilation=(1,), groups=1).",
    ),
    "geometry-padding": (
        lambda: PatchGeometry((3,), (1,), ((1, -1),), (1,)),
        "PatchGeometry: padding has a pair (before, after) of numbers >= 0 per axis, got ((1, -1),).",
    ),
    "block-size": (
        lambda: Block(zeros(2, 5, 7), 0, 2, 3),
        "Block: grad has shape (B, *shape) with 2 * 3 entries along axis 0 of shape, got grad (2, 5, 7).",
    ),
    "block-axis": (
        lambda: Block(zeros(2, 6), 1, 2, 3),
        "Block: grad has shape (B, *shape) with 2 * 3 entries along axis 1 of shape, got grad (2, 6).",
    ),
    "block-position": (
        lambda: Block(zeros(2, 6), 0, 2, 3, torch.arange(3)),
        "Block: position has shape (2,), got (3,).",
    ),
    "sum-of-nothing": (
        lambda: Sum([]),
        "Sum: got no terms; without a term the shape of the gradient is unknown.",
    ),
    "sum-of-different-shapes": (
        lambda: Sum([Dense(zeros(2, 3)), Dense(zeros(2, 4))]),
        "Sum: terms belong to the same samples and the same parameter, got Dense 2 x (3,), Dense 2 x (4,).",
    ),
    "add-up-nothing": (
        lambda: add_up([]),
        "add_up: got no terms; without a term the shape of the gradient is unknown.",
    ),
    "add-up-different-samples": (
        lambda: add_up([Dense(zeros(2, 3, 4)), Outer(zeros(1, 5, 3), zeros(1, 5, 4))]),
        "add_up: terms belong to the same samples and the same parameter, got Dense 2 x (3, 4), Outer 1 x (3, 4).",
    ),
    "inner-of-different-samples": (
        lambda: Dense(zeros(2, 3)).inner(Dense(zeros(1, 3))),
        "inner: Dense of 2 samples and shape (3,) and Dense of 1 samples and shape (3,) do not belong to the same "
        "samples and parameter.",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_text(name: str) -> None:
    provoke, text = ERRORS[name]
    with pytest.raises(ValueError, match=r".") as caught:
        provoke()
    assert str(caught.value) == text
