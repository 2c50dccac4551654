"""An ONNX model in a saved one: protobuf without large tensors, whose bytes lie among other weights.

Data in external files comes along, so that what was saved needs no other file; and since no message holds the weights,
a model may be larger than the 2 GB that a protobuf can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Union

import numpy as np
import onnx

from dnnc.frontends.onnx.reader import load, read_proto
from dnnc.frontends.onnx.tensors import Array, external_bytes
from dnnc.ir.errors import ModelError

KEPT_INSIDE = 1024  # bytes below which the data of a tensor stays in the protobuf
_PLACE = "dnnc"  # key of the external data entry that holds a number

Parts = tuple[bytes, list[Array]]
_Body = Union[onnx.GraphProto, onnx.FunctionProto]


def take_apart(model: Any) -> Parts:
    """Split a model into protobuf and the bytes (uint8[n]) of large tensors. ModelError: external data is missing."""
    folder = load(model).folder
    m = onnx.ModelProto()
    m.CopyFrom(read_proto(model))
    data: list[Array] = []
    for t in _tensors(m):
        if t.data_location == onnx.TensorProto.EXTERNAL:
            data.append(external_bytes(t, folder))
            _place(t, len(data) - 1)
        elif len(t.raw_data) >= KEPT_INSIDE:
            data.append(np.frombuffer(t.raw_data, np.uint8))
            _place(t, len(data) - 1)
    return m.SerializeToString(deterministic=True), data


def external_files(model: Any) -> list[str]:
    """Return a model's external data files by their names in the model. ModelError where one cannot be read."""
    places = (e.value for t in _tensors(read_proto(model)) for e in t.external_data if e.key == "location")
    return list(dict.fromkeys(places))


def put_together(proto: bytes, data: Sequence[Array]) -> onnx.ModelProto:
    """The model again. ModelError where the parts do not fit."""
    m = read_proto(proto)
    for t in _tensors(m):
        place = next((e.value for e in t.external_data if e.key == _PLACE), None)
        if place is None:
            continue
        if not place.isdigit() or int(place) >= len(data):
            raise ModelError(f"tensor {t.name!r}: its data is said to be number {place} of {len(data)}")
        t.raw_data = data[int(place)].tobytes()
        t.ClearField("external_data")
        t.ClearField("data_location")
    return m


def _place(t: onnx.TensorProto, number: int) -> None:
    """Note where the data is, in place of it."""
    t.ClearField("raw_data")
    t.ClearField("external_data")
    t.data_location = onnx.TensorProto.EXTERNAL
    entry = t.external_data.add()
    entry.key, entry.value = _PLACE, str(number)


def _tensors(m: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model, in a fixed order."""
    for body in (m.graph, *m.functions):
        yield from _of_body(body)


def _of_body(body: _Body) -> Iterator[onnx.TensorProto]:
    if isinstance(body, onnx.GraphProto):
        yield from body.initializer
        for s in body.sparse_initializer:
            yield from (s.values, s.indices)
    for n in body.node:
        for a in n.attribute:
            yield from _of_attribute(a)


def _of_attribute(a: onnx.AttributeProto) -> Iterator[onnx.TensorProto]:
    if a.HasField("t"):
        yield a.t
    yield from a.tensors
    for s in (*([a.sparse_tensor] if a.HasField("sparse_tensor") else []), *a.sparse_tensors):
        yield from (s.values, s.indices)
    for g in (*([a.g] if a.HasField("g") else []), *a.graphs):
        yield from _of_body(g)
