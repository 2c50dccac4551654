"""The reverse of a loop of known length: a loop over the pullback of its body, from the last iteration to the first.

    h = loop(None, None, h0, x, w, body=f, carried=1, scanned=1, length=n)
    ->  h, s = loop(None, None, h0, x, w, body=f', ...)         f' stacks the residuals s, too
        ch, cx, cz = loop(None, None, cot h, s, x, w, ...)      backward over s and x; carries the cotangent of h
        cot h0 = ch; cot x = cx; cot w = matmul(transpose(s), cz)

The reverse body computes again what is cheap, from residuals, scanned rows and captured values (see `residuals`). What
both bodies compute from captured values alone is moved in front of the loops. Where a captured value enters a product,
a convolution or a gather, the loop stacks the cotangents of the result, and one product after it gives the cotangent of
the captured value; the other cotangents of captured values are sums that the loop carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dnnc.ir.autodiff.invariants import Hoisted, hoist, trim
from dnnc.ir.autodiff.residuals import kept, nominal_bytes
from dnnc.ir.autodiff.reverse import _active, pullback, zeros
from dnnc.ir.batching import Batch, Operand, rule_of
from dnnc.ir.dtype import i64
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Graph, Node, Value
from dnnc.ir.graph.expand import extract, inline, prune, reached
from dnnc.ir.op import Cost, OpDef
from dnnc.ir.types import TensorType

WORTH = 4  # rows of factors may be that much larger than the sum which each iteration would add to


@dataclass(frozen=True)
class Rows:
    """A stack with one row for each iteration; `backward`: the last iteration has the first row."""

    value: Value
    backward: bool


@dataclass(frozen=True)
class Factor:
    """A node of the body whose fixed operands, by position, get their cotangents after the loop."""

    node: Node
    fixed: dict[int, Value]


@dataclass(frozen=True)
class Stacks(Batch[Value]):
    """What batching rules build with."""

    builder: Builder = field(kw_only=True)

    def all(self, op: str | OpDef, *inputs: Value | None, **attrs: object) -> tuple[Value, ...]:
        made = self.builder.op(op, *inputs, **attrs)
        return made if isinstance(made, tuple) else (made,)


class LoopReverse:
    """The reverse of one loop without a condition; `again`: keep nothing but carried values."""

    def __init__(
        self, b: Builder, n: Node, cotangents: Sequence[Value | None], needed: Sequence[int], again: bool
    ) -> None:
        a = n.attrs
        self.b, self.n, self.g, self.again = b, n, b.graph, again
        self.carried, self.scanned, self.length = a["carried"], a["scanned"], a["length"]
        self.cotangents = cotangents
        self.flags = a["backward"] or (False,) * (self.scanned + len(n.outputs) - self.carried)
        body = self.body = a["body"].copy()
        self.inner = Builder(body, None, n.locs)
        self.inputs = list(body.inputs)
        self.operand = dict(zip(self.inputs[1:], n.inputs[2:]))
        self.needed = [self.inputs[k - 1] for k in needed]
        self.position = {self.inputs[k - 1]: k for k in needed}
        self.stacks: dict[Value, Rows] = {}

    @property
    def states(self) -> list[Value]:
        return self.inputs[1 : 1 + self.carried]

    @property
    def rows(self) -> list[Value]:
        return self.inputs[1 + self.carried : 1 + self.carried + self.scanned]

    def run(self) -> dict[int, Value]:
        """The cotangents of the operands, by position."""
        self.captured = self.inputs[1 + self.carried + self.scanned :]
        _active(self.body, [v for v in self.inputs if v.type.dtype.is_float])  # what is made of other ops becomes these
        hoisted = self.hoist()
        sources = [*self.needed, *self.derived(hoisted)]
        self.find_live(sources)
        self.wanted_captured = [v for v in self.captured if v in sources and v in self.live]
        self.find_factors()
        results, states, sums = self.pull(sources)
        self.choose(results)
        self.extend()
        found = self.loop(states, sums)
        if hoisted.inputs:
            self.through(hoisted, found)
        return {self.position[v]: c for v, c in found.items() if v in self.position}

    # --- what the body is ---

    def hoist(self) -> Hoisted:
        """Invariant parts of the body become operands."""
        made = hoist(self.body, self.captured)
        outer = inline(Builder(self.g, self.n, self.n.locs), made.graph, [self.operand[v] for v in made.given])
        self.operand.update(zip(made.inputs, outer))
        self.captured = [*self.captured, *made.inputs]
        return made

    def derived(self, hoisted: Hoisted) -> list[Value]:
        """Inputs that were computed in the body, from values that need a cotangent."""
        need = {inside for inside, v in zip(hoisted.graph.inputs, hoisted.given) if v in self.needed}
        pairs = zip(hoisted.inputs, hoisted.graph.outputs)
        return [v for v, o in pairs if v.type.dtype.is_float and not need.isdisjoint(reached([o], ()))]

    def find_live(self, sources: list[Value]) -> None:
        """`sources` grow by the states that depend on them; `live`: values on a float path to a cotangent."""
        body = self.body
        while True:
            active = _active(body, sources)
            more = [s for s, o in zip(self.states, body.outputs) if o in active and s not in sources]
            if not more:
                break
            sources += more
        self.active = active
        live = {o for o, c in zip(body.outputs, self.cotangents) if c is not None and o in active}
        self.back: list[int] = []
        while True:
            for n in body.nodes(reverse=True):
                if not live.isdisjoint(n.outputs):
                    live.update(v for v in n.inputs if v in active and v is not None)
            given = [
                k for k, s in enumerate(self.states) if s in sources and (s in live or self.cotangents[k] is not None)
            ]
            if given == self.back:
                break
            self.back = given
            live.update(o for k in given if (o := body.outputs[k]) in active)
        self.live = live

    def find_factors(self) -> None:
        """Products with captured values: these are left out of the pullback of the body."""
        self.factors: list[Factor] = []
        self.twins: dict[Value, Value] = {}
        for m in self.body.nodes():
            if m.op.batching is None or m.op.decompose is not None or len(m.outputs) != 1 or m.output not in self.live:
                continue
            if m.op.cost < Cost.HEAVY and m.op.index is None:
                continue
            fixed = {k: v for k, v in enumerate(m.inputs) if v in self.wanted_captured and v is not None}
            moving = [v for v in m.inputs if v is not None and self.moves(v)]
            row = sum(nominal_bytes(v.type) for v in (*moving, m.output))
            if not fixed or not moving or row > WORTH * sum(nominal_bytes(v.type) for v in fixed.values()):
                continue
            self.factors.append(Factor(m, fixed))
            for k, v in fixed.items():
                if v not in self.twins:
                    self.twins[v] = self.body.add_input(v.name, v.type)
                m.set_input(k, self.twins[v])

    def moves(self, v: Value) -> bool:
        """Does a value change from iteration to iteration?"""
        return v not in self.captured and v not in self.body.constants and v not in self.twins.values()

    # --- the joint graph ---

    def pull(self, sources: Sequence[Value]) -> tuple[list[Value], list[Value], list[Value]]:
        """Add the pullback to the body. Results: all of the reverse body; then the inputs of the reverse loop."""
        body, inner = self.body, self.inner
        seeds: dict[Value, Value] = {}

        def seed(name: str, o: Value) -> Value:
            x: Value = body.add_input(name, o.type)
            if o in self.active:
                seeds[o] = inner.add(seeds[o], x) if o in seeds else x
            return x

        self.state_seeds = [seed(f"cot_{self.states[k].name}", body.outputs[k]) for k in self.back]
        made = [k for k in range(self.carried, len(body.outputs)) if self.cotangents[k] is not None]
        made = [k for k in made if body.outputs[k] in self.active]
        self.row_seeds = {k: seed(f"cot_y{k - self.carried}", body.outputs[k]) for k in made}
        states = [self.states[k] for k in self.back]
        rows = [v for v in self.rows if v in sources and v in self.live]
        products = [f.node.output for f in self.factors]
        wanted = [*states, *rows, *self.wanted_captured, *products]
        found = dict(zip(wanted, pullback(body, seeds, wanted, self.n.locs)))
        for v, twin in self.twins.items():
            body.replace_all_uses(twin, v)
            body.inputs.remove(twin)
            body.release([twin.name])
        self.factors = [f for f in self.factors if found[f.node.output] is not None]
        self.product_cotangents = [c for f in self.factors if (c := found[f.node.output]) is not None]
        self.row_cotangents = {v: c for v in rows if (c := found[v]) is not None}
        self.sums = {v: c for v in self.wanted_captured if (c := found[v]) is not None}
        self.sum_inputs = [body.add_input(f"sum_{v.name}", _wide(v.type)) for v in self.sums]
        carried = [c if (c := found[v]) is not None else zeros(inner, v.type) for v in states]
        for x, c in zip(self.sum_inputs, self.sums.values()):
            carried.append(inner.add(x, c if c.type.dtype is x.type.dtype else inner.cast(c, to=x.type.dtype)))
        self.carried_results = carried
        results = [*carried, *self.row_cotangents.values(), *self.product_cotangents]
        return results, self.state_seeds, self.sum_inputs

    def choose(self, results: Sequence[Value]) -> None:
        """`kept`: the residuals."""
        body = self.body
        moved = {*self.state_seeds, *self.row_seeds.values(), *self.sum_inputs}
        for n in body.nodes():
            if not moved.isdisjoint(v for v in n.inputs if v is not None):
                moved.update(n.outputs)
        self.at_hand = {self.inputs[0], *self.rows, *self.captured, *body.constants}
        read = [v for n in body.nodes() if not moved.isdisjoint(n.outputs) for v in n.inputs if v is not None]
        read += [*results, *(v for f in self.factors for v in f.node.inputs if v is not None)]
        readers = list(dict.fromkeys(v for v in read if v not in moved and v not in self.at_hand))
        self.kept = kept(readers, self.at_hand, body.outputs[self.carried :], self.again)

    def extend(self) -> None:
        """The forward loop takes invariant values and stacks residuals."""
        g, n, body = self.g, self.n, self.body
        made = body.outputs[self.carried :]
        more = [v for v in self.kept if v not in made]
        source = reached([*body.outputs, *more], set(self.inputs))
        captured = [v for v in self.captured if v in source]
        inputs = [*self.inputs[: 1 + self.carried + self.scanned], *captured]
        forward = extract(body, n.attrs["body"].name, inputs, [*body.outputs, *more])
        trim(forward)
        attrs = {**n.attrs, "body": forward, "backward": (*self.flags, *(False,) * len(more))}
        first = len(n.outputs)
        types = [TensorType(v.type.dtype, (self.length, *v.type.shape)) for v in more]
        g.redefine(n, [None, None, *(self.operand[v] for v in inputs[1:])], attrs, [*n.outputs, *types])
        self.stacks = {v: Rows(o, False) for v, o in zip(more, n.outputs[first:])}
        for k, v in enumerate(made):
            if v in self.kept:
                self.stacks.setdefault(v, Rows(n.outputs[self.carried + k], self.flags[self.scanned + k]))

    # --- the reverse loop ---

    def loop(self, states: list[Value], sums: list[Value]) -> dict[Value, Value]:
        """Add the reverse loop, and the products after it. The cotangents of operands, by the body's inputs."""
        b, n, body = self.b, self.n, self.body
        known = {v: Rows(o, f) for v, f in zip(self.rows, self.flags) if (o := self.operand[v]) is not None}
        known |= self.stacks
        orders, missing = self.factor_rows(known)
        rows_made = [(c, self.flags[self.rows.index(v)]) for v, c in self.row_cotangents.items()]
        stacked = list(dict.fromkeys([*rows_made, *zip(self.product_cotangents, orders), *missing]))
        results = [*self.carried_results, *(v for v, _ in stacked)]
        if not results:
            return {}
        taken = self.at_hand | set(self.kept) | {*states, *sums, *self.row_seeds.values()}
        source = reached(results, taken)
        if self.inputs[0] in source:  # the iteration's number, from the last to the first
            known[self.inputs[0]] = Rows(b.iota(shape=(self.length,), dtype=i64), False)
        for k, x in self.row_seeds.items():
            c = self.cotangents[k]
            assert c is not None
            known[x] = Rows(c, self.flags[self.scanned + k - self.carried])
        scanned = [v for v in known if v in source]
        captured = [v for v in self.captured if v in source]
        number = body.add_input("number", TensorType(i64, ()))
        reverse = extract(body, "reverse", [number, *states, *sums, *scanned, *captured], results)
        inside = reverse.inputs[len(reverse.inputs) - len(captured) :]
        invariant = hoist(reverse, inside)
        outer = dict(zip(inside, (self.operand[v] for v in captured)))
        outer.update(zip(invariant.inputs, inline(b, invariant.graph, [outer[v] for v in invariant.given])))
        used = reached(reverse.outputs, set(reverse.inputs))
        unused = [v for v in outer if v not in used]
        reverse.inputs = [v for v in reverse.inputs if v not in unused]
        reverse.release([v.name for v in unused])
        trim(reverse)
        start = [c if (c := self.cotangents[k]) is not None else zeros(b, self.states[k].type) for k in self.back]
        start += [zeros(b, x.type) for x in sums]
        attrs = {
            "body": reverse,
            "carried": len(start),
            "scanned": len(scanned),
            "length": self.length,
            "backward": (*(not known[v].backward for v in scanned), *(not f for _, f in stacked)),
        }
        operands = [*start, *(known[v].value for v in scanned), *(v for x, v in outer.items() if x in used)]
        made = b.node(n.op, [None, None, *operands], attrs).outputs
        found = {self.states[k]: o for k, o in zip(self.back, made)}
        for v, o in zip(self.sums, made[len(states) :]):
            found[v] = o if o.type.dtype is v.type.dtype else b.cast(o, to=v.type.dtype)
        made_rows = dict(zip(stacked, made[len(start) :]))
        found.update((v, made_rows[key]) for v, key in zip(self.row_cotangents, rows_made))
        for f, order, c in zip(self.factors, orders, self.product_cotangents):
            moving = {}
            for v in f.node.inputs:
                if v is not None and self.moves(v):
                    moving[v] = made_rows[v, order] if (v, order) in made_rows else known[v].value
            for v, part in self.product(f, moving, made_rows[c, order]):
                found[v] = b.add(found[v], part) if v in found else part
        return found

    def factor_rows(self, known: dict[Value, Rows]) -> tuple[list[bool], list[tuple[Value, bool]]]:
        """For each factor the order of its rows; and the operands that the reverse loop must stack, in which order."""
        orders: list[bool] = []
        missing: dict[tuple[Value, bool], None] = {}
        for f in self.factors:
            moving = [v for v in f.node.inputs if v is not None and self.moves(v)]
            order = next((known[v].backward for v in moving if v in known), False)
            orders.append(order)
            missing.update(((v, order), None) for v in moving if v not in known or known[v].backward is not order)
        return orders, list(missing)

    def product(self, f: Factor, rows: dict[Value, Value], cotangent: Value) -> list[tuple[Value, Value]]:
        """The cotangents of a factor's fixed operands: those of the op on all rows at once."""
        g = Graph(f.node.op.name)
        inner = Builder(g, None, self.n.locs)
        operands: list[Value | None] = []
        xs: list[Operand[Value]] = []
        for v in f.node.inputs:
            outside = None if v is None else rows[v] if v in rows else self.operand.get(v)
            if v is None or outside is None:
                x = None if v is None else inner.constant(self.body.constants[v])
            else:
                x = g.add_input(v.name, outside.type)
                operands.append(outside)
            xs.append(Operand(x, v in rows))
        rule = rule_of(f.node.op)
        assert rule is not None
        (made,) = rule(Stacks(self.length, builder=inner), f.node.op, xs, f.node.attrs)
        seed = g.add_input("cotangent", cotangent.type)
        found = pullback(g, {made: seed}, [xs[k].given for k in f.fixed], self.n.locs)
        g.outputs = [c for c in found if c is not None]
        prune(g)
        results = iter(inline(self.b, g, [*operands, cotangent]))
        return [(v, next(results)) for v, c in zip(f.fixed.values(), found) if c is not None]

    def through(self, hoisted: Hoisted, found: dict[Value, Value]) -> None:
        """Cotangents of values that were moved out of the body go on to what they were made of."""
        g = hoisted.graph.copy()
        given = {o: c for v, o in zip(hoisted.inputs, g.outputs) if (c := found.get(v)) is not None}
        wanted = [(v, x) for v, x in zip(hoisted.given, g.inputs) if v in self.needed]
        if not given or not wanted:
            return
        seeds = {o: g.add_input("cotangent", o.type) for o in given}
        made = pullback(g, seeds, [x for _, x in wanted], self.n.locs)
        g.outputs = [c for c in made if c is not None]
        prune(g)
        results = iter(inline(self.b, g, [*(self.operand[v] for v in hoisted.given), *given.values()]))
        for (v, _), c in zip(wanted, made):
            if c is not None:
                new = next(results)
                found[v] = self.b.add(found[v], new) if v in found else new


def _wide(t: TensorType) -> TensorType:
    """The type of a sum over many iterations."""
    return TensorType(t.dtype.computed, t.shape)
