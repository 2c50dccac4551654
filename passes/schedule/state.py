"""The handle that recipes schedule with: one kernel body, rewritten by primitives that address loops by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, const, unwrap
from dnnc.ir.loops.stmt import (
    Alloc,
    Block,
    Buffer,
    For,
    If,
    Kernel,
    Param,
    Stmt,
    loop_var,
    map_stmt,
    substitute_block,
    walk_stmts,
)
from dnnc.ir.loops.text import show_block
from dnnc.passes.schedule import buffers
from dnnc.passes.schedule.buffers import swap_buffers
from dnnc.passes.schedule.parallel_legality import obstacle


def loops(b: Block) -> Iterator[For]:
    """Every loop, parents first."""
    return (s for s in walk_stmts(b) if isinstance(s, For))


def find(b: Block, name: str) -> For:
    hits = [s for s in loops(b) if s.var.name == name]
    if len(hits) != 1:
        raise ScheduleError(
            f"{len(hits) or 'no'} loops are called {name}; there are {', '.join(s.var.name for s in loops(b))}"
        )
    return hits[0]


def replace_stmt(b: Block, old: Stmt, new: Callable[[], Block]) -> Block:
    """The block with one statement replaced; what does not contain it is shared."""
    done = False

    def go(block: Block) -> Block:
        nonlocal done
        if done or not any(s is old or isinstance(s, (For, If)) for s in block):
            return block
        out: list[Stmt] = []
        for s in block:
            if s is old:
                done = True
                out.extend(new())
            elif isinstance(s, (For, If)) and not done:
                made = map_stmt(s, lambda e: e, go)
                out.append(made if done else s)
            else:
                out.append(s)
        return tuple(out)

    return go(b)


def edit(b: Block, name: str, f: Callable[[For], Block]) -> Block:
    """Replace the loop called `name` by f(loop)."""
    loop = find(b, name)
    return replace_stmt(b, loop, lambda: f(loop))


def only(s: For) -> For:
    """The loop right inside a loop; ScheduleError when they are not perfectly nested."""
    if len(s.body) != 1 or not isinstance(s.body[0], For):
        raise ScheduleError(f"{s.var.name} is not perfectly nested; its body is\n{show_block(s.body)}")
    return s.body[0]


def make_loop(name: str, extent: Expr | int, kind: str, body: Callable[[Expr], Block], lo: int = 0) -> For:
    lo_, hi = const(lo), const(extent) + lo
    v = loop_var(name, lo_, hi)
    return For(v, lo_, hi, kind, body(v))


def renamed(b: Block, suffix: str) -> Block:
    """A copy whose loops, lets and buffers have names of their own, as two copies of one block need in one kernel."""

    def go(block: Block, env: dict[Expr, Expr], bufs: dict[Buffer, Buffer]) -> Block:
        out: list[Stmt] = []
        for s in block:
            if isinstance(s, For):
                v = loop_var(s.var.name + suffix, s.lo, s.hi)
                body = substitute_block(s.body, {s.var: v})
                out.append(For(v, s.lo, s.hi, s.kind, go(body, env, bufs)))
            elif isinstance(s, Alloc):
                new = Buffer(s.buf.name + suffix, s.buf.dtype, s.buf.shape, s.buf.space, s.buf.strides, s.buf.swizzle)
                bufs[s.buf] = new
                out.append(Alloc(new))
            elif isinstance(s, If):
                out.append(If(s.cond, go(s.then, env, bufs), go(s.other, env, bufs)))
            else:
                out.append(s)
        return tuple(out)

    bufs: dict[Buffer, Buffer] = {}
    out = go(b, {}, bufs)
    return swap_buffers(out, bufs)


class Schedule:
    """A kernel being scheduled. Primitives rewrite `body` or raise ScheduleError; `steps` records them."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.body = kernel.entry.body
        self.steps: list[str] = []

    def loop(self, name: str) -> For:
        return find(self.body, name)

    def has(self, name: str) -> bool:
        return any(s.var.name == name for s in loops(self.body))

    def extent(self, name: str) -> int | Expr:
        """The trip count: an int when constant."""
        return unwrap(self.loop(name).extent)  # type: ignore[no-any-return]

    def apply(self, primitive: Callable[..., Block], *args: object, **kw: object) -> Schedule:
        body = primitive(self.body, *args, **kw)
        for loop in loops(body):  # a step on another loop must not take from a parallel one what it was shown to be
            why = obstacle(loop) if loop.kind == "parallel" and primitive.__name__ != "annotate" else ""
            if why:
                raise ScheduleError(f"{loop.var.name} could then not run in parallel: {why}")
        self.body = body
        shown = [*map(repr, args), *(f"{k}={v!r}" for k, v in kw.items())]
        self.steps.append(f"{primitive.__name__}({', '.join(shown)})")
        return self

    def collapse(self, *keep: str) -> Schedule:
        """Join axes of buffers (but those to keep) whose indices have become one; parameters keep their places."""
        params, self.body = buffers.collapse(self.kernel.entry.params, self.body, keep)
        return self._with_params(params, f"collapse({', '.join(map(repr, keep))})")

    def flatten(self) -> Schedule:
        """Make one axis of each buffer that is both read and written."""
        params, self.body = buffers.flatten(self.kernel.entry.params, self.body)
        return self._with_params(params, "flatten()")

    def _with_params(self, params: tuple[Param, ...], step: str) -> Schedule:
        if params != self.kernel.entry.params:
            entry = replace(self.kernel.entry, params=params)
            self.kernel = replace(self.kernel, funcs=(*self.kernel.funcs[:-1], entry))
            self.steps.append(step)
        return self

    def mark(self) -> tuple[Kernel, Block, int]:
        """Where the schedule stands, for `restore`."""
        return self.kernel, self.body, len(self.steps)

    def restore(self, mark: tuple[Kernel, Block, int]) -> None:
        """Undo all that was applied since."""
        self.kernel, self.body = mark[:2]
        del self.steps[mark[2] :]

    def done(self) -> Kernel:
        return self.kernel.with_body(self.body)
