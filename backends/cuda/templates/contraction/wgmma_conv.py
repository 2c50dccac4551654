"""Which convolutions the kernel of `wgmma_kernel.py` takes: images of 1 to 3 axes and filters with their channels last,
in rows that may be padded with zeros to whole vectors, where the copy engine itself gathers the pixels that a tap of
the filter meets. The nest is compared with what the convolution's attributes say; else other templates serve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dnnc.backends.cuda.hopper import walkable
from dnnc.backends.cuda.templates.contraction.wgmma_kernel import Window, digits
from dnnc.ir.dtype import f16
from dnnc.ir.expr import Expr, Load, Var, const, minimum, value
from dnnc.ir.graph import Node
from dnnc.ir.loops.stmt import Buffer
from dnnc.ir.op import ContractionForm
from dnnc.ir.ops.window import node_window
from dnnc.ir.types import TensorType
from dnnc.passes.rewrites.channels_last import last
from dnnc.passes.schedule.problem import Problem


@dataclass(frozen=True)
class Axis:
    """Of an image: pixels, pixels of the result, and the filter along it."""

    image: int
    result: int
    taps: int
    stride: int
    dilation: int
    begin: int

    @property
    def plain(self) -> bool:
        """Does each pixel of the result lie at its own of the image, with one tap?"""
        return self.taps == 1 and self.stride == 1 and self.begin == 0 and self.image == self.result


def window_of(
    problem: Problem, a: Load, a_at: Expr, b: Load, b_at: Expr, row: Var, col: Var, step: Var
) -> tuple[Window, Buffer, Buffer] | None:
    """Return a convolution's window, image and filter [tap, output channel, channel]; None if unsuitable.

    a_at and b_at are the offsets of the factors' elements by the row, the column and the step of the sum.
    """
    node = problem.anchor
    if node is None or node.op.contraction is not ContractionForm.CONVOLUTION or node.attrs["group"] != 1:
        return None
    x, w, y = node.inputs[0], node.inputs[1], node.outputs[0]
    if x is None or w is None:
        return None
    n, co, ci, out = _number(x.type.shape[0]), _number(w.type.shape[0]), _row(x.type), _number(y.type.shape[0])
    axes = _axes(node, x.type, w.type, y.type)
    if None in (n, co, ci, out) or axes is None or ci != _row(w.type) or not ci or not n or ci * a.buf.dtype.bytes % 16:
        return None
    images, axes = _merged(n, axes)
    shape, taps = tuple(x.result for x in axes), tuple(x.taps for x in axes)
    if not walkable(
        [x.image for x in axes],
        shape,
        [x.stride for x in axes],
        [x.begin for x in axes],
        [(x.taps - 1) * x.dilation for x in axes],
    ):
        return None
    tap, channel = digits(step // ci, taps), step % ci
    number, *at = digits(row, (1, *shape))
    place = tuple(p * x.stride + t * x.dilation - x.begin for x, p, t in zip(axes, at, tap))
    outs = (col, minimum(col, (co or 0) - 1))  # lanes that pad the result are of no filter
    rows = [_offset((co or 0, *taps, ci), (o, *tap, channel)) for o in outs]
    image_at = _offset((images, *(x.image for x in axes), ci), (number, *place, channel))
    if a_at is not image_at or not any(b_at is at_row for at_row in rows):
        return None  # the nest reads something else: a prologue, or a layout of its own
    image = Buffer(a.buf.name, a.buf.dtype, tuple(map(const, (images, *(x.image for x in axes), ci))))
    each, filters = math.prod(taps), (math.prod(taps), co or 0, ci)
    held = Buffer(b.buf.name, b.buf.dtype, tuple(map(const, filters)), "global", tuple(map(const, (ci, each * ci, 1))))
    found = Window(
        shape, taps, tuple(x.stride for x in axes), tuple(x.dilation for x in axes), tuple(x.begin for x in axes), ci
    )
    return found, image, held


def _number(d: object) -> int | None:
    return value(const(d))  # type: ignore[arg-type]


def _row(t: TensorType) -> int | None:
    """Elements of a row of channels in memory; None where these do not lie last."""
    n, block = _number(t.shape[1]), t.encoding.block(1)
    return None if n is None or t.encoding != last(t.rank, 0, block) else -(-n // block) * block


def _axes(node: Node, x: TensorType, w: TensorType, y: TensorType) -> list[Axis] | None:
    """The axes of a convolution's image, outermost first; None where a size is not known."""
    win = node_window(w.shape[2:], node.attrs)
    found = [
        [_number(v) for v in each]
        for each in zip(x.shape[2:], y.shape[2:], win.kernel, win.strides, win.dilations, win.begin)
    ]
    return None if any(v is None for each in found for v in each) else [Axis(*(v or 0 for v in each)) for each in found]


def _merged(images: int, axes: list[Axis]) -> tuple[int, list[Axis]]:
    """Drop axes: [n, d, h, w] under 1 x k x k -> [n * d, h, w]; under k x 1 x 1 -> [n, d, h * w]."""
    out: list[Axis] = []
    for k, x in enumerate(axes):
        if x.plain and not out and k + 1 < len(axes):
            images *= x.image
        elif x.plain and out and out[-1].plain:
            out[-1] = Axis(out[-1].image * x.image, out[-1].result * x.result, 1, 1, 1, 0)
        else:
            out.append(x)
    return images, out


def _offset(shape: tuple[int, ...], idx: tuple[Expr, ...]) -> Expr:
    return Buffer("x", f16, tuple(map(const, shape))).offset(idx)
