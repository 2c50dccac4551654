"""Which outputs of a group one nest of loops can store, and where each lies in the largest of them.

y: f32[64, 100] = sub(x, m)                           the loops are those over y
m: f32[64, 1] = reduce_mean(x, axes=(1,))             stored once for each row, ahead of the loop over it
z: u8[64, 100] = cast(greater(y, 0.0), to=u8)         stored beside y
"""

from __future__ import annotations

from collections.abc import Sequence

from dnnc.ir.graph import Node, Value
from dnnc.ir.types import Layout
from dnnc.passes.analysis.rows import rows_of


def places_in(nodes: Sequence[Node], main: Value, v: Value) -> tuple[int | None, ...] | None:
    """The axis of `main` that each axis of another output of a group is, or None for axes of one element. None where
    there is no such thing: `v` then cannot be stored by the loops over `main`.

    Both have the same elements, or v has the numbers of the rows that `main` has the elements of.
    """
    shape = main.type.shape
    if v.type.layout is not None:
        same = v.type.layout == main.type.layout and tuple(v.type.shape) == tuple(shape)
        return tuple(range(v.type.rank)) if same else None
    long = [k for k, d in enumerate(shape) if d != 1]
    mine = [k for k, d in enumerate(v.type.shape) if d != 1]
    if len(mine) != len(long) or main.type.layout is not None:
        rows = next((r for r in map(rows_of, nodes) if r is not None), None)
        if rows is None or not rows.of_elements(main):
            return None
        long = [k for k in long if k not in rows.axes]
        if main.type.layout is not None and _padded(main, long):
            return None  # its loops pass over lanes that are no row
    if [v.type.shape[k] for k in mine] != [shape[k] for k in long]:
        return None
    axis: dict[int, int] = dict(zip(mine, long))
    return tuple(axis.get(k) for k in range(v.type.rank))


def _padded(v: Value, axes: Sequence[int]) -> bool:
    """Has one of these axes lanes that are no element?"""
    layout = v.type.layout
    own = () if layout is None else tuple(p for p in layout.parts if p.axis in axes)
    return Layout(own).padded(v.type.shape)


def main_output(nodes: Sequence[Node], outputs: Sequence[Value]) -> Value | None:
    """The output whose loops store all of them; None where there is none."""
    fits = (m for m in reversed(outputs) if all(v is m or places_in(nodes, m, v) is not None for v in outputs))
    return next(fits, None)
