"""Shape arithmetic: operators on small integer tensors of symbolic dims, evaluated while reading.

A rule gets a call whose inputs all have known contents and returns the item with the result's contents, or None where
it cannot tell; the operator is then converted like any other. Contents are object arrays, so movement is NumPy's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dnnc.frontends.onnx.call import KNOWN_LIMIT, Call, Item, contents_of, of_contents
from dnnc.ir.bounds import bounds
from dnnc.ir.dtype import DType, boolean
from dnnc.ir.errors import ModelError
from dnnc.ir.expr import Expr, const, logical_not, maximum, minimum, op, select, unwrap
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.types import product

Contents = np.ndarray[Any, Any]
Rule = Callable[[Call], Item | tuple[Item, ...] | None]


class _Unknown(Exception):
    """The result cannot be told symbolically."""


def _elements(c: Call, i: int) -> Contents:
    x = contents_of(c.item(i))
    assert x is not None
    return x


def _item(x: Any, dtype: DType) -> Item | None:
    return of_contents(x, dtype) if np.size(x) <= KNOWN_LIMIT else None


def shape(c: Call) -> Item | None:
    """The dims of any tensor; `start` and `end` (opset 15) cut out some, clamped to the rank."""
    dims = c.item(0).shape
    rank = len(dims)
    start, end = (min(max(v + rank if v < 0 else v, 0), rank) for v in (c.integer("start", 0), c.integer("end", rank)))
    out = np.empty(max(end - start, 0), object)
    out[:] = dims[start : max(start, end)]
    return of_contents(out)


def size(c: Call) -> Item | None:
    return of_contents(product(c.item(0).shape))


# --- movement ---------------------------------------------------------------------------------------------------------


def _moved(f: Callable[[Call, Contents], Any]) -> Rule:
    """A rule that only moves the elements of its first input."""
    return lambda c: _item(f(c, _elements(c, 0)), c.item(0).type.dtype)


def _axes(c: Call, rank: int) -> tuple[int, ...] | None:
    """Axes from the attribute, or from input 1 since opset 13."""
    given = c.ints_in(1, "axes") if c.has(1) else c.integers("axes")
    return None if given is None else tuple(normalize_axis(a, rank) for a in given)


def _gather(c: Call, x: Contents) -> Any:
    indices = _elements(c, 1)
    axis, n = normalize_axis(c.integer("axis", 0), x.ndim), x.shape[c.integer("axis", 0)]
    if any(not isinstance(k, int) for k in indices.reshape(-1)):
        raise _Unknown
    at = indices.astype(np.int64)
    if ((at < -n) | (at >= n)).any():
        raise ModelError(f"an index of {at.tolist()} is outside [{-n}, {n - 1}]")
    return np.take(x, at, axis)


def _slice(c: Call, x: Contents) -> Any:
    if c.opset < 10:
        starts, ends, axes, steps = c.integers("starts") or (), c.integers("ends") or (), c.integers("axes"), None
    else:
        parts = [_elements(c, k).reshape(-1).tolist() if c.has(k) else None for k in (1, 2, 3, 4)]
        if any(not isinstance(v, int) for p in parts if p is not None for v in p):
            raise _Unknown
        starts, ends, axes, steps = parts  # type: ignore[assignment]
    cuts: list[Any] = [slice(None)] * x.ndim
    for k, a in enumerate(range(len(starts)) if axes is None else axes):
        step = steps[k] if steps is not None else 1
        end = ends[k]
        cuts[normalize_axis(a, x.ndim)] = slice(starts[k], None if step < 0 and end < -x.shape[a] else end, step)
    return x[tuple(cuts)]


def _unsqueeze(c: Call, x: Contents) -> Any:
    given = c.ints_in(1, "axes") if c.has(1) else c.integers("axes") or ()
    return np.expand_dims(x, tuple(normalize_axis(a, x.ndim + len(given)) for a in given))


def _reshape(c: Call, x: Contents) -> Any:
    target = c.ints_in(1, "shape") if c.has(1) else c.integers("shape") or ()
    return x.reshape([x.shape[k] if d == 0 and not c.flag("allowzero") else d for k, d in enumerate(target)])


def _concat(c: Call) -> Item | None:
    return _item(
        np.concatenate([_elements(c, k) for k in range(len(c.items))], c.integer("axis", 1 if c.opset < 4 else 0)),
        c.item(0).type.dtype,
    )


def _split(c: Call) -> tuple[Item, ...]:
    x = _elements(c, 0)
    axis, count = c.integer("axis", 0), c.integer("num_outputs", len(c.outputs))
    sizes = c.ints_in(1, "split") if c.has(1) else c.integers("split")
    if sizes is None:
        step = -(-x.shape[axis] // count)
        sizes = tuple(min(step, max(x.shape[axis] - k * step, 0)) for k in range(count))
    if sum(sizes) != x.shape[axis]:
        raise ModelError(f"the parts {list(sizes)} do not add up to {x.shape[axis]}")
    return tuple(of_contents(p, c.item(0).type.dtype) for p in np.split(x, np.cumsum(sizes)[:-1], axis))


def _expand(c: Call, x: Contents) -> Any:
    target = c.ints_in(1, "shape")
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, target))


# --- arithmetic -------------------------------------------------------------------------------------------------------


def _exact(v: Any) -> Any:
    """An element as an int or expression; only whole floats have one."""
    if isinstance(v, float):
        if not v.is_integer():
            raise _Unknown
        return int(v)
    return v


def _nonnegative(v: Any) -> bool:
    lo = bounds(v)[0]
    return lo is not None and lo >= 0


def _divided(a: Any, b: Any, exact: bool) -> Any:
    """Divide and truncate, as floor does for non-negatives; `exact` (floats): only where nothing remains."""
    if isinstance(a, int) and isinstance(b, int) and b != 0 and not exact:
        q = abs(a) // abs(b)
        return q if (a < 0) == (b < 0) else -q
    positive = bounds(b)[0]
    if positive is None or positive < 1 or not _nonnegative(a):
        raise _Unknown
    if exact and unwrap(const(a) % b) != 0:
        raise _Unknown
    return const(a) // b


def _remainder(a: Any, b: Any, truncated: bool) -> Any:
    """Return the remainder of the floor division, or of the `truncated` one: they differ for negative a."""
    positive = bounds(b)[0]
    if positive is None or positive < 1 or (truncated and not _nonnegative(a)):
        raise _Unknown
    return const(a) % b


def _binary(f: Callable[[Call, Any, Any], Any], to: DType | None = None) -> Rule:
    def rule(c: Call) -> Item | None:
        a, b = np.broadcast_arrays(_elements(c, 0), _elements(c, 1))
        if a.size > KNOWN_LIMIT:
            return None
        out = np.empty(a.shape, object)
        for k in np.ndindex(a.shape):
            out[k] = _plain(f(c, _exact(a[k]), _exact(b[k])))
        return of_contents(out, to or c.item(0).type.dtype)

    return rule


def _plain(v: Any) -> Any:
    return unwrap(v) if isinstance(v, Expr) else v


def _compare(name: str, swap: bool = False) -> Rule:
    return _binary(lambda c, a, b: op(name, const(b), const(a)) if swap else op(name, const(a), const(b)), boolean)


def _floats(c: Call) -> bool:
    return c.item(0).type.dtype.is_float


def _variadic(f: Callable[[Any, Any], Any]) -> Rule:
    def rule(c: Call) -> Item | None:
        arrays = np.broadcast_arrays(*(_elements(c, k) for k in range(len(c.items))))
        out = np.empty(arrays[0].shape, object)
        for k in np.ndindex(out.shape):
            v = _exact(arrays[0][k])
            for x in arrays[1:]:
                v = f(v, _exact(x[k]))
            out[k] = _plain(v)
        return _item(out, c.item(0).type.dtype)

    return rule


def _each(f: Callable[[Any], Any], to: DType | None = None) -> Rule:
    def rule(c: Call) -> Item | None:
        x = _elements(c, 0)
        out = np.empty(x.shape, object)
        for k in np.ndindex(x.shape):
            out[k] = _plain(f(_exact(x[k])))
        return of_contents(out, to or c.item(0).type.dtype)

    return rule


def _abs(v: Any) -> Any:
    if not _nonnegative(v):
        raise _Unknown
    return v


def _cast(c: Call) -> Item | None:
    to = c.dtype("to") if c.op == "Cast" else c.item(1).type.dtype
    if to.kind == "b" or to.kind not in "fiu" or c.item(0).type.dtype.kind == "b":
        return None
    return of_contents(_elements(c, 0), to)


def _where(c: Call) -> Item | None:
    cond, a, b = np.broadcast_arrays(*(_elements(c, k) for k in range(3)))
    out = np.empty(cond.shape, object)
    for k in np.ndindex(cond.shape):
        p = cond[k]
        out[k] = (
            (a[k] if p else b[k])
            if isinstance(p, (bool, np.bool_, int))
            else _plain(select(_boolean(p), const(_exact(a[k])), const(_exact(b[k]))))
        )
    return _item(out, c.item(1).type.dtype)


def _boolean(p: Any) -> Expr:
    assert isinstance(p, Expr)
    return p


def _reduce(f: Callable[[Any, Any], Any], start: Any) -> Rule:
    def rule(c: Call) -> Item | None:
        x = _elements(c, 0)
        axes = _axes(c, x.ndim)
        if axes is not None and len(axes) == 0 and c.flag("noop_with_empty_axes"):
            return c.item(0)
        axes = axes or tuple(range(x.ndim))
        keep = [k for k in range(x.ndim) if k not in axes]
        moved = x.transpose([*keep, *axes]).reshape([*(x.shape[k] for k in keep), -1])
        out = np.empty(moved.shape[:-1], object)
        for k in np.ndindex(out.shape):
            v = start if start is not None else _exact(moved[k][0])
            for e in moved[k] if start is not None else moved[k][1:]:
                v = f(v, _exact(e))
            out[k] = _plain(v)
        shape_ = [1 if k in axes else x.shape[k] for k in range(x.ndim)]
        return of_contents(out.reshape(shape_) if c.flag("keepdims", True) else out, c.item(0).type.dtype)

    return rule


def _times(a: Any, b: Any) -> Any:
    return const(a) * b if isinstance(b, Expr) else a * b


def _safe(rule: Rule) -> Rule:
    def guarded(c: Call) -> Item | tuple[Item, ...] | None:
        try:
            return rule(c)
        except _Unknown:
            return None

    return guarded


RULES: dict[tuple[str, str], Rule] = {
    ("", name): _safe(rule)
    for name, rule in {
        "Shape": shape,
        "Size": size,
        "Identity": _moved(lambda c, x: x),
        "Gather": _moved(_gather),
        "Slice": _moved(_slice),
        "Squeeze": _moved(lambda c, x: np.squeeze(x, _axes(c, x.ndim))),
        "Unsqueeze": _moved(_unsqueeze),
        "Reshape": _moved(_reshape),
        "Expand": _moved(_expand),
        "Flatten": _moved(
            lambda c, x: x.reshape(1 if c.integer("axis", 1) == 0 else -1, x.size if c.integer("axis", 1) == 0 else 1)
        ),
        "Transpose": _moved(lambda c, x: x.transpose(c.integers("perm"))),
        "Tile": _moved(lambda c, x: np.tile(x, c.ints_in(1, "repeats"))),
        "Concat": _concat,
        "Split": _split,
        "Add": _binary(lambda c, a, b: a + b),
        "Sub": _binary(lambda c, a, b: a - b),
        "Mul": _binary(lambda c, a, b: a * b),
        "Div": _binary(lambda c, a, b: _divided(a, b, _floats(c))),
        "Mod": _binary(lambda c, a, b: _remainder(a, b, c.flag("fmod"))),
        "Max": _variadic(lambda a, b: maximum(const(a), b)),
        "Min": _variadic(lambda a, b: minimum(const(a), b)),
        "Sum": _variadic(lambda a, b: a + b),
        "Equal": _compare("=="),
        "Less": _compare("<"),
        "LessOrEqual": _compare("<="),
        "Greater": _compare("<", swap=True),
        "GreaterOrEqual": _compare("<=", swap=True),
        "Not": _each(lambda v: logical_not(v) if isinstance(v, Expr) else not v),
        "And": _binary(lambda c, a, b: op("&", const(a, boolean), const(b, boolean))),
        "Or": _binary(lambda c, a, b: op("|", const(a, boolean), const(b, boolean))),
        "Neg": _each(lambda v: -v),
        "Abs": _each(_abs),
        "Floor": _each(lambda v: v),
        "Ceil": _each(lambda v: v),
        "Round": _each(lambda v: v),
        "Cast": _cast,
        "CastLike": _cast,
        "Where": _where,
        "ReduceProd": _reduce(_times, 1),
        "ReduceSum": _reduce(lambda a, b: a + b, 0),
        "ReduceMax": _reduce(lambda a, b: maximum(const(a), b), None),
        "ReduceMin": _reduce(lambda a, b: minimum(const(a), b), None),
    }.items()
}
