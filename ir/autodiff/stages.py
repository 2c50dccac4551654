"""The vector-Jacobian product that a tensor expression implies: backward through its stages, from results to operands.

In: the record of an op with `compute`, and types. Out: a plan of records, each one tensor expression, that make the
cotangents of its operands. Each reduction and each scatter is a record of its own: within one kernel the sum of a row
would be computed again for each element that reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dnnc.ir import te
from dnnc.ir.autodiff.gathers import all_of, in_range, transposed
from dnnc.ir.autodiff.scalar import masked, pull
from dnnc.ir.errors import GradientError
from dnnc.ir.expr import (
    Expr,
    Load,
    Var,
    cast,
    const,
    extent,
    load,
    logical_not,
    rebuild,
    select,
    substitute,
    var,
    walk,
)
from dnnc.ir.graph.show import show_definition
from dnnc.ir.graph.text import read_definition
from dnnc.ir.op import OpDef, Trait
from dnnc.ir.te import Scatter, Stage, Tensor
from dnnc.ir.types import TensorType


@dataclass(frozen=True)
class Step:
    """One record of a plan. It reads values by number: operands, results, cotangents, then the steps before it."""

    op: OpDef
    reads: tuple[int, ...]
    sizes: dict[str, Var]  # the symbolic sizes of the record, as attributes of its node


@dataclass(frozen=True)
class Plan:
    """Steps, and for each operand with a cotangent the number of the value that it is."""

    steps: tuple[Step, ...]
    cotangents: Mapping[int, int]


@lru_cache(maxsize=1024)
def plan(
    op: OpDef,
    types: tuple[TensorType | None, ...],
    outputs: tuple[TensorType, ...],
    live: tuple[bool, ...],
    needed: tuple[int, ...],
    attrs: tuple[tuple[str, Any], ...],
) -> Plan:
    """How to compute cotangents of the operands `needed` from operands, results and the results' cotangents.

    Args:
        op: a record with `compute`.
        types: of the operands; None where an optional one is absent.
        outputs: the types of the results.
        live: which results have a cotangent.
        needed: positions of float operands.
        attrs: of the node.

    Raises:
        GradientError: the expression has no derivative by itself.
    """
    assert op.compute is not None
    every = (*types, *outputs, *(t if on else None for t, on in zip(outputs, live)))
    given = [None if t is None else te.placeholder(f"x{k}", t.dtype, t.shape) for k, t in enumerate(every)]
    n, m = len(types), len(outputs)
    made = op.compute(*given[:n], **dict(attrs))
    many = made if isinstance(made, tuple) else (made,)
    operands = {t: k for k in needed if (t := given[k]) is not None}
    found = pullback(many, given[n : n + m], given[n + m :], list(operands))
    wanted = {operands[t]: _rounded(c, t) for t, c in found.items()}
    parts = _parts(list(wanted.values()))
    number = {t: k for k, t in enumerate(given) if t is not None}
    number |= {t: len(every) + k for k, t in enumerate(parts)}
    stand = {t: te.placeholder(f"t{k}", t.dtype, t.shape) for k, t in enumerate(parts)}
    known = {**{t: t for t in given if t is not None}, **stand}
    places = {**{t: k for t, k in number.items() if t.stage is None}, **{stand[t]: number[t] for t in parts}}
    steps = tuple(_step(op.name, replaced(t, {p: q for p, q in known.items() if p is not t}), places) for t in parts)
    return Plan(steps, {k: number[t] for k, t in wanted.items()})


def _rounded(c: Tensor, operand: Tensor) -> Tensor:
    """A cotangent in the dtype of its operand."""
    if c.dtype is operand.dtype:
        return c
    return te.compute(operand.dims, operand.dtype, lambda *i: cast(c[i], operand.dtype.computed), "cotangent")


def _parts(wanted: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of which each is a record of its own, producers first."""
    apart = [t for t in te.stages(wanted) if t.stage is not None and (t.stage.reduce or t.stage.updates or t in wanted)]
    return list(dict.fromkeys(apart))


def _step(name: str, t: Tensor, places: Mapping[Tensor, int]) -> Step:
    read = te.operands((t,))
    xs = [x for x in places if x in read]
    digest = hashlib.sha256(te.text(xs, (t,)).encode()).hexdigest()[:12]
    record = _record(show_definition(f"{name}_vjp_{digest}", xs, (t,)))
    return Step(record, tuple(places[x] for x in xs), te.sizes(xs, (t,)))


@lru_cache(maxsize=4096)
def _record(text: str) -> OpDef:
    """The record of a definition: one for equal texts, so that equal nodes merge. It holds for fixed shapes."""
    op = read_definition(text)
    return replace(op, traits=op.traits - {Trait.ELEMENTWISE, Trait.PLACED})


def replaced(t: Tensor, known: Mapping[Tensor, Tensor]) -> Tensor:
    """A tensor whose stages read others in place of some; its own stage stays."""
    memo: dict[Tensor, Tensor] = dict(known)

    def tensor(x: Tensor) -> Tensor:
        if x not in memo:
            memo[x] = x if x.stage is None else remade(x)
        return memo[x]

    def remade(x: Tensor) -> Tensor:
        s = x.stage
        assert s is not None
        put = s.updates and Scatter(
            s.updates.axes, tuple(map(expr, s.updates.index)), expr(s.updates.value), s.updates.combine
        )
        where = None if s.where is None else expr(s.where)
        return Tensor(x.name, x.dtype, x.shape, stage=replace(s, value=expr(s.value), where=where, updates=put))

    def expr(e: Expr) -> Expr:
        if isinstance(e, Load) and isinstance(e.buf, Tensor):
            return load(tensor(e.buf), map(expr, e.idx))
        return rebuild(e, expr)

    return remade(t)


# --- backward through the stages --------------------------------------------------------------------------------------


def pullback(
    outputs: Sequence[Tensor],
    values: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
    wanted: Sequence[Tensor],
) -> dict[Tensor, Tensor]:
    """The cotangents of operands, as tensor expressions; those without a float path to a live result are absent.

    Args:
        outputs: an op's tensor expressions.
        values: placeholders for their values, which are computed already.
        cotangents: placeholders for their cotangents, None for zero.
        wanted: the operands, which the expressions read.
    """
    order = list(te.stages(outputs))
    reach = set(wanted)
    for t in order:
        assert t.stage is not None
        if any(isinstance(x, Load) and x.buf in reach for e in te.values_of(t.stage) for x in walk(e)):
            reach.add(t)
    parts: dict[Tensor, list[Tensor]] = {}
    for t, c in zip(outputs, cotangents):
        if c is not None:
            parts.setdefault(t, []).append(c)
    known = {t: v for t, v in zip(outputs, values) if v is not None}
    for t in reversed(order):
        if t in reach and t in parts:
            stage = t.stage
            assert stage is not None
            for loops, at, weight in _through(t, stage, known.get(t, t), _total(parts[t])):
                if isinstance(at.buf, Tensor) and at.buf in reach:
                    parts.setdefault(at.buf, []).append(transposed(loops, at, weight))
    return {t: _total(parts[t]) for t in wanted if t in parts}


def _total(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]

    def element(*i: Expr) -> Expr:
        r = parts[0][i]
        for p in parts[1:]:
            r = r + p[i]
        return r

    return te.compute(parts[0].dims, parts[0].dtype.computed, element, "cotangent")


def _through(t: Tensor, s: Stage, known: Tensor, g: Tensor) -> list[tuple[Stage, Load, Expr]]:
    """The loads in a stage with their cotangents, for the stage's own cotangent `g`, each with the loops around it."""
    if s.own is not None:
        raise GradientError("elements that depend on those before them need a rule of their own")
    if s.updates is not None:
        return _through_updates(s, s.updates, g)
    seed = g[s.axes]
    if not s.reduce or s.combine == "sum":
        return _within(s, pull(s.value, seed))
    if s.combine == "fmax":  # a shift on which the result does not depend
        return []
    if s.combine in ("max", "min"):  # equal elements share
        hit = s.value.eq(known[s.axes])
        one = select(hit, const(1.0, s.value.dtype), const(0.0, s.value.dtype))
        count = Tensor("ties", t.dtype.computed, t.shape, stage=Stage(s.axes, one, s.reduce, "sum", s.where))
        return _within(s, pull(s.value, masked(hit, seed / count[s.axes])))
    # the product of the others, which a zero does not spoil
    again = {v: var(f"{v.name}_", lo=0, hi=v.hi) for v in s.reduce}
    differs = logical_not(all_of([a.eq(v) for v, a in again.items()]))
    where = differs if s.where is None else differs & in_range(substitute(s.where, again))
    others = Tensor(
        "others",
        t.dtype.computed,
        (*t.shape, *map(extent, s.reduce)),
        stage=Stage((*s.axes, *s.reduce), substitute(s.value, again), tuple(again.values()), "prod", where),
    )
    return _within(s, pull(s.value, seed * others[(*s.axes, *s.reduce)]))


def _through_updates(s: Stage, put: Scatter, g: Tensor) -> list[tuple[Stage, Load, Expr]]:
    """t[i] = e; t[index(u)] += value   ->   cot e = g[i]; cot value = g[index(u)]"""
    if put.combine != "sum":
        raise GradientError("updates at places that the data tells need a rule of their own")
    updates = Stage(put.axes, put.value)
    return [*_within(s, pull(s.value, g[s.axes])), *_within(updates, pull(put.value, g[put.index]))]


def _within(loops: Stage, loads: list[tuple[Load, Expr]]) -> list[tuple[Stage, Load, Expr]]:
    return [(loops, at, weight) for at, weight in loads]
