"""Data-dependent sizes: each becomes a fresh dim, which a host `measure` reads between native calls.

What is built here is compiled once for all sizes. Where the tensor of sizes comes from small integer inputs alone, a
model is rather read for their contents (`Call.dims` asks for them): they hold shapes, which hardly change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dnnc.frontends.onnx.call import KNOWN_LIMIT, Call
from dnnc.frontends.onnx.unbacked_dims import fresh_dim
from dnnc.ir.dtype import f64, i64
from dnnc.ir.errors import ModelError
from dnnc.ir.expr import const, unwrap
from dnnc.ir.graph import Value
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.types import Dim


def computed(c: Call, i: int, always: bool = False) -> bool:
    """True if input i, an integer vector of known length, is computed; `always`: even from small integer inputs."""
    it = c.item(i)
    if (
        it.constant
        or it.contents is not None
        or it.type.dtype.kind not in "iu"
        or it.type.rank > 1
        or not it.type.static
    ):
        return False
    if c.env[0].by_contents or not it.origins:
        return not it.origins
    return always or not all(_small(v.type) for v, n in zip(c.b.graph.inputs, c.env[0].inputs) if n in it.origins)


def _small(t: Any) -> bool:
    return t.dtype.kind in "iub" and t.static and t.size <= KNOWN_LIMIT


def sizes(c: Call, i: int, what: str, always: bool = False) -> tuple[Dim, ...]:
    """The elements of input i as dims: known ones, or fresh ones, none of which may be negative."""
    return tuple(measured(c, v) for v in elements(c, i)) if computed(c, i, always) else c.dims(i, what)


def elements(c: Call, i: int) -> list[Value]:
    """Each element of input i, an integer vector of known length, as an i64 scalar."""
    v = c.cast(c.x(i), i64)
    if v.type.rank == 0:
        return [v]
    return [c.b.reshape(c.b.slice(v, starts=(k,), steps=(1,), shape=(1,)), shape=()) for k in range(int(v.type.size))]  # type: ignore[arg-type]


def measured(c: Call, count: Value, high: Dim | None = None) -> Dim:
    """A fresh dim in [0, high] that `count`, an integer, tells."""
    size = fresh_dim(c, high)
    c.b.measure(count, size=size)
    return size


def number_of(c: Call, d: Dim) -> Any:
    """A dim as an i64 scalar."""
    return c.const(d, i64) if isinstance(d, int) else c.b.full(shape=(), value=d, dtype=i64)


def computed_range(c: Call) -> Any:
    """start, start + delta, ... below limit: how many there are is computed, and measured."""
    start, limit, delta = (c.b.reshape(c.x(i), shape=()) for i in range(3))
    dtype = start.type.dtype
    room = c.b.sub(limit, start)
    if dtype.is_float:
        steps = c.cast(c.b.ceil(c.b.div(c.cast(room, f64), c.cast(delta, f64))), i64)
    else:  # division truncates, so what is to be rounded away from 0 gets all but one step more
        room, step = c.cast(room, i64), c.cast(delta, i64)
        one = c.b.where(c.b.less(step, 0), c.const(-1, i64), c.const(1, i64))
        steps = c.b.div(c.b.add(room, c.b.sub(step, one)), step)
    n = measured(c, c.b.max(steps, 0))
    return c.b.add(c.b.mul(c.b.iota(shape=(n,), axis=0, dtype=dtype), delta), start)


def computed_expand(c: Call) -> Any:
    """A dim of 1 becomes what is computed; any other must be computed as itself or 1."""
    x, target = c.x(), elements(c, 1)
    rank = max(x.type.rank, len(target))
    old: list[Dim] = [*[1] * (rank - x.type.rank), *x.type.shape]
    shape = list(old)
    for k, t in enumerate(target, rank - len(target)):
        if old[k] == 1:
            shape[k] = measured(c, t)
        else:
            c.b.measure(c.b.where(c.b.equal(t, 1), number_of(c, old[k]), t), size=old[k])
    return c.b.expand(x, shape=tuple(shape))


def computed_slice(c: Call, axes: Sequence[int] | None, steps: Sequence[int] | None) -> Any:
    """A gather along each axis, of indices that are computed."""
    x, starts, ends = c.x(), elements(c, 1), elements(c, 2)
    if len(starts) != len(ends) or len(axes or starts) != len(starts) or len(steps or starts) != len(starts):
        raise ModelError(f"starts, ends, axes and steps differ in length: {len(starts)}, {len(ends)}, {axes}, {steps}")
    for k, axis in enumerate(axes or range(len(starts))):
        a, step = normalize_axis(axis, x.type.rank), steps[k] if steps is not None else 1
        if step == 0:
            raise ModelError("a step is 0")
        n = number_of(c, x.type.shape[a])
        first, last = (_clamped(c, v, n, step) for v in (starts[k], ends[k]))
        room = c.b.sub(last, first) if step > 0 else c.b.sub(first, last)
        count = c.b.div(c.b.add(c.b.max(room, 0), abs(step) - 1), abs(step))
        size = measured(c, count, unwrap((const(x.type.shape[a]) + (abs(step) - 1)) // abs(step)))
        at = c.b.add(c.b.mul(c.b.iota(shape=(size,), axis=0, dtype=i64), step), first)
        inside = c.b.max(c.b.min(at, c.b.sub(n, 1)), 0)  # as they are: but a kernel by itself cannot know
        x = c.b.gather(x, inside, axis=a)
    return x


def _clamped(c: Call, v: Value, n: Value, step: int) -> Any:
    """Where a slice begins or ends: counted from the front, and forced into the axis."""
    v = c.b.where(c.b.less(v, 0), c.b.max(c.b.add(v, n), -1), v)
    return c.b.max(c.b.min(v, n), 0) if step > 0 else c.b.min(v, c.b.sub(n, 1))


def computed_reshape(c: Call) -> Any:
    """A view whose sizes are worked out when the model runs."""
    x, target = c.x(), c.x(1)
    shape = tuple(fresh_dim(c, None) for _ in range(int(target.type.size)))  # type: ignore[arg-type]
    return c.b.view(x, c.cast(target, i64), shape=shape, copy_zeros=not c.flag("allowzero"))
