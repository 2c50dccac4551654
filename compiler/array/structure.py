"""What lazy values are computed from: in words, equal for what one program computes, and as a graph."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dnnc.ir.expr import var
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.op import OpDef, Trait
from dnnc.ir.types import TensorType

if TYPE_CHECKING:
    from dnnc.array.lazy import Call, Lazy, Step

FLAT_SIZE = 1 << 18  # elements up to which one program serves all sizes; beyond, knowing the size is worth a program
END = -2  # in a structure, ahead of its results; an operand that is absent is -1
MOST = (1 << 31) - 1  # the largest size of an axis that a program does not know
TYPE = attrgetter("type")
TRACKED, ROOT = 1, 2  # of values: they have a history; it begins with them


@cache
def is_flat(op: OpDef) -> bool:
    """True if it computes each element of the others, whatever their rank. Custom ops may know their rank."""
    return Trait.ELEMENTWISE in op.traits and Trait.CUSTOM not in op.traits


class Reached:
    """Collect calls behind values with result numbers; leaves; met ones; `key`: calls in words; what runs along."""

    __slots__ = ("along", "calls", "count", "key", "leaves", "met", "steps")

    def __init__(self, roots: Sequence[Lazy]) -> None:
        self.calls: dict[Call, int] = {}
        self.leaves: dict[Lazy, int] = {}
        self.met: dict[Lazy, None] = {}
        self.key: list[Any] = []
        self.count = 0  # of results
        self.along: list[weakref.ref[Lazy]] = []
        self.steps: dict[Step, bool] = {}  # that values met belong to; True: an earlier step has written one
        self.reach(roots)

    def reach(self, roots: Sequence[Lazy]) -> None:
        """Go on from further values."""
        calls, leaves, met, key, steps = self.calls, self.leaves, self.met, self.key, self.steps
        stack: list[Call] = []
        for x in reversed(roots):
            if x.call is None:
                leaves.setdefault(x, len(leaves))
            else:
                stack.append(x.call)
                met[x] = None
                if x.step is not None:
                    self.enter(x.step, x)
        while stack:
            call = stack[-1]
            if call in calls:
                stack.pop()
                continue
            before = len(stack)
            words = [call.key]
            for i in call.inputs:
                if i is None:
                    words.append(-1)
                    continue
                c = i.call
                if c is None:
                    words.append(-2 - leaves.setdefault(i, len(leaves)))
                    continue
                met[i] = None
                if i.step is not None and (i.step not in steps or i.tracked == ROOT):
                    self.enter(i.step, i)
                number = calls.get(c)
                if number is None:
                    stack.append(c)
                else:
                    words.append(number + i.index)
            if len(stack) == before and call not in calls:  # which the history of a step may have brought
                stack.pop()
                calls[call] = self.count
                self.count += len(call.types)
                key += words
                if call.along:
                    self.along += call.along

    def enter(self, step: Step, x: Lazy) -> None:
        """Note the step of a value. What was computed up to its loss is taken as a whole, as `backward` met it.

        Operands of that which are no part of it, such as a detached value, may be computed of it: they come behind.
        """
        known = self.steps.get(step)
        if not known:
            self.steps[step] = x.tracked == ROOT
        h = step.history
        if known is not None or h is None or not h.pending() or not self.calls.keys().isdisjoint(h.calls):
            return
        leaves, calls, first = self.leaves, self.calls, self.count
        calls.update({call: first + k for call, k in h.calls.items()} if first else h.calls)
        self.count += h.count
        self.reach([leaf for leaf in h.leaves if leaf.call is not None])
        self.key.append(h.digest)
        self.key += [
            -2 - leaves.setdefault(x, len(leaves)) if x.call is None else calls[x.call] + x.index for x in h.leaves
        ]
        self.met.update(dict.fromkeys(h.made.values()))
        for made in [x for x in h.made.values() if x.step is not None and x.step is not step]:
            self.enter(made.step, made)
        self.along += h.along

    def structure(self, outputs: Sequence[Lazy], flat: bool = False) -> Any:
        """Equal for what one program computes. `flat`: whatever the shape of its arrays."""
        leaves, calls = self.leaves, self.calls
        given = [(t.dtype.name, bool(t.shape) if flat else t.shape) for t in map(TYPE, leaves)]
        # the mark is for ops of any number of operands
        return (
            *self.key,
            END,
            *(-2 - leaves[x] if x.call is None else calls[x.call] + x.index for x in outputs),
            *given,
        )


def flat_shape(
    calls: Iterable[Call], leaves: Iterable[Lazy], outputs: Sequence[Lazy], most: int = FLAT_SIZE
) -> tuple[int, ...] | None:
    """Return one shape for all arrays of an element-wise expression where a program for vectors of any size serves."""
    shape = outputs[0].type.shape
    if not shape or not 0 < math.prod(shape) <= most:
        return None
    for x in outputs:
        if x.type.shape != shape:
            return None
    found = False
    for x in leaves:
        if x.type.shape == shape:
            found = True
        elif x.type.shape:
            return None
    for c in calls:
        if not is_flat(c.op) and not (c.op.name == "full" and not c.types[0].shape):
            return None
        for t in c.types:
            if t.shape and t.shape != shape:
                return None
    return shape if found else None  # type: ignore[return-value]


def open_types(reached: Reached, outputs: Sequence[Lazy]) -> list[TensorType] | None:
    """The types of the leaves with names for the sizes that a program need not know: of one op that has such sizes."""
    (call, *more) = reached.calls
    names = call.op.open_sizes
    if more or not names or [*call.inputs] != [*reached.leaves] or len(names) != len(call.inputs) or len(outputs) > 1:
        return None
    shapes = [x.type.shape for x in reached.leaves]
    if any(not all(0 < d <= MOST for d in s) for s in shapes):
        return None
    return [
        TensorType(x.type.dtype, tuple(d if n is None else var(n, lo=1, hi=MOST) for n, d in zip(axes, x.type.shape)))
        for axes, x in zip(names, reached.leaves)
    ]


def _operands_first(calls: Iterable[Call]) -> Iterator[Call]:
    """The same calls, each behind those that compute its operands."""
    done: set[Call] = set()
    for last in calls:
        stack = [last]
        while stack:
            call = stack[-1]
            waiting = [] if call in done else [x.call for x in call.inputs if x and x.call and x.call not in done]
            if not waiting:
                stack.pop()
                if call not in done:
                    done.add(call)
                    yield call
            stack += waiting


def graph_of_call(call: Call, types: Sequence[TensorType]) -> Graph:
    """The graph of one call on inputs of these types."""
    g = Graph("expression")
    made = Builder(g).op(call.op, *(g.add_input(f"x{k}", t) for k, t in enumerate(types)), **call.attrs)
    g.outputs = [made]
    return g


def graph_of(
    outputs: Sequence[Lazy], inputs: Sequence[Lazy] = (), name: str = "expression", flat: bool = False
) -> tuple[Graph, list[Lazy]]:
    """A graph that computes values.

    Args:
        outputs: what it gives.
        inputs: placeholders or buffers that are its first inputs, in this order; what else it reads becomes further
            inputs.
        name: of the graph.
        flat: are arrays with axes to be vectors of one symbolic size?

    Returns:
        The graph, and the values that its inputs stand for.
    """
    reached = Reached(outputs)
    order = [*inputs, *(x for x in reached.leaves if all(x is not i for i in inputs))]
    g = Graph(name)
    size = var("N", lo=1)

    def type_(t: TensorType) -> TensorType:
        return TensorType(t.dtype, (size,)) if flat and t.shape else t

    known: dict[Any, Value] = {id(x): g.add_input(f"x{k}", type_(x.type)) for k, x in enumerate(order)}

    def value(x: Lazy | None) -> Value | None:
        return None if x is None else known[id(x)] if x.call is None else known[id(x.call), x.index]

    for c in _operands_first(reached.calls):
        node = g.append(Node(c.op, [value(x) for x in c.inputs], dict(c.attrs), [type_(t) for t in c.types], c.locs))
        for k, made in enumerate(node.outputs):
            known[id(c), k] = made
    g.outputs = [v for x in outputs if (v := value(x)) is not None]
    return g, order
