"""Values of user-defined kernels: what C's operators and functions do to lazy values, and the result types.

Types follow C: of two integers narrower than int both become int, of two types the wider one wins, unsigned ones win
among integers of one width, and a floating-point type wins over integers. One rule is ours: a decimal literal without a
suffix takes the floating-point type beside it, so `x * 0.5` stays in float32 where C would compute in double. Integer
division truncates and `%` has the sign of the dividend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.array import bits
from dnnc.array import elementwise as ew
from dnnc.array.core import Array, array_of, cast
from dnnc.array.lazy import Lazy, apply
from dnnc.array.notation import Assignment, Cast, Expression, Name, Number, Operation, Source
from dnnc.array.promotion import DType
from dnnc.ir.dtype import from_numpy
from dnnc.ir.errors import DnncError

BOOL, INT, DOUBLE = np.dtype(np.bool_), np.dtype(np.int32), np.dtype(np.float64)


class Value:
    """A lazy value. `weak`: a float64 of unsuffixed literals, which takes its neighbour's type. `number`: a literal."""

    __slots__ = ("_lazy", "dtype", "number", "weak")

    def __init__(
        self, lazy: Lazy | None, weak: bool = False, number: int | float | bool | None = None, dtype: DType = DOUBLE
    ) -> None:
        self._lazy, self.weak, self.number = lazy, weak, number
        self.dtype: DType = lazy.type.dtype.numpy if lazy is not None else dtype

    @property
    def lazy(self) -> Lazy:
        """Made of a literal when it is needed: most are converted first."""
        if self._lazy is None:
            self._lazy = apply("full", shape=(), value=self.number, dtype=from_numpy(self.dtype))
        return self._lazy


class OperandError(Exception):
    """Operands of a type that an operator does not take; who knows the place in the text makes a DnncError of it."""


def literal(number: int | float | bool, dtype: DType, weak: bool = False) -> Value:
    return Value(None, weak, number, dtype)


def converted(v: Value, dtype: DType) -> Value:
    """The conversion of C: to an integer by dropping the fraction, to a truth value by comparing with 0."""
    if v.dtype == dtype:
        return v if not v.weak else Value(v._lazy, False, v.number, dtype)
    if v.number is not None and (np.isfinite(v.number) or dtype.kind == "f"):
        whole = (
            np.array(int(v.number) & (1 << 64) - 1, np.uint64).astype(dtype)
            if dtype.kind in "iu"
            else np.array(v.number).astype(dtype)
        )
        return literal(whole.item(), dtype)
    return Value(cast(array_of(v.lazy), dtype)._parts[0])


# --- types ------------------------------------------------------------------------------------------------------------


def _promoted(d: DType) -> DType:
    """Integers narrower than int are computed as int."""
    return INT if d.kind == "b" or (d.kind in "iu" and d.itemsize < 4) else d


def common_type(*values: Value) -> tuple[DType, bool]:
    """The type in which C combines values, and whether the result is weak."""
    strong = [_promoted(v.dtype) for v in values if not v.weak]
    if not strong:
        return DOUBLE, True
    if len(strong) < len(values) and all(d.kind != "f" for d in strong):
        return DOUBLE, False
    result = strong[0]
    for d in strong[1:]:
        result = _common(result, d)
    return result, False


def _common(a: DType, b: DType) -> DType:
    if "f" in (a.kind, b.kind):
        return max((d for d in (a, b) if d.kind == "f"), key=lambda d: d.itemsize)
    if a.itemsize != b.itemsize:
        return max(a, b, key=lambda d: d.itemsize)
    return a if a.kind == "u" else b


def alike(*values: Value) -> tuple[list[Lazy], bool]:
    """Values in their common type, and whether the result is weak."""
    dtype, weak = common_type(*values)
    return [converted(v, dtype).lazy for v in values], weak


def floating(*values: Value) -> tuple[list[Lazy], bool]:
    """The same; integers alone become double."""
    dtype, weak = common_type(*values)
    return [converted(v, dtype if dtype.kind == "f" else DOUBLE).lazy for v in values], weak


def integers(op: str, *values: Value) -> list[Lazy]:
    for v in values:
        if v.dtype.kind == "f":
            raise OperandError(
                f"{op!r} takes integers, got {v.dtype}"
                + ("; fmod is the remainder of floating-point numbers" if op == "%" else "")
            )
    return alike(*values)[0]


# --- operators --------------------------------------------------------------------------------------------------------

_ARITHMETIC = {"+": "add", "-": "sub", "*": "mul", "/": "div"}
_ORDER = {"==": "equal", "!=": "not_equal", "<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal"}
_LOGIC = {"&&": "logical_and", "||": "logical_or"}
_BITS: dict[str, Callable[[Array, Array], Array]] = {
    "&": bits.bitwise_and, "|": bits.bitwise_or, "^": bits.bitwise_xor, "<<": bits.bitwise_left_shift,
    ">>": bits.bitwise_right_shift,
}  # fmt: skip


def truth(v: Value) -> Lazy:
    return converted(v, BOOL).lazy


def unary(op: str, v: Value) -> Value:
    if op == "!":
        return Value(apply("logical_not", truth(v)))
    if op == "~":
        return Value(apply("bitwise_not", *integers(op, v)))
    dtype, weak = common_type(v)
    if op == "-" and v.number is not None and dtype.kind != "u" and v.number > 0:
        return literal(-v.number, dtype, weak)
    (p,), _ = alike(v)
    if op == "+":
        return Value(p, weak, v.number)
    zero = apply("full", shape=(), value=0, dtype=p.type.dtype)
    return Value(apply("sub", zero, p) if p.type.dtype.kind == "u" else apply("neg", p), weak)


def binary(op: str, a: Value, b: Value) -> Value:
    if op in _ARITHMETIC:
        xs, weak = alike(a, b)
        return Value(apply(_ARITHMETIC[op], *xs), weak)
    if op in _ORDER:
        return Value(apply(_ORDER[op], *alike(a, b)[0]))
    if op in _LOGIC:
        return Value(apply(_LOGIC[op], truth(a), truth(b)))
    p, q = integers(op, a, b)
    if op == "%":
        return Value(apply("fmod", p, q))
    if op in ("<<", ">>"):  # the result has the type of what is shifted
        p, q = (converted(v, _promoted(a.dtype)).lazy for v in (a, b))
    return Value(_BITS[op](array_of(p), array_of(q))._parts[0])


def chosen(condition: Value, yes: Value, no: Value) -> Value:
    if yes.dtype == no.dtype and yes.weak == no.weak:
        return Value(apply("where", truth(condition), yes.lazy, no.lazy), yes.weak)
    xs, weak = alike(yes, no)
    return Value(apply("where", truth(condition), *xs), weak)


# --- functions --------------------------------------------------------------------------------------------------------

_OPS = {
    n: n
    for n in (
        "exp expm1 log log1p sqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf floor ceil trunc"
    ).split()
}
_OPS |= {"fabs": "abs", "rint": "round", "fmod": "fmod"}
_COMPOSED: dict[str, Callable[..., Array]] = {n: getattr(ew, n) for n in ("exp2", "log2", "log10", "isinf", "isnan",
"isfinite", "signbit", "atan2",
                                                                         "hypot", "copysign")}  # fmt: skip


def _round_away(p: Lazy) -> Lazy:
    """C's round: halves go away from zero."""
    whole = apply("trunc", p)
    half = apply("full", shape=(), value=0.5, dtype=p.type.dtype)
    apart = apply("greater_equal", apply("abs", apply("sub", p, whole)), half)
    return apply("where", apart, apply("add", whole, apply("sign", p)), whole)


def _but_nan(op: str, p: Lazy, q: Lazy) -> Lazy:
    """fmin and fmax: where one operand is NaN, the other."""
    return apply("where", apply("isnan", p), q, apply("where", apply("isnan", q), p, apply(op, p, q)))


def _pow(values: tuple[Value, ...], p: Lazy, q: Lazy) -> Lazy:
    """Small whole exponents that are literals are products."""
    n = values[1].number
    return ew.pow(array_of(p), n if n in (1, 2, 3, -1, -2) else array_of(q))._parts[0]


def function(name: str, *values: Value) -> Value:
    if name in ("min", "max"):
        xs, weak = alike(*values)
        return Value(apply(name, *xs), weak)
    if name == "abs":
        (p,), weak = alike(*values)
        return Value(p if p.type.dtype.kind == "u" else apply("abs", p), weak)
    if name == "fma":
        (p, q, r), weak = alike(*values)
        return Value(apply("add", apply("mul", p, q), r), weak)
    xs, weak = floating(*values)
    if name in _OPS:
        return Value(apply(_OPS[name], *xs), weak)
    if name in _COMPOSED:
        made = _COMPOSED[name](*map(array_of, xs))
        return Value(made._parts[0], weak and made.dtype.kind == "f")
    if name == "rsqrt":
        return Value(apply("reciprocal", apply("sqrt", *xs)), weak)
    if name == "round":
        return Value(_round_away(*xs), weak)
    if name == "pow":
        return Value(_pow(values, *xs), weak)
    return Value(_but_nan(name[1:], *xs), weak)


@dataclass(frozen=True, slots=True)
class Evaluator:
    """The value of a tree. `types` are those of the type variables of this call."""

    source: Source
    types: Mapping[str, DType]

    def dtype(self, name: str) -> DType:
        return self.types[name] if name in self.types else np.dtype(name)

    def value(self, x: Expression, known: Mapping[str, Value]) -> Value:
        """ParseError, with the place, where an operator does not take a type."""
        if isinstance(x, Number):
            return literal(x.value, np.dtype(x.type or "float64"), not x.type)
        if isinstance(x, Name):
            return known[x.name]
        if isinstance(x, Cast):
            return converted(self.value(x.operand, known), self.dtype(x.type))
        return self.applied(x, [self.value(v, known) for v in x.operands])

    def applied(self, x: Operation, values: list[Any]) -> Value:
        try:
            if x.op == "?:":
                return chosen(*values)
            if x.op.isidentifier():
                return function(x.op, *values)
            return unary(x.op, *values) if len(values) == 1 else binary(x.op, *values)
        except OperandError as e:
            raise self.source.error(x.at, str(e)) from None
        except DnncError as e:
            raise self.source.error(x.at, str(e), type(e)) from e

    def run(self, statements: list[Assignment], known: dict[str, Value]) -> dict[str, Value]:
        """All variables after the statements."""
        for s in statements:
            v = self.value(s.value, known)
            if s.type:
                v = converted(v, self.dtype(s.type))
            elif s.name in known:  # an auto variable keeps the type of its first value
                v = v if known[s.name].weak and v.weak else converted(v, known[s.name].dtype)
            known[s.name] = v
        return known
