"""A model that needs Python between native calls: segments of native code and host nodes, run in order.

The driver hands over a graph that `dnnc.passes.graph.segments.needs_host` says cannot be one program. For the sizes of a call it is divided
once (a *plan*); each segment is an Executable of its own. Dims that host steps make stay symbolic in the segments, so that one program
serves all of them; where that cannot be compiled the segment is specialised to the sizes it meets. Arrays pass by reference.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, Union

import numpy as np

from dnnc.accuracy import check_model
from dnnc.compiled import CompiledModel
from dnnc.executable import Executable
from dnnc.ir.errors import DnncError, InputError, a_type, count, locations
from dnnc.ir.expr import Expr, Var, free
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.interp import run_node
from dnnc.ir.shapes import Bindings, as_env, bind_dims, bind_shape, resolve, specialise
from dnnc.options import CompileOptions
from dnnc.origin import OnnxParts
from dnnc.passes.base import PassContext
from dnnc.passes.graph.segments import Segment, prepare, split
from dnnc.report import Report
from dnnc.signature import Signature, TensorSpec

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget
    from dnnc.backends.llvm.features import CpuTarget
    from dnnc.device_executable import DeviceExecutable
    from dnnc.profile import Profile

Array = np.ndarray[Any, Any]
MAX_PLANS = 16  # divided graphs kept for different shapes of one model
Program = Union[Executable, "DeviceExecutable"]
Make = Callable[[Graph, bool], Program]  # compiles a segment; True: one program for all sizes


class NativeStep:
    """A segment with its program. `drops` are the values that nobody needs after this step."""

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


class PythonStep:
    """A host node. `drops` as of NativeStep."""

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
            made = run_node(self.node, operands, bound) if self._direct is None else self._run_direct(self._direct, operands, bound)
        except InputError as e:
            raise e if self.node.op.name in str(e) else InputError(f"{self.where}: {e}") from e
        env.update(zip(self.node.outputs, made))

    def _run_direct(self, host: Callable[..., Any], operands: Sequence[Array | None], bound: Bindings) -> Sequence[Array]:
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
    return all(low <= n <= high and (d is None or bound.setdefault(d, n) == n) for (d, low, high), n in zip(limits, shape))


def _is_direct(n: Node) -> bool:
    """Can the host function be called as it is? It then sees arrays as they are stored, and attributes that are numbers but for new dims."""
    values = [v for v in (*n.inputs, *n.outputs) if v is not None]
    stored = "bits" in n.op.traits or all(v.type.dtype.computed is v.type.dtype for v in values)
    new = {d for o in n.outputs for d in o.type.shape if isinstance(d, Var)} - {d for v in n.inputs if v is not None for d in v.type.shape}
    return n.op.host is not None and stored and all((isinstance(a, Var) and a in new) or _plain(a) for a in n.attrs.values())


def _plain(a: Any) -> bool:
    return all(map(_plain, a)) if isinstance(a, tuple) else not isinstance(a, (Expr, Graph))


Runs = Union[NativeStep, PythonStep]


@dataclass
class Plan:
    """A divided graph, ready to run."""

    graph: Graph
    steps: tuple[Runs, ...]
    constants: Mapping[Value, Array] = field(default_factory=dict)
    last: tuple[list[tuple[int, ...]] | None, Bindings] = field(default=(None, {}))  # shapes of the last call, and what they say

    def start(self, arrays: Sequence[Array]) -> tuple[dict[Value, Array], Bindings]:
        """What the steps read and write: values, and dims."""
        shapes = [a.shape for a in arrays]
        known, bound = self.last
        if shapes != known:
            bound = bind_dims(self.graph, shapes)
            self.last = shapes, bound
        return {**self.constants, **dict(zip(self.graph.inputs, arrays))}, dict(bound)

    def run(self, arrays: Sequence[Array]) -> list[Array]:
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


def _own(a: Array, others: Sequence[Array]) -> Array:
    """The array, or a copy where it is another's memory, is not contiguous, or would keep much more alive than it has."""
    base = a.base
    wasteful = isinstance(base, np.ndarray) and base.nbytes > 2 * a.nbytes
    if wasteful or not a.flags.c_contiguous or not a.flags.writeable or any(np.may_share_memory(a, b) for b in others):
        return a.copy(order="C")
    return a


def make_plan(graph: Graph, options: CompileOptions, make: Make) -> Plan:
    """Divide a graph, which is changed, and compile its segments."""
    prepare(graph, PassContext(numerics=options.numerics, precision=options.precision))
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
        steps.append(NativeStep(p, make, drops) if isinstance(p, Segment) else PythonStep(p.node, drops))
    read = {v for v in last if v in graph.constants} | (set(graph.outputs) & set(graph.constants))
    return Plan(graph, tuple(steps), {v: graph.constants[v] for v in read})


class StagedExecutable(CompiledModel):
    """Like Executable, for a model with host steps. Calls may come from several threads at once."""

    def __init__(
        self,
        graph: Graph,
        names: tuple[Sequence[str], Sequence[str]],
        options: CompileOptions,
        target: CpuTarget | GpuTarget,
        threads: int,
        import_seconds: float,
        make: Make,
        onnx: Callable[[], OnnxParts] | None = None,
    ) -> None:
        self._onnx = onnx
        self._graph, self._names, self._options, self._make = graph, names, options, make
        self.target, self._threads, self._import_seconds = target, threads, import_seconds
        self._signature = Signature(graph, *names)
        self._dims = tuple(sorted({x for v in graph.inputs for d in v.type.shape if isinstance(d, Expr) for x in free(d)}, key=lambda x: x.name))
        self._shared = {x.name for x in self._dims} <= set(options.dims)
        self._plans: OrderedDict[tuple[int, ...], Plan] = OrderedDict()
        self._when_empty: Callable[[Sequence[tuple[int, ...]]], Any] | None = None
        self._strings = [(n, k) for k, (n, v) in enumerate(zip(names[0], graph.inputs)) if v.type.dtype.kind == "s"]
        self._lock = threading.RLock()
        if self._shared:
            for s in self._plan({x: _some(x) for x in self._dims}).steps:
                if isinstance(s, NativeStep):
                    s.prepare({})

    # --- what it is -------------------------------------------------------------------------------------------------------------

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self._signature.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Sizes that only the data tells are symbolic."""
        return self._signature.outputs

    @property
    def graph(self) -> Graph:
        """The imported graph before any pass, with the dims that were fixed."""
        return self._graph

    @property
    def options(self) -> CompileOptions:
        return self._options

    @property
    def plans(self) -> list[Plan]:
        """The divided graphs so far."""
        with self._lock:
            return list(self._plans.values())

    @property
    def programs(self) -> list[Program]:
        """The segments of the last plan."""
        return [s.program for s in self._last().steps if isinstance(s, NativeStep)] if self.plans else []

    @property
    def report(self) -> Report:
        """What the compilation did; its programs are the segments, its fallbacks the host nodes."""
        host = tuple(s.where for p in self.plans for s in p.steps if isinstance(s, PythonStep))
        programs = tuple(r for f in self.programs for r in f.report.programs)
        signature = self._signature
        return Report(
            self._graph.name,
            str(self._options.target),
            self._threads,
            signature.inputs,
            signature.outputs,
            self._import_seconds,
            programs,
            host=tuple(dict.fromkeys(host)),
        )

    def source(self, stage: str, kernel: str | None = None) -> str:
        """The texts of the last plan's segments, one behind the other; with stage "graph" the host nodes between them too.

        InputError where there is no such kernel, or nothing is compiled yet.
        """
        texts, errors = [], []
        for k, s in enumerate(self._last().steps):
            if isinstance(s, PythonStep):
                texts += [f"# step {k}: on the host\n{s.node!r}"] if stage == "graph" and kernel is None else []
                continue
            try:
                texts.append(f"# step {k}: native\n{s.program.source(stage, kernel)}")
            except InputError as e:
                errors.append(e)
        if errors and not texts:
            raise errors[-1]
        return "\n".join(texts)

    def _last(self) -> Plan:
        plans = self.plans
        if not plans:
            raise InputError(f"no program is compiled yet: call the model first, or give dims={{...}} for {', '.join(x.name for x in self._dims)}")
        return plans[-1]

    # --- calls ------------------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the model. InputError names the input, or the host node and what it cannot work with."""
        return self._result(self._run(self._collect(args, named)))

    def run(self, inputs: Any, outputs: Sequence[Array] | None = None) -> Any:
        """Run into given buffers of the right shapes and dtypes; without them as a call."""
        arrays = self._collect(self._signature.arguments(inputs), {})
        results = self._run(arrays)
        if outputs is None:
            return self._result(results)
        return self._result(self._into(results, self._signature.buffers(outputs)))

    def bind(self, inputs: Any, outputs: Sequence[Array]) -> Callable[[], None]:
        """A function that runs on these buffers each time it is called. Results are copied into `outputs`, whose shapes must be those of all calls."""
        arrays = self._collect(self._signature.arguments(inputs), {})
        given = self._signature.in_order(self._signature.arguments(inputs), {})
        for a, b, name in zip(arrays, given, self._signature.input_names):
            if a is not b:
                raise InputError(f"input {name}: bind needs a contiguous array that it can keep; got {a_type(b)} that had to be converted")
        results = self._signature.buffers(outputs)

        def call() -> None:
            self._into(self._run(arrays), results)

        return call

    def profile(self, *args: Any, repeats: int | None = None, **named: Any) -> Profile:
        """Where the time of a call on these inputs goes: kernels of all segments, and host nodes, whose schedule is called "host"."""
        from dnnc.staged_profile import profile

        arrays = self._collect(args, named)
        return profile(self, self._plan_for(arrays), arrays, repeats)

    def prepare(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Compile for input shapes ahead of the first call."""
        dims = bind_dims(self._graph, shapes)
        plan = self._plan({x: dims[x] for x in self._dims})
        for s in plan.steps:
            if isinstance(s, NativeStep):
                s.prepare({x: dims[x] for x in s.segment.graph.dims.values() if x in dims})

    def when_empty(self, compile_for: Callable[[Sequence[tuple[int, ...]]], Any]) -> None:
        """What compiles the model for given input shapes, used where some symbolic size is 0."""
        self._when_empty = compile_for

    def save(self, path: str | os.PathLike[str] | BinaryIO, small: bool = False) -> None:
        """Write the model to a file that `dnnc.load` reads and compiles again; `small` makes no difference. ArtifactError if it cannot be written."""
        from dnnc.artifacts import save_staged

        save_staged(path, self._graph, *self._names, self._options, None if self._onnx is None else self._onnx())

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _collect(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> list[Array]:
        arrays = self._signature.collect(args, named)
        for name, k in self._strings:
            wrong = next((x for x in arrays[k].reshape(-1) if type(x) is not str), None)
            if wrong is not None:
                arrays[k] = _texts(arrays[k], name)
        return arrays

    def _run(self, arrays: Sequence[Array]) -> list[Array]:
        if self._when_empty is not None and any(0 in a.shape for a in arrays):
            made = self._when_empty([a.shape for a in arrays])(*arrays)
            return list(made) if isinstance(made, tuple) else [made]
        return self._plan_for(arrays).run(arrays)

    def _plan_for(self, arrays: Sequence[Array]) -> Plan:
        if not self._dims:
            return self._plan({})
        dims = bind_dims(self._graph, [a.shape for a in arrays])
        return self._plan({x: dims[x] for x in self._dims})

    def _plan(self, dims: Mapping[Var, int]) -> Plan:
        key = () if self._shared else tuple(dims.values())
        found = self._plans.get(key)
        if found is not None:
            return found
        with self._lock:
            if key not in self._plans:
                graph = self._graph.copy() if self._shared else specialise(self._graph, {x.name: n for x, n in dims.items()})
                plan = make_plan(graph, self._options, self._make)
                if self._options.verify == "model":
                    self._check(plan, dims)
                self._plans[key] = plan
                while len(self._plans) > MAX_PLANS:
                    self._plans.popitem(last=False)
            return self._plans[key]

    def _check(self, plan: Plan, dims: Mapping[Var, int]) -> None:
        """Compare a plan with the interpreter on random numbers; there are no random texts that would mean anything. AccuracyError where it is off."""
        if any(v.type.dtype.kind == "s" for v in (*self._graph.inputs, *self._graph.outputs)):
            return
        check_model(lambda *xs: self._result(plan.run(xs)), self._graph, dims, self._names[1], self._options.precision)

    def _result(self, results: Sequence[Array]) -> Any:
        return results[0] if len(results) == 1 else tuple(results)

    def _into(self, results: Sequence[Array], given: Sequence[Array]) -> Sequence[Array]:
        if len(given) != len(results):
            raise InputError(f"the model has {count(len(results), 'output')}, got {count(len(given), 'buffer')}")
        for name, out, r in zip(self._signature.output_names, given, results):
            if not isinstance(out, np.ndarray) or out.shape != r.shape or out.dtype != r.dtype or not out.flags.writeable:
                shown = f"{out.dtype} {out.shape}" if isinstance(out, np.ndarray) else a_type(out)
                raise InputError(f"output {name}: expected a writable array {r.dtype} {r.shape}, got {shown}")
            out[...] = r
        return given


def _texts(a: Array, name: str) -> Array:
    """An array of strings; bytes are decoded. InputError names an element that is no text."""
    out = np.empty(a.size, object)
    for k, x in enumerate(a.reshape(-1)):
        if isinstance(x, bytes):
            x = x.decode("utf-8", "surrogateescape")
        if not isinstance(x, str):
            raise InputError(f"input {name}: expected strings, got {x!r} of type {type(x).__name__} at position {k}")
        out[k] = str(x)
    return out.reshape(a.shape)
