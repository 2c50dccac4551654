"""Models with host steps: segments of native code and host nodes, run in order.

`dnnc.compile_graph` hands over a graph that `dnnc.passes.analysis.segments.needs_host` says cannot be one program. For
the sizes of a call it is divided once; each segment is an Executable of its own. Dims that host steps make stay
symbolic in the segments, so that one program serves all of them; where that cannot be compiled the segment is
specialised to the sizes it meets. Arrays pass by reference.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Union

import numpy as np

from dnnc.backends.base import Backend
from dnnc.backends.runtime.arrays import device_array, from_host, is_device_array, kind_of, to_host
from dnnc.backends.runtime.device import Device
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.backends.runtime.results import copy_results
from dnnc.donation import Donation
from dnnc.executable import Executable
from dnnc.graph_compiler import GraphCompiler
from dnnc.ir.errors import DnncError, InputError, UnsupportedError, locations
from dnnc.ir.expr import Expr, Var, free
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.interp import run_node
from dnnc.ir.op import Trait
from dnnc.ir.shapes import Bindings, as_env, bind_dims, bind_shape, bound_dims, nonempty_lows, resolve, specialise
from dnnc.options import CompileOptions
from dnnc.parameters import Parameters
from dnnc.passes.analysis.segments import Segment, prepare, split
from dnnc.passes.base import pass_context
from dnnc.program_cache import ModelCompiler, OnnxParts, ProgramCache, Shapes, only_for_devices
from dnnc.report import Report
from dnnc.report.log import Log, Progress
from dnnc.signature import Signature
from dnnc.tools.accuracy import check_model

if TYPE_CHECKING:
    from dnnc.tools.profile import Profile

Array = np.ndarray[Any, Any]
Make = Callable[[Graph, bool], Executable]  # compiles a segment; True: one program for all sizes


class NativeStep:
    """A segment with its program. `drops` are the values that nobody needs after this step."""

    native: Literal[True] = True

    def __init__(self, segment: Segment, make: Make, drops: Sequence[Value]) -> None:
        self.segment, self.drops, self._make = segment, drops, make
        self._shared = bool(segment.graph.dims)
        self.program = make(segment.graph, self._shared)
        self._lock = threading.Lock()

    def inputs(self, env: Mapping[Value, Array], bound: Bindings) -> list[Array]:
        """What the program takes: values, and an array without bytes whose shape tells the other dims."""
        arrays = [env[v] for v in self.segment.inputs]
        if self.segment.carried:
            by_name = {x.name: n for x, n in bound.items()}
            arrays.append(np.empty((*(by_name[x.name] for x in self.segment.carried), 0), np.uint8))
        return arrays

    def run(self, env: dict[Value, Array], bound: Bindings) -> None:
        results = self._call(self.inputs(env, bound))
        env.update(zip(self.segment.outputs, results if isinstance(results, tuple) else (results,)))

    def _call(self, arrays: Sequence[Array]) -> Any:
        if not self._shared:
            return self.program(*arrays)
        try:
            return self.program(*arrays)
        except InputError:
            raise
        except DnncError:  # not for all sizes: then for these
            with self._lock:
                self.program, self._shared = self._make(self.segment.graph, False), False
            return self.program(*arrays)

    def prepare(self, dims: Bindings) -> None:
        """Compile ahead of the first call, for some sizes that the dims allow."""
        sizes = as_env({x: dims.get(x, _some(x)) for x in self.segment.graph.dims.values()})
        shapes = [tuple(int(str(resolve(d, sizes))) for d in v.type.shape) for v in self.segment.graph.inputs]
        try:
            self.program.prepare(shapes)
        except InputError:
            return  # the sizes were a guess
        except DnncError:
            self.program, self._shared = self._make(self.segment.graph, False), False


def _some(x: Var) -> int:
    """A size that a dim may have."""
    high = x.hi if isinstance(x.hi, int) else None
    low = max(x.lo if isinstance(x.lo, int) else 1, 1)
    n = -(-low // x.div) * x.div
    return n if high is None else min(n, high)


class HostStep:
    """A host node. `drops` as of NativeStep."""

    native: Literal[False] = False

    def __init__(self, node: Node, drops: Sequence[Value]) -> None:
        self.node, self.drops = node, drops
        self._direct = node.op.host if _is_direct(node) else None
        self._limits = [_limits(v) for v in node.outputs]

    @property
    def where(self) -> str:
        """`string_split at words (StringSplit, opset 20)`"""
        return f"{self.node.op.name}{locations(self.node.locs)}"

    def run(self, env: dict[Value, Array], bound: Bindings) -> None:
        operands = [None if v is None else env[v] for v in self.node.inputs]
        try:
            made = (
                run_node(self.node, operands, bound)
                if self._direct is None
                else self._run_direct(self._direct, operands, bound)
            )
        except InputError as e:
            raise e if self.node.op.name in str(e) else InputError(f"{self.where}: {e}") from e
        env.update(zip(self.node.outputs, made))

    def _run_direct(
        self, host: Callable[..., Any], operands: Sequence[Array | None], bound: Bindings
    ) -> Sequence[Array]:
        made = host(*operands, **self.node.attrs)
        many: Sequence[Array] = made if isinstance(made, (tuple, list)) else (made,)
        for v, a, limits in zip(self.node.outputs, many, self._limits):
            if limits is None or not _bound(limits, a.shape, bound):
                bind_shape(bound, v, a.shape)  # the general way, which also says what is wrong
        return many


Limits = Sequence[tuple[Union[Var, None], int, int]]


def _limits(v: Value) -> Limits | None:
    """What each size of a shape may be, and the dim that it is; None where that takes more than two numbers."""
    out: list[tuple[Var | None, int, int]] = []
    for d in v.type.shape:
        if isinstance(d, int):
            out.append((None, d, d))
        elif isinstance(d, Var) and d.div == 1 and not isinstance(d.lo, Expr) and not isinstance(d.hi, Expr):
            out.append((d, 0 if d.lo is None else d.lo, sys.maxsize if d.hi is None else d.hi))
        else:
            return None
    return out


def _bound(limits: Limits, shape: tuple[int, ...], bound: Bindings) -> bool:
    """Bind dims to the sizes of an array, if they fit."""
    if len(limits) != len(shape):
        return False
    return all(
        low <= n <= high and (d is None or bound.setdefault(d, n) == n) for (d, low, high), n in zip(limits, shape)
    )


def _is_direct(n: Node) -> bool:
    """True if the host function is callable as it is, on stored arrays and attributes fixed but for new dims."""
    values = [v for v in (*n.inputs, *n.outputs) if v is not None]
    stored = Trait.BITS in n.op.traits or all(v.type.dtype.computed is v.type.dtype for v in values)
    new = {d for o in n.outputs for d in o.type.shape if isinstance(d, Var)} - {
        d for v in n.inputs if v is not None for d in v.type.shape
    }
    return (
        n.op.host is not None
        and stored
        and all((isinstance(a, Var) and a in new) or _plain(a) for a in n.attrs.values())
    )


def _plain(a: Any) -> bool:
    return all(map(_plain, a)) if isinstance(a, tuple) else not isinstance(a, (Expr, Graph))


Runs = Union[NativeStep, HostStep]


class HybridProgram:
    """A divided graph, ready to run; an instance of itself, since it takes sizes from what it is given."""

    outputs = None
    in_place: frozenset[int] = frozenset()

    def __init__(
        self, graph: Graph, steps: tuple[Runs, ...], constants: Mapping[Value, Array], names: Sequence[str]
    ) -> None:
        """`names`: of the outputs, for messages."""
        self.graph, self.steps, self.constants, self._names = graph, steps, constants, names
        self.used = False
        self._last: tuple[list[tuple[int, ...]] | None, Bindings] = (
            None,
            {},
        )  # shapes of the last call, and what they say

    @property
    def program(self) -> HybridProgram:
        return self

    @property
    def segments(self) -> list[Executable]:
        """The native parts."""
        return [s.program for s in self.steps if isinstance(s, NativeStep)]

    @property
    def host(self) -> list[str]:
        """The nodes between them."""
        return [s.where for s in self.steps if isinstance(s, HostStep)]

    def start(self, arrays: Sequence[Array]) -> tuple[dict[Value, Array], Bindings]:
        """What the steps read and write: values, and dims."""
        shapes = [a.shape for a in arrays]
        known, bound = self._last
        if shapes != known:
            bound = bind_dims(self.graph, shapes)
            self._last = shapes, bound
        return {**self.constants, **dict(zip(self.graph.inputs, arrays))}, dict(bound)

    def call(self, arrays: Sequence[Array]) -> list[Array]:
        """The outputs: arrays that are nobody else's."""
        env, bound = self.start(arrays)
        for s in self.steps:
            s.run(env, bound)
            for v in s.drops:
                del env[v]
        foreign = [*arrays, *self.constants.values()]
        out: list[Array] = []
        for v in self.graph.outputs:
            out.append(_own(env[v], [*foreign, *out]))
        return out

    def into(self, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        """Run, and copy the outputs. InputError where a buffer has another shape or dtype."""
        copy_results(self.call(arrays), results, self._names)

    def text(self, stage: str, kernel: str | None) -> str:
        """Join the segments' texts; stage "graph" shows host nodes too. InputError: no such kernel."""
        texts, errors = [], []
        for k, s in enumerate(self.steps):
            if isinstance(s, HostStep):
                texts += [f"# step {k}: on the host\n{s.node!r}"] if stage == "graph" and kernel is None else []
                continue
            try:
                texts.append(f"# step {k}: native\n{s.program.source(stage, kernel)}")
            except InputError as e:
                errors.append(e)
        if errors and not texts:
            raise errors[-1]
        return "\n".join(texts)


def _own(a: Array, others: Sequence[Array]) -> Array:
    """Return the array, copied where it is shared, not contiguous, or a small part of a larger memory."""
    base = a.base
    wasteful = isinstance(base, np.ndarray) and base.nbytes > 2 * a.nbytes
    if wasteful or not a.flags.c_contiguous or not a.flags.writeable or any(np.may_share_memory(a, b) for b in others):
        return a.copy(order="C")
    return a


def divide(graph: Graph, options: CompileOptions, make: Make, names: Sequence[str]) -> HybridProgram:
    """Divide a graph, which is changed, and compile its segments."""
    prepare(graph, pass_context(numerics=options.numerics, precision=options.precision))
    parts = split(graph)
    last: dict[Value, int] = {}
    for k, p in enumerate(parts):
        reads = p.inputs if isinstance(p, Segment) else [v for v in p.node.inputs if v is not None]
        makes = p.outputs if isinstance(p, Segment) else p.node.outputs
        last.update(dict.fromkeys([*reads, *makes], k))
    steps: list[Runs] = []
    kept = {*graph.outputs, *graph.constants}
    for k, p in enumerate(parts):
        drops = [v for v, n in last.items() if n == k and v not in kept]
        steps.append(NativeStep(p, make, drops) if isinstance(p, Segment) else HostStep(p.node, drops))
    read = {v for v in last if v in graph.constants} | (set(graph.outputs) & set(graph.constants))
    return HybridProgram(graph, tuple(steps), {v: graph.constants[v] for v in read}, names)


class HybridCompiler(ModelCompiler):
    """Divides a model by input sizes, or once if the options bound them all. `backend`: that of the segments."""

    def __init__(
        self,
        graph: Graph,
        names: tuple[Sequence[str], Sequence[str]],
        options: CompileOptions,
        backend: Backend,
        log: Log,
        cache: KernelCache,
        progress: Progress | None = None,
        onnx: Callable[[], OnnxParts] | None = None,
    ) -> None:
        self.interface, (self.inputs, self.outputs) = graph, names
        self.options, self.backend, self.log, self.onnx = options, backend, log, onnx
        self.cache, self.progress = cache, progress
        self.dims = tuple(
            sorted(
                {x for v in graph.inputs for d in v.type.shape if isinstance(d, Expr) for x in free(d)},
                key=lambda x: x.name,
            )
        )
        self.shared = {x.name for x in self.dims} <= set(options.dims)

    @property
    def graph(self) -> Graph:
        return self.interface

    @property
    def target(self) -> Any:
        return self.backend.target

    def _segment(self, graph: Graph, shared: bool) -> Executable:
        """Compile a segment between host steps: for all sizes, or (False) for each that comes."""
        # Checking whole segments on random values between steps would mean nothing.
        options = replace(self.options, dims={}, outputs=(), verify="kernels" if self.options.verify else False)
        lows = None
        if shared and self.backend.any_sizes and not has_control(graph):
            empties = {n: 1 for n, x in graph.dims.items() if x.lo == 0}  # no elements: a program of their own
            lows = {**empties, **nonempty_lows(bound_dims(graph, {n: (1, None) for n in empties}))}
        log = Log(graph.name, str(options.target), self.log.threads)
        names = [v.name for v in graph.inputs], [v.name for v in graph.outputs]
        compiler = GraphCompiler(
            graph, names, options, self.backend, log, self.cache, shared=lows, progress=self.progress
        )
        return Executable(compiler)

    def sizes(self, dims: Mapping[Var, int]) -> tuple[int, ...]:
        return () if self.shared else tuple(dims[x] for x in self.dims)

    def compile(self, dims: Mapping[Var, int]) -> HybridProgram:
        graph = self.graph.copy() if self.shared else specialise(self.graph, {x.name: dims[x] for x in self.dims})
        program = divide(graph, self.options, self._segment, self.outputs)
        if self.options.verify == "model":
            self._check(program, {x: dims[x] for x in self.dims})
        return program

    def _check(self, program: HybridProgram, dims: Mapping[Var, int]) -> None:
        """Compare a program with the interpreter on random numbers (strings are skipped). AccuracyError if off."""
        if any(v.type.dtype.kind == "s" for v in (*self.graph.inputs, *self.graph.outputs)):
            return
        whole = Donation({}, self.inputs)
        check_model(
            lambda *arrays: whole.checked(program, arrays), self.graph, dims, self.outputs, self.options.precision
        )

    def instance(self, program: HybridProgram, dims: Mapping[Var, int]) -> HybridProgram:
        return program

    def prepare(self, instance: HybridProgram, shapes: Shapes) -> None:
        dims = bind_dims(self.graph, shapes)
        for s in instance.steps:
            if isinstance(s, NativeStep) and (
                self.backend.any_sizes or not s.segment.graph.dims
            ):  # what a device runs is made for certain sizes
                s.prepare({x: dims[x] for x in s.segment.graph.dims.values() if x in dims})

    def device_calls(self, signature: Signature, donation: Donation | None, cache: ProgramCache) -> HybridCalls | None:
        device = self.backend.device
        return None if device is None else HybridCalls(device, signature, cache)

    def report(self, signature: Signature, programs: Sequence[HybridProgram]) -> Report:
        """Its programs are the segments, its fallbacks the host nodes."""
        segments = tuple(r for f in (programs[-1].segments if programs else ()) for r in f.report.programs)
        host = tuple(dict.fromkeys(where for p in programs for where in p.host))
        return replace(self.log.report(signature), programs=segments, host=host)

    def source(self, program: HybridProgram, stage: str, kernel: str | None) -> str:
        return program.text(stage, kernel)

    def profile(self, f: Executable, collect: Callable[[], list[Array]], repeats: int | None) -> Profile:
        """Kernels of all segments, and host nodes, whose schedule is called "host"."""
        from dnnc.tools.hybrid_profile import profile  # loads what measures, which a call does without

        arrays = collect()
        program = f.cache.instance(tuple([a.shape for a in arrays])).program
        return profile(f, program, arrays, self.backend, repeats)

    def save(self, path: Any, programs: Mapping[tuple[int, ...], Any], small: bool, archs: Sequence[str]) -> None:
        """Loading compiles the graph again; `small` makes no difference."""
        from dnnc.artifact.writer import save_graph  # loads what writes, which a call does without

        only_for_devices(archs)
        save_graph(path, "graph", self)


def has_control(graph: Graph) -> bool:
    """True if there are loops or branches, whose functions are made for fixed sizes."""
    return any(Trait.CONTROL in n.op.traits for n in graph.nodes())


def staged(compiler: HybridCompiler) -> Executable:
    """The executable, its segments compiled ahead where one division serves all sizes."""
    f = Executable(compiler)
    if compiler.shared:
        program = f.cache.program({x: _some(x) for x in compiler.dims})
        for s in program.steps:
            if isinstance(s, NativeStep):
                s.prepare({})
    return f


class HybridCalls:
    """Device arrays pass through the host for host steps; results are arrays of the first input's library."""

    def __init__(self, device: Callable[[], Device], signature: Signature, cache: ProgramCache) -> None:
        self._device, self._signature, self._cache = device, signature, cache

    def run(
        self, values: Sequence[Any], outputs: Sequence[Any] | None, stream: Any, parameters: Parameters | None
    ) -> list[Any]:
        """`stream` has no meaning where the host takes part."""
        device = self._device()
        kind = kind_of(values[0], device)
        device.synchronize(kind.stream)
        arrays = self._signature.convert([to_host(v) if is_device_array(v) else v for v in values])
        results = self._cache.instance(tuple([a.shape for a in arrays])).call(arrays)
        if outputs is None:
            return [kind.finish(from_host(r, kind, device)) for r in results]
        host = [np.empty(tuple(g.shape), r.dtype) for g, r in zip(outputs, results)]
        copy_results(results, host, self._signature.output_names)
        for r, g, name in zip(host, outputs, self._signature.output_names):
            device.upload(device_array(g, name, r.dtype, r.ndim, device).address, r, kind.stream)
        device.synchronize(kind.stream)
        return list(outputs)

    def bind(self, values: Sequence[Any], outputs: Any, parameters: Parameters | None) -> Callable[[], Any]:
        raise UnsupportedError(
            "bind: the model has steps on the host, which arrays on a device cannot be bound to; bind NumPy arrays"
        )
