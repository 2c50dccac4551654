"""Operators that put tensors together: joins, repetitions, writing into a part, padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dnnc.frontends.torch.call import Call
from dnnc.frontends.torch.movement import part, placed
from dnnc.ir.dtype import i64
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.expr import const, unwrap
from dnnc.ir.graph import Value
from dnnc.ir.types import Dim

Converter = Callable[[Call], Any]


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
    if (step := c.integer("step", 1)) != 1:
        start = placed(c, c.get("start", 0), x.type.shape[axis])
        rows = tuple(
            slice(start, None, step) if k == axis else slice(None) for k in range(x.type.rank)
        )  # slice takes no more than src has
        at = numbered(x.type.shape)[rows]
        return scattered(c, x, src, at[tuple(slice(int(str(n))) for n in src.type.shape)])
    if src.type.shape[axis] == 0:
        return c.b.identity(x)
    return replaced(c, x, src, axis, placed(c, c.get("start", 0), x.type.shape[axis]), src.type.shape[axis])


def select_scatter(c: Call) -> Any:
    x, axis, src = c.x(), c.axis(), c.cast(c.x("src"), c.dtype)
    row = c.b.reshape(src, shape=(*x.type.shape[:axis], 1, *x.type.shape[axis + 1 :]))
    return replaced(c, x, row, axis, placed(c, c.args["index"], x.type.shape[axis]), 1)


def scattered(c: Call, x: Value, src: Value, at: np.ndarray[Any, Any]) -> Any:
    """`x` with elements of its rows in memory replaced: of number at[i] by src[i]."""
    flat, places = c.b.reshape(x, shape=(x.type.size,)), c.b.constant(at.reshape(-1), dtype=i64)
    y = c.b.scatter_elements(flat, places, c.b.reshape(src, shape=(at.size,)), axis=0)
    return c.b.reshape(y, shape=x.type.shape)


def numbered(shape: Sequence[Dim]) -> np.ndarray[Any, Any]:
    """The number of each element."""
    if not all(isinstance(n, int) for n in shape):
        raise UnsupportedError("writing to a view of sizes that are not known")
    sizes = [int(n) for n in shape]  # type: ignore[arg-type]
    return np.arange(math.prod(sizes)).reshape(sizes)


def diagonal_scatter(c: Call) -> Any:
    x, rank = c.x(), c.x().type.rank
    axes = c.integer("dim1", 0) % rank, c.integer("dim2", 1) % rank
    return scattered(c, x, c.cast(c.x("src"), c.dtype), numbered(x.type.shape).diagonal(c.integer("offset", 0), *axes))


def as_strided_scatter(c: Call) -> Any:
    x = c.x()
    at: Any = c.integer("storage_offset", 0)
    if not c.fakes["self"].is_contiguous():
        raise UnsupportedError("as_strided_scatter of a view: write it by slices, permute and reshape")
    for n, s in zip(c.ints("size"), c.ints("stride")):
        at = np.add.outer(at, np.arange(n) * s)
    return scattered(c, x, c.cast(c.x("src"), c.dtype), np.asarray(at))


def copy(c: Call) -> Any:
    """The second operand in type and shape of the first."""
    y, shape = c.cast(c.x("src"), c.dtype), c.shape
    if y.type.rank < len(shape):
        y = c.b.reshape(y, shape=(*(1,) * (len(shape) - y.type.rank), *y.type.shape))
    return c.b.expand(y, shape=shape) if y.type.shape != shape else c.b.identity(y)


def padding(c: Call, pads: Sequence[Dim], rank: int) -> tuple[Dim, ...]:
    """torch gives pairs from the last axis on; all begins, then all ends."""
    begins: list[Dim] = [0] * rank
    ends: list[Dim] = [0] * rank
    for k in range(len(pads) // 2):
        begins[rank - 1 - k], ends[rank - 1 - k] = pads[2 * k], pads[2 * k + 1]
    return (*begins, *ends)


def constant_pad(c: Call) -> Any:
    x = c.x()
    return c.b.pad(
        x, c.operand("value", c.dtype) if c.get("value") else None, pads=padding(c, c.args["pad"], x.type.rank)
    )


def bordered(mode: str) -> Converter:
    return lambda c: c.b.pad(c.x(), pads=padding(c, c.args["padding"], c.x().type.rank), mode=mode)


def pixel_shuffle(c: Call) -> Any:
    return c.b.depth_to_space(c.x(), block=c.integer("upscale_factor"), mode="CRD")


JOINS: dict[str, Converter] = {
    "cat": cat,
    "stack": stack,
    "repeat": repeat,
    "slice_scatter": slice_scatter,
    "select_scatter": select_scatter,
    "diagonal_scatter": diagonal_scatter,
    "as_strided_scatter": as_strided_scatter,
    "copy": copy,
    "constant_pad_nd": constant_pad,
    "pixel_shuffle": pixel_shuffle,
    **{f"reflection_pad{k}d": bordered("reflect") for k in (1, 2, 3)},
    **{f"replication_pad{k}d": bordered("edge") for k in (1, 2, 3)},
}
