"""Statements -> LLVM IR: loops, branches, stores and memory, placed into the regions of a FuncEmitter."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

from dnnc.backends.llvm import matrix_tiles, streams
from dnnc.backends.llvm.spelling import memory_mangle, stored, vector
from dnnc.backends.runtime.frames import FRAME_BARRIER
from dnnc.ir.bounds import nonneg
from dnnc.ir.dtype import f32
from dnnc.ir.errors import InternalError
from dnnc.ir.expr import Const, Op, Ref, Var, children, value, walk
from dnnc.ir.loops import tiles
from dnnc.ir.loops.stmt import Alloc, Block, Buffer, Eval, For, If, Let, SparseRows, Stmt, Store, accesses, walk_stmts
from dnnc.ir.loops.stmt import stored as stored_buffers

if TYPE_CHECKING:
    from dnnc.backends.llvm.emit import FuncEmitter

MANY_NUMBERS = 6  # constants of an epilogue that do not fit into registers beside MANY_SUMS vectors of a tile
MANY_SUMS = 20
STACK_LIMIT = (
    128 << 10
)  # bytes; larger memory of a thread comes from the heap: threads of a caller may have small stacks


class Region:
    """An open loop or branch body: its lines so far, its current label, and what is already computed in it."""

    __slots__ = ("label", "lines", "local", "memo", "multiples", "stepped")

    def __init__(self, label: str, stepped: str = "") -> None:
        self.label = label
        self.lines: list[str] = []
        self.stepped = stepped  # the variable of an innermost loop
        self.multiples: dict[int, str] = {}  # of it, that the loop counts beside it
        self.memo: dict[str, str] = {}
        self.local: list[str] = []  # keys of memo that hold values and not addresses


def emit_block(em: FuncEmitter, b: Block) -> None:
    for s in b:
        em.now = {}
        _STATEMENTS[type(s)](em, s)


def _alloc(em: FuncEmitter, s: Alloc) -> None:
    if s.buf.space == "tile" and matrix_tiles.available(em.features):
        matrix_tiles.reserve(em, s.buf)
        return
    n = 1
    for d in s.buf.shape:
        size = value(d)
        if size is None:
            raise InternalError(f"{s.buf.name}: {s.buf.space} memory needs a constant size, got {d!r}")
        n *= size
    v = f"%{s.buf.name}.{em.fresh()}"
    size = -(-n * s.buf.dtype.bytes // 64) * 64
    if s.buf.space == "local" and size > STACK_LIMIT:
        em.decls |= {"declare noalias ptr @aligned_alloc(i64, i64)", "declare void @free(ptr)"}
        em.allocas.append(f"  {v} = call ptr @aligned_alloc(i64 64, i64 {size})")
        em.frees.append(f"  call void @free(ptr {v})")
    else:
        em.allocas.append(f"  {v} = alloca [{n} x {stored(s.buf.dtype, 1)}], align 64")
    em.values[s.buf] = v
    em.depth[v] = 0


def _let(em: FuncEmitter, s: Let) -> None:
    em.values[s.var] = em.operand(s.value, s.var.lanes)


def _store(em: FuncEmitter, s: Store) -> None:
    t, lanes = s.buf.dtype, s.lanes
    v = em.to_memory(em.operand(s.value, lanes), t, lanes)
    p, ty = em.address(s.buf, s.idx), stored(t, lanes)
    if s.buf in em.streamed and streams.whole(s):
        em.line(f"store {ty} {v}, ptr {p}, align {min(lanes * t.bytes, streams.LINE)}, !nontemporal !{{i32 1}}")
        return
    if s.limit is None:
        em.line(f"store {ty} {v}, ptr {p}, align {em.alignment(s.buf, lanes)}")
        return
    if (
        value(s.limit) == 1
        # LLVM makes one store of a masked one with one lane; of a lane that was truncated it stores what it had
        # before
    ):
        one, first = stored(t, 1), em.pure(f"extractelement {ty} {v}, i64 0", v, here=True)
        em.line(f"store {one} {first}, ptr {p}, align {t.bytes}")
        return
    m = f"<{lanes} x i1>"
    name = f"llvm.masked.store.{memory_mangle(t, lanes)}.p0"
    em.decls.add(f"declare void @{name}({ty}, ptr, i32, {m})")
    em.line(f"call void @{name}({ty} {v}, ptr {p}, i32 {t.bytes}, {m} {em.mask(s.limit, lanes)})")


def _eval(em: FuncEmitter, s: Eval) -> None:
    if s.name == "prefetch":
        em.prefetch(em.expr(s.args[0]))
    elif s.name == "barrier":
        p = em.pure(f"getelementptr i64, ptr %frame., i64 {FRAME_BARRIER}", here=True)
        f = em.effect(f"load ptr, ptr {p}, align 8")
        em.line(f"call void {f}(ptr %frame.)")
    elif isinstance(s, SparseRows):
        em.line(f"call void @{em.sparse_rows(s)}({', '.join(_arguments(em, s))})")
    elif s.name in tiles.EFFECTS:
        if matrix_tiles.available(em.features):
            matrix_tiles.emit(em, s)
        else:
            emit_block(em, tiles.meaning(s))
    elif s.name in em.names:
        args = [*_arguments(em, s), "ptr %frame.", "i64 %tid.", "i64 %nthreads."]
        em.line(f"call void @{em.names[s.name]}({', '.join(args)})")
    else:
        raise InternalError(f"{s.name} has no LLVM spelling")


def _arguments(em: FuncEmitter, s: Eval) -> list[str]:
    """Types and values of what a call passes."""
    return [f"ptr {em.expr(a)}" if isinstance(a, Ref) else f"{vector(a.dtype, a.lanes)} {em.expr(a)}" for a in s.args]


def _if(em: FuncEmitter, s: If) -> None:
    cond = em.without_unrolled(s.cond)
    known = value(cond)
    if known is not None:  # decided by unrolled loops
        emit_block(em, s.then if known else s.other)
        return
    c = em.expr(cond)
    k, outer = em.fresh(), em.regions[-1]
    lines: list[str] = []
    for name, body in (("t", s.then), ("e", s.other)) if s.other else (("t", s.then),):
        inner = Region(f".{name}{k}")
        em.regions.append(inner)
        emit_block(em, body)
        em.regions.pop()
        lines += [f".{name}{k}:", *inner.lines, f"  br label %.j{k}"]
    # the branch comes after what the arms have hoisted into this region
    outer.lines += [f"  br i1 {c}, label %.t{k}, label %.{'e' if s.other else 'j'}{k}", *lines, f".j{k}:"]
    outer.label = f".j{k}"


def _for(em: FuncEmitter, s: For) -> None:
    if s.kind == "unroll":
        lo, hi = value(em.without_unrolled(s.lo)), value(em.without_unrolled(s.hi))
        if lo is None or hi is None:
            raise InternalError(f"the extent of unrolled loop {s.var.name} is not constant")
        outermost = not em.unrolled
        kept = (
            _set_aside(em, s.body)
            if outermost and em.crowded and len(em.regions) > 1 and _numbers(s.body) > MANY_NUMBERS
            else {}
        )
        for i in range(lo, hi):
            em.unrolled[s.var] = i
            emit_block(em, s.body)
            if outermost:
                _forget_values(em)
        em.unrolled.pop(s.var, None)
        em.values.update(kept)
        em.table = "" if outermost else em.table
        return
    if s.kind not in ("range", "parallel"):
        raise InternalError(f"a {s.kind} loop has no LLVM form; vectorize it or choose another kind")
    lo_v, hi_v = em.expr(s.lo), em.expr(s.hi)
    maybe_empty = not nonneg(s.extent - 1)
    if s.kind == "parallel":
        lo_v, hi_v = _share(em, s, lo_v)
        maybe_empty = True
    _loop(em, s, lo_v, hi_v, maybe_empty)


def _set_aside(em: FuncEmitter, epilogue: Block) -> dict[Var | Buffer, str]:
    """Move tiles to memory behind their loop, at addresses unknown to LLVM, to free registers; return old places."""
    em.pool = em.pool or {}
    em.table = em.effect(f'call ptr asm sideeffect "", "=r,0"(ptr {em.pool_name})')
    read = {
        x.buf: None for x in accesses(epilogue) if vectors(x.buf) >= MANY_SUMS and x.buf not in stored_buffers(epilogue)
    }
    kept: dict[Var | Buffer, str] = {}
    for buf in read:
        ty, lanes = stored(buf.dtype, value(buf.shape[-1]) or 1), value(buf.shape[-1]) or 1
        copy = f"%{buf.name}.aside{em.fresh()}"
        em.allocas.append(f"  {copy} = alloca [{vectors(buf)} x {ty}], align 64")
        for k in range(vectors(buf)):
            at = k * lanes * buf.dtype.bytes
            p, q = (em.effect(f"getelementptr i8, ptr {base}, i64 {at}") for base in (em.values[buf], copy))
            em.line(f"store {ty} {em.effect(f'load {ty}, ptr {p}, align 64')}, ptr {q}, align 64")
        kept[buf] = em.values[buf]
        em.values[buf] = em.effect(f'call ptr asm sideeffect "", "=r,0,~{{memory}}"(ptr {copy})')
        em.depth[copy] = 0
    return kept


def _forget_values(em: FuncEmitter) -> None:
    """Load again in the next copy of an unrolled body: kept values would fill the registers that the tile needs."""
    region = em.regions[-1]
    for text in region.local:
        region.memo.pop(text, None)
    region.local.clear()


def _share(em: FuncEmitter, s: For, lo: str) -> tuple[str, str]:
    """This thread's part of a parallel loop: iterations [n*tid/nthreads, n*(tid+1)/nthreads)."""
    n = em.expr(s.extent)
    nxt = em.pure("add i64 %tid., 1")
    ends = []
    for t in ("%tid.", nxt):
        q = em.pure(f"udiv i64 {em.pure(f'mul i64 {n}, {t}', n, t)}, %nthreads.", n, t)
        ends.append(q if value(s.lo) == 0 else em.pure(f"add i64 {lo}, {q}", lo, q))
    return ends[0], ends[1]


def _loop(em: FuncEmitter, s: For, lo: str, hi: str, maybe_empty: bool) -> None:
    k, outer = em.fresh(), em.regions[-1]
    i = f"%{s.var.name}.{k}"
    inner = Region(f".h{k}", "" if any(isinstance(x, For) and x.kind != "unroll" for x in walk_stmts(s.body)) else i)
    em.regions.append(inner)
    em.values[s.var] = i
    em.depth[i] = len(em.regions) - 1
    emit_block(em, s.body)
    em.regions.pop()
    pre = outer.label
    if maybe_empty:
        outer.lines += [
            f"  %.g{k} = icmp slt i64 {lo}, {hi}",
            f"  br i1 %.g{k}, label %.p{k}, label %.x{k}",
            f".p{k}:",
        ]
        pre = f".p{k}"
    fixed = int(lo) if lo.lstrip("-").isdigit() else None
    steps = {m: (f"{m}s" if fixed is None else str(fixed * c), c) for c, m in inner.multiples.items()}
    outer.lines += [f"  {start} = mul i64 {lo}, {c}" for start, c in steps.values() if fixed is None]
    outer.lines += [
        f"  br label %.h{k}", f".h{k}:", f"  {i} = phi i64 [ {lo}, %{pre} ], [ {i}n, %{inner.label} ]",
        *(f"  {m} = phi i64 [ {start}, %{pre} ], [ {m}n, %{inner.label} ]" for m, (start, _) in steps.items()),
        *inner.lines,
        f"  {i}n = add nuw nsw i64 {i}, 1", *(f"  {m}n = add i64 {m}, {c}" for m, (_, c) in steps.items()),
        f"  %.c{k} = icmp slt i64 {i}n, {hi}", f"  br i1 %.c{k}, label %.h{k}, label %.x{k}", f".x{k}:",
    ]  # fmt: skip
    outer.label = f".x{k}"


def vectors(buf: Buffer) -> int:
    """Registers that a tile of sums occupies."""
    shape = [value(d) for d in buf.shape]
    return (
        prod(d or 0 for d in shape[:-1]) if buf.space == "register" and len(shape) > 1 and (shape[-1] or 0) > 1 else 0
    )


def _numbers(b: Block) -> int:
    """How many different vectors of a constant the stores of a block need."""
    stores = [s for s in walk_stmts(b) if isinstance(s, Store) and s.lanes > 1]
    return len(
        {
            c
            for s in stores
            for e in walk(s.value)
            for c in children(e)
            if isinstance(c, Const) and c.dtype is f32 and isinstance(e, Op)
        }
    )


_STATEMENTS: dict[type[Stmt], Callable[[FuncEmitter, Any], None]] = {
    Alloc: _alloc, Let: _let, Store: _store, Eval: _eval, SparseRows: _eval, If: _if, For: _for,
}  # fmt: skip
