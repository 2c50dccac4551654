"""Keep quantized models in bytes: integer products, requantization behind them, movement of bytes between them.

    quantize(relu(conv(dequantize(x), dequantize(w), bias)))
        -> quantize(relu(mul(cast(conv(x, w8, sums, out_dtype=i32), to=f32), scales) + bias)))      all one kernel
    matmul(sub(cast(x), cast(zx)), w), all i32                    ->   an integer product, exactly the same numbers
    transpose(dequantize(x)), max_pool(dequantize(x))             ->   dequantize(transpose(x)), of bytes
    avg_pool(dequantize(x))                                       ->   mul(sub(avg_pool(cast(x)), zero), scale)
    quantize(dequantize(x)) with equal scales                     ->   x
    quantize(concat(x, y))                                        ->   concat(quantize(x), quantize(y))

So the three ways in which ONNX files are quantized (pairs of QuantizeLinear and DequantizeLinear, operators on
integers, DynamicQuantizeLinear) become one. It runs ahead of folding, which would make floats of quantized weights, and
behind it, where integer weights with their zero points are constants.

Sums of products are exact, so floats differ by their last roundings from those of dequantized operands. Quotients by
scales become products. Strict numerics keep both as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dnnc.ir.dtype import FLOAT8, f32, i8, i32, u8
from dnnc.ir.errors import locations
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.op import Trait
from dnnc.ir.ops import OPS
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.types import product as size_of
from dnnc.passes.base import PassContext, graphs
from dnnc.passes.rewrite import Match, Rule, producer, rewrite
from dnnc.passes.rewrites import float8_products
from dnnc.passes.rewrites.integer_products import (
    Quantized,
    Weights,
    has_form,
    in_32_bits,
    known,
    product,
    product_of_two,
)
from dnnc.passes.rewrites.tables import tables

Array = np.ndarray[Any, Any]
BYTES = (u8, i8)
FEW_ROWS = 16  # that multiply a matrix in less time than it takes to lay it out for bytes
MOVED = tuple(  # ops that move the elements of one operand about; some fill the rest with zeros
    sorted(n for n, op in OPS.items() if Trait.MOVEMENT in op.traits and Trait.RELAYOUT not in op.traits)
)
CHOICES = ("nearest", "constant", "reflect", "edge", "wrap")  # modes by which elements stay what they are
CHOSEN = ("max_pool", "resize", *MOVED)
STEPS = ("cast", "mul", "add", "sub", "relu", "clip")  # between a sum of products and its code
SUMS = ("mul", "add", "relu", "dequantize_linear")


def quantized(graph: Graph, ctx: PassContext) -> bool:
    """Apply the rules above where the target has products of bytes, and note which products stay in floats."""
    if not ctx.facts.multiplies_bytes:
        return False
    changed = rewrite(graph, (*RULES, *float8_products.RULES) if ctx.facts.multiplies_float8 else RULES, ctx)
    if ctx.note is not None and not ctx.strict and any(map(_in_floats, graph.nodes())):
        why: dict[Node, str] = {}

        def explain(rule: str, n: Node, reason: str) -> None:
            why.setdefault(n, reason)

        rewrite(graph, RULES, replace(ctx, explain=explain))
        for n in filter(_in_floats, graph.nodes()):
            ctx.note(f"{n.op.name}{locations(n.locs)} stays in floats: {why.get(n, 'no rule is for it')}")
    return changed


def _in_floats(n: Node) -> bool:
    """Is a node the product of dequantized operands?"""
    of = [producer(v, "dequantize_linear") for v in n.inputs[:2]]
    x = of[0].inputs[0] if of and of[0] is not None else None
    return n.op.contraction is not None and None not in of and x is not None and x.type.dtype in BYTES


def requantized(graph: Graph, ctx: PassContext) -> bool:
    """The same, chains from bytes to bytes become tables, and quotients by constant scales become products."""
    if not ctx.facts.multiplies_bytes:
        return False
    changed = rewrite(graph, RULES, ctx)
    if ctx.facts.recodes_bytes and not ctx.strict:
        changed |= any([tables(g) for g in graphs(graph)])
    return rewrite(graph, LAST_RULES, ctx) or changed


# --- scales -----------------------------------------------------------------------------------------------------------


def _one_scale(m: Match, n: Node) -> tuple[Value, Value | None]:
    """The scale and the zero point of a node that has one for all elements."""
    scale, zero = m.operand(n, 1), n.inputs[2] if len(n.inputs) > 2 else None
    m.require(scale.type.size == 1 and not n.attrs["block"], "{} has several scales", n.op.name)
    return scale, zero


def _dequantized(m: Match, v: Value) -> tuple[Node, Value, Value | None]:
    """The node that makes a value of bytes, with one scale."""
    n = m.node(v, "dequantize_linear")
    m.require(m.operand(n, 0).type.dtype in BYTES, "{} holds no bytes", n.inputs[0])
    return n, *_one_scale(m, n)


def _dequantize(m: Match, q: Value, n: Node) -> Value:
    """Another value with the scale and zero point of a node."""
    return m.b.dequantize_linear(q, *n.inputs[1:], axis=0)  # type: ignore[no-any-return]


# --- bytes ------------------------------------------------------------------------------------------------------------


def quantize_unsigned(m: Match) -> Value:
    """quantize(x, s, z), an i8   ->   quantize(x, s, z + 128), a u8, less 128 as an i8"""
    n = m.root
    m.require(n.attrs["dtype"] is i8, "the result is {}", n.attrs["dtype"])
    scale, zero = _one_scale(m, n)
    at = known(m.graph, zero)
    m.require(at is not None, "the zero point is not constant")
    moved = m.b.constant(np.full(scale.type.shape, at + 128, np.uint8))  # type: ignore[operator]
    q = m.b.quantize_linear(m.operand(n, 0), scale, moved, **{**n.attrs, "dtype": u8})
    return _signed(m, q)


def _signed(m: Match, q: Any) -> Value:
    return m.b.cast(m.b.bitwise_xor(q, m.b.constant(128, dtype=u8)), to=i8)  # type: ignore[no-any-return]


def dequantize_unsigned(m: Match) -> Value:
    """dequantize(x less 128, s, z)   ->   dequantize(x, s, z + 128)"""
    n = m.root
    q = _from_unsigned(m, m.operand(n, 0))
    scale, zero = _one_scale(m, n)
    at = known(m.graph, zero)
    m.require(at is not None, "the zero point is not constant")
    moved = m.b.constant(np.full(scale.type.shape, at + 128, np.uint8))  # type: ignore[operator]
    return m.b.dequantize_linear(q, scale, moved, **n.attrs)  # type: ignore[no-any-return]


def _from_unsigned(m: Match, v: Value) -> Value:
    flip = m.node(m.operand(m.node(v, "cast"), 0), "bitwise_xor")
    q = m.operand(flip, 0)
    m.require(v.type.dtype is i8 and q.type.dtype is u8, "{} was no u8", v.name)
    m.require(m.number(m.operand(flip, 1)) == 128, "it is not moved by 128")
    return q


def move_bytes(m: Match) -> Value:
    """transpose(dequantize(x))   ->   dequantize(transpose(x)); likewise other movement, the maximum of a window, and
    the nearest element of an image
    """
    n = m.root
    found, _, zero = _dequantized(m, m.operand(n, 0))
    more = _around(m, n, zero)
    q = m.b.node(n.op, [found.inputs[0], *more], n.attrs).output
    return _dequantize(m, q, found)


def _around(m: Match, n: Node, zero: Value | None) -> list[Value]:
    """Operands behind the first with which an op moves codes like numbers: indices, the code of zeros that it adds."""
    mode = n.attrs.get("mode") if Trait.RESAMPLES in n.op.traits else None
    chooses = mode in (None, *CHOICES) and n.attrs.get("extrapolation") is None
    m.require(chooses, "{} computes new elements", n.op.name)
    m.require(len(n.outputs) == 1, "{} has several results", n.op.name)
    others = [v for v in n.inputs[1:] if v is not None]
    if n.op.index is not None and n.op.index.loads:
        m.require(n.inputs[n.op.index.operand] is not n.inputs[0], "{} moves indices", n.op.name)
        return others
    if Trait.FILLS not in n.op.traits or mode not in (None, "constant"):
        m.require(not others, "{} has several operands", n.op.name)
        return []
    m.require(all(m.number(v) == 0 for v in others), "{} adds other numbers than 0", n.op.name)
    if zero is None or known(m.graph, zero) == 0:
        return []
    m.require(mode is not None, "{} adds codes of 0", n.op.name)
    return [zero]


def average_bytes(m: Match) -> Value:
    """avg_pool(dequantize(x, s, z))   ->   mul(sub(avg_pool(cast(x)), z), s)

    A window sums integers, exactly, and has no scale to multiply each of them by. Zeros that it counts around the image
    are no codes: there z is subtracted first.
    """
    n = m.root
    found, scale, zero = _dequantized(m, m.operand(n, 0))
    at = known(m.graph, zero)
    m.require(scale.type.dtype is f32 and at is not None, "the scale is no float32, or its zero point no constant")
    first = bool(n.attrs.get("count_include_pad") and any(n.attrs["pads"] or ()))
    numbers = m.b.cast(found.inputs[0], to=f32)
    mean = m.b.node(n.op, [m.b.sub(numbers, float(at)) if first and at else numbers], n.attrs).output
    mean = m.b.sub(mean, float(at)) if at and not first else mean
    return m.b.mul(mean, m.b.reshape(scale, shape=()))  # type: ignore[no-any-return]


def transpose_weights(m: Match) -> Value:
    """transpose(dequantize(w)) of constants with a scale for each index of an axis, which becomes another axis"""
    n = m.root
    found = m.node(m.operand(n, 0), "dequantize_linear")
    m.require(not found.attrs["block"] and m.operand(found, 1).type.size != 1, "there is one scale")
    data = m.constant(m.operand(found, 0))
    axis = n.attrs["perm"].index(normalize_axis(found.attrs["axis"], n.output.type.rank))
    q = m.b.constant(np.ascontiguousarray(data.transpose(n.attrs["perm"])))  # products take constants
    return m.b.dequantize_linear(q, *found.inputs[1:], axis=axis)  # type: ignore[no-any-return]


def quantize_again(m: Match) -> Value:
    """quantize(dequantize(x, s, z), s, z)   ->   x: a quotient by s of the product with s is off by a rounding"""
    n = m.root
    found, scale, zero = _dequantized(m, m.operand(n, 0))
    there, at = _one_scale(m, n)
    same = m.constant(scale).reshape(()) == m.constant(there).reshape(())
    m.require(bool(same) and known(m.graph, zero) == known(m.graph, at) is not None, "the scales differ")
    return m.keeps_type(m.operand(found, 0))


def quantize_ahead(m: Match) -> Value:
    """quantize(transpose(x))   ->   transpose(quantize(x)); likewise the parts of a concatenation, and what repeats
    elements or puts a border around them
    """
    n = m.root
    moved = m.sole(m.node(m.operand(n, 0), "concat", "resize", *MOVED))
    _, zero = _one_scale(m, n)
    joined = producer(moved.output, "concat") is moved
    more = [] if joined else _around(m, moved, zero)
    parts = [v for v in moved.inputs if v is not None] if joined else [m.operand(moved, 0)]
    whole = joined or _holds_all(moved) or parts[0] in m.graph.constants
    m.require(whole, "{} has other elements", moved.op.name)
    of = {v: m.b.quantize_linear(v, *n.inputs[1:], **{**n.attrs, "axis": 0}) for v in dict.fromkeys(parts)}
    return m.b.node(moved.op, [*(of[v] for v in parts), *more], moved.attrs).output


def _holds_all(n: Node) -> bool:
    """Has the result of a movement as many elements as its operand, or more?"""
    before, after = n.inputs[0].type.size, n.output.type.size  # type: ignore[union-attr]
    return bool(before == after) or (isinstance(before, int) and isinstance(after, int) and before < after)


def compute_ahead(m: Match) -> Value:
    """relu(concat(conv(..), conv(..)))   ->   concat(relu(conv(..)), ..) of the groups of a convolution of bytes

    So each group ends in the kernel of its product, and bytes are joined. The other operand is a constant: one number,
    or one for each channel.
    """
    n = m.root
    joined = m.sole(m.node(m.operand(n, 0), "concat"))
    parts = [v for v in joined.inputs if v is not None]
    axis, rank = normalize_axis(joined.attrs["axis"], n.output.type.rank), n.output.type.rank
    m.require(all(map(_is_group, parts)), "{} joins no groups of a convolution of bytes", joined)
    m.require(len(n.outputs) == 1 and n.output.type.shape == joined.output.type.shape, "{} broadcasts", n)
    ends = np.cumsum([v.type.shape[axis] for v in parts])
    others = []
    for v in n.inputs[1:]:
        a = m.constant(v)  # type: ignore[arg-type]
        shape = (1,) * (rank - a.ndim) + a.shape
        m.require(a.size == 1 or a.size == shape[axis] == ends[-1], "{} is not one for each channel", v)
        others.append([v] * len(parts) if a.size == 1 else np.split(a.reshape(shape), ends[:-1], axis))
    of = [[v if isinstance(v, Value) else m.b.constant(v) for v in row] for row in zip(*others)] or [[]] * len(parts)
    made = [m.b.node(n.op, [v, *row], n.attrs).output for v, row in zip(parts, of)]
    return m.b.concat(*made, axis=axis)  # type: ignore[no-any-return]


def _is_group(v: Value) -> bool:
    """Is a value a convolution of bytes, or computed of one alone?"""
    while (n := producer(v, *STEPS)) is not None and n.inputs[0] is not None:
        v = n.inputs[0]
    n = producer(v, "conv")
    return n is not None and n.attrs["out_dtype"] is i32


# --- products ---------------------------------------------------------------------------------------------------------


def convolve_bytes(m: Match) -> Value:
    """conv(dequantize(x), dequantize(w), bias)   ->   add(mul(cast(conv(x, w8, ..)), scales), bias)"""
    n = m.root
    w, scales = _weights(m, m.node(m.operand(n, 1), "dequantize_linear"), 0, True)
    bias = n.inputs[2] if len(n.inputs) > 2 else None
    exact = _exact_bias(m, bias, m.node(m.operand(n, 0), "dequantize_linear"), scales)
    if exact is not None and not in_32_bits(w, exact):
        exact = None
    column = (-1, *(1,) * (n.output.type.rank - 2))
    y = _scaled_product(m, w, scales.reshape(column) if scales.size > 1 else scales.reshape(()), n.attrs, exact)
    if bias is None or exact is not None:
        return y
    return m.b.add(y, m.b.reshape(bias, shape=column))  # type: ignore[no-any-return]


def multiply_bytes(m: Match) -> Value:
    """matmul(dequantize(x), dequantize(w))   ->   mul(cast(matmul(x, w8, ..)), scales)"""
    w, scales = _weights(m, m.node(m.operand(m.root, 1), "dequantize_linear"), -1, False)
    return _scaled_product(m, w, scales.reshape(-1) if scales.size > 1 else scales.reshape(()), m.root.attrs)


def multiply_and_add_bytes(m: Match) -> Value:
    """gemm(dequantize(x), dequantize(w), c)   ->   add(mul(cast(matmul(x, w8, ..)), alpha * scales), beta * c)"""
    n = m.root
    m.require(not n.attrs["trans_a"], "the first operand is transposed")
    turned, c = n.attrs["trans_b"], n.inputs[2] if len(n.inputs) > 2 else None
    w, scales = _weights(m, m.node(m.operand(n, 1), "dequantize_linear"), 0 if turned else -1, False)
    w = Weights(w.data.T, False) if turned else w
    scales = scales * np.float32(n.attrs["alpha"])
    y = _scaled_product(m, w, scales.reshape(-1) if scales.size > 1 else scales.reshape(()), {})
    beta = n.attrs["beta"]
    if c is None or beta == 0.0:
        return y
    return m.b.add(y, c if beta == 1.0 else m.b.mul(c, beta))  # type: ignore[no-any-return]


def _scaled_product(m: Match, w: Weights, scales: Array, attrs: Any, bias: Array | None = None) -> Value:
    """The product of the root's first operand, which is dequantized, with integers, in f32.

    Args:
        w: the integers.
        scales: of the weights, in a shape that broadcasts to the result.
        attrs: of the convolution or product.
        bias: in i32 [O].
    """
    found, scale, zero = _dequantized(m, m.operand(m.root, 0))
    x = m.operand(found, 0)
    m.require(m.root.output.type.dtype is f32 and not attrs.get("panel"), "it is {}", m.root.output.type)
    m.require(x.type.rank >= 2 and w.data.ndim >= 2, "a vector")
    m.require(has_form(w, attrs), "no integer product has the range of these weights")
    one = m.graph.constants.get(scale)
    start = None if bias is None else m.b.constant(bias)
    y = product(m.b, Quantized(x, zero), w, attrs, start, _lanes(m))
    assert y is not None
    y = y if y.type.dtype is f32 else m.b.cast(y, to=f32)
    factor = m.b.mul(m.b.reshape(scale, shape=()), scales) if one is None else one.reshape(()) * scales
    return m.b.mul(y, factor)  # type: ignore[no-any-return]


def _lanes(m: Match) -> int:
    """Output channels that kernels have in a vector; 0 where they have none."""
    return 0 if m.ctx.facts.channels_last else m.ctx.facts.lanes


def _weights(m: Match, n: Node, axis: int, convolves: bool) -> tuple[Weights, Array]:
    """Dequantized constants as integers, and their scales, one or one for each index of the axis."""
    q, scales = m.constant(m.operand(n, 0)), m.constant(m.operand(n, 1))
    m.require(m.operand(n, 0).type.dtype in BYTES and not n.attrs["block"], "the weights are no bytes")
    axis = normalize_axis(axis, q.ndim)
    along = scales.size == 1 or (scales.ndim == 1 and normalize_axis(n.attrs["axis"], q.ndim) == axis)
    m.require(along, "the scales are not those of the results")
    data = q.astype(np.int32)
    if len(n.inputs) > 2 and n.inputs[2] is not None:
        zero = m.constant(n.inputs[2]).astype(np.int32)
        data = data - (zero.reshape(()) if zero.size == 1 else zero.reshape(-1, *(1,) * (q.ndim - axis - 1)))
    return Weights(data, convolves), scales


def _exact_bias(m: Match, bias: Value | None, x: Node, scales: Array) -> Array | None:
    """A bias in integers whose scale is the product of those of x and the weights; None where it is none."""
    n, scale = producer(bias, "dequantize_linear"), m.graph.constants.get(m.operand(x, 1))
    if n is None or scale is None or scale.size != 1:
        return None
    q, of_bias = m.graph.constants.get(n.inputs[0]), m.graph.constants.get(n.inputs[1])  # type: ignore[arg-type]
    if q is None or of_bias is None or q.dtype != np.int32:
        return None
    if len(n.inputs) > 2 and n.inputs[2] is not None:
        zero = m.graph.constants.get(n.inputs[2])
        if zero is None:
            return None
        moved = q.astype(np.int64) - zero.reshape(-1)  # one, or one for each channel
        if np.abs(moved).max(initial=0) > np.iinfo(np.int32).max:
            return None
        q = moved.astype(np.int32)
    same = bool(np.allclose(of_bias.reshape(-1), (scale.reshape(()) * scales).reshape(-1), rtol=1e-6, atol=0))
    return q if same else None


def multiply_two(m: Match) -> Value:
    """matmul(dequantize(x), dequantize(y)), none of them constant   ->   mul(cast(matmul(x, y, ..)), scales)"""
    n = m.root
    found = [_dequantized(m, m.operand(n, k)) for k in (0, 1)]
    m.require(n.output.type.dtype is f32 and not n.attrs.get("panel"), "it is {}", n.output.type)
    left, right = (Quantized(m.operand(d, 0), zero) for d, _, zero in found)
    _require_matrices(m, left.q, right.q)
    y = m.b.cast(product_of_two(m.b, left, right), to=f32)
    (s, a), (t, c) = ((scale, m.graph.constants.get(scale)) for _, scale, _ in found)
    if a is not None and c is not None:
        return m.b.mul(y, m.b.constant(a.reshape(()) * c.reshape(())))  # type: ignore[no-any-return]
    return m.b.mul(y, m.b.mul(m.b.reshape(s, shape=()), m.b.reshape(t, shape=())))  # type: ignore[no-any-return]


def _require_matrices(m: Match, x: Value, y: Value) -> None:
    """Are products of two matrices that change with the call worth laying out the second for bytes?"""
    m.require(m.ctx.facts.packs_bytes, "the target multiplies bytes by constant ones alone")
    m.require(y not in m.graph.constants, "the second is constant")
    m.require(x.type.rank >= 2 and y.type.rank >= 2 and y.type.shape[-1] != 1, "a vector")
    m.require(isinstance(x.type.shape[-1], int), "the inner size is not known")
    rows, count = size_of(m.root.output.type.shape[:-1]), size_of(y.type.shape[:-2])
    few = isinstance(rows, int) and isinstance(count, int) and rows <= FEW_ROWS * count
    m.require(not few, "{} rows read {} matrices", rows, count)


def multiply_two_integers(m: Match) -> Value:
    """matmul(sub(cast(x), cast(zx)), sub(cast(y), cast(zy))), in i32, none of them constant   ->   one of bytes"""
    n = m.root
    m.require(n.output.type.dtype is i32 and not n.attrs.get("panel"), "it is no i32")
    x, y = (_integers(m, m.operand(n, k)) for k in (0, 1))
    _require_matrices(m, x.q, y.q)
    return product_of_two(m.b, x, y)  # type: ignore[no-any-return]


def convolve_integers(m: Match) -> Value:
    """conv(sub(cast(x), cast(zx)), w), of bytes in i32 and constants   ->   an integer product"""
    return _integer_product(m, True)


def multiply_integers(m: Match) -> Value:
    """matmul(sub(cast(x), cast(zx)), w), of bytes in i32 and constants   ->   an integer product"""
    return _integer_product(m, False)


def _integer_product(m: Match, convolves: bool) -> Value:
    n = m.root
    m.require(n.output.type.dtype is i32 and not n.attrs.get("panel"), "it is no i32")
    x = _integers(m, m.operand(n, 0))
    w = Weights(m.constant(m.operand(n, 1)), convolves)
    m.require(w.data.dtype == np.int32 and w.data.ndim >= 2 and x.q.type.rank >= 2, "the weights are no i32")
    m.require(has_form(w, n.attrs), "no integer product has the range of these weights")
    y = product(m.b, x, w, n.attrs, n.inputs[2] if len(n.inputs) > 2 else None, _lanes(m))
    assert y is not None
    return y if y.type.dtype is i32 else m.b.cast(y, to=i32)  # type: ignore[no-any-return]


def _integers(m: Match, v: Value) -> Quantized:
    """Bytes as i32, perhaps less one zero point."""
    zero, n = None, producer(v, "sub")
    if n is not None:
        v, zero = m.operand(n, 0), m.operand(n, 1)
        m.require(zero.type.size == 1, "there are several zero points")
        z = producer(zero, "cast")
        zero = z.inputs[0] if z is not None and z.inputs[0] is not None and z.inputs[0].type.dtype in BYTES else zero
    q = m.operand(m.node(v, "cast"), 0)
    m.require(q.type.dtype in BYTES, "{} holds no bytes", q.name)
    return Quantized(q, zero)


# --- requantization ---------------------------------------------------------------------------------------------------


def quantize_by_product(m: Match) -> Value:
    """quantize(add(mul(x, a), b), s, z)   ->   cast(cast(round(clip(add(mul(x, a/s), b/s), low - z, high - z))) + z)

    Rounding and bounds that are integers change places, so that one instruction rounds and converts. NaN becomes the
    lower bound. 8-bit floats are quantized without a zero point, where the target multiplies them.
    """
    n = m.root
    scale, zero = _one_scale(m, n)
    s, to = m.constant(scale), n.attrs["dtype"]
    float8 = to in FLOAT8 and m.ctx.facts.multiplies_float8 and n.attrs["saturate"] and _is_nothing(m, zero)
    z = 0 if float8 else known(m.graph, zero) if to in BYTES else None
    m.require(s.dtype == np.float32 and z is not None, "the scale is no constant of float32")
    x = m.operand(n, 0)
    m.require(x.type.dtype is f32, "the operand is {}", x.type)
    with np.errstate(all="ignore"):
        factor = np.float32(1) / s.reshape(())
    m.require(bool(np.isfinite(factor) and factor > 0), "the scale is {}", s)
    if float8:
        return m.b.cast(_scaled(m, x, factor), to=to, saturate=True)  # type: ignore[no-any-return]
    low, high = to.range
    inside = m.b.clip(_scaled(m, x, factor), low=float(low - z), high=float(high - z), keeps_nan=False)
    q = m.b.cast(m.b.round(inside), to=i32)
    return m.b.cast(m.b.add(q, z) if z else q, to=to)  # type: ignore[no-any-return]


def quantize_by_division(m: Match) -> Value:
    """quantize(x, s, z)   ->   cast(clip(round(div(x, s)) + z, low, high)), where the scale is known at the call

    A product with 1/s would put a quotient halfway between two integers on the wrong side: ties are frequent there,
    since the scale is made of the largest elements.
    """
    n = m.root
    scale, zero = _one_scale(m, n)
    m.require(scale.type.dtype is f32 is m.operand(n, 0).type.dtype and scale not in m.graph.constants, "a constant")
    m.require(n.attrs["dtype"] in BYTES, "the result is {}", n.attrs["dtype"])
    low, high = n.attrs["dtype"].range
    q = m.b.round(m.b.div(n.inputs[0], m.b.reshape(scale, shape=())))
    q = q if zero is None else m.b.add(q, m.b.cast(m.b.reshape(zero, shape=()), to=f32))
    q = m.b.clip(q, low=float(low), high=float(high), keeps_nan=False)
    return m.b.cast(q, to=n.attrs["dtype"])  # type: ignore[no-any-return]


def _is_nothing(m: Match, zero: Value | None) -> bool:
    """Is a zero point of 8-bit floats zero?"""
    return zero is None or not m.constant(zero).astype(np.float32).any()


def _scaled(m: Match, v: Value, factor: Any) -> Any:
    """A product with a positive number, which goes into the constants that v is made with."""
    n = producer(v, *(SUMS if _in_constants(m, v) else ()))
    if n is None:
        return m.b.mul(v, m.b.constant(factor))
    x, *others = (m.operand(n, k) for k in range(min(len(n.inputs), 2)))
    if producer(v, "dequantize_linear") is not None:
        scale = m.b.constant((m.graph.constants[others[0]] * factor).astype(np.float32))
        return m.b.dequantize_linear(x, scale, *n.inputs[2:], **n.attrs)
    if producer(v, "relu") is not None:
        return m.b.relu(_scaled(m, x, factor))
    c = m.graph.constants.get(others[0])
    scaled = _scaled(m, others[0], factor) if c is None else m.b.constant((c * factor).astype(np.float32))
    return m.b.mul(x, scaled) if producer(v, "mul") is not None else m.b.add(_scaled(m, x, factor), scaled)


def _in_constants(m: Match, v: Value) -> bool:
    """Is a value, which one node reads, made with constants that may take up a factor?"""
    n = producer(v, *SUMS)
    if n is None or len({u for u, _ in v.uses}) > 1 or v in m.outputs:
        return False
    if producer(v, "relu") is not None:
        return _in_constants(m, m.operand(n, 0))
    if m.operand(n, 1) in m.graph.constants:
        return producer(v, "add") is None or _in_constants(m, m.operand(n, 0))
    return producer(v, "add") is not None and all(_in_constants(m, m.operand(n, k)) for k in (0, 1))


RULES = (
    Rule(quantize_unsigned, ("quantize_linear",)),
    Rule(quantize_again, ("quantize_linear",), exact=False),
    Rule(quantize_ahead, ("quantize_linear",)),
    Rule(compute_ahead, STEPS),
    Rule(dequantize_unsigned, ("dequantize_linear",)),
    Rule(move_bytes, CHOSEN),
    Rule(average_bytes, ("avg_pool",), exact=False),
    Rule(transpose_weights, ("transpose",)),
    Rule(convolve_bytes, ("conv",), exact=False),
    Rule(multiply_bytes, ("matmul",), exact=False),
    Rule(multiply_and_add_bytes, ("gemm",), exact=False),
    Rule(multiply_two, ("matmul",), exact=False),
    Rule(convolve_integers, ("conv",)),
    Rule(multiply_integers, ("matmul",)),
    Rule(multiply_two_integers, ("matmul",)),
)
LAST_RULES = (
    Rule(quantize_by_product, ("quantize_linear",), exact=False),
    Rule(quantize_by_division, ("quantize_linear",), exact=False),
)
