"""Where the time of a call goes: `f.profile(x)`.

The program runs as it always does, its threads, barriers and caches included, but through a timed entry function, in
which each thread notes the time before and after every kernel call. Out comes a `Profile`: for each kernel its time,
its rates, and how near they are to the machine's limits; the rest is lost at barriers and outside.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.backends.base import Backend, Ceilings, Samples
from dnnc.backends.runtime.program import CONTROL, Call, Program
from dnnc.donation import packed
from dnnc.ir.checks import integer
from dnnc.ir.errors import InputError, UnsupportedError
from dnnc.ir.expr import Var
from dnnc.options import cache_folder
from dnnc.report import KernelReport, ProgramReport
from dnnc.report.collect import kernel_reports
from dnnc.report.notebook import html_of
from dnnc.report.profile_tables import profile_tables
from dnnc.report.tables import plain_text
from dnnc.tools.ceilings import best_ceilings
from dnnc.tools.trace import Timeline, chrome_trace, timeline, write_trace

if TYPE_CHECKING:
    from dnnc.executable import Executable

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class CallTime:
    """A kernel's call: median seconds. `waiting`: time lost by all threads at the barrier behind, or at the end.

    `balance`: time of the average thread over that of the slowest; 1 where the work is evenly divided, and for a kernel
        of one thread.
    """

    kernel: str
    nodes: str
    seconds: float
    waiting: float
    balance: float


@dataclass(frozen=True)
class KernelTime:
    """A unique kernel, all of its calls in one run added up."""

    name: str
    symbol: str
    calls: int
    seconds: float  # median time
    share: float  # of the time of a whole call
    balance: float
    parallel: bool
    flops: int | None  # of all calls; None where they are not known for these sizes
    bytes: int | None  # of all calls; None where they are not known for these sizes
    bound: str  # what limits it first: "compute", or the level of the memory that holds its data
    reached: float | None  # the least time that this limit allows over the time it took
    choice: str
    nodes: tuple[str, ...]

    @property
    def flops_per_second(self) -> float | None:
        return None if self.flops is None else self.flops / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float | None:
        return None if self.bytes is None else self.bytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, repr=False)
class Profile:
    """Times of a model's calls on given inputs, medians over `repeats` of them, in seconds.

    `total` is a call as its user waits for it. Of it, `waiting` is lost at barriers, and `overhead` passes outside of
    the native program: in Python, and until the threads have begun and ended. Medians do not add up exactly.
    """

    name: str
    target: str
    threads: int
    dims: Mapping[str, int]
    repeats: int
    total: float
    waiting: float
    overhead: float
    kernels: tuple[KernelTime, ...]
    calls: tuple[CallTime, ...]
    ceilings: Ceilings
    timeline: Timeline  # of the fastest run

    def as_dict(self) -> dict[str, Any]:
        """The profile as dicts, lists, strings and numbers."""
        rates = ("flops_per_second", "bytes_per_second")
        kernels = [{**dataclasses.asdict(k), **{r: getattr(k, r) for r in rates}} for k in self.kernels]
        plain = dataclasses.asdict(dataclasses.replace(self, timeline=Timeline((), (), (), 0.0)))
        del plain["timeline"]  # `trace` writes it
        return {**plain, "dims": dict(self.dims), "kernels": kernels}

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the fastest run as a Chrome trace for ui.perfetto.dev: kernels by thread, arena, producers."""
        facts = {
            (k.name, nodes): {"schedule": k.choice, "limit": k.bound, "of limit": k.reached, "calls": k.calls}
            for k in self.kernels
            for nodes in k.nodes
        }
        write_trace(chrome_trace(self.timeline, self.name, self.target, facts), path)

    def to_json(self) -> str:
        """The profile as a JSON object."""
        return json.dumps(self.as_dict(), indent=2)

    def text(self, detail: bool = False) -> str:
        """As tables; with `detail` also every call in the order of the program."""

        return plain_text(profile_tables(self, detail))

    def __repr__(self) -> str:
        return f"<Profile of {self.name[:60]} for {self.target[:60]}: {self.total * 1e6:.4g} us a call; print it>"

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return html_of(profile_tables(self))


def profile(f: Executable, backend: Backend, collect: Callable[[], list[Array]], repeats: int | None = None) -> Profile:
    """Call a compiled model on these inputs again and again and say where the time goes.

    Args:
        f: the model.
        backend: for which it is compiled.
        collect: gives the arrays of a call.
        repeats: measured calls; None: as many as fit into a second, 10 to 1000.

    Raises:
        InputError: as a call; or there is nothing to measure.
        UnsupportedError: the target cannot be profiled.
    """
    if repeats is not None:
        repeats = integer(repeats, "repeats", 1)
    if not backend.compiles:
        raise UnsupportedError(f"a profile is of compiled code; the target {f.options.target} has none")
    instance: Any = f.cache.instance(tuple([a.shape for a in collect()]))
    program: Program = instance.program
    if instance.empty or not program.calls:
        raise InputError("there is nothing to profile: for these inputs no kernel is called")
    report = find_report(f.report.programs, program)
    inputs, given_up = getattr(program, "inputs", ()), set(getattr(program, "donated", {}).values())
    if given_up or not all(t.row_major for t in inputs):  # once: copies of what calls write into, packed where they lie
        held = [packed(a.copy() if j in given_up else a, t) for j, (a, t) in enumerate(zip(collect(), inputs))]
        collect = lambda: held  # noqa: E731
    samples = backend.measure(instance, collect, repeats)
    sizes = dict(zip(program.dims, instance.dims.tolist())) if program.dims else {}
    dims = {v.name: n for v, n in sizes.items()} or dict(report.dims)
    if dims != dict(report.dims):
        report = resized(report, program, sizes)
    limits = best_ceilings(backend, samples.threads, cache_folder(f.options.cache))
    return summarize(f.report.name, f.report.target, dims, report, samples, limits, program.calls)


def find_report(programs: Sequence[ProgramReport], program: Program) -> ProgramReport:
    """What was noted of a program. InputError: nothing was."""
    wanted, count = {c.symbol for c in program.calls}, len(program.calls)
    for p in reversed(programs):
        if wanted <= {k.symbol for k in p.kernels} and (
            p.calls == count or any(k.choice == CONTROL for k in p.kernels)
        ):
            return p
    raise InputError(
        "nothing is noted of the program that runs for these inputs; sizes of 0 get one of their own, which cannot be "
        "profiled"
    )


def resized(report: ProgramReport, program: Program, sizes: Mapping[Var, int]) -> ProgramReport:
    """Report of a dynamic program with its kernels' work at these sizes, unknown for a loaded program."""
    if not program.work:
        unknown = tuple(dataclasses.replace(k, flops="", bytes="") for k in report.kernels)
        return dataclasses.replace(report, kernels=unknown)
    return dataclasses.replace(report, kernels=kernel_reports(program, sizes))


# --- figures ----------------------------------------------------------------------------------------------------------


def summarize(
    name: str,
    target: str,
    dims: Mapping[str, int],
    report: ProgramReport,
    samples: Samples,
    limits: Ceilings,
    order: Sequence[Call],
) -> Profile:
    """Medians by call and by kernel, the longest kernel first. A kernel in a loop counts each time it runs."""
    times, waits, balance = (np.median(a, 0) for a in (samples.kernels, samples.waiting, samples.balance))
    total = float(np.median(samples.total))
    reports = {k.symbol: k for k in report.kernels}
    by_symbol: dict[str, list[int]] = {}
    for k, (symbol, _) in enumerate(samples.calls):
        by_symbol.setdefault(symbol, []).append(k)
    rows = []
    for symbol, where in by_symbol.items():
        seconds = float(times[where].sum())
        even = float(np.average(balance[where], weights=times[where] + 1e-12))
        counted = dataclasses.replace(reports[symbol], count=len(where))
        rows.append(kernel_time(counted, seconds, seconds / total, even, limits))
    calls = tuple(
        CallTime(reports[s].name, _nodes(reports[s], n), float(times[k]), float(waits[k]), float(balance[k]))
        for k, (s, n) in enumerate(samples.calls)
    )
    waiting, overhead = float(np.median(samples.waiting.sum(1))), float(np.median(samples.overhead))
    rows.sort(key=lambda r: -r.seconds)
    repeats = len(samples.total)
    run = timeline(samples.spans, [(c.kernel, c.nodes) for c in calls], order, report.memory.alive)
    kernels, threads = tuple(rows), samples.threads
    return Profile(name, target, threads, dims, repeats, total, waiting, overhead, kernels, calls, limits, run)


def _nodes(r: KernelReport, call: int) -> str:
    """The nodes that a call of a kernel computes; a loop makes its calls again and again."""
    return r.nodes[call % len(r.nodes)] if r.nodes else ""


def kernel_time(k: KernelReport, seconds: float, share: float, balance: float, limits: Ceilings) -> KernelTime:
    """A kernel's time against the limit that is nearer."""
    flops, moved = (n * k.count if isinstance(n, int) else None for n in (k.flops, k.bytes))
    bound, reached = "", None
    if flops is not None and moved is not None and seconds:
        level = limits.level(moved / k.count)
        needed = {"compute": flops / limits.flops, level.name: moved / level.rate}
        bound = max(needed, key=lambda b: needed[b])
        reached = needed[bound] / seconds
    return KernelTime(
        k.name, k.symbol, k.count, seconds, share, balance, k.parallel, flops, moved, bound, reached, k.choice, k.nodes
    )
