"""Which values are numbers of rows: what reductions over the same axes of values of one shape make, and what is
computed of those numbers.

    x: f32[64, 100]                                      rows of shape [64, 100] along axis 1
    m: f32[64, 1] = reduce_mean(x, axes=(1,))            a number of each row
    s: f32[64, 1] = sqrt(add(m, 1e-5))                   too
    y = div(x, s)                                        elements, which read the number of their own row

In comes a graph whose layouts are set, out comes for each such value the kind of its rows. The fusion pass joins what
has rows of one kind: a kernel then passes over a row in registers or near cache, not over the whole array.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dnnc.ir.expr import const, value
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.op import Trait
from dnnc.ir.types import ROW_MAJOR, Dense, Dim, Encoding
from dnnc.passes.analysis.kinds import is_pointwise, is_view, kind_of

MANY = 8  # rows that keep a device busy, one or some by each thread or block of threads
BLOCKS = 4  # the same of blocks of rows that lie side by side, which a thread passes over together
SHORT = 1 << 14  # elements of a row that is worth no second kernel, however few there are


@dataclass(frozen=True)
class Rows:
    """The shape of what is reduced, and the axes along which: those of more than one element, in order. `encoding`: how
    its elements lie.
    """

    shape: tuple[Dim, ...]
    axes: tuple[int, ...]
    encoding: Encoding = ROW_MAJOR

    def of_elements(self, v: Value) -> bool:
        """Are the elements of a value those of the rows, one for one?"""
        return v.type.encoding == self.encoding and tuple(v.type.shape) == self.shape

    def reads_own(self, v: Value) -> bool:
        """Does an element-wise node over the rows read in a value, which broadcasts, the number of its own row?"""
        shape, ahead = v.type.shape, len(self.shape) - v.type.rank
        if not v.type.row_major or ahead < 0 or any(k not in self.axes and self.shape[k] != 1 for k in range(ahead)):
            return False
        return all(d == (1 if k in self.axes else self.shape[k]) for k, d in enumerate(shape, ahead))

    @property
    def numbers(self) -> tuple[Dim, ...]:
        """The shape of the numbers without axes of one element, of which each node may have others."""
        return tuple(d for k, d in enumerate(self.shape) if k not in self.axes and d != 1)

    def worth(self) -> bool:
        """Is one kernel faster than one for each reduction?

        Few long rows are better taken apart: blocks of threads cannot meet, so each row is the work of one block, and
            on a CPU of one thread,
        while what is not reduced can be spread over all. Where a long row's sums themselves are taken apart
        (`split_reduce`), nothing is left to join. Sizes that are not known count as many rows.
        """
        rows, length = (
            _product(d for k, d in enumerate(self.shape) if (k in self.axes) == reduced) for reduced in (False, True)
        )
        last = self.encoding.layout.parts[-1] if isinstance(self.encoding, Dense) and self.encoding.layout else None
        if last is None or not last.mod or last.axis in self.axes:
            return rows is None or rows >= MANY or (length is not None and length <= SHORT)
        side = last.mod  # rows side by side
        return rows is None or rows >= BLOCKS * side or (length is not None and length * side <= SHORT)

    def lie_in_one_piece(self) -> bool:
        """May a row be kept in a thread's own memory, so that nothing of it need be computed twice?"""
        length = _product(self.shape[k] for k in self.axes)
        return (
            self.encoding == ROW_MAJOR
            and self.axes == tuple(range(len(self.shape) - len(self.axes), len(self.shape)))
            and length is not None
            and length <= SHORT
        )


def rows_of(n: Node) -> Rows | None:
    """Return the rows that a node reduces to numbers (reduce_sum) or elements (softmax); None otherwise."""
    x = n.inputs[0] if n.inputs else None
    if (
        x is None
        or kind_of(n) != "reduction"
        or n.op.reduced is None
        or not isinstance(x.type.encoding, Dense)
        or len(n.outputs) != 1
        or n.output.type.encoding not in (ROW_MAJOR, x.type.encoding)
    ):
        return None
    long = tuple(k for k in n.op.reduced(x.type.rank, **n.attrs) if x.type.shape[k] != 1)
    return Rows(tuple(x.type.shape), long, x.type.encoding) if long else None


def find_numbers(graph: Graph) -> Mapping[Value, Rows]:
    """The values that are numbers of rows. What is made of those of several kinds of rows is none."""
    found: dict[Value, Rows] = {}
    for n in graph.nodes():
        rows = rows_of(n)
        if rows is not None:
            if not rows.of_elements(n.output):
                found[n.output] = rows
            continue
        kinds = {found[v] for v in n.inputs if v is not None and v in found and _same_elements(v, n)}
        if len(kinds) == 1 and len(n.outputs) == 1 and n.output.type.row_major:
            found[n.output] = kinds.pop()
    return found


def chain(n: Node, numbers: Mapping[Value, Rows]) -> list[Node]:
    """A node, and those that make the numbers of rows that it makes others of, back to the reductions."""
    out, rows = [n], numbers.get(n.output)
    for m in out:
        if rows is not None and rows_of(m) is None:
            out += dict.fromkeys(
                v.node
                for v in m.inputs
                if v is not None and v.node is not None and v.node not in out and numbers.get(v) == rows
            )
    return out


def is_reduced(n: Node, inside: Collection[Node]) -> bool:
    """Does a reduction of some nodes read, perhaps by way of others of them, what n makes?"""
    todo = {u for u, _ in n.output.uses}
    while todo:
        u = todo.pop()
        if Trait.REDUCTION in u.op.traits:
            return True
        todo |= {w for v in u.outputs for w, _ in v.uses if w in inside}
    return False


def _same_elements(v: Value, n: Node) -> bool:
    """Is each element that a node makes one of v's, or made of it? Axes of one element may come and go."""
    if is_pointwise(n):
        return tuple(v.type.shape) == tuple(n.outputs[0].type.shape)
    return is_view(n) and _long(v.type.shape) == _long(n.output.type.shape)


def _long(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    return tuple(d for d in shape if d != 1)


def _product(dims: object) -> int | None:
    n = const(1)
    for d in dims:  # type: ignore[attr-defined]
        n = n * d
    return value(n)
