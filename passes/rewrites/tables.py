"""Element-wise chains from bytes to bytes become tables of 256 bytes.

    quantize(mul(dequantize(x), sigmoid(dequantize(x))))    ->    recode(x, table=(...))

A chain reads one array of u8 with one scale, constants that are single numbers, and nothing else; quantized values
within it count as part of it. The table holds what the operators make of each code, one after the other in float32, so
all CPUs give the same codes. A table costs as much as a few multiplications, in the kernel that makes x as well.

It runs before quantization becomes arithmetic, and behind folding, which makes numbers of quantized constants. Strict
numerics keep the operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.ir.dtype import u8
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.op import Cost, Trait
from dnnc.ir.types import TensorType
from dnnc.passes.rewrite import sweep

Array = np.ndarray[Any, Any]
CODES = np.arange(256, dtype=np.uint8)
WORTH = 16  # simple operations of a chain from which on a table is faster on CPUs whose tables lie in memory as well
FUNCTION, QUANTIZE, DEQUANTIZE = 12, 5, 2  # what these take of them


@dataclass(frozen=True)
class Chain:
    """What a value is of codes: `table[source]`, by so many simple operations."""

    source: Value
    table: Array
    cost: int


def tables(graph: Graph) -> bool:
    """Replace the ends of all chains that are worth a table."""
    found: dict[Value, Chain] = {}
    results = set(graph.outputs)
    for n in graph.nodes():
        if len(n.outputs) == 1 and n.output.type.dtype is u8:
            chain = _chain(graph, n, found, results)
            if chain is not None:
                found[n.output] = chain
    worth = {v: c for v, c in found.items() if c.cost >= WORTH}
    for v, c in worth.items():
        assert v.node is not None
        b = Builder(graph, v.node, v.node.locs)
        graph.replace_all_uses(v, b.recode(c.source, table=tuple(c.table.tolist())))
    sweep(graph, [v.node for v in worth if v.node is not None], set(graph.outputs))
    return bool(worth)


def _chain(graph: Graph, end: Node, found: dict[Value, Chain], results: set[Value]) -> Chain | None:
    """The chain that ends in a node; None where it reads several arrays, or others than bytes."""
    nodes: list[Node] = []
    leaves: list[Value] = []
    if not _collect(graph, end, end, nodes, leaves):
        return None
    inner, within = {}, set(nodes)
    for v in leaves:
        chain = found.get(v)
        if chain is not None and v not in results and all(u in within for u, _ in v.uses):
            inner[v] = chain
    source = {inner[v].source if v in inner else v for v in leaves}
    if len(source) != 1:
        return None
    cost = sum(map(_cost, nodes)) + sum(c.cost for c in inner.values())
    given = {v: inner[v].table if v in inner else CODES for v in leaves}
    return Chain(source.pop(), _evaluate(graph, end, nodes, given), cost)


def _collect(graph: Graph, n: Node, end: Node, nodes: list[Node], leaves: list[Value]) -> bool:
    """Whether what a node computes is a chain; its nodes, operands first, and the bytes that it reads."""
    if n in nodes:
        return True
    same = len(n.outputs) == 1 and n.output.type.shape == end.output.type.shape
    if not same or Trait.ELEMENTWISE not in n.op.traits or not n.op.traits.isdisjoint((Trait.PLACED, Trait.RANDOM)):
        return False
    for v in n.inputs:
        if v is None or _is_number(graph, v):
            continue
        if v.type.dtype is u8 and v.type.shape == end.output.type.shape and v not in graph.constants:
            leaves += [] if v in leaves else [v]
        elif v.node is None or not _collect(graph, v.node, end, nodes, leaves):
            return False
    nodes.append(n)
    return True


def _is_number(graph: Graph, v: Value | None) -> bool:
    a = None if v is None else graph.constants.get(v)
    return a is not None and a.size == 1


def _cost(n: Node) -> int:
    """Simple operations of a node for each element."""
    named = {"quantize_linear": QUANTIZE, "dequantize_linear": DEQUANTIZE}
    return named.get(n.op.name) or (FUNCTION if n.op.cost > Cost.CHEAP else 1)


def _evaluate(graph: Graph, end: Node, nodes: list[Node], given: dict[Value, Array]) -> Array:
    """What nodes make of these codes, in float32."""
    g = Graph("table")
    b = Builder(g)
    of = {v: g.add_input(f"x{k}", TensorType(u8, CODES.shape)) for k, v in enumerate(given)}

    def operand(v: Value | None) -> Value | None:
        return v if v is None else of[v] if v in of else b.constant(graph.constants[v].reshape(()))

    for n in nodes:
        of[n.output] = b.node(n.op, [operand(v) for v in n.inputs], n.attrs).output
    g.outputs = [of[end.output]]
    (table,) = run(g, list(given.values()))
    return table
