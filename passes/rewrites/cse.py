"""Merge nodes that compute the same: equal op, operands and attributes. Constants count as equal by content.

    a = exp(x); b = exp(x); c = add(a, b)   ->   a = exp(x); c = add(a, a)

One walk in order suffices, as operands are merged before their readers. Random ops and effects are never merged.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.attributes import attrs_key
from dnnc.ir.op import Trait
from dnnc.passes.base import PassContext, graphs, is_pure
from dnnc.passes.rewrite import sweep

SAMPLES = 32  # elements that are compared before whole constants are hashed


def cse(graph: Graph, ctx: PassContext) -> bool:
    """Merge equal constants and equal nodes of a graph, and of each subgraph by itself."""
    changed = False
    for g in graphs(graph):
        changed |= _merge_constants(g)
        changed |= _merge_nodes(g)
    return changed


def _merge_constants(g: Graph) -> bool:
    alike: dict[Any, list[Value]] = {}
    for v in g.constants:
        alike.setdefault((v.type, _glance(g.constants[v])), []).append(v)
    changed = False
    for values in alike.values():
        first: dict[str, Value] = {}
        for v in values if len(values) > 1 else ():
            kept = first.setdefault(g.digest(v), v)
            if kept is not v and not g.is_output(v):
                g.replace_all_uses(v, kept)
                g.erase_constant(v)
                changed = True
    return changed


def _glance(a: np.ndarray[Any, Any]) -> object:
    """Sample a few elements of an array: equal for equal arrays, and cheap to compare for different ones."""
    if a.dtype.kind in "OUST":
        return tuple(a.ravel()[:SAMPLES])
    step = max(1, a.size // SAMPLES)
    flat = a.reshape(-1) if a.flags.c_contiguous else a.ravel()
    return flat[::step].tobytes()


def _merge_nodes(g: Graph) -> bool:
    known: dict[Any, Node] = {}
    outputs = set(g.outputs)
    changed = False
    for n in g.nodes():
        if not is_pure(n):
            continue
        kept = known.setdefault(_key(n), n)
        if kept is n:
            continue
        for old, new in zip(n.outputs, kept.outputs):
            g.replace_all_uses(old, new)
        if not outputs.isdisjoint(n.outputs):
            outputs = set(g.outputs)
        sweep(g, (n,), outputs)
        changed = True
    return changed


def _key(n: Node) -> Any:
    """Equal for nodes that compute the same."""
    inputs = [id(v) for v in n.inputs]
    if Trait.COMMUTATIVE in n.op.traits:
        inputs.sort()
    encodings = tuple(o.type.encoding for o in n.outputs)
    return n.op, tuple(inputs), attrs_key(n), encodings
