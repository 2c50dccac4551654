"""Random numbers: pure functions of a key that is drawn for each call of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dnnc.frontends.torch.call import Call, wide
from dnnc.ir.dtype import f64, i64
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.graph import Value
from dnnc.ir.types import Dim

Converter = Callable[[Call], Any]


def uniform(c: Call, shape: tuple[Dim, ...], dtype: Any) -> Value:
    """Numbers in [0, 1)."""
    made: Value = c.b.random_uniform(c.key(), shape=shape, dtype=dtype)
    return made


def rand(c: Call) -> Any:
    """Half types are rounded down: 1 is never drawn."""
    if c.dtype is wide(c.dtype):
        return uniform(c, c.shape, c.dtype)
    steps = c.scalar(2.0 ** (8 if c.dtype.name == "bf16" else 11), wide(c.dtype))
    u = uniform(c, c.shape, wide(c.dtype))
    return c.cast(c.b.div(c.b.floor(c.b.mul(u, steps)), steps), c.dtype)


def randn(c: Call) -> Any:
    return c.cast(c.b.random_normal(c.key(), shape=c.shape, dtype=wide(c.dtype)), c.dtype)


def randint(c: Call) -> Any:
    """Whole numbers from low up to high, by a float64: ranges beyond 2^40 would not be even."""
    low, high = c.get("low", 0), c.args["high"]
    if not isinstance(low, int) or not isinstance(high, int) or high - low > 1 << 40:
        raise UnsupportedError("random whole numbers between bounds that are not known, or more than 2^40 apart")
    u = c.b.mul(uniform(c, c.shape, f64), c.scalar(float(high - low), f64))
    return c.cast(c.b.add(c.cast(c.b.floor(u), i64), c.scalar(low, i64)), c.dtype)


def bernoulli(c: Call) -> Any:
    """1 with a probability, of all elements or of each: bernoulli, bernoulli.p"""
    x, p = c.x(), c.args.get("p")
    dtype = wide(x.type.dtype) if x.type.dtype.is_float else f64
    chance = c.cast(x, dtype) if p is None else c.cast(p, dtype) if isinstance(p, Value) else c.scalar(p, dtype)
    return c.cast(c.b.less(uniform(c, c.shape, dtype), chance), c.dtype)


def native_dropout(c: Call) -> Any:
    """x / (1 - p) where a number drawn is at least p, else 0; and where that is."""
    x, p = c.x("input"), c.number("p", 0.5)
    if c.get("train", True) is False or not p:
        return c.b.identity(x), c.b.equal(x, x) if c.wants(1) else None
    dtype = wide(x.type.dtype)
    kept = c.b.greater_equal(uniform(c, x.type.shape, dtype), c.scalar(float(p), dtype))
    scale = c.scalar(0.0 if p == 1 else 1 / (1 - p), x.type.dtype)
    return c.b.mul(x, c.b.mul(c.cast(kept, x.type.dtype), scale)), kept


RANDOM: dict[str, Converter] = {
    "rand": rand,
    "rand_like": rand,
    "randn": randn,
    "randn_like": randn,
    "randint": randint,
    "randint_like": randint,
    "bernoulli": bernoulli,
    "native_dropout": native_dropout,
}
