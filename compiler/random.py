"""`dnnc.random`: random numbers as pure functions of a key, in the manner of JAX; and a generator with state.

    key = dnnc.random.key(0)
    a, b = dnnc.random.split(key)
    x = dnnc.random.normal(a, (3, 4))

A key is an array uint32[2] of Philox 4x32-10 (`dnnc.ir.ops.random`), an operand of programs like any other: the same
key gives the same bits on all targets, with any number of threads. Numbers that need a logarithm or a cosine (`normal`,
`gumbel`, `exponential`, `truncated_normal`) are equal to the rounding of these functions.

With `key=None` outside of traces, the key comes from the default generator, which `seed` sets. A traced function has no
such state: there, a draw needs a key, or a stream of keys around it (`rngs=` of `dnnc.nn.functional_call`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from dnnc.array.bits import bitwise_left_shift, bitwise_or, bitwise_right_shift, bitwise_xor
from dnnc.array.core import Array, array_of, cast, from_buffer, scalar
from dnnc.array.creation import Shape, asarray, shape_of
from dnnc.array.elementwise import (
    abs as absolute,
)
from dnnc.array.elementwise import (
    add,
    divide,
    erf,
    exp,
    less,
    log,
    log1p,
    maximum,
    minimum,
    multiply,
    negative,
    remainder,
    sqrt,
    subtract,
    where,
)
from dnnc.array.lazy import apply
from dnnc.array.manipulation import axis_of, broadcast_shapes, stack, take
from dnnc.array.promotion import DType, dtype_of, kind_of
from dnnc.array.replay import replayed
from dnnc.array.searching import argmax, argsort
from dnnc.array.sizes import Size, is_size, plain
from dnnc.frontends.trace.tracer import KEYS, tracing
from dnnc.ir.dtype import f32, f64
from dnnc.ir.errors import InputError, a_type
from dnnc.ir.ops.random import MASK, philox

U32, U64, I64 = np.dtype(np.uint32), np.dtype(np.uint64), np.dtype(np.int64)
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
SPLIT, FOLD = (0x5851F42D, 0x4C957F2D), (0x14057B7E, 0xF767814F)  # keep derived keys apart from drawn numbers
AHEAD = 256  # keys that the default generator makes at once
SEEDED = 0x44454553  # the third counter word of the default generator's blocks; that of drawn numbers is 0


# --- keys -------------------------------------------------------------------------------------------------------------


def key(seed: int) -> Array:
    """The key of a seed: uint32[2], the low and the high word of its 64 bits. InputError: not an integer."""
    return from_buffer(_words(seed), None)


def _words(seed: Any) -> np.ndarray[Any, Any]:
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise InputError(f"seed={seed!r}: expected an integer, got {a_type(seed)}")
    n = seed.__index__()
    return np.array([n & MASK, n >> 32 & MASK], U32)


def split(key: Array, num: int = 2) -> Array:
    """`num` new keys, uint32[num, 2], one for each independent use. The old key is not to be used again."""
    return array_of(apply("random_bits", _tweaked(checked(key), SPLIT)._parts[0], shape=(plain(num), 2)))


def fold_in(key: Array, data: Any) -> Array:
    """A new key of a key and an integer, as of a step's number; `data` may be a traced array."""
    base = array_of(apply("random_bits", _tweaked(checked(key), FOLD)._parts[0], shape=(2,)))
    if not isinstance(data, Array) and np.ndim(data) == 0:
        number = from_buffer(np.array(_words(data)), None)
        return array_of(apply("random_bits", bitwise_xor(base, number)._parts[0], shape=(2,)))
    a = asarray(data)
    if a.ndim or a.dtype.kind not in "iu":
        raise InputError(f"fold_in: expected an integer, got {a.dtype} of shape {a.shape}")
    wide = cast(cast(a, I64), U64)
    number = stack([cast(bitwise_right_shift(wide, k), U32) for k in (0, 32)])
    return array_of(apply("random_bits", bitwise_xor(base, number)._parts[0], shape=(2,)))


def _tweaked(key: Array, words: tuple[int, int]) -> Array:
    return bitwise_xor(key, from_buffer(np.array(words, U32), None))


def checked(key: Any) -> Array:
    """A key as an array. InputError: it is none."""
    k = asarray(key) if isinstance(key, np.ndarray) else key
    if not isinstance(k, Array) or k.dtype != U32 or k.shape != (2,):
        got = f"{k.dtype} of shape {k.shape}" if isinstance(k, Array) else a_type(key)
        raise InputError(f"expected a key (uint32 of shape (2,)), got {got}; make one by dnnc.random.key(seed)")
    return k


# --- state ------------------------------------------------------------------------------------------------------------


class Generator:
    """Keys in turn: number `count` of a seed is a word pair of a Philox block that no draw uses."""

    def __init__(self, seed: int = 0) -> None:
        self._lock = threading.Lock()
        self.state = (seed, 0)

    def next(self) -> Array:
        with self._lock:
            seed, count = self.state
            self.state = seed, count + 1
        return from_buffer(_seeded(seed, count // AHEAD)[count % AHEAD].copy(), None)


@lru_cache(8)
def _seeded(seed: int, block: int) -> np.ndarray[Any, Any]:
    """The keys of a seed from number AHEAD * block on, uint32 [AHEAD, 2]."""
    counts = np.arange(block * AHEAD, (block + 1) * AHEAD, dtype=np.uint64)
    counter = np.zeros((AHEAD, 4), U32)
    counter[:, 0], counter[:, 1], counter[:, 2] = counts & np.uint64(MASK), counts >> np.uint64(32), SEEDED
    words: np.ndarray[Any, Any] = philox(counter, _words(seed))
    return words[:, :2]


_DEFAULT = Generator()


class _Stream:
    """Keys in turn, of the key of a call."""

    def __init__(self, key: Array) -> None:
        self.key, self.count = key, 0

    def next(self) -> Array:
        self.count += 1
        return fold_in(self.key, self.count - 1)

    def each(self, number: Array) -> _Each:
        return _Each(self, number)


class _Each:
    """Keys in turn within the body of a loop, of keys of the stream around it and the iteration's number."""

    def __init__(self, around: _Stream | _Each, number: Array) -> None:
        self.around, self.number = around, number

    def next(self) -> Array:
        return fold_in(self.around.next(), self.number)

    def each(self, number: Array) -> _Each:
        return _Each(self, number)


def seed(n: int) -> None:
    """Begin the default generator anew, which gives keys where none is passed. Its seed is 0 before the first call."""
    _words(n)
    _DEFAULT.state = n.__index__(), 0


def get_state() -> tuple[int, int]:
    """The state of the default generator: its seed, and how many keys it has given. For checkpoints."""
    return _DEFAULT.state


def set_state(state: tuple[int, int]) -> None:
    """Continue where `get_state` was called."""
    first, count = state
    _words(first)
    _words(count)
    _DEFAULT.state = int(first), int(count)


@contextmanager
def stream(key: Any) -> Iterator[None]:
    """Within it, draws without a key take keys folded from this one in turn; of None, none: see `next_key`."""
    token = KEYS.set(None if key is None else _Stream(checked(key)))
    try:
        yield
    finally:
        KEYS.reset(token)


def next_key(key: Any, what: str) -> Array:
    """The key of a draw: the one that was passed, else the next one of the stream or of the default generator.

    Raises:
        InputError: a function is being traced, and there is no key: the draw would be the same in each call.
    """
    if key is not None:
        return checked(key)
    around = KEYS.get()
    if around is not None:
        return around.next()
    if tracing():
        raise InputError(
            f"{what}: a draw in a traced function needs a key, or it would be the same in each call; make the key an "
            "argument of the function and pass it by key=, or by rngs= to dnnc.nn.functional_call"
        )
    return _DEFAULT.next()


# --- distributions ----------------------------------------------------------------------------------------------------


def bits(key: Any, shape: Shape = ()) -> Array:
    """Random bits as uint32."""
    return array_of(apply("random_bits", next_key(key, "bits")._parts[0], shape=_dims(shape)))


def uniform(key: Any, shape: Shape = (), dtype: Any = F32, minval: Any = 0.0, maxval: Any = 1.0) -> Array:
    """Numbers in [minval, maxval). Float16 is rounded from float32."""
    u = _floats("uniform", "random_uniform", next_key(key, "uniform"), shape, dtype)
    if type(minval) in (int, float) and type(maxval) in (int, float):
        return u if (minval, maxval) == (0, 1) else add(multiply(u, float(maxval - minval)), float(minval))
    return add(multiply(u, subtract(maxval, minval)), minval)


def normal(key: Any, shape: Shape = (), dtype: Any = F32) -> Array:
    """Numbers of the standard normal distribution, by Box and Muller."""
    return _floats("normal", "random_normal", next_key(key, "normal"), shape, dtype)


def _floats(what: str, op: str, key: Array, shape: Shape, dtype: Any) -> Array:
    wanted = _float_type(what, dtype)
    drawn = apply(op, key._parts[0], shape=_dims(shape), dtype=f64 if wanted == F64 else f32)
    return cast(array_of(drawn), wanted)


def _float_type(what: str, dtype: Any) -> DType:
    d = dtype_of(dtype)
    if kind_of(d) != "f":
        raise InputError(f"{what}: dtype={d}: expected bfloat16, float16, float32 or float64")
    return d


def _dims(shape: Shape) -> tuple[Any, ...]:
    return tuple(plain(d) for d in shape_of(shape))


@replayed
def bernoulli(key: Any, p: Any = 0.5, shape: Shape | None = None) -> Array:
    """Truth values that hold with probability `p`, a number or an array; `shape` is that of `p` by default."""
    dims = (p.shape if isinstance(p, Array) else ()) if shape is None else shape_of(shape)
    dtype = p.dtype if isinstance(p, Array) and p.dtype == F64 else F32
    return less(uniform(next_key(key, "bernoulli"), dims, dtype), p)


def randint(key: Any, shape: Shape, minval: Any, maxval: Any, dtype: Any = I64) -> Array:
    """Integers in [minval, maxval): 64 random bits modulo the width, whose bias is below width / 2^64.

    Raises:
        InputError: the range is empty, or `dtype` is no integer type.
    """
    wanted = dtype_of(dtype)
    if wanted.kind not in "iu":
        raise InputError(f"randint: dtype={wanted}: expected an integer type")
    for name, v in (("minval", minval), ("maxval", maxval)):
        if not is_size(v) and not (isinstance(v, Array) and v.dtype.kind in "iu"):
            raise InputError(f"randint: {name} must be an integer or an array of integers, got {a_type(v)}")
    if not isinstance(minval, Array) and not isinstance(maxval, Array) and not maxval > minval:
        raise InputError(f"randint: no integers in [{minval}, {maxval})")
    dims = shape_of(shape)
    words = bits(next_key(key, "randint"), (2, *dims))
    high, low = (cast(words[k], U64) for k in (0, 1))
    width = subtract(_integer(maxval), _integer(minval))
    drawn = remainder(bitwise_or(bitwise_left_shift(high, 32), low), cast(width, U64))
    return cast(add(cast(drawn, I64), _integer(minval)), wanted)


def _integer(v: Any) -> Array:
    """An int64 array of an integer, of a size, or of an array of integers."""
    return cast(v, I64) if isinstance(v, Array) else scalar(v if isinstance(v, Size) else int(v), I64)


def permutation(key: Any, x: Any, axis: int = 0) -> Array:
    """The integers below `x` in random order; or of an array the rows along `axis`."""
    n = x if is_size(x) else x.shape[axis_of(axis, x.ndim)] if isinstance(x, Array) and x.ndim else None
    if n is None:
        raise InputError(f"permutation: expected an integer or an array with axes, got {a_type(x)}")
    order = argsort(uniform(next_key(key, "permutation"), (n,), F64))
    return order if is_size(x) else take(x, order, axis=axis)


def gumbel(key: Any, shape: Shape = (), dtype: Any = F32) -> Array:
    """-log(-log(u)) of uniform numbers in (0, 1)."""
    u = uniform(next_key(key, "gumbel"), shape, F64 if dtype_of(dtype) == F64 else F32)
    tiny = float(np.finfo(u.dtype).tiny)
    return cast(negative(log(negative(log(maximum(u, tiny))))), _float_type("gumbel", dtype))


def exponential(key: Any, shape: Shape = (), dtype: Any = F32) -> Array:
    """-log(1 - u): mean 1."""
    u = uniform(next_key(key, "exponential"), shape, F64 if dtype_of(dtype) == F64 else F32)
    return cast(negative(log1p(negative(u))), _float_type("exponential", dtype))


def categorical(key: Any, logits: Array, axis: int = -1, shape: Shape | None = None) -> Array:
    """Indices along `axis` with the probabilities softmax(logits): the largest of logits plus Gumbel numbers.

    Args:
        logits: log-probabilities, up to a constant along `axis`.
        shape: of the result; the shape of `logits` without `axis` has to broadcast to it, and is the default.
    """
    a = asarray(logits)
    k = axis_of(axis, a.ndim)
    rest = (*a.shape[:k], *a.shape[k + 1 :])
    dims = rest if shape is None else shape_of(shape)
    if broadcast_shapes(rest, dims) != dims:
        raise InputError(f"categorical: the shape {rest} of the rows does not broadcast to {dims}")
    at = len(dims) - len(rest) + k
    noise = gumbel(next_key(key, "categorical"), (*dims[:at], a.shape[k], *dims[at:]), a.dtype)
    return argmax(add(a, noise), axis=at)


def truncated_normal(key: Any, lower: float, upper: float, shape: Shape = (), dtype: Any = F32) -> Array:
    """Standard normal numbers in [lower, upper], by the inverse of the distribution function."""
    if not lower < upper:
        raise InputError(f"truncated_normal: no numbers in [{lower}, {upper}]")
    low, high = (math.erf(v / math.sqrt(2)) for v in (lower, upper))
    u = uniform(next_key(key, "truncated_normal"), shape, F64, low, high)
    x = multiply(erf_inverse(u), math.sqrt(2))
    return cast(minimum(maximum(x, float(lower)), float(upper)), _float_type("truncated_normal", dtype))


_CENTRAL = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip


def erf_inverse(y: Array) -> Array:
    """The x with erf(x) = y: Giles, "Approximating the erfinv function" (2010), and two steps by Newton."""
    edge = float(np.nextafter(1, 0, dtype=y.dtype))
    y = minimum(maximum(y, -edge), edge)
    w = negative(log(multiply(subtract(1.0, y), add(1.0, y))))
    x = multiply(
        where(less(w, 5.0), _polynomial(_CENTRAL, subtract(w, 2.5)), _polynomial(_TAIL, subtract(sqrt(w), 3.0))), y
    )
    for _ in range(2):
        slope = multiply(exp(negative(multiply(x, x))), 2 / math.sqrt(math.pi))
        step = divide(subtract(erf(x), y), slope)
        x = subtract(x, where(less(absolute(step), 0.1), step, 0.0))
    return x


def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    made: Any = coefficients[0]
    for c in coefficients[1:]:
        made = add(multiply(made, x), c)
    return made  # type: ignore[no-any-return]
