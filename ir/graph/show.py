"""Graph -> text; `dnnc.ir.graph.text` has the grammar and reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dnnc.ir import te
from dnnc.ir.errors import Loc
from dnnc.ir.expr import Var, dim, free
from dnnc.ir.graph.attributes import show_attr, show_attrs
from dnnc.ir.graph.constant_text import inline
from dnnc.ir.graph.core import Graph, Node, Printer, Value
from dnnc.ir.op import Trait
from dnnc.ir.te.syntax import show_op

WIDTH = 150  # longer signatures get one line per parameter


def show_graph(g: Graph, locs: bool = False) -> str:
    """The text of a graph; `locs` adds comments that say where nodes come from."""
    facts = [line for v in all_dims(g).values() if (line := _show_dim(v))]
    texts, called = definitions(g)
    return "".join(facts) + "".join(texts.values()) + "".join(_show_def(g, g.name, "", locs, called))


def definitions(g: Graph) -> tuple[dict[str, str], dict[Any, str]]:
    """The definitions of the ops of a graph and its subgraphs that are not dnnc's own, by name, and what their nodes
    are called: by the op's name, numbered where a pass has given other types to one of its nodes.
    """
    texts: dict[str, str] = {}
    called: dict[Any, str] = {}
    for n in every_node(g):
        if Trait.CUSTOM not in n.op.traits or n.op.compute is None:
            continue
        given = [None if v is None else te.placeholder(v.name, v.type.dtype, v.type.shape) for v in n.inputs]
        made = n.op.compute(*given, **n.attrs)
        outputs = made if isinstance(made, tuple) else (made,)
        for k in range(len(texts) + 1):
            name = f"{n.op.name}_{k}" if k else n.op.name
            text = show_op(name, [t for t in given if t is not None], outputs)
            if texts.setdefault(name, text) == text:
                called[n] = name
                break
    return texts, called


def show_definition(name: str, inputs: Sequence[te.Tensor], outputs: Sequence[te.Tensor]) -> str:
    """The definition of an op by tensor expressions, with what is known of the sizes in it in front."""
    in_shapes = {v for t in (*inputs, *te.stages(outputs)) for d in t.shape for v in free(d)}
    facts = (_show_dim(v, v in in_shapes) for v in te.sizes(inputs, outputs).values())
    return "".join(facts) + show_op(name, inputs, outputs)


def every_node(g: Graph) -> Iterator[Node]:
    """The nodes of a graph and its subgraphs."""
    for n in g.nodes():
        for s in n.subgraphs():
            yield from every_node(s)
        yield n


def all_dims(g: Graph) -> dict[str, Var]:
    """The dims of a graph and its subgraphs."""
    out = dict(g.dims)
    for n in g.nodes():
        for s in n.subgraphs():
            for name, v in all_dims(s).items():
                out.setdefault(name, v)
    return out


def _show_dim(v: Var, in_shapes: bool = True) -> str:
    """What is known of a dim; a shape tells of it, too."""
    if v is dim(v.name) and in_shapes:
        return ""
    parts = [str(v.lo)] + ([str(v.hi)] if v.hi is not None or v.div != 1 else []) + ([str(v.div)] if v.div != 1 else [])
    return f"{v.name}: dim[{', '.join(parts)}]\n"


def _show_def(g: Graph, name: str, pad: str, locs: bool, called: Mapping[Any, str]) -> Iterator[str]:
    params = [f"{v.name}: {v.type}" for v in g.inputs]
    if g.constants or g.parameters:
        params += ["*", *(f"{v.name}: {v.type}" for v in g.parameters)]
        params += [f"{v.name}: {v.type} = {_show_constant(g, v)}" for v in g.constants]
    one = f"{pad}def {name}({', '.join(params)}):\n"
    yield (
        one if len(one) <= WIDTH else f"{pad}def {name}(\n" + "".join(f"{pad}    {p},\n" for p in params) + f"{pad}):\n"
    )
    inner = pad + "    "
    for n in g.nodes():
        names = _subgraph_names(n)
        for s, title in names.items():
            yield from _show_def(s, title, inner, locs, called)
        where = _comment(n.locs) if locs else ""
        yield f"{inner}{_show_statement(n, names, called.get(n, n.op.name))}{where}\n"
    yield f"{inner}return {', '.join(v.name for v in g.outputs)}".rstrip() + "\n"


def _show_constant(g: Graph, v: Value) -> str:
    return inline(g.constants[v], v.type.dtype) or f'const("{g.digest(v)}")'


def _comment(locs: tuple[Loc, ...]) -> str:
    shown = "; ".join(dict.fromkeys(" ".join(str(x).split()) for x in locs))
    return "  # " + "".join(c if c.isprintable() else "?" for c in shown) if shown else ""


def _subgraph_names(n: Node) -> dict[Graph, str]:
    """What the subgraphs of a node are called in its text: their names, numbered where two of them agree."""
    out: dict[Graph, str] = {}
    for s in n.subgraphs():
        if s not in out:
            name = next(x for k in range(len(out) + 1) if (x := f"{s.name}_{k}" if k else s.name) not in out.values())
            out[s] = name
    return out


def show_node(n: Node) -> str:
    """The statement of a node."""
    return _show_statement(n, _subgraph_names(n), n.op.name)


def _show_statement(n: Node, names: Mapping[Graph, str], called: str) -> str:
    args = [v.name if v is not None else "None" for v in n.inputs]
    attrs = show_attrs(n.op, n.attrs, names)
    call = f"{called}({', '.join([*args, attrs] if attrs else args)})"
    if len(n.outputs) == 1:
        return f"{n.outputs[0].name}: {n.outputs[0].type} = {call}"
    return f"({', '.join(o.name for o in n.outputs)}) = {call} @ ({', '.join(str(o.type) for o in n.outputs)})"


def structure(g: Graph) -> Iterator[str]:
    """What the structural hash covers, line by line: values by number, subgraphs and constants by hash."""
    numbers: dict[Value | None, int] = {None: -1}

    def number(v: Value) -> str:
        return f"{numbers.setdefault(v, len(numbers))}:{v.type}\n"

    for x in all_dims(g).values():
        yield _show_dim(x)
    yield from definitions(g)[0].values()
    yield from map(number, g.inputs)
    for v in g.constants:
        yield f"const {g.digest(v)} {number(v)}"
    for v, held in g.parameters.items():
        yield f"parameter {held.name} {number(v)}"
    for n in g.nodes():
        names = {s: s.structural_hash() for s in n.subgraphs()}
        attrs = ", ".join(f"{k}={show_attr(n.attrs[k], names)}" for k in sorted(n.attrs))
        yield f"{n.op.name} {[numbers.get(v, -2) for v in n.inputs]} {attrs}\n"
        yield from map(number, n.outputs)
    yield f"return {[numbers.get(v, -2) for v in g.outputs]} {sorted(g.donated.items()) or ''}\n"


Printer.graph, Printer.node, Printer.structure = show_graph, show_node, structure
