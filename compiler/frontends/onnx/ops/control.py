"""Converters of control flow decided while reading: a known `If` is its branch; known loops are unrolled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.frontends.onnx.call import Call, Condition, Item, NeedsValues, contents_of, number, of_array, of_value, reword
from dnnc.frontends.onnx.ops.movement import split_parts
from dnnc.frontends.onnx.region import NOT_A_REGION, loop_node, region, same_operands
from dnnc.frontends.onnx.tensors import dtype_of
from dnnc.ir.dtype import boolean, i64
from dnnc.ir.errors import DnncError, ModelError, UnsupportedError, count
from dnnc.ir.graph import Graph, Value
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.types import TensorType

Converter = Callable[[Call], Any]
MAX_UNROLLED = 4096  # nodes
WORTH_A_LOOP = 48  # nodes; fewer are unrolled, for what is known while reading folds away then


def _require_one(c: Call, k: int, what: str, kinds: str) -> None:
    """Raise ModelError unless input k is absent, or one element (or an unknown number) of these kinds."""
    t = c.type_of(k) if c.has(k) else None
    if t is not None and (t.dtype.kind not in kinds or (isinstance(t.size, int) and t.size != 1)):
        raise ModelError(f"{what} must be one {'bool' if kinds == 'b' else 'integer'}, got {t}")


def branch(c: Call) -> Any:
    """Run the branch that the condition chooses; for a computed condition both, selecting elements."""
    importer, _ = c.env
    item = c.item(0)
    _require_one(c, 0, "the condition of an If", "b")
    known = contents_of(item)
    if known is not None and isinstance(known.reshape(-1)[0], (bool, int, np.bool_)):
        return _live(c, bool(known.reshape(-1)[0]))
    name = ""
    if c.b.graph is importer.whole:
        name = f"{next(filter(None, c.outputs), 'If')}#{importer.undecided}"
        importer.undecided += 1
        if name in importer.decisions:
            return _live(c, importer.decisions[name])
    results, failed = [], list[DnncError]()
    importer.b.tentative += 1
    try:
        if len(c.graph("then_branch").node) + len(c.graph("else_branch").node) > 4:
            try:
                return _branches(c)
            except NOT_A_REGION:
                pass  # branches that make different types or sequences
        for taken in (True, False):
            try:
                results.append(_live(c, taken))
            except DnncError as e:  # a branch that the data may exclude
                failed.append(e)
    finally:
        importer.b.tentative -= 1
    pairs = list(zip(*results))
    if failed or not all(_alike(a, b) for a, b in pairs):
        if len(failed) == 2 and not any(isinstance(e, NeedsValues) for e in failed):
            raise failed[0]
        if name:
            raise _undecided(c, name)
        if failed:
            raise failed[0]
        c.array(0, "the condition of an If whose branches make different shapes")
    condition = c.b.reshape(c.x(), shape=())
    return [a if a is b else of_value(c.b.where(condition, _value(c, a), _value(c, b)), item.origins) for a, b in pairs]


def _live(c: Call, taken: bool) -> Any:
    """One branch in place of the If. An error names the branch."""
    importer, scope = c.env
    name = "then_branch" if taken else "else_branch"
    try:
        return importer.subgraph(c.graph(name), scope)
    except DnncError as e:
        raise reword(e, f"{e} (in the {name} of an If)") from e


def _undecided(c: Call, name: str) -> NeedsValues:
    """The error that asks for the value of a condition. What is read so far computes it: the reading ends here."""
    importer, _ = c.env
    graph: Graph = importer.whole
    graph.outputs = [c.b.reshape(c.x(), shape=())]
    origins = tuple(sorted(c.item(0).origins))
    message = (
        "which branch of an If is read is known only when the model runs: its branches make different types, or "
        "one does not fit the inputs"
    )
    return NeedsValues(message, origins, condition=Condition(name, graph, tuple(importer.inputs)))


def _branches(c: Call) -> Any:
    importer, scope = c.env

    def build(name: str) -> Callable[[], list[Value]]:
        return lambda: [_value(c, i) for i in importer.subgraph(c.graph(name), scope)]

    made = [region(c, name[:4], (), build(name)) for name in ("then_branch", "else_branch")]
    if [v.type for v in made[0][0].outputs] != [v.type for v in made[1][0].outputs]:
        raise UnsupportedError("the branches of an If make different types")
    condition = c.b.reshape(c.x(), shape=())
    captured = same_operands(made)
    results = c.b.op("cond", condition, *captured, then=made[0][0], other=made[1][0])
    return [of_value(v, c.item(0).origins) for v in (results if isinstance(results, tuple) else (results,))]


def _alike(a: Item | None, b: Item | None) -> bool:
    if a is None or b is None or a.items is not None or b.items is not None:
        return a is b
    return a.type.dtype is b.type.dtype and a.shape == b.shape


def _value(c: Call, item: Item) -> Value:
    return Call(c.b, c.op, c.domain, c.opset, [item], {}, []).x()


def loop(c: Call) -> Any:
    """`trips, condition, carried...`: the body is repeated while its condition holds."""
    _require_one(c, 0, "the number of iterations of a Loop", "iu")
    _require_one(c, 1, "the condition of a Loop", "b")
    trips = contents_of(c.item(0)) if c.has(0) else None
    few = (
        trips is not None
        and isinstance(trips.reshape(-1)[0], int)
        and trips.reshape(-1)[0] * len(c.graph("body").node) <= WORTH_A_LOOP
    )
    if not few and all(i is not None and i.items is None for i in c.items[2:]):
        try:
            return _looped(c, trips)
        except NOT_A_REGION:
            pass  # carried values that change their shape, results of unknown length, sequences
    return _unrolled(c)


def _looped(c: Call, trips: Any) -> Any:
    """The loop as one node: carried values of one type, and a known number of iterations where results are stacked."""
    importer, scope = c.env
    body = c.graph("body")
    known = None if trips is None else trips.reshape(-1)[0]
    start = contents_of(c.item(1)) if c.has(1) else np.array([True], object)
    carried = [_value(c, i) for i in c.items[2:] if i is not None]
    conditional = False

    def build(number: Value, *state: Value) -> list[Value]:
        nonlocal conditional
        made = importer.subgraph(body, scope, [of_value(number), of_array(np.bool_(True)), *map(of_value, state)])
        holds = None if made[0] is None else contents_of(made[0])
        conditional = holds is None or not holds.reshape(-1)[0]
        rest = [_value(c, i) for i in made[1:]]
        return [c.b.reshape(_value(c, made[0]), shape=()), *rest] if conditional else rest

    body_makes_rows = len(body.output) - 1 > len(carried)
    if start is not None and not start.reshape(-1)[0]:
        raise UnsupportedError("a Loop that never runs")
    first = None if start is not None else c.b.reshape(c.x(1), shape=())
    if body_makes_rows and (known is None or first is not None):
        raise UnsupportedError("a Loop that stacks results needs a known number of iterations")
    count = c.b.reshape(c.cast(c.x(0), i64), shape=()) if c.has(0) and known is None else None
    graph, captured = region(c, "body", [TensorType(i64, ()), *(v.type for v in carried)], build)
    if conditional and body_makes_rows:
        raise UnsupportedError("a Loop that stacks results needs a known number of iterations")
    if conditional and first is None:
        first = c.const(True, boolean)
    if first is not None and not conditional:
        graph.outputs.insert(0, graph.constant(np.bool_(True)))
    results = c.b.op("loop", count, first, *carried, *captured, body=graph, carried=len(carried), length=known)
    origins = frozenset().union(*(i.origins for i in c.items if i is not None))
    return [of_value(v, origins) for v in (results if isinstance(results, tuple) else (results,))]


def _unrolled(c: Call) -> Any:
    importer, scope = c.env
    body = c.graph("body")
    trips = int(c.scalar(0, "the number of iterations")) if c.has(0) else None
    running = bool(c.scalar(1, "the condition")) if c.has(1) else True
    carried: list[Item | None] = list(c.items[2:])
    collected: list[list[Item | None]] = [[] for _ in range(len(body.output) - 1 - len(carried))]
    k = 0
    while running and (trips is None or k < trips):
        if (k + 1) * len(body.node) > MAX_UNROLLED:
            raise UnsupportedError(
                f"a Loop of {trips if trips is not None else 'unknown many'} iterations over "
                f"{count(len(body.node), 'node')} is "
                "too long to unroll"
            )
        condition, *made = importer.subgraph(body, scope, [of_array(np.int64(k)), of_array(np.bool_(True)), *carried])
        carried = made[: len(carried)]
        for column, item in zip(collected, made[len(carried) :]):
            column.append(item)
        running = _decided(c, condition)
        k += 1
    if k == 0 and collected:
        types = _types(c, body, [of_array(np.int64(0)), of_array(np.bool_(True)), *carried])[1 + len(carried) :]
        return [*carried, *(_no_rows(c, t, 0) for t in types)]
    return [*carried, *(_stacked(c, column, 0) for column in collected)]


def _types(c: Call, body: Any, given: Sequence[Item | None]) -> list[TensorType | None]:
    """Return the output types of a body that never runs: computed if it fits its inputs, else declared."""
    importer, scope = c.env
    try:
        made, _ = region(c, "body", (), lambda: [_value(c, i) for i in importer.subgraph(body, scope, given)])
        return [v.type for v in made.outputs]
    except NOT_A_REGION:
        return [_declared(o.type.tensor_type) for o in body.output]


def _declared(t: Any) -> TensorType | None:
    dims = t.shape.dim
    known = t.elem_type and t.HasField("shape") and all(d.HasField("dim_value") for d in dims)
    return (
        TensorType(dtype_of(t.elem_type, "the type of a body's output"), tuple(d.dim_value for d in dims))
        if known
        else None
    )


def _no_rows(c: Call, row: TensorType | None, axis: int) -> Value:
    """What a body that never runs stacks along an axis."""
    if row is None:
        raise NeedsValues("a loop that never runs has scan outputs of unknown shape")
    at = normalize_axis(axis, row.rank + 1)
    rows: Value = c.b.full(
        shape=(*row.shape[:at], 0, *row.shape[at:]), value=row.dtype.numpy.type(0).item(), dtype=row.dtype
    )
    return rows


def _decided(c: Call, item: Item | None) -> bool:
    if item is None:
        return True
    return bool(Call(c.b, c.op, c.domain, c.opset, [item], {}, []).scalar(0, "the condition of a Loop"))


def _stacked(c: Call, items: Sequence[Item | None], axis: int) -> Any:
    parts = [c.b.unsqueeze(_value(c, i), axes=(axis,)) for i in items if i is not None]
    return c.b.concat(*parts, axis=axis) if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class _Scan:
    """The body of a Scan and how its inputs are cut and its outputs stacked."""

    body: Any
    axes: tuple[int, ...]
    back: tuple[int, ...]
    out_axes: tuple[int, ...]
    out_back: tuple[int, ...]


def scan(c: Call) -> Any:
    """State goes from iteration to iteration, scan inputs are cut along their axes, scan outputs are stacked."""
    count, body = c.integer("num_scan_inputs"), c.graph("body")
    if c.opset < 9:
        return _batched_scan(c, body, count)
    states = c.items[: len(c.items) - count]
    outputs = len(body.output) - len(states)
    spec = _Scan(
        body,
        c.integers("scan_input_axes") or (0,) * count,
        c.integers("scan_input_directions") or (0,) * count,
        c.integers("scan_output_axes") or (0,) * outputs,
        c.integers("scan_output_directions") or (0,) * outputs,
    )
    return _scanned(c, spec, states, [c.x(len(states) + k) for k in range(count)])


def _batched_scan(c: Call, body: Any, count: int) -> Any:
    """Opset 8: input 0 holds lengths, axis 0 of all others is the batch, axis 1 of scan inputs the iterations."""
    if c.has(0):
        raise UnsupportedError("Scan of opset 8 with lengths per sequence; convert the model to a newer opset")
    items = c.items[1:]
    states, xs = items[: len(items) - count], [c.x(k) for k in range(len(c.items) - count, len(c.items))]
    outputs = len(body.output) - len(states)
    spec = _Scan(body, (0,) * count, c.integers("directions") or (0,) * count, (0,) * outputs, (0,) * outputs)
    rows = []
    for k in range(number(xs[0].type.shape[0], "the batch of a Scan")):
        first = [None if s is None else of_value(_row(c, _value(c, s), 0, k)) for s in states]
        rows.append(_scanned(c, spec, first, [_row(c, x, 0, k) for x in xs]))
    return [_stacked(c, [r if isinstance(r, Item) else of_value(r) for r in column], 0) for column in zip(*rows)]


def _scanned(c: Call, spec: _Scan, states: Sequence[Item | None], xs: Sequence[Value]) -> list[Any]:
    importer, scope = c.env
    body = spec.body
    axes = [normalize_axis(a, x.type.rank) for a, x in zip(spec.axes, xs)]
    rows = xs[0].type.shape[axes[0]]
    if not isinstance(rows, int) or rows * len(body.node) > WORTH_A_LOOP:
        try:
            return _scan_loop(c, spec, states, xs, axes)
        except NOT_A_REGION:
            pass
    n = number(rows, "the number of iterations of a Scan")
    if n * len(body.node) > MAX_UNROLLED:
        raise UnsupportedError(f"a Scan of {n} iterations over {count(len(body.node), 'node')} is too long to unroll")
    collected: list[list[Item | None]] = [[] for _ in spec.out_axes]
    for k in range(n):
        cut = [of_value(_row(c, x, a, n - 1 - k if d else k)) for x, a, d in zip(xs, axes, spec.back)]
        made = importer.subgraph(body, scope, [*states, *cut])
        states = made[: len(states)]
        for column, item in zip(collected, made[len(states) :]):
            column.append(item)
    if n == 0:
        cut = [
            of_value(c.b.full(shape=(*x.type.shape[:a], *x.type.shape[a + 1 :]), value=0, dtype=x.type.dtype))
            for x, a in zip(xs, axes)
        ]
        types = _types(c, body, [*states, *cut])[len(states) :]
        return [*states, *(_no_rows(c, t, a) for t, a in zip(types, spec.out_axes))]
    ordered = [column[::-1] if d else column for column, d in zip(collected, spec.out_back)]
    ranks = [len(column[0].shape) + 1 if column and column[0] is not None else 1 for column in ordered]
    return [
        *states,
        *(_stacked(c, column, normalize_axis(a, r)) for column, a, r in zip(ordered, spec.out_axes, ranks)),
    ]


def _scan_loop(
    c: Call, spec: _Scan, states: Sequence[Item | None], xs: Sequence[Value], axes: Sequence[int]
) -> list[Any]:
    """Scanned axes come to the front, stacked ones go to their places afterwards."""
    importer, scope = c.env
    if any(s is None or s.items is not None for s in states):
        raise UnsupportedError("a Scan whose state is absent or a sequence")
    carried = [_value(c, s) for s in states if s is not None]
    rows = [
        x if a == 0 else c.b.transpose(x, perm=(a, *(k for k in range(x.type.rank) if k != a)))
        for x, a in zip(xs, axes)
    ]

    def build(number: Value, *values: Value) -> list[Value]:
        return [_value(c, i) for i in importer.subgraph(spec.body, scope, list(map(of_value, values)))]

    backward = tuple(map(bool, (*spec.back, *spec.out_back)))
    made = loop_node(c, carried, rows, build, length=xs[0].type.shape[axes[0]], backward=backward)
    out: list[Any] = made[: len(carried)]
    for v, a in zip(made[len(carried) :], spec.out_axes):
        at = normalize_axis(a, v.type.rank)
        out.append(v if at == 0 else c.b.transpose(v, perm=(*range(1, at + 1), 0, *range(at + 1, v.type.rank))))
    return out


def _row(c: Call, x: Value, axis: int, k: int) -> Any:
    part = (
        x
        if x.type.shape[axis] == 1
        else split_parts(c, x, axis, [k, 1, number(x.type.shape[axis], "a scan axis") - k - 1])[1]
    )
    return c.b.squeeze(part, axes=(axis,))


CONTROL: dict[str, Converter] = {
    "If": branch,
    "Loop": loop,
    "Scan": scan,
}
