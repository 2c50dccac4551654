"""Converters of attention as com.microsoft has it: fused projections, caches of keys and values, rotary embeddings.

Everything becomes softmax(scale * q k^T + bias) v on [batch, heads, steps, size]. Their masks do not remove a key, they
lower its score by `mask_filter_value`; only the causal mask and the ends of sequences in a cache remove keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dnnc.frontends.onnx.call import Call, number
from dnnc.ir.bounds import bounds
from dnnc.ir.dtype import DType, f32, f64, i64
from dnnc.ir.errors import ModelError, UnsupportedError
from dnnc.ir.expr import const, maximum, unwrap
from dnnc.ir.graph import Value
from dnnc.ir.types import Dim

Converter = Callable[[Call], Any]
REMOVED = -3.4028234663852886e38  # the score of a key that is not to be seen: the lowest f32


# --- pieces -----------------------------------------------------------------------------------------------------------


def _wide(dtype: DType) -> DType:
    return f64 if dtype is f64 else f32


def _heads(c: Call, x: Value, heads: int) -> Any:
    """[batch, steps, heads * size] as [batch, heads, steps, size]."""
    batch, steps, width = x.type.shape
    size = number(width, "the hidden size") // heads
    if size * heads != width:
        raise ModelError(f"{width} columns of {x.type} do not divide into {heads} heads")
    return c.b.transpose(c.b.reshape(x, shape=(batch, steps, heads, size)), perm=(0, 2, 1, 3))


def _merged(c: Call, y: Value) -> Any:
    """The reverse of `_heads`."""
    batch, heads, steps, size = y.type.shape
    return c.b.reshape(c.b.transpose(y, perm=(0, 2, 1, 3)), shape=(batch, steps, unwrap(const(heads) * size)))


def _cut(c: Call, x: Value, axis: int, start: int, size: Dim) -> Any:
    shape: list[Dim] = list(x.type.shape)
    starts = [0] * len(shape)
    starts[axis], shape[axis] = start, size
    return c.b.slice(x, starts=tuple(starts), steps=(1,) * len(shape), shape=tuple(shape))


def _pick(c: Call, x: Value, axis: int, k: int) -> Any:
    """x[..., k, ...] with the axis gone."""
    return c.b.squeeze(_cut(c, x, axis, k, 1), axes=(axis,))


def _count(c: Call, n: Dim, axis: int, rank: int) -> Any:
    """0, 1, ..., n - 1 along one axis of `rank`."""
    return c.b.iota(shape=tuple(n if k == axis else 1 for k in range(rank)), axis=axis, dtype=i64)


def _weighed(c: Call, q: Value, k: Value, v: Value, scores: Callable[[Value], Any], scale: float) -> Any:
    """softmax(scores(scale * q k^T)) v, computed in f32 at least."""
    b, dtype = c.b, q.type.dtype
    wide = _wide(dtype)
    s = b.matmul(c.cast(q, wide), b.transpose(c.cast(k, wide), perm=(0, 1, 3, 2)))
    p = scores(b.mul(s, scale))
    return c.cast(b.matmul(p, c.cast(v, wide)), dtype)


def _scale(c: Call, size: Dim) -> float:
    given = c.number("scale", 0.0)
    return given or 1.0 / math.sqrt(number(size, "the size of a head"))


def _causal(c: Call, s: Value, past: Dim) -> Any:
    """Scores without those of keys that come after the query, which is at `past` + its row."""
    rows, columns = s.type.shape[-2:]
    later = c.b.greater(_count(c, columns, 3, 4), c.b.add(_count(c, rows, 2, 4), _whole(c, past)))
    return c.b.where(later, c.const(REMOVED, s.type.dtype), s)


def _whole(c: Call, d: Dim) -> Any:
    return c.const(d, i64) if isinstance(d, int) else c.b.full(shape=(), value=d, dtype=i64)


def _lowered(c: Call, mask: Value, columns: Dim, rows: Dim, past: Dim, dtype: DType) -> Any:
    """What a mask adds to the scores [batch, heads, rows, columns]. Its rank tells what it says:

    [batch]: how many keys count; [2 * batch]: where they end, then where they begin; [batch, keys], [batch, rows,
    keys]: not 0 where they count; [batch, 1, most, most]: the same for all places.
    """
    b = c.b
    rank = mask.type.rank
    if rank == 1:
        keep = _counted(c, mask, columns)
    elif rank == 4:
        cut = b.slice(mask, starts=(0, 0, past, 0), steps=(1, 1, 1, 1), shape=(mask.type.shape[0], 1, rows, columns))
        keep = c.cast(cut, dtype)
    else:
        keep = c.cast(b.unsqueeze(mask, axes=(1, 2) if rank == 2 else (1,)), dtype)
    keep = c.cast(keep, dtype)
    return b.mul(b.sub(c.const(1.0, dtype), keep), c.number("mask_filter_value", -10000.0))


def _counted(c: Call, mask: Value, columns: Dim) -> Any:
    b, place = c.b, _count(c, columns, 3, 4)
    batch = c.type_of(0).shape[0]
    total = mask.type.shape[0]
    ends = c.cast(mask, i64)
    if total is batch or total == batch:
        return b.less(place, b.reshape(ends, shape=(batch, 1, 1, 1)))
    if unwrap(const(batch) * 2) != total:
        raise UnsupportedError(
            f"a mask {mask.type} for {batch} rows; known are one or two numbers per row, and masks of keys"
        )
    end, start = (b.reshape(_cut(c, ends, 0, k, batch), shape=(batch, 1, 1, 1)) for k in (0, batch))  # type: ignore[arg-type]
    return b.logical_and(b.less(place, end), b.greater_equal(place, start))


# --- Attention, MultiHeadAttention ------------------------------------------------------------------------------------


def _masked(c: Call, s: Value, mask: Value | None, bias: Value | None, past: Dim, causal: bool) -> Any:
    rows, columns = s.type.shape[-2:]
    if mask is not None:
        s = c.b.add(s, _lowered(c, mask, columns, rows, past, s.type.dtype))
    if causal:
        s = _causal(c, s, past)
    return s if bias is None else c.b.add(s, c.cast(bias, s.type.dtype))


def attention(c: Call) -> Any:
    """Inputs: x, weights of q, k, v side by side, their bias, mask, past keys and values [2, ...], score bias."""
    b, heads = c.b, c.integer("num_heads")
    if c.flag("past_present_share_buffer") or c.flag("do_rotary"):
        raise UnsupportedError("Attention with past_present_share_buffer or do_rotary; GroupQueryAttention has both")
    y = b.matmul(c.x(0), c.x(1))
    y = b.add(y, c.x(2)) if c.has(2) else y
    width = number(y.type.shape[-1], "the width of the projection")
    sizes = c.integers("qkv_hidden_sizes") or (width // 3,) * 3
    if sum(sizes) != width or len(sizes) != 3:
        raise ModelError(f"qkv_hidden_sizes {list(sizes)} do not add up to the {width} columns of the weights")
    q, k, v = (_heads(c, _cut(c, y, 2, sum(sizes[:i]), n), heads) for i, n in enumerate(sizes))
    past: Dim = 0
    if c.has(4):
        old = c.x(4)
        past = old.type.shape[3]
        k, v = (b.concat(_pick(c, old, 0, i), new, axis=2) for i, new in enumerate((k, v)))
    mask, bias = c.opt(3), c.opt(5)
    done = _weighed(
        c,
        q,
        k,
        v,
        lambda s: b.softmax(_masked(c, s, mask, bias, past, c.flag("unidirectional")), axis=-1),
        _scale(c, q.type.shape[3]),
    )
    if not c.wants(1):
        return _merged(c, done)
    return _merged(c, done), b.concat(b.unsqueeze(k, axes=(0,)), b.unsqueeze(v, axes=(0,)), axis=0)


def multi_head_attention(c: Call) -> Any:
    """Inputs: q, k, v (or packed), bias of the projection, a mask of keys, a bias of scores, past keys, past values."""
    b, heads = c.b, c.integer("num_heads")
    if c.has(8) or c.has(9):
        raise UnsupportedError("MultiHeadAttention with a shared buffer of keys or with cache_indirection")
    q, k, v = _projected(c, heads)
    past: Dim = 0
    if c.has(6):
        past = c.type_of(6).shape[2]
        k, v = b.concat(c.x(6), k, axis=2), b.concat(c.x(7), v, axis=2)
    mask, bias, shown = c.opt(4), c.opt(5), []

    def scores(s: Value) -> Any:
        shown.append(b.softmax(_masked(c, s, mask, bias, past, c.flag("unidirectional")), axis=-1))
        return shown[-1]

    done = _weighed(c, q, k, v, scores, _scale(c, q.type.shape[3]))
    return _merged(c, done), k, v, c.cast(shown[0], q.type.dtype)


def _projected(c: Call, heads: int) -> tuple[Value, Value, Value]:
    """q, k and v [batch, heads, steps, size], with their parts of the bias added."""
    x = c.x(0)
    if x.type.rank == 5:
        parts = [_pick(c, x, 3, i) for i in range(3)]
    elif c.has(1) and c.type_of(1).rank == 5:
        parts = [_split_heads(c, x, heads), *(_pick(c, c.x(1), 3, i) for i in range(2))]
    elif c.has(1) and c.has(2):
        parts = [v if v.type.rank == 4 else _split_heads(c, v, heads) for v in (x, c.x(1), c.x(2))]
    else:
        raise ModelError(
            "keys and values must be given, or be packed with the queries as [batch, steps, heads, 3, size]"
        )
    ready = [c.has(i) and c.type_of(i).rank == 4 for i in range(3)]
    if c.has(3):
        bias, at = c.x(3), 0
        for i, v in enumerate(parts):
            size = number(v.type.shape[1 if ready[i] else 2], "the number of heads") * number(
                v.type.shape[3], "the size of a head"
            )
            part = c.b.reshape(_cut(c, bias, 0, at, size), shape=(heads, size // heads))
            parts[i] = c.b.add(v, c.b.unsqueeze(part, axes=(1,)) if ready[i] else part)
            at += size
    q, k, v = (p if r else c.b.transpose(p, perm=(0, 2, 1, 3)) for p, r in zip(parts, ready))
    return q, k, v


def _split_heads(c: Call, x: Value, heads: int) -> Any:
    """[batch, steps, heads * size] as [batch, steps, heads, size]."""
    batch, steps, width = x.type.shape
    return c.b.reshape(x, shape=(batch, steps, heads, number(width, "the hidden size") // heads))


# --- rotary embeddings ------------------------------------------------------------------------------------------------


def _rotated(c: Call, x: Value, places: Value, cos: Value, sin: Value, interleaved: bool) -> Any:
    """x [batch, heads, steps, size] with pairs of elements turned by the angles of their places [batch or 1, steps].

    A pair are elements i and i + half, or 2 i and 2 i + 1 if interleaved; what the caches do not cover stays.
    """
    b = c.b
    half, size = number(cos.type.shape[1], "the width of the cache"), number(x.type.shape[3], "the size of a head")
    turned, kept = (
        (x, None) if 2 * half == size else (_cut(c, x, 3, 0, 2 * half), _cut(c, x, 3, 2 * half, size - 2 * half))
    )
    co, si = (b.unsqueeze(b.gather(t, places, axis=0), axes=(1,)) for t in (cos, sin))
    if interleaved:
        pairs = b.reshape(turned, shape=(*x.type.shape[:3], half, 2))
        first, second = (_pick(c, pairs, 4, i) for i in (0, 1))
    else:
        first, second = (_cut(c, turned, 3, k, half) for k in (0, half))
    new = b.sub(b.mul(first, co), b.mul(second, si)), b.add(b.mul(first, si), b.mul(second, co))
    if interleaved:
        y = b.reshape(b.concat(*(b.unsqueeze(v, axes=(4,)) for v in new), axis=4), shape=(*x.type.shape[:3], 2 * half))
    else:
        y = b.concat(*new, axis=3)
    return y if kept is None else b.concat(y, kept, axis=3)


def rotary_embedding(c: Call) -> Any:
    """x is [batch, heads, steps, size] or [batch, steps, heads * size]; one position is that of the first step."""
    b, x, places = c.b, c.x(0), c.cast(c.x(1), i64)
    if c.flag("is_packed_batching"):
        raise UnsupportedError("RotaryEmbedding with is_packed_batching")
    flat = x.type.rank == 3
    steps = x.type.shape[1 if flat else 2]
    if places.type.rank == 1:
        places = b.unsqueeze(b.add(b.iota(shape=(steps,), axis=0, dtype=i64), places), axes=(0,))
    heads = c.integer("num_heads")
    if flat and not heads:
        heads = number(x.type.shape[2], "the hidden size") // (
            2 * number(c.type_of(2).shape[1], "the width of the cache")
        )
    y = _rotated(c, _heads(c, x, heads) if flat else x, places, c.x(2), c.x(3), c.flag("interleaved"))
    y = y if c.number("scale", 1.0) in (0.0, 1.0) else b.mul(y, c.number("scale", 1.0))
    return _merged(c, y) if flat else y


# --- GroupQueryAttention ----------------------------------------------------------------------------------------------


def group_query_attention(c: Call) -> Any:
    """Inputs: q (or q, k, v packed), k, v, past keys and values, ends of the sequences, the longest one, cos and sin
    caches, positions, score bias, sinks, two scales of a quantized cache (not known), weights that normalize q and k.

    Row r of the batch has `ends[r] + 1 - steps` keys in the cache (none if negative: a first prompt, right-padded).
    """
    b, heads, kv = c.b, c.integer("num_heads"), c.integer("kv_num_heads")
    _refuse(c)
    q, k, v = _grouped(c, heads, kv)
    batch, _, steps, size = q.type.shape
    if c.has(14):
        q, k = (
            b.rms_norm(x, c.x(14 + i), axis=-1, epsilon=c.number("qk_norm_epsilon", 1e-6)) for i, x in enumerate((q, k))
        )
    ends = b.add(c.cast(b.reshape(c.x(5), shape=(batch,)), i64), 1)
    past = b.max(b.sub(ends, _whole(c, steps)), c.const(0, i64))
    if c.flag("do_rotary"):
        places = (
            c.cast(c.x(9), i64)
            if c.has(9)
            else b.add(b.unsqueeze(past, axes=(1,)), b.iota(shape=(1, steps), axis=1, dtype=i64))
        )
        q, k = (_rotated(c, x, places, c.x(7), c.x(8), c.flag("rotary_interleaved")) for x in (q, k))
    if c.has(3):
        total = c.dims(6, "the total sequence length")[0]
        k, v = (_appended(c, c.x(3 + i), new, past, total) for i, new in enumerate((k, v)))
    keys, values = (_repeated(c, x, heads // kv) for x in (k, v))
    done = _weighed(c, q, keys, values, lambda s: _windowed(c, s, past), _scale(c, size))
    return _merged(c, done), k, v


def _refuse(c: Call) -> None:
    for name, usual in (("sliding_window_cache", 0), ("qk_output", 0), ("kv_cache_bit_width", 0)):
        if c.integer(name, usual) != usual:
            raise UnsupportedError(f"GroupQueryAttention with {name}={c.integer(name)}")
    if c.has(12) or c.has(13):
        raise UnsupportedError("GroupQueryAttention with a quantized cache")


def _grouped(c: Call, heads: int, kv: int) -> tuple[Value, Value, Value]:
    x = c.x(0)
    if c.has(1):
        return _heads(c, x, heads), _heads(c, c.x(1), kv), _heads(c, c.x(2), kv)
    size = number(x.type.shape[2], "the width of the packed queries") // (heads + 2 * kv)
    q, k, v = ((0, heads), (heads, kv), (heads + kv, kv))
    return tuple(_heads(c, _cut(c, x, 2, at * size, n * size), n) for at, n in (q, k, v))


def _appended(c: Call, old: Value, new: Value, past: Value, total: Dim) -> Any:
    """Append new keys or values behind the first `past` old ones; result is as long as the cache, or all of them."""
    b = c.b
    batch, _, room, _ = old.type.shape
    steps = new.type.shape[2]
    length = unwrap(maximum(const(room), const(total)))
    both = b.transpose(b.concat(old, new, axis=2), perm=(0, 2, 1, 3))
    place, start = b.iota(shape=(1, length), axis=1, dtype=i64), b.unsqueeze(past, axes=(1,))
    fresh = b.add(b.sub(place, start), _whole(c, room))
    is_new = b.logical_and(b.greater_equal(place, start), b.less(place, b.add(start, _whole(c, steps))))
    last = b.sub(b.add(_whole(c, room), _whole(c, steps)), 1)
    index = b.min(b.where(is_new, fresh, place), last)
    index = b.expand(b.unsqueeze(index, axes=(2,)), shape=(batch, length, 1))
    return b.transpose(b.gather_nd(both, index, batch_dims=1), perm=(0, 2, 1, 3))


def _repeated(c: Call, x: Value, times: int) -> Any:
    """Each head `times` in a row."""
    if times == 1:
        return x
    batch, kv, steps, size = x.type.shape
    wide = c.b.expand(c.b.unsqueeze(x, axes=(2,)), shape=(batch, kv, times, steps, size))
    return c.b.reshape(wide, shape=(batch, unwrap(const(kv) * times), steps, size))


def _windowed(c: Call, s: Value, past: Value) -> Any:
    """Probabilities of scores: soft cap, bias, causal mask, window, and a sink that takes its share."""
    b, dtype = c.b, s.type.dtype
    rows, columns = s.type.shape[-2:]
    cap = c.number("softcap", 0.0)
    s = s if cap == 0.0 else b.mul(b.tanh(b.div(s, cap)), cap)
    if c.has(10):
        s = b.add(s, c.cast(_wide_enough(c, c.x(10), columns), dtype))
    place = _count(c, columns, 3, 4)
    own = b.add(_count(c, rows, 2, 4), b.reshape(past, shape=(past.type.shape[0], 1, 1, 1)))
    ends = b.add(b.reshape(past, shape=(past.type.shape[0], 1, 1, 1)), _whole(c, rows))
    hidden = b.greater(place, own) if c.flag("causal", True) else b.greater_equal(place, ends)
    window = c.integer("local_window_size", -1)
    if window >= 0:
        hidden = b.logical_or(hidden, b.less_equal(place, b.sub(own, window)))
    s = b.where(hidden, c.const(REMOVED, dtype), s)
    if not (c.has(11) or c.flag("smooth_softmax")):
        return b.softmax(s, axis=-1)
    sink = (
        c.cast(b.reshape(c.x(11), shape=(1, s.type.shape[1], 1, 1)), dtype)
        if c.has(11)
        else b.full(shape=(1, 1, 1, 1), value=0.0, dtype=dtype)
    )
    with_sink = b.concat(s, b.expand(sink, shape=(*s.type.shape[:3], 1)), axis=3)
    return _cut(c, b.softmax(with_sink, axis=-1), 3, 0, columns)


def _wide_enough(c: Call, bias: Value, columns: Dim) -> Any:
    """A bias of the sequence's length for a cache that is longer."""
    have = bias.type.shape[3]
    if have is columns or have == columns or bounds(const(columns) - have) == (0, 0):
        return bias
    return c.b.pad(bias, pads=(0, 0, 0, 0, 0, 0, 0, unwrap(const(columns) - have)))


# operator -> (its converter, the attributes that it knows)
ATTENTION: dict[str, tuple[Converter, str]] = {
    "Attention": (
        attention,
        "do_rotary mask_filter_value num_heads past_present_share_buffer qkv_hidden_sizes rotary_embedding_dim scale "
        "unidirectional",
    ),
    "GroupQueryAttention": (
        group_query_attention,
        "causal do_rotary k_quant_type kv_cache_bit_width kv_num_heads local_window_size num_heads qk_norm_epsilon "
        "qk_output rotary_interleaved scale sliding_window_cache smooth_softmax softcap v_quant_type",
    ),
    "MultiHeadAttention": (multi_head_attention, "mask_filter_value num_heads scale unidirectional"),
    "RotaryEmbedding": (rotary_embedding, "interleaved is_packed_batching num_heads rotary_embedding_dim scale"),
}
