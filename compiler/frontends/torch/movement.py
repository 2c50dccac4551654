"""Operators that only move elements: views, slices. Views of torch are values here, since nothing is written to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dnnc.frontends.torch.call import Call
from dnnc.frontends.torch.tensors import dense_order, memory_order
from dnnc.ir.dtype import i64
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.expr import Expr, const, unwrap
from dnnc.ir.graph import Value
from dnnc.ir.types import Dim

Converter = Callable[[Call], Any]

# --- views ------------------------------------------------------------------------------------------------------------


def same(c: Call) -> Any:
    return c.b.identity(c.x())


def view(c: Call) -> Any:
    """Whatever the arguments say, the result has the shape that torch found."""
    return reshaped(c, c.x(), c.shape)


def reshaped(c: Call, x: Value, shape: tuple[Dim, ...]) -> Value:
    """`x` in a shape; a reshape of a reshape is one."""
    if x.node is not None and x.node.op.name == "reshape":
        x = x.node.inputs[0] or x
    made: Value = x if x.type.shape == shape else c.b.reshape(x, shape=shape)
    return made


def converted(c: Call) -> Any:
    x = c.x("self" if "self" in c.args else "a")
    return c.b.identity(x) if x.type.dtype is c.dtype else c.b.cast(x, to=c.dtype)


def reinterpreted(c: Call) -> Any:
    """view.dtype"""
    if "dtype" in c.args and "size" not in c.args:
        return c.b.bit_cast(c.x(), to=c.dtype)
    return view(c)


def permute(c: Call) -> Any:
    return c.b.transpose(c.x(), perm=c.axes("dims"))


def transpose(c: Call) -> Any:
    rank = c.x().type.rank
    perm = list(range(rank))
    if rank:
        i, j = (c.axis("dim0"), c.axis("dim1")) if "dim0" in c.args else (0, rank - 1)
        perm[i], perm[j] = j, i
    return c.b.transpose(c.x(), perm=tuple(perm))


def expand(c: Call) -> Any:
    x, shape = c.x(), c.shape
    if x.type.rank < len(shape):
        x = c.b.reshape(x, shape=(*(1,) * (len(shape) - x.type.rank), *x.type.shape))
    return c.b.expand(x, shape=shape) if x.type.shape != shape else c.b.identity(x)


def as_strided(c: Call) -> Any:
    """A view of memory: of the elements in the order in which they lie there, those at a sum of strides."""
    x, fake, sizes, strides = c.x(), c.fakes["self"], c.ints("size"), c.ints("stride")
    held = tuple(fake.shape)
    if not all(isinstance(n, int) for n in held) or dense_order(held, fake.stride()) is None or fake.storage_offset():
        raise UnsupportedError("as_strided of a view: write it by slices, permute and reshape")
    lying = c.b.transpose(x, perm=order) if (order := memory_order(fake)) else x
    order = dense_order(sizes, strides)
    if order is not None and math.prod(sizes) == math.prod(held) and not c.get("storage_offset"):
        y = reshaped(c, lying, tuple(sizes[k] for k in order))
        return c.b.transpose(y, perm=tuple(order.index(k) for k in range(len(order))))
    at = np.full(sizes, c.integer("storage_offset", 0))
    for k, (n, s) in enumerate(zip(sizes, strides)):
        at += np.arange(n).reshape([n if j == k else 1 for j in range(len(sizes))]) * s
    return c.b.gather(reshaped(c, lying, (math.prod(held),)), c.b.constant(at, dtype=i64), axis=0)


def diagonal(c: Call) -> Any:
    """Elements (i, i + offset) of two axes, which become the last one."""
    x, i, j, offset = c.x(), c.axis("dim1"), c.axis("dim2", default=1), c.integer("offset", 0)
    rest = [k for k in range(x.type.rank) if k not in (i, j)]
    y = c.b.transpose(x, perm=(*rest, i, j))
    columns, n = y.type.shape[-1], c.shape[-1]
    flat = c.b.reshape(y, shape=(*y.type.shape[:-2], unwrap(const(y.type.shape[-2]) * columns)))
    along = c.b.iota(shape=(n,), axis=0, dtype=i64)
    at = c.b.add(
        c.b.mul(along, c.scalar(unwrap(const(columns) + 1), i64)),
        c.scalar(offset if offset >= 0 else unwrap(const(columns) * -offset), i64),
    )
    return c.b.gather(flat, at, axis=len(rest))


# --- parts ------------------------------------------------------------------------------------------------------------


def part(c: Call, x: Value, axis: int, start: Dim, size: Dim, step: int = 1) -> Value:
    """`size` indices of an axis from `start` on, every `step`-th."""
    shape: list[Dim] = list(x.type.shape)
    if step == 1 and start == 0 and shape[axis] == size:
        return x
    starts: list[Dim] = [0] * len(shape)
    starts[axis], shape[axis] = start, size
    steps = tuple(step if k == axis else 1 for k in range(len(shape)))
    made: Value = c.b.slice(x, starts=tuple(starts), steps=steps, shape=tuple(shape))
    return made


def placed(c: Call, at: Any, n: Dim, least: int = 0) -> Dim:
    """Count an index that may be negative from the front. Symbolic ones do: torch has asserted that."""
    if isinstance(at, Expr):
        return at
    if at < 0:
        found: Dim = unwrap(const(n) + at)
        return max(found, least) if isinstance(found, int) else found
    return min(int(at), n) if isinstance(n, int) else int(at)


def slice_(c: Call) -> Any:
    x, axis = c.x(), c.axis()
    start = placed(c, c.get("start", 0), x.type.shape[axis])
    return part(c, x, axis, start, c.shape[axis], c.integer("step", 1))


def select(c: Call) -> Any:
    x, axis = c.x(), c.axis()
    if isinstance(c.args["index"], Value):
        raise UnsupportedError("select at an index that is computed from data; use index_select")
    row = part(c, x, axis, placed(c, c.args["index"], x.type.shape[axis]), 1)
    return c.b.reshape(row, shape=c.shape)


def narrow(c: Call) -> Any:
    x, axis = c.x(), c.axis()
    return part(c, x, axis, placed(c, c.args["start"], x.type.shape[axis]), c.shape[axis])


def split(c: Call) -> Any:
    """Parts one behind the other, as large as torch says."""
    x, axis, made, at = c.x(), c.axis(), [], const(0)
    for k in range(len(c.outs)):
        size = c.type(k).shape[axis]
        made.append(part(c, x, axis, unwrap(at), size))
        at = at + size
    return made


def unbind(c: Call) -> Any:
    x, axis = c.x(), c.axis()
    return [c.b.reshape(part(c, x, axis, k, 1), shape=c.type(k).shape) for k in range(len(c.outs))]


def flip(c: Call) -> Any:
    x, axes = c.x(), c.axes("dims") if c.ints("dims") else ()
    shape = x.type.shape
    starts = tuple(unwrap(const(n) - 1) if k in axes else 0 for k, n in enumerate(shape))
    steps = tuple(-1 if k in axes else 1 for k in range(len(shape)))
    return c.b.slice(x, starts=starts, steps=steps, shape=shape) if axes else c.b.identity(x)


def roll(c: Call) -> Any:
    """Two parts of an axis change places; without axes the elements are one row."""
    x, shifts, axes = c.x(), c.ints("shifts"), c.ints("dims")
    y = x if axes else c.b.reshape(x, shape=(x.type.size,))
    for shift, axis in zip(shifts, axes or (0,)):
        a = axis % y.type.rank
        n = y.type.shape[a]
        at = (
            unwrap((const(n) - shift) % n)
            if isinstance(n, int)
            else (unwrap(const(n) - shift) if shift >= 0 else -shift)
        )
        if at not in (0, n):
            y = c.b.concat(part(c, y, a, at, unwrap(const(n) - at)), part(c, y, a, 0, at), axis=a)
    return y if axes else c.b.reshape(y, shape=x.type.shape)


def unfold(c: Call) -> Any:
    """Windows of an axis, which become the last axis: a gather by start + offset."""
    x, axis = c.x(), c.axis("dimension")
    n, size, step = c.shape[axis], c.integer("size"), c.integer("step")
    starts = c.b.mul(c.b.iota(shape=(n, 1), axis=0, dtype=i64), c.scalar(step, i64))
    at = c.b.add(starts, c.b.iota(shape=(1, size), axis=1, dtype=i64))
    y = c.b.gather(x, at, axis=axis)
    return c.b.transpose(y, perm=(*(k for k in range(y.type.rank) if k != axis + 1), axis + 1))


IDENTICAL = "alias clone detach lift_fresh_copy lift_fresh contiguous alias_copy detach_copy".split()
MOVEMENT: dict[str, Converter] = {
    **{n: same for n in IDENTICAL},
    **{
        n: view
        for n in "_unsafe_view reshape unsqueeze squeeze flatten unflatten _reshape_alias view_copy unsqueeze_copy "
        "squeeze_copy".split()
    },
    "view": reinterpreted,
    "_to_copy": converted,
    "prims::convert_element_type": converted,
    "to": converted,
    "permute": permute,
    "permute_copy": permute,
    "transpose": transpose,
    "t": transpose,
    "numpy_T": transpose,
    "expand": expand,
    "expand_copy": expand,
    "as_strided": as_strided,
    "diagonal": diagonal,
    "slice": slice_,
    "slice_copy": slice_,
    "select": select,
    "select_copy": select,
    "narrow": narrow,
    "split_with_sizes": split,
    "split": split,
    "chunk": split,
    "unbind": unbind,
    "flip": flip,
    "roll": roll,
    "unfold": unfold,
}
