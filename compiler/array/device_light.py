"""Programs of expressions on a CUDA device: `light.py` for arrays that live there.

In: a graph of fixed sizes. Out: a DeviceLight, which runs on DeviceData. Passes, fusion and memory plan are those of
models; what is expensive is looked up by the text of a kernel's naive nest. The kernels are launched one by one, in the
order of the caller's stream, on memory of CuPy's pool: a recorded graph would hold addresses, so that operands and
results had to be copied. Nobody waits: an index that a kernel finds outside of its axis is told when somebody looks. A
graph with loops or host steps goes the long way, as a model.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any

import numpy as np

from dnnc.array.devices import DeviceData, Place, imported
from dnnc.array.light import FOLD_LIMIT, GROUPS, KEPT_CONSTANTS, KERNELS, KernelNote
from dnnc.backends.cuda.build import build, checked_key, launched, step_call, symbols_of
from dnnc.backends.cuda.emit import kernel_number
from dnnc.backends.cuda.facts import facts
from dnnc.backends.cuda.launch import Launch
from dnnc.backends.cuda.library import is_call
from dnnc.backends.cuda.native import STATUS_BYTES, CudaNative
from dnnc.backends.runtime import codec
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.backends.runtime.link import Linker, lay_out_constants
from dnnc.backends.runtime.program import Place as Where
from dnnc.contexts import context_of
from dnnc.device_driver import Machine, check_native, compile_for_device
from dnnc.executable import Executable
from dnnc.ir.errors import InputError
from dnnc.ir.graph import Graph
from dnnc.ir.op import Trait
from dnnc.options import CompileOptions, cache_folder, make_options
from dnnc.passes.analysis.segments import needs_host
from dnnc.passes.base import PassManager
from dnnc.passes.pipelines import LEVELS
from dnnc.passes.planning.ladder import built
from dnnc.passes.planning.program import KnownGroups, Planner, Program, Step
from dnnc.passes.schedule.step import first_choice
from dnnc.schedules import Schedules, keep, used
from dnnc.tune_option import choose_of

# kernels of a model that are quicker started one by one than recorded, when operands and results would have to be
# copied
FEW = 8
ASKED = 1 << 30  # bytes of results from which a device is asked for room first
Data = Sequence[Any]  # DeviceData; NumPy arrays where values are neutral


@dataclass(frozen=True)
class Code:
    """A kernel whose code is known: its symbol, its text, how it is launched, the names of its parameters."""

    symbol: str
    text: str
    launch: Launch
    params: tuple[str, ...]


@dataclass(frozen=True)
class DevicePlan:
    """A linked program as plain data. `calls`: symbol, and for each parameter the number of a memory with an offset
    into it; memories are the operands, the results, the arena and the constants. The kernel of a flat program takes the
    size before them.
    """

    outputs: tuple[tuple[tuple[int, ...], str], ...]
    calls: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    kernels: Mapping[str, Code]
    notes: tuple[KernelNote, ...]
    arena: int
    constants: bytes


class DeviceLight:
    """A program that can be called: DeviceData in and out. Calls may come from several threads at once."""

    def __init__(self, plan: DevicePlan, place: Place, functions: Mapping[str, Any]) -> None:
        self.notes, self.place, self.device = plan.notes, place, place.device
        self.outputs = [(shape, np.dtype(d)) for shape, d in plan.outputs]
        launches = {s: k.launch for s, k in plan.kernels.items()}
        self._calls = [
            (functions[s], launches[s], args)
            for s, args in plan.calls
            if 0 not in (*launches[s].grid, *launches[s].block)
        ]
        self._arena = plan.arena
        self._guards = {kernel_number(s): n.name for (s, _), n in zip(plan.calls, plan.notes) if "guard(" in n.text}
        self._fixed, self._keep = self._resident(plan.constants)

    def _resident(self, constants: bytes) -> tuple[tuple[int, int], Any]:
        """The addresses of the constants and of the status, and what owns that memory."""
        at, memory = self.device.pooled(len(constants) + STATUS_BYTES)
        stream = self.device.current_stream()
        block = np.frombuffer(bytes(STATUS_BYTES) + constants, np.uint8)
        self.device.upload(at, block, stream)
        self.device.synchronize(stream)  # so that all streams see it
        return (at + STATUS_BYTES, at), memory

    def __call__(self, data: Data) -> list[DeviceData]:
        """Queue the program on the current stream."""
        return self._queued(data, [s for s, _ in self.outputs], ())

    def flat(self, data: Data, shape: tuple[int, ...], size: int) -> list[DeviceData]:
        """Queue a program for arrays of any one shape, with elements; `size`: of them."""
        return self._queued(data, [shape] * len(self.outputs), (size,))

    def _queued(self, data: Data, shapes: Sequence[tuple[int, ...]], sizes: tuple[int, ...]) -> list[DeviceData]:
        device, place = self.device, self.place
        stream = device.current_stream()
        operands = [place.operand(a, stream) for a in data]
        results = [place.empty(s, d, stream) for s, (_, d) in zip(shapes, self.outputs)]
        arena, memory = device.pooled(self._arena) if self._arena else (0, None)
        constants, status = self._fixed
        memories = [*(d.address for d in operands), *(d.address for d in results), arena, constants]
        for function, launch, args in self._calls:
            device.launch(function, launch, [*sizes, *(memories[k] + offset for k, offset in args), status], stream)
        for d in operands:
            if d.stream != stream:
                place.done(d, stream)
        if self._guards:
            place.defer(self, self._check, stream)
        del memory  # used again by what comes later on this stream
        return results

    def _check(self) -> None:
        """InputError where a kernel has found an index outside of its axis."""
        status = np.zeros(STATUS_BYTES // 4, np.int32)
        self.device.download(status.view(np.uint8), self._fixed[1], 0)
        self.device.synchronize(0)
        code, number, value, _ = status.tolist()
        if code:
            self.device.fill(self._fixed[1], 0, STATUS_BYTES, 0)
            self.device.synchronize(0)
            where = self._guards.get(number) or ", ".join(self._guards.values())
            raise InputError(
                f"an index read at run time, {value}, lies outside of its axis, in {where}: check the values of "
                "integer operands"
            )


def started_directly(f: Any, where: Place) -> Callable[..., list[DeviceData]] | None:
    """What a model of a few kernels computes, of DeviceData and without the care for arrays of all libraries; None for
    other models.
    """
    native = f.programs[0] if isinstance(f, Executable) and f.programs and not f.graph.dims else None
    if (
        not isinstance(native, CudaNative)
        or native.controls
        or len(native.calls) > FEW
        or native.placed.nbytes > KEPT_CONSTANTS
    ):
        return None
    if any(map(is_call, native.cubins.values())):
        return None
    buffers = len(native.inputs) + len(native.outputs)
    kernels = {
        k.symbol: Code(k.symbol, k.text, native.launches[k.symbol], native.params[k.symbol]) for k in native.kernels
    }
    names = {k.symbol: k for k in native.kernels}
    notes = tuple(
        KernelNote(names[c.symbol].name, names[c.symbol].nodes, names[c.symbol].choice, True, names[c.symbol].text)
        for c in native.calls
    )
    outputs = tuple((tuple(int(str(d)) for d in t.shape), t.dtype.numpy.name) for t in native.outputs)
    calls = tuple((c.symbol, tuple(_memory(p, buffers) for p in c.args)) for c in native.calls)
    plan = DevicePlan(outputs, calls, kernels, notes, native.sizes({})[1], native.constants.tobytes())
    light = DeviceLight(plan, where, native.functions(where.device))
    return lambda *data: light(data)


def _memory(p: Where, buffers: int) -> tuple[int, int]:
    """The memory of a DevicePlan in which an argument lies, and where; there are so many operands and results."""
    if p.space == "buffer":
        return p.number, p.inside
    return (buffers, p.offset) if p.space == "arena" else (buffers + 1, p.number)


class DeviceCompiler:
    """Makes programs of graphs for one device. `options` as for `dnnc.compile`."""

    def __init__(self, place: Place, **options: Any) -> None:
        self.place, self.machine = place, place.machine
        self.opts: CompileOptions = make_options({"target": place.name, **options})
        self.cache = KernelCache(cache_folder(self.opts.cache))
        self.ctx = context_of(self.opts, facts(self.machine.target, self.opts.numerics), FOLD_LIMIT)
        m: Machine = self.machine
        self.schedules = Schedules(self.cache, self.opts, m.target)
        self.seed = "\0".join([self.schedules.seed, m.compiler.version])
        self.functions: OrderedDict[str, Any] = OrderedDict()  # by symbol; checked
        self.choose = choose_of(self.opts, f"cuda -arch={m.target.arch}", self.cache)
        self.groups = KnownGroups(GROUPS)
        self.lock = RLock()

    def compile(self, make: Callable[[], Graph], structure: str = "") -> Any:
        """A function from a list of DeviceData to a list of DeviceData; see `light.Compiler.compile`."""
        key = (
            hashlib.sha256("\0".join(["device program", self.seed, structure]).encode()).hexdigest()
            if structure
            else ""
        )
        with self.lock:
            return self._known(key) or self._new(make(), key)

    def compile_flat(self, make: Callable[[], Graph], structure: str) -> DeviceLight | None:
        """A program of element-wise ops for arrays of any one shape; see `light.Compiler.compile_flat`."""
        key = hashlib.sha256("\0".join(["flat device program", self.seed, structure]).encode()).hexdigest()
        with self.lock:
            known = self._known(key)
            if known is None:
                graph = make()
                PassManager().run(graph, LEVELS[self.opts.opt_level], self.ctx)
                planner = self._planner(graph)
                known = (
                    self._made(graph, key, planner) if len(planner.region().fusion.groups) == 1 else None
                )  # values between kernels would have no place
            return known

    def _known(self, key: str) -> DeviceLight | None:
        data = self.cache.get(key) if key else None
        return None if data is None else self._loaded(codec.loads(DevicePlan, data))

    def _loaded(self, plan: DevicePlan) -> DeviceLight | None:
        """The program of a plan; None where code of it is not here, or not checked."""
        functions = {symbol: self._function(k) for symbol, k in plan.kernels.items()}
        return None if any(f is None for f in functions.values()) else DeviceLight(plan, self.place, functions)

    def _function(self, k: Code) -> Any:
        """A kernel that needs neither a compiler nor a check any more, loaded; else None."""
        found = used(self.functions, k.symbol)
        if found is None and (not self.opts.verify or self.cache.get(checked_key(k.symbol)) is not None):
            cubin = self.cache.get(k.symbol[2:])
            if cubin is not None:
                found = self.place.device.load(cubin, k.symbol, k.launch, k.params, "pdl_wait(" in k.text)
                keep(self.functions, k.symbol, found, KERNELS)
        return found

    def _new(self, graph: Graph, key: str) -> Any:
        if graph.dims or needs_host(graph) or any(Trait.CONTROL in n.op.traits for n in graph.nodes()):
            return self._long_way(graph)
        self._room([v.type.nbytes for v in graph.outputs])
        original = graph.copy()
        PassManager().run(graph, LEVELS[self.opts.opt_level], self.ctx)
        if needs_host(graph) or any(Trait.CONTROL in n.op.traits for n in graph.nodes()):  # that a pass has made
            return self._long_way(original)
        return self._made(graph, key, self._planner(graph)) or self._long_way(original)

    def _room(self, sizes: Sequence[Any]) -> None:
        """TargetError where the results do not fit, before anything is compiled for them."""
        total = sum(n for n in sizes if isinstance(n, int))
        if total > ASKED:
            self.place.device.pooled(total)  # which goes back to the pool, and is taken from there

    def _long_way(self, graph: Graph) -> Callable[[Data], list[DeviceData]]:
        names = [v.name for v in graph.inputs], [v.name for v in graph.outputs]
        f = compile_for_device(graph, names, self.opts, self.cache, self.machine)

        def run(data: Data) -> list[DeviceData]:
            stream = self.place.device.current_stream()
            r = f(*(self.place.operand(a, stream) for a in data)) if data else self._without_operands(f)
            return [imported(x) for x in (r if isinstance(r, tuple) else (r,))]

        return run

    def _without_operands(self, f: Any) -> Any:
        """A program that reads nothing would give NumPy arrays."""
        r = f()
        return tuple(map(self.place.upload, r)) if isinstance(r, tuple) else self.place.upload(r)

    def _planner(self, graph: Graph) -> Planner:
        choose = first_choice if graph.dims else self.choose
        return Planner(
            graph, self.ctx, self.machine.templates, choose, self.opts.opt_level >= 3, None, self.schedules, self.groups
        )

    def _made(self, graph: Graph, key: str, planner: Planner) -> DeviceLight | None:
        """The program of a graph after the passes; None where a library is to be called."""
        program, codes = built(planner.program(), self._codes)
        steps = list(program.kernels)
        if codes is None or (graph.dims and len(steps) > 1):
            return None
        plan = self._linked(program, steps, {k.text: k for k in codes})
        if key and len(plan.constants) <= KEPT_CONSTANTS and not program.steps_down:
            self.cache.put(key, codec.dumps(plan))
        return self._loaded(plan)

    def _codes(self, program: Program) -> list[Code] | None:
        """The kernels of a program, compiled and checked where they are new; None where a library is to be called."""
        if any(map(step_call, program.kernels)):
            return None
        symbols = symbols_of(program, self.machine.target.arch, self.machine.compiler.version)
        steps = {symbols[s.text]: s for s in program.kernels}
        codes = [
            Code(symbol, s.text, launched(symbol, s, self.cache), tuple(p.name for p in s.nest.entry.params))
            for symbol, s in steps.items()
        ]
        if any(self._function(k) is None for k in codes):
            native = build(program, self.machine.target, self.cache, self.machine.compiler, bool(self.opts.verify))
            for symbol, f in check_native(native, self.place.device).items():
                keep(self.functions, symbol, f, KERNELS)
        return codes

    def _linked(self, program: Program, steps: Sequence[Step], codes: Mapping[str, Code]) -> DevicePlan:
        constants, offsets = lay_out_constants(program)
        linker = Linker(program, {text: k.symbol for text, k in codes.items()}, offsets)
        g = program.graph
        buffers = len(g.inputs) + len(g.outputs)
        calls = tuple((c.symbol, tuple(_memory(p, buffers) for p in c.args)) for c in linker.entry())
        notes = [
            KernelNote(s.nest.name, tuple(n.op.name for n in s.group.nodes), str(s.choice), True, s.text) for s in steps
        ]
        outputs = tuple(
            (tuple(int(str(d)) for d in v.type.shape if not g.dims), v.type.dtype.numpy.name) for v in g.outputs
        )
        arena = 0 if g.dims else program.memory.offsets({})[1]
        return DevicePlan(
            outputs,
            calls,
            {k.symbol: k for k in codes.values()},
            tuple(notes),
            arena,
            constants.tobytes() if offsets else b"",
        )
