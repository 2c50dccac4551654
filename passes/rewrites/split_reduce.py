"""Long reductions with few results become two: the first for parts of what is reduced, the second over the parts.

    y = reduce_mean(x, axes=(1,))  of f16[1, 12544, 32]   ->   p = reduce_mean(cast(x, f32) as [1, 64, 196, 32],
                                                               axes=(2,)); y = reduce_mean(p, axes=(1,))

    y = reduce_mean(x, axes=(2, 3))  of f16[1, 32, 112, 112]
        ->  y = reduce_mean(reduce_mean(x, axes=(3,), keepdims=True), axes=(2, 3))

Blocks of threads cannot meet, so a GPU's kernel computes each result within one, and thirty results would leave all but
one multiprocessor of a hundred without work. Threads of a CPU share the results of a kernel too; one of them reads
memory at half the rate of two, and at a tenth of that of many. A product of two vectors is such a sum there (GPUs have
a kernel for it). What is computed for each element just before the reduction takes the parts' shape too, so that it
stays in its kernel. Several axes are split between them, since a reshape would cost images their layout. A second
kernel costs a microsecond or two. Parts are of one size, so a mean of means is the mean; parts of half types are kept
in float32. Where no number of parts divides a length, a CPU adds the rest to the second sum. The parts are the same for
any number of threads. Adds roundings in another order, so not for strict numerics.

What is reduced and then read back in the same rows (x - mean(x)) makes one kernel, which reads a row once; it is taken
apart where its blocks are few and their rows so long that this takes longer than the kernels it saves:

    y = mean_variance_norm(x, axes=(0,))  of f32[65536, 128]  ->  d = sub(x, m);
        y = div(d, sqrt(add(v, epsilon))), m = reduce_mean(x), v = reduce_mean(mul(d, d))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dnnc.ir.dtype import f32, f64
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.op import Trait
from dnnc.ir.target import ReductionSplit
from dnnc.passes.analysis.kinds import is_pointwise
from dnnc.passes.analysis.rows import Rows, find_numbers, rows_of
from dnnc.passes.base import PassContext
from dnnc.passes.rewrite import nodes_of, replace_each

JOINED = {
    "reduce_sum": "add",
    "reduce_mean": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "mul",
}  # with what does not fill a part


FEW, NARROW = 64, 8  # blocks, and results side by side in one, where rows of one kernel are read several times
LONG_ALONE = 1 << 17  # elements for one such block, which take longer than four more kernels
CHUNK = 16  # bytes that are read at once
DEEPEST = 16  # ops on top of each other that take the shape of the parts


def split_reductions(graph: Graph, ctx: PassContext) -> bool:
    """Rewrite for a GPU, where channels lie last, or a CPU. Returns whether anything changed."""
    if ctx.strict:
        return False
    machine = ctx.facts.reductions
    changed = _norms_apart(graph, machine) if machine.by_axes else _products_as_sums(graph, machine)
    back = _read_back(graph)
    for n in nodes_of(graph, *JOINED):
        if not _sized(n) or (rows_of(n) in back and (not machine.by_axes or not _long_alone(n))):
            continue
        by_axes = machine.by_axes and _by_axes(n, machine)
        found = None if by_axes else _parts(n, machine)
        if found is None and not by_axes:
            continue
        y = _rewritten(graph, n, found) if found is not None else _axis_by_axis(graph, n)
        read = n.inputs[0]
        graph.replace_all_uses(n.output, y)
        graph.erase(n)
        if read is not None:
            _erase(graph, read)
        changed = True
    return changed


def _norms_apart(graph: Graph, machine: ReductionSplit) -> bool:
    """mean_variance_norm of few long rows -> its definition, to split its means. Return whether there was any."""

    def apart(n: Node) -> Value | None:
        if not _sized(n) or not _long_alone(n) or _parts(n, machine) is None:
            return None
        b, x, (axes, epsilon) = Builder(graph, n, n.locs), n.inputs[0], (n.attrs["axes"], n.attrs["epsilon"])
        assert x is not None
        to = x.type.dtype
        made = x if to.computed is to else _value(b.cast(x, to=to.computed))
        d = b.sub(made, b.op("reduce_mean", made, axes=axes, keepdims=True))
        v = b.op("reduce_mean", b.mul(d, d), axes=axes, keepdims=True)
        y = _value(b.div(d, b.sqrt(b.add(v, epsilon))))
        return y if y.type.dtype is to else _value(b.cast(y, to=to))

    return replace_each(graph, {"mean_variance_norm": apart})


def _products_as_sums(graph: Graph, machine: ReductionSplit) -> bool:
    """matmul(x, y) of two long vectors -> reduce_sum(mul(x, y)), which is split then. Returns whether there was any."""

    def summed(n: Node) -> Value | None:
        if not _long_product(n, machine):
            return None
        b = Builder(graph, n, n.locs)
        x, y = (_value(b.reshape(v, shape=(math.prod(_static(v)),))) for v in n.inputs if v is not None)
        s = _value(b.op("reduce_sum", b.mul(x, y), axes=(0,), keepdims=False))
        return _value(b.reshape(s, shape=n.output.type.shape))

    return replace_each(graph, {"matmul": summed})


def _long_product(n: Node, machine: ReductionSplit) -> bool:
    x, y, out = (math.prod(_static(v)) for v in (*n.inputs, n.output) if v is not None)
    return n.output.type.dtype in (f32, f64) and out == 1 and x == y >= machine.row


def _static(v: Value) -> list[int]:
    """The shape, with 0 for a dim that is open."""
    return [d if isinstance(d, int) else 0 for d in v.type.shape]


def _read_back(graph: Graph) -> set[Rows | None]:
    """Return the rows whose numbers element-wise nodes over them read, to share a kernel. None before layouts."""
    if nodes_of(graph, "conv", "conv_transpose"):
        return set()
    numbers = find_numbers(graph)
    return {
        r
        for n in graph.nodes()
        if is_pointwise(n)
        for v in n.inputs
        if v is not None and (r := numbers.get(v)) is not None
        if r.worth() and r.of_elements(n.output) and r.reads_own(v)
    }


def _long_alone(n: Node) -> bool:
    """Would a kernel that passes over the rows again and again have few blocks, with much to do for each?"""
    sizes, reduced = _sizes(n)
    if not reduced:
        return False
    length, inner = math.prod(sizes[k] for k in reduced), math.prod(sizes[reduced[-1] + 1 :])
    side = min(inner, NARROW)
    return math.prod(sizes) // (length * side) < FEW and length * side >= LONG_ALONE


def _sized(n: Node) -> bool:
    x = n.inputs[0]
    assert x is not None
    return all(isinstance(d, int) and d > 0 for d in x.type.shape) and n.attrs["axes"] != ()


def _is_mean(n: Node) -> bool:
    return n.op.name == "reduce_mean"


def _sizes(n: Node) -> tuple[list[int], list[int]]:
    """The shape, and the reduced axes that have more than one element."""
    x, axes = n.inputs[0], n.attrs["axes"]
    assert x is not None
    sizes = [int(d) for d in x.type.shape]  # type: ignore[arg-type]
    return sizes, sorted(
        k for k in {a % len(sizes) for a in (axes if axes is not None else range(len(sizes)))} if sizes[k] > 1
    )


def _by_axes(n: Node, machine: ReductionSplit) -> bool:
    """Images reduced over their height and width, whose channels may lie side by side."""
    sizes, reduced = _sizes(n)
    if len(reduced) < 2 or reduced[0] < 1 or reduced != list(range(reduced[0], len(sizes))):
        return False
    results = math.prod(sizes[: reduced[0]])
    if _is_mean(n) and not n.output.type.dtype.is_float:
        return False
    return math.prod(sizes[reduced[0] :]) >= machine.column and -(-results // machine.line) * 2 <= machine.blocks


def _axis_by_axis(graph: Graph, n: Node) -> Value:
    x, b = n.inputs[0], Builder(graph, n, n.locs)
    assert x is not None
    _, reduced = _sizes(n)
    to, made = n.output.type, x
    if x.type.dtype.is_float and x.type.dtype.bits < 32:
        made = _value(b.cast(made, to=f32))
    made = _value(b.op(n.op.name, made, axes=(reduced[-1],), keepdims=True))
    made = _value(b.op(n.op.name, made, **n.attrs))
    return made if made.type.dtype is to.dtype else _value(b.cast(made, to=to.dtype))


def _lies_in_memory(x: Value, machine: ReductionSplit, depth: int = 0) -> bool:
    """True if a part's source is in memory already. Moved values would be written first, repeated to any size."""
    n = x.node
    if n is None or depth >= DEEPEST:
        return True
    if Trait.MOVEMENT in n.op.traits and Trait.VIEW not in n.op.traits:
        return machine.by_axes and math.prod(_static(x)) <= 2 * sum(
            math.prod(_static(v)) for v in n.inputs if v is not None
        )
    if Trait.VIEW not in n.op.traits and (
        Trait.ELEMENTWISE not in n.op.traits or len({user for user, _ in x.uses}) > 1
    ):
        return True
    return all(v is None or _lies_in_memory(v, machine, depth + 1) for v in dict.fromkeys(n.inputs))


@dataclass(frozen=True)
class Parts:
    """Return [outer, count, size, inner]: `count` parts of a reduction; `rest` elements are left (then outer is 1)."""

    outer: int
    count: int
    size: int
    inner: int
    rest: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.outer, self.count, self.size, self.inner)


def _parts(n: Node, machine: ReductionSplit) -> Parts | None:
    """How to divide a reduction; None where one kernel does."""
    sizes, reduced = _sizes(n)
    if not reduced or (_is_mean(n) and not n.output.type.dtype.is_float):
        return None  # a mean of integers is rounded
    first, last = reduced[0], reduced[-1]
    if any(sizes[k] > 1 for k in range(first, last + 1) if k not in reduced):
        return None
    outer, length, inner = math.prod(sizes[:first]), math.prod(sizes[first : last + 1]), math.prod(sizes[last + 1 :])
    long, short = (machine.row, machine.part_row) if inner == 1 else (machine.column, machine.part_column)
    blocks = outer if inner == 1 else -(-outer * inner // machine.line)
    if length < long or blocks * 2 > machine.blocks or outer * length * inner < machine.work:
        return None
    most = min(machine.parts, length // short, 2 * machine.blocks // blocks)
    fitting = [k for k in range(1, most + 1) if length % k == 0]
    parts = max(fitting, default=1)
    x = n.inputs[0]
    assert x is not None
    if not _lies_in_memory(x, machine):
        return None
    if inner == 1:  # elements of a part that is no multiple of CHUNK would have to be read one by one
        whole = max((k for k in fitting if length // k * x.type.dtype.bytes % CHUNK == 0), default=1)
        parts = whole if 2 * whole >= parts else parts
    if parts >= 4:
        return Parts(outer, parts, length // parts, inner)
    size = length // most // (4 * CHUNK) * (4 * CHUNK)
    return Parts(1, most, size, inner, length - most * size) if not machine.by_axes and outer == 1 and size else None


def _rewritten(graph: Graph, n: Node, p: Parts) -> Value:
    x, b = n.inputs[0], Builder(graph, n, n.locs)
    assert x is not None
    to, divides = n.output.type, p.rest > 0 and _is_mean(n)
    kind = "reduce_sum" if divides else n.op.name

    def reduced(shape: tuple[int, ...], start: int, axis: int) -> Value:
        made = _InParts(b, shape, start, p).of(x)
        if x.type.dtype.is_float and x.type.dtype.bits < 32:
            made = _value(b.cast(made, to=f32))
        return _value(b.op(kind, made, axes=(axis,), keepdims=False))

    made = _value(b.op(kind, reduced(p.shape, 0, 2), axes=(1,), keepdims=False))
    if p.rest:
        made = _value(b.op(JOINED[kind], made, reduced((1, p.rest, p.inner), p.count * p.size, 1)))
    if divides:
        made = _value(b.div(made, float(p.count * p.size + p.rest)))
    if made.type.shape != to.shape:
        made = _value(b.reshape(made, shape=to.shape))
    return made if made.type.dtype is to.dtype else _value(b.cast(made, to=to.dtype))


class _InParts:
    """Reshape values, or `shape` of them from `start` on; element-wise values read only here are recomputed."""

    def __init__(self, b: Builder, shape: tuple[int, ...], start: int, p: Parts) -> None:
        self.b, self.shape, self.start, self.p = b, shape, start, p
        self.known: dict[Value, Value] = {}

    def of(self, x: Value, depth: int = 0) -> Value:
        if x not in self.known:
            self.known[x] = self._computed(x, depth) if depth < DEEPEST and self._alone(x) else self._leaf(x)
        return self.known[x]

    def _leaf(self, x: Value) -> Value:
        if self.p.rest:
            rows = math.prod(self.shape) // self.p.inner
            x = _value(self.b.reshape(x, shape=(self.p.count * self.p.size + self.p.rest, self.p.inner)))
            x = _value(self.b.op("slice", x, starts=(self.start, 0), steps=(1, 1), shape=(rows, self.p.inner)))
        return _value(self.b.reshape(x, shape=self.shape))

    def _alone(self, x: Value) -> bool:
        n = x.node
        if (
            n is None
            or Trait.ELEMENTWISE not in n.op.traits
            or len(n.outputs) > 1
            or len({user for user, _ in x.uses}) > 1
            or self.b.graph.is_output(x)
        ):
            return False
        if any(v is not None and not v.type.row_major for v in (x, *n.inputs)):
            return False
        return all(v is not None and (v.type.shape == x.type.shape or _single(v)) for v in n.inputs)

    def _computed(self, x: Value, depth: int) -> Value:
        n = x.node
        assert n is not None
        operands = [self._single(v) if _single(v) else self.of(v, depth + 1) for v in n.inputs if v is not None]
        return _value(self.b.op(n.op, *operands, **n.attrs))

    def _single(self, v: Value) -> Value:
        """An operand of one element without its axes, of which there may be more than of the parts."""
        return v if not v.type.shape else _value(self.b.reshape(v, shape=()))


def _single(v: Value) -> bool:
    return all(isinstance(d, int) and d == 1 for d in v.type.shape)


def _erase(graph: Graph, x: Value) -> None:
    """Take out nodes that nothing reads any more."""
    n = x.node
    if n is not None and all(not v.uses and not graph.is_output(v) for v in n.outputs):
        inputs = dict.fromkeys(v for v in n.inputs if v is not None)
        graph.erase(n)
        for v in inputs:
            _erase(graph, v)


def _value(v: Any) -> Value:
    assert isinstance(v, Value)
    return v
