"""Scaled dot-product attention."""

from __future__ import annotations

import math
from typing import Any

from dnnc.array.core import Array, cast
from dnnc.array.elementwise import add, isinf, less, less_equal, logical_and, multiply, where
from dnnc.array.errors import ValueInputError
from dnnc.array.linalg import matmul
from dnnc.array.manipulation import broadcast_shapes, broadcast_to, expand_dims, matrix_transpose, repeat
from dnnc.array.replay import replayed
from dnnc.array.sizes import differ, symbolic
from dnnc.array.statistical import all as all_of
from dnnc.nn.functional.dropouts import dropout
from dnnc.nn.functional.operands import array, arrays, counted, op


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    dropout_key: Any = None,
) -> Array:
    """softmax(query key^T * scale + mask) value (Vaswani et al., 2017, section 3.2.1).

    Args:
        query, key, value: [..., L, E], [..., S, E], [..., S, V]; axes in front broadcast.
        attn_mask: broadcasts to [..., L, S]: truth values that hold where a key is seen, or numbers to be added to the
            scores. A row that sees no key is 0.
        dropout_p: probability of dropping a weight, whether a module is in training or not.
        is_causal: query i sees keys 0 to i. Not beside `attn_mask`.
        scale: 1 / sqrt(E) by default.
        enable_gqa: each head (axis -3) of key and value serves several heads of the query.
        dropout_key: the key of the dropout's draw.

    Raises:
        InputError: dtypes or shapes do not fit, or there are a mask and `is_causal`.
    """
    if not dropout_p:
        return _attended(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    q, k, v, mask, factor = _operands(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    scores = multiply(matmul(q, matrix_transpose(k)), factor)
    if mask is None:
        return matmul(dropout(op("softmax", scores, axis=scores.ndim - 1), dropout_p, key=dropout_key), v)
    scores = add(scores, mask)
    hidden = all_of(logical_and(isinf(scores), less(scores, 0.0)), axis=-1, keepdims=True)
    weights = op("softmax", where(hidden, 0.0, scores), axis=scores.ndim - 1)  # no NaN, of gradients neither
    return matmul(dropout(where(hidden, 0.0, weights), dropout_p, key=dropout_key), v)


@replayed
def _attended(
    query: Any, key: Any, value: Any, attn_mask: Any, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Array:
    """Attention without dropout."""
    q, k, v, mask, factor = _operands(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    given = (q, k, v) if mask is None else (q, k, v, mask)
    return op("attention", *given, scale=factor, masked_rows="nan" if mask is None else "zero")


def _operands(
    query: Any, key: Any, value: Any, attn_mask: Any, is_causal: bool, scale: float | None, enable_gqa: bool
) -> tuple[Array, Array, Array, Array | None, float]:
    """Queries, keys and values with the same axes in front, what is added to the scores, and the scale."""
    what = "scaled_dot_product_attention"
    q, k, v = arrays(what, query=query, key=key, value=value)
    if min(q.ndim, k.ndim, v.ndim) < 2 or differ(q.shape[-1], k.shape[-1]) or differ(k.shape[-2], v.shape[-2]):
        raise ValueInputError(
            f"{what}: expected [..., L, E], [..., S, E] and [..., S, V], got {q.shape}, {k.shape} and {v.shape}"
        )
    if enable_gqa:
        k, v = (_repeated(what, q, x) for x in (k, v))
    batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k, v = (broadcast_to(x, (*batch, *x.shape[-2:])) for x in (q, k, v))
    mask = _mask(what, q, k, attn_mask, is_causal)
    return q, k, v, mask, float(1 / math.sqrt(q.shape[-1]) if scale is None else scale)


def _repeated(what: str, q: Array, x: Array) -> Array:
    """Heads of keys or values, each as often as queries share it."""
    if q.ndim < 3 or x.ndim < 3 or symbolic(q.shape[-3], x.shape[-3]) or q.shape[-3] % x.shape[-3]:
        raise ValueInputError(f"{what}: heads of {x.shape} do not divide those of the query {q.shape}")
    times = q.shape[-3] // x.shape[-3]
    return x if times == 1 else repeat(x, times, axis=-3)


def _mask(what: str, q: Array, k: Array, given: Any, is_causal: bool) -> Array | None:
    """What is added to the scores, or None."""
    if is_causal:
        if given is not None:
            raise ValueInputError(f"{what}: give either attn_mask or is_causal=True")
        return causal_mask(q.shape[-2], k.shape[-2], q.dtype)
    if given is None:
        return None
    mask = array(what, "attn_mask", given, "fb")
    return cast(where(mask, 0.0, -math.inf), q.dtype) if mask.dtype.kind == "b" else cast(mask, q.dtype)


def hidden_scores(what: str, name: str, given: Any, dtype: Any) -> Array:
    """What a mask adds to scores: -inf where truth values say that a key is hidden, else its numbers."""
    mask = array(what, name, given, "fb")
    return cast(where(mask, -math.inf, 0.0), dtype) if mask.dtype.kind == "b" else cast(mask, dtype)


def causal_mask(rows: Any, columns: Any, dtype: Any) -> Array:
    """0 where column <= row, -inf elsewhere."""
    seen = less_equal(expand_dims(counted(columns), axis=0), expand_dims(counted(rows), axis=1))
    return cast(where(seen, 0.0, -math.inf), dtype)
