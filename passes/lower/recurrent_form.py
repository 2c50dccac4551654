"""What a loop of known length computes in a step, where that is products of a few rows with fixed matrices and
element-wise work for each unit.

In comes a `loop` or `recurrence` node; out comes its ScanForm: every new state, as an expression of one row and one
unit, in terms of that unit's states, its elements of the scanned rows and captured values, and sums of products. A sum
multiplies a *vector*, which all units must know, by a matrix; the vector of phase 0 is made of the states, that of
phase 1 of what phase 0 gave (a GRU's reset gate), so a step has as many meetings as phases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dnnc.ir import te
from dnnc.ir.dtype import bf16, f16, f32
from dnnc.ir.expr import Const, Expr, Load, Op, Var, free, load, rebuild, substitute, var, walk
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.op import ContractionForm, Trait
from dnnc.passes.lower.nests import known, narrowed, scalar_constant

FLOATS = (f32, f16, bf16)
Leaf = Callable[[te.Tensor, tuple[Expr, ...]], Expr]  # where an element of a tensor lies


class NoForm(Exception):
    """The loop is none of these; the text says why."""


@dataclass(frozen=True)
class Phase:
    """The products with one vector, whose element of row `row` and unit `unit` is `vector`.

    columns: for each sum that a unit needs, the matrix's element at (k, unit) and the tensor and column by which
        expressions know the sum.
    """

    vector: Expr
    columns: tuple[Column, ...]


@dataclass(frozen=True)
class Column:
    matrix: Expr
    dots: te.Tensor
    offset: int


@dataclass(frozen=True)
class ScanForm:
    """`made`: carried and stacked values at (row, unit); `operand`: by tensor; `number`: iteration; `k`: summed."""

    steps: int
    batch: int
    hidden: int
    carried: int
    scanned: int
    row: Var
    unit: Var
    k: Var
    phases: tuple[Phase, ...]
    made: tuple[Expr, ...]
    operand: dict[te.Tensor, int]
    number: te.Tensor
    constants: dict[te.Tensor, Value]
    backward: tuple[bool, ...]

    @property
    def stacked(self) -> int:
        return len(self.made) - self.carried

    def kind(self, t: te.Tensor) -> str:
        """What a tensor is: number, state, row, captured or dots."""
        if t is self.number:
            return "number"
        if t not in self.operand:
            return "constant" if t in self.constants else "dots"
        k = self.operand[t]
        return "state" if k < self.carried else "row" if k < self.carried + self.scanned else "captured"

    def back(self, k: int) -> bool:
        """Does scanned operand k, or stacked value k - scanned, run from its last row to its first?"""
        return bool(self.backward) and self.backward[k]


def form_of(n: Node) -> ScanForm:
    """The form of a `loop` or a `recurrence`. NoForm says why it has none."""
    return _Reader(n).run()


def loads(e: Expr) -> list[tuple[te.Tensor, tuple[Expr, ...]]]:
    """Elements of tensors that an expression reads, in a deterministic order."""
    return [(x.buf, x.idx) for x in reversed(list(walk(e))) if isinstance(x, Load) and isinstance(x.buf, te.Tensor)]


def bind(e: Expr, at: dict[Var, Expr], leaf: Leaf) -> Expr:
    """An expression of a form at a place: variables as `at` says, elements of tensors as `leaf` says."""
    memo: dict[Expr, Expr] = {}

    def go(x: Expr) -> Expr:
        r = memo.get(x)
        if r is None:
            if isinstance(x, Var):
                r = at.get(x, x)
            elif isinstance(x, Load) and isinstance(x.buf, te.Tensor):
                r = leaf(x.buf, tuple(map(go, x.idx)))
            else:
                r = rebuild(x, go)
            memo[x] = r
        return r

    return go(e)


@dataclass(frozen=True)
class _Product:
    lhs: Expr
    rhs: Expr
    n: Var
    dots: te.Tensor
    phase: int


class _Reader:
    def __init__(self, node: Node) -> None:
        self.node = node
        self.body: Graph = node.attrs["body"]
        self.operand: dict[te.Tensor, int] = {}
        self.constants: dict[te.Tensor, Value] = {}
        self.numbers: dict[te.Tensor, Expr] = {}
        self.tensors: dict[Value, te.Tensor] = {}
        self.products: list[_Product] = []
        self.memo: dict[Expr, Expr] = {}

    def run(self) -> ScanForm:
        n = self.node
        steps, carried, scanned = n.attrs["length"], n.attrs["carried"], n.attrs["scanned"]
        first = n.op.deciding
        if any(v is not None for v in n.inputs[:first]):
            raise NoForm("its trip count or a condition is known at run time only")
        operands = n.inputs[first:]
        outs = self.body.outputs
        if not isinstance(steps, int) or steps < 1 or not carried or any(v is None for v in operands):
            raise NoForm("its length or its states are not known")
        t = outs[0].type
        if any(v.type != t for v in outs) or t.rank != 2 or t.dtype not in FLOATS or not t.row_major:
            raise NoForm("its states are not all of one type [batch, hidden] of floats")
        if not all(isinstance(d, int) and d > 0 for d in t.shape):
            raise NoForm("the sizes of its states are not known")
        batch, hidden = (int(str(d)) for d in t.shape)
        self.row, self.unit, self.k = (
            var(s, lo=0, hi=d - 1) for s, d in (("row.", batch), ("unit.", hidden), ("k.", hidden))
        )
        self.here = (known(self.row), known(self.unit))
        self.batch, self.hidden, self.carried, self.scanned = batch, hidden, carried, scanned
        self.inputs(operands)
        for m in self.body.nodes():
            self.visit(m)
        made = tuple(self.element(self.tensors[v]) for v in outs)
        for e in made:
            self.check(e)
        return ScanForm(
            steps, batch, hidden, carried, scanned, self.row, self.unit, self.k, self.phases(made), made, self.operand,
            self.number,
            self.constants, tuple(n.attrs["backward"]),
        )  # fmt: skip

    def inputs(self, operands: list[Value | None]) -> None:
        for k, v in enumerate(self.body.inputs):
            if not v.type.row_major or not all(isinstance(d, int) for d in v.type.shape):
                raise NoForm(f"{v.name} has a layout, or a size that is not known")
            t = self.tensors[v] = te.placeholder(f"x{k}", v.type.dtype, v.type.shape)
            if k:
                self.operand[t] = k - 1
        self.number = self.tensors[self.body.inputs[0]]
        for v in self.body.constants:
            t = self.tensors[v] = te.placeholder(v.name, v.type.dtype, v.type.shape)
            number = scalar_constant(self.body, v)
            if number is not None:
                self.numbers[t] = number
            elif not v.type.row_major:
                raise NoForm(f"{v.name} has a layout")
            else:
                self.constants[t] = v
        for v in self.body.parameters:
            if not v.type.row_major:
                raise NoForm(f"{v.name} has a layout")
            t = self.tensors[v] = te.placeholder(v.name, v.type.dtype, v.type.shape)
            self.constants[t] = v

    def visit(self, m: Node) -> None:
        if len(m.outputs) != 1 or not m.output.type.row_major:
            raise NoForm(f"its body has {m.op.name}")
        if m.op.contraction is ContractionForm.PRODUCT:
            self.tensors[m.output] = self.product(m)
            return
        if m.op.compute is None or m.op.traits & {
            Trait.CONTRACTION,
            Trait.REDUCTION,
            Trait.LOOPS,
            Trait.SEQUENTIAL,
            Trait.SCATTER,
        }:
            raise NoForm(f"its body has {m.op.name}")
        made = m.op.compute(*(self.tensors[v] if v is not None else None for v in m.inputs), **m.attrs)
        if not isinstance(made, te.Tensor) or made.stage is None or made.stage.reduce or made.stage.own is not None:
            raise NoForm(f"its body has {m.op.name}")
        self.tensors[m.output] = made

    def product(self, m: Node) -> te.Tensor:
        x, w = m.inputs[0], m.inputs[1]
        assert x is not None and w is not None
        if (
            x.type.shape != (self.batch, self.hidden)
            or w.type.rank != 2
            or x.type.dtype not in FLOATS
            or w.type.dtype not in FLOATS
        ):
            raise NoForm(f"{m.op.name} multiplies {x.type} by {w.type}")
        size = int(str(w.type.shape[1]))
        n = var("n.", lo=0, hi=size - 1)
        lhs = self.element(self.tensors[x])
        rhs = self.resolve(self.tensors[w][known(self.k), known(n)])
        self.check(lhs)
        sources = {self.kind(t) for t, _ in loads(rhs)}
        if not sources <= {"captured", "constant"} or not free(rhs) <= {self.k, n}:
            raise NoForm(f"the matrix {w.name} is not the same in all steps")
        phases = [p.phase for p in self.products if any(t is p.dots for t, _ in loads(lhs))]
        phase = 1 + max(phases, default=-1)
        if not phase and not {self.kind(t) for t, _ in loads(lhs)} <= {"state", "captured", "constant"}:
            raise NoForm(f"{x.name}, which is multiplied, is not made of states alone")
        dots = te.placeholder("dots", f32, (self.batch, size))
        self.products.append(_Product(lhs, rhs, n, dots, phase))
        return dots

    def kind(self, t: te.Tensor) -> str:
        if t is self.number:
            return "number"
        k = self.operand.get(t)
        if k is None:
            return "constant" if t in self.constants else "dots"
        return "state" if k < self.carried else "row" if k < self.carried + self.scanned else "captured"

    def element(self, t: te.Tensor) -> Expr:
        if t.dims != (self.batch, self.hidden):
            raise NoForm(f"a vector of a step is {list(t.dims)}")
        return self.resolve(t[self.here])

    def resolve(self, e: Expr) -> Expr:
        """Inline all stages; what is left are elements of operands, constants and sums."""
        r = self.memo.get(e)
        if r is None:
            r = self.memo[e] = self._resolve(e)
        return r

    def _resolve(self, e: Expr) -> Expr:
        if isinstance(e, Load) and isinstance(e.buf, te.Tensor):
            idx = tuple(known(self.resolve(i)) for i in e.idx)
            if e.buf in self.numbers:
                return self.numbers[e.buf]
            if e.buf.stage is None:
                return load(e.buf, idx)
            return narrowed(self.resolve(substitute(e.buf.stage.value, dict(zip(e.buf.stage.axes, idx)))), e.buf.dtype)
        r = rebuild(e, self.resolve)
        if isinstance(r, Op) and r.name.startswith("cast_") and r.args[0].dtype is r.dtype:
            return r.args[0]
        return r

    def check(self, e: Expr) -> None:
        """Does a unit need nothing of other units but sums?"""
        if not free(e) <= {self.row, self.unit}:
            raise NoForm("an element depends on more than its row and unit")
        for t, idx in loads(e):
            kind = self.kind(t)
            if any(isinstance(x, Load) for i in idx for x in walk(i)):
                raise NoForm("its body looks things up")
            if kind == "state" and idx != self.here:
                raise NoForm("a unit reads the state of another one")
            if kind == "dots" and (idx[0] is not self.here[0] or self.offset(idx) is None):
                raise NoForm("a unit reads sums of several others")

    def offset(self, idx: tuple[Expr, ...]) -> int | None:
        """c of column `unit + c`."""
        rest = idx[1] - self.here[1]
        return int(rest.value) if isinstance(rest, Const) else None

    def phases(self, made: tuple[Expr, ...]) -> tuple[Phase, ...]:
        """Return the products by their vector, in the order of their phases, and the columns that are read."""
        count = 1 + max((p.phase for p in self.products), default=-1)
        if not count:
            raise NoForm("its body has no product")
        out: list[Phase] = []
        readers = [*made, *(p.lhs for p in self.products)]
        for phase in range(count):
            mine = [p for p in self.products if p.phase == phase]
            if any(p.lhs is not mine[0].lhs for p in mine):
                raise NoForm("its body multiplies several vectors at once")
            columns: list[Column] = []
            for p in mine:
                offsets = {self.offset(idx) for e in readers for t, idx in loads(e) if t is p.dots}
                for c in sorted(o for o in offsets if o is not None):
                    columns.append(Column(substitute(p.rhs, {p.n: self.here[1] + c}), p.dots, c))
            out.append(Phase(mine[0].lhs, tuple(columns)))
        return tuple(out)


__all__ = ["Column", "ScanForm", "NoForm", "Phase", "bind", "form_of", "known", "loads"]
