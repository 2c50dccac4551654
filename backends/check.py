"""The kernel check: every generated kernel is compared with float64 NumPy before it is first used.

The group that a kernel was made for is evaluated by the ops' references, in float64, at sampled outputs (corners, both
ends of each axis, random points), on random inputs; the kernel runs natively on the same inputs in its own layouts,
with red zones around its outputs. The bound is c * eps * sqrt(K) * max |reference|, K the length of the longest
reduction (tolerances.py states c), with float32's eps where values are stored in a smaller type, and then the rounding
of the store; outputs that do not meet it are judged by what rounding can reach (reachable.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.backends.check_cost import MAX_STEPS, sampled, unchecked
from dnnc.backends.reachable import OF_OPERAND, POOL, Sample, bounds, errors, judge, reference
from dnnc.backends.runtime.frames import aligned_empty
from dnnc.backends.runtime.link import pack
from dnnc.ir.errors import AccuracyError, InputError, locations
from dnnc.ir.expr import Expr, Var, const, free, substitute, value
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.op import ContractionForm, Trait
from dnnc.ir.shapes import concrete_shape, specialise
from dnnc.ir.tolerances import EPS
from dnnc.ir.types import TensorType
from dnnc.passes.analysis.kinds import kind_of
from dnnc.passes.lower.nests import group_inputs
from dnnc.passes.planning.program import Step

POINTS = 2048
COLUMNS = 64  # of these along one axis
RUN = 40  # neighbours that are equal, of indices of rows
ROWS = 1024  # the same where each row of weights has its own code
PROBES = 1 << 16  # bytes of an input that are looked at to see whether the kernel wrote there
MAX_AXIS = 1 << 20  # elements of an axis that a check takes for the sake of its indices
LARGE, SHIFT = 1 << 24, 7  # elements from which on an operand's rows share memory; between the beginnings of neighbours
RED_ZONE = 256  # bytes on either side of an output
FILL = 0xCB
Array = np.ndarray[Any, Any]


Run = Callable[
    [Mapping[Value, Array], Mapping[Var, int], Mapping[Expr, Expr]], Sequence[Array]
]  # inputs, dims, the same as expressions -> outputs
Execute = Callable[
    [Mapping[Value, Array], Mapping[Value, Array]], tuple[int, int, int]
]  # bytes of values, zones of those that are written -> status


def check_run(graph: Graph, step: Step, run: Run, seed: int = 0, most: int = MAX_STEPS, rows: bool = False) -> None:
    """Run a kernel on random inputs. AccuracyError names the kernel, its nodes, the worst element and the bound.

    Args:
        graph: which the step belongs to.
        step: its call.
        run: runs the kernel; gives its outputs in logical order.
        seed: of the inputs.
        most: statements that a check may run.
        rows: the kernel differs from a checked one in the code for each row of weights alone: look at a few places of
            most of the rows.
    """
    rng = np.random.default_rng(seed)
    dims = sample_dims(graph, step)
    env: dict[Expr, Expr] = {v: const(n) for v, n in dims.items()}
    if unchecked(step, env, most) is not None:  # the report says so
        return
    inputs = calmed(step, drawn(rng, graph, step, env))
    probes = [_Probe.of(step, v, inputs, env, rng, rows) for v in step.group.outputs]
    try:
        wanted = [p.reference(step, inputs, env) for p in probes]
    # indices computed from what was drawn leave their axis; those computed from zeros do not, or are wrong in the graph
    except InputError:
        inputs = {
            v: np.zeros_like(a) if v.type.dtype.is_int and v not in graph.constants else a for v, a in inputs.items()
        }
        wanted = [p.reference(step, inputs, env) for p in probes]
    for p, want, got in zip(probes, wanted, run(inputs, dims, env)):
        p.check(step, inputs, env, want, got, rng)


@dataclass(frozen=True)
class _Probe:
    """One output of a kernel, the elements of it that are compared, and the length of the longest reduction."""

    output: Value
    points: Array
    k: int

    @staticmethod
    def of(
        step: Step,
        v: Value,
        inputs: Mapping[Value, Array],
        env: Mapping[Expr, Expr],
        rng: np.random.Generator,
        rows: bool,
    ) -> _Probe:
        nodes = needed(step.group.nodes, v)
        shape = concrete_shape(v.type, env)
        k = max(reduction_length(nodes, env), most_updates(step, inputs, env))
        images = any(n.op.contraction is ContractionForm.CONVOLUTION for n in nodes)
        axis = 1 if images and len(shape) > 1 else -1
        points = sampled(POINTS, k)
        if rows:
            return _Probe(v, sample_points(rng, shape, axis, 1, min(ROWS, points)), k)
        return _Probe(v, sample_points(rng, shape, axis, points, max(min(COLUMNS, points // 4), 1)), k)

    def reference(self, step: Step, inputs: Mapping[Value, Array], env: Mapping[Expr, Expr]) -> Array:
        return reference(subgraph(step, list(inputs), env, self.output), list(inputs.values()), self.points)

    def check(
        self,
        step: Step,
        inputs: Mapping[Value, Array],
        env: Mapping[Expr, Expr],
        want: Array,
        got: Array,
        rng: np.random.Generator,
    ) -> None:
        found = got[tuple(self.points.T)] if self.points.shape[1] else got.reshape(1)
        t, operands = self.output.type, operands_of(step, self.output)
        if (errors(found, want) <= bounds(t.dtype, self.k, want, operands)).all():
            return
        exact, loose = (subgraph(step, list(inputs), env, self.output, loose) for loose in (False, True))
        arrays = list(inputs.values())
        refusal = judge(Sample(exact, loose, arrays, self.points, found, want, t.dtype, self.k, operands), rng)
        if refusal is None:
            return
        i = refusal.index
        place = f"{tuple(int(p) for p in self.points[i])}"
        which = f" of {self.output.name}" if len(step.group.outputs) > 1 else ""
        raise AccuracyError(
            f"kernel {step.kernel.name}{locations(step.kernel.locs)}, schedule {step.choice}: output {place}{which} is "
            f"{found[i]!r}, the float64 reference says {want[i]!r}; the bound for {t.dtype} and reductions over "
            f"{self.k} is {refusal.limit:.3g}"
        )


def needed(nodes: Sequence[Node], v: Value) -> list[Node]:
    """The nodes of a group that make one of its outputs, in order."""
    wanted, out = {v}, []
    for n in reversed(nodes):
        if not wanted.isdisjoint(n.outputs):
            out.append(n)
            wanted.update(x for x in n.inputs if x is not None)
    return out[::-1]


def step_dims(step: Step) -> list[Var]:
    """Every symbolic dim that occurs in the types of a group."""
    values = [v for n in step.group.nodes for v in (*n.inputs, *n.outputs) if v is not None]
    found = {x for v in values for d in v.type.shape for x in free(const(d))} | set(step.dims)
    return sorted(found, key=lambda v: v.name)


def sample_dims(graph: Graph, step: Step) -> dict[Var, int]:
    """A size for every symbolic dim: 19, or what the constant indices of its axis ask for."""
    dims = {v: sample_dim(v) for v in step_dims(step)}
    for n in step.group.nodes:
        if n.op.index is None:
            continue
        at = n.inputs[n.op.index.operand]
        indices = None if at is None else graph.constants.get(at)
        if indices is None or not indices.size:
            continue
        axes = n.op.index.addressed(*(None if v is None else v.type for v in n.inputs), **n.attrs)
        least = min(max(int(indices.max()) + 1, -int(indices.min())), MAX_AXIS)
        for v in {v for d in axes for v in free(const(d))}:
            dims[v] = max(dims[v], sample_dim(v, least))
    return dims


def sample_dim(v: Var, least: int = 19) -> int:
    """A size that is odd where it may be, so that tails are met; and as large as that where it may be."""
    lo = v.lo if isinstance(v.lo, int) else 1
    hi = v.hi if isinstance(v.hi, int) else 1 << 30
    n = max(lo, min(hi, least))
    return min(-(-n // v.div) * v.div, max(hi // v.div * v.div, v.div))


def drawn(rng: np.random.Generator, graph: Graph, step: Step, env: Mapping[Expr, Expr]) -> dict[Value, Array]:
    """The inputs of a kernel."""
    begins = {
        n.inputs[n.op.index.starts]: n.inputs[n.op.index.operand]
        for n in step.group.nodes
        if n.op.index is not None and n.op.index.starts is not None
    }
    rows = {n.inputs[i.rows] for n in step.group.nodes if (i := n.op.index) is not None and i.rows is not None}
    out: dict[Value, Array] = {}
    for v in group_inputs(step.group.nodes):
        if (indices := begins.get(v)) is not None and v not in graph.constants:
            out[v] = starts(rng, v.type, env, concrete_shape(indices.type, env)[0])
        else:
            out[v] = draw(rng, graph, v, env, index_limits(step, v, env))
            if v in rows and v not in graph.constants:
                some = np.sort(out[v][: len(out[v]) // RUN + 2])
                out[v] = np.repeat(some, RUN)[rng.integers(RUN) :][: len(out[v])]
    return out


def starts(rng: np.random.Generator, t: TensorType, env: Mapping[Expr, Expr], count: int) -> Array:
    """Where rows of `count` elements begin: some are empty, the first may be long."""
    (n,) = concrete_shape(t, env)
    cuts = np.sort(rng.integers(count * int(rng.integers(2)) // 2, count + 1, n))
    cuts[:1], cuts[-1:] = 0, count
    return cuts.astype(t.dtype.numpy)


def draw(
    rng: np.random.Generator, graph: Graph, v: Value, env: Mapping[Expr, Expr], limits: tuple[int, int] = (0, 2)
) -> Array:
    """Make an input's values: floats in [-1, 1), integers in `limits`, tiled if large; small constants as they are."""
    t = v.type
    array = graph.constants.get(v)
    shape = concrete_shape(t, env)
    if array is not None and (
        array.size <= 4096 or not t.dtype.is_float or all(Trait.MOVEMENT in n.op.traits for n, _ in v.uses)
    ):
        return array
    size = int(np.prod(shape, dtype=np.int64))
    n = min(size, POOL)
    pool = (rng.random(n, dtype=np.float32) * 2 - 1 if t.dtype.is_float else rng.integers(*limits, n)).astype(
        t.dtype.numpy
    )
    if (
        size > LARGE and len(shape) > 1
    ):  # rows are windows of one array, a few elements apart: all differ, and none takes memory
        row = size // shape[0]
        base = np.resize(pool, row + SHIFT * (shape[0] - 1))
        strides = (SHIFT * base.itemsize, *base[:row].reshape(shape[1:]).strides)
        return t.encoding.held(np.lib.stride_tricks.as_strided(base, shape, strides, writeable=False))
    found: Array = (np.resize(pool, size) if size > n else pool).reshape(shape)
    return t.encoding.held(found)


def calmed(step: Step, inputs: dict[Value, Array]) -> dict[Value, Array]:
    """Return inputs with smaller recurrence matrices, whose steps would otherwise amplify rounding errors."""
    n = step.group.nodes[0]
    if Trait.RECURRENT not in n.op.traits:
        return inputs
    fixed = set(n.inputs[n.attrs["carried"] + n.attrs["scanned"] :])
    return {
        v: (a / max(a.shape)).astype(a.dtype) if v in fixed and a.ndim > 1 and v.type.dtype.is_float else a
        for v, a in inputs.items()
    }


def index_limits(step: Step, v: Value, env: Mapping[Expr, Expr]) -> tuple[int, int]:
    """Range of an integer input: the axis that it indexes, else 0 and 1; as small as can be for computed indices."""
    indices = (n.inputs[n.op.index.operand] for n in step.group.nodes if n.op.index is not None)
    computed = any(i is not None and i.node is not None and i.node in step.group.nodes for i in indices)
    tops: list[int] = []
    wraps = v.type.dtype.kind == "i"
    for n in step.group.nodes:
        if n.op.index is None:
            continue
        tops.append(min(addressed(n, env), default=1))
        wraps &= n.op.index.wraps and n.inputs[n.op.index.operand] is v
    top = max(min(tops, default=2), 1)
    if computed:
        return 0, min(top, 2)
    return (-top if wraps and tops else 0), top


def addressed(n: Node, env: Mapping[Expr, Expr]) -> list[int]:
    """The sizes of the axes that an index of a node addresses."""
    assert n.op.index is not None
    axes = n.op.index.addressed(*(None if v is None else v.type for v in n.inputs), **n.attrs)
    return [const_value(substitute(const(d), env)) for d in axes]


def most_updates(step: Step, inputs: Mapping[Value, Array], env: Mapping[Expr, Expr]) -> int:
    """The most updates that a sum or product of a scatter has in one element, at least."""
    most = 1
    for n in step.group.nodes:
        at = n.inputs[n.op.index.operand] if n.op.index is not None else None
        if at is None or Trait.SCATTER not in n.op.traits or n.attrs["reduction"] not in ("add", "mul"):
            continue
        shape = concrete_shape(at.type, env)
        if 0 in shape:
            continue
        tuples = "axis" not in n.attrs
        if at not in inputs:
            most = max(most, math.prod(shape[:-1]) if tuples else shape[n.attrs["axis"]])
            continue
        where = (
            inputs[at].reshape(-1, shape[-1])
            if tuples
            else inputs[at].swapaxes(0, n.attrs["axis"]).reshape(shape[n.attrs["axis"]], -1)[:, :1]
        )
        places = np.where(where < 0, where + np.array(addressed(n, env)), where)
        most = max(most, int(np.unique(places, axis=0, return_counts=True)[1].max()))
    return most


def indices_fit(step: Step) -> bool:
    """Are all indices of the check within their axes? Not where the group computes them, or steps backwards."""
    used = [(n, n.inputs[n.op.index.operand]) for n in step.group.nodes if n.op.index is not None]
    sources = [v.node for _, v in used if v is not None]
    direct = not any(m is n for m in sources for n in step.group.nodes)
    return direct and all(s > 0 for n, _ in used for s in n.attrs.get("steps") or ())


def run_bytes(step: Step, inputs: Mapping[Value, Array], env: Mapping[Expr, Expr], execute: Execute) -> list[Array]:
    """Run `execute` on parameter bytes, in place; return the outputs in logical order, red zones around each."""
    where = f"kernel {step.kernel.name}{locations(step.kernel.locs)}"
    written = {v: step.params[k] for v, k in zip(step.group.outputs, step.outputs)}
    buffers = {
        v: np.ascontiguousarray(pack(inputs[v], v.type)).reshape(-1).view(np.uint8) for v in step.params if v in inputs
    }
    zones: dict[Value, Array] = {}
    for v, held in written.items():
        n = int(np.prod(physical(v.type, env), dtype=np.int64)) * v.type.dtype.bytes
        zones[held] = zone = aligned_empty(n + 2 * RED_ZONE)
        zone[:] = FILL
        zone[RED_ZONE : RED_ZONE + n] = buffers.get(held, 0xFF)  # NaN, for floats that nobody writes
        buffers[held] = zone[RED_ZONE : RED_ZONE + n]
    probes = {v: slice(None, None, b.size // PROBES + 1) for v, b in buffers.items() if v not in zones}
    before = {v: buffers[v][p].copy() for v, p in probes.items()}
    status = execute(buffers, zones)
    for v, zone in zones.items():
        if (zone[:RED_ZONE] != FILL).any() or (zone[-RED_ZONE:] != FILL).any():
            raise AccuracyError(f"{where} writes outside of {v.name}: {v.type}")
    for v, p in probes.items():
        if not np.array_equal(before[v], buffers[v][p]):
            raise AccuracyError(f"{where} writes into its input {v.name}")
    if status[0] and indices_fit(step):
        for v in written:  # InputError where a constant index is wrong
            first = np.zeros((1, len(v.type.shape)), np.int64)
            reference(subgraph(step, list(inputs), env, v), list(inputs.values()), first)
        raise AccuracyError(f"{where} takes a right index for a wrong one: status {status}")
    return [_read(v.type, buffers[held], env, step) for v, held in written.items()]


def _read(t: TensorType, data: Array, env: Mapping[Expr, Expr], step: Step) -> Array:
    """The bytes of an output in logical order."""
    if t.dtype.kind == "b" and (data > 1).any():
        where, code = locations(step.kernel.locs), int(data.max())
        raise AccuracyError(
            f"kernel {step.kernel.name}{where} leaves {code} as a boolean, the float64 reference says 0 or 1"
        )
    raw = data.view(np.bool_ if t.dtype.kind == "b" else t.dtype.numpy).reshape(physical(t, env))
    return unpack(raw, t, concrete_shape(t, env), step)


def physical(t: TensorType, env: Mapping[Expr, Expr]) -> tuple[int, ...]:
    return tuple(int(d) for d in TensorType(t.dtype, concrete_shape(t, env), t.encoding).physical)  # type: ignore[arg-type]


def unpack(raw: Array, t: TensorType, shape: tuple[int, ...], step: Step) -> Array:
    """A buffer in logical order; its padding lanes must hold 0."""
    if t.layout is None:
        return raw
    logical, rest = t.layout.unpack(raw, shape)
    if rest.any():
        raise AccuracyError(
            f"kernel {step.kernel.name}{locations(step.kernel.locs)} leaves something other than 0 in the padding of "
            f"{t}"
        )
    return logical


def subgraph(step: Step, inputs: list[Value], env: Mapping[Expr, Expr], output: Value, loose: bool = False) -> Graph:
    """What makes one output of a group as a graph of its own, with the dims of the check filled in.

    loose: each node but the last takes one input more at the end, the relative errors of its elements: equal numbers
        differ by their roundings,
    and a norm of these is far from 0. That of a GELU, the last one too, is measured by its operand: it is the
    difference of this and a share of it.
    """
    g = Graph("group")
    env_values: dict[Value, Value] = {}
    for k, v in enumerate(inputs):
        env_values[v] = g.add_input(f"x{k}", TensorType(v.type.dtype, v.type.shape))
    for n in needed(step.group.nodes, output):
        types = [TensorType(o.type.dtype, o.type.shape) for o in n.outputs]
        made = g.append(Node(n.op, [None if v is None else env_values[v] for v in n.inputs], n.attrs, types, n.locs))
        env_values.update(zip(n.outputs, made.outputs))
        y = made.outputs[0]
        if loose and y.type.dtype.is_float and (Trait.CANCELS in n.op.traits or n.outputs[0] is not output):
            x = env_values[n.inputs[0]] if Trait.CANCELS in n.op.traits else y  # type: ignore[index]
            b = Builder(g)
            off = g.add_input(
                f"{OF_OPERAND if Trait.CANCELS in n.op.traits else 'of_result'}{len(g.inputs)}",
                TensorType(y.type.dtype, y.type.shape),
            )
            env_values[n.outputs[0]] = b.add(y, b.mul(x, off))
    g.outputs.append(env_values[output])
    fixed = {v.name: int(const_value(e)) for v, e in env.items() if isinstance(v, Var) and v.name in g.dims}
    return specialise(g, fixed) if fixed else g


def const_value(e: Expr) -> int:
    n = value(e)
    assert n is not None
    return n


def sample_points(
    rng: np.random.Generator, shape: tuple[int, ...], axis: int = -1, wanted: int = POINTS, columns: int = COLUMNS
) -> Array:
    """Corners and both ends of each axis, tails and random points: int64 [n, rank], about `wanted` of them, or the
    corners times `columns`.

    The points are places along all axes but one, times places along that one: so the reference of a contraction is one
    small product, and the cost of its operands is read once for a whole row of results.
    """
    if 0 in shape:
        return np.zeros((0, len(shape)), np.int64)
    if not shape:
        return np.zeros((1, 0), np.int64)
    axis %= len(shape)
    across = np.arange(shape[axis]) if shape[axis] <= columns else np.unique(_places(rng, shape[axis], columns))
    rest = [n for k, n in enumerate(shape) if k != axis]
    count = wanted // len(across) + 1
    if not rest:
        return across[:, None]
    corners = np.array(list(itertools.islice(itertools.product(*(sorted({0, n - 1}) for n in rest)), 32)), np.int64)
    mixed = np.stack([_places(rng, n, count) for n in rest], axis=1)
    others = np.unique(np.concatenate([corners, mixed]), axis=0)
    return np.insert(np.repeat(others, len(across), axis=0), axis, np.tile(across, len(others)), axis=1)


def _places(rng: np.random.Generator, n: int, count: int) -> Array:
    """Indices along one axis: the ends, the last 20, the rest anywhere; in random order."""
    tail = rng.integers(max(0, n - 20), n, count // 4)
    anywhere = rng.integers(0, n, count - len(tail))
    anywhere[:2] = (0, n - 1)[: len(anywhere)]
    found: Array = rng.permutation(np.concatenate([anywhere, tail]))
    return found


def reduction_length(nodes: Sequence[Node], env: Mapping[Expr, Expr]) -> int:
    """Return the most terms of a reduction of the nodes: largest operand's elements per anchor output element."""

    def shape(v: Value | None) -> tuple[int, ...]:
        return () if v is None else concrete_shape(v.type, env)

    longest = 1
    for n in nodes:
        if kind_of(n) not in ("contraction", "reduction"):
            continue
        if n.op.terms is not None:
            terms = n.op.terms(*(None if v is None else v.type for v in n.inputs), **n.attrs)
            longest = max(longest, const_value(substitute(const(terms), env)))
        elif Trait.CONTRACTION in n.op.traits:
            longest = max(longest, math.prod(shape(n.inputs[1])[1:]))
        else:
            whole = shape(n.inputs[0])
            terms = math.prod(whole) // max(math.prod(shape(n.outputs[0])), 1)
            along = n.attrs.get("axis")  # of a running sum, which has as many results
            longest = max(longest, terms, *whole[-1:], whole[along] if isinstance(along, int) and whole else 1)
    return longest


def operands_of(step: Step, output: Value) -> str:
    """The form to which a schedule rounds the operands of products, if it does; of attention whose result is stored
    wider than its operands, that of these, to which weights are rounded before they multiply values; of a recurrence,
    that in which its states are multiplied; of what is stored in float64 but computed in float32 on the way, that.
    """
    if step.choice.template == "tf32" or ("math", "tf32") in step.choice.knobs:
        return "tf32"
    if step.choice.template == "attention":
        queries = next(n.inputs[0] for n in step.group.nodes if n.op.contraction is ContractionForm.ATTENTION)
        if queries is not None and queries.type.dtype.bits < output.type.dtype.bits:
            return queries.type.dtype.name
    first = step.group.nodes[0]
    if Trait.RECURRENT not in first.op.traits:
        exact = EPS.get(output.type.dtype.computed.name, 0.0)
        floats = {v.type.dtype.computed.name for n in step.group.nodes for v in n.outputs if v.type.dtype.is_float}
        return max((t for t in floats if EPS[t] > exact > 0), key=EPS.__getitem__, default="")
    types = {v.type.dtype for body in first.subgraphs() for n in body.nodes() for v in n.outputs}
    return max((t.name for t in types if t.name in EPS and t.computed is not t), key=EPS.__getitem__, default="")
