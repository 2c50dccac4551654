"""Depthwise convolutions and pooling with channels last, interpreted against the naive nest and compiled."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.nvrtc import compile_cuda
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction import window
from dnnc.ir.expr import value
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.lower.nests import lower
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.schedule.problem import Problem, classify

H200 = GpuTarget()
LAST = '@ "0 2 3 1"'


def problem(text: str) -> Problem:
    g = parse(text)
    (group,) = plan_fusion(g).groups
    return classify(group.nodes, lower(g, group.nodes, group.outputs))


def depthwise(x: str, w: str, y: str, attrs: str, t: str = "f32") -> str:
    channels = w.split(",")[0]
    return f"""def g(x: {t}[{x}] {LAST}, w: {t}[{w}] @ "1 2 3 0", c: {t}[{channels}]):
    a: {t}[{y}] {LAST} = conv(x, w, c, group={channels}, {attrs})
    b: {t}[{y}] {LAST} = max(a, 0.0)
    return b"""


def pool(op: str, x: str, y: str, attrs: str, t: str = "f32") -> str:
    return f"def g(x: {t}[{x}] {LAST}):\n    y: {t}[{y}] {LAST} = {op}(x, {attrs})\n    return y"


CASES = [
    (depthwise("2, 16, 7, 6", "16, 1, 3, 3", "2, 16, 7, 6", "pads=(1, 1, 1, 1)"), 4, 4),
    (depthwise("1, 24, 9, 9", "24, 1, 5, 5", "1, 24, 5, 5", "pads=(2, 2, 2, 2), strides=(2, 2)", "f16"), 2, 8),
    (depthwise("1, 8, 9, 11", "8, 1, 3, 3", "1, 8, 5, 7", "dilations=(2, 2)"), 1, 4),
    (
        depthwise("1, 6, 5, 8", "6, 1, 3, 2", "1, 6, 3, 7", "strides=(1, 1)"),
        2,
        2,
    ),  # six channels are no whole vectors of 16 bytes
    (pool("max_pool", "2, 16, 9, 8", "2, 16, 5, 4", "kernel=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)", "f16"), 4, 8),
    (
        pool("max_pool", "1, 8, 9, 9", "1, 8, 9, 9", "kernel=(9, 9), pads=(4, 4, 4, 4)"),
        1,
        4,
    ),  # more taps than are unrolled
    (pool("avg_pool", "2, 8, 6, 6", "2, 8, 3, 3", "kernel=(2, 2), strides=(2, 2)"), 2, 4),
]


@pytest.mark.family("kernels")
@pytest.mark.parametrize("text, row, lanes", CASES)
def test_interpreted(text: str, row: int, lanes: int) -> None:
    p = problem(text)
    offered = [dict(k) for k in window.candidates(p, H200)]
    assert offered and offered[0]["lanes"] == lanes
    kernel = verify_kernel(window.apply(p, {"row": row, "lanes": lanes, "threads": 32}, H200))
    shown = show_kernel(kernel)
    assert show_kernel(parse_kernel(shown)) == shown
    rng = np.random.default_rng(0)
    found = []
    arrays = [rng.standard_normal([value(d) for d in b.shape]).astype(b.dtype.numpy) for b in kernel.entry.buffers]  # type: ignore[misc]
    for k in (kernel, p.kernel):
        mine = [a.copy() for a in arrays]
        run_kernel(k, {b.name: a for b, a in zip(k.entry.buffers, mine)})
        found.append(mine[-1])
    assert np.array_equal(*found)  # the order of each sum is the naive nest's


def test_what_is_no_window() -> None:
    """Channels first; few outputs of many terms; sums over channels."""
    assert not window.candidates(problem("def g(x: f32[2, 16, 9, 8]):\n    return max_pool(x, kernel=(3, 3))"), H200)
    assert not window.candidates(problem(pool("avg_pool", "1, 64, 7, 7", "1, 64, 1, 1", "kernel=(7, 7)")), H200)
    text = (
        f"def g(x: f32[1, 8, 9, 9] {LAST}, w: f32[8, 8, 3, 3] {LAST}):\n"
        f"    y: f32[1, 8, 7, 7] {LAST} = conv(x, w)\n    return y"
    )
    assert not window.candidates(problem(text), H200)


def test_pixels_of_a_thread() -> None:
    """Small images: as many threads as there are vectors. Large ones: pixels share what a thread reads."""
    small = depthwise("1, 240, 28, 28", "240, 1, 3, 3", "1, 240, 28, 28", "pads=(1, 1, 1, 1)", "f16")
    large = depthwise("32, 240, 56, 56", "240, 1, 3, 3", "32, 240, 56, 56", "pads=(1, 1, 1, 1)", "f16")
    assert dict(window.candidates(problem(small), H200)[0])["row"] == 1
    assert dict(window.candidates(problem(large), H200)[0])["row"] == 4


def compiled(text: str) -> Kernel:
    p = problem(text)
    kernel = verify_kernel(window.apply(p, dict(window.candidates(p, H200)[0]), H200))
    made = compile_cuda(emit_kernel(kernel, "window", H200), "sm_90a")
    assert made.spills == 0 and made.local_bytes == 0
    assert launch_of(kernel).block[0] <= 128
    return kernel


@pytest.mark.slow
def test_compiles() -> None:
    compiled(depthwise("1, 120, 28, 28", "120, 1, 5, 5", "1, 120, 28, 28", "pads=(2, 2, 2, 2)", "f16"))
