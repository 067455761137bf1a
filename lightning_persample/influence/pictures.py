"""What a user's `render` returns for a sample, as a small picture or a text."""

from __future__ import annotations

import base64
import importlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

_SIDE, _LONGEST_TEXT = 96, 400
_CHANNELS = (1, 3, 4)

Render = Callable[[Any], Any]


def rendered(render: Render, index: Any) -> Any:
    """A ``PIL.Image.Image`` of at most 96 x 96 pixels, or a text; that of the error where `render` raises."""
    try:
        return _small(render(index))
    except Exception as error:  # of the user's function, which is shown in place of the sample
        return shortened(f"render failed: {type(error).__name__}: {error}")


def shortened(text: str) -> str:
    """A text, cut where it is long."""
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"


def _small(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, torch.Tensor):
        value, channels_first = value.detach().cpu(), True
        value = (value.float() if value.is_floating_point() else value).numpy()
    else:
        channels_first = False
    if isinstance(value, _image_type()) and value.mode[0] in "IF":  # of 16 or 32 bits, which PIL cuts off at 255
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        value = _image_of(value, channels_first=channels_first)
    if not isinstance(value, _image_type()):
        return shortened(str(value))
    value = value.convert("RGB")
    value.thumbnail((_SIDE, _SIDE))
    return value


def _image_of(array: Any, *, channels_first: bool) -> Any:
    """An image of pixels (H, W), (C, H, W) or (H, W, C) with 1, 3 or 4 channels; anything else as it is."""
    if array.ndim not in (2, 3) or not array.size or array.dtype.kind not in "buif":
        return array
    if array.ndim == 3:
        is_first, is_last = array.shape[0] in _CHANNELS, array.shape[-1] in _CHANNELS
        if not (is_first or is_last):
            return array
        if is_first and (channels_first or not is_last):
            array = np.moveaxis(array, 0, -1)
        array = array[..., 0] if array.shape[-1] == 1 else array
    if array.dtype != np.uint8:
        array, is_finite = array.astype(np.float64), np.isfinite(array)
        finite = array[is_finite]
        low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
        low, high = (0.0, 1.0) if low >= 0 and high <= 1 else (low, max(high, low + 1e-12))
        pixels = np.where(array > 0, 255.0, 0.0)  # of what is infinite; nan is black
        pixels[is_finite] = (finite - low) / (high - low) * 255
        array = pixels.round().astype(np.uint8)
    return importlib.import_module("PIL.Image").fromarray(array)


def _image_type() -> Any:
    return importlib.import_module("PIL.Image").Image


def data_address(image: Any) -> str:
    """A picture as the text that stands for a file in a page."""
    content = io.BytesIO()
    kind = "PNG" if max(image.size) <= 32 else "WEBP"  # lossless where the pixels can be seen
    image.save(content, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(content.getvalue()).decode()}"


def montage(images: Sequence[Any], captions: Sequence[str]) -> Any:
    """Pictures beside and below each other, each over its caption; None has an empty place."""
    cell, columns = _SIDE + 24, min(len(images), 8)
    pil = {name: importlib.import_module(f"PIL.{name}") for name in ("Image", "ImageDraw")}
    canvas = pil["Image"].new("RGB", (cell * columns, cell * -(-len(images) // columns)), "white")
    pen = pil["ImageDraw"].Draw(canvas)
    for place, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = cell * (place % columns) + 12, cell * (place // columns) + 4
        pen.text((left, top + _SIDE + 4), caption, fill="black")
        if image is not None:
            factor = _SIDE / max(image.size)
            size = tuple(max(1, round(side * factor)) for side in image.size)
            canvas.paste(image.resize(size, pil["Image"].Resampling.NEAREST), (left, top))
    return canvas
