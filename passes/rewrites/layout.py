"""Choose how values lie in memory: channels of images and panels of weights in blocks of the vector width.

    y = conv(x, w)        ->   y @ "0 1/16 2 3 1%16" = conv(x @ "0 1/16 2 3 1%16", w @ "0/16 1/16 2 3 1%16 0%16")
    conv(x, w, group=4)   ->   the same by panels of a block of outputs each, which read the inputs of all groups that
                               they have outputs of
    y = matmul(a, b)      ->   y = matmul(a, b @ "1/16 0 1%16")       but for the few rows that would read what is
                                                                      packed at run time

Convolutions make blocked outputs, element-wise ops and pooling pass a block on, everything else works on row-major
values; `pack` nodes stand at the borders, one for each value and layout. Constants are relabelled: their bytes are
packed when linked, parameters' when bound. Type rules see logical shapes. Padding lanes of a blocked axis hold 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from dnnc.ir.dtype import f32, i32
from dnnc.ir.encodings import QUAD, WORD
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.op import ContractionForm, Trait
from dnnc.ir.ops.conv import Panels, panels_of
from dnnc.ir.sparse import Sparse
from dnnc.ir.target import WIDE_CORE, CoreRates
from dnnc.ir.types import ROW_MAJOR, Dense, Encoding, Part, TensorType, dense, product
from dnnc.passes.planning.prologue import derive
from dnnc.passes.rewrite import producer
from dnnc.passes.rewrites.orders import (
    added_up,
    blocked,
    filters,
    of_channels,
    panels,
    pixel_blocks,
    quad_filters,
    quad_panels,
    winograd_filters,
    word_panels,
    word_rows,
)
from dnnc.passes.rewrites.pad_images import row_of_channels, takes_tiles
from dnnc.passes.rewrites.pixel_blocks import choose, is_pointwise
from dnnc.passes.rewrites.sparse import MOST_CODE, SparseWeights
from dnnc.passes.rewrites.sparse import is_pointwise as is_pointwise_in_rows
from dnnc.passes.rewrites.stored_weights import decodes, is_decoded, own_decoder
from dnnc.passes.rewrites.winograd import winograd_tile

WIDE = (f32, i32)  # types whose vectors have as many lanes as a block
SHUFFLE = (
    2  # products that a shuffle takes the time of: it occupies a port of theirs, and its result a register of a tile
)
GAIN = 1.1  # over products with zeros that shuffles must promise
MOST_SHUFFLED = 4  # panels whose lanes come out of one block: as many times the registers are needed
FEW_ROWS = 16  # of a product: two tiles, which read a matrix no slower as it lies than it takes to write it in panels
MOST_UNROLLED = 64  # inputs of a group times taps of a row, which are code for each pixel of a tile
LEAST_POOLED = 4  # channels of a block, others being zeros, that a window is computed for in the time of one number
LARGER = 2  # than the image it is made of is one that is not packed itself
LARGE_WINDOW = 128  # taps: sums of long rows are vectors where they lie


def assign_layouts(
    graph: Graph,
    lanes: int,
    strict: bool = False,
    rates: CoreRates = WIDE_CORE,
    fixed: Mapping[Value, float] = MappingProxyType({}),
    note: Callable[[str], None] | None = None,
    code: bool = False,
    l2: int = 1 << 20,
) -> bool:
    """Set the layouts of all values, and return whether anything changed.

    Args:
        graph: changed in place.
        lanes: float32 elements of the target's vector register.
        strict: nothing changes what an infinity or NaN spreads to: no Winograd, no products with zeros of other groups.
        rates: of a core of the target.
        fixed: values that are the same in as many iterations of a loop, in front of which they are packed.
        note: called with what a user should know of weights with zeros.
        code: can sparse weights be straight-line code?
        l2: bytes of a core's second-level cache.
    """
    sparse = SparseWeights(graph, lanes, rates, strict, MOST_CODE if code else 0, l2, note)
    return _Blocked(graph, lanes, strict, fixed, sparse).run()


class Layouts(ABC):
    """Walks a graph once: convolutions and products choose layouts, others follow, `pack` nodes in between."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made: dict[tuple[Value, Encoding], Value] = {}
        self.changed = False

    def run(self) -> bool:
        for n in self.graph.nodes():
            self.visit(n)
        for k, v in enumerate(self.graph.outputs):
            if not v.type.row_major:
                self.graph.outputs[k] = self.relaid(v, ROW_MAJOR)
        return self.changed

    def visit(self, n: Node) -> None:
        rule = RULES.get(n.op.name)
        if rule is not None:
            rule(self, n)
        elif self.keeps(n) or self.pools(n):
            self.keep(n)
        elif not self.reads_blocks(n):
            self.plain(n)

    # --- rules per op: a subclass's -----------------------------------------------------------------------------------

    @abstractmethod
    def conv(self, n: Node) -> None:
        """Choose for a convolution, its operands and its result."""

    @abstractmethod
    def matmul(self, n: Node) -> None:
        """Choose for a product of matrices."""

    def coded(self, n: Node) -> None:
        """Choose for the codes of stored weights, before a reader asks for another order."""
        self.plain(n)

    def backward_filter(self, n: Node) -> None:
        """Choose for the filters' gradient of a convolution."""
        self.plain(n)

    @abstractmethod
    def pools(self, n: Node) -> bool:
        """Is this a window over rows that is better computed in a layout? Then its operand is packed."""

    @abstractmethod
    def joins(self, n: Node) -> bool:
        """Can this concatenation be made of its operands as they lie?"""

    @abstractmethod
    def within_channels(self, n: Node) -> bool:
        """Is this a resampling, a crop or a border that can be made of its operand as it lies?"""

    def turn_filters(self, n: Node) -> None:
        """Choose for filters that are turned."""
        self.plain(n)

    # --- what follows its operands ------------------------------------------------------------------------------------

    def keeps(self, n: Node) -> bool:
        """Ops that work on blocks as on rows: same shape in and out, or a window per channel."""
        if n.op.name == "concat":
            return self.joins(n)
        if Trait.CHANNELWISE in n.op.traits or self.within_channels(n):
            return self.is_blocked(n)
        if self.normalizes(n):
            return True
        if Trait.ELEMENTWISE not in n.op.traits or len(n.outputs) != 1:
            return False
        return any(v is not None and not v.type.row_major and v.type.shape == n.output.type.shape for v in n.inputs)

    @staticmethod
    def is_blocked(n: Node) -> bool:
        """Does the first operand have a layout?"""
        return n.inputs[0] is not None and not n.inputs[0].type.row_major

    def keep(self, n: Node) -> None:
        out = n.output.type
        images = Trait.ELEMENTWISE not in n.op.traits  # of sizes that differ from the output's
        blocks = [
            v.type.encoding
            for v in n.inputs
            if v is not None and not v.type.row_major and (images or v.type.shape == out.shape)
        ]
        lay = self.order_of(n, blocks)
        for k, v in enumerate(n.inputs):
            if v is None:
                continue
            if v.type.shape == out.shape or (images and v.type.rank == out.rank):
                self.set_input(n, k, lay)
            elif self.graph.variance(v).call_invariant and (numbers := of_channels(v.type, out.rank, lay)):
                self.set_input(n, k, numbers)
            elif not v.type.row_major:  # a broadcast operand that is an image of its own
                self.set_input(n, k, ROW_MAJOR)
        self.set_output(n, lay)

    def order_of(self, n: Node, blocks: Sequence[Encoding]) -> Encoding:
        """The layout of a node that keeps one of its operands'."""
        return blocks[0]

    def across(self, n: Node) -> None:
        """A window over channels crosses blocks: compute it unpacked, between two `pack` nodes."""
        x = n.inputs[0]
        if x is None or x.type.row_major:
            return
        uses, lay = list(n.output.uses), x.type.encoding
        self.set_input(n, 0, ROW_MAJOR)
        packed = self.relaid(n.output, lay)
        for u, k in uses:
            u.set_input(k, packed)

    def reads_blocks(self, n: Node) -> bool:
        """A reduction of images' spatial axes, or of all but the axis of the innermost block, reads a block in
        memory order: vectors of channels, or of filters.
        """
        return Trait.ACCUMULATES in n.op.traits and self.within_blocks(n)

    def within_blocks(self, n: Node) -> bool:
        """Does a reduction of a blocked value leave the axis of the innermost block apart?"""
        x = n.inputs[0] if n.inputs else None
        if n.op.reduced is None or x is None or not isinstance(x.type.encoding, Dense) or x.type.layout is None:
            return False
        axes, last = set(n.op.reduced(x.type.rank, **n.attrs)), x.type.layout.parts[-1].axis
        images = last == 1 and bool(axes) and min(axes) > 1
        return images or (bool(axes) and axes == set(range(x.type.rank)) - {last})

    def normalizes(self, n: Node) -> bool:
        """Numbers of the channels normalize a block as it lies."""
        if Trait.REDUCTION not in n.op.traits or Trait.ROWWISE in n.op.traits or not self.within_blocks(n):
            return False
        x = n.inputs[0]
        return x is not None and len(n.inputs) == len(n.outputs) == 1 and x.type.shape == n.output.type.shape

    def plain(self, n: Node) -> None:
        for k, v in enumerate(n.inputs):
            if v is not None and not v.type.row_major:
                self.set_input(n, k, ROW_MAJOR)

    # --- changing values ----------------------------------------------------------------------------------------------

    def set_input(self, n: Node, k: int, encoding: Encoding) -> None:
        v = n.inputs[k]
        assert v is not None
        if v.type.encoding != encoding:
            n.set_input(k, self.relaid(v, encoding))

    def set_output(self, n: Node, encoding: Encoding) -> None:
        t = n.output.type
        if t.encoding != encoding:
            n.output.type = TensorType(t.dtype, t.shape, encoding)
            self.changed = True

    def relaid(self, v: Value, encoding: Encoding) -> Value:
        """The value in another encoding: a `pack`'s source, a relabelled constant or parameter, or a new `pack`."""
        self.changed = True
        if (
            v.node is not None
            and Trait.RELAYOUT in v.node.op.traits
            and v.node.inputs[0] is not None
            and v.node.inputs[0].type.encoding == encoding
        ):
            return v.node.inputs[0]  # pack(pack(x)) -> x
        if self.enlarges(v, encoding):  # pack(resize(x)) -> resize(pack(x))
            assert v.node is not None
            self.set_input(v.node, 0, encoding)
            self.set_output(v.node, encoding)
            return v
        key = (v, encoding)
        found = self.made.get(key)
        if found is None:
            t = TensorType(v.type.dtype, v.type.shape, encoding)
            if v in self.graph.constants:
                found = self.graph.constant(self.graph.constants[v], v.name, v.locs, t)
            elif v in self.graph.parameters:
                found = self.graph.parameter(self.graph.parameters[v], t, v.name)
            else:
                after = self.graph.first_node() if v.node is None else v.node.next
                found = Builder(self.graph, after, v.locs).op("pack", v, layout=t.layout)
            self.made[key] = found
        return found

    def enlarges(self, v: Value, encoding: Encoding) -> bool:
        """Is a value an image that is larger than the one it is made of, of equal channels, and read once?"""
        x = v.node.inputs[0] if v.node is not None and Trait.RESAMPLES in v.node.op.traits else None
        if x is None or x.type.rank < 3 or x.type.shape[1] != v.type.shape[1] or encoding != self.image_layout(v):
            return False
        before, after = product(x.type.shape), product(v.type.shape)
        larger = isinstance(before, int) and isinstance(after, int) and after >= LARGER * before
        return larger and len(v.uses) == 1 and not self.graph.is_output(v)

    def image_layout(self, v: Value) -> Encoding | None:
        """The layout in which resampling an image is vectors of its channels."""
        return None


# Ops with a rule of their own.
RULES: dict[str, Callable[[Layouts, Node], None]] = {
    "conv": lambda layouts, n: layouts.conv(n),
    "conv_backward_filter": lambda layouts, n: layouts.backward_filter(n),
    "turn_filters": lambda layouts, n: layouts.turn_filters(n),
    "matmul": lambda layouts, n: layouts.matmul(n),
    "decode": lambda layouts, n: layouts.coded(n),
    "differing_bits": lambda layouts, n: layouts.matmul(n),
    "pack": lambda layouts, n: None,
    "lrn": lambda layouts, n: layouts.across(n),
}


class _Blocked(Layouts):
    """Channels in blocks of a vector; panels of weights."""

    def __init__(
        self, graph: Graph, lanes: int, strict: bool, fixed: Mapping[Value, float], sparse: SparseWeights
    ) -> None:
        super().__init__(graph)
        self.lanes, self.strict, self.fixed, self.rates = lanes, strict, fixed, sparse.rates
        self.weights = sparse
        convolutions = (n for n in graph.nodes() if n.op.contraction is ContractionForm.CONVOLUTION)
        self.sparse = {n: found for n in convolutions if (found := sparse.encoding(n)) is not None}
        self.pixels = choose(graph, lanes, self.sparse)  # values in vectors of pixels

    def visit(self, n: Node) -> None:
        for k, v in enumerate(n.inputs):
            if v in self.pixels and not v.type.row_major and not self.reads_pixels(n, v):
                self.set_input(n, k, blocked(v.type.rank, self.lanes))
        super().visit(n)

    def reads_pixels(self, n: Node, v: Value) -> bool:
        """Does an op read vectors of pixels?"""
        if n in self.sparse:
            return v is n.inputs[0] and is_pointwise(n)
        return len(n.outputs) == 1 and n.output in self.pixels and v.type.shape == n.output.type.shape

    def order_of(self, n: Node, blocks: Sequence[Encoding]) -> Encoding:
        return pixel_blocks(n.output.type.rank, self.lanes) if n.output in self.pixels else blocks[0]

    def conv(self, n: Node) -> None:
        x, w = n.inputs[0], n.inputs[1]
        assert x is not None and w is not None
        out, group = n.output.type, n.attrs["group"]
        channels, made = x.type.shape[1], out.shape[1]
        depthwise = group != 1 and w.type.shape[1] == 1 and channels == group == made
        if sparse := self.sparse.get(n):
            return self.sparse_conv(n, sparse)
        one = group == 1 and isinstance(channels, int) and isinstance(made, int) and made > 1
        if one and self.together(n) == QUAD and self.graph.variance(w).call_invariant:
            return self.bytes_conv(n)
        # few results fill a block badly: their vectors are blocks of inputs, where there are enough of these
        few = group == 1 and isinstance(made, int) and made < self.lanes // 2 and out.dtype.computed in WIDE
        if few and isinstance(channels, int) and (not x.type.row_major or channels >= self.lanes // 2):
            return self.few(n)
        enough = isinstance(made, int) and made > 1  # with fewer than fill a block lanes over pixels are no faster
        fits = enough and isinstance(channels, int) and out.dtype.computed in WIDE
        if not fits:
            return self.plain(n)
        lay = blocked(out.rank, self.lanes)
        if group != 1 and not depthwise and not n.attrs["panel"] and not self.shuffles(n):
            if self.strict and made // group % self.lanes:
                return self.plain(n)
            n = self.by_panels(n)
        # few channels are read as rows; a last block that is not full costs memory, no arithmetic
        whole = bool(group == 1 and (not x.type.row_major or channels >= self.lanes))
        w = n.inputs[1]
        fixed, tiled = self.graph.variance(w).call_invariant, takes_tiles(self.graph, n, self.rates, self.strict)
        transforms = whole and fixed and not self.strict and not tiled
        tile = winograd_tile(n, self.lanes, self.rates) if transforms else 0
        pairs = whole and not tile and fixed and self.together(n) == 2
        block = row_of_channels(n) if pairs and tiled else self.lanes
        self.set_input(n, 0, blocked(out.rank, block) if group != 1 or whole else ROW_MAJOR)
        if pairs:
            self.set_input(n, 1, quad_filters(out.rank, self.lanes, block, 2))
        else:
            self.set_input(n, 1, winograd_filters(self.lanes, tile) if tile else filters(out.rank, self.lanes, whole))
        if len(n.inputs) > 2 and (b := n.inputs[2]) is not None:
            if made % self.lanes or self.graph.variance(b).call_invariant:  # else its blocks lie as they are needed
                self.set_input(n, 2, dense(Part(0, self.lanes), Part(0, 1, self.lanes)))
        self.set_output(n, lay)

    def sparse_conv(self, n: Node, weights: Sparse) -> None:
        """Images in blocks of channels, which the kernel transposes on its way; in rows where they come in rows."""
        x = n.inputs[0]
        assert x is not None
        rank = n.output.type.rank
        pixels = [v in self.pixels for v in (x, n.output)]
        rows = x.type.row_major and is_pointwise_in_rows(n) and not any(pixels)
        encoding = ROW_MAJOR if rows else blocked(rank, self.lanes)
        reads, writes = (pixel_blocks(rank, self.lanes) if p else encoding for p in pixels)
        self.set_input(n, 0, reads)
        self.set_input(n, 1, weights)
        if len(n.inputs) > 2 and n.inputs[2] is not None and writes == blocked(rank, self.lanes):
            self.set_input(n, 2, dense(Part(0, self.lanes), Part(0, 1, self.lanes)))
        self.set_output(n, writes)

    def bytes_conv(self, n: Node) -> None:
        """A convolution of bytes: few channels lie in blocks of four, which one instruction takes."""
        x, rank = n.inputs[0], n.output.type.rank
        assert x is not None
        block = self.lanes if x.type.shape[1] >= self.lanes or not x.type.row_major else QUAD
        block = row_of_channels(n) if takes_tiles(self.graph, n, self.rates, self.strict) else block
        self.set_input(n, 0, blocked(rank, block))
        self.set_input(n, 1, quad_filters(rank, self.lanes, block))
        if len(n.inputs) > 2 and n.inputs[2] is not None:
            self.set_input(n, 2, dense(Part(0, self.lanes), Part(0, 1, self.lanes)))
        self.set_output(n, blocked(rank, self.lanes))

    def backward_filter(self, n: Node) -> None:
        """Images and cotangents in blocks, filters as the convolution has them: vectors are its output channels."""
        x, g = n.inputs
        assert x is not None and g is not None
        out, group = n.output.type, n.attrs["group"]
        channels, made = x.type.shape[1], g.type.shape[1]
        if not isinstance(channels, int) or not isinstance(made, int) or out.dtype.computed not in WIDE or made == 1:
            return self.plain(n)
        depthwise = group == channels == made
        whole = all(c // group % self.lanes == 0 for c in (channels, made))
        if group != 1 and not depthwise and not whole:
            return self.plain(n)
        blocks = not depthwise and (not x.type.row_major or channels >= self.lanes)
        self.set_input(n, 0, blocked(out.rank, self.lanes) if blocks or depthwise else ROW_MAJOR)
        self.set_input(n, 1, blocked(out.rank, self.lanes))
        self.set_output(n, filters(out.rank, self.lanes, blocks))

    def turn_filters(self, n: Node) -> None:
        """Blocks become blocks, each a square of lanes that is turned. They are packed for it anew: what the forward
        packed would be kept until then.
        """
        w = n.inputs[0]
        assert w is not None
        sizes = w.type.shape[:2]
        if n.attrs["group"] != 1 or not all(isinstance(k, int) and k >= self.lanes for k in sizes):
            return self.plain(n)
        if w.type.dtype.computed not in WIDE:
            return self.plain(n)
        lay = filters(w.type.rank, self.lanes, True)
        if w.type.row_major and self.graph.variance(w).call_invariant:
            self.set_input(n, 0, lay)
        elif w.type.row_major:
            n.set_input(0, Builder(self.graph, n, n.locs).op("pack", w, layout=lay.layout))
        if n.inputs[0] is not None and n.inputs[0].type.encoding != lay:
            return self.plain(n)
        self.set_output(n, lay)

    def few(self, n: Node) -> None:
        """Images and filters of a convolution of few outputs in blocks of its inputs, the outputs in rows."""
        lay = blocked(n.output.type.rank, self.lanes)
        self.set_input(n, 0, lay)
        self.set_input(n, 1, lay)
        if len(n.inputs) > 2 and n.inputs[2] is not None:
            self.set_input(n, 2, ROW_MAJOR)
        self.set_output(n, ROW_MAJOR)

    def shuffles(self, n: Node) -> bool:
        """True if lanes of several groups better shuffle inputs out of one block than multiply by zeros."""
        x, w = n.inputs[0], n.inputs[1]
        assert x is not None and w is not None
        panels = panels_of(x.type.shape[1], w.type.shape[0], n.attrs["group"], self.lanes)  # type: ignore[arg-type]
        taps, stride = w.type.shape[-1], (n.attrs["strides"] or (1,))[-1]
        if (
            not 0 < panels.of_a_block <= MOST_SHUFFLED
            or not isinstance(taps, int)
            or panels.inputs * taps > MOST_UNROLLED
        ):
            return False
        each = min(
            stride / taps, 1
        )  # for each product: neighbouring pixels share those of the taps that they have in common
        waste = panels.most / panels.inputs
        return waste > 1 and (self.strict or (1 + SHUFFLE * each) * GAIN < waste)

    def by_panels(self, n: Node) -> Node:
        """conv(x, w, group=3), 24 channels -> conv(x, where(mask, concat(w, w, w, axis=1), 0), group=3, panel=16)"""
        w, group = n.inputs[1], n.attrs["group"]
        assert w is not None and n.inputs[0] is not None
        panels = panels_of(n.inputs[0].type.shape[1], w.type.shape[0], group, self.lanes)  # type: ignore[arg-type]
        if panels.most != panels.inputs:
            w = self.spread(w, panels, n)
        b = Builder(self.graph, n, n.locs)
        y = b.conv(n.inputs[0], w, *n.inputs[2:], **{**n.attrs, "panel": self.lanes})
        self.graph.replace_all_uses(n.output, y)
        self.graph.erase(n)
        self.changed = True
        assert isinstance(y, Value) and y.node is not None
        return y.node

    def spread(self, w: Value, panels: Panels, n: Node) -> Value:
        """Return a grouped convolution's filters for panels, each behind zeros for inputs of earlier groups."""
        rank, copies = w.type.rank, panels.most // panels.inputs
        of = np.arange(panels.made)
        ahead = of // panels.outputs - of // panels.width * panels.width // panels.outputs  # groups
        own = np.arange(panels.most) // panels.inputs == ahead[:, None]
        own = own.reshape(*own.shape, *(1,) * (rank - 2))

        def filters_of_all(b: Builder, x: Value) -> Value:
            filters: Value = b.where(own, b.concat(*[x] * copies, axis=1), np.zeros((), w.type.dtype.numpy))
            return filters

        return derive(self.graph, [w], filters_of_all, w.name, n)

    def matmul(self, n: Node) -> None:
        a, b = n.inputs[0], n.inputs[1]
        assert a is not None and b is not None
        if is_decoded(b):
            return self.decoded(n)
        columns = b.type.shape[-1] if b.type.rank >= 2 else 1
        if a.type.rank < 2 or columns == 1 or n.output.type.dtype.computed not in WIDE:
            return self.plain(n)
        if (
            not self.graph.variance(b).call_invariant
            and not _turns_matrices(b)
            and _rows_of_each(n.output.type, b.type) * self.fixed.get(b, 1) <= FEW_ROWS
        ):
            return self.plain(n)
        self.set_input(n, 0, ROW_MAJOR)
        if sparse := self.weights.encoding(n):
            return self.set_input(n, 1, sparse)
        k, of = b.type.shape[-2], self.together(n)
        if of < 2 or not isinstance(k, int) or k % of:
            return self.set_input(n, 1, panels(b.type.rank, self.lanes))
        quads = quad_panels(b.type.rank, self.lanes, of)
        self.set_input(n, 1, quads if self.graph.variance(b).call_invariant else Dense(quads.layout))

    def decoded(self, n: Node) -> None:
        """Codes in panels, those of few bits in words; scales and zero points beside them. Each product has a node of
        its own that decodes, which becomes part of its kernel.
        """
        self.set_input(n, 0, ROW_MAJOR)
        d = own_decoder(self.graph, n)
        columns = d.output.type.shape[-1]
        if d.output.type.rank < 2 or n.inputs[0] is None or n.inputs[0].type.rank < 2 or columns == 1:
            return self.coded(d)
        for k, v in enumerate(d.inputs):
            if v is None or v not in self.graph.constants:
                continue
            few = v.type.dtype.bits < 8
            if few and v.type.dtype.kind == "u":
                self.set_input(d, k, word_panels(d.output.type.rank, self.lanes, WORD // v.type.dtype.bits))
            elif not few and v.type.shape[-1] == columns:
                self.set_input(d, k, panels(d.output.type.rank, self.lanes))
        if not decodes(n, d.output):
            self.set_output(d, panels(d.output.type.rank, self.lanes))

    def coded(self, n: Node) -> None:
        """Codes of few bits in words, row by row."""
        for k, v in enumerate(n.inputs):
            if v is not None and v in self.graph.constants and v.type.dtype.kind == "u" and v.type.dtype.bits < 8:
                self.set_input(n, k, word_rows(v.type.rank, WORD // v.type.dtype.bits))

    def together(self, n: Node) -> int:
        """Products of a sum that one instruction adds up."""
        fast = self.rates.pairs >= self.rates.fma or takes_tiles(self.graph, n, self.rates, self.strict)
        return added_up(n, fast and not self.strict)

    def within_channels(self, n: Node) -> bool:
        """A resampling, a crop or a border of images, or whole blocks of channels: vectors stay vectors."""
        x = n.inputs[0] if n.inputs else None
        if n.op.name == "interleave" and x is not None and not x.type.row_major:
            return bool(x.type.shape[1] % (self.lanes * product(n.attrs["strides"])) == 0)
        if Trait.RESAMPLES not in n.op.traits or x is None or x.type.row_major:
            return False
        if n.op.name == "slice":
            start, size = n.attrs["starts"][1], n.output.type.shape[1]
            whole = all(isinstance(k, int) and k % self.lanes == 0 for k in (start, size)) or size == x.type.shape[1]
            return whole and n.attrs["steps"][1] == 1
        return bool(x.type.shape[1] == n.output.type.shape[1])

    def image_layout(self, v: Value) -> Encoding | None:
        return blocked(v.type.rank, self.lanes)

    def pools(self, n: Node) -> bool:
        """Small windows: in rows their borders depend on the lane, in blocks on the pixel alone."""
        x = n.inputs[0] if n.inputs else None
        if Trait.CHANNELWISE not in n.op.traits or x is None or x.type.dtype.computed not in WIDE:
            return False
        channels, window = x.type.shape[1], product(n.attrs["kernel"])
        if (
            not isinstance(channels, int)
            or channels < LEAST_POOLED
            or not 1 < window < LARGE_WINDOW
            or product(n.output.type.shape[2:]) == 1
        ):
            return False
        self.set_input(n, 0, blocked(x.type.rank, self.lanes))
        return True

    def joins(self, n: Node) -> bool:
        """A concatenation of whole channel blocks, or of images all in blocks: two vectors become one."""
        if n.attrs["axis"] % n.output.type.rank != 1 or n.output.type.rank < 3:
            return False
        operands = [v for v in n.inputs if v is not None]
        sizes = [v.type.shape[1] for v in operands]
        if all(not v.type.row_major for v in operands):
            return all(isinstance(c, int) and 2 * c >= self.lanes for c in sizes)
        return any(not v.type.row_major for v in operands) and all(
            isinstance(c, int) and c % self.lanes == 0 for c in sizes
        )


def _rows_of_each(out: TensorType, matrices: TensorType) -> float:
    """How many rows of a product read each of the matrices; infinite where that is not known."""
    rows, count = product(out.shape[:-1]), product(matrices.shape[:-2])
    return rows / count if isinstance(rows, int) and isinstance(count, int) and count > 0 else float("inf")


def _turns_matrices(v: Value) -> bool:
    """Is a value made by a transposition of its last axis? One kernel then turns and packs it."""
    n = producer(v, "transpose")
    return n is not None and n.attrs["perm"][-1] != v.type.rank - 1
