"""Planted faults at each stage of a compilation: results stay right, the report says what was done, and with
strict_compile it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc import compile_program
from dnnc.backends.cuda import build as cuda_build
from dnnc.backends.cuda import nvrtc
from dnnc.backends.cuda.interpreted import InterpretedDevice, TextCompiler
from dnnc.backends.llvm import build as llvm_build
from dnnc.backends.llvm import kernel_code, toolchain, worker_pool
from dnnc.backends.runtime.device import Launch
from dnnc.ir.dtype import f32
from dnnc.ir.errors import DnncError, InternalError
from dnnc.ir.expr import const
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.loops.stmt import Alloc, Block, Buffer, Kernel, Store, map_stmt
from dnnc.ir.loops.text import show_kernel
from dnnc.ir.loops.verify import MAX_STATEMENTS
from dnnc.passes.schedule.problem import Problem, Template
from dnnc.tools.sample_graphs import graph_of
from support.devices import install

NET = """
def net(x: f32[6, 20], w: f32[20, 16], b: f32[16]):
    h = relu(add(matmul(x, w), b))
    return softmax(h, axis=1), add(tanh(h), 1.0)
"""
MARK = "planted"
Apply = Callable[[Problem, Mapping[str, Any]], Kernel]


def marked(problem: Problem, *more: Any) -> Kernel:
    """The naive kernel with a store to memory that nobody reads, by which later stages know it."""
    mark = Buffer(MARK, f32, (const(1),), "local")
    f = problem.kernel.entry
    body = (Alloc(mark), Store(mark, (const(0),), const(0.0, f32)), *more, *f.body)
    return replace(problem.kernel, funcs=(replace(f, body=body), *problem.kernel.funcs[1:]))


def fails(problem: Problem, knobs: Mapping[str, Any]) -> Kernel:
    raise KeyError("lanes")


def stray(problem: Problem, knobs: Mapping[str, Any]) -> Kernel:
    """Cannot be verified: it writes behind its output."""
    out = problem.kernel.entry.buffers[-1]
    return marked(problem, Store(out, tuple(out.shape), const(0.0, out.dtype)))


def large(problem: Problem, knobs: Mapping[str, Any]) -> Kernel:
    mark = Buffer("much", f32, (const(1),), "local")
    return marked(
        problem, Alloc(mark), *[Store(mark, (const(0),), const(float(k), f32)) for k in range(MAX_STATEMENTS)]
    )


def wrong(problem: Problem, knobs: Mapping[str, Any]) -> Kernel:
    """Verifies, and gives results that are off by 1/8."""
    out = problem.kernel.entry.buffers[-1]

    def go(block: Block) -> Block:
        return tuple(
            replace(s, value=s.value + 0.125) if isinstance(s, Store) and s.buf is out else map_stmt(s, lambda e: e, go)
            for s in block
        )

    k = marked(problem)
    return replace(k, funcs=(replace(k.entry, body=go(k.entry.body)), *k.funcs[1:]))


FAULTS: dict[str, Apply] = {
    "fails": fails,
    "stray": stray,
    "large": large,
    "wrong": wrong,
    "no code": lambda p, knobs: marked(p),
}


def broken_offer(problem: Problem) -> list[Any]:
    raise ZeroDivisionError("no lanes")


def planted(apply: Apply, offer: Callable[[Problem], list[Any]] = lambda problem: [()]) -> Template:
    return Template(MARK, offer, apply)


def first_offered(problem: Problem, offered: Sequence[Any]) -> Any:
    return offered[0]


class Planted:
    """Puts a template ahead of the target's, and makes code generation fail for texts that a test names."""

    def __init__(self, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.target, self.patch = target, monkeypatch
        monkeypatch.delenv("DNNC_STRICT")
        self.bad: Callable[[str], bool] = lambda text: False
        monkeypatch.setattr(compile_program, "choose_of", lambda *args, **kwargs: first_offered)
        emit = kernel_code.emit_kernel

        def emit_kernel(kernel: Kernel, name: str, features: Any) -> str:
            return "this is no LLVM" if self.bad(show_kernel(kernel)) else emit(kernel, name, features)

        monkeypatch.setattr(kernel_code, "emit_kernel", emit_kernel)
        planted_compiler = self

        class Compiler(TextCompiler):
            def compile(self, kernels: Mapping[str, Kernel], target: Any, tell: Any) -> dict[str, bytes]:
                if any(planted_compiler.bad(show_kernel(k)) for k in kernels.values()):
                    raise InternalError("generated CUDA does not compile")
                return super().compile(kernels, target, tell)

        self.compiler = Compiler()

    def template(self, template: Template | None) -> None:
        own = [template] if template is not None else []
        usual = toolchain.templates
        self.patch.setattr(toolchain, "templates", lambda *args: [*own, *usual(*args)])
        install(self.patch, InterpretedDevice(), templates=own, compiler=self.compiler)

    def compile(self, graph: Graph, **options: Any) -> Any:
        return dnnc.compile(graph.copy(), **{"target": self.target, "cache": False, "threads": 1, **options})

    def check(self, text: str, *said: str) -> Any:
        """Compile, compare, and look for words in the report; then compile strictly, which fails."""
        g = graph_of(text)
        rng = np.random.default_rng(0)
        arrays = [rng.standard_normal([int(str(d)) for d in v.type.shape]).astype(np.float32) for v in g.inputs]
        f = self.compile(g)
        got = f(*arrays)
        for a, b in zip(got if isinstance(got, tuple) else (got,), run(g, arrays, precision="float64"), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert f.report.steps_down
        for words in said:
            assert any(words in line for line in f.report.steps_down), (words, f.report.steps_down)
            assert words in str(f.report)
        with pytest.raises((DnncError, ZeroDivisionError)):
            self.compile(g, strict_compile=True)
        return f


@pytest.fixture(params=["llvm", "cuda"])
def plant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Planted:
    return Planted(request.param, monkeypatch)


def kernels(f: Any) -> Any:
    return f.report.programs[0].kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "why"),
    [("fails", "KeyError"), ("stray", "schedule planted() does not apply"), ("large", "statements, more than"),
     ("wrong", "kernel check: "), ("no code", "compilation: ")],
)  # fmt: skip
def test_the_next_schedule(fault: str, why: str, plant: Planted) -> None:
    plant.template(planted(FAULTS[fault]))
    plant.bad = lambda text: fault == "no code" and MARK in text
    f = plant.check(NET, why, "is used")
    assert all(MARK not in k.choice for k in kernels(f))


@pytest.mark.slow
def test_a_template_that_cannot_say_what_it_offers(plant: Planted) -> None:
    plant.template(planted(fails, broken_offer))
    plant.check(NET, "template planted offers no schedule: ZeroDivisionError")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["compilation", "kernel check", "schedule"])
def test_a_smaller_group_where_no_schedule_holds(stage: str, plant: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever computes a tanh beside something else fails."""
    text = "def net(x: f32[6, 20], w: f32[20, 16], b: f32[16]):\n    return tanh(add(matmul(exp(x), w), b))"

    def fused(kernel: str) -> bool:
        return "tanh" in kernel and "x1" in kernel

    plant.template(None)
    if stage == "compilation":
        plant.bad = fused
    elif stage == "kernel check":
        refuse(monkeypatch, fused)
    else:
        verify(monkeypatch, fused)
    f = plant.check(text, "split behind")
    assert len(kernels(f)) >= 2


@pytest.mark.slow
def test_the_naive_nest_at_last(plant: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    plant.template(None)
    refuse(monkeypatch, lambda text: "vector" in text or "thread" in text or "unroll" in text)
    f = plant.check("def net(x: f32[6, 40], y: f32[6, 40]):\n    return softmax(add(x, y), axis=1)", "kernel check: ")
    assert any(k.choice == "naive()" for k in kernels(f))


@pytest.mark.slow
def test_an_error_where_the_naive_nest_is_wrong(plant: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    plant.template(None)
    refuse(monkeypatch, lambda text: True)
    with pytest.raises(dnnc.ir.errors.AccuracyError, match="planted"):
        plant.compile(graph_of(NET))


@pytest.mark.slow
def test_nothing_is_said_where_nothing_fails(plant: Planted) -> None:
    plant.template(None)
    for strict in (False, True):
        f = plant.compile(graph_of(NET), strict_compile=strict)
        assert f.report.steps_down == [] and "schedule ladder" not in str(f.report)


def refuse(monkeypatch: pytest.MonkeyPatch, bad: Callable[[str], bool]) -> None:
    """The check refuses kernels by their text."""

    def check_kernel(graph: Graph, step: Any, *rest: Any, **more: Any) -> None:
        if bad(step.text):
            raise dnnc.ir.errors.AccuracyError("planted")

    monkeypatch.setattr(llvm_build, "check_kernel", check_kernel)
    monkeypatch.setattr(cuda_build, "check_kernel", check_kernel)


def verify(monkeypatch: pytest.MonkeyPatch, bad: Callable[[str], bool]) -> None:
    """The verifier refuses kernels by their text."""
    from dnnc.passes.planning import program

    own = program.verify_kernel

    def verify_kernel(kernel: Kernel, limited: bool = True) -> Kernel:
        if bad(show_kernel(kernel)):
            raise dnnc.ir.errors.VerifyError("planted")
        return own(kernel, limited)

    monkeypatch.setattr(program, "verify_kernel", verify_kernel)


@pytest.mark.slow
def test_a_kernel_that_llvm_takes_too_long_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plant = Planted("llvm", monkeypatch)
    plant.template(planted(FAULTS["no code"]))
    emit = kernel_code.emit_kernel
    slow = "\n".join(["define void @{name}_slow(ptr %p) {{",
    *(f"  %a{k} = load i64, ptr %p\n  %b{k} = udiv i64 %a{k}, %a{k - 1 if k else 0}" for k in range(60000)),
    "  ret void", "}}"])  # fmt: skip

    def emit_kernel(kernel: Kernel, name: str, features: Any) -> str:
        text = emit(kernel, name, features)
        return text + slow.format(name=name) if MARK in show_kernel(kernel) else text

    monkeypatch.setattr(kernel_code, "emit_kernel", emit_kernel)
    monkeypatch.setattr(worker_pool, "PATIENCE", 0.05)
    monkeypatch.setattr(worker_pool, "SLOWER", 0)
    plant.check("def net(x: f32[6, 20]):\n    return exp(x)", "LLVM takes longer than")


@pytest.mark.slow
def test_a_kernel_that_nvrtc_takes_too_long_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plant = Planted("cuda -arch=sm_90a", monkeypatch)
    plant.template(planted(FAULTS["no code"]))
    emit = cuda_build.emit_kernel
    slow = "\n".join(f"a = sinf(a * p[{k}]) / b; b = cosf(b * a) + a;" for k in range(400))

    def emit_kernel(kernel: Kernel, name: str, target: Any) -> str:
        text = emit(kernel, name, target)
        long = f'extern "C" __global__ void slow(float* p) {{ float a = p[0], b = p[1]; {slow} p[0] = a + b; }}\n'
        return text + long if MARK in show_kernel(kernel) else text

    install(monkeypatch, present=False, templates=[planted(FAULTS["no code"])], compiler=cuda_build.NvrtcCompiler(1))
    monkeypatch.setattr(cuda_build, "emit_kernel", emit_kernel)
    monkeypatch.setattr(nvrtc, "PATIENCE", 1.0)
    g = graph_of("def net(x: f32[6, 20]):\n    return exp(x)")
    f = plant.compile(g)
    assert any("NVRTC takes longer than 1 s" in line for line in f.report.steps_down)
    with pytest.raises(InternalError, match="NVRTC takes longer"):
        plant.compile(g, strict_compile=True)


@pytest.mark.slow
def test_a_kernel_that_cannot_be_loaded_or_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    plant = Planted("cuda", monkeypatch)
    plant.template(planted(FAULTS["no code"]))
    load, launched = InterpretedDevice.load, cuda_build.launch_of

    def loading(self: InterpretedDevice, cubin: bytes, *rest: Any) -> Any:
        if MARK in cubin.decode():
            raise InternalError("too many resources requested for launch")
        return load(self, cubin, *rest)

    def launch_of(kernel: Kernel) -> Launch:
        if MARK in show_kernel(kernel):
            raise InternalError("a block of 2048 threads")
        return launched(kernel)

    with monkeypatch.context() as m:
        m.setattr(InterpretedDevice, "load", loading)
        plant.check(NET, "loading: too many resources")
    monkeypatch.setattr(cuda_build, "launch_of", launch_of)
    plant.check(NET, "launch: a block of 2048 threads")
