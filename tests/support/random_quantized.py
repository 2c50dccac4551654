"""Random quantized models: layers on 8-bit codes with random schemes, in the three ways in which ONNX files write them.

In: a seed. Out: an ONNX model, arrays for its inputs, and whether its arithmetic is exact. In an exact model all scales
are powers of two and all sums stay below 2^24, so that float32, float64 and integers give the same codes, ties
included: results must be equal. Other models have any scales: a quotient near a tie may round either way, which
`first_wrong` lets pass where few elements differ by few steps.

A scheme has a type (u8, i8), a zero point and a scale for all elements or, for weights, for each output channel. Layers
are written with QuantizeLinear and DequantizeLinear, as operators on integers, or with dynamic quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run

Array = np.ndarray[Any, Any]
TYPES = {np.dtype("u1"): TensorProto.UINT8, np.dtype("i1"): TensorProto.INT8, np.dtype("f4"): TensorProto.FLOAT}
MOST_TERMS = 500  # of a sum of products of codes, so that it stays below 2^24
DEVIATION = 74.0  # of uniform bytes
FEW, STEPS, FLOATS = 0.03, 2, 0.05  # of a model that is not exact: share of other codes, how far, and floats


@dataclass(frozen=True)
class Codes:
    """A tensor of bytes q that stands for scale * (q - zero); `deviation`: about how far its reals spread."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    scale: np.float32
    zero: int
    deviation: float


@dataclass(frozen=True)
class Weights:
    """Names of constant codes, their scales and zero points (empty where there are none), and the scales."""

    q: str
    scale: str
    zero: str
    scales: Array
    deviation: float


def random_quantized(seed: int, layers: int = 5) -> tuple[onnx.ModelProto, list[Array], bool]:
    """A model of about that many layers, arrays for its inputs, and whether it is exact. Equal seeds, equal models."""
    g = Nets(np.random.default_rng(seed), exact=seed % 4 != 3, large=seed % 6 == 5)
    for _ in range(3 * layers):
        if len(g.made) > layers:
            break
        g.one_of(LAYERS)(g, g.one_of(g.made[-2:] if g.chance(0.7) else g.made))
    return g.model(), g.arrays, g.exact


def first_wrong(graph: Graph, inputs: Sequence[Array], got: Sequence[Array], exact: bool) -> str | None:
    """What is wrong about the outputs of a quantized graph; None where all are right.

    Dynamic quantization of codes has quotients at ties in many elements at once, where float32 and float64 round apart.
    So outputs of a model that is not exact may be those of either.
    """
    why = _difference(graph, run(graph, inputs, "float64"), got, exact)
    return why if why is None or exact else _difference(graph, run(graph, inputs, "as-is"), got, exact)


def _difference(graph: Graph, want: Sequence[Array], got: Sequence[Array], exact: bool) -> str | None:
    for v, a, b in zip(graph.outputs, got, want, strict=True):
        if a.shape != b.shape or a.dtype != v.type.dtype.numpy:
            return f"wrong result: output {v.name} is {a.dtype}{list(a.shape)} for {b.dtype}{list(b.shape)}"
        off = np.abs(a.astype(np.float64) - b.astype(np.float64))
        if not off.size or (exact and not off.any()):
            continue
        at = tuple(int(i) for i in np.unravel_index(int(off.argmax()), off.shape))
        if a.dtype.kind == "f" and not exact:
            wrong = off[at] > FLOATS * max(np.abs(b).max(), 1e-30)
        else:
            wrong = exact or off[at] > STEPS or np.count_nonzero(off) > 2 + FEW * off.size
        if wrong:
            many = np.count_nonzero(off)
            return f"wrong result: output {v.name}, element {at} is {a[at]!r}, not {b[at]!r}; {many} differ"
    return None


class Nets:
    def __init__(self, rng: np.random.Generator, exact: bool, large: bool) -> None:
        self.rng, self.exact = rng, exact
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: dict[str, int] = {}
        self.arrays: list[Array] = []
        self.made: list[Codes] = []
        self.channels = (16, 24, 32, 40, 64) if large else (1, 2, 3, 4, 5, 8, 12, 16, 17)
        sizes = (8, 9, 14, 16) if large else (1, 2, 3, 4, 5, 7, 8)
        image = (1 + self.below(2), self.one_of(self.channels), self.one_of(sizes), self.one_of(sizes))
        lines = (*sizes, 17, 20, 33)  # more than one tile of a product
        rows = (*((1 + self.below(3),) if self.chance(0.5) else ()), self.one_of(lines), self.one_of(self.channels))
        self.batches = self.chance(0.2)
        for shape in (image, rows)[: 1 + self.chance(0.4)] if self.chance(0.6) else (rows,):
            self.given(shape)

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def below(self, n: int) -> int:
        return int(self.rng.integers(n))

    def one_of(self, items: Sequence[Any]) -> Any:
        return items[self.below(len(items))]

    # --- schemes ------------------------------------------------------------------------------------------------------

    def byte(self) -> np.dtype[Any]:
        return np.dtype(self.one_of(("u1", "u1", "i1")))

    def zero(self, dtype: np.dtype[Any]) -> int:
        low = int(np.iinfo(dtype).min)
        return low + int(self.one_of((0, 120, 128, 128, 255, self.below(256), 100 + self.below(56))))

    def scale(self, wanted: float) -> np.float32:
        """A scale near a number: a power of two in an exact model."""
        wanted *= float(self.rng.uniform(0.7, 1.5))
        return np.float32(2.0 ** round(np.log2(wanted)) if self.exact else wanted)

    # --- parts of a model ---------------------------------------------------------------------------------------------

    def node(self, op: str, *inputs: str, domain: str = "", **attrs: Any) -> str:
        name = f"v{len(self.nodes)}"
        while inputs and not inputs[-1]:
            inputs = inputs[:-1]
        self.nodes.append(helper.make_node(op, list(inputs), [name], domain=domain, **attrs))
        return name

    def constant(self, array: Any, dtype: Any = None) -> str:
        a = np.asarray(array, dtype)
        self.constants.append(numpy_helper.from_array(a, f"c{len(self.constants)}"))
        return str(self.constants[-1].name)

    def scheme(self, scale: Any, zero: int, dtype: np.dtype[Any]) -> tuple[str, str]:
        """Scale and zero point, which may be left out where it is a 0 of u8."""
        left_out = zero == 0 and dtype == np.uint8 and self.chance(0.3)
        return self.constant(scale, "f4"), "" if left_out else self.constant(zero, dtype)

    def given(self, shape: tuple[int, ...]) -> None:
        """An input: codes, or floats on the grid of a scheme, which are quantized."""
        dtype, scale = self.byte(), self.scale(0.05)
        zero, name = self.zero(dtype), f"x{len(self.inputs)}"
        low = int(np.iinfo(dtype).min)
        codes = self.rng.integers(low, low + 256, shape)
        deviation = float(scale) * float(np.hypot(DEVIATION, zero - low - 128))
        dims = [f"n{len(self.inputs)}", *shape[1:]] if self.batches and len(shape) > 2 else list(shape)
        if self.chance(0.5):
            array = codes.astype(dtype)
            made = Codes(name, shape, dtype, scale, zero, deviation)
        else:
            array = ((codes - zero) * scale).astype(np.float32)
            made = Codes(
                self.node("QuantizeLinear", name, self.constant(scale), self.constant(zero, dtype)),
                shape, dtype, scale, zero, deviation,
            )  # fmt: skip
        self.inputs.append(helper.make_tensor_value_info(name, TYPES[array.dtype], dims))
        self.arrays.append(array)
        self.made.append(made)

    def real(self, x: Codes) -> str:
        return self.node("DequantizeLinear", x.name, *self.scheme(x.scale, x.zero, x.dtype))

    def activated(self, y: str, deviation: float) -> str:
        kind = self.below(6)
        if kind == 0:
            return self.node("Relu", y)
        if kind == 1:
            return self.node("Clip", y, self.constant(0, "f4"), self.constant(self.scale(2 * deviation)))
        if kind == 2 and not self.exact:
            return self.node(self.one_of(("Sigmoid", "Tanh", "HardSigmoid", "LeakyRelu")), y)
        return y

    def quantized(self, y: str, shape: tuple[int, ...], deviation: float) -> None:
        """Codes of reals, with a scheme that fits."""
        dtype, scale = self.byte(), self.scale(deviation / 40)
        zero = self.zero(dtype)
        name = self.node("QuantizeLinear", y, *self.scheme(scale, zero, dtype))
        q = Codes(name, shape, np.dtype("u1") if not self.nodes[-1].input[2:] else dtype, scale, zero, deviation)
        self.made.append(q)

    def weights(self, shape: tuple[int, ...], axis: int, of: str = "any", per_channel: bool | None = None) -> Weights:
        """Constant codes with scales and zero points along an axis or for all."""
        dtype = {"any": self.byte(), "i1": np.dtype("i1"), "u1": np.dtype("u1")}[of]
        many = self.chance(0.5) if per_channel is None else per_channel
        n = (shape[axis],) if many else ()
        scales = np.array([self.scale(0.01) for _ in range(int(np.prod(n)))], np.float32).reshape(n)
        low = int(np.iinfo(dtype).min)
        zeros = np.full(n, low + 128) if self.chance(0.6) else self.rng.integers(low + 90, low + 166, n)
        spread = self.one_of((20, 127, 128))
        codes = np.clip(self.rng.integers(-spread, spread + 1, shape) + low + 128, low, low + 255)
        absent = not zeros.any() and self.chance(0.5)
        zero = "" if absent else self.constant(zeros, dtype)
        deviation = float(scales.mean()) * max(spread, 40) * 0.6
        return Weights(self.constant(codes, dtype), self.constant(scales), zero, scales, deviation)

    def model(self) -> onnx.ModelProto:
        """What nothing reads, and now and then what is read too, are outputs."""
        read = {i for n in self.nodes for i in n.input}
        outputs = [
            (q.name, TYPES[q.dtype]) for q in self.made if q.name[0] == "v" and (q.name not in read or self.chance(0.2))
        ]
        outputs += [(v, t) for v, t in self.outputs.items()]
        if not outputs:
            outputs = [(self.real(self.made[0]), TensorProto.FLOAT)]
        if self.chance(0.3):
            outputs.append((self.real(self.made[-1]), TensorProto.FLOAT))
        known = [helper.make_tensor_value_info(name, t, None) for name, t in outputs]
        graph = helper.make_graph(self.nodes, "quantized", self.inputs, known, self.constants)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


# --- layers -----------------------------------------------------------------------------------------------------------


def convolution(g: Nets, x: Codes) -> None:
    if len(x.shape) != 4:
        return
    n, c, *size = x.shape
    group = g.one_of((1, 1, 1, c, 2 if c % 2 == 0 else 1))
    kernel = [g.one_of([k for k in (1, 2, 3, 5) if k <= s + 2]) for s in size]
    pads = [g.below(2) if k > 1 else 0 for k in kernel] + [g.below(3) if k > 1 else 0 for k in kernel]
    strides = [g.one_of((1, 1, 2)) for _ in kernel]
    out = [(s + p + q - k) // t + 1 for s, p, q, k, t in zip(size, pads[:2], pads[2:], kernel, strides)]
    terms = c // group * kernel[0] * kernel[1]
    if min(out) < 1 or terms > MOST_TERMS:
        return
    o = group * g.one_of([k for k in (1, 2, 3, 4, 16, 17, 33) if group * k <= 64] or [1])
    form, shape = g.one_of(("qdq", "qdq", "operator", "integers")), (n, o, *out)
    attrs = {"kernel_shape": kernel, "pads": pads, "strides": strides, "group": group}
    w = g.weights((o, c // group, *kernel), 0, "any" if form == "qdq" else "i1", False if form == "integers" else None)
    deviation = float(np.sqrt(terms)) * x.deviation * w.deviation
    bias = g.rng.integers(-2000, 2000, o).astype(np.int32) if g.chance(0.6) else None
    scales = x.scale * w.scales
    if form == "operator":
        requantized(g, "QLinearConv", x, w, "" if bias is None else g.constant(bias), shape, deviation, **attrs)
        return
    if form == "integers":
        y = g.node("ConvInteger", x.name, w.q, g.constant(x.zero, x.dtype), w.zero, **attrs)
        y = g.node("Mul", g.node("Cast", y, to=TensorProto.FLOAT), g.constant(scales))
        y = y if bias is None else g.node("Add", y, g.constant((bias * scales).reshape(-1, 1, 1), "f4"))
    else:
        wide = np.broadcast_to(scales, (o,))
        b = ""
        if bias is not None and g.chance(0.5):
            b = g.node("DequantizeLinear", g.constant(bias), g.constant(wide), axis=0)
        elif bias is not None:
            b = g.constant(bias * wide, "f4")
        y = g.node("Conv", g.real(x), g.node("DequantizeLinear", w.q, w.scale, w.zero, axis=0), b, **attrs)
    g.quantized(g.activated(y, deviation), shape, deviation)


def requantized(
    g: Nets, op: str, x: Codes, w: Weights, bias: str, shape: tuple[int, ...], deviation: float, **attrs: Any
) -> None:
    """An operator with x, its scale and zero point, w, and the scheme of the result."""
    scale, zero = g.scale(deviation / 40), g.zero(x.dtype)
    w_zero = w.zero or g.constant(np.zeros(w.scales.shape), "i1")
    first = (x.name, g.constant(x.scale), g.constant(x.zero, x.dtype), w.q, w.scale, w_zero)
    name = g.node(op, *first, g.constant(scale), g.constant(zero, x.dtype), bias, **attrs)
    g.made.append(Codes(name, shape, x.dtype, scale, zero, deviation))


def product(g: Nets, x: Codes) -> None:
    if len(x.shape) < 2 or x.shape[-1] > MOST_TERMS or (len(x.shape) == 4 and g.chance(0.7)):
        return
    k, n = x.shape[-1], g.one_of((1, 2, 3, 8, 16, 17, 33, 48))
    form = g.one_of(("qdq", "qdq", "gemm", "operator", "integers", "to_float"))
    shape = (*x.shape[:-1], n)
    turned = form == "gemm" and g.chance(0.5)
    w = g.weights((n, k) if turned else (k, n), 0 if turned else 1, "i1" if form not in ("qdq", "gemm") else "any")
    deviation = float(np.sqrt(k)) * x.deviation * w.deviation
    scales = x.scale * w.scales
    bias = (g.rng.integers(-2000, 2000, n) * scales).astype("f4") if g.chance(0.5) else None
    if form == "operator":
        requantized(g, "QLinearMatMul", x, w, "", shape, deviation)
        return
    if form == "integers":
        y = g.node("MatMulInteger", x.name, w.q, g.constant(x.zero, x.dtype), w.zero)
        y = g.node("Mul", g.node("Cast", y, to=TensorProto.FLOAT), g.constant(scales))
    elif form == "to_float":
        zeros = (g.constant(x.zero, x.dtype), w.zero)
        given = (x.name, w.q, g.constant(x.scale), w.scale, *zeros)
        y = g.node("MatMulIntegerToFloat", *given, domain="com.microsoft")
    else:
        real = g.node("DequantizeLinear", w.q, w.scale, w.zero, axis=0 if turned else 1)
        if form == "gemm" and len(shape) == 2:
            factors = {"alpha": g.one_of((1.0, 0.5)), "beta": g.one_of((1.0, 2.0)), "transB": int(turned)}
            y = g.node("Gemm", g.real(x), real, "" if bias is None else g.constant(bias), **factors)
            bias = None
        else:
            real = g.node("Transpose", real, perm=[1, 0]) if turned else real
            y = g.node("MatMul", g.real(x), real)
    y = y if bias is None else g.node("Add", y, g.constant(bias))
    g.quantized(g.activated(y, deviation), shape, deviation)


def attention(g: Nets, x: Codes) -> None:
    """A product of two quantized activations: queries with transposed keys, or shares with values."""
    others = [m for m in g.made if len(m.shape) == len(x.shape) > 1 and m.shape[:-2] == x.shape[:-2]]
    turned = g.chance(0.6)
    fits = [m for m in others if m.shape[-1 if turned else -2] == x.shape[-1]]
    if not fits or x.shape[-1] > MOST_TERMS:
        return
    y = g.one_of(fits)
    perm = [*range(len(x.shape) - 2), len(x.shape) - 1, len(x.shape) - 2]
    shape = (*x.shape[:-1], y.shape[-2 if turned else -1])
    deviation = float(np.sqrt(x.shape[-1])) * x.deviation * y.deviation
    form = g.one_of(("qdq", "qdq", "operator", "integers"))
    real, codes = (v if not turned else g.node("Transpose", v, perm=perm) for v in (g.real(y), y.name))
    if form == "qdq":
        return g.quantized(g.node("MatMul", g.real(x), real), shape, deviation)
    if form == "integers":
        out = g.node("MatMulInteger", x.name, codes, *(g.constant(v.zero, v.dtype) for v in (x, y)))
        out = g.node("Mul", g.node("Cast", out, to=TensorProto.FLOAT), g.constant(x.scale * y.scale))
        return g.quantized(g.activated(out, deviation), shape, deviation)
    left, right = ((g.constant(v.scale), g.constant(v.zero, v.dtype)) for v in (x, y))
    scale, zero = g.scale(deviation / 40), g.zero(x.dtype)
    name = g.node("QLinearMatMul", x.name, *left, codes, *right, g.constant(scale), g.constant(zero, x.dtype))
    g.made.append(Codes(name, shape, x.dtype, scale, zero, deviation))


def pair(g: Nets, x: Codes) -> None:
    """Add or Mul of two tensors of codes."""
    y = g.one_of([m for m in g.made if m.shape == x.shape])
    op = g.one_of(("Add", "Add", "Mul"))
    deviation = x.deviation * y.deviation if op == "Mul" else float(np.hypot(x.deviation, y.deviation))
    same = [m for m in g.made if m.shape == x.shape and m.dtype == x.dtype]
    if g.chance(0.3):
        y, scale, zero = g.one_of(same), g.scale(deviation / 40), g.zero(x.dtype)
        given = [t for v in (x, y) for t in (v.name, g.constant(v.scale), g.constant(v.zero, v.dtype))]
        out = (g.constant(scale), g.constant(zero, x.dtype))
        name = g.node(f"QLinear{op}", *given, *out, domain="com.microsoft")
        g.made.append(Codes(name, x.shape, x.dtype, scale, zero, deviation))
        return
    g.quantized(g.activated(g.node(op, g.real(x), g.real(y)), deviation), x.shape, deviation)


def gated(g: Nets, x: Codes) -> None:
    """Codes times a function of themselves, which has codes of its own."""
    y = g.real(x)
    if g.exact:
        y = g.node("Mul", y, g.constant(g.scale(0.5 / x.deviation)))
        gate = g.node("Clip", g.node("Add", y, g.constant(0.5, "f4")), g.constant(0, "f4"), g.constant(1, "f4"))
    else:
        gate = g.node(g.one_of(("Sigmoid", "Tanh", "HardSigmoid", "Erf")), y)
    g.quantized(gate, x.shape, 1.0)
    if g.chance(0.8):
        g.quantized(g.node("Mul", g.real(x), g.real(g.made[-1])), x.shape, x.deviation)


def joined(g: Nets, x: Codes) -> None:
    """A concatenation of two, of the same scheme or others."""
    y = g.one_of([m for m in g.made if m.shape == x.shape])
    axis = g.below(len(x.shape))
    shape = tuple(2 * d if k == axis else d for k, d in enumerate(x.shape))
    g.quantized(g.node("Concat", g.real(x), g.real(y), axis=axis), shape, max(x.deviation, y.deviation))


def pooled(g: Nets, x: Codes) -> None:
    if len(x.shape) != 4 or min(x.shape[2:]) < 2:
        return
    kind = g.one_of(("MaxPool", "AveragePool", "GlobalAveragePool", "Resize"))
    n, c, h, w = x.shape
    if kind == "GlobalAveragePool":
        if g.exact and (h * w) & (h * w - 1):
            return
        y, shape = g.node(kind, g.real(x)), (n, c, 1, 1)
    elif kind == "Resize":
        y, shape = g.node(kind, g.real(x), "", g.constant([1, 1, 2, 2], "f4"), mode="nearest"), (n, c, 2 * h, 2 * w)
    else:
        y, shape = g.node(kind, g.real(x), kernel_shape=[2, 2], strides=[1, 2]), (n, c, h - 1, (w - 2) // 2 + 1)
    if kind in ("MaxPool", "Resize") and g.chance(0.6):  # with the scheme that it had
        name = g.node("QuantizeLinear", y, g.constant(x.scale), g.constant(x.zero, x.dtype))
        g.made.append(Codes(name, shape, x.dtype, x.scale, x.zero, x.deviation))
    else:
        g.quantized(y, shape, x.deviation)


def moved(g: Nets, x: Codes) -> None:
    """Codes or reals in another order, or with another scheme."""
    rank, kind = len(x.shape), g.below(3)
    perm = [int(k) for k in g.rng.permutation(rank)]
    shape = tuple(x.shape[k] for k in perm)
    if kind == 0:
        g.made.append(Codes(g.node("Transpose", x.name, perm=perm), shape, x.dtype, x.scale, x.zero, x.deviation))
    elif kind == 1:
        g.quantized(g.node("Transpose", g.real(x), perm=perm), shape, x.deviation)
    else:
        g.quantized(g.activated(g.real(x), x.deviation), x.shape, x.deviation)


def dynamic(g: Nets, x: Codes) -> None:
    """Reals whose scheme is computed from them. Its scale is a power of two where codes of a full range are given."""
    k, n = x.shape[-1], g.one_of((1, 3, 8, 17, 32))
    if len(x.shape) < 2 or k > MOST_TERMS or (len(x.shape) == 4 and g.chance(0.7)):
        return
    name = f"x{len(g.inputs)}"
    if g.exact:
        codes = g.rng.integers(0, 256, x.shape)
        codes.reshape(-1)[:2] = (0, 255) if codes.size > 1 else 255
        array = ((codes - (g.one_of((0, 128, 255, g.below(256))) if codes.size > 1 else 0)) * g.scale(0.02)).astype(
            "f4"
        )
        g.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(x.shape)))
        g.arrays.append(array)
        spread = float(np.abs(array).max())
    else:
        name, spread = g.real(x), x.deviation
    w = g.weights((k, n), 1, "i1")
    deviation = float(np.sqrt(k)) * spread * w.deviation
    if g.chance(0.4):
        y = g.node("DynamicQuantizeMatMul", name, w.q, w.scale, w.zero, domain="com.microsoft")
    else:
        q = g.node("DynamicQuantizeLinear", name)
        scale, zero = f"{q}_scale", f"{q}_zero"
        g.nodes[-1].output.extend([scale, zero])
        y = g.node("Cast", g.node("MatMulInteger", q, w.q, zero, w.zero), to=TensorProto.FLOAT)
        y = g.node("Mul", y, g.node("Mul", scale, w.scale))
    if g.chance(0.4):
        g.outputs[y] = TensorProto.FLOAT
    g.quantized(g.activated(y, deviation), (*x.shape[:-1], n), deviation)


LAYERS: tuple[Callable[[Nets, Codes], None], ...] = (
    convolution, convolution, convolution, product, product, product, attention, attention, pair, gated, joined, pooled,
    moved, dynamic,
)  # fmt: skip
