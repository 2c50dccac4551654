"""Matrix products and attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dnnc.frontends.torch.call import Call
from dnnc.frontends.torch.movement import part
from dnnc.ir.dtype import boolean, i64
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.expr import const, unwrap
from dnnc.ir.graph import Value
from dnnc.ir.types import Dim

Converter = Callable[[Call], Any]

# --- products ---------------------------------------------------------------------------------------------------------


def times(c: Call, x: Value, w: Value) -> Value:
    """x @ w. Where a reshape flattened the rows of x, multiply before it and reshape the product instead."""
    node = x.node
    before = node.inputs[0] if node is not None and node.op.name == "reshape" else None
    if before is None or x.type.rank != 2 or before.type.rank < 3 or before.type.shape[-1] != x.type.shape[-1]:
        made: Value = c.b.matmul(x, w)
        return made
    return c.b.reshape(c.b.matmul(before, w), shape=(x.type.shape[0], w.type.shape[-1]))  # type: ignore[no-any-return]


def on_rows(c: Call, y: Value, f: Callable[[Value], Value]) -> Value:
    """Apply a function with an operand for the last axis ahead of the reshape that `times` put after a product."""
    node = y.node
    inner = node.inputs[0] if node is not None and node.op.name == "reshape" else None
    if inner is None or inner.node is None or inner.node.op.name != "matmul":
        return f(y)
    made: Value = c.b.reshape(f(inner), shape=y.type.shape)
    return made


def mm(c: Call) -> Any:
    return times(c, c.x("self"), c.x("mat2"))


def bmm(c: Call) -> Any:
    return c.b.matmul(c.x("self"), c.x("mat2"))


def matmul(c: Call) -> Any:
    x, y = c.x("self"), c.x("other" if "other" in c.args else "tensor" if "tensor" in c.args else "vec")
    return c.b.matmul(x, y)


def scaled(c: Call, v: Value, name: str) -> Value:
    factor = c.get(name, 1)
    made: Value = v if factor == 1 else c.b.mul(v, c.scalar(factor, v.type.dtype))
    return made


def addmm(c: Call) -> Any:
    """beta * self + alpha * (a @ b); a beta of 0 hides NaN in self"""
    a, b = (
        (c.x("mat1"), c.x("mat2"))
        if "mat1" in c.args
        else (c.x("batch1"), c.x("batch2"))
        if "batch1" in c.args
        else (c.x("mat"), c.x("vec"))
    )
    y = times(c, a, b)
    if c.get("beta", 1) == 0:
        return scaled(c, y, "alpha")
    bias = scaled(c, c.x("self"), "beta")
    if bias.type.rank > 1 or c.get("alpha", 1) != 1:
        return c.b.add(scaled(c, y, "alpha"), bias)
    return on_rows(c, y, lambda v: c.b.add(v, bias))


def linear(c: Call) -> Any:
    w, bias = c.x("weight"), c.opt("bias")
    y = c.b.matmul(c.x("input"), c.b.transpose(w, perm=(1, 0)) if w.type.rank == 2 else w)
    return y if bias is None else c.b.add(y, bias)


def trilinear(c: Call) -> Any:
    """The sum of products of three operands, each with axes put in where the others have theirs."""
    xs = [
        c.b.unsqueeze(c.x(f"i{k}"), axes=c.ints(f"expand{k}")) if c.ints(f"expand{k}") else c.x(f"i{k}")
        for k in (1, 2, 3)
    ]
    return c.b.reduce_sum(c.b.mul(c.b.mul(xs[0], xs[1]), xs[2]), axes=c.ints("sumdim"))


# --- attention --------------------------------------------------------------------------------------------------------


def attention(c: Call) -> Any:
    """softmax(scale * q k^T + mask) v, spelled out; a pass fuses it again where the target has a kernel."""
    if c.get("dropout_p", 0.0):
        raise UnsupportedError("attention with dropout: call the model in eval mode")
    q, k, v = c.x("query"), c.x("key"), c.x("value")
    mask = c.opt("attn_mask") or c.opt("attn_bias")
    k, v = (shared_heads(c, t, q) for t in (k, v))
    y = attended(c, q, k, v, mask, c.flag("is_causal"), c.get("scale"))
    return y if len(c.outs) == 1 else [y, *(None for _ in c.outs[1:])]


def shared_heads(c: Call, t: Value, q: Value) -> Value:
    """Keys or values of fewer heads, each repeated for its group of queries (enable_gqa)."""
    if q.type.rank < 4 or t.type.shape[-3] in (1, q.type.shape[-3]):
        return t
    *batch, heads, n, d = t.type.shape
    times = unwrap(const(q.type.shape[-3]) // heads)
    wide = c.b.expand(c.b.unsqueeze(t, axes=(len(batch) + 1,)), shape=(*batch, heads, times, n, d))
    made: Value = c.b.reshape(wide, shape=(*batch, q.type.shape[-3], n, d))
    return made


def attended(c: Call, q: Value, k: Value, v: Value, mask: Value | None, causal: bool, scale: Any) -> Value:
    b, dtype, rank = c.b, q.type.dtype, q.type.rank
    size = q.type.shape[-1]
    if scale is None and not isinstance(size, int):
        raise UnsupportedError("attention over heads of unknown size; give it a scale")
    factor = 1 / math.sqrt(int(size)) if scale is None else float(scale)  # type: ignore[arg-type]
    perm = (*range(rank - 2), rank - 1, rank - 2)
    k = matched(c, k, q)
    v = matched(c, v, q)
    scores = b.mul(b.matmul(q, b.transpose(k, perm=perm)), c.scalar(factor, dtype))
    hidden = None
    if causal:
        scores = b.add(scores, later(c, scores.type.shape[-2], scores.type.shape[-1], dtype))
    if mask is not None:
        added = lowered(c, mask, dtype)
        scores = b.add(scores, added)
        hidden = b.equal(b.reduce_max(added, axes=(-1,), keepdims=True), c.scalar(-math.inf, dtype))
    y: Value = b.matmul(b.softmax(scores, axis=-1), v)
    return y if hidden is None else b.where(hidden, c.scalar(0.0, dtype), y)  # rows without any key are 0


def matched(c: Call, t: Value, q: Value) -> Value:
    """Keys or values with the batch of the queries."""
    batch = q.type.shape[:-2]
    if t.type.shape[:-2] == batch or t.type.rank != q.type.rank:
        return t
    made: Value = c.b.expand(t, shape=(*batch, *t.type.shape[-2:]))
    return made


def later(c: Call, rows: Dim, columns: Dim, dtype: Any) -> Value:
    """What hides keys that come after the query: -inf there, else 0."""
    i, j = c.b.iota(shape=(rows, 1), axis=0, dtype=i64), c.b.iota(shape=(1, columns), axis=1, dtype=i64)
    made: Value = c.b.where(c.b.less_equal(j, i), c.scalar(0.0, dtype), c.scalar(-math.inf, dtype))
    return made


def lowered(c: Call, mask: Value, dtype: Any) -> Value:
    """What a mask adds to scores: a boolean one is true where a key counts."""
    if mask.type.dtype is not boolean:
        return c.cast(mask, dtype)
    made: Value = c.b.where(mask, c.scalar(0.0, dtype), c.scalar(-math.inf, dtype))
    return made


# --- the fused layers of nn.MultiheadAttention and nn.TransformerEncoderLayer -----------------------------------------


def dense(c: Call, x: Value, w: Value, bias: Value | None) -> Value:
    y: Value = c.b.matmul(x, c.b.transpose(w, perm=(1, 0)))
    return y if bias is None else c.b.add(y, bias)


def self_attention(
    c: Call, xs: tuple[Value, Value, Value], heads: int, names: tuple[str, str, str, str], mask: Value | None
) -> tuple[Value, Value]:
    """Projections, attention by heads, and the projection of the result; also the weights, the mean over heads."""
    w, bias, out, out_bias = (c.opt(n) for n in names)
    assert w is not None and out is not None
    width = unwrap(const(w.type.shape[0]) // 3)
    made = []
    for k, x in enumerate(xs):
        y = dense(c, x, part(c, w, 0, width * k, width), None if bias is None else part(c, bias, 0, width * k, width))
        batch, n, _ = y.type.shape
        made.append(c.b.transpose(c.b.reshape(y, shape=(batch, n, heads, width // heads)), perm=(0, 2, 1, 3)))
    q, k_, v = made
    scores = c.b.mul(
        c.b.matmul(q, c.b.transpose(k_, perm=(0, 1, 3, 2))), c.scalar(1 / math.sqrt(width // heads), q.type.dtype)
    )
    if mask is not None:
        scores = c.b.add(scores, mask)
    weights = c.b.softmax(scores, axis=-1)
    y = c.b.transpose(c.b.matmul(weights, v), perm=(0, 2, 1, 3))
    y = c.b.reshape(y, shape=(*y.type.shape[:2], width))
    return dense(c, y, out, out_bias), weights


def hiding(c: Call, x: Value) -> Value | None:
    """The mask of a fused layer, true where a key is hidden: 0 is [queries, keys], 1 [batch, keys], 2 the whole."""
    mask = c.opt("mask")
    if mask is None:
        return None
    kind, dtype = c.get("mask_type", 2), x.type.dtype
    if mask.type.dtype is not boolean:
        made: Value = c.cast(mask, dtype)
    else:
        made = c.b.where(mask, c.scalar(-math.inf, dtype), c.scalar(0.0, dtype))
    shape = made.type.shape
    if kind == 1:
        return c.b.reshape(made, shape=(shape[0], 1, 1, shape[1]))  # type: ignore[no-any-return]
    return c.b.reshape(made, shape=(1, 1, *shape)) if len(shape) == 2 else made


def multi_head(c: Call) -> Any:
    """aten._native_multi_head_attention"""
    q = c.x("query")
    names = ("qkv_weight", "qkv_bias", "proj_weight", "proj_bias")
    y, weights = self_attention(c, (q, c.x("key"), c.x("value")), c.integer("num_head"), names, hiding(c, q))
    if c.wants(1) and c.get("average_attn_weights", True):
        weights = c.b.reduce_mean(weights, axes=(1,))
    return y, weights


def encoder_layer(c: Call) -> Any:
    """aten._transformer_encoder_layer_fwd"""
    x, heads, eps = c.x("src"), c.integer("num_heads"), float(c.number("eps"))
    first = c.flag("norm_first")

    def norm(v: Value, k: int) -> Any:
        return c.b.layer_norm(v, c.x(f"norm_weight_{k}"), c.x(f"norm_bias_{k}"), axis=v.type.rank - 1, epsilon=eps)

    inner = norm(x, 1) if first else x
    names = ("qkv_weight", "qkv_bias", "proj_weight", "proj_bias")
    x = c.b.add(x, self_attention(c, (inner, inner, inner), heads, names, hiding(c, x))[0])
    x = x if first else norm(x, 1)
    inner = norm(x, 2) if first else x
    h = dense(c, inner, c.x("ffn_weight_1"), c.opt("ffn_bias_1"))
    h = c.b.gelu(h) if c.flag("use_gelu") else c.b.relu(h)
    x = c.b.add(x, dense(c, h, c.x("ffn_weight_2"), c.opt("ffn_bias_2")))
    return x if first else norm(x, 2)


SDPA = (
    "flash_attention flash_attention_for_cpu efficient_attention cudnn_attention fused_attention_overrideable".split()
)
LINEAR: dict[str, Converter] = {
    "mm": mm,
    "bmm": bmm,
    "mv": matmul,
    "dot": matmul,
    "matmul": matmul,
    "addmm": addmm,
    "baddbmm": addmm,
    "addmv": addmm,
    "linear": linear,
    "_trilinear": trilinear,
    "scaled_dot_product_attention": attention,
    **{f"_scaled_dot_product_{n}": attention for n in SDPA},
    "_native_multi_head_attention": multi_head,
    "_transformer_encoder_layer_fwd": encoder_layer,
}
