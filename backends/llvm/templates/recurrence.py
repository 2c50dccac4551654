"""A recurrence as one kernel: a thread runs all steps of some batch rows, states in private memory.

    for group of rows:                                                 shared among threads
        states = initial states
        for t in steps:
            for each vector that is multiplied: for block of units:    acc[rows, columns, vectors] in registers
                for k in hidden: acc += vector[k] * matrix[k, units]
            states, outputs = element-wise work on vectors of units

A loop of kernels meets at a barrier after each of them, several times a step. So this pays where a thread alone makes
its products of a step in less time than all threads need to meet: `takes`. Results do not depend on the grouping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.pool import SERIAL_BELOW
from dnnc.backends.llvm.templates.common import worth
from dnnc.backends.llvm.templates.maps import shares
from dnnc.ir import te
from dnnc.ir.dtype import f32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, Load, const, fma, load
from dnnc.ir.loops.stmt import Buffer, Builder, Func, Kernel
from dnnc.passes.lower.recurrence import Recurrent
from dnnc.passes.lower.recurrent_form import Phase, ScanForm, bind, loads
from dnnc.passes.schedule.memory import vectorize
from dnnc.passes.schedule.problem import Knobs, Problem, varied
from dnnc.passes.schedule.state import Schedule

ORDER: tuple[str, ...] = ()  # each sum is added up in the order of k
ROWS = (4, 2, 1)  # that read each weight together
MOST_ROWS = 16  # of a thread: more are better multiplied as matrices
MEETING = 600  # cycles of a barrier between two kernels, and of what they begin with
SPARE = 6  # vector registers that are no sums


def takes(form: ScanForm, target: CpuTarget) -> bool:
    """Is one kernel of all steps faster than kernels for each step?"""
    weights = sum(len(p.columns) for p in form.phases) * form.hidden**2 * 4
    tensors = {t for p in form.phases for c in p.columns for t, _ in loads(c.matrix)} | {
        t for t in form.operand if form.kind(t) == "state"
    }
    if any(t.dtype is not f32 for t in tensors) or weights > target.l2 // 2 or form.batch > MOST_ROWS * target.threads:
        return False
    saved = (
        weights / target.rates.l2 * (1 - 1 / target.threads)
    )  # cycles of a step, if one row of the batch were shared among threads
    return form.batch >= target.threads or saved < MEETING * (len(form.phases) + 1)


def candidates(problem: Problem, target: CpuTarget) -> list[Knobs]:
    if not isinstance(problem.form, Recurrent):
        return []
    batch = problem.form.form.batch
    rows = next(r for r in ROWS if r == 1 or (batch % r == 0 and batch // r >= target.threads))
    return [(("lanes", target.lanes), ("rows", rows))]


def space(problem: Problem, target: CpuTarget) -> list[Knobs]:
    """Rows together, vectors, and whether one thread does all."""
    out: list[Knobs] = []
    for first in candidates(problem, target):
        assert isinstance(problem.form, Recurrent)
        batch, lanes = problem.form.form.batch, int(dict(first)["lanes"])
        sizes = [varied(first, lanes=n, rows=r) for n in (lanes, lanes // 2) if n > 1 for r in ROWS if batch % r == 0]
        out += [*sizes, *(varied(k, **one) for one in shares(problem) for k in sizes)]
    return out


def apply(problem: Problem, knobs: Mapping[str, int | str], target: CpuTarget) -> Kernel:
    if not isinstance(problem.form, Recurrent):
        raise ScheduleError("the kernel is no recurrence")
    return _Steps(problem.form, int(knobs["lanes"]), int(knobs["rows"]), target.registers - SPARE).build(problem, knobs)


class _Steps:
    """Writes the kernel. `vectors`: names of loops whose iterations are lanes."""

    first_row: Expr

    def __init__(self, rec: Recurrent, lanes: int, rows: int, registers: int) -> None:
        self.rec, self.form, self.lanes, self.rows, self.registers = rec, rec.form, lanes, rows, registers
        self.b = Builder()
        self.vectors: list[str] = []
        self.states: dict[te.Tensor, Buffer] = {}
        self.dots: dict[te.Tensor, Buffer] = {}

    @property
    def blocks(self) -> int:
        """Vectors that hold all units."""
        return -(-self.form.hidden // self.lanes)

    def build(self, problem: Problem, knobs: Mapping[str, int | str]) -> Kernel:
        b, form, low = self.b, self.form, problem.lowered.kernel
        groups = form.batch // self.rows
        work = worth(knobs, problem.flops)
        shared = groups > 1 and not (isinstance(work, int) and work < SERIAL_BELOW)
        with b.loop("group", groups, "parallel" if shared else "range") as group:
            self.first_row = group * self.rows
            self.allocate()
            for t, state in self.states.items():
                self.each_unit(partial(self.begin, t, state))
            with b.loop("t", form.steps) as step:
                for phase in form.phases:
                    self.products(phase, step)
                self.each_unit(lambda r, j: self.update(r, j, step))
            for q, state in enumerate(self.states.values()):
                self.each_unit(partial(self.end, q, state))
        s = Schedule(Kernel((Func(low.name, low.entry.params, b.block()),), low.locs))
        return s.apply(vectorize, *(v for v in self.vectors if s.has(v))).done()

    def allocate(self) -> None:
        form, width = self.form, self.blocks * self.lanes
        for t in form.operand:
            if form.kind(t) == "state":
                self.states[t] = self.b.alloc("state", f32, self.rows, width, space="local")
        for t in dict.fromkeys(c.dots for p in form.phases for c in p.columns):
            self.dots[t] = self.b.alloc("dots", f32, self.rows, int(str(t.dims[1])), space="local")

    # --- elements of the form -----------------------------------------------------------------------------------------

    def captured(self, t: te.Tensor, idx: tuple[Expr, ...]) -> Expr:
        place = self.rec.places[t]
        return load(place, idx or (0,)) if isinstance(place, Buffer) else place

    def at(self, e: Expr, r: Expr, unit: Expr, step: Expr, k: Expr | int = 0) -> Expr:
        """An expression of the form for row r of the group and a unit."""
        form, rec = self.form, self.rec

        def element(t: te.Tensor, idx: tuple[Expr, ...]) -> Expr:
            kind = form.kind(t)
            if kind == "number":
                return step
            if kind in ("state", "dots"):
                return load((self.states if kind == "state" else self.dots)[t], (r, idx[1]))
            return self.captured(t, (rec.at_step(form.operand[t] - form.carried, step), *idx) if kind == "row" else idx)

        return bind(e, {form.row: self.first_row + r, form.unit: unit, form.k: const(k)}, element)

    # --- steps --------------------------------------------------------------------------------------------------------

    def each_unit(self, write: Callable[[Expr, Expr], None]) -> None:
        """Call `write(r, unit)` for all rows of the group and all units, these as lanes."""
        b, form = self.b, self.form
        with b.loop("r", self.rows) as r, b.loop("u", self.blocks) as u, b.loop("lane", self.lanes) as lane:
            self.vectors.append(lane.name)
            with b.when(u * self.lanes + lane < form.hidden):
                write(r, u * self.lanes + lane)

    def begin(self, t: te.Tensor, state: Buffer, r: Expr, unit: Expr) -> None:
        self.b.store(state, (r, unit), self.captured(t, (self.first_row + r, unit)))

    def end(self, q: int, state: Buffer, r: Expr, unit: Expr) -> None:
        self.b.store(self.rec.out, (self.rec.last_row(q), self.first_row + r, unit), state[r, unit])

    def update(self, r: Expr, unit: Expr, step: Expr) -> None:
        """New states and stacked values. A unit reads no states but its own."""
        b, form, rec = self.b, self.form, self.rec
        values = {e: b.let("new", self.at(e, r, unit, step)) for e in dict.fromkeys(form.made)}
        for state, e in zip(self.states.values(), form.made):
            b.store(state, (r, unit), values[e])
        for q, e in enumerate(form.made[form.carried :]):
            b.store(rec.out, (rec.out_row(q, step), self.first_row + r, unit), values[e])

    def products(self, phase: Phase, step: Expr) -> None:
        """All sums with one vector, some vectors of units at a time."""
        b, form, columns = self.b, self.form, phase.columns
        vector = self.vector(phase, step)
        together = next(
            n
            for n in (8, 4, 3, 2, 1)
            if n == 1 or (self.blocks % n == 0 and n * self.rows * len(columns) <= self.registers)
        )
        with b.loop("ub", self.blocks // together) as ub:
            acc = b.alloc("acc", f32, self.rows, len(columns), together, self.lanes)
            self.tile(
                ub, together, len(columns), lambda r, c, v, lane, unit: b.store(acc, (r, c, v, lane), const(0.0, f32))
            )
            with b.loop("k", form.hidden) as k:

                def step_of(r: Expr, c: int, v: Expr, lane: Expr, unit: Expr) -> None:
                    weight = self.at(columns[c].matrix, r, unit, step, k)
                    b.store(acc, (r, c, v, lane), fma(vector(r, k), weight, acc[r, c, v, lane]))

                self.tile(ub, together, len(columns), step_of)

            def keep(r: Expr, c: int, v: Expr, lane: Expr, unit: Expr) -> None:
                b.store(self.dots[columns[c].dots], (r, unit + columns[c].offset), acc[r, c, v, lane])

            self.tile(ub, together, len(columns), keep)

    def vector(self, phase: Phase, step: Expr) -> Callable[[Expr, Expr], Expr]:
        """What is multiplied, by row and unit: a state as it lies, anything else made once."""
        if isinstance(phase.vector, Load):
            return lambda r, k: self.at(phase.vector, r, k, step)
        made = self.b.alloc("vector", f32, self.rows, self.blocks * self.lanes, space="local")
        self.each_unit(lambda r, j: self.b.store(made, (r, j), self.at(phase.vector, r, j, step)))
        return lambda r, k: made[r, k]

    def tile(self, ub: Expr, together: int, columns: int, write: Callable[[Expr, int, Expr, Expr, Expr], None]) -> None:
        """Call `write(r, column, vector, lane, unit)` for all of a tile, without loops but for the lanes."""
        b = self.b
        with b.loop("rr", self.rows, "unroll") as r, b.loop("v", together, "unroll") as v:
            for c in range(columns):
                with b.loop("lane", self.lanes) as lane:
                    self.vectors.append(lane.name)
                    unit = (ub * together + v) * self.lanes + lane
                    with b.when(unit < self.form.hidden):
                        write(r, c, v, lane, unit)
