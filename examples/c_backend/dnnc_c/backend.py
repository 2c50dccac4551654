"""The target `c`: kernels as C99, one thread, compiled with the system's C compiler. Options: `c -cc=clang`."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dnnc.backends.base import Backend, BuildJob, ParameterTables
from dnnc.backends.build import Check, build_kernels
from dnnc.backends.check import check_run, run_bytes
from dnnc.backends.runtime.link import link
from dnnc.backends.runtime.program import CompiledKernel, Program
from dnnc.backends.runtime.prologue import prologue_of
from dnnc.ir.errors import TargetError
from dnnc.ir.graph import Graph, Value
from dnnc.ir.loops.text import parse_kernel
from dnnc.ir.target import Target, TargetFacts
from dnnc.passes.planning.program import Program as ScheduledGraph
from dnnc.passes.planning.program import Step
from dnnc_c import compile as compile_
from dnnc_c import emit
from dnnc_c.compile import compile_many, identity, load
from dnnc_c.emit import MATH, emit_kernel
from dnnc_c.run import CRunner

Array = np.ndarray[Any, Any]


@cache
def printer_version() -> str:
    """A hash of what turns a kernel's text into code, so that a change of it never meets code of before."""
    return hashlib.sha256(b"".join(Path(str(m.__file__)).read_bytes() for m in (emit, compile_))).hexdigest()


class CBackend(Backend):
    """See Backend."""

    name = "c"
    stages = ("graph", "operator", "c")
    comments = {"c": "//"}

    def __init__(self, target: Target, threads: int | None = None) -> None:
        wrong = [name for name, _ in target.options if name != "cc"]
        if wrong:
            raise TargetError(f"target={str(target)!r}: there is no option -{wrong[0]}; there is -cc=COMPILER")
        self.target = self.cc = target.option("cc", "cc")

    @property
    def code_version(self) -> str:
        return f"{identity(self.cc)} {printer_version()}"

    # --- compilation --------------------------------------------------------------------------------------------------

    def facts(self, numerics: str) -> TargetFacts:
        return TargetFacts(lanes=1, native_intrinsics=MATH)

    def build(self, scheduled: ScheduledGraph, job: BuildJob) -> Program:
        symbols = self.symbols(scheduled)

        def compile(texts: Mapping[str, str], failed: dict[str, Exception]) -> dict[str, bytes]:
            return compile_many(self.cc, texts, failed, job.tell("compile"))

        built = build_kernels(scheduled, symbols, job, emit_kernel, compile, checker)
        return replace(
            link(scheduled, symbols),
            code=built.code,
            texts=built.texts,
            compiled=built.compiled,
            prologue=prologue_of(scheduled),
            loaded=load(built.code),
        )

    def symbols(self, scheduled: ScheduledGraph) -> dict[str, str]:
        """Names of kernels by their operator IR: hashes of all that their code depends on."""
        version = self.code_version
        return {s.text: "k_" + hashlib.sha256(f"{version}\0{s.text}".encode()).hexdigest() for s in scheduled.kernels}

    def describe(self, scheduled: ScheduledGraph) -> Program:
        return link(scheduled, self.symbols(scheduled))

    # --- execution, texts ---------------------------------------------------------------------------------------------

    def runner(self, parameters: ParameterTables | None) -> CRunner:
        return CRunner(parameters)

    def kernel_text(self, kernel: CompiledKernel, stage: str) -> str:
        return kernel.text if kernel.control else emit_kernel(parse_kernel(kernel.text), kernel.symbol)

    @classmethod
    def availability(cls) -> dict[str, Any]:
        try:
            return {"name": cls.name, "available": True, "reason": "", "compiler": identity("cc")}
        except TargetError as e:
            return {"name": cls.name, "available": False, "reason": str(e)}


def checker(code: Mapping[str, bytes]) -> Check:
    """What checks kernels of new code against float64."""
    functions = load(code)

    def check(graph: Graph, step: Step, symbol: str) -> None:
        def execute(buffers: Mapping[Value, Array], out: Value, zone: Array) -> tuple[int, int, int]:
            status = ctypes.c_int64(0)
            functions[symbol](*(ctypes.c_void_p(buffers[v].ctypes.data) for v in step.params), ctypes.byref(status))
            return status.value, 0, 0

        check_run(graph, step, lambda inputs, dims, env: run_bytes(step, inputs, env, execute))

    return check
