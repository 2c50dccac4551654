"""What a model declares of its inputs and outputs, without importing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dnnc.frontends.onnx.reader import load
from dnnc.frontends.onnx.tensors import dtype_of
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.form import Kind
from dnnc.ir.graph import identifier


@dataclass(frozen=True)
class Declared:
    """Return names and kinds of non-initializer inputs and outputs, and facts on input sizes.

    `dims` are the names of symbolic sizes of inputs. `shapes`: the inputs' shapes if all are fixed tensors, else None.
    """

    inputs: tuple[tuple[str, Kind], ...]
    outputs: tuple[tuple[str, Kind | None], ...]
    dims: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]] | None

    @property
    def plain(self) -> bool:
        """Are inputs tensors of known rank, and outputs tensors?"""
        return all(k.plain for _, k in self.inputs) and all(k is None or k.kind == "tensor" for _, k in self.outputs)


def declared(model: Any) -> Declared:
    """What a model says of itself. UnsupportedError for an input whose type is missing or unknown."""
    graph = load(model).graph
    constants = {t.name for t in graph.initializer} | {s.values.name for s in graph.sparse_initializer}
    given = [i for i in graph.input if i.name not in constants]
    inputs = tuple((i.name, kind_of(i.type, f"input {i.name!r}")) for i in given)
    dims = [
        n
        for i, (_, kind) in zip(given, inputs)
        if kind.plain
        for k, d in enumerate(i.type.tensor_type.shape.dim)
        if (n := symbol_of(d, i.name, k))
    ]
    fixed = not dims and all(kind.plain for _, kind in inputs)
    shapes = {i.name: tuple(d.dim_value for d in i.type.tensor_type.shape.dim) for i in given} if fixed else None
    outputs = tuple(
        (o.name, kind_of(o.type, f"output {o.name!r}") if _has_type(o.type) else None) for o in graph.output
    )
    return Declared(inputs, outputs, tuple(dict.fromkeys(dims)), shapes)


def _has_type(t: Any) -> bool:
    """Models may leave out an output's type, or its element type."""
    kind = t.WhichOneof("value")
    return kind is not None and not (kind == "tensor_type" and not t.tensor_type.elem_type)


def kind_of(t: Any, what: str, within: bool = False) -> Kind:
    """Return the kind of a type. UnsupportedError names `what`; `within`: the item of a sequence."""
    form = t.WhichOneof("value")
    if form == "tensor_type":
        known = t.tensor_type.HasField("shape") and not within
        return Kind("tensor", dtype_of(t.tensor_type.elem_type, what), len(t.tensor_type.shape.dim) if known else None)
    if form == "sequence_type":
        return Kind("sequence", element=kind_of(t.sequence_type.elem_type, what, True))
    if form == "optional_type":
        return Kind("optional", element=kind_of(t.optional_type.elem_type, what, within))
    if form == "map_type":
        values = kind_of(t.map_type.value_type, what, True)
        if values.kind != "tensor":
            raise UnsupportedError(f"{what} is a map to values that are no tensors ({values})")
        return Kind("map", values.dtype, key=dtype_of(t.map_type.key_type, what))
    raise UnsupportedError(
        f"{what} is a {(form or 'value without a type').replace('_type', '').replace('_', ' ')}; expected a tensor, "
        "sequence, map or optional"
    )


def symbol_of(d: Any, name: str, axis: int) -> str:
    """Return the name of a symbolic size; "" for a number. Each `?`, `-1` or empty text is a fresh symbol."""
    kind = d.WhichOneof("value")
    if kind == "dim_value" and d.dim_value >= 0:
        return ""
    text = d.dim_param.strip() if kind == "dim_param" else ""
    if not any(c.isalnum() and c.isascii() for c in text) or text.lstrip("-").isdigit():
        return f"{identifier(name)}_d{axis}"
    return identifier(text)
