"""Machines with harmful schedules, for processes that tests start: see `machine_of` and `gpu_of`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dnnc.autotune.runners.machine import Machine
from dnnc.autotune.runners.machine import machine_of as real_machine_of
from dnnc.autotune.search.task import Setting, Task, task_of
from dnnc.backends.base import Built
from dnnc.backends.cuda.backend import CudaBackend
from dnnc.backends.cuda.target import FACTS, GpuTarget
from dnnc.backends.llvm.spelling import supported
from dnnc.ir.errors import AccuracyError, InternalError
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.target import Target, parse_target
from dnnc.passes.lower.expand import decompose
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.schedule.problem import Choice, Problem, Template

RELU = "def f(x: f32[64, 64]):\n    return relu(x)\n"
HEAD = "def relu(x0: f32[64, 64], y: f32[64, 64]):\n"
LOOPS = "    for i0 in range(64):\n        for i1 in range(64):\n            "
PLANTED = {
    "right": HEAD + LOOPS + "y[i0, i1] = fmax(0.0, x0[i0, i1])\n",
    "wrong": HEAD + LOOPS + "y[i0, i1] = fmax(0.0, x0[i0, i1]) + 0.5\n",
    "crash": HEAD + LOOPS + "y[i0 * 1099511627776, i1] = 0.0\n",
    "hang": HEAD + "    for k in range(1099511627776):\n        y[0, 0] = y[0, 0] + 1.0\n",
    "stray": HEAD + LOOPS + "y[i0 + 1, i1] = fmax(0.0, x0[i0, i1])\n",
    "abort": HEAD + LOOPS + "y[i0, i1] = 2.0\n",
}


def relu_task(setting: Setting) -> Task:
    g = parse(RELU)
    return task_of(g, plan_fusion(g).groups[0], {}, setting)


def choice(name: str, **knobs: int | str) -> Choice:
    return Choice(name, tuple(knobs.items()))


class PlantedCpu(Machine):
    """A CPU with PLANTED as templates for the task of RELU; nothing verifies them."""

    def templates(self, setting: Setting) -> Sequence[Template]:
        def planted(name: str) -> Template:
            def apply(problem: Problem, knobs: Mapping[str, int | str]) -> Kernel:
                if "unknown" in knobs:
                    raise KeyError("a knob that this template does not have")
                return parse_kernel(PLANTED[name])

            return Template(name, lambda p: [], apply)

        return [*super().templates(setting), *map(planted, PLANTED)]

    def kernel(self, problem: Problem, choice: Choice, setting: Setting) -> Kernel:
        if choice.template not in PLANTED:
            return super().kernel(problem, choice, setting)
        template = next(t for t in self.templates(setting) if t.name == choice.template)
        return decompose(template.apply(problem, dict(choice.knobs)), supported("standard"))

    def compile(self, kernel: Kernel, symbol: str) -> Built:
        if show_kernel(kernel) == PLANTED["abort"]:
            os.abort()
        return super().compile(kernel, symbol)


def machine_of(target: str) -> PlantedCpu:
    return PlantedCpu(real_machine_of(target).backend)


# --- a GPU that is not there ------------------------------------------------------------------------------------------


@dataclass
class FakeKernel:
    """Takes as many microseconds as its schedule says: knobs `us`, `spill`, `wrong`, `fails`."""

    knobs: dict[str, int]

    def measure(self, limit: float | None = None) -> float:
        if "fails" in self.knobs:
            raise InternalError("the device does not answer")
        time.sleep(0.01)
        return self.knobs.get("us", 1) * 1e-6

    def fastest(self, calls: int) -> float:
        return 1e-6

    def check(self, text: str, choice: Choice) -> bool:
        if "wrong" in self.knobs:
            raise AccuracyError("it is off")
        return True


class FakeBench:
    def load(self, task: Task, built: Built) -> FakeKernel:
        return FakeKernel(built.facts["knobs"])


class PretendedGpu(CudaBackend):
    """An H200 of any number."""

    def _parsed(self, target: Target) -> tuple[int, GpuTarget]:
        return target.device, FACTS["sm_90a"]


class FakeGpu(Machine):
    """A GPU whose code is made of knobs. `name` tells the device's number."""

    @property
    def name(self) -> str:
        return f"device {self.backend.number}"

    def templates(self, setting: Setting) -> Sequence[Template]:
        def apply(problem: Problem, knobs: Mapping[str, int | str]) -> Kernel:
            return problem.kernel

        return [Template("fake", lambda p: [()], apply)]

    def kernel(self, problem: Problem, choice: Choice, setting: Setting) -> Kernel:
        knobs = "".join(f"_{k}_{v}" for k, v in choice.knobs if k != "ignored")
        return parse_kernel(
            show_kernel(super().kernel(problem, choice, setting)).replace("def relu(", f"def fake{knobs}(")
        )

    def compile(self, kernel: Kernel, symbol: str) -> Built:
        words = kernel.name.split("_")[1:]
        knobs = {k: int(v) for k, v in zip(words[::2], words[1::2])}
        return Built(symbol, symbol.encode(), {"knobs": knobs}, knobs.get("spill", 0))

    def bench(self) -> FakeBench:
        return FakeBench()


def gpu_of(target: str) -> FakeGpu:
    return FakeGpu(PretendedGpu(parse_target(target)))
