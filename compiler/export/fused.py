"""The optimized graph as an ONNX model in which each kernel is a function, for viewers such as Netron.

Nodes keep dnnc's ops, in the domain `dnnc`: after the passes there are ops and layouts that ONNX has no operators for,
so no runtime runs the model. `to_onnx` writes models that run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx
from onnx import helper, numpy_helper

from dnnc.backends.runtime.program import Program
from dnnc.compile_program import rescheduled
from dnnc.export.writer import ELEMENTS
from dnnc.ir.errors import InputError, ModelError, UnsupportedError
from dnnc.ir.files import replacing
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.attributes import show_attr
from dnnc.passes.planning.fuse import Group
from dnnc.passes.planning.memory_plan import Region
from dnnc.passes.planning.program import ScheduledGraph, Step

if TYPE_CHECKING:
    from dnnc.executable import Executable

OPS, FUSED = "dnnc", "dnnc.fused"  # domains
SMALL = 1024  # elements of constants that are in the file; larger ones are inputs without contents


def write_fused(f: Executable, path: str | os.PathLike[str], title: str = "") -> onnx.ModelProto:
    """Write the graph after all passes with its kernels as functions.

    Raises:
        UnsupportedError: nodes run on the host, between programs.
        InputError: nothing is compiled yet.
        ModelError: the file cannot be written.
    """
    f = f.resolved
    program = f.last_program()
    if not isinstance(program, Program):
        raise UnsupportedError("the fused graph is of one program; this model has none, or steps on the host between")
    reports = f.report.programs
    if not reports:
        raise InputError("no program is compiled yet: call the model first")
    model = fused_model(rescheduled(f._compiler, reports[-1]), title or f.report.name)  # type: ignore[arg-type]
    try:
        with replacing(path) as file:
            file.write(model.SerializeToString())
    except OSError as e:
        raise ModelError(f"cannot write {path}: {e.strerror or e}") from None
    return model


def fused_model(scheduled: ScheduledGraph, title: str) -> onnx.ModelProto:
    """The model; see the module."""
    writer = _Writer({s.group: s for s in scheduled.kernels})
    graph = writer.graph(scheduled.region, title)
    imports = [helper.make_opsetid(d, v) for d, v in (("", 21), (OPS, 1), (FUSED, 1))]
    model = helper.make_model(graph, opset_imports=imports, functions=list(writer.functions.values()), ir_version=10)
    model.producer_name = "dnnc"
    return model


class _Writer:
    """Writes a graph and those nested in it. Values of these have the name of their node in front: ONNX wants names
    that no other graph of the model has.
    """

    def __init__(self, steps: Mapping[Group, Step]) -> None:
        self.steps = steps
        self.functions: dict[Any, onnx.FunctionProto] = {}  # by what they compute
        self.called: dict[Value | None, str] = {None: ""}

    def graph(self, region: Region, title: str, prefix: str = "") -> onnx.GraphProto:
        """A graph with a node for each group, in order, and for each view of memory."""
        g = region.graph
        weights = [*g.constants, *g.parameters]
        every = [*g.inputs, *weights, *(v for n in g.nodes() for v in n.outputs)]
        self.called.update((v, prefix + v.name) for v in every)
        inside = {n for group in region.fusion.groups for n in group.nodes}
        done: set[Node] = set()
        nodes: list[onnx.NodeProto] = []

        def views(values: Sequence[Value | None]) -> None:
            """The nodes that no kernel computes, ahead of their first reader."""
            for v in values:
                n = v.node if v is not None else None
                if n is not None and n not in inside and n not in done:
                    done.add(n)
                    views(n.inputs)
                    nodes.append(self.node(n, ()))

        for group in region.fusion.groups:
            views([v for n in group.nodes for v in n.inputs])
            step = self.steps.get(group)
            nodes.append(self.node(group.nodes[0], region.nested.get(group, ())) if step is None else self.call(step))
        views(g.outputs)
        small = [v for v, a in g.constants.items() if a.size <= SMALL and a.dtype.kind in "biufc" and v.type.row_major]
        return helper.make_graph(
            nodes,
            title,
            [self.info(v) for v in (*g.inputs, *(v for v in weights if v not in small))],
            [self.info(v) for v in g.outputs],
            [numpy_helper.from_array(g.constants[v], self.called[v]) for v in small],
            value_info=[self.info(v) for n in g.nodes() for v in n.outputs],
        )

    def call(self, step: Step) -> onnx.NodeProto:
        """A node that calls the function of a kernel."""
        members, outputs = step.group.nodes, step.group.outputs
        made = {v for n in members for v in n.outputs}
        inputs = list(dict.fromkeys(v for n in members for v in n.inputs if v is not None and v not in made))
        names: dict[Value | None, str] = {None: "", **{v: f"x{k}" for k, v in enumerate(inputs)}}
        names.update((v, f"y{k}") for k, v in enumerate(outputs))
        for v in (v for n in members for v in n.outputs):
            names.setdefault(v, f"v{len(names)}")
        body = [_node(n, names) for n in members]
        key = tuple(x.SerializeToString() for x in body), tuple(names[v] for v in outputs)
        function = self.functions.get(key)
        if function is None:
            ends = [names[v] for v in inputs], [names[v] for v in outputs]
            title = f"{step.nest.name}_{len(self.functions)}"
            function = helper.make_function(FUSED, title, *ends, body, [helper.make_opsetid(OPS, 1)])
            self.functions[key] = function
        ends = [self.called[v] for v in inputs], [self.called[v] for v in outputs]
        node = helper.make_node(function.name, *ends, domain=FUSED)
        _describe(node, members, {"kernel": step.nest.name, "kind": step.group.kind, "schedule": str(step.choice)})
        return node

    def node(self, n: Node, nested: Sequence[Region]) -> onnx.NodeProto:
        """A node as it is; of a loop or branch its graphs are attributes."""
        node = _node(n, self.called)
        names = (k for k, a in n.attrs.items() if isinstance(a, Graph))
        for name, inner in zip(names, nested):
            graph = self.graph(inner, inner.graph.name, f"{self.called[n.outputs[0]]}.{name}.")
            node.attribute.append(helper.make_attribute(name, graph))
        _describe(node, [n], {})
        return node

    def info(self, v: Value) -> onnx.ValueInfoProto:
        kind = ELEMENTS.get(v.type.dtype.name, onnx.TensorProto.UNDEFINED)
        shape = [d if isinstance(d, int) else str(d) for d in v.type.shape]
        return helper.make_tensor_value_info(self.called[v], kind, shape, str(v.type))


def _node(n: Node, names: Mapping[Value | None, str]) -> onnx.NodeProto:
    node = helper.make_node(n.op.name, [names[v] for v in n.inputs], [names[v] for v in n.outputs], domain=OPS)
    for name, a in sorted(n.attrs.items()):
        if a is not None and not isinstance(a, Graph):
            node.attribute.append(helper.make_attribute(name, _plain(a)))
    return node


def _plain(a: Any) -> Any:
    """An attribute as ONNX has it: a number, a text, or a list of one of them."""
    if isinstance(a, (bool, int, float, str)):
        return int(a) if isinstance(a, bool) else a
    if isinstance(a, tuple) and a and all(type(x) is type(a[0]) and isinstance(x, (int, float, str)) for x in a):
        return list(a)
    return show_attr(a, {})


def _describe(node: onnx.NodeProto, members: Sequence[Node], facts: Mapping[str, str]) -> None:
    where = dict.fromkeys(str(loc) for n in members for loc in n.locs)
    types = "; ".join(f"{v.name}: {v.type}" for n in members for v in n.outputs)
    node.doc_string = types
    for key, value in (*facts.items(), ("from", "; ".join(where))):
        if value:
            node.metadata_props.append(onnx.StringStringEntryProto(key=key, value=value))
