"""Loops and branches, native, against the interpreter: every level, one and two threads, several numbers of iterations;
saved and profiled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.ir.errors import ParseError
from dnnc.ir.graph import Graph
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify

pytestmark = pytest.mark.family("cases")

CASES = {
    "rows in and out": """
def main(x: f32[4, 24], xs: f32[5, 4, 24], *, w: f32[24, 24]):
    def body(k: i64, h: f32[4, 24], r: f32[4, 24], u: f32[24, 24]):
        a = tanh(add(matmul(h, u), r))
        return a, mul(a, 2.0)
    (h, s) = loop(None, None, x, xs, w, body=body, carried=1, scanned=1, length=5)
    return h, relu(s)
""",
    "backward": """
def main(x: f32[2], xs: f32[6, 2]):
    def body(k: i64, h: f32[2], r: f32[2]):
        a = add(mul(h, 0.5), r)
        return a, a, mul(r, cast(k, to=f32))
    (h, s, t) = loop(None, None, x, xs, body=body, carried=1, scanned=1, length=6, backward=(True, True, False))
    return h, s, t
""",
    "a number of iterations that a call gives": """
def main(n: i64, x: f32[3, 40], y: f32[40]):
    def body(k: i64, a: f32[3, 40], b: f32[40]):
        return softmax(add(a, b)), sub(b, reduce_mean(a, axes=(0,)))
    (p, q) = loop(n, None, x, y, body=body, carried=2)
    return add(p, q), q
""",
    "at most so many": """
def main(n: i64, x: f32[7]):
    def body(k: i64, a: f32[7]):
        return (add(a, 1.0),)
    return loop(n, None, x, body=body, carried=1, length=3)
""",
    "while": """
def main(n: i64, x: f32[3]):
    def body(k: i64, v: f32[3], c: f32):
        y = mul(v, 1.5)
        return less(reduce_sum(y, axes=(0,)), c), y
    c = mul(cast(n, to=f32), 4.0)
    a = abs(x)
    return loop(None, less(reduce_sum(a, axes=(0,)), c), a, c, body=body, carried=1)
""",
    "loops in loops": """
def main(n: i64, x: f32[40, 40]):
    def body(k: i64, h: f32[40, 40]):
        def inner(j: i64, a: f32[40, 40], kk: i64):
            return add(mul(matmul(a, a), 0.02), mul(cast(add(j, kk), to=f32), 0.1))
        return tanh(loop(k, None, h, k, body=inner, carried=1))
    return loop(n, None, x, body=body, carried=1)
""",
    "swap": """
def main(n: i64, x: f32[30], y: f32[30]):
    def body(k: i64, a: f32[30], b: f32[30]):
        return b, a
    (p, q) = loop(n, None, x, y, body=body, carried=2)
    return p, q
""",
    "many elements and odd bytes": """
def main(n: i64, x: u8[100003], f: f32[200, 130]):
    def body(k: i64, a: u8[100003], g: f32[200, 130]):
        return add(a, 3), mul(g, 1.01)
    (p, q) = loop(n, None, x, f, body=body, carried=2)
    return p, q
""",
    "branches": """
def main(n: i64, x: f32[30, 40], y: f32[30, 40]):
    def a(x: f32[30, 40], y: f32[30, 40]):
        return softmax(add(x, y)), x
    def b(x: f32[30, 40], y: f32[30, 40]):
        return matmul(x, transpose(matmul(transpose(y, perm=(1, 0)), x), perm=(1, 0))), relu(y)
    (p, q) = cond(equal(mod(n, 2), 0), x, y, then=a, other=b)
    return add(p, q), q
""",
    "a branch in a loop": """
def main(n: i64, x: f32[2, 16], *, w: f32[16, 16]):
    def body(k: i64, h: f32[2, 16], u: f32[16, 16]):
        def odd(h: f32[2, 16], u: f32[16, 16]):
            return (matmul(h, u),)
        def even(h: f32[2, 16], u: f32[16, 16]):
            return (tanh(h),)
        return cond(equal(mod(k, 2), 1), h, u, then=odd, other=even)
    return loop(n, None, x, w, body=body, carried=1)
""",
}


def graph(name: str) -> Graph:
    rng = np.random.default_rng(0)
    shapes = {"rows in and out": (24, 24), "a branch in a loop": (16, 16)}
    return parse(CASES[name], {"w": rng.standard_normal(shapes.get(name, ())).astype(np.float32) * 0.3})


def inputs_of(g: Graph, n: int) -> list[Any]:
    rng = np.random.default_rng(n)
    out: list[Any] = []
    for v in g.inputs:
        if v.type.dtype.name == "i64":
            out.append(np.int64(n))
        elif v.type.dtype.is_int:
            out.append(rng.integers(0, 200, v.type.shape).astype(v.type.dtype.numpy))
        else:
            out.append(rng.standard_normal(v.type.shape).astype(np.float32))
    return out


def several(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def check(f: Any, g: Graph, n: int) -> None:
    inputs = inputs_of(g, n)
    want = several(dnnc.compile(g, target="reference")(*inputs))
    for a, b in zip(several(f(*inputs)), want):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6 * max(1.0, float(np.abs(b).max())))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str, tmp_path: Any) -> None:
    g = graph(name)
    verify(g)
    assert str(parse(str(g), {v.name: a for v, a in g.constants.items()})) == str(g)
    for level in (0, 3):
        for threads in (1, 2):
            f = dnnc.compile(g, cache=tmp_path, opt_level=level, threads=threads)
            for n in (0, 1, 2, 5, 6):
                check(f, g, n)
    assert len(f.programs) == 1 and not f.report.fallbacks


@pytest.mark.slow
def test_saved_and_profiled(tmp_path: Any) -> None:
    g = graph("loops in loops")
    f = dnnc.compile(g, cache=tmp_path)
    f.save(tmp_path / "m.dnnc")
    f.save(tmp_path / "s.dnnc", small=True)
    for h in (
        dnnc.load(tmp_path / "m.dnnc"),
        dnnc.load(tmp_path / "s.dnnc"),
        dnnc.load(tmp_path / "m.dnnc", code=False, cache=tmp_path),
    ):
        check(h, g, 4)
        assert "loop" in str(h.profile(*inputs_of(g, 4), repeats=3))
        assert h.source("llvm").count("define void @control_1(") == 2 and "control_1_body" in h.source("asm")


@pytest.mark.slow
def test_a_body_reads_the_memory_of_its_own_iteration_only() -> None:
    """A body's scratch memory may be that of dead values: others must have done with it."""
    text = """
def main(n: i64, x: f32[64, 64]):
    a = softmax(matmul(x, x))
    b = softmax(matmul(a, x))
    def body(k: i64, h: f32[64, 64], b: f32[64, 64]):
        return softmax(matmul(softmax(matmul(h, b)), h))
    c = loop(n, None, b, b, body=body, carried=1)
    return softmax(matmul(c, c))
"""
    g = parse(text)
    f = dnnc.compile(g, cache=False, threads=2)
    for _ in range(50):
        check(f, g, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("loop(x, None, x, body=body, carried=1)", "the trips of a loop must be i64"),
        ("loop(None, None, x, body=body, carried=1)", "needs a length"),
        ("loop(n, None, body=body, carried=0)", "needs a length"),
        ("loop(n, None, x, body=wrong, carried=1)", "carried value 0 is f32.3. before and f32.1, 3. after"),
        ("cond(x, x, then=branch, other=branch)", "the condition must be bool"),
        ("cond(c, x, then=branch, other=other)", "the branches make"),
    ],
)
def test_what_does_not_fit_is_refused(call: str, message: str) -> None:
    text = f"""
def main(n: i64, c: bool, x: f32[3]):
    def body(k: i64, a: f32[3]):
        return (neg(a),)
    def wrong(k: i64, a: f32[3]):
        return (unsqueeze(a, axes=(0,)),)
    def branch(a: f32[3]):
        return (neg(a),)
    def other(a: f32[3]):
        return (cast(a, to=f64),)
    return {call}
"""
    with pytest.raises(ParseError, match=message):
        parse(text)


@pytest.mark.slow
def test_symbolic_sizes_get_a_program_each() -> None:
    text = (
        CASES["rows in and out"]
        .replace("[4, 24]", "[N, 24]")
        .replace("[5, 4, 24]", "[T, N, 24]")
        .replace("length=5", "length=T")
    )
    g = parse("N: dim[1, 9]\nT: dim[1, 9]\n" + text, {"w": np.eye(24, dtype=np.float32)})
    f = dnnc.compile(g, cache=False, dims={"N": (1, 9), "T": (1, 9)})
    rng = np.random.default_rng(0)
    for n, t in ((1, 1), (3, 4), (2, 9)):
        x, xs = rng.standard_normal((n, 24)).astype("f4"), rng.standard_normal((t, n, 24)).astype("f4")
        want = dnnc.compile(g, target="reference")(x, xs)
        for a, b in zip(f(x, xs), want):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
