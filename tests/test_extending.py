"""What a package adds from outside: an op, a pass, a schedule. None of it is registered anywhere but by a backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.backends.llvm.backend import LlvmBackend
from dnnc.backends.registry import BACKENDS
from dnnc.ir import te
from dnnc.ir.dtype import f32
from dnnc.ir.errors import AccuracyError, InternalError, VerifyError
from dnnc.ir.expr import fma
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.stmt import Kernel, Store, map_stmt
from dnnc.ir.op import OpDef
from dnnc.ir.ops import OPS
from dnnc.ir.types import TensorType, tensor
from dnnc.passes.base import Pass, PassContext, PassManager, pass_context
from dnnc.passes.pipelines import CSE
from dnnc.passes.rewrite import Match, Rule, rewrite
from dnnc.passes.schedule.loops import annotate, split
from dnnc.passes.schedule.problem import Knobs, Problem, Template
from dnnc.passes.schedule.state import Schedule

Array = np.ndarray[Any, Any]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def extended(monkeypatch: pytest.MonkeyPatch, **methods: Any) -> None:
    """Make the target `mine`: the CPU, with these methods."""
    monkeypatch.setitem(BACKENDS, "mine", type("Mine", (LlvmBackend,), {"name": "mine", **methods}))


# --- an op ------------------------------------------------------------------------------------------------------------


def lerp_type(a: TensorType, b: TensorType, *, at: float = 0.5) -> TensorType:
    return tensor(a.dtype, *a.shape)


def lerp(a: te.Tensor, b: te.Tensor, *, at: float = 0.5) -> te.Tensor:
    return te.compute(a.dims, a.dtype, lambda *i: fma(b[i] - a[i], at, a[i]))


LERP = OpDef(
    "my_lerp",
    lerp_type,
    lerp,
    reference=lambda a, b, *, at: a + (b - a) * np.asarray(at, a.dtype),
    traits=OPS["sub"].traits,  # element-wise, and without effect
)


def mixed_rows() -> Graph:
    g = Graph("mixed")
    b = Builder(g)
    x, y = (g.add_input(name, tensor(f32, 6, 50)) for name in "xy")
    g.outputs = [b.op("reduce_sum", b.op(LERP, b.op("tanh", x), y, at=0.25), axes=(1,))]
    return g


@pytest.mark.slow
def test_an_op(rng: np.random.Generator) -> None:
    x, y = rng.standard_normal((2, 6, 50), dtype=np.float32)
    want = (np.tanh(x) * 0.75 + y * 0.25).sum(1, keepdims=True)
    for target in ("llvm", "reference"):
        got = dnnc.compile(mixed_rows(), target=target, cache=False)(x, y)
        np.testing.assert_allclose(got.reshape(-1), want.reshape(-1), rtol=1e-5, atol=1e-5)
    f = dnnc.compile(mixed_rows(), target="llvm", cache=False)
    assert len(f.report.programs[-1].kernels) == 1  # fused with what stands around it
    assert "__global__" in dnnc.compile(mixed_rows(), target="cuda -arch=sm_90a", cache=False).source("cuda")


def test_names_of_ops_are_identifiers() -> None:
    with pytest.raises(TypeError, match=r"'my\.lerp': a name is an identifier"):
        replace(LERP, name="my.lerp")


def test_an_op_that_is_not_what_its_reference_says_is_refused() -> None:
    wrong = OpDef(LERP.name, lerp_type, lerp, reference=lambda a, b, *, at: a + b, traits=LERP.traits)
    g = Graph("g")
    x, y = (g.add_input(name, tensor(f32, 6, 50)) for name in "xy")
    g.outputs = [Builder(g).op(wrong, x, y)]
    with pytest.raises(AccuracyError, match="my_lerp"):
        dnnc.compile(g, target="llvm", cache=False)


# --- a pass -----------------------------------------------------------------------------------------------------------


def double_negation(m: Match) -> Value:
    """exp(log(x)) -> x"""
    return m.operand(m.node(m.operand(m.root, 0), "log"), 0)


def forget_logs(graph: Graph, ctx: PassContext) -> bool:
    return rewrite(graph, [Rule(double_negation, ("exp",), exact=False)], ctx)


FORGET_LOGS = Pass("forget-logs", forget_logs, "a product of probabilities is a sum of logarithms, which nobody reads")
TEXT = "def g(x: f32[8]):\n    return relu(exp(log(x)))\n"


def test_a_pass_by_itself() -> None:
    graph = parse(TEXT)
    assert PassManager().run(graph, [FORGET_LOGS], pass_context())
    assert [n.op.name for n in graph.nodes()][-1] == "relu" and "exp" not in str(graph)
    strict = parse(TEXT)
    assert not PassManager().run(strict, [FORGET_LOGS], pass_context(numerics="strict"))


def after_cse(passes: Sequence[Pass], new: Pass) -> list[Pass]:
    return [q for p in passes for q in ((p, new) if p is CSE else (p,))]


def test_a_pass_in_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    extended(monkeypatch, passes=lambda self, level: after_cse(LlvmBackend.passes(self, level), FORGET_LOGS))
    f, usual = (dnnc.compile(parse(TEXT), target=t, cache=False) for t in ("mine -threads=1", "llvm -threads=1"))
    assert "exp" in usual.source("graph") and "exp" not in f.source("graph")
    assert [p.name for p in f.report.programs[-1].passes if p.name == FORGET_LOGS.name]
    np.testing.assert_array_equal(f(np.float32([-1, 2] * 4)), np.float32([0, 2] * 4))


def test_a_pass_that_breaks_a_graph_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(graph: Graph, ctx: PassContext) -> bool:
        raise ZeroDivisionError("no rows")

    extended(monkeypatch, passes=lambda self, level: [Pass("breaks", breaks, "it is wrong")])
    with pytest.raises(InternalError, match="pass breaks: ZeroDivisionError: no rows"):
        dnnc.compile(parse(TEXT), target="mine", cache=False)


# --- a schedule -------------------------------------------------------------------------------------------------------


def candidates(problem: Problem) -> list[Knobs]:
    """Kernels of one loop over at least four elements."""
    loops = problem.lowered.out_loops
    return [(("by", 4),), (("by", 2),)] if problem.kind == "map" and len(loops) == 1 else []


def apply(problem: Problem, knobs: Mapping[str, int | str]) -> Kernel:
    s = Schedule(problem.kernel)
    s.apply(split, problem.lowered.out_loops[0], int(knobs["by"]), ("outer", "inner"))
    s.apply(annotate, "unroll", "inner")
    return s.done()


def wrong(problem: Problem, knobs: Mapping[str, int | str]) -> Kernel:
    """The schedule, which stores twice the value."""

    def block(b: Any) -> Any:
        return tuple(
            Store(s.buf, s.idx, s.value + s.value) if isinstance(s, Store) else map_stmt(s, lambda e: e, block)
            for s in b
        )

    k = apply(problem, knobs)
    return k.with_body(block(k.entry.body))


def with_template(apply: Any) -> Any:
    def templates(self: LlvmBackend, numerics: str, rounded: bool = False) -> list[Template]:
        return [Template("by_hand", candidates, apply), *LlvmBackend.templates(self, numerics, rounded)]

    return templates


def test_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    extended(monkeypatch, templates=with_template(apply))
    f = dnnc.compile(parse(TEXT), target="mine -threads=1", cache=False)
    (kernel,) = f.report.programs[-1].kernels
    assert kernel.choice == "by_hand(by=4)" and "in unroll(4)" in f.source("operator")
    x = np.linspace(0.1, 2, 8, dtype=np.float32)
    np.testing.assert_allclose(f(x), x, rtol=1e-6)


def test_a_schedule_that_does_not_apply_steps_down(monkeypatch: pytest.MonkeyPatch) -> None:
    extended(monkeypatch, templates=with_template(apply))
    nine = parse(TEXT.replace("8", "9"))  # which four does not divide, nor two
    with pytest.raises((InternalError, VerifyError), match="does not apply"):
        dnnc.compile(nine, target="mine -threads=1", cache=False)
    monkeypatch.delenv("DNNC_STRICT")
    f = dnnc.compile(nine, target="mine -threads=1", cache=False)
    assert "by_hand" in str(f.report) and "does not apply" in str(f.report)
    assert not f.report.programs[-1].kernels[0].choice.startswith("by_hand")


def test_a_schedule_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    extended(monkeypatch, templates=with_template(wrong))
    with pytest.raises(AccuracyError, match=r"schedule by_hand\(by=4\)"):
        dnnc.compile(parse(TEXT), target="mine -threads=1", cache=False)


def test_schedules_of_other_packages_are_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """They may change without a change of dnnc."""
    for by in (apply, with_twos):
        extended(monkeypatch, templates=with_template(by))
        f = dnnc.compile(parse(TEXT), target="mine -threads=1", cache=tmp_path / "kernels")
    assert "in unroll(2)" in f.source("operator")


def with_twos(problem: Problem, knobs: Mapping[str, int | str]) -> Kernel:
    return apply(problem, {"by": 2})
