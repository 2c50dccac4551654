"""Loops, branches and host steps in random graphs: recipes as in random_recipes.py, with graphs of their own inside.

A body is made by a Generator of its own, on the values of the first iteration; the whole loop is then interpreted as
any other node is. What a body makes from new inputs or constants of the graph around it becomes a captured operand.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dnnc.ir.dtype import boolean, i64
from dnnc.ir.expr import dim
from dnnc.ir.types import TensorType
from support.random_graphs import Array, Generator, Made

MAX_DEPTH = 2
MAX_TRIPS = 6


def _take(body: Generator, m: Made, exact: Array, rounded: Array, type_: TensorType) -> Made:
    """A value of the graph around as an input of the body, holding what it holds in the first iteration."""
    made = Made(body.graph.add_input("a", type_), exact, rounded, m.error)
    body.pool.append(made)
    return made


def _whole(body: Generator, m: Made) -> Made:
    return _take(body, m, m.exact, m.rounded, m.type)


def _fill(body: Generator, nodes: int) -> None:
    focus = [body.one_of(body.recipes) for _ in range(2)]
    for _ in range(3 * nodes):
        if len(body.graph) >= nodes:
            return
        body.one_of(focus if body.chance(0.4) else body.recipes)(body)


def _of_type(body: Generator, t: TensorType, likely: Sequence[Made] = ()) -> Made | None:
    """A value of this type, made in the body where there is one; bounded, so that it may go around many times."""
    fits = [m for m in body.pool if m.type == t]
    made = [m for m in fits if m.value.node is not None]
    if not made and likely:
        some = (
            body.add("neg", body.one_of(likely)) if t.dtype.kind in "fi" else body.add("identity", body.one_of(likely))
        )
        made = [some] if some is not None else []
    if not made or body.chance(0.1):
        return body.one_of(fits) if fits else None
    m: Made | None = body.one_of(made)
    assert m is not None
    return body.add(body.one_of(("tanh", "sigmoid")), m) if t.dtype.is_float and body.chance(0.6) else m


def loop(g: Generator) -> None:
    """A loop with carried values, scanned and stacked rows, captured values, a trip count, a condition."""
    if g.depth >= MAX_DEPTH:
        return
    body = g.inner("body")
    number = Made(body.graph.add_input("k", TensorType(i64, ())), np.array(0), np.array(0), 0.0)
    carried = [g.pick("fiub") for _ in range(1 + g.below(2))]
    rows = (
        [m for m in g.pool if m.type.shape and isinstance(m.type.shape[0], int) and 0 < m.type.shape[0] <= 9]
        if g.chance(0.5)
        else []
    )
    length = g.one_of(rows).shape[0] if rows else g.below(MAX_TRIPS) + g.chance(0.8)
    scanned = [g.one_of([m for m in rows if m.shape[0] == length]) for _ in range(1 + g.below(2))] if rows else []
    inside = [_whole(body, m) for m in carried]
    backward = [g.chance(0.3) for _ in scanned]
    for m, back in zip(scanned, backward):
        at = -1 if back else 0
        _take(body, m, m.exact[at], m.rounded[at], TensorType(m.dtype, m.type.shape[1:]))
    if g.chance(0.5):
        body.pool.append(number)
    for _ in range(g.below(3)):
        body.capture(g.pick("fiub"))
    _fill(body, 1 + g.below(5))
    last = [_of_type(body, m.type, [m]) for m in inside]
    if any(m is None for m in last):
        return
    results = [m.value for m in last if m is not None]
    stacks = g.chance(0.6)
    made = [m.value for m in body.pool if m.value.node is not None]
    stacked = [g.one_of(made) for _ in range(1 + g.below(2))] if made and stacks else []
    condition, trips = None, None
    if not stacked and g.chance(0.5):
        holds = body.add("less", number, body.number(i64, g.below(MAX_TRIPS)))
        assert holds is not None
        results.insert(0, holds.value)
        condition = g.source("b", (), boolean)
    if not stacked and g.chance(0.4):
        trips = g.source("i", (), i64, 0, MAX_TRIPS)
    bounded = bool(scanned or stacked or trips is condition is None)
    body.graph.outputs = results + stacked
    back_all = (*backward, *(g.chance(0.2) for _ in stacked)) if g.chance(0.8) or any(backward) else ()
    g.add(
        "loop",
        trips,
        condition,
        *carried,
        *scanned,
        *body.captured,
        body=body.graph,
        carried=len(carried),
        scanned=len(scanned),
        length=length if bounded or g.bounds_all or g.chance(0.5) else None,
        backward=back_all,
    )


def branch(g: Generator) -> None:
    """A branch whose bodies share what they capture."""
    if g.depth >= MAX_DEPTH:
        return
    then, other = g.inner("then"), g.inner("other")
    shared = [g.pick("fiub") for _ in range(1 + g.below(2))]
    for body in (then, other):
        for m in shared:
            body.capture(m)
        _fill(body, g.below(4) + (body is then))
    wanted = [m for m in then.pool if m.value.node is not None] or then.pool
    results = [g.one_of(wanted) for _ in range(1 + g.below(2))]
    matching: list[Made | None] = [
        _of_type(other, m.type, [x for x in other.pool if x.type == m.type]) for m in results
    ]
    for k, found in enumerate(matching):
        if found is None and other.dims(results[k].shape) == results[k].type.shape:
            matching[k] = other.source(results[k].dtype.kind, results[k].shape, results[k].dtype)
    if any(m is None or m.type != r.type for m, r in zip(matching, results)):
        return
    then.graph.outputs, other.graph.outputs = [m.value for m in results], [m.value for m in matching if m is not None]
    own = other.captured[len(shared) :]
    for m in own:  # each body takes what the other captures, too
        then.graph.add_input("unused", m.type)
    theirs = [other.graph.add_input("unused", m.type) for m in then.captured[len(shared) :]]
    order = other.graph.inputs
    order[:] = [*order[: len(shared)], *theirs, *order[len(shared) : len(order) - len(theirs)]]
    g.add("cond", _condition(g), *then.captured, *own, then=then.graph, other=other.graph)


def _condition(g: Generator) -> Made:
    """One bool: given, or computed."""
    if g.chance(0.5):
        return g.source("b", (), boolean)
    m: Made | None = g.pick("f")
    if m is not None:
        m = g.add("reduce_max", m, axes=tuple(range(len(m.shape))), keepdims=False)
    m = m and g.add("greater", m, g.number(m.dtype, g.rng.uniform(-1, 1)))
    return m if m is not None else g.source("b", (), boolean)


def host(g: Generator) -> None:
    """A result whose size only the data tells."""
    if g.depth:
        return
    m = g.pick("fiub", 1)
    size = len(g.graph.dims)

    def fresh(most: int) -> object:
        return dim(f"n{size}", 0, max(most, 1))

    kind = g.one_of(("nonzero", "compress", "unique", "truncate", "measure"))
    if isinstance(m.type.size, int) and kind == "nonzero":
        g.add("nonzero", m, size=fresh(m.exact.size))
    elif isinstance(m.type.size, int) and kind == "unique" and m.dtype.kind in "fiu":
        g.add("unique", m, size=fresh(m.exact.size), sorted=g.chance(0.7))
    elif isinstance(m.type.shape[0], int) and kind == "compress":
        g.add("compress", m, g.source("b", m.shape[:1], boolean), size=fresh(m.shape[0]), axis=0)
    elif isinstance(m.type.shape[0], int) and kind == "truncate":
        g.add("truncate", m, g.source("i", (), i64, 0, m.shape[0]), size=fresh(m.shape[0]))
    elif kind == "measure":
        g.add("measure", g.source("i", (), i64, 0, 9), size=fresh(9))


CONTROL_RECIPES = (loop, loop, branch, host)
