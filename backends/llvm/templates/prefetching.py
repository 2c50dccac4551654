"""What the contraction recipe asks memory for ahead: the next panels of weights, and the next tile's pixels."""

from __future__ import annotations

from collections.abc import Mapping

from dnnc.backends.llvm.templates.register_tiles import Nest
from dnnc.ir.expr import Expr, const, minimum, substitute, unwrap, value
from dnnc.ir.loops.stmt import accesses
from dnnc.ir.types import product
from dnnc.passes.schedule.memory import prefetch
from dnnc.passes.schedule.problem import Problem
from dnnc.passes.schedule.state import Schedule

PREFETCHED = (
    6  # rows at least: with fewer the panels are read as fast as they come, and asking for them ahead only takes time
)


def prefetch_next_panel(
    s: Schedule, problem: Problem, knobs: Mapping[str, int | str], outer: list[str], nest: Nest, tag: str
) -> None:
    """Prefetch all lines of the next panels into L2 at each step of `ko`, spread over this panel's tiles."""
    weights = problem.anchor.inputs[1] if problem.anchor is not None else None
    k = problem.lowered.params.index(weights) if weights in problem.lowered.params else -1
    if k < 0 or weights is None or weights.type.row_major:
        return
    buf, nv, ku = s.kernel.entry.buffers[k], int(knobs["nv"]), int(knobs["ku"])
    jo = outer.index("jo")
    tile, tiles_ = _position(s, [n + tag for n in (*outer[jo + 1 :], "po")])
    taps = [n + tag for n in nest.reduction[1:] if s.has(n + tag)]
    kc = int(knobs.get("kc", 0))
    if nest.block and kc:
        return  # a stretch of it is read many times before the next one
    if isinstance(tiles_, int) and tiles_ * int(knobs["mr"]) < PREFETCHED:
        return
    # elements of a panel: the first axis of filters counts them, of a matrix the third from the end
    size, width = product(weights.type.physical[1 if nest.panel else -2 :]), value(const(buf.shape[-1]))
    if value(const(size)) == 0:
        return  # a sum of nothing
    column, columns = _position(s, [n + tag for n in outer[:jo]])
    # panels in front of which such a loop goes on
    each = product(weights.type.physical[: 1 if nest.panel else -2]) // columns
    first = (column * each + s.loop("jo" + tag).var * nv) * size
    known = (
        tiles_ if isinstance(tiles_, int) and not tag else 0
    )  # the rows that fill no tile ask again for some at most
    if kc and width:  # the next stretch of each panel
        later = (s.loop("ks" + tag).var + 1) * kc
        every = -(-ku // known) if known else ku
        line = (tile * (kc // ku) + s.loop("ko" + tag).var) * every
        line = later + minimum(line // _repeated(tiles_, ku), const(kc))
        places = [first + j * size + (line + k) * width for j in range(nv) for k in range(every)]
    else:
        step, steps = _step_of(s, taps, tag) if nest.block else _position(s, [*taps, "ko" + tag])
        every = -(-nv * ku // known) if known else 4
        line = (tile * steps + step) * every // _repeated(tiles_, nv * ku)
        if not isinstance(tiles_, int) and isinstance(size, int) and width:
            line = line % (nv * size // width)  # however many tiles there are, this panel and not those behind it
        places = [first + nv * size + (line + k) * buf.shape[-1] for k in range(every)]
    for at in places:
        s.apply(prefetch, "ko" + tag, buf.name, (*[const(0)] * (len(buf.shape) - 1), at))


def _repeated(tiles_: int | Expr, lines: int) -> int:
    """How many steps in turn ask for the same lines, a power of two: many tiles pass while one set of lines comes.

    lines: those of a step of one tile.
    """
    return 1 << max((tiles_ // lines).bit_length() - 1, 0) if isinstance(tiles_, int) else 1


def prefetch_next_pixels(s: Schedule, problem: Problem, mr: int) -> None:
    """Prefetch the next tile's pixels at each block of channels, whose distant lines no CPU follows."""
    image = problem.anchor.inputs[0] if problem.anchor is not None else None
    k = problem.lowered.params.index(image) if image in problem.lowered.params else -1
    if k < 0:
        return
    buf, po, im = s.kernel.entry.buffers[k], s.loop("po").var, s.loop("im_1").var
    inner = {s.loop(n).var: const(0) for n in ("ko", "ku", "jn_1", *problem.lowered.reductions[0][1:]) if s.has(n)}
    (read, *_) = [x for x in accesses(s.loop("rb").body) if x.buf is buf]
    for j in range(mr):
        at = tuple(substitute(i, {**inner, po: po + 1, im: const(j)}) for i in read.idx)
        s.apply(prefetch, "rb", buf.name, at)


def _step_of(s: Schedule, taps: list[str], tag: str) -> tuple[Expr, Expr | int]:
    """The place of a step among those of all blocks, and how many there are; the last block may have fewer."""
    blocks, ko = s.loop("rb" + tag), s.loop("ko" + tag)
    full, last = (substitute(ko.extent, {blocks.var: b}) for b in (const(0), blocks.extent - 1))
    tap, count = _position(s, taps)
    return (blocks.var * count) * full + tap * ko.extent + ko.var, unwrap(((blocks.extent - 1) * full + last) * count)


def _position(s: Schedule, names: list[str]) -> tuple[Expr, Expr | int]:
    """The place of an iteration in a nest, counted in order, and how many there are."""
    at: Expr = const(0)
    count: Expr = const(1)
    for n in names:
        loop = s.loop(n)
        at, count = at * loop.extent + loop.var, count * loop.extent
    return at, unwrap(count)
