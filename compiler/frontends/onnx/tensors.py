"""TensorProto to NumPy array, every dtype and both ways of storage, and the only place that opens files a model names.

A model is untrusted input: sizes are checked before allocation; external data are files in the model's folder.
"""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from dnnc.ir import dtype as dt
from dnnc.ir.dtype import DType
from dnnc.ir.errors import ModelError, UnsupportedError

Array = np.ndarray[Any, Any]
MAP_FROM = 1 << 16  # bytes from which external data is mapped, not read

_T = onnx.TensorProto
# ONNX's number of a dtype -> ours, and the field that holds it where raw_data does not
_DTYPES: dict[int, tuple[DType, str]] = {
    _T.FLOAT: (dt.f32, "float_data"),
    _T.DOUBLE: (dt.f64, "double_data"),
    _T.FLOAT16: (dt.f16, "int32_data"),
    _T.BFLOAT16: (dt.bf16, "int32_data"),
    _T.INT8: (dt.i8, "int32_data"),
    _T.INT16: (dt.i16, "int32_data"),
    _T.INT32: (dt.i32, "int32_data"),
    _T.INT64: (dt.i64, "int64_data"),
    _T.UINT8: (dt.u8, "int32_data"),
    _T.UINT16: (dt.u16, "int32_data"),
    _T.UINT32: (dt.u32, "uint64_data"),
    _T.UINT64: (dt.u64, "uint64_data"),
    _T.BOOL: (dt.boolean, "int32_data"),
    _T.STRING: (dt.string, "string_data"),
    _T.COMPLEX64: (dt.c64, "float_data"),
    _T.COMPLEX128: (dt.c128, "double_data"),
    17: (dt.dtype("f8e4m3fn"), "int32_data"),
    18: (dt.dtype("f8e4m3fnuz"), "int32_data"),
    19: (dt.dtype("f8e5m2"), "int32_data"),
    20: (dt.dtype("f8e5m2fnuz"), "int32_data"),
    21: (dt.dtype("u4"), "int32_data"),
    22: (dt.dtype("i4"), "int32_data"),
    23: (dt.dtype("f4e2m1"), "int32_data"),
    24: (dt.dtype("f8e8m0"), "int32_data"),
    25: (dt.dtype("u2"), "int32_data"),
    26: (dt.dtype("i2"), "int32_data"),
}
ONNX_NUMBERS = {d.name: number for number, (d, _) in _DTYPES.items()}


def dtype_of(number: int, what: str) -> DType:
    """The dtype that ONNX numbers so. UnsupportedError says `what` has it."""
    if number not in _DTYPES:
        raise UnsupportedError(f"{what}: ONNX's data type {number} is unknown; known are 1 to {max(_DTYPES)}")
    return _DTYPES[number][0]


def decode(t: onnx.TensorProto, folder: Path | None = None) -> Array:
    """The array that a TensorProto holds.

    Args:
        t: the tensor; its data is raw, in a typed field, or in a file below `folder`.
        folder: the model's folder; None when the model came as bytes.

    Raises:
        ModelError: negative dims, less or more data than the shape says, or a file that is missing, too short, or
            outside the folder.
        UnsupportedError: an unknown dtype.
    """
    what = f"tensor {t.name!r}" if t.name else "a tensor without a name"
    dtype, field = _entry(t.data_type, what)
    shape = tuple(t.dims)
    if any(d < 0 for d in shape):
        raise ModelError(f"{what}: its shape {list(shape)} has a negative dim")
    if t.data_location == onnx.TensorProto.EXTERNAL:
        return _shaped(_external(t, what, dtype, shape, folder), dtype, shape)
    if t.HasField("raw_data"):
        if dtype.kind == "s":
            raise ModelError(f"{what}: strings cannot be stored as raw data")
        _check_size(what, len(t.raw_data), _stored_bytes(dtype, shape), "bytes of raw data")
        return _shaped(np.frombuffer(t.raw_data, np.uint8), dtype, shape)
    return _typed(t, what, dtype, field, shape)


def _entry(number: int, what: str) -> tuple[DType, str]:
    dtype_of(number, what)
    return _DTYPES[number]


def _stored_bytes(dtype: DType, shape: tuple[int, ...]) -> int:
    """Bytes in the file: types of less than a byte are packed."""
    bits = 8 if dtype.kind == "b" else dtype.bits
    return (math.prod(shape) * bits + 7) // 8


def _check_size(what: str, got: int, want: int, unit: str) -> None:
    if got != want:
        raise ModelError(
            f"{what}: its shape and dtype need {want} {unit}, the model has {got}; the file is damaged or badly written"
        )


def _shaped(data: Array, dtype: DType, shape: tuple[int, ...]) -> Array:
    """Bytes as an array; unpacks types of less than a byte (lowest bits first)."""
    if dtype.bits < 8:
        data = _unpacked(data, dtype)[: math.prod(shape)]
        return data.reshape(shape)
    if dtype.kind == "b":
        return np.not_equal(data, 0).reshape(shape)
    return data.view(dtype.numpy).reshape(shape)


def _unpacked(data: Array, dtype: DType) -> Array:
    per_byte = 8 // dtype.bits
    mask = (1 << dtype.bits) - 1
    parts = np.stack([(data >> (k * dtype.bits)) & mask for k in range(per_byte)], -1).reshape(-1)
    if dtype.is_float:
        return parts.view(dtype.numpy)
    if dtype.kind == "i":
        sign = 1 << (dtype.bits - 1)
        parts = (parts ^ sign).astype(np.int8) - np.int8(sign)
    return parts.astype(dtype.numpy)


def _typed(t: onnx.TensorProto, what: str, dtype: DType, field: str, shape: tuple[int, ...]) -> Array:
    data = getattr(t, field)
    count = math.prod(shape)
    if dtype.kind == "s":
        _check_size(what, len(data), count, "strings")
        out = np.empty(count, object)
        out[:] = [s.decode("utf-8", "surrogateescape") for s in data]
        return out.reshape(shape)
    if dtype.kind == "c":
        _check_size(what, len(data), 2 * count, f"numbers in {field}")
        return np.array(data, np.float32 if dtype.bits == 64 else np.float64).view(dtype.numpy).reshape(shape)
    if dtype.bits < 8:
        _check_size(what, len(data), _stored_bytes(dtype, shape), f"packed bytes in {field}")
        return _shaped(np.array(data, np.int32).astype(np.uint8), dtype, shape)
    _check_size(what, len(data), count, f"numbers in {field}")
    if field == "int32_data" and dtype.is_float:  # the bits of a narrow float
        return (
            np.array(data, np.int32)
            .astype(np.uint16 if dtype.bits == 16 else np.uint8)
            .view(dtype.numpy)
            .reshape(shape)
        )
    return np.array(data).astype(dtype.numpy).reshape(shape)


# --- external data ----------------------------------------------------------------------------------------------------


def external_bytes(t: onnx.TensorProto, folder: Path | None) -> Array:
    """The bytes of a tensor whose data lies in a file. Errors are those of `decode`."""
    what = f"tensor {t.name!r}" if t.name else "a tensor without a name"
    return _external(t, what, _entry(t.data_type, what)[0], tuple(t.dims), folder)


def _external(t: onnx.TensorProto, what: str, dtype: DType, shape: tuple[int, ...], folder: Path | None) -> Array:
    if dtype.kind == "s":
        raise ModelError(f"{what}: strings cannot be stored in an external file")
    entries = {e.key: e.value for e in t.external_data}
    location = entries.get("location", "")
    want = _stored_bytes(dtype, shape)
    offset = _number(entries.get("offset", "0"), "offset", what)
    length = _number(entries["length"], "length", what) if "length" in entries else want
    _check_size(f"{what} in {location!r}", length, want, "bytes")
    path = _safe_path(location, folder, what)
    size = path.stat().st_size
    if offset + want > size:
        raise ModelError(
            f"{what}: its data is bytes {offset} to {offset + want} of {location!r}, which has {size}; the file is "
            "truncated or not the right one"
        )
    if want >= MAP_FROM:
        return np.memmap(path, np.uint8, "r", offset, (want,))
    with path.open("rb") as f:
        f.seek(offset)
        return np.frombuffer(f.read(want), np.uint8)


def _number(text: str, key: str, what: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ModelError(f"{what}: the {key} of its external data must be a number of at least 0, got {text!r}")
    return int(text)


def _safe_path(location: str, folder: Path | None, what: str) -> Path:
    """The file of external data, which must be a regular file that really lies below the model's folder."""
    if folder is None:
        raise ModelError(
            f"{what}: its data is in the file {location!r}, but the model was given as bytes; give the model's path "
            "instead"
        )
    parts = location.replace("\\", "/").split("/")
    if (
        not location
        or "\0" in location
        or os.path.isabs(location)
        or ":" in parts[0]
        or ".." in parts
        or parts[0] == ""
    ):
        raise ModelError(
            f"{what}: the external file {location!r} must be named by a path relative to the model's folder, without "
            "'..'"
        )
    path = folder / location
    try:
        real, root = path.resolve(strict=True), folder.resolve(strict=True)
    except (OSError, RuntimeError) as e:
        raise ModelError(
            f"{what}: its data is in {location!r}, which is not there: {path}; put the file beside the model"
        ) from e
    if not real.is_relative_to(root):
        raise ModelError(
            f"{what}: the external file {location!r} is a link that leads out of the model's folder, to {real}"
        )
    if not stat.S_ISREG(real.stat().st_mode):
        raise ModelError(f"{what}: the external file {location!r} is not a regular file")
    return real
