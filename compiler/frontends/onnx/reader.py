"""A path, bytes or ModelProto to a checked `Model` that the importer may rely on. No operators here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError

from dnnc.frontends.onnx.tensors import Array, decode
from dnnc.ir.errors import ModelError, count

MOST_NODES = 1 << 20
MOST_DEPTH = 100  # of functions within functions that are counted: the importer refuses fewer
MOST_BYTES = 1 << 31  # of a protobuf; larger models keep their weights in other files

# The newest opset of each domain that the converters were written for.
LATEST = {"": 28, "ai.onnx.ml": 5}


# Names that exporters give to every graph: the name of the file says more.
GENERIC = frozenset(("", "main_graph", "main", "graph", "torch_jit", "torch-jit-export", "tf2onnx"))


@dataclass(frozen=True)
class Model:
    """A parsed model: graph, opset of each domain, functions by (domain, name, overload), external data."""

    graph: onnx.GraphProto
    opsets: dict[str, int]
    functions: dict[tuple[str, str, str], onnx.FunctionProto]
    folder: Path | None
    ir_version: int = 0
    custom: Mapping[tuple[str, str], Callable[[Any], Any]] = field(default_factory=dict)  # converters, ahead of all


def load(model: Any) -> Model:
    """Read a model.

    Args:
        model: the path of an `.onnx` file, its bytes, or a ModelProto; or what was read before.

    Raises:
        ModelError: there is no such file, it is no ONNX model, or it is damaged.
    """
    if isinstance(model, Model):
        return model
    proto = read_proto(model)
    if isinstance(model, (str, os.PathLike)):
        if proto.graph.name in GENERIC and proto.HasField("graph"):
            proto.graph.name = Path(model).stem
        return _checked(proto, Path(model).parent, str(model))
    return _checked(proto, None, "the ModelProto" if isinstance(model, onnx.ModelProto) else "the given bytes")


def read_proto(model: Any) -> onnx.ModelProto:
    """The protobuf of a model, unchecked. Errors are those of `load`."""
    if isinstance(model, onnx.ModelProto):
        return model
    if isinstance(model, (bytes, bytearray, memoryview)):
        return _parse(bytes(model), "the given bytes")
    if isinstance(model, (str, os.PathLike)):
        return _parse(_content(Path(model)), str(model))
    raise ModelError(f"a model is a path to an .onnx file, its bytes or an onnx.ModelProto; got {type(model).__name__}")


def _near(path: Path) -> str:
    """`; did you mean models/net.onnx?`, or nothing where no model beside it has such a name."""
    there = {p.stem: p for p in path.parent.glob("*.onnx")}
    close = get_close_matches(path.stem, there, 1)
    return f"; did you mean {there[close[0]]}?" if close else ""


def _content(path: Path) -> bytes:
    try:
        if not path.exists():
            raise ModelError(f"there is no file {path}{_near(path)}")
        if not path.is_file():
            raise ModelError(f"{path} is not a file")
        if path.stat().st_size >= MOST_BYTES:
            raise ModelError(
                f"{path} has {path.stat().st_size} bytes; a protobuf has less than {MOST_BYTES}, so this is not an "
                "ONNX model"
            )
        return path.read_bytes()
    except (OSError, ValueError) as e:  # a null byte in the name is a ValueError
        raise ModelError(f"{path} cannot be read: {getattr(e, 'strerror', None) or e}") from e


def _parse(data: bytes, what: str) -> onnx.ModelProto:
    if not data:
        raise ModelError(f"{what}: empty; expected an ONNX model")
    m = onnx.ModelProto()
    try:
        m.ParseFromString(data)
    except (DecodeError, RuntimeError) as e:
        kind = (
            "looks like text, not like an ONNX model"
            if _is_text(data)
            else "is not an ONNX model, or is truncated or damaged"
        )
        raise ModelError(f"{what} {kind} ({count(len(data), 'byte')}): {e}") from e
    return m


def _is_text(data: bytes) -> bool:
    head = data[:512]
    return all(32 <= c < 127 or c in b"\t\r\n" for c in head)


def _checked(m: onnx.ModelProto, folder: Path | None, what: str) -> Model:
    if not m.HasField("graph"):
        raise ModelError(f"{what} is not an ONNX model: it has no graph")
    if not m.graph.output:
        raise ModelError(
            f"{what}: the graph {m.graph.name!r} has no outputs, so there is nothing to compute; the file may be "
            "truncated"
        )
    opsets = _opsets(m.opset_import, what)
    if not opsets and m.ir_version < 3:
        opsets = {"": 1}  # files older than IR version 3 declare no opset
    if not opsets:
        raise ModelError(f"{what} declares no opset (opset_import), so its operators have no meaning")
    functions = {(standard(f.domain), f.name, getattr(f, "overload", "")): f for f in m.functions}
    if functions and inlined(m.graph.node, functions) > MOST_NODES:
        raise ModelError(
            f"{what}: its functions call each other so often that the graph has more than {MOST_NODES} nodes when they "
            "are inlined"
        )
    return Model(m.graph, opsets, functions, folder, m.ir_version)


def inlined(nodes: Iterable[onnx.NodeProto], functions: Mapping[tuple[str, str, str], onnx.FunctionProto]) -> int:
    """Count the nodes with functions inlined, subgraphs included; a recursive call counts as one."""
    known: dict[tuple[str, str, str], int] = {}

    def count(some: Iterable[onnx.NodeProto], depth: int) -> int:
        total = 0
        for n in some:
            key = (standard(n.domain), n.op_type, getattr(n, "overload", ""))
            if key in functions and key not in known:
                known[key] = 1  # while it is counted: what it finds of itself is an error that the importer tells
                known[key] = count(functions[key].node, depth + 1) if depth < MOST_DEPTH else 1
            total += known.get(key, 1) + sum(
                count(g.node, depth) for a in n.attribute for g in (*([a.g] if a.HasField("g") else ()), *a.graphs)
            )
        return total

    return count(nodes, 0)


def _opsets(imports: Any, what: str) -> dict[str, int]:
    out: dict[str, int] = {}
    for o in imports:
        domain = standard(o.domain)
        if o.version < 1:
            raise ModelError(f"{what}: opset {o.version} of domain {domain or 'ai.onnx'!r}; opsets start at 1")
        if out.get(domain, o.version) != o.version:
            raise ModelError(
                f"{what}: declares two opsets of domain {domain or 'ai.onnx'!r}, {out[domain]} and {o.version}"
            )
        out[domain] = o.version
    return out


def standard(domain: str) -> str:
    """`ai.onnx` is another name of the domain ''."""
    return "" if domain == "ai.onnx" else domain


def function_opsets(f: onnx.FunctionProto) -> dict[str, int]:
    """The opsets that a function's body is written in."""
    return _opsets(f.opset_import, f"function {f.domain}:{f.name}")


def initial_arrays(g: onnx.GraphProto, folder: Path | None) -> dict[str, Array]:
    """The initializers of a graph by name. ModelError where one has no name or is damaged."""
    out: dict[str, Array] = {}
    for t in g.initializer:
        if not t.name:
            raise ModelError(f"graph {g.name!r}: an initializer has no name")
        out[t.name] = decode(t, folder)
    for s in g.sparse_initializer:
        out[s.values.name] = sparse(s, folder)
    return out


def sparse(t: onnx.SparseTensorProto, folder: Path | None) -> Array:
    """A sparse initializer as a dense array. ModelError where indices do not fit the shape."""
    values, indices = decode(t.values, folder), decode(t.indices, folder)
    shape = tuple(t.dims)
    what = f"sparse tensor {t.values.name!r}"
    if any(d < 0 for d in shape):
        raise ModelError(f"{what}: its shape {list(shape)} has a negative dim")
    if indices.ndim == 2 and indices.shape == (len(values), len(shape)):
        outside = (indices < 0) | (indices >= np.array(shape))
        if outside.any():
            raise ModelError(f"{what}: an index lies outside its shape {list(shape)}")
        at = np.ravel_multi_index(tuple(indices.T), shape) if len(values) else indices[:, 0]
    elif indices.shape == (len(values),):
        at = indices
    else:
        raise ModelError(
            f"{what}: {count(len(values), 'value')} with indices of shape {list(indices.shape)}; expected "
            f"[{len(values)}] or "
            f"[{len(values)}, {len(shape)}]"
        )
    size = int(np.prod(shape, dtype=np.int64))
    if len(at) and (at.min() < 0 or at.max() >= size):
        raise ModelError(f"{what}: an index lies outside its {size} elements")
    dense = np.zeros(size, values.dtype)
    dense[at] = values
    return dense.reshape(shape)
