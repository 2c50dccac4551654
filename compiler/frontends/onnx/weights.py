"""Models before they are read for training: which of their floats are weights, and the part that makes some values."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, TensorProto

from dnnc.frontends.onnx.reader import Model
from dnnc.ir.errors import InputError

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
WEIGHED = frozenset("Conv ConvTranspose Gemm MatMul BatchNormalization PRelu LayerNormalization".split())


def with_initializers(model: Model) -> Model:
    """Constants of the main graph that hold several floats become initializers, as other weights are."""
    g = GraphProto()
    g.CopyFrom(model.graph)
    kept = []
    for n in model.graph.node:
        value = next((a.t for a in n.attribute if a.name == "value"), None) if n.op_type == "Constant" else None
        if value is None or n.domain not in ("", "ai.onnx") or value.data_type not in FLOATS or not _several(value):
            kept.append(n)
            continue
        t = g.initializer.add()
        t.CopyFrom(value)
        t.name = n.output[0]
    if len(kept) == len(model.graph.node):
        return model
    del g.node[:]
    g.node.extend(kept)
    return replace(model, graph=g)


def _several(t: onnx.TensorProto) -> bool:
    return len(t.dims) > 0 and int(np.prod(t.dims, dtype=np.int64)) > 1


def cut(model: Model, outputs: Sequence[str]) -> Model:
    """The part of a model that makes these values."""
    g = GraphProto()
    g.CopyFrom(model.graph)
    makers = {o: k for k, n in enumerate(g.node) for o in n.output if o}
    for name in outputs:
        if name not in makers:
            near = difflib.get_close_matches(str(name), makers, 3, 0.4)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {', '.join([*makers][:20])}"
            raise InputError(f"from_onnx: outputs: no node of the model makes {name!r}; {hint}")
    needed, stack = set[int](), list(outputs)
    read = set(outputs)
    while stack:
        k = makers.get(stack.pop())
        if k is not None and k not in needed:
            needed.add(k)
            found = set(_reads(g.node[k]))
            read |= found
            stack += found
    kept = [n for k, n in enumerate(g.node) if k in needed]
    weights = [t for t in g.initializer if t.name in read]
    known = {v.name: v for v in (*g.value_info, *g.output)}
    inputs = [i for i in g.input if i.name in read]
    for field, new in (("node", kept), ("initializer", weights), ("input", inputs)):
        values = [type(x).FromString(x.SerializeToString()) for x in new]
        del getattr(g, field)[:]
        getattr(g, field).extend(values)
    del g.output[:]
    g.output.extend(known.get(n) or onnx.ValueInfoProto(name=n) for n in outputs)
    return replace(model, graph=g)


def _reads(n: onnx.NodeProto) -> Iterator[str]:
    """What a node reads, subgraphs included."""
    yield from n.input
    for a in n.attribute:
        for g in (*([a.g] if a.HasField("g") else ()), *a.graphs):
            yield from (o.name for o in g.output)
            for inner in g.node:
                yield from _reads(inner)


def is_float(a: Any) -> bool:
    return bool(a.dtype.kind == "f" or a.dtype.name == "bfloat16")


def running_statistics(model: Model, arrays: Mapping[str, Any]) -> dict[str, float]:
    """Running statistics of batch normalizations among initializers, and their momenta."""
    found: dict[str, float] = {}
    for n in model.graph.node:
        if n.op_type == "BatchNormalization" and n.domain in ("", "ai.onnx"):
            momentum = next((a.f for a in n.attribute if a.name == "momentum"), 0.9)
            found.update((i, momentum) for i in n.input[3:5] if i in arrays)
    return found


def weights_of_layers(model: Model) -> set[str]:
    """What nodes read in the place of weights."""
    return {i for n in model.graph.node if n.op_type in WEIGHED for i in n.input[1:]}
