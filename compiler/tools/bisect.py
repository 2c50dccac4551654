"""Bisection: the first graph pass that changes results in the interpreter, or the first wrong kernel.

In come a graph of fixed sizes, inputs, and the options; out comes a `Finding` with a graph as small as it could be made
that shows it. Passes are judged by the float64 interpreter before and after each; kernels one by one, each alone on the
numbers that it gets in the model (those within a loop on the numbers of its first iteration, those of a branch that is
not taken not at all); and where all of these are right, by the memory that the program leaves after each of its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dnnc.backends.base import Backend
from dnnc.backends.check import physical, subgraph, unpack
from dnnc.backends.registry import open_backend
from dnnc.backends.runtime.program import MemoryRef, Program
from dnnc.compile_graph import compile_graph
from dnnc.compile_program import context_of
from dnnc.executable import Executable
from dnnc.hybrid import HybridProgram, NativeStep
from dnnc.ir.errors import AccuracyError, DnncError, InternalError, ScheduleError, VerifyError, locations
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.interp import run
from dnnc.ir.op import Trait
from dnnc.ir.shapes import concrete_shape
from dnnc.ir.types import TensorType
from dnnc.options import CompileOptions
from dnnc.passes.base import Pass, PassContext, PassManager
from dnnc.passes.lower.nests import group_inputs
from dnnc.passes.planning.program import AnyStep, Body, ControlStep, ScheduledGraph, Step
from dnnc.tools.accuracy import first_difference
from dnnc.tools.shrink import Failure, shrink

Array = np.ndarray[Any, Any]
OWN_FAULT = (
    AccuracyError,
    InternalError,
    ScheduleError,
    VerifyError,
)  # errors that are about dnnc and not about the model


@dataclass(frozen=True)
class Finding:
    """What breaks a model."""

    stage: str  # "pass", "kernel", "memory" (kernels are right, but not together), or "compile" (dnnc gives up)
    culprit: str  # the pass, the kernel with its schedule, the call, or the kind of error
    nodes: str  # the nodes of the model that are concerned, as far as known
    message: str  # what is wrong, with the first number that is off
    graph: str  # the text of a small graph that shows it

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return {
            "stage": self.stage,
            "culprit": self.culprit,
            "nodes": self.nodes,
            "message": self.message,
            "graph": self.graph,
        }


def bisect(graph: Graph, inputs: Sequence[Array], options: CompileOptions) -> Finding | None:
    """The first part of the compiler that breaks a graph on these inputs; None where everything is right.

    Args:
        graph: of fixed sizes, as it was imported.
        inputs: one array for each of its inputs.
        options: how to compile. Kernels are taken from its cache as they are, and checked here.
    """
    options = replace(options, verify=False, dims={}, outputs=())
    try:
        f = compiled(graph, options)
    except OWN_FAULT as e:
        return gave_up(graph, inputs, options, e)
    if f.report.host:
        return in_segments(f, inputs, options)
    backend = open_backend(options.target, options.threads)
    if not backend.compiles or wrong(graph, inputs, call(f, inputs, graph), options) is None:
        return None
    return (
        find_pass(graph, inputs, options, backend)
        or find_kernel(f, inputs, options, backend)
        or find_call(graph, f, inputs, options, backend)
    )


def in_segments(f: Executable, inputs: Sequence[Array], options: CompileOptions) -> Finding | None:
    """Return the first finding in native segments of a partly hosted model; skips data-dependent shapes."""
    call(f, inputs, f.graph)
    plan = f.programs[-1]
    assert isinstance(plan, HybridProgram)
    segments = [
        s.segment
        for s in plan.steps
        if isinstance(s, NativeStep) and not s.segment.graph.dims and not s.segment.carried
    ]
    known = values_of(plan.graph, inputs, list(dict.fromkeys(v for s in segments for v in s.inputs)))
    found = (bisect(s.graph, [known[v] for v in s.inputs], options) for s in segments)
    return next((x for x in found if x is not None), None)


def compiled(graph: Graph, options: CompileOptions) -> Any:
    """A graph, compiled."""
    return compile_graph(graph, ([v.name for v in graph.inputs], [v.name for v in graph.outputs]), options)


def call(f: Any, inputs: Sequence[Array], graph: Graph) -> list[Array]:
    got = f(*inputs)
    return [got] if len(graph.outputs) == 1 else list(got)


def wrong(graph: Graph, inputs: Sequence[Array], got: Sequence[Array], options: CompileOptions) -> str | None:
    """How results differ from the reference, or None."""
    found = first_difference(graph, inputs, got, options.precision)
    return None if found is None else f"wrong result: output {graph.outputs[found[0]].name}, {found[1]}"


def _where(graph: Graph) -> str:
    """The nodes of the model that a graph came from."""
    return locations(tuple(dict.fromkeys(loc for n in graph.nodes() for loc in n.locs))).removeprefix(" at ")


def _shrunk(
    graph: Graph, inputs: Sequence[Array], message: str, check: Callable[[Graph, Sequence[Array]], str | None]
) -> Failure:
    """The graph and its inputs made small, as long as `check` finds the same kind of failure."""

    def guarded(g: Graph, x: Sequence[Array]) -> str | None:
        try:
            return check(g, x)
        except (DnncError, ValueError, IndexError, KeyError, TypeError):  # a graph that was cut where it should not be
            return None

    failure = Failure(graph, list(inputs), {}, message)
    return shrink(failure, guarded) if guarded(graph, inputs) else failure


def gave_up(graph: Graph, inputs: Sequence[Array], options: CompileOptions, error: DnncError) -> Finding:
    """An error of the compiler itself, on a small graph."""

    def check(g: Graph, x: Sequence[Array]) -> str | None:
        try:
            compiled(g, options)
        except OWN_FAULT as e:
            return f"{type(e).__name__}: {e}"
        return None

    small = _shrunk(graph, inputs, f"{type(error).__name__}: {error}", check)
    return Finding("compile", type(error).__name__, _where(small.graph), small.message, str(small.graph))


# --- passes -----------------------------------------------------------------------------------------------------------


def find_pass(graph: Graph, inputs: Sequence[Array], options: CompileOptions, backend: Backend) -> Finding | None:
    """The first pass that changes what a graph computes."""
    ctx = context_of(options, backend)
    g = graph.copy()
    for p in backend.passes(options.opt_level):
        before = g.copy()
        PassManager().run(g, [p], ctx)
        message = _changed(before, g, inputs, options)
        if message is not None:
            small = _shrunk(before, inputs, message, lambda x, arrays, p=p: _breaks(p, x, arrays, ctx, options))  # type: ignore[misc]
            after = small.graph.copy()
            PassManager().run(after, [p], ctx)
            text = f"# before {p.name}\n{small.graph}\n# after {p.name}\n{after}"
            return Finding("pass", p.name, _where(small.graph), small.message, text)
    return None


def _breaks(p: Pass, graph: Graph, inputs: Sequence[Array], ctx: PassContext, options: CompileOptions) -> str | None:
    after = graph.copy()
    PassManager().run(after, [p], ctx)
    return _changed(graph, after, inputs, options)


def _changed(before: Graph, after: Graph, inputs: Sequence[Array], options: CompileOptions) -> str | None:
    """How the results of two graphs differ beyond rounding, or None."""
    try:
        found = run(after, inputs, precision="float64")
    except (DnncError, ValueError, IndexError, KeyError, TypeError) as e:
        return f"the graph cannot be run any more: {type(e).__name__}: {e}"
    return wrong(before, inputs, [_stored(a, v.type) for a, v in zip(found, before.outputs)], options)


def _stored(a: Array, t: TensorType) -> Array:
    with np.errstate(all="ignore"):
        return a.astype(t.dtype.numpy)


# --- kernels ----------------------------------------------------------------------------------------------------------


def program_of(f: Executable) -> tuple[Program, ScheduledGraph]:
    """What an executable calls, and what that was made of."""
    program = f.programs[-1]
    assert isinstance(program, Program)
    if program.scheduled is None:
        raise InternalError(
            "a program that was loaded from a file has no steps; compile the model that it was made from"
        )
    return program, program.scheduled


def values_of(graph: Graph, inputs: Sequence[Array], wanted: Sequence[Value]) -> dict[Value, Array]:
    """Values of a graph after the passes, by the float64 interpreter, in the types in which they are stored."""
    if not wanted:
        return {}
    outputs = graph.outputs
    graph.outputs = list(wanted)
    try:
        return {v: _stored(a, v.type) for v, a in zip(wanted, run(graph, inputs, precision="float64"))}
    finally:
        graph.outputs = outputs


Runner = Callable[
    [Step], "Callable[[Mapping[Value, Array]], Sequence[Array]] | None"
]  # gives what runs the kernel of a step


def find_kernel(f: Executable, inputs: Sequence[Array], options: CompileOptions, backend: Backend) -> Finding | None:
    """Return the first kernel that is wrong alone on the model's numbers; in loops, the first iteration's."""
    program, scheduled = program_of(f)
    runner: Runner = lambda step: backend.kernel_runner(program, step)  # noqa: E731
    return _first_wrong(runner, scheduled.graph, scheduled.steps, inputs, options)


def _first_wrong(
    runner: Runner, graph: Graph, steps: Sequence[AnyStep], inputs: Sequence[Array], options: CompileOptions
) -> Finding | None:
    known = values_of(graph, inputs, list(dict.fromkeys(v for s in steps for v in group_inputs(s.group.nodes))))
    for step in steps:
        if isinstance(step, ControlStep):
            entered = entered_body(step, known)
            body = None if entered is None else (entered[0].graph, entered[0].steps, entered[1])
            found = None if body is None else _first_wrong(runner, *body, options)
        else:
            found = _kernel_finding(runner, step, {v: known[v] for v in group_inputs(step.group.nodes)}, options)
        if found is not None:
            return found
    return None


def entered_body(step: ControlStep, known: Mapping[Value, Array]) -> tuple[Body, list[Array]] | None:
    """The body that a loop or branch runs first, with the arrays that it gets then; None for a loop that never runs."""
    node = step.node
    given = [None if v is None else known[v] for v in node.inputs]
    if Trait.ITERATES not in node.op.traits:
        assert given[0] is not None
        return step.bodies[0 if given[0].item() else 1], [a for a in given[1:] if a is not None]
    trips, condition, *rest = given
    carried, scanned, length = node.attrs["carried"], node.attrs["scanned"], node.attrs["length"]
    if (trips is not None and trips.item() <= 0) or (condition is not None and not condition.item()) or length == 0:
        return None
    backward = node.attrs["backward"] or (False,) * scanned
    operands = [a for a in rest if a is not None]
    rows = [a[-1 if back else 0] for a, back in zip(operands[carried : carried + scanned], backward)]
    return step.bodies[0], [np.array(0, np.int64), *operands[:carried], *rows, *operands[carried + scanned :]]


def _kernel_finding(
    runner: Runner, step: Step, operands: dict[Value, Array], options: CompileOptions
) -> Finding | None:
    run = runner(step)
    found = None if run is None else _off(run, step, operands, options)
    if found is None:
        return None
    sub, message = found
    small = _shrunk(sub, list(operands.values()), message, lambda g, x: _compiles_wrong(g, x, options))
    schedule = f"kernel {step.kernel.name}, schedule {step.choice}"
    return Finding("kernel", schedule, _where(sub), small.message, f"{small.graph}\n{_inputs_text(small)}")


def _off(
    run: Callable[[Mapping[Value, Array]], Sequence[Array]],
    step: Step,
    operands: dict[Value, Array],
    options: CompileOptions,
) -> tuple[Graph, str] | None:
    """What makes the first output of a kernel that differs, and how it does; None where all are right."""
    graphs = [subgraph(step, list(operands), {}, v) for v in step.group.outputs]
    try:
        results = run(operands)
    except AccuracyError as e:  # it writes where it should not
        return graphs[0], f"wrong result: {e}"
    for sub, got in zip(graphs, results):
        message = wrong(sub, list(operands.values()), [np.ascontiguousarray(got)], replace(options, precision=None))
        if message is not None:
            return sub, message
    return None


def _compiles_wrong(graph: Graph, inputs: Sequence[Array], options: CompileOptions) -> str | None:
    return wrong(graph, inputs, call(compiled(graph, options), inputs, graph), options)


def _inputs_text(failure: Failure) -> str:
    """What the inputs are, in a few words."""
    lines = []
    for v, a in zip(failure.graph.inputs, failure.inputs):
        inside = a.astype(np.float64) if a.dtype.kind in "fiub" else np.zeros(0)
        span = f", {inside.min():.6g} to {inside.max():.6g}" if inside.size else ""
        lines.append(f"# {v.name}: {v.type}{span}" + (f": {a.reshape(-1).tolist()}" if a.size <= 8 else ""))
    return "\n".join(lines)


# --- memory -----------------------------------------------------------------------------------------------------------


def find_call(
    graph: Graph, f: Executable, inputs: Sequence[Array], options: CompileOptions, backend: Backend
) -> Finding:
    """Return the first call after which program memory is wrong though each kernel is right alone."""
    program, scheduled = program_of(f)
    known = values_of(scheduled.graph, inputs, [v for s in scheduled.steps for v in s.group.outputs])
    for k, step in enumerate(scheduled.steps):
        if isinstance(step, ControlStep):
            continue
        read = backend.run_calls(program, k + 1, inputs, options.threads or backend.threads)
        wanted = [known[v] for v in step.group.outputs]
        message = None if read is None else _left(read, program, step, k, wanted, options)
        if message is None:
            continue
        small = _shrunk(graph, inputs, message, lambda g, x: _compiles_wrong(g, x, options))
        nodes = locations(step.kernel.locs).removeprefix(" at ")
        culprit = (
            f"call {k} of {len(scheduled.steps)}, of kernel {step.kernel.name}: its operands were overwritten, or it "
            "ran too early"
        )
        return Finding("memory", culprit, nodes, message, str(small.graph))
    message = wrong(graph, inputs, call(f, inputs, graph), options) or "not every run is wrong: threads race"
    small = _shrunk(graph, inputs, message, lambda g, x: _compiles_wrong(g, x, options))
    return Finding("memory", "all kernels are right when the calls are cut short", "", small.message, str(small.graph))


def _left(
    read: Callable[[MemoryRef, int], bytes],
    program: Program,
    step: Step,
    k: int,
    wanted: Sequence[Array],
    options: CompileOptions,
) -> str | None:
    """How a result of call `k` differs right after it, in its place in the program's memory."""
    args = program.calls[k].args
    found = (
        _differs(read, v.type, args[j], want, step, options)
        for v, j, want in zip(step.group.outputs, step.outputs, wanted)
    )
    return next((message for message in found if message is not None), None)


def _differs(
    read: Callable[[MemoryRef, int], bytes],
    t: TensorType,
    place: MemoryRef,
    want: Array,
    step: Step,
    options: CompileOptions,
) -> str | None:
    """How what lies at a place differs from what is wanted."""
    shape = physical(t, {})
    data = read(place, int(np.prod(shape, dtype=np.int64)) * t.dtype.bytes)
    raw = np.frombuffer(data, np.bool_ if t.dtype.kind == "b" else t.dtype.numpy)
    try:
        got = unpack(raw.reshape(shape), t, concrete_shape(t, {}), step)
    except AccuracyError as e:
        return f"wrong result: {e}"
    shown = Graph("value")
    shown.outputs = [shown.add_input("value", TensorType(t.dtype, t.shape))]
    return wrong(shown, [want], [np.ascontiguousarray(got)], options)
