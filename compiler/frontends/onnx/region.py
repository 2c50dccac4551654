"""Bodies of loops and branches as graphs of their own: what they see from around them becomes operands of the node."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from dnnc.frontends.onnx.call import Call
from dnnc.ir.dtype import i64
from dnnc.ir.errors import DnncError
from dnnc.ir.graph import Graph, Value
from dnnc.ir.types import Dim, TensorType

Build = Callable[..., Sequence[Value]]
# What says that a computation has no such form: it is then unrolled, or read anew for the inputs of each call.
NOT_A_REGION = (DnncError,)


def region(c: Call, name: str, params: Sequence[TensorType], build: Build) -> tuple[Graph, list[Value]]:
    """Return a graph filled by `build(*values)`, and its captures, its last inputs. A failure leaves nothing behind."""
    importer, _ = c.env
    outer, inner = c.b.graph, Graph(name)
    importer.graph = c.b.graph = inner
    try:
        values = [inner.add_input(f"{name}_{k}", t) for k, t in enumerate(params)]
        inner.outputs = list(build(*values))
        return inner, _capture(inner, outer, importer.opaque)
    except BaseException:
        _forget(inner)
        raise
    finally:
        importer.graph = c.b.graph = outer


def _capture(inner: Graph, outer: Graph, opaque: Collection[Value]) -> list[Value]:
    """Let the graph read inputs and constants of its own in place of values from around it; `opaque` ones: inputs."""
    own = set(inner.inputs)
    made: dict[Value, Value] = {}
    captured: list[Value] = []

    def owned(v: Value) -> Value:
        if v in own or v in inner.constants or (v.node is not None and v.node.graph is inner):
            return v
        if v not in made:
            if v in outer.constants and v not in opaque:
                made[v] = inner.constant(outer.constants[v], v.name, v.locs, v.type)
            else:
                made[v] = inner.add_input(v.name, v.type, v.locs)
                captured.append(v)
        return made[v]

    for n in inner.nodes():
        for k, v in enumerate(n.inputs):
            if v is not None and owned(v) is not v:
                n.set_input(k, owned(v))
    inner.outputs = [owned(v) for v in inner.outputs]
    return captured


def _forget(inner: Graph) -> None:
    """Values from around the graph no longer count its nodes among their readers."""
    for n in inner.nodes():
        for k, v in enumerate(n.inputs):
            if v is not None:
                v.uses.pop((n, k), None)


def same_operands(graphs: Sequence[tuple[Graph, list[Value]]]) -> list[Value]:
    """Give branches one list of captured values: all that any of them captures."""
    every = list(dict.fromkeys(v for _, captured in graphs for v in captured))
    for g, captured in graphs:
        inputs = dict(zip(captured, g.inputs))
        g.inputs[:] = [inputs[v] if v in inputs else g.add_input(v.name, v.type, v.locs) for v in every]
    return every


def loop_node(
    c: Call,
    carried: Sequence[Value],
    scanned: Sequence[Value],
    build: Build,
    length: Dim,
    backward: Sequence[bool] = (),
) -> list[Value]:
    """Build a `loop` of known length; `build(number, *carried, *rows)` gives new carried values and rows to stack."""
    rows = [TensorType(x.type.dtype, x.type.shape[1:]) for x in scanned]
    params = [TensorType(i64, ()), *(v.type for v in carried), *rows]
    body, captured = region(c, "body", params, build)
    back = tuple(map(bool, backward)) if any(backward) else ()
    attrs = {"body": body, "carried": len(carried), "scanned": len(scanned), "length": length, "backward": back}
    made = c.b.op("loop", None, None, *carried, *scanned, *captured, **attrs)
    return list(made) if isinstance(made, tuple) else [made]
