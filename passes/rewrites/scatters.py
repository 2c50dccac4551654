"""Scatters in the form in which their kernels are best.

    y = scatter_nd(x: f16, at, u, reduction="add")        ->    y = cast(scatter_nd(cast(x, to=f32), at, cast(u,
                                                                to=f32), ..), to=f16)
    y = scatter_elements(x, expand(r: [M, 1]), u)          ->    y = scatter_nd(x, r, u), an index for each row
    y = scatter_nd(x, [[0, 0], [0, 1], [0, 2]], u: [3])    ->    y = scatter_nd(x, [[0]], u: [1, 3]), where rows of x
                                                                 have 3 elements
    y = scatter_nd(x, [[2], [3]], u)                       ->    y = concat(slice(x, 0:2), u, slice(x, 4:n))
    y = scatter_nd([[0, 0, 0], [0, 0, 0]], at, u)          ->    y = scatter_nd(expand(0, shape=(2, 3)), at, u)
    y = add(p, scatter_nd(expand(0, ..), at, u,            ->    y = scatter_nd(p, at, u, reduction="add"), where
                          reduction="add"))                      p is a product or a scatter

Sums and products of less than 32 bits are added up in f32 and rounded once. Indices that are constants and name whole
rows, one after another, name these rows; those that name a box, once each, need no index: exporters' slice assignment.
What starts as one number everywhere is written by the scatter's kernel, which would read it else. A sum with a
product, such as the gradient of words that are embedded and multiplied by, starts as the product, in its memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir.dtype import f32
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.op import Trait
from dnnc.passes.base import PassContext
from dnnc.passes.rewrite import producer, replace_each

Array = np.ndarray[Any, Any]


def scatters(graph: Graph, ctx: PassContext) -> bool:
    """Name rows and ranges. Returns whether anything changed."""
    return replace_each(
        graph,
        {
            "scatter_elements": lambda n: _by_rows(graph, n) or _of_one_number(graph, n),
            "scatter_nd": lambda n: _of_ranges(graph, n) or _of_one_number(graph, n),
            "add": lambda n: None if ctx.strict else _into_sum(graph, n),
        },
    )


def _into_sum(graph: Graph, n: Node) -> Value | None:
    """A sum of a product, or of another scatter, and updates that are added to zeros."""
    for u, x in (n.inputs, n.inputs[::-1]):
        s = producer(u, "scatter_nd", "scatter_elements")
        if s is None or x is None or s.attrs["reduction"] != "add" or len(s.output.uses) != 1:
            continue
        same = x.type == s.output.type == n.output.type and not graph.is_output(s.output)
        stored = x.node is not None and not x.node.op.traits.isdisjoint((Trait.CONTRACTION, Trait.SCATTER))
        if same and stored and _is_zeros(graph, s.inputs[0]):
            made: Value = Builder(graph, n, n.locs).op(s.op, x, *s.inputs[1:], **s.attrs)
            return made
    return None


def _is_zeros(graph: Graph, v: Value | None) -> bool:
    """Is a value zero everywhere?"""
    filled = producer(v, "expand")
    constant = graph.constants.get(v if filled is None else filled.inputs[0])  # type: ignore[arg-type]
    return constant is not None and constant.dtype.kind in "fiu" and not constant.any()


def _of_one_number(graph: Graph, n: Node) -> Value | None:
    """A scatter into a constant whose elements are equal."""
    x, at, u = n.inputs
    constant = None if x is None else graph.constants.get(x)
    if constant is None or constant.size < 2 or constant.dtype.kind in "OSU":
        return None
    parts = np.ascontiguousarray(constant).reshape(constant.size, 1).view(np.uint8)
    if (parts != parts[:1]).any():
        return None
    b = Builder(graph, n, n.locs)
    start = b.expand(b.constant(constant.reshape(-1)[0]), shape=constant.shape)
    return b.op(n.op, start, at, u, **n.attrs)  # type: ignore[no-any-return]


def wide_sums(graph: Graph, ctx: PassContext) -> bool:
    """Sums and products of floats of less than 32 bits in f32."""
    return replace_each(graph, dict.fromkeys(("scatter_elements", "scatter_nd"), lambda n: _wide(graph, n)))


def _wide(graph: Graph, n: Node) -> Value | None:
    t = n.output.type.dtype
    if not t.is_float or t.computed is t or n.attrs["reduction"] not in ("add", "mul"):
        return None
    x, at, u = n.inputs
    b = Builder(graph, n, n.locs)
    return b.cast(b.op(n.op, b.cast(x, to=f32), at, b.cast(u, to=f32), **n.attrs), to=t)  # type: ignore[no-any-return]


def _by_rows(graph: Graph, n: Node) -> Value | None:
    """`scatter_elements` along axis 0 whose indices are the same for all elements of a row."""
    x, at, u = n.inputs
    assert x is not None and at is not None and u is not None
    if x.type.rank < 2 or n.attrs["axis"] % x.type.rank or at.type.shape[1:] != x.type.shape[1:]:
        return None
    constant, b = graph.constants.get(at), Builder(graph, n, n.locs)
    rows: Any = None
    if (
        constant is not None
        and constant.size
        and (constant == constant[(slice(None), *[slice(0, 1)] * (x.type.rank - 1))]).all()
    ):
        rows = constant.reshape(len(constant), -1)[:, :1]
    elif (repeated := producer(at, "expand")) is not None and repeated.inputs[0] is not None:
        source = repeated.inputs[0]
        if (
            source.type.rank == x.type.rank
            and all(d == 1 for d in source.type.shape[1:])
            and source.type.shape[0] == at.type.shape[0]
        ):
            rows = b.reshape(source, shape=(source.type.shape[0], 1))
    return None if rows is None else b.scatter_nd(x, rows, u, reduction=n.attrs["reduction"])


def _of_ranges(graph: Graph, n: Node) -> Value | None:
    """`scatter_nd` with constant indices that name neighbours."""
    x, at, u = n.inputs
    assert x is not None and at is not None and u is not None
    constant = graph.constants.get(at)
    if constant is None or not constant.size or not all(isinstance(d, int) for d in (*x.type.shape, *u.type.shape)):
        return None
    sizes = np.array(x.type.shape[: constant.shape[-1]], np.int64)
    where = constant.astype(np.int64)
    where = np.where(where < 0, where + sizes, where)
    if (where < 0).any() or (where >= sizes).any():
        return None  # an error, which the kernel reports
    kept = where
    while kept.shape[-1] > 1 and kept.ndim > 1 and _whole_rows(kept, int(sizes[kept.shape[-1] - 1])):
        kept = kept[..., 0, :-1]
    b = Builder(graph, n, n.locs)
    box = _box(kept) if n.attrs["reduction"] == "none" else None
    if box is not None:
        start, size = box
        return _put(b, x, b.reshape(u, shape=(*size, *x.type.shape[len(size) :])), start, size)
    if kept.shape == where.shape:
        return None
    return b.scatter_nd(x, np.ascontiguousarray(kept), u, reduction=n.attrs["reduction"])  # type: ignore[no-any-return]


def _whole_rows(at: Array, size: int) -> bool:
    """Do the last axis of updates and the last number of the index run through a row together?"""
    return (
        at.shape[-2] == size
        and bool((at[..., -1] == np.arange(size)).all())
        and bool((at[..., :-1] == at[..., :1, :-1]).all())
    )


def _box(at: Array) -> tuple[list[int], list[int]] | None:
    """The first index and the sizes of a box whose places `at` names, each once and in order."""
    rows = at.reshape(-1, at.shape[-1])
    start, size = rows[0], rows[-1] - rows[0] + 1
    if (size < 1).any() or size.prod() != len(rows):
        return None
    every = np.stack(np.unravel_index(np.arange(len(rows)), tuple(size)), 1) + start
    return ([*map(int, start)], [*map(int, size)]) if (every == rows).all() else None


def _put(b: Builder, x: Value, box: Value, start: list[int], size: list[int]) -> Value:
    """x with the box in it: around it, axis by axis from the last, the parts of x."""
    shape = [int(str(d)) for d in x.type.shape]

    def part(axis: int, lo: int, hi: int) -> Value:
        starts = [*start[:axis], lo, *[0] * (len(shape) - axis - 1)]
        cut = (*size[:axis], hi - lo, *shape[axis + 1 :])
        return b.op("slice", x, starts=tuple(starts), steps=(1,) * len(shape), shape=cut)  # type: ignore[no-any-return]

    for axis in reversed(range(len(start))):
        lo, hi = start[axis], start[axis] + size[axis]
        pieces = [part(axis, 0, lo)] if lo else []
        pieces += [box, *([part(axis, hi, shape[axis])] if hi < shape[axis] else [])]
        box = b.op("concat", *pieces, axis=axis) if len(pieces) > 1 else box
    return box
