"""Scalar types. One table says how each is stored, computed with, and shown to NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)  # each type is one object, copies included, so that hashing one is free
class DType:
    """A scalar type.

    `storage` is what lies in a buffer, `compute` what registers hold: bool is one byte in memory, the half types are
    computed in float32, 4- and 2-bit integers are unpacked to a byte.
    """

    name: str
    kind: str  # f float, i signed, u unsigned, b bool, c complex, s string
    bits: int
    storage: str = ""
    compute: str = ""

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> Any:
        return dtype, (self.name,)

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def is_int(self) -> bool:
        return self.kind in "iu"

    @property
    def bytes(self) -> int:
        """Bytes of one element in a buffer."""
        return max(self.bits // 8, 1)

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype at the boundary (ml_dtypes for the types NumPy lacks)."""
        if self.kind == "s":
            return np.dtype(object)
        if self.name in _NUMPY:
            return np.dtype(_NUMPY[self.name])
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _ML_DTYPES[self.name]))
        return found

    @cached_property
    def computed(self) -> DType:
        """The type that registers hold."""
        return BY_NAME[self.compute or self.name]

    @property
    def range(self) -> tuple[int, int]:
        """Smallest and largest value of an integer type."""
        if self.kind == "b":
            return 0, 1
        return (-(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1) if self.kind == "i" else (0, (1 << self.bits) - 1)


_NUMPY = {
    "f64": np.float64, "f32": np.float32, "f16": np.float16, "bool": np.bool_, "c64": np.complex64,
    "c128": np.complex128,
    "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
}  # fmt: skip
_ML_DTYPES = {
    "bf16": "bfloat16", "f8e4m3fn": "float8_e4m3fn", "f8e4m3fnuz": "float8_e4m3fnuz", "f8e5m2": "float8_e5m2",
    "f8e5m2fnuz": "float8_e5m2fnuz", "f8e8m0": "float8_e8m0fnu", "f4e2m1": "float4_e2m1fn", "i4": "int4", "u4": "uint4",
    "i2": "int2", "u2": "uint2",
}  # fmt: skip

f64, f32 = DType("f64", "f", 64), DType("f32", "f", 32)
f16, bf16 = DType("f16", "f", 16, compute="f32"), DType("bf16", "f", 16, compute="f32")
i8, i16, i32, i64 = (DType(f"i{n}", "i", n) for n in (8, 16, 32, 64))
u8, u16, u32, u64 = (DType(f"u{n}", "u", n) for n in (8, 16, 32, 64))
boolean = DType("bool", "b", 8, storage="u8")
string = DType("str", "s", 64)
c64, c128 = DType("c64", "c", 64), DType("c128", "c", 128)
_small = [DType(n, "f", 8, compute="f32") for n in ("f8e4m3fn", "f8e4m3fnuz", "f8e5m2", "f8e5m2fnuz", "f8e8m0")]
_small += [DType("f4e2m1", "f", 4, compute="f32"), DType("i4", "i", 4, "i8", "i8"), DType("u4", "u", 4, "u8", "u8")]
_small += [DType("i2", "i", 2, "i8", "i8"), DType("u2", "u", 2, "u8", "u8")]

ALL = [f64, f32, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64, boolean, string, c64, c128, *_small]
BY_NAME = {d.name: d for d in ALL}
FLOAT8 = BY_NAME["f8e4m3fn"], BY_NAME["f8e5m2"]  # the types that tensor cores multiply
_BY_NUMPY: dict[Any, DType] = {}


def dtype(name: str) -> DType:
    """The type called `name` (`f32`, `i64`, `bool`, ...). KeyError if there is none."""
    return BY_NAME[name]


def from_numpy(d: Any) -> DType:
    """The type of a NumPy array's dtype. TypeError if dnnc has none."""
    d = np.dtype(d)
    if d.kind in "OUST":
        return string
    if not _BY_NUMPY:
        _BY_NUMPY.update({t.numpy: t for t in ALL if t.kind != "s"})
    if d not in _BY_NUMPY:
        raise TypeError(f"dnnc has no type for NumPy's {d}")
    return _BY_NUMPY[d]
