"""Which convolutions the kernel of `wgmma_kernel.py` takes: images and filters with their channels last (NHWC), in rows that may be padded with
zeros to whole vectors, where the copy engine itself gathers the pixels that a tap of the filter meets. The nest is compared with what the
convolution's attributes say; where it differs, as with groups or a fused prologue, other templates are left to it.
"""

from __future__ import annotations

from dnnc.backends.cuda.templates.wgmma_kernel import Window
from dnnc.ir.dtype import f16
from dnnc.ir.expr import Expr, Load, Var, const, minimum, value
from dnnc.ir.graph import Node
from dnnc.ir.operator.stmt import Buffer
from dnnc.ir.types import TensorType
from dnnc.passes.schedule.problem import Problem

CHANNELS_LAST = "0 2 3 1"


def window_of(problem: Problem, a: Load, a_at: Expr, b: Load, b_at: Expr, row: Var, col: Var, step: Var) -> tuple[Window, Buffer, Buffer] | None:
    """The window, the image and the filter [tap, output channel, channel] of a convolution; None where it is none that suits.

    a_at and b_at are the offsets of the factors' elements by the numbers of the row, the column and the step of the sum.
    """
    node = problem.anchor
    if node is None or node.op.name != "conv" or node.attrs["group"] != 1:
        return None
    x, w, y = node.inputs[0], node.inputs[1], node.outputs[0]
    if x is None or w is None or x.type.rank != 4:
        return None
    sizes = [[value(const(d)) for d in v.type.shape] for v in (x, w, y)]
    channels = [_row(v.type) for v in (x, w, y)]
    if any(n is None for s in (*sizes, channels) for n in s) or channels[0] != channels[1]:
        return None
    (n, _, h, wd), (co, _, r, s), (_, _, p, q) = ([k or 0 for k in shape] for shape in sizes)
    ci = channels[0] or 0
    window = _window(node, (p, q), (r, s), ci)
    if window is None or ci * a.buf.dtype.bytes % 16:
        return None
    tap, channel = step // ci, step % ci
    at = (row // q % p, row % q), (tap // s, tap % s)
    down, across = (i * k + t * d - z for i, t, k, d, z in zip(*at, window.strides, window.dilations, window.begin))
    rows = [_offset((co, r, s, ci), (o, *at[1], channel)) for o in (col, minimum(col, co - 1))]  # lanes that pad the result are of no filter
    if a_at is not _offset((n, h, wd, ci), (row // (p * q), down, across, channel)) or not any(b_at is at_row for at_row in rows):
        return None  # the nest reads something else: a prologue, or a layout of its own
    image = Buffer(a.buf.name, a.buf.dtype, tuple(map(const, (n, h, wd, ci))))
    filters = Buffer(b.buf.name, b.buf.dtype, tuple(map(const, (r * s, co, ci))), "global", tuple(map(const, (ci, r * s * ci, 1))))
    return window, image, filters


def _row(t: TensorType) -> int | None:
    """Elements of a row of channels in memory; None where these do not lie last."""
    n, layout = value(const(t.shape[1])), t.layout
    block = layout.block(1) if layout is not None else 1
    if n is None or str(layout) not in (CHANNELS_LAST, f"0 2 3 1/{block} 1%{block}"):
        return None
    return -(-n // block) * block


def _window(node: Node, shape: tuple[int, int], taps: tuple[int, int], channels: int) -> Window | None:
    strides, dilations = node.attrs["strides"] or (1, 1), node.attrs["dilations"] or (1, 1)
    begin = (node.attrs["pads"] or (0, 0, 0, 0))[:2]
    numbers = [value(const(v)) for v in (*strides, *dilations, *begin)]
    if any(v is None for v in numbers):
        return None
    sh, sw, dh, dw, top, left = (v or 0 for v in numbers)
    return Window(shape, taps, (sh, sw), (dh, dw), (top, left), channels)


def _offset(shape: tuple[int, ...], idx: tuple[Expr, ...]) -> Expr:
    return Buffer("x", f16, tuple(map(const, shape))).offset(idx)
