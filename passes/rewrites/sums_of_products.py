"""A sum of products with short inner axes is one product with a long one: a weight that is used many times has such a
gradient, for each step of an unrolled recurrent net or each call of a shared layer.

    add(add(matmul(transpose(g0), x0), matmul(transpose(g1), x1)), matmul(transpose(g2), x2))
        ->   matmul(transpose(concat(g0, g1, g2, axis=0)), concat(x0, x1, x2, axis=0))

With M x N results and inner axes of K, each product but the first reads and writes M * N sums; joined operands are
(M + N) * K elements, which often need no copy (`place_concats`). Operands live until the product that joins them, so a
long sum is cut where the inner axis reaches LONGEST.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.passes.base import PassContext
from dnnc.passes.rewrite import nodes_of, only_reader, producer

LONGEST = 1024  # the inner axis of a product; longer ones gain nothing


def sums_of_products(graph: Graph, ctx: PassContext) -> bool:
    """Join products whose sum is all that is read of them; returns whether anything changed."""
    if ctx.strict:  # terms are added in another order
        return False
    changed = False
    for top in nodes_of(graph, "add"):
        alive = bool(top.output.uses) or graph.is_output(top.output)
        if alive and not _is_term(graph, top.output):
            changed |= _join(graph, top)
    return changed


def _is_term(graph: Graph, v: Value) -> bool:
    """Is a value read once, by an addition of values of its type?"""
    reader = only_reader(graph, v, "add")
    return reader is not None and len(v.uses) == 1 and reader.output.type == v.type


def _join(graph: Graph, top: Node) -> bool:
    terms = list(_terms(graph, top))
    products = [n for v in terms if (n := _thin(graph, v)) is not None]
    runs = [run for run in _runs(products) if len(run) > 1]
    if not runs:
        return False
    b = Builder(graph, top, top.locs)
    joined = {n.output for run in runs for n in run}
    values = [v for v in terms if v not in joined] + [_product(b, run) for run in runs]
    total = values[0]
    for v in values[1:]:
        total = b.op("add", total, v)
    graph.replace_all_uses(top.output, total)
    return True


def _terms(graph: Graph, n: Node) -> Iterator[Value]:
    """The terms of a sum, in the order in which they are added."""
    stack = [n.output]
    while stack:
        v = stack.pop()
        adds = producer(v, "add")
        if adds is None or not (v is n.output or _is_term(graph, v)):
            yield v
            continue
        a, c = adds.inputs
        assert a is not None and c is not None
        stack += [c, a]


def _thin(graph: Graph, v: Value) -> Node | None:
    """A product of matrices that the sum alone reads, and that moves more sums than operands.

    Constant factors are packed once as they are; joined ones would be packed in each call.
    """
    n = producer(v, "matmul")
    if n is None or v.type.rank != 2 or not v.type.dtype.is_float or not _is_term(graph, v):
        return None
    sources = [t.inputs[0] if (t := producer(x, "transpose")) is not None else x for x in n.inputs]
    if any(x in graph.constants or x in graph.parameters for x in sources):
        return None
    (m, k), (_, columns) = (x.type.shape for x in n.inputs if x is not None)
    if not all(isinstance(d, int) for d in (m, k, columns)):
        return None
    return n if k * (m + columns) <= m * columns else None


def _runs(products: Sequence[Node]) -> Iterator[list[Node]]:
    """Neighbouring products of equal types, as long together as one product may be."""
    run: list[Node] = []
    length = 0
    for n in products:
        a = n.inputs[0]
        inner = a.type.shape[1] if a is not None else 0
        assert isinstance(inner, int)
        if run and (n.output.type != run[0].output.type or length + inner > LONGEST):
            yield run
            run, length = [], 0
        run.append(n)
        length += inner
    if run:
        yield run


def _product(b: Builder, run: Sequence[Node]) -> Value:
    left, right = zip(*(n.inputs for n in run))
    turned = [producer(a, "transpose") for a in left]
    if all(turned):
        rows = b.op("concat", *(t.inputs[0] for t in turned if t is not None), axis=0)
        joined: Value = b.op("transpose", rows, perm=(1, 0))
    else:
        joined = b.op("concat", *left, axis=1)
    made: Value = b.op("matmul", joined, b.op("concat", *right, axis=0))
    return made
