"""Builder for Winograd F(m x m, 3 x 3) convolutions: from a naive nest to tiles, products, tiles.

    for w in parallel(images * strips * shares):       a strip of `tg` tiles, a share of the output channels
        for each block of channels, tile of the strip:  v[:, :, c, tile] = B^T x B              (m+2)^2 points
        for each `mo` panels of the share:
            for each point, nv panels, mr tiles:        a register tile of products: prod[point, o, tile] = sum over c
                                                        of v * u
            for each panel, tile:                       y = epilogue(A^T prod A)

A point's products are one matrix product [tiles x C] x [C x panel], (m+2)^2 of them in place of the 9 m^2
multiplications of a tile. `v` and `prod` are a thread's own memory and stay in its L2 cache: tg and mo are chosen for
that. The images have no halo: border tiles read with masks, and tiles past the end store what exists of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.templates.register_tiles import step_cycles
from dnnc.ir import encodings
from dnnc.ir.dtype import f32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Var, const, fma, load, maximum, minimum, select, substitute, value, var
from dnnc.ir.loops.stmt import Buffer, Builder, Kernel, Store
from dnnc.ir.op import ContractionForm
from dnnc.ir.winograd import points
from dnnc.passes.lower.form import Contraction
from dnnc.passes.rewrites.winograd import transform
from dnnc.passes.schedule.memory import Vectorizer
from dnnc.passes.schedule.problem import Knobs, Problem, varied

LOCAL = 8 << 20  # bytes that a strip's transformed tiles may take
SPILLED = 0.28  # of the L2 cache's rate: tiles that do not stay in it
ORDER = ("tile",)
Knob = Mapping[str, "int | str"]


@dataclass(frozen=True)
class Winograd:
    """A convolution for this builder: operands, sizes, and a `store` in terms of `place` and the sum, `total`."""

    x: Buffer
    u: Buffer
    tile: int
    begin: tuple[int, int]
    size: tuple[int, int]
    store: Store
    place: tuple[Var, ...]
    total: Var

    @property
    def lanes(self) -> int:
        return _int(self.u.shape[-1])

    @property
    def n(self) -> int:
        return points(self.tile)

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles down and across."""
        return -(-self.size[0] // self.tile), -(-self.size[1] // self.tile)

    @property
    def tiles(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def blocks(self) -> int:
        """Of input channels."""
        return _int(self.u.shape[3])

    @property
    def panels(self) -> int:
        return _int(self.u.shape[2])


def _int(e: Expr) -> int:
    n = value(e)
    assert n is not None
    return n


def winograd_of(problem: Problem) -> Winograd | None:
    """The convolution of a group whose weights are stored for this; None for all others."""
    conv = problem.anchor
    weights = conv.inputs[1] if conv is not None and conv.op.contraction is ContractionForm.CONVOLUTION else None
    if conv is None or weights is None or not isinstance(weights.type.encoding, encodings.Winograd):
        return None
    low = problem.lowered
    buffers = dict(zip(low.params, low.kernel.entry.buffers))
    assert conv.inputs[0] is not None
    pads, size = conv.attrs["pads"] or (0,) * 4, conv.output.type.shape[2:]
    assert isinstance(size[0], int) and isinstance(size[1], int)
    form = problem.form
    assert isinstance(form, Contraction) and len(form.outer) == 5
    place, last = form.outer, form.store
    total = var("sum", f32)
    env: dict[Expr, Expr] = {form.acc[0]: total}
    lanes = weights.type.encoding.block(0)
    wide = Vectorizer(place[-1], const(0), lanes)
    wide.lets[total] = whole = var("sum", f32, lanes=lanes)
    store = wide.store(Store(last.buf, last.idx, substitute(last.value, env)))
    return Winograd(
        buffers[conv.inputs[0]],
        buffers[weights],
        weights.type.encoding.m,
        (pads[0], pads[1]),
        (size[0], size[1]),
        store,
        place[:-1],
        whole,
    )


# --- choice -----------------------------------------------------------------------------------------------------------


def candidates(problem: Problem, target: CpuTarget) -> list[Knobs]:
    w = winograd_of(problem)
    return [] if w is None else _ranked(w, target, (1, 2, 4, 8), (1, 2, 3), 2)[:6]


def space(problem: Problem, target: CpuTarget) -> list[Knobs]:
    """Return strips, shares and register tiles by estimate; the best with other blocks, unrolling, prefetching."""
    w = winograd_of(problem)
    if w is None:
        return []
    every = _ranked(w, target, tuple(range(1, 17)), (1, 2, 3, 4, 6), 6)[:120]
    out = list(every)
    for k in every[:12]:
        knobs = {name: int(v) for name, v in k}
        out += [varied(k, mo=mo) for mo in range(knobs["nv"], knobs["mo"], knobs["nv"]) if knobs["mo"] % mo == 0]
        out += [varied(k, ku=ku) for ku in (1, 2, 4, 8) if w.lanes % ku == 0]
        out.append(varied(k, pf=0))
    return out


def _ranked(w: Winograd, target: CpuTarget, shares: Sequence[int], wide: Sequence[int], best: int) -> list[Knobs]:
    """Return strips and shares that fit, with `best` register tiles of up to so many panels, by estimated time."""
    images = value(w.store.buf.shape[0]) or 1
    scored: list[tuple[float, int, int, int, int]] = []
    for share in (s for s in shares if w.panels % s == 0):
        for tg in sorted({-(-w.tiles // s) for s in range(1, w.tiles + 1)}, reverse=True):
            if w.n**2 * tg * 4 * w.lanes * (w.blocks + w.panels // share) <= LOCAL or tg == 1:
                found = _register_tiles(w, tg, share, target, wide)[:best]
                scored += [(_cycles(w, tg, share, mr, nv, images, target), tg, share, mr, nv) for mr, nv in found]
    return [
        (
            ("tile", w.tile),
            ("tg", tg),
            ("share", share),
            ("mo", w.panels // share),
            ("mr", mr),
            ("nv", nv),
            ("ku", 2),
            ("pf", 1),
        )
        for _, tg, share, mr, nv in sorted(scored)
    ]


def _register_tiles(w: Winograd, tg: int, share: int, target: CpuTarget, wide: Sequence[int]) -> list[tuple[int, int]]:
    """(mr, nv): tiles and panels of the register tiles for a strip, the best first."""
    scored = []
    for nv in (n for n in wide if w.panels // share % n == 0):
        for mr in range(1, min(min(target.registers - 4, target.registers - nv - 1) // nv, tg) + 1):
            scored.append((-(-tg // mr) * step_cycles(mr, nv, target) / nv, -mr * nv, mr, nv))
    return [(mr, nv) for _, _, mr, nv in sorted(scored)]


def _cycles(w: Winograd, tg: int, share: int, mr: int, nv: int, images: int, target: CpuTarget) -> float:
    """Estimated time of all that one thread does, its strips one after the other."""
    panels, square = w.panels // share, w.n**2
    rounds = -(-images * -(-w.tiles // tg) * share // target.threads)
    tiles_ = -(-tg // mr) * panels / nv
    products = square * tiles_ * (step_cycles(mr, nv, target) * w.blocks * w.lanes + mr * nv + 20)
    weights = square * panels * w.blocks * w.lanes**2 * 4
    held = square * tg * (w.blocks + panels) * w.lanes * 4
    moved = held / (SPILLED * target.rates.l2) if held > target.l2 else 0.0
    return rounds * (
        max(products, weights / target.rates.memory)
        + tg * (w.blocks + panels) * transform(w.tile, target.rates)
        + moved
    )


# --- the kernel -------------------------------------------------------------------------------------------------------


def apply(problem: Problem, knobs: Knob, target: CpuTarget) -> Kernel:
    w = winograd_of(problem)
    assert w is not None
    k = {name: int(v) for name, v in knobs.items()}
    strips_, share = -(-w.tiles // k["tg"]), k["share"]
    if w.panels % (share * k["mo"]) or k["mo"] % k["nv"]:
        raise ScheduleError(f"{w.panels} panels are no {share} shares of blocks of {k['mo']}, {k['nv']} at a time")
    b = Builder()
    with b.loop("w", w.store.buf.shape[0] * (strips_ * share), "parallel") as item:
        image, rest = item // (strips_ * share), item % (strips_ * share)
        done = (
            rest // share * k["tg"]
        )  # tiles of the strips before; where no whole strip is left, the last one begins earlier
        first = b.let("first", minimum(done, w.tiles - k["tg"]))
        v = b.alloc("v", f32, w.n, w.n, w.blocks, k["tg"], w.lanes, space="local")
        products = b.alloc("prod", f32, w.n, w.n, k["mo"], k["tg"], w.lanes, space="local")
        _images(b, w, v, image, first)
        count = w.panels // share
        with b.loop("ob", count // k["mo"]) as ob:
            at = rest % share * count + ob * k["mo"]
            _multiply(b, w, v, products, at, k)
            _results(b, w, products, image, first, maximum(done - (w.tiles - k["tg"]), 0), at)
    return problem.kernel.with_body(b.block())


def _images(b: Builder, w: Winograd, v: Buffer, image: Expr, first: Expr) -> None:
    """Transform the tiles of a strip."""
    rows, columns = (_int(d) for d in w.x.shape[2:4])
    with b.loop("c", w.blocks) as c, b.loop("t", v.shape[3]) as t:
        row, column = _corner(b, w, first + t)
        row, column = row - w.begin[0], column - w.begin[1]
        part = b.alloc("part", f32, w.n, w.n, w.lanes)

        def read(y: Expr, x: Expr) -> Expr:
            return load(w.x, (image, c, y, x, 0), w.lanes)

        def read_masked(y: Expr, x: Expr) -> Expr:
            inside = (const(0) <= y) & (y < rows) & (const(0) <= x) & (x < columns)
            y, x = minimum(maximum(y, 0), rows - 1), minimum(maximum(x, 0), columns - 1)
            return load(w.x, (image, c, y, x, 0), w.lanes, select(inside, const(w.lanes), const(0)))

        def down(fetch: Callable[[Expr, Expr], Expr]) -> None:
            with b.loop("j", w.n, "unroll") as j:
                for i, e in enumerate(into_points(b, [fetch(row + i, column + j) for i in range(w.n)])):
                    b.store(part, (i, j, 0), e, w.lanes)

        inside = (const(0) <= row) & (row + w.n <= rows) & (const(0) <= column) & (column + w.n <= columns)
        if value(inside) is None:
            b.branch(inside, lambda: down(read), lambda: down(read_masked))
        else:  # an image of few tiles has only inner ones, or none
            down(read if value(inside) else read_masked)
        with b.loop("i", w.n, "unroll") as i:
            for j, e in enumerate(into_points(b, [part.at(i, j, 0, lanes=w.lanes) for j in range(w.n)])):
                b.store(v, (i, j, c, t, 0), e, w.lanes)


def _corner(b: Builder, w: Winograd, tile: Expr) -> tuple[Expr, Expr]:
    """The first row and column of the results of a tile."""
    at = b.let("at", tile)
    return b.let("row", at // w.grid[1] * w.tile), b.let("col", at % w.grid[1] * w.tile)


def _multiply(b: Builder, w: Winograd, v: Buffer, products: Buffer, panel: Expr, k: Mapping[str, int]) -> None:
    """For each point the product of the strip's tiles and `mo` panels of weights, from `panel` on."""
    mr, nv, ku, lanes = k["mr"], k["nv"], k["ku"], w.lanes
    every = -(
        -nv * ku // -(-k["tg"] // mr)
    )  # lines of the next panels at each step, so that they are all asked for during this product
    with (
        b.loop("pr", w.n) as pr,
        b.loop("pc", w.n) as pc,
        b.loop("jo", k["mo"] // nv) as jo,
        b.loop("to", -(-k["tg"] // mr)) as to,
    ):
        start = minimum(to * mr, k["tg"] - mr)
        acc = b.alloc("acc", f32, mr, nv, lanes)
        with b.loop("im", mr, "unroll") as im, b.loop("jn", nv, "unroll") as jn:
            b.store(acc, (im, jn, 0), const(0.0, f32), lanes)
        with b.loop("k", w.blocks) as c, b.loop("ko", lanes // ku) as ko:
            for j in range(every if k["pf"] else 0):  # the next panels wait in L2 when their turn comes
                line = ((to * w.blocks + c) * (lanes // ku) + ko) * every + j
                b.do("prefetch", w.u.ref(pr, pc, panel + (jo + 1) * nv, 0, line, 0))
            with b.loop("ku", ku, "unroll") as kq, b.loop("im", mr, "unroll") as im, b.loop("jn", nv, "unroll") as jn:
                ch = ko * ku + kq
                weight = w.u.at(pr, pc, panel + jo * nv + jn, c, ch, 0, lanes=lanes)
                b.store(
                    acc, (im, jn, 0), fma(v[pr, pc, c, start + im, ch], weight, acc.at(im, jn, 0, lanes=lanes)), lanes
                )
        with b.loop("im", mr, "unroll") as im, b.loop("jn", nv, "unroll") as jn:
            b.store(products, (pr, pc, jo * nv + jn, start + im, 0), acc.at(im, jn, 0, lanes=lanes), lanes)


def _results(b: Builder, w: Winograd, products: Buffer, image: Expr, first: Expr, skip: Expr, panel: Expr) -> None:
    """Transform products back, finish and store, but for the first `skip` tiles, which others have stored."""
    with b.loop("o", products.shape[2]) as o, b.loop("t", products.shape[3], lo=skip) as t:
        row, column = _corner(b, w, first + t)
        part = b.alloc("part", f32, w.tile, w.n, w.lanes)
        with b.loop("j", w.n, "unroll") as j:
            for i, e in enumerate(from_points(b, [products.at(i, j, o, t, 0, lanes=w.lanes) for i in range(w.n)])):
                b.store(part, (i, j, 0), e, w.lanes)
        with b.loop("r", w.tile, "unroll") as r, b.when(row + r < w.size[0]):
            for q, e in enumerate(from_points(b, [part.at(r, j, 0, lanes=w.lanes) for j in range(w.n)])):
                with b.when(column + q < w.size[1]):
                    _store(b, w, (image, panel + o, row + r, column + q), e)


def _store(b: Builder, w: Winograd, place: tuple[Expr, ...], total: Expr) -> None:
    """Finish a vector of sums and store it."""
    env: dict[Expr, Expr] = {**dict(zip(w.place, place)), w.total: total}
    s = w.store
    b.emit(Store(s.buf, tuple(substitute(i, env) for i in s.idx), substitute(s.value, env), s.lanes, s.limit))


# --- transforms along one axis ----------------------------------------------------------------------------------------


def into_points(b: Builder, x: Sequence[Expr]) -> list[Expr]:
    """B^T x, with sums that two points share computed once."""
    d = [b.let(f"d{k}", e) for k, e in enumerate(x)]
    if len(d) == 4:
        return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]]
    p, q = b.let("p", fma(d[2], -4.0, d[4])), b.let("q", fma(d[1], -4.0, d[3]))
    s, t = b.let("s", d[4] - d[2]), b.let("t", d[3] - d[1])
    first, last = fma(d[0], 4.0, fma(d[2], -5.0, d[4])), fma(d[1], 4.0, fma(d[3], -5.0, d[5]))
    return [first, p + q, p - q, fma(t, 2.0, s), fma(t, -2.0, s), last]


def from_points(b: Builder, x: Sequence[Expr]) -> list[Expr]:
    """A^T x"""
    e = [b.let(f"e{k}", v) for k, v in enumerate(x)]
    if len(e) == 4:
        return [e[0] + e[1] + e[2], e[1] - e[2] - e[3]]
    p, q, s, t = b.let("p", e[1] + e[2]), b.let("q", e[1] - e[2]), b.let("s", e[3] + e[4]), b.let("t", e[3] - e[4])
    return [e[0] + p + s, fma(t, 2.0, q), fma(s, 4.0, p), fma(t, 8.0, q) + e[5]]
