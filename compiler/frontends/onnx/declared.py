"""What a model declares of its inputs and outputs, without importing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dnnc.frontends.onnx.reader import load
from dnnc.frontends.onnx.tensors import dtype_of
from dnnc.ir.dtype import DType
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.graph import identifier


@dataclass(frozen=True)
class Declared:
    """(name, dtype, rank) of every input that is no initializer, the outputs' names, and the names of symbolic sizes of inputs."""

    inputs: tuple[tuple[str, DType, int], ...]
    outputs: tuple[str, ...]
    dims: tuple[str, ...]


def declared(model: Any) -> Declared:
    """What a model says of itself. UnsupportedError for an input that is no tensor of known rank."""
    graph = load(model).graph
    constants = {t.name for t in graph.initializer} | {s.values.name for s in graph.sparse_initializer}
    inputs, dims = [], []
    for i in graph.input:
        if i.name in constants:
            continue
        t = i.type.tensor_type
        if not i.type.HasField("tensor_type") or not t.HasField("shape"):
            raise UnsupportedError(f"input {i.name!r} must be a tensor of known rank")
        inputs.append((i.name, dtype_of(t.elem_type, f"input {i.name!r}"), len(t.shape.dim)))
        dims += [n for k, d in enumerate(t.shape.dim) if (n := symbol_of(d, i.name, k))]
    return Declared(tuple(inputs), tuple(o.name for o in graph.output), tuple(dict.fromkeys(dims)))


def symbol_of(d: Any, name: str, axis: int) -> str:
    """The name of a symbolic size; "" for a number. One whose text says nothing (`?`, `-1`, empty) is a symbol of its own."""
    kind = d.WhichOneof("value")
    if kind == "dim_value" and d.dim_value >= 0:
        return ""
    text = d.dim_param.strip() if kind == "dim_param" else ""
    if not any(c.isalnum() and c.isascii() for c in text) or text.lstrip("-").isdigit():
        return f"{identifier(name)}_d{axis}"
    return identifier(text)
