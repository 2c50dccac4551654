"""ImageDecoder: the bytes of an image file to pixels, by Pillow, on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dnnc.frontends.onnx.call import Call
from dnnc.frontends.onnx.unbacked_dims import fresh_dim
from dnnc.ir.errors import ModelError
from dnnc.ir.ops.image import FORMATS

NAMES = {"RGB": "rgb", "BGR": "bgr", "Grayscale": "gray"}


def decode_image(c: Call) -> Any:
    pixels = c.text("pixel_format", "RGB")
    if pixels not in NAMES or NAMES[pixels] not in FORMATS:
        raise ModelError(f"attribute pixel_format must be one of {', '.join(NAMES)}; got {pixels!r}")
    return c.b.decode_image(
        c.x(), height=fresh_dim(c, stem="height"), width=fresh_dim(c, stem="width"), pixels=NAMES[pixels]
    )


IMAGE_DECODE: dict[str, Callable[[Call], Any]] = {"ImageDecoder": decode_image}
