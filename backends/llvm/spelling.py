"""LLVM's spelling of the operator IR: a table per kind of value, guarded where LLVM is undefined.

| operation | undefined in LLVM | form used here |
|---|---|---|
| truncdiv, truncmod, floormod | division by 0, INT_MIN / -1 | divisor 1 (or the result selected) where it would trap |
| shl, shr | shift by the width or more | amount masked, result selected |
| float -> integer | out of range, NaN | llvm.fptosi.sat / llvm.fptoui.sat; vectors: clipped, NaN selected |
| min, max of floats | which operand a NaN gives | NaN propagates: `b is NaN ? b : b > a ? b : a` |
"""

from __future__ import annotations

import struct

import numpy as np

from dnnc.ir.dtype import DType
from dnnc.ir.errors import InternalError

SCALAR = {
    "f64": "double", "f32": "float", "f16": "half", "bf16": "i16", "bool": "i1", "i64": "i64", "u64": "i64",
    "i32": "i32", "u32": "i32",
    "i16": "i16", "u16": "i16", "i8": "i8", "u8": "i8", "i4": "i8", "u4": "i8", "i2": "i8", "u2": "i8",
    "f8e4m3fn": "i8", "f8e4m3fnuz": "i8", "f8e5m2": "i8", "f8e5m2fnuz": "i8", "f8e8m0": "i8", "f4e2m1": "i8",
}  # fmt: skip

INT = {"+": "add", "-": "sub", "*": "mul", "^": "xor", "&": "and", "|": "or"}
FLOAT = {"+": "fadd", "-": "fsub", "*": "fmul", "/": "fdiv"}
FLOAT_COMPARE = {"<": "olt", "<=": "ole", "==": "oeq", "!=": "une"}
INTRINSIC = {
    "fma": "llvm.fma", "sqrt": "llvm.sqrt", "floor": "llvm.floor", "ceil": "llvm.ceil", "trunc": "llvm.trunc",
    "rint": "llvm.roundeven",
    "abs": "llvm.fabs", "exp": "llvm.exp", "log": "llvm.log", "sin": "llvm.sin", "cos": "llvm.cos", "pow": "llvm.pow",
}  # fmt: skip
# functions of the C library that values.py calls lane by lane, where no expansion exists
LIBM = ("erf", "tanh", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "log1p", "expm1")
# what an object may need from libm; LLVM spells its own exp, log, sin, cos and pow so too, and joins sin and cos
LIBRARY = frozenset(
    n + suffix for n in (*LIBM, "exp", "log", "sin", "cos", "sincos", "pow", "fmod") for suffix in ("", "f")
)


def supported(numerics: str, features: frozenset[str] = frozenset()) -> frozenset[str]:
    """Intrinsics with cheaper forms, by rounding rules ("strict", "standard", "fast") and CPU features."""
    if numerics == "strict":
        return frozenset()
    own = {"recip", "estimate"}
    if "avx512vl" in features:
        # sse4a tells AMD's CPUs; Intel's scale by a power of two in one instruction like any other
        own |= {"piece"} if "sse4a" in features else {"piece", "scale"}
    return frozenset(own)


def scalar(t: DType) -> str:
    """The LLVM type of one value in a register."""
    if t.name not in SCALAR:
        raise InternalError(f"values of type {t} have no LLVM form; a pass should have converted them")
    return SCALAR[t.name]


def vector(t: DType, lanes: int) -> str:
    return f"<{lanes} x {scalar(t)}>" if lanes > 1 else scalar(t)


def stored(t: DType, lanes: int) -> str:
    """The LLVM type in memory: bool is a byte."""
    s = "i8" if t.kind == "b" else scalar(t)
    return f"<{lanes} x {s}>" if lanes > 1 else s


def mangle(t: DType, lanes: int) -> str:
    s = {"float": "f32", "double": "f64", "half": "f16"}.get(scalar(t), scalar(t))
    return f"v{lanes}{s}" if lanes > 1 else s


def literal(v: float | int | bool, t: DType, lanes: int = 1) -> str:
    """A constant; vectors are splats."""
    if t.kind == "b":
        s = "true" if v else "false"
    elif t.name == "f16":
        s = f"0xH{_code(v, t):04X}"
    elif t.is_float and t.bits <= 16:
        s = str(_code(v, t))
    elif t.is_float:
        s = f"0x{struct.unpack('<Q', struct.pack('<d', v))[0]:016X}"
    else:
        n = int(v)
        s = str(
            n - (1 << t.bits) if n >= 1 << (t.bits - 1) else n
        )  # LLVM reads signless integers; print the signed form
    if lanes == 1:
        return s
    if s in ("0", "false") or (t.is_float and int(s.replace("H", ""), 0) == 0):
        return "zeroinitializer"
    return f"splat ({scalar(t)} {s})"


def _code(v: float, t: DType) -> int:
    """The bits of a number in a format of 16 bits or fewer."""
    with np.errstate(all="ignore"):
        return int(np.array(v).astype(t.numpy).view(np.uint16 if t.bits == 16 else np.uint8))


def memory_mangle(t: DType, lanes: int) -> str:
    """The suffix of an intrinsic that moves elements of memory: booleans are bytes there."""
    return f"v{lanes}i8" if t.kind == "b" else mangle(t, lanes)
