"""Branches and loops on stacks of rows.

A branch that a stack decides runs both ways, and each row takes its own result. A loop whose end a stack decides runs
until all rows are done; rows that are done keep their state. What a row that is not meant to run could do wrong must
not happen: an index outside of its axis is an error, and an inner loop may not end. So branches with such ops run row
by row, and loops with such ops give rows that are done the state of one that is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dnnc.array.core import array_of
from dnnc.array.lazy import Lazy, placeholder
from dnnc.array.statistical import any as any_of
from dnnc.frontends.trace.batch import Batch, Operand
from dnnc.frontends.trace.control import values as control_values
from dnnc.frontends.trace.regions import Region
from dnnc.ir import te
from dnnc.ir.dtype import boolean, i64, u8
from dnnc.ir.graph import Graph, Node
from dnnc.ir.op import OpDef
from dnnc.ir.types import TensorType

if TYPE_CHECKING:
    from dnnc.frontends.trace.batching import Batcher


def may_fail(g: Graph) -> bool:
    """True if a graph can fail or loop forever on unintended values. Custom ops check their own indices."""
    return any(any(True for _ in n.subgraphs()) or (n.op.compute is not None and _checks(n)) for n in g.nodes())


def _checks(n: Node) -> bool:
    assert n.op.compute is not None
    made = n.op.compute(
        *(None if v is None else te.placeholder(v.name, v.type.dtype, v.type.shape) for v in n.inputs), **n.attrs
    )
    return te.checks(made if isinstance(made, tuple) else (made,))


def function(batcher: Batcher, b: Batch, op: OpDef, xs: Sequence[Operand], attrs: dict[str, Any]) -> list[Lazy]:
    """An op that holds functions of its operands and of what they make: all of these are stacks."""
    bodies = {
        name: batcher.body(g, [True] * len(g.inputs), [True] * len(g.outputs)) if isinstance(g, Graph) else g
        for name, g in attrs.items()
    }
    return control_values(op.name, [b.stack(x) for x in xs], **bodies)


def row_by_row(b: Batch, op: OpDef, xs: Sequence[Operand], attrs: dict[str, Any]) -> list[Lazy]:
    """Any op, as a loop over the rows."""
    g = Graph(f"each_{op.name}")
    g.add_input("number", TensorType(i64, ()))
    order = sorted((k for k, x in enumerate(xs) if x.value is not None), key=lambda k: not xs[k].stack)
    inner = {k: g.add_input(f"x{k}", xs[k].row) for k in order}
    own = {n: a.copy() if isinstance(a, Graph) else a for n, a in attrs.items()}
    types = op.type(*(None if x.value is None else x.row for x in xs), **own)
    node = g.append(
        Node(op, [inner.get(k) for k in range(len(xs))], own, types if isinstance(types, tuple) else [types], b.locs)
    )
    g.outputs = list(node.outputs)
    stacks = sum(x.stack for x in xs)
    return control_values(
        "loop", [None, None, *(xs[k].value for k in order)], body=g, carried=0, scanned=stacks, length=b.rows
    )


def cond(m: Batcher, b: Batch, op: OpDef, xs: Sequence[Operand], attrs: dict[str, Any]) -> list[Lazy]:
    test, *captured = xs
    then, other = attrs["then"], attrs["other"]
    if not test.stack:
        which, want = [x.stack for x in captured], [True] * len(then.outputs)
        first, second = (m.body(g, which, want) for g in (then, other))
        return control_values("cond", [x.value for x in xs], then=first, other=second)
    if may_fail(then) or may_fail(other):
        return row_by_row(b, op, xs, attrs)
    made = [m.graph(g, captured) for g in (then, other)]
    return [chosen(b, test.given, p, q) for p, q in zip(*made)]


def chosen(b: Batch, test: Lazy, p: Operand, q: Operand) -> Lazy:
    """Rows of p where the test of the row holds, else of q."""
    rank = max(p.rank, q.rank)
    return b.one("where", b.aligned(Operand(test, True), rank), b.stack(p), b.stack(q))


# --- loops ------------------------------------------------------------------------------------------------------------


def loop(m: Batcher, b: Batch, op: OpDef, xs: Sequence[Operand], attrs: dict[str, Any]) -> list[Lazy]:
    trips, condition, *rest = xs
    body, carried, scanned = attrs["body"], attrs["carried"], attrs.get("scanned", 0)
    ends = condition.value is not None
    fixed = [x.stack for x in rest[carried:]]
    state = [x.stack for x in rest[:carried]]
    while True:  # what a stack reaches is a stack from the beginning
        made = spread(body, [False, *state, *fixed])
        after = [x or y for x, y in zip(state, made[ends:])]
        if after == state:
            break
        state = after
    if trips.stack:
        return row_by_row(b, op, xs, attrs)
    if condition.stack or (ends and made[0]):
        return until_all_done(m, b, op, xs, attrs)
    want = [False] * ends + state + [True] * (len(body.outputs) - ends - carried)
    inner = m.body(body, [False, *state, *fixed], want)
    outer = [b.stack(x) if s else x.value for x, s in zip(rest[:carried], state)]
    rows = [rows_first(b, x) for x in rest[carried : carried + scanned]]
    full = {**attrs, "body": inner}
    done = control_values(
        "loop", [trips.value, condition.value, *outer, *rows, *(x.value for x in rest[carried + scanned :])], **full
    )
    ended = [y if s else b.stack(Operand(y, False)) for y, s in zip(done, state)]
    return [*ended, *(swapped(b, y) for y in done[carried:])]


def rows_first(b: Batch, x: Operand) -> Lazy:
    """What a loop takes row by row, with the axis of these rows in front of that of the stack."""
    return swapped(b, x.given) if x.stack else x.given


def swapped(b: Batch, x: Lazy) -> Lazy:
    return b.one("transpose", x, perm=(1, 0, *range(2, len(x.type.shape))))


def until_all_done(m: Batcher, b: Batch, op: OpDef, xs: Sequence[Operand], attrs: dict[str, Any]) -> list[Lazy]:
    """`active` says for each row whether it goes on, and is carried in front of the state."""
    trips, condition, *rest = xs
    body, carried, scanned = attrs["body"], attrs["carried"], attrs.get("scanned", 0)
    if len(body.outputs) > 1 + carried:
        return row_by_row(b, op, xs, attrs)
    active = b.stack(condition)
    states = [b.stack(x) for x in rest[:carried]]
    rows = [rows_first(b, x) for x in rest[carried : carried + scanned]]
    which = [False, *(True for _ in states), *(x.stack for x in rest[carried:])]
    number, *given = (placeholder(m.stacked(v.type) if w else v.type) for v, w in zip(body.inputs, which))
    going = placeholder(TensorType(boolean, (b.rows,)))
    before = given[:carried]
    seen = [borrowed(b, going, x) for x in before] if may_fail(body) else before
    holds, *after = m.graph(body, [Operand(x, w) for x, w in zip([number, *seen, *given[carried:]], which)])
    still = b.one("logical_and", going, b.stack(holds))
    kept = [chosen(b, going, y, Operand(x, True)) for x, y in zip(before, after)]
    names = [body.inputs[0].name, "active", *(v.name for v in body.inputs[1:])]
    inner = Region(body.name, [number, going, *given], names).finish([some(still), still, *kept])
    full = {**attrs, "body": inner, "carried": carried + 1}
    captured = [x.value for x in rest[carried + scanned :]]
    return control_values("loop", [trips.value, some(active), active, *states, *rows, *captured], **full)[1:]


def some(active: Lazy) -> Lazy:
    """Is any row to go on?"""
    return any_of(array_of(active))._parts[0]


def borrowed(b: Batch, active: Lazy, x: Lazy) -> Lazy:
    """The state where a row goes on, else that of the first row that does."""
    first = b.one("argmax", b.one("cast", active, to=u8), axis=0)
    row = b.one("gather", x, first, axis=0)
    return chosen(b, active, Operand(x, True), Operand(row, False))


def spread(g: Graph, which: Sequence[bool]) -> list[bool]:
    """Which outputs of a graph are stacks where these inputs are."""
    env = dict(zip(g.inputs, which))
    for n in g.nodes():
        some = any(env.get(v, False) for v in n.inputs if v is not None)
        env.update((v, some) for v in n.outputs)
    return [env.get(v, False) for v in g.outputs]
