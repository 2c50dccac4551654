"""Converters of operators that draw random numbers.

A draw is a pure function of a key that is fixed when the model is compiled: `Philox 4x32-10` (`dnnc.ir.ops.random`). So
a compiled model gives the same numbers at each call, on each machine and with any number of threads. The key's first
word holds the bits of the attribute `seed` (of a float, as f32) where the node has one. Its second word is 0 then, so
that equal seeds give equal draws; without a seed it is a checksum of the node's place in the model, so that no two
nodes draw the same numbers. Whoever wants other numbers at each call makes them an input of the model.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from dnnc.frontends.onnx.call import Call, number, of_array
from dnnc.ir.dtype import DType, boolean, f32, f64, i32, i64
from dnnc.ir.graph import Value
from dnnc.ir.types import Dim

Converter = Callable[[Call], Any]
Shape = tuple[Dim, ...]


def key(c: Call) -> Any:
    """The key of a node's draw: u32[2]."""
    seed = c.attrs.get("seed")
    if seed is not None:
        bits = int(np.float32(seed).view(np.uint32)) if isinstance(seed, float) else int(seed) & 0xFFFFFFFF
        return c.b.constant(np.array([bits, 0], np.uint32))
    before = sum(n.op.name in ("random_bits", "random_uniform", "random_normal") for n in c.b.graph.nodes())
    place = zlib.crc32(f"{before} {' '.join(map(str, c.b.locs))}".encode())
    return c.b.constant(np.array([0, place | 1], np.uint32))


def _float(dtype: DType) -> DType:
    return f64 if dtype is f64 else f32


def _dtype(c: Call, like: DType = f32) -> DType:
    return c.dtype("dtype") if c.integer("dtype", 0) else like


def _uniform(c: Call, shape: Shape, dtype: DType) -> Any:
    low, high = c.number("low", 0.0), c.number("high", 1.0)
    u = c.b.random_uniform(key(c), shape=shape, dtype=_float(dtype))
    return c.cast(c.b.add(c.b.mul(u, high - low), low), dtype)


def _normal(c: Call, shape: Shape, dtype: DType) -> Any:
    y = c.b.random_normal(key(c), shape=shape, dtype=_float(dtype))
    return c.cast(c.b.add(c.b.mul(y, c.number("scale", 1.0)), c.number("mean", 0.0)), dtype)


def random_uniform(c: Call) -> Any:
    return _uniform(c, c.integers("shape") or (), _dtype(c))


def random_normal(c: Call) -> Any:
    return _normal(c, c.integers("shape") or (), _dtype(c))


def _like(c: Call) -> DType:
    own = c.type_of(0).dtype
    return _dtype(c, own if own.is_float else f32)


def random_uniform_like(c: Call) -> Any:
    return _uniform(c, c.item(0).shape, _like(c))


def random_normal_like(c: Call) -> Any:
    return _normal(c, c.item(0).shape, _like(c))


def bernoulli(c: Call) -> Any:
    """1 where a uniform number is below the probability."""
    p = c.x()
    p = p if p.type.dtype in (f32, f64) else c.cast(p, f32)
    u = c.b.random_uniform(key(c), shape=p.type.shape, dtype=p.type.dtype)
    return c.cast(c.b.less(u, p), _dtype(c, c.type_of(0).dtype))


def multinomial(c: Call) -> Any:
    """Sample from log-weights per row: count the cumulated class probabilities that a uniform number reaches."""
    b, x = c.b, c.x()
    x = x if x.type.dtype is f64 else c.cast(x, f32)
    rows, classes = x.type.shape
    total = b.cumsum(b.softmax(x, axis=-1), axis=1)
    u = b.random_uniform(key(c), shape=(rows, c.integer("sample_size", 1), 1), dtype=x.type.dtype)
    reached = c.cast(b.greater_equal(u, b.unsqueeze(total, axes=(1,))), i64)
    last = number(classes, "the number of classes of Multinomial") - 1
    return c.cast(b.clip(b.reduce_sum(reached, axes=(2,), keepdims=False), low=0, high=last), _dtype(c, i32))


def dropout(c: Call) -> Any:
    """Identity and an all-true mask, unless `training_mode`: by NumPy's Mersenne Twister (`seed`), else Philox.

    A model that is read for training (`Call.training`) draws by Philox throughout: who trains replaces the keys.
    """
    training = c.training
    if training is None:
        training = c.has(2) and c.opset >= 12 and bool(c.scalar(2, "training_mode"))
    x = c.item(0)
    ratio = c.item(1) if c.has(1) else None
    if ratio is None:
        known: float | None = c.number("ratio", 0.5)  # an attribute before opset 12
    else:
        known = None if ratio.array is None else float(ratio.array.reshape(-1)[0])
    if training and known is None and "seed" in c.attrs and c.training is None:
        known = float(c.scalar(1, "ratio"))
    if training and known != 0.0:
        return _dropped(c, known)
    if not c.wants(1):
        return x
    dtype = boolean if c.opset >= 10 else x.type.dtype
    return x, c.b.full(shape=x.shape, value=True if dtype is boolean else 1.0, dtype=dtype)


def _dropped(c: Call, ratio: float | None) -> Any:
    x = c.x()
    dtype, shape = x.type.dtype, x.type.shape
    if c.training is None and "seed" in c.attrs and ratio is not None and all(isinstance(d, int) for d in shape):
        mask = np.random.RandomState(c.integer("seed")).uniform(0, 1.0, shape) >= ratio  # type: ignore[arg-type]
        return c.b.mul(x, c.const(mask / (1.0 - ratio), dtype)), of_array(mask)
    wide = _float(dtype)
    rate: Value = c.const(ratio, wide) if ratio is not None else c.cast(c.b.reshape(c.x(1), shape=()), wide)
    kept = c.b.greater_equal(c.b.random_uniform(key(c), shape=shape, dtype=wide), rate)
    scale = c.b.reciprocal(c.b.sub(c.const(1.0, wide), rate))
    y = c.b.where(kept, c.b.mul(c.cast(x, wide), scale), c.const(0.0, wide))
    return c.cast(y, dtype), kept if c.opset >= 10 else c.cast(kept, dtype)


RANDOM: dict[str, Converter] = {
    "Bernoulli": bernoulli,
    "Dropout": dropout,
    "Multinomial": multinomial,
    "RandomNormal": random_normal,
    "RandomNormalLike": random_normal_like,
    "RandomUniform": random_uniform,
    "RandomUniformLike": random_uniform_like,
}
