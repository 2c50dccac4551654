"""Element-wise work on blocked values whose results lie in rows is done in rows, where that saves packing.

    m1 = add(pack(mul(m, 0.9), layout=L), g)            r = pack(g, layout=None)
    w1 = sub(p, mul(m1, rate))                          m1 = add(mul(m, 0.9), r)
    return pack(w1, layout=None),                ->     w1 = sub(w, mul(m1, rate))
           pack(m1, layout=None),                       return w1, m1, r
           pack(g, layout=None)

p is `pack(w, layout=L)`, which a convolution reads. So are the updates of filters whose owner wants them in rows. Where
a program keeps its state in blocks nothing is packed, and nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator

from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.op import Trait
from dnnc.ir.types import ROW_MAJOR, Dense, Encoding, TensorType

SAVED = 2  # packs, from which on it is worth it: one becomes part of the kernel before or behind it


def results_in_rows(graph: Graph) -> bool:
    """Rewrite each connected part of a graph. Returns whether anything changed."""
    changed, seen = False, set[Node]()
    for n in list(graph.nodes()):
        if n in seen or _blocks(n) is None:
            continue
        part = _connected(n)
        seen |= part
        if _saved(graph, part) >= SAVED:
            _move(graph, [m for m in graph.nodes() if m in part])
            changed = True
    return changed


def _blocks(n: Node) -> Encoding | None:
    """The layout in which an element-wise node computes; None for other nodes, and for those on rows."""
    if Trait.ELEMENTWISE not in n.op.traits or len(n.outputs) != 1:
        return None
    encoding = n.output.type.encoding
    return None if encoding == ROW_MAJOR or not isinstance(encoding, Dense) else encoding


def _whole(n: Node) -> list[tuple[int, Value]]:
    """The operands of a node that lie as its result does, by number."""
    t = n.output.type
    return [
        (k, v)
        for k, v in enumerate(n.inputs)
        if v is not None and v.type.shape == t.shape and v.type.encoding == t.encoding
    ]


def _connected(n: Node) -> set[Node]:
    """The element-wise nodes on blocks that a node hangs together with."""
    part, todo = {n}, [n]
    while todo:
        m = todo.pop()
        near = [v.node for _, v in _whole(m)] + [u for u, _ in m.output.uses]
        for u in near:
            if (
                u is not None
                and u not in part
                and _blocks(u) == _blocks(n)
                and u.output.type.shape == m.output.type.shape
            ):
                part.add(u)
                todo.append(u)
    return part


def _packed(v: Value) -> Value | None:
    """What a value is packed of, if that lies in rows."""
    n = v.node
    source = n.inputs[0] if n is not None and Trait.RELAYOUT in n.op.traits else None
    return source if source is not None and source.type.row_major else None


def _unpacks(v: Value) -> list[Node]:
    """The nodes that put a value into rows."""
    return [u for u, _ in v.uses if Trait.RELAYOUT in u.op.traits and u.output.type.row_major]


def _operands(part: set[Node]) -> Iterator[Value]:
    """The blocked values that nodes read of others, each once."""
    made = {m.output for m in part}
    yield from dict.fromkeys(v for m in part for _, v in _whole(m) if v not in made)


def _saved(graph: Graph, part: set[Node]) -> int:
    """How many packs fewer there are in rows."""
    results, now, then = set(graph.outputs), 0, 0
    for m in part:
        if m.output in results or any(
            v is not None and not v.type.row_major and (k, v) not in _whole(m) for k, v in enumerate(m.inputs)
        ):
            return 0
        rows = _unpacks(m.output)
        now += bool(rows)
        then += any(u not in part and u not in rows for u, _ in m.output.uses)
    for v in _operands(part):
        if _packed(v) is not None:
            now += all(u in part for u, _ in v.uses)
        elif v.node is None:
            return 0
        else:
            then += not _unpacks(v)
    return now - then


def _move(graph: Graph, part: list[Node]) -> None:
    """Let nodes, in order of the graph, compute in rows."""
    rows = {v: _packed(v) or _unpacked(graph, v) for v in _operands(set(part))}
    for m in part:
        encoding = m.output.type.encoding
        assert isinstance(encoding, Dense)
        for k, v in enumerate(m.inputs):
            if v in rows:
                m.set_input(k, rows[v])
        others = [(u, k) for u, k in m.output.uses if u not in part and u not in _unpacks(m.output)]
        unpacks = _unpacks(m.output)
        m.output.type = TensorType(m.output.type.dtype, m.output.type.shape)
        for u in unpacks:
            graph.replace_all_uses(u.output, m.output)
            graph.erase(u)
        if others:
            packed = Builder(graph, m.next, m.locs).op("pack", m.output, layout=encoding.layout)
            for u, k in others:
                u.set_input(k, packed)


def _unpacked(graph: Graph, v: Value) -> Value:
    """A value in rows, ahead of all that reads it so."""
    assert v.node is not None
    before = _unpacks(v)
    made = Builder(graph, v.node.next, v.locs).op("pack", v, layout=None)
    assert isinstance(made, Value)
    for u in before:
        graph.replace_all_uses(u.output, made)
        graph.erase(u)
    return made
