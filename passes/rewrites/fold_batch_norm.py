"""Fold batch normalization and constant per-channel scales and shifts into the previous contraction.

    y = batch_norm(conv(x, w, b), g, h, mu, var)   ->   y = conv(x, w * s, (b - mu) * s + h),  s = g / sqrt(var +
                                                        epsilon)

In steps: batch_norm by constants is `z * s + t`; a scale goes into weights, a shift into the bias of a convolution or
the addend of a matmul. Valid where the contraction has no other reader and what changes is constant. The products are
rounded once, from float64; weights that would overflow stay as they are. Not for strict numerics.
"""

from __future__ import annotations

import numpy as np

from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.op import ContractionForm
from dnnc.passes.base import PassContext
from dnnc.passes.rewrite import Array, Match, Rule, producer, rewrite
from dnnc.passes.rewrites.fold_parameters import PARAMETER_RULES

CONVOLUTIONS = ("conv", "conv_transpose")


def fold_batch_norm(graph: Graph, ctx: PassContext) -> bool:
    """Apply the rules below, and those for parameters, until none fires."""
    return rewrite(graph, (*FOLD_RULES, *PARAMETER_RULES) if graph.parameters else FOLD_RULES, ctx)


# --- constants --------------------------------------------------------------------------------------------------------


def _rounded(m: Match, a: Array, like: Value, shape: tuple[int, ...] | None = None) -> Array:
    """Numbers in the dtype of a value; NoMatch where one overflows."""
    with np.errstate(all="ignore"):
        out: Array = a.astype(like.type.dtype.numpy).reshape(a.shape if shape is None else shape)
    ok = bool(np.isfinite(out.astype(np.float64, copy=False)).all())
    m.require(ok, "a folded constant would not be finite in {}", like.type.dtype)
    return out


def _channels(m: Match, c: Value, z: Value, axis: int) -> Array:
    """A constant that differs along one axis of z alone, as float64 [size of the axis]."""
    a = m.constant(c)
    shape = (1,) * (z.type.rank - a.ndim) + a.shape
    size = z.type.shape[axis]
    m.require(len(shape) == z.type.rank, "{} has more dims than {}", c.name, z.name)
    ok = all(d == 1 for k, d in enumerate(shape) if k != axis)
    m.require(ok, "{} does not vary along axis {} alone", c.name, axis)
    m.require(isinstance(size, int), "axis {} of {} has a symbolic size", axis, z.name)
    return np.broadcast_to(a.astype(np.float64).reshape(-1), (size,))  # type: ignore[arg-type]


def _float(m: Match, n: Node) -> Node:
    ok = n.output.type.dtype.is_float and n.attrs.get("out_dtype") is None
    m.require(ok, "{} is not computed in floats", n.op.name)
    return n


def _scale_or_inverse(m: Match, z_ops: tuple[str, ...]) -> tuple[Node, Value, bool]:
    """Match a product of a node of these ops, read here alone, and a constant: (node, constant, is division)."""
    inverse = m.root.op.name == "div"
    z, c = m.either(m.root)
    n = m.sole(_float(m, m.node(z, *z_ops)))
    m.keeps_type(z)
    return n, c, inverse


# --- batch normalization ----------------------------------------------------------------------------------------------


def batch_norm_to_scale(m: Match) -> Value:
    """batch_norm(z, g, h, mu, var) -> add(mul(z, s), t), s = g / sqrt(var + epsilon), t = h - mu * s; z varies"""
    z = m.operand(m.root, 0)
    g, h, mu, var = (m.constant(m.operand(m.root, k)).astype(np.float64) for k in range(1, 5))
    if z.type.dtype.computed is not z.type.dtype:  # between two nodes the product would be rounded to the half type
        m.require(_absorbs(m, z), "{} cannot take up a scale, and {} would lose digits", z.name, z.type.dtype)
    with np.errstate(all="ignore"):
        s = g / np.sqrt(var + m.root.attrs["epsilon"])
        t = h - mu * s
    shape = (-1,) + (1,) * (z.type.rank - 2)
    scale, shift = _rounded(m, s.reshape(shape), z), _rounded(m, t.reshape(shape), z)
    b = m.b
    return b.add(b.mul(z, m.renew(m.operand(m.root, 1), scale)), m.renew(m.operand(m.root, 2), shift))  # type: ignore[no-any-return]


def _absorbs(m: Match, z: Value) -> bool:
    n = producer(z, *CONVOLUTIONS, "matmul")
    if n is None or n.inputs[1] not in m.graph.constants:
        return False
    return z not in m.outputs and len(z.uses) == 1


# --- convolutions -----------------------------------------------------------------------------------------------------


def scale_into_conv(m: Match) -> Value:
    """mul(conv(x, w, b), c) -> conv(x, w * c, b * c), one c per output channel; div and conv_transpose likewise"""
    n, c, inverse = _scale_or_inverse(m, CONVOLUTIONS)
    x, w = m.operand(n, 0), m.operand(n, 1)
    factor = _inverted(_channels(m, c, n.output, 1), inverse)
    weights = _scaled(m, w, _along_outputs(n, factor, m.constant(w)))
    bias = _bias(m, n)
    new_bias = None if bias is None else _rounded(m, bias * factor, n.output)
    made = [x, m.renew(w, weights)]
    if new_bias is not None:
        made.append(m.renew(m.operand(n, 2), new_bias))
    return m.b.node(n.op, made, n.attrs).output


def shift_into_conv(m: Match) -> Value:
    """add(conv(x, w, b), c) -> conv(x, w, b + c) for one c per output channel; sub likewise; conv_transpose likewise"""
    z, c = m.either(m.root)
    n = m.sole(_float(m, m.node(z, *CONVOLUTIONS)))
    m.keeps_type(z)
    shift = _channels(m, c, z, 1)
    bias = _bias(m, n)
    total = (0.0 if bias is None else bias) + (-shift if m.root.op.name == "sub" else shift)
    new_bias = m.renew(c if bias is None else m.operand(n, 2), _rounded(m, np.asarray(total), z))
    return m.b.node(n.op, [n.inputs[0], n.inputs[1], new_bias], n.attrs).output


def _bias(m: Match, n: Node) -> Array | None:
    v = n.inputs[2] if len(n.inputs) > 2 else None
    return None if v is None else m.constant(v).astype(np.float64)


def _inverted(factor: Array, inverse: bool) -> Array:
    with np.errstate(all="ignore"):
        return 1.0 / factor if inverse else factor


def _along_outputs(n: Node, factor: Array, w: Array) -> Array:
    """Factors per output channel in the shape in which they multiply the weights."""
    if n.op.contraction is ContractionForm.CONVOLUTION:
        return factor.reshape((-1,) + (1,) * (w.ndim - 1))
    group = n.attrs["group"]  # [C, O/group, ...]: the inputs of group k meet the outputs of group k alone
    per_input = np.repeat(factor.reshape(group, -1), w.shape[0] // group, axis=0)
    return per_input.reshape(per_input.shape + (1,) * (w.ndim - 2))


def _scaled(m: Match, w: Value, factor: Array) -> Array:
    """The weights times the factors, rounded once."""
    a = m.constant(w)
    if a.dtype.kind != "f" or a.dtype.itemsize == 8:
        return _rounded(m, a.astype(np.float64) * factor, w)
    out = np.empty_like(a)
    with np.errstate(all="ignore"):
        np.multiply(
            a, factor, out=out, dtype=np.float64, casting="same_kind"
        )  # in blocks, without a float64 copy of the weights
    m.require(bool(np.isfinite(out).all()), "a folded constant would not be finite in {}", w.type.dtype)
    return out


# --- matrix products --------------------------------------------------------------------------------------------------


def scale_into_matmul(m: Match) -> Value:
    """mul(matmul(x, w), c) -> matmul(x, w * c) for one c per column, or one for all; div likewise"""
    n, c, inverse = _scale_or_inverse(m, ("matmul",))
    x, w = m.operand(n, 0), m.operand(n, 1)
    m.require(w.type.rank >= 2, "the weights are a vector")
    factor = _inverted(_channels(m, c, n.output, n.output.type.rank - 1), inverse)
    weights = _scaled(m, w, factor)
    return m.b.node(n.op, [x, m.renew(w, weights)], n.attrs).output


def scale_past_shift(m: Match) -> Value:
    """mul(add(matmul(x, w), b), c) -> add(mul(matmul(x, w), c), b * c) for constants w, b and per-column c"""
    n, c, inverse = _scale_or_inverse(m, ("add",))
    z, shift = m.either(n)
    product = m.sole(_float(m, m.node(z, "matmul")))
    m.constant(m.operand(product, 1))
    m.require(z.type == n.output.type, "{} broadcasts the product", shift.name)
    factor = _inverted(_channels(m, c, z, z.type.rank - 1), inverse)
    scale = _rounded(m, factor, z)
    moved = _rounded(m, m.constant(shift).astype(np.float64) * factor, z)
    b = m.b
    return b.add(b.mul(z, m.renew(c, scale)), m.renew(shift, moved))  # type: ignore[no-any-return]


def merge_shifts(m: Match) -> Value:
    """add(add(matmul(x, w), b), c) -> add(matmul(x, w), b + c) for constants b and c"""
    inner, c = m.either(m.root)
    n = m.sole(_float(m, m.node(inner, "add")))
    z, d = m.either(n)
    m.node(z, "matmul")
    m.require(z.type == n.output.type, "{} broadcasts the product", d.name)
    m.keeps_type(z)
    total = _rounded(m, m.constant(d).astype(np.float64) + m.constant(c).astype(np.float64), z)
    return m.b.add(z, m.renew(d, total))  # type: ignore[no-any-return]


FOLD_RULES: tuple[Rule, ...] = (
    Rule(batch_norm_to_scale, ("batch_norm",), exact=False),
    Rule(scale_into_conv, ("mul", "div"), exact=False),
    Rule(shift_into_conv, ("add", "sub"), exact=False),
    Rule(scale_into_matmul, ("mul", "div"), exact=False),
    Rule(scale_past_shift, ("mul", "div"), exact=False),
    Rule(merge_shifts, ("add",), exact=False),
)
