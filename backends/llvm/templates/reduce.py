"""Recipe for reductions: rows (softmax, layer norm, last-axis sums) and windows (pooling, outer sums).

A reduction whose loop walks memory in order becomes vector accumulators over that loop. Otherwise the vectors go over
the innermost output loop that walks memory in order (channels of a blocked image): a lane each. Others are scalar.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.templates import contraction, winograd
from dnnc.backends.llvm.templates.common import offsets, parallel_outer, stride, try_fuse, unit_stride, worth
from dnnc.backends.llvm.templates.maps import functions, lanes_for, shares, split_digits, vectorized
from dnnc.backends.llvm.templates.windows import MOST_PIXELS, tile_windows
from dnnc.ir.bounds import bounds
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Load, Op, Ref, const, free, substitute, value, walk
from dnnc.ir.loops.stmt import Block, Buffer, For, If, Kernel, Store, accesses, exprs, walk_stmts
from dnnc.passes.schedule.cascade import LONGEST, cascade
from dnnc.passes.schedule.hoist_invariants import hoist_numbers, keep_numbers, numbers_and_results, sink
from dnnc.passes.schedule.loops import (
    annotate,
    choose,
    fuse,
    hoist_guards,
    is_reduction,
    narrow,
    peel,
    reorder,
    single,
    split,
)
from dnnc.passes.schedule.memory import distribute, prefetch, vector_reduce, vectorize
from dnnc.passes.schedule.parallel_legality import obstacle
from dnnc.passes.schedule.problem import Knobs, Problem, varied
from dnnc.passes.schedule.share_passes import nest, share_passes
from dnnc.passes.schedule.short_rows import side_by_side
from dnnc.passes.schedule.state import Schedule, loops

ORDER = ("lanes", "chains", "short")
ROW = 8  # terms of a row across memory that has a sum of its own, which does not wait for the row before
TOGETHER = 8  # vectors side by side whose sums are made step by step: a third of the registers
STRAIGHT = 16  # vectors of a row that is computed without loops
MOST_STEPS = 16  # reductions and what is made of them
LARGE, LEAST_ROW, MOST_ROW = 4 << 20, 1 << 10, 1 << 15  # bytes of an operand that comes from memory, and of its rows
MOST_SHORT = 8, 15  # elements of a row that is a lane and not a vector: plain, and of which functions are computed
MOST_SHUFFLED = 4  # the same on CPUs whose shuffles take lanes of one vector
LEAST_LANES = 4  # terms that are worth a vector with a mask
ROWS, LONG = 2, 32  # rows computed together, and the steps of a loop along them from which they are long


def candidates(problem: Problem, target: CpuTarget) -> list[Knobs]:
    if problem.kind in ("map", "sequence", "scatter", "recurrence"):
        return []
    lanes = _lanes_along(problem, target)
    together = _side_by_side(problem, lanes, target.threads) if problem.kind == "reduce" else 1
    ahead = problem.kind == "reduce" and together == 1 and _from_memory(problem)
    return [
        (
            ("lanes", lanes),
            ("chains", 4),
            *((("columns", together),) if together > 1 else ()),
            *((("pf", 1),) if ahead else ()),
        )
    ]


def _lanes_along(problem: Problem, target: CpuTarget) -> int:
    """Lanes of the widest type that is read or written along rows; what is read once in a row, such as a label, has no
    say.
    """
    body = problem.kernel.entry.body
    names = {n for names in problem.lowered.reductions for n in names} | set(problem.lowered.out_loops[-1:])
    along = {x.var for x in loops(body) if x.var.name in names}
    every = [(x.buf, x.idx) for x in accesses(body)] + [
        (x.buf, x.idx) for x in walk_stmts(body) if isinstance(x, Store)
    ]
    sizes = [b.dtype.computed.bytes for b, idx in every if b.space == "global" and any(free(i) & along for i in idx)]
    return max(target.vector_bits // 8 // max(max(sizes), 4), 2) if sizes else lanes_for(problem, target)


def _longest_in_order(problem: Problem) -> float:
    """The steps of the longest loop that walks memory in order, which vectors may go over."""
    names = {n for names in problem.lowered.reductions for n in names} | set(problem.lowered.out_loops[-1:])
    walked = [x for x in loops(problem.kernel.entry.body) if x.var.name in names and unit_stride(x)]
    return max((value(x.extent) or math.inf for x in walked), default=math.inf)


def space(problem: Problem, target: CpuTarget) -> list[Knobs]:
    """Sums in flight, vectors, pixels, rows together, straight-line length, threads. None: contractions' recipes."""
    if problem.kind == "contraction" and (
        contraction.candidates(problem, target) or winograd.candidates(problem, target)
    ):
        return []
    out: list[Knobs] = []
    longest = _longest_in_order(problem)
    for first in candidates(problem, target):
        lanes = int(dict(first)["lanes"])
        others: list[dict[str, int]] = [{"chains": n} for n in (1, 2, 8)]
        if (
            any(n.startswith("k") for names in problem.lowered.reductions for n in names)
            or len(problem.lowered.reductions) > 1
        ):
            others += [{"straight": n} for n in (0, 4, 32)] + [{"pf": 1 - int(dict(first).get("pf", 0))}]
        if len(problem.lowered.reductions) == 1 and set(problem.form.outer[-1:]) & problem.form.panels.keys():
            others += [{"pixels": n} for n in range(1, MOST_PIXELS + 1)]
        else:
            columns = [n for n in (1, 2, 3, 4, 6, 8) if n != dict(first).get("columns", 1)]
            others += [*({"rows": n} for n in (1, 3, 4)), *({"columns": n} for n in columns)]
        wide = [{"lanes": n} for n in (lanes // 2, 2 * lanes) if 1 < n <= max(lanes, longest)]
        out += [varied(first, **k) for k in (*others, *shares(problem), *wide)]
        out += [varied(first, **j, **k) for j in wide for k in (*others, *shares(problem))]
        out += [varied(first, **j, **k) for j in others for k in shares(problem)]
        out += [
            varied(first, **j, **k) for i, j in enumerate(others) for k in others[i + 1 :] if not j.keys() & k.keys()
        ]
    return out


def apply(problem: Problem, knobs: Mapping[str, int | str], target: CpuTarget) -> Kernel:
    s = Schedule(problem.kernel)
    lanes, chains = int(knobs["lanes"]), int(knobs["chains"])
    s.apply(single, *(n for n in problem.lowered.out_loops if s.extent(n) == 1)).collapse()
    tiled = tile_windows(s, problem, lanes, int(knobs.get("pixels", 0)))
    chosen = not tiled and _with_choices(s, problem, lanes, int(knobs.get("columns", 1)))
    if not chosen:
        s.apply(hoist_guards).apply(narrow)
        _sums_once(s, problem)
    beside = not tiled and not chosen and not knobs.get("short") and _rows_in_lanes(s, problem, lanes, target)
    across = chosen or beside or (not tiled and _over_outputs(s, problem, lanes, int(knobs.get("columns", 1))))
    if not tiled and not across:
        _over_rows(s, problem, lanes, chains, bool(knobs.get("short")), int(knobs.get("straight", STRAIGHT)))
        _rows_together(s, problem, int(knobs.get("rows", ROWS)))
        if knobs.get("pf"):
            _ask_for_next_row(s, problem)
    _in_memory_order(s)
    s.apply(share_passes)
    if not knobs.get("short"):  # strict numerics: the order of a sum is the same for sizes that are not known
        s.apply(cascade, row=ROW if across else LONGEST + 1)
    parallel_outer(s, _outer(s, problem), worth(knobs, problem.form.elements))
    s.apply(hoist_numbers)
    return s.done()


def _in_memory_order(s: Schedule) -> None:
    """Reduce in the order of memory: `for r: for k: acc = acc + x[r // 16, k, r % 16]` gets loops over `r // 16`, `k`
    and `r % 16`.
    """
    done: set[str] = set()
    for first in [x for x in loops(s.body) if x.kind == "range"]:
        names = [x.var.name for x in nest(first)]
        body = nest(first)[-1].body
        own = {x.var for x in nest(first)}
        sums = all(isinstance(x, Store) and is_reduction(x) and not any(free(i) & own for i in x.idx) for x in body)
        if done.isdisjoint(names) and len(names) > 1 and sums:
            _sorted_by_stride(s, names)
        done.update(names)


def _sorted_by_stride(s: Schedule, names: list[str]) -> None:
    mark = s.mark()
    try:
        made = split_digits(s, names, 1)
        inner = s.loop(made[-1])
        read = [x.buf.offset(x.idx) for x in accesses(inner.body) if x.buf.space == "global"]
        variables = {n: s.loop(n).var for n in made}
        longest = max(read, key=lambda e: len(free(e) & set(variables.values())))
        steps = {n: value(stride(longest, v)) for n, v in variables.items()}
        if any(k is None for k in steps.values()):
            raise ScheduleError("the order in memory is not known")
        wanted = sorted(made, key=lambda n: -abs(steps[n] or 0))
        if made == names and wanted == names:
            return
        s.apply(reorder, *wanted)
    except (ScheduleError, ValueError):
        s.restore(mark)


def _sums_once(s: Schedule, problem: Problem) -> None:
    """Sums invariant in an output loop (softmax over channels), ahead of that loop, which becomes innermost."""
    names = [n for n in problem.lowered.out_loops if s.has(n)]
    body = s.loop(names[-1]).body if names else ()
    if len(body) < 3 or not isinstance(body[-1], Store):
        return
    numbers, _ = numbers_and_results(body)
    needed = frozenset().union(*(free(e) for x in walk_stmts(numbers) for e in exprs(x)))
    again = [n for n in names if s.loop(n).var not in needed]
    mark = s.mark()
    try:
        if again and len(again) < len(names):
            s.apply(reorder, *(n for n in names if n not in again), *again)
            for n in reversed(again):
                s.apply(sink, n)
    except ScheduleError:
        s.restore(mark)


def _outer(s: Schedule, problem: Problem) -> list[str]:
    """Output loops that are still perfectly nested from the top."""
    out: list[str] = []
    body = s.body
    while len(body) == 1 and isinstance(body[0], For) and body[0].kind == "range":
        out.append(body[0].var.name)
        body = body[0].body
    return [n for n in out if n.startswith(("i", "vo"))]


def _rows_in_lanes(s: Schedule, problem: Problem, lanes: int, target: CpuTarget) -> bool:
    """Rows of a few elements, with results for each of them (softmax of 5 classes): a lane each, their results put in
    the order of memory by shuffles.
    """
    names = [n for n in problem.lowered.out_loops if s.has(n)]
    if len(names) < 2 or len(s.loop(names[-2]).body) < 3:
        return False
    most = min(MOST_SHORT[functions(problem) > 0] if target.registers >= 32 else MOST_SHUFFLED, lanes - 1)
    inside = [value(x.extent) or lanes for x in loops(s.loop(names[-2]).body)]
    if not inside or max(inside) > most or any(isinstance(x, If) for x in walk_stmts(s.body)):
        return False
    mark, row, k = s.mark(), names[-2], 0
    for around in reversed(names[:-2]):
        if not try_fuse(s, around, row, f"{row}f{k}"):
            break
        row, k = f"{row}f{k}", k + 1
    n, v = s.extent(row), s.loop(row).var
    steps = [value(stride(e, v)) for e in offsets(s.loop(row).body) if v in free(e)]
    if (
        not isinstance(n, int)
        or n < 2 * lanes
        or (n % lanes and problem.inplace)
        or any(k is None or k > most for k in steps)
    ):
        s.restore(mark)
        return False
    try:
        s.flatten().apply(keep_numbers).apply(split, row, lanes, ("vo", "vi"), tail="overlap").apply(
            side_by_side, "vi", lanes
        )
        s.apply(annotate, "unroll", *(x.var.name for x in loops(s.loop("vo").body) if "_copy" not in x.var.name))
        for copy in [x.var.name for x in s.loop("vo").body if isinstance(x, For) and "_copy" in x.var.name]:
            s.apply(fuse, copy, copy + "c", copy + "f").collapse()
            s.apply(split, copy + "f", lanes, (copy + "o", copy + "v")).apply(vectorize, copy + "v")
            s.apply(annotate, "unroll", copy + "o")
        if why := obstacle(s.loop("vo")):
            raise ScheduleError(why)
    except ScheduleError:
        s.restore(mark)
        return False
    return True


def _over_outputs(s: Schedule, problem: Problem, lanes: int, columns: int) -> bool:
    """Vectors over the innermost output loop, accesses unit stride or constant; several at a time by `columns`."""
    loops = [n for n in problem.lowered.out_loops if s.has(n)]
    rows, blocks = [r for names in problem.lowered.reductions for r in names], {v.name for v in problem.form.panels}
    if not loops or any(r.startswith("k") for r in rows):
        return False
    loop = s.loop(loops[-1])
    n = s.extent(loops[-1])
    if len(loop.body) < 3 or (isinstance(n, int) and n < lanes // 2):
        return False
    if any(_fills(s, r, lanes) and unit_stride(s.loop(r)) for r in rows if s.has(r)) and loops[-1] not in blocks:
        return False
    steps = [stride(e, loop.var) for e in offsets(loop.body) if loop.var in free(e)]
    few = all(isinstance(k := s.extent(r), int) and k < lanes for r in rows if s.has(r))
    if any(x not in (const(0), const(1)) for x in steps) and not (few and all(value(x) is not None for x in steps)):
        return False  # what is far apart is worth gathering where a row is too short for vectors
    mark = s.mark()
    try:
        s.apply(keep_numbers).apply(split, loops[-1], lanes, ("vo", "vi"), tail="guard")
        if columns > 1 and _columns(s, problem, columns):
            return True
        s.apply(distribute, "vi", 1)
        s.apply(
            vectorize,
            *("vi" + (f"_{k}" if k else "") for k in range(len(loop.body) + 2) if s.has("vi" + (f"_{k}" if k else ""))),
        )
    except ScheduleError:
        s.restore(mark)
        return False
    return True


def _with_choices(s: Schedule, problem: Problem, lanes: int, columns: int) -> bool:
    """Vectors over outputs where numbers that are read decide what is reduced (the place of the largest one across
    memory). They are chosen lane by lane, so conditions stay within the expressions.
    """
    mark = s.mark()
    guards = sum(isinstance(x, If) for x in walk_stmts(s.body))
    s.apply(choose)
    chooses = sum(isinstance(x, If) for x in walk_stmts(s.body)) < guards
    if chooses and _over_outputs(s.apply(hoist_guards).apply(narrow), problem, lanes, columns):
        return True
    s.restore(mark)
    return False


def _side_by_side(problem: Problem, lanes: int, threads: int) -> int:
    """How many vectors of outputs whose sums go across memory (batch norm over a batch of rows) are best made together:
    each step of the sums then reads some cache lines in a row and not one, if work is left for all threads.
    """
    s = Schedule(problem.kernel)
    every = list(walk_stmts(s.body))
    outer = [n for n in problem.lowered.out_loops if s.extent(n) != 1]
    reduced = [n for names in problem.lowered.reductions for n in names]
    if not outer or any(isinstance(x, If) for x in every) or any(n.startswith("k") or not s.has(n) for n in reduced):
        return 1
    v, n = s.loop(outer[-1]).var, s.extent(outer[-1])
    inner = [s.loop(names[-1]) for names in problem.lowered.reductions]
    read = [e for x in inner for e in offsets(x.body)]
    if (
        not isinstance(n, int)
        or any(unit_stride(x) for x in inner)
        or any(e is not substitute(e, {v: const(0)}) + v for e in read if v in free(e))
    ):
        return 1
    used = frozenset().union(*(free(e) for e in read))
    around = [s.extent(name) for name in outer[:-1] if s.loop(name).var in used]
    steps = math.prod(value(s.loop(name).extent) or 1 for name in problem.lowered.reductions[0])
    if v not in used or steps < TOGETHER or any(not isinstance(k, int) for k in around):
        return 1
    vectors, rest = n // lanes, math.prod(k for k in around if isinstance(k, int))
    fit = [k for k in (TOGETHER, TOGETHER // 2, TOGETHER // 4) if k <= vectors and rest * (vectors // k) >= threads]
    # fewer than eight where the work is then shared more evenly, as 24 vectors are between two threads
    return min(fit[:2], key=lambda k: -(-(rest * -(-vectors // k)) // threads) * k, default=1)


def _columns(s: Schedule, problem: Problem, count: int) -> bool:
    """Several vectors of outputs step by step: `for vm: {acc; for r: s}`  ->  `acc[vm]; for r: for vm: s`."""
    n, mark = s.extent("vo"), s.mark()
    if not isinstance(n, int) or n < count or (problem.inplace and n % count):
        return False
    try:
        s.apply(split, "vo", count, ("vo", "vm"), tail="overlap").apply(distribute, "vm", 2)
        tags = [t for t in ("", *(f"_{k}" for k in range(1, MOST_STEPS))) if s.has("vm" + t)]
        for t in tags:
            inner, names = s.loop("vi" + t).body, []
            while len(inner) == 1 and isinstance(inner[0], For):
                names.append(inner[0].var.name)
                inner = inner[0].body
            if names:
                s.apply(reorder, *names, "vm" + t, "vi" + t)
        s.apply(vectorize, *("vi" + t for t in tags)).apply(annotate, "unroll", *("vm" + t for t in tags))
    except ScheduleError:
        s.restore(mark)
        return False
    return True


def _fills(s: Schedule, name: str, lanes: int) -> bool:
    """Does a loop along a row fill vectors? The taps of a window do not."""
    n = s.extent(name)
    return not isinstance(n, int) or n >= lanes


def _over_rows(s: Schedule, problem: Problem, lanes: int, chains: int, short: bool, straight: int) -> None:
    """Vectors over rows in memory, up to `straight` of them without a loop; `short`: also under a vector."""
    for names in problem.lowered.reductions:
        names_left = [n for n in names if s.has(n)]
        k = 0
        while len(names_left) > 1 and try_fuse(s, names_left[-2], names_left[-1], f"{names_left[-1]}f{k}"):
            names_left = [*names_left[:-2], f"{names_left[-1]}f{k}"]
            k += 1
        if not names_left:
            continue
        inner = names_left[-1]
        if inner.startswith("k"):
            _each_vector(s, inner, lanes, straight)
            continue
        n = s.extent(inner)
        least, most = bounds(n)
        if not unit_stride(s.loop(inner)):
            continue
        if not short and len(names_left) > 1 and isinstance(n, int) and LEAST_LANES <= n < lanes * chains:
            with suppress(ScheduleError):  # one sum across several rows
                s.apply(vector_reduce, inner, lanes, 1, names_left[0])
                continue
        if most is not None and most < lanes and not short:
            continue
        if least is None or least < 0:  # of a window beside an image nobody can show how many vectors it has
            continue
        mark = s.mark()
        if any(isinstance(x, If) for x in s.loop(inner).body):  # the place of the largest one
            s.apply(choose, inner)
        try:
            s.apply(vector_reduce, inner, lanes, chains if not isinstance(n, int) or n >= lanes * chains else 1)
        except ScheduleError:
            s.restore(mark)
            continue
        if isinstance(n, int) and n <= straight * lanes:
            s.apply(annotate, "unroll", *(x for x in (inner + "o", inner + "t") if s.has(x)))
    left = [n for n in problem.lowered.out_loops if s.has(n)]
    last = left[-1] if left else ""
    if last and not _loops_in(s, last):
        for j, around in enumerate(reversed(left[:-1])):  # what lies together is one row
            if not try_fuse(s, around, last, f"{last}f{j}"):
                break
            last = f"{last}f{j}"
        _each_vector(s, last, lanes, straight)


def _waits(b: Block) -> bool:
    """Are vectors combined into a number, in rows short enough for that to matter?"""
    inside = list(walk_stmts(b))
    if any(isinstance(x, For) and not (value(x.extent) or LONG + 1) <= LONG for x in inside):
        return False
    return any(
        isinstance(x, Op) and x.name in ("hsum", "hprod", "hmax", "hmin")
        for s in inside
        if isinstance(s, Store)
        for x in walk(s.value)
    )


def _rows_together(s: Schedule, problem: Problem, wanted: int) -> None:
    """Reduce several rows in lockstep, `wanted` if they divide all, to overlap chains of some 30 cycles."""
    names = _outer(s, problem)
    k = 0
    while len(names) > 1 and try_fuse(s, names[-2], names[-1], f"i_{k}"):
        names, k = [*names[:-2], f"i_{k}"], k + 1
    n = s.extent(names[-1]) if names else 1
    together = next(
        (m for m in (wanted, *((2, 3) if wanted > 1 else ())) if isinstance(n, int) and n % m == 0 and n >= 2 * m), 1
    )
    if together == 1 or not _waits(s.loop(names[-1]).body):
        return
    mark = s.mark()
    try:
        s.apply(split, names[-1], together, ("i_r", "rm")).apply(distribute, "rm", 1)
    except ScheduleError:
        s.restore(mark)
        return
    inner = (x.var.name for x in loops(s.loop("i_r").body) if x.var.name == "rm" or x.var.name.startswith("rm_"))
    s.apply(annotate, "unroll", *inner)


def _from_memory(problem: Problem) -> bool:
    """Is there an operand that no cache holds, in rows of which a near cache holds two?"""
    body = problem.kernel.entry.body
    sizes = {loop.var.name: value(loop.extent) or 0 for loop in loops(body)}
    row = max((math.prod(sizes.get(n, 1) for n in names) for names in problem.lowered.reductions), default=0)
    large = {
        x.buf
        for x in accesses(body)
        if x.buf.space == "global" and (value(x.buf.size()) or 0) * x.buf.dtype.bytes >= LARGE and _is_plain(x)
    }
    return any(LEAST_ROW <= row * buf.dtype.bytes <= MOST_ROW for buf in large)


def _is_plain(x: Load | Ref) -> bool:
    """Is the place of a load computed without asking memory?"""
    return not any(
        isinstance(e, (Load, Ref)) or (isinstance(e, Op) and e.name == "guard") for i in x.idx for e in walk(i)
    )


def _ask_for_next_row(s: Schedule, problem: Problem) -> None:
    """Prefetch the next row in this row's last pass: `for j: .. x[i, j:+16]` -> `..{prefetch(x[i + 1, j]); ..}`."""
    names = _outer(s, problem)
    if not names:
        return
    row = s.loop(names[-1])
    passes = [x for x in row.body if isinstance(x, For)]
    for buf in {x.buf: None for x in accesses(row.body) if x.buf.space == "global"}:
        over = [x for x in passes if any(a.buf is buf and row.var in free(buf.offset(a.idx)) for a in accesses((x,)))]
        inner = (
            found for x in reversed(over[1:]) if (found := _vector_read(x, buf)) is not None
        )  # a pass may end in a masked step
        loop, at = next(inner, (None, None))
        if loop is not None and at is not None:
            s.apply(prefetch, loop.var.name, buf.name, tuple(substitute(i, {row.var: row.var + 1}) for i in at.idx))


def _vector_read(over: For, buf: Buffer) -> tuple[For, Load] | None:
    """The first loop of a pass that reads whole vectors of a buffer, and how it does."""
    for loop in loops((over,)):
        for a in accesses(tuple(x for x in loop.body if isinstance(x, Store))):
            if (
                isinstance(a, Load)
                and a.buf is buf
                and _is_plain(a)
                and a.limit is None
                and a.lanes > 1
                and all(i.lanes == 1 for i in a.idx)
            ):
                return loop, a
    return None


def _each_vector(s: Schedule, name: str, lanes: int, straight: int) -> None:
    """Vectors over a row's loop: a short row has no loop, so that its vectors stay in registers between passes."""
    n = s.extent(name)
    if not isinstance(n, int) or not lanes < n <= straight * lanes:
        vectorized(s, name, lanes, 4)
        return
    mark = s.mark()
    o, v = name + "o", name + "v"
    try:
        s.apply(split, name, lanes, (o, v), tail="guard")
        if n % lanes:  # only the last vector needs a mask
            s.apply(peel, o, first=0, last=1)
        s.apply(vectorize, *(x for x in (v, v + "_l0") if s.has(x))).apply(annotate, "unroll", o)
    except ScheduleError:
        s.restore(mark)
        vectorized(s, name, lanes, 4)


def _loops_in(s: Schedule, name: str) -> list[str]:
    return [x.var.name for x in loops(s.loop(name).body)]
