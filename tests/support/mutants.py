"""Small models, and ways to spoil them: what `support.mutate` feeds to the compiler.

In: a seed and a number. Out: bytes, the same ones each time. A mutant is a base and a few edits, each with a seed of
its own, so that shrinking can drop edits. Models are edited as protobufs (any field of any message) and as bytes; saved
models as bytes, and in their manifest and graph text with the checksums made right again.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx import helper, numpy_helper, parser

from dnnc.artifact.format import PAGE, checksum
from dnnc.ir.graph.text import parse as parse_graph

INTS = (
    -(1 << 63),
    -(1 << 31),
    -100,
    -3,
    -2,
    -1,
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    16,
    63,
    255,
    256,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    1 << 40,
    1 << 62,
    (1 << 63) - 1,
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-40, 1e38, float("inf"), float("-inf"), float("nan"))
WORDS = (
    "",
    "x",
    "y",
    "?",
    "a/b",
    "é",
    "\0",
    "N",
    "ai.onnx",
    "ai.onnx.ml",
    "com.acme",
    "../w.bin",
    "/etc/hostname",
    "NOTSET",
    "SAME_UPPER",
    "linear",
)

# What the bases are made of: onnx's own text form. Together they hold weights, symbolic sizes, shape arithmetic,
# indices, control flow, functions, quantization, sequences and strings.
MODELS = {
    "conv": """<ir_version: 8, opset_import: ["" : 17]> conv (float[1,3,9,9] x) => (float[1,2] y) <float[4,3,3,3] w,
        float[4] b, float[4,2] v> {
        c = Conv <pads=[1,1,1,1], strides=[2,2]> (x, w, b)  r = Relu (c)  p = MaxPool <kernel_shape=[2,2]> (r)
        a = GlobalAveragePool (p)  f = Flatten (a)  y = Gemm <alpha=0.5> (f, v) }""",
    "mlp": """<ir_version: 8, opset_import: ["" : 17]> mlp (float[N,6] x) => (float[N,5] y, int64[N] k) <float[6,5] w,
        float[5] b> {
        h = MatMul (x, w)  s = Add (h, b)  g = Sigmoid (s)  m = Mul (s, g)  y = Softmax <axis=-1> (m)
            k = ArgMax <axis=1, keepdims=0> (y) }""",
    "shapes": """<ir_version: 8, opset_import: ["" : 17]> shapes (float[B,4,6] x) => (float[B,L] y)
        <int64[1] at = {0}, int64[1] rest = {-1}, int64[3] perm = {0,2,1}, int64[1] one = {1}> {
        s = Shape (x)  n = Gather (s, at)  t = Concat <axis=0> (n, rest)  p = Transpose <perm=[0,2,1]> (x)
            r = Reshape (p, t)
        q = Slice (r, one, rest, one)  u = Unsqueeze (q, at)  z = Squeeze (u, at)  d = Pad <mode="constant"> (z,
            perm_pads)  y = Neg (d) }""",
    "index": """<ir_version: 8, opset_import: ["" : 17]> index (float[7,5] table, int64[3] i, int64[2,2] j,
        float[2] u) => (float[3,5] y, float[7,5] z, float[2] v) {
        g = Gather <axis=0> (table, i)  y = CumSum (g, axis)  z = ScatterND (table, j, u)  k = GatherND (table, j)
            v = Clip (k, low, high) }""",
    "control": """<ir_version: 8, opset_import: ["" : 17]> control (float[3] x, bool c) => (float[3] y, float[3] s,
        float[2,3] all) <int64 trips = {2}, bool go = {1}> {
        y = If (c) <then_branch = yes () => (float[3] a) { a = Neg (x) }, else_branch = no () => (float[3] b) {
            b = Exp (x) }>
        s, all = Loop (trips, go, x) <body = step (int64 i, bool keep, float[3] v) => (bool keep2, float[3] v2,
            float[3] each)
            { keep2 = Identity (keep)  v2 = Add (v, x)  each = Mul (v2, v2) }> }""",
    "function": """<ir_version: 8, opset_import: ["" : 17, "local" : 1]> function (float[2,3] x) => (float[2,3] y) {
        h = local.act <slope=0.1> (x)  y = local.act <slope=0.5> (h) }
        <domain: "local", opset_import: ["" : 17]> act <slope> (a) => (b) { t = LeakyRelu <alpha: float = @slope> (a)
            b = Tanh (t) }""",
    "quant": """<ir_version: 8, opset_import: ["" : 17]> quant (float[2,8] x) => (float[2,4] y)
        <float s = {0.05}, uint8 z = {128}, int8[8,4] w, float ws = {0.02}, int8 wz = {0}> {
        q = QuantizeLinear (x, s, z)  d = DequantizeLinear (q, s, z)  e = DequantizeLinear (w, ws, wz)  y = MatMul (d,
            e) }""",
    "norms": """<ir_version: 8, opset_import: ["" : 17]> norms (float[2,4,6] x) => (float[2,1,6] y, float[2,4,6] n,
        float[2,2,6] l, float[2,2,6] r)
        <float[6] s, float[4] m> { n = LayerNormalization <axis=-1> (x, s)  i = InstanceNormalization (n, m, m)
        y = ReduceMean <axes=[1]> (i)  l, r = Split <axis=1> (i) }""",
    "rnn": """<ir_version: 8, opset_import: ["" : 17]> rnn (float[4,2,3] x) => (float[4,1,2,5] y, float[1,2,5] h)
        <float[1,20,3] w, float[1,20,5] r> {
        y, h = LSTM <hidden_size=5> (x, w, r) }""",
    "resize": """<ir_version: 8, opset_import: ["" : 17]> resize (float[1,2,4,4] x) => (float[1,2,8,8] y,
        float[1,3] v, int64[1,3] i)
        <float[4] scale = {1,1,2,2}, int64[1] k = {3}> { y = Resize <mode="linear"> (x, roi, scale)  f = Flatten (y)
            v, i = TopK (f, k) }""",
    "lists": """<ir_version: 8, opset_import: ["" : 17]> lists (float[2,3] x, float[2,3] z) => (float[4,3] y, int64 n)
        <int64 at = {0}> {
        s = SequenceConstruct (x, z)  t = SequenceInsert (s, x)  u = SequenceErase (t, at)
            y = ConcatFromSequence <axis=0> (u)  n = SequenceLength (t) }""",
}
GRAPHS = {
    "fixed": "def net(x: f32[4, 6], *, w: f32[6, 5]):\n    y: f32[4, 5] = softmax(matmul(x, w))\n    return y\n",
    "open": "def net(x: f32[N, 6], i: i64[3], *, w: f32[6, 5]):\n    h = matmul(x, w)\n    return relu(h), gather(w, "
            "i, axis=0)\n",
}  # fmt: skip


def initial(name: str, t: Any, rng: np.random.Generator) -> onnx.TensorProto:
    """Weights for an initializer that the text declares without a value."""
    shape = [d.dim_value for d in t.shape.dim]
    dtype = helper.tensor_dtype_to_np_dtype(t.elem_type)
    drawn = rng.standard_normal(shape) if np.dtype(dtype).kind == "f" else rng.integers(-9, 9, shape)
    return numpy_helper.from_array(np.asarray(drawn).astype(dtype), name)


EXTRA: Mapping[str, Mapping[str, np.ndarray[Any, Any]]] = {
    "shapes": {"perm_pads": np.array([0, 1, 0, 0], np.int64)},
    "index": {"axis": np.array(0, np.int64), "low": np.array(-1, np.float32), "high": np.array(1, np.float32)},
    "resize": {"roi": np.zeros(0, np.float32)},
}


def model(name: str) -> onnx.ModelProto:
    """A base, with its weights."""
    text = MODELS[name]
    m = parser.parse_model(text)
    rng = np.random.default_rng(0)
    given = {t.name for t in m.graph.initializer}
    for v in m.graph.value_info:
        if v.name not in given:
            m.graph.initializer.append(initial(v.name, v.type.tensor_type, rng))
    for extra, array in EXTRA.get(name, {}).items():
        m.graph.initializer.append(numpy_helper.from_array(array, extra))
    return m


def bases(folder: Path) -> dict[str, bytes]:
    """All bases by name: models, and saved models with their ending; these are compiled on the way, in `folder`."""
    import dnnc

    out = {name: model(name).SerializeToString(deterministic=True) for name in MODELS}
    rng = np.random.default_rng(0)
    for name, text in GRAPHS.items():
        f = dnnc.compile(
            parse_graph(text, {"w": rng.standard_normal((6, 5), np.float32)}), cache=folder / "kernels", threads=1
        )
        f.save(folder / f"{name}.dnnc")
        out[f"{name}.dnnc"] = (folder / f"{name}.dnnc").read_bytes()
    return out


# --- mutants ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edit:
    """A way to spoil data, and the seed of its choices."""

    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.seed}"


@dataclass(frozen=True)
class Mutant:
    """A base with edits, applied in order."""

    base: str
    edits: tuple[Edit, ...]

    def __str__(self) -> str:
        return f"{self.base} with {' '.join(map(str, self.edits)) or 'no edit'}"


def mutant(seed: int, number: int, names: Sequence[str]) -> Mutant:
    """The mutant of this number in the campaign of this seed. Edits of structure come before edits of bytes."""
    rng = random.Random(f"{seed}:{number}")
    base = rng.choice(list(names))
    structural = SEALED if base.endswith(".dnnc") else PROTO
    kinds = rng.choices(list(structural), k=rng.choice((1, 1, 1, 2, 2, 3, 4))) if rng.random() < 0.8 else []
    if not kinds or rng.random() < 0.1:
        kinds += rng.choices(list(BYTES), k=rng.choice((1, 1, 2, 3)))
    return Mutant(base, tuple(Edit(k, rng.randrange(1 << 30)) for k in kinds))


def spoiled(data: bytes, edits: Sequence[Edit]) -> bytes:
    """Data after edits. An edit that finds nothing to do leaves it."""
    for e in edits:
        rng = random.Random(e.seed)
        if e.kind in PROTO:
            data = _edited(data, PROTO[e.kind], rng)
        elif e.kind in SEALED:
            data = _resealed(data, SEALED[e.kind], rng)
        else:
            data = BYTES[e.kind](data, rng)
    return data


# --- bytes ------------------------------------------------------------------------------------------------------------


def _flip(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return data
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _set(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return (
        data[:at]
        + rng.choice((b"\0", b"\xff", b"\x7f", b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", rng.randbytes(1)))
        + data[at + 1 :]
    )


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _drop(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.choice((1, 2, 8, 100)) :]


def _insert(data: bytes, rng: random.Random) -> bytes:
    at, other = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)
    return (
        data[:at]
        + (rng.randbytes(rng.choice((1, 4, 40))) if rng.random() < 0.5 else data[other : other + 30])
        + data[at:]
    )


def _replace(data: bytes, rng: random.Random) -> bytes:
    return rng.choice(
        (
            b"",
            b"\0" * 100,
            rng.randbytes(300),
            b"import os\nos.system('true')\n",
            b"\x80\x04cos\nsystem\n(S'true'\ntR.",
            data * 2,
        )
    )


BYTES: Mapping[str, Callable[[bytes, random.Random], bytes]] = {
    "flip": _flip, "set": _set, "cut": _cut, "drop": _drop, "insert": _insert, "replace": _replace,
}  # fmt: skip


# --- protobufs --------------------------------------------------------------------------------------------------------


def _edited(data: bytes, edit: Callable[[onnx.ModelProto, random.Random], None], rng: random.Random) -> bytes:
    m = onnx.ModelProto()
    try:
        m.ParseFromString(data)
        edit(m, rng)
        return bytes(m.SerializeToString(deterministic=True))
    except (
        DecodeError,
        EncodeError,
        ValueError,
        TypeError,
        IndexError,
    ):  # damaged before, a value that the field cannot hold, nothing left
        return data


def messages(m: Any) -> Iterator[Any]:
    """A message and all within it."""
    yield m
    for field, v in m.ListFields():
        if field.message_type is not None:
            for x in v if is_repeated(v) else (v,):
                yield from messages(x)


def is_repeated(v: Any) -> bool:
    return hasattr(v, "__len__") and not isinstance(v, (str, bytes))


def _any_field(m: onnx.ModelProto, rng: random.Random) -> None:
    """Change one field of one message."""
    sites = [(x, field) for x in messages(m) for field, _ in x.ListFields()]
    if not sites:
        return
    x, field = rng.choice(sites)
    v = getattr(x, field.name)
    if is_repeated(v):
        _change_list(x, field, v, m, rng)
    elif field.message_type is not None or rng.random() < 0.15:
        x.ClearField(field.name)
    else:
        setattr(x, field.name, _another(v, m, rng))


def _change_list(x: Any, field: Any, v: Any, m: onnx.ModelProto, rng: random.Random) -> None:
    k, how = rng.randrange(len(v)), rng.randrange(4)
    if how == 0:
        del v[k]
    elif field.message_type is not None:
        copies = [type(e).FromString(e.SerializeToString()) for e in v]
        copies[k:k] = [copies[rng.randrange(len(copies))]] if how == 1 else []
        if how > 1:
            rng.shuffle(copies)
        x.ClearField(field.name)
        getattr(x, field.name).extend(copies)
    elif how == 1:
        v.append(v[rng.randrange(len(v))])
    else:
        v[k] = _another(v[k], m, rng)


def _another(v: Any, m: onnx.ModelProto, rng: random.Random) -> Any:
    """A value of the same kind."""
    if isinstance(v, int):
        return rng.choice((*INTS, v + 1, v - 1, -v))
    if isinstance(v, float):
        return rng.choice((*FLOATS, -v, v * 2))
    if isinstance(v, bytes):
        return rng.choice((*(w.encode() for w in WORDS), BYTES[rng.choice(list(BYTES))](v, rng)))
    return rng.choice((*WORDS, *names(m)))


def names(m: onnx.ModelProto) -> list[str]:
    """The names of values in a model."""
    found = [n for x in messages(m) if isinstance(x, onnx.NodeProto) for n in (*x.input, *x.output)]
    return sorted({*found, *(i.name for i in m.graph.input), *(t.name for t in m.graph.initializer)} - {""})


def _nodes(m: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [x for x in messages(m) if isinstance(x, onnx.NodeProto)]


def _rewire(m: onnx.ModelProto, rng: random.Random) -> None:
    """An input or output of a node is another value: cycles, values made twice, types that do not fit."""
    n = rng.choice(_nodes(m))
    ends = n.input if n.input and rng.random() < 0.8 else n.output
    if ends:
        ends[rng.randrange(len(ends))] = rng.choice(["", *names(m)])


def _operator(m: onnx.ModelProto, rng: random.Random) -> None:
    known = sorted({s.name for s in onnx.defs.get_all_schemas()})
    rng.choice(_nodes(m)).op_type = rng.choice(known)


def _attribute(m: onnx.ModelProto, rng: random.Random) -> None:
    """Change an attribute's value, or give it another type or name."""
    found = [a for n in _nodes(m) for a in n.attribute]
    if not found:
        return
    a = rng.choice(found)
    how = rng.randrange(8)
    if how == 0:
        a.type = rng.randrange(15)
    elif how == 1:
        a.name = rng.choice(("axis", "axes", "perm", "pads", "mode", "keepdims", "to", a.name + "_"))
    elif len(a.ints) and how < 4:
        a.ints.extend([rng.choice(INTS)] if rng.random() < 0.3 else [])
        a.ints[rng.randrange(len(a.ints))] = rng.choice((-2, -1, 0, 1, 2, 3, 5))
    elif a.type == onnx.AttributeProto.INT:
        a.i = rng.choice((*range(-4, 9), *INTS))
    else:
        _any_field_of(a, m, rng)


def _any_field_of(x: Any, m: onnx.ModelProto, rng: random.Random) -> None:
    fields = [f for f, v in x.ListFields() if f.message_type is None and not is_repeated(v)]
    if fields:
        f = rng.choice(fields)
        setattr(x, f.name, _another(getattr(x, f.name), m, rng))


def _dims(m: onnx.ModelProto, rng: random.Random) -> None:
    """Another size in the type of a value: not what its data or its reader says."""
    dims = [x for x in messages(m) if isinstance(x, onnx.TensorShapeProto.Dimension)]
    if dims:
        d = rng.choice(dims)
        if rng.random() < 0.3:
            d.dim_param = rng.choice(("N", "B", "?", "", "N*2", "-1"))
        else:
            d.dim_value = rng.choice((*range(-1, 8), *INTS))


def _initializer(m: onnx.ModelProto, rng: random.Random) -> None:
    """Data that is too short or too long, another dtype, other dims; or data said to be elsewhere."""
    tensors = [x for x in messages(m) if isinstance(x, onnx.TensorProto)]
    if not tensors:
        return
    t = rng.choice(tensors)
    how = rng.randrange(6)
    if how == 0 and t.dims:
        t.dims[rng.randrange(len(t.dims))] = rng.choice(INTS)
    elif how == 1:
        t.data_type = rng.randrange(30)
    elif how == 2:
        t.dims.append(rng.choice((0, 1, 2, 1 << 40)))
    elif how == 3:
        t.raw_data = _cut(t.raw_data, rng) if t.raw_data else b"\0" * 7
    elif how == 4 and t.raw_data:
        bits = len(t.raw_data) // 4 * 4
        t.raw_data = b"".join(struct.pack("<f", rng.choice(FLOATS)) for _ in range(0, bits, 4)) + t.raw_data[bits:]
    else:
        t.data_location = onnx.TensorProto.EXTERNAL
        where = rng.choice(("/etc/passwd", "../../etc/passwd", "w.bin", "", "a\0b", ".", "/proc/self/mem"))
        for k, v in {"location": where, "offset": str(rng.choice(INTS)), "length": str(rng.choice(INTS))}.items():
            t.external_data.add(key=k, value=v)


def _opset(m: onnx.ModelProto, rng: random.Random) -> None:
    if m.opset_import and rng.random() < 0.7:
        rng.choice(list(m.opset_import)).version = rng.choice((*range(1, 29), 0, -1, 1 << 40))
    else:
        m.opset_import.add(domain=rng.choice(WORDS), version=rng.choice((1, 2, 17, 5)))


def _recursion(m: onnx.ModelProto, rng: random.Random) -> None:
    """A function that calls itself, or one that is there twice."""
    if m.functions:
        f = rng.choice(list(m.functions))
        n = rng.choice(list(f.node)) if f.node else f.node.add()
        n.domain, n.op_type = f.domain, f.name


PROTO: Mapping[str, Callable[[onnx.ModelProto, random.Random], None]] = {
    "field": _any_field, "rewire": _rewire, "operator": _operator, "attribute": _attribute, "dims": _dims,
    "initializer": _initializer,
    "opset": _opset, "recursion": _recursion,
}  # fmt: skip


# --- saved models with right checksums --------------------------------------------------------------------------------


def _resealed(
    data: bytes, edit: Callable[[dict[str, Any], dict[str, bytes], random.Random], None], rng: random.Random
) -> bytes:
    """A saved model with changed contents under right checksums; anything else stays as it is."""
    try:
        at, size = struct.unpack_from("<QQ", data, 24)
        manifest = json.loads(data[at : at + size])
        sections = {name: data[start : start + n] for name, start, n, _ in manifest.pop("sections")}
    except (struct.error, ValueError, TypeError, KeyError):
        return data
    edit(manifest, sections, rng)
    table, body = [], b""
    for name, content in sections.items():
        table.append([name, PAGE + len(body), len(content), checksum(memoryview(content))])
        body += content + bytes(-len(content) % PAGE)
    text = json.dumps({"sections": table, **manifest}).encode()
    head = (
        struct.pack("<QQQ", PAGE + len(body) + len(text), PAGE + len(body), len(text)) + hashlib.sha256(text).digest()
    )
    page = data[:16] + head + bytes(PAGE - 32 - 16 - len(head))
    return page + hashlib.sha256(page).digest() + body + text


def _manifest(manifest: dict[str, Any], sections: dict[str, bytes], rng: random.Random) -> None:
    """Another value somewhere in the manifest."""
    sites: list[tuple[Any, Any]] = []

    def walk(x: Any) -> None:
        for k, v in x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ():
            sites.append((x, k))
            walk(v)

    walk(manifest)
    x, k = rng.choice(sites)
    x[k] = rng.choice(
        (*INTS, *WORDS, None, True, [], {}, 1.5, [[]], {"a": 1}, "llvm", "llvm -mcpu=nothing", "reference", "late")
    )


def _text(manifest: dict[str, Any], sections: dict[str, bytes], rng: random.Random) -> None:
    """Graph text with a word changed, doubled or gone."""
    words = sections.get("model", b"").decode("utf-8", "replace").split(" ")
    k = rng.randrange(len(words))
    words[k : k + 1] = rng.choice(
        ([], [words[k]] * 2, [rng.choice(words)], [str(rng.choice(INTS))], ["__import__('os').system('true')"])
    )
    sections["model"] = " ".join(words).encode()


def _section(manifest: dict[str, Any], sections: dict[str, bytes], rng: random.Random) -> None:
    """A section with other bytes, or none."""
    name = rng.choice([n for n in sections if n != "objects"] or [""])
    if name not in sections:
        return
    if rng.random() < 0.2:
        del sections[name]
    else:
        sections[name] = BYTES[rng.choice(list(BYTES))](sections[name], rng)


SEALED: Mapping[str, Callable[[dict[str, Any], dict[str, bytes], random.Random], None]] = {
    "manifest": _manifest, "text": _text, "section": _section,
}  # fmt: skip
