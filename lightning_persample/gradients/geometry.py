"""Where the patches of a convolution lie in its input."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class PatchGeometry:
    """Where a convolution's patches lie in its input, with one entry per spatial axis.

    Example:
        >>> geometry = PatchGeometry((3, 3), stride=(2, 2), padding=((1, 1), (1, 1)), dilation=(1, 1))
        >>> geometry.output_size((8, 9))
        (4, 5)

    Attributes:
        kernel_size: size of the kernel.
        stride: distance of neighbouring patches.
        padding: zeros (before, after) the input.
        dilation: distance of neighbouring elements of a patch.
        groups: number of groups of channels that do not see each other.

    Raises:
        ValueError: when the tuples differ in length, or an entry is out of range.
    """

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def __post_init__(self) -> None:
        lengths = [len(self.kernel_size), len(self.stride), len(self.padding), len(self.dilation)]
        if len(set(lengths)) != 1:
            raise ValueError(
                f"PatchGeometry: kernel_size, stride, padding and dilation have {lengths} entries; "
                "each needs one entry per spatial axis."
            )
        if min((*self.kernel_size, *self.stride, *self.dilation, self.groups)) < 1:
            raise ValueError(f"PatchGeometry: kernel_size, stride, dilation and groups are at least 1, got {self}.")
        if any(min(pair) < 0 for pair in self.padding):
            raise ValueError(
                f"PatchGeometry: padding has a pair (before, after) of numbers >= 0 per axis, got {self.padding}."
            )

    def output_size(self, in_size: tuple[int, ...]) -> tuple[int, ...]:
        """Number of patches that fit along each spatial axis of an input of size `in_size`."""
        return _output_size(self, in_size)

    def extent(self, out_size: tuple[int, ...]) -> tuple[int, ...]:
        """Number of padded input positions that `out_size` patches read along each spatial axis."""
        axes = zip(out_size, self.stride, self.dilation, self.kernel_size, strict=True)
        return tuple((out - 1) * step + gap * (size - 1) + 1 for out, step, gap, size in axes)

    def places(self) -> list[tuple[int, int]]:
        """For each kernel offset along the first axis: positions that fall together after a stride, and the shift."""
        stride, gap = self.stride[0], self.dilation[0]
        offsets = [offset * gap for offset in range(self.kernel_size[0])]
        return [(offset % stride // math.gcd(stride, gap), offset // stride) for offset in offsets]


@lru_cache(1024)
def _output_size(geometry: PatchGeometry, in_size: tuple[int, ...]) -> tuple[int, ...]:
    axes = zip(in_size, geometry.padding, geometry.extent((1,) * len(in_size)), geometry.stride, strict=True)
    return tuple(max(0, (size + sum(pad) - one) // step + 1) for size, pad, one, step in axes)
