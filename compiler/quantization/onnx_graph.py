"""An ONNX model that quantization edits: who makes and reads each value, constants as arrays, types.

`opened` brings a model into the form that the rest of this folder relies on: functions inlined, constants as dense
initializers, what depends on constants alone folded, batch normalizations folded into convolutions, each node with a
name of its own, an opset that has the operators of quantization. What it computes stays the same.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import helper, inliner, numpy_helper, shape_inference, version_converter

from dnnc.export.graph import to_onnx
from dnnc.export.writer import ELEMENTS
from dnnc.frontends.onnx import read
from dnnc.frontends.onnx.importer import RANDOM
from dnnc.frontends.onnx.reader import LATEST, initial_arrays, load, sparse
from dnnc.ir.errors import DnncError, InputError, ModelError, UnsupportedError
from dnnc.ir.types import TensorType
from dnnc.passes.base import pass_context
from dnnc.passes.rewrites.fold import fold

Array = np.ndarray[Any, Any]
LEAST, BLOCKS, FLOAT8 = 13, 21, 19  # opsets: scales along an axis, scales of blocks and 4-bit types, 8-bit floats
QUANTIZED = (
    "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger",
    "MatMulInteger", "MatMulNBits",
)  # fmt: skip
TRIED, STEP = (480, 672), 96  # two values of the first open size, and how far the next one is
LARGEST = 1 << 20  # bytes of a constant that is larger than what it is computed from
UNFOLDED = RANDOM | (set(QUANTIZED) - {"QuantizeLinear"})  # of constants


class Model:
    """A model and its indices, which `changed` makes anew.

    Attributes:
        proto: the model, which is this object's own.
        constants: initializers that nobody may replace, by name.
        makers: the node of each value of the main graph.
        readers: nodes of the main graph that read a value, once for each operand.
        pinned: values that the outputs or a subgraph name: they must stay.
        types: dtype and shape of values, where shape inference finds them; sizes are None where they are open.
        open: shapes of values with open sizes, as expressions of the inputs' sizes.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.proto = proto
        self._taken = {n for node in walk(proto.graph) for n in (*node.input, *node.output, node.name)}
        self._taken |= {t.name for t in proto.graph.initializer} | {v.name for v in proto.graph.input}
        self.types: dict[str, tuple[Any, tuple[int | None, ...]]] = {}
        self.open: dict[str, tuple[int | str, ...]] = {}
        self.changed()

    @property
    def graph(self) -> onnx.GraphProto:
        return self.proto.graph

    @property
    def opset(self) -> int:
        return next(int(o.version) for o in self.proto.opset_import if o.domain in ("", "ai.onnx"))

    @property
    def inputs(self) -> list[onnx.ValueInfoProto]:
        """Inputs that a call gives."""
        return [v for v in self.graph.input if v.name not in self.constants]

    def changed(self) -> None:
        """See the graph as it is now."""
        self.constants = initial_arrays(self.graph, None)
        self.makers = {o: n for n in self.graph.node for o in n.output if o}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        self.pinned = {o.name for o in self.graph.output}
        for n in self.graph.node:
            for i in dict.fromkeys(n.input):
                self.readers.setdefault(i, []).append(n)
            for a in n.attribute:
                for g in (*([a.g] if a.HasField("g") else ()), *a.graphs):
                    self.pinned |= {i for inner in walk(g) for i in inner.input} | {o.name for o in g.output}

    def infer(self) -> None:
        """Find types and shapes; values that inference does not reach have none."""
        self.types |= _types(self.proto, self.graph)
        every = [o for n in self.graph.node for o in n.output if o]
        if any(o not in self.types or None in self.types[o][1] for o in every):
            for v, (kind, sizes) in _read_types(self, every).items():
                old = self.types.get(v, (kind, (None,) * len(sizes)))
                if len(old[1]) == len(sizes):
                    self.open[v] = tuple(s if d is None else d for d, s in zip(old[1], sizes))
                    self.types[v] = old[0] or kind, tuple(d if isinstance(d, int) else None for d in self.open[v])

    def rank(self, name: str) -> int | None:
        """Of a value; None where it is not known."""
        if name in self.constants:
            return int(self.constants[name].ndim)
        found = self.types.get(name)
        return None if found is None else len(found[1])

    def fresh(self, name: str) -> str:
        """A name that nothing has, like this one."""
        out, k = name, 1
        while out in self._taken:
            out, k = f"{name}_{k}", k + 1
        self._taken.add(out)
        return out

    def add(self, name: str, array: Array, kind: int | None = None) -> str:
        """A new initializer; `kind`: the type in ONNX where NumPy has none. Returns its name."""
        name = self.fresh(name)
        tensor = numpy_helper.from_array(array, name) if kind is None else packed(array, name, kind)
        self.graph.initializer.append(tensor)
        return name

    def sole_reader(self, value: str) -> onnx.NodeProto | None:
        """The node that alone reads a value, if nothing else does."""
        nodes = self.readers.get(value, [])
        return nodes[0] if len(nodes) == 1 and value not in self.pinned else None

    def drop_unread(self) -> None:
        """Remove nodes and initializers that nothing reads."""
        while True:
            self.changed()
            dead = [n for n in self.graph.node if not any(o in self.readers or o in self.pinned for o in n.output if o)]
            for n in dead:
                self.graph.node.remove(n)
            if not dead:
                break
        kept = [t for t in self.graph.initializer if t.name in self.readers or t.name in self.pinned]
        names = {t.name for t in kept}
        given = [v for v in self.graph.input if v.name not in self.constants or v.name in names]
        for field, values in ((self.graph.initializer, kept), (self.graph.input, given)):
            if len(values) != len(field):
                copies = list(values)
                del field[:]
                field.extend(copies)
        self.changed()


def opened(model: Any, least: int = LEAST, inputs: Any = None) -> Model:
    """A model in the form above, as a copy.

    Args:
        model: what `dnnc.compile` takes: an ONNX model, a graph, a function or a module.
        least: the opset that it must have.
        inputs: of a function or module.

    Raises:
        ModelError: it cannot be read, or not be written in this opset.
    """
    proto = onnx.ModelProto()
    if isinstance(model, (str, os.PathLike, bytes, bytearray, onnx.ModelProto)):
        load(model)  # errors as of `dnnc.compile`
        proto.CopyFrom(_with_weights(model))
    else:
        proto.CopyFrom(to_onnx(model, opset=max(least, 18), inputs=inputs))
    for t in proto.graph.sparse_initializer:
        proto.graph.initializer.append(numpy_helper.from_array(sparse(t, None), t.values.name))
    del proto.graph.sparse_initializer[:]
    if proto.functions:
        proto = inliner.inline_local_functions(proto)
    out = Model(_in_opset(proto, least))
    _name_nodes(out.graph)
    _constants(out)
    _fold_constants(out)
    _fold_batch_norms(out)
    out.drop_unread()
    out.infer()
    return out


def refuse_quantized(m: Model) -> None:
    """InputError for a model with operators of quantization."""
    counts = Counter(n.op_type for n in walk(m.graph) if n.op_type in QUANTIZED or n.op_type.startswith("QLinear"))
    if counts:
        found = ", ".join(f"{n} {op}" for op, n in counts.most_common(3))
        raise InputError(
            f"the model is quantized already ({found}); quantize the float model that it was made from, or compile "
            "this one as it is"
        )


def walk(g: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph, subgraphs included."""
    for n in g.node:
        yield n
        for a in n.attribute:
            for inner in (*([a.g] if a.HasField("g") else ()), *a.graphs):
                yield from walk(inner)


def attribute(n: onnx.NodeProto, name: str, default: Any) -> Any:
    """The value of an attribute."""
    found = next((a for a in n.attribute if a.name == name), None)
    return default if found is None else helper.get_attribute_value(found)


def packed(array: Array, name: str, kind: int) -> onnx.TensorProto:
    """An array of small integers or of bit patterns (uint8) as a tensor of a type that NumPy lacks."""
    if kind in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4):
        flat = array.reshape(-1).astype(np.uint8) & 15
        flat = np.append(flat, np.zeros(flat.size % 2, np.uint8))
        data = (flat[0::2] | (flat[1::2] << 4)).tobytes()
    else:
        data = array.astype(np.uint8).tobytes()
    return helper.make_tensor(name, kind, array.shape, data, raw=True)


# --- reading ----------------------------------------------------------------------------------------------------------


def _with_weights(model: Any) -> onnx.ModelProto:
    """The protobuf with external weights in it."""
    try:
        if isinstance(model, (str, os.PathLike)):
            return onnx.load(os.fspath(model))
        return model if isinstance(model, onnx.ModelProto) else onnx.load_from_string(bytes(model))
    except (OSError, ValueError, onnx.checker.ValidationError) as e:
        raise ModelError(f"the weights of the model cannot be read: {e}") from e


def _types(proto: onnx.ModelProto, otherwise: onnx.GraphProto | None) -> dict[str, tuple[Any, tuple[int | None, ...]]]:
    """What inference of shapes finds, or what a graph says where it fails."""
    try:
        found = shape_inference.infer_shapes(_without_weights(proto), data_prop=True).graph
    except (RuntimeError, ValueError, shape_inference.InferenceError):
        if otherwise is None:
            return {}
        found = otherwise
    out: dict[str, tuple[Any, tuple[int | None, ...]]] = {}
    for v in (*found.input, *found.value_info, *found.output):
        if v.type.HasField("tensor_type") and v.type.tensor_type.HasField("shape"):
            t = v.type.tensor_type
            out[v.name] = t.elem_type, tuple(d.dim_value if d.HasField("dim_value") else None for d in t.shape.dim)
    return out


def _read_types(m: Model, values: list[str]) -> dict[str, tuple[Any, tuple[int | str, ...]]]:
    """Types of values by this compiler's own reader, which follows computed shapes; none where it cannot read them."""
    proto = _without_weights(m.proto)
    given = {v.name for v in m.inputs}
    kept = [v for v in proto.graph.input if v.name in given]
    for field, items in (
        (proto.graph.initializer, list(m.graph.initializer)),
        (proto.graph.input, [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in kept]),
        (proto.graph.output, [helper.make_empty_tensor_value_info(o) for o in values]),
    ):
        del field[:]
        field.extend(items)
    try:
        return _shapes(read(proto), values)
    except DnncError:  # of two sizes for each that is open, what depends on them
        try:
            a, b = (_shapes(read(_sized(proto, least)), values) for least in TRIED)
        except DnncError:
            return {}
    return {
        v: (a[v][0], tuple(x if x == y else f"{x} or {y}" for x, y in zip(a[v][1], b[v][1])))
        for v in a.keys() & b.keys()
        if len(a[v][1]) == len(b[v][1])
    }


def _shapes(g: Any, values: list[str]) -> dict[str, tuple[Any, tuple[int | str, ...]]]:
    """Types of a graph's outputs."""
    out: dict[str, tuple[Any, tuple[int | str, ...]]] = {}
    for name, v in zip(values, g.outputs):
        if isinstance(v.type, TensorType):
            shape = tuple(d if isinstance(d, int) else str(d) for d in v.type.shape)
            out[name] = ELEMENTS.get(v.type.dtype.name, onnx.TensorProto.UNDEFINED), shape
    return out


def _sized(proto: onnx.ModelProto, least: int) -> onnx.ModelProto:
    """A model with a number of its own for each open size of its inputs."""
    out = onnx.ModelProto()
    out.CopyFrom(proto)
    numbers: dict[str, int] = {}
    for v in out.graph.input:
        for k, d in enumerate(v.type.tensor_type.shape.dim):
            if not d.HasField("dim_value"):
                d.dim_value = numbers.setdefault(d.dim_param or f"{v.name}[{k}]", least + STEP * len(numbers))
    return out


def _without_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose large initializers have types alone, for inference of shapes."""
    out = onnx.ModelProto()
    out.CopyFrom(proto)
    for t in out.graph.initializer:
        if len(t.raw_data) > 1 << 10:
            info = helper.make_tensor_value_info(t.name, t.data_type, list(t.dims))
            if t.name not in {v.name for v in out.graph.input}:
                out.graph.input.append(info)
    kept = [t for t in out.graph.initializer if len(t.raw_data) <= 1 << 10]
    copies = [onnx.TensorProto.FromString(t.SerializeToString()) for t in kept]
    del out.graph.initializer[:]
    out.graph.initializer.extend(copies)
    out.ir_version = max(out.ir_version, 4)
    return out


def _in_opset(proto: onnx.ModelProto, least: int) -> onnx.ModelProto:
    """The model in an opset of at least `least`."""
    opsets = {o.domain: o.version for o in proto.opset_import}
    now = opsets.get("", opsets.get("ai.onnx", 0))
    proto.ir_version = max(proto.ir_version, 10 if least >= BLOCKS else 8)
    if now >= least or now > LATEST[""]:
        return proto
    if not any(n.domain not in ("", "ai.onnx") for n in walk(proto.graph)) or now >= LEAST:
        try:
            out = version_converter.convert_version(proto, least)
            out.ir_version = max(out.ir_version, proto.ir_version)
            return out
        except (RuntimeError, ValueError, UnicodeDecodeError, version_converter.ConvertError) as e:
            reason = str(e).strip().splitlines()[-1] if str(e).strip() else type(e).__name__
    else:
        reason = "it has operators of other domains"
    raise ModelError(
        f"the model is written in opset {now}; to change it, opset {least} is needed, to which onnx does not convert "
        f"it: {reason}; export it again in opset {least}"
    )


def _name_nodes(g: onnx.GraphProto) -> None:
    """Give each node a name of its own."""
    seen: set[str] = set()
    for n in g.node:
        name = n.name or next((o for o in n.output if o), n.op_type)
        base, k = name, 1
        while name in seen:
            name, k = f"{base}_{k}", k + 1
        seen.add(name)
        n.name = name


def _constants(m: Model) -> None:
    """Constant nodes as initializers."""
    for n in [n for n in m.graph.node if n.op_type == "Constant" and n.domain in ("", "ai.onnx")]:
        a = n.attribute[0]
        if a.name == "value":
            t = onnx.TensorProto()
            t.CopyFrom(a.t)
            t.name = n.output[0]
            m.graph.initializer.append(t)
        elif a.name in ("value_float", "value_int", "value_floats", "value_ints"):
            kind = np.float32 if "float" in a.name else np.int64
            m.graph.initializer.append(
                numpy_helper.from_array(np.asarray(helper.get_attribute_value(a), kind), n.output[0])
            )
        else:
            continue
        m.graph.node.remove(n)
    m.changed()


def _fold_constants(m: Model) -> None:
    """What depends on constants alone, such as a transposed or scaled weight, as constants."""
    known: dict[str, frozenset[str]] = {i: frozenset((i,)) for i in m.constants}  # with the initializers behind them
    made: dict[str, onnx.NodeProto] = {}
    for n in m.graph.node:
        given = [i for i in n.input if i]
        inner = any(a.HasField("g") or a.graphs for a in n.attribute)
        if given and known.keys() >= set(given) and not inner and n.op_type not in UNFOLDED:
            known |= dict.fromkeys(filter(None, n.output), frozenset().union(*(known[i] for i in given)))
            made[n.name] = n
    used = [i for n in m.graph.node if n.name not in made for i in n.input]
    outer = [i for i in dict.fromkeys(used) if i in known and i not in m.constants and i not in m.pinned]
    if not outer:
        return
    results = [helper.make_empty_tensor_value_info(o) for o in outer]
    operands = {i for n in made.values() for i in n.input}
    given = [t for t in m.graph.initializer if t.name in operands]
    part = helper.make_graph(list(made.values()), "constants", [], results, given)
    graph = read(helper.make_model(part, opset_imports=m.proto.opset_import, ir_version=m.proto.ir_version))
    fold(graph, pass_context())
    for name, v in zip(outer, graph.outputs):
        value = graph.constants.get(v)
        if value is None or value.nbytes > max(LARGEST, sum(m.constants[i].nbytes for i in known[name])):
            continue
        if value.dtype.kind in "fiub":  # what NumPy itself has
            m.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name))
            node = m.makers[name]
            node.output[list(node.output).index(name)] = m.fresh(name)
    m.drop_unread()


def _fold_batch_norms(m: Model) -> None:
    """batch_norm(conv(x, w, b))   ->   conv(x, w * s, b * s + t), where all but x is constant"""
    for n in list(m.graph.node):
        conv = m.makers.get(n.input[0]) if n.op_type == "BatchNormalization" else None
        if (
            conv is None
            or conv.op_type != "Conv"
            or m.sole_reader(n.input[0]) is None
            or attribute(n, "training_mode", 0)
        ):
            continue
        if any(i not in m.constants for i in (*n.input[1:5], *conv.input[1:])) or any(n.output[1:]):
            continue
        scale, offset, mean, variance = (m.constants[i].astype(np.float64) for i in n.input[1:5])
        factor = scale / np.sqrt(variance + attribute(n, "epsilon", 1e-5))
        w = m.constants[conv.input[1]]
        bias = m.constants[conv.input[2]].astype(np.float64) if len(conv.input) > 2 and conv.input[2] else 0.0
        filters = (w * factor.reshape(-1, *(1,) * (w.ndim - 1))).astype(w.dtype)
        operands = [
            conv.input[0],
            m.add(f"{conv.name}.weight", filters),
            m.add(f"{conv.name}.bias", ((bias - mean) * factor + offset).astype(w.dtype)),
        ]
        del conv.input[:]
        conv.input.extend(operands)
        conv.output[0] = n.output[0]
        m.graph.node.remove(n)
        m.changed()


def float32_only(m: Model) -> None:
    """UnsupportedError for a model whose weights are all in half precision: quantization starts from float32."""
    kinds = Counter(a.dtype for a in m.constants.values() if a.ndim >= 2 and a.dtype.kind in "fV")
    if kinds and np.dtype(np.float32) not in kinds:
        raise UnsupportedError(
            f"the weights of the model are {kinds.most_common(1)[0][0]}; quantize the float32 model that it was made "
            "from"
        )
