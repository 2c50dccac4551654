"""A graph as an ONNX model: its nodes in order, by the functions of their ops."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import onnx
from onnx import helper

from dnnc.export.arithmetic import ARITHMETIC
from dnnc.export.call import Call, Convert
from dnnc.export.control import cond, loop
from dnnc.export.expressions import spelled_out
from dnnc.export.files import check, write
from dnnc.export.layers import LAYERS
from dnnc.export.modules import module_graph
from dnnc.export.movement import MOVEMENT
from dnnc.export.regions import REGIONS, chains
from dnnc.export.rest import REST
from dnnc.export.writer import Model, Names, Writer, value_info
from dnnc.frontends.trace import trace
from dnnc.ir import checks
from dnnc.ir.errors import InputError, UnsupportedError, a_type, locations
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.ops import OPS
from dnnc.nn.module import Module

OLDEST = 18  # opset: from here on axes are operands, as this exporter writes them

# Ops of derivatives that are exported as what their tensor expressions say, like ops that nothing else defines.
SPELLED_OUT = "max_pool_offset max_pool_backward max_pool_select avg_pool_backward turn_filters within_bound".split()
TABLE: dict[str, Convert] = {
    **{name: lambda c: expanded(c.node, c.inputs, c.w) for name in SPELLED_OUT},
    **ARITHMETIC, **LAYERS, **MOVEMENT, **REGIONS, **REST,
}  # fmt: skip
# Ops without a function that are defined by no others. Those of INSIDE are steps of what other ops are defined by,
# which are exported whole (sort, dft, det, unique, nonzero, non_max_suppression). ABSENT is what an import makes of
# MaxRoiPool and of vocabularies, and parts of RoiAlign.
INSIDE = frozenset(
    "sort_key sort_rank sort_place sort_merge sort_digits sort_network sort_groups sort_members fft_pass fft_multiply "
    "eliminated_pivot eliminate block_sums block_running positions differs run_lengths "
    "unravel suppress row_starts triples".split()
)
ABSENT = frozenset(
    "roi_weights roi_rows roi_bins roi_max string_rank sign_words differing_bits csr_matmul csr_sampled".split()
)
CONTROL: dict[str, Callable[..., list[str]]] = {"cond": cond, "loop": loop}


def to_onnx(
    model: Any, path: str | os.PathLike[str] | None = None, opset: int | None = None, *, inputs: Any = None
) -> onnx.ModelProto:
    """A graph as an ONNX model, which `onnx.checker` has checked.

    Args:
        model: a dnnc.ir Graph (traced or imported); an Executable (its graph before any pass); a function of array
            code; or a `dnnc.nn.Module`, which is written in inference mode with its present weights by their names.
        path: where to write it; the file is replaced at once. Weights of 2 GB and more go into `path` + ".data" beside
            it.
        opset: of ONNX's own operators, from 18 on; the latest that the installed onnx knows by default. Other runtimes
            may need an older one.
        inputs: of a function or module: a Spec for each array, as for `dnnc.compile`. A module of
            `dnnc.nn.from_onnx` has inputs already.

    Returns:
        The model: inputs, outputs and values have the names of the graph, symbolic sizes are dims by name, and the
            nodes say where they come from.

    Raises:
        UnsupportedError: ONNX, or this opset, cannot express an op; names its source.
        InputError: `model` is none of these, the opset is not known, or a model of 2 GB has no path.
    """
    if path is not None:
        path = checks.path(path, "path")
    graph, names, weights = _source(model, inputs)
    latest = onnx.defs.onnx_opset_version()
    opset = latest if opset is None else opset
    if not isinstance(opset, int) or not OLDEST <= opset <= latest:
        raise InputError(
            f"opset={opset!r}: expected a number from {OLDEST} to {latest}, which the installed onnx knows"
        )
    shared = Model(opset)
    made = _model(graph, names, weights, shared)
    if path is not None:
        write(made, path)
    check(made, path)
    return made


def _source(model: Any, inputs: Any) -> tuple[Graph, tuple[Sequence[str], Sequence[str]], Mapping[Value, str]]:
    """The graph of what is exported, what users call its inputs and outputs, and the names of weights."""
    if isinstance(model, Module):
        return module_graph(model, inputs)
    if isinstance(model, Graph):
        return model, ([v.name for v in model.inputs], [v.name for v in model.outputs]), {}
    found = getattr(model, "graph", None)
    if isinstance(found, Graph):
        names = [s.name for s in model.inputs], [s.name for s in model.outputs]
        if found.parameters:
            found = model.frozen()
        return found, names, {}
    if callable(model):
        if inputs is None:
            raise InputError("to_onnx of a function needs inputs=[...], a dnnc.Spec(shape, dtype) for each array")
        return _source(trace(model, **inputs) if isinstance(inputs, Mapping) else trace(model, *inputs), None)
    raise InputError(f"to_onnx takes a graph, a compiled model, a module or a function, not {a_type(model)}")


def _model(
    graph: Graph, names: tuple[Sequence[str], Sequence[str]], weights: Mapping[Value, str], shared: Model
) -> onnx.ModelProto:
    w = Writer(shared)
    own = Names()
    names = [own.fresh(n) for n in names[0]], [own.fresh(n) for n in names[1]]  # a value may be several outputs
    shared.names.used.update(own.used)
    env: dict[Value, str] = dict(zip(graph.inputs, names[0]))
    for v in graph.inputs:
        w.remember(env[v], v.type.shape)
    env.update((v, shared.weight(graph.constants[v], v.type.dtype, name)) for v, name in weights.items())
    wanted = {v: n for v, n in zip(reversed(graph.outputs), reversed(names[1])) if v.node is not None}
    walk(graph, w, env, wanted)
    outputs = []
    for v, name in zip(graph.outputs, names[1]):
        if env[v] != name:
            w.nodes.append(helper.make_node("Identity", [env[v]], [name], name=name))
        outputs.append(value_info(name, v.type.dtype, v.type.shape))
    given = [value_info(n, v.type.dtype, v.type.shape) for n, v in zip(names[0], graph.inputs)]
    read = _read(w.nodes)
    unread = {env[v] for v in weights} - read  # buffers of training, and weights that are written quantized
    shared.initializers[:] = [t for t in shared.initializers if t.name not in unread]
    proto = helper.make_graph(w.nodes, graph.name, given, outputs, shared.initializers)
    opsets = [helper.make_opsetid("", shared.opset)]
    made = helper.make_model(proto, opset_imports=opsets, producer_name="dnnc", producer_version=_version())
    made.ir_version = helper.find_min_ir_version_for(opsets)
    return made


def _read(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """The names that nodes and their subgraphs read."""
    names: set[str] = set()
    for n in nodes:
        names.update(n.input)
        for a in n.attribute:
            for g in (*([a.g] if a.HasField("g") else ()), *a.graphs):
                names |= _read(g.node) | {o.name for o in g.output}
    return names


def _version() -> str:
    try:
        return version("dnnc")
    except PackageNotFoundError:
        return ""


def walk(graph: Graph, w: Writer, env: dict[Value, str], wanted: Mapping[Value, str]) -> None:
    """Write a graph's nodes. `env`: names of inputs, extended by all values; `wanted`: names of outputs."""
    for v, a in graph.constants.items():
        if v not in env:
            env[v] = w.model.constant(a, v.type.dtype, v.name)
    regions = chains(graph)
    between = {m for p in regions.values() for m in p.between}
    for n in graph.nodes():
        if n in between:
            continue
        w.doc, w.stem = "; ".join(dict.fromkeys(map(str, n.locs))), n.outputs[0].name
        operands = [None if v is None else env[v] for v in (regions[n].operands if n in regions else n.inputs)]
        before = len(w.nodes)
        made = converted(n, operands, w)
        for v, name in zip(n.outputs, made):
            env[v] = _named(w.nodes[before:], name, wanted[v]) if v in wanted else name
            w.remember(env[v], v.type.shape)


def _named(nodes: Sequence[onnx.NodeProto], name: str, wanted: str) -> str:
    """Call a value what the model calls it, if one of these nodes, which were made last, makes it."""
    if not any(name in n.output for n in nodes):
        return name
    for n in nodes:
        n.output[:] = [wanted if o == name else o for o in n.output]
        n.input[:] = [wanted if i == name else i for i in n.input]
    return wanted


class Refused(UnsupportedError):
    """An op that has no form in ONNX; says where it comes from."""


def converted(n: Node, operands: Sequence[str | None], w: Writer) -> Sequence[str]:
    """Return a node's result names: by its op's function, or by its definition where there is none or it refuses."""
    c = Call(n, operands, w)
    before = len(w.nodes), dict(w.sizes)
    known = OPS.get(n.op.name) is n.op  # a user's op may have any name
    try:
        if known and n.op.name in CONTROL:
            return CONTROL[n.op.name](c, body)
        convert = TABLE.get(n.op.name) if known else None
        if convert is None:
            raise UnsupportedError("ONNX has no form of it")
        made = convert(c)
        return [made] if isinstance(made, str) else made
    except Refused:
        raise
    except UnsupportedError as e:
        if n.op.decompose is None and (known or n.op.compute is None):
            raise Refused(f"{n.op.name}{locations(n.locs)} cannot be exported: {e}") from None
    del w.nodes[before[0] :]
    w.sizes = before[1]
    return expanded(n, operands, w)


def expanded(n: Node, operands: Sequence[str | None], w: Writer) -> Sequence[str]:
    """The results of what an op is defined by: other ops, or a tensor expression."""
    g = Graph(n.op.name)
    inputs = [None if v is None else g.add_input(v.name, v.type) for v in n.inputs]
    env = {v: name for v, name in zip(inputs, operands) if v is not None and name is not None}
    for v, outer in zip(inputs, n.inputs):
        if v is not None and n.graph is not None and outer in n.graph.constants:  # weights stay known as constants
            g.inputs.remove(v)
            g.constants[v] = n.graph.constants[outer]
    b = Builder(g, None, n.locs)
    if n.op.decompose is not None:
        made = n.op.decompose(b, *inputs, **n.attrs)
        g.outputs = list(made) if isinstance(made, (tuple, list)) else [made]
    else:
        try:
            g.outputs = spelled_out(b, n.op, inputs, n.attrs)
        except UnsupportedError as e:
            raise Refused(f"{n.op.name}{locations(n.locs)} cannot be exported: {e}") from None
    walk(g, w, env, {})
    return [env[v] for v in g.outputs]


def body(graph: Graph, w: Writer, given: dict[int, str]) -> list[str]:
    """Write the body of a loop or branch, and give the names of its results."""
    env = {graph.inputs[k]: name for k, name in given.items()}
    walk(graph, w, env, {})
    return [env[v] for v in graph.outputs]
