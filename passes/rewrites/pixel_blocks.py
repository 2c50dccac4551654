"""Which images lie in vectors of neighbouring pixels: what sparse kernels read and write without a transposition.

    c = conv(x @ "0 2 3/16 1 3%16", w @ "sparse ..")      [images, rows, row / 16, channels, 16]

Sparse 1 x 1 convolutions read and write either order; element-wise ops keep what they get. So values that such ops tie
together have one order: this one, where the squares that need no transposition outweigh the products with lanes past
the ends of rows, and what others have to pack.
"""

from __future__ import annotations

from collections.abc import Mapping

from dnnc.ir.dtype import f32
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.op import ContractionForm, Trait
from dnnc.ir.sparse import Sparse
from dnnc.ir.types import TensorType

TURN = 4.0  # cycles to transpose a vector of a square
PACK = 12.0  # cycles to pack a vector: to transpose it, and to move it between caches twice
MOST_PADDED = 1.25  # lanes of vectors for each pixel of a row


def is_pointwise(n: Node) -> bool:
    """Is this a convolution by windows of one pixel, each of whose results is at its operand's place?"""
    x, w = n.inputs[:2]
    assert x is not None and w is not None
    ones, zeros = (*w.type.shape[2:], *(n.attrs["strides"] or ())), n.attrs["pads"] or ()
    return n.op.contraction is ContractionForm.CONVOLUTION and all(k == 1 for k in ones) and not any(zeros)


def fits(t: TensorType, lanes: int) -> bool:
    """Is this an image of known size whose rows fill vectors well?"""
    if t.rank < 3 or t.dtype is not f32 or not t.static:
        return False
    width = int(str(t.shape[-1]))
    return -(-width // lanes) * lanes <= MOST_PADDED * width


def choose(graph: Graph, lanes: int, sparse: Mapping[Node, Sparse]) -> set[Value]:
    """The values that lie in vectors of pixels.

    Args:
        graph: before layouts are set.
        lanes: of a vector of float32.
        sparse: the encodings of sparse weights by their convolution.
    """
    if not any(is_pointwise(n) for n in sparse):
        return set()
    return _Groups(graph, lanes, sparse).chosen()


class _Groups:
    """Values that have one order, and what it saves: cycles of each group."""

    def __init__(self, graph: Graph, lanes: int, sparse: Mapping[Node, Sparse]) -> None:
        self.graph, self.lanes, self.sparse = graph, lanes, sparse
        self.parent: dict[Value, Value] = {}
        self.saved: dict[Value, float] = {}  # by value
        self.barred: set[Value] = set()

    def chosen(self) -> set[Value]:
        for v in self.graph.inputs:
            self.packed(v)
        for n in self.graph.nodes():
            self.node(n)
        for v in self.graph.outputs:
            self.packed(v)
        gains: dict[Value, float] = {}
        for v, cycles in self.saved.items():
            gains[self.root(v)] = gains.get(self.root(v), 0.0) + cycles
        bad = {self.root(v) for v in self.barred}
        good = {r for r, cycles in gains.items() if cycles > 0 and r not in bad}
        return {v for v in (*self.parent, *self.saved) if self.root(v) in good}

    def root(self, v: Value) -> Value:
        while (up := self.parent.get(v, v)) is not v:
            v = up
        return v

    def node(self, n: Node) -> None:
        images = [v for v in n.inputs if v is not None]
        if n in self.sparse and is_pointwise(n):
            for v in (n.inputs[0], n.output):
                assert v is not None
                self.turned(v, self.sparse[n])
            if n.inputs[0] is not None and n.inputs[0].node is None:  # comes in rows, which cost nothing to turn
                self.packed(n.inputs[0], n.output)
            images = images[2:]  # a bias
        elif Trait.ELEMENTWISE in n.op.traits and len(n.outputs) == 1 and n.output.type.rank > 2:
            for v in images:
                if v.type.shape == n.output.type.shape:
                    self.tie(v, n.output)
            images = [v for v in images if v.type.shape != n.output.type.shape]
        else:
            images += n.outputs
        for v in images:
            self.packed(v)

    def tie(self, v: Value, other: Value) -> None:
        for x in (v, other):
            self.saved.setdefault(x, 0.0)
            if not fits(x.type, self.lanes):
                self.barred.add(x)
        self.parent[self.root(v)] = self.root(other)

    def turned(self, v: Value, weights: Sparse) -> None:
        """A sparse convolution reads or writes it: no squares, but products past the ends of rows (half for each)."""
        if not fits(v.type, self.lanes):
            self.barred.add(v)
            return
        channels, pixels, vectors = self.sizes(v)
        waste = vectors - -(-pixels // self.lanes)
        self.saved[v] = self.saved.get(v, 0.0) + TURN * channels * vectors - waste * weights.pattern.stored / 2

    def packed(self, v: Value, group: Value | None = None) -> None:
        """Another op reads or writes it. `group`: a value whose order makes it so; default: itself."""
        if v.type.rank > 2 and fits(v.type, self.lanes):
            channels, _, vectors = self.sizes(v)
            self.saved[group or v] = self.saved.get(group or v, 0.0) - PACK * channels * vectors

    def sizes(self, v: Value) -> tuple[int, int, int]:
        """Channels, pixels, and vectors of pixels."""
        n, channels, *rows, width = (int(str(d)) for d in v.type.shape)
        for k in rows:
            n *= k
        return channels, n * width, n * -(-width // self.lanes)
