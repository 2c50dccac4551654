"""Element-wise arithmetic: each output element depends on the operands' elements at the same index, operands broadcast.

Integers wrap; integer division truncates (`div`), `mod` has the sign of the divisor, `fmod` of the dividend; x / 0 and
x mod 0 are 0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dnnc.ir.autodiff.rules import elementwise as rules
from dnnc.ir.dtype import boolean, u64
from dnnc.ir.expr import Expr, cast, const, logical_not, maximum, minimum, select
from dnnc.ir.loops.intrinsics import TABLE
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import ELEMENTWISE, Cost, OpDef, Sample, Trait, require
from dnnc.ir.ops.common import (
    Array,
    both,
    broadcast_type,
    elementwise,
    require_kind,
    same_dtype,
    sample,
    size_flops,
    without_attrs,
)
from dnnc.ir.te import Tensor
from dnnc.ir.types import TensorType

# --- what the records are made by -------------------------------------------------------------------------------------


def unary(
    name: str,
    value: Callable[[Expr], Expr],
    reference: Callable[[Array], Array],
    kinds: str = "f",
    flops: int = 1,
    domain: tuple[float, float] = (-2.0, 2.0),
    to_bool: bool = False,
    cost: Cost = Cost.CHEAP,
    traits: Iterable[Trait] = (),
    vjp: Callable[..., Any] | None = None,
) -> OpDef:
    """An op of one operand; `kinds` are the kinds of dtypes that it takes."""
    out = boolean if to_bool else None

    def type_(x: TensorType) -> TensorType:
        require_kind(f"{name}'s operand", x, kinds)
        return TensorType(out or x.dtype, x.shape)

    def compute(x: Tensor) -> Tensor:
        return elementwise(value, x, dtype=out)

    return OpDef(
        name,
        type_,
        compute,
        reference=without_attrs(reference),
        flops=size_flops(flops),
        traits=ELEMENTWISE.union(traits),
        samples=tuple(_samples(1, kinds, domain)),
        cost=cost,
        vjp=vjp,
    )


def binary(
    name: str,
    value: Callable[[Expr, Expr], Expr],
    reference: Callable[[Array, Array], Array],
    kinds: str = "fiu",
    domain: tuple[float, float] = (-2.0, 2.0),
    to_bool: bool = False,
    cost: Cost = Cost.CHEAP,
    neutral: float | bool | None = None,
    traits: Iterable[Trait] = (),
    vjp: Callable[..., Any] | None = None,
) -> OpDef:
    """An op of two operands of one dtype, which broadcast."""
    out = boolean if to_bool else None

    def type_(a: TensorType, b: TensorType) -> TensorType:
        same_dtype(a, b)
        require_kind(f"{name}'s operands", a, kinds)
        return broadcast_type(a, b, dtype=out)

    def compute(a: Tensor, b: Tensor) -> Tensor:
        return elementwise(value, a, b, dtype=out)

    return OpDef(
        name,
        type_,
        compute,
        reference=without_attrs(reference),
        flops=size_flops(),
        traits=ELEMENTWISE.union(traits),
        samples=tuple(_samples(2, kinds, domain)),
        cost=cost,
        neutral=neutral,
        vjp=vjp,
    )


def _samples(operands: int, kinds: str, domain: tuple[float, float]) -> Iterable[Sample]:
    """An odd size, a broadcast, a scalar, a half type, integers and bools, as far as the op takes them."""
    shapes = [("3, 5", "3, 5"), ("2, 1, 7", "3, 1"), ("4", "")]
    dtypes = {
        "f": ("f32", "f16", "f64"),
        "i": ("i64", "i32", "i8"),
        "u": ("u8", "u64", "u16"),
        "b": ("bool", "bool", "bool"),
    }
    for kind in kinds:
        wide = domain if kind == "f" else (max(domain[0], -100.0) * 10, max(domain[1], 2.0) * 10)
        for d, s in list(zip(dtypes[kind], shapes))[: 3 if kind == "f" else 2]:
            yield sample(*(f"{d}[{x}]" for x in s[:operands]), domain=wide)
    if "f" in kinds:
        yield sample(*(f"bf16[{x}]" for x in ("1, 9", "9")[:operands]), domain=domain)


def intrinsic(name: str) -> Callable[..., Expr]:
    return lambda *args: call(name, *args)


def meaning(name: str) -> Callable[..., Array]:
    f = TABLE[name].meaning
    assert f is not None, name
    return f


# --- values -----------------------------------------------------------------------------------------------------------


def _sign(x: Expr) -> Expr:
    return select(x < 0, const(-1, x.dtype), _positive_sign(x)) if x.dtype.kind != "u" else _positive_sign(x)


def _positive_sign(x: Expr) -> Expr:
    return select(const(0, x.dtype) < x, const(1, x.dtype), x)  # 0 and NaN stay


def _abs(x: Expr) -> Expr:
    return x if x.dtype.kind == "u" else call("abs", x)


def _div(a: Expr, b: Expr) -> Expr:
    return a / b if a.dtype.is_float else call("truncdiv", a, b)


def _div_numpy(a: Array, b: Array) -> Array:
    return meaning("truncdiv")(a, b) if np.asarray(a).dtype.kind in "iu" else a / b


def _mod(a: Expr, b: Expr) -> Expr:
    if a.dtype.is_int:
        return call("floormod", a, b)
    r = call("truncmod", a, b)
    zero = const(0.0, r.dtype)
    return select(both(r.ne(0.0), (r < zero).ne(b < zero)), r + b, r)


def _mod_numpy(a: Array, b: Array) -> Array:
    return meaning("floormod")(a, b) if np.asarray(a).dtype.kind in "iu" else np.mod(a, b)


def _pow(a: Expr, b: Expr) -> Expr:
    if a.dtype.is_float:
        return call("pow", a, b)
    # Square and multiply in u64, which wraps: exact. The exponent of 0, 1, -1 counts by its parity alone; any other
    # base overflows from 64 on, and has no integer value below 0.
    e, base, r = cast(b, u64), cast(a, u64), const(1, u64)
    e = select(const(63, u64) < e, (e & 1) + 62, e)
    for k in range(6):
        r = select((e & (1 << k)).ne(0), r * base, r)
        base = base * base
    r = cast(r, a.dtype)
    return r if b.dtype.kind == "u" else select((b < 0) & a.ne(1) & a.ne(-1), const(0, a.dtype), r)


def _pow_numpy(a: Array, b: Array) -> Array:
    a, b = np.broadcast_arrays(a, b)
    if a.dtype.kind not in "iu":
        return np.power(a, b)
    r = np.ones_like(a)
    for k in np.ndindex(a.shape):
        x, n = int(a[k]), int(b[k])
        exact = x**n if n >= 0 else x ** (n % 2) if x in (1, -1) else 0
        r[k] = np.array(exact & ((1 << 64) - 1), np.uint64).astype(a.dtype)
    return r


def _isinf(x: Expr) -> Expr:
    return call("abs", x).eq(const(float("inf"), x.dtype))


# --- ops with attributes or of another form ---------------------------------------------------------------------------


def _erf_numpy(x: Array) -> Array:
    return meaning("erf")(x).astype(x.dtype)


def _clip_type(
    x: TensorType, *, low: float | None = None, high: float | None = None, keeps_nan: bool = True
) -> TensorType:
    require_kind("clip's operand", x, "fiu")
    require(keeps_nan or low is not None, "NaN becomes the lower bound, and there is none")
    return x


def _clip(x: Expr, *, low: float | None, high: float | None, keeps_nan: bool) -> Expr:
    # the bound stands first in fmin and fmax, so NaN stays NaN; they would pass over a bound that is NaN itself. Of
    # fmax(NaN, bound) the bound is left, by the same instruction
    plain = x.dtype.is_float and low == low and high == high
    least, most = (intrinsic("fmax"), intrinsic("fmin")) if plain else (maximum, minimum)
    if low is not None:
        bound = const(low if x.dtype.is_float else int(low), x.dtype)
        x = least(bound, x) if keeps_nan or not plain else least(x, bound)
    return x if high is None else most(const(high if x.dtype.is_float else int(high), x.dtype), x)


def _clip_numpy(x: Array, *, low: float | None = None, high: float | None = None, keeps_nan: bool = True) -> Array:
    x = x if keeps_nan else np.where(np.isnan(x), np.asarray(low, x.dtype), x)
    bound = int if x.dtype.kind in "iu" else float
    x = x if low is None else np.maximum(x, np.asarray(bound(low)).astype(x.dtype))
    return x if high is None else np.minimum(x, np.asarray(bound(high)).astype(x.dtype))


def _where_type(c: TensorType, a: TensorType, b: TensorType) -> TensorType:
    require_kind("the condition of where", c, "b")
    return broadcast_type(c, a, b, dtype=same_dtype(a, b))


def _where(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return elementwise(select, c, a, b, dtype=a.dtype)


STEPS = (Trait.IDEMPOTENT, Trait.AMPLIFIES)  # what rounds to integers
ORDER: tuple[tuple[str, Callable[..., Expr], Callable[..., Array], str], ...] = (
    ("less", operator.lt, np.less, "fiu"),
    ("less_equal", operator.le, np.less_equal, "fiu"),
    ("greater", operator.gt, np.greater, "fiu"),
    ("greater_equal", operator.ge, np.greater_equal, "fiu"),
)

ELEMENTWISE_OPS: tuple[OpDef, ...] = (
    # arithmetic
    binary("add", operator.add, np.add, neutral=-0.0, traits=(Trait.COMMUTATIVE, Trait.KEEPS_SIGN), vjp=rules.add),
    binary("sub", operator.sub, np.subtract, neutral=0.0, vjp=rules.sub),
    binary("mul", operator.mul, np.multiply, neutral=1.0, traits=(Trait.COMMUTATIVE, Trait.KEEPS_SIGN), vjp=rules.mul),
    binary(
        "div",
        _div,
        _div_numpy,
        domain=(-3.0, 3.0),
        neutral=1.0,
        cost=Cost.LIGHT,
        traits=(Trait.KEEPS_SIGN,),
        vjp=rules.div,
    ),
    binary("mod", _mod, _mod_numpy, domain=(-3.0, 3.0), traits=(Trait.AMPLIFIES,), vjp=rules.mod),
    binary(
        "fmod",
        intrinsic("truncmod"),
        meaning("truncmod"),
        domain=(-3.0, 3.0),
        traits=(Trait.AMPLIFIES,),
        vjp=rules.fmod,
    ),
    binary("pow", _pow, _pow_numpy, domain=(0.1, 3.0), neutral=1.0, cost=Cost.COSTLY, vjp=rules.power),
    binary("min", minimum, np.minimum, traits=(Trait.KEEPS_SIGN,), vjp=rules.minimum),
    binary("max", maximum, np.maximum, traits=(Trait.KEEPS_SIGN,), vjp=rules.maximum),
    unary("neg", operator.neg, np.negative, "fi", traits=(Trait.INVOLUTION,), vjp=rules.neg),
    unary("abs", _abs, np.abs, "fiu", traits=(Trait.IDEMPOTENT, Trait.NOT_NEGATIVE), vjp=rules.absolute),
    unary("sign", _sign, np.sign, "fiu", traits=(Trait.IDEMPOTENT, Trait.AMPLIFIES), vjp=rules.flat),
    unary("reciprocal", lambda x: 1.0 / x, lambda x: 1.0 / x, domain=(0.3, 3.0), vjp=rules.reciprocal),
    unary(
        "sqrt",
        intrinsic("sqrt"),
        np.sqrt,
        domain=(0.0, 5.0),
        cost=Cost.LIGHT,
        traits=(Trait.KEEPS_SIGN,),
        vjp=rules.square_root,
    ),
    # rounding; round is half to even
    unary("floor", intrinsic("floor"), np.floor, domain=(-5.0, 5.0), traits=STEPS, vjp=rules.flat),
    unary("ceil", intrinsic("ceil"), np.ceil, domain=(-5.0, 5.0), traits=STEPS, vjp=rules.flat),
    unary("round", intrinsic("rint"), np.rint, domain=(-5.0, 5.0), traits=STEPS, vjp=rules.flat),
    unary("trunc", intrinsic("trunc"), np.trunc, domain=(-5.0, 5.0), traits=STEPS, vjp=rules.flat),
    # exponentials and trigonometry
    unary("exp", intrinsic("exp"), np.exp, flops=8, cost=Cost.LIGHT, traits=(Trait.NOT_NEGATIVE,)),
    unary("expm1", intrinsic("expm1"), np.expm1, flops=8),
    unary("log", intrinsic("log"), np.log, flops=8, domain=(0.1, 9.0), cost=Cost.COSTLY),
    unary("log1p", intrinsic("log1p"), np.log1p, flops=8, domain=(-0.9, 9.0)),
    unary("erf", intrinsic("erf"), _erf_numpy, flops=8, cost=Cost.COSTLY),
    unary("sin", intrinsic("sin"), np.sin, flops=8, domain=(-9.0, 9.0), cost=Cost.COSTLY, traits=(Trait.AMPLIFIES,)),
    unary("cos", intrinsic("cos"), np.cos, flops=8, domain=(-9.0, 9.0), cost=Cost.COSTLY, traits=(Trait.AMPLIFIES,)),
    unary("tan", intrinsic("tan"), np.tan, flops=8, domain=(-1.4, 1.4), cost=Cost.COSTLY),
    unary("asin", intrinsic("asin"), np.arcsin, flops=8, domain=(-1.0, 1.0)),
    unary("acos", intrinsic("acos"), np.arccos, flops=8, domain=(-1.0, 1.0)),
    unary("atan", intrinsic("atan"), np.arctan, flops=8),
    unary("sinh", intrinsic("sinh"), np.sinh, flops=8),
    unary("cosh", intrinsic("cosh"), np.cosh, flops=8),
    unary("tanh", intrinsic("tanh"), np.tanh, flops=8, cost=Cost.COSTLY, vjp=rules.tanh),
    unary("asinh", intrinsic("asinh"), np.arcsinh, flops=8),
    unary("acosh", intrinsic("acosh"), np.arccosh, flops=8, domain=(1.0, 9.0)),
    unary("atanh", intrinsic("atanh"), np.arctanh, flops=8, domain=(-0.9, 0.9)),
    # comparisons, logic, bits
    binary("equal", lambda a, b: a.eq(b), np.equal, "fiub", to_bool=True, traits=(Trait.COMMUTATIVE,)),
    binary("not_equal", lambda a, b: a.ne(b), np.not_equal, "fiub", to_bool=True, traits=(Trait.COMMUTATIVE,)),
    *(binary(name, value, numpy, kinds, to_bool=True) for name, value, numpy, kinds in ORDER),
    binary("logical_and", operator.and_, np.logical_and, "b", neutral=True, traits=(Trait.COMMUTATIVE,)),
    binary("logical_or", operator.or_, np.logical_or, "b", neutral=False, traits=(Trait.COMMUTATIVE,)),
    binary("logical_xor", lambda a, b: a.ne(b), np.logical_xor, "b", neutral=False, traits=(Trait.COMMUTATIVE,)),
    unary("logical_not", logical_not, np.logical_not, "b", traits=(Trait.INVOLUTION,)),
    binary("bitwise_and", operator.and_, np.bitwise_and, "iu", traits=(Trait.COMMUTATIVE,)),
    binary("bitwise_or", operator.or_, np.bitwise_or, "iu", traits=(Trait.COMMUTATIVE,)),
    binary("bitwise_xor", operator.xor, np.bitwise_xor, "iu", traits=(Trait.COMMUTATIVE,)),
    unary("bitwise_not", intrinsic("bitnot"), np.invert, "iu", traits=(Trait.INVOLUTION,)),
    binary("shift_left", intrinsic("shl"), meaning("shl"), "iu", domain=(0.0, 1.0)),
    binary("shift_right", intrinsic("shr"), meaning("shr"), "iu", domain=(0.0, 1.0)),
    unary("isnan", intrinsic("isnan"), np.isnan, to_bool=True),
    unary("isinf", _isinf, np.isinf, to_bool=True),
    OpDef(
        "where",
        _where_type,
        _where,
        reference=np.where,
        flops=size_flops(),
        traits=ELEMENTWISE,
        samples=(
            sample("bool[2, 3]", "f32[2, 3]", "f32[2, 3]"),
            sample("bool[4, 1]", "i64[5]", "i64[]"),
            sample("bool[3]", "f16[2, 1]", "f16[3]"),
            sample("bool[3]", "bool[3]", "bool[1]"),
        ),
        vjp=rules.where,
    ),
    OpDef(
        "clip",
        _clip_type,
        lambda x, **attrs: elementwise(lambda e: _clip(e, **attrs), x),
        reference=_clip_numpy,
        flops=size_flops(2),
        traits=ELEMENTWISE,
        samples=(
            sample("f32[3, 7]", low=-0.5, high=1.0),
            sample("f16[5]", low=0.25, high=None),
            sample("i32[9]", low=-3, high=4, domain=(-10, 10)),
            sample("u8[9]", low=None, high=4, domain=(0, 10)),
            sample("f32[3, 7]", low=-0.5, high=1.0, keeps_nan=False),
        ),
        vjp=rules.clip,
    ),
)
