"""Divides a graph at what runs on the host: native segments, each a graph of its own to compile, and host nodes, in the
order in which to run.

    n = relu(x); s = string_index(t, k); y = add(n, gather(c, s))   ->   [string_index]  [relu, gather, add]

As few segments as possible: a node's level is the number of changes between native and host that must come before it,
so all native nodes of one level are one segment. Native nodes that depend on no other native node move as far back as
their readers allow, where they fuse. A dim that no input shows has an input without bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Union

from dnnc.ir.dtype import u8
from dnnc.ir.expr import Expr, Var, free
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.op import Trait
from dnnc.ir.ops import OPS
from dnnc.ir.types import TensorType
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.dce import dce
from dnnc.passes.rewrites.decompose import decompose
from dnnc.passes.rewrites.fold import fold


@dataclass(frozen=True)
class Segment:
    """Native nodes as a graph. `inputs`, `outputs`: the whole graph's values for its own, in order.

    `carried`: dims that its last input, an array of no bytes, brings in its shape; empty where there is no such input.
    """

    graph: Graph
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    carried: tuple[Var, ...]


@dataclass(frozen=True)
class HostStep:
    """A node that Python runs."""

    node: Node


Step = Union[Segment, HostStep]


# --- what runs on the host --------------------------------------------------------------------------------------------


def is_host(n: Node) -> bool:
    """Does Python run this node? Host ops, all that touches strings, and control flow around such nodes."""
    if n.op.host is not None or any(v is not None and v.type.dtype.kind == "s" for v in (*n.inputs, *n.outputs)):
        return True
    return any(needs_host(s) for s in n.subgraphs())


def needs_host(g: Graph) -> bool:
    """Can a graph not be one native program?"""
    if any(v.type.dtype.kind == "s" for v in (*g.inputs, *g.outputs)):
        return True
    return any(Trait.HOST in n.op.traits or is_host(n) for n in g.nodes())


def prepare(g: Graph, ctx: PassContext) -> None:
    """What must precede the division, in place: what constants tell, and the decompositions that have host nodes."""
    fold(g, ctx)
    if decompose(g, ctx, keep=[name for name, op in OPS.items() if Trait.HOST not in op.traits]):
        fold(g, ctx)
    dce(g, ctx)


# --- levels -----------------------------------------------------------------------------------------------------------


def split(g: Graph) -> tuple[Step, ...]:
    """The steps of a graph, which stays as it is and is what host steps and values refer to."""
    nodes = list(g.nodes())
    host = {n: is_host(n) for n in nodes}
    deps = _dependencies(g, nodes)
    plans = [_levels(nodes, host, deps, first) for first in (0, 1)]
    level = min(plans, key=lambda p: len({p[n] for n in nodes if not host[n]}))
    steps: list[Step] = []
    for k in sorted(set(level.values())):
        here = [n for n in nodes if level[n] == k]
        steps += [HostStep(n) for n in here] if host[here[0]] else [_segment(g, here, len(steps))]
    return tuple(steps)


def _dependencies(g: Graph, nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return the nodes behind a node's operands and the data-dependent dims of its types and attributes."""
    known = {x for v in g.inputs for x in _dims(v.type)}
    maker: dict[Var, Node] = {}
    out: dict[Node, list[Node]] = {}
    for n in nodes:
        used = {x for a in (*n.attrs.values(), *(o.type for o in n.outputs)) for x in _dims(a)}
        before = [maker[x] for x in used if x in maker]
        out[n] = list(dict.fromkeys([*(v.node for v in n.inputs if v is not None and v.node is not None), *before]))
        for x in used - known - maker.keys():
            maker[x] = n
    return out


def _dims(a: Any) -> Iterator[Var]:
    if isinstance(a, Expr):
        yield from free(a)
    elif isinstance(a, TensorType):
        yield from _dims(a.shape)
    elif isinstance(a, tuple):
        for x in a:
            yield from _dims(x)
    elif isinstance(a, Graph):
        yield from a.dims.values()


def _levels(nodes: Sequence[Node], host: dict[Node, bool], deps: dict[Node, list[Node]], first: int) -> dict[Node, int]:
    """Levels of one kind are even, of the other odd; `first` is the lowest of native nodes, 0 or 1."""
    level: dict[Node, int] = {}
    for n in nodes:
        level[n] = max([1 - first if host[n] else first, *(level[d] + (host[d] != host[n]) for d in deps[n])])
    last = max((level[n] for n in nodes if not host[n]), default=0)
    latest = {n: level[n] if host[n] else last for n in nodes}
    for n in reversed(nodes):
        for d in deps[n]:
            if not host[d]:
                latest[d] = min(latest[d], latest[n] - host[n])
    for n in nodes:
        if not host[n]:
            near = [level[d] for d in deps[n] if not host[d]]
            level[n] = max([*near, *(level[d] + 1 for d in deps[n] if host[d])]) if near else latest[n]
    return level


# --- segments ---------------------------------------------------------------------------------------------------------


def _segment(g: Graph, nodes: Sequence[Node], number: int) -> Segment:
    new = Graph(f"{g.name}_{number}")
    env: dict[Value | None, Value] = {}
    inputs: list[Value] = []
    made = {o for n in nodes for o in n.outputs}
    for v in dict.fromkeys(v for n in nodes for v in n.inputs if v is not None and v not in made):
        if v in g.constants:
            env[v] = new.constant(g.constants[v], v.name, v.locs, v.type)
            g.share_digest(v, new, env[v])
        else:
            env[v] = new.add_input(v.name, v.type, v.locs)
            inputs.append(v)
    for n in nodes:
        _copy(n, new, env)
    inside, kept = set(nodes), set(g.outputs)
    outputs = [o for n in nodes for o in n.outputs if o in kept or any(u not in inside for u, _ in o.uses)]
    new.outputs = [env[o] for o in outputs]
    shown = {d for v in inputs for d in v.type.shape if isinstance(d, Var)}
    carried = tuple(x for x in new.dims.values() if x not in shown)
    if carried:
        new.add_input("sizes", TensorType(u8, (*carried, 0)))
    return Segment(new, tuple(inputs), tuple(outputs), carried)


def _copy(n: Node, new: Graph, env: dict[Value | None, Value]) -> None:
    attrs = {k: a.copy() if isinstance(a, Graph) else a for k, a in n.attrs.items()}
    types, names = [o.type for o in n.outputs], [o.name for o in n.outputs]
    m = new.append(Node(n.op, [env.get(v) for v in n.inputs], attrs, types, n.locs, names))
    for o, p in zip(n.outputs, m.outputs):
        p.locs = o.locs
        env[o] = p
