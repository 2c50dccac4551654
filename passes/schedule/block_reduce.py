"""Schedule primitive `teams`: every row of a kernel is computed by a team of GPU threads.

    for p in range(rows):                     for b in block.x(rows): for t in thread.x(128):
        acc = -inf acc = -inf every thread has its own
        for c in range(n): acc = max(acc, ..)     for q: acc = max(acc, .. c = 128*q + t ..)      its share of the row
                                                  acc = max over the team shuffles, then shared memory
        row: f32[n] @ local row: f32[n / 128] @ register as shares are the same in all loops
        for c in range(n): row[c] = ..            for q: row[q] = ..
        for c in range(n): y[p, c] = ..           for q: y[p, 128*q + t] = ..

Common loads of several loops stay in registers. The order of a reduction depends on the team's size alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dnnc.ir.dtype import boolean
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, Op, Ref, const, free, minimum, op, value, walk
from dnnc.ir.loops.stmt import (
    Alloc,
    Block,
    Buffer,
    Eval,
    For,
    If,
    Stmt,
    Store,
    accesses,
    call,
    exprs,
    loop_var,
    stored,
    substitute_block,
    walk_stmts,
)
from dnnc.passes.schedule.buffers import swap_buffers
from dnnc.passes.schedule.loops import is_index_sum, is_reduction
from dnnc.passes.schedule.parallel_legality import obstacle
from dnnc.passes.schedule.state import find, loops
from dnnc.passes.schedule.wide import PLACE, Run, compute_chunk, load_chunks, loads_ahead, new_tiles, run_of

WARP = 32
MOST_AHEAD = 16  # loads that a thread has under way: more only take registers
SHARED_LIMIT = 200 * 1024  # bytes of rows that several threads read
Emit = Callable[[Expr, Expr], Block]  # (number of the chunk among the thread's, chunk) -> statements


@dataclass(frozen=True)
class Team:
    """`size` threads for a row, `rows` rows a block. Members of a team are neighbouring threads, unless `across`: then
    the threads of neighbouring rows are (for strided rows that lie side by side).

    keep: bytes of a row that a thread may hold in registers; ahead: bytes that it loads before it computes with the
        first of them; near: members
    of a row in each warp, where the rows that lie across do not fill one, which exchange values before the warps meet.
    """

    size: int
    rows: int = 1
    across: bool = False
    keep: int = 192
    ahead: int = 64
    near: int = 1

    def __post_init__(self) -> None:
        if self.size & (self.size - 1) or self.size < 1:
            raise ScheduleError(f"a team of {self.size} threads: the size must be a power of two")
        if self.near > 1 and (not self.across or self.near * self.rows != WARP or self.size % self.near):
            raise ScheduleError(f"{self.near} members of each of {self.rows} rows do not fill warps")
        if not self.across and self.rows > 1 and self.size > WARP:
            raise ScheduleError(
                f"{self.rows} teams of {self.size} threads in a block would have to meet at barriers of their own"
            )
        if not self.across and self.size > 1 and self.size * self.rows % WARP:
            raise ScheduleError(f"{self.rows} teams of {self.size} threads do not fill warps, which exchange values")

    @property
    def meets(self) -> bool:
        """Do members meet at barriers of the block, not in their warp?"""
        return self.size > 1 and (self.across or self.size > WARP)


def teams(b: Block, name: str, team: Team) -> Block:
    """Share each iteration of the loop called `name`, the outermost, among a team of threads."""
    loop = find(b, name)
    if len(b) != 1 or b[0] is not loop:
        raise ScheduleError(f"{name} is not the outermost loop, or something stands beside it")
    n = value(loop.extent)
    if not n or value(loop.lo) != 0:
        raise ScheduleError(f"{name} has {loop.extent!r} iterations; rows need a constant number of at least one")
    why = obstacle(loop) if n > 1 else ""
    if why:
        raise ScheduleError(f"{name} cannot be shared among blocks: {why}")
    return _placed(loop, n, team)


def _placed(loop: For, n: int, team: Team) -> Block:
    """Wrap a row's body in the grid. Warps past the last row exit, else it is recomputed but not stored."""
    width = team.size * team.rows
    b, t = loop_var("b", const(0), const(-(-n // team.rows))), loop_var("t", const(0), const(width))
    member, place = (t // team.rows, t % team.rows) if team.across else (t % team.size, t // team.size)
    row = b * team.rows + place
    leaves = n % team.rows > 0 and team.size % WARP == 0 and not team.across
    repeats = n % team.rows > 0 and not leaves
    written = {x for x in stored(loop.body) if x.space == "global"}
    # a single store, with what it reads, is not repeated
    again = tuple(s for s in loop.body if not isinstance(s, Store))
    if repeats and written & {a.buf for a in accesses(again)}:
        raise ScheduleError("a kernel in place cannot compute a row twice: choose teams of whole warps")
    divided = any(
        isinstance(x, Op) and x.name in ("//", "%") and loop.var in free(x)
        for s in walk_stmts(loop.body)
        for e in exprs(s)
        for x in walk(e)
    )
    at = (
        minimum(row, n - 1) if repeats or (leaves and divided) else row
    )  # bounds of quotients are known by their dividends' alone
    rows = _Row(
        substitute_block(loop.body, {loop.var: at}), team, member, place, row < n if repeats else const(True, boolean)
    )
    body = rows.block()
    body = (If(row < n, body),) if leaves else body
    threads = For(t, const(0), const(width), "thread.x", body)
    return (For(b, const(0), const(-(-n // team.rows)), "block.x", (*rows.shared, threads)),)


class _Row:
    """Rewrites the body of one row for one member of its team. `live`: is the row one that this team stores?"""

    def __init__(self, body: Block, team: Team, member: Expr, place: Expr, live: Expr) -> None:
        self.body, self.team, self.member, self.place, self.live = body, team, member, place, live
        self.private = {s.buf for s in body if isinstance(s, Alloc)}
        self.shared: list[Stmt] = []
        self.names: dict[str, int] = {}
        self.used = 0  # bytes of registers that hold parts of the row
        self.runs: dict[Stmt, Run] = {
            s: run for s in body if isinstance(s, For) and (run := run_of(s)) is not None and self.may_share(s, run)
        }
        self.check_alone()
        self.moved: dict[Buffer, Buffer] = {}  # rows -> where they are now
        self.tiles: dict[Expr, Buffer] = {}  # canonical load -> the registers that hold it for several loops
        self.loaded: set[Buffer] = set()

    def name(self, base: str) -> str:
        n = self.names.get(base, 0)
        self.names[base] = n + 1
        return base if n == 0 else f"{base}_{n}"

    def block(self) -> Block:
        self.move_rows()
        self.find_tiles()
        out: list[Stmt] = []
        for s in self.body:
            if isinstance(s, Alloc):
                out += self.alloc(s)
            elif s in self.runs:
                out += self.run(self.runs[s])
            elif any(w.space == "global" for w in stored((s,))):
                out += _when([self.member.eq(0), self.live], (s,))
            else:
                out.append(s)
        shared = {k: v for k, v in self.moved.items() if v.space == "shared"}
        return swap_buffers(tuple(out), shared, lambda _, idx: (self.place if self.team.rows > 1 else const(0), *idx))

    # --- what may be shared -------------------------------------------------------------------------------------------

    def may_share(self, s: For, run: Run) -> bool:
        """True if a loop only reduces into scalars, fills rows at their places, and stores results at theirs."""
        inner = {x.var for x in loops((s,))}
        kept: list[Stmt] = []
        for st in walk_stmts((s,)):
            if isinstance(st, Eval):
                return False
            if not isinstance(st, Store) or st.buf not in self.private:
                continue
            if st.buf.space == "register":
                if (
                    any(x is not st and _touches(x, st.buf) for x in walk_stmts((s,)))
                    or not (is_reduction(st) or is_index_sum(st))
                    or any(free(i) & inner for i in st.idx)
                ):
                    return False
            elif not self.own_places(st.buf, run):
                return False
            kept.append(st)
        return not obstacle(For(s.var, s.lo, s.hi, s.kind, _without(s.body, kept)))

    def own_places(self, buf: Buffer, run: Run) -> bool:
        """Does a run touch elements of a row at its own index only?"""
        want = run.canonical(run.c * run.width + (run.v if run.v is not None else 0))
        places = [x.idx for x in accesses(run.body) if x.buf is buf]
        places += [x.idx for x in walk_stmts(run.body) if isinstance(x, Store) and x.buf is buf]
        return all(run.canonical(buf.offset(i)) is want for i in places)

    def check_alone(self) -> None:
        """What one member does for all must not write what the others read."""
        for s in self.body:
            others = (other for other in self.body if other is not s and not isinstance(other, Store))
            read = {x.buf for other in others for x in accesses((other,))}
            if s not in self.runs and any(w in read and w.space == "global" for w in stored((s,))):
                raise ScheduleError("a part of the row that one thread computes is read by others")
            filled = {w for w in stored((s,)) if w.space == "local" and w in self.private}
            if s not in self.runs and filled and self.team.size > 1:
                raise ScheduleError(
                    f"{', '.join(sorted(w.name for w in filled))} is filled by every thread: it can be neither shared "
                    "nor split"
                )

    # --- rows and tiles -----------------------------------------------------------------------------------------------

    def chunks(self, run: Run) -> int:
        """Chunks of a run for one thread."""
        return -(-run.count // self.team.size)

    def in_registers(self, run: Run, dtype_bytes: int) -> bool:
        """Is there room for a thread's share of a row? Then it is taken."""
        size = self.chunks(run) * run.width * dtype_bytes
        if self.used + size > self.team.keep:
            return False
        self.used += size
        return True

    def move_rows(self) -> None:
        """Rows that every loop accesses at its own places become registers, others shared memory."""
        for a in self.body:
            if not isinstance(a, Alloc) or a.buf.space != "local":
                continue
            buf = a.buf
            users = [s for s in self.body if s is not a and buf in {x.buf for x in accesses((s,))} | stored((s,))]
            sizes = {(self.runs[s].count, self.runs[s].width) for s in users if s in self.runs}
            split = len(sizes) == 1 and all(s in self.runs and self.own_places(buf, self.runs[s]) for s in users)
            if split and self.in_registers(run := self.runs[users[0]], buf.dtype.bytes):
                self.moved[buf] = Buffer(buf.name, buf.dtype, (const(self.chunks(run)), const(run.width)), "register")
                continue
            made = Buffer(buf.name, buf.dtype, (const(self.team.rows), *buf.shape), "shared")
            if (value(made.size()) or 0) * buf.dtype.bytes > SHARED_LIMIT:
                raise ScheduleError(f"{buf.name} does not fit into shared memory")
            self.moved[buf] = made

    def alloc(self, s: Alloc) -> Block:
        made = self.moved.get(s.buf, s.buf)
        if made.space == "shared":
            self.shared.append(Alloc(made))
            return ()
        return (Alloc(made),)

    def find_tiles(self) -> None:
        """Loads that several loops do at the same places, as far as there is room for them."""
        found: dict[Expr, list[tuple[Run, Load]]] = {}
        for run in self.runs.values():
            for x in loads_ahead(run):
                found.setdefault(run.canonical(x), []).append((run, x))
        for key, users in found.items():
            run, x = users[0]
            if (
                len(users) > 1
                and len({(r.count, r.width) for r, _ in users}) == 1
                and self.in_registers(run, x.buf.dtype.bytes)
            ):
                (self.tiles[key],) = new_tiles(run, [x], self.chunks(run), self.name).values()

    # --- runs ---------------------------------------------------------------------------------------------------------

    def run(self, run: Run) -> Block:
        rows = {
            b: m
            for b, m in self.moved.items()
            if m.space == "register" and b in {a.buf for a in accesses(run.body)} | stored(run.body)
        }
        lane = const(0) if run.v is None else run.v
        run = replace(run, body=swap_buffers(run.body, rows, lambda *_: (PLACE, lane)))
        loads = loads_ahead(run)
        tiles: dict[Expr, Buffer] = {x: self.tiles[run.canonical(x)] for x in loads if run.canonical(x) in self.tiles}
        out: list[Stmt] = []
        for x in [x for x in loads if x in tiles]:
            out += self.fetched(run, x, tiles)
        out += self.chunked(run, tiles, [x for x in loads if x not in tiles], bool(tiles or rows))
        for st in walk_stmts(run.body):
            if isinstance(st, Store) and st.buf in self.private and st.buf.space == "register":
                out += self.combined(st)
            elif isinstance(st, Store) and st.buf in self.moved and self.moved[st.buf].space == "shared":
                out += self.sync()
        return tuple(out)

    def fetched(self, run: Run, x: Load, tiles: dict[Expr, Buffer]) -> Block:
        """All of a thread's chunks of a load that lasts for several loops, before the first of them."""
        tile = tiles[x]
        if tile in self.loaded:
            return ()
        self.loaded.add(tile)
        return (Alloc(tile), *self.each(run, 0, self.chunks(run), lambda k, c: load_chunks(run, [x], tiles, k, c)))

    def chunked(self, run: Run, tiles: dict[Expr, Buffer], loads: Sequence[Load], fixed: bool) -> Block:
        """Run a thread's chunks, loads some chunks ahead of use. `fixed`: register places must be constant."""
        n = self.chunks(run)
        ahead = min(max(self.team.ahead // (run.width * (sum(x.buf.dtype.bytes for x in loads) or 4)), 1), MOST_AHEAD)
        group = n if ahead >= n else 1 if fixed else ahead
        own = new_tiles(run, loads, group, self.name)
        head = tuple(Alloc(t) for t in own.values())

        def some(first: Expr | int) -> Block:
            loading = self.each(run, first, group, lambda k, c: load_chunks(run, loads, own, k, c)) if loads else ()
            stores = any(w.space == "global" for w in stored(run.body))
            compute = self.each(run, first, group, lambda k, c: self.computed(run, tiles, own, first, k, c), stores)
            return (*head, *loading, *compute)

        if group == n:
            return some(0)
        g = loop_var(self.name("g"), const(0), const(-(-n // group)))
        return (For(g, const(0), const(-(-n // group)), "unroll" if fixed else "range", some(g * group)),)

    def computed(
        self, run: Run, tiles: dict[Expr, Buffer], own: dict[Expr, Buffer], first: Expr | int, k: Expr, c: Expr
    ) -> Block:
        """Run a chunk; lasting values are placed among all of the thread's chunks, others in the chunk's group."""
        lane = const(0) if run.v is None else run.v
        lasting: dict[Expr, Expr] = {x: t[k + first, lane] for x, t in tiles.items()}
        return compute_chunk(
            replace(run, body=substitute_block(run.body, {**lasting, PLACE: k + first})), own, k, c, self.name
        )

    def each(self, run: Run, first: Expr | int, n: int, emit: Emit, stores: bool = False) -> Block:
        """`for q in unroll(n): emit(q, chunk first + q of this thread)`, as far as there are so many chunks."""
        q = loop_var(self.name("q"), const(0), const(n))
        k: Expr = q if n > 1 else const(0)
        c = (k + first) * self.team.size + self.member
        conds = [c < run.count, *([self.live] if stores else [])]
        body = _when(conds, emit(k, c))
        return (For(q, const(0), const(n), "unroll", body),) if n > 1 else body

    # --- meeting ------------------------------------------------------------------------------------------------------

    def sync(self) -> Block:
        return (Eval("barrier" if self.team.meets else "syncwarp", ()),) if self.team.size > 1 else ()

    def combined(self, st: Store) -> Block:
        """After a loop that reduced a member's share: every member gets the result of the team."""
        size, rows = self.team.size, self.team.rows
        how = "+" if not isinstance(st.value, Op) or st.value.name == "fma" else st.value.name
        acc = st.buf.at(*st.idx)

        def with_(e: Expr) -> Store:
            return Store(st.buf, st.idx, op(how, acc, e))

        if size == 1:
            return ()
        if self.team.across:
            near = self.team.near
            part = self.part(st, (size // near, rows))
            rest = loop_var(self.name("j"), const(1), const(size // near))
            return (
                *self.shuffled(with_, acc, near, rows),
                *_when([(self.member % near).eq(0)], (Store(part, (self.member // near, self.place), acc),)),
                *self.sync(), Store(st.buf, st.idx, part[0, self.place]),
                For(rest, const(1), const(size // near), "unroll", (with_(part[rest, self.place]),)),
            )  # fmt: skip
        out = list(self.shuffled(with_, acc, min(size, WARP)))
        if size > WARP:
            warps = size // WARP
            part = self.part(st, (warps,))
            out += _when([(self.member % WARP).eq(0)], (Store(part, (self.member // WARP,), acc),))
            out += (*self.sync(), Store(st.buf, st.idx, part[self.member % warps]), *self.shuffled(with_, acc, warps))
        return tuple(out)

    def shuffled(self, with_: Callable[[Expr], Store], acc: Expr, size: int, apart: int = 1) -> Block:
        """log2(size) exchanges, after which all of `size` threads, which lie `apart`, hold the same bits."""
        if size == 1:
            return ()
        o = loop_var(self.name("o"), const(0), const(size.bit_length() - 1))
        return (
            For(
                o,
                const(0),
                const(size.bit_length() - 1),
                "unroll",
                (with_(call("shfl_xor", acc, call("shl", apart, o))),),
            ),
        )

    def part(self, st: Store, shape: tuple[int, ...]) -> Buffer:
        made = Buffer(self.name(f"{st.buf.name}_part"), st.buf.dtype, tuple(map(const, shape)), "shared")
        self.shared.append(Alloc(made))
        return made


def _touches(s: Stmt, buf: Buffer) -> bool:
    """Does a statement itself, not what stands in it, read or write a buffer?"""
    return (isinstance(s, Store) and s.buf is buf) or any(
        isinstance(x, (Load, Ref)) and x.buf is buf for e in exprs(s) for x in walk(e)
    )


def _without(b: Block, gone: Sequence[Stmt]) -> Block:
    """A block without some statements, to ask about the others."""
    out: list[Stmt] = []
    for s in b:
        if isinstance(s, For):
            out.append(For(s.var, s.lo, s.hi, s.kind, _without(s.body, gone)))
        elif isinstance(s, If):
            out.append(If(s.cond, _without(s.then, gone), _without(s.other, gone)))
        elif s not in gone:
            out.append(s)
    return tuple(out)


def _when(conds: Sequence[Expr], body: Block) -> Block:
    """The body under those conditions that are not known to hold."""
    for c in reversed(conds):
        if value(c) != 1:
            body = (If(c, body),)
    return body
