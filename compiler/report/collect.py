"""Fills reports: laps of a clock while the driver works, and a program with its native code as a ProgramReport."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dnnc.backends.llvm.build import Native
from dnnc.ir.errors import Loc
from dnnc.ir.expr import Expr, Var, const, value
from dnnc.ir.shapes import as_env, resolve
from dnnc.passes.base import PassRecord
from dnnc.passes.program import Program, Step
from dnnc.report import Count, KernelReport, MemoryReport, ProgramReport, Report

if TYPE_CHECKING:
    from dnnc.signature import Signature

Progress = Callable[[str, int, int], None]
KEPT = 16  # reports of specialisations of one model


class Laps:
    """Seconds by stage: each lap gives the time since the last one to a stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def through(self, progress: Progress | None) -> Progress:
        """A progress function that laps the stage that it is told of, and passes the news on."""

        def tell(stage: str, done: int, of: int) -> None:
            self.lap(stage)
            if progress is not None:
                progress(stage, done, of)

        return tell


class Log:
    """What one compiled model has noted so far; specialisations come while it is called."""

    def __init__(self, name: str, target: str, threads: int, import_seconds: float = 0.0) -> None:
        self.name, self.target, self.threads, self.import_seconds = name, target, threads, import_seconds
        self._programs: deque[ProgramReport] = deque(maxlen=KEPT)

    def add(self, program: ProgramReport) -> None:
        self._programs.append(program)

    def report(self, signature: Signature) -> Report:
        return Report(self.name, self.target, self.threads, signature.inputs, signature.outputs, self.import_seconds, tuple(self._programs))


def program_report(
    native: Native, dims: Mapping[Var, int], symbolic: bool, passes: Sequence[PassRecord], seconds: Mapping[str, float]
) -> ProgramReport:
    """What is known of a linked program. `dims`: the sizes that it was made for or, if it serves all, was first asked for."""
    program = native.program
    sizes = {v.name: n for v, n in dims.items()}  # by name: a program for all sizes may have closer bounds
    here = {v: sizes[v.name] for v in program.dims}
    memory = MemoryReport(native.sizes(here)[1], program.memory.lower_bound(here), native.constants.nbytes)
    host = tuple(_where(g.nodes[0].locs, g.nodes[0].op.name) for g in program.fusion.groups if g.kind == "host")
    shown = dict(sorted(sizes.items()))
    kernels = kernel_reports(program, native.symbols, here)
    return ProgramReport(shown, symbolic, tuple(passes), kernels, memory, native.compiled, host, dict(seconds))


def kernel_reports(program: Program, symbols: Mapping[str, str], dims: Mapping[Var, int]) -> tuple[KernelReport, ...]:
    """The unique kernels of a program in order of their first call."""
    env = as_env(dims)
    out = []
    for text, steps in unique_kernels(program).items():
        s = steps[0]
        moved = sum((const(v.type.nbytes) for v in s.params), const(0))
        nodes = tuple(step_nodes(x) for x in steps)
        out.append(KernelReport(s.kernel.name, symbols[text], len(steps), str(s.choice), s.parallel, _count(s.flops, env), _count(moved, env), nodes))
    return tuple(out)


def unique_kernels(program: Program) -> dict[str, list[Step]]:
    """The steps by the text of their kernel, in order of the first call."""
    out: dict[str, list[Step]] = {}
    for s in program.steps:
        out.setdefault(s.text, []).append(s)
    return out


def step_nodes(s: Step) -> str:
    """`conv1 (Conv), relu1 (Relu)`: the nodes of the model that a call computes, or where none is known its ops."""
    locs = dict.fromkeys(loc for n in s.group.nodes for loc in n.locs)
    return ", ".join(_short(loc) for loc in locs) or " + ".join(n.op.name for n in s.group.nodes)


def _short(loc: Loc) -> str:
    return f"{loc.name or '?'} ({loc.op})" if loc.op and not loc.file else str(loc)


def _where(locs: Sequence[Loc], op: str) -> str:
    return f"{op} at {', '.join(map(str, locs))}" if locs else op


def _count(n: int | Expr, env: Mapping[Expr, Expr]) -> Count:
    d = resolve(const(n), env)
    number = d if isinstance(d, int) else value(d)
    return repr(d) if number is None else int(number)
