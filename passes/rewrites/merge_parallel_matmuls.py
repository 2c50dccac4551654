"""One kernel for a transformer's queries, keys and values as parts of its result, without copies.

Products of one matrix with several constant ones (or parameters) become one product:

    q = transpose(reshape(add(matmul(x, wq), bq), [B, S, H, D]), (0, 2, 1, 3)), k and v likewise
        ->   t = transpose(reshape(add(matmul(x, [wq wk wv]), [bq bk bv]), [B, S, 3, H, D]), (2, 0, 1, 3 + ...)),  q =
             t[0], k = t[1], v = t[2]

and so do the columns of one product that is cut into equal parts:

    y = add(matmul(x, w), b),  q = transpose(reshape(y[..., :H * D], [B, S, H, D]), (0, 2, 1, 3)), k and v likewise
        ->   t = transpose(reshape(y, [B, S, 3, H, D]), (2, 0, 1, 3 + ...)),  q = t[0], k = t[1], v = t[2]

Between a product and its reshape may stand sums and products with numbers of columns, and casts: a bias, the scales of
integers.

The parts are slices along the outermost axis of one value, places in its memory. Chains must have no other readers;
sizes must be known, since a place in memory needs an offset. Products need equal chains; other columns keep theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dnnc.ir.graph import Graph, Node, Value, union
from dnnc.ir.graph.attributes import attrs_key
from dnnc.ir.graph.builder import Builder
from dnnc.ir.op import Trait
from dnnc.ir.types import Dim
from dnnc.passes.base import PassContext
from dnnc.passes.planning.prologue import derive
from dnnc.passes.rewrite import nodes_of, only_reader, producer

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Apart:
    """Return a value's dims split and transposed by its only readers: `lead` before, `perm` of all, `end` last."""

    lead: Shape
    shape: Shape
    perm: Shape
    end: Value


@dataclass(frozen=True)
class Chain:
    """A product and what follows it: nodes whose other operand, if there is one, is a number or one for each column."""

    product: Node
    steps: tuple[Node, ...]
    numbers: tuple[Value | None, ...]
    apart: Apart

    @property
    def form(self) -> tuple[Any, ...]:
        """What chains have in common when they may become one."""
        w = self.product.inputs[1]
        assert w is not None
        kinds = (None if v is None else v.type.dtype for v in self.numbers)
        made = tuple((n.op.name, attrs_key(n), n.output.type.dtype) for n in (self.product, *self.steps))
        return w.type, made, tuple(kinds), self.apart.lead, self.apart.shape, self.apart.perm


def siblings(graph: Graph, ctx: PassContext) -> bool:
    """Merge products that share an operand wherever chains match; then reorder equal column parts."""
    changed = not ctx.strict and _merge_products(
        graph
    )  # sums that were apart are in one kernel, which may add in another order
    cuts: dict[Value, list[Node]] = {}
    for n in nodes_of(graph, "slice"):
        if n.inputs[0] is not None:
            cuts.setdefault(n.inputs[0], []).append(n)
    return any([_stack_columns(graph, y, found) for y, found in cuts.items()]) or changed


def _merge_products(graph: Graph) -> bool:
    changed = False
    readers: dict[Value, list[Chain]] = {}
    for n in nodes_of(graph, "matmul"):
        chain = _chain(graph, n)
        if chain is not None and n.inputs[0] is not None:
            readers.setdefault(n.inputs[0], []).append(chain)
    for chains in readers.values():
        for form in dict.fromkeys(c.form for c in chains):
            alike = [c for c in chains if c.form == form]
            if len(alike) > 1:
                _merge(graph, alike)
                changed = True
    return changed


def _sizes(v: Value) -> Shape:
    """The dims of a value of known size."""
    return tuple(int(d) for d in v.type.shape)  # type: ignore[arg-type]


def _taken_apart(graph: Graph, v: Value, axis: int) -> Apart | None:
    """Return the reshape after a value of known size if it does not mix dims from `axis` on with earlier ones."""
    reshape = only_reader(graph, v, "reshape")
    if reshape is None or not reshape.output.type.static:
        return None
    end = reshape.output
    dims, before = _sizes(end), _sizes(v)
    front, behind = math.prod(before[:axis]), math.prod(before[axis:])
    found = [k for k in range(len(dims)) if math.prod(dims[:k]) == front and math.prod(dims[k:]) == behind]
    if not found:
        return None
    k = found[-1]
    perm: Shape = tuple(range(len(dims)))
    turned = only_reader(graph, end, "transpose")
    if turned is not None:
        end, perm = turned.output, tuple(turned.attrs["perm"])
    return Apart(dims[:k], dims[k:], perm, end)


def _stacked(b: Builder, graph: Graph, y: Value, parts: Sequence[Apart]) -> None:
    """Put the equal parts of y's columns, which are taken apart alike, where the ends of these chains are."""
    a = parts[0]
    k = len(a.lead)
    apart = b.reshape(y, shape=(*a.lead, len(parts), *a.shape))
    stacked = b.transpose(apart, perm=(k, *(p if p < k else p + 1 for p in a.perm)))
    for i, part in enumerate(parts):
        shape = part.end.type.shape
        cut = b.slice(stacked, starts=(i, *(0 for _ in shape)), steps=(1,) * (len(shape) + 1), shape=(1, *shape))
        graph.replace_all_uses(part.end, b.reshape(cut, shape=shape))


def _erase(graph: Graph, end: Value, first: Node) -> None:
    """Remove the nodes of a chain, last first."""
    n: Node | None = end.node
    while n is not None:
        before = None if n is first else next(v.node for v in n.inputs if v is not None and v.node is not None)
        graph.erase(n)
        n = before


# --- products ---------------------------------------------------------------------------------------------------------


def _chain(graph: Graph, n: Node) -> Chain | None:
    """The chain that begins with a product of a value and a constant matrix; None where it has another form."""
    x, w = n.inputs[0], n.inputs[1]
    assert x is not None and w is not None
    if (
        not graph.variance(w).call_invariant
        or w.type.rank != 2
        or x.type.rank < 2
        or not n.output.type.static
        or not n.output.type.row_major
    ):
        return None
    end, steps, numbers = n.output, [], []
    while (step := _step(graph, end, w.type.shape[1:])) is not None:
        steps.append(step[0])
        numbers.append(step[1])
        end = step[0].output
    apart = _taken_apart(graph, end, end.type.rank - 1)
    return (
        None if apart is None or graph.is_output(apart.end) else Chain(n, tuple(steps), tuple(numbers), apart)
    )  # which the product itself writes


def _step(graph: Graph, v: Value, columns: Sequence[Dim]) -> tuple[Node, Value | None] | None:
    """The only reader of a value, where it computes with numbers of its columns, and those."""
    n = only_reader(graph, v, "add", "mul", "cast")
    if n is None or n.output.type.shape != v.type.shape:
        return None
    others = [x for x in n.inputs if x is not None and x is not v]
    if Trait.CONVERSION in n.op.traits:
        return n, None
    fits = len(others) == 1 and graph.variance(others[0]).call_invariant and others[0].type.shape in (columns, ())
    return (n, others[0]) if fits else None


def _merge(graph: Graph, chains: list[Chain]) -> None:
    first = chains[0].product
    x = first.inputs[0]
    assert x is not None
    locs = first.locs
    for c in chains[1:]:
        locs = union(locs, c.product.locs)
    b = Builder(graph, first, locs)
    w = [c.product.inputs[1] for c in chains]
    y = b.matmul(x, _joined(graph, first, w, 1), **first.attrs)
    columns = w[0].type.shape[1:]  # type: ignore[union-attr]
    for n, *numbers in zip(chains[0].steps, *(c.numbers for c in chains)):
        more = [] if numbers[0] is None else [_joined(graph, first, numbers, 0, columns)]
        y = b.op(n.op, y, *more, **n.attrs)
    _stacked(b, graph, y, [c.apart for c in chains])
    for c in chains:
        _erase(graph, c.apart.end, c.product)


def _joined(graph: Graph, n: Node, parts: Sequence[Value | None], axis: int, columns: Sequence[Dim] = ()) -> Value:
    """Matrices or numbers of columns side by side as one; a single number is that of so many columns."""
    values = [v for v in parts if v is not None]

    def side_by_side(b: Builder, *x: Value) -> Value:
        wide = (v if v.type.shape else b.expand(v, shape=columns) for v in x)
        joined: Value = b.concat(*wide, axis=axis)
        return joined

    return derive(graph, values, side_by_side, values[0].name, n)


# --- columns of one product -------------------------------------------------------------------------------------------


def _stack_columns(graph: Graph, y: Value, cuts: list[Node]) -> bool:
    """Make the parts into which a product's columns are cut contiguous. `cuts`: the slices of y, in order."""
    if (
        not _is_product(graph, y)
        or {u for u, _ in y.uses} != set(cuts)
        or graph.is_output(y)
        or not y.type.static
        or not y.type.row_major
    ):
        return False
    *lead, columns = _sizes(y)
    count, axis = len(cuts), len(lead)
    if count < 2 or columns % count or math.prod(lead) == 1:  # columns of one row are places as they are
        return False
    size = columns // count
    places = {(*(0 for _ in lead), k * size) for k in range(count)}
    equal = all(
        n.output.type.static and _sizes(n.output) == (*lead, size) and set(n.attrs["steps"]) == {1} for n in cuts
    )
    if not equal or {tuple(n.attrs["starts"]) for n in cuts} != places:
        return False
    ordered = sorted(cuts, key=lambda n: int(n.attrs["starts"][axis]))
    parts = [a for n in ordered if (a := _taken_apart(graph, n.output, axis)) is not None]
    if len(parts) < count:
        return False  # what is computed of columns reads them where they are
    if len({(a.lead, a.shape, a.perm) for a in parts}) > 1:
        parts = [Apart(tuple(lead), (size,), tuple(range(axis + 1)), n.output) for n in ordered]
    _stacked(Builder(graph, cuts[0], cuts[0].locs), graph, y, parts)
    for n, a in zip(ordered, parts):
        _erase(graph, a.end, n)
    return True


def _is_product(graph: Graph, y: Value) -> bool:
    """Is a value made by a product, to which something may be added?"""
    add = producer(y, "add")
    if add is not None:
        y = next(
            (v for v in add.inputs if v is not None and v.node is not None and only_reader(graph, v, "add") is add), y
        )
    return producer(y, "matmul") is not None
