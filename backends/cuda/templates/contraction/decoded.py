"""Products of few rows with weights of 4 or 8 bits, decoded in registers: bandwidth is that of the codes.

    for block in block.x(column tiles), part in cluster(split):
        for w in warp(..): for l in lane(32):
            codes of the first steps are on their way, also while the kernel ahead of this one ends
            for step: q = codes of 32 x 32 weights; x = a vector of each row
                sums of the block += mma(halves(q), x)
                totals += scale * sums of the block           behind the last step of a block
            the warps' totals meet in shared memory, those of a cluster's blocks as well; y = epilogue(totals)

Weights are the first factor of the tensor core, 16 columns at a time, so that 8 rows of x fill the second one. They lie
as lanes read them: 16 bytes of a lane are 8 elements of a sum of 4 columns (8 bits: 2), each warp reads 512 bytes in a
piece, step after step, without shared memory. A sum may be in any order: a lane of the tensor core multiplies
neighbouring elements of x, in the order in which codes come apart. Codes less their zero point are exact in 16 bits, so
scales multiply sums in float32, once for each block.

Rows that a norm makes are computed by every block for itself, in shared memory, while its first codes are on their way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction import gemv, gemv_norm
from dnnc.backends.cuda.templates.contraction.gemv_norm import Norm, Rows, elements_ahead, normed_product
from dnnc.backends.cuda.templates.contraction.mma import raw_operand
from dnnc.backends.cuda.templates.contraction.staging import readable, vector_of
from dnnc.backends.cuda.templates.epilogue import store_row
from dnnc.backends.cuda.templates.reduction.partial import LANES, SHARE, SPLITS, Parts, cluster
from dnnc.ir.dtype import DType, f32, i32, u32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Ref, cast, const, minimum, substitute, value
from dnnc.ir.graph import Node, Value
from dnnc.ir.loops.stmt import Buffer, Builder, Func, Kernel, call
from dnnc.ir.types import Encoding
from dnnc.passes.lower.form import Contraction
from dnnc.passes.rewrites.channels_last import DEPTH, WIDTH, code_layout, number_layout
from dnnc.passes.rewrites.stored_weights import is_decoded
from dnnc.passes.schedule.problem import Knobs, Problem

MOST_ROWS = 64  # of x: of more, tensor cores take longer than the codes
MADE_ROWS = gemv_norm.ROWS  # that every block may compute for itself
ROWS = 8  # of x that fill the tensor core's second factor
VECTOR = 8  # elements of a sum that a lane has of a column in one step
TILE = 16  # columns that fill its first one
HELD = 2  # tiles of rows whose elements are asked for ahead of their use: more would not fit into registers
RINGS = 2  # rounds of codes in shared memory, where sums of more tiles take the registers
COPIED = (4, 8, 16)  # bytes of a vector that goes to shared memory beside the threads
FLIGHT = 4  # steps of which a warp asks for the codes ahead
FLIGHTS = (FLIGHT, 8)  # those that are weighed
WARPS = 16  # of a block at most
ORDER = ("cols", "slices", "split")
RATE = 15  # bytes a cycle that an SM gets of memory
LATENCY, START = 2000, 1500  # cycles of each wave of blocks, and of a launch
LATE = 800  # cycles of a round that is asked for behind the wait for the kernel ahead of this one, of two at most
RING = 700  # that codes take longer by shared memory
STEP, SERIAL = 60, 16  # of a step of a warp, and steps that memory does not hide
FEW = 0.75  # blocks for each SM, of which few ask for little at once
FASTEST = 32  # bytes a cycle that an SM gets of memory where others ask for none
DEEPEST = 4  # rounds of codes in shared memory, of sums whose tiles registers hold
ROUND = 2200  # cycles from asking for the codes of a round until they are used up, of a busy memory: fitted to one H100
X_RATE = 64  # bytes a cycle that an SM gets of the second-level cache
BUSY = 24  # cycles that a scheduler of an SM needs to decode 512 bytes of codes and multiply them with 8 rows


@dataclass(frozen=True)
class Shape:
    """`cols` columns of a block, whose sum is divided among `slices` groups of warps and `split` blocks."""

    cols: int
    slices: int
    split: int
    flight: int = FLIGHT
    stages: int = 0  # rounds of codes that shared memory holds; none: registers hold one
    resident: int = 1


@dataclass(frozen=True)
class Decoded:
    """A contraction c with the weights' buffers: codes, scales (f32 or 16 bits), zero points (u8) if blocks have some.

    bits: of a code; zero: what each code is moved by; block: elements of a sum that share a scale.
    """

    c: Contraction
    codes: Buffer
    scale: Buffer
    zeros: Buffer | None
    bits: int
    zero: int
    block: int
    early: bool
    norm: Norm | None = None  # of which the rows of x are made
    known: frozenset[str] = frozenset()  # constants

    @property
    def strip(self) -> int:
        """Columns of a warp's vector."""
        return WIDTH * 4 // self.bits


def takes(rows: int, k: int, n: int, bits: int, block: int) -> bool:
    """Is there a kernel for a product of so many rows by weights [k, n] in 16-bit floats?"""
    whole = k % DEPTH == 0 and n % WIDTH == 0 and (block % DEPTH == 0 or block >= k)
    return 0 < rows <= MOST_ROWS and whole and bits in (4, 8)


def makes_rows(n: Node, product: Node) -> bool:
    """Does the product's kernel compute its rows, which a norm or an element-wise node makes?"""
    w = product.inputs[1] if len(product.inputs) > 1 else None
    if not is_decoded(w) or w is None or w.node is None:
        return gemv_norm.takes(n, product)
    d, q = w.node, w.node.inputs[0]
    if q is None or len(d.inputs) < 2 or w.type.dtype.bits != 16 or not gemv_norm.fits(n, product, math.inf):
        return False
    k, m = int(str(w.type.shape[0])), int(str(product.output.type.size)) // int(str(w.type.shape[1]))
    sized = takes(m, k, int(str(w.type.shape[1])), q.type.dtype.bits, int(d.attrs["block"]))
    return sized and offset_of(d) is not None and not d.attrs["axis"] % 2


def offset_of(d: Node) -> int | None:
    """What codes are moved by: the table of 4 bits says so, bytes are themselves. None where a table is no line."""
    table = d.attrs["table"]
    q = d.inputs[0]
    assert q is not None
    if q.type.dtype.bits == 8:
        return 0 if not table else None
    line = len(table) == 16 and all(v == k + table[0] for k, v in enumerate(table))
    return int(-table[0]) if line and 0 <= -table[0] <= 15 else None


def decoded(problem: Problem) -> Decoded | None:
    """The product of decoded weights that a problem is; None where it is none that this template takes."""
    c, node, norm = problem.contraction, problem.anchor, None
    w = node.inputs[1] if node is not None and len(node.inputs) > 1 else None
    if c is None and is_decoded(w) and w is not None and w.type.dtype.bits == 16:
        norm, c = normed_product(problem, w.type.dtype) or (None, None)
    if c is None or c.dtype is not f32 or c.batch.loops or not is_decoded(w) or w is None or w.node is None:
        return None
    x = raw_operand(c.a, f32)
    if x is None and norm is None and w.type.dtype.bits == 16 and c.rows.size <= MADE_ROWS:
        norm, c = elements_ahead(c, w.type.dtype) or (None, c)
        x = raw_operand(c.a, f32)
    d = w.node
    q, scale = d.inputs[0], d.inputs[1] if len(d.inputs) > 1 else None
    zeros = d.inputs[2] if len(d.inputs) > 2 else None
    if x is None or q is None or scale is None or w.type.rank != 2 or not w.type.static or x.conds or c.b.conds:
        return None
    k, n = (int(s) for s in w.type.shape)  # type: ignore[arg-type]
    block, bits, offset = int(d.attrs["block"]), q.type.dtype.bits, offset_of(d)
    if d.attrs["axis"] % 2 or offset is None or c.sizes[2:] != (n, k) or not takes(c.rows.size, k, n, bits, block):
        return None
    layouts = [code_layout(bits), number_layout(), number_layout()]
    if any(v is not None and v.type.encoding != lay for v, lay in zip((q, scale, zeros), layouts)):
        return None
    if not readable(x.value, c.red, c.rows, VECTOR):
        return None
    if any(v is not None and v.type.shape != (1 if block >= k else k // block, n) for v in (scale, zeros)):
        return None
    names = {v: b.name for v, b in zip(problem.lowered.params, problem.kernel.entry.buffers)}
    if q not in names or scale not in names or not _reads(c, names[q], q, (k, n)):
        return None
    blocks = 1 if block >= k else k // block

    def view(v: Value, inner: int) -> Buffer:
        return Buffer(names[v], v.type.buffer.dtype, tuple(map(const, (blocks, n // WIDTH, inner))))

    strip = WIDTH * 4 // bits
    shape = (n // strip, k // DEPTH, 32, 4 if bits == 4 else 16)
    codes = Buffer(names[q], q.type.buffer.dtype, tuple(map(const, shape)))
    early = names[q] in problem.constants
    made = replace(c, a=x)
    z = None if zeros is None else view(zeros, WIDTH)
    known = frozenset(gemv.early(problem, GpuTarget())) if norm is not None else frozenset[str]()
    return Decoded(made, codes, view(scale, WIDTH), z, bits, offset, block, early, norm, known)


def _reads(c: Contraction, name: str, q: Value, sizes: tuple[int, int]) -> bool:
    """Does the nest read code (k, n) at index k of the sum and column n? Asked of some elements."""
    found = [x for x in c.b.loads if x.buf.name == name]
    if not found:
        return False
    k, n = sizes
    encoding: Encoding = q.type.encoding
    buf = Buffer("x", q.type.buffer.dtype, tuple(map(const, q.type.buffer.shape)))
    for i, j in product((0, 1, 7, 8, 33, k - 1), (0, 1, 8, 17, n - 1)):
        if i >= k or j >= n:
            continue
        seen: list[Any] = []

        def element(*at: Any, seen: list[Any] = seen) -> Expr:
            seen.append(value(buf.offset(tuple(map(const, at)))))
            return const(0, buf.dtype)

        encoding.load((element,), (const(i), const(j)))
        at = {**c.red.at(const(i)), **c.cols.at(const(j))}
        if any([value(substitute(x.buf.offset(x.idx), at))] != seen for x in found):
            return False
    return True


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    d = decoded(problem) if target.major >= 8 else None
    if d is None:
        return []
    found = [s for s in shapes(d, target)]
    found.sort(key=lambda s: cycles(d, s, target))
    return [_knobs(s) for s in found[:8]]


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    d = decoded(problem) if target.major >= 8 else None
    if d is None:
        return []
    every = sorted(shapes(d, target), key=lambda s: cycles(d, s, target))
    return [_knobs(replace(s, flight=n)) for s in every for n in (FLIGHT, 2, 8) if _steps(d, n) == n]


def _knobs(s: Shape) -> Knobs:
    found: Knobs = (("cols", s.cols), ("slices", s.slices), ("split", s.split), ("flight", s.flight))
    more = (("stages", s.stages), ("resident", s.resident))
    return (*found, *more) if s.stages else found


def shapes(d: Decoded, target: GpuTarget) -> list[Shape]:
    """All divisions of columns and sum that fill warps."""
    _, m, n, k = d.c.sizes
    tiles = -(-m // ROWS)
    out = []
    splits = SPLITS if target.has_tma else (1,)
    for strips, slices, split, most in product((1, 2, 4, 8), (1, 2, 4, 8, 16), splits, FLIGHTS):
        s = Shape(strips * d.strip, slices, split, _steps(d, most))
        rounds = k // DEPTH // s.flight
        if n % s.cols or strips * slices > WARPS or slices * split > rounds or (split > 1 and tiles * ROWS % split):
            continue
        if tiles > HELD and rounds >= slices * split * RINGS:
            s = replace(s, stages=RINGS)
        each, few = _each(d, s), n // s.cols * split < target.sms * FEW
        made = [s] if most == FLIGHT or (each == 1 and tiles == 1 and s.flight == most) else []
        if most == FLIGHT and tiles <= HELD and few and 1 < each <= DEEPEST:
            made.append(replace(s, stages=each))
        for x in made:
            fits = _shared_bytes(d, x) <= target.shared_bytes
            if fits and strips * slices * 32 * _registers(d, x) <= target.registers:
                out.append(x)
    return out


def _shared_bytes(d: Decoded, s: Shape) -> int:
    rows = 0 if d.norm is None else d.norm.rows.size * d.c.red.size * 2 + 1024
    beside = sum(d.strip // TILE * 2 * x.dtype.bytes for x in (d.scale, d.zeros) if x is not None)
    ring = s.stages * s.flight * s.cols // d.strip * s.slices * 32 * (16 + beside)
    return s.slices * -(-d.c.rows.size // ROWS) * ROWS * (s.cols + 8) * 4 + rows + ring


def _registers(d: Decoded, s: Shape) -> int:
    """Of a thread, about: codes, elements of x and sums of so many tiles of rows; of one round it holds no next one."""
    tiles, each = -(-d.c.rows.size // ROWS), _each(d, s)
    sums, x = 8 * d.strip // TILE, 16 if tiles <= HELD else 8
    once = 16 if each == 1 and tiles <= HELD else 0
    ahead = max(s.flight - FLIGHT, 0) * 4 * (1 if each == 1 else 1 + tiles)
    codes, share = (16, 7) if tiles <= HELD else (48, 4)
    return codes + tiles * (sums + x) * share // 4 + (16 if d.zeros is not None else 0) + ahead - once


def _each(d: Decoded, s: Shape) -> int:
    """Rounds of a warp."""
    return -(-(d.c.red.size // DEPTH // s.flight) // (s.slices * s.split))


def _steps(d: Decoded, most: int) -> int:
    """Steps of a round: a power of two that divides the sum, and blocks unless these have more."""
    n, steps, block = most, d.c.red.size // DEPTH, d.block // DEPTH
    while n > 1 and (steps % n or (d.block < d.c.red.size and block % n and n % block)):
        n //= 2
    return n


def cycles(d: Decoded, s: Shape, target: GpuTarget) -> float:
    """Estimated cycles of the busiest multiprocessor."""
    _, m, n, k = d.c.sizes
    tiles = -(-m // ROWS)
    warps = s.cols // d.strip * s.slices
    blocks = n // s.cols * s.split
    together = max(1, min(65536 // (warps * 32 * _registers(d, s)), 2048 // (warps * 32)))
    most = -(-blocks // int(target.sms * SPLITS[s.split]))
    at_once = min(most, together)
    codes, x = s.cols * k // s.split * d.bits // 8, m * k // s.split * 2
    waves, rest = divmod(most, at_once)
    flying = warps * s.flight * max(s.stages, 1) * 512
    each = sum(n * codes / min(FASTEST, n * flying / ROUND) for n in [at_once] * waves + [rest] * (rest > 0))
    memory = max(blocks * codes / (RATE * target.sms), each)
    others = most * (x / X_RATE * (0.5 if s.cols > d.strip else 1) + codes / 512 * BUSY * (1 + tiles) / 8)
    end = s.slices * s.split * tiles * ROWS * s.cols * 4 / 64
    ring, rounds = s.stages > 0 and tiles <= HELD, _each(d, s)
    late: float = RING * ring
    if tiles == 1:
        late += STEP * min(rounds * s.flight, SERIAL) + (LATE * min(rounds - 1, 2) if d.early and not ring else 0)
    return START + late + max(memory, others) + -(-most // at_once) * (LATENCY + end + SHARE * (s.split > 1))


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    d = decoded(problem)
    if d is None:
        raise ScheduleError("the nest is no product of few rows by weights of 4 or 8 bits in 16-bit floats")
    return Writer(d, Shape(**{k: int(v) for k, v in knobs.items()})).build()


def whole(x: Expr) -> Expr:
    """As words of 32 bits: parts of words that a turn of a loop leaves to the next one are taken apart as soon as they
    are read, and so a warp waits for them.
    """
    return x if x.dtype.bits == 32 else call("words", x)


class Writer:
    """The kernel of one product and one shape."""

    def __init__(self, d: Decoded, s: Shape) -> None:
        self.d, self.c, self.s, self.b = d, d.c, s, Builder()
        self.tiles = -(-d.c.rows.size // ROWS)
        self.strips = s.cols // d.strip
        self.warps = self.strips * s.slices
        self.pairs = d.strip // TILE  # of the tensor core's first factor
        self.rounds = d.c.red.size // DEPTH // s.flight
        self.each = -(-self.rounds // (s.slices * s.split))  # rounds of a warp
        self.once = d.block >= d.c.red.size  # is there one scale for each column?
        self.stages = min(s.stages, self.each)
        self.unit = s.flight if self.once else min(s.flight, d.block // DEPTH)  # steps until scales are needed
        if s.cols % d.strip or s.flight % self.unit or d.c.red.size % (DEPTH * s.flight) or d.c.cols.size % s.cols:
            raise ScheduleError(f"steps of {s.flight} and {s.cols} columns do not divide blocks and weights")
        x = d.c.a.value
        assert isinstance(x, Load)
        self.type = x.dtype
        self.rows = None if d.norm is None else Rows(d.norm, self.warps * 32, d.known)
        self.parts = Parts(self.tiles * ROWS, s.cols, s.slices, s.split, self.warps * 32)

    def build(self) -> Kernel:
        d, b, c = self.d, self.b, self.c
        for p in c.kernel.entry.params:
            b.fresh(p.name)
        with (
            b.loop("block", c.cols.size // self.s.cols, "block.x") as self.block,
            cluster(b, self.s.split) as self.part,
        ):
            sums = self.parts.memory(b, f32)
            self.rings = self.shared()
            if self.rows is not None:
                self.rows.shared(b)
            if self.s.resident > 1:
                b.do("resident", self.s.resident)
            with b.loop("w", self.warps, "warp") as w, b.loop("l", 32, "lane") as self.lane:
                self.thread = w * 32 + self.lane
                self.slice = b.let("slice", w // self.strips)
                self.strip = b.let("strip", w % self.strips)
                self.body(sums)
                self.parts.finish(b, sums, self.part, w * 32 + self.lane, self.finish)
        own = {x.name: x for x in (d.codes, d.scale, d.zeros) if x is not None}
        entry = c.kernel.entry
        params = tuple(own.get(p.name, p) for p in entry.params)
        return Kernel((*c.kernel.funcs[:-1], Func(entry.name, params, b.block())), c.kernel.locs)

    def finish(self, row: Expr, col: Expr, tile: Buffer) -> None:
        with self.b.when(row < self.c.rows.size):
            start = self.block * self.s.cols + col
            store_row(self.b, self.c, {}, row, start, tile, (const(0),), LANES)

    def body(self, sums: Buffer) -> None:
        b, s, held = self.b, self.s, self.tiles <= HELD
        first = b.let("first", (self.part * s.slices + self.slice) * self.each)  # round of this warp
        shape = (self.pairs, self.tiles, 4)
        self.total = b.alloc("total", f32, *shape)
        self.acc = self.total if self.once else b.alloc("acc", f32, *shape)
        self.q = b.alloc("q", u32, 1 if self.rings else s.flight, 4)
        self.x = b.alloc("x", u32, s.flight if held else 1, self.tiles, VECTOR // 2)
        self.numbers = {x: b.alloc("n" + x.name, *self.held(x)) for x in self.beside if x not in self.rings}
        self.clear(self.total)
        if self.d.early:
            b.do("pdl_launch")
        else:
            b.do("pdl_wait")
        self.ahead(first)
        if self.rows is not None:
            self.rows.constants(b, self.thread)
        if self.d.early:
            b.do("pdl_wait")
        if self.rows is not None:
            self.rows.run(b, self.thread)
        if held:
            with b.loop("u", s.flight, "unroll") as u:
                self.read_x(first, u, u)
        with b.loop("round", self.each) as turn:
            step = b.let("at", first + turn)
            if self.rings:
                b.do("cp_async_wait", self.stages - 1)
            with b.when(step < self.rounds) if self.uneven else nullcontext():
                with b.loop("v", s.flight // self.unit, "unroll") as v:
                    if not self.once:
                        self.clear(self.acc)
                    with b.loop("u", self.unit, "unroll") as u:
                        at = v * self.unit + u
                        if not held:
                            self.read_x(step, at, const(0))
                        self.multiply(at, v, at if held else const(0), turn)
                        with b.when(turn < self.each - 1):
                            if not self.rings:
                                self.read_codes(step + 1, at)
                            if held:
                                self.read_x(step + 1, at, at)
                    if not self.once:
                        self.scale(v, turn)
                        with b.when(turn < self.each - 1):
                            self.read_numbers(step + 1, v)
            if self.rings:
                with b.when(turn < self.each - self.stages):
                    self.copy(step + self.stages, turn)
                b.do("cp_async_commit")
        if self.once:
            self.scale(const(0), const(0))
        self.leave(sums)

    @property
    def uneven(self) -> bool:
        """Do some warps have a round less?"""
        return self.rounds % (self.s.slices * self.s.split) != 0

    def clear(self, buf: Buffer) -> None:
        b = self.b
        with b.loop("h", self.pairs, "unroll") as h, b.loop("j", self.tiles, "unroll") as j:
            b.store(buf, (h, j, 0), const(0.0, f32), 4)

    def column(self) -> Expr:
        """The number of the warp's strip."""
        return self.block * self.strips + self.strip

    @property
    def vector(self) -> int:
        """Elements of the buffer of codes that are 16 bytes."""
        return 16 * 8 // self.d.codes.dtype.bits

    def shared(self) -> dict[Buffer, Buffer]:
        """Shared memory for rounds of codes, and of what lies beside them in vectors that can be copied: a thread reads
        there what it has copied itself.
        """
        if not self.stages:
            return {}
        per = {self.d.codes: (self.s.flight, self.vector)}
        per |= {x: (self.units, n) for x in self.beside if (n := self.pairs * 2) * x.dtype.bytes in COPIED}
        return {
            x: self.b.alloc("ring", x.dtype, self.stages, many, self.warps * 32, n, space="shared")
            for x, (many, n) in per.items()
            if x is self.d.codes or not self.once
        }

    def ahead(self, first: Expr) -> None:
        """Ask for the first rounds."""
        b = self.b
        if self.rings:
            for k in range(self.stages):
                self.copy(first + k, const(k))
                b.do("cp_async_commit")
        else:
            with b.loop("u", self.s.flight, "unroll") as u:
                self.read_codes(first, u)
        with b.loop("v", self.units, "unroll") as v:
            self.read_numbers(first, v)

    def copy(self, turn: Expr, to: Expr) -> None:
        """Copy a round into its slot of the rings."""
        b, codes = self.b, self.d.codes
        start, slot = minimum(turn, self.rounds - 1) * self.s.flight, to % self.stages
        for x, ring in self.rings.items():
            with b.loop("u", self.s.flight if x is codes else self.units, "unroll") as u:
                if x is codes:
                    source = codes.ref(self.column(), start + u, self.lane, 0, lanes=self.vector)
                else:
                    source = self.beside_at(x, start, u)
                b.do("cp_async", ring.ref(slot, u, self.thread, 0, lanes=source.lanes), source)

    def read_codes(self, turn: Expr, u: Expr) -> None:
        step = minimum(turn, self.rounds - 1) * self.s.flight + u
        codes = self.d.codes.at(self.column(), step, self.lane, 0, lanes=self.vector)
        self.b.store(self.q, (u, 0), whole(codes), 4)

    def read_x(self, turn: Expr, u: Expr, to: Expr) -> None:
        """A vector of each row: lane 4*g + t has elements 8*t and so on of row g of each tile of rows."""
        b, c = self.b, self.c
        k = (minimum(turn, self.rounds - 1) * self.s.flight + u) * (DEPTH // VECTOR) + self.lane % 4
        k = c.red.inside(k, VECTOR, c.a.value)
        with b.loop("j", self.tiles, "unroll") as j:
            row = minimum(j * ROWS + self.lane // 4, c.rows.size - 1)
            here = c.rows.at(c.rows.inside(row, 1, c.a.value))
            made = vector_of(c.a.value, lambda i: {**here, **c.red.at(k, VECTOR, i)}, VECTOR)
            b.store(self.x, (to, j, 0), whole(made), VECTOR // 2)

    @property
    def beside(self) -> tuple[Buffer, ...]:
        """Scales, and zero points."""
        return tuple(x for x in (self.d.scale, self.d.zeros) if x is not None)

    def read_numbers(self, turn: Expr, v: Expr) -> None:
        """Scales and zero points of a block into registers."""
        start = minimum(turn, self.rounds - 1) * self.s.flight
        for x, held in self.numbers.items():
            ref = self.beside_at(x, start, v)
            read = x.at(*ref.idx, lanes=ref.lanes)
            read = read if held.dtype is x.dtype else whole(read)
            self.b.store(held, (v, 0), read, read.lanes)

    def beside_at(self, x: Buffer, start: Expr, v: Expr) -> Ref:
        """Where numbers of a block lie: those of a lane's columns, g, g + 8, g + 16 and g + 24 of 32."""
        n, column = self.pairs * 2, self.column()
        per = WIDTH // self.d.strip  # strips of a row of numbers
        block = const(0) if self.once else (start + v * self.unit) // (self.d.block // DEPTH)
        at = self.lane // 4 * 4 + (column % per * n if per > 1 else 0)
        made = x.ref(block, column // per, at, lanes=n)
        assert isinstance(made, Ref)
        return made

    @property
    def units(self) -> int:
        """Blocks of a round."""
        return 1 if self.once else self.s.flight // self.unit

    def held(self, x: Buffer) -> tuple[DType, int, int]:
        """Type and shape of registers for a lane's numbers of some blocks: words where they fill them."""
        n = self.pairs * 2
        words = x.dtype.bits < 32 and n * x.dtype.bits % 32 == 0
        return (u32, self.units, n * x.dtype.bits // 32) if words else (x.dtype, self.units, n)

    def number(self, x: Buffer, v: Expr, turn: Expr) -> Buffer:
        """Those of unit v, one by one."""
        n = self.pairs * 2
        own = self.b.alloc("own", x.dtype, n)
        if x in self.rings:
            self.b.store(own, (0,), self.rings[x].at(turn % self.stages, v, self.thread, 0, lanes=n), n)
            return own
        held = self.numbers[x]
        read = held.at(v, 0, lanes=value(held.shape[1]) or 1)
        self.b.store(own, (0,), read if held.dtype is x.dtype else call(f"{x.dtype}_words", read), n)
        return own

    def multiply(self, u: Expr, v: Expr, held: Expr, turn: Expr) -> None:
        """32 elements of the sum, in two steps of the tensor core."""
        b, d = self.b, self.d
        w = b.alloc("w", self.type, 2, 8)  # two columns of a lane
        a = b.alloc("a", self.type, 2, 8)  # the tensor core's first factor in both steps
        zeros = self.zero_points(const(0) if self.once else v, turn)
        if self.rings:
            read = self.rings[d.codes].at(turn % self.stages, u, self.thread, 0, lanes=self.vector)
            b.store(self.q, (0, 0), whole(read), 4)
            u = const(0)
        halves = f"halves_{self.type}"
        with b.loop("h", self.pairs, "unroll") as h:
            with b.loop("e", 2, "unroll") as e:
                which = h * 2 + e
                code = self.q.at(u, which)
                if d.bits == 8:
                    code = call(f"{d.codes.dtype}_words", self.q.at(u, which * 2, lanes=2))
                b.store(w, (e, 0), call(halves, code, zeros(which)), 8)
                with b.loop("p", 2, "unroll") as p, b.loop("r", 2, "unroll") as r:
                    b.store(a, (p, r * 4 + e * 2), w.at(e, p * 4 + r * 2, lanes=2), 2)
            with b.loop("j", self.tiles, "unroll") as j:
                low, high = (call(f"{self.type}_words", self.x.at(held, j, at, lanes=2)) for at in (0, 2))
                pairs = (call("zip_low", low, high), call("zip_high", low, high)) if d.bits == 4 else (low, high)
                for half, right in enumerate(pairs):
                    left = a.at(half, 0, lanes=8)
                    b.store(self.acc, (h, j, 0), call("mma_m16n8k16", self.acc.at(h, j, 0, lanes=4), left, right), 4)

    def zero_points(self, v: Expr, turn: Expr) -> Callable[[Expr], Expr]:
        """Of a lane's columns in the block of unit v."""
        z = self.d.zeros
        if z is None:
            return lambda which: const(self.d.zero, i32)
        own = self.number(z, v, turn)
        return lambda which: cast(own[which], i32) + self.d.zero

    def scale(self, v: Expr, turn: Expr) -> None:
        """Sums of a block times its scales to the totals: registers 0 and 1 are of column g, 2 and 3 of g + 8."""
        b, s = self.b, self.number(self.d.scale, v, turn)
        with b.loop("h", self.pairs, "unroll") as h, b.loop("j", self.tiles, "unroll") as j:
            with b.loop("r", 4, "unroll") as r:
                made = self.acc[h, j, r] * cast(s[h * 2 + r // 2], f32)
                b.store(self.total, (h, j, r), made if self.once else self.total[h, j, r] + made)

    def leave(self, sums: Buffer) -> None:
        """A warp's totals in shared memory, rows of x by columns."""
        b, g, t = self.b, self.lane // 4, self.lane % 4
        with b.loop("h", self.pairs, "unroll") as h, b.loop("j", self.tiles, "unroll") as j:
            with b.loop("r", 4, "unroll") as r:
                col = self.strip * self.d.strip + h * TILE + r // 2 * 8 + g
                b.store(sums, (self.slice, j * ROWS + t * 2 + r % 2, col), self.total[h, j, r])
