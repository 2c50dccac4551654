"""GPU layouts: channels of images last, so that neighbouring threads read neighbouring bytes.

    y = conv(x, w)        ->   y @ "0 2 3 1" = conv(x @ "0 2 3 1", w @ "0 2 3 1")
    y = matmul(a, b)      ->   y = matmul(a, b @ "1 0")          constant b of 16-bit floats or bytes
    y = conv(x, w)        ->   y @ "0 2 3 1" = conv(x @ "0 2 3 1", w @ "bundles ..")       constant w with many zeros
    y = matmul(a, b)      ->   y @ "1 0" = matmul(a @ "1 0", b @ "bundles ..")       where pixels are to be neighbours
    y = matmul(a, decode(q, s))      ->   y = matmul(a, decode(q @ "packed 1/32 0/32 ..", s @ ..))    as lanes read them
    w = conv_backward_filter(x, g)   ->   pack(w @ "0 2 3 1" = conv_backward_filter(x @ "0 2 3 1", g @ "0 2 3 1"))

Rows of channels are padded to multiples of 16 bytes ("0 2 3 1/8 1%8"), for vector loads and TMA; those of sums of bytes
as the bytes that they become. First layers, whose
images have a few channels, are read as they come. Tensor cores want both operands with the reduced axis innermost, so
constant matrices are transposed when the program is linked. Padding holds 0, as with blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from dnnc.ir.dtype import FLOAT8, bf16, f16, i8, i32, u8
from dnnc.ir.encodings import Packed
from dnnc.ir.expr import Expr
from dnnc.ir.graph import Graph, Node
from dnnc.ir.op import ContractionForm, Trait
from dnnc.ir.types import ROW_MAJOR, Dense, Encoding, Layout, Part, TensorType, dense
from dnnc.passes.rewrites.layout import Layouts
from dnnc.passes.rewrites.sparse import Verdict
from dnnc.passes.rewrites.stored_weights import is_decoded, own_decoder

ACCESS = 16  # bytes of the widest load of a thread
DEPTH, WIDTH = 32, 32  # elements of a sum, and columns, of codes of 4 bits that a warp loads at a time
EIGHT = 8  # elements of a sum that a lane has of a column


def last(rank: int, first: int, block: int = 1) -> Dense:
    """`0 2 3 1`, or with a block `0 2 3 1/8 1%8`: axis 1 behind the axes from 2 on; `first` stands first."""
    spatial = tuple(Part(k) for k in range(2, rank))
    return dense(Part(first), *spatial, *_rows(1, block))


def taps_first(rank: int, block: int = 1) -> Dense:
    """`1 2 3 0`: the filters of a depthwise convolution, channels innermost."""
    return dense(Part(1), *(Part(k) for k in range(2, rank)), *_rows(0, block))


def _rows(axis: int, block: int) -> tuple[Part, ...]:
    return (Part(axis),) if block == 1 else (Part(axis, block), Part(axis, 1, block))


def pixel_order(n: Node) -> Encoding:
    """How a product or convolution by one element reads and writes neighbouring pixels: `1 0`, or channels first."""
    if n.op.contraction is ContractionForm.CONVOLUTION:
        return ROW_MAJOR
    rank = n.output.type.rank
    return dense(Part(rank - 1), *(Part(k) for k in range(rank - 1)))


def code_layout(bits: int) -> Encoding:
    """Codes [k, n] of weights: 16 bytes of a lane are 8 of a sum of 4 columns (8 bits: 2), 8 apart; 4 neighbouring
    lanes go on along the sum, the 8 times 4 lanes of a warp over the columns.
    """
    columns = ACCESS // (EIGHT * bits // 8)
    outer = (Part(1, EIGHT * columns), Part(0, DEPTH), Part(1, 1, EIGHT), Part(0, EIGHT, DEPTH // EIGHT))
    layout = Layout((*outer, Part(1, EIGHT, columns), Part(0, 1, EIGHT)))
    return Packed(layout) if bits < 8 else Dense(layout)


def number_layout() -> Dense:
    """`0 1/32 1%8 1/8%4`: scales [blocks, n] of the columns of a lane one behind the other."""
    return dense(Part(0), Part(1, WIDTH), Part(1, 1, EIGHT), Part(1, EIGHT, WIDTH // EIGHT))


Weighs = Callable[[Graph, Node], Verdict | None]  # on a node's weights, None where they have no zeros


def assign_channels_last(graph: Graph, weighs: Weighs | None = None, note: Callable[[str], None] | None = None) -> bool:
    """Set the layouts of all values. Returns whether anything changed.

    Args:
        graph: changed in place.
        weighs: how weights with many zeros are stored; None: as all others.
        note: called with what a user should know of them.
    """
    return _ChannelsLast(graph, weighs, note).run()


class _ChannelsLast(Layouts):
    def __init__(self, graph: Graph, weighs: Weighs | None, note: Callable[[str], None] | None) -> None:
        super().__init__(graph)
        self.weighs, self.note = weighs, note

    def sparse(self, n: Node) -> Verdict | None:
        """How the weights of a product or convolution are stored; None where they stay dense."""
        verdict = self.weighs(self.graph, n) if self.weighs is not None else None
        if verdict is not None and self.note is not None:
            self.note(verdict.why)
        return verdict if verdict is not None and verdict.encoding is not None else None

    def conv(self, n: Node) -> None:
        x, w = n.inputs[0], n.inputs[1]
        assert x is not None and w is not None
        out, group = n.output.type, n.attrs["group"]
        channels, made = x.type.shape[1], out.shape[1]
        bytes_ = out.dtype is i32 and x.type.dtype.bytes == 1
        if not isinstance(channels, int) or not isinstance(made, int) or not (out.dtype.is_float or bytes_):
            return self.plain(n)
        if sparse := self.sparse(n):
            assert sparse.encoding is not None
            images = pixel_order(n) if sparse.pixels else last(out.rank, 0)
            self.set_input(n, 0, images)
            self.set_input(n, 1, sparse.encoding)
            return self.set_output(n, images)
        depthwise = group != 1 and w.type.shape[1] == 1 and group == channels == made
        grouped = group != 1 and not depthwise
        fill, block = (
            (1, 1) if grouped else (_block(x.type if bytes_ else out, made), _block(x.type, channels))
        )  # rows of groups end with the last group
        take = not x.type.row_major or channels >= ACCESS // x.type.dtype.bytes
        self.set_input(n, 0, last(out.rank, 0, block) if take else ROW_MAJOR)
        filters = taps_first(out.rank, block) if depthwise else last(out.rank, 0, block)
        self.set_input(n, 1, filters if take else ROW_MAJOR)
        self.set_output(n, last(out.rank, 0, fill))

    def backward_filter(self, n: Node) -> None:
        """Images and cotangents with channels last, so that vectors of channels are read whatever the tap; the filters
        are packed for who reads them.
        """
        x, g = n.inputs
        assert x is not None and g is not None
        rank, group = n.output.type.rank, n.attrs["group"]
        channels, made = x.type.shape[1], g.type.shape[1]
        if not isinstance(channels, int) or not isinstance(made, int):
            return self.plain(n)
        depthwise = group != 1 and group == channels == made
        grouped = group != 1 and not depthwise
        fill, block = (1, 1) if grouped else (_block(g.type, made), _block(x.type, channels))
        take = not x.type.row_major or channels >= ACCESS // x.type.dtype.bytes
        self.set_input(n, 0, last(rank, 0, block) if take else ROW_MAJOR)
        self.set_input(n, 1, last(rank, 0, fill))
        uses, results = list(n.output.uses), [k for k, v in enumerate(self.graph.outputs) if v is n.output]
        if take:
            self.set_output(n, taps_first(rank, block) if depthwise else last(rank, 0, block))
            plain = self.relaid(n.output, ROW_MAJOR)
            for u, k in uses:
                u.set_input(k, plain)
            for k in results:
                self.graph.outputs[k] = plain

    def matmul(self, n: Node) -> None:
        b = n.inputs[1]
        assert b is not None
        if is_decoded(b):
            return self.decoded(n)
        narrow = b.type.dtype in (f16, bf16, u8, i8, *FLOAT8)
        turned = narrow and b.type.rank == 2 and self.graph.variance(b).call_invariant
        sparse, usual = self.sparse(n), dense(Part(1), Part(0)) if turned else ROW_MAJOR
        encoding = sparse.encoding if sparse is not None else None
        first = encoding is not None and self.graph.constants.get(n.inputs[0]) is not None  # type: ignore[arg-type]
        pixels: Encoding = ROW_MAJOR
        if sparse is not None and sparse.pixels and not first:
            pixels = pixel_order(n)
        self.set_input(n, 0, encoding if first and encoding is not None else pixels)
        self.set_input(n, 1, usual if first or encoding is None else encoding)
        self.set_output(n, pixels)

    def decoded(self, n: Node) -> None:
        """Codes, scales and zero points as a warp's lanes read them; a node of its own decodes for each product."""
        self.set_input(n, 0, ROW_MAJOR)
        d = own_decoder(self.graph, n)
        q, shape = d.inputs[0], d.output.type.shape
        assert q is not None
        if (
            d.output.type.rank == 2
            and not any(isinstance(s, Expr) or s % WIDTH for s in shape)
            and q.type.dtype.bits in (4, 8)
        ):
            self.set_input(d, 0, code_layout(q.type.dtype.bits))
            for k, v in enumerate(d.inputs[1:], 1):
                if v is not None and v.type.shape[1] == shape[1]:
                    self.set_input(d, k, number_layout())

    def joins(self, n: Node) -> bool:
        if n.output.type.rank < 3:
            return False
        operands = [v for v in n.inputs if v is not None]
        shapes = [v.type.shape[1] for v in operands]
        images = any(not v.type.row_major for v in operands)
        even = n.attrs["axis"] % n.output.type.rank != 1 or all(
            isinstance(c, int) and _block(v.type, c) == 1 for v, c in zip(operands, shapes)
        )
        return images and even

    def pools(self, n: Node) -> bool:
        return False  # threads side by side read rows as well

    def within_channels(self, n: Node) -> bool:
        x = n.inputs[0] if n.inputs else None
        if Trait.RESAMPLES not in n.op.traits or x is None or x.type.row_major:
            return False
        made = n.output.type.shape[1]
        return bool(made == x.type.shape[1]) or (
            isinstance(made, int) and _block(n.output.type, made) == 1 == x.type.encoding.block(1)
        )


def _block(t: TensorType, channels: int) -> int:
    """Return how many channels form a row of a multiple of 16 bytes: 1 if one does."""
    block = max(ACCESS // t.dtype.bytes, 1)
    return 1 if channels % block == 0 else block
