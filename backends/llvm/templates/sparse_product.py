"""The product of a sparse constant matrix that a group of nodes computes, as its templates see it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dnnc.backends.llvm.templates.sparse_pixels import Finish, Grid, finish_of, grid_of
from dnnc.ir.dtype import f32, i64
from dnnc.ir.expr import Expr, Load, cast, const, minimum, walk
from dnnc.ir.loops.stmt import Buffer, call
from dnnc.ir.op import ContractionForm
from dnnc.ir.sparse import SHARES, Sparse
from dnnc.passes.lower.form import Axis, Contraction, Operand
from dnnc.passes.schedule.problem import Problem


@dataclass(frozen=True)
class Product:
    """A product for this builder: `weights` in their memory layout, the other factor, and the sides."""

    form: Contraction
    encoding: Sparse
    weights: Buffer
    other: Operand
    rows: Axis  # of the sparse matrix
    pixels: Axis  # of the other factor
    transposed: bool  # are neighbours of the result in memory rows of the matrix, not pixels?
    reads: Grid | None = None  # where the other factor's memory is made of vectors of pixels
    writes: Grid | None = None  # where the result's is
    finish: Finish | None = None  # where code makes results of sums

    @property
    def grid(self) -> Grid | None:
        """Vectors are those of a row of an image, and not of all its pixels one after the other."""
        return self.reads or self.writes

    def vectors(self, lanes: int) -> int:
        return self.grid.vectors if self.grid is not None else -(-self.pixels.size // lanes)

    def first(self, v: Expr, lanes: int) -> Expr:
        """The first pixel of a vector, as the loops of pixels count them."""
        g = self.grid
        if g is None or self.writes is not None:
            return v * lanes
        return v // g.blocks * g.width + v % g.blocks * lanes

    def count(self, v: Expr, lanes: int) -> Expr | None:
        """How many lanes of a vector are pixels; None: all of them."""
        g = self.grid
        if self.writes is not None:  # lanes past a row are written as 0
            return None
        if g is not None:
            return None if g.width % lanes == 0 else minimum(g.width - v % g.blocks * lanes, lanes)
        return None if self.pixels.size % lanes == 0 else minimum(self.pixels.size - v * lanes, lanes)

    def stored(self, v: Expr, lanes: int) -> Expr:
        """How many lanes of a vector of pixels are results, others being 0."""
        g = self.writes
        if g is None or g.width % lanes == 0:
            return const(lanes)
        return minimum(g.width - v % g.blocks * lanes, lanes)

    def whole_rows(self, lanes: int) -> bool:
        """Are neighbours in memory, where they are rows, whole vectors? The last of one loop need not be whole."""
        return not self.transposed or len(self.rows.loops) == 1 or self.rows.inner % lanes == 0

    @property
    def terms(self) -> int:
        return self.form.red.size

    @property
    def taps(self) -> Axis:
        """The loops of the sum but that over channels, which is the outermost."""
        return Axis(self.form.red.loops[1:])


def product_of(problem: Problem, lanes: int) -> Product | None:
    """The product of a group whose weights are sparse; None for all others."""
    anchor = problem.anchor
    weights = anchor.inputs[1] if anchor is not None and len(anchor.inputs) > 1 else None
    encoding = weights.type.encoding if weights is not None else None
    if anchor is None or weights is None or not isinstance(encoding, Sparse):
        return None
    if not isinstance(problem.form, Contraction):
        return None
    form: Contraction | None = problem.product
    if anchor.op.contraction is ContractionForm.CONVOLUTION and math.prod(encoding.shape[2:]) > 1 and form is not None:
        form = problem.form.without_single  # the loops of the sum in the order of the matrix's columns
    if form is None or form.acc.dtype is not f32:
        return None
    name = dict(zip(problem.lowered.params, problem.kernel.entry.buffers))[weights].name
    sides = [any(x.buf.name == name for x in walk(o.value) if isinstance(x, Load)) for o in (form.a, form.b)]
    if sum(sides) != 1 or form.batch.loops or encoding.pattern.columns != form.red.size:
        return None
    sparse, other = (form.a, form.b) if sides[0] else (form.b, form.a)
    if not sparse.axis.loops or sparse.conds:
        return None
    buffer = next(x.buf for x in walk(sparse.value) if isinstance(x, Load) and x.buf.name == name)
    x, y = anchor.inputs[0], problem.lowered.params[problem.lowered.outputs[-1]]
    reads, writes = (grid_of(v.type, lanes) if v is not None else None for v in (x, y))
    transposed = not sides[0] and writes is None
    finish = finish_of(form, sparse.axis, other.axis, writes, lanes) if encoding.group > 1 else None
    return Product(form, encoding, buffer, other, sparse.axis, other.axis, transposed, reads, writes, finish)


def end_of_share(p: Product, block: int, share: Expr, shares: int) -> Expr:
    """The block of rows with which a share begins: each has about as many nonzeros, or is the one behind the last.

    `block`: its rows, whole rows of the encoding's blocks, and whole groups.
    """
    if shares == 1:
        return share * -(-p.rows.size // block)
    unit = p.encoding.group * p.encoding.pattern.height
    units = -(-p.rows.size // unit)
    begin, _ = p.encoding.sections["shares"]
    first = call("trusted", cast(p.weights[begin + share * SHARES // shares], i64), 0, units + 1)
    return (first * unit + (block - 1)) // block


def word(p: Product, section: str, i: Expr) -> Expr:
    """An index out of the encoding: a number of stored blocks, or a column of blocks."""
    begin, _ = p.encoding.sections[section]
    pattern = p.encoding.pattern
    most = p.encoding.room + 1 if section == "starts" else -(-pattern.columns // pattern.width)
    return call("trusted", cast(p.weights[begin + i], i64), 0, most)
