"""Tasks: what is one kernel and what is another, and that another process gets the very problem back."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from planted import relu_task

from dnnc.autotune.runners.machine import machine_of
from dnnc.autotune.search.inspect import tasks_of
from dnnc.autotune.search.task import Setting, Task, extract, workload_key
from dnnc.ir.errors import InternalError
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.text import show_kernel
from dnnc.passes.pipelines import compile_program

CPU = "llvm -mcpu=skylake-avx512 -threads=2"
LAYERS = """
def f(x: f32[64, 256], *, v: f32[256, 256], w: f32[256, 256], b: f32[256]):
    h: f32[64, 256] = gelu(add(matmul(x, v), b))
    return softmax(gelu(add(matmul(h, w), b)))
"""
BODIES = """
def f(n: i64, x: f32[3, 128]):
    def body(k: i64, a: f32[3, 128]):
        return softmax(add(a, 1.0))
    return softmax(add(loop(n, None, x, body=body, carried=1), 1.0))
"""
SYMBOLIC = "n: dim[1, 64]\ndef f(x: f32[n, 32], y: f32[4, 32]):\n    return relu(x), exp(y)\n"
IMAGE = (
    "def f(x: f32[1, 16, 14, 14], *, w: f32[32, 16, 3, 3], b: f32[32]):\n"
    "    return relu(conv(x, w, b, pads=(1, 1, 1, 1)))\n"
)
CHAIN = "def f(x: f32[64, 64]):\n    return softmax(relu(matmul(x, x)))\n"
TARGETS = [CPU, "cuda -arch=sm_90a"]


def test_equal_kernels_are_one_task() -> None:
    tasks = tasks_of(LAYERS, Setting(CPU))
    assert [(t.kind, calls) for t, calls in tasks] == [("contraction", 2), ("reduction", 1)]
    assert tasks[0][0].flops >= 2 * 64 * 256 * 256 and tasks[0][0].name == "matmul_add_gelu"


def test_kernels_within_loops_count() -> None:
    (found,) = [calls for task, calls in tasks_of(BODIES, Setting(CPU)) if task.name == "add_softmax"]
    assert found == 2


def test_sizes_that_are_not_known_are_left_out() -> None:
    machine = machine_of(CPU)
    program = compile_program(parse(SYMBOLIC), machine.context(Setting(CPU)), machine.templates(Setting(CPU)))
    assert [t.name for t, _ in extract(program, Setting(CPU))] == ["exp"]


@pytest.mark.parametrize("text", [LAYERS, BODIES, IMAGE, CHAIN])
@pytest.mark.parametrize("target", TARGETS)
def test_a_task_comes_back_from_json(text: str, target: str) -> None:
    machine, setting = machine_of(target), Setting(target)
    for task, _ in tasks_of(text, setting):
        again = Task.from_json(json.loads(json.dumps(task.as_json())))
        assert again == task
        graph, group, problem = again.rebuilt
        assert graph.outputs == [*group.outputs] and problem.kind and workload_key(problem, setting) == task.key
        assert any(t.candidates(problem) for t in machine.templates(setting)), problem.kind


@pytest.mark.parametrize("target", TARGETS)
def test_a_task_of_several_outputs_works_in_place_as_the_program_does(target: str) -> None:
    g = parse(
        """
def f(p: f32[64, 64], m: f32[64, 64], d: f32[64, 64]):
    n = add(mul(m, 0.9), d)
    return sub(p, n), n, greater(d, 0.0)"""
    )
    g.donated = {0: 0, 1: 1}
    machine, setting = machine_of(target), Setting(target)
    program = compile_program(g, machine.context(setting), machine.templates(setting))
    ((task, _),) = extract(program, setting)
    again = Task.from_json(json.loads(json.dumps(task.as_json())))
    assert again == task and len(task.others) == 2
    _, group, problem = again.rebuilt
    (step,) = program.kernels
    assert len(group.outputs) == 3 and problem.lowered.outputs == step.outputs and problem.inplace
    assert show_kernel(problem.kernel) == show_kernel(step.nest)


def test_the_problem_is_the_one_that_was_scheduled() -> None:
    machine, setting = machine_of(CPU), Setting(CPU)
    seen: list[tuple[str, frozenset[str], str, bool]] = []

    def choose(problem, offered):  # type: ignore[no-untyped-def]
        seen.append((show_kernel(problem.kernel), problem.constants, problem.kind, problem.inplace))
        return offered[0]

    text = CHAIN.replace("softmax(", "exp(")
    program = compile_program(parse(text), machine.context(setting), machine.templates(setting), choose)
    rebuilt = [t.rebuilt[2] for t, _ in extract(program, setting)]
    assert [(show_kernel(p.kernel), p.constants, p.kind, p.inplace) for p in rebuilt] == seen


def test_what_runs_differently_has_another_key() -> None:
    one = relu_task(Setting(CPU))
    others = [Setting(CPU, "strict"), Setting(CPU, rounded=True), Setting("llvm -mcpu=haswell -threads=2")]
    keys = {relu_task(s).key for s in others}
    assert one.key not in keys and len(keys) == 3
    (weights,) = (
        t
        for t, _ in tasks_of(
            "def f(x: f32[8, 32], *, w: f32[32, 32]):\n    return matmul(x, w)\n", Setting("cuda -arch=sm_90a")
        )
    )
    (both,) = (
        t
        for t, _ in tasks_of(
            "def f(x: f32[8, 32], w: f32[32, 32]):\n    return matmul(x, w)\n", Setting("cuda -arch=sm_90a")
        )
    )
    assert weights.constants and not both.constants and weights.key != both.key


def test_weights_do_not_count_and_scalars_do() -> None:
    def key(scale: float, seed: int) -> str:
        text = f"def f(x: f32[64, 64], *, w: f32[64, 64]):\n    return mul(matmul(x, w), {scale})\n"
        w = np.random.default_rng(seed).random((64, 64), np.float32)
        machine = machine_of("cuda -arch=sm_90a")
        setting = Setting(machine.text)
        program = compile_program(
            parse(text, {"w": w}), replace(machine.context(setting), numerics="strict"), machine.templates(setting)
        )
        return extract(program, setting)[-1][0].key

    assert key(0.5, 0) == key(0.5, 1) != key(0.25, 0)


def test_a_graph_that_is_not_its_key_is_refused() -> None:
    task = relu_task(Setting(CPU))
    with pytest.raises(InternalError, match="another workload"):
        _ = replace(task, graph=task.graph.replace("64", "32")).rebuilt
