"""Makes nodes of an ONNX graph: names, initializers, casts of unsupported types, run-time sizes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dnnc.ir.dtype import BY_NAME, DType
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.expr import Const, Expr, Linear, Op, Product, Var
from dnnc.ir.graph import identifier
from dnnc.ir.types import Dim

ELEMENTS = {
    "f64": TensorProto.DOUBLE, "f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16,
    "i8": TensorProto.INT8, "i16": TensorProto.INT16, "i32": TensorProto.INT32, "i64": TensorProto.INT64,
    "u8": TensorProto.UINT8, "u16": TensorProto.UINT16, "u32": TensorProto.UINT32, "u64": TensorProto.UINT64,
    "bool": TensorProto.BOOL, "str": TensorProto.STRING, "c64": TensorProto.COMPLEX64, "c128": TensorProto.COMPLEX128,
    "f8e4m3fn": TensorProto.FLOAT8E4M3FN, "f8e4m3fnuz": TensorProto.FLOAT8E4M3FNUZ, "f8e5m2": TensorProto.FLOAT8E5M2,
    "f8e5m2fnuz": TensorProto.FLOAT8E5M2FNUZ, "f8e8m0": getattr(TensorProto, "FLOAT8E8M0", 0),
    "f4e2m1": TensorProto.FLOAT4E2M1,
    "i4": TensorProto.INT4, "u4": TensorProto.UINT4, "i2": getattr(TensorProto, "INT2", 0),
    "u2": getattr(TensorProto, "UINT2", 0),
}  # fmt: skip
SCHEMA = {
    "f64": "double",
    "f32": "float",
    "f16": "float16",
    "bf16": "bfloat16",
    "str": "string",
    "bool": "bool",
    "c64": "complex64",
    "c128": "complex128",
}
WIDER = {  # where an operator does not take a type: these hold all of its values, the first that fits is taken
    "f16": ("f32", "f64"), "bf16": ("f32", "f64"), "f32": ("f64",), "i8": ("i16", "i32", "i64"), "i16": ("i32", "i64"),
    "i32": ("i64",),
    "u8": ("u16", "i32", "u32", "i64"), "u16": ("i32", "u32", "i64"), "u32": ("i64", "u64"),
    "bool": ("u8", "i32", "i64"),
    "f8e4m3fn": ("f16", "f32"), "f8e4m3fnuz": ("f16", "f32"), "f8e5m2": ("f16", "f32"), "f8e5m2fnuz": ("f16", "f32"),
    "f8e8m0": ("f32", "f64"),
    "f4e2m1": ("f16", "f32"), "i4": ("i8", "i32"), "u4": ("u8", "i32"), "i2": ("i8", "i32"), "u2": ("u8", "i32"),
}  # fmt: skip
MIN = -(1 << 63)


def schema_type(t: DType) -> str:
    """What ONNX's schemas call a tensor of this type."""
    if t.name in SCHEMA:
        return f"tensor({SCHEMA[t.name]})"
    if t.is_int:
        return f"tensor({'u' if t.kind == 'u' else ''}int{t.bits})"
    return f"tensor(float{t.name.removeprefix('f')})"


@lru_cache(maxsize=1024)
def schema_of(op: str, opset: int) -> Any:
    """What ONNX says of an operator; None where the opset has none of this name."""
    try:
        return onnx.defs.get_schema(op, opset)
    except onnx.defs.SchemaError:
        return None


@lru_cache(maxsize=1024)
def takes(op: str, opset: int, position: int) -> frozenset[str] | None:
    """The types that an operator takes as an input; None where the opset has no such operator."""
    schema = schema_of(op, opset)
    if schema is None:
        return None
    inputs = list(schema.inputs)
    return frozenset(inputs[min(position, len(inputs) - 1)].types)


class Names:
    """Names that are given once in a model, its subgraphs included."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.next: dict[str, int] = {}

    def fresh(self, stem: str) -> str:
        name = stem
        while name in self.used:
            self.next[stem] = self.next.get(stem, 0) + 1
            name = f"{stem}_{self.next[stem]}"
        self.used.add(name)
        return name


class Model:
    """What all graphs of a model share."""

    def __init__(self, opset: int) -> None:
        self.opset, self.names = opset, Names()
        self.initializers: list[onnx.TensorProto] = []
        self.known: dict[Any, str] = {}
        self.nbytes = 0

    def weight(self, a: np.ndarray[Any, Any], dtype: DType, name: str) -> str:
        """An initializer of its own, whatever its contents."""
        made = self.names.fresh(name)
        self.initializers.append(tensor(np.asarray(a, dtype.numpy), dtype, made))
        self.nbytes += a.nbytes
        return made

    def constant(self, a: np.ndarray[Any, Any], dtype: DType, name: str = "") -> str:
        """An initializer; small ones are shared."""
        key = (dtype.name, a.shape, a.tobytes()) if a.size <= 64 and a.dtype != object else None
        if key in self.known:
            return self.known[key]
        made = self.names.fresh(name or "c")
        self.initializers.append(tensor(a, dtype, made))
        self.nbytes += a.nbytes if a.dtype != object else 0
        if key is not None:
            self.known[key] = made
        return made


def tensor(a: np.ndarray[Any, Any], dtype: DType, name: str) -> onnx.TensorProto:
    """An array as a TensorProto."""
    if dtype.kind == "s":
        flat: Any = [x.encode() if isinstance(x, str) else bytes(x) for x in a.ravel().tolist()]
        return helper.make_tensor(name, TensorProto.STRING, a.shape, flat)
    return numpy_helper.from_array(np.ascontiguousarray(a).reshape(a.shape), name)


class Writer:
    """A graph under construction. New nodes get `doc` (their origin) and `stem` (their name)."""

    def __init__(self, model: Model, parent: Writer | None = None) -> None:
        self.model, self.parent = model, parent
        self.nodes: list[onnx.NodeProto] = []
        self.sizes: dict[Any, str] = {}  # a symbolic size -> i64[1]
        self.sources: dict[Var, tuple[str, int]] = {}  # a dim -> a value and its axis that has that size
        self.doc, self.stem = "", "v"

    @property
    def opset(self) -> int:
        return self.model.opset

    def op(self, op: str, *inputs: str | None, outputs: int = 1, **attrs: Any) -> Any:
        """Add a node without None attributes; return its output name or names. UnsupportedError: not in the opset."""
        attrs = {k: v for k, v in attrs.items() if v is not None}
        self.check(op, len(inputs), attrs)
        made = [self.model.names.fresh(self.stem if k == 0 else f"{self.stem}_{k}") for k in range(outputs)]
        given = [i or "" for i in inputs]
        while given and not given[-1]:
            given.pop()
        node = helper.make_node(op, given, made, name=made[0], doc_string=self.doc or None, **attrs)
        self.nodes.append(node)
        return made[0] if outputs == 1 else made

    def check(self, op: str, inputs: int, attrs: Collection[str]) -> None:
        """Does the opset have such a node?"""
        schema = schema_of(op, self.opset)
        if schema is None:
            raise UnsupportedError(f"opset {self.opset} of ONNX has no {op}; give a later one")
        unknown = [a for a in attrs if a not in schema.attributes]
        if unknown or inputs > schema.max_input:
            what = f"the attribute {unknown[0]}" if unknown else f"{inputs} operands"
            raise UnsupportedError(f"in opset {self.opset} of ONNX {op} does not have {what}; give a later one")

    def typed(self, op: str, dtype: DType, *inputs: str | None, keeps: bool = True, **attrs: Any) -> str:
        """A node with operands of one type, wider where unsupported. `keeps`: the result has that type too."""
        run = self.type_for(op, dtype)
        made: str = self.op(op, *(self.cast(i, dtype, run) if i else i for i in inputs), **attrs)
        return self.cast(made, run, dtype) if keeps else made

    def type_for(self, op: str, dtype: DType, position: int = 0) -> DType:
        """The type in which an operator takes values of a type. UnsupportedError where there is none."""
        allowed = takes(op, self.opset, position)
        if allowed is None:
            raise UnsupportedError(f"opset {self.opset} of ONNX has no {op}; give a later one")
        for t in (dtype.name, *WIDER.get(dtype.name, ())):
            if schema_type(BY_NAME[t]) in allowed:
                return BY_NAME[t]
        raise UnsupportedError(f"ONNX's {op} (opset {self.opset}) takes no {dtype}")

    def cast(self, x: str, have: DType, want: DType, saturate: bool = True) -> str:
        if have is want:
            return x
        schema = schema_of("Cast", self.opset)
        if schema is None or schema_type(want) not in schema.outputs[0].types:
            raise UnsupportedError(f"opset {self.opset} of ONNX has no {want}; give a later one")
        made: str = self.op("Cast", x, to=ELEMENTS[want.name], saturate=None if saturate else 0)
        return made

    def constant(self, a: Any, dtype: DType, name: str = "") -> str:
        return self.model.constant(np.asarray(a, dtype.numpy), dtype, name)

    def number(self, x: float | int | bool, dtype: DType) -> str:
        """A scalar."""
        return self.constant(x, dtype)

    def ints(self, values: Sequence[int]) -> str:
        return self.constant(np.array(values, np.int64).reshape(len(values)), BY_NAME["i64"])

    # --- sizes --------------------------------------------------------------------------------------------------------

    def dims(self, dims: Sequence[Dim]) -> str:
        """Sizes as i64[n]."""
        if all(isinstance(d, int) for d in dims):
            return self.ints([int(str(d)) for d in dims])
        parts = [self.dim(d) for d in dims]
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=0)

    def dim(self, d: Dim) -> str:
        """A size as i64[1]."""
        if isinstance(d, int):
            return self.ints([d])
        known = self.find(d)
        if known is None:
            known = self.sizes[d] = self.computed(d)
        return known

    def scalar(self, d: Dim) -> str:
        """A size as i64[]."""
        if isinstance(d, int):
            return self.number(d, BY_NAME["i64"])
        return self.op("Reshape", self.dim(d), self.ints([]))  # type: ignore[no-any-return]

    def find(self, d: Any) -> str | None:
        w: Writer | None = self
        while w is not None:
            if d in w.sizes:
                return w.sizes[d]
            w = w.parent
        return None

    def source(self, d: Var) -> tuple[str, int] | None:
        w: Writer | None = self
        while w is not None:
            if d in w.sources:
                return w.sources[d]
            w = w.parent
        return None

    def computed(self, e: Expr) -> str:
        """An expression of sizes, by the arithmetic of ONNX; divisions are of numbers that are not negative."""
        if isinstance(e, Const):
            return self.ints([int(e.value)])
        if isinstance(e, Var):
            found = self.source(e)
            if found is None:
                raise UnsupportedError(f"the size {e} is that of no value here: fix it by dims= before the export")
            name, axis = found
            return self.op("Shape", name, start=axis, end=axis + 1)  # type: ignore[no-any-return]
        if isinstance(e, Linear):
            total = ""
            for t, k in e.terms:
                term = self.dim(t) if k == 1 else self.op("Mul", self.dim(t), self.ints([k]))
                total = self.op("Add", total, term) if total else term
            return self.op("Add", total, self.ints([e.const])) if e.const else total
        if isinstance(e, Product):
            return self.folded("Mul", e.factors)
        names = {"//": "Div", "%": "Mod", "min": "Min", "max": "Max", "*": "Mul", "+": "Add"}
        if isinstance(e, Op) and e.name in names:
            return self.folded(names[e.name], e.args)
        raise UnsupportedError(f"the size {e} has no form in ONNX: fix its dims by dims= before the export")

    def folded(self, op: str, args: Sequence[Expr]) -> str:
        out = self.dim(args[0])
        for a in args[1:]:
            out = self.op(op, out, self.dim(a))
        return out

    def remember(self, name: str, shape: Sequence[Dim]) -> None:
        """Note which sizes a value has, for what needs them later."""
        for k, d in enumerate(shape):
            if isinstance(d, Var):
                self.sources.setdefault(d, (name, k))


def value_info(name: str, dtype: DType, shape: Sequence[Dim]) -> onnx.ValueInfoProto:
    """The declaration of an input or output; symbolic sizes by their name."""
    dims = [d if isinstance(d, int) else str(d) for d in shape]
    return helper.make_tensor_value_info(name, ELEMENTS[dtype.name], dims)


def clean(name: str) -> str:
    return identifier(name) if name else "v"
