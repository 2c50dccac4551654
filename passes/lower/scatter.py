"""A group that ends in a scatter -> one naive kernel: the elements before the updates, then the updates in their order.

    for i..: y[i..] = initial(i..)
    for u..: y[index(u..)] = combine(y[index(u..)], value(u..))

Where the result takes the memory of what it starts from, the first nest is left out. Schedules write the same in shares
of the result, each of which sees all updates in their order: the bits do not depend on the number of shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from dnnc.ir.expr import Expr, Load, Op, Var, cast, const, extent, fma, load, op, substitute, unwrap, walk
from dnnc.ir.loops.stmt import Buffer, Builder
from dnnc.ir.types import product
from dnnc.passes.lower.form import Form


@dataclass(frozen=True, eq=False)
class Beside:
    """Another result of a scatter, of the same shape, updated at the same places."""

    out: Buffer
    initial: Expr | None
    value: Expr


@dataclass(frozen=True, eq=False)
class Scattered(Form):
    """A scatter over memory.

    `initial` is an expression of `axes`, None where the memory holds it; `index` and `value` are of `over`, whose sizes
    are `extents`. `whole`: result axes whose place is an axis of the updates, k -> that axis. `beside`: other results.
    """

    kind = "scatter"
    out: Buffer
    axes: tuple[Var, ...]
    initial: Expr | None
    over: tuple[Var, ...]
    index: tuple[Expr, ...]
    value: Expr
    how: str
    beside: tuple[Beside, ...] = ()

    @property
    def results(self) -> tuple[Beside, ...]:
        """All results."""
        return (Beside(self.out, self.initial, self.value), *self.beside)

    @property
    def starts(self) -> bool:
        """Are elements written before the updates?"""
        return any(r.initial is not None for r in self.results)

    @property
    def elements(self) -> int | Expr:
        """Elements written before the updates, and updates."""
        first = product([unwrap(d) for d in self.out.shape]) if self.starts else 0
        return unwrap(const(first) + product([unwrap(d) for d in self.extents]))  # type: ignore[no-any-return]

    @property
    def extents(self) -> tuple[Expr, ...]:
        return tuple(map(extent, self.over))

    @property
    def whole(self) -> dict[int, int]:
        found = {k: self.over.index(i) for k, i in enumerate(self.index) if isinstance(i, Var) and i in self.over}
        return {k: u for k, u in found.items() if list(found.values()).count(u) == 1}

    @property
    def named(self) -> list[int]:
        """The axes of the result that data names."""
        return [k for k in range(len(self.axes)) if k not in self.whole]

    def starts_as(self, buf: Buffer, out: Buffer) -> bool:
        """Is a result, before the updates, what a buffer holds, which is read nowhere else?"""
        values = [e for r in self.results for e in (r.value, r.initial if r.out is not out else None) if e is not None]
        read = [x for e in (*self.index, *values) for x in walk(e) if isinstance(x, Load) and x.buf is buf]
        first = next(r.initial for r in self.results if r.out is out)
        return not read and first is cast(load(buf, self.axes or (0,)), out.dtype.computed)

    def start(self, b: Builder, at: Sequence[Expr]) -> None:
        """Write an element as it is before the updates."""
        for r in self.results:
            if r.initial is not None:
                v = substitute(r.initial, dict(zip(self.axes, at)))
                b.store(r.out, tuple(at) or (0,), cast(v, r.out.dtype))

    def at(self, u: Sequence[Expr]) -> tuple[Expr, ...]:
        """The place of an update."""
        env: dict[Expr, Expr] = dict(zip(self.over, u))
        return tuple(substitute(i, env) for i in self.index)

    def update(self, b: Builder, u: Sequence[Expr], place: Sequence[Expr]) -> None:
        """Write an update at its place."""
        idx = tuple(place) or (const(0),)
        for r in self.results:
            new = substitute(r.value, dict(zip(self.over, u)))
            if self.how != "last":
                new = combine(self.how, cast(load(r.out, idx), r.out.dtype.computed), new)
            b.store(r.out, idx, cast(new, r.out.dtype))


def combine(how: str, acc: Expr, term: Expr) -> Expr:
    """One step of a reduction. A float product that is summed is contracted here, once for all targets."""
    if how == "sum":
        if isinstance(term, Op) and term.name == "*" and term.dtype.is_float:
            return fma(term.args[0], term.args[1], acc)
        return acc + term
    if how == "prod":
        return acc * term
    return op("fmax", term, acc) if how == "fmax" else op(how, acc, term)


def write(b: Builder, s: Scattered) -> None:
    """Write the naive nest. No loop of it is one over all of the result."""
    if s.starts:
        with ExitStack() as loops:
            s.start(b, [loops.enter_context(b.loop(f"i{k}", d)) for k, d in enumerate(s.out.shape[: len(s.axes)])])
    with ExitStack() as loops:
        u = [loops.enter_context(b.loop(f"u{k}", d)) for k, d in enumerate(s.extents)]
        s.update(b, u, [b.let("at", i) for i in s.at(u)])
