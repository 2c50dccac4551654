"""Tensor expressions in NumPy: the reference of ops that are defined by nothing else. Slow, and in float64 throughout.

In: tensors of an op's `compute`, arrays for its operands, and the points that are wanted. Out: the elements there. Only
what these need is computed. Integers wrap; floats are float64 but where the expression rounds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dnnc.ir.dtype import DType, i64
from dnnc.ir.expr import Const, Expr, Linear, Load, Op, Product, Var, extent, value
from dnnc.ir.loops.interp_values import BINARY
from dnnc.ir.loops.intrinsics import TABLE, cast_numpy, cast_target
from dnnc.ir.te import Tensor, identity

Array = np.ndarray[Any, Any]
CHUNK = 1 << 20  # terms of reductions that are computed at once
_JOIN: dict[str, Any] = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "fmax": np.fmax}


def elements(t: Tensor, operands: Mapping[Tensor, Array], points: Array) -> Array:
    """Return elements at `points`, int64 [n, rank]. IndexError: a run-time index lies outside of its axis."""
    with np.errstate(all="ignore"):
        return _Run(operands).at(t, [points[:, k] for k in range(points.shape[1])], len(points))


def whole(t: Tensor, operands: Mapping[Tensor, Array]) -> Array:
    """All elements of a tensor."""
    shape = sizes(t.shape)
    points = np.stack(np.unravel_index(np.arange(math.prod(shape)), shape), 1) if shape else np.zeros((1, 0), np.int64)
    return elements(t, operands, points.astype(np.int64)).reshape(shape)


def sizes(shape: Sequence[Expr]) -> tuple[int, ...]:
    """A shape of numbers."""
    found = [value(d) for d in shape]
    if any(n is None for n in found):
        raise ValueError(f"a tensor of symbolic shape {list(shape)} has no elements")
    return tuple(int(n) for n in found if n is not None)


def held(v: Any, dtype: DType) -> Array:
    """A number as the interpreter keeps one of this type."""
    a = np.asarray(v)
    return a.astype(np.float64) if dtype.is_float else a if a.dtype == dtype.numpy else cast_numpy(a, dtype)


def put_in_order(out: Array, at: tuple[Array, ...], new: Array, combine: str) -> None:
    """Apply `out[at] = combine(out[at], new)` in order and in place; `at` has an index for each axis of `out`."""
    if combine != "last":
        _JOIN[combine].at(out, at, new)
        return
    flat = np.ravel_multi_index(at, out.shape) if out.ndim else np.zeros(len(new), np.int64)
    where, first = np.unique(flat[::-1], return_index=True)
    out.reshape(-1)[where] = new[::-1][first]


class _Run:
    def __init__(self, operands: Mapping[Tensor, Array]) -> None:
        self.operands = operands
        self.rows: dict[Tensor, Array] = {}  # what is there already of tensors whose elements need those before

    def at(self, t: Tensor, index: list[Array], n: int) -> Array:
        """n elements of a tensor."""
        if t in self.operands:
            return held(self._picked(self.operands[t], index, n, t.name), t.dtype.computed)
        if t in self.rows:
            return self._picked(self.rows[t], index, n, t.name)
        stage = t.stage
        if stage is None:
            raise KeyError(f"no array is given for {t.name}")
        if stage.own is not None:
            return self._picked(self._in_order(t), index, n, t.name)
        if stage.updates is not None:
            return self._picked(self._scattered(t), index, n, t.name)
        env = dict(zip(stage.axes, index))
        if stage.reduce:
            return self._reduced(t, env, n)
        return np.broadcast_to(held(self.value(stage.value, env, n), t.dtype.computed), (n,))

    @staticmethod
    def _picked(a: Array, index: list[Array], n: int, name: str) -> Array:
        for k, i in enumerate(index):
            if np.size(i) and not (np.min(i) >= 0 and np.max(i) < a.shape[k]):
                raise IndexError(
                    f"{name}: index {int(np.min(i) if np.min(i) < 0 else np.max(i))} of axis {k}, which has "
                    f"{a.shape[k]} elements"
                )
        return np.broadcast_to(a[tuple(index)], (n,))

    def _reduced(self, t: Tensor, env: dict[Var, Array], n: int) -> Array:
        stage = t.stage
        assert stage is not None
        wide = t.dtype.computed
        extents = sizes([1 + v.hi if isinstance(v.hi, Expr) else extent(v) for v in stage.reduce])
        terms = math.prod(extents)
        out = np.full(n, identity(stage.combine, wide), np.float64 if wide.is_float else wide.numpy)
        steps = np.unravel_index(np.arange(terms), extents)
        many = max(1, CHUNK // max(terms, 1))
        for s in range(0, n if terms else 0, many):
            part = {v: np.broadcast_to(i, (n,))[s : s + many] for v, i in env.items()}
            rows = min(many, n - s)
            inner = {v: np.repeat(i, terms) for v, i in part.items()}
            inner.update((v, np.tile(k, rows)) for v, k in zip(stage.reduce, steps))
            out[s : s + many] = self._combined(t, inner, rows, terms)
        return out

    def _combined(self, t: Tensor, env: dict[Var, Array], rows: int, terms: int) -> Array:
        stage = t.stage
        assert stage is not None
        wide, total = t.dtype.computed, rows * terms
        values = np.full(total, identity(stage.combine, wide), np.float64 if wide.is_float else wide.numpy)
        if stage.where is None:
            values[:] = held(self.value(stage.value, env, total), wide)
        else:  # elsewhere the value may not even be defined
            here = np.flatnonzero(np.broadcast_to(self.value(stage.where, env, total), (total,)))
            if len(here):
                values[here] = held(self.value(stage.value, {v: i[here] for v, i in env.items()}, len(here)), wide)
        reduced: Array = _JOIN[stage.combine].reduce(values.reshape(rows, terms), axis=1)
        return reduced

    def _in_order(self, t: Tensor) -> Array:
        """A tensor whose elements need those before along the last axis."""
        stage = t.stage
        assert stage is not None and stage.own is not None
        if t not in self.rows:
            shape = sizes(t.shape)
            own = self.rows[stage.own] = np.zeros(
                shape, np.float64 if t.dtype.computed.is_float else t.dtype.computed.numpy
            )
            rows = math.prod(shape[:-1])
            lead = np.unravel_index(np.arange(rows), shape[:-1]) if shape[:-1] else ()
            for k in range(shape[-1]):
                env = dict(zip(stage.axes, [*lead, np.full(rows, k)]))
                own.reshape(rows, shape[-1])[:, k] = held(self.value(stage.value, env, rows), t.dtype.computed)
            self.rows[t] = own
        return self.rows[t]

    def _scattered(self, t: Tensor) -> Array:
        """A tensor some of whose elements are updated, all of it."""
        stage = t.stage
        assert stage is not None and stage.updates is not None
        if t not in self.rows:
            put, shape = stage.updates, sizes(t.shape)
            out = self._everywhere(stage.value, stage.axes, shape, t.dtype.computed).reshape(shape)
            extents = sizes([1 + v.hi if isinstance(v.hi, Expr) else extent(v) for v in put.axes])
            if math.prod(extents):
                at = tuple(self._everywhere(i, put.axes, extents, i64) for i in put.index)
                for i, size in zip(at, shape):
                    if i.min() < 0 or i.max() >= size:
                        raise IndexError(
                            f"{t.name}: an update of element {int(i.min() if i.min() < 0 else i.max())} of an axis "
                            f"with {size}"
                        )
                put_in_order(out, at, self._everywhere(put.value, put.axes, extents, t.dtype.computed), put.combine)
            self.rows[t] = out
        return self.rows[t]

    def _everywhere(self, e: Expr, axes: Sequence[Var], shape: tuple[int, ...], dtype: DType) -> Array:
        """An expression for all values of its axes, flat."""
        n = math.prod(shape)
        points = np.unravel_index(np.arange(n), shape) if n else [np.zeros(0, np.int64)] * len(shape)
        return np.array(np.broadcast_to(held(self.value(e, dict(zip(axes, points)), n), dtype), (n,)))

    # --- expressions --------------------------------------------------------------------------------------------------

    def value(self, e: Expr, env: Mapping[Var, Array], n: int) -> Array:
        """An expression for n assignments of its variables."""
        memo: dict[Expr, Any] = {}

        def go(x: Expr) -> Any:
            r = memo.get(x)
            if r is None:
                r = memo[x] = self._value(x, env, n, go)
            return r

        return np.asarray(go(e))

    def _value(self, e: Expr, env: Mapping[Var, Array], n: int, go: Callable[[Expr], Any]) -> Any:
        if isinstance(e, Var):
            return env[e]
        if isinstance(e, Const):
            return (
                np.float64(e.value)
                if e.dtype.is_float
                else np.array(e.value & ((1 << 64) - 1), np.uint64).astype(e.dtype.numpy)[()]  # type: ignore[operator]
            )
        if isinstance(e, Linear):
            return sum((go(t) * c for t, c in e.terms), np.int64(e.const))
        if isinstance(e, Product):
            return math.prod(map(go, e.factors))
        if isinstance(e, Load):
            return self._loaded(e, go, n)
        assert isinstance(e, Op)
        return self._operate(e, [go(a) for a in e.args])

    def _loaded(self, e: Load, go: Callable[[Expr], Any], n: int) -> Array:
        """Elements of a tensor, each that is wanted several times computed once."""
        t = e.buf
        assert isinstance(t, Tensor)
        index = [np.broadcast_to(np.asarray(go(i), np.int64), (n,)) for i in e.idx]
        if t in self.operands or t in self.rows or not index:
            return self.at(t, index, n)
        asked, back = np.unique(np.stack(index, 1), axis=0, return_inverse=True)
        return self.at(t, [asked[:, k] for k in range(len(index))], len(asked))[back.reshape(-1)]

    @staticmethod
    def _operate(e: Op, args: list[Any]) -> Any:
        if e.name in BINARY:
            return BINARY[e.name](*args)
        if e.name == "select":
            return np.where(*args)
        target = cast_target(e.name)
        if target is not None:
            to, bits = target
            if bits:
                own = e.args[0].dtype
                word = np.ascontiguousarray(np.asarray(args[0]).astype(own.numpy)).view(to.numpy)
                return word.astype(np.float64) if to.is_float else word
            smaller = to.is_float and e.args[0].dtype.is_float and to.bits < e.args[0].dtype.bits
            a = np.asarray(args[0])
            return (a.astype(to.numpy) if smaller else a).astype(np.float64) if to.is_float else cast_numpy(a, to)
        if e.name == "guard":
            i, lo, hi = map(np.asarray, args)
            if (i < lo).any() or (i >= hi).any():
                raise IndexError(
                    f"index {int(i.min() if (i < lo).any() else i.max())} of an axis with {int(np.max(hi))} elements"
                )
            return i
        record = TABLE.get(e.name)
        if record is None or record.meaning is None or record.collective:
            raise ValueError(f"{e.name} is no function of numbers")
        made = np.asarray(record.meaning(*args))
        return made.astype(np.float64 if e.dtype.is_float else e.dtype.numpy, copy=False)
