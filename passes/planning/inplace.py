"""Which groups may write over one of their inputs: element-wise ones that read it only at the element they write.

    y = relu(add(x, b))  with x read nowhere later   ->   y takes x's memory, the kernel has one parameter for both

An output may take the memory of an input that was donated for it, and no other.

    y = scatter_nd(x, at, updates)   ->   updates are put into x's memory, and nothing is copied

Only groups without an anchor, and scatters: a contraction's overlapping tiles would read what they wrote.
"""

from __future__ import annotations

from dnnc.ir.expr import Load, walk
from dnnc.ir.graph import Graph, Value
from dnnc.ir.loops.stmt import Buffer, Store, accesses, walk_stmts
from dnnc.passes.analysis.alias import root
from dnnc.passes.lower.nests import Lowered, group_inputs, lower
from dnnc.passes.lower.scatter import Scattered
from dnnc.passes.planning.fuse import FusionPlan, Group


def find_inplace(graph: Graph, plan: FusionPlan) -> dict[Group, Value]:
    """Return the input that each group may overwrite in place; the memory plan decides whether it is dead."""
    out: dict[Group, Value] = {}
    aliases = {v: (source, at) for v, source, at in plan.views}
    taken = {root(aliases, graph.outputs[k])[0]: graph.inputs[j] for k, j in graph.donated.items()}
    for g in plan.groups:
        whole, at = root(aliases, g.output)
        given = taken.get(whole)
        if g.kind not in ("map", "scatter") or (g.output in graph.outputs and given is None):
            continue
        wanted = [
            v
            for n in g.nodes
            for v in n.inputs
            if v is not None and v.type == g.output.type and not graph.variance(v).call_invariant
        ]
        if given is None:
            wanted = [v for v in wanted if v not in graph.inputs]
        else:
            wanted = [v for v in wanted if root(aliases, v) == (given, 0) and at == 0]
        if not wanted:
            continue
        read = [root(aliases, v)[0] for v in group_inputs(g.nodes)]
        wanted = [
            v for v in wanted if read.count(root(aliases, v)[0]) == 1
        ]  # what is read through another value too is read at other places
        if not wanted:
            continue
        low = lower(graph, g.nodes, g.output)
        for v in dict.fromkeys(wanted):
            if v in low.params and _only_where_stored(low, low.kernel.entry.buffers[low.params.index(v)]):
                out[g] = v
                break
    return out


def _only_where_stored(low: Lowered, buf: Buffer) -> bool:
    if isinstance(low.form, Scattered):
        return low.form.starts_as(buf)
    stores = [s for s in walk_stmts(low.kernel.entry.body) if isinstance(s, Store) and s.buf.space == "global"]
    if len(stores) != 1:
        return False
    own = {x for x in walk(stores[0].value) if isinstance(x, Load) and x.buf is buf}
    every = {x for x in accesses(low.kernel.entry.body) if x.buf is buf}
    return own == every and all(x.idx == stores[0].idx for x in own)
