"""Evaluates tensor expressions with NumPy: all elements of a stage at once, as arrays over its axes and reduction
variables.

Strict where generated code would go wrong: an index outside its operand (where the reduction's condition holds), `//`
and `%` of negative numbers, a guarded index outside its range, and a value whose dtype is not the one that registers
hold are errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dnnc.ir.expr import Const, Expr, Linear, Load, Op, Product, Var, const
from dnnc.ir.loops.intrinsics import TABLE, cast_numpy, cast_target
from dnnc.ir.te import Stage, Tensor, stages

Array = Any
BINARY = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide, "//": np.floor_divide, "%": np.remainder,
    "min": np.minimum,
    "max": np.maximum, "<": np.less, "<=": np.less_equal, "==": np.equal, "!=": np.not_equal, "&": np.bitwise_and,
    "|": np.bitwise_or,
    "^": np.bitwise_xor,
}  # fmt: skip
COMBINE = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "fmax": np.fmax}


def evaluate(
    outputs: Sequence[Tensor], inputs: Mapping[Tensor, Array], dims: Mapping[Var, int] | None = None
) -> list[Array]:
    """The arrays of the outputs; `dims` are the values of symbolic dims."""
    arrays: dict[Tensor, Array] = dict(inputs)
    with np.errstate(all="ignore"):
        for t in outputs:
            if t.stage is not None and t.stage.own is not None:
                arrays[t] = in_order(t, arrays, dims or {})
        for t in stages([t for t in outputs if t not in arrays]):
            arrays[t] = run_stage(t, t.stage, arrays, dims or {})
    return [arrays[t] for t in outputs]


def in_order(t: Tensor, inputs: Mapping[Tensor, Array], dims: Mapping[Var, int]) -> Array:
    """A tensor that reads its own elements, column by column; a missing one has a conspicuous value."""
    out = np.full([size(d, dims) for d in t.shape], 99, t.dtype.numpy)
    for k in range(out.shape[-1]):
        arrays = {**inputs, t.stage.own: out.copy()}
        for s in stages([t]):
            arrays[s] = run_stage(s, s.stage, arrays, dims)
        out[..., k] = arrays[t][..., k]
    return out


def size(d: Any, dims: Mapping[Var, int]) -> int:
    return int(Evaluator({}, {k: np.asarray(v) for k, v in dims.items()}).value(const(d)))


def run_stage(t: Tensor, stage: Stage, arrays: Mapping[Tensor, Array], dims: Mapping[Var, int]) -> Array:
    shape = [size(d, dims) for d in t.shape]
    extents = [size(const(r.hi) + 1, dims) for r in stage.reduce]
    assert [size(const(a.hi) + 1, dims) for a in stage.axes] == shape, (
        f"{t.name}: the axes do not have the extents of {shape}"
    )
    assert stage.value.dtype in (t.dtype.computed, t.dtype), (
        f"{t.name}: the value is {stage.value.dtype}, registers hold {t.dtype.computed}"
    )
    grid = np.ogrid[tuple(slice(n) for n in (*shape, *extents))] if shape or extents else []
    env = {v: np.asarray(g) for v, g in zip((*stage.axes, *stage.reduce), grid)} | {
        k: np.asarray(v) for k, v in dims.items()
    }
    full = (*shape, *extents)
    if 0 in shape:
        return np.zeros(shape, t.dtype.numpy)
    if stage.updates is not None:
        return updated(
            t,
            stage,
            np.broadcast_to(Evaluator(arrays, env).value(stage.value), full).astype(t.dtype.numpy),
            arrays,
            dims,
        )
    if not stage.reduce:
        v = Evaluator(arrays, env).value(stage.value)
        return np.broadcast_to(v, full).astype(t.dtype.numpy)
    mask = np.asarray(True) if stage.where is None else Evaluator(arrays, env).value(stage.where)
    combine = COMBINE[stage.combine]
    start = identity(stage)
    over = tuple(range(len(shape), len(full)))
    if 0 in extents:
        return np.full(shape, start).astype(t.dtype.numpy)
    v = np.broadcast_to(np.where(mask, Evaluator(arrays, env, mask).value(stage.value), start), full)
    dtype = stage.value.dtype.numpy
    v = combine.reduce(v.astype(dtype), axis=over, dtype=dtype)
    return np.asarray(v).astype(t.dtype.numpy)


def updated(t: Tensor, stage: Stage, out: Array, arrays: Mapping[Tensor, Array], dims: Mapping[Var, int]) -> Array:
    """The elements after the updates, one by one in their order."""
    put = stage.updates
    assert put.value.dtype in (t.dtype.computed, t.dtype)
    extents = tuple(size(const(v.hi) + 1, dims) for v in put.axes)
    for u in np.ndindex(extents):
        ev = Evaluator(
            arrays, {v: np.asarray(k) for v, k in zip(put.axes, u)} | {k: np.asarray(v) for k, v in dims.items()}
        )
        at = tuple(int(ev.value(i)) for i in put.index)
        assert all(0 <= i < n for i, n in zip(at, out.shape)), f"{t.name}: {at} leaves {out.shape}"
        v = ev.value(put.value)
        out[at] = v if put.combine == "last" else COMBINE[put.combine](out[at].astype(v.dtype), v).astype(out.dtype)
    return out


def identity(stage: Stage) -> Array:
    d = stage.value.dtype
    if stage.combine in ("sum", "prod"):
        return np.asarray(int(stage.combine == "prod")).astype(d.numpy)
    low, high = (-np.inf, np.inf) if d.is_float else d.range
    return np.asarray(high if stage.combine == "min" else low).astype(d.numpy)


class Evaluator:
    def __init__(self, arrays: Mapping[Tensor, Array], env: Mapping[Var, Array], mask: Array | None = None) -> None:
        self.arrays, self.env = arrays, env
        self.mask = np.asarray(True) if mask is None else mask
        self.memo: dict[Expr, Array] = {}

    def value(self, e: Expr) -> Array:
        if e not in self.memo:
            self.memo[e] = self.fresh(e)
        return self.memo[e]

    def fresh(self, e: Expr) -> Array:
        if isinstance(e, Const):
            return np.asarray(e.value).astype(e.dtype.numpy)
        if isinstance(e, Var):
            return self.env[e]
        if isinstance(e, Linear):
            return sum((self.value(t) * c for t, c in e.terms), np.asarray(e.const))
        if isinstance(e, Product):
            r = self.value(e.factors[0])
            for f in e.factors[1:]:
                r = r * self.value(f)
            return r
        if isinstance(e, Load):
            return self.load(e)
        assert isinstance(e, Op), e
        return self.op(e)

    def load(self, e: Load) -> Array:
        a = self.arrays[e.buf]
        at = []
        for i, n in zip(e.idx, a.shape, strict=True):
            v = self.value(i)
            bad = ((v < 0) | (v >= n)) & self.mask
            assert not bad.any(), f"{e!r}: index {i!r} leaves [0, {n})"
            at.append(np.clip(v, 0, n - 1))
        return a[tuple(at)]

    def op(self, e: Op) -> Array:
        args = [self.value(a) for a in e.args]
        if e.name == "select":
            assert e.args[1].dtype is e.args[2].dtype is e.dtype, e
            return np.where(args[0], args[1], args[2])
        if e.name in BINARY:
            assert e.args[0].dtype is e.args[1].dtype, f"{e!r} mixes {e.args[0].dtype} and {e.args[1].dtype}"
            if e.name in ("//", "%") and isinstance(
                e.args[1], Const
            ):  # multiples of a symbolic divisor cancel, and floor semantics is right
                assert ((args[0] >= 0) | ~np.asarray(self.mask)).all(), f"{e!r} divides a negative number"
            safe = [args[0], np.where(args[1] == 0, 1, args[1])] if e.name in ("//", "%") else args
            return BINARY[e.name](*safe)
        target = cast_target(e.name)
        if target is not None:
            return args[0].view(target[0].numpy) if target[1] else cast_numpy(args[0], target[0])
        if e.name == "guard":
            assert (((args[0] >= args[1]) & (args[0] < args[2])) | ~np.asarray(self.mask)).all(), (
                f"{e!r} leaves its range"
            )
        meaning = TABLE[e.name].meaning
        assert meaning is not None
        return np.asarray(meaning(*args)).astype(e.dtype.numpy)
