"""A tensor expression as ops of the graph IR: what has no operator of its own is exported as these.

In: a record with a tensor expression, as derivatives and users define them, and a builder. Out: the values of its
results. Every loop variable becomes an axis of all intermediate values, and a reduction reduces its axes:

    t[i] = sum over r of x[2*i + r] * w[r]   ->   at = add(mul(iota(i), 2), iota(r)) # [I, R]
                                                  t = reduce_sum(mul(gather(x, at), w), axes=(1,))

It is right, not fast: a reduction takes the memory of all its terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dnnc.ir import te
from dnnc.ir.autodiff.elementwise import OPS
from dnnc.ir.dtype import DType, boolean, i64
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.expr import Const, Expr, Linear, Load, Op, Product, Var, extent, unwrap
from dnnc.ir.graph import Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.loops.intrinsics import cast_target
from dnnc.ir.op import OpDef
from dnnc.ir.te import Stage, Tensor
from dnnc.ir.types import Dim, product

COMBINES = {"sum": "reduce_sum", "prod": "reduce_prod", "max": "reduce_max", "min": "reduce_min", "fmax": "reduce_max"}
UPDATES = {"sum": "add", "prod": "mul", "max": "max", "min": "min", "last": "none"}


def spelled_out(b: Builder, op: OpDef, operands: Sequence[Value | None], attrs: Mapping[str, Any]) -> list[Value]:
    """The results of an op with a tensor expression. UnsupportedError: a part of it has no form as ops."""
    assert op.compute is not None
    given = [None if v is None else te.placeholder(f"x{k}", v.type.dtype, v.type.shape) for k, v in enumerate(operands)]
    made = op.compute(*given, **attrs)
    results = made if isinstance(made, tuple) else (made,)
    values = {t: v for t, v in zip(given, operands) if t is not None and v is not None}
    for t in te.stages(results):
        assert t.stage is not None
        values[t] = _stage(b, t, t.stage, values)
    return [values[t] for t in results]


def _stage(b: Builder, t: Tensor, s: Stage, values: Mapping[Tensor, Value]) -> Value:
    if s.own is not None:
        raise UnsupportedError("elements that depend on those before them have no form in ONNX")
    loops = _Loops(b, (*s.axes, *s.reduce), values)
    v = loops.value(s.value)
    if s.reduce:
        if s.where is not None:
            none = b.constant(te.identity(s.combine, v.type.dtype), dtype=v.type.dtype)
            v = b.where(loops.value(s.where), v, none)
        v = b.expand(v, shape=loops.shape)
        axes = tuple(range(len(s.axes), len(loops.shape)))
        v = b.op(COMBINES[s.combine], v, axes=axes, keepdims=False)
    v = _cast(b, v, t.dtype)
    v = v if v.type.shape == t.dims else b.expand(v, shape=t.dims)
    return v if s.updates is None else _updated(b, t, v, s, values)


def _updated(b: Builder, t: Tensor, base: Value, s: Stage, values: Mapping[Tensor, Value]) -> Value:
    """Updates of elements by their number in row-major order."""
    put = s.updates
    assert put is not None
    loops = _Loops(b, put.axes, values)
    at = b.expand(loops.number(put.index, t.dims), shape=loops.shape)
    new = b.expand(_cast(b, loops.value(put.value), t.dtype), shape=loops.shape)
    flat = [b.reshape(v, shape=(_count(v.type.shape),)) for v in (base, at, new)]
    made = b.scatter_elements(*flat, axis=0, reduction=UPDATES[put.combine])
    return b.reshape(made, shape=t.dims)  # type: ignore[no-any-return]


def _count(shape: Sequence[Dim]) -> Dim:
    return product(shape)


def _cast(b: Builder, v: Value, to: DType) -> Value:
    return v if v.type.dtype is to else b.cast(v, to=to)


class _Loops:
    """Scalar expressions for all values of some variables: values with an axis for each, of size 1 where it is free."""

    def __init__(self, b: Builder, variables: Sequence[Var], values: Mapping[Tensor, Value]) -> None:
        self.b, self.values = b, values
        self.places = {v: k for k, v in enumerate(variables)}
        self.shape = tuple(unwrap(extent(v)) for v in variables)
        self.made: dict[Expr, Value] = {}

    def value(self, e: Expr) -> Value:
        if e not in self.made:
            self.made[e] = self._value(e)
        return self.made[e]

    def _value(self, e: Expr) -> Value:
        b = self.b
        if isinstance(e, Const):
            return b.constant(e.value, dtype=e.dtype)
        if isinstance(e, Var):
            return self.counted(e) if e in self.places else b.full(shape=(), value=e, dtype=i64)
        if isinstance(e, Linear):
            total = b.constant(e.const, dtype=i64)
            for t, k in e.terms:
                total = b.add(total, b.mul(self.value(t), b.constant(k, dtype=i64)))
            return total
        if isinstance(e, Product):
            made = self.value(e.factors[0])
            for f in e.factors[1:]:
                made = b.mul(made, self.value(f))
            return made
        if isinstance(e, Load):
            return self.loaded(e)
        assert isinstance(e, Op)
        return self.operated(e)

    def counted(self, v: Var) -> Value:
        """0, 1, ... along the axis of a variable."""
        k = self.places[v]
        shape = tuple(n if j == k else 1 for j, n in enumerate(self.shape))
        return self.b.iota(shape=shape, axis=k, dtype=i64)  # type: ignore[no-any-return]

    def loaded(self, e: Load) -> Value:
        t = e.buf
        assert isinstance(t, Tensor)
        if t not in self.values:
            raise UnsupportedError(f"{t.name} is read before it is computed")
        source = self.values[t]
        loops = [i for i in e.idx if isinstance(i, Var) and i in self.places]
        if len(set(loops)) == len(e.idx):
            return _cast(self.b, self.placed(source, [self.places[i] for i in loops]), t.dtype.computed)
        flat = self.b.reshape(source, shape=(_count(source.type.shape),))
        return _cast(self.b, self.b.gather(flat, self.number(e.idx, t.dims), axis=0), t.dtype.computed)

    def placed(self, source: Value, places: Sequence[int]) -> Value:
        """A tensor whose axes go to these places."""
        order = sorted(range(len(places)), key=lambda k: places[k])
        turned = source if order == list(range(len(order))) else self.b.transpose(source, perm=tuple(order))
        sizes = dict(zip(sorted(places), turned.type.shape))
        shape = tuple(sizes.get(k, 1) for k in range(len(self.shape)))
        return turned if turned.type.shape == shape else self.b.reshape(turned, shape=shape)

    def number(self, index: Sequence[Expr], dims: Sequence[Dim]) -> Value:
        """The number of an element in row-major order, of the nearest one for an index outside of its axis."""
        b = self.b
        total = b.constant(np.zeros((1,) * len(self.shape)), dtype=i64)
        for i, d in zip(index, dims):
            size = b.constant(d, dtype=i64) if isinstance(d, int) else b.full(shape=(), value=d, dtype=i64)
            inside = b.max(b.min(self.value(i), b.sub(size, b.constant(1, dtype=i64))), b.constant(0, dtype=i64))
            total = b.add(b.mul(total, size), inside)
        return total

    def operated(self, e: Op) -> Value:
        b = self.b
        target = cast_target(e.name)
        if target is not None:
            if target[1]:
                raise UnsupportedError(f"{e.name} reads the bits of a number, which has no form in ONNX")
            return _cast(b, self.value(e.args[0]), target[0].computed)
        args = [self.value(a) for a in e.args]
        if e.name == "guard":
            return args[0]
        if e.name in ("fmin", "fmax"):  # the second operand unless the first wins
            return b.where(b.less(*(args if e.name == "fmin" else args[::-1])), *args)  # type: ignore[no-any-return]
        if e.name == "fma":
            return b.add(b.mul(args[0], args[1]), args[2])  # type: ignore[no-any-return]
        if e.name == "//":
            return b.div(b.sub(args[0], b.mod(*args)), args[1])  # type: ignore[no-any-return]
        if e.name == "%":
            return b.mod(*args)  # type: ignore[no-any-return]
        names = {**OPS, "and": "logical_and", "or": "logical_or"}
        if e.name not in names or (e.dtype is not boolean and e.name in ("&", "|", "^")):
            raise UnsupportedError(f"the operation {e.name} has no form in ONNX")
        return b.op(names[e.name], *args)  # type: ignore[no-any-return]
