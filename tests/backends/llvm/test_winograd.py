"""Winograd's convolution: the kernel in the interpreter and natively, at borders and with epilogues, against float64;
its schedules as data.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels import TARGET

import dnnc
from dnnc.backends.check import unpack
from dnnc.backends.llvm.emit import emit_kernel
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.templates import templates
from dnnc.backends.llvm.templates.winograd import LOCAL
from dnnc.backends.runtime.link import pack
from dnnc.ir import winograd
from dnnc.ir.errors import ScheduleError
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Alloc, count_stmts, walk_stmts
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.target import TargetFacts
from dnnc.ir.tolerances import bound
from dnnc.passes.base import PassContext
from dnnc.passes.pipelines import compile_program
from dnnc.passes.planning.program import ScheduledGraph, Step
from dnnc.passes.schedule.problem import Choice, Problem

RNG = np.random.default_rng(0)
Array = np.ndarray[Any, Any]


def conv(c: int, o: int, h: int, w: int, pads: str = "1, 1, 1, 1", n: int | str = 1) -> Graph:
    weights = (RNG.standard_normal((o, c, 3, 3)) / np.sqrt(9 * c)).astype(np.float32)
    text = (
        f"def g(x: f32[{n}, {c}, {h}, {w}], *, w: f32[{o}, {c}, 3, 3]):\n    y = conv(x, w, pads=({pads}))\n"
        "    return y"
    )
    return parse(text, {"w": weights})


def block(c: int, h: int, w: int, n: int = 1) -> Graph:
    """A residual block: the sum is made in the memory of its first operand."""
    made = {"a": (c, c, 1, 1), "w": (c, c, 3, 3), "v": (c, c, 3, 3), "b": (c,)}
    constants = {k: (RNG.standard_normal(s) / np.sqrt(np.prod(s[1:]))).astype(np.float32) for k, s in made.items()}
    text = f"""def g(x: f32[{n}, {c}, {h}, {w}], *, a: f32[{c}, {c}, 1, 1], w: f32[{c}, {c}, 3, 3],
        v: f32[{c}, {c}, 3, 3], b: f32[{c}]):
    p = conv(x, a)
    q = relu(conv(p, w, b, pads=(1, 1, 1, 1)))
    y = relu(add(conv(q, v, b, pads=(1, 1, 1, 1)), p))
    return y"""
    return parse(text, constants)


@pytest.fixture(params=[2, 4])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Every 3 x 3 convolution takes tiles of this size, however small it is."""
    monkeypatch.setattr(
        "dnnc.passes.rewrites.layout.winograd_tile",
        lambda n, *_: request.param if n.inputs[1].type.shape[2] == 3 else 0,
    )
    return int(request.param)


def program(g: Graph, knobs: dict[str, int] | None = None, target: Any = TARGET) -> ScheduledGraph:
    def choose(problem: Problem, offered: Any) -> Choice:
        first: Choice = offered[0]
        return (
            first
            if first.template != "winograd"
            else Choice("winograd", tuple({**dict(first.knobs), **(knobs or {})}.items()))
        )

    return compile_program(g, PassContext(TargetFacts(lanes=target.lanes)), templates(target), choose)


def heavy(p: ScheduledGraph) -> Step:
    return next(s for s in p.kernels if s.choice.template == "winograd")


def interpreted(g: Graph, step: Step, x: Array) -> Array:
    t = step.group.outputs[0].type
    found = np.full([int(str(d)) for d in t.physical], np.nan, np.float32)
    values = (
        pack(x if v not in g.constants else g.constants[v], v.type) if v not in step.group.outputs else found
        for v in step.params
    )
    run_kernel(
        step.kernel,
        {b.name: np.array(a) if a is not found else found for b, a in zip(step.kernel.entry.buffers, values)},
    )
    return np.array(unpack(found, t, tuple(int(str(d)) for d in t.shape), step))


SHAPES = [(16, 16, 8, 8, "1, 1, 1, 1", 1), (20, 24, 9, 7, "1, 1, 1, 1", 2), (16, 16, 6, 10, "0, 0, 0, 0", 1),
(16, 32, 5, 6, "1, 0, 2, 1", 1),
          (16, 16, 3, 3, "1, 1, 1, 1", 1)]  # fmt: skip


@pytest.mark.family("shapes")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_means_the_convolution(shape: tuple[int, int, int, int, str, int], tile: int) -> None:
    g = conv(*shape)
    x = RNG.standard_normal((shape[5], shape[0], *shape[2:4])).astype(np.float32)
    (want,) = run(g.copy(), [x], "float64")
    step = heavy(program(g))
    assert ("tile", tile) in step.choice.knobs
    got = interpreted(g, step, x)
    assert np.abs(got - want).max() <= bound(g.outputs[0].type.dtype, 9 * shape[0], want)


@pytest.mark.slow
def test_no_knob_changes_a_bit(tile: int) -> None:
    """Strips, shares, blocks and register tiles say in which order results are made, not how."""
    x = RNG.standard_normal((1, 32, 10, 18)).astype(np.float32)
    g = conv(32, 64, 10, 18)
    seen = []
    for knobs in (
        {},
        {"tg": 7, "mr": 3, "nv": 1},
        {"tg": 4, "share": 2, "mo": 1, "nv": 1, "mr": 4},
        {"tg": 5, "share": 1, "mo": 2, "nv": 2, "mr": 2, "pf": 0},
    ):
        copy = g.copy()
        step = heavy(program(copy, knobs))
        seen.append(interpreted(copy, step, x))
        assert show_kernel(parse_kernel(step.text)) == step.text and count_stmts(step.kernel) < 300
    assert all(np.array_equal(seen[0], y) for y in seen[1:])


def test_knobs_that_do_not_fit_are_refused(tile: int) -> None:
    """And the template's own choice is taken."""
    step = heavy(program(conv(16, 48, 8, 8), {"mo": 3, "nv": 2}))
    assert step.refusal is not None and "shares of blocks" in step.refusal.why
    assert dict(step.choice.knobs)["mo"] % int(dict(step.choice.knobs)["nv"]) == 0


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize("text", ["llvm", "llvm -threads=1", "llvm -mcpu=haswell", "llvm -mcpu=x86-64-v2"])
def test_native_blocks(text: str, tile: int) -> None:
    g = block(32, 13, 18, 2)
    x = RNG.standard_normal((2, 32, 13, 18)).astype(np.float32)
    (want,) = run(g.copy(), [x], "float64")
    f = dnnc.compile(g, target=text, cache=False)
    assert str(f.report).count("winograd(") >= 1
    assert np.abs(f(x) - want).max() <= bound(g.outputs[0].type.dtype, 9 * 32, want)
    assert np.array_equal(f(x), f(x))


@pytest.mark.slow
def test_candidates_verify_and_keep_their_memory_small() -> None:
    """What the tuner may try: every schedule of ResNet's and VGG's sizes applies, on narrow and wide vectors."""
    for target in (TARGET, replace(TARGET, vector_bits=256, registers=16), replace(TARGET, threads=1, l2=256 << 10)):
        for size in ((64, 64, 56), (128, 128, 28), (256, 256, 14), (512, 512, 28), (24, 40, 65)):
            problem, offered = _problem(conv(*size, size[2]), target)
            assert 1 <= len(offered) <= 6 and len(set(offered)) == len(offered)
            template = next(t for t in templates(target) if t.name == "winograd")
            for choice in offered[:2]:
                kernel = verify_kernel(template.apply(problem, dict(choice.knobs)))
                held = sum(
                    int(str(s.buf.size())) * 4
                    for s in walk_stmts(kernel.entry.body)
                    if isinstance(s, Alloc) and s.buf.space == "local"
                )
                assert held <= LOCAL
            with pytest.raises(ScheduleError):
                template.apply(problem, {**dict(offered[0].knobs), "mo": 7})


def _problem(g: Graph, target: Any) -> tuple[Problem, list[Choice]]:
    found: list[tuple[Problem, list[Choice]]] = []

    def choose(problem: Problem, offered: Any) -> Choice:
        found.append((problem, [c for c in offered if c.template == "winograd"]))
        return offered[0]  # type: ignore[no-any-return]

    compile_program(g, PassContext(TargetFacts(lanes=target.lanes)), templates(target), choose)
    return next((p, c) for p, c in found if c)


@pytest.mark.slow
def test_batches_of_unknown_size() -> None:
    g = conv(32, 32, 28, 28, n="N")
    p = program(g.copy())
    assert heavy(p).dims and "parallel" in heavy(p).text
    f = dnnc.compile(g.copy(), cache=False)
    for n in (1, 3):
        x = RNG.standard_normal((n, 32, 28, 28)).astype(np.float32)
        (want,) = run(g.copy(), [x], "float64")
        assert np.abs(f(x) - want).max() <= bound(g.outputs[0].type.dtype, 9 * 32, want)


@pytest.mark.slow
def test_strict_numerics_are_direct() -> None:
    f = dnnc.compile(conv(64, 64, 28, 28), numerics="strict", cache=False)
    assert "winograd" not in str(f.report) and "contraction(" in str(f.report)


@pytest.mark.slow
def test_errors_are_far_under_the_bound() -> None:
    """Unit variance in, unit variance out: F(4 x 4, 3 x 3) loses two digits against a direct sum and stays at a tenth
    of what is allowed.
    """
    g = conv(256, 32, 24, 24)
    x = RNG.standard_normal((1, 256, 24, 24)).astype(np.float32)
    (want,) = run(g.copy(), [x], "float64")
    f = dnnc.compile(g, cache=False)
    assert "winograd(tile=4" in str(f.report)
    error = np.abs(f(x) - want).max()
    assert 1e-7 < error < bound(g.outputs[0].type.dtype, 9 * 256, want) / 10


@pytest.mark.slow
def test_the_gate_sees_a_wrong_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights transformed wrongly at one point are found before the kernel is used."""
    right = winograd.weights

    def wrong(w: Array, m: int) -> Array:
        u = np.array(right(w, m))
        u[:, :, 1, 2] *= 1.01
        return u

    monkeypatch.setattr(winograd, "weights", wrong)
    with pytest.raises(dnnc.AccuracyError, match="winograd"):
        dnnc.compile(conv(64, 64, 28, 28), cache=False)


@pytest.mark.slow
def test_saved_models_hold_the_weights_as_kernels_read_them(tmp_path: Path) -> None:
    g = conv(64, 64, 28, 28)
    x = RNG.standard_normal((1, 64, 28, 28)).astype(np.float32)
    f = dnnc.compile(g, cache=False)
    f.save(tmp_path / "m.dnnc")
    again = dnnc.load(tmp_path / "m.dnnc")
    assert np.array_equal(again(x), f(x)) and "winograd(" in str(again.report)


def test_tiles_lie_on_the_heap() -> None:
    """A caller's thread may have a small stack."""
    target = parse_target("llvm -mcpu=skylake-avx512 -threads=2")
    step = heavy(program(conv(64, 64, 56, 56), target=target))
    text = emit_kernel(step.kernel, "k_x", target.feature_set)
    assert text.count("call ptr @aligned_alloc(") == 2 == text.count("call void @free(")
    assert "alloca [" in text and not any(
        "alloca [" in x and int(x.split("[")[1].split(" ")[0]) * 4 > 128 << 10 for x in text.splitlines()
    )
