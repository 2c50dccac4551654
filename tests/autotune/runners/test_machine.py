"""Machines as text and figures, and kernels made as a compilation makes them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from planted import relu_task

from dnnc.autotune.runners.machine import Machine, machine_of
from dnnc.autotune.search.inspect import tasks_of
from dnnc.autotune.search.task import Setting
from dnnc.backends.cuda.emit import launch_of
from dnnc.backends.llvm.features import host_cpu
from dnnc.backends.registry import open_backend
from dnnc.backends.runtime import codec
from dnnc.backends.runtime.device import Launch
from dnnc.ir.errors import DnncError, TargetError
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.text import show_kernel
from dnnc.passes.pipelines import compile_program
from dnnc.passes.schedule.problem import Choice
from dnnc.passes.schedule.step import candidates

LAYER = "def f(x: f16[256, 512], *, w: f16[512, 512]):\n    return relu(matmul(x, w))\n"
TARGETS = [
    ("llvm -mcpu=skylake-avx512 -threads=1", "llvm -mcpu=skylake-avx512 -threads=1"),
    ("llvm -mcpu=skylake-avx512 -mattr=-avx512f -threads=1", "llvm -mcpu=skylake-avx512 -mattr=-avx512f -threads=1"),
    ("llvm -mcpu=haswell -mattr=+avxvnni -threads=1", "llvm -mcpu=haswell -mattr=+avxvnni -threads=1"),
    (
        "llvm -mcpu=haswell -mattr=-sse4a,+fma -threads=1",
        "llvm -mcpu=haswell -threads=1",
    ),  # what it has, or has not, anyway
    ("llvm -mcpu=generic -threads=1", "llvm -mcpu=x86-64 -threads=1"),
    ("cuda -arch=sm_86", "cuda -arch=sm_86"),
    ("cuda:3 -arch=sm_90a", "cuda -arch=sm_90a"),
]


@pytest.mark.parametrize("target, text", TARGETS)
def test_equal_targets_have_one_text(target: str, text: str) -> None:
    assert machine_of(target).text == open_backend(target).text == text
    again = machine_of(text)
    assert again.text == text and again.limits == machine_of(target).limits


def test_this_machine_has_its_name_and_threads() -> None:
    here = machine_of("llvm")
    assert here.name == host_cpu()[0] and here.text.startswith(f"llvm -mcpu={here.name} ")
    assert open_backend("llvm", 1).text == machine_of("llvm -threads=1").text
    assert machine_of(here.text).backend.target.feature_set == here.backend.target.feature_set


def test_limits_grow_with_the_machine() -> None:
    small, wide = (
        machine_of("llvm -mcpu=haswell -threads=1").limits,
        machine_of("llvm -mcpu=skylake-avx512 -threads=1").limits,
    )
    assert wide.flops == 2 * small.flops and wide.registers == 2 * small.registers == 32
    old, new = machine_of("cuda -arch=sm_80").limits, machine_of("cuda -arch=sm_90a").limits
    assert new.kind == "gpu" and new.matrix_flops > 2 * old.matrix_flops and new.bandwidth > old.bandwidth
    assert 0.5e15 < new.matrix_flops < 1.2e15 and 40e12 < new.flops < 80e12


def test_another_kind_of_target_is_refused() -> None:
    with pytest.raises(TargetError, match="there is no such backend; expected llvm, cuda"):
        machine_of("tpu")


@pytest.mark.parametrize("target", ["llvm -mcpu=skylake-avx512 -threads=1", "cuda -arch=sm_90a"])
def test_kernels_are_those_of_a_compilation(target: str) -> None:
    machine = machine_of(target)
    setting = Setting(machine.text)
    for (task, _), step in zip(tasks_of(LAYER, setting), _program(machine, setting).kernels, strict=True):
        assert show_kernel(machine.kernel(task.rebuilt[2], step.choice, setting)) == step.text


def _program(machine: Machine, setting: Setting):  # type: ignore[no-untyped-def]
    import numpy as np

    return compile_program(
        parse(LAYER, {"w": np.ones((512, 512), np.float16)}), machine.context(setting), machine.templates(setting)
    )


def test_a_schedule_of_another_version_is_an_error() -> None:
    machine = machine_of("llvm -threads=1")
    task = relu_task(Setting(machine.text))
    with pytest.raises(DnncError, match="no template 'magic'"):
        machine.kernel(task.rebuilt[2], Choice("magic", ()), task.setting)
    assert machine.kernel(task.rebuilt[2], Choice("naive", ()), task.setting).name == "relu"


def test_code_is_known_by_what_it_does() -> None:
    machine = machine_of("llvm -threads=1")
    task = relu_task(Setting(machine.text))
    problem = task.rebuilt[2]
    first, other = (
        machine.kernel(problem, Choice("map", (("lanes", lanes), ("unroll", 1))), task.setting) for lanes in (16, 8)
    )
    a, b, c = machine.compile(first, "k_tried"), machine.compile(first, "k_tried"), machine.compile(other, "k_tried")
    assert a.code[:4] == b"\x7fELF" and a.digest == b.digest != c.digest
    assert a.facts == {"parallel": False} and a.seconds > 0
    assert replace(a, facts={"parallel": True}).digest != a.digest


@pytest.mark.slow
def test_the_name_of_a_gpu_kernel_does_not_count() -> None:
    machine = machine_of("cuda -arch=sm_90a")
    task = relu_task(Setting(machine.text))
    offered = candidates(task.rebuilt[2], machine.templates(task.setting))
    first, other = (machine.kernel(task.rebuilt[2], c, task.setting) for c in offered[:2])
    names = [machine.symbol(show_kernel(first)), machine.symbol("of another text")]
    digests = {machine.compile(first, name).digest for name in names}
    assert len(digests) == 1 and machine.compile(other, names[0]).digest not in digests


@pytest.mark.slow
def test_a_gpu_kernel_compiles_here_and_its_launch_travels_as_text() -> None:
    machine = machine_of("cuda -arch=sm_90a")
    setting = Setting(machine.text)
    task = tasks_of(LAYER, setting)[0][0]
    choice = next(c for c in candidates(task.rebuilt[2], machine.templates(setting)) if c.template == "wgmma")
    kernel = machine.kernel(task.rebuilt[2], choice, setting)
    built = machine.compile(kernel, machine.symbol(show_kernel(kernel)))
    launch = launch_of(kernel)
    assert launch.maps and codec.decode(
        Launch, json.loads(json.dumps(built.facts["launch"]))
    ) == launch == codec.decode(Launch, codec.encode(launch))
    assert built.code[:4] == b"\x7fELF" and built.symbol.encode() in built.code and not built.spills
    assert built.facts["params"] == [p.name for p in kernel.entry.params] and built.facts["overlaps"]


@pytest.mark.slow
def test_a_gpu_needs_nothing_of_llvm() -> None:
    code = """
import sys
from dnnc.backends.registry import open_backend
from dnnc.autotune.runners.machine import machine_of
from dnnc.autotune.search.task import Setting
import dnnc.backends.cuda.bench, dnnc.autotune.runners.worker, dnnc.autotune.runners.measure
m = machine_of('cuda -arch=sm_90a')
m.templates(Setting(m.text)), m.limits, m.context(Setting(m.text))
print(sorted({k.split('.')[0] for k in sys.modules} & {'llvmlite', 'cupy', 'xgboost'}))
"""
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
