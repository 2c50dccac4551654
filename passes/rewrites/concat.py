"""Concatenations that cost nothing: their operands are written where the result has them.

    d = concat(a, b, c)           ->  d = concat(ab, c)                where ab = concat(a, b) is there already: one
                                                                       buffer grows (dense nets)
    ab = concat(a, b)             ->  ab = abc[:8]                     where abc = concat(a, b, c) is there already
    c = concat(x, y), x an input  ->  c = concat(copy(x), y)           only what lies elsewhere is copied

What lies where follows from `alias.find_aliases`; here the graph is brought into a form in which it finds the most.
"""

from __future__ import annotations

from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.passes.analysis.alias import find_aliases
from dnnc.passes.base import PassContext
from dnnc.passes.rewrite import nodes_of

MOST_SHARED = 64  # operands of a concatenation whose first ones are known as a part of it


def place_concats(graph: Graph, ctx: PassContext) -> bool:
    """Share prefixes, and copy operands that cannot be written in place. Returns whether anything changed."""
    changed = share_prefixes(graph)

    def copy(n: Node, k: int) -> Value:
        nonlocal changed
        changed = True
        v = n.inputs[k]
        assert v is not None
        made = Builder(graph, n, v.locs).op("pack", v, layout=v.type.layout)
        assert isinstance(made, Value)
        n.set_input(k, made)
        return made

    find_aliases(graph, copy, ctx.facts.align)
    return changed


def share_prefixes(graph: Graph) -> bool:
    """Use an earlier concatenation of the first operands as one operand; be the first part of an earlier one."""
    changed = False
    known: dict[tuple[object, ...], Node] = {}
    longer: dict[tuple[object, ...], Node] = {}
    for n in nodes_of(graph, "concat"):
        operands = tuple(v for v in n.inputs if v is not None)
        key = (n.attrs["axis"] % n.output.type.rank, n.output.type.encoding)
        for length in range(len(operands) - 1, 1, -1):
            earlier = known.get((key, operands[:length]))
            if earlier is not None:
                made = Builder(graph, n, n.locs).op("concat", earlier.output, *operands[length:], axis=n.attrs["axis"])
                assert isinstance(made, Value)
                made.type = n.output.type
                graph.replace_all_uses(n.output, made)
                graph.erase(n)
                graph.rename(made, n.output.name)
                n, changed = made.node or n, True
                break
        whole = longer.get((key, operands))
        if whole is not None and n.output.type.row_major:
            first = {"starts": (0,) * n.output.type.rank, "steps": (1,) * n.output.type.rank}
            part = Builder(graph, n, n.locs).op("slice", whole.output, **first, shape=n.output.type.shape)
            graph.replace_all_uses(n.output, part)
            graph.erase(n)
            changed = True
            continue
        known.setdefault((key, operands), n)
        for length in range(2, min(len(operands), MOST_SHARED)):
            longer.setdefault((key, operands[:length]), n)
    return changed
