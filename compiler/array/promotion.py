"""Types of results: promotion by the array API standard, wider where NumPy has an answer and the standard none."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Union

import ml_dtypes
import numpy as np

from dnnc.array.sizes import Size
from dnnc.ir.errors import InputError

DType = np.dtype[Any]
Scalar = Union[bool, int, float, complex]

DEFAULTS: dict[str, DType] = {
    "b": np.dtype(np.bool_),
    "i": np.dtype(np.int64),
    "u": np.dtype(np.uint64),
    "f": np.dtype(np.float64),
    "c": np.dtype(np.complex128),
}
_ORDER = "biufc"  # of kinds, but for i and u, which are on one level
_KINDS = {bool: "b", int: "i", float: "f", complex: "c", Size: "i"}
NAMES = tuple(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 "
    "complex128".split()
)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
KNOWN = {d: d for d in map(np.dtype, NAMES)}  # one object each: arrays of one type are told by it


def dtype_of(d: Any) -> DType:
    """Return one of NAMES for a NumPy dtype, scalar type, name or Python type. InputError for others."""
    try:
        found = np.dtype(d)
    except TypeError:
        found = None
    native = None if found is None or d is None else KNOWN.get(found) or KNOWN.get(found.newbyteorder("="))
    if native is None:
        raise InputError(
            f"dnnc.array has no dtype {d if found is None else found.name!r}; there are {', '.join(NAMES)}"
        )
    return native


def kind_of(d: DType | Scalar) -> str:
    """b, i, u, f or c."""
    kind = getattr(d, "kind", None)
    if kind is not None:
        return "f" if kind == "V" else kind  # NumPy does not know that bfloat16 is a float
    return _KINDS.get(type(d)) or next(k for t, k in _KINDS.items() if isinstance(d, t))


def promoted(*given: DType | Scalar) -> DType:
    """The type of a result. Python numbers do not widen a type of their kind: `float32 * 0.1` is float32."""
    return _promoted(*(d if isinstance(d, np.dtype) else kind_of(d) for d in given))


@lru_cache(1024)
def _promoted(*given: DType | str) -> DType:
    """The same of types, and of kinds in place of numbers."""
    types = [d for d in given if isinstance(d, np.dtype)]
    scalars = [d for d in given if not isinstance(d, np.dtype)]
    if not types:
        return DEFAULTS[max(scalars, key=_ORDER.index)]
    result = types[0]
    for d in types[1:]:
        result = _wider(result, d)
    for k in scalars:
        result = _with_scalar(result, k)
    return result


def _wider(a: DType, b: DType) -> DType:
    """The type that holds two. Beside bfloat16: integers become it, float16 and it float32."""
    if BFLOAT16 not in (a, b) or a == b:
        return np.promote_types(a, b)
    other = b if a == BFLOAT16 else a
    return BFLOAT16 if other.kind in "biu" else np.dtype(np.float32) if other == np.float16 else other


def _with_scalar(d: DType, kind: str) -> DType:
    if kind == "c" and kind_of(d) == "f":
        return np.dtype(np.complex64) if d.itemsize <= 4 else np.dtype(np.complex128)
    level = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}
    return DEFAULTS[kind] if level[kind] > level[kind_of(d)] else d


def real_of(d: DType) -> DType:
    """The type of the parts of a complex type; a real one is its own."""
    return np.dtype(np.float32) if d == np.complex64 else np.dtype(np.float64) if d == np.complex128 else d


def complex_of(d: DType) -> DType:
    """The complex type whose parts are of this floating-point type."""
    return (
        d
        if d.kind == "c"
        else np.dtype(np.complex128)
        if d.itemsize == 8 or d.kind in "iub"
        else np.dtype(np.complex64)
    )


def float_of(d: DType) -> DType:
    """The type in which functions of real numbers are computed: integers become the default floating-point type."""
    return d if kind_of(d) in "fc" else DEFAULTS["f"]


def summed(d: DType) -> DType:
    """The type of a sum: small integers become 64 bits wide."""
    return DEFAULTS[d.kind] if d.kind in "iu" else DEFAULTS["i"] if d.kind == "b" else d
