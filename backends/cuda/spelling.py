"""How CUDA C++ spells types, constants and names.

The prelude gives every type the name it has in the IR, so a kernel's text reads like the IR's. A bool is `bool` in
registers and a byte in memory. Half floats and smaller ones are structs of their bits: registers hold f32.
"""

from __future__ import annotations

import re

import numpy as np

from dnnc.ir.dtype import DType
from dnnc.ir.errors import InternalError

_KEYWORDS = """
alignas alignof and asm auto bool break case catch char class const constexpr continue decltype default delete do
double else enum explicit export extern false float for friend goto if inline int long mutable namespace new noexcept
not nullptr operator or private protected public register restrict return short signed sizeof static struct switch
template this throw true try typedef typename union unsigned using virtual void volatile while xor half status main
"""
_LIBRARY = """
abs acos acosh asin asinh atan atanh ceil cos cosh erf exp expm1 fabs floor fma fmax fmin fmod ldexp log log1p max
memcpy memset min pow rint sin sinh sqrt tan tanh trunc j0 j1 jn y0 y1 yn gamma printf assert clock
"""
RESERVED = frozenset(f"{_KEYWORDS} {_LIBRARY} FN UNROLL i8 i16 i32 i64 u8 u16 u32 u64 f32 f64".split())
MATH = frozenset(
    (
        "exp log sqrt erf tanh sin cos tan asin acos atan sinh cosh asinh acosh atanh floor ceil trunc rint log1p "
        "expm1 pow"
    ).split()
)
FAST = frozenset(("recip", "exp2"))  # single instructions, of 1 or 2 ulp
_TYPES = frozenset((
    "f64", "f32", "f16", "bf16", "bool", "i64", "u64", "i32", "u32", "i16", "u16", "i8", "u8", "i4", "u4", "i2", "u2",
    "f8e4m3fn", "f8e4m3fnuz", "f8e5m2", "f8e5m2fnuz", "f8e8m0", "f4e2m1",
))  # fmt: skip


def supported(numerics: str) -> frozenset[str]:
    """float32 intrinsics that kernels may use, by the rules for rounding: "strict", "standard" or "fast"."""
    return MATH if numerics == "strict" else MATH | FAST


def scalar(t: DType) -> str:
    """The type of one value in a register."""
    if t.name not in _TYPES:
        raise InternalError(f"values of type {t} have no CUDA form; a pass should have converted them")
    return t.name


def ctype(t: DType, lanes: int = 1) -> str:
    return f"V<{scalar(t)}, {lanes}>" if lanes > 1 else scalar(t)


def stored(t: DType) -> str:
    """The type in memory: bool is a byte."""
    return "u8" if t.kind == "b" else scalar(t)


def literal(v: float | int | bool, t: DType) -> str:
    """A constant of one lane, exact."""
    if t.kind == "b":
        return "true" if v else "false"
    if t.is_float:
        return _float(float(v), t)
    n = int(v)
    if t.name == "i64":
        return f"{n}LL" if n > -(1 << 63) else "(-9223372036854775807LL - 1)"
    if t.name in ("u64", "u32"):
        return f"{n}u" + ("ll" if t.bits == 64 else "")
    if t.name == "i32":
        return str(n) if n > -(1 << 31) else "(-2147483647 - 1)"
    return f"{scalar(t)}({n})"


def _float(v: float, t: DType) -> str:
    if t.bits <= 16:
        with np.errstate(all="ignore"):
            code = int(np.array(v).astype(t.numpy).view(np.uint16 if t.bits == 16 else np.uint8))
        return f"{scalar(t)}{{{code:#x}}}"
    if v != v or abs(v) == float("inf"):
        if t.bits == 64:
            return (
                f"__longlong_as_double({np.float64(v).view(np.int64):#x}LL)"
                if v > 0 or v != v
                else "-__longlong_as_double(0x7ff0000000000000LL)"
            )
        return (
            "__int_as_float(0x7fc00000)"
            if v != v
            else "__int_as_float(0x7f800000)"
            if v > 0
            else "-__int_as_float(0x7f800000)"
        )
    s = repr(v) if t.bits == 64 else str(np.float32(v))
    if "e" not in s and "." not in s:
        s += ".0"
    return s if t.bits == 64 else s + "f"


def identifier(name: str) -> str:
    """A name of the IR as one of C++; those that C++ or the prelude has taken get an underscore."""
    clean = re.sub(r"\W", "_", name)
    if not clean or clean[0].isdigit():
        clean = "_" + clean
    return clean + "_" if clean in RESERVED else clean
