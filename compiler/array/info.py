"""What the namespace can do, as the array API standard asks for it; limits of types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from dnnc.array.core import Array
from dnnc.array.devices import HOST, device_name, devices
from dnnc.array.promotion import DEFAULTS, NAMES, DType, dtype_of, kind_of, real_of
from dnnc.ir.errors import InputError

_KINDS = {
    "bool": "b", "signed integer": "i", "unsigned integer": "u", "integral": "iu", "real floating": "f",
    "complex floating": "c",
    "numeric": "iufc",
}  # fmt: skip
STANDARD = tuple(n for n in NAMES if n not in ("float16", "bfloat16"))


@dataclass(frozen=True)
class FInfo:
    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


@dataclass(frozen=True)
class IInfo:
    bits: int
    max: int
    min: int
    dtype: DType


def _type(t: Any) -> DType:
    return t.dtype if isinstance(t, Array) else dtype_of(t)


def finfo(type: Any, /) -> FInfo:
    """Limits of a floating-point type, or of the parts of a complex one."""
    d = real_of(_type(type))
    if kind_of(d) != "f":
        raise InputError(f"finfo: expected a floating-point type, got {d}")
    i = ml_dtypes.finfo(d)  # type: ignore[no-untyped-call]
    return FInfo(int(i.bits), float(i.eps), float(i.max), float(i.min), float(i.smallest_normal), d)


def iinfo(type: Any, /) -> IInfo:
    """Limits of an integer type."""
    d = _type(type)
    if d.kind not in "iu":
        raise InputError(f"iinfo: expected an integer type, got {d}")
    i = np.iinfo(d)
    return IInfo(int(i.bits), int(i.max), int(i.min), d)


def isdtype(dtype: Any, kind: Any) -> bool:
    """Is a type of a kind, named as the standard does, of one of several, or another type itself?"""
    d = dtype_of(dtype)
    if isinstance(kind, tuple):
        return any(isdtype(d, k) for k in kind)
    if isinstance(kind, str) and kind in _KINDS:
        return kind_of(d) in _KINDS[kind]
    if isinstance(kind, str):
        raise InputError(f"isdtype: kind={kind!r}: expected one of {', '.join(_KINDS)}, or a type")
    return d == dtype_of(kind)


class Info:
    """What `__array_namespace_info__` gives."""

    def capabilities(self) -> dict[str, Any]:
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> str:
        return HOST

    def devices(self) -> tuple[str, ...]:
        return devices()

    def default_dtypes(self, *, device: Any = None) -> dict[str, DType]:
        device_name(device)
        names = {"real floating": "f", "complex floating": "c", "integral": "i", "indexing": "i"}
        return {name: DEFAULTS[k] for name, k in names.items()}

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, DType]:
        device_name(device)
        return {n: np.dtype(n) for n in STANDARD if kind is None or isdtype(n, kind)}


def __array_namespace_info__() -> Info:
    return Info()
