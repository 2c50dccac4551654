"""What a model declares of its inputs and outputs, without importing it."""

from __future__ import annotations

from typing import Any

from dnnc.frontends.onnx.reader import load
from dnnc.frontends.onnx.tensors import dtype_of
from dnnc.ir.dtype import DType
from dnnc.ir.errors import UnsupportedError


def declared(model: Any) -> tuple[list[tuple[str, DType, int]], list[str]]:
    """(name, dtype, rank) of every input that is no initializer, and the outputs' names. UnsupportedError for an input that is no tensor."""
    graph = load(model).graph
    constants = {t.name for t in graph.initializer} | {s.values.name for s in graph.sparse_initializer}
    inputs = []
    for i in graph.input:
        if i.name in constants:
            continue
        t = i.type.tensor_type
        if not i.type.HasField("tensor_type") or not t.HasField("shape"):
            raise UnsupportedError(f"input {i.name!r} must be a tensor of known rank")
        inputs.append((i.name, dtype_of(t.elem_type, f"input {i.name!r}"), len(t.shape.dim)))
    return inputs, [o.name for o in graph.output]
