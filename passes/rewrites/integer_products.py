"""One form for all products of quantized operands: sums of bytes in i32, then what zero points add.

    sum((x - zx) * (w - zw))   ->   matmul(x, w8, out_dtype=i32) - zx * sum(w - zw) + r * sum(x)

x is u8, w8 = w - zw - r is i8 and constant, r is 0 where w - zw fits into i8. Targets have `dot4` for it. Images are
padded with zx, so that each result sees all taps. Wide groups of a convolution are convolutions of their own. Narrow
ones and images of one channel are computed in float32, where they are exact as well while sums stay below 2^24: they
are too narrow for four bytes of one sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.ir.dtype import f32, i8, i32, u8
from dnnc.ir.encodings import QUAD
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.builder import Builder
from dnnc.passes.rewrites.neighbouring_results import apart, attributes, pixels_together, widened

Array = np.ndarray[Any, Any]
EXACT = 1 << 24  # float32 holds all integers up to it
WIDE = 16  # channels in and out from which on a group is a convolution of its own


@dataclass(frozen=True)
class Quantized:
    """Integers q that stand for q - zero; `zero`: a scalar of the dtype of q or i32, None for 0."""

    q: Value
    zero: Value | None


@dataclass(frozen=True)
class Weights:
    """Constant integers [O, C, ...] or [..., K, N] as i32, zero points subtracted."""

    data: Array
    convolves: bool

    @property
    def terms(self) -> tuple[int, ...]:
        """The axes of a sum."""
        return tuple(range(1, self.data.ndim)) if self.convolves else (self.data.ndim - 2,)

    def sums(self) -> Array:
        """Of the weights of each result, [O] or [..., N]."""
        total: Array = self.data.sum(self.terms, dtype=np.int64).astype(np.int32)
        return total

    def split(self) -> tuple[Array, Array] | None:
        """(w8, r) with w8 + r = w, r for each result; None where the weights of a result span more than i8 holds."""
        low, high = (f(self.data, axis=self.terms, initial=0) for f in (np.min, np.max))
        shift = np.where(high > 127, high - 127, np.where(low < -128, low + 128, 0))
        if (low - shift < -128).any() or (high - shift > 127).any():
            return None
        return (self.data - np.expand_dims(shift, self.terms)).astype(np.int8), shift.astype(np.int32)


def known(g: Graph, v: Value | None) -> int | None:
    """A zero point as a number, 0 where it is absent; None where it is not constant."""
    if v is None:
        return 0
    a = g.constants.get(v)
    return int(a.reshape(())) if a is not None and a.size == 1 else None


def product(
    b: Builder, x: Quantized, w: Weights, attrs: Mapping[str, Any], bias: Value | None = None, lanes: int = 0
) -> Any:
    """The product of quantized x and weights, and a bias in i32 [O]: i32, or exact integers in f32. None: no form fits.

    `attrs`: of the convolution, or of the product. `lanes`: output channels that kernels have in a vector, 0 if none.
    """
    if not has_form(w, attrs):
        return None
    x = unsigned(b, x)
    if w.convolves:
        x, attrs = padded(b, x, attrs)
    if _is_narrow(w, attrs):
        return _in_floats(b, x, w, attrs, bias)
    pixels = pixels_together(x.q.type.shape, w.data, attrs, lanes) if w.convolves else 1
    if pixels > 1 and (bias is None or bias in b.graph.constants):
        before, image, given = attrs, x.q.type.shape, None if bias is None else b.graph.constants[bias]
        attrs, bias = attributes(image, w.data, attrs, pixels), None
        if given is not None:
            bias = b.constant(np.repeat(given, pixels))
        wide = Weights(widened(w.data, pixels), True)
        parts = wide.split()
        assert parts is not None
        return apart(b, _in_bytes(b, x, wide, *parts, attrs, bias), image, w.data, before, pixels)
    parts = w.split()
    assert parts is not None
    group = int(attrs.get("group", 1))
    if group == 1:
        return _in_bytes(b, x, w, *parts, attrs, bias)
    results = []
    for k in range(group):
        inputs, outputs = (slice(k * n // group, (k + 1) * n // group) for n in (x.q.type.shape[1], w.data.shape[0]))
        of_group = Quantized(_channels(b, x.q, 1, inputs), x.zero), Weights(w.data[outputs], True)
        w8, shift = (a[outputs] for a in parts)
        part = None if bias is None else _channels(b, bias, 0, outputs)
        results.append(_in_bytes(b, *of_group, w8, shift, {**attrs, "group": 1}, part))
    return b.concat(*results, axis=1)


def product_of_two(b: Builder, x: Quantized, y: Quantized) -> Any:
    """The product of quantized matrices neither of which is constant, whose inner size is known: i32.

        sum((x - zx) * (y - zy))   ->   matmul(x, y) - zx * sum(y) - zy * sum(x) + k * zx * zy

    x as u8, y as i8. The sums of rows and columns are left out where the other zero point is known to be 0.
    """
    x, y, k = unsigned(b, x), signed(b, y), x.q.type.shape[-1]
    assert isinstance(k, int)
    p, q, more = x.q, y.q, -k % QUAD
    if more:
        p = b.pad(p, pads=(*(0,) * (2 * p.type.rank - 1), more))
        q = b.pad(q, pads=(*(0,) * q.type.rank, *(0,) * (q.type.rank - 2), more, 0))
    out = b.matmul(p, q, out_dtype=i32)
    (zx, of_x), (zy, of_y) = (
        (known(b.graph, z.zero), None if z.zero is None else _wide(b, b.reshape(z.zero, shape=()))) for z in (x, y)
    )
    if zy != 0:
        out = b.sub(out, b.mul(b.reduce_sum(_wide(b, x.q), axes=(x.q.type.rank - 1,), keepdims=True), of_y))
    if zx != 0:
        columns = b.reduce_sum(_wide(b, y.q), axes=(y.q.type.rank - 2,), keepdims=True)
        columns = columns if zy == 0 else b.sub(columns, b.mul(of_y, k))
        out = b.sub(out, b.mul(columns, of_x))
    return out


def _channels(b: Builder, x: Value, axis: int, part: slice) -> Any:
    """A part of the indices of an axis."""
    given = b.graph.constants.get(x)
    if given is not None:
        return b.constant(given[(slice(None),) * axis + (part,)])
    shape = tuple(part.stop - part.start if k == axis else n for k, n in enumerate(x.type.shape))
    starts = tuple(part.start if k == axis else 0 for k in range(x.type.rank))
    return b.slice(x, starts=starts, steps=(1,) * x.type.rank, shape=shape)


def has_form(w: Weights, attrs: Mapping[str, Any]) -> bool:
    """Does `product` have a form for these weights?"""
    return is_exact(w) if _is_narrow(w, attrs) else w.split() is not None


def _is_narrow(w: Weights, attrs: Mapping[str, Any]) -> bool:
    """Is a group no convolution of bytes?"""
    group = int(attrs.get("group", 1))
    return w.convolves and (
        w.data.shape[1] == 1 or (group > 1 and min(w.data.shape[1], w.data.shape[0] // group) < WIDE)
    )


def is_exact(w: Weights, bias: Array | int = 0) -> bool:
    """Do all sums of a bias, bytes and these weights stay where float32 is exact, with any zero point?"""
    return _largest_sum(w, bias) < EXACT


def in_32_bits(w: Weights, bias: Array) -> bool:
    """Does no sum of a bias, bytes and these weights overflow, with any zero point?"""
    return _largest_sum(w, bias) < 1 << 31


def _largest_sum(w: Weights, bias: Array | int) -> int:
    most = 2 * 255 * np.abs(w.data.astype(np.int64)).sum(w.terms) + np.abs(np.asarray(bias, np.int64))
    return int(most.max(initial=0))


def unsigned(b: Builder, x: Quantized) -> Quantized:
    """i8 as u8 by adding 128 to all."""
    if x.q.type.dtype is u8:
        return x
    zero = known(b.graph, x.zero)
    moved = b.constant(zero + 128, dtype=i32) if zero is not None else b.add(_wide(b, x.zero), 128)
    return Quantized(b.bitwise_xor(b.cast(x.q, to=u8), b.constant(128, dtype=u8)), moved)


def signed(b: Builder, x: Quantized) -> Quantized:
    """u8 as i8 by taking 128 from all."""
    if x.q.type.dtype is i8:
        return x
    zero = known(b.graph, x.zero)
    moved = b.constant(zero - 128, dtype=i32) if zero is not None else b.sub(_wide(b, x.zero), 128)
    return Quantized(b.cast(b.bitwise_xor(x.q, b.constant(128, dtype=u8)), to=i8), moved)


def padded(b: Builder, x: Quantized, attrs: Mapping[str, Any]) -> tuple[Quantized, Mapping[str, Any]]:
    """The image with its zero point around it, and the convolution without padding; as it is where that is 0."""
    pads, rank = attrs["pads"], x.q.type.rank - 2
    if known(b.graph, x.zero) == 0 or not pads or not any(pads):
        return x, attrs
    assert x.zero is not None
    fill = b.cast(b.reshape(x.zero, shape=()), to=u8) if x.zero.type.dtype is not u8 else b.reshape(x.zero, shape=())
    image = b.pad(x.q, fill, pads=(0, 0, *pads[:rank], 0, 0, *pads[rank:]))
    return Quantized(image, x.zero), {**attrs, "pads": None}


def _wide(b: Builder, v: Any) -> Any:
    return v if v.type.dtype is i32 else b.cast(v, to=i32)


def _in_bytes(
    b: Builder, x: Quantized, w: Weights, w8: Array, shift: Array, attrs: Mapping[str, Any], bias: Value | None
) -> Any:
    zero, sums = known(b.graph, x.zero), w.sums()
    q, spread = x.q, (lambda a: a.reshape(-1, *(1,) * (w.data.ndim - 2))) if w.convolves else _rows
    start = _start(b, -zero * sums if zero else None, bias)
    attrs = {**attrs, "out_dtype": i32}
    if w.convolves:
        y = b.conv(q, w8, start, **attrs)
    else:
        k = w8.shape[-2]
        if k % QUAD:
            more = -k % QUAD
            q = b.pad(q, pads=(*(0,) * (2 * q.type.rank - 1), more))
            w8 = np.pad(w8, [(0, 0)] * (w8.ndim - 2) + [(0, more), (0, 0)])
        y = b.matmul(q, w8, **attrs)
        y = y if start is None else b.add(y, start)
    if zero is None:
        y = b.sub(y, b.mul(_wide(b, b.reshape(x.zero, shape=())), b.constant(spread(sums))))
    if shift.any():
        y = b.add(y, b.mul(_inputs(b, x.q, w, attrs), b.constant(spread(shift))))
    return y


def _rows(a: Array) -> Array:
    """[..., N] beside [..., M, N]."""
    return a if a.ndim == 1 else a[..., None, :]


def _start(b: Builder, sums: Array | None, bias: Value | None) -> Value | None:
    """What is added to each sum, in i32: [O] or [..., N]."""
    if sums is None:
        return bias
    sums = _rows(sums)
    if bias is None:
        return b.constant(sums)
    given = b.graph.constants.get(bias)
    return b.add(bias, b.constant(sums)) if given is None else b.constant((given + sums).astype(np.int32))


def _inputs(b: Builder, q: Value, w: Weights, attrs: Mapping[str, Any]) -> Any:
    """The sum of all inputs of a result, which broadcasts to the results."""
    rank = q.type.rank
    if not w.convolves:
        return b.reduce_sum(b.cast(q, to=i32), axes=(rank - 1,), keepdims=True)
    ones = np.ones((1, 1, *w.data.shape[2:]), np.int32)
    return b.conv(b.reduce_sum(b.cast(q, to=i32), axes=(1,), keepdims=True), ones, **attrs)


def _in_floats(b: Builder, x: Quantized, w: Weights, attrs: Mapping[str, Any], bias: Value | None) -> Any:
    zero, column = known(b.graph, x.zero), (-1, *(1,) * (w.data.ndim - 2))
    sums = w.sums().astype(np.float32)
    given = None if bias is None else b.graph.constants.get(bias)
    first, inside = -(zero or 0) * sums, given is not None and is_exact(w, given)
    if given is not None and inside:  # sums that start at the bias stay exact
        first = given + first
    start = b.constant(first.astype(np.float32)) if first.any() else None
    y = b.conv(x.q, w.data.astype(np.float32), start, **{**attrs, "out_dtype": f32})
    if zero is None:
        y = b.sub(y, b.mul(b.cast(b.reshape(x.zero, shape=()), to=f32), b.constant(sums.reshape(column))))
    return y if bias is None or inside else b.add(b.cast(y, to=i32), b.reshape(bias, shape=column))
