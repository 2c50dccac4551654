"""The rule of element-wise ops: the derivative of their scalar expression, as ops of the graph.

    y = tanh(x)   ->   cot x = mul(cot y, sub(1.0, mul(y, y)))

So what follows sees ordinary ops, which fuse, simplify, batch and export like those of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dnnc.ir import te
from dnnc.ir.autodiff.rules.common import unbroadcast as unbroadcast
from dnnc.ir.autodiff.scalar import pull
from dnnc.ir.dtype import DType, boolean
from dnnc.ir.expr import Const, Expr, Load, Op, rebuild, select
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Node, Value
from dnnc.ir.loops.intrinsics import cast_target
from dnnc.ir.te import Tensor

OPS = {
    "+": "add", "-": "sub", "*": "mul", "/": "div", "min": "min", "max": "max", "pow": "pow", "neg": "neg",
    "abs": "abs", "sqrt": "sqrt", "recip": "reciprocal", "exp": "exp", "expm1": "expm1", "log": "log",
    "log1p": "log1p", "erf": "erf", "tanh": "tanh", "sin": "sin", "cos": "cos", "tan": "tan", "asin": "asin",
    "acos": "acos", "atan": "atan", "sinh": "sinh", "cosh": "cosh", "asinh": "asinh", "acosh": "acosh",
    "atanh": "atanh", "floor": "floor", "ceil": "ceil", "trunc": "trunc", "rint": "round", "select": "where",
    "==": "equal", "!=": "not_equal", "<": "less", "<=": "less_equal", "&": "logical_and", "|": "logical_or",
    "^": "logical_xor", "not": "logical_not", "isnan": "isnan",
}  # fmt: skip


def vjp(b: Builder, n: Node, cotangents: Sequence[Value | None], needed: Sequence[int]) -> Mapping[int, Value] | None:
    """The cotangents of operands; None where the derivative has an operation that is no op."""
    assert n.op.compute is not None
    operands = [None if v is None else te.placeholder(f"x{k}", v.type.dtype, ()) for k, v in enumerate(n.inputs)]
    (made,) = _many(n.op.compute(*operands, **n.attrs))
    result, seed = (te.placeholder(name, n.output.type.dtype, ()) for name in ("y", "g"))
    assert made.stage is not None and not made.stage.reduce
    value = made.stage.value
    root = result[()]
    values: dict[Tensor, Value | None] = {t: v for t, v in zip(operands, n.inputs) if t is not None}
    values |= {result: n.output, seed: cotangents[0]}
    parts: dict[int, list[Value]] = {}
    places = {t: k for k, t in enumerate(operands) if t is not None}
    emitter = _Emitter(b, values)
    for at, weight in pull(value, seed[()]):
        assert isinstance(at.buf, Tensor)
        k = places[at.buf]
        if k not in needed:
            continue
        weight = _read(weight, value, root)
        found = emitter.value(weight)
        if found is None:
            return None
        parts.setdefault(k, []).append(found)
    out = {}
    for k, many in parts.items():
        operand = n.inputs[k]
        assert operand is not None
        total = many[0]
        for v in many[1:]:
            total = b.add(total, v)
        if total.type.dtype is not operand.type.dtype:
            total = b.cast(total, to=operand.type.dtype)
        out[k] = unbroadcast(b, _as_wide(b, total, n.output), operand)
    return out


def _as_wide(b: Builder, g: Value, result: Value) -> Value:
    return g if g.type.shape == result.type.shape else b.expand(g, shape=result.type.shape)


def _many(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def _read(e: Expr, value: Expr, result: Expr) -> Expr:
    """An expression that reads the result in place of computing it again."""
    if isinstance(value, Load):
        return e

    def go(x: Expr) -> Expr:
        return result if x is value else rebuild(x, go)

    return go(e)


class _Emitter:
    """Adds the nodes of scalar expressions, each sub-expression once."""

    def __init__(self, b: Builder, values: Mapping[Tensor, Value | None]) -> None:
        self.b, self.values = b, values
        self.made: dict[Expr, Value | None] = {}

    def value(self, e: Expr) -> Value | None:
        if e not in self.made:
            self.made[e] = self._value(e)
        return self.made[e]

    def _value(self, e: Expr) -> Value | None:
        if isinstance(e, Load):
            return self.values[e.buf] if isinstance(e.buf, Tensor) else None
        if not isinstance(e, Op):
            return None
        target = cast_target(e.name)
        if target is not None:
            return self._converted(e, *target)
        if e.name in ("fmin", "fmax"):
            return self._extreme(e)
        if e.name == "fma":
            return self.value(e.args[0] * e.args[1] + e.args[2])
        if e.name not in OPS:
            return None
        found = [None if isinstance(a, Const) else self.value(a) for a in e.args]
        if any(v is None and not isinstance(a, Const) for v, a in zip(found, e.args)):
            return None
        dtype = next((v.type.dtype for v in found[e.name == "select" :] if v is not None), None)
        if dtype is None:
            dtype = e.args[-1].dtype
        filled = [self._constant(a, dtype) if v is None else v for v, a in zip(found, e.args)]
        return self.b.op(OPS[e.name], *filled)  # type: ignore[no-any-return]

    def _constant(self, e: Expr, dtype: DType) -> Value:
        assert isinstance(e, Const)
        return self.b.constant(e.value, dtype=boolean if e.dtype is boolean else dtype)

    def _extreme(self, e: Op) -> Value | None:
        """fmax(a, b) is b unless a > b."""
        x, y = e.args
        wins = x < y if e.name == "fmin" else y < x
        return self.value(select(wins, x, y))

    def _converted(self, e: Op, to: DType, bits: bool) -> Value | None:
        found = self.value(e.args[0])
        if found is None or bits:
            return None
        if to.is_float and found.type.dtype.is_float:
            return found  # registers are wider than memory; ops convert by themselves
        return found if found.type.dtype is to else self.b.cast(found, to=to)
