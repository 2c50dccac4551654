"""Kernels whose elements depend on those before them: rows at a time, in order, and never fused."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.templates import templates
from dnnc.backends.llvm.templates.sequence import unswitch
from dnnc.ir import te
from dnnc.ir.dtype import i64
from dnnc.ir.expr import Expr, const, maximum, select
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.op import OpDef, Trait
from dnnc.passes.base import PassContext
from dnnc.passes.pipelines import compile_program


def _limited_expression(x: te.Tensor) -> te.Tensor:
    def element(own: te.Tensor, r: Expr, i: Expr) -> Expr:
        before = select(i < 1, const(0), own[r, maximum(i - 1, const(0))])
        return (
            maximum(before + x[r, i] + x[r, 0], const(0)) % 7
        )  # x[r, 0] is read after own[r, 0] is written: not in place

    return te.recur(x.dims, i64, element)


def _limited(x: np.ndarray) -> np.ndarray:
    out, before = np.empty_like(x), np.zeros(len(x), np.int64)
    for i in range(x.shape[1]):
        before = out[:, i] = np.maximum(before + x[:, i] + x[:, 0], 0) % 7
    return out


LIMITED = OpDef(
    "limited",
    lambda x: x,
    _limited_expression,
    reference=_limited,
    traits=frozenset((Trait.PURE, Trait.LOOPS, Trait.SEQUENTIAL)),
)


def program(text: str, **ops: OpDef):  # type: ignore[no-untyped-def]
    from dnnc.ir.ops import OPS

    graph = parse(text, ops={**OPS, **ops})
    return graph, compile_program(graph, PassContext(), templates(parse_target("llvm -mcpu=skylake-avx512", 1)))


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 9, 40, 131])
def test_suppression_by_the_interpreter(n: int) -> None:
    text = (
        "def f(b: f32[4, 2, N], c: i64[2], m: i64[()], t: f32[()]):\n    y: i32[2, N] = suppress(b, c, m, t)\n"
        "    return y\n"
    )
    graph, made = program(text)
    (step,) = made.steps
    assert step.choice.template == "sequence" and ":+8" in step.text
    rng = np.random.default_rng(n)
    low = rng.uniform(0, 4, (2, 2, n))
    boxes = np.concatenate([low, low + rng.uniform(0.1, 3, (2, 2, n))]).astype(np.float32)
    for most in (n, 3):
        inputs = [boxes, np.array([n, n // 2]), np.int64(most), np.float32(0.3)]
        (want,) = run(graph, inputs)
        got = np.full((2, n), 99, np.int32)
        values = dict(zip([v.name for v in graph.inputs], inputs))
        args = {
            b.name: np.asarray(values[v.name]).reshape(-1) if v.type.rank == 0 else values[v.name]
            for v, b in zip(step.params[:-1], step.kernel.entry.buffers)
        }
        run_kernel(step.kernel, {**args, step.kernel.entry.buffers[-1].name: got, **{d.name: n for d in step.dims}})
        np.testing.assert_array_equal(got, want)
        assert (got > 0).sum(1).max() <= most


def test_nothing_is_fused_to_a_sequence() -> None:
    text = (
        "def f(x: i64[3, 50]):\n    a: i64[3, 50] = add(x, x)\n    y: i64[3, 50] = limited(a)\n"
        "    z: i64[3, 50] = mul(y, y)\n    return z\n"
    )
    _, made = program(text, limited=LIMITED)
    assert [[n.op.name for n in s.group.nodes] for s in made.steps] == [["add"], ["limited"], ["mul"]]
    step = made.steps[1]
    assert len(step.params) == 2  # not in place
    x, got = np.random.default_rng(0).integers(0, 9, (3, 50)), np.full((3, 50), 99)
    run_kernel(step.kernel, dict(zip([b.name for b in step.kernel.entry.buffers], (x, got))))
    np.testing.assert_array_equal(got, _limited(x))


def test_unswitch() -> None:
    before = """\
def f(n: i64[1], x: f32[8, 8], y: f32[8]):
    for i in range(8):
        acc: f32[1] @ register
        acc[0] = 0.0
        for r in range(8):
            if i < n[0]:
                if r < i:
                    acc[0] = acc[0] + x[i, r]
        y[i] = acc[0]
"""
    kernel = parse_kernel(before)
    assert (
        show_kernel(kernel.with_body(unswitch(kernel.entry.body)))
        == """\
def f(n: i64[1], x: f32[8, 8], y: f32[8]):
    for i in range(8):
        acc: f32[1] @ register
        acc[0] = 0.0
        if i < n[0]:
            for r in range(8):
                if r < i:
                    acc[0] = acc[0] + x[i, r]
        y[i] = acc[0]
"""
    )


def test_a_condition_that_the_loop_changes_stays() -> None:
    text = """\
def f(x: f32[8], y: f32[1]):
    for r in range(8):
        if y[0] < 3.0:
            y[0] = y[0] + x[r]
"""
    kernel = parse_kernel(text)
    assert show_kernel(kernel.with_body(unswitch(kernel.entry.body))) == text
