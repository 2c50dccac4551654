"""Profile of a model with host steps: those of its segments, and the host nodes beside them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.backends.base import LEAST, MOST, SECONDS, Backend, Ceilings
from dnnc.ir.checks import integer
from dnnc.ir.errors import InputError
from dnnc.ir.graph import Value
from dnnc.ir.shapes import Bindings
from dnnc.options import cache_folder
from dnnc.tools.ceilings import best_ceilings
from dnnc.tools.profile import CallTime, KernelTime, Profile
from dnnc.tools.trace import HOST, Span, Timeline, joined

if TYPE_CHECKING:
    from dnnc.executable import Executable
    from dnnc.hybrid import HostStep, HybridProgram, NativeStep

Array = np.ndarray[Any, Any]


def profile(
    f: Executable, program: HybridProgram, arrays: Sequence[Array], backend: Backend, repeats: int | None = None
) -> Profile:
    """Measure each step of `program` by itself on earlier steps' results. InputError: as a call; `repeats` < 1."""
    if repeats is not None:
        repeats = integer(repeats, "repeats", 1)
    env, bound = program.start(arrays)
    parts: list[Profile] = []
    host: list[tuple[HostStep, float]] = []
    run: list[Timeline | Span] = []
    for s in program.steps:
        before = dict(env)
        s.run(env, bound)
        if s.native:
            parts += (measured := _native(s, env, bound, repeats))
            run += [p.timeline for p in measured]
        else:
            host.append((s, _seconds(partial(_again, s, before, bound), repeats)[0]))
            run.append(Span(0, HOST, 0.0, host[-1][1], s.node.op.name, s.where))
    total, count = _seconds(lambda: program.call(arrays), repeats)
    dims = {x.name: n for x, n in sorted(bound.items(), key=lambda item: item[0].name)}
    threads = max((p.threads for p in parts), default=1)
    limits = parts[0].ceilings if parts else best_ceilings(backend, threads, cache_folder(f.options.cache))
    return _together(f, parts, host, total, count, dims, limits, joined(run))


def _again(s: HostStep, env: dict[Value, Array], bound: Bindings) -> None:
    s.run(dict(env), dict(bound))


def _native(s: NativeStep, env: dict[Value, Array], bound: Bindings, repeats: int | None) -> list[Profile]:
    try:
        return [s.program.profile(*s.inputs(env, bound), repeats=repeats)]
    except InputError:
        return []  # no kernel is called for these sizes


def _seconds(call: Callable[[], Any], repeats: int | None) -> tuple[float, int]:
    """The median time of a call, and of how many."""
    start = time.perf_counter()
    call()
    count = repeats or max(LEAST, min(MOST, int(SECONDS / max(time.perf_counter() - start, 1e-6))))
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times), count


def _together(
    f: Executable,
    parts: Sequence[Profile],
    host: Sequence[tuple[HostStep, float]],
    total: float,
    count: int,
    dims: dict[str, int],
    limits: Ceilings,
    run: Timeline,
) -> Profile:
    rows = [dataclasses.replace(k, share=k.seconds / total) for p in parts for k in p.kernels]
    rows += [
        KernelTime(s.node.op.name, "", 1, t, t / total, 1.0, False, None, None, "", None, "host", (s.where,))
        for s, t in host
    ]
    calls = [c for p in parts for c in p.calls] + [CallTime(s.node.op.name, s.where, t, 0.0, 1.0) for s, t in host]
    rows.sort(key=lambda r: -r.seconds)
    threads = max((p.threads for p in parts), default=1)
    waiting = sum(p.waiting for p in parts)
    overhead = max(total - waiting - sum(r.seconds for r in rows), 0.0)
    times = total, waiting, overhead
    kernels = tuple(rows)
    return Profile(f.report.name, f.report.target, threads, dims, count, *times, kernels, tuple(calls), limits, run)
