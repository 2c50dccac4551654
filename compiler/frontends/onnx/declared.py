"""What a model declares of its inputs and outputs, without importing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dnnc.frontends.onnx.reader import load
from dnnc.frontends.onnx.tensors import dtype_of
from dnnc.ir.dtype import DType
from dnnc.ir.errors import UnsupportedError


@dataclass(frozen=True)
class Declared:
    """(name, dtype, rank) of every input that is no initializer, the outputs' names, and whether some input has a symbolic size."""

    inputs: tuple[tuple[str, DType, int], ...]
    outputs: tuple[str, ...]
    symbolic: bool


def declared(model: Any) -> Declared:
    """What a model says of itself. UnsupportedError for an input that is no tensor of known rank."""
    graph = load(model).graph
    constants = {t.name for t in graph.initializer} | {s.values.name for s in graph.sparse_initializer}
    inputs, symbolic = [], False
    for i in graph.input:
        if i.name in constants:
            continue
        t = i.type.tensor_type
        if not i.type.HasField("tensor_type") or not t.HasField("shape"):
            raise UnsupportedError(f"input {i.name!r} must be a tensor of known rank")
        inputs.append((i.name, dtype_of(t.elem_type, f"input {i.name!r}"), len(t.shape.dim)))
        symbolic |= any(d.WhichOneof("value") != "dim_value" or d.dim_value < 0 for d in t.shape.dim)
    return Declared(tuple(inputs), tuple(o.name for o in graph.output), symbolic)
