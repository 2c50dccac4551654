"""Constants that loops and branches capture move into the bodies."""

from __future__ import annotations

import numpy as np

from dnnc.passes.rewrites.capture_loop_constants import sink_constants
from support.passes import check_pass

LOOP = (
    """\
def main(x: f32[2, 3], xs: f32[4, 2, 3], *, w: f32[3, 3], b: f32[3]):
    def body(k: i64, h: f32[2, 3], r: f32[2, 3], b: f32[3], u: f32[3, 3]):
        def inner(j: i64, a: f32[2, 3], v: f32[3, 3]):
            m: f32[2, 3] = matmul(a, v)
            return (m,)
        g: f32[2, 3] = loop(None, None, h, u, body=inner, carried=1, scanned=0, length=2)
        y: f32[2, 3] = add(g, b)
        return (y,)
    h: f32[2, 3] = loop(None, None, x, xs, b, w, body=body, carried=1, scanned=1, length=4)
    return h
""",
    """\
def main(x: f32[2, 3], xs: f32[4, 2, 3]):
    def body(k: i64, h: f32[2, 3], r: f32[2, 3], *, b: f32[3]):
        def inner(j: i64, a: f32[2, 3], *, v: f32[3, 3]):
            m: f32[2, 3] = matmul(a, v)
            return (m,)
        g: f32[2, 3] = loop(None, None, h, body=inner, carried=1, scanned=0, length=2)
        y: f32[2, 3] = add(g, b)
        return (y,)
    h: f32[2, 3] = loop(None, None, x, xs, body=body, carried=1, scanned=1, length=4)
    return h
""",
)
COND = (
    """\
def main(c: bool, x: f32[3], *, w: f32[3]):
    def a(x: f32[3], w: f32[3]):
        y: f32[3] = add(x, w)
        return (y,)
    def b(x: f32[3], w: f32[3]):
        y: f32[3] = mul(x, w)
        return (y,)
    r: f32[3] = cond(c, x, w, then=a, other=b)
    return r
""",
    """\
def main(c: bool, x: f32[3]):
    def a(x: f32[3], *, w: f32[3]):
        y: f32[3] = add(x, w)
        return (y,)
    def b(x: f32[3], *, w: f32[3]):
        y: f32[3] = mul(x, w)
        return (y,)
    r: f32[3] = cond(c, x, then=a, other=b)
    return r
""",
)


def test_weights_go_all_the_way_in() -> None:
    rng = np.random.default_rng(0)
    w, b = rng.standard_normal((3, 3)).astype("f4"), rng.standard_normal(3).astype("f4")
    check_pass(sink_constants, *LOOP, constants={"w": w, "b": b, "v": w})


def test_both_branches_get_them() -> None:
    check_pass(sink_constants, *COND, constants={"w": np.arange(3, dtype="f4")})
