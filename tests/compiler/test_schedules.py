"""Schedules are looked up where they are known: the same code comes out, nothing is scheduled twice, and whatever
decides a schedule is asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.array.expressions import ExpressionCompiler
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.templates import templates as cpu_templates
from dnnc.backends.registry import open_backend
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.compile_program import schedule
from dnnc.ir.errors import InternalError
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.loops.count import statements
from dnnc.ir.loops.stmt import stored
from dnnc.ir.loops.text import show_kernel
from dnnc.ir.op import Trait
from dnnc.ir.ops import FAMILIES
from dnnc.ir.target import TargetFacts
from dnnc.options import CompileOptions
from dnnc.passes.base import PassContext
from dnnc.passes.pipelines import compile_program
from dnnc.passes.planning.memory_plan import MemoryPlan, Region, plan_memory
from dnnc.passes.planning.program import ScheduledGraph, Step, build_steps, is_parallel, plan_region
from dnnc.passes.schedule.problem import Choice
from dnnc.schedules import Schedules, schedules_for
from dnnc.tools.sample_graphs import graph_of

NET = """
def net(x: f32[2, 48], *, v: f32[48, 96], w: f32[96, 32]):
    h: f32[2, 96] = gelu(matmul(x, v))
    return softmax(matmul(h, w)), reduce_sum(h, axes=(1,))
"""
CUDA = "cuda -arch=sm_90a"
CPU = "llvm -mcpu=skylake-avx512"


def unscheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nothing may be scheduled."""
    monkeypatch.setattr("dnnc.passes.planning.program.try_schedules", lambda *_: pytest.fail("its schedule is known"))


def program(target: str, cache: Path | None, text: str = NET, **more: Any) -> ScheduledGraph:
    options = CompileOptions(target=target, threads=2, **more)
    store = KernelCache(cache)
    return schedule(graph_of(text), open_backend(target, 2), options, cache=store)


def told(p: ScheduledGraph) -> list[Any]:
    """All that a step says without its kernel."""
    return [
        (
            s.text,
            s.choice,
            s.parallel,
            s.scheduled.statements,
            s.nest.name,
            s.refusal,
            [v.name for v in s.params],
            str(s.flops),
        )
        for s in p.kernels
    ]


@pytest.mark.slow
@pytest.mark.parametrize("target", [CPU, CUDA])
def test_what_is_known_is_not_scheduled_again(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = program(target, tmp_path)
    kernels = [show_kernel(s.kernel) for s in new.kernels]
    assert kernels == [s.text for s in new.kernels] and told(new) == told(program(target, None))
    unscheduled(monkeypatch)
    known = program(target, tmp_path)
    assert told(known) == told(new)
    assert all("kernel" not in vars(s) for s in known.kernels)  # not even made
    assert [show_kernel(s.kernel) for s in known.kernels] == kernels


@pytest.mark.slow
def test_a_model_is_compiled_from_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).standard_normal((2, 48)).astype(np.float32)
    graph = graph_of(NET)
    first = dnnc.compile(graph, cache=tmp_path)
    unscheduled(monkeypatch)
    again = dnnc.compile(graph, cache=tmp_path)
    for a, b in zip(first(x), again(x)):
        np.testing.assert_array_equal(a, b)
    assert again.programs[0].compiled == 0
    for stage in ("operator", "llvm"):
        assert again.source(stage) == first.source(stage)
    reports = [f.report.as_dict()["programs"][0] for f in (first, again)]
    for r in reports:
        del r["seconds"], r["compiled"], r["from_cache"], r["passes"], r["kept"]
    assert reports[0] == reports[1]


@pytest.mark.slow
@pytest.mark.parametrize("target", [CPU, CUDA])
def test_code_that_is_gone_is_made_again(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f = dnnc.compile(graph_of(NET), target=target, cache=tmp_path)
    f.save(tmp_path / "a.dnnc")
    store, code = KernelCache(tmp_path), f.programs[0].code
    gone = [store._file(symbol[2:]) for symbol in code if symbol.startswith("k_")]
    for file in gone:
        assert file is not None
        file.unlink()
    unscheduled(monkeypatch)
    again = dnnc.compile(graph_of(NET), target=target, cache=tmp_path)
    again.save(tmp_path / "b.dnnc")
    assert again.programs[0].compiled == len(gone) > 0
    assert (tmp_path / "a.dnnc").read_bytes() == (tmp_path / "b.dnnc").read_bytes()


@pytest.mark.slow
def test_expressions_find_what_models_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(CPU, tmp_path, "def net(x: f32[8, 64]):\n    return softmax(x)")
    unscheduled(monkeypatch)
    expressions = ExpressionCompiler(target=CPU, threads=2, cache=tmp_path)
    made = build_steps(
        *planned("def net(y: f32[8, 64]):\n    return softmax(y)"),
        expressions.templates,
        expressions.choose,
        expressions.context.facts.native_intrinsics,
        None,
        expressions.schedules,
    )
    assert len(made) == 1


def planned(text: str) -> tuple[Region, MemoryPlan]:
    region = plan_region(graph_of(text))
    return region, plan_memory(region.graph, region.fusion, region.inplace, region.nested)


@pytest.mark.family("choices")
@pytest.mark.parametrize("target", [CPU, CUDA])
@pytest.mark.parametrize(
    "more",
    [{"numerics": "strict"}, {"numerics": "fast"}, {"opt_level": 1}, {"precision": "tf32"}, {"precision": "float16"}],
)
def test_other_options_have_their_own_schedules(target: str, more: dict[str, Any], tmp_path: Path) -> None:
    program(target, tmp_path)
    assert told(program(target, tmp_path, **more)) == told(program(target, None, **more))


@pytest.mark.slow
def test_other_targets_have_their_own_schedules(tmp_path: Path) -> None:
    for target in (CPU, "llvm -mcpu=haswell", "llvm -mcpu=znver5", CUDA, "cuda -arch=sm_80"):
        assert told(program(target, tmp_path)) == told(program(target, None))


def test_other_sources_know_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    whole = __import__("dnnc.passes.planning.program", fromlist=["try_schedules"]).try_schedules
    monkeypatch.setattr(
        "dnnc.passes.planning.program.try_schedules",
        lambda problem, *rest: asked.append(problem.kernel.name) or whole(problem, *rest),
    )
    program(CPU, tmp_path)
    count = len(asked)
    program(CPU, tmp_path)
    assert len(asked) == count > 0
    monkeypatch.setattr("dnnc.schedules.sources_version", lambda: "another")
    program(CPU, tmp_path)
    assert len(asked) == 2 * count


@pytest.mark.parametrize("how", ["winners", "checked", "no cache"])
def test_where_nothing_is_looked_up(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "checked":
        monkeypatch.setenv("DNNC_CHECK", "1")
    options = CompileOptions(target=CPU, tune={} if how == "winners" else None)
    store = KernelCache(None if how == "no cache" else tmp_path)
    assert schedules_for(options, parse_target(CPU), store) is None


def test_a_refused_schedule_is_not_kept(tmp_path: Path) -> None:
    target = parse_target(CPU)
    kept = Schedules(KernelCache(tmp_path), CompileOptions(target=CPU), open_backend(CPU))

    def steps(known: Schedules | None) -> list[Step]:
        made = compile_program(
            graph_of("def net(x: f32[64]):\n    return relu(x)"),
            PassContext(TargetFacts(lanes=16)),
            cpu_templates(target),
            lambda p, offered: Choice("magic", ()),
            known=known,
        )
        return list(made.kernels)

    for _ in range(2):
        (s,) = steps(kept)
        assert s.refusal is not None and s.choice.template != "magic"
    assert KernelCache(tmp_path).info().entries == 0


def test_a_record_that_does_not_hold_is_told(tmp_path: Path) -> None:
    program(CPU, tmp_path)
    for file in tmp_path.glob("??/*"):
        key = file.parent.name + file.name
        data = KernelCache(tmp_path).get(key)
        assert data is not None
        if data.startswith(b"["):
            KernelCache(tmp_path).put(key, data.replace(b"for ", b"for  ", 1))
    p = program(CPU, tmp_path)
    with pytest.raises(InternalError, match=r"makes another kernel of .*clear the cache"):
        [s.kernel for s in p.kernels]


def samples(family: str) -> list[Graph]:
    out = []
    for op in FAMILIES[family]:
        if op.host is None and Trait.HOST not in op.traits and Trait.CONTROL not in op.traits:
            for s in op.samples:
                g = Graph("g")
                made = Builder(g).op(
                    op.name, *(g.add_input(f"x{k}", t) for k, t in enumerate(s.inputs)), **dict(s.attrs)
                )
                g.outputs = list(made) if isinstance(made, tuple) else [made]
                out.append(g)
    return out


@pytest.mark.slow
@pytest.mark.family("samples")
@pytest.mark.parametrize("target", [CPU, CUDA])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_nest_says_what_its_kernel_does(family: str, target: str) -> None:
    """A step is linked, reported and launched by its nest, so the two must agree in what others see of them."""
    for g in samples(family):
        if target == CUDA:
            backend = open_backend(target)
            made = compile_program(g, PassContext(backend.facts("standard")), backend.templates("standard"))
        else:
            made = compile_program(g, PassContext(TargetFacts(lanes=16)), cpu_templates(parse_target(CPU)))
        for s in made.kernels:
            nest, kernel = s.nest.entry, s.kernel.entry
            assert (s.nest.name, s.nest.locs) == (s.kernel.name, s.kernel.locs)
            assert [p.name for p in nest.params] == [p.name for p in kernel.params]
            written = [[b.name in {x.name for x in stored(f.body)} for b in f.buffers] for f in (nest, kernel)]
            assert written[0] == written[1], s.text
            assert s.parallel == is_parallel(s.kernel) and s.scheduled.statements == statements(kernel.body, {})
