"""Transposed convolutions as convolutions: one for all phases of the stride, then the phases are interleaved.

    y = conv_transpose(x, w, stride s)   ->   z = conv(x, w'); y = interleave(z, strides=s)

Output u = s*q + r gathers x[q - m] * w[s*m + r] over m: for each phase r a convolution of stride 1 with every s-th tap. The phases of
all axes become channels of one convolution, whose weights are rearranged once (the sub-pixel form of Shi et al., "Is the deconvolution
layer the same as a convolutional layer?", 2016). Nothing is multiplied with the zeros that a stretched input would have. Where images lie
in blocks of channels, each phase has whole blocks, if need be with channels of zeros: then whole vectors change places.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np

from dnnc.ir.builder import Builder
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.ops.window import Window, window
from dnnc.passes.base import PassContext
from dnnc.passes.graph.prologue import held_in


def conv_transpose(graph: Graph, ctx: PassContext) -> bool:
    """Rewrite those with constant weights (or parameters), one group and no dilation, on images of known size. Returns whether any was."""
    changed = False
    for n in graph.nodes():
        if n.op.name == "conv_transpose" and _applies(graph, n):
            y = _rewritten(graph, n, 1 if ctx.channels_last else ctx.lanes)
            graph.replace_all_uses(n.output, y)
            graph.erase(n)
            changed = True
    return changed


def _applies(graph: Graph, n: Node) -> bool:
    x, w = n.inputs[0], n.inputs[1]
    assert x is not None and w is not None
    win = _window(n)
    sized = all(isinstance(d, int) for d in (*x.type.shape[1:], *n.output.type.shape[1:]))
    plain = n.attrs["group"] == 1 and all(d == 1 for d in win.dilations) and all(isinstance(p, int) and p >= 0 for p in (*win.begin, *win.end))
    return sized and plain and graph.settled(w)


def _window(n: Node) -> Window:
    w = n.inputs[1]
    assert w is not None
    return window(w.type.rank - 2, w.type.shape[2:], n.attrs["strides"], n.attrs["pads"], n.attrs["dilations"])


def _rewritten(graph: Graph, n: Node, block: int) -> Value:
    x, w, bias = n.inputs[0], n.inputs[1], n.inputs[2] if len(n.inputs) > 2 else None
    assert x is not None and w is not None
    win, b = _window(n), Builder(graph, n, n.locs)
    strides, rank = win.strides, len(win.strides)
    taps = [math.ceil(int(k) / s) for k, s in zip(win.kernel, strides)]  # type: ignore[arg-type]
    phases = math.prod(strides)
    outs, channels = n.output.type.shape, int(n.output.type.shape[1])  # type: ignore[arg-type]
    needed = [math.ceil((int(begin) + int(o)) / s) for begin, o, s in zip(win.begin, outs[2:], strides)]  # type: ignore[arg-type]
    pads = [m - 1 for m in taps] + [q - int(size) for q, size in zip(needed, x.type.shape[2:])]  # type: ignore[arg-type]
    more = -channels % block if phases > 1 and 2 * channels >= block else 0
    if w in graph.constants:
        weights = b.constant(phase_filters(np.pad(graph.constants[w], [(0, 0), (0, more), *[(0, 0)] * rank]), strides, taps))
    else:
        weights = _later_filters(graph, w, more, strides, taps)
    spread = b.constant(np.tile(np.pad(graph.constants[bias], (0, more)), phases)) if bias is not None and bias in graph.constants else None
    y = b.conv(x, weights, spread, pads=tuple(pads))
    if phases > 1:
        y = b.interleave(y, strides=strides, channels=channels)
    starts = (0, 0, *(int(p) for p in win.begin))  # type: ignore[arg-type]
    if any(starts) or any(q * s != o for q, s, o in zip(needed, strides, outs[2:])):
        y = b.slice(y, starts=starts, steps=(1,) * (rank + 2), shape=outs)
    if bias is not None and spread is None:
        y = b.add(y, b.reshape(bias, shape=(1, channels, *(1,) * rank)))
    assert isinstance(y, Value)
    return y


def _later_filters(graph: Graph, w: Value, more: int, strides: tuple[int, ...], taps: list[int]) -> Value:
    """`phase_filters` of a parameter, with `more` outputs that are 0, in the prologue."""
    assert graph.prologue is not None
    b, rank = Builder(graph.prologue), len(strides)
    c, o, *kernel = (int(str(d)) for d in w.type.shape)
    grown = b.pad(held_in(graph, w), None, pads=(0,) * (rank + 2) + (0, more, *(s * m - k for s, m, k in zip(strides, taps, kernel))))
    parts = []
    for phase in product(*(range(s) for s in strides)):
        last = tuple(s * (m - 1) + r for s, m, r in zip(strides, taps, phase))  # the taps backwards
        part = b.slice(grown, starts=(0, 0, *last), steps=(1, 1, *(-s for s in strides)), shape=(c, o + more, *taps))
        parts.append(b.transpose(part, perm=(1, 0, *range(2, rank + 2))))
    made = b.concat(*parts, axis=0) if len(parts) > 1 else parts[0]
    return graph.parameter(made, made.type, w.name)


def phase_filters(w: np.ndarray[Any, Any], strides: tuple[int, ...], taps: list[int]) -> np.ndarray[Any, Any]:
    """[C, O, *K] -> [phases * O, C, *taps]: filter of phase r at tap t is w at s*(taps - 1 - t) + r, zero past the kernel."""
    grown = np.pad(w, [(0, 0), (0, 0)] + [(0, s * m - k) for s, m, k in zip(strides, taps, w.shape[2:])])
    out = []
    for phase in product(*(range(s) for s in strides)):
        part = grown[(slice(None), slice(None), *(slice(r, None, s) for r, s in zip(phase, strides)))]
        out.append(np.flip(part, tuple(range(2, part.ndim))).swapaxes(0, 1))
    return np.ascontiguousarray(np.concatenate(out))
