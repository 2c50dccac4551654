"""Tensor expressions: what an op computes, element by element over logical indices, for every target alike.

A Tensor is a buffer with a *stage* that says what each of its elements is. An op's `compute` gets Tensors without
stages (its inputs) and returns Tensors whose stages load them. Lowering inlines, places and schedules the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dnnc.ir.dtype import DType, boolean
from dnnc.ir.errors import ShapeError
from dnnc.ir.expr import Const, E, Expr, Linear, Load, Op, Var, cast, children, const, free, load, unwrap, var, walk
from dnnc.ir.loops.stmt import Buffer
from dnnc.ir.op import Trait
from dnnc.ir.types import Dim, product

UPDATES = ("last", "sum", "prod", "max", "min")
COMBINE = ("sum", "prod", "max", "min", "fmax")  # fmax: a maximum that need not propagate NaN


def identity(combine: str, dtype: DType) -> int | float | bool:
    """What a reduction starts from where nothing else is said."""
    if combine in ("sum", "prod"):
        return int(combine == "prod")
    low = combine in ("max", "fmax")
    if dtype.is_float:
        return float("-inf") if low else float("inf")
    return not low if dtype is boolean else dtype.range[0 if low else 1]


@dataclass(frozen=True, eq=False)
class Scatter:
    """Updates of a stage's elements, in the order of the axes: `for axes: out[index] = combine(out[index], value)`.

    `index` has an expression for each axis of the result, in terms of `axes`; it may load, and is in range (`guarded`).
    `combine` is `last`, an element's last update, or a reduction of COMBINE; steps are rounded to the result's dtype.
    """

    axes: tuple[Var, ...]
    index: tuple[Expr, ...]
    value: Expr
    combine: str


@dataclass(frozen=True, eq=False)
class Stage:
    """`out[axes] = value`, or `out[axes] = combine over reduce of value where cond`, from combine's identity.

    `value` has the dtype in which registers compute; a reduction is combined in that dtype and only the result is
    rounded to out's. Where an element depends on others of the same tensor, `own` stands for it in `value`: those
    before it along the last axis. With `updates`, `value` is what elements are before these.
    """

    axes: tuple[Var, ...]
    value: Expr
    reduce: tuple[Var, ...] = ()
    combine: str = ""
    where: Expr | None = None
    own: Tensor | None = None
    updates: Scatter | None = None


@dataclass(frozen=True, eq=False)
class Tensor(Buffer):
    """A logical array: the inputs of `compute` have no stage. Reading an element gives it in its compute dtype."""

    stage: Stage | None = None

    def __getitem__(self, idx: E | tuple[E, ...]) -> Expr:
        return cast(load(self, idx if isinstance(idx, tuple) else (idx,)), self.dtype.computed)

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The shape with constants as ints."""
        return tuple(unwrap(d) for d in self.shape)


def placeholder(name: str, dtype: DType, shape: Sequence[Dim]) -> Tensor:
    return Tensor(name, dtype, tuple(map(const, shape)))


def placeholder_axis(name: str) -> Var:
    """An index variable that belongs to no loop."""
    return var(name, lo=0)


def _axes(shape: Sequence[Dim], prefix: str) -> tuple[Var, ...]:
    return tuple(var(f"{prefix}{k}", lo=0, hi=unwrap(const(d) - 1)) for k, d in enumerate(shape))


def compute(shape: Sequence[Dim], dtype: DType, element: Callable[..., Expr], name: str = "t") -> Tensor:
    """`t[i0, i1, ...] = element(i0, i1, ...)`."""
    axes = _axes(shape, "i")
    return Tensor(name, dtype, tuple(map(const, shape)), stage=Stage(axes, const(element(*axes), dtype.computed)))


def reduce(
    shape: Sequence[Dim],
    extents: Sequence[Dim],
    dtype: DType,
    combine: str,
    element: Callable[..., Expr],
    where: Callable[..., Expr] | None = None,
    name: str = "t",
) -> Tensor:
    """`t[i...] = combine over r... of element(i..., r...)` where `where(i..., r...)`; else it is not evaluated."""
    assert combine in COMBINE
    axes, rs = _axes(shape, "i"), _axes(extents, "r")
    cond = where(*axes, *rs) if where is not None else None
    stage = Stage(axes, const(element(*axes, *rs), dtype.computed), rs, combine, cond)
    return Tensor(name, dtype, tuple(map(const, shape)), stage=stage)


def recur(shape: Sequence[Dim], dtype: DType, element: Callable[..., Expr], name: str = "t") -> Tensor:
    """`t[i0, ..., in] = element(t, i0, ..., in)`, reading t at i0, ... and a smaller in. Op: Trait.SEQUENTIAL."""
    own, axes = placeholder(name, dtype, shape), _axes(shape, "i")
    stage = Stage(axes, const(element(own, *axes), dtype.computed), own=own)
    return Tensor(name, dtype, own.shape, stage=stage)


def scatter(
    shape: Sequence[Dim],
    extents: Sequence[Dim],
    dtype: DType,
    combine: str,
    initial: Callable[..., Expr],
    index: Callable[..., Sequence[E]],
    update: Callable[..., Expr],
    name: str = "t",
) -> Tensor:
    """`t[i...] = initial(i...)`, then for u... of `extents`: `t[index(u...)] = combine(t[index(u...)], update(u...))`.

    `combine` is one of UPDATES. `index` gives one index for each axis of `shape`; those that are read from tensors must
    be in range (`guarded`). It is a result of its op: no other expression reads it.
    """
    assert combine in UPDATES
    axes, over = _axes(shape, "i"), _axes(extents, "u")
    at = tuple(map(const, index(*over)))
    assert len(at) == len(axes)
    made = Scatter(over, at, const(update(*over), dtype.computed), combine)
    return Tensor(
        name, dtype, tuple(map(const, shape)), stage=Stage(axes, const(initial(*axes), dtype.computed), updates=made)
    )


def stages(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """Every Tensor with a stage that the outputs need, each once, producers first."""
    seen: set[Tensor] = set()

    def visit(t: Tensor) -> Iterator[Tensor]:
        if t in seen or t.stage is None:
            return
        seen.add(t)
        for e in values_of(t.stage):
            for x in walk(e):
                if isinstance(x, Load) and isinstance(x.buf, Tensor):
                    yield from visit(x.buf)
        yield t

    for o in outputs:
        yield from visit(o)


# --- what an expression is like ---------------------------------------------------------------------------------------


def form(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> frozenset[Trait]:
    """The traits that tensor expressions of these operands have by their form.

    REDUCTION where every element of the first operand goes into one sum, LOOPS where there are other reductions, and
    ELEMENTWISE, PLACED, SCATTER and SEQUENTIAL as `Trait` has them.
    """
    within = [
        t.name for t in stages(outputs) if t.stage is not None and t.stage.updates is not None and t not in outputs
    ]
    if within:
        raise ShapeError(
            f"{within[0]} is a scatter that another expression reads; expected it as a result: make the rest an op of "
            "its own"
        )
    every = [t.stage for t in stages(outputs) if t.stage is not None]
    if any(s.own is not None for s in every):
        return frozenset((Trait.LOOPS, Trait.SEQUENTIAL))
    if any(s.updates is not None for s in every):
        return frozenset((Trait.SCATTER,))
    loads = [(s, x) for s in every for e in values_of(s) for x in walk(e) if isinstance(x, Load)]
    if any(s.reduce for s in every):
        first = [(s, x) for s, x in loads if inputs and x.buf is inputs[0]]
        once = len(outputs) == 1 and len(first) == 1 and _once(*first[0])
        return frozenset((Trait.REDUCTION,) if once else (Trait.LOOPS,))
    if len(outputs) > 1 or not all(_in_place(x, s.axes) for s, x in loads):
        return frozenset()
    return frozenset((Trait.PLACED,) if any(map(_reads_place, every)) else (Trait.ELEMENTWISE,))


def values_of(s: Stage) -> tuple[Expr, ...]:
    """The expressions of a stage."""
    guards = () if s.where is None else (s.where,)
    return (s.value, *guards, *(() if s.updates is None else (*s.updates.index, s.updates.value)))


def sizes(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[str, Var]:
    """The symbolic sizes in the shapes and expressions of an op, by name."""
    every = list(stages(outputs))
    found = {v for t in (*inputs, *every) for d in t.shape for v in free(d)}
    for s in (t.stage for t in every if t.stage is not None):
        axes = {*s.axes, *(s.reduce if s.updates is None else s.updates.axes)}
        found |= {v for e in values_of(s) for v in free(e) - axes}
    return {v.name: v for v in sorted(found, key=lambda v: v.name)}


def _in_place(x: Load, axes: Sequence[Var]) -> bool:
    """Is it the element at `axes`, of an array that may be broadcast?"""
    if len(x.idx) > len(axes):
        return False
    tail = axes[len(axes) - len(x.idx) :]
    return all(i is a or (unwrap(i) == 0 and unwrap(d) == 1) for i, a, d in zip(x.idx, tail, x.buf.shape))


def _reads_place(s: Stage) -> bool:
    """Does an element depend on its index, other than through the elements that it loads?"""
    todo, seen = list(values_of(s)), set[Expr]()
    for e in todo:
        if e not in seen and not isinstance(e, Load):
            seen.add(e)
            todo += children(e)
    return not seen.isdisjoint(s.axes)


def _once(s: Stage, x: Load) -> bool:
    """Is every element read once, in one sum: by axes of the stage, each in one place?"""
    return bool(s.reduce) and len(x.idx) == len(set(x.idx)) and set(x.idx) == {*s.axes, *s.reduce}


def operands(outputs: Sequence[Tensor]) -> set[Tensor]:
    """Return the tensors without stages that expressions read, without those that stand for earlier ones."""
    every = [t.stage for t in stages(outputs) if t.stage is not None]
    own = {s.own for s in every}
    read = {
        x.buf for s in every for e in values_of(s) for x in walk(e) if isinstance(x, Load) and isinstance(x.buf, Tensor)
    }
    return {t for t in read if t.stage is None and t not in own}


def checks(outputs: Sequence[Tensor]) -> bool:
    """Is there an index that is checked when the expression runs?"""
    every = [t.stage for t in stages(outputs) if t.stage is not None]
    return any(isinstance(x, Op) and x.name == "guard" for s in every for e in values_of(s) for x in walk(e))


def terms(outputs: Sequence[Tensor]) -> Dim:
    """Terms of the longest reduction."""
    found: list[Dim] = [1]
    for t in stages(outputs):
        assert t.stage is not None
        found.append(product([unwrap(const(v.hi) + 1) for v in t.stage.reduce if v.hi is not None]))
    known = [n for n in found if isinstance(n, int)]
    return max(known) if len(known) == len(found) else next(n for n in found if not isinstance(n, int))


def flops(outputs: Sequence[Tensor]) -> Dim:
    """Operations on floats, a call of a function counted as one, where each stage is computed once."""
    total: Expr = const(0)
    for t in stages(outputs):
        assert t.stage is not None
        steps = sum(
            1
            for e in values_of(t.stage)
            for x in walk(e)
            if isinstance(x, Op) and x.dtype.is_float and x.name != "select"
        )
        over = t.stage.reduce if t.stage.updates is None else t.stage.updates.axes
        lead = t.dims if t.stage.updates is None else ()
        many = product([*lead, *(unwrap(const(v.hi) + 1) for v in over if v.hi is not None)])
        total = total + const(many) * (steps + bool(over))
    return unwrap(total)  # type: ignore[no-any-return]


def text(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> str:
    """All that expressions say, in numbered lines: the same text means the same computation, in every process."""
    lines: list[str] = []
    names = {t: f"x{k}" for k, t in enumerate(inputs)}
    lines += [f"{names[t]}: {t.dtype}{list(t.shape)}" for t in inputs]
    for k, t in enumerate(stages(outputs)):
        s = t.stage
        assert s is not None
        names[t] = f"t{k}"
        if s.own is not None:
            names[s.own] = f"t{k}"
        numbers: dict[Expr, str] = {}
        over = s.reduce if s.updates is None else s.updates.axes
        for e in (*s.axes, *over, *values_of(s)):
            _lines(e, names, numbers, lines)
        head = [" ".join(numbers[v] for v in vs) for vs in (s.axes, over, values_of(s))]
        how = s.combine if s.updates is None else f"scatter {s.updates.combine}"
        lines.append(f"{names[t]}: {t.dtype}{list(t.shape)} = {how} {' | '.join(head)}")
    return "\n".join([*lines, "return " + " ".join(names[t] for t in outputs)])


def _lines(root: Expr, names: dict[Tensor, str], numbers: dict[Expr, str], lines: list[str]) -> None:
    """Write an expression, its operands first, each once."""
    stack = [root]
    while stack:
        e = stack[-1]
        todo = [c for c in children(e) if c not in numbers]
        if e in numbers or todo:
            stack = [*stack[:-1], *todo] if e in numbers else [*stack, *todo]
            continue
        stack.pop()
        numbers[e] = f"e{len(numbers)}"
        lines.append(f"{numbers[e]}: {e.dtype} = {_said(e, names)} {' '.join(numbers[c] for c in children(e))}")


def _said(e: Expr, names: dict[Tensor, str]) -> str:
    if isinstance(e, Load):
        return names[e.buf] if isinstance(e.buf, Tensor) else e.buf.name
    if isinstance(e, Var):
        return f"{e.name} {e.lo!r} {e.hi!r} {e.div}"
    if isinstance(e, Const):
        return repr(e.value)
    if isinstance(e, Linear):
        return f"linear {e.const} {[c for _, c in e.terms]}"
    return e.name if isinstance(e, Op) else type(e).__name__
