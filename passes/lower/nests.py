"""A fused group -> one naive kernel: loops over the output's memory, everything else inlined at its place.

In come the nodes with their types (layouts included), out comes a Kernel whose text depends on nothing but the
computation: buffers are called x0, x1, ... and y, so that equal groups of different layers are one kernel. Several
outputs are y0, y1, ...; the loops are those of the largest, and a number of a row is stored ahead of the loops over the
row. Reductions
become an accumulator at the outermost loop depth where their indices are known; a costly intermediate that several
consumers read becomes a `local` buffer there. Recipes schedule the result; nothing here thinks of speed or targets.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dnnc.ir import te
from dnnc.ir.bounds import bounds, nonneg
from dnnc.ir.dtype import DType, boolean
from dnnc.ir.encodings import quads_of
from dnnc.ir.errors import InternalError
from dnnc.ir.expr import (
    Const,
    Expr,
    Load,
    Op,
    Var,
    cast,
    const,
    free,
    load,
    minimum,
    op,
    rebuild,
    select,
    substitute,
    value,
    var,
    walk,
)
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.loops.stmt import Buffer, Builder, Func, Kernel, Param, Store, call, exprs, walk_stmts
from dnnc.ir.op import Trait
from dnnc.ir.types import Dense, Layout, Part, TensorType
from dnnc.passes.analysis.outputs import main_output, places_in
from dnnc.passes.lower.conditions import conjuncts, loaded_range
from dnnc.passes.lower.form import Form, Map, Reduction, Rows, Scan, Weighted, contraction
from dnnc.passes.lower.kept import choose_kept, pending
from dnnc.passes.lower.scatter import Beside, Scattered, combine, write

WORD = 4  # bytes: the least that hardware copies from memory to memory


@dataclass(frozen=True)
class Lowered:
    """A naive kernel and facts for recipes.

    `params`: each buffer's value: inputs, then the outputs that are not in place; `outputs`: their parameter numbers.
    """

    kernel: Kernel
    params: tuple[Value, ...]
    dims: tuple[Var, ...]
    form: Form
    outputs: tuple[int, ...]
    inplace: bool = False

    @property
    def out_loops(self) -> tuple[str, ...]:
        """The names of the loops over the output's physical axes."""
        return tuple(v.name for v in self.form.outer)

    @property
    def reductions(self) -> tuple[tuple[str, ...], ...]:
        """The names of the loops of each reduction, in order."""
        return tuple(tuple(v.name for v in r.loops) for r in self.form.reductions)


def group_inputs(nodes: Sequence[Node]) -> list[Value]:
    """Values that a group reads from outside, in order of first use."""
    inside = {v for n in nodes for v in n.outputs}
    return list(dict.fromkeys(v for n in nodes for v in n.inputs if v is not None and v not in inside))


def lower(
    graph: Graph, nodes: Sequence[Node], outputs: Sequence[Value], inplace: Mapping[Value, Value] | None = None
) -> Lowered:
    """Lower a group. `inplace`: the input that shares an output's memory and parameter."""
    return _Lowering(graph, nodes, outputs, inplace or {}).run()


def scalar_constant(graph: Graph, v: Value) -> Expr | None:
    """A constant of one element as a number: it becomes part of the kernel's text."""
    array = graph.constants.get(v)
    if array is None or array.size != 1 or v.type.dtype.kind not in "fiub":
        return None
    item: Any = np.asarray(array).astype(np.float64).item() if v.type.dtype.is_float else np.asarray(array).item()
    return const(item, v.type.dtype.computed)


class _Lowering:
    def __init__(
        self, graph: Graph, nodes: Sequence[Node], outputs: Sequence[Value], inplace: Mapping[Value, Value]
    ) -> None:
        self.graph, self.nodes, self.outputs, self.inplace = graph, nodes, tuple(outputs), inplace
        main = main_output(nodes, outputs)
        if main is None:
            raise InternalError(f"the outputs {', '.join(v.name for v in outputs)} of a group have no loops in common")
        self.output = main
        self.b = Builder()
        self.buffers: dict[te.Tensor, tuple[Buffer, TensorType]] = {}
        self.numbers: dict[te.Tensor, Expr] = {}
        self.params: list[Value] = []
        self.placed: dict[Expr, Expr] = {}  # Load of a stage's tensor -> where its value lies now
        self.kept: dict[
            te.Tensor, int
        ] = {}  # tensors held in local memory -> number of leading axes that are fixed there
        self.reductions: list[tuple[te.Tensor, Reduction]] = []
        self.outer: list[Var] = []  # the loops over the output
        self.products: list[te.Tensor] = []  # the reductions of an op that is a contraction
        self.open = frozenset(graph.dims.values())  # dims and the loops over the outputs that are open
        self.sums: dict[
            Hashable, tuple[frozenset[Var], Expr]
        ] = {}  # reductions -> where they are placed, and the result
        self.memo: dict[Expr, Expr] = {}
        self.stores: list[Store] = []  # of the outputs, in order
        self.pad_loops: set[str] = set()  # loops over an axis that has padding lanes
        t = self.output.type
        if t.layout is not None:
            uneven = {p.axis for p in t.layout.parts if p.div > 1 and value(const(t.shape[p.axis]) % p.div) != 0}
            self.pad_loops = {_loop_name(t.layout, k) for k, p in enumerate(t.layout.parts) if p.axis in uneven}

    def run(self) -> Lowered:
        results = self.expressions()
        outs = self.out_buffers()
        result, out = results[self.output], outs[self.output]
        if result.stage is not None and result.stage.own is not None:
            self.buffers[result.stage.own] = (out, self.output.type)
        choose_kept([results[v] for v in self.outputs], self.resolve, self.kept)
        scattered = self.scattered(results, outs)
        if scattered is None:
            self.nest(results, outs)
        else:
            write(self.b, scattered)
        buffers = list(dict.fromkeys([*(buf for buf, _ in self.buffers.values()), *outs.values()]))
        dims = sorted(
            {v for p in buffers for d in p.shape for v in free(d)} | self.other_dims(),
            key=lambda v: v.name,
        )
        params: list[Param] = [*dims, *buffers]
        name = "_".join(n.op.name for n in self.nodes[:4]) + ("_etc" if len(self.nodes) > 4 else "")
        locs = tuple(dict.fromkeys(loc for n in self.nodes for loc in n.locs))
        kernel = Kernel((Func(name, tuple(params), self.b.block()),), locs)
        values = (*self.params, *(v for v in self.outputs if v not in self.inplace))
        written = tuple(values.index(self.inplace.get(v, v)) for v in self.outputs)
        form = self.form(result, kernel) if scattered is None else scattered
        return Lowered(kernel, values, tuple(dims), form, written, bool(self.inplace))

    def form(self, result: te.Tensor, kernel: Kernel) -> Form:
        """What the kernel computes."""
        outer, reductions = tuple(self.outer), tuple(r for _, r in self.reductions)
        if result.stage is not None and result.stage.own is not None:
            return Scan(outer=outer, panels=self.panels, reductions=reductions, along=outer[-1:])
        if len(self.products) > 1:
            return Weighted(
                outer=outer, panels=self.panels, reductions=reductions, kernel=kernel, store=self.stores[-1]
            )
        cls = Rows if reductions else Map
        form = cls(outer=outer, panels=self.panels, reductions=reductions)
        anchors = [r for t, r in self.reductions if t in self.products]
        *more, last = self.stores
        return (len(anchors) == 1 and contraction(form, kernel, anchors[0], last, tuple(more))) or form

    def other_dims(self) -> set[Var]:
        """Symbolic dims that occur in the loops only (a result may have a dim that no buffer shows by itself)."""
        declared = set(self.graph.dims.values())
        return {v for s in walk_stmts(self.b.block()) for e in exprs(s) for v in free(e) if v in declared}

    # --- from nodes to tensor expressions -----------------------------------------------------------------------------

    def expressions(self) -> dict[Value, te.Tensor]:
        tensors: dict[Value, te.Tensor] = {}
        for v in group_inputs(self.nodes):
            t = te.placeholder(f"x{len(self.params)}", v.type.dtype, v.type.shape)
            number = scalar_constant(self.graph, v)
            if number is not None:
                self.numbers[t] = number
            else:
                quads = quads_of(v.type)
                of = v.type if quads is None else TensorType(v.type.dtype, v.type.shape, quads)
                self.buffers[t] = (_buffer(t.name, of), of)
                self.params.append(v)
            tensors[v] = t
        for n in self.nodes:
            if n.op.compute is None:
                raise InternalError(f"{n.op.name} reached lowering without a tensor expression")
            made = n.op.compute(*(tensors[v] if v is not None else None for v in n.inputs), **n.attrs)
            results = made if isinstance(made, tuple) else (made,)
            if Trait.CONTRACTION in n.op.traits:
                before = set(te.stages([tensors[v] for v in n.inputs if v is not None]))
                self.products += [
                    t for t in te.stages(results) if t not in before and t.stage is not None and t.stage.reduce
                ]
            tensors.update(zip(n.outputs, results))
        return tensors

    def out_buffers(self) -> dict[Value, Buffer]:
        """Where each output is stored."""
        inputs = dict(zip(self.params, (buf for buf, _ in self.buffers.values())))
        name = "y{}" if len(self.outputs) > 1 else "y"
        return {
            v: inputs[self.inplace[v]] if v in self.inplace else _buffer(name.format(k), v.type)
            for k, v in enumerate(self.outputs)
        }

    def resolve(self, e: Expr) -> Expr:
        """Inline element-wise stages and lower input loads to memory; reductions and kept tensors stay."""
        r = self.memo.get(e)
        if r is None:
            r = self.memo[e] = self._resolve(e)
        return r

    def _resolve(self, e: Expr) -> Expr:
        if isinstance(e, Load) and isinstance(e.buf, te.Tensor):
            idx = tuple(known(self.resolve(i)) for i in e.idx)
            t = e.buf
            if t in self.numbers:
                return self.numbers[t]
            if t in self.buffers:
                return self.read(t, idx)
            assert t.stage is not None
            if t.stage.reduce or t in self.kept:
                return load(t, idx)
            return narrowed(self.resolve(substitute(t.stage.value, dict(zip(t.stage.axes, idx)))), t.dtype)
        r = rebuild(e, self.resolve)
        if isinstance(r, Op) and r.name.startswith("cast_") and r.args[0].dtype is r.dtype:
            return r.args[0]  # the value of an inlined stage is in its compute type already
        return r

    def read(self, t: te.Tensor, idx: tuple[Expr, ...]) -> Expr:
        """Load an input element. Padding lanes may ask for elements that do not exist: those are clamped."""
        buf, type_ = self.buffers[t]

        def element(*at: Expr) -> Expr:
            if self.pad_loops:
                at = tuple(
                    i if nonneg(d - 1 - i) or self.pad_loops.isdisjoint(v.name for v in free(i)) else minimum(i, d - 1)
                    for i, d in zip(at, buf.shape)
                )
            return load(buf, at or (0,))

        return type_.encoding.load((element,), idx)

    def scattered(self, results: Mapping[Value, te.Tensor], outs: Mapping[Value, Buffer]) -> Scattered | None:
        """What the updates of results read and write, if they have some."""
        stage = results[self.output].stage
        if stage is None or stage.updates is None:
            return None
        put, found = stage.updates, list[Beside]()
        index = tuple(map(self.resolve, put.index))
        for v in (self.output, *(v for v in self.outputs if v is not self.output)):
            own = results[v].stage
            if not v.type.row_major:
                raise InternalError(f"{self.nodes[-1].op.name} writes {v.type}: updates go to row-major memory")
            assert own is not None and own.updates is not None
            at: dict[Expr, Expr] = dict(zip((*own.axes, *own.updates.axes), (*stage.axes, *put.axes)))
            if tuple(substitute(self.resolve(i), at) for i in own.updates.index) != index:
                raise InternalError(f"{v.name} is updated at other places than {self.output.name}")
            initial = substitute(self.resolve(own.value), at)
            there = initial is cast(load(outs[v], stage.axes or (0,)), results[v].dtype.computed)
            value_ = substitute(self.resolve(own.updates.value), at)
            found.append(Beside(outs[v], None if v in self.inplace and there else initial, value_))
        (out, *beside) = found
        return Scattered(out.out, stage.axes, out.initial, put.axes, index, out.value, put.combine, tuple(beside))

    # --- loops --------------------------------------------------------------------------------------------------------

    def nest(self, results: Mapping[Value, te.Tensor], outs: Mapping[Value, Buffer]) -> None:
        t = self.output.type
        layout = t.layout or Layout(tuple(Part(k) for k in range(t.rank)))
        shape, left = outs[self.output].shape, list(self.outputs)
        at = [te.placeholder_axis(f"ahead{k}") for k in range(len(layout.parts))]  # loops that are not open yet
        order = self.order(results, layout.logical(tuple(at)), at, shape)
        goal = self.element(results[self.output], layout.logical(tuple(at)))
        at_once = len(self.outputs) == 1 and not any(True for _ in pending(goal, {}))  # nothing ahead of the last loop

        def open_loops(depth: int) -> None:
            if at_once and depth < len(order):
                open_loop(depth)
                return
            logical = layout.logical(tuple(at))
            bound = frozenset(at[k] for k in order[:depth]) | frozenset(self.graph.dims.values())
            places = {v: self.place_of(v, logical) for v in left}
            goals = {v: self.element(results[v], place) for v, place in places.items()}
            for goal in goals.values():
                self.place(goal, bound)
            last = depth == len(order)
            ready = [v for v in left if last or (v is not self.output and all(free(i) <= bound for i in places[v]))]
            values = {v: self.settle(goals[v]) for v in ready}
            for v in self.in_safe_order(ready, values, outs):
                left.remove(v)
                self.write(v, outs[v], tuple(at) if self.is_whole(v) else places[v], places[v], values[v])
            if not last:
                open_loop(depth)

        def open_loop(depth: int) -> None:
            k = order[depth]
            with self.b.loop(_loop_name(layout, k), shape[k]) as loop:
                at[k] = loop
                self.open |= {loop}
                open_loops(depth + 1)

        open_loops(0)
        in_order = order[-1:] == [len(at) - 1]  # else columns, over which vectors go
        self.outer = [at[k] for k in (order if in_order else sorted(order))]
        parts = list(zip(layout.parts, at))
        self.panels = {v: w for p, v in parts for q, w in parts if p.axis == q.axis and p.div < q.div}

    def in_safe_order(
        self, ready: Sequence[Value], values: Mapping[Value, Expr], outs: Mapping[Value, Buffer]
    ) -> list[Value]:
        """Outputs in an order in which none overwrites what a later one reads."""
        left, out = list(ready), []
        while left:
            read = {v: {x.buf for x in walk(values[v]) if isinstance(x, Load)} for v in left}
            free_now = (v for v in left if not any(outs[v] in read[w] for w in left if w is not v))
            v = next(free_now, left[0])  # where each reads another's memory: `find_inplace` refuses that
            left.remove(v)
            out.append(v)
        return out

    def is_whole(self, v: Value) -> bool:
        """Does an output have the elements of the largest at the same places in memory?"""
        return v.type.shape == self.output.type.shape

    def place_of(self, v: Value, logical: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """The element of an output that is stored with that element of the largest, or ahead of it."""
        if self.is_whole(v):
            return logical
        axes = places_in(self.nodes, self.output, v)
        assert axes is not None
        return tuple(const(0) if k is None else logical[k] for k in axes)

    def order(
        self,
        results: Mapping[Value, te.Tensor],
        logical: tuple[Expr, ...],
        at: Sequence[Var],
        shape: Sequence[Expr],
    ) -> list[int]:
        """The loops over the largest output's parts, outermost first: as they lie in memory, but those of a row's
        number ahead of those over the rest of the row, if it is innermost: sums over images are computed once. A number
        that is an output itself is stored once, whatever loop is innermost.
        """
        needed: set[Var] = set()
        for v in self.outputs:
            place = self.place_of(v, logical)
            for x in pending(self.element(results[v], place), {}):
                assert isinstance(x.buf, te.Tensor)
                needed.update(v for i in x.idx[: self.kept.get(x.buf, len(x.idx))] for v in free(i))
            if not self.is_whole(v):
                needed.update(v for i in place for v in free(i))
        every = list(range(len(at)))
        if not at or (at[-1] in needed and all(map(self.is_whole, self.outputs))):
            return every
        rest = [
            k
            for k in every
            if at[k] not in needed and (shape[k] is not const(1) or all(v not in needed for v in at[k:]))
        ]
        return [k for k in every if k not in rest] + rest

    def element(self, result: te.Tensor, logical: tuple[Expr, ...]) -> Expr:
        """The value of one output element, before reductions are placed."""
        assert result.stage is not None
        if result.stage.reduce:
            return load(result, logical)
        return self.resolve(substitute(result.stage.value, dict(zip(result.stage.axes, logical))))

    def place(self, e: Expr, bound: frozenset[Var]) -> None:
        """Compute, here, every reduction and kept tensor in e whose indices are known here."""
        for x in pending(e, self.placed):
            t = x.buf
            assert isinstance(t, te.Tensor)
            fixed = self.kept.get(t, len(t.shape))
            if not all(free(i) <= bound for i in x.idx[:fixed]):
                continue
            if t in self.kept:
                self.keep(t, x, fixed, bound)
            else:
                self.accumulate(t, x, bound)

    def settle(self, e: Expr) -> Expr:
        """e with every placed tensor replaced by where it lies."""

        memo: dict[Expr, Expr] = {}

        def go(x: Expr) -> Expr:
            r = memo.get(x)
            if r is None:
                r = memo[x] = moved(x)
            return r

        def moved(x: Expr) -> Expr:
            if isinstance(x, Load) and isinstance(x.buf, te.Tensor):
                if x.buf in self.kept:
                    buf = self.placed[load(x.buf, x.idx[: self.kept[x.buf]])]
                    assert isinstance(buf, Load)
                    return narrowed(load(buf.buf, map(go, x.idx[self.kept[x.buf] :])), x.buf.dtype)
                return narrowed(self.placed[x], x.buf.dtype)
            r = rebuild(x, go)
            if isinstance(r, Op) and r.name.startswith("cast_") and r.args[0].dtype is r.dtype:
                return r.args[0]
            return r

        return go(e)

    def keep(self, t: te.Tensor, x: Load, fixed: int, bound: frozenset[Var]) -> None:
        key = load(t, x.idx[:fixed])
        if key in self.placed:
            return
        assert t.stage is not None
        own = _renamed(t.stage.axes[fixed:])
        e = self.resolve(substitute(t.stage.value, dict(zip(t.stage.axes, (*x.idx[:fixed], *own)))))
        self.place(e, bound)
        buf = self.b.alloc("row", t.dtype.computed, *t.shape[fixed:], space="local")
        self.placed[key] = load(buf, [0] * len(own))
        with ExitStack() as loops:
            idx = tuple(loops.enter_context(self.b.loop(f"k{j}", d)) for j, d in enumerate(t.shape[fixed:]))
            e = self.settle(substitute(e, dict(zip(own, idx))))
            self.b.store(buf, idx, e)
        self.reductions.append((t, Reduction(buf, "", idx, e, around=bound)))

    def accumulate(self, t: te.Tensor, x: Load, bound: frozenset[Var]) -> None:
        stage = t.stage
        assert stage is not None
        own = _renamed(stage.reduce)
        rows = self.whole_rows(stage)
        longer = {o: rows[v] for o, v in zip(own, stage.reduce) if v in rows}
        env = dict(zip((*stage.axes, *stage.reduce), (*x.idx, *own)))
        stage = replace(stage, reduce=own)
        term = self.resolve(substitute(stage.value, env))
        cond = self.resolve(substitute(stage.where, env)) if stage.where is not None else const(True, boolean)
        self.place(term, bound)
        self.place(cond, bound)
        same = self.same_reduction(stage, t.dtype, term, cond)
        outer, there = self.sums.get(same, (bound, None)) if same is not None else (bound, None)
        if there is not None and outer <= bound:
            self.placed[x] = there
            return
        counts, term = _counts(stage, term, cond)
        acc = self.b.alloc("acc", t.dtype.computed, 1)
        self.placed[x] = acc[0]
        if same is not None and bound <= self.open:
            self.sums[same] = bound, acc[0]
        self.b.store(acc, (0,), te.identity(stage.combine, t.dtype.computed))
        ends = [1 if v in counts else longer.get(v, v.hi + 1 if v.hi is not None else 0) for v in stage.reduce]
        rs: list[Var] = []
        with ExitStack() as scopes:
            for v, end in zip(stage.reduce, ends):
                lo, hi, cond = loaded_range(v, const(end), cond)
                rs.append(scopes.enter_context(self.b.loop(f"r{len(rs)}", hi, lo=lo)))
                cond, term = (self.resolve(substitute(e, {v: rs[-1]})) for e in (cond, term))
                self.place(cond, bound | {*rs})  # reductions for each step of this one
                if len(rs) < len(ends):
                    self.place(term, bound | {*rs})
            conds = tuple(conjuncts(self.settle(cond)))
            for c in conds:
                scopes.enter_context(self.b.when(c))
            self.place(term, bound | {*rs})
            term = self.settle(term)
            self.b.store(acc, (0,), combine(stage.combine, acc[0], term))
        self.reductions.append((t, Reduction(acc, stage.combine, tuple(rs), term, conds, bound)))

    def same_reduction(self, stage: te.Stage, dtype: DType, term: Expr, cond: Expr) -> Hashable:
        """Equal for reductions of several outputs that are the same number; None where that cannot be told yet."""
        if len(self.outputs) == 1 or pending(term, self.placed) or pending(cond, self.placed):
            return None
        return stage.combine, dtype.computed, stage.reduce, self.settle(term), self.settle(cond)

    def whole_rows(self, stage: te.Stage) -> dict[Var, int]:
        """Axes of a sum of products along which both factors lie in rows whose ends pad them, and how long these rows
        are. The lanes there hold 0, and 0 * 0 adds nothing: a sum over whole rows is made of whole vectors, and no
        index is divided by an odd number of channels. Elements of 4 bytes and more end with the channels.
        """
        pair = (
            stage.value.args
            if stage.combine == "sum" and isinstance(stage.value, Op) and stage.value.name == "*"
            else ()
        )
        guarded = free(stage.where) if stage.where is not None else set()
        ends = [self.row_end(_uncast(e)) for e in pair]
        same = dict(set(ends[0].items()) & set(ends[1].items())) if len(ends) == 2 else {}
        used = [[v for i in _uncast(e).idx for v in free(i)] for e in pair] if same else []  # type: ignore[attr-defined]
        return {
            v: n
            for v, n in same.items()
            if v in stage.reduce and v not in guarded and all(u.count(v) == 1 for u in used)
        }

    def row_end(self, e: Expr) -> dict[Var, int]:
        """Return the axis variable that walks a padded row `.. a/d a%d` from its start, and the row's length."""
        if not isinstance(e, Load) or not isinstance(e.buf, te.Tensor) or e.buf not in self.buffers:
            return {}
        t = self.buffers[e.buf][1]
        parts = t.layout.parts[-2:] if isinstance(t.encoding, Dense) and t.layout is not None else ()
        if len(parts) < 2 or parts[1] != Part(parts[0].axis, 1, parts[0].div) or parts[0].mod:
            return {}
        n, i = t.shape[parts[0].axis], e.idx[parts[0].axis]
        whole = t.dtype.bytes < WORD and isinstance(n, int) and isinstance(i, Var) and i.hi == n - 1
        return {i: -(-n // parts[1].mod) * parts[1].mod} if whole else {}  # type: ignore[dict-item]

    def write(self, output: Value, out: Buffer, at: tuple[Expr, ...], logical: tuple[Expr, ...], v: Expr) -> None:
        t = output.type
        v = cast(v, t.dtype)
        if t.layout is not None and self.pad_loops:  # lanes that are no element hold 0
            for k in {p.axis for p in t.layout.parts if p.div > 1}:
                if value(const(t.shape[k]) - 1 - logical[k]) is None and not nonneg(const(t.shape[k]) - 1 - logical[k]):
                    v = select(logical[k] < const(t.shape[k]), v, const(0, t.dtype))
        self.stores.append(Store(out, at or (const(0),), v))
        self.b.emit(self.stores[-1])


def _buffer(name: str, t: TensorType) -> Buffer:
    """The memory of a value; that of a scalar has one axis, for an index to be written."""
    return Buffer(name, t.buffer.dtype, tuple(map(const, t.physical)) or (const(1),))


def _renamed(axes: Sequence[Var]) -> tuple[Var, ...]:
    """Return a stage's axes under unused names: variables are interned, so a loop may be another stage's axis."""
    return tuple(var(f"{v.name}~", v.dtype, v.lo, v.hi, v.div) for v in axes)


def _loop_name(layout: Layout, k: int) -> str:
    """`i1` for an axis that is not blocked and for its outermost part, `i1b` for its block."""
    p = layout.parts[k]
    return f"i{p.axis}" + ("b" * sum(1 for q in layout.parts if q.axis == p.axis and q.div > p.div))


def known(i: Expr) -> Expr:
    """An index that can have one value only is that value (axes of size 1), unless it is checked at run time."""
    lo, hi = bounds(i)
    one = lo is not None and lo == hi and not any(isinstance(x, Op) and x.name == "guard" for x in walk(i))
    return const(lo) if one and lo is not None else i


def narrowed(e: Expr, t: DType) -> Expr:
    """Return a number in `t`'s compute type as its readers see it: 2- and 4-bit integers wrap, floats stay."""
    if not t.is_int or t.computed is t:
        return e
    if isinstance(e, Const) or (isinstance(e, Op) and e.name.startswith("cast_") and e.args[0].dtype is t):
        return e  # was one of them already
    if t.kind == "u":
        return op("&", e, const((1 << t.bits) - 1, t.computed))
    unused = const(t.computed.bits - t.bits, t.computed)
    return call("shr", call("shl", e, unused), unused)


def _counts(stage: te.Stage, term: Expr, cond: Expr) -> tuple[dict[Var, int], Expr]:
    """The axes along which the terms of a reduction are the same, with sizes, and the term for one pass over them: a
    sum of n equal numbers is n times one of them, which rounds once and not n times; of equal ones the largest is any.
    """
    if stage.combine not in ("sum", "max", "min"):
        return {}, term
    used = free(term) | free(cond)
    counts = {v: v.hi + 1 for v in stage.reduce if v not in used and isinstance(v.hi, int) and v.hi > 0}
    n = math.prod(counts.values())
    return counts, term if n == 1 or stage.combine != "sum" else term * const(
        float(n) if term.dtype.is_float else n, term.dtype
    )


def _uncast(e: Expr) -> Expr:
    """The element that is converted, or e."""
    return e.args[0] if isinstance(e, Op) and e.name.startswith("cast_") else e
