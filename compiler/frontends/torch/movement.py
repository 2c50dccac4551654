"""Operators that only move elements: views, slices, joins, padding. Views of torch are values here, since nothing is written to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
LAST = (1 << 63) - 1  # torch's end of a slice without one

# --- views --------------------------------------------------------------------------------------------------------------------


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
        c.b.mul(along, c.scalar(unwrap(const(columns) + 1), i64)), c.scalar(offset if offset >= 0 else unwrap(const(columns) * -offset), i64)
    )
    return c.b.gather(flat, at, axis=len(rest))


# --- parts --------------------------------------------------------------------------------------------------------------------


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
    """An index that may count from the end, from the front. Symbolic ones count from the front: torch has asserted that."""
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
        at = unwrap((const(n) - shift) % n) if isinstance(n, int) else (unwrap(const(n) - shift) if shift >= 0 else -shift)
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


# --- joins --------------------------------------------------------------------------------------------------------------------


def cat(c: Call) -> Any:
    """Operands of no elements and one axis are passed over, as torch does for old times' sake."""
    rank = len(c.shape)
    xs = [c.cast(x, c.dtype) for x in c.args["tensors"] if not (x.type.rank == 1 and rank > 1 and x.type.shape[0] == 0)]
    return c.b.concat(*xs, axis=c.axis("dim", rank)) if len(xs) > 1 else c.b.identity(xs[0])


def stack(c: Call) -> Any:
    axis = c.axis("dim", len(c.shape))
    return c.b.concat(*(c.b.unsqueeze(c.cast(x, c.dtype), axes=(axis,)) for x in c.args["tensors"]), axis=axis)


def repeat(c: Call) -> Any:
    x, repeats = c.x(), tuple(c.args["repeats"])
    if x.type.rank < len(repeats):
        x = c.b.reshape(x, shape=(*(1,) * (len(repeats) - x.type.rank), *x.type.shape))
    return c.b.tile(x, repeats=repeats)


def replaced(c: Call, x: Value, src: Value, axis: int, start: Dim, size: Dim) -> Value:
    """`x` with `size` indices of an axis taken from `src`."""
    end = unwrap(const(start) + size)
    rest = unwrap(const(x.type.shape[axis]) - end)
    parts = [part(c, x, axis, 0, start)] if start != 0 else []
    parts.append(src)
    parts += [part(c, x, axis, end, rest)] if rest != 0 else []
    made: Value = c.b.concat(*parts, axis=axis) if len(parts) > 1 else c.b.identity(src)
    return made


def slice_scatter(c: Call) -> Any:
    x, axis, src = c.x(), c.axis(), c.cast(c.x("src"), c.dtype)
    if c.integer("step", 1) != 1:
        raise UnsupportedError("writing to every n-th index of an axis: write to all, or use index_put")
    if src.type.shape[axis] == 0:
        return c.b.identity(x)
    return replaced(c, x, src, axis, placed(c, c.get("start", 0), x.type.shape[axis]), src.type.shape[axis])


def select_scatter(c: Call) -> Any:
    x, axis, src = c.x(), c.axis(), c.cast(c.x("src"), c.dtype)
    row = c.b.reshape(src, shape=(*x.type.shape[:axis], 1, *x.type.shape[axis + 1 :]))
    return replaced(c, x, row, axis, placed(c, c.args["index"], x.type.shape[axis]), 1)


def copy(c: Call) -> Any:
    """The second operand in type and shape of the first."""
    y, shape = c.cast(c.x("src"), c.dtype), c.shape
    if y.type.rank < len(shape):
        y = c.b.reshape(y, shape=(*(1,) * (len(shape) - y.type.rank), *y.type.shape))
    return c.b.expand(y, shape=shape) if y.type.shape != shape else c.b.identity(y)


# --- padding ------------------------------------------------------------------------------------------------------------------


def padding(c: Call, pads: Sequence[Dim], rank: int) -> tuple[Dim, ...]:
    """torch gives pairs from the last axis on; all begins, then all ends."""
    begins: list[Dim] = [0] * rank
    ends: list[Dim] = [0] * rank
    for k in range(len(pads) // 2):
        begins[rank - 1 - k], ends[rank - 1 - k] = pads[2 * k], pads[2 * k + 1]
    return (*begins, *ends)


def constant_pad(c: Call) -> Any:
    x = c.x()
    return c.b.pad(x, c.operand("value", c.dtype) if c.get("value") else None, pads=padding(c, c.args["pad"], x.type.rank))


def bordered(mode: str) -> Converter:
    return lambda c: c.b.pad(c.x(), pads=padding(c, c.args["padding"], c.x().type.rank), mode=mode)


def pixel_shuffle(c: Call) -> Any:
    return c.b.depth_to_space(c.x(), block=c.integer("upscale_factor"), mode="CRD")


IDENTICAL = "alias clone detach lift_fresh_copy lift_fresh contiguous alias_copy detach_copy".split()
MOVEMENT: dict[str, Converter] = {
    **{n: same for n in IDENTICAL},
    **{n: view for n in "_unsafe_view reshape unsqueeze squeeze flatten unflatten _reshape_alias view_copy unsqueeze_copy squeeze_copy".split()},
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
    "cat": cat,
    "stack": stack,
    "repeat": repeat,
    "slice_scatter": slice_scatter,
    "select_scatter": select_scatter,
    "copy": copy,
    "constant_pad_nd": constant_pad,
    **{f"reflection_pad{k}d": bordered("reflect") for k in (1, 2, 3)},
    **{f"replication_pad{k}d": bordered("edge") for k in (1, 2, 3)},
    "pixel_shuffle": pixel_shuffle,
}
