"""Programs of expressions: what `dnnc.compile` makes of a model, by a shorter way.

In: a graph of fixed sizes. Out: a Light, which runs on NumPy arrays. The graph passes, the fusion and the plan of the
memory are those of models. What is expensive there is looked up here: the schedule of a kernel by the text of its naive
nest (in this process, then in the kernel cache, where other processes left it), its object by the scheduled text; and
there is no entry function to compile, a table tells the runner which kernels to call. A graph with loops or host steps
goes the long way.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from dnnc.backends.llvm.build import symbol_of
from dnnc.backends.llvm.compile import Loaded, compile_text, llvm_version, load_objects
from dnnc.backends.llvm.emit import emit_kernel
from dnnc.backends.llvm.facts import facts
from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.features import parse_target as parse_cpu
from dnnc.backends.llvm.gate import check_kernel
from dnnc.backends.llvm.launch_plan import PARALLEL, Record, Runner, can_run, counters, records_of, runner, table_of
from dnnc.backends.llvm.templates import templates
from dnnc.backends.runtime import codec
from dnnc.backends.runtime.frames import Frame, address_of, aligned_empty, runtime
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.backends.runtime.link import Linker, lay_out_constants
from dnnc.backends.runtime.results import results as result_memory
from dnnc.contexts import context_of
from dnnc.ir.errors import AccuracyError, InputError
from dnnc.ir.graph import Graph
from dnnc.ir.op import Trait
from dnnc.memory import check_fits, check_possible
from dnnc.options import CompileOptions, cache_folder, make_options, thread_count
from dnnc.passes.analysis.segments import needs_host
from dnnc.passes.base import PassManager
from dnnc.passes.pipelines import LEVELS
from dnnc.passes.planning.ladder import Failure, built, fail
from dnnc.passes.planning.program import KnownGroups, Planner, Program, Step
from dnnc.schedules import Schedules, keep, used
from dnnc.tune_option import choose_of

Array = np.ndarray[Any, Any]
T = TypeVar("T")
KERNELS = 4096  # loaded kernels kept in a process, some kilobytes each
GROUPS = 512  # groups of nodes that are not lowered again, each with the graph of an expression
FOLD_LIMIT = 4096  # bytes: ranges and the like are computed where they are read, and not kept by each program
KEPT_CONSTANTS = 1 << 16  # bytes of a program that the cache keeps
PARALLEL_SIZE = 1 << 14  # elements from which a flat program wakes other threads
FREE_FRAMES = 4  # of a program: so many calls at once find their memory
KEPT_ARENA = 64 << 20  # bytes of intermediate values that a program keeps for its next call; more is given back


class Kernels:
    """The kernels of this process: schedules by the nest, and the loaded code by symbol that was used last."""

    def __init__(self, target: CpuTarget, opts: CompileOptions) -> None:
        self.target, self.opts = target, opts
        self.cache = KernelCache(cache_folder(opts.cache))
        self.schedules = Schedules(self.cache, opts, target)
        self.loaded: OrderedDict[str, tuple[Loaded, int]] = OrderedDict()
        self.seed = "\0".join([self.schedules.seed, llvm_version()])

    def load(self, text: str) -> tuple[Loaded, int] | None:
        """The loaded code of a scheduled kernel and its address; None if it is nowhere."""
        symbol = symbol_of(text, self.target)
        found = used(self.loaded, symbol)
        if found is None and (obj := self.cache.get(symbol[2:])) is not None:
            found = self.enter(symbol, load_objects([obj]))
        return found

    def make(self, step: Step, graph: Graph) -> tuple[Loaded, int]:
        """The same of a step that was scheduled here: compiled and checked where it is new."""
        found = self.load(step.text)
        if found is None:
            symbol = symbol_of(step.text, self.target)
            obj = compile_text(
                emit_kernel(step.kernel, symbol, self.target.feature_set), self.target.cpu, self.target.features
            )
            loaded = load_objects([obj])
            if self.opts.verify:
                check_kernel(graph, step, loaded.address(symbol))
            found = self.enter(symbol, loaded)
            self.cache.put(symbol[2:], obj)
        return found

    def enter(self, symbol: str, loaded: Loaded) -> tuple[Loaded, int]:
        found = loaded, loaded.address(symbol)
        keep(self.loaded, symbol, found, KERNELS)
        return found


@dataclass(frozen=True)
class KernelNote:
    """What a report says of a kernel call."""

    name: str
    nodes: tuple[str, ...]
    choice: str
    parallel: bool
    text: str


@dataclass(frozen=True)
class Plan:
    """A linked program as plain data: the kernel cache keeps it under the structure of its expression, for other
    processes.
    """

    outputs: tuple[tuple[tuple[int, ...], str], ...]  # shapes (not of a flat program) and NumPy's names of dtypes
    records: tuple[Record, ...]
    notes: tuple[KernelNote, ...]  # of each record
    arena: int
    constants: bytes


class Light:
    """A program that can be called: arrays in, arrays out. Calls may come from several threads at once."""

    def __init__(self, plan: Plan, loaded: Mapping[str, tuple[Loaded, int]], entry: Runner, threads: int) -> None:
        self.notes = plan.notes
        self.outputs = [(shape, np.dtype(d)) for shape, d in plan.outputs]
        self._table = table_of(plan.records, {symbol: address for symbol, (_, address) in loaded.items()})
        self._constants = aligned_empty(max(len(plan.constants), 1))
        self._constants[: len(plan.constants)] = np.frombuffer(plan.constants, np.uint8)
        self._owners, self._runner = [owner for owner, _ in loaded.values()], entry  # of the code
        self._nthreads = threads if any(r.flags & PARALLEL for r in plan.records) else 1
        self._arena, self._counters = plan.arena, counters(plan.records)
        self._table_address: int = self._table.ctypes.data
        self._free: list[tuple[Frame, Any, int]] = []
        self._launch, self._empty = runtime().launch, result_memory().empty
        check_fits([(f"result {k}", s, d) for k, (s, d) in enumerate(self.outputs)], plan.arena)

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        """Run on contiguous arrays of the right shapes and dtypes."""
        results = [self._empty(s, d) for s, d in self.outputs]
        if any(r.size for r in results):
            self._run(arrays, results, (), self._nthreads)
        return results

    def flat(self, arrays: Sequence[Array], shape: tuple[int, ...], size: int) -> list[Array]:
        """Run a program for arrays of any one shape, with elements; `size`: of them."""
        results = [self._empty(shape, d) for _, d in self.outputs]
        self._run(arrays, results, (size,), self._nthreads if size >= PARALLEL_SIZE else 1)
        return results

    def _run(self, arrays: Sequence[Array], results: Sequence[Array], sizes: tuple[int, ...], threads: int) -> None:
        frame, pointers, address = self._take(len(arrays) + len(results) + len(sizes))
        k = 2
        for a in arrays:
            pointers[k] = address_of(a)
            k += 1
        for a in results:
            pointers[k] = address_of(a)
            k += 1
        for n in sizes:
            pointers[k] = n
            k += 1
        status = self._launch(self._runner.entry, frame.address, address, self._table_address, threads)
        if status:
            frame.forget()
            raise InputError(
                f"an index lies outside of its axis (status {status}): check the values of integer operands"
            )
        if len(self._free) < FREE_FRAMES and self._arena <= KEPT_ARENA:
            self._free.append((frame, pointers, address))

    def _take(self, buffers: int) -> tuple[Frame, Any, int]:
        try:
            return self._free.pop()
        except IndexError:
            frame, pointers = (
                Frame(self._arena, 0, self._constants.ctypes.data),
                (ctypes.c_void_p * (2 + buffers + self._counters))(),
            )
            pointers[0], pointers[1] = frame.arena.ctypes.data, self._constants.ctypes.data
            return frame, pointers, ctypes.addressof(pointers)


class Compiler:
    """Makes programs of graphs for this machine's CPU. One per process serves all arrays; `options` as for
    `dnnc.compile`.
    """

    def __init__(self, **options: Any) -> None:
        self.opts = make_options(options)
        self.target = parse_cpu(str(self.opts.target), self.opts.threads)
        self.kernels = Kernels(self.target, self.opts)
        self.runner = runner(self.kernels.cache)
        runtime().start(self.kernels.cache)
        self.threads = min(thread_count(self.opts.threads), self.target.threads)
        self.ctx = context_of(self.opts, facts(self.target, self.opts.numerics), FOLD_LIMIT)
        self.templates = templates(self.target, self.ctx.strict)
        self.choose = choose_of(self.opts, kept=self.kernels.cache)
        self.groups = KnownGroups(GROUPS)
        self.lock = threading.RLock()

    def compile(self, make: Callable[[], Graph], structure: str = "") -> Any:
        """A function from a list of arrays to a list of arrays.

        Args:
            make: gives the graph, which is then changed; not asked where the cache knows the structure.
            structure: equal for equal graphs; empty where nothing is to be kept.
        """
        key = (
            hashlib.sha256("\0".join(["program", self.kernels.seed, structure]).encode()).hexdigest()
            if structure
            else ""
        )
        with self.lock:
            return self._known(key) or self._new(make(), key)

    def compile_flat(self, make: Callable[[], Graph], structure: str) -> Light | None:
        """A program of element-wise ops for arrays of any one shape, which are vectors to it; None where that is no
        single kernel.

        Args:
            make: gives the graph, whose only symbolic size is that of all arrays in it.
            structure: equal for equal graphs.
        """
        key = hashlib.sha256("\0".join(["flat program", self.kernels.seed, structure]).encode()).hexdigest()
        with self.lock:
            known = self._known(key)
            if known is None:
                graph = make()
                PassManager().run(graph, LEVELS[self.opts.opt_level], self.ctx)
                known = self._made(graph, key, self._planner(graph))
            return known

    def _known(self, key: str) -> Light | None:
        data = self.kernels.cache.get(key) if key else None
        if data is None:
            return None
        plan = codec.loads(Plan, data)
        loaded = {
            r.symbol: found
            for r, n in zip(plan.records, plan.notes)
            if (found := self.kernels.load(n.text)) is not None
        }
        return Light(plan, loaded, self.runner, self.threads) if all(r.symbol in loaded for r in plan.records) else None

    def _new(self, graph: Graph, key: str) -> Any:
        if graph.dims or needs_host(graph) or any(Trait.CONTROL in n.op.traits for n in graph.nodes()):
            return self._long_way(graph)
        check_possible(graph)
        original = graph.copy()
        PassManager().run(graph, LEVELS[self.opts.opt_level], self.ctx)
        if needs_host(graph) or any(Trait.CONTROL in n.op.traits for n in graph.nodes()):  # that a pass has made
            return self._long_way(original)
        return self._made(graph, key, self._planner(graph)) or self._long_way(original)

    def _made(self, graph: Graph, key: str, planner: Planner) -> Light | None:
        """The program of a graph after the passes; None where the runner cannot take it."""
        if graph.dims and len(planner.region().fusion.groups) > 1:  # values between kernels would have no place
            return None
        program, made = built(planner.program(), self._built)
        if made is None or (graph.dims and len(made[0].records) > 1):
            return None
        plan, loaded = made
        if key and len(plan.constants) <= KEPT_CONSTANTS and not program.steps_down:
            self.kernels.cache.put(key, codec.dumps(plan))
        return Light(plan, loaded, self.runner, self.threads)

    def _planner(self, graph: Graph) -> Planner:
        return Planner(
            graph,
            self.ctx,
            self.templates,
            self.choose,
            self.opts.opt_level >= 3,
            None,
            self.kernels.schedules,
            self.groups,
        )

    def _built(self, program: Program) -> tuple[Plan, dict[str, tuple[Loaded, int]]] | None:
        """The table of a program and its code; None where the runner cannot take it."""
        steps = list(program.kernels)
        plan = self._linked(program, steps)
        if plan is None:
            return None
        loaded: dict[str, tuple[Loaded, int]] = {}
        failures: list[Failure] = []
        for r, s in zip(plan.records, steps):
            try:
                loaded[r.symbol] = self.kernels.load(s.text) or self.kernels.make(s, program.graph)
            except Exception as e:
                failures.append(Failure(s, "kernel check" if isinstance(e, AccuracyError) else "compilation", e))
        fail(program, failures)
        return plan, loaded

    def _long_way(self, graph: Graph) -> Any:
        from dnnc.driver import compile_graph

        f = compile_graph(graph, ([v.name for v in graph.inputs], [v.name for v in graph.outputs]), self.opts)

        def run(arrays: Sequence[Array]) -> list[Array]:
            r = f(*arrays)
            return list(r) if isinstance(r, tuple) else [r]

        return run

    def _linked(self, program: Program, steps: Sequence[Step]) -> Plan | None:
        """None where the runner cannot take it."""
        constants, offsets = lay_out_constants(program)
        symbols = {s.text: symbol_of(s.text, self.target) for s in steps}
        linker = Linker(program, symbols, offsets)
        calls = linker.entry()
        if not can_run(calls):
            return None
        notes = [
            KernelNote(s.nest.name, tuple(n.op.name for n in s.group.nodes), str(s.choice), s.parallel, s.text)
            for s in steps
        ]
        g = program.graph
        outputs = tuple(
            (tuple(int(str(d)) for d in v.type.shape if not g.dims), v.type.dtype.numpy.name) for v in g.outputs
        )
        apart = {symbol for text, symbol in symbols.items() if "barrier()" not in text}
        records = records_of(calls, len(g.inputs) + len(g.outputs), apart)
        return Plan(
            outputs, tuple(records), tuple(notes), 0 if g.dims else linker.plan.offsets({})[1], constants.tobytes()
        )
