"""A product that reads a large array along its columns is made in parts, each with a transposed copy of its own.

    y = matmul(transpose(x: f32[1024, 50257]), w)    ->    y = concat(matmul(transpose(slice(x, :, 0:4064)), w),
                                                                      matmul(transpose(slice(x, :, 4064:8128)), w), ..)

Where the operand is copied first (`copied_first` in `fuse`), its copy is as large as itself: the gradient of a language
model's logits was in memory twice. Parts take turns in the same few megabytes, which stay in a cache; each writes its
rows of the result. No bit of it changes.
"""

from __future__ import annotations

from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.passes.base import PassContext
from dnnc.passes.planning.fuse import copied_first
from dnnc.passes.rewrite import producer, replace_each

PART = 1 << 22  # bytes of a part, at least
MOST_PARTS = 16
ROWS = 96  # the rows of a part are a multiple: parts end where tiles do


def split_transposes(graph: Graph, ctx: PassContext) -> bool:
    """Make large transposed copies in parts; returns whether anything changed."""
    if not ctx.facts.serial_rows:
        return False
    return replace_each(graph, {"matmul": lambda n: _split(graph, n)})


def _split(graph: Graph, n: Node) -> Value | None:
    left, right = n.inputs
    turned = producer(left, "transpose")
    if turned is None or left is None or right is None or not copied_first(left, n):
        return None
    x = turned.inputs[0]
    shape = left.type.shape
    if x is None or x.type.rank != 2 or right.type.rank != 2 or not all(isinstance(d, int) for d in shape):
        return None
    rows, columns, nbytes = (int(str(d)) for d in (*shape, left.type.nbytes))
    if turned.attrs["perm"] != (1, 0) or nbytes < 4 * PART:
        return None
    step = -(-max(PART, nbytes // MOST_PARTS) * rows // nbytes // ROWS) * ROWS
    b = Builder(graph, n, n.locs)
    parts = []
    for start in range(0, rows, step):
        size = min(step, rows - start)
        part = b.op("slice", x, starts=(0, start), steps=(1, 1), shape=(columns, size))
        parts.append(b.op(n.op, b.op(turned.op, part, **turned.attrs), right, **n.attrs))
    made: Value = b.op("concat", *parts, axis=0)
    return made
