"""A recurrence as one persistent kernel: blocks keep their matrices and meet once per shared vector.

    for group of rows: for part of cluster:                            a block has so many units, a warp `units` of
                                                                       these
        for warp: for lane: weights of the warp's columns                  lanes share columns, and the sum of each: see
                                                                           Columns
            for t in steps:
                sums += weights * vector                                    the vector lies whole in the shared memory
                                                                            of every block
                a lane for each row and unit: sums -> new states            states stay in its registers; the next
                                                                            inputs are on their way
                vector of the new states -> shared memory of all blocks     stores into the memory of the other blocks
                                                                            (distributed shared memory)
                barrier of the cluster

Weights stay in registers (as float32), and where these do not suffice in shared memory as well, as they are stored.
`takes` says for which sizes there is a schedule: a block alone up to sm_89, clusters of up to 8 blocks from sm_90 on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dnnc.backends.cuda.templates.reduction.partial import SPLITS, cluster
from dnnc.ir import te
from dnnc.ir.dtype import DType, f32, u64
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import E, Expr, Load, Op, cast, const, fma, load, minimum, substitute, value
from dnnc.ir.loops.stmt import Buffer, Builder, Func, Kernel, call
from dnnc.passes.lower.recurrence import Recurrent
from dnnc.passes.lower.recurrent_form import Phase, ScanForm, known, loads
from dnnc.passes.schedule.problem import Knobs, Problem

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget

Sums = dict[tuple[te.Tensor, int], Expr]

LANES = 32
MOST_COLUMNS = 8  # sums that a unit needs of a phase
MOST_WEIGHTS = 288  # of a lane: more make code that no instruction cache holds
MOST_PHASES = 2
LOADED = 8  # part of the registers left, for weights on their way from shared memory
SPARE = 56  # registers of a thread for all that is not weights and sums
MOST_REGISTERS = 248  # of a thread
WARPS, ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16), (1, 2, 4, 8)
CANDIDATES, SEARCHED = 12, 128
ORDER = ("blocks", "warps", "units", "rows")
# Cycles of a step on an H200, by estimate
MEETING, BARRIER = 700, 60  # of a cluster, of a block
SENDING = -480  # less than meeting by a barrier, which waits for all that the SM has stored
ELEMENTWISE = 350  # a chain of exponentials and quotients
SHUFFLE = 25


@dataclass(frozen=True)
class Plan:
    """Knobs: the blocks of a cluster, warps of a block, units of a warp, rows of the batch that a cluster has, and up
    to how many of its weights a lane keeps in registers. `sends`: blocks of a cluster send vectors to mbarriers,
    instead of storing them and meeting at a barrier.
    """

    blocks: int
    warps: int
    units: int
    rows: int
    kept: int
    sends: int = 0

    @property
    def shares(self) -> int:
        """Warps of a cluster, each of which has `units` units or one less."""
        return self.blocks * self.warps


@dataclass(frozen=True)
class Columns:
    """How the lanes of a warp share the columns of a phase: `sets` groups of lanes take columns in turn, `turns` each;
    the lanes of a group share the sum, each with `pieces` vectors of `wide` elements, which lie `stride` apart. Weights
    of the first `kept` pieces are in registers.
    """

    count: int
    sets: int
    wide: int
    hidden: int
    kept: int = 0

    @property
    def lanes(self) -> int:
        return LANES // self.sets

    @property
    def turns(self) -> int:
        return -(-self.count // self.sets)

    @property
    def stride(self) -> int:
        return self.lanes * self.wide

    @property
    def pieces(self) -> int:
        return -(-self.hidden // self.stride)

    @property
    def padded(self) -> int:
        return self.pieces * self.stride

    @property
    def of_piece(self) -> int:
        """Weights of a lane in each piece."""
        return self.turns * self.wide

    @property
    def weights(self) -> int:
        """Of a lane."""
        return self.pieces * self.of_piece

    @property
    def stored(self) -> int:
        """Those in shared memory."""
        return (self.pieces - self.kept) * self.of_piece

    def cycles(self, rows: int, warps: int) -> float:
        """Of an SM in which each warp makes its sums once: multiplications, loads of the vector, exchange."""
        rounds = self.lanes.bit_length() - 1
        reads = self.pieces * rows * max(self.stride * 4 / 128, 1)
        return (
            self.weights * rows * -(-warps // 4) + reads * warps + self.turns * rows * rounds * warps + rounds * SHUFFLE
        )


def columns_of(count: int, hidden: int, rows: int) -> Columns:
    """The best way to share so many columns."""
    found = [Columns(count, sets, wide, hidden) for sets, wide in itertools.product((1, 2, 4, 8), (4, 2, 1))]
    return min(found, key=lambda c: (c.cycles(rows, 8), -c.wide))


# --- which schedules there are ----------------------------------------------------------------------------------------


def takes(form: ScanForm, target: GpuTarget) -> bool:
    """Is there a schedule for a recurrence?"""
    return bool(plans(form, target))


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    r = problem.form
    return [_knobs(p) for p in plans(r.form, target)] if isinstance(r, Recurrent) else []


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    """Every plan that fits."""
    r = problem.form
    return [_knobs(p) for p in plans(r.form, target, SEARCHED)] if isinstance(r, Recurrent) else []


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    if not isinstance(problem.form, Recurrent):
        raise ScheduleError("the kernel is no recurrence")
    return Persistent(problem, problem.form, Plan(**{k: int(v) for k, v in knobs.items()}), target.has_tma).build()


def _knobs(p: Plan) -> Knobs:
    return (
        ("blocks", p.blocks),
        ("warps", p.warps),
        ("units", p.units),
        ("rows", p.rows),
        ("kept", p.kept),
        ("sends", p.sends),
    )


def plans(form: ScanForm, target: GpuTarget, most: int = CANDIDATES) -> list[Plan]:
    """What fits, the fastest by estimate first."""
    if (
        target.major < 8
        or len(form.phases) > MOST_PHASES
        or any(len(p.columns) > MOST_COLUMNS or not p.columns for p in form.phases)
    ):
        return []
    found: dict[Plan, float] = {}
    for blocks, warps, rows in itertools.product(SPLITS if target.has_tma else (1,), WARPS, ROWS):
        units = -(-form.hidden // (blocks * warps))
        wasteful = (
            (rows > 1 and rows >= 2 * form.batch)
            or blocks * warps > form.hidden
            or blocks * warps * units >= 1.3 * form.hidden + warps
        )
        if units * rows > LANES or wasteful:
            continue
        for stores in (False, True):
            p = Plan(blocks, warps, units, rows, 0)
            every = sum(w.weights for w in shared_ways(form, p))
            p = replace(p, kept=min(registers_left(form, p, target, stores), every))
            if fits(form, p, target):
                found[p] = cost(form, p, target)
                if blocks > 1:
                    found[replace(p, sends=1)] = found[p] + SENDING
    return sorted(found, key=lambda p: (found[p], p.sends, p.blocks, p.warps, p.rows))[:most]


def shared_ways(form: ScanForm, p: Plan) -> list[Columns]:
    """How columns are shared in each phase, and which weights stay in registers."""
    left, out = p.kept, []
    for phase in form.phases:
        w = columns_of(p.units * len(phase.columns), form.hidden, p.rows)
        w = replace(w, kept=min(w.pieces, left // w.of_piece))
        left -= w.kept * w.of_piece
        out.append(w)
    return out


def registers_left(form: ScanForm, p: Plan, target: GpuTarget, stores: bool) -> int:
    """Registers of a thread for weights; `stores`: others are shared. Warps divide an SM's four parts."""
    sums = max(w.turns * p.rows * w.wide for w in shared_ways(form, p))
    threads = -(-p.warps // 4) * 4 * LANES
    left = max(min(target.registers // threads, MOST_REGISTERS) - SPARE - sums, 0)
    return left - left // LOADED if stores else left


def fits(form: ScanForm, p: Plan, target: GpuTarget) -> bool:
    ways = shared_ways(form, p)
    vectors = sum((2 if len(ways) == 1 else 1) * p.rows * w.padded * 4 for w in ways)
    exchange = p.warps * p.rows * max(w.turns * w.sets for w in ways) * 4
    stored = stored_bytes(form, p, ways)
    enough = vectors + exchange + stored <= target.shared_bytes and p.kept <= registers_left(
        form, p, target, bool(stored)
    )
    return (
        enough and sum(w.weights for w in ways) <= MOST_WEIGHTS and p.shares <= form.hidden
    )  # each warp sends something


def stored_bytes(form: ScanForm, p: Plan, ways: list[Columns]) -> int:
    """Of the weights of a block in shared memory."""
    return sum(
        w.stored * p.warps * LANES * stored_as(phase.columns[0].matrix).bytes for w, phase in zip(ways, form.phases)
    )


def cost(form: ScanForm, p: Plan, target: GpuTarget) -> float:
    """Estimated cycles of a step, times how often clusters come in turns."""
    ways = shared_ways(form, p)
    total = stored_bytes(form, p, ways) / 128
    for w in ways:
        total += w.cycles(p.rows, p.warps) + (MEETING + p.blocks * p.warps if p.blocks > 1 else BARRIER) + ELEMENTWISE
    groups = -(-form.batch // p.rows)
    in_place = max(int(target.sms * SPLITS[p.blocks]) // p.blocks, 1)
    return total * -(-groups // in_place)


def stored_as(matrix: Expr) -> DType:
    """The type in which an element of a matrix lies in memory."""
    if isinstance(matrix, Op) and matrix.name == f"cast_{f32}" and isinstance(matrix.args[0], Load):
        return matrix.args[0].dtype
    return matrix.dtype


class Persistent:
    """Writes the kernel. A lane has the unit `unit` and the row `row` of the batch, among `rows` of the cluster `r`;
    `has_unit`: there is such a unit, `mine`: and such a row. `overlaps`: it may begin while the one before runs.
    """

    part: Expr
    first_row: Expr
    warp: Expr
    lane: Expr
    unit: Expr
    row: Expr
    r: Expr
    local: Expr
    share: Expr
    has_unit: Expr
    mine: Expr

    def __init__(self, problem: Problem, rec: Recurrent, p: Plan, overlaps: bool) -> None:
        self.problem, self.rec, self.form, self.p, self.overlaps = problem, rec, rec.form, p, overlaps
        self.ways = shared_ways(self.form, p)
        self.single = len(self.form.phases) == 1  # then the vector of the next step is written while this one's is read
        self.vectors: list[Buffer] = []
        self.kept_weights: dict[int, Buffer] = {}
        self.stored: dict[int, Buffer] = {}
        self.states: dict[te.Tensor, Buffer] = {}
        self.kept: dict[Expr, Expr] = {}  # what stays the same in all steps, by its element in the form
        self.rows: dict[Expr, Expr] = {}  # the same for elements of the rows of this step

    def build(self) -> Kernel:
        b, p, form = Builder(), self.p, self.form
        groups = -(-form.batch // p.rows)
        with b.loop("group", groups, "block.x") as group, cluster(b, p.blocks) as part:
            self.part, self.first_row = part, group * p.rows
            self.shared_memory(b)
            with b.loop("w", p.warps, "warp") as w, b.loop("l", LANES, "lane") as lane:
                self.warp, self.lane = w, lane
                self.body(b)
        low = self.problem.lowered.kernel
        return Kernel((Func(low.name, low.entry.params, b.block()),), low.locs)

    def shared_memory(self, b: Builder) -> None:
        p = self.p
        self.vectors = [
            b.alloc("vector", f32, 2 if self.single else 1, p.rows, w.padded, space="shared") for w in self.ways
        ]
        if p.sends:
            self.bars = b.alloc("bars", u64, 2, space="shared")
        self.sums = b.alloc("sums", f32, p.warps, p.rows, max(w.turns * w.sets for w in self.ways), space="shared")
        for f, (w, phase) in enumerate(zip(self.ways, self.form.phases)):
            if w.stored:
                t, vectors = stored_as(phase.columns[0].matrix), p.warps * w.turns * (w.pieces - w.kept)
                self.stored[f] = b.alloc("stored", t, vectors, LANES, w.wide, space="shared")

    def body(self, b: Builder) -> None:
        self.place(b)
        early = self.overlaps and all(x.name in self.problem.constants for x in self.matrices())
        if self.overlaps and not early:
            b.do("pdl_wait")
        for f in range(len(self.ways)):
            self.load_weights(b, f)
        if early:
            b.do("pdl_wait")
        if self.overlaps:
            b.do("pdl_launch")
        if self.p.sends:
            self.arm(b)
        self.fill(b)
        self.start(b)
        b.do("cluster_barrier" if self.p.blocks > 1 else "barrier")
        with b.loop("t", self.form.steps) as t:
            self.step(b, t)
        if self.p.sends:
            b.do("cluster_barrier")  # nobody may end before all have what they were sent
        for s, state in enumerate(self.states.values()):
            with b.when(self.mine):
                b.store(self.rec.out, (self.rec.last_row(s), self.row, self.unit), cast(state[0], self.rec.out.dtype))

    def matrices(self) -> Iterator[Buffer]:
        for phase in self.form.phases:
            for c in phase.columns:
                for t, _ in loads(c.matrix):
                    place = self.rec.places[t]
                    if isinstance(place, Buffer):
                        yield place

    def place(self, b: Builder) -> None:
        p, form = self.p, self.form
        self.local = b.let("u", self.lane % p.units)
        self.r = b.let("r", minimum(self.lane // p.units, p.rows - 1))
        self.share = b.let("share", self.part * p.warps + self.warp)
        at, end = b.let("at", self.first_unit(self.share) + self.local), b.let("end", self.first_unit(self.share + 1))
        self.unit = b.let("unit", minimum(at, form.hidden - 1))
        row = b.let("row", self.first_row + self.r)
        self.row = b.let("row", minimum(row, form.batch - 1))
        self.has_unit = (self.lane < p.units * p.rows) & (at < end)
        self.mine = self.has_unit & (row < form.batch)

    def first_unit(self, share: Expr) -> Expr:
        return share * self.form.hidden // self.p.shares

    # --- before the first step ----------------------------------------------------------------------------------------

    def load_weights(self, b: Builder, f: int) -> None:
        """The columns of this lane; 0 where there is none."""
        w = self.ways[f]
        if w.kept:
            self.kept_weights[f] = b.alloc("weights", f32, w.turns * w.kept, w.wide)
        for low, high in self.spans(w):
            kind = "unroll" if low < w.kept else "range"
            with (
                b.loop("q", high, kind, low) as q,
                b.loop("i", w.turns, "unroll") as i,
                b.loop("v", w.wide, "unroll") as v,
            ):
                self.load_weight(b, f, i, q, v, low)

    def load_weight(self, b: Builder, f: int, i: Expr, q: Expr, v: Expr, low: int) -> None:
        w, phase, hidden = self.ways[f], self.form.phases[f], self.form.hidden
        to, at = self.weight(f, i, q, v, low)
        b.store(to, at, const(0.0, to.dtype))
        column = b.let("c", i * w.sets + self.lane // w.lanes)
        gates = len(phase.columns)
        unit = b.let("at", self.first_unit(self.share) + column // gates)
        k = b.let("k", q * w.stride + self.lane % w.lanes * w.wide + v)
        for g, c in enumerate(phase.columns):
            with b.when((column % gates).eq(g) & (column < w.count) & (unit < hidden) & (k < hidden)):
                b.store(to, at, cast(self.rec.bind(c.matrix, (0, unit), 0, {}, {}, k), to.dtype))

    @staticmethod
    def spans(w: Columns) -> list[tuple[int, int]]:
        """The pieces in registers, then those in shared memory; without empty ones."""
        return [(low, high) for low, high in ((0, w.kept), (w.kept, w.pieces)) if low < high]

    def weight(self, f: int, i: Expr, q: Expr, v: E, low: int) -> tuple[Buffer, tuple[E, ...]]:
        """Where this lane has element v of piece q of its column i, in the span that begins at `low`."""
        w = self.ways[f]
        if low < w.kept:
            return self.kept_weights[f], (i * w.kept + q, v)
        return self.stored[f], ((self.warp * w.turns + i) * (w.pieces - w.kept) + q - w.kept, self.lane, v)

    def arm(self, b: Builder) -> None:
        """An mbarrier for each vector that comes: of the two of one phase, or of each phase."""
        with b.when((self.warp * LANES + self.lane).eq(0)):
            for k in range(2):
                b.do("mbar_init", self.bars.ref(k), 1)
            b.do("mbar_fence")
            for k in range(2):
                b.do("mbar_expect", self.bars.ref(k), self.p.rows * self.form.hidden * f32.bytes)

    def fill(self, b: Builder) -> None:
        """The vector of the first states, by every block for itself; 0 where vectors are padded."""
        p, form, vector = self.p, self.form, self.vectors[0]
        threads = p.warps * LANES
        for f, buf in enumerate(self.vectors):
            copies, width = (2 if self.single else 1), self.ways[f].padded
            with b.loop("e", -(-copies * p.rows * width // threads)) as e:
                at = b.let("at", e * threads + self.warp * LANES + self.lane)
                with b.when(at < copies * p.rows * width):
                    b.store(buf, (at // width // p.rows % copies, at // width % p.rows, at % width), const(0.0, f32))
        b.do("barrier")
        with b.loop("e", -(-p.rows * form.hidden // threads)) as e:
            at = b.let("at", e * threads + self.warp * LANES + self.lane)
            r, unit = b.let("r", at // form.hidden % p.rows), b.let("k", at % form.hidden)
            row = b.let("row", self.first_row + r)
            with b.when((at < p.rows * form.hidden) & (row < form.batch)):
                b.store(vector, (0, r, unit), self.rec.bind(form.phases[0].vector, (row, unit), 0, {}, {}))

    def start(self, b: Builder) -> None:
        """States, what stays the same, and the first rows, into registers."""
        form, rec = self.form, self.rec
        for x in (x for x in form.operand if form.kind(x) == "state"):
            self.states[x] = b.alloc("state", x.dtype, 1)
            b.store(self.states[x], (0,), rec.bind(load(x, (form.row, form.unit)), (self.row, self.unit), 0, {}, {}))
        self.ahead: dict[Expr, Buffer] = {}
        for e in dict.fromkeys(
            e for whole in (*form.made, *(p.vector for p in form.phases[1:])) for e in self.elements(whole)
        ):
            t = e.buf
            assert isinstance(t, te.Tensor)
            if form.kind(t) == "row":
                self.ahead[e] = b.alloc("ahead", t.dtype, 1)
                b.store(self.ahead[e], (0,), self.read(e, const(0)))
            elif form.kind(t) == "captured" and isinstance(rec.places[t], Buffer):
                buf = b.alloc("kept", t.dtype, 1)
                b.store(buf, (0,), self.read(e, const(0)))
                self.kept[e] = buf[0]

    @staticmethod
    def elements(e: Expr) -> list[Load]:
        found = [load(t, idx) for t, idx in loads(e)]
        return [x for x in found if isinstance(x, Load)]

    def read(self, e: Load, step: Expr) -> Expr:
        """An element of an operand, from memory."""
        return self.rec.bind(e, (self.row, self.unit), step, {}, {})

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(self, b: Builder, t: Expr) -> None:
        form, rec = self.form, self.rec
        self.rows = {e: b.let("x", buf[0]) for e, buf in self.ahead.items()}
        after = b.let("after", minimum(t + 1, form.steps - 1))
        for e, buf in self.ahead.items():
            assert isinstance(e, Load)
            b.store(buf, (0,), self.read(e, after))
        turn = t % 2 if self.single else const(0)
        sums: Sums = {}
        for f, phase in enumerate(form.phases):
            self.products(b, f, turn)
            sums.update(self.sums_of(b, phase))
            if f + 1 < len(form.phases):
                self.publish(b, f + 1, self.value(form.phases[f + 1].vector, t, sums), t)
        made = {e: b.let("new", cast(self.value(e, t, sums), rec.out.dtype)) for e in dict.fromkeys(form.made)}
        for state, e in zip(self.states.values(), form.made):
            b.store(state, (0,), made[e])
        self.publish(b, 0, self.value(form.phases[0].vector, t, {}), t)
        with b.when(self.mine):  # behind the barrier, which would wait for these stores
            for q, e in enumerate(form.made[form.carried :]):
                b.store(rec.out, (rec.out_row(q, t), self.row, self.unit), made[e])

    def products(self, b: Builder, f: int, turn: Expr) -> None:
        """The sums of the warp's columns, for all rows, into `sums`."""
        w, p = self.ways[f], self.p
        acc = b.alloc("acc", f32, w.turns, p.rows, w.wide)
        with b.loop("i", w.turns, "unroll") as i, b.loop("r", p.rows, "unroll") as r:
            b.store(acc, (i, r, 0), const(0.0, f32), w.wide)
        for low, high in self.spans(w):
            with b.loop("q", high, "unroll", low) as q, b.loop("r", p.rows, "unroll") as r:
                h = b.let("h", self.vectors[f].at(turn, r, q * w.stride + self.lane % w.lanes * w.wide, lanes=w.wide))
                with b.loop("i", w.turns, "unroll") as i:
                    weights, at = self.weight(f, i, q, 0, low)
                    more = fma(cast(weights.at(*at, lanes=w.wide), f32), h, acc.at(i, r, 0, lanes=w.wide))
                    b.store(acc, (i, r, 0), more, w.wide)
        total = b.alloc("total", f32, w.turns, p.rows)
        with b.loop("i", w.turns, "unroll") as i, b.loop("r", p.rows, "unroll") as r:
            whole = acc.at(i, r, 0, lanes=w.wide)
            b.store(total, (i, r), call("hsum", whole) if w.wide > 1 else whole)
        with b.loop("o", w.lanes.bit_length() - 1, "unroll") as o:
            with b.loop("i", w.turns, "unroll") as i, b.loop("r", p.rows, "unroll") as r:
                b.store(total, (i, r), total[i, r] + call("shfl_xor", total[i, r], call("shl", const(1), o)))
        with b.when((self.lane % w.lanes).eq(0)):
            with b.loop("i", w.turns, "unroll") as i, b.loop("r", p.rows, "unroll") as r:
                b.store(self.sums, (self.warp, r, i * w.sets + self.lane // w.lanes), total[i, r])
        b.do("syncwarp")

    def sums_of(self, b: Builder, phase: Phase) -> Sums:
        """Sums of this lane's unit and row, by tensor and column offset: registers, as phases overwrite the rest."""
        count = len(phase.columns)
        out = {
            (c.dots, c.offset): b.let("sum", self.sums[self.warp, self.r, self.local * count + g])
            for g, c in enumerate(phase.columns)
        }
        if self.p.sends:
            b.do("syncwarp")  # no barrier stands between these and the next sums
        return out

    def value(self, e: Expr, t: Expr, sums: Sums) -> Expr:
        """An expression of the form for the unit and row of this lane."""
        form = self.form
        env: dict[Expr, Expr] = {}
        for x in self.elements(e):
            buf = x.buf
            assert isinstance(buf, te.Tensor)
            kind = form.kind(buf)
            if kind == "dots":
                env[x] = sums[buf, value(x.idx[1] - known(form.unit)) or 0]
            elif kind == "state":
                env[x] = self.states[buf][0]
            else:
                found = self.rows.get(x) if kind == "row" else self.kept.get(x)
                env[x] = found if found is not None else self.read(x, t)
        return self.rec.bind(substitute(e, env), (self.row, self.unit), t, {}, {})

    def publish(self, b: Builder, f: int, element: Expr, t: Expr) -> None:
        """This lane's element of a vector to all blocks; goes on when the vector is there."""
        turn = (t + 1) % 2 if self.single else const(0)
        at, bar, parity = (
            (turn, self.r, self.unit),
            turn if self.single else const(f),
            t // 2 % 2 if self.single else t % 2,
        )
        v = b.let("v", element)
        with b.when(self.has_unit):
            if self.p.blocks == 1:
                b.store(self.vectors[f], at, v)
            else:
                with b.loop("to", self.p.blocks, "unroll") as to:
                    more = (self.bars.ref(bar),) if self.p.sends else ()
                    b.do("peer_send" if more else "peer_store", self.vectors[f].ref(*at), to, v, *more)
        if not self.p.sends:
            b.do("cluster_barrier" if self.p.blocks > 1 else "barrier")
            return
        b.do("mbar_wait", self.bars.ref(bar), parity)
        with b.when((self.warp * LANES + self.lane).eq(0)):
            b.do("mbar_expect", self.bars.ref(bar), self.p.rows * self.form.hidden * f32.bytes)
