"""Functions of array code as graphs, for transformations that rewrite them; and graphs as calls on lazy values again.

`record` runs a function once, with placeholders for some arrays of its arguments. What else it reads (arrays around it,
values of an outer trace) becomes an input of the graph, so a transformed function may stand inside of traces, loops and
other transformations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.array.core import Array, from_buffer
from dnnc.array.lazy import Call, Lazy, Untracked, apply_all, depends, leaf, placeholder, results
from dnnc.array.operators import NUMBERS
from dnnc.frontends.trace.control import values as control_values
from dnnc.frontends.trace.regions import Region
from dnnc.frontends.trace.tracer import located
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.lru import LRU
from dnnc.ir.ops import OPS
from dnnc.ir.types import TensorType
from dnnc.pytree import Rules, Tree, flatten

COMPOSITES = 256  # bodies that a composite keeps


@dataclass(frozen=True)
class Recorded:
    """A function as a graph. Its inputs are the placeholders' parts, then what it captured."""

    graph: Graph
    captured: tuple[Lazy, ...]
    tree: Tree  # of the results
    results: tuple[Array, ...]  # with values of the trace: for their dtypes and shapes
    paths: tuple[str, ...]

    def arrays(self, parts: Sequence[Lazy]) -> list[Array]:
        """The results with other values."""
        rest = iter(parts)
        return [Array([next(rest) for _ in a._parts], a.dtype) for a in self.results]


def stand_in(a: Array) -> Array:
    """An array of placeholders of the same type."""
    return Array([placeholder(p.type) for p in a._parts], a.dtype)


def record(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], inner: Sequence[Array], before: int
) -> Recorded:
    """Run a function whose arguments hold the placeholders `inner`, which were made after call number `before`."""
    leaves, tree = flatten(located(fn, args, kwargs), "", Rules(NUMBERS, any=True))
    made = [x if isinstance(x, Array) else from_buffer(np.array(x)) for _, x in leaves]
    parts = [p for a in inner for p in a._parts]
    name = getattr(fn, "__name__", "")
    title = name if name.isidentifier() else "function"
    region = Region(title, parts, [f"x{k}" for k in range(len(parts))], before)
    g = region.finish([p for a in made for p in a._parts])
    return Recorded(g, tuple(region.captured), tree, tuple(made), tuple(path for path, _ in leaves))


def number() -> int:
    """A number above those of all calls so far."""
    return next(Call.counted)


class Composite:
    """A function of arrays that is recorded as one call: for what each step computes and nobody differentiates.

    Its body is made once for all operands of the same types, and for the same `options`, which are numbers of Python.
    """

    def __init__(self, fn: Callable[..., Sequence[Array]]) -> None:
        self.fn = fn
        self.known: LRU[Any, tuple[Recorded, dict[str, Any], tuple[TensorType, ...], Any]] = LRU(COMPOSITES)

    def __call__(self, arrays: Sequence[Array], *options: float) -> Sequence[Array]:
        """`fn(*arrays, *options)` without a history. Within a trace it is traced."""
        parts: list[Lazy] = []
        words: list[Any] = [*options]
        for a in arrays:
            for p in a._parts:
                if p.traced:
                    return self.fn(*arrays, *options)
                parts.append(p)
                words += (p.type.dtype, p.type.shape)
        key = tuple(words)
        found = self.known.find(key)
        if found is None:
            before, inner = number(), [stand_in(a) for a in arrays]
            recorded = record(self.fn, (*inner, *options), {}, inner, before)
            body = recorded.graph
            types = tuple(v.type for v in body.outputs)
            found = self.known[key] = recorded, {"body": body}, types, ("call", body.structural_hash())
        recorded, attrs, types, structure = found
        call = Untracked(OPS["call"], (*parts, *recorded.captured), attrs, types, structure)
        return recorded.arrays(results(call))


# --- graphs as calls --------------------------------------------------------------------------------------------------


class Replay:
    """Lazy values of a graph's values. Nodes run when somebody asks for what they make, each once."""

    def __init__(self, graph: Graph, known: Mapping[Value, Lazy]) -> None:
        self.graph = graph
        self.known: dict[Value, Lazy] = dict(known)

    def values(self, wanted: Sequence[Value]) -> list[Lazy]:
        """The values, and those that they need, in the order of the graph."""
        needed: set[Node] = set()
        stack = list(wanted)
        while stack:
            v = stack.pop()
            if v in self.known:
                continue
            if v.node is None:
                self.known[v] = leaf(self.graph.constants[v], None)
            elif v.node not in needed:
                needed.add(v.node)
                stack += [i for i in v.node.inputs if i is not None]
        for n in self.graph.nodes() if needed else ():
            if n in needed:
                made = self.apply(n, [None if i is None else self.known[i] for i in n.inputs])
                self.known.update(zip(n.outputs, made))
        return [self.known[v] for v in wanted]

    def apply(self, n: Node, inputs: Sequence[Lazy | None]) -> Sequence[Lazy]:
        """The results of a node."""
        return applied(n, inputs)


def applied(n: Node, inputs: Sequence[Lazy | None]) -> Sequence[Lazy]:
    """The results of a node for lazy operands. However deep the calls lie, they stay one program."""
    if any(True for _ in n.subgraphs()):
        return control_values(n.op.name, inputs, **n.attrs)
    types = tuple(o.type for o in n.outputs)
    if any(0 in t.shape for t in types):
        return apply_all(n.op, *inputs, **n.attrs)
    call = Call(n.op, tuple(inputs), n.attrs, types)
    if n.attrs and not call.traced and depends(call):
        call.traced, call.device = True, None
    if call.traced:
        call.trace()
        call.locs = n.locs or call.locs
    return [Lazy(t, call, k) for k, t in enumerate(types)]
