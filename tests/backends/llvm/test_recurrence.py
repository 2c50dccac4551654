"""Recurrent layers as one kernel: whatever the sizes, rows and vectors, it computes what the loop does."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.templates import recurrence
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.target import TargetFacts
from dnnc.passes.base import PassContext, PassManager
from dnnc.passes.lower.recurrence import lower_recurrence
from dnnc.passes.lower.recurrent_form import form_of
from dnnc.passes.pipelines import LEVELS
from dnnc.passes.schedule.problem import classify
from dnnc.tools.sample_graphs import graph_of

Array = np.ndarray[Any, Any]
PEEPHOLES = """
def net(h: f32[B, H], c: f32[B, H], x: f32[5, B, H4], n: i64[B], *, w: f32[H, H4], p: f32[H]):
    def body(k: i64, h: f32[B, H], c: f32[B, H], r: f32[B, H4], n: i64[B], w: f32[H, H4], p: f32[H]):
        v = add(r, matmul(h, w))
        i = sigmoid(add(slice(v, starts=(0, 0), steps=(1, 1), shape=(B, H)), mul(p, c)))
        f = sigmoid(add(slice(v, starts=(0, H2), steps=(1, 1), shape=(B, H)), mul(p, c)))
        d = add(mul(f, c), mul(i, tanh(slice(v, starts=(0, H3), steps=(1, 1), shape=(B, H)))))
        y = mul(sigmoid(add(slice(v, starts=(0, H), steps=(1, 1), shape=(B, H)), mul(p, d))), tanh(d))
        alive = unsqueeze(greater(n, k), axes=(1,))
        a = where(alive, y, h)
        b = where(alive, d, c)
        return a, b, where(alive, y, mul(y, 0.0))
    (a, b, y) = loop(None, None, h, c, x, n, w, p, body=body, carried=2, scanned=1, length=5, backward=(True, False))
    return a, b, y
"""
RESET_FIRST = """
def net(h: f32[B, H], x: f32[5, B, H3], *, w: f32[H, H2], u: f32[H, H]):
    def body(k: i64, h: f32[B, H], r: f32[B, H3], w: f32[H, H2], u: f32[H, H]):
        v = sigmoid(add(slice(r, starts=(0, 0), steps=(1, 1), shape=(B, H2)), matmul(h, w)))
        z = slice(v, starts=(0, 0), steps=(1, 1), shape=(B, H))
        q = slice(v, starts=(0, H), steps=(1, 1), shape=(B, H))
        g = tanh(add(slice(r, starts=(0, H2), steps=(1, 1), shape=(B, H)), matmul(mul(q, h), u)))
        y = add(mul(sub(1.0, z), g), mul(z, h))
        return y, y
    (a, y) = loop(None, None, h, x, w, u, body=body, carried=1, scanned=1, length=5, backward=(False, True))
    return a, y
"""
SWAPPED = """
def net(h: f32[B, H], c: f32[B, H], x: f32[5, B, H], *, w: f32[H, H]):
    def body(k: i64, h: f32[B, H], c: f32[B, H], r: f32[B, H], w: f32[H, H]):
        return c, tanh(add(r, matmul(h, w)))
    (a, b) = loop(None, None, h, c, x, w, body=body, carried=2, scanned=1, length=5)
    return a, b
"""
NETS = {"peepholes and lengths": PEEPHOLES, "reset before the product": RESET_FIRST, "states change places": SWAPPED}
WIDE, NARROW = "llvm -mcpu=skylake-avx512", "llvm -mcpu=haswell"


def net(text: str, batch: int, hidden: int) -> Graph:
    text = re.sub(r"\bB\b", str(batch), text)
    return graph_of(re.sub(r"\bH([234]?)\b", lambda m: str(hidden * int(m[1] or 1)), text))


def inputs_of(g: Graph) -> list[Array]:
    rng = np.random.default_rng(0)
    return [
        rng.integers(0, 6, v.type.shape)
        if v.type.dtype.is_int
        else rng.standard_normal(v.type.shape).astype(np.float32)
        for v in g.inputs
    ]


@pytest.mark.family("cases")
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(("batch", "hidden"), [(1, 32), (1, 5), (2, 1), (8, 24), (3, 17)])
def test_compiled(name: str, batch: int, hidden: int) -> None:
    g = net(NETS[name], batch, hidden)
    given = inputs_of(g)
    want = run(g, given)
    for threads in (1, 2):
        f = dnnc.compile(g, threads=threads)
        got = f.run(given)
        assert [k.choice.split("(")[0] for p in f.report.programs for k in p.kernels].count("recurrence") == 1
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.family("choices")
@pytest.mark.parametrize("cpu", [WIDE, NARROW])
@pytest.mark.parametrize("name", NETS)
def test_every_schedule_by_the_interpreter(name: str, cpu: str) -> None:
    target = parse_target(cpu, 2)
    g = net(NETS[name], 4, 11)
    PassManager().run(
        g, LEVELS[3], PassContext(TargetFacts(lanes=target.lanes, supports_scan_kernel=lambda form: True))
    )
    (node,) = (n for n in g.nodes() if n.op.name == "recurrence")
    problem = classify([node], lower_recurrence(g, node))
    settings = recurrence.space(problem, target)
    assert len(settings) >= 6
    first: dict[str, Array] = {}
    rng = np.random.default_rng(1)
    given = {
        b.name: (2 * rng.standard_normal([int(str(d)) for d in b.shape])).astype(b.dtype.numpy)
        for b in problem.kernel.entry.buffers
    }
    for knobs in [None, *settings]:
        kernel = problem.kernel if knobs is None else recurrence.apply(problem, dict(knobs), target)
        buffers = {k: v.copy() for k, v in given.items()}
        buffers["y"][:] = np.nan
        run_kernel(kernel, buffers)
        first = first or buffers
        np.testing.assert_allclose(buffers["y"], first["y"], rtol=1e-5, atol=1e-6, err_msg=str(knobs))


def test_large_layers_stay_loops() -> None:
    target = parse_target(WIDE, 2)
    for hidden, batch, taken in ((32, 1, True), (512, 1, False), (32, 2, True), (32, 64, False)):
        (loop,) = (n for n in net(SWAPPED, batch, hidden).nodes() if n.op.name == "loop")
        assert recurrence.takes(form_of(loop), target) == taken


def test_states_of_16_bits_stay_loops() -> None:
    text = """
def net(h: f16[2, 8], x: f16[5, 2, 8], *, w: f32[8, 8]):
    def body(k: i64, h: f16[2, 8], r: f16[2, 8], w: f32[8, 8]):
        return cast(tanh(add(cast(r, to=f32), matmul(cast(h, to=f32), w))), to=f16)
    a = loop(None, None, h, x, w, body=body, carried=1, scanned=1, length=5)
    return a
"""
    (loop,) = (n for n in graph_of(text).nodes() if n.op.name == "loop")
    assert not recurrence.takes(form_of(loop), parse_target(WIDE, 2))


def test_strict_numerics_keep_the_loop() -> None:
    f = dnnc.compile(net(SWAPPED, 1, 16), numerics="strict")
    assert not any(k.choice.startswith("recurrence") for p in f.report.programs for k in p.kernels)
