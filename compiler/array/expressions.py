"""From the graph of an expression to a program in milliseconds.

Graph passes, fusion and memory plan are those of models. What is expensive there is looked up: the schedule of a kernel
by the text of its naive nest, its machine code by the scheduled text, a whole program by the structure of the
expression; in this process, then in the kernel cache. A graph with loops or host steps is compiled as a model.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dnnc.array.devices import DeviceData, Place, imported
from dnnc.backends.base import Backend
from dnnc.backends.registry import open_backend
from dnnc.backends.runtime import codec
from dnnc.backends.runtime.expression import SavedExpression, program_of, record_of
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.backends.runtime.program import Program
from dnnc.compile_graph import compile_for
from dnnc.compile_program import context_of, templates_of
from dnnc.executable import Executable
from dnnc.hybrid import has_control
from dnnc.ir.graph import Graph
from dnnc.memory import check_fits, check_possible
from dnnc.options import CompileOptions, cache_folder, make_options
from dnnc.passes.analysis.segments import needs_host
from dnnc.passes.base import PassManager
from dnnc.passes.planning.ladder import built
from dnnc.passes.planning.program import KnownGroups, Planner, ScheduledGraph
from dnnc.passes.schedule.step import first_choice
from dnnc.schedules import Schedules
from dnnc.tune_option import choose_of

GROUPS = 512  # groups of nodes that are not lowered again, each with the graph of an expression
FOLD_LIMIT = 4096  # bytes: ranges and the like are computed where they are read, and not kept by each program
KEPT_CONSTANTS = 1 << 16  # bytes of a program that the cache keeps
# Kernels of a model that start quicker one by one than recorded, if operands and results would have to be copied.
FEW = 8


class ExpressionCompiler:
    """Makes programs of graphs, one for each device and process. `place`: the arrays' device, None for the host."""

    def __init__(self, place: Place | None = None, **options: Any) -> None:
        self.place = place
        self.opts: CompileOptions = make_options({**({"target": place.name} if place else {}), **options})
        self.backend: Backend = place.backend if place else open_backend(self.opts.target, self.opts.threads)
        self.cache = KernelCache(cache_folder(self.opts.cache))
        self.backend.start(self.cache)
        self.check = bool(self.opts.verify)
        self.loader = self.backend.expressions(self.cache, self.check)
        self.context = context_of(self.opts, self.backend, FOLD_LIMIT)
        self.templates = templates_of(self.opts, self.backend)
        self.schedules = Schedules(self.cache, self.opts, self.backend)
        self.seed = "\0".join([self.backend.name, self.schedules.seed, self.backend.code_version])
        self.choose = choose_of(self.opts, self.backend, self.cache)
        self.groups = KnownGroups(GROUPS)
        self.lock = threading.RLock()

    def compile(self, make: Callable[[], Graph], structure: str = "") -> Any:
        """A function from a list of arrays to a list of arrays.

        Args:
            make: gives the graph, which is then changed; not asked where the cache knows the structure.
            structure: equal for equal graphs; empty where nothing is to be kept.
        """
        key = self._key("program", structure) if structure else ""
        with self.lock:
            return self._kept(key) or self._new(make(), key)

    def compile_flat(self, make: Callable[[], Graph], structure: str) -> Any | None:
        """A program of element-wise ops for arrays of any one shape, as vectors; None unless it is one kernel.

        Args:
            make: gives the graph, whose only symbolic size is that of all arrays in it.
            structure: equal for equal graphs.
        """
        key = self._key("flat program", structure)
        with self.lock:
            program = self._kept(key)
            if program is None:
                graph = make()
                PassManager().run(graph, self.backend.passes(self.opts.opt_level), self.context)
                program = self._program(graph, key)
            return program

    def _key(self, kind: str, structure: str) -> str:
        return hashlib.sha256("\0".join([kind, self.seed, structure]).encode()).hexdigest()

    def _kept(self, key: str) -> Any | None:
        """The program that the cache knows under a key, if all of its code is here."""
        data = self.cache.get(key) if key else None
        return None if data is None else self._callable(program_of(codec.loads(SavedExpression, data)))

    def _new(self, graph: Graph, key: str) -> Any:
        if self.loader is None or graph.dims or needs_host(graph) or has_control(graph):
            return self._as_model(graph)
        check_possible(graph)
        if self.place is not None:
            self.place.ask_for(sum(n for v in graph.outputs if isinstance(n := v.type.nbytes, int)))
        original = graph.copy()
        PassManager().run(graph, self.backend.passes(self.opts.opt_level), self.context)
        if needs_host(graph) or has_control(graph):  # that a pass has made
            return self._as_model(original)
        return self._program(graph, key) or self._as_model(original)

    def _program(self, graph: Graph, key: str) -> Any | None:
        """The program of a graph after the passes; None where it cannot run so."""
        choose = first_choice if graph.dims and self.place is not None else self.choose
        fuse = self.opts.opt_level >= 3
        planner = Planner(graph, self.context, self.templates, choose, fuse, None, self.schedules, self.groups)
        if self.loader is None or (graph.dims and len(planner.region().fusion.groups) > 1):
            return None  # values between kernels of a flat program would have no place
        job = self.loader.job(self.check)

        def build(scheduled: ScheduledGraph) -> Program:
            program = self.backend.build(scheduled, job)
            self.backend.check(program, job)
            return program

        scheduled, program = built(planner.program(), build)
        if graph.dims and len(program.calls) > 1:
            return None
        found = self._callable(program)
        if found is not None and key and program.constant_bytes <= KEPT_CONSTANTS and not scheduled.steps_down:
            self.cache.put(key, codec.dumps(record_of(program)))
        return found

    def _callable(self, program: Program) -> Any | None:
        assert self.loader is not None
        found = self.loader.load(program)
        if found is None:
            return None
        if not program.dims:
            check_fits([(f"result {k}", s, np.dtype(d)) for k, (s, d) in enumerate(found.outputs)])
        return found if self.place is None else OnDevice(found, self.place)

    def _as_model(self, graph: Graph) -> Callable[[Sequence[Any]], list[Any]]:
        """A model; sizes that are not known have bounds, within which one program serves."""
        names = [v.name for v in graph.inputs], [v.name for v in graph.outputs]
        dims = {n: (v.lo if isinstance(v.lo, int) else 0, v.hi) for n, v in graph.dims.items() if isinstance(v.hi, int)}
        opts = replace(self.opts, dims=dims)
        f = compile_for(graph, names, opts, self.backend, self.cache)
        place = self.place

        def run(arrays: Sequence[Any]) -> list[Any]:
            if place is None:
                results = f(*arrays)
            else:
                stream = place.device.current_stream()
                results = f(*(place.operand(a, stream) for a in arrays))
            many = results if isinstance(results, tuple) else (results,)
            if place is None:
                return list(many)
            # A program that reads nothing gives NumPy arrays.
            return [imported(r) if arrays else place.upload(r) for r in many]

        return run


class OnDevice:
    """A program of an expression on arrays of a device: DeviceData in and out."""

    def __init__(self, program: Any, place: Place) -> None:
        self.program, self.place = program, place

    @property
    def notes(self) -> Sequence[Any]:
        """The kernels, for who wants to know what was fused."""
        return self.program.kernels  # type: ignore[no-any-return]

    def __call__(self, data: Sequence[Any]) -> list[DeviceData]:
        """Queue the program on the current stream."""
        return self._queued(data, [s for s, _ in self.program.outputs], ())

    def flat(self, data: Sequence[Any], shape: tuple[int, ...], size: int) -> list[DeviceData]:
        """Queue a flat program on arrays of a shape with `size` elements, at least one."""
        return self._queued(data, [shape] * len(self.program.outputs), (size,))

    def _queued(self, data: Sequence[Any], shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> list[DeviceData]:
        place, program = self.place, self.program
        stream = place.device.current_stream()
        operands = [place.operand(a, stream) for a in data]
        results = [place.empty(s, d, stream) for s, (_, d) in zip(shapes, program.outputs)]
        program.run([*(d.address for d in operands), *(d.address for d in results)], sizes, stream)
        for d in operands:
            if d.stream != stream:
                place.done(d, stream)
        if program.guards:
            place.defer(self, program.check, stream)
        return results


def started_directly(f: Executable, place: Place) -> Callable[..., list[DeviceData]] | None:
    """Return what a model of a few kernels computes, directly on DeviceData; None for other models."""
    program = f.programs[0] if f.programs and not f.graph.dims else None
    if not isinstance(program, Program) or len(program.calls) > FEW or program.constant_bytes > KEPT_CONSTANTS:
        return None
    loader = place.backend.expressions(KernelCache(None), False)
    found = None if loader is None else loader.load(program)
    if found is None:
        return None
    on_device = OnDevice(found, place)
    return lambda *data: on_device(data)
