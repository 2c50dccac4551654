"""Ops on stacks of operands: from the record of an op, that of the op on each row.

    t[i] = sum over r of x[i, r] * s[r]    with a stack of x    ->    t[b, i] = sum over r of x[b, i, r] * s[r]

The tensor expression gets one more axis in front of every stage that is not an operand, and with it every load of what
is stacked. So an op with `compute` needs no rule of its own to be applied to many rows; its reference runs per row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dnnc.ir import te
from dnnc.ir.expr import Expr, Load, Var, const, load, rebuild, unwrap, var
from dnnc.ir.op import OpDef, Trait, require
from dnnc.ir.te import Scatter, Stage, Tensor
from dnnc.ir.types import Dim, TensorType

KEPT = frozenset(
    (Trait.PURE, Trait.BITS, Trait.SEQUENTIAL, Trait.LOOPS, Trait.SCATTER)
)  # traits that hold for each row as well


@lru_cache(maxsize=256)
def stacked(
    op: OpDef, which: tuple[bool, ...], types: tuple[TensorType | None, ...], attrs: tuple[tuple[str, Any], ...]
) -> OpDef:
    """The record of an op with `compute` for rows of operands, which gives stacks of results.

    Args:
        op: of one row.
        which: which operands are stacks, with the rows along axis 0.
        types: of the operands, stacks included: those for which the record's traits hold.
        attrs: likewise the attributes.
    """
    assert op.compute is not None

    def rows_of(given: Sequence[Any]) -> list[Any]:
        """The operands' types in one row."""
        return [TensorType(t.dtype, t.shape[1:]) if w and t is not None else t for w, t in zip(which, given)]

    def count(shapes: Sequence[Sequence[Dim]]) -> Dim:
        lead = [s[0] for s in shapes]
        require(all(d is lead[0] or d == lead[0] for d in lead), "stacks of {} rows", lead)
        return lead[0]

    def type_(*given: Any, **attrs: Any) -> Any:
        n = count([t.shape for w, t in zip(which, given) if w])
        made = op.type(*rows_of(given), **attrs)
        many = tuple(TensorType(t.dtype, (n, *t.shape)) for t in (made if isinstance(made, tuple) else (made,)))
        return many if isinstance(made, tuple) else many[0]

    def compute(*xs: Any, **attrs: Any) -> Any:
        n = count([x.dims for w, x in zip(which, xs) if w])
        inner = [te.placeholder(x.name, x.dtype, x.dims[1:]) if w else x for w, x in zip(which, xs)]
        assert op.compute is not None
        made = op.compute(*inner, **attrs)
        many = made if isinstance(made, tuple) else (made,)
        s = _Stacker(n, {i: x for w, i, x in zip(which, inner, xs) if w}, _new_axis(many))
        return tuple(map(s.tensor, made)) if isinstance(made, tuple) else s.tensor(made)

    def reference(*xs: Any, **attrs: Any) -> Any:
        f = op.reference
        assert f is not None
        rows = [
            f(*(x[k] if w else x for w, x in zip(which, xs)), **attrs)
            for k in range(len(next(x for w, x in zip(which, xs) if w)))
        ]
        if rows and isinstance(rows[0], (tuple, list)):
            return tuple(np.stack(r) for r in zip(*rows))
        return np.stack(rows)

    def reference_at(xs: Sequence[Any], points: Any, **attrs: Any) -> Any:
        """The rows that are asked for, each once."""
        asked, back = np.unique(points[:, 0], return_inverse=True)
        made: list[Any] = [None] * len(points)
        for k, row in enumerate(asked):
            own = [x[row] if w else x for w, x in zip(which, xs)]
            here = np.flatnonzero(back.reshape(-1) == k)
            if op.reference_at is not None:
                found = np.asarray(op.reference_at(own, points[here, 1:], **attrs))
            else:
                assert op.reference is not None
                found = np.asarray(op.reference(*own, **attrs))[tuple(points[here, 1:].T)]
            for j, v in zip(here, np.broadcast_to(found, (len(here),))):
                made[j] = v
        return np.array(made)

    def flops(*given: Any, **attrs: Any) -> Any:
        assert op.flops is not None
        return unwrap(const(op.flops(*rows_of(given), **attrs)) * count([t.shape for w, t in zip(which, given) if w]))

    marks = "".join("1" if w else "0" for w in which)
    given = [None if t is None else te.placeholder(f"x{k}", t.dtype, t.shape) for k, t in enumerate(types)]
    made = compute(*given, **dict(attrs))
    traits = (
        (op.traits & KEPT)
        | {Trait.CUSTOM}
        | te.form([x for x in given if x is not None], made if isinstance(made, tuple) else (made,))
    )
    at = None if isinstance(made, tuple) else reference_at
    counted = None if op.flops is None else flops
    return OpDef(
        f"each_{marks}_{op.name}", type_, compute, reference=reference, reference_at=at, flops=counted, traits=traits
    )


def _new_axis(outputs: Sequence[Tensor]) -> str:
    """A name that no axis of the stages has: stacks of stacks of equal lengths have different axes."""
    taken = {v.name for t in te.stages(outputs) if t.stage is not None for v in (*t.stage.axes, *t.stage.reduce)}
    return next(name for name in (f"b{k}" for k in itertools.count()) if name not in taken)


class _Stacker:
    """Rewrites stages: `known` maps placeholders of a row to their stacks, `axis` names the axis of rows."""

    def __init__(self, rows: Dim, known: dict[Tensor, Tensor], axis: str) -> None:
        self.rows, self.known = rows, known
        self.row: Var = var(axis, lo=0, hi=unwrap(const(rows) - 1))
        self.memo: dict[Expr, Expr] = {}

    def tensor(self, t: Tensor) -> Tensor:
        found = self.known.get(t)
        if found is not None or t.stage is None:
            return found or t
        s = t.stage
        shape = (const(self.rows), *t.shape)
        own = None
        if s.own is not None:
            own = self.known[s.own] = te.placeholder(s.own.name, s.own.dtype, (self.rows, *s.own.dims))
        where = None if s.where is None else self.expr(s.where)
        put = None if s.updates is None else self.updates(s.updates)
        stage = Stage((self.row, *s.axes), self.expr(s.value), s.reduce, s.combine, where, own, put)
        made = Tensor(t.name, t.dtype, shape, stage=stage)
        self.known[t] = made
        return made

    def updates(self, u: Scatter) -> Scatter:
        return Scatter((self.row, *u.axes), (self.row, *map(self.expr, u.index)), self.expr(u.value), u.combine)

    def expr(self, e: Expr) -> Expr:
        r = self.memo.get(e)
        if r is None:
            r = self.memo[e] = self._expr(e)
        return r

    def _expr(self, e: Expr) -> Expr:
        if isinstance(e, Load) and isinstance(e.buf, Tensor):
            t = self.tensor(e.buf)
            idx = tuple(map(self.expr, e.idx))
            return load(t, idx if t is e.buf else (self.row, *idx))
        return rebuild(e, self.expr)
