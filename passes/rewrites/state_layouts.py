"""Let state that a program alone holds lie as kernels compute with it: parameters and moments of filters in panels.

    def step(w, m, x, g):                               def step(w @ L, m @ L, x, g):
        p = pack(w, layout=L)                               y = conv(x, w)
        y = conv(x, p)                                      m1 = add(mul(m, 0.9), g)
        m1 = add(pack(mul(m, 0.9), layout=L), g)    ->      w1 = sub(w, mul(m1, rate))
        w1 = sub(p, mul(m1, rate))                          return w1 @ L, m1 @ L
        return pack(w1, layout=None), pack(m1, ..)

`Graph.held` names the inputs. One keeps its encoding where another program has chosen it; else it takes the one that
its readers pack it for, if the output that replaces it is made in it. Filters are then packed once, not in each step.

`Graph.internal` names outputs that another program alone reads. They lie as they are computed: what the forward saves
for the backward is neither unpacked nor packed again.
"""

from __future__ import annotations

from collections import Counter

from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.op import Trait
from dnnc.ir.types import ROW_MAJOR, Dense, Encoding, TensorType


def assign_state_layouts(graph: Graph) -> bool:
    """Set the encodings of held inputs, of the outputs that replace them, and of internal outputs.

    Returns whether any changed.
    """
    changed = False
    for k, wanted in graph.internal.items():
        encoding = wanted or _computed(graph.outputs[k])
        if isinstance(encoding, Dense) and graph.outputs[k].type.encoding != encoding:
            _store(graph, k, encoding)
            changed = True
    if not graph.held:
        return changed
    _pack_first(graph)
    replaced = {j: k for k, j in graph.donated.items()}
    for j, wanted in graph.held.items():
        encoding = wanted or _chosen(graph, graph.inputs[j], replaced.get(j))
        if isinstance(encoding, Dense) and encoding != ROW_MAJOR:
            if graph.inputs[j].type.encoding != encoding:
                _relabel(graph, graph.inputs[j], encoding)
            if j in replaced:
                _store(graph, replaced[j], encoding)
            changed = True
    return changed


def relabel_given(graph: Graph) -> bool:
    """Give held inputs the encodings that other programs have chosen. Ahead of the layouts, which then follow them."""
    given = {graph.inputs[j]: e for j, e in graph.held.items() if isinstance(e, Dense) and e != ROW_MAJOR}
    for v, encoding in given.items():
        v.type = TensorType(v.type.dtype, v.type.shape, encoding)
    return bool(given)


def _computed(v: Value) -> Encoding:
    """The encoding in which an output is computed."""
    source = v.node.inputs[0] if v.node is not None and Trait.RELAYOUT in v.node.op.traits else v
    assert source is not None
    return source.type.encoding


def _pack_first(graph: Graph) -> None:
    """pack(mul(m, 0.9)) -> mul(pack(m), 0.9), of element-wise nodes that compute with held inputs alone."""
    pure, kept = {graph.inputs[k] for k in graph.held}, set(graph.outputs)
    for n in graph.nodes():
        if Trait.ELEMENTWISE in n.op.traits and len(n.outputs) == 1 and all(v in pure for _, v in _whole(n)):
            pure.add(n.output)
    for n in graph.nodes(reverse=True):
        wanted = {_packs(u) for u, _ in n.outputs[0].uses}
        if n.outputs[0] not in pure - kept or len(wanted) != 1 or wanted == {ROW_MAJOR} or not n.output.type.row_major:
            continue
        (encoding,) = wanted
        assert isinstance(encoding, Dense)
        for k, v in _whole(n):
            n.set_input(k, Builder(graph, n, n.locs).op("pack", v, layout=encoding.layout))
        n.output.type = TensorType(n.output.type.dtype, n.output.type.shape, encoding)
        for u, _ in list(n.output.uses):
            graph.replace_all_uses(u.output, n.output)
            graph.erase(u)


def _whole(n: Node) -> list[tuple[int, Value]]:
    """The operands of a node that have its shape, by number."""
    return [(k, v) for k, v in enumerate(n.inputs) if v is not None and v.type.shape == n.output.type.shape]


def _chosen(graph: Graph, x: Value, output: int | None) -> Encoding:
    """The encoding in which most readers want an input, and in which its successor is computed; else row-major."""
    wanted = Counter(e for u, _ in x.uses if (e := _packs(u)) != ROW_MAJOR)
    if not wanted:
        return ROW_MAJOR
    ((best, _),) = wanted.most_common(1)
    made = graph.outputs[output].node if output is not None else None
    source = made.inputs[0] if made is not None and Trait.RELAYOUT in made.op.traits else None
    return best if output is None or (source is not None and source.type.encoding == best) else ROW_MAJOR


def _packs(n: Node) -> Encoding:
    """The encoding that a `pack` makes; row-major for other nodes."""
    return n.output.type.encoding if Trait.RELAYOUT in n.op.traits else ROW_MAJOR


def _relabel(graph: Graph, x: Value, encoding: Encoding) -> None:
    """Let an input have an encoding: those that packed it so read it as it is, others read it in rows."""
    uses = list(x.uses)
    x.type = TensorType(x.type.dtype, x.type.shape, encoding)
    rows: Value | None = None
    for u, k in uses:
        if _packs(u) == encoding:
            graph.replace_all_uses(u.output, x)
            graph.erase(u)
            continue
        if rows is None:
            rows = Builder(graph, graph.first_node(), x.locs).op("pack", x, layout=None)
        u.set_input(k, rows)


def _store(graph: Graph, output: int, encoding: Dense) -> None:
    """Let an output have an encoding."""
    v = graph.outputs[output]
    source = v.node.inputs[0] if v.node is not None and Trait.RELAYOUT in v.node.op.traits else None
    if source is not None and source.type.encoding == encoding:
        graph.outputs[output] = source
    elif v.type.encoding != encoding:
        graph.outputs[output] = Builder(graph, None, v.locs).op("pack", v, layout=encoding.layout)
