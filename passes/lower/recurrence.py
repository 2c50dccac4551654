"""A `recurrence` -> one naive kernel: all steps in order, states in local memory. Schedules keep its meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dnnc.ir import te
from dnnc.ir.dtype import f32
from dnnc.ir.errors import InternalError
from dnnc.ir.expr import E, Expr, Var, cast, const, fma, load
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.loops.stmt import Buffer, Builder, Func, Kernel
from dnnc.passes.lower.form import Form
from dnnc.passes.lower.nests import Lowered, scalar_constant
from dnnc.passes.lower.recurrent_form import NoForm, ScanForm, form_of
from dnnc.passes.lower.recurrent_form import bind as bind_form


@dataclass(frozen=True, eq=False)
class Recurrent(Form):
    """A loop's form with the memory of its operands: `places[t]` is a buffer, or the number that an operand is."""

    kind = "recurrence"
    form: ScanForm
    places: Mapping[te.Tensor, Buffer | Expr]
    out: Buffer
    params: tuple[Value, ...]

    def bind(
        self,
        e: Expr,
        at: tuple[E, E],
        step: E,
        leaf: Mapping[te.Tensor, Buffer | Expr],
        dots: Mapping[te.Tensor, Buffer],
        k: E = 0,
    ) -> Expr:
        """Lower a form's expression for a row, unit and step; `leaf` places states, `dots` places sums."""
        form = self.form
        row, unit = const(at[0]), const(at[1])

        def element(t: te.Tensor, idx: tuple[Expr, ...]) -> Expr:
            kind = form.kind(t)
            if kind == "number":
                return const(step)
            if kind == "dots":
                return load(dots[t], idx)
            found = leaf.get(t, self.places.get(t))
            if found is None:
                raise InternalError(f"{t.name} of a recurrence has no place")
            if not isinstance(found, Buffer):
                return found
            if kind == "row":
                idx = (self.at_step(form.operand[t] - form.carried, step), *idx)
            return load(found, idx or (0,))

        return bind_form(e, {form.row: row, form.unit: unit, form.k: const(k)}, element)

    def at_step(self, k: int, step: E) -> Expr:
        """Where scanned operand k, or stacked value k - scanned, has the row of a step."""
        return const(self.form.steps - 1) - step if self.form.back(k) else const(step)

    def out_row(self, q: int, step: E) -> Expr:
        """The row of the result that has stacked value q of a step."""
        return self.at_step(self.form.scanned + q, step) + q * self.form.steps

    def last_row(self, s: int) -> int:
        """The row of the result that has the last state s."""
        return self.form.stacked * self.form.steps + s


def recurrent(graph: Graph, node: Node) -> Recurrent:
    """Return the form of a `recurrence` with all constants as operands: buffers x0, x1, ... and y."""
    try:
        form = form_of(node)
    except NoForm as e:
        raise InternalError(f"a recurrence that has no form: {e}") from e
    if form.constants:
        raise InternalError("the body of a recurrence has constants that are no numbers")
    buffers: dict[Value, Buffer | Expr] = {}
    params: list[Value] = []
    for v in node.inputs:
        assert v is not None
        if v not in buffers:
            number = scalar_constant(graph, v)
            buffers[v] = (
                number
                if number is not None
                else Buffer(f"x{len(params)}", v.type.dtype, tuple(map(const, v.type.physical)) or (const(1),))
            )
            params += [v] if number is None else []
    places = {t: buffers[v] for t, k in form.operand.items() if (v := node.inputs[k]) is not None}
    out = node.output
    return Recurrent(form, places, Buffer("y", out.type.dtype, tuple(map(const, out.type.physical))), (*params, out))


def lower_recurrence(graph: Graph, node: Node) -> Lowered:
    """The naive kernel of a recurrence."""
    r = recurrent(graph, node)
    b = Builder()
    _write(b, r)
    inputs = [p for p in dict.fromkeys(r.places.values()) if isinstance(p, Buffer)]
    kernel = Kernel((Func("recurrence", (*inputs, r.out), b.block()),), node.locs)
    return Lowered(kernel, r.params, (), r, (len(r.params) - 1,))


def _write(b: Builder, r: Recurrent) -> None:
    f = r.form
    t = r.out.dtype
    inits = [x for x in f.operand if f.kind(x) == "state"]
    states = {x: b.alloc("state", t, f.batch, f.hidden, space="local") for x in inits}
    fresh = [b.alloc("fresh", t, f.batch, f.hidden, space="local") for _ in inits]
    for x in inits:
        with b.loop("i", f.batch) as i, b.loop("j", f.hidden) as j:
            b.store(states[x], (i, j), load(_buffer(r.places[x]), (i, j)))
    with b.loop("t", f.steps) as step:
        dots: dict[te.Tensor, Buffer] = {}
        for phase in f.phases:
            _products(b, r, phase.vector, [(c.dots, c.offset, c.matrix) for c in phase.columns], step, states, dots)
        with b.loop("i", f.batch) as i, b.loop("j", f.hidden) as j:
            for e, to in zip(f.made, fresh):
                b.store(to, (i, j), cast(r.bind(e, (i, j), step, states, dots), t))
            for q, e in enumerate(f.made[f.carried :]):
                b.store(r.out, (r.out_row(q, step), i, j), cast(r.bind(e, (i, j), step, states, dots), t))
        with b.loop("i", f.batch) as i, b.loop("j", f.hidden) as j:
            for x, source in zip(inits, fresh):
                b.store(states[x], (i, j), source[i, j])
    for s, x in enumerate(inits):
        with b.loop("i", f.batch) as i, b.loop("j", f.hidden) as j:
            b.store(r.out, (r.last_row(s), i, j), states[x][i, j])


def _products(
    b: Builder,
    r: Recurrent,
    vector: Expr,
    columns: list[tuple[te.Tensor, int, Expr]],
    step: Var,
    states: Mapping[te.Tensor, Buffer],
    dots: dict[te.Tensor, Buffer],
) -> None:
    """All sums with one vector."""
    f = r.form
    made = {x: b.alloc("dots", f32, *x.dims, space="local") for x in dict.fromkeys(t for t, _, _ in columns)}
    for t, offset, matrix in columns:
        with b.loop("i", f.batch) as i, b.loop("j", f.hidden) as j:
            acc = b.alloc("acc", f32, 1)
            b.store(acc, (0,), const(0.0, f32))
            with b.loop("r", f.hidden) as k:
                left = r.bind(vector, (i, k), step, states, dots)
                b.store(acc, (0,), fma(left, r.bind(matrix, (i, j), step, states, dots, k), acc[0]))
            b.store(made[t], (i, j + offset), acc[0])
    dots.update(made)


def _buffer(p: Buffer | Expr) -> Buffer:
    assert isinstance(p, Buffer)
    return p
