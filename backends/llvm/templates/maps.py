"""Recipe for groups without reductions: element-wise chains and data movement, one pass over memory.

Loops are cut at the boundaries of concatenations and borders, and into the digits of an index that is
taken apart. Adjacent loops that walk memory in order become one loop; the innermost becomes vectors (loads that are not
unit stride gather), its tail a limit on the accesses, or where it is long a loop of its own; the outermost is shared
among the threads. Where loads run along one loop and the stores along another, square tiles are transposed in
registers: 2 to 3 times the speed of gathers. A few rows whose elements take turns are zipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.pool import SERIAL_BELOW
from dnnc.backends.llvm.templates.common import fused, offsets, stride, try_fuse, worth
from dnnc.ir.bounds import bounds, nonneg
from dnnc.ir.dtype import f32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Op, Var, const, free, substitute, value, walk
from dnnc.ir.loops.stmt import Block, For, Kernel, Store, accesses, exprs, stored, walk_stmts
from dnnc.passes.lower.expand import EXPANSIONS
from dnnc.passes.schedule.index_set_splitting import boundaries, crossings, cut, digits, turns
from dnnc.passes.schedule.loops import all_single, annotate, fuse, reorder, single, split
from dnnc.passes.schedule.memory import vectorize
from dnnc.passes.schedule.problem import Knobs, Problem, varied
from dnnc.passes.schedule.state import Schedule
from dnnc.passes.schedule.transposition import transpose_tile, zip_tile

MAX_PARTS = 12  # nests into which boundaries cut one: each is code of its own
FEW = (2, 4, 8)  # rows that are zipped
LONG = 1 << 16  # elements of a loop whose last few, fewer than a vector, are worth code of their own
LOCKSTEP = 4  # so many times the lanes of a register, and more, are vectors in lockstep
MANY_FUNCTIONS = 2  # from so many on vectors go in lockstep
FILLED = 16  # steps from which on the lanes that the last one leaves idle do not matter
GRAIN = 8  # pieces that each thread gets, at least, where there are so many
FEW_ELEMENTS, MANY = (
    2048,
    1 << 20,
)  # elements times operations for which one thread is certainly fast enough, or certainly not
RUN = 256  # bytes of a row that are read one after the other where vectors of other rows could come between them
PAIR = 2  # tiles side by side of the rows that are read: two cache lines, which CPUs bring together, or one
ORDER: tuple[str, ...] = ()  # nothing is summed


def candidates(problem: Problem, target: CpuTarget) -> list[Knobs]:
    if problem.kind != "map":
        return []
    lanes = lanes_for(problem, target)
    long = target.registers >= 32 and functions(problem) >= MANY_FUNCTIONS
    return [(("lanes", lanes * LOCKSTEP if long else lanes), ("unroll", 4))]


def space(problem: Problem, target: CpuTarget) -> list[Knobs]:
    """Vectors, some at a time, in lockstep too; untransposed; one thread or all, in larger or smaller pieces."""
    out: list[Knobs] = []
    for first in candidates(problem, target):
        lanes = lanes_for(problem, target)
        plain = varied(first, lanes=lanes)
        out += [varied(first, lanes=n) for n in ((lanes * LOCKSTEP, lanes) if functions(problem) else ())]
        out += [varied(plain, unroll=n) for n in (1, 2, 8)]
        out += [varied(first, **k) for k in (*_grains(problem), {"turn": 0})]
        out += [varied(plain, lanes=n, unroll=u) for n in (lanes // 2, 2 * lanes) if n > 1 for u in (1, 2, 4, 8)]
        out += [varied(plain, unroll=n, **k) for n in (1, 2, 8) for k in (*_grains(problem), {"turn": 0})]
        out += [varied(plain, lanes=lanes // 2, unroll=4, **k) for k in _grains(problem) if lanes > 2]
    return out


def shares(problem: Problem) -> list[dict[str, int]]:
    """Settings under which one thread does all, or all do, where the default is another one."""
    work = problem.form.elements
    if not isinstance(work, int) or not FEW_ELEMENTS <= work < MANY:
        return []
    return [{"serial": int(work >= SERIAL_BELOW)}]


def _grains(problem: Problem) -> list[dict[str, int]]:
    """How finely the work is shared, beside the default."""
    work = problem.form.elements
    return [*shares(problem), *({"grain": n} for n in (1, 2, 32) if not isinstance(work, int) or work >= SERIAL_BELOW)]


def functions(problem: Problem) -> int:
    """How many functions for which targets have arithmetic alone a kernel computes of each element."""
    found = {
        x
        for st in walk_stmts(problem.kernel.entry.body)
        for e in exprs(st)
        for x in walk(e)
        if isinstance(x, Op) and x.dtype is f32 and x.name in EXPANSIONS
    }
    return len(found)


def lanes_for(problem: Problem, target: CpuTarget) -> int:
    """Lanes of the widest type in the kernel: all values of a statement have the same number of lanes.

    What does not change along a long innermost loop, such as the index of a row that is gathered, is no vector.
    """
    buffers, loops = problem.kernel.entry.buffers, problem.lowered.out_loops
    sizes = {b: b.dtype.computed.bytes for b in buffers}
    narrow = max(target.vector_bits // 32, 2)
    if loops and problem.kind == "map" and max(sizes.values(), default=4) > 4:
        inner = next(x for x in walk_stmts(problem.kernel.entry.body) if isinstance(x, For) and x.var.name == loops[-1])
        if _least(inner) >= narrow:
            varying = {a.buf for a in accesses(inner.body) if any(inner.var in free(i) for i in a.idx)}
            sizes = {b: n for b, n in sizes.items() if b in varying or b in stored(inner.body)}
    return max(target.vector_bits // 8 // max([4, *sizes.values()]), 2)


def apply(problem: Problem, knobs: Mapping[str, int | str], target: CpuTarget) -> Kernel:
    s = Schedule(problem.kernel)
    names = list(problem.lowered.out_loops)
    if not names or any(s.extent(n) == 0 for n in names):
        return s.done()
    s.apply(single, *(n for n in names[:-1] if s.extent(n) == 1)).collapse()
    names = [n for n in names if s.has(n)]
    few = int(knobs.get("grain", GRAIN)) * target.threads
    lanes, lockstep = int(knobs["lanes"]), 1
    if lanes >= LOCKSTEP * (widest := lanes_for(problem, target)):
        lanes, lockstep = widest, lanes // widest
    chains = at_boundaries(s, names, lanes, few)
    for k, chain in enumerate(chains):
        shared = [n for other in chains[:k] + chains[k + 1 :] for n in other]
        own = [n for n in chain if n not in shared]
        nest(s, own, f"{k or ''}", lanes, int(knobs["unroll"]), lockstep, bool(knobs.get("turn", 1)))
    if problem.lowered.dims:  # proofs about symbolic sizes have no room for variables that are numbers
        s.apply(all_single)
    share(s, worth(knobs, problem.form.elements), few)
    return s.done()


def nest(s: Schedule, names: list[str], tag: str, lanes: int, unroll: int, lockstep: int, turn: bool) -> None:
    """Schedule a perfect nest by its loops; new loops' names end with the tag. `turn`: tiles may be transposed."""
    names = fuse_rows(s, names, tag)
    mark = s.mark()
    if turn and zipped(s, split_digits(s, names, lanes, FEW), tag, lanes):
        return
    s.restore(mark)
    if turn and transposed(s, split_digits(s, names, lanes), tag, lanes):
        return
    s.restore(mark)
    made = joined(s, split_digits(s, names, lanes), tag, lanes)
    vectorized(s, made[-1], lanes, unroll, lockstep)
    if len(made) > 1 and s.has(made[-1] + "o") and s.extent(made[-1] + "o") == 1:
        if not runs(s, made, lanes, tag):
            unrolled(s, made[-2], unroll)


def share(s: Schedule, work: int | Expr, few: int) -> None:
    """Share all nests among the threads, if the work is worth it, or none."""
    nests = [x for x in s.body if isinstance(x, For) and x.kind == "range"]
    if len(nests) < len(s.body) or (isinstance(work, int) and work < SERIAL_BELOW):
        return
    mark = s.mark()
    if not all(shared(s, loop, few, len(nests) == 1) for loop in nests):
        s.restore(mark)


def shared(s: Schedule, loop: For, few: int, alone: bool) -> bool:
    """Make a nest parallel, its outermost loops fused up to the one by which there are `few` iterations."""
    names, count = [loop.var.name], _least(loop)
    while count < few and len(loop.body) == 1 and isinstance(inner := loop.body[0], For) and inner.kind == "range":
        vectors = not any(isinstance(x, For) for x in inner.body)
        if value(inner.extent) is None and (count >= few // 2 or vectors):
            break  # an index that is divided by a size costs more than a vector
        loop, count = inner, count * _least(inner)
        names.append(loop.var.name)
    while names:
        mark = s.mark()
        made = fused(s, names)
        try:
            if not alone or s.extent(made) != 1:
                s.apply(annotate, "parallel", made)
            return True
        except ScheduleError:  # the loops as one hide that the parts in it write different elements
            s.restore(mark)
            names.pop()
    return False


def _least(loop: For) -> int:
    """Iterations of a loop, of a symbolic one the least; at least 1."""
    return max(bounds(const(loop.extent))[0] or 1, 1)


def at_boundaries(s: Schedule, names: list[str], lanes: int, few: int) -> list[list[str]]:
    """Cut loops at their boundaries; the loops of each part, outermost first."""
    chains, k = [names], 0
    while k < len(names):
        done: list[list[str]] = []
        for j, chain in enumerate(chains):
            done += _parts(
                s, chain, k, f"_{len(done) + len(chains) - j}", MAX_PARTS - len(done) - (len(chains) - j), lanes, few
            )
        k += len(done) == len(chains)  # in a part other boundaries may be known: of minima of maxima
        chains = done
    return chains


def _parts(s: Schedule, chain: list[str], k: int, tag: str, room: int, lanes: int, few: int) -> list[list[str]]:
    """The chains that come of cutting loop k of a chain, at most `room` more of them."""
    loop = s.loop(chain[k])
    n = value(loop.extent)
    short = k == len(chain) - 1 and n is not None and n <= lanes
    places = {*boundaries(loop, both=short), *(crossings if short else turns)(loop, offsets(loop.body))}
    size = digits(loop, offsets(loop.body))
    if n is not None and size is not None and n % size:
        places.add(n - n % size)
    if n is not None and not short and len(places) > room:
        places = set(best_cuts(sorted(places), n, room))
    if not places or len(places) > room:
        return [chain]
    suffixes = ["", *(f"{tag}{chr(97 + j)}" for j in range(len(places)))]
    mark = s.mark()
    try:
        around = [m for m in chain[:k] if s.has(m) and _encloses(s, m, chain[k])]
        counts = [value(s.loop(m).extent) for m in around]
        turned = around if k < len(chain) - 1 and None not in counts and math.prod(c or 0 for c in counts) < few else []
        if turned:  # too few iterations around to be shared: each part gets loops of its own
            s.apply(reorder, chain[k], *turned)
        s.apply(cut, chain[k], tuple(sorted(places)), tuple(suffixes))
        s.collapse()
        for x in suffixes if turned else ():
            s.apply(reorder, *(m + x for m in turned), chain[k] + x)
    except ScheduleError:
        s.restore(mark)
        return [chain]
    first = k - len(turned)
    return [[*chain[:first], *(m + x for m in chain[first:])] for x in suffixes]


def best_cuts(places: Sequence[int], n: int, room: int) -> list[int]:
    """At most `room` of the boundaries of n iterations, which lie at `places`, in order.

    Each iteration tests the boundaries that are left in its part. The part with most tests is cut next, at the boundary
    that leaves the fewest.
    """

    def tests(part: tuple[int, int, tuple[int, ...]]) -> int:
        return (part[1] - part[0]) * len(part[2])

    parts = [(0, n, tuple(places))]
    cuts: list[int] = []
    while len(cuts) < room and tests(worst := max(parts, key=tests)):
        lo, hi, inner = worst
        halves = [((lo, x, inner[:k]), (x, hi, inner[k + 1 :])) for k, x in enumerate(inner)]
        pair = min(halves, key=lambda p: tests(p[0]) + tests(p[1]))
        parts.remove(worst)
        parts += pair
        cuts.append(pair[0][1])
    return sorted(cuts)


def _encloses(s: Schedule, outer: str, inner: str) -> bool:
    """Is a loop perfectly nested in another one?"""
    loop = s.loop(outer)
    while loop.var.name != inner:
        if len(loop.body) != 1 or not isinstance(loop.body[0], For):
            return False
        loop = loop.body[0]
    return True


def fuse_rows(s: Schedule, names: list[str], tag: str = "") -> list[str]:
    """Fuse from the innermost pair outwards while that keeps the accesses simple; returns the loops that are left."""
    k = 0
    tag = tag and "_" + tag
    while len(names) > 1 and try_fuse(s, names[-2], names[-1], f"e{k}{tag}"):
        names = [*names[:-2], f"e{k}{tag}"]
        k += 1
    for at in range(len(names) - 2, 0, -1):
        if try_fuse(s, names[at - 1], names[at], f"e{k}{tag}"):
            names = [*names[: at - 1], f"e{k}{tag}", *names[at + 1 :]]
            k += 1
    return names


def split_digits(s: Schedule, names: list[str], lanes: int, few: tuple[int, ...] = ()) -> list[str]:
    """Split loops into the digits of their variable; the innermost only for whole vectors or `few` rows."""
    out: list[str] = []
    for name in names:
        loop = s.loop(name)
        size = digits(loop, offsets(loop.body))
        fits = (
            size is not None
            and value(loop.extent % size) == 0
            and (name != names[-1] or size % lanes == 0 or size in few)
        )
        if size is None or not fits:
            out.append(name)
            continue
        s.apply(split, name, size, (name + "d", name + "m"))
        out += [name + "d", name + "m"]
    return out


def joined(s: Schedule, names: list[str], tag: str, lanes: int) -> list[str]:
    """Join a short innermost loop with its outer one, where stores stay in order; its loads then gather."""
    if len(names) < 2 or not linear(s.loop(names[-1]).body, [s.loop(m).var for m in names[-2:]]):
        return names
    n, m, made = s.extent(names[-1]), s.extent(names[-2]), f"j{tag}"
    if not isinstance(n, int) or not isinstance(m, int) or n * 4 > lanes or n * m % lanes:
        return names
    mark = s.mark()
    try:
        s.apply(fuse, *names[-2:], made).collapse()
        loop = s.loop(made)
        if (
            len(loop.body) != 1
            or not isinstance(st := loop.body[0], Store)
            or stride(st.idx[-1], loop.var) is not const(1)
        ):
            raise ScheduleError(f"{made} does not store in order")
    except ScheduleError:
        s.restore(mark)
        return names
    return [*names[:-2], made]


def linear(b: Block, vs: list[Var]) -> bool:
    """Does a block hold one store, and use loop variables in addresses alone, in sums?"""
    if (
        len(b) != 1
        or not isinstance(b[0], Store)
        or any(isinstance(x, Op) and free(x) & set(vs) for e in offsets(b) for x in walk(e))
    ):
        return False
    loads = {x: const(0, x.dtype) for x in walk(b[0].value) if isinstance(x, Load)}
    return free(substitute(b[0].value, loads)).isdisjoint(vs)


def unrolled(s: Schedule, name: str, count: int) -> None:
    """Several iterations of the loop around a single vector at a time."""
    n = s.extent(name)
    if isinstance(n, int) and 1 < n <= count:
        s.apply(annotate, "unroll", name)
    elif isinstance(n, int) and n % count == 0:
        s.apply(split, name, count, (name + "q", name + "u")).apply(annotate, "unroll", name + "u")


def runs(s: Schedule, names: list[str], lanes: int, tag: str) -> bool:
    """Read a line's neighbours in a row where each vector's loads go on along a loop further out, as a matrix does that
    becomes panels: `for p: for k: y[p, k, 0:+16] = x[k, 16*p:+16]`  ->  some p at a time inside of k.
    """
    row, inner = names[-1] + "o", s.loop(names[-2])
    loads = [x.buf.offset(x.idx) for x in accesses(s.loop(row).body) if x.buf.space == "global"]
    moving = [e for e in loads if inner.var in free(e)]
    for name in names[:-2]:
        v, n = s.loop(name).var, s.extent(name)
        along = [e for e in moving if value(stride(e, v)) == lanes and (value(stride(e, inner.var)) or 0) > lanes]
        if not along or not isinstance(n, int) or n < 2:
            continue
        mark = s.mark()
        try:
            s.apply(split, name, min(n, RUN // (lanes * 4)), (f"{name}q", f"n{tag}"), tail="overlap")
            s.apply(reorder, f"{name}q", *names[names.index(name) + 1 : -1], f"n{tag}", row)
            s.apply(annotate, "unroll", f"n{tag}")
        except ScheduleError:
            s.restore(mark)
            continue
        return True
    return False


def transposed(s: Schedule, names: list[str], tag: str, lanes: int) -> bool:
    """Square tiles where some load runs along an outer loop and the store along the innermost."""
    column = s.loop(names[-1])
    across = [e for e in offsets(column.body) if column.var in free(e) and stride(e, column.var) is not const(1)]
    for row in reversed(names[:-1]):
        v = s.loop(row).var
        if not any(v in free(e) and stride(e, v) is const(1) for e in across):
            continue
        mark = s.mark()
        try:
            rest = [n for n in names[:-1] if n != row]
            outer, inner = [], []
            for name, part in ((row, "r"), (names[-1], "c")):
                n = s.extent(name)
                if (n < 2) if isinstance(n, int) else value(n % lanes) != 0:
                    raise ScheduleError(f"{name} is too short for a tile, or has a tail that nobody knows")
                if isinstance(n, int) and n <= lanes:
                    inner.append(name)
                    continue
                tail = "overlap" if isinstance(n, int) else "guard"
                s.apply(split, name, lanes, (f"{part}o{tag}", f"{part}v{tag}"), tail=tail)
                outer.append(f"{part}o{tag}")
                inner.append(f"{part}v{tag}")
            if len(outer) == 2 and nonneg(const(s.extent(outer[0])) - PAIR):
                s.apply(split, outer[0], PAIR, (f"rq{tag}", f"rn{tag}"), tail="overlap")
                outer = [f"rq{tag}", outer[1], f"rn{tag}"]
            s.apply(reorder, *rest, *outer, *inner).apply(transpose_tile, *inner, lanes)
        except ScheduleError:
            s.restore(mark)
            continue
        return True
    return False


def zipped(s: Schedule, names: list[str], tag: str, lanes: int) -> bool:
    """A few rows, each in order in memory, whose elements take turns in the result: `y[2*r + c] = x[c, r]`."""
    if len(names) < 2 or s.extent(names[-1]) not in FEW:
        return False
    row, column = names[-2:]
    n, m = s.extent(row), s.extent(column)
    mark = s.mark()
    try:
        if not isinstance(n, int) or not isinstance(m, int) or n < lanes or m >= lanes:
            raise ScheduleError(f"{row} does not fill a tile")
        one = f"z{tag}"  # as one loop the store has one index
        s.apply(fuse, row, column, one).collapse()
        s.apply(split, one, m, (f"r{tag}", f"c{tag}")).apply(
            split, f"r{tag}", lanes, (f"ro{tag}", f"rv{tag}"), tail="overlap"
        )
        s.apply(zip_tile, f"rv{tag}", f"c{tag}")
    except ScheduleError:
        s.restore(mark)
        return False
    return True


def vectorized(s: Schedule, name: str, lanes: int, unroll: int, lockstep: int = 1) -> None:
    """Turn a loop into vectors; where its statements cannot be vectors it stays scalar.

    lockstep: vectors that are one vector to the program, so that their instructions take turns. An instruction waits
        for the one before it in
    the same vector, and CPUs find too few others in a long function: 1.2 to 1.4 times the speed.
    """
    n = s.extent(name)
    if n in (0, 1):
        return
    if isinstance(n, int) and n < lanes and n & (n - 1) == 0:  # a smaller vector needs no limit
        lanes = n
    wide = lanes * lockstep
    if not isinstance(n, int) or (n % wide and n < FILLED * wide):
        wide = lanes
    long = isinstance(n, int) and n % wide and n >= LONG and any(x is s.loop(name) for x in s.body)
    mark = s.mark()
    try:
        s.apply(split, name, wide, (name + "o", name + "v"), tail="peel" if long else "guard")
        s.apply(vectorize, name + "v")
    except ScheduleError:
        s.restore(mark)
        return
    if long:
        rest = s.body[
            1 + next(k for k, x in enumerate(s.body) if isinstance(x, For) and x.var.name == name + "o")
        ]  # other nests may follow
        assert isinstance(rest, For)
        vectorized(s, rest.var.name, lanes, 1)
    unroll = max(unroll * lanes // wide, 1)
    if (
        isinstance(n, int)
        and (long or n % (wide * unroll) == 0)
        and n > wide * unroll
        and n // wide % unroll == 0
        and unroll > 1
    ):
        s.apply(split, name + "o", unroll, (name + "q", name + "u")).apply(annotate, "unroll", name + "u")
