"""Which outputs may lie where an input of their group is: those that read it only at the element they write, or ahead
of it in the row that they write.

    y = relu(add(x, b))  with x read nowhere later   ->   y takes x's memory, the kernel has one parameter for both

    y = softmax(x)   ->   y takes x's memory: a row's maximum and sum are computed before its first element is stored

An output may take the memory of an input that was donated for it, and no other.

    y = scatter_nd(x, at, updates)   ->   updates are put into x's memory, and nothing is copied

Only groups without an anchor, scatters, and those over rows: a contraction's tiles overlap at the end of a row, and the
second store would read what the first wrote. So the update of a large donated array is kept apart from the product of
its gradient (`fuse`), unless the target's kernels store each element once and may store several arrays
(`stores_several`). Of several outputs, each may take an input that no store ahead of its own overwrites.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

from dnnc.ir.expr import Expr, Load, Var, const, walk
from dnnc.ir.graph import Graph, Value
from dnnc.ir.loops.stmt import Block, Buffer, Eval, For, If, Stmt, Store, accesses, walk_stmts
from dnnc.passes.analysis.alias import root
from dnnc.passes.analysis.rows import rows_of
from dnnc.passes.lower.likeness import likeness
from dnnc.passes.lower.nests import Lowered, group_inputs, lower
from dnnc.passes.lower.scatter import Scattered
from dnnc.passes.planning.fuse import FusionPlan, Group

Aliases = Mapping[Value, tuple[Value, int]]


def find_inplace(graph: Graph, plan: FusionPlan) -> dict[Value, Value]:
    """Return the input that each output may overwrite in place; the memory plan decides whether it is dead."""
    out: dict[Value, Value] = {}
    alike: dict[Hashable, list[tuple[int, int]]] = {}  # outputs and inputs by number; like groups are lowered once
    aliases = {v: (source, at) for v, source, at in plan.views}
    donated = {root(aliases, graph.outputs[k])[0]: graph.inputs[j] for k, j in graph.donated.items()}
    for g in plan.groups:
        several = g.kind in ("reduction", "contraction") and len(g.outputs) > 1
        if g.kind in ("map", "scatter") or several or _over_rows(g):
            wanted = {v: _wanted(graph, g, v, aliases, donated) for v in g.outputs}
            if not any(wanted.values()):
                continue
            values = [*group_inputs(g.nodes), *g.outputs]
            numbers = tuple(tuple(map(values.index, xs)) for xs in wanted.values())
            key = likeness(graph, g.nodes, g.outputs), numbers
            if key not in alike:
                alike[key] = [(values.index(y), values.index(x)) for y, x in _pairs(graph, g, wanted).items()]
            out.update((values[y], values[x]) for y, x in alike[key])
    return out


def _over_rows(g: Group) -> bool:
    """Are the elements of a group's output those of the rows that it reduces?"""
    return any(rows is not None and rows.of_elements(g.outputs[0]) for rows in map(rows_of, g.nodes))


def _wanted(graph: Graph, g: Group, output: Value, aliases: Aliases, donated: Mapping[Value, Value]) -> list[Value]:
    """The inputs that an output could take by their type, and by whose memory they are."""
    whole, at = root(aliases, output)
    donor = donated.get(whole)
    if donor is None and graph.is_output(output):
        return []
    wanted = [v for v in group_inputs(g.nodes) if v.type == output.type and not graph.variance(v).call_invariant]
    if donor is None:
        wanted = [v for v in wanted if v.node is not None]
    else:
        wanted = [v for v in wanted if root(aliases, v) == (donor, 0) and at == 0]
    read = [root(aliases, v)[0] for v in group_inputs(g.nodes)]
    # what is read through another value too is read at other places
    return [v for v in wanted if read.count(root(aliases, v)[0]) == 1]


def _pairs(graph: Graph, g: Group, wanted: Mapping[Value, list[Value]]) -> dict[Value, Value]:
    """Outputs with the input that each may overwrite."""
    out: dict[Value, Value] = {}
    low = lower(graph, g.nodes, g.outputs)
    for y, choices in wanted.items():
        for x in choices:
            if x in low.params and x not in out.values() and _only_where_stored(low, _buffer(low, x), _buffer(low, y)):
                out[y] = x
                break
    if len(g.outputs) > 1 and out and not _in_any_order(low, out):
        low = lower(graph, g.nodes, g.outputs, out)  # stores are in another order
        out = {y: x for y, x in out.items() if _read_before(low, _buffer(low, x))}
    return out


def _in_any_order(low: Lowered, pairs: Mapping[Value, Value]) -> bool:
    """Do all stores stand together, and can they be put in order so that none overwrites what a later one reads?"""
    placed = [(s, loops) for s, loops in _placed(low.kernel.entry.body) if isinstance(s, Store)]
    left = [s for s, _ in placed if s.buf.space == "global"]
    if len({loops for s, loops in placed if s.buf.space == "global"}) > 1:
        return False
    read = {s: {a.buf for a in walk(s.value) if isinstance(a, Load)} for s in left}
    taken = {_buffer(low, y): _buffer(low, x) for y, x in pairs.items()}
    while left:
        first = next((s for s in left if not any(taken.get(s.buf) in read[w] for w in left if w is not s)), None)
        if first is None:
            return False
        left.remove(first)
    return True


def _buffer(low: Lowered, v: Value) -> Buffer:
    return low.kernel.entry.buffers[low.params.index(v)]


def _only_where_stored(low: Lowered, x: Buffer, y: Buffer) -> bool:
    """Is x read at no other elements than those of y that are computed of them, or whose rows are?"""
    if isinstance(low.form, Scattered):
        return low.form.starts_as(x, y)
    placed = list(_placed(low.kernel.entry.body))
    stores = [(s, loops) for s, loops in placed if isinstance(s, Store) and s.buf is y]
    if len(stores) != 1:
        return False
    store, around = stores[0]
    sources = _sources(store, [s for s, _ in placed])
    stored = False
    for s, loops in placed:
        stored = stored or s is store
        read = [a for a in accesses((s,)) if a.buf is x]
        if not read:
            continue
        if not isinstance(s, Store) or not all(isinstance(a, Load) for a in read):
            return False
        if s.buf.space == "global":
            ok = all(_element(x, a.idx) == _element(y, store.idx) for a in read)
        else:  # the row's numbers are there before any of its elements is stored, which waits for them
            shared = [v for v, w in zip(loops, around) if v is w]
            ok = not stored and s.buf in sources and all(_same_row(shared, a.idx, store.idx) for a in read)
        if not ok:
            return False
    return True


def _sources(store: Store, body: Sequence[Stmt]) -> set[Buffer]:
    """The buffers that what is stored is computed of, directly or through others."""
    found, todo = set[Buffer](), [store]
    while todo:
        fresh = {a.buf for a in walk(todo.pop().value) if isinstance(a, Load)} - found
        found |= fresh
        todo += [s for s in body if isinstance(s, Store) and s.buf in fresh and s.buf.space != "global"]
    return found


def _placed(body: Block, loops: tuple[Var, ...] = ()) -> Iterator[tuple[Stmt, tuple[Var, ...]]]:
    """Statements in order, each with the variables of the loops around it."""
    for s in body:
        if isinstance(s, For):
            yield Eval("range", (s.lo, s.hi)), loops
            yield from _placed(s.body, (*loops, s.var))
        elif isinstance(s, If):
            yield Eval("if", (s.cond,)), loops
            yield from _placed((*s.then, *s.other), loops)
        else:
            yield s, loops


def _same_row(shared: Sequence[Var], read: Sequence[Expr], stored: Sequence[Expr]) -> bool:
    """Does each loop around both choose the rows of both, so that no iteration touches the rows of another?"""
    return all(any(i is v and j is v for i, j in zip(read, stored)) for v in shared)


def _element(buf: Buffer, index: Sequence[Expr]) -> tuple[Expr, ...]:
    """The index of an element, without a loop along an axis of one element."""
    return tuple(const(0) if d is const(1) else i for d, i in zip(map(const, buf.shape), index))


def _read_before(low: Lowered, buf: Buffer) -> bool:
    """Does no statement read a buffer behind the one that writes it?"""
    written = False
    for s in walk_stmts(low.kernel.entry.body):
        if not isinstance(s, Store):
            continue
        if written and any(isinstance(a, Load) and a.buf is buf for a in walk(s.value)):
            return False
        written = written or s.buf is buf
    return True
