"""Element-wise functions of real numbers. Those of complex numbers stand in `complex_math.py`, chosen by dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from dnnc.array import complex_math as cm
from dnnc.array.core import Array, apply_full, array_of, as_operand, cast, fresh, moved, number, placed, scalar
from dnnc.array.devices import device_name
from dnnc.array.lazy import Lazy, apply, apply_binary, apply_unary
from dnnc.array.operators import NUMBERS
from dnnc.array.promotion import DEFAULTS, DType, complex_of, dtype_of, float_of, kind_of, promoted, real_of
from dnnc.array.sizes import Size
from dnnc.ir.dtype import DType as IrType
from dnnc.ir.dtype import from_numpy, i16, i32, i64
from dnnc.ir.errors import InputError, a_type

Operand = Any  # an Array or a Python number
OPERANDS = (Array, *NUMBERS, Size)
_BITS: dict[int, IrType] = {2: i16, 4: i32, 8: i64}


# --- operands ---------------------------------------------------------------------------------------------------------


def operands(name: str, *given: Operand, kinds: str = "biufc") -> list[Array]:
    """Operands as arrays of one type. InputError where a function does not take that kind of number."""
    quick = _as_they_are(given, kinds)
    if quick is not None:
        return quick
    xs = [as_operand(x) for x in given]
    for x in xs:
        if not isinstance(x, OPERANDS):
            raise InputError(f"{name}: expected arrays or numbers, got {a_type(x)}; make an array of it with asarray")
    dtype = promoted(*(x.dtype if isinstance(x, Array) else x for x in xs))
    if kind_of(dtype) not in kinds:
        raise InputError(f"{name}: expected {_kind_words(kinds)}, got {dtype}")
    return [cast(x, dtype) if isinstance(x, Array) else scalar(x, dtype) for x in xs]


def _as_they_are(given: tuple[Operand, ...], kinds: str) -> list[Array] | None:
    """Return operands that need no promotion: arrays of one type, or one and a number of its type; else None."""
    first, *rest = given
    if not isinstance(first, Array):
        return None
    dtype = first._dtype
    kind = kind_of(dtype)
    if kind not in kinds:
        return None
    out = [first]
    for x in rest:
        if isinstance(x, Array):
            if x._dtype is not dtype:
                return None
            out.append(x)
        elif (type(x) is float and kind in "fc") or (type(x) is int and kind in "iufc"):
            out.append(scalar(x, dtype))
        else:
            return None
    return out


def _kind_words(kinds: str) -> str:
    words = {
        "b": "truth values",
        "i": "integers",
        "u": "unsigned integers",
        "f": "floating-point numbers",
        "c": "complex numbers",
    }
    return " or ".join(words[k] for k in kinds)


def floats(name: str, *given: Operand, kinds: str = "biufc") -> list[Array]:
    """The same, of floating-point or complex numbers."""
    xs = operands(name, *given, kinds=kinds)
    dtype = float_of(xs[0].dtype)
    return [cast(x, dtype) for x in xs]


def quick(op: str, x1: Operand, x2: Operand, kinds: str = "iuf") -> Array | None:
    """Apply an op to two real arrays of one type, or to one and a number that takes its type; else None."""
    array = x1 if isinstance(x1, Array) else x2
    if not isinstance(array, Array):
        return None
    dtype = array._dtype
    kind = dtype.kind
    if kind == "V":
        kind = "f"
    if kind not in kinds:
        return None
    p = x1._parts[0] if x1 is array else _part(x1, dtype, kind)
    q = x2._parts[0] if x2 is array else _part(x2, dtype, kind)
    return None if p is None or q is None else fresh(apply_binary(op, p, q))


def _part(x: Operand, dtype: DType, kind: str) -> Lazy | None:
    if isinstance(x, Array):
        return x._parts[0] if x._dtype is dtype else None
    return number(x, dtype) if type(x) is int or (type(x) is float and kind == "f") else None


def one(x: Array) -> Lazy:
    return x._parts[0]


def real_op(name: str, *xs: Array, **attrs: Any) -> Array:
    """An op on arrays of real numbers."""
    if len(xs) == 1 and not attrs:
        return fresh(apply_unary(name, xs[0]._parts[0]))
    return fresh(apply(name, *[x._parts[0] for x in xs], **attrs))


def const(like: Lazy, value: Any) -> Lazy:
    return apply_full(like, value)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def add(x1: Operand, x2: Operand, /) -> Array:
    """Sum x1 + x2, element by element."""
    made = quick("add", x1, x2)
    if made is not None:
        return made
    a, b = operands("add", x1, x2)
    if a.dtype.kind == "b":
        return real_op("logical_or", a, b)
    return array_of(*cm.add(a._parts, b._parts)) if a.dtype.kind == "c" else real_op("add", a, b)


def subtract(x1: Operand, x2: Operand, /) -> Array:
    """Difference x1 - x2, element by element."""
    made = quick("sub", x1, x2)
    if made is not None:
        return made
    a, b = operands("subtract", x1, x2, kinds="iufc")
    return array_of(*cm.sub(a._parts, b._parts)) if a.dtype.kind == "c" else real_op("sub", a, b)


def multiply(x1: Operand, x2: Operand, /) -> Array:
    """Product x1 * x2, element by element."""
    made = quick("mul", x1, x2)
    if made is not None:
        return made
    a, b = operands("multiply", x1, x2)
    if a.dtype.kind == "b":
        return real_op("logical_and", a, b)
    return array_of(*cm.mul(a._parts, b._parts)) if a.dtype.kind == "c" else real_op("mul", a, b)


def divide(x1: Operand, x2: Operand, /) -> Array:
    """Quotient x1 / x2 as floats, element by element."""
    made = quick("div", x1, x2, "f")
    if made is not None:
        return made
    a, b = floats("divide", x1, x2)
    return array_of(*cm.div(a._parts, b._parts)) if a.dtype.kind == "c" else real_op("div", a, b)


def floor_divide(x1: Operand, x2: Operand, /) -> Array:
    """Quotient x1 / x2, rounded down."""
    a, b = operands("floor_divide", x1, x2, kinds="iuf")
    p, q = one(a), one(b)
    if kind_of(a.dtype) == "f":
        return array_of(_floor_div(p, q))
    t = apply("div", p, q)
    if a.dtype.kind == "u":
        return array_of(t)
    zero = const(p, 0)
    r = apply("sub", p, apply("mul", t, q))
    down = apply(
        "logical_and", apply("not_equal", r, zero), apply("not_equal", apply("less", r, zero), apply("less", q, zero))
    )
    exact = apply("where", down, apply("sub", t, const(p, 1)), t)
    return array_of(apply("where", apply("equal", q, zero), zero, exact))


def _floor_div(p: Lazy, q: Lazy) -> Lazy:
    """Round (p - p mod q) / q to an integer; infinite operands and zero divisors give the floor of p / q."""
    ratio = apply("div", p, q)
    whole = apply("round", apply("div", apply("sub", p, apply("mod", p, q)), q))
    zero = const(p, 0)
    whole = apply("where", apply("equal", whole, zero), copysigned(zero, ratio), whole)
    plain = apply("logical_or", apply("logical_or", apply("isinf", p), apply("isinf", q)), apply("equal", q, zero))
    return apply("where", plain, ratio, whole)


def remainder(x1: Operand, x2: Operand, /) -> Array:
    """Remainder of x1 / x2, with the sign of x2."""
    a, b = operands("remainder", x1, x2, kinds="iuf")
    r = apply("mod", one(a), one(b))
    if kind_of(a.dtype) != "f":
        return array_of(r)
    return array_of(
        apply("where", apply("equal", r, const(r, 0)), copysigned(r, one(b)), r)
    )  # a zero has the sign of the divisor


def pow(x1: Operand, x2: Operand, /) -> Array:
    """x1 to the power of x2, element by element."""
    if isinstance(x1, Array) and kind_of(x1._dtype) == "f" and type(x2) in (int, float) and x2 in _POWERS:
        return array_of(_POWERS[x2](x1._parts[0]))
    a, b = operands("pow", x1, x2, kinds="iufc")
    if a.dtype.kind == "c":
        return array_of(*cm.pow(a._parts, b._parts))
    if kind_of(a.dtype) == "f" and isinstance(x2, (int, float)) and x2 in _POWERS:
        return array_of(_POWERS[x2](one(a)))
    return real_op("pow", a, b)


_POWERS: dict[float, Callable[[Lazy], Lazy]] = {
    2: lambda p: apply_binary("mul", p, p),
    3: lambda p: apply_binary("mul", apply_binary("mul", p, p), p),
    1: lambda p: p,
    -1: lambda p: apply("reciprocal", p),
    -2: lambda p: apply("reciprocal", apply("mul", p, p)),
}


def negative(x: Operand, /) -> Array:
    """Negated elements."""
    if isinstance(x, Array) and kind_of(x._dtype) in "if":
        return array_of(apply_unary("neg", x._parts[0]))
    (a,) = operands("negative", x, kinds="iufc")
    if a.dtype.kind == "u":
        return array_of(apply("sub", const(one(a), 0), one(a)))
    return array_of(*(apply("neg", p) for p in a._parts))


def positive(x: Operand, /) -> Array:
    """The elements, unchanged."""
    (a,) = operands("positive", x, kinds="iufc")
    return array_of(*a._parts)


def abs(x: Operand, /) -> Array:
    """Absolute value of each element; the modulus of complex numbers."""
    (a,) = operands("abs", x)
    if a.dtype.kind == "b":
        return array_of(*a._parts)
    return array_of(cm.modulus(a._parts)) if a.dtype.kind == "c" else real_op("abs", a)


def sign(x: Operand, /) -> Array:
    """-1, 0 or 1 for each element; x / |x| for complex numbers."""
    (a,) = operands("sign", x, kinds="iufc")
    if a.dtype.kind == "c":
        return array_of(*cm.sign(a._parts))
    return array_of(
        apply("where", apply("equal", one(a), const(one(a), 0)), const(one(a), 0), apply("sign", one(a)))
    )  # of -0 it is 0


def square(x: Operand, /) -> Array:
    """Square of each element."""
    (a,) = operands("square", x, kinds="iufc")
    return multiply(a, a)


def reciprocal(x: Operand, /) -> Array:
    """1 / x of each element."""
    (a,) = floats("reciprocal", x)
    return array_of(*cm.reciprocal(a._parts)) if a.dtype.kind == "c" else real_op("reciprocal", a)


def sqrt(x: Operand, /) -> Array:
    """Square root of each element."""
    return _function("sqrt", x)


# --- functions --------------------------------------------------------------------------------------------------------


def _function(name: str, x: Operand) -> Array:
    if isinstance(x, Array) and kind_of(x._dtype) == "f":
        return array_of(apply_unary(name, x._parts[0]))
    (a,) = floats(name, x)
    return array_of(*cm.FUNCTIONS[name](a._parts)) if a.dtype.kind == "c" else real_op(name, a)


def _named(name: str, op: str) -> Callable[[Operand], Array]:
    def function(x: Operand, /) -> Array:
        return _function(op, x)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{name} of each element."
    return function


exp, expm1, log, log1p = _named("exp", "exp"), _named("expm1", "expm1"), _named("log", "log"), _named("log1p", "log1p")
sin, cos, tan = _named("sin", "sin"), _named("cos", "cos"), _named("tan", "tan")
asin, acos, atan = _named("asin", "asin"), _named("acos", "acos"), _named("atan", "atan")
sinh, cosh, tanh = _named("sinh", "sinh"), _named("cosh", "cosh"), _named("tanh", "tanh")
asinh, acosh, atanh = _named("asinh", "asinh"), _named("acosh", "acosh"), _named("atanh", "atanh")


def log2(x: Operand, /) -> Array:
    """Logarithm of base 2 of each element."""
    return multiply(log(x), 1 / math.log(2))


def log10(x: Operand, /) -> Array:
    """Logarithm of base 10 of each element."""
    return multiply(log(x), 1 / math.log(10))


def exp2(x: Operand, /) -> Array:
    """2 to the power of each element."""
    return exp(multiply(x, math.log(2)))


def erf(x: Operand, /) -> Array:
    """Error function of each element."""
    (a,) = floats("erf", x, kinds="biuf")
    return real_op("erf", a)


def logaddexp(x1: Operand, x2: Operand, /) -> Array:
    """Logarithm of exp(x1) + exp(x2), without overflow."""
    a, b = floats("logaddexp", x1, x2, kinds="biuf")
    p, q = one(a), one(b)
    top = apply("max", p, q)
    apart = apply(
        "where", apply("equal", p, q), const(p, 0), apply("neg", apply("abs", apply("sub", p, q)))
    )  # inf - inf is none
    return array_of(apply("add", top, apply("log1p", apply("exp", apart))))


def hypot(x1: Operand, x2: Operand, /) -> Array:
    """Length sqrt(x1**2 + x2**2) without overflow."""
    a, b = floats("hypot", x1, x2, kinds="biuf")
    return array_of(cm.modulus((one(a), one(b))))


def atan2(x1: Operand, x2: Operand, /) -> Array:
    """Angle of the point (x2, x1), in radians from -pi to pi."""
    a, b = floats("atan2", x1, x2, kinds="biuf")
    return array_of(cm.angle(one(a), one(b)))


def _rounding(name: str, op: str) -> Callable[[Operand], Array]:
    def function(x: Operand, /) -> Array:
        (a,) = operands(name, x, kinds="biufc" if op == "round" else "biuf")
        return array_of(*a._parts) if a.dtype.kind in "biu" else array_of(*(apply(op, p) for p in a._parts))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{name} of each element, in its own type; integers stay."
    return function


floor, ceil, trunc = _rounding("floor", "floor"), _rounding("ceil", "ceil"), _rounding("trunc", "trunc")
_whole = _rounding("round", "round")


def round(x: Operand, /, decimals: int = 0) -> Array:
    """Each element to so many decimals, halves to even; integers stay."""
    if not decimals:
        return _whole(x)
    (a,) = operands("round", x)
    scale = 10.0 ** (decimals if decimals > 0 else -decimals)
    if kind_of(a.dtype) not in "fc":
        return a if decimals > 0 else cast(_whole(divide(a, scale)) * scale, a.dtype)
    return divide(_whole(multiply(a, scale)), scale) if decimals > 0 else multiply(_whole(divide(a, scale)), scale)


# --- parts of numbers -------------------------------------------------------------------------------------------------


def real(x: Operand, /) -> Array:
    """Real part of each complex number."""
    (a,) = operands("real", x)
    return Array(a._parts[:1], real_of(a.dtype))


def imag(x: Operand, /) -> Array:
    """Imaginary part of each complex number."""
    (a,) = operands("imag", x)
    return array_of(a._parts[1] if a.dtype.kind == "c" else apply_full(one(a), 0, a.shape))


def conj(x: Operand, /) -> Array:
    """Complex conjugate of each element."""
    (a,) = operands("conj", x)
    return array_of(a._parts[0], apply("neg", a._parts[1])) if a.dtype.kind == "c" else array_of(*a._parts)


def signbits(p: Lazy) -> Lazy:
    """Is the sign of a float set? That of zeros and NaN too."""
    bits = apply("bit_cast", p, to=_BITS[p.type.dtype.bytes])
    return apply("less", bits, const(bits, 0))


def copysigned(p: Lazy, q: Lazy) -> Lazy:
    return apply("where", apply("equal", signbits(p), signbits(q)), p, apply("neg", p))


def signbit(x: Operand, /) -> Array:
    """Whether the sign bit of each float is set."""
    (a,) = operands("signbit", x, kinds="f")
    return array_of(signbits(one(a)))


def copysign(x1: Operand, x2: Operand, /) -> Array:
    """Magnitude of x1 with the sign of x2."""
    a, b = floats("copysign", x1, x2, kinds="biuf")
    return array_of(copysigned(one(a), one(b)))


def nextafter(x1: Operand, x2: Operand, /) -> Array:
    """Next float after x1 in the direction of x2."""
    a, b = floats("nextafter", x1, x2, kinds="biuf")
    p, q = one(a), one(b)
    bits = apply("bit_cast", p, to=_BITS[p.type.dtype.bytes])
    away = apply("equal", apply("less", p, q), apply("greater", p, const(p, 0)))  # from zero
    moved = apply(
        "bit_cast", apply("add", bits, apply("where", away, const(bits, 1), const(bits, -1))), to=p.type.dtype
    )
    least = const(p, float(ml_dtypes.finfo(a.dtype).smallest_subnormal))  # type: ignore[no-untyped-call]
    moved = apply("where", apply("equal", p, const(p, 0)), copysigned(least, q), moved)
    moved = apply("where", apply("equal", p, q), q, moved)
    nan = apply("logical_or", apply("isnan", p), apply("isnan", q))
    return array_of(apply("where", nan, apply("add", p, q), moved))


def finite(p: Lazy) -> Lazy:
    return apply("less", apply("abs", p), const(p, float("inf")))


def _test(name: str, real_test: Callable[[Lazy], Lazy], both: str) -> Callable[[Operand], Array]:
    def function(x: Operand, /) -> Array:
        (a,) = operands(name, x)
        if a.dtype.kind in "biu":
            return placed(
                array_of(apply("full", shape=a.shape, value=name == "isfinite", dtype=from_numpy(np.bool_))),
                one(a).device,
            )
        parts = [real_test(p) for p in a._parts]
        return array_of(parts[0] if len(parts) == 1 else apply(both, *parts))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{name} of each element."
    return function


isfinite = _test("isfinite", finite, "logical_and")
isinf = _test("isinf", lambda p: apply("isinf", p), "logical_or")
isnan = _test("isnan", lambda p: apply("isnan", p), "logical_or")


# --- comparison, logic, bits ------------------------------------------------------------------------------------------


def equal(x1: Operand, x2: Operand, /) -> Array:
    """Comparison x1 == x2, element by element, as bools."""
    made = quick("equal", x1, x2)
    if made is not None:
        return made
    a, b = operands("equal", x1, x2)
    parts = [apply("equal", p, q) for p, q in zip(a._parts, b._parts)]
    return array_of(parts[0] if len(parts) == 1 else apply("logical_and", *parts))


def not_equal(x1: Operand, x2: Operand, /) -> Array:
    """Comparison x1 != x2, element by element, as bools."""
    made = quick("not_equal", x1, x2)
    if made is not None:
        return made
    a, b = operands("not_equal", x1, x2)
    parts = [apply("not_equal", p, q) for p, q in zip(a._parts, b._parts)]
    return array_of(parts[0] if len(parts) == 1 else apply("logical_or", *parts))


def _numbers(name: str, *given: Operand) -> list[Array]:
    xs = operands(name, *given, kinds="biuf")
    return [cast(x, np.dtype(np.int8)) for x in xs] if xs[0].dtype.kind == "b" else xs


def _ordering(name: str) -> Callable[[Operand, Operand], Array]:
    def function(x1: Operand, x2: Operand, /) -> Array:
        made = quick(name, x1, x2)
        return real_op(name, *_numbers(name, x1, x2)) if made is None else made

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{name} of each pair of elements."
    return function


less, less_equal, greater, greater_equal = map(_ordering, ("less", "less_equal", "greater", "greater_equal"))


def maximum(x1: Operand, x2: Operand, /) -> Array:
    """Larger of x1 and x2, element by element. NaN propagates."""
    made = quick("max", x1, x2)
    return real_op("max", *operands("maximum", x1, x2, kinds="iuf")) if made is None else made


def minimum(x1: Operand, x2: Operand, /) -> Array:
    """Smaller of x1 and x2, element by element. NaN propagates."""
    made = quick("min", x1, x2)
    return real_op("min", *operands("minimum", x1, x2, kinds="iuf")) if made is None else made


def clip(x: Operand, /, min: Operand = None, max: Operand = None) -> Array:
    """Bounds are arrays, numbers or None; the result has the type of `x`."""
    (a,) = operands("clip", x, kinds="iuf")
    dtype = a.dtype
    for bound, op in ((min, "max"), (max, "min")):
        if bound is not None:
            a = real_op(op, *operands("clip", a, _bounded(bound, dtype), kinds="iuf"))
    return cast(a, dtype)


def _bounded(bound: Operand, dtype: DType) -> Operand:
    """An integer bound beyond the type of what it bounds is the last number of it."""
    if isinstance(bound, int) and not isinstance(bound, bool) and dtype.kind in "iu":
        info = np.iinfo(dtype)
        return (
            int(np.clip(bound, info.min, info.max))
            if info.min <= bound <= info.max
            else (info.min if bound < info.min else info.max)
        )
    return bound


def _logical(name: str) -> Callable[[Operand, Operand], Array]:
    def function(x1: Operand, x2: Operand, /) -> Array:
        boolean = np.dtype(np.bool_)
        xs = [x if isinstance(x, Array) else scalar(x, DEFAULTS[kind_of(x)]) for x in map(as_operand, (x1, x2))]
        return real_op(name, *(cast(x, boolean) for x in xs))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{name} of each pair of elements."
    return function


logical_and, logical_or, logical_xor = map(_logical, ("logical_and", "logical_or", "logical_xor"))


def logical_not(x: Operand, /) -> Array:
    """Logical "not" of each element, as bools."""
    (a,) = operands("logical_not", x)
    return real_op("logical_not", cast(a, np.dtype(np.bool_)))


def where(condition: Operand, x1: Operand, x2: Operand, /) -> Array:
    """`x1` where the condition holds, else `x2`."""
    a, b = operands("where", x1, x2)
    (c,) = operands("where", condition)
    c = cast(c, np.dtype(np.bool_))
    return array_of(*(apply("where", one(c), p, q) for p, q in zip(a._parts, b._parts)))


def astype(x: Array, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Array:
    """Convert to another type. Results never share writable memory, so `copy` only decides identity."""
    wanted = dtype_of(dtype)
    y = cast(x if device is None else moved(x, device_name(device)), wanted)
    return array_of(*x._parts) if y is x and copy else y


def angle(x: Operand, /) -> Array:
    """Phase of each complex number, in radians."""
    (a,) = operands("angle", x)
    a = cast(a, complex_of(a.dtype))
    return array_of(cm.angle(a._parts[1], a._parts[0]))
