"""Gathers and scatters: elements named by tensors of indices, which count from the end where they are negative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dnnc.frontends.torch.call import Call
from dnnc.ir.dtype import boolean, i64
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.graph import Value
from dnnc.ir.shapes import broadcast_shapes
from dnnc.ir.types import Dim

Converter = Callable[[Call], Any]
REDUCTIONS = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min", "add": "add", "multiply": "mul"}


def whole(c: Call, v: Value) -> Value:
    return c.cast(v, i64)


def index_select(c: Call) -> Any:
    x, at = c.x(), whole(c, c.x("index"))
    if at.type.rank == 0:
        at = c.b.reshape(at, shape=(1,))
    return c.b.gather(x, at, axis=c.axis()) if x.type.rank else c.b.identity(x)


def embedding(c: Call) -> Any:
    return c.b.gather(c.x("weight"), whole(c, c.x("indices")), axis=0)


def gather(c: Call) -> Any:
    x, at = c.x(), whole(c, c.x("index"))
    if x.type.rank == 0:
        return (
            c.b.expand(c.b.reshape(x, shape=(1,) * at.type.rank), shape=at.type.shape)
            if at.type.rank
            else c.b.identity(x)
        )
    return c.b.gather_elements(x, at, axis=c.axis())


# --- x[i, j], x[:, mask] ----------------------------------------------------------------------------------------------


def indices(c: Call) -> list[Value | None]:
    """The indices, one for each axis of the operand that they replace."""
    given = c.args["indices"]
    if any(v is not None and v.type.dtype is boolean for v in given):
        raise UnsupportedError(
            "reading by a mask gives as many elements as the data says; use where, or keep it outside of what is "
            "compiled"
        )
    return [None if v is None else whole(c, v) for v in given]


def index(c: Call) -> Any:
    """One index is a gather along its axis. Several are broadcast to coordinates of axes moved to the front."""
    x, given = c.x(), indices(c)
    at = [k for k, v in enumerate(given) if v is not None]
    if not at:
        return c.b.identity(x)
    if len(at) == 1:
        return c.b.gather(x, given[at[0]], axis=at[0])
    rows = coordinates(c, [v for v in given if v is not None])
    rest = [k for k in range(x.type.rank) if k not in at]
    y = c.b.gather_nd(c.b.transpose(x, perm=(*at, *rest)), rows)
    return c.b.transpose(y, perm=restored(at, rows.type.rank - 1, len(rest)))


def coordinates(c: Call, vs: Sequence[Value]) -> Value:
    """Indices [..., n], one for each of n axes, broadcast to one shape."""
    shape = broadcast_shapes(*(v.type.shape for v in vs))
    made: Value = c.b.concat(*(c.b.reshape(spread(c, v, shape), shape=(*shape, 1)) for v in vs), axis=len(shape))
    return made


def spread(c: Call, v: Value, shape: tuple[Dim, ...]) -> Value:
    """`v` broadcast to a shape."""
    if v.type.rank < len(shape):
        v = c.b.reshape(v, shape=(*(1,) * (len(shape) - v.type.rank), *v.type.shape))
    made: Value = v if v.type.shape == shape else c.b.expand(v, shape=shape)
    return made


def restored(at: Sequence[int], found: int, rest: int) -> tuple[int, ...]:
    """Return where the `found` index axes go: in place of neighbouring axes, else to the front."""
    if list(at) != list(range(at[0], at[0] + len(at))):
        return tuple(range(found + rest))
    before = at[0]
    return (*range(found, found + before), *range(found), *range(found + before, found + rest))


def index_put(c: Call) -> Any:
    """x with x[indices] = values, or += values."""
    x, values, add = c.x(), c.cast(c.x("values"), c.dtype), c.flag("accumulate")
    given = c.args["indices"]
    masks = [k for k, v in enumerate(given) if v is not None and v.type.dtype is boolean]
    if masks:
        return put_by_mask(c, x, values, add)
    at = [k for k, v in enumerate(given) if v is not None]
    rows = coordinates(c, [whole(c, given[k]) for k in at])
    rest = [k for k in range(x.type.rank) if k not in at]
    found = rows.type.rank - 1
    perm = restored(at, found, len(rest))
    moved = (*rows.type.shape[:-1], *(x.type.shape[k] for k in rest))
    values = spread(c, values, tuple(moved[p] for p in perm))
    values = c.b.transpose(values, perm=tuple(perm.index(k) for k in range(len(perm))))
    y = c.b.scatter_nd(c.b.transpose(x, perm=(*at, *rest)), rows, values, reduction="add" if add else "none")
    back = [*at, *rest]
    return c.b.transpose(y, perm=tuple(back.index(k) for k in range(len(back))))


def put_by_mask(c: Call, x: Value, values: Value, add: bool) -> Any:
    """x[mask] = one value."""
    given = c.args["indices"]
    if len(given) != 1 or values.type.size != 1:
        raise UnsupportedError(
            "writing several values by a mask needs to know how many it has; write one value, or use where"
        )
    mask = given[0]
    mask = c.b.reshape(mask, shape=(*mask.type.shape, *(1,) * (x.type.rank - mask.type.rank)))
    value = c.b.reshape(values, shape=())
    return c.b.where(mask, c.b.add(x, value) if add else value, x)


# --- scatter ----------------------------------------------------------------------------------------------------------


def scatter(c: Call) -> Any:
    """scatter.src, scatter.value, scatter_add, scatter.reduce: what lies outside of the indices' extent is not read."""
    x, at = c.x(), whole(c, c.x("index"))
    src = c.args.get("src", c.args.get("value"))
    how = "add" if "scatter_add" in str(c.op) else REDUCTIONS[c.args["reduce"]] if c.get("reduce") else "none"
    if isinstance(src, Value):
        src = cut(c, c.cast(src, c.dtype), at.type.shape)
    else:
        src = c.b.expand(c.b.reshape(c.scalar(src, c.dtype), shape=(1,) * at.type.rank), shape=at.type.shape)
    return put(c, x, at, src, how)


def put(c: Call, x: Value, at: Value, src: Value, how: str) -> Any:
    if x.type.rank == 0:
        one = tuple(c.b.reshape(v, shape=(1,)) for v in (x, at, src))
        return c.b.reshape(c.b.scatter_elements(*one, axis=0, reduction=how), shape=())
    return c.b.scatter_elements(x, at, src, axis=c.axis(), reduction=how)


def cut(c: Call, v: Value, shape: tuple[Dim, ...]) -> Value:
    if v.type.shape == shape:
        return v
    made: Value = c.b.slice(v, starts=(0,) * len(shape), steps=(1,) * len(shape), shape=shape)
    return made


def scatter_reduce(c: Call) -> Any:
    """With include_self=False, elements that are written to count from the neutral value."""
    x, at = c.x(), whole(c, c.x("index"))
    src, kind = cut(c, c.cast(c.x("src"), c.dtype), at.type.shape), c.args["reduce"]
    if kind == "mean":
        raise UnsupportedError("scatter_reduce by mean; divide a sum by the counts")
    if not c.get("include_self", True):
        if not c.dtype.is_float and kind in ("amax", "amin"):
            raise UnsupportedError("scatter_reduce of integers by amax or amin without include_self")
        neutral = {"sum": 0.0, "prod": 1.0, "amax": float("-inf"), "amin": float("inf")}[kind]
        start = c.b.expand(
            c.b.reshape(c.scalar(neutral if c.dtype.is_float else int(neutral), c.dtype), shape=(1,) * at.type.rank),
            shape=at.type.shape,
        )
        x = put(c, x, at, start, "none")
    return put(c, x, at, src, REDUCTIONS[kind])


def index_add(c: Call) -> Any:
    """Rows of `source` added at rows of an axis."""
    x, axis, at, alpha = c.x(), c.axis(), whole(c, c.x("index")), c.get("alpha", 1)
    source = c.cast(c.x("source"), c.dtype)
    if alpha != 1:
        source = c.b.mul(source, c.scalar(alpha, c.dtype))
    perm = (axis, *(k for k in range(x.type.rank) if k != axis))
    rows = c.b.reshape(at, shape=(*at.type.shape, 1))
    y = c.b.scatter_nd(c.b.transpose(x, perm=perm), rows, c.b.transpose(source, perm=perm), reduction="add")
    return c.b.transpose(y, perm=tuple(perm.index(k) for k in range(len(perm))))


INDEX: dict[str, Converter] = {
    "index_select": index_select,
    "embedding": embedding,
    "gather": gather,
    "index": index,
    "_unsafe_index": index,
    "index_put": index_put,
    "_unsafe_index_put": index_put,
    "scatter": scatter,
    "scatter_add": scatter,
    "scatter_reduce": scatter_reduce,
    "index_add": index_add,
}
