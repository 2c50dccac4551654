"""Keep weights of few bits as they are stored: products read codes and scales, and decode them in registers.

    matmul(x, transpose(dequantize_linear(w, s, axis=1, block=32)))
        -> matmul(x, decode(w', s', axis=0, block=32, table=..))            w', s': transposed constants

Codes of up to 4 bits are unsigned, and a table says what each of them means; signs and a zero point that all blocks
share are part of the table. Runs ahead of folding, which would make floats of the weights, and behind the rules for
products of bytes, which take what they can.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dnnc.ir.dtype import DType, bf16, dtype, f16, f32, i8, u8
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.op import ContractionForm, Trait
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.types import product
from dnnc.passes.base import PassContext
from dnnc.passes.rewrite import Match, Rule, producer, rewrite

Array = np.ndarray[Any, Any]
FEW_BITS = 4  # of codes that a table decodes
MANY_ROWS = 64  # of a product, that decode weights in tiles of their own
E4M3 = dtype("f8e4m3fn")
# the bits of a finite code, moved, are those of a float16 that is 2^8 times smaller
E4M3_VALUE = "cast_f32(bits_f16(cast_i16(shl(q[0], 7) & -16385)))"
LEAST = 1 << 12  # elements: of smaller weights floats take no time to read


def stored_weights(graph: Graph, ctx: PassContext) -> bool:
    """Apply the rules above where the target's products decode weights."""
    return ctx.facts.decodes_weights and rewrite(graph, RULES, ctx)


def store_weights(m: Match) -> Value:
    """dequantize_linear(constants)   ->   decode(constants), for products and lookups alone"""
    n = m.root
    codes, scale = m.constant(m.operand(n, 0)), _scales(m, m.operand(n, 1))
    zero = m.constant(n.inputs[2]) if len(n.inputs) > 2 and n.inputs[2] is not None else None
    t = m.operand(n, 0).type.dtype
    m.require(t.bits <= 8 and codes.size >= LEAST and codes.ndim >= 2, "{} weights of {}", codes.size, t)
    m.require(bool(n.output.uses) and _decoders_read(n.output), "others than products read {}", n.output.name)
    axis, block = _blocks(n, codes)
    m.require(_has_kernel(m, n.output, codes, t, axis, block), "no kernel decodes {} for {}", t, n.output.name)
    shape = _shape(scale, codes.shape, axis, n)
    scale, zero = scale.reshape(shape), None if zero is None else zero.reshape(shape)
    value = ""
    if t is E4M3 and zero is None and np.isfinite(codes.astype(np.float32)).all():
        codes, scale, t, value = codes.view(np.int8), scale.astype(np.float32) * np.float32(2**8), i8, E4M3_VALUE
    codes, table, zero = coded(codes, t, zero)
    # what a table says of all codes may take in one scale of all blocks, but a float has less digits than the product
    b = m.b
    operands = [b.constant(codes), b.constant(scale), *([] if zero is None else [b.constant(zero)])]
    made: Value = b.op("decode", *operands, dtype=n.output.type.dtype, axis=axis, block=block, table=table, value=value)
    return made


def _scales(m: Match, v: Value) -> Array:
    """Scales as floats: they may be constants of a small type behind a cast, such as powers of two in 8 bits."""
    if (n := producer(v, "cast")) is None or not n.attrs["to"].is_float:
        return m.constant(v)
    scale: Array = m.constant(m.operand(n, 0)).astype(n.attrs["to"].numpy)
    return scale


def coded(codes: Array, t: DType, zero: Array | None) -> tuple[Array, tuple[float, ...], Array | None]:
    """Codes, the table of what they mean (empty: themselves), and the zero points that are left.

    zero: one for each block, or None.
    """
    shared = zero is not None and (zero == zero.reshape(-1)[0]).all()
    at = int(zero.reshape(-1)[0]) if zero is not None and shared and t.is_int else 0
    left = None if zero is None or (shared and t.is_int) else zero
    if t.is_int and t.bits <= FEW_BITS:
        n = 1 << t.bits
        table = [k + t.range[0] - at for k in range(n)]
        unsigned = dtype(f"u{t.bits}").numpy
        left = None if left is None else left.astype(np.int8 if t.kind == "i" else np.uint8)
        return (codes.astype(np.int8) - t.range[0]).astype(np.uint8).astype(unsigned), tuple(map(float, table)), left
    if t.bits <= FEW_BITS and left is None:
        every = np.arange(1 << t.bits, dtype=np.uint8)
        unsigned = dtype(f"u{t.bits}").numpy
        return codes.view(np.uint8).astype(unsigned), tuple(map(float, every.view(t.numpy))), None
    if t in (u8, i8) and at:
        moved = codes.astype(np.int16) - at
        if moved.min(initial=0) < -128 or moved.max(initial=0) > 127:
            return codes, (), zero
        return moved.astype(np.int8), (), None
    return codes, (), left


def _blocks(n: Node, codes: Array) -> tuple[int, int]:
    """Axis and size of blocks that share a scale; one block is all of an axis where scales are those of another one."""
    axis = normalize_axis(n.attrs["axis"], codes.ndim)
    if n.attrs["block"]:
        return axis, n.attrs["block"]
    other = codes.ndim - 2 if axis == codes.ndim - 1 else codes.ndim - 1
    return other, codes.shape[other]


def _shape(scale: Array, shape: tuple[int, ...], axis: int, n: Node) -> tuple[int, ...]:
    """The shape of scales with an axis for each of the codes."""
    if scale.size == 1:
        return (1,) * len(shape)
    if n.attrs["block"]:
        return tuple(scale.shape)
    along = normalize_axis(n.attrs["axis"], len(shape))
    return tuple(d if k == along else 1 for k, d in enumerate(shape))


def _decoders_read(v: Value) -> bool:
    """Do all readers, some of them through transposes and casts, decode what they read?"""
    for u, k in v.uses:
        if Trait.CONVERSION in u.op.traits or "perm" in u.attrs:
            if not u.outputs[0].type.dtype.is_float or not _decoders_read(u.outputs[0]):
                return False
        elif u.op.contraction is ContractionForm.PRODUCT or "trans_b" in u.attrs:
            turned = u.attrs.get("trans_a") or u.inputs[0] is v
            if k != 1 or turned or producer(u.inputs[0], "dequantize_linear") is not None:
                return False
        elif k != 0 or u.op.index is None or not u.op.index.loads or Trait.MOVEMENT not in u.op.traits:
            return False
    return bool(v.uses)


def _has_kernel(m: Match, v: Value, codes: Array, t: DType, axis: int, block: int) -> bool:
    """Do the target's kernels decode these codes in all products that read v, perhaps through transposes?"""
    takes = m.ctx.facts.decodes
    if takes is None:
        return True
    if not t.is_int:
        return False
    for u, _ in v.uses:
        if Trait.CONVERSION in u.op.traits or "perm" in u.attrs:
            turned = codes.T if "perm" in u.attrs else codes
            if codes.ndim != 2 or not _has_kernel(m, u.outputs[0], turned, t, axis ^ (turned is not codes), block):
                return False
            continue
        x = u.inputs[0]
        multiplies = u.op.contraction is ContractionForm.PRODUCT or "trans_b" in u.attrs
        if not multiplies or x is None or codes.ndim != 2 or not x.type.static:
            return False
        k, n = (int(s) for s in codes.shape)
        along = axis
        if u.attrs.get("trans_b"):
            k, n, along = n, k, 1 - axis
        rows = math.prod(map(int, x.type.shape[:-1]))  # type: ignore[arg-type]
        half = x.type.dtype in (f16, bf16) or (x.type.dtype is f32 and m.ctx.precision in ("float16", "bfloat16"))
        if not half or along != 0 or not takes(rows, k, n, t.bits, block):
            return False
    return True


def turn_stored(m: Match) -> Value:
    """transpose(decode(w, s))   ->   decode(transpose(w), transpose(s))"""
    n = m.root
    found = m.node(m.operand(n, 0), "decode")
    perm = n.attrs["perm"]
    operands = [None if v is None else m.constant(v) for v in found.inputs]
    axis = perm.index(normalize_axis(found.attrs["axis"], len(perm)))
    b = m.b
    turned = [None if a is None else b.constant(np.ascontiguousarray(a.transpose(perm))) for a in operands]
    made: Value = b.op("decode", *turned, **{**found.attrs, "axis": axis})
    return made


def turn_operand(m: Match) -> Value:
    """gemm(x, decode(w, s), trans_b=True)   ->   gemm(x, transpose(decode(w, s)))"""
    n = m.root
    m.node(m.operand(n, 1), "decode")
    m.require(n.attrs["trans_b"], "it is not transposed")
    b = m.b
    made: Value = b.gemm(
        n.inputs[0], b.transpose(n.inputs[1], perm=(1, 0)), *n.inputs[2:], **{**n.attrs, "trans_b": False}
    )
    return made


def convert_stored(m: Match) -> Value:
    """cast(decode(w, s))   ->   decode(w, s) in the other type"""
    n = m.root
    found = m.node(m.operand(n, 0), "decode")
    m.require(n.attrs["to"].is_float, "it is {}", n.attrs["to"])
    made: Value = m.b.op("decode", *found.inputs, **{**found.attrs, "dtype": n.attrs["to"]})
    return made


def is_decoded(v: Value | None) -> bool:
    """Is a value stored in another form, that its readers decode?"""
    return v is not None and v.node is not None and Trait.STORED in v.node.op.traits


def own_decoder(graph: Graph, n: Node) -> Node:
    """The node that decodes a product's second factor for this product alone, copied where others read it too."""
    b = n.inputs[1]
    assert b is not None and b.node is not None
    d = b.node
    if len(b.uses) > 1:
        d = Builder(graph, n, d.locs).node(d.op, list(d.inputs), d.attrs)
        n.set_input(1, d.output)
    return d


def decodes(u: Node, v: Value) -> bool:
    """Does a product decode its second factor while it reads it? Each tile of rows does so again: with many rows a
    kernel ahead of the product is faster.
    """
    if u.op.contraction is not ContractionForm.PRODUCT or u.inputs[1] is not v or u.inputs[0] is v:
        return False
    rows = product(u.output.type.shape[:-1]) if v.type.rank == 2 else u.output.type.shape[-2]
    return not isinstance(rows, int) or rows <= MANY_ROWS


RULES = (
    Rule(store_weights, ("dequantize_linear",)),
    Rule(turn_stored, ("transpose",)),
    Rule(turn_operand, ("gemm",)),
    Rule(convert_stored, ("cast",)),
)
