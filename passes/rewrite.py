"""Driver of rewrite rules: a function that gets a node, and gives up with a reason or replaces it.

    def drop_neg_neg(m: Match) -> Value:
        "neg(neg(x)) -> x"                                    # what stands before and after
        return m.operand(m.node(m.operand(m.root, 0), "neg"), 0)

The driver offers every node to the rules of its op, and again whatever a rewrite may have made possible: new nodes,
their readers, and the last reader of a value whose other readers vanished. Rules shrink the graph, so this ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.ir.errors import InternalError, ShapeError
from dnnc.ir.graph import Graph, Node, Value, union
from dnnc.ir.graph.builder import Builder, infer
from dnnc.ir.graph.expand import between
from dnnc.ir.op import Trait
from dnnc.ir.types import TensorType
from dnnc.passes.base import PassContext, graphs, is_pure

Array = np.ndarray[Any, Any]


class NoMatch(Exception):
    """A rule does not fire here; `reason` says why."""

    def __init__(self, reason: str, *args: Any) -> None:
        self.reason, self.parts = reason, args

    def __str__(self) -> str:
        return self.reason.format(*self.parts)


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: `apply` for nodes of the named ops. Not `exact`: it changes rounding, so never with strict numerics."""

    apply: Callable[[Match], Value]
    ops: tuple[str, ...]
    exact: bool = True

    @property
    def name(self) -> str:
        return self.apply.__name__


class Match:
    """A node that a rule looks at, and the questions that rules ask. Those that fail raise NoMatch."""

    def __init__(self, graph: Graph, root: Node, ctx: PassContext, outputs: set[Value]) -> None:
        self.graph, self.root, self.ctx, self.outputs = graph, root, ctx, outputs
        self.matched: list[Node] = [root]
        self.built = False
        self.renewed: list[tuple[Value, str]] = []

    # --- questions ---

    def require(self, ok: bool, reason: str, *args: Any) -> None:
        """Give up unless ok; the reason is formatted only when somebody wants to read it."""
        if not ok:
            raise NoMatch(reason, *args)

    def operand(self, n: Node, index: int) -> Value:
        """An operand that must be there."""
        v = n.inputs[index] if index < len(n.inputs) else None
        if v is None:
            raise NoMatch("{} has no operand {}", n.op.name, index)
        return v

    def node(self, v: Value | None, *ops: str) -> Node:
        """The node that makes a value, which must apply one of these ops."""
        n = producer(v, *ops)
        if n is None:
            raise NoMatch("{} is not made by {}", v.name if v is not None else "an absent operand", " or ".join(ops))
        self.matched.append(n)
        return n

    def again(self) -> Node:
        """The node that makes the root's first operand, which must apply the root's op."""
        return self.node(self.operand(self.root, 0), self.root.op.name)

    def constant(self, v: Value) -> Array:
        """The data of a value that must be a constant."""
        a = self.graph.constants.get(v)
        if a is None:
            raise NoMatch("{} is not a constant", v.name)
        return a

    def number(self, v: Value) -> Any:
        """The one number that all elements of a constant are."""
        x = uniform(self.constant(v))
        if x is None:
            raise NoMatch("the constant {} holds different numbers", v.name)
        return x

    def either(self, n: Node) -> tuple[Value, Value]:
        """Return (the other operand, the constant) of a node of two; only a commutative op may have it first."""
        a, b = self.operand(n, 0), self.operand(n, 1)
        if b in self.graph.constants:
            return a, b
        if a in self.graph.constants and Trait.COMMUTATIVE in n.op.traits:
            return b, a
        raise NoMatch("neither operand of {} is a constant", n.op.name)

    def sole(self, n: Node) -> Node:
        """A node whose results one node reads, and not the caller of the graph."""
        for o in n.outputs:
            users = len({u for u, _ in o.uses})
            if o in self.outputs:
                raise NoMatch("{} is an output of the graph", o.name)
            if users > 1:
                raise NoMatch("{} has {} readers", o.name, users)
        return n

    def keeps_type(self, v: Value) -> Value:
        """A value with the type of the root's result, so that it can stand for it."""
        if v.type != self.root.output.type:
            raise NoMatch("{} is {}, the result {}", v.name, v.type, self.root.output.type)
        return v

    # --- building ---

    @property
    def b(self) -> Builder:
        """Makes nodes in front of the root with locations of all matched nodes. Ask all questions before."""
        self.built = True
        locs = self.root.locs
        for n in self.matched[1:]:
            locs = union(locs, n.locs)
        return Builder(self.graph, self.root, locs)

    def renew(self, old: Value, array: Array) -> Value:
        """A constant in the place of another one, whose name it takes when that one goes."""
        v = self.graph.constant(array, old.name, old.locs)
        self.renewed.append((v, old.name))
        return v

    def fits(self, inputs: Sequence[Value | None]) -> bool:
        """Does the root give a result of the same type with other operands?"""
        t, out = self._type(inputs), self.root.output.type
        return t is not None and (t.dtype, t.shape) == (out.dtype, out.shape)

    def shrinks(self, inputs: Sequence[Value | None]) -> bool:
        """Does the root give with other operands a result that `expanded` makes what it was?"""
        t, out = self._type(inputs), self.root.output.type
        return t is not None and t.dtype is out.dtype and t.shape != out.shape

    def _type(self, inputs: Sequence[Value | None]) -> TensorType | None:
        try:
            (t,) = infer(self.root.op, inputs, self.root.attrs)
        except ShapeError:
            return None
        return t

    def expanded(self, v: Value) -> Value:
        """A value that broadcasts to the shape of the root's result, with this shape."""
        shape = self.root.output.type.shape
        return v if v.type.shape == shape else self.b.expand(v, shape=shape)

    def like(self, inputs: Sequence[Value | None]) -> Value:
        """The root with other operands."""
        return self.b.node(self.root.op, inputs, self.root.attrs).output


def producer(v: Value | None, *ops: str) -> Node | None:
    """The node that makes a value, if it applies one of these ops."""
    n = v.node if v is not None else None
    return n if n is not None and n.op.name in ops else None


def uniform(a: Array) -> Any:
    """Return the number that all elements equal bit for bit (0.0 is not -0.0); None if they differ."""
    if a.size == 0 or a.dtype.kind in "OUSTc":
        return None
    flat = a.reshape(-1) if a.flags.c_contiguous else a.ravel()
    first = flat[0]
    if a.size > 1 and (flat[-1].tobytes() != first.tobytes() or (bits(flat) != bits(flat[:1])).any()):
        return None
    if a.dtype.kind == "b":
        return bool(first)
    return int(first) if a.dtype.kind in "iu" or a.dtype.name.startswith(("int", "uint")) else float(first)


def bits(a: Array) -> Array:
    """The elements of a contiguous array as unsigned integers."""
    return a.view(f"u{a.dtype.itemsize}")


# --- the driver -------------------------------------------------------------------------------------------------------


def rewrite(graph: Graph, rules: Iterable[Rule], ctx: PassContext) -> bool:
    """Apply rules to a graph and its subgraphs until none fires. Returns whether anything changed."""
    table: dict[str, list[Rule]] = {}
    for r in rules:
        for name in r.ops:
            table.setdefault(name, []).append(r)
    changed = False
    for g in graphs(graph):
        changed |= _Driver(g, table, ctx).run()
    return changed


class _Driver:
    def __init__(self, graph: Graph, table: dict[str, list[Rule]], ctx: PassContext) -> None:
        self.graph, self.table, self.ctx = graph, table, ctx
        self.outputs = set(graph.outputs)
        self.queue: deque[Node] = deque()
        self.waiting: set[Node] = set()
        self.budget = 100 * len(graph) + 1000  # far more than any graph needs; a cycle of rules ends here

    def run(self) -> bool:
        """Rewrite until a round changes nothing: patterns may reach further than the readers revisited."""
        changed = False
        while self.round():
            changed = True
        return changed

    def round(self) -> bool:
        changed = False
        for n in self.graph.nodes():
            self.push(n)
        while self.queue:
            n = self.queue.popleft()
            self.waiting.discard(n)
            if n.graph is self.graph and self.visit(n):
                changed = True
        return changed

    def visit(self, n: Node) -> bool:
        for rule in self.table[n.op.name]:
            before = n.prev
            m = Match(self.graph, n, self.ctx, self.outputs)
            try:
                ok = rule.exact or not self.ctx.strict
                m.require(ok, "it changes how results are rounded, which strict numerics exclude")
                new = rule.apply(m)
            except NoMatch as e:
                if m.built:
                    raise InternalError(f"rule {rule.name} built nodes before it gave up ({e}) at {n!r}") from e
                if self.ctx.explain is not None:
                    self.ctx.explain(rule.name, n, str(e))
                continue
            self.budget -= 1
            if self.budget < 0:
                raise InternalError(
                    f"graph {self.graph.name}: rewriting does not end; the last rule was {rule.name} at {n!r}"
                )
            self.replace(rule, n, new, before)
            for v, name in m.renewed:
                self.graph.rename(v, name)
            return True
        return False

    def replace(self, rule: Rule, n: Node, new: Value, before: Node | None) -> None:
        old = n.output
        if (new.type.dtype, new.type.shape) != (old.type.dtype, old.type.shape):
            raise InternalError(f"rule {rule.name} replaces {n!r} by a {new.type}")
        made = between(before, n)
        readers = self.graph.users(old)
        name = old.name
        self.graph.replace_all_uses(old, new)
        if old in self.outputs:
            self.outputs = set(self.graph.outputs)
        for u in sweep(self.graph, [n], self.outputs):
            self.push(u)
        if new.node is not None and new.node in made:
            self.graph.rename(new, name)
        for u in (*made, *readers):
            self.push(u)

    def push(self, n: Node) -> None:
        if n.graph is self.graph and n not in self.waiting and n.op.name in self.table:
            self.waiting.add(n)
            self.queue.append(n)


def nodes_of(graph: Graph, *ops: str) -> list[Node]:
    """The nodes of a graph that apply one of these ops, in order."""
    return [n for n in graph.nodes() if n.op.name in ops]


def only_reader(graph: Graph, v: Value, *ops: str) -> Node | None:
    """The one node that reads a value which is no output, if it applies one of these ops."""
    users = {u for u, _ in v.uses}
    n = next(iter(users)) if len(users) == 1 and not graph.is_output(v) else None
    return n if n is not None and n.op.name in ops else None


def replace_each(graph: Graph, rules: Mapping[str, Callable[[Node], Value | None]]) -> bool:
    """Offer each node once to its op's rule, whose value replaces its result. Return whether any did."""
    changed = False
    for n in nodes_of(graph, *rules):
        made = rules[n.op.name](n)
        if made is not None:
            graph.replace_all_uses(n.output, made)
            graph.erase(n)
            changed = True
    return changed


def sweep(graph: Graph, dead: Iterable[Node], outputs: set[Value]) -> list[Node]:
    """Erase unneeded nodes and what only they needed. Return nodes that are now the only reader of a value."""
    alone: list[Node] = []
    stack = list(dead)
    while stack:
        n = stack.pop()
        if n.graph is not graph or not is_pure(n) or any(o.uses or o in outputs for o in n.outputs):
            continue
        graph.erase(n)
        for v in dict.fromkeys(n.inputs):
            if v is None:
                continue
            if v.uses:
                alone += [next(iter(v.uses))[0]] if len(v.uses) == 1 else []
            elif v.node is not None:
                stack.append(v.node)
            elif v in graph.constants and v not in outputs:
                graph.erase_constant(v)
    return alone
