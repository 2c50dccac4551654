"""Decoding of image files, which runs on the host: `decode_image`, with Pillow (the extra `image`)."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from dnnc.ir.dtype import u8
from dnnc.ir.errors import UnsupportedError, install
from dnnc.ir.expr import dim as symbol
from dnnc.ir.op import OpDef, Trait, require
from dnnc.ir.ops.common import Array, sample
from dnnc.ir.types import Dim, TensorType

SIZED = frozenset((Trait.PURE, Trait.SIZED))
FORMATS = {"rgb": 3, "bgr": 3, "gray": 1}  # channels


def _type(x: TensorType, *, height: Dim, width: Dim, pixels: str = "rgb") -> TensorType:
    require(x.dtype is u8 and x.rank == 1, "the file must be a vector of u8; got {}", x)
    require(pixels in FORMATS, "pixels must be one of {}; got {!r}", ", ".join(FORMATS), pixels)
    return TensorType(u8, (height, width, FORMATS[pixels]))


def _decode(x: Array, *, height: Any = None, width: Any = None, pixels: str = "rgb") -> Array:
    """What cannot be decoded is an image without pixels, as the standard has it."""
    try:
        import PIL.Image
    except ImportError:
        raise UnsupportedError(f"decoding images needs Pillow, which is not installed: {install('image')}") from None
    try:
        with PIL.Image.open(io.BytesIO(x.tobytes())) as image:
            a = np.asarray(image.convert("L" if pixels == "gray" else "RGB"), np.uint8)
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError):
        return np.empty((0, 0, FORMATS[pixels]), np.uint8)
    if pixels == "gray":
        return a[:, :, None]
    return np.ascontiguousarray(a[:, :, ::-1]) if pixels == "bgr" else a


IMAGE_OPS: tuple[OpDef, ...] = (
    OpDef(
        "decode_image",
        _type,
        host=_decode,
        traits=SIZED,
        samples=(
            sample("u8[16]", height=symbol("h", 0), width=symbol("w", 0), domain=(0, 255)),
            sample("u8[0]", height=symbol("h", 0), width=symbol("w", 0), pixels="gray"),
        ),
    ),
)
