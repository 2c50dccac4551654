"""Pooling over regions: one operator for what an import made of it.

w = roi_weights(rois, column=1); r = roi_rows(x, batch, w); v = roi_weights(rois, column=0); y = roi_columns(r, v)
    -> y = RoiAlign(x, rois, batch)
"""

from __future__ import annotations

from dataclasses import dataclass

from dnnc.export.call import Call, Convert
from dnnc.export.writer import ELEMENTS
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.graph import Graph, Node, Value
from dnnc.passes.rewrite import producer


@dataclass(frozen=True)
class Pooled:
    """What a `roi_columns` is made of: images, regions and their images' numbers, and the nodes between."""

    operands: tuple[Value, Value, Value]
    between: tuple[Node, ...]


def pooled(n: Node) -> Pooled | None:
    """The chain that ends with a node; None where it is another one, or others read what is between."""
    if n.op.name != "roi_columns":
        return None
    rows, across = producer(n.inputs[0], "roi_rows"), producer(n.inputs[1], "roi_weights")
    down = producer(rows.inputs[2], "roi_weights") if rows is not None else None
    if rows is None or across is None or down is None or down.inputs[0] is not across.inputs[0]:
        return None
    alike = all(down.attrs[k] == across.attrs[k] for k in ("ratio", "scale", "half_pixel"))
    between = (down, rows, across)
    alone = all(len(m.output.uses) == 1 and m.graph is not None and not m.graph.is_output(m.output) for m in between)
    x, batch, regions = rows.inputs[0], rows.inputs[1], down.inputs[0]
    fits = alike and alone and (down.attrs["column"], across.attrs["column"]) == (1, 0)
    return (
        Pooled((x, regions, batch), between)
        if fits and x is not None and batch is not None and regions is not None
        else None
    )


def chains(graph: Graph) -> dict[Node, Pooled]:
    """By their last node."""
    return {n: p for n in graph.nodes() if (p := pooled(n)) is not None}


def roi_align(c: Call) -> str:
    """Called with the operands of the chain: images, regions, numbers."""
    p = pooled(c.node)
    if p is None:
        raise UnsupportedError("ONNX has no form of it but as the end of RoiAlign")
    down, _, across = p.between
    return _align(c, "avg", (down.attrs["bins"], across.attrs["bins"]), down)


def roi_align_max(c: Call) -> str:
    return _align(c, "max", c.attrs["bins"], c.node)


def _align(c: Call, mode: str, bins: tuple[int, int], n: Node) -> str:
    a, w = n.attrs, c.w
    x, regions, batch = c.inputs
    assert x is not None and batch is not None
    numbers = w.op("Cast", batch, to=ELEMENTS["i64"])
    moved = "half_pixel" if a["half_pixel"] else "output_half_pixel"
    return w.op(  # type: ignore[no-any-return]
        "RoiAlign", x, regions, numbers, mode=mode, output_height=bins[0], output_width=bins[1],
        sampling_ratio=a["ratio"], spatial_scale=a["scale"],
        coordinate_transformation_mode=moved,
    )  # fmt: skip


REGIONS: dict[str, Convert] = {
    "roi_columns": roi_align,
    "roi_align_max": roi_align_max,
}
